"""Cheap host checks that the launchers of caller-facing kernels share. They read shapes and dtypes, never contents."""

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from funcspec.errors import ArgumentTypeError, refuse

INDEX_DTYPES = (torch.int32, torch.int64)
INTEGERS = frozenset((torch.int32, torch.int64, np.dtype(np.int32), np.dtype(np.int64)))
FLOAT32 = frozenset((torch.float32, np.dtype(np.float32)))
OVERFLOWS = ("reference", "freeze")


def check_index_array(name: str, array: torch.Tensor, length: int) -> None:
    """Refuse what a kernel cannot address as `length` indices.

    Args:
        name: the argument, as the caller spells it.
        array: what should be a 1-D int32 or int64 array; it may be longer than needed.
        length: number of entries that will be read or written.

    Raises:
        ArgumentTypeError: another dtype.
        ArgumentError: too short or not 1-D.
    """
    if array.dtype not in INDEX_DTYPES:
        refuse(name, "int32 or int64", array.dtype, "convert it once, outside the loop", ArgumentTypeError)
    if array.dim() != 1 or array.shape[0] < length:
        refuse(name, f"a 1-D array of at least {length} entries", f"shape {tuple(array.shape)}", "pass arrays that belong to one batch")


def check_index_matrix(name: str, matrix: torch.Tensor, rows: int) -> None:
    """Refuse what a kernel cannot address as at least `rows` rows of indices.

    Raises:
        ArgumentTypeError: neither int32 nor int64.
        ArgumentError: not 2-D, or too few rows.
    """
    if matrix.dtype not in INDEX_DTYPES:
        refuse(name, "int32 or int64", matrix.dtype, "convert it once, outside the loop", ArgumentTypeError)
    if matrix.dim() != 2 or matrix.shape[0] < rows:
        refuse(name, f"a 2-D array of at least {rows} rows", f"shape {tuple(matrix.shape)}", "pass arrays that belong to one batch")


def check_flags(name: str, flags: torch.Tensor, length: int) -> None:
    """Refuse what a kernel cannot address as `length` flags.

    Raises:
        ArgumentTypeError: not bool.
        ArgumentError: too short or not 1-D.
    """
    if flags.dtype != torch.bool:
        refuse(name, "bool", flags.dtype, "compare with 0 once, outside the loop", ArgumentTypeError)
    if flags.dim() != 1 or flags.shape[0] < length:
        found = f"shape {tuple(flags.shape)}"
        refuse(name, f"a 1-D array of at least {length} flags", found, "pass arrays that belong to one batch")


def check_other_buffer(name: str, out: torch.Tensor, read_name: str, read: torch.Tensor) -> None:
    """Refuse an output that is an input of which other rows still read.

    Raises:
        ArgumentError: both start at the same address.
    """
    if out.data_ptr() == read.data_ptr() and out.numel() and read.numel():
        refuse(name, f"another buffer than {read_name}", "the same one", "rows read what others have written by then: use two buffers")


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
    """Refuse arrays that are not exactly one integer for each row; temperatures are float32.

    Raises:
        ArgumentTypeError: another dtype.
        ArgumentError: another shape.
    """
    for name, array in zip(names, arrays, strict=True):
        if array.shape != (rows,):
            refuse(name, f"one entry for each of {rows} rows", f"shape {tuple(array.shape)}", "pass arrays of one batch")
        if array.dtype not in (FLOAT32 if name == "temperature" else INTEGERS):
            expected = "float32" if name == "temperature" else "int32 or int64"
            refuse(name, expected, array.dtype, "convert it once, outside the loop", ArgumentTypeError)


def check_matrix(name: str, matrix: torch.Tensor | NDArray[Any], rows: int) -> None:
    """Refuse what is not that many rows of integers.

    Raises:
        ArgumentTypeError: another dtype.
        ArgumentError: another shape.
    """
    if matrix.ndim != 2 or matrix.shape[0] != rows:
        refuse(name, f"{rows} rows", f"shape {tuple(matrix.shape)}", "pass arrays of one batch")
    if matrix.dtype not in INTEGERS:
        refuse(name, "int32 or int64", matrix.dtype, "convert it once, outside the loop", ArgumentTypeError)
