"""What a refused call must leave alone, and the form of a refusal; for `test_bad_input.py`."""

import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from oracle import config, pair

import funcspec as fs
from funcspec.errors import FuncspecError
from funcspec.state import ARRAY_FIELDS

TARGET, DRAFTER = pair()
ROWS, LENGTH, DRAFTS, STOPS = 3, 32, 3, 2
CONFIG = config(rows=ROWS, length=LENGTH, drafts=DRAFTS, block_size=4, max_num_stop_ids=STOPS, rule=fs.rules.coupled)
GREEDY = CONFIG.replace(rule=fs.rules.greedy)
NAN, INF = float("nan"), float("inf")

MESSAGE = re.compile(r"^(?P<argument>[\w.\[\]]+): expected (?P<expected>.+), got (?P<actual>.+)\. Fix: (?P<fix>.+)\.$", re.DOTALL)


@dataclass
class World:
    """States at every point of a round, rows 0 and 2 taken, row 1 free; and what a bad call must not change.

    Attributes:
        snap, paused: snapshots of `state`, of all rows and of row 0.
        folder: for files; "saved" in it is `state`.
    """

    state: fs.SpecState
    drafting: fs.SpecState
    scored: fs.SpecState
    scores: fs.Scores
    plain: fs.SpecState
    greedy: fs.SpecState
    dead: fs.SpecState
    full: fs.SpecState
    snap: fs.Snapshot
    paused: fs.Snapshot
    folder: Path
    donate: bool

    @property
    def saved(self) -> Path:
        return self.folder / "saved"

    def turn(self, state: fs.SpecState) -> tuple[fs.SpecState, fs.Verdict]:
        """A round."""
        return fs.step_round(state, TARGET, DRAFTER, donate=self.donate)

    def states(self) -> dict[str, fs.SpecState]:
        """Every live state, by name."""
        return {name: getattr(self, name) for name in ("state", "drafting", "scored", "plain", "greedy", "full")}


def make_world(donate: bool, folder: Path) -> World:
    state = fs.init(CONFIG, TARGET, DRAFTER)
    state, _ = fs.admit(state, TARGET, DRAFTER, [[5, 6, 7], [1]], seeds=[1, 2], temperature=[0, 0.7], rows=[0, 2])
    state, _ = fs.step_round(state, TARGET, DRAFTER)
    drafting, _ = fs.prefill(state, DRAFTER)
    scored, scores = fs.score(drafting, TARGET)
    plain = fs.init(CONFIG, TARGET)
    plain, _ = fs.admit(plain, TARGET, None, [[5, 6, 7]], rows=[0])
    greedy = fs.init(GREEDY, TARGET, DRAFTER)
    dead = fs.fork(state)
    fs.release(dead, [1], donate=True)
    small = CONFIG.replace(num_blocks=8)
    full = fs.init(small, TARGET, DRAFTER)
    full, _ = fs.admit(full, TARGET, DRAFTER, [[5, 6, 7]])
    fs.save(state, folder / "saved")
    taken = fs.snapshot(state), fs.snapshot(state, rows=[0])
    return World(state, drafting, scored, scores, plain, greedy, dead, full, *taken, folder, donate)


def value(state: fs.SpecState) -> tuple[Any, ...]:
    """All that a refused call could have changed: small buffers, phase, tip, KV that counts, free blocks."""
    fields = {name: getattr(state, name).clone() for name in ARRAY_FIELDS}
    lease = state.lease
    branches = [lease.target] + ([lease.draft] if lease.draft is not None else [])
    free = [branch.pool.num_free_blocks for branch in branches]
    owned = [tuple(row and row.ids for row in branch.rows) for branch in branches]
    phase = (lease.phase, lease.draft_steps, lease.stamp, tuple(lease.known_num_tokens))
    taken = None if lease.phase == "scored" else fs.snapshot(state)
    return fields, free, owned, phase, taken


def assert_same(before: tuple[Any, ...], after: tuple[Any, ...]) -> None:
    assert all(torch.equal(before[0][name], after[0][name]) for name in ARRAY_FIELDS)
    assert before[1:] == after[1:]


@dataclass(frozen=True)
class Bad:
    """A call that must be refused. Its name begins with that of the function, and a colon."""

    name: str
    call: Callable[[World], Any]
    error: type[Exception]
    message: str

    @property
    def function(self) -> str:
        return self.name.split(":")[0]


def described(value: object) -> str:
    """A short name of a value."""
    if isinstance(value, type) or hasattr(value, "__qualname__"):
        return f"the {'class' if isinstance(value, type) else 'function'} {value.__qualname__}"
    if hasattr(value, "dtype"):
        return f"{type(value).__name__} {list(value.shape)} {value.dtype}"
    shown = repr(value)
    return type(value).__name__ + ("" if " object at " in shown or len(shown) > 40 else f" {shown}")


def each(
    name: str, wrongs: Iterable[Any], call: Callable[[World, Any], Any], message: str, error: type[Exception] = FuncspecError
) -> Iterator[Bad]:
    """A bad call for each wrong value of an argument; the name ends with the value."""
    for wrong in wrongs:
        yield Bad(f"{name} {described(wrong)}", lambda world, wrong=wrong: call(world, wrong), error, message)


def refusal(bad: Bad, world: World) -> Exception:
    """The error a bad call raises, without the frames that would keep blocks alive."""
    try:
        bad.call(world)
    except Exception as error:
        return error.with_traceback(None)
    pytest.fail(f"{bad.name} was accepted")
