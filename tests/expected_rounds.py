"""Rounds by their written definition, in plain Python and NumPy, for any rule and drafter: drafts, accepted drafts, tokens.

The pair of models is the spread checksum pair of a small vocabulary, so that prompt lookup and stop ids often find something.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import numpy as np
from lookup import checksum, found
from ratio_oracle import written_round

import funcspec as fs
from funcspec import noise
from funcspec.drafters import fallback, ngram, standalone
from funcspec.models import ChecksumDraft, ChecksumModel

VOCAB, LENGTH, DRAFT_LENGTH = 11, 48, 30
TARGET = ChecksumModel(vocab_size=VOCAB, spread=True)
MODEL = standalone(ChecksumDraft(vocab_size=VOCAB, spread=True))
SHORT = standalone(ChecksumDraft(vocab_size=VOCAB, max_len=DRAFT_LENGTH, spread=True))
NEXT, DRAFT_NEXT = checksum(VOCAB)


@dataclass(frozen=True)
class Drafting:
    """A drafter, and what it is made of.

    Attributes:
        drafter: the drafter.
        lookup: how prompt lookup is set, None without it.
        limit: longest row that the draft model reads, None without one.
    """

    drafter: fs.drafters.Drafter | None
    lookup: Mapping[str, Any] | None = None
    limit: int | None = None


DRAFTERS = (
    Drafting(None),
    Drafting(MODEL, limit=LENGTH),
    Drafting(SHORT, limit=DRAFT_LENGTH),
    Drafting(ngram(), {}),
    Drafting(ngram(min_ngram=2, window=9, occurrence="last"), {"min_ngram": 2, "window": 9, "latest": True}),
    Drafting(fallback(ngram(min_ngram=2), MODEL), {"min_ngram": 2}, LENGTH),
    Drafting(fallback(ngram(), SHORT), {}, DRAFT_LENGTH),
)


@dataclass(frozen=True)
class Row:
    """A request in a state: its settings, what is committed, and the drafts of the round so far."""

    tokens: tuple[int, ...]
    prompt_len: int
    limit: int
    seed: int
    temperature: float
    stop_ids: tuple[int, ...]
    min_len: int = 0
    finish_reason: int = 0
    planned: int = 0
    drafts: tuple[int, ...] = ()
    is_point: bool = False


def first_drafts(row: Row, wanted: int, drafting: Drafting, acceptance: fs.rules.Rule) -> Row:
    """Draft step 0."""
    if row.finish_reason:
        return row
    room = max(min(wanted, row.limit - len(row.tokens) - 1), 0)
    proposal = found(row.tokens, VOCAB, **drafting.lookup) if drafting.lookup is not None else []
    if proposal or drafting.limit is None:
        proposal = proposal[:room]
        return replace(row, planned=len(proposal), drafts=tuple(proposal), is_point=True)
    room = max(min(room, drafting.limit - len(row.tokens) + 1), 0)
    return more_drafts(replace(row, planned=room), acceptance)


def more_drafts(row: Row, acceptance: fs.rules.Rule) -> Row:
    """One more draft of the model's, if the row has fewer than planned."""
    if len(row.drafts) >= row.planned:
        return row
    sequence, nonce = row.tokens + row.drafts, len(row.tokens) - 1 if acceptance is fs.rules.ratio else 0
    token = _choice(DRAFT_NEXT(sequence), (), row.temperature, row.seed, len(sequence) - 1, nonce, acceptance.draft_stream)
    return replace(row, drafts=(*row.drafts, token))


def judged(row: Row, acceptance: fs.rules.Rule) -> tuple[Row, list[int], int]:
    """The end of a round: the row after it, the tokens it emits, and how many of them are accepted drafts."""
    if row.finish_reason:
        return row, [], 0
    by_ratio = acceptance is fs.rules.ratio and row.temperature > 0
    emitted, accepted = _by_ratio(row) if by_ratio else _by_matching(row)
    stops = [place for place, token in enumerate(emitted) if token in row.stop_ids]
    emitted = emitted[: stops[0] + 1] if stops else emitted
    tokens = (*row.tokens, *emitted)
    reason = 1 if stops else 2 * (len(tokens) >= row.limit)
    after = replace(row, tokens=tokens, finish_reason=reason, planned=0, drafts=(), is_point=False)
    return after, emitted, min(accepted, len(emitted))


def _by_matching(row: Row) -> tuple[list[int], int]:
    emitted: list[int] = []
    for draft in (*row.drafts, None):
        sequence = (*row.tokens, *emitted)
        answer, forbidden = NEXT(sequence), _forbidden(row, sequence)
        emitted.append(_choice(answer, forbidden, row.temperature, row.seed, len(sequence) - 1, 0, noise.TARGET))
        if emitted[-1] != draft:
            break
    return emitted, len(emitted) - 1


def _by_ratio(row: Row) -> tuple[list[int], int]:
    def proposed(sequence: Any) -> np.ndarray:
        if not row.is_point:
            return _logits(DRAFT_NEXT(sequence))
        return np.where(np.arange(VOCAB) == row.drafts[len(sequence) - len(row.tokens)], 0, -np.inf).astype(np.float32)

    drafts, emitted, origins = written_round(
        list(row.tokens),
        row.seed,
        row.temperature,
        len(row.drafts),
        point=row.is_point,
        p=lambda sequence: _logits(NEXT(sequence), _forbidden(row, sequence)),
        q=proposed,
    )
    assert tuple(drafts) == row.drafts
    return emitted, origins.count(0)


def _forbidden(row: Row, sequence: Sequence[int]) -> tuple[int, ...]:
    """Tokens that may not follow a sequence: stop ids of a row that is to be longer."""
    return row.stop_ids if len(sequence) < row.min_len else ()


def _logits(answer: int, forbidden: tuple[int, ...] = ()) -> np.ndarray:
    away = (np.arange(VOCAB) - answer) % VOCAB
    logits = (1.0 * (away == 0) - ((5 * away) % VOCAB) / 8.0).astype(np.float32)
    logits[list(forbidden)] = -np.inf
    return logits


@lru_cache(100_000)
def _choice(answer: int, forbidden: tuple[int, ...], temperature: float, seed: int, position: int, nonce: int, stream: int) -> int:
    return noise.choose(_logits(answer, forbidden), temperature, seed, position, nonce, stream)[0]
