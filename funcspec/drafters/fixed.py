"""Forced drafts: every row drafts what a table says comes next. For tests, and to replay what was drafted or generated before."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import jax

from funcspec.config import SpecConfig
from funcspec.drafters.proposals import WithoutModel, place_proposals
from funcspec.drafters.token_table import TokenTable, token_table
from funcspec.errors import refuse
from funcspec.kernels.read_ahead import read_ahead_
from funcspec.models.base import Array, Model

if TYPE_CHECKING:
    from funcspec.transitions import Transition


@dataclass(frozen=True, eq=False)
class Fixed(WithoutModel):
    """Forced drafts as a drafter; see `fixed`."""

    tokens: TokenTable

    def init(self, config: SpecConfig, target: Model) -> None:
        """Check the ids, and that there is a row for each list.

        Raises:
            ModelError: an id is not one of the target's.
            ArgumentError: more lists than rows.
        """
        self.tokens.check_target("tokens", target)
        if self.tokens.num_used > config.max_num_reqs:
            refuse("tokens", f"lists for {config.max_num_reqs} rows", self.tokens.num_used, "leave some out, or raise max_num_reqs")

    def propose(self, transition: "Transition") -> tuple[Array, Array]:
        """Read on behind every row's committed tokens."""
        fields, config = transition.fields, transition.config
        rows = config.max_num_reqs
        out = transition.run(
            read_ahead_,
            table=self.tokens.beside(fields.tokens),
            num_tokens=fields.num_tokens,
            is_live=fields.is_live,
            **transition.records(out_proposals=(rows, config.num_speculative_tokens), out_counts=(rows,)),
        )
        return out["out_proposals"], out["out_counts"]

    def first(self, transition: "Transition", wanted: Array) -> None:
        """Fill all places of the round."""
        proposals, counts = self.propose(transition)
        place_proposals(transition, proposals, counts, wanted, points=transition.constant(1))

    def next(self, transition: "Transition") -> None:
        """Do nothing: all places are filled."""


jax.tree_util.register_dataclass(Fixed, data_fields=["tokens"], meta_fields=[])


def fixed(tokens: Sequence[Sequence[int]] | Array) -> Fixed:
    """Make a drafter of tokens that are known beforehand.

    Args:
        tokens: a token list for each row, or an integer array [R, L], -1 where there is no token; they are copied. Places are absolute:
            a row of n committed tokens drafts tokens[row][n], tokens[row][n + 1], and so on, up to the first -1 and to the end of its
            list. What stands before place n does not matter. Rows without a list draft nothing.

    Raises:
        ArgumentTypeError: not lists of integers.
        ArgumentError: an id is out of range.

    Example:
        >>> import funcspec as fs
        >>> target, drafter = fs.models.ChecksumModel(), fs.drafters.fixed([[5, 6, 7, 39, 1, 6, 0]])
        >>> config = fs.SpecConfig(max_num_reqs=1, max_model_len=32, num_speculative_tokens=3, rule=fs.rules.greedy)
        >>> state, _ = fs.admit(fs.init(config, target, drafter), target, drafter, [[5, 6, 7]])
        >>> state, verdict = fs.step_round(state, target, drafter)
        >>> verdict.num_drafted.tolist(), verdict.num_accepted.tolist(), verdict.tokens.tolist()
        ([3], [2], [[1, 6, 42, -1]])
    """
    return Fixed(token_table("tokens", tokens))
