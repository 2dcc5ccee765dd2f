"""Steps on states of torch: in place in an arena of their own, on KV that a chain of states shares.

The state a step came from is not touched before the forward has succeeded: if a model raises, the state stays usable, donated or
not.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch

from funcspec.carried import CARRIED, FEATURES, LASTING, PROPOSALS, ROPE_POSITIONS, new_carried
from funcspec.constants import NO_TOKEN
from funcspec.errors import ArgumentTypeError, ModelError, refuse
from funcspec.kernels.kv_cache import copy_blocks_
from funcspec.kernels.op import Op
from funcspec.leases import Buffers, Lease
from funcspec.models.base import ForwardBatch, Model
from funcspec.pool import STRANGER, BlockCopies, Branch, Pool, RowBlocks
from funcspec.state import ARRAY_FIELDS, ROUND_START, SpecState, name_step
from funcspec.transitions.base import Transition
from funcspec.transitions.framework import Ingested, Kind, check_hidden
from funcspec.transitions.shapes import Shapes, in_blocks

LOGITS_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
NOTHING_TO_WRITE = 2**31 - 1


class TorchTransition(Transition):
    """A step on a state of torch.

    Attributes:
        target, draft: the branches as they will be in the new state.
    """

    fields: Buffers

    def __init__(self, state: SpecState, step: str, *, donate: bool) -> None:
        lease = state.lease
        assert isinstance(lease, Lease)
        lease.target.pool.check_thread(step)
        self.config = state.config
        self.name = name_step(step)
        self._lease = lease
        self._donate = donate
        self.target: Branch = lease.target
        self.draft: Branch | None = lease.draft
        self._reuses = donate and lease.buffers.arena is not None
        self.fields = lease.buffers if self._reuses else lease.buffers.packed()
        self.known_num_tokens = lease.known_num_tokens
        self.phase, self.stamp, self.draft_steps = lease.phase, lease.stamp, lease.draft_steps
        self.partners = lease.models

    def run(self, op: Op, **arguments: Any) -> Mapping[str, Any]:
        """Run an operation in place."""
        op(**arguments)
        return arguments

    def scratch(self, role: str, shapes: Callable[..., Shapes], *sizes: int) -> Mapping[str, torch.Tensor]:
        """Buffers that all steps of a pool share."""
        return self._kept(role, (shapes, *sizes), _zeros, shapes, sizes, self.config.device)

    def scratch_like(self, role: str, array: torch.Tensor) -> torch.Tensor:
        """A buffer that all steps of a pool share."""
        make = partial(torch.zeros, array.shape, dtype=array.dtype, device=array.device)
        return self._kept(role, ("like", array.shape, array.dtype), make)

    def records(self, **shapes: tuple[int, ...]) -> Mapping[str, torch.Tensor]:
        """New buffers, in one allocation for each shape."""
        device = self.config.device
        if len(shapes) == 1:
            ((name, shape),) = shapes.items()
            return {name: torch.empty(shape, dtype=torch.int32, device=device)}
        made = {}
        for shape in dict.fromkeys(shapes.values()):
            names = [name for name in shapes if shapes[name] == shape]
            made.update(zip(names, torch.empty((len(names), *shape), dtype=torch.int32, device=device).unbind(), strict=True))
        return made

    def proposals(self, *, write: bool = False) -> Mapping[str, torch.Tensor]:
        """The input's, to read; to write, those of the new state, taken over from a donated input, else copied or new."""
        return self._carried(PROPOSALS, write=write)

    def mark_points(self, points: torch.Tensor) -> None:
        """Copy into the new state's."""
        self._carried(PROPOSALS, write=True)["is_point"].copy_(points)

    def features(self, *, write: bool = False) -> torch.Tensor:
        """The input's, to read; to write, those of the new state."""
        return self._carried((FEATURES,), write=write)[FEATURES]

    def rope_positions(self) -> torch.Tensor:
        """The input's, to read."""
        return self._carried((ROPE_POSITIONS,), write=False)[ROPE_POSITIONS]

    def put_carried(self, rows: Sequence[int], values: Mapping[str, Any]) -> None:
        """Copy into those of the new state."""
        index = torch.tensor(rows, dtype=torch.int64, device=self.config.device)
        for name, array in self._carried(tuple(values), write=True).items():
            new = torch.as_tensor(values[name]).to(array.device, array.dtype)
            if name == FEATURES:
                array[index, : new.shape[1]] = new
            else:
                array[index] = new

    def _carried(self, names: tuple[str, ...], *, write: bool) -> dict[str, torch.Tensor]:
        """What is carried along, by name; to read, without what there is none of."""
        own, held = self.fields.carried, self._lease.carried()
        if not write:
            found = {**held, **own}
            return {name: found[name] for name in names if name in found}
        self._inherit(names)
        missing = [name for name in names if name not in own]
        if missing:
            own.update(new_carried(self.config, self._lease.models, missing))
        return {name: own[name] for name in names}

    def _inherit(self, names: Iterable[str]) -> None:
        """Give the new state what the input carries: the very same if it is donated, else a copy of what counts."""
        own, held = self.fields.carried, self._lease.buffers.carried if self._donate else self._lease.carried()
        for name in names:
            if name in held and name not in own:
                own[name] = held[name] if self._donate else held[name].clone()

    def copied(self, array: torch.Tensor) -> torch.Tensor:
        """A copy."""
        return array.clone()

    def detached(self, array: torch.Tensor) -> torch.Tensor:
        """The tensor without its history."""
        return array.detach()

    def constant(self, value: int) -> torch.Tensor:
        """One buffer for each value, made once."""
        rows, device = self.config.max_num_reqs, self.config.device
        return self._kept("target", ("constant", value), partial(torch.full, (rows,), value, dtype=torch.int32, device=device))

    def vector(self, values: Sequence[int]) -> torch.Tensor:
        """A new buffer."""
        return torch.tensor(values, dtype=torch.int32, device=self.config.device)

    def row_starts(self, width: int) -> torch.Tensor:
        """One buffer for each width, made once."""
        end, device = (self.config.max_num_reqs + 1) * width, self.config.device
        return self._kept("target", ("row starts", width), partial(torch.arange, 0, end, width, dtype=torch.int32, device=device))

    def _kept(self, role: str, key: object, make: Callable[..., Any], *arguments: Any) -> Any:
        kept = self._branch(role).pool.scratch
        found = kept.get(key)
        if found is None:
            found = kept[key] = make(*arguments)
        return found

    def is_array(self, value: object) -> bool:
        """Whether it is a tensor."""
        return isinstance(value, torch.Tensor)

    def check_array(self, argument: str, value: Any, shape: tuple[int, ...], kind: Kind, fix: str) -> None:
        """Refuse what does not fit."""
        dtypes = (torch.int32,) if kind == "an int32" else LOGITS_DTYPES
        expected = f"{kind} tensor {list(shape)} on {self.config.device}"
        if not isinstance(value, torch.Tensor):
            refuse(argument, expected, type(value).__name__, fix, ArgumentTypeError)
        if tuple(value.shape) != shape or value.dtype not in dtypes or value.device.type != self.config.device_type:
            refuse(argument, expected, f"{list(value.shape)} {value.dtype} on {value.device}", fix)
        if kind == "an int32" and not value.is_contiguous():
            refuse(argument, f"{expected} without gaps", f"strides {value.stride()}", "pass a contiguous tensor")

    def forward(self, role: str, model: Model, batch: ForwardBatch, count: int) -> tuple[torch.Tensor, tuple[torch.Tensor, ...]]:
        """Run the model on the role's pool."""
        return run_model(model, self._branch(role).pool, batch, count)

    def prepare_write(self, role: str) -> None:
        """Make sure the step may write the role's KV: in place for the tip, else into copies of the blocks it will touch.

        Raises:
            PoolExhaustedError: no room for the copies; nothing was written.
        """
        branch = self._branch(role)
        if branch.is_tip:
            return
        prepared, copies = branch.prepare_write(self._first_positions(role))
        if self._reuses:  # the input state must survive a failing forward, so its tables may not change
            self.fields, self._reuses = self._lease.buffers.packed(), False
        if copies is not None:
            self._copy(prepared, copies)
        self.table(role).copy_(prepared.table(self.config.blocks_per_row))
        self._set_branch(role, prepared)

    def advance(self, role: str, *, guarded: bool = True) -> None:
        """Become the tip of the role's branch after a write."""
        self._set_branch(role, self._branch(role).advance(guarded=guarded))

    def settle(self) -> None:
        """Commit what was scored."""
        self.target = self.target.settle()

    def close(self, phase: str, *, stamp: object = None, draft_steps: int = 0) -> SpecState:
        """Make the new state; a donated input dies here."""
        if phase == ROUND_START and self.draft is not None:
            self.draft = self.draft.release_guard()
        self._inherit(CARRIED if self._donate or phase != ROUND_START else LASTING)
        lease = self._lease
        new = Lease(self.fields, self.name, self.target, self.draft, lease.models, self.known_num_tokens, phase, stamp, draft_steps)
        if self._donate:
            lease.kill(self.name)
        return SpecState(self.config, new)

    def reserve(self, role: str, counts: Sequence[int]) -> list[RowBlocks]:
        """Take blocks from the role's pool."""
        return self._branch(role).pool.reserve(counts)

    def ingest(
        self,
        role: str,
        model: Model,
        blocks: RowBlocks,
        tokens: Sequence[int],
        chunk: int,
        *,
        layers: tuple[int, ...] = (),
        features: torch.Tensor | None = None,
        rope: np.ndarray | None = None,
    ) -> Ingested:
        """Feed tokens in passes of one row."""
        settings: dict[str, Any] = {"layers": layers, "features": features, "rope": rope}
        return ingest(model, self._branch(role).pool, blocks, tokens, chunk, self.config.device, **settings)

    def put_cache(self, role: str, blocks: RowBlocks, values: Mapping[str, torch.Tensor]) -> None:
        """Write into the role's pool."""
        pool = self._branch(role).pool
        for name, tokens in values.items():
            cache = pool.kv[name]
            cache[:, list(blocks.ids)] = in_blocks(tokens, len(blocks.ids), pool.block_size).to(cache.device)

    def rewind(self) -> None:
        """Be no tip: the next write copies the blocks it touches."""
        self.target = replace(self.target, version=STRANGER)
        self.draft = None if self.draft is None else replace(self.draft, version=STRANGER)

    def put_rows(self, rows: Sequence[int], values: Mapping[str, Any], blocks: Mapping[str, Sequence[Any]]) -> None:
        """Write rows of the arena and of the branches."""
        device = self.config.device
        tables = {}
        for role, taken in blocks.items():
            branch = self._branch(role).with_rows(dict(zip(rows, taken, strict=True)))
            self._set_branch(role, branch)
            tables["block_tables" if role == "target" else "draft_block_tables"] = branch.table(self.config.blocks_per_row)[list(rows)]
        index = torch.tensor(rows, dtype=torch.int64, device=device)
        for name, new in {**values, **tables}.items():
            field = getattr(self.fields, name)
            field[index] = torch.as_tensor(new, dtype=ARRAY_FIELDS[name]["dtype"]).reshape(len(rows), *field.shape[1:]).to(device)
        known = list(self.known_num_tokens)
        for row, count in zip(rows, values["num_tokens"], strict=True):
            known[row] = int(count)
        self.known_num_tokens = known

    def _branch(self, role: str) -> Branch:
        branch = self.target if role == "target" else self.draft
        if branch is None:
            raise ModelError(
                "drafter: expected the drafter the state was made with, got one for a state without a drafter. Fix: pass it to init."
            )
        return branch

    def _set_branch(self, role: str, branch: Branch) -> None:
        if role == "target":
            self.target = branch
        else:
            self.draft = branch

    def _first_positions(self, role: str) -> list[int]:
        """Lower bounds of the first position a step writes: exact on the CPU, from what the host knows elsewhere."""
        fields = self.fields
        exact = fields.num_tokens.device.type == "cpu"
        counts = fields.num_tokens.tolist() if exact else list(self.known_num_tokens)
        back = 1 if role == "target" else self.config.num_speculative_tokens + 1 + self.partners["draft"].lag
        if exact and role == "draft":
            starts = [min(n, d) for n, d in zip(counts, fields.draft_len.tolist(), strict=True)]
        else:
            starts = [max(n - back, 0) for n in counts]
        if not exact:
            return starts
        return [s if live else NOTHING_TO_WRITE for s, live in zip(starts, fields.is_live.tolist(), strict=True)]

    def _copy(self, branch: Branch, copies: BlockCopies) -> None:
        if not copies.source:
            return
        device = self.config.device
        pairs = torch.tensor([copies.source, copies.destination, copies.rows, copies.block_indices], dtype=torch.int32).to(device)
        lengths = self.fields.num_tokens + self.config.num_speculative_tokens
        for cache in branch.pool.kv.values():
            copy_blocks_(cache=cache, source=pairs[0], destination=pairs[1], rows=pairs[2], block_indices=pairs[3], lengths=lengths)


