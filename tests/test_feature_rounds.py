"""Rounds whose draft reads hidden states: with prompt lookup in front, captured, failing, and with models that do not fit."""

from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from feature_toys import FeatureDraft, FeatureTarget
from feature_truth import check_features, feature_pair, same_bits
from lookup import checksum, drafted, emitted
from oracle import VOCAB, checksum_greedy, config, output, run
from watching import free_blocks

import funcspec as fs
from funcspec import graphs
from funcspec.drafters import fallback, ngram, standalone
from funcspec.drafters.eagle import eagle
from funcspec.errors import ModelError, StateError
from funcspec.leases import Buffers
from funcspec.models import ChecksumModel
from funcspec.models.base import KV, FeatureSpec, ForwardBatch
from funcspec.transitions import TorchTransition

PROMPTS = [[5, 6, 7], [1], [2, 2, 2, 2], [0, 1, 2, 3, 4, 5, 0, 1]]
NEXT, DRAFT_NEXT = checksum(VOCAB)


@pytest.fixture(params=[False, True], ids=["pure", "donated"])
def donate(request: pytest.FixtureRequest) -> bool:
    return request.param


def begin(target: Any, drafter: Any, prompts: list[list[int]] = PROMPTS, *, max_tokens: Any = None, **changes: Any) -> fs.SpecState:
    made = fs.init(config(**{"rows": len(prompts), "block_size": 4, "num_blocks": 400} | changes), target, drafter)
    return fs.admit(made, target, drafter, prompts, max_tokens=max_tokens)[0]


# ---------------------------------------------------------------- prompt lookup in front


@pytest.mark.parametrize("drafts", [0, 1, 3])
def test_lookup_in_front(drafts: int, donate: bool) -> None:
    """Who drafts is decided anew in every round; the head is fed real features whoever drafts."""
    target, second, head = feature_pair()
    drafter = fallback(ngram(), second)
    state = begin(target, drafter, drafts=drafts)
    sequences, served = [[*prompt, NEXT(prompt)] for prompt in PROMPTS], [0, 0]
    while fs.any_active(state):
        alive = state.is_live.tolist()
        state, verdict = fs.step_round(state, target, drafter, donate=donate)
        check_features(state)
        for row, sequence in enumerate(sequences):
            if not alive[row]:
                continue
            proposed = drafted(sequence, min(64 - len(sequence) - 1, drafts), DRAFT_NEXT)
            accepted, tokens = emitted(sequence, proposed, NEXT)
            assert (int(verdict.num_drafted[row]), int(verdict.num_accepted[row])) == (len(proposed), accepted)
            served[bool(drafted(sequence, 1, None))] += 1
            sequence += tokens
    assert not head.mistakes and min(served) > 0
    assert [state.tokens[row].tolist() for row in range(4)] == sequences


def test_lookup_serves_a_row_that_was_cut_back(donate: bool) -> None:
    """The head has nothing to feed there, so it drafts only for rows with nothing to look up in the round after."""
    target, second, head = feature_pair()
    drafter = fallback(ngram(), second)
    prompts = [[33, 8, 9, 7, 0], [1], [5, 6, 7]]  # 8 follows the first
    state = run(begin(target, drafter, prompts), target, drafter, 3, donate=donate)
    state = fs.truncate(state, {row: len(prompt) + 1 for row, prompt in enumerate(prompts)}, donate=donate)
    expected = [drafted([*prompt, NEXT(prompt)], 3, None) for prompt in prompts]
    state, draft = fs.prefill(state, drafter, donate=donate)
    for _ in range(2):
        state, draft = fs.decode(state, drafter, donate=donate)
    assert [[token for token in row if token >= 0] for row in draft.tokens.tolist()] == expected
    state, verdict = fs.verify(state, target, donate=donate)
    assert verdict.num_drafted.tolist() == [len(row) for row in expected] and any(expected) and not all(expected)
    while fs.any_active(state):
        check_features(state)
        state, _ = fs.step_round(state, target, drafter, donate=donate)
    assert not head.mistakes
    assert [output(state, row) for row in range(3)] == [checksum_greedy(prompt, 64 - len(prompt)) for prompt in prompts]


# ---------------------------------------------------------------- captured rounds, as far as a CPU can tell


