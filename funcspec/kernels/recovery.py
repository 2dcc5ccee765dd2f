"""The token after a rejected draft: drawn where the target gives more than the drafter did. `funcspec.exact` is the specification."""

import numpy as np
import torch

from funcspec import exact
from funcspec.constants import NO_TOKEN
from funcspec.exact import ACCEPTED, REJECTED
from funcspec.kernels._checks import check_rows
from funcspec.kernels._triton import jit, tl
from funcspec.kernels.noise import philox4x32
from funcspec.kernels.normalisers import PART, check_buffer, load_scores, load_wide, score_weights, store_wide
from funcspec.kernels.op import Op, next_power_of_2
from funcspec.kernels.ratio import check_proposals
from funcspec.noise import TILE

# ---------------------------------------------------------------- Triton


@jit
def _probabilities(scores, top, total):
    """Probabilities in units of 2^-52: `funcspec.exact.probabilities`."""
    exponents, mantissas = score_weights(scores)
    inverse = tl.full((), 4611686018427387904, tl.int64) // tl.maximum(total, 1).to(tl.int64)
    away = tl.minimum(tl.maximum(top.to(tl.int64) + 33 - exponents, 0), 63)
    return (mantissas.to(tl.int64) * tl.where(total > 0, inverse, 0)) >> away


@jit
def _first_open(row, verdicts_ptr, WIDTH: tl.constexpr, LANES: tl.constexpr):
    """The first place of a row whose draft is not kept, and whether there was one to keep."""
    lane = tl.arange(0, LANES)
    verdict = tl.load(verdicts_ptr + row * WIDTH + lane, mask=lane < WIDTH, other=2)
    first = tl.min(tl.where(verdict == 1, LANES, lane), axis=0)
    return first, tl.min(tl.where(lane == first, verdict, 2), axis=0) == 0


