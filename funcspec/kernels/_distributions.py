"""Distributions of rows of logits as float64 probabilities, on the device and in torch, for verification with coins from outside.

`funcspec.exact` has those that rounds use.
"""

import torch

from funcspec.kernels._triton import jit, tl


@jit
def scores_of(row_ptr, token, num_columns, heat):
    """float64 scores of logits; NaN, +inf and what lies outside of the row are -inf."""
    raw = tl.load(row_ptr + token, mask=(token >= 0) & (token < num_columns), other=float("-inf")).to(tl.float32)
    raw = tl.where((raw != raw) | (raw == float("inf")), float("-inf"), raw)
    return tl.div_rn(raw, heat).to(tl.float64)


@jit
def total_of(row_ptr, num_columns, heat, BLOCK: tl.constexpr):
    """Largest score of a row, the sum of exp(score - largest), and the lowest token with that score."""
    best = tl.full((), -1.0e300, tl.float64)
    total = tl.full((), 0.0, tl.float64)
    winner = tl.full((), 0, tl.int64)
    start = tl.full((), 0, tl.int64)
    while start < num_columns:
        token = start + tl.arange(0, BLOCK)
        score = scores_of(row_ptr, token, num_columns, heat)
        top = tl.max(score, axis=0)
        lowest = tl.min(tl.where(score == top, token, num_columns), axis=0)
        winner = tl.where(top > best, lowest, winner)
        higher = tl.maximum(best, top)
        total = total * tl.exp(best - higher) + tl.sum(tl.exp(score - higher), axis=0)
        best = higher
        start += BLOCK
    return best, total, winner


@jit
def probabilities_of(row_ptr, token, num_columns, heat, best, total):
    """Probabilities of tokens under a row with this `total_of`; 0 in rows without one."""
    return tl.exp(scores_of(row_ptr, token, num_columns, heat) - best) / tl.where(total > 0, total, 1.0)


@jit
def drawn_from(row_ptr, draft, num_columns, heat, BLOCK: tl.constexpr):
    """`total_of` of what a draft was drawn from, its probability there, and whether it counts as a point: a row that excludes it."""
    best, total, _winner = total_of(row_ptr, num_columns, heat, BLOCK)
    q = probabilities_of(row_ptr, draft, num_columns, heat, best, total)
    return best, total, tl.where(q > 0, q, 1.0), q == 0


@jit
def excess_of(target_ptr, drawn_ptr, draft, weight, heat, vocab_size, draft_vocab_size, HAS_DRAFT: tl.constexpr, BLOCK: tl.constexpr):
    """Sum of max(weight * p - q, 0) at a place, q of a point being all on the draft."""
    best, total, _winner = total_of(target_ptr, vocab_size, 1.0, BLOCK)
    p = probabilities_of(target_ptr, draft, vocab_size, 1.0, best, total)
    excess = weight * (1.0 - p)
    if HAS_DRAFT:
        drawn_best, drawn_total, _q, is_point = drawn_from(drawn_ptr, draft, draft_vocab_size, heat, BLOCK)
        if is_point == 0:
            excess = p * 0.0
            start = tl.full((), 0, tl.int64)
            while start < vocab_size:
                token = start + tl.arange(0, BLOCK)
                p_tile = probabilities_of(target_ptr, token, vocab_size, 1.0, best, total)
                q_tile = probabilities_of(drawn_ptr, token, draft_vocab_size, heat, drawn_best, drawn_total)
                excess += tl.sum(tl.maximum(weight * p_tile - q_tile, 0.0), axis=0)
                start += BLOCK
    return excess


def sane_scores(row: torch.Tensor, heat: float = 1.0) -> torch.Tensor:
    """float64 scores of a row of logits, NaN and +inf made -inf."""
    plain = row.float()
    return (torch.where(plain.isnan() | (plain == torch.inf), -torch.inf, plain) / heat).double()


def best_of(scores: torch.Tensor) -> int:
    """Lowest token with the highest score, -1 if every score is -inf."""
    top = scores.max()
    return int((scores == top).nonzero()[0]) if top > -torch.inf else -1
