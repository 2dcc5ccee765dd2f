"""Standalone drafting: a smaller language model with its own KV drafts one token a step."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

import jax

from funcspec.config import SpecConfig
from funcspec.drafters.base import Proposal
from funcspec.drafters.pairs import check_draft, check_pair
from funcspec.errors import ModelError, refuse
from funcspec.models.base import Array, Model

if TYPE_CHECKING:
    from funcspec.transitions import Transition


@dataclass(frozen=True, eq=False)
class Standalone:
    """A draft model as a drafter; see `standalone`."""

    model: Model
    token_ids: Array | None = None
    proposal: Proposal = "sampled"

    @property
    def kv_model(self) -> Model:
        """The draft model."""
        return self.model

    def init(self, config: SpecConfig, target: Model) -> None:
        """Check the pair: vocabularies, ids, fingerprints."""
        check_pair(self.model, self.token_ids, target)

    def first(self, transition: "Transition", wanted: Array) -> None:
        """Feed what was committed and draft the first token."""
        transition.draft_once(self.model, first=True, token_ids=self.token_ids, wanted=wanted)

    def next(self, transition: "Transition") -> None:
        """Feed the newest draft and draft one more token."""
        transition.draft_once(self.model, first=False, token_ids=self.token_ids, wanted=transition.fields.num_draft)


# With a model of JAX that is a pytree, the drafter is an argument of a program, and its weights are no constants of it.
jax.tree_util.register_dataclass(Standalone, data_fields=["model", "token_ids"], meta_fields=["proposal"])


def standalone(model: Model, token_ids: Array | None = None) -> Standalone:
    """Make a drafter of a language model.

    The draft has its own KV, its own length limit (`model.max_len`: a row that outgrows it drafts fewer, then no tokens)
    and its own KV dtype.

    Args:
        model: the draft model. It reads target ids.
        token_ids: [V_draft] int32, the target id of each of the draft's output ids; for drafts that cover a part of the
            vocabulary. None where the ids are the same. A tensor, or for a model of JAX a jax.Array.

    Raises:
        ArgumentTypeError: `token_ids` is not a one-dimensional int32 array, or `model` is not a model.
        ArgumentError: `token_ids` does not have one distinct entry for each output of the model.
        ModelError: the model reads hidden states of a target.

    Example:
        >>> import funcspec as fs
        >>> drafter = fs.drafters.standalone(fs.models.ChecksumDraft())

    Reference: Leviathan et al. 2023, arXiv 2211.17192; Chen et al. 2023, arXiv 2302.01318.
    """
    check_draft("model", model, token_ids)
    if getattr(model, "features", None) is not None:
        refuse("model", "a language model", "a draft that reads hidden states", "make a drafter of it with eagle or parallel", ModelError)
    return Standalone(model, token_ids)
