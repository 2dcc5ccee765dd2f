"""Acceptance by matching: keep drafts while they equal the target's own choice, then emit that choice; trim; commit.

Serves greedy acceptance (the choice is the arg-max) and the Gumbel coupling (the choice is drawn with the noise that the
drafter used too). Daliri, Musco and Suresh 2024, arXiv 2408.07978.
"""

import numpy as np
import torch

from funcspec.constants import NO_TOKEN
from funcspec.errors import refuse
from funcspec.kernels._checks import check_matrix, check_rows
from funcspec.kernels._triton import jit, tl
from funcspec.kernels.op import Op, next_power_of_2

ACCEPTED, RECOVERED, BONUS = 0, 1, 2
"""Origins of an emitted token: an accepted draft, the target's token after a rejection, the target's token after none."""

NOT_FINISHED, STOPPED, AT_LENGTH = 0, 1, 2
"""Finish reasons of a row."""

Array = torch.Tensor | np.ndarray


@jit
def accept_matching_kernel(
    chosen_ptr,  # [R * W] int32
    bad_ptr,  # [R * W] int32
    row_limit_ptr,  # [R] int32
    stop_ids_ptr,  # [R, S] int32
    tokens_ptr,  # [R, L] int32, written
    num_tokens_ptr,  # [R] int32, written
    num_draft_ptr,  # [R] int32, written
    num_drafted_ptr,  # [R] int32, written
    is_live_ptr,  # [R] int32, written
    finish_reason_ptr,  # [R] int32, written
    bad_row_ptr,  # [R] int32, written
    out_tokens_ptr,  # [R, W] int32, written
    out_origin_ptr,  # [R, W] int32, written
    out_num_accepted_ptr,  # [R] int32, written
    out_num_emitted_ptr,  # [R] int32, written
    out_num_drafted_ptr,  # [R] int32, written
    out_bad_row_ptr,  # [R] int32, written
    tokens_stride,
    NUM_STOP: tl.constexpr,
    WIDTH: tl.constexpr,
    LANES: tl.constexpr,
):
    row = tl.program_id(0)
    lane = tl.arange(0, LANES)
    inside = lane < WIDTH
    live = tl.load(is_live_ptr + row) != 0
    n = tl.load(num_tokens_ptr + row)
    limit = tl.load(row_limit_ptr + row)
    num_draft = tl.where(live, tl.minimum(tl.load(num_draft_ptr + row), tl.load(num_drafted_ptr + row)), 0)
    at = row.to(tl.int64) * WIDTH + lane
    place = tokens_ptr + row.to(tl.int64) * tokens_stride + n + lane
    chosen = tl.load(chosen_ptr + at, mask=inside, other=-1)
    draft = tl.load(place, mask=lane < num_draft, other=-1)
    kept = tl.min(tl.where((lane < num_draft) & (draft != chosen), lane, num_draft), axis=0)
    is_stop = lane < 0
    for s in tl.static_range(NUM_STOP):
        stop = tl.load(stop_ids_ptr + row * NUM_STOP + s)
        is_stop = is_stop | ((stop >= 0) & (chosen == stop))
    # A run ends with its first stop, and before a place without a choice.
    end = tl.min(tl.where(is_stop, lane + 1, tl.where(chosen < 0, lane, LANES)), axis=0)
    emitted = tl.minimum(tl.minimum(kept + 1, end), limit - n)
    emitted = tl.where(live, tl.maximum(emitted, 0), 0)
    final = tl.where(kept < num_draft, 1, 2)
    is_emitted = lane < emitted
    bad = tl.max(tl.where(is_emitted, tl.load(bad_ptr + at, mask=inside, other=0), 0), axis=0)
    stopped = tl.max((is_stop & is_emitted).to(tl.int32), axis=0)
    reason = tl.where(stopped != 0, 1, tl.where(n + emitted >= limit, 2, 0))
    tl.store(place, tl.where(is_emitted, chosen, -1), mask=is_emitted | (lane < num_draft))
    tl.store(out_tokens_ptr + at, tl.where(is_emitted, chosen, -1), mask=inside)
    tl.store(out_origin_ptr + at, tl.where(is_emitted, tl.where(lane < kept, 0, final), -1), mask=inside)
    tl.store(out_num_accepted_ptr + row, tl.minimum(kept, emitted))
    tl.store(out_num_emitted_ptr + row, emitted)
    tl.store(out_num_drafted_ptr + row, num_draft)
    tl.store(out_bad_row_ptr + row, bad)
    tl.store(num_tokens_ptr + row, n + emitted)
    tl.store(num_draft_ptr + row, 0)
    tl.store(num_drafted_ptr + row, 0)
    tl.store(finish_reason_ptr + row, reason, mask=live)
    tl.store(is_live_ptr + row, (reason == 0).to(tl.int32), mask=live)
    tl.store(bad_row_ptr + row, tl.maximum(tl.load(bad_row_ptr + row), bad))


