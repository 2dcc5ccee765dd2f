"""Suffix decoding: what is drafted, what is learnt from past outputs, and that the output is the target's own whatever is drafted."""

from collections.abc import Sequence
from fractions import Fraction
from functools import partial
from typing import Any

import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from oracle import config, output, run
from ratio_oracle import RATIO, TARGET, VOCAB, written_round
from suffixes import limits, proposed

import funcspec as fs
from funcspec.drafters import Suffix, fallback, standalone, suffix
from funcspec.errors import ArgumentError, ArgumentTypeError, ModelError
from funcspec.interop import jax_model
from funcspec.models import ChecksumDraft, ChecksumModel, TableModel
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
    "cycle": CYCLE,
}


@st.composite
def suffixes(draw: st.DrawFn, vocab_size: int = 3) -> Suffix:
    line = st.lists(st.integers(0, vocab_size - 1), max_size=12)
    return suffix(
        max_depth=draw(st.integers(4, 12)),
        factor=draw(st.sampled_from([0.5, 1.0, 2.5])),
        offset=draw(st.sampled_from([-0.5, 0.0, 1.0])),
        min_probability=draw(st.sampled_from([0.0, 0.1, 0.5])),
        corpus=draw(st.one_of(st.none(), st.lists(line, max_size=3))),
        shared=draw(st.booleans()),
        max_outputs=draw(st.integers(1, 3)),
    )


def definition(drafter: Suffix) -> dict[str, Any]:
    """The drafter's settings, as the definition takes them."""
    return {
        "budgets": limits(drafter.max_depth, Fraction(drafter.factor), Fraction(drafter.offset)),
        "min_probability": Fraction(drafter.min_probability).limit_denominator(10),
        "corpus": [] if drafter.corpus is None else drafter.corpus.tokens.tolist(),
        "shared": drafter.shared,
    }


def start(target: Any, drafter: Any, prompts: list[list[int]], **changes: Any) -> fs.SpecState:
    """A greedy state with these prompts, a row each."""
    defaults = {"rows": len(prompts), "length": LENGTH}
    state = fs.init(config(**defaults | changes), target, drafter)
    return fs.admit(state, target, drafter, prompts, seeds=range(len(prompts)))[0]


def plain(target: Any, prompt: Sequence[int], rule: fs.rules.Rule, **request: Any) -> list[int]:
    """Plain decoding of a prompt alone: no drafter, no draft places."""
    state = fs.init(config(length=LENGTH, drafts=0, rule=rule), target)
    state, _ = fs.admit(state, target, None, [prompt], donate=True, **request)
    while fs.any_active(state):
        state, _ = fs.verify(state, target, donate=True)
    return output(state, 0)


def texts(state: fs.SpecState) -> list[list[int]]:
    return [state.tokens[row, :count].tolist() for row, count in enumerate(state.num_tokens.tolist())]


@settings(max_examples=25)
@given(data=st.data())
def test_output_is_that_of_plain_decoding(data: st.DataObject) -> None:
    """Rows that come when they like, with any number of drafts in any round; what they wrote is learnt when they leave."""
    target = TARGETS[data.draw(st.sampled_from(list(TARGETS)))]
    drafter, drafts, donate = data.draw(suffixes()), data.draw(st.integers(0, 8)), data.draw(st.booleans())
    rule = data.draw(st.sampled_from([GREEDY, COUPLED]))
    waiting = data.draw(st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=12), min_size=1, max_size=5))
    requests: dict[int, Any] = {}
    state = fs.init(config(rows=2, length=LENGTH, drafts=drafts, rule=rule), target, drafter)
    while waiting or requests:
        for row in {0, 1} - set(requests):
            if waiting and (not requests or data.draw(st.booleans())):
                options = {
                    "seeds": [data.draw(st.integers(-(2**63), 2**63 - 1))],
                    "temperature": data.draw(st.sampled_from([0.0, 0.7, 1.3])) if rule is COUPLED else 0.0,
                    "max_tokens": data.draw(st.one_of(st.none(), st.integers(1, 30))),
                }
                requests[row] = waiting.pop(), options
                state, _ = fs.admit(state, target, drafter, [requests[row][0]], rows=[row], donate=donate, **options)
        wanted = data.draw(st.one_of(st.none(), st.integers(0, drafts), st.lists(st.integers(0, drafts), min_size=2, max_size=2)))
        state, _ = fs.step_round(state, target, drafter, num_draft=wanted, donate=donate)
        for row in [row for row in requests if not int(state.is_live[row])]:
            prompt, options = requests.pop(row)
            tokens = output(state, row)
            assert tokens == plain(target, prompt, rule, **options)
            drafter = drafter.with_outputs([tokens])
            state = fs.release(state, [row], donate=donate)


