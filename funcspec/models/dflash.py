"""The DFlash model: Llama layers over a block of mask tokens, with the target's hidden states as keys and values before it.

`funcspec.drafters.dflash` makes a drafter of it.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
from torch.nn import functional as F

from funcspec.errors import ArgumentTypeError, ModelError, refuse
from funcspec.kernels.kv_cache import write_kv_
from funcspec.models.attention import Rotary, attend, rotate
from funcspec.models.base import KV, Array, FeatureSpec, ForwardBatch
from funcspec.models.llama import LlamaConfig, LlamaLayers, random_weights
from funcspec.models.products import Product, product


@dataclass(frozen=True, kw_only=True)
class DFlashConfig(LlamaConfig):
    """Shape of a DFlash model: that of its layers, which have the target's hidden size, and what it reads of the target.

    Attributes:
        vocab_size, num_layers, hidden_size, intermediate_size, num_heads, num_kv_heads, head_dim, max_len, rope_theta, norm_eps: as for
            `LlamaConfig`.
        target_layers: hidden states of the target that it reads, numbered as in `Llama.forward`: one more than the layer that leaves them.
        head_norms: whether each head's query and key are normalised before they are rotated, as in Qwen3.

    Example:
        >>> shape = {"vocab_size": 5, "num_layers": 1, "hidden_size": 8, "intermediate_size": 8, "num_heads": 2, "num_kv_heads": 1}
        >>> config = DFlashConfig(**shape, head_dim=4, max_len=16, target_layers=(1, 2))
        >>> config.weight_shapes()["fc"]
        (8, 16)
    """

    target_layers: tuple[int, ...]
    head_norms: bool = True

    @property
    def features(self) -> FeatureSpec:
        """What the model reads of the target."""
        return FeatureSpec(self.target_layers, len(self.target_layers) * self.hidden_size, ahead=0)

    def weight_shapes(self) -> dict[str, tuple[int, ...]]:
        """Names and shapes of all weights but the optional "head"; matrices are [output, input]."""
        shapes = super().weight_shapes()
        shapes |= {"fc": (self.hidden_size, self.features.size), "feature_norm": (self.hidden_size,)}
        for layer in range(self.num_layers * self.head_norms):
            shapes |= {f"{layer}.query_norm": (self.head_dim,), f"{layer}.key_norm": (self.head_dim,)}
        return shapes


class Block(NamedTuple):
    """Which places of a window are context, and which are the block behind it. R rows, of P and Q places."""

    context: Array
    """[R * P] indices into the window; the first P places of each row."""

    slots: Array
    """[R * P] cache slots of these; -1 where the place is no context."""

    queries: Array
    """[R * Q] indices into the window; the newest token and the masks of each row."""

    width: int
    """Q; 0 in a pass of context alone."""

    choices: int
    """How many of a row's Q places logits are wanted of: the last ones."""


