"""Inputs of passes of other kinds of drafts: tokens fed one position early, masks behind the newest token, several choices."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from funcspec.errors import ArgumentError
from funcspec.kernels.op import Backend
from funcspec.kernels.window_inputs import DRAFTED, FEED, VERIFY

from .guarded import POISON
from .window_launch import Launch, Row, row_at, run

MASK = 999


@pytest.fixture(params=["reference", "host", "triton"])
def backend(request: pytest.FixtureRequest, kernel_device: str) -> Backend:
    if request.param == "host" and kernel_device != "cpu":
        pytest.skip("the host form is for CPU tensors")
    return request.param


def test_tokens_are_fed_one_position_early(backend: Backend, kernel_device: str) -> None:
    """At position x stands the token of x + 1, so that the newest token is fed at the position before it."""
    rows = [row_at(6, fed=3, blocks=[9, 2]), row_at(3, fed=2, blocks=[5]), row_at(3, fed=1, blocks=[5]), Row(live=False)]
    out = run(backend, kernel_device, FEED, rows, 3, shift=1)
    assert out["input_ids"] == [104, 105, 0, 0, 0, 0, 102, 0, 0, 0, 0, 0]
    assert out["positions"] == [3, 4, 0, 0, 0, 0, 1, 0, 0, 0, 0, 0]
    assert out["slot_mapping"] == [39, 8, -1, -1, -1, -1, 21, -1, -1, -1, -1, -1]
    assert out["seq_lens"] == [5, 0, 2, 0]  # the second row's newest token has been fed already
    assert out["last_token_indices"] == [1, 3, 6, 9]


def test_the_newest_draft_is_fed_one_position_early(backend: Backend, kernel_device: str) -> None:
    rows = [
        row_at(5, drafts=[7, 8], num_draft=3, blocks=[3, 6]),
        row_at(4, drafts=[7], num_draft=2, blocks=[3, 6]),
        row_at(5, drafts=[7, 8], num_draft=2, blocks=[3, 6]),  # has all it planned
    ]
    out = run(backend, kernel_device, DRAFTED, rows, 1, shift=1)
    assert (out["input_ids"], out["positions"]) == ([8, 7, 0], [5, 3, 0])
    assert (out["slot_mapping"], out["seq_lens"]) == ([25, 15, -1], [6, 4, 0])


@pytest.mark.parametrize("shift", [0, 1])
def test_drafts_that_read_the_targets_cache_stay_where_it_ends(backend: Backend, kernel_device: str, shift: int) -> None:
    """No place has a slot; each draft is fed at the position of the newest committed token, or one before."""
    rows = [row_at(5, fed=3 - shift, num_draft=3, blocks=[3, 6])]
    first = run(backend, kernel_device, FEED, rows, 3, shift=shift, query_only=True)
    assert first["positions"] == ([3, 4, 0] if shift == 0 else [2, 3, 0]) and first["seq_lens"] == [5 - shift]
    for made in (1, 2, 3):
        drafted = [replace(rows[0], drafts=[7, 8, 9][:made]), row_at(4, drafts=[7], num_draft=1), Row(live=False)]
        out = run(backend, kernel_device, DRAFTED, drafted, 1, shift=shift, query_only=True)
        assert (out["input_ids"], out["positions"]) == (([[7, 8][made - 1], 0, 0], [4 - shift, 0, 0]) if made < 3 else ([0] * 3, [0] * 3))
        assert out["slot_mapping"] == [-1] * 3 and out["seq_lens"] == [5 - shift if made < 3 else 0, 0, 0]


@pytest.mark.parametrize("shift", [0, 1])
def test_masks_follow_the_last_token(backend: Backend, kernel_device: str, shift: int) -> None:
    rows = [row_at(5 + shift, fed=3, blocks=[3, 6]), row_at(4 + shift, fed=3, blocks=[3, 6]), row_at(3 + shift, fed=3, blocks=[3, 6])]
    out = run(backend, kernel_device, FEED, rows, 5, shift=shift, num_masks=2, mask_id=MASK, num_choices=3)
    assert out["input_ids"] == [103 + shift, 104 + shift, MASK, MASK, 0, 103 + shift, MASK, MASK, 0, 0, 0, 0, 0, 0, 0]
    assert out["positions"] == [3, 4, 5, 6, 0, 3, 4, 5, 0, 0, 0, 0, 0, 0, 0]
    assert out["slot_mapping"] == [15, 24, 25, 26, -1, 15, 24, 25, -1, -1, -1, -1, -1, -1, -1]
    assert out["token_rows"] == [0] * 4 + [-1] + [1] * 3 + [-1] * 7
    assert out["seq_lens"] == [7, 6, 0]
    # Three choices a row from its last token on. The empty row points into itself, at places of nobody.
    assert out["last_token_indices"] == [1, 2, 3, 5, 6, 7, 10, 11, 12]


def test_choices_may_begin_behind_the_last_token(backend: Backend, kernel_device: str) -> None:
    rows = [row_at(5, fed=3, blocks=[3, 6]), row_at(5, fed=4, blocks=[3, 6])]
    out = run(backend, kernel_device, FEED, rows, 5, num_masks=3, mask_id=MASK, num_choices=2, choice_offset=2)
    assert out["last_token_indices"] == [3, 4, 7, 8]
    assert [out["input_ids"][place] for place in out["last_token_indices"]] == [MASK] * 4


def test_tokens_never_take_the_places_of_masks(backend: Backend, kernel_device: str) -> None:
    """A row with more to feed than fits is fed in part; the masks follow what is fed."""
    out = run(backend, kernel_device, FEED, [row_at(9, fed=2, blocks=range(4))], 4, num_masks=2, mask_id=MASK, num_choices=2)
    assert (out["input_ids"], out["positions"]) == ([102, 103, MASK, MASK], [2, 3, 4, 5])


@pytest.mark.parametrize("limit", range(10))
def test_the_limit_cuts_masks_before_tokens(backend: Backend, kernel_device: str, limit: int) -> None:
    row = row_at(6, fed=4, blocks=[3, 6, 9])
    out = run(backend, kernel_device, FEED, [row], 5, limit=limit, num_masks=3, mask_id=MASK, num_choices=4)
    left = max(min(limit, 9) - 4, 0)
    assert out["input_ids"] == ([104, 105, MASK, MASK, MASK][:left] + [0] * 5)[:5]
    assert out["token_rows"] == [0] * left + [-1] * (5 - left)
    assert out["seq_lens"] == [4 + left if left else 0]
    # Choices stay where they would be: those of masks that were cut are at places without a token.
    last = max(min(left, 2) - 1, 0)
    assert out["last_token_indices"] == [last, last + 1, last + 2, last + 3]


def test_masks_without_a_block_have_no_slot(backend: Backend, kernel_device: str) -> None:
    out = run(backend, kernel_device, FEED, [row_at(7, fed=6, blocks=[3, 6])], 4, num_masks=3, mask_id=MASK, columns=2)
    assert (out["positions"], out["slot_mapping"]) == ([6, 7, 8, 9], [26, 27, -1, -1])


def test_a_placeholder_ends_the_tokens_and_masks_follow(backend: Backend, kernel_device: str) -> None:
    row = Row(committed=[100, 101, -1, 103], fed=0, blocks=[3, 6])
    out = run(backend, kernel_device, FEED, [row, replace(row, fed=2)], 6, num_masks=2, mask_id=MASK, num_choices=3)
    assert out["input_ids"] == [100, 101, MASK, MASK, 0, 0] + [0] * 6
    assert (out["seq_lens"], out["last_token_indices"]) == ([4, 0], [1, 2, 3, 6, 7, 8])
    out = run(backend, kernel_device, FEED, [row], 6, shift=1, num_masks=2, mask_id=MASK)
    assert out["input_ids"] == [101, MASK, MASK, 0, 0, 0]


def test_rows_that_take_no_part_have_no_masks(backend: Backend, kernel_device: str) -> None:
    rows = [row_at(5, fed=3, blocks=[1, 2], live=False), row_at(5, fed=5, blocks=[1, 2]), Row(live=False)]
    for shift in (0, 1):
        out = run(backend, kernel_device, FEED, rows, 4, shift=shift, num_masks=2, mask_id=MASK, num_choices=2)
        assert (set(out["input_ids"]), set(out["token_rows"]), out["seq_lens"]) == ({0}, {-1}, [0, 0, 0])


@pytest.mark.parametrize("num_masks", range(9))
def test_every_number_of_masks(backend: Backend, kernel_device: str, num_masks: int) -> None:
    rows = [row_at(9, fed=9 - count, blocks=range(6)) for count in range(4)]
    for choices in {1, num_masks, num_masks + 1} - {0}:
        offset = num_masks + 1 - choices
        settings_ = {"num_masks": num_masks, "mask_id": MASK, "num_choices": choices, "choice_offset": offset}
        out = run(backend, kernel_device, FEED, rows, 3 + num_masks, **settings_)
        assert [sum(row == number for row in out["token_rows"]) for number in range(4)] == [0] + [n + num_masks for n in (1, 2, 3)]


def test_arrays_of_int64(backend: Backend, kernel_device: str) -> None:
    rows = [row_at(5, fed=3, blocks=[1, 2]), Row(live=False)]
    run(backend, kernel_device, FEED, rows, 5, dtype=torch.int64, shift=1, num_masks=3, mask_id=MASK, num_choices=4)


def test_a_smaller_batch_in_old_buffers_equals_fresh_ones(backend: Backend, kernel_device: str) -> None:
    rows = [row_at(6 + i, fed=3 + i, blocks=[i, i + 4, i + 8]) for i in range(4)]
    settings_: dict[str, Any] = {"shift": 1, "num_masks": 2, "mask_id": MASK, "num_choices": 3}
    old = Launch(kernel_device, FEED, rows, 5, **settings_)
    old.run(backend)
    small = Launch(kernel_device, FEED, rows[:2] + [replace(row, live=False) for row in rows[2:]], 5, **settings_)
    small.outputs = old.outputs
    assert small.run(backend) == small.expected()


@st.composite
def batches(draw: st.DrawFn) -> dict[str, Any]:
    """Ragged batches; a row with a request has a prompt and a token more, as `admit` leaves it."""
    block_size, length, most = draw(st.sampled_from([1, 2, 3, 4, 16])), 24, 5
    columns, num_masks = draw(st.integers(1, 12)), draw(st.integers(0, 6))
    num_choices = draw(st.integers(1, num_masks + 1))

    @st.composite
    def row(draw: st.DrawFn) -> Row:
        n = draw(st.sampled_from([0, *range(2, length - most)]))
        token = st.integers(0, 2**31 - 1)
        drafts = draw(st.lists(token if draw(st.booleans()) else st.integers(-1, 1), max_size=most))
        return Row(
            committed=draw(st.lists(token if draw(st.booleans()) else st.integers(-1, 9), min_size=n, max_size=n)),
            drafts=drafts if n else [],
            fed=draw(st.integers(max(n - most - 2, 0), n + 1)),
            num_draft=draw(st.integers(0, most)),
            num_drafted=draw(st.integers(0, len(drafts))) if n else 0,
            live=n > 0 and (draw(st.booleans()) or draw(st.booleans())),
            blocks=draw(st.lists(st.integers(-1, 2**31 // block_size - 1), max_size=columns)),
        )

    return {
        "kind": draw(st.sampled_from([FEED, FEED, DRAFTED])),
        "rows": draw(st.lists(row(), min_size=1, max_size=4)),
        "width": draw(st.integers(num_masks + 1, num_masks + most + 2)),
        "limit": draw(st.integers(0, length + 8)),
        "block_size": block_size,
        "length": length,
        "columns": columns,
        "shift": draw(st.integers(0, 1)),
        "num_masks": num_masks,
        "mask_id": draw(st.integers(0, 2**31 - 1)),
        "num_choices": num_choices,
        "choice_offset": draw(st.integers(0, num_masks + 1 - num_choices)),
        "query_only": num_masks == 0 and draw(st.booleans()),
    }


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=100)
@given(batch=batches())
def test_ragged_batches(backend: Backend, kernel_device: str, batch: dict[str, Any]) -> None:
    run(backend, kernel_device, **batch)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=30)
@given(batch=batches(), data=st.data())
def test_a_row_does_not_depend_on_its_company(backend: Backend, kernel_device: str, batch: dict[str, Any], data: st.DataObject) -> None:
    """The same row alone, in another place and beside others: the same window."""
    together = run(backend, kernel_device, **batch)
    number, width, choices = data.draw(st.integers(0, len(batch["rows"]) - 1)), batch["width"], batch["num_choices"]
    alone = run(backend, kernel_device, **batch | {"rows": [batch["rows"][number]]})
    for name in ("input_ids", "positions", "slot_mapping"):
        assert together[name][number * width : (number + 1) * width] == alone[name]
    assert together["seq_lens"][number] == alone["seq_lens"][0]
    indices = together["last_token_indices"][number * choices : (number + 1) * choices]
    assert [index - number * width for index in indices] == alone["last_token_indices"]


def test_refusals_write_nothing(backend: Backend, kernel_device: str) -> None:
    def refused(match: str, **changes: Any) -> None:
        launch = Launch(kernel_device, FEED, [row_at(5, fed=3, blocks=[1, 2]), row_at(4, fed=3)], 3, num_masks=2, num_choices=3)
        for name, value in changes.items():
            (launch.outputs if name in launch.outputs else launch.inputs)[name] = value
        with pytest.raises(ArgumentError, match=match):
            launch.run(backend)
        for name, value in launch.outputs.items():
            assert name in changes or (value == POISON).all()

    refused("^shift: expected 0 or 1, got 2", shift=2)
    refused("^shift: expected 0 or 1, got -1", shift=-1)
    refused("^query_only: expected False for VERIFY and for windows with masks, got 2 masks", query_only=True)
    refused("^query_only: .* got VERIFY", query_only=True, kind=VERIFY, num_masks=0, num_choices=1)
    refused("^num_masks: expected from 0 to width - 1 = 2, got 3", num_masks=3)
    refused("^num_masks: expected from 0 to width - 1 = 2, got -1", num_masks=-1)
    refused("^num_choices: expected choices among the last token and 2 masks behind it, got 4 from place 0 on", num_choices=4)
    refused("^num_choices: .* got 0 from place 0 on", num_choices=0)
    refused("^num_choices: .* got 3 from place -1 on", choice_offset=-1)
    refused("^num_choices: .* got 3 from place 1 on", choice_offset=1)
    refused("^num_choices: .* among the last token and 0 masks", num_masks=0)
    short = torch.full((5,), POISON, dtype=torch.int32, device=kernel_device)
    refused("^out_last_token_indices: expected at least 6 entries for 2 rows", out_last_token_indices=short)
    assert (short == POISON).all()
