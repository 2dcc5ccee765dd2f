"""Suffix decoding: draft what most often followed the newest tokens, in the row, in other rows and in past outputs. No model, no KV."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import cache
from typing import TYPE_CHECKING

import jax
import torch

from funcspec.config import SpecConfig
from funcspec.drafters.proposals import WithoutModel, place_proposals
from funcspec.drafters.token_table import TokenTable, token_table
from funcspec.errors import ArgumentTypeError, refuse
from funcspec.kernels.suffix_lookup import WALK, suffix_lookup_
from funcspec.models.base import Array, Model
from funcspec.transitions.shapes import Shapes

if TYPE_CHECKING:
    from funcspec.transitions import Transition

LARGEST_DENOMINATOR = 10**6
"""Numbers are taken as the nearest fractions with denominators up to this, so that 0.1 is a tenth."""


@dataclass(frozen=True, eq=False)
class Suffix(WithoutModel):
    """Suffix decoding as a drafter; see `suffix`.

    Attributes:
        corpus: past outputs, oldest first, or None.
        max_depth, factor, offset, min_probability, shared, max_outputs: as given to `suffix`.
    """

    corpus: TokenTable | None = None
    max_depth: int = 24
    factor: float = 1.0
    offset: float = 0.0
    min_probability: float = 0.1
    shared: bool = False
    max_outputs: int = 10_000

    @property
    def budgets(self) -> tuple[int, ...]:
        """Most drafts behind a match of 1, 2, ... tokens, whatever the number of draft places."""
        return _budgets(self.max_depth, self.factor, self.offset)

    def with_outputs(self, outputs: Sequence[Sequence[int]] | Array) -> "Suffix":
        """A drafter that knows these outputs as well; this one stays as it is.

        With more than `max_outputs` of them the oldest are left out. A step takes the new drafter in place of the old one. `init` checks
        the ids of the drafter it is given, so pass ids of the target's own here.

        Args:
            outputs: token lists, oldest first, or an integer array [N, M] with -1 where there is no token.

        Raises:
            ArgumentTypeError, ArgumentError: not lists of token ids.

        Example:
            >>> drafter = suffix()
            >>> drafter.with_outputs([[5, 6, 7], [8]]).corpus.tokens.tolist(), drafter.corpus
            ([[5, 6, 7, -1], [8, -1, -1, -1]], None)
        """
        newer, older = token_table("outputs", outputs), self.corpus or token_table("outputs", [])
        return replace(self, corpus=older.joined(newer, most=self.max_outputs))

    def init(self, config: SpecConfig, target: Model) -> None:
        """Check the ids of past outputs."""
        if self.corpus is not None:
            self.corpus.check_target("corpus", target)

    def propose(self, transition: "Transition") -> tuple[Array, Array]:
        """Look the newest tokens of every row up, and follow what followed them."""
        fields, config, budgets = transition.fields, transition.config, self.budgets
        rows = config.max_num_reqs
        out = transition.run(
            suffix_lookup_,
            tokens=fields.tokens,
            num_tokens=fields.num_tokens,
            row_limit=fields.row_limit,
            is_live=fields.is_live,
            corpus=None if self.corpus is None else self.corpus.beside(fields.tokens),
            shared=self.shared,
            budgets=budgets,
            min_probability=Fraction(self.min_probability).limit_denominator(LARGEST_DENOMINATOR),
            **transition.records(out_proposals=(rows, config.num_speculative_tokens), out_counts=(rows,)),
            **transition.scratch("target", _walk_shapes, rows, len(budgets)),
        )
        return out["out_proposals"], out["out_counts"]

    def first(self, transition: "Transition", wanted: Array) -> None:
        """Fill all places of the round."""
        proposals, counts = self.propose(transition)
        place_proposals(transition, proposals, counts, wanted, points=transition.constant(1))

    def next(self, transition: "Transition") -> None:
        """Do nothing: all places are filled."""


def _walk_shapes(rows: int, sizes: int) -> Shapes:
    """Workspace of `suffix_lookup_`."""
    return {"scratch": ((rows, 2, sizes, WALK), torch.int32)}


@cache
def _budgets(max_depth: int, factor: float, offset: float) -> tuple[int, ...]:
    slope, start = (Fraction(value).limit_denominator(LARGEST_DENOMINATOR) for value in (factor, offset))
    return tuple(max(0, min(math.floor(size * slope + start), max_depth - size)) for size in range(1, max_depth))


# Past outputs are a leaf: a program that takes the drafter as an argument is compiled once for all tables of one size.
jax.tree_util.register_dataclass(
    Suffix, data_fields=["corpus"], meta_fields=["max_depth", "factor", "offset", "min_probability", "shared", "max_outputs"]
)


def suffix(
    *,
    max_depth: int = 24,
    factor: float = 1.0,
    offset: float = 0.0,
    min_probability: float = 0.1,
    corpus: Sequence[Sequence[int]] | Array | None = None,
    shared: bool = False,
    max_outputs: int = 10_000,
) -> Suffix:
    """Make a drafter that follows the most frequent way on: good where outputs repeat each other, as in agents, editing and code.

    The newest m tokens of a row are looked up for every m below `max_depth`: once in the row itself, once in past outputs and, if
    `shared`, in all other rows. A draft grows behind them by the token that most often came next, of equally frequent ones the lowest id.
    Its probability is the product of how often each of its tokens came next, by how often the tokens before it stand there; a row's own
    end counts as standing there. It has at most floor(m * factor + offset) tokens, and no more than max_depth - m: the longer the match,
    the longer the draft. It ends before a token with which it would be less likely than `min_probability`. Of all drafts the one with
    the highest expected number of accepted tokens, the sum of these probabilities, is proposed; of equal ones that from the row itself,
    then that with the longest match.

    Every round searches all the text there is, so its time grows with the text. With `shared` what a row drafts depends on its company.
    Its output does not under the rules greedy and coupled; under the ratio rule its law does not, if rows have seeds of their own
    and past outputs were drawn with others.

    Args:
        max_depth: most tokens of a match and its draft together, at least 2.
        factor: drafts for each token of a match.
        offset: drafts added to that; negative to draft behind long matches alone.
        min_probability: from 0 to 1, how likely a draft must be to the last of its tokens. Larger values draft less, and better.
        corpus: past outputs: token lists, oldest first, or an integer array [N, M] with -1 where there is no token. They are copied.
            `with_outputs` adds to them.
        shared: whether rows look at the committed tokens of all rows of the state.
        max_outputs: most past outputs to keep.

    Raises:
        ArgumentTypeError: an argument has the wrong type.
        ArgumentError: a number is out of range, or no match could ever draft.

    Example:
        >>> import funcspec as fs
        >>> target, drafter = fs.models.ChecksumModel(), fs.drafters.suffix().with_outputs([[9, 0, 8, 41, 57]])
        >>> config = fs.SpecConfig(max_num_reqs=1, max_model_len=32, num_speculative_tokens=3, rule=fs.rules.greedy)
        >>> state, first = fs.admit(fs.init(config, target, drafter), target, drafter, [[33, 8, 9, 7, 0]])
        >>> first.tokens  # 0 8 stands in the past output, before 41 57
        (8,)
        >>> fs.prefill(state, drafter)[1].tokens.tolist()
        [[41, 57, -1]]

    Reference: Oliaro et al. 2024, "SuffixDecoding: extreme speculative decoding for emerging AI applications", arXiv 2411.04975.
    """
    for name, value in (("max_depth", max_depth), ("max_outputs", max_outputs)):
        if type(value) is not int:
            refuse(name, "an int", repr(value), "pass a number", ArgumentTypeError)
    for name, value in (("factor", factor), ("offset", offset), ("min_probability", min_probability)):
        if not isinstance(value, int | float) or isinstance(value, bool):
            refuse(name, "a number", repr(value), "pass a float", ArgumentTypeError)
        if not math.isfinite(value):
            refuse(name, "a finite number", value, "pass a moderate one")
    if type(shared) is not bool:
        refuse("shared", "True or False", repr(shared), "pass a bool", ArgumentTypeError)
    if max_depth < 2:
        refuse("max_depth", "at least 2", max_depth, "leave room for a match and a draft")
    if max_outputs < 1:
        refuse("max_outputs", "at least 1", max_outputs, "leave out corpus if no past output shall be used")
    if factor < 0:
        refuse("factor", "at least 0", factor, "longer matches are worth longer drafts")
    if not 0 <= min_probability <= 1:
        refuse("min_probability", "from 0 to 1", min_probability, "pass a probability")
    if not any(_budgets(max_depth, factor, offset)):
        refuse("offset", "a draft of at least one token behind some match", offset, "raise offset, factor or max_depth")
    drafter = Suffix(None, max_depth, float(factor), float(offset), float(min_probability), shared, max_outputs)
    if corpus is None:
        return drafter
    past = token_table("corpus", corpus)
    return replace(drafter, corpus=past.joined(token_table("corpus", []), most=max_outputs))
