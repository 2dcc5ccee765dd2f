"""Inputs of one pass: windows of committed tokens and drafts."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from funcspec.errors import ArgumentError, ArgumentTypeError
from funcspec.kernels.acceptance import accept_matching_
from funcspec.kernels.op import Backend
from funcspec.kernels.prefill_inputs import prepare_prefill_inputs_
from funcspec.kernels.window_inputs import DRAFTED, FEED, VERIFY

from .guarded import POISON
from .window_launch import BY_PLACE, BY_ROW, Launch, Row, row_at, run


@pytest.fixture(params=["reference", "host", "triton"])
def backend(request: pytest.FixtureRequest, kernel_device: str) -> Backend:
    if request.param == "host" and kernel_device != "cpu":
        pytest.skip("the host form is for CPU tensors")
    return request.param


def test_feed_by_hand(backend: Backend, kernel_device: str) -> None:
    rows = [row_at(6, fed=4, blocks=[9, 2]), row_at(3, fed=2, blocks=[5]), Row(live=False), row_at(4, fed=4)]
    out = run(backend, kernel_device, FEED, rows, 3)
    assert out["input_ids"] == [104, 105, 0, 102, 0, 0, 0, 0, 0, 0, 0, 0]
    assert out["positions"] == [4, 5, 0, 2, 0, 0, 0, 0, 0, 0, 0, 0]
    assert out["slot_mapping"] == [8, 9, -1, 22, -1, -1, -1, -1, -1, -1, -1, -1]
    assert out["token_rows"] == [0, 0, -1, 1, -1, -1, -1, -1, -1, -1, -1, -1]
    assert out["seq_lens"] == [6, 3, 0, 0]
    assert out["last_token_indices"] == [1, 3, 6, 9]


def test_drafted_by_hand(backend: Backend, kernel_device: str) -> None:
    rows = [
        row_at(5, drafts=[7, 8], num_draft=3, blocks=[3, 6]),
        row_at(5, drafts=[7, 8], num_draft=2, blocks=[3, 6]),  # has all it planned
        row_at(5, drafts=[7], num_draft=2, live=False, blocks=[3, 6]),
    ]
    out = run(backend, kernel_device, DRAFTED, rows, 1)
    assert out["input_ids"] == [8, 0, 0]
    assert out["positions"] == [6, 0, 0]
    assert out["slot_mapping"] == [26, -1, -1]
    assert out["seq_lens"] == [7, 0, 0]
    assert out["last_token_indices"] == [0, 1, 2]


def test_verify_by_hand(backend: Backend, kernel_device: str) -> None:
    rows = [
        row_at(3, drafts=[7, 8], num_draft=2, blocks=[3, 6]),
        row_at(3, drafts=[7, 8], num_draft=3, num_drafted=1, blocks=[3, 6]),
        row_at(3, blocks=[3, 6]),  # no drafts: plain decoding
    ]
    out = run(backend, kernel_device, VERIFY, rows, 3)
    assert out["input_ids"] == [102, 7, 8, 102, 7, 0, 102, 0, 0]
    assert out["slot_mapping"] == [14, 15, 24, 14, 15, -1, 14, -1, -1]
    assert out["seq_lens"] == [5, 4, 3]
    assert out["last_token_indices"] == [2, 4, 6]


def test_c1_drafts_cross_into_reserved_blocks(backend: Backend, kernel_device: str) -> None:
    blocks = [2, 5, 7, 9, 11]
    out = run(backend, kernel_device, FEED, [row_at(19, fed=14, blocks=blocks)], 5)
    assert (out["positions"], out["slot_mapping"]) == ([14, 15, 16, 17, 18], [38, 39, 44, 45, 46])
    out = run(backend, kernel_device, VERIFY, [row_at(15, drafts=[1, 2, 3, 4], num_draft=4, blocks=blocks)], 5)
    assert (out["positions"], out["slot_mapping"]) == ([14, 15, 16, 17, 18], [38, 39, 44, 45, 46])


@pytest.mark.parametrize("columns", [4, 5])
def test_c2_a_position_without_a_block_has_no_slot(backend: Backend, kernel_device: str, columns: int) -> None:
    """With four columns the position lies past the table, with five its column holds no block."""
    row = row_at(16, drafts=[7], num_draft=2, blocks=[2, 5, 7, 9])
    out = run(backend, kernel_device, DRAFTED, [row], 1, columns=columns)
    assert (out["input_ids"], out["positions"], out["slot_mapping"]) == ([7], [16], [-1])


def test_c5_a_fixed_window_stays_in_owned_blocks(backend: Backend, kernel_device: str) -> None:
    # Two drafts end the row's window inside its block; the next column's page 7 is somebody else's.
    row = row_at(14, drafts=[1, 2], num_draft=2, blocks=[4, 7])
    out = run(backend, kernel_device, VERIFY, [row], 5, block_size=16)
    assert out["slot_mapping"] == [77, 78, 79, -1, -1]
    # As the state keeps it: what a row does not own is -1, so that not even more drafts would reach page 7.
    row = row_at(14, drafts=[1, 2, 3, 4], num_draft=4, blocks=[4, -1])
    out = run(backend, kernel_device, VERIFY, [row], 5, block_size=16)
    assert out["positions"] == [13, 14, 15, 16, 17]
    assert out["slot_mapping"] == [77, 78, 79, -1, -1]


def test_d1_an_idle_row_keeps_length_zero(backend: Backend, kernel_device: str) -> None:
    rows = [row_at(11, drafts=[5], num_draft=2, blocks=[3, 4, 5, 6]), Row(live=False, blocks=[0, 0, 0, 0])]
    out = run(backend, kernel_device, DRAFTED, rows, 1, block_size=16)
    assert out["positions"] == [11, 0]
    assert out["slot_mapping"] == [59, -1]
    assert out["seq_lens"] == [12, 0]


def test_d2_lengths_are_read_at_every_launch(backend: Backend, kernel_device: str) -> None:
    blocks = range(6)
    first = Launch(kernel_device, VERIFY, [row_at(9, drafts=[1, 2], num_draft=2, blocks=blocks)], 3)
    assert first.run(backend)["positions"] == [8, 9, 10]
    second = Launch(kernel_device, VERIFY, [row_at(21, drafts=[1, 2], num_draft=2, blocks=blocks)], 3)
    for name, value in second.inputs.items():
        if isinstance(value, torch.Tensor):
            first.inputs[name].copy_(value)
    assert first.run(backend) == second.expected()
    assert first.outputs["out_positions"][:3].tolist() == [20, 21, 22]


def test_d3_a_smaller_batch_in_old_buffers_equals_fresh_ones(backend: Backend, kernel_device: str) -> None:
    rows = [row_at(6 + i, fed=4 + i, drafts=[1], num_draft=1, blocks=[i, i + 4, i + 8]) for i in range(4)]
    fewer = rows[:2] + [replace(row, live=False) for row in rows[2:]]
    for kind in (FEED, VERIFY):
        old = Launch(kernel_device, kind, rows, 3)
        old.run(backend)
        small = Launch(kernel_device, kind, fewer, 3)
        small.outputs = old.outputs
        out = small.run(backend)
        assert out == small.expected()
        assert out["slot_mapping"][6:] == [-1] * 6
        assert out["seq_lens"][2:] == [0, 0]


def test_d4_every_row_of_the_capacity_is_described(backend: Backend, kernel_device: str) -> None:
    rows = [row_at(5, fed=4, blocks=[i, i + 8]) for i in range(5)] + [Row(live=False)] * 3
    out = run(backend, kernel_device, FEED, rows, 2)
    assert out["seq_lens"] == [5] * 5 + [0] * 3
    assert out["last_token_indices"] == [2 * row for row in range(8)]
    assert out["token_rows"][10:] == [-1] * 6


def test_d6_a_row_with_nothing_to_feed_points_into_itself(backend: Backend, kernel_device: str) -> None:
    rows = [row_at(5, fed=5 - count, blocks=[1, 2]) for count in (2, 0, 1)]
    out = run(backend, kernel_device, FEED, rows, 3)
    assert out["last_token_indices"] == [1, 3, 6]
    assert out["seq_lens"] == [5, 0, 5]


def test_e1_a_placeholder_ends_the_window(backend: Backend, kernel_device: str) -> None:
    """What lies behind a placeholder cannot be accepted, and its keys would have a gap before them."""
    row = row_at(3, drafts=[5, -1, 7], num_draft=3, blocks=[1, 2])
    out = run(backend, kernel_device, VERIFY, [row], 4)
    assert out["input_ids"] == [102, 5, 0, 0]
    assert out["slot_mapping"] == [6, 7, -1, -1]
    assert out["seq_lens"] == [4]
    assert out["last_token_indices"] == [1]


def test_e2_placeholders_never_reach_a_model(backend: Backend, kernel_device: str) -> None:
    unscheduled = row_at(3, drafts=[-1, -1, -1], num_draft=0, blocks=[1, 2])
    scheduled = replace(unscheduled, num_draft=3)
    without = row_at(3, blocks=[1, 2])
    width = 4
    out = run(backend, kernel_device, VERIFY, [unscheduled, scheduled, without], width)
    assert min(out["input_ids"]) >= 0
    for row in range(2):
        for name in ("input_ids", "positions", "slot_mapping"):
            assert out[name][row * width : (row + 1) * width] == out[name][2 * width :]
    assert out["seq_lens"] == [3, 3, 3]
    out = run(backend, kernel_device, DRAFTED, [replace(scheduled, num_drafted=1)], 1)
    assert (out["input_ids"], out["slot_mapping"], out["seq_lens"]) == ([0], [-1], [0])


@pytest.mark.parametrize("width", range(1, 11))
def test_h7_every_width(backend: Backend, kernel_device: str, width: int) -> None:
    blocks = range(9)  # of K = 0..9 drafts
    feed = [row_at(20, fed=20 - width, blocks=blocks), row_at(11, fed=10, blocks=blocks)]
    out = run(backend, kernel_device, FEED, feed, width)
    assert out["positions"][:width] == list(range(20 - width, 20))
    drafts = list(range(width - 1))
    verify = [row_at(7, drafts=drafts, num_draft=width - 1, blocks=blocks), row_at(5, blocks=blocks)]
    out = run(backend, kernel_device, VERIFY, verify, width)
    assert out["input_ids"][:width] == [106, *drafts]


def accepted(device: str, row: Row, choices: list[int]) -> Row:
    """The row after a round in which the target chose `choices`; the drafter has been fed what was committed before."""
    tokens = torch.tensor([[*row.committed, *row.drafts] + [-1] * 8], dtype=torch.int32, device=device)
    n = len(row.committed)

    def one(value: int) -> torch.Tensor:
        return torch.tensor([value], dtype=torch.int32, device=device)

    num_tokens, width = one(n), len(choices)
    accept_matching_(
        chosen=torch.tensor(choices, dtype=torch.int32, device=device),
        bad=torch.zeros(width, dtype=torch.int32, device=device),
        row_limit=one(1000),
        stop_ids=torch.zeros(1, 0, dtype=torch.int32, device=device),
        tokens=tokens,
        num_tokens=num_tokens,
        num_draft=one(row.num_draft),
        num_drafted=one(row.made),
        is_live=one(1),
        finish_reason=one(0),
        bad_row=one(0),
        out_tokens=torch.zeros(1, width, dtype=torch.int32, device=device),
        out_origin=torch.zeros(1, width, dtype=torch.int32, device=device),
        **{f"out_{name}": one(0) for name in ("num_accepted", "num_emitted", "num_drafted", "bad_row")},
        backend="reference",
    )
    after = num_tokens.item()
    assert isinstance(after, int)
    committed, rest = tokens[0, :after].tolist(), tokens[0, after:].tolist()
    assert set(rest) == {-1}
    return Row(committed=committed, fed=n, num_draft=row.num_draft, num_drafted=0, blocks=row.blocks)


def test_a3_rejected_places_are_removed_not_padded(backend: Backend, kernel_device: str) -> None:
    drafts, blocks = [50, 51, 52], [[1, 2, 3], [4, 5, 6]]
    before = [row_at(n, drafts=drafts, num_draft=3, blocks=table) for n, table in zip((1, 3), blocks, strict=True)]
    rows = [accepted(kernel_device, before[0], [60, 61, 62, 63]), accepted(kernel_device, before[1], [50, 51, 52, 53])]
    together = run(backend, kernel_device, FEED, rows, 4)
    assert together["positions"] == [1, 0, 0, 0, 3, 4, 5, 6]
    assert together["input_ids"] == [60, 0, 0, 0, 50, 51, 52, 53]
    assert together["slot_mapping"] == [5, -1, -1, -1, 19, 20, 21, 22]
    for number, row in enumerate(rows):
        alone = run(backend, kernel_device, FEED, [row], 4)
        for name in ("input_ids", "positions", "slot_mapping"):
            assert alone[name] == together[name][4 * number : 4 * number + 4]
        assert alone["seq_lens"][0] == together["seq_lens"][number]


def test_a5_lengths_of_draft_steps_do_not_count_rejected_tokens(backend: Backend, kernel_device: str) -> None:
    before = row_at(43, drafts=[50, 51, 52], num_draft=3, blocks=range(16))
    row = accepted(kernel_device, before, [60, 61, 62, 63])  # 47 with the newest token, of which 3 are rejected
    lengths = run(backend, kernel_device, FEED, [row], 4)["seq_lens"]
    for made in (1, 2):
        row = replace(row, drafts=[70, 71][:made], num_drafted=made)
        out = run(backend, kernel_device, DRAFTED, [row], 1)
        assert out["positions"] == [43 + made]
        lengths += out["seq_lens"]
    assert lengths == [44, 45, 46]


def test_the_limit_cuts_windows(backend: Backend, kernel_device: str) -> None:
    row = row_at(8, fed=5, drafts=[1, 2, 3], num_draft=4, blocks=[0, 1, 2])
    for limit, positions in ((6, [5]), (5, []), (0, []), (1000, [5, 6, 7])):
        out = run(backend, kernel_device, FEED, [row], 4, limit=limit)
        assert out["positions"] == (positions + [0] * 4)[:4]
        assert out["seq_lens"] == [positions[-1] + 1 if positions else 0]
    assert run(backend, kernel_device, DRAFTED, [row], 1, limit=11)["seq_lens"] == [11]
    assert run(backend, kernel_device, DRAFTED, [row], 1, limit=10)["seq_lens"] == [0]
    assert run(backend, kernel_device, VERIFY, [row], 4, limit=9)["positions"] == [7, 8, 0, 0]


def test_a_row_longer_than_its_window_is_fed_in_pieces(backend: Backend, kernel_device: str) -> None:
    row = row_at(10, fed=2, blocks=[0, 1, 2])
    positions = []
    while row.fed < 10:
        out = run(backend, kernel_device, FEED, [row], 3)
        row = replace(row, fed=out["seq_lens"][0])
        positions += out["positions"]
    assert positions == [2, 3, 4, 5, 6, 7, 8, 9, 0]


def test_the_newest_token_is_fed_while_no_draft_was_made(backend: Backend, kernel_device: str) -> None:
    """A drafter may have had nothing to say at step 0."""
    out = run(backend, kernel_device, DRAFTED, [row_at(5, num_draft=2, blocks=[3, 6])], 1)
    assert (out["input_ids"], out["positions"], out["slot_mapping"], out["seq_lens"]) == ([104], [4], [24], [5])


@pytest.mark.parametrize("kind", [FEED, DRAFTED, VERIFY])
def test_a_row_without_a_newest_token_has_no_window(backend: Backend, kernel_device: str, kind: int) -> None:
    rows = [Row(num_draft=2), Row(drafts=[7], num_draft=1)]
    for length in (1, 8):
        out = run(backend, kernel_device, kind, rows, 3, length=length)
        assert (out["seq_lens"], out["last_token_indices"]) == ([0, 0], [0, 3])


def test_slots_up_to_the_limit_of_int32(backend: Backend, kernel_device: str) -> None:
    last = 2**31 - 1
    rows = [row_at(8, fed=3, blocks=[last // 4, last // 4 - 1])]
    out = run(backend, kernel_device, FEED, rows, 5)
    assert out["slot_mapping"] == [last, last - 7, last - 6, last - 5, last - 4]


def test_what_idle_rows_hold_is_neutral(backend: Backend, kernel_device: str) -> None:
    rows = [row_at(5, fed=3, num_draft=9, num_drafted=0, blocks=[1, 2]), row_at(5, fed=3, blocks=[1, 2])]
    for kind in (FEED, DRAFTED, VERIFY):
        launch = Launch(kernel_device, kind, [rows[0], replace(rows[0], live=False), rows[1]], 3)
        expected = launch.expected()
        for name in ("num_tokens", "fed_len", "num_draft", "num_drafted"):
            launch.inputs[name][1] = 2**31 - 1
        assert launch.run(backend) == expected


def test_arrays_of_int64(backend: Backend, kernel_device: str) -> None:
    rows = [row_at(5, fed=3, drafts=[7, 8], num_draft=3, blocks=[1, 2]), Row(live=False)]
    for kind in (FEED, DRAFTED, VERIFY):
        run(backend, kernel_device, kind, rows, 3, dtype=torch.int64)


@st.composite
def batches(draw: st.DrawFn) -> dict[str, Any]:
    block_size, length, most = draw(st.sampled_from([1, 2, 3, 4, 16])), 24, 9
    columns = draw(st.integers(1, 12))

    @st.composite
    def row(draw: st.DrawFn) -> Row:
        live = draw(st.booleans()) or draw(st.booleans())
        n = draw(st.integers(1 if live else 0, length - most))
        token = st.integers(0, 2**31 - 1)
        drafts = draw(st.lists(token if draw(st.booleans()) else st.integers(-1, 1), max_size=most))
        return Row(
            committed=draw(st.lists(token, min_size=n, max_size=n)),
            drafts=drafts,
            fed=draw(st.integers(max(n - most - 1, 0), n + 1)),
            num_draft=draw(st.integers(0, most)),
            num_drafted=draw(st.integers(0, len(drafts))),
            live=live,
            blocks=draw(st.lists(st.integers(-1, 2**31 // block_size - 1), max_size=columns)),
        )

    return {
        "kind": draw(st.sampled_from([FEED, DRAFTED, VERIFY])),
        "rows": draw(st.lists(row(), min_size=1, max_size=4)),
        "width": draw(st.integers(1, most + 1)),
        "limit": draw(st.integers(0, length + 8)),
        "block_size": block_size,
        "length": length,
        "columns": columns,
    }


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=60)
@given(batch=batches())
def test_ragged_batches(backend: Backend, kernel_device: str, batch: dict[str, Any]) -> None:
    run(backend, kernel_device, **batch)


@st.composite
def rounds(draw: st.DrawFn) -> tuple[int, list[tuple[int, int, int]]]:
    row = st.integers(1, 12).flatmap(
        lambda n: st.integers(0, 4).flatmap(lambda drafts: st.tuples(st.just(n), st.just(drafts), st.integers(0, drafts)))
    )
    return draw(st.integers(2, 20)), draw(st.lists(row, min_size=1, max_size=3))


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(rounds())
def test_feed_is_the_live_part_of_prefill_inputs(
    backend: Backend, kernel_device: str, batch: tuple[int, list[tuple[int, int, int]]]
) -> None:
    """Both describe draft step 0. The padded form feeds the token that was the newest before the round again; ours does not."""
    limit, rounds = batch
    query, positions, corrections, starts, lengths, rejected, rows = [], [], [], [0], [], [], []
    for n, drafted, kept in rounds:
        row = row_at(n, drafts=range(200, 200 + drafted), num_draft=drafted, blocks=range(8))
        query += [row.committed[-1], *row.drafts]
        positions += range(n - 1, n + drafted)
        starts.append(len(query))
        lengths.append(n + drafted)
        rejected.append(drafted - kept)
        corrections.append(300)
        rows.append(accepted(kernel_device, row, [*row.drafts[:kept]] + [300] * (5 - kept)))
    feed = run(backend, kernel_device, FEED, rows, 5, limit=limit)

    def array(values: list[int]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int32, device=kernel_device)

    places = len(query) + len(rows)
    out = {f"out_{name}": array([POISON] * places) for name in ("input_ids", "positions", "is_live")}
    out |= {f"out_{name}": array([POISON] * len(rows)) for name in ("last_token_indices", "seq_lens")}
    prepare_prefill_inputs_(
        target_input_ids=array(query),
        target_positions=array(positions),
        last_sampled=array(corrections),
        idx_mapping=array(list(range(len(rows)))),
        query_start_loc=array(starts),
        seq_lens=array(lengths),
        num_rejected=array(rejected),
        max_num_reqs=len(rows),
        max_model_len=limit,
        overflow="freeze",
        out_query_start_loc=(offsets := array([POISON] * (len(rows) + 1))),
        **out,
        backend="reference",
    )
    padded = {name.removeprefix("out_"): value.tolist() for name, value in out.items()}
    for row in range(len(rows)):
        begin, end = offsets[row : row + 2].tolist()
        live = [place for place in range(begin + 1, end) if padded["is_live"][place]]
        ours = [place for place in range(5 * row, 5 * row + 5) if feed["token_rows"][place] == row]
        for name in ("input_ids", "positions"):
            assert [feed[name][place] for place in ours] == [padded[name][place] for place in live]
        if live:
            assert feed["seq_lens"][row] == padded["seq_lens"][row]
        if padded["is_live"][padded["last_token_indices"][row]]:
            assert ours.index(feed["last_token_indices"][row]) == live.index(padded["last_token_indices"][row])


def test_refusals_write_nothing(backend: Backend, kernel_device: str) -> None:
    def refused(error: type[Exception], match: str, **changes: Any) -> None:
        launch = Launch(kernel_device, FEED, [row_at(5, fed=3, blocks=[1, 2]), row_at(4, fed=3)], 3)
        for name, value in changes.items():
            (launch.outputs if name in launch.outputs else launch.inputs)[name] = value
        with pytest.raises(error, match=match):
            launch.run(backend)
        for name, value in launch.outputs.items():
            assert name in changes or (value == POISON).all()

    def array(*shape: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
        return torch.zeros(shape, dtype=dtype, device=kernel_device)

    refused(ArgumentError, "kind", kind=3)
    refused(ArgumentError, "num_tokens", num_tokens=array(3))
    refused(ArgumentError, "out_input_ids", width=5)
    refused(ArgumentError, "width", width=0)
    refused(ArgumentTypeError, "out_input_ids", out_input_ids=array(8, dtype=torch.int64))
    for name in BY_PLACE:
        refused(ArgumentError, f"out_{name}", **{f"out_{name}": array(5)})
    for name in BY_ROW:
        refused(ArgumentError, f"out_{name}", **{f"out_{name}": array(1)})
    refused(ArgumentError, "block_tables", block_tables=array(1, 2))
    refused(ArgumentError, "block_tables", block_tables=array(2, 0))
