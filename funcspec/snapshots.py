"""States on the host: comparable, hashable, picklable, printable; with or without KV."""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from funcspec.admission import DEFAULT_CHUNK
from funcspec.config import SpecConfig
from funcspec.drafters.base import Drafter
from funcspec.errors import ArgumentTypeError, ModelError, refuse
from funcspec.leases import JaxLease, Lease, Partner, host_copy
from funcspec.models.base import Model
from funcspec.partners import check_drafter, check_partner, framework_of
from funcspec.state import ARRAY_FIELDS, BLOCK_TABLES, DRAFTING, ROUND_START, SpecState, check_phase, check_state
from funcspec.transitions import Transition, open_step


@dataclass(frozen=True, eq=False)
class Cache:
    """One model's share of a snapshot.

    Attributes:
        partner: what the model was.
        lengths: positions that count in each row.
        num_blocks: blocks each row holds, None for a row without any.
        rows: for each row, each entry's bytes `[num_layers, length, ...]`; None without KV.
    """

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
        framework: "torch" or "jax", what the state was of; no part of the value.
    """

    config: SpecConfig
    phase: str
    draft_steps: int
    fields: dict[str, np.ndarray]
    caches: dict[str, Cache]
    framework: str

    @property
    def digest(self) -> str:
        """SHA-256 over everything that counts, in hexadecimal."""
        hashed = hashlib.sha256(repr((self.config, self.phase, self.draft_steps)).encode())
        for name in sorted(self.fields):
            hashed.update(name.encode() + self.fields[name].tobytes())
        for role in sorted(self.caches):
            cache = self.caches[role]
            hashed.update(repr((role, cache.partner, cache.lengths, cache.rows is None)).encode())
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
    lease = state.lease
    fields = {name: host_copy(lease.array(name)) for name in ARRAY_FIELDS if name not in BLOCK_TABLES}
    for values in fields.values():
        values.flags.writeable = False
    lengths = {"target": np.maximum(fields["num_tokens"] - 1, 0)}
    if "draft" in lease.models:
        limit = lease.models["draft"].max_len
        lengths["draft"] = np.minimum(fields["draft_len"] + np.maximum(fields["num_drafted"] - 1, 0), limit)
    caches = {role: _copy_cache(lease, role, lengths[role].tolist(), kv) for role in lease.models}
    return Snapshot(state.config, lease.phase, lease.draft_steps, fields, caches, lease.framework)


def restore(snapshot: Snapshot, target: Model | None = None, drafter: Drafter | None = None, *, framework: str | None = None) -> SpecState:
    """Make a state from a snapshot, with KV of its own.

    Args:
        snapshot: what `snapshot` returned.
        target, drafter: needed for a snapshot without KV, whose tokens are run through them; else only checked if given.
        framework: "torch" or "jax", what the state is to be of: a snapshot of either can be restored in both. None is that of the
            models if they are given, else that of the snapshot.

    Returns:
        a state that goes on exactly as the one the snapshot was taken of.

    Raises:
        ModelError: a model is missing, is not the one the state was made for, or is of another framework.
    """
    if not isinstance(snapshot, Snapshot):
        refuse("snapshot", "a Snapshot", type(snapshot).__name__, "pass what snapshot(state) returned", ArgumentTypeError)
    if drafter is not None:
        check_drafter(drafter)
        if drafter.kv_model is not None and "draft" not in snapshot.caches:
            refuse("drafter", "None, as the state was made with", type(drafter).__name__, "leave it out", ModelError)
    models = {"target": target, "draft": drafter.kv_model if drafter is not None else None}
    framework = _check_models(snapshot, models, framework)
    partners = {role: cache.partner for role, cache in snapshot.caches.items()}
    empty = SpecState(snapshot.config, (JaxLease if framework == "jax" else Lease).empty(snapshot.config, partners))
    step = open_step(empty, "restore", donate=True)
    blocks = {role: _fill_cache(step, role, cache, models[role], snapshot.fields) for role, cache in snapshot.caches.items()}
    if "draft" in blocks and snapshot.phase == DRAFTING:
        step.advance("draft")  # a state in mid-round relies on places past its committed length
    values = {name: array.copy() for name, array in snapshot.fields.items()}
    step.put_rows(range(snapshot.config.max_num_reqs), values, blocks)
    return step.close(snapshot.phase, draft_steps=snapshot.draft_steps)


def _check_models(snapshot: Snapshot, models: dict[str, Model | None], framework: str | None) -> str:
    """Refuse models that do not fit; return the framework of the state to be made."""
    if framework not in (None, "torch", "jax"):
        refuse("framework", "'torch', 'jax' or None", repr(framework), "leave it out")
    given = {role: model for role, model in models.items() if model is not None}
    wanted = framework or next((framework_of(model) for model in given.values()), snapshot.framework)
    for role, cache in snapshot.caches.items():
        argument = "drafter" if role == "draft" else role
        model = given.get(role)
        if model is not None:
            check_partner(argument, model, cache.partner, wanted)
        elif cache.rows is None:
            raise ModelError(
                f"{argument}: expected the model, as this snapshot has no KV, got None. Fix: pass target and drafter to restore."
            )
    return wanted


def _copy_cache(lease: Lease | JaxLease, role: str, lengths: list[int], kv: bool) -> Cache:
    size, blocks = lease.config.block_size, lease.blocks(role)
    held = tuple(None if ids is None else len(ids) for ids in blocks)
    lengths = [min(length, (count or 0) * size) for count, length in zip(held, lengths, strict=True)]
    rows = None
    if kv:
        buffers = lease.cache(role)
        rows = tuple({} if ids is None else _read_row(buffers, ids, length) for ids, length in zip(blocks, lengths, strict=True))
    return Cache(lease.models[role], tuple(lengths), held, rows)


def _read_row(buffers: Mapping[str, torch.Tensor], ids: tuple[int, ...], length: int) -> dict[str, np.ndarray]:
    """The first `length` positions of a row as raw bytes (NumPy has no bfloat16)."""
    found = {}
    for name, cache in buffers.items():
        values = cache[:, list(ids)].reshape(cache.shape[0], -1, *cache.shape[3:])[:, :length].contiguous()
        found[name] = values.reshape(-1).view(torch.uint8).cpu().numpy().copy()
    return found


def _fill_cache(step: Transition, role: str, cache: Cache, model: Model | None, fields: dict[str, np.ndarray]) -> list[Any]:
    """Give every row its blocks and what was in them; returns the blocks by row."""
    taken = iter(step.reserve(role, [count for count in cache.num_blocks if count is not None]))
    blocks = [None if count is None else next(taken) for count in cache.num_blocks]
    for index, (row, length) in enumerate(zip(blocks, cache.lengths, strict=True)):
        if row is None:
            continue
        if cache.rows is not None:
            step.put_cache(role, row, _tensors(cache.partner, cache.rows[index], length))
        elif model is not None:
            step.ingest(role, model, row, fields["tokens"][index, :length].tolist(), DEFAULT_CHUNK)
    return blocks


def _tensors(partner: Partner, row: dict[str, np.ndarray], length: int) -> dict[str, torch.Tensor]:
    spec = partner.kv_spec
    return {
        entry.name: torch.from_numpy(row[entry.name].copy()).view(entry.dtype).view(spec.num_layers, length, *entry.shape)
        for entry in spec.entries
    }
