"""Medusa heads, in steps and alone, against heads written out in float64 over the target's dense hidden states."""

from collections.abc import Sequence

import numpy as np
import pytest
import torch
from feature_toys import FeatureDraft
from one_pass import (
    DRAFTS,
    SHAPE,
    TARGET,
    VOCAB,
    check_jax,
    check_law,
    check_lossless,
    check_ratio,
    check_rounds,
    check_values,
    committed,
    hidden_states,
    start,
    trace,
)

import funcspec as fs
from funcspec.drafters import eagle, medusa, parallel, standalone
from funcspec.errors import ModelError
from funcspec.models.jax_llama import JaxLlama
from funcspec.models.medusa_heads import JaxMedusaHeads, MedusaHeads

RULES = {"greedy": fs.rules.greedy, "coupled": fs.rules.coupled, "ratio": fs.rules.ratio}


@pytest.fixture(params=[False, True], ids=["pure", "donated"])
def donate(request: pytest.FixtureRequest) -> bool:
    return request.param


def random_heads(
    heads: int = DRAFTS, depth: int = 2, vocab: int = VOCAB, shared: bool = False, size: int = SHAPE["hidden_size"]
) -> MedusaHeads:
    random = torch.Generator().manual_seed(1)
    weights = {
        "blocks": 0.3 * torch.randn(heads, depth, size, size, generator=random),
        "biases": 0.3 * torch.randn(heads, depth, size, generator=random),
        "outputs": 0.1 * torch.randn(1 if shared else heads, vocab, size, generator=random),
    }
    return MedusaHeads(weights, SHAPE["num_layers"])


HEADS = random_heads()


def expected(tokens: Sequence[int], count: int, heads: MedusaHeads = HEADS) -> list[np.ndarray]:
    state = hidden_states(tokens[:-1], [SHAPE["num_layers"]])[-1]
    blocks, biases, outputs = (heads.weights[name].double() for name in ("blocks", "biases", "outputs"))
    found = []
    for head in range(count):
        x = state
        for block, bias in zip(blocks[head], biases[head], strict=True):
            inner = block @ x + bias
            x = x + inner * inner.sigmoid()
        found.append((outputs[head % len(outputs)] @ x).numpy())
    return found


@pytest.mark.parametrize("rule", ["greedy", "coupled", "ratio"])
def test_drafts_are_those_of_the_committed_tokens(donate: bool, rule: str) -> None:
    drafter = medusa(HEADS)
    assert check_rounds(start(drafter, RULES[rule], donate=donate), drafter, expected, donate=donate) > 40


@pytest.mark.parametrize("drafts", [0, 1, 2, 5])
def test_any_number_of_drafts(drafts: int) -> None:
    heads = random_heads(max(drafts, 1), depth=1, shared=True)
    drafter = medusa(heads)
    state = start(drafter, fs.rules.coupled, drafts=drafts)
    made = check_rounds(state, drafter, lambda tokens, count: expected(tokens, count, heads), donate=True, wanted=drafts)
    assert (made > 0) == (drafts > 0)


@pytest.mark.parametrize("rule", ["greedy", "coupled"])
def test_output_is_that_of_plain_decoding(donate: bool, rule: str) -> None:
    check_lossless(medusa(HEADS), RULES[rule], donate=donate)


def test_ratio_rounds_are_the_written_definition(donate: bool) -> None:
    check_ratio(medusa(HEADS), expected, donate=donate)


@pytest.mark.slow
def test_ratio_keeps_the_law_of_the_target() -> None:
    check_law(medusa(HEADS), expected)


@pytest.mark.parametrize("rule", ["coupled", "ratio"])
def test_pure_and_donated_rounds_are_bit_equal(rule: str) -> None:
    assert trace(medusa(HEADS), RULES[rule], donate=False) == trace(medusa(HEADS), RULES[rule], donate=True)


@pytest.mark.parametrize("rule", ["coupled", "ratio"])
def test_states_are_values(rule: str) -> None:
    check_values(medusa(HEADS), RULES[rule])


@pytest.mark.jax_on_cpu
def test_jax_equals_torch() -> None:
    check_jax(medusa(HEADS), fs.rules.ratio, JaxLlama.from_torch(TARGET), medusa(JaxMedusaHeads.from_torch(HEADS)))


def test_a_row_that_was_cut_back_drafts_nothing_once() -> None:
    """The state that the newest token was sampled from is not there, until the target has run again."""
    drafter = medusa(HEADS)
    state = start(drafter, fs.rules.coupled)
    for _ in range(4):
        state, _ = fs.step_round(state, TARGET, drafter)
    count = int(state.num_tokens[0])
    state = fs.truncate(state, {0: count - 3})
    state, draft = fs.prefill(state, drafter)
    assert draft.tokens[0].tolist() == [-1] * DRAFTS and int(draft.tokens[2, 0]) >= 0
    state, _ = fs.verify(state, TARGET)
    check_rounds(state, drafter, expected, donate=False)


