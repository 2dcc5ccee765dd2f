"""Several proposers as one: who drafts what, and that the output is the target's own."""

from typing import Any

import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import pytest
import torch
from hypothesis import given, settings
from lookup import found
from oracle import config, output, run
from suffixes import proposed

import funcspec as fs
from funcspec.drafters import BestOf, Ngram, Proposer, best_of, fallback, fixed, ngram, standalone, suffix
from funcspec.errors import ArgumentTypeError, ModelError
from funcspec.interop import jax_model
from funcspec.models import ChecksumDraft, ChecksumModel, TableModel

DEVICE = "cuda" if jax.default_backend() == "gpu" else "cpu"
LENGTH = 40
GREEDY, COUPLED, RATIO = fs.rules.greedy, fs.rules.coupled, fs.rules.ratio
SMALL = ChecksumModel(vocab_size=3, spread=True)
CYCLE = TableModel(tuple(tuple(float(after == (token + 1) % 5) for after in range(5)) for token in range(5)))
with_jax = pytest.mark.skipif(DEVICE == "cpu" and torch.cuda.is_available(), reason="JAX and torch see other devices")


def start(target: Any, drafter: Any, prompts: list[list[int]], **changes: Any) -> fs.SpecState:
    """A greedy state with these prompts, a row each."""
    defaults = {"rows": len(prompts), "length": LENGTH}
    state = fs.init(config(**defaults | changes), target, drafter)
    return fs.admit(state, target, drafter, prompts, seeds=range(len(prompts)))[0]


def test_each_row_drafts_the_longest_and_the_earlier_of_equals() -> None:
    """Committed is one token more than the prompt: rows draft from place 2 on."""
    first = fixed([[0, 0, 1], [0, 0, 1, 1], [0, 0, 1, 1, 1], [], []])
    second = fixed([[0, 0, 2, 2], [0, 0, 2, 2], [0, 0, 2], [0, 0, 2], []])
    third = fixed([[0, 0, 3, 3], [0, 0, 3, 3, 3], [0, 0, 3, 3, 3], [0, 0, 3], []])
    expected = {
        (first, second): [[2, 2, -1], [1, 1, -1], [1, 1, 1], [2, -1, -1], [-1, -1, -1]],
        (second, first): [[2, 2, -1], [2, 2, -1], [1, 1, 1], [2, -1, -1], [-1, -1, -1]],
        (first, second, third): [[2, 2, -1], [3, 3, 3], [1, 1, 1], [2, -1, -1], [-1, -1, -1]],
        (third,): [[3, 3, -1], [3, 3, 3], [3, 3, 3], [3, -1, -1], [-1, -1, -1]],
        (best_of(second, third), first): [[2, 2, -1], [3, 3, 3], [3, 3, 3], [2, -1, -1], [-1, -1, -1]],
        (first, best_of(best_of(second), third)): [[2, 2, -1], [3, 3, 3], [1, 1, 1], [2, -1, -1], [-1, -1, -1]],
    }
    state = start(CYCLE, best_of(first, second), [[0]] * 5)
    for proposers, tokens in expected.items():
        new, draft = fs.prefill(state, best_of(*proposers))
        assert draft.tokens.tolist() == tokens
        assert draft.num_draft.tolist() == new.num_drafted.tolist() == [sum(token >= 0 for token in row) for row in tokens]
        assert torch.equal(fs.decode(new, best_of(*proposers))[1].tokens, draft.tokens)


