"""Inputs of draft step 0 for an engine that re-feeds the target's whole query: every row grows by one place.

Row i of the target's batch, with q tokens of which r were rejected, owns q + 1 places of the expanded batch: its q - r
kept tokens, the correction token, and r places that only keep the layout independent of r.
"""

import torch

from funcspec.errors import refuse
from funcspec.kernels._checks import check_index_array, check_overflow, check_positive
from funcspec.kernels._triton import jit, tl
from funcspec.kernels.op import Op

TILE = 128


@jit
def _clear_rows(row, total, out_last_token_indices_ptr, out_query_start_loc_ptr, out_seq_lens_ptr, max_num_reqs, LANES: tl.constexpr):
    lane = tl.arange(0, LANES)
    while row <= max_num_reqs:
        at = row + lane
        tl.store(out_query_start_loc_ptr + at, total + lane * 0, mask=at <= max_num_reqs)
        tl.store(out_seq_lens_ptr + at, lane * 0, mask=at < max_num_reqs)
        tl.store(out_last_token_indices_ptr + at, lane * 0, mask=at < max_num_reqs)
        row += LANES


@jit
def _clear_places(place, out_input_ids_ptr, out_positions_ptr, out_is_live_ptr, num_places, LANES: tl.constexpr):
    lane = tl.arange(0, LANES)
    while place < num_places:
        at = place + lane
        tl.store(out_input_ids_ptr + at, lane * 0, mask=at < num_places)
        tl.store(out_positions_ptr + at, lane * 0, mask=at < num_places)
        tl.store(out_is_live_ptr + at, lane * 0, mask=at < num_places)
        place += LANES


@jit
def prepare_prefill_inputs_kernel(
    target_input_ids_ptr,  # [T]
    target_positions_ptr,  # [T]
    last_sampled_ptr,  # [S]
    idx_mapping_ptr,  # [R]
    query_start_loc_ptr,  # [R + 1]
    seq_lens_ptr,  # [R]
    num_rejected_ptr,  # [R]
    out_input_ids_ptr,  # [W], written
    out_positions_ptr,  # [W], written
    out_last_token_indices_ptr,  # [M], written
    out_query_start_loc_ptr,  # [M + 1], written
    out_seq_lens_ptr,  # [M], written
    out_is_live_ptr,  # [W] int32, written when freezing
    num_rows,
    num_tokens,
    num_states,
    num_places,
    max_num_reqs,
    max_model_len,
    FREEZE: tl.constexpr,
    LANES: tl.constexpr,
):
    """One program a row, and one more for what lies behind the rows.

    An inert row's flag is folded into its bounds `kept` and `cap`: the interpreter cannot combine a flag with a vector of flags.
    """
    row = tl.program_id(0).to(tl.int64)
    begin = tl.load(query_start_loc_ptr + row).to(tl.int64)
    first = begin + row
    if row < num_rows:
        end = tl.load(query_start_loc_ptr + row + 1).to(tl.int64)
        state = tl.load(idx_mapping_ptr + row).to(tl.int64)
        active = (end > begin) & (begin >= 0) & (end <= num_tokens) & (state >= 0) & (state < num_states)
        rejected = tl.maximum(tl.load(num_rejected_ptr + row, mask=active, other=0).to(tl.int64), 0)
        kept = tl.where(active, tl.maximum(end - begin - rejected, 0), -1)
        cap = tl.where(active, max_model_len - 1, 0)
        start_position = tl.load(target_positions_ptr + begin, mask=active, other=0).to(tl.int64)
        correction = tl.load(last_sampled_ptr + state, mask=active, other=0).to(tl.int64)
        # Limited before the 1 is added: a length at the limit of its type must not wrap.
        length = tl.load(seq_lens_ptr + row, mask=active, other=0).to(tl.int64)
        if FREEZE:
            length = length - tl.minimum(rejected, end - begin)
        length = tl.where(active, tl.minimum(length, max_model_len - 1) + 1, 0)
        tl.store(out_query_start_loc_ptr + row, first)
        tl.store(out_seq_lens_ptr + row, length)
        tl.store(out_last_token_indices_ptr + row, tl.where(active, first + kept, 0))
        while begin <= end:
            source = begin + tl.arange(0, LANES)
            place = source + row
            inside = (source <= end) & (place >= 0) & (place < num_places)
            j = place - first
            token = tl.load(target_input_ids_ptr + source, mask=inside & (j < kept), other=0).to(tl.int64)
            position = start_position + j
            tl.store(out_input_ids_ptr + place, tl.where(j == kept, correction, token), mask=inside)
            tl.store(out_positions_ptr + place, tl.minimum(position, cap), mask=inside)
            if FREEZE:
                tl.store(out_is_live_ptr + place, ((j <= kept) & (position >= 0) & (position < max_model_len)).to(tl.int32), mask=inside)
            begin += LANES
    else:
        _clear_rows(row, first, out_last_token_indices_ptr, out_query_start_loc_ptr, out_seq_lens_ptr, max_num_reqs, LANES)
        if FREEZE:
            _clear_places(first, out_input_ids_ptr, out_positions_ptr, out_is_live_ptr, num_places, LANES)


