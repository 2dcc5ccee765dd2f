"""One value a row, repeated for its tokens."""

from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from funcspec.errors import ArgumentError, ArgumentTypeError
from funcspec.kernels.batch_expansion import expand_batch_to_tokens_

from .guarded import POISON, Buffers


def expand(
    device: str, values: torch.Tensor, counts: list[int], backend: str, spare: int = 2, sums: torch.dtype = torch.int32, **replace: float
) -> list[float]:
    buffers = Buffers(device)
    ends = [sum(counts[: row + 1]) for row in range(len(counts))]
    out = buffers.poisoned(sum(counts) + spare, values.dtype)
    cu_num_tokens = torch.tensor(ends, dtype=sums, device=device)
    expand_batch_to_tokens_(values=values.to(device), cu_num_tokens=cu_num_tokens, out_expanded=out, **replace, backend=backend)
    buffers.check()
    return out.tolist()


def test_rows_of_any_length(backend: str, kernel_device: str) -> None:
    values = torch.tensor([0.5, 0.0, 2.0, 1.5])
    assert expand(kernel_device, values, [2, 1, 0, 3], backend) == [0.5, 0.5, 0.0, 1.5, 1.5, 1.5, POISON, POISON]
    assert expand(kernel_device, values, [2, 1, 0, 1], backend, replace_from=0, replace_to=1) == [0.5, 0.5, 1.0, 1.5, POISON, POISON]


def test_more_than_128_tokens_a_row(backend: str, kernel_device: str) -> None:
    """The reference stops there."""
    values = torch.tensor([7, 9], dtype=torch.int32)
    assert expand(kernel_device, values, [300, 129], backend) == [7] * 300 + [9] * 129 + [POISON] * 2


def test_large_integers_stay_exact(backend: str, kernel_device: str) -> None:
    values = torch.tensor([2**62 + 1, -1], dtype=torch.int64)
    assert expand(kernel_device, values, [1, 1], backend, spare=0, replace_from=-1, replace_to=2**61 + 1) == [2**62 + 1, 2**61 + 1]


def test_what_does_not_fit_is_cut_off(backend: str, kernel_device: str) -> None:
    assert expand(kernel_device, torch.tensor([1, 2, 3]), [2, 4, 1], backend, spare=-4) == [1, 1, 2]


def test_no_rows(backend: str, kernel_device: str) -> None:
    assert expand(kernel_device, torch.zeros(0), [], backend) == [POISON, POISON]


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.lists(st.tuples(st.integers(-3, 3), st.integers(0, 6)), max_size=6),
    st.integers(-3, 3),
    st.integers(-3, 3),
    st.sampled_from([torch.float32, torch.int32, torch.int64]),
    st.sampled_from([torch.int32, torch.int64]),
)
def test_ragged_batches(
    backend: str, kernel_device: str, rows: list[tuple[int, int]], old: int, new: int, dtype: torch.dtype, sums: torch.dtype
) -> None:
    values = torch.tensor([value for value, _ in rows], dtype=dtype)
    found = expand(kernel_device, values, [count for _, count in rows], backend, sums=sums, replace_from=old, replace_to=new)
    assert found == [new if value == old else value for value, count in rows for _ in range(count)] + [POISON] * 2


def test_refusals_write_nothing(backend: str, kernel_device: str) -> None:
    def refused(error: type[Exception], match: str, **changes: Any) -> None:
        arguments: dict[str, Any] = {
            "values": torch.ones(2, device=kernel_device),
            "cu_num_tokens": torch.tensor([1, 2], dtype=torch.int32, device=kernel_device),
            "out_expanded": torch.full((2,), 5.0, device=kernel_device),
        }
        arguments.update(changes)
        with pytest.raises(error, match=match):
            expand_batch_to_tokens_(**arguments, backend=backend)
        assert (arguments["out_expanded"] == 5).all()

    refused(ArgumentTypeError, "values", values=torch.ones(2, dtype=torch.float64, device=kernel_device))
    refused(ArgumentTypeError, "out_expanded", values=torch.ones(2, dtype=torch.int32, device=kernel_device))
    refused(ArgumentError, "values", values=torch.ones(2, 1, device=kernel_device))
    refused(ArgumentError, "cu_num_tokens", cu_num_tokens=torch.zeros(1, dtype=torch.int32, device=kernel_device))
    refused(ArgumentTypeError, "cu_num_tokens", cu_num_tokens=torch.zeros(2, device=kernel_device))
