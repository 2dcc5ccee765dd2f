"""Kernels inside JAX programs: any in-place operation as a pure JAX function.

XLA sees a functional operation whose results alias its written arguments. It donates or copies as it must, and the launcher
writes in place, through DLPack and on XLA's own stream.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import jax
import numpy as np
import torch
from jax.experimental.buffer_callback import buffer_callback

from funcspec.errors import ArgumentTypeError, refuse
from funcspec.kernels.op import Backend, Op


def lift(op: Op, *, backend: Backend | None = None) -> Callable[..., dict[str, jax.Array]]:
    """Turn an operation into a pure JAX function, for use eagerly, in `jit`, `scan` and `while_loop`.

    The function takes the operation's arguments by keyword. Arrays may be traced; everything else (sizes, flags, None) is static.
    It returns the new values of the arguments that the operation writes. The arrays it was given stay as they were, unless JAX
    was told to donate them; then the operation works in their memory.

    Args:
        op: the operation, for example `funcspec.kernels.window_inputs.window_inputs_`.
        backend: "reference", "host" or "triton"; None chooses by device.

    Returns:
        a function from keyword arguments to a dictionary of the written arrays by argument name.

    Raises:
        ArgumentTypeError: (when called) a written argument is missing or is no array, or an array has 64-bit elements that JAX
            would silently narrow.
        jax.errors.JaxRuntimeError: (when run) the operation refused its arguments; the message names the operation.

    Example:
        >>> import jax.numpy as jnp
        >>> from funcspec.kernels.sample_indices import prepare_inputs_padded_
        >>> starts, drafts, valid = (jnp.array(x, jnp.int32) for x in ([0, 4, 9, 12], [3, 3, 5], [2, 1, 3]))
        >>> out = lift(prepare_inputs_padded_)(
        ...     cu_num_draft_tokens=drafts,
        ...     valid_sampled_tokens_count=valid,
        ...     query_start_loc=starts,
        ...     out_token_indices=jnp.zeros(3, jnp.int32),
        ...     out_num_rejected=jnp.zeros(3, jnp.int32),
        ... )
        >>> out["out_token_indices"].tolist(), out["out_num_rejected"].tolist()
        ([1, 8, 11], [2, 0, 0])
    """

    def lifted(**arguments: Any) -> dict[str, jax.Array]:
        arrays = {name: value for name, value in arguments.items() if _is_array(value)}
        static = {name: value for name, value in arguments.items() if name not in arrays}
        for name, value in arrays.items():
            _check(op, name, value)
        written = [name for name in op.writes if static.get(name, ...) is not None]
        for name in written:
            if name not in arrays:
                found = type(arguments[name]).__name__ if name in arguments else "nothing"
                refuse(name, f"an array, as {op.name}_ writes it", found, "pass an array of the documented shape", ArgumentTypeError)
        read = [name for name in arrays if name not in written]

        def run(context: Any, outputs: Any, *inputs: Any) -> None:
            # The written inputs alias the outputs; only the latter may be written.
            views = dict(zip(written, map(torch.from_dlpack, outputs), strict=True))
            views |= dict(zip(read, map(torch.from_dlpack, inputs[len(written) :]), strict=True))
            with _on_stream(context, views):
                try:
                    op(backend=backend, **views, **static)
                except Exception as error:
                    raise RuntimeError(f"{op.name}_: {error}") from error

        call = buffer_callback(
            run,
            tuple(jax.ShapeDtypeStruct(arrays[name].shape, arrays[name].dtype) for name in written),
            # A pure operation whose results are the whole carry of a while_loop is hoisted out of it by XLA; then it never ends.
            has_side_effect=True,
            input_output_aliases={index: index for index in range(len(written))},
            command_buffer_compatible=True,
        )
        return dict(zip(written, call(*(arrays[name] for name in written + read)), strict=True))

    return lifted


def _is_array(value: Any) -> bool:
    return isinstance(value, jax.Array | np.ndarray)


def _check(op: Op, name: str, value: Any) -> None:
    if np.dtype(value.dtype).itemsize == 8 and not jax.config.read("jax_enable_x64"):
        refuse(name, "32-bit elements or fewer", value.dtype, "use int32 or float32, or enable jax_enable_x64", ArgumentTypeError)
    if isinstance(value, np.ndarray) and name in op.writes:
        refuse(
            name, "a jax.Array, as a pure function writes nothing of yours", "a numpy.ndarray", "wrap it with jnp.array", ArgumentTypeError
        )


def _on_stream(context: Any, views: dict[str, torch.Tensor]) -> AbstractContextManager[Any]:
    """Make torch, and so Triton, launch on XLA's stream."""
    if any(view.is_cuda for view in views.values()):
        return torch.cuda.stream(torch.cuda.ExternalStream(context.stream))
    return nullcontext()


__all__ = ["lift"]
