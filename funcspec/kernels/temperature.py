"""Divide rows of logits by the temperatures of their requests."""

import torch

from funcspec.errors import ArgumentTypeError, refuse
from funcspec.kernels._checks import check_index_array
from funcspec.kernels._triton import jit, tl
from funcspec.kernels.op import Op

BLOCK = 1024
LOGIT_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@jit
def _to_bfloat16(x):
    """float32 rounded to nearest, ties to even; the interpreter's own conversion cuts off."""
    bits = x.to(tl.int32, bitcast=True)
    rounded = ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16) << 16
    return tl.where(x == x, rounded.to(tl.float32, bitcast=True), x).to(tl.bfloat16)


@jit
def apply_temperature_kernel(
    logits_ptr,  # [T, V], written
    idx_mapping_ptr,  # [T]
    temperature_ptr,  # [S] float32
    logits_stride,
    vocab_size,
    num_states,
    IS_BFLOAT16: tl.constexpr,
    BLOCK: tl.constexpr,
):
    place = tl.program_id(0).to(tl.int64)
    state = tl.load(idx_mapping_ptr + place).to(tl.int64)
    temperature = tl.load(temperature_ptr + state, mask=(state >= 0) & (state < num_states), other=0.0)
    if (temperature != 0) & (temperature != 1):
        token = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
        inside = token < vocab_size
        logits_at = logits_ptr + place * logits_stride + token
        divided = tl.div_rn(tl.load(logits_at, mask=inside).to(tl.float32), temperature)
        tl.store(logits_at, _to_bfloat16(divided) if IS_BFLOAT16 else divided, mask=inside)


def _check(logits: torch.Tensor, idx_mapping: torch.Tensor, temperature: torch.Tensor) -> None:
    if logits.dtype not in LOGIT_DTYPES:
        refuse("logits", "float32, bfloat16 or float16", logits.dtype, "let the model return one of these", ArgumentTypeError)
    if logits.dim() != 2:
        refuse("logits", "shape [T, V]", f"shape {tuple(logits.shape)}", "pass rows of logits")
    check_index_array("idx_mapping", idx_mapping, logits.shape[0])
    if temperature.dtype != torch.float32:
        refuse("temperature", "float32", temperature.dtype, "convert it once, outside the loop", ArgumentTypeError)
    if temperature.dim() != 1:
        refuse("temperature", "a 1-D array", f"shape {tuple(temperature.shape)}", "pass one temperature for each state")


def _launch_apply_temperature(*, logits: torch.Tensor, idx_mapping: torch.Tensor, temperature: torch.Tensor) -> None:
    _check(logits, idx_mapping, temperature)
    places, vocab_size = logits.shape
    if logits.numel() == 0:
        return
    apply_temperature_kernel[(places, -(-vocab_size // BLOCK))](
        logits,
        idx_mapping,
        temperature,
        logits.stride(0),
        vocab_size,
        temperature.shape[0],
        IS_BFLOAT16=logits.dtype == torch.bfloat16,
        BLOCK=BLOCK,
        num_warps=4,
    )


def apply_temperature_reference_(*, logits: torch.Tensor, idx_mapping: torch.Tensor, temperature: torch.Tensor) -> None:
    """Specify `apply_temperature_` in plain torch."""
    _check(logits, idx_mapping, temperature)
    state = idx_mapping[: logits.shape[0]].long()
    exists = (state >= 0) & (state < temperature.shape[0])
    if not exists.any():
        return
    heat = torch.where(exists, temperature[torch.where(exists, state, 0)], 0)[:, None]
    logits.copy_(torch.where((heat == 0) | (heat == 1), logits.float(), logits.float() / heat))


apply_temperature_ = Op(
    "apply_temperature",
    writes=("logits",),
    triton=_launch_apply_temperature,
    reference=apply_temperature_reference_,
    strided=("logits",),
)
"""Divide rows of logits by the temperatures of their requests, in place.

The division is in float32, rounded to nearest, and then rounded to the logits' dtype, on every backend. Rows at temperature 0
(greedy) and 1, and rows whose state is outside of [0, S), are left alone: for the latter no temperature is read.

Args:
    logits: [T, V] float32, bfloat16 or float16, in place; any row stride, columns consecutive.
    idx_mapping: [T] int32 or int64, request state of each row; -1 for none.
    temperature: [S] float32, 0 or positive and finite.

Raises:
    ArgumentError, ArgumentTypeError: arrays that do not belong together; nothing has been written.
"""
