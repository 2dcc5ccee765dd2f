"""The ratio rule keeps the target's law: by enumeration in float64, by enumeration of its own integers, and by counting."""

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import pytest
from oracle import config
from scipy.stats import chi2

import funcspec as fs
from funcspec import exact
from funcspec.models import TableModel
from funcspec.noise import ACCEPT, as_words, token_words

RNG = np.random.default_rng(7)


def normalised(rows: Any) -> np.ndarray:
    table = np.asarray(rows, np.float64)
    return table / table.sum(1, keepdims=True)


P3 = ((0.5, 0.3, 0.2), (0.1, 0.6, 0.3), (0.25, 0.25, 0.5))
PAIRS: dict[str, tuple[np.ndarray, np.ndarray]] = {
    "unlike": (normalised(P3), normalised(((0.2, 0.3, 0.5), (0.6, 0.1, 0.3), (0.4, 0.4, 0.2)))),
    "one favourite": (normalised(np.eye(3) + 3), normalised(7 * np.eye(3) + 1)),
    "equal": (normalised(P3), normalised(P3)),
    "nearly equal": (normalised(P3), normalised(np.array(P3) + 1e-6 * RNG.random((3, 3)))),
    "zeros in both": (normalised(((0.5, 0.5, 0), (0, 0.25, 0.75), (1, 0, 0))), normalised(((0, 0.5, 0.5), (0.5, 0.5, 0), (0, 0, 1)))),
    "apart": (normalised(((1, 0, 0), (0, 0, 1), (0, 1, 0))), normalised(((0, 1, 1), (1, 1, 0), (1, 0, 1)))),
    "random of 4": (normalised(RNG.random((4, 4)) ** 3), normalised(RNG.random((4, 4)) ** 3)),
    "peaked of 4": (normalised(np.exp(RNG.normal(size=(4, 4)) * 6)), normalised(np.exp(RNG.normal(size=(4, 4)) * 6))),
    "of 2": (normalised(RNG.random((2, 2))), normalised(RNG.random((2, 2)))),
}


# ---------------------------------------------------------------- enumeration


@dataclass(frozen=True)
class Plan:
    """All that a round does by chance: for each newest token the law of a draft, of keeping it, and of the token after it."""

    drafted: np.ndarray  # [V, V]
    kept: np.ndarray  # [V, V] probability to keep draft d after token v
    recovered: np.ndarray  # [V, V, V] law of the token after rejecting d after v
    plain: np.ndarray  # [V, V] law of a plain draw


def ideal_plan(p: np.ndarray, q: np.ndarray, *, point: bool = False) -> Plan:
    """The rule in float64, as the papers have it. For points q says what is proposed; any law will do."""
    size = len(p)
    kept, recovered = np.zeros((size, size)), np.zeros((size, size, size))
    for v, d in itertools.product(range(size), repeat=2):
        proposed = np.eye(size)[d] if point else q[v]
        kept[v, d] = min(1.0, p[v, d] / proposed[d]) if proposed[d] > 0 else 1.0
        rest = np.maximum(p[v] - proposed, 0.0)
        recovered[v, d] = rest / rest.sum() if rest.sum() > 0 else p[v]
    return Plan(q, kept, recovered, p)


def production_plan(p: np.ndarray, q: np.ndarray, temperature: float, *, point: bool = False) -> tuple[Plan, np.ndarray]:
    """The same from the integers that decide tokens, as exact fractions of their sums; and the ideal law of the target."""
    heat = np.array([[temperature]], np.float32)
    with np.errstate(divide="ignore"):
        scores, drawn = (exact.sane_scores(np.log(table), heat) for table in (p, q))
    totals, sums = exact.normalisers(scores), exact.normalisers(drawn)
    fixed, other = exact.probabilities(scores, totals), exact.probabilities(drawn, sums)
    size = len(p)
    kept, recovered = np.zeros((size, size)), np.zeros((size, size, size))
    for d in range(size):
        weights = [tuple(part[:, d] for part in exact.weights(table)) for table in (scores, drawn)]
        kept[:, d] = exact.thresholds(weights[0], totals, weights[1], sums, np.full(size, point)) / exact.CERTAIN
        for v in range(size):
            excluded = point or other[v, d] == 0
            rest = exact.residual(fixed[v], other[v] * (not excluded), d)
            recovered[v, d] = rest / rest.sum()
    wide = np.exp(scores.astype(np.float64))
    ideal = wide / wide.sum(1, keepdims=True)
    return Plan(other / other.sum(1, keepdims=True), kept, recovered, ideal), ideal