def _check(
    target_input_ids: torch.Tensor,
    target_positions: torch.Tensor,
    last_sampled: torch.Tensor,
    idx_mapping: torch.Tensor,
    query_start_loc: torch.Tensor,
    seq_lens: torch.Tensor,
    num_rejected: torch.Tensor,
    max_num_reqs: int,
    max_model_len: int,
    overflow: str,
    out_input_ids: torch.Tensor,
    out_positions: torch.Tensor,
    out_last_token_indices: torch.Tensor,
    out_query_start_loc: torch.Tensor,
    out_seq_lens: torch.Tensor,
    out_is_live: torch.Tensor | None,
) -> None:
    check_overflow(overflow)
    check_positive("max_model_len", max_model_len)
    check_index_array("idx_mapping", idx_mapping, 0)
    check_index_array("target_input_ids", target_input_ids, 0)
    rows, tokens = idx_mapping.shape[0], target_input_ids.shape[0]
    if max_num_reqs < rows:
        refuse("max_num_reqs", f"at least the {rows} rows of idx_mapping", max_num_reqs, "pass the capacity of the batch")
    check_index_array("target_positions", target_positions, tokens)
    check_index_array("last_sampled", last_sampled, 0)
    check_index_array("query_start_loc", query_start_loc, rows + 1)
    check_index_array("seq_lens", seq_lens, rows)
    check_index_array("num_rejected", num_rejected, rows)
    check_index_array("out_input_ids", out_input_ids, tokens + rows)
    check_index_array("out_positions", out_positions, out_input_ids.shape[0])
    check_index_array("out_last_token_indices", out_last_token_indices, max_num_reqs)
    check_index_array("out_query_start_loc", out_query_start_loc, max_num_reqs + 1)
    check_index_array("out_seq_lens", out_seq_lens, max_num_reqs)
    if out_query_start_loc.data_ptr() == query_start_loc.data_ptr():
        refuse("out_query_start_loc", "another buffer than query_start_loc", "the same one", "rows read their neighbours: use two buffers")
    if overflow == "freeze":
        if out_is_live is None:
            refuse("out_is_live", "an array, as overflow is 'freeze'", None, "pass an int32 array as long as out_input_ids")
        check_index_array("out_is_live", out_is_live, out_input_ids.shape[0])
    elif out_is_live is not None:
        refuse("out_is_live", "None, as overflow is 'reference'", "an array", "leave it out, or use overflow='freeze'")


