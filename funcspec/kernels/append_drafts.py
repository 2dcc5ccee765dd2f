"""Write sampled drafts behind the committed tokens of their rows; the first drafts of a round also plan the round."""

import numpy as np
import torch

from funcspec.constants import NO_TOKEN
from funcspec.errors import refuse
from funcspec.kernels._checks import check_matrix, check_rows
from funcspec.kernels._triton import jit, tl
from funcspec.kernels.op import Op, next_power_of_2

Array = torch.Tensor | np.ndarray


@jit
def append_drafts_kernel(
    chosen_ptr,  # [R * C] int32
    num_tokens_ptr,  # [R] int32
    row_limit_ptr,  # [R] int32
    is_live_ptr,  # [R] int32
    wanted_ptr,  # [R] int32
    tokens_ptr,  # [R, L] int32, written
    num_draft_ptr,  # [R] int32, written
    num_drafted_ptr,  # [R] int32, written
    draft_len_ptr,  # [R] int32, written
    seq_lens_ptr,  # [R] int32, or anything
    out_tokens_ptr,  # [R, K] int32, written
    tokens_stride,
    draft_limit,
    lag,
    FIRST: tl.constexpr,
    HAS_LENS: tl.constexpr,
    NUM_CHOSEN: tl.constexpr,
    MAX_DRAFT: tl.constexpr,
    LANES: tl.constexpr,
):
    row = tl.program_id(0)
    lane = tl.arange(0, LANES)
    n = tl.load(num_tokens_ptr + row)
    if FIRST:
        live = tl.load(is_live_ptr + row) != 0
        room = tl.minimum(tl.load(row_limit_ptr + row) - n - 1, draft_limit - n + 1)
        planned = tl.maximum(tl.minimum(tl.minimum(tl.load(wanted_ptr + row), room), MAX_DRAFT), 0)
        planned = tl.where(live, planned, 0)
        if HAS_LENS:
            planned = tl.where(tl.load(seq_lens_ptr + row) > 0, planned, 0)
        made = 0
        tl.store(num_draft_ptr + row, planned)
        tl.store(draft_len_ptr + row, tl.minimum(n, draft_limit) - lag, mask=live)
    else:
        planned = tl.load(num_draft_ptr + row)
        made = tl.load(num_drafted_ptr + row)
    place = tokens_ptr + row.to(tl.int64) * tokens_stride + n
    drafts = tl.load(place + lane, mask=lane < made, other=-1)
    goes_on = made < planned
    for index in tl.static_range(NUM_CHOSEN):
        token = tl.load(chosen_ptr + row * NUM_CHOSEN + index)
        goes_on = goes_on & (made < planned) & (token >= 0)
        drafts = tl.where(lane == tl.where(goes_on, made, LANES), token, drafts)
        tl.store(place + made, token, mask=goes_on)
        made += goes_on.to(tl.int32)
    tl.store(out_tokens_ptr + row.to(tl.int64) * MAX_DRAFT + lane, drafts, mask=lane < MAX_DRAFT)
    tl.store(num_drafted_ptr + row, made)


BY_ROW = ("wanted", "num_tokens", "row_limit", "is_live", "num_draft", "num_drafted", "draft_len")


def _check(chosen: Array, num_chosen: int, tokens: Array, out_tokens: Array, by_row: tuple[Array, ...]) -> None:
    rows = tokens.shape[0]
    if out_tokens.ndim != 2 or out_tokens.shape[0] != rows:
        refuse("out_tokens", f"[{rows}, K]", tuple(out_tokens.shape), "allocate a place for every row and draft")
    if chosen.shape[0] < rows * num_chosen:
        expected = f"{num_chosen} tokens for each of {rows} rows" if num_chosen > 1 else f"one token for each of {rows} rows"
        refuse("chosen", expected, tuple(chosen.shape), "pass arrays of one batch")
    check_rows(rows, BY_ROW, by_row)
    check_rows(chosen.shape[0], ("chosen",), (chosen,))
    check_matrix("tokens", tokens, rows)
    check_matrix("out_tokens", out_tokens, rows)


def _launch_append_drafts(
    *,
    first: bool,
    chosen: torch.Tensor,
    num_tokens: torch.Tensor,
    row_limit: torch.Tensor,
    is_live: torch.Tensor,
    wanted: torch.Tensor,
    tokens: torch.Tensor,
    num_draft: torch.Tensor,
    num_drafted: torch.Tensor,
    draft_len: torch.Tensor,
    draft_limit: int,
    lag: int = 0,
    num_chosen: int = 1,
    seq_lens: torch.Tensor | None = None,
    out_tokens: torch.Tensor,
) -> None:
    _check(chosen, num_chosen, tokens, out_tokens, (wanted, num_tokens, row_limit, is_live, num_draft, num_drafted, draft_len))
    append_drafts_kernel[(tokens.shape[0],)](
        chosen,
        num_tokens,
        row_limit,
        is_live,
        wanted,
        tokens,
        num_draft,
        num_drafted,
        draft_len,
        num_tokens if seq_lens is None else seq_lens,
        out_tokens,
        tokens.stride(0),
        draft_limit,
        lag,
        FIRST=first,
        HAS_LENS=seq_lens is not None,
        NUM_CHOSEN=num_chosen,
        MAX_DRAFT=out_tokens.shape[1],
        LANES=next_power_of_2(out_tokens.shape[1]),
        num_warps=1,
    )


