"""`funcspec generate`: watch a real language model decode speculatively."""

import argparse
import json
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from funcspec import rules
from funcspec.checks import check_comparable
from funcspec.drafters import Fixed, fixed
from funcspec.errors import FuncspecError, refuse
from funcspec.generation import Emission
from funcspec.jobs import Job, Run, TimedComparison, compare, run_job
from funcspec.loading import DRAFTER_HELP, DRAFTERS, Loaded, load_models
from funcspec.metrics import Statistics, statistics
from funcspec.models import smollm2
from funcspec.text import TextStream

DEFAULT_PROMPT = "Write a Python function that reverses a string."
RULES = tuple(sorted(rule.name for rule in vars(rules).values() if isinstance(rule, rules.Rule)))
NEAR_TIE = 0.01  # a hundred times what fp32 logits differ between passes of different shape
COLOURS = ("\x1b[32m", "\x1b[33m", "\x1b[36m")  # accepted drafts, recovered, bonus
PLAIN = "\x1b[0m"


class Printer:
    """Streams text coloured by where each token came from; one prompt live, several one after another."""

    def __init__(self, tokenizer: Any, num_prompts: int, colour: bool, stop_strings: Sequence[str] = (), min_tokens: int = 0) -> None:
        self._streams = [TextStream(tokenizer, stop_strings, min_tokens=min_tokens) for _ in range(num_prompts)]
        self._texts = [""] * num_prompts
        self._colour = colour

    def __call__(self, emission: Emission) -> None:
        """Print, or keep until the prompt is done, what a round emitted."""
        index = emission.prompt_index
        for token, origin in zip(emission.tokens, emission.origin, strict=True):
            piece = self._streams[index].add([token]).text  # nothing until the bytes make whole characters
            if piece:
                self._write(index, f"{COLOURS[origin]}{piece}{PLAIN}" if self._colour else piece)
        if emission.finish_reason:
            self._write(index, self._streams[index].finish())
            if len(self._texts) > 1:
                print(f"[{index}] {self._texts[index]}\n")

    def _write(self, index: int, text: str) -> None:
        if len(self._texts) > 1:
            self._texts[index] += text
        else:
            print(text, end="", flush=True)


class Progress:
    """A bar on stderr that counts tokens, and finished prompts."""

    def __init__(self, num_prompts: int, max_tokens: int) -> None:
        self._done, self._prompts = 0, num_prompts
        self._bar = tqdm(total=num_prompts * max_tokens, unit=" tokens", file=sys.stderr, dynamic_ncols=True)
        self._left = [max_tokens] * num_prompts

    def __call__(self, emission: Emission) -> None:
        """Count what a round emitted; a prompt that ends early counts in full."""
        index, count = emission.prompt_index, len(emission.tokens)
        self._left[index] -= count
        if emission.finish_reason:
            self._done += 1
            count += self._left[index]
            self._bar.set_postfix_str(f"{self._done} of {self._prompts} prompts", refresh=False)
        self._bar.update(count)
        if self._done == self._prompts:
            self._bar.close()


def report(job: Job, run: Run, found: Statistics, comparison: TimedComparison | None) -> str:
    """The figures under the text."""
    tokens = sum(map(len, run.outputs))
    lines = [f"{tokens} tokens in {run.seconds:.2f} s ({tokens / run.seconds:.1f} tokens/s), {found.rounds} rounds"]
    if job.drafter is not None:
        rates = " ".join(f"{rate:.2f}" for rate in found.acceptance_by_position)
        lines.append(f"{found.tokens_per_round:.2f} tokens a round; accepted by position: {rates}")
    lines.append(f"draft passes {run.draft_seconds:.2f} s, target passes {run.target_seconds:.2f} s, prompts included")
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
        "target_seconds": run.target_seconds,
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
        help="decode speculatively, with SmolLM2-135M-Instruct unless told otherwise",
        description="Decode with SmolLM2-135M-Instruct as target and a draft distilled from it, or with models of your own. "
        "Green: accepted drafts, yellow: recovered tokens, cyan: bonus tokens.",
    )
    make.add_argument("--target", metavar="DIR", help="directory of a Hugging Face model (needs transformers)")
    make.add_argument(
        "--draft", metavar="PATH", help="directory of a Hugging Face model that drafts for it; or alone, a draft file for SmolLM2"
    )
    make.add_argument("--prompt", action="append", help="a user message; repeat it for a batch")
    make.add_argument("--prompts-file", type=Path, metavar="FILE", help="more prompts, one a line; empty lines are skipped")
    make.add_argument("--max-num-reqs", type=_at_least(1), default=8, help="most prompts decoded at a time (default 8)")
    make.add_argument("--raw", action="store_true", help="continue the prompt as plain text instead of answering it")
    make.add_argument("--max-tokens", type=_at_least(1), default=96, help="most tokens for each prompt (default 96)")
    make.add_argument("--min-tokens", type=_at_least(0), default=0, help="least tokens before a prompt may end (default 0)")
    make.add_argument("--stop", action="append", default=[], metavar="TEXT", help="end at this text; may be repeated")
    make.add_argument("--ignore-eos", action="store_true", help="go on to --max-tokens past the model's end tokens")
    make.add_argument("--num-speculative-tokens", type=_at_least(0), default=3, help="drafts in a round (default 3)")
    make.add_argument("--rule", choices=RULES, help="default: greedy at temperature 0, else coupled")
    make.add_argument("--temperature", type=float, default=0.0, help="0 is greedy (default)")
    make.add_argument("--seed", type=int, default=0, help="seed of the first prompt; the next ones count up")
    make.add_argument("--drafter", choices=DRAFTERS, help=DRAFTER_HELP)
    make.add_argument("--compare", action="store_true", help="decode plainly too and compare tokens and time")
    make.add_argument("--progress", action="store_true", help="show a bar instead of text")
    make.add_argument("--json", action="store_true", help="print one JSON object instead of streaming")
    make.add_argument("--threads", type=_at_least(1), help="CPU threads (default: torch's own choice)")
    return top


