"""States whose draft reads hidden states: purity, donation, forks, cutting back, limits, failures. Every wrong feature is noticed."""

from typing import Any

import jax
import pytest
import torch
from feature_truth import check_features, feature_pair, same_bits
from hypothesis import settings
from oracle import CHECKSUM_RUNS, checksum_greedy, checksum_rounds, config, output, run
from state_tree import StateTree

import funcspec as fs

PROMPTS = [list(prompt) for prompt in CHECKSUM_RUNS]


@pytest.fixture(params=[False, True], ids=["pure", "donated"])
def donate(request: pytest.FixtureRequest) -> bool:
    return request.param


def begin(target: Any, drafter: Any, prompts: list[list[int]], *, max_tokens: Any = None, **changes: Any) -> fs.SpecState:
    made = fs.init(config(**{"rows": len(prompts), "block_size": 4, "num_blocks": 400} | changes), target, drafter)
    return fs.admit(made, target, drafter, prompts, max_tokens=max_tokens, chunk=3)[0]


# ---------------------------------------------------------------- values


TARGET, DRAFTER, HEAD = feature_pair()


class Tree(StateTree):
    target, drafter, prompts = TARGET, DRAFTER, PROMPTS

    def same(self, value: fs.Snapshot, other: fs.Snapshot) -> None:
        same_bits(value, other)

    def check(self, state: fs.SpecState) -> None:
        assert not HEAD.mistakes
        if state.lease.phase == "round start":
            check_features(state)


Tree.TestCase.settings = settings(max_examples=25, stateful_step_count=20, deadline=None, derandomize=True)
test_random_trees = Tree.TestCase


@pytest.mark.parametrize("made", [1, 2, 3])
def test_old_states_in_mid_round_survive_the_next_round(made: int) -> None:
    """The next round writes real features at positions where an older state relies on what the draft handed on itself."""
    target, drafter, head = feature_pair()
    state = begin(target, drafter, PROMPTS[:1], drafts=4)
    states = [fs.prefill(run(state, target, drafter, 1), drafter)[0]]
    for _ in range(made - 1):
        states.append(fs.decode(states[-1], drafter)[0])
    expected = [fs.snapshot(fs.decode(one, drafter)[0]) for one in states]
    newest = states[-1]
    for _ in range(3):
        newest, _ = fs.verify(newest, target)
        newest, _ = fs.prefill(newest, drafter)
        newest, _ = fs.decode(newest, drafter)
    for one, value in zip(states, expected, strict=True):
        same_bits(fs.snapshot(fs.decode(one, drafter)[0]), value)
    assert not head.mistakes


@pytest.mark.parametrize("when", ["round start", "drafting", "scored"])
def test_forks_go_their_own_ways(when: str, donate: bool) -> None:
    target, drafter, head = feature_pair()
    state = run(begin(target, drafter, PROMPTS), target, drafter, 2)
    if when != "round start":
        state, _ = fs.prefill(state, drafter)
    if when == "scored":
        state, scores = fs.score(state, target)

    def go_on(one: fs.SpecState) -> fs.Snapshot:
        if when == "scored":
            one = fs.accept(one, scores, donate=donate)[0]
        elif when == "drafting":
            one = fs.verify(fs.decode(one, drafter, donate=donate)[0], target, donate=donate)[0]
        check_features(one)
        return fs.snapshot(run(one, target, drafter, 3, donate=donate))

    branches = [fs.fork(state) for _ in range(2)]
    ends = [go_on(one) for one in (branches[0], state, branches[1])]
    same_bits(ends[0], ends[1])
    same_bits(ends[0], ends[2])
    assert not head.mistakes


