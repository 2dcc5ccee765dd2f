"""Kernels and models of torch inside JAX programs.

`lift` turns an in-place operation into a pure JAX function, `jax_model` does the same with the forward of a torch model. XLA sees a
functional operation whose results alias its written arguments. It donates or copies as it must, and the launcher writes in place,
through DLPack and on XLA's own stream.
"""

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, get_args

import jax
import jax.numpy as jnp
import numpy as np
import torch
from jax.experimental.buffer_callback import buffer_callback

from funcspec.errors import ArgumentTypeError, ModelError, refuse, type_name
from funcspec.kernels.op import Backend, Op
from funcspec.models.base import KV, ForwardBatch, KVSpec, Model

JAX_DTYPES: Mapping[torch.dtype, Any] = {
    torch.bool: jnp.bool_,
    torch.int8: jnp.int8,
    torch.uint8: jnp.uint8,
    torch.int16: jnp.int16,
    torch.int32: jnp.int32,
    torch.float16: jnp.float16,
    torch.bfloat16: jnp.bfloat16,
    torch.float32: jnp.float32,
    torch.float8_e4m3fn: jnp.float8_e4m3fn,
    torch.float8_e5m2: jnp.float8_e5m2,
}
"""JAX's dtype for each of torch's that crosses without being narrowed."""

TRAITS = (
    "cache_entries",
    "features",
    "hidden_size",
    "num_layers",
    "num_heads",
    "input_vocab_size",
    "output_token_ids",
    "residual_multiplier",
    "rope_axes",
    "vocab_fingerprint",
)
"""What a model may say about itself besides the members of `Model`; drafters and states look for it."""


def jax_dtype(dtype: torch.dtype) -> Any:
    """JAX's name of a torch dtype.

    Raises:
        ArgumentTypeError: JAX would silently narrow it.

    Example:
        >>> jax_dtype(torch.bfloat16).__name__
        'bfloat16'
    """
    if not isinstance(dtype, torch.dtype) or dtype not in JAX_DTYPES:
        refuse("dtype", "a dtype of at most 32 bits", dtype, "use int32 or float32", ArgumentTypeError)
    return JAX_DTYPES[dtype]


def lift(op: Op, *, backend: Backend | None = None) -> Callable[..., dict[str, jax.Array]]:
    """Turn an operation into a pure JAX function, for use eagerly, in `jit`, `scan` and `while_loop`.

    The function takes the operation's arguments by keyword. Arrays may be traced; everything else (sizes, flags, None) is static.
    It returns the new values of the arguments that the operation writes. The arrays it was given stay as they were, unless JAX
    was told to donate them; then the operation works in their memory. An argument that the operation writes as a whole may be
    given as a `jax.ShapeDtypeStruct`: then no array has to be made for it first.

    Args:
        op: the operation, for example `funcspec.kernels.window_inputs.window_inputs_`.
        backend: "reference", "host" or "triton"; None chooses by device.

    Returns:
        a function from keyword arguments to a dictionary of the written arrays by argument name.

    Raises:
        ArgumentError, ArgumentTypeError: `op` is no operation, or there is no such backend.
        ArgumentTypeError: (when called) a written argument is missing or is no array, or an array has 64-bit elements that JAX
            would silently narrow.
        jax.errors.JaxRuntimeError: (when run) the operation refused its arguments; the message names the operation.

    Example:
        >>> from funcspec.kernels.sample_indices import prepare_inputs_padded_
        >>> starts, drafts, valid = (jnp.array(x, jnp.int32) for x in ([0, 4, 9, 12], [3, 3, 5], [2, 1, 3]))
        >>> out = lift(prepare_inputs_padded_)(
        ...     cu_num_draft_tokens=drafts,
        ...     valid_sampled_tokens_count=valid,
        ...     query_start_loc=starts,
        ...     out_token_indices=jax.ShapeDtypeStruct((3,), jnp.int32),
        ...     out_num_rejected=jax.ShapeDtypeStruct((3,), jnp.int32),
        ... )
        >>> out["out_token_indices"].tolist(), out["out_num_rejected"].tolist()
        ([1, 8, 11], [2, 0, 0])
    """
    if not isinstance(op, Op):
        refuse("op", "an operation of funcspec.kernels", type_name(op), "pass one, such as window_inputs_", ArgumentTypeError)
    if backend is not None and (not isinstance(backend, str) or backend not in get_args(Backend)):
        refuse("backend", "'reference', 'host', 'triton' or None", repr(backend)[:60], "leave it out to choose by device")

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
        updated = [name for name in written if not isinstance(arrays[name], jax.ShapeDtypeStruct)]
        read = [name for name in arrays if name not in written]
        call = buffer_callback(
            _OpCall(op, backend, tuple(written), tuple(updated), tuple(read), tuple(static.items())),
            tuple(jax.ShapeDtypeStruct(arrays[name].shape, arrays[name].dtype) for name in written),
            # A pure operation whose results are the whole carry of a while_loop is hoisted out of it by XLA; then it never ends.
            has_side_effect=True,
            input_output_aliases={index: written.index(name) for index, name in enumerate(updated)},
            command_buffer_compatible=True,
        )
        return dict(zip(written, call(*(arrays[name] for name in updated + read)), strict=True))

    return lifted


