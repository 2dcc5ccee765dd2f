"""Sample indices of padded queries."""

from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from funcspec.errors import ArgumentError, ArgumentTypeError
from funcspec.kernels.sample_indices import prepare_inputs_padded_

from .guarded import POISON, Buffers


def sums(numbers: list[int]) -> list[int]:
    return [sum(numbers[: i + 1]) for i in range(len(numbers))]


def arguments(device: str, drafts: list[int], valid: list[int], queries: list[int], dtype: torch.dtype = torch.int32) -> dict[str, Any]:
    buffers = Buffers(device)
    return {
        "buffers": buffers,
        "cu_num_draft_tokens": torch.tensor(sums(drafts), dtype=dtype, device=device),
        "valid_sampled_tokens_count": torch.tensor(valid, dtype=dtype, device=device),
        "query_start_loc": torch.tensor([0, *sums(queries)], dtype=dtype, device=device),
        "out_token_indices": buffers.poisoned(len(drafts) + 1, dtype),
        "out_num_rejected": buffers.poisoned(len(drafts) + 1, dtype),
    }


def run(backend: str, given: dict[str, Any]) -> tuple[list[int], list[int]]:
    buffers = given.pop("buffers")
    prepare_inputs_padded_(**given, backend=backend)
    buffers.check()
    outputs = [given[name].tolist() for name in ("out_token_indices", "out_num_rejected")]
    assert [values.pop() for values in outputs] == [POISON, POISON]
    return outputs[0], outputs[1]


@pytest.mark.parametrize(
    ("drafts", "valid", "queries", "indices", "rejected"),
    [
        ([3, 0, 2], [2, 1, 3], [4, 5, 3], [1, 8, 11], [2, 0, 0]),
        ([3, 0, 2], [2, 1, 3], [4, 2, 5], [1, 5, 10], [2, 0, 0]),
        ([2, 2, 2], [2, 3, 1], [3, 3, 3], [1, 5, 6], [1, 0, 2]),
        ([], [], [], [], []),
    ],
    ids=["mixed", "longer query", "three rows", "no rows"],
)
def test_worked_examples(
    backend: str, kernel_device: str, drafts: list[int], valid: list[int], queries: list[int], indices: list[int], rejected: list[int]
) -> None:
    assert run(backend, arguments(kernel_device, drafts, valid, queries)) == (indices, rejected)


def test_d6_a_row_with_nothing_valid_stays_inside_itself(backend: str, kernel_device: str) -> None:
    # Counts 2 0 1: the middle row must not point at token 2, which is the first row's.
    assert run(backend, arguments(kernel_device, [2, 2, 2], [2, 0, 1], [3, 3, 3])) == ([1, 3, 6], [1, 2, 2])
    # Nor must a first row point at -1.
    assert run(backend, arguments(kernel_device, [3], [0], [4])) == ([0], [3])


def test_more_valid_than_sampled_is_none_rejected(backend: str, kernel_device: str) -> None:
    assert run(backend, arguments(kernel_device, [2, 1], [9, 2], [3, 2])) == ([2, 4], [0, 0])


def test_queries_shorter_than_their_drafts(backend: str, kernel_device: str) -> None:
    assert run(backend, arguments(kernel_device, [1, 4, 4], [2, 1, 1], [2, 2, 0])) == ([1, 2, 0], [0, 4, 4])


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.lists(st.tuples(st.integers(0, 5), st.integers(0, 7), st.integers(0, 8)), max_size=40),
    st.sampled_from([torch.int32, torch.int64]),
)
def test_ragged_batches(backend: str, kernel_device: str, rows: list[tuple[int, int, int]], dtype: torch.dtype) -> None:
    indices, rejected, start = [], [], 0
    for drafts, valid, query in rows:
        refused = max(0, min(drafts + 1 - valid, drafts))
        indices.append(max(start + query - 1 - refused, start) if query else 0)
        rejected.append(refused)
        start += query
    columns = [list(column) for column in zip(*rows, strict=True)] or [[], [], []]
    assert run(backend, arguments(kernel_device, *columns, dtype=dtype)) == (indices, rejected)


def test_refusals_write_nothing(backend: str, kernel_device: str) -> None:
    def refused(error: type[Exception], match: str, **changes: Any) -> None:
        given = arguments(kernel_device, [1, 1, 1], [1, 1, 1], [2, 2, 2]) | changes
        with pytest.raises(error, match=match):
            run(backend, given)
        assert (given["out_token_indices"] == POISON).all()

    two = torch.zeros(2, dtype=torch.int32, device=kernel_device)
    refused(ArgumentError, "valid_sampled_tokens_count", valid_sampled_tokens_count=two)  # K6
    refused(ArgumentError, "query_start_loc", query_start_loc=two)
    refused(ArgumentError, "out_num_rejected", out_num_rejected=two)
    refused(ArgumentTypeError, "cu_num_draft_tokens", cu_num_draft_tokens=torch.zeros(3, device=kernel_device))
