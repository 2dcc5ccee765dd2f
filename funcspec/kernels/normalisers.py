"""Keep what a draft was drawn from: its logits, and the exact sum of their weights. `funcspec.exact` is the specification.

The device functions here are shared by everything that works with exact probabilities. Kernels that use them must be launched
with `enable_fp_fusion=False`.
"""

import torch

from funcspec import exact
from funcspec.errors import ArgumentTypeError, refuse
from funcspec.kernels._checks import check_rows
from funcspec.kernels._triton import jit, tl
from funcspec.kernels.op import Op, next_power_of_2
from funcspec.noise import TILE

LOGIT_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
BLOCK_ELEMENTS = 1 << 16
"""Logits that references work on at a time, so that temporaries stay in cache."""

PART = 4
"""Numbers that a tile leaves in the workspace: largest exponent, whether a logit was not finite, low and high word of its sum."""


# ---------------------------------------------------------------- Triton device functions


@jit
def load_scores(row_ptr, token, inside, temperature):
    """float32 scores, NaN and +inf made -inf, and which were: `funcspec.exact.sane_scores`."""
    raw = tl.load(row_ptr + token, mask=inside, other=float("-inf")).to(tl.float32)
    invalid = (raw != raw) | (raw == float("inf"))
    return tl.div_rn(tl.where(invalid, float("-inf"), raw), temperature), invalid


@jit
def score_weights(scores):
    """Exponents and mantissas of exp(score), int32: `funcspec.exact.weights`."""
    limited = tl.minimum(tl.maximum(scores, -536870912.0), 536870912.0)
    y = limited.to(tl.float64) * tl.full((), 1.4426950408889634, tl.float64)
    whole = tl.floor(y)
    f = (y - whole).to(tl.float32)
    z = f * 2.161291631637141e-4 + 1.2467845808714628e-3
    z = z * f + 9.675451554358006e-3
    z = z * f + 5.5485282093286514e-2
    z = z * f + 0.2402293086051941
    z = z * f + 0.6931470632553101
    z = z * f + 1.0
    empty = scores == float("-inf")
    return tl.where(empty, -1073741824, whole.to(tl.int32)), tl.where(empty, 0, (z * 8388608.0).to(tl.int32))


@jit
def load_wide(low_ptr, mask):
    """int64 numbers from their low and high words."""
    low = tl.load(low_ptr, mask=mask, other=0).to(tl.int64) & 0xFFFFFFFF
    return (tl.load(low_ptr + 1, mask=mask, other=0).to(tl.int64) << 32) | low


@jit
def store_wide(low_ptr, value):
    """An int64 number as its low and high word."""
    tl.store(low_ptr, (value & 0xFFFFFFFF).to(tl.uint32).to(tl.int32, bitcast=True))
    tl.store(low_ptr + 1, (value >> 32).to(tl.int32))


@jit
def sum_tile(row_ptr, token, inside, temperature, part_ptr):
    """Leave a tile's share of `funcspec.exact.normalisers` in the workspace."""
    scores, invalid = load_scores(row_ptr, token, inside, temperature)
    exponents, mantissas = score_weights(scores)
    highest = tl.max(exponents, axis=0)
    away = tl.minimum(highest - exponents, 63).to(tl.int64)
    tl.store(part_ptr, highest)
    tl.store(part_ptr + 1, tl.max(invalid.to(tl.int32), axis=0))
    store_wide(part_ptr + 2, tl.sum((mantissas.to(tl.int64) << 28) >> away, axis=0))


@jit
def sum_parts(parts_ptr, num_parts, BLOCK: tl.constexpr):
    """Exponent and mantissa of a row's normaliser, and whether a logit was not finite."""
    part = tl.arange(0, BLOCK)
    inside = part < num_parts
    highest = tl.load(parts_ptr + part * 4, mask=inside, other=-1073741824)
    invalid = tl.max(tl.load(parts_ptr + part * 4 + 1, mask=inside, other=0), axis=0)
    sums = load_wide(parts_ptr + part * 4 + 2, inside)
    top = tl.max(highest, axis=0)
    total = tl.sum(sums >> tl.minimum(top - highest + 12, 63).to(tl.int64), axis=0)
    exponent = top - 39
    for power in tl.static_range(5):
        step = 16 >> power
        large = (total >> step) >= 1073741824
        total = tl.where(large, total >> step, total)
        exponent = exponent + tl.where(large, step, 0)
    return tl.where(total > 0, exponent, 0), total.to(tl.int32), invalid


