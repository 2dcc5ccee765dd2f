"""Inputs of one forward pass: a window of every row's sequence, in a layout of fixed shape.

A row's sequence is its committed tokens followed by this round's drafts, so every pass of a round is a window on it:

* `FEED`: committed tokens that the drafter has not seen (draft step 0: accepted drafts and the correction token);
* `DRAFTED`: the newest draft (draft steps 1, 2, ...);
* `VERIFY`: the newest committed token and this round's drafts.

Row r owns the places r * width up to (r + 1) * width. Places past its window (those of rejected drafts, of rows with
fewer drafts and of idle rows) hold id 0, position 0, slot -1 and row -1, so the shape never depends on device data.
Positions, lengths and slots are computed afresh from the committed length each time; nothing derived is kept.

Two things make windows for other kinds of drafts. With a `shift` of 1 the token of the next place is fed at each position, as drafts do
that read the target's hidden state of the position besides. And `num_masks` places with a mask token may follow the window's last
token, for drafts that guess several tokens in one pass.

`query_only` makes windows for drafts that attend to the target's cache and write none of their own: they have no slots, and the newest
draft is fed at the position where the newest committed token was.
"""

from itertools import takewhile

import numpy as np
import torch

from funcspec.constants import NO_ROW, NO_TOKEN, PAD_SLOT
from funcspec.errors import ArgumentTypeError, refuse
from funcspec.kernels._checks import check_matrix, check_rows
from funcspec.kernels._triton import jit, tl
from funcspec.kernels.op import Op, next_power_of_2

FEED, DRAFTED, VERIFY = 0, 1, 2

Array = torch.Tensor | np.ndarray

HOST_INT32 = np.dtype(np.int32)

BY_ROW = ("num_tokens", "fed_len", "num_draft", "num_drafted", "is_live")

OUTPUTS = ("out_input_ids", "out_positions", "out_slot_mapping", "out_token_rows", "out_seq_lens", "out_last_token_indices")


