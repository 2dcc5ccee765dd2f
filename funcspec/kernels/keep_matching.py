"""Of tokens chosen behind guesses, keep those that still count: up to the first one that differs from its guess."""

import numpy as np
import torch

from funcspec.constants import NO_TOKEN
from funcspec.errors import refuse
from funcspec.kernels._checks import check_matrix, check_rows
from funcspec.kernels._triton import jit, tl
from funcspec.kernels.op import Op, next_power_of_2

Array = torch.Tensor | np.ndarray


@jit
def keep_matching_kernel(
    guesses_ptr,  # [R, G] int32
    chosen_ptr,  # [R * C] int32, in place
    guesses_stride,
    NUM_GUESSES: tl.constexpr,
    NUM_CHOSEN: tl.constexpr,
    LANES: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    lane = tl.arange(0, LANES)
    chosen = tl.load(chosen_ptr + row * NUM_CHOSEN + lane, mask=lane < NUM_CHOSEN, other=-1)
    guess = tl.load(guesses_ptr + row * guesses_stride + lane, mask=lane < NUM_GUESSES, other=-1)
    differs = (chosen != guess) | (chosen < 0)
    first = tl.min(tl.where(differs, lane, LANES), axis=0)
    tl.store(chosen_ptr + row * NUM_CHOSEN + lane, tl.where(lane <= first, chosen, -1), mask=lane < NUM_CHOSEN)


def _check(guesses: Array, chosen: Array) -> int:
    """Refuse what does not fit; return C."""
    rows = guesses.shape[0]
    check_matrix("guesses", guesses, rows)
    check_rows(chosen.shape[0], ("chosen",), (chosen,))
    if rows == 0 or chosen.shape[0] % rows:
        refuse("chosen", f"as many tokens for each of {rows} rows", tuple(chosen.shape), "pass arrays of one batch")
    return chosen.shape[0] // rows


def _launch_keep_matching(*, guesses: torch.Tensor, chosen: torch.Tensor) -> None:
    count = _check(guesses, chosen)
    keep_matching_kernel[(guesses.shape[0],)](
        guesses,
        chosen,
        guesses.stride(0),
        NUM_GUESSES=guesses.shape[1],
        NUM_CHOSEN=count,
        LANES=next_power_of_2(max(count, 1)),
        num_warps=1,
    )


def keep_matching_reference_(*, guesses: torch.Tensor, chosen: torch.Tensor) -> None:
    """Do what `keep_matching_` says, row by row."""
    count = _check(guesses, chosen)
    for row, own in zip(guesses.tolist(), chosen.view(-1, count), strict=True):
        for place, token in enumerate(own.tolist()):
            if token < 0 or place >= len(row) or token != row[place]:
                own[place + 1 :] = NO_TOKEN
                break


keep_matching_ = Op(
    "keep_matching", writes=("chosen",), triton=_launch_keep_matching, reference=keep_matching_reference_, strided=("guesses",)
)
"""Make every chosen token -1 that stands behind one that differs from its guess.

A model that reads a row's guesses in one pass chooses, behind each of them, the token it would have drafted itself. As long as its choices
equal the guesses, those behind them count.

Args:
    guesses: [R, G] int32, -1 for none.
    chosen: [R * C] int32, row by row, in place; choice c stands where guess c does.

Raises:
    ArgumentError: shapes that do not fit. Nothing was written.
"""
