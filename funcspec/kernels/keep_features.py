"""Keep hidden states for the next pass of a draft that reads them."""

import torch

from funcspec.errors import ArgumentTypeError, refuse
from funcspec.kernels._triton import jit, tl
from funcspec.kernels.op import Op

BLOCK = 1024


@jit
def keep_features_kernel(
    hidden_ptr,  # [R * W, H]
    is_live_ptr,  # [R] int32
    features_ptr,  # [R, P, F] float32, written
    hidden_stride,
    hidden_size,
    num_places,
    num_columns,
    first_column,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
):
    flat = tl.program_id(0).to(tl.int64)
    row = flat // WIDTH
    if tl.load(is_live_ptr + row) != 0:
        column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
        inside = column < hidden_size
        values = tl.load(hidden_ptr + flat * hidden_stride + column, mask=inside, other=0.0).to(tl.float32)
        at = (row * num_places + flat % WIDTH) * num_columns + first_column
        tl.store(features_ptr + at + column, values, mask=inside)


def _check(hidden: torch.Tensor, is_live: torch.Tensor, features: torch.Tensor, first_column: int) -> int:
    """Refuse what does not fit; return W."""
    if hidden.dtype not in (torch.float32, torch.bfloat16, torch.float16):
        refuse("hidden", "float32, bfloat16 or float16", hidden.dtype, "let the model return one of these", ArgumentTypeError)
    if features.dtype != torch.float32 or features.dim() != 3:
        refuse("features", "float32 [R, P, F]", f"{features.dtype} {tuple(features.shape)}", "allocate it so", ArgumentTypeError)
    rows, places, columns = features.shape
    if is_live.shape != (rows,) or is_live.dtype != torch.int32:
        refuse("is_live", f"int32 [{rows}]", f"{is_live.dtype} {tuple(is_live.shape)}", "pass arrays of one batch")
    if hidden.dim() != 2 or (hidden.shape[0] % rows if rows else hidden.shape[0]):
        refuse("hidden", f"[{rows} * W, H]", f"shape {tuple(hidden.shape)}", "pass hidden states of one batch")
    width = hidden.shape[0] // max(rows, 1)
    if width > places or first_column < 0 or first_column + hidden.shape[1] > columns:
        found = f"{width} places of columns {first_column} to {first_column + hidden.shape[1]}"
        refuse("features", f"room for {places} places of {columns} columns", found, "allocate more of them")
    return width


def _launch_keep_features(*, hidden: torch.Tensor, is_live: torch.Tensor, features: torch.Tensor, first_column: int) -> None:
    width = _check(hidden, is_live, features, first_column)
    count, size = hidden.shape
    if count == 0:
        return
    _, places, columns = features.shape
    keep_features_kernel[(count, -(-size // BLOCK))](
        hidden, is_live, features, hidden.stride(0), size, places, columns, first_column, WIDTH=width, BLOCK=BLOCK
    )


def keep_features_reference_(*, hidden: torch.Tensor, is_live: torch.Tensor, features: torch.Tensor, first_column: int) -> None:
    """Specify `keep_features_` in plain torch."""
    width = _check(hidden, is_live, features, first_column)
    kept = features[:, :width, first_column : first_column + hidden.shape[1]]
    new = hidden.view(features.shape[0], width, hidden.shape[1]).float()
    kept.copy_(torch.where((is_live != 0)[:, None, None], new, kept))


keep_features_ = Op(
    "keep_features", writes=("features",), triton=_launch_keep_features, reference=keep_features_reference_, strided=("hidden",)
)
"""Copy hidden states of the first W places of every live row into some columns of that row's features.

Args:
    hidden: [R * W, H] float32, bfloat16 or float16, row by row; any row stride, columns consecutive.
    is_live: [R] int32, 0 for rows whose features stay as they are.
    features: [R, P, F] float32, in place; places from W on and other columns stay as they are.
    first_column: where the H columns begin.

Raises:
    ArgumentError: shapes that do not fit. Nothing was written.
    ArgumentTypeError: another dtype.
"""
