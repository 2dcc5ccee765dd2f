"""Inputs of the first pass of a block drafter: the target's tokens become keys, and every row gets a block of queries behind them.

The block of a row starts with its newest token; masks follow, each of which predicts one token.
"""

import torch

from funcspec.constants import PAD_SLOT
from funcspec.errors import refuse
from funcspec.kernels._checks import check_index_array, check_index_matrix, check_other_buffer, check_overflow, check_positive
from funcspec.kernels._slots import slots_of, slots_of_reference
from funcspec.kernels._triton import jit, tl
from funcspec.kernels.op import Op

TILE = 128
NO_LIMIT = 2**62
NO_BLOCK = -1


@jit
def _fill(ptr, start, end, value, LANES: tl.constexpr):
    while start < end:
        at = start + tl.arange(0, LANES)
        tl.store(ptr + at, at * 0 + value, mask=at < end)
        start += LANES


@jit
def _write_block(
    row,
    following,
    bonus,
    limit,
    table_row_ptr,
    columns,
    out_input_ids_ptr,
    out_positions_ptr,
    out_slots_ptr,
    out_token_indices_ptr,
    mask_token_id,
    null_block,
    num_query,
    num_sampled,
    BLOCK_SIZE: tl.constexpr,
    LANES: tl.constexpr,
):
    """Ids, positions and slots of a row's queries, and where they are sampled from; `limit` is 0 for inert rows."""
    done = row * 0
    while done < num_query:
        t = done + tl.arange(0, LANES)
        inside = t < num_query
        place = row * num_query + t
        position = following + t
        slot = slots_of(table_row_ptr, position, inside & (position < limit), columns, null_block, BLOCK_SIZE)
        tl.store(out_input_ids_ptr + place, tl.where(t == 0, bonus, tl.where(limit > 0, mask_token_id, 0)), mask=inside)
        tl.store(out_positions_ptr + place, tl.maximum(tl.minimum(position, limit - 1), 0), mask=inside)
        tl.store(out_slots_ptr + place, slot, mask=inside)
        sampled = t - (num_query - num_sampled)
        index = tl.where(limit > 0, place, 0)
        tl.store(out_token_indices_ptr + row * num_sampled + sampled, index, mask=inside & (sampled >= 0))
        done += LANES


