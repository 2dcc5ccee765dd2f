"""Hidden states of live rows into columns of their features, and nothing else."""

from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from funcspec.errors import ArgumentError, ArgumentTypeError
from funcspec.kernels.keep_features import keep_features_

from .guarded import POISON, Buffers


class Launch:
    """One call in guarded, poisoned buffers. Hidden states are random numbers, rows of a wider matrix if there is a gap."""

    def __init__(
        self,
        device: str,
        live: list[int],
        *,
        width: int = 2,
        size: int = 3,
        places: int = 4,
        columns: int = 5,
        first_column: int = 0,
        dtype: torch.dtype = torch.float32,
        gap: int = 0,
    ) -> None:
        self.buffers = Buffers(device)
        rows = len(live)
        values = torch.randn(rows * width, size + gap, generator=torch.Generator().manual_seed(rows + size)).to(dtype)
        self.arguments: dict[str, Any] = {
            "hidden": values.to(device)[:, :size],
            "is_live": self.buffers.holding(live),
            "features": self.buffers.poisoned(rows * places * columns, torch.float32).view(rows, places, columns),
            "first_column": first_column,
        }

    def run(self, backend: Any) -> torch.Tensor:
        before = {name: self.arguments[name].clone() for name in ("hidden", "is_live")}
        keep_features_(**self.arguments, backend=backend)
        self.buffers.check()
        for name, value in before.items():
            assert torch.equal(self.arguments[name].nan_to_num(), value.nan_to_num()), f"{name} was written"
        return self.arguments["features"].cpu()

    def expected(self) -> torch.Tensor:
        """The contract, a number at a time."""
        out = torch.full(self.arguments["features"].shape, float(POISON))
        hidden, column = self.arguments["hidden"].float().cpu(), self.arguments["first_column"]
        rows, width = out.shape[0], len(hidden) // max(out.shape[0], 1)
        for row in range(rows):
            for place in range(width if int(self.arguments["is_live"][row]) else 0):
                out[row, place, column : column + hidden.shape[1]] = hidden[row * width + place]
        return out


def check(backend: str, device: str, live: list[int], **sizes: Any) -> torch.Tensor:
    launch = Launch(device, live, **sizes)
    found = launch.run(backend)
    assert torch.equal(found.view(torch.int32), launch.expected().view(torch.int32))  # to the bit, -0.0 too
    return found


def test_by_hand(backend: str, kernel_device: str) -> None:
    launch = Launch(kernel_device, [1, 0, 1], width=2, size=1, places=2, columns=2, first_column=1)
    launch.arguments["hidden"] = torch.tensor([[1.5], [2.5], [3.5], [4.5], [5.5], [-0.0]], device=kernel_device)
    kept = float(POISON)
    expected = [[[kept, 1.5], [kept, 2.5]], [[kept, kept], [kept, kept]], [[kept, 5.5], [kept, -0.0]]]
    assert launch.run(backend).tolist() == expected


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("gap", [0, 5])
def test_dtypes_and_strides(backend: str, kernel_device: str, dtype: torch.dtype, gap: int) -> None:
    check(backend, kernel_device, [1, 0, 1], dtype=dtype, gap=gap)
    check(backend, kernel_device, [1, 1], width=3, size=1, dtype=dtype, gap=gap)


@pytest.mark.parametrize("size", [1, 1023, 1024, 1025, 2500])
def test_sizes_around_a_block(backend: str, kernel_device: str, size: int) -> None:
    check(backend, kernel_device, [1, 0], width=1, size=size, places=2, columns=size + 7, first_column=3)


def test_layers_lie_side_by_side(backend: str, kernel_device: str) -> None:
    """Three calls fill the columns of one state; each leaves those of the others."""
    launch = Launch(kernel_device, [1, 1], width=4, size=2, places=4, columns=6)
    states = [torch.randn(8, 2, generator=torch.Generator().manual_seed(layer)).to(kernel_device) for layer in range(3)]
    for layer, hidden in enumerate(states):
        launch.arguments |= {"hidden": hidden, "first_column": 2 * layer}
        launch.run(backend)
    assert torch.equal(launch.arguments["features"].cpu(), torch.cat(states, 1).view(2, 4, 6).cpu())


