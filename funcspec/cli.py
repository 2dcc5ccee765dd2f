"""`funcspec generate`: watch a real language model decode speculatively."""

import argparse
import json
import os
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import torch
from tokenizers import Tokenizer
from tokenizers.decoders import DecodeStream

from funcspec import rules
from funcspec.admission import admit_requests, init
from funcspec.checks import Comparison, first_difference, preference_margin
from funcspec.config import SpecConfig
from funcspec.drafters import standalone
from funcspec.drafters.base import Drafter
from funcspec.errors import FuncspecError
from funcspec.generation import Emission, emissions
from funcspec.kernels.acceptance import BONUS
from funcspec.metrics import Statistics, statistics
from funcspec.models import smollm2
from funcspec.models.base import Model
from funcspec.requests import validate
from funcspec.state import any_active
from funcspec.steps import decode, prefill, verify

DEFAULT_PROMPT = "Write a Python function that reverses a string."
NEAR_TIE = 0.01  # a hundred times what fp32 logits differ between passes of different shape
COLOURS = ("\x1b[32m", "\x1b[33m", "\x1b[36m")  # accepted drafts, recovered, bonus
PLAIN = "\x1b[0m"


@dataclass(frozen=True)
class Job:
    """One decoding job: what runs and how."""

    target: Model
    drafter: Drafter | None
    prompts: list[list[int]]
    seeds: list[int]
    temperature: float
    max_tokens: int
    stop_ids: tuple[int, ...]
    rule: rules.Rule
    num_speculative_tokens: int


@dataclass
class Run:
    """What a job gave."""

    outputs: list[list[int]]
    emissions: list[Emission] = field(default_factory=list)
    seconds: float = 0.0
    draft_seconds: float = 0.0
    verify_seconds: float = 0.0

    def add(self, emission: Emission) -> None:
        """Note tokens that a prompt got."""
        self.emissions.append(emission)
        self.outputs[emission.prompt_index] += emission.tokens


class Printer:
    """Streams text coloured by where each token came from; one prompt live, several one after another."""

    def __init__(self, tokenizer: Tokenizer, num_prompts: int, colour: bool) -> None:
        self._tokenizer = tokenizer
        self._streams = [DecodeStream(skip_special_tokens=True) for _ in range(num_prompts)]
        self._texts = [""] * num_prompts
        self._colour = colour

    def __call__(self, emission: Emission) -> None:
        """Print, or keep until the prompt is done, what a round emitted."""
        index = emission.prompt_index
        for token, origin in zip(emission.tokens, emission.origin, strict=True):
            piece = self._streams[index].step(self._tokenizer, token)  # None until the bytes make whole characters
            if piece:
                self._write(index, f"{COLOURS[origin]}{piece}{PLAIN}" if self._colour else piece)
        if emission.finish_reason and len(self._texts) > 1:
            print(f"[{index}] {self._texts[index]}\n")

    def _write(self, index: int, text: str) -> None:
        if len(self._texts) > 1:
            self._texts[index] += text
        else:
            print(text, end="", flush=True)


def run_job(job: Job, on_emission: Printer | None = None, *, padded: bool = False) -> Run:
    """The loop, written out to time drafting and verifying apart.

    Args:
        job: what to decode.
        on_emission: called with what each round emitted.
        padded: without a drafter, decode in the shape of speculative passes.
    """
    speculative = job.drafter is not None
    width = job.num_speculative_tokens if speculative or padded else 0
    longest = max(map(len, job.prompts)) + job.max_tokens
    config = SpecConfig(max_num_reqs=len(job.prompts), max_model_len=max(longest, width + 1), num_speculative_tokens=width, rule=job.rule)
    state = init(config, job.target, job.drafter)
    requests = validate(config, job.target, job.prompts, job.seeds, job.temperature, job.max_tokens, job.stop_ids)
    run = Run([[] for _ in job.prompts])
    started = time.perf_counter()
    state, first = admit_requests(state, job.target, job.drafter, requests, donate=True)
    rows = dict(zip(first.rows, range(len(job.prompts)), strict=True))
    rounds = [0] * len(job.prompts)
    for index, (token, reason, bad) in enumerate(zip(first.tokens, first.finish_reason, first.bad_row, strict=True)):
        _note(run, Emission(index, (token,), (BONUS,), 0, 0, reason, bool(bad), 0), on_emission)
    rows = {row: index for row, index in rows.items() if not first.finish_reason[index]}
    while any_active(state):
        before = time.perf_counter()
        if job.drafter is not None:
            state, _ = prefill(state, job.drafter, donate=True)
            for _ in range(width - 1):
                state, _ = decode(state, job.drafter, donate=True)
        drafted = time.perf_counter()
        state, verdict = verify(state, job.target, donate=True)
        run.draft_seconds += drafted - before
        run.verify_seconds += time.perf_counter() - drafted
        for row, emission in emissions(verdict, rows, rounds):
            _note(run, emission, on_emission)
            if emission.finish_reason:
                del rows[row]
    run.seconds = time.perf_counter() - started
    return run


