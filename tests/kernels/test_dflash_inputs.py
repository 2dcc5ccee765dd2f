"""Context and query blocks of a block drafter."""

from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from funcspec.errors import ArgumentError, ArgumentTypeError
from funcspec.kernels.dflash_inputs import copy_and_expand_dflash_inputs_

from .guarded import POISON, Buffers

OUTPUTS = (
    "input_ids",
    "query_positions",
    "query_slot_mapping",
    "context_positions",
    "context_slot_mapping",
    "token_indices",
    "query_start_loc",
    "seq_lens",
)
MASK = 7777
BOTH = pytest.mark.parametrize("overflow", ["reference", "freeze"])

Row = dict[str, Any]


class Launch:
    """One batch and its buffers. Rows are dictionaries of `start` and `end` positions, `rejected`, the `next` token and a `table`."""

    def __init__(
        self,
        device: str,
        rows: list[Row],
        drafts: int,
        block_size: int = 4,
        overflow: str = "reference",
        max_model_len: int = 64,
        anchor: bool = False,
        spare: int = 3,
        dtype: torch.dtype = torch.int32,
        slot_dtype: torch.dtype = torch.int64,
        **optional: Any,
    ) -> None:
        self.buffers = Buffers(device)
        self.rows, self.anchor = rows, anchor
        starts = [0]
        for row in rows:
            starts.append(starts[-1] + row["end"] - row["start"])
        queries = drafts + 1 - anchor

        def array(values: list[int]) -> torch.Tensor:
            return torch.tensor(values, dtype=dtype, device=device)

        def poisoned(length: int, dtype: torch.dtype = dtype) -> torch.Tensor:
            return self.buffers.poisoned(length + spare, dtype)

        self.arguments: dict[str, Any] = {
            "next_token_ids": array([row["next"] for row in rows]),
            "target_positions": array([position for row in rows for position in range(row["start"], row["end"])]),
            "query_start_loc": array(starts),
            "num_rejected": array([row["rejected"] for row in rows]),
            "block_tables": self.buffers.table([row["table"] for row in rows]),
            "mask_token_id": MASK,
            "block_size": block_size,
            "num_query_per_req": queries,
            "num_speculative_tokens": drafts,
            "overflow": overflow,
            "out_input_ids": poisoned(len(rows) * queries),
            "out_query_positions": poisoned(len(rows) * queries),
            "out_query_slot_mapping": poisoned(len(rows) * queries, slot_dtype),
            "out_context_positions": poisoned(starts[-1]),
            "out_context_slot_mapping": poisoned(starts[-1], slot_dtype),
            "out_token_indices": poisoned(len(rows) * drafts),
        } | {name: array(value) if isinstance(value, list) else value for name, value in optional.items()}
        if overflow == "freeze":
            self.arguments["max_model_len"] = max_model_len
            self.arguments["out_query_start_loc"] = self.buffers.poisoned(len(rows) + spare + 1, dtype)
            self.arguments["out_seq_lens"] = poisoned(len(rows))

    def run(self, backend: str) -> dict[str, list[int]]:
        copy_and_expand_dflash_inputs_(**self.arguments, backend=backend)
        self.buffers.check()
        return {name: self.arguments[f"out_{name}"].tolist() for name in OUTPUTS if f"out_{name}" in self.arguments}


def oracle(launch: Launch) -> dict[str, list[int]]:
    """The contract, a place at a time."""
    given, freeze = launch.arguments, launch.arguments["overflow"] == "freeze"
    limit = given["max_model_len"] if freeze else 10**9
    queries, drafts, size = (given[name] for name in ("num_query_per_req", "num_speculative_tokens", "block_size"))
    out = {name: [POISON] * given[f"out_{name}"].shape[0] for name in OUTPUTS if f"out_{name}" in given}
    if freeze:
        fills = {name: -1 if "slot" in name else len(launch.rows) * queries if name == "query_start_loc" else 0 for name in out}
        out = {name: [fills[name]] * len(values) for name, values in out.items()}

    def slot(i: int, row: Row, position: int) -> int:
        owned = int(given["num_blocks"][i]) if "num_blocks" in given else len(row["table"])
        column = position // size
        block = row["table"][column] if position < limit and column < min(owned, len(row["table"])) else -1
        return block * size + position % size if block >= 0 and block != given.get("null_block", -1) else -1

    token = 0
    for i, row in enumerate(launch.rows):
        length = row["end"] - row["start"]
        kept = length - max(0, min(row["rejected"], length)) if given["num_rejected"] is not None else length
        for j in range(length):
            position = row["start"] + j
            live = j < kept or not freeze
            out["context_positions"][token] = min(position, limit - 1) if live else 0
            out["context_slot_mapping"][token] = slot(i, row, position) if live else -1
            token += 1
        for t in range(queries):
            place, position = i * queries + t, row["start"] + kept + t
            out["input_ids"][place] = (row["next"] if t == 0 else MASK) if length else 0
            out["query_positions"][place] = min(position, limit - 1) if length else 0
            out["query_slot_mapping"][place] = slot(i, row, position) if length else -1
            if t >= queries - drafts:
                out["token_indices"][i * drafts + t - (queries - drafts)] = place if length else 0
        if freeze:
            out["query_start_loc"][i] = i * queries
            out["seq_lens"][i] = min(row["start"] + kept + queries, limit) if length else 0
    return out