def block_of(config: DFlashConfig, batch: ForwardBatch, lanes: Array) -> Block:
    """Tell context from the block: the last wanted place of a row is that of its last mask, and before the newest token is context.

    Args:
        config: shape of the model.
        batch: of either framework.
        lanes: [T] int32, 0, 1, ...: as many numbers as the batch has places.

    Raises:
        ModelError: features are missing or do not fit, or the window is not one of `funcspec.drafters.dflash`.
    """
    rows, places, size = batch.seq_lens.shape[0], batch.input_ids.shape[0], config.features.size
    held = 0 if batch.features is None else batch.features.shape[0]
    wanted = places if batch.logits_indices is None else batch.logits_indices.shape[0]
    fits = batch.features is not None and batch.features.shape[1] == size and places % rows == held % rows == wanted % rows == 0
    width, choices = (places - held) // rows, wanted // rows
    if not fits or choices > width or (wanted == 0) != (width == 0):
        expected = f"a window of features [R * P, {size}], tokens [R * (P + Q)] and up to Q wanted places a row"
        found = f"{None if batch.features is None else tuple(batch.features.shape)}, [{places}] and {wanted} in {rows} rows"
        refuse("batch", expected, found, "draft with funcspec.drafters.dflash", ModelError)
    if width == 0:
        return Block(lanes, batch.slot_mapping, lanes[:0], 0, 0)
    assert batch.logits_indices is not None
    newest = batch.logits_indices[choices - 1 :: choices, None] - (width - 1)
    context = batch.query_start_loc[:-1, None] + lanes[: held // rows]
    slots = (batch.slot_mapping[context] + 1) * (context < newest) - 1
    return Block(context.reshape(-1), slots.reshape(-1), (newest + lanes[:width]).reshape(-1), width, choices)


def check_dflash(config: object, weights: Mapping[str, Any]) -> None:
    """Refuse another configuration, and weights of either framework that the model has no use for.

    Raises:
        ArgumentTypeError: no `DFlashConfig`.
        ModelError: names the weights.
    """
    if not isinstance(config, DFlashConfig):
        refuse("config", "a DFlashConfig", type(config).__name__, "say how the model reads its target", ArgumentTypeError)
    unused = sorted(set(weights) - set(config.weight_shapes()) - {"head"})
    if unused:
        refuse("weights", "only those of config.weight_shapes() and 'head'", f"also {unused}", "check the configuration", ModelError)


@dataclass(frozen=True, eq=False)
class DFlash(LlamaLayers):
    """A DFlash model as a `Model` that reads hidden states of a target; a drafter is made of it with `funcspec.drafters.dflash`.

    The target's hidden states of a position, side by side, go through "fc" and "feature_norm" and are that position's context: in each
    layer the rows of "qkv" for keys and values make its key and value, which attend to nothing. A block of queries, the newest token and
    the masks behind it, runs through the layers; each query attends to all context and to the whole block, in both directions. Keys of
    the block lie behind the context in the same cache, where the next round's context writes over them.

    Attributes:
        config: its shape, and what it reads.
        weights: tensors by name, as `DFlashConfig.weight_shapes` lists them, all of one dtype and device. "embed" may be the target's.
            A "head" [output rows, hidden_size], perhaps the target's too, replaces the embedding as the output matrix.
        output_token_ids: as for `Llama`.

    Example:
        >>> import funcspec as fs
        >>> shape = {"vocab_size": 5, "num_layers": 1, "hidden_size": 8, "intermediate_size": 8, "num_heads": 2, "num_kv_heads": 1}
        >>> model = random_dflash(DFlashConfig(**shape, head_dim=4, max_len=16, target_layers=(1, 2)))
        >>> drafter = fs.drafters.dflash(model, mask_id=4)

    Reference: Chen et al. 2026, "DFlash", arXiv 2602.06036.
    """

    config: DFlashConfig
    _context_products: tuple[Product, ...] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        check_dflash(self.config, self.weights)
        super().__post_init__()
        first = self.config.num_heads * self.config.head_dim
        parts = tuple(product(self.weights[f"{layer}.qkv"][first:]) for layer in range(self.config.num_layers))
        object.__setattr__(self, "_context_products", parts)

    @property
    def features(self) -> FeatureSpec:
        """What it reads of the target."""
        return self.config.features

    @torch.no_grad()
    def forward(self, kv: KV, batch: ForwardBatch) -> tuple[KV, torch.Tensor, tuple[torch.Tensor, ...]]:
        """Run a batch; see `Model.forward`.

        Args:
            kv: "key" and "value", [num_layers, num_blocks, block_size, num_kv_heads, head_dim], written in place.
            batch: what to run: windows of P + Q places a row, with features of the first P. The last of the block's Q places is the last
                wanted one. Without wanted places all of a window is context.

        Returns:
            kv, logits [M, vocab_size] in the weights' dtype, and nothing else.

        Raises:
            ModelError: features are missing or do not fit, or the window is another.
        """
        lanes = torch.arange(batch.input_ids.shape[0], dtype=torch.int32, device=batch.input_ids.device)
        block = block_of(self.config, batch, lanes)
        assert batch.features is not None
        self._write_context(batch.features, batch.positions[block.context], block.slots, kv)
        if block.width == 0:
            return kv, self._head.new_empty(0, self.vocab_size), ()
        places, starts = block.queries, batch.query_start_loc
        of_block = replace(
            batch,
            input_ids=batch.input_ids[places],
            positions=batch.positions[places],
            slot_mapping=batch.slot_mapping[places],
            query_start_loc=torch.arange(0, starts.shape[0] * block.width, block.width, dtype=starts.dtype, device=starts.device),
            max_query_len=block.width,
        )
        x, _ = self._run_layers(self._padded(F.embedding(of_block.input_ids, self.weights["embed"])), kv, of_block)
        rows = batch.seq_lens.shape[0]
        chosen = x[: rows * block.width].unflatten(0, (rows, block.width))[:, block.width - block.choices :].flatten(0, 1)
        return kv, self._products["head"](self._normalise(chosen, "norm")), ()

    def _write_context(self, features: torch.Tensor, positions: torch.Tensor, slots: torch.Tensor, kv: KV) -> None:
        """Turn features [T, F] into keys and values of all layers."""
        config = self.config
        context = self._normalise(self._products["fc"](features.to(self.dtype)), "feature_norm")
        rotary = (self._rotary[0].index_select(0, positions), self._rotary[1].index_select(0, positions))
        for layer, to_keys_and_values in enumerate(self._context_products):
            key, value = to_keys_and_values(context).unflatten(1, (2 * config.num_kv_heads, config.head_dim)).chunk(2, 1)
            write_kv_(
                out_key_cache=kv["key"][layer],
                out_value_cache=kv["value"][layer],
                key=self._turn(key, f"{layer}.key_norm", rotary),
                value=value,
                slot_mapping=slots,
            )

    def _turn(self, x: torch.Tensor, name: str, rotary: Rotary) -> torch.Tensor:
        """Normalise the heads of x [T, heads, head_dim], if there is a norm of this name, and rotate them."""
        config, weight = self.config, self.weights.get(name)
        if weight is not None:
            x = F.rms_norm(x, (config.head_dim,), weight, config.norm_eps)
        return rotate(x, rotary)

    def _attend(self, layer: int, read: torch.Tensor, kv: KV, batch: ForwardBatch, rotary: Rotary, mixed: torch.Tensor) -> torch.Tensor:
        """Attention of one layer over the block: every query sees all keys of its row, those of later places too."""
        config, count = self.config, batch.input_ids.shape[0]
        heads, kv_heads = config.num_heads, config.num_kv_heads
        qkv = self._products[f"{layer}.qkv"](read)[:count].unflatten(1, (heads + 2 * kv_heads, config.head_dim))
        query, key, value = qkv.split([heads, kv_heads, kv_heads], 1)
        write_kv_(
            out_key_cache=kv["key"][layer],
            out_value_cache=kv["value"][layer],
            key=self._turn(key, f"{layer}.key_norm", rotary),
            value=value,
            slot_mapping=batch.slot_mapping,
        )
        # Attention is causal by the positions it is told: all of a row's queries look on from its last one.
        last = (batch.seq_lens - 1).repeat_interleave(batch.max_query_len, output_size=count)
        attend(self._turn(query, f"{layer}.query_norm", rotary), kv, layer, batch, mixed, last)
        return self._products[f"{layer}.attention_output"](mixed.flatten(1))


def random_dflash(config: DFlashConfig, seed: int = 0, dtype: torch.dtype = torch.float32, device: torch.device | str = "cpu") -> DFlash:
    """A DFlash model with random weights, for tests: the same for the same seed.

    Args:
        config: shape.
        seed: of the weights.
        dtype: of weights, cache and logits.
        device: where to put the weights.
    """
    return DFlash(config, random_weights(config, seed, dtype, device))


__all__ = ["Block", "DFlash", "DFlashConfig", "block_of", "check_dflash", "random_dflash"]
