"""Trained drafts in files, and drafters made of them."""

import json
from dataclasses import replace
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file

from examples.distil.students import Head, Student
from funcspec.drafters import Drafter, eagle, standalone
from funcspec.models.heads import EagleConfig, EagleHead
from funcspec.models.llama import Llama

FILE = "draft.safetensors"


def save(folder: Path, kind: str, student: Student, token_ids: torch.Tensor) -> Path:
    """Save what was trained, in bfloat16, with the ids of the tokens that the draft foresees.

    Args:
        folder: where to put `draft.safetensors`; made if it is not there.
        kind: "standalone", "eagle" or "eagle3".
        student: the draft.
        token_ids: [N] int32.
    """
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {name: value.to(torch.bfloat16).contiguous().cpu() for name, value in student.parameters.items()}
    layers = student.layers if isinstance(student, Head) else ()
    about = {"kind": kind, "target_layers": json.dumps(layers)}
    save_file(tensors | {"token_ids": token_ids.to(torch.int32).cpu()}, folder / FILE, about)
    return folder / FILE


def load(folder: Path, target: Llama) -> Drafter:
    """Make a drafter of a saved draft for the target that it was trained for, whose embedding and output matrix it shares."""
    with safe_open(folder / FILE, "pt") as file:
        about = file.metadata()
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    token_ids = tensors.pop("token_ids").to(target.device)
    weights = {name: value.to(target.device, target.dtype) for name, value in tensors.items()}
    matrix = target.weights.get("head", target.weights["embed"])
    weights |= {"embed": target.weights["embed"], "head": matrix[token_ids.long()]}
    count = sum(name.endswith(".qkv") for name in weights)
    if about["kind"] == "standalone":
        return standalone(Llama(replace(target.config, num_layers=count), weights, token_ids), token_ids)
    shape = vars(replace(target.config, num_layers=count))
    layers, style = tuple(json.loads(about["target_layers"])), about["kind"]
    config = EagleConfig(**shape, target_layers=layers, style=style, embed_norm=True)
    return eagle(EagleHead(config, weights, token_ids), token_ids)
