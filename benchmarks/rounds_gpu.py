"""Rounds on a GPU: eager, captured, and captured plain decoding. `python -m benchmarks.rounds_gpu`.

Weights are random in the shapes of SmolLM2-135M and its two-layer draft: times do not depend on their values. Draft and target do
not agree, so a round emits one token; what is compared is the time of a round, not of a token.
"""

import argparse
import statistics
import time
from collections.abc import Callable

import torch

import funcspec as fs
from funcspec import graphs
from funcspec.models.llama import Llama, LlamaConfig, random_llama

TARGET = LlamaConfig(49152, 30, 576, 1536, 9, 3, 64, 2048, 1e5)
DRAFT = LlamaConfig(49152, 2, 576, 1536, 9, 3, 64, 2048, 1e5)


def measure(step: Callable[[fs.SpecState], fs.SpecState], state: fs.SpecState, rounds: int) -> tuple[float, float]:
    """Median milliseconds of a round on the device, and median microseconds of host time to launch one."""
    for _ in range(5):
        state = step(state)
    device, host = [], []
    for _ in range(rounds):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize()
        started = time.perf_counter()
        begin.record()
        state = step(state)
        end.record()
        host.append((time.perf_counter() - started) * 1e6)
        torch.cuda.synchronize()
        device.append(begin.elapsed_time(end))
    return statistics.median(device), statistics.median(host)


def rows(batch: int, drafts: int, target: Llama, drafter: fs.drafters.Drafter, rounds: int, rule: fs.rules.Rule) -> None:
    """Print the three kinds of round for one batch size, number of drafts and rule; rules that sample do so at temperature 1."""
    heat = 1.0 if rule.samples else 0.0
    prompts = [[7 + row, 11, 13, 17] * 16 for row in range(batch)]
    config = fs.SpecConfig(batch, 1024, drafts, rule, device="cuda")
    state, _ = fs.admit(fs.init(config, target, drafter), target, drafter, prompts, seeds=[0] * batch, temperature=heat)
    captured = graphs.capture(fs.step_round, state, target, drafter)
    alone = config.replace(num_speculative_tokens=0)
    plain, _ = fs.admit(fs.init(alone, target), target, None, prompts, seeds=[0] * batch, temperature=heat)
    captured_plain = graphs.capture(fs.verify, plain, target)
    eager = measure(lambda state: fs.step_round(state, target, drafter, donate=True)[0], fs.fork(state), rounds)
    whole = measure(lambda state: captured(state, copy=False)[0], state, rounds)
    single = measure(lambda state: captured_plain(state, copy=False)[0], plain, rounds)
    print(
        f"{rule.name} R={batch} K={drafts}: eager {eager[0]:.2f} ms, captured {whole[0]:.3f} ms ({whole[1]:.0f} us host), "
        f"captured plain {single[0]:.3f} ms ({single[1]:.0f} us host); a round costs {whole[0] / single[0]:.2f} plain passes"
    )


def main() -> None:
    """Print a line for each batch size and number of drafts."""
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--rounds", type=int, default=50)
    options.add_argument("--dtype", choices=("float32", "bfloat16"), default="bfloat16")
    options.add_argument("--rules", nargs="+", choices=("greedy", "coupled", "ratio"), default=["greedy", "ratio"])
    settings = options.parse_args()
    dtype = getattr(torch, settings.dtype)
    target = random_llama(TARGET, 0, dtype, "cuda")
    drafter = fs.drafters.standalone(random_llama(DRAFT, 1, dtype, "cuda"))
    print(torch.cuda.get_device_name(), settings.dtype)
    for rule in settings.rules:
        for batch, drafts in ((1, 1), (1, 3), (1, 7), (16, 3)):
            rows(batch, drafts, target, drafter, settings.rounds, getattr(fs.rules, rule))


if __name__ == "__main__":
    main()
