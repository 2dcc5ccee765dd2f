"""Two drafters as one: the second drafts for the rows where the first finds nothing."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

import jax

from funcspec.config import SpecConfig
from funcspec.drafters.base import Drafter, Proposal
from funcspec.drafters.proposals import Proposer, place_proposals
from funcspec.errors import ArgumentTypeError, ModelError, refuse
from funcspec.models.base import Array, Model

if TYPE_CHECKING:
    from funcspec.transitions import Transition


@dataclass(frozen=True, eq=False)
class Fallback:
    """Two drafters as one; see `fallback`."""

    proposer: Proposer
    second: Drafter

    @property
    def proposal(self) -> Proposal:
        """What the second one's drafts are; those of the first are points."""
        return self.second.proposal

    @property
    def token_ids(self) -> Array | None:
        """Those of the second one."""
        return self.second.token_ids

    @property
    def one_pass(self) -> bool:
        """Whether the second one needs no further steps."""
        return getattr(self.second, "one_pass", False)

    @property
    def kv_model(self) -> Model | None:
        """The model of the second one."""
        return self.second.kv_model

    def init(self, config: SpecConfig, target: Model) -> None:
        """Check that both fit."""
        self.proposer.init(config, target)
        self.second.init(config, target)

    def first(self, transition: "Transition", wanted: Array) -> None:
        """Let the second one take in what was committed and draft, then replace its drafts where the first one found some."""
        proposals, counts = self.proposer.propose(transition)
        self.second.first(transition, wanted)
        points = counts if self.proposal == "sampled" else transition.constant(1)
        place_proposals(transition, proposals, counts, wanted, points=points, keep_others=True)

    def next(self, transition: "Transition") -> None:
        """Let the second one go on; rows that the first one served have all they planned."""
        self.second.next(transition)


# Like `Standalone`: the weights of the second one are no constants of a program that takes the drafter as an argument.
jax.tree_util.register_dataclass(Fallback, data_fields=["proposer", "second"], meta_fields=[])


def fallback(first: Proposer, second: Drafter) -> Fallback:
    """Make one drafter of two: rows for which `first` finds something draft that, the others draft with `second`.

    Which of the two drafts is decided anew in every round and row. The second one is fed in every round whoever drafts, so that its
    KV is always that of the committed tokens; it costs a forward a draft step, also in rounds in which all rows are served by the
    first.

    Args:
        first: proposes whole rows without a model, like `ngram`: its `proposal` is "point", it has no `kv_model`, and a function
            `propose` (see `funcspec.drafters.Proposer`).
        second: any drafter, for example `standalone`.

    Raises:
        ArgumentTypeError: one of the two is no drafter, or the first cannot propose.
        ModelError: the first has a model or draws its drafts from a distribution, or the second is made of two itself.

    Example:
        >>> import funcspec as fs
        >>> both = fs.drafters.fallback(fs.drafters.ngram(min_ngram=2), fs.drafters.standalone(fs.models.ChecksumDraft()))
        >>> both.proposal
        'sampled'

    Reference: Saxena 2023, "Prompt lookup decoding", https://github.com/apoorvumang/prompt-lookup-decoding; Yang et al. 2023,
    "Inference with reference", arXiv 2304.04487.
    """
    for name, drafter in (("first", first), ("second", second)):
        if not isinstance(drafter, Drafter) or isinstance(drafter, type):
            found = f"the class {drafter.__name__}" if isinstance(drafter, type) else type(drafter).__name__
            refuse(name, "a drafter", found, "make one with funcspec.drafters", ArgumentTypeError)
    if first.kv_model is not None:
        found = "two drafters with models" if second.kv_model is not None else "one with a model"
        raise ModelError(
            f"first: expected a drafter without a model, as a state keeps KV for one draft model, got {found}. "
            "Fix: give the drafter with the model as second, and one that proposes without a model, such as ngram(), as first."
        )
    if first.proposal != "point":
        raise ModelError(
            f"first: expected a drafter of 'point' proposals, got one of {first.proposal!r}. "
            "Fix: give it as second, and one that just proposes, such as ngram(), as first."
        )
    if isinstance(second, Fallback):
        refuse("second", "a drafter that is not two itself", repr(second.proposer), "put one proposer in front of one drafter", ModelError)
    if not isinstance(first, Proposer):
        refuse("first", "a drafter with a function propose", type(first).__name__, "write propose, or give it as second", ArgumentTypeError)
    return Fallback(first, second)
