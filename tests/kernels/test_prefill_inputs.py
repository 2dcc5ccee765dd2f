"""Expanded inputs of draft step 0."""

from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from funcspec.errors import ArgumentError, ArgumentTypeError
from funcspec.kernels.prefill_inputs import prepare_prefill_inputs_

from .guarded import POISON, Buffers

OUTPUTS = ("input_ids", "positions", "last_token_indices", "query_start_loc", "seq_lens", "is_live")


class Launch:
    """One batch and its buffers."""

    def __init__(
        self,
        device: str,
        rows: list[dict[str, Any]],
        last_sampled: list[int],
        max_num_reqs: int = 4,
        max_model_len: int = 64,
        overflow: str = "reference",
        spare: int = 5,
        dtype: torch.dtype = torch.int32,
    ) -> None:
        self.buffers = Buffers(device)
        starts = [0]
        for row in rows:
            starts.append(starts[-1] + len(row["ids"]))
        ids = [token for row in rows for token in row["ids"]]
        positions = [row["start"] + j for row in rows for j in range(len(row["ids"]))]

        def array(values: list[int]) -> torch.Tensor:
            return torch.tensor(values, dtype=dtype, device=device)

        places = len(ids) + len(rows) + spare
        self.arguments: dict[str, Any] = {
            "target_input_ids": array(ids),
            "target_positions": array(positions),
            "last_sampled": array(last_sampled),
            "idx_mapping": array([row["state"] for row in rows]),
            "query_start_loc": array(starts),
            "seq_lens": array([row.get("length", row["start"] + len(row["ids"])) for row in rows]),
            "num_rejected": array([row["rejected"] for row in rows]),
            "max_num_reqs": max_num_reqs,
            "max_model_len": max_model_len,
            "overflow": overflow,
            "out_input_ids": self.buffers.poisoned(places, dtype),
            "out_positions": self.buffers.poisoned(places, dtype),
            "out_last_token_indices": self.buffers.poisoned(max_num_reqs + 1, dtype),
            "out_query_start_loc": self.buffers.poisoned(max_num_reqs + 2, dtype),
            "out_seq_lens": self.buffers.poisoned(max_num_reqs + 1, dtype),
        }
        if overflow == "freeze":
            self.arguments["out_is_live"] = self.buffers.poisoned(places)

    def run(self, backend: str) -> dict[str, list[int]]:
        prepare_prefill_inputs_(**self.arguments, backend=backend)
        self.buffers.check()
        return {name: self.arguments[f"out_{name}"].tolist() for name in OUTPUTS if f"out_{name}" in self.arguments}


def oracle(launch: Launch, rows: list[dict[str, Any]], last_sampled: list[int]) -> dict[str, list[int]]:
    """The contract, a place at a time."""
    arguments = launch.arguments
    limit, capacity, freeze = arguments["max_model_len"], arguments["max_num_reqs"], arguments["overflow"] == "freeze"
    out = {name: arguments[f"out_{name}"].tolist() for name in OUTPUTS if f"out_{name}" in arguments}
    place = 0
    for i, row in enumerate(rows):
        query = len(row["ids"])
        active = query > 0 and 0 <= row["state"] < len(last_sampled)
        rejected = max(0, min(row["rejected"], query))
        kept = query - rejected
        length = row.get("length", row["start"] + query) - (rejected if freeze else 0) + 1
        out["query_start_loc"][i] = place
        out["seq_lens"][i] = min(length, limit) if active else 0
        out["last_token_indices"][i] = place + kept if active else 0
        for j in range(query + 1):
            token = row["ids"][j] if j < kept else last_sampled[row["state"]] if active and j == kept else 0
            out["input_ids"][place] = token if active else 0
            out["positions"][place] = min(row["start"] + j, limit - 1) if active else 0
            if freeze:
                out["is_live"][place] = int(active and j <= kept and row["start"] + j < limit)
            place += 1
    for i in range(len(rows), capacity):
        out["seq_lens"][i] = out["last_token_indices"][i] = 0
    for i in range(len(rows), capacity + 1):
        out["query_start_loc"][i] = place
    if freeze:
        for name in ("input_ids", "positions", "is_live"):
            out[name][place:] = [0] * (len(out[name]) - place)
    return out


