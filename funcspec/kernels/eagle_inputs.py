"""Inputs of a drafter that is fed the target's query again, with new places behind what was kept: a bonus token and masks.

One new place and no shift is the classic draft model; with the ids shifted by one it is EAGLE (arXiv 2401.15077), whose drafter
meets the hidden state of a token with the id of the next. Several new places are the parallel forms of both.
"""

import torch

from funcspec.errors import refuse
from funcspec.kernels._checks import check_flags, check_index_array, check_other_buffer, check_positive
from funcspec.kernels._triton import jit, tl
from funcspec.kernels.op import Op

TILE = 128


@jit
def copy_and_expand_eagle_inputs_kernel(
    target_token_ids_ptr,  # [T]
    target_positions_ptr,  # [T]
    next_token_ids_ptr,  # [R]
    query_start_loc_ptr,  # [R + 1]
    query_end_loc_ptr,  # [R]
    out_input_ids_ptr,  # [W], written
    out_positions_ptr,  # [W], written
    out_is_rejected_ptr,  # [W] bool, written
    out_is_masked_ptr,  # [W] bool, written
    out_new_token_indices_ptr,  # [R * P], written
    out_hidden_state_mapping_ptr,  # [T], written when shifting
    padding_token_id,
    mask_token_id,
    num_new,
    num_rows,
    num_tokens,
    num_places,
    SHIFT: tl.constexpr,
    LANES: tl.constexpr,
):
    """One program a row, and one more for the places behind the rows where these are cleared."""
    row = tl.program_id(0).to(tl.int64)
    begin = tl.load(query_start_loc_ptr + row).to(tl.int64)
    first = begin + row * (num_new - SHIFT)
    length = num_places - first
    # What has no live row is padding: its bounds are such that no place is kept or new, and nothing is mapped.
    mapped = begin * 0
    copied = begin * 0 - num_new
    bonus = begin * 0
    start_position = begin * 0
    if row < num_rows:
        end = tl.load(query_start_loc_ptr + row + 1).to(tl.int64)
        active = (end > begin) & (begin >= 0) & (end <= num_tokens)
        kept = tl.load(query_end_loc_ptr + row, mask=active, other=0).to(tl.int64) + 1 - begin
        kept = tl.maximum(tl.minimum(kept, end - begin), 0)
        length = tl.maximum(end - begin, 0) + num_new - SHIFT
        mapped = tl.where(active, end - begin, 0)
        copied = tl.where(active, tl.maximum(kept - SHIFT, 0), copied)
        bonus = tl.load(next_token_ids_ptr + row, mask=active, other=0).to(tl.int64)
        start_position = tl.load(target_positions_ptr + begin, mask=active, other=0).to(tl.int64)
        new_from = begin * 0
        while new_from < num_new:
            k = new_from + tl.arange(0, LANES)
            index = tl.where(copied >= 0, first + copied + k, 0)
            tl.store(out_new_token_indices_ptr + row * num_new + k, index, mask=k < num_new)
            new_from += LANES
    done = begin * 0
    while done < length:
        j = done + tl.arange(0, LANES)
        place = first + j
        inside = (j < length) & (place >= 0) & (place < num_places)
        token = tl.load(target_token_ids_ptr + begin + SHIFT + j, mask=inside & (j < copied), other=0).to(tl.int64)
        token = tl.where(j < copied, token, tl.where(j == copied, bonus, mask_token_id))
        rejected = j >= copied + num_new
        tl.store(out_input_ids_ptr + place, tl.where(rejected, padding_token_id, token), mask=inside)
        tl.store(out_positions_ptr + place, tl.where(rejected, 0, start_position + j), mask=inside)
        tl.store(out_is_rejected_ptr + place, rejected, mask=inside)
        tl.store(out_is_masked_ptr + place, (j > copied) & (j < copied + num_new), mask=inside)
        if SHIFT:
            tl.store(out_hidden_state_mapping_ptr + begin + j, place, mask=j < mapped)
        done += LANES


Inputs = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]
Outputs = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None]


