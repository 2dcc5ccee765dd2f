"""States on the host: comparable, hashable, picklable, printable; with or without KV."""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from funcspec.admission import DEFAULT_CHUNK, free_rows, row_numbers
from funcspec.carried import FEATURES, PROPOSALS, ROPE_POSITIONS, Partner
from funcspec.config import SpecConfig
from funcspec.drafters.base import Drafter
from funcspec.errors import ArgumentTypeError, ModelError, StepOrderError, check_bool, refuse
from funcspec.leases import JaxLease, Lease, host_copy
from funcspec.models.base import Model
from funcspec.partners import check_drafter, check_partner, framework_of, partner_model
from funcspec.state import ARRAY_FIELDS, BLOCK_TABLES, DRAFTING, ROUND_START, SpecState, check_fields, check_phase, check_state
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
        carried: what the state carries along, by the names in `funcspec.carried.CARRIED`; empty where no rule and no draft asks.
    """

    config: SpecConfig
    phase: str
    draft_steps: int
    fields: dict[str, np.ndarray]
    caches: dict[str, Cache]
    framework: str
    carried: dict[str, np.ndarray] = field(default_factory=dict)

    @property
    def digest(self) -> str:
        """SHA-256 over everything that counts, in hexadecimal."""
        hashed = hashlib.sha256(repr((self.config, self.phase, self.draft_steps)).encode())
        for name in sorted(self.fields):
            hashed.update(name.encode() + self.fields[name].tobytes())
        for name in sorted(self.carried):
            hashed.update(name.encode() + self.carried[name].tobytes())
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


def snapshot(state: SpecState, *, kv: bool = True, rows: Sequence[int] | None = None) -> Snapshot:
    """Copy a state, or some of its rows, to the host. Waits for the GPU.

    A snapshot of some rows is that of a state with these rows only. With `release` it preempts them; `resume` takes them in again.

    Args:
        state: a live state that does not wait for `accept`.
        rows: distinct row numbers; None is all.
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
    check_bool("kv", kv)
    check_fields(state)
    lease, config = state.lease, state.config
    chosen = list(range(config.max_num_reqs)) if rows is None else row_numbers(rows, config)
    if not chosen:
        refuse("rows", "at least one row", "none", "name rows of this state, or leave it out")
    if rows is not None:
        config = config.replace(max_num_reqs=len(chosen), num_blocks=config.num_kv_blocks)
    fields = {name: host_copy(lease.array(name))[chosen] for name in ARRAY_FIELDS if name not in BLOCK_TABLES}
    for values in fields.values():
        values.flags.writeable = False
    caches = {role: _copy_cache(lease, role, chosen, cache_lengths(role, partner, fields), kv) for role, partner in lease.models.items()}
    return Snapshot(config, lease.phase, lease.draft_steps, fields, caches, lease.framework, _copy_carried(lease, chosen, fields))


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
        if drafter.kv_model is None and "draft" in snapshot.caches:
            fix = "pass the same drafter as to init"
            refuse("drafter", "the drafter the state was made with", f"{type(drafter).__name__} without a model", fix, ModelError)
    models = {"target": target, "draft": drafter.kv_model if drafter is not None else None}
    framework = _check_models(snapshot, models, framework)
    partners = {role: cache.partner for role, cache in snapshot.caches.items()}
    empty = SpecState(snapshot.config, (JaxLease if framework == "jax" else Lease).empty(snapshot.config, partners))
    step = open_step(empty, "restore", donate=True)
    blocks = _fill_caches(step, snapshot, models)
    if "draft" in blocks and snapshot.phase == DRAFTING:
        step.advance("draft")  # a state in mid-round relies on places past its committed length
    values = {name: array.copy() for name, array in snapshot.fields.items()}
    rows = range(snapshot.config.max_num_reqs)
    step.put_rows(rows, values, blocks)
    step.put_carried(rows, {name: array.copy() for name, array in snapshot.carried.items()})
    return step.close(snapshot.phase, draft_steps=snapshot.draft_steps)


