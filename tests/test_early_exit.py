"""The target's own first layers as a draft."""

import jax.numpy as jnp
import numpy as np
import pytest
import torch

import funcspec as fs
from funcspec.drafters import early_exit
from funcspec.errors import ArgumentError, ArgumentTypeError, ModelError
from funcspec.models import ChecksumModel
from funcspec.models.jax_llama import JaxLlama
from funcspec.models.llama import LlamaConfig, random_llama

CONFIG = LlamaConfig(61, 3, 32, 48, 4, 2, 8, 64)
TARGET = random_llama(CONFIG, 3)
PROMPTS = [[5, 6, 7], [1], [40, 2, 9, 9]]


def outputs(target: object, drafter: object, rule: fs.rules.Rule = fs.rules.coupled, most: int = 3) -> tuple[list[list[int]], list[int]]:
    config = fs.SpecConfig(max_num_reqs=3, max_model_len=32, num_speculative_tokens=most, rule=rule)
    found: list[list[int]] = [[] for _ in PROMPTS]
    kept = []
    for emission in fs.generate(config, target, drafter, PROMPTS, seeds=[1, 2, 3], temperature=0.7, max_tokens=12):
        found[emission.prompt_index] += emission.tokens
        kept.append(emission.num_drafted - emission.num_accepted)
    return found, kept


def test_all_layers_draft_what_the_target_says() -> None:
    found, refused = outputs(TARGET, early_exit(TARGET, 3))
    assert found == outputs(TARGET, None)[0]
    assert not any(refused)


@pytest.mark.parametrize("num_layers", [1, 2])
@pytest.mark.parametrize("reduced", [False, True])
def test_fewer_layers_draft_and_nothing_is_lost(num_layers: int, reduced: bool) -> None:
    ids = torch.randperm(61, generator=torch.Generator().manual_seed(1))[:20].int() if reduced else None
    drafter = early_exit(TARGET, num_layers, ids)
    assert drafter.kv_model.kv_spec.num_layers == num_layers
    assert drafter.model.weights["embed"] is TARGET.weights["embed"]
    assert drafter.model.vocab_size == (20 if reduced else 61)
    found, refused = outputs(TARGET, drafter)
    assert found == outputs(TARGET, None)[0]
    assert any(refused)


@pytest.mark.jax_on_cpu
def test_a_model_of_jax_leaves_early_too() -> None:
    target = JaxLlama.from_torch(TARGET)
    ids = jnp.arange(0, 61, 2, dtype=jnp.int32)
    drafter = early_exit(target, 2, ids)
    same = early_exit(TARGET, 2, torch.from_numpy(np.asarray(ids).copy()))
    assert outputs(target, drafter) == outputs(TARGET, same)


def test_what_cannot_leave_early_is_refused() -> None:
    for target in (ChecksumModel(), type(TARGET), None):
        with pytest.raises(ArgumentTypeError, match="target"):
            early_exit(target, 1)
    for number in (0, 4, -1):
        with pytest.raises(ArgumentError, match=r"num_layers: expected from 1 to 3"):
            early_exit(TARGET, number)
    for number in (True, 1.0, None):
        with pytest.raises(ArgumentTypeError, match="num_layers"):
            early_exit(TARGET, number)
    for ids, error in (
        ([1, 2], ArgumentTypeError),
        (torch.tensor([1, 2]), ArgumentTypeError),
        (torch.tensor([[1]], dtype=torch.int32), ArgumentTypeError),
        (torch.tensor([1, 1], dtype=torch.int32), ArgumentError),
        (torch.tensor([1, 61], dtype=torch.int32), ModelError),
        (torch.tensor([-1, 3], dtype=torch.int32), ModelError),
    ):
        with pytest.raises(error, match="token_ids"):
            early_exit(TARGET, 2, ids)