@settings(max_examples=20)
@given(data=st.data())
def test_drafts_are_what_the_definitions_find(data: st.DataObject) -> None:
    drafts, donate, rule = data.draw(st.integers(0, 6)), data.draw(st.booleans()), data.draw(st.sampled_from([GREEDY, COUPLED]))
    lookup, tree = ngram(min_ngram=data.draw(st.integers(1, 3))), suffix(offset=data.draw(st.integers(-1, 2)))
    ngram_first = data.draw(st.booleans())
    drafter = best_of(lookup, tree) if ngram_first else best_of(tree, lookup)
    prompts = data.draw(st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=12), min_size=2, max_size=2))
    request: dict[str, Any] = {"seeds": [3, -4], "temperature": [0.0, 1.0] if rule is COUPLED else 0.0}
    state = fs.init(config(rows=2, length=LENGTH, drafts=drafts, rule=rule), SMALL, drafter)
    state, _ = fs.admit(state, SMALL, drafter, prompts, donate=donate, **request)
    while fs.any_active(state):
        rows = [state.tokens[row, :count].tolist() for row, count in enumerate(state.num_tokens.tolist())]
        live = state.is_live.tolist()
        state, draft = fs.prefill(state, drafter, donate=donate)
        for row, text in enumerate(rows):
            most = min(drafts, LENGTH - len(text) - 1) * live[row]
            budgets, of_tree = tree.budgets, []
            of_ngram = found(text, drafts, min_ngram=lookup.min_ngram) * live[row]
            of_tree = proposed(rows, row, most, budgets=budgets)
            both = [of_ngram, of_tree] if ngram_first else [of_tree, of_ngram]
            assert draft.tokens[row].tolist() == (max(both, key=len)[:most] + [-1] * drafts)[:drafts]
        state, _ = fs.verify(state, SMALL, donate=donate)
    plain, _ = fs.admit(fs.init(config(rows=2, length=LENGTH, drafts=0, rule=rule), SMALL), SMALL, None, prompts, **request)
    while fs.any_active(plain):
        plain, _ = fs.verify(plain, SMALL, donate=True)
    assert torch.equal(state.tokens, plain.tokens)


def test_a_model_drafts_where_none_finds_anything() -> None:
    model = standalone(ChecksumDraft())
    prompts = [[5, 6, 7], [8, 8, 8], [5, 6, 7]]
    drafter = fallback(best_of(ngram(min_ngram=2), suffix(offset=-1), fixed([[], [], [0, 0, 0, 0, 50]])), model)
    state = start(ChecksumModel(), drafter, prompts, length=64)
    alone = fs.prefill(start(ChecksumModel(), model, prompts, length=64), model)[1].tokens.tolist()
    drafted = fs.prefill(state, drafter)[1].tokens.tolist()
    assert drafted == [alone[0], alone[1], [50, -1, -1]]
    state = run(state, ChecksumModel(), drafter, 64)
    plain = run(start(ChecksumModel(), None, prompts, length=64), ChecksumModel(), None, 64)
    assert torch.equal(state.tokens, plain.tokens)


@pytest.mark.parametrize("donate", [False, True])
def test_proposals_belong_to_their_proposers(donate: bool) -> None:
    """One may hand out the same arrays again and again: nobody writes to them."""

    class Sevens(Ngram):
        def propose(self, transition: Any) -> Any:
            return always

    always = torch.full((2, 3), 4, dtype=torch.int32), torch.tensor([2, 99], dtype=torch.int32)
    drafter = best_of(Sevens(), ngram(), fixed([[], [0, 0, 1, 1, 1]]))
    state = start(CYCLE, drafter, [[0], [0]])
    before = [array.clone() for array in always]
    for _ in range(4):
        state, verdict = fs.step_round(state, CYCLE, drafter, donate=donate)
        assert verdict.num_drafted.tolist() in ([2, 3], [3, 3])
        assert all(map(torch.equal, always, before))
    for row in range(2):
        assert output(state, row) == [(1 + place) % 5 for place in range(len(output(state, row)))]


