"""The token to emit should a draft be rejected, with given random numbers."""

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from funcspec.errors import ArgumentError, ArgumentTypeError
from funcspec.kernels.recovered_tokens import sample_recovered_tokens_

from .guarded import POISON, Buffers


def arguments_for(
    device: str, counts: list[int], drafts: list[int], p: Any, q: Any, numbers: Any, most: int | None = None
) -> tuple[dict[str, Any], Buffers]:
    buffers = Buffers(device)

    def array(values: Any, dtype: torch.dtype) -> torch.Tensor:
        return torch.tensor(values, dtype=dtype, device=device)

    arguments = {
        "cu_num_draft_tokens": array(np.cumsum(counts), torch.int32),
        "draft_token_ids": array(drafts, torch.int32),
        "draft_probs": None if q is None else array(q, torch.float32),
        "target_probs": array(p, torch.float32),
        "inv_q": array(numbers, torch.float64),
        "max_spec_len": max(counts, default=0) if most is None else most,
        "out_token_ids": buffers.poisoned(len(drafts)),
    }
    return arguments, buffers


def run(backend: str, arguments: dict[str, Any], buffers: Buffers) -> list[int]:
    sample_recovered_tokens_(**arguments, backend=backend)
    buffers.check()
    return arguments["out_token_ids"].tolist()


def oracle(counts: list[int], drafts: list[int], p: Any, q: Any, numbers: Any) -> list[int]:
    """The contract, a token at a time."""
    chosen, at = [], 0
    for row, count in enumerate(counts):
        for i in range(at, at + count):
            target = np.asarray(p[i], np.float32)
            others = [0.0 if token == drafts[i] else float(value) for token, value in enumerate(target)]
            choices = [others]
            if q is not None:
                drawn = np.asarray(q[i], np.float32) * (drafts[i] >= 0)
                choices.insert(0, [float(max(a - b, np.float32(0))) for a, b in zip(target, drawn, strict=True)])
            scores = [[weight * number for weight, number in zip(weights, numbers[row], strict=True)] for weights in choices]
            best = next((score for score in scores if max(score) > 0), None)
            chosen.append(max(drafts[i], 0) if best is None else best.index(max(best)))
        at += count
    return chosen


def test_the_residual(backend: str, kernel_device: str) -> None:
    p, q = [[0.2, 0.5, 0.3], [0.2, 0.5, 0.3]], [[0.1, 0.8, 0.1], [0.3, 0.1, 0.6]]
    assert run(backend, *arguments_for(kernel_device, [2], [1, 1], p, q, [[1, 1, 1]])) == [2, 1]
    assert run(backend, *arguments_for(kernel_device, [2], [1, 1], p, q, [[3, 1, 1]])) == [0, 1]


def test_points_lose_their_draft(backend: str, kernel_device: str) -> None:
    p = [[0.2, 0.5, 0.3], [0.2, 0.5, 0.3]]
    assert run(backend, *arguments_for(kernel_device, [1, 1], [1, 0], p, None, [[1, 1, 1], [9, 1, 2]])) == [2, 2]


def test_no_residual_is_no_reason_for_token_zero(backend: str, kernel_device: str) -> None:
    """The reference emits token 0 where p = q, even where the target excludes it."""
    p = [[0.0, 0.6, 0.4], [0.0, 1.0, 0.0], [0.0, 0.0, 0.0], [0.0, 0.0, 0.0]]
    assert run(backend, *arguments_for(kernel_device, [4], [1, 1, 2, -1], p, p, [[1, 1, 1]])) == [2, 1, 2, 0]
    assert run(backend, *arguments_for(kernel_device, [4], [1, 1, 2, -1], p, None, [[1, 1, 1]])) == [2, 1, 2, 0]