def _launch_prepare_prefill_inputs(
    *,
    target_input_ids: torch.Tensor,
    target_positions: torch.Tensor,
    last_sampled: torch.Tensor,
    idx_mapping: torch.Tensor,
    query_start_loc: torch.Tensor,
    seq_lens: torch.Tensor,
    num_rejected: torch.Tensor,
    max_num_reqs: int,
    max_model_len: int,
    overflow: str = "reference",
    out_input_ids: torch.Tensor,
    out_positions: torch.Tensor,
    out_last_token_indices: torch.Tensor,
    out_query_start_loc: torch.Tensor,
    out_seq_lens: torch.Tensor,
    out_is_live: torch.Tensor | None = None,
) -> None:
    inputs = (target_input_ids, target_positions, last_sampled, idx_mapping, query_start_loc, seq_lens, num_rejected)
    outputs = (out_input_ids, out_positions, out_last_token_indices, out_query_start_loc, out_seq_lens, out_is_live)
    _check(*inputs, max_num_reqs, max_model_len, overflow, *outputs)
    rows = idx_mapping.shape[0]
    prepare_prefill_inputs_kernel[(rows + 1,)](
        *inputs,
        out_input_ids,
        out_positions,
        out_last_token_indices,
        out_query_start_loc,
        out_seq_lens,
        out_input_ids if out_is_live is None else out_is_live,
        rows,
        target_input_ids.shape[0],
        last_sampled.shape[0],
        out_input_ids.shape[0],
        max_num_reqs,
        max_model_len,
        FREEZE=overflow == "freeze",
        LANES=TILE,
        num_warps=1,
    )


def prepare_prefill_inputs_reference_(
    *,
    target_input_ids: torch.Tensor,
    target_positions: torch.Tensor,
    last_sampled: torch.Tensor,
    idx_mapping: torch.Tensor,
    query_start_loc: torch.Tensor,
    seq_lens: torch.Tensor,
    num_rejected: torch.Tensor,
    max_num_reqs: int,
    max_model_len: int,
    overflow: str = "reference",
    out_input_ids: torch.Tensor,
    out_positions: torch.Tensor,
    out_last_token_indices: torch.Tensor,
    out_query_start_loc: torch.Tensor,
    out_seq_lens: torch.Tensor,
    out_is_live: torch.Tensor | None = None,
) -> None:
    """Specify `prepare_prefill_inputs_` in plain torch."""
    inputs = (target_input_ids, target_positions, last_sampled, idx_mapping, query_start_loc, seq_lens, num_rejected)
    outputs = (out_input_ids, out_positions, out_last_token_indices, out_query_start_loc, out_seq_lens, out_is_live)
    _check(*inputs, max_num_reqs, max_model_len, overflow, *outputs)
    rows, tokens, states = idx_mapping.shape[0], target_input_ids.shape[0], last_sampled.shape[0]
    starts = query_start_loc[: rows + 1].long()
    begin, query_len = starts[:-1], starts.diff()
    first = starts + torch.arange(rows + 1, device=starts.device)
    active = (query_len > 0) & (begin >= 0) & (starts[1:] <= tokens) & (idx_mapping >= 0) & (idx_mapping < states)
    rejected = torch.where(active, torch.minimum(num_rejected[:rows].clamp(min=0), query_len), 0)
    kept = query_len - rejected
    keys = seq_lens[:rows].long() - rejected if overflow == "freeze" else seq_lens[:rows].long()
    out_query_start_loc[:rows] = first[:-1]
    out_query_start_loc[rows : max_num_reqs + 1] = first[-1]
    out_last_token_indices[:max_num_reqs] = 0
    out_last_token_indices[:rows] = torch.where(active, first[:-1] + kept, 0)
    out_seq_lens[:max_num_reqs] = 0
    out_seq_lens[:rows] = torch.where(active, keys.clamp(max=max_model_len - 1) + 1, 0)

    _fill_places(
        (target_input_ids, target_positions, last_sampled, idx_mapping),
        (first, begin, kept, active),
        max_model_len,
        (out_input_ids, out_positions),
        out_is_live,
    )


