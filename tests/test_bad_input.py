"""Bad arguments: one clear message for each, and a state that never notices, donated or not."""

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch
from oracle import config, pair

import funcspec as fs
from funcspec.drafters import standalone
from funcspec.errors import (
    ArgumentError,
    ArgumentTypeError,
    CapacityError,
    DonatedStateError,
    FuncspecError,
    ModelError,
    PoolExhaustedError,
    StaleScoresError,
    StepOrderError,
)
from funcspec.models import ChecksumDraft, ChecksumModel, TableModel, from_logits
from funcspec.state import ARRAY_FIELDS

TARGET, DRAFTER = pair()
ROWS, LENGTH, DRAFTS, STOPS = 3, 32, 3, 2
CONFIG = config(rows=ROWS, length=LENGTH, drafts=DRAFTS, block_size=4, max_num_stop_ids=STOPS, rule=fs.rules.coupled)
GREEDY = CONFIG.replace(rule=fs.rules.greedy)
NAN, INF = float("nan"), float("inf")

MESSAGE = re.compile(r"^(?P<argument>[\w.\[\]]+): expected (?P<expected>.+), got (?P<actual>.+)\. Fix: (?P<fix>.+)\.$", re.DOTALL)


@dataclass
class World:
    """States at every point of a round, rows 0 and 2 taken, row 1 free; and what a bad call must not change."""

    state: fs.SpecState
    drafting: fs.SpecState
    scored: fs.SpecState
    scores: fs.Scores
    plain: fs.SpecState
    greedy: fs.SpecState
    dead: fs.SpecState
    full: fs.SpecState
    snap: fs.Snapshot
    donate: bool

    def states(self) -> dict[str, fs.SpecState]:
        """Every live state, by name."""
        return {name: getattr(self, name) for name in ("state", "drafting", "scored", "plain", "greedy", "full")}


def make_world(donate: bool) -> World:
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
    return World(state, drafting, scored, scores, plain, greedy, dead, full, fs.snapshot(state), donate)


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
    """A call that must be refused."""

    name: str
    call: Callable[[World], Any]
    error: type[Exception]
    message: str
    gap: str = ""
    """Why the refusal is still missing or unclear; empty where it is right."""


def _admit(name: str, error: type[Exception], message: str, gap: str = "", where: str = "state", **arguments: Any) -> Bad:
    """A bad `admit` into the world's state; one prompt unless told otherwise."""
    target, drafter = arguments.pop("target", TARGET), arguments.pop("drafter", DRAFTER)
    prompts = arguments.pop("prompts", [[5, 6]])

    def call(world: World) -> Any:
        return fs.admit(getattr(world, where), target, drafter, prompts, **{"donate": world.donate, **arguments})

    return Bad(f"admit: {name}", call, error, message, gap)


def _config(name: str, error: type[Exception], message: str, **changes: Any) -> Bad:
    return Bad(f"SpecConfig: {name}", lambda world: CONFIG.replace(**changes), error, message)


def _prefill(name: str, error: type[Exception], message: str, num_draft: Any) -> list[Bad]:
    """A bad number of drafts, for both functions that take one."""
    return [
        Bad(f"prefill: {name}", lambda world: fs.prefill(world.state, DRAFTER, num_draft=num_draft, donate=world.donate), error, message),
        Bad(
            f"step_round: {name}",
            lambda world: fs.step_round(world.state, TARGET, DRAFTER, num_draft=num_draft, donate=world.donate),
            error,
            message,
        ),
    ]


class Floats(ChecksumModel):
    """A model that returns the logits it is told to."""

    def forward(self, kv, batch):
        kv, logits, hidden = super().forward(kv, batch)
        return kv, logits.long(), hidden


class NoLogits(ChecksumModel):
    def forward(self, kv, batch):
        kv, logits, hidden = super().forward(kv, batch)
        return kv, logits.tolist(), hidden


class ElseWhere(ChecksumModel):
    device = "cuda"


class Branded(ChecksumModel):
    vocab_fingerprint = "brand a"


class OtherBrand(ChecksumDraft):
    vocab_fingerprint = "brand b"


class ShortSighted(ChecksumDraft):
    input_vocab_size = 50


@dataclass(frozen=True)
class NotAModel:
    vocab_size: int = 97
    max_len: int = 4096


def _configs() -> Iterator[Bad]:
    for field, low in (("max_num_reqs", 0), ("max_model_len", 1), ("num_speculative_tokens", -1), ("block_size", 0), ("num_blocks", 0)):
        yield _config(f"{field} too small", ArgumentError, rf"^{field}: expected at least {low + 1}, got {low}\.", **{field: low})
    yield _config("max_num_stop_ids negative", ArgumentError, r"^max_num_stop_ids: expected at least 0, got -1", max_num_stop_ids=-1)
    for wrong in (2.0, "2", True, None, torch.tensor(2), np.int64(2)):
        kind = type(wrong).__name__
        yield _config(f"max_num_reqs {kind}", ArgumentTypeError, rf"^max_num_reqs: expected an int, got .*\({kind}\)", max_num_reqs=wrong)
    yield _config("num_blocks float", ArgumentTypeError, r"^num_blocks: expected an int, got 8\.0 \(float\)", num_blocks=8.0)
    yield _config("K not below L", ArgumentError, r"^num_speculative_tokens: expected below max_model_len = 32", num_speculative_tokens=32)
    for wrong in ("greedy", None, 3, "coupled"):
        yield _config(f"rule {wrong!r}", ArgumentTypeError, r"^rule: expected an acceptance rule, got .*rules\.greedy", rule=wrong)
    for wrong in ("warp", "", None, "cuda:x"):
        yield _config(f"device {wrong!r}", ArgumentError, r"^device: expected a device that torch knows", device=wrong)
    yield _config("too many slots", ArgumentError, r"^num_blocks: expected fewer than 2\^31 slots", num_blocks=2**29)
    yield _config("too many tokens", ArgumentError, r"expected fewer than 2\^31", max_num_reqs=2**27)


