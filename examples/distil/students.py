"""Drafts in training: what they all have in common, and the plainest of them."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Protocol

import torch
from torch.nn import functional as F

from examples.distil.layers import Parameters, Rotary, rotary_at, run_layers, taken_over
from funcspec.errors import ModelError, refuse
from funcspec.models.llama import Llama, LlamaConfig, rotary_tables


@dataclass(frozen=True)
class Guesses:
    """What a student says at one of its drafts.

    Attributes:
        states: [B, N, H] normalised hidden states, that the output matrix is applied to.
        places: [N] or [B, N], which token of its text each of them foresees. Past the end of a text there is nothing to compare with.
    """

    states: torch.Tensor
    places: torch.Tensor


class Student(Protocol):
    """A draft in training.

    Attributes:
        kind: its name on the command line.
        layers: hidden states of the target that it reads.
        cuts: how many places of each text it drafts from in a training step; 0 if it always drafts from all.
        parameters: what is trained, float32.
    """

    kind: str
    layers: tuple[int, ...]
    cuts: int
    parameters: dict[str, torch.Tensor]

    def guesses(
        self, parameters: Parameters, tokens: torch.Tensor, states: Mapping[int, torch.Tensor], cuts: torch.Tensor
    ) -> list[Guesses]:
        """Draft in texts.

        Args:
            parameters: what to compute with, named as `self.parameters`.
            tokens: [B, T] the texts.
            states: by layer, [B, T - 1, H]: the target's hidden states of all tokens but the last.
            cuts: [B, C] places of tokens that are taken for the newest ones. Students whose `cuts` is 0 do not look at it.

        Returns:
            one entry for each draft of a round, the first draft first.
        """
        ...


@dataclass
class Truncated:
    """Some of the target's layers as a language model of its own."""

    config: LlamaConfig
    embed: torch.Tensor
    parameters: dict[str, torch.Tensor]
    rotary: Rotary = field(repr=False)
    layers: tuple[int, ...] = ()
    cuts: int = 0
    kind: str = "standalone"

    @classmethod
    def of(cls, target: Llama, taken: tuple[int, ...]) -> "Truncated":
        """Start from these layers of the target."""
        return cls(replace(target.config, num_layers=len(taken)), **start(target, taken))

    def guesses(
        self, parameters: Parameters, tokens: torch.Tensor, states: Mapping[int, torch.Tensor], cuts: torch.Tensor
    ) -> list[Guesses]:
        """One draft from every token; further ones would be the same again."""
        places = torch.arange(tokens.shape[1], device=tokens.device)
        x = F.embedding(tokens, self.embed).float()
        return [Guesses(run_layers(x, parameters, self.config, rotary_at(self.rotary, places)), places + 1)]


def start(target: Llama, taken: tuple[int, ...]) -> dict:
    """What students of layers of the target start from: "embed", "parameters" and "rotary".

    Raises:
        ModelError: there are no such layers, or none at all.
    """
    check_layers(target, taken, target.num_layers - 1)
    return {
        "embed": target.weights["embed"],
        "parameters": taken_over(target, taken),
        "rotary": rotary_tables(target.config, target.device),
    }


def check_layers(target: Llama, layers: tuple[int, ...], last: int) -> None:
    """Refuse layers that the target does not have.

    Raises:
        ModelError: says which there are.
    """
    if not layers or not all(0 <= layer <= last for layer in layers):
        refuse("layers", f"numbers from 0 to {last}", layers, f"the target has {target.num_layers} layers", ModelError)
