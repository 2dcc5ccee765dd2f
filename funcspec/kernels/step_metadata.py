"""One draft step forward for every row: next position, its cache slot and the new length, in one launch."""

import torch

from funcspec.constants import PAD_SLOT
from funcspec.errors import refuse
from funcspec.kernels._checks import check_index_array, check_index_matrix, check_overflow, check_positive
from funcspec.kernels._triton import jit, tl
from funcspec.kernels.op import Op

TILE = 32


@jit
def step_slot_mapping_metadata_kernel(
    positions_ptr,  # [B]
    block_tables_ptr,  # [B, N]
    num_blocks_ptr,  # [B], read when HAS_NUM_BLOCKS
    seq_lens_ptr,  # [B] or [P], written
    out_positions_ptr,  # [B] or [P], written; may be positions_ptr
    out_slot_mapping_ptr,  # [P], written
    num_rows,
    num_padded,
    num_columns,
    table_stride,
    max_model_len,
    BLOCK_SIZE: tl.constexpr,
    HAS_NUM_BLOCKS: tl.constexpr,
    FREEZE: tl.constexpr,
    LANES: tl.constexpr,
):
    """One lane a row, padding rows included."""
    row = tl.program_id(0).to(tl.int64) * LANES + tl.arange(0, LANES)
    real = row < num_rows
    position = tl.load(positions_ptr + row, mask=real, other=0).to(tl.int64)
    length = tl.load(seq_lens_ptr + row, mask=real, other=0).to(tl.int64)
    following = position + 1
    fits = real & (following < max_model_len)
    if FREEZE:
        fits = fits & (length > 0) & (following >= 0)
    # Division of a negative number differs between the interpreter and compiled code: only what fits is divided.
    at = tl.where(fits & (following >= 0), following, 0)
    column = at // BLOCK_SIZE
    owned = fits & (following >= 0) & (column < num_columns)
    if HAS_NUM_BLOCKS:
        owned = owned & (column < tl.load(num_blocks_ptr + row, mask=real, other=0).to(tl.int64))
    block = tl.load(block_tables_ptr + row * table_stride + column, mask=owned, other=-1).to(tl.int64)
    slot = tl.where(block >= 0, block * BLOCK_SIZE + at % BLOCK_SIZE, -1)
    # Limited before the 1 is added: a length at the limit of its type must not wrap.
    grown = tl.minimum(length, max_model_len - 1) + 1
    tl.store(out_slot_mapping_ptr + row, slot, mask=row < num_padded)
    if FREEZE:
        stopped = tl.where(length > 0, tl.maximum(tl.minimum(following, max_model_len - 1), 0), 0)
        tl.store(out_positions_ptr + row, tl.where(fits, following, stopped), mask=row < num_padded)
        tl.store(seq_lens_ptr + row, tl.where(fits, grown, length), mask=row < num_padded)
    else:
        tl.store(out_positions_ptr + row, tl.where(fits, following, 0), mask=real)
        tl.store(seq_lens_ptr + row, tl.where(fits, grown, 1), mask=real)


def _check(
    positions: torch.Tensor,
    block_tables: torch.Tensor,
    num_blocks: torch.Tensor | None,
    seq_lens: torch.Tensor,
    block_size: int,
    max_model_len: int,
    padded_num_reqs: int | None,
    overflow: str,
    out_positions: torch.Tensor,
    out_slot_mapping: torch.Tensor,
) -> int:
    """Check everything and return the number of rows that are written, padding included."""
    check_overflow(overflow)
    check_positive("block_size", block_size)
    check_positive("max_model_len", max_model_len)
    check_index_array("positions", positions, 0)
    rows = positions.shape[0]
    padded = rows if padded_num_reqs is None else padded_num_reqs
    if padded < rows:
        refuse("padded_num_reqs", f"at least the {rows} rows of positions", padded, "pass the padded batch size, or leave it out")
    written = padded if overflow == "freeze" else rows
    check_index_matrix("block_tables", block_tables, rows)
    check_index_array("seq_lens", seq_lens, written)
    check_index_array("out_positions", out_positions, written)
    check_index_array("out_slot_mapping", out_slot_mapping, padded)
    if num_blocks is not None:
        check_index_array("num_blocks", num_blocks, rows)
    return padded


