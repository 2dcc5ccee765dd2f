"""Rotary positions of a pass, for models that rotate by other numbers than the places in the cache (M-RoPE)."""

import torch

from funcspec.errors import ArgumentTypeError, refuse
from funcspec.kernels._triton import jit, tl
from funcspec.kernels.op import Op

BLOCK = 128


@jit
def rope_positions_kernel(
    table_ptr,  # [R, A, L] int32
    token_rows_ptr,  # [T] int32
    positions_ptr,  # [T] int32
    out_rope_positions_ptr,  # [A, T] int32, written
    num_axes,
    length,
    num_tokens,
    BLOCK: tl.constexpr,
):
    place = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    axis = tl.program_id(1)
    inside = place < num_tokens
    row = tl.load(token_rows_ptr + place, mask=inside, other=-1).to(tl.int64)
    position = tl.load(positions_ptr + place, mask=inside, other=0)
    live = (row >= 0) & (position >= 0) & (position < length)
    value = tl.load(table_ptr + (row * num_axes + axis) * length + position, mask=live, other=0)
    tl.store(out_rope_positions_ptr + axis.to(tl.int64) * num_tokens + place, value, mask=inside)


def _check(table: torch.Tensor, token_rows: torch.Tensor, positions: torch.Tensor, out: torch.Tensor) -> None:
    if table.dtype != torch.int32 or table.dim() != 3:
        refuse("table", "int32 [R, A, L]", f"{table.dtype} {tuple(table.shape)}", "allocate it so", ArgumentTypeError)
    count = token_rows.shape[0]
    arrays = {
        "token_rows": (token_rows, (count,)),
        "positions": (positions, (count,)),
        "out_rope_positions": (out, (table.shape[1], count)),
    }
    for name, (array, shape) in arrays.items():
        if array.dtype != torch.int32:
            refuse(name, "int32", array.dtype, "convert it", ArgumentTypeError)
        if tuple(array.shape) != shape:
            refuse(name, f"shape {shape} for {count} tokens", tuple(array.shape), "pass arrays of one pass")


def _launch_rope_positions(
    *, table: torch.Tensor, token_rows: torch.Tensor, positions: torch.Tensor, out_rope_positions: torch.Tensor
) -> None:
    _check(table, token_rows, positions, out_rope_positions)
    axes, count = out_rope_positions.shape
    if axes and count:
        rope_positions_kernel[(-(-count // BLOCK), axes)](
            table, token_rows, positions, out_rope_positions, axes, table.shape[2], count, BLOCK=BLOCK
        )


def rope_positions_reference_(
    *, table: torch.Tensor, token_rows: torch.Tensor, positions: torch.Tensor, out_rope_positions: torch.Tensor
) -> None:
    """Specify `rope_positions_` in plain torch."""
    _check(table, token_rows, positions, out_rope_positions)
    length = table.shape[2]
    live = (token_rows >= 0) & (positions >= 0) & (positions < length)
    found = table[token_rows.clamp(min=0).long(), :, positions.clamp(0, length - 1).long()]
    out_rope_positions.copy_((found * live[:, None]).T)


rope_positions_ = Op("rope_positions", writes=("out_rope_positions",), triton=_launch_rope_positions, reference=rope_positions_reference_)
"""Look up the rotary positions of the tokens of a pass.

Args:
    table: [R, A, L] int32: for each row and axis, the rotary position of each position in the cache.
    token_rows: [T] int32, the row of each token, -1 where there is none.
    positions: [T] int32, positions in the cache; those out of range have no rotary position.
    out_rope_positions: [A, T] int32, written: 0 where there is no token.

Raises:
    ArgumentError, ArgumentTypeError: shapes or dtypes do not fit. Nothing was written.

Reference: Wang et al. 2024, "Qwen2-VL", arXiv 2409.12191 (multimodal rotary embeddings).
"""
