"""What holds for every drafter there is: one battery over all of them."""

import pytest
import torch
from all_drafters import NAMES, drafted, made
from one_pass import DRAFTS, TARGET, VOCAB, finish, rows_of, start
from oracle import output

import funcspec as fs
from funcspec import drafters
from funcspec.drafters import Drafter, Proposer


@pytest.fixture(params=NAMES)
def drafter(request: pytest.FixtureRequest) -> Drafter:
    return made(request.param)


def test_every_public_drafter_is_in_the_battery() -> None:
    functions = {name for name in drafters.__all__ if name[0].islower()} - {"load_draft", "place_proposals"}
    tested = {name.split(",")[0].split(" ")[0] for name in NAMES}
    assert functions == (tested - {"eagle3", "pard", "p-eagle"}) | {"parallel"}


def test_it_is_a_drafter(drafter: Drafter) -> None:
    assert isinstance(drafter, Drafter)
    assert drafter.proposal in ("sampled", "argmax", "point")
    assert (drafter.proposal == "point") == (drafter.kv_model is None)
    assert isinstance(drafter, Proposer) or drafter.kv_model is not None
    with pytest.raises((AttributeError, TypeError)):
        drafter.proposal = "other"  # type: ignore[misc]


@pytest.mark.parametrize("most", [0, 1, DRAFTS])
def test_drafts_have_their_shape_and_their_limits(drafter: Drafter, most: int) -> None:
    """Rows near their end, one at its last token, an idle one: never more drafts than planned, and none past a row's limit."""
    state = start(drafter, fs.rules.coupled, drafts=most, max_tokens=[6, 2, 19])
    while rows_of(state):
        limits = (state.row_limit - state.num_tokens - 1).clamp(0, most) * state.is_live
        before = state.tokens.clone()
        state, draft = drafted(state, drafter)
        assert draft.tokens.shape == (4, most)
        assert (draft.num_draft <= limits).all()
        made = (draft.tokens >= 0).sum(1)
        assert (made <= draft.num_draft).all() and (draft.tokens < VOCAB).all()
        for row in range(4):
            count = int(state.num_tokens[row])
            assert draft.tokens[row].tolist() == draft.tokens[row, : made[row]].tolist() + [-1] * (most - int(made[row]))
            assert state.tokens[row, count : count + int(made[row])].tolist() == draft.tokens[row, : made[row]].tolist()
            assert torch.equal(state.tokens[row, :count], before[row, :count])
        state, verdict = fs.verify(state, TARGET)
        assert torch.equal(verdict.num_drafted, made.int())


@pytest.mark.parametrize("rule", [fs.rules.greedy, fs.rules.coupled], ids=repr)
def test_nothing_is_lost(drafter: Drafter, rule: fs.rules.Rule) -> None:
    """Text equals plain decoding in the same shape, whatever number of drafts is wanted from round to round and row to row."""
    found = []
    for wanted in ([[3, 0, 2, 1], [1, 1, 0, 3], [2, 2, 3, 0]], [0]):
        state, number = start(drafter, rule), 0
        while rows_of(state):
            state, _ = fs.step_round(state, TARGET, drafter, num_draft=wanted[number % len(wanted)], donate=True)
            number += 1
        found.append([output(state, row) for row in range(4)])
    assert found[0] == found[1]
    assert all(found[0][row] for row in (0, 2, 3))


@pytest.mark.parametrize("rule", [fs.rules.coupled, fs.rules.ratio], ids=repr)
def test_steps_are_pure_and_donation_changes_nothing(drafter: Drafter, rule: fs.rules.Rule) -> None:
    pure, donated = start(drafter, rule), start(drafter, rule)
    for _ in range(4):
        before = fs.snapshot(pure)
        once, first = drafted(pure, drafter)
        twice, again = drafted(pure, drafter)
        assert torch.equal(first.tokens, again.tokens)
        assert fs.snapshot(once) == fs.snapshot(twice)
        donated, same = drafted(donated, drafter, donate=True)
        assert torch.equal(first.tokens, same.tokens)
        assert fs.snapshot(pure) == before
        pure, verdict = fs.verify(once, TARGET)
        donated, other = fs.verify(donated, TARGET, donate=True)
        assert torch.equal(verdict.tokens, other.tokens)
    assert fs.snapshot(pure) == fs.snapshot(donated)


@pytest.mark.parametrize("rule", [fs.rules.coupled, fs.rules.ratio], ids=repr)
def test_branches_and_copies_go_on_alike(drafter: Drafter, rule: fs.rules.Rule) -> None:
    state = start(drafter, rule)
    for _ in range(2):
        state, _ = fs.step_round(state, TARGET, drafter)
    middle, _ = fs.prefill(state, drafter)
    twin, taken = fs.fork(middle), fs.restore(fs.snapshot(middle))
    expected = finish(middle, drafter)
    assert finish(twin, drafter, donate=True) == expected
    assert finish(taken, drafter, donate=True) == expected
    assert finish(middle, drafter, donate=True) == expected


def test_a_row_does_not_depend_on_its_company(drafter: Drafter) -> None:
    """Each request alone, in another row of a larger state: the same tokens and, unless rows share texts, the same drafts."""
    whole = start(drafter, fs.rules.coupled)
    companions = {row: [] for row in (0, 2, 3)}
    for _ in range(5):
        whole, draft = drafted(whole, drafter)
        whole, verdict = fs.verify(whole, TARGET)
        for row, seen in companions.items():
            seen.append((draft.tokens[row].tolist(), verdict.tokens[row].tolist()))
    place = {0: 0, 2: 1, 3: 2}
    for row, seen in companions.items():
        state = fs.init(whole.config, TARGET, drafter)
        prompt = whole.tokens[row, : int(whole.prompt_len[row])].tolist()
        seed = [3, -4, 2**63 - 1][place[row]]
        heat = [0.8, 1.5, 0.0][place[row]]
        state, _ = fs.admit(state, TARGET, drafter, [prompt], seeds=[seed], temperature=heat, rows=[row])
        alone = []
        for _ in range(5):
            state, draft = drafted(state, drafter)
            state, verdict = fs.verify(state, TARGET)
            alone.append((draft.tokens[row].tolist(), verdict.tokens[row].tolist()))
        assert alone == seen


def test_a_row_that_lets_others_in_and_out_is_not_disturbed(drafter: Drafter) -> None:
    """Preempted in mid-way, taken in again in another row, while others come and go."""
    quiet = start(drafter, fs.rules.coupled)
    busy = fs.fork(quiet)
    for number in range(8):
        quiet, _ = fs.step_round(quiet, TARGET, drafter, donate=True)
        busy, _ = fs.step_round(busy, TARGET, drafter, donate=True)
        if number == 1:
            paused, busy = fs.snapshot(busy, rows=[0]), fs.release(busy, [0])
            busy, _ = fs.admit(busy, TARGET, drafter, [[9, 9, 1]], seeds=[5], temperature=1.0, rows=[0])
        if number == 2:
            busy = fs.resume(busy, paused, rows=[1])
    while rows_of(quiet):
        quiet, _ = fs.step_round(quiet, TARGET, drafter)
    while rows_of(busy):
        busy, _ = fs.step_round(busy, TARGET, drafter)
    assert [output(busy, row) for row in (1, 2, 3)] == [output(quiet, row) for row in (0, 2, 3)]