def _inits() -> Iterator[Bad]:
    def bad(name: str, error: type[Exception], message: str, *arguments: Any, gap: str = "") -> Bad:
        return Bad(f"init: {name}", lambda world: fs.init(*arguments), error, message, gap)

    for wrong in (None, {"max_num_reqs": 1}, "config", 3):
        yield bad(f"config {type(wrong).__name__}", ArgumentTypeError, r"^config: expected a SpecConfig", wrong, TARGET)
    for wrong in (None, "gpt2", 3, NotAModel(), torch.nn.Linear(2, 2), DRAFTER):
        yield bad(f"target {type(wrong).__name__}", ArgumentTypeError, r"^target: expected a Model \(vocab_size", CONFIG, wrong)
    for wrong in (ChecksumModel, TableModel):
        yield bad(f"target class {wrong.__name__}", ArgumentTypeError, r"^target: expected a Model", CONFIG, wrong)
    for wrong in ("draft", 3, ChecksumDraft(), standalone):
        yield bad(f"drafter {type(wrong).__name__}", ArgumentTypeError, r"^drafter: expected a drafter or None", CONFIG, TARGET, wrong)
    yield bad("target too short", ModelError, r"^target: expected max_len of at least .* = 32, got 31\.", CONFIG, ChecksumModel(max_len=31))
    small = standalone(ChecksumDraft(vocab_size=49))
    yield bad("vocabularies 97 and 49", ModelError, r"vocabulary of 97, got a draft of 49", CONFIG, TARGET, small)
    large = standalone(ChecksumDraft(vocab_size=128))
    yield bad("vocabularies 97 and 128", ModelError, r"vocabulary of 97, got a draft of 128", CONFIG, TARGET, large)
    blind = standalone(ShortSighted())
    yield bad("draft reads too few ids", ModelError, r"all 97 target ids, got an embedding of 50", CONFIG, TARGET, blind)
    other = standalone(OtherBrand())
    yield bad("fingerprints", ModelError, r"fingerprint 'brand a', got 'brand b'", CONFIG, Branded(), other)
    outside = standalone(ChecksumDraft(vocab_size=3), torch.tensor([3, 10, 97], dtype=torch.int32))
    yield bad(
        "token_ids outside", ModelError, r"^token_ids: expected target ids from 0 to 96, got ids from 3 to 97", CONFIG, TARGET, outside
    )
    below = standalone(ChecksumDraft(vocab_size=3), torch.tensor([-1, 10, 50], dtype=torch.int32))
    yield bad(
        "token_ids negative", ModelError, r"^token_ids: expected target ids from 0 to 96, got ids from -1 to 50", CONFIG, TARGET, below
    )
    yield bad("target elsewhere", ModelError, r"^target: expected a model on cpu, got one on cuda", CONFIG, ElseWhere())
    yield bad(
        "drafter elsewhere", ModelError, r"^drafter: expected a model on cpu, got one on cuda", CONFIG, TARGET, standalone(ElseWhere())
    )


def _prompts() -> Iterator[Bad]:
    for wrong in ("5 6 7", b"567", [], (), 5, None, {5: 6}, torch.tensor([[5, 6]]), np.array([[5, 6]])):
        yield _admit(f"prompts {wrong!r}", ArgumentError, r"^prompts: expected a non-empty sequence of token id seq", prompts=wrong)
    for wrong in ("hello", b"hello", 5, None, 2.5, True, {5}):
        yield _admit(f"prompt {wrong!r}", ArgumentTypeError, r"^prompts\[1\]: expected a sequence of token ids", prompts=[[5], wrong])
    yield _admit("flat prompt", ArgumentTypeError, r"^prompts\[0\]: expected a sequence of token ids, got 5", prompts=[5, 6, 7])
    empty = torch.zeros(0, dtype=torch.int32)
    for wrong in ([], (), empty):
        yield _admit(f"empty {type(wrong).__name__}", ArgumentError, r"^prompts\[1\]: expected at least one token id", prompts=[[5], wrong])
    for count in (32, 33, 5000):
        yield _admit(f"{count} ids", CapacityError, rf"^prompts\[0\]: expected at most .* = 31 ids, got {count}", prompts=[[1] * count])
    for wrong in (97, -1, 2**31, 2**70):
        yield _admit(f"id {wrong}", ArgumentError, rf"^prompts\[0\]: expected ids from 0 to 96, got {wrong}\.", prompts=[[5, wrong]])
    for wrong in (5.0, True, "5", None, [5], np.int64(5), torch.tensor(5)):
        yield _admit(f"id {wrong!r}", ArgumentTypeError, r"^prompts\[0\]: expected int token ids, got", prompts=[[5, wrong]])
    yield _admit("float tensor", ArgumentTypeError, r"^prompts\[0\]: expected int token ids, got 5\.0", prompts=[torch.tensor([5.0])])
    yield _admit("2-D tensor", ArgumentTypeError, r"^prompts\[0\]: expected int token ids, got \[5\]", prompts=[torch.tensor([[5]])])
    gap = "list() of what tolist returns for no dimension"
    yield _admit("0-D tensor", ArgumentTypeError, r"^prompts\[0\]: expected", gap, prompts=[torch.tensor(5)])
    yield _admit("two prompts, one free row", CapacityError, r"^prompts: .*, got 2 prompts for 1 free rows", prompts=[[5], [6]])