class Replaying:
    """Stands in for a CUDA graph: does the step again on the buffers it was recorded with, which keep their addresses."""

    def __init__(self, step: Any, idle: fs.SpecState, buffers: Buffers) -> None:
        self.step, self.idle, self.buffers = step, idle, buffers

    def replay(self) -> None:
        before = {"arena": self.buffers.arena, **self.buffers.carried}
        new = self.step(graphs._twin(self.idle, self.buffers))[0]
        after = {"arena": new.lease.buffers.arena, **new.lease.buffers.carried}
        assert {name: array.data_ptr() for name, array in after.items()} == {name: array.data_ptr() for name, array in before.items()}
        self.buffers.holder = None


def recorded(step: Any, state: fs.SpecState, idle: fs.SpecState) -> graphs.Captured:
    """What `capture` makes, with the stand-in in place of the graph."""
    twin = graphs._twin(state, graphs._with_carried(state.lease.buffers.packed(), state.lease))
    before = SimpleNamespace(phase=twin.lease.phase, target=twin.lease.target, draft=twin.lease.draft)
    new, info = step(twin)
    return graphs.Captured("captured round", Replaying(step, idle, new.lease.buffers), before, new.lease, info)  # type: ignore[arg-type]


def test_captured_rounds_carry_features() -> None:
    target, drafter, head = feature_pair()
    idle = fs.init(config(rows=3, block_size=4, num_blocks=400), target, drafter)
    state, _ = fs.admit(idle, target, drafter, PROMPTS[:2], max_tokens=[40, 9])
    captured = recorded(lambda twin: fs.step_round(twin, target, drafter, donate=True), state, idle)
    eager = fs.fork(state)
    old = []
    for number in range(12):
        if number == 4:  # rows come and go between replays
            state, eager = (fs.admit(one, target, drafter, [[9, 9]], seeds=[4], donate=True)[0] for one in (state, eager))
        if number == 7:
            state, eager = (fs.truncate(one, {0: 6}, donate=True) for one in (state, eager))
        if number == 9:  # a fork takes the place of the state in the captured buffers
            old.append((fs.fork(state), fs.snapshot(state)))
            state = fs.fork(state)
        if number == 10:  # a finished row lives again
            state, eager = (fs.truncate(one, {1: 8}, donate=True) for one in (state, eager))
        state, _ = captured(state)
        eager, _ = fs.step_round(eager, target, drafter)
        check_features(state)
        same_bits(fs.snapshot(state), fs.snapshot(eager))
    for one, value in old:
        same_bits(fs.snapshot(one), value)
    with pytest.raises(StateError, match="got another while that one lives"):
        captured(old[0][0])
    assert not head.mistakes


def test_captured_steps_in_mid_round_carry_features() -> None:
    target, drafter, head = feature_pair()
    idle = fs.init(config(rows=3, block_size=4, num_blocks=400), target, drafter)
    start, _ = fs.admit(idle, target, drafter, PROMPTS[:3])
    drafting, _ = fs.prefill(start, drafter)
    idle_drafting, _ = fs.prefill(idle, drafter)
    captured = recorded(lambda twin: fs.decode(twin, drafter, donate=True), drafting, idle_drafting)
    for _ in range(4):
        expected = fs.snapshot(fs.decode(drafting, drafter)[0])
        state, _ = captured(fs.fork(drafting))
        same_bits(fs.snapshot(state), expected)
        start, _ = fs.verify(state, target)
        drafting, _ = fs.prefill(start, drafter)
        del state
    assert not head.mistakes


@pytest.mark.parametrize("drafter", [feature_pair()[1], standalone(ChecksumModel())], ids=["features", "tokens"])
def test_where_a_step_may_write_without_reading_the_device(drafter: Any) -> None:
    """On a GPU the first written position is bounded by what the host knows; a draft that lags behind begins one earlier."""
    target, tight = FeatureTarget(), 0
    state = begin(target, drafter, max_tokens=50)
    while fs.any_active(state):
        step = TorchTransition(state, "prefill", donate=False)
        written = [min(n, fed) for n, fed in zip(state.num_tokens.tolist(), state.draft_len.tolist(), strict=True)]
        alive = state.is_live.tolist()
        step.fields = SimpleNamespace(num_tokens=SimpleNamespace(device=torch.device("cuda")), is_live=state.is_live)  # type: ignore[assignment]
        bounds = step._first_positions("draft")
        assert all(bound <= first for bound, first, live in zip(bounds, written, alive, strict=True) if live)
        tight += sum(bound == first for bound, first, live in zip(bounds, written, alive, strict=True) if live)
        state, _ = fs.step_round(state, target, drafter)
    assert tight > 0


