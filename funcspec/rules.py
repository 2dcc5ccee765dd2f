"""Acceptance rules as values. A rule says which tokens a round emits and which random stream the drafter draws from.

Both rules here are *matching* rules: the target chooses its own token at every place, a draft is kept while it equals
that choice, and the target's choice is what is emitted. The output is therefore the target's own sample path, whatever
was drafted. (Daliri, Musco and Suresh 2024, arXiv 2408.07978, for the coupled form.)
"""

from dataclasses import dataclass

from funcspec.noise import TARGET


@dataclass(frozen=True)
class Rule:
    """A matching acceptance rule.

    Attributes:
        name: the rule's name.
        samples: whether temperatures above 0 are allowed.
        draft_stream: the random stream the drafter draws its tokens from.
    """

    name: str
    samples: bool
    draft_stream: int

    def __repr__(self) -> str:
        return f"rules.{self.name}"


greedy = Rule("greedy", samples=False, draft_stream=TARGET)
"""Every row is greedy: a draft is kept while it is the target's arg-max. Temperatures other than 0 are refused."""

coupled = Rule("coupled", samples=True, draft_stream=TARGET)
"""Draft and target draw with the same noise, so that they agree often. Output equals ordinary sampling with the same seed,
for every drafter and every number of drafts; rows at temperature 0 are greedy."""

__all__ = ["Rule", "coupled", "greedy"]
