"""`write_kv_` and `copy_blocks_` against plain loops."""

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from funcspec.errors import ArgumentError, ArgumentTypeError
from funcspec.kernels.kv_cache import copy_blocks_, write_kv_

GUARD = 32
POISON = -7.5
RUNS = settings(suppress_health_check=[HealthCheck.function_scoped_fixture])


def guarded(shape: tuple[int, ...], dtype: torch.dtype, device: str) -> tuple[torch.Tensor, torch.Tensor]:
    """A poisoned buffer of `shape` between two guard bands, and the whole allocation."""
    whole = torch.full((int(np.prod(shape)) + 2 * GUARD,), POISON, dtype=dtype, device=device)
    return whole[GUARD:-GUARD].view(shape), whole


def check_guards(*wholes: torch.Tensor) -> None:
    for whole in wholes:
        assert (whole[:GUARD] == POISON).all() and (whole[-GUARD:] == POISON).all()


@RUNS
@given(
    slots=st.lists(st.integers(-1, 14), max_size=4, unique=True).flatmap(lambda s: st.permutations([*s, -1])),
    block_size=st.sampled_from([1, 3, 5]),
    heads=st.integers(1, 3),
    head_dim=st.sampled_from([1, 6, 16]),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
    index_dtype=st.sampled_from([torch.int32, torch.int64]),
)
def test_writes_exactly_the_named_slots(
    backend: Any,
    kernel_device: str,
    slots: list[int],
    block_size: int,
    heads: int,
    head_dim: int,
    dtype: torch.dtype,
    index_dtype: torch.dtype,
) -> None:
    shape = (15 // block_size, block_size, heads, head_dim)
    key_cache, key_whole = guarded(shape, dtype, kernel_device)
    value_cache, value_whole = guarded(shape, dtype, kernel_device)
    # Slices of one wider array, as a fused product hands them over.
    fused = torch.randn(len(slots), 3 * heads, head_dim, generator=torch.Generator().manual_seed(1)).to(dtype).to(kernel_device)
    key, value = fused[:, heads : 2 * heads], fused[:, 2 * heads :]
    write_kv_(
        backend=backend,
        out_key_cache=key_cache,
        out_value_cache=value_cache,
        key=key,
        value=value,
        slot_mapping=torch.tensor(slots, dtype=index_dtype, device=kernel_device),
    )
    for cache, new in ((key_cache, key), (value_cache, value)):
        expected = torch.full((15 // block_size * block_size, heads, head_dim), POISON, dtype=dtype)
        for token, slot in enumerate(slots):
            if slot >= 0:
                expected[slot] = new[token].cpu()
        assert torch.equal(cache.flatten(0, 1).cpu(), expected)
    check_guards(key_whole, value_whole)


@RUNS
@given(
    copies=st.lists(st.tuples(st.integers(-1, 3), st.integers(-1, 1), st.integers(0, 3)), max_size=4),
    lengths=st.lists(st.integers(0, 10), min_size=2, max_size=2),
    shape=st.sampled_from([(), (2,), (2, 300)]),
    dtype=st.sampled_from([torch.float32, torch.int32, torch.bfloat16]),
    skipped=st.sampled_from([None, 0, 1]),
)
def test_copies_only_reached_blocks(
    backend: Any,
    kernel_device: str,
    copies: list[tuple[int, int, int]],
    lengths: list[int],
    shape: tuple[int, ...],
    dtype: torch.dtype,
    skipped: int | None,
) -> None:
    block_size = 3
    cache, whole = guarded((2, 8, block_size, *shape), dtype, kernel_device)
    cache.copy_(torch.arange(cache.numel()).reshape(cache.shape) % 251)
    before = cache.clone()
    destinations = [-1 if m == skipped else 4 + m for m in range(len(copies))]

    def ints(values: list[int]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int32, device=kernel_device)

    copy_blocks_(
        backend=backend,
        cache=cache,
        source=ints([c[0] for c in copies]),
        destination=ints(destinations),
        rows=ints([c[1] for c in copies]),
        block_indices=ints([c[2] for c in copies]),
        lengths=ints(lengths),
    )
    for (source, row, index), destination in zip(copies, destinations, strict=True):
        if source >= 0 and destination >= 0 and row >= 0 and index * block_size < lengths[row]:
            before[:, destination] = before[:, source]
    assert torch.equal(cache, before)
    guard = torch.tensor(POISON).to(dtype).to(kernel_device)
    assert (whole[:GUARD] == guard).all() and (whole[-GUARD:] == guard).all()


def test_addresses_are_64_bit_wide(backend: Any, kernel_device: str) -> None:
    """H2: slot 200000 of stride 16384 lies at 3276800000, beyond 32 bits; the cache is virtual memory that is hardly touched."""
    if kernel_device == "cpu":
        cache = torch.empty(200001, 1, 1, 16384, dtype=torch.uint8)
    else:
        cache = torch.zeros(200001, 1, 1, 16384, dtype=torch.uint8, device=kernel_device)
    new = torch.full((1, 1, 16384), 9, dtype=torch.uint8, device=kernel_device)
    write_kv_(
        backend=backend,
        out_key_cache=cache,
        out_value_cache=cache,
        key=new,
        value=new,
        slot_mapping=torch.tensor([200000], dtype=torch.int32, device=kernel_device),
    )
    assert (cache[200000] == 9).all()


def test_refuses_what_does_not_fit(backend: Any, kernel_device: str) -> None:
    cache = torch.zeros(2, 2, 1, 4, device=kernel_device)
    new = torch.ones(1, 1, 4, device=kernel_device)
    slots = torch.tensor([0], dtype=torch.int32, device=kernel_device)
    for changed, error in (
        ({"key": new[:, :, :3]}, ArgumentError),
        ({"slot_mapping": slots[:0]}, ArgumentError),
        ({"slot_mapping": slots.float()}, ArgumentTypeError),
        ({"out_key_cache": cache.transpose(0, 1)}, ArgumentError),
    ):
        arguments = {"out_key_cache": cache, "out_value_cache": cache.clone(), "key": new, "value": new, "slot_mapping": slots}
        with pytest.raises(error):
            write_kv_(backend=backend, **(arguments | changed))
    assert (cache == 0).all()
    index = {"source": slots, "destination": slots, "rows": slots, "block_indices": slots, "lengths": slots}
    with pytest.raises(ArgumentError):
        copy_blocks_(backend=backend, cache=cache, **(index | {"rows": slots[:0]}))
    with pytest.raises(ArgumentTypeError):
        copy_blocks_(backend=backend, cache=cache, **(index | {"lengths": slots.float()}))
