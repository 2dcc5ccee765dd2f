"""Verification with given coins and noise, draw by draw, as a block and at given rates."""

from itertools import product
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from funcspec import noise
from funcspec.errors import ArgumentError, ArgumentTypeError
from funcspec.kernels.rejection import RULES, rejection_sample_

from .guarded import POISON, Buffers

INF = float("inf")


class Batch:
    """Rows of (state, drafts) with random logits, coins and noise, all in NumPy; tensors are made for a launch."""

    def __init__(
        self, rows: list[tuple[int, list[int]]], temperature: list[float], vocabulary: int, seed: int, width: int, drawn: int | None = None
    ) -> None:
        rng = np.random.default_rng(seed)
        self.rows, self.temperature, self.width = rows, np.array(temperature, np.float32), width
        self.starts = np.cumsum([0, *(len(drafts) + 1 for _, drafts in rows)])
        total = int(self.starts[-1])
        self.drafts = np.array([token for _, drafts in rows for token in (-5, *drafts)], np.int64)
        self.target = rng.normal(size=(total, vocabulary)).astype(np.float32) * 2
        self.draft_logits = None
        if drawn is not None:
            self.draft_logits = rng.normal(size=(len(temperature), width - 1, drawn)).astype(np.float32) * 2
        self.coins = rng.integers(0, 2**32, total, dtype=np.uint32)
        self.words = rng.integers(0, 2**32, (len(rows), vocabulary), dtype=np.uint32)
        self.rates = rng.random(width - 1).astype(np.float32)

    def arguments(self, device: str, rule: str, dtype: torch.dtype = torch.int32) -> tuple[dict[str, Any], Buffers]:
        buffers = Buffers(device)

        def array(values: np.ndarray, dtype: torch.dtype | None = dtype) -> torch.Tensor:
            return torch.tensor(values, dtype=dtype, device=device)

        whole = buffers.poisoned(len(self.rows) * (self.width + 2), dtype)
        return {
            "target_logits": array(self.target, None),
            "draft_logits": None if self.draft_logits is None else array(self.draft_logits, None),
            "draft_token_ids": array(self.drafts),
            "cu_num_logits": array(self.starts),
            "idx_mapping": array(np.array([state for state, _ in self.rows], np.int64)),
            "temperature": array(self.temperature, None),
            "coins": array(self.coins.view(np.int32), None),
            "noise_words": array(self.words.view(np.int32), None),
            "rule": rule,
            "conditional_rates": array(self.rates, None) if rule == "rates" else None,
            "out_token_ids": whole.view(len(self.rows), self.width + 2)[:, : self.width],
            "out_num_sampled": buffers.poisoned(len(self.rows), dtype),
        }, buffers

    def run(self, backend: str, device: str, rule: str, dtype: torch.dtype = torch.int32, **changes: Any) -> list[list[int]]:
        """The tokens that each row emits."""
        arguments, buffers = self.arguments(device, rule, dtype)
        rejection_sample_(**arguments | changes, backend=backend)
        buffers.check()
        whole = arguments["out_token_ids"].tolist()
        counts = arguments["out_num_sampled"].tolist()
        assert all(row[count:] == [-1] * (self.width - count) for row, count in zip(whole, counts, strict=True))
        return [row[:count] for row, count in zip(whole, counts, strict=True)]

    def expected(self, rule: str) -> list[list[int]]:
        """The contract, in NumPy; asserts that no decision is so close that rounding could turn it."""
        return [self.expected_row(row, rule) for row in range(len(self.rows))]

    def expected_row(self, row: int, rule: str) -> list[int]:
        state, drafts = self.rows[row]
        if not 0 <= state < len(self.temperature):
            return []
        heat, begin = float(self.temperature[state]), int(self.starts[row])
        vocabulary = self.target.shape[1]
        drafts = drafts[: self.width - 1]
        drafts = drafts[: next((i for i, token in enumerate(drafts) if not 0 <= token < vocabulary), len(drafts))]
        logits = self.target[begin : begin + len(drafts) + 1].astype(np.float64)
        p = softmax(logits)
        coins = self.coins[begin : begin + len(drafts)] * 2.0**-32
        if heat == 0:
            best = logits.argmax(1)
            kept = 0
            while kept < len(drafts) and (coins[kept] < self.rates[kept] if rule == "rates" else drafts[kept] == best[kept]):
                kept += 1
            return [*drafts[:kept], int(best[kept])]
        q = np.zeros_like(p[:-1])
        points = []
        for i, draft in enumerate(drafts):
            if self.draft_logits is not None:
                scores = (self.draft_logits[state, i] / np.float32(heat)).astype(np.float64)
                q[i, : len(scores)] = softmax(scores[None])[0]
            points.append(q[i, draft] == 0)
            if points[i]:
                q[i] = np.eye(vocabulary)[draft]
        kept, weight = self.count_kept(rule, drafts, p, q, coins)
        gumbel = noise.gumbel(self.words[row]).astype(np.float64)
        weights = p[kept].copy()
        if kept < len(drafts):
            left = np.maximum(weight * p[kept] - q[kept], 0)
            others = np.where(np.arange(vocabulary) == drafts[kept], 0, weights)
            weights = left if left.any() and not points[kept] else others
            if not weights.any():
                return [*drafts[:kept], drafts[kept]]
        with np.errstate(divide="ignore"):
            scores = np.sort(np.log(weights) + gumbel)
            assert len(scores) < 2 or scores[-1] - scores[-2] > 1e-9
            return [*drafts[:kept], int(np.argmax(np.log(weights) + gumbel))]

    def count_kept(self, rule: str, drafts: list[int], p: np.ndarray, q: np.ndarray, coins: np.ndarray) -> tuple[int, float]:
        picked = [(p[i, draft], q[i, draft]) for i, draft in enumerate(drafts)]
        if rule != "block":
            for i, (a, b) in enumerate(picked):
                limit = float(self.rates[i]) if rule == "rates" else min(a / b, 1.0)
                assert limit == 1 or abs(coins[i] - limit) > 1e-12
                if coins[i] >= limit:
                    return i, 1.0
            return len(drafts), 1.0
        weights = [1.0]
        for a, b in picked:
            weights.append(min(weights[-1] * a / b, 1.0))
        for kept in range(len(drafts), 0, -1):
            weight = weights[kept]
            threshold = weight
            if kept < len(drafts):
                excess = np.maximum(weight * p[kept] - q[kept], 0).sum()
                threshold = excess / (excess + 1 - weight) if excess + 1 > weight else 1.0
            if coins[kept - 1] < threshold:
                return kept, weight
        return 0, 1.0


