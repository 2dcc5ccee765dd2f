"""The definition of noise and choice: known answers, exactness of the twins, and statistical quality.

Statistical tests use fixed seeds; their limits are the 1e-9 quantiles of the statistics, so that a definition which is right
passes with that false-alarm rate per number looked at.
"""

import math
from typing import Any

import numpy as np
import pytest
import torch

from funcspec import noise
from funcspec.errors import ArgumentError, ArgumentTypeError
from funcspec.kernels.noise import gumbel_from_words_, gumbel_reference, noise_words_, philox4x32_reference, uniform_reference

NORMAL_LIMIT = 6.11  # two-sided 1e-9 quantile of a standard normal variable
EDGE_WORDS = np.array(
    [
        0,
        1,
        2,
        3,
        0xFF,
        0x100,
        0xFFFFFE,
        0xFFFFFF,
        0x1000000,
        0x1000001,
        0x10000FF,
        0x1000100,
        0x4AFB0CCC,
        0x4AFB0D00,
        0x7FFFFFFF,
        0x80000000,
        0xFFFFFEFF,
        0xFFFFFF00,
        0xFFFFFFFF,
        0x12345678,
        0xDEADBEEF,
    ],
    dtype=np.uint32,
)


def reachable_words(part: int, step: int = 1) -> np.ndarray:
    """Words with distinct u, in nine parts: odd ones below 2^24, and multiples of 256 above."""
    if part == 0:
        return np.arange(1, 1 << 24, 2 * step, dtype=np.uint32)
    size = 1 << 21
    return np.arange(max(1 << 16, (part - 1) * size), part * size, step, dtype=np.uint32) << np.uint32(8)


def bits(values: np.ndarray) -> list[int]:
    return np.ascontiguousarray(values).view(np.uint32).tolist()


def words_of(*values: int) -> tuple[np.ndarray, ...]:
    return tuple(np.array([value], dtype=np.uint32) for value in values)


# ---------------------------------------------------------------- known answers


