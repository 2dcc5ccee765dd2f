"""What a drafter is: a frozen value that drafts on an open step."""

from typing import TYPE_CHECKING, Literal, Protocol, runtime_checkable

from funcspec.config import SpecConfig
from funcspec.models.base import Array, Model

if TYPE_CHECKING:
    from funcspec.transitions import Transition


Proposal = Literal["sampled", "argmax", "point"]
"""Drafts are drawn from a distribution of the drafter at the row's temperature, are its model's likeliest tokens, or are just proposed.

Those that are not sampled are judged as points.
"""


@runtime_checkable
class Drafter(Protocol):
    """Anything with these members can draft; no base class and no registry is needed.

    A drafter that fills all places at step 0, and whose `next` so has nothing to do, may say so with an attribute `one_pass` that is True.
    """

    @property
    def proposal(self) -> Proposal:
        """How drafts are made."""
        ...

    @property
    def token_ids(self) -> Array | None:
        """[V_draft] int32, draft id to target id, or None where they are the same."""
        ...

    @property
    def kv_model(self) -> Model | None:
        """The model whose KV the state keeps for this drafter, or None."""
        ...

    def init(self, config: SpecConfig, target: Model) -> None:
        """Check that the drafter fits the target and the configuration.

        Raises:
            ModelError: the drafter cannot draft for this target; names both values.
        """
        ...

    def first(self, transition: "Transition", wanted: Array) -> None:
        """Draft step 0: take in what was committed since the last round and append the first draft of every row.

        Args:
            transition: the open step. Its small buffers may be written only after the last forward, so that a model that raises
                leaves the state usable.
            wanted: [R] int32, drafts asked for; read only. Rows that want none are fed all the same.
        """
        ...

    def next(self, transition: "Transition") -> None:
        """One more draft for every row that has fewer than planned. Drafters that fill all places at step 0 do nothing."""
        ...
