"""Repeat one value a row for each of the row's tokens."""

import torch

from funcspec.errors import ArgumentTypeError, refuse
from funcspec.kernels._checks import check_index_array
from funcspec.kernels._triton import jit, tl
from funcspec.kernels.op import Op

TILE = 128
DTYPES = (torch.float32, torch.int32, torch.int64)


@jit
def expand_batch_to_tokens_kernel(
    values_ptr,  # [R]
    cu_num_tokens_ptr,  # [R]
    out_expanded_ptr,  # [W], written
    replace_from,
    replace_to,
    num_places,
    LANES: tl.constexpr,
):
    """One program a row."""
    row = tl.program_id(0).to(tl.int64)
    begin = tl.load(cu_num_tokens_ptr + row - 1, mask=row > 0, other=0).to(tl.int64)
    end = tl.load(cu_num_tokens_ptr + row).to(tl.int64)
    value = tl.load(values_ptr + row)
    value = tl.where(value == replace_from, replace_to, value).to(value.dtype)
    while begin < end:
        place = begin + tl.arange(0, LANES)
        inside = (place >= 0) & (place < end) & (place < num_places)
        tl.store(out_expanded_ptr + place, tl.full((LANES,), 0, value.dtype) + value, mask=inside)
        begin += LANES


def _check(values: torch.Tensor, cu_num_tokens: torch.Tensor, out_expanded: torch.Tensor) -> None:
    if values.dtype not in DTYPES:
        refuse("values", "float32, int32 or int64", values.dtype, "convert it once, outside the loop", ArgumentTypeError)
    if out_expanded.dtype != values.dtype:
        refuse("out_expanded", f"{values.dtype}, as the values are", out_expanded.dtype, "allocate it like the values", ArgumentTypeError)
    for name, array in (("values", values), ("out_expanded", out_expanded)):
        if array.dim() != 1:
            refuse(name, "a 1-D array", f"shape {tuple(array.shape)}", "pass arrays of one batch")
    check_index_array("cu_num_tokens", cu_num_tokens, values.shape[0])


def _launch_expand_batch_to_tokens(
    *,
    values: torch.Tensor,
    cu_num_tokens: torch.Tensor,
    replace_from: float = 0,
    replace_to: float = 0,
    out_expanded: torch.Tensor,
) -> None:
    _check(values, cu_num_tokens, out_expanded)
    rows = values.shape[0]
    if rows == 0:
        return
    expand_batch_to_tokens_kernel[(rows,)](
        values, cu_num_tokens, out_expanded, replace_from, replace_to, out_expanded.shape[0], LANES=TILE, num_warps=1
    )


def expand_batch_to_tokens_reference_(
    *,
    values: torch.Tensor,
    cu_num_tokens: torch.Tensor,
    replace_from: float = 0,
    replace_to: float = 0,
    out_expanded: torch.Tensor,
) -> None:
    """Specify `expand_batch_to_tokens_` in plain torch."""
    _check(values, cu_num_tokens, out_expanded)
    rows = values.shape[0]
    if rows == 0:
        return
    ends = cu_num_tokens[:rows].long()
    places = max(min(int(ends[-1]), out_expanded.shape[0]), 0)
    row = torch.searchsorted(ends, torch.arange(places, device=values.device), right=True)
    out_expanded[:places] = torch.where(values == replace_from, replace_to, values)[row].to(values.dtype)


expand_batch_to_tokens_ = Op(
    "expand_batch_to_tokens",
    writes=("out_expanded",),
    triton=_launch_expand_batch_to_tokens,
    reference=expand_batch_to_tokens_reference_,
)
"""Give every token of a flat batch the value of its row, for example a temperature; one value can be replaced on the way.

R rows, however many tokens each. Places behind the last row are left alone.

Args:
    values: [R] float32, int32 or int64.
    cu_num_tokens: [R] int32 or int64, inclusive prefix sums of the rows' numbers of tokens.
    replace_from, replace_to: a value to replace and its replacement; the same for none. Both must be of the values' kind.
    out_expanded: [W] of the values' dtype, written up to the last prefix sum. What does not fit is cut off.

Raises:
    ArgumentError, ArgumentTypeError: arrays that do not belong together; nothing has been written.
"""