@pytest.mark.parametrize("rule", [GREEDY, COUPLED, RATIO])
def test_pure_and_donated_steps_are_bit_equal(rule: fs.rules.Rule) -> None:
    def trace(donate: bool) -> list[fs.Snapshot]:
        drafter = best_of(ngram(min_ngram=2), suffix(shared=True))
        state = fs.init(config(rows=3, length=LENGTH, rule=rule), SMALL, drafter)
        heat = 0.0 if rule is GREEDY else [0.0, 1.0]
        state, _ = fs.admit(state, SMALL, drafter, [[0, 1, 2, 0], [1]], seeds=[1, 2], temperature=heat, donate=donate)
        found = []
        for _ in range(6):
            state, _ = fs.prefill(state, drafter, donate=donate)
            found.append(fs.snapshot(state))
            state, _ = fs.verify(fs.fork(state) if not donate else state, SMALL, donate=donate)
            found.append(fs.snapshot(state))
        return found

    assert trace(True) == trace(False)


@with_jax
def test_states_of_jax_equal_those_of_torch() -> None:
    drafter = best_of(ngram(min_ngram=2), suffix(corpus=[[0, 1, 2, 0, 0, 1]]), fixed([[0] * 20]))
    state, target = start(SMALL, drafter, [[0, 1, 2, 0], [1]], rows=3, device=DEVICE), jax_model(SMALL)
    other = start(target, drafter, [[0, 1, 2, 0], [1]], rows=3, device=DEVICE)
    rounds = jax.jit(lambda state, drafter: jax.lax.scan(lambda s, _: fs.step_round(s, target, drafter), state, length=5))
    end, stacked = rounds(other, drafter)
    for number in range(5):
        (state, verdict), (other, eager) = fs.step_round(state, SMALL, drafter), fs.step_round(other, target, drafter)
        assert stacked.tokens[number].tolist() == verdict.tokens.tolist() == eager.tokens.tolist()
        assert stacked.num_drafted[number].tolist() == verdict.num_drafted.tolist()
    assert fs.snapshot(end) == fs.snapshot(state) == fs.snapshot(other) and int(stacked.num_drafted.sum()) > 0
    assert [leaf.shape for leaf in jax.tree.leaves(drafter)] == [(1, 8), (1, 32)]
    again = jax.tree.map(jnp.asarray, drafter)
    assert isinstance(again, BestOf) and isinstance(again.proposers, tuple) and again.proposers[0] == ngram(min_ngram=2)


def test_what_cannot_propose_is_refused() -> None:
    model = standalone(ChecksumDraft())
    with pytest.raises(ArgumentTypeError, match="proposers: expected at least one drafter, got none"):
        best_of()
    for wrong, name in (("ngram", "str"), (None, "NoneType"), (Ngram, "the class Ngram"), (model, "Standalone")):
        with pytest.raises(ArgumentTypeError, match=rf"proposers\[1\]: expected a drafter with a function propose, got {name}"):
            best_of(ngram(), wrong)  # type: ignore[arg-type]
    with pytest.raises(ArgumentTypeError, match=r"proposers\[0\]: .* got Fallback\. Fix: .* with fallback"):
        best_of(fallback(ngram(), model))  # type: ignore[arg-type]

    class Drawn(Ngram):
        proposal = "sampled"

    class WithModel(Ngram):
        kv_model = ChecksumDraft()

    with pytest.raises(ModelError, match=r"proposers\[0\]: expected a drafter of 'point' proposals without a model, got one of 'sampled'"):
        best_of(Drawn())
    with pytest.raises(ModelError, match="got one of 'point' proposals with a model"):
        best_of(WithModel())
    with pytest.raises(ModelError, match="tokens: expected ids of the target"):
        fs.init(config(), CYCLE, best_of(ngram(), fixed([[9]])))
    assert isinstance(best_of(ngram()), Proposer)


def test_equal_proposers_are_equal() -> None:
    assert best_of(ngram(), ngram(min_ngram=2)) == best_of(ngram(), ngram(min_ngram=2)) != best_of(ngram())
    assert hash(best_of(ngram())) == hash(best_of(ngram()))
