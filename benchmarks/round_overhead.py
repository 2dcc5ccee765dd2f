"""Host time of a round without its models: greedy, batch 1, K = 3, donated, a stub model. `python -m benchmarks.round_overhead`."""

import argparse
import statistics
import time

import torch

import funcspec as fs
from funcspec.models import ForwardBatch, KVSpec


class Stub:
    """Returns the same logits at once."""

    vocab_size = 50
    max_len = 10**6
    kv_spec = KVSpec(0, ())

    def __init__(self) -> None:
        self._logits: dict[int, torch.Tensor] = {}

    def forward(self, kv: object, batch: ForwardBatch) -> tuple[object, torch.Tensor, tuple[()]]:
        """Look the logits up."""
        count = len(batch.input_ids) if batch.logits_indices is None else len(batch.logits_indices)
        if count not in self._logits:
            self._logits[count] = torch.zeros(count, self.vocab_size)
        return kv, self._logits[count], ()


def measure(rows: int, drafts: int, rounds: int, donate: bool) -> list[float]:
    """Microseconds of each round."""
    target, drafter = Stub(), fs.drafters.standalone(Stub())
    length = (rounds + 60) * (drafts + 1)
    config = fs.SpecConfig(max_num_reqs=rows, max_model_len=length, num_speculative_tokens=drafts, rule=fs.rules.greedy)
    state = fs.init(config, target, drafter)
    state, _ = fs.admit(state, target, drafter, [[1, 2, 3]] * rows)
    times = []
    for _ in range(rounds + 50):
        begun = time.perf_counter()
        state, _ = fs.step_round(state, target, drafter, donate=donate)
        times.append((time.perf_counter() - begun) * 1e6)
    return times[50:]


def main() -> None:
    """Print medians and least times."""
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--rounds", type=int, default=1000)
    rounds = options.parse_args().rounds
    torch.set_num_threads(1)
    for rows, drafts, donate in ((1, 3, True), (1, 3, False), (1, 0, True), (1, 7, True), (16, 3, True), (256, 3, True)):
        times = measure(rows, drafts, rounds, donate)
        mode = "donated" if donate else "pure"
        print(f"R={rows:3d} K={drafts} {mode}: median {statistics.median(times):.0f} us, least {min(times):.0f} us a round")


if __name__ == "__main__":
    main()