@jit
def _residual_tile(
    row,
    place,
    tile,
    draft,
    temperature,
    is_point_ptr,
    logits_ptr,
    draft_logits_ptr,
    draft_normalisers_ptr,
    normalisers_ptr,
    logits_stride,
    vocab_size,
    HAS_LOGITS: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """A tile's weights max(p - q, 0), and p where these are all 0: `funcspec.exact.residual`."""
    token = tile * 1024 + tl.arange(0, 1024)
    inside = token < vocab_size
    t = row * WIDTH + place
    scores, _bad = load_scores(logits_ptr + t * logits_stride, token, inside, temperature)
    p = _probabilities(scores, tl.load(normalisers_ptr + t * 2), tl.load(normalisers_ptr + t * 2 + 1))
    p = tl.where(token == draft, 0, p)
    first = p
    if HAS_LOGITS:
        at = row * (WIDTH - 1) + place
        drawn, _drawn_bad = load_scores(draft_logits_ptr + at * vocab_size, draft, draft >= 0, temperature)
        _q_exponent, q_mantissa = score_weights(drawn)
        if (tl.load(is_point_ptr + row) == 0) & (q_mantissa > 0):
            others, _others_bad = load_scores(draft_logits_ptr + at * vocab_size, token, inside, temperature)
            q = _probabilities(others, tl.load(draft_normalisers_ptr + at * 2), tl.load(draft_normalisers_ptr + at * 2 + 1))
            first = tl.where(token == draft, 0, tl.maximum(p - q, 0))
    return first, p


@jit
def recover_tokens_kernel(
    logits_ptr,  # [R * W, V]
    temperature_ptr,  # [R] float32
    tokens_ptr,  # [R, L] int32
    num_tokens_ptr,  # [R] int32
    is_point_ptr,  # [R] int32
    draft_logits_ptr,  # [R, K, V or 0] float32
    draft_normalisers_ptr,  # [R, K, 2] int32
    verdicts_ptr,  # [R * W] int32
    normalisers_ptr,  # [R * W, 2] int32
    scratch_ptr,  # [R, P, 4] int32, written
    logits_stride,
    tokens_stride,
    vocab_size,
    num_parts,
    HAS_LOGITS: tl.constexpr,
    WIDTH: tl.constexpr,
    LANES: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    tile = tl.program_id(1)
    place, is_rejected = _first_open(row, verdicts_ptr, WIDTH, LANES)
    if is_rejected:
        draft = tl.load(tokens_ptr + row * tokens_stride + tl.load(num_tokens_ptr + row) + place)
        first, second = _residual_tile(
            row,
            place,
            tile,
            draft,
            tl.load(temperature_ptr + row),
            is_point_ptr,
            logits_ptr,
            draft_logits_ptr,
            draft_normalisers_ptr,
            normalisers_ptr,
            logits_stride,
            vocab_size,
            HAS_LOGITS,
            WIDTH,
        )
        part_ptr = scratch_ptr + (row * num_parts + tile) * 4
        store_wide(part_ptr, tl.sum(first, axis=0))
        store_wide(part_ptr + 2, tl.sum(second, axis=0))


@jit
def _aim(seed_ptr, row, position, total):
    """A number below `total` from the noise of TARGET at a position: `funcspec.exact.pick`."""
    low = tl.load(seed_ptr + row * 2).to(tl.uint32, bitcast=True)
    high = tl.load(seed_ptr + row * 2 + 1).to(tl.uint32, bitcast=True)
    zero = low * 0
    w0, w1, _, _ = philox4x32(zero, zero + position, zero, zero + 3, low, high)
    return tl.umulhi((w1.to(tl.uint64) << 32) | w0.to(tl.uint64), total.to(tl.uint64)).to(tl.int64)


@jit
def recover_tokens_pick_kernel(
    logits_ptr,  # [R * W, V]
    positions_ptr,  # [R * W] int32
    temperature_ptr,  # [R] float32
    seed_ptr,  # [R, 2] int32
    tokens_ptr,  # [R, L] int32
    num_tokens_ptr,  # [R] int32
    is_point_ptr,  # [R] int32
    draft_logits_ptr,  # [R, K, V or 0] float32
    draft_normalisers_ptr,  # [R, K, 2] int32
    verdicts_ptr,  # [R * W] int32
    judged_bad_ptr,  # [R * W] int32
    normalisers_ptr,  # [R * W, 2] int32
    chosen_ptr,  # [R * W] int32
    chosen_bad_ptr,  # [R * W] int32
    scratch_ptr,  # [R, P, 4] int32
    out_chosen_ptr,  # [R * W] int32, written
    out_bad_ptr,  # [R * W] int32, written
    logits_stride,
    tokens_stride,
    vocab_size,
    num_parts,
    HAS_LOGITS: tl.constexpr,
    WIDTH: tl.constexpr,
    LANES: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    place, is_rejected = _first_open(row, verdicts_ptr, WIDTH, LANES)
    recovered = -1
    drafts_ptr = tokens_ptr + row * tokens_stride + tl.load(num_tokens_ptr + row)
    if is_rejected:
        draft = tl.load(drafts_ptr + place)
        temperature = tl.load(temperature_ptr + row)
        t = row * WIDTH + place
        part = tl.arange(0, BLOCK)
        parts_ptr = scratch_ptr + (row * num_parts + part) * 4
        first_sums = load_wide(parts_ptr, part < num_parts)
        has_first = tl.sum(first_sums, axis=0) > 0
        sums = tl.where(has_first, first_sums, load_wide(parts_ptr + 2, part < num_parts))
        total = tl.sum(sums, axis=0)
        if total > 0:
            aim = _aim(seed_ptr, row, tl.load(positions_ptr + t).to(tl.uint32), total)
            tile = tl.sum((tl.cumsum(sums, axis=0) <= aim).to(tl.int32), axis=0)
            aim = aim - tl.sum(tl.where(part < tile, sums, 0), axis=0)
            first, second = _residual_tile(
                row,
                place,
                tile,
                draft,
                temperature,
                is_point_ptr,
                logits_ptr,
                draft_logits_ptr,
                draft_normalisers_ptr,
                normalisers_ptr,
                logits_stride,
                vocab_size,
                HAS_LOGITS,
                WIDTH,
            )
            inner = tl.where(has_first, first, second)
            recovered = tile * 1024 + tl.sum((tl.cumsum(inner, axis=0) <= aim).to(tl.int32), axis=0)
        else:
            scores, _bad = load_scores(logits_ptr + t * logits_stride, draft, draft >= 0, temperature)
            p = _probabilities(scores, tl.load(normalisers_ptr + t * 2), tl.load(normalisers_ptr + t * 2 + 1))
            recovered = tl.where(p > 0, draft, 0)
    lane = tl.arange(0, LANES)
    inside = lane < WIDTH
    at = row * WIDTH + lane
    kept = tl.load(drafts_ptr + lane, mask=lane < place, other=-1)
    chosen = tl.load(chosen_ptr + at, mask=inside, other=-1)
    chosen_bad = tl.load(chosen_bad_ptr + at, mask=inside, other=0)
    judged_bad = tl.load(judged_bad_ptr + at, mask=inside, other=0)
    ended = is_rejected & (lane >= place)
    chosen = tl.where(ended, tl.where(lane == place, recovered, -1), chosen)
    tl.store(out_chosen_ptr + at, tl.where(lane < place, kept, chosen), mask=inside)
    tl.store(out_bad_ptr + at, tl.where((lane < place) | ended, judged_bad, chosen_bad), mask=inside)


# ---------------------------------------------------------------- host


def _check(
    logits: torch.Tensor,
    seed: torch.Tensor,
    tokens: torch.Tensor,
    by_row: tuple[torch.Tensor, torch.Tensor],
    proposals: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    normalisers: torch.Tensor,
    by_place: dict[str, torch.Tensor],
    scratch: torch.Tensor,
) -> tuple[int, int]:
    rows, width = check_proposals(logits, tokens, *proposals)
    check_rows(rows, ("temperature", "num_tokens"), by_row)
    check_buffer("seed", seed, torch.int32, (rows, 2))
    check_buffer("normalisers", normalisers, torch.int32, (rows * width, 2))
    for name, array in by_place.items():
        check_buffer(name, array, torch.int32, (rows * width,))
    check_buffer("scratch", scratch, torch.int32, (rows, -(-logits.shape[1] // TILE), PART))
    return rows, width


def _launch_recover_tokens(
    *,
    logits: torch.Tensor,
    positions: torch.Tensor,
    temperature: torch.Tensor,
    seed: torch.Tensor,
    tokens: torch.Tensor,
    num_tokens: torch.Tensor,
    is_point: torch.Tensor,
    draft_logits: torch.Tensor,
    draft_normalisers: torch.Tensor,
    verdicts: torch.Tensor,
    judged_bad: torch.Tensor,
    normalisers: torch.Tensor,
    chosen: torch.Tensor,
    chosen_bad: torch.Tensor,
    out_chosen: torch.Tensor,
    out_bad: torch.Tensor,
    scratch: torch.Tensor,
) -> None:
    by_place = {"positions": positions, "verdicts": verdicts, "judged_bad": judged_bad, "chosen": chosen, "chosen_bad": chosen_bad}
    by_place |= {"out_chosen": out_chosen, "out_bad": out_bad}
    proposals = (is_point, draft_logits, draft_normalisers)
    rows, width = _check(logits, seed, tokens, (temperature, num_tokens), proposals, normalisers, by_place, scratch)
    parts = scratch.shape[1]
    sizes = (logits.stride(0), tokens.stride(0), logits.shape[1], parts)
    fixed = {"HAS_LOGITS": draft_logits.numel() > 0, "WIDTH": width, "LANES": next_power_of_2(width), "enable_fp_fusion": False}
    recover_tokens_kernel[(rows, parts)](
        logits, temperature, tokens, num_tokens, *proposals, verdicts, normalisers, scratch, *sizes, **fixed, num_warps=4
    )
    recover_tokens_pick_kernel[(rows,)](
        logits,
        positions,
        temperature,
        seed,
        tokens,
        num_tokens,
        *proposals,
        verdicts,
        judged_bad,
        normalisers,
        chosen,
        chosen_bad,
        scratch,
        out_chosen,
        out_bad,
        *sizes,
        **fixed,
        BLOCK=max(next_power_of_2(parts), 32),  # running sums want a warp's width
        num_warps=4,
    )


# ---------------------------------------------------------------- reference


def recover_tokens_reference_(
    *,
    logits: torch.Tensor,
    positions: torch.Tensor,
    temperature: torch.Tensor,
    seed: torch.Tensor,
    tokens: torch.Tensor,
    num_tokens: torch.Tensor,
    is_point: torch.Tensor,
    draft_logits: torch.Tensor,
    draft_normalisers: torch.Tensor,
    verdicts: torch.Tensor,
    judged_bad: torch.Tensor,
    normalisers: torch.Tensor,
    chosen: torch.Tensor,
    chosen_bad: torch.Tensor,
    out_chosen: torch.Tensor,
    out_bad: torch.Tensor,
    scratch: torch.Tensor,
) -> None:
    """Do what `recover_tokens_` says on the host, row by row; the workspace is checked but not used."""
    by_place = {"positions": positions, "verdicts": verdicts, "judged_bad": judged_bad, "chosen": chosen, "chosen_bad": chosen_bad}
    by_place |= {"out_chosen": out_chosen, "out_bad": out_bad}
    proposals = (is_point, draft_logits, draft_normalisers)
    rows, width = _check(logits, seed, tokens, (temperature, num_tokens), proposals, normalisers, by_place, scratch)
    heat = temperature.cpu().numpy()
    counts, points, keys = num_tokens.tolist(), is_point.tolist(), seed.tolist()
    judged = verdicts.view(rows, width).tolist()
    tokens_of, flags = chosen.view(rows, width).tolist(), chosen_bad.view(rows, width).tolist()
    for row in range(rows):
        place = next(at for at in range(width) if judged[row][at] != ACCEPTED)
        drafts = tokens[row, counts[row] : counts[row] + place + 1].tolist()
        end = place
        if judged[row][place] == REJECTED:
            t, draft = row * width + place, drafts[place]
            scores = exact.sane_scores(logits[t : t + 1].float().cpu().numpy(), heat[row : row + 1, None])
            p = exact.probabilities(scores, normalisers[t : t + 1].cpu().numpy())[0]
            q = np.zeros_like(p)
            if draft_logits.numel() and not points[row]:
                drawn = exact.sane_scores(draft_logits[row, place : place + 1].cpu().numpy(), heat[row : row + 1, None])
                if drawn[0, draft] > -np.inf:
                    q = exact.probabilities(drawn, draft_normalisers[row, place : place + 1].cpu().numpy())[0]
            token = exact.pick(exact.residual(p, q, draft), *keys[row], int(positions[t]))
            tokens_of[row][place:] = [token] + [NO_TOKEN] * (width - 1 - place)
            end = width
        tokens_of[row][:place] = drafts[:place]
        flags[row][:end] = judged_bad[row * width : row * width + end].tolist()
    out_chosen.copy_(torch.tensor(tokens_of, dtype=torch.int32).view(-1))
    out_bad.copy_(torch.tensor(flags, dtype=torch.int32).view(-1))


recover_tokens_ = Op(
    "recover_tokens",
    writes=("out_chosen", "out_bad", "scratch"),
    triton=_launch_recover_tokens,
    reference=recover_tokens_reference_,
    strided=("logits", "tokens"),
)
"""Turn verdicts on drafts into the tokens of a round, for `accept_matching_`. R rows, W = K + 1 places.

Drafts are kept up to the first that is not. If it was rejected, its place gets a token drawn from the residual max(p - q, 0), and the
places behind it get none. If there was nothing to judge, its place and those behind it keep the target's own choices.

Args:
    logits: [R * W, V], the target's, as `judge_drafts_` was given them.
    positions, temperature, seed, tokens, num_tokens, is_point, draft_logits, draft_normalisers: likewise.
    verdicts, judged_bad: [R * W] int32, as `judge_drafts_` wrote them.
    normalisers: [R * W, 2] int32, likewise.
    chosen, chosen_bad: [R * W] int32, the target's own choices, as `choose_tokens_` wrote them.
    out_chosen: [R * W] int32, written: tokens, -1 where there is none.
    out_bad: [R * W] int32, written: 1 where logits were not finite or allowed nothing.
    scratch: [R, P, 4] int32, P = ceil(V / 1024); contents undefined before and after.

Raises:
    ArgumentError: shapes that do not fit. Nothing was written.
    ArgumentTypeError: another dtype.
"""