def law_of_rounds(plan: Plan, most: int, length: int) -> np.ndarray:
    """Joint law of `length` tokens after token 0, by every outcome of as many rounds as it takes; lexicographic order."""
    size = len(plan.plain)

    @cache
    def after(token: int, place: int, left: int) -> np.ndarray:
        if left == 0:
            return np.ones(1)
        out = np.zeros((size, size ** (left - 1)))
        for d in range(size):
            if place == most:
                out[d] += plan.plain[token, d] * after(d, 0, left - 1)
                continue
            drawn = plan.drafted[token, d]
            if drawn > 0:
                out[d] += drawn * plan.kept[token, d] * after(d, place + 1, left - 1)
                for x in range(size):
                    out[x] += drawn * (1 - plan.kept[token, d]) * plan.recovered[token, d, x] * after(x, 0, left - 1)
        return out.reshape(-1)

    return after(0, 0, length)


def plain_law(p: np.ndarray, length: int) -> np.ndarray:
    runs = itertools.product(range(len(p)), repeat=length)
    return np.array([np.prod([p[a, b] for a, b in zip((0, *run), run, strict=False)]) for run in runs])


@pytest.mark.parametrize("point", [False, True], ids=["sampled", "points"])
@pytest.mark.parametrize("most", [0, 1, 2, 3])
@pytest.mark.parametrize("name", list(PAIRS))
def test_the_rule_is_lossless(name: str, most: int, point: bool) -> None:
    """One round (length most + 1) and several (length 5)."""
    p, q = PAIRS[name]
    for length in (most + 1, 5):
        found = law_of_rounds(ideal_plan(p, q, point=point), most, length)
        assert np.abs(found - plain_law(p, length)).max() < 1e-12


@pytest.mark.parametrize("point", [False, True], ids=["sampled", "points"])
@pytest.mark.parametrize("temperature", [1.0, 0.6, 3.0])
@pytest.mark.parametrize("name", list(PAIRS))
def test_its_integers_are_lossless(name: str, temperature: float, point: bool) -> None:
    """Total variation of one token below 1e-6, of five tokens below 4e-6."""
    plan, p = production_plan(*PAIRS[name], temperature, point=point)
    for most, length, bound in ((1, 1, 1e-6), (1, 5, 4e-6), (3, 5, 4e-6)):
        found = law_of_rounds(plan, most, length)
        assert abs(found.sum() - 1) < 1e-9
        assert 0.5 * np.abs(found - plain_law(p, length)).sum() < bound


def test_large_vocabularies_are_lossless() -> None:
    """One token of 50,000, from the marginals: min(p, q) is kept, the rest is p - q where that is positive."""
    rng = np.random.default_rng(2)
    scores, drawn = (rng.normal(size=(1, 50_000)).astype(np.float32) * 3 for _ in range(2))
    totals, sums = exact.normalisers(scores), exact.normalisers(drawn)
    p_weights, q_weights = (tuple(part[0] for part in exact.weights(table)) for table in (scores, drawn))
    every = np.repeat(totals, 50_000, axis=0), np.repeat(sums, 50_000, axis=0)
    kept = exact.thresholds(p_weights, every[0], q_weights, every[1], np.zeros(50_000, bool)) / exact.CERTAIN
    fixed, other = exact.probabilities(scores, totals)[0], exact.probabilities(drawn, sums)[0]
    q = other / other.sum()
    rest = np.maximum(fixed - other, 0)
    found = q * kept + (q * (1 - kept)).sum() * rest / rest.sum()
    ideal = np.exp(scores[0].astype(np.float64) - scores.max())
    assert 0.5 * np.abs(found - ideal / ideal.sum()).sum() < 1e-6


# ---------------------------------------------------------------- counting

RULE = fs.rules.ratio
ROWS, TOKENS = 512, 3


