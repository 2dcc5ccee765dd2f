"""What a model is told of a batch is derived anew for every pass, into the same buffers: nothing is left over from the pass before."""

from dataclasses import dataclass, field

import pytest
import torch
from oracle import CHECKSUM_RUNS, config

import funcspec as fs
from funcspec.drafters import standalone
from funcspec.models import ChecksumDraft, ChecksumModel, ForwardBatch
from funcspec.models.base import KV

PROMPTS = [list(prompt) for prompt in CHECKSUM_RUNS]
ARRAYS = ("input_ids", "positions", "query_start_loc", "seq_lens", "slot_mapping")

Pass = dict[str, tuple[int, list[int]]]


@dataclass(frozen=True)
class Watched(ChecksumModel):
    """Notes where the arrays of its batches lie, and what is in them."""

    passes: list[Pass] = field(default_factory=list, compare=False)

    def forward(self, kv: KV, batch: ForwardBatch) -> tuple[KV, torch.Tensor, tuple[torch.Tensor, ...]]:
        self.passes.append({name: (getattr(batch, name).data_ptr(), getattr(batch, name).tolist()) for name in ARRAYS})
        return super().forward(kv, batch)


@dataclass(frozen=True)
class WatchedDraft(Watched, ChecksumDraft):
    """The draft likewise."""


def rounds(count: int, *, donate: bool, anew: bool = False) -> tuple[list[Pass], list[Pass]]:
    """Passes of target and draft in some rounds; perhaps each round on a state made of a snapshot, with buffers that were never used."""
    target, draft = Watched(), WatchedDraft()
    drafter = standalone(draft)
    state = fs.init(config(4, 40, 3, block_size=4), target, drafter)
    state, _ = fs.admit(state, target, drafter, PROMPTS, rows=[0, 1, 3])
    target.passes.clear()
    draft.passes.clear()
    for number in range(count):
        state = fs.restore(fs.snapshot(state)) if anew else state
        state, _ = fs.step_round(state, target, drafter, num_draft=[3, 1, 2, number % 4], donate=donate)
    return target.passes, draft.passes


@pytest.mark.parametrize("donate", [False, True], ids=["pure", "donated"])
def test_inputs_are_refreshed_in_place(donate: bool) -> None:
    """The arrays of a kind of pass lie at one address in all rounds, so that a captured round finds them there."""
    target, draft = rounds(6, donate=donate)
    assert (len(target), len(draft)) == (6, 18)
    for passes in (target, draft[0::3], draft[1::3], draft[2::3]):
        for name in ARRAYS:
            assert len({one[name][0] for one in passes}) == 1, name
    assert len({tuple(one["positions"][1]) for one in target}) == 6


@pytest.mark.parametrize("donate", [False, True], ids=["pure", "donated"])
def test_nothing_is_left_over(donate: bool) -> None:
    """They hold what they hold in buffers that were never used before."""
    for used, fresh in zip(rounds(6, donate=donate), rounds(6, donate=donate, anew=True), strict=True):
        assert [{name: values for name, (_, values) in one.items()} for one in used] == [
            {name: values for name, (_, values) in one.items()} for one in fresh
        ]
