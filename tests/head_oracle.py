"""What a head should say, written out: whole sequences in float64, without a cache, each draft on a sequence one longer."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from test_llama import CONFIG, dense

from funcspec.models.heads import EagleConfig, EagleHead, random_head
from funcspec.models.llama import Llama, LlamaConfig, random_llama
from funcspec.models.query_heads import QueryConfig, QueryHead, random_query_head

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
QUERIES = {
    "query-only": QueryConfig(**SHAPE, target_layers=(3,), style="mtp", cache_layers=(1,)),
    "query-only, two layers": QueryConfig(**(SHAPE | {"num_layers": 2}), target_layers=(3,), embed_norm=True, cache_layers=(2, 0)),
}
"""Heads that read the target's cache."""

Cache = list[tuple[torch.Tensor, torch.Tensor]]
"""By layer, rotated keys and values [n, kv_heads * head_dim]."""


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


def query_chain(head: QueryHead, target: Llama, tokens: Sequence[int], drafts: Sequence[int]) -> torch.Tensor:
    """What a query-only head says after `tokens` and each of `drafts`: logits [1 + drafts, outputs], all from one position."""
    cache, vector, logits = target_cache(target, tokens[:-1]), target_features(target, head, tokens)[-2].double(), []
    for token in (tokens[-1], *drafts):
        answers, handed = said(head, [token], [vector], cache)
        vector = handed[0]
        logits.append(answers[0])
    return torch.stack(logits)


def said(head: EagleHead, fed: Sequence[int], vectors: Sequence[torch.Tensor], cache: Cache = []) -> tuple[torch.Tensor, torch.Tensor]:  # noqa: B006
    """Logits and states at some places, each with the token ahead and a feature or a state; or at the end of a cache."""
    config = head.config
    weights = {name: weight.double() for name, weight in head.weights.items()}

    def norm(x: torch.Tensor, name: str) -> torch.Tensor:
        return _norm(x, weights[name], config.norm_eps)

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
        read = read if layer == 0 else norm(x, f"{layer}.attention_norm")
        if isinstance(config, QueryConfig):
            keys, values = cache[config.cache_layers[layer]]
            query = read @ weights[f"{layer}.query"].T
            mixed = attention(config, rotated(config, query, config.num_heads, len(keys) - 1), keys, values)
        else:
            mixed = attention(config, *queries_keys_values(config, read, weights[f"{layer}.qkv"]))
        x = x + mixed @ weights[f"{layer}.attention_output"].T
        gate, up = (norm(x, f"{layer}.mlp_norm") @ weights[f"{layer}.gate_up"].T).chunk(2, 1)
        x = x + (gate * gate.sigmoid() * up) @ weights[f"{layer}.down"].T
    last = norm(x, "norm") if config.outer_norms else x
    return last @ weights.get("head", weights["embed"]).T, last if config.feedback == "normalised" else x


def _norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    return x / (x.pow(2).mean(-1, keepdim=True) + eps).sqrt() * weight


def rotated(config: LlamaConfig, x: torch.Tensor, heads: int, first: int = 0) -> torch.Tensor:
    """Heads [n, heads * head_dim] turned by positions from `first` on."""
    dim = config.head_dim
    positions = torch.arange(first, first + len(x))[:, None]
    angles = positions * config.rope_theta ** (-torch.arange(0, dim, 2, dtype=torch.float64) / dim)
    turn = torch.polar(torch.ones_like(angles), angles)[:, None]
    parts = x.unflatten(1, (heads, dim))
    turned = torch.complex(parts[:, :, : dim // 2], parts[:, :, dim // 2 :]) * turn
    return torch.cat([turned.real, turned.imag], 2).flatten(1)


def queries_keys_values(config: LlamaConfig, read: torch.Tensor, qkv: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Of all places of a sequence, queries and keys rotated."""
    dim, heads, shared = config.head_dim, config.num_heads, config.num_kv_heads
    q, k, v = (read @ qkv.T).split([heads * dim, shared * dim, shared * dim], 1)
    return rotated(config, q, heads), rotated(config, k, shared), v


def attention(config: LlamaConfig, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """Causal attention of the last places, head by head."""
    dim, group, count, n = config.head_dim, config.num_heads // config.num_kv_heads, len(query), len(keys)
    hidden = torch.ones(count, n).triu(n - count + 1).bool()
    heads = []
    for number in range(config.num_heads):
        own, shared = slice(number * dim, (number + 1) * dim), slice(number // group * dim, (number // group + 1) * dim)
        scores = query[:, own] @ keys[:, shared].T / dim**0.5
        heads.append(scores.masked_fill(hidden, float("-inf")).softmax(-1) @ values[:, shared])
    return torch.cat(heads, 1)


def target_cache(target: Llama, tokens: Sequence[int]) -> Cache:
    """Keys and values of all layers of the target."""
    _, hidden = dense(target, list(tokens))
    config, weights, found = target.config, target.weights, []
    for layer in range(config.num_layers):
        read = _norm(hidden[layer], weights[f"{layer}.attention_norm"].double(), config.norm_eps)
        found.append(queries_keys_values(config, read, weights[f"{layer}.qkv"].double())[1:])
    return found


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
        if isinstance(self.head, QueryHead):
            logits = query_chain(self.head, self.target, tokens, drafts)
        else:
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
    config = (CONFIGS | QUERIES)[name]
    size, dim = config.hidden_size, config.head_dim

    def weakened(weights: Mapping[str, torch.Tensor], scale: float) -> dict[str, torch.Tensor]:
        return {key: weight * scale if key.endswith((".attention_output", ".down")) else weight for key, weight in weights.items()}

    target = random_llama(SMALL, seed=seed)
    embed = target.weights["embed"]
    table = embed[torch.randperm(len(embed), generator=torch.Generator().manual_seed(seed))]
    head = random_query_head(config, seed + 1) if isinstance(config, QueryConfig) else random_head(config, seed=seed + 1)
    weights = weakened(head.weights, 0.3) | {"embed": embed, "head": table}
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
    return Pair(Llama(SMALL, weakened(target.weights, 0.55) | {"head": table}), type(head)(config, weights, ids), ids)