def counted(p: np.ndarray, q: np.ndarray, *, batches: int, drafts: int, donate: bool = True, temperature: float = 1.0) -> tuple[Any, int]:
    """How often each run of tokens followed token 0 in real steps, and how many row-rounds that took."""
    target, drafter = TableModel(tuple(map(tuple, p))), fs.drafters.standalone(TableModel(tuple(map(tuple, q))))
    settings = config(rows=ROWS, length=16, drafts=drafts, rule=RULE, block_size=16)
    first, _ = fs.admit(fs.init(settings, target, drafter), target, drafter, [[0]] * ROWS, seeds=range(ROWS), temperature=temperature)
    start = int(first.num_tokens[0])
    size, counts, rounds = len(p), np.zeros(len(p) ** (TOKENS + 1)), 0
    for batch in range(batches):
        state = fs.fork(first, seeds=[1_000_003 * (batch + 1) + row for row in range(ROWS)])
        while int(state.num_tokens.min()) < start + TOKENS:
            rounds += int((state.num_tokens < start + TOKENS).sum())
            state, _ = fs.step_round(state, target, drafter, donate=donate)
        runs = state.tokens[:, start - 1 : start + TOKENS].numpy()  # the first token of a row is the same in all batches
        np.add.at(counts, runs @ size ** np.arange(TOKENS + 1)[::-1], 1)
    return counts.reshape(size, -1), rounds


def statistic(counts: np.ndarray, p: np.ndarray) -> tuple[float, int]:
    """Chi-square of what followed each first token, and its degrees of freedom."""
    size = len(p)
    total, freedom = 0.0, 0
    for token in range(size):
        law = np.array(
            [np.prod([p[a, b] for a, b in zip((token, *run), run, strict=False)]) for run in itertools.product(range(size), repeat=TOKENS)]
        )
        expected = law * counts[token].sum()
        assert counts[token][law == 0].sum() == 0
        likely = expected > 0
        assert expected[likely].min() > 5
        total += float(((counts[token][likely] - expected[likely]) ** 2 / expected[likely]).sum())
        freedom += int(likely.sum()) - 1
    return total, freedom


@pytest.mark.slow
@pytest.mark.parametrize(("drafts", "donate"), [(1, True), (3, False)])
def test_counts_follow_the_target(drafts: int, donate: bool) -> None:
    """Joint law of three tokens over 24,576 rows, more than 40,000 row-rounds: 78 degrees of freedom, false alarms 5 in 10^7 each."""
    p, q = PAIRS["unlike"]
    counts, rounds = counted(p, q, batches=48, drafts=drafts, donate=donate)
    assert counts.sum() == 24_576 and rounds > 40_000
    found, freedom = statistic(counts, p)
    assert freedom == 78 and found < chi2.isf(5e-7, freedom)
    assert statistic(counts, q)[0] > 5 * chi2.isf(5e-7, freedom)  # the sample tells target and drafter apart


def swapped(right: Callable[..., Any]) -> Callable[..., Any]:
    return lambda p, p_totals, q, q_totals, is_point: right(q, q_totals, p, p_totals, is_point)


def unsubtracted(right: Callable[..., Any]) -> Callable[..., Any]:
    return lambda p, q, draft: p


def always(right: Callable[..., Any]) -> Callable[..., Any]:
    return lambda p, *rest: np.full(len(p[1]), exact.CERTAIN)


def with_the_coin(right: Callable[..., Any]) -> Callable[..., Any]:
    """The residual drawn with the coin that rejected the draft; at place 0 nonce and position are the same number."""

    def pick(weights: np.ndarray, low: int, high: int, position: int) -> int:
        key = [as_words(word) for word in (low, high, position, position)]
        coin = int(token_words(*key, ACCEPT, np.zeros(1, np.uint32))[0])
        sums = weights.cumsum()
        return int(np.argmax(sums > (coin * int(sums[-1])) >> 32))

    return pick


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "wrong"), [("thresholds", swapped), ("residual", unsubtracted), ("thresholds", always), ("pick", with_the_coin)]
)
def test_wrong_rules_are_seen(name: str, wrong: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """The same count with one thing wrong, a quarter of the rows, and a residual of more than one token."""
    monkeypatch.setattr(exact, name, wrong(getattr(exact, name)))
    p, q = PAIRS["one favourite"]
    counts, _ = counted(p, q, batches=12, drafts=1)
    found, freedom = statistic(counts, p)
    assert found > 2 * chi2.isf(5e-7, freedom)
