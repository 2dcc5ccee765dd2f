"""Suffix decoding: what followed the newest tokens of a row, how often, and which of these ways on is the best draft?

Oliaro et al. 2024, "SuffixDecoding: extreme speculative decoding for emerging AI applications", arXiv 2411.04975.
"""

from collections import Counter
from collections.abc import Iterator
from fractions import Fraction
from typing import Any

import numpy as np
import torch

from funcspec.constants import NO_TOKEN
from funcspec.errors import refuse
from funcspec.kernels._checks import check_rows
from funcspec.kernels._suffix_search import followers, locate, most_frequent
from funcspec.kernels._triton import jit, tl
from funcspec.kernels.op import Op, next_power_of_2

TILE = 2048
"""Most places that a program looks at together."""

BINS = 512
"""Bins in which a program counts tokens before it looks at any of them: what a bin holds bounds what its tokens have."""

MANY = 256
"""Tokens that the host form counts by sorting, from where that is quicker than a dictionary."""

WALK = 4
"""Numbers that a walk leaves behind: sum of the counts on its way, occurrences it began with, drafts, a place where it can be read."""

Array = torch.Tensor | np.ndarray

# ---------------------------------------------------------------- Triton


@jit
def suffix_walk_kernel(
    tokens_ptr,  # [R, L] int32
    num_tokens_ptr,  # [R] int32
    corpus_ptr,  # [N, M] int32 or anything
    tokens_stride,
    corpus_stride,
    length,
    width,
    row_places,
    row_limit_ptr,  # [R] int32
    is_live_ptr,  # [R] int32
    scratch_ptr,  # [R, 2, SIZES, WALK] int32, written
    first_other,
    all_places,
    numerator,
    denominator,
    BUDGETS: tl.constexpr,
    MAX_DRAFT: tl.constexpr,
    TILE: tl.constexpr,
    BINS: tl.constexpr,
    WALK: tl.constexpr,
):
    row, size, source = tl.program_id(0), tl.program_id(1) + 1, tl.program_id(2)
    n = tl.where(tl.load(is_live_ptr + row) != 0, tl.load(num_tokens_ptr + row), 0)
    budget = tl.full((), 0, tl.int32)
    for index in tl.static_range(len(BUDGETS)):
        budget = tl.where(size == index + 1, BUDGETS[index], budget)
    budget = tl.minimum(tl.minimum(budget, MAX_DRAFT), tl.load(row_limit_ptr + row) - n - 1)
    first = tl.where(source == 0, row * length, first_other)
    end = tl.where(source == 0, row * length + n, all_places)
    end = tl.where((budget > 0) & (size <= n), end, first)
    newest = tokens_ptr + row.to(tl.int64) * tokens_stride + n - 1
    space = (tokens_ptr, num_tokens_ptr, corpus_ptr, tokens_stride, corpus_stride, length, width, row_places)
    query = (tl.where(source == 0, -2, row), newest, size, end)

    occurrences = tl.full((), 0, tl.int32)
    for start in range(first, end, TILE):
        found, _ = followers(start + tl.arange(0, TILE), space, query, newest, 0)
        occurrences += tl.sum(found, axis=0)
    # A product of ratios of counts is the last count by the first: a draft is likely enough if its count is.
    needed = tl.maximum((occurrences.to(tl.int64) * numerator + denominator - 1) // denominator, 1).to(tl.int32)
    score = tl.full((), 0, tl.int32)
    drafted = tl.full((), 0, tl.int32)
    witness = tl.full((), 0, tl.int32)
    going = tl.where(occurrences > tl.where(source == 0, 1, 0), budget, 0)  # nothing stands behind a row's end
    while drafted < going:
        at, _, _ = locate(witness, space)
        count, reached = most_frequent(first, needed, space, query, at, drafted, TILE, BINS)
        goes_on = reached >= 0
        score += tl.where(goes_on, count, 0)
        drafted += goes_on.to(tl.int32)
        witness = tl.where(goes_on, reached, witness)
        going = tl.where(goes_on, going, 0)
    out = scratch_ptr + ((row.to(tl.int64) * 2 + source) * len(BUDGETS) + size - 1) * WALK
    tl.store(out, score)
    tl.store(out + 1, occurrences)
    tl.store(out + 2, drafted)
    tl.store(out + 3, witness)


@jit
def suffix_choose_kernel(
    tokens_ptr,  # [R, L] int32
    num_tokens_ptr,  # [R] int32
    corpus_ptr,  # [N, M] int32 or anything
    tokens_stride,
    corpus_stride,
    length,
    width,
    row_places,
    scratch_ptr,  # [R, 2, SIZES, WALK] int32
    out_proposals_ptr,  # [R, K] int32, written
    out_counts_ptr,  # [R] int32, written
    num_sources,
    SIZES: tl.constexpr,
    MAX_DRAFT: tl.constexpr,
    LANES: tl.constexpr,
    WALK: tl.constexpr,
):
    row = tl.program_id(0)
    best = tl.full((), 0, tl.int64)
    of = tl.full((), 1, tl.int64)
    count = tl.full((), 0, tl.int32)
    witness = tl.full((), 0, tl.int32)
    for number in range(0, num_sources * SIZES):
        source = number // SIZES
        walk = scratch_ptr + ((row.to(tl.int64) * 2 + source) * SIZES + SIZES - 1 - number % SIZES) * WALK  # longest first
        score = tl.load(walk).to(tl.int64)
        occurrences = tl.load(walk + 1).to(tl.int64)
        better = score * of > best * occurrences
        count = tl.where(better, tl.load(walk + 2), count)
        witness = tl.where(better, tl.load(walk + 3), witness)
        of = tl.where(better, occurrences, of)
        best = tl.where(better, score, best)
    space = (tokens_ptr, num_tokens_ptr, corpus_ptr, tokens_stride, corpus_stride, length, width, row_places)
    at, _, _ = locate(witness, space)
    draft = tl.arange(0, LANES)
    proposal = tl.load(at + 1 + draft, mask=draft < count, other=-1)
    tl.store(out_proposals_ptr + row.to(tl.int64) * MAX_DRAFT + draft, proposal, mask=draft < MAX_DRAFT)
    tl.store(out_counts_ptr + row, count)


# ---------------------------------------------------------------- launcher and reference


def _check(
    tokens: Array,
    by_row: tuple[Array, ...],
    corpus: Array | None,
    budgets: tuple[int, ...],
    min_probability: Fraction,
    proposals: Array,
    scratch: Array,
) -> None:
    rows, length = tokens.shape
    check_rows(rows, ("num_tokens", "row_limit", "is_live", "out_counts"), by_row)
    if proposals.ndim != 2 or proposals.shape[0] != rows:
        refuse("out_proposals", f"[{rows}, K]", tuple(proposals.shape), "allocate a place for every row and draft")
    if corpus is not None and (corpus.ndim != 2 or 0 in corpus.shape):
        refuse("corpus", "None or [N, M], both at least 1", tuple(corpus.shape), "leave it out if there is no text")
    if not budgets or min(budgets) < 0:
        refuse("budgets", "a number of drafts for each size of match, from 1 on", budgets, "pass at least one, none below 0")
    if not 0 <= min_probability <= 1 or min_probability.denominator > 10**6:
        refuse("min_probability", "a fraction from 0 to 1 with a denominator of at most a million", min_probability, "round it")
    if scratch.shape != (rows, 2, len(budgets), WALK):
        refuse("scratch", f"({rows}, 2, {len(budgets)}, {WALK})", tuple(scratch.shape), "allocate it with this shape")
    places = rows * length + (corpus.shape[0] * corpus.shape[1] if corpus is not None else 0)
    if places * max(*budgets, 1) >= 2**31:  # sums of counts and places are int32
        most = f"fewer than 2^31 places times drafts (here {places} times {max(budgets)})"
        refuse("corpus", most, None if corpus is None else tuple(corpus.shape), "keep fewer outputs, or draft fewer tokens")


def _launch_suffix_lookup(
    *,
    tokens: torch.Tensor,
    num_tokens: torch.Tensor,
    row_limit: torch.Tensor,
    is_live: torch.Tensor,
    corpus: torch.Tensor | None,
    shared: bool,
    budgets: tuple[int, ...],
    min_probability: Fraction,
    out_proposals: torch.Tensor,
    out_counts: torch.Tensor,
    scratch: torch.Tensor,
) -> None:
    _check(tokens, (num_tokens, row_limit, is_live, out_counts), corpus, budgets, min_probability, out_proposals, scratch)
    (rows, length), most = tokens.shape, out_proposals.shape[1]
    text, (lines, width) = (tokens, (0, 1)) if corpus is None else (corpus, corpus.shape)
    space: tuple[Any, ...] = (tokens, num_tokens, text, tokens.stride(0), text.stride(0), length, width, rows * length)
    tile, sources = min(next_power_of_2(length), TILE), 2 if shared or lines else 1
    suffix_walk_kernel[(rows, len(budgets), sources)](
        *space,
        row_limit,
        is_live,
        scratch,
        0 if shared else rows * length,
        rows * length + lines * width,
        min_probability.numerator,
        min_probability.denominator,
        BUDGETS=budgets,
        MAX_DRAFT=most,
        TILE=tile,
        BINS=BINS,
        WALK=WALK,
        num_warps=max(min(tile // 256, 8), 1),
    )
    suffix_choose_kernel[(rows,)](
        *space,
        scratch,
        out_proposals,
        out_counts,
        sources,
        SIZES=len(budgets),
        MAX_DRAFT=most,
        LANES=next_power_of_2(most),
        WALK=WALK,
        num_warps=1,
    )


def suffix_lookup_reference_(
    *,
    tokens: torch.Tensor,
    num_tokens: torch.Tensor,
    row_limit: torch.Tensor,
    is_live: torch.Tensor,
    corpus: torch.Tensor | None,
    shared: bool,
    budgets: tuple[int, ...],
    min_probability: Fraction,
    out_proposals: torch.Tensor,
    out_counts: torch.Tensor,
    scratch: torch.Tensor,
) -> None:
    """Specify `suffix_lookup_` in plain torch."""
    _check(tokens, (num_tokens, row_limit, is_live, out_counts), corpus, budgets, min_probability, out_proposals, scratch)
    out_proposals.fill_(NO_TOKEN)
    out_counts.zero_()
    part = tokens.new_full((1,), NO_TOKEN)
    counts, limits = num_tokens.tolist(), row_limit.tolist()
    texts = [torch.cat([row[:count], part]) for row, count in zip(tokens, counts, strict=True)]
    outputs = [torch.cat([line, part]) for line in corpus] if corpus is not None else []
    for row, live in enumerate(is_live.tolist()):
        n, best, drafts = counts[row] if live else 0, Fraction(0), texts[row][:0]
        others = [text for number, text in enumerate(texts) if number != row] if shared else []
        for text in (texts[row], torch.cat([part, *others, *outputs])):
            for size in range(min(len(budgets), n), 0, -1):
                budget = min(budgets[size - 1], out_proposals.shape[1], limits[row] - n - 1)
                score, found = _walk(text, texts[row][n - size : n], budget, min_probability)
                if score > best:
                    best, drafts = score, found
        out_proposals[row, : len(drafts)] = drafts
        out_counts[row] = len(drafts)


def _walk(text: torch.Tensor, suffix: torch.Tensor, budget: int, min_probability: Fraction) -> tuple[Fraction, torch.Tensor]:
    """Score and draft behind a suffix, by what followed it in a text, in which -1 parts what does not belong together."""
    size, taken, total = len(suffix), [], 0
    behind = torch.nonzero((text.unfold(0, size, 1) == suffix).all(1))[:, 0] + size if len(text) > size else text[:0].long()
    occurrences = len(behind)
    while len(taken) < budget and occurrences > 0:
        following = text[behind]
        ids, counts = following[following >= 0].unique(return_counts=True)
        if len(ids) == 0 or int(counts.max()) < min_probability * occurrences:
            break
        taken.append(int(ids[counts.argmax()]))  # ids ascend and the first maximum counts
        total += int(counts.max())
        behind = behind[following == taken[-1]] + 1
    return Fraction(total, max(occurrences, 1)), text.new_tensor(taken)


def suffix_lookup_host_(
    *,
    tokens: np.ndarray,
    num_tokens: np.ndarray,
    row_limit: np.ndarray,
    is_live: np.ndarray,
    corpus: np.ndarray | None,
    shared: bool,
    budgets: tuple[int, ...],
    min_probability: Fraction,
    out_proposals: np.ndarray,
    out_counts: np.ndarray,
    scratch: np.ndarray,
) -> None:
    """Do what `suffix_lookup_` does on NumPy views, one row after another."""
    _check(tokens, (num_tokens, row_limit, is_live, out_counts), corpus, budgets, min_probability, out_proposals, scratch)
    out_proposals.fill(NO_TOKEN)
    out_counts.fill(0)
    part = np.array([NO_TOKEN], dtype=tokens.dtype)
    texts = [np.append(row[:count], part) for row, count in zip(tokens, num_tokens.tolist(), strict=True)]
    outputs = part if corpus is None else _end_to_end(corpus)
    for row, (live, limit) in enumerate(zip(is_live.tolist(), row_limit.tolist(), strict=True)):
        newest = texts[row][:-1]
        most = min(out_proposals.shape[1], limit - len(newest) - 1)
        if not live or most <= 0 or len(newest) == 0:
            continue
        others = [text for number, text in enumerate(texts) if number != row] if shared else []
        best, of, drafts = 0, 1, []
        for text in (texts[row], np.concatenate([*others, outputs]) if others else outputs):
            for behind, budget in reversed(list(_occurrences(text, newest, budgets))):
                total, found = _walk_host(text, behind, min(budget, most), min_probability)
                if total * of > best * len(behind):
                    best, of, drafts = total, len(behind), found
        out_proposals[row, : len(drafts)] = drafts
        out_counts[row] = len(drafts)


def _end_to_end(corpus: np.ndarray) -> np.ndarray:
    """All lines one behind the other, parted by -1: a view, if no line is full."""
    if corpus.shape[1] and (corpus[:, -1] == NO_TOKEN).all():
        return corpus.reshape(-1)
    return np.pad(corpus, ((0, 0), (0, 1)), constant_values=NO_TOKEN).ravel()


def _occurrences(text: np.ndarray, newest: np.ndarray, budgets: tuple[int, ...]) -> Iterator[tuple[np.ndarray, int]]:
    """The places behind the occurrences of the newest 1, 2, ... tokens; sizes with the same places together, with their largest budget."""
    behind, most = np.flatnonzero(text == newest[-1]) + 1, 0
    for size, budget in enumerate(budgets, 1):
        if len(behind) == 0:
            return
        most = max(most, budget)
        longer = behind[behind > size] if size < len(newest) else behind[:0]
        longer = longer[text[longer - size - 1] == newest[-size - 1]] if len(longer) else longer
        if len(longer) < len(behind) or size == len(budgets):
            yield behind, most
            behind, most = longer, 0


def _walk_host(text: np.ndarray, behind: np.ndarray, budget: int, min_probability: Fraction) -> tuple[int, list[int]]:
    """Sum of the counts on the way, and the draft."""
    needed, total, drafts = len(behind) * min_probability.numerator, 0, []
    while len(drafts) < budget:
        following = text[behind]
        token, most = _commonest(following)
        if most == 0 or most * min_probability.denominator < needed:
            break
        drafts.append(token)
        total += most
        behind = behind[following == drafts[-1]] + 1
    return total, drafts


def _commonest(following: np.ndarray) -> tuple[int, int]:
    """The most frequent token, of equally frequent ones the lowest id, and how often it is there; 0 times if there is none."""
    if len(following) > MANY:
        ids, counts = np.unique(following[following >= 0], return_counts=True)
        return (int(ids[counts.argmax()]), int(counts.max())) if len(ids) else (NO_TOKEN, 0)
    counter = Counter(following.tolist())
    counter.pop(NO_TOKEN, None)
    most = max(counter.values(), default=0)
    return min((token for token, count in counter.items() if count == most), default=NO_TOKEN), most


suffix_lookup_ = Op(
    "suffix_lookup",
    writes=("out_proposals", "out_counts", "scratch"),
    triton=_launch_suffix_lookup,
    reference=suffix_lookup_reference_,
    strided=("tokens", "corpus"),
    host=suffix_lookup_host_,
)
"""Propose what most often followed a row's newest tokens, in the row itself and in other text.

For m = 1, 2, ... the newest m tokens are looked up in two collections: the row's own committed tokens; and the corpus with, if `shared`,
the committed tokens of all other rows. A draft grows behind the m tokens by the token that stood behind them and the draft so far most
often, of equally frequent ones the lowest id. Its probability is how often the m tokens and the draft stand in the collection, by how
often the m tokens do (in the row itself its end counts, too): the product of each count by the one before. It ends after budgets[m - 1],
K or row_limit - n - 1 tokens, where nothing followed, and before a token that makes it less likely than `min_probability`. The sum of the
probabilities of all its beginnings is its score. The highest score wins; of equal ones the row's own, then the longest m. All of this is
compared in whole numbers, so that no rounding decides.

Args:
    tokens: [R, L] int32, committed tokens; what lies past the committed length is not looked at.
    num_tokens: [R] int32, committed length n.
    row_limit: [R] int32, committed length at which the row ends.
    is_live: [R] int32; a row with 0 is proposed nothing, but others may look at it.
    corpus: [N, M] int32, texts that may be of any length, -1 where there is no token; or None.
    shared: whether rows look at each other.
    budgets: most drafts behind a match of 1, 2, ... tokens; longer matches are not looked for.
    min_probability: a fraction from 0 to 1, with a denominator of at most a million.
    out_proposals: [R, K] int32, written: proposed tokens, -1 in other places.
    out_counts: [R] int32, written: how many there are, 0 to K.
    scratch: [R, 2, len(budgets), WALK] int32; contents undefined before and after.

Raises:
    ArgumentError: shapes or sizes do not fit, or there is too much text for int32. Nothing was written.
"""
