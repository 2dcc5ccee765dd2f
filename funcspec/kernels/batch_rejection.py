"""Verify a flat batch of drafts with random numbers from outside: for engines that bring their own, and to compare with theirs.

Greedy rows and sampled rows are two operations on one output. The rounds of this library use `accept_matching_` and `judge_drafts_`.
"""

import torch

from funcspec.errors import ArgumentTypeError, refuse
from funcspec.kernels._checks import check_flags, check_index_array, check_index_matrix
from funcspec.kernels._triton import jit, tl
from funcspec.kernels.op import Op

UNIFORM_DTYPES = (torch.float32, torch.float64)


@jit
def _span(row, cu_num_draft_tokens_ptr, num_tokens, num_places):
    """First draft of a row and how many there are, within the flat batch and the row's output."""
    begin = tl.load(cu_num_draft_tokens_ptr + row - 1, mask=row > 0, other=0).to(tl.int64)
    end = tl.minimum(tl.load(cu_num_draft_tokens_ptr + row).to(tl.int64), num_tokens)
    begin = tl.maximum(begin, 0)
    return begin, tl.minimum(tl.maximum(end - begin, 0), num_places - 1)


@jit
def rejection_greedy_sample_kernel(
    cu_num_draft_tokens_ptr,  # [R]
    draft_token_ids_ptr,  # [N]
    target_argmax_ptr,  # [N]
    bonus_token_ids_ptr,  # [R]
    is_greedy_ptr,  # [R] bool, read when HAS_MASK
    uniform_probs_ptr,  # [N], read when HAS_RATES
    conditional_rates_ptr,  # [>= W - 1] float32, read when HAS_RATES
    out_token_ids_ptr,  # [R, W], written
    out_stride,
    num_tokens,
    num_places,
    HAS_MASK: tl.constexpr,
    HAS_RATES: tl.constexpr,
):
    """One program a row."""
    row = tl.program_id(0).to(tl.int64)
    begin, count = _span(row, cu_num_draft_tokens_ptr, num_tokens, num_places)
    open_row = row >= 0
    if HAS_MASK:
        open_row = tl.load(is_greedy_ptr + row) != 0
    out_ptr = out_token_ids_ptr + row * out_stride
    place = begin * 0
    while open_row & (place < count):
        draft = tl.load(draft_token_ids_ptr + begin + place).to(tl.int64)
        token = tl.load(target_argmax_ptr + begin + place).to(tl.int64)
        kept = draft == token
        if HAS_RATES:
            rate = tl.load(conditional_rates_ptr + place).to(tl.float64)
            kept = (draft >= 0) & (tl.load(uniform_probs_ptr + begin + place).to(tl.float64) < rate)
        tl.store(out_ptr + place, tl.where(kept, draft, token))
        open_row = kept
        place += 1
    tl.store(out_ptr + count, tl.load(bonus_token_ids_ptr + row), mask=open_row)


@jit
def rejection_random_sample_kernel(
    cu_num_draft_tokens_ptr,  # [R]
    draft_token_ids_ptr,  # [N]
    draft_probs_ptr,  # [N, V] float32, read when HAS_DRAFT_PROBS
    target_probs_ptr,  # [N, V] float32
    bonus_token_ids_ptr,  # [R]
    recovered_token_ids_ptr,  # [N]
    uniform_probs_ptr,  # [N]
    is_greedy_ptr,  # [R] bool
    conditional_rates_ptr,  # [>= W - 1] float32, read when HAS_RATES
    out_token_ids_ptr,  # [R, W], written
    draft_stride,
    target_stride,
    out_stride,
    vocab_size,
    num_tokens,
    num_places,
    HAS_DRAFT_PROBS: tl.constexpr,
    HAS_RATES: tl.constexpr,
):
    """One program a row."""
    row = tl.program_id(0).to(tl.int64)
    begin, count = _span(row, cu_num_draft_tokens_ptr, num_tokens, num_places)
    open_row = tl.load(is_greedy_ptr + row) == 0
    out_ptr = out_token_ids_ptr + row * out_stride
    place = begin * 0
    while open_row & (place < count):
        at = begin + place
        draft = tl.load(draft_token_ids_ptr + at).to(tl.int64)
        exists = (draft >= 0) & (draft < vocab_size)
        coin = tl.load(uniform_probs_ptr + at).to(tl.float64)
        if HAS_RATES:
            kept = exists & (coin < tl.load(conditional_rates_ptr + place).to(tl.float64))
        else:
            p = tl.load(target_probs_ptr + at * target_stride + draft, mask=exists, other=0.0).to(tl.float64)
            q = p * 0 + 1
            if HAS_DRAFT_PROBS:
                q = tl.load(draft_probs_ptr + at * draft_stride + draft, mask=exists, other=0.0).to(tl.float64)
            kept = (p > 0) & (q > 0) & (p >= coin * q)
        recovered = tl.load(recovered_token_ids_ptr + at).to(tl.int64)
        tl.store(out_ptr + place, tl.where(kept, draft, recovered))
        open_row = kept
        place += 1
    tl.store(out_ptr + count, tl.load(bonus_token_ids_ptr + row), mask=open_row)