EXAMPLE = [
    {"state": 2, "ids": [50, 51, 52], "start": 10, "rejected": 1},
    {"state": 0, "ids": [60, 61, 62], "start": 20, "rejected": 0},
]


def test_worked_example(backend: str, kernel_device: str) -> None:
    out = Launch(kernel_device, EXAMPLE, [88, 0, 77]).run(backend)
    assert out["input_ids"] == [50, 51, 77, 0, 60, 61, 62, 88] + [POISON] * 5
    assert out["positions"] == [10, 11, 12, 13, 20, 21, 22, 23] + [POISON] * 5
    assert out["last_token_indices"] == [2, 7, 0, 0, POISON]
    assert out["query_start_loc"] == [0, 4, 8, 8, 8, POISON]
    assert out["seq_lens"] == [14, 24, 0, 0, POISON]


def test_freeze_counts_live_keys_and_clears_the_tail(backend: str, kernel_device: str) -> None:
    out = Launch(kernel_device, EXAMPLE, [88, 0, 77], overflow="freeze").run(backend)
    assert out["input_ids"] == [50, 51, 77, 0, 60, 61, 62, 88] + [0] * 5
    assert out["positions"] == [10, 11, 12, 13, 20, 21, 22, 23] + [0] * 5
    assert out["is_live"] == [1, 1, 1, 0, 1, 1, 1, 1] + [0] * 5
    assert out["seq_lens"] == [13, 24, 0, 0, POISON]


def test_the_limit(backend: str, kernel_device: str) -> None:
    rows = [{"state": 0, "ids": [1, 2, 3, 4], "start": 28, "rejected": rejected} for rejected in (1, 0)]
    reference = Launch(kernel_device, rows, [99], max_model_len=32).run(backend)
    frozen = Launch(kernel_device, rows, [99], max_model_len=32, overflow="freeze").run(backend)
    for out in (reference, frozen):
        assert out["positions"][:10] == [28, 29, 30, 31, 31] * 2
        assert out["input_ids"][:10] == [1, 2, 3, 99, 0, 1, 2, 3, 4, 99]
        assert out["seq_lens"][:2] == [32, 32]
    # The correction of the second row would share position 31 with a live token.
    assert frozen["is_live"][:10] == [1, 1, 1, 1, 0, 1, 1, 1, 1, 0]


@pytest.mark.parametrize("overflow", ["reference", "freeze"])
def test_rows_without_a_request_are_inert(backend: str, kernel_device: str, overflow: str) -> None:
    rows = [
        {"state": -1, "ids": [5, 6], "start": 3, "rejected": 1},
        {"state": 0, "ids": [7], "start": 8, "rejected": 0},
        {"state": 0, "ids": [], "start": 0, "length": 9, "rejected": 3},
    ]
    out = Launch(kernel_device, rows, [42], overflow=overflow).run(backend)
    assert out["input_ids"][:6] == [0, 0, 0, 7, 42, 0]
    assert out["positions"][:6] == [0, 0, 0, 8, 9, 0]
    assert out["seq_lens"][:4] == [0, 10, 0, 0]
    assert out["last_token_indices"][:4] == [0, 4, 0, 0]
    assert out["query_start_loc"][:5] == [0, 3, 5, 6, 6]


def test_d3_smaller_batch_in_old_buffers_equals_fresh_buffers(backend: str, kernel_device: str) -> None:
    rows = [{"state": i, "ids": [10 * i + 1, 10 * i + 2], "start": 4 * i, "rejected": i % 2} for i in range(4)]
    old = Launch(kernel_device, rows, [91, 92, 93, 94], overflow="freeze", spare=0)
    old.run(backend)
    small = Launch(kernel_device, rows[:2], [91, 92, 93, 94], overflow="freeze", spare=6)
    fresh = small.run(backend)
    small.arguments.update({name: value for name, value in old.arguments.items() if name.startswith("out_")})
    assert small.run(backend) == fresh
    assert fresh["seq_lens"][2:4] == [0, 0]


def test_d4_rows_beyond_the_live_ones_have_length_zero(backend: str, kernel_device: str) -> None:
    rows = [{"state": i, "ids": [1, 2], "start": 4, "rejected": 0} for i in range(5)]
    out = Launch(kernel_device, rows, [9] * 5, max_num_reqs=8).run(backend)
    assert out["seq_lens"][:8] == [7] * 5 + [0] * 3
    assert out["query_start_loc"][:9] == [0, 3, 6, 9, 12, 15, 15, 15, 15]


