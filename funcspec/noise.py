"""Random streams and exact Gumbel noise: the specification, to the bit.

Every token that funcspec chooses is a pure function of its logits, a temperature and the noise defined here. NumPy, torch,
interpreted and compiled Triton give the same bits. The definition never changes under one `NOISE_VERSION`; known answers
in the tests pin it. Integers below are unsigned 32-bit and wrap; `float` means IEEE-754 binary32, every operation rounded
once to nearest even, no fused multiply-add.

1. **Word.** Philox4x32 with 10 rounds (Salmon et al. 2011). Key: the 64-bit seed as (low word, high word). Token id t has
   tile t // 1024, word (t % 1024) // 256 and lane t % 256. Counter: (tile * 256 + lane, position, nonce, stream), negative
   positions and nonces in two's complement. The token's noise comes from the output word of that number. One round maps
   (c0, c1, c2, c3) to (hi(B c2) ^ c1 ^ k0, lo(B c2), hi(A c0) ^ c3 ^ k1, lo(A c0)), A = 0xD2511F53, B = 0xCD9E8D57;
   after it k0 += 0x9E3779B9, k1 += 0xBB67AE85.
2. **Streams.** DRAFT = 1 (draws of a drafter), ACCEPT = 2 (acceptance coins), TARGET = 3 (plain, residual and bonus
   draws). `position` is that of the newest token the logits have seen. TARGET uses nonce 0: its noise depends on the
   position alone. DRAFT and ACCEPT use as nonce the position of the newest unfed token at the start of the round, the
   committed length minus 1: it grows with every round, so a position that is drafted again is drafted with fresh noise.
   Noise is keyed by the *target's* token id, also for drafters with a reduced vocabulary.
3. **Uniform.** v = w | 1, and its low 8 bits are cleared when v >= 2^24, which makes the conversion to float exact;
   u = v * 2^-32. So 2^-32 <= u <= 1 - 2^-24: never 0, never 1. 25,100,288 values can occur.
4. **Logarithm.** `polylog(f, e)` is log((1 + f) 2^e) for 1 + f in [sqrt(1/2), sqrt(2)), a polynomial (Cephes `logf`
   coefficients) in separate float multiplies and adds, in the order of the code. `split(x)` takes f and e from the bits
   of a positive, normal x.
5. **Gumbel noise.** E = 0 - log1p(-u), where log1p(-u) = polylog(-u, 0) for u <= float(1 - 0.70710678), and otherwise
   polylog(split(1 - u)); g = 0 - polylog(split(E)). (0 - x, not -x: the sign of a zero would differ.) The largest noise is
   22.1807, the smallest -2.8115; the error against real numbers is below 1e-6. The fine end of u is at the winning tail,
   so tokens of probability down to 2^-32 can be drawn, and noise is always finite.
6. **Choice.** See `choose`.
"""

from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from funcspec.errors import ArgumentTypeError, refuse

NOISE_VERSION = 1
"""Version of the definition above. Recorded runs name it; a changed definition gets another number."""

TILE = 1024
"""Token ids that share their Philox counters: part of the definition."""

LANES = 256
"""Counters of a tile; each gives four words."""

DRAFT = 1
"""Stream of a drafter's own draws."""

ACCEPT = 2
"""Stream of acceptance coins."""

TARGET = 3
"""Stream of the target's draws: plain, residual and bonus."""

STREAMS = (DRAFT, ACCEPT, TARGET)

LOG_COEFFICIENTS = (
    7.0376836292e-2,
    -1.1514610310e-1,
    1.1676998740e-1,
    -1.2420140846e-1,
    1.4249322787e-1,
    -1.6668057665e-1,
    2.0000714765e-1,
    -2.4999993993e-1,
    3.3333331174e-1,
)
LN2_HIGH = 0.693359375
LN2_LOW = -2.12194440e-4
SQRT_HALF = 0.70710678

Words = NDArray[np.uint32]
Floats = NDArray[np.float32]

_NOISE_SPAN = 25.01  # more than the largest noise less the smallest, 22.1807 + 2.8116
_FEW = 2048  # up to so many tokens, exact noise for all costs less than a further test
_MULTIPLIER_A = np.uint64(0xD2511F53)
_MULTIPLIER_B = np.uint64(0xCD9E8D57)
_WEYL_A = 0x9E3779B9
_WEYL_B = 0xBB67AE85
_SHIFT = np.uint64(32)


