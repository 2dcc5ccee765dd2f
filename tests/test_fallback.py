"""Two drafters as one: who drafts what, and that the model's KV stays true whoever drafts."""

from dataclasses import dataclass
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
from oracle import config, output, run
from watching import Watching, cached, live, window

import funcspec as fs
from funcspec.drafters import Ngram, fallback, ngram, standalone
from funcspec.errors import ArgumentTypeError, ModelError
from funcspec.interop import jax_model
from funcspec.models import ChecksumDraft, ChecksumModel, TableModel
from funcspec.models.base import KVSpec
from funcspec.models.llama import LlamaConfig, random_llama

DEVICE = "cuda" if jax.default_backend() == "gpu" else "cpu"
LENGTH, VOCAB = 64, 7
GREEDY, COUPLED = fs.rules.greedy, fs.rules.coupled
TARGET, DRAFT = ChecksumModel(vocab_size=VOCAB), ChecksumDraft(vocab_size=VOCAB)
SPREAD, SPREAD_DRAFT = ChecksumModel(vocab_size=VOCAB, spread=True), ChecksumDraft(vocab_size=VOCAB, spread=True)
NEXT, DRAFT_NEXT = checksum(VOCAB)
with_jax = pytest.mark.skipif(DEVICE == "cpu" and torch.cuda.is_available(), reason="JAX and torch see other devices")
PROMPTS = [[5, 6, 1], [1], [2, 2, 2, 2], [0, 1, 2, 3, 4, 5, 6, 0, 1]]


def start(target: Any, drafter: Any, prompts: list[list[int]], **changes: Any) -> fs.SpecState:
    """A greedy state with these prompts, a row each."""
    defaults = {"rows": len(prompts), "length": LENGTH, "block_size": 4}
    return fs.admit(fs.init(config(**defaults | changes), target, drafter), target, drafter, prompts)[0]


def whole(prompt: list[int]) -> list[int]:
    """A row to its end, by plain greedy decoding."""
    sequence = list(prompt)
    while len(sequence) < LENGTH:
        sequence.append(NEXT(sequence))
    return sequence


def check_cache(state: fs.SpecState) -> None:
    """At the start of a round the draft's KV holds the committed tokens it was fed, each at its place."""
    for row, fed in enumerate(state.draft_len.tolist()):
        if state.draft_block_tables[row, 0] >= 0:
            tokens, positions = cached(state, row)
            assert tokens[:fed] == state.tokens[row, :fed].tolist() and positions[:fed] == list(range(fed))


@pytest.mark.parametrize("donate", [False, True])
@pytest.mark.parametrize("drafts", [0, 1, 2, 3, 6])
@pytest.mark.parametrize("size", [1, 2, 3])
def test_every_round_is_what_the_two_say_alone(size: int, drafts: int, donate: bool) -> None:
    """The draft's answers come out of its KV, so one wrong entry would change what is accepted."""
    drafter = fallback(ngram(min_ngram=size), standalone(DRAFT))
    state = start(TARGET, drafter, PROMPTS, drafts=drafts)
    sequences = [[*prompt, NEXT(prompt)] for prompt in PROMPTS]
    served = [0, 0]
    while fs.any_active(state):
        counts, alive = state.num_tokens.tolist(), state.is_live.tolist()
        state, verdict = fs.step_round(state, TARGET, drafter, donate=donate)
        check_cache(state)
        for row, sequence in enumerate(sequences):
            if not alive[row]:
                continue
            proposed = drafted(sequence, min(LENGTH - len(sequence) - 1, drafts), DRAFT_NEXT, min_ngram=size)
            accepted, tokens = emitted(sequence, proposed, NEXT)
            assert int(verdict.num_drafted[row]) == len(proposed) and int(verdict.num_accepted[row]) == accepted
            assert verdict.tokens[row, : len(tokens)].tolist() == tokens
            assert int(state.draft_len[row]) == counts[row]
            served[bool(drafted(sequence, 1, None, min_ngram=size))] += 1
            sequence += tokens
    assert [output(state, row) for row in range(4)] == [seq[len(prompt) :] for seq, prompt in zip(sequences, PROMPTS, strict=True)]
    assert served[1] > 0 and (size == 1 or served[0] > 0)


