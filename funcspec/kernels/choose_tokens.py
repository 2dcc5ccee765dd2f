"""Choose one token for every row of logits: greedy, or sampled with exact Gumbel noise. `funcspec.noise.choose` specifies it."""

import math

import numpy as np
import torch
from numpy.typing import NDArray

from funcspec.constants import NO_TOKEN
from funcspec.errors import ArgumentTypeError, refuse
from funcspec.kernels._triton import jit, tl
from funcspec.kernels.noise import gumbel, philox4x32, token_word, uniform
from funcspec.kernels.op import Op, next_power_of_2
from funcspec.noise import TARGET, TILE, Floats, as_words, check_stream, choose, choose_rows

_LOGIT_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_INDEX_DTYPES = (torch.int32, torch.int64)

_BLOCK_ELEMENTS = 1 << 16  # logits that are worked on at a time, so that temporaries stay in cache


def choose_tokens_partials(vocab_size: int) -> int:
    """Most parts that a row is cut into: the width P of the scratch buffers of `choose_tokens_`.

    Args:
        vocab_size: V, columns of the logits.

    Raises:
        ArgumentError: V below 1.
    """
    if vocab_size < 1:
        refuse("vocab_size", "at least 1", vocab_size, "pass the number of columns of the logits")
    return -(-vocab_size // TILE)


def _tiles_per_part(count: int, tiles: int) -> int:
    """Few rows want many programs, many rows long parts in which most tiles are skipped (measured on an H200)."""
    programs = count * tiles
    return 1 if programs <= 4096 else 4 if programs <= 16384 else 16


# ---------------------------------------------------------------- Triton


@jit
def _load_logits(row_ptr, token, vocab_size):
    """float32 logits with NaN, +inf and places beyond the vocabulary made -inf, and which of them were invalid."""
    raw = tl.load(row_ptr + token, mask=token < vocab_size, other=float("-inf")).to(tl.float32)
    invalid = (raw != raw) | (raw == float("inf"))
    return tl.where(invalid, float("-inf"), raw), invalid


@jit
def _load_ids(token_ids_ptr, token, vocab_size, HAS_MAP: tl.constexpr):
    """Target ids of columns; 2^31 - 1 beyond the vocabulary, so that no such place ever wins a tie."""
    if HAS_MAP:
        return tl.load(token_ids_ptr + token, mask=token < vocab_size, other=2147483647)
    else:
        return tl.where(token < vocab_size, token, 2147483647)


@jit
def _tile_words(counter, i0, i1, i2, i3, position, nonce, low, high, STREAM: tl.constexpr, HAS_MAP: tl.constexpr):
    """Noise words of a tile: one Philox call where columns are target ids, one a vector where a map scatters them."""
    if HAS_MAP:
        w0 = token_word(i0.to(tl.uint32, bitcast=True), position, nonce, STREAM, low, high)
        w1 = token_word(i1.to(tl.uint32, bitcast=True), position, nonce, STREAM, low, high)
        w2 = token_word(i2.to(tl.uint32, bitcast=True), position, nonce, STREAM, low, high)
        w3 = token_word(i3.to(tl.uint32, bitcast=True), position, nonce, STREAM, low, high)
        return w0, w1, w2, w3
    else:
        c0 = counter.to(tl.uint32)
        zero = c0 * 0
        return philox4x32(c0, zero + position, zero + nonce, zero + STREAM, zero + low, zero + high)


@jit
def _is_hopeless(l0, l1, l2, l3, w0, w1, w2, w3, temperature, best):
    """Whether no token of a tile can reach the best score so far (1 or 0); if in doubt, 0.

    Noise is at most -log(u), so a token can reach it only if u <= exp(logit / temperature - best). The margin covers every
    rounding, that of the cheap division included; the clamps keep infinities out.
    """
    scale = 1.0 / temperature
    base = tl.minimum(tl.maximum(best, -1.0e30), 3.0e38)
    limit = base - (0.01 + 1e-6 * tl.abs(base))
    lost = (uniform(w0) > tl.exp(tl.minimum(l0 * scale - limit, 0.0))) & (uniform(w1) > tl.exp(tl.minimum(l1 * scale - limit, 0.0)))
    lost = lost & (uniform(w2) > tl.exp(tl.minimum(l2 * scale - limit, 0.0)))
    lost = lost & (uniform(w3) > tl.exp(tl.minimum(l3 * scale - limit, 0.0)))
    # Below the clamp, and while nothing but -inf was seen, every tile counts: even such rows have their lowest id.
    return tl.where(best < -1.0e30, 0, tl.min(lost.to(tl.int32), axis=0))


@jit
def _better(l0, l1, l2, l3, i0, i1, i2, i3, best, winner):
    """The best score so far and its lowest id, after four more vectors of scores and ids."""
    top = tl.max(tl.maximum(tl.maximum(l0, l1), tl.maximum(l2, l3)), axis=0)
    tied_01 = tl.minimum(tl.where(l0 == top, i0, 2147483647), tl.where(l1 == top, i1, 2147483647))
    tied_23 = tl.minimum(tl.where(l2 == top, i2, 2147483647), tl.where(l3 == top, i3, 2147483647))
    lowest = tl.min(tl.minimum(tied_01, tied_23), axis=0)
    wins = (top > best) | ((top == best) & (lowest < winner))
    return tl.where(wins, top, best), tl.where(wins, lowest, winner)


@jit
def choose_tokens_kernel(
    logits_ptr,  # [T, V]
    logits_indices_ptr,  # [T] or anything
    token_rows_ptr,  # [Tflat] int32
    positions_ptr,  # [Tflat]
    temperature_ptr,  # [R] float32
    seed_ptr,  # [R, 2] int32
    nonce_length_ptr,  # [R] int32 or anything
    token_ids_ptr,  # [V] int32 or anything
    scratch_scores_ptr,  # [T, P] float32, written
    scratch_tokens_ptr,  # [T, P] int32, written
    scratch_bad_ptr,  # [T, P] int32, written
    logits_stride,
    vocab_size,
    num_parts,
    position_offset,
    STREAM: tl.constexpr,
    HAS_INDICES: tl.constexpr,
    HAS_NONCE: tl.constexpr,
    HAS_MAP: tl.constexpr,
    TILES: tl.constexpr,
):
    t = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    flat = t
    if HAS_INDICES:
        flat = tl.load(logits_indices_ptr + t).to(tl.int64)
    row = tl.load(token_rows_ptr + flat, mask=flat >= 0, other=-1).to(tl.int64)
    if row >= 0:
        temperature = tl.load(temperature_ptr + row)
        position = (tl.load(positions_ptr + flat) + position_offset).to(tl.uint32)
        low = tl.load(seed_ptr + row * 2).to(tl.uint32, bitcast=True)
        high = tl.load(seed_ptr + row * 2 + 1).to(tl.uint32, bitcast=True)
        nonce = tl.full((), 0, tl.uint32)
        if HAS_NONCE:
            nonce = (tl.load(nonce_length_ptr + row) - 1).to(tl.uint32, bitcast=True)
        row_ptr = logits_ptr + t * logits_stride
        lane = tl.arange(0, 256)
        best = tl.full((), float("-inf"), tl.float32)
        winner = tl.full((), 2147483647, tl.int32)
        bad = tl.full((256,), 0, tl.int32)
        for step in range(TILES):
            tile = part * TILES + step
            token = tile * 1024 + lane
            l0, bad0 = _load_logits(row_ptr, token, vocab_size)
            l1, bad1 = _load_logits(row_ptr, token + 256, vocab_size)
            l2, bad2 = _load_logits(row_ptr, token + 512, vocab_size)
            l3, bad3 = _load_logits(row_ptr, token + 768, vocab_size)
            i0 = _load_ids(token_ids_ptr, token, vocab_size, HAS_MAP)
            i1 = _load_ids(token_ids_ptr, token + 256, vocab_size, HAS_MAP)
            i2 = _load_ids(token_ids_ptr, token + 512, vocab_size, HAS_MAP)
            i3 = _load_ids(token_ids_ptr, token + 768, vocab_size, HAS_MAP)
            bad = bad | (bad0 | bad1 | bad2 | bad3).to(tl.int32)
            if temperature > 0:
                w0, w1, w2, w3 = _tile_words(tile * 256 + lane, i0, i1, i2, i3, position, nonce, low, high, STREAM, HAS_MAP)
                hopeless = 0
                if TILES > 1:  # the first tile is never skipped
                    hopeless = _is_hopeless(l0, l1, l2, l3, w0, w1, w2, w3, temperature, best)
                if hopeless == 0:
                    l0 = tl.div_rn(l0, temperature) + gumbel(w0)
                    l1 = tl.div_rn(l1, temperature) + gumbel(w1)
                    l2 = tl.div_rn(l2, temperature) + gumbel(w2)
                    l3 = tl.div_rn(l3, temperature) + gumbel(w3)
                    best, winner = _better(l0, l1, l2, l3, i0, i1, i2, i3, best, winner)
            else:
                best, winner = _better(l0, l1, l2, l3, i0, i1, i2, i3, best, winner)
        place = t * num_parts + part
        tl.store(scratch_scores_ptr + place, best)
        tl.store(scratch_tokens_ptr + place, winner)
        tl.store(scratch_bad_ptr + place, tl.max(bad, axis=0))


@jit
def choose_tokens_reduce_kernel(
    logits_indices_ptr,  # [T] or anything
    token_rows_ptr,  # [Tflat] int32
    scratch_scores_ptr,  # [T, P] float32
    scratch_tokens_ptr,  # [T, P] int32
    scratch_bad_ptr,  # [T, P] int32
    out_tokens_ptr,  # [T] int32, written
    out_bad_ptr,  # [T] int32, written
    num_parts,
    HAS_INDICES: tl.constexpr,
    BLOCK: tl.constexpr,
):
    t = tl.program_id(0).to(tl.int64)
    flat = t
    if HAS_INDICES:
        flat = tl.load(logits_indices_ptr + t).to(tl.int64)
    row = tl.load(token_rows_ptr + flat, mask=flat >= 0, other=-1)
    part = tl.arange(0, BLOCK)
    inside = part < tl.where(row >= 0, num_parts, 0)
    scores = tl.load(scratch_scores_ptr + t * num_parts + part, mask=inside, other=float("-inf"))
    tokens = tl.load(scratch_tokens_ptr + t * num_parts + part, mask=inside, other=2147483647)
    bad = tl.load(scratch_bad_ptr + t * num_parts + part, mask=inside, other=0)
    best = tl.max(scores, axis=0)
    winner = tl.min(tl.where(scores == best, tokens, 2147483647), axis=0)
    any_bad = tl.where(best == float("-inf"), 1, tl.max(bad, axis=0))
    tl.store(out_tokens_ptr + t, tl.where(row >= 0, winner, -1))
    tl.store(out_bad_ptr + t, tl.where(row >= 0, any_bad, 0))


def _launch_choose_tokens(
    *,
    logits: torch.Tensor,
    logits_indices: torch.Tensor | None,
    token_rows: torch.Tensor,
    positions: torch.Tensor,
    temperature: torch.Tensor,
    seed: torch.Tensor,
    stream: int,
    nonce_length: torch.Tensor | None,
    token_ids: torch.Tensor | None,
    position_offset: int = 0,
    out_tokens: torch.Tensor,
    out_bad: torch.Tensor,
    scratch_scores: torch.Tensor,
    scratch_tokens: torch.Tensor,
    scratch_bad: torch.Tensor,
) -> None:
    _check_inputs(logits, logits_indices, token_rows, positions, temperature, seed, stream, nonce_length, token_ids)
    _check_outputs(logits, out_tokens, out_bad, scratch_scores, scratch_tokens, scratch_bad)
    count, vocab_size = logits.shape
    if count == 0:
        return
    tiles = scratch_scores.shape[1]
    tiles_per_part = _tiles_per_part(count, tiles)
    parts = -(-tiles // tiles_per_part)
    choose_tokens_kernel[(count, parts)](
        logits,
        token_rows if logits_indices is None else logits_indices,
        token_rows,
        positions,
        temperature,
        seed,
        token_rows if nonce_length is None else nonce_length,
        token_rows if token_ids is None else token_ids,
        scratch_scores,
        scratch_tokens,
        scratch_bad,
        logits.stride(0),
        vocab_size,
        parts,
        position_offset,
        STREAM=stream,
        HAS_INDICES=logits_indices is not None,
        HAS_NONCE=nonce_length is not None,
        HAS_MAP=token_ids is not None,
        TILES=tiles_per_part,
        num_warps=4,
        enable_fp_fusion=False,
    )
    choose_tokens_reduce_kernel[(count,)](
        token_rows if logits_indices is None else logits_indices,
        token_rows,
        scratch_scores,
        scratch_tokens,
        scratch_bad,
        out_tokens,
        out_bad,
        parts,
        HAS_INDICES=logits_indices is not None,
        BLOCK=next_power_of_2(parts),
        num_warps=1,
    )


# ---------------------------------------------------------------- host checks


def _check_array(name: str, array: torch.Tensor, dtypes: tuple[torch.dtype, ...], shape: tuple[int, ...] | None) -> None:
    if array.dtype not in dtypes:
        refuse(name, " or ".join(map(str, dtypes)), array.dtype, "convert it once, outside the loop", ArgumentTypeError)
    if array.dim() != 1 if shape is None else array.shape != shape:
        expected = "a 1-D array" if shape is None else f"an array of shape {shape}"
        refuse(name, expected, f"shape {tuple(array.shape)}", "pass arrays of one batch")


def _check_inputs(
    logits: torch.Tensor,
    logits_indices: torch.Tensor | None,
    token_rows: torch.Tensor,
    positions: torch.Tensor,
    temperature: torch.Tensor,
    seed: torch.Tensor,
    stream: int,
    nonce_length: torch.Tensor | None,
    token_ids: torch.Tensor | None,
) -> None:
    if logits.dtype not in _LOGIT_DTYPES:
        refuse("logits", "float32, bfloat16 or float16", logits.dtype, "let the model return one of these", ArgumentTypeError)
    if logits.dim() != 2 or logits.shape[1] < 1:
        refuse("logits", "shape [T, V] with V >= 1", f"shape {tuple(logits.shape)}", "pass rows of logits")
    count, vocab_size = logits.shape
    _check_array("token_rows", token_rows, (torch.int32,), None)
    if logits_indices is not None:
        _check_array("logits_indices", logits_indices, _INDEX_DTYPES, (count,))
    elif token_rows.shape[0] < count:
        refuse("token_rows", f"at least {count} entries", token_rows.shape[0], "pass the batch's rows, or logits_indices")
    _check_array("positions", positions, _INDEX_DTYPES, tuple(token_rows.shape))
    _check_array("temperature", temperature, (torch.float32,), None)
    rows = temperature.shape[0]
    _check_array("seed", seed, (torch.int32,), (rows, 2))
    check_stream(stream)
    if nonce_length is not None:
        _check_array("nonce_length", nonce_length, (torch.int32,), (rows,))
        if stream == TARGET:
            refuse("nonce_length", "None for stream TARGET", "an array", "TARGET noise depends on the position alone")
    if token_ids is not None:
        _check_array("token_ids", token_ids, (torch.int32,), (vocab_size,))


def _check_outputs(
    logits: torch.Tensor,
    out_tokens: torch.Tensor,
    out_bad: torch.Tensor,
    scratch_scores: torch.Tensor,
    scratch_tokens: torch.Tensor,
    scratch_bad: torch.Tensor,
) -> None:
    count, vocab_size = logits.shape
    parts = choose_tokens_partials(vocab_size)
    _check_array("out_tokens", out_tokens, (torch.int32,), (count,))
    _check_array("out_bad", out_bad, (torch.int32,), (count,))
    _check_array("scratch_scores", scratch_scores, (torch.float32,), (count, parts))
    _check_array("scratch_tokens", scratch_tokens, (torch.int32,), (count, parts))
    _check_array("scratch_bad", scratch_bad, (torch.int32,), (count, parts))


# ---------------------------------------------------------------- reference


def choose_tokens_reference_(
    *,
    logits: torch.Tensor,
    logits_indices: torch.Tensor | None,
    token_rows: torch.Tensor,
    positions: torch.Tensor,
    temperature: torch.Tensor,
    seed: torch.Tensor,
    stream: int,
    nonce_length: torch.Tensor | None,
    token_ids: torch.Tensor | None,
    position_offset: int = 0,
    out_tokens: torch.Tensor,
    out_bad: torch.Tensor,
    scratch_scores: torch.Tensor,
    scratch_tokens: torch.Tensor,
    scratch_bad: torch.Tensor,
) -> None:
    """Do what `choose_tokens_` says on the host: one maximum for greedy rows, pruned exact noise for the others.

    The scratch buffers are checked but not used.
    """
    _check_inputs(logits, logits_indices, token_rows, positions, temperature, seed, stream, nonce_length, token_ids)
    _check_outputs(logits, out_tokens, out_bad, scratch_scores, scratch_tokens, scratch_bad)
    count = logits.shape[0]
    if count == 0:
        return
    rows: list[int] = token_rows.tolist()
    if logits_indices is not None:
        rows = [rows[flat] if flat >= 0 else -1 for flat in logits_indices.tolist()]
    temperatures: list[float] = temperature.tolist()
    maxima, places = logits.max(dim=1)  # NaN and +inf win, the first of equals is taken
    largest: list[float] = maxima.tolist()
    tokens: list[int] = places.tolist()
    bad = [0] * count
    ids = None if token_ids is None else token_ids.cpu().numpy()
    sampled: list[int] = []
    for t in range(count):
        row = rows[t]
        if row < 0:
            tokens[t] = NO_TOKEN
        elif temperatures[row] > 0:
            sampled.append(t)
        elif ids is not None or not math.isfinite(largest[t]):
            tokens[t], bad[t] = choose(logits[t].float().cpu().numpy(), 0.0, 0, 0, 0, stream, ids)
    if sampled:
        flat = np.asarray(sampled) if logits_indices is None else logits_indices.cpu().numpy()[sampled]
        row_of = np.asarray([rows[t] for t in sampled])
        key = seed.cpu().numpy()[row_of]
        nonce = np.zeros_like(row_of) if nonce_length is None else nonce_length.cpu().numpy()[row_of] - 1
        counters = np.stack([as_words(x) for x in (key[:, 0], key[:, 1], positions.cpu().numpy()[flat] + position_offset, nonce)], axis=1)
        heat = temperature.cpu().numpy()[row_of][:, None]
        step = max(1, _BLOCK_ELEMENTS // logits.shape[1])
        for start in range(0, len(sampled), step):
            chosen = sampled[start : start + step]
            block = logits[chosen[0] : chosen[0] + 1] if len(chosen) == 1 else logits[chosen]
            sane, invalid = _sanitise(block.float().cpu().numpy(), [largest[t] for t in chosen])
            part = slice(start, start + step)
            won, empty = choose_rows(sane, heat[part], counters[part], stream, ids)
            for t, token, flag in zip(chosen, won.tolist(), (invalid | empty).tolist(), strict=True):
                tokens[t], bad[t] = token, flag
    for out, values in ((out_tokens, tokens), (out_bad, bad)):
        if out.is_cuda:
            out.copy_(torch.tensor(values))
        else:
            out.numpy()[:] = values  # a third of the time of a copy from a new tensor


def _sanitise(logits: Floats, largest: list[float]) -> tuple[Floats, NDArray[np.bool_]]:
    """NaN and +inf made -inf, and which rows had any; `largest` is each row's maximum, where NaN beats all."""
    if all(map(math.isfinite, largest)):
        return logits, np.zeros(len(largest), dtype=np.bool_)
    invalid = np.isnan(logits) | (logits == np.inf)
    return np.where(invalid, np.float32(-np.inf), logits), invalid.any(axis=1)


choose_tokens_ = Op(
    "choose_tokens",
    writes=("out_tokens", "out_bad", "scratch_scores", "scratch_tokens", "scratch_bad"),
    triton=_launch_choose_tokens,
    reference=choose_tokens_reference_,
    strided=("logits",),
)
"""Choose one token for every row of logits, to the bit of `funcspec.noise.choose`.

Logits row t belongs to flat token i = logits_indices[t] (or t), whose state row is token_rows[i]. Where i or the row is
negative, nothing else is read, out_tokens is NO_TOKEN and out_bad 0. Noise has the key seed[row] and the counter
(token, positions[i] + position_offset, nonce_length[row] - 1 or 0, stream). Rows at temperature 0 are greedy and do no noise work.

Args:
    logits: [T, V] float32, bfloat16 or float16; any row stride, columns consecutive.
    logits_indices: [T] int32 or int64, or None.
    token_rows: [Tflat] int32, -1 for padding.
    positions: [Tflat] int32 or int64.
    temperature: [R] float32, 0 or positive and finite.
    seed: [R, 2] int32 bit patterns, see `funcspec.noise.split_seed`.
    stream: DRAFT, ACCEPT or TARGET.
    nonce_length: [R] int32 committed lengths at the start of the round, or None for nonce 0; None for TARGET.
    token_ids: [V] int32 target id of each column, or None where columns are target ids.
    position_offset: what to add to positions; 1 for drafts whose positions lag behind those of the tokens they are fed.
    out_tokens: [T] int32 target ids, written.
    out_bad: [T] int32, written: 1 where a logit was NaN or +inf, or no score was above -inf.
    scratch_scores: [T, P] float32, P = choose_tokens_partials(V); contents undefined before and after.
    scratch_tokens: [T, P] int32, likewise.
    scratch_bad: [T, P] int32, likewise.

Raises:
    ArgumentError: shapes that do not fit, unknown stream, a nonce for TARGET.
    ArgumentTypeError: another dtype.
"""
