"""Cheap host checks that the launchers of caller-facing kernels share. They read shapes and dtypes, never contents."""

from typing import Any

import torch
from numpy.typing import NDArray

from funcspec.errors import ArgumentTypeError, refuse

INDEX_DTYPES = (torch.int32, torch.int64)
OVERFLOWS = ("reference", "freeze")


def check_index_array(name: str, array: torch.Tensor, length: int) -> None:
    """Refuse what a kernel cannot address as `length` consecutive indices.

    Args:
        name: the argument, as the caller spells it.
        array: what should be a contiguous 1-D int32 or int64 array; it may be longer than needed.
        length: number of entries that will be read or written.

    Raises:
        ArgumentTypeError: another dtype.
        ArgumentError: too short, not 1-D or not contiguous.
    """
    if array.dtype not in INDEX_DTYPES:
        refuse(name, "int32 or int64", array.dtype, "convert it once, outside the loop", ArgumentTypeError)
    if array.dim() != 1 or array.shape[0] < length:
        refuse(name, f"a 1-D array of at least {length} entries", f"shape {tuple(array.shape)}", "pass arrays that belong to one batch")
    if not array.is_contiguous():
        refuse(name, "consecutive entries", f"stride {array.stride(0)}", "pass a contiguous array")


def check_index_matrix(name: str, matrix: torch.Tensor, rows: int) -> None:
    """Refuse what a kernel cannot address as at least `rows` rows of consecutive indices; rows may be any stride apart.

    Raises:
        ArgumentTypeError: neither int32 nor int64.
        ArgumentError: not 2-D, too few rows, or columns that are not consecutive.
    """
    if matrix.dtype not in INDEX_DTYPES:
        refuse(name, "int32 or int64", matrix.dtype, "convert it once, outside the loop", ArgumentTypeError)
    if matrix.dim() != 2 or matrix.shape[0] < rows:
        refuse(name, f"a 2-D array of at least {rows} rows", f"shape {tuple(matrix.shape)}", "pass arrays that belong to one batch")
    if matrix.shape[1] > 1 and matrix.stride(1) != 1:
        refuse(name, "consecutive columns", f"strides {matrix.stride()}", "pass rows that are contiguous")


def check_positive(name: str, value: int) -> None:
    """Refuse a size that is not at least 1.

    Raises:
        ArgumentError: zero or negative.
    """
    if value < 1:
        refuse(name, "at least 1", value, "pass the size the arrays were made with")


def check_overflow(overflow: str) -> None:
    """Refuse an unknown policy for the length limit.

    Raises:
        ArgumentError: neither "reference" nor "freeze".
    """
    if overflow not in OVERFLOWS:
        refuse("overflow", "'reference' or 'freeze'", repr(overflow), "use one of these")


def check_rows(rows: int, names: tuple[str, ...], arrays: tuple[torch.Tensor | NDArray[Any], ...]) -> None:
    """Refuse arrays that do not have exactly one entry for each row."""
    for name, array in zip(names, arrays, strict=True):
        if array.shape != (rows,):
            refuse(name, f"one entry for each of {rows} rows", f"shape {tuple(array.shape)}", "pass arrays of one batch")
