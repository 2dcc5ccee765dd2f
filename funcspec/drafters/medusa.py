"""Medusa: heads over the target's last hidden state, each of which foresees one token."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import jax

from funcspec.config import SpecConfig
from funcspec.drafters.base import Proposal
from funcspec.drafters.pairs import check_draft, check_pair
from funcspec.errors import ModelError, refuse
from funcspec.models.base import Array, Model
from funcspec.transitions.framework import Guess

if TYPE_CHECKING:
    from funcspec.transitions import Transition


@dataclass(frozen=True, eq=False)
class Medusa:
    """Heads as a drafter; see `medusa`."""

    heads: Model
    token_ids: Array | None = None
    proposal: Proposal = "sampled"
    one_pass: ClassVar[bool] = True

    @property
    def kv_model(self) -> Model:
        """The heads; their cache is empty."""
        return self.heads

    def init(self, config: SpecConfig, target: Model) -> None:
        """Check the pair, and that there is a head for each draft."""
        check_pair(self.heads, self.token_ids, target)
        most, count = config.num_speculative_tokens, getattr(self.heads, "num_heads", 0)
        if count < most:
            found = f"{count} heads for num_speculative_tokens = {most}"
            refuse("heads", "a head for each draft", found, "draft fewer tokens, or use more heads", ModelError)

    def first(self, transition: "Transition", wanted: Array) -> None:
        """Let every head choose from the hidden state that the newest token was sampled from."""
        # Heads keep no places of their own, so what they choose is given that of the newest token and of masks behind it.
        count = max(transition.config.num_speculative_tokens, 1)
        guess = Guess(num_masks=count - 1, mask_id=0, num_choices=count)
        transition.draft_once(self.heads, first=True, token_ids=self.token_ids, wanted=wanted, guess=guess)

    def next(self, transition: "Transition") -> None:
        """Nothing is left to do."""


# Like `Standalone`: with heads of JAX their weights are no constants of a program that takes the drafter as an argument.
jax.tree_util.register_dataclass(Medusa, data_fields=["heads", "token_ids"], meta_fields=["proposal"])


def medusa(heads: Model, token_ids: Array | None = None) -> Medusa:
    """Make a drafter of Medusa heads.

    The target's own output matrix turns its last hidden state into the newest token. From the same state head k = 0, 1, ... foresees
    the token k + 1 places behind that one, without seeing what the other heads chose. Drafts are a chain, the k-th from head k.

    The newest token's own hidden state comes with `verify`, so a row that was cut back drafts nothing in its next round.

    Args:
        heads: a model with `features`, a `FeatureSpec` of no feedback and `ahead` 1, and with `num_heads`, the most drafts it can make;
            `funcspec.models.medusa_heads` makes one. It needs no cache.
        token_ids: [V_draft] int32, the target id of each of the heads' output ids, for a reduced output vocabulary; None where the ids
            are the same. A tensor, or for heads of JAX a jax.Array.

    Raises:
        ArgumentTypeError, ArgumentError: as for `standalone`.
        ModelError: the model is no set of heads; or, from `init`, there are fewer heads than drafts.

    Reference: Cai et al. 2024, "Medusa", arXiv 2401.10774.
    """
    check_draft("heads", heads, token_ids)
    spec, count = getattr(heads, "features", None), getattr(heads, "num_heads", None)
    if spec is None or spec.feedback or spec.ahead != 1 or not isinstance(count, int):
        found = "one that reads no hidden states" if spec is None else f"one with {spec} and num_heads {count}"
        expected = "heads that read hidden states with no feedback and tokens one ahead, and say their num_heads"
        refuse("heads", expected, found, "use standalone, eagle or parallel for it", ModelError)
    return Medusa(heads, token_ids)