@jit
def copy_and_expand_dflash_inputs_kernel(
    next_token_ids_ptr,  # [R]
    target_positions_ptr,  # [T]
    query_start_loc_ptr,  # [R + 1]
    num_rejected_ptr,  # [R], read when HAS_NUM_REJECTED
    block_tables_ptr,  # [R, N]
    num_blocks_ptr,  # [R], read when HAS_NUM_BLOCKS
    out_input_ids_ptr,  # [Wq], written
    out_query_positions_ptr,  # [Wq], written
    out_query_slot_mapping_ptr,  # [Wq], written
    out_context_positions_ptr,  # [Wc], written
    out_context_slot_mapping_ptr,  # [Wc], written
    out_token_indices_ptr,  # [Wk], written
    out_query_start_loc_ptr,  # [M + 1], written when freezing
    out_seq_lens_ptr,  # [M], written when freezing
    mask_token_id,
    max_model_len,
    null_block,
    num_query,
    num_sampled,
    num_rows,
    num_tokens,
    num_columns,
    table_stride,
    num_query_places,
    num_context_places,
    num_indices,
    max_num_reqs,
    BLOCK_SIZE: tl.constexpr,
    HAS_NUM_REJECTED: tl.constexpr,
    HAS_NUM_BLOCKS: tl.constexpr,
    FREEZE: tl.constexpr,
    LANES: tl.constexpr,
):
    """One program a row, and one more for what lies behind the rows when freezing."""
    row = tl.program_id(0).to(tl.int64)
    begin = tl.load(query_start_loc_ptr + row).to(tl.int64)
    if row < num_rows:
        end = tl.load(query_start_loc_ptr + row + 1).to(tl.int64)
        active = (end > begin) & (begin >= 0) & (end <= num_tokens)
        kept = end - begin
        if HAS_NUM_REJECTED:
            kept = kept - tl.maximum(tl.load(num_rejected_ptr + row).to(tl.int64), 0)
        # The row's flag is folded into bounds: the interpreter cannot combine a flag with a vector of flags.
        kept_end = tl.where(active, begin + tl.maximum(kept, 0), begin)
        context_end = kept_end if FREEZE else tl.where(active, end, begin)
        limit = tl.where(active, begin * 0 + max_model_len, 0)
        columns = tl.where(active, begin * 0 + num_columns, 0)
        if HAS_NUM_BLOCKS:
            columns = tl.minimum(columns, tl.load(num_blocks_ptr + row, mask=active, other=0).to(tl.int64))
        anchor_ptr = target_positions_ptr + tl.maximum(kept_end - 1, begin)
        following = tl.load(anchor_ptr, mask=active, other=0).to(tl.int64) + (kept_end > begin)
        bonus = tl.load(next_token_ids_ptr + row, mask=active, other=0).to(tl.int64)
        table_row_ptr = block_tables_ptr + row * table_stride
        _write_block(
            row,
            following,
            bonus,
            limit,
            table_row_ptr,
            columns,
            out_input_ids_ptr,
            out_query_positions_ptr,
            out_query_slot_mapping_ptr,
            out_token_indices_ptr,
            mask_token_id,
            null_block,
            num_query,
            num_sampled,
            BLOCK_SIZE,
            LANES,
        )
        while begin < end:
            token = begin + tl.arange(0, LANES)
            inside = (token >= 0) & (token < end) & (token < num_tokens)
            live = inside & (token < context_end)
            position = tl.load(target_positions_ptr + token, mask=live, other=0).to(tl.int64)
            slot = slots_of(table_row_ptr, position, live & (position < max_model_len), columns, null_block, BLOCK_SIZE)
            tl.store(out_context_positions_ptr + token, tl.minimum(position, max_model_len - 1), mask=inside)
            tl.store(out_context_slot_mapping_ptr + token, slot, mask=inside)
            begin += LANES
        if FREEZE:
            tl.store(out_query_start_loc_ptr + row, row * num_query)
            tl.store(out_seq_lens_ptr + row, tl.maximum(tl.minimum(following + num_query, limit), 0))
    elif FREEZE:
        total, begin = row * num_query, tl.maximum(begin, 0)
        _fill(out_input_ids_ptr, total, num_query_places, 0, LANES)
        _fill(out_query_positions_ptr, total, num_query_places, 0, LANES)
        _fill(out_query_slot_mapping_ptr, total, num_query_places, -1, LANES)
        _fill(out_context_positions_ptr, begin, num_context_places, 0, LANES)
        _fill(out_context_slot_mapping_ptr, begin, num_context_places, -1, LANES)
        _fill(out_token_indices_ptr, row * num_sampled, num_indices, 0, LANES)
        _fill(out_query_start_loc_ptr, row, max_num_reqs + 1, total, LANES)
        _fill(out_seq_lens_ptr, row, max_num_reqs, 0, LANES)


def _check(
    by_row: tuple[torch.Tensor, torch.Tensor, torch.Tensor | None, torch.Tensor | None],
    target_positions: torch.Tensor,
    block_tables: torch.Tensor,
    sizes: dict[str, int],
    overflow: str,
    max_model_len: int | None,
    outputs: dict[str, torch.Tensor],
    frozen: dict[str, torch.Tensor | None],
) -> None:
    next_token_ids, query_start_loc, num_rejected, num_blocks = by_row
    check_overflow(overflow)
    for name, value in sizes.items():
        check_positive(name, value)
    queries, drafts = sizes["num_query_per_req"], sizes["num_speculative_tokens"]
    if queries not in (drafts, drafts + 1):
        expected = f"{drafts + 1}, or {drafts} to sample from the first query too"
        refuse("num_query_per_req", expected, queries, "every query predicts one token, the first one at will")
    check_index_array("next_token_ids", next_token_ids, 0)
    rows = next_token_ids.shape[0]
    check_index_array("query_start_loc", query_start_loc, rows + 1)
    check_index_array("target_positions", target_positions, 0)
    check_index_matrix("block_tables", block_tables, rows)
    for name, array in (("num_rejected", num_rejected), ("num_blocks", num_blocks)):
        if array is not None:
            check_index_array(name, array, rows)
    tokens = target_positions.shape[0]
    least = {"out_input_ids": rows * queries, "out_context_positions": tokens, "out_token_indices": rows * drafts}
    least |= {"out_query_positions": outputs["out_input_ids"].shape[0], "out_query_slot_mapping": outputs["out_input_ids"].shape[0]}
    least["out_context_slot_mapping"] = outputs["out_context_positions"].shape[0]
    for name, array in outputs.items():
        check_index_array(name, array, least[name])
    check_other_buffer("out_context_positions", outputs["out_context_positions"], "target_positions", target_positions)
    if overflow == "freeze":
        _check_frozen(rows, max_model_len, query_start_loc, frozen)
        return
    for name, value in {"max_model_len": max_model_len, **frozen}.items():
        if value is not None:
            refuse(name, "None, as overflow is 'reference'", "a value", "leave it out, or use overflow='freeze'")


