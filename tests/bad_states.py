"""Calls with bad copies of states: forks, snapshots, files, shorter rows, rounds in other hands; for `test_bad_input.py`."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from refusals import CONFIG, DRAFTER, GREEDY, TARGET, Bad, World, each

import funcspec as fs
from funcspec.drafters import Ngram, Standalone, ngram, standalone
from funcspec.errors import ArgumentError, ArgumentTypeError, CapacityError, DonatedStateError, FileError, FuncspecError, ModelError
from funcspec.graphs import HostVerdict, capture, one_round_late
from funcspec.models import ChecksumDraft, ChecksumModel

NO_KV = r"^(target|drafter): expected the model, as this snapshot has no KV, got None\. Fix: pass target and drafter"
NO_MODELS = (None, "gpt2", 3, DRAFTER, ChecksumModel)
NO_BOOLS = (None, "yes", 1, torch.ones(2))


def _forks() -> Iterator[Bad]:
    wrongs = ([], [1, 2], [1] * 4, 3, 1.5, "12", torch.tensor([1, 2, 3]))
    yield from each("fork: seeds", wrongs, lambda world, wrong: fs.fork(world.state, seeds=wrong), r"^seeds: expected 3 seeds, one a row")
    kind = r"^seeds?: expected a 64-bit integer, got"
    for wrongs, error in (((True, 1.0, "1", None), ArgumentTypeError), ((2**64, -(2**63) - 1), ArgumentError)):
        yield from each("fork: seed", wrongs, lambda world, wrong: fs.fork(world.state, seeds=[1, 2, wrong]), kind, error)


def _snapshots() -> Iterator[Bad]:
    wrongs = ([-1], [3], [0, 7], [True], [0.0], "0", 7, torch.tensor([0]))
    numbers = r"^rows: expected row numbers from 0 to 2, got"
    yield from each("snapshot: rows", wrongs, lambda world, wrong: fs.snapshot(world.state, rows=wrong), numbers)
    yield Bad("snapshot: rows twice", lambda world: fs.snapshot(world.state, rows=[0, 0]), ArgumentError, r"^rows: expected distinct rows")
    yield Bad("snapshot: no rows", lambda world: fs.snapshot(world.state, rows=[]), ArgumentError, r"^rows: expected at least one row")
    yield from each("snapshot: kv", NO_BOOLS, lambda world, wrong: fs.snapshot(world.state, kv=wrong), r"^kv: expected True or False")


def _restores() -> Iterator[Bad]:
    wrongs = (None, "snapshot", b"", {}, fs.Snapshot)
    kind = r"^snapshot: expected a Snapshot, got"
    yield from each("restore: snapshot", wrongs, lambda world, wrong: fs.restore(wrong), kind, ArgumentTypeError)
    yield Bad("restore: a state", lambda world: fs.restore(world.state), ArgumentTypeError, rf"{kind} SpecState")
    yield Bad("restore: a pair", lambda world: fs.restore((world.snap, None)), ArgumentTypeError, rf"{kind} tuple")
    yield Bad("restore: no KV, no models", lambda world: fs.restore(fs.snapshot(world.state, kv=False)), ModelError, NO_KV)
    yield Bad("restore: no KV, no drafter", lambda world: fs.restore(fs.snapshot(world.state, kv=False), TARGET), ModelError, NO_KV)
    # Without a model of its own, `ngram()` is not what this state was made with: its draft KV would stand still.
    wrongs = ("drafter", 3, ChecksumDraft(), Standalone, Ngram, standalone, ngram())
    yield from each("restore: drafter", wrongs, lambda world, wrong: fs.restore(world.snap, TARGET, wrong), r"^drafter: expected ")
    yield Bad(
        "restore: drafter for a plain state",
        lambda world: fs.restore(fs.snapshot(world.plain), TARGET, DRAFTER),
        ModelError,
        r"^drafter: expected None, as the state was made with, got Standalone",
    )
    yield Bad(
        "restore: drafter of other length",
        lambda world: fs.restore(world.snap, TARGET, standalone(ChecksumDraft(max_len=64))),
        ModelError,
        r"^drafter: expected the model the state was made for",
    )
    wrongs = ("numpy", "", 3, True, torch.ones(2))
    words = r"^framework: expected 'torch', 'jax' or None, got"
    yield from each("restore: framework", wrongs, lambda world, wrong: fs.restore(world.snap, framework=wrong), words)
    other = r"^target: expected the model the state was made for \(of jax"
    yield Bad("restore: models of torch", lambda world: fs.restore(world.snap, TARGET, DRAFTER, framework="jax"), ModelError, other)


def _resumes() -> Iterator[Bad]:
    def resume(world: World, taken: Any, *models: Any, state: fs.SpecState | None = None, rows: Any = None) -> Any:
        return fs.resume(world.state if state is None else state, taken, *models, rows=rows, donate=world.donate)

    wrongs = (None, "snapshot", 3, b"", fs.Snapshot)
    kind = r"^snapshot: expected a Snapshot, got"
    yield from each("resume: snapshot", wrongs, resume, kind, ArgumentTypeError)
    yield Bad("resume: a state as snapshot", lambda world: resume(world, world.state), ArgumentTypeError, rf"{kind} SpecState")
    for name, error, message, take in (
        ("in mid-round", FuncspecError, r"expected one taken at a round's start", lambda world: fs.snapshot(world.drafting, rows=[0])),
        ("of an idle row", ArgumentError, r"expected a request in every row, got an idle row", lambda world: fs.snapshot(world.state)),
        ("of another rule", ArgumentError, r"expected rows of a state of", lambda world: fs.snapshot(world.greedy, rows=[0])),
        ("of other models", ModelError, r"expected rows for the models of this state", lambda world: fs.snapshot(world.plain, rows=[0])),
    ):
        yield Bad(f"resume: snapshot {name}", lambda world, take=take: resume(world, take(world)), error, rf"^snapshot: {message}")
    bare = Bad("resume: no KV, no models", lambda world: resume(world, fs.snapshot(world.state, rows=[0], kv=False)), ModelError, NO_KV)
    yield bare
    numbers = r"^rows: expected row numbers from 0 to 2, got"
    wrongs = ([-1], [3], [True], ["1"], "1", 7, {1})
    yield from each("resume: rows", wrongs, lambda world, wrong: resume(world, world.paused, rows=wrong), numbers)
    taken = r"^rows: expected free rows \(\[1\]\), got 0"
    yield Bad("resume: rows taken", lambda world: resume(world, world.paused, rows=[0]), CapacityError, taken)
    yield Bad("resume: rows too many", lambda world: resume(world, world.paused, rows=[1, 2]), ArgumentError, r"^rows: expected 1 rows")
    full = r"^prompts: expected a free row for each prompt, got 2 prompts for 1 free rows"
    two = Bad("resume: two rows", lambda world: resume(world, fs.snapshot(world.state, rows=[0, 2])), CapacityError, full)
    yield two
    small = r"^num_blocks: expected 8 free blocks in the target pool, got 0 of 8"
    yield Bad("resume: no blocks", lambda world: resume(world, world.paused, state=world.full), CapacityError, small)


def _truncates() -> Iterator[Bad]:
    def truncate(world: World, lengths: Any, finish: Any = False) -> Any:
        return fs.truncate(world.state, lengths, finish=finish, donate=world.donate)

    wrongs = ({}, None, 4, "4", [4], [(0, 4)], torch.tensor([4]))
    yield from each("truncate: lengths", wrongs, truncate, r"^lengths: expected a length for at least one row, got")
    lengths = r"^lengths: expected a length from 4 to \d for row 0, got"
    wrongs = (0, 3, -1, 7, 99, 2**40, True, 4.0, "4", None, [4], torch.tensor(4))
    yield from each("truncate: length", wrongs, lambda world, wrong: truncate(world, {0: wrong}), lengths)
    numbers = r"^rows: expected row numbers from 0 to 2, got"
    yield from each("truncate: row", (-1, 3, True, 0.0, "0", None), lambda world, wrong: truncate(world, {wrong: 4}), numbers)
    idle = r"^lengths: expected rows that hold a request, got row 1, which is idle"
    yield Bad("truncate: idle row", lambda world: truncate(world, {0: 4, 1: 4}), ArgumentError, idle)
    yield from each("truncate: finish", NO_BOOLS, lambda world, wrong: truncate(world, {0: 4}, wrong), r"^finish: expected True or False")


def _limits() -> Iterator[Bad]:
    def lower(world: World, limits: Any) -> Any:
        return fs.lower_limits(world.state, limits, donate=world.donate)

    wrongs = (None, {}, "4", 2.5, True, [4], (0, 4))
    yield from each("lower_limits: limits", wrongs, lower, r"^limits: expected a length for at least one row, or one for all, got")
    wrongs = (0, -1, 33, True, 4.0, "4", None)
    yield from each("lower_limits: length", wrongs, lambda world, wrong: lower(world, {0: wrong}), r"^limits: expected a length from 1 to")
    numbers = r"^rows: expected row numbers from 0 to 2"
    yield from each("lower_limits: row", (-1, 3, True, 0.0, "0", None), lambda world, wrong: lower(world, {wrong: 4}), numbers)
    idle = r"^limits: expected rows that hold a request, got row 1, which is idle"
    yield Bad("lower_limits: idle row", lambda world: lower(world, {0: 4, 1: 4}), ArgumentError, idle)


def _files() -> Iterator[Bad]:
    wrongs = (None, "state", 3, CONFIG, fs.SpecState, fs.Snapshot)
    kind = r"^state: expected a SpecState( or a Snapshot)?, got"
    yield from each("save: state", wrongs, lambda world, wrong: fs.save(wrong, world.folder / "bad"), kind, ArgumentTypeError)
    yield Bad("save: pair", lambda world: fs.save((world.state, None), world.folder / "bad"), ArgumentTypeError, rf"{kind} tuple")
    yield Bad("save: dead", lambda world: fs.save(world.dead, world.folder / "bad"), DonatedStateError, r"^state: expected a live state")
    yield Bad("save: scored", lambda world: fs.save(world.scored, world.folder / "bad"), FuncspecError, r"^state: expected phase '.+'")
    wrongs = (None, 3, True, 2.5, b"bad", ("a", "b"), [])
    yield from each("save: path", wrongs, lambda world, wrong: fs.save(world.state, wrong), r"^path: expected")
    yield from each("load: path", wrongs, lambda world, wrong: fs.load(wrong, TARGET, DRAFTER), r"^path: expected")
    yield from each("save: kv", NO_BOOLS, lambda world, wrong: fs.save(world.state, world.folder / "bad", kv=wrong), r"^kv: expected True")

    def load(world: World, target: Any = TARGET, drafter: Any = DRAFTER, **settings: Any) -> Any:
        return fs.load(world.saved, target, drafter, **settings)

    yield from each("load: target", NO_MODELS, load, r"^target: expected a Model", ArgumentTypeError)
    wrongs = ("drafter", 3, ChecksumDraft(), standalone, Standalone, Ngram)
    yield from each("load: drafter", wrongs, lambda world, wrong: load(world, drafter=wrong), r"^drafter: expected a drafter or None")
    yield Bad("load: no drafter", lambda world: load(world, drafter=None), FileError, r"^path: expected a state for \['target'\]")
    other = ChecksumModel(vocab_size=49)
    yield Bad("load: other target", lambda world: load(world, other), FileError, r"^path: expected a state for a target of")
    wrongs = ("config", 3, {}, fs.SpecConfig)
    kind = r"^config: expected a SpecConfig or None, got"
    yield from each("load: config", wrongs, lambda world, wrong: load(world, config=wrong), kind, ArgumentTypeError)
    yield Bad("load: other config", lambda world: load(world, config=GREEDY), FileError, r"^path: expected a state of SpecConfig")
    words = r"^framework: expected 'torch', 'jax' or None, got"
    yield from each("load: framework", ("numpy", 3, torch.ones(2)), lambda world, wrong: load(world, framework=wrong), words)


def _hands() -> Iterator[Bad]:
    """Rounds that something else drives, and states that were put together by hand."""
    no_functions = (None, 3, "step_round")
    yield from each("one_round_late: step", no_functions, lambda world, wrong: next(one_round_late(wrong, world.state)), r"^step: expected")
    wrongs = (lambda state: None, lambda state: fs.fork(state), lambda state: (fs.fork(state), None))
    for number, wrong in enumerate(wrongs):
        name = f"one_round_late: step that returns no pair, {number}"
        yield Bad(name, lambda world, wrong=wrong: next(one_round_late(wrong, world.state)), FuncspecError, r"^step: expected")
    yield from each("capture: step", no_functions, lambda world, wrong: capture(wrong, world.state), r"^step: expected")
    no_gpu = r"^state: expected a state on a GPU, got one on cpu"
    yield Bad("capture: on the CPU", lambda world: capture(fs.step_round, world.state, TARGET, DRAFTER), FuncspecError, no_gpu)
    kind = r"^config: expected a SpecConfig, got"
    wrongs = (None, "config", 3, fs.SpecConfig)
    yield from each("HostVerdict: config", wrongs, lambda world, wrong: HostVerdict(wrong), kind, ArgumentTypeError)

    def put(world: World, **fields: Any) -> fs.SpecState:
        return replace(world.state, **fields)

    changed = r"^config: expected the configuration the state was made with"
    yield Bad("SpecState: another configuration", lambda world: put(world, config=GREEDY), FuncspecError, changed)
    wrongs = (None, [1, 2, 3], "abc", torch.zeros(3, 32), torch.zeros(2, 32, dtype=torch.int32))
    for name, use in {
        "step_round": lambda world, state: fs.step_round(state, TARGET, DRAFTER),
        "snapshot": lambda world, state: fs.snapshot(state),
        "save": lambda world, state: fs.save(state, world.folder / "bad"),
        "truncate": lambda world, state: fs.truncate(state, {0: 4}),
        "lower_limits": lambda world, state: fs.lower_limits(state, {0: 4}),
    }.items():
        message = r"^state\.tokens: expected"
        yield from each(f"{name}: tokens", wrongs, lambda world, wrong, use=use: use(world, put(world, tokens=wrong)), message)


STATES = [bad for group in (_forks, _snapshots, _restores, _resumes, _truncates, _limits, _files, _hands) for bad in group()]
