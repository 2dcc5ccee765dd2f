"""Prompt lookup: where did the newest tokens of a row stand before, and what followed them there?

Saxena 2023, "Prompt lookup decoding", https://github.com/apoorvumang/prompt-lookup-decoding; Yang et al. 2023, "Inference with
reference", arXiv 2304.04487.
"""

import numpy as np
import torch

from funcspec.constants import NO_TOKEN
from funcspec.errors import refuse
from funcspec.kernels._checks import check_matrix, check_rows
from funcspec.kernels._triton import jit, tl
from funcspec.kernels.op import Op, next_power_of_2

TILE = 2048
"""Most places that a program looks at together."""

Array = torch.Tensor | np.ndarray


@jit
def ngram_lookup_kernel(
    tokens_ptr,  # [R, L] int32
    num_tokens_ptr,  # [R] int32
    is_live_ptr,  # [R] int32
    out_proposals_ptr,  # [R, K] int32, written
    out_counts_ptr,  # [R] int32, written
    tokens_stride,
    window,
    min_ngram,
    MAX_NGRAM: tl.constexpr,
    LATEST: tl.constexpr,
    MAX_DRAFT: tl.constexpr,
    LANES: tl.constexpr,
    TILE: tl.constexpr,
):
    row = tl.program_id(0)
    n = tl.where(tl.load(is_live_ptr + row) != 0, tl.load(num_tokens_ptr + row), 0)
    start = tl.maximum(n - window, 0)
    text = tokens_ptr + row.to(tl.int64) * tokens_stride
    lane = tl.arange(0, TILE)
    # Each lane keeps the best of the places it saw: how many tokens match before it, and the place, which is what followed them.
    longest = tl.zeros([TILE], dtype=tl.int32)
    follower = tl.zeros([TILE], dtype=tl.int32)
    first = start + 1
    while first < n:
        place = first + lane
        same = place < n
        length = tl.zeros([TILE], dtype=tl.int32)
        for back in tl.static_range(1, MAX_NGRAM + 1):
            inside = (place < n) & (place - back >= start)
            suffix = tl.load(text + n - back, mask=n - back >= start, other=-1)
            same = same & inside & (tl.load(text + place - back, mask=inside, other=-1) == suffix)
            length += same.to(tl.int32)
        better = length >= longest if LATEST else length > longest
        longest = tl.where(better, length, longest)
        follower = tl.where(better, place, follower)
        first += TILE
    best = tl.max(longest, axis=0)
    at = tl.max(tl.where(longest == best, follower, 0), axis=0) if LATEST else tl.min(tl.where(longest == best, follower, n), axis=0)
    count = tl.where(best >= min_ngram, tl.minimum(n - at, MAX_DRAFT), 0)
    draft = tl.arange(0, LANES)
    proposal = tl.load(text + at + draft, mask=draft < count, other=-1)
    tl.store(out_proposals_ptr + row.to(tl.int64) * MAX_DRAFT + draft, proposal, mask=draft < MAX_DRAFT)
    tl.store(out_counts_ptr + row, count)


def _check(
    tokens: Array, num_tokens: Array, is_live: Array, window: int | None, max_ngram: int, min_ngram: int, proposals: Array, counts: Array
) -> None:
    rows = tokens.shape[0]
    check_rows(rows, ("num_tokens", "is_live", "out_counts"), (num_tokens, is_live, counts))
    if proposals.ndim != 2 or proposals.shape[0] != rows:
        refuse("out_proposals", f"[{rows}, K]", tuple(proposals.shape), "allocate a place for every row and draft")
    check_matrix("tokens", tokens, rows)
    check_matrix("out_proposals", proposals, rows)
    if not 1 <= min_ngram <= max_ngram:
        refuse("min_ngram", f"from 1 to max_ngram = {max_ngram}", min_ngram, "match at least one token")
    if window is not None and window < 1:
        refuse("window", "None or at least 1", window, "leave it out to search all tokens")


