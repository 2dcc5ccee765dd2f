"""Clocks: device time by CUDA events, host time by the host's own clock; and functions recorded as CUDA graphs."""

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch


def on_gpu(device: str) -> bool:
    """Whether a device is a GPU."""
    return torch.device(device).type == "cuda"


def synchronise(device: str) -> None:
    """Wait until the device has done what it was given."""
    if on_gpu(device):
        torch.cuda.synchronize()


class Stopwatch:
    """Time between `start` and `stop`: on the device's own clock for a GPU, else on the host's."""

    def __init__(self, device: str) -> None:
        self._device = device
        self._events = [torch.cuda.Event(enable_timing=True) for _ in range(2)] if on_gpu(device) else None
        self._started = 0.0

    def start(self) -> None:
        """Wait for the device to be idle, then start."""
        synchronise(self._device)
        if self._events is None:
            self._started = time.perf_counter()
        else:
            self._events[0].record()

    def stop(self) -> float:
        """Seconds since `start`, after waiting for the device."""
        if self._events is None:
            return time.perf_counter() - self._started
        self._events[1].record()
        synchronise(self._device)
        return self._events[0].elapsed_time(self._events[1]) / 1e3


def device_seconds(call: Callable[[], object], device: str, batch: int = 20, repeats: int = 10) -> float:
    """Median seconds of a call over `repeats` batches of calls, each batch timed as a whole."""
    watch, times = Stopwatch(device), []
    call()
    for _ in range(repeats):
        watch.start()
        for _ in range(batch):
            call()
        times.append(watch.stop() / batch)
    return statistics.median(times)


def host_seconds(call: Callable[[], object], device: str, batch: int = 50, repeats: int = 20) -> float:
    """Median seconds that the host is busy with a call, over batches that each begin with an idle device."""
    times = []
    call()
    for _ in range(repeats):
        synchronise(device)
        started = time.perf_counter()
        for _ in range(batch):
            call()
        times.append((time.perf_counter() - started) / batch)
    synchronise(device)
    return statistics.median(times)


@dataclass(frozen=True)
class Recorded:
    """A function recorded as a CUDA graph; calling it replays. The function is kept, with the tensors it reads."""

    graph: torch.cuda.CUDAGraph
    function: Callable[[], object]

    def __call__(self) -> None:
        """Launch the graph; does not wait."""
        self.graph.replay()


def record(function: Callable[[], object]) -> Recorded:
    """Warm a function up and record it as a CUDA graph."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            function()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        function()
    return Recorded(graph, function)
