"""What speculation promises of a real model, checked: passes of one shape agree, and the output is that of plain decoding.

For a target whose logits are a function of the prefix alone, output equals plain decoding token for token, for every drafter, number
of drafts and batch. A floating-point model is such a function only among passes of one shape, and not always there. So plain
decoding is compared in the shape of speculative passes (no drafts, padded), where a shape-stable model must give the same tokens;
against passes of one token the first difference must be a near-tie, and its margin says how near.
"""

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
import numpy as np
import torch

from funcspec import rules
from funcspec.admission import DEFAULT_CHUNK, admit, init, release
from funcspec.config import SpecConfig, check_config
from funcspec.drafters.base import Drafter
from funcspec.errors import CapacityError, check_int, refuse
from funcspec.generation import generate
from funcspec.models.base import Model
from funcspec.noise import TARGET, gumbel, noise_words
from funcspec.partners import check_model
from funcspec.requests import validate
from funcspec.state import SpecState
from funcspec.steps import Scores, accept, score
from funcspec.transitions import open_step

PROMPT = 12
"""Longest prompt that `check_shape_stable` makes up."""


@dataclass(frozen=True)
class ShapeReport:
    """How far logits of the same prefixes differ between passes of one shape; true if they do not differ in any bit.

    Attributes:
        stable: whether no bit differs.
        max_difference: largest difference of two logits.
        flips: prefixes whose arg-max differs.
        prefixes: how many were compared.
    """

    stable: bool
    max_difference: float
    flips: int
    prefixes: int

    def __bool__(self) -> bool:
        return self.stable


def check_shape_stable(target: Model, config: SpecConfig, *, seed: int = 0) -> ShapeReport:
    """Compare logits of the same prefixes in passes of the one shape that `verify` uses, R rows of K + 1 places.

    Made-up sequences are verified three ways: all drafts in one pass; one token a pass with the other places empty; and with the other
    rows idle. A shape-stable target gives the same bits, and then its speculative output equals its plain output in that shape.

    Args:
        target: any model, of torch or JAX.
        config: rows, drafts, capacities and device to check for; its rule does not matter.
        seed: of the sequences.

    Raises:
        ArgumentError, ArgumentTypeError, ModelError: no model, no configuration, or a seed that is no int of 0 or more.
        CapacityError: max_model_len leaves no room for a prompt and the drafts.

    Example:
        >>> import funcspec as fs
        >>> config = fs.SpecConfig(max_num_reqs=2, max_model_len=32, num_speculative_tokens=3, rule=fs.rules.greedy)
        >>> check_shape_stable(fs.models.ChecksumModel(), config)
        ShapeReport(stable=True, max_difference=0.0, flips=0, prefixes=12)
    """
    check_model("target", target)
    check_config(config)
    check_int("seed", seed, 0)
    rows, drafts = config.max_num_reqs, config.num_speculative_tokens
    longest = min(PROMPT, config.max_model_len - drafts - 2)
    if longest < 1:
        refuse("config.max_model_len", f"at least {drafts + 3}", config.max_model_len, "allow longer rows", CapacityError)
    random = np.random.default_rng(seed)
    ids = min(target.vocab_size, getattr(target, "input_vocab_size", target.vocab_size))
    prompts = [random.integers(0, ids, max(longest - row % 3, 1)).tolist() for row in range(rows)]
    following = random.integers(0, ids, (rows, drafts)).astype(np.int32)
    greedy = config.replace(rule=rules.greedy)
    state, _ = admit(init(greedy, target), target, None, prompts, seeds=[0] * rows)
    together = _logits(_drafted(state, following), target)
    alone = _logits(_drafted(release(state, range(1, rows)), following), target)
    single = []
    for place in range(drafts + 1):
        state, scores = score(state, target)
        single.append(_host(scores.logits)[:, 0])
        if place < drafts:
            forced = np.zeros(tuple(scores.logits.shape), np.float32)
            forced[np.arange(rows), 0, following[:, place]] = 1.0
            state, _ = accept(state, Scores(_array(state, forced), scores.stamp))
    pairs = (together, np.stack(single, 1)), (together[:1], alone[:1])
    left, right = (np.concatenate([pair[side].reshape(-1, pair[side].shape[2]) for pair in pairs]) for side in (0, 1))
    return _report(left, right)


