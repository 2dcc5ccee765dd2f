"""Flat batches of drafts verified with given random numbers."""

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from funcspec.errors import ArgumentError, ArgumentTypeError
from funcspec.kernels.batch_rejection import rejection_greedy_sample_, rejection_random_sample_

from .guarded import POISON, Buffers


class Batch:
    """Rows of drafts with what judges them, in tensors of one device; the output lies in a wider, guarded buffer."""

    def __init__(self, device: str, counts: list[int], seed: int = 0, width: int | None = None, vocabulary: int = 5, **fixed: Any) -> None:
        self.device, self.buffers = device, Buffers(device)
        rng, total = np.random.default_rng(seed), sum(counts)
        self.width = max(counts, default=0) + 1 if width is None else width
        self.counts, self.vocabulary = counts, vocabulary
        self.drafts = rng.integers(-1, vocabulary, total)
        self.chosen = rng.integers(0, 2, total) * (self.drafts.clip(0) - 1) % vocabulary
        self.p, self.q = (rng.dirichlet(np.ones(vocabulary), total).astype(np.float32) for _ in range(2))
        self.uniforms, self.recovered = rng.random(total), rng.integers(100, 200, total)
        self.rates = rng.random(self.width - 1).astype(np.float32)
        self.is_greedy, self.bonus = rng.random(len(counts)) < 0.5, rng.integers(200, 300, len(counts))
        for name, value in fixed.items():
            setattr(self, name, np.array(value, dtype=getattr(self, name).dtype))
        whole = self.buffers.poisoned(len(counts) * (self.width + 2))
        self.out = whole.view(len(counts), self.width + 2)[:, : self.width]

    def array(self, values: Any, dtype: torch.dtype | None = torch.int32) -> torch.Tensor:
        return torch.tensor(values, dtype=dtype, device=self.device)

    def greedy(self, rates: bool, mask: bool = True) -> dict[str, Any]:
        return {
            "cu_num_draft_tokens": self.array(np.cumsum(self.counts)),
            "draft_token_ids": self.array(self.drafts),
            "target_argmax": self.array(self.chosen, torch.int64),
            "bonus_token_ids": self.array(self.bonus),
            "is_greedy": self.array(self.is_greedy, None) if mask else None,
            "uniform_probs": self.array(self.uniforms, torch.float64) if rates else None,
            "conditional_rates": self.array(self.rates, None) if rates else None,
            "out_token_ids": self.out,
        }

    def random(self, rates: bool, drawn: bool = True) -> dict[str, Any]:
        arguments = self.greedy(rates)
        del arguments["target_argmax"]
        return arguments | {
            "uniform_probs": self.array(self.uniforms, torch.float64),
            "draft_probs": self.array(self.q, None) if drawn else None,
            "target_probs": self.array(self.p, None),
            "recovered_token_ids": self.array(self.recovered),
        }

    def expected(self, greedy: bool, rates: bool, drawn: bool = True, mask: bool = True) -> list[list[int]]:
        """The contract, a draft at a time."""
        rows, at = [], 0
        for row, count in enumerate(self.counts):
            out, place = [POISON] * self.width, 0
            if not mask or bool(self.is_greedy[row]) == greedy:
                for place in range(min(count, self.width - 1) + 1):
                    if place == min(count, self.width - 1):
                        out[place] = int(self.bonus[row])
                        break
                    i, draft = at + place, int(self.drafts[at + place])
                    if rates:
                        kept = draft >= 0 and self.uniforms[i] < float(self.rates[place])
                    elif greedy:
                        kept = draft == self.chosen[i]
                    else:
                        p, q = (float(table[i, draft]) if draft >= 0 else 0.0 for table in (self.p, self.q))
                        q = q if drawn else 1.0
                        kept = p > 0 and q > 0 and p >= self.uniforms[i] * q
                    out[place] = draft if kept else int((self.chosen if greedy else self.recovered)[i])
                    if not kept:
                        break
            rows.append(out)
            at += count
        return rows

    def run(self, op: Any, arguments: dict[str, Any], backend: str) -> list[list[int]]:
        op(**arguments, backend=backend)
        self.buffers.check()
        return self.out.tolist()


def test_greedy_rows(backend: str, kernel_device: str) -> None:
    batch = Batch(
        kernel_device,
        [3, 0, 2, 2],
        drafts=[1, 2, 3, 4, 4, 2, 2],
        chosen=[1, 4, 3, 4, 4, 0, 2],
        bonus=[90, 91, 92, 93],
        is_greedy=[True, True, True, False],
    )
    found = batch.run(rejection_greedy_sample_, batch.greedy(rates=False), backend)
    assert found == [[1, 4, POISON, POISON], [91] + [POISON] * 3, [4, 4, 92, POISON], [POISON] * 4]


def test_sampled_rows(backend: str, kernel_device: str) -> None:
    p = [[0.1, 0.9], [0.6, 0.4], [0.5, 0.5], [0.3, 0.7]]
    batch = Batch(
        kernel_device,
        [2, 2],
        vocabulary=2,
        drafts=[0, 1, 1, -1],
        p=p,
        q=[[0.4, 0.6], [0.6, 0.4], [0.2, 0.8], [0.5, 0.5]],
        uniforms=[0.2, 0.99, 0.62, 0.0],
        recovered=[100, 101, 102, 103],
        bonus=[90, 91],
        is_greedy=[False, False],
    )
    assert batch.run(rejection_random_sample_, batch.random(rates=False), backend) == [[0, 1, 90], [1, 103, POISON]]
    batch.uniforms[0] = 0.26
    assert batch.run(rejection_random_sample_, batch.random(rates=False), backend)[0] == [100, 1, 90]  # what was there stays


