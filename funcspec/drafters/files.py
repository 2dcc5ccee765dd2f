"""Trained drafts in safetensors files, for the target that they were trained for; `examples/distil` writes such files."""

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from funcspec.drafters.base import Drafter
from funcspec.drafters.dflash import dflash
from funcspec.drafters.eagle import eagle
from funcspec.drafters.medusa import medusa
from funcspec.drafters.mtp import mtp
from funcspec.drafters.parallel import parallel
from funcspec.drafters.standalone import standalone
from funcspec.errors import ArgumentTypeError, FileError, ModelError, refuse, type_name
from funcspec.models.dflash import DFlash, DFlashConfig
from funcspec.models.heads import EagleConfig, EagleHead
from funcspec.models.llama import Llama
from funcspec.models.medusa_heads import MedusaHeads

KINDS = ("standalone", "parallel", "medusa", "eagle", "eagle3", "mtp", "dflash")
"""What a file may hold, as its metadata says."""


def load_draft(path: str | os.PathLike[str], target: Llama) -> Drafter:
    """Make a drafter of a file that `examples/distil` wrote, for the target that it was trained for.

    The draft shares the target's embedding, and the rows of its output matrix for the tokens that it foresees; dtype and device are the
    target's.

    Args:
        path: the file. Its tensors are named as the models name their weights, "token_ids" [N] int32 are the tokens that the draft
            foresees. Metadata: "kind", one of `KINDS`; "target_layers", as JSON, whose hidden states it reads; and "mask_id" for drafts
            that fill mask tokens.
        target: a Llama of torch.

    Raises:
        ArgumentTypeError: the target is no Llama of torch.
        FileError: the file is missing, or is no such draft.
        ModelError: it is a draft for another target.

    Example:
        >>> from funcspec.models import smollm2
        >>> drafter = load_draft("drafts/medusa/draft.safetensors", smollm2.load_target())  # doctest: +SKIP
    """
    if not isinstance(target, Llama):
        refuse("target", "a Llama of torch", type_name(target), "build the draft's model and drafter by hand", ArgumentTypeError)
    if not isinstance(path, str | os.PathLike):
        refuse("path", "the name of a file", type_name(path), "pass a str or a Path", ArgumentTypeError)
    return _drafter(read_draft(Path(path), target), target)


@dataclass(frozen=True)
class SavedDraft:
    """What lies in a file.

    Attributes:
        kind: one of `KINDS`.
        layers: hidden states of the target that the draft reads.
        mask_id: what masks hold, 0 for kinds without them.
        token_ids: [N] int32 the tokens that the draft foresees.
        weights: all other tensors, by name.
    """

    kind: str
    layers: tuple[int, ...]
    mask_id: int
    token_ids: torch.Tensor
    weights: Mapping[str, torch.Tensor]


def _drafter(saved: SavedDraft, target: Llama) -> Drafter:
    kind, layers, mask_id, token_ids = saved.kind, saved.layers, saved.mask_id, saved.token_ids.to(target.device)
    weights = {name: value.to(target.device, target.dtype) for name, value in saved.weights.items()}
    outputs = target.weights.get("head", target.weights["embed"])[token_ids.long()]
    if kind == "medusa":
        heads: Any = MedusaHeads({**weights, "outputs": outputs[None]}, layers[0])
        return medusa(heads, token_ids)
    weights = {**weights, "embed": target.weights["embed"], "head": outputs}
    config = replace(target.config, num_layers=sum(name.endswith(".qkv") for name in weights))
    if kind == "standalone":
        return standalone(Llama(config, weights, token_ids), token_ids)
    if kind == "parallel":
        return parallel(Llama(config, weights, token_ids), mask_id, token_ids)
    if kind == "dflash":
        block = DFlash(DFlashConfig(**vars(config), target_layers=layers, head_norms=False), weights, token_ids)
        return dflash(block, mask_id, token_ids)
    style: Any = kind
    head = EagleHead(EagleConfig(**vars(config), target_layers=layers, style=style, embed_norm=True), weights, token_ids)
    return (mtp if kind == "mtp" else eagle)(head, token_ids)


def read_draft(path: Path, target: Llama) -> SavedDraft:
    """Read a file of a draft, as `load_draft` describes it.

    Raises:
        FileError: the file is missing, or is no such draft.
        ModelError: it is a draft for another target.
    """
    fix = "name a file that examples/distil wrote"
    try:
        with safe_open(path, "pt") as file:
            about = dict(file.metadata() or {})
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except (OSError, SafetensorError) as error:
        refuse("path", "a safetensors file", str(error)[:120], fix, FileError)
    if about.get("kind") not in KINDS or "target_layers" not in about:
        refuse("path", f"a draft of a kind among {', '.join(KINDS)}", repr(about.get("kind"))[:60], fix, FileError)
    ids = tensors.pop("token_ids", None)
    if ids is None or ids.dtype != torch.int32 or ids.ndim != 1 or not len(ids) or int(ids.min()) < 0:
        refuse("path", 'token ids [N] int32 as "token_ids"', "none" if ids is None else f"{ids.dtype} {tuple(ids.shape)}", fix, FileError)
    if about["kind"] in ("parallel", "dflash") and not about.get("mask_id", "").isdigit():
        refuse("path", "a mask_id", repr(about.get("mask_id"))[:60], fix, FileError)
    layers = tuple(json.loads(about["target_layers"]))
    if max(layers, default=0) > target.num_layers or int(ids.max()) >= target.vocab_size:
        found = f"one of {target.num_layers} layers and {target.vocab_size} tokens"
        expected = f"a target with hidden states {layers} and token {int(ids.max())}"
        refuse("target", expected, found, "load the draft for the target that it was trained for", ModelError)
    return SavedDraft(about["kind"], layers, int(about.get("mask_id", 0)), ids, tensors)


__all__ = ["KINDS", "SavedDraft", "load_draft", "read_draft"]