@dataclass(frozen=True)
class _OpCall:
    """What XLA calls back. Equal calls compile once, also when an operation is called eagerly again and again."""

    op: Op
    backend: Backend | None
    written: tuple[str, ...]
    updated: tuple[str, ...]
    read: tuple[str, ...]
    static: tuple[tuple[str, Any], ...]

    def __call__(self, context: Any, outputs: Any, *inputs: Any) -> None:
        # The updated inputs alias their outputs; only the latter may be written.
        views = dict(zip(self.written, map(torch.from_dlpack, outputs), strict=True))
        views |= dict(zip(self.read, map(torch.from_dlpack, inputs[len(self.updated) :]), strict=True))
        with _on_stream(context, views.values()):
            try:
                self.op(backend=self.backend, **views, **dict(self.static))
            except Exception as error:
                raise RuntimeError(f"{self.op.name}_: {error}") from error


def _is_array(value: Any) -> bool:
    return isinstance(value, jax.Array | np.ndarray | jax.ShapeDtypeStruct)


def _check(op: Op, name: str, value: Any) -> None:
    if np.dtype(value.dtype).itemsize == 8 and not jax.config.read("jax_enable_x64"):
        refuse(name, "32-bit elements or fewer", value.dtype, "use int32 or float32, or enable jax_enable_x64", ArgumentTypeError)
    if isinstance(value, np.ndarray) and name in op.writes:
        refuse(
            name, "a jax.Array, as a pure function writes nothing of yours", "a numpy.ndarray", "wrap it with jnp.array", ArgumentTypeError
        )
    if isinstance(value, jax.ShapeDtypeStruct) and name not in op.writes:
        refuse(name, f"an array, as {op.name}_ reads it", "only a shape", "pass its values", ArgumentTypeError)


def _on_stream(context: Any, views: Any) -> AbstractContextManager[Any]:
    """Make torch, and so Triton, launch on XLA's stream."""
    if any(view.is_cuda for view in views):
        return torch.cuda.stream(torch.cuda.ExternalStream(context.stream))
    return nullcontext()