def row(start: int, end: int, rejected: int = 0, next_token: int = 21, table: tuple[int, ...] = tuple(range(8))) -> Row:
    return {"start": start, "end": end, "rejected": rejected, "next": next_token, "table": list(table)}


EXAMPLE = [row(0, 3), row(10, 14, 1, 22, tuple(range(8, 16)))]


def test_k6a_worked_example(backend: str, kernel_device: str) -> None:
    out = Launch(kernel_device, EXAMPLE, drafts=2, spare=0).run(backend)
    assert out["input_ids"] == [21, MASK, MASK, 22, MASK, MASK]
    assert out["query_positions"] == [3, 4, 5, 13, 14, 15]
    assert out["query_slot_mapping"] == [3, 4, 5, 45, 46, 47]
    assert out["context_positions"] == [0, 1, 2, 10, 11, 12, 13]
    assert out["context_slot_mapping"] == [0, 1, 2, 42, 43, 44, 45]
    assert out["token_indices"] == [1, 2, 4, 5]


def test_k6b_three_rows_of_three_drafts(backend: str, kernel_device: str) -> None:
    rows = [row(0, 2), row(4, 5), row(8, 11)]
    out = Launch(kernel_device, rows, drafts=3, spare=0, overflow="freeze").run(backend)
    assert out["token_indices"] == [1, 2, 3, 5, 6, 7, 9, 10, 11]
    assert out["query_start_loc"] == [0, 4, 8, 12]
    assert out["seq_lens"] == [6, 9, 15]


def test_the_newer_rules(backend: str, kernel_device: str) -> None:
    """Rejected tokens write nothing, and the first query is sampled from, too."""
    rows = [row(10, 14, 2, 99, (0, 0, 7, 8, 9))]
    out = Launch(kernel_device, rows, drafts=3, anchor=True, overflow="freeze", spare=2, null_block=0).run(backend)
    assert out["context_positions"] == [10, 11, 0, 0, 0, 0]
    assert out["context_slot_mapping"] == [30, 31, -1, -1, -1, -1]
    assert out["input_ids"] == [99, MASK, MASK, 0, 0]
    assert out["query_positions"] == [12, 13, 14, 0, 0]
    assert out["query_slot_mapping"] == [32, 33, 34, -1, -1]
    assert out["token_indices"] == [0, 1, 2, 0, 0]
    assert out["query_start_loc"] == [0, 3, 3, 3]
    assert out["seq_lens"] == [15, 0, 0]


@BOTH
def test_d23c_positions_past_the_table_never_reuse_a_slot(backend: str, kernel_device: str, overflow: str) -> None:
    out = Launch(kernel_device, [row(4, 7, table=(3, 5))], drafts=2, spare=0, overflow=overflow).run(backend)
    assert out["query_positions"] == [7, 8, 9]
    assert out["query_slot_mapping"] == [23, -1, -1]


@BOTH
def test_k6c_the_null_block_is_never_written(backend: str, kernel_device: str, overflow: str) -> None:
    rows = [row(3, 6, table=(5, 0, 2))]
    written = Launch(kernel_device, rows, drafts=2, spare=0, overflow=overflow).run(backend)
    assert written["context_slot_mapping"] == [23, 0, 1] and written["query_slot_mapping"] == [2, 3, 8]
    kept_free = Launch(kernel_device, rows, drafts=2, spare=0, overflow=overflow, null_block=0).run(backend)
    assert kept_free["context_slot_mapping"] == [23, -1, -1] and kept_free["query_slot_mapping"] == [-1, -1, 8]


@BOTH
def test_blocks_of_an_earlier_owner_are_never_written(backend: str, kernel_device: str, overflow: str) -> None:
    rows = [row(2, 4, table=(5, 6, 7)), row(0, 1, table=(1, -1, 2))]
    out = Launch(kernel_device, rows, drafts=4, spare=0, overflow=overflow, num_blocks=[1, 3]).run(backend)
    assert out["query_slot_mapping"] == [-1, -1, -1, -1, -1, 5, 6, 7, -1, -1]