@dataclass(frozen=True)
class Comparison:
    """Speculative output against plain output of the same target.

    Attributes:
        identical: whether it equals plain decoding in the shape of speculative passes. For a shape-stable target it must.
        first_difference: (prompt, place) where it first differs from plain decoding with one token a pass, or None.
        margin: by how much the target preferred its best token there (difference of logits, or of logits over temperature plus
            noise), or None. A near-tie is what rounding can turn.
    """

    identical: bool
    first_difference: tuple[int, int] | None
    margin: float | None

    def __bool__(self) -> bool:
        return self.identical


def same_as_plain(
    target: Model,
    drafter: Drafter,
    prompts: Sequence[Sequence[int]],
    *,
    config: SpecConfig,
    seeds: Sequence[int] | None = None,
    temperature: float | Sequence[float] = 0.0,
    max_tokens: int | Sequence[int] | None = None,
    stop_ids: Sequence[int] | Sequence[Sequence[int]] = (),
) -> Comparison:
    """Decode prompts with drafts, without drafts in the same shape, and with one token a pass, and compare tokens.

    For rules whose output is the target's own sample path: `greedy`, `coupled`, and `ratio` at temperature 0.

    Args:
        target, drafter: the models.
        prompts, seeds, temperature, max_tokens, stop_ids: as for `generate`.
        config: as for `generate`, with K of at least 1.

    Raises:
        ArgumentError: the rule draws another sample than plain decoding, or as for `generate`.

    Example:
        >>> import funcspec as fs
        >>> config = fs.SpecConfig(max_num_reqs=2, max_model_len=32, num_speculative_tokens=3, rule=fs.rules.coupled)
        >>> drafter = fs.drafters.standalone(fs.models.ChecksumDraft())
        >>> same_as_plain(fs.models.ChecksumModel(), drafter, [[5, 6, 7], [1]], config=config, temperature=0.8)
        Comparison(identical=True, first_difference=None, margin=None)
    """
    check_model("target", target)
    check_config(config)
    requests = validate(config, target, prompts, seeds, temperature, max_tokens, 0, stop_ids)
    check_comparable(config.rule, [request.temperature for request in requests])
    words = [[word & 0xFFFFFFFF for word in request.seed] for request in requests]
    chosen = [low | high << 32 for low, high in words]  # fresh seeds must be the same in all three runs
    options: dict[str, Any] = {"seeds": chosen, "temperature": temperature, "max_tokens": max_tokens, "stop_ids": stop_ids}

    def outputs(settings: SpecConfig, drafts: Drafter | None, num_draft: int | None) -> list[list[int]]:
        found: list[list[int]] = [[] for _ in prompts]
        for emission in generate(settings, target, drafts, prompts, num_draft=num_draft, **options):
            found[emission.prompt_index] += emission.tokens
        return found

    ours, padded = outputs(config, drafter, None), outputs(config, drafter, 0)
    single = outputs(config.replace(num_speculative_tokens=0), None, None)
    difference = first_difference(ours, single)
    margin = None
    if difference is not None:
        prompt, place = difference
        request = requests[prompt]
        margin = preference_margin(
            target, [*request.prompt, *single[prompt][:place]], chosen[prompt], request.temperature, device=config.device
        )
    return Comparison(ours == padded, difference, margin)