def test_an_impossible_token_is_never_kept(backend: str, kernel_device: str) -> None:
    """The reference's comparison lets it through where the uniform number is 0."""
    batch = Batch(kernel_device, [1, 1], vocabulary=2, drafts=[0, 0], p=[[0, 1], [1, 0]], q=[[1, 0], [0, 1]], uniforms=[0, 0])
    batch.is_greedy[:] = False
    assert [row[0] for row in batch.run(rejection_random_sample_, batch.random(rates=False), backend)] == batch.recovered.tolist()


def test_drafts_outside_of_the_vocabulary_are_never_kept(backend: str, kernel_device: str) -> None:
    batch = Batch(kernel_device, [1, 1], vocabulary=2, drafts=[2, 10**9], uniforms=[0, 0], rates=[1.0])
    batch.is_greedy[:] = False
    for rates in (False, True):
        assert [row[0] for row in batch.run(rejection_random_sample_, batch.random(rates), backend)] == batch.recovered.tolist()


def test_drafts_beyond_the_output_are_not_looked_at(backend: str, kernel_device: str) -> None:
    batch = Batch(kernel_device, [3], width=3, drafts=[1, 2, 3], chosen=[1, 2, 3], bonus=[90], is_greedy=[True])
    assert batch.run(rejection_greedy_sample_, batch.greedy(rates=False), backend) == [[1, 2, 90]]


def test_prefix_sums_out_of_bounds_stay_inside_the_batch(backend: str, kernel_device: str) -> None:
    batch = Batch(kernel_device, [2, 2], drafts=[1, 2, 3, 4], chosen=[1, 2, 3, 4], bonus=[90, 91], is_greedy=[True, True])
    arguments = batch.greedy(rates=False) | {"cu_num_draft_tokens": batch.array([3, 9])}
    assert batch.run(rejection_greedy_sample_, arguments, backend) == [[1, 2, 90], [4, 91, POISON]]


def test_both_operations_fill_one_output(backend: str, kernel_device: str) -> None:
    batch = Batch(kernel_device, [2, 3, 1, 0, 2], seed=3, is_greedy=[True, False, True, False, False])
    rejection_greedy_sample_(**batch.greedy(rates=False), backend=backend)
    rejection_random_sample_(**batch.random(rates=False), backend=backend)
    both = zip(batch.expected(True, False), batch.expected(False, False), strict=True)
    assert batch.out.tolist() == [greedy if greedy[0] != POISON else sampled for greedy, sampled in both]


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.integers(0, 5), max_size=5), st.integers(0, 10**6), st.booleans(), st.booleans(), st.none() | st.integers(1, 4))
def test_ragged_batches(
    backend: str, kernel_device: str, counts: list[int], seed: int, rates: bool, optional: bool, width: int | None
) -> None:
    batch = Batch(kernel_device, counts, seed, width)
    found = batch.run(rejection_greedy_sample_, batch.greedy(rates, mask=optional), backend)
    assert found == batch.expected(True, rates, mask=optional)
    batch = Batch(kernel_device, counts, seed, width)
    found = batch.run(rejection_random_sample_, batch.random(rates, drawn=optional), backend)
    assert found == batch.expected(False, rates, drawn=optional)


def test_refusals_write_nothing(backend: str, kernel_device: str) -> None:
    def refused(op: Any, error: type[Exception], match: str, rates: bool = False, **changes: Any) -> None:
        batch = Batch(kernel_device, [2, 1], is_greedy=[True, False])
        arguments = (batch.greedy if op is rejection_greedy_sample_ else batch.random)(rates) | changes
        with pytest.raises(error, match=match):
            op(**arguments, backend=backend)
        assert (batch.out == POISON).all()

    def zeros(*shape: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
        return torch.zeros(shape, dtype=dtype, device=kernel_device)

    for op in (rejection_greedy_sample_, rejection_random_sample_):
        refused(op, ArgumentError, "bonus_token_ids", bonus_token_ids=zeros(1))
        refused(op, ArgumentTypeError, "draft_token_ids", draft_token_ids=zeros(3, dtype=torch.float32))
        refused(op, ArgumentTypeError, "is_greedy", is_greedy=zeros(2))
        refused(op, ArgumentError, "conditional_rates", rates=True, conditional_rates=zeros(1, dtype=torch.float32))
        refused(op, ArgumentError, "out_token_ids", out_token_ids=zeros(1, 3))
        refused(op, ArgumentError, "out_token_ids", out_token_ids=zeros(2, 0))
        refused(op, ArgumentTypeError, "uniform_probs", rates=True, uniform_probs=zeros(3))
    refused(rejection_greedy_sample_, ArgumentError, "uniform_probs", conditional_rates=zeros(2, dtype=torch.float32))
    refused(rejection_greedy_sample_, ArgumentError, "target_argmax", target_argmax=zeros(2))
    refused(rejection_random_sample_, ArgumentError, "recovered_token_ids", recovered_token_ids=zeros(2))
    refused(rejection_random_sample_, ArgumentError, "target_probs", target_probs=zeros(2, 5, dtype=torch.float32))
    refused(rejection_random_sample_, ArgumentError, "draft_probs", draft_probs=zeros(3, 4, dtype=torch.float32))
    refused(rejection_random_sample_, ArgumentTypeError, "draft_probs", draft_probs=zeros(3, 5))
