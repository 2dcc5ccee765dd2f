"""Calls with bad states, models, drafters and scores; for `test_bad_input.py`."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

import torch
from refusals import CONFIG, DRAFTER, TARGET, Bad, World, described, each

import funcspec as fs
from funcspec.drafters import Ngram, Standalone, ngram, standalone
from funcspec.errors import (
    ArgumentError,
    ArgumentTypeError,
    DonatedStateError,
    FuncspecError,
    ModelError,
    StaleScoresError,
    StepOrderError,
)
from funcspec.models import ChecksumDraft, ChecksumModel, KVEntry, KVSpec, TableModel, from_logits


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
class OtherCache(ChecksumModel):
    """A model that says its cache is laid out otherwise."""

    layout: Any = None

    def __init__(self, layout: Any) -> None:
        super().__init__()
        object.__setattr__(self, "layout", layout)

    @property
    def kv_spec(self) -> Any:
        return self.layout


@dataclass(frozen=True)
class NotAModel:
    vocab_size: int = 97
    max_len: int = 4096


def _inits() -> Iterator[Bad]:
    def bad(name: str, error: type[Exception], message: str, *arguments: Any) -> Bad:
        return Bad(f"init: {name}", lambda world: fs.init(*arguments), error, message)

    for wrong in (None, {"max_num_reqs": 1}, "config", 3):
        yield bad(f"config {type(wrong).__name__}", ArgumentTypeError, r"^config: expected a SpecConfig", wrong, TARGET)
    for wrong in (None, "gpt2", 3, NotAModel(), torch.nn.Linear(2, 2), DRAFTER):
        yield bad(f"target {type(wrong).__name__}", ArgumentTypeError, r"^target: expected a Model \(vocab_size", CONFIG, wrong)
    for wrong in (ChecksumModel, TableModel):
        yield bad(f"target class {wrong.__name__}", ArgumentTypeError, r"^target: expected a Model", CONFIG, wrong)
    for wrong in ("draft", 3, ChecksumDraft(), standalone, Standalone, Ngram):
        yield bad(f"drafter {described(wrong)}", ArgumentTypeError, r"^drafter: expected a drafter or None", CONFIG, TARGET, wrong)
    for field, wrong in product(("vocab_size", "max_len"), (0, -1, None, "97", 97.0, True)):
        yield bad(f"target of {field} {wrong!r}", FuncspecError, rf"^target(\.{field})?: expected", CONFIG, ChecksumModel(**{field: wrong}))
    entry = KVEntry("token", (), "int32")  # type: ignore[arg-type]
    layouts = {
        "none": None,
        "a dict": {"token": 1},
        "no dtype": KVSpec(1, (entry,)),
        "no layers": KVSpec(-1, ()),
        "no entry": KVSpec(1, (3,)),
    }
    for label, layout in layouts.items():
        model = OtherCache(layout)
        yield bad(f"target of kv_spec {label}", FuncspecError, r"^target(\.kv_spec)?: expected", CONFIG, model)
        yield bad(f"drafter of kv_spec {label}", FuncspecError, r"^drafter(\.kv_spec)?: expected", CONFIG, TARGET, Standalone(model))
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
        "resume": lambda world, state: fs.resume(state, world.paused, donate=world.donate),
        "truncate": lambda world, state: fs.truncate(state, {0: 4}, donate=world.donate),
        "lower_limits": lambda world, state: fs.lower_limits(state, {0: 4}, donate=world.donate),
        "capture": lambda world, state: fs.graphs.capture(fs.step_round, state, TARGET, DRAFTER),
        "one_round_late": lambda world, state: next(fs.graphs.one_round_late(world.turn, state)),
    }

    for name, step in steps.items():
        pair_ = r"^state: expected a SpecState, got tuple\. Fix: .*not the \(state, info\) pair"
        yield Bad(f"{name}: pair", lambda world, step=step: step(world, (world.state, None)), ArgumentTypeError, pair_)
        for wrong in (None, "state", CONFIG, fs.SpecState):
            message = rf"^state: expected a SpecState, got {type(wrong).__name__}"
            yield Bad(
                f"{name}: {type(wrong).__name__}", lambda world, step=step, wrong=wrong: step(world, wrong), ArgumentTypeError, message
            )
        yield Bad(f"{name}: Snapshot", lambda world, step=step: step(world, world.snap), ArgumentTypeError, r"a SpecState, got Snapshot")
        dead = r"^state: expected a live state for .+, got one .* consumed by release #\d+ \(donate=True\)\. Fix: use the state"
        yield Bad(f"{name}: dead", lambda world, step=step: step(world, world.dead), DonatedStateError, dead)
    order = {"prefill": "scored", "decode": "scored", "score": "scored", "verify": "scored", "step_round": "drafting", "accept": "state"}
    order |= {
        "snapshot": "scored",
        "admit": "scored",
        **dict.fromkeys(("resume", "truncate", "lower_limits", "one_round_late"), "drafting"),
    }
    for name, where in order.items():
        step = steps[name]
        yield Bad(
            f"{name}: {where}",
            lambda world, step=step, where=where: step(world, getattr(world, where)),
            StepOrderError,
            r"^state: expected phase '.+' for \w+, got '.+'\. Fix: ",
        )


def _donations() -> Iterator[Bad]:
    for wrong in ("yes", 0, None):
        for name, call in {
            "prefill": lambda world, wrong=wrong: fs.prefill(world.state, DRAFTER, donate=wrong),
            "decode": lambda world, wrong=wrong: fs.decode(world.drafting, DRAFTER, donate=wrong),
            "verify": lambda world, wrong=wrong: fs.verify(world.drafting, TARGET, donate=wrong),
            "score": lambda world, wrong=wrong: fs.score(world.drafting, TARGET, donate=wrong),
            "accept": lambda world, wrong=wrong: fs.accept(world.scored, world.scores, donate=wrong),
            "step_round": lambda world, wrong=wrong: fs.step_round(world.state, TARGET, DRAFTER, donate=wrong),
            "resume": lambda world, wrong=wrong: fs.resume(world.state, world.paused, donate=wrong),
            "truncate": lambda world, wrong=wrong: fs.truncate(world.state, {0: 4}, donate=wrong),
            "lower_limits": lambda world, wrong=wrong: fs.lower_limits(world.state, {0: 4}, donate=wrong),
        }.items():
            yield Bad(f"{name}: donate {wrong!r}", call, ArgumentError, r"^donate: expected True or False, got")


def _foreign_targets() -> Iterator[Bad]:
    calls: dict[str, Callable[[World, Any], Any]] = {
        "admit": lambda world, model: fs.admit(world.state, model, DRAFTER, [[5]], donate=world.donate),
        "score": lambda world, model: fs.score(world.drafting, model, donate=world.donate),
        "verify": lambda world, model: fs.verify(world.drafting, model, donate=world.donate),
        "step_round": lambda world, model: fs.step_round(world.state, model, DRAFTER, donate=world.donate),
        "step_round without drafter": lambda world, model: fs.step_round(world.plain, model, None, donate=world.donate),
        "restore": lambda world, model: fs.restore(world.snap, model, DRAFTER),
        "resume": lambda world, model: fs.resume(world.state, world.paused, model, DRAFTER, donate=world.donate),
    }
    table = TableModel(((0.5, 0.5), (0.5, 0.5)))
    for name, call in calls.items():
        message = r"^target: expected the model the state was made for \(of torch, vocabulary 97, max_len 4096, 1 KV layers\), got "
        for label, model in {"vocabulary": ChecksumModel(vocab_size=49), "length": ChecksumModel(max_len=64), "KV": table}.items():
            yield Bad(f"{name}: target of other {label}", lambda world, call=call, model=model: call(world, model), ModelError, message)
        wrongs = ["gpt2", 3, DRAFTER, NotAModel(), ChecksumModel, from_logits, *([] if name in ("restore", "resume") else [None])]
        yield from each(f"{name}: target", wrongs, call, r"^target: expected a Model \(vocab_size, .*, got ", ArgumentTypeError)


def _foreign_drafters() -> Iterator[Bad]:
    drafts: dict[str, Callable[[World, Any], Any]] = {
        "admit": lambda world, drafter: fs.admit(world.state, TARGET, drafter, [[5]], donate=world.donate),
        "prefill": lambda world, drafter: fs.prefill(world.state, drafter, donate=world.donate),
        "decode": lambda world, drafter: fs.decode(world.drafting, drafter, donate=world.donate),
        "step_round": lambda world, drafter: fs.step_round(world.state, TARGET, drafter, donate=world.donate),
        "resume": lambda world, drafter: fs.resume(world.state, world.paused, TARGET, drafter, donate=world.donate),
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
        yield from each(f"{name}: drafter", (Standalone, Ngram, ngram, ngram()), call, r"^drafter: expected")
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
    for wrong in ("ngram", 3, ChecksumDraft(), standalone):
        yield Bad(
            f"admit: drafter {described(wrong)} for a plain state",
            lambda world, wrong=wrong: fs.admit(world.plain, TARGET, wrong, [[5]], donate=world.donate),
            FuncspecError,
            r"^drafter: expected",
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
    shape = r"^scores\.logits: expected a float tensor \[3, 4, 97\] on cpu, got"
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


OBJECTS = [bad for group in (_inits, _steps, _donations, _foreign_targets, _foreign_drafters, _forwards, _scores) for bad in group()]
