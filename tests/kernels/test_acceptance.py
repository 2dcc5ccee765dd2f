"""Acceptance by matching: keep, correct, trim, commit."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from funcspec.errors import ArgumentError
from funcspec.kernels.acceptance import ACCEPTED, AT_LENGTH, BONUS, NOT_FINISHED, RECOVERED, STOPPED, accept_matching_
from funcspec.kernels.op import Backend

from .guarded import POISON, Buffers

IN_PLACE = ("num_tokens", "num_draft", "num_drafted", "is_live", "finish_reason", "bad_row")
BY_PLACE = ("out_tokens", "out_origin")
BY_ROW = ("out_num_accepted", "out_num_emitted", "out_num_drafted", "out_bad_row")
WRITTEN = ("tokens", *IN_PLACE, *BY_PLACE, *BY_ROW)

Output = dict[str, Any]


@pytest.fixture(params=["reference", "host", "triton"])
def backend(request: pytest.FixtureRequest, kernel_device: str) -> Backend:
    if request.param == "host" and kernel_device != "cpu":
        pytest.skip("the host form is for CPU tensors")
    return request.param


@dataclass(frozen=True)
class Row:
    """One row before the launch. Places without a choice hold 555, places without a flag 0."""

    n: int = 2
    drafts: Sequence[int] = ()
    chosen: Sequence[int] = ()
    bad: Sequence[int] = ()
    row_limit: int = 1000
    stops: Sequence[int] = ()
    num_draft: int | None = None
    num_drafted: int | None = None
    live: bool = True
    finish_reason: int = NOT_FINISHED
    bad_row: int = 0

    @property
    def planned(self) -> int:
        return len(self.drafts) if self.num_draft is None else self.num_draft

    @property
    def made(self) -> int:
        return len(self.drafts) if self.num_drafted is None else self.num_drafted

    def tokens(self, length: int) -> list[int]:
        return ([*range(100, 100 + self.n), *self.drafts] + [-1] * length)[:length]


def padded(values: Sequence[int], width: int, filler: int) -> list[int]:
    return ([*values] + [filler] * width)[:width]


class Launch:
    """One batch and its buffers: rows of tokens are rows of a wider matrix, with guards between."""

    def __init__(self, device: str, rows: list[Row], width: int, *, num_stops: int | None = None, length: int = 16) -> None:
        self.buffers = buffers = Buffers(device)
        self.rows, self.width, self.length = rows, width, length
        self.num_stops = max([len(row.stops) for row in rows] + [0]) if num_stops is None else num_stops
        whole = buffers.poisoned(len(rows) * (length + 3)).view(len(rows), length + 3)
        buffers.bands.append(whole[:, length:])
        tokens = whole[:, :length]
        tokens.copy_(torch.tensor([row.tokens(length) for row in rows], dtype=torch.int32).view(len(rows), length))
        stops = [stop for row in rows for stop in padded(row.stops, self.num_stops, -1)]
        self.inputs = {
            "chosen": buffers.holding([token for row in rows for token in padded(row.chosen, width, 555)]),
            "bad": buffers.holding([flag for row in rows for flag in padded(row.bad, width, 0)]),
            "row_limit": buffers.holding([row.row_limit for row in rows]),
            "stop_ids": buffers.holding(stops).view(len(rows), self.num_stops),
        }
        self.outputs = {
            "tokens": tokens,
            "num_tokens": buffers.holding([row.n for row in rows]),
            "num_draft": buffers.holding([row.planned for row in rows]),
            "num_drafted": buffers.holding([row.made for row in rows]),
            "is_live": buffers.holding([int(row.live) for row in rows]),
            "finish_reason": buffers.holding([row.finish_reason for row in rows]),
            "bad_row": buffers.holding([row.bad_row for row in rows]),
        }
        self.outputs |= {name: buffers.poisoned(len(rows) * width).view(len(rows), width) for name in BY_PLACE}
        self.outputs |= {name: buffers.poisoned(len(rows)) for name in BY_ROW}

    def run(self, backend: Backend) -> Output:
        before = {name: value.clone() for name, value in self.inputs.items()}
        accept_matching_(**self.inputs, **self.outputs, backend=backend)
        self.buffers.check()
        for name, value in before.items():
            assert torch.equal(self.inputs[name], value), f"{name} was written"
        return {name: self.outputs[name].tolist() for name in WRITTEN}

    def expected(self) -> Output:
        """The contract, a token at a time."""
        out: Output = {name: [] for name in WRITTEN}
        for row in self.rows:
            after, emitted, origins, drafts, flagged = row.tokens(self.length), [], [], [], 0
            reason = row.finish_reason
            if row.live:
                drafts = list(row.drafts[: min(row.planned, row.made)])
                after[row.n : row.n + len(drafts)] = [-1] * len(drafts)
                reason = AT_LENGTH if row.n >= row.row_limit else NOT_FINISHED
                for place, token in enumerate(padded(row.chosen, self.width, 555)):
                    if reason != NOT_FINISHED or (origins and origins[-1] != ACCEPTED) or token < 0:
                        break
                    origins.append(BONUS if place == len(drafts) else ACCEPTED if token == drafts[place] else RECOVERED)
                    emitted.append(token)
                    after[row.n + place] = token
                    flagged |= padded(row.bad, self.width, 0)[place]
                    if row.n + len(emitted) >= row.row_limit:
                        reason = AT_LENGTH
                    if token in row.stops:
                        reason = STOPPED
            out["tokens"].append(after)
            out["num_tokens"].append(row.n + len(emitted))
            out["num_draft"].append(0)
            out["num_drafted"].append(0)
            out["is_live"].append(int(row.live and reason == NOT_FINISHED))
            out["finish_reason"].append(reason)
            out["bad_row"].append(max(row.bad_row, flagged))
            out["out_tokens"].append(padded(emitted, self.width, -1))
            out["out_origin"].append(padded(origins, self.width, -1))
            out["out_num_accepted"].append(origins.count(ACCEPTED))
            out["out_num_emitted"].append(len(emitted))
            out["out_num_drafted"].append(len(drafts))
            out["out_bad_row"].append(flagged)
        return out


def run(backend: Backend, device: str, rows: list[Row], width: int, **changes: Any) -> Output:
    """Run a batch, compare it with the oracle, and return it."""
    launch = Launch(device, rows, width, **changes)
    out = launch.run(backend)
    assert out == launch.expected()
    return out


def test_a_batch_by_hand(backend: Backend, kernel_device: str) -> None:
    rows = [
        Row(n=2, drafts=[5, 6], chosen=[5, 6, 7]),
        Row(n=2, drafts=[5, 6], chosen=[5, 9, 7]),
        Row(n=2, chosen=[8]),
        Row(n=2, drafts=[5, 6], chosen=[5, 6, 7], live=False, finish_reason=STOPPED),
    ]
    out = run(backend, kernel_device, rows, 3, length=6)
    assert out["tokens"] == [
        [100, 101, 5, 6, 7, -1],
        [100, 101, 5, 9, -1, -1],
        [100, 101, 8, -1, -1, -1],
        [100, 101, 5, 6, -1, -1],
    ]
    assert out["num_tokens"] == [5, 4, 3, 2]
    assert out["out_tokens"] == [[5, 6, 7], [5, 9, -1], [8, -1, -1], [-1, -1, -1]]
    assert out["out_origin"] == [[ACCEPTED, ACCEPTED, BONUS], [ACCEPTED, RECOVERED, -1], [BONUS, -1, -1], [-1, -1, -1]]
    assert out["out_num_accepted"] == [2, 1, 0, 0]
    assert out["out_num_emitted"] == [3, 2, 1, 0]
    assert out["out_num_drafted"] == [2, 2, 0, 0]
    assert out["num_draft"] == out["num_drafted"] == [0, 0, 0, 0]
    assert out["is_live"] == [1, 1, 1, 0]
    assert out["finish_reason"] == [0, 0, 0, STOPPED]


def test_a5_the_committed_length_does_not_count_rejected_drafts(backend: Backend, kernel_device: str) -> None:
    row = Row(n=43, drafts=[5, 6, 7], chosen=[8, 9, 9, 9])
    out = run(backend, kernel_device, [row], 4, length=64)
    assert out["num_tokens"] == [44]
    assert out["tokens"][0][43:] == [8] + [-1] * 20


def test_a3_rows_accept_as_when_alone(backend: Backend, kernel_device: str) -> None:
    rows = [Row(n=1, drafts=[5, 6, 7], chosen=[9, 6, 7, 8]), Row(n=3, drafts=[5, 6, 7], chosen=[5, 6, 7, 8])]
    together = run(backend, kernel_device, rows, 4)
    assert together["out_num_accepted"] == [0, 3]
    for number, row in enumerate(rows):
        alone = run(backend, kernel_device, [row], 4)
        assert {name: value[0] for name, value in alone.items()} == {name: value[number] for name, value in together.items()}


def test_d3_old_outputs_leave_no_trace(backend: Backend, kernel_device: str) -> None:
    rows = [Row(n=2, drafts=[5, 6], chosen=[5, 6, 7])] * 4
    fewer = rows[:2] + [replace(row, live=False, drafts=()) for row in rows[2:]]
    old, small = Launch(kernel_device, rows, 3), Launch(kernel_device, fewer, 3)
    old.run(backend)
    for name in BY_PLACE + BY_ROW:
        small.outputs[name] = old.outputs[name]
    assert small.run(backend) == small.expected()


def test_d6_a_row_that_emits_nothing(backend: Backend, kernel_device: str) -> None:
    rows = [
        Row(n=2, drafts=[5], chosen=[5, 6]),
        Row(n=0, live=False),
        Row(n=2, chosen=[5]),
    ]
    out = run(backend, kernel_device, rows, 2)
    assert out["out_num_emitted"] == [2, 0, 1]
    assert out["num_tokens"] == [4, 0, 3]
    assert out["tokens"][1] == [-1] * 16


def test_e1_a_placeholder_is_never_accepted(backend: Backend, kernel_device: str) -> None:
    row = Row(n=2, drafts=[5, -1, 7], chosen=[5, 3, 7, 8])
    out = run(backend, kernel_device, [row], 4)
    assert out["out_tokens"] == [[5, 3, -1, -1]]
    assert out["out_num_emitted"] == [2]
    # The place behind a placeholder is not scored: its choice is -1 too, and equals nothing.
    out = run(backend, kernel_device, [replace(row, chosen=[5, -1, -1, -1])], 4)
    assert out["out_tokens"] == [[5, -1, -1, -1]]
    assert out["num_tokens"] == [3]
    assert out["out_num_accepted"] == [1]


def test_e2_a_row_of_placeholders_decodes_plainly(backend: Backend, kernel_device: str) -> None:
    rows = [Row(n=2, drafts=[-1, -1, -1], num_draft=count, chosen=[5, -1, -1, -1]) for count in (0, 3)]
    out = run(backend, kernel_device, rows, 4)
    assert out["out_tokens"] == [[5, -1, -1, -1]] * 2
    assert [tokens[2:6] for tokens in out["tokens"]] == [[5, -1, -1, -1]] * 2


def test_f7_the_bonus_token_is_emitted_once(backend: Backend, kernel_device: str) -> None:
    out = run(backend, kernel_device, [Row(n=2, drafts=[5, 6, 7], chosen=[5, 6, 7, 8])], 4)
    assert out["out_tokens"] == [[5, 6, 7, 8]]
    assert out["out_origin"] == [[ACCEPTED, ACCEPTED, ACCEPTED, BONUS]]


@pytest.mark.parametrize("width", range(1, 11))
def test_h7_every_number_of_drafts(backend: Backend, kernel_device: str, width: int) -> None:
    drafts = list(range(width - 1))
    wrong = [*drafts[:-1], 99, 98]
    out = run(backend, kernel_device, [Row(drafts=drafts, chosen=[*drafts, 77]), Row(drafts=drafts, chosen=wrong)], width)
    assert out["out_num_accepted"] == [width - 1, max(width - 2, 0)]


def test_i4_every_counter_is_cut_at_the_stop(backend: Backend, kernel_device: str) -> None:
    drafts = [10, 11, 12, 13, 14, 15]
    out = run(backend, kernel_device, [Row(n=2, drafts=drafts, chosen=[*drafts, 16], stops=[12])], 7)
    assert out["out_num_accepted"] == out["out_num_emitted"] == [3]
    assert out["num_tokens"] == [5]
    assert out["out_tokens"] == [[10, 11, 12, -1, -1, -1, -1]]
    assert out["tokens"][0][2:] == [10, 11, 12] + [-1] * 11
    assert (out["finish_reason"], out["is_live"]) == ([STOPPED], [0])


def test_stops_at_every_place(backend: Backend, kernel_device: str) -> None:
    row = Row(n=2, drafts=[5, 6], chosen=[5, 7, 8])
    rows = [
        replace(row, stops=[5, 7]),  # an accepted draft; the recovered token is a stop too
        replace(row, stops=[-1, 7]),  # the recovered token
        replace(row, stops=[6, 8]),  # a rejected draft, and a choice behind the recovered token
        replace(row, chosen=[5, 6, 8], stops=[8, -1]),  # the bonus token
        replace(row, stops=[-1, -1]),
    ]
    out = run(backend, kernel_device, rows, 3)
    assert out["out_num_emitted"] == [1, 2, 2, 3, 2]
    assert out["out_num_accepted"] == [1, 1, 1, 2, 1]
    assert out["finish_reason"] == [STOPPED, STOPPED, NOT_FINISHED, STOPPED, NOT_FINISHED]


def test_row_limits_cut_before_anything_is_counted(backend: Backend, kernel_device: str) -> None:
    row = Row(n=4, drafts=[5, 6], chosen=[5, 6, 8])
    rows = [replace(row, row_limit=limit) for limit in (3, 4, 5, 6, 7, 8)]
    out = run(backend, kernel_device, rows, 3)
    assert out["out_num_emitted"] == [0, 0, 1, 2, 3, 3]
    assert out["out_num_accepted"] == [0, 0, 1, 2, 2, 2]
    assert out["finish_reason"] == [AT_LENGTH] * 5 + [NOT_FINISHED]


def test_a_stop_at_the_limit_is_a_stop(backend: Backend, kernel_device: str) -> None:
    row = Row(n=4, drafts=[5, 6], chosen=[5, 6, 8], row_limit=6)
    out = run(backend, kernel_device, [replace(row, stops=[6]), replace(row, stops=[8])], 3)
    assert out["finish_reason"] == [STOPPED, AT_LENGTH]


def test_a_full_row_is_left_alone(backend: Backend, kernel_device: str) -> None:
    """Its next place is the guard behind it, or another row's."""
    rows = [Row(n=8, chosen=[5], row_limit=8), Row(n=8, chosen=[5], row_limit=8, live=False), Row(n=7, chosen=[5], row_limit=8)]
    out = run(backend, kernel_device, rows, 1, length=8)
    assert out["num_tokens"] == [8, 8, 8]
    assert out["finish_reason"] == [AT_LENGTH, NOT_FINISHED, AT_LENGTH]


