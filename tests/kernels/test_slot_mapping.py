"""Cache slots of a flat batch."""

from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from funcspec.errors import ArgumentError, ArgumentTypeError
from funcspec.kernels.prefill_inputs import prepare_prefill_inputs_
from funcspec.kernels.slot_mapping import compute_slot_mapping_

from .guarded import POISON, Buffers


class Launch:
    """One batch, given by the positions of each row, and its buffers."""

    def __init__(
        self,
        device: str,
        rows: list[tuple[int, list[int]]],
        tables: list[list[int]],
        block_size: int,
        spare: int = 3,
        dtype: torch.dtype = torch.int64,
        **optional: list[int],
    ) -> None:
        self.buffers = Buffers(device)
        starts = [0]
        for _, positions in rows:
            starts.append(starts[-1] + len(positions))

        def array(values: list[int]) -> torch.Tensor:
            return torch.tensor(values, dtype=dtype, device=device)

        self.arguments: dict[str, Any] = {
            "idx_mapping": array([state for state, _ in rows]),
            "query_start_loc": array(starts),
            "positions": array([position for _, positions in rows for position in positions]),
            "block_tables": self.buffers.table(tables),
            "block_size": block_size,
            "out_slot_mapping": self.buffers.poisoned(starts[-1] + spare, dtype),
        } | {name: array(values) for name, values in optional.items()}

    def run(self, backend: str) -> list[int]:
        compute_slot_mapping_(**self.arguments, backend=backend)
        self.buffers.check()
        return self.arguments["out_slot_mapping"].tolist()


def test_worked_example_and_tail(backend: str, kernel_device: str) -> None:
    launch = Launch(kernel_device, [(1, [1, 2, 3]), (-1, [1, 2, 3]), (0, [4])], [[9, 6], [7, 8]], 4)
    assert launch.run(backend) == [29, 30, 31, -1, -1, -1, 24, -1, -1, -1]


def test_c1_look_ahead_inside_reserved_blocks(backend: str, kernel_device: str) -> None:
    assert Launch(kernel_device, [(0, [14, 15, 16, 17, 18])], [[2, 5, 7, 9, 11]], 4, spare=0).run(backend) == [38, 39, 44, 45, 46]


def test_c2_positions_past_the_reservation_are_never_block_zero(backend: str, kernel_device: str) -> None:
    rows, tables = [(0, [15, 16])], [[2, 5, 7, 9, 0]]
    assert Launch(kernel_device, rows, tables, 4, spare=0, num_blocks=[4]).run(backend) == [39, -1]
    assert Launch(kernel_device, rows, [[2, 5, 7, 9, -1]], 4, spare=0).run(backend) == [39, -1]
    assert Launch(kernel_device, [(0, [15, 16, 400])], [[2, 5, 7, 9]], 4, spare=0).run(backend) == [39, -1, -1]


def test_c5_a_previous_owners_block_in_the_tail_of_a_row(backend: str, kernel_device: str) -> None:
    launch = Launch(kernel_device, [(0, [13, 14, 15, 16, 17])], [[3, 7]], 16, spare=0, num_blocks=[1])
    assert launch.run(backend) == [61, 62, 63, -1, -1]


def test_d3_smaller_batch_in_old_buffers_equals_fresh_buffers(backend: str, kernel_device: str) -> None:
    tables = [[1, 2], [3, 4]]
    old = Launch(kernel_device, [(0, [0, 1, 2]), (1, [5, 6, 7])], tables, 4, spare=0)
    old.run(backend)
    small = Launch(kernel_device, [(1, [2])], tables, 4, spare=5)
    fresh = small.run(backend)
    small.arguments["out_slot_mapping"] = old.arguments["out_slot_mapping"]
    assert small.run(backend) == fresh == [14, -1, -1, -1, -1, -1]


def test_slots_beyond_int32(backend: str, kernel_device: str) -> None:
    launch = Launch(kernel_device, [(0, [3, 5])], [[600_000_000, 2**31 - 1]], 4, spare=0)
    assert launch.run(backend) == [2_400_000_003, (2**31 - 1) * 4 + 1]


def test_states_and_positions_that_do_not_exist(backend: str, kernel_device: str) -> None:
    rows = [(2, [0]), (-5, [1]), (0, [-1, -3, 2])]
    assert Launch(kernel_device, rows, [[1], [2]], 4, spare=0).run(backend) == [-1, -1, -1, -1, 6]


def test_no_rows(backend: str, kernel_device: str) -> None:
    assert Launch(kernel_device, [], [[1]], 4, spare=2).run(backend) == [-1, -1]