def _check(inputs: Inputs, num_new_tokens: int, shift_input_ids: bool, outputs: Outputs) -> None:
    target_token_ids, target_positions, next_token_ids, query_start_loc, query_end_loc = inputs
    out_input_ids, out_positions, out_is_rejected, out_is_masked, out_new_token_indices, out_hidden_state_mapping = outputs
    check_positive("num_new_tokens", num_new_tokens)
    check_index_array("target_token_ids", target_token_ids, 0)
    check_index_array("next_token_ids", next_token_ids, 0)
    tokens, rows = target_token_ids.shape[0], next_token_ids.shape[0]
    check_index_array("target_positions", target_positions, tokens)
    check_index_array("query_start_loc", query_start_loc, rows + 1)
    check_index_array("query_end_loc", query_end_loc, rows)
    check_index_array("out_input_ids", out_input_ids, tokens + rows * (num_new_tokens - shift_input_ids))
    places = out_input_ids.shape[0]
    check_index_array("out_positions", out_positions, places)
    check_flags("out_is_rejected", out_is_rejected, places)
    check_flags("out_is_masked", out_is_masked, places)
    check_index_array("out_new_token_indices", out_new_token_indices, rows * num_new_tokens)
    check_other_buffer("out_input_ids", out_input_ids, "target_token_ids", target_token_ids)
    check_other_buffer("out_positions", out_positions, "target_positions", target_positions)
    if shift_input_ids:
        if out_hidden_state_mapping is None:
            refuse("out_hidden_state_mapping", "an array, as ids are shifted", None, "pass an index array as long as target_token_ids")
        check_index_array("out_hidden_state_mapping", out_hidden_state_mapping, tokens)
    elif out_hidden_state_mapping is not None:
        refuse("out_hidden_state_mapping", "None, as ids are not shifted", "an array", "leave it out, or shift")


def _launch_copy_and_expand_eagle_inputs(
    *,
    target_token_ids: torch.Tensor,
    target_positions: torch.Tensor,
    next_token_ids: torch.Tensor,
    query_start_loc: torch.Tensor,
    query_end_loc: torch.Tensor,
    padding_token_id: int,
    mask_token_id: int,
    num_new_tokens: int,
    shift_input_ids: bool,
    clear_tail: bool = False,
    out_input_ids: torch.Tensor,
    out_positions: torch.Tensor,
    out_is_rejected: torch.Tensor,
    out_is_masked: torch.Tensor,
    out_new_token_indices: torch.Tensor,
    out_hidden_state_mapping: torch.Tensor | None = None,
) -> None:
    inputs = (target_token_ids, target_positions, next_token_ids, query_start_loc, query_end_loc)
    outputs = (out_input_ids, out_positions, out_is_rejected, out_is_masked, out_new_token_indices)
    _check(inputs, num_new_tokens, shift_input_ids, (*outputs, out_hidden_state_mapping))
    rows = next_token_ids.shape[0]
    if rows + clear_tail == 0:
        return
    copy_and_expand_eagle_inputs_kernel[(rows + clear_tail,)](
        *inputs,
        *outputs,
        out_new_token_indices if out_hidden_state_mapping is None else out_hidden_state_mapping,
        padding_token_id,
        mask_token_id,
        num_new_tokens,
        rows,
        target_token_ids.shape[0],
        out_input_ids.shape[0],
        SHIFT=int(shift_input_ids),
        LANES=TILE,
        num_warps=1,
    )


def copy_and_expand_eagle_inputs_reference_(
    *,
    target_token_ids: torch.Tensor,
    target_positions: torch.Tensor,
    next_token_ids: torch.Tensor,
    query_start_loc: torch.Tensor,
    query_end_loc: torch.Tensor,
    padding_token_id: int,
    mask_token_id: int,
    num_new_tokens: int,
    shift_input_ids: bool,
    clear_tail: bool = False,
    out_input_ids: torch.Tensor,
    out_positions: torch.Tensor,
    out_is_rejected: torch.Tensor,
    out_is_masked: torch.Tensor,
    out_new_token_indices: torch.Tensor,
    out_hidden_state_mapping: torch.Tensor | None = None,
) -> None:
    """Specify `copy_and_expand_eagle_inputs_` in plain torch."""
    inputs = (target_token_ids, target_positions, next_token_ids, query_start_loc, query_end_loc)
    by_place = (out_input_ids, out_positions, out_is_rejected, out_is_masked)
    _check(inputs, num_new_tokens, shift_input_ids, (*by_place, out_new_token_indices, out_hidden_state_mapping))
    rows, tokens, shift = next_token_ids.shape[0], target_token_ids.shape[0], int(shift_input_ids)
    starts = query_start_loc[: rows + 1].long()
    begin, end = starts[:-1], starts[1:]
    first = starts + torch.arange(rows + 1, device=starts.device) * (num_new_tokens - shift)
    active = (end > begin) & (begin >= 0) & (end <= tokens)
    kept = torch.minimum(query_end_loc[:rows].long() + 1 - begin, end - begin).clamp_(min=0)
    copied = torch.where(active, (kept - shift).clamp_(min=0), -num_new_tokens)
    new_places = (first[:-1] + copied)[:, None] + torch.arange(num_new_tokens, device=starts.device)
    out_new_token_indices[: rows * num_new_tokens] = torch.where(active[:, None], new_places, 0).view(-1)

    places = min(int(first[-1]), out_input_ids.shape[0])
    place = torch.arange(max(int(first[0]), 0), places, device=starts.device)
    if place.shape[0] and tokens:
        row = torch.searchsorted(first[1:].contiguous(), place, right=True)
        j = place - first[row]
        is_kept, is_bonus = j < copied[row], j == copied[row]
        is_rejected = j >= copied[row] + num_new_tokens
        source = target_token_ids.long()[torch.where(is_kept, begin[row] + shift + j, 0)]
        token = torch.where(is_kept, source, torch.where(is_bonus, next_token_ids.long()[row], mask_token_id))
        start_position = target_positions.long()[torch.where(active, begin, 0)][row]
        out_input_ids[place] = torch.where(is_rejected, padding_token_id, token).to(out_input_ids.dtype)
        out_positions[place] = torch.where(is_rejected, 0, start_position + j).to(out_positions.dtype)
        out_is_rejected[place] = is_rejected
        out_is_masked[place] = ~(is_kept | is_bonus | is_rejected)
        if out_hidden_state_mapping is not None:
            mapped = active[row] & (j < (end - begin)[row])
            out_hidden_state_mapping[(begin[row] + j)[mapped]] = place[mapped].to(out_hidden_state_mapping.dtype)
    elif place.shape[0]:
        _pad(by_place, slice(int(place[0]), places), padding_token_id)
    if clear_tail:
        _pad(by_place, slice(max(int(first[-1]), 0), None), padding_token_id)


