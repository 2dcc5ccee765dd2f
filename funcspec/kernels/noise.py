"""Exact noise on tensors: Triton device functions, their torch twins, and two small ops that expose them.

`funcspec.noise` is the specification; both forms here give its bits. Kernels that use the device functions must be
launched with `enable_fp_fusion=False`, because a fused multiply-add rounds once where the definition rounds twice.
"""

import torch

from funcspec.errors import ArgumentTypeError, refuse
from funcspec.kernels._triton import jit, tl, triton
from funcspec.kernels.op import Op
from funcspec.noise import LN2_HIGH, LN2_LOW, LOG_COEFFICIENTS, SQRT_HALF, check_stream

_WORD = 0xFFFFFFFF
_BLOCK = 1024


# ---------------------------------------------------------------- Triton device functions


@jit
def polylog(f, e):
    """log((1 + f) * 2^e): `funcspec.noise.polylog`. f, e: float32."""
    z = f * f
    y = f * 7.0376836292e-2 + (-1.1514610310e-1)
    y = y * f + 1.1676998740e-1
    y = y * f + (-1.2420140846e-1)
    y = y * f + 1.4249322787e-1
    y = y * f + (-1.6668057665e-1)
    y = y * f + 2.0000714765e-1
    y = y * f + (-2.4999993993e-1)
    y = y * f + 3.3333331174e-1
    y = y * f
    y = y * z
    y = y + e * (-2.12194440e-4)
    y = y - z * 0.5
    return (f + y) + e * 0.693359375


@jit
def split(x):
    """(f, e) with x = (1 + f) * 2^e: `funcspec.noise.split`. x: positive, normal float32."""
    bits = x.to(tl.int32, bitcast=True)
    exponent = ((bits >> 23) & 255) - 126
    mantissa = ((bits & 0x007FFFFF) | 0x3F000000).to(tl.float32, bitcast=True)
    low = mantissa < 0.70710678
    return tl.where(low, (mantissa + mantissa) - 1.0, mantissa - 1.0), tl.where(low, exponent - 1, exponent).to(tl.float32)


@jit
def uniform(words):
    """Uniform numbers in [2^-32, 1 - 2^-24]: `funcspec.noise.uniform`. words: uint32."""
    odd = words | 1
    return tl.where(odd < 0x01000000, odd, odd & 0xFFFFFF00).to(tl.float32) * 2.3283064365386963e-10


@jit
def gumbel(words):
    """Standard Gumbel noise: `funcspec.noise.gumbel`. words: uint32."""
    u = uniform(words)
    small = u <= 0.29289322
    f, e = split(tl.where(small, 0.5, 1.0 - u))
    exponential = 0.0 - polylog(tl.where(small, -u, f), tl.where(small, 0.0, e))
    f, e = split(exponential)
    return 0.0 - polylog(f, e)


@jit
def philox4x32(c0, c1, c2, c3, k0, k1):
    """Four words of Philox4x32-10: `funcspec.noise.philox4x32`. All uint32, of shapes that broadcast."""
    for _ in tl.static_range(10):
        high_a = tl.umulhi(c0, tl.full((), 0xD2511F53, tl.uint32))
        high_b = tl.umulhi(c2, tl.full((), 0xCD9E8D57, tl.uint32))
        low_a = c0 * tl.full((), 0xD2511F53, tl.uint32)
        low_b = c2 * tl.full((), 0xCD9E8D57, tl.uint32)
        c0 = high_b ^ c1 ^ k0
        c2 = high_a ^ c3 ^ k1
        c1 = low_b
        c3 = low_a
        k0 = k0 + tl.full((), 0x9E3779B9, tl.uint32)
        k1 = k1 + tl.full((), 0xBB67AE85, tl.uint32)
    return c0, c1, c2, c3


@jit
def token_word(token, position, nonce, STREAM: tl.constexpr, low, high):
    """Noise word of each token: `funcspec.noise.noise_words`.

    token: uint32 target ids; position, nonce, low, high: uint32; all of one shape, or scalars but for the token.
    """
    counter = (token >> 10 << 8) | (token & 255)  # tile * 256 + lane
    zero = counter * 0
    w0, w1, w2, w3 = philox4x32(counter, zero + position, zero + nonce, zero + STREAM, zero + low, zero + high)
    number = (token >> 8) & 3
    return tl.where(number == 0, w0, tl.where(number == 1, w1, tl.where(number == 2, w2, w3)))


# ---------------------------------------------------------------- torch twins, on any device


