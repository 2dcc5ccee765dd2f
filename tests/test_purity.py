"""States are values: random trees of forks, old-state steps, donated steps and releases against fresh runs."""

import pytest
from hypothesis import settings
from oracle import checksum_greedy, config, kv_bytes, output, pair, run
from state_tree import StateTree

import funcspec as fs
from funcspec.errors import PoolExhaustedError
from funcspec.models import ChecksumDraft, ChecksumModel

TARGET, DRAFTER = pair()
PROMPTS = ([5, 6, 7], [1], [40, 2, 9, 9], [8, 8, 8, 8, 8, 8])


class Tree(StateTree):
    target, drafter, prompts = TARGET, DRAFTER, PROMPTS


Tree.TestCase.settings = settings(max_examples=60, stateful_step_count=25, deadline=None, derandomize=True)
test_random_trees = Tree.TestCase


def test_old_states_in_mid_round_survive_the_next_round() -> None:
    """The next round reuses the places of rejected drafts; a state that relies on them must not notice."""
    state = fs.init(config(block_size=4, num_blocks=64), TARGET, DRAFTER)
    state, _ = fs.admit(state, TARGET, DRAFTER, [[5, 6, 7]])
    first, _ = fs.prefill(state, DRAFTER)
    second, _ = fs.decode(first, DRAFTER)
    expected = fs.snapshot(fs.decode(second, DRAFTER)[0])
    newest, _ = fs.decode(second, DRAFTER)
    for _ in range(4):
        newest, _ = fs.verify(newest, TARGET)
        newest, _ = fs.prefill(newest, DRAFTER)
        newest, _ = fs.decode(newest, DRAFTER)
    assert fs.snapshot(fs.decode(second, DRAFTER)[0]) == expected
    assert fs.snapshot(fs.decode(fs.decode(first, DRAFTER)[0], DRAFTER)[0]) == expected


def test_scored_states_can_be_accepted_twice() -> None:
    state = fs.init(config(block_size=2, num_blocks=400), TARGET, fs.drafters.standalone(TARGET))
    drafter = fs.drafters.standalone(TARGET)
    state, _ = fs.admit(state, TARGET, drafter, [[5, 6, 7]])
    for _ in range(3):
        state, _ = fs.prefill(state, drafter) if _ == 0 else fs.decode(state, drafter)
    scored, scores = fs.score(state, TARGET)
    all_wrong = scores.logits.clone()
    all_wrong[0, 0] = 0
    all_wrong[0, 0, 50] = 1
    short, _ = fs.accept(scored, fs.Scores(all_wrong, scores.stamp))
    shorter = fs.step_round(short, TARGET, drafter)[0]
    long, _ = fs.accept(scored, scores)
    shorter = fs.step_round(shorter, TARGET, drafter)[0]
    for _ in range(3):
        long, _ = fs.step_round(long, TARGET, drafter)
    assert output(long, 0) == checksum_greedy([5, 6, 7], len(output(long, 0)))
    assert output(shorter, 0)[2:] == checksum_greedy([5, 6, 7, 39, 50], len(output(shorter, 0)) - 2)


def test_a_chain_in_place_copies_no_block() -> None:
    state = fs.init(config(num_blocks=8), TARGET, DRAFTER)
    state, _ = fs.admit(state, TARGET, DRAFTER, [[5, 6, 7]], max_tokens=40)
    free = state.lease.target.pool.num_free_blocks, state.lease.draft.pool.num_free_blocks
    rows = state.lease.target.rows
    while fs.any_active(state):
        state, _ = fs.prefill(state, DRAFTER)
        state, _ = fs.decode(state, DRAFTER)
        state, _ = fs.verify(state, TARGET)
    assert state.lease.target.rows == rows
    assert (state.lease.target.pool.num_free_blocks, state.lease.draft.pool.num_free_blocks) == free