# ---------------------------------------------------------------- keep_proposals_


@jit
def _place(
    t,
    chosen_ptr,
    temperature_ptr,
    num_draft_ptr,
    num_drafted_ptr,
    FIRST: tl.constexpr,
    MAX_DRAFT: tl.constexpr,
    NUM_CHOSEN: tl.constexpr,
):
    """Which draft of its row a row of logits is for, -1 for none."""
    row = t // NUM_CHOSEN
    made = 0
    planned = MAX_DRAFT
    if not FIRST:
        made = tl.load(num_drafted_ptr + row)
        planned = tl.minimum(tl.load(num_draft_ptr + row), MAX_DRAFT)
    made += (t % NUM_CHOSEN).to(tl.int32)
    drawn = (tl.load(chosen_ptr + t) >= 0) & (tl.load(temperature_ptr + row) > 0)
    return tl.where(drawn & (made < planned), made, -1)


@jit
def keep_proposals_kernel(
    logits_ptr,  # [R * C, V]
    chosen_ptr,  # [R * C] int32
    temperature_ptr,  # [R] float32
    num_draft_ptr,  # [R] int32
    num_drafted_ptr,  # [R] int32
    token_ids_ptr,  # [V] int32 or anything
    draft_logits_ptr,  # [R, K, W] float32, written
    scratch_ptr,  # [R * C, P, 4] int32, written
    logits_stride,
    vocab_size,
    kept_size,
    num_parts,
    FIRST: tl.constexpr,
    HAS_MAP: tl.constexpr,
    MAX_DRAFT: tl.constexpr,
    NUM_CHOSEN: tl.constexpr,
):
    t = tl.program_id(0).to(tl.int64)
    tile = tl.program_id(1)
    row = t // NUM_CHOSEN
    place = _place(t, chosen_ptr, temperature_ptr, num_draft_ptr, num_drafted_ptr, FIRST, MAX_DRAFT, NUM_CHOSEN)
    if place >= 0:
        token = tile * 1024 + tl.arange(0, 1024)
        inside = token < vocab_size
        row_ptr = logits_ptr + t * logits_stride
        kept = tl.load(row_ptr + token, mask=inside, other=0.0).to(tl.float32)
        at = token
        if HAS_MAP:
            at = tl.load(token_ids_ptr + token, mask=inside, other=0)
        tl.store(draft_logits_ptr + (row * MAX_DRAFT + place) * kept_size + at, kept, mask=inside)
        sum_tile(row_ptr, token, inside, tl.load(temperature_ptr + row), scratch_ptr + (t * num_parts + tile) * 4)


@jit
def keep_proposals_reduce_kernel(
    chosen_ptr,  # [R * C] int32
    temperature_ptr,  # [R] float32
    num_draft_ptr,  # [R] int32
    num_drafted_ptr,  # [R] int32
    scratch_ptr,  # [R * C, P, 4] int32
    draft_normalisers_ptr,  # [R, K, 2] int32, written
    is_point_ptr,  # [R] int32, written
    num_parts,
    FIRST: tl.constexpr,
    MAX_DRAFT: tl.constexpr,
    NUM_CHOSEN: tl.constexpr,
    BLOCK: tl.constexpr,
):
    t = tl.program_id(0).to(tl.int64)
    row = t // NUM_CHOSEN
    place = _place(t, chosen_ptr, temperature_ptr, num_draft_ptr, num_drafted_ptr, FIRST, MAX_DRAFT, NUM_CHOSEN)
    if FIRST:
        tl.store(is_point_ptr + row, 0, mask=t % NUM_CHOSEN == 0)
    if place >= 0:
        exponent, mantissa, _ = sum_parts(scratch_ptr + t * num_parts * 4, num_parts, BLOCK)
        at = draft_normalisers_ptr + (row * MAX_DRAFT + place) * 2
        tl.store(at, exponent)
        tl.store(at + 1, mantissa)


