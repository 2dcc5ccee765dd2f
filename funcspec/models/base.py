"""What a model is to funcspec: a vocabulary, a length limit, a KV layout and a pure-looking forward."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import jax
import torch

from funcspec.errors import ModelError, refuse

Array = Any
"""A torch tensor, or a JAX array in states and models of JAX."""

KV = Mapping[str, Array]


@dataclass(frozen=True)
class KVEntry:
    """One kind of value that a model keeps per token and layer.

    Attributes:
        name: key under which the buffer is passed to `forward`.
        shape: shape of one token's value in one layer, for example (kv_heads, head_dim).
        dtype: its dtype.
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype


@dataclass(frozen=True)
class KVSpec:
    """Layout of a model's paged cache.

    A pool allocates every entry as `[num_layers, num_blocks, block_size, *shape]`.
    """

    num_layers: int
    entries: tuple[KVEntry, ...]


@dataclass(frozen=True)
class FeatureSpec:
    """What a draft reads of its target besides tokens: hidden states, one vector of features for each position.

    Attributes:
        layers: layers of the target whose hidden states are taken, side by side; numbered as in `ForwardBatch.hidden_layers`.
        size: F, width of the features: the number of layers times the target's hidden size.
        feedback: width of what the draft hands to its own next pass in place of features, at most F; it returns that as its hidden state
            at the places of its logits. 0 for a draft of one pass.
        ahead: how many places ahead of a position's features the token lies that is fed with them: 1 for EAGLE and multi-token
            prediction, 0 for drafts that only attend to features.
        cache_layers: layers of the target's cache that the draft attends to instead of keeping one of its own. Such a draft is given the
            target's cache and block tables, writes nothing there, and stays at the position of the newest committed token's predecessor
            in all passes of a round. It may say in an attribute `cache_entries` which `KVEntry` it reads.
    """

    layers: tuple[int, ...]
    size: int
    feedback: int = 0
    ahead: int = 1
    cache_layers: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if not self.layers or not all(isinstance(layer, int) and layer >= 0 for layer in self.layers):
            refuse("layers", "layer numbers of the target", self.layers, "name at least one layer", ModelError)
        if self.size < 1 or self.size % len(self.layers):
            expected = f"a multiple of the number of layers, {len(self.layers)}"
            refuse("size", expected, self.size, "multiply it by the hidden size", ModelError)
        if not 0 <= self.feedback <= self.size:
            refuse("feedback", f"from 0 to {self.size}", self.feedback, "hand back no more than the features' width", ModelError)
        if self.ahead not in (0, 1):
            refuse("ahead", "0 or 1", self.ahead, "feed the token of the position itself, or that of the next one", ModelError)
        if not all(isinstance(layer, int) and layer >= 0 for layer in self.cache_layers):
            refuse("cache_layers", "layer numbers of the target", self.cache_layers, "name layers of its cache", ModelError)


@dataclass(frozen=True)
class ForwardBatch:
    """One flat, ragged batch of tokens for one forward pass. R rows (requests), T tokens, N blocks per row.

    All arrays are int32. Places that hold no token have id 0, position 0 and slot -1: they must not be written to the
    cache, and what is computed for them is never used.

    Attributes:
        input_ids: [T] token ids, in range for the model.
        positions: [T] position of each token in its row.
        query_start_loc: [R + 1] exclusive prefix sums: row r owns tokens query_start_loc[r] up to query_start_loc[r + 1].
        seq_lens: [R] number of keys a row may see, this pass included; 0 for an idle row.
        slot_mapping: [T] cache slot (block * block_size + offset) of each token; -1 writes nothing.
        block_tables: [R, N] block ids of each row; -1 where the row owns none.
        logits_indices: [M] the tokens whose logits are wanted, as indices into T; None means all T.
        max_query_len: at least the longest query of a row, as a host number.
        hidden_layers: layers whose hidden states are wanted too.
        features: for drafts with a `FeatureSpec`: float32 [R * C, F], those of the first C places of each row, row by row; or
            [R, feedback] in a pass of one place a row that goes on from the draft's own.
        rope_positions: for models with an attribute `rope_axes`, A: [A, T] positions to rotate by (M-RoPE), 0 where there is no token.
            `positions` still say what is seen and where it lies in the cache.
    """

    input_ids: Array
    positions: Array
    query_start_loc: Array
    seq_lens: Array
    slot_mapping: Array
    block_tables: Array
    logits_indices: Array | None
    max_query_len: int
    hidden_layers: tuple[int, ...] = ()
    features: Array | None = None
    rope_positions: Array | None = None


jax.tree_util.register_dataclass(
    ForwardBatch,
    data_fields=[
        "input_ids",
        "positions",
        "query_start_loc",
        "seq_lens",
        "slot_mapping",
        "block_tables",
        "logits_indices",
        "features",
        "rope_positions",
    ],
    meta_fields=["max_query_len", "hidden_layers"],
)


@runtime_checkable
class Model(Protocol):
    """Anything with these four members can be a target or a draft; no base class is needed.

    A query token at position p sees the keys of its own row at positions up to p and below `seq_lens`; the keys of
    this pass are written first and are visible to it.
    """

    @property
    def vocab_size(self) -> int:
        """Number of token ids; logits have this width."""
        ...

    @property
    def max_len(self) -> int:
        """Number of positions the model can take: positions run from 0 to max_len - 1."""
        ...

    @property
    def kv_spec(self) -> KVSpec:
        """Layout of the cache that `forward` is given."""
        ...

    def forward(self, kv: KV, batch: ForwardBatch) -> tuple[KV, Array, tuple[Array, ...]]:
        """Run the batch.

        Args:
            kv: the pool's buffers by entry name; written in place at `batch.slot_mapping`.
            batch: what to run.

        Returns:
            the same kv, logits [M, vocab_size] in float32, bfloat16 or float16, and one [T, H] tensor for each of `batch.hidden_layers`.
        """
        ...
