"""Choices with given noise words."""

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from funcspec import noise
from funcspec.errors import ArgumentError, ArgumentTypeError
from funcspec.kernels.given_noise import gumbel_sample_

from .guarded import POISON, Buffers

INF, NAN = float("inf"), float("nan")


def arguments_for(
    device: str, logits: torch.Tensor, states: list[int], temperature: list[float], seed: int = 0, **optional: Any
) -> tuple[dict[str, Any], Buffers]:
    buffers = Buffers(device)
    words = np.random.default_rng(seed).integers(0, 2**32, logits.shape, dtype=np.uint32).view(np.int32)
    arguments = {
        "logits": logits.to(device),
        "idx_mapping": torch.tensor(states, dtype=torch.int32, device=device),
        "temperature": torch.tensor(temperature, dtype=torch.float32, device=device),
        "noise_words": torch.from_numpy(words).to(device),
        "out_tokens": buffers.poisoned(len(states)),
        **optional,
    }
    return arguments, buffers


def run(backend: str, arguments: dict[str, Any], buffers: Buffers) -> list[int]:
    gumbel_sample_(**arguments, backend=backend)
    buffers.check()
    return arguments["out_tokens"].tolist()


def oracle(arguments: dict[str, Any]) -> list[int]:
    """The contract with the noise of the specification."""
    logits, words = arguments["logits"].float().cpu().numpy(), arguments["noise_words"].cpu().numpy().view(np.uint32)
    temperature = arguments["temperature"].cpu().numpy()
    chosen = []
    for row, state in enumerate(arguments["idx_mapping"].tolist()):
        if not 0 <= state < len(temperature):
            chosen.append(-1)
            continue
        scores = np.where(np.isnan(logits[row]) | (logits[row] == INF), np.float32(-INF), logits[row])
        if temperature[state] > 0:
            scores = scores / temperature[state] if arguments.get("apply_temperature", True) else scores
            scores = scores + noise.gumbel(words[row])
        chosen.append(int(np.argmax(scores)))
    return chosen


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("scaled", [True, False])
def test_equal_to_the_specification(backend: str, kernel_device: str, dtype: torch.dtype, scaled: bool) -> None:
    logits = torch.from_numpy(np.random.default_rng(5).normal(size=(12, 2100)).astype(np.float32) * 3).to(dtype)
    states = [0, 1, 2, -1, 2, 1, 1, 3, 2, 2, 1, 1]
    arguments, buffers = arguments_for(kernel_device, logits, states, [0.0, 0.6, 1.7], apply_temperature=scaled)
    expected = oracle(arguments)
    assert run(backend, arguments, buffers) == expected
    assert len(set(expected)) > 6


def test_the_law() -> None:
    """Words spread evenly over [0, 2^32) give every token its share."""
    probabilities, draws = np.array([0.5, 0.3, 0.2]), 4000
    logits = torch.from_numpy(np.log(probabilities).astype(np.float32)).repeat(draws, 1)
    arguments, buffers = arguments_for("cpu", logits, [0] * draws, [1.0], seed=3)
    shares = np.bincount(run("reference", arguments, buffers), minlength=3) / draws
    assert np.abs(shares - probabilities).max() < 5 * np.sqrt(0.25 / draws)


def test_ties_go_to_the_lowest_id_also_across_blocks(backend: str, kernel_device: str) -> None:
    logits = torch.zeros(2, 2500)
    logits[0, [2400, 1030, 1029]] = 9.0
    logits[1, [2400, 1024]] = 9.0
    arguments, buffers = arguments_for(kernel_device, logits, [0, 0], [0.0])
    assert run(backend, arguments, buffers) == [1029, 1024]
    arguments, buffers = arguments_for(kernel_device, torch.zeros(1, 2500), [0], [1.0])
    arguments["noise_words"].fill_(12345)
    assert run(backend, arguments, buffers) == [0]


