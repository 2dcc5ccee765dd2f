"""Drafters side by side on SmolLM2: accepted drafts by position, and the cost of a draft. `python -m benchmarks.drafters`.

Greedy decoding of the benchmark's prompts, one at a time. A draft that was never made counts as not accepted: what is given for a place is
the share of rounds in which the draft there was kept. A cost is the time of drafting a token in passes of the target.
"""

import argparse
import statistics as stats
import time
from collections.abc import Callable
from pathlib import Path

import torch

import funcspec as fs
from benchmarks.prompts import prompt_tokens
from benchmarks.timing import synchronise
from examples.distil.drafts import load
from funcspec.drafters import Drafter, best_of, cascade, eagle, early_exit, fallback, ngram, standalone, suffix
from funcspec.loading import MODELS
from funcspec.metrics import statistics
from funcspec.models import smollm2
from funcspec.models.llama import Llama


def drafters(target: Llama, trained: list[Path]) -> dict[str, Drafter]:
    """The drafters by name; `trained` are directories that the distillation example wrote."""
    model, ids = smollm2.load_draft(target)
    own = standalone(model, ids)
    head = eagle(*smollm2.load_head(target))
    found: dict[str, Drafter] = {
        "standalone, two layers": own,
        "eagle": head,
        "mtp": MODELS["mtp"](target),
        "medusa": MODELS["medusa"](target),
        "ngram": ngram(),
        "suffix": suffix(),
        "best_of(ngram, suffix)": best_of(ngram(), suffix()),
        "fallback(ngram, standalone)": fallback(ngram(min_ngram=2), own),
        "fallback(ngram, eagle)": fallback(ngram(min_ngram=2), head),
        "cascade(ngram, standalone)": cascade(ngram(), own),
        "early_exit, 10 of 30 layers": early_exit(target, 10, ids),
        "early_exit, 25 of 30 layers": early_exit(target, 25, ids),
    }
    return found | {f"{folder.name}, trained": load(folder, target) for folder in trained}


def accepted(target: Llama, drafter: Drafter, prompts: list[list[int]], most: int, new: int) -> tuple[list[float], float]:
    """Share of rounds in which the draft at each place was kept, and tokens a round."""
    config = fs.SpecConfig(
        max_num_reqs=1,
        max_model_len=max(map(len, prompts)) + new,
        num_speculative_tokens=most,
        rule=fs.rules.greedy,
        device=str(target.device),
    )
    found = statistics(fs.generate(config, target, drafter, prompts, max_tokens=new, stop_ids=smollm2.END_TOKENS), most)
    return [kept / found.rounds for kept in found.accepted], found.tokens_per_round


def cost(target: Llama, drafter: Drafter, prompt: list[int], most: int, rounds: int) -> float:
    """Time of one draft in passes of the target: drafting a round, over K and over a `verify`; medians of alternating rounds."""
    config = fs.SpecConfig(
        max_num_reqs=1,
        max_model_len=len(prompt) + (rounds + 3) * (most + 1),
        num_speculative_tokens=most,
        rule=fs.rules.greedy,
        device=str(target.device),
    )
    device = config.device
    state, _ = fs.admit(fs.init(config, target, drafter), target, drafter, [prompt])
    steps = 1 if getattr(drafter, "one_pass", False) else most
    drafting, verifying = [], []
    for number in range(rounds + 3):
        begun = time.perf_counter()
        state, _ = fs.prefill(state, drafter, donate=True)
        for _ in range(steps - 1):
            state, _ = fs.decode(state, drafter, donate=True)
        synchronise(device)
        drafted = time.perf_counter()
        state, _ = fs.verify(state, target, donate=True)
        synchronise(device)
        if number >= 3:  # the first rounds compile and warm up
            drafting.append(drafted - begun)
            verifying.append(time.perf_counter() - drafted)
    return stats.median(drafting) / most / stats.median(verifying)


def main() -> None:
    """Print a table."""
    options = argparse.ArgumentParser(prog="python -m benchmarks.drafters", description=__doc__)
    options.add_argument("--device", choices=("cuda", "cpu"), default="cuda" if torch.cuda.is_available() else "cpu")
    options.add_argument("--drafts", type=int, default=4, help="drafts a round (default 4)")
    options.add_argument("--max-tokens", type=int, default=64)
    options.add_argument("--prompts", type=int, choices=range(1, 6), default=5, help="prompts of each kind")
    options.add_argument("--rounds", type=int, default=20, help="rounds timed")
    options.add_argument("--trained", type=Path, nargs="*", default=[], metavar="DIR", help="drafts of the distillation example too")
    settings = options.parse_args()
    target = smollm2.load_target(torch.float32, settings.device)
    prompts = prompt_tokens(smollm2.load_tokenizer(), settings.prompts)
    print("| drafter | kept at places 1 to K, text | tokens a round | kept, chat | tokens a round | cost of a draft |")
    print("| --- | --- | --- | --- | --- | --- |")
    made: dict[str, Drafter] = drafters(target, settings.trained)
    show: Callable[[list[float]], str] = lambda rates: " ".join(f"{rate:.2f}" for rate in rates)  # noqa: E731
    for name, drafter in made.items():
        most = min(settings.drafts, getattr(drafter.kv_model, "num_heads", settings.drafts))
        cells = []
        for kind in ("text", "chat"):
            rates, tokens = accepted(target, drafter, prompts[kind], most, settings.max_tokens)
            cells += [show(rates), f"{tokens:.2f}"]
        spent = cost(target, drafter, prompts["text"][0], most, settings.rounds)
        print(f"| {name} | {' | '.join(cells)} | {spent:.3f} |", flush=True)


if __name__ == "__main__":
    main()
