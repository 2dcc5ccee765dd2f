"""What lies behind a state: its arrays, its share of the KV, and who may use them.

`Lease` is for states of torch: small buffers in one arena (one allocation, 64-byte aligned views), so that a pure step costs one copy
of a few kilobytes, and KV in pools that a chain of states shares. `JaxLease` is for states of JAX, where everything is a value and
XLA decides what is copied and what is reused.
"""

import dataclasses
import functools
import weakref
from collections.abc import Mapping, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
import torch
from jax.core import Tracer

from funcspec.carried import LASTING, Partner, carried_layout, new_carried
from funcspec.config import SpecConfig
from funcspec.errors import DonatedStateError, StateError
from funcspec.interop import jax_dtype
from funcspec.pool import STRANGER, Branch, Pool
from funcspec.state import ARRAY_FIELDS, ROUND_START, check_field, field_shape, name_step

ALIGNMENT = 64

RowBlockIds = tuple[tuple[int, ...] | None, ...]
"""Ids of the KV blocks of each row, None for a row without any."""


class Buffers:
    """The small buffers of one state: an arena and typed views on it, made when first used.

    Attributes:
        carried: what `carried_layout` names, if anything, by name; owned by these buffers alone. Too large for the arena, and partly worth
            nothing at the start of a round.
        arena: [bytes] uint8, or None while the fields are loose arrays that a caller put in.
        views: the views made so far, by field name.
        holder: the newest lease over these buffers.
    """

    def __init__(self, config: SpecConfig, arena: torch.Tensor | None, views: dict[str, Any] | None = None) -> None:
        self.config = config
        self.holder: weakref.ref[Lease] | None = None
        self.arena = arena
        self.views = views or {}
        self.carried: dict[str, torch.Tensor] = {}

    @staticmethod
    @functools.cache
    def layout(config: SpecConfig) -> tuple[dict[str, tuple[int, int]], int]:
        """Byte offset and size of each field, and the arena's size."""
        places, at = {}, 0
        for name in ARRAY_FIELDS:
            size = 4  # every field is 32 bits wide
            for extent in field_shape(config, name):
                size *= extent
            places[name] = (at, size)
            at += -(-size // ALIGNMENT) * ALIGNMENT
        return places, max(at, ALIGNMENT)

    @classmethod
    def filled(cls, config: SpecConfig) -> "Buffers":
        """Allocate an arena with every field at its declared fill."""
        buffers = cls(config, torch.zeros(cls.layout(config)[1], dtype=torch.uint8, device=config.device))
        for name, declared in ARRAY_FIELDS.items():
            getattr(buffers, name).fill_(declared["fill"])
        return buffers

    def __getattr__(self, name: str) -> torch.Tensor:
        if name not in ARRAY_FIELDS:
            raise AttributeError(name)
        if name not in self.views:
            offset, size = self.layout(self.config)[0][name]
            assert self.arena is not None
            self.views[name] = self.arena[offset : offset + size].view(ARRAY_FIELDS[name]["dtype"]).view(field_shape(self.config, name))
        # Kept as an attribute too: steps read fields thousands of times a second.
        view = self.__dict__[name] = self.views[name]
        return view

    def packed(self) -> "Buffers":
        """Return an independent copy in a fresh arena: one memcpy, or one copy a field for loose arrays.

        Raises:
            ArgumentError, ArgumentTypeError: a loose array does not fit its declaration.
        """
        if self.arena is not None:
            return Buffers(self.config, self.arena.clone())
        for name in ARRAY_FIELDS:
            check_field(self.config, name, self.views[name], "torch")
        packed = Buffers.filled(self.config)
        for name in ARRAY_FIELDS:
            getattr(packed, name).copy_(self.views[name])
        return packed

    def holds(self, array: object) -> bool:
        """Whether an array lies in the arena, as one of its fields or as a view of one."""
        if self.arena is None or not isinstance(array, torch.Tensor) or array.device != self.arena.device:
            return False
        return array.untyped_storage().data_ptr() == self.arena.untyped_storage().data_ptr()

    def copy_(self, other: "Buffers", carried: Mapping[str, torch.Tensor]) -> None:
        """Take over the contents of other buffers, both in arenas: one memcpy; and these arrays carried along."""
        assert self.arena is not None
        assert other.arena is not None
        self.arena.copy_(other.arena)
        for name, array in carried.items():
            self.carried[name].copy_(array)


class Lease:
    """The host side of one set of buffers, shared by all its aliases: they live and die together.

    Attributes:
        buffers: the small buffers.
        born: the step that made them.
        dead: the step that consumed them, or None.
        phase: where in a round the state is.
        stamp: identity of the scores that may be accepted, in phase `SCORED`.
        draft_steps: draft steps the round has had.
        target, draft: what the state holds of each pool; draft is None without a drafter.
        models: the partners by role.
        known_num_tokens: per row a lower bound of the committed length that the host knows.
    """

    __slots__ = ("__weakref__", "born", "buffers", "dead", "draft", "draft_steps", "known_num_tokens", "models", "phase", "stamp", "target")

    framework = "torch"

    def __init__(
        self,
        buffers: Buffers,
        born: str,
        target: Branch,
        draft: Branch | None,
        models: Mapping[str, Partner],
        known_num_tokens: Sequence[int],
        phase: str = ROUND_START,
        stamp: object = None,
        draft_steps: int = 0,
    ) -> None:
        self.buffers = buffers
        buffers.holder = weakref.ref(self)
        self.born = born
        self.dead: str | None = None
        self.phase = phase
        self.stamp = stamp
        self.draft_steps = draft_steps
        self.target = target
        self.draft = draft
        self.models = models
        self.known_num_tokens = known_num_tokens

    def check(self, use: str) -> None:
        """Refuse a dead state, naming the step that consumed it and the fix."""
        if self.dead is not None:
            raise DonatedStateError(
                f"state: expected a live state for {use}, got one that was made by {self.born} and consumed by {self.dead} "
                "(donate=True). Fix: use the state that step returned, call fork(state) before it, or step with donate=False."
            )

    def kill(self, step: str) -> None:
        """Mark every alias dead and let go of blocks."""
        self.dead = step
        del self.buffers, self.target, self.draft

    def revive(self, buffers: Buffers, target: Branch, draft: Branch | None) -> None:
        """Undo `kill` for a round that failed, with what its last step left."""
        self.dead, self.buffers, self.target, self.draft = None, buffers, target, draft
        buffers.holder = weakref.ref(self)

    @classmethod
    def empty(cls, config: SpecConfig, partners: Mapping[str, Partner]) -> "Lease":
        """Allocate buffers and pools; every row is idle."""
        branches = {
            role: Branch(Pool(role, partner.kv_spec, config.num_kv_blocks, config.block_size, config.device), (None,) * config.max_num_reqs)
            for role, partner in partners.items()
        }
        known, buffers = [0] * config.max_num_reqs, Buffers.filled(config)
        buffers.carried = new_carried(config, partners, LASTING)
        return cls(buffers, name_step("init"), branches["target"], branches.get("draft"), partners, known)

    @property
    def config(self) -> SpecConfig:
        """The state's configuration."""
        return self.buffers.config

    def array(self, name: str) -> Any:
        """A field's view on the arena, or the loose array in its place."""
        return getattr(self.buffers, name)

    def replaced(self, arrays: dict[str, Any]) -> "Lease":
        """Return a lease over arrays that a caller put in place of the views; this one if nothing changed.

        Nothing is known about their values, so such a state never appends in place: its first write copies blocks.
        """
        if all(arrays[name] is self.buffers.views.get(name) for name in ARRAY_FIELDS):
            return self
        # What still lies in the arena is copied: it may be written when the state it belongs to is donated.
        own = {name: array.clone() if self.buffers.holds(array) else array for name, array in arrays.items()}
        loose = Buffers(self.config, None, own)
        loose.carried = self.copied_carried()
        target = dataclasses.replace(self.target, version=STRANGER)
        draft = None if self.draft is None else dataclasses.replace(self.draft, version=STRANGER)
        known = [0] * len(self.known_num_tokens)
        return Lease(loose, "a pytree map or replace", target, draft, self.models, known, self.phase, self.stamp, self.draft_steps)

    def forked(self, seeds: torch.Tensor | None) -> "Lease":
        """Return a lease over a copy of the small buffers, which shares all blocks; with new seeds [R, 2] if there are any."""
        buffers = self.buffers.packed()
        buffers.carried = self.copied_carried()
        if seeds is not None:
            buffers.seed.copy_(seeds)
        known = self.known_num_tokens
        name = name_step("fork")
        return Lease(buffers, name, self.target, self.draft, self.models, known, self.phase, self.stamp, self.draft_steps)

    def copied_carried(self) -> dict[str, torch.Tensor]:
        """A copy of what is carried along and counts at this point of the round."""
        return {name: array.clone() for name, array in self.carried().items()}

    def any_live(self) -> bool:
        """Whether a row is live; learns the rows' lengths on the way."""
        live = bool((self.buffers.is_live != 0).any())
        if self.buffers.arena is not None:
            self.known_num_tokens = self.buffers.num_tokens.tolist()
        return live

    def blocks(self, role: str) -> RowBlockIds:
        """The blocks of each row in a role's pool."""
        branch = self.target if role == "target" else self.draft
        assert branch is not None
        return tuple(None if row is None else row.ids for row in branch.rows)

    def carried(self) -> Mapping[str, torch.Tensor]:
        """What is carried along and counts at this point of the round, to read from."""
        carried = self.buffers.carried
        return {name: carried[name] for name in carried if name in LASTING} if self.phase == ROUND_START else carried

    def cache(self, role: str) -> Mapping[str, torch.Tensor]:
        """The role's KV buffers by entry name, to read from."""
        branch = self.target if role == "target" else self.draft
        assert branch is not None
        return branch.pool.kv

    def flatten(self) -> tuple[list[Any], "_Structure"]:
        """The leaves, and what it takes to rebuild a lease from others like them."""
        return [self.array(name) for name in ARRAY_FIELDS], _Structure(self)


def host_copy(array: Any) -> np.ndarray:
    """An array of a state as a NumPy array of its own. Waits for it.

    Raises:
        StateError: JAX is tracing, and there are no values.
    """
    if isinstance(array, Tracer):
        raise StateError("state: expected values, got a state that JAX traces. Fix: admit, release and take snapshots outside jit.")
    return array.detach().cpu().numpy().copy() if isinstance(array, torch.Tensor) else np.array(array)


class _Structure:
    """Carries a lease through a pytree; only the configuration counts in comparisons, so that all states have one structure."""

    __slots__ = ("config", "lease")

    def __init__(self, lease: Lease) -> None:
        self.config = lease.config
        self.lease = lease

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Structure) and self.config == other.config

    def __hash__(self) -> int:
        return 0

    def rebuild(self, children: list[Any]) -> Lease:
        self.lease.check("rebuilding")
        return self.lease.replaced(dict(zip(ARRAY_FIELDS, children, strict=True)))