@settings(max_examples=15)
@given(data=st.data())
def test_output_is_that_of_plain_decoding(data: st.DataObject) -> None:
    """Sampled or greedy, ragged, with rows that go and come, a fork or a snapshot in mid-round."""
    rule, drafts, donate = data.draw(st.sampled_from([GREEDY, COUPLED])), data.draw(st.integers(0, 6)), data.draw(st.booleans())
    drafter = fallback(ngram(min_ngram=data.draw(st.integers(1, 3))), standalone(SPREAD_DRAFT))
    prompt = st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=12)
    settings_ = config(rows=3, length=LENGTH, drafts=drafts, rule=rule, block_size=data.draw(st.sampled_from([1, 4, 16])), num_blocks=800)
    state, requests = fs.init(settings_, SPREAD, drafter), {}
    for _ in range(12):
        for row in {0, 1, 2} - set(requests):
            if data.draw(st.booleans()):
                sampled = {"temperature": data.draw(st.sampled_from([0.0, 0.8, 1.5]))} if rule is COUPLED else {}
                request = {"seeds": [data.draw(st.integers(0, 99))], "max_tokens": data.draw(st.integers(1, 40)), **sampled}
                requests[row] = data.draw(prompt), request
                state, _ = fs.admit(state, SPREAD, drafter, [requests[row][0]], rows=[row], donate=donate, **request)
        wanted = data.draw(st.one_of(st.none(), st.lists(st.integers(0, drafts), min_size=3, max_size=3)))
        state, _ = fs.prefill(state, drafter, num_draft=wanted, donate=donate)
        for _ in range(data.draw(st.integers(0, max(drafts - 1, 0)))):
            state, _ = fs.decode(state, drafter, donate=donate)
        what = data.draw(st.sampled_from(["go on", "go on", "fork", "restore", "restore without KV"]))
        if what == "fork":
            other, _ = fs.verify(fs.fork(state), SPREAD)
            run(other, SPREAD, drafter, 2)
        elif what.startswith("restore"):
            state = fs.restore(fs.snapshot(state, kv=what == "restore"), SPREAD, drafter)
        state, _ = fs.verify(state, SPREAD, donate=donate)
        check_cache(state)
        for row in [row for row in requests if not int(state.is_live[row])]:
            check_output(state, row, *requests.pop(row), rule)
            state = fs.release(state, [row], donate=donate)
    state = run(state, SPREAD, drafter, 40, donate=donate)
    for row, (tokens, request) in requests.items():
        check_output(state, row, tokens, request, rule)


def check_output(state: fs.SpecState, row: int, prompt: list[int], request: dict[str, Any], rule: fs.rules.Rule) -> None:
    plain = fs.init(config(length=LENGTH, drafts=0, rule=rule), SPREAD)
    plain, _ = fs.admit(plain, SPREAD, None, [prompt], **request)
    while fs.any_active(plain):
        plain, _ = fs.verify(plain, SPREAD, donate=True)
    assert output(state, row) == output(plain, 0)


def test_who_drafts_by_hand() -> None:
    draft = Watching(DRAFT)
    drafter = fallback(ngram(min_ngram=2), standalone(draft))
    state = start(TARGET, drafter, [[1, 3, 5, 2], [2, 2, 2, 2]], drafts=3, rows=3)
    assert state.tokens[:2, :5].tolist() == [[1, 3, 5, 2, 3], [2, 2, 2, 2, 0]]
    draft.clear()
    state.tokens[0, 4] = 3
    state.tokens[1, 4] = 2  # the second row repeats itself
    state, first = fs.prefill(state, drafter)
    alone = DRAFT_NEXT([1, 3, 5, 2, 3])
    assert first.tokens.tolist() == [[alone, -1, -1], [2, 2, -1], [-1, -1, -1]]
    assert first.num_draft.tolist() == [3, 2, 0] and state.draft_len.tolist() == [5, 5, 0]
    assert live(draft.seen[0], 0) == [4] and live(draft.seen[0], 1) == [4]  # both are fed
    state, second = fs.decode(state, drafter)
    assert live(draft.seen[1], 0) == [5] and live(draft.seen[1], 1) == []  # the served row drafts no further
    assert window(draft.seen[1], 1, "slot_mapping") == [-1]
    assert second.tokens.tolist() == [[alone, DRAFT_NEXT([1, 3, 5, 2, 3, alone]), -1], [2, 2, -1], [-1, -1, -1]]


