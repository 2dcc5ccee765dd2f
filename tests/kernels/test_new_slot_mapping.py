"""Cache slots of a batch that has grown."""

from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from funcspec.errors import ArgumentError, ArgumentTypeError
from funcspec.kernels.eagle_inputs import copy_and_expand_eagle_inputs_
from funcspec.kernels.new_slot_mapping import compute_new_slot_mapping_

from .guarded import POISON, Buffers


class Launch:
    """One grown batch: for each row the positions of its tokens, the last `new` of which were added, and a table."""

    def __init__(
        self,
        device: str,
        rows: list[tuple[list[int], list[int]]],
        new: int,
        block_size: int,
        max_model_len: int,
        rejected: tuple[int, ...] = (),
        spare: int = 3,
        dtype: torch.dtype = torch.int64,
        num_blocks: list[int] | None = None,
    ) -> None:
        self.buffers = Buffers(device)
        starts = [0]
        for positions, _ in rows:
            starts.append(starts[-1] + len(positions) - new)

        def array(values: list[int]) -> torch.Tensor:
            return torch.tensor(values, dtype=dtype, device=device)

        tokens = starts[-1] + len(rows) * new
        self.arguments: dict[str, Any] = {
            "query_start_loc": array(starts),
            "num_new_tokens": new,
            "positions": array([position for positions, _ in rows for position in positions]),
            "is_rejected": torch.tensor([token in rejected for token in range(tokens)], dtype=torch.bool, device=device),
            "block_tables": self.buffers.table([table for _, table in rows]),
            "block_size": block_size,
            "max_model_len": max_model_len,
            "out_slot_mapping": self.buffers.poisoned(tokens + spare, dtype),
        } | ({} if num_blocks is None else {"num_blocks": array(num_blocks)})

    def run(self, backend: str) -> list[int]:
        compute_new_slot_mapping_(**self.arguments, backend=backend)
        self.buffers.check()
        return self.arguments["out_slot_mapping"].tolist()


def test_each_token_finds_the_table_of_its_row(backend: str, kernel_device: str) -> None:
    rows = [([2, 3, 4], [9, 6]), ([0], [7, 8]), ([5, 6], [1, 2])]
    assert Launch(kernel_device, rows, 1, 4, 64).run(backend) == [38, 39, 24, 28, 9, 10, -1, -1, -1]


def test_rejected_tokens_and_those_past_the_limit_have_no_slot(backend: str, kernel_device: str) -> None:
    rows = [([6, 7, 8, 9], [9, 6, 3]), ([9, 10, 11], [1, 2, 3])]
    assert Launch(kernel_device, rows, 2, 4, 9, rejected=(1,), spare=0).run(backend) == [26, -1, 12, -1, -1, -1, -1]


def test_d19_a_table_narrower_than_the_limit_reuses_no_slot(backend: str, kernel_device: str) -> None:
    rows = [([6, 7, 8, 9], [9, 6])]
    assert Launch(kernel_device, rows, 1, 4, 64, spare=0).run(backend) == [26, 27, -1, -1]
    assert Launch(kernel_device, rows, 1, 4, 64, spare=0, num_blocks=[1]).run(backend) == [-1] * 4


def test_d17_slots_beyond_int32(backend: str, kernel_device: str) -> None:
    rows = [([3, 5], [600_000_000, 2**31 - 1])]
    assert Launch(kernel_device, rows, 1, 4, 64, spare=0).run(backend) == [2_400_000_003, (2**31 - 1) * 4 + 1]


def test_a_row_longer_than_a_tile_and_a_long_tail(backend: str, kernel_device: str) -> None:
    launch = Launch(kernel_device, [(list(range(300)), list(range(80)))], 7, 4, 290, spare=200)
    assert launch.run(backend) == [*range(290), *[-1] * 210]


def test_no_rows(backend: str, kernel_device: str) -> None:
    launch = Launch(kernel_device, [], 1, 4, 64)
    launch.arguments["block_tables"] = torch.zeros(0, 3, dtype=torch.int32, device=kernel_device)
    assert launch.run(backend) == [-1, -1, -1]