def test_a_query_longer_than_a_tile(backend: str, kernel_device: str) -> None:
    launch = Launch(kernel_device, [(0, list(range(300)))], [list(range(80))], 4, spare=200)
    assert launch.run(backend) == [*range(300), *[-1] * 200]


def test_frozen_prefill_writes_each_slot_once(backend: str, kernel_device: str) -> None:
    """Rejected tokens and tokens past the limit get no slot; the others get one each."""
    buffers = Buffers(kernel_device)

    def array(*values: int) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int32, device=kernel_device)

    out = {f"out_{name}": buffers.poisoned(12) for name in ("input_ids", "positions", "is_live")}
    out |= {"out_last_token_indices": buffers.poisoned(2), "out_query_start_loc": buffers.poisoned(3), "out_seq_lens": buffers.poisoned(2)}
    prepare_prefill_inputs_(
        target_input_ids=array(1, 2, 3, 4, 5, 6, 7),
        target_positions=array(28, 29, 30, 31, 4, 5, 6),
        last_sampled=array(98, 99),
        idx_mapping=array(0, 1),
        query_start_loc=array(0, 4, 7),
        seq_lens=array(32, 7),
        num_rejected=array(0, 2),
        max_num_reqs=2,
        max_model_len=32,
        overflow="freeze",
        **out,
        backend=backend,
    )
    slots = buffers.poisoned(12)
    compute_slot_mapping_(
        idx_mapping=array(0, 1),
        query_start_loc=out["out_query_start_loc"],
        positions=out["out_positions"],
        is_live=out["out_is_live"],
        block_tables=buffers.table([[0, 1], [2, 3]]),
        block_size=16,
        out_slot_mapping=slots,
        backend=backend,
    )
    buffers.check()
    assert slots.tolist() == [28, 29, 30, 31, -1, 36, 37, -1, -1, -1, -1, -1]


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data(), st.integers(1, 6), st.sampled_from([torch.int32, torch.int64]), st.booleans(), st.booleans())
def test_ragged_batches(
    backend: str, kernel_device: str, data: st.DataObject, size: int, dtype: torch.dtype, counted: bool, masked: bool
) -> None:
    states, columns = data.draw(st.integers(1, 4)), data.draw(st.integers(1, 4))

    def numbers(low: int, high: int, count: int) -> list[int]:
        return data.draw(st.lists(st.integers(low, high), min_size=count, max_size=count))

    tables = [numbers(-1, 1000, columns) for _ in range(states)]
    rows = data.draw(st.lists(st.tuples(st.integers(-1, states - 1), st.lists(st.integers(-1, 26), max_size=6)), max_size=5))
    tokens = [(state, position) for state, positions in rows for position in positions]
    num_blocks, is_live = numbers(0, columns, states), numbers(0, 1, len(tokens))
    optional = ({"num_blocks": num_blocks} if counted else {}) | ({"is_live": is_live} if masked else {})
    expected = []
    for (state, position), live in zip(tokens, is_live, strict=True):
        width = min(columns, num_blocks[state]) if counted else columns
        usable = state >= 0 and position >= 0 and position // size < width and (live or not masked)
        block = tables[state][position // size] if usable else -1
        expected.append(block * size + position % size if block >= 0 else -1)
    launch = Launch(kernel_device, rows, tables, size, dtype=dtype, **optional)
    assert launch.run(backend) == [*expected, -1, -1, -1]


def test_refusals_write_nothing(backend: str, kernel_device: str) -> None:
    def refused(error: type[Exception], match: str, **changes: Any) -> None:
        launch = Launch(kernel_device, [(0, [1]), (1, [2]), (0, [3])], [[1], [2]], 4)
        launch.arguments.update(changes)
        with pytest.raises(error, match=match):
            launch.run(backend)
        assert (launch.arguments["out_slot_mapping"] == POISON).all()

    refused(ArgumentError, "query_start_loc", query_start_loc=torch.zeros(2, dtype=torch.int32, device=kernel_device))  # K6
    refused(ArgumentError, "is_live", is_live=torch.zeros(2, dtype=torch.int32, device=kernel_device))
    refused(ArgumentError, "num_blocks", num_blocks=torch.zeros(1, dtype=torch.int32, device=kernel_device))
    refused(ArgumentError, "block_tables", block_tables=torch.zeros(2, dtype=torch.int32, device=kernel_device))
    refused(ArgumentTypeError, "positions", positions=torch.zeros(3, device=kernel_device))
    refused(ArgumentError, "block_size", block_size=0)