def test_b6_the_draft_is_fed_in_rounds_that_draft_nothing() -> None:
    drafter = fallback(ngram(), standalone(DRAFT))
    state = start(TARGET, drafter, PROMPTS[:2], drafts=3)
    for wanted in (3, 0, 0, 3):
        counts = state.num_tokens.tolist()
        state, _ = fs.step_round(state, TARGET, drafter, num_draft=wanted)
        assert state.draft_len.tolist() == counts
        check_cache(state)


def test_a1_rows_past_the_drafts_limit_are_still_looked_up() -> None:
    draft = Watching(ChecksumDraft(vocab_size=VOCAB, max_len=16))
    drafter = fallback(ngram(), standalone(draft))
    state = start(TARGET, drafter, [[0, 1, 2, 3, 4, 5, 6, 0, 1]], drafts=3)
    late = 0
    while fs.any_active(state):
        n = int(state.num_tokens[0])
        state, verdict = fs.step_round(state, TARGET, drafter)
        late += int(verdict.num_drafted[0]) * (n > 20)
        assert int(state.draft_len[0]) == min(n, 16)
    assert late > 0 and all(int(batch.positions.max()) < 16 for batch in draft.seen)
    assert state.tokens[0].tolist() == whole(PROMPTS[3])


def test_a_second_drafter_without_a_model() -> None:
    """Long matches first and from anywhere, else short ones nearby."""
    drafter = fallback(ngram(max_ngram=4, min_ngram=3), ngram(max_ngram=1, window=8, occurrence="last"))
    assert drafter.kv_model is None and drafter.proposal == "point"
    state = start(TARGET, drafter, PROMPTS, drafts=4)
    sequences = [[*prompt, NEXT(prompt)] for prompt in PROMPTS]
    for _ in range(10):
        state, verdict = fs.step_round(state, TARGET, drafter)
        for row, sequence in enumerate(sequences):
            proposed = drafted(sequence, 4, None, max_ngram=4, min_ngram=3)
            proposed = proposed or drafted(sequence, 4, None, max_ngram=1, window=8, latest=True)
            accepted, tokens = emitted(sequence, proposed, NEXT)
            assert (int(verdict.num_drafted[row]), int(verdict.num_accepted[row])) == (len(proposed), accepted)
            sequence += tokens


def test_more_is_accepted_than_with_either_alone() -> None:
    """A target that counts up after even tokens and repeats a phrase: the table draft knows the first, lookup the second."""
    size = 12
    phrase = {6: 9, 9: 7, 7: 11, 11: 8, 8: 6}
    rows = [[float(after == phrase.get(token, (token + 1) % size)) for after in range(size)] for token in range(size)]
    target = TableModel(tuple(map(tuple, rows)))
    known = [[float(after == (token + 1) % size) for after in range(size)] for token in range(size)]
    draft = standalone(TableModel(tuple(map(tuple, known))))
    rounds = {}
    for name, drafter in (("lookup", ngram()), ("draft", draft), ("both", fallback(ngram(), draft))):
        emissions = list(fs.generate(config(length=LENGTH, drafts=4), target, drafter, [[0]], max_tokens=40))
        rounds[name] = len(emissions) - 1
    assert rounds["both"] < min(rounds["lookup"], rounds["draft"])
    assert 39 / rounds["both"] > 2