def _check_frozen(rows: int, max_model_len: int | None, query_start_loc: torch.Tensor, frozen: dict[str, torch.Tensor | None]) -> None:
    if max_model_len is None:
        refuse("max_model_len", "a length, as overflow is 'freeze'", None, "pass the limit of the model")
    check_positive("max_model_len", max_model_len)
    for name, array in frozen.items():
        if array is None:
            refuse(name, "an array, as overflow is 'freeze'", None, "pass index arrays for the new starts and lengths")
        check_index_array(name, array, rows)
        if name == "out_query_start_loc":
            check_other_buffer(name, array, "query_start_loc", query_start_loc)
    starts, lengths = frozen["out_query_start_loc"], frozen["out_seq_lens"]
    if starts is not None and lengths is not None:
        check_index_array("out_query_start_loc", starts, lengths.shape[0] + 1)


def _launch_copy_and_expand_dflash_inputs(
    *,
    next_token_ids: torch.Tensor,
    target_positions: torch.Tensor,
    query_start_loc: torch.Tensor,
    num_rejected: torch.Tensor | None = None,
    block_tables: torch.Tensor,
    num_blocks: torch.Tensor | None = None,
    mask_token_id: int,
    block_size: int,
    num_query_per_req: int,
    num_speculative_tokens: int,
    null_block: int = NO_BLOCK,
    overflow: str = "reference",
    max_model_len: int | None = None,
    out_input_ids: torch.Tensor,
    out_query_positions: torch.Tensor,
    out_query_slot_mapping: torch.Tensor,
    out_context_positions: torch.Tensor,
    out_context_slot_mapping: torch.Tensor,
    out_token_indices: torch.Tensor,
    out_query_start_loc: torch.Tensor | None = None,
    out_seq_lens: torch.Tensor | None = None,
) -> None:
    outputs = {"out_input_ids": out_input_ids, "out_query_positions": out_query_positions}
    outputs |= {"out_query_slot_mapping": out_query_slot_mapping, "out_context_positions": out_context_positions}
    outputs |= {"out_context_slot_mapping": out_context_slot_mapping, "out_token_indices": out_token_indices}
    frozen = {"out_query_start_loc": out_query_start_loc, "out_seq_lens": out_seq_lens}
    sizes = {"block_size": block_size, "num_query_per_req": num_query_per_req, "num_speculative_tokens": num_speculative_tokens}
    by_row = (next_token_ids, query_start_loc, num_rejected, num_blocks)
    _check(by_row, target_positions, block_tables, sizes, overflow, max_model_len, outputs, frozen)
    rows, freeze = next_token_ids.shape[0], overflow == "freeze"
    if rows + freeze == 0:
        return
    copy_and_expand_dflash_inputs_kernel[(rows + freeze,)](
        next_token_ids,
        target_positions,
        query_start_loc,
        query_start_loc if num_rejected is None else num_rejected,
        block_tables,
        query_start_loc if num_blocks is None else num_blocks,
        *outputs.values(),
        out_token_indices if out_query_start_loc is None else out_query_start_loc,
        out_token_indices if out_seq_lens is None else out_seq_lens,
        mask_token_id,
        NO_LIMIT if max_model_len is None else max_model_len,
        null_block,
        num_query_per_req,
        num_speculative_tokens,
        rows,
        target_positions.shape[0],
        block_tables.shape[1],
        block_tables.stride(0),
        out_input_ids.shape[0],
        out_context_positions.shape[0],
        out_token_indices.shape[0],
        0 if out_seq_lens is None else out_seq_lens.shape[0],
        BLOCK_SIZE=block_size,
        HAS_NUM_REJECTED=num_rejected is not None,
        HAS_NUM_BLOCKS=num_blocks is not None,
        FREEZE=freeze,
        LANES=TILE,
        num_warps=1,
    )


