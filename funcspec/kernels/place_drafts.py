"""Write whole rows of proposed drafts behind their committed tokens, and plan the round of these rows."""

import numpy as np
import torch

from funcspec.constants import NO_TOKEN
from funcspec.errors import refuse
from funcspec.kernels._checks import check_matrix, check_rows
from funcspec.kernels._triton import jit, tl
from funcspec.kernels.op import Op, next_power_of_2

Array = torch.Tensor | np.ndarray


@jit
def place_drafts_kernel(
    proposals_ptr,  # [R, K] int32
    counts_ptr,  # [R] int32
    num_tokens_ptr,  # [R] int32
    row_limit_ptr,  # [R] int32
    is_live_ptr,  # [R] int32
    wanted_ptr,  # [R] int32
    tokens_ptr,  # [R, L] int32, written
    num_draft_ptr,  # [R] int32, written
    num_drafted_ptr,  # [R] int32, written
    out_tokens_ptr,  # [R, K] int32, written
    tokens_stride,
    length,
    KEEP_OTHERS: tl.constexpr,
    MAX_DRAFT: tl.constexpr,
    LANES: tl.constexpr,
):
    row = tl.program_id(0)
    lane = tl.arange(0, LANES)
    at = row.to(tl.int64) * MAX_DRAFT + lane
    n = tl.load(num_tokens_ptr + row)
    count = tl.load(counts_ptr + row)
    served = tl.maximum(count, 1 - KEEP_OTHERS) > 0
    room = tl.minimum(tl.load(wanted_ptr + row), tl.load(row_limit_ptr + row) - n - 1)
    room = tl.where(tl.load(is_live_ptr + row) != 0, tl.minimum(room, MAX_DRAFT), 0)
    planned = tl.maximum(tl.minimum(count, room), 0)
    proposal = tl.load(proposals_ptr + at, mask=lane < planned, other=-1)
    # A placeholder is no draft, nor is what lies behind it.
    planned = tl.min(tl.where((lane < planned) & (proposal >= 0), LANES, tl.minimum(lane, planned)), axis=0)
    made = tl.where(served, planned, tl.load(num_drafted_ptr + row))
    place = tokens_ptr + row.to(tl.int64) * tokens_stride + n + lane
    before = tl.load(place, mask=lane < made, other=-1)
    draft = tl.where(served, tl.where(lane < planned, proposal, -1), before)
    tl.store(place, draft, mask=lane < tl.where(served, tl.minimum(length - n, MAX_DRAFT), 0))
    tl.store(out_tokens_ptr + at, draft, mask=lane < MAX_DRAFT)
    tl.store(num_draft_ptr + row, planned, mask=served)
    tl.store(num_drafted_ptr + row, planned, mask=served)


BY_ROW = ("counts", "wanted", "num_tokens", "row_limit", "is_live", "num_draft", "num_drafted")


def _check(proposals: Array, tokens: Array, out_tokens: Array, by_row: tuple[Array, ...]) -> None:
    rows = tokens.shape[0]
    if out_tokens.ndim != 2 or out_tokens.shape[0] != rows:
        refuse("out_tokens", f"[{rows}, K]", tuple(out_tokens.shape), "allocate a place for every row and draft")
    if proposals.shape != out_tokens.shape:
        refuse("proposals", f"the shape {tuple(out_tokens.shape)} of out_tokens", tuple(proposals.shape), "propose up to K tokens a row")
    check_rows(rows, BY_ROW, by_row)
    for name, matrix in (("tokens", tokens), ("proposals", proposals), ("out_tokens", out_tokens)):
        check_matrix(name, matrix, rows)


def _launch_place_drafts(
    *,
    keep_others: bool,
    proposals: torch.Tensor,
    counts: torch.Tensor,
    num_tokens: torch.Tensor,
    row_limit: torch.Tensor,
    is_live: torch.Tensor,
    wanted: torch.Tensor,
    tokens: torch.Tensor,
    num_draft: torch.Tensor,
    num_drafted: torch.Tensor,
    out_tokens: torch.Tensor,
) -> None:
    _check(proposals, tokens, out_tokens, (counts, wanted, num_tokens, row_limit, is_live, num_draft, num_drafted))
    place_drafts_kernel[(tokens.shape[0],)](
        proposals,
        counts,
        num_tokens,
        row_limit,
        is_live,
        wanted,
        tokens,
        num_draft,
        num_drafted,
        out_tokens,
        tokens.stride(0),
        tokens.shape[1],
        KEEP_OTHERS=int(keep_others),
        MAX_DRAFT=out_tokens.shape[1],
        LANES=next_power_of_2(out_tokens.shape[1]),
        num_warps=1,
    )


