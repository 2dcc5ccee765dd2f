"""Which token of every padded query to sample from, and how many of its drafts were rejected, without moving a token."""

import torch

from funcspec.kernels._checks import check_index_array
from funcspec.kernels._triton import jit, tl
from funcspec.kernels.op import Op

TILE = 32


@jit
def prepare_inputs_padded_kernel(
    cu_num_draft_tokens_ptr,  # [R]
    valid_sampled_tokens_count_ptr,  # [R]
    query_start_loc_ptr,  # [R + 1]
    out_token_indices_ptr,  # [R], written
    out_num_rejected_ptr,  # [R], written
    num_rows,
    LANES: tl.constexpr,
):
    """One lane a row."""
    row = tl.program_id(0).to(tl.int64) * LANES + tl.arange(0, LANES)
    real = row < num_rows
    drafts_to = tl.load(cu_num_draft_tokens_ptr + row, mask=real, other=0).to(tl.int64)
    drafts_from = tl.load(cu_num_draft_tokens_ptr + row - 1, mask=real & (row > 0), other=0).to(tl.int64)
    num_draft = tl.maximum(drafts_to - drafts_from, 0)
    num_valid = tl.load(valid_sampled_tokens_count_ptr + row, mask=real, other=0).to(tl.int64)
    begin = tl.load(query_start_loc_ptr + row, mask=real, other=0).to(tl.int64)
    end = tl.load(query_start_loc_ptr + row + 1, mask=real, other=0).to(tl.int64)
    rejected = tl.minimum(tl.maximum(num_draft + 1 - num_valid, 0), num_draft)
    index = tl.where(end > begin, tl.maximum(end - 1 - rejected, begin), 0)
    tl.store(out_token_indices_ptr + row, index, mask=real)
    tl.store(out_num_rejected_ptr + row, rejected, mask=real)


def _check(
    cu_num_draft_tokens: torch.Tensor,
    valid_sampled_tokens_count: torch.Tensor,
    query_start_loc: torch.Tensor,
    out_token_indices: torch.Tensor,
    out_num_rejected: torch.Tensor,
) -> None:
    check_index_array("cu_num_draft_tokens", cu_num_draft_tokens, 0)
    rows = cu_num_draft_tokens.shape[0]
    check_index_array("valid_sampled_tokens_count", valid_sampled_tokens_count, rows)
    check_index_array("query_start_loc", query_start_loc, rows + 1)
    check_index_array("out_token_indices", out_token_indices, rows)
    check_index_array("out_num_rejected", out_num_rejected, rows)


def _launch_prepare_inputs_padded(
    *,
    cu_num_draft_tokens: torch.Tensor,
    valid_sampled_tokens_count: torch.Tensor,
    query_start_loc: torch.Tensor,
    out_token_indices: torch.Tensor,
    out_num_rejected: torch.Tensor,
) -> None:
    _check(cu_num_draft_tokens, valid_sampled_tokens_count, query_start_loc, out_token_indices, out_num_rejected)
    rows = cu_num_draft_tokens.shape[0]
    if rows == 0:
        return
    prepare_inputs_padded_kernel[((rows + TILE - 1) // TILE,)](
        cu_num_draft_tokens,
        valid_sampled_tokens_count,
        query_start_loc,
        out_token_indices,
        out_num_rejected,
        rows,
        LANES=TILE,
        num_warps=1,
    )


def prepare_inputs_padded_reference_(
    *,
    cu_num_draft_tokens: torch.Tensor,
    valid_sampled_tokens_count: torch.Tensor,
    query_start_loc: torch.Tensor,
    out_token_indices: torch.Tensor,
    out_num_rejected: torch.Tensor,
) -> None:
    """Specify `prepare_inputs_padded_` in plain torch."""
    _check(cu_num_draft_tokens, valid_sampled_tokens_count, query_start_loc, out_token_indices, out_num_rejected)
    rows = cu_num_draft_tokens.shape[0]
    sums = cu_num_draft_tokens.long()
    num_draft = sums.diff(prepend=sums.new_zeros(1)).clamp_(min=0)
    begin, end = query_start_loc[:rows].long(), query_start_loc[1 : rows + 1].long()
    rejected = torch.minimum((num_draft + 1 - valid_sampled_tokens_count[:rows]).clamp_(min=0), num_draft)
    out_token_indices[:rows] = torch.where(end > begin, torch.maximum(end - 1 - rejected, begin), 0)
    out_num_rejected[:rows] = rejected


prepare_inputs_padded_ = Op(
    "prepare_inputs_padded",
    writes=("out_token_indices", "out_num_rejected"),
    triton=_launch_prepare_inputs_padded,
    reference=prepare_inputs_padded_reference_,
)
"""Find the token to sample from in queries that still hold their rejected drafts.

R rows; arrays are int32 or int64. Row i had n drafts and v valid sampled tokens (accepted ones and the token after them).
Rejected are n + 1 - v, kept within 0 and n: a row whose sampling gave nothing (v = 0) has all its drafts rejected and
points at its newest committed token, never into the row before it. A row without drafts has none rejected, whatever v
says. The index is that of the last token that is left, inside the row's own query; 0 for an empty query.

Args:
    cu_num_draft_tokens: [R] inclusive prefix sums of n.
    valid_sampled_tokens_count: [R] v.
    query_start_loc: [R + 1] exclusive prefix sums of the query lengths.
    out_token_indices, out_num_rejected: [R] written.

Raises:
    ArgumentError, ArgumentTypeError: arrays that do not belong together; nothing has been written.
"""