BY_ROW = ("row_limit", "num_tokens", "num_draft", "num_drafted", "is_live", "finish_reason", "bad_row")
OUT_BY_ROW = ("out_num_accepted", "out_num_emitted", "out_num_drafted", "out_bad_row")


def _check(
    chosen: Array, bad: Array, stop_ids: Array, tokens: Array, out_tokens: Array, out_origin: Array, by_row: tuple[Array, ...]
) -> None:
    rows, width = out_tokens.shape
    if tokens.shape[0] != rows:
        refuse("out_tokens", f"{tokens.shape[0]} rows", rows, "allocate one row for each row of tokens")
    if out_origin.shape != (rows, width):
        refuse("out_origin", f"the shape {(rows, width)} of out_tokens", tuple(out_origin.shape), "allocate both alike")
    if chosen.shape[0] < rows * width:
        refuse("chosen", f"{rows} * {width} choices", chosen.shape[0], "choose a token at every place of the window")
    if bad.shape[0] < rows * width:
        refuse("bad", f"{rows} * {width} flags", bad.shape[0], "pass a flag for every choice")
    check_rows(rows, BY_ROW + OUT_BY_ROW, by_row)
    for name, matrix in (("tokens", tokens), ("stop_ids", stop_ids), ("out_tokens", out_tokens), ("out_origin", out_origin)):
        check_matrix(name, matrix, rows)
    for name, flat in (("chosen", chosen), ("bad", bad)):
        check_rows(flat.shape[0], (name,), (flat,))


def _launch_accept_matching(
    *,
    chosen: torch.Tensor,
    bad: torch.Tensor,
    row_limit: torch.Tensor,
    stop_ids: torch.Tensor,
    tokens: torch.Tensor,
    num_tokens: torch.Tensor,
    num_draft: torch.Tensor,
    num_drafted: torch.Tensor,
    is_live: torch.Tensor,
    finish_reason: torch.Tensor,
    bad_row: torch.Tensor,
    out_tokens: torch.Tensor,
    out_origin: torch.Tensor,
    out_num_accepted: torch.Tensor,
    out_num_emitted: torch.Tensor,
    out_num_drafted: torch.Tensor,
    out_bad_row: torch.Tensor,
) -> None:
    by_row = (row_limit, num_tokens, num_draft, num_drafted, is_live, finish_reason, bad_row)
    out_by_row = (out_num_accepted, out_num_emitted, out_num_drafted, out_bad_row)
    _check(chosen, bad, stop_ids, tokens, out_tokens, out_origin, by_row + out_by_row)
    rows, width = out_tokens.shape
    accept_matching_kernel[(rows,)](
        chosen,
        bad,
        row_limit,
        stop_ids,
        tokens,
        num_tokens,
        num_draft,
        num_drafted,
        is_live,
        finish_reason,
        bad_row,
        out_tokens,
        out_origin,
        out_num_accepted,
        out_num_emitted,
        out_num_drafted,
        out_bad_row,
        tokens.stride(0),
        NUM_STOP=stop_ids.shape[1],
        WIDTH=width,
        LANES=next_power_of_2(width),
        num_warps=1,
    )


