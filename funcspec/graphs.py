"""Whole rounds as one CUDA graph: one launch, no waiting, no allocation.

A captured step is donated by nature: it works in buffers of its own, at addresses that never change. What varies from round to
round is data: drafts wanted, lengths, block tables, who is live. `admit` and `release` with `donate=True` write in place between
replays.
"""

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import torch

from funcspec.carried import new_carried
from funcspec.config import SpecConfig, check_config
from funcspec.errors import ArgumentTypeError, BackendError, StateError, StepOrderError, refuse
from funcspec.kernels.acceptance import NOT_FINISHED
from funcspec.leases import Buffers, Lease
from funcspec.pool import Branch
from funcspec.state import SCORED, SpecState, check_phase, check_state, name_step
from funcspec.steps import Verdict
from funcspec.transitions.torch import TorchTransition

WARM_UPS = 3


class Captured:
    """A step recorded by `capture`; call it with a state.

    Attributes:
        name: the step's name, for messages.
        info: the info record that every replay writes anew.
    """

    def __init__(self, name: str, graph: torch.cuda.CUDAGraph, before: Lease, after: Lease, info: Any) -> None:
        self.name = name
        self.info = info
        self._graph = graph
        self._buffers = after.buffers
        self._before, self._after = before.phase, after.phase
        self._draft_steps = after.draft_steps
        self._pools = {"target": after.target.pool, "draft": None if after.draft is None else after.draft.pool}
        # By role: whether the step writes KV, and whether its result relies on places past the committed length.
        self._writes = {"target": _written(before.target, after.target), "draft": _written(before.draft, after.draft)}

    def __call__(self, state: SpecState, *, copy: bool = True) -> tuple[SpecState, Any]:
        """Replay the step on a state, which is dead afterwards.

        A state that does not live in the captured buffers yet is copied there first (one copy of the arena).

        Args:
            state: a live state of the configuration and models of the capture, at the same point of a round.
            copy: return a copy of the info record; False returns the record itself, which the next replay overwrites.

        Returns:
            the new state and the info record.

        Raises:
            StateError: another live state still uses the captured buffers, or the state has other models.
            StepOrderError: the state is at another point of the round.
            PoolExhaustedError: no room to copy on write. In all cases nothing was written.
        """
        lease = _torch_lease(state, self.name)
        check_phase(state, self.name, (self._before,), "replay at the point of the round that was captured")
        draft_pool = None if lease.draft is None else lease.draft.pool
        if lease.target.pool is not self._pools["target"] or draft_pool is not self._pools["draft"]:
            raise StateError(
                "state: expected a state of the pools that were captured, got one of others. "
                "Fix: capture again for a state that another init or restore made."
            )
        holder = self._buffers.holder() if self._buffers.holder is not None else None
        if lease.buffers is not self._buffers and holder is not None and holder.dead is None:
            raise StateError(
                "state: expected the state that the last replay returned, got another while that one lives. "
                "Fix: go on with that state, drop it, fork it and drop it, or capture a second graph."
            )
        step = TorchTransition(state, self.name, donate=True)
        for role, (writes, _) in self._writes.items():
            if writes:
                step.prepare_write(role)
        if step.fields is not self._buffers:
            self._buffers.copy_(step.fields, lease.carried())
            step.fields = self._buffers
        self._graph.replay()
        for role, (writes, guarded) in self._writes.items():
            if writes:
                step.advance(role, guarded=guarded)
        new = step.close(self._after, draft_steps=self._draft_steps)
        return new, _clone(self.info) if copy else self.info