def softmax(scores: np.ndarray) -> np.ndarray:
    shifted = np.exp(scores - scores.max(1, keepdims=True))
    return shifted / shifted.sum(1, keepdims=True)


RULE = pytest.mark.parametrize("rule", RULES)


@RULE
def test_greedy_rows(backend: str, kernel_device: str, rule: str) -> None:
    batch = Batch([(0, [2, 1, 0]), (0, [2, 1, 0]), (0, [])], [0.0], 3, 0, 4)
    batch.target[:] = 0
    for row, column in enumerate([2, 1, 0, 1, 2, 0, 0, 0, 1]):
        batch.target[row, column] = 5
    batch.rates[:] = [1, 0, 1]
    expected = [[2, 1], [2, 0], [1]] if rule == "rates" else [[2, 1, 0, 1], [2, 0], [1]]
    assert batch.run(backend, kernel_device, rule) == expected


@RULE
def test_equal_distributions_keep_every_draft(backend: str, kernel_device: str, rule: str) -> None:
    batch = Batch([(0, [1, 4, 2])], [1.0], 5, 3, 4, drawn=5)
    assert batch.draft_logits is not None
    batch.draft_logits[0] = batch.target[:3]
    batch.coins[:] = 2**32 - 1
    batch.rates[:] = 1
    found = batch.run(backend, kernel_device, rule)[0]
    assert found[:3] == [1, 4, 2] and len(found) == 4


@RULE
def test_placeholders_end_the_drafts(backend: str, kernel_device: str, rule: str) -> None:
    batch = Batch([(0, [1, -1, 2]), (0, [-1]), (0, [5, 1])], [1.0], 5, 1, 4, drawn=5)
    batch.coins[:] = 0
    found = batch.run(backend, kernel_device, rule)
    assert [len(tokens) for tokens in found] == [2, 1, 1]
    assert found == batch.expected(rule)