def accept_matching_reference_(
    *,
    chosen: torch.Tensor,
    bad: torch.Tensor,
    row_limit: torch.Tensor,
    stop_ids: torch.Tensor,
    tokens: torch.Tensor,
    num_tokens: torch.Tensor,
    num_draft: torch.Tensor,
    num_drafted: torch.Tensor,
    is_live: torch.Tensor,
    finish_reason: torch.Tensor,
    bad_row: torch.Tensor,
    out_tokens: torch.Tensor,
    out_origin: torch.Tensor,
    out_num_accepted: torch.Tensor,
    out_num_emitted: torch.Tensor,
    out_num_drafted: torch.Tensor,
    out_bad_row: torch.Tensor,
) -> None:
    """Specify `accept_matching_` in plain torch."""
    by_row = (row_limit, num_tokens, num_draft, num_drafted, is_live, finish_reason, bad_row)
    out_by_row = (out_num_accepted, out_num_emitted, out_num_drafted, out_bad_row)
    _check(chosen, bad, stop_ids, tokens, out_tokens, out_origin, by_row + out_by_row)
    rows, width = out_tokens.shape
    live = is_live != 0
    lane = torch.arange(width, device=tokens.device)
    choice = chosen[: rows * width].view(rows, width)
    drafts = torch.minimum(num_draft, num_drafted).mul_(live)[:, None]
    # Lanes past the drafts repeat lane 0, place and value, so that every scattered place has one value.
    own_place = lane <= drafts
    place = (num_tokens[:, None] + lane * own_place).clamp_(max=tokens.shape[1] - 1)
    row_tokens = tokens.gather(1, place)
    mismatch = (lane < drafts) & (row_tokens != choice)
    kept = torch.where(mismatch, lane, drafts).amin(1, keepdim=True)
    is_stop = ((choice[:, :, None] == stop_ids[:, None, :]) & (stop_ids >= 0)[:, None, :]).any(2)
    # A run ends with its first stop, and before a place without a choice.
    end = torch.where(is_stop, lane + 1, torch.where(choice < 0, lane, width)).amin(1, keepdim=True)
    emitted = torch.minimum(torch.minimum(kept + 1, end), (row_limit - num_tokens)[:, None]).clamp_(min=0).mul_(live[:, None])
    is_emitted = lane < emitted
    emitted_tokens = torch.where(is_emitted, choice, NO_TOKEN)
    out_tokens.copy_(emitted_tokens)
    out_origin.copy_(torch.where(is_emitted, torch.where(lane < kept, ACCEPTED, torch.where(kept < drafts, RECOVERED, BONUS)), -1))
    out_num_accepted.copy_(torch.minimum(kept, emitted)[:, 0])
    out_num_emitted.copy_(emitted[:, 0])
    out_num_drafted.copy_(drafts[:, 0])
    out_bad_row.copy_((is_emitted & (bad[: rows * width].view(rows, width) != 0)).any(1))
    row_tokens = torch.where(is_emitted | (lane < drafts), emitted_tokens, row_tokens)
    tokens.scatter_(1, place, torch.where(own_place, row_tokens, row_tokens[:, :1]))
    num_tokens += out_num_emitted
    num_draft.zero_()
    num_drafted.zero_()
    reason = torch.where((is_stop & is_emitted).any(1), STOPPED, AT_LENGTH * (num_tokens >= row_limit).int())
    finish_reason.copy_(torch.where(live, reason, finish_reason))
    is_live.copy_(live & (reason == NOT_FINISHED))
    torch.maximum(bad_row, out_bad_row, out=bad_row)