def _zeros(shapes: Callable[..., Shapes], sizes: tuple[int, ...], device: str) -> dict[str, torch.Tensor]:
    return {name: torch.zeros(shape, dtype=dtype, device=device) for name, (shape, dtype) in shapes(*sizes).items()}


def revive(state: SpecState, newest: SpecState) -> None:
    """Give a donated state its life back after a failure in mid-round: take over from `newest`, without its drafts."""
    lease, dead = newest.lease, state.lease
    assert isinstance(lease, Lease)
    assert isinstance(dead, Lease)
    fields = lease.buffers
    places = torch.arange(fields.tokens.shape[1], device=fields.tokens.device)
    fields.tokens.masked_fill_(places >= fields.num_tokens[:, None], NO_TOKEN)
    fields.num_draft.zero_()
    fields.num_drafted.zero_()
    # The newest token is fed again: drafting goes on from its logits.
    fields.draft_len.copy_(torch.minimum(fields.draft_len, fields.num_tokens - 1).clamp_(min=0))
    target, draft = lease.target, lease.draft.release_guard() if lease.draft is not None else None
    lease.kill("a round that failed")
    dead.revive(fields, target, draft)


def ingest(
    model: Model,
    pool: Pool,
    blocks: RowBlocks,
    tokens: Sequence[int],
    chunk: int,
    device: str,
    *,
    layers: tuple[int, ...] = (),
    features: torch.Tensor | None = None,
    rope: np.ndarray | None = None,
) -> Ingested:
    """Feed the first tokens of one row to its blocks of a pool, `chunk` at a time; see `Framework.ingest`."""
    logits, found = None, []
    size = pool.block_size
    table = torch.tensor([blocks.ids], dtype=torch.int32, device=device)
    wanted = 1 if features is None else 0
    for start in range(0, len(tokens), chunk):
        part = list(tokens[start : start + chunk])
        positions = range(start, start + len(part))
        slots = [blocks.ids[position // size] * size + position % size for position in positions]
        inputs = torch.tensor([part, list(positions), slots], dtype=torch.int32).to(device)
        bounds = torch.tensor([0, len(part), positions.stop, len(part) - 1], dtype=torch.int32).to(device)
        fed = None if features is None else features[start : positions.stop]
        last = bounds[3 : 3 + wanted]
        turned = None if rope is None else torch.tensor(rope[:, start : positions.stop], dtype=torch.int32).to(device)
        batch = ForwardBatch(inputs[0], inputs[1], bounds[:2], bounds[2:3], inputs[2], table, last, len(part), layers, fed, turned)
        logits, hidden = run_model(model, pool, batch, wanted)
        if layers:
            found.append(torch.cat(hidden, 1).float())
    return Ingested(logits if wanted else None, torch.cat(found) if found else None)


def run_model(model: Model, pool: Pool, batch: ForwardBatch, count: int) -> tuple[torch.Tensor, tuple[torch.Tensor, ...]]:
    """Run a forward without autograd and check what it returns.

    Raises:
        ModelError: the model returned other KV buffers, logits that are not [count, model.vocab_size] of float32, bfloat16 or float16, or
            not one hidden state for each layer that was asked for.
    """
    with torch.no_grad():
        result = model.forward(pool.kv, batch)
    if not isinstance(result, tuple) or len(result) != 3:
        raise ModelError(f"forward: expected (kv, logits, hidden), got {type(result).__name__}. Fix: return the three of them.")
    kv, logits, hidden = result
    if kv is not pool.kv and any(kv.get(name) is not buffer for name, buffer in pool.kv.items()):
        raise ModelError("forward: expected the KV buffers it was given, got others. Fix: write to them in place and return them.")
    if not isinstance(logits, torch.Tensor) or logits.shape != (count, model.vocab_size) or logits.dtype not in LOGITS_DTYPES:
        found = f"{tuple(logits.shape)} {logits.dtype}" if isinstance(logits, torch.Tensor) else type(logits).__name__
        raise ModelError(
            f"forward: expected float logits [{count}, {model.vocab_size}], got {found}. "
            "Fix: return logits at batch.logits_indices only (at all tokens if it is None), as a float32, bfloat16 or float16 tensor."
        )
    if batch.hidden_layers:
        check_hidden(hidden, batch)
    return logits, hidden


__all__ = ["LOGITS_DTYPES", "TorchTransition", "ingest", "revive", "run_model"]
