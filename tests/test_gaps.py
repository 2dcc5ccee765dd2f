"""Every array of every kernel, handed over with gaps between its entries: refused before anything is written, or right.

A kernel that addresses an array as if it had no gaps reads other entries than those it is given, and nothing fails.
"""

import contextlib
import importlib
import pkgutil
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from all_drafters import ALL, made
from one_pass import HEAT, PROMPTS, SEEDS, TARGET
from oracle import config

import funcspec as fs
import funcspec.kernels
from funcspec.errors import ArgumentError, ArgumentTypeError
from funcspec.kernels.new_slot_mapping import compute_new_slot_mapping_
from funcspec.kernels.noise import gumbel_from_words_, noise_words_
from funcspec.kernels.op import Op
from funcspec.kernels.rope_positions import rope_positions_
from funcspec.kernels.slot_mapping import compute_slot_mapping_
from funcspec.noise import TARGET as TARGET_STREAM

from .golden_case import Case
from .test_golden import archive, runs

CALLS = 6
"""Recorded calls of one kernel; they are spread over what calls it."""

Call = dict[str, Any]


def copied(call: Call, device: str | None = None) -> Call:
    """Private copies of all arrays, perhaps on another device."""
    return {name: value.to(device or value.device, copy=True) if isinstance(value, torch.Tensor) else value for name, value in call.items()}


@cache
def every_op() -> dict[str, Op]:
    """All operations by name, public or not."""
    modules = [
        importlib.import_module(f"{funcspec.kernels.__name__}.{one.name}") for one in pkgutil.iter_modules(funcspec.kernels.__path__)
    ]
    return {value.name: value for module in modules for value in vars(module).values() if isinstance(value, Op)}


def a_state(name: str, rule: fs.rules.Rule) -> None:
    """Two rounds with a drafter, and two of a fork, which copies blocks."""
    drafter = made(name)
    most = config(4, 28, 3, rule=rule, block_size=4)
    state, _ = fs.admit(fs.init(most, TARGET, drafter), TARGET, drafter, PROMPTS, seeds=SEEDS, temperature=HEAT, rows=[0, 2, 3])
    for one in (state, fs.fork(state)):
        for _ in range(2):
            one, _ = fs.step_round(one, TARGET, drafter)


@cache
def recorded() -> dict[str, list[Call]]:
    """Calls of every operation in rounds of all drafters and in golden cases."""
    calls: dict[str, list[Call]] = {}
    real = Op.__call__

    def note(op: Op, *, backend: str | None = None, **arguments: Any) -> None:
        kept = calls.setdefault(op.name, [])
        if len(kept) < CALLS * 40:
            kept.append(copied(arguments))
        real(op, backend=backend, **arguments)  # type: ignore[arg-type]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Op, "__call__", note)
        for name in ALL:
            for rule in (fs.rules.coupled, fs.rules.ratio):
                a_state(name, rule)
        for path in sorted((Path(__file__).parent / "golden").glob("*.npz")):
            golden(path)
        direct()
    return {name: kept[:: -(-len(kept) // CALLS)] for name, kept in calls.items()}


def golden(path: Path) -> None:
    """Some cases of an archive."""
    cases = runs(path)
    for key, _, adapter in cases[:: max(len(cases) // 8, 1)]:
        if not adapter.is_host:
            with contextlib.suppress(ArgumentError):  # cases that no correct pipeline produces
                adapter.run(Case.of(archive(path)[key]))


def direct() -> None:
    """Operations that neither rounds nor golden cases reach."""

    def ints(*values: int) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int32)

    words = ints(5, -7, 11, 0)
    gumbel_from_words_(words=words, out_noise=torch.zeros(4))
    pairs = torch.stack([words, ints(1, 2, 3, 4)], 1)
    positions, nonces, ids = ints(3, 1, 4, 1), ints(0, 1, 0, 2), ints(8, 9, 10, 7)
    noise_words_(seed=pairs, positions=positions, nonces=nonces, stream=TARGET_STREAM, token_ids=ids, out_words=ints(0, 0, 0, 0))
    blocks, starts = torch.arange(12, dtype=torch.int32).view(3, 4), ints(0, 2, 3)
    places: Call = {"query_start_loc": starts, "positions": ints(5, 6, 2), "block_tables": blocks, "num_blocks": ints(4, 3, 2)}
    places |= {"block_size": 2, "out_slot_mapping": ints(0, 0, 0, 0, 0)}
    compute_slot_mapping_(**places, idx_mapping=ints(2, 0), is_live=ints(1, 1, 1))
    longer = places | {"query_start_loc": ints(0, 1, 2, 3), "num_new_tokens": 1, "out_slot_mapping": ints(*[0] * 9)}
    flags = torch.tensor([True, False, False, True, False, False])
    compute_new_slot_mapping_(**longer | {"positions": ints(5, 6, 2, 3, 1, 0)}, is_rejected=flags, max_model_len=8)
    table = torch.arange(24, dtype=torch.int32).view(2, 3, 4)
    rope_positions_(
        table=table, token_rows=ints(1, 0, -1), positions=ints(2, 3, 0), out_rope_positions=torch.zeros(3, 3, dtype=torch.int32)
    )
    early = config(2, 28, 2, rule=fs.rules.greedy, block_size=4, allows_min_tokens=True)
    state, _ = fs.admit(fs.init(early, TARGET), TARGET, None, PROMPTS[:2], min_tokens=[5, 2], stop_ids=[4, 5])
    fs.step_round(state, TARGET, None)


def test_all_are_recorded() -> None:
    assert not set(every_op()) - set(recorded())


def with_gaps(array: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
    """The same values in other layouts. What lies in the gaps could be values too, but wrong ones."""
    others = array.flatten().flip(0).view(array.shape)
    yield "every other", torch.stack([array, others], -1)[..., 0]
    if array.dim() > 1:
        for dim in range(array.dim() - 1):
            yield f"gaps in dimension {dim}", torch.stack([array, others], dim + 1).select(dim + 1, 0)
        yield "transposed", array.transpose(-1, -2).contiguous().transpose(-1, -2)


@pytest.mark.parametrize("name", sorted(every_op()))
def test_arrays_with_gaps_are_refused_or_right(name: str, backend: str, kernel_device: str) -> None:
    op, layouts = every_op()[name], 0
    for call in (copied(call, kernel_device) for call in recorded()[name]):
        plain = copied(call)
        op(**plain, backend=backend)  # type: ignore[arg-type]
        for argument, array in call.items():
            if not isinstance(array, torch.Tensor) or array.dim() == 0 or array.numel() < 2:
                continue
            for layout, odd in with_gaps(array):
                if odd.is_contiguous():
                    continue
                layouts += 1
                given, label = copied(call) | {argument: odd}, f"{argument}, {layout}"
                assert torch.equal(odd, array)
                try:
                    op(**given, backend=backend)  # type: ignore[arg-type]
                except (ArgumentError, ArgumentTypeError):
                    expected = call  # nothing is written
                else:
                    expected = plain
                for written in op.writes:
                    if isinstance(call.get(written), torch.Tensor):
                        torch.testing.assert_close(
                            given[written], expected[written], rtol=0, atol=0, equal_nan=True, msg=f"{label}: {written}"
                        )
    assert layouts