@with_jax
def test_states_of_jax_equal_those_of_torch() -> None:
    sides = {}
    for framework in ("torch", "jax"):
        made = jax_model if framework == "jax" else lambda model: model
        target, drafter = made(SPREAD), fallback(ngram(min_ngram=2), standalone(made(SPREAD_DRAFT)))
        state = fs.init(config(rows=3, length=LENGTH, rule=COUPLED, block_size=4, device=DEVICE), target, drafter)
        state, _ = fs.admit(state, target, drafter, PROMPTS[1:], seeds=[3, -4, 5], temperature=[0.0, 1.0, 1.0], max_tokens=40)
        found = []
        for wanted in (3, [0, 2, 1], None):
            state, draft = fs.prefill(state, drafter, num_draft=wanted)
            found.append(draft.tokens.tolist())
            state, draft = fs.decode(state, drafter)
            found += [draft.tokens.tolist(), fields(state)]
            state, verdict = fs.verify(state, target)
            found += [verdict.tokens.tolist(), fs.snapshot(state)]
        sides[framework] = found, state, target, drafter
    assert sides["torch"][0] == sides["jax"][0]
    (_, state, target, drafter), (_, start_, jax_target, jax_drafter) = sides.values()
    end, stacked = jax.jit(lambda state: jax.lax.scan(lambda s, _: fs.step_round(s, jax_target, jax_drafter), state, length=6))(start_)
    for number in range(6):
        state, verdict = fs.step_round(state, target, drafter)
        assert stacked.tokens[number].tolist() == verdict.tokens.tolist()
    assert fs.snapshot(end) == fs.snapshot(state)


def fields(state: fs.SpecState) -> dict[str, Any]:
    return {name: value.tolist() for name, value in fs.snapshot(state, kv=False).fields.items()}


@partial(jax.tree_util.register_dataclass, data_fields=["logits"], meta_fields=[])
@dataclass(frozen=True)
class JaxTable:
    """Logits by the newest token alone; they are a leaf."""

    logits: jax.Array

    framework, vocab_size, max_len, kv_spec = "jax", VOCAB, LENGTH, KVSpec(0, ())

    def forward(self, kv: Any, batch: Any) -> Any:
        ids = batch.input_ids if batch.logits_indices is None else batch.input_ids[batch.logits_indices]
        return kv, self.logits[ids], ()


@with_jax
def test_the_drafter_is_an_argument_of_a_program_and_its_weights_are_leaves() -> None:
    target, draft = JaxTable(jnp.roll(jnp.eye(VOCAB), 1, 1)), JaxTable(jnp.roll(jnp.eye(VOCAB), 2, 1))
    drafter = fallback(ngram(), standalone(draft))
    assert jax.tree.leaves(drafter) == [draft.logits]
    again = jax.tree.unflatten(jax.tree.structure(drafter), [target.logits])
    assert isinstance(again, fs.drafters.Fallback) and again.proposer == Ngram()
    traces = []

    @jax.jit
    def turn(state: fs.SpecState, target: Any, drafter: Any) -> tuple[fs.SpecState, fs.Verdict]:
        traces.append(1)
        return fs.step_round(state, target, drafter)

    for draft_, accepted in ((drafter, 0), (again, 3)):  # other weights, the same program
        state = start(target, draft_, [[5, 6]], device=DEVICE)
        state, verdict = turn(state, target, draft_)
        assert verdict.num_accepted.tolist() == [accepted]
        for _ in range(10):
            state, verdict = turn(state, target, draft_)
        assert verdict.num_accepted.tolist() == [3]  # the text repeats itself by now
        count = int(state.num_tokens[0])
        assert count > 30 and state.tokens[0, :count].tolist() == [(5 + place) % VOCAB for place in range(count)]
    assert len(traces) == 1


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_captured_rounds_equal_eager_ones() -> None:
    shape = LlamaConfig(
        vocab_size=97, hidden_size=64, intermediate_size=128, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=16, max_len=256
    )
    model = random_llama(shape, 0, device="cuda")
    drafter = fallback(ngram(), standalone(random_llama(shape, 1, device="cuda")))
    state = start(model, drafter, [[5, 6, 7, 5, 6], [1], [9] * 20], rows=4, length=256, device="cuda", num_blocks=900)
    wanted = torch.full((4,), 3, dtype=torch.int32, device="cuda")
    captured = fs.graphs.capture(fs.step_round, state, model, drafter, num_draft=wanted)
    eager, replayed = fs.fork(state), state
    for number in range(40):
        wanted.fill_(number % 4)
        eager, expected = fs.step_round(eager, model, drafter, num_draft=wanted)
        replayed, verdict = captured(replayed)
        assert torch.equal(verdict.tokens, expected.tokens) and torch.equal(verdict.num_drafted, expected.num_drafted)
    assert all(np.array_equal(value, fields(replayed)[name]) for name, value in fields(eager).items())