# ---------------------------------------------------------------- failures


class Fuse:
    """Blows after so many passes."""

    left = 10**9

    def burn(self) -> None:
        self.left -= 1
        if self.left < 0:
            raise RuntimeError("out of luck")


FUSE = Fuse()


class FailingTarget(FeatureTarget):
    def forward(self, kv: KV, batch: ForwardBatch) -> Any:
        FUSE.burn()
        return super().forward(kv, batch)


class FailingDraft(FeatureDraft):
    def forward(self, kv: KV, batch: ForwardBatch) -> Any:
        FUSE.burn()
        return super().forward(kv, batch)


@pytest.mark.parametrize("passes", range(5))
def test_a_model_that_raises_leaves_the_state_usable(passes: int, donate: bool) -> None:
    """Whichever pass of the round it is. The features of a finished row are there still."""
    target, head = FailingTarget(), FailingDraft(layers=(0, 2))
    drafter = eagle(head)
    FUSE.left = 10**9
    state = begin(target, drafter, PROMPTS[:3], drafts=4, max_tokens=[50, 50, 4])
    while int(state.is_live[2]):
        state, _ = fs.step_round(state, target, drafter, donate=donate)
    before, value, fed = state.tokens.clone(), fs.snapshot(state), state.draft_len.tolist()
    FUSE.left = passes
    with pytest.raises(RuntimeError, match="out of luck"):
        fs.step_round(state, target, drafter, donate=donate)
    FUSE.left = 10**9
    assert torch.equal(state.tokens, before)
    check_features(state)
    if not donate or passes == 0:
        same_bits(fs.snapshot(state), value)
    state = fs.truncate(state, {2: 6}, donate=donate)
    check_features(state)
    state, verdict = fs.step_round(state, target, drafter, donate=donate)
    revived = donate and passes > 0  # the features of what was committed last are gone with the round
    assert [count > 0 for count in verdict.num_drafted.tolist()] == [not revived, not revived, fed[2] < 5]
    while fs.any_active(state):
        check_features(state)
        state, _ = fs.step_round(state, target, drafter, donate=donate)
    assert not head.mistakes
    for row, count in enumerate((50, 50, 4)):
        assert output(state, row) == checksum_greedy(PROMPTS[row], count)


# ---------------------------------------------------------------- models that do not fit


@dataclass(frozen=True)
class Odd(FeatureTarget):
    """Returns hidden states that are not what it says, once it is `told` to."""

    told: Any = None

    def forward(self, kv: KV, batch: ForwardBatch) -> tuple[KV, torch.Tensor, Any]:
        kv, logits, hidden = super().forward(kv, batch)
        return kv, logits, self.told.change(hidden)


CHANGES = {
    "narrow": lambda states: tuple(one[:, :2] for one in states),
    "wide": lambda states: tuple(torch.cat([one, one], 1) for one in states),
    "double": lambda states: tuple(one.double() for one in states),
    "short": lambda states: tuple(one[1:] for one in states),
    "too few": lambda states: states[1:],
    "none": lambda states: (),
    "no tuple": lambda states: None,
}


def test_hidden_states_that_the_target_does_not_have_are_refused_at_once() -> None:
    with pytest.raises(ModelError, match=r"drafter: expected a draft for hidden states of 4 from 2 layers, 8 in all, got one for 6"):
        fs.init(config(), FeatureTarget(hidden_size=4), feature_pair()[1])
    with pytest.raises(ModelError, match=r"drafter: expected a draft for hidden states 0 to 2, got one for \(0, 3\)"):
        fs.init(config(), FeatureTarget(), feature_pair((0, 3))[1])
    with pytest.raises(ModelError, match="model: expected a language model, got a draft that reads hidden states"):
        standalone(FeatureDraft())
    with pytest.raises(ModelError, match="head: expected a model that reads hidden states"):
        eagle(ChecksumModel())
    with pytest.raises(ModelError, match="head: expected a model that reads hidden states and hands its own on"):
        eagle(FeatureDraft(passes="parallel"))