def resume(
    state: SpecState,
    snapshot: Snapshot,
    target: Model | None = None,
    drafter: Drafter | None = None,
    *,
    rows: Sequence[int] | None = None,
    donate: bool = False,
) -> SpecState:
    """Take the rows of a snapshot into free rows of a state, where they go on exactly as they would have.

    The other rows do not notice. The snapshot may come from this state, from another one of the same kind, or from a file.

    Args:
        state: a state at the start of a round.
        snapshot: rows taken with `snapshot(state, rows=...)` at the start of a round, each with a request.
        target, drafter: needed for a snapshot without KV, whose tokens are run through them; else only checked if given.
        rows: free rows to use; None takes the lowest ones.
        donate: reuse the state's buffers and leave the state dead.

    Raises:
        StepOrderError: the state or the snapshot is in mid-round.
        ArgumentError, CapacityError, ModelError: the snapshot does not fit the state, or there are too few free rows.
        PoolExhaustedError: too few blocks. In all cases nothing was written.

    Example:
        >>> import funcspec as fs
        >>> target = fs.models.ChecksumModel()
        >>> config = fs.SpecConfig(max_num_reqs=2, max_model_len=32, num_speculative_tokens=0, rule=fs.rules.greedy)
        >>> state, _ = fs.admit(fs.init(config, target), target, None, [[5, 6, 7], [1]])
        >>> paused, state = fs.snapshot(state, rows=[0]), fs.release(state, [0])
        >>> state, _ = fs.verify(state, target)
        >>> state = resume(state, paused)
        >>> fs.verify(state, target)[1].tokens.tolist()
        [[1], [24]]
    """
    check_phase(check_state(state, "resume"), "resume", (ROUND_START,), "finish the round with verify first")
    if not isinstance(snapshot, Snapshot):
        refuse("snapshot", "a Snapshot", type(snapshot).__name__, "pass what snapshot(state, rows=...) returned", ArgumentTypeError)
    if snapshot.phase != ROUND_START:
        raise StepOrderError("snapshot: expected one taken at a round's start, got one in mid-round. Fix: take it before prefill.")
    own = state.config.replace(max_num_reqs=1, num_blocks=None)
    if snapshot.config.replace(max_num_reqs=1, num_blocks=None, device=own.device) != own:
        refuse("snapshot", f"rows of a state of {own}", str(snapshot.config), "resume them in a state of the same configuration")
    if {role: cache.partner for role, cache in snapshot.caches.items()} != dict(state.lease.models):
        refuse("snapshot", "rows for the models of this state", "rows for others", "resume them with the models they had", ModelError)
    if not snapshot.fields["num_tokens"].all():
        refuse("snapshot", "a request in every row", "an idle row", "take only rows with requests")
    chosen = free_rows(state, snapshot.config.max_num_reqs, rows)
    models = {"target": target, "draft": partner_model(state, target, drafter) if drafter is not None else None}
    _check_models(snapshot, models, state.framework)
    step = open_step(state, "resume", donate=donate)
    blocks = _fill_caches(step, snapshot, models)
    step.put_rows(chosen, {name: array.copy() for name, array in snapshot.fields.items()}, blocks)
    step.put_carried(chosen, {name: array.copy() for name, array in snapshot.carried.items()})
    return step.close(ROUND_START)


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
        if cache.rows is None and cache.partner.features is not None and snapshot.phase == DRAFTING:
            raise ModelError(
                "snapshot: expected KV in a snapshot taken in mid-round for a draft that reads hidden states, got none. "
                "Fix: take it with kv=True, or at the start of a round."
            )
    return wanted


def cache_lengths(role: str, partner: Partner, fields: dict[str, np.ndarray]) -> list[int]:
    """Positions that count in each row of a role's KV, as far as the row has blocks for them."""
    if role == "target":
        return np.maximum(fields["num_tokens"] - 1, 0).tolist()
    # Of this round's drafts those that a further draft step reads; a row that has all it planned is fed anew in the next round.
    made = np.where(fields["num_drafted"] < fields["num_draft"], np.maximum(fields["num_drafted"] - 1, 0), 0)
    return np.minimum(fields["draft_len"] + made, partner.max_len).tolist()


