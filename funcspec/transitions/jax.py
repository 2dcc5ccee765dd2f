"""Steps on states of JAX: every operation is lifted, every write is a new value, and XLA decides what is copied.

The same code runs eagerly and while `jax.jit`, `lax.scan` or `lax.while_loop` traces it. Admission looks at values and so runs outside.
"""

from collections.abc import Callable, Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch
from jax.core import Tracer

from funcspec.carried import CARRIED, FEATURES, PROPOSALS, ROPE_POSITIONS
from funcspec.config import SpecConfig
from funcspec.constants import PAD_SLOT
from funcspec.errors import ArgumentTypeError, ModelError, refuse
from funcspec.interop import jax_dtype, lift
from funcspec.kernels.op import Op, next_power_of_2
from funcspec.leases import JaxLease, host_copy
from funcspec.models.base import ForwardBatch, Model
from funcspec.pool import refuse_reservation
from funcspec.state import ARRAY_FIELDS, SpecState, field_shape, name_step
from funcspec.transitions.base import Transition
from funcspec.transitions.framework import Ingested, Kind, check_hidden
from funcspec.transitions.shapes import Shapes, in_blocks

LOGITS_DTYPES = (jnp.float32, jnp.bfloat16, jnp.float16)

LEAST_PASS = 16
"""Prompts are fed in passes of a power of two places, at least this many, so that few programs are compiled."""


