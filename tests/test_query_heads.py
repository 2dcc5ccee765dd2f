"""Heads that read the target's cache: what they leave alone, what fits, and that copies of a state go on alike.

What they draft is held against heads written out in `test_head_drafts.py`, with all other heads.
"""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from head_oracle import CONFIGS, QUERIES, SHAPE, SMALL
from one_pass import SHAPE as TARGET_SHAPE
from one_pass import TARGET, check_values, start

import funcspec as fs
from funcspec.drafters import eagle, mtp
from funcspec.errors import ArgumentTypeError, ModelError
from funcspec.models import ForwardBatch
from funcspec.models.base import FeatureSpec
from funcspec.models.heads import random_head
from funcspec.models.llama import random_llama
from funcspec.models.query_heads import JaxQueryHead, QueryConfig, QueryHead, random_query_head

CONFIG = QUERIES["query-only"]
DRAFTER = mtp(random_query_head(QueryConfig(**TARGET_SHAPE | {"num_layers": 1}, target_layers=(2,), style="mtp", cache_layers=(1,)), 4))


@pytest.mark.parametrize("rule", [fs.rules.coupled, fs.rules.ratio], ids=repr)
def test_branches_and_copies_go_on_alike(rule: fs.rules.Rule) -> None:
    check_values(DRAFTER, rule)


def test_drafting_leaves_the_targets_cache_alone() -> None:
    state = start(DRAFTER, fs.rules.coupled)
    for _ in range(3):
        before = {name: cache.clone() for name, cache in state.lease.target.pool.kv.items()}
        state, _ = fs.prefill(state, DRAFTER, donate=True)
        for _ in range(2):
            state, draft = fs.decode(state, DRAFTER, donate=True)
        assert (draft.tokens >= 0).any()
        for name, cache in state.lease.target.pool.kv.items():
            assert torch.equal(cache.view(torch.int32), before[name].view(torch.int32))
        assert not state.lease.draft.pool.kv  # and there is no other
        state, _ = fs.verify(state, TARGET, donate=True)


def test_a_pass_reads_only_what_it_may_see() -> None:
    """Keys and values past a row's length may be anything."""
    head, kv = random_query_head(CONFIG), {}
    for name in ("key", "value"):
        shape = (SMALL.num_layers, 4, 4, SMALL.num_kv_heads, SMALL.head_dim)
        kv[name] = torch.randn(shape, generator=torch.Generator().manual_seed(3))
    features = torch.randn(1, SMALL.hidden_size, generator=torch.Generator().manual_seed(4))
    arrays = [torch.tensor(value, dtype=torch.int32) for value in ([7], [5], [0, 1], [6], [-1], [[2, 0]])]
    batch = ForwardBatch(*arrays, None, 1, features=features)
    _, logits, _ = head.forward(kv, batch)
    poisoned = {name: cache.clone() for name, cache in kv.items()}
    for cache in poisoned.values():
        cache[0] = cache[2] = float("nan")  # layers that it does not read
        cache[1, 1] = cache[1, 3] = float("nan")  # blocks of others
        cache[1, 0, 2:] = float("nan")  # places behind the row's end
    _, again, _ = head.forward(poisoned, batch)
    assert torch.equal(logits, again)
    _, same, _ = JaxQueryHead.from_torch(head).forward(kv_of_jax(poisoned), of_jax(batch))
    np.testing.assert_allclose(same, logits, atol=1e-5)


def kv_of_jax(kv: dict[str, torch.Tensor]) -> dict[str, Any]:
    return {name: np.asarray(cache) for name, cache in kv.items()}


def of_jax(batch: ForwardBatch) -> ForwardBatch:
    arrays = {name: np.asarray(value) for name, value in vars(batch).items() if isinstance(value, torch.Tensor)}
    return replace(batch, **arrays)


def test_heads_for_another_cache_are_refused() -> None:
    head, narrow = random_query_head(CONFIG), random_llama(replace(SMALL, num_layers=1))
    config = fs.SpecConfig(max_num_reqs=1, max_model_len=16, num_speculative_tokens=2, rule=fs.rules.greedy)
    spec = replace(CONFIG, target_layers=(0,))
    cases = [
        (narrow, QueryHead(spec, head.weights), "a cache of 1 layers"),
        (random_llama(replace(SMALL, head_dim=4)), head, "expected a draft that reads a cache of 3 layers with .*4"),
        (random_llama(SMALL, dtype=torch.bfloat16), head, "with the target's dtype"),
    ]
    for target, model, match in cases:
        with pytest.raises(ModelError, match=match):
            fs.init(config, target, mtp(model))
    for drafter in (mtp(head), eagle(head)):
        assert fs.init(config, random_llama(SMALL), drafter).num_tokens.tolist() == [0]


def test_configurations_that_cannot_be_are_refused() -> None:
    for layers in ((), (1, 2), [1]):
        with pytest.raises(ModelError, match=r"^cache_layers: expected a tuple of 1, one for each layer"):
            QueryConfig(**SHAPE, target_layers=(3,), cache_layers=layers)
    with pytest.raises(ModelError, match=r"^cache_layers: expected layer numbers of the target"):
        FeatureSpec((1,), 8, cache_layers=(-1,))
    head = random_query_head(CONFIG)
    with pytest.raises(ArgumentTypeError, match=r"^config: expected a QueryConfig"):
        QueryHead(random_head(CONFIGS["mtp"]).config, head.weights)  # type: ignore[arg-type]
    with pytest.raises(ArgumentTypeError, match=r"^config: expected a QueryConfig"):
        JaxQueryHead.from_torch(random_head(CONFIGS["mtp"]))