@jax.tree_util.register_static
@dataclass(frozen=True)
class LiftedModel:
    """A torch model as a model of JAX; see `jax_model`."""

    model: Model

    framework = "jax"

    def __getattr__(self, name: str) -> Any:
        """What else the torch model says about itself, if it does: what it reads, and what it returns."""
        if name not in TRAITS:
            raise AttributeError(f"{type(self).__name__} has no attribute {name!r}")
        return getattr(self.model, name)

    @property
    def vocab_size(self) -> int:
        """The torch model's."""
        return self.model.vocab_size

    @property
    def max_len(self) -> int:
        """The torch model's."""
        return self.model.max_len

    @property
    def kv_spec(self) -> KVSpec:
        """The torch model's."""
        return self.model.kv_spec

    def forward(self, kv: KV, batch: ForwardBatch) -> tuple[KV, jax.Array, tuple[jax.Array, ...]]:
        """Run the torch model on XLA's stream. Its cache is updated in place where JAX donates; all else comes as float32.

        Raises:
            ModelError: hidden states are wanted of a model that does not say its `hidden_size`.
        """
        names = tuple(kv)
        count = (batch.input_ids if batch.logits_indices is None else batch.logits_indices).shape[0]
        floats = [(count, self.vocab_size), *self._hidden_shapes(batch, count)]
        shapes = [jax.ShapeDtypeStruct(kv[name].shape, kv[name].dtype) for name in names]
        call = buffer_callback(
            _ModelCall(self.model, names),
            (*shapes, *(jax.ShapeDtypeStruct(shape, jnp.float32) for shape in floats)),
            has_side_effect=True,
            input_output_aliases={index: index for index in range(len(names))},
        )
        found = call(*(kv[name] for name in names), batch)
        return dict(zip(names, found, strict=False)), found[len(names)], tuple(found[len(names) + 1 :])

    def _hidden_shapes(self, batch: ForwardBatch, count: int) -> list[tuple[int, int]]:
        """Shapes of the hidden states that a pass is to return: those of layers, or what a draft hands on to its own next pass."""
        if batch.hidden_layers:
            size = getattr(self, "hidden_size", None)
            if not isinstance(size, int):
                expected = "a model that says its hidden_size, as hidden states are wanted"
                refuse("model", expected, type(self.model).__name__, "give it that attribute, an int", ModelError)
            size *= getattr(self, "residual_multiplier", 1)
            return [(batch.input_ids.shape[0], size)] * len(batch.hidden_layers)
        spec = getattr(self, "features", None)
        return [(count, spec.feedback)] if spec is not None and spec.feedback and count else []


@dataclass(frozen=True)
class _ModelCall:
    """What XLA calls back for a forward."""

    model: Model
    names: tuple[str, ...]

    def __call__(self, context: Any, outputs: Any, *inputs: Any) -> None:
        views = list(map(torch.from_dlpack, outputs))
        caches, logits, hidden = views[: len(self.names)], views[len(self.names)], views[len(self.names) + 1 :]
        batch = jax.tree.map(torch.from_dlpack, inputs[-1])
        with _on_stream(context, [logits]), torch.no_grad():
            _, found, states = self.model.forward(dict(zip(self.names, caches, strict=True)), batch)
            if tuple(found.shape) != tuple(logits.shape):
                raise ModelError(
                    f"forward: expected float logits {list(logits.shape)}, got {list(found.shape)}. "
                    "Fix: return logits at batch.logits_indices only (at all tokens if it is None)."
                )
            wanted, got = ([list(one.shape) for one in some] for some in (hidden, states))
            if wanted and got != wanted:
                raise ModelError(
                    f"forward: expected hidden states {wanted}, got {got}. "
                    "Fix: return one for each of batch.hidden_layers, as wide as hidden_size says, or what features.feedback promises."
                )
            logits.copy_(found)
            for view, state in zip(hidden, states, strict=False):
                view.copy_(state)


def jax_model(model: Model) -> LiftedModel:
    """Make a JAX model of a torch model, for states of JAX: eagerly and inside programs.

    The torch model runs as it is, called back by XLA; its weights stay torch's. Its logits are handed over as float32, which is exact
    for every dtype a model may return, so that the same tokens are chosen. Such a call is not recorded into XLA's command buffers.
    Hidden states are handed over likewise, those of a target's layers and those that a draft hands on to itself.

    Args:
        model: a torch model that writes its cache in place. As a target whose hidden states are read it has an attribute `hidden_size`,
            an int; a draft that reads them says in `features` what it returns.

    Raises:
        ArgumentTypeError: it is no model, or is one of JAX already.

    Example:
        >>> import funcspec as fs
        >>> jax_model(fs.models.ChecksumModel()).framework
        'jax'
    """
    if not isinstance(model, Model) or isinstance(model, type) or getattr(model, "framework", "torch") != "torch":
        refuse("model", "a model of torch", type(model).__name__, "a model of JAX needs no lifting", ArgumentTypeError)
    return LiftedModel(model)


__all__ = ["JAX_DTYPES", "LiftedModel", "jax_dtype", "jax_model", "lift"]