@settings(max_examples=25)
@given(data=st.data())
def test_drafts_are_what_the_definition_finds(data: st.DataObject) -> None:
    target, drafter, drafts = TARGETS["table"], data.draw(suffixes(vocab_size=4)), data.draw(st.integers(1, 8))
    prompts = data.draw(st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=20), min_size=1, max_size=3))
    state = fs.init(config(rows=4, length=LENGTH, drafts=drafts, rule=COUPLED), target, drafter)
    state, _ = fs.admit(state, target, drafter, prompts, seeds=range(len(prompts)), temperature=1.0, max_tokens=12)
    while fs.any_active(state):
        wanted = data.draw(st.lists(st.integers(0, drafts), min_size=4, max_size=4))
        rows, live, room = texts(state), state.is_live.tolist(), (state.row_limit - state.num_tokens - 1).tolist()
        state, draft = fs.prefill(state, drafter, num_draft=wanted)
        for row in range(4):
            most = min(drafts, room[row]) if live[row] else 0
            expected = proposed(rows, row, most, **definition(drafter))[: wanted[row]]
            assert draft.tokens[row].tolist() == expected + [-1] * (drafts - len(expected))
            assert state.tokens[row].tolist() == rows[row] + expected + [-1] * (LENGTH - len(rows[row]) - len(expected))
            assert int(draft.num_draft[row]) == int(state.num_drafted[row]) == len(expected)
        state, _ = fs.verify(state, target)


def test_g3_the_written_example() -> None:
    """After 1 2 came 3, 4 and 3: 3 with 2/3, then 1 with 1/3, worth more than the 3 that 2 alone may draft."""
    successor = TableModel(tuple(tuple(float(after == (token + 1) % 5) for after in range(5)) for token in range(5)))
    drafter = suffix(corpus=[[1, 2, 3, 1, 2, 4, 1, 2, 3]])
    state = start(successor, drafter, [[1]], drafts=4)
    assert fs.prefill(state, drafter)[1].tokens.tolist() == [[3, 1, -1, -1]]
    short = suffix(corpus=[[1, 2, 3, 1, 2, 4, 1, 2, 3]], max_depth=3)
    assert fs.prefill(state, short)[1].tokens.tolist() == [[3, -1, -1, -1]]
    likely = suffix(corpus=[[1, 2, 3, 1, 2, 4, 1, 2, 3]], min_probability=0.34)
    assert fs.prefill(state, likely)[1].tokens.tolist() == [[3, -1, -1, -1]]


def test_settings_say_how_much_is_drafted() -> None:
    line = [1, 2, 3, 4, 0, 1, 2, 3, 4, 0]
    state = start(CYCLE, suffix(), [[1, 2]], drafts=8)  # committed: 1 2 3
    for changes, count in (
        ({}, 3),
        ({"factor": 2.0}, 6),
        ({"factor": 0.7}, 2),
        ({"offset": 2.0}, 5),
        ({"offset": -2.0}, 1),
        ({"offset": -3.0}, 0),
        ({"factor": 0.0, "offset": 7.0}, 7),
        ({"max_depth": 5, "factor": 9.0}, 4),
    ):
        drafter = suffix(corpus=[line], **changes)
        assert fs.prefill(state, drafter)[1].num_draft.tolist() == [count], changes
        assert fs.prefill(state, drafter)[1].tokens[0, :count].tolist() == line[3 : 3 + count]


def test_all_drafts_are_made_at_step_0() -> None:
    drafter = suffix(corpus=[[0, 1, 2, 3, 4, 0, 1]])
    state = start(CYCLE, drafter, [[4, 0, 1, 2], [3]], drafts=4)
    state, draft = fs.prefill(state, drafter)
    assert draft.tokens.tolist() == [[4, 0, 1, -1], [0, 1, -1, -1]] and draft.num_draft.tolist() == [3, 2]
    before = fs.snapshot(state)
    for step in (2, 3, 4):
        state, more = fs.decode(state, drafter)
        assert torch.equal(more.tokens, draft.tokens) and torch.equal(more.num_draft, draft.num_draft) and more.step == step
        assert all(np.array_equal(value, before.fields[name]) for name, value in fs.snapshot(state).fields.items())
    state, verdict = fs.verify(state, CYCLE)
    assert verdict.num_accepted.tolist() == [3, 2] and verdict.tokens[0].tolist() == [4, 0, 1, 2, -1]


