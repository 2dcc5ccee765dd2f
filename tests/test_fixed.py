"""Forced drafts: what is drafted is what the table says, and the output is the target's own."""

from functools import partial
from typing import Any

import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from oracle import checksum_greedy, checksum_next, config, output, run
from ratio_oracle import LENGTH, RATIO, TARGET, VOCAB, written_round

import funcspec as fs
from funcspec.drafters import fallback, fixed, standalone
from funcspec.errors import ArgumentError, ArgumentTypeError, ModelError
from funcspec.interop import jax_model
from funcspec.models import ChecksumDraft, ChecksumModel

DEVICE = "cuda" if jax.default_backend() == "gpu" else "cpu"
GREEDY, COUPLED = fs.rules.greedy, fs.rules.coupled
PROMPT = [5, 6, 7]
TRUTH = [*PROMPT, *checksum_greedy(PROMPT, 12)]
with_jax = pytest.mark.skipif(DEVICE == "cpu" and torch.cuda.is_available(), reason="JAX and torch see other devices")


def start(target: Any, drafter: Any, prompts: list[list[int]], **changes: Any) -> fs.SpecState:
    """A greedy state with these prompts, a row each."""
    defaults = {"rows": len(prompts), "length": LENGTH}
    state = fs.init(config(**defaults | changes), target, drafter)
    return fs.admit(state, target, drafter, prompts, seeds=range(len(prompts)))[0]


def test_places_are_absolute() -> None:
    """Committed are four tokens each: rows draft from place 4 on, to the first -1 and to the end of their list."""
    table = [[0, 0, 0, 0, 11, 12, 13, 14], [-1, -1, -1, -1, 21, -1, 23], [0, 0, 0, 0, 31, 32], [0, 0, 0, 0], [], [0] * 30]
    drafter = fixed(table)
    state = start(ChecksumModel(), drafter, [PROMPT] * 6, rows=7)
    state, draft = fs.prefill(state, drafter)
    assert draft.tokens.tolist() == [[11, 12, 13], [21, -1, -1], [31, 32, -1], [-1] * 3, [-1] * 3, [0, 0, 0], [-1] * 3]
    assert draft.num_draft.tolist() == [3, 1, 2, 0, 0, 3, 0]
    before = fs.snapshot(state)
    state, more = fs.decode(state, drafter)
    assert torch.equal(more.tokens, draft.tokens)
    assert all(np.array_equal(value, before.fields[name]) for name, value in fs.snapshot(state).fields.items())
    state, verdict = fs.verify(state, ChecksumModel())
    assert verdict.num_accepted.tolist() == [0] * 7 and verdict.tokens[:6, 0].tolist() == [TRUTH[4]] * 6


@pytest.mark.parametrize("drafts", [0, 1, 3, 8])
def test_a_replay_accepts_everything(drafts: int) -> None:
    drafter = fixed([TRUTH])
    state, place = start(ChecksumModel(), drafter, [PROMPT], drafts=drafts), 4
    while place < len(TRUTH):
        state, verdict = fs.step_round(state, ChecksumModel(), drafter)
        expected = min(drafts, len(TRUTH) - place)
        assert verdict.num_drafted.tolist() == verdict.num_accepted.tolist() == [expected]
        place += expected + 1
    assert output(state, 0)[:12] == TRUTH[3:]


def test_a_wrong_token_ends_a_round_and_the_next_goes_on_behind_it() -> None:
    wrong = [*TRUTH[:6], (TRUTH[6] + 1) % 97, *TRUTH[7:]]
    drafter = fixed([wrong])
    state, accepted = start(ChecksumModel(), drafter, [PROMPT], drafts=4), []
    for _ in range(3):
        state, verdict = fs.step_round(state, ChecksumModel(), drafter)
        accepted += verdict.num_accepted.tolist()
    assert accepted == [2, 4, 3] and output(state, 0)[:12] == TRUTH[3:]