def check_comparable(rule: rules.Rule, temperatures: Sequence[float]) -> None:
    """Refuse to compare tokens under a rule that has plain decoding's law but draws another sample.

    Raises:
        ArgumentError: the rule judges by ratios, and a temperature is above 0.
    """
    if rule.judges_by == "ratio" and any(temperature > 0 for temperature in temperatures):
        fix = "use rules.coupled, or temperature 0"
        refuse("rule", "one whose output is the target's own sample path", f"{rule!r} at a temperature above 0", fix)


def first_difference(left: Sequence[Sequence[int]], right: Sequence[Sequence[int]]) -> tuple[int, int] | None:
    """The first (prompt, place) where outputs differ, or None.

    Example:
        >>> first_difference([[1, 2], [3]], [[1, 2], [3, 4]])
        (1, 1)
    """
    for prompt, (one, other) in enumerate(zip(left, right, strict=True)):
        for place in range(max(len(one), len(other))):
            if one[place : place + 1] != other[place : place + 1]:
                return prompt, place
    return None


def preference_margin(
    target: Model, tokens: Sequence[int], seed: int, temperature: float, *, forbidden: Sequence[int] = (), device: str = "cpu"
) -> float:
    """Gap between the two best scores after some tokens: logits, or logits over temperature plus the request's noise.

    Args:
        target: the model.
        tokens: prompt and output so far.
        seed, temperature: of the request.
        forbidden: token ids that may not come.
        device: where the model works.
    """
    config = SpecConfig(max_num_reqs=1, max_model_len=len(tokens) + 1, num_speculative_tokens=0, rule=rules.coupled, device=device)
    step = open_step(init(config, target), "preference_margin", donate=False)
    (blocks,) = step.reserve("target", [config.blocks_per_row])
    logits = step.ingest("target", target, blocks, tokens, DEFAULT_CHUNK).logits
    assert logits is not None
    scores = logits[0].float().cpu()
    scores[list(forbidden)] = -float("inf")
    if temperature > 0:
        words = noise_words(seed, len(tokens) - 1, 0, TARGET, np.arange(scores.numel()))
        scores = scores / temperature + torch.from_numpy(gumbel(words))
    best, second = scores.topk(2).values.tolist()
    return best - second


def _drafted(state: SpecState, following: np.ndarray) -> SpecState:
    """The state with these tokens as the drafts of its live rows."""
    tokens, lengths = _host(state.tokens), _host(state.num_tokens)
    for row, length in enumerate(lengths):
        if length:
            tokens[row, length : length + following.shape[1]] = following[row]
    counts = np.where(lengths > 0, following.shape[1], 0).astype(np.int32)
    arrays = {"tokens": tokens, "num_draft": counts, "num_drafted": counts}
    return dataclasses.replace(state, **{name: _array(state, values) for name, values in arrays.items()})


def _logits(state: SpecState, target: Model) -> np.ndarray:
    return _host(score(state, target)[1].logits)


def _host(array: Any) -> np.ndarray:
    """A copy on the host; floats as float32, which is exact."""
    if isinstance(array, torch.Tensor):
        return (array.float() if array.is_floating_point() else array).cpu().numpy().copy()
    return np.array(array.astype(jnp.float32) if jnp.issubdtype(array.dtype, jnp.floating) else array)


def _array(state: SpecState, values: np.ndarray) -> Any:
    return jnp.array(values) if state.framework == "jax" else torch.from_numpy(values.copy()).to(state.config.device)


def _report(left: np.ndarray, right: np.ndarray) -> ShapeReport:
    same = (left == right) | (np.isnan(left) & np.isnan(right))
    with np.errstate(invalid="ignore"):
        gaps = np.where(same, 0.0, np.abs(left - right))
    flips = int((np.nan_to_num(left, nan=-np.inf).argmax(1) != np.nan_to_num(right, nan=-np.inf).argmax(1)).sum())
    return ShapeReport(bool(same.all()), float(gaps.max()), flips, len(left))


__all__ = ["Comparison", "ShapeReport", "check_comparable", "check_shape_stable", "first_difference", "preference_margin", "same_as_plain"]
