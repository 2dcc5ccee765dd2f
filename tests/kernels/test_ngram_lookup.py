"""Prompt lookup against its definition."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from lookup import found

from funcspec.errors import ArgumentError
from funcspec.kernels import ngram_lookup
from funcspec.kernels.ngram_lookup import ngram_lookup_
from funcspec.kernels.op import Backend

from .guarded import POISON, Buffers

READ = ("tokens", "num_tokens", "is_live")
ROW_SETTINGS: dict[str, Any] = {"max_ngram": 3, "min_ngram": 1, "window": None, "latest": False}


@pytest.fixture(params=["reference", "host", "triton"])
def backend(request: pytest.FixtureRequest, kernel_device: str) -> Backend:
    if request.param == "host" and kernel_device != "cpu":
        pytest.skip("the host form is for CPU tensors")
    return request.param


@pytest.fixture
def small_tiles(monkeypatch: pytest.MonkeyPatch) -> int:
    """Tiles so small that short rows have many of them."""
    monkeypatch.setattr(ngram_lookup, "TILE", 4)
    return 4


def look_up(
    backend: Backend,
    device: str,
    rows: Sequence[Sequence[int]],
    most: int,
    *,
    live: Sequence[int] | None = None,
    length: int | None = None,
    behind: int = 5,
    **changes: Any,
) -> list[list[int]]:
    """Run a batch between guard bands, compare it with the definition; what each row is proposed.

    Args:
        behind: token that fills the rows past their committed length; it may not matter.
    """
    options = ROW_SETTINGS | changes
    buffers = Buffers(device)
    length = length or max(map(len, rows), default=1) or 1
    whole = buffers.poisoned(len(rows) * (length + 3)).view(len(rows), length + 3)
    buffers.bands.append(whole[:, length:])
    tokens = whole[:, :length]
    tokens.copy_(torch.tensor([[*row, *[behind] * (length - len(row))] for row in rows], dtype=torch.int32))
    live = [1] * len(rows) if live is None else live
    arguments: dict[str, Any] = {
        "tokens": tokens,
        "num_tokens": buffers.holding([len(row) for row in rows]),
        "is_live": buffers.holding(live),
        "out_proposals": buffers.poisoned(len(rows) * most).view(len(rows), most),
        "out_counts": buffers.poisoned(len(rows)),
    }
    before = {name: arguments[name].clone() for name in READ}
    ngram_lookup_(**arguments, **options, backend=backend)
    buffers.check()
    assert all(torch.equal(arguments[name], value) for name, value in before.items())
    proposals, counts = arguments["out_proposals"].tolist(), arguments["out_counts"].tolist()
    expected = [found(row, most, **options) if alive else [] for row, alive in zip(rows, live, strict=True)]
    assert counts == [len(row) for row in expected]
    assert proposals == [row + [-1] * (most - len(row)) for row in expected]
    return expected


def test_g1_the_known_table(backend: Backend, kernel_device: str) -> None:
    table: list[tuple[list[int], tuple[int, int, int], list[int]]] = [
        ([1, 2, 3, 4, 1, 2, 3, 5, 6], (2, 2, 2), []),
        ([1, 2, 3, 4, 1, 2, 3], (2, 2, 3), [4, 1, 2]),
        ([1, 3, 6, 2, 3, 4, 1, 2, 3], (1, 1, 2), [6, 2]),
        ([2, 3, 4, 5, 1, 2, 3, 4, 1, 2, 3, 4], (3, 4, 2), [1, 2]),
        ([1, 2, 3, 100, 1, 2, 3, 200, 1, 2, 3, 300, 1, 2, 3], (3, 3, 2), [100, 1]),
    ]
    for text, (least, most, drafts), expected in table:
        assert look_up(backend, kernel_device, [text], drafts, min_ngram=least, max_ngram=most) == [expected]


def test_the_last_occurrence_on_demand(backend: Backend, kernel_device: str) -> None:
    text = [1, 2, 3, 100, 1, 2, 3, 200, 1, 2, 3, 300, 1, 2, 3]
    assert look_up(backend, kernel_device, [text], 2, latest=True) == [[300, 1]]
    # The longest match wins over a later one.
    assert look_up(backend, kernel_device, [[8, 1, 2, 9, 7, 2, 6, 1, 2]], 2, latest=True) == [[9, 7]]


def test_a_proposal_ends_with_the_text(backend: Backend, kernel_device: str) -> None:
    assert look_up(backend, kernel_device, [[7, 7, 7, 7]], 8) == [[7]]
    assert look_up(backend, kernel_device, [[7, 7, 7, 7]], 8, max_ngram=1) == [[7, 7, 7]]
    assert look_up(backend, kernel_device, [[7, 7]], 8, latest=True) == [[7]]
    assert look_up(backend, kernel_device, [[4, 5, 4, 5, 4]], 8) == [[5, 4]]


def test_short_rows_find_nothing(backend: Backend, kernel_device: str) -> None:
    assert look_up(backend, kernel_device, [[], [5], [5, 6], [5, 5], []], 3, behind=5) == [[], [], [], [5], []]
    assert look_up(backend, kernel_device, [[5, 5], [5, 5, 5]], 3, min_ngram=2) == [[], [5]]
    assert look_up(backend, kernel_device, [[], [], []], 3) == [[], [], []]


def test_rows_that_are_not_live_are_left_out(backend: Backend, kernel_device: str) -> None:
    rows = [[1, 2, 1], [1, 2, 1], [], [3, 4, 3]]
    assert look_up(backend, kernel_device, rows, 3, live=[1, 0, 0, 1]) == [[2, 1], [], [], [4, 3]]


def test_what_lies_past_the_committed_length_does_not_matter(backend: Backend, kernel_device: str) -> None:
    for behind in (-1, 1, 2, 2**31 - 1):
        assert look_up(backend, kernel_device, [[1, 2, 3, 1]], 8, behind=behind, length=16) == [[2, 3, 1]]


def test_the_window_counts_the_newest_tokens(backend: Backend, kernel_device: str) -> None:
    text = [1, 2, 7, 7, 1, 2, 8, 8, 1, 2]
    expected = {10: [7, 7], 9: [8, 8], 8: [8, 8], 6: [8, 8], 5: [8, 8], 4: [], 2: [], 1: [], 50: [7, 7], 2**40: [7, 7]}
    for window, proposal in expected.items():
        assert look_up(backend, kernel_device, [text], 2, window=window) == [proposal], window


@pytest.mark.parametrize("size", range(1, 6))
@pytest.mark.parametrize("most", range(10))
def test_h7_every_number_of_drafts_and_size(backend: Backend, kernel_device: str, most: int, size: int) -> None:
    row = [*range(20, 40), 96, 0, *range(22, 28)]
    assert look_up(backend, kernel_device, [row, row[:-1]], most, max_ngram=size, min_ngram=size)[0] == row[8:][:most]


@pytest.mark.parametrize("length", [32, 33, 128, 257, 1025, 4096, 5000])
def test_g2_around_the_sizes_of_tiles(backend: Backend, kernel_device: str, length: int) -> None:
    """A match in front of, across and behind each border, and as far away as can be."""
    rows = []
    for place in {0, 1, length // 2, length - 9, *(border + shift for border in (32, 128, 256, 1024, 2048, 4096) for shift in (-2, -1, 0))}:
        if place <= length - 9:
            row = [*range(1000, 1000 + length)]
            row[place : place + 3] = row[-3:] = [1, 2, 3]
            rows.append(row)
    out = look_up(backend, kernel_device, rows, 5)
    assert all(len(proposal) == 5 for proposal in out)


def test_many_rows_of_two_tokens(backend: Backend, kernel_device: str) -> None:
    generator = np.random.default_rng(1)
    rows = [generator.integers(0, 2, generator.integers(0, 700)).tolist() for _ in range(20)]
    for latest in (False, True):
        look_up(backend, kernel_device, rows, 8, latest=latest, max_ngram=12)


def test_addresses_are_64_bit_wide(backend: Backend, kernel_device: str) -> None:
    """The third row begins 2^31 tokens behind the first; nearly all of it is virtual memory that is never touched."""
    stride = 2**30
    try:
        whole = torch.empty(2 * stride + 8, dtype=torch.int32, device=kernel_device)
    except RuntimeError:
        pytest.skip("too little address space")
    tokens = whole.as_strided((3, 8), (stride, 1))
    tokens.copy_(torch.tensor([[1, 2, 3, 1, 0, 0, 0, 0], [5] * 8, [7, 8, 9, 6, 7, 8, 0, 0]]))
    arrays = [torch.tensor(values, dtype=torch.int32, device=kernel_device) for values in ([4, 0, 6], [1, 1, 1], [POISON] * 3)]
    proposals = torch.full((3, 2), POISON, dtype=torch.int32, device=kernel_device)
    outputs = {"out_proposals": proposals, "out_counts": arrays[2]}
    ngram_lookup_(tokens=tokens, num_tokens=arrays[0], is_live=arrays[1], **outputs, **ROW_SETTINGS, backend=backend)
    assert proposals.tolist() == [[2, 3], [-1, -1], [9, 6]] and arrays[2].tolist() == [2, 0, 2]


@st.composite
def batches(draw: st.DrawFn) -> dict[str, Any]:
    token = st.integers(0, draw(st.sampled_from([0, 1, 2, 96])))
    rows = draw(st.lists(st.lists(token, max_size=30), min_size=1, max_size=5))
    max_ngram = draw(st.integers(1, 6))
    return {
        "rows": rows,
        "most": draw(st.integers(0, 8)),
        "live": draw(st.lists(st.integers(0, 1), min_size=len(rows), max_size=len(rows))) if draw(st.booleans()) else None,
        "length": draw(st.integers(30, 40)),
        "behind": draw(st.one_of(st.just(-1), token)),
        "max_ngram": max_ngram,
        "min_ngram": draw(st.integers(1, max_ngram)),
        "window": draw(st.one_of(st.none(), st.integers(1, 35))),
        "latest": draw(st.booleans()),
    }


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=150)
@given(batch=batches())
def test_ragged_batches(backend: Backend, kernel_device: str, small_tiles: int, batch: dict[str, Any]) -> None:
    look_up(backend, kernel_device, **batch)


def test_refusals_write_nothing(backend: Backend, kernel_device: str) -> None:
    def array(*shape: int) -> torch.Tensor:
        return torch.full(shape, 1, dtype=torch.int32, device=kernel_device)

    def refused(match: str, **changes: Any) -> None:
        outputs = {"out_proposals": array(2, 3).fill_(POISON), "out_counts": array(2).fill_(POISON)}
        arguments = ROW_SETTINGS | {"tokens": array(2, 9), "num_tokens": array(2), "is_live": array(2)} | outputs | changes
        with pytest.raises(ArgumentError, match=match):
            ngram_lookup_(**arguments, backend=backend)
        assert all((buffer == POISON).all() for buffer in outputs.values())

    refused(r"num_tokens: expected one entry for each of 2 rows, got shape \(3,\)", num_tokens=array(3))
    refused("is_live", is_live=array(1))
    refused("out_counts", out_counts=array(3))
    refused(r"out_proposals: expected \[2, K\]", out_proposals=array(3, 3))
    refused("out_proposals", out_proposals=array(6))
    refused("min_ngram: expected from 1 to max_ngram = 3, got 4", min_ngram=4)
    refused("min_ngram", min_ngram=0)
    refused("window: expected None or at least 1, got 0", window=0)