@pytest.mark.parametrize("drafts", [1, 3, 10])
def test_g4_generation_up_to_the_longest_row(drafts: int) -> None:
    for length in (12, 13, 14, 15, 96):
        emissions = list(fs.generate(config(length=length, drafts=drafts), CYCLE, suffix(), [[0, 1, 2, 3, 4, 0, 1, 2, 3]]))
        assert sum(len(emission.tokens) for emission in emissions) == length - 9 and emissions[-1].finish_reason == 2


def test_what_was_written_before_is_written_faster() -> None:
    """Rows that look at nothing but themselves, at each other, and at what was written before."""
    prompts = [[5, 6, 7], [5, 6, 7], [5, 6, 7]]
    alone = plain(TARGETS["checksum"], prompts[0], GREEDY)

    def rounds(drafter: Suffix) -> int:
        state, count = start(TARGETS["checksum"], drafter, prompts), 0
        state = run(state, TARGETS["checksum"], drafter, 8, num_draft=[3, 0, 0])  # the first is ahead if it drafts
        while fs.any_active(state):
            state, count = run(state, TARGETS["checksum"], drafter, 1), count + 1
        assert all(output(state, row) == alone for row in range(3))
        return count

    learnt = suffix().with_outputs([[*prompts[0], *alone]])
    assert rounds(learnt) < rounds(suffix()) / 2 and rounds(suffix(shared=True)) <= rounds(suffix())


def test_rows_look_at_each_other_only_if_told_to() -> None:
    prompts = [[0, 1, 2, 3, 4, 0], [2, 3]]
    for shared, expected in ((False, [-1] * 3), (True, [0, 1, -1])):
        drafter = suffix(shared=shared)
        state = start(CYCLE, drafter, prompts, rows=3)
        assert fs.prefill(state, drafter)[1].tokens[1].tolist() == expected
        state = fs.release(state, [0])
        assert fs.prefill(state, drafter)[1].tokens[1].tolist() == [-1] * 3  # what a row leaves behind is not text


def test_ratio_rounds_are_the_written_definition() -> None:
    """Drafts of a drafter that looks everywhere are points to the rule."""
    prompts, seeds, heat = [[3, 4, 5, 6, 3, 4, 5, 6, 3, 4], [9], [3, 4, 5]], [11, -5, 7], [30.0, 1.0, 0.0]
    drafter = suffix(shared=True, corpus=[[*range(VOCAB)], [*range(0, VOCAB, 2)]], offset=1)
    sides = []
    for donate in (False, True):
        state = fs.init(config(rows=3, length=LENGTH, rule=RATIO), TARGET, drafter)
        state, first = fs.admit(state, TARGET, drafter, prompts, seeds=seeds, temperature=heat, donate=donate)
        sequences, drafted = [[*prompt, token[0]] for prompt, token in zip(prompts, zip(first.tokens, strict=True), strict=True)], 0
        for _ in range(6):
            state, verdict = fs.step_round(state, TARGET, drafter, donate=donate)
            expected = [proposed(sequences, row, 3, **definition(drafter)) for row in range(3)]
            for row, drafts in enumerate(expected):
                q = partial(forced, sequences[row], drafts)
                made, emitted, origins = written_round(sequences[row], seeds[row], heat[row], len(drafts), point=True, q=q)
                assert made == drafts and verdict.tokens[row, : len(emitted)].tolist() == emitted
                assert int(verdict.num_emitted[row]) == len(emitted) and int(verdict.num_accepted[row]) == origins.count(0)
                sequences[row] = sequences[row] + emitted
                drafted += len(drafts)
        assert drafted > 12
        sides.append(sequences)
    assert sides[0] == sides[1]


def forced(prefix: Sequence[int], drafts: Sequence[int], sequence: Sequence[int]) -> np.ndarray:
    """Logits that leave no choice but the draft."""
    logits = np.full(VOCAB, -np.inf, np.float32)
    logits[drafts[len(sequence) - len(prefix)]] = 0
    return logits


def test_pure_and_donated_steps_are_bit_equal() -> None:
    def trace(donate: bool) -> list[fs.Snapshot]:
        target, drafter = TARGETS["small checksum"], suffix(shared=True, corpus=[[0, 1, 2, 0, 0]])
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
    target, drafter = TARGETS["small checksum"], suffix(shared=True)
    state = run(start(target, drafter, [[0, 1, 2, 0], [1]]), target, drafter, 3)
    before = fs.snapshot(state)
    drafting, _ = fs.prefill(state, drafter)
    assert drafting.num_drafted.max() > 0 and fs.snapshot(state) == before
    ends = []
    for kv in (True, False):
        snap = fs.snapshot(drafting, kv=kv)
        for branch in (fs.fork(drafting), fs.restore(snap, target, drafter), drafting):
            branch, _ = fs.verify(branch, target)
            ends.append(fs.snapshot(run(branch, target, drafter, 3)))
    assert all(end == ends[0] for end in ends)


