"""One layer's attention over a paged cache in torch, as Llamas and the drafts made of such layers share it."""

import torch

from funcspec.kernels.paged_attention import paged_attention_
from funcspec.models.base import KV, ForwardBatch

Rotary = tuple[torch.Tensor, torch.Tensor]
"""[T, 1, head_dim] cosines, and sines with the first half negated."""


def rotate(x: torch.Tensor, rotary: Rotary) -> torch.Tensor:
    """Turn heads [T, heads, head_dim] by the positions of their tokens; keeps the dtype."""
    return (x * rotary[0] + x.roll(x.shape[2] // 2, 2) * rotary[1]).to(x.dtype)


def attend(
    query: torch.Tensor, kv: KV, layer: int, batch: ForwardBatch, mixed: torch.Tensor, positions: torch.Tensor | None = None
) -> None:
    """Mix the values that queries see.

    Args:
        query: [T, heads, head_dim], rotated.
        kv: "key" and "value", [num_layers, num_blocks, block_size, num_kv_heads, head_dim].
        layer: of the cache.
        batch: whose queries they are.
        mixed: [T or more, heads, head_dim], written; places that belong to no row stay as they are.
        positions: [T] up to which keys are seen, if not those of the batch.
    """
    paged_attention_(
        out=mixed[: query.shape[0]],
        query=query,
        key_cache=kv["key"][layer],
        value_cache=kv["value"][layer],
        block_tables=batch.block_tables,
        seq_lens=batch.seq_lens,
        query_start_loc=batch.query_start_loc,
        positions=batch.positions if positions is None else positions,
        scale=query.shape[2] ** -0.5,
        max_query_len=batch.max_query_len,
    )


__all__ = ["Rotary", "attend", "rotate"]
