"""Cache slots of a batch whose rows have grown by new tokens, without those of rejected tokens and past the length limit."""

import torch

from funcspec.constants import PAD_SLOT
from funcspec.errors import refuse
from funcspec.kernels._checks import check_flags, check_index_array, check_index_matrix, check_other_buffer, check_positive
from funcspec.kernels._slots import slots_of, slots_of_reference
from funcspec.kernels._triton import jit, tl
from funcspec.kernels.op import Op

TILE = 128


@jit
def compute_new_slot_mapping_kernel(
    query_start_loc_ptr,  # [R + 1]
    positions_ptr,  # [T]
    is_rejected_ptr,  # [T] bool
    block_tables_ptr,  # [R, N]
    num_blocks_ptr,  # [R], read when HAS_NUM_BLOCKS
    out_slot_mapping_ptr,  # [W], written
    num_new_tokens,
    max_model_len,
    num_rows,
    num_tokens,
    num_columns,
    num_places,
    table_stride,
    BLOCK_SIZE: tl.constexpr,
    HAS_NUM_BLOCKS: tl.constexpr,
    LANES: tl.constexpr,
):
    """One program a row, and one more for the tail of the output."""
    row = tl.program_id(0).to(tl.int64)
    begin = tl.load(query_start_loc_ptr + row).to(tl.int64) + row * num_new_tokens
    end = begin * 0 + num_places
    readable = begin * 0
    columns = begin * 0
    if row < num_rows:
        end = tl.load(query_start_loc_ptr + row + 1).to(tl.int64) + (row + 1) * num_new_tokens
        readable = begin * 0 + num_tokens
        columns = begin * 0 + num_columns
        if HAS_NUM_BLOCKS:
            columns = tl.minimum(columns, tl.load(num_blocks_ptr + row).to(tl.int64))
    while begin < end:
        token = begin + tl.arange(0, LANES)
        inside = (token >= 0) & (token < end) & (token < num_places)
        live = inside & (token < readable)
        position = tl.load(positions_ptr + token, mask=live, other=-1).to(tl.int64)
        live = live & (position < max_model_len) & (tl.load(is_rejected_ptr + token, mask=live, other=1) == 0)
        slot = slots_of(block_tables_ptr + row * table_stride, position, live, columns, -1, BLOCK_SIZE)
        tl.store(out_slot_mapping_ptr + token, slot, mask=inside)
        begin += LANES


def _check(
    query_start_loc: torch.Tensor,
    num_new_tokens: int,
    positions: torch.Tensor,
    is_rejected: torch.Tensor,
    block_tables: torch.Tensor,
    num_blocks: torch.Tensor | None,
    block_size: int,
    max_model_len: int,
    out_slot_mapping: torch.Tensor,
) -> None:
    if num_new_tokens < 0:
        refuse("num_new_tokens", "0 or more", num_new_tokens, "pass the number of places that each row has gained")
    check_positive("block_size", block_size)
    check_positive("max_model_len", max_model_len)
    check_index_array("query_start_loc", query_start_loc, 1)
    rows = query_start_loc.shape[0] - 1
    check_index_array("positions", positions, 0)
    check_flags("is_rejected", is_rejected, positions.shape[0])
    check_index_matrix("block_tables", block_tables, rows)
    if num_blocks is not None:
        check_index_array("num_blocks", num_blocks, rows)
    check_index_array("out_slot_mapping", out_slot_mapping, 0)
    check_other_buffer("out_slot_mapping", out_slot_mapping, "positions", positions)


