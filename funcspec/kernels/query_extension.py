"""Query starts, lengths and counts of a batch in which every row grows by the same number of tokens."""

from dataclasses import dataclass

import torch

from funcspec.errors import refuse
from funcspec.kernels._checks import check_index_array, check_other_buffer, check_positive
from funcspec.kernels._triton import jit, tl
from funcspec.kernels.op import Op

TILE = 128


@dataclass(frozen=True)
class BatchCounts:
    """What a host knows of a batch of queries.

    Attributes:
        num_reqs: rows of the batch.
        num_tokens: tokens of all queries.
        max_query_len: tokens of the longest query.
        max_seq_len: length of the longest row.
    """

    num_reqs: int
    num_tokens: int
    max_query_len: int
    max_seq_len: int

    def extended_by(self, num_new_tokens: int, max_model_len: int | None = None) -> "BatchCounts":
        """Counts after every row has grown; this record stays as it is.

        Args:
            num_new_tokens: N, 0 or more.
            max_model_len: most tokens of a row, or None for no limit.

        Raises:
            ArgumentError: fewer than 0 new tokens, or a limit below 1.

        Example:
            >>> BatchCounts(num_reqs=2, num_tokens=5, max_query_len=3, max_seq_len=9).extended_by(1)
            BatchCounts(num_reqs=2, num_tokens=7, max_query_len=4, max_seq_len=10)
        """
        _check_sizes(num_new_tokens, max_model_len)
        length = self.max_seq_len + num_new_tokens
        return BatchCounts(
            self.num_reqs,
            self.num_tokens + self.num_reqs * num_new_tokens,
            self.max_query_len + num_new_tokens,
            length if max_model_len is None else min(length, max_model_len),
        )


@jit
def extend_all_queries_by_kernel(
    query_start_loc_ptr,  # [R + 1]
    seq_lens_ptr,  # [R]
    out_query_start_loc_ptr,  # [M + 1], written
    out_seq_lens_ptr,  # [M], written; may be seq_lens_ptr
    num_new_tokens,
    max_model_len,
    num_rows,
    max_num_reqs,
    HAS_LIMIT: tl.constexpr,
    LANES: tl.constexpr,
):
    """One lane a row, the rows behind the batch included."""
    row = tl.program_id(0).to(tl.int64) * LANES + tl.arange(0, LANES)
    real = row < num_rows
    start = tl.load(query_start_loc_ptr + row, mask=row <= num_rows, other=0).to(tl.int64)
    length = tl.load(seq_lens_ptr + row, mask=real, other=0).to(tl.int64) + num_new_tokens
    if HAS_LIMIT:
        length = tl.minimum(length, max_model_len)
    total = tl.load(query_start_loc_ptr + num_rows).to(tl.int64) + num_rows * num_new_tokens
    tl.store(out_query_start_loc_ptr + row, start + row * num_new_tokens, mask=real)
    tl.store(out_query_start_loc_ptr + row, total + row * 0, mask=(row >= num_rows) & (row <= max_num_reqs))
    tl.store(out_seq_lens_ptr + row, tl.where(real, length, 0), mask=row < max_num_reqs)


def _check_sizes(num_new_tokens: int, max_model_len: int | None) -> None:
    if num_new_tokens < 0:
        refuse("num_new_tokens", "0 or more", num_new_tokens, "pass the number of tokens that each row gains")
    if max_model_len is not None:
        check_positive("max_model_len", max_model_len)


def _check(
    query_start_loc: torch.Tensor,
    seq_lens: torch.Tensor,
    num_new_tokens: int,
    max_model_len: int | None,
    out_query_start_loc: torch.Tensor,
    out_seq_lens: torch.Tensor,
) -> None:
    _check_sizes(num_new_tokens, max_model_len)
    check_index_array("seq_lens", seq_lens, 0)
    rows = seq_lens.shape[0]
    check_index_array("query_start_loc", query_start_loc, rows + 1)
    check_index_array("out_seq_lens", out_seq_lens, rows)
    check_index_array("out_query_start_loc", out_query_start_loc, out_seq_lens.shape[0] + 1)
    check_other_buffer("out_query_start_loc", out_query_start_loc, "query_start_loc", query_start_loc)


def _launch_extend_all_queries_by(
    *,
    query_start_loc: torch.Tensor,
    seq_lens: torch.Tensor,
    num_new_tokens: int,
    max_model_len: int | None = None,
    out_query_start_loc: torch.Tensor,
    out_seq_lens: torch.Tensor,
) -> None:
    _check(query_start_loc, seq_lens, num_new_tokens, max_model_len, out_query_start_loc, out_seq_lens)
    capacity = out_seq_lens.shape[0]
    extend_all_queries_by_kernel[(capacity // TILE + 1,)](
        query_start_loc,
        seq_lens,
        out_query_start_loc,
        out_seq_lens,
        num_new_tokens,
        0 if max_model_len is None else max_model_len,
        seq_lens.shape[0],
        capacity,
        HAS_LIMIT=max_model_len is not None,
        LANES=TILE,
        num_warps=1,
    )


def extend_all_queries_by_reference_(
    *,
    query_start_loc: torch.Tensor,
    seq_lens: torch.Tensor,
    num_new_tokens: int,
    max_model_len: int | None = None,
    out_query_start_loc: torch.Tensor,
    out_seq_lens: torch.Tensor,
) -> None:
    """Specify `extend_all_queries_by_` in plain torch."""
    _check(query_start_loc, seq_lens, num_new_tokens, max_model_len, out_query_start_loc, out_seq_lens)
    rows, capacity = seq_lens.shape[0], out_seq_lens.shape[0]
    starts = query_start_loc[: rows + 1].long() + torch.arange(rows + 1, device=seq_lens.device) * num_new_tokens
    out_query_start_loc[: rows + 1] = starts
    out_query_start_loc[rows : capacity + 1] = starts[rows]
    grown = seq_lens.long() + num_new_tokens
    out_seq_lens[:rows] = grown if max_model_len is None else grown.clamp(max=max_model_len)
    out_seq_lens[rows:] = 0


extend_all_queries_by_ = Op(
    "extend_all_queries_by",
    writes=("out_query_start_loc", "out_seq_lens"),
    triton=_launch_extend_all_queries_by,
    reference=extend_all_queries_by_reference_,
)
"""Describe a batch in which every row has grown by N tokens: starts move by i * N, lengths grow by N.

R rows, M >= R rows of output. Arrays are int32 or int64. Rows R up to M have length 0, and their starts repeat the total, so that a
replayed graph never sees an older batch. The inputs stay as they are. What the host knows of the batch grows with
`BatchCounts.extended_by`; its mirrors of the starts and lengths are CPU arrays, for which the same operation serves. Every array of
lengths has to grow (upper bounds, local lengths): one that is carried over as it was is stale.

Args:
    query_start_loc: [R + 1] exclusive prefix sums of the query lengths.
    seq_lens: [R] number of tokens of each row, this query included.
    num_new_tokens: N, 0 or more.
    max_model_len: most tokens of a row: out_seq_lens[i] = min(seq_lens[i] + N, max_model_len); None for no limit.
    out_query_start_loc: [>= M + 1] written up to M; must not be query_start_loc itself.
    out_seq_lens: [M] written; may be `seq_lens` itself.

Raises:
    ArgumentError, ArgumentTypeError: arrays that do not belong together; nothing has been written.
"""
