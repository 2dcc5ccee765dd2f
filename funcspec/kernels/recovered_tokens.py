"""The token after a rejected draft, drawn with random numbers from outside: the largest of residual probability times number.

With numbers 1 / e for exponential e that is a draw from the residual. The rounds of this library use `recover_tokens_`.
"""

import torch

from funcspec.errors import ArgumentTypeError, refuse
from funcspec.kernels._checks import check_index_array
from funcspec.kernels._triton import jit, tl
from funcspec.kernels.op import Op

BLOCK = 1024


@jit
def _larger(weight, token, best, winner, vocab_size):
    """The largest weight so far and its lowest token."""
    top = tl.max(weight, axis=0)
    lowest = tl.min(tl.where(weight == top, token, vocab_size), axis=0)
    return tl.maximum(best, top), tl.where(top > best, lowest, winner)


@jit
def sample_recovered_tokens_kernel(
    cu_num_draft_tokens_ptr,  # [R]
    draft_token_ids_ptr,  # [N]
    draft_probs_ptr,  # [N, V] float32, read when HAS_DRAFT_PROBS
    target_probs_ptr,  # [N, V] float32
    inv_q_ptr,  # [R, V]
    out_token_ids_ptr,  # [N], written
    draft_stride,
    target_stride,
    inv_q_stride,
    vocab_size,
    num_tokens,
    HAS_DRAFT_PROBS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One program for each row and draft of it, as far as there are."""
    row = tl.program_id(0).to(tl.int64)
    begin = tl.load(cu_num_draft_tokens_ptr + row - 1, mask=row > 0, other=0).to(tl.int64)
    at = tl.maximum(begin, 0) + tl.program_id(1)
    if at < tl.minimum(tl.load(cu_num_draft_tokens_ptr + row).to(tl.int64), num_tokens):
        draft = tl.load(draft_token_ids_ptr + at).to(tl.int64)
        # Products are compared in float64, of which those of float32 numbers are exact.
        best = tl.full((), 0.0, tl.float64)
        second = tl.full((), 0.0, tl.float64)
        winner = tl.full((), -1, tl.int64)
        runner_up = tl.full((), -1, tl.int64)
        start = tl.full((), 0, tl.int64)
        while start < vocab_size:
            token = start + tl.arange(0, BLOCK)
            inside = token < vocab_size
            p = tl.load(target_probs_ptr + at * target_stride + token, mask=inside, other=0.0)
            number = tl.load(inv_q_ptr + row * inv_q_stride + token, mask=inside, other=0.0).to(tl.float64)
            others = tl.where(token == draft, 0.0, p).to(tl.float64) * number
            second, runner_up = _larger(others, token, second, runner_up, vocab_size)
            if HAS_DRAFT_PROBS:
                q = tl.load(draft_probs_ptr + at * draft_stride + token, mask=inside, other=0.0)
                q = tl.where(draft < 0, 0.0, q)
                residual = tl.maximum(p - q, 0.0).to(tl.float64) * number
                best, winner = _larger(residual, token, best, winner, vocab_size)
            start += BLOCK
        winner = tl.where(winner < 0, runner_up, winner)
        tl.store(out_token_ids_ptr + at, tl.where(winner < 0, tl.maximum(draft, 0), winner))


def _check_probabilities(name: str, array: torch.Tensor, dtypes: tuple[torch.dtype, ...], rows: int, columns: int) -> None:
    if array.dtype not in dtypes:
        refuse(name, " or ".join(map(str, dtypes)), array.dtype, "convert it once, outside the loop", ArgumentTypeError)
    if array.dim() != 2 or array.shape[0] < rows or array.shape[1] != columns:
        found = f"shape {tuple(array.shape)}"
        refuse(name, f"at least {rows} rows of {columns} numbers", found, "pass arrays of one batch and one vocabulary")


def _check(
    cu_num_draft_tokens: torch.Tensor,
    draft_token_ids: torch.Tensor,
    draft_probs: torch.Tensor | None,
    target_probs: torch.Tensor,
    inv_q: torch.Tensor,
    out_token_ids: torch.Tensor,
) -> tuple[int, int, int]:
    """Check everything and return R, N and V."""
    check_index_array("cu_num_draft_tokens", cu_num_draft_tokens, 0)
    check_index_array("draft_token_ids", draft_token_ids, 0)
    rows, tokens = cu_num_draft_tokens.shape[0], draft_token_ids.shape[0]
    if target_probs.dim() != 2 or target_probs.shape[1] < 1:
        refuse("target_probs", "shape [N, V] with V >= 1", f"shape {tuple(target_probs.shape)}", "pass a row for each draft")
    vocab_size = target_probs.shape[1]
    _check_probabilities("target_probs", target_probs, (torch.float32,), tokens, vocab_size)
    if draft_probs is not None:
        _check_probabilities("draft_probs", draft_probs, (torch.float32,), tokens, vocab_size)
    _check_probabilities("inv_q", inv_q, (torch.float32, torch.float64), rows, vocab_size)
    check_index_array("out_token_ids", out_token_ids, tokens)
    return rows, tokens, vocab_size


def _launch_sample_recovered_tokens(
    *,
    cu_num_draft_tokens: torch.Tensor,
    draft_token_ids: torch.Tensor,
    draft_probs: torch.Tensor | None = None,
    target_probs: torch.Tensor,
    inv_q: torch.Tensor,
    max_spec_len: int,
    out_token_ids: torch.Tensor,
) -> None:
    rows, tokens, vocab_size = _check(cu_num_draft_tokens, draft_token_ids, draft_probs, target_probs, inv_q, out_token_ids)
    if rows == 0 or tokens == 0 or max_spec_len < 1:
        return
    sample_recovered_tokens_kernel[(rows, max_spec_len)](
        cu_num_draft_tokens,
        draft_token_ids,
        target_probs if draft_probs is None else draft_probs,
        target_probs,
        inv_q,
        out_token_ids,
        0 if draft_probs is None else draft_probs.stride(0),
        target_probs.stride(0),
        inv_q.stride(0),
        vocab_size,
        tokens,
        HAS_DRAFT_PROBS=draft_probs is not None,
        BLOCK=BLOCK,
        num_warps=4,
    )


def sample_recovered_tokens_reference_(
    *,
    cu_num_draft_tokens: torch.Tensor,
    draft_token_ids: torch.Tensor,
    draft_probs: torch.Tensor | None = None,
    target_probs: torch.Tensor,
    inv_q: torch.Tensor,
    max_spec_len: int,
    out_token_ids: torch.Tensor,
) -> None:
    """Specify `sample_recovered_tokens_` in plain torch."""
    _, tokens, vocab_size = _check(cu_num_draft_tokens, draft_token_ids, draft_probs, target_probs, inv_q, out_token_ids)
    ends = [max(min(end, tokens), 0) for end in cu_num_draft_tokens.tolist()]
    spans = enumerate(zip([0, *ends], ends, strict=False))
    pairs = [(row, at) for row, (begin, end) in spans for at in range(begin, min(end, begin + max_spec_len))]
    if not pairs:
        return
    row, at = torch.tensor(pairs, device=target_probs.device).T
    draft = draft_token_ids[at].long()[:, None]
    token = torch.arange(vocab_size, device=target_probs.device)
    p, number = target_probs[at], inv_q[row].double()

    def largest(weights: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The lowest token of the largest weight, and whether that is above 0."""
        products = weights.double() * number
        top = products.amax(1, keepdim=True)
        return torch.where(products == top, token, vocab_size).amin(1), top[:, 0] > 0

    others, has_others = largest(torch.where(token == draft, 0.0, p))
    chosen = torch.where(has_others, others, draft[:, 0].clamp(min=0))
    if draft_probs is not None:
        q = torch.where(draft < 0, 0.0, draft_probs[at])
        residual, has_residual = largest((p - q).clamp(min=0))
        chosen = torch.where(has_residual, residual, chosen)
    out_token_ids[at] = chosen.to(out_token_ids.dtype)


sample_recovered_tokens_ = Op(
    "sample_recovered_tokens",
    writes=("out_token_ids",),
    triton=_launch_sample_recovered_tokens,
    reference=sample_recovered_tokens_reference_,
    strided=("draft_probs", "target_probs", "inv_q"),
)
"""Choose the token to emit at each draft's place should it be rejected: the largest of max(p - q, 0) times the row's number.

R rows, N drafts in all, V tokens. Index arrays are int32 or int64. Ties go to the lowest id. Drafts that were just proposed have
the weights p without the draft. Where all weights are 0 they are p without the draft, too; where those are 0 as well the draft itself
stands: a token that the target excludes is chosen only if it excludes all. A negative draft means that nothing was proposed: its
weights are p.

Args:
    cu_num_draft_tokens: [R] inclusive prefix sums of the rows' numbers of drafts.
    draft_token_ids: [N] drafts, -1 for none.
    draft_probs: [N, V] float32 q, or None for drafts that were just proposed.
    target_probs: [N, V] float32 p.
    inv_q: [R, V] float32 or float64, a number above 0 for each row and token; rows of all three any stride apart.
    max_spec_len: most drafts of a row; places of a row behind them are left alone.
    out_token_ids: [N] written.

Raises:
    ArgumentError, ArgumentTypeError: arrays that do not belong together; nothing has been written.
"""
