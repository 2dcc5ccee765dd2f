"""The newest valid token of each row."""

from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from funcspec.errors import ArgumentError, ArgumentTypeError
from funcspec.kernels.next_tokens import prepare_next_token_padded_

from .guarded import POISON, Buffers


def arguments(
    device: str, rows: list[list[int]], discarded: list[bool], backups: list[int], vocab_size: int, dtype: torch.dtype = torch.int32
) -> dict[str, Any]:
    buffers = Buffers(device)
    return {
        "buffers": buffers,
        "sampled_token_ids": buffers.table(rows, dtype),
        "discard_request_mask": torch.tensor(discarded, dtype=torch.bool, device=device),
        "backup_next_token_ids": torch.tensor(backups, dtype=dtype, device=device),
        "vocab_size": vocab_size,
        "out_next_token_ids": buffers.poisoned(len(rows) + 1, dtype),
        "out_valid_sampled_tokens_count": buffers.poisoned(len(rows) + 1, dtype),
    }


def run(backend: str, given: dict[str, Any]) -> tuple[list[int], list[int]]:
    buffers = given.pop("buffers")
    prepare_next_token_padded_(**given, backend=backend)
    buffers.check()
    outputs = [given[name].tolist() for name in ("out_next_token_ids", "out_valid_sampled_tokens_count")]
    assert [values.pop() for values in outputs] == [POISON, POISON]
    return outputs[0], outputs[1]


def test_worked_example(backend: str, kernel_device: str) -> None:
    rows = [[7, 8, -1, -1], [5, 6, 4, 9], [-1, -1, -1, -1], [1, 2, 3, -1]]
    given = arguments(kernel_device, rows, [False, False, False, True], [10, 20, 30, 40], 100)
    assert run(backend, given) == ([8, 9, 30, 40], [2, 4, 0, 0])


def test_e3_only_ids_of_the_vocabulary_are_valid(backend: str, kernel_device: str) -> None:
    rows = [[5, -2, -1, -1], [5, 100, -1, -1], [100, 3, -1, -1], [-(2**31), 2**31 - 1, -1, -1], [0, 99, -1, -1]]
    given = arguments(kernel_device, rows, [False] * 5, [10, 20, 30, 40, 50], 100)
    assert run(backend, given) == ([5, 5, 3, 40, 99], [1, 1, 1, 0, 2])


def test_valid_tokens_count_wherever_they_stand(backend: str, kernel_device: str) -> None:
    given = arguments(kernel_device, [[5, -1, 7, -1], [-1, 5, -1, -1]], [False, False], [10, 20], 100)
    assert run(backend, given) == ([7, 5], [2, 1])


@pytest.mark.parametrize("rows", [[], [[3]]], ids=["no rows", "one column"])
def test_small_shapes(backend: str, kernel_device: str, rows: list[list[int]]) -> None:
    given = arguments(kernel_device, rows, [False] * len(rows), [9] * len(rows), 10)
    if not rows:
        given["sampled_token_ids"] = torch.zeros(0, 4, dtype=torch.int32, device=kernel_device)
    assert run(backend, given) == (([3], [1]) if rows else ([], []))


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data(), st.integers(1, 6), st.integers(1, 12), st.sampled_from([torch.int32, torch.int64]))
def test_ragged_batches(backend: str, kernel_device: str, data: st.DataObject, width: int, vocab_size: int, dtype: torch.dtype) -> None:
    row = st.lists(st.integers(-3, 14), min_size=width, max_size=width)
    batch = data.draw(st.lists(st.tuples(row, st.booleans(), st.integers(0, 99)), min_size=1, max_size=5))
    tokens, counts = [], []
    for row_tokens, discarded, backup in batch:
        valid = [] if discarded else [token for token in row_tokens if token in range(vocab_size)]
        tokens.append(valid[-1] if valid else backup)
        counts.append(len(valid))
    rows, discarded, backups = (list(column) for column in zip(*batch, strict=True))
    assert run(backend, arguments(kernel_device, rows, discarded, backups, vocab_size, dtype)) == (tokens, counts)


def test_refusals_write_nothing(backend: str, kernel_device: str) -> None:
    def refused(error: type[Exception], match: str, **changes: Any) -> None:
        given = arguments(kernel_device, [[1, 2]] * 3, [False] * 3, [4, 5, 6], 10) | changes
        with pytest.raises(error, match=match):
            run(backend, given)
        assert (given["out_next_token_ids"] == POISON).all()

    refused(ArgumentError, "discard_request_mask", discard_request_mask=torch.zeros(2, dtype=torch.bool, device=kernel_device))  # K6
    refused(ArgumentTypeError, "discard_request_mask", discard_request_mask=torch.zeros(3, dtype=torch.int32, device=kernel_device))
    refused(ArgumentError, "backup_next_token_ids", backup_next_token_ids=torch.zeros(2, dtype=torch.int32, device=kernel_device))
    refused(ArgumentError, "sampled_token_ids", sampled_token_ids=torch.zeros(3, dtype=torch.int32, device=kernel_device))
    refused(ArgumentError, "sampled_token_ids", sampled_token_ids=torch.zeros(2, 3, dtype=torch.int32, device=kernel_device).T)
    refused(ArgumentError, "vocab_size", vocab_size=0)
