"""Two drafters, one drafting for the other: the second judges what the first proposes, in one pass."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

import jax

from funcspec.config import SpecConfig
from funcspec.drafters.base import Proposal
from funcspec.drafters.proposals import Proposer
from funcspec.drafters.standalone import Standalone
from funcspec.errors import ArgumentTypeError, ModelError, refuse
from funcspec.models.base import Array, Model
from funcspec.transitions.framework import Guess

if TYPE_CHECKING:
    from funcspec.transitions import Transition


@dataclass(frozen=True, eq=False)
class Cascade:
    """Two drafters, one drafting for the other; see `cascade`."""

    proposer: Proposer
    second: Standalone
    one_pass: bool = True

    @property
    def proposal(self) -> Proposal:
        """What the second one's drafts are: all drafts are its own."""
        return self.second.proposal

    @property
    def token_ids(self) -> Array | None:
        """Those of the second one."""
        return self.second.token_ids

    @property
    def kv_model(self) -> Model | None:
        """The model of the second one."""
        return self.second.kv_model

    def init(self, config: SpecConfig, target: Model) -> None:
        """Check that both fit."""
        self.proposer.init(config, target)
        self.second.init(config, target)

    def first(self, transition: "Transition", wanted: Array) -> None:
        """Let the first one propose, and feed what was committed and the proposals to the second one in one pass."""
        most = transition.config.num_speculative_tokens
        guess = None
        if most > 0:
            proposals, _ = self.proposer.propose(transition)
            guess = Guess(num_masks=most - 1, mask_id=0, num_choices=most, masks=proposals)
        transition.draft_once(self.second.model, first=True, token_ids=self.token_ids, wanted=wanted, guess=guess)

    def next(self, transition: "Transition") -> None:
        """Let the second one draft on alone, unless one pass is all it is to make."""
        if not self.one_pass:
            self.second.next(transition)


# Like `Standalone`: the weights of the second one are no constants of a program that takes the drafter as an argument.
jax.tree_util.register_dataclass(Cascade, data_fields=["proposer", "second"], meta_fields=["one_pass"])


def cascade(first: Proposer, second: Standalone, *, one_pass: bool = True) -> Cascade:
    """Let a cheap drafter draft for a better one: the second reads the first one's proposals in one pass and drafts what it would have.

    Its drafts are exactly those it would have made alone, one a step, as far as they go: up to and with the first one that differs from
    the proposal. So a round costs one pass of the second and has from one to K drafts, more of them the better the first one guesses.

    Args:
        first: proposes whole rows without a model, like `ngram`, `suffix` or `best_of` of them.
        second: a drafter made with `standalone`.
        one_pass: False lets the second draft on, a token a step, in rows that have fewer drafts than planned; then the drafts are those
            of `second` alone in every place.

    Raises:
        ArgumentTypeError: one of the two is not what is expected, or `one_pass` is no bool.
        ModelError: the first has a model.

    Example:
        >>> import funcspec as fs
        >>> quick = fs.drafters.cascade(fs.drafters.ngram(), fs.drafters.standalone(fs.models.ChecksumDraft()))
        >>> quick.proposal, quick.one_pass
        ('sampled', True)

    Reference: Chen et al. 2023, "Cascade speculative drafting", arXiv 2312.11462; Spector and Re 2023, "Staged speculative decoding",
    arXiv 2308.04623.
    """
    if not isinstance(first, Proposer) or isinstance(first, type):
        found = f"the class {first.__name__}" if isinstance(first, type) else type(first).__name__
        refuse("first", "a drafter with a function propose", found, "pass ngram(), suffix() or best_of of them", ArgumentTypeError)
    if first.kv_model is not None:
        refuse("first", "a drafter without a model", f"one with {type(first.kv_model).__name__}", "pass ngram() or suffix()", ModelError)
    if not isinstance(second, Standalone):
        found = f"the class {second.__name__}" if isinstance(second, type) else type(second).__name__
        refuse("second", "a drafter made with standalone", found, "wrap the draft model with standalone", ArgumentTypeError)
    if not isinstance(one_pass, bool):
        refuse("one_pass", "True or False", repr(one_pass), "pass a bool", ArgumentTypeError)
    return Cascade(first, second, one_pass)
