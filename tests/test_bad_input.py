"""Bad arguments: one clear message for each, and a state that never notices, donated or not."""

import importlib
import inspect
import pkgutil
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from bad_arguments import ARGUMENTS
from bad_makers import HAS_TRANSFORMERS, MAKERS
from bad_objects import OBJECTS
from bad_states import STATES
from bad_tools import TOOLS
from refusals import DRAFTER, MESSAGE, TARGET, Bad, World, assert_same, make_world, refusal, value

import funcspec as fs
from funcspec.errors import BackendError, FuncspecError

OF_STATES = [*ARGUMENTS, *OBJECTS, *STATES]
MATRIX = [*OF_STATES, *MAKERS, *TOOLS]
CASES = [(bad, False) for bad in MATRIX] + [(bad, True) for bad in OF_STATES]

NOT_HERE = {
    "funcspec.kernels": "operations: tests/kernels looks at what they refuse",
    "funcspec.transitions": "open steps, which only steps and drafters use",
    "funcspec.carried": "what lies behind states",
    "funcspec.leases": "what lies behind states",
    "funcspec.loading": "what the command line loads: tests/test_cli.py looks at what it refuses",
    "funcspec.drafters.": "checks that the functions of funcspec.drafters share",
    "funcspec.models.": "models of one kind, with tests of their own",
    "funcspec.exact": "the specification in NumPy, which tests give arrays to",
    "funcspec.noise": "the specification in NumPy, which tests give arrays to",
}
"""Modules whose public functions are not in the matrix, by the beginnings of their names."""

PLAIN = {
    "a record that the library fills in": "Admitted Captured Comparison Draft Emission HuggingFaceModel Piece Run Scores ShapeReport "
    "Snapshot Statistics TimedComparison Verdict",
    "a record that is looked at by whom it is given to": "ForwardBatch Job KVEntry KVSpec",
    "made by a function of funcspec.drafters or funcspec.interop": "BestOf BlockDrafter Cascade Eagle Fallback Fixed LiftedModel Medusa "
    "Mtp Ngram Parallel Standalone Suffix",
    "a protocol": "Drafter Model Proposer",
    "an error": "DonatedStateError FuncspecError",
    "a toy whose sizes init looks at": "ChecksumDraft ChecksumModel",
    "a part of same_as_plain and compare, which look at their arguments": "check_comparable first_difference preference_margin",
    "the layout of states": "field_shape",
}
"""Public names that refuse nothing themselves, by the reason."""

NOT_REFUSED = {
    ("SpecState", "lease"): "made by init and by steps",
    ("SpecState", "arrays"): "looked at by the first step",
    ("place_proposals", "transition"): "what a step gives to its drafter",
    ("place_proposals", "keep_others"): "a constant of a drafter",
    ("capture", "arguments"): "given to the step",
    ("capture", "settings"): "given to the step",
}
"""Arguments of which nothing is refused, and why."""


@pytest.fixture(scope="module")
def worlds(tmp_path_factory: pytest.TempPathFactory) -> Callable[[bool], tuple[World, dict[str, Any]]]:
    """States and their values, made anew once a call has spoiled them."""
    made: dict[bool, tuple[World, dict[str, Any]]] = {}

    def get(donate: bool, anew: bool = False) -> tuple[World, dict[str, Any]]:
        if anew or donate not in made:
            world = make_world(donate, tmp_path_factory.mktemp("world"))
            made[donate] = world, {name: value(state) for name, state in world.states().items()}
        return made[donate]

    return get


@pytest.mark.parametrize(("bad", "donate"), [pytest.param(*case, id=f"{case[0].name}{' donated' * case[1]}") for case in CASES])
def test_bad_input_is_refused_and_changes_nothing(bad: Bad, donate: bool, worlds: Any) -> None:
    world, before = worlds(donate)
    files = sorted(world.folder.iterdir())
    try:
        error = refusal(bad, world)
        assert isinstance(error, bad.error), f"{type(error).__name__}: {error}"
        assert isinstance(error, FuncspecError) and isinstance(error, ValueError | TypeError | BackendError)
        found = MESSAGE.match(str(error))
        assert found, f"no argument, expectation, finding or fix in {str(error)!r}"
        assert re.search(bad.message, str(error)), str(error)
        assert len(str(error)) < 800
        for name, state in world.states().items():
            assert_same(before[name], value(state))
        assert world.dead.lease.dead and sorted(world.folder.iterdir()) == files
    except BaseException:
        worlds(donate, anew=True)
        raise


def public() -> dict[str, Any]:
    """Everything callable that a module lists in `__all__`, by its own name."""
    found: dict[str, Any] = {}
    names = ["funcspec", *(module.name for module in pkgutil.walk_packages(fs.__path__, "funcspec."))]
    for module in map(importlib.import_module, [name for name in names if not name.startswith(tuple(NOT_HERE))]):
        for name in getattr(module, "__all__", ()):
            if callable(member := getattr(module, name)):
                assert found.setdefault(name, member) is member, f"two things are called {name}"
    return found


def test_every_public_function_has_bad_input_for_every_argument(tmp_path: Path) -> None:
    """A new function, or a new argument, comes with what it refuses, or with a reason why it refuses nothing."""
    assert len({bad.name for bad in MATRIX}) == len(MATRIX)
    plain = {name for names in PLAIN.values() for name in names.split()}
    left = {name: member for name, member in public().items() if name not in plain}
    assert plain <= set(public()), "no longer public"
    if not HAS_TRANSFORMERS:
        del left["huggingface"]
    refused: dict[str, set[str]] = {name: set() for name in left}
    world = make_world(False, tmp_path)
    for bad in MATRIX:
        found = MESSAGE.match(str(refusal(bad, world)))
        if found and bad.function in refused:
            refused[bad.function].add(re.split(r"[.\[]", found["argument"])[0])
    missing = [
        (name, argument)
        for name, member in left.items()
        for argument in inspect.signature(member).parameters
        if argument not in refused[name] and (name, argument) not in NOT_REFUSED
    ]
    assert not missing


@pytest.mark.parametrize("donate", [False, True], ids=["pure", "donated"])
def test_after_all_refusals_a_run_goes_on_as_if_nothing_had_happened(donate: bool, tmp_path: Path) -> None:
    """Refusals may not add up either: after all of them the same blocks are free and the next rounds are the same."""
    quiet, world = make_world(donate, tmp_path), make_world(donate, tmp_path)
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
