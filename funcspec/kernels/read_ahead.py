"""Propose what a table says comes next: tokens by absolute position, for forced drafts and replays."""

import torch

from funcspec.constants import NO_TOKEN
from funcspec.errors import refuse
from funcspec.kernels._checks import check_rows
from funcspec.kernels._triton import jit, tl
from funcspec.kernels.op import Op, next_power_of_2


@jit
def read_ahead_kernel(
    table_ptr,  # [N, M] int32
    num_tokens_ptr,  # [R] int32
    is_live_ptr,  # [R] int32
    out_proposals_ptr,  # [R, K] int32, written
    out_counts_ptr,  # [R] int32, written
    table_stride,
    lines,
    width,
    MAX_DRAFT: tl.constexpr,
    LANES: tl.constexpr,
):
    row = tl.program_id(0)
    lane = tl.arange(0, LANES)
    known = tl.where((tl.load(is_live_ptr + row) != 0) & (row < lines), width, 0)
    place = tl.load(num_tokens_ptr + row) + lane
    token = tl.load(table_ptr + row.to(tl.int64) * table_stride + place, mask=(place < known) & (lane < MAX_DRAFT), other=-1)
    count = tl.min(tl.where(token >= 0, MAX_DRAFT, tl.minimum(lane, MAX_DRAFT)), axis=0)
    token = tl.where(lane < count, token, -1)
    tl.store(out_proposals_ptr + row.to(tl.int64) * MAX_DRAFT + lane, token, mask=lane < MAX_DRAFT)
    tl.store(out_counts_ptr + row, count)


def _check(table: torch.Tensor, by_row: tuple[torch.Tensor, ...], out_proposals: torch.Tensor) -> None:
    if table.ndim != 2 or 0 in table.shape:
        refuse("table", "[N, M], both at least 1", tuple(table.shape), "pass a line for each row, a column for each position")
    if out_proposals.ndim != 2:
        refuse("out_proposals", "[R, K]", tuple(out_proposals.shape), "allocate a place for every row and draft")
    check_rows(out_proposals.shape[0], ("num_tokens", "is_live", "out_counts"), by_row)


def _launch_read_ahead(
    *,
    table: torch.Tensor,
    num_tokens: torch.Tensor,
    is_live: torch.Tensor,
    out_proposals: torch.Tensor,
    out_counts: torch.Tensor,
) -> None:
    _check(table, (num_tokens, is_live, out_counts), out_proposals)
    rows, most = out_proposals.shape
    read_ahead_kernel[(rows,)](
        table,
        num_tokens,
        is_live,
        out_proposals,
        out_counts,
        table.stride(0),
        *table.shape,
        MAX_DRAFT=most,
        LANES=next_power_of_2(most),
        num_warps=1,
    )


def read_ahead_reference_(
    *,
    table: torch.Tensor,
    num_tokens: torch.Tensor,
    is_live: torch.Tensor,
    out_proposals: torch.Tensor,
    out_counts: torch.Tensor,
) -> None:
    """Specify `read_ahead_` in plain torch."""
    _check(table, (num_tokens, is_live, out_counts), out_proposals)
    (rows, most), (lines, width) = out_proposals.shape, table.shape
    row = torch.arange(rows, device=table.device)
    place = num_tokens[:, None] + torch.arange(most, device=table.device)
    known = (place < width) & ((is_live != 0) & (row < lines))[:, None]
    token = table[row.clamp(max=lines - 1)[:, None], place.clamp(max=width - 1)]
    real = (known & (token >= 0)).int().cumprod(1).bool()  # a placeholder is no draft, nor is what lies behind it
    out_proposals.copy_(torch.where(real, token, NO_TOKEN))
    out_counts.copy_(real.sum(1))


read_ahead_ = Op(
    "read_ahead",
    writes=("out_proposals", "out_counts"),
    triton=_launch_read_ahead,
    reference=read_ahead_reference_,
    strided=("table",),
)
"""Propose table[r, n], table[r, n + 1], ... to row r, where n is its committed length: at most K, none past the table or behind a -1.

Args:
    table: [N, M] int32, -1 where there is no token; rows past the N-th are proposed nothing.
    num_tokens: [R] int32, committed length n.
    is_live: [R] int32; a row with 0 is proposed nothing.
    out_proposals: [R, K] int32, written: proposed tokens, -1 in other places.
    out_counts: [R] int32, written: how many there are, 0 to K.

Raises:
    ArgumentError: shapes do not fit. Nothing was written.
"""
