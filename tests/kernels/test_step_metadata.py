"""One draft step forward: positions, slots and lengths."""

from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from funcspec.errors import ArgumentError, ArgumentTypeError
from funcspec.kernels.step_metadata import step_slot_mapping_metadata_

from .guarded import POISON, Buffers

BOTH = pytest.mark.parametrize("overflow", ["reference", "freeze"])


class Launch:
    """One batch and its buffers, which have room for two rows more than the padded batch."""

    def __init__(
        self,
        device: str,
        positions: list[int],
        seq_lens: list[int],
        tables: list[list[int]],
        block_size: int,
        max_model_len: int,
        overflow: str,
        padded: int | None = None,
        dtype: torch.dtype = torch.int32,
        slot_dtype: torch.dtype = torch.int64,
    ) -> None:
        self.buffers = Buffers(device)
        length = max(padded or 0, len(positions)) + 2
        self.arguments: dict[str, Any] = {
            "positions": torch.tensor(positions, dtype=dtype, device=device),
            "block_tables": self.buffers.table(tables),
            "seq_lens": self.buffers.holding(seq_lens + [POISON] * (length - len(seq_lens)), dtype),
            "block_size": block_size,
            "max_model_len": max_model_len,
            "padded_num_reqs": padded,
            "overflow": overflow,
            "out_positions": self.buffers.poisoned(length, dtype),
            "out_slot_mapping": self.buffers.poisoned(length, slot_dtype),
        }

    def run(self, backend: str) -> tuple[list[int], list[int], list[int]]:
        step_slot_mapping_metadata_(**self.arguments, backend=backend)
        self.buffers.check()
        return tuple(self.arguments[name].tolist() for name in ("out_positions", "out_slot_mapping", "seq_lens"))

    def step_again(self) -> None:
        self.arguments["positions"] = self.arguments["out_positions"][: self.arguments["positions"].shape[0]].clone()


def test_worked_example(backend: str, kernel_device: str) -> None:
    tables = [[3, 8, 6], [2, 4, 9], [1, 7, 5]]
    launch = Launch(kernel_device, [5, 10, 11], [6, 11, 12], tables, 4, 12, "reference", padded=5)
    positions, slots, lengths = launch.run(backend)
    assert positions == [6, 11, 0] + [POISON] * 4
    assert slots == [34, 39, -1, -1, -1, POISON, POISON]
    assert lengths == [7, 12, 1] + [POISON] * 4


def test_freeze_writes_padding_rows_too(backend: str, kernel_device: str) -> None:
    tables = [[3, 8, 6], [2, 4, 9], [1, 7, 5]]
    launch = Launch(kernel_device, [5, 10, 11], [6, 11, 12], tables, 4, 12, "freeze", padded=5)
    positions, slots, lengths = launch.run(backend)
    assert positions == [6, 11, 11, 0, 0, POISON, POISON]
    assert slots == [34, 39, -1, -1, -1, POISON, POISON]
    assert lengths == [7, 12, 12, 0, 0, POISON, POISON]


@BOTH
def test_last_position_is_reachable(backend: str, kernel_device: str, overflow: str) -> None:
    tables = [[7] * 7] * 4
    positions, slots, lengths = Launch(kernel_device, [50, 98, 99, 100], [51, 99, 100, 100], tables, 16, 100, overflow).run(backend)
    after = 0 if overflow == "reference" else 99
    assert positions[:4] == [51, 99, after, after]
    assert slots[:4] == [7 * 16 + 3, 7 * 16 + 3, -1, -1]
    assert lengths[:4] == [52, 100, *([1, 1] if overflow == "reference" else [100, 100])]


def test_once_over_stays_over(backend: str, kernel_device: str) -> None:
    launch = Launch(kernel_device, [10], [11], [[1, 7, 5]], 4, 12, "freeze")
    seen = []
    for _ in range(4):
        seen.append(tuple(values[0] for values in launch.run(backend)))
        launch.step_again()
    assert seen == [(11, 23, 12), (11, -1, 12), (11, -1, 12), (11, -1, 12)]


def test_reference_resumes_after_the_limit(backend: str, kernel_device: str) -> None:
    launch = Launch(kernel_device, [10], [11], [[1, 7, 5]], 4, 12, "reference")
    seen = []
    for _ in range(4):
        seen.append(tuple(values[0] for values in launch.run(backend)))
        launch.step_again()
    assert seen == [(11, 23, 12), (0, -1, 1), (1, 5, 2), (2, 6, 3)]


def test_d1_padding_row_stays_length_zero(backend: str, kernel_device: str) -> None:
    tables = [[3, 4, 5, 6], [0, 0, 0, 0]]
    positions, slots, lengths = Launch(kernel_device, [10, 0], [11, 0], tables, 16, 64, "freeze").run(backend)
    assert (positions[:2], slots[:2], lengths[:2]) == ([11, 0], [59, -1], [12, 0])
    # The policy of the reference raises it.
    assert Launch(kernel_device, [10, 0], [11, 0], tables, 16, 64, "reference").run(backend)[2][:2] == [12, 1]


def test_d3_smaller_batch_in_old_buffers_equals_fresh_buffers(backend: str, kernel_device: str) -> None:
    old = Launch(kernel_device, [5, 6, 7, 8], [6, 7, 8, 9], [[1, 2, 3]] * 4, 4, 12, "freeze")
    old.run(backend)
    small = Launch(kernel_device, [9, 2], [10, 3], [[4, 5, 6], [7, 8, 9]], 4, 12, "freeze", padded=4)
    fresh = small.run(backend)
    old.arguments["seq_lens"][:2] = torch.tensor([10, 3], dtype=torch.int32)
    small.arguments |= {name: old.arguments[name] for name in ("seq_lens", "out_positions", "out_slot_mapping")}
    assert small.run(backend) == fresh
    assert fresh[1][:4] == [26, 31, -1, -1]