def test_the_limit(backend: str, kernel_device: str) -> None:
    rows = [row(27, 31, 1), row(28, 32), row(0, 1)]
    out = Launch(kernel_device, rows, drafts=2, overflow="freeze", max_model_len=32, spare=0).run(backend)
    assert out["query_positions"] == [30, 31, 31, 31, 31, 31, 1, 2, 3]
    assert out["query_slot_mapping"] == [30, 31, -1, -1, -1, -1, 1, 2, 3]
    assert out["context_slot_mapping"] == [27, 28, 29, -1, 28, 29, 30, 31, 0]
    assert out["seq_lens"] == [32, 32, 4]


def test_context_past_the_limit_is_not_written(backend: str, kernel_device: str) -> None:
    launch = Launch(kernel_device, [row(1, 6)], drafts=1, overflow="freeze", max_model_len=4, spare=0)
    out = launch.run(backend)
    assert out == oracle(launch)
    assert out["context_positions"] == [1, 2, 3, 3, 3] and out["context_slot_mapping"] == [1, 2, 3, -1, -1]
    assert out["query_positions"] == [3, 3] and out["query_slot_mapping"] == [-1, -1] and out["seq_lens"] == [4]


@BOTH
def test_rejected_tokens(backend: str, kernel_device: str, overflow: str) -> None:
    """In the reference the first queries share the slots of rejected tokens; frozen, every slot is written once."""
    out = Launch(kernel_device, [row(4, 8, 2)], drafts=3, spare=0, overflow=overflow).run(backend)
    slots = [slot for name in ("context_slot_mapping", "query_slot_mapping") for slot in out[name] if slot >= 0]
    assert out["query_slot_mapping"] == [6, 7, 8, 9]
    assert out["context_slot_mapping"] == ([4, 5, -1, -1] if overflow == "freeze" else [4, 5, 6, 7])
    assert (len(slots) == len(set(slots))) == (overflow == "freeze")


@pytest.mark.parametrize("rejected", [4, 9])
@BOTH
def test_nothing_kept_starts_at_the_first_position(backend: str, kernel_device: str, overflow: str, rejected: int) -> None:
    """The reference reads the row before, or out of bounds."""
    out = Launch(kernel_device, [row(4, 8, rejected)], drafts=1, spare=0, overflow=overflow).run(backend)
    assert out["query_positions"] == [4, 5] and out["query_slot_mapping"] == [4, 5]
    if overflow == "freeze":
        assert out["context_slot_mapping"] == [-1] * 4 and out["seq_lens"] == [6]


@BOTH
def test_d13_empty_rows_are_inert(backend: str, kernel_device: str, overflow: str) -> None:
    launch = Launch(kernel_device, [row(6, 6), row(4, 6), row(0, 0, 3)], drafts=2, overflow=overflow)
    out = launch.run(backend)
    assert out == oracle(launch)
    for name, inert in (("input_ids", 0), ("query_positions", 0), ("query_slot_mapping", -1)):
        assert out[name][:3] == out[name][6:9] == [inert] * 3
    assert out["token_indices"][:6] == [0, 0, 4, 5, 0, 0]


@BOTH
def test_rows_outside_of_the_tokens_are_inert(backend: str, kernel_device: str, overflow: str) -> None:
    launch = Launch(kernel_device, [row(4, 6), row(0, 2)], drafts=1, overflow=overflow)
    launch.arguments["target_positions"] = launch.arguments["target_positions"][:3]
    out = launch.run(backend)
    assert out["input_ids"][:4] == [21, MASK, 0, 0] and out["query_slot_mapping"][:4] == [6, 7, -1, -1]
    assert out["context_slot_mapping"][:3] == [4, 5, -1] and out["context_positions"][:3] == [4, 5, 0]


def test_d3_smaller_batch_in_old_buffers_equals_fresh_buffers(backend: str, kernel_device: str) -> None:
    rows = [row(4 * i, 4 * i + 2, i % 2) for i in range(4)]
    old = Launch(kernel_device, rows, drafts=2, overflow="freeze", spare=0)
    old.run(backend)
    small = Launch(kernel_device, rows[:1], drafts=2, overflow="freeze", spare=3)
    small.arguments.update({name: value for name, value in old.arguments.items() if name.startswith("out_")})
    again = small.run(backend)
    assert again == oracle(small)
    assert all(POISON not in values for values in again.values())


@BOTH
def test_no_rows(backend: str, kernel_device: str, overflow: str) -> None:
    launch = Launch(kernel_device, [], drafts=2, overflow=overflow)
    launch.arguments["block_tables"] = torch.zeros(0, 3, dtype=torch.int32, device=kernel_device)
    assert launch.run(backend) == oracle(launch)


