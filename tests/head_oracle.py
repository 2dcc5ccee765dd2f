"""What a head should say, written out: whole sequences in float64, without a cache, each draft on a sequence one longer."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from test_llama import CONFIG, dense

from funcspec.models.heads import EagleConfig, EagleHead, random_head
from funcspec.models.llama import Llama, random_llama

SMALL = replace(CONFIG, num_layers=3, max_len=64)
SHAPE: dict[str, Any] = {**vars(SMALL), "num_layers": 1}
CONFIGS = {
    "eagle": EagleConfig(**SHAPE, target_layers=(3,)),
    "normalised embedding": EagleConfig(**SHAPE, target_layers=(3,), embed_norm=True),
    "as published": EagleConfig(**SHAPE, target_layers=(3,), outer_norms=False, fc_bias=True, feedback="raw"),
    "mtp": EagleConfig(**SHAPE, target_layers=(3,), style="mtp"),
    "eagle3": EagleConfig(**SHAPE, target_layers=(1, 2, 3), style="eagle3"),
    "two layers": EagleConfig(**(SHAPE | {"num_layers": 2}), target_layers=(0, 2), style="eagle3"),
}


def chain(head: EagleHead, tokens: Sequence[int], features: torch.Tensor, drafts: Sequence[int] = ()) -> tuple[torch.Tensor, torch.Tensor]:
    """What the head says after `tokens` and each of `drafts`: logits [1 + drafts, outputs], and states that it hands on.

    `features` are those of all tokens but the last.
    """
    vectors = list(features.double())
    fed = list(tokens[1:])
    logits, states = [], []
    for draft in [*drafts, None]:
        answers, handed = said(head, fed, vectors)
        logits.append(answers[-1])
        states.append(handed[-1])
        if draft is not None:
            fed.append(draft)
            vectors.append(handed[-1])
    return torch.stack(logits), torch.stack(states)


def said(head: EagleHead, fed: Sequence[int], vectors: Sequence[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits and states at some places, each with the token ahead and a feature or a state."""
    config = head.config
    weights = {name: weight.double() for name, weight in head.weights.items()}

    def norm(x: torch.Tensor, name: str) -> torch.Tensor:
        return x / (x.pow(2).mean(-1, keepdim=True) + config.norm_eps).sqrt() * weights[name]

    embedded = weights["embed"][torch.tensor(fed)]
    if config.style == "eagle3":
        x = torch.stack([vector if len(vector) == config.hidden_size else weights["fc"] @ vector for vector in vectors])
        read = torch.cat([norm(embedded, "embed_norm"), norm(x, "feature_norm")], 1)
    else:
        states = torch.stack(list(vectors))
        embedded = norm(embedded, "embed_norm") if config.embed_norm else embedded
        states = norm(states, "feature_norm") if config.feature_norm else states
        x = torch.cat([embedded, states], 1) @ weights["fc"].T + (weights["fc_bias"] if config.fc_bias else 0)
        read = norm(x, "0.attention_norm") if config.outer_norms else x
    for layer in range(config.num_layers):
        x = x + attention(config, weights, layer, read if layer == 0 else norm(x, f"{layer}.attention_norm"))
        gate, up = (norm(x, f"{layer}.mlp_norm") @ weights[f"{layer}.gate_up"].T).chunk(2, 1)
        x = x + (gate * gate.sigmoid() * up) @ weights[f"{layer}.down"].T
    last = norm(x, "norm") if config.outer_norms else x
    return last @ weights.get("head", weights["embed"]).T, last if config.feedback == "normalised" else x


