"""Paged KV: blocks, reference counts, and who may append to them.

A chain of states shares blocks and appends in place. Three rules keep every old state valid:

1. *One tip.* Each written version of a branch has one tip; only the tip appends in place. Stepping any other state gives the
   writer its own copy of every block from the first position the step writes (`Branch.prepare_write`).
2. *Prefixes are shared.* A step never writes below the committed length of any ancestor, so what a state at a round
   boundary relies on is never overwritten. (Siblings with different lengths come of accepting one score twice; then each
   copies before it writes.)
3. *Guards.* A state in mid-round relies on places past the committed length too (drafted or scored ones). It holds a guard,
   and while anyone holds it, the next round does not reuse those places but copies.

Who calls what: a step that writes KV calls `prepare_write` before its forward and `advance` after it (guarded: `prefill`,
`decode`, `score`); `accept` calls `settle` on the target's branch and `release_guard` on the draft's.

Everything here is host bookkeeping; nothing waits for the GPU.
"""

import heapq
import threading
import weakref
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import NoReturn

import torch

from funcspec.errors import PoolExhaustedError, StateError
from funcspec.models.base import KVSpec

STRANGER = -1
"""Version of a branch holder that is never the tip."""


def refuse_reservation(role: str, wanted: int, free: int, total: int) -> NoReturn:
    """Say that there are too few free blocks.

    Raises:
        PoolExhaustedError: always.
    """
    raise PoolExhaustedError(
        f"num_blocks: expected {wanted} free blocks in the {role} pool, got {free} of {total}. "
        "Fix: drop old states that still hold blocks (variables, lists, a notebook's Out[]), release finished rows, "
        "or raise SpecConfig.num_blocks."
    )


class Pool:
    """The KV blocks of one model: device buffers, free list, reference counts, scratch space of its steps.

    Attributes:
        role: "target" or "draft", for messages.
        kv_spec: layout of a token's values.
        block_size: tokens in a block.
        kv: buffers by entry name, `[num_layers, num_blocks, block_size, *shape]`.
        scratch: workspace of the steps, by key; never part of a state.
    """

    def __init__(self, role: str, kv_spec: KVSpec, num_blocks: int, block_size: int, device: str) -> None:
        self.role = role
        self.kv_spec = kv_spec
        self.block_size = block_size
        self.kv = {
            entry.name: torch.zeros((kv_spec.num_layers, num_blocks, block_size, *entry.shape), dtype=entry.dtype, device=device)
            for entry in kv_spec.entries
        }
        self.scratch: dict[object, object] = {}
        self._free = list(range(num_blocks))  # a heap: low blocks first keeps a row's blocks consecutive
        self._references = [0] * num_blocks
        self._thread = threading.get_ident()

    @property
    def num_blocks(self) -> int:
        """Blocks in the pool."""
        return len(self._references)

    @property
    def num_free_blocks(self) -> int:
        """Blocks that no state holds."""
        return len(self._free)

    def check_thread(self, step: str) -> None:
        """Refuse to step a chain from another thread than the one that made it."""
        if threading.get_ident() != self._thread:
            raise StateError(
                f"state: expected {step} in the thread that made the state, got another thread. "
                "Fix: make one state in each thread (snapshot here, restore there)."
            )

    def reserve(self, counts: Sequence[int]) -> list["RowBlocks"]:
        """Take `counts[i]` blocks for row i, all or nothing.

        Raises:
            PoolExhaustedError: too few free blocks; nothing was taken.
        """
        wanted = sum(counts)
        if wanted > len(self._free):
            refuse_reservation(self.role, wanted, len(self._free), self.num_blocks)
        return [RowBlocks(self, tuple(heapq.heappop(self._free) for _ in range(count))) for count in counts]

    def retain(self, blocks: Iterable[int]) -> None:
        """Count one more holder of each block."""
        for block in blocks:
            self._references[block] += 1

    def drop(self, blocks: Iterable[int]) -> None:
        """Count one holder less; blocks without a holder become free."""
        for block in blocks:
            self._references[block] -= 1
            if self._references[block] == 0:
                heapq.heappush(self._free, block)


class RowBlocks:
    """The blocks of one row, shared by all states that hold this object; they go back to the pool with it."""

    __slots__ = ("ids", "pool")

    def __init__(self, pool: Pool, ids: tuple[int, ...]) -> None:
        self.pool = pool
        self.ids = ids
        pool.retain(ids)

    def __del__(self) -> None:
        self.pool.drop(self.ids)