def test_where_nothing_was_proposed_the_target_decides_alone(backend: str, kernel_device: str) -> None:
    p, q = [[0.2, 0.5, 0.3]], [[0.0, 0.5, 0.0]]
    assert run(backend, *arguments_for(kernel_device, [1], [-1], p, q, [[1, 1, 1]])) == [1]


def test_ties_go_to_the_lowest_id_also_across_blocks(backend: str, kernel_device: str) -> None:
    p = np.zeros((1, 2500), np.float32)
    p[0, [2400, 1030, 1029]] = 0.25
    assert run(backend, *arguments_for(kernel_device, [1], [7], p, None, np.ones((1, 2500)))) == [1029]
    assert run(backend, *arguments_for(kernel_device, [1], [7], p, p * 0, np.ones((1, 2500)))) == [1029]


def test_drafts_beyond_the_most_are_left_alone(backend: str, kernel_device: str) -> None:
    p = [[0.2, 0.8]] * 4
    assert run(backend, *arguments_for(kernel_device, [3, 1], [0] * 4, p, None, [[1, 1]] * 2, most=2)) == [1, 1, POISON, 1]
    assert run(backend, *arguments_for(kernel_device, [3, 1], [0] * 4, p, None, [[1, 1]] * 2, most=0)) == [POISON] * 4


def test_the_law() -> None:
    """Inverse exponential numbers draw from the residual."""
    draws, rng = 4000, np.random.default_rng(4)
    p, q = np.array([0.5, 0.3, 0.2]), np.array([0.2, 0.7, 0.1])
    numbers = 1 / rng.exponential(size=(draws, 3))
    given_arguments = arguments_for("cpu", [1] * draws, [1] * draws, np.tile(p, (draws, 1)), np.tile(q, (draws, 1)), numbers)
    shares = np.bincount(run("reference", *given_arguments), minlength=3) / draws
    assert np.abs(shares - [0.75, 0, 0.25]).max() < 5 * np.sqrt(0.25 / draws)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.integers(0, 4), max_size=4), st.integers(1, 7), st.integers(0, 10**6), st.booleans())
def test_ragged_batches(backend: str, kernel_device: str, counts: list[int], vocabulary: int, seed: int, drawn: bool) -> None:
    rng, total = np.random.default_rng(seed), sum(counts)
    drafts = rng.integers(-1, vocabulary, total).tolist()
    p, q = (rng.integers(0, 4, (total, vocabulary)).astype(np.float32) / 8 for _ in range(2))
    numbers = rng.integers(1, 4, (len(counts), vocabulary)).astype(np.float64)
    expected = oracle(counts, drafts, p, q if drawn else None, numbers)
    assert run(backend, *arguments_for(kernel_device, counts, drafts, p, q if drawn else None, numbers)) == expected


def test_refusals_write_nothing(backend: str, kernel_device: str) -> None:
    def refused(error: type[Exception], match: str, **changes: Any) -> None:
        arguments, buffers = arguments_for(kernel_device, [1, 1], [0, 1], [[0.5, 0.5]] * 2, [[0.5, 0.5]] * 2, [[1, 1]] * 2)
        arguments.update(changes)
        with pytest.raises(error, match=match):
            run(backend, arguments, buffers)
        assert (arguments["out_token_ids"] == POISON).all()

    def zeros(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.zeros(shape, dtype=dtype, device=kernel_device)

    refused(ArgumentTypeError, "cu_num_draft_tokens", cu_num_draft_tokens=zeros(2))
    refused(ArgumentError, "target_probs", target_probs=zeros(1, 2))
    refused(ArgumentError, "target_probs", target_probs=zeros(2, 0))
    refused(ArgumentError, "draft_probs", draft_probs=zeros(2, 3))
    refused(ArgumentTypeError, "draft_probs", draft_probs=zeros(2, 2, dtype=torch.float16))
    refused(ArgumentError, "inv_q", inv_q=zeros(1, 2))
    refused(ArgumentTypeError, "inv_q", inv_q=zeros(2, 2, dtype=torch.int32))
