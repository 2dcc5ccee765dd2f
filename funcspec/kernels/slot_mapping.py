"""Cache slots of a flat batch of tokens, from their positions and the block tables of their rows."""

import torch

from funcspec.constants import PAD_SLOT
from funcspec.errors import refuse
from funcspec.kernels._checks import check_index_array, check_index_matrix, check_positive
from funcspec.kernels._triton import jit, tl
from funcspec.kernels.op import Op

TILE = 128


@jit
def compute_slot_mapping_kernel(
    idx_mapping_ptr,  # [R]
    query_start_loc_ptr,  # [R + 1]
    positions_ptr,  # [T]
    block_tables_ptr,  # [S, N]
    num_blocks_ptr,  # [S], read when HAS_NUM_BLOCKS
    is_live_ptr,  # [T], read when HAS_IS_LIVE
    out_slot_mapping_ptr,  # [W], written
    num_rows,
    num_tokens,
    num_states,
    num_columns,
    num_places,
    table_stride,
    BLOCK_SIZE: tl.constexpr,
    HAS_NUM_BLOCKS: tl.constexpr,
    HAS_IS_LIVE: tl.constexpr,
    LANES: tl.constexpr,
):
    """One program a row, and one more for the tail of the output."""
    row = tl.program_id(0).to(tl.int64)
    lane = tl.arange(0, LANES)
    begin = tl.load(query_start_loc_ptr + row).to(tl.int64)
    if row < num_rows:
        end = tl.load(query_start_loc_ptr + row + 1).to(tl.int64)
        state = tl.load(idx_mapping_ptr + row).to(tl.int64)
        active = (state >= 0) & (state < num_states)
        # The row's flag is folded into a bound: the interpreter cannot combine a flag with a vector of flags.
        readable = tl.where(active, num_tokens, 0)
        columns = begin * 0 + num_columns
        if HAS_NUM_BLOCKS:
            columns = tl.minimum(columns, tl.load(num_blocks_ptr + state, mask=active, other=0).to(tl.int64))
        while begin < end:
            token = begin + lane
            inside = (token >= 0) & (token < end) & (token < num_places)
            live = inside & (token < readable)
            position = tl.load(positions_ptr + token, mask=live, other=-1).to(tl.int64)
            if HAS_IS_LIVE:
                live = live & (tl.load(is_live_ptr + token, mask=live, other=0) != 0)
            live = live & (position >= 0)
            position = tl.where(live, position, 0)
            column = position // BLOCK_SIZE
            address = block_tables_ptr + state * table_stride + column
            block = tl.load(address, mask=live & (column < columns), other=-1).to(tl.int64)
            slot = tl.where(block >= 0, block * BLOCK_SIZE + position % BLOCK_SIZE, -1)
            tl.store(out_slot_mapping_ptr + token, slot, mask=inside)
            begin += LANES
    else:
        while begin < num_places:
            token = begin + lane
            tl.store(out_slot_mapping_ptr + token, lane * 0 - 1, mask=token < num_places)
            begin += LANES


def _check(
    idx_mapping: torch.Tensor,
    query_start_loc: torch.Tensor,
    positions: torch.Tensor,
    block_tables: torch.Tensor,
    num_blocks: torch.Tensor | None,
    is_live: torch.Tensor | None,
    block_size: int,
    out_slot_mapping: torch.Tensor,
) -> None:
    check_positive("block_size", block_size)
    check_index_array("idx_mapping", idx_mapping, 0)
    check_index_array("query_start_loc", query_start_loc, idx_mapping.shape[0] + 1)
    check_index_array("positions", positions, 0)
    check_index_matrix("block_tables", block_tables, 0)
    if num_blocks is not None:
        check_index_array("num_blocks", num_blocks, block_tables.shape[0])
    if is_live is not None:
        check_index_array("is_live", is_live, positions.shape[0])
    check_index_array("out_slot_mapping", out_slot_mapping, 0)
    if out_slot_mapping.data_ptr() == positions.data_ptr() and positions.shape[0] > 0:
        refuse("out_slot_mapping", "another buffer than positions", "the same one", "use two buffers")


