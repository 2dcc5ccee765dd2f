"""One record per kernel: its name, the arguments it writes, its Triton launcher and its torch reference."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch

from funcspec.errors import ArgumentTypeError, BackendError, refuse
from funcspec.kernels._triton import HAS_TRITON, INTERPRETED, INTERPRETER_LOCK

Backend = Literal["reference", "host", "triton"]

NO_VIEW = (None, None)
HOST_ROWS = 16
"""Most rows for which the host form of an op is the quickest on a CPU."""


@dataclass(frozen=True)
class Op:
    """An in-place operation on buffers that the caller owns.

    Calling it runs the Triton launcher for CUDA tensors and, for CPU tensors, the host form if there is one, else the torch
    reference; `backend=` overrides the choice. Arguments go by keyword. It returns None and works in the buffers it is given.

    Attributes:
        name: the operation's name.
        writes: names of the arguments it writes; all others are only read.
        triton: the Triton launcher.
        reference: the same contract in plain torch; the specification.
        strided: names of the arguments whose last dimension alone must have no gaps: the kernel is told how far the others lie
            apart. In all other arguments every entry must lie behind the one before it.
        host: the same contract on NumPy views of CPU tensors, row by row. For the few rows a CPU decodes, the small integer
            work of a round is mostly the overhead of calls, and this has the least. It serves arguments with up to
            `HOST_ROWS` rows of `tokens`; more rows go to the reference.
    """

    name: str
    writes: tuple[str, ...]
    triton: Callable[..., None]
    reference: Callable[..., None]
    strided: tuple[str, ...] = ()
    host: Callable[..., None] | None = None

    def __call__(self, *, backend: Backend | None = None, **arguments: Any) -> None:
        """Run the operation.

        Args:
            backend: "reference", "host", "triton" or None (choose by device).
            **arguments: the launcher's arguments; arrays may be anything that speaks DLPack.

        Raises:
            ArgumentTypeError: a written argument cannot be written in place.
            ArgumentError: an array has gaps between its entries.
            BackendError: Triton was asked for where it cannot run.
        """
        if backend is None and self.host is not None and len(arguments["tokens"]) <= HOST_ROWS:
            views = self._host_views(arguments)
            if views is not None:
                self.host(**views)
                return
        device = None
        for name, value in arguments.items():
            if not isinstance(value, torch.Tensor):
                if not hasattr(value, "__dlpack__") or isinstance(value, np.generic):
                    continue
                value = arguments[name] = self._import(name, value)
            if not value.is_contiguous():
                self._check_gaps(name, value)
            if device is None:
                device = value.device.type
        if backend is None:
            backend = "triton" if device == "cuda" else "reference"
        if backend == "host" and self.host is not None and (views := self._host_views(arguments)) is not None:
            self.host(**views)
        elif backend == "reference":
            self.reference(**arguments)
        elif backend == "triton":
            with _launching(device):
                self.triton(**arguments)
        else:
            refuse("backend", f"a backend of {self.name}_ for {device} tensors", repr(backend), "use 'reference', 'triton' or None")

    def _import(self, name: str, value: Any) -> torch.Tensor:
        if name in self.writes and (
            type(value).__module__.startswith("jax") or (isinstance(value, np.ndarray) and not value.flags.writeable)
        ):
            refuse(
                name,
                "a buffer that may be written in place",
                type(value).__name__,
                f"pass a torch tensor or a writable numpy array to {self.name}_",
                ArgumentTypeError,
            )
        return torch.from_numpy(value) if isinstance(value, np.ndarray) and value.flags.writeable else torch.from_dlpack(value)

    def _check_gaps(self, name: str, array: torch.Tensor) -> None:
        """Refuse a layout that the kernel would read wrong."""
        if array.numel() and not (name in self.strided and (array.stride(-1) == 1 or array.shape[-1] == 1)):
            expected = "consecutive columns" if name in self.strided else "consecutive entries"
            refuse(name, expected, f"strides {array.stride()}", "pass a contiguous array")

    def _host_views(self, arguments: dict[str, Any]) -> dict[str, Any] | None:
        """Arguments with CPU tensors as NumPy views; None if any array is something else.

        A view is made once and kept on its tensor: launches reuse the same buffers thousands of times a second.
        """
        views = {}
        for name, value in arguments.items():
            if type(value) is torch.Tensor:
                if value.is_cuda:
                    return None
                if not value.is_contiguous():
                    self._check_gaps(name, value)
                address, view = value.__dict__.get("_funcspec_host_view", NO_VIEW)
                if address != value.data_ptr() or view.shape != value.shape:
                    view = value.numpy()
                    value._funcspec_host_view = value.data_ptr(), view  # type: ignore[attr-defined]
                views[name] = view
            elif hasattr(value, "__dlpack__"):
                return None
            else:
                views[name] = value
        return views


@contextmanager
def _launching(device: str | None) -> Iterator[None]:
    """Guard a Triton launch: refuse where it cannot run, serialise interpreted ones."""
    if not HAS_TRITON:
        raise BackendError(
            "backend: expected Triton to be installed, got no triton package. Fix: install triton, or use backend='reference'."
        )
    if INTERPRETED:
        with INTERPRETER_LOCK:
            yield
    elif device == "cuda":
        yield
    else:
        raise BackendError(
            f"backend: expected CUDA tensors or the interpreter for 'triton', got {device} tensors. "
            "Fix: set TRITON_INTERPRET=1 before triton is first imported, or use backend='reference'."
        )


def next_power_of_2(n: int) -> int:
    """Smallest power of two that is at least `n`; 1 for every n below 2.

    Example:
        >>> [next_power_of_2(n) for n in (-3, 0, 1, 5, 8, 513)]
        [1, 1, 1, 8, 8, 1024]
    """
    return 1 << max(n - 1, 0).bit_length()
