"""Layers of a Llama over whole texts and with gradients: the same arithmetic as the models do over a paged cache.

Parameters are named as the models name their weights, so that what is trained is saved as it is.
"""

from collections.abc import Mapping

import torch
from torch.nn import functional as F

from funcspec.models.llama import Llama, LlamaConfig

Parameters = Mapping[str, torch.Tensor]

Rotary = tuple[torch.Tensor, torch.Tensor]
"""Cosines and sines, [T, 1, head_dim] or [B, T, 1, head_dim]; see `funcspec.models.llama.rotary_tables`."""

LAYER = ("attention_norm", "qkv", "attention_output", "mlp_norm", "gate_up", "down")
"""Weights of one layer, as `LlamaConfig.weight_shapes` names them."""


def taken_over(target: Llama, layers: tuple[int, ...]) -> dict[str, torch.Tensor]:
    """Copies of these layers of the target, numbered anew, and of its last norm; float32."""
    parameters = {"norm": target.weights["norm"].float().clone()}
    for new, old in enumerate(layers):
        parameters |= {f"{new}.{name}": target.weights[f"{old}.{name}"].float().clone() for name in LAYER}
    return parameters


def normalise(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Divide by the root mean square."""
    return F.rms_norm(x.float(), weight.shape, weight.float(), eps)


def rotary_at(tables: Rotary, positions: torch.Tensor) -> Rotary:
    """What turns heads at these positions; those past the last one are taken for it, as nothing there counts."""
    cosines, sines = (table[positions.clamp(max=len(table) - 1)] for table in tables)
    return cosines, sines


def rotate(x: torch.Tensor, rotary: Rotary) -> torch.Tensor:
    """Turn heads [B, T, heads, head_dim] by their positions."""
    return x * rotary[0] + x.roll(x.shape[-1] // 2, -1) * rotary[1]


def feed_forward(x: torch.Tensor, parameters: Parameters, prefix: str, config: LlamaConfig) -> torch.Tensor:
    """What the second half of a layer adds."""
    inner = normalise(x, parameters[f"{prefix}.mlp_norm"], config.norm_eps)
    gate, up = F.linear(inner, parameters[f"{prefix}.gate_up"]).split(config.intermediate_size, -1)
    return F.linear(F.silu(gate) * up, parameters[f"{prefix}.down"])


def split_heads(
    inner: torch.Tensor, qkv: torch.Tensor, config: LlamaConfig, rotary: Rotary
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Queries, keys and values [B, heads, T, head_dim], keys and values repeated for every query head."""
    parts = F.linear(inner, qkv).unflatten(-1, (-1, config.head_dim))
    query = rotate(parts[:, :, : config.num_heads], rotary).transpose(1, 2)
    return query, *_repeated(parts[:, :, config.num_heads :], config, rotary)


def keys_and_values(inner: torch.Tensor, qkv: torch.Tensor, config: LlamaConfig, rotary: Rotary) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values alone, as `split_heads` gives them."""
    own = qkv[config.num_heads * config.head_dim :]
    return _repeated(F.linear(inner, own).unflatten(-1, (-1, config.head_dim)), config, rotary)


def _repeated(parts: torch.Tensor, config: LlamaConfig, rotary: Rotary) -> tuple[torch.Tensor, torch.Tensor]:
    key, value = parts.chunk(2, 2)
    times = config.num_heads // config.num_kv_heads
    return rotate(key, rotary).repeat_interleave(times, 2).transpose(1, 2), value.repeat_interleave(times, 2).transpose(1, 2)


def run_layers(
    x: torch.Tensor,
    parameters: Parameters,
    config: LlamaConfig,
    rotary: Rotary,
    visible: torch.Tensor | None = None,
    context: tuple[torch.Tensor, Rotary] | None = None,
) -> torch.Tensor:
    """Run all layers and the last norm.

    Args:
        x: [B, Q, H] what enters the layers.
        parameters: of the layers, and "norm".
        config: their shape.
        rotary: of the Q places.
        visible: [B, 1, Q, P + Q] bool, which places each one sees; None for all up to itself.
        context: [B, P, H] and its rotary: places before the others whose keys and values every layer makes of the same states.
    """
    for layer in range(config.num_layers):
        inner, qkv = normalise(x, parameters[f"{layer}.attention_norm"], config.norm_eps), parameters[f"{layer}.qkv"]
        query, key, value = split_heads(inner, qkv, config, rotary)
        if context is not None:
            before = keys_and_values(context[0], qkv, config, context[1])
            key, value = (torch.cat(parts, 2) for parts in zip(before, (key, value), strict=True))
        mixed = F.scaled_dot_product_attention(query, key, value.to(query.dtype), visible, is_causal=visible is None)
        x = x + F.linear(mixed.transpose(1, 2).flatten(2), parameters[f"{layer}.attention_output"])
        x = x + feed_forward(x, parameters, str(layer), config)
    return normalise(x, parameters["norm"], config.norm_eps)