def test_flags_count_where_tokens_are_emitted(backend: Backend, kernel_device: str) -> None:
    row = Row(n=2, drafts=[5, 6], chosen=[5, 7, 8])
    rows = [
        replace(row, bad=[0, 0, 1]),  # behind the recovered token
        replace(row, bad=[0, 1, 0]),
        replace(row, bad=[0, 1, 1], stops=[5]),  # behind the stop
        replace(row, bad=[1, 1, 1], row_limit=2),  # behind the limit
        replace(row, bad=[1, 1, 1], live=False),
        replace(row, bad_row=1),  # once bad, always bad
    ]
    out = run(backend, kernel_device, rows, 3)
    assert out["out_bad_row"] == [0, 1, 0, 0, 0, 0]
    assert out["bad_row"] == [0, 1, 0, 0, 0, 1]


def test_drafts_that_were_planned_but_not_made(backend: Backend, kernel_device: str) -> None:
    rows = [Row(drafts=[5, 6], num_draft=4, chosen=[5, 6, 7, 8, 9]), Row(drafts=[5, 6], num_draft=1, chosen=[5, 6, 7])]
    out = run(backend, kernel_device, rows, 5)
    assert out["out_num_drafted"] == [2, 1]
    assert out["out_num_emitted"] == [3, 2]


