"""Ways to decode a prompt."""

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import funcspec as fs
from benchmarks.timing import Stopwatch, on_gpu, synchronise
from funcspec import graphs
from funcspec.models.base import Model

Step = Callable[[fs.SpecState], tuple[fs.SpecState, fs.Verdict]]


@dataclass(frozen=True)
class Settings:
    """What is decoded and how it is timed.

    Attributes:
        device: "cuda" or "cpu".
        drafts: numbers of drafts a round to measure.
        max_tokens: new tokens for each prompt.
        max_model_len: capacity of a row.
        stop_ids: ids that end a prompt's output.
        rounds: rounds timed one by one.
        repeats: how often each prompt is decoded in a quick way; slow ways decode it once.
    """

    device: str
    drafts: tuple[int, ...] = (1, 3, 7)
    max_tokens: int = 128
    max_model_len: int = 512
    stop_ids: tuple[int, ...] = ()
    rounds: int = 100
    repeats: int = 3


@dataclass(frozen=True)
class Decoded:
    """One prompt decoded.

    Attributes:
        tokens: the whole output.
        counted: how many of them the rounds emitted that were timed.
        rounds: how many rounds, or passes, those were.
        seconds: what they took, with all tokens on the host; reading the prompt is left out.
    """

    tokens: list[int]
    counted: int
    rounds: int
    seconds: float


@dataclass(frozen=True)
class RoundTimes:
    """Medians over rounds: milliseconds on the device and, for a GPU, microseconds for the host to launch one; and the least of those."""

    device_ms: float
    host_us: float | None = None
    least_host_us: float | None = None


@dataclass(frozen=True)
class Way:
    """A way to decode: a row of the table.

    Attributes:
        name: what the row is called.
        decode: decodes one prompt to its end.
        time_rounds: times rounds one by one, going on from a prompt; None where a round cannot be run alone.
        drafts: drafts a round, for ways that speculate by rounds of funcspec.
        slow: whether each prompt is decoded only once.
    """

    name: str
    decode: Callable[[list[int]], Decoded]
    time_rounds: Callable[[list[int]], RoundTimes] | None = None
    drafts: int | None = None
    slow: bool = False


class Rounds:
    """Rounds of funcspec at batch 1, eager (donated) or captured as one CUDA graph; without drafts, plain decoding.

    Args:
        settings: what to decode.
        target, drafter: the models.
        drafts: K; 0 is plain decoding.
        captured: record the round as a CUDA graph.
    """

    def __init__(self, settings: Settings, target: Model, drafter: fs.drafters.Drafter, drafts: int, *, captured: bool) -> None:
        self.config = fs.SpecConfig(1, settings.max_model_len, drafts, fs.rules.greedy, device=settings.device)
        self._settings = settings
        self._target, self._drafter = target, drafter if drafts else None
        self.state = fs.init(self.config, target, self._drafter)
        self.step: Step = self._eager
        if captured:
            step, models = (fs.step_round, (target, drafter)) if drafts else (fs.verify, (target,))
            graph = graphs.capture(step, self.state, *models)
            self.step = lambda state: graph(state, copy=False)

    def _eager(self, state: fs.SpecState) -> tuple[fs.SpecState, fs.Verdict]:
        return fs.step_round(state, self._target, self._drafter, donate=True)

    def admit(self, prompt: list[int], max_tokens: int | None = None, stop_ids: tuple[int, ...] = ()) -> int:
        """Put a prompt in place of the one before; return its first token."""
        state = fs.release(self.state, [0], donate=True)
        self.state, first = fs.admit(
            state, self._target, self._drafter, [prompt], seeds=[0], max_tokens=max_tokens, stop_ids=stop_ids, donate=True
        )
        return first.tokens[0]

    def decode(self, prompt: list[int]) -> Decoded:
        """Decode a prompt, reading tokens one round late."""
        first = self.admit(prompt, self._settings.max_tokens, self._settings.stop_ids)
        synchronise(self.config.device)
        started = time.perf_counter()
        emitted, rounds = [], 0
        for newest, verdict in graphs.one_round_late(self.step, self.state):
            self.state = newest
            count = int(verdict.num_emitted[0])
            emitted += verdict.tokens[0, :count].tolist()
            rounds += count > 0
        synchronise(self.config.device)
        seconds = time.perf_counter() - started
        return Decoded([first, *emitted], len(emitted), rounds, seconds)

    def run(self, count: int) -> list[float]:
        """Run rounds without reading what they emit; return the host's seconds for each."""
        times, state = [], self.state
        for _ in range(count):
            started = time.perf_counter()
            state, _ = self.step(state)
            times.append(time.perf_counter() - started)
        self.state = state
        return times

    def time_rounds(self, prompt: list[int]) -> RoundTimes:
        """Time batches of rounds that each go on from the prompt, so that the row is live in all of them."""
        warm_up, watch = 2, Stopwatch(self.config.device)
        room = (self.config.max_model_len - len(prompt) - 1) // (self.config.num_speculative_tokens + 1) - warm_up - 1
        batch = max(1, min(20, room, self._settings.rounds))
        device, host = [], []
        for _ in range(-(-self._settings.rounds // batch)):
            self.admit(prompt)
            self.run(warm_up)
            watch.start()
            host += self.run(batch)
            device.append(watch.stop() / batch)
        median = statistics.median(device) * 1e3
        if not on_gpu(self.config.device):
            return RoundTimes(median)
        return RoundTimes(median, statistics.median(host) * 1e6, min(host) * 1e6)


def own_ways(settings: Settings, target: Model, drafter: fs.drafters.Drafter) -> list[Way]:
    """Plain decoding and each number of drafts, captured (on a GPU) and eager."""
    found = []
    for captured in (True, False) if on_gpu(settings.device) else (False,):
        for drafts in (0, *settings.drafts):
            rounds = Rounds(settings, target, drafter, drafts, captured=captured)
            slow = on_gpu(settings.device) and not captured
            found.append(Way(own_name(drafts, captured), rounds.decode, rounds.time_rounds, drafts, slow))
    return found


def own_name(drafts: int, captured: bool) -> str:
    """Name of a way of `own_ways`."""
    return f"funcspec {f'K={drafts}' if drafts else 'plain'}, {'captured' if captured else 'eager'}"
