"""States on the host: comparable, hashable, picklable, printable; with or without KV."""

import hashlib
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from funcspec.admission import DEFAULT_CHUNK, check_drafter, check_partner, ingest
from funcspec.config import SpecConfig
from funcspec.drafters.base import Drafter
from funcspec.errors import ArgumentTypeError, ModelError, refuse
from funcspec.models.base import KVSpec, Model
from funcspec.pool import Branch, Pool, RowBlocks
from funcspec.state import ARRAY_FIELDS, DRAFTING, ROUND_START, Buffers, Lease, Partner, SpecState, check_phase, check_state, name_step

_TABLES = ("block_tables", "draft_block_tables")  # where blocks lie is no part of a state's value


@dataclass(frozen=True, eq=False)
class _Cache:
    """One model's share of a snapshot.

    Attributes:
        spec, partner: what the model was.
        lengths: positions that count in each row.
        num_blocks: blocks each row holds, None for a row without any.
        rows: for each row, each entry's bytes `[num_layers, length, ...]`; None without KV.
    """

    spec: KVSpec
    partner: Partner
    lengths: tuple[int, ...]
    num_blocks: tuple[int | None, ...]
    rows: tuple[dict[str, np.ndarray], ...] | None


@dataclass(frozen=True, eq=False, repr=False)
class Snapshot:
    """A state as a host value. Two snapshots are equal when the states' futures are.

    Attributes:
        config: the configuration.
        phase, draft_steps: where in the round the state was.
        fields: every small buffer but the block tables, as NumPy arrays.
        caches: the models' KV by role.
    """

    config: SpecConfig
    phase: str
    draft_steps: int
    fields: dict[str, np.ndarray]
    caches: dict[str, _Cache]

    @property
    def digest(self) -> str:
        """SHA-256 over everything that counts, in hexadecimal."""
        hashed = hashlib.sha256(repr((self.config, self.phase, self.draft_steps)).encode())
        for name in sorted(self.fields):
            hashed.update(name.encode() + self.fields[name].tobytes())
        for role in sorted(self.caches):
            cache = self.caches[role]
            hashed.update(repr((role, cache.spec, cache.partner, cache.lengths, cache.rows is None)).encode())
            for row in cache.rows or ():
                for name in sorted(row):
                    hashed.update(name.encode() + row[name].tobytes())
        return hashed.hexdigest()

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Snapshot) and self.digest == other.digest

    def __hash__(self) -> int:
        return hash(self.digest)

    def __repr__(self) -> str:
        rows = np.flatnonzero(self.fields["num_tokens"]).tolist()
        kv = "with KV" if all(cache.rows is not None for cache in self.caches.values()) else "without KV"
        return f"Snapshot({self.phase}, rows {rows}, {kv}, {self.digest[:12]})"


def snapshot(state: SpecState, *, kv: bool = True) -> Snapshot:
    """Copy a state to the host. Waits for the GPU.

    Args:
        state: a live state that does not wait for `accept`.
        kv: whether to copy the KV too. Without it `restore` runs the tokens through the models again, which gives the same
            small buffers and KV to rounding.

    Raises:
        DonatedStateError: the state is dead.
        StepOrderError: the state waits for `accept`; its scores cannot be kept.

    Example:
        >>> import funcspec as fs
        >>> config = fs.SpecConfig(max_num_reqs=1, max_model_len=32, num_speculative_tokens=0, rule=fs.rules.greedy)
        >>> state = fs.init(config, fs.models.ChecksumModel())
        >>> fs.snapshot(state) == fs.snapshot(fs.fork(state))
        True
    """
    check_phase(check_state(state, "snapshot"), "snapshot", (ROUND_START, DRAFTING), "accept the scores first")
    lease, buffers = state.lease, state.lease.buffers
    fields = {name: getattr(buffers, name).detach().cpu().numpy().copy() for name in ARRAY_FIELDS if name not in _TABLES}
    for values in fields.values():
        values.flags.writeable = False
    lengths = {"target": np.maximum(fields["num_tokens"] - 1, 0)}
    branches = {"target": lease.target}
    if lease.draft is not None:
        branches["draft"] = lease.draft
        limit = lease.models["draft"].max_len
        lengths["draft"] = np.minimum(fields["draft_len"] + np.maximum(fields["num_drafted"] - 1, 0), limit)
    caches = {role: _copy_cache(branch, lease.models[role], lengths[role].tolist(), kv) for role, branch in branches.items()}
    return Snapshot(state.config, lease.phase, lease.draft_steps, fields, caches)


