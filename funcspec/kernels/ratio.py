"""The ratio test: judge every draft of a round at once, from the target's logits and what the drafts were drawn from.

`funcspec.exact` is the specification. Leviathan et al. 2023, arXiv 2211.17192; Chen et al. 2023, arXiv 2302.01318.
"""

import numpy as np
import torch
from numpy.typing import NDArray

from funcspec import exact
from funcspec.errors import refuse
from funcspec.exact import ACCEPTED, REJECTED, UNDECIDED
from funcspec.kernels._checks import check_rows
from funcspec.kernels._triton import jit, tl
from funcspec.kernels.noise import token_word
from funcspec.kernels.normalisers import BLOCK_ELEMENTS, PART, check_buffer, check_logits, load_scores, score_weights, sum_parts, sum_tile
from funcspec.kernels.op import Op, next_power_of_2
from funcspec.noise import TILE, as_words

# ---------------------------------------------------------------- Triton


@jit
def _count_drafts(
    row,
    tokens_ptr,
    tokens_stride,
    num_tokens_ptr,
    num_draft_ptr,
    num_drafted_ptr,
    is_live_ptr,
    vocab_size,
    WIDTH: tl.constexpr,
    LANES: tl.constexpr,
):
    """Drafts of a row up to its first placeholder; 0 for idle rows."""
    lane = tl.arange(0, LANES)
    count = tl.minimum(tl.minimum(tl.load(num_draft_ptr + row), tl.load(num_drafted_ptr + row)), WIDTH - 1)
    count = tl.where(tl.load(is_live_ptr + row) != 0, count, 0)
    draft = tl.load(tokens_ptr + row * tokens_stride + tl.load(num_tokens_ptr + row) + lane, mask=lane < count, other=-1)
    return tl.min(tl.where((draft < 0) | (draft >= vocab_size), tl.minimum(lane, count), LANES), axis=0)


@jit
def judge_drafts_kernel(
    logits_ptr,  # [R * W, V]
    temperature_ptr,  # [R] float32
    tokens_ptr,  # [R, L] int32
    num_tokens_ptr,  # [R] int32
    num_draft_ptr,  # [R] int32
    num_drafted_ptr,  # [R] int32
    is_live_ptr,  # [R] int32
    scratch_ptr,  # [R * W, P, 4] int32, written
    logits_stride,
    tokens_stride,
    vocab_size,
    num_parts,
    WIDTH: tl.constexpr,
    LANES: tl.constexpr,
):
    t = tl.program_id(0).to(tl.int64)
    tile = tl.program_id(1)
    row = t // WIDTH
    temperature = tl.load(temperature_ptr + row)
    count = _count_drafts(
        row, tokens_ptr, tokens_stride, num_tokens_ptr, num_draft_ptr, num_drafted_ptr, is_live_ptr, vocab_size, WIDTH, LANES
    )
    if (t % WIDTH < count) & (temperature > 0):
        token = tile * 1024 + tl.arange(0, 1024)
        sum_tile(logits_ptr + t * logits_stride, token, token < vocab_size, temperature, scratch_ptr + (t * num_parts + tile) * 4)


@jit
def _threshold(p_exponent, p_mantissa, p_top, p_total, q_exponent, q_mantissa, q_top, q_total, is_point):
    """2^32 times the probability to keep a draft: `funcspec.exact.thresholds`. Scalars."""
    allowed = (p_mantissa > 0) & (p_total > 0)
    certain = is_point | (q_mantissa == 0) | (q_total == 0)
    q_mantissa = tl.where(certain, 8388608, q_mantissa).to(tl.int64)
    q_total = tl.where(certain, 1073741824, q_total).to(tl.int64)
    q_exponent = tl.where(certain, 30, q_exponent.to(tl.int64) - q_top)
    above = (p_mantissa.to(tl.int64) * q_total) >> 24
    below = (q_mantissa * p_total.to(tl.int64)) >> 24
    quotient = (above << 32) // tl.maximum(below, 1)
    shift = tl.where(allowed, p_exponent.to(tl.int64) - p_top - q_exponent, 0)
    raised = quotient << tl.minimum(tl.maximum(shift, 0), 2)
    lowered = quotient >> tl.minimum(tl.maximum(-shift, 0), 63)
    limit = tl.full((), 4294967296, tl.int64)
    return tl.where(allowed, tl.minimum(tl.where(shift < 0, lowered, raised), limit), 0)