@jit
def window_inputs_kernel(
    tokens_ptr,  # [R, L] int32
    num_tokens_ptr,  # [R] int32
    fed_len_ptr,  # [R] int32
    num_draft_ptr,  # [R] int32
    num_drafted_ptr,  # [R] int32
    is_live_ptr,  # [R] int32
    block_tables_ptr,  # [R, N] int32
    masks_ptr,  # [R, NUM_MASKS or more] int32, or anything
    out_input_ids_ptr,  # [R * W] int32, written
    out_positions_ptr,  # [R * W] int32, written
    out_slot_mapping_ptr,  # [R * W] int32, written
    out_token_rows_ptr,  # [R * W] int32, written
    out_seq_lens_ptr,  # [R] int32, written
    out_last_token_indices_ptr,  # [R] int32, written
    tokens_stride,
    table_stride,
    num_columns,
    limit,
    mask_id,
    masks_stride,
    KIND: tl.constexpr,
    WIDTH: tl.constexpr,
    SHIFT: tl.constexpr,
    QUERY_ONLY: tl.constexpr,
    NUM_MASKS: tl.constexpr,
    HAS_MASKS: tl.constexpr,
    NUM_CHOICES: tl.constexpr,
    CHOICE_OFFSET: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    LANES: tl.constexpr,
):
    row = tl.program_id(0)
    wide_row = row.to(tl.int64)
    n = tl.load(num_tokens_ptr + row)
    drafted = tl.load(num_drafted_ptr + row)
    num_draft = tl.load(num_draft_ptr + row)
    ahead = drafted * 0 + SHIFT  # from a position to the token that is fed there
    if KIND == 0:
        start = tl.load(fed_len_ptr + row)
        stop = n - SHIFT
    elif KIND == 1:
        if QUERY_ONLY:
            ahead += drafted
        start = n + drafted - 1 - ahead
        stop = tl.where(drafted < num_draft, start + 1, 0)
    else:
        start = n - 1
        stop = n + tl.minimum(num_draft, drafted)
    stop = tl.where(tl.load(is_live_ptr + row) != 0, tl.minimum(stop, limit), 0)
    lane = tl.arange(0, LANES)
    position = start + lane
    live = (lane < WIDTH - NUM_MASKS) & (position >= 0) & (position < stop)
    token = tl.load(tokens_ptr + wide_row * tokens_stride + position + ahead, mask=live, other=-1)
    # The first place that is not live ends the window: a placeholder hides what lies behind it.
    last = tl.min(tl.where(live & (token >= 0), LANES, lane), axis=0) - 1
    count = last + 1
    if NUM_MASKS > 0:
        count = tl.where(last >= 0, tl.minimum(count + NUM_MASKS, limit - start), 0)
        if HAS_MASKS:
            behind = lane - last - 1
            inside = (behind >= 0) & (behind < NUM_MASKS)
            token = tl.where(lane > last, tl.load(masks_ptr + wide_row * masks_stride + behind, mask=inside, other=-1), token)
            count = tl.minimum(count, tl.min(tl.where((lane <= last) | (token >= 0), LANES, lane), axis=0))
        else:
            token = tl.where(lane > last, mask_id, token)
    live = lane < count
    position = tl.where(live, position, 0)
    column = position // BLOCK_SIZE
    block = tl.load(block_tables_ptr + wide_row * table_stride + column, mask=live & (column < num_columns), other=-1)
    slot = block.to(tl.int64) * BLOCK_SIZE + position % BLOCK_SIZE
    at = wide_row * WIDTH + lane
    tl.store(out_input_ids_ptr + at, tl.where(live, token, 0), mask=lane < WIDTH)
    tl.store(out_positions_ptr + at, position, mask=lane < WIDTH)
    has_slot = (lane < 0) if QUERY_ONLY else live & (block >= 0)
    tl.store(out_slot_mapping_ptr + at, tl.where(has_slot, slot, -1).to(tl.int32), mask=lane < WIDTH)
    tl.store(out_token_rows_ptr + at, tl.where(live, row, -1), mask=lane < WIDTH)
    tl.store(out_seq_lens_ptr + row, tl.where(count > 0, start + count, 0))
    for choice in tl.static_range(NUM_CHOICES):
        at_choice = row * WIDTH + tl.maximum(last, 0) + CHOICE_OFFSET + choice
        tl.store(out_last_token_indices_ptr + row * NUM_CHOICES + choice, at_choice)


def _check(
    kind: int,
    tokens: Array,
    by_row: tuple[Array, ...],
    block_tables: Array,
    width: int,
    shape: tuple[int, int, int, int],
    outputs: tuple[Array, ...],
    int32: torch.dtype | np.dtype,
) -> None:
    rows = tokens.shape[0]
    if kind not in (FEED, DRAFTED, VERIFY):
        refuse("kind", "FEED, DRAFTED or VERIFY", kind, "use the constants of funcspec.kernels.window_inputs")
    check_rows(rows, BY_ROW, by_row)
    check_matrix("tokens", tokens, rows)
    if block_tables.ndim == 2 and block_tables.shape[0] == rows:
        check_matrix("block_tables", block_tables, rows)
    if block_tables.ndim != 2 or block_tables.shape[0] != rows or block_tables.shape[1] == 0:
        refuse("block_tables", f"{rows} rows of at least one block", tuple(block_tables.shape), "pass arrays of one batch")
    if width < 1:
        refuse("width", "at least 1", width, "pass the number of places a row has")
    shift, num_masks, num_choices, choice_offset = shape
    if shift and kind == VERIFY:
        refuse("shift", "0 for VERIFY", shift, "a target is fed the token of the position itself")
    if shift not in (0, 1):
        refuse("shift", "0 or 1", shift, "feed the token of the position itself, or that of the next one")
    if not 0 <= num_masks < width:
        refuse("num_masks", f"from 0 to width - 1 = {width - 1}", num_masks, "make the window wider")
    if num_choices < 1 or choice_offset < 0 or choice_offset + num_choices > num_masks + 1:
        found = f"{num_choices} from place {choice_offset} on"
        refuse("num_choices", f"choices among the last token and {num_masks} masks behind it", found, "add masks, or choose less")
    places = rows * width
    for name, out, count in zip(OUTPUTS, outputs, (places, places, places, places, rows, rows * num_choices), strict=True):
        if out.shape[0] < count:
            refuse(name, f"at least {count} entries for {rows} rows of {width} places", out.shape[0], "make the output longer")
        if out.dtype != int32:
            refuse(name, "int32", out.dtype, "allocate outputs as int32", ArgumentTypeError)


