"""Parallel drafting, with a plain language model (PARD) and with a head over hidden states (P-EAGLE), against dense passes in float64."""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from feature_toys import FeatureDraft, FeatureTarget
from head_oracle import said
from one_pass import (
    DRAFTS,
    FLAT,
    LENGTH,
    SHAPE,
    TARGET,
    VOCAB,
    check_jax,
    check_lossless,
    check_ratio,
    check_rounds,
    check_values,
    committed,
    hidden_states,
    start,
    trace,
)
from test_llama import dense

import funcspec as fs
from funcspec.drafters import Parallel, parallel
from funcspec.errors import ArgumentError, ArgumentTypeError, ModelError
from funcspec.kernels.window_inputs import FEED, window_inputs_
from funcspec.models import ChecksumDraft
from funcspec.models.base import ForwardBatch
from funcspec.models.dflash import DFlashConfig, random_dflash
from funcspec.models.heads import EagleConfig, random_head
from funcspec.models.jax_llama import JaxLlama
from funcspec.models.llama import Llama, LlamaConfig, random_llama
from funcspec.models.parallel_heads import JaxParallelHead, ParallelConfig, ParallelHead, mask_places, random_parallel_head

RULES = {"greedy": fs.rules.greedy, "coupled": fs.rules.coupled, "ratio": fs.rules.ratio}
MASK = VOCAB  # a token that only the drafts have
DRAFT: dict[str, Any] = {**SHAPE, "vocab_size": VOCAB + 1}
HEADS = {
    "eagle": ParallelConfig(**DRAFT, target_layers=(2,)),
    "eagle3": ParallelConfig(**DRAFT, target_layers=(0, 1, 2), style="eagle3"),
}


@pytest.fixture(params=[False, True], ids=["pure", "donated"])
def donate(request: pytest.FixtureRequest) -> bool:
    return request.param


def draft(kind: str, outputs: int = VOCAB, **changes: Any) -> Llama | ParallelHead:
    """A draft with one id more than the target, of weights that make its guesses flat."""
    if kind == "plain":
        made = random_llama(replace(LlamaConfig(**DRAFT), **changes), seed=11)
    else:
        made = random_parallel_head(replace(HEADS[kind], **changes), seed=11)
    return type(made)(made.config, {**made.weights, "head": FLAT * made.weights["embed"][:outputs]})


KINDS = ("plain", *HEADS)
MODELS = {kind: draft(kind) for kind in KINDS}


def expected(tokens: Sequence[int], count: int, *, drafter: Parallel, length: int = LENGTH) -> list[np.ndarray]:
    """What drafts are drawn from after committed tokens, without a cache; fewer where the draft's positions end."""
    model = drafter.model
    is_head = isinstance(model, ParallelHead)
    limit = min(model.max_len, length)  # of positions, which begin at the first token that is fed
    count = min(count, limit - len(tokens) + 1 + is_head)
    if count <= 0:
        return []
    fed = [*tokens, *[drafter.mask_id] * (count - 1)]
    if is_head:
        vectors = list(hidden_states(tokens[:-1], model.config.target_layers)) + [model.weights["mask_feature"].double()] * (count - 1)
        logits = said(model, fed[1:], vectors)[0][-count:]
    else:
        logits = dense(model, fed)[0][-count:]
    whole = np.full((count, VOCAB), -np.inf)
    whole[:, np.arange(VOCAB) if drafter.token_ids is None else drafter.token_ids.numpy()] = logits.numpy()
    return list(whole)


@pytest.mark.parametrize("rule", ["greedy", "coupled", "ratio"])
@pytest.mark.parametrize("kind", KINDS)
def test_drafts_are_those_of_the_committed_tokens(kind: str, rule: str, donate: bool) -> None:
    drafter = parallel(MODELS[kind], MASK)
    assert check_rounds(start(drafter, RULES[rule], donate=donate), drafter, partial(expected, drafter=drafter), donate=donate) > 40


@pytest.mark.parametrize("drafts", [0, 1, 2, 6])
@pytest.mark.parametrize("kind", KINDS)
def test_any_number_of_drafts(kind: str, drafts: int) -> None:
    drafter = parallel(MODELS[kind], MASK)
    made = check_rounds(start(drafter, fs.rules.coupled, drafts=drafts), drafter, partial(expected, drafter=drafter), donate=True)
    assert (made > 0) == (drafts > 0)