class JaxTransition(Transition):
    """A step on a state of JAX.

    Attributes:
        kv: by role, the KV as it is now; and what is carried along.
    """

    fields: SimpleNamespace

    def __init__(self, state: SpecState, step: str, *, donate: bool) -> None:
        lease = state.lease
        assert isinstance(lease, JaxLease)
        self.config = state.config
        self.name = name_step(step)
        self._lease = lease
        self._donate = donate
        self.fields = SimpleNamespace(**{name: _field(self.config, name, lease.arrays[name]) for name in ARRAY_FIELDS})
        self.kv = dict(lease.kv)
        self.phase, self.stamp, self.draft_steps = lease.phase, lease.stamp, lease.draft_steps
        self.partners = lease.models
        self._reserved: dict[str, set[int]] = {}

    def run(self, op: Op, **arguments: Any) -> Mapping[str, Any]:
        """Run an operation as a function; fields that it writes are replaced."""
        out = arguments | lift(op)(**arguments)
        for name in op.writes:
            if name in ARRAY_FIELDS:
                setattr(self.fields, name, out[name])
        self._carry({name: out[name] for name in op.writes if name in CARRIED})
        return out

    def proposals(self, *, write: bool = False) -> Mapping[str, jax.Array]:
        """They are part of every state under a ratio rule."""
        return {name: array for name, array in self.kv.get("carried", {}).items() if name in PROPOSALS}

    def mark_points(self, points: jax.Array) -> None:
        """Replace the array."""
        self._carry({"is_point": points})

    def features(self, *, write: bool = False) -> jax.Array:
        """They are part of every state whose draft reads hidden states."""
        return self.kv["carried"][FEATURES]

    def rope_positions(self) -> jax.Array:
        """They are part of every state whose target has some."""
        return self.kv["carried"][ROPE_POSITIONS]

    def put_carried(self, rows: Sequence[int], values: Mapping[str, Any]) -> None:
        """Make them anew."""
        index = np.array(rows, np.int32)
        for name, new in values.items():
            array, new = self.kv["carried"][name], jnp.array(torch.as_tensor(new).cpu().numpy())
            at = array.at[index, : new.shape[1]] if name == FEATURES else array.at[index]
            self._carry({name: at.set(new)})

    def _carry(self, values: Mapping[str, jax.Array]) -> None:
        if values:
            self.kv["carried"] = {**self.kv["carried"], **values}

    def scratch(self, role: str, shapes: Callable[..., Shapes], *sizes: int) -> Mapping[str, Any]:
        """Shapes only: the operation makes new arrays."""
        return {name: jax.ShapeDtypeStruct(shape, jax_dtype(dtype)) for name, (shape, dtype) in shapes(*sizes).items()}

    def scratch_like(self, role: str, array: jax.Array) -> Any:
        """A shape only."""
        return jax.ShapeDtypeStruct(array.shape, array.dtype)

    def records(self, **shapes: tuple[int, ...]) -> Mapping[str, Any]:
        """Shapes only: the operation makes new arrays."""
        return {name: jax.ShapeDtypeStruct(shape, jnp.int32) for name, shape in shapes.items()}

    def copied(self, array: jax.Array) -> jax.Array:
        """An array of its own: a record outlives the state it is about, donated or not."""
        return _owned(array)

    def detached(self, array: jax.Array) -> jax.Array:
        """The array: operations are not differentiated."""
        return jax.lax.stop_gradient(array)

    def constant(self, value: int) -> jax.Array:
        """A new array."""
        return jnp.full(self.config.max_num_reqs, value, jnp.int32)

    def vector(self, values: Sequence[int]) -> jax.Array:
        """A new array."""
        return jnp.array(values, jnp.int32)

    def row_starts(self, width: int) -> jax.Array:
        """A new array."""
        return jnp.arange(0, (self.config.max_num_reqs + 1) * width, width, dtype=jnp.int32)

    def is_array(self, value: object) -> bool:
        """Whether it is a JAX array, or stands for one while JAX traces."""
        return isinstance(value, jax.Array)

    def check_array(self, argument: str, value: Any, shape: tuple[int, ...], kind: Kind, fix: str) -> None:
        """Refuse what does not fit."""
        dtypes = (jnp.int32,) if kind == "an int32" else LOGITS_DTYPES
        expected = f"{kind} jax.Array {list(shape)}"
        if not isinstance(value, jax.Array):
            refuse(argument, expected, type(value).__name__, fix, ArgumentTypeError)
        if value.shape != shape or value.dtype not in dtypes:
            refuse(argument, expected, f"{list(value.shape)} {value.dtype}", fix)

    def forward(self, role: str, model: Model, batch: ForwardBatch, count: int) -> tuple[jax.Array, tuple[jax.Array, ...]]:
        """Run the model on the role's KV."""
        self.kv[role], logits, hidden = _checked(model, self.kv[role], batch, count)
        return logits, hidden

    def prepare_write(self, role: str) -> None:
        """Do nothing: values are not shared."""

    def advance(self, role: str) -> None:
        """Do nothing: values are not shared."""

    def settle(self) -> None:
        """Do nothing: values are not shared."""

    def close(self, phase: str, *, stamp: object = None, draft_steps: int = 0) -> SpecState:
        """Make the new state. Unless the input is given up, it shares no array with it: donating one leaves the other alone."""
        new = JaxLease(self.config, vars(self.fields), self.kv, self._lease.models, phase, draft_steps)
        if not self._donate:
            before = {id(leaf) for leaf in jax.tree.leaves(self._lease.flatten()[0])}
            children, structure = new.flatten()
            new = structure.rebuild(jax.tree.map(lambda leaf: _owned(leaf) if id(leaf) in before else leaf, children))
        return SpecState(self.config, new)

    def reserve(self, role: str, counts: Sequence[int]) -> list[tuple[int, ...]]:
        """Take blocks that stand in no block table."""
        if role not in self._reserved:
            self._reserved[role] = {block for row in self._lease.blocks(role) for block in row or ()}
        held, total = self._reserved[role], self.config.num_kv_blocks
        free = (block for block in range(total) if block not in held)
        if sum(counts) > total - len(held):
            refuse_reservation(role, sum(counts), total - len(held), total)
        taken = [tuple(next(free) for _ in range(count)) for count in counts]
        held.update(*taken)
        return taken

    def ingest(
        self,
        role: str,
        model: Model,
        blocks: tuple[int, ...],
        tokens: Sequence[int],
        chunk: int,
        *,
        layers: tuple[int, ...] = (),
        features: torch.Tensor | None = None,
        rope: np.ndarray | None = None,
    ) -> Ingested:
        """Feed tokens in padded passes of one row."""
        owned = self.kv[role] is not self._lease.kv[role]  # the first pass leaves the caller's KV as it is, later ones work in place
        settings: dict[str, Any] = {"owned": owned, "layers": layers, "features": features, "rope": rope}
        self.kv[role], found = ingest(model, self.kv[role], blocks, tokens, chunk, self.config, **settings)
        return found

    def put_cache(self, role: str, blocks: tuple[int, ...], values: Mapping[str, torch.Tensor]) -> None:
        """Make new KV with the row in it."""
        new = dict(self.kv[role])
        for name, tokens in values.items():
            padded = jnp.from_dlpack(in_blocks(tokens, len(blocks), self.config.block_size))
            new[name] = new[name].at[:, np.array(blocks, np.int32)].set(padded)
        self.kv[role] = new

    def rewind(self) -> None:
        """Do nothing: values are not shared."""

    def put_rows(self, rows: Sequence[int], values: Mapping[str, Any], blocks: Mapping[str, Sequence[Any]]) -> None:
        """Make the fields anew, on the host."""
        tables = {}
        for role, taken in blocks.items():
            padded = [block_row(self.config, ids) for ids in taken]
            tables["block_tables" if role == "target" else "draft_block_tables"] = padded
        for name, new in {**values, **tables}.items():
            field = host_copy(getattr(self.fields, name))
            field[list(rows)] = np.asarray(new, dtype=field.dtype).reshape(len(rows), *field.shape[1:])
            setattr(self.fields, name, jnp.array(field))


def block_row(config: SpecConfig, ids: Sequence[int] | None) -> list[int]:
    """One row of a block table, -1 where the row owns no block."""
    owned = list(ids or ())
    return owned + [PAD_SLOT] * (config.blocks_per_row - len(owned))