def _sampling() -> Iterator[Bad]:
    for wrong in (-0.5, NAN, INF, -INF, 0.009, 1e-9, -1):
        yield _admit(f"temperature {wrong}", ArgumentError, r"^temperature: expected 0 \(greedy\) or .* 0\.01, got", temperature=wrong)
        yield _admit(f"temperature [{wrong}]", ArgumentError, r"^temperature: expected 0 \(greedy\) or", temperature=[wrong])
    for wrong in (True, None, [None], ["1"], [True], [[0.5]]):
        yield _admit(f"temperature {wrong!r}", ArgumentTypeError, r"^temperature: expected a number, got", temperature=wrong)
    for wrong in ([], [0.5, 0.5], torch.tensor([0.5]), {0: 0.5}):
        yield _admit(f"temperature {wrong!r}", ArgumentError, r"^temperature: expected one value or 1, one a prompt", temperature=wrong)
    yield _admit(
        "temperature under greedy",
        ArgumentError,
        r"^temperature: expected 0 under rules\.greedy, got 0\.7",
        where="greedy",
        temperature=0.7,
    )
    for wrong in (True, 3, [], [1, 2]):
        yield _admit(f"seeds {wrong!r}", ArgumentError, r"^seeds: expected 1 seeds, one a prompt", seeds=wrong)
    for wrong in (3.0, np.int64(3), iter([3])):
        gap = "len() of what has no length"
        yield _admit(f"seeds {type(wrong).__name__}", ArgumentError, r"^seeds: expected 1 seeds, one a prompt", gap, seeds=wrong)
    for wrong in (True, 1.0, "1", None, [1]):
        yield _admit(f"seed {wrong!r}", ArgumentTypeError, r"^seeds?: expected a 64-bit integer, got", seeds=[wrong])
    for wrong in (2**64, -(2**63) - 1, 10**30):
        yield _admit(f"seed {wrong}", ArgumentError, rf"^seeds?: expected a 64-bit integer, got {wrong}\. Fix: pass seed %", seeds=[wrong])


def _limits() -> Iterator[Bad]:
    for wrong in (0, -1, True, [0], ["3"], [2.0], [True]):
        yield _admit(f"max_tokens {wrong!r}", ArgumentError, r"^max_tokens: expected a positive int or None, got", max_tokens=wrong)
    for wrong in (2.0, [], [3, 3], torch.tensor([3])):
        yield _admit(f"max_tokens {wrong!r}", ArgumentError, r"^max_tokens: expected one value or 1, one a prompt", max_tokens=wrong)
    for wrong in ([1, 2, 3], [[1, 2, 3]]):
        yield _admit(f"stop_ids {wrong!r}", CapacityError, r"^stop_ids: expected at most max_num_stop_ids = 2 ids, got 3", stop_ids=wrong)
    for wrong in ([97], [-1], [[97]], [5, 2**40]):
        yield _admit(f"stop_ids {wrong!r}", ArgumentError, r"^stop_ids: expected ids from 0 to 96, got", stop_ids=wrong)
    for wrong in ([True], [[5.0]], ["5"], [["5"]], [[None]]):
        yield _admit(f"stop_ids {wrong!r}", ArgumentTypeError, r"^stop_ids: expected int token ids, got", stop_ids=wrong)
    yield _admit("stop_ids for 2", ArgumentError, r"^stop_ids: expected one value or 1, one a prompt", stop_ids=[[1], [2]])
    for wrong in (5, 0, None, {5}, [5.0], [None], torch.tensor([5, 6]), np.array([5, 6])):
        yield _admit(f"stop_ids {wrong!r}", ArgumentError, r"^stop_ids: expected", "indexed before it is looked at", stop_ids=wrong)