def accept_matching_host_(
    *,
    chosen: np.ndarray,
    bad: np.ndarray,
    row_limit: np.ndarray,
    stop_ids: np.ndarray,
    tokens: np.ndarray,
    num_tokens: np.ndarray,
    num_draft: np.ndarray,
    num_drafted: np.ndarray,
    is_live: np.ndarray,
    finish_reason: np.ndarray,
    bad_row: np.ndarray,
    out_tokens: np.ndarray,
    out_origin: np.ndarray,
    out_num_accepted: np.ndarray,
    out_num_emitted: np.ndarray,
    out_num_drafted: np.ndarray,
    out_bad_row: np.ndarray,
) -> None:
    """Do what `accept_matching_` does on NumPy views, one row after another."""
    by_row = (row_limit, num_tokens, num_draft, num_drafted, is_live, finish_reason, bad_row)
    out_by_row = (out_num_accepted, out_num_emitted, out_num_drafted, out_bad_row)
    _check(chosen, bad, stop_ids, tokens, out_tokens, out_origin, by_row + out_by_row)
    width = out_tokens.shape[1]
    out_tokens.fill(NO_TOKEN)
    out_origin.fill(-1)
    out_num_accepted[:] = out_num_emitted[:] = out_num_drafted[:] = out_bad_row[:] = 0
    for row in is_live.nonzero()[0].tolist():
        choice = chosen[row * width : (row + 1) * width].tolist()
        n, limit, drafts = int(num_tokens[row]), int(row_limit[row]), int(min(num_draft[row], num_drafted[row]))
        drafted = tokens[row, n : n + drafts].tolist()
        kept = next((lane for lane in range(drafts) if drafted[lane] != choice[lane]), drafts)
        stops = {stop for stop in stop_ids[row].tolist() if stop >= 0}
        end = next((lane + (choice[lane] in stops) for lane in range(kept + 1) if choice[lane] < 0 or choice[lane] in stops), width)
        emitted = max(min(kept + 1, end, limit - n), 0)
        tokens[row, n : n + drafts] = NO_TOKEN
        tokens[row, n : n + emitted] = out_tokens[row, :emitted] = choice[:emitted]
        out_origin[row, :emitted] = ACCEPTED
        if emitted == kept + 1:
            out_origin[row, kept] = RECOVERED if kept < drafts else BONUS
        out_num_accepted[row], out_num_emitted[row], out_num_drafted[row] = min(kept, emitted), emitted, drafts
        if any(bad[row * width : row * width + emitted].tolist()):
            bad_row[row] = out_bad_row[row] = 1
        num_tokens[row] = n + emitted
        stopped = emitted > 0 and choice[emitted - 1] in stops
        if stopped or n + emitted >= limit:
            is_live[row], finish_reason[row] = 0, STOPPED if stopped else AT_LENGTH
    num_draft.fill(0)
    num_drafted.fill(0)


accept_matching_ = Op(
    "accept_matching",
    writes=(
        "tokens",
        "num_tokens",
        "num_draft",
        "num_drafted",
        "is_live",
        "finish_reason",
        "bad_row",
        "out_tokens",
        "out_origin",
        "out_num_accepted",
        "out_num_emitted",
        "out_num_drafted",
        "out_bad_row",
    ),
    triton=_launch_accept_matching,
    reference=accept_matching_reference_,
    strided=("tokens",),
    host=accept_matching_host_,
)
"""Verify a round and commit it. R rows, W = K + 1 places, S stop ids, n = committed length.

Place j of row r holds the target's choice after the newest token and j drafts. With d = min(num_draft, num_drafted) drafts,
the longest prefix of drafts that equals the choices is kept and one more choice is emitted (recovered after a rejection,
bonus after none). The run is cut after the first stop id, before the first choice of -1 and at `row_limit`, before anything
is counted; then num_tokens grows by what is left, drafts are cleared and rows that stopped are no longer live.

Args:
    chosen: [R * W] int32, the target's choices, -1 where there is none.
    bad: [R * W] int32, 1 for choices from logits that were not finite.
    row_limit: [R] int32, committed length at which the row ends.
    stop_ids: [R, S] int32, -1 for unused.
    tokens: [R, L] int32, in place: emitted tokens behind the committed ones, rejected drafts become -1.
    num_tokens, num_draft, num_drafted, is_live, finish_reason, bad_row: [R] int32, in place.
    out_tokens, out_origin: [R, W] int32, written, -1 in unused places.
    out_num_accepted, out_num_emitted, out_num_drafted, out_bad_row: [R] int32, written; drafted counts the drafts judged, the
        others are after trimming.

Raises:
    ArgumentError: shapes do not fit. Nothing was written.
"""
