"""The Llama family in JAX over the same paged cache as `funcspec.models.llama`: a pytree of weights and a pure `forward`."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, NamedTuple, Self

import jax
import jax.numpy as jnp
import numpy as np
import torch
from jax.tree_util import GetAttrKey

from funcspec.errors import ModelError, refuse
from funcspec.models.base import KV, ForwardBatch, KVEntry, KVSpec
from funcspec.models.llama import Llama, LlamaConfig, LlamaLayers, check_hidden_layers, check_weights, rotary_tables

FAR = -1e38
"""Below every score, but finite: a query that sees nothing never meets inf - inf."""

ROWS = 8
"""Smaller passes are padded to this many tokens. All of them then have the same shapes, and so the same cost and the same bits;
and a pass of one token is spared XLA's code for one row, which on a CPU copies the whole cache to write one slot."""


class Layout(NamedTuple):
    """Where the tokens of a batch are, the same for all layers. A row's queries are padded to W = max_query_len, its keys to K."""

    slots: jax.Array
    """[T] cache slots; tokens that write nothing have slots past the end, all different."""

    tables: jax.Array
    """[R, N] block ids; any valid block stands for none."""

    queries: jax.Array
    """[R, W] the token of each query."""

    places: tuple[jax.Array, jax.Array]
    """[T] row and column of each token in `queries`; the column of one that belongs to no row holds no query, or is past the end."""

    visible: jax.Array
    """[R, W, K] whether the query sees the key."""


def lay_out(batch: ForwardBatch, num_blocks: int, block_size: int) -> Layout:
    """Find out where the tokens of a batch are in a cache of so many blocks."""
    tokens = jnp.arange(batch.input_ids.shape[0])
    starts, counts = batch.query_start_loc[:-1], jnp.diff(batch.query_start_loc)
    columns = jnp.arange(batch.max_query_len)
    queries = starts[:, None] + columns
    last_seen = jnp.minimum(jnp.take(batch.positions, queries, mode="clip"), batch.seq_lens[:, None] - 1)
    last_seen = jnp.where(columns < counts[:, None], last_seen, -1)
    keys = jnp.arange(batch.block_tables.shape[1] * block_size)
    is_key = jnp.repeat(batch.block_tables >= 0, block_size, axis=1)
    # The last row that starts at or before a token: rows without queries own none.
    rows = jnp.searchsorted(starts, tokens, side="right", method="compare_all") - 1
    return Layout(
        slots=jnp.where(batch.slot_mapping < 0, num_blocks * block_size + tokens, batch.slot_mapping),
        tables=jnp.maximum(batch.block_tables, 0),
        queries=queries,
        places=(rows, tokens - starts[rows]),
        visible=(keys <= last_seen[:, :, None]) & is_key[:, None],
    )


def pad(batch: ForwardBatch) -> ForwardBatch:
    """Give the batch room for at least ROWS tokens, queries of a row and wanted logits; see `ROWS`."""

    def longer(array: jax.Array, fill: int) -> jax.Array:
        widths = [(0, max(0, ROWS - array.shape[0]))] + [(0, 0)] * (array.ndim - 1)
        return jnp.pad(array, widths, constant_values=fill)

    return replace(
        batch,
        input_ids=longer(batch.input_ids, 0),
        positions=longer(batch.positions, 0),
        slot_mapping=longer(batch.slot_mapping, -1),
        logits_indices=None if batch.logits_indices is None else longer(batch.logits_indices, 0),
        features=None if batch.features is None else longer(batch.features, 0),
        max_query_len=max(ROWS, batch.max_query_len),
    )


def count_logits(batch: ForwardBatch) -> int:
    """How many places of a batch logits are wanted of."""
    return (batch.input_ids if batch.logits_indices is None else batch.logits_indices).shape[0]


def multiply(x: jax.Array, weight: jax.Array) -> jax.Array:
    """Multiply x [T, inputs] by weight.T, for a weight [outputs, inputs]."""
    return jax.lax.dot_general(x, weight, (((1,), (1,)), ((), ())), precision=jax.lax.Precision.HIGHEST)


