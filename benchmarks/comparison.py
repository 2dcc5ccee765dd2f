"""Ways to decode, measured side by side: the same prompts, taking turns, with every output compared."""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field

from benchmarks.decoding import Decoded, RoundTimes, Way


@dataclass
class Result:
    """What was measured of a way.

    Attributes:
        name: its name.
        tokens_per_round, tokens_per_second: over whole prompts, their reading left out.
        ms_per_round: on the device; wall time where rounds cannot be run alone.
        is_wall: whether it is wall time.
        host_us, least_host_us: for the host to launch a round, median and least.
        ratio: its tokens a second over those of the first way.
        same: prompts with the first way's output.
        tokens, same_tokens: the first way's tokens, and how many of them come before the first differences.
        first_differences: where the output first differs, by prompt.
    """

    name: str
    tokens_per_round: float
    tokens_per_second: float
    ms_per_round: float
    is_wall: bool
    host_us: float | None = None
    least_host_us: float | None = None
    ratio: float = 0.0
    same: int = 0
    tokens: int = 0
    same_tokens: int = 0
    first_differences: dict[int, int] = field(default_factory=dict)

    def compare(self, expected: list[list[int]], outputs: list[list[int]]) -> None:
        """Count what equals the expected outputs."""
        for prompt, (left, right) in enumerate(zip(expected, outputs, strict=True)):
            place = first_difference(left, right)
            self.tokens += len(left)
            self.same_tokens += len(left) if place is None else place
            self.same += place is None
            if place is not None:
                self.first_differences[prompt] = place


def first_difference(left: Sequence[int], right: Sequence[int]) -> int | None:
    """The first place where two outputs differ, or None."""
    differing = (place for place, (one, other) in enumerate(zip(left, right, strict=False)) if one != other)
    return next(differing, None if len(left) == len(right) else min(len(left), len(right)))


def summarise(name: str, runs: list[list[Decoded]], times: RoundTimes | None) -> Result:
    """Put the runs of a way together; of a prompt's repeats the median time counts."""
    seconds = sum(statistics.median(run.seconds for run in repeats) for repeats in runs)
    counted, rounds = (sum(getattr(repeats[0], count) for repeats in runs) for count in ("counted", "rounds"))
    result = Result(name, counted / max(rounds, 1), counted / max(seconds, 1e-9), seconds / max(rounds, 1) * 1e3, times is None)
    if times is not None:
        result.ms_per_round, result.host_us, result.least_host_us = times.device_ms, times.host_us, times.least_host_us
    return result


def warm_up(ways: list[Way], prompt: list[int]) -> list[Way]:
    """Decode a prompt in each way and compare, before anything is timed. Peers that fail are named and left out."""
    working: list[Way] = []
    expected: list[int] = []
    for way in ways:
        try:
            output = way.decode(prompt).tokens
        except Exception as error:
            if way.drafts is not None:  # one of ours
                raise
            reason = (str(error).strip() or "no message").splitlines()[0]
            print(f"left out: {way.name}: {type(error).__name__}: {reason}", flush=True)
            continue
        expected = expected or output
        place = first_difference(expected, output)
        if place is not None:
            print(f"first prompt: {way.name} differs from {ways[0].name} at token {place} of {len(expected)}", flush=True)
        working.append(way)
    return working


def measure(ways: list[Way], prompts: list[list[int]], repeats: int) -> list[Result]:
    """Decode every prompt in every way, the ways taking turns, then time rounds alone. All are compared with the first way."""
    ways = warm_up(ways, prompts[0])
    runs: dict[str, list[list[Decoded]]] = {way.name: [[] for _ in prompts] for way in ways}
    for repeat in range(repeats):
        for number, prompt in enumerate(prompts):
            for way in ways:
                if repeat == 0 or not way.slow:
                    runs[way.name][number].append(way.decode(prompt))
    expected = [of_prompt[0].tokens for of_prompt in runs[ways[0].name]]
    results: list[Result] = []
    for way in ways:
        result = summarise(way.name, runs[way.name], way.time_rounds(prompts[0]) if way.time_rounds else None)
        result.compare(expected, [of_prompt[0].tokens for of_prompt in runs[way.name]])
        results.append(result)
        result.ratio = result.tokens_per_second / results[0].tokens_per_second
    return results


def print_results(results: list[Result], num_prompts: int) -> None:
    """Print the table, and below it where outputs differ."""
    columns = ("same", 6), ("ms/round", 10), ("host us", 8), ("least", 6), ("tokens/round", 13), ("tokens/s", 9), ("ratio", 6)
    print(" " * 38 + "".join(f" {title:>{width}}" for title, width in columns))
    for result in results:
        host = f"{'-':>8} {'-':>6}" if result.host_us is None else f"{result.host_us:8.0f} {result.least_host_us:6.0f}"
        print(
            f"{result.name:38} {f'{result.same}/{num_prompts}':>6} {result.ms_per_round:9.3f}{'w' if result.is_wall else ' '} {host} "
            f"{result.tokens_per_round:13.2f} {result.tokens_per_second:9.1f} {result.ratio:6.2f}"
        )
    print(f"same: prompts with the output of {results[0].name}; ratio: to its tokens/s; w: wall time, else on the device")
    print("tokens/s: whole prompts after the first token (assisted: after the first round); reading the prompt is left out")
    for result in results:
        if result.first_differences:
            places = ", ".join(f"prompt {prompt} at token {place}" for prompt, place in result.first_differences.items())
            print(f"{result.name}: {result.same_tokens} of {result.tokens} tokens equal up to the first difference: {places}")