def test_any_flag_but_0_is_live(backend: str, kernel_device: str) -> None:
    found = check(backend, kernel_device, [0, 1, -1, 7])
    assert (found[0] == POISON).all() and not (found[1:, :2, :3] == POISON).any()


def test_what_is_no_number_is_kept_and_stays_in_its_row(backend: str, kernel_device: str) -> None:
    launch = Launch(kernel_device, [1, 0, 1])
    launch.arguments["hidden"][0:4] = torch.tensor([float("nan"), float("inf"), -float("inf")], device=kernel_device)
    found = launch.run(backend)
    assert torch.equal(found.nan_to_num(nan=-1.0), launch.expected().nan_to_num(nan=-1.0))
    assert found[0].isnan().any() and not found[1:].isnan().any()


def test_nothing_to_keep(backend: str, kernel_device: str) -> None:
    assert (check(backend, kernel_device, [1, 1], width=0) == POISON).all()
    check(backend, kernel_device, [0, 0])


@st.composite
def batches(draw: st.DrawFn) -> dict[str, Any]:
    places, size = draw(st.integers(1, 5)), draw(st.integers(1, 9))
    first_column = draw(st.integers(0, 4))
    return {
        "live": draw(st.lists(st.integers(0, 1), min_size=1, max_size=5)),
        "width": draw(st.integers(0, places)),
        "size": size,
        "places": places,
        "columns": first_column + size + draw(st.integers(0, 3)),
        "first_column": first_column,
        "dtype": draw(st.sampled_from([torch.float32, torch.bfloat16, torch.float16])),
        "gap": draw(st.integers(0, 3)),
    }


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=40)
@given(batch=batches())
def test_ragged_batches(backend: str, kernel_device: str, batch: dict[str, Any]) -> None:
    check(backend, kernel_device, **batch)


def test_refusals_write_nothing(backend: str, kernel_device: str) -> None:
    def refused(error: type[Exception], match: str, **changes: Any) -> None:
        launch = Launch(kernel_device, [1, 1])
        launch.arguments |= changes
        with pytest.raises(error, match=match):
            launch.run(backend)
        assert "features" in changes or (launch.arguments["features"] == POISON).all()

    def array(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.zeros(shape, dtype=dtype, device=kernel_device)

    refused(ArgumentTypeError, "^hidden: expected float32, bfloat16 or float16, got torch.float64", hidden=array(4, 3, dtype=torch.float64))
    refused(ArgumentTypeError, "^hidden", hidden=array(4, 3, dtype=torch.int32))
    refused(ArgumentError, r"^hidden: expected \[2 \* W, H\], got shape \(5, 3\)", hidden=array(5, 3))
    refused(ArgumentError, "^hidden", hidden=array(12))
    refused(ArgumentError, "^hidden", hidden=array(3, 4).T)
    refused(ArgumentError, "^features: expected room for 4 places of 5 columns, got 5 places of columns 0 to 3", hidden=array(10, 3))
    refused(ArgumentError, "^features: .* got 2 places of columns 3 to 6", first_column=3)
    refused(ArgumentError, "^features: .* columns -1 to 2", first_column=-1)
    refused(ArgumentError, r"^is_live: expected int32 \[2\]", is_live=array(3, dtype=torch.int32))
    refused(ArgumentError, "^is_live", is_live=array(2, dtype=torch.bool))
    refused(ArgumentTypeError, "^features: expected float32", features=array(2, 4, 5, dtype=torch.bfloat16))
    refused(ArgumentTypeError, "^features", features=array(2, 20))
    refused(ArgumentError, "^features: expected consecutive entries", features=array(2, 4, 9)[:, :, :5])
