"""Parallel drafting: mask tokens behind the newest one, and one pass that foresees a token at each of them."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import jax

from funcspec.config import SpecConfig
from funcspec.drafters.base import Proposal
from funcspec.drafters.masks import check_mask, check_mask_is_readable
from funcspec.drafters.pairs import check_draft, check_pair
from funcspec.errors import ModelError, refuse
from funcspec.models.base import Array, Model
from funcspec.transitions.framework import Guess

if TYPE_CHECKING:
    from funcspec.transitions import Transition


@dataclass(frozen=True, eq=False)
class Parallel:
    """A draft model that guesses all tokens at once; see `parallel`."""

    model: Model
    mask_id: int
    token_ids: Array | None = None
    proposal: Proposal = "sampled"
    one_pass: ClassVar[bool] = True

    @property
    def kv_model(self) -> Model:
        """The draft model."""
        return self.model

    def init(self, config: SpecConfig, target: Model) -> None:
        """Check the pair, and that the draft can read the mask token."""
        check_pair(self.model, self.token_ids, target)
        check_mask_is_readable(self.mask_id, self.model, self.token_ids, target)

    def first(self, transition: "Transition", wanted: Array) -> None:
        """Feed what was committed and K - 1 masks; the newest token foresees the first draft, each mask one more."""
        count = max(transition.config.num_speculative_tokens, 1)
        guess = Guess(num_masks=count - 1, mask_id=self.mask_id, num_choices=count)
        transition.draft_once(self.model, first=True, token_ids=self.token_ids, wanted=wanted, guess=guess)

    def next(self, transition: "Transition") -> None:
        """Nothing is left to do."""


# Like `Standalone`: with a model of JAX its weights are no constants of a program that takes the drafter as an argument.
jax.tree_util.register_dataclass(Parallel, data_fields=["model", "token_ids"], meta_fields=["mask_id", "proposal"])


def parallel(model: Model, mask_id: int, token_ids: Array | None = None) -> Parallel:
    """Make a drafter of a model that drafts all K tokens in one pass, with K - 1 mask tokens.

    A plain language model (PARD) reads the tokens that were committed since the last round and the masks behind them; the newest token
    foresees the first draft, and the mask at each position the token of the next one. A model with `features` (P-EAGLE) does the same
    one position earlier, each token beside the hidden state of the position before it; masks have a learned feature instead.

    Drafts of one pass do not see each other: each is drawn from its own distribution after the committed tokens, and that is what the
    ratio rule judges it by. The keys of masks and of refused drafts lie behind the committed tokens, where the next round writes anew.

    Args:
        model: reads target ids and the mask's. With `features`, a `FeatureSpec` of no feedback and `ahead` 1; its mask places are those
            behind `batch.logits_indices[r * C]`, the place of row r's newest token, where C is the number of wanted places a row.
            `funcspec.models.parallel_heads` makes one.
        mask_id: what masks hold, an id of the model's input vocabulary, perhaps past the target's.
        token_ids: [V_draft] int32, the target id of each of the model's output ids, for a reduced output vocabulary; None where the ids
            are the same. A tensor, or for a model of JAX a jax.Array.

    Raises:
        ArgumentTypeError, ArgumentError: as for `standalone`, or `mask_id` is no token id.
        ModelError: the model is not for this kind of drafting.

    Example:
        >>> import funcspec as fs
        >>> drafter = fs.drafters.parallel(fs.models.ChecksumDraft(), mask_id=96)

    Reference: An et al. 2025, "PARD", arXiv 2504.18583; "P-EAGLE", 2026, arXiv 2602.01469.
    """
    check_draft("model", model, token_ids)
    check_mask(mask_id)
    spec = getattr(model, "features", None)
    if spec is not None and (spec.feedback or spec.ahead != 1):
        expected = "a language model, or one that reads hidden states with no feedback and tokens one ahead"
        refuse("model", expected, f"one with {spec}", f"use {'eagle' if spec.feedback else 'dflash'} for it", ModelError)
    return Parallel(model, mask_id, token_ids)