def _check_masks(masks: Array | None, rows: int, num_masks: int) -> None:
    if masks is not None:
        check_matrix("masks", masks, rows)
        if masks.shape[1] < num_masks:
            refuse("masks", f"at least {num_masks} columns", masks.shape[1], "pass a token for every mask, -1 for none")


def _check_query_only(query_only: bool, kind: int, num_masks: int) -> None:
    if query_only and (kind == VERIFY or num_masks):
        found = "VERIFY" if kind == VERIFY else f"{num_masks} masks"
        refuse("query_only", "False for VERIFY and for windows with masks", found, "these places need slots")


def _launch_window_inputs(
    *,
    kind: int,
    tokens: torch.Tensor,
    num_tokens: torch.Tensor,
    fed_len: torch.Tensor,
    num_draft: torch.Tensor,
    num_drafted: torch.Tensor,
    is_live: torch.Tensor,
    block_tables: torch.Tensor,
    block_size: int,
    width: int,
    limit: int,
    shift: int = 0,
    query_only: bool = False,
    num_masks: int = 0,
    mask_id: int = 0,
    masks: torch.Tensor | None = None,
    num_choices: int = 1,
    choice_offset: int = 0,
    out_input_ids: torch.Tensor,
    out_positions: torch.Tensor,
    out_slot_mapping: torch.Tensor,
    out_token_rows: torch.Tensor,
    out_seq_lens: torch.Tensor,
    out_last_token_indices: torch.Tensor,
) -> None:
    outputs = (out_input_ids, out_positions, out_slot_mapping, out_token_rows, out_seq_lens, out_last_token_indices)
    shape = (shift, num_masks, num_choices, choice_offset)
    _check_masks(masks, tokens.shape[0], num_masks)
    _check_query_only(query_only, kind, num_masks)
    _check(kind, tokens, (num_tokens, fed_len, num_draft, num_drafted, is_live), block_tables, width, shape, outputs, torch.int32)
    window_inputs_kernel[(tokens.shape[0],)](
        tokens,
        num_tokens,
        fed_len,
        num_draft,
        num_drafted,
        is_live,
        block_tables,
        tokens if masks is None else masks,
        *outputs,
        tokens.stride(0),
        block_tables.stride(0),
        block_tables.shape[1],
        limit,
        mask_id,
        0 if masks is None else masks.stride(0),
        KIND=kind,
        WIDTH=width,
        SHIFT=shift,
        QUERY_ONLY=query_only,
        NUM_MASKS=num_masks,
        HAS_MASKS=masks is not None,
        NUM_CHOICES=num_choices,
        CHOICE_OFFSET=choice_offset,
        BLOCK_SIZE=block_size,
        LANES=next_power_of_2(width),
        num_warps=1,
    )