def _check_batch(
    cu_num_draft_tokens: torch.Tensor,
    by_token: dict[str, torch.Tensor],
    bonus_token_ids: torch.Tensor,
    is_greedy: torch.Tensor | None,
    uniform_probs: torch.Tensor | None,
    conditional_rates: torch.Tensor | None,
    out_token_ids: torch.Tensor,
) -> tuple[int, int]:
    """Check what both operations have; return R and W."""
    check_index_array("cu_num_draft_tokens", cu_num_draft_tokens, 0)
    rows, tokens = cu_num_draft_tokens.shape[0], by_token["draft_token_ids"].shape[0]
    for name, array in by_token.items():
        check_index_array(name, array, tokens)
    check_index_array("bonus_token_ids", bonus_token_ids, rows)
    if is_greedy is not None:
        check_flags("is_greedy", is_greedy, rows)
    check_index_matrix("out_token_ids", out_token_ids, rows)
    width = out_token_ids.shape[1]
    if width < 1:
        refuse("out_token_ids", "at least 1 column", width, "allocate a place for each draft and one more")
    if conditional_rates is not None:
        _check_floats("conditional_rates", conditional_rates, (torch.float32,), width - 1)
        if uniform_probs is None:
            refuse("uniform_probs", "an array, as there are rates", None, "pass a number from [0, 1) for each draft")
    if uniform_probs is not None:
        _check_floats("uniform_probs", uniform_probs, UNIFORM_DTYPES, tokens)
    return rows, width


def _check_floats(name: str, array: torch.Tensor, dtypes: tuple[torch.dtype, ...], length: int) -> None:
    if array.dtype not in dtypes:
        refuse(name, " or ".join(map(str, dtypes)), array.dtype, "convert it once, outside the loop", ArgumentTypeError)
    if array.dim() != 1 or array.shape[0] < length:
        found = f"shape {tuple(array.shape)}"
        refuse(name, f"a 1-D array of at least {length} entries", found, "pass arrays that belong to one batch")


def _check_probabilities(name: str, probabilities: torch.Tensor, tokens: int) -> None:
    if probabilities.dtype != torch.float32:
        refuse(name, "float32", probabilities.dtype, "convert it once, outside the loop", ArgumentTypeError)
    if probabilities.dim() != 2 or probabilities.shape[0] < tokens:
        refuse(name, f"at least {tokens} rows of probabilities", f"shape {tuple(probabilities.shape)}", "pass a row for each draft")


def _launch_rejection_greedy_sample(
    *,
    cu_num_draft_tokens: torch.Tensor,
    draft_token_ids: torch.Tensor,
    target_argmax: torch.Tensor,
    bonus_token_ids: torch.Tensor,
    is_greedy: torch.Tensor | None = None,
    uniform_probs: torch.Tensor | None = None,
    conditional_rates: torch.Tensor | None = None,
    out_token_ids: torch.Tensor,
) -> None:
    by_token = {"draft_token_ids": draft_token_ids, "target_argmax": target_argmax}
    rows, width = _check_batch(cu_num_draft_tokens, by_token, bonus_token_ids, is_greedy, uniform_probs, conditional_rates, out_token_ids)
    if rows == 0:
        return
    rejection_greedy_sample_kernel[(rows,)](
        cu_num_draft_tokens,
        draft_token_ids,
        target_argmax,
        bonus_token_ids,
        bonus_token_ids if is_greedy is None else is_greedy,
        bonus_token_ids if uniform_probs is None else uniform_probs,
        bonus_token_ids if conditional_rates is None else conditional_rates,
        out_token_ids,
        out_token_ids.stride(0),
        draft_token_ids.shape[0],
        width,
        HAS_MASK=is_greedy is not None,
        HAS_RATES=conditional_rates is not None,
        num_warps=1,
    )


def _spans(cu_num_draft_tokens: torch.Tensor, tokens: int, width: int) -> list[tuple[int, int]]:
    """First draft and number of drafts of each row, within the flat batch and the rows' output."""
    ends = cu_num_draft_tokens.tolist()
    begins = [max(end, 0) for end in [0, *ends]]
    return [(begin, min(max(min(end, tokens) - begin, 0), width - 1)) for begin, end in zip(begins, ends, strict=False)]