# ---------------------------------------------------------------- the model alone


def test_a_checkpoint_in_the_authors_names() -> None:
    parts = {}
    for head in range(DRAFTS):
        for block in range(2):
            parts[f"{head}.{block}.linear.weight"] = HEADS.weights["blocks"][head, block]
            parts[f"{head}.{block}.linear.bias"] = HEADS.weights["biases"][head, block]
        parts[f"{head}.2.weight"] = HEADS.weights["outputs"][head]
    for prefix in ("", "medusa_head."):
        found = MedusaHeads.from_state_dict({prefix + name: part for name, part in parts.items()}, layer=2)
        assert found.layer == 2 and all(torch.equal(found.weights[name], weight) for name, weight in HEADS.weights.items())
    for changed in ({**parts, "lm_head.weight": parts["0.2.weight"]}, {n: p for n, p in parts.items() if n != "1.0.linear.bias"}, {}):
        with pytest.raises(ModelError, match="state_dict: expected"):
            MedusaHeads.from_state_dict(changed, layer=2)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision(dtype: torch.dtype) -> None:
    heads = MedusaHeads({name: weight.to(dtype) for name, weight in HEADS.weights.items()}, 2)
    drafter = medusa(heads)
    state, _ = fs.prefill(start(drafter, fs.rules.ratio), drafter)
    logits = state.lease.carried()["draft_logits"][0]
    wanted = np.stack(expected(committed(state, 0), DRAFTS))
    assert heads.dtype == dtype and np.abs(logits.numpy() - wanted).max() < 0.05


def test_refuses_what_does_not_fit() -> None:
    weights = HEADS.weights
    for changed, words in (
        ({"biases": None}, "'biases', got nothing"),
        ({"blocks": weights["blocks"][0]}, "num_heads, L, H, H"),
        ({"biases": weights["biases"][:, :1]}, "for 'biases', got"),
        ({"outputs": weights["outputs"][:2]}, r"\[3 or 1, V, 12\] for 'outputs', got \(2, 11, 12\)"),
        ({"outputs": weights["outputs"].bfloat16()}, "bfloat16"),
    ):
        with pytest.raises(ModelError, match=words):
            MedusaHeads({name: weight for name, weight in {**weights, **changed}.items() if weight is not None}, 2)
    with pytest.raises(ModelError, match=r"a jax\.Array named 'blocks', got Tensor"):
        JaxMedusaHeads(weights, 2)
    for model in (TARGET, FeatureDraft(), FeatureDraft(passes="parallel")):
        with pytest.raises(ModelError, match="heads: expected heads that read hidden states"):
            medusa(model)
    with pytest.raises(ModelError, match="got 3 heads for num_speculative_tokens = 5"):
        start(medusa(HEADS), fs.rules.greedy, drafts=5)
    with pytest.raises(ModelError, match="at most 3 heads wanted of a row, got 5"):
        fs.prefill(start(parallel(HEADS, 0), fs.rules.greedy, drafts=5), parallel(HEADS, 0))
    for drafter, target in ((eagle, "hands its own on"), (standalone, "a language model")):
        with pytest.raises(ModelError, match=target):
            drafter(HEADS)
    with pytest.raises(ModelError, match="hidden states of 12 from 1 layers, 12 in all, got one for 10"):
        start(medusa(random_heads(size=10)), fs.rules.greedy)
    with pytest.raises(ModelError, match="hidden states 0 to 2, got one for"):
        start(medusa(MedusaHeads(weights, 3)), fs.rules.greedy)
    with pytest.raises(ModelError, match="vocabulary of 11, got a draft of 7"):
        start(medusa(random_heads(vocab=7)), fs.rules.greedy)


def test_a_reduced_vocabulary(donate: bool) -> None:
    """Each head has fewer outputs, in another order; all other ids are never drafted."""
    ids = torch.tensor([9, 2, 4, 0, 7], dtype=torch.int32)
    drafter = medusa(random_heads(vocab=5), ids)

    def spread_out(tokens: Sequence[int], count: int) -> list[np.ndarray]:
        found = [np.full(VOCAB, -np.inf) for _ in range(count)]
        for logits, few in zip(found, expected(tokens, count, drafter.heads), strict=True):
            logits[ids.numpy()] = few
        return found

    check_rounds(start(drafter, fs.rules.coupled, donate=donate), drafter, spread_out, donate=donate)