@pytest.mark.parametrize("longest", [8, 15, 20])
@pytest.mark.parametrize("kind", KINDS)
def test_rows_that_outgrow_the_draft(kind: str, longest: int) -> None:
    """Its positions end before the rows do: they draft fewer, then none; one prompt is longer than it from the start."""
    drafter = parallel(draft(kind, max_len=longest), MASK)
    check_rounds(start(drafter, fs.rules.coupled), drafter, partial(expected, drafter=drafter), donate=True, wanted=DRAFTS)


@pytest.mark.parametrize("kind", KINDS)
def test_a_mask_token_that_is_committed_is_a_token_like_others(kind: str) -> None:
    """What is a mask does not follow from its id."""
    drafter = parallel(MODELS[kind], 2)
    state = start(drafter, fs.rules.coupled, prompts=[[2, 2, 5, 2], [2], [7, 2, 2]])
    check_rounds(state, drafter, partial(expected, drafter=drafter), donate=True)


@pytest.mark.parametrize("kind", ["plain", "eagle3"])
def test_a_reduced_vocabulary(kind: str) -> None:
    ids = torch.tensor([9, 2, 4, 0, 7], dtype=torch.int32)
    drafter = parallel(draft(kind, outputs=5), MASK, ids)
    check_rounds(start(drafter, fs.rules.coupled), drafter, partial(expected, drafter=drafter), donate=True)


@pytest.mark.parametrize("rule", ["greedy", "coupled"])
@pytest.mark.parametrize("kind", KINDS)
def test_output_is_that_of_plain_decoding(kind: str, rule: str, donate: bool) -> None:
    check_lossless(parallel(MODELS[kind], MASK), RULES[rule], donate=donate)


def test_output_of_a_draft_that_is_often_right() -> None:
    """The first draft is the target's own, so that greedy rounds keep some and refuse some."""
    drafter = parallel(TARGET, 4)
    check_lossless(drafter, fs.rules.greedy, donate=True)
    state, origins = start(drafter, fs.rules.greedy), set()
    while fs.any_active(state):
        state, verdict = fs.step_round(state, TARGET, drafter, donate=True)
        origins |= set(verdict.origin.flatten().tolist())
    assert origins >= {0, 1}


def test_rows_that_another_drafter_serves() -> None:
    """Rounds that look-up drafts are fed to the model all the same."""
    drafter = fs.drafters.fallback(fs.drafters.ngram(min_ngram=1), parallel(MODELS["plain"], MASK))
    check_lossless(drafter, fs.rules.coupled, donate=True, prompts=[[3, 4, 5, 3, 4], [1], [6, 6, 6]])


@pytest.mark.parametrize("kind", KINDS)
def test_ratio_rounds_are_the_written_definition(kind: str, donate: bool) -> None:
    drafter = parallel(MODELS[kind], MASK)
    check_ratio(drafter, partial(expected, drafter=drafter), donate=donate)


def test_the_law_of_drafts_that_do_not_see_each_other() -> None:
    """By every outcome of a round in float64: drafts drawn each on its own after the prefix leave the target's law as it is."""
    rng, size, most = np.random.default_rng(0), 3, 3
    law = {run: rng.dirichlet(np.ones(size)) for length in range(most + 2) for run in np.ndindex(*[size] * length)}
    drawn = rng.dirichlet(np.ones(size) / 2, most)  # by place, not by what was drafted before
    found = np.zeros([size] * (most + 1))

    def spread(run: tuple[int, ...], mass: float) -> None:
        """What follows an emitted run is drawn from the target, which later rounds are known to keep to."""
        if len(run) == most + 1:
            found[run] += mass
            return
        for token in range(size):
            spread((*run, token), mass * law[run][token])

    for drafts in np.ndindex(*[size] * most):
        mass, kept = float(np.prod([drawn[place, token] for place, token in enumerate(drafts)])), 1.0
        for place, token in enumerate(drafts):
            p, q = law[drafts[:place]], drawn[place]
            chance = min(1.0, p[token] / q[token])
            rest = np.maximum(p - q, 0)
            for other in range(size):
                if chance < 1:
                    spread((*drafts[:place], other), mass * kept * (1 - chance) * rest[other] / rest.sum())
            kept *= chance
        spread(drafts, mass * kept)
    plain = np.array([np.prod([law[run[:place]][run[place]] for place in range(most + 1)]) for run in np.ndindex(found.shape)])
    np.testing.assert_allclose(found.reshape(-1), plain, atol=1e-15)


@pytest.mark.parametrize("kind", ["plain", "eagle3"])
def test_pure_and_donated_rounds_are_bit_equal(kind: str) -> None:
    drafter = parallel(MODELS[kind], MASK)
    assert trace(drafter, fs.rules.ratio, donate=False) == trace(drafter, fs.rules.ratio, donate=True)