def _pad(by_place: tuple[torch.Tensor, ...], part: slice, padding_token_id: int) -> None:
    """Make places padding that writes no cache: ids, positions, rejected or not, masked or not."""
    for out, value in zip(by_place, (padding_token_id, 0, True, False), strict=True):
        out[part] = value


copy_and_expand_eagle_inputs_ = Op(
    "copy_and_expand_eagle_inputs",
    writes=(
        "out_input_ids",
        "out_positions",
        "out_is_rejected",
        "out_is_masked",
        "out_new_token_indices",
        "out_hidden_state_mapping",
    ),
    triton=_launch_copy_and_expand_eagle_inputs,
    reference=copy_and_expand_eagle_inputs_reference_,
)
"""Lay the target's batch out again with P new places a row: the bonus token and P - 1 masks behind the kept tokens.

R rows, T target tokens, P = num_new_tokens, c = 1 when shifting, else 0; W >= T + R * (P - c) places. Index arrays are int32 or
int64. Row i with start s, q tokens, of which k = query_end_loc[i] + 1 - s are kept (limited to 0 and q), and first position x owns
the q + P - c places from s + i * (P - c). With n = max(k - c, 0), its place j is

* j < n: the target's token c + j of the row, at position x + j;
* j = n: next_token_ids[i], at x + j, listed as new token i * P;
* n < j < n + P: the mask token, at x + j, masked, listed as new token i * P + j - n;
* else: the padding token at position 0, rejected, so that the layout does not depend on k.

When shifting, out_hidden_state_mapping leads from a target token to the place whose input meets its hidden state: s + j to place j
of the row, rejected tokens included.

Positions are not limited: `compute_new_slot_mapping_` gives no slot to rejected places and to positions past the length limit.

Where the reference has no defined result: shifting with nothing kept is laid out as with the first token kept, so that the bonus
token always has its place. A row with an empty query, or with one outside of the target's tokens, is inert: its places are padding
and rejected, its new tokens have index 0, it maps nothing and nothing of it is read. P = 0 is refused.

Args:
    target_token_ids, target_positions: [T] the target's flat batch.
    next_token_ids: [R] the bonus or correction token of each row.
    query_start_loc: [R + 1] exclusive prefix sums of the query lengths.
    query_end_loc: [R] index of the last kept token of each row, itself included.
    padding_token_id, mask_token_id: ids to feed in rejected and in masked places.
    num_new_tokens: P, at least 1.
    shift_input_ids: whether each kept token but the first moves one place to the left.
    clear_tail: whether places past the last row become padding, rejected, up to the end of the buffers, so that a replayed graph
        never sees an older batch. Otherwise they are left alone.
    out_input_ids, out_positions: [W] written.
    out_is_rejected, out_is_masked: [W] bool, written.
    out_new_token_indices: [R * P] written: places to sample from.
    out_hidden_state_mapping: [T] written; exactly when shifting.

Raises:
    ArgumentError, ArgumentTypeError: arrays that do not belong together; nothing has been written.
"""