@dataclass(frozen=True, eq=False)
class JaxLlamaLayers:
    """Layers of a Llama between an embedding and an output matrix, in JAX; see `funcspec.models.llama.LlamaLayers`.

    Attributes:
        config: its shape; static in a pytree.
        weights: arrays by name, as `LlamaConfig.weight_shapes` lists them, all of one dtype and device. A "head"
            [output rows, hidden_size] replaces the embedding as the output matrix.
        output_token_ids: [output rows] int32 token id that each row of "head" stands for, for a reduced output vocabulary;
            None where rows are token ids. `vocab_size` is the number of rows either way.
        framework: "jax".
    """

    config: LlamaConfig
    weights: Mapping[str, jax.Array]
    output_token_ids: jax.Array | None = None
    _rotary: tuple[jax.Array, jax.Array] = field(init=False, repr=False)
    framework: ClassVar[str] = "jax"

    def __post_init__(self) -> None:
        object.__setattr__(self, "weights", dict(self.weights))
        _check_weights(self.config, self.weights, self.output_token_ids)
        (device,) = self.weights["embed"].devices()
        tables = (jax.device_put(table.numpy(), device) for table in rotary_tables(self.config, torch.device("cpu")))
        object.__setattr__(self, "_rotary", tuple(tables))

    def tree_flatten_with_keys(self) -> tuple[tuple[tuple[Any, Any], ...], LlamaConfig]:
        """Children of the pytree with their names, and the static configuration."""
        children, config = self.tree_flatten()
        return tuple(zip(map(GetAttrKey, _CHILDREN), children, strict=True)), config

    def tree_flatten(self) -> tuple[tuple[Any, ...], LlamaConfig]:
        """Children of the pytree, and the static configuration."""
        return (self.weights, self.output_token_ids, self._rotary), self.config

    @classmethod
    def tree_unflatten(cls, config: LlamaConfig, children: tuple[Any, ...]) -> Self:
        """Put a model together of any leaves, unchecked: JAX passes tracers and placeholders."""
        model = object.__new__(cls)
        for name, value in zip(("config", *_CHILDREN), (config, *children), strict=True):
            object.__setattr__(model, name, value)
        return model

    @classmethod
    def _from_torch(cls, layers: LlamaLayers) -> Self:
        """Make the same of weights of torch: shared where JAX can use them as they lie, else copied."""
        ids = layers.output_token_ids
        weights = {name: _from_torch(name, weight) for name, weight in layers.weights.items()}
        return cls(layers.config, weights, None if ids is None else _from_torch("output_token_ids", ids.int()))

    @property
    def _head(self) -> jax.Array:
        return self.weights.get("head", self.weights["embed"])

    @property
    def vocab_size(self) -> int:
        """Width of the logits: rows of the output matrix."""
        return self._head.shape[0]

    @property
    def input_vocab_size(self) -> int:
        """Number of token ids that can be fed."""
        return self.config.vocab_size

    @property
    def hidden_size(self) -> int:
        """Width of a hidden state."""
        return self.config.hidden_size

    @property
    def num_layers(self) -> int:
        """Number of layers, which is that of the last hidden state."""
        return self.config.num_layers

    @property
    def max_len(self) -> int:
        """Number of positions."""
        return self.config.max_len

    @property
    def dtype(self) -> np.dtype:
        """Dtype of weights, cache and logits."""
        return self.weights["embed"].dtype

    @property
    def kv_spec(self) -> KVSpec:
        """Entries "key" and "value" of shape (num_kv_heads, head_dim); dtypes are torch's, as in every spec."""
        shape, dtype = (self.config.num_kv_heads, self.config.head_dim), getattr(torch, self.dtype.name)
        return KVSpec(self.config.num_layers, (KVEntry("key", shape, dtype), KVEntry("value", shape, dtype)))

    def _padded(self, kv: KV, batch: ForwardBatch) -> ForwardBatch:
        """Refuse a cache or a batch that does not fit; give the batch room for at least ROWS tokens."""
        _check_cache(self.kv_spec, kv)
        _check_batch(batch)
        return pad(batch)

    def _embedded(self, batch: ForwardBatch) -> jax.Array:
        return jnp.take(self.weights["embed"], batch.input_ids, axis=0, mode="clip")

    def _chosen(self, x: jax.Array, batch: ForwardBatch) -> jax.Array:
        """Rows of x whose logits are wanted."""
        return x if batch.logits_indices is None else jnp.take(x, batch.logits_indices, axis=0, mode="clip")

    def _run_layers(
        self, x: jax.Array, kv: KV, batch: ForwardBatch, first_input: jax.Array | None = None
    ) -> tuple[dict[str, jax.Array], list[jax.Array]]:
        """Run all layers over x: the new kv, and x as it was and as each layer leaves it.

        The attention of the first layer reads `first_input`, if it is given, instead of x normalised.
        """
        config, weights = self.config, self.weights
        layout = lay_out(batch, *kv["key"].shape[1:3])
        cos, sin = (jnp.take(table, batch.positions, axis=0, mode="clip") for table in self._rotary)
        kv, kept = dict(kv), [x]
        for layer in range(config.num_layers):
            read = self._normalise(x, f"{layer}.attention_norm") if first_input is None or layer > 0 else first_input
            kv, mixed = self._attend(layer, read, kv, layout, (cos, sin))
            x = x + mixed
            gate, up = jnp.split(multiply(self._normalise(x, f"{layer}.mlp_norm"), weights[f"{layer}.gate_up"]), 2, axis=1)
            gate = jax.nn.silu(gate.astype(jnp.float32)).astype(x.dtype)
            x = x + multiply(gate * up, weights[f"{layer}.down"])
            kept.append(x)
        return kv, kept

    def _normalise(self, x: jax.Array, name: str) -> jax.Array:
        """Normalise with the weight of this name; where the configuration has none, x stays as it is."""
        if name not in self.weights:
            return x
        wide = x.astype(jnp.float32)
        scale = jax.lax.rsqrt(jnp.mean(jnp.square(wide), axis=-1, keepdims=True) + self.config.norm_eps)
        return (wide * scale * self.weights[name]).astype(x.dtype)

    def _attend(
        self, layer: int, read: jax.Array, kv: dict[str, jax.Array], layout: Layout, rotary: tuple[jax.Array, jax.Array]
    ) -> tuple[dict[str, jax.Array], jax.Array]:
        """Self-attention of one layer over what it reads: the new kv, and what it adds to x."""
        config = self.config
        heads, kv_heads = config.num_heads, config.num_kv_heads
        qkv = multiply(read, self.weights[f"{layer}.qkv"])
        qkv = qkv.reshape(-1, heads + 2 * kv_heads, config.head_dim)
        turned = qkv[:, : heads + kv_heads]
        turned = (turned * rotary[0] + jnp.roll(turned, config.head_dim // 2, 2) * rotary[1]).astype(read.dtype)
        kv["key"] = write_cache(kv["key"], layer, layout.slots, turned[:, heads:])
        kv["value"] = write_cache(kv["value"], layer, layout.slots, qkv[:, heads + kv_heads :])
        mixed = mix_values(turned[:, :heads], kv["key"][layer], kv["value"][layer], layout)
        return kv, multiply(mixed.astype(read.dtype), self.weights[f"{layer}.attention_output"])


@jax.tree_util.register_pytree_with_keys_class
@dataclass(frozen=True, eq=False)
class JaxLlama(JaxLlamaLayers):
    """A Llama as a `Model` of JAX. It is a pytree, so it can be an argument of `jax.jit`, and its weights are no constants there.

    Attributes:
        config, weights, output_token_ids, framework: as for `JaxLlamaLayers`.

    Example:
        >>> import jax
        >>> from funcspec.models.llama import LlamaConfig, random_llama
        >>> config = LlamaConfig(
        ...     vocab_size=5,
        ...     num_layers=1,
        ...     hidden_size=8,
        ...     intermediate_size=8,
        ...     num_heads=2,
        ...     num_kv_heads=1,
        ...     head_dim=4,
        ...     max_len=16,
        ... )
        >>> model = JaxLlama.from_torch(random_llama(config))
        >>> step = jax.jit(lambda model, kv, batch: model.forward(kv, batch), donate_argnums=1)
    """

    @classmethod
    def from_torch(cls, llama: Llama) -> "JaxLlama":
        """Make the same model of the weights of a torch one.

        The weights stay on their device and are shared where JAX can use them as they lie, else copied. Shared memory lives as
        long as either model, and must not be written to: JAX takes it for constant.

        Args:
            llama: a model of any dtype.

        Raises:
            ModelError: JAX has no such device.

        Example:
            >>> from funcspec.models import smollm2
            >>> model = JaxLlama.from_torch(smollm2.load_target())  # doctest: +SKIP
        """
        return cls._from_torch(llama)

    def forward(self, kv: KV, batch: ForwardBatch) -> tuple[dict[str, jax.Array], jax.Array, tuple[jax.Array, ...]]:
        """Run a batch; see `Model.forward`.

        Nothing is written in place, unless the caller jits and donates `kv`. JAX takes a donation only of memory that it has
        allocated itself: buffers that came by DLPack are copied.

        Hidden states are numbered as in `Llama.forward`: 0 is the embedding, i what layer i - 1 leaves, and num_layers is
        normalised.

        Args:
            kv: "key" and "value", [num_layers, num_blocks, block_size, num_kv_heads, head_dim].
            batch: what to run. Ids, positions, slots and blocks out of range are not found out.

        Returns:
            the new kv, logits [M, vocab_size] in the weights' dtype, and the wanted hidden states [T, hidden_size].

        Raises:
            ModelError: `hidden_layers` names a layer that is not there, or `kv` does not fit `kv_spec`.
            ArgumentError: arrays of the batch do not fit each other.
        """
        check_hidden_layers(self.config, batch.hidden_layers)
        padded = self._padded(kv, batch)
        new, kept = self._run_layers(self._embedded(padded), kv, padded)
        kept[-1] = self._normalise(kept[-1], "norm")
        logits = multiply(self._chosen(kept[-1], padded), self._head)[: count_logits(batch)]
        return new, logits, tuple(kept[layer][: batch.input_ids.shape[0]] for layer in batch.hidden_layers)


_CHILDREN = ("weights", "output_token_ids", "_rotary")


def write_cache(cache: jax.Array, layer: int, slots: jax.Array, new: jax.Array) -> jax.Array:
    """Put keys or values [T, kv_heads, head_dim] into one layer of a cache."""
    by_slot = cache.reshape(cache.shape[0], -1, *cache.shape[3:])
    return by_slot.at[layer, slots].set(new.astype(cache.dtype), mode="drop", unique_indices=True).reshape(cache.shape)


def mix_values(query: jax.Array, key_cache: jax.Array, value_cache: jax.Array, layout: Layout) -> jax.Array:
    """Attention in float32 of queries [T, heads, head_dim] over one layer of a cache: [T, heads * head_dim]."""
    heads, head_dim = query.shape[1:]
    kv_heads = key_cache.shape[2]
    rows, width, num_keys = layout.visible.shape
    padded = jnp.take(query, layout.queries, axis=0, mode="clip").astype(jnp.float32)
    padded = padded.reshape(rows, width, kv_heads, heads // kv_heads, head_dim)
    keys, values = (
        jnp.take(cache, layout.tables, axis=0, mode="clip").reshape(rows, num_keys, kv_heads, head_dim).astype(jnp.float32)
        for cache in (key_cache, value_cache)
    )
    # What no query sees may be anything, NaN included, and 0 * NaN would be NaN.
    values = jnp.where(layout.visible.any(1)[:, :, None, None], values, 0)
    visible = layout.visible[:, None, :, None]
    score = jnp.einsum("rwhgd,rkhd->rhwgk", padded, keys, precision=jax.lax.Precision.HIGHEST) * head_dim**-0.5
    score = jnp.where(visible, score, -jnp.inf)
    weight = jnp.exp(score - jnp.max(score, axis=-1, keepdims=True, initial=FAR))
    total = jnp.sum(weight, axis=-1, keepdims=True)
    weight = weight / jnp.where(total == 0, 1, total)
    mixed = jnp.einsum("rhwgk,rkhd->rwhgd", weight, values, precision=jax.lax.Precision.HIGHEST)
    return mixed.reshape(rows, width, heads * head_dim).at[layout.places].get(mode="fill", fill_value=0)


def _from_torch(name: str, tensor: torch.Tensor) -> jax.Array:
    try:
        return jnp.from_dlpack(tensor.detach().contiguous())
    except (BufferError, RuntimeError, ValueError) as error:
        refuse("llama", f"{name!r} on a device that JAX has", f"{tensor.device} ({error})", "move the model to another device", ModelError)


def _check_weights(config: LlamaConfig, weights: Mapping[str, jax.Array], output_token_ids: jax.Array | None) -> None:
    for name, weight in weights.items():
        if not isinstance(weight, jax.Array):
            refuse("weights", f"a jax.Array for {name!r}", type(weight).__name__, "use JaxLlama.from_torch, or jnp.asarray", ModelError)
    check_weights(config, weights, output_token_ids, lambda weight: weight.devices())


def _check_cache(spec: KVSpec, kv: KV) -> None:
    for entry in spec.entries:
        found = tuple(kv[entry.name].shape) if entry.name in kv else "nothing"
        if len(found) != 3 + len(entry.shape) or (found[0], *found[3:]) != (spec.num_layers, *entry.shape):
            wanted = f"[{spec.num_layers}, num_blocks, block_size, {', '.join(map(str, entry.shape))}] for {entry.name!r}"
            refuse("kv", wanted, found, "allocate it after this model's kv_spec", ModelError)


def _check_batch(batch: ForwardBatch) -> None:
    tokens, rows = batch.input_ids.shape[0], batch.seq_lens.shape[0]
    if rows == 0:
        refuse("seq_lens", "one row or more", "none", "leave the pass out")
    shapes = {
        "positions": (tokens,),
        "slot_mapping": (tokens,),
        "query_start_loc": (rows + 1,),
        "block_tables": (rows, batch.block_tables.shape[-1]),
    }
    for name, shape in shapes.items():
        found = tuple(getattr(batch, name).shape)
        if found != shape:
            refuse(name, f"shape {shape} for {tokens} tokens of {rows} rows", found, "pass arrays of one batch")
