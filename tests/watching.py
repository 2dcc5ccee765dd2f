"""A model that remembers what it was given, and small models with known answers, for tests of what reaches a model."""

import dataclasses
from collections.abc import Callable

import torch
from oracle import VOCAB, checksum_next

import funcspec as fs
from funcspec.models.base import KV, ForwardBatch, KVSpec, Model


class Watching:
    """Passes every batch on to a model and keeps a copy of it in `seen`."""

    def __init__(self, model: Model) -> None:
        self.model = model
        self.seen: list[ForwardBatch] = []

    @property
    def vocab_size(self) -> int:
        return self.model.vocab_size

    @property
    def max_len(self) -> int:
        return self.model.max_len

    @property
    def kv_spec(self) -> KVSpec:
        return self.model.kv_spec

    def forward(self, kv: KV, batch: ForwardBatch) -> tuple[KV, torch.Tensor, tuple[torch.Tensor, ...]]:
        copies = {name: value.clone() for name, value in vars(batch).items() if isinstance(value, torch.Tensor)}
        self.seen.append(dataclasses.replace(batch, **copies))
        return self.model.forward(kv, batch)

    def clear(self) -> None:
        self.seen.clear()


def window(batch: ForwardBatch, row: int, name: str = "positions") -> list[int]:
    """What a batch holds for one row."""
    start, stop = batch.query_start_loc[row : row + 2].tolist()
    return getattr(batch, name)[start:stop].tolist()


def live(batch: ForwardBatch, row: int, name: str = "positions") -> list[int]:
    """What a batch holds for one row at places that are written to the cache."""
    slots = window(batch, row, "slot_mapping")
    return [value for value, slot in zip(window(batch, row, name), slots, strict=True) if slot >= 0]


def checksum_drafter(wrong: Callable[[list[int]], bool], seen: list[list[int]] | None = None) -> fs.drafters.Standalone:
    """A drafter that is right about the checksum target unless `wrong(prefix)`; keeps the prefixes it saw in `seen`."""

    def logits(prefix: torch.Tensor) -> torch.Tensor:
        tokens = prefix.tolist()
        if seen is not None:
            seen.append(tokens)
        out = torch.zeros(VOCAB)
        out[(checksum_next(tokens) + wrong(tokens)) % VOCAB] = 1
        return out

    return fs.drafters.standalone(fs.models.from_logits(logits, vocab_size=VOCAB))


def cached(state: fs.SpecState, row: int, role: str = "draft") -> tuple[list[int], list[int]]:
    """Token ids and positions that a row's cache of a checksum model holds, by position, through the block table."""
    branch = getattr(state.lease, role)
    table = (state.draft_block_tables if role == "draft" else state.block_tables)[row]
    owned = table[table >= 0].long()
    kv = branch.pool.kv
    return kv["token"][0, owned].reshape(-1).tolist(), kv["position"][0, owned].reshape(-1).tolist()


def free_blocks(state: fs.SpecState) -> tuple[int, ...]:
    """Free blocks of each pool."""
    branches = [state.lease.target] + ([state.lease.draft] if state.lease.draft is not None else [])
    return tuple(branch.pool.num_free_blocks for branch in branches)
