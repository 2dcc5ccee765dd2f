"""The slot of a position in a row's block table, for kernels whose tables are in batch order."""

import torch

from funcspec.constants import PAD_SLOT
from funcspec.kernels._triton import jit, tl


@jit
def slots_of(table_row_ptr, position, live, num_columns, null_block, BLOCK_SIZE: tl.constexpr):
    """Slots of int64 positions: -1 where not `live`, and for what has no block of its own. The table is not read there."""
    live = live & (position >= 0)
    # Division of a negative number differs between the interpreter and compiled code: only what is live is divided.
    at = tl.where(live, position, 0)
    column = at // BLOCK_SIZE
    block = tl.load(table_row_ptr + column, mask=live & (column < num_columns), other=-1).to(tl.int64)
    return tl.where((block >= 0) & (block != null_block), block * BLOCK_SIZE + at % BLOCK_SIZE, -1)


def slots_of_reference(
    block_tables: torch.Tensor,
    num_blocks: torch.Tensor | None,
    row: torch.Tensor,
    position: torch.Tensor,
    live: torch.Tensor,
    block_size: int,
    null_block: int,
) -> torch.Tensor:
    """`slots_of` in torch: int64 slots of positions of the given rows, all of one shape."""
    columns = block_tables.shape[1]
    if columns == 0 or block_tables.shape[0] == 0:
        return torch.full_like(position, PAD_SLOT)
    column = position.div(block_size, rounding_mode="floor")
    live = live & (position >= 0) & (column < columns)
    if num_blocks is not None:
        live = live & (column < num_blocks[row])
    block = block_tables[row, torch.where(live, column, 0)].long()
    return torch.where(live & (block >= 0) & (block != null_block), block * block_size + position % block_size, PAD_SLOT)
