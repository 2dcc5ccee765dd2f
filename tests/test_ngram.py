"""Drafting by prompt lookup: what is drafted, and that the output is the target's own whatever is drafted."""

from collections.abc import Sequence
from functools import partial
from typing import Any

import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from lookup import checksum, drafted, emitted
from oracle import checksum_greedy, config, output, run

import funcspec as fs
from funcspec.errors import ArgumentError, ArgumentTypeError
from funcspec.interop import jax_model
from funcspec.models import ChecksumModel, TableModel
from funcspec.models.llama import LlamaConfig, random_llama

DEVICE = "cuda" if jax.default_backend() == "gpu" else "cpu"
LENGTH = 40
with_jax = pytest.mark.skipif(DEVICE == "cpu" and torch.cuda.is_available(), reason="JAX and torch see other devices")
GREEDY, COUPLED = fs.rules.greedy, fs.rules.coupled
CYCLE = TableModel(tuple(tuple(float(after == (token + 1) % 5) for after in range(5)) for token in range(5)))
TARGETS: dict[str, Any] = {
    "checksum": ChecksumModel(spread=True),
    "small checksum": ChecksumModel(vocab_size=3, spread=True),
    "table": TableModel(((0.5, 0.3, 0.15, 0.05), (0.1, 0.6, 0.3, 0.0), (0.2, 0.2, 0.2, 0.4), (0.97, 0.01, 0.01, 0.01))),
    "two tokens": TableModel(((0.2, 0.8), (0.9, 0.1))),
    "cycle": CYCLE,
}


@st.composite
def lookups(draw: st.DrawFn) -> fs.drafters.Ngram:
    most = draw(st.integers(1, 5))
    least = draw(st.integers(1, most))
    window = draw(st.one_of(st.none(), st.integers(least + 1, LENGTH)))
    return fs.drafters.ngram(max_ngram=most, min_ngram=least, window=window, occurrence=draw(st.sampled_from(["first", "last"])))


def start(target: Any, drafter: Any, prompts: list[list[int]], **changes: Any) -> fs.SpecState:
    """A greedy state with these prompts, a row each."""
    defaults = {"rows": len(prompts), "length": LENGTH}
    return fs.admit(fs.init(config(**defaults | changes), target, drafter), target, drafter, prompts)[0]


def plain(target: Any, prompt: Sequence[int], rule: fs.rules.Rule, **request: Any) -> list[int]:
    """Plain decoding of a prompt alone: no drafter, no draft places."""
    state = fs.init(config(length=LENGTH, drafts=0, rule=rule), target)
    state, _ = fs.admit(state, target, None, [prompt], donate=True, **request)
    while fs.any_active(state):
        state, _ = fs.verify(state, target, donate=True)
    return output(state, 0)


@settings(max_examples=30)
@given(data=st.data())
def test_output_is_that_of_plain_decoding(data: st.DataObject) -> None:
    """Rows that come when they like, in any row, with any number of drafts in any round."""
    target = TARGETS[data.draw(st.sampled_from(list(TARGETS)))]
    drafter, drafts, donate = data.draw(lookups()), data.draw(st.integers(0, 8)), data.draw(st.booleans())
    rule = data.draw(st.sampled_from([GREEDY, COUPLED]))
    token = st.integers(0, target.vocab_size - 1)
    waiting = data.draw(st.lists(st.lists(token, min_size=1, max_size=12), min_size=1, max_size=5))
    requests: dict[int, Any] = {}
    state = fs.init(
        config(rows=2, length=LENGTH, drafts=drafts, rule=rule, block_size=data.draw(st.sampled_from([1, 4, 16]))), target, drafter
    )
    while waiting or requests:
        for row in {0, 1} - set(requests):
            if waiting and (not requests or data.draw(st.booleans())):
                request = {
                    "prompt": waiting.pop(),
                    "seeds": [data.draw(st.integers(-(2**63), 2**63 - 1))],
                    "temperature": data.draw(st.sampled_from([0.0, 0.7, 1.3])) if rule is COUPLED else 0.0,
                    "max_tokens": data.draw(st.one_of(st.none(), st.integers(1, 30))),
                    "stop_ids": data.draw(st.lists(token, max_size=1)) if data.draw(st.booleans()) else [],
                }
                requests[row] = request
                options = {name: value for name, value in request.items() if name != "prompt"}
                state, _ = fs.admit(state, target, drafter, [request["prompt"]], rows=[row], donate=donate, **options)
        wanted = data.draw(st.one_of(st.none(), st.integers(0, drafts), st.lists(st.integers(0, drafts), min_size=2, max_size=2)))
        state, _ = fs.step_round(state, target, drafter, num_draft=wanted, donate=donate)
        for row in [row for row in requests if not int(state.is_live[row])]:
            request = requests.pop(row)
            options = {name: value for name, value in request.items() if name != "prompt"}
            assert output(state, row) == plain(target, request["prompt"], rule, **options)
            state = fs.release(state, [row], donate=donate)