def test_the_tokens_of_a_state_are_a_table() -> None:
    prompts = [PROMPT, [1], [40, 2, 9, 9]]
    done = run(start(ChecksumModel(), None, prompts), ChecksumModel(), None, LENGTH)
    drafter = fixed(done.tokens)
    state, rounds = start(ChecksumModel(), drafter, prompts), 0
    while fs.any_active(state):
        state, verdict = fs.step_round(state, ChecksumModel(), drafter)
        assert torch.equal(verdict.num_accepted, verdict.num_drafted)
        rounds += 1
    assert torch.equal(state.tokens, done.tokens) and rounds < LENGTH / 3


@settings(max_examples=20)
@given(data=st.data())
def test_output_is_that_of_plain_decoding(data: st.DataObject) -> None:
    """Whatever is forced, and whoever else is there."""
    target, drafts, donate = ChecksumModel(vocab_size=5, spread=True), data.draw(st.integers(0, 6)), data.draw(st.booleans())
    rule = data.draw(st.sampled_from([GREEDY, COUPLED]))
    line = st.lists(st.integers(-1, 4), max_size=LENGTH + 3)
    drafter = fixed(data.draw(st.lists(line, max_size=2)))
    prompts = data.draw(st.lists(st.lists(st.integers(0, 4), min_size=1, max_size=9), min_size=2, max_size=2))
    request = {"seeds": [3, -4], "temperature": [0.0, 1.0] if rule is COUPLED else [0.0, 0.0], "max_tokens": data.draw(st.integers(1, 31))}
    state = fs.init(config(rows=2, length=LENGTH, drafts=drafts, rule=rule), target, drafter)
    state, _ = fs.admit(state, target, drafter, prompts, donate=donate, **request)
    while fs.any_active(state):
        wanted = data.draw(st.one_of(st.none(), st.lists(st.integers(0, drafts), min_size=2, max_size=2)))
        state, _ = fs.step_round(state, target, drafter, num_draft=wanted, donate=donate)
    plain, _ = fs.admit(fs.init(config(rows=2, length=LENGTH, drafts=0, rule=rule), target), target, None, prompts, **request)
    while fs.any_active(plain):
        plain, _ = fs.verify(plain, target, donate=True)
    assert torch.equal(state.tokens, plain.tokens)


def test_ratio_rounds_are_the_written_definition() -> None:
    table = [[*range(LENGTH)], [checksum_next([9])] * LENGTH]
    prompts, seeds, heat = [[3, 4, 5], [9]], [11, -5], [30.0, 1.0]
    drafter = fixed(table)
    state = fs.init(config(rows=2, length=LENGTH, rule=RATIO), TARGET, drafter)
    state, first = fs.admit(state, TARGET, drafter, prompts, seeds=seeds, temperature=heat)
    sequences = [[*prompt, token] for prompt, token in zip(prompts, first.tokens, strict=True)]
    for _ in range(6):
        state, verdict = fs.step_round(state, TARGET, drafter)
        for row, sequence in enumerate(sequences):
            drafts = table[row][len(sequence) :][:3]
            q = partial(forced, len(sequence), drafts)
            made, emitted, _ = written_round(sequence, seeds[row], heat[row], len(drafts), point=True, q=q)
            assert made == drafts and verdict.tokens[row, : len(emitted)].tolist() == emitted
            assert int(verdict.num_emitted[row]) == len(emitted)
            sequence += emitted


def forced(start_: int, drafts: list[int], sequence: list[int]) -> np.ndarray:
    """Logits that leave no choice but the draft."""
    logits = np.full(VOCAB, -np.inf, np.float32)
    logits[drafts[len(sequence) - start_]] = 0
    return logits


