"""What `funcspec generate` runs: a target, its tokenizer, and the drafter that the options name."""

import argparse
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib.resources import as_file
from typing import Any

from funcspec.drafters import (
    Proposer,
    best_of,
    cascade,
    dflash,
    eagle,
    early_exit,
    fallback,
    load_draft,
    ngram,
    parallel,
    standalone,
    suffix,
)
from funcspec.drafters.base import Drafter
from funcspec.errors import refuse
from funcspec.models import smollm2
from funcspec.models.base import Model
from funcspec.models.dflash import DFlash, DFlashConfig, random_dflash
from funcspec.models.llama import Llama

LOOKUPS: Mapping[str, Callable[[], Proposer]] = {
    "lookup": ngram,
    "suffix": suffix,
    "lookup+suffix": lambda: best_of(ngram(), suffix()),
}
"""Drafters without a model, for any target."""

MODELS: Mapping[str, Callable[[Llama], Drafter]] = {
    "standalone": lambda target: standalone(*smollm2.load_draft(target)),
    "eagle": lambda target: eagle(*smollm2.load_head(target)),
    "medusa": lambda target: _trained("medusa", target),
    "mtp": lambda target: _trained("mtp", target),
    "parallel": lambda target: _parallel(target),
    "dflash": lambda target: _dflash(target),
    "early-exit": lambda target: early_exit(target, target.num_layers * 5 // 6),
    "cascade": lambda target: cascade(ngram(), standalone(*smollm2.load_draft(target))),
}
"""Drafters with a model of SmolLM2-135M-Instruct."""

MASK_ID = 16
"""`<empty_output>`, a token that texts of SmolLM2 never hold."""

DRAFTERS = (*LOOKUPS, *MODELS, *(f"lookup+{name}" for name in MODELS if name != "cascade"), "fixed", "none")

DRAFTER_HELP = (
    "who drafts (default: standalone): lookup and suffix copy from the text so far; eagle, medusa and mtp read the target's hidden states; "
    "parallel is the standalone draft with masks it was not trained for, dflash has random weights; both show how such drafts run; "
    "early-exit is the target's own first layers; cascade lets the standalone draft judge what lookup finds; fixed drafts what plain "
    "decoding says, the most there is to gain; lookup+ puts a look-up in front of another; none decodes plainly"
)


@dataclass(frozen=True)
class Loaded:
    """A target with all that goes with it, and the drafter.

    Attributes:
        replays: whether the drafter is to be made of what the target says by itself.
    """

    target: Model
    drafter: Drafter | None
    tokenizer: Any
    end_tokens: tuple[int, ...]
    replays: bool = False


def load_models(options: argparse.Namespace) -> Loaded:
    """Load target, tokenizer and drafter that the options of `funcspec generate` name.

    Args:
        options: `target`, `draft`, `drafter` and `num_speculative_tokens`.

    Raises:
        ArgumentError: they do not go together.
    """
    if options.draft is not None and options.target is None and options.drafter is not None:
        refuse("--draft", "no --drafter with a draft file for SmolLM2", options.drafter, "leave one of them out, or name a --target")
    usual = "standalone" if options.target is None or options.draft is not None else "lookup"
    kind = "none" if options.num_speculative_tokens == 0 else options.drafter or usual
    return _load_own(options, kind) if options.target is not None else _load_shipped(kind, options.draft)


def _parallel(target: Llama) -> Drafter:
    """The stand-alone draft, which was not trained to fill masks: its first draft of a round is as good as ever, the others are not."""
    model, token_ids = smollm2.load_draft(target)
    return parallel(model, MASK_ID, token_ids)


def _dflash(target: Llama) -> Drafter:
    """A block drafter of one narrow layer with random weights and the target's embedding: it shows how one runs, and foresees nothing."""
    shape = {**vars(target.config), "num_layers": 1, "intermediate_size": 64}
    block = random_dflash(DFlashConfig(**shape | {"vocab_size": 1}, target_layers=(target.num_layers,), head_norms=False))
    config = DFlashConfig(**shape, target_layers=(target.num_layers,), head_norms=False)
    return dflash(DFlash(config, {**block.weights, "embed": target.weights["embed"]}), MASK_ID)


def _trained(kind: str, target: Llama) -> Drafter:
    """A draft of SmolLM2 that comes with the package."""
    with as_file(smollm2.DATA / f"draft-smollm2-{kind}.safetensors") as path:
        return load_draft(path, target)


def _load_shipped(kind: str, file: str | None) -> Loaded:
    """SmolLM2, and one of its drafters or that of a file."""
    target = smollm2.load_target()
    if file is not None and kind != "none":
        drafter = load_draft(file, target)
    elif kind in LOOKUPS:
        drafter = LOOKUPS[kind]()
    elif kind in ("fixed", "none"):
        drafter = None
    else:
        front, _, name = kind.rpartition("+")
        drafter = MODELS[name](target)
        drafter = fallback(LOOKUPS[front](), drafter) if front else drafter
    return Loaded(target, drafter, smollm2.load_tokenizer(), smollm2.END_TOKENS, kind == "fixed")


def _load_own(options: argparse.Namespace, kind: str) -> Loaded:
    """A Hugging Face model, and another one that drafts."""
    possible = (*LOOKUPS, "standalone", "lookup+standalone", "fixed", "none")
    if kind not in possible:
        expected = f"{', '.join(possible[:-1])} or none with --target"
        refuse("--drafter", expected, kind, "use one of these, or write a program with funcspec.models.heads")
    if "standalone" in kind and options.draft is None:
        refuse("--draft", f"a model directory for --drafter {kind}", "none", "name one, or use --drafter lookup")
    from funcspec.models.huggingface import load

    target, tokenizer = load(options.target)
    if tokenizer is None:
        refuse("--target", "a model with a tokenizer", "none in its directory", "save the tokenizer there too")
    drafter: Drafter | None = LOOKUPS[kind]() if kind in LOOKUPS else None
    if "standalone" in kind:
        drafter = standalone(load(options.draft)[0])
        drafter = fallback(ngram(), drafter) if kind != "standalone" else drafter
    return Loaded(target, drafter, tokenizer, _end_tokens(target, tokenizer), kind == "fixed")


def _end_tokens(target: Any, tokenizer: Any) -> tuple[int, ...]:
    """Ids at which a Hugging Face model stops: those of its generation configuration, else its tokenizer's."""
    settings = getattr(target.lm, "generation_config", None)
    found = getattr(settings, "eos_token_id", None)
    found = tokenizer.eos_token_id if found is None else found
    return tuple(found) if isinstance(found, list | tuple) else () if found is None else (found,)


__all__ = ["DRAFTERS", "DRAFTER_HELP", "LOOKUPS", "MODELS", "Loaded", "load_models"]