def _rows() -> Iterator[Bad]:
    for wrong in ([-1], [3], [True], [1.0], ["1"], [None], "1", 7, [[1]]):
        yield _admit(f"rows {wrong!r}", ArgumentError, r"^rows: expected row numbers from 0 to 2, got", rows=wrong)
    yield _admit("rows twice", ArgumentError, r"^rows: expected distinct rows, got \[1, 1\]", rows=[1, 1], prompts=[[5], [6]])
    yield _admit("rows taken", CapacityError, r"^rows: expected free rows \(\[1\]\), got 0\. Fix: release the row first", rows=[0])
    yield _admit("rows too many", ArgumentError, r"^rows: expected 1 rows, one a prompt, got 2", rows=[0, 1])
    yield _admit("rows none", ArgumentError, r"^rows: expected 1 rows, one a prompt, got 0", rows=[])
    for wrong in (0, -4, 2.0, True, "8", [4]):
        yield _admit(f"chunk {wrong!r}", ArgumentError, r"^chunk: expected a positive int or None, got", chunk=wrong)
    for wrong in ("yes", 1, None):
        yield _admit(f"donate {wrong!r}", ArgumentError, r"^donate: expected True or False, got", donate=wrong)
    for wrong in ([-1], [3], [0, 7], [True], [0.0], None, "0", torch.tensor([0])):
        yield Bad(
            f"release: rows {wrong!r}",
            lambda world, wrong=wrong: fs.release(world.state, wrong, donate=world.donate),
            ArgumentError,
            r"^rows: expected row numbers from 0 to 2, got",
        )
    yield Bad(
        "release: rows twice",
        lambda world: fs.release(world.state, [0, 0], donate=world.donate),
        ArgumentError,
        r"distinct rows, got \[0, 0\]",
    )
    yield Bad(
        "release: donate",
        lambda world: fs.release(world.state, [0], donate="no"),
        ArgumentError,
        r"^donate: expected True or False, got 'no'",
    )


def _pools() -> Iterator[Bad]:
    """Too few blocks, in either pool; what was taken from the other goes back."""
    message = r"^num_blocks: expected 8 free blocks in the target pool, got 0 of 8\. Fix: drop old states"
    yield _admit("no blocks", PoolExhaustedError, message, where="full")
    logits = from_logits(lambda prefix: torch.zeros(97), vocab_size=97)
    yield Bad(
        "admit: more prompts than blocks",
        lambda world: fs.admit(fs.init(CONFIG.replace(num_blocks=15), logits), logits, None, [[5], [6]], donate=world.donate),
        PoolExhaustedError,
        r"^num_blocks: expected 16 free blocks in the target pool, got 15 of 15",
    )


def _num_draft() -> Iterator[Bad]:
    most = r"^num_draft: expected numbers from 0 to num_speculative_tokens = 3, got"
    for wrong in (-1, 4, True, [0, 1, 4], [0, -1, 0], [0, True, 0], [0, 1.0, 0], [None, 1, 1], [1, "1", 1], [[1], [1], [1]], "123"):
        yield from _prefill(f"num_draft {wrong!r}", ArgumentError, most, wrong)
    count = r"^num_draft: expected an int or 3 ints, got"
    for wrong in (1.0, NAN, [], [1, 1], [1] * 4, "3", {0: 1}, np.array([1, 1, 1], dtype=np.int32), np.int64(1)):
        yield from _prefill(f"num_draft {wrong!r}", ArgumentError, count, wrong)
    kind = r"^num_draft: expected an int32 tensor \[3\], got"
    wrong_tensors = (
        torch.tensor(1),
        torch.tensor([1, 1, 1]),
        torch.ones(3),
        torch.ones(2, dtype=torch.int32),
        torch.ones(3, 1, dtype=torch.int32),
    )
    for wrong in (*wrong_tensors, torch.ones(3, dtype=torch.bool)):
        yield from _prefill(f"num_draft {tuple(wrong.shape)} {wrong.dtype}", ArgumentError, kind, wrong)


def _steps() -> Iterator[Bad]:
    """The steps on every kind of thing that is no live state of the right phase, with every kind of foreign model."""

    steps: dict[str, Callable[[World, Any], Any]] = {
        "admit": lambda world, state: fs.admit(state, TARGET, DRAFTER, [[5]], donate=world.donate),
        "release": lambda world, state: fs.release(state, [0], donate=world.donate),
        "prefill": lambda world, state: fs.prefill(state, DRAFTER, donate=world.donate),
        "decode": lambda world, state: fs.decode(state, DRAFTER, donate=world.donate),
        "score": lambda world, state: fs.score(state, TARGET, donate=world.donate),
        "accept": lambda world, state: fs.accept(state, world.scores, donate=world.donate),
        "verify": lambda world, state: fs.verify(state, TARGET, donate=world.donate),
        "step_round": lambda world, state: fs.step_round(state, TARGET, DRAFTER, donate=world.donate),
        "fork": lambda world, state: fs.fork(state),
        "snapshot": lambda world, state: fs.snapshot(state),
        "any_active": lambda world, state: fs.any_active(state),
    }

    for name, step in steps.items():
        pair_ = r"^state: expected a SpecState, got tuple\. Fix: .*not the \(state, info\) pair"
        yield Bad(f"{name}: pair", lambda world, step=step: step(world, (world.state, None)), ArgumentTypeError, pair_)
        for wrong in (None, "state", CONFIG):
            message = rf"^state: expected a SpecState, got {type(wrong).__name__}"
            yield Bad(
                f"{name}: {type(wrong).__name__}", lambda world, step=step, wrong=wrong: step(world, wrong), ArgumentTypeError, message
            )
        yield Bad(f"{name}: Snapshot", lambda world, step=step: step(world, world.snap), ArgumentTypeError, r"a SpecState, got Snapshot")
        dead = r"^state: expected a live state for .+, got one .* consumed by release #\d+ \(donate=True\)\. Fix: use the state"
        yield Bad(f"{name}: dead", lambda world, step=step: step(world, world.dead), DonatedStateError, dead)
    order = {"prefill": "scored", "decode": "scored", "score": "scored", "verify": "scored", "step_round": "drafting", "accept": "state"}
    for name, where in {**order, "snapshot": "scored", "admit": "scored"}.items():
        step = steps[name]
        yield Bad(
            f"{name}: {where}",
            lambda world, step=step, where=where: step(world, getattr(world, where)),
            StepOrderError,
            r"^state: expected phase '.+' for \w+, got '.+'\. Fix: ",
        )
    for wrong in ("yes", 0, None):
        for name, call in {
            "prefill": lambda world, wrong=wrong: fs.prefill(world.state, DRAFTER, donate=wrong),
            "decode": lambda world, wrong=wrong: fs.decode(world.drafting, DRAFTER, donate=wrong),
            "verify": lambda world, wrong=wrong: fs.verify(world.drafting, TARGET, donate=wrong),
            "score": lambda world, wrong=wrong: fs.score(world.drafting, TARGET, donate=wrong),
            "accept": lambda world, wrong=wrong: fs.accept(world.scored, world.scores, donate=wrong),
            "step_round": lambda world, wrong=wrong: fs.step_round(world.state, TARGET, DRAFTER, donate=wrong),
        }.items():
            yield Bad(f"{name}: donate {wrong!r}", call, ArgumentError, r"^donate: expected True or False, got")