def _launch_ngram_lookup(
    *,
    tokens: torch.Tensor,
    num_tokens: torch.Tensor,
    is_live: torch.Tensor,
    max_ngram: int,
    min_ngram: int,
    window: int | None,
    latest: bool,
    out_proposals: torch.Tensor,
    out_counts: torch.Tensor,
) -> None:
    _check(tokens, num_tokens, is_live, window, max_ngram, min_ngram, out_proposals, out_counts)
    rows, length = tokens.shape
    tile = min(next_power_of_2(length), TILE)
    ngram_lookup_kernel[(rows,)](
        tokens,
        num_tokens,
        is_live,
        out_proposals,
        out_counts,
        tokens.stride(0),
        length if window is None else min(window, length),
        min_ngram,
        MAX_NGRAM=max_ngram,
        LATEST=latest,
        MAX_DRAFT=out_proposals.shape[1],
        LANES=next_power_of_2(out_proposals.shape[1]),
        TILE=tile,
        num_warps=max(min(tile // 256, 8), 1),
    )


def ngram_lookup_reference_(
    *,
    tokens: torch.Tensor,
    num_tokens: torch.Tensor,
    is_live: torch.Tensor,
    max_ngram: int,
    min_ngram: int,
    window: int | None,
    latest: bool,
    out_proposals: torch.Tensor,
    out_counts: torch.Tensor,
) -> None:
    """Specify `ngram_lookup_` in plain torch."""
    _check(tokens, num_tokens, is_live, window, max_ngram, min_ngram, out_proposals, out_counts)
    length = tokens.shape[1]
    n = (num_tokens * (is_live != 0))[:, None]
    start = (n - (length if window is None else min(window, length))).clamp_(min=0)
    place = torch.arange(length, device=tokens.device, dtype=torch.int32)
    matched = torch.zeros_like(tokens)  # how many tokens before each place equal the newest tokens, as far as max_ngram
    same = place < n
    for back in range(1, max_ngram + 1):
        suffix = tokens.gather(1, (n - back).clamp_(min=0).long())
        same = same & (place - back >= start) & (tokens.roll(back, 1) == suffix)
        matched += same
    longest = matched.amax(1, keepdim=True)
    best = matched == longest
    follower = torch.where(best, place, 0).amax(1) if latest else torch.where(best, place, length).amin(1)
    count = (n[:, 0] - follower).clamp_(max=out_proposals.shape[1]) * (longest[:, 0] >= min_ngram)
    lane = torch.arange(out_proposals.shape[1], device=tokens.device)
    proposal = tokens.gather(1, (follower[:, None] + lane).clamp_(max=length - 1))
    out_proposals.copy_(torch.where(lane < count[:, None], proposal, NO_TOKEN))
    out_counts.copy_(count)


def ngram_lookup_host_(
    *,
    tokens: np.ndarray,
    num_tokens: np.ndarray,
    is_live: np.ndarray,
    max_ngram: int,
    min_ngram: int,
    window: int | None,
    latest: bool,
    out_proposals: np.ndarray,
    out_counts: np.ndarray,
) -> None:
    """Do what `ngram_lookup_` does on NumPy views, one row after another."""
    _check(tokens, num_tokens, is_live, window, max_ngram, min_ngram, out_proposals, out_counts)
    most = out_proposals.shape[1]
    out_proposals.fill(NO_TOKEN)
    out_counts.fill(0)
    for row, (n, live) in enumerate(zip(num_tokens.tolist(), is_live.tolist(), strict=True)):
        if not live or n < 2:
            continue
        text = tokens[row, max(n - window, 0) if window is not None else 0 : n]
        followers = np.flatnonzero(text[:-1] == text[-1]) + 1
        length = 1
        while len(followers) and length < max_ngram:  # only places that match so far can match further
            longer = followers[followers > length]
            longer = longer[text[longer - length - 1] == text[-length - 1]] if len(longer) else longer
            if not len(longer):
                break
            followers, length = longer, length + 1
        if len(followers) and length >= min_ngram:
            proposal = text[followers[-1 if latest else 0] :][:most]
            out_proposals[row, : len(proposal)] = proposal
            out_counts[row] = len(proposal)


ngram_lookup_ = Op(
    "ngram_lookup",
    writes=("out_proposals", "out_counts"),
    triton=_launch_ngram_lookup,
    reference=ngram_lookup_reference_,
    strided=("tokens",),
    host=ngram_lookup_host_,
)
"""Propose the tokens that followed an earlier occurrence of a row's newest tokens.

Of the n committed tokens of a row the newest `window` are searched. For m from max_ngram down to min_ngram: if the newest m tokens
stand somewhere earlier, with at least one token behind them (the two may overlap), propose the tokens behind them, at most K and
none past place n. If they stand at several places the first one counts, or with `latest` the last one.

Args:
    tokens: [R, L] int32, committed tokens; what lies past the committed length is not looked at.
    num_tokens: [R] int32, committed length n.
    is_live: [R] int32; a row with 0 is not searched.
    max_ngram, min_ngram: most and fewest tokens to match.
    window: how many of the newest tokens are searched; None searches all.
    latest: take the last of several occurrences instead of the first.
    out_proposals: [R, K] int32, written: proposed tokens, -1 in other places.
    out_counts: [R] int32, written: how many there are, 0 to K.

Raises:
    ArgumentError: shapes or sizes do not fit. Nothing was written.
"""