def test_two_outcomes_of_one_score() -> None:
    """Another decision about the same scores accepts one draft of two, and the same hidden states serve both."""
    target, drafter, head = feature_pair()
    state = fs.init(config(drafts=3, block_size=2, num_blocks=400), target, drafter)
    state, _ = fs.admit(state, target, drafter, [[5, 6, 7, 39, 1, 6, 42]])
    state, _ = fs.prefill(state, drafter)
    for _ in range(2):
        state, _ = fs.decode(state, drafter)
    scored, scores = fs.score(state, target)
    changed = scores.logits.clone()
    changed[0, 1] = torch.nn.functional.one_hot(torch.tensor(50), 97) * 1.0
    short, verdict = fs.accept(scored, fs.Scores(changed, scores.stamp))
    long, other = fs.accept(scored, scores)
    assert verdict.tokens[0].tolist() == [17, 50, -1, -1] and other.tokens[0].tolist() == [17, 73, 27, -1]
    for one in (short, long):
        assert check_features(one) == int(one.num_tokens[0]) - 1 - int(one.draft_len[0])
        check_features(run(one, target, drafter, 3))
    assert not head.mistakes


def test_arrays_that_a_caller_puts_in_keep_the_features() -> None:
    target, drafter, head = feature_pair()
    state = run(begin(target, drafter, PROMPTS), target, drafter, 2)
    expected = fs.snapshot(run(state, target, drafter, 2))
    mapped = jax.tree.map(torch.clone, state)
    same_bits(fs.snapshot(run(mapped, target, drafter, 2, donate=True)), expected)
    drafting, _ = fs.prefill(state, drafter)
    value = fs.snapshot(fs.decode(drafting, drafter)[0])
    same_bits(fs.snapshot(fs.decode(jax.tree.map(torch.clone, drafting), drafter)[0]), value)
    assert not head.mistakes


# ---------------------------------------------------------------- rows that are cut back


def rounds_from(state: fs.SpecState, row: int, counts: list[int]) -> list[tuple[int, int]]:
    """Drafted and accepted in each of the next rounds of a row, by plain arithmetic."""
    tokens = state.tokens[row, : int(state.num_tokens[row])].tolist()
    expected = checksum_rounds(tokens[:-1], len(counts), counts, limit=int(state.row_limit[row]))
    left, found = int(state.row_limit[row]) - len(tokens), []
    for wanted, (accepted, emitted) in zip(counts, expected, strict=False):
        found.append((min(wanted, max(left - 1, 0)), accepted))
        left -= len(emitted)
    return found


@pytest.mark.parametrize("kept", range(4, 12))
def test_a_row_that_is_cut_back(kept: int, donate: bool) -> None:
    """Within its last round it drafts on, further back it drafts nothing once; its neighbour notices nothing."""
    target, drafter, head = feature_pair()
    state = run(begin(target, drafter, PROMPTS[:2]), target, drafter, 4)
    assert state.num_tokens.tolist() == [11, 9]
    fed = int(state.draft_len[0])
    state = fs.truncate(state, {0: kept}, donate=donate)
    check_features(state)
    first = 3 if kept - 1 > fed else 0
    expected = [rounds_from(state, 0, [first, 3, 3]), rounds_from(state, 1, [3, 3, 3])]
    for number in range(3):
        state, verdict = fs.step_round(state, target, drafter, donate=donate)
        check_features(state)
        for row in range(2):
            assert (int(verdict.num_drafted[row]), int(verdict.num_accepted[row])) == expected[row][number]
    assert not head.mistakes
    for row in range(2):
        assert output(state, row) == checksum_greedy(PROMPTS[row], len(output(state, row)))


@pytest.mark.parametrize("late", [0, 1, 4])
def test_a_finished_row_comes_back_to_life(late: int, donate: bool) -> None:
    """Its features wait for as many rounds as the others take."""
    for kept in range(5, 11):
        target, drafter, head = feature_pair()
        state = begin(target, drafter, PROMPTS[:2], max_tokens=[8, 50])
        while int(state.is_live[0]):
            state, _ = fs.step_round(state, target, drafter, donate=donate)
        state = run(state, target, drafter, late, donate=donate)
        fed = int(state.draft_len[0])
        state = fs.truncate(state, {0: kept}, donate=donate)
        check_features(state)
        expected = rounds_from(state, 0, [3 if kept - 1 > fed else 0, 3, 3])
        for drafted, accepted in expected:
            state, verdict = fs.step_round(state, target, drafter, donate=donate)
            check_features(state)
            assert (int(verdict.num_drafted[0]), int(verdict.num_accepted[0])) == (drafted, accepted)
        while int(state.is_live[0]):
            state, _ = fs.step_round(state, target, drafter, donate=donate)
        assert output(state, 0) == checksum_greedy(PROMPTS[0], 8)
        assert not head.mistakes


