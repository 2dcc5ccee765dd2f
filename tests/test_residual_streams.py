"""Targets that hand over several residual streams side by side: heads read all of them."""

from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from head_oracle import CONFIGS, SMALL, agreeing_pair
from oracle import config, output

import funcspec as fs
from funcspec.drafters import eagle
from funcspec.errors import ModelError
from funcspec.models import ForwardBatch, KVSpec
from funcspec.models.base import KV
from funcspec.models.heads import EagleConfig, EagleHead, random_head
from funcspec.models.llama import Llama, random_llama

PROMPTS = [[5, 6, 7], [1, 2], [40, 2, 9, 9, 33]]


@dataclass(frozen=True, eq=False)
class Streams:
    """A Llama whose hidden states come as two streams: themselves, and three times themselves."""

    llama: Llama
    residual_multiplier: int = 2

    def __getattr__(self, name: str) -> Any:
        return getattr(self.llama, name)

    @property
    def vocab_size(self) -> int:
        return self.llama.vocab_size

    @property
    def max_len(self) -> int:
        return self.llama.max_len

    @property
    def kv_spec(self) -> KVSpec:
        return self.llama.kv_spec

    def forward(self, kv: KV, batch: ForwardBatch) -> tuple[KV, torch.Tensor, tuple[torch.Tensor, ...]]:
        kv, logits, hidden = self.llama.forward(kv, batch)
        return kv, logits, tuple(torch.cat([states, 3 * states], 1) for states in hidden)


def rounds(target: Any, head: EagleHead, *, donate: bool) -> list[Any]:
    drafter = eagle(head)
    state = fs.init(config(3, 32, 3, block_size=4), target, drafter)
    state, _ = fs.admit(state, target, drafter, PROMPTS, chunk=2, max_tokens=18)
    found = []
    while fs.any_active(state):
        state, verdict = fs.step_round(state, target, drafter, donate=donate)
        found.append((verdict.num_drafted.tolist(), verdict.num_accepted.tolist()))
    return [found, [output(state, row) for row in range(3)]]


@pytest.mark.parametrize("donate", [False, True], ids=["pure", "donated"])
def test_a_head_reads_all_streams(donate: bool) -> None:
    """fc over [h, 3 h] is made to equal fc over h: the same rounds."""
    pair = agreeing_pair("eagle3")
    fc = pair.head.weights["fc"]
    other = torch.randn(fc.shape, generator=torch.Generator().manual_seed(3))
    count, size = len(pair.head.config.target_layers), pair.head.config.hidden_size
    parts = [(fc - 3 * other).unflatten(1, (count, size)), other.unflatten(1, (count, size))]
    wide = EagleHead(replace(pair.head.config, residual_multiplier=2), pair.head.weights | {"fc": torch.cat(parts, 2).flatten(1)})
    assert wide.features.size == 2 * pair.head.features.size and wide.features.feedback == pair.head.features.feedback
    found = rounds(Streams(pair.target), wide, donate=donate)
    assert found == rounds(pair.target, pair.head, donate=donate)
    assert any(sum(accepted) for _, accepted in found[0])


def test_widths_that_do_not_fit_are_refused() -> None:
    target = random_llama(SMALL)
    settings = config(1, 32, 3)
    wide = random_head(replace(CONFIGS["eagle3"], residual_multiplier=2))
    with pytest.raises(ModelError, match=r"^drafter: expected a draft for hidden states of 24 from 3 layers, 72 in all, got one for 144"):
        fs.init(settings, target, eagle(wide))
    with pytest.raises(ModelError, match=r"^drafter: expected a draft for hidden states of 48 from 3 layers, 144 in all, got one for 72"):
        fs.init(settings, Streams(target), eagle(random_head(CONFIGS["eagle3"])))
    for style, streams in (("eagle", 2), ("mtp", 2), ("eagle3", 0)):
        shape = vars(CONFIGS["eagle" if style == "eagle" else style]) | {"residual_multiplier": streams}
        with pytest.raises(ModelError, match=r"^residual_multiplier: expected 1, or more with 'eagle3'"):
            EagleConfig(**shape)
