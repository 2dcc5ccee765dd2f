"""Self-drafting: the target's own first layers, with its embedding and output matrix, as a draft."""

from dataclasses import replace
from typing import Any

from funcspec.drafters.pairs import check_token_ids
from funcspec.drafters.standalone import Standalone, standalone
from funcspec.errors import ArgumentTypeError, ModelError, refuse
from funcspec.models.base import Array
from funcspec.models.jax_llama import JaxLlama
from funcspec.models.llama import Llama


def early_exit(target: Llama | JaxLlama, num_layers: int, token_ids: Array | None = None) -> Standalone:
    """Make a standalone drafter of the target's first layers. Weights are shared; the draft keeps KV of its own.

    A model that was not trained to leave early foresees little after a few layers (SmolLM2-135M agrees with itself in 0.16 of its tokens
    after 20 of 30 layers), so this suits models that were, and experiments.

    Args:
        target: a Llama, of torch or of JAX.
        num_layers: layers that the draft runs, from 1 to all of them.
        token_ids: [V_draft] int32 distinct ids of the tokens that the draft may propose; its output matrix then has their rows only, which
            makes it much cheaper. None is all tokens.

    Raises:
        ArgumentTypeError: the target is no Llama, `num_layers` no int, or `token_ids` no one-dimensional int32 array of its framework.
        ArgumentError: `num_layers` is out of range, or ids are not distinct.
        ModelError: ids that the target does not have.

    Example:
        >>> import funcspec as fs
        >>> from funcspec.models.llama import LlamaConfig, random_llama
        >>> target = random_llama(LlamaConfig(11, 3, 8, 16, 2, 1, 4, 32))
        >>> early_exit(target, 2).kv_model.num_layers
        2

    Reference: Zhang et al. 2023, "Draft & verify", arXiv 2309.08168; Elhoushi et al. 2024, "LayerSkip", arXiv 2404.16710.
    """
    if not isinstance(target, Llama | JaxLlama):
        found = f"the class {target.__name__}" if isinstance(target, type) else type(target).__name__
        fix = "cut the model yourself and wrap what is left with standalone"
        refuse("target", "a Llama or a JaxLlama", found, fix, ArgumentTypeError)
    if not isinstance(num_layers, int) or isinstance(num_layers, bool):
        refuse("num_layers", "an int", f"{num_layers!r} ({type(num_layers).__name__})", "pass a number of layers", ArgumentTypeError)
    if not 1 <= num_layers <= target.num_layers:
        refuse("num_layers", f"from 1 to {target.num_layers}", num_layers, "run at least one layer, and no more than the target has")
    if token_ids is not None:
        _check_ids(target, token_ids)
    return standalone(_first_layers(target, num_layers, token_ids), token_ids)


def _check_ids(target: Llama | JaxLlama, token_ids: Array) -> None:
    check_token_ids(token_ids, target)
    if len(token_ids) and not 0 <= int(token_ids.min()) <= int(token_ids.max()) < target.vocab_size:
        found = f"ids from {int(token_ids.min())} to {int(token_ids.max())}"
        refuse("token_ids", f"ids from 0 to {target.vocab_size - 1}", found, "pass ids of the target", ModelError)


def _first_layers(target: Llama | JaxLlama, num_layers: int, token_ids: Array | None) -> Llama | JaxLlama:
    """The target cut short, with its output matrix cut to some rows."""
    config = replace(target.config, num_layers=num_layers)
    weights: dict[str, Any] = {name: target.weights[name] for name in config.weight_shapes()}
    matrix: Any = target.weights.get("head", target.weights["embed"])
    if token_ids is not None:
        weights["head"] = matrix[token_ids if isinstance(target, JaxLlama) else token_ids.long()]
    elif "head" in target.weights:
        weights["head"] = matrix
    output_ids: Any = target.output_token_ids if token_ids is None else token_ids
    return JaxLlama(config, weights, output_ids) if isinstance(target, JaxLlama) else Llama(config, weights, output_ids)
