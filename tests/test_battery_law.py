"""Every drafter of the battery keeps the target's law: tokens of many seeds, counted and held against enumeration.

For each drafter 320 rows of two prompts at temperature 1, with rounds of K = 3 drafts under the ratio rule. Chi-square of the joint law of
the first and second token, and of the second and third. By chance a drafter fails once in 20,000 samples, any test here once in 800; but
seeds are fixed, and so are the samples.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from all_drafters import NAMES, change_logits, made
from one_pass import DRAFTS, TARGET, VOCAB, target_logits
from oracle import config
from scipy.stats import chi2
from test_ratio_law import always

import funcspec as fs
from funcspec import drafters, exact
from funcspec.drafters import Drafter
from funcspec.transitions import drafting
from funcspec.transitions.torch import TorchTransition

ROWS, BATCHES, TOKENS = 64, 5, 3
PROMPTS = [[5, 6, 7, 1, 10, 5, 6, 2, 0, 3], [4, 2, 9, 9, 0, 3, 3, 8, 2]]
FALSE_ALARMS = 2.5e-5
"""How often one statistic exceeds its bound by chance; there are two for each drafter, and six more."""


@pytest.fixture(params=NAMES)
def drafter(request: pytest.FixtureRequest) -> Drafter:
    """Each one; forced drafts for all rows."""
    if request.param == "fixed":
        return drafters.fixed([[place % VOCAB for place in range(28)]] * ROWS)
    return made(request.param)


@dataclass(frozen=True)
class Sample:
    """What followed the first token of each prompt.

    Attributes:
        tokens: by prompt, [rows, TOKENS].
        accepted, recovered: how many of all tokens were accepted drafts, and how many came in place of a rejected one.
    """

    tokens: list[np.ndarray]
    accepted: int
    recovered: int


def admitted(drafter: Drafter | None, rule: fs.rules.Rule) -> fs.SpecState:
    settings = config(rows=ROWS, length=24, drafts=DRAFTS, rule=rule, block_size=8)
    prompts = [PROMPTS[row % 2] for row in range(ROWS)]
    return fs.admit(fs.init(settings, TARGET, drafter), TARGET, drafter, prompts, seeds=[1] * ROWS, temperature=1.0)[0]


def sample(drafter: Drafter | None, rule: fs.rules.Rule, batches: int = BATCHES) -> Sample:
    """Rounds until every row has its tokens, from as many seeds as there are rows in all batches."""
    first = admitted(drafter, rule)
    start, found, origins = first.num_tokens.numpy(), [], np.zeros(3, int)
    for batch in range(batches):
        state = fs.fork(first, seeds=range(batch * ROWS, (batch + 1) * ROWS))
        while int((state.num_tokens - first.num_tokens).min()) < TOKENS:
            state, verdict = fs.step_round(state, TARGET, drafter, donate=True)
            origins += np.bincount(verdict.origin[verdict.origin >= 0].numpy(), minlength=3)
        places = start[:, None] + np.arange(TOKENS)
        found.append(np.take_along_axis(state.tokens.numpy(), places, 1))
    whole = np.concatenate(found)
    return Sample([whole[number::2] for number in range(2)], int(origins[0]), int(origins[1]))


@cache
def law(number: int) -> np.ndarray:
    """Joint law [V, V, V] of the three tokens after a prompt and its first token, by enumeration in float64."""
    state = admitted(None, fs.rules.ratio)
    prefix = state.tokens[number, : int(state.num_tokens[number])].tolist()

    def following(*tokens: int) -> np.ndarray:
        weights = np.exp(target_logits([*prefix, *tokens]).astype(np.float64))
        return weights / weights.sum()

    out = np.empty((VOCAB,) * TOKENS)
    first = following()
    for a in range(VOCAB):
        second = following(a)
        for b in range(VOCAB):
            out[a, b] = first[a] * second[b] * following(a, b)
    return out


def statistic(tokens: list[np.ndarray], places: tuple[int, int]) -> tuple[float, float]:
    """Chi-square of the tokens at two places after both prompts, and what it exceeds by chance once in 1 / FALSE_ALARMS times.

    Neighbouring cells are taken together until each is expected at least five times.
    """
    total, freedom = 0.0, 0
    (left_out,) = {0, 1, 2} - set(places)
    for number, rows in enumerate(tokens):
        counts = np.zeros((VOCAB, VOCAB))
        np.add.at(counts, tuple(rows[:, place] for place in places), 1)
        cells = np.stack([counts.ravel(), law(number).sum(left_out).ravel() * len(rows)])
        ends, sums = [], 0.0
        for cell, expected in enumerate(cells[1]):
            sums += expected
            if sums >= 5:
                ends.append(cell + 1)
                sums = 0.0
        ends[-1] = cells.shape[1]  # what is left over goes to the last
        seen, expected = np.stack([cells[:, start:stop].sum(1) for start, stop in pairwise([0, *ends])], 1)
        total += float(((seen - expected) ** 2 / expected).sum())
        freedom += len(ends) - 1
    return total, float(chi2.isf(FALSE_ALARMS, freedom))


PLACES = [(0, 1), (1, 2)]


@pytest.mark.slow
def test_ratio_keeps_the_law(drafter: Drafter) -> None:
    found = sample(drafter, fs.rules.ratio)
    assert sum(map(len, found.tokens)) == ROWS * BATCHES == 320
    assert found.accepted >= 25 and found.recovered >= 250
    for places in PLACES:
        value, bound = statistic(found.tokens, places)
        assert value < bound


def flattened(keep: Callable[..., Any]) -> Callable[..., Any]:
    """Keep what no draft was drawn from: that every token was as likely."""
    return lambda logits, **rest: keep(logits=torch.zeros_like(logits), **rest)


@pytest.mark.slow
def test_a_drafter_that_misreports_is_seen(drafter: Drafter, monkeypatch: pytest.MonkeyPatch) -> None:
    """A smaller sample is enough: drafts that were drawn from another distribution than is told; points that are kept whatever p is."""
    if drafter.proposal == "sampled":
        monkeypatch.setattr(drafting, "keep_proposals_", flattened(drafting.keep_proposals_))
    else:
        monkeypatch.setattr(exact, "thresholds", always(exact.thresholds))
    found = sample(drafter, fs.rules.ratio, batches=3)
    for places in PLACES:
        value, bound = statistic(found.tokens, places)
        assert value > bound


@pytest.mark.parametrize("name", ["fallback", "fallback to eagle"])
def test_points_that_pass_for_drawn_ones_are_seen(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Drafts of the first drafter, judged by what the second would have drawn from."""
    monkeypatch.setattr(TorchTransition, "mark_points", lambda transition, points: None)
    value, bound = statistic(sample(made(name), fs.rules.ratio).tokens, PLACES[0])
    assert value > bound


