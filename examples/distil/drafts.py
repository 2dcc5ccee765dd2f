"""Kinds of draft: what each starts from, how it lies in files, and the drafter that it becomes."""

import json
from pathlib import Path

import torch
from safetensors.torch import save_file

from examples.distil.heads import Head, Medusa
from examples.distil.masked import Block, Parallel
from examples.distil.students import Student, Truncated
from funcspec.drafters import Drafter, load_draft
from funcspec.drafters.files import KINDS, read_draft
from funcspec.errors import ModelError, refuse
from funcspec.models.llama import Llama

FILE = "draft.safetensors"

MASKED = ("parallel", "dflash")
"""Kinds that fill mask tokens."""


def student_of(
    target: Llama, kind: str, layers: tuple[int, ...] = (), depth: int = 3, mask_id: int | None = None, cuts: int = 32
) -> Student:
    """An untrained draft of a kind.

    Args:
        target: the model that it is to foresee.
        kind: one of `KINDS`.
        layers: of the target, taken over by "standalone" and "parallel"; otherwise whose hidden states are read. Empty for usual ones.
        depth: drafts of a round that are trained; more of them say the same as the first with "standalone".
        mask_id: token that masks hold, for "parallel" and "dflash".
        cuts: places of a text that these are trained from in a step.

    Raises:
        ArgumentError, ModelError: names what does not go together.
    """
    last = target.num_layers
    if kind not in KINDS:
        refuse("kind", f"one of {', '.join(KINDS)}", repr(kind), "use one of these")
    if kind in MASKED and mask_id is None:
        refuse("mask_id", f"a token for the masks of {kind!r}", None, "name one that the target's texts never hold")
    if kind == "medusa":
        if layers not in ((), (last,)):
            refuse("layers", f"the last hidden state, {last}", layers, "leave them out with 'medusa'", ModelError)
        return Medusa.of(target, depth)
    if kind == "dflash":
        return Block.of(target, layers or (last // 4, last // 2, last - 1), depth, mask_id, cuts)
    if kind == "parallel":
        return Parallel.of(target, layers or (0, last - 1), depth, mask_id, cuts)
    if kind == "standalone":
        return Truncated.of(target, layers or (0, last - 1))
    return Head.of(target, kind, layers or ((last // 4, last // 2, last) if kind == "eagle3" else (last,)), depth)


def save(folder: Path, student: Student, token_ids: torch.Tensor) -> Path:
    """Save what was trained, in bfloat16, with the ids of the tokens that the draft foresees.

    Args:
        folder: where to put `draft.safetensors`; made if it is not there.
        student: the draft.
        token_ids: [N] int32.
    """
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {name: value.to(torch.bfloat16).contiguous().cpu() for name, value in student.parameters.items()}
    about = {"kind": student.kind, "target_layers": json.dumps(student.layers)}
    if isinstance(student, Parallel | Block):
        about["mask_id"] = str(student.mask_id)
    save_file(tensors | {"token_ids": token_ids.to(torch.int32).cpu()}, folder / FILE, about)
    return folder / FILE


def resume(path: Path, target: Llama, depth: int = 3, cuts: int = 32) -> tuple[Student, torch.Tensor]:
    """A saved draft, to be trained further.

    Args:
        path: a file that `save` wrote.
        target: the model that it foresees.
        depth, cuts: as for `student_of`.

    Returns:
        the draft, and [N] int32 the tokens that it foresees.

    Raises:
        FileError: the file is missing, or is no such draft.
        ModelError: it is a draft for another target.
    """
    saved = read_draft(path, target)
    kind, weights = saved.kind, saved.weights
    taken = tuple(range(sum(name.endswith(".qkv") for name in weights))) if kind in ("standalone", "parallel") else saved.layers
    student = student_of(target, kind, taken, len(weights["blocks"]) if kind == "medusa" else depth, saved.mask_id, cuts)
    shapes, found = ({name: tuple(value.shape) for name, value in those.items()} for those in (student.parameters, weights))
    if shapes != found:
        name = min(name for name in shapes | found if shapes.get(name) != found.get(name))
        refuse("path", f"{shapes.get(name)} for {name!r}", found.get(name), "start from a draft of this target", ModelError)
    student.parameters = {name: value.to(target.device, torch.float32) for name, value in weights.items()}
    return student, saved.token_ids


def load(folder: Path, target: Llama) -> Drafter:
    """Make a drafter of a saved draft for the target that it was trained for; see `funcspec.drafters.load_draft`.

    Raises:
        FileError: the folder has no such draft.
        ModelError: it is a draft for another target.
    """
    return load_draft(folder / FILE, target)
