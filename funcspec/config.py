"""`SpecConfig`: everything about a speculator that never changes while it runs."""

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch

from funcspec.errors import ArgumentTypeError, refuse

if TYPE_CHECKING:
    from funcspec.rules import Rule

MIN_TEMPERATURE = 0.01
"""Lowest temperature above 0; smaller ones overflow the logits and are refused."""

MAX_TEMPERATURE = 1e6
"""Highest temperature: well inside float32, and so high that every allowed token is as likely as any other."""

MAX_SLOTS = 2**31
"""Slots are stored as int32, so a pool holds fewer than this many."""


LEAST_BLOCKS = 64
"""A pool is never smaller unless asked for: small configurations are for trying things out, with many old states alive."""


@dataclass(frozen=True)
class SpecConfig:
    """Static description of a speculator: capacities, the acceptance rule, where it lives. Frozen and hashable.

    Attributes:
        max_num_reqs: R, number of request rows.
        max_model_len: L, longest row, prompt and output together, in tokens.
        num_speculative_tokens: K, most drafts a row can have in a round; 0 is plain decoding.
        rule: the acceptance rule, for example `funcspec.rules.greedy`. It is part of the configuration because drafting
            depends on it.
        block_size: B, tokens in a KV block.
        num_blocks: blocks in each KV pool. None is twice what all rows need at full length, and at least 64, so that old
            states and forks have room.
        max_num_stop_ids: S, most stop token ids a row can have.
        allows_min_tokens: whether rows may have a least number of tokens, before which no stop id comes. It costs a copy of the
            target's logits in each round.
        device: where buffers live, as torch spells it.

    Raises:
        ArgumentError, ArgumentTypeError: a field is out of range or has the wrong type.

    Example:
        >>> from funcspec import rules
        >>> config = SpecConfig(max_num_reqs=2, max_model_len=64, num_speculative_tokens=3, rule=rules.greedy)
        >>> config.blocks_per_row, config.num_kv_blocks
        (4, 64)
    """

    max_num_reqs: int
    max_model_len: int
    num_speculative_tokens: int
    rule: "Rule"
    block_size: int = 16
    num_blocks: int | None = None
    max_num_stop_ids: int = 4
    allows_min_tokens: bool = False
    device: str = "cpu"

    def __post_init__(self) -> None:
        least = {
            "max_num_reqs": 1,
            "max_model_len": 2,
            "num_speculative_tokens": 0,
            "block_size": 1,
            "num_blocks": 1,
            "max_num_stop_ids": 0,
        }
        for name, low in least.items():
            value = getattr(self, name)
            if name == "num_blocks" and value is None:
                continue
            if not isinstance(value, int) or isinstance(value, bool):
                refuse(name, "an int", f"{value!r} ({type(value).__name__})", "pass a plain Python int", ArgumentTypeError)
            if value < low:
                refuse(name, f"at least {low}", value, f"choose a {name} of {low} or more")
        if not isinstance(self.allows_min_tokens, bool):
            refuse("allows_min_tokens", "True or False", repr(self.allows_min_tokens), "pass a bool", ArgumentTypeError)
        if not hasattr(self.rule, "draft_stream"):
            refuse("rule", "an acceptance rule", repr(self.rule), "pass funcspec.rules.greedy or funcspec.rules.coupled", ArgumentTypeError)
        if self.num_speculative_tokens >= self.max_model_len:
            refuse(
                "num_speculative_tokens",
                f"below max_model_len = {self.max_model_len}",
                self.num_speculative_tokens,
                "draft fewer tokens or allow longer rows",
            )
        if not isinstance(self.device, str | torch.device):
            refuse("device", "a device that torch knows", repr(self.device), "use 'cpu' or 'cuda'")
        try:
            kind = self.device_type
        except (RuntimeError, TypeError) as error:
            refuse("device", "a device that torch knows", repr(self.device), f"use 'cpu' or 'cuda' ({error})")
        if kind not in ("cpu", "cuda"):
            refuse("device", "'cpu' or 'cuda'", repr(self.device), "use one of these")
        if kind == "cuda" and not torch.cuda.is_available():
            refuse("device", "a device of this machine", repr(self.device), "install a CUDA build of torch, or use 'cpu'")
        if self.num_kv_blocks * self.block_size >= MAX_SLOTS:
            refuse(
                "num_blocks",
                f"fewer than 2^31 slots (num_blocks * block_size = {self.num_kv_blocks * self.block_size})",
                self.num_kv_blocks,
                "use fewer or smaller blocks",
            )
        if self.max_num_reqs * self.max_model_len >= MAX_SLOTS:
            refuse("max_model_len", "fewer than 2^31 tokens in all rows", self.max_model_len, "use fewer or shorter rows")

    @property
    def device_type(self) -> str:
        """Kind of device: "cpu" or "cuda"."""
        return torch.device(self.device).type

    @property
    def blocks_per_row(self) -> int:
        """N, width of a block table."""
        return -(-self.max_model_len // self.block_size)

    @property
    def num_kv_blocks(self) -> int:
        """Blocks that each KV pool has."""
        return self.num_blocks if self.num_blocks is not None else max(2 * self.max_num_reqs * self.blocks_per_row, LEAST_BLOCKS)

    def replace(self, **changes: object) -> "SpecConfig":
        """Return a copy with some fields changed, validated anew."""
        return replace(self, **changes)  # type: ignore[arg-type]


def check_config(config: object) -> None:
    """Refuse what is no configuration."""
    if not isinstance(config, SpecConfig):
        refuse("config", "a SpecConfig", type(config).__name__, "make one with SpecConfig(...)", ArgumentTypeError)