@jit
def judge_drafts_reduce_kernel(
    logits_ptr,  # [R * W, V]
    positions_ptr,  # [R * W] int32
    temperature_ptr,  # [R] float32
    seed_ptr,  # [R, 2] int32
    tokens_ptr,  # [R, L] int32
    num_tokens_ptr,  # [R] int32
    num_draft_ptr,  # [R] int32
    num_drafted_ptr,  # [R] int32
    is_live_ptr,  # [R] int32
    is_point_ptr,  # [R] int32
    draft_logits_ptr,  # [R, K, V or 0] float32
    draft_normalisers_ptr,  # [R, K, 2] int32
    coins_ptr,  # [R * W] int32 or anything
    scratch_ptr,  # [R * W, P, 4] int32
    out_verdicts_ptr,  # [R * W] int32, written
    out_indices_ptr,  # [R * W] int32, written
    out_bad_ptr,  # [R * W] int32, written
    out_normalisers_ptr,  # [R * W, 2] int32, written
    logits_stride,
    tokens_stride,
    vocab_size,
    num_parts,
    HAS_LOGITS: tl.constexpr,
    HAS_COINS: tl.constexpr,
    WIDTH: tl.constexpr,
    LANES: tl.constexpr,
    BLOCK: tl.constexpr,
):
    t = tl.program_id(0).to(tl.int64)
    row = t // WIDTH
    place = t % WIDTH
    temperature = tl.load(temperature_ptr + row)
    count = _count_drafts(
        row, tokens_ptr, tokens_stride, num_tokens_ptr, num_draft_ptr, num_drafted_ptr, is_live_ptr, vocab_size, WIDTH, LANES
    )
    verdict = 2
    bad = 0
    p_top = 0
    p_total = 0
    if (place < count) & (temperature > 0):
        p_top, p_total, bad = sum_parts(scratch_ptr + t * num_parts * 4, num_parts, BLOCK)
        n = tl.load(num_tokens_ptr + row)
        draft = tl.load(tokens_ptr + row * tokens_stride + n + place).to(tl.int64)
        scores, _bad = load_scores(logits_ptr + t * logits_stride, draft, draft >= 0, temperature)
        p_exponent, p_mantissa = score_weights(scores)
        is_point = tl.load(is_point_ptr + row) != 0
        q_exponent = p_exponent * 0
        q_mantissa = p_exponent * 0
        q_top = p_exponent * 0
        q_total = p_exponent * 0
        if HAS_LOGITS:
            at = row * (WIDTH - 1) + place
            drawn, _drawn_bad = load_scores(draft_logits_ptr + at * vocab_size, draft, draft >= 0, temperature)
            q_exponent, q_mantissa = score_weights(drawn)
            q_top = tl.load(draft_normalisers_ptr + at * 2)
            q_total = tl.load(draft_normalisers_ptr + at * 2 + 1)
        threshold = _threshold(p_exponent, p_mantissa, p_top, p_total, q_exponent, q_mantissa, q_top, q_total, is_point)
        if HAS_COINS:
            coin = tl.load(coins_ptr + t).to(tl.uint32, bitcast=True)
        else:
            low = tl.load(seed_ptr + row * 2).to(tl.uint32, bitcast=True)
            high = tl.load(seed_ptr + row * 2 + 1).to(tl.uint32, bitcast=True)
            position = tl.load(positions_ptr + t).to(tl.uint32)
            coin = token_word(tl.full((), 0, tl.uint32), position, (n - 1).to(tl.uint32, bitcast=True), 2, low, high)
        verdict = (coin.to(tl.int64) < threshold).to(tl.int32)
        bad = tl.where(p_total == 0, 1, bad)
    tl.store(out_verdicts_ptr + t, verdict)
    tl.store(out_indices_ptr + t, tl.where((temperature > 0) & (place != count), -1, t).to(tl.int32))
    tl.store(out_bad_ptr + t, bad)
    tl.store(out_normalisers_ptr + t * 2, p_top)
    tl.store(out_normalisers_ptr + t * 2 + 1, p_total)