def test_an_old_state_is_cut_back_beside_its_successors() -> None:
    target, drafter, head = feature_pair()
    state = run(begin(target, drafter, PROMPTS), target, drafter, 3)
    later = run(state, target, drafter, 2)
    expected = fs.snapshot(run(later, target, drafter, 2))
    short = fs.truncate(later, {row: int(state.num_tokens[row]) for row in range(3)})
    check_features(run(short, target, drafter, 3))
    check_features(run(state, target, drafter, 3))
    same_bits(fs.snapshot(run(later, target, drafter, 2)), expected)
    assert not head.mistakes


def test_a_slot_is_used_again(donate: bool) -> None:
    """Nothing of a row's former owner is read: neither its features nor its cache."""
    target, drafter, head = feature_pair()
    state = run(begin(target, drafter, PROMPTS), target, drafter, 3, donate=donate)
    state = fs.release(state, [0, 2], donate=donate)
    state, _ = fs.admit(state, target, drafter, [[9], [3, 1, 4, 1, 5]], donate=donate)
    for _ in range(5):
        check_features(state)
        state, _ = fs.step_round(state, target, drafter, donate=donate)
    state, _ = fs.prefill(state, drafter, donate=donate)
    state = fs.release(state, [1], donate=donate)  # in mid-round
    state, _ = fs.verify(fs.decode(state, drafter, donate=donate)[0], target, donate=donate)
    check_features(state)
    for row, prompt in ((0, [9]), (2, [3, 1, 4, 1, 5])):
        assert output(state, row) == checksum_greedy(prompt, len(output(state, row)))
    assert not head.mistakes


# ---------------------------------------------------------------- limits and drafters around it


@pytest.mark.parametrize("longest", [1, 2, 5, 12, 16, 17])
def test_a_draft_with_a_limit_of_its_own(longest: int, donate: bool) -> None:
    """A row that outgrows the draft drafts fewer, then none. At position x the draft reads the token of x + 1."""
    target, drafter, head = feature_pair(max_len=longest)
    prompts = [[5, 6, 7], list(range(1, 15))]
    state = begin(target, drafter, prompts, length=32)
    while fs.any_active(state):
        counts = state.num_tokens.tolist()
        state, verdict = fs.step_round(state, target, drafter, donate=donate)
        check_features(state)
        for row, n in enumerate(counts):
            if n < 32:
                assert int(verdict.num_drafted[row]) == max(min(3, longest + 2 - n, 32 - n - 1), 0)
                assert int(state.draft_len[row]) == min(n - 1, longest)
    assert not head.mistakes
    for row, prompt in enumerate(prompts):
        assert output(state, row) == checksum_greedy(prompt, 32 - len(prompt))
        cut = fs.truncate(state, {row: len(prompt) + 1})
        cut = run(cut, target, drafter, 3)
        assert output(cut, row) == checksum_greedy(prompt, len(output(cut, row))) and not head.mistakes


def test_drafting_nothing_at_all(donate: bool) -> None:
    target, drafter, head = feature_pair()
    for drafts, wanted in ((0, None), (3, 0)):
        state = begin(target, drafter, PROMPTS, drafts=drafts, max_tokens=12)
        while fs.any_active(state):
            state, verdict = fs.step_round(state, target, drafter, num_draft=wanted, donate=donate)
            check_features(state)
            assert not verdict.num_drafted.any()
        assert [output(state, row) for row in range(3)] == [checksum_greedy(prompt, 12) for prompt in PROMPTS]
    assert not head.mistakes


def test_rounds_of_every_size(donate: bool) -> None:
    target, drafter, head = feature_pair()
    state = begin(target, drafter, PROMPTS, drafts=5)
    for number in range(12):
        wanted = [(number * 7 + 3 * row) % 6 for row in range(3)]
        expected = [rounds_from(state, row, [wanted[row]])[0] for row in range(3)]
        state, verdict = fs.step_round(state, target, drafter, num_draft=wanted, donate=donate)
        check_features(state)
        assert list(zip(verdict.num_drafted.tolist(), verdict.num_accepted.tolist(), strict=True)) == expected
    assert not head.mistakes
