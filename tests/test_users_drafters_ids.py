"""What breaks for users of speculative decoding, tried on every drafter there is: ids, placeholders, and pairs of models."""

import dataclasses
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from all_drafters import NAMES, WITH_MODEL, begin, change_logits, check_places, drafted, fresh, made, of_model, recorded
from one_pass import DRAFTS, LENGTH, TARGET, VOCAB, rows_of
from oracle import output

import funcspec as fs
from funcspec import drafters
from funcspec.drafters import Drafter
from funcspec.errors import ModelError
from funcspec.models.medusa_heads import MedusaHeads

RULES = [fs.rules.coupled, fs.rules.ratio]
IDS = torch.tensor([9, 2, 4, 0, 7], dtype=torch.int32)

each_rule = pytest.mark.parametrize("rule", RULES, ids=repr)
each_name = pytest.mark.parametrize("name", sorted(WITH_MODEL))


@pytest.fixture(params=NAMES)
def drafter(request: pytest.FixtureRequest) -> Drafter:
    return made(request.param)


def finished(state: fs.SpecState, drafter: Drafter | None, **settings: Any) -> list[list[int]]:
    """What rows have when all have ended."""
    while rows_of(state):
        state, verdict = fs.step_round(state, TARGET, drafter, donate=True, **settings)
        assert not verdict.bad_row.any()
    return [output(state, row) for row in range(4)]


# ---------------------------------------------------------------- E: placeholders and ids outside of the vocabulary


@each_rule
def test_e1_a_placeholder_among_drafts(drafter: Drafter, rule: fs.rules.Rule, monkeypatch: pytest.MonkeyPatch) -> None:
    """-1 among drafts was once looked up like a token, and could be accepted. What stands before it counts, nothing behind it."""
    state, draft = drafted(begin(drafter, rule), drafter)
    counts, made_ = state.num_tokens.tolist(), (draft.tokens >= 0).sum(1).tolist()
    tokens = state.tokens.clone()
    for row, count in enumerate(made_):
        if count > 1:
            tokens[row, counts[row] + 1] = -1
    seen = recorded(monkeypatch)
    state, scores = fs.score(dataclasses.replace(state, tokens=tokens), TARGET)
    for row, count in enumerate(made_):
        if count:
            scores.logits[row, 0, draft.tokens[row, 0]] = 100.0
    state, verdict = fs.accept(state, scores)
    assert sum(made_) and verdict.num_accepted.tolist() == [min(count, 1) for count in made_]
    for row in rows_of(state):
        emitted = verdict.tokens[row].tolist()
        count = 1 + min(made_[row], 1)
        assert verdict.num_emitted[row] == count and min(emitted[:count]) >= 0 and set(emitted[count:]) == {-1}
        assert state.tokens[row, counts[row] :].tolist() == emitted[:count] + [-1] * (LENGTH - counts[row] - count)
    assert torch.equal(drafted(state, drafter)[1].tokens, drafted(fresh(state, drafter), drafter)[1].tokens)
    assert seen and all(check_places(one.batch) is not None for one in seen if len(one.batch.seq_lens) == 4)


HOLES = drafters.fixed([[-1 if place % 4 == number else place % VOCAB for place in range(LENGTH)] for number in range(4)])
WITH_HOLES: dict[str, Callable[[], Drafter]] = {
    "fixed": lambda: HOLES,
    "best_of": lambda: drafters.best_of(drafters.ngram(min_ngram=3), HOLES),
    "cascade": lambda: drafters.cascade(HOLES, made("standalone")),
    "cascade, further steps": lambda: drafters.cascade(HOLES, made("standalone"), one_pass=False),
} | {f"fallback to {name}": lambda name=name: drafters.fallback(HOLES, made(name)) for name in WITH_MODEL if "fallback" not in name}


