"""Arg-max drafting: the likeliest token of a draft model for every row, whatever its temperature."""

from dataclasses import is_dataclass, replace
from typing import Any

from funcspec.drafters.base import Drafter
from funcspec.errors import ArgumentTypeError, ModelError, refuse, type_name


def argmax(drafter: Drafter) -> Any:
    """Make a drafter propose its model's likeliest token at each place instead of drawing one at the row's temperature.

    Drafts are then points: the `ratio` rule keeps one with the probability that the target gives it, and nothing of the draft's
    distribution has to be kept. Greedy rows do not change. Sampled drafts are kept more often where draft and target agree on many tokens,
    arg-max drafts where the target is sure of one.

    Args:
        drafter: one with a model, such as `standalone`, `eagle`, `mtp`, `parallel`, `dflash`, `medusa` or `early_exit`; or a `fallback` or
            `cascade` of one.

    Returns:
        a drafter of the same kind.

    Raises:
        ArgumentTypeError: no drafter of this library.
        ModelError: it draws nothing, as its drafts are points already.

    Example:
        >>> import funcspec as fs
        >>> fs.drafters.argmax(fs.drafters.standalone(fs.models.ChecksumDraft())).proposal
        'argmax'
    """
    if not isinstance(drafter, Drafter) or isinstance(drafter, type) or not is_dataclass(drafter):
        refuse("drafter", "a drafter of funcspec.drafters", type_name(drafter), "pass what standalone or eagle returns", ArgumentTypeError)
    held = vars(drafter)
    if isinstance(held.get("second"), Drafter):
        return replace(drafter, **{"second": argmax(held["second"])})
    if "proposal" not in held:
        refuse("drafter", "a drafter with a model", type_name(drafter), "use it as it is: its drafts are points", ModelError)
    return replace(drafter, **{"proposal": "argmax"})


__all__ = ["argmax"]