@settings(max_examples=30)
@given(data=st.data())
def test_drafts_are_what_the_definition_finds(data: st.DataObject) -> None:
    target, drafter, drafts = TARGETS["table"], data.draw(lookups()), data.draw(st.integers(1, 8))
    prompts = data.draw(st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=20), min_size=1, max_size=3))
    state = fs.init(config(rows=4, length=LENGTH, drafts=drafts, rule=COUPLED), target, drafter)
    state, _ = fs.admit(state, target, drafter, prompts, seeds=range(len(prompts)), temperature=1.0, max_tokens=12)
    options = {"max_ngram": drafter.max_ngram, "min_ngram": drafter.min_ngram, "window": drafter.window}
    while fs.any_active(state):
        wanted = data.draw(st.lists(st.integers(0, drafts), min_size=4, max_size=4))
        live, counts, limits = state.is_live.tolist(), state.num_tokens.tolist(), state.row_limit.tolist()
        state, draft = fs.prefill(state, drafter, num_draft=wanted)
        for row in range(4):
            text = state.tokens[row, : counts[row]].tolist()
            most = min(wanted[row], limits[row] - counts[row] - 1) if live[row] else 0
            expected = drafted(text, most, None, latest=drafter.occurrence == "last", **options)
            assert draft.tokens[row].tolist() == expected + [-1] * (drafts - len(expected))
            assert state.tokens[row, counts[row] :].tolist() == expected + [-1] * (LENGTH - counts[row] - len(expected))
            assert int(draft.num_draft[row]) == int(state.num_drafted[row]) == len(expected)
        state, _ = fs.verify(state, target)


def test_all_drafts_are_made_at_step_0() -> None:
    drafter = fs.drafters.ngram()
    state = start(CYCLE, drafter, [[0, 1, 2, 3, 4, 0, 1], [2]], drafts=4)
    state, draft = fs.prefill(state, drafter)
    assert draft.tokens.tolist() == [[3, 4, 0, 1], [-1] * 4] and draft.num_draft.tolist() == [4, 0]
    before = fs.snapshot(state)
    for step in (2, 3, 4):
        state, more = fs.decode(state, drafter)
        assert torch.equal(more.tokens, draft.tokens) and torch.equal(more.num_draft, draft.num_draft) and more.step == step
        assert all(np.array_equal(value, before.fields[name]) for name, value in fs.snapshot(state).fields.items())
    state, verdict = fs.verify(state, CYCLE)
    assert verdict.num_accepted.tolist() == [4, 0] and verdict.tokens[0].tolist() == [3, 4, 0, 1, 2]


@pytest.mark.parametrize("drafts", [1, 2, 3, 4, 8])
def test_a_text_that_repeats_itself_is_taken_whole(drafts: int) -> None:
    """Once the period was seen every round is full: K accepted and the bonus token."""
    drafter = fs.drafters.ngram()
    emissions = list(fs.generate(config(length=400, drafts=drafts), CYCLE, drafter, [[0, 1, 2, 3, 4, 0, 1, 2, 3, 4, 0]], max_tokens=200))
    assert [token for emission in emissions for token in emission.tokens] == [(1 + place) % 5 for place in range(200)]
    full = [emission.num_accepted for emission in emissions[3:-1]]
    assert full and set(full) == {drafts}