def window_inputs_reference_(
    *,
    kind: int,
    tokens: torch.Tensor,
    num_tokens: torch.Tensor,
    fed_len: torch.Tensor,
    num_draft: torch.Tensor,
    num_drafted: torch.Tensor,
    is_live: torch.Tensor,
    block_tables: torch.Tensor,
    block_size: int,
    width: int,
    limit: int,
    shift: int = 0,
    query_only: bool = False,
    num_masks: int = 0,
    mask_id: int = 0,
    masks: torch.Tensor | None = None,
    num_choices: int = 1,
    choice_offset: int = 0,
    out_input_ids: torch.Tensor,
    out_positions: torch.Tensor,
    out_slot_mapping: torch.Tensor,
    out_token_rows: torch.Tensor,
    out_seq_lens: torch.Tensor,
    out_last_token_indices: torch.Tensor,
) -> None:
    """Specify `window_inputs_` in plain torch."""
    outputs = (out_input_ids, out_positions, out_slot_mapping, out_token_rows, out_seq_lens, out_last_token_indices)
    shape = (shift, num_masks, num_choices, choice_offset)
    _check_masks(masks, tokens.shape[0], num_masks)
    _check_query_only(query_only, kind, num_masks)
    _check(kind, tokens, (num_tokens, fed_len, num_draft, num_drafted, is_live), block_tables, width, shape, outputs, torch.int32)
    rows, length = tokens.shape
    places = rows * width
    ahead = num_drafted + shift if query_only and kind == DRAFTED else torch.full_like(num_drafted, shift)
    if kind == FEED:
        start, stop = fed_len, num_tokens - shift
    elif kind == DRAFTED:
        start = num_tokens + num_drafted - 1 - ahead
        stop = (start + 1) * (num_drafted < num_draft)
    else:
        start, stop = num_tokens - 1, num_tokens + torch.minimum(num_draft, num_drafted)
    stop = (stop * (is_live != 0)).clamp_(max=limit)
    lane = torch.arange(width, device=tokens.device)
    position = start[:, None] + lane
    live = (lane < width - num_masks) & (position >= 0) & (position < stop[:, None])
    token = tokens.gather(1, (position + ahead[:, None]).clamp(0, length - 1))
    # The first place that is not live ends the window: a placeholder hides what lies behind it.
    last = torch.where(live & (token >= 0), width, lane).amin(1) - 1
    count = torch.where(last >= 0, torch.minimum(last + 1 + num_masks, limit - start), 0) if num_masks else last + 1
    if masks is None or num_masks == 0:
        token = torch.where(lane > last[:, None], mask_id, token)
    else:
        behind = lane - last[:, None] - 1
        guess = torch.where(behind < num_masks, masks.gather(1, behind.clamp(0, num_masks - 1).long()), NO_TOKEN)
        token = torch.where(behind >= 0, guess, token)
        count = torch.minimum(count, torch.where((behind < 0) | (token >= 0), width, lane).amin(1))
    live = lane < count[:, None]
    position *= live
    column = position // block_size
    block = block_tables.gather(1, column.clamp(max=block_tables.shape[1] - 1))
    has_slot = live & (block >= 0) & (column < block_tables.shape[1]) & (not query_only)
    slot = torch.where(has_slot, block * block_size + position % block_size, PAD_SLOT)
    row = torch.arange(rows, device=tokens.device)
    out_input_ids[:places] = (token * live).view(-1)
    out_positions[:places] = position.view(-1)
    out_slot_mapping[:places] = slot.view(-1)
    out_token_rows[:places] = torch.where(live, row[:, None], NO_ROW).view(-1)
    out_seq_lens[:rows] = (start + count) * (count > 0)
    choices = torch.arange(choice_offset, choice_offset + num_choices, device=tokens.device)
    out_last_token_indices[: rows * num_choices] = ((row * width + last.clamp(min=0))[:, None] + choices).view(-1)


