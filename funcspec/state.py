"""`SpecState`: the whole speculator between two steps, as one immutable value.

Principle: store the committed length, derive the rest. Positions, sequence lengths, slots and masks are computed at each
step and never kept. KV past the committed length is garbage by definition, so a rejection is rolled back by arithmetic.

The fields below are declared once; allocation, validation, printing and documentation all read the same declaration. They
live in one arena (one allocation, 64-byte aligned views), so that a pure step costs one copy of a few kilobytes. KV and
scratch live in the pools outside it.
"""

import dataclasses
import functools
import itertools
import weakref
from collections.abc import Sequence
from typing import Any

import jax
import torch
import torch.utils._pytree as torch_pytree

from funcspec.config import SpecConfig
from funcspec.constants import NO_TOKEN, PAD_SLOT
from funcspec.errors import ArgumentTypeError, DonatedStateError, StateError, StepOrderError, refuse
from funcspec.kernels.acceptance import NOT_FINISHED
from funcspec.noise import split_seed
from funcspec.pool import STRANGER, Branch

ALIGNMENT = 64
ROUND_START, DRAFTING, SCORED = "round start", "drafting", "scored"

_step_numbers = itertools.count(1)


def _array(shape: str, dtype: torch.dtype, fill: float, meaning: str) -> Any:
    """Declare an array field: dimension letters, dtype, initial value, meaning."""
    return dataclasses.field(metadata={"shape": shape, "dtype": dtype, "fill": fill, "meaning": meaning})


