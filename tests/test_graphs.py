"""Captured rounds: equal to eager ones, no waiting, no allocation, everything that varies is data."""

from collections.abc import Callable

import jax
import pytest
import torch
from oracle import config, output, run

import funcspec as fs
from funcspec import graphs
from funcspec.errors import BackendError, StateError, StepOrderError
from funcspec.interop import jax_model
from funcspec.models import ChecksumDraft, ChecksumModel
from funcspec.models.llama import Llama, LlamaConfig, random_llama

SHAPE = LlamaConfig(
    vocab_size=97, hidden_size=64, intermediate_size=128, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=16, max_len=512
)
gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
PROMPTS = [[5, 6, 7], [1], [40, 2, 9, 9]]


def make(rule: fs.rules.Rule = fs.rules.greedy, rows: int = 4, drafts: int = 3) -> tuple[fs.SpecState, Llama, fs.drafters.Standalone]:
    target = random_llama(SHAPE, 0, device="cuda")
    drafter = fs.drafters.standalone(random_llama(SHAPE, 0, device="cuda"))
    state = fs.init(config(rows=rows, length=256, drafts=drafts, rule=rule, device="cuda", num_blocks=400), target, drafter)
    temperature = [0.0, 0.7, 1.3] if rule.samples else 0.0
    state, _ = fs.admit(state, target, drafter, PROMPTS, seeds=[1, -2, 3], temperature=temperature, max_tokens=60)
    return state, target, drafter


def test_capture_needs_a_gpu() -> None:
    state = fs.init(config(), ChecksumModel())
    with pytest.raises(BackendError, match="state: expected a state on a GPU, got one on cpu"):
        graphs.capture(fs.verify, state, ChecksumModel())


def test_an_heir_in_the_captured_buffers_is_not_overwritten() -> None:
    """`release` and `admit` pass the buffers on; what lives in them then is protected too. (A stand-in for the graph is enough.)"""

    class NoGraph:
        def replay(self) -> None:
            pass

    target = ChecksumModel()
    state, _ = fs.admit(fs.init(config(rows=2, drafts=0), target), target, None, [[5, 6, 7], [9]])
    other, twin = fs.fork(state), fs.fork(state)
    captured = graphs.Captured("captured verify", NoGraph(), twin.lease, twin.lease, None)
    del twin
    first, _ = captured(state)
    first = fs.release(first, [0], donate=True)
    counts = first.num_tokens.tolist()
    with pytest.raises(StateError, match="got another while that one lives"):
        captured(other)
    assert first.num_tokens.tolist() == counts
    del first
    captured(other)


def tokens_read_late(step: Callable[[fs.SpecState], tuple[fs.SpecState, fs.Verdict]], state: fs.SpecState) -> tuple[list[list[int]], int]:
    """Tokens by row, and how many rounds were read."""
    rows: list[list[int]] = [[] for _ in range(state.config.max_num_reqs)]
    newest, rounds = state, 0
    for after, verdict in graphs.one_round_late(step, state):
        newest = after
        assert verdict.tokens.device.type == "cpu"
        rounds += 1
        for row, (tokens, count) in enumerate(zip(verdict.tokens.tolist(), verdict.num_emitted.tolist(), strict=True)):
            rows[row] += tokens[:count]
    assert not fs.any_active(newest)
    return rows, rounds


@pytest.mark.parametrize("drafts", [0, 1, 3])
def test_reading_one_round_late_changes_no_token(drafts: int) -> None:
    """Rows that stop at different times, one that ends at its first token, and one that is idle."""
    target, drafter = ChecksumModel(), fs.drafters.standalone(ChecksumDraft()) if drafts else None
    settings = config(rows=5, length=64, drafts=drafts)
    prompts, limits, stops = [[5, 6, 7], [1], [40, 2, 9, 9], [8]], [30, 9, 25, 1], [[17], [], [], []]
    expected: list[list[int]] = [[] for _ in prompts]
    rounds = 0
    for emission in fs.generate(settings, target, drafter, prompts, max_tokens=limits, stop_ids=stops):
        expected[emission.prompt_index] += emission.tokens
        rounds = max(rounds, emission.round)
    state, first = fs.admit(fs.init(settings, target, drafter), target, drafter, prompts, max_tokens=limits, stop_ids=stops)

    def step(state: fs.SpecState) -> tuple[fs.SpecState, fs.Verdict]:
        return fs.step_round(state, target, drafter, donate=True)

    emitted, count = tokens_read_late(step, state)
    found = [[token, *emitted[row]] for row, token in zip(first.rows, first.tokens, strict=True)]
    assert found == expected and len({len(tokens) for tokens in expected}) > 2 and expected[0][-1] == 17
    assert count == rounds and emitted[4] == []


def test_reading_late_without_live_rows_ends_at_once() -> None:
    target = ChecksumModel()
    empty = fs.init(config(drafts=0), target)
    assert tokens_read_late(lambda state: fs.verify(state, target), empty)[1] == 1
    device = "cuda" if jax.default_backend() == "gpu" else "cpu"
    with pytest.raises(BackendError, match="state: expected a state of torch"):
        next(graphs.one_round_late(fs.verify, fs.init(config(device=device), jax_model(target))))  # type: ignore[arg-type]


@gpu
@pytest.mark.gpu
def test_captured_rounds_are_read_late_without_waiting() -> None:
    state, target, drafter = make(fs.rules.coupled)
    eager = tokens_read_late(lambda state: fs.step_round(state, target, drafter), state)
    captured = graphs.capture(fs.step_round, state, target, drafter)
    assert tokens_read_late(lambda state: captured(state, copy=False), fs.fork(state)) == eager


