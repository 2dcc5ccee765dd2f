"""Every drafter there is, small and random, for the tiny target of `one_pass`; and what tests over all of them share."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from typing import Any

import pytest
import torch
from one_pass import BLOCK_SIZE, DRAFTS, HEAT, LENGTH, PROMPTS, SEEDS, SHAPE, TARGET, VOCAB, committed, flat, rows_of, seed_and_heat
from oracle import config

import funcspec as fs
import funcspec.transitions.torch as torch_steps
from funcspec import drafters
from funcspec.drafters import Drafter
from funcspec.models.base import ForwardBatch
from funcspec.models.dflash import DFlashConfig, random_dflash
from funcspec.models.heads import EagleConfig, random_head
from funcspec.models.llama import LlamaConfig, random_llama
from funcspec.models.medusa_heads import MedusaHeads
from funcspec.models.parallel_heads import ParallelConfig, random_parallel_head
from funcspec.models.query_heads import QueryConfig, random_query_head

SMALL: dict[str, Any] = SHAPE | {"num_layers": 1}
MASK = 3
"""What places hold that are to be guessed."""


def medusa_heads(vocab_size: int = VOCAB, hidden_size: int = SHAPE["hidden_size"]) -> MedusaHeads:
    generator = torch.Generator().manual_seed(4)
    width = hidden_size
    shapes = {"blocks": (DRAFTS, 1, width, width), "biases": (DRAFTS, 1, width), "outputs": (DRAFTS, vocab_size, width)}
    return MedusaHeads({name: 0.4 * torch.randn(shape, generator=generator) for name, shape in shapes.items()}, layer=2)


def language_model(**changes: int) -> Any:
    return random_llama(LlamaConfig(**SMALL | changes), seed=8)


def eagle_head(**changes: int) -> Any:
    return random_head(EagleConfig(**SMALL | changes, target_layers=(2,), embed_norm=True), 5)


def mtp_modules(count: int, **changes: int) -> Any:
    config = EagleConfig(**SMALL | changes, target_layers=(2,), style="mtp")
    return [random_head(config, 7 + number) for number in range(count)]


def query_head(**changes: int) -> Any:
    return random_query_head(QueryConfig(**SMALL | changes, target_layers=(2,), style="mtp", cache_layers=(1,)), 4)


def pard(model: Any, ids: torch.Tensor | None = None) -> Drafter:
    return drafters.parallel(model, MASK, ids)


def dflash(model: Any, ids: torch.Tensor | None = None, *, anchor: bool = False) -> Drafter:
    return drafters.dflash(model, MASK, ids, anchor=anchor)


def dflash_model(**changes: int) -> Any:
    return random_dflash(DFlashConfig(**SMALL | changes, target_layers=(1, 2)), 10)


def fallback(second: Callable[..., Drafter]) -> Callable[..., Drafter]:
    return lambda model, ids=None: drafters.fallback(drafters.ngram(min_ngram=2), second(model, ids))


def cascade(*, one_pass: bool) -> Callable[..., Drafter]:
    return lambda model, ids=None: drafters.cascade(drafters.ngram(min_ngram=1), drafters.standalone(model, ids), one_pass=one_pass)


WITH_MODEL: dict[str, tuple[Callable[..., Any], Callable[..., Drafter]]] = {
    "standalone": (language_model, drafters.standalone),
    "eagle": (eagle_head, drafters.eagle),
    "eagle3": (lambda **changes: random_head(EagleConfig(**SMALL | changes, target_layers=(0, 1, 2), style="eagle3"), 6), drafters.eagle),
    "mtp": (lambda **changes: mtp_modules(1, **changes), drafters.mtp),
    "mtp, one a draft": (lambda **changes: mtp_modules(DRAFTS, **changes), drafters.mtp),
    "mtp, query-only": (query_head, drafters.mtp),
    "pard": (language_model, pard),
    "p-eagle": (
        lambda **changes: random_parallel_head(ParallelConfig(**SMALL | changes, target_layers=(0, 2), style="eagle3"), 9),
        pard,
    ),
    "medusa": (medusa_heads, drafters.medusa),
    "dflash": (dflash_model, dflash),
    "dflash, anchored": (dflash_model, lambda model, ids=None: dflash(model, ids, anchor=True)),
    "early_exit": (
        lambda **changes: flat(random_llama(LlamaConfig(**SHAPE | changes), seed=3)) if changes else TARGET,
        lambda model, ids=None: drafters.early_exit(model, 1, ids),
    ),
    "fallback": (language_model, fallback(drafters.standalone)),
    "fallback to eagle": (eagle_head, fallback(drafters.eagle)),
    "cascade": (language_model, cascade(one_pass=True)),
    "cascade, further steps": (language_model, cascade(one_pass=False)),
}
"""By name: the model, its shape changed perhaps, and a drafter made of it, with a map of token ids perhaps."""

ALL: dict[str, Callable[[], Drafter]] = {name: lambda name=name: of_model(name) for name in WITH_MODEL} | {
    "ngram": drafters.ngram,
    "suffix": drafters.suffix,
    "fixed": lambda: drafters.fixed([[place % VOCAB for place in range(28)]] * 4),
    "best_of": lambda: drafters.best_of(drafters.ngram(), drafters.suffix()),
}
OF_OTHERS: dict[str, Callable[[], Drafter]] = {"argmax": lambda: drafters.argmax(made("standalone"))}
"""Drafters that are others of these, changed."""

NAMES = sorted(ALL | OF_OTHERS)


def rebuilt(value: Any, change: Callable[[Any], Any]) -> Any:
    """A drafter, model or part of one, made anew with what `change` gives for its parts; None leaves a part to its own parts."""
    new = change(value)
    if new is not None:
        return new
    if isinstance(value, Mapping):
        return {name: rebuilt(item, change) for name, item in value.items()}
    if isinstance(value, tuple):
        return tuple(rebuilt(item, change) for item in value)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        parts = {one.name: rebuilt(getattr(value, one.name), change) for one in dataclasses.fields(value) if one.init}
        return dataclasses.replace(value, **parts)
    return value


def of_model(name: str, ids: torch.Tensor | None = None, **changes: int) -> Drafter:
    """A drafter with a model, whose shape may be changed."""
    model, drafter = WITH_MODEL[name]
    return drafter(model(**changes), ids)


@cache
def made(name: str) -> Drafter:
    """The drafter of this name, made once."""
    return (ALL | OF_OTHERS)[name]()


def drafted(state: fs.SpecState, drafter: Drafter, *, donate: bool = False, **settings: Any) -> tuple[fs.SpecState, fs.steps.Draft]:
    """All draft steps of a round."""
    state, found = fs.prefill(state, drafter, donate=donate, **settings)
    for _ in range(state.config.num_speculative_tokens - 1):
        state, found = fs.decode(state, drafter, donate=donate)
    return state, found


# ---------------------------------------------------------------- rounds


def begin(
    drafter: Drafter | None,
    rule: fs.rules.Rule = fs.rules.coupled,
    *,
    capacity: int = 4,
    rows: Sequence[int] = (0, 2, 3),
    drafts: int = DRAFTS,
    block_size: int = BLOCK_SIZE,
    num_blocks: int | None = None,
    prompts: Sequence[Sequence[int]] = PROMPTS,
    seeds: Sequence[int] = SEEDS,
    temperature: Sequence[float] = HEAT,
    **settings: Any,
) -> fs.SpecState:
    """A state with prompts in some rows, whose caches hold NaN wherever nothing was written."""
    sizes = {"block_size": block_size, "num_blocks": num_blocks}
    state = fs.init(config(rows=capacity, length=LENGTH, drafts=drafts, rule=rule, **sizes), TARGET, drafter)
    for cache_ in caches(state):
        cache_.fill_(float("nan"))
    settings |= {"seeds": list(seeds), "temperature": list(temperature), "rows": list(rows)}
    return fs.admit(state, TARGET, drafter, prompts, donate=True, **settings)[0]


def caches(state: fs.SpecState) -> list[torch.Tensor]:
    """The buffers of all pools, all of float32."""
    branches = filter(None, (state.lease.target, state.lease.draft))
    return [cache_ for branch in branches for cache_ in branch.pool.kv.values()]


def fresh(state: fs.SpecState, drafter: Drafter) -> fs.SpecState:
    """A new state with the committed tokens of the same rows: all but the newest as a prompt, the newest in place of the first token."""
    rows, counts = rows_of(state), state.num_tokens.tolist()
    keys = [seed_and_heat(state, row) for row in rows]
    new, _ = fs.admit(
        fs.init(state.config, TARGET, drafter),
        TARGET,
        drafter,
        [committed(state, row)[:-1] for row in rows],
        seeds=[seed for seed, _ in keys],
        temperature=[heat for _, heat in keys],
        max_tokens=[int(state.row_limit[row]) - counts[row] + 1 for row in rows],
        rows=rows,
    )
    tokens = new.tokens.clone()
    for row in rows:
        tokens[row, counts[row] - 1] = state.tokens[row, counts[row] - 1]
    return dataclasses.replace(new, tokens=tokens)


def forced(
    state: fs.SpecState, drafter: Drafter, accepted: Sequence[int], *, donate: bool = True, **settings: Any
) -> tuple[fs.SpecState, torch.Tensor]:
    """A round in which every row keeps so many of its drafts, as far as it has so many; and the drafts."""
    state, draft = drafted(state, drafter, donate=donate, **settings)
    made = (draft.tokens >= 0).sum(1).tolist()
    state, scores = fs.score(state, TARGET, donate=donate)
    for row, count in enumerate(made):
        for place, token in enumerate(draft.tokens[row, :count].tolist()):
            scores.logits[row, place, token] = 100.0 if place < accepted[row] else -float("inf")
    state, verdict = fs.accept(state, scores, donate=donate)
    assert verdict.num_accepted.tolist() == [min(pair) for pair in zip(accepted, made, strict=True)]
    assert not verdict.bad_row.any()
    return state, draft.tokens


@dataclass(frozen=True)
class Pass:
    """What a model was given."""

    of_target: bool
    batch: ForwardBatch


def recorded(monkeypatch: pytest.MonkeyPatch) -> list[Pass]:
    """Take note of every pass of every model from now on."""
    seen: list[Pass] = []
    run_model = torch_steps.run_model

    def recording(model: Any, pool: Any, batch: ForwardBatch, count: int) -> Any:
        copies = {name: value.clone() for name, value in vars(batch).items() if isinstance(value, torch.Tensor)}
        seen.append(Pass(model is TARGET, dataclasses.replace(batch, **copies)))
        return run_model(model, pool, batch, count)

    monkeypatch.setattr(torch_steps, "run_model", recording)
    return seen


def change_logits(monkeypatch: pytest.MonkeyPatch, change: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """Let every draft model say something else from now on."""
    run_model = torch_steps.run_model

    def changing(model: Any, *rest: Any) -> Any:
        logits, hidden = run_model(model, *rest)
        return logits if model is TARGET else change(logits), hidden

    monkeypatch.setattr(torch_steps, "run_model", changing)


def check_places(batch: ForwardBatch, block_size: int = BLOCK_SIZE) -> list[int]:
    """Every place of a pass is a token of its row, in a block that the row owns, or nothing at all. Returns the rows without a token."""
    starts, table = batch.query_start_loc.tolist(), batch.block_tables.tolist()
    assert starts[-1] == len(batch.input_ids)
    for indices, most in ((batch.input_ids, VOCAB), (batch.positions, LENGTH), (batch.logits_indices, starts[-1])):
        assert indices is None or not indices.numel() or (int(indices.min()) >= 0 and int(indices.max()) < most)
    empty = []
    for row, (start, stop) in enumerate(pairwise(starts)):
        tokens, positions, slots = (getattr(batch, name)[start:stop].tolist() for name in ("input_ids", "positions", "slot_mapping"))
        if batch.seq_lens[row] == 0:
            assert set(tokens) == set(positions) == {0} and set(slots) == {-1}
            empty.append(row)
        for position, slot in zip(positions, slots, strict=True):
            block = table[row][position // block_size]
            assert slot == -1 or (block >= 0 and slot == block * block_size + position % block_size)
    return empty