def test_a_target_without_hidden_states_is_refused_at_the_first_pass() -> None:
    _, drafter, _ = feature_pair()
    target = ChecksumModel()
    state = fs.init(config(rows=2), target, drafter)
    value, free = fs.snapshot(state), free_blocks(state)
    for donate in (False, True):
        with pytest.raises(ModelError, match=r"forward: expected hidden states \[3, H\] of the layers \(0, 2\), got \[\]"):
            fs.admit(state, target, drafter, [[5, 6, 7]], donate=donate)
        same_bits(fs.snapshot(state), value)
        assert free_blocks(state) == free


@pytest.mark.parametrize("change", CHANGES)
def test_hidden_states_of_another_kind_are_refused_and_nothing_is_written(change: str) -> None:
    told, (_, drafter, head) = SimpleNamespace(change=CHANGES[change]), feature_pair()
    target = Odd(told=told)
    empty = fs.init(config(rows=2), target, drafter)
    if change != "double":  # is made float32 on the way, at admission
        value, free = fs.snapshot(empty), free_blocks(empty)
        with pytest.raises(ModelError, match=r"(target|forward): expected (\d )?hidden states"):
            fs.admit(empty, target, drafter, [[5, 6, 7]], donate=True)
        same_bits(fs.snapshot(empty), value)
        assert free_blocks(empty) == free
    told.change = lambda states: states
    state, _ = fs.admit(empty, target, drafter, [[5, 6, 7], [1]])
    state, _ = fs.prefill(run(state, target, drafter, 2), drafter)
    expected = fs.snapshot(fs.verify(fs.decode(state, drafter)[0], target)[0])
    told.change = CHANGES[change]
    value = fs.snapshot(state)
    for step in (fs.verify, fs.score):
        with pytest.raises(ModelError, match=r"(target|forward): expected (\d )?hidden states"):
            step(state, target, donate=True)
        same_bits(fs.snapshot(state), value)
    told.change = lambda states: states
    same_bits(fs.snapshot(fs.verify(fs.decode(state, drafter)[0], target)[0]), expected)
    assert not head.mistakes


@dataclass(frozen=True)
class OddDraft(FeatureDraft):
    """Hands on what is not a state of its own, once it is `told` to."""

    told: Any = None

    def forward(self, kv: KV, batch: ForwardBatch) -> tuple[KV, torch.Tensor, Any]:
        kv, logits, hidden = super().forward(kv, batch)
        return kv, logits, self.told.change(hidden)


@pytest.mark.parametrize("change", sorted(set(CHANGES) - {"too few"}))
def test_a_draft_that_hands_on_no_state_is_refused_and_nothing_is_written(change: str) -> None:
    told = SimpleNamespace(change=lambda states: states)
    target, head = FeatureTarget(), OddDraft(told=told)
    drafter = eagle(head)
    state = run(begin(target, drafter, PROMPTS[:2]), target, drafter, 2)
    drafting, _ = fs.prefill(state, drafter)
    for one, step in ((state, fs.prefill), (drafting, fs.decode)):
        value, expected = fs.snapshot(one), fs.snapshot(step(one, drafter)[0])
        told.change = CHANGES[change]
        for donate in (False, True):
            with pytest.raises(ModelError, match=r"drafter: expected 1 hidden states \[2, 3\] of float32, bfloat16, float16, got \["):
                step(one, drafter, donate=donate)
            same_bits(fs.snapshot(one), value)
        told.change = lambda states: states
        same_bits(fs.snapshot(step(one, drafter)[0]), expected)
    assert not head.mistakes


def test_a_draft_that_reads_other_layers_is_refused() -> None:
    target, drafter, _ = feature_pair((0, 2))
    state = begin(target, drafter, PROMPTS[:2])
    other = feature_pair((1, 2))[1]
    with pytest.raises(ModelError, match="drafter: expected the model the state was made for"):
        fs.prefill(state, other)
    with pytest.raises(ModelError, match="drafter: expected the model the state was made for"):
        fs.restore(fs.snapshot(state), target, other)
    for wrong in ({"layers": ()}, {"layers": (-1,)}, {"size": 0}, {"size": 7}, {"feedback": 7}, {"feedback": -1}, {"ahead": 2}):
        with pytest.raises(ModelError, match=f"{next(iter(wrong))}: expected"):
            replace(FeatureSpec((0, 2), 6), **wrong)