def test_the_first_occurrence_drafts_more_than_the_last() -> None:
    """Why it is the default: the last one has one period behind it, in a run of one token a single token."""
    counts = {}
    for occurrence in ("first", "last"):
        drafter = fs.drafters.ngram(occurrence=occurrence)
        constant = TableModel(((1.0, 0.0), (0.0, 1.0)))
        emissions = list(fs.generate(config(length=128, drafts=7), constant, drafter, [[1] * 40], max_tokens=60))
        assert [token for emission in emissions for token in emission.tokens] == [1] * 60
        counts[occurrence] = len(emissions) - 1
    assert counts == {"first": 8, "last": 30}


def test_greedy_rounds_accept_what_the_definition_says() -> None:
    target, _ = checksum(7)
    model, drafter = ChecksumModel(vocab_size=7), fs.drafters.ngram(max_ngram=2)
    for prompt in ([1], [5, 6, 1], [2, 2, 2, 2], [0, 1, 2, 3, 4, 5, 6, 0, 1]):
        state, sequence = start(model, drafter, [prompt], length=200, drafts=3), [*prompt, target(prompt)]
        for _ in range(40):
            state, verdict = fs.step_round(state, model, drafter)
            accepted, tokens = emitted(sequence, drafted(sequence, 3, None, max_ngram=2), target)
            assert (int(verdict.num_accepted[0]), output(state, 0)[-len(tokens) :]) == (accepted, tokens)
            sequence += tokens


@pytest.mark.parametrize("drafts", [1, 3, 10])
def test_g4_generation_up_to_the_longest_row(drafts: int) -> None:
    for length in (12, 13, 14, 15, 96):
        emissions = list(fs.generate(config(length=length, drafts=drafts), CYCLE, fs.drafters.ngram(), [[0, 1, 2, 3, 4, 0, 1, 2, 3]]))
        assert sum(len(emission.tokens) for emission in emissions) == length - 9 and emissions[-1].finish_reason == 2


def test_f8_a_prompt_of_one_repeated_token() -> None:
    """Exact for a target that depends on the prefix alone; a float model may differ only where two logits nearly tie."""
    prompt, drafter = [9] * 48, fs.drafters.ngram(min_ngram=2, max_ngram=5)
    state = run(start(ChecksumModel(), drafter, [prompt], length=96, drafts=4), ChecksumModel(), drafter, 32)
    assert output(state, 0)[:32] == checksum_greedy(prompt, 32)
    shape = LlamaConfig(
        vocab_size=97, hidden_size=64, intermediate_size=128, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=16, max_len=96
    )
    model = random_llama(shape, 3)
    state = run(start(model, drafter, [prompt], length=96, drafts=4), model, drafter, 32)
    tokens, expected = output(state, 0)[:32], plain_llama(model, prompt)
    place = next((place for place, (left, right) in enumerate(zip(tokens, expected, strict=True)) if left != right), None)
    gap = top_gap(model, [*prompt, *expected[: place or 1]])
    assert gap > 0 and (place is None or gap < 1e-4), f"first difference at {place}"


def plain_llama(model: Any, prompt: list[int]) -> list[int]:
    state = start(model, None, [prompt], length=96, drafts=0)
    for _ in range(31):
        state, _ = fs.verify(state, model, donate=True)
    return output(state, 0)


def top_gap(model: Any, tokens: list[int]) -> float:
    """Distance of the two largest logits after these tokens."""
    state = start(model, None, [tokens[:-1]], length=96, drafts=0)
    state.tokens[0, len(tokens) - 1] = tokens[-1]
    best = fs.score(state, model)[1].logits[0, 0].topk(2).values
    return float(best[0] - best[1])


def test_i6_short_prompts_without_stop_ids() -> None:
    target, drafter = ChecksumModel(), fs.drafters.ngram(max_ngram=3, min_ngram=2)
    for prompt in ([5, 6, 7, 8, 9, 10, 11, 7, 8], [5], [5, 6], [5, 5]):
        emissions = list(fs.generate(config(), target, drafter, [prompt], max_tokens=15))
        assert [token for emission in emissions for token in emission.tokens] == checksum_greedy(prompt, 15)
    with pytest.raises(ArgumentError, match="prompt"):
        fs.generate(config(), target, drafter, [[]])