def split_seed(seed: int) -> tuple[int, int]:
    """Cut a 64-bit seed into the two words of the Philox key, as int32 bit patterns.

    Args:
        seed: any integer in [-2^63, 2^64); negative seeds are their two's complement.

    Returns:
        (low, high), each in [-2^31, 2^31).

    Raises:
        ArgumentTypeError: `seed` is no integer (a bool is none).
        ArgumentError: `seed` needs more than 64 bits.

    Example:
        >>> split_seed(-1), split_seed(2**32 + 7)
        ((-1, -1), (7, 1))
    """
    if isinstance(seed, bool) or not isinstance(seed, int | np.integer):
        refuse("seed", "a 64-bit integer", f"{type(seed).__name__} {seed!r}", "pass a Python int", ArgumentTypeError)
    value = int(seed)
    if not -(2**63) <= value < 2**64:
        refuse("seed", "a 64-bit integer", value, "pass seed % 2**64")
    low, high = value & 0xFFFFFFFF, (value >> 32) & 0xFFFFFFFF
    return (low ^ 0x80000000) - 0x80000000, (high ^ 0x80000000) - 0x80000000


def as_words(values: ArrayLike) -> Words:
    """Low 32 bits of integers of any width, two's complement. A scalar gives an array of shape [1].

    Args:
        values: integers in [-2^63, 2^64).

    Raises:
        ArgumentTypeError: not integers.
    """
    array = np.atleast_1d(np.asarray(values))
    if array.dtype.kind not in "iu":
        refuse("values", "integers", array.dtype, "positions, nonces and token ids are integers", ArgumentTypeError)
    return array.astype(np.uint32)


def philox4x32(c0: Words, c1: Words, c2: Words, c3: Words, k0: Words, k1: Words) -> tuple[Words, Words, Words, Words]:
    """Philox4x32 with 10 rounds.

    Args:
        c0: counter words, uint32 arrays that broadcast against each other and the key.
        c1: second counter word.
        c2: third counter word.
        c3: fourth counter word.
        k0: key, low word.
        k1: key, high word.

    Returns:
        Four uint32 arrays of the broadcast shape.
    """
    # Products of two 32-bit words fit 64 bits; a word that is the same everywhere stays a small array while it can.
    for index in range(10):
        product_a = np.multiply(c0, _MULTIPLIER_A, dtype=np.uint64)
        product_b = np.multiply(c2, _MULTIPLIER_B, dtype=np.uint64)
        key_a = k0 + np.uint32(index * _WEYL_A & 0xFFFFFFFF)
        key_b = k1 + np.uint32(index * _WEYL_B & 0xFFFFFFFF)
        c0 = (product_b >> _SHIFT).astype(np.uint32) ^ (c1 ^ key_a)
        c2 = (product_a >> _SHIFT).astype(np.uint32) ^ (c3 ^ key_b)
        c1 = product_b.astype(np.uint32)
        c3 = product_a.astype(np.uint32)
    return c0, c1, c2, c3


def noise_words(seed: int, position: ArrayLike, nonce: ArrayLike, stream: int, token_ids: ArrayLike) -> Words:
    """Noise words of tokens.

    Args:
        seed: the request's 64-bit seed.
        position: position, an integer or an array that broadcasts against `token_ids`.
        nonce: round nonce, likewise; 0 for TARGET.
        stream: DRAFT, ACCEPT or TARGET.
        token_ids: target token ids, at least 0.

    Returns:
        uint32 words of the broadcast shape (at least [1]).

    Raises:
        ArgumentError: unknown stream or a seed of more than 64 bits.
        ArgumentTypeError: something is no integer.
    """
    check_stream(stream)
    low, high = split_seed(seed)
    return token_words(as_words(low), as_words(high), as_words(position), as_words(nonce), stream, as_words(token_ids))


