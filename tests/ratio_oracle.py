"""What the tests of the ratio rule share: a pair of models, rows, and a round by the written definition."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from oracle import checksum_next

import funcspec as fs
from funcspec import exact, noise
from funcspec.drafters import standalone
from funcspec.models import ChecksumDraft, ChecksumModel

RATIO, LENGTH, VOCAB = fs.rules.ratio, 40, 97
TARGET, DRAFTER = ChecksumModel(spread=True), standalone(ChecksumDraft(spread=True))
PROMPTS = [[5, 6, 7], [1], [40, 2, 9, 9]]
SETTINGS: dict[str, Any] = {"seeds": [3, -4, 2**63 - 1], "temperature": [0.7, 1.3, 0.0], "max_tokens": [25, 30, 21]}

Logits = Callable[[Sequence[int]], np.ndarray]


def target_logits(prefix: Sequence[int]) -> np.ndarray:
    away = (np.arange(VOCAB) - checksum_next(prefix)) % VOCAB
    return (1.0 * (away == 0) - ((5 * away) % VOCAB) / 8.0).astype(np.float32)


def draft_logits(prefix: Sequence[int]) -> np.ndarray:
    token = checksum_next(prefix)
    away = (np.arange(VOCAB) - (token + (token % 3 == 0))) % VOCAB
    return (1.0 * (away == 0) - ((5 * away) % VOCAB) / 8.0).astype(np.float32)


def written_round(
    prefix: list[int],
    seed: int,
    temperature: float,
    count: int,
    *,
    point: bool = False,
    p: Logits = target_logits,
    q: Logits = draft_logits,
) -> tuple[list[int], list[int], list[int]]:
    """One round by the definition: (drafts, emitted tokens, origins). Without states, caches or kernels; a token at a time."""
    nonce, drafts, emitted, origins = len(prefix) - 1, [], [], []
    for _ in range(count):
        sequence = [*prefix, *drafts]
        drafts.append(noise.choose(q(sequence), temperature, seed, len(sequence) - 1, nonce, noise.DRAFT)[0])
    for draft in drafts:
        sequence = [*prefix, *emitted]
        position = len(sequence) - 1
        if temperature == 0:
            token = int(p(sequence).argmax())
            emitted.append(token)
            origins.append(0 if token == draft else 1)
            if token != draft:
                return drafts, emitted, origins
            continue
        heat = np.array([[temperature]], np.float32)
        scores, drawn = (exact.sane_scores(row(sequence)[None], heat) for row in (p, q))
        totals, sums = exact.normalisers(scores), exact.normalisers(drawn)
        weights = [tuple(part[:, draft] for part in exact.weights(table)) for table in (scores, drawn)]
        limit = int(exact.thresholds(weights[0], totals, weights[1], sums, np.array([point]))[0])
        if int(noise.noise_words(seed, position, nonce, noise.ACCEPT, 0)[0]) < limit:
            emitted.append(draft)
            origins.append(0)
            continue
        q_row = exact.probabilities(drawn, sums)[0] * (not point)
        rest = exact.residual(exact.probabilities(scores, totals)[0], q_row, draft)
        emitted.append(exact.pick(rest, *noise.split_seed(seed), position))
        origins.append(1)
        return drafts, emitted, origins
    sequence = [*prefix, *emitted]
    emitted.append(noise.choose(p(sequence), temperature, seed, len(sequence) - 1, 0, noise.TARGET)[0])
    origins.append(2)
    return drafts, emitted, origins


def admitted(settings_: fs.SpecConfig, target: Any = TARGET, drafter: Any = DRAFTER, **changes: Any) -> fs.SpecState:
    state = fs.init(settings_, target, drafter)
    return fs.admit(state, target, drafter, PROMPTS, **(SETTINGS | changes))[0]
