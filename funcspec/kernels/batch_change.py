"""Correct the host's counts of computed tokens on the device, where accepted drafts are known, after rows have changed places."""

import torch

from funcspec.errors import refuse
from funcspec.kernels._checks import check_index_array
from funcspec.kernels._triton import jit, tl
from funcspec.kernels.op import Op, next_power_of_2

MAX_ROWS = 1 << 14
"""Most rows of a batch: one program moves all rows, as each may go to any other's place."""


@jit
def update_num_computed_tokens_for_batch_change_kernel(
    num_computed_tokens_ptr,  # [>= max(R, P)], written
    num_accepted_tokens_ptr,  # [R], written
    prev_positions_ptr,  # [R]
    valid_sampled_token_count_ptr,  # [P]
    prev_num_draft_tokens_ptr,  # [P]
    cpu_num_computed_tokens_ptr,  # [R]
    num_rows,
    num_prev_rows,
    LANES: tl.constexpr,
):
    row = tl.arange(0, LANES)
    real = row < num_rows
    prev = tl.load(prev_positions_ptr + row, mask=real, other=-1).to(tl.int64)
    live = real & (prev >= 0) & (prev < num_prev_rows)
    live = live & (tl.load(prev_num_draft_tokens_ptr + prev, mask=live, other=0) > 0)
    valid = tl.load(valid_sampled_token_count_ptr + prev, mask=live, other=0).to(tl.int64)
    before = tl.load(num_computed_tokens_ptr + prev, mask=live, other=0).to(tl.int64)
    known = tl.load(cpu_num_computed_tokens_ptr + row, mask=real & (live == 0), other=0).to(tl.int64)
    tl.debug_barrier()  # every row is read before any is written
    tl.store(num_computed_tokens_ptr + row, tl.where(live, before + valid, known), mask=real)
    tl.store(num_accepted_tokens_ptr + row, valid, mask=live)


def _check(
    num_computed_tokens: torch.Tensor,
    num_accepted_tokens: torch.Tensor,
    prev_positions: torch.Tensor,
    valid_sampled_token_count: torch.Tensor,
    prev_num_draft_tokens: torch.Tensor,
    cpu_num_computed_tokens: torch.Tensor,
) -> None:
    check_index_array("prev_positions", prev_positions, 0)
    check_index_array("valid_sampled_token_count", valid_sampled_token_count, 0)
    rows, prev_rows = prev_positions.shape[0], valid_sampled_token_count.shape[0]
    if rows > MAX_ROWS:
        refuse("prev_positions", f"at most {MAX_ROWS} rows", rows, "use a smaller batch")
    check_index_array("num_computed_tokens", num_computed_tokens, max(rows, prev_rows))
    check_index_array("num_accepted_tokens", num_accepted_tokens, rows)
    check_index_array("prev_num_draft_tokens", prev_num_draft_tokens, prev_rows)
    check_index_array("cpu_num_computed_tokens", cpu_num_computed_tokens, rows)


def _launch_update_num_computed_tokens_for_batch_change(
    *,
    num_computed_tokens: torch.Tensor,
    num_accepted_tokens: torch.Tensor,
    prev_positions: torch.Tensor,
    valid_sampled_token_count: torch.Tensor,
    prev_num_draft_tokens: torch.Tensor,
    cpu_num_computed_tokens: torch.Tensor,
) -> None:
    arrays = (num_computed_tokens, num_accepted_tokens, prev_positions, valid_sampled_token_count, prev_num_draft_tokens)
    _check(*arrays, cpu_num_computed_tokens)
    rows = prev_positions.shape[0]
    if rows == 0:
        return
    update_num_computed_tokens_for_batch_change_kernel[(1,)](
        *arrays,
        cpu_num_computed_tokens,
        rows,
        valid_sampled_token_count.shape[0],
        LANES=next_power_of_2(rows),
        num_warps=4,
    )


def update_num_computed_tokens_for_batch_change_reference_(
    *,
    num_computed_tokens: torch.Tensor,
    num_accepted_tokens: torch.Tensor,
    prev_positions: torch.Tensor,
    valid_sampled_token_count: torch.Tensor,
    prev_num_draft_tokens: torch.Tensor,
    cpu_num_computed_tokens: torch.Tensor,
) -> None:
    """Specify `update_num_computed_tokens_for_batch_change_` in plain torch."""
    arrays = (num_computed_tokens, num_accepted_tokens, prev_positions, valid_sampled_token_count, prev_num_draft_tokens)
    _check(*arrays, cpu_num_computed_tokens)
    rows, prev_rows = prev_positions.shape[0], valid_sampled_token_count.shape[0]
    new_counts = cpu_num_computed_tokens[:rows].long()
    if prev_rows:
        exists = (prev_positions >= 0) & (prev_positions < prev_rows)
        prev = torch.where(exists, prev_positions, 0).long()
        live = exists & (prev_num_draft_tokens[prev] > 0)
        valid = valid_sampled_token_count[prev].long()
        new_counts = torch.where(live, num_computed_tokens[prev] + valid, new_counts)
        num_accepted_tokens[:rows] = torch.where(live, valid, num_accepted_tokens[:rows])
    num_computed_tokens[:rows] = new_counts


update_num_computed_tokens_for_batch_change_ = Op(
    "update_num_computed_tokens_for_batch_change",
    writes=("num_computed_tokens", "num_accepted_tokens"),
    triton=_launch_update_num_computed_tokens_for_batch_change,
    reference=update_num_computed_tokens_for_batch_change_reference_,
)
"""Bring counts of computed tokens into the order of a new batch, with the drafts that were accepted counted in.

A host that plans a step before the last one is finished does not know how many drafts were accepted. R rows now, P rows before;
arrays are int32 or int64. Row i is live if it was row p = prev_positions[i] of the batch before, 0 <= p < P, and had drafts there:

* live: num_computed_tokens[i] becomes the old num_computed_tokens[p] + valid_sampled_token_count[p], and num_accepted_tokens[i]
  that valid count;
* else: num_computed_tokens[i] becomes cpu_num_computed_tokens[i], which the host knew, and num_accepted_tokens[i] stays.

All is read before anything is written, so rows may be permuted. Entries from R on stay. A position that the batch before does not
have (negative, P or more, or any if P is 0) is not live and reads nothing.

Args:
    num_computed_tokens: [>= max(R, P)] in the order before, in place.
    num_accepted_tokens: [R] in the new order, in place.
    prev_positions: [R] row of each row in the batch before; -1 for a new one. At most 16384 rows.
    valid_sampled_token_count: [P] accepted drafts and the token after them, in the order before.
    prev_num_draft_tokens: [P] drafts of each row, in the order before.
    cpu_num_computed_tokens: [R] what the host counted, in the new order.

Raises:
    ArgumentError, ArgumentTypeError: arrays that do not belong together; nothing has been written.
"""