@dataclasses.dataclass(frozen=True, eq=False, repr=False, init=False)
class SpecState:
    """An immutable speculator state: R request rows, preallocated to capacity.

    Steps take a state and return a new one; a state never changes under your hands. After a step with `donate=True` its input
    is dead, and reading it raises `DonatedStateError`. Registered as a pytree with JAX and torch: arrays are the leaves,
    the configuration is static, and successive states have equal structures.

    Dimensions: R rows, L max_model_len, S stop ids, N blocks per row.

    Example:
        >>> import funcspec as fs
        >>> target = fs.models.ChecksumModel()
        >>> config = fs.SpecConfig(max_num_reqs=1, max_model_len=32, num_speculative_tokens=0, rule=fs.rules.greedy)
        >>> state = fs.init(config, target)
        >>> state, first = fs.admit(state, target, None, [[5, 6, 7]])
        >>> state.num_tokens.tolist(), state.tokens[0, :4].tolist()
        ([4], [5, 6, 7, 39])
    """

    tokens: torch.Tensor = _array("RL", torch.int32, NO_TOKEN, "committed tokens, then this round's drafts, then -1")
    num_tokens: torch.Tensor = _array("R", torch.int32, 0, "committed length n; the newest token is not yet in the target's KV")
    prompt_len: torch.Tensor = _array("R", torch.int32, 0, "how many of the tokens are the prompt")
    row_limit: torch.Tensor = _array("R", torch.int32, 0, "committed length at which the row finishes with reason 'length'")
    draft_len: torch.Tensor = _array("R", torch.int32, 0, "committed tokens that the drafter's KV holds")
    num_draft: torch.Tensor = _array("R", torch.int32, 0, "drafts planned this round, 0..K")
    num_drafted: torch.Tensor = _array("R", torch.int32, 0, "drafts made so far this round")
    is_live: torch.Tensor = _array("R", torch.int32, 0, "1 while the row generates, 0 when idle or finished")
    finish_reason: torch.Tensor = _array("R", torch.int32, NOT_FINISHED, "0 not finished, 1 stop id, 2 length")
    bad_row: torch.Tensor = _array("R", torch.int32, 0, "1 once a token came from logits with NaN, +inf or nothing allowed")
    temperature: torch.Tensor = _array("R", torch.float32, 0.0, "0 is greedy")
    seed: torch.Tensor = _array("R2", torch.int32, 0, "64-bit seed as bit patterns of its low and high word")
    stop_ids: torch.Tensor = _array("RS", torch.int32, NO_TOKEN, "token ids that end the row, -1 for unused")
    block_tables: torch.Tensor = _array("RN", torch.int32, PAD_SLOT, "target KV blocks of each row, -1 where it owns none")
    draft_block_tables: torch.Tensor = _array("RN", torch.int32, PAD_SLOT, "draft KV blocks of each row, -1 where it owns none")
    config: SpecConfig
    lease: "Lease" = dataclasses.field(repr=False)

    def __init__(self, config: SpecConfig, lease: "Lease", **arrays: Any) -> None:
        """Wrap arrays; states are normally made by `init`, by steps, or by `dataclasses.replace`."""
        lease.check("rebuilding")
        if config is not lease.buffers.config and config != lease.buffers.config:
            refuse("config", "the configuration the state was made with", "another", "make a new state with init", StateError)
        self.__dict__["config"] = config
        if arrays and any(arrays[name] is not lease.buffers.views.get(name) for name in ARRAY_FIELDS):
            lease = lease.loosened(arrays)
        self.__dict__["lease"] = lease

    def __getattr__(self, name: str) -> Any:
        """Read an array field; the only way in, so that a dead state cannot be read."""
        if name not in ARRAY_FIELDS or "lease" not in self.__dict__:
            raise AttributeError(f"{type(self).__name__} has no attribute {name!r}")
        self.lease.check(f"reading .{name}")
        return getattr(self.lease.buffers, name)

    def __eq__(self, other: object) -> bool:
        """Identity; to compare contents use `snapshot`, or chex on the states themselves."""
        self.lease.check("comparing")
        return self is other

    __hash__ = object.__hash__

    def __copy__(self) -> "SpecState":
        return self

    def __deepcopy__(self, memo: object) -> "SpecState":
        from funcspec.snapshots import restore, snapshot

        return restore(snapshot(self))

    def __reduce__(self) -> Any:
        from funcspec.snapshots import restore, snapshot

        return restore, (snapshot(self),)

    def __repr__(self) -> str:
        if self.lease.dead is not None:
            return f"SpecState(donated: consumed by {self.lease.dead})"
        config = self.config
        live, counts = self.is_live.tolist(), self.num_tokens.tolist()
        head = f"SpecState({self.lease.phase}, {sum(live)} of {config.max_num_reqs} rows live, "
        lines = [head + f"K={config.num_speculative_tokens}, L={config.max_model_len}, {config.rule!r})"]
        for row, count in enumerate(counts):
            if count == 0:
                continue
            tail = self.tokens[row, max(count - 6, 0) : count].tolist()
            drafts = self.tokens[row, count : count + int(self.num_drafted[row])].tolist()
            status = "live" if live[row] else ("stopped", "stopped", "at length")[int(self.finish_reason[row])]
            line = f"  row {row}: {status}, {count}/{int(self.row_limit[row])} tokens, T={float(self.temperature[row]):g}"
            lines.append(line + f", ...{tail}" + (f" drafts {drafts}" if drafts else ""))
        return "\n".join(lines)


ARRAY_FIELDS: dict[str, Any] = {f.name: f.metadata for f in dataclasses.fields(SpecState) if f.metadata}
"""Declaration of every array field: shape letters, dtype, fill, meaning."""


def field_shape(config: SpecConfig, name: str) -> tuple[int, ...]:
    """Shape of an array field under a configuration."""
    sizes = {"R": config.max_num_reqs, "L": config.max_model_len, "S": config.max_num_stop_ids, "N": config.blocks_per_row, "2": 2}
    return tuple(sizes[letter] for letter in ARRAY_FIELDS[name]["shape"])


