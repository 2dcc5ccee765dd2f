"""Command line of the example; see the package's own text."""

import argparse
import json
import time
from pathlib import Path

import numpy as np
import torch

import funcspec as fs
from examples.distil import prompts as texts
from examples.distil.corpus import Passage, Source, passages
from examples.distil.drafts import load, save
from examples.distil.students import Head, Student, Truncated
from examples.distil.training import Settings, most_frequent, train
from funcspec.metrics import statistics
from funcspec.models import smollm2
from funcspec.models.llama import Llama

PROMPT_LEN = 48
"""Tokens of a passage that the target continues."""


def sources(tokenizer: object) -> tuple[Source, ...]:
    """Where the target's texts begin: an opened chat turn, a passage, and a passage as the user's turn."""
    encode = tokenizer.encode  # type: ignore[attr-defined]
    before, after = (encode(part).ids for part in smollm2.chat_prompt("\x00").split("\x00"))
    known = [ids for text in texts.training_texts() if len(ids := encode(text).ids) > PROMPT_LEN]

    def cuts(rows: int, seed: int) -> list[list[int]]:
        draw = np.random.default_rng(seed)
        chosen = [known[int(index)] for index in draw.integers(len(known), size=rows)]
        return [ids[(at := int(draw.integers(len(ids) - PROMPT_LEN))) : at + PROMPT_LEN] for ids in chosen]

    def opened(rows: int, seed: int) -> torch.Tensor:
        return torch.tensor([before] * rows, dtype=torch.int32)

    def continued(rows: int, seed: int) -> torch.Tensor:
        return torch.tensor(cuts(rows, seed), dtype=torch.int32)

    def asked(rows: int, seed: int) -> torch.Tensor:
        return torch.tensor([before + cut + after for cut in cuts(rows, seed)], dtype=torch.int32)

    mixed = (0.0, 0.7, 1.0, 1.0)
    # An opened turn begins all rows alike, so greedy rows would all be the same text; the user's turn ends before the answer does.
    return (Source("open", opened, (0.6, 0.8, 1.0, 1.0), turns=2), Source("text", continued, mixed), Source("ask", asked, mixed))


def evaluate(target: Llama, drafter: fs.drafters.Drafter, tokenizer: object, most: int, new: int) -> dict[str, list[float]]:
    """Accepted drafts by position on texts that were held out, greedy: how far the draft foresees its target."""
    encode = tokenizer.encode  # type: ignore[attr-defined]
    kinds = {
        "text": [encode(text).ids[:PROMPT_LEN] for text in texts.held_out_texts()],
        "chat": [encode(smollm2.chat_prompt(question)).ids for question in texts.QUESTIONS],
    }
    found = {}
    for kind, prompts in kinds.items():
        longest = max(map(len, prompts)) + new
        config = fs.SpecConfig(
            max_num_reqs=4, max_model_len=longest, num_speculative_tokens=most, rule=fs.rules.greedy, device=str(target.device)
        )
        emissions = list(fs.generate(config, target, drafter, prompts, max_tokens=new, stop_ids=smollm2.END_TOKENS))
        counted = statistics(emissions, most)
        found[kind] = [round(rate, 4) for rate in counted.acceptance_by_position] + [round(counted.tokens_per_round, 3)]
    return found


def student_of(target: Llama, kind: str, layers: tuple[int, ...], depth: int) -> Student:
    """An untrained draft of a kind."""
    if kind == "standalone":
        return Truncated.of(target, layers or (0, target.config.num_layers - 1))
    last = target.config.num_layers
    chosen = layers or ((last,) if kind == "eagle" else (last // 4, last // 2, last))
    return Head.of(target, kind, chosen, depth)


def parser() -> argparse.ArgumentParser:
    """The command line."""
    top = argparse.ArgumentParser(prog="python -m examples.distil", description="Distil a draft for SmolLM2-135M-Instruct.")
    top.add_argument("--kind", choices=("standalone", "eagle", "eagle3"), default="eagle")
    top.add_argument("--out", type=Path, required=True, help="directory for the draft and a report")
    top.add_argument("--minutes", type=float, default=9.0, help="time in all (default 9)")
    top.add_argument("--layers", default="", help="comma-separated layers of the target: taken over, or whose hidden states are read")
    top.add_argument("--depth", type=int, default=3, help="draft steps that a head is trained through (default 3)")
    top.add_argument("--rows", type=int, default=1536, help="texts written together (default 1536)")
    top.add_argument("--new", type=int, default=224, help="tokens of each text (default 224)")
    top.add_argument("--passages", type=int, default=40, help="most passages of that many texts (default 40)")
    top.add_argument("--batch", type=int, default=64, help="texts in a training step (default 64)")
    top.add_argument("--output-rows", type=int, default=8192, help="tokens that the draft may foresee (default 8192)")
    top.add_argument("--token-ids", type=Path, help="use these ids instead of the most frequent ones")
    top.add_argument("--learning-rate", type=float, default=1e-3)
    top.add_argument("--evaluate-tokens", type=int, default=64, help="tokens of each text in the evaluation")
    return top


def main() -> None:
    """Write, train, save, evaluate."""
    options, started = parser().parse_args(), time.monotonic()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    target = smollm2.load_target(torch.bfloat16 if device == "cuda" else torch.float32, device)
    tokenizer = smollm2.load_tokenizer()
    layers = tuple(int(layer) for layer in options.layers.split(",") if layer)
    student = student_of(target, options.kind, layers, options.depth)
    last = target.config.num_layers
    seconds = options.minutes * 60
    written: list[Passage] = []
    for passage in passages(
        target,
        sources(tokenizer),
        rows=options.rows,
        new=options.new,
        layers=tuple(sorted({*student.layers, last})),
        end_token=smollm2.END_OF_TURN,
        seconds=0.3 * seconds,
        most=options.passages,
    ):
        written.append(passage)
        print(f"  {sum(int(one.counts.sum()) for one in written)} tokens written, {time.monotonic() - started:.0f} s", flush=True)
    matrix = target.weights.get("head", target.weights["embed"])
    ids = most_frequent(written, target.vocab_size, options.output_rows)
    if options.token_ids is not None:
        ids = torch.from_numpy(np.load(options.token_ids))
    ids = ids.to(device)
    left = seconds - (time.monotonic() - started) - 0.05 * seconds
    settings = Settings(left, batch=options.batch, learning_rate=options.learning_rate)
    report = {"kind": options.kind, "layers": student.layers, "training": train(student, written, last, matrix, ids, settings)}
    save(options.out, options.kind, student, ids)
    report["evaluation"] = evaluate(target, load(options.out, target), tokenizer, 5, options.evaluate_tokens)
    (options.out / "report.json").write_text(json.dumps(report, indent=1) + "\n")
    print(json.dumps(report, indent=1))


if __name__ == "__main__":
    main()