def _foreign_models() -> Iterator[Bad]:
    calls: dict[str, Callable[[World, Any], Any]] = {
        "admit": lambda world, model: fs.admit(world.state, model, DRAFTER, [[5]], donate=world.donate),
        "score": lambda world, model: fs.score(world.drafting, model, donate=world.donate),
        "verify": lambda world, model: fs.verify(world.drafting, model, donate=world.donate),
        "step_round": lambda world, model: fs.step_round(world.state, model, DRAFTER, donate=world.donate),
        "step_round without drafter": lambda world, model: fs.step_round(world.plain, model, None, donate=world.donate),
        "restore": lambda world, model: fs.restore(world.snap, model, DRAFTER),
    }
    table = TableModel(((0.5, 0.5), (0.5, 0.5)))
    for name, call in calls.items():
        message = r"^target: expected the model the state was made for \(vocabulary 97, max_len 4096, 1 KV layers\), got "
        for label, model in {"vocabulary": ChecksumModel(vocab_size=49), "length": ChecksumModel(max_len=64), "KV": table}.items():
            yield Bad(f"{name}: target of other {label}", lambda world, call=call, model=model: call(world, model), ModelError, message)
        for wrong in ("gpt2", 3, DRAFTER, NotAModel()) if name == "restore" else ("gpt2", 3, None, DRAFTER, NotAModel()):
            message = rf"^target: expected a Model .*, got {type(wrong).__name__}\."
            yield Bad(
                f"{name}: target {type(wrong).__name__}",
                lambda world, call=call, wrong=wrong: call(world, wrong),
                ArgumentTypeError,
                message,
            )
    drafts: dict[str, Callable[[World, Any], Any]] = {
        "admit": lambda world, drafter: fs.admit(world.state, TARGET, drafter, [[5]], donate=world.donate),
        "prefill": lambda world, drafter: fs.prefill(world.state, drafter, donate=world.donate),
        "decode": lambda world, drafter: fs.decode(world.drafting, drafter, donate=world.donate),
        "step_round": lambda world, drafter: fs.step_round(world.state, TARGET, drafter, donate=world.donate),
    }
    for name, call in drafts.items():
        message = r"^drafter: expected the model the state was made for"
        for label, model in {"vocabulary": ChecksumDraft(vocab_size=49), "length": ChecksumDraft(max_len=64)}.items():
            drafter = standalone(model)
            yield Bad(f"{name}: drafter of other {label}", lambda world, call=call, d=drafter: call(world, d), ModelError, message)
        for wrong in ("ngram", 3, ChecksumDraft()):
            message = rf"^drafter: expected the drafter the state was made with, got {type(wrong).__name__}\."
            yield Bad(
                f"{name}: drafter {type(wrong).__name__}", lambda world, call=call, wrong=wrong: call(world, wrong), ModelError, message
            )
    with_drafter = r"^drafter: expected (None, as )?the (drafter the )?state was made with"
    yield Bad("prefill: no drafter", lambda world: fs.prefill(world.state, None, donate=world.donate), ModelError, with_drafter)
    plain = r"^drafter: expected None, as the state was made with, got Standalone"
    yield Bad("prefill: drafter for a plain state", lambda world: fs.prefill(world.plain, DRAFTER, donate=world.donate), ModelError, plain)
    yield Bad(
        "step_round: drafter for a plain state",
        lambda world: fs.step_round(world.plain, TARGET, DRAFTER, donate=world.donate),
        ModelError,
        plain,
    )
    yield Bad(
        "admit: drafter for a plain state",
        lambda world: fs.admit(world.plain, TARGET, DRAFTER, [[5]], donate=world.donate),
        ModelError,
        plain,
    )
    yield Bad(
        "prefill: no drafter at all",
        lambda world: fs.prefill(world.plain, None, donate=world.donate),
        FuncspecError,
        r"^drafter: expected a drafter",
    )
    order = r"^state: expected phase 'drafting' for verify, got 'round start'\. Fix: call prefill first"
    yield Bad(
        "step_round: drafter forgotten", lambda world: fs.step_round(world.state, TARGET, None, donate=world.donate), StepOrderError, order
    )


