"""Prompt lookup: draft what followed the newest tokens where they stood before. No model, no KV."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import jax

from funcspec.config import SpecConfig
from funcspec.drafters.proposals import WithoutModel, place_proposals
from funcspec.errors import ArgumentTypeError, refuse
from funcspec.kernels.ngram_lookup import ngram_lookup_
from funcspec.models.base import Array, Model

if TYPE_CHECKING:
    from funcspec.transitions import Transition

OCCURRENCES = ("first", "last")


@jax.tree_util.register_static
@dataclass(frozen=True)
class Ngram(WithoutModel):
    """Prompt lookup as a drafter; see `ngram`."""

    max_ngram: int = 3
    min_ngram: int = 1
    window: int | None = None
    occurrence: Literal["first", "last"] = "first"

    def init(self, config: SpecConfig, target: Model) -> None:
        """Nothing to check: it fits every target."""

    def propose(self, transition: "Transition") -> tuple[Array, Array]:
        """Look the newest tokens of every row up in the row."""
        fields, config = transition.fields, transition.config
        rows = config.max_num_reqs
        out = transition.run(
            ngram_lookup_,
            tokens=fields.tokens,
            num_tokens=fields.num_tokens,
            is_live=fields.is_live,
            max_ngram=self.max_ngram,
            min_ngram=self.min_ngram,
            window=self.window,
            latest=self.occurrence == "last",
            **transition.records(out_proposals=(rows, config.num_speculative_tokens), out_counts=(rows,)),
        )
        return out["out_proposals"], out["out_counts"]

    def first(self, transition: "Transition", wanted: Array) -> None:
        """Fill all places of the round."""
        proposals, counts = self.propose(transition)
        place_proposals(transition, proposals, counts, wanted, points=transition.constant(1))

    def next(self, transition: "Transition") -> None:
        """Do nothing: all places are filled."""


def ngram(*, max_ngram: int = 3, min_ngram: int = 1, window: int | None = None, occurrence: Literal["first", "last"] = "first") -> Ngram:
    """Make a drafter that copies from the row itself: good where an answer repeats its prompt, as in editing and summaries.

    The newest tokens of a row, `max_ngram` of them or as many as can be found down to `min_ngram`, are looked up among the tokens
    before; what followed them there is drafted, all of a round at once. Rows where nothing is found draft nothing. With
    `fallback` another drafter takes these rows.

    Of several occurrences of the longest match the first one counts. It has the most tokens behind it, so that it fills a round:
    in a text that repeats itself every p tokens the last occurrence has no more than p tokens behind it, in a run of one token a
    single one. `occurrence="last"` suits text that drifts, where what was written last is the better guess.

    Args:
        max_ngram: most tokens to match.
        min_ngram: fewest tokens to match, at least 1. Larger values draft less often, and better.
        window: how many of a row's newest tokens are searched; None searches all.
        occurrence: "first" or "last", which of several occurrences counts.

    Raises:
        ArgumentTypeError: a number is no int.
        ArgumentError: min_ngram is not from 1 to max_ngram, the window is too short to find anything, or the occurrence is unknown.

    Example:
        >>> import funcspec as fs
        >>> target, drafter = fs.models.ChecksumModel(), fs.drafters.ngram()
        >>> config = fs.SpecConfig(max_num_reqs=1, max_model_len=32, num_speculative_tokens=3, rule=fs.rules.greedy)
        >>> state, first = fs.admit(fs.init(config, target, drafter), target, drafter, [[33, 8, 9, 7, 0]])
        >>> first.tokens  # stands in the prompt, before 9, 7, 0
        (8,)
        >>> fs.prefill(state, drafter)[1].tokens.tolist()
        [[9, 7, 0]]

    Reference: Saxena 2023, "Prompt lookup decoding", https://github.com/apoorvumang/prompt-lookup-decoding; Yang et al. 2023,
    "Inference with reference", arXiv 2304.04487.
    """
    for name, value in (("max_ngram", max_ngram), ("min_ngram", min_ngram), ("window", window)):
        if type(value) is not int and not (name == "window" and value is None):
            refuse(name, "an int" + " or None" * (name == "window"), repr(value), "pass a number of tokens", ArgumentTypeError)
    if not 1 <= min_ngram <= max_ngram:
        refuse("min_ngram", f"from 1 to max_ngram = {max_ngram}", min_ngram, "match at least one token, and no more than max_ngram")
    if window is not None and window <= min_ngram:
        found = f"at least min_ngram + 1 = {min_ngram + 1}"
        refuse("window", found, window, "search more tokens: a match ends before the newest token")
    if not isinstance(occurrence, str) or occurrence not in OCCURRENCES:
        refuse("occurrence", "'first' or 'last'", repr(occurrence), "use one of these")
    return Ngram(max_ngram, min_ngram, window, occurrence)