@BOTH
def test_c2_positions_past_the_owned_blocks(backend: str, kernel_device: str, overflow: str) -> None:
    launch = Launch(kernel_device, [14, 15], [15, 16], [[2, 5, 7, 9, 0]] * 2, 4, 64, overflow)
    launch.arguments["num_blocks"] = torch.tensor([4, 4], dtype=torch.int32, device=kernel_device)
    assert launch.run(backend)[1][:2] == [39, -1]
    by_block = Launch(kernel_device, [14, 15], [15, 16], [[2, 5, 7, 9, -1]] * 2, 4, 64, overflow)
    assert by_block.run(backend)[1][:2] == [39, -1]


@BOTH
def test_a_table_narrower_than_the_position_needs(backend: str, kernel_device: str, overflow: str) -> None:
    assert Launch(kernel_device, [31], [32], [[3, 4]], 16, 64, overflow).run(backend)[1][0] == -1


@BOTH
def test_slots_beyond_int32(backend: str, kernel_device: str, overflow: str) -> None:
    launch = Launch(kernel_device, [0, 4], [1, 5], [[2**31 - 1, 600_000_000]] * 2, 4, 64, overflow)
    assert launch.run(backend)[1][:2] == [(2**31 - 1) * 4 + 1, 2_400_000_001]


@BOTH
def test_positions_may_be_advanced_in_place(backend: str, kernel_device: str, overflow: str) -> None:
    launch = Launch(kernel_device, [3, 63], [4, 64], [[1, 2]] * 2, 32, 64, overflow)
    apart = launch.run(backend)
    together = Launch(kernel_device, [3, 63], [4, 64], [[1, 2]] * 2, 32, 64, overflow)
    together.arguments["out_positions"][:2] = together.arguments["positions"]
    together.arguments["positions"] = together.arguments["out_positions"][:2]
    assert together.run(backend) == apart


@BOTH
def test_no_rows(backend: str, kernel_device: str, overflow: str) -> None:
    assert Launch(kernel_device, [], [], [], 4, 12, overflow).run(backend)[1] == [POISON] * 2


def oracle(launch: Launch, num_blocks: list[int]) -> tuple[list[int], list[int], list[int]]:
    """The contract, a row at a time."""
    given = launch.arguments
    limit, size, freeze = given["max_model_len"], given["block_size"], given["overflow"] == "freeze"
    positions, slots, lengths = (given[name].tolist() for name in ("out_positions", "out_slot_mapping", "seq_lens"))
    tables, rows = given["block_tables"].tolist(), given["positions"].tolist()
    for i, position in enumerate(rows):
        x, length = position + 1, lengths[i]
        if freeze and length == 0:
            positions[i], slots[i] = 0, -1
        elif x >= limit:
            positions[i], slots[i], lengths[i] = (limit - 1, -1, length) if freeze else (0, -1, 1)
        else:
            block = tables[i][x // size] if x // size < min(len(tables[i]), num_blocks[i]) else -1
            positions[i], slots[i], lengths[i] = x, block * size + x % size if block >= 0 else -1, min(length + 1, limit)
    for i in range(len(rows), given["padded_num_reqs"]):
        slots[i] = -1
        if freeze:
            positions[i] = lengths[i] = 0
    return positions, slots, lengths


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data(), st.sampled_from(["reference", "freeze"]), st.sampled_from([torch.int32, torch.int64]))
def test_ragged_batches(backend: str, kernel_device: str, data: st.DataObject, overflow: str, dtype: torch.dtype) -> None:
    rows, columns = data.draw(st.integers(1, 40)), data.draw(st.integers(1, 4))

    def numbers(low: int, high: int, count: int = rows) -> list[int]:
        return data.draw(st.lists(st.integers(low, high), min_size=count, max_size=count))

    tables = [numbers(-1, 1000, columns) for _ in range(rows)]
    size, limit, padded = data.draw(st.integers(1, 6)), data.draw(st.integers(1, 24)), rows + data.draw(st.integers(0, 3))
    launch = Launch(kernel_device, numbers(0, 26), numbers(0, 24), tables, size, limit, overflow, padded, dtype, dtype)
    num_blocks = numbers(0, columns)
    launch.arguments["num_blocks"] = torch.tensor(num_blocks, dtype=dtype, device=kernel_device)
    expected = oracle(launch, num_blocks)
    assert launch.run(backend) == expected


def test_refusals_write_nothing(backend: str, kernel_device: str) -> None:
    def refused(error: type[Exception], match: str, **changes: Any) -> None:
        launch = Launch(kernel_device, [1, 2, 3], [2, 3, 4], [[1, 2]] * 3, 4, 8, "freeze")
        launch.arguments.update(changes)
        with pytest.raises(error, match=match):
            launch.run(backend)
        assert (launch.arguments["out_positions"] == POISON).all()
        assert (launch.arguments["out_slot_mapping"] == POISON).all()

    refused(ArgumentError, "seq_lens", seq_lens=torch.zeros(2, dtype=torch.int32, device=kernel_device))  # K6
    refused(ArgumentError, "padded_num_reqs", padded_num_reqs=2)
    refused(ArgumentError, "block_tables", block_tables=torch.zeros(2, 2, dtype=torch.int32, device=kernel_device))
    refused(ArgumentTypeError, "positions", positions=torch.zeros(3, device=kernel_device))
    refused(ArgumentError, "block_size", block_size=0)
    refused(ArgumentError, "overflow", overflow="clamp")