@pytest.mark.parametrize("rule", ["coupled", "ratio"])
@pytest.mark.parametrize("kind", ["plain", "eagle3"])
def test_states_are_values(kind: str, rule: str) -> None:
    check_values(parallel(MODELS[kind], MASK), RULES[rule])


@pytest.mark.jax_on_cpu
@pytest.mark.parametrize("kind", ["plain", "eagle3"])
def test_jax_equals_torch(kind: str) -> None:
    model = MODELS[kind]
    other = JaxParallelHead.from_torch(model) if isinstance(model, ParallelHead) else JaxLlama.from_torch(model)
    check_jax(parallel(model, MASK), fs.rules.ratio, JaxLlama.from_torch(TARGET), parallel(other, MASK))


@pytest.mark.parametrize("kind", ["plain", "eagle3"])
def test_a_row_that_was_cut_back(kind: str) -> None:
    """A language model drafts on at once. A head has no hidden state to go on from and drafts nothing once."""
    drafter = parallel(MODELS[kind], MASK)
    state = start(drafter, fs.rules.coupled)
    for _ in range(4):
        state, _ = fs.step_round(state, TARGET, drafter)
    state = fs.truncate(state, {0: int(state.num_tokens[0]) - 3, 2: int(state.num_tokens[2]) - 1})
    if kind != "plain":
        state, made = fs.prefill(state, drafter)
        assert made.tokens[0].tolist() == [-1] * DRAFTS
        state, _ = fs.verify(state, TARGET)
    check_rounds(state, drafter, partial(expected, drafter=drafter), donate=True)


