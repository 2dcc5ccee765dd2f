"""A batch in which every row grows."""

from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from funcspec.errors import ArgumentError, ArgumentTypeError
from funcspec.kernels.query_extension import BatchCounts, extend_all_queries_by_

from .guarded import POISON, Buffers


class Launch:
    """One batch and its buffers."""

    def __init__(
        self,
        device: str,
        queries: list[int],
        lengths: list[int],
        new: int,
        capacity: int | None = None,
        dtype: torch.dtype = torch.int32,
        **optional: int,
    ) -> None:
        self.buffers = Buffers(device)
        capacity = len(queries) if capacity is None else capacity
        starts = [sum(queries[:i]) for i in range(len(queries) + 1)]
        self.arguments: dict[str, Any] = {
            "query_start_loc": torch.tensor(starts, dtype=dtype, device=device),
            "seq_lens": torch.tensor(lengths, dtype=dtype, device=device),
            "num_new_tokens": new,
            "out_query_start_loc": self.buffers.poisoned(capacity + 1, dtype),
            "out_seq_lens": self.buffers.poisoned(capacity, dtype),
            **optional,
        }

    def run(self, backend: str) -> tuple[list[int], list[int]]:
        before = {name: self.arguments[name].clone() for name in ("query_start_loc", "seq_lens")}
        extend_all_queries_by_(**self.arguments, backend=backend)
        self.buffers.check()
        assert all(torch.equal(self.arguments[name], value) for name, value in before.items())
        return self.arguments["out_query_start_loc"].tolist(), self.arguments["out_seq_lens"].tolist()


def test_worked_example(backend: str, kernel_device: str) -> None:
    assert Launch(kernel_device, [3, 2], [3, 2], 1).run(backend) == ([0, 4, 7], [4, 3])


def test_rows_behind_the_batch_are_inert(backend: str, kernel_device: str) -> None:
    assert Launch(kernel_device, [3, 2], [9, 5], 2, capacity=4).run(backend) == ([0, 5, 9, 9, 9], [11, 7, 0, 0])
    assert Launch(kernel_device, [], [], 2, capacity=2).run(backend) == ([0, 0, 0], [0, 0])
    assert Launch(kernel_device, [], [], 2).run(backend) == ([0], [])


def test_d25_the_limit(backend: str, kernel_device: str) -> None:
    last = 2**31 - 1
    assert Launch(kernel_device, [1, 1], [30, 32], 2, max_model_len=32).run(backend) == ([0, 3, 6], [32, 32])
    assert Launch(kernel_device, [1], [last], 5, max_model_len=last).run(backend) == ([0, 6], [last])
    assert Launch(kernel_device, [1], [last], 5, dtype=torch.int64).run(backend) == ([0, 6], [last + 5])


def test_more_rows_than_a_tile(backend: str, kernel_device: str) -> None:
    starts, lengths = Launch(kernel_device, [2] * 300, list(range(300)), 3, capacity=520).run(backend)
    assert starts == [5 * i for i in range(301)] + [1500] * 220
    assert lengths == [3 + i for i in range(300)] + [0] * 220


def test_lengths_may_grow_in_place(backend: str, kernel_device: str) -> None:
    launch = Launch(kernel_device, [1, 4], [6, 4], 3)
    launch.arguments["out_seq_lens"] = launch.arguments["seq_lens"]
    extend_all_queries_by_(**launch.arguments, backend=backend)
    assert launch.arguments["seq_lens"].tolist() == [9, 7]


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.lists(st.tuples(st.integers(0, 9), st.integers(0, 60)), max_size=7),
    st.integers(0, 5),
    st.integers(0, 4),
    st.none() | st.integers(1, 50),
    st.sampled_from([torch.int32, torch.int64]),
)
def test_ragged_batches(
    backend: str, kernel_device: str, rows: list[tuple[int, int]], new: int, spare: int, limit: int | None, dtype: torch.dtype
) -> None:
    queries, lengths = [query for query, _ in rows], [length for _, length in rows]
    optional = {} if limit is None else {"max_model_len": limit}
    starts, grown = Launch(kernel_device, queries, lengths, new, len(rows) + spare, dtype, **optional).run(backend)
    assert starts == [sum(queries[:i]) + min(i, len(rows)) * new for i in range(len(rows) + spare + 1)]
    assert grown == [length + new if limit is None else min(length + new, limit) for length in lengths] + [0] * spare
    counts = BatchCounts(len(rows), sum(queries), max(queries, default=0), max(lengths, default=0)).extended_by(new, limit)
    assert counts.num_tokens == starts[-1] and counts.num_reqs == len(rows)
    if rows:
        assert counts.max_seq_len == max(grown[: len(rows)])
        assert counts.max_query_len == max(b - a for a, b in pairwise(starts[: len(rows) + 1]))


def test_refusals_write_nothing(backend: str, kernel_device: str) -> None:
    def refused(error: type[Exception], match: str, **changes: Any) -> None:
        launch = Launch(kernel_device, [3, 2], [3, 2], 1)
        launch.arguments.update(changes)
        with pytest.raises(error, match=match):
            extend_all_queries_by_(**launch.arguments, backend=backend)
        for name in ("out_query_start_loc", "out_seq_lens"):
            if name not in changes:
                assert (launch.arguments[name] == POISON).all()

    short = torch.zeros(1, dtype=torch.int32, device=kernel_device)
    refused(ArgumentError, "num_new_tokens", num_new_tokens=-1)
    refused(ArgumentError, "max_model_len", max_model_len=0)
    refused(ArgumentError, "query_start_loc", query_start_loc=short)
    refused(ArgumentError, "out_seq_lens", out_seq_lens=short)
    refused(ArgumentError, "out_query_start_loc", out_query_start_loc=short)
    refused(ArgumentTypeError, "seq_lens", seq_lens=torch.zeros(2, device=kernel_device))
    launch = Launch(kernel_device, [3, 2], [3, 2], 1)
    launch.arguments["out_query_start_loc"] = launch.arguments["query_start_loc"]
    with pytest.raises(ArgumentError, match="out_query_start_loc"):
        extend_all_queries_by_(**launch.arguments, backend=backend)


def test_counts_are_checked() -> None:
    counts = BatchCounts(num_reqs=1, num_tokens=1, max_query_len=1, max_seq_len=1)
    with pytest.raises(ArgumentError, match="num_new_tokens"):
        counts.extended_by(-1)
    with pytest.raises(ArgumentError, match="max_model_len"):
        counts.extended_by(1, 0)