class Buffers:
    """The small buffers of one state: an arena and typed views on it, made when first used.

    Attributes:
        arena: [bytes] uint8, or None while the fields are loose arrays that a caller put in.
        views: the views made so far, by field name.
        holder: the newest lease over these buffers.
    """

    def __init__(self, config: SpecConfig, arena: torch.Tensor | None, views: dict[str, Any] | None = None) -> None:
        self.config = config
        self.holder: weakref.ref[Lease] | None = None
        self.arena = arena
        self.views = views or {}

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
        view = self.views.get(name)
        if view is None:
            offset, size = self.layout(self.config)[0][name]
            assert self.arena is not None
            view = self.arena[offset : offset + size].view(ARRAY_FIELDS[name]["dtype"]).view(field_shape(self.config, name))
            self.views[name] = view
        # Kept as an attribute too: steps read fields thousands of times a second.
        self.__dict__[name] = view
        return view

    def packed(self) -> "Buffers":
        """Return an independent copy in a fresh arena: one memcpy, or one copy a field for loose arrays.

        Raises:
            ArgumentError, ArgumentTypeError: a loose array does not fit its declaration.
        """
        if self.arena is not None:
            return Buffers(self.config, self.arena.clone())
        for name, declared in ARRAY_FIELDS.items():
            array = self.views[name]
            if not isinstance(array, torch.Tensor) or array.dtype != declared["dtype"]:
                kind = getattr(array, "dtype", type(array).__name__)
                refuse(f"state.{name}", f"a torch tensor of {declared['dtype']}", kind, "convert it before stepping", ArgumentTypeError)
            if tuple(array.shape) != field_shape(self.config, name):
                refuse(f"state.{name}", f"shape {field_shape(self.config, name)}", tuple(array.shape), "keep the declared shape")
        packed = Buffers.filled(self.config)
        for name in ARRAY_FIELDS:
            getattr(packed, name).copy_(self.views[name])
        return packed

    def holds(self, array: object) -> bool:
        """Whether an array lies in the arena, as one of its fields or as a view of one."""
        if self.arena is None or not isinstance(array, torch.Tensor) or array.device != self.arena.device:
            return False
        return array.untyped_storage().data_ptr() == self.arena.untyped_storage().data_ptr()

    def copy_(self, other: "Buffers") -> None:
        """Take over the contents of other buffers, both in arenas: one memcpy."""
        assert self.arena is not None
        assert other.arena is not None
        self.arena.copy_(other.arena)


@dataclasses.dataclass(frozen=True)
class Partner:
    """What a state remembers of a model it was made for, to refuse strangers."""

    vocab_size: int
    max_len: int


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

    def __init__(
        self,
        buffers: Buffers,
        born: str,
        target: Branch,
        draft: Branch | None,
        models: dict[str, Partner],
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

    def loosened(self, arrays: dict[str, Any]) -> "Lease":
        """Return a lease over arrays that a caller put in place of the views.

        Nothing is known about their values, so such a state never appends in place: its first write copies blocks.
        """
        # What still lies in the arena is copied: it may be written when the state it belongs to is donated.
        own = {name: array.clone() if self.buffers.holds(array) else array for name, array in arrays.items()}
        loose = Buffers(self.buffers.config, None, own)
        target = dataclasses.replace(self.target, version=STRANGER)
        draft = None if self.draft is None else dataclasses.replace(self.draft, version=STRANGER)
        known = [0] * len(self.known_num_tokens)
        return Lease(loose, "a pytree map or replace", target, draft, self.models, known, self.phase, self.stamp, self.draft_steps)


class _Hidden:
    """Carries a lease through a pytree without taking part in comparisons, so that all states have one structure."""

    __slots__ = ("lease",)

    def __init__(self, lease: Lease) -> None:
        self.lease = lease

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Hidden)

    def __hash__(self) -> int:
        return 0


def _flatten(state: SpecState) -> tuple[list[Any], tuple[SpecConfig, _Hidden]]:
    state.lease.check("flattening (jax.tree, torch pytree, chex)")
    return [getattr(state, name) for name in ARRAY_FIELDS], (state.config, _Hidden(state.lease))


