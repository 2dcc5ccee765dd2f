"""What a state knows of its models, and the arrays that it carries along for them besides its fields."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from funcspec.config import SpecConfig
from funcspec.models.base import FeatureSpec, KVSpec

PROPOSALS = ("draft_logits", "draft_normalisers", "is_point")
"""What a ratio rule needs to know of this round's drafts, by name; see `carried_layout`."""

FEATURES = "features"
"""What a draft reads of its target's hidden states, by name; see `carried_layout`."""

ROPE_POSITIONS = "rope_positions"
"""What models rotate by in place of positions, by name; see `carried_layout`."""

LASTING = (FEATURES, ROPE_POSITIONS)
"""What is carried from round to round; the rest is worth nothing at the start of one."""

CARRIED = (*PROPOSALS, *LASTING)


@dataclass(frozen=True)
class Partner:
    """What a state remembers of a model it was made for, to refuse strangers."""

    vocab_size: int
    max_len: int
    kv_spec: KVSpec
    features: FeatureSpec | None = None
    rope_axes: int = 0

    @property
    def lag(self) -> int:
        """Tokens at the end of a row that have no position in the draft's cache: the newest one has no hidden state yet."""
        return 0 if self.features is None else 1


def carried_layout(config: SpecConfig, partners: Mapping[str, Partner]) -> dict[str, tuple[tuple[int, ...], torch.dtype, float]]:
    """Shape, dtype and fill of the arrays that a state carries along besides its fields, as far as anything asks for them.

    For a ratio rule, the distributions that drafts were drawn from. Logits are float32, which holds those of every model exactly, and
    lie at target ids: `verify` does not know a drafter's map. A state without a draft model has none, and all its drafts are points.

    For a draft that reads hidden states, features: at the start of a round those of positions draft_len, draft_len + 1, ... up to the
    last token but one, in mid-round at place 0 what the draft handed to its own next pass. float32 as well.

    For models with rotary positions of their own (M-RoPE), those of every position of a row.
    """
    rows, most = config.max_num_reqs, config.num_speculative_tokens
    spec = partners["draft"].features if "draft" in partners else None
    lasting: dict[str, Any] = {} if spec is None else {FEATURES: ((rows, most + 1, spec.size), torch.float32, 0.0)}
    if axes := partners["target"].rope_axes:
        lasting[ROPE_POSITIONS] = ((rows, axes, config.max_model_len), torch.int32, 0)
    if config.rule.judges_by != "ratio" or most == 0:
        return lasting
    width = partners["target"].vocab_size if "draft" in partners else 0
    return lasting | {
        "draft_logits": ((rows, most, width), torch.float32, -float("inf")),
        "draft_normalisers": ((rows, most, 2), torch.int32, 0),
        "is_point": ((rows,), torch.int32, 0),
    }


def new_carried(config: SpecConfig, partners: Mapping[str, Partner], names: Collection[str] = CARRIED) -> dict[str, torch.Tensor]:
    """Allocate those of them that are named."""
    layout = carried_layout(config, partners).items()
    return {name: torch.full(shape, fill, dtype=dtype, device=config.device) for name, (shape, dtype, fill) in layout if name in names}


__all__ = [
    "CARRIED",
    "FEATURES",
    "LASTING",
    "PROPOSALS",
    "ROPE_POSITIONS",
    "Partner",
    "carried_layout",
    "new_carried",
]