def _emit(out_row: torch.Tensor, drafts: list[int], kept: list[bool], replacements: list[int], bonus: int) -> None:
    """Write a row's drafts up to the first that is not kept, and one more token."""
    count = kept.index(False) if False in kept else len(kept)
    emitted = [*drafts[:count], replacements[count] if count < len(kept) else bonus]
    out_row[: count + 1] = torch.tensor(emitted, dtype=out_row.dtype)


def rejection_greedy_sample_reference_(
    *,
    cu_num_draft_tokens: torch.Tensor,
    draft_token_ids: torch.Tensor,
    target_argmax: torch.Tensor,
    bonus_token_ids: torch.Tensor,
    is_greedy: torch.Tensor | None = None,
    uniform_probs: torch.Tensor | None = None,
    conditional_rates: torch.Tensor | None = None,
    out_token_ids: torch.Tensor,
) -> None:
    """Specify `rejection_greedy_sample_` in plain torch, row by row."""
    by_token = {"draft_token_ids": draft_token_ids, "target_argmax": target_argmax}
    _, width = _check_batch(cu_num_draft_tokens, by_token, bonus_token_ids, is_greedy, uniform_probs, conditional_rates, out_token_ids)
    bonus = bonus_token_ids.tolist()
    for row, (begin, count) in enumerate(_spans(cu_num_draft_tokens, draft_token_ids.shape[0], width)):
        if is_greedy is not None and not is_greedy[row]:
            continue
        drafts, chosen = draft_token_ids[begin : begin + count], target_argmax[begin : begin + count]
        kept = drafts == chosen
        if conditional_rates is not None and uniform_probs is not None:
            kept = (drafts >= 0) & (uniform_probs[begin : begin + count].double() < conditional_rates[:count].double())
        _emit(out_token_ids[row], drafts.tolist(), kept.tolist(), chosen.tolist(), bonus[row])


rejection_greedy_sample_ = Op(
    "rejection_greedy_sample",
    writes=("out_token_ids",),
    triton=_launch_rejection_greedy_sample,
    reference=rejection_greedy_sample_reference_,
    strided=("out_token_ids",),
)
"""Emit the tokens of greedy rows: drafts while they equal the target's arg-max, then that arg-max, or the bonus token after all.

R rows, N drafts in all, W places a row. Index arrays are int32 or int64. With rates, place j keeps its draft where its uniform number is
below rate j, whatever the target says: for benchmarks at a given acceptance. A negative draft is never kept. Other rows, and places
behind a row's last token, are left alone: fill the output with -1 before. Drafts beyond W - 1 are not looked at.

Args:
    cu_num_draft_tokens: [R] inclusive prefix sums of the rows' numbers of drafts.
    draft_token_ids: [N] drafts, -1 for none.
    target_argmax: [N] the target's arg-max at each draft's place.
    bonus_token_ids: [R] the token behind all drafts.
    is_greedy: [R] bool, rows to work on, or None for all.
    uniform_probs: [N] float32 or float64 in [0, 1), read with rates.
    conditional_rates: [>= W - 1] float32, from `funcspec.metrics.unconditional_to_conditional_rates`, or None.
    out_token_ids: [R, W] written; rows any stride apart.

Raises:
    ArgumentError, ArgumentTypeError: arrays that do not belong together; nothing has been written.
"""


def _launch_rejection_random_sample(
    *,
    cu_num_draft_tokens: torch.Tensor,
    draft_token_ids: torch.Tensor,
    draft_probs: torch.Tensor | None = None,
    target_probs: torch.Tensor,
    bonus_token_ids: torch.Tensor,
    recovered_token_ids: torch.Tensor,
    uniform_probs: torch.Tensor,
    is_greedy: torch.Tensor,
    conditional_rates: torch.Tensor | None = None,
    out_token_ids: torch.Tensor,
) -> None:
    by_token = {"draft_token_ids": draft_token_ids, "recovered_token_ids": recovered_token_ids}
    rows, width = _check_batch(cu_num_draft_tokens, by_token, bonus_token_ids, is_greedy, uniform_probs, conditional_rates, out_token_ids)
    vocab_size = _check_both(draft_probs, target_probs, draft_token_ids.shape[0])
    if rows == 0:
        return
    rejection_random_sample_kernel[(rows,)](
        cu_num_draft_tokens,
        draft_token_ids,
        target_probs if draft_probs is None else draft_probs,
        target_probs,
        bonus_token_ids,
        recovered_token_ids,
        uniform_probs,
        is_greedy,
        target_probs if conditional_rates is None else conditional_rates,
        out_token_ids,
        0 if draft_probs is None else draft_probs.stride(0),
        target_probs.stride(0),
        out_token_ids.stride(0),
        vocab_size,
        draft_token_ids.shape[0],
        width,
        HAS_DRAFT_PROBS=draft_probs is not None,
        HAS_RATES=conditional_rates is not None,
        num_warps=1,
    )


