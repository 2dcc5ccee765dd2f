"""Golden archives of choices of a token, from logits or from residuals."""

from collections.abc import Callable

import numpy as np
import torch

from funcspec import exact
from funcspec.constants import NO_TOKEN
from funcspec.kernels.choose_tokens import choose_tokens_, choose_tokens_partials
from funcspec.kernels.given_noise import gumbel_sample_
from funcspec.kernels.recovered_tokens import sample_recovered_tokens_
from funcspec.noise import DRAFT

from .golden_case import POISON, Adapter, Case


def words(uniforms: np.ndarray, large_ones_win: bool = False) -> np.ndarray:
    """The noise words of uniform numbers; `large_ones_win` says how the reference read them."""
    exact_uniforms = uniforms.astype(np.float64)
    exact_uniforms = 1 - exact_uniforms if large_ones_win else exact_uniforms
    return np.floor(exact_uniforms * 2**32).clip(0, 2**32 - 1).astype(np.uint32).view(np.int32)


def log_probabilities(probabilities: np.ndarray) -> np.ndarray:
    """Logits that have these probabilities."""
    with np.errstate(divide="ignore"):
        return np.log(probabilities.astype(np.float64)).astype(np.float32)


def gumbel_sample(case: Case) -> None:
    """With the given uniform numbers, or any where none can matter. Our kernel chooses nothing in padding rows."""
    logits, states = case.tensor("logits"), case.inputs["expanded_idx_mapping"]
    uniforms = case.inputs.get("uniform", np.random.default_rng(len(states)).random(logits.shape))
    sampled, cache = case.poisoned("sampled"), case.optional("logits_cache")
    case.run(
        gumbel_sample_,
        logits=logits,
        idx_mapping=case.tensor("expanded_idx_mapping"),
        temperature=case.tensor("temperature"),
        noise_words=case.place(words(uniforms, bool(case.inputs["use_fp64"]))),
        apply_temperature=bool(case.inputs["apply_temperature"]),
        logits_cache=cache,
        logits_cache_col=case.optional("logits_cache_col"),
        out_tokens=sampled,
    )
    np.testing.assert_array_equal(sampled.cpu().numpy(), np.where(states >= 0, case.outputs["sampled"], NO_TOKEN))
    if cache is not None:
        np.testing.assert_array_equal(cache.cpu().numpy(), case.outputs["logits_cache"])


def choose_tokens(case: Case) -> None:
    """Rows whose token no noise can change, with the library's own noise. It chooses nothing in padding rows, and keeps no cache."""
    logits = case.tensor("logits")
    tokens, vocabulary = logits.shape
    partials = choose_tokens_partials(vocabulary)
    temperature = case.tensor("temperature")
    if not case.inputs["apply_temperature"]:
        temperature = (temperature > 0).float()

    def filled(*shape: int, value: float = POISON, dtype: torch.dtype = torch.int32) -> torch.Tensor:
        return torch.full(shape, value, dtype=dtype, device=case.device)

    out = filled(tokens + 2)
    case.run(
        choose_tokens_,
        logits=logits,
        logits_indices=None,
        token_rows=case.tensor("expanded_idx_mapping"),
        positions=case.tensor("pos").int(),
        temperature=temperature,
        seed=filled(len(temperature), 2, value=0),
        stream=DRAFT,
        nonce_length=None,
        token_ids=None,
        out_tokens=out[:tokens],
        out_bad=filled(tokens),
        scratch_scores=filled(tokens, partials, dtype=torch.float32),
        scratch_tokens=filled(tokens, partials),
        scratch_bad=filled(tokens, partials),
    )
    real = case.inputs["expanded_idx_mapping"] >= 0
    actual = out.cpu().numpy()
    np.testing.assert_array_equal(actual[:tokens][real], case.outputs["sampled"][real])
    np.testing.assert_array_equal(actual[tokens:], POISON)


def sample_recovered_tokens(case: Case) -> None:
    found = case.poisoned("recovered_token_ids")
    ends = case.inputs["cu_num_draft_tokens"]
    case.run(
        sample_recovered_tokens_,
        cu_num_draft_tokens=case.tensor("cu_num_draft_tokens"),
        draft_token_ids=case.tensor("draft_token_ids"),
        draft_probs=case.optional("draft_probs"),
        target_probs=case.tensor("target_probs"),
        inv_q=case.tensor("inv_q"),
        max_spec_len=int(np.diff(ends, prepend=0).max(initial=0)),
        out_token_ids=found,
    )
    case.expect(recovered_token_ids=found)


def exact_residual(case: Case) -> None:
    """The exact residual's weights, drawn in the reference's own way: the largest of weight times a given number."""
    ends = case.inputs["cu_num_draft_tokens"]
    heat = np.ones((1, 1), np.float32)
    for row, (begin, end) in enumerate(zip([0, *ends[:-1]], ends, strict=True)):
        for place in range(begin, end):
            scores = exact.sane_scores(log_probabilities(case.inputs["target_probs"][place : place + 1]), heat)
            p = exact.probabilities(scores, exact.normalisers(scores))[0]
            if "draft_probs" in case.inputs:
                drawn = exact.sane_scores(log_probabilities(case.inputs["draft_probs"][place : place + 1]), heat)
                weights = exact.residual(p, exact.probabilities(drawn, exact.normalisers(drawn))[0], NO_TOKEN)
            else:
                weights = exact.residual(p, np.zeros_like(p), int(case.inputs["draft_token_ids"][place]))
            assert int((weights * case.inputs["inv_q"][row]).argmax()) == case.outputs["recovered_token_ids"][place]


def leaves_no_choice(tags: frozenset[str], inputs: Callable[[str], np.ndarray]) -> bool:
    return "greedy" in tags or "forced" in tags


ADAPTERS: dict[str, tuple[Adapter, ...]] = {
    "gumbel_sample": (Adapter(gumbel_sample), Adapter(choose_tokens, covers=leaves_no_choice)),
    "sample_recovered_tokens": (Adapter(sample_recovered_tokens), Adapter(exact_residual, is_host=True)),
}
"""By archive, as in `golden_adapters`."""
