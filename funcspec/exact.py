"""Exact probabilities and the ratio test: the specification, to the bit.

What `funcspec.noise` does for random numbers, this does for probabilities: every number that decides a token is an integer, sums
are sums of integers, and so no order of work can change a token. NumPy, torch, interpreted and compiled Triton give the same
bits. The definition belongs to `NOISE_VERSION`.

1. **Score.** s = logit / temperature in float32, rounded to nearest. NaN and +inf logits are -inf first.
2. **Weight.** exp(s) is mantissa * 2^(exponent - 23). With s limited to [-2^29, 2^29], y = double(s) * log2(e) in float64,
   exponent = floor(y), f = float32(y - exponent), and mantissa = 2^23 * polynomial(f) with `EXP2_COEFFICIENTS`, by Horner's rule
   in separate float32 multiplies and adds: an integer from 2^23 to 2^24. A score of -inf has mantissa 0 and exponent -2^30. The
   relative error is below 1.5e-7.
3. **Normaliser.** Columns are cut into tiles of 1024. A tile has the largest exponent e of its weights and the sum of
   (mantissa * 2^28) >> (e - exponent); a row has the largest e, called E, and the sum of (tile sum) >> (E - e + 12), all int64.
   That is cut to a mantissa of 31 bits: the total is mantissa * 2^exponent, or (0, 0) where every score is -inf. Relative error of
   the sum: below 2^-29.
4. **Ratio test.** p is the target's probability of a draft and q the drafter's, each a weight over a normaliser. The test's
   threshold is 2^32 * min(1, p / q) from integer products and one integer division, with a relative error below 2^-28. The draft is
   kept if the coin, a 32-bit noise word, is below it. Equal p and q give 2^32 exactly: such a draft is always kept. p = 0 gives 0.
   The coin is the word of token 0 of stream ACCEPT with the round's nonce, at the position of the newest token that the logits have
   seen.
5. **Points.** A draft that was just proposed has q = 1: it is kept with probability p. Drafts that their own distribution
   excludes (it has nothing but -inf, say) count as points, too.
6. **Residual.** Probabilities are cut to multiples of 2^-52. The residual weight of a token is max(p - q, 0), or p for points, and 0
   for the rejected draft. Where all are 0 the weights are p, without the rejected draft; where those are 0 too, the rejected draft
   stands if p allows it, else the lowest id is taken and the row is bad.
7. **Recovered token.** With Z the sum of the residual weights and U = 2^32 * w1 + w0, where w0 and w1 are the noise words of tokens 0
   and 256 of stream TARGET at that position, the token is the first, by id, at which the running sum exceeds (U * Z) >> 64.

A token emitted by this rule has its probability under softmax(s) to within 4e-6 in total variation: the integers above contribute
less than 1e-6, the draws of the drafter (`funcspec.noise`) the rest.
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from funcspec.noise import ACCEPT, TARGET, TILE, Floats, Words, philox4x32, token_words

EXP2_COEFFICIENTS = (
    2.161291631637141e-4,
    1.2467845808714628e-3,
    9.675451554358006e-3,
    5.5485282093286514e-2,
    0.2402293086051941,
    0.6931470632553101,
    1.0,
)
"""Powers 6 to 0 of a minimax polynomial of 2^f on [0, 1]."""

LOG2_E = 1.4426950408889634
SCORE_LIMIT = 2.0**29
NO_EXPONENT = -(2**30)
"""Exponent of a weight of 0."""

TILE_SHIFT = 28
ROW_SHIFT = 12
CERTAIN = 2**32
"""Threshold of a draft that is always kept."""

Integers = NDArray[np.int64]

ACCEPTED, REJECTED, UNDECIDED = 1, 0, 2
"""Verdicts on a place: its draft is kept, its draft is not kept, there is none to judge."""


def sane_scores(logits: NDArray[Any], temperature: Floats) -> Floats:
    """Scores of rows of logits, NaN and +inf made -inf.

    Args:
        logits: [C, V] of any float type that converts to float32 exactly.
        temperature: [C, 1] float32, above 0.

    Returns:
        [C, V] float32.
    """
    plain = logits.astype(np.float32, copy=False)
    with np.errstate(over="ignore", invalid="ignore"):
        scores: NDArray[Any] = np.where(plain < np.inf, plain, np.float32(-np.inf)) / temperature
    return scores


def weights(scores: Floats) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
    """exp(score) as mantissa * 2^(exponent - 23).

    Args:
        scores: float32 without NaN.

    Returns:
        exponents and mantissas, int32 of the same shape; mantissas from 2^23 to 2^24, or 0 for -inf.

    Example:
        >>> exponent, mantissa = weights(np.array([0.0, -np.inf, 1.0], np.float32))
        >>> exponent.tolist(), mantissa.tolist()
        ([0, -1073741824, 1], [8388608, 0, 11401300])
    """
    y = np.clip(scores, np.float32(-SCORE_LIMIT), np.float32(SCORE_LIMIT)).astype(np.float64) * LOG2_E
    whole = np.floor(y)
    f = (y - whole).astype(np.float32)
    z = np.full_like(f, np.float32(EXP2_COEFFICIENTS[0]))
    for coefficient in EXP2_COEFFICIENTS[1:]:
        z = z * f + np.float32(coefficient)
    empty = scores == np.float32(-np.inf)
    exponents = np.where(empty, np.int32(NO_EXPONENT), whole.astype(np.int32))
    return exponents, np.where(empty, np.int32(0), (z * np.float32(2.0**23)).astype(np.int32))


def normalisers(scores: Floats) -> NDArray[np.int32]:
    """Sum of the weights of each row, as (exponent, mantissa): mantissa * 2^exponent.

    Args:
        scores: [C, V] float32 without NaN.

    Returns:
        [C, 2] int32; mantissas from 2^30 to 2^31 - 1, or (0, 0) for rows of nothing but -inf.

    Example:
        >>> normalisers(np.zeros((1, 4), np.float32)).tolist()
        [[-28, 1073741824]]
    """
    count, width = scores.shape
    exponents, mantissas = weights(scores)
    if missing := -width % min(TILE, width):
        exponents = np.pad(exponents, ((0, 0), (0, missing)), constant_values=NO_EXPONENT)
        mantissas = np.pad(mantissas, ((0, 0), (0, missing)))
    tiled = (count, -1, min(TILE, width))
    exponents, mantissas = exponents.reshape(tiled), mantissas.reshape(tiled)
    highest = exponents.max(axis=2)
    away = np.minimum(highest[:, :, None] - exponents, 63)
    sums = ((mantissas.astype(np.int64) << TILE_SHIFT) >> away).sum(axis=2)
    top = highest.max(axis=1, keepdims=True)
    totals = (sums >> np.minimum(top - highest + ROW_SHIFT, 63)).sum(axis=1)
    return _cut(totals, top[:, 0])


def _cut(totals: Integers, top: NDArray[np.int32]) -> NDArray[np.int32]:
    """Totals, in units of 2^(top - 39), as exponents and mantissas of 31 bits."""
    exponents = top - 39
    for step in (16, 8, 4, 2, 1):
        large = (totals >> step) >= 2**30
        totals = np.where(large, totals >> step, totals)
        exponents = exponents + step * large
    return np.stack([np.where(totals > 0, exponents, 0), totals], axis=1).astype(np.int32)


def thresholds(
    p: tuple[NDArray[Any], NDArray[Any]],
    p_normalisers: NDArray[np.int32],
    q: tuple[NDArray[Any], NDArray[Any]],
    q_normalisers: NDArray[np.int32],
    is_point: NDArray[np.bool_],
) -> Integers:
    """2^32 times the probability that each draft is kept.

    Args:
        p: exponents and mantissas [C] of the drafts' weights in the target's rows.
        p_normalisers: [C, 2], those of the target's rows.
        q: the drafts' weights in the drafter's rows.
        q_normalisers: [C, 2], those of the drafter's rows.
        is_point: [C] whether the draft was just proposed.

    Returns:
        [C] int64 in [0, 2^32].

    Example:
        >>> row = np.log(np.array([[0.25, 0.75]], np.float32))
        >>> weight, total = tuple(part[:, 0] for part in weights(row)), normalisers(row)
        >>> thresholds(weight, total, weight, total, np.array([False]))[0] == CERTAIN
        np.True_
        >>> float(thresholds(weight, total, weight, total, np.array([True]))[0] / CERTAIN)
        0.25
    """
    allowed = (p[1] > 0) & (p_normalisers[:, 1] > 0)
    certain = is_point | (q[1] == 0) | (q_normalisers[:, 1] == 0)
    q_mantissa = np.where(certain, 2**23, q[1]).astype(np.int64)
    q_total = np.where(certain, 2**30, q_normalisers[:, 1]).astype(np.int64)
    q_exponent = np.where(certain, 30, q[0].astype(np.int64) - q_normalisers[:, 0])
    above = (p[1].astype(np.int64) * q_total) >> 24
    below = (q_mantissa * p_normalisers[:, 1].astype(np.int64)) >> 24
    quotient = (above << 32) // np.maximum(below, 1)
    shift = np.where(allowed, p[0].astype(np.int64) - p_normalisers[:, 0] - q_exponent, 0)
    raised = np.minimum(quotient << np.clip(shift, 0, 2), CERTAIN)
    return np.where(allowed, np.where(shift < 0, np.minimum(quotient >> np.clip(-shift, 0, 63), CERTAIN), raised), 0)


def probabilities(scores: Floats, totals: NDArray[np.int32]) -> Integers:
    """Probabilities of all tokens in units of 2^-52, cut.

    Args:
        scores: [C, V] float32 without NaN.
        totals: [C, 2] int32 `normalisers` of the rows.

    Returns:
        [C, V] int64; all 0 in rows without a total.

    Example:
        >>> row = np.zeros((1, 4), np.float32)
        >>> probabilities(row, normalisers(row)).tolist() == [[2**50] * 4]
        True
    """
    exponents, mantissas = weights(scores)
    exponent, mantissa = totals[:, :1].astype(np.int64), totals[:, 1:].astype(np.int64)
    inverse = np.where(mantissa > 0, 2**62 // np.maximum(mantissa, 1), 0)
    return (mantissas * inverse) >> np.clip(exponent + 33 - exponents, 0, 63)


def residual(p: Integers, q: Integers, draft: int) -> Integers:
    """Weights of the token that follows a rejected draft.

    Args:
        p: [V] `probabilities` of the target.
        q: [V] those of the drafter; all 0 for a point.
        draft: the rejected draft's id.

    Returns:
        [V] int64, not all 0 unless p is.

    Example:
        >>> residual(np.array([5, 3, 2]), np.array([1, 7, 2]), 1).tolist()
        [4, 0, 0]
        >>> residual(np.array([5, 3, 2]), np.zeros(3, np.int64), 0).tolist()
        [0, 3, 2]
    """
    others = np.arange(p.shape[0]) != draft
    first = np.maximum(p - q, 0) * others
    second = p * others
    return first if first.any() else second if second.any() else p * ~others


def coin_words(low: Words, high: Words, position: Words, nonce: Words) -> Words:
    """Coins of the ratio test, a word for each draft.

    Args:
        low, high: key words, uint32; all arrays broadcast against each other.
        position: position of the newest token that the judging logits have seen.
        nonce: round nonce, committed length minus 1.
    """
    return token_words(low, high, position, nonce, ACCEPT, np.zeros(1, np.uint32))


def pick(residual_weights: Integers, low: int, high: int, position: int) -> int:
    """Draw a token in proportion to integer weights, with the TARGET noise of a position.

    Args:
        residual_weights: [V] int64, with a sum below 2^63.
        low, high: words of the seed, as in `funcspec.noise.split_seed`.
        position: position of the newest token that the logits have seen.

    Returns:
        the token id, 0 if every weight is 0.

    Example:
        >>> pick(np.array([0, 9, 0]), 1, 0, 5)
        1
    """
    key = (np.array([word & 0xFFFFFFFF], np.uint32) for word in (0, position, 0, TARGET, low, high))
    w0, w1, _, _ = (int(word[0]) for word in philox4x32(*key))
    sums = residual_weights.cumsum()
    aim = (((w1 << 32) | w0) * int(sums[-1])) >> 64
    return int(np.argmax(sums > aim))


__all__ = [
    "ACCEPTED",
    "CERTAIN",
    "EXP2_COEFFICIENTS",
    "LOG2_E",
    "NO_EXPONENT",
    "REJECTED",
    "ROW_SHIFT",
    "SCORE_LIMIT",
    "TILE_SHIFT",
    "UNDECIDED",
    "coin_words",
    "normalisers",
    "pick",
    "probabilities",
    "residual",
    "sane_scores",
    "thresholds",
    "weights",
]