def _fill_places(
    sources: tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor],
    rows: tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor],
    max_model_len: int,
    outputs: tuple[torch.Tensor, torch.Tensor],
    out_is_live: torch.Tensor | None,
) -> None:
    """Write ids, positions and liveness of every place; `rows` holds what is known of each row."""
    target_input_ids, target_positions, last_sampled, idx_mapping = sources
    first, begin, kept, active = rows
    out_input_ids, out_positions = outputs
    width = out_input_ids.shape[0]
    place = torch.arange(min(int(first[-1]), width), device=first.device)
    row = torch.searchsorted(first[1:].contiguous(), place, right=True)
    j = place - first[row]
    active_place = active[row]
    is_kept, is_correction = active_place & (j < kept[row]), active_place & (j == kept[row])
    if active.any():
        token = target_input_ids.long()[torch.where(is_kept, place - row, 0)]
        correction = last_sampled.long()[torch.where(active, idx_mapping, 0)][row]
        position = target_positions.long()[torch.where(active, begin, 0)][row] + j
    else:
        token = correction = position = torch.zeros_like(place)
    used = place.shape[0]
    out_input_ids[:used] = torch.where(is_kept, token, torch.where(is_correction, correction, 0))
    out_positions[:used] = torch.where(active_place, position.clamp(max=max_model_len - 1), 0)
    if out_is_live is not None:
        out_is_live[:used] = (is_kept | is_correction) & (position >= 0) & (position < max_model_len)
        for out in (out_input_ids, out_positions, out_is_live):
            out[used:width] = 0


prepare_prefill_inputs_ = Op(
    "prepare_prefill_inputs",
    writes=("out_input_ids", "out_positions", "out_last_token_indices", "out_query_start_loc", "out_seq_lens", "out_is_live"),
    triton=_launch_prepare_prefill_inputs,
    reference=prepare_prefill_inputs_reference_,
)
"""Expand the target's batch by one place a row for draft step 0.

R rows, T target tokens, S request states, W >= T + R places, M = max_num_reqs >= R, L = max_model_len. All arrays are
int32 or int64. For row i with s = query_start_loc[i], q tokens, r = min(num_rejected[i], q) and first position P:

* place s + i + j, 0 <= j <= q: id = the target's token for j < q - r, last_sampled[idx_mapping[i]] for j = q - r, else 0;
  position = min(P + j, L - 1);
* out_query_start_loc[i] = s + i; out_last_token_indices[i] = s + i + q - r, the correction token's place.

Rows R up to M have length 0 and index 0; their start offsets repeat the total. A row with an empty query or with
idx_mapping outside [0, S) is inert: its places hold id 0 and position 0, its length and index are 0, and nothing of it
is read.

At the length limit:

* overflow="reference": out_seq_lens[i] = min(seq_lens[i] + 1, L), rejected tokens included, as fits attention that aligns
  queries and keys at their ends. At the limit several tokens share position L - 1 and so one cache slot. Places past the
  total are left alone.
* overflow="freeze": out_is_live is 1 for kept tokens and the correction token while P + j < L, and 0 everywhere else. Give
  it to `compute_slot_mapping_` as `is_live`: rejected tokens and tokens past the limit then get slot -1 and overwrite
  nothing. out_seq_lens[i] = min(seq_lens[i] - r + 1, L): live keys only, as fits attention by position. Places past the
  total hold id 0, position 0 and 0 up to the end of the buffers, so a replayed graph never sees an older batch.

Args:
    target_input_ids, target_positions: [T] the target's flat batch.
    last_sampled: [S] newest token of each request state, not yet fed.
    idx_mapping: [R] request state of each row; -1 for none.
    query_start_loc: [R + 1] exclusive prefix sums of the query lengths.
    seq_lens: [R] number of tokens of each row, this query included.
    num_rejected: [R] rejected drafts at the end of each query.
    max_num_reqs, max_model_len: M and L.
    overflow: "reference" or "freeze".
    out_input_ids, out_positions: [W] written.
    out_last_token_indices, out_seq_lens: [M] written.
    out_query_start_loc: [M + 1] written; must not be query_start_loc itself.
    out_is_live: [W] written; exactly when overflow is "freeze".

Raises:
    ArgumentError, ArgumentTypeError: arrays that do not belong together; nothing has been written.
"""
