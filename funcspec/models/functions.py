"""Any function of a token prefix as a model."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import jax.numpy as jnp
import torch

from funcspec.errors import ArgumentTypeError, ModelError, refuse
from funcspec.models.base import KV, ForwardBatch, KVSpec
from funcspec.models.toy import ChecksumModel, read_prefixes, write_tokens


@dataclass(frozen=True)
class FunctionModel:
    """A model made of a function; see `from_logits`."""

    function: Callable[[Any], Any]
    vocab_size: int
    max_len: int
    array: Literal["torch", "jax"] = "torch"

    @property
    def kv_spec(self) -> KVSpec:
        """Each slot keeps a token id and its position, from which prefixes are read back."""
        return ChecksumModel().kv_spec

    def forward(self, kv: KV, batch: ForwardBatch) -> tuple[KV, torch.Tensor, tuple[torch.Tensor, ...]]:
        """Call the function on the prefix that ends in each wanted token."""
        write_tokens(kv, batch)
        tokens, _, visible = read_prefixes(kv, batch)
        out = torch.zeros(len(tokens), self.vocab_size, device=tokens.device)
        for row, length in enumerate(visible.sum(1).tolist()):
            if length:  # padding places see nothing
                out[row] = self._call(tokens[row, :length])
        return kv, out, ()

    def _call(self, prefix: torch.Tensor) -> torch.Tensor:
        if self.array == "jax":
            result: Any = self.function(jnp.array(prefix.cpu().numpy()))
            logits = torch.from_dlpack(result) if hasattr(result, "__dlpack__") else torch.as_tensor(result)
        else:
            logits = torch.as_tensor(self.function(prefix))
        if tuple(logits.shape) != (self.vocab_size,):
            raise ModelError(
                f"function: expected logits [{self.vocab_size}], got {list(logits.shape)}. Fix: return one logit for each token id."
            )
        return logits.float()


def from_logits(
    function: Callable[[Any], Any], *, vocab_size: int, max_len: int = 4096, array: Literal["torch", "jax"] = "torch"
) -> FunctionModel:
    """Make a model of any function from a token prefix to next-token logits.

    The function is called once for every wanted place, without a cache of its own: simple and exact rather than quick.

    Args:
        function: takes a 1-D int32 array of token ids, returns logits [vocab_size].
        vocab_size: number of token ids.
        max_len: longest prefix.
        array: whether the function takes and returns torch tensors or JAX arrays.

    Example:
        >>> import torch
        >>> model = from_logits(lambda prefix: -torch.arange(5.0).sub(prefix.sum() % 5).abs(), vocab_size=5)
        >>> model.vocab_size
        5
    """
    if not callable(function):
        refuse("function", "a callable", type(function).__name__, "pass a function of a token prefix", ArgumentTypeError)
    if array not in ("torch", "jax"):
        refuse("array", "'torch' or 'jax'", repr(array), "use one of these")
    for name, size in (("vocab_size", vocab_size), ("max_len", max_len)):
        if not isinstance(size, int) or isinstance(size, bool) or size < 1:
            refuse(name, "a positive int", repr(size), "pass the function's vocabulary and longest prefix")
    return FunctionModel(function, vocab_size, max_len, array)