# ---------------------------------------------------------------- host


def check_proposals(
    logits: torch.Tensor,
    tokens: torch.Tensor,
    is_point: torch.Tensor,
    draft_logits: torch.Tensor,
    draft_normalisers: torch.Tensor,
) -> tuple[int, int]:
    """Refuse what does not fit together; return R and W."""
    check_logits("logits", logits)
    rows = tokens.shape[0]
    if draft_normalisers.dim() != 3 or draft_normalisers.shape[1] < 1:
        refuse("draft_normalisers", f"shape [{rows}, K, 2] with K >= 1", f"shape {tuple(draft_normalisers.shape)}", "pass [R, K, 2]")
    width = draft_normalisers.shape[1] + 1
    if logits.shape[0] != rows * width:
        refuse("logits", f"{rows} * {width} rows", logits.shape[0], "pass logits of every place of the window")
    check_buffer("draft_normalisers", draft_normalisers, torch.int32, (rows, width - 1, 2))
    vocab_size = logits.shape[1] if draft_logits.numel() else 0
    check_buffer("draft_logits", draft_logits, torch.float32, (rows, width - 1, vocab_size))
    check_rows(rows, ("is_point",), (is_point,))
    return rows, width


def _check(
    logits: torch.Tensor,
    positions: torch.Tensor,
    seed: torch.Tensor,
    tokens: torch.Tensor,
    by_row: tuple[torch.Tensor, ...],
    proposals: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    coins: torch.Tensor | None,
    by_place: tuple[torch.Tensor, ...],
    scratch: torch.Tensor,
) -> tuple[int, int]:
    rows, width = check_proposals(logits, tokens, *proposals)
    check_rows(rows, ("temperature", "num_tokens", "num_draft", "num_drafted", "is_live"), by_row)
    check_buffer("positions", positions, torch.int32, (rows * width,))
    check_buffer("seed", seed, torch.int32, (rows, 2))
    if coins is not None:
        check_buffer("coins", coins, torch.int32, (rows * width,))
    for name, array in zip(("out_verdicts", "out_indices", "out_bad"), by_place[:3], strict=True):
        check_buffer(name, array, torch.int32, (rows * width,))
    check_buffer("out_normalisers", by_place[3], torch.int32, (rows * width, 2))
    check_buffer("scratch", scratch, torch.int32, (rows * width, -(-logits.shape[1] // TILE), PART))
    return rows, width


def _launch_judge_drafts(
    *,
    logits: torch.Tensor,
    positions: torch.Tensor,
    temperature: torch.Tensor,
    seed: torch.Tensor,
    tokens: torch.Tensor,
    num_tokens: torch.Tensor,
    num_draft: torch.Tensor,
    num_drafted: torch.Tensor,
    is_live: torch.Tensor,
    is_point: torch.Tensor,
    draft_logits: torch.Tensor,
    draft_normalisers: torch.Tensor,
    coins: torch.Tensor | None,
    out_verdicts: torch.Tensor,
    out_indices: torch.Tensor,
    out_bad: torch.Tensor,
    out_normalisers: torch.Tensor,
    scratch: torch.Tensor,
) -> None:
    by_row = (temperature, num_tokens, num_draft, num_drafted, is_live)
    proposals = (is_point, draft_logits, draft_normalisers)
    by_place = (out_verdicts, out_indices, out_bad, out_normalisers)
    rows, width = _check(logits, positions, seed, tokens, by_row, proposals, coins, by_place, scratch)
    parts, lanes = scratch.shape[1], next_power_of_2(width)
    sizes = (logits.stride(0), tokens.stride(0), logits.shape[1], parts)
    judge_drafts_kernel[(rows * width, parts)](
        logits, *by_row[:1], tokens, *by_row[1:], scratch, *sizes, WIDTH=width, LANES=lanes, num_warps=4, enable_fp_fusion=False
    )
    judge_drafts_reduce_kernel[(rows * width,)](
        logits,
        positions,
        temperature,
        seed,
        tokens,
        num_tokens,
        num_draft,
        num_drafted,
        is_live,
        *proposals,
        positions if coins is None else coins,
        scratch,
        *by_place,
        *sizes,
        HAS_LOGITS=draft_logits.numel() > 0,
        HAS_COINS=coins is not None,
        WIDTH=width,
        LANES=lanes,
        BLOCK=next_power_of_2(parts),
        num_warps=1,
        enable_fp_fusion=False,
    )


# ---------------------------------------------------------------- reference


def _drafts_to_judge(
    tokens: torch.Tensor, by_row: tuple[torch.Tensor, ...], vocab_size: int, most: int
) -> tuple[list[int], NDArray[np.int64], NDArray[np.int64]]:
    """Drafts of each row up to its first placeholder; the (row, place) of those that are judged, and their ids."""
    temperature, num_tokens, num_draft, num_drafted, is_live = (array.tolist() for array in by_row)
    counts, judged, ids = [], [], []
    for row, n in enumerate(num_tokens):
        count = min(num_draft[row], num_drafted[row], most) if is_live[row] else 0
        drafts = tokens[row, n : n + count].tolist()
        count = next((place for place, token in enumerate(drafts) if not 0 <= token < vocab_size), count)
        counts.append(count)
        if temperature[row] > 0:
            judged += [(row, place) for place in range(count)]
            ids += drafts[:count]
    return counts, np.array(judged, np.int64).reshape(-1, 2), np.array(ids, np.int64)


def judge_drafts_reference_(
    *,
    logits: torch.Tensor,
    positions: torch.Tensor,
    temperature: torch.Tensor,
    seed: torch.Tensor,
    tokens: torch.Tensor,
    num_tokens: torch.Tensor,
    num_draft: torch.Tensor,
    num_drafted: torch.Tensor,
    is_live: torch.Tensor,
    is_point: torch.Tensor,
    draft_logits: torch.Tensor,
    draft_normalisers: torch.Tensor,
    coins: torch.Tensor | None,
    out_verdicts: torch.Tensor,
    out_indices: torch.Tensor,
    out_bad: torch.Tensor,
    out_normalisers: torch.Tensor,
    scratch: torch.Tensor,
) -> None:
    """Do what `judge_drafts_` says on the host; the workspace is checked but not used."""
    by_row = (temperature, num_tokens, num_draft, num_drafted, is_live)
    by_place = (out_verdicts, out_indices, out_bad, out_normalisers)
    rows, width = _check(logits, positions, seed, tokens, by_row, (is_point, draft_logits, draft_normalisers), coins, by_place, scratch)
    counts, judged, ids = _drafts_to_judge(tokens, by_row, logits.shape[1], width - 1)
    place = torch.arange(rows * width).view(rows, width)
    wanted = (temperature.cpu() == 0)[:, None] | (place % width == torch.tensor(counts)[:, None])
    out_indices.copy_(torch.where(wanted, place, -1).view(-1))
    out_verdicts.fill_(UNDECIDED)
    out_bad.zero_()
    out_normalisers.zero_()
    if not len(judged):
        return
    row, at = judged[:, 0], judged[:, 0] * width + judged[:, 1]
    heat = temperature.cpu().numpy()[row][:, None]
    plain = logits[torch.from_numpy(at).to(logits.device)].float().cpu().numpy()
    scores = exact.sane_scores(plain, heat)
    step = max(1, BLOCK_ELEMENTS // logits.shape[1])
    totals = np.concatenate([exact.normalisers(scores[start : start + step]) for start in range(0, len(at), step)])
    every = np.arange(len(at))
    drawn, sums = np.full(len(at), np.float32(-np.inf)), np.zeros((len(at), 2), np.int32)
    if draft_logits.numel():
        drawn = draft_logits.cpu().numpy()[row, judged[:, 1], ids]
        sums = draft_normalisers.cpu().numpy()[row, judged[:, 1]]
    q = exact.weights(exact.sane_scores(drawn[:, None], heat)[:, 0])
    limits = exact.thresholds(exact.weights(scores[every, ids]), totals, q, sums, is_point.cpu().numpy()[row] != 0)
    if coins is None:
        key = seed.cpu().numpy()[row]
        nonce = num_tokens.cpu().numpy()[row] - 1
        words = exact.coin_words(as_words(key[:, 0]), as_words(key[:, 1]), as_words(positions.cpu().numpy()[at]), as_words(nonce))
    else:
        words = as_words(coins.cpu().numpy()[at])
    verdicts = np.where(words.astype(np.int64) < limits, ACCEPTED, REJECTED)
    spoiled = (np.isnan(plain) | (plain == np.inf)).any(axis=1) | (totals[:, 1] == 0)
    index = torch.from_numpy(at).to(out_verdicts.device)
    for out, values in ((out_verdicts, verdicts), (out_bad, spoiled), (out_normalisers, totals)):
        out[index] = torch.from_numpy(values.astype(np.int32)).to(out.device)


judge_drafts_ = Op(
    "judge_drafts",
    writes=("out_verdicts", "out_indices", "out_bad", "out_normalisers", "scratch"),
    triton=_launch_judge_drafts,
    reference=judge_drafts_reference_,
    strided=("logits", "tokens"),
)
"""Judge the drafts of a round by the ratio test, each as if those before it were kept. R rows, W = K + 1 places.

Place j of a row holds the target's logits after the newest token and j drafts. Places with a draft of a live row at a temperature
above 0 are judged: kept with probability min(1, p / q), or p for points. A row's drafts end at its first placeholder, an id outside
of the vocabulary.

Args:
    logits: [R * W, V] float32, bfloat16 or float16; any row stride, columns consecutive.
    positions: [R * W] int32, positions of the newest token that each place has seen.
    temperature: [R] float32, 0 or positive and finite.
    seed: [R, 2] int32 bit patterns.
    tokens: [R, L] int32, drafts behind the committed tokens; rows any stride apart.
    num_tokens, num_draft, num_drafted, is_live: [R] int32, read.
    is_point: [R] int32, not 0 for rows whose drafts were just proposed.
    draft_logits: [R, K, V] float32 as `keep_proposals_` left them, or [R, K, 0]: then all rows are points.
    draft_normalisers: [R, K, 2] int32, likewise.
    coins: [R * W] int32 bit patterns of words to use instead of the stream ACCEPT, or None.
    out_verdicts: [R * W] int32, written: 1 kept, 0 not kept, 2 nothing to judge.
    out_indices: [R * W] int32, written: the place itself where the target's own choice may be emitted (every place of a greedy row, the
        place behind the last draft of others), else -1; for `choose_tokens_`.
    out_bad: [R * W] int32, written: 1 at judged places whose logits were not finite or allowed nothing.
    out_normalisers: [R * W, 2] int32, written: of the target's rows at judged places, else 0.
    scratch: [R * W, P, 4] int32, P = ceil(V / 1024); contents undefined before and after.

Raises:
    ArgumentError: shapes that do not fit. Nothing was written.
    ArgumentTypeError: another dtype.
"""