def copy_and_expand_dflash_inputs_reference_(
    *,
    next_token_ids: torch.Tensor,
    target_positions: torch.Tensor,
    query_start_loc: torch.Tensor,
    num_rejected: torch.Tensor | None = None,
    block_tables: torch.Tensor,
    num_blocks: torch.Tensor | None = None,
    mask_token_id: int,
    block_size: int,
    num_query_per_req: int,
    num_speculative_tokens: int,
    null_block: int = NO_BLOCK,
    overflow: str = "reference",
    max_model_len: int | None = None,
    out_input_ids: torch.Tensor,
    out_query_positions: torch.Tensor,
    out_query_slot_mapping: torch.Tensor,
    out_context_positions: torch.Tensor,
    out_context_slot_mapping: torch.Tensor,
    out_token_indices: torch.Tensor,
    out_query_start_loc: torch.Tensor | None = None,
    out_seq_lens: torch.Tensor | None = None,
) -> None:
    """Specify `copy_and_expand_dflash_inputs_` in plain torch."""
    outputs = {"out_input_ids": out_input_ids, "out_query_positions": out_query_positions}
    outputs |= {"out_query_slot_mapping": out_query_slot_mapping, "out_context_positions": out_context_positions}
    outputs |= {"out_context_slot_mapping": out_context_slot_mapping, "out_token_indices": out_token_indices}
    frozen = {"out_query_start_loc": out_query_start_loc, "out_seq_lens": out_seq_lens}
    sizes = {"block_size": block_size, "num_query_per_req": num_query_per_req, "num_speculative_tokens": num_speculative_tokens}
    by_row = (next_token_ids, query_start_loc, num_rejected, num_blocks)
    _check(by_row, target_positions, block_tables, sizes, overflow, max_model_len, outputs, frozen)
    rows, tokens = next_token_ids.shape[0], target_positions.shape[0]
    limit = NO_LIMIT if max_model_len is None else max_model_len
    starts = query_start_loc[: rows + 1].long()
    begin, end = starts[:-1], starts[1:]
    active = (end > begin) & (begin >= 0) & (end <= tokens)
    kept = end - begin if num_rejected is None else end - begin - num_rejected[:rows].clamp(min=0)
    kept_end = torch.where(active, begin + kept.clamp(min=0), begin)

    def slots(row: torch.Tensor, position: torch.Tensor, live: torch.Tensor) -> torch.Tensor:
        return slots_of_reference(block_tables, num_blocks, row, position, live & active[row], block_size, null_block)

    low, high = max(int(starts[0]), 0), max(min(int(starts[-1]), tokens), 0)
    token = torch.arange(low, max(low, high), device=starts.device)
    row = torch.searchsorted(end.contiguous(), token, right=True)
    live = token < torch.where(active, kept_end if overflow == "freeze" else end, begin)[row]
    position = torch.where(live, target_positions.long()[token], 0)
    out_context_slot_mapping[low : low + token.shape[0]] = slots(row, position, live & (position < limit))
    out_context_positions[low : low + token.shape[0]] = position.clamp(max=limit - 1)

    # The position behind the newest kept token; where nothing is kept, that of the first token.
    following = torch.zeros_like(begin)
    if tokens:
        anchor = torch.where(active, torch.maximum(kept_end - 1, begin), 0)
        following = torch.where(active, target_positions.long()[anchor] + (kept_end > begin), 0)
    row, t = torch.arange(rows, device=starts.device)[:, None], torch.arange(num_query_per_req, device=starts.device)
    place, position = row * num_query_per_req + t, following[:, None] + t
    ids = torch.where(t == 0, next_token_ids.long()[:, None], mask_token_id)
    indices = place[:, num_query_per_req - num_speculative_tokens :]
    live = active[:, None]
    out_input_ids[: place.numel()] = torch.where(live, ids, 0).view(-1)
    out_query_positions[: place.numel()] = torch.where(live, position.clamp(0, limit - 1), 0).view(-1)
    out_query_slot_mapping[: place.numel()] = slots(row.expand_as(place), position, position < limit).view(-1)
    out_token_indices[: indices.numel()] = torch.where(live, indices, 0).reshape(-1)
    if out_query_start_loc is not None and out_seq_lens is not None:
        ends = {"out_context_positions": max(int(starts[-1]), 0), "out_token_indices": indices.numel()}
        ends["out_context_slot_mapping"] = ends["out_context_positions"]
        for name, out in outputs.items():
            out[ends.get(name, place.numel()) :] = PAD_SLOT if "slot" in name else 0
        out_query_start_loc[: out_seq_lens.shape[0] + 1] = num_query_per_req * rows
        out_query_start_loc[:rows] = place[:, 0]
        out_seq_lens.zero_()
        out_seq_lens[:rows] = torch.where(active, (following + num_query_per_req).clamp(0, limit), 0)