@with_jax
def test_states_of_jax_equal_those_of_torch() -> None:
    drafter = suffix(shared=True, corpus=[[0, 1, 2, 0, 0, 1], [2, 2]])
    sides = {}
    for framework in ("torch", "jax"):
        target = TARGETS["small checksum"] if framework == "torch" else jax_model(TARGETS["small checksum"])
        state = fs.init(config(rows=3, length=LENGTH, rule=COUPLED, device=DEVICE), target, drafter)
        state, _ = fs.admit(state, target, drafter, [[0, 1, 2, 0], [1]], seeds=[3, -4], temperature=[0.0, 1.0], max_tokens=30)
        snapshots = []
        for wanted in (3, [0, 2, 1], 0, None):
            state, draft = fs.prefill(state, drafter, num_draft=wanted)
            snapshots += [fs.snapshot(state), draft.tokens.tolist()]
            state, verdict = fs.verify(state, target)
            snapshots += [fs.snapshot(state), verdict.tokens.tolist()]
        sides[framework] = snapshots, state, target
    assert sides["torch"][0] == sides["jax"][0]
    (_, state, target), (_, start_, jax_target) = sides.values()
    rounds = jax.jit(lambda state, drafter: jax.lax.scan(lambda s, _: fs.step_round(s, jax_target, drafter), state, length=6))
    for given_ in (drafter, jax.tree.map(jnp.asarray, drafter)):  # past outputs on the host, and on the device
        end, stacked = rounds(start_, given_)
        here = state
        for number in range(6):
            here, verdict = fs.step_round(here, target, drafter)
            assert stacked.tokens[number].tolist() == verdict.tokens.tolist()
        assert fs.snapshot(end) == fs.snapshot(here) and int(stacked.num_drafted.sum()) > 0


@with_jax
def test_past_outputs_are_data_of_a_program() -> None:
    target, drafter = jax_model(CYCLE), suffix(corpus=[[0, 1, 2, 3]])
    state = start(target, drafter, [[4, 0]], device=DEVICE)
    traces = []

    @jax.jit
    def turn(state: fs.SpecState, drafter: Any) -> tuple[fs.SpecState, fs.Verdict]:
        traces.append(1)
        return fs.step_round(state, target, drafter)

    for lists, accepted in (([[0, 1, 2, 3]], 2), ([[0, 1, 3, 3]], 0), ([[4, 0, 1, 2]], 1)):
        assert turn(state, suffix(corpus=lists))[1].num_accepted.tolist() == [accepted]
    assert len(traces) == 1
    assert turn(state, suffix(corpus=[[0, 1, 2, 3, 4, 0]] * 3))[1].num_accepted.tolist() == [2] and len(traces) == 2
    assert [leaf.shape for leaf in jax.tree.leaves(drafter)] == [(1, 8)] and jax.tree.leaves(suffix()) == []
    assert turn(state, suffix())[1].num_drafted.tolist() == [0] and len(traces) == 3
    again = jax.tree.unflatten(jax.tree.structure(drafter), jax.tree.leaves(drafter))
    assert again.budgets == drafter.budgets and again.max_outputs == drafter.max_outputs


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_captured_rounds_equal_eager_ones() -> None:
    shape = LlamaConfig(
        vocab_size=97, hidden_size=64, intermediate_size=128, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=16, max_len=256
    )
    model, drafter = random_llama(shape, 0, device="cuda"), suffix(shared=True, corpus=[[5, 6, 7, 5, 6], [9] * 5])
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


def test_outputs_are_added_to_a_new_drafter() -> None:
    first = suffix(max_outputs=3, factor=2.0)
    second = first.with_outputs([[1, 2, 3], [4]])
    third = second.with_outputs(torch.tensor([[5, 6, -1, -1], [7, 8, 9, 1]], dtype=torch.int64))
    lines = [[] if each.corpus is None else [line.tolist() for line in each.corpus.lines()] for each in (first, second, third)]
    assert lines == [[], [[1, 2, 3], [4]], [[4], [5, 6], [7, 8, 9, 1]]]  # the oldest is left out
    assert third.factor == 2.0 and third.max_outputs == 3 and third.corpus is not None
    assert third.corpus.tokens.shape == (4, 8) and third.corpus.tokens.dtype == np.int32
    with pytest.raises(ValueError, match="read-only"):
        third.corpus.tokens[0, 0] = 5
    assert suffix(corpus=[[1], [2], [3], [4]], max_outputs=2).corpus.tokens.tolist() == [[3, -1], [4, -1]]  # type: ignore[union-attr]


