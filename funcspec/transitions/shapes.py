"""Shapes of what the operations of a step write, and of the values of a row's cache."""

from collections.abc import Mapping

import torch

from funcspec.kernels.choose_tokens import choose_tokens_partials
from funcspec.kernels.normalisers import PART

Shapes = Mapping[str, tuple[tuple[int, ...], torch.dtype]]
"""Shape and dtype of buffers by the name of the argument they are passed as."""


def window_shapes(rows: int, width: int, choices: int) -> Shapes:
    """Outputs of `window_inputs_`."""
    places = ("out_input_ids", "out_positions", "out_slot_mapping", "out_token_rows")
    by_row: Shapes = {"out_seq_lens": ((rows,), torch.int32), "out_last_token_indices": ((rows * choices,), torch.int32)}
    return {**dict.fromkeys(places, ((rows * width,), torch.int32)), **by_row}


def rope_shapes(axes: int, places: int) -> Shapes:
    """Outputs of `rope_positions_`."""
    return {"out_rope_positions": ((axes, places), torch.int32)}


def choice_shapes(count: int, vocab_size: int) -> Shapes:
    """Outputs and workspace of `choose_tokens_`."""
    partials = (count, choose_tokens_partials(vocab_size))
    return {
        "out_tokens": ((count,), torch.int32),
        "out_bad": ((count,), torch.int32),
        "scratch_scores": (partials, torch.float32),
        "scratch_tokens": (partials, torch.int32),
        "scratch_bad": (partials, torch.int32),
    }


def summing_shapes(count: int, vocab_size: int) -> Shapes:
    """Workspace of `keep_proposals_` and `recover_tokens_`."""
    return {"scratch": ((count, choose_tokens_partials(vocab_size), PART), torch.int32)}


def judging_shapes(places: int, vocab_size: int) -> Shapes:
    """Outputs and workspace of `judge_drafts_`."""
    names = ("out_verdicts", "out_indices", "out_bad")
    by_place: Shapes = dict.fromkeys(names, ((places,), torch.int32))
    return {**by_place, "out_normalisers": ((places, 2), torch.int32), **summing_shapes(places, vocab_size)}


def recovery_shapes(rows: int, width: int, vocab_size: int) -> Shapes:
    """Outputs and workspace of `recover_tokens_`."""
    by_place: Shapes = dict.fromkeys(("out_chosen", "out_bad"), ((rows * width,), torch.int32))
    return {**by_place, **summing_shapes(rows, vocab_size)}


def in_blocks(tokens: torch.Tensor, num_blocks: int, block_size: int) -> torch.Tensor:
    """Values of a row's first tokens [num_layers, length, *shape] as they lie in blocks, zeros behind them."""
    num_layers, length, *shape = tokens.shape
    padded = tokens.new_zeros(num_layers, num_blocks * block_size, *shape)
    padded[:, :length] = tokens
    return padded.view(num_layers, num_blocks, block_size, *shape)


__all__ = ["Shapes", "choice_shapes", "in_blocks", "judging_shapes", "recovery_shapes", "rope_shapes", "summing_shapes", "window_shapes"]
