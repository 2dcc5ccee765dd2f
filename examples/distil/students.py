"""Drafts in training: the same arithmetic as the models that load them, over whole texts and with gradients.

Parameters are named as the models name their weights, so that what is trained is saved as it is.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch.nn import functional as F

from funcspec.models.llama import Llama, LlamaConfig, rotary_tables

Parameters = Mapping[str, torch.Tensor]

LAYER = ("attention_norm", "qkv", "attention_output", "mlp_norm", "gate_up", "down")
"""Weights of one layer, as `LlamaConfig.weight_shapes` names them."""


class Student(Protocol):
    """A draft in training.

    Attributes:
        layers: hidden states of the target that it reads.
        lag: how many tokens lie between the last one it has seen and the one it foresees; index i of what it returns foresees token
            i + 1 + lag.
        parameters: what is trained, float32.
    """

    layers: tuple[int, ...]
    lag: int
    parameters: dict[str, torch.Tensor]

    def hidden(self, parameters: Parameters, tokens: torch.Tensor, states: Mapping[int, torch.Tensor]) -> list[torch.Tensor]:
        """Normalised hidden states of each draft step, [B, T - lag, H], that the output matrix is applied to."""
        ...


def normalise(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Divide by the root mean square."""
    return F.rms_norm(x.float(), weight.shape, weight.float(), eps)


