"""Command line of the example; see the package's own text."""

import argparse
import json
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch

import funcspec as fs
from examples.distil import prompts as texts
from examples.distil.corpus import Passage, Source, passages
from examples.distil.drafts import load, resume, save, student_of
from examples.distil.students import Student
from examples.distil.targets import Target, load_target
from examples.distil.training import Settings, most_frequent, train
from funcspec.drafters.files import KINDS
from funcspec.errors import refuse
from funcspec.metrics import statistics

PROMPT_LEN = 48
"""Tokens of a passage that the target continues."""

EVALUATED = 5
"""Drafts a round when a draft is judged that makes them one after the other."""


def sources(target: Target) -> tuple[Source, ...]:
    """Where the target's texts begin: a passage, and if it chats an opened turn, and a passage as the user's turn."""
    known = [ids for text in texts.training_texts() if len(ids := target.encode(text)) > PROMPT_LEN]

    def cuts(rows: int, seed: int) -> list[list[int]]:
        draw = np.random.default_rng(seed)
        chosen = [known[int(index)] for index in draw.integers(len(known), size=rows)]
        return [ids[(at := int(draw.integers(len(ids) - PROMPT_LEN))) : at + PROMPT_LEN] for ids in chosen]

    def continued(rows: int, seed: int) -> torch.Tensor:
        return torch.tensor([[*target.opening, *cut] for cut in cuts(rows, seed)], dtype=torch.int32)

    mixed = (0.0, 0.7, 1.0, 1.0)
    plain = Source("text", continued, mixed)
    if target.chat_prompt is None:
        return (plain,)
    before, after = (target.encode(part) for part in target.chat_prompt("\x00").split("\x00"))

    def opened(rows: int, seed: int) -> torch.Tensor:
        return torch.tensor([before] * rows, dtype=torch.int32)

    def asked(rows: int, seed: int) -> torch.Tensor:
        return torch.tensor([before + cut + after for cut in cuts(rows, seed)], dtype=torch.int32)

    # An opened turn begins all rows alike, so greedy rows would all be the same text; the user's turn ends before the answer does.
    return (Source("open", opened, (0.6, 0.8, 1.0, 1.0), turns=2), plain, Source("ask", asked, mixed))


def evaluate(target: Target, drafter: fs.drafters.Drafter, most: int, new: int) -> dict[str, list[float]]:
    """Accepted drafts by position on texts that were held out, greedy: how far the draft foresees its target."""
    kinds = {"text": [[*target.opening, *target.encode(text)[:PROMPT_LEN]] for text in texts.held_out_texts()]}
    if target.chat_prompt is not None:
        kinds["chat"] = [target.encode(target.chat_prompt(question)) for question in texts.QUESTIONS]
    model, found = target.model, {}
    for kind, prompts in kinds.items():
        longest = max(map(len, prompts)) + new
        config = fs.SpecConfig(
            max_num_reqs=4, max_model_len=longest, num_speculative_tokens=most, rule=fs.rules.greedy, device=str(model.device)
        )
        counted = statistics(fs.generate(config, model, drafter, prompts, max_tokens=new, stop_ids=target.end_tokens), most)
        found[kind] = [round(rate, 4) for rate in counted.acceptance_by_position] + [round(counted.tokens_per_round, 3)]
    return found


def students(target: Target, options: argparse.Namespace) -> list[tuple[Student, torch.Tensor | None]]:
    """Drafts to train: saved ones with the tokens that they foresee, and an untrained one of each wanted kind."""
    resumed = [resume(path, target.model, options.depth, options.cuts) for path in options.start or ()]
    kinds = list(dict.fromkeys(options.kind or ([] if resumed else ["eagle"])))
    layers = tuple(int(layer) for layer in options.layers.split(",") if layer)
    if layers and len(kinds) != 1:
        refuse("--layers", "one --kind, as kinds need other layers", kinds, "leave it out, or train them one by one")
    every = [student.kind for student, _ in resumed] + kinds
    if len(set(every)) < len(every):
        refuse("--start", "one draft of a kind, as each has a folder of its kind", every, "train them one by one")
    mask_id = target.mask_id if options.mask_id is None else options.mask_id
    return [*resumed, *((student_of(target.model, kind, layers, options.depth, mask_id, options.cuts), None) for kind in kinds)]


