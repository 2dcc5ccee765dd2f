"""Counts of computed tokens after rows have changed places."""

from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from funcspec.errors import ArgumentError, ArgumentTypeError
from funcspec.kernels.batch_change import MAX_ROWS, update_num_computed_tokens_for_batch_change_

from .guarded import Buffers

READ = ("prev_positions", "valid_sampled_token_count", "prev_num_draft_tokens", "cpu_num_computed_tokens")
NAMES = ("num_computed_tokens", "num_accepted_tokens", *READ)


class Launch:
    """One batch; every array is guarded, and none but the first two may change."""

    def __init__(self, device: str, *values: list[int], dtype: torch.dtype = torch.int32) -> None:
        self.buffers = Buffers(device)
        self.arguments = {name: self.buffers.holding(array, dtype) for name, array in zip(NAMES, values, strict=True)}

    def run(self, backend: str) -> tuple[list[int], list[int]]:
        before = {name: self.arguments[name].clone() for name in READ}
        update_num_computed_tokens_for_batch_change_(**self.arguments, backend=backend)
        self.buffers.check()
        assert all(torch.equal(self.arguments[name], value) for name, value in before.items())
        return self.arguments["num_computed_tokens"].tolist(), self.arguments["num_accepted_tokens"].tolist()


def test_worked_example(backend: str, kernel_device: str) -> None:
    launch = Launch(kernel_device, [10, 20, 30, 40], [1, 1, 1], [2, 1, -1], [3, 1, 2], [3, 0, 3], [99, 11, 7])
    assert launch.run(backend) == ([32, 11, 7, 40], [2, 1, 1])


def test_u1(backend: str, kernel_device: str) -> None:
    launch = Launch(kernel_device, [10, 20, 30, 40, 50, 60], [9, 8, 7], [0, 2, -1], [3, 4], [2, 0], [100, 200, 300])
    assert launch.run(backend) == ([13, 200, 300, 40, 50, 60], [3, 8, 7])


def test_u2_no_batch_before(backend: str, kernel_device: str) -> None:
    launch = Launch(kernel_device, [10, 20], [5, 6], [-1, 2], [], [], [100, 200])
    assert launch.run(backend) == ([100, 200], [5, 6])


def test_d26_a_stale_position_is_not_live(backend: str, kernel_device: str) -> None:
    launch = Launch(kernel_device, [10, 20, 30], [5, 6, 7], [2, -9, 2**31 - 1], [3, 4], [1, 1, 1], [100, 200, 300])
    assert launch.run(backend) == ([100, 200, 300], [5, 6, 7])


def test_rows_may_be_permuted(backend: str, kernel_device: str) -> None:
    """Every row goes to another's place, so a write before a read would show."""
    count = 1000
    before, prev = [7 * i for i in range(count)], [(i * 613 + 5) % count for i in range(count)]
    launch = Launch(kernel_device, before, [0] * count, prev, [i % 5 for i in range(count)], [1] * count, [-1] * count)
    expected = [7 * p + p % 5 for p in prev]
    assert launch.run(backend) == (expected, [p % 5 for p in prev])


def test_no_rows(backend: str, kernel_device: str) -> None:
    assert Launch(kernel_device, [10, 20], [], [], [3, 4], [1, 1], []).run(backend) == ([10, 20], [])


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data(), st.integers(0, 6), st.integers(0, 6), st.integers(0, 2), st.sampled_from([torch.int32, torch.int64]))
def test_ragged_batches(
    backend: str, kernel_device: str, data: st.DataObject, rows: int, prev_rows: int, spare: int, dtype: torch.dtype
) -> None:
    def numbers(low: int, high: int, count: int) -> list[int]:
        return data.draw(st.lists(st.integers(low, high), min_size=count, max_size=count))

    computed, accepted = numbers(0, 10**6, max(rows, prev_rows) + spare), numbers(0, 9, rows)
    prev, valid = numbers(-2, prev_rows + 2, rows), numbers(0, 9, prev_rows)
    drafts, known = numbers(0, 2, prev_rows), numbers(0, 10**6, rows)
    live = [0 <= p < prev_rows and drafts[p] > 0 for p in prev]
    new = [computed[p] + valid[p] if alive else cpu for p, alive, cpu in zip(prev, live, known, strict=True)]
    counts = [valid[p] if alive else old for p, alive, old in zip(prev, live, accepted, strict=True)]
    launch = Launch(kernel_device, computed, accepted, prev, valid, drafts, known, dtype=dtype)
    assert launch.run(backend) == (new + computed[rows:], counts)


def test_refusals_write_nothing(backend: str, kernel_device: str) -> None:
    def refused(error: type[Exception], match: str, **changes: Any) -> None:
        launch = Launch(kernel_device, [10, 20, 30, 40], [1, 1, 1], [2, 1, -1], [3, 1, 2, 1], [3, 0, 3, 1], [99, 11, 7])
        launch.arguments.update(changes)
        with pytest.raises(error, match=match):
            launch.run(backend)
        if "num_computed_tokens" not in changes:
            assert launch.arguments["num_computed_tokens"].tolist() == [10, 20, 30, 40]

    def zeros(length: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
        return torch.zeros(length, dtype=dtype, device=kernel_device)

    refused(ArgumentError, "num_computed_tokens", num_computed_tokens=zeros(3))
    refused(ArgumentError, "num_accepted_tokens", num_accepted_tokens=zeros(2))
    refused(ArgumentError, "prev_num_draft_tokens", prev_num_draft_tokens=zeros(3))
    refused(ArgumentError, "cpu_num_computed_tokens", cpu_num_computed_tokens=zeros(2))
    refused(ArgumentTypeError, "prev_positions", prev_positions=zeros(3, torch.float32))
    refused(ArgumentError, "prev_positions", prev_positions=zeros(MAX_ROWS + 1))