class Guard:
    """Held by states that rely on places past their committed length."""

    __slots__ = ("__weakref__",)


@dataclass
class Tip:
    """The newest version of a branch, and the newest guard over its blocks."""

    version: int = 0
    guard: weakref.ref[Guard] | None = None


@dataclass(frozen=True)
class BlockCopies:
    """Blocks to copy before a step that may not write in place; flat lists of equal length, one entry per block."""

    source: list[int]
    destination: list[int]
    rows: list[int]
    block_indices: list[int]


@dataclass(frozen=True)
class Branch:
    """What a state holds of a pool: blocks of each row, and its place among the states that share them.

    Attributes:
        pool: the pool.
        rows: blocks of each row, None for a row without any.
        tip: shared by all states of the branch.
        version: the tip's version when this state was made; equal to `tip.version` while the state is the tip.
        guard: the guard this state holds, if it relies on places past its committed length.
    """

    pool: Pool
    rows: tuple[RowBlocks | None, ...]
    tip: Tip = field(default_factory=Tip)
    version: int = 0
    guard: Guard | None = None

    @property
    def is_tip(self) -> bool:
        """Whether the next step may append in place."""
        newest = self.tip.guard() if self.tip.guard is not None else None
        return self.tip.version == self.version and (newest is None or newest is self.guard)

    def prepare_write(self, first_positions: Sequence[int]) -> tuple["Branch", BlockCopies | None]:
        """Return a branch that a step may write to, and the blocks to copy first (None: write in place).

        Args:
            first_positions: for each row a lower bound of the first position the step writes.

        Raises:
            PoolExhaustedError: too few free blocks for the copies; nothing changed.
        """
        if self.is_tip:
            return self, None
        kept = [
            0 if row is None else min(first // self.pool.block_size, len(row.ids))
            for row, first in zip(self.rows, first_positions, strict=True)
        ]
        fresh = self.pool.reserve([0 if row is None else len(row.ids) - keep for row, keep in zip(self.rows, kept, strict=True)])
        copies = BlockCopies([], [], [], [])
        rows: list[RowBlocks | None] = []
        for index, (row, keep, new) in enumerate(zip(self.rows, kept, fresh, strict=True)):
            if row is None:
                rows.append(None)
                continue
            rows.append(RowBlocks(self.pool, row.ids[:keep] + new.ids))
            copies.source.extend(row.ids[keep:])
            copies.destination.extend(new.ids)
            copies.rows.extend([index] * len(new.ids))
            copies.block_indices.extend(range(keep, len(row.ids)))
        return Branch(self.pool, tuple(rows)), copies

    def advance(self, *, guarded: bool) -> "Branch":
        """Become the tip after a write; `guarded` when the new state relies on places past its committed length."""
        guard = (self.guard or Guard()) if guarded else None
        if guard is not None and guard is not self.guard:
            self.tip.guard = weakref.ref(guard)
        self.tip.version += 1
        return Branch(self.pool, self.rows, self.tip, self.tip.version, guard)

    def settle(self) -> "Branch":
        """Commit what was scored. The first to do so becomes the tip; later ones keep the guard over what they rely on.

        Two outcomes of one score may rely on different lengths of it, so when there is a second one, neither writes in place.
        """
        if self.tip.version == self.version:
            return self.advance(guarded=False)
        self.tip.version += 1
        return self

    def release_guard(self) -> "Branch":
        """Give up places past the committed length without becoming the tip."""
        return Branch(self.pool, self.rows, self.tip, self.version) if self.guard is not None else self

    def with_rows(self, rows: dict[int, RowBlocks | None]) -> "Branch":
        """Return the branch with the blocks of some rows replaced."""
        return replace(self, rows=tuple(rows.get(index, row) for index, row in enumerate(self.rows)))

    def table(self, num_columns: int) -> torch.Tensor:
        """Build the block table [R, num_columns] int32 on the host, -1 where a row owns no block."""
        table = torch.full((len(self.rows), num_columns), -1, dtype=torch.int32)
        for index, row in enumerate(self.rows):
            if row is not None:
                table[index, : len(row.ids)] = torch.tensor(row.ids, dtype=torch.int32)
        return table
