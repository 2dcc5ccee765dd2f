"""Models to distil, with what belongs to each: its tokenizer, how it is talked to, and where its texts end."""

import importlib
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from funcspec.errors import ModelError, refuse
from funcspec.models import smollm2
from funcspec.models.huggingface import INSTALL, TOKENIZER_FILES
from funcspec.models.llama import Llama, LlamaConfig

ARCHITECTURE = "LlamaForCausalLM"
"""What transformers calls the models that can be read from a directory."""

NAMES: Mapping[str, tuple[str, ...]] = {
    "attention_norm": ("input_layernorm",),
    "qkv": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "attention_output": ("self_attn.o_proj",),
    "mlp_norm": ("post_attention_layernorm",),
    "gate_up": ("mlp.gate_proj", "mlp.up_proj"),
    "down": ("mlp.down_proj",),
}
"""Where transformers keeps the weights of a layer."""

SMOLLM2_MASK = 16
"""`<empty_output>`, a token of SmolLM2 that neither its training nor its texts hold."""


@dataclass(frozen=True)
class Target:
    """A model to distil.

    Attributes:
        model: the model itself.
        encode: turns text into token ids and adds none.
        opening: ids in front of plain text.
        chat_prompt: lays out what a user says as the model reads it, ready for its answer; None for models that do not chat.
        end_tokens: ids with which it ends a text.
        mask_id: a token that its texts never hold, if one is known.
    """

    model: Llama
    encode: Callable[[str], list[int]]
    opening: tuple[int, ...]
    chat_prompt: Callable[[str], str] | None
    end_tokens: tuple[int, ...]
    mask_id: int | None = None


def load_target(folder: Path | None, dtype: torch.dtype, device: torch.device | str) -> Target:
    """Load a target.

    Args:
        folder: directory of a model of transformers, a plain Llama, with its tokenizer; None for SmolLM2-135M-Instruct.
        dtype: of weights, cache and logits.
        device: where to put it.

    Raises:
        ModelError: another architecture, or something is missing.
    """
    if folder is None:
        tokenizer, model = smollm2.load_tokenizer(), smollm2.load_target(dtype, device)
        return Target(model, lambda text: tokenizer.encode(text).ids, (), smollm2.chat_prompt, smollm2.END_TOKENS, SMOLLM2_MASK)
    settings, model = read_settings(folder), read_llama(folder, dtype, device)
    tokenizer = _read_tokenizer(folder)

    def chat_prompt(text: str) -> str:
        said = [{"role": "user", "content": text}]
        return tokenizer.apply_chat_template(said, tokenize=False, add_generation_prompt=True)

    opening = tuple(tokenizer.encode("")[:1])  # some tokenizers end a text too
    return Target(
        model,
        lambda text: tokenizer.encode(text, add_special_tokens=False),
        opening if opening == (tokenizer.bos_token_id,) else (),
        chat_prompt if tokenizer.chat_template else None,
        _end_tokens(folder, settings, tokenizer),
    )


def read_settings(folder: Path) -> dict[str, Any]:
    """Read a model's configuration.

    Raises:
        ModelError: there is none, or it is not that of a plain Llama.
    """
    if not (folder / "config.json").is_file():
        refuse("target", "a directory with a config.json", str(folder), "name the directory of a model of transformers", ModelError)
    settings = json.loads((folder / "config.json").read_text())
    found = settings.get("architectures")
    if found != [ARCHITECTURE]:
        refuse("target", ARCHITECTURE, found, "distil a plain Llama", ModelError)
    rotary = settings.get("rope_parameters") or settings.get("rope_scaling") or {}
    kind = rotary.get("rope_type", rotary.get("type", "default"))
    unusual = {
        "scaled or partial rotary embeddings": kind != "default" or (rotary.get("partial_rotary_factor") or 1) != 1,
        "biases": settings.get("attention_bias", False) or settings.get("mlp_bias", False),
        f"activation {settings.get('hidden_act')!r}": settings.get("hidden_act", "silu") != "silu",
        "quantised weights": "quantization_config" in settings,
    }
    if any(unusual.values()):
        refuse("target", "a plain Llama", [what for what, there in unusual.items() if there], "distil another model", ModelError)
    return settings


def read_llama(folder: Path, dtype: torch.dtype, device: torch.device | str) -> Llama:
    """Read a plain Llama from a directory of transformers, with weights in safetensors files.

    Args:
        folder: the directory.
        dtype: of weights, cache and logits.
        device: where to put the weights.

    Raises:
        ModelError: another architecture, weights that are missing, or some that a plain Llama has no use for.
    """
    settings = read_settings(folder)
    heads, size = settings["num_attention_heads"], settings["hidden_size"]
    rotary = settings.get("rope_parameters") or {}
    config = LlamaConfig(
        vocab_size=settings["vocab_size"],
        num_layers=settings["num_hidden_layers"],
        hidden_size=size,
        intermediate_size=settings["intermediate_size"],
        num_heads=heads,
        num_kv_heads=settings.get("num_key_value_heads") or heads,
        head_dim=settings.get("head_dim") or size // heads,
        max_len=settings["max_position_embeddings"],
        rope_theta=settings.get("rope_theta") or rotary.get("rope_theta", 10000.0),
        norm_eps=settings.get("rms_norm_eps", 1e-6),
    )
    sources = {"embed": ["model.embed_tokens.weight"], "norm": ["model.norm.weight"]}
    if not settings.get("tie_word_embeddings", False):
        sources["head"] = ["lm_head.weight"]
    for layer in range(config.num_layers):
        sources |= {f"{layer}.{own}": [f"model.layers.{layer}.{name}.weight" for name in names] for own, names in NAMES.items()}
    found: dict[str, torch.Tensor] = {}
    for path in sorted(folder.glob("*.safetensors")):
        found |= load_file(path)
    needed = {name for names in sources.values() for name in names}
    ignored = {name for name in found if name.endswith("rotary_emb.inv_freq") or name == "lm_head.weight"}
    odd = sorted(needed - set(found)) + sorted(set(found) - needed - ignored)
    if odd:
        refuse("target", "the weights of a plain Llama in safetensors files", f"missing or odd names {odd[:3]}", "complete it", ModelError)
    weights = {own: torch.cat([found[name] for name in names]).to(device, dtype) for own, names in sources.items()}
    return Llama(config, weights)


def _read_tokenizer(folder: Path) -> Any:
    if not any((folder / name).is_file() for name in TOKENIZER_FILES):  # transformers would make an empty one of some classes
        refuse("target", "a directory with a tokenizer", str(folder), "save the tokenizer beside the model", ModelError)
    try:
        transformers = importlib.import_module("transformers")
    except ImportError as error:
        refuse("transformers", "the package, for the tokenizer of a target of your own", f"{error}", INSTALL, ModelError)
    try:
        return transformers.AutoTokenizer.from_pretrained(folder, local_files_only=True)
    except (OSError, ValueError, KeyError) as error:
        refuse("target", "a tokenizer that transformers can load", f"{type(error).__name__}: {error}", "save it anew", ModelError)


def _end_tokens(folder: Path, settings: Mapping[str, Any], tokenizer: Any) -> tuple[int, ...]:
    """As for generation, or else as the configuration or the tokenizer says."""
    path = folder / "generation_config.json"
    generation = json.loads(path.read_text()) if path.is_file() else {}
    for found in (generation.get("eos_token_id"), settings.get("eos_token_id"), tokenizer.eos_token_id):
        if found is not None:
            return tuple(found) if isinstance(found, list) else (found,)
    return ()