def window_inputs_host_(
    *,
    kind: int,
    tokens: np.ndarray,
    num_tokens: np.ndarray,
    fed_len: np.ndarray,
    num_draft: np.ndarray,
    num_drafted: np.ndarray,
    is_live: np.ndarray,
    block_tables: np.ndarray,
    block_size: int,
    width: int,
    limit: int,
    shift: int = 0,
    query_only: bool = False,
    num_masks: int = 0,
    mask_id: int = 0,
    masks: np.ndarray | None = None,
    num_choices: int = 1,
    choice_offset: int = 0,
    out_input_ids: np.ndarray,
    out_positions: np.ndarray,
    out_slot_mapping: np.ndarray,
    out_token_rows: np.ndarray,
    out_seq_lens: np.ndarray,
    out_last_token_indices: np.ndarray,
) -> None:
    """Do what `window_inputs_` does on NumPy views, one row after another."""
    outputs = (out_input_ids, out_positions, out_slot_mapping, out_token_rows, out_seq_lens, out_last_token_indices)
    shape = (shift, num_masks, num_choices, choice_offset)
    _check_masks(masks, tokens.shape[0], num_masks)
    _check_query_only(query_only, kind, num_masks)
    _check(kind, tokens, (num_tokens, fed_len, num_draft, num_drafted, is_live), block_tables, width, shape, outputs, HOST_INT32)
    rows, places = tokens.shape[0], tokens.shape[0] * width
    for out, fill in ((out_input_ids, 0), (out_positions, 0), (out_slot_mapping, PAD_SLOT), (out_token_rows, NO_ROW)):
        out[:places] = fill
    counts, planned, made = num_tokens.tolist(), num_draft.tolist(), num_drafted.tolist()
    fed, live = fed_len.tolist(), is_live.tolist()
    owned = block_tables.shape[1]
    for row in range(rows):
        n, first = counts[row], row * width
        ahead = shift + (made[row] if query_only and kind == DRAFTED else 0)
        if kind == FEED:
            start, stop = fed[row], n - shift
        elif kind == DRAFTED:
            start = n + made[row] - 1 - ahead
            stop = start + 1 if made[row] < planned[row] else 0
        else:
            start, stop = n - 1, n + min(planned[row], made[row])
        stop = min(stop, limit, start + width - num_masks) if live[row] and start >= 0 else 0
        seen = tokens[row, start + ahead : stop + ahead].tolist() if stop > start >= 0 else []
        window = list(takewhile(lambda token: token >= 0, seen))
        last = max(len(window) - 1, 0)
        if window and num_masks:
            guesses = [mask_id] * num_masks if masks is None else takewhile(lambda token: token >= 0, masks[row, :num_masks].tolist())
            window = [*window, *guesses][: limit - start]
        count = 0
        for position, token in enumerate(window, start):
            at, column = first + count, position // block_size
            block = int(block_tables[row, column]) if column < owned else -1
            out_input_ids[at] = token
            out_positions[at] = position
            out_slot_mapping[at] = block * block_size + position % block_size if block >= 0 and not query_only else PAD_SLOT
            out_token_rows[at] = row
            count += 1
        out_seq_lens[row] = start + count if count else 0
        for choice in range(num_choices):
            out_last_token_indices[row * num_choices + choice] = first + last + choice_offset + choice


window_inputs_ = Op(
    "window_inputs",
    writes=OUTPUTS,
    triton=_launch_window_inputs,
    reference=window_inputs_reference_,
    strided=("tokens", "block_tables", "masks"),
    host=window_inputs_host_,
)
"""Derive the inputs of one pass from the rows' sequences. R rows, windows of W places.

Args:
    kind: `FEED` (positions fed_len to num_tokens), `DRAFTED` (the newest draft of rows that draft further; the newest committed
        token while there is none) or `VERIFY` (newest committed token and drafts).
    tokens: [R, L] int32, committed tokens, then drafts; -1 elsewhere. A -1 among them ends the window: what lies behind it is
        left out.
    num_tokens: [R] int32, committed length.
    fed_len: [R] int32, tokens that the drafter has seen; read by `FEED`.
    num_draft, num_drafted: [R] int32, drafts planned and made this round.
    is_live: [R] int32, 0 for rows that take no part.
    block_tables: [R, N] int32, -1 where a row owns no block.
    block_size, width: tokens in a block; W.
    limit: positions the model can take; places at or past it are left out (they write nothing and do not lengthen the keys).
    shift: 1 to feed at each position the token of the next one; the window then ends a position earlier.
    query_only: whether the rows' cache is only read: no place has a slot, and `DRAFTED` feeds the newest draft at the position of the
        newest committed token (one earlier with a shift of 1), with the keys up to there.
    num_masks, mask_id: places behind the window's last token, and the token they hold; none in an empty window. They are among the
        `width` places.
    masks: [R, at least num_masks] int32, what these places hold instead, -1 where a row has no more; or None.
    num_choices, choice_offset: C choices are made, the first of them this many places behind the window's last token.
    out_input_ids, out_positions, out_slot_mapping, out_token_rows: [R * W] int32, written; token_rows is the row or -1.
    out_seq_lens: [R] int32, written: keys visible after this pass, 0 for rows with an empty window.
    out_last_token_indices: [R * C] int32, written: the place of each choice; those of a row with an empty window hold no token.

Raises:
    ArgumentError, ArgumentTypeError: shapes or dtypes do not fit. Nothing was written.
"""
