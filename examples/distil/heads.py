"""Heads in training: drafts over the target's own hidden states that foresee from every place of a text at once."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch.nn import functional as F

from examples.distil.layers import LAYER, Parameters, Rotary, feed_forward, normalise, rotary_at, split_heads
from examples.distil.students import Guesses, check_layers
from funcspec.errors import check_int
from funcspec.models.heads import EagleConfig, Style
from funcspec.models.llama import Llama, rotary_tables


@dataclass
class Head:
    """One layer over the newest token and hidden states of the target, trained through several of its own steps.

    Index i takes the features of token i and the embedding of token i + 1, and foresees token i + 2. Step 1 uses the target's features;
    step s at index i uses what step s - 1 said at index i - 1, and attends to entries of step 1 up to i - s + 1 and to the later entries
    of its own chain: just what a decoder does whose first drafts are accepted.

    Attributes:
        config: its shape, in one of the styles of `EagleConfig`.
        depth: draft steps that are trained.
    """

    config: EagleConfig
    embed: torch.Tensor
    parameters: dict[str, torch.Tensor]
    rotary: Rotary = field(repr=False)
    depth: int = 3
    cuts: int = 0

    @property
    def kind(self) -> str:
        """Its style."""
        return self.config.style

    @property
    def layers(self) -> tuple[int, ...]:
        """Hidden states of the target that it reads."""
        return self.config.target_layers

    @classmethod
    def of(cls, target: Llama, style: Style, layers: tuple[int, ...], depth: int, seed: int = 0) -> "Head":
        """Start from the target's last layer, which at first sees little more than the target's last hidden state.

        Raises:
            ModelError: the style reads another number of hidden states, or the target does not have them.
        """
        check_layers(target, layers, target.num_layers)
        check_int("depth", depth, 1)
        config = EagleConfig(**vars(target.config) | {"num_layers": 1}, target_layers=layers, style=style, embed_norm=True)
        size, last = config.hidden_size, target.num_layers - 1
        weights = {name: weight.float().cpu() for name, weight in target.weights.items() if name.startswith(f"{last}.") or name == "norm"}
        parameters = {f"0.{name}": weights[f"{last}.{name}"].clone() for name in LAYER} | {"norm": weights["norm"].clone()}
        parameters["embed_norm"] = torch.ones(size)
        generator = torch.Generator().manual_seed(seed)
        straight = torch.eye(size) / float(weights["norm"].abs().mean())
        noise = 0.01 * torch.randn(size, size * (len(layers) + 1), generator=generator)
        if style == "eagle3":
            parameters["fc"] = torch.cat([torch.zeros(size, size * (len(layers) - 1)), straight], 1) + noise[:, size:]
            qkv = parameters["0.qkv"]
            parameters["0.qkv"] = torch.cat([0.1 * torch.randn(qkv.shape, generator=generator) / math.sqrt(size), qkv], 1)
            parameters["feature_norm"] = parameters.pop("0.attention_norm")
        elif style == "mtp":
            parameters["fc"] = torch.cat([0.3 * torch.eye(size), torch.eye(size)], 1) + noise
            parameters["feature_norm"] = torch.ones(size)
        else:
            parameters["fc"] = torch.cat([0.3 * torch.eye(size), straight], 1) + noise
        device = target.device
        parameters = {name: value.to(device) for name, value in parameters.items()}
        return cls(config, target.weights["embed"], parameters, rotary_tables(config, device), depth)

    def guesses(
        self, parameters: Parameters, tokens: torch.Tensor, states: Mapping[int, torch.Tensor], cuts: torch.Tensor
    ) -> list[Guesses]:
        """All draft steps; step s begins at index s - 1, where its chain does."""
        config, eps, count = self.config, self.config.norm_eps, tokens.shape[1] - 1
        index = torch.arange(count, device=tokens.device)
        rotary = rotary_at(self.rotary, index)
        embedded = normalise(F.embedding(tokens[:, 1:], self.embed), parameters["embed_norm"], eps)
        feature = torch.cat([states[layer] for layer in self.layers], -1).float()
        if config.style == "eagle3":
            feature = F.linear(feature, parameters["fc"]).float()
        keys: list[torch.Tensor] = []
        values: list[torch.Tensor] = []
        found = []
        for step in range(1, self.depth + 1):
            x, inner = self._read(parameters, embedded, feature)
            query, key, value = split_heads(inner, parameters["0.qkv"], config, rotary)
            keys.append(key)
            values.append(value)
            mixed = _attend_chain(query, keys, values, step)
            x = x + F.linear(mixed.transpose(1, 2).flatten(2), parameters["0.attention_output"])
            x = x + feed_forward(x, parameters, "0", config)
            out = normalise(x, parameters["norm"], eps)
            found.append(Guesses(out[:, step - 1 :], index[step - 1 :] + 2))
            said = (out if config.feedback == "normalised" else x).float()
            feature = torch.cat([torch.zeros_like(said[:, :1]), said[:, :-1]], 1)
        return found

    def _read(self, parameters: Parameters, embedded: torch.Tensor, feature: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """What enters the layer, and what its attention reads."""
        normed = normalise(feature, parameters["feature_norm"], self.config.norm_eps) if self.config.feature_norm else feature
        if self.config.style == "eagle3":
            return feature, torch.cat([embedded, normed], -1)
        x = F.linear(torch.cat([embedded, normed], -1), parameters["fc"])
        return x, normalise(x, parameters["0.attention_norm"], self.config.norm_eps)


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


@dataclass
class Medusa:
    """Residual blocks over the target's last hidden state, one for each draft; see `funcspec.models.medusa_heads`.

    The state of token i made token i + 1. From it head k foresees token i + 2 + k.
    """

    parameters: dict[str, torch.Tensor]
    layers: tuple[int, ...]
    cuts: int = 0
    kind: str = "medusa"

    @classmethod
    def of(cls, target: Llama, depth: int) -> "Medusa":
        """Start with blocks of zeros: every head says what the target itself says of the next token."""
        check_int("depth", depth, 1)
        size = target.hidden_size
        shapes = {"blocks": (depth, 1, size, size), "biases": (depth, 1, size)}
        return cls({name: torch.zeros(shape, device=target.device) for name, shape in shapes.items()}, (target.num_layers,))

    def guesses(
        self, parameters: Parameters, tokens: torch.Tensor, states: Mapping[int, torch.Tensor], cuts: torch.Tensor
    ) -> list[Guesses]:
        """What every head says at every place."""
        state = states[self.layers[0]].float()
        index, found = torch.arange(state.shape[1], device=state.device), []
        for head, (blocks, biases) in enumerate(zip(parameters["blocks"], parameters["biases"], strict=True)):
            x = state
            for block, bias in zip(blocks, biases, strict=True):
                x = x + F.silu(F.linear(x, block, bias))
            found.append(Guesses(x, index + 2 + head))
        return found
