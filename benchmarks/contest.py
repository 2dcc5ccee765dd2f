"""Contests: ways to decode that take turns in one process, on the same cases, with ratios taken turn by turn."""

import math
import os
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from benchmarks.comparison import first_difference

Case = Sequence[list[int]]
"""Prompts that are one piece of work: one, or several to be decoded together."""


@dataclass(frozen=True)
class Sample:
    """A case decoded once.

    Attributes:
        outputs: tokens of each prompt.
        rounds, counted: rounds of all prompts, and tokens emitted in them.
        seconds: of the whole work, reading the prompts included; filled in by `measure`.
    """

    outputs: list[list[int]]
    rounds: int
    counted: int
    seconds: float = 0.0

    @property
    def rate(self) -> float:
        """Tokens a second."""
        return sum(map(len, self.outputs)) / max(self.seconds, 1e-9)


@dataclass(frozen=True)
class Entrant:
    """A way to decode: its name, and a function of a case and of the repeat's number, which is the seed where there is chance."""

    name: str
    run: Callable[[Case, int], Sample]


@dataclass(frozen=True)
class Aim:
    """How many times as fast as a peer one of ours is to be; None is only compared."""

    ours: str
    peer: str
    least: float | None = None


@dataclass(frozen=True)
class Contest:
    """What is compared.

    Attributes:
        title: a line for the reader.
        entrants: the ways to decode.
        cases: the work.
        aims: the ratios to take.
        exact: whether all entrants are to give the output of the first one.
    """

    title: str
    entrants: Sequence[Entrant]
    cases: Sequence[Case]
    aims: Sequence[Aim]
    exact: bool = True


@dataclass
class Rate:
    """What an entrant did: tokens a second by median and by least times, tokens a round, and outputs like the first entrant's."""

    name: str
    tokens_per_second: float
    most_tokens_per_second: float
    tokens_per_round: float
    same: int | None
    outputs: int
    first_differences: list[tuple[int, int]] = field(default_factory=list)


@dataclass(frozen=True)
class Ratio:
    """An aim and what was measured.

    Attributes:
        ours, peer, aim: what was wanted.
        ratio: geometric mean over cases; for each case the median of the ratios of its turns.
        by_least: the same from the least time of each case.
        low, high: ratios of the cases with the least and the most.
    """

    ours: str
    peer: str
    aim: float | None
    ratio: float
    by_least: float
    low: float
    high: float

    @property
    def verdict(self) -> str:
        """Whether the aim is met, in a few words."""
        return "no aim" if self.aim is None else f"aim {self.aim:g}: {'met' if self.ratio >= self.aim else 'missed'}"


Samples = dict[str, list[list[Sample]]]
"""By entrant, then by case: a sample of each repeat."""


class Company:
    """How busy others kept this machine's cores since the clock started, where Linux tells."""

    def __init__(self) -> None:
        self._started = self._now()

    def _now(self) -> tuple[float, float] | None:
        path = Path("/proc/stat")
        if not path.exists():
            return None
        user, nice, system, idle, waiting, interrupts, soft, *_ = map(int, path.read_text().split()[1:9])
        ticks = os.sysconf("SC_CLK_TCK")
        busy = (user + nice + system + interrupts + soft) / ticks - time.process_time()
        return busy, busy + time.process_time() + (idle + waiting) / ticks

    def share(self) -> float | None:
        """Share of all cores' time that other processes took; None where it is not known."""
        now = self._now()
        if now is None or self._started is None:
            return None
        others, whole = (after - before for before, after in zip(self._started, now, strict=True))
        return min(1.0, max(0.0, others / whole)) if whole > 0 else 0.0


CLOCKS = {"wall": time.perf_counter, "process": time.process_time}


def measure(contest: Contest, repeats: int, clock: Callable[[], float] = time.perf_counter) -> Samples:
    """Let the entrants take turns, case by case, in an order that turns around from repeat to repeat. A first turn is not counted."""
    for entrant in contest.entrants:
        entrant.run(contest.cases[0], 0)
    samples: Samples = {entrant.name: [[] for _ in contest.cases] for entrant in contest.entrants}
    for repeat in range(repeats):
        for number, case in enumerate(contest.cases):
            for entrant in contest.entrants[:: -1 if repeat % 2 else 1]:
                started = clock()
                sample = entrant.run(case, repeat)
                samples[entrant.name][number].append(replace(sample, seconds=clock() - started))
    return samples


def rate(contest: Contest, samples: Samples, name: str) -> Rate:
    """Put an entrant's samples together."""
    own, first = samples[name], samples[contest.entrants[0].name]
    whole = [sample for of_case in own for sample in of_case]
    median, least = (sum(pick([sample.seconds for sample in of_case]) for of_case in own) for pick in (statistics.median, min))
    tokens = sum(statistics.fmean(sum(map(len, sample.outputs)) for sample in of_case) for of_case in own)
    pairs = [
        pair
        for left, right in zip(first, own, strict=True)
        for pair in zip(left[0].outputs, right[0].outputs, strict=True)  # what is exact is alike in all repeats
    ]
    places = [first_difference(*pair) for pair in pairs]
    return Rate(
        name,
        tokens / max(median, 1e-9),
        tokens / max(least, 1e-9),
        sum(sample.counted for sample in whole) / max(1, sum(sample.rounds for sample in whole)),
        sum(place is None for place in places) if contest.exact else None,
        len(places),
        [(number, place) for number, place in enumerate(places) if place is not None] if contest.exact else [],
    )


def ratio(aim: Aim, samples: Samples) -> Ratio:
    """Compare two entrants turn by turn."""
    by_case, by_least = [], []
    for ours, peers in zip(samples[aim.ours], samples[aim.peer], strict=True):
        by_case.append(statistics.median(one.rate / other.rate for one, other in zip(ours, peers, strict=True)))
        by_least.append(max(sample.rate for sample in ours) / max(sample.rate for sample in peers))
    mean, least = (math.exp(statistics.fmean(map(math.log, found))) for found in (by_case, by_least))
    return Ratio(aim.ours, aim.peer, aim.least, mean, least, min(by_case), max(by_case))


def hold(contest: Contest, repeats: int, clock: Callable[[], float] = time.perf_counter) -> dict[str, Any]:
    """Measure a contest, print what was found, and return it."""
    print(contest.title, flush=True)
    company = Company()
    samples = measure(contest, repeats, clock)
    busy = company.share()
    rates = [rate(contest, samples, entrant.name) for entrant in contest.entrants]
    ratios = [ratio(aim, samples) for aim in contest.aims]
    print(f"{'':44} {'same':>6} {'tokens/round':>13} {'tokens/s':>9} {'at best':>8}")
    for found in rates:
        same = "-" if found.same is None else f"{found.same}/{found.outputs}"
        print(
            f"{found.name:44} {same:>6} {found.tokens_per_round:13.2f} {found.tokens_per_second:9.1f} {found.most_tokens_per_second:8.1f}"
        )
    for found in rates:
        if found.first_differences:
            places = ", ".join(f"prompt {prompt} at token {place}" for prompt, place in found.first_differences)
            print(f"{found.name} differs from {rates[0].name}: {places}")
    for each in ratios:
        spread = f"cases {each.low:.2f} to {each.high:.2f}, by least times {each.by_least:.2f}"
        print(f"{each.ours} / {each.peer}: {each.ratio:.2f} ({spread}); {each.verdict}")
    if busy is not None:
        print(f"other processes took {busy:.0%} of the cores meanwhile")
    return {"rates": rates, "ratios": ratios, "others": busy}