def test_k2_rows_with_and_without_drafts() -> None:
    prompts = [[0, 1, 2, 3, 4, 0, 1], [3, 4, 0], [1, 2, 3, 4, 0, 1, 2], [2]]
    drafter = fs.drafters.ngram()
    state = start(CYCLE, drafter, prompts, rows=5)
    state, verdict = fs.step_round(state, CYCLE, drafter, num_draft=[0, 3, 3, 0, 3])
    assert verdict.num_drafted.tolist() == [0, 0, 3, 0, 0] and verdict.num_emitted.tolist() == [1, 1, 4, 1, 0]
    for row, prompt in enumerate(prompts):
        assert output(state, row) == [(prompt[-1] + 1 + place) % 5 for place in range(len(output(state, row)))]


def test_pure_and_donated_steps_are_bit_equal() -> None:
    def trace(donate: bool) -> list[fs.Snapshot]:
        target, drafter = TARGETS["small checksum"], fs.drafters.ngram()
        state = fs.init(config(rows=3, rule=COUPLED), target, drafter)
        state, _ = fs.admit(state, target, drafter, [[0, 1, 2, 0], [1]], seeds=[1, 2], temperature=[0.0, 1.0], donate=donate)
        found = []
        for _ in range(6):
            state, _ = fs.prefill(state, drafter, donate=donate)
            found.append(fs.snapshot(state))
            state, _ = fs.decode(state, drafter, donate=donate)
            state, _ = fs.verify(state, target, donate=donate)
            found.append(fs.snapshot(state))
        return found

    assert trace(True) == trace(False)


def test_branches_and_restored_states_go_on_alike() -> None:
    """In mid-round: a fork, the state it came from, and what a snapshot brings back."""
    target, drafter = TARGETS["small checksum"], fs.drafters.ngram()
    state = run(start(target, drafter, [[0, 1, 2, 0], [1]], rule=GREEDY), target, drafter, 3)
    drafting, _ = fs.prefill(state, drafter)
    assert drafting.num_drafted.max() > 0
    ends = []
    for kv in (True, False):
        snap = fs.snapshot(drafting, kv=kv)
        for branch in (fs.fork(drafting), fs.restore(snap, target, drafter), drafting):
            branch, _ = fs.decode(branch, drafter)
            branch, _ = fs.verify(branch, target)
            ends.append(fs.snapshot(run(branch, target, drafter, 3)))
    assert all(end == ends[0] for end in ends)


@with_jax
def test_states_of_jax_equal_those_of_torch() -> None:
    settings_ = config(rows=3, length=LENGTH, rule=COUPLED, device=DEVICE)
    drafter = fs.drafters.ngram(max_ngram=2)
    sides = {}
    for framework in ("torch", "jax"):
        target = TARGETS["small checksum"] if framework == "torch" else jax_model(TARGETS["small checksum"])
        state, _ = fs.admit(
            fs.init(settings_, target, drafter), target, drafter, [[0, 1, 2, 0], [1]], seeds=[3, -4], temperature=[0.0, 1.0], max_tokens=25
        )
        snapshots = []
        for wanted in (3, [0, 2, 1], 0, None):
            state, draft = fs.prefill(state, drafter, num_draft=wanted)
            snapshots += [fs.snapshot(state), draft.tokens.tolist()]
            state, draft = fs.decode(state, drafter)
            state, verdict = fs.verify(state, target)
            snapshots += [fs.snapshot(state), draft.tokens.tolist(), verdict.tokens.tolist()]
        sides[framework] = snapshots, state, target
    assert sides["torch"][0] == sides["jax"][0]
    (_, state, target), (_, start_, jax_target) = sides.values()
    end, stacked = jax.jit(lambda state, drafter: jax.lax.scan(lambda s, _: fs.step_round(s, jax_target, drafter), state, length=8))(
        start_, drafter
    )
    for number in range(8):
        state, verdict = fs.step_round(state, target, drafter)
        assert stacked.tokens[number].tolist() == verdict.tokens.tolist()
    assert fs.snapshot(end) == fs.snapshot(state) and int(stacked.num_accepted.sum()) > 0