def read_prompts(options: argparse.Namespace) -> list[str]:
    """The prompts that the options name."""
    prompts = list(options.prompt or [])
    if options.prompts_file is not None:
        try:
            text = options.prompts_file.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            refuse("--prompts-file", "a readable text file", str(error), "correct the path")
        lines = [line.strip() for line in text.splitlines() if line.strip()]
        if not lines:
            refuse("--prompts-file", "at least one line", "none", "write one prompt a line")
        prompts += lines
    return prompts or [DEFAULT_PROMPT]


def encode(loaded: Loaded, prompt: str, options: argparse.Namespace) -> list[int]:
    """Token ids of a prompt, laid out as the model's chat unless it is raw."""
    if options.target is None:
        return loaded.tokenizer.encode(prompt if options.raw else smollm2.chat_prompt(prompt)).ids
    if options.raw or not getattr(loaded.tokenizer, "chat_template", None):
        return list(loaded.tokenizer.encode(prompt))
    chat = [{"role": "user", "content": prompt}]
    return list(loaded.tokenizer.apply_chat_template(chat, add_generation_prompt=True, tokenize=True, return_dict=False))


def _replaying(job: Job) -> Fixed:
    """Drafts of what plain decoding says, in the shape of speculative passes."""
    rows = min(job.max_num_reqs or len(job.prompts), len(job.prompts))
    if len(job.prompts) > rows:
        expected = f"at least {len(job.prompts)} with --drafter fixed, one for each prompt"
        refuse("--max-num-reqs", expected, job.max_num_reqs, "raise it, or give fewer prompts")
    said = run_job(job, padded=True).outputs
    return fixed([prompt + output for prompt, output in zip(job.prompts, said, strict=True)])


def generate_command(options: argparse.Namespace) -> int:
    """Run `funcspec generate`."""
    if options.threads:
        torch.set_num_threads(options.threads)
    prompts = read_prompts(options)
    loaded = load_models(options)
    job = Job(
        loaded.target,
        loaded.drafter,
        [encode(loaded, prompt, options) for prompt in prompts],
        [options.seed + index for index in range(len(prompts))],
        options.temperature,
        options.max_tokens,
        () if options.ignore_eos else loaded.end_tokens,
        getattr(rules, options.rule or ("coupled" if options.temperature > 0 else "greedy")),
        options.num_speculative_tokens,
        options.max_num_reqs,
        loaded.tokenizer,
        tuple(options.stop),
        options.min_tokens,
    )
    if options.compare or loaded.replays:
        check_comparable(job.rule, [job.temperature])  # before anything is decoded
    if loaded.replays:
        job = replace(job, drafter=_replaying(job))
    first = replace(job, prompts=job.prompts[:1], seeds=job.seeds[:1], max_tokens=min(4, job.max_tokens), min_tokens=0)
    run_job(first)  # the first passes touch the weights for the first time
    colour = sys.stdout.isatty() and "NO_COLOR" not in os.environ
    watching: Callable[[Emission], None] | None = None
    if options.progress:
        watching = Progress(len(prompts), options.max_tokens)
    elif not options.json:
        watching = Printer(loaded.tokenizer, len(prompts), colour, options.stop, options.min_tokens)
    run = run_job(job, watching)
    found = statistics(run.emissions, options.num_speculative_tokens)
    comparison = compare(job, run) if options.compare else None
    if options.json:
        print(as_json(run, found, run.texts, comparison))
        return 0
    if options.progress:
        for index, text in enumerate(run.texts):
            print(f"[{index}] {text}\n" if len(prompts) > 1 else text)
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
