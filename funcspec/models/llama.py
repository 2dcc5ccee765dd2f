"""The Llama family in plain torch over a paged cache: weights are data, `forward` is a function of them."""

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Self

import torch
from torch.nn import functional as F

from funcspec.errors import ModelError, refuse
from funcspec.kernels.kv_cache import write_kv_
from funcspec.models.attention import Rotary, attend, rotate
from funcspec.models.base import KV, ForwardBatch, KVEntry, KVSpec
from funcspec.models.gguf import GGUF, read_gguf
from funcspec.models.products import ROWS, Product, product


@dataclass(frozen=True)
class LlamaConfig:
    """Shape of a Llama.

    Attributes:
        vocab_size: number of input token ids (rows of the embedding).
        num_layers: transformer layers.
        hidden_size: width of the residual stream.
        intermediate_size: width of the feed-forward layers.
        num_heads: query heads.
        num_kv_heads: key and value heads; divides num_heads.
        head_dim: width of a head; even.
        max_len: number of positions.
        rope_theta: base of the rotary frequencies.
        norm_eps: added to the mean square in every norm.
    """

    vocab_size: int
    num_layers: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_len: int
    rope_theta: float = 10000.0
    norm_eps: float = 1e-5

    def __post_init__(self) -> None:
        if self.num_kv_heads < 1 or self.num_heads % self.num_kv_heads:
            refuse("num_kv_heads", f"a divisor of {self.num_heads} heads", self.num_kv_heads, "check the configuration", ModelError)
        if self.head_dim < 2 or self.head_dim % 2:
            refuse("head_dim", "an even number", self.head_dim, "check the configuration", ModelError)

    def weight_shapes(self) -> dict[str, tuple[int, ...]]:
        """Names and shapes of all weights but the optional "head"; matrices are [output, input]."""
        attention, kv = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        shapes: dict[str, tuple[int, ...]] = {"embed": (self.vocab_size, self.hidden_size), "norm": (self.hidden_size,)}
        for layer in range(self.num_layers):
            shapes[f"{layer}.attention_norm"] = (self.hidden_size,)
            shapes[f"{layer}.qkv"] = (attention + 2 * kv, self.hidden_size)
            shapes[f"{layer}.attention_output"] = (self.hidden_size, attention)
            shapes[f"{layer}.mlp_norm"] = (self.hidden_size,)
            shapes[f"{layer}.gate_up"] = (2 * self.intermediate_size, self.hidden_size)
            shapes[f"{layer}.down"] = (self.hidden_size, self.intermediate_size)
        return shapes


def rotary_tables(config: LlamaConfig, device: torch.device) -> Rotary:
    """[max_len, 1, head_dim] cosines, and sines with the first half negated, so that a rotation is x * cos + swap(x) * sin."""
    half = config.head_dim // 2
    frequencies = config.rope_theta ** (-torch.arange(half, dtype=torch.float64) / half)
    angles = torch.arange(config.max_len, dtype=torch.float64)[:, None] * frequencies
    cosines, sines = angles.cos(), angles.sin()
    tables = torch.cat([cosines, cosines], 1), torch.cat([-sines, sines], 1)
    cos, sin = (table.float()[:, None].to(device) for table in tables)
    return cos, sin


def check_weights(config: LlamaConfig, weights: Mapping[str, Any], output_token_ids: Any, place_of: Callable[[Any], object]) -> None:
    """Refuse weights of either framework that are missing, misshapen or not all of one dtype and place.

    Raises:
        ModelError: names the weight and what it should be.
    """
    for name, shape in config.weight_shapes().items():
        if name not in weights:
            refuse("weights", f"an array named {name!r}", "none", "pass every array of config.weight_shapes()", ModelError)
        if tuple(weights[name].shape) != shape:
            refuse("weights", f"{shape} for {name!r}", tuple(weights[name].shape), "check the configuration", ModelError)
    embed = weights["embed"]
    head = weights.get("head", embed)
    if head.ndim != 2 or head.shape[1] != config.hidden_size:
        refuse("weights", f"[rows, {config.hidden_size}] for 'head'", tuple(head.shape), "check the configuration", ModelError)
    for name, weight in weights.items():
        if weight.dtype != embed.dtype or place_of(weight) != place_of(embed):
            expected, found = (f"{array.dtype} on {place_of(array)}" for array in (embed, weight))
            refuse("weights", f"{expected} for {name!r}", found, "convert them all alike", ModelError)
    if output_token_ids is not None and output_token_ids.shape != head.shape[:1]:
        expected = f"{head.shape[0]} ids, one for each row of 'head'"
        refuse("output_token_ids", expected, tuple(output_token_ids.shape), "pass both or neither", ModelError)


