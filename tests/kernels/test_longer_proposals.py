"""The longer one of two proposals."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from funcspec.errors import ArgumentError
from funcspec.kernels.longer_proposals import longer_proposals_
from funcspec.kernels.op import Backend

from .guarded import POISON, Buffers

Proposal = tuple[Sequence[int], int]
"""K tokens, and how many of them count."""


def run(backend: Backend, device: str, first: Sequence[Proposal], second: Sequence[Proposal], most: int) -> list[list[int]]:
    """Run a batch between guard bands and compare it with the definition; what each row is left with."""
    buffers, rows = Buffers(device), len(first)
    arguments: dict[str, torch.Tensor] = {
        "out_proposals": buffers.poisoned(rows * most).view(rows, most),
        "out_counts": buffers.poisoned(rows),
    }
    for name, side in (("first", first), ("second", second)):
        arguments[f"{name}_proposals"] = buffers.holding([token for tokens, _ in side for token in tokens]).view(rows, most)
        arguments[f"{name}_counts"] = buffers.holding([count for _, count in side])
    before = {name: value.clone() for name, value in arguments.items() if not name.startswith("out")}
    longer_proposals_(**arguments, backend=backend)
    buffers.check()
    assert all(torch.equal(arguments[name], value) for name, value in before.items())
    expected = [max(tokens_of(one), tokens_of(other), key=len) for one, other in zip(first, second, strict=True)]
    assert arguments["out_counts"].tolist() == [len(tokens) for tokens in expected]
    assert arguments["out_proposals"].tolist() == [tokens + [-1] * (most - len(tokens)) for tokens in expected]
    return expected


def tokens_of(proposal: Proposal) -> list[int]:
    tokens = list(proposal[0][: max(proposal[1], 0)])
    return tokens[: next((place for place, token in enumerate(tokens) if token < 0), len(tokens))]


def test_by_hand(backend: Backend, kernel_device: str) -> None:
    first: list[Proposal] = [([1, 2, 3], 2), ([1, 2, 3], 2), ([1, 2, 3], 2), ([1, 2, 3], 0), ([1, -1, 3], 3), ([1, 2, 3], -4)]
    second: list[Proposal] = [([7, 8, 9], 1), ([7, 8, 9], 2), ([7, 8, 9], 3), ([7, 8, 9], 0), ([7, 8, -1], 3), ([7, 8, 9], 99)]
    assert run(backend, kernel_device, first, second, 3) == [[1, 2], [1, 2], [7, 8, 9], [], [7, 8], [7, 8, 9]]


@st.composite
def batches(draw: st.DrawFn) -> dict[str, Any]:
    rows, most = draw(st.integers(0, 5)), draw(st.integers(0, 6))
    tokens = st.lists(st.one_of(st.integers(0, 9), st.integers(0, 9), st.just(-1)), min_size=most, max_size=most)
    side = st.lists(st.tuples(tokens, st.integers(-1, most + 1)), min_size=rows, max_size=rows)
    return {"first": draw(side), "second": draw(side), "most": most}


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=60)
@given(batch=batches())
def test_ragged_batches(backend: Backend, kernel_device: str, batch: dict[str, Any]) -> None:
    if batch["first"]:
        run(backend, kernel_device, **batch)


def test_refusals_write_nothing(backend: Backend, kernel_device: str) -> None:
    def array(*shape: int) -> torch.Tensor:
        return torch.full(shape, 1, dtype=torch.int32, device=kernel_device)

    def refused(match: str, **changes: Any) -> None:
        outputs = {"out_proposals": array(2, 3).fill_(POISON), "out_counts": array(2).fill_(POISON)}
        first = {"first_proposals": array(2, 3), "first_counts": array(2)}
        second = {"second_proposals": array(2, 3), "second_counts": array(2)}
        with pytest.raises(ArgumentError, match=match):
            longer_proposals_(**first | second | outputs | changes, backend=backend)
        assert all((buffer == POISON).all() for buffer in outputs.values())

    refused(r"first_proposals: expected the shape \(2, 3\) of out_proposals, got \(2, 4\)", first_proposals=array(2, 4))
    refused("second_proposals", second_proposals=array(3, 3))
    refused("second_proposals: expected consecutive entries", second_proposals=array(3, 2).T)
    refused("first_counts: expected one entry for each of 2 rows", first_counts=array(3))
    refused("second_counts", second_counts=array(1))
    refused("out_counts", out_counts=array(3).fill_(POISON))
    refused("out_proposals", out_proposals=array(6).fill_(POISON))