def _copy_carried(lease: Lease | JaxLease, chosen: list[int], fields: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """What a state carries along, where that counts; everything else at its fill, so that equal futures are equal values."""
    held, made = lease.carried(), fields["num_drafted"]
    found: dict[str, np.ndarray] = {}
    if made.any() and set(PROPOSALS) <= set(held):
        logits, totals, points = (host_copy(held[name])[chosen] for name in PROPOSALS)
        judged = (fields["temperature"] > 0) & (made > 0)
        points = ((points != 0) & judged).astype(np.int32)
        counts = (np.arange(totals.shape[1]) < made[:, None]) & (judged & (points == 0))[:, None]
        logits = np.where(counts[:, :, None], logits, np.float32(-np.inf))
        found.update(zip(PROPOSALS, (logits, np.where(counts[:, :, None], totals, 0), points), strict=True))
    if FEATURES in held:
        found[FEATURES] = _copy_features(lease, host_copy(held[FEATURES])[chosen], fields)
    if ROPE_POSITIONS in held:
        found[ROPE_POSITIONS] = host_copy(held[ROPE_POSITIONS])[chosen]
    for values in found.values():
        values.flags.writeable = False
    return found


def _copy_features(lease: Lease | JaxLease, features: np.ndarray, fields: dict[str, np.ndarray]) -> np.ndarray:
    """Features that a pass may still read, zeros elsewhere."""
    partner, made = lease.models["draft"], fields["num_drafted"]
    spec = partner.features
    assert spec is not None
    # At the start of a round: those of positions that are still to be fed, as far as the draft's own limit reaches.
    counts = np.minimum(fields["num_tokens"] - 1, partner.max_len) - fields["draft_len"]
    width = np.full_like(counts, spec.size)
    if lease.phase == DRAFTING:  # of rows that go on, what the draft handed on; finished rows keep theirs, for `truncate`
        live, goes_on = fields["is_live"] != 0, (made > 0) & (made < fields["num_draft"])
        counts, width = np.where(live, goes_on, counts), np.where(live, spec.feedback, width)
    places, columns = (np.arange(extent) for extent in features.shape[1:])
    return np.where((places < counts[:, None])[:, :, None] & (columns < width[:, None])[:, None, :], features, np.float32(0))


def _copy_cache(lease: Lease | JaxLease, role: str, chosen: list[int], lengths: list[int], kv: bool) -> Cache:
    size, all_blocks = lease.config.block_size, lease.blocks(role)
    blocks = [all_blocks[row] for row in chosen]
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


def _fill_caches(step: Transition, snapshot: Snapshot, models: Mapping[str, Model | None]) -> dict[str, list[Any]]:
    """Give every row its blocks and what was in them; returns the blocks by role and row."""
    blocks: dict[str, list[Any]] = {}
    for role, cache in snapshot.caches.items():
        taken = iter(step.reserve(role, [count for count in cache.num_blocks if count is not None]))
        blocks[role] = [None if count is None else next(taken) for count in cache.num_blocks]
    for index, row in enumerate(blocks["target"]):
        if row is None:
            continue
        own = {role: taken[index] for role, taken in blocks.items()}
        counts = {role: cache.lengths[index] for role, cache in snapshot.caches.items()}
        for role, cache in snapshot.caches.items():
            if cache.rows is not None:
                step.put_cache(role, own[role], _tensors(cache.partner, cache.rows[index], counts[role]))
        if any(cache.rows is None for cache in snapshot.caches.values()):
            known = {role: model for role, model in models.items() if model is not None}
            tokens = snapshot.fields["tokens"][index].tolist()
            rope = snapshot.carried.get(ROPE_POSITIONS)
            step.ingest_row(known, own, tokens, counts, DEFAULT_CHUNK, None if rope is None else rope[index])
    return blocks


def _tensors(partner: Partner, row: dict[str, np.ndarray], length: int) -> dict[str, torch.Tensor]:
    found = {}
    for entry in partner.kv_spec.entries:
        values = torch.empty(partner.kv_spec.num_layers, length, *entry.shape, dtype=entry.dtype)
        values.flatten().view(torch.uint8).copy_(torch.from_numpy(row[entry.name].copy()))  # a row may hold no token yet
        found[entry.name] = values
    return found