def test_branching_shares_blocks_below_the_first_write() -> None:
    state = fs.init(config(length=64, block_size=4), TARGET, DRAFTER)
    state, _ = fs.admit(state, TARGET, DRAFTER, [list(range(1, 31))], max_tokens=8)
    other = fs.fork(state)
    state, _ = fs.step_round(state, TARGET, DRAFTER)
    other, _ = fs.step_round(other, TARGET, DRAFTER)
    shared = set(state.lease.target.rows[0].ids) & set(other.lease.target.rows[0].ids)
    assert len(shared) == 30 // 4


def test_exhaustion_is_refused_before_anything_is_written() -> None:
    state = fs.init(config(length=32, block_size=4, num_blocks=16), TARGET, DRAFTER)
    state, _ = fs.admit(state, TARGET, DRAFTER, [[5, 6, 7]])
    newest, _ = fs.step_round(state, TARGET, DRAFTER)
    branch, _ = fs.step_round(state, TARGET, DRAFTER)
    expected, kv = fs.snapshot(branch), kv_bytes(state)
    before = fs.snapshot(state)
    for donate in (False, True):
        with pytest.raises(PoolExhaustedError, match=r"expected 8 free blocks in the draft pool, got 0 of 16\. Fix: drop old states"):
            fs.step_round(state, TARGET, DRAFTER, donate=donate)
    assert fs.snapshot(state) == before
    assert all((a == b).all() for a, b in zip(kv, kv_bytes(state), strict=True))
    del branch
    assert fs.snapshot(fs.step_round(state, TARGET, DRAFTER)[0]) == expected == fs.snapshot(newest)


@pytest.mark.parametrize("order", ["loser first", "winner first"])
def test_two_outcomes_of_one_score_live_on_apart(order: str) -> None:
    """They rely on different lengths of the same places: neither may write in place, whatever dies in between."""
    target, drafter = ChecksumModel(spread=True), fs.drafters.standalone(ChecksumDraft(spread=True))
    checked = 0
    for seed in range(12):
        state = fs.init(config(drafts=4, rule=fs.rules.coupled, num_blocks=200), target, drafter)
        state, _ = fs.admit(state, target, drafter, [list(range(1, 30))], seeds=[seed], temperature=0.8)
        state, _ = fs.prefill(state, drafter)
        for _ in range(3):
            state, _ = fs.decode(state, drafter)
        state, scores = fs.score(state, target)
        branch = fs.fork(state, seeds=[seed + 1000])
        first, verdict = fs.accept(branch, scores)
        second, other = fs.accept(state, scores)
        checked += int(verdict.num_emitted[0]) != int(other.num_emitted[0])
        del state, branch
        wanted = [run(fs.restore(fs.snapshot(one)), target, drafter, 3) for one in (first, second)]
        if order == "loser first":
            second, _ = fs.step_round(second, target, drafter)
            first = run(first, target, drafter, 3)
            second = run(second, target, drafter, 2)
        else:
            first = run(first, target, drafter, 3)
            second = run(second, target, drafter, 3)
        assert [fs.snapshot(one) for one in (first, second)] == [fs.snapshot(one) for one in wanted]
    assert checked > 2


@pytest.mark.parametrize("prompt", [[5, 6, 0], [5, 6, 7, 9, 8], [1], [2, 3]])
def test_a_restored_state_in_mid_round_is_guarded_too(prompt: list[int]) -> None:
    state = fs.init(config(), TARGET, DRAFTER)
    state, _ = fs.admit(state, TARGET, DRAFTER, [prompt])
    state, _ = fs.prefill(state, DRAFTER)
    state, _ = fs.decode(state, DRAFTER)
    restored = fs.restore(fs.snapshot(state))
    expected = fs.snapshot(restored)
    later, _ = fs.verify(restored, TARGET)
    fs.prefill(later, DRAFTER)
    assert fs.snapshot(restored) == expected
    assert fs.snapshot(fs.decode(restored, DRAFTER)[0]) == fs.snapshot(fs.decode(state, DRAFTER)[0])