@pytest.mark.parametrize("heat", [0.0, 0.8])
def test_logits_that_are_not_finite(backend: str, kernel_device: str, heat: float) -> None:
    logits = torch.tensor([[NAN, INF, -5.0, -INF], [-INF] * 4, [NAN] * 4])
    arguments, buffers = arguments_for(kernel_device, logits, [0, 0, 0], [heat])
    assert run(backend, arguments, buffers) == [2, 0, 0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_cache_keeps_the_bits_of_the_logits(backend: str, kernel_device: str, dtype: torch.dtype) -> None:
    logits = torch.from_numpy(np.random.default_rng(2).normal(size=(4, 1500)).astype(np.float32)).to(dtype)
    logits[0, 3] = NAN
    states, columns = [2, 0, -1, 1], [1, 0, 1, 2]
    cache = torch.full((3, 2, 1510), POISON, dtype=dtype, device=kernel_device)
    column = torch.tensor(columns, dtype=torch.int64, device=kernel_device)
    optional = {"logits_cache": cache, "logits_cache_col": column}
    arguments, buffers = arguments_for(kernel_device, logits, states, [0.7, 0.0, 1.0], **optional)
    run(backend, arguments, buffers)
    expected = torch.full((3, 2, 1510), POISON, dtype=dtype)
    expected[2, 1, :1500], expected[0, 0, :1500] = logits[0], logits[1]  # the others have no state or no such column
    assert torch.equal(cache.cpu().nan_to_num(), expected.nan_to_num())
    assert cache[2, 1, 3].isnan()


def test_one_column_for_all_rows(backend: str, kernel_device: str) -> None:
    cache = torch.full((2, 3, 4), float(POISON), device=kernel_device)
    optional = {"logits_cache": cache, "logits_cache_col": torch.tensor(1, device=kernel_device)}
    arguments, buffers = arguments_for(kernel_device, torch.arange(8.0).view(2, 4), [1, 0], [0.0, 0.0], **optional)
    assert run(backend, arguments, buffers) == [3, 3]
    assert cache[:, 1].tolist() == [[4, 5, 6, 7], [0, 1, 2, 3]] and (cache[:, [0, 2]] == POISON).all()


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data(), st.integers(0, 5), st.integers(1, 9), st.booleans())
def test_ragged_batches(backend: str, kernel_device: str, data: st.DataObject, rows: int, vocabulary: int, scaled: bool) -> None:
    temperature = data.draw(st.lists(st.sampled_from([0.0, 0.5, 1.0, 3.0]), min_size=1, max_size=3))
    states = [data.draw(st.integers(-1, len(temperature))) for _ in range(rows)]
    values = st.sampled_from([0.0, 1.0, -2.0, -INF, NAN, INF])
    logits = torch.tensor([[data.draw(values) for _ in range(vocabulary)] for _ in range(rows)]).view(rows, vocabulary)
    seed = data.draw(st.integers(0, 99))
    arguments, buffers = arguments_for(kernel_device, logits, states, temperature, seed, apply_temperature=scaled)
    expected = oracle(arguments)
    assert run(backend, arguments, buffers) == expected


def test_refusals_write_nothing(backend: str, kernel_device: str) -> None:
    def refused(error: type[Exception], match: str, **changes: Any) -> None:
        arguments, buffers = arguments_for(kernel_device, torch.zeros(2, 5), [0, 1], [1.0, 0.0])
        arguments.update(changes)
        with pytest.raises(error, match=match):
            run(backend, arguments, buffers)
        assert (arguments["out_tokens"] == POISON).all()

    def zeros(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.zeros(shape, dtype=dtype, device=kernel_device)

    column = zeros(2, dtype=torch.int32)
    refused(ArgumentTypeError, "logits", logits=zeros(2, 5, dtype=torch.int32))
    refused(ArgumentError, "logits", logits=zeros(2, 0))
    refused(ArgumentError, "idx_mapping", idx_mapping=column[:1])
    refused(ArgumentTypeError, "temperature", temperature=column)
    refused(ArgumentTypeError, "noise_words", noise_words=zeros(2, 5))
    refused(ArgumentError, "noise_words", noise_words=zeros(2, 4, dtype=torch.int32))
    refused(ArgumentError, "logits_cache_col", logits_cache=zeros(2, 1, 5))
    refused(ArgumentError, "logits_cache_col", logits_cache_col=column)
    refused(ArgumentError, "logits_cache_col", logits_cache=zeros(2, 1, 5), logits_cache_col=column[:1])
    refused(ArgumentError, "logits_cache", logits_cache=zeros(2, 1, 4), logits_cache_col=column)
    refused(ArgumentError, "logits_cache", logits_cache=zeros(1, 1, 5), logits_cache_col=column)
    refused(ArgumentTypeError, "logits_cache", logits_cache=zeros(2, 1, 5, dtype=torch.float16), logits_cache_col=column)