@RULE
def test_no_residual_is_no_reason_for_token_zero(backend: str, kernel_device: str, rule: str) -> None:
    """A draft that is the target's only token is kept, or stands where rates reject it; so the reference's token 0 never comes."""
    batch = Batch([(0, [3])], [1.0], 5, 1, 2, drawn=5)
    assert batch.draft_logits is not None
    batch.target[0] = batch.draft_logits[0, 0] = [-INF, -INF, -INF, 2.0, -INF]
    batch.rates[:] = 0
    assert batch.run(backend, kernel_device, rule)[0][0] == 3


@RULE
def test_a_draft_that_its_own_row_excludes_is_a_point(backend: str, kernel_device: str, rule: str) -> None:
    batch = Batch([(0, [3]), (0, [3])], [1.0], 5, 2, 2, drawn=5)
    assert batch.draft_logits is not None
    batch.draft_logits[0, 0, 3] = -INF
    batch.coins[[0, 2]] = [2**32 - 1, 0]
    batch.rates[:] = 0.5
    found = batch.run(backend, kernel_device, rule)
    assert found == batch.expected(rule)
    assert found[0][0] != 3 and found[1][0] == 3


@RULE
def test_tokens_that_only_the_target_knows(backend: str, kernel_device: str, rule: str) -> None:
    """The reference never emits them."""
    batch = Batch([(0, [1]), (1, [1])], [1.0, 0.0], 9, 4, 2, drawn=4)
    batch.target[:, 6] = 50
    batch.coins[:] = 2**32 - 1
    batch.rates[:] = 0
    assert batch.run(backend, kernel_device, rule) == [[6], [6]]


@RULE
def test_rows_without_a_request_emit_nothing(backend: str, kernel_device: str, rule: str) -> None:
    batch = Batch([(-1, [1]), (0, [1]), (2, [1])], [1.0], 5, 4, 2)
    found = batch.run(backend, kernel_device, rule)
    assert found[0] == found[2] == [] and found[1]
    starts = torch.tensor([0, 0, 2, 99], dtype=torch.int32, device=kernel_device)
    states = torch.tensor([0, 0, 0], dtype=torch.int32, device=kernel_device)
    found = batch.run(backend, kernel_device, rule, cu_num_logits=starts, idx_mapping=states)
    assert found[0] == found[2] == [] and found[1]


def test_logits_that_are_not_finite(backend: str, kernel_device: str) -> None:
    batch = Batch([(0, []), (0, []), (1, []), (0, [2])], [1.0, 0.0], 3, 4, 2)
    batch.target[:3] = [[float("nan"), INF, 1.0], [-INF] * 3, [INF, float("nan"), -3.0]]
    batch.target[3] = -INF
    assert batch.run(backend, kernel_device, "ratio") == [[2], [0], [2], [2]]


@RULE
def test_a_vocabulary_of_several_blocks(backend: str, kernel_device: str, rule: str) -> None:
    batch = Batch([(0, [1500, 20, 2047]), (1, [3]), (2, [2040, 7])], [0.8, 0.0, 1.3], 2100, 5, 4, drawn=2050)
    batch.target[[0, 1, 4], [1500, 20, 3]] = 14
    assert batch.run(backend, kernel_device, rule) == batch.expected(rule)


@RULE
def test_long_blocks(backend: str, kernel_device: str, rule: str) -> None:
    """Enough rows that blocks end everywhere and that the weight of the target in the residual decides."""
    drafts = np.random.default_rng(1).integers(0, 6, (16, 3)).tolist()
    batch = Batch([(0, row) for row in drafts], [1.0], 6, 119, 4, drawn=6)
    batch.rates[:] = 0.8
    expected = batch.expected(rule)
    assert {len(row) for row in expected} == {1, 2, 3, 4}
    assert batch.run(backend, kernel_device, rule) == expected


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data(), st.integers(1, 7), st.integers(1, 4), st.sampled_from(RULES), st.sampled_from([torch.int32, torch.int64]))
def test_ragged_batches(
    backend: str, kernel_device: str, data: st.DataObject, vocabulary: int, width: int, rule: str, dtype: torch.dtype
) -> None:
    temperature = data.draw(st.lists(st.sampled_from([0.0, 0.7, 1.0]), min_size=1, max_size=3))
    row = st.tuples(st.integers(-1, len(temperature)), st.lists(st.integers(-1, vocabulary), max_size=width + 1))
    drawn = data.draw(st.none() | st.integers(1, vocabulary))
    batch = Batch(data.draw(st.lists(row, max_size=4)), temperature, vocabulary, data.draw(st.integers(0, 10**6)), width, drawn)
    assert batch.run(backend, kernel_device, rule, dtype) == batch.expected(rule)