copy_and_expand_dflash_inputs_ = Op(
    "copy_and_expand_dflash_inputs",
    writes=(
        "out_input_ids",
        "out_query_positions",
        "out_query_slot_mapping",
        "out_context_positions",
        "out_context_slot_mapping",
        "out_token_indices",
        "out_query_start_loc",
        "out_seq_lens",
    ),
    triton=_launch_copy_and_expand_dflash_inputs,
    reference=copy_and_expand_dflash_inputs_reference_,
    strided=("block_tables",),
)
"""Make the target's tokens keys of a block drafter, and give every row a block of queries behind its kept tokens.

R rows, T target tokens, K = num_speculative_tokens, Q = num_query_per_req, N blocks a row, L = max_model_len. Index arrays are
int32 or int64. Slots are computed in 64 bits; an int32 output is for caches of fewer than 2^31 slots. Row i has q tokens, of which
r = num_rejected[i] at the end were rejected, and y is the position of its newest kept token.

* Its tokens keep their places, with their positions and slots: the context.
* Its queries are places i * Q + t, 0 <= t < Q: next_token_ids[i] and then masks, at positions y + 1 + t.
* It is sampled at K of these: all where Q = K, all but the first where Q = K + 1. These places are listed from i * K.

The slot of a position is that of its block in the row's table, and -1 past the table, past the row's `num_blocks` and in a block of
-1 or of `null_block`: a slot of another token is never reused. Where nothing is kept, queries start at the position of the row's
first token. A row with an empty query, or with one outside of the target's tokens, is inert: id 0, position 0, slot -1 and index 0,
and nothing of it is read.

* overflow="reference": rejected tokens are context like the others, so their slots are also those of the first queries, which
  must be written later. Positions have no limit but the table. Places past the rows are left alone.
* overflow="freeze": rejected tokens have position 0 and slot -1. What lies at L or behind has slot -1 and a position cut to L - 1, so
  that nothing is overwritten. out_seq_lens[i] = min(y + 1 + Q, L) and out_query_start_loc[i] = i * Q describe the queries' batch.
  All outputs are written to their ends: ids, positions, indices and lengths with 0, slots with -1, starts with R * Q, so that a
  replayed graph never sees an older batch.

Args:
    next_token_ids: [R] the bonus or correction token of each row.
    target_positions: [T] positions of the target's flat batch.
    query_start_loc: [R + 1] exclusive prefix sums of the query lengths.
    num_rejected: [R] r, limited to 0 and q, or None where nothing was rejected.
    block_tables: [>= R, N] block ids in batch order, rows any stride apart; -1 where a row owns none.
    num_blocks: [R] number of blocks that each row owns, or None when -1 says so.
    mask_token_id: id of the queries that have no token yet.
    block_size: tokens of a block.
    num_query_per_req: Q, K or K + 1.
    num_speculative_tokens: K.
    null_block: a block that must not be written, such as 0 in engines that keep it free; -1 for none.
    overflow: "reference" or "freeze".
    max_model_len: L; exactly when freezing.
    out_input_ids, out_query_positions, out_query_slot_mapping: [>= R * Q] written.
    out_context_positions, out_context_slot_mapping: [>= T] written.
    out_token_indices: [>= R * K] written.
    out_query_start_loc, out_seq_lens: [M + 1] and [M], M >= R, written; exactly when freezing.

Raises:
    ArgumentError, ArgumentTypeError: arrays that do not belong together; nothing has been written.
"""