def _forwards() -> Iterator[Bad]:
    for model, message in (
        (Floats(), r"float logits \[1, 97\], got \(1, 97\) torch\.int64"),
        (NoLogits(), r"float logits \[1, 97\], got list"),
    ):
        kind = type(model).__name__
        yield Bad(
            f"admit: forward of {kind}",
            lambda world, model=model: fs.admit(world.state, model, DRAFTER, [[5]], donate=world.donate),
            ModelError,
            rf"^forward: expected {message}",
        )
        yield Bad(
            f"verify: forward of {kind}",
            lambda world, model=model: fs.verify(world.drafting, model, donate=world.donate),
            ModelError,
            r"^forward: expected float logits \[12, 97\], got",
        )
        yield Bad(
            f"prefill: forward of {kind}",
            lambda world, model=model: fs.prefill(world.state, standalone(model), donate=world.donate),
            ModelError,
            r"^forward: expected float logits \[3, 97\], got",
        )
    short = from_logits(lambda prefix: torch.zeros(96), vocab_size=97)
    yield Bad(
        "admit: function returns too few logits",
        lambda world: fs.admit(fs.init(CONFIG, short), short, None, [[5]], donate=world.donate),
        ModelError,
        r"^function: expected logits \[97\], got \[96\]",
    )


def _scores() -> Iterator[Bad]:
    def bad(name: str, error: type[Exception], message: str, change: Callable[[World], Any]) -> Bad:
        return Bad(f"accept: {name}", lambda world: fs.accept(world.scored, change(world), donate=world.donate), error, message)

    for wrong in (None, "scores", torch.zeros(3, 4, 97), (1, 2)):
        message = rf"^scores: expected the Scores that score returned, got {type(wrong).__name__}"
        yield bad(f"scores {type(wrong).__name__}", ArgumentTypeError, message, lambda world, wrong=wrong: wrong)
    yield bad(
        "pair as scores", ArgumentTypeError, r"^scores: expected the Scores .*, got tuple", lambda world: (world.scored, world.scores)
    )
    stale = r"^scores: expected the scores of this very state, got those of another\. Fix: call score"
    yield bad("stamp of its own", StaleScoresError, stale, lambda world: replace(world.scores, stamp=object()))
    yield bad("no stamp", StaleScoresError, stale, lambda world: replace(world.scores, stamp=None))
    yield bad("scores of a twin", StaleScoresError, stale, lambda world: fs.score(world.drafting, TARGET)[1])
    shape = r"^scores\.logits: expected float logits \[3, 4, 97\], a torch tensor, got"
    for change in (
        lambda logits: logits[:2],
        lambda logits: logits[:, :3],
        lambda logits: logits[..., :96],
        lambda logits: logits.view(12, 97),
        lambda logits: logits.long(),
        lambda logits: logits.bool(),
        lambda logits: logits.numpy(),
        lambda logits: logits.tolist(),
        lambda logits: None,
    ):
        found = change(torch.zeros(3, 4, 97))
        label = f"{tuple(found.shape)} {found.dtype}" if hasattr(found, "shape") else type(found).__name__
        yield bad(
            f"logits {label}", FuncspecError, shape, lambda world, change=change: replace(world.scores, logits=change(world.scores.logits))
        )
    double = r"^(scores\.)?logits: expected .*float.*, got .*torch\.float64"
    yield bad("logits float64", FuncspecError, double, lambda world: replace(world.scores, logits=world.scores.logits.double()))


def _copies() -> Iterator[Bad]:
    for wrong in ([], [1, 2], [1] * 4):
        message = rf"^seeds: expected 3 seeds, one a row, got {len(wrong)}"
        yield Bad(f"fork: seeds {wrong!r}", lambda world, wrong=wrong: fs.fork(world.state, seeds=wrong), ArgumentError, message)
    for wrong in (True, 1.0, "1", None):
        message = r"^seeds?: expected a 64-bit integer, got"
        yield Bad(f"fork: seed {wrong!r}", lambda world, wrong=wrong: fs.fork(world.state, seeds=[1, 2, wrong]), ArgumentTypeError, message)
    yield Bad(
        "fork: seed too large", lambda world: fs.fork(world.state, seeds=[1, 2, 2**64]), ArgumentError, r"^seeds?: expected a 64-bit int"
    )
    for wrong in (3, 1.5):
        gap = "len() of what has no length"
        yield Bad(
            f"fork: seeds {wrong!r}",
            lambda world, wrong=wrong: fs.fork(world.state, seeds=wrong),
            ArgumentError,
            r"^seeds: expected 3 seeds",
            gap,
        )
    for wrong in (None, "snapshot", b"", {}):
        message = rf"^snapshot: expected a Snapshot, got {type(wrong).__name__}"
        yield Bad(f"restore: {type(wrong).__name__}", lambda world, wrong=wrong: fs.restore(wrong), ArgumentTypeError, message)
    yield Bad(
        "restore: a state", lambda world: fs.restore(world.state), ArgumentTypeError, r"^snapshot: expected a Snapshot, got SpecState"
    )
    no_kv = r"^(target|drafter): expected the model, as this snapshot has no KV, got None\. Fix: pass target and drafter"
    yield Bad("restore: no KV, no models", lambda world: fs.restore(fs.snapshot(world.state, kv=False)), ModelError, no_kv)
    yield Bad("restore: no KV, no drafter", lambda world: fs.restore(fs.snapshot(world.state, kv=False), TARGET), ModelError, no_kv)
    for wrong in ("drafter", 3, ChecksumDraft()):
        message = rf"^drafter: expected .*, got {type(wrong).__name__}"
        yield Bad(
            f"restore: drafter {type(wrong).__name__}",
            lambda world, wrong=wrong: fs.restore(world.snap, TARGET, wrong),
            FuncspecError,
            message,
        )
    yield Bad(
        "restore: drafter of other length",
        lambda world: fs.restore(world.snap, TARGET, standalone(ChecksumDraft(max_len=64))),
        ModelError,
        r"^drafter: expected the model the state was made for",
    )