def check_hidden_layers(config: LlamaConfig, layers: tuple[int, ...]) -> None:
    """Refuse hidden layers that are not there.

    Raises:
        ModelError: names the layers.
    """
    if any(not 0 <= layer <= config.num_layers for layer in layers):
        refuse("hidden_layers", f"numbers from 0 to {config.num_layers}", layers, "name layers of this model", ModelError)


@dataclass(frozen=True, eq=False)
class LlamaLayers:
    """Layers of a Llama between an embedding and an output matrix: what `Llama` and heads of such layers are made of.

    Attributes:
        config: its shape.
        weights: tensors by name, as `LlamaConfig.weight_shapes` lists them, all of one dtype and device. "qkv" holds the rows of
            queries, keys and values, "gate_up" those of gate and up. A "head" [output rows, hidden_size] replaces the embedding
            as the output matrix.
        output_token_ids: [output rows] int32 token id that each row of "head" stands for, for a reduced output vocabulary;
            None where rows are token ids. `vocab_size` is the number of rows either way.
    """

    config: LlamaConfig
    weights: Mapping[str, torch.Tensor]
    output_token_ids: torch.Tensor | None = None
    _rotary: Rotary = field(init=False, repr=False)
    _products: Mapping[str, Product] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        check_weights(self.config, self.weights, self.output_token_ids, lambda weight: weight.device)
        head, embed = self._head, self.weights["embed"]
        object.__setattr__(self, "_rotary", rotary_tables(self.config, embed.device))
        matrices = {name: weight for name, weight in self.weights.items() if weight.dim() == 2 and name != "embed"}
        object.__setattr__(self, "_products", {name: product(weight) for name, weight in (matrices | {"head": head}).items()})

    @property
    def _head(self) -> torch.Tensor:
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
    def device(self) -> torch.device:
        """Where the weights are."""
        return self.weights["embed"].device

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of weights, cache and logits."""
        return self.weights["embed"].dtype

    @property
    def kv_spec(self) -> KVSpec:
        """Entries "key" and "value" of shape (num_kv_heads, head_dim)."""
        shape = (self.config.num_kv_heads, self.config.head_dim)
        return KVSpec(self.config.num_layers, (KVEntry("key", shape, self.dtype), KVEntry("value", shape, self.dtype)))

    def _padded(self, x: torch.Tensor) -> torch.Tensor:
        """Make room in x [T, width] once for all products of a pass, where they are packed."""
        missing = ROWS - x.shape[0]
        return F.pad(x, (0, 0, 0, missing)) if 0 < missing < ROWS and self._products["head"].packed is not None else x

    def _run_layers(
        self, x: torch.Tensor, kv: KV, batch: ForwardBatch, first_input: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, dict[int, torch.Tensor]]:
        """Run all layers over x, padded or not: what the last one leaves, and hidden states by number, at least the wanted ones.

        The attention of the first layer reads `first_input`, if it is given, instead of x normalised.
        """
        config = self.config
        rotary = (self._rotary[0].index_select(0, batch.positions), self._rotary[1].index_select(0, batch.positions))
        # Attention leaves places that belong to no row as they are: they stay zero in every layer.
        mixed = x.new_zeros((x.shape[0], config.num_heads, config.head_dim))
        kept = {0: x}
        for layer in range(config.num_layers):
            read = self._normalise(x, f"{layer}.attention_norm") if first_input is None or layer > 0 else first_input
            x = x + self._attend(layer, read, kv, batch, rotary, mixed)
            inner = self._products[f"{layer}.gate_up"](self._normalise(x, f"{layer}.mlp_norm"))
            gate, up = inner.split(config.intermediate_size, 1)
            x = x + self._products[f"{layer}.down"](F.silu(gate).mul_(up))
            if layer + 1 in batch.hidden_layers:
                kept[layer + 1] = x
        return x, kept

    def _normalise(self, x: torch.Tensor, name: str) -> torch.Tensor:
        """Normalise with the weight of this name; where the configuration has none, x stays as it is."""
        weight = self.weights.get(name)
        return x if weight is None else F.rms_norm(x, (self.config.hidden_size,), weight, self.config.norm_eps)

    def _attend(self, layer: int, read: torch.Tensor, kv: KV, batch: ForwardBatch, rotary: Rotary, mixed: torch.Tensor) -> torch.Tensor:
        """Self-attention of one layer over what it reads: what it adds to x. `mixed` is scratch."""
        heads, kv_heads = self.config.num_heads, self.config.num_kv_heads
        qkv = self._products[f"{layer}.qkv"](read)[: batch.input_ids.shape[0]].unflatten(1, (heads + 2 * kv_heads, self.config.head_dim))
        turned = rotate(qkv[:, : heads + kv_heads], rotary)
        write_kv_(
            out_key_cache=kv["key"][layer],
            out_value_cache=kv["value"][layer],
            key=turned[:, heads:],
            value=qkv[:, heads + kv_heads :],
            slot_mapping=batch.slot_mapping,
        )
        attend(turned[:, :heads], kv, layer, batch, mixed)
        return self._products[f"{layer}.attention_output"](mixed.flatten(1))

    @classmethod
    def from_safetensors(
        cls,
        path: str | os.PathLike[str],
        config: LlamaConfig,
        embed: torch.Tensor | None = None,
        output_token_ids: torch.Tensor | None = None,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
        head: torch.Tensor | None = None,
    ) -> Self:
        """Load weights named as in `LlamaConfig.weight_shapes`. Needs the `safetensors` package.

        Args:
            path: the file. It may leave out "embed", and have "q", "k", "v", "gate" and "up" apart.
            config: shape of the model.
            embed: embedding to share with another model, of the wanted dtype and device; used as it is, without a copy.
            output_token_ids: [rows] ids to which the output is reduced; their rows of `head` or else of the embedding become the output
                matrix, unless the file has a "head".
            dtype: of weights, cache and logits.
            device: where to put the weights.
            head: output matrix to share with another model; like `embed`.

        Raises:
            ModelError: missing or misshapen weights.
        """
        from safetensors.torch import load_file

        found = load_file(path)
        if embed is not None:
            found["embed"] = embed
        weights: dict[str, torch.Tensor] = {}
        for name in config.weight_shapes():
            prefix, _, part = name.rpartition(".")
            pieces = [name] if name in found else [f"{prefix}.{piece}".lstrip(".") for piece in _PIECES.get(part, (part,))]
            if any(piece not in found for piece in pieces):
                refuse("path", f"tensors {pieces}", f"{len(found)} others", "check the file, or pass embed", ModelError)
            tensor = found[pieces[0]] if len(pieces) == 1 else torch.cat([found[piece] for piece in pieces])
            weights[name] = tensor.to(device=device, dtype=dtype)
        if "head" in found:
            weights["head"] = found["head"].to(device=device, dtype=dtype)
        elif output_token_ids is not None:
            weights["head"] = (weights["embed"] if head is None else head).index_select(0, output_token_ids.to(device))
        elif head is not None:
            weights["head"] = head
        return cls(config, weights, None if output_token_ids is None else output_token_ids.to(device=device, dtype=torch.int32))


@dataclass(frozen=True, eq=False)
class Llama(LlamaLayers):
    """A Llama as a `Model`: matrices in a mapping, keys and values in the cache that `forward` is given.

    Attributes:
        config, weights, output_token_ids: as for `LlamaLayers`.
    """

    @torch.no_grad()
    def forward(self, kv: KV, batch: ForwardBatch) -> tuple[KV, torch.Tensor, tuple[torch.Tensor, ...]]:
        """Run a batch; see `Model.forward`.

        Hidden state 0 is the embedding, hidden state i what layer i - 1 leaves, and hidden state num_layers is normalised: what
        the output matrix is applied to.

        Args:
            kv: "key" and "value", [num_layers, num_blocks, block_size, num_kv_heads, head_dim], written in place.
            batch: what to run.

        Returns:
            kv, logits [M, vocab_size] in the weights' dtype, and the wanted hidden states [T, hidden_size].

        Raises:
            ModelError: `hidden_layers` names a layer that is not there.
        """
        num_tokens, last = batch.input_ids.shape[0], self.config.num_layers
        check_hidden_layers(self.config, batch.hidden_layers)
        x, kept = self._run_layers(self._padded(F.embedding(batch.input_ids, self.weights["embed"])), kv, batch)
        if last in batch.hidden_layers:
            kept[last] = self._normalise(x, "norm")
        chosen = x[:num_tokens] if batch.logits_indices is None else x.index_select(0, batch.logits_indices)
        logits = self._products["head"](self._normalise(chosen, "norm"))
        return kv, logits, tuple(kept[layer][:num_tokens] for layer in batch.hidden_layers)

    @classmethod
    def from_gguf(
        cls, path: str | os.PathLike[str] | GGUF, dtype: torch.dtype = torch.float32, device: torch.device | str = "cpu"
    ) -> "Llama":
        """Load a Llama from a GGUF file.

        Args:
            path: the file, or one opened with `read_gguf`.
            dtype: of weights, cache and logits.
            device: where to put the weights.

        Raises:
            ModelError: another architecture, scaled rotary embeddings, or tensors that this model has no use for.
        """
        gguf = path if isinstance(path, GGUF) else read_gguf(path)
        config = _gguf_config(gguf)
        return cls(config, _gguf_weights(gguf, config, dtype, device))


_PIECES: Mapping[str, tuple[str, ...]] = {
    "embed_norm": ("ln_e",),
    "attention_norm": ("ln1",),
    "mlp_norm": ("ln2",),
    "attention_output": ("o",),
    "qkv": ("q", "k", "v"),
    "gate_up": ("gate", "up"),
}
_GGUF_PIECES: Mapping[str, tuple[str, ...]] = {
    "attention_norm": ("attn_norm",),
    "mlp_norm": ("ffn_norm",),
    "attention_output": ("attn_output",),
    "qkv": ("attn_q", "attn_k", "attn_v"),
    "gate_up": ("ffn_gate", "ffn_up"),
    "down": ("ffn_down",),
}


def _gguf_config(gguf: GGUF) -> LlamaConfig:
    meta = gguf.metadata
    if meta.get("general.architecture") != "llama":
        refuse("path", "the architecture 'llama'", repr(meta.get("general.architecture")), "use another loader", ModelError)
    if meta.get("llama.rope.scaling.type", "none") != "none" or "rope_freqs.weight" in gguf.tensors:
        refuse("path", "plain rotary embeddings", "scaled ones", "use funcspec.models.huggingface", ModelError)
    heads, width = int(meta["llama.attention.head_count"]), int(meta["llama.embedding_length"])
    head_dim = int(meta.get("llama.attention.key_length", width // heads))
    if int(meta.get("llama.rope.dimension_count", head_dim)) != head_dim:
        refuse(
            "path", "rotary embeddings over whole heads", meta["llama.rope.dimension_count"], "use funcspec.models.huggingface", ModelError
        )
    return LlamaConfig(
        vocab_size=gguf.tensors["token_embd.weight"].shape[0],
        num_layers=int(meta["llama.block_count"]),
        hidden_size=width,
        intermediate_size=int(meta["llama.feed_forward_length"]),
        num_heads=heads,
        num_kv_heads=int(meta.get("llama.attention.head_count_kv", heads)),
        head_dim=head_dim,
        max_len=int(meta["llama.context_length"]),
        rope_theta=float(meta.get("llama.rope.freq_base", 10000.0)),
        norm_eps=float(meta["llama.attention.layer_norm_rms_epsilon"]),
    )


def _gguf_weights(gguf: GGUF, config: LlamaConfig, dtype: torch.dtype, device: torch.device | str) -> dict[str, torch.Tensor]:
    """Read tensors one by one into their final place, so that little more than the weights themselves is ever held."""
    sources = {"embed": ["token_embd.weight"], "norm": ["output_norm.weight"]}
    for name in config.weight_shapes():
        layer, _, part = name.rpartition(".")
        if layer:
            sources[name] = [f"blk.{layer}.{piece}.weight" for piece in _GGUF_PIECES[part]]
    shapes = config.weight_shapes()
    if "output.weight" in gguf.tensors:
        sources["head"], shapes["head"] = ["output.weight"], shapes["embed"]
    unused = set(gguf.tensors) - {source for names in sources.values() for source in names}
    if unused:
        refuse("path", "the tensors of a plain Llama", f"also {sorted(unused)[:3]}", "use funcspec.models.huggingface", ModelError)
    heads = {"attn_q": config.num_heads, "attn_k": config.num_kv_heads}
    weights = {}
    for name, pieces in sources.items():
        # A fresh buffer, not a view of NumPy's: torch aligns to 64 bytes, which wide loads like.
        weights[name] = torch.empty(shapes[name], dtype=dtype, device=device)
        start = 0
        for piece in pieces:
            array = torch.from_numpy(gguf.array(piece))
            count = heads.get(piece.split(".")[-2])
            if count:  # GGUF interleaves the two rotary halves of each head
                array = array.unflatten(0, (count, config.head_dim // 2, 2)).transpose(1, 2).flatten(0, 2)
            weights[name][start : start + array.shape[0]].copy_(array)
            start += array.shape[0]
    return weights


def random_weights(config: LlamaConfig, seed: int, dtype: torch.dtype, device: torch.device | str) -> dict[str, torch.Tensor]:
    """Random weights of a configuration's shapes, for tests: the same for the same seed."""
    generator = torch.Generator().manual_seed(seed)
    weights = {}
    for name, shape in config.weight_shapes().items():
        values = torch.randn(shape, generator=generator)
        weight = 1 + 0.1 * values if len(shape) == 1 else values if name == "embed" else values * shape[1] ** -0.5
        weights[name] = weight.to(device=device, dtype=dtype)
    return weights


def random_llama(config: LlamaConfig, seed: int = 0, dtype: torch.dtype = torch.float32, device: torch.device | str = "cpu") -> Llama:
    """A Llama with random weights, for tests: the same for the same seed.

    Args:
        config: shape.
        seed: of the weights.
        dtype: of weights, cache and logits.
        device: where to put the weights.
    """
    return Llama(config, random_weights(config, seed, dtype, device))