@with_jax
def test_in_a_jitted_round_the_drafter_is_an_argument_and_num_draft_is_data() -> None:
    target, drafter = jax_model(CYCLE), fs.drafters.ngram()
    state = start(target, drafter, [[0, 1, 2, 3, 4, 0, 1]] * 3, device=DEVICE)
    traces = []

    @partial(jax.jit, donate_argnums=0)
    def turn(state: fs.SpecState, drafter: Any, wanted: jax.Array) -> tuple[fs.SpecState, fs.Verdict]:
        traces.append(1)
        return fs.step_round(state, target, drafter, num_draft=wanted)

    for wanted in ([0, 1, 2], [3, 0, 9], [-1, 2, 2]):
        state, verdict = turn(state, drafter, jnp.array(wanted, jnp.int32))
        assert verdict.num_drafted.tolist() == [max(min(count, 3), 0) for count in wanted]
    assert len(traces) == 1
    turn(state, fs.drafters.ngram(), jnp.zeros(3, jnp.int32))  # an equal drafter is the same argument
    assert len(traces) == 1 and jax.tree.leaves(drafter) == []


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_captured_rounds_equal_eager_ones() -> None:
    drafter = fs.drafters.ngram(max_ngram=2)
    shape = LlamaConfig(
        vocab_size=97, hidden_size=64, intermediate_size=128, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=16, max_len=256
    )
    model = random_llama(shape, 0, device="cuda")
    state = start(model, drafter, [[5, 6, 7, 5, 6], [1], [9] * 20], rows=4, length=256, device="cuda", num_blocks=400)
    wanted = torch.full((4,), 3, dtype=torch.int32, device="cuda")
    captured = fs.graphs.capture(fs.step_round, state, model, drafter, num_draft=wanted)
    eager, replayed, drafts = fs.fork(state), state, 0
    for number in range(40):
        wanted.fill_(number % 4)
        eager, expected = fs.step_round(eager, model, drafter, num_draft=wanted)
        replayed, verdict = captured(replayed)
        assert torch.equal(verdict.tokens, expected.tokens) and torch.equal(verdict.num_drafted, expected.num_drafted)
        drafts += int(verdict.num_drafted.sum())
    assert fs.snapshot(eager) == fs.snapshot(replayed) and drafts > 0


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"min_ngram": 0}, ArgumentError, "min_ngram: expected from 1 to max_ngram = 3, got 0"),
        ({"min_ngram": 4}, ArgumentError, "min_ngram: expected from 1 to max_ngram = 3, got 4"),
        ({"max_ngram": 0}, ArgumentError, "min_ngram: expected from 1 to max_ngram = 0"),
        ({"max_ngram": 2.0}, ArgumentTypeError, "max_ngram: expected an int, got 2.0"),
        ({"min_ngram": True}, ArgumentTypeError, "min_ngram: expected an int, got True"),
        ({"window": "all"}, ArgumentTypeError, "window: expected an int or None, got 'all'"),
        ({"window": 2, "min_ngram": 2}, ArgumentError, r"window: expected at least min_ngram \+ 1 = 3, got 2"),
        ({"occurrence": "newest"}, ArgumentError, "occurrence: expected 'first' or 'last', got 'newest'"),
    ],
)
def test_settings_that_cannot_work_are_refused(changes: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        fs.drafters.ngram(**changes)


def test_a_state_with_another_drafter_is_refused() -> None:
    drafter, model = fs.drafters.ngram(), fs.drafters.standalone(ChecksumModel())
    state = start(ChecksumModel(), drafter, [[5]])
    with pytest.raises(fs.FuncspecError, match=r"drafter: expected None, as the state was made with"):
        fs.prefill(state, model)
    with pytest.raises(fs.FuncspecError, match="drafter: expected the drafter the state was made with"):
        fs.prefill(start(ChecksumModel(), model, [[5]]), drafter)