def _makers() -> Iterator[Bad]:
    def bad(name: str, error: type[Exception], message: str, make: Callable[[], Any], gap: str = "") -> Bad:
        return Bad(name, lambda world: make(), error, message, gap)

    for wrong in (None, "gpt2", 3, NotAModel(), DRAFTER, ChecksumDraft):
        message = r"^model: expected a Model \(vocab_size, max_len, kv_spec, forward\), got"
        yield bad(f"standalone: {type(wrong).__name__}", ArgumentTypeError, message, lambda wrong=wrong: standalone(wrong))
    three = ChecksumDraft(vocab_size=3)
    kind = r"^token_ids: expected a one-dimensional int32 tensor, got"
    for wrong in (
        [3, 10, 50],
        torch.tensor([3, 10, 50]),
        torch.tensor([3.0, 10, 50]),
        np.array([3, 10, 50]),
        "abc",
        torch.zeros(3, dtype=torch.bool),
    ):
        label = getattr(wrong, "dtype", type(wrong).__name__)
        yield bad(f"standalone: token_ids {label}", ArgumentTypeError, kind, lambda wrong=wrong: standalone(three, wrong))
    for wrong in (torch.tensor(3, dtype=torch.int32), torch.tensor([[3, 10, 50]], dtype=torch.int32)):
        yield bad(f"standalone: token_ids {wrong.dim()}-D", ArgumentTypeError, kind, lambda wrong=wrong: standalone(three, wrong))
    for wrong, found in (
        ([3, 10], "2 distinct of 2"),
        ([3, 10, 10], "2 distinct of 3"),
        ([1, 2, 3, 4], "4 distinct of 4"),
        ([], "0 distinct of 0"),
    ):
        ids = torch.tensor(wrong, dtype=torch.int32)
        message = rf"^token_ids: expected 3 distinct ids, got {found}"
        yield bad(f"standalone: token_ids {wrong}", ArgumentError, message, lambda ids=ids: standalone(three, ids))
    for wrong in (None, "f", 3, torch.zeros(5)):
        message = rf"^function: expected a callable, got {type(wrong).__name__}"
        yield bad(f"from_logits: {type(wrong).__name__}", ArgumentTypeError, message, lambda wrong=wrong: from_logits(wrong, vocab_size=5))
    for wrong in ("numpy", "", None):
        message = r"^array: expected 'torch' or 'jax', got"
        yield bad(
            f"from_logits: array {wrong!r}", ArgumentError, message, lambda wrong=wrong: from_logits(torch.sin, vocab_size=5, array=wrong)
        )
    for field in ("vocab_size", "max_len"):
        for wrong in (0, -5, 2.5, "5", None, True):
            sizes = {"vocab_size": 5, "max_len": 5, field: wrong}
            yield bad(
                f"from_logits: {field} {wrong!r}",
                FuncspecError,
                rf"^{field}: expected",
                lambda sizes=sizes: from_logits(torch.sin, **sizes),
            )
    half = (0.5, 0.5)
    tables = {
        "none": None,
        "number": 5,
        "string": "ab",
        "empty": (),
        "empty row": ((),),
        "not square": (half,),
        "ragged": (half, (1.0,)),
        "too wide": (half, half, half),
        "sum": (half, (0.5, 0.6)),
        "negative": (half, (-0.5, 1.5)),
        "nan": (half, (NAN, 1.0)),
        "inf": (half, (INF, 1.0)),
        "words": (half, ("a", "b")),
    }
    for label, wrong in tables.items():
        message = r"^probabilities: expected a square table whose rows are distributions, got"
        yield bad(f"TableModel: {label}", ArgumentError, message, lambda wrong=wrong: TableModel(wrong))