def polylog_reference(f: torch.Tensor, e: torch.Tensor) -> torch.Tensor:
    """`funcspec.noise.polylog` in torch: float32 in, float32 out."""
    z = f * f
    y = torch.full_like(f, LOG_COEFFICIENTS[0])
    for coefficient in LOG_COEFFICIENTS[1:]:
        y.mul_(f).add_(coefficient)
    y.mul_(f).mul_(z).add_(e * LN2_LOW)
    y.sub_(z.mul_(0.5))
    return y.add_(f).add_(e * LN2_HIGH)


def split_reference(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """`funcspec.noise.split` in torch: positive, normal float32 in, two float32 out."""
    bits = x.view(torch.int32)
    exponent = (bits >> 23).bitwise_and_(255).sub_(126)
    mantissa = (bits & 0x007FFFFF).bitwise_or_(0x3F000000).view(torch.float32)
    low = mantissa < SQRT_HALF
    return torch.where(low, mantissa + mantissa, mantissa).sub_(1.0), exponent.sub_(low.to(torch.int32)).float()


def uniform_reference(words: torch.Tensor) -> torch.Tensor:
    """`funcspec.noise.uniform` in torch: words as int64 in [0, 2^32), float32 out."""
    odd = words | 1
    return torch.where(odd < 1 << 24, odd, odd & 0xFFFFFF00).float().mul_(2.0**-32)


def gumbel_reference(words: torch.Tensor) -> torch.Tensor:
    """`funcspec.noise.gumbel` in torch: words as int64 in [0, 2^32), float32 out."""
    u = uniform_reference(words)
    small = u <= 1 - SQRT_HALF
    f, e = split_reference(torch.where(small, 0.5, 1.0 - u))
    exponential = 0.0 - polylog_reference(torch.where(small, -u, f), e.masked_fill_(small, 0.0))
    return 0.0 - polylog_reference(*split_reference(exponential))


def philox4x32_reference(
    c0: torch.Tensor, c1: torch.Tensor, c2: torch.Tensor, c3: torch.Tensor, k0: torch.Tensor, k1: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """`funcspec.noise.philox4x32` in torch: words as int64 in [0, 2^32) of shapes that broadcast.

    A product of two 32-bit words wraps to its low 64 bits in int64, so both halves are right although its sign may not be.
    """
    for _ in range(10):
        product_a, product_b = c0 * 0xD2511F53, c2 * 0xCD9E8D57
        c0 = ((product_b >> 32) ^ (c1 ^ k0)).bitwise_and_(_WORD)
        c2 = ((product_a >> 32) ^ (c3 ^ k1)).bitwise_and_(_WORD)
        c1, c3 = product_b.bitwise_and_(_WORD), product_a.bitwise_and_(_WORD)
        k0, k1 = (k0 + 0x9E3779B9) & _WORD, (k1 + 0xBB67AE85) & _WORD
    return c0, c1, c2, c3


# ---------------------------------------------------------------- gumbel_from_words_


@jit
def gumbel_from_words_kernel(words_ptr, out_noise_ptr, num_words, BLOCK: tl.constexpr):
    offset = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = offset < num_words
    words = tl.load(words_ptr + offset, mask=inside, other=0).to(tl.uint32, bitcast=True)
    tl.store(out_noise_ptr + offset, gumbel(words), mask=inside)


def _check_gumbel_from_words(words: torch.Tensor, out_noise: torch.Tensor) -> None:
    _check_vector("words", words, torch.int32, words.numel())
    _check_vector("out_noise", out_noise, torch.float32, words.numel())


def _check_vector(name: str, array: torch.Tensor, dtype: torch.dtype, length: int) -> None:
    if array.dtype != dtype:
        refuse(name, str(dtype), array.dtype, f"pass {dtype}", ArgumentTypeError)
    if array.dim() != 1 or array.shape[0] != length:
        refuse(name, f"an array of shape ({length},)", f"shape {tuple(array.shape)}", "pass arrays of one length")


def _launch_gumbel_from_words(*, words: torch.Tensor, out_noise: torch.Tensor) -> None:
    _check_gumbel_from_words(words, out_noise)
    if words.shape[0]:
        grid = (triton.cdiv(words.shape[0], _BLOCK),)
        gumbel_from_words_kernel[grid](words, out_noise, words.shape[0], BLOCK=_BLOCK, enable_fp_fusion=False)


def gumbel_from_words_reference_(*, words: torch.Tensor, out_noise: torch.Tensor) -> None:
    """Specify `gumbel_from_words_` in plain torch."""
    _check_gumbel_from_words(words, out_noise)
    out_noise.copy_(gumbel_reference(words.long() & _WORD))


gumbel_from_words_ = Op(
    "gumbel_from_words", writes=("out_noise",), triton=_launch_gumbel_from_words, reference=gumbel_from_words_reference_
)
"""Turn noise words into Gumbel noise: `funcspec.noise.gumbel`.

Args:
    words: [N] int32 bit patterns of the words.
    out_noise: [N] float32, written.

Raises:
    ArgumentError: shapes that do not fit.
    ArgumentTypeError: another dtype.
"""


# ---------------------------------------------------------------- noise_words_


@jit
def noise_words_kernel(
    seed_ptr,  # [N, 2] int32 bit patterns
    positions_ptr,  # [N] int32
    nonces_ptr,  # [N] int32
    token_ids_ptr,  # [N] int32
    out_words_ptr,  # [N] int32, written
    num_words,
    STREAM: tl.constexpr,
    BLOCK: tl.constexpr,
):
    offset = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = offset < num_words
    low = tl.load(seed_ptr + offset * 2, mask=inside, other=0).to(tl.uint32, bitcast=True)
    high = tl.load(seed_ptr + offset * 2 + 1, mask=inside, other=0).to(tl.uint32, bitcast=True)
    position = tl.load(positions_ptr + offset, mask=inside, other=0).to(tl.uint32, bitcast=True)
    nonce = tl.load(nonces_ptr + offset, mask=inside, other=0).to(tl.uint32, bitcast=True)
    token = tl.load(token_ids_ptr + offset, mask=inside, other=0).to(tl.uint32, bitcast=True)
    words = token_word(token, position, nonce, STREAM, low, high)
    tl.store(out_words_ptr + offset, words.to(tl.int32, bitcast=True), mask=inside)


def _check_noise_words(
    seed: torch.Tensor, positions: torch.Tensor, nonces: torch.Tensor, stream: int, token_ids: torch.Tensor, out_words: torch.Tensor
) -> None:
    check_stream(stream)
    length = token_ids.numel()
    _check_vector("seed", seed.reshape(-1), torch.int32, 2 * length)
    for name, array in (("positions", positions), ("nonces", nonces), ("token_ids", token_ids), ("out_words", out_words)):
        _check_vector(name, array, torch.int32, length)


def _launch_noise_words(
    *,
    seed: torch.Tensor,
    positions: torch.Tensor,
    nonces: torch.Tensor,
    stream: int,
    token_ids: torch.Tensor,
    out_words: torch.Tensor,
) -> None:
    _check_noise_words(seed, positions, nonces, stream, token_ids, out_words)
    length = token_ids.shape[0]
    if length:
        noise_words_kernel[(triton.cdiv(length, _BLOCK),)](
            seed,
            positions,
            nonces,
            token_ids,
            out_words,
            length,
            STREAM=stream,  # pyright: ignore[reportArgumentType]
            BLOCK=_BLOCK,  # pyright: ignore[reportArgumentType]
        )


def noise_words_reference_(
    *,
    seed: torch.Tensor,
    positions: torch.Tensor,
    nonces: torch.Tensor,
    stream: int,
    token_ids: torch.Tensor,
    out_words: torch.Tensor,
) -> None:
    """Specify `noise_words_` in plain torch."""
    _check_noise_words(seed, positions, nonces, stream, token_ids, out_words)
    key = seed.reshape(-1, 2).long() & _WORD
    token = token_ids.long()
    counter = token // 1024 * 256 + token % 256
    stream_word = torch.full_like(token[:1], stream)
    words = philox4x32_reference(counter, positions.long() & _WORD, nonces.long() & _WORD, stream_word, key[:, 0], key[:, 1])
    out_words.copy_(torch.stack(words).gather(0, (token % 1024 // 256)[None])[0])


noise_words_ = Op("noise_words", writes=("out_words",), triton=_launch_noise_words, reference=noise_words_reference_)
"""Noise words of tokens: `funcspec.noise.noise_words`, every entry with its own key and counter.

Args:
    seed: [N, 2] int32 bit patterns (low, high), see `funcspec.noise.split_seed`.
    positions: [N] int32.
    nonces: [N] int32; 0 for TARGET.
    stream: DRAFT, ACCEPT or TARGET.
    token_ids: [N] int32 target ids, at least 0.
    out_words: [N] int32 bit patterns, written.

Raises:
    ArgumentError: shapes that do not fit, unknown stream.
    ArgumentTypeError: another dtype.
"""