@pytest.mark.parametrize("rule", ["ratio", "block"])
def test_the_law_of_whole_rounds(rule: str) -> None:
    """Drafts drawn from q, verified many times: what is emitted, and continued by the target, has the target's law."""
    draws, vocabulary = 2000, 2
    rng = np.random.default_rng(8)
    p0, q0 = softmax(rng.normal(size=(2, vocabulary)) * 1.5)
    p_next, q_next = (softmax(rng.normal(size=(vocabulary, vocabulary)) * 1.5) for _ in range(2))
    first = (rng.random(draws) > q0[0]).astype(int)
    second = (rng.random(draws) > q_next[first, 0]).astype(int)
    batch = Batch([(row, [first[row], second[row]]) for row in range(draws)], [1.0] * draws, vocabulary, 9, 3, drawn=vocabulary)
    assert batch.draft_logits is not None
    batch.target[0::3] = np.log(p0)
    batch.target[1::3], batch.target[2::3] = np.log(p_next[first]), np.log(p_next[second])
    batch.draft_logits[:, 0], batch.draft_logits[:, 1] = np.log(q0), np.log(q_next[first])
    emitted = batch.run("reference", "cpu", rule)
    pairs = [(row[0], row[1] if len(row) > 1 else int(rng.random() > p_next[row[0], 0])) for row in emitted]
    for a, b in product(range(vocabulary), repeat=2):
        share, probability = sum(pair == (a, b) for pair in pairs) / draws, p0[a] * p_next[a, b]
        assert abs(share - probability) < 4.5 * np.sqrt(probability * (1 - probability) / draws)
    weights = np.minimum(p0 / q0, 1)
    if rule == "block":
        second_weights = np.minimum(weights[:, None] * p_next / q_next, 1)
    else:
        second_weights = weights[:, None] * np.minimum(p_next / q_next, 1)
    length = (q0 * weights).sum() + (q0[:, None] * q_next * second_weights).sum()
    assert abs(np.mean([len(row) - 1 for row in emitted]) - length) < 4.5 / np.sqrt(draws)


def test_refusals_write_nothing(backend: str, kernel_device: str) -> None:
    def refused(error: type[Exception], match: str, rule: str = "ratio", **changes: Any) -> None:
        arguments, _ = Batch([(0, [1, 2]), (1, [3])], [1.0, 0.0], 5, 0, 3, drawn=5).arguments(kernel_device, rule)
        arguments |= changes
        with pytest.raises(error, match=match):
            rejection_sample_(**arguments, backend=backend)
        assert (arguments["out_num_sampled"] == POISON).all()

    def zeros(*shape: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
        return torch.zeros(shape, dtype=dtype, device=kernel_device)

    refused(ArgumentTypeError, "target_logits", target_logits=zeros(5, 5))
    refused(ArgumentError, "target_logits", target_logits=zeros(5, 0, dtype=torch.float32))
    refused(ArgumentError, "draft_logits", draft_logits=zeros(2, 1, 5, dtype=torch.float32))
    refused(ArgumentError, "draft_logits", draft_logits=zeros(2, 2, 6, dtype=torch.float32))
    refused(ArgumentError, "draft_token_ids", draft_token_ids=zeros(4))
    refused(ArgumentError, "cu_num_logits", cu_num_logits=zeros(2))
    refused(ArgumentError, "coins", coins=zeros(4))
    refused(ArgumentTypeError, "coins", coins=zeros(5, dtype=torch.float32))
    refused(ArgumentError, "noise_words", noise_words=zeros(1, 5))
    refused(ArgumentTypeError, "temperature", temperature=zeros(2))
    refused(ArgumentError, "conditional_rates", conditional_rates=zeros(2, dtype=torch.float32))
    refused(ArgumentError, "conditional_rates", "rates", conditional_rates=None)
    refused(ArgumentError, "conditional_rates", "rates", conditional_rates=zeros(1, dtype=torch.float32))
    refused(ArgumentError, "out_token_ids", out_token_ids=zeros(2, 0))
    arguments, _ = Batch([(0, [1])], [1.0], 5, 0, 2).arguments(kernel_device, "ratio")
    with pytest.raises(ArgumentError, match="rule: expected 'ratio' or 'block' or 'rates', got 'typical'"):
        rejection_sample_(**arguments | {"rule": "typical"}, backend=backend)