def rotate(x: torch.Tensor, rotary: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    """Turn heads [B, T, heads, head_dim] by their positions."""
    cosines, sines = (table[: x.shape[1]] for table in rotary)
    return x * cosines + x.roll(x.shape[-1] // 2, -1) * sines


def feed_forward(x: torch.Tensor, parameters: Parameters, prefix: str, config: LlamaConfig) -> torch.Tensor:
    """What the second half of a layer adds."""
    inner = normalise(x, parameters[f"{prefix}.mlp_norm"], config.norm_eps)
    gate, up = F.linear(inner, parameters[f"{prefix}.gate_up"]).split(config.intermediate_size, -1)
    return F.linear(F.silu(gate) * up, parameters[f"{prefix}.down"])


def split_heads(
    inner: torch.Tensor, qkv: torch.Tensor, config: LlamaConfig, rotary: tuple[torch.Tensor, torch.Tensor]
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Queries, keys and values [B, heads, T, head_dim], keys and values repeated for every query head."""
    heads, kv_heads = config.num_heads, config.num_kv_heads
    parts = F.linear(inner, qkv).unflatten(-1, (heads + 2 * kv_heads, config.head_dim))
    turned = rotate(parts[:, :, : heads + kv_heads], rotary)
    query, key = turned[:, :, :heads], turned[:, :, heads:]
    repeated = [part.repeat_interleave(heads // kv_heads, 2).transpose(1, 2) for part in (key, parts[:, :, heads + kv_heads :])]
    return query.transpose(1, 2), repeated[0], repeated[1]


@dataclass
class Truncated:
    """Some of the target's layers as a language model of its own."""

    config: LlamaConfig
    embed: torch.Tensor
    parameters: dict[str, torch.Tensor]
    rotary: tuple[torch.Tensor, torch.Tensor] = field(repr=False)
    layers: tuple[int, ...] = ()
    lag: int = 0

    @classmethod
    def of(cls, target: Llama, taken: Sequence[int]) -> "Truncated":
        """Start from these layers of the target."""
        config = LlamaConfig(**{**vars(target.config), "num_layers": len(taken)})
        parameters = {"norm": target.weights["norm"].float().clone()}
        for new, old in enumerate(taken):
            parameters |= {f"{new}.{name}": target.weights[f"{old}.{name}"].float().clone() for name in LAYER}
        return cls(config, target.weights["embed"], parameters, _rotary(target))

    def hidden(self, parameters: Parameters, tokens: torch.Tensor, states: Mapping[int, torch.Tensor]) -> list[torch.Tensor]:
        """One draft step."""
        config, x = self.config, F.embedding(tokens, self.embed).float()
        for layer in range(config.num_layers):
            inner = normalise(x, parameters[f"{layer}.attention_norm"], config.norm_eps)
            query, key, value = split_heads(inner, parameters[f"{layer}.qkv"], config, self.rotary)
            mixed = F.scaled_dot_product_attention(query, key, value.to(query.dtype), is_causal=True)
            x = x + F.linear(mixed.transpose(1, 2).flatten(2), parameters[f"{layer}.attention_output"])
            x = x + feed_forward(x, parameters, str(layer), config)
        return [normalise(x, parameters["norm"], config.norm_eps)]


@dataclass
class Head:
    """One layer over the newest token and hidden states of the target, trained through several of its own steps.

    Index i takes the features of token i and the embedding of token i + 1, and foresees token i + 2. Step 1 uses the target's features;
    step s at index i uses what step s - 1 said at index i - 1, and attends to entries of step 1 up to i - s + 1 and to the later entries
    of its own chain: just what a decoder does whose first drafts are accepted.

    Attributes:
        style: "eagle" or "eagle3".
        depth: draft steps that are trained.
    """

    config: LlamaConfig
    embed: torch.Tensor
    parameters: dict[str, torch.Tensor]
    rotary: tuple[torch.Tensor, torch.Tensor] = field(repr=False)
    layers: tuple[int, ...] = ()
    style: str = "eagle"
    depth: int = 3
    lag: int = 1

    @classmethod
    def of(cls, target: Llama, style: str, layers: tuple[int, ...], depth: int, seed: int = 0) -> "Head":
        """Start from the target's last layer, which at first sees little more than the target's last hidden state."""
        config = LlamaConfig(**{**vars(target.config), "num_layers": 1})
        size, last = config.hidden_size, target.config.num_layers - 1
        weights = {name: weight.float().cpu() for name, weight in target.weights.items() if name.startswith(f"{last}.") or name == "norm"}
        parameters = {f"0.{name}": weights[f"{last}.{name}"].clone() for name in LAYER} | {"norm": weights["norm"].clone()}
        parameters["embed_norm"] = torch.ones(size)
        generator = torch.Generator().manual_seed(seed)
        straight = torch.eye(size) / float(weights["norm"].abs().mean())
        noise = 0.01 * torch.randn(size, size * (len(layers) + 1), generator=generator)
        if style == "eagle":
            parameters["fc"] = torch.cat([0.3 * torch.eye(size), straight], 1) + noise
        else:
            parameters["fc"] = torch.cat([torch.zeros(size, size * (len(layers) - 1)), straight], 1) + noise[:, size:]
            qkv = parameters["0.qkv"]
            parameters["0.qkv"] = torch.cat([0.1 * torch.randn(qkv.shape, generator=generator) / math.sqrt(size), qkv], 1)
            parameters["feature_norm"] = parameters.pop("0.attention_norm")
        device = target.device
        return cls(
            config,
            target.weights["embed"],
            {name: value.to(device) for name, value in parameters.items()},
            _rotary(target),
            layers,
            style,
            depth,
        )

    def hidden(self, parameters: Parameters, tokens: torch.Tensor, states: Mapping[int, torch.Tensor]) -> list[torch.Tensor]:
        """All draft steps; row i of step s means something from i = s - 1 on."""
        config, eps = self.config, self.config.norm_eps
        count = tokens.shape[1] - 1
        embedded = normalise(F.embedding(tokens[:, 1:], self.embed), parameters["embed_norm"], eps)
        feature = torch.cat([states[layer][:, :count] for layer in self.layers], -1)
        if self.style == "eagle3":
            feature = F.linear(feature.to(embedded.dtype), parameters["fc"])
        keys: list[torch.Tensor] = []
        values: list[torch.Tensor] = []
        outs = []
        for step in range(1, self.depth + 1):
            if self.style == "eagle":
                x = F.linear(torch.cat([embedded, feature.float()], -1), parameters["fc"])
                inner = normalise(x, parameters["0.attention_norm"], eps)
            else:
                x = feature.float()
                inner = torch.cat([embedded, normalise(x, parameters["feature_norm"], eps)], -1)
            query, key, value = split_heads(inner, parameters["0.qkv"], config, self.rotary)
            keys.append(key)
            values.append(value)
            mixed = _attend_chain(query, keys, values, step)
            x = x + F.linear(mixed.transpose(1, 2).flatten(2), parameters["0.attention_output"])
            x = x + feed_forward(x, parameters, "0", config)
            out = normalise(x, parameters["norm"], eps)
            outs.append(out)
            said = out if self.style == "eagle" else x
            feature = torch.cat([torch.zeros_like(said[:, :1]), said[:, :-1]], 1)
        return outs


def _attend_chain(query: torch.Tensor, keys: list[torch.Tensor], values: list[torch.Tensor], step: int) -> torch.Tensor:
    """Attention of draft step `step` at every index: to entries of step 1 up to index - step + 1, then to the chain's own."""
    count, width = query.shape[2], query.shape[3]
    index = torch.arange(count, device=query.device)
    scores = query @ keys[0].transpose(-1, -2)
    columns = [scores.masked_fill(index[None, :] > index[:, None] - (step - 1), float("-inf"))]
    chain = []
    for earlier in range(2, step + 1):  # the chain's entry of that step lies at index - step + earlier
        key, value = (torch.roll(part[earlier - 1], step - earlier, 2) for part in (keys, values))
        column = (query * key).sum(-1, keepdim=True)
        columns.append(column.masked_fill((index < step - earlier)[:, None], float("-inf")))
        chain.append(value)
    if step > 1:  # indices before the chain begins have nothing to attend to: let them see themselves
        own = columns[-1]
        columns[-1] = torch.where((index < step - 1)[:, None], torch.zeros_like(own), own)
    weights = (torch.cat(columns, -1).float() / math.sqrt(width)).softmax(-1).to(values[0].dtype)
    mixed = weights[..., :count] @ values[0]
    for place, value in enumerate(chain):
        mixed = mixed + weights[..., count + place : count + place + 1] * value
    return mixed


def _rotary(target: Llama) -> tuple[torch.Tensor, torch.Tensor]:
    return rotary_tables(target.config, target.device)