def _note(run: Run, emission: Emission, on_emission: Printer | None) -> None:
    run.add(emission)
    if on_emission is not None:
        on_emission(emission)


@dataclass(frozen=True)
class TimedComparison(Comparison):
    """A run against plain decoding of the same target, and the seconds of the fastest plain decoding."""

    plain_seconds: float


def compare(job: Job, run: Run) -> TimedComparison:
    """Decode plainly, one token a pass and in the shape of speculative passes, and compare tokens and time."""
    plain_job = replace(job, drafter=None)
    padded, single = run_job(plain_job, padded=True), run_job(plain_job)
    difference = first_difference(run.outputs, single.outputs)
    margin = None
    if difference is not None:
        prompt, place = difference
        tokens = job.prompts[prompt] + single.outputs[prompt][:place]
        margin = preference_margin(job.target, tokens, job.seeds[prompt], job.temperature)
    return TimedComparison(run.outputs == padded.outputs, difference, margin, min(padded.seconds, single.seconds))


def report(job: Job, run: Run, found: Statistics, comparison: TimedComparison | None) -> str:
    """The figures under the text."""
    tokens = sum(map(len, run.outputs))
    lines = [f"{tokens} tokens in {run.seconds:.2f} s ({tokens / run.seconds:.1f} tokens/s), {found.rounds} rounds"]
    if job.drafter is not None:
        rates = " ".join(f"{rate:.2f}" for rate in found.acceptance_by_position)
        lines.append(f"{found.tokens_per_round:.2f} tokens a round; accepted by position: {rates}")
    lines.append(f"draft {run.draft_seconds:.2f} s, verify {run.verify_seconds:.2f} s")
    if comparison is not None:
        speedup = comparison.plain_seconds / run.seconds
        lines.append(f"plain decoding {comparison.plain_seconds:.2f} s: speedup {speedup:.2f}x")
        lines.append("identical to plain decoding in the same shape: " + ("yes" if comparison.identical else "NO"))
        if comparison.first_difference is None:
            lines.append("identical to one-token plain decoding: yes")
        else:
            prompt, place = comparison.first_difference
            judged = "a near-tie" if comparison.margin is not None and comparison.margin < NEAR_TIE else "NOT a near-tie"
            lines.append(
                f"differs from one-token plain decoding at prompt {prompt}, token {place}: margin {comparison.margin:.2g}, {judged}"
            )
    return "\n".join(lines)


def as_json(run: Run, found: Statistics, texts: list[str], comparison: TimedComparison | None) -> str:
    """The same as one JSON object.

    With several prompts `text` and `tokens` are lists, and `first_difference` is a prompt and a place instead of a place.
    """
    single = len(texts) == 1
    result: dict[str, object] = {
        "text": texts[0] if single else texts,
        "tokens": run.outputs[0] if single else run.outputs,
        "rounds": found.rounds,
        "drafted": sum(found.drafted),
        "accepted": sum(found.accepted),
        "accepted_by_position": list(found.acceptance_by_position),
        "tokens_per_round": found.tokens_per_round,
        "seconds": run.seconds,
        "draft_seconds": run.draft_seconds,
        "verify_seconds": run.verify_seconds,
    }
    if comparison is not None:
        difference = comparison.first_difference
        result |= {
            "identical": comparison.identical,
            "first_difference": difference and (difference[1] if single else list(difference)),
            "margin": comparison.margin,
            "plain_seconds": comparison.plain_seconds,
            "speedup": comparison.plain_seconds / run.seconds,
        }
    return json.dumps(result)