def capture(step: Callable[..., tuple[SpecState, Any]], state: SpecState, *arguments: Any, **settings: Any) -> Captured:
    """Record a step, or any composition of steps, as one CUDA graph.

    The step is run a few times on an idle twin of the state (kernels compile, scratch is allocated), then recorded. The state
    itself is neither changed nor consumed.

    Args:
        step: takes a state, the arguments and `donate=True`; returns a state and an info record, for example
            `funcspec.step_round`. It may not read the device on the host, nor end between `score` and `accept`.
        state: a state on a GPU, at the point of a round where the step begins.
        *arguments, **settings: passed to the step. Tensors among them, such as `num_draft`, are read anew at every replay: write
            to them in place.

    Returns:
        the captured step.

    Raises:
        ArgumentTypeError: `step` is no function, or does not return a state and an info record.
        BackendError: the state is not on a GPU, or the step does something that cannot be captured.

    Example:
        ```
        wanted = torch.full((4,), 3, dtype=torch.int32, device="cuda")
        captured = graphs.capture(fs.step_round, state, target, drafter, num_draft=wanted)
        while fs.any_active(state):
            state, verdict = captured(state)
        ```
    """
    lease = _torch_lease(state, "capture")
    _check_step(step)
    if state.config.device_type != "cuda":
        refuse("state", "a state on a GPU", f"one on {state.config.device}", "set SpecConfig.device to 'cuda'", BackendError)
    name = f"captured {getattr(step, '__name__', 'step')}"
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(WARM_UPS):
            twin = _twin(state, _with_carried(Buffers.filled(state.config), lease))
            _check_result(step(twin, *arguments, donate=True, **settings), object)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    twin = _twin(state, _with_carried(lease.buffers.packed(), lease))
    before = _torch_lease(twin, name)
    branches = before.target, before.draft
    try:
        with torch.cuda.graph(graph):
            new, info = step(twin, *arguments, donate=True, **settings)
    except RuntimeError as error:
        raise BackendError(
            f"step: expected a step that never reads the device on the host, got {type(error).__name__} while {name} was recorded: "
            f"{str(error).splitlines()[0]}. Fix: leave printing, .tolist() and .item() out of it, and use models that do not wait."
        ) from error
    if new.lease.phase == SCORED:
        raise StepOrderError(
            "step: expected one that ends at a round's start or while drafting, got one that ends scored. Fix: add accept."
        )
    before.target, before.draft = branches  # the donated twin has let go of them
    return Captured(name, graph, before, _torch_lease(new, name), info)


def one_round_late(step: Callable[[SpecState], tuple[SpecState, Verdict]], state: SpecState) -> Iterator[tuple[SpecState, Verdict]]:
    """Run rounds until no row generates, and read each verdict while the device is at work on the round after it.

    The device never waits for the host: verdicts travel through pinned memory. The price is one round too many at the end, which does
    no harm, as rows that have finished emit nothing.

    Args:
        step: a round, captured or eager: takes a state, returns a state and a verdict. It may consume its state and reuse its verdict.
        state: a state of torch at the start of a round.

    Raises:
        ArgumentTypeError: `step` is no function, or does not return a state and a verdict.

    Yields:
        the newest state, of the round that was just given to the device, and the verdict of the round before it, on the host.

    Example:
        >>> import funcspec as fs
        >>> target, drafter = fs.models.ChecksumModel(), fs.drafters.standalone(fs.models.ChecksumDraft())
        >>> config = fs.SpecConfig(max_num_reqs=1, max_model_len=32, num_speculative_tokens=3, rule=fs.rules.greedy)
        >>> state, _ = fs.admit(fs.init(config, target, drafter), target, drafter, [[5, 6, 7]], max_tokens=6)
        >>> for state, verdict in one_round_late(lambda state: fs.step_round(state, target, drafter, donate=True), state):
        ...     print(verdict.tokens[0, : int(verdict.num_emitted)].tolist())
        [1, 6]
        [42]
        [45]
        [17]
    """
    _torch_lease(state, "one_round_late")
    _check_step(step)
    before, newest = HostVerdict(state.config), HostVerdict(state.config)
    state, verdict = _check_result(step(state), Verdict)
    before.copy(verdict)
    goes_on = True
    while goes_on:
        state, verdict = _check_result(step(state), Verdict)
        newest.copy(verdict)
        found = before.read()
        goes_on = bool(((found.num_emitted > 0) & (found.finish_reason == NOT_FINISHED)).any())
        yield state, found
        before, newest = newest, before


