"""Speculative against plain decoding of SmolLM2 on the CPU. `python -m benchmarks.speculation_cpu`.

Five passages of text (from Python's own documentation) and five chat questions, greedy, batch 1. For each prompt the
speculative run and the fastest plain decoding alternate; the ratio is taken pair by pair and its median over repeats counts.
"""

import argparse
import math
import statistics

import torch

import funcspec as fs
from benchmarks.prompts import prompt_tokens
from funcspec.jobs import Job, run_job
from funcspec.metrics import statistics as round_statistics
from funcspec.models import smollm2


def main() -> None:
    """Print a line for each prompt and the medians of each kind."""
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--max-tokens", type=int, default=64)
    options.add_argument("--repeats", type=int, default=3)
    options.add_argument("--threads", type=int, default=2)
    options.add_argument("--drafts", type=int, default=3)
    settings = options.parse_args()
    torch.set_num_threads(settings.threads)
    tokenizer, target = smollm2.load_tokenizer(), smollm2.load_target()
    drafter = fs.drafters.standalone(*smollm2.load_draft(target))
    for kind, token_lists in prompt_tokens(tokenizer).items():
        ratios, tokens_a_pass, same = [], [], 0
        for number, prompt in enumerate(token_lists):
            job = Job(target, drafter, [prompt], [0], 0.0, settings.max_tokens, smollm2.END_TOKENS, fs.rules.greedy, settings.drafts)
            plain = Job(target, None, [prompt], [0], 0.0, settings.max_tokens, smollm2.END_TOKENS, fs.rules.greedy, settings.drafts)
            pairs = []
            for _ in range(settings.repeats):
                fast, slow = run_job(job), run_job(plain)
                pairs.append(slow.seconds / fast.seconds)
            found = round_statistics(fast.emissions, settings.drafts)
            same += fast.outputs == slow.outputs
            ratios.append(statistics.median(pairs))
            tokens_a_pass.append(found.tokens_per_round)
            spread = f"{min(pairs):.2f}-{max(pairs):.2f}"
            print(f"{kind} {number}: {found.tokens_per_round:.2f} tokens a round, speedup {ratios[-1]:.2f} ({spread})")
        mean = math.exp(statistics.fmean(map(math.log, ratios)))
        print(
            f"{kind}: speedup geometric mean {mean:.2f}, median {statistics.median(ratios):.2f}, "
            f"{statistics.fmean(tokens_a_pass):.2f} tokens a round, identical {same} of {len(ratios)}"
        )


if __name__ == "__main__":
    main()