@pytest.mark.parametrize("bad", [range(VOCAB), [2, 5]], ids=["all", "some"])
def test_scores_that_are_no_numbers_keep_the_law(bad: Sequence[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """Drafts of a model that says NaN of all tokens, or of some."""
    change_logits(monkeypatch, lambda logits: logits.index_fill(1, torch.tensor(bad), float("nan")))
    found = sample(made("standalone"), fs.rules.ratio)
    assert found.accepted >= 25 and found.recovered >= 250
    for places in PLACES:
        value, bound = statistic(found.tokens, places)
        assert value < bound


@cache
def plain(batches: int) -> Sample:
    """The target's own sample path, in passes of the same shape."""
    return sample(None, fs.rules.coupled, batches)


def test_plain_decoding_has_the_law() -> None:
    found = plain(BATCHES)
    assert found.accepted == found.recovered == 0
    for places in PLACES:
        value, bound = statistic(found.tokens, places)
        assert value < bound


def test_coupled_draws_the_plain_sample(drafter: Drafter) -> None:
    """So it has the law that the plain sample was found to have."""
    found = sample(drafter, fs.rules.coupled, batches=2)
    assert found.accepted >= 10 and found.recovered >= 25
    for rows, expected in zip(found.tokens, plain(2).tokens, strict=True):
        assert np.array_equal(rows, expected)