def attention(config: EagleConfig, weights: dict[str, torch.Tensor], layer: int, read: torch.Tensor) -> torch.Tensor:
    """Self-attention of one layer, head by head."""
    n, dim, group = len(read), config.head_dim, config.num_heads // config.num_kv_heads
    angles = torch.arange(n)[:, None] * config.rope_theta ** (-torch.arange(0, dim, 2, dtype=torch.float64) / dim)
    turn = torch.polar(torch.ones_like(angles), angles)

    def rotate(x: torch.Tensor) -> torch.Tensor:
        turned = torch.complex(x[:, : dim // 2], x[:, dim // 2 :]) * turn
        return torch.cat([turned.real, turned.imag], 1)

    q, k, v = (read @ weights[f"{layer}.qkv"].T).split([config.num_heads * dim, *2 * [config.num_kv_heads * dim]], 1)
    heads = []
    for number in range(config.num_heads):
        own, shared = slice(number * dim, (number + 1) * dim), slice(number // group * dim, (number // group + 1) * dim)
        scores = rotate(q[:, own]) @ rotate(k[:, shared]).T / dim**0.5
        heads.append(scores.masked_fill(torch.ones(n, n).triu(1).bool(), float("-inf")).softmax(-1) @ v[:, shared])
    return torch.cat(heads, 1) @ weights[f"{layer}.attention_output"].T


def target_says(target: Llama, tokens: Sequence[int]) -> torch.Tensor:
    """The target's logits [n, outputs] over a whole sequence."""
    return dense(target, list(tokens))[0]


def target_features(target: Llama, head: EagleHead, tokens: Sequence[int]) -> torch.Tensor:
    """What the head reads of the target at each token."""
    _, hidden = dense(target, list(tokens))
    return torch.cat([hidden[layer] for layer in head.config.target_layers], 1)


@dataclass(frozen=True)
class Pair:
    """A target and a head that often agree.

    Attributes:
        target, head: the models.
        token_ids: what the head's outputs stand for, or None.
    """

    target: Llama
    head: EagleHead
    token_ids: torch.Tensor | None = None

    def drafted(self, tokens: Sequence[int], drafts: Sequence[int]) -> np.ndarray:
        """Logits over all target ids after committed tokens and drafts, float32; -inf for ids that the head does not know."""
        logits, _ = chain(self.head, tokens, target_features(self.target, self.head, tokens)[:-1], drafts)
        whole = torch.full((self.target.vocab_size,), float("-inf"))
        ids = torch.arange(len(whole)) if self.token_ids is None else self.token_ids.long()
        whole[ids] = logits[-1].float()
        return whole.numpy()

    def drafts(self, tokens: Sequence[int], count: int) -> list[int]:
        """Greedy drafts after committed tokens."""
        made: list[int] = []
        for _ in range(count):
            made.append(int(self.drafted(tokens, made).argmax()))
        return made


def agreeing_pair(name: str, *, reduced: bool = False, seed: int = 0) -> Pair:
    """Both models mostly map the newest token to the next one by a table, and do not always, as their layers are weak but not idle."""
    config = CONFIGS[name]
    size, dim = config.hidden_size, config.head_dim

    def weakened(weights: Mapping[str, torch.Tensor], scale: float) -> dict[str, torch.Tensor]:
        return {key: weight * scale if key.endswith((".attention_output", ".down")) else weight for key, weight in weights.items()}

    target = random_llama(SMALL, seed=seed)
    embed = target.weights["embed"]
    table = embed[torch.randperm(len(embed), generator=torch.Generator().manual_seed(seed))]
    weights = weakened(random_head(config, seed=seed + 1).weights, 0.3) | {"embed": embed, "head": table}
    if config.style == "eagle3":  # attention sees the place itself, and hands on most of the token ahead
        part = torch.cat([torch.eye(2 * dim, size), torch.zeros(2 * dim, size)], 1)
        seen = [part[:dim]] * (config.num_heads // 2) + [part[dim:]] * (config.num_heads // 2)
        weights["0.qkv"] = torch.cat([3 * torch.cat(seen), 3 * part, part]) + 0.2 * weights["0.qkv"]
        handed = torch.zeros(size, config.num_heads * dim)
        handed[:dim, :dim] = handed[dim : 2 * dim, -dim:] = 3 * torch.eye(dim)
        weights["0.attention_output"] = handed + weights["0.attention_output"]
    else:
        weights["fc"] = torch.cat([torch.eye(size), 0.2 * weights["fc"][:, size:]], 1)
    ids = torch.randperm(len(embed), generator=torch.Generator().manual_seed(seed + 2))[:54].int() if reduced else None
    if ids is not None:
        weights["head"] = table[ids.long()]
    return Pair(Llama(SMALL, weakened(target.weights, 0.55) | {"head": table}), EagleHead(config, weights, ids), ids)
