"""Standalone drafting: a smaller language model with its own KV drafts one token a step."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
import torch

from funcspec.config import SpecConfig
from funcspec.errors import ArgumentTypeError, ModelError, refuse
from funcspec.models.base import Array, Model

if TYPE_CHECKING:
    from funcspec.transitions import Transition


@dataclass(frozen=True, eq=False)
class Standalone:
    """A draft model as a drafter; see `standalone`."""

    model: Model
    token_ids: Array | None = None
    proposal: Literal["sampled", "point"] = "sampled"

    @property
    def kv_model(self) -> Model:
        """The draft model."""
        return self.model

    def init(self, config: SpecConfig, target: Model) -> None:
        """Check the pair: vocabularies, ids, fingerprints."""
        drawn = self.model.vocab_size
        if self.token_ids is None and drawn != target.vocab_size:
            raise ModelError(
                f"drafter: expected the target's vocabulary of {target.vocab_size}, got a draft of {drawn}. "
                "Fix: use a draft of the same tokenizer, or pass token_ids, the map from draft ids to target ids."
            )
        if self.token_ids is not None:
            low, high = int(self.token_ids.min()), int(self.token_ids.max())
            if low < 0 or high >= target.vocab_size:
                raise ModelError(
                    f"token_ids: expected target ids from 0 to {target.vocab_size - 1}, got ids from {low} to {high}. "
                    "Fix: pass the map that belongs to this pair of models."
                )
        readable = getattr(self.model, "input_vocab_size", drawn if self.token_ids is None else target.vocab_size)
        if readable < target.vocab_size:
            raise ModelError(
                f"drafter: expected a draft that can read all {target.vocab_size} target ids, got an embedding of {readable}. "
                "Fix: use a draft with the target's input vocabulary."
            )
        ours, theirs = (getattr(model, "vocab_fingerprint", None) for model in (self.model, target))
        if ours is not None and theirs is not None and ours != theirs:
            raise ModelError(
                f"drafter: expected the target's vocabulary fingerprint {theirs!r}, got {ours!r}. "
                "Fix: the ids mean different tokens; use a draft of the same tokenizer."
            )

    def first(self, transition: "Transition", wanted: Array) -> None:
        """Feed what was committed and draft the first token."""
        transition.draft_once(self.model, first=True, token_ids=self.token_ids, wanted=wanted)

    def next(self, transition: "Transition") -> None:
        """Feed the newest draft and draft one more token."""
        transition.draft_once(self.model, first=False, token_ids=self.token_ids, wanted=transition.fields.num_draft)


def _flatten(drafter: Standalone) -> tuple[tuple[Any, Any], str]:
    return (drafter.model, drafter.token_ids), drafter.proposal


def _unflatten(proposal: Any, children: tuple[Any, Any]) -> Standalone:
    return Standalone(children[0], children[1], proposal)


# With a model of JAX that is a pytree, the drafter is an argument of a program, and its weights are no constants of it.
jax.tree_util.register_pytree_node(Standalone, _flatten, _unflatten)


def standalone(model: Model, token_ids: Array | None = None) -> Standalone:
    """Make a drafter of a language model.

    The draft has its own KV, its own length limit (`model.max_len`: a row that outgrows it drafts fewer, then no tokens)
    and its own KV dtype.

    Args:
        model: the draft model. It reads target ids.
        token_ids: [V_draft] int32, the target id of each of the draft's output ids; for drafts that cover a part of the
            vocabulary. None where the ids are the same. A tensor, or for a model of JAX a jax.Array.

    Raises:
        ArgumentTypeError: `token_ids` is not a one-dimensional int32 array, or `model` is not a model.
        ArgumentError: `token_ids` does not have one distinct entry for each output of the model.

    Example:
        >>> import funcspec as fs
        >>> drafter = fs.drafters.standalone(fs.models.ChecksumDraft())

    Reference: Leviathan et al. 2023, arXiv 2211.17192; Chen et al. 2023, arXiv 2302.01318.
    """
    if not isinstance(model, Model) or isinstance(model, type):
        refuse(
            "model",
            "a Model (vocab_size, max_len, kv_spec, forward)",
            f"the class {model.__name__}" if isinstance(model, type) else type(model).__name__,
            "wrap it with a function of funcspec.models",
            ArgumentTypeError,
        )
    if token_ids is not None:
        of_jax = getattr(model, "framework", "torch") == "jax"
        kind, int32 = (jax.Array, jnp.int32) if of_jax else (torch.Tensor, torch.int32)
        if not isinstance(token_ids, kind) or token_ids.dtype != int32 or token_ids.ndim != 1:
            refuse(
                "token_ids",
                f"a one-dimensional int32 {'jax.Array' if of_jax else 'tensor'}",
                getattr(token_ids, "dtype", type(token_ids).__name__),
                "convert it",
                ArgumentTypeError,
            )
        count, distinct = len(token_ids), len(np.unique(np.asarray(token_ids.cpu() if isinstance(token_ids, torch.Tensor) else token_ids)))
        if count != model.vocab_size or distinct != count:
            refuse(
                "token_ids", f"{model.vocab_size} distinct ids", f"{distinct} distinct of {count}", "give every draft id its own target id"
            )
    return Standalone(model, token_ids)