def append_drafts_reference_(
    *,
    first: bool,
    chosen: torch.Tensor,
    num_tokens: torch.Tensor,
    row_limit: torch.Tensor,
    is_live: torch.Tensor,
    wanted: torch.Tensor,
    tokens: torch.Tensor,
    num_draft: torch.Tensor,
    num_drafted: torch.Tensor,
    draft_len: torch.Tensor,
    draft_limit: int,
    lag: int = 0,
    num_chosen: int = 1,
    seq_lens: torch.Tensor | None = None,
    out_tokens: torch.Tensor,
) -> None:
    """Specify `append_drafts_` in plain torch."""
    _check(chosen, num_chosen, tokens, out_tokens, (wanted, num_tokens, row_limit, is_live, num_draft, num_drafted, draft_len))
    rows, length = tokens.shape
    if first:
        live = is_live != 0
        room = torch.minimum(row_limit - 1, torch.full_like(row_limit, draft_limit + 1)).sub_(num_tokens)
        feeds = live if seq_lens is None else live & (seq_lens > 0)
        num_draft.copy_(torch.minimum(wanted, room).clamp_(0, out_tokens.shape[1]).mul_(feeds))
        draft_len.copy_(torch.where(live, num_tokens.clamp(max=draft_limit) - lag, draft_len))
        num_drafted.zero_()
    goes_on = torch.ones(rows, 1, dtype=torch.bool, device=tokens.device)
    for token in chosen[: rows * num_chosen].view(rows, num_chosen, 1).unbind(1):
        goes_on = goes_on & (num_drafted < num_draft)[:, None] & (token >= 0)
        place = (num_tokens + num_drafted)[:, None].clamp_(max=length - 1).long()
        tokens.scatter_(1, place, torch.where(goes_on, token, tokens.gather(1, place)))
        num_drafted += goes_on[:, 0]
    lane = torch.arange(out_tokens.shape[1], device=tokens.device)
    place = (num_tokens[:, None] + lane).clamp_(max=length - 1)
    out_tokens.copy_(torch.where(lane < num_drafted[:, None], tokens.gather(1, place), NO_TOKEN))


def append_drafts_host_(
    *,
    first: bool,
    chosen: np.ndarray,
    num_tokens: np.ndarray,
    row_limit: np.ndarray,
    is_live: np.ndarray,
    wanted: np.ndarray,
    tokens: np.ndarray,
    num_draft: np.ndarray,
    num_drafted: np.ndarray,
    draft_len: np.ndarray,
    draft_limit: int,
    lag: int = 0,
    num_chosen: int = 1,
    seq_lens: np.ndarray | None = None,
    out_tokens: np.ndarray,
) -> None:
    """Do what `append_drafts_` does on NumPy views, one row after another."""
    _check(chosen, num_chosen, tokens, out_tokens, (wanted, num_tokens, row_limit, is_live, num_draft, num_drafted, draft_len))
    rows, width = out_tokens.shape
    out_tokens.fill(NO_TOKEN)
    counts, limits, live, asked, drawn = num_tokens.tolist(), row_limit.tolist(), is_live.tolist(), wanted.tolist(), chosen.tolist()
    for row in range(rows):
        n = counts[row]
        if first:
            room = min(asked[row], limits[row] - n - 1, draft_limit - n + 1, width)
            planned, made = max(room, 0) if live[row] and (seq_lens is None or seq_lens[row] > 0) else 0, 0
            num_draft[row] = planned
            if live[row]:
                draft_len[row] = min(n, draft_limit) - lag
        else:
            planned, made = int(num_draft[row]), int(num_drafted[row])
        for token in drawn[row * num_chosen : row * num_chosen + min(num_chosen, max(planned - made, 0))]:
            if token < 0:
                break
            tokens[row, n + made] = token
            made += 1
        num_drafted[row] = made
        if made:
            out_tokens[row, :made] = tokens[row, n : n + made]


append_drafts_ = Op(
    "append_drafts",
    writes=("tokens", "num_draft", "num_drafted", "draft_len", "out_tokens"),
    triton=_launch_append_drafts,
    reference=append_drafts_reference_,
    strided=("tokens",),
    host=append_drafts_host_,
)
"""Append one draft per row, or several.

With `first`, the round is planned: num_draft = clip(min(wanted, row_limit - n - 1, draft_limit - n + 1), 0, K) for
live rows and 0 for others, draft_len = min(n, draft_limit) - lag (all that the drafter has now been fed), num_drafted = 0. Then
rows with num_drafted < num_draft get their tokens from place n + num_drafted on: C of them, as many as are planned, or those before
the first -1. n is the committed length.

Args:
    first: whether this is draft step 0.
    chosen: [R * C] int32 sampled drafts, row by row (target ids), -1 for none.
    num_tokens, row_limit, is_live, wanted: [R] int32, read; `wanted` drafts are asked for.
    tokens: [R, L] int32, in place.
    num_draft, num_drafted, draft_len: [R] int32, in place.
    draft_limit: positions the drafter can take, counted from the row's first token that it is fed.
    lag: committed tokens at the end of a row that have no position in the drafter's cache; 1 for drafts that read hidden states, which
        the newest token has none of.
    num_chosen: C.
    seq_lens: [R] int32, keys that each row's pass saw; with `first`, rows of 0 fed nothing and plan no draft. None if all may.
    out_tokens: [R, K] int32, written: this round's drafts so far, -1 in other places.

Raises:
    ArgumentError: shapes do not fit. Nothing was written.
"""
