"""Drafters that propose: they find whole rows of drafts at once, without a model, and others can be put behind them."""

from typing import TYPE_CHECKING, Literal, Protocol, runtime_checkable

from funcspec.drafters.base import Drafter
from funcspec.kernels.place_drafts import place_drafts_
from funcspec.models.base import Array

if TYPE_CHECKING:
    from funcspec.transitions import Transition


@runtime_checkable
class Proposer(Drafter, Protocol):
    """A drafter of "point" proposals that needs no KV and can say what it would draft without drafting it."""

    def propose(self, transition: "Transition") -> tuple[Array, Array]:
        """Find drafts for all rows. Writes no field of the state.

        Args:
            transition: the open step.

        Returns:
            proposals [R, K] int32 in target ids, -1 behind them, and [R] int32: how many each row has, 0 where nothing was found.
        """
        ...


class WithoutModel:
    """What drafters that only propose have in common: no model, no KV, the target's own ids, and all places filled at step 0."""

    @property
    def proposal(self) -> Literal["point"]:
        """Drafts are just proposed."""
        return "point"

    @property
    def token_ids(self) -> None:
        """Drafts are the target's own tokens."""
        return None

    @property
    def kv_model(self) -> None:
        """There is no model."""
        return None

    @property
    def one_pass(self) -> Literal[True]:
        """`next` has nothing to do."""
        return True


def place_proposals(
    transition: "Transition", proposals: Array, counts: Array, wanted: Array, *, points: Array, keep_others: bool = False
) -> None:
    """Make proposals the drafts of their rows; for use in `Drafter.first`, after the step's last forward.

    Args:
        transition: the open step.
        proposals: [R, K] int32.
        counts: [R] int32, how many each row has.
        wanted: [R] int32, drafts asked for.
        points: [R] int32, not 0 for rows whose drafts are just proposed, not drawn from a distribution.
        keep_others: leave rows without a proposal as another drafter left them in this step.

    Raises:
        ArgumentError, ArgumentTypeError: an array is none of the state's framework, or has another shape or dtype.
    """
    fields, config = transition.fields, transition.config
    rows, most = config.max_num_reqs, config.num_speculative_tokens
    arrays = {"proposals": (proposals, (rows, most)), "counts": (counts, (rows,)), "wanted": (wanted, (rows,)), "points": (points, (rows,))}
    for name, (values, shape) in arrays.items():
        # The full check takes ten times as long, and this one is made in every round; gaps and devices the operation looks at.
        if not transition.is_array(values) or values.shape != shape or values.dtype != fields.num_tokens.dtype:
            transition.check_array(name, values, shape, "an int32", "give every row K places, or a number")
    out = transition.run(
        place_drafts_,
        keep_others=keep_others,
        proposals=proposals,
        counts=counts,
        num_tokens=fields.num_tokens,
        row_limit=fields.row_limit,
        is_live=fields.is_live,
        wanted=wanted,
        tokens=fields.tokens,
        num_draft=fields.num_draft,
        num_drafted=fields.num_drafted,
        **transition.records(out_tokens=(rows, most)),
    )
    transition.keep_drafts(out["out_tokens"], points=points)
