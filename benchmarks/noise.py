"""Time the choice of tokens on this machine's CPU: medians in milliseconds.

python -m benchmarks.noise [--rows 4] [--vocab 49152] [--threads 1] [--repeats 50]
"""

import argparse
import statistics
import time
from collections.abc import Callable

import torch

from funcspec.kernels.choose_tokens import choose_tokens_, choose_tokens_partials
from funcspec.noise import TARGET


def make_call(logits: torch.Tensor, temperature: float) -> Callable[[], None]:
    """Prepare one call on `logits` [T, V], every row at `temperature`."""
    count, vocab_size = logits.shape
    parts = choose_tokens_partials(vocab_size)

    def full(*shape: int) -> torch.Tensor:
        return torch.full(shape, -7, dtype=torch.int32)

    arguments = {
        "logits": logits,
        "logits_indices": None,
        "token_rows": torch.arange(count, dtype=torch.int32),
        "positions": torch.arange(count, dtype=torch.int32) + 17,
        "temperature": torch.full((count,), temperature),
        "seed": torch.arange(2 * count, dtype=torch.int32).reshape(count, 2),
        "stream": TARGET,
        "nonce_length": None,
        "token_ids": None,
        "out_tokens": full(count),
        "out_bad": full(count),
        "scratch_scores": torch.zeros(count, parts),
        "scratch_tokens": full(count, parts),
        "scratch_bad": full(count, parts),
    }
    return lambda: choose_tokens_(**arguments)


def median_ms(call: Callable[[], None], repeats: int) -> float:
    """Median wall time of `call` in milliseconds, after two calls to warm up."""
    times = []
    for index in range(repeats + 2):
        start = time.perf_counter()
        call()
        if index >= 2:
            times.append(time.perf_counter() - start)
    return statistics.median(times) * 1e3


def main() -> None:
    """Print one line per case."""
    parser = argparse.ArgumentParser(description="Time the choice of tokens on the CPU.")
    parser.add_argument("--rows", type=int, default=4, help="rows of logits (default 4)")
    parser.add_argument("--vocab", type=int, default=49152, help="vocabulary size (default 49152)")
    parser.add_argument("--threads", type=int, default=1, help="torch threads (default 1)")
    parser.add_argument("--repeats", type=int, default=50, help="timed calls per case (default 50)")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    generator = torch.Generator().manual_seed(0)
    shape = (options.rows, options.vocab)
    normal = torch.randn(shape, generator=generator)
    peaked = normal * 3
    peaked[:, options.vocab // 3] += 60
    cases = {
        "greedy": (normal, 0.0),
        "greedy, bfloat16": (normal.bfloat16(), 0.0),
        "sampled, flat": (torch.zeros(shape), 1.0),
        "sampled, normal * 3": (normal * 3, 1.0),
        "sampled, peaked": (peaked, 1.0),
        "sampled, flat, bfloat16": (torch.zeros(shape, dtype=torch.bfloat16), 1.0),
        "greedy, V = 50": (normal[:, :50].contiguous(), 0.0),
        "sampled, V = 50": (normal[:, :50].contiguous(), 1.0),
    }
    print(f"{options.rows} rows, V = {options.vocab}, {options.threads} torch thread(s), median of {options.repeats}")
    for name, (logits, temperature) in cases.items():
        print(f"{name:26s} {median_ms(make_call(logits, temperature), options.repeats):8.3f} ms")


if __name__ == "__main__":
    main()