@pytest.mark.parametrize(
    ("counter", "key", "expected"),
    [
        ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
        ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
        (
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
            (0xA4093822, 0x299F31D0),
            (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
        ),
    ],
)
def test_philox_gives_the_published_vectors(counter: tuple[int, ...], key: tuple[int, ...], expected: tuple[int, ...]) -> None:
    assert tuple(int(word[0]) for word in noise.philox4x32(*words_of(*counter, *key))) == expected
    tensors = [torch.tensor([value]) for value in (*counter, *key)]
    assert tuple(int(word[0]) for word in philox4x32_reference(*tensors)) == expected


def test_gumbel_of_edge_words_is_pinned() -> None:
    """Pins of NOISE_VERSION 1, checked against an independent implementation and float64."""
    pinned = {
        "00000000": "41b17218",
        "00000001": "41b17218",
        "00000002": "41a8a823",
        "00000003": "41a8a823",
        "000000ff": "41851d96",
        "00000100": "41850d96",
        "00fffffe": "40b16211",
        "00ffffff": "40b16211",
        "01000000": "40b16211",
        "01000001": "40b16211",
        "010000ff": "40b16211",
        "01000100": "40b161f1",
        "4afb0ccc": "3f87a2f2",
        "4afb0d00": "3f87a2f1",
        "7fffffff": "3ebba79a",
        "80000000": "3ebba795",
        "fffffeff": "c03136fd",
        "ffffff00": "c033f049",
        "ffffffff": "c033f049",
        "12345678": "4026d6b9",
        "deadbeef": "bf36631a",
    }
    assert {
        f"{word:08x}": f"{value:08x}" for word, value in zip(EDGE_WORDS.tolist(), bits(noise.gumbel(EDGE_WORDS)), strict=True)
    } == pinned


def test_noise_words_are_pinned() -> None:
    ids = [0, 1, 255, 256, 512, 768, 1023, 1024, 151935]
    assert [f"{word:08x}" for word in noise.noise_words(0, 0, 0, noise.TARGET, ids)] == [
        "4d7b25fc",
        "86865c32",
        "73256cb7",
        "d75ee2f1",
        "26bc1f97",
        "c64d811c",
        "8f2c966c",
        "d4d5584b",
        "af51214c",
    ]
    assert [f"{word:08x}" for word in noise.noise_words(-5, 1234, 1230, noise.DRAFT, ids)] == [
        "3dd7f218",
        "89af8e9f",
        "4c97073b",
        "9f92ebd8",
        "7212a797",
        "82fbc180",
        "70fb69ce",
        "ed1bd31e",
        "6f6fe33a",
    ]
    assert noise.NOISE_VERSION == 1


def test_noise_words_follow_the_written_layout() -> None:
    seed, position, nonce = 0x0123456789ABCDEF, 77, 70
    for token in (0, 5, 255, 256, 300, 700, 1000, 1023, 1024, 2047, 5000):
        tile, number, lane = token // 1024, token % 1024 // 256, token % 256
        four = noise.philox4x32(*words_of(tile * 256 + lane, position, nonce, noise.ACCEPT, 0x89ABCDEF, 0x01234567))
        assert int(noise.noise_words(seed, position, nonce, noise.ACCEPT, token)[0]) == int(four[number][0])
    low, high = (noise.as_words(value)[:, None] for value in noise.split_seed(seed))
    rows = noise.row_words(low, high, noise.as_words(position)[:, None], noise.as_words(nonce)[:, None], noise.ACCEPT, 2500)
    np.testing.assert_array_equal(rows[0], noise.noise_words(seed, position, nonce, noise.ACCEPT, np.arange(2500)))


def test_chosen_tokens_are_pinned() -> None:
    logits = (np.arange(16) * 7 % 16 / 4).astype(np.float32)

    def tokens(stream: int, temperature: float) -> list[int]:
        nonce = 0 if stream == noise.TARGET else 3
        return [noise.choose(logits, temperature, 42, position, nonce, stream)[0] for position in range(12)]

    assert tokens(noise.TARGET, 1.0) == [13, 9, 4, 10, 1, 4, 2, 4, 4, 4, 6, 6]
    assert tokens(noise.TARGET, 0.5) == [13, 9, 2, 9, 1, 4, 9, 4, 4, 4, 9, 6]
    assert tokens(noise.DRAFT, 1.0) == [12, 2, 9, 6, 13, 9, 2, 2, 2, 13, 15, 9]


# ---------------------------------------------------------------- uniform and Gumbel


def test_uniform_is_never_zero_or_one() -> None:
    u = noise.uniform(EDGE_WORDS)
    assert u.dtype == np.float32
    assert float(u.min()) == 2.0**-32
    assert float(u.max()) == 1 - 2.0**-24
    exact = EDGE_WORDS | np.uint32(1)
    exact = np.where(exact < 1 << 24, exact, exact & np.uint32(0xFFFFFF00))
    np.testing.assert_array_equal(u.astype(np.float64), exact.astype(np.float64) * 2.0**-32)


def test_gumbel_is_finite_falling_and_close_to_real_numbers() -> None:
    """H6 over words of all sizes."""
    for part in range(9):
        words = reachable_words(part, step=17)
        g = noise.gumbel(words)
        exact = -np.log(-np.log1p(-noise.uniform(words).astype(np.float64)))
        assert np.isfinite(g).all()
        assert np.abs(g - exact).max() < 1e-6
        assert (np.diff(g.astype(np.float64)) <= 1e-6).all()
    assert float(noise.gumbel(EDGE_WORDS).max()) < 22.1808
    assert float(noise.gumbel(EDGE_WORDS).min()) > -2.8116


def test_torch_noise_equals_numpy_over_sampled_reachable_words() -> None:
    for words in (EDGE_WORDS, *(reachable_words(part, step=13) for part in range(9))):
        tensor = torch.from_numpy(words.astype(np.int64))
        np.testing.assert_array_equal(uniform_reference(tensor).numpy().view(np.int32), noise.uniform(words).view(np.int32))
        np.testing.assert_array_equal(gumbel_reference(tensor).numpy().view(np.int32), noise.gumbel(words).view(np.int32))


def test_gumbel_op_equals_numpy(backend: Any, kernel_device: str) -> None:
    random = np.random.default_rng(3).integers(0, 2**32, 3000, dtype=np.uint32)
    words = np.concatenate([EDGE_WORDS, random, *(reachable_words(part, step=4999) for part in range(9))])
    guarded = torch.full((words.size + 16,), 77.0, device=kernel_device)
    tensor = torch.from_numpy(words.view(np.int32)).to(kernel_device)
    gumbel_from_words_(backend=backend, words=tensor, out_noise=guarded[8:-8])
    np.testing.assert_array_equal(guarded[8:-8].cpu().numpy().view(np.int32), noise.gumbel(words).view(np.int32))
    assert (guarded[:8] == 77).all()
    assert (guarded[-8:] == 77).all()


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_compiled_gumbel_equals_numpy_over_all_reachable_words() -> None:
    total = 0
    for part in range(9):
        words = reachable_words(part)
        out = torch.full((words.size,), float("nan"), device="cuda")
        gumbel_from_words_(words=torch.from_numpy(words.view(np.int32)).cuda(), out_noise=out)
        np.testing.assert_array_equal(out.cpu().numpy().view(np.int32), noise.gumbel(words).view(np.int32))
        total += words.size
    assert total == 25_100_288


def test_noise_words_op_equals_numpy(backend: Any, kernel_device: str) -> None:
    generator = np.random.default_rng(5)
    count = 1100
    seeds = generator.integers(-(2**63), 2**63, count)
    seeds[:5] = [0, -1, 2**63 - 1, -(2**63), 2**32 + 7]
    positions, nonces = generator.integers(-2, 2**30, (2, count))
    ids = generator.integers(0, 2**20, count)
    keys = np.array([noise.split_seed(int(seed)) for seed in seeds], dtype=np.int32)
    arrays = [torch.from_numpy(array.astype(np.int32)).to(kernel_device) for array in (keys, positions, nonces, ids)]
    guarded = torch.full((count + 16,), 77, dtype=torch.int32, device=kernel_device)
    for stream in noise.STREAMS:
        guarded[8:-8] = -99
        noise_words_(
            backend=backend,
            seed=arrays[0],
            positions=arrays[1],
            nonces=arrays[2],
            stream=stream,
            token_ids=arrays[3],
            out_words=guarded[8:-8],
        )
        low, high = noise.as_words(keys[:, 0]), noise.as_words(keys[:, 1])
        expected = noise.token_words(low, high, noise.as_words(positions), noise.as_words(nonces), stream, noise.as_words(ids))
        np.testing.assert_array_equal(guarded[8:-8].cpu().numpy().view(np.uint32), expected)
        assert (guarded[:8] == 77).all()
        assert (guarded[-8:] == 77).all()


# ---------------------------------------------------------------- refusals


@pytest.mark.parametrize("seed", [True, 1.0, "1", None, np.float32(2), np.bool_(True)])
def test_seeds_that_are_no_integers_are_refused(seed: object) -> None:
    with pytest.raises(ArgumentTypeError, match="seed"):
        noise.split_seed(seed)  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize("seed", [2**64, -(2**63) - 1])
def test_seeds_of_more_than_64_bits_are_refused(seed: int) -> None:
    with pytest.raises(ArgumentError, match="seed"):
        noise.split_seed(seed)


def test_split_seed_keeps_every_bit() -> None:
    for seed in (0, 1, -1, 2**31, 2**32 - 1, 2**63 - 1, -(2**63), 2**64 - 1, np.int64(-5), np.uint64(2**64 - 5)):
        low, high = noise.split_seed(seed)  # pyright: ignore[reportArgumentType]
        assert -(2**31) <= low < 2**31
        assert -(2**31) <= high < 2**31
        assert (low & 0xFFFFFFFF) | (high & 0xFFFFFFFF) << 32 == int(seed) % 2**64
    assert noise.split_seed(-1) == noise.split_seed(2**64 - 1)


def test_other_bad_input_is_refused() -> None:
    with pytest.raises(ArgumentError, match="stream"):
        noise.noise_words(0, 0, 0, 4, [0])
    with pytest.raises(ArgumentTypeError, match="integers"):
        noise.noise_words(0, 0.5, 0, noise.DRAFT, [0])
    with pytest.raises(ArgumentError, match="logits"):
        noise.choose(np.zeros(0, np.float32), 0.0, 0, 0, 0, noise.TARGET)
    words = torch.zeros(4, dtype=torch.int32)
    with pytest.raises(ArgumentTypeError, match="out_noise"):
        gumbel_from_words_(words=words, out_noise=words.clone())
    with pytest.raises(ArgumentError, match="out_noise"):
        gumbel_from_words_(words=words, out_noise=torch.zeros(5))
    with pytest.raises(ArgumentError, match="seed"):
        noise_words_(seed=words, positions=words, nonces=words, stream=1, token_ids=words, out_words=words.clone())


# ---------------------------------------------------------------- choice


def test_choice_rules() -> None:
    inf, nan = math.inf, math.nan

    def pick(row: list[float], temperature: float = 0.0, token_ids: list[int] | None = None) -> tuple[int, bool]:
        ids = None if token_ids is None else np.array(token_ids, dtype=np.int32)
        return noise.choose(np.array(row, dtype=np.float32), temperature, 7, 3, 0, noise.TARGET, ids)

    assert pick([1, 3, 3, 2]) == (1, False)
    assert pick([-0.0, 0.0]) == (0, False)
    assert pick([1, 3, 3, 2], token_ids=[9, 8, 4, 2]) == (4, False)
    assert pick([1, nan, 0]) == (0, True)
    assert pick([inf, 0, 1]) == (2, True)
    for temperature in (0.0, 0.01, 0.7, 2.0):
        assert pick([-inf, 0], temperature) == (1, False)
        assert pick([-inf] * 3, temperature) == (0, True)
        assert pick([nan, inf, -inf], temperature, [5, 3, 8]) == (3, True)


def test_noise_is_keyed_by_the_target_token() -> None:
    """A permuted, reduced vocabulary draws the same target token as full logits with all others masked."""
    generator = np.random.default_rng(11)
    for position in range(20):
        ids = generator.permutation(3000)[:40].astype(np.int32)
        logits = generator.normal(size=40).astype(np.float32)
        full = np.full(3000, -np.inf, dtype=np.float32)
        full[ids] = logits
        mapped = noise.choose(logits, 0.7, 42, position, 5, noise.DRAFT, ids)
        assert mapped == noise.choose(full, 0.7, 42, position, 5, noise.DRAFT)


# ---------------------------------------------------------------- statistical quality


def test_moments() -> None:
    """2^21 words: mean 0.577216, variance 1.644934, third central moment 2.404114 (cumulants of the Gumbel law)."""
    words = noise.noise_words(1, np.arange(2048)[:, None], 0, noise.TARGET, np.arange(1024)[None])
    count = words.size
    u = noise.uniform(words).astype(np.float64)
    assert abs(u.mean() - 0.5) < NORMAL_LIMIT * math.sqrt(1 / 12 / count)
    g = noise.gumbel(words).astype(np.float64)
    centred = g - 0.5772156649
    for power, expected in ((1, 0.0), (2, 1.6449340668), (3, 2.4041138063)):
        values = centred**power
        assert abs(values.mean() - expected) < NORMAL_LIMIT * values.std() / math.sqrt(count)


def test_every_bit_and_byte_of_the_words_is_fair() -> None:
    """2^21 words: 32 bit counts, and a chi-square with 255 degrees of freedom for each byte (1e-9 quantile 415)."""
    words = noise.noise_words(2, np.arange(2048)[:, None], 9, noise.DRAFT, np.arange(1024)[None]).reshape(-1)
    for bit in range(32):
        ones = int((words >> np.uint32(bit) & np.uint32(1)).sum())
        assert abs(ones - words.size / 2) < NORMAL_LIMIT * math.sqrt(words.size / 4)
    for byte in range(4):
        counts = np.bincount(words >> np.uint32(8 * byte) & np.uint32(255), minlength=256)
        assert ((counts - words.size / 256) ** 2).sum() / (words.size / 256) < 415


def test_tails_have_their_probability() -> None:
    """H8 as an exact count, no sampling: noise falls in the word, so P(noise > x) is found by bisection over all 2^32 words.

    Noise computed as -log(-log(u)) in float32 stops at 16.64, and tokens 20.5 nats below the head could never win.
    """
    for x in (-2.5, 0.0, 5.0, 10.0, 15.0, 16.7, 18.0, 20.0, 20.5, 21.0, 22.0):
        low, high = 0, 2**32  # noise(low) > x unless low is 0
        while low < high:
            middle = (low + high) // 2
            if noise.gumbel(np.array([middle], dtype=np.uint32))[0] > x:
                low = middle + 1
            else:
                high = middle
        expected = -math.expm1(-math.exp(-x)) * 2**32
        assert abs(low - expected) <= max(2.0, 3e-6 * expected) + (256 if expected > 2**24 else 0)


def test_rare_tokens_are_drawn() -> None:
    """A thousand draws, 65,536 tail tokens each 14 nats below the head: the tail has 5.2 %, and its limits are 1e-9 quantiles.

    Words in the tail's winning range are the same for deeper tails; `test_tails_have_their_probability` covers those exactly.
    """
    logits = np.full(65537, -14.0, dtype=np.float32)
    logits[0] = 0
    scores_beat = 0
    for position in range(1000):
        low, high, at, zero = (noise.as_words(value)[:, None] for value in (*noise.split_seed(99), position, 0))
        words = noise.row_words(low, high, at, zero, noise.TARGET, logits.size)[0]
        tail = int(words[1:].min() | 1)  # the smallest word has the largest noise
        g = noise.gumbel(np.array([words[0], tail], dtype=np.uint32))
        scores_beat += bool(g[1] - np.float32(14) > g[0])
    p = 65536 * math.exp(-14) / (1 + 65536 * math.exp(-14))
    assert abs(scores_beat - 1000 * p) < NORMAL_LIMIT * math.sqrt(1000 * p * (1 - p)) + 1


def test_neighbours_are_uncorrelated() -> None:
    """Correlations of 2^16 pairs between neighbouring lanes, words, tiles, positions, nonces, seeds and streams."""
    ids = np.arange(1 << 16)

    def draw(seed: int = 5, position: int = 100, nonce: int = 90, stream: int = noise.DRAFT, shift: int = 0) -> np.ndarray:
        return noise.uniform(noise.noise_words(seed, position, nonce, stream, ids + shift)).astype(np.float64)

    base = draw()
    others = [draw(shift=shift) for shift in (1, 2, 255, 256, 512, 768, 1023, 1024)]
    others += [draw(seed=seed) for seed in (4, 6, 5 + 2**32, -5, 5 ^ 2**63)]
    others += [draw(position=100 + step) for step in (-1, 1, 2, 1024)]
    others += [draw(nonce=nonce) for nonce in (89, 91, 0)] + [draw(stream=stream) for stream in (noise.ACCEPT, noise.TARGET)]
    others += [draw(position=90, nonce=100)]
    for other in others:
        for first, second in ((base, other), (abs(base - 0.5), abs(other - 0.5)), (base, abs(other - 0.5))):
            assert abs(np.corrcoef(first, second)[0, 1]) * math.sqrt(ids.size) < NORMAL_LIMIT


def draws(logits: np.ndarray, seed: int, positions: np.ndarray, nonce: int, stream: int) -> np.ndarray:
    words = noise.noise_words(seed, positions[:, None], nonce, stream, np.arange(logits.size)[None])
    return (logits[None] + noise.gumbel(words)).argmax(axis=1)


def test_draws_have_the_softmax_distribution() -> None:
    """Chi-square of 200,000 draws of 16 tokens, 15 degrees of freedom (1e-9 quantile 73.7), by position and by seed."""
    logits = (np.arange(16) * 7 % 16 / 4).astype(np.float32)
    p = np.exp(logits.astype(np.float64))
    p /= p.sum()
    for stream in noise.STREAMS:
        counts = np.bincount(draws(logits, 31, np.arange(200_000), 0, stream), minlength=16)
        assert ((counts - 200_000 * p) ** 2 / (200_000 * p)).sum() < 73.7
    low, high = noise.as_words(np.arange(200_000))[:, None], noise.as_words(0)[:, None]
    at = noise.as_words(12)[:, None]
    words = noise.token_words(low, high, at, high, noise.TARGET, noise.as_words(np.arange(16))[None])
    counts = np.bincount((logits[None] + noise.gumbel(words)).argmax(axis=1), minlength=16)
    assert ((counts - 200_000 * p) ** 2 / (200_000 * p)).sum() < 73.7


def test_draws_of_neighbours_are_independent() -> None:
    """Chi-square of 100,000 pairs of draws of 4 tokens with known joint law, 15 degrees of freedom (1e-9 quantile 73.7)."""
    logits = np.array([0.0, 1.0, -0.5, 0.25], dtype=np.float32)
    p = np.exp(logits.astype(np.float64))
    p /= p.sum()
    joint = 100_000 * np.outer(p, p).reshape(-1)
    even = np.arange(0, 200_000, 2)
    base = draws(logits, 8, even, 3, noise.DRAFT)
    partners = {
        "next position": draws(logits, 8, even + 1, 3, noise.DRAFT),
        "next round": draws(logits, 8, even, 4, noise.DRAFT),
        "next seed": draws(logits, 9, even, 3, noise.DRAFT),
        "target stream": draws(logits, 8, even, 0, noise.TARGET),
    }
    for name, other in partners.items():
        counts = np.bincount(base * 4 + other, minlength=16)
        assert ((counts - joint) ** 2 / joint).sum() < 73.7, name