def place_drafts_reference_(
    *,
    keep_others: bool,
    proposals: torch.Tensor,
    counts: torch.Tensor,
    num_tokens: torch.Tensor,
    row_limit: torch.Tensor,
    is_live: torch.Tensor,
    wanted: torch.Tensor,
    tokens: torch.Tensor,
    num_draft: torch.Tensor,
    num_drafted: torch.Tensor,
    out_tokens: torch.Tensor,
) -> None:
    """Specify `place_drafts_` in plain torch."""
    _check(proposals, tokens, out_tokens, (counts, wanted, num_tokens, row_limit, is_live, num_draft, num_drafted))
    most, length = out_tokens.shape[1], tokens.shape[1]
    served = counts > 0 if keep_others else torch.ones_like(counts, dtype=torch.bool)
    room = torch.minimum(wanted, row_limit - num_tokens - 1).clamp_(0, most) * (is_live != 0)
    lane = torch.arange(most, device=tokens.device)
    # A placeholder is no draft, nor is what lies behind it.
    real = ((lane < torch.minimum(counts, room)[:, None]) & (proposals >= 0)).int().cumprod(1).bool()
    planned = real.sum(1, dtype=torch.int32)
    num_draft.copy_(torch.where(served, planned, num_draft))
    num_drafted.copy_(torch.where(served, planned, num_drafted))
    if most == 0:
        return
    place = num_tokens[:, None] + lane
    before = tokens.gather(1, place.clamp(max=length - 1))
    kept = torch.where(lane < num_drafted[:, None], before, NO_TOKEN)
    out_tokens.copy_(torch.where(served[:, None], torch.where(real, proposals, NO_TOKEN), kept))
    row, lane = torch.nonzero(served[:, None] & (place < length), as_tuple=True)
    tokens[row, place[row, lane]] = out_tokens[row, lane]


def place_drafts_host_(
    *,
    keep_others: bool,
    proposals: np.ndarray,
    counts: np.ndarray,
    num_tokens: np.ndarray,
    row_limit: np.ndarray,
    is_live: np.ndarray,
    wanted: np.ndarray,
    tokens: np.ndarray,
    num_draft: np.ndarray,
    num_drafted: np.ndarray,
    out_tokens: np.ndarray,
) -> None:
    """Do what `place_drafts_` does on NumPy views, one row after another."""
    _check(proposals, tokens, out_tokens, (counts, wanted, num_tokens, row_limit, is_live, num_draft, num_drafted))
    out_tokens.fill(NO_TOKEN)
    most = out_tokens.shape[1]
    by_row = zip(counts.tolist(), num_tokens.tolist(), row_limit.tolist(), is_live.tolist(), wanted.tolist(), strict=True)
    for row, (count, n, limit, live, asked) in enumerate(by_row):
        drafts = tokens[row, n : n + most]
        if count > 0 or not keep_others:
            planned = max(min(count, asked, limit - n - 1, most), 0) if live else 0
            chosen = proposals[row, :planned].tolist()
            planned = next((lane for lane, token in enumerate(chosen) if token < 0), planned)
            drafts.fill(NO_TOKEN)
            drafts[:planned] = chosen[:planned]
            num_draft[row] = num_drafted[row] = planned
        made = int(num_drafted[row])
        out_tokens[row, :made] = drafts[:made]


place_drafts_ = Op(
    "place_drafts",
    writes=("tokens", "num_draft", "num_drafted", "out_tokens"),
    triton=_launch_place_drafts,
    reference=place_drafts_reference_,
    strided=("tokens",),
    host=place_drafts_host_,
)
"""Make proposed tokens the drafts of their rows.

A row is served if it has a proposal or, without `keep_others`, in any case. The round of a served row is planned and drafted at
once: num_draft = num_drafted = clip(min(counts, wanted, row_limit - n - 1), 0, K) for live rows and 0 for others, its drafts stand
at places n, n + 1, ..., and up to place n + K follows -1. n is the committed length. Other rows keep what they have. A negative id
ends a proposal.

Args:
    keep_others: leave rows without a proposal to another drafter.
    proposals: [R, K] int32 proposed tokens.
    counts: [R] int32, how many of them there are.
    num_tokens, row_limit, is_live, wanted: [R] int32, read; `wanted` drafts are asked for.
    tokens: [R, L] int32, in place.
    num_draft, num_drafted: [R] int32, in place.
    out_tokens: [R, K] int32, written: this round's drafts of all rows, -1 in other places.

Raises:
    ArgumentError: shapes do not fit. Nothing was written.
"""
