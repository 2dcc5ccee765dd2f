"""The newest valid token of every row of a padded sample matrix, and how many tokens of the row are valid."""

import torch

from funcspec.errors import ArgumentTypeError, refuse
from funcspec.kernels._checks import check_index_array, check_index_matrix, check_positive
from funcspec.kernels._triton import jit, tl
from funcspec.kernels.op import Op, next_power_of_2


@jit
def prepare_next_token_padded_kernel(
    sampled_token_ids_ptr,  # [R, W]
    discard_request_mask_ptr,  # [R] bool
    backup_next_token_ids_ptr,  # [R]
    out_next_token_ids_ptr,  # [R], written
    out_valid_sampled_tokens_count_ptr,  # [R], written
    sampled_stride,
    vocab_size,
    WIDTH: tl.constexpr,
    LANES: tl.constexpr,
):
    """One program a row, one lane a column."""
    row = tl.program_id(0).to(tl.int64)
    lane = tl.arange(0, LANES)
    # The flag is folded into a bound: the interpreter cannot combine a flag with a vector of flags.
    columns = tl.where(tl.load(discard_request_mask_ptr + row) == 0, WIDTH, 0)
    backup = tl.load(backup_next_token_ids_ptr + row).to(tl.int64)
    token = tl.load(sampled_token_ids_ptr + row * sampled_stride + lane, mask=lane < columns, other=-1).to(tl.int64)
    valid = (token >= 0) & (token < vocab_size)
    count = tl.sum(valid.to(tl.int32), axis=0)
    last = tl.max(tl.where(valid, lane, -1), axis=0)
    newest = tl.sum(tl.where(lane == last, token, 0), axis=0)
    tl.store(out_next_token_ids_ptr + row, tl.where(count > 0, newest, backup))
    tl.store(out_valid_sampled_tokens_count_ptr + row, count)


def _check(
    sampled_token_ids: torch.Tensor,
    discard_request_mask: torch.Tensor,
    backup_next_token_ids: torch.Tensor,
    vocab_size: int,
    out_next_token_ids: torch.Tensor,
    out_valid_sampled_tokens_count: torch.Tensor,
) -> None:
    check_positive("vocab_size", vocab_size)
    check_index_matrix("sampled_token_ids", sampled_token_ids, 0)
    rows, width = sampled_token_ids.shape
    check_positive("sampled_token_ids columns", width)
    if discard_request_mask.dtype != torch.bool:
        refuse("discard_request_mask", "bool", discard_request_mask.dtype, "compare with 0 once, outside the loop", ArgumentTypeError)
    if discard_request_mask.dim() != 1 or discard_request_mask.shape[0] < rows:
        shape = f"shape {tuple(discard_request_mask.shape)}"
        refuse("discard_request_mask", f"a 1-D array of at least {rows} entries", shape, "pass arrays of one batch")
    check_index_array("backup_next_token_ids", backup_next_token_ids, rows)
    check_index_array("out_next_token_ids", out_next_token_ids, rows)
    check_index_array("out_valid_sampled_tokens_count", out_valid_sampled_tokens_count, rows)


def _launch_prepare_next_token_padded(
    *,
    sampled_token_ids: torch.Tensor,
    discard_request_mask: torch.Tensor,
    backup_next_token_ids: torch.Tensor,
    vocab_size: int,
    out_next_token_ids: torch.Tensor,
    out_valid_sampled_tokens_count: torch.Tensor,
) -> None:
    outputs = (out_next_token_ids, out_valid_sampled_tokens_count)
    _check(sampled_token_ids, discard_request_mask, backup_next_token_ids, vocab_size, *outputs)
    rows, width = sampled_token_ids.shape
    if rows == 0:
        return
    prepare_next_token_padded_kernel[(rows,)](
        sampled_token_ids,
        discard_request_mask,
        backup_next_token_ids,
        *outputs,
        sampled_token_ids.stride(0),
        vocab_size,
        WIDTH=width,
        LANES=next_power_of_2(width),
        num_warps=1,
    )


def prepare_next_token_padded_reference_(
    *,
    sampled_token_ids: torch.Tensor,
    discard_request_mask: torch.Tensor,
    backup_next_token_ids: torch.Tensor,
    vocab_size: int,
    out_next_token_ids: torch.Tensor,
    out_valid_sampled_tokens_count: torch.Tensor,
) -> None:
    """Specify `prepare_next_token_padded_` in plain torch."""
    outputs = (out_next_token_ids, out_valid_sampled_tokens_count)
    _check(sampled_token_ids, discard_request_mask, backup_next_token_ids, vocab_size, *outputs)
    rows, width = sampled_token_ids.shape
    valid = (sampled_token_ids >= 0) & (sampled_token_ids < vocab_size) & ~discard_request_mask[:rows, None]
    count = valid.sum(1)
    lane = torch.arange(width, device=sampled_token_ids.device)
    newest = torch.where(valid, lane, 0).amax(1, keepdim=True)
    out_next_token_ids[:rows] = torch.where(count > 0, sampled_token_ids.gather(1, newest)[:, 0], backup_next_token_ids[:rows])
    out_valid_sampled_tokens_count[:rows] = count


prepare_next_token_padded_ = Op(
    "prepare_next_token_padded",
    writes=("out_next_token_ids", "out_valid_sampled_tokens_count"),
    triton=_launch_prepare_next_token_padded,
    reference=prepare_next_token_padded_reference_,
    strided=("sampled_token_ids",),
)
"""Pick the token to feed next from what was sampled.

R rows of W places, V = vocab_size; index arrays are int32 or int64. A token t is valid exactly when 0 <= t < V: -1, every
other negative id and ids from V on are skipped, wherever they stand. The count is that of all valid tokens, the next
token is the last of them. A row with none, and a discarded row (whose samples are not read), gives its backup and 0.

Args:
    sampled_token_ids: [R, W] accepted tokens and the token after them, -1 in the places of rejected ones; rows any
        stride apart.
    discard_request_mask: [R] bool, rows whose samples do not count (their prompt is not finished).
    backup_next_token_ids: [R] the newest committed token of each row.
    vocab_size: V.
    out_next_token_ids, out_valid_sampled_tokens_count: [R] written.

Raises:
    ArgumentError, ArgumentTypeError: arrays that do not belong together; nothing has been written.
"""