def test_no_stop_ids_at_all(backend: Backend, kernel_device: str) -> None:
    out = run(backend, kernel_device, [Row(chosen=[-1]), Row(chosen=[0])], 1, num_stops=0)
    assert out["out_num_emitted"] == [0, 1]


def test_unused_stop_ids_never_match(backend: Backend, kernel_device: str) -> None:
    out = run(backend, kernel_device, [Row(chosen=[-1], stops=[-1, -1]), Row(drafts=[-1], chosen=[4, -1], stops=[-1, -1])], 2)
    assert out["finish_reason"] == [NOT_FINISHED, NOT_FINISHED]


def test_choices_may_be_longer_than_the_batch(backend: Backend, kernel_device: str) -> None:
    launch = Launch(kernel_device, [Row(drafts=[5], chosen=[5, 6]), Row(chosen=[5])], 2)
    for name in ("chosen", "bad"):
        launch.inputs[name] = torch.cat((launch.inputs[name], torch.full_like(launch.inputs[name], 1)))
    assert launch.run(backend) == launch.expected()


@st.composite
def batches(draw: st.DrawFn) -> dict[str, Any]:
    width, num_stops, length = draw(st.integers(1, 10)), draw(st.integers(0, 3)), 16
    largest = draw(st.sampled_from([1, 3, 2**31 - 1]))
    token = st.integers(max(largest - 3, 0), largest)
    placeholder = draw(st.booleans())

    @st.composite
    def row(draw: st.DrawFn) -> Row:
        live = draw(st.booleans()) or draw(st.booleans())
        n = draw(st.integers(1 if live else 0, length))
        limit = draw(st.integers(n, length)) if live else draw(st.integers(0, length))
        made = draw(st.integers(0, max(min(width - 1, limit - n - 1), 0)))
        drafts = draw(st.lists(st.one_of(st.just(-1), token) if placeholder else token, min_size=made, max_size=made))
        chosen = draw(st.lists(st.one_of(st.just(-1), token) if placeholder else token, min_size=width, max_size=width))
        kept = draw(st.integers(0, made))
        return Row(
            n=n,
            drafts=drafts,
            chosen=[*drafts[:kept], *chosen[kept:]],
            bad=draw(st.lists(st.integers(0, 1), min_size=width, max_size=width)),
            row_limit=limit,
            stops=draw(st.lists(st.one_of(st.just(-1), token), max_size=num_stops)),
            num_draft=draw(st.integers(0, width - 1)),
            live=live,
            finish_reason=NOT_FINISHED if live else draw(st.integers(0, 2)),
            bad_row=draw(st.integers(0, 1)),
        )

    return {"rows": draw(st.lists(row(), min_size=1, max_size=4)), "width": width, "num_stops": num_stops, "length": length}


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=60)
@given(batch=batches())
def test_ragged_batches(backend: Backend, kernel_device: str, batch: dict[str, Any]) -> None:
    run(backend, kernel_device, **batch)


def test_refusals_write_nothing(backend: Backend, kernel_device: str) -> None:
    def refused(match: str, **changes: Any) -> None:
        launch = Launch(kernel_device, [Row(drafts=[5], chosen=[5, 6]), Row(chosen=[5])], 2)
        before = {name: value.tolist() for name, value in launch.outputs.items()}
        for name, value in changes.items():
            (launch.outputs if name in launch.outputs else launch.inputs)[name] = value
        with pytest.raises(ArgumentError, match=match):
            launch.run(backend)
        for name, value in before.items():
            assert name in changes or launch.outputs[name].tolist() == value

    def array(*shape: int) -> torch.Tensor:
        return torch.full(shape, POISON, dtype=torch.int32, device=kernel_device)

    refused("chosen", chosen=array(3))
    refused("bad", bad=array(3))
    refused("out_tokens", out_tokens=array(3, 2))