def _at_least(least: int) -> Callable[[str], int]:
    """A whole number of at least `least`, for argparse."""

    def number(text: str) -> int:
        value = int(text)
        if value < least:
            raise argparse.ArgumentTypeError(f"expected at least {least}, got {value}")
        return value

    return number


def parser() -> argparse.ArgumentParser:
    """The command line."""
    top = argparse.ArgumentParser(prog="funcspec", description="Speculative decoding of language models.")
    commands = top.add_subparsers(dest="command", required=True)
    make = commands.add_parser(
        "generate",
        help="decode with SmolLM2-135M-Instruct and its distilled two-layer draft",
        description="Decode with SmolLM2-135M-Instruct as target and a distilled two-layer draft. "
        "Green: accepted drafts, yellow: recovered tokens, cyan: bonus tokens.",
    )
    make.add_argument("--prompt", action="append", help="a user message; repeat it for a batch")
    make.add_argument("--raw", action="store_true", help="continue the prompt as plain text instead of answering it")
    make.add_argument("--max-tokens", type=_at_least(1), default=96, help="most tokens for each prompt (default 96)")
    make.add_argument("--num-speculative-tokens", type=_at_least(0), default=3, help="drafts in a round (default 3)")
    make.add_argument("--rule", choices=("greedy", "coupled"), help="default: greedy at temperature 0, else coupled")
    make.add_argument("--temperature", type=float, default=0.0, help="0 is greedy (default)")
    make.add_argument("--seed", type=int, default=0, help="seed of the first prompt; the next ones count up")
    make.add_argument("--drafter", choices=("standalone", "none"), default="standalone", help="none decodes plainly")
    make.add_argument("--compare", action="store_true", help="decode plainly too and compare tokens and time")
    make.add_argument("--json", action="store_true", help="print one JSON object instead of streaming")
    make.add_argument("--threads", type=_at_least(1), help="CPU threads (default: torch's own choice)")
    return top


def generate_command(options: argparse.Namespace) -> int:
    """Run `funcspec generate`."""
    if options.threads:
        torch.set_num_threads(options.threads)
    prompts = options.prompt or [DEFAULT_PROMPT]
    tokenizer = smollm2.load_tokenizer()
    target = smollm2.load_target()
    drafter = None
    if options.drafter == "standalone" and options.num_speculative_tokens > 0:
        drafter = standalone(*smollm2.load_draft(target))
    rule = getattr(rules, options.rule or ("coupled" if options.temperature > 0 else "greedy"))
    texts = [prompt if options.raw else smollm2.chat_prompt(prompt) for prompt in prompts]
    job = Job(
        target,
        drafter,
        [tokenizer.encode(text).ids for text in texts],
        [options.seed + index for index in range(len(prompts))],
        options.temperature,
        options.max_tokens,
        smollm2.END_TOKENS,
        rule,
        options.num_speculative_tokens,
    )
    run_job(replace(job, max_tokens=min(4, job.max_tokens)))  # the first passes touch the weights for the first time
    colour = sys.stdout.isatty() and "NO_COLOR" not in os.environ
    run = run_job(job, None if options.json else Printer(tokenizer, len(prompts), colour))
    found = statistics(run.emissions, max(options.num_speculative_tokens, 0))
    comparison = compare(job, run) if options.compare else None
    if options.json:
        print(as_json(run, found, [tokenizer.decode(output) for output in run.outputs], comparison))
    else:
        print(f"\n\n{report(job, run, found, comparison)}")
    return 0


def main(arguments: Sequence[str] | None = None) -> int:
    """Entry point of the `funcspec` command.

    Returns:
        the exit status: 0, or 2 if something was refused.
    """
    try:
        return generate_command(parser().parse_args(arguments))
    except FuncspecError as error:
        print(f"funcspec: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