def _unflatten(static: tuple[SpecConfig, _Hidden], leaves: Any) -> SpecState:
    config, hidden = static
    return SpecState(config, hidden.lease, **dict(zip(ARRAY_FIELDS, leaves, strict=True)))


def _flatten_with_keys(state: SpecState) -> Any:
    leaves, static = _flatten(state)
    return [(jax.tree_util.GetAttrKey(name), leaf) for name, leaf in zip(ARRAY_FIELDS, leaves, strict=True)], static


jax.tree_util.register_pytree_with_keys(SpecState, _flatten_with_keys, _unflatten, _flatten)
torch_pytree.register_pytree_node(
    SpecState,
    _flatten,
    lambda leaves, static: _unflatten(static, leaves),
    serialized_type_name="funcspec.SpecState",
)


def name_step(step: str) -> str:
    """Number a step for messages: `decode #8`."""
    return f"{step} #{next(_step_numbers)}"


def check_state(state: object, use: str) -> SpecState:
    """Refuse anything but a live state."""
    if not isinstance(state, SpecState):
        refuse(
            "state",
            "a SpecState",
            type(state).__name__,
            "pass the state that the last step returned, not the (state, info) pair",
            ArgumentTypeError,
        )
    state.lease.check(use)
    return state


def fork(state: SpecState, *, seeds: Sequence[int] | None = None) -> SpecState:
    """Branch off: an independent state with the same future, sharing KV blocks until one of the two writes.

    Args:
        state: any live state, also in mid-round.
        seeds: new 64-bit seeds, one for each of the R rows. Without them equal branches stay equal.

    Returns:
        The new state. `state` stays valid whatever happens to the branch, and the other way round.

    Raises:
        DonatedStateError: the state is dead.
        ArgumentError: the number of seeds is not R.
    """
    lease = check_state(state, "fork").lease
    words = None
    if seeds is not None:
        if not isinstance(seeds, Sequence) or len(seeds) != state.config.max_num_reqs:
            found = len(seeds) if isinstance(seeds, Sequence) else repr(seeds)[:60]
            refuse("seeds", f"{state.config.max_num_reqs} seeds, one a row", found, "give every row a seed")
        words = torch.tensor([split_seed(seed) for seed in seeds], dtype=torch.int32)
    buffers = lease.buffers.packed()
    if words is not None:
        buffers.seed.copy_(words)
    new = Lease(
        buffers,
        name_step("fork"),
        lease.target,
        lease.draft,
        lease.models,
        lease.known_num_tokens,
        lease.phase,
        lease.stamp,
        lease.draft_steps,
    )
    return SpecState(state.config, new)


def any_active(state: SpecState) -> bool:
    """Whether any row still generates. Waits for the GPU, and lets the host know the rows' lengths.

    Example:
        >>> import funcspec as fs
        >>> config = fs.SpecConfig(max_num_reqs=1, max_model_len=32, num_speculative_tokens=0, rule=fs.rules.greedy)
        >>> fs.any_active(fs.init(config, fs.models.ChecksumModel()))
        False
    """
    lease = check_state(state, "any_active").lease
    live = bool((lease.buffers.is_live != 0).any())
    if lease.buffers.arena is not None:
        lease.known_num_tokens = lease.buffers.num_tokens.tolist()
    return live


def check_phase(state: SpecState, step: str, expected: tuple[str, ...], fix: str) -> None:
    """Refuse a step at the wrong point of a round."""
    if state.lease.phase not in expected:
        raise StepOrderError(f"state: expected phase {' or '.join(map(repr, expected))} for {step}, got {state.lease.phase!r}. Fix: {fix}.")


__all__ = ["ARRAY_FIELDS", "SpecState", "any_active", "field_shape", "fork"]
