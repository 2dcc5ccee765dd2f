"""`SpecState`: the whole speculator between two steps, as one immutable value.

Principle: store the committed length, derive the rest. Positions, sequence lengths, slots and masks are computed at each
step and never kept. KV past the committed length is garbage by definition, so a rejection is rolled back by arithmetic.

The fields below are declared once; allocation, validation, printing and documentation all read the same declaration. They are
torch tensors or JAX arrays; what lies behind them is in `funcspec.leases`.
"""

import dataclasses
import itertools
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import jax
import numpy as np
import torch
import torch.utils._pytree as torch_pytree

from funcspec.config import SpecConfig
from funcspec.constants import NO_TOKEN, PAD_SLOT
from funcspec.errors import ArgumentTypeError, StateError, StepOrderError, refuse
from funcspec.kernels.acceptance import NOT_FINISHED
from funcspec.models.base import Array
from funcspec.noise import split_seed

if TYPE_CHECKING:
    from funcspec.leases import JaxLease, Lease

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

    A state is of the framework its models are of. With models of torch the fields are tensors, and the KV lies in pools that
    states share. With models of JAX the fields and the KV (`state.kv`, by role and entry) are JAX arrays and all of them leaves:
    such a state goes through `jax.jit`, `lax.scan` and `lax.while_loop`, and `donate_argnums` decides what is reused.

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

    tokens: Array = _array("RL", torch.int32, NO_TOKEN, "committed tokens, then this round's drafts, then -1")
    num_tokens: Array = _array("R", torch.int32, 0, "committed length n; the newest token is not yet in the target's KV")
    prompt_len: Array = _array("R", torch.int32, 0, "how many of the tokens are the prompt")
    row_limit: Array = _array("R", torch.int32, 0, "committed length at which the row finishes with reason 'length'")
    min_len: Array = _array("R", torch.int32, 0, "committed length before which no stop id may come; 0 unless min_tokens are allowed")
    draft_len: Array = _array("R", torch.int32, 0, "committed tokens that the drafter's KV holds")
    num_draft: Array = _array("R", torch.int32, 0, "drafts planned this round, 0..K")
    num_drafted: Array = _array("R", torch.int32, 0, "drafts made so far this round")
    is_live: Array = _array("R", torch.int32, 0, "1 while the row generates, 0 when idle or finished")
    finish_reason: Array = _array("R", torch.int32, NOT_FINISHED, "0 not finished, 1 stop id, 2 length")
    bad_row: Array = _array("R", torch.int32, 0, "1 once a token came from logits with NaN, +inf or nothing allowed")
    temperature: Array = _array("R", torch.float32, 0.0, "0 is greedy")
    seed: Array = _array("R2", torch.int32, 0, "64-bit seed as bit patterns of its low and high word")
    stop_ids: Array = _array("RS", torch.int32, NO_TOKEN, "token ids that end the row, -1 for unused")
    block_tables: Array = _array("RN", torch.int32, PAD_SLOT, "target KV blocks of each row, -1 where it owns none")
    draft_block_tables: Array = _array("RN", torch.int32, PAD_SLOT, "draft KV blocks of each row, -1 where it owns none")
    config: SpecConfig
    lease: "Lease | JaxLease" = dataclasses.field(repr=False)

    def __init__(self, config: SpecConfig, lease: "Lease | JaxLease", **arrays: Any) -> None:
        """Wrap arrays; states are normally made by `init`, by steps, or by `dataclasses.replace`."""
        lease.check("rebuilding")
        if config is not lease.config and config != lease.config:
            refuse("config", "the configuration the state was made with", "another", "make a new state with init", StateError)
        self.__dict__["config"] = config
        self.__dict__["lease"] = lease.replaced(arrays) if arrays else lease

    def __getattr__(self, name: str) -> Any:
        """Read an array field; the only way in, so that a dead state cannot be read."""
        if name not in ARRAY_FIELDS or "lease" not in self.__dict__:
            raise AttributeError(f"{type(self).__name__} has no attribute {name!r}")
        self.lease.check(f"reading .{name}")
        return self.lease.array(name)

    @property
    def framework(self) -> str:
        """What the arrays are of: "torch" or "jax"."""
        return self.lease.framework

    @property
    def kv(self) -> Any:
        """Keys and values of a JAX state, by role ("target", "draft") and entry name; as "carried" what a rule or a draft needs besides.

        Raises:
            AttributeError: the state is of torch, whose KV lies in pools that states share and steps write to.
        """
        if self.lease.framework != "jax":
            raise AttributeError("kv: expected a state of JAX, got one of torch, whose KV lies in pools. Fix: use snapshot(state).")
        return getattr(self.lease, "kv")  # noqa: B009

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