@pytest.mark.parametrize("kind", ["list", "numpy", "torch", "jax"])
def test_past_outputs_are_copied(kind: str) -> None:
    made: dict[str, Any] = {"list": list, "numpy": np.array, "torch": torch.tensor, "jax": jnp.array}
    given_ = made[kind]([[0, 1, 2, 3]])
    drafter = suffix(corpus=given_)
    if kind == "list":
        given_[0][1] = 4
    elif kind != "jax":
        given_[0, 1] = 4
    state = start(CYCLE, drafter, [[4]])
    assert fs.prefill(state, drafter)[1].tokens.tolist() == [[1, -1, -1]]


def test_a_model_drafts_where_nothing_is_found() -> None:
    target, draft = ChecksumModel(), ChecksumDraft()
    drafter = fallback(suffix(offset=-1), standalone(draft))
    alone = start(target, standalone(draft), [[5, 6, 7], [8, 8, 8]])
    state = start(target, drafter, [[5, 6, 7], [8, 8, 8]])
    assert torch.equal(fs.prefill(state, drafter)[1].tokens, fs.prefill(alone, standalone(draft))[1].tokens)
    learnt = fallback(suffix(offset=-1, corpus=[[7, 39, 50]]), standalone(draft))
    assert fs.prefill(state, learnt)[1].tokens[0].tolist() == [50, -1, -1]


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"max_depth": 1}, ArgumentError, "max_depth: expected at least 2, got 1"),
        ({"max_depth": 2.0}, ArgumentTypeError, "max_depth: expected an int, got 2.0"),
        ({"max_outputs": True}, ArgumentTypeError, "max_outputs: expected an int, got True"),
        ({"max_outputs": 0}, ArgumentError, "max_outputs: expected at least 1, got 0"),
        ({"factor": "1"}, ArgumentTypeError, "factor: expected a number, got '1'"),
        ({"factor": -0.1}, ArgumentError, "factor: expected at least 0, got -0.1"),
        ({"offset": float("nan")}, ArgumentError, "offset: expected a finite number, got nan"),
        ({"offset": True}, ArgumentTypeError, "offset: expected a number, got True"),
        ({"offset": -24}, ArgumentError, "offset: expected a draft of at least one token behind some match, got -24"),
        ({"min_probability": 1.5}, ArgumentError, "min_probability: expected from 0 to 1, got 1.5"),
        ({"shared": 1}, ArgumentTypeError, "shared: expected True or False, got 1"),
        ({"corpus": [1, 2]}, ArgumentTypeError, r"corpus\[0\]: expected a list of token ids, got int"),
        ({"corpus": ["ab"]}, ArgumentTypeError, r"corpus\[0\]: expected a list of token ids, got str"),
        ({"corpus": "ab"}, ArgumentTypeError, "corpus: expected a list of token lists, or an integer array"),
        ({"corpus": [[1], [0.5]]}, ArgumentTypeError, r"corpus\[1\]: expected a list of token ids, got float64"),
        ({"corpus": [[1, -2]]}, ArgumentError, r"corpus\[0\]: expected ids from 0 to 2147483646, or -1, got -2"),
        ({"corpus": [[2**31]]}, ArgumentError, r"corpus\[0\]: .* got 2147483648"),
        ({"corpus": torch.zeros(3, dtype=torch.int32)}, ArgumentTypeError, r"corpus: .* got shape \(3,\)"),
        ({"corpus": torch.zeros(3, 2)}, ArgumentTypeError, r"corpus\[0\]: .* got float32"),
    ],
)
def test_settings_that_cannot_work_are_refused(changes: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        suffix(**changes)


def test_outputs_that_cannot_be_the_targets_are_refused() -> None:
    with pytest.raises(ModelError, match="corpus: expected ids of the target, from 0 to 4, got 5"):
        fs.init(config(), CYCLE, suffix(corpus=[[1, 5]]))
    with pytest.raises(ArgumentTypeError, match=r"outputs\[1\]: expected a list of token ids, got NoneType"):
        suffix().with_outputs([[1], None])  # type: ignore[list-item]
    with pytest.raises(fs.FuncspecError, match=r"drafter: expected None, as the state was made with"):
        fs.prefill(start(ChecksumModel(), suffix(), [[5]]), standalone(ChecksumModel()))
