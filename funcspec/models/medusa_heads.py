"""Medusa heads: residual blocks and an output matrix for each token ahead, over one hidden state of the target. No cache.

In torch (`MedusaHeads`) and in JAX (`JaxMedusaHeads`); `funcspec.drafters.medusa` makes a drafter of them.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import torch
from torch.nn import functional as F

from funcspec.errors import ModelError, refuse
from funcspec.models.base import KV, Array, FeatureSpec, ForwardBatch, KVSpec

UNLIMITED = 2**30
"""Heads know nothing of positions: more than any row has."""

NAMES = ("blocks", "biases", "outputs")


@dataclass(frozen=True, eq=False)
class _Heads:
    """What both frameworks share; see `MedusaHeads`."""

    weights: Mapping[str, Array]
    layer: int
    max_len: ClassVar[int] = UNLIMITED

    @property
    def num_heads(self) -> int:
        """Number of heads, which is the most drafts they can make."""
        return self.weights["blocks"].shape[0]

    @property
    def hidden_size(self) -> int:
        """Width of the hidden state."""
        return self.weights["outputs"].shape[2]

    @property
    def vocab_size(self) -> int:
        """Width of the logits."""
        return self.weights["outputs"].shape[1]

    @property
    def input_vocab_size(self) -> int:
        """Heads read no tokens, so that all fit."""
        return UNLIMITED

    @property
    def features(self) -> FeatureSpec:
        """One hidden state of the target."""
        return FeatureSpec((self.layer,), self.hidden_size)

    @property
    def kv_spec(self) -> KVSpec:
        """Nothing is cached."""
        return KVSpec(0, ())

    def _shape(self, batch: ForwardBatch) -> tuple[int, int]:
        """How many rows, and how many heads are wanted of each."""
        assert batch.features is not None
        rows = batch.seq_lens.shape[0]
        wanted = (batch.input_ids if batch.logits_indices is None else batch.logits_indices).shape[0]
        count = wanted // rows
        if count > self.num_heads:
            refuse("logits_indices", f"at most {self.num_heads} heads wanted of a row", count, "draft fewer tokens", ModelError)
        return rows, count

    def _states(self, batch: ForwardBatch, rows: int, count: int) -> Array:
        """The hidden state [R, H] that each row's newest token was sampled from: the one at the first place that is wanted."""
        assert batch.features is not None
        if batch.logits_indices is None:  # one place a row
            return batch.features
        places, held = batch.input_ids.shape[0] // rows, batch.features.shape[0] // rows
        starts = batch.query_start_loc[:-1]
        return batch.features[batch.logits_indices[::count] - starts + starts // places * held]


@dataclass(frozen=True, eq=False)
class MedusaHeads(_Heads):
    """Medusa heads as a `Model` of torch.

    Head k turns the hidden state h, through its L residual blocks h + silu(W h + b) one after the other and its output matrix, into
    logits of the token k + 1 places behind the newest one.

    Attributes:
        weights: "blocks" [num_heads, L, H, H] and "biases" [num_heads, L, H], matrices [output, input]; "outputs" [num_heads, V, H], or
            [1, V, H] for all heads. All of one dtype and device.
        layer: which hidden state of the target they read, as in `ForwardBatch.hidden_layers`. Medusa heads are trained on the last one,
            the target's `num_layers`.

    Example:
        >>> import torch
        >>> names = {"blocks": (3, 1, 8, 8), "biases": (3, 1, 8), "outputs": (3, 97, 8)}
        >>> heads = MedusaHeads({name: torch.zeros(shape) for name, shape in names.items()}, layer=2)
        >>> heads.num_heads, heads.vocab_size
        (3, 97)

    Reference: Cai et al. 2024, arXiv 2401.10774.
    """

    def __post_init__(self) -> None:
        _check(self.weights, torch.Tensor, lambda weight: weight.device)

    @property
    def device(self) -> torch.device:
        """Where the weights are."""
        return self.weights["outputs"].device

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of weights and logits."""
        return self.weights["outputs"].dtype

    @torch.no_grad()
    def forward(self, kv: KV, batch: ForwardBatch) -> tuple[KV, torch.Tensor, tuple[torch.Tensor, ...]]:
        """Run C heads on each row, where C places of it are wanted; see `Model.forward`.

        Args:
            kv: empty.
            batch: what to run. Only `features` count, at the first wanted place of each row.

        Returns:
            kv, logits [R * C, vocab_size], row by row and head by head, and nothing else.

        Raises:
            ModelError: more places are wanted than there are heads.
        """
        rows, count = self._shape(batch)
        blocks, biases, outputs = (self.weights[name][:count] for name in NAMES)
        if count == 0:
            return kv, outputs.new_empty(0, self.vocab_size), ()
        x = self._states(batch, rows, count).to(self.dtype).expand(count, -1, -1)
        for index in range(blocks.shape[1]):
            x = x + F.silu(torch.baddbmm(biases[:, index, None], x, blocks[:, index].mT))
        return kv, (x @ outputs.mT).transpose(0, 1).reshape(rows * count, -1), ()

    @classmethod
    def from_state_dict(cls, state_dict: Mapping[str, torch.Tensor], layer: int) -> "MedusaHeads":
        """Take the weights of a checkpoint in the authors' names: "0.0.linear.weight", "0.0.linear.bias", "0.1.weight", ...

        Args:
            state_dict: tensors by name, "{head}.{block}.linear.weight", "{head}.{block}.linear.bias" and "{head}.{L}.weight", all of one
                dtype and device; names may begin with "medusa_head.".
            layer: which hidden state of the target they read.

        Raises:
            ModelError: tensors are missing, or are no Medusa heads.
        """
        found = {name.removeprefix("medusa_head."): tensor for name, tensor in state_dict.items()}
        heads = len({name.split(".")[0] for name in found})
        depth = len([name for name in found if name.startswith("0.") and name.endswith(".linear.weight")])
        names = {
            "blocks": [[f"{head}.{block}.linear.weight" for block in range(depth)] for head in range(heads)],
            "biases": [[f"{head}.{block}.linear.bias" for block in range(depth)] for head in range(heads)],
        }
        outputs = [f"{head}.{depth}.weight" for head in range(heads)]
        expected = {*outputs, *(name for lists in names.values() for listed in lists for name in listed)}
        if not depth or set(found) != expected:
            odd = sorted(set(found) ^ expected)[:3]
            fix = "pass the state dict of the heads alone"
            refuse("state_dict", f"{heads} heads of {depth} blocks and an output matrix", f"odd or missing names {odd}", fix, ModelError)
        weights = {name: torch.stack([torch.stack([found[one] for one in listed]) for listed in lists]) for name, lists in names.items()}
        return cls(weights | {"outputs": torch.stack([found[name] for name in outputs])}, layer)


@dataclass(frozen=True, eq=False)
class JaxMedusaHeads(_Heads):
    """`MedusaHeads` in JAX, with the same attributes. It is a pytree, so its weights are no constants of a program.

    Attributes:
        weights: jax.Arrays.
        layer: as for `MedusaHeads`; static in a pytree.
        framework: "jax".
    """

    framework: ClassVar[str] = "jax"

    def __post_init__(self) -> None:
        _check(self.weights, jax.Array, lambda weight: weight.devices())

    @classmethod
    def from_torch(cls, heads: MedusaHeads) -> "JaxMedusaHeads":
        """Make the same heads of the weights of torch ones; shared where JAX can use them as they lie, and not to be written to."""
        return cls({name: jnp.from_dlpack(heads.weights[name].detach().contiguous()) for name in NAMES}, heads.layer)

    def forward(self, kv: KV, batch: ForwardBatch) -> tuple[KV, jax.Array, tuple[jax.Array, ...]]:
        """Do what `MedusaHeads.forward` does."""
        rows, count = self._shape(batch)
        blocks, biases, outputs = (self.weights[name][:count] for name in NAMES)
        if count == 0:
            return kv, jnp.zeros((0, self.vocab_size), outputs.dtype), ()
        exact = jax.lax.Precision.HIGHEST
        states = self._states(batch, rows, count).astype(outputs.dtype)
        x = jnp.broadcast_to(states, (count, *states.shape))
        for index in range(blocks.shape[1]):
            x = x + jax.nn.silu(jnp.einsum("crh,cgh->crg", x, blocks[:, index], precision=exact) + biases[:, index, None])
        logits = jnp.matmul(x, jnp.swapaxes(outputs, 1, 2), precision=exact)
        return kv, jnp.swapaxes(logits, 0, 1).reshape(rows * count, -1), ()


def _flatten(heads: JaxMedusaHeads) -> tuple[tuple[Any], int]:
    return (dict(heads.weights),), heads.layer


def _unflatten(layer: int, children: tuple[Any]) -> JaxMedusaHeads:
    """Unchecked: JAX passes tracers and placeholders."""
    heads = object.__new__(JaxMedusaHeads)
    object.__setattr__(heads, "weights", children[0])
    object.__setattr__(heads, "layer", layer)
    return heads


jax.tree_util.register_pytree_node(JaxMedusaHeads, _flatten, _unflatten)


def _check(weights: Mapping[str, Any], kind: type, place_of: Callable[[Any], object]) -> None:
    """Refuse weights that are missing, misshapen or not all of one dtype and place."""
    for name in NAMES:
        if not isinstance(weights.get(name), kind):
            found = type(weights[name]).__name__ if name in weights else "nothing"
            wanted = "a jax.Array" if kind is jax.Array else "a tensor"
            refuse("weights", f"{wanted} named {name!r}", found, "pass blocks, biases and outputs", ModelError)
    blocks, biases, outputs = (weights[name] for name in NAMES)
    if blocks.ndim != 4 or blocks.shape[2] != blocks.shape[3] or not blocks.shape[0]:
        refuse("weights", "[num_heads, L, H, H] for 'blocks'", tuple(blocks.shape), "stack the heads", ModelError)
    heads, depth, size, _ = blocks.shape
    if tuple(biases.shape) != (heads, depth, size):
        refuse("weights", f"{(heads, depth, size)} for 'biases'", tuple(biases.shape), "pass zeros where there are none", ModelError)
    if outputs.ndim != 3 or outputs.shape[0] not in (1, heads) or outputs.shape[2] != size:
        refuse("weights", f"[{heads} or 1, V, {size}] for 'outputs'", tuple(outputs.shape), "pass a matrix for each head", ModelError)
    for name in NAMES:
        expected, found = (f"{array.dtype} on {place_of(array)}" for array in (outputs, weights[name]))
        if expected != found:
            refuse("weights", f"{expected} for {name!r}", found, "convert them all alike", ModelError)


__all__ = ["JaxMedusaHeads", "MedusaHeads"]
