"""Of two proposals for each row, take the longer one."""

import torch

from funcspec.constants import NO_TOKEN
from funcspec.errors import refuse
from funcspec.kernels._checks import check_rows
from funcspec.kernels._triton import jit, tl
from funcspec.kernels.op import Op, next_power_of_2


@jit
def longer_proposals_kernel(
    first_proposals_ptr,  # [R, K] int32
    first_counts_ptr,  # [R] int32
    second_proposals_ptr,  # [R, K] int32
    second_counts_ptr,  # [R] int32
    out_proposals_ptr,  # [R, K] int32, written
    out_counts_ptr,  # [R] int32, written
    MAX_DRAFT: tl.constexpr,
    LANES: tl.constexpr,
):
    row = tl.program_id(0)
    lane = tl.arange(0, LANES)
    at = row.to(tl.int64) * MAX_DRAFT + lane
    first = tl.load(first_proposals_ptr + at, mask=lane < tl.minimum(tl.load(first_counts_ptr + row), MAX_DRAFT), other=-1)
    second = tl.load(second_proposals_ptr + at, mask=lane < tl.minimum(tl.load(second_counts_ptr + row), MAX_DRAFT), other=-1)
    # A placeholder is no draft, nor is what lies behind it.
    first_count = tl.min(tl.where(first >= 0, MAX_DRAFT, tl.minimum(lane, MAX_DRAFT)), axis=0)
    second_count = tl.min(tl.where(second >= 0, MAX_DRAFT, tl.minimum(lane, MAX_DRAFT)), axis=0)
    count = tl.maximum(first_count, second_count)
    proposal = tl.where(second_count > first_count, second, first)
    tl.store(out_proposals_ptr + at, tl.where(lane < count, proposal, -1), mask=lane < MAX_DRAFT)
    tl.store(out_counts_ptr + row, count)


def _check(
    first_proposals: torch.Tensor, second_proposals: torch.Tensor, out_proposals: torch.Tensor, by_row: tuple[torch.Tensor, ...]
) -> None:
    if out_proposals.ndim != 2:
        refuse("out_proposals", "[R, K]", tuple(out_proposals.shape), "allocate a place for every row and draft")
    for name, proposals in (("first_proposals", first_proposals), ("second_proposals", second_proposals)):
        if proposals.shape != out_proposals.shape:
            shape = f"the shape {tuple(out_proposals.shape)} of out_proposals"
            refuse(name, shape, tuple(proposals.shape), "propose up to K tokens a row")
    check_rows(out_proposals.shape[0], ("first_counts", "second_counts", "out_counts"), by_row)


def _launch_longer_proposals(
    *,
    first_proposals: torch.Tensor,
    first_counts: torch.Tensor,
    second_proposals: torch.Tensor,
    second_counts: torch.Tensor,
    out_proposals: torch.Tensor,
    out_counts: torch.Tensor,
) -> None:
    _check(first_proposals, second_proposals, out_proposals, (first_counts, second_counts, out_counts))
    rows, most = out_proposals.shape
    longer_proposals_kernel[(rows,)](
        first_proposals,
        first_counts,
        second_proposals,
        second_counts,
        out_proposals,
        out_counts,
        MAX_DRAFT=most,
        LANES=next_power_of_2(most),
        num_warps=1,
    )


def longer_proposals_reference_(
    *,
    first_proposals: torch.Tensor,
    first_counts: torch.Tensor,
    second_proposals: torch.Tensor,
    second_counts: torch.Tensor,
    out_proposals: torch.Tensor,
    out_counts: torch.Tensor,
) -> None:
    """Specify `longer_proposals_` in plain torch."""
    _check(first_proposals, second_proposals, out_proposals, (first_counts, second_counts, out_counts))
    lane = torch.arange(out_proposals.shape[1], device=out_proposals.device)
    # A placeholder is no draft, nor is what lies behind it.
    first = ((lane < first_counts[:, None]) & (first_proposals >= 0)).int().cumprod(1)
    second = ((lane < second_counts[:, None]) & (second_proposals >= 0)).int().cumprod(1)
    takes_second = (second.sum(1) > first.sum(1))[:, None]
    real = torch.where(takes_second, second, first)
    out_counts.copy_(real.sum(1))
    out_proposals.copy_(torch.where(real == 1, torch.where(takes_second, second_proposals, first_proposals), NO_TOKEN))


longer_proposals_ = Op(
    "longer_proposals",
    writes=("out_proposals", "out_counts"),
    triton=_launch_longer_proposals,
    reference=longer_proposals_reference_,
)
"""Take, for each row, the one of two proposals that has more tokens, and the first where they have equally many.

A proposal has as many tokens as its count says, at most K, and ends before a negative id.

Args:
    first_proposals, second_proposals: [R, K] int32 proposed tokens; what lies past a proposal is not looked at.
    first_counts, second_counts: [R] int32, how many of them there are.
    out_proposals: [R, K] int32, written: the longer one, -1 in other places.
    out_counts: [R] int32, written: how many tokens it has, 0 to K.

Raises:
    ArgumentError: shapes do not fit. Nothing was written.
"""