def ingest(
    model: Model,
    kv: Mapping[str, Any],
    blocks: Sequence[int],
    tokens: Sequence[int],
    chunk: int,
    config: SpecConfig,
    *,
    owned: bool,
    layers: tuple[int, ...] = (),
    features: torch.Tensor | None = None,
    rope: np.ndarray | None = None,
) -> tuple[Mapping[str, Any], Ingested]:
    """Feed the first tokens of one row to its blocks, `chunk` at a time, in passes padded to a power of two places.

    Args:
        model: whose KV it is.
        kv: its KV.
        blocks: ids of the row's blocks.
        tokens: token ids.
        chunk: most tokens in a pass.
        config: the state's configuration.
        owned: whether `kv` may be donated to the first pass; later passes work in place in any case.
        layers, features, rope: as for `Framework.ingest`.

    Returns:
        the new KV, and what was found on the way.
    """
    logits, found = None, []
    wanted = 1 if features is None else 0
    size = config.block_size
    opaque = jax.tree_util.all_leaves([model])  # a model that is no pytree is not an argument of a program
    for start in range(0, len(tokens), chunk):
        part = list(tokens[start : start + chunk])
        width = max(next_power_of_2(len(part)), LEAST_PASS)
        places = np.full((3, width), 0, np.int32)
        places[2] = PAD_SLOT
        positions = np.arange(start, start + len(part), dtype=np.int32)
        places[:, : len(part)] = part, positions, np.asarray(blocks, np.int32)[positions // size] * size + positions % size
        starts, last = np.array([0, len(part)], np.int32), np.array([len(part) - 1] * wanted, np.int32)
        seen, table = np.array([start + len(part)], np.int32), np.array([block_row(config, blocks)], np.int32)
        ids, at, starts, seen, slots, table, last = map(jnp.array, (places[0], places[1], starts, seen, places[2], table, last))
        fed = None
        if features is not None:
            rows = features[start : start + len(part)].cpu()
            fed = jnp.array(torch.nn.functional.pad(rows, (0, 0, 0, width - len(part))).numpy())
        turned = None
        if rope is not None:
            turned = jnp.array(np.pad(rope[:, start : start + len(part)], ((0, 0), (0, width - len(part)))).astype(np.int32))
        batch = ForwardBatch(ids, at, starts, seen, slots, table, last, width, layers, fed, turned)
        run = _checked if opaque else _in_place if owned else _copied
        kv, logits, hidden = run(model, kv, batch, wanted)
        if layers:
            found.append(torch.from_dlpack(jnp.concatenate(hidden, 1)[: len(part)].astype(jnp.float32)))
        owned = True
    after = torch.from_dlpack(logits) if logits is not None and wanted else None
    return kv, Ingested(after, torch.cat(found) if found else None)


def _owned(array: jax.Array) -> jax.Array:
    """A copy. Not while JAX traces: what leaves a program is its own anyway."""
    return array if isinstance(array, Tracer) else jnp.array(array, copy=True)


def _field(config: SpecConfig, name: str, value: Any) -> jax.Array:
    """A field as a JAX array of its declared shape and dtype."""
    declared = ARRAY_FIELDS[name]
    dtype = jax_dtype(declared["dtype"])
    if not isinstance(value, jax.Array | np.ndarray) or value.dtype != dtype:
        found = getattr(value, "dtype", type(value).__name__)
        refuse(f"state.{name}", f"a jax.Array of {jnp.dtype(dtype).name}", found, "convert it before stepping", ArgumentTypeError)
    if value.shape != field_shape(config, name):
        refuse(f"state.{name}", f"shape {field_shape(config, name)}", value.shape, "keep the declared shape")
    return jnp.asarray(value)


def _checked(
    model: Model, kv: Mapping[str, Any], batch: ForwardBatch, count: int
) -> tuple[Mapping[str, Any], jax.Array, tuple[jax.Array, ...]]:
    """Run a forward and check what it returns.

    Raises:
        ModelError: the new KV is not shaped as the old one, the logits are not [count, model.vocab_size] of a float type, or hidden states
            are missing.
    """
    result = model.forward(kv, batch)
    if not isinstance(result, tuple) or len(result) != 3:
        raise ModelError(f"forward: expected (kv, logits, hidden), got {type(result).__name__}. Fix: return the three of them.")
    new, logits, hidden = result
    shapes = {name: (array.shape, array.dtype) for name, array in kv.items()}
    if not isinstance(new, Mapping) or {name: (array.shape, array.dtype) for name, array in new.items()} != shapes:
        raise ModelError(f"forward: expected new KV with the shapes and dtypes of the old, {shapes}, got another. Fix: return all of it.")
    if not isinstance(logits, jax.Array) or logits.shape != (count, model.vocab_size) or logits.dtype not in LOGITS_DTYPES:
        found = f"{logits.shape} {logits.dtype}" if isinstance(logits, jax.Array) else type(logits).__name__
        raise ModelError(
            f"forward: expected float logits [{count}, {model.vocab_size}], got {found}. "
            "Fix: return logits at batch.logits_indices only (at all tokens if it is None), as a float32, bfloat16 or float16 jax.Array."
        )
    if batch.hidden_layers:
        check_hidden(hidden, batch)
    return dict(new), logits, tuple(hidden)


_copied = jax.jit(_checked, static_argnums=3)
_in_place = jax.jit(_checked, static_argnums=3, donate_argnums=1)

__all__ = ["JaxTransition", "block_row", "ingest"]
