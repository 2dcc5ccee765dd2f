"""Several drafters without a model as one: in each round and row the longest proposal is drafted."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

import jax

from funcspec.config import SpecConfig
from funcspec.drafters.proposals import Proposer, WithoutModel, place_proposals
from funcspec.errors import ArgumentTypeError, ModelError, refuse
from funcspec.kernels.longer_proposals import longer_proposals_
from funcspec.models.base import Array, Model

if TYPE_CHECKING:
    from funcspec.transitions import Transition


@dataclass(frozen=True)
class BestOf(WithoutModel):
    """Several proposers as one; see `best_of`."""

    proposers: tuple[Proposer, ...]

    def init(self, config: SpecConfig, target: Model) -> None:
        """Check that all of them fit."""
        for proposer in self.proposers:
            proposer.init(config, target)

    def propose(self, transition: "Transition") -> tuple[Array, Array]:
        """Ask them all; keep the longest proposal of every row."""
        rows, most = transition.config.max_num_reqs, transition.config.num_speculative_tokens
        proposals, counts = self.proposers[0].propose(transition)
        for proposer in self.proposers[1:]:
            others, other_counts = proposer.propose(transition)
            out = transition.run(
                longer_proposals_,
                first_proposals=proposals,
                first_counts=counts,
                second_proposals=others,
                second_counts=other_counts,
                **transition.records(out_proposals=(rows, most), out_counts=(rows,)),
            )
            proposals, counts = out["out_proposals"], out["out_counts"]
        return proposals, counts

    def first(self, transition: "Transition", wanted: Array) -> None:
        """Fill all places of the round."""
        proposals, counts = self.propose(transition)
        place_proposals(transition, proposals, counts, wanted, points=transition.constant(1))

    def next(self, transition: "Transition") -> None:
        """Do nothing: all places are filled."""


# The leaves of the proposers, past outputs for example, are leaves of the whole.
jax.tree_util.register_dataclass(BestOf, data_fields=["proposers"], meta_fields=[])


def best_of(*proposers: Proposer) -> BestOf:
    """Make one drafter of several that propose: each row drafts the longest proposal, of equally long ones that of the earlier.

    All of them are asked in every round. The result proposes, too: it may stand in another `best_of`, or first in `fallback`.

    Args:
        *proposers: at least one drafter without a model, like `ngram`, `suffix` or `fixed`: its `proposal` is "point", it has no
            `kv_model`, and a function `propose` (see `funcspec.drafters.Proposer`).

    Raises:
        ArgumentTypeError: one of them cannot propose, or there is none.
        ModelError: one of them has a model or draws its drafts from a distribution.

    Example:
        >>> import funcspec as fs
        >>> lookup = fs.drafters.best_of(fs.drafters.ngram(min_ngram=2), fs.drafters.suffix())
        >>> fs.drafters.fallback(lookup, fs.drafters.standalone(fs.models.ChecksumDraft())).proposal
        'sampled'
    """
    if not proposers:
        refuse("proposers", "at least one drafter", "none", "pass some, such as ngram() and suffix()", ArgumentTypeError)
    for number, proposer in enumerate(proposers):
        name = f"proposers[{number}]"
        if not isinstance(proposer, Proposer) or isinstance(proposer, type):
            found = f"the class {proposer.__name__}" if isinstance(proposer, type) else type(proposer).__name__
            fix = "make one with ngram, suffix or fixed; put one with a model behind it all with fallback"
            refuse(name, "a drafter with a function propose", found, fix, ArgumentTypeError)
        if proposer.kv_model is not None or proposer.proposal != "point":
            found = f"one of {proposer.proposal!r} proposals{' with a model' * (proposer.kv_model is not None)}"
            refuse(name, "a drafter of 'point' proposals without a model", found, "give it to fallback as second", ModelError)
    return BestOf(proposers)