@gpu
@pytest.mark.gpu
@pytest.mark.parametrize("rule", [fs.rules.greedy, fs.rules.coupled])
def test_replays_equal_eager_rounds(rule: fs.rules.Rule) -> None:
    state, target, drafter = make(rule)
    wanted = torch.zeros(4, dtype=torch.int32, device="cuda")
    before = fs.snapshot(state)
    captured = graphs.capture(fs.step_round, state, target, drafter, num_draft=wanted)
    assert fs.snapshot(state) == before
    eager = state
    replayed = fs.fork(state)
    for number in range(25):
        counts = [3, number % 4, 0, 2]
        wanted.copy_(torch.tensor(counts, dtype=torch.int32))
        eager, expected = fs.step_round(eager, target, drafter, num_draft=counts)
        replayed, verdict = captured(replayed)
        assert torch.equal(verdict.tokens, expected.tokens) and torch.equal(verdict.origin, expected.origin), number
        assert torch.equal(verdict.num_drafted, expected.num_drafted)
    assert fs.snapshot(replayed, kv=False) == fs.snapshot(eager, kv=False)


@gpu
@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:Synchronization debug mode")
def test_replays_neither_wait_nor_allocate() -> None:
    state, target, drafter = make()
    captured = graphs.capture(fs.step_round, state, target, drafter)
    state, _ = captured(state, copy=False)
    torch.cuda.synchronize()
    before = torch.cuda.memory_stats()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(100):
            state, verdict = captured(state, copy=False)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    after = torch.cuda.memory_stats()
    for counter in ("allocation.all.allocated", "allocated_bytes.all.allocated", "num_alloc_retries"):
        assert after[counter] == before[counter], counter
    assert verdict is captured.info and not fs.any_active(state)


@gpu
@pytest.mark.gpu
def test_company_changes_between_replays() -> None:
    state, target, drafter = make(rows=4)
    captured = graphs.capture(fs.step_round, state, target, drafter)
    arena = None
    for number in range(12):
        state, _ = captured(state)
        arena = arena or state.tokens.data_ptr()
        assert state.tokens.data_ptr() == arena
        if number == 3:
            state = fs.release(state, [1], donate=True)
        if number == 5:
            state, _ = fs.admit(state, target, drafter, [[8, 8, 8], [9]], seeds=[7, 8], max_tokens=30, rows=[1, 3], donate=True)
    for row, prompt in ((0, PROMPTS[0]), (1, [8, 8, 8]), (2, PROMPTS[2]), (3, [9])):
        alone = fs.init(config(rows=4, length=256, device="cuda"), target, drafter)
        alone, _ = fs.admit(alone, target, drafter, [prompt], rows=[row])
        alone = run(alone, target, drafter, 12)
        count = len(output(state, row))
        assert count > 6 and output(state, row) == output(alone, row)[:count]


@gpu
@pytest.mark.gpu
def test_branches_and_old_states() -> None:
    state, target, drafter = make()
    captured = graphs.capture(fs.step_round, state, target, drafter)
    expected = run(state, target, drafter, 3)
    kept = fs.fork(state)
    for _ in range(2):
        again = fs.fork(kept)
        for _ in range(3):
            again, info = captured(again)
        assert fs.snapshot(again, kv=False) == fs.snapshot(expected, kv=False)
        with pytest.raises(StateError, match="got another while that one lives"):
            captured(fs.fork(kept))
        del again
    consumed = fs.fork(kept)
    captured(consumed)
    with pytest.raises(fs.DonatedStateError, match="consumed by captured step_round"):
        captured(consumed)
    assert info.tokens.shape == (4, 4) and fs.any_active(kept)


@gpu
@pytest.mark.gpu
def test_custom_compositions_and_refusals() -> None:
    state, target, drafter = make()

    def one_draft(state: fs.SpecState, target: Llama, drafter: fs.drafters.Standalone, *, donate: bool) -> tuple[fs.SpecState, tuple]:
        state, draft = fs.prefill(state, drafter, donate=donate)
        state, verdict = fs.verify(state, target, donate=True)
        return state, (draft, verdict)

    captured = graphs.capture(one_draft, state, target, drafter)
    eager, (_, expected) = one_draft(state, target, drafter, donate=False)
    replayed, (draft, verdict) = captured(fs.fork(state))
    assert torch.equal(verdict.tokens, expected.tokens) and draft.step == 1
    assert fs.snapshot(replayed, kv=False) == fs.snapshot(eager, kv=False)
    drafting, _ = fs.prefill(state, drafter)
    with pytest.raises(StepOrderError):
        captured(drafting)
    other = make()[0]
    del replayed
    with pytest.raises(StateError, match="pools that were captured"):
        captured(other)
    with pytest.raises(StepOrderError, match="got one that ends scored"):
        graphs.capture(fs.score, drafting, target)


@gpu
@pytest.mark.gpu
def test_what_waits_cannot_be_captured() -> None:
    target, drafter = ChecksumModel(), fs.drafters.standalone(ChecksumDraft())  # toys that read the device on the host
    state = fs.init(config(device="cuda"), target, drafter)
    state, _ = fs.admit(state, target, drafter, [[5, 6, 7]])
    with pytest.raises(BackendError, match="step: expected a step that never reads the device on the host"):
        graphs.capture(fs.step_round, state, target, drafter)
    torch.cuda.synchronize()
    assert output(run(state, target, drafter, 2), 0)[:2] == [39, 1]
