"""Drafts in training that fill mask tokens in one pass: behind a language model's newest token, or a block over hidden states.

A decoder drafts behind its newest token alone. Here several tokens of a text are taken for the newest one in one pass: each of these cuts
has masks of its own, which see the text up to their cut, and nothing of other cuts.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import torch
from torch.nn import functional as F

from examples.distil.layers import Parameters, Rotary, normalise, rotary_at, run_layers
from examples.distil.students import Guesses, check_layers, start
from funcspec.drafters.masks import check_mask
from funcspec.errors import ModelError, check_int, refuse
from funcspec.models.dflash import DFlashConfig
from funcspec.models.llama import Llama, LlamaConfig


def _check(target: Llama, depth: int, mask_id: int, cuts: int) -> None:
    check_int("depth", depth, 1)
    check_int("cuts", cuts, 1)
    check_mask(mask_id)
    if mask_id >= target.config.vocab_size:
        refuse("mask_id", f"below {target.config.vocab_size}", mask_id, "name a token that the target's texts never hold", ModelError)


@dataclass
class Parallel:
    """Some of the target's layers as a language model, trained to foresee several tokens in one pass, as PARD does.

    The token at index i foresees token i + 1, the first draft. Behind a cut at index p there are depth - 1 masks; the mask at p + j sees
    the text up to p and the masks up to itself, and foresees token p + j + 1. The masks' embedding stays what the target has there.

    Attributes:
        depth: drafts of a round that are trained.
        mask_id: token that masks hold.

    Reference: An et al. 2025, "PARD", arXiv 2504.18583.
    """

    config: LlamaConfig
    embed: torch.Tensor
    parameters: dict[str, torch.Tensor]
    rotary: Rotary = field(repr=False)
    depth: int
    mask_id: int
    cuts: int
    layers: tuple[int, ...] = ()
    kind: str = "parallel"

    @classmethod
    def of(cls, target: Llama, taken: tuple[int, ...], depth: int, mask_id: int, cuts: int) -> "Parallel":
        """Start from these layers of the target."""
        _check(target, depth, mask_id, cuts)
        config = replace(target.config, num_layers=len(taken))
        return cls(config, **start(target, taken), depth=depth, mask_id=mask_id, cuts=cuts)

    def guesses(
        self, parameters: Parameters, tokens: torch.Tensor, states: Mapping[int, torch.Tensor], cuts: torch.Tensor
    ) -> list[Guesses]:
        """The first draft from every token, and the further ones at the masks of the cuts."""
        (rows, length), count, width = tokens.shape, cuts.shape[1], self.depth - 1
        text, masks = (torch.arange(size, device=tokens.device) for size in (length, count * width))
        ids = torch.cat([tokens, tokens.new_full((rows, count * width), self.mask_id)], 1)
        behind = (cuts[:, :, None] + 1 + masks[:width]).flatten(1)
        positions = torch.cat([text.expand(rows, -1), behind], 1)
        last_seen = torch.cat([text.expand(rows, -1), cuts.repeat_interleave(width, 1)], 1)
        sees_text = text <= last_seen[:, :, None]
        cut = masks // max(width, 1)
        sees_masks = F.pad((cut[:, None] == cut) & (masks[:, None] >= masks), (0, 0, length, 0))
        visible = torch.cat([sees_text, sees_masks.expand(rows, -1, -1)], 2)[:, None]
        x = run_layers(F.embedding(ids, self.embed).float(), parameters, self.config, rotary_at(self.rotary, positions), visible)
        filled = x[:, length:].unflatten(1, (count, width))
        return [Guesses(x[:, :length], text + 1)] + [Guesses(filled[:, :, mask], cuts + 2 + mask) for mask in range(width)]


@dataclass
class Block:
    """A DFlash model: layers over a block of masks, with hidden states of the target as keys and values before it.

    A cut at index p has the target's hidden states of the tokens before p as context. Its block, token p and depth masks behind it, sees
    this context and all of itself, later places too; the mask at p + j foresees the token of that very place.

    Attributes:
        config: its shape, and what it reads.
        depth: masks of a block, which is the number of drafts a round to use it with.
        mask_id: token that masks hold.

    Reference: Chen et al. 2026, "DFlash", arXiv 2602.06036.
    """

    config: DFlashConfig
    embed: torch.Tensor
    parameters: dict[str, torch.Tensor]
    rotary: Rotary = field(repr=False)
    depth: int
    mask_id: int
    cuts: int
    kind: str = "dflash"

    @property
    def layers(self) -> tuple[int, ...]:
        """Hidden states of the target that it reads."""
        return self.config.target_layers

    @classmethod
    def of(cls, target: Llama, layers: tuple[int, ...], depth: int, mask_id: int, cuts: int, num_layers: int = 2) -> "Block":
        """Start from the target's last layers.

        The last of the hidden states stands alone for the context at first. If it is what the target's last layer reads, its number being
        that layer's, the context of the last layer begins as the target's own keys and values.
        """
        check_layers(target, layers, target.num_layers)
        _check(target, depth, mask_id, cuts)
        own = tuple(range(max(target.num_layers - num_layers, 0), target.num_layers))
        shape = vars(target.config) | {"num_layers": len(own)}
        config, begun = DFlashConfig(**shape, target_layers=layers, head_norms=False), start(target, own)
        one = torch.eye(config.hidden_size, device=target.device)
        begun["parameters"]["fc"] = torch.cat([*[torch.zeros_like(one)] * (len(layers) - 1), one], 1)
        begun["parameters"]["feature_norm"] = begun["parameters"][f"{len(own) - 1}.attention_norm"].clone()
        return cls(config, **begun, depth=depth, mask_id=mask_id, cuts=cuts)

    def guesses(
        self, parameters: Parameters, tokens: torch.Tensor, states: Mapping[int, torch.Tensor], cuts: torch.Tensor
    ) -> list[Guesses]:
        """What each mask of the cuts' blocks says."""
        (rows, count), width = cuts.shape, self.depth + 1
        feature = torch.cat([states[layer] for layer in self.layers], -1).float()
        context = normalise(F.linear(feature, parameters["fc"]), parameters["feature_norm"], self.config.norm_eps)
        text, places = (torch.arange(size, device=tokens.device) for size in (feature.shape[1], count * width))
        ids = tokens.new_full((rows, count, width), self.mask_id)
        ids[:, :, 0] = tokens.gather(1, cuts)
        positions = (cuts[:, :, None] + places[:width]).flatten(1)
        sees_context = text < cuts.repeat_interleave(width, 1)[:, :, None]
        sees_block = places[:, None] // width == places // width
        x = run_layers(
            F.embedding(ids.flatten(1), self.embed).float(),
            parameters,
            self.config,
            rotary_at(self.rotary, positions),
            torch.cat([sees_context, sees_block.expand(rows, -1, -1)], 2)[:, None],
            (context, rotary_at(self.rotary, text)),
        )
        filled = x.unflatten(1, (count, width))
        return [Guesses(filled[:, :, place], cuts + place) for place in range(1, width)]
