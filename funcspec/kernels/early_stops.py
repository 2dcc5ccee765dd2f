"""Keep rows from stopping too early: logits in which the stop ids of rows that are still too short are -inf."""

import torch

from funcspec.errors import ArgumentTypeError, refuse
from funcspec.kernels._triton import jit, tl
from funcspec.kernels.op import Op

BLOCK = 1024


@jit
def mask_early_stops_kernel(
    logits_ptr,  # [T, V]
    token_rows_ptr,  # [T] int32
    positions_ptr,  # [T] int32
    stop_ids_ptr,  # [R, S] int32
    min_len_ptr,  # [R] int32
    out_logits_ptr,  # [T, V], written
    logits_stride,
    vocab_size,
    MAX_STOPS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    place = tl.program_id(0).to(tl.int64)
    row = tl.load(token_rows_ptr + place).to(tl.int64)
    if row >= 0:
        token = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
        inside = token < vocab_size
        logits = tl.load(logits_ptr + place * logits_stride + token, mask=inside)
        if tl.load(positions_ptr + place) + 1 < tl.load(min_len_ptr + row):
            for index in range(MAX_STOPS):
                logits = tl.where(token == tl.load(stop_ids_ptr + row * MAX_STOPS + index), float("-inf"), logits)
        tl.store(out_logits_ptr + place * vocab_size + token, logits, mask=inside)


def _check(
    logits: torch.Tensor,
    token_rows: torch.Tensor,
    positions: torch.Tensor,
    stop_ids: torch.Tensor,
    min_len: torch.Tensor,
    out_logits: torch.Tensor,
) -> None:
    if logits.dtype not in (torch.float32, torch.bfloat16, torch.float16):
        refuse("logits", "float32, bfloat16 or float16", logits.dtype, "let the model return one of these", ArgumentTypeError)
    if logits.dim() != 2:
        refuse("logits", "shape [T, V]", f"shape {tuple(logits.shape)}", "pass rows of logits")
    count, rows = logits.shape[0], min_len.shape[0]
    if out_logits.dtype != logits.dtype:
        refuse("out_logits", f"{logits.dtype}, as the logits are", out_logits.dtype, "allocate it like the logits", ArgumentTypeError)
    if out_logits.shape != logits.shape:
        found = f"shape {tuple(out_logits.shape)}"
        refuse("out_logits", f"an array of shape {tuple(logits.shape)}", found, "allocate it like the logits")
    expected = {"token_rows": (token_rows, 1, count), "positions": (positions, 1, count), "stop_ids": (stop_ids, 2, rows)}
    for name, (array, dimensions, least) in {**expected, "min_len": (min_len, 1, rows)}.items():
        if array.dtype != torch.int32:
            refuse(name, "int32", array.dtype, "convert it once, outside the loop", ArgumentTypeError)
        if array.dim() != dimensions or array.shape[0] != least:
            refuse(name, f"{least} entries", f"shape {tuple(array.shape)}", "pass arrays of one batch")


def _launch_mask_early_stops(
    *,
    logits: torch.Tensor,
    token_rows: torch.Tensor,
    positions: torch.Tensor,
    stop_ids: torch.Tensor,
    min_len: torch.Tensor,
    out_logits: torch.Tensor,
) -> None:
    _check(logits, token_rows, positions, stop_ids, min_len, out_logits)
    count, vocab_size = logits.shape
    if count == 0:
        return
    mask_early_stops_kernel[(count, -(-vocab_size // BLOCK))](
        logits,
        token_rows,
        positions,
        stop_ids,
        min_len,
        out_logits,
        logits.stride(0),
        vocab_size,
        MAX_STOPS=stop_ids.shape[1],
        BLOCK=BLOCK,
    )


def mask_early_stops_reference_(
    *,
    logits: torch.Tensor,
    token_rows: torch.Tensor,
    positions: torch.Tensor,
    stop_ids: torch.Tensor,
    min_len: torch.Tensor,
    out_logits: torch.Tensor,
) -> None:
    """Do what `mask_early_stops_` says, place by place."""
    _check(logits, token_rows, positions, stop_ids, min_len, out_logits)
    for place, row in enumerate(token_rows.tolist()):
        if row < 0:
            continue
        out_logits[place] = logits[place]
        if int(positions[place]) + 1 < int(min_len[row]):
            stops = [token for token in stop_ids[row].tolist() if 0 <= token < logits.shape[1]]
            out_logits[place, stops] = -float("inf")


mask_early_stops_ = Op(
    "mask_early_stops",
    writes=("out_logits",),
    triton=_launch_mask_early_stops,
    reference=mask_early_stops_reference_,
    strided=("logits",),
)
"""Copy logits, with the stop ids of rows that may not stop yet made -inf.

The logits of a place choose the token behind its position p, the (p + 2)nd of its row; where that row is to have more than p + 1 tokens
before it may stop (p + 1 < min_len), its stop ids are forbidden. Places without a row are left alone.

Args:
    logits: [T, V] float32, bfloat16 or float16; any row stride, columns consecutive.
    token_rows: [T] int32, the row of each place, -1 for padding.
    positions: [T] int32.
    stop_ids: [R, S] int32, -1 for unused.
    min_len: [R] int32, committed tokens a row must have before a stop id may follow.
    out_logits: [T, V] of the logits' dtype, contiguous, written.

Raises:
    ArgumentError: shapes that do not fit.
    ArgumentTypeError: another dtype.
"""