@BOTH
def test_slots_beyond_int32(backend: str, kernel_device: str, overflow: str) -> None:
    rows = [row(2, 4, table=(600_000_000, 2**31 - 1))]
    out = Launch(kernel_device, rows, drafts=1, overflow=overflow, spare=0).run(backend)
    assert out["context_slot_mapping"] == [2_400_000_002, 2_400_000_003]
    assert out["query_slot_mapping"] == [(2**31 - 1) * 4, (2**31 - 1) * 4 + 1]


@BOTH
def test_positions_at_the_limit_of_int32(backend: str, kernel_device: str, overflow: str) -> None:
    last = 2**31 - 1
    launch = Launch(kernel_device, [row(last - 3, last - 1)], drafts=1, overflow=overflow, max_model_len=last, spare=0)
    out = launch.run(backend)
    assert out["query_positions"] == ([last - 1, last - 1] if overflow == "freeze" else [last - 1, last])
    assert out["query_slot_mapping"] == [-1, -1]


@BOTH
def test_more_than_a_tile(backend: str, kernel_device: str, overflow: str) -> None:
    table = tuple(range(120))
    launch = Launch(kernel_device, [row(7, 307, 20, table=table), row(0, 2, table=table)], 150, overflow=overflow, max_model_len=400)
    assert launch.run(backend) == oracle(launch)


@st.composite
def launches(draw: st.DrawFn) -> dict[str, Any]:
    columns = draw(st.integers(1, 5))
    table = st.lists(st.integers(-1, 9), min_size=columns, max_size=columns)
    spans = st.tuples(st.integers(0, 20), st.integers(0, 6), st.integers(-1, 7), st.integers(0, 99), table)
    rows = [
        row(start, start + size, rejected, token, tuple(table)) for start, size, rejected, token, table in draw(st.lists(spans, max_size=4))
    ]
    optional: dict[str, Any] = {"null_block": draw(st.integers(-1, 3))}
    if draw(st.booleans()):
        optional["num_blocks"] = [draw(st.integers(0, columns + 1)) for _ in rows]
    if draw(st.booleans()):
        optional["num_rejected"] = None
    sizes = {"drafts": draw(st.integers(1, 4)), "block_size": draw(st.integers(1, 6)), "max_model_len": draw(st.integers(1, 24))}
    return {"rows": rows, "anchor": draw(st.booleans()), **sizes, **optional}


@BOTH
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(launches(), st.sampled_from([torch.int32, torch.int64]))
def test_ragged_batches(backend: str, kernel_device: str, overflow: str, given_launch: dict[str, Any], dtype: torch.dtype) -> None:
    launch = Launch(kernel_device, **given_launch, overflow=overflow, dtype=dtype, slot_dtype=dtype)
    assert launch.run(backend) == oracle(launch)


def test_refusals_write_nothing(backend: str, kernel_device: str) -> None:
    def refused(error: type[Exception], match: str, overflow: str = "freeze", **changes: Any) -> None:
        launch = Launch(kernel_device, EXAMPLE, drafts=2, overflow=overflow, spare=0)
        launch.arguments.update(changes)
        with pytest.raises(error, match=match):
            launch.run(backend)
        for name in OUTPUTS[:6]:
            assert (launch.arguments[f"out_{name}"] == POISON).all()

    short = torch.zeros(1, dtype=torch.int32, device=kernel_device)
    refused(ArgumentError, "num_query_per_req", num_query_per_req=4)  # D23: sample indices would spill into the next row
    refused(ArgumentError, "num_query_per_req", num_query_per_req=1)
    refused(ArgumentError, "num_speculative_tokens", num_speculative_tokens=0)
    refused(ArgumentError, "block_size", block_size=0)
    refused(ArgumentError, "overflow", overflow="wrap")
    refused(ArgumentError, "max_model_len", max_model_len=None)
    refused(ArgumentError, "max_model_len", max_model_len=0)
    refused(ArgumentError, "max_model_len", overflow="reference", max_model_len=32)
    refused(ArgumentError, "out_seq_lens", out_seq_lens=None)
    refused(ArgumentError, "out_seq_lens", out_seq_lens=short)
    refused(ArgumentError, "out_query_start_loc", out_query_start_loc=short)
    refused(ArgumentError, "num_rejected", num_rejected=short)
    refused(ArgumentError, "num_blocks", num_blocks=short)
    refused(ArgumentError, "block_tables", block_tables=short[None])
    refused(ArgumentTypeError, "next_token_ids", next_token_ids=torch.zeros(2, device=kernel_device))
    refused(ArgumentError, "out_token_indices", num_query_per_req=3, num_speculative_tokens=3)
    launch = Launch(kernel_device, EXAMPLE, drafts=2, spare=0)
    launch.arguments["out_context_positions"] = launch.arguments["target_positions"]
    with pytest.raises(ArgumentError, match="out_context_positions"):
        launch.run(backend)