@pytest.mark.parametrize("donate", [False, True])
@pytest.mark.parametrize("passes", [0, 1, 2, 3])
def test_a_model_that_raises_leaves_the_state_usable(passes: int, donate: bool) -> None:
    class Failing(ChecksumDraft):
        left = 10**9

        def forward(self, kv: Any, batch: Any) -> Any:
            Failing.left -= 1
            if Failing.left < 0:
                raise RuntimeError("out of luck")
            return super().forward(kv, batch)

    drafter = fallback(ngram(min_ngram=2), standalone(Failing(vocab_size=VOCAB)))
    state = run(start(TARGET, drafter, PROMPTS, drafts=4), TARGET, drafter, 2, donate=donate)
    before = state.tokens.clone()
    Failing.left = passes
    with pytest.raises(RuntimeError, match="out of luck"):
        fs.step_round(state, TARGET, drafter, donate=donate)
    Failing.left = 10**9
    assert torch.equal(state.tokens, before)
    state = run(state, TARGET, drafter, LENGTH, donate=donate)
    assert state.tokens.tolist() == [whole(prompt) for prompt in PROMPTS]


def test_what_cannot_be_combined_is_refused() -> None:
    model = standalone(DRAFT)
    for wrong in ("ngram", None, DRAFT, Ngram):
        with pytest.raises(ArgumentTypeError, match="first: expected a drafter, got"):
            fallback(wrong, model)  # type: ignore[arg-type]
        with pytest.raises(ArgumentTypeError, match="second: expected a drafter, got"):
            fallback(ngram(), wrong)  # type: ignore[arg-type]
    with pytest.raises(ModelError, match=r"first: .* got two drafters with models\. Fix: .* as second"):
        fallback(model, model)  # type: ignore[arg-type]
    with pytest.raises(ModelError, match=r"first: .* got one with a model"):
        fallback(model, ngram())  # type: ignore[arg-type]
    with pytest.raises(ModelError, match="second: expected a drafter that is not two itself"):
        fallback(ngram(min_ngram=3), fallback(ngram(), model))

    class Drawn(Ngram):
        proposal = "sampled"

    with pytest.raises(ModelError, match="first: expected a drafter of 'point' proposals, got one of 'sampled'"):
        fallback(Drawn(), model)

    class Silent:
        proposal, token_ids, kv_model = "point", None, None

        def init(self, config: Any, target: Any) -> None: ...
        def first(self, transition: Any, wanted: Any) -> None: ...
        def next(self, transition: Any) -> None: ...

    with pytest.raises(ArgumentTypeError, match="first: expected a drafter with a function propose, got Silent"):
        fallback(Silent(), model)  # type: ignore[arg-type]


def test_a_second_that_does_not_fit_the_target_is_refused() -> None:
    with pytest.raises(ModelError, match="vocabulary of 97, got a draft of 7"):
        fs.init(config(), ChecksumModel(), fallback(ngram(), standalone(DRAFT)))
    ids = torch.arange(VOCAB, dtype=torch.int32)
    assert fallback(ngram(), standalone(DRAFT, ids)).token_ids is ids


def test_a_proposer_of_ones_own() -> None:
    """Anything with `propose` can stand in front of a model; it may be as wrong as it likes."""

    class Sevens(Ngram):
        def propose(self, transition: Any) -> Any:
            rows, most = transition.config.max_num_reqs, transition.config.num_speculative_tokens
            counts = torch.tensor([99, 0, 1, -3], dtype=torch.int32)
            return torch.full((rows, most), 6, dtype=torch.int32), counts

    drafter = fallback(Sevens(), standalone(DRAFT))
    state = start(TARGET, drafter, PROMPTS, drafts=3)
    state, draft = fs.prefill(state, drafter)
    assert draft.num_draft.tolist() == [3, 3, 1, 3] and draft.tokens[0].tolist() == [6, 6, 6]
    state, _ = fs.verify(state, TARGET)
    assert run(state, TARGET, drafter, LENGTH).tokens.tolist() == [whole(prompt) for prompt in PROMPTS]