def _launch_step_slot_mapping_metadata(
    *,
    positions: torch.Tensor,
    block_tables: torch.Tensor,
    num_blocks: torch.Tensor | None = None,
    seq_lens: torch.Tensor,
    block_size: int,
    max_model_len: int,
    padded_num_reqs: int | None = None,
    overflow: str = "reference",
    out_positions: torch.Tensor,
    out_slot_mapping: torch.Tensor,
) -> None:
    padded = _check(
        positions, block_tables, num_blocks, seq_lens, block_size, max_model_len, padded_num_reqs, overflow, out_positions, out_slot_mapping
    )
    if padded == 0:
        return
    step_slot_mapping_metadata_kernel[((padded + TILE - 1) // TILE,)](
        positions,
        block_tables,
        positions if num_blocks is None else num_blocks,
        seq_lens,
        out_positions,
        out_slot_mapping,
        positions.shape[0],
        padded,
        block_tables.shape[1],
        block_tables.stride(0),
        max_model_len,
        BLOCK_SIZE=block_size,
        HAS_NUM_BLOCKS=num_blocks is not None,
        FREEZE=overflow == "freeze",
        LANES=TILE,
        num_warps=1,
    )


def step_slot_mapping_metadata_reference_(
    *,
    positions: torch.Tensor,
    block_tables: torch.Tensor,
    num_blocks: torch.Tensor | None = None,
    seq_lens: torch.Tensor,
    block_size: int,
    max_model_len: int,
    padded_num_reqs: int | None = None,
    overflow: str = "reference",
    out_positions: torch.Tensor,
    out_slot_mapping: torch.Tensor,
) -> None:
    """Specify `step_slot_mapping_metadata_` in plain torch."""
    padded = _check(
        positions, block_tables, num_blocks, seq_lens, block_size, max_model_len, padded_num_reqs, overflow, out_positions, out_slot_mapping
    )
    rows, columns = positions.shape[0], block_tables.shape[1]
    freeze = overflow == "freeze"
    following, length = positions.long() + 1, seq_lens[:rows].long()
    fits = following < max_model_len
    if freeze:
        fits &= (length > 0) & (following >= 0)
    column = following.div(block_size, rounding_mode="floor")
    owned = fits & (following >= 0) & (column < columns)
    if num_blocks is not None:
        owned &= column < num_blocks[:rows]
    if columns:
        block = block_tables[:rows].gather(1, torch.where(owned, column, 0)[:, None])[:, 0].long()
        slot = torch.where(owned & (block >= 0), block * block_size + following % block_size, PAD_SLOT)
    else:
        slot = PAD_SLOT
    stopped = torch.where(length > 0, following.clamp(0, max_model_len - 1), 0) if freeze else 0
    out_slot_mapping[:rows] = slot
    out_slot_mapping[rows:padded] = PAD_SLOT
    out_positions[:rows] = torch.where(fits, following, stopped)
    seq_lens[:rows] = torch.where(fits, length.clamp(max=max_model_len - 1) + 1, length if freeze else 1)
    if freeze:
        out_positions[rows:padded] = 0
        seq_lens[rows:padded] = 0


step_slot_mapping_metadata_ = Op(
    "step_slot_mapping_metadata",
    writes=("seq_lens", "out_positions", "out_slot_mapping"),
    triton=_launch_step_slot_mapping_metadata,
    reference=step_slot_mapping_metadata_reference_,
    strided=("block_tables",),
)
"""Advance every row by one draft step.

B rows, P >= B rows with padding, N blocks a row, L = max_model_len. Arrays are int32 or int64. Slots are computed in 64
bits; an int32 output is for caches of fewer than 2^31 slots. With x = positions[i] + 1 < L: position x, length
min(seq_lens[i] + 1, L), slot block_tables[i, x // block_size] * block_size + x % block_size. The slot is -1 where x lies
past the table, past the row's `num_blocks`, or in a block of -1: a slot of another token is never reused.

A row with x >= L:

* overflow="reference": position 0, slot -1, length 1. Its next step resumes at position 1 with a live slot, so the caller
  must ignore the row from then on. Rows B up to P: only their slot is written, -1.
* overflow="freeze": position L - 1, slot -1, length unchanged. Its next step is over again: once over, it stays over and
  writes nothing. A row of length 0 is idle: it keeps length 0, with position 0 and slot -1, as do rows B up to P, whose
  position, slot and length are all written.

Args:
    positions: [B] position just consumed.
    block_tables: [>= B, N] block ids, rows any stride apart; -1 where a row owns none.
    num_blocks: [B] number of blocks that each row owns, or None when -1 says so.
    seq_lens: [B], [P] when freezing; in place.
    block_size, max_model_len: tokens of a block and L.
    padded_num_reqs: P; None means B.
    overflow: "reference" or "freeze".
    out_positions: [B], [P] when freezing; written; may be `positions` itself.
    out_slot_mapping: [P] written.

Raises:
    ArgumentError, ArgumentTypeError: arrays that do not belong together; nothing has been written.
"""
