"""Bad arguments: one clear message for each, and a state that never notices, donated or not."""

import re

import pytest
from bad_arguments import ARGUMENTS
from bad_objects import OBJECTS
from refusals import DRAFTER, MESSAGE, TARGET, Bad, assert_same, make_world, refusal, value

import funcspec as fs
from funcspec.errors import FuncspecError

MATRIX = ARGUMENTS + OBJECTS


@pytest.mark.parametrize("donate", [False, True], ids=["pure", "donated"])
@pytest.mark.parametrize("bad", [pytest.param(bad, id=bad.name) for bad in MATRIX])
def test_bad_input_is_refused_and_changes_nothing(bad: Bad, donate: bool) -> None:
    world = make_world(donate)
    before = {name: value(state) for name, state in world.states().items()}
    error = refusal(bad, world)
    assert isinstance(error, bad.error), f"{type(error).__name__}: {error}"
    assert isinstance(error, FuncspecError)
    found = MESSAGE.match(str(error))
    assert found, f"no argument, expectation, finding or fix in {str(error)!r}"
    assert re.search(bad.message, str(error)), str(error)
    assert len(str(error)) < 800
    for name, state in world.states().items():
        assert_same(before[name], value(state))


def test_every_call_has_bad_input() -> None:
    calls = {bad.name.split(":")[0] for bad in MATRIX}
    names = "SpecConfig init admit release fork prefill decode score accept verify step_round generate snapshot restore any_active"
    assert {*names.split(), "standalone", "from_logits", "TableModel"} <= calls
    assert len({bad.name for bad in MATRIX}) == len(MATRIX)


@pytest.mark.parametrize("donate", [False, True], ids=["pure", "donated"])
def test_after_all_refusals_a_run_goes_on_as_if_nothing_had_happened(donate: bool) -> None:
    """Refusals may not add up either: after all of them the same blocks are free and the next rounds are the same."""
    quiet, world = make_world(donate), make_world(donate)
    for bad in MATRIX:
        refusal(bad, world)
    for made, expected in zip(world.states().values(), quiet.states().values(), strict=True):
        for branch, other in ((made.lease.target, expected.lease.target), (made.lease.draft, expected.lease.draft)):
            assert branch is other is None or branch.pool.num_free_blocks == other.pool.num_free_blocks
    ends = []
    for one in (quiet, world):
        state, _ = fs.accept(one.scored, one.scores, donate=donate)
        for _ in range(3):
            state, _ = fs.step_round(state, TARGET, DRAFTER, donate=donate)
        other, _ = fs.verify(one.drafting, TARGET, donate=donate)
        ends.append((fs.snapshot(state), fs.snapshot(fs.step_round(one.state, TARGET, DRAFTER, donate=donate)[0]), fs.snapshot(other)))
    assert ends[0] == ends[1]