def _launch_compute_new_slot_mapping(
    *,
    query_start_loc: torch.Tensor,
    num_new_tokens: int,
    positions: torch.Tensor,
    is_rejected: torch.Tensor,
    block_tables: torch.Tensor,
    num_blocks: torch.Tensor | None = None,
    block_size: int,
    max_model_len: int,
    out_slot_mapping: torch.Tensor,
) -> None:
    _check(query_start_loc, num_new_tokens, positions, is_rejected, block_tables, num_blocks, block_size, max_model_len, out_slot_mapping)
    rows = query_start_loc.shape[0] - 1
    compute_new_slot_mapping_kernel[(rows + 1,)](
        query_start_loc,
        positions,
        is_rejected,
        block_tables,
        query_start_loc if num_blocks is None else num_blocks,
        out_slot_mapping,
        num_new_tokens,
        max_model_len,
        rows,
        positions.shape[0],
        block_tables.shape[1],
        out_slot_mapping.shape[0],
        block_tables.stride(0),
        BLOCK_SIZE=block_size,
        HAS_NUM_BLOCKS=num_blocks is not None,
        LANES=TILE,
        num_warps=1,
    )


def compute_new_slot_mapping_reference_(
    *,
    query_start_loc: torch.Tensor,
    num_new_tokens: int,
    positions: torch.Tensor,
    is_rejected: torch.Tensor,
    block_tables: torch.Tensor,
    num_blocks: torch.Tensor | None = None,
    block_size: int,
    max_model_len: int,
    out_slot_mapping: torch.Tensor,
) -> None:
    """Specify `compute_new_slot_mapping_` in plain torch."""
    _check(query_start_loc, num_new_tokens, positions, is_rejected, block_tables, num_blocks, block_size, max_model_len, out_slot_mapping)
    rows = query_start_loc.shape[0] - 1
    starts = query_start_loc.long() + torch.arange(rows + 1, device=positions.device) * num_new_tokens
    low, high = max(int(starts[0]), 0), min(int(starts[-1]), positions.shape[0], out_slot_mapping.shape[0])
    token = torch.arange(low, max(low, high), device=positions.device)
    row = torch.searchsorted(starts[1:].contiguous(), token, right=True)
    position = positions.long()[token]
    live = (position < max_model_len) & ~is_rejected[token]
    out_slot_mapping[low:] = PAD_SLOT
    out_slot_mapping[low : low + token.shape[0]] = slots_of_reference(block_tables, num_blocks, row, position, live, block_size, PAD_SLOT)


compute_new_slot_mapping_ = Op(
    "compute_new_slot_mapping",
    writes=("out_slot_mapping",),
    triton=_launch_compute_new_slot_mapping,
    reference=compute_new_slot_mapping_reference_,
    strided=("block_tables",),
)
"""Map every token of a batch that has grown by N tokens a row to its cache slot.

R rows, T tokens of the grown batch, L = max_model_len, W places of output. Index arrays are int32 or int64. Slots are computed in 64
bits; an int32 output is for caches of fewer than 2^31 slots. Row i owns the tokens from query_start_loc[i] + i * N to
query_start_loc[i + 1] + (i + 1) * N. The slot of a token at position p is block_tables[i, p // block_size] * block_size +
p % block_size. It is -1, and so nothing is overwritten, for rejected tokens, where p >= L or p < 0, past the table, past the row's
`num_blocks`, in a block of -1, and behind the last row, up to the end of the output.

`copy_and_expand_eagle_inputs_` makes such batches; `compute_slot_mapping_` serves those whose tables are found by request state.

Args:
    query_start_loc: [R + 1] exclusive prefix sums of the query lengths before the batch grew, from 0.
    num_new_tokens: N, 0 or more; 0 for starts of the grown batch itself.
    positions: [T] absolute position of each token of the grown batch.
    is_rejected: [T] bool, tokens that must not be written.
    block_tables: [>= R, N] block ids in batch order, rows any stride apart; -1 where a row owns none.
    num_blocks: [R] number of blocks that each row owns, or None when -1 says so.
    block_size, max_model_len: tokens of a block and L.
    out_slot_mapping: [W] written in full.

Raises:
    ArgumentError, ArgumentTypeError: arrays that do not belong together; nothing has been written.
"""
