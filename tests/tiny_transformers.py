"""Tiny random decoders of transformers, how their authors run them, and a cache to run them over; for `test_huggingface*.py`."""

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch

from funcspec.models import ForwardBatch, HuggingFaceModel

transformers = pytest.importorskip("transformers", minversion="5", exc_type=ImportError)
transformers.logging.set_verbosity_error()

BLOCK_SIZE = 4
VOCAB = 97
MAX_LEN = 64
COMMON = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": MAX_LEN,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
WINDOW = 5
MIXED = ["sliding_attention", "full_attention"]
MULTI_HEAD_LATENT = {
    "num_key_value_heads": 4,
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 12,
}
# Of every model type what differs from COMMON, and the sliding windows of its layers.
KINDS: dict[str, tuple[dict[str, Any], list[int | None]]] = {
    "llama": ({}, [None, None]),
    "qwen2": ({"use_sliding_window": True, "sliding_window": WINDOW, "max_window_layers": 1}, [None, WINDOW]),
    "qwen3": ({}, [None, None]),
    "mistral": ({"sliding_window": WINDOW}, [WINDOW, WINDOW]),
    "gemma": ({}, [None, None]),
    "gemma2": (
        {"sliding_window": WINDOW, "query_pre_attn_scalar": 8, "attn_logit_softcapping": 2.0, "final_logit_softcapping": 3.0},
        [WINDOW, None],
    ),
    "gemma3_text": ({"sliding_window": WINDOW, "layer_types": MIXED}, [WINDOW, None]),
    "gpt2": ({}, [None, None]),
    "gpt_neox": ({}, [None, None]),
    "phi3": ({"sliding_window": WINDOW}, [WINDOW, WINDOW]),
    "olmo2": ({}, [None, None]),
    "smollm3": ({"use_sliding_window": True, "sliding_window": WINDOW, "layer_types": MIXED}, [WINDOW, None]),
    "opt": ({"ffn_dim": 64, "word_embed_proj_dim": 32}, [None, None]),
    "granite": ({"logits_scaling": 3.0, "attention_multiplier": 0.3}, [None, None]),
    "mixtral": ({"num_local_experts": 4}, [None, None]),
    "gpt_oss": ({"sliding_window": WINDOW, "num_local_experts": 4}, [WINDOW, None]),
    "cohere": ({"logit_scale": 0.3}, [None, None]),
    "minicpm3": (MULTI_HEAD_LATENT, [None, None]),
    "gemma4_text": (
        {
            "sliding_window": WINDOW,
            "global_head_dim": 16,
            "num_kv_shared_layers": 1,
            "num_hidden_layers": 3,
            "layer_types": ["sliding_attention", "full_attention", "full_attention"],
            "vocab_size_per_layer_input": VOCAB,
            "hidden_size_per_layer_input": 8,
        },
        [WINDOW, None, None],
    ),
}


def make(kind: str, seed: int = 0, **settings: Any) -> Any:
    """A tiny random model of transformers, with weights large enough for attention to matter."""
    torch.manual_seed(seed)
    shape = transformers.CONFIG_MAPPING[kind](**COMMON | KINDS.get(kind, ({}, []))[0] | settings)
    lm = transformers.AutoModelForCausalLM.from_config(shape, attn_implementation="eager")
    for weight in lm.parameters():
        if weight.dim() > 1:
            torch.nn.init.normal_(weight, std=weight.shape[-1] ** -0.5)
    return lm.eval()


@torch.no_grad()
def plain(lm: Any, tokens: Sequence[int]) -> torch.Tensor:
    """Logits [n, vocabulary] of the model as its authors run it: eager attention, masks, one pass."""
    return lm(torch.tensor([tokens]), use_cache=False).logits[0].float()


class Cache:
    """A paged cache with shuffled blocks, a row for each table, and NaN wherever nothing has been written."""

    def __init__(self, model: HuggingFaceModel, rows: int, columns: int) -> None:
        self.model = model
        order = torch.randperm(rows * columns, generator=torch.Generator().manual_seed(4))
        self.tables = order.reshape(rows, columns).int()
        spec = model.kv_spec
        shapes = {entry: (spec.num_layers, rows * columns, BLOCK_SIZE, *entry.shape) for entry in spec.entries}
        self.kv = {entry.name: torch.full(shape, float("nan"), dtype=entry.dtype) for entry, shape in shapes.items()}

    def batch(self, rows: list[tuple[int, list[int]]], padding: int = 0) -> ForwardBatch:
        """Feed each row (cached length, new tokens); `padding` places without a token at the end of each row."""
        ids, positions, slots, bounds = [], [], [], [0]
        for table, (start, tokens) in zip(self.tables.tolist(), rows, strict=True):
            places = range(start, start + len(tokens))
            ids += tokens + [0] * padding
            positions += [*places] + [0] * padding
            slots += [table[p // BLOCK_SIZE] * BLOCK_SIZE + p % BLOCK_SIZE for p in places] + [-1] * padding
            bounds.append(len(ids))

        def ints(values: list[int]) -> torch.Tensor:
            return torch.tensor(values, dtype=torch.int32)

        lengths = [start + len(tokens) if tokens else 0 for start, tokens in rows]
        longest = max(stop - start for start, stop in pairwise(bounds))
        return ForwardBatch(ints(ids), ints(positions), ints(bounds), ints(lengths), ints(slots), self.tables, None, longest)


def draw(count: int, seed: int = 0) -> list[int]:
    """Random tokens."""
    return np.random.default_rng(seed).integers(3, VOCAB, count).tolist()