def check_logits(name: str, logits: torch.Tensor) -> None:
    """Refuse what is not rows of float logits.

    Raises:
        ArgumentTypeError: another dtype.
        ArgumentError: another shape.
    """
    if logits.dtype not in LOGIT_DTYPES:
        refuse(name, "float32, bfloat16 or float16", logits.dtype, "let the model return one of these", ArgumentTypeError)
    if logits.dim() != 2 or logits.shape[1] < 1:
        refuse(name, "shape [T, V] with V >= 1", f"shape {tuple(logits.shape)}", "pass rows of logits")


def check_buffer(name: str, array: torch.Tensor, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    """Refuse anything but an array of this dtype and shape.

    Raises:
        ArgumentTypeError: another dtype.
        ArgumentError: another shape.
    """
    if array.dtype != dtype:
        refuse(name, str(dtype), array.dtype, "convert it once, outside the loop", ArgumentTypeError)
    if array.shape != shape:
        refuse(name, f"an array of shape {shape}", f"shape {tuple(array.shape)}", "allocate it so")


def _check(
    logits: torch.Tensor,
    chosen: torch.Tensor,
    temperature: torch.Tensor,
    num_draft: torch.Tensor,
    num_drafted: torch.Tensor,
    token_ids: torch.Tensor | None,
    draft_logits: torch.Tensor,
    draft_normalisers: torch.Tensor,
    is_point: torch.Tensor,
    scratch: torch.Tensor,
) -> None:
    check_logits("logits", logits)
    count, vocab_size = logits.shape
    rows = temperature.shape[0]
    check_rows(rows, ("num_draft", "num_drafted", "is_point"), (num_draft, num_drafted, is_point))
    check_rows(count, ("chosen",), (chosen,))
    if rows == 0 or count % rows:
        refuse("logits", f"as many rows for each of {rows} requests", count, "pass arrays of one batch")
    if draft_logits.dim() != 3 or draft_logits.shape[0] != rows or draft_logits.shape[1] < 1:
        refuse("draft_logits", f"shape [{rows}, K, W] with K >= 1", f"shape {tuple(draft_logits.shape)}", "pass buffers of one batch")
    _, most, width = draft_logits.shape
    check_buffer("draft_logits", draft_logits, torch.float32, (rows, most, width))
    check_buffer("draft_normalisers", draft_normalisers, torch.int32, (rows, most, 2))
    check_buffer("scratch", scratch, torch.int32, (count, -(-vocab_size // TILE), PART))
    if token_ids is not None:
        check_buffer("token_ids", token_ids, torch.int32, (vocab_size,))
    elif width < vocab_size:
        refuse("draft_logits", f"room for {vocab_size} logits", width, "allocate the target's vocabulary")


def _launch_keep_proposals(
    *,
    first: bool,
    logits: torch.Tensor,
    chosen: torch.Tensor,
    temperature: torch.Tensor,
    num_draft: torch.Tensor,
    num_drafted: torch.Tensor,
    token_ids: torch.Tensor | None,
    draft_logits: torch.Tensor,
    draft_normalisers: torch.Tensor,
    is_point: torch.Tensor,
    scratch: torch.Tensor,
) -> None:
    _check(logits, chosen, temperature, num_draft, num_drafted, token_ids, draft_logits, draft_normalisers, is_point, scratch)
    count, vocab_size = logits.shape
    parts, most, each = scratch.shape[1], draft_logits.shape[1], count // temperature.shape[0]
    keep_proposals_kernel[(count, parts)](
        logits,
        chosen,
        temperature,
        num_draft,
        num_drafted,
        chosen if token_ids is None else token_ids,
        draft_logits,
        scratch,
        logits.stride(0),
        vocab_size,
        draft_logits.shape[2],
        parts,
        FIRST=first,
        HAS_MAP=token_ids is not None,
        MAX_DRAFT=most,
        NUM_CHOSEN=each,
        num_warps=4,
        enable_fp_fusion=False,
    )
    keep_proposals_reduce_kernel[(count,)](
        chosen,
        temperature,
        num_draft,
        num_drafted,
        scratch,
        draft_normalisers,
        is_point,
        parts,
        FIRST=first,
        MAX_DRAFT=most,
        NUM_CHOSEN=each,
        BLOCK=next_power_of_2(parts),
        num_warps=1,
    )


def keep_proposals_reference_(
    *,
    first: bool,
    logits: torch.Tensor,
    chosen: torch.Tensor,
    temperature: torch.Tensor,
    num_draft: torch.Tensor,
    num_drafted: torch.Tensor,
    token_ids: torch.Tensor | None,
    draft_logits: torch.Tensor,
    draft_normalisers: torch.Tensor,
    is_point: torch.Tensor,
    scratch: torch.Tensor,
) -> None:
    """Do what `keep_proposals_` says on the host, row by row; the workspace is checked but not used."""
    _check(logits, chosen, temperature, num_draft, num_drafted, token_ids, draft_logits, draft_normalisers, is_point, scratch)
    most = draft_logits.shape[1]
    if first:
        is_point.zero_()
    rows, each = len(temperature), len(chosen) // len(temperature)
    made, planned = ([0] * rows, [most] * rows) if first else (num_drafted.tolist(), num_draft.tolist())
    heat = temperature.cpu().numpy()
    drawn = []
    for t, token in enumerate(chosen.tolist()):
        row, place = t // each, made[t // each] + t % each
        if token >= 0 and heat[row] > 0 and place < min(planned[row], most):
            drawn.append((t, row, place))
    step = max(1, BLOCK_ELEMENTS // logits.shape[1])
    for start in range(0, len(drawn), step):
        chunk, rows, places = map(list, zip(*drawn[start : start + step], strict=True))
        kept = logits[chunk].float()
        if token_ids is None:
            draft_logits[rows, places, : logits.shape[1]] = kept
        else:
            draft_logits[torch.tensor(rows)[:, None], torch.tensor(places)[:, None], token_ids.long().cpu()] = kept
        totals = exact.normalisers(exact.sane_scores(kept.cpu().numpy(), heat[rows][:, None]))
        draft_normalisers[rows, places] = torch.from_numpy(totals).to(draft_normalisers.device)


keep_proposals_ = Op(
    "keep_proposals",
    writes=("draft_logits", "draft_normalisers", "is_point", "scratch"),
    triton=_launch_keep_proposals,
    reference=keep_proposals_reference_,
    strided=("logits",),
)
"""Keep what the next draft of each row, or the next C drafts, were drawn from, before they are appended.

Draft j = num_drafted + c of a row (c with `first`) is kept if there is a token, the row plans more than j drafts (with `first` all rows
do) and samples: its logits before temperature, as they are, at the target ids of their columns, and their normaliser. All other
places stay as they were; where a map leaves ids out, the caller has filled them with -inf. With `first`, no row is a point any more.

Args:
    first: whether this is draft step 0.
    logits: [R * C, V] float32, bfloat16 or float16, row by row; any stride, columns consecutive.
    chosen: [R * C] int32, the drawn tokens, -1 for none.
    temperature: [R] float32, 0 or positive and finite.
    num_draft: [R] int32, drafts planned; not read with `first`.
    num_drafted: [R] int32, drafts made before this one; not read with `first`.
    token_ids: [V] int32 distinct target ids of the columns, or None where columns are target ids.
    draft_logits: [R, K, W] float32, in place.
    draft_normalisers: [R, K, 2] int32, in place; see `funcspec.exact.normalisers`.
    is_point: [R] int32, in place; 1 for rows whose drafts are just proposed.
    scratch: [R * C, P, 4] int32, P = ceil(V / 1024); contents undefined before and after.

Raises:
    ArgumentError: shapes that do not fit. Nothing was written.
    ArgumentTypeError: another dtype.
"""