def parser() -> argparse.ArgumentParser:
    """The command line."""
    top = argparse.ArgumentParser(prog="python -m examples.distil", description="Distil drafts for a target.")
    top.add_argument("--kind", choices=KINDS, action="append", help="kind of draft (default eagle); again for more kinds")
    top.add_argument(
        "--start", type=Path, action="append", metavar="FILE", help="train this saved draft further, at half the rate; again for more"
    )
    top.add_argument("--out", type=Path, required=True, help="directory for a folder of each kind, with the draft and a report")
    top.add_argument("--target", type=Path, metavar="DIR", help="directory of a Llama of transformers (default SmolLM2-135M-Instruct)")
    top.add_argument("--minutes", type=float, default=9.0, help="time in all (default 9)")
    top.add_argument("--layers", default="", help="comma-separated layers of the target: taken over, or whose hidden states are read")
    top.add_argument("--depth", type=int, default=3, help="drafts of a round that are trained: draft steps, heads or masks (default 3)")
    top.add_argument("--mask-id", type=int, help="token that masks hold, one that the target's texts never do (known for SmolLM2)")
    top.add_argument(
        "--cuts", type=int, default=32, help="places of a text that drafts with masks start from in a training step (default 32)"
    )
    top.add_argument("--rows", type=int, default=1536, help="texts written together (default 1536)")
    top.add_argument("--new", type=int, default=224, help="tokens of each text (default 224)")
    top.add_argument("--passages", type=int, default=40, help="most passages of that many texts (default 40)")
    top.add_argument("--batch", type=int, default=64, help="texts in a training step (default 64)")
    top.add_argument("--output-rows", type=int, default=8192, help="tokens that the draft may foresee (default 8192)")
    top.add_argument("--token-ids", type=Path, help="use these ids instead of the most frequent ones")
    top.add_argument("--learning-rate", type=float, default=1e-3)
    top.add_argument("--evaluate-tokens", type=int, default=64, help="tokens of each text in the evaluation")
    return top


def main(arguments: Sequence[str] | None = None) -> None:
    """Write; then train, save and evaluate each draft."""
    options, started = parser().parse_args(arguments), time.monotonic()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    target = load_target(options.target, torch.bfloat16 if device == "cuda" else torch.float32, device)
    model, drafts, seconds = target.model, students(target, options), options.minutes * 60
    last, written = model.num_layers, list[Passage]()
    for passage in passages(
        model,
        sources(target),
        rows=options.rows,
        new=options.new,
        layers=tuple(sorted({last}.union(*(student.layers for student, _ in drafts)))),
        end_tokens=target.end_tokens,
        seconds=0.3 * seconds,
        most=options.passages,
    ):
        written.append(passage)
        print(f"  {sum(int(one.counts.sum()) for one in written)} tokens written, {time.monotonic() - started:.0f} s", flush=True)
    matrix = model.weights.get("head", model.weights["embed"])
    frequent = most_frequent(written, model.vocab_size, options.output_rows)
    if options.token_ids is not None:
        frequent = torch.from_numpy(np.load(options.token_ids))
    frequent = frequent.to(device)
    # Some of the time is kept back for evaluations, of which the first compiles kernels.
    left = seconds - (time.monotonic() - started) - 0.025 * seconds * (len(drafts) + 1)
    each = max(left, 0.1 * seconds) / len(drafts)
    for student, own_ids in drafts:
        print(f"{student.kind}:", flush=True)
        ids = frequent if own_ids is None else own_ids.to(device)
        rate = options.learning_rate * (1 if own_ids is None else 0.5)
        settings = Settings(each, batch=options.batch, learning_rate=rate)
        folder = options.out / student.kind
        report = {"kind": student.kind, "layers": student.layers, "training": train(student, written, last, matrix, ids, settings)}
        save(folder, student, ids)
        drafter = load(folder, model)
        most = options.depth if getattr(drafter, "one_pass", False) else EVALUATED
        report["evaluation"] = evaluate(target, drafter, most, options.evaluate_tokens)
        (folder / "report.json").write_text(json.dumps(report, indent=1) + "\n")
        print(json.dumps(report, indent=1), flush=True)


if __name__ == "__main__":
    main()