def test_old_states_draft_what_they_drafted() -> None:
    """Pure and donated, from a fork, and again from the same state."""
    drafter = fixed([TRUTH, TRUTH[:6]])
    state = run(start(ChecksumModel(), drafter, [PROMPT, PROMPT]), ChecksumModel(), drafter, 1)
    before = fs.snapshot(state)
    ends = []
    for branch, donate in ((state, False), (fs.fork(state), True), (state, False)):
        ends.append(fs.snapshot(run(branch, ChecksumModel(), drafter, 3, donate=donate)))
    assert all(end == ends[0] for end in ends) and fs.snapshot(state) == before


@with_jax
def test_states_of_jax_equal_those_of_torch() -> None:
    drafter = fixed([TRUTH, [9] * 20])
    state = start(ChecksumModel(), drafter, [PROMPT, [1]], rows=3, device=DEVICE)
    target = jax_model(ChecksumModel())
    other = start(target, drafter, [PROMPT, [1]], rows=3, device=DEVICE)
    end, stacked = jax.jit(lambda state, drafter: jax.lax.scan(lambda s, _: fs.step_round(s, target, drafter), state, length=4))(
        other, drafter
    )
    for number in range(4):
        (state, verdict), (other, eager) = fs.step_round(state, ChecksumModel(), drafter), fs.step_round(other, target, drafter)
        assert stacked.tokens[number].tolist() == verdict.tokens.tolist() == eager.tokens.tolist()
        assert stacked.num_drafted[number].tolist() == verdict.num_drafted.tolist()
    assert fs.snapshot(end) == fs.snapshot(state) == fs.snapshot(other) and int(stacked.num_accepted.sum()) > 0


@with_jax
def test_the_table_is_data_of_a_program() -> None:
    target, traces = jax_model(ChecksumModel()), []
    state = start(target, fixed([TRUTH]), [PROMPT], device=DEVICE)

    @jax.jit
    def turn(state: fs.SpecState, drafter: Any) -> tuple[fs.SpecState, fs.Verdict]:
        traces.append(1)
        return fs.step_round(state, target, drafter)

    for drafter, accepted in ((fixed([TRUTH]), 3), (fixed([[0] * 15]), 0), (fixed(jnp.array([TRUTH[:6] + [0] * 9])), 2)):
        assert turn(state, drafter)[1].num_accepted.tolist() == [accepted]
    assert len(traces) == 1 and len(jax.tree.leaves(fixed([TRUTH]))) == 1


def test_a_model_drafts_where_nothing_is_known() -> None:
    model = standalone(ChecksumDraft())
    drafter = fallback(fixed([[0, 0, 0, 0, 50], []]), model)
    state = start(ChecksumModel(), drafter, [PROMPT, PROMPT])
    alone = fs.prefill(start(ChecksumModel(), model, [PROMPT, PROMPT]), model)[1]
    assert fs.prefill(state, drafter)[1].tokens.tolist() == [[50, -1, -1], alone.tokens[1].tolist()]


def test_tables_that_do_not_fit_are_refused() -> None:
    with pytest.raises(ModelError, match="tokens: expected ids of the target, from 0 to 96, got 97"):
        fs.init(config(), ChecksumModel(), fixed([[97]]))
    with pytest.raises(ArgumentError, match="tokens: expected lists for 1 rows, got 3"):
        fs.init(config(), ChecksumModel(), fixed([[1], [], [2]]))
    fs.init(config(), ChecksumModel(), fixed([[1], [], [-1]]))
    for wrong, message in (
        ([1, 2], r"tokens\[0\]: expected a list of token ids, got int"),
        (None, "tokens: expected a list of token lists, or an integer array"),
        ([[1.5]], r"tokens\[0\]: .* got float64"),
        ([[True]], r"tokens\[0\]: .* got bool"),
        (np.zeros((2, 2), np.float32), r"tokens\[0\]: .* got float32"),
    ):
        with pytest.raises(ArgumentTypeError, match=message):
            fixed(wrong)  # type: ignore[arg-type]
    with pytest.raises(ArgumentError, match=r"tokens\[1\]: expected ids from 0 to 2147483646, or -1, got -2"):
        fixed([[1], [-2]])
