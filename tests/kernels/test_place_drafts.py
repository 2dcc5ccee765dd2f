"""Whole rows of proposed drafts behind the committed tokens."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from funcspec.errors import ArgumentError
from funcspec.kernels.op import Backend
from funcspec.kernels.place_drafts import place_drafts_

from .guarded import POISON, Buffers

READ = ("proposals", "counts", "num_tokens", "row_limit", "is_live", "wanted")
IN_PLACE = ("num_draft", "num_drafted")

Output = dict[str, Any]


@pytest.fixture(params=["reference", "host", "triton"])
def backend(request: pytest.FixtureRequest, kernel_device: str) -> Backend:
    if request.param == "host" and kernel_device != "cpu":
        pytest.skip("the host form is for CPU tensors")
    return request.param


@dataclass(frozen=True)
class Row:
    """One row before the launch: n committed tokens, drafts of another drafter, proposals."""

    n: int = 1
    proposed: Sequence[int] = ()
    drafts: Sequence[int] = ()
    row_limit: int = 1000
    wanted: int = 9
    num_draft: int = 0
    live: bool = True
    count: int | None = None

    @property
    def counts(self) -> int:
        return len(self.proposed) if self.count is None else self.count

    @property
    def num_drafted(self) -> int:
        return len(self.drafts)

    def tokens(self, length: int) -> list[int]:
        return ([*range(100, 100 + self.n), *self.drafts] + [-1] * length)[:length]


class Launch:
    """One batch and its buffers: matrices are rows of wider ones, with guards between."""

    def __init__(self, device: str, rows: list[Row], *, keep_others: bool = False, most: int = 3, length: int = 16) -> None:
        self.buffers = buffers = Buffers(device)
        self.rows, self.length, self.most = rows, length, most
        whole = buffers.poisoned(len(rows) * (length + 3)).view(len(rows), length + 3)
        buffers.bands.append(whole[:, length:])
        whole[:, :length] = torch.tensor([row.tokens(length) for row in rows], dtype=torch.int32)
        proposals = buffers.poisoned(len(rows) * most).view(len(rows), most)
        for number, row in enumerate(rows):  # places past a proposal may hold anything
            proposals[number, : len(row.proposed)] = torch.tensor(row.proposed[:most], dtype=torch.int32)
        self.arguments: dict[str, Any] = {
            "keep_others": keep_others,
            "tokens": whole[:, :length],
            "proposals": proposals,
            "out_tokens": buffers.poisoned(len(rows) * most).view(len(rows), most),
            "is_live": buffers.holding([int(row.live) for row in rows]),
            "num_tokens": buffers.holding([row.n for row in rows]),
        }
        for name in ("counts", "row_limit", "wanted", *IN_PLACE):
            self.arguments[name] = buffers.holding([getattr(row, name) for row in rows])

    def run(self, backend: Backend) -> Output:
        before = {name: self.arguments[name].clone() for name in READ}
        place_drafts_(**self.arguments, backend=backend)
        self.buffers.check()
        for name, value in before.items():
            assert torch.equal(self.arguments[name], value), f"{name} was written"
        return {name: self.arguments[name].tolist() for name in ("tokens", *IN_PLACE, "out_tokens")}

    def expected(self) -> Output:
        """The contract, a row at a time."""
        out: Output = {name: [] for name in ("tokens", *IN_PLACE, "out_tokens")}
        for row in self.rows:
            tokens, drafts, planned = row.tokens(self.length), list(row.drafts), row.num_draft
            if row.counts > 0 or not self.arguments["keep_others"]:
                drafts = []
                if row.live:
                    for token in row.proposed[: max(min(row.counts, row.wanted, row.row_limit - row.n - 1, self.most), 0)]:
                        if token < 0:
                            break
                        drafts.append(token)
                planned = len(drafts)
                tokens[row.n : row.n + self.most] = (drafts + [-1] * self.most)[: min(self.most, self.length - row.n)]
            out["tokens"].append(tokens)
            out["num_draft"].append(planned)
            out["num_drafted"].append(len(drafts))
            out["out_tokens"].append(drafts + [-1] * (self.most - len(drafts)))
        return out


def run(backend: Backend, device: str, rows: list[Row], **changes: Any) -> Output:
    """Run a batch, compare it with the oracle, and return it."""
    launch = Launch(device, rows, **changes)
    out = launch.run(backend)
    assert out == launch.expected()
    return out


def test_alone_by_hand(backend: Backend, kernel_device: str) -> None:
    rows = [
        Row(n=3, proposed=[7, 8]),
        Row(n=2),  # nothing found
        Row(n=3, proposed=[7, 8], live=False),
        Row(n=2, drafts=[5, 5], num_draft=2),  # what is left of another round goes
    ]
    out = run(backend, kernel_device, rows, length=6)
    assert out["tokens"] == [[100, 101, 102, 7, 8, -1], [100, 101, -1, -1, -1, -1], [100, 101, 102, -1, -1, -1], [100, 101, -1, -1, -1, -1]]
    assert out["num_draft"] == out["num_drafted"] == [2, 0, 0, 0]
    assert out["out_tokens"] == [[7, 8, -1], [-1, -1, -1], [-1, -1, -1], [-1, -1, -1]]


def test_over_another_drafter_by_hand(backend: Backend, kernel_device: str) -> None:
    rows = [
        Row(n=2, proposed=[7], drafts=[5], num_draft=3),  # replaces what the other drafted and planned
        Row(n=2, drafts=[5], num_draft=3),  # the other goes on
        Row(n=2, proposed=[7], drafts=[5, 6, 4], num_draft=3),
        Row(n=2, proposed=[7, 8], wanted=0),
    ]
    out = run(backend, kernel_device, rows, length=6, keep_others=True)
    assert out["num_draft"] == [1, 3, 1, 0] and out["num_drafted"] == [1, 1, 1, 0]
    assert out["out_tokens"] == [[7, -1, -1], [5, -1, -1], [7, -1, -1], [-1, -1, -1]]
    assert out["tokens"][2] == [100, 101, 7, -1, -1, -1]


def test_the_row_limit_leaves_room_for_the_correction(backend: Backend, kernel_device: str) -> None:
    rows = [Row(n=10, proposed=[1, 2, 3, 4], row_limit=limit) for limit in (9, 10, 11, 12, 13, 14, 15, 40)]
    out = run(backend, kernel_device, rows, most=4)
    assert out["num_draft"] == [0, 0, 0, 1, 2, 3, 4, 4]


def test_num_draft_is_data(backend: Backend, kernel_device: str) -> None:
    out = run(backend, kernel_device, [Row(proposed=[1, 2, 3], wanted=wanted) for wanted in (-1, 0, 1, 2, 3, 9)])
    assert out["num_draft"] == [0, 0, 1, 2, 3, 3]


def test_a_placeholder_ends_a_proposal(backend: Backend, kernel_device: str) -> None:
    out = run(backend, kernel_device, [Row(proposed=[-1, 2, 3]), Row(proposed=[1, -5, 3]), Row(proposed=[1, 2, 3])])
    assert out["num_draft"] == [0, 1, 3]


def test_counts_out_of_range(backend: Backend, kernel_device: str) -> None:
    rows = [Row(proposed=[1, 2, 3], count=count) for count in (-1, 2, 99)]
    assert run(backend, kernel_device, rows)["num_draft"] == [0, 2, 3]
    assert run(backend, kernel_device, rows, keep_others=True)["num_draft"] == [0, 2, 3]


@pytest.mark.parametrize("keep_others", [False, True])
def test_the_last_places_of_a_row(backend: Backend, kernel_device: str, keep_others: bool) -> None:
    """Neither the guard behind a row nor the next row's first token is touched."""
    rows = [Row(n=n, proposed=[5, 6, 7], row_limit=8) for n in (5, 6, 7, 8)] + [Row(n=8, live=False), Row(n=0, live=False)]
    out = run(backend, kernel_device, rows, length=8, keep_others=keep_others)
    assert out["num_draft"] == [2, 1, 0, 0, 0, 0]