def _launch_compute_slot_mapping(
    *,
    idx_mapping: torch.Tensor,
    query_start_loc: torch.Tensor,
    positions: torch.Tensor,
    block_tables: torch.Tensor,
    num_blocks: torch.Tensor | None = None,
    is_live: torch.Tensor | None = None,
    block_size: int,
    out_slot_mapping: torch.Tensor,
) -> None:
    _check(idx_mapping, query_start_loc, positions, block_tables, num_blocks, is_live, block_size, out_slot_mapping)
    rows = idx_mapping.shape[0]
    compute_slot_mapping_kernel[(rows + 1,)](
        idx_mapping,
        query_start_loc,
        positions,
        block_tables,
        idx_mapping if num_blocks is None else num_blocks,
        positions if is_live is None else is_live,
        out_slot_mapping,
        rows,
        positions.shape[0],
        block_tables.shape[0],
        block_tables.shape[1],
        out_slot_mapping.shape[0],
        block_tables.stride(0),
        BLOCK_SIZE=block_size,
        HAS_NUM_BLOCKS=num_blocks is not None,
        HAS_IS_LIVE=is_live is not None,
        LANES=TILE,
        num_warps=1,
    )


def compute_slot_mapping_reference_(
    *,
    idx_mapping: torch.Tensor,
    query_start_loc: torch.Tensor,
    positions: torch.Tensor,
    block_tables: torch.Tensor,
    num_blocks: torch.Tensor | None = None,
    is_live: torch.Tensor | None = None,
    block_size: int,
    out_slot_mapping: torch.Tensor,
) -> None:
    """Specify `compute_slot_mapping_` in plain torch."""
    _check(idx_mapping, query_start_loc, positions, block_tables, num_blocks, is_live, block_size, out_slot_mapping)
    rows, (states, columns) = idx_mapping.shape[0], block_tables.shape
    starts = query_start_loc[: rows + 1].long()
    tokens = min(int(starts[-1]), positions.shape[0], out_slot_mapping.shape[0])
    out_slot_mapping.fill_(PAD_SLOT)
    if rows == 0 or tokens == 0 or states == 0 or columns == 0:
        return
    token = torch.arange(tokens, device=positions.device)
    row = torch.searchsorted(starts[1:].contiguous(), token, right=True)
    state, position = idx_mapping.long()[row], positions[:tokens].long()
    column = position.div(block_size, rounding_mode="floor")
    live = (token >= starts[0]) & (state >= 0) & (state < states) & (column >= 0) & (column < columns)
    if is_live is not None:
        live &= is_live[:tokens] != 0
    state, column = torch.where(live, state, 0), torch.where(live, column, 0)
    if num_blocks is not None:
        live &= column < num_blocks[state]
    block = block_tables[state, column].long()
    out_slot_mapping[:tokens] = torch.where(live & (block >= 0), block * block_size + position % block_size, PAD_SLOT)


compute_slot_mapping_ = Op(
    "compute_slot_mapping",
    writes=("out_slot_mapping",),
    triton=_launch_compute_slot_mapping,
    reference=compute_slot_mapping_reference_,
    strided=("block_tables",),
)
"""Map every token of a flat batch to its place in a paged cache.

R rows, T tokens, S request states, N blocks a state, W places of output. Arrays are int32 or int64. Slots are computed in
64 bits; an int32 output is for caches of fewer than 2^31 slots. For token t of row i, with s = idx_mapping[i] and p its
position, slot = block_tables[s, p // block_size] * block_size + p % block_size. A slot of another token is never reused;
it is -1 where

* s is -1 (the table is not read), or p is negative;
* `is_live` is 0;
* p lies past the table, past the state's `num_blocks`, or in a block of -1, so what an earlier owner left in the tail of a
  table row is not used;
* t is query_start_loc[R] or more: the tail is written up to the full width of the output, so that a replayed graph never
  sees slots of an older batch.

One call serves one group of layers that share a cache. Context parallelism, which keeps only a share of the tokens, is not
covered.

Args:
    idx_mapping: [R] state of each row; -1 for none.
    query_start_loc: [R + 1] exclusive prefix sums of the query lengths, from 0.
    positions: [T] absolute position of each token (never a rotary or multimodal one).
    block_tables: [S, N] block ids, rows any stride apart; -1 where a state owns none.
    num_blocks: [S] number of blocks that each state owns, or None when -1 says so.
    is_live: [T] 0 for tokens that must not be written, or None.
    block_size: tokens of a block.
    out_slot_mapping: [W] written in full.

Raises:
    ArgumentError, ArgumentTypeError: arrays that do not belong together; nothing has been written.
"""
