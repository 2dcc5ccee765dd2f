"""What a table says comes next."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from funcspec.errors import ArgumentError
from funcspec.kernels.op import Backend
from funcspec.kernels.read_ahead import read_ahead_

from .guarded import POISON, Buffers


def run(
    backend: Backend, device: str, table: Sequence[Sequence[int]], lengths: Sequence[int], most: int, live: Sequence[int] | None = None
) -> list[list[int]]:
    """Run a batch between guard bands and compare it with the definition; what each row is proposed."""
    buffers, rows = Buffers(device), len(lengths)
    live = [1] * rows if live is None else live
    known, num_tokens, is_live = buffers.table(table), buffers.holding(lengths), buffers.holding(live)
    proposals, counts = buffers.poisoned(rows * most).view(rows, most), buffers.poisoned(rows)
    read_ahead_(table=known, num_tokens=num_tokens, is_live=is_live, out_proposals=proposals, out_counts=counts, backend=backend)
    buffers.check()
    assert known.tolist() == [list(line) for line in table] and num_tokens.tolist() == list(lengths) and is_live.tolist() == list(live)
    expected: list[list[int]] = []
    for row, (n, alive) in enumerate(zip(lengths, live, strict=True)):
        ahead = list(table[row][n : n + most]) if alive and row < len(table) else []
        expected.append(ahead[: ahead.index(-1)] if -1 in ahead else ahead)
    assert counts.tolist() == [len(tokens) for tokens in expected]
    assert proposals.tolist() == [tokens + [-1] * (most - len(tokens)) for tokens in expected]
    return expected


def test_by_hand(backend: Backend, kernel_device: str) -> None:
    table = [[5, 6, 7, 8], [5, 6, -1, 8], [1, 2, 3, 4], [-1] * 4]
    for lengths, expected in (
        ([0, 0, 0, 0], [[5, 6, 7], [5, 6], [1, 2, 3], []]),
        ([2, 2, 3, 0], [[7, 8], [], [4], []]),
        ([4, 3, 9, 1], [[], [8], [], []]),
    ):
        assert run(backend, kernel_device, table, lengths, 3) == expected
    assert run(backend, kernel_device, table[:2], [1, 1, 1], 2) == [[6, 7], [6], []]
    assert run(backend, kernel_device, table, [1, 1], 2, live=[0, 1]) == [[], [6]]


@st.composite
def batches(draw: st.DrawFn) -> dict[str, Any]:
    width, rows = draw(st.integers(1, 8)), draw(st.integers(1, 4))
    token = st.one_of(st.integers(0, 9), st.integers(0, 9), st.just(-1))
    return {
        "table": draw(st.lists(st.lists(token, min_size=width, max_size=width), min_size=1, max_size=5)),
        "lengths": draw(st.lists(st.integers(0, 10), min_size=rows, max_size=rows)),
        "live": draw(st.lists(st.integers(0, 1), min_size=rows, max_size=rows)),
        "most": draw(st.integers(0, 6)),
    }


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=60)
@given(batch=batches())
def test_ragged_batches(backend: Backend, kernel_device: str, batch: dict[str, Any]) -> None:
    run(backend, kernel_device, **batch)


def test_refusals_write_nothing(backend: Backend, kernel_device: str) -> None:
    def array(*shape: int) -> torch.Tensor:
        return torch.full(shape, 1, dtype=torch.int32, device=kernel_device)

    def refused(match: str, **changes: Any) -> None:
        outputs = {"out_proposals": array(2, 3).fill_(POISON), "out_counts": array(2).fill_(POISON)}
        arguments = {"table": array(2, 9), "num_tokens": array(2), "is_live": array(2)} | outputs | changes
        with pytest.raises(ArgumentError, match=match):
            read_ahead_(**arguments, backend=backend)
        assert all((buffer == POISON).all() for buffer in outputs.values())

    refused(r"table: expected \[N, M\], both at least 1, got \(9,\)", table=array(9))
    refused("table", table=array(0, 9))
    refused("num_tokens: expected one entry for each of 2 rows", num_tokens=array(3))
    refused("is_live", is_live=array(1))
    refused("out_counts", out_counts=array(3).fill_(POISON))
    refused("out_proposals", out_proposals=array(6).fill_(POISON))