@pytest.mark.parametrize("most", range(10))
def test_h7_every_number_of_drafts(backend: Backend, kernel_device: str, most: int) -> None:
    rows = [Row(n=2, proposed=range(20, 20 + most)), Row(n=1, proposed=range(40, 40 + most // 2)), Row(n=1)]
    for keep_others in (False, True):
        out = run(backend, kernel_device, rows, most=most, keep_others=keep_others)
        assert out["num_draft"] == [most, most // 2, 0]


def test_addresses_are_64_bit_wide(backend: Backend, kernel_device: str) -> None:
    """The third row begins 2^31 tokens behind the first; nearly all of it is virtual memory that is never touched."""
    stride = 2**30
    try:
        whole = torch.empty(2 * stride + 4, dtype=torch.int32, device=kernel_device)
    except RuntimeError:
        pytest.skip("too little address space")
    launch = Launch(kernel_device, [Row(n=1, proposed=[3, 4]), Row(), Row(n=2, proposed=[5, 6])], most=2, length=4)
    tokens = whole.as_strided((3, 4), (stride, 1))
    tokens.copy_(launch.arguments["tokens"])
    launch.arguments["tokens"] = tokens
    assert launch.run(backend) == launch.expected()


@st.composite
def batches(draw: st.DrawFn) -> dict[str, Any]:
    most, length = draw(st.integers(0, 9)), 16

    @st.composite
    def row(draw: st.DrawFn) -> Row:
        n = draw(st.integers(0, length))
        planned = draw(st.integers(0, max(min(most, length - n - 1), 0)))
        token = st.integers(0, 2**31 - 1)
        return Row(
            n=n,
            proposed=draw(st.lists(st.one_of(token, token, st.just(-1)), max_size=most)),
            drafts=draw(st.lists(token, max_size=planned)),
            row_limit=draw(st.integers(0, length)),
            wanted=draw(st.integers(-1, 11)),
            num_draft=planned,
            live=draw(st.booleans()) or draw(st.booleans()),
        )

    rows = draw(st.lists(row(), min_size=1, max_size=4))
    return {"rows": rows, "keep_others": draw(st.booleans()), "most": most, "length": length}


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=100)
@given(batch=batches())
def test_ragged_batches(backend: Backend, kernel_device: str, batch: dict[str, Any]) -> None:
    run(backend, kernel_device, **batch)


def test_refusals_write_nothing(backend: Backend, kernel_device: str) -> None:
    def array(*shape: int) -> torch.Tensor:
        return torch.zeros(shape, dtype=torch.int32, device=kernel_device)

    def refused(match: str, **changes: Any) -> None:
        launch = Launch(kernel_device, [Row(n=2, proposed=[4]), Row(n=3)], most=2)
        launch.arguments.update(changes)
        before = {name: launch.arguments[name].tolist() for name in ("tokens", *IN_PLACE)}
        with pytest.raises(ArgumentError, match=match):
            launch.run(backend)
        assert all(launch.arguments[name].tolist() == value for name, value in before.items())
        assert "out_tokens" in changes or (launch.arguments["out_tokens"] == POISON).all()

    refused(r"out_tokens: expected \[2, K\]", out_tokens=array(3, 2))
    refused("out_tokens", out_tokens=array(4))
    refused(r"proposals: expected the shape \(2, 2\) of out_tokens, got \(2, 3\)", proposals=array(2, 3))
    for name in ("counts", "num_tokens", "row_limit", "is_live", "wanted", *IN_PLACE):
        refused(rf"{name}: expected one entry for each of 2 rows, got shape \(1,\)", **{name: array(1)})