def test_k4_one_more_token_a_row_fits_a_full_batch(backend: str, kernel_device: str) -> None:
    rows = [{"state": i, "ids": list(range(8)), "start": 0, "rejected": 0} for i in range(4)]
    launch = Launch(kernel_device, rows, [9] * 4, spare=0)
    assert launch.arguments["out_input_ids"].shape[0] == 36
    assert launch.run(backend)["input_ids"] == [*range(8), 9] * 4
    launch.arguments["out_input_ids"] = launch.arguments["out_input_ids"][:35]
    with pytest.raises(ArgumentError, match="out_input_ids"):
        launch.run(backend)


@pytest.mark.parametrize("overflow", ["reference", "freeze"])
def test_lengths_at_the_limit_of_int32(backend: str, kernel_device: str, overflow: str) -> None:
    last = 2**31 - 1
    rows = [{"state": 0, "ids": [last], "start": last - 1, "length": last, "rejected": 0}]
    out = Launch(kernel_device, rows, [last], max_model_len=last, overflow=overflow).run(backend)
    assert out["positions"][:2] == [last - 1, last - 1]
    assert out["seq_lens"][0] == last


def test_a_query_longer_than_a_tile(backend: str, kernel_device: str) -> None:
    rows = [{"state": 0, "ids": list(range(300)), "start": 7, "rejected": 10}, EXAMPLE[0] | {"state": 1}]
    launch = Launch(kernel_device, rows, [5, 6], overflow="freeze", max_num_reqs=300, max_model_len=280)
    expected = oracle(launch, rows, [5, 6])
    assert launch.run(backend) == expected


@st.composite
def batches(draw: st.DrawFn) -> tuple[list[dict[str, Any]], int]:
    states = draw(st.integers(1, 4))
    row = st.builds(
        dict,
        state=st.integers(-1, states - 1),
        ids=st.lists(st.integers(0, 2**31 - 1), max_size=6),
        start=st.integers(0, 40),
        rejected=st.integers(0, 7),
    )
    return draw(st.lists(row, max_size=5)), states


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(batches(), st.integers(1, 40), st.sampled_from(["reference", "freeze"]), st.sampled_from([torch.int32, torch.int64]))
def test_ragged_batches(
    backend: str, kernel_device: str, batch: tuple[list[dict[str, Any]], int], limit: int, overflow: str, dtype: torch.dtype
) -> None:
    rows, states = batch
    last_sampled = [100 + state for state in range(states)]
    launch = Launch(kernel_device, rows, last_sampled, len(rows) + 1, limit, overflow, dtype=dtype)
    expected = oracle(launch, rows, last_sampled)
    assert launch.run(backend) == expected


def test_refusals_write_nothing(backend: str, kernel_device: str) -> None:
    def refused(error: type[Exception], match: str, overflow: str = "reference", **changes: Any) -> None:
        launch = Launch(kernel_device, EXAMPLE, [88, 0, 77], overflow=overflow)
        launch.arguments.update(changes)
        with pytest.raises(error, match=match):
            launch.run(backend)
        for name in OUTPUTS[:5]:
            assert (launch.arguments[f"out_{name}"] == POISON).all()

    short = torch.zeros(1, dtype=torch.int32, device=kernel_device)
    refused(ArgumentError, "seq_lens", seq_lens=short)  # K6: another length than the batch
    refused(ArgumentError, "num_rejected", num_rejected=short)
    refused(ArgumentError, "query_start_loc", query_start_loc=short)
    refused(ArgumentTypeError, "last_sampled", last_sampled=torch.zeros(3, device=kernel_device))
    refused(ArgumentError, "max_num_reqs", max_num_reqs=1)
    refused(ArgumentError, "max_model_len", max_model_len=0)
    refused(ArgumentError, "overflow", overflow="wrap")
    refused(ArgumentError, "out_is_live", overflow="freeze", out_is_live=None)
    launch = Launch(kernel_device, EXAMPLE, [88, 0, 77], max_num_reqs=2)
    launch.arguments["out_query_start_loc"] = launch.arguments["query_start_loc"]
    with pytest.raises(ArgumentError, match="out_query_start_loc"):
        launch.run(backend)