def restore(snapshot: Snapshot, target: Model | None = None, drafter: Drafter | None = None) -> SpecState:
    """Make a state from a snapshot, with pools of its own.

    Args:
        snapshot: what `snapshot` returned.
        target, drafter: needed for a snapshot without KV, whose tokens are run through them; else only checked if given.

    Returns:
        a state that goes on exactly as the one the snapshot was taken of.

    Raises:
        ModelError: a model is missing or is not the one the state was made for.
    """
    if not isinstance(snapshot, Snapshot):
        refuse("snapshot", "a Snapshot", type(snapshot).__name__, "pass what snapshot(state) returned", ArgumentTypeError)
    config = snapshot.config
    if drafter is not None:
        check_drafter(drafter)
    if drafter is not None and drafter.kv_model is not None and "draft" not in snapshot.caches:
        refuse("drafter", "None, as the state was made with", type(drafter).__name__, "leave it out", ModelError)
    models: dict[str, Model | None] = {"target": target, "draft": drafter.kv_model if drafter is not None else None}
    buffers = Buffers.filled(config)
    for name, values in snapshot.fields.items():
        getattr(buffers, name).copy_(torch.from_numpy(values.copy()))
    branches: dict[str, Branch] = {}
    for role, cache in snapshot.caches.items():
        branch = _fill_cache(role, cache, models.get(role), config, snapshot.fields)
        if role == "draft" and snapshot.phase == DRAFTING:
            branch = branch.advance(guarded=True)  # a state in mid-round relies on places past its committed length
        branches[role] = branch
        table = buffers.block_tables if role == "target" else buffers.draft_block_tables
        table.copy_(branch.table(config.blocks_per_row))
    known = snapshot.fields["num_tokens"].tolist()
    partners = {role: cache.partner for role, cache in snapshot.caches.items()}
    lease = Lease(
        buffers,
        name_step("restore"),
        branches["target"],
        branches.get("draft"),
        partners,
        known,
        snapshot.phase,
        None,
        snapshot.draft_steps,
    )
    return SpecState(config, lease)


def _copy_cache(branch: Branch, partner: Partner, lengths: list[int], kv: bool) -> _Cache:
    held = tuple(None if row is None else len(row.ids) for row in branch.rows)
    lengths = [
        0 if row is None else min(length, len(row.ids) * branch.pool.block_size) for row, length in zip(branch.rows, lengths, strict=True)
    ]
    rows = tuple(_read_row(branch.pool, row, length) for row, length in zip(branch.rows, lengths, strict=True)) if kv else None
    return _Cache(branch.pool.kv_spec, partner, tuple(lengths), held, rows)


def _read_row(pool: Pool, row: RowBlocks | None, length: int) -> dict[str, np.ndarray]:
    """The first `length` positions of a row as raw bytes (NumPy has no bfloat16)."""
    if row is None:
        return {}
    found = {}
    for name, cache in pool.kv.items():
        blocks = cache[:, list(row.ids)]
        values = blocks.reshape(cache.shape[0], -1, *cache.shape[3:])[:, :length].contiguous()
        found[name] = values.reshape(-1).view(torch.uint8).cpu().numpy().copy()
    return found


def _fill_cache(role: str, cache: _Cache, model: Model | None, config: SpecConfig, fields: dict[str, np.ndarray]) -> Branch:
    pool = Pool(role, cache.spec, config.num_kv_blocks, config.block_size, config.device)
    argument = "drafter" if role == "draft" else role
    if model is not None:
        check_partner(argument, model, cache.partner, pool)
    elif cache.rows is None:
        raise ModelError(f"{argument}: expected the model, as this snapshot has no KV, got None. Fix: pass target and drafter to restore.")
    reserved = pool.reserve([count or 0 for count in cache.num_blocks])
    rows = tuple(None if count is None else blocks for count, blocks in zip(cache.num_blocks, reserved, strict=True))
    for index, (row, length) in enumerate(zip(rows, cache.lengths, strict=True)):
        if row is None:
            continue
        if cache.rows is not None:
            _write_row(pool, row, cache.rows[index], length)
        elif model is not None:
            ingest(model, pool, row, fields["tokens"][index, :length].tolist(), 0, DEFAULT_CHUNK, config.device)
    return Branch(pool, rows)


def _write_row(pool: Pool, row: RowBlocks, values: dict[str, Any], length: int) -> None:
    for entry in pool.kv_spec.entries:
        cache = pool.kv[entry.name]
        raw = torch.from_numpy(values[entry.name]).to(cache.device).view(entry.dtype)
        tokens = raw.view(cache.shape[0], length, *entry.shape)
        padded = tokens.new_zeros(cache.shape[0], len(row.ids) * pool.block_size, *entry.shape)
        padded[:, :length] = tokens
        cache[:, list(row.ids)] = padded.view(cache.shape[0], len(row.ids), pool.block_size, *entry.shape)
