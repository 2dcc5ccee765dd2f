"""Acceptance rules as values. A rule says which tokens a round emits and which random stream the drafter draws from.

`greedy` and `coupled` are *matching* rules: the target chooses its own token at every place, a draft is kept while it equals
that choice, and the target's choice is what is emitted. The output is therefore the target's own sample path, whatever
was drafted. (Daliri, Musco and Suresh 2024, arXiv 2408.07978, for the coupled form.)

`ratio` compares probabilities: a draft is kept with probability min(1, p / q), where p is the target's and q the drafter's, and the
token after a rejection is drawn from max(p - q, 0). The output has the target's law, but is another sample than plain decoding with the
same seed gives. (Leviathan et al. 2023, arXiv 2211.17192; Chen et al. 2023, arXiv 2302.01318.)
"""

from dataclasses import dataclass
from typing import Literal

from funcspec.errors import ArgumentTypeError, check_bool, refuse
from funcspec.noise import DRAFT, TARGET


@dataclass(frozen=True)
class Rule:
    """An acceptance rule.

    Attributes:
        name: the rule's name.
        samples: whether temperatures above 0 are allowed.
        draft_stream: the random stream the drafter draws its tokens from.
        judges_by: "matching" or "ratio", how drafts of rows at temperatures above 0 are judged; others are always matched.

    Raises:
        ArgumentError, ArgumentTypeError: a field is of the wrong type, or names no stream or no way to judge.
    """

    name: str
    samples: bool
    draft_stream: int
    judges_by: Literal["matching", "ratio"] = "matching"

    def __post_init__(self) -> None:
        if not isinstance(self.name, str):
            refuse("name", "a string", repr(self.name)[:60], "name the rule", ArgumentTypeError)
        check_bool("samples", self.samples)
        if type(self.draft_stream) is not int or self.draft_stream not in (DRAFT, TARGET):
            found = repr(self.draft_stream)[:60]
            refuse("draft_stream", f"{DRAFT} or {TARGET}", found, "use DRAFT or TARGET of funcspec.noise")
        if self.judges_by not in ("matching", "ratio"):
            refuse("judges_by", "'matching' or 'ratio'", repr(self.judges_by)[:60], "use one of these")

    def __repr__(self) -> str:
        return f"rules.{self.name}"


greedy = Rule("greedy", samples=False, draft_stream=TARGET)
"""Every row is greedy: a draft is kept while it is the target's arg-max. Temperatures other than 0 are refused."""

coupled = Rule("coupled", samples=True, draft_stream=TARGET)
"""Draft and target draw with the same noise, so that they agree often. Output equals ordinary sampling with the same seed,
for every drafter and every number of drafts; rows at temperature 0 are greedy."""

ratio = Rule("ratio", samples=True, draft_stream=DRAFT, judges_by="ratio")
"""Drafts are kept with the highest probability that leaves the target's law as it is. Needs to know what drafts were drawn from: the
state keeps the draft's logits within a round. Drafts that were just proposed count as certain ones. With no drafts it is plain
sampling; rows at temperature 0 are greedy."""

__all__ = ["Rule", "coupled", "greedy", "ratio"]