class HostVerdict:
    """A verdict on its way to the host: pinned memory, and an event that tells when it has arrived.

    Args:
        config: the states' configuration.
    """

    def __init__(self, config: SpecConfig) -> None:
        check_config(config)
        rows, width = config.max_num_reqs, config.num_speculative_tokens + 1
        pinned = config.device_type == "cuda"
        shapes = {name: (rows, width) if name in ("tokens", "origin") else (rows,) for name in Verdict.__dataclass_fields__}
        self._fields = {name: torch.empty(shape, dtype=torch.int32, pin_memory=pinned) for name, shape in shapes.items()}
        self._arrived = torch.cuda.Event() if pinned else None

    def copy(self, verdict: Verdict) -> None:
        """Begin to copy; does not wait."""
        for name, field in self._fields.items():
            field.copy_(getattr(verdict, name), non_blocking=True)
        if self._arrived is not None:
            self._arrived.record()

    def read(self) -> Verdict:
        """Wait for the copy; return a verdict of its own on the host."""
        if self._arrived is not None:
            self._arrived.synchronize()
        return Verdict(**{name: field.clone() for name, field in self._fields.items()})


def _check_step(step: object) -> None:
    if not callable(step):
        refuse("step", "a function of a state", type(step).__name__, "pass one, such as funcspec.step_round", ArgumentTypeError)


def _check_result(result: Any, info: type) -> tuple[SpecState, Any]:
    """Refuse what a step may not return."""
    if not isinstance(result, tuple) or len(result) != 2 or not isinstance(result[0], SpecState) or not isinstance(result[1], info):
        expected = f"one that returns a state and a{' Verdict' if info is Verdict else 'n info record'}"
        found = f"one that returns {tuple(type(part).__name__ for part in result)}" if isinstance(result, tuple) else type(result).__name__
        refuse("step", expected, found, "return what step_round returns", ArgumentTypeError)
    return result


def _twin(state: SpecState, buffers: Buffers) -> SpecState:
    """A state over `buffers` at the same point of the round, whose rows hold no blocks: what is recorded does not depend on them."""
    lease, rows = _torch_lease(state, "capture"), (None,) * state.config.max_num_reqs
    draft = None if lease.draft is None else Branch(lease.draft.pool, rows)
    known = [0] * state.config.max_num_reqs
    target = Branch(lease.target.pool, rows)
    twin = Lease(buffers, name_step("capture"), target, draft, lease.models, known, lease.phase, None, lease.draft_steps)
    return SpecState(state.config, twin)


def _with_carried(buffers: Buffers, lease: Lease) -> Buffers:
    """Give buffers what the lease carries along, and new arrays for the rest, so that recording allocates none."""
    buffers.carried = new_carried(lease.config, lease.models) | lease.copied_carried()
    return buffers


def _torch_lease(state: SpecState, use: str) -> Lease:
    """The lease of a live state of torch."""
    lease = check_state(state, use).lease
    if not isinstance(lease, Lease):
        refuse("state", "a state of torch", "one of JAX", "use jax.jit with donate_argnums=0, and lax.scan over rounds", BackendError)
    return lease


def _written(before: Branch | None, after: Branch | None) -> tuple[bool, bool]:
    """Whether a branch was written to, and whether it ended with a guard."""
    if before is None or after is None:
        return False, False
    return after.version != before.version, after.guard is not None


def _clone(info: Any) -> Any:
    """An info record with its tensors copied."""
    if isinstance(info, torch.Tensor):
        return info.clone()
    if isinstance(info, tuple | list):
        return type(info)(map(_clone, info))
    if dataclasses.is_dataclass(info) and not isinstance(info, type):
        return dataclasses.replace(info, **{f.name: _clone(getattr(info, f.name)) for f in dataclasses.fields(info)})
    return info


__all__ = ["Captured", "HostVerdict", "capture", "one_round_late"]
