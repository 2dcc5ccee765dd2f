"""EAGLE: a small head over the target's own hidden states drafts one token a step."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

import jax

from funcspec.config import SpecConfig
from funcspec.drafters.base import Proposal
from funcspec.drafters.pairs import check_draft, check_pair
from funcspec.errors import ModelError, refuse
from funcspec.models.base import Array, Model

if TYPE_CHECKING:
    from funcspec.transitions import Transition


@dataclass(frozen=True, eq=False)
class Eagle:
    """A head as a drafter; see `eagle`."""

    model: Model
    token_ids: Array | None = None
    proposal: Proposal = "sampled"

    @property
    def kv_model(self) -> Model:
        """The head."""
        return self.model

    def init(self, config: SpecConfig, target: Model) -> None:
        """Check the pair."""
        check_pair(self.model, self.token_ids, target)

    def first(self, transition: "Transition", wanted: Array) -> None:
        """Feed what was committed, each token with the hidden state of the position before it, and draft the first token."""
        transition.draft_once(self.model, first=True, token_ids=self.token_ids, wanted=wanted)

    def next(self, transition: "Transition") -> None:
        """Feed the newest draft with the head's own hidden state, and draft one more token."""
        transition.draft_once(self.model, first=False, token_ids=self.token_ids, wanted=transition.fields.num_draft)


# Like `Standalone`: with a model of JAX its weights are no constants of a program that takes the drafter as an argument.
jax.tree_util.register_dataclass(Eagle, data_fields=["model", "token_ids"], meta_fields=["proposal"])


def eagle(head: Model, token_ids: Array | None = None) -> Eagle:
    """Make a drafter of an EAGLE head: EAGLE-1 and 2 (chains), EAGLE-3, and multi-token prediction with one module used again.

    At position x the head reads the target's hidden state of x and the token of x + 1, and foresees the token of x + 2. In later
    draft steps its own hidden state takes the place of the target's.

    The newest token has no hidden state before `verify` has run, so a row that was cut back drafts nothing in its next round.

    Args:
        head: a model with `features`, a `FeatureSpec` that hands its own state on (`feedback` above 0, `ahead` 1). It reads target ids
            and keeps KV of its own, like `funcspec.models.heads.EagleHead`.
        token_ids: [V_draft] int32, the target id of each of the head's output ids, for a reduced output vocabulary; None where the ids
            are the same. A tensor, or for a model of JAX a jax.Array.

    Raises:
        ArgumentTypeError, ArgumentError: as for `standalone`.
        ModelError: the model is no such head.

    Example:
        >>> import funcspec as fs
        >>> from funcspec.models import smollm2
        >>> target = smollm2.load_target()  # doctest: +SKIP
        >>> drafter = fs.drafters.eagle(*smollm2.load_head(target))  # doctest: +SKIP

    Reference: Li et al. 2024, "EAGLE", arXiv 2401.15077; Li et al. 2025, "EAGLE-3", arXiv 2503.01840.
    """
    check_draft("head", head, token_ids)
    check_handing_on("head", head)
    return Eagle(head, token_ids)


def check_handing_on(argument: str, head: Model) -> None:
    """Refuse a model that does not read hidden states, tokens one ahead, and hand its own on.

    Raises:
        ModelError: says what the model reads.
    """
    spec = getattr(head, "features", None)
    if spec is None or not spec.feedback or spec.ahead != 1:
        found = "one that reads no hidden states" if spec is None else f"one with {spec}"
        refuse(argument, "a model that reads hidden states and hands its own on", found, "use standalone or parallel for it", ModelError)