@dataclasses.dataclass(frozen=True)
class JaxLease:
    """What lies behind a state of JAX: values, nothing else.

    Attributes:
        config: the state's configuration.
        arrays: the fields by name.
        kv: by role, each entry's `[num_layers, num_blocks, block_size, *shape]`; what `carried_layout` names, as "carried".
        models: the partners by role.
        phase, draft_steps: as in `Lease`.
    """

    config: SpecConfig
    arrays: Mapping[str, Any]
    kv: Mapping[str, Mapping[str, Any]]
    models: Mapping[str, Partner]
    phase: str = ROUND_START
    draft_steps: int = 0

    framework = "jax"
    dead = None  # a donated array raises JAX's own error
    stamp = None  # inside a program there are no identities to tell scores apart by

    @classmethod
    def empty(cls, config: SpecConfig, partners: Mapping[str, Partner]) -> "JaxLease":
        """Make arrays; every row is idle."""
        fields = {name: jnp.full(field_shape(config, name), f["fill"], jax_dtype(f["dtype"])) for name, f in ARRAY_FIELDS.items()}
        slots = (config.num_kv_blocks, config.block_size)
        kv = {
            role: {
                entry.name: jnp.zeros((partner.kv_spec.num_layers, *slots, *entry.shape), jax_dtype(entry.dtype))
                for entry in partner.kv_spec.entries
            }
            for role, partner in partners.items()
        }
        layout = carried_layout(config, partners).items()
        if layout:
            kv["carried"] = {name: jnp.full(shape, fill, jax_dtype(dtype)) for name, (shape, dtype, fill) in layout}
        return cls(config, fields, kv, partners)

    def check(self, use: str) -> None:
        """Accept any use: JAX looks after its arrays."""

    def array(self, name: str) -> Any:
        """A field."""
        return self.arrays[name]

    def replaced(self, arrays: Mapping[str, Any]) -> "JaxLease":
        """Return a lease over other fields."""
        return dataclasses.replace(self, arrays=arrays)

    def forked(self, seeds: torch.Tensor | None) -> "JaxLease":
        """Return a copy of everything, with new seeds [R, 2] if there are any; donating one of the two leaves the other alone."""
        arrays = {name: jnp.array(array, copy=True) for name, array in self.arrays.items()}
        if seeds is not None:
            arrays["seed"] = jnp.array(seeds.numpy())
        kv = {role: {name: jnp.array(array, copy=True) for name, array in cache.items()} for role, cache in self.kv.items()}
        return dataclasses.replace(self, arrays=arrays, kv=kv)

    def any_live(self) -> Any:
        """Whether a row is live, as a boolean array."""
        return jnp.any(self.arrays["is_live"] != 0)

    def blocks(self, role: str) -> RowBlockIds:
        """The blocks of each row, read from the block table. Waits for it."""
        table = host_copy(self.arrays["block_tables" if role == "target" else "draft_block_tables"])
        return tuple(tuple(row[row >= 0].tolist()) or None for row in table)

    def carried(self) -> Mapping[str, Any]:
        """What is carried along, to read from."""
        return self.kv.get("carried", {})

    def cache(self, role: str) -> Mapping[str, torch.Tensor]:
        """The role's KV by entry name, to read from."""
        return {name: torch.from_dlpack(array) for name, array in self.kv[role].items()}

    def flatten(self) -> tuple[list[Any], "_JaxStructure"]:
        """The leaves, and what it takes to rebuild a lease from others like them."""
        structure = _JaxStructure(self.config, tuple(self.models.items()), self.phase, self.draft_steps)
        return [*(self.arrays[name] for name in ARRAY_FIELDS), self.kv], structure


@dataclasses.dataclass(frozen=True)
class _JaxStructure:
    """The static part of a JAX state: equal structures share one compiled program."""

    config: SpecConfig
    models: tuple[tuple[str, Partner], ...]
    phase: str
    draft_steps: int

    def rebuild(self, children: list[Any]) -> JaxLease:
        *arrays, kv = children
        return JaxLease(self.config, dict(zip(ARRAY_FIELDS, arrays, strict=True)), kv, dict(self.models), self.phase, self.draft_steps)


__all__ = [
    "Buffers",
    "JaxLease",
    "Lease",
    "RowBlockIds",
    "host_copy",
]
