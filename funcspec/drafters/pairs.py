"""Whether a draft model, and its map of token ids, fit a target: what all drafters with a model check."""

import jax
import jax.numpy as jnp
import numpy as np
import torch

from funcspec.errors import ArgumentTypeError, ModelError, refuse
from funcspec.models.base import Array, Model


def check_pair(model: Model, token_ids: Array | None, target: Model) -> None:
    """Refuse a draft whose vocabulary does not fit the target's.

    Raises:
        ModelError: names both sizes, or both fingerprints.
    """
    drawn = model.vocab_size
    if token_ids is None and drawn != target.vocab_size:
        raise ModelError(
            f"drafter: expected the target's vocabulary of {target.vocab_size}, got a draft of {drawn}. "
            "Fix: use a draft of the same tokenizer, or pass token_ids, the map from draft ids to target ids."
        )
    if token_ids is not None:
        low, high = int(token_ids.min()), int(token_ids.max())
        if low < 0 or high >= target.vocab_size:
            raise ModelError(
                f"token_ids: expected target ids from 0 to {target.vocab_size - 1}, got ids from {low} to {high}. "
                "Fix: pass the map that belongs to this pair of models."
            )
    readable = getattr(model, "input_vocab_size", drawn if token_ids is None else target.vocab_size)
    if readable < target.vocab_size:
        raise ModelError(
            f"drafter: expected a draft that can read all {target.vocab_size} target ids, got an embedding of {readable}. "
            "Fix: use a draft with the target's input vocabulary."
        )
    ours, theirs = (getattr(one, "vocab_fingerprint", None) for one in (model, target))
    if ours is not None and theirs is not None and ours != theirs:
        raise ModelError(
            f"drafter: expected the target's vocabulary fingerprint {theirs!r}, got {ours!r}. "
            "Fix: the ids mean different tokens; use a draft of the same tokenizer."
        )


def check_token_ids(token_ids: object, model: Model) -> None:
    """Refuse a map of ids that is no one-dimensional int32 array of the model's framework.

    Raises:
        ArgumentTypeError: says what it is.
    """
    of_jax = getattr(model, "framework", "torch") == "jax"
    kind, int32 = (jax.Array, jnp.int32) if of_jax else (torch.Tensor, torch.int32)
    if not isinstance(token_ids, kind) or token_ids.dtype != int32 or token_ids.ndim != 1:
        expected = f"a one-dimensional int32 {'jax.Array' if of_jax else 'tensor'}"
        refuse("token_ids", expected, getattr(token_ids, "dtype", type(token_ids).__name__), "convert it", ArgumentTypeError)


def check_draft(argument: str, model: object, token_ids: Array | None) -> None:
    """Refuse what is no model, or a map of ids that is not of this model.

    Raises:
        ArgumentTypeError: no model, or `token_ids` is not a one-dimensional int32 array of the model's framework.
        ArgumentError: `token_ids` does not have one distinct entry for each output of the model.
    """
    if not isinstance(model, Model) or isinstance(model, type):
        found = f"the class {model.__name__}" if isinstance(model, type) else type(model).__name__
        fix = "wrap it with a function of funcspec.models"
        refuse(argument, "a Model (vocab_size, max_len, kv_spec, forward)", found, fix, ArgumentTypeError)
    if token_ids is None:
        return
    check_token_ids(token_ids, model)
    count, distinct = len(token_ids), len(np.unique(np.asarray(token_ids.cpu() if isinstance(token_ids, torch.Tensor) else token_ids)))
    if count != model.vocab_size or distinct != count:
        fix = "give every draft id its own target id"
        refuse("token_ids", f"{model.vocab_size} distinct ids", f"{distinct} distinct of {count}", fix)


__all__ = ["check_draft", "check_pair", "check_token_ids"]