def _generates() -> Iterator[Bad]:
    """`generate` refuses before it yields anything."""

    def bad(name: str, error: type[Exception], message: str, gap: str = "", **changes: Any) -> Bad:
        arguments = {"config": CONFIG, "target": TARGET, "drafter": DRAFTER, "prompts": [[5, 6]], **changes}
        return Bad(f"generate: {name}", lambda world: fs.generate(**arguments), error, message, gap)

    yield bad("config", ArgumentTypeError, r"^config: expected a SpecConfig, got str", config="config")
    yield bad("target", ArgumentTypeError, r"^target: expected a Model", target="gpt2")
    yield bad("drafter", ArgumentTypeError, r"^drafter: expected a drafter or None, got ChecksumDraft", drafter=ChecksumDraft())
    yield bad("vocabularies", ModelError, r"vocabulary of 97, got a draft of 49", drafter=standalone(ChecksumDraft(vocab_size=49)))
    yield bad("text", ArgumentError, r"^prompts: expected a non-empty sequence", prompts="5 6")
    yield bad("no prompts", ArgumentError, r"^prompts: expected a non-empty sequence", prompts=[])
    yield bad("texts", ArgumentTypeError, r"^prompts\[0\]: expected a sequence of token ids, got 'hello'", prompts=["hello"])
    yield bad("empty prompt", ArgumentError, r"^prompts\[1\]: expected at least one token id", prompts=[[5], []])
    yield bad("long prompt", CapacityError, r"^prompts\[0\]: expected at most max_model_len - 1 = 31 ids, got 32", prompts=[[1] * 32])
    yield bad("id outside", ArgumentError, r"^prompts\[0\]: expected ids from 0 to 96, got 97", prompts=[[97]])
    yield bad("seeds", ArgumentError, r"^seeds: expected 1 seeds", seeds=[1, 2])
    yield bad("seed", ArgumentTypeError, r"^seeds?: expected a 64-bit integer, got float", seeds=[0.5])
    yield bad("temperature", ArgumentError, r"^temperature: expected 0 \(greedy\) or", temperature=0.001)
    yield bad("temperature under greedy", ArgumentError, r"^temperature: expected 0 under rules\.greedy", config=GREEDY, temperature=1.0)
    yield bad("max_tokens", ArgumentError, r"^max_tokens: expected a positive int or None, got 0", max_tokens=0)
    yield bad("stop_ids", CapacityError, r"^stop_ids: expected at most max_num_stop_ids = 2 ids, got 3", stop_ids=[1, 2, 3])
    for wrong in (-1, 4, True, 1.5, "1"):
        yield bad(f"num_draft {wrong!r}", ArgumentError, r"^num_draft: expected", num_draft=wrong)
    yield bad("num_draft without drafter", ArgumentError, r"^num_draft: expected", drafter=None, num_draft=-1)


GROUPS = (_configs, _inits, _prompts, _sampling, _limits, _rows, _pools, _num_draft, _steps, _foreign_models, _forwards, _scores, _copies)
MATRIX = [bad for group in (*GROUPS, _makers, _generates) for bad in group()]


def refusal(bad: Bad, world: World) -> Exception:
    """The error a bad call raises, without the frames that would keep blocks alive."""
    try:
        bad.call(world)
    except Exception as error:
        return error.with_traceback(None)
    pytest.fail(f"{bad.name} was accepted")


def _marked(bad: Bad) -> Any:
    return pytest.param(bad, id=bad.name, marks=[pytest.mark.xfail(reason=bad.gap, strict=True)] if bad.gap else [])


@pytest.mark.parametrize("donate", [False, True], ids=["pure", "donated"])
@pytest.mark.parametrize("bad", [_marked(bad) for bad in MATRIX])
def test_bad_input_is_refused_and_changes_nothing(bad: Bad, donate: bool) -> None:
    world = make_world(donate)
    before = {name: value(state) for name, state in world.states().items()}
    error = refusal(bad, world)
    assert isinstance(error, bad.error), f"{type(error).__name__}: {error}"
    assert isinstance(error, FuncspecError)
    found = MESSAGE.match(str(error))
    assert found, f"no argument, expectation, finding or fix in {str(error)!r}"
    assert re.search(bad.message, str(error)), str(error)
    assert len(str(error)) < 800
    for name, state in world.states().items():
        assert_same(before[name], value(state))


def test_every_call_has_bad_input() -> None:
    calls = {bad.name.split(":")[0] for bad in MATRIX}
    names = "SpecConfig init admit release fork prefill decode score accept verify step_round generate snapshot restore any_active"
    assert {*names.split(), "standalone", "from_logits", "TableModel"} <= calls
    assert len({bad.name for bad in MATRIX}) == len(MATRIX)


@pytest.mark.parametrize("donate", [False, True], ids=["pure", "donated"])
def test_after_all_refusals_a_run_goes_on_as_if_nothing_had_happened(donate: bool) -> None:
    """Refusals may not add up either: after all of them the same blocks are free and the next rounds are the same."""
    quiet, world = make_world(donate), make_world(donate)
    for bad in MATRIX:
        if not bad.gap:
            refusal(bad, world)
    for made, expected in zip(world.states().values(), quiet.states().values(), strict=True):
        for branch, other in ((made.lease.target, expected.lease.target), (made.lease.draft, expected.lease.draft)):
            assert branch is other is None or branch.pool.num_free_blocks == other.pool.num_free_blocks
    ends = []
    for one in (quiet, world):
        state, _ = fs.accept(one.scored, one.scores, donate=donate)
        for _ in range(3):
            state, _ = fs.step_round(state, TARGET, DRAFTER, donate=donate)
        other, _ = fs.verify(one.drafting, TARGET, donate=donate)
        ends.append((fs.snapshot(state), fs.snapshot(fs.step_round(one.state, TARGET, DRAFTER, donate=donate)[0]), fs.snapshot(other)))
    assert ends[0] == ends[1]
