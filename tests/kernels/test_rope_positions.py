"""Rotary positions of the tokens of a pass, and zeros where there is none."""

from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from funcspec.errors import ArgumentError, ArgumentTypeError
from funcspec.kernels.rope_positions import rope_positions_

from .guarded import POISON, Buffers


class Launch:
    """One call in guarded, poisoned buffers; the table holds a different number in every place."""

    def __init__(self, device: str, rows: list[int], positions: list[int], *, num_rows: int = 3, axes: int = 3, length: int = 5) -> None:
        self.buffers = Buffers(device)
        numbers = [1000 + 7 * number for number in range(num_rows * axes * length)]
        self.arguments: dict[str, Any] = {
            "table": self.buffers.holding(numbers).view(num_rows, axes, length),
            "token_rows": self.buffers.holding(rows),
            "positions": self.buffers.holding(positions),
            "out_rope_positions": self.buffers.poisoned(axes * len(rows)).view(axes, len(rows)),
        }

    def run(self, backend: Any) -> list[list[int]]:
        before = {name: self.arguments[name].clone() for name in ("table", "token_rows", "positions")}
        rope_positions_(**self.arguments, backend=backend)
        self.buffers.check()
        assert all(torch.equal(self.arguments[name], value) for name, value in before.items())
        return self.arguments["out_rope_positions"].tolist()

    def expected(self) -> list[list[int]]:
        """The contract, a number at a time."""
        table, rows, positions = (self.arguments[name].tolist() for name in ("table", "token_rows", "positions"))
        length = self.arguments["table"].shape[2]
        places = list(zip(rows, positions, strict=True))
        axes = range(self.arguments["table"].shape[1])
        return [[table[row][axis][at] if row >= 0 and 0 <= at < length else 0 for row, at in places] for axis in axes]


def test_by_hand(backend: str, kernel_device: str) -> None:
    launch = Launch(kernel_device, [1, -1, 0, 1], [0, 0, 1, 1], num_rows=2, axes=2, length=2)
    assert launch.run(backend) == [[1028, 0, 1007, 1035], [1042, 0, 1021, 1049]]


@pytest.mark.parametrize("count", [0, 1, 127, 128, 129, 300])
def test_passes_of_any_size(backend: str, kernel_device: str, count: int) -> None:
    launch = Launch(kernel_device, [place % 4 - 1 for place in range(count)], [place % 5 for place in range(count)])
    assert launch.run(backend) == launch.expected()


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=60)
@given(data=st.data())
def test_ragged_passes(backend: str, kernel_device: str, data: st.DataObject) -> None:
    """Positions out of range too: they have no rotary position, and nothing beside the table is read."""
    num_rows, axes, length = (data.draw(st.integers(1, most)) for most in (4, 4, 9))
    tokens = data.draw(st.lists(st.tuples(st.integers(-1, num_rows - 1), st.integers(-1, length + 1)), max_size=20))
    rows, positions = [row for row, _ in tokens], [position for _, position in tokens]
    launch = Launch(kernel_device, rows, positions, num_rows=num_rows, axes=axes, length=length)
    assert launch.run(backend) == launch.expected()


def test_refusals_write_nothing(backend: str, kernel_device: str) -> None:
    def refused(error: type[Exception], match: str, **changes: Any) -> None:
        launch = Launch(kernel_device, [0, 1], [1, 2])
        out = launch.arguments["out_rope_positions"]
        launch.arguments |= changes
        with pytest.raises(error, match=match):
            rope_positions_(**launch.arguments, backend=backend)
        assert (out == POISON).all()

    ints, longs = ({"dtype": dtype, "device": kernel_device} for dtype in (torch.int32, torch.int64))
    refused(ArgumentTypeError, r"^table: expected int32 \[R, A, L\]", table=torch.zeros(3, 5, **ints))
    refused(ArgumentTypeError, r"^table: ", table=torch.zeros(3, 3, 5, device=kernel_device))
    refused(ArgumentTypeError, r"^token_rows: expected int32", token_rows=torch.zeros(2, **longs))
    refused(ArgumentError, r"^positions: expected consecutive entries", positions=torch.zeros(4, **ints)[::2])
    refused(ArgumentError, r"^positions: expected shape \(2,\) for 2 tokens, got \(3,\)", positions=torch.zeros(3, **ints))
    refused(ArgumentError, r"^out_rope_positions: expected shape \(3, 2\)", out_rope_positions=torch.zeros(2, 2, **ints))
