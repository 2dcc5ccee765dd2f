"""Lists of tokens as one immutable array: text that a drafter carries with it."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import numpy as np
import torch

from funcspec.constants import NO_TOKEN
from funcspec.errors import ArgumentTypeError, ModelError, refuse
from funcspec.kernels.op import next_power_of_2
from funcspec.models.base import Array, Model

MAX_TOKEN = 2**31 - 2
"""Highest id that a table can hold."""


@dataclass(frozen=True, eq=False)
class TokenTable:
    """Token lists, a line each; a value that nobody writes to, and a leaf of the drafter that holds it.

    Both sizes are powers of two, so that programs and kernels seldom meet a new shape when lists are added; no list fills its line, so that
    end to end they stay apart.

    Attributes:
        tokens: [N, M] int32, -1 where there is no token. On the host; in a JAX program that takes the drafter as an argument, on the
            device. States of torch get a copy on their device, made once.
    """

    tokens: Array
    _tensors: dict[torch.device, torch.Tensor] = field(default_factory=dict, repr=False)

    def beside(self, array: Array) -> Array:
        """The tokens where an array is: on its device, in its framework."""
        if not isinstance(array, torch.Tensor):
            return self.tokens
        if array.device not in self._tensors:
            self._tensors[array.device] = torch.tensor(np.asarray(self.tokens), device=array.device)
        return self._tensors[array.device]

    @property
    def num_used(self) -> int:
        """How many lines there are up to the last one that holds a token."""
        return int(np.flatnonzero((np.asarray(self.tokens) != NO_TOKEN).any(axis=1)).max(initial=-1)) + 1

    def lines(self) -> list[np.ndarray]:
        """The lists, without their padding; empty ones left out."""
        table = np.asarray(self.tokens)
        lengths = table.shape[1] - (table[:, ::-1] != NO_TOKEN).argmax(axis=1)
        return [line[:length] for line, length in zip(table, lengths.tolist(), strict=True) if (line != NO_TOKEN).any()]

    def joined(self, newer: "TokenTable", *, most: int) -> "TokenTable":
        """A table of these lists and newer ones: the newest `most` of them all."""
        lines = [*self.lines(), *newer.lines()]
        return _table(lines[max(len(lines) - most, 0) :])

    def check_target(self, argument: str, target: Model) -> None:
        """Refuse ids that the target does not have.

        Raises:
            ModelError: an id is not below the target's vocabulary size.
        """
        highest = int(np.asarray(self.tokens).max())
        if highest >= target.vocab_size:
            raise ModelError(
                f"{argument}: expected ids of the target, from 0 to {target.vocab_size - 1}, got {highest}. "
                "Fix: pass tokens of the target's tokenizer."
            )


jax.tree_util.register_pytree_node(TokenTable, lambda table: ((table.tokens,), None), lambda _, children: TokenTable(*children))


def token_table(argument: str, tokens: Any) -> TokenTable:
    """Make a table of token lists.

    Args:
        argument: what the caller calls them, for messages.
        tokens: lists of tokens, or an integer array [N, M] of any framework; -1 where there is no token. They are copied.

    Raises:
        ArgumentTypeError: not lists of integers.
        ArgumentError: an id below -1 or above `MAX_TOKEN`.

    Example:
        >>> token_table("tokens", [[5, 6, 7], [8]]).tokens.tolist()
        [[5, 6, 7, -1], [8, -1, -1, -1]]
    """
    return _table([_line(argument, number, line) for number, line in enumerate(_listed(argument, tokens))])


def _table(lines: Sequence[np.ndarray]) -> TokenTable:
    table = np.full((next_power_of_2(len(lines)), next_power_of_2(max(map(len, lines), default=0) + 1)), NO_TOKEN, dtype=np.int32)
    for number, line in enumerate(lines):
        table[number, : len(line)] = line
    table.setflags(write=False)
    return TokenTable(table)


def _listed(argument: str, tokens: Any) -> Sequence[Any]:
    expected, fix = "a list of token lists, or an integer array [N, M]", "wrap a single list in another"
    if isinstance(tokens, torch.Tensor | jax.Array | np.ndarray):
        if tokens.ndim != 2:
            refuse(argument, expected, f"shape {tuple(tokens.shape)}", fix, ArgumentTypeError)
        return list(tokens.cpu().numpy() if isinstance(tokens, torch.Tensor) else np.asarray(tokens))
    if not isinstance(tokens, Sequence) or isinstance(tokens, str | bytes):
        refuse(argument, expected, type(tokens).__name__, fix, ArgumentTypeError)
    return tokens


def _line(argument: str, number: int, line: Any) -> np.ndarray:
    name, expected, fix = f"{argument}[{number}]", "a list of token ids", "pass ids of the target's tokenizer, -1 for none"
    if isinstance(line, torch.Tensor):
        line = line.cpu().numpy()
    if isinstance(line, str | bytes) or not isinstance(line, Sequence | np.ndarray | jax.Array):
        refuse(name, expected, type(line).__name__, fix, ArgumentTypeError)
    values = np.asarray(line) if len(line) else np.zeros(0, np.int32)
    if values.ndim != 1 or not np.issubdtype(values.dtype, np.integer):
        refuse(name, expected, f"{values.dtype} of shape {values.shape}", fix, ArgumentTypeError)
    for value in (values.min(initial=0), values.max(initial=0)):
        if not NO_TOKEN <= value <= MAX_TOKEN:
            refuse(name, f"ids from 0 to {MAX_TOKEN}, or -1", int(value), fix)
    return values