@pytest.mark.parametrize("kind", ["plain", "eagle3"])
def test_only_places_with_tokens_and_masks_are_written(kind: str) -> None:
    """After a round every slot of the cache that is no place of a row's window is as it was."""
    drafter = parallel(MODELS[kind], MASK)
    state = start(drafter, fs.rules.coupled)
    is_head = kind != "plain"
    written = set()
    for row in (0, 2, 3):
        last = len(committed(state, row)) - 1 - is_head  # the newest token's position in the draft's cache
        for position in range(last + DRAFTS):
            block = int(state.draft_block_tables[row, position // 4])
            written.add(block * 4 + position % 4)
    state, _ = fs.prefill(state, drafter, donate=True)
    for cache in state.lease.draft.pool.kv.values():
        finite = cache.flatten(1, 2).isfinite().flatten(2).all(2)
        assert all(layer.nonzero().flatten().tolist() == sorted(written) for layer in finite)


def test_the_example_of_the_written_contract() -> None:
    """Two rows, three places of guesses: ids, positions, the wanted places, and the learned feature at masks alone."""
    tokens = torch.full((2, 24), -1, dtype=torch.int32)
    tokens[0, 5:9], tokens[1, 10:15] = torch.tensor([10, 11, 12, 100]).int(), torch.tensor([20, 21, 22, 23, 200]).int()

    def ints(*values: int) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int32)

    names = ("out_input_ids", "out_positions", "out_slot_mapping", "out_token_rows")
    out = {name: torch.full((12,), 77, dtype=torch.int32) for name in names}
    out |= {"out_seq_lens": ints(77, 77), "out_last_token_indices": ints(*[77] * 6)}
    window_inputs_(
        kind=FEED,
        tokens=tokens,
        num_tokens=ints(9, 15),
        fed_len=ints(5, 10),
        num_draft=ints(0, 0),
        num_drafted=ints(0, 0),
        is_live=ints(1, 1),
        block_tables=torch.arange(12, dtype=torch.int32).view(2, 6),
        block_size=4,
        width=6,
        limit=64,
        shift=1,
        num_masks=2,
        mask_id=50,
        num_choices=3,
        **out,
    )
    assert out["out_input_ids"].tolist() == [11, 12, 100, 50, 50, 0, 21, 22, 23, 200, 50, 50]
    assert out["out_positions"].tolist() == [5, 6, 7, 8, 9, 0, 10, 11, 12, 13, 14, 15]
    assert out["out_last_token_indices"].tolist() == [2, 3, 4, 9, 10, 11]
    features = torch.arange(8.0)[:, None].expand(8, 12)
    batch = ForwardBatch(
        out["out_input_ids"], out["out_positions"], ints(0, 6, 12), out["out_seq_lens"], out["out_slot_mapping"],
        torch.zeros(2, 6, dtype=torch.int32), out["out_last_token_indices"], 6, (), features,
    )  # fmt: skip
    found = mask_places(HEADS["eagle"], batch, torch.arange(12, dtype=torch.int32))
    assert found is not None
    taken, behind = found
    placed = torch.where(behind, torch.tensor(-5.0), features.view(2, 4, 12)[:, taken])[:, :, 0]
    assert placed.tolist() == [[0, 1, 2, -5, -5, -5], [4, 5, 6, 7, -5, -5]]


@pytest.mark.parametrize("kind", ["plain", "eagle3"])
def test_half_precision(kind: str) -> None:
    made = MODELS[kind]
    model = type(made)(made.config, {name: weight.bfloat16() for name, weight in made.weights.items()})
    drafter = parallel(model, MASK)
    state, _ = fs.prefill(start(drafter, fs.rules.ratio), drafter)
    logits = state.lease.carried()["draft_logits"][0].numpy()
    wanted = np.stack(expected(committed(state, 0), DRAFTS, drafter=parallel(made, MASK)))
    assert np.abs(logits - wanted).max() < 0.15


def test_refuses_what_does_not_fit() -> None:
    plain, head = MODELS["plain"], MODELS["eagle3"]
    for mask_id, error, words in (
        (None, ArgumentError, "the id of the draft's mask token, got None"),
        (-2, ArgumentError, "0 or more, got -2"),
        ("11", ArgumentTypeError, r"got '11' \(str\)"),
        (True, ArgumentTypeError, r"got True \(bool\)"),
    ):
        with pytest.raises(error, match=words):
            parallel(plain, mask_id)
    for model, words in (
        (random_head(EagleConfig(**DRAFT, target_layers=(2,))), "feedback=12.*use eagle for it"),
        (FeatureDraft(), "feedback=3.*use eagle for it"),
        (random_dflash(DFlashConfig(**DRAFT, target_layers=(2,))), "ahead=0.*use dflash for it"),
    ):
        with pytest.raises(ModelError, match=words):
            parallel(model, MASK)
    with pytest.raises(ArgumentTypeError, match="model: expected a Model"):
        parallel(ParallelHead, MASK)
    for model in (plain, head):
        with pytest.raises(ModelError, match="mask_id: expected an id that the draft can read, below 12, got 12"):
            start(parallel(model, 12), fs.rules.greedy)
    with pytest.raises(ModelError, match="mask_id: expected an id that the draft can read, below 97, got 97"):
        fs.init(start(parallel(plain, MASK), fs.rules.greedy).config, FeatureTarget(), parallel(ChecksumDraft(), 97))
    with pytest.raises(ModelError, match="vocabulary of 11, got a draft of 12"):
        start(parallel(draft("plain", outputs=12), MASK), fs.rules.greedy)
    with pytest.raises(ModelError, match="hidden states of 3 from 3 layers, 9 in all, got one for 36"):
        fs.init(start(parallel(plain, MASK), fs.rules.greedy).config, FeatureTarget(vocab_size=11), parallel(head, MASK))
    weights = dict(head.weights)
    del weights["mask_feature"]
    with pytest.raises(ModelError, match="'mask_feature', got none"):
        ParallelHead(head.config, weights)
    with pytest.raises(ArgumentTypeError, match="expected a ParallelConfig, got EagleConfig"):
        ParallelHead(EagleConfig(**DRAFT, target_layers=(2,)), weights)
    with pytest.raises(ArgumentTypeError, match="expected a ParallelConfig, got EagleConfig"):
        JaxParallelHead.from_torch(random_head(EagleConfig(**DRAFT, target_layers=(2,))))
    other = fs.restore(fs.snapshot(start(parallel(plain, MASK), fs.rules.greedy)))
    with pytest.raises(ModelError, match="expected the model the state was made for"):
        fs.prefill(other, parallel(head, MASK))


@pytest.mark.parametrize("features", [None, torch.zeros(4, 35), torch.zeros(3, 36), torch.zeros(20, 36)])
def test_refuses_batches_that_do_not_fit(features: torch.Tensor | None) -> None:
    """Before anything is written."""
    head = MODELS["eagle3"]
    empty = torch.zeros(8, dtype=torch.int32)
    kv = {entry.name: torch.zeros(2, 4, 4, *entry.shape) for entry in head.kv_spec.entries}
    starts, table = torch.tensor([0, 4, 8]).int(), torch.zeros(2, 4, dtype=torch.int32)
    batch = ForwardBatch(empty, empty, starts, empty[:2] + 4, torch.arange(8).int(), table, empty[:6], 4, (), features)
    with pytest.raises(ModelError, match=r"expected features \[R \* P, 36\] for windows .* for 8 places of 2 rows, 3 wanted"):
        head.forward(kv, batch)
    assert all(not cache.any() for cache in kv.values())
