"""Rows of logits divided by their temperatures."""

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from funcspec.errors import ArgumentError, ArgumentTypeError
from funcspec.kernels.temperature import apply_temperature_

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def apply(device: str, logits: torch.Tensor, idx_mapping: list[int], temperature: list[float], backend: str) -> torch.Tensor:
    """The logits after the operation; they lie in a wider buffer whose other columns must stay."""
    wide = torch.full((logits.shape[0] + 1, logits.shape[1] + 3), -777.0, dtype=logits.dtype, device=device)
    inner = wide[: logits.shape[0], : logits.shape[1]]
    inner.copy_(logits)
    rows = torch.tensor(idx_mapping, dtype=torch.int32, device=device)
    apply_temperature_(
        logits=inner, idx_mapping=rows, temperature=torch.tensor(temperature, dtype=torch.float32, device=device), backend=backend
    )
    assert (wide[:, logits.shape[1] :] == -777).all() and (wide[-1] == -777).all()
    return inner.cpu()


def test_rows_take_the_temperature_of_their_state(backend: str, kernel_device: str) -> None:
    logits = torch.tensor([[1.0, -2.0], [3.0, 4.0], [5.0, 6.0], [7.0, 8.0]])
    found = apply(kernel_device, logits, [2, 0, 1, 2], [0.0, 1.0, 0.5], backend)
    assert found.tolist() == [[2.0, -4.0], [3.0, 4.0], [5.0, 6.0], [14.0, 16.0]]


def test_rows_without_a_state_are_left_alone(backend: str, kernel_device: str) -> None:
    """The reference reads the temperature before the first there."""
    logits = torch.tensor([[1.0], [2.0], [3.0]])
    assert apply(kernel_device, logits, [-1, 0, 1], [0.5], backend).tolist() == [[1.0], [4.0], [3.0]]
    assert apply(kernel_device, logits, [-1, 0, 1], [], backend).tolist() == [[1.0], [2.0], [3.0]]


def test_numbers_that_are_not_finite(backend: str, kernel_device: str) -> None:
    logits = torch.tensor([[float("inf"), float("-inf"), float("nan"), -0.0]]).repeat(2, 1)
    found = apply(kernel_device, logits, [0, 1], [0.7, 0.0], backend)
    for row in found:
        assert row[0] == float("inf") and row[1] == float("-inf") and row[2].isnan() and row[3].signbit()


@pytest.mark.parametrize("shape", [(0, 4), (3, 0)])
def test_nothing_to_divide(backend: str, kernel_device: str, shape: tuple[int, int]) -> None:
    assert apply(kernel_device, torch.zeros(shape), [0] * shape[0], [0.5], backend).shape == shape


@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_longer_than_a_block_to_the_bit(backend: str, kernel_device: str, dtype: torch.dtype) -> None:
    logits = torch.from_numpy(np.random.default_rng(1).normal(size=(3, 2500)).astype(np.float32) * 9).to(dtype)
    temperature = np.array([0.7, 1.3, 0.01], np.float32)
    expected = torch.from_numpy(logits.float().numpy() / temperature[:, None]).to(dtype)
    assert torch.equal(apply(kernel_device, logits, [0, 1, 2], temperature.tolist(), backend), expected)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.lists(st.lists(st.floats(-1e4, 1e4, width=32), min_size=3, max_size=3), min_size=1, max_size=5),
    st.lists(st.sampled_from([0.0, 1.0, 0.3, 2.0]) | st.floats(0.0625, 10, width=32), min_size=1, max_size=3),
    st.data(),
    st.sampled_from(DTYPES),
)
def test_ragged_batches(
    backend: str, kernel_device: str, rows: list[list[float]], temperature: list[float], data: st.DataObject, dtype: torch.dtype
) -> None:
    states = [data.draw(st.integers(-1, len(temperature))) for _ in rows]
    logits = torch.tensor(rows).to(dtype)
    expected = logits.float().numpy().copy()
    for row, state in enumerate(states):
        if 0 <= state < len(temperature) and temperature[state] not in (0.0, 1.0):
            expected[row] /= np.float32(temperature[state])
    found = apply(kernel_device, logits, states, temperature, backend)
    assert torch.equal(found, torch.from_numpy(expected).to(dtype))


def test_refusals_write_nothing(backend: str, kernel_device: str) -> None:
    def refused(error: type[Exception], match: str, **changes: Any) -> None:
        arguments: dict[str, Any] = {
            "logits": torch.full((2, 3), 5.0, device=kernel_device),
            "idx_mapping": torch.zeros(2, dtype=torch.int32, device=kernel_device),
            "temperature": torch.full((1,), 0.5, device=kernel_device),
        }
        arguments.update(changes)
        with pytest.raises(error, match=match):
            apply_temperature_(**arguments, backend=backend)
        if "logits" not in changes:
            assert (arguments["logits"] == 5).all()

    refused(ArgumentTypeError, "logits", logits=torch.zeros(2, 3, dtype=torch.int32, device=kernel_device))
    refused(ArgumentError, "logits", logits=torch.zeros(3, 2, device=kernel_device).T)
    refused(ArgumentError, "logits", logits=torch.zeros(3, device=kernel_device))
    refused(ArgumentError, "idx_mapping", idx_mapping=torch.zeros(1, dtype=torch.int32, device=kernel_device))
    refused(ArgumentTypeError, "idx_mapping", idx_mapping=torch.zeros(2, device=kernel_device))
    refused(ArgumentTypeError, "temperature", temperature=torch.ones(1, dtype=torch.float64, device=kernel_device))
    refused(ArgumentError, "temperature", temperature=torch.ones(1, 1, device=kernel_device))