BLOCK_TABLES = ("block_tables", "draft_block_tables")
"""Fields that say where KV lies; that is no part of a state's value."""


def field_shape(config: SpecConfig, name: str) -> tuple[int, ...]:
    """Shape of an array field under a configuration."""
    sizes = {"R": config.max_num_reqs, "L": config.max_model_len, "S": config.max_num_stop_ids, "N": config.blocks_per_row, "2": 2}
    return tuple(sizes[letter] for letter in ARRAY_FIELDS[name]["shape"])


def _flatten(state: SpecState) -> tuple[list[Any], Any]:
    state.lease.check("flattening (jax.tree, torch pytree, chex)")
    return state.lease.flatten()


def _unflatten(structure: Any, children: Any) -> SpecState:
    lease = structure.rebuild(list(children))
    return SpecState(lease.config, lease)


def _flatten_with_keys(state: SpecState) -> Any:
    children, structure = _flatten(state)
    names = [*ARRAY_FIELDS, "kv"][: len(children)]
    return [(jax.tree_util.GetAttrKey(name), child) for name, child in zip(names, children, strict=True)], structure


jax.tree_util.register_pytree_with_keys(SpecState, _flatten_with_keys, _unflatten, _flatten)
torch_pytree.register_pytree_node(
    SpecState,
    _flatten,
    lambda children, structure: _unflatten(structure, children),
    serialized_type_name="funcspec.SpecState",
)


def check_field(config: SpecConfig, name: str, array: object, framework: str) -> None:
    """Refuse an array that does not fit its declaration.

    Raises:
        ArgumentError, ArgumentTypeError: it is none of the framework, or has another dtype or shape.
    """
    declared, shape = ARRAY_FIELDS[name]["dtype"], field_shape(config, name)
    kinds, kind = ((torch.Tensor,), "torch tensor") if framework == "torch" else ((jax.Array, np.ndarray), "jax.Array")
    if not isinstance(array, kinds) or str(array.dtype).removeprefix("torch.") != str(declared).removeprefix("torch."):
        found = getattr(array, "dtype", type(array).__name__)
        refuse(f"state.{name}", f"a {kind} of {declared}", found, "convert it before stepping", ArgumentTypeError)
    if tuple(array.shape) != shape:
        refuse(f"state.{name}", f"shape {shape}", tuple(array.shape), "keep the declared shape")


def check_fields(state: SpecState) -> None:
    """Refuse a state with arrays in it that a caller put there and that do not fit; for what reads fields on the host."""
    for name in ARRAY_FIELDS:
        check_field(state.config, name, state.lease.array(name), state.framework)


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
    return SpecState(state.config, lease.forked(words))


def any_active(state: SpecState) -> Any:
    """Whether any row still generates, for the condition of a loop.

    Waits for the GPU, and lets the host know the rows' lengths. For a JAX state it is a boolean array and waits for nothing until
    it is looked at, so that it can be the condition of `lax.while_loop`.

    Example:
        >>> import funcspec as fs
        >>> config = fs.SpecConfig(max_num_reqs=1, max_model_len=32, num_speculative_tokens=0, rule=fs.rules.greedy)
        >>> fs.any_active(fs.init(config, fs.models.ChecksumModel()))
        False
    """
    return check_state(state, "any_active").lease.any_live()


def check_phase(state: SpecState, step: str, expected: tuple[str, ...], fix: str) -> None:
    """Refuse a step at the wrong point of a round."""
    if state.lease.phase not in expected:
        raise StepOrderError(f"state: expected phase {' or '.join(map(repr, expected))} for {step}, got {state.lease.phase!r}. Fix: {fix}.")


__all__ = ["ARRAY_FIELDS", "BLOCK_TABLES", "SpecState", "any_active", "field_shape", "fork"]