@pytest.mark.parametrize("name", sorted(WITH_HOLES))
def test_e1_placeholders_among_proposals(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """-1 among the tokens that one drafter proposes, alone and in front of every other: a proposal ends there."""
    drafter = WITH_HOLES[name]()
    plain = finished(begin(drafter), drafter, num_draft=0)
    seen = recorded(monkeypatch)
    state = begin(drafter)
    while rows_of(state):
        counts, live = state.num_tokens.tolist(), rows_of(state)
        state, draft = drafted(state, drafter, donate=True)
        for row in live:
            ahead = HOLES.tokens.tokens[row, counts[row] : counts[row] + DRAFTS].tolist()
            count = min([*ahead, -1].index(-1), int(state.row_limit[row]) - counts[row] - 1)
            if name == "fixed" or ("fallback" in name and count):
                assert draft.tokens[row].tolist() == ahead[:count] + [-1] * (DRAFTS - count)
        assert draft.tokens.max() < VOCAB
        state, _ = fs.verify(state, TARGET, donate=True)
    assert [output(state, row) for row in range(4)] == plain
    for one in seen:
        check_places(one.batch)


@each_rule
def test_e2_placeholders_that_outlive_their_step(drafter: Drafter, rule: fs.rules.Rule, monkeypatch: pytest.MonkeyPatch) -> None:
    """A round of nothing but -1 once reached the embedding. It is a round without drafts."""
    state = begin(drafter, rule)
    _, expected = fs.step_round(state, TARGET, drafter, num_draft=0)
    state, _ = drafted(state, drafter)
    places = torch.arange(LENGTH)
    state = dataclasses.replace(state, tokens=state.tokens.masked_fill(places >= state.num_tokens[:, None], -1))
    seen = recorded(monkeypatch)
    state, verdict = fs.verify(state, TARGET)
    assert torch.equal(verdict.tokens, expected.tokens) and not verdict.num_accepted.any()
    assert check_places(seen[0].batch) == [1] and (seen[0].batch.slot_mapping >= 0).sum() == 3
    assert torch.equal(drafted(state, drafter)[1].tokens, drafted(fresh(state, drafter), drafter)[1].tokens)


@each_name
@pytest.mark.parametrize("value", [-float("inf"), float("nan"), float("inf")])
def test_e5_a_drafter_without_a_valid_score(name: str, value: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """One once drafted the id V. Drafts are ids of the vocabulary, and the target and its flags do not notice."""
    change_logits(monkeypatch, lambda logits: torch.full_like(logits, value))
    drafter = made(name)
    for rule in RULES:
        plain = finished(begin(drafter, rule, max_tokens=8), drafter, num_draft=0)
        state, total = begin(drafter, rule, max_tokens=8), 0
        while rows_of(state):
            state, draft = drafted(state, drafter, donate=True)
            assert draft.tokens.min() >= -1 and draft.tokens.max() < VOCAB
            state, verdict = fs.verify(state, TARGET, donate=True)
            assert not verdict.bad_row.any() and int(verdict.tokens.max()) < VOCAB
            total += int(verdict.num_drafted.sum())
        assert total > 0
        found = [output(state, row) for row in range(4)]
        assert found[3] == plain[3] and list(map(len, found)) == [8, 0, 8, 8]  # row 3 is at temperature 0
        assert rule is fs.rules.ratio or found == plain


# ---------------------------------------------------------------- L: pairs of models


@each_name
@pytest.mark.parametrize("size", [7, 13])
def test_l1_another_vocabulary_is_refused_with_both_sizes(name: str, size: int) -> None:
    """It was once taken without a word, and texts were corrupt. At the start, and where a drafter is exchanged later."""
    other = of_model(name, vocab_size=size)
    with pytest.raises(ModelError, match=rf"vocabulary of {VOCAB}, got a draft of {size}.*token_ids"):
        begin(other)
    state = begin(made(name))
    before = fs.snapshot(state)
    with pytest.raises(ModelError, match=rf"vocabulary {VOCAB}, .* got one .*vocabulary {size}, "):
        fs.step_round(state, TARGET, other)
    assert fs.snapshot(state) == before


@pytest.mark.parametrize("proposer", [drafters.fixed([[1, VOCAB]]), drafters.suffix(corpus=[[1, VOCAB]])], ids=["fixed", "suffix"])
def test_l1_tokens_of_another_vocabulary_are_refused(proposer: Any) -> None:
    """L1 for drafters that carry text: alone, and within others."""
    second = made("standalone")
    for drafter in (proposer, drafters.best_of(proposer), drafters.fallback(proposer, second), drafters.cascade(proposer, second)):
        with pytest.raises(ModelError, match=rf"from 0 to {VOCAB - 1}, got {VOCAB}"):
            begin(drafter)


@each_name
def test_l2_ids_of_another_meaning_are_refused(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Vocabularies of one size once passed for the same. Where one of the two does not say what it is, nothing can be compared."""
    drafter = made(name)
    expected = drafted(begin(drafter), drafter)[1].tokens
    for ours, theirs in (("a", "b"), ("a", "a"), ("a", None), (None, "b")):
        monkeypatch.setitem(vars(TARGET), "vocab_fingerprint", theirs)
        monkeypatch.setitem(vars(drafter.kv_model), "vocab_fingerprint", ours)
        if None not in (ours, theirs) and ours != theirs:
            with pytest.raises(ModelError, match=f"expected the target's vocabulary fingerprint '{theirs}', got '{ours}'"):
                begin(drafter)
        else:
            assert torch.equal(drafted(begin(drafter), drafter)[1].tokens, expected)


def reduced(name: str) -> Drafter:
    """The drafter with the outputs of `IDS` only."""

    def cut(model: Any) -> Any:
        if isinstance(model, list):
            return list(map(cut, model))
        weights, ids = model.weights, IDS.long()
        if isinstance(model, MedusaHeads):
            return MedusaHeads({**weights, "outputs": weights["outputs"][:, ids]}, model.layer)
        head = weights.get("head", weights["embed"])[ids]
        return dataclasses.replace(model, weights={**weights, "head": head}, output_token_ids=IDS)

    model, drafter = WITH_MODEL[name]
    return drafter(model() if name == "early_exit" else cut(model()), IDS)


@each_rule
@each_name
def test_l3_a_reduced_vocabulary(name: str, rule: fs.rules.Rule, monkeypatch: pytest.MonkeyPatch) -> None:
    """Drafts were once ids of the draft. They are what the whole model drafts where it can say nothing but these ids."""
    few, whole = reduced(name), made(name)
    state, other = begin(few, rule), begin(whole, rule)
    others = [token for token in range(VOCAB) if token not in IDS.tolist()]
    for _ in range(3):
        state, draft = drafted(state, few, donate=True)
        held = state.lease.carried()
        for row in range(4) if rule is fs.rules.ratio else ():
            drafts = [token for token in draft.tokens[row].tolist() if token >= 0]
            if drafts and state.temperature[row] > 0 and not held["is_point"][row]:
                logits = held["draft_logits"][row, : len(drafts)]
                assert set(drafts) <= set(IDS.tolist())
                assert logits[:, others].eq(-float("inf")).all() and logits[:, IDS.long()].isfinite().all()
        with monkeypatch.context() as changed:
            change_logits(changed, lambda logits: logits.index_fill(1, torch.tensor(others), -float("inf")))
            other, expected = drafted(other, whole, donate=True)
        assert torch.equal(draft.tokens, expected.tokens) and draft.tokens.max() >= 0
        state, verdict = fs.verify(state, TARGET, donate=True)
        other, same = fs.verify(other, TARGET, donate=True)
        assert torch.equal(verdict.tokens, same.tokens) and torch.equal(verdict.num_accepted, same.num_accepted)


SIZES = {"hidden_size": 20, "intermediate_size": 6, "num_heads": 2, "num_kv_heads": 1, "head_dim": 10}


@pytest.mark.parametrize("name", sorted(set(WITH_MODEL) - {"early_exit"}))  # a part of the target is as wide as the target
def test_l5_hidden_sizes_are_compared_only_where_one_is_read(name: str) -> None:
    """Hidden states of the target were once copied into a plain draft of another width. A draft that does read them is refused then."""
    spec = getattr(made(name).kv_model, "features", None)
    drafter = of_model(name, **({"hidden_size": 20} if name == "medusa" else SIZES))
    if spec is None:
        assert finished(begin(drafter), drafter) == finished(begin(drafter), drafter, num_draft=0)
        return
    count = len(spec.layers)
    message = f"hidden states of 12 from {count} layers, {12 * count} in all, got one for {20 * count}"
    with pytest.raises(ModelError, match=re.escape(message)):
        begin(drafter)
