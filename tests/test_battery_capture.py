"""Rounds of every drafter as one CUDA graph: what they emit is what eager rounds emit."""

from typing import Any

import pytest
import torch
from all_drafters import NAMES, made, rebuilt
from one_pass import HEAT, PROMPTS, SEEDS, TARGET
from oracle import config, output

import funcspec as fs

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


def on_gpu(value: Any) -> Any:
    """The same model or drafter with its tensors on the GPU."""
    return rebuilt(value, lambda part: part.cuda() if isinstance(part, torch.Tensor) else None)


@pytest.mark.parametrize("rule", [fs.rules.coupled, fs.rules.ratio], ids=repr)
@pytest.mark.parametrize("name", NAMES)
def test_captured_rounds_are_eager_rounds(name: str, rule: fs.rules.Rule) -> None:
    target, drafter = on_gpu(TARGET), on_gpu(made(name))
    found = []
    for captured in (False, True):
        state = fs.init(config(4, 28, 3, rule=rule, block_size=4, device="cuda"), target, drafter)
        state, _ = fs.admit(state, target, drafter, PROMPTS, seeds=SEEDS, temperature=HEAT, rows=[0, 2, 3])
        turn = fs.graphs.capture(fs.step_round, state, target, drafter) if captured else None
        kept = []
        while fs.any_active(state):
            state, verdict = fs.step_round(state, target, drafter, donate=True) if turn is None else turn(state)
            kept.append(verdict.num_accepted.tolist())
        found.append((kept, [output(state, row) for row in range(4)]))
    assert found[0] == found[1]