def token_words(low: Words, high: Words, position: Words, nonce: Words, stream: int, token_ids: Words) -> Words:
    """Noise words where the key, too, may differ from token to token.

    Args:
        low: low key words, uint32; all arrays broadcast against each other.
        high: high key words.
        position: positions.
        nonce: round nonces.
        stream: DRAFT, ACCEPT or TARGET.
        token_ids: target token ids.

    Returns:
        uint32 words of the broadcast shape.
    """
    counter = token_ids // np.uint32(TILE) * np.uint32(LANES) + token_ids % np.uint32(LANES)
    words = philox4x32(counter, position, nonce, as_words(stream), low, high)
    number = np.broadcast_to(token_ids % np.uint32(TILE) // np.uint32(LANES), words[0].shape)
    return np.choose(number, words)


def row_words(low: Words, high: Words, position: Words, nonce: Words, stream: int, vocab_size: int) -> Words:
    """Noise words of tokens 0 up to `vocab_size` for several rows; one Philox call serves four tokens.

    Args:
        low: [C, 1] low key words, uint32.
        high: [C, 1] high key words.
        position: [C, 1] positions.
        nonce: [C, 1] round nonces.
        stream: DRAFT, ACCEPT or TARGET.
        vocab_size: V.

    Returns:
        [C, V] uint32, a view.
    """
    tiles = -(-vocab_size // TILE)
    lanes = np.arange(tiles * LANES, dtype=np.uint32)[None]
    four = philox4x32(lanes, position, nonce, as_words(stream), low, high)
    return np.stack([word.reshape(-1, tiles, LANES) for word in four], axis=2).reshape(-1, tiles * TILE)[:, :vocab_size]


def check_stream(stream: int) -> None:
    """Refuse anything but DRAFT, ACCEPT and TARGET.

    Raises:
        ArgumentError: another stream.
    """
    if stream not in STREAMS:
        refuse("stream", "noise.DRAFT, noise.ACCEPT or noise.TARGET", repr(stream), "use these constants")


def uniform(words: Words) -> Floats:
    """Map words to u in [2^-32, 1 - 2^-24].

    Args:
        words: uint32.

    Returns:
        float32 of the same shape.
    """
    odd = words | np.uint32(1)
    exact = np.where(odd < np.uint32(1 << 24), odd, odd & np.uint32(0xFFFFFF00))
    return exact.astype(np.float32) * np.float32(2.0**-32)


def polylog(f: Floats, e: Floats) -> Floats:
    """Logarithm of (1 + f) * 2^e.

    Args:
        f: float32 in [sqrt(1/2) - 1, sqrt(2) - 1].
        e: float32 with integer values.

    Returns:
        float32.
    """
    z = f * f
    y = np.full_like(f, np.float32(LOG_COEFFICIENTS[0]))
    for coefficient in LOG_COEFFICIENTS[1:]:
        y = y * f + np.float32(coefficient)
    y = y * f
    y = y * z
    y = y + e * np.float32(LN2_LOW)
    y = y - z * np.float32(0.5)
    result: NDArray[Any] = (f + y) + e * np.float32(LN2_HIGH)
    return result


def split(x: Floats) -> tuple[Floats, Floats]:
    """Write a positive, normal x as (1 + f) * 2^e with 1 + f in [sqrt(1/2), sqrt(2)).

    Args:
        x: float32.

    Returns:
        (f, e), both float32; e has integer values.
    """
    bits = x.view(np.int32)
    exponent = ((bits >> 23) & 255) - 126
    mantissa = ((bits & 0x007FFFFF) | 0x3F000000).view(np.float32)
    low = mantissa < np.float32(SQRT_HALF)
    f = np.where(low, mantissa + mantissa, mantissa).astype(np.float32) - np.float32(1)
    return f, np.where(low, exponent - 1, exponent).astype(np.float32)


def gumbel(words: Words) -> Floats:
    """Map words to standard Gumbel noise, always finite.

    Args:
        words: uint32.

    Returns:
        float32 of the same shape, in [-2.8115, 22.1807].

    Example:
        >>> [f"{g:.6f}" for g in gumbel(np.array([0, 2**31, 2**32 - 1], dtype=np.uint32))]
        ['22.180710', '0.366513', '-2.811541']
    """
    u = uniform(np.atleast_1d(words))
    small = u <= np.float32(1 - SQRT_HALF)
    f, e = split(np.where(small, np.float32(0.5), np.float32(1) - u))
    exponential = np.float32(0) - polylog(np.where(small, -u, f), np.where(small, np.float32(0), e))
    return np.float32(0) - polylog(*split(exponential))


def choose(
    logits: NDArray[Any],
    temperature: float,
    seed: int,
    position: int,
    nonce: int,
    stream: int,
    token_ids: NDArray[Any] | None = None,
) -> tuple[int, bool]:
    """Choose one token from one row of logits: the specification of choice, without any pruning.

    NaN and +inf logits become -inf and mark the row bad. At temperature 0 the scores are the float32 logits; above 0 they
    are logits / temperature (float32, round to nearest) + Gumbel noise keyed by the target token id. The highest score
    wins, ties go to the lowest *target* token id. Noise is finite, so it never rescues a -inf logit. When every score is
    -inf (nothing to choose), the row is bad and its token is the lowest target id among the row's ids: 0 without a map.

    Args:
        logits: [V] of any float type that converts to float32 exactly, V >= 1.
        temperature: 0 for greedy choice, else positive and finite.
        seed: 64-bit seed of the request.
        position: position of the newest token that the logits have seen.
        nonce: round nonce; 0 for TARGET.
        stream: DRAFT, ACCEPT or TARGET.
        token_ids: [V] target id of each column, or None when columns are target ids.

    Returns:
        (target token id, bad).

    Raises:
        ArgumentError: empty logits, unknown stream, a seed of more than 64 bits.
        ArgumentTypeError: the seed is no integer.

    Example:
        >>> choose(np.array([0.0, 2.0, 2.0, float("nan")]), 0.0, 1, 0, 0, TARGET)
        (1, True)
    """
    if logits.ndim != 1 or logits.size == 0:
        refuse("logits", "one row of at least one logit", f"shape {logits.shape}", "pass one row")
    ids = np.arange(logits.size) if token_ids is None else np.asarray(token_ids)
    scores = logits.astype(np.float32)
    invalid = np.isnan(scores) | (scores == np.inf)
    scores = np.where(invalid, np.float32(-np.inf), scores)
    if temperature > 0:
        words = noise_words(seed, position, nonce, stream, ids)
        with np.errstate(over="ignore"):
            scores = scores / np.float32(temperature) + gumbel(words)
    best = scores.max()
    token = int(ids[scores == best].min())
    return token, bool(invalid.any() or best == -np.inf)


def choose_rows(
    logits: Floats, temperature: Floats, counters: Words, stream: int, token_ids: NDArray[np.int32] | None
) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
    """Choose one token for each of several sampled rows as `choose` does, with noise only for tokens that could win.

    Args:
        logits: [C, V] without NaN and +inf.
        temperature: [C, 1] above 0.
        counters: [C, 4] low and high seed word, position, nonce.
        stream: random stream.
        token_ids: [V] target ids or None.

    Returns:
        [C] target ids, and [C] whether no score was above -inf.
    """
    count, vocab_size = logits.shape
    with np.errstate(all="ignore"):
        scores = logits / temperature
        top = scores.max(axis=1, keepdims=True)
        margin = 0.02 + 2e-6 * (np.abs(top) + _NOISE_SPAN)  # more than all roundings of scores and tests together
        # Comparisons are negated so that infinite scores, whose differences are NaN, are never dropped.
        place = np.flatnonzero(~(scores < top - (_NOISE_SPAN + margin)))
        if place.size <= _FEW:
            row, column = np.divmod(place, vocab_size)
            low, high, position, nonce = counters[row].T
            words = token_words(low, high, position, nonce, stream, as_words(column if token_ids is None else token_ids[column]))
        else:
            low, high, position, nonce = counters.T[:, :, None]
            if token_ids is None:
                everything = row_words(low, high, position, nonce, stream, vocab_size)
            else:
                everything = token_words(low, high, position, nonce, stream, as_words(token_ids)[None])
            # Noise lies between log((1 - u) / u) and -log(u). So with ratio = u / exp(score), and the least of them in a
            # row, no token with ratio > least / (1 - least) wins.
            ratio = (everything | np.uint32(1)).astype(np.float32) * np.float32(2.0**-32) / np.exp(scores - top)
            least = ratio.min(axis=1, keepdims=True)
            place = np.flatnonzero(~(ratio > np.where(least < 1, least / (1 - least) * np.exp(margin), np.inf)))
            row, column = np.divmod(place, vocab_size)
            words = everything[row, column]
        final = scores.reshape(-1)[place] + gumbel(words)
    best = np.full(count, -np.inf, dtype=np.float32)
    np.maximum.at(best, row, final)
    tied = final == best[row]
    winner = np.full(count, 2**31 - 1, dtype=np.int64)
    np.minimum.at(winner, row[tied], (column if token_ids is None else token_ids[column])[tied])
    return winner, best == -np.inf


__all__ = [
    "ACCEPT",
    "DRAFT",
    "LANES",
    "NOISE_VERSION",
    "STREAMS",
    "TARGET",
    "TILE",
    "as_words",
    "check_stream",
    "choose",
    "choose_rows",
    "gumbel",
    "noise_words",
    "philox4x32",
    "polylog",
    "row_words",
    "split",
    "split_seed",
    "token_words",
    "uniform",
]
