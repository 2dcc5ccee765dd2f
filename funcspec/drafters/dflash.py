"""DFlash: a block of mask tokens over the target's hidden states, filled in one pass without causality."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import jax

from funcspec.config import SpecConfig
from funcspec.drafters.base import Proposal
from funcspec.drafters.masks import check_mask, check_mask_is_readable
from funcspec.drafters.pairs import check_draft, check_pair
from funcspec.errors import ArgumentTypeError, ModelError, refuse
from funcspec.models.base import Array, Model
from funcspec.transitions.framework import Guess

if TYPE_CHECKING:
    from funcspec.transitions import Transition


@dataclass(frozen=True, eq=False)
class BlockDrafter:
    """A block drafter; see `dflash`."""

    model: Model
    mask_id: int
    token_ids: Array | None = None
    anchor: bool = False
    proposal: Proposal = "sampled"
    one_pass: ClassVar[bool] = True

    @property
    def kv_model(self) -> Model:
        """The block model."""
        return self.model

    def init(self, config: SpecConfig, target: Model) -> None:
        """Check the pair, and that the draft can read the mask token."""
        check_pair(self.model, self.token_ids, target)
        check_mask_is_readable(self.mask_id, self.model, self.token_ids, target)

    def first(self, transition: "Transition", wanted: Array) -> None:
        """Turn the newest hidden states into keys and values, and fill a block behind them."""
        most = transition.config.num_speculative_tokens
        offset = 0 if self.anchor else min(most, 1)
        count = max(most, 1)
        guess = Guess(num_masks=count - 1 + offset, mask_id=self.mask_id, num_choices=count, choice_offset=offset)
        transition.draft_once(self.model, first=True, token_ids=self.token_ids, wanted=wanted, guess=guess)

    def next(self, transition: "Transition") -> None:
        """Nothing is left to do."""


# Like `Standalone`: with a model of JAX its weights are no constants of a program that takes the drafter as an argument.
jax.tree_util.register_dataclass(BlockDrafter, data_fields=["model", "token_ids"], meta_fields=["mask_id", "anchor", "proposal"])


def dflash(model: Model, mask_id: int, token_ids: Array | None = None, *, anchor: bool = False) -> BlockDrafter:
    """Make a drafter of a DFlash model, which fills a block of K masks in one pass.

    The target's hidden states of all positions before the newest token are context: keys and values, which attend to nothing. The
    newest token and the masks behind it attend to all context and to each other, in both directions, and the mask at a position
    foresees the token of that very position. The number of masks is always K, also for rows that want fewer drafts; a row that reaches
    the end of the model's positions has fewer.

    Drafts do not see each other: each is drawn from its own distribution after the committed tokens.

    Args:
        model: a model with `features`, a `FeatureSpec` of no feedback and `ahead` 0. The last C places of its window are the wanted ones
            (`batch.logits_indices`); what lies before the newest token, and all of a pass that wants no logits, is context.
            `funcspec.models.dflash` makes one.
        mask_id: what masks hold, an id of the model's input vocabulary.
        token_ids: [V_draft] int32, the target id of each of the model's output ids, for a reduced output vocabulary; None where the ids
            are the same. A tensor, or for a model of JAX a jax.Array.
        anchor: for models that were trained so that each place foresees the token behind it: then the newest token foresees the first
            draft, and there are K - 1 masks.

    Raises:
        ArgumentTypeError, ArgumentError: as for `standalone`, or `mask_id` is no token id, or `anchor` no bool.
        ModelError: the model does not read hidden states so.

    Reference: Chen et al. 2026, "DFlash", arXiv 2602.06036.
    """
    check_draft("model", model, token_ids)
    check_mask(mask_id)
    if not isinstance(anchor, bool):
        refuse("anchor", "True or False", repr(anchor), "pass a bool", ArgumentTypeError)
    spec = getattr(model, "features", None)
    if spec is None or spec.feedback or spec.ahead:
        found = "one that reads no hidden states" if spec is None else f"one with {spec}"
        fix = "use parallel, medusa or eagle for it"
        refuse("model", "a model that reads hidden states as context, with no feedback and nothing ahead", found, fix, ModelError)
    return BlockDrafter(model, mask_id, token_ids, anchor)