def test_slots_of_an_expanded_batch(backend: str, kernel_device: str) -> None:
    """Together with what made the batch: every kept and new token within the limit has its slot, once, and nothing else has one."""
    buffers = Buffers(kernel_device)

    def array(*values: int) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int32, device=kernel_device)

    starts, places = array(0, 3, 5), 9
    flags = [torch.zeros(places, dtype=torch.bool, device=kernel_device) for _ in range(2)]
    positions, slots = buffers.poisoned(places), buffers.poisoned(places + 1)
    copy_and_expand_eagle_inputs_(
        target_token_ids=array(10, 11, 12, 20, 21),
        target_positions=array(4, 5, 6, 13, 14),
        next_token_ids=array(100, 200),
        query_start_loc=starts,
        query_end_loc=array(0, 4),
        padding_token_id=0,
        mask_token_id=1,
        num_new_tokens=2,
        shift_input_ids=False,
        out_input_ids=buffers.poisoned(places),
        out_positions=positions,
        out_is_rejected=flags[0],
        out_is_masked=flags[1],
        out_new_token_indices=buffers.poisoned(4),
        backend=backend,
    )
    compute_new_slot_mapping_(
        query_start_loc=starts,
        num_new_tokens=2,
        positions=positions,
        is_rejected=flags[0],
        block_tables=buffers.table([[2, 3], [0, 1]]),
        block_size=8,
        max_model_len=16,
        out_slot_mapping=slots,
        backend=backend,
    )
    buffers.check()
    assert slots.tolist() == [20, 21, 22, -1, -1, 13, 14, 15, -1, -1]


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data(), st.integers(0, 3), st.integers(1, 6), st.integers(1, 30), st.sampled_from([torch.int32, torch.int64]), st.booleans())
def test_ragged_batches(
    backend: str, kernel_device: str, data: st.DataObject, new: int, size: int, limit: int, dtype: torch.dtype, counted: bool
) -> None:
    columns = data.draw(st.integers(1, 4))
    table = st.lists(st.integers(-1, 1000), min_size=columns, max_size=columns)
    rows = data.draw(st.lists(st.tuples(st.lists(st.integers(-1, 32), min_size=new, max_size=new + 5), table), max_size=5))
    tokens = [(i, position) for i, (positions, _) in enumerate(rows) for position in positions]
    rejected = tuple(data.draw(st.sets(st.integers(0, 30))))
    num_blocks = [data.draw(st.integers(0, columns)) for _ in rows] if counted else None
    expected = []
    for token, (i, position) in enumerate(tokens):
        owned = columns if num_blocks is None else num_blocks[i]
        usable = 0 <= position < limit and position // size < owned and token not in rejected
        block = rows[i][1][position // size] if usable else -1
        expected.append(block * size + position % size if block >= 0 else -1)
    launch = Launch(kernel_device, rows, new, size, limit, rejected, dtype=dtype, num_blocks=num_blocks)
    assert launch.run(backend) == [*expected, -1, -1, -1]


def test_refusals_write_nothing(backend: str, kernel_device: str) -> None:
    def refused(error: type[Exception], match: str, **changes: Any) -> None:
        launch = Launch(kernel_device, [([1, 2], [1]), ([2, 3], [2])], 1, 4, 64)
        launch.arguments.update(changes)
        with pytest.raises(error, match=match):
            launch.run(backend)
        assert (launch.arguments["out_slot_mapping"] == POISON).all()

    refused(ArgumentError, "num_new_tokens", num_new_tokens=-1)
    refused(ArgumentError, "block_size", block_size=0)
    refused(ArgumentError, "max_model_len", max_model_len=0)
    refused(ArgumentError, "block_tables", block_tables=torch.zeros(1, 2, dtype=torch.int32, device=kernel_device))
    refused(ArgumentError, "is_rejected", is_rejected=torch.zeros(3, dtype=torch.bool, device=kernel_device))
    refused(ArgumentTypeError, "is_rejected", is_rejected=torch.zeros(4, dtype=torch.int32, device=kernel_device))
    refused(ArgumentTypeError, "positions", positions=torch.zeros(4, device=kernel_device))
    refused(ArgumentError, "num_blocks", num_blocks=torch.zeros(1, dtype=torch.int32, device=kernel_device))
    launch = Launch(kernel_device, [([1], [1])], 0, 4, 64)
    launch.arguments["out_slot_mapping"] = launch.arguments["positions"]
    with pytest.raises(ArgumentError, match="out_slot_mapping"):
        launch.run(backend)