def _check_both(draft_probs: torch.Tensor | None, target_probs: torch.Tensor, tokens: int) -> int:
    """Check probabilities of one vocabulary; return its size."""
    _check_probabilities("target_probs", target_probs, tokens)
    if draft_probs is not None:
        _check_probabilities("draft_probs", draft_probs, tokens)
        if draft_probs.shape[1] != target_probs.shape[1]:
            expected = f"{target_probs.shape[1]} columns, as target_probs has"
            refuse("draft_probs", expected, draft_probs.shape[1], "pad the narrower one with zeros")
    return target_probs.shape[1]


def rejection_random_sample_reference_(
    *,
    cu_num_draft_tokens: torch.Tensor,
    draft_token_ids: torch.Tensor,
    draft_probs: torch.Tensor | None = None,
    target_probs: torch.Tensor,
    bonus_token_ids: torch.Tensor,
    recovered_token_ids: torch.Tensor,
    uniform_probs: torch.Tensor,
    is_greedy: torch.Tensor,
    conditional_rates: torch.Tensor | None = None,
    out_token_ids: torch.Tensor,
) -> None:
    """Specify `rejection_random_sample_` in plain torch, row by row."""
    by_token = {"draft_token_ids": draft_token_ids, "recovered_token_ids": recovered_token_ids}
    _, width = _check_batch(cu_num_draft_tokens, by_token, bonus_token_ids, is_greedy, uniform_probs, conditional_rates, out_token_ids)
    vocab_size = _check_both(draft_probs, target_probs, draft_token_ids.shape[0])
    bonus = bonus_token_ids.tolist()
    for row, (begin, count) in enumerate(_spans(cu_num_draft_tokens, draft_token_ids.shape[0], width)):
        if is_greedy[row]:
            continue
        at = torch.arange(begin, begin + count, device=target_probs.device)
        drafts, coins = draft_token_ids[at].long(), uniform_probs[at].double()
        exists = (drafts >= 0) & (drafts < vocab_size)
        if conditional_rates is not None:
            kept = exists & (coins < conditional_rates[:count].double())
        else:
            column = torch.where(exists, drafts, 0)
            p = target_probs[at, column].double()
            q = torch.ones_like(p) if draft_probs is None else draft_probs[at, column].double()
            kept = exists & (p > 0) & (q > 0) & (p >= coins * q)
        _emit(out_token_ids[row], drafts.tolist(), kept.tolist(), recovered_token_ids[at].tolist(), bonus[row])


rejection_random_sample_ = Op(
    "rejection_random_sample",
    writes=("out_token_ids",),
    triton=_launch_rejection_random_sample,
    reference=rejection_random_sample_reference_,
    strided=("draft_probs", "target_probs", "out_token_ids"),
)
"""Emit the tokens of sampled rows: drafts while p >= u q, then a recovered token, or the bonus token after all.

R rows, N drafts in all, W places a row, V tokens. Index arrays are int32 or int64. p and q are the target's and the drafter's
probabilities of a draft and u its uniform number; the comparison is in float64. A draft with p = 0 or q = 0, or outside of the
vocabulary, is never kept: not even with u = 0, where the reference's comparison would let an impossible token through. With rates,
place j keeps its draft where u is below rate j. Other rows, and places behind a row's last token, are left alone: fill the output with
-1 before. Drafts beyond W - 1 are not looked at.

Args:
    cu_num_draft_tokens: [R] inclusive prefix sums of the rows' numbers of drafts.
    draft_token_ids: [N] drafts, -1 for none.
    draft_probs: [N, V] float32 q, or None for drafts that were just proposed: then q = 1.
    target_probs: [N, V] float32 p; rows of both any stride apart.
    bonus_token_ids: [R] the token behind all drafts.
    recovered_token_ids: [N] the token to emit where a draft is rejected, from `sample_recovered_tokens_`.
    uniform_probs: [N] float32 or float64 in [0, 1).
    is_greedy: [R] bool, rows to leave alone.
    conditional_rates: [>= W - 1] float32, from `funcspec.metrics.unconditional_to_conditional_rates`, or None.
    out_token_ids: [R, W] written; rows any stride apart.

Raises:
    ArgumentError, ArgumentTypeError: arrays that do not belong together; nothing has been written.
"""
