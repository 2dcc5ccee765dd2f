"""Drafts behind the committed tokens, one a row or several; the first plan the round."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from funcspec.errors import ArgumentError
from funcspec.kernels.append_drafts import append_drafts_
from funcspec.kernels.op import Backend

from .guarded import POISON, Buffers

READ = ("chosen", "num_tokens", "row_limit", "is_live", "wanted")
IN_PLACE = ("num_draft", "num_drafted", "draft_len")

Output = dict[str, Any]


@pytest.fixture(params=["reference", "host", "triton"])
def backend(request: pytest.FixtureRequest, kernel_device: str) -> Backend:
    if request.param == "host" and kernel_device != "cpu":
        pytest.skip("the host form is for CPU tensors")
    return request.param


@dataclass(frozen=True)
class Row:
    """One row before the launch."""

    n: int = 1
    chosen: int | Sequence[int] = 7
    drafts: Sequence[int] = ()
    row_limit: int = 1000
    wanted: int = 9
    num_draft: int = 0
    num_drafted: int = 0
    draft_len: int = 0
    live: bool = True

    @property
    def drawn(self) -> list[int]:
        return [self.chosen] if isinstance(self.chosen, int) else [*self.chosen]

    def tokens(self, length: int) -> list[int]:
        return ([*range(100, 100 + self.n), *self.drafts] + [-1] * length)[:length]


class Launch:
    """One batch and its buffers: matrices are rows of wider ones, with guards between."""

    def __init__(
        self, device: str, rows: list[Row], *, first: bool, most: int, draft_limit: int = 1000, length: int = 16, **settings_: int
    ) -> None:
        self.buffers = buffers = Buffers(device)
        self.rows, self.length, self.most = rows, length, most
        tokens = self._matrix(length, 3)
        tokens.copy_(torch.tensor([row.tokens(length) for row in rows], dtype=torch.int32).view(len(rows), length))
        self.arguments: dict[str, Any] = {
            "first": first,
            "draft_limit": draft_limit,
            **settings_,
            "tokens": tokens,
            "out_tokens": buffers.poisoned(len(rows) * most).view(len(rows), most),
            "is_live": buffers.holding([int(row.live) for row in rows]),
            "num_tokens": buffers.holding([row.n for row in rows]),
        }
        self.arguments["chosen"] = buffers.holding([token for row in rows for token in row.drawn])
        for name in ("row_limit", "wanted", *IN_PLACE):
            self.arguments[name] = buffers.holding([getattr(row, name) for row in rows])

    def _matrix(self, width: int, between: int) -> torch.Tensor:
        whole = self.buffers.poisoned(len(self.rows) * (width + between)).view(len(self.rows), width + between)
        self.buffers.bands.append(whole[:, width:])
        return whole[:, :width]

    def run(self, backend: Backend) -> Output:
        before = {name: self.arguments[name].clone() for name in READ}
        append_drafts_(**self.arguments, backend=backend)
        self.buffers.check()
        for name, value in before.items():
            assert torch.equal(self.arguments[name], value), f"{name} was written"
        return {name: self.arguments[name].tolist() for name in ("tokens", *IN_PLACE, "out_tokens")}

    def expected(self) -> Output:
        """The contract, a row at a time."""
        out: Output = {name: [] for name in ("tokens", *IN_PLACE, "out_tokens")}
        for row in self.rows:
            tokens = row.tokens(self.length)
            planned, made, fed = row.num_draft, row.num_drafted, row.draft_len
            if self.arguments["first"]:
                planned = made = 0
                if row.live:
                    draft_limit = self.arguments["draft_limit"]
                    fed = min(row.n, draft_limit) - self.arguments.get("lag", 0)
                    planned = max(min(row.wanted, row.row_limit - row.n - 1, draft_limit - row.n + 1, self.most), 0)
            for token in row.drawn:
                if made >= planned or token < 0:
                    break
                tokens[row.n + made] = token
                made += 1
            out["tokens"].append(tokens)
            out["num_draft"].append(planned)
            out["num_drafted"].append(made)
            out["draft_len"].append(fed)
            out["out_tokens"].append(tokens[row.n : row.n + made] + [-1] * (self.most - made))
        return out


def run(backend: Backend, device: str, rows: list[Row], **changes: Any) -> Output:
    """Run a batch, compare it with the oracle, and return it."""
    launch = Launch(device, rows, **changes)
    out = launch.run(backend)
    assert out == launch.expected()
    return out


def test_the_first_draft_by_hand(backend: Backend, kernel_device: str) -> None:
    rows = [
        Row(n=3, chosen=7, wanted=2, draft_len=1),
        Row(n=3, chosen=8, wanted=0, draft_len=1),  # is fed, drafts nothing
        Row(n=3, chosen=9, wanted=2, draft_len=1, num_draft=3, num_drafted=2, live=False),  # what is left of another round goes
    ]
    out = run(backend, kernel_device, rows, first=True, most=3, length=6)
    assert out["tokens"] == [[100, 101, 102, 7, -1, -1]] + [[100, 101, 102, -1, -1, -1]] * 2
    assert out["num_draft"] == [2, 0, 0]
    assert out["num_drafted"] == [1, 0, 0]
    assert out["draft_len"] == [3, 3, 1]
    assert out["out_tokens"] == [[7, -1, -1], [-1, -1, -1], [-1, -1, -1]]


def test_a_later_draft_by_hand(backend: Backend, kernel_device: str) -> None:
    rows = [
        Row(n=2, chosen=9, drafts=[7, 8], num_draft=3, num_drafted=2, draft_len=2, wanted=0),
        Row(n=2, chosen=9, drafts=[7, 8], num_draft=2, num_drafted=2, draft_len=2),  # has all it planned
    ]
    out = run(backend, kernel_device, rows, first=False, most=4, length=6)
    assert out["tokens"] == [[100, 101, 7, 8, 9, -1], [100, 101, 7, 8, -1, -1]]
    assert out["num_draft"] == [3, 2]
    assert out["num_drafted"] == [3, 2]
    assert out["draft_len"] == [2, 2]
    assert out["out_tokens"] == [[7, 8, 9, -1], [7, 8, -1, -1]]


def test_the_row_limit_leaves_room_for_the_correction(backend: Backend, kernel_device: str) -> None:
    rows = [Row(n=10, row_limit=limit) for limit in (9, 10, 11, 12, 13, 14, 15, 40)]
    out = run(backend, kernel_device, rows, first=True, most=4)
    assert out["num_draft"] == [0, 0, 0, 1, 2, 3, 4, 4]


def test_a1_the_drafter_never_passes_its_own_limit(backend: Backend, kernel_device: str) -> None:
    """Drafting j tokens feeds the drafter positions up to n + j - 2."""
    rows = [Row(n=n) for n in (28, 29, 30, 31, 32, 33, 34, 40)]
    out = run(backend, kernel_device, rows, first=True, most=4, draft_limit=32, length=48)
    assert out["num_draft"] == [4, 4, 3, 2, 1, 0, 0, 0]
    assert out["draft_len"] == [28, 29, 30, 31, 32, 32, 32, 32]


def test_d6_a_row_with_nothing_drafted_takes_no_place(backend: Backend, kernel_device: str) -> None:
    rows = [replace(Row(n=2, drafts=[5, 6, 7], num_draft=3), num_drafted=count, drafts=[5, 6][:count]) for count in (2, 0, 1)]
    out = run(backend, kernel_device, rows, first=False, most=3, length=6)
    assert out["num_drafted"] == [3, 1, 2]
    assert [tokens[:2] for tokens in out["tokens"]] == [[100, 101]] * 3


def test_e2_a_placeholder_is_no_draft(backend: Backend, kernel_device: str) -> None:
    out = run(backend, kernel_device, [Row(n=2, chosen=-1, wanted=3), Row(n=2, chosen=5, wanted=3)], first=True, most=3)
    assert out["num_draft"] == [3, 3]
    assert out["num_drafted"] == [0, 1]
    assert out["out_tokens"] == [[-1, -1, -1], [5, -1, -1]]
    later = Row(n=2, chosen=-1, drafts=[7], num_draft=3, num_drafted=1)
    out = run(backend, kernel_device, [later], first=False, most=3)
    assert (out["num_drafted"], out["out_tokens"]) == ([1], [[7, -1, -1]])


def test_the_last_place_of_a_row(backend: Backend, kernel_device: str) -> None:
    """Neither the guard behind it nor the next row's first token is touched."""
    rows = [Row(n=7, row_limit=9, chosen=5), Row(n=8, row_limit=8, chosen=5), Row(n=8, row_limit=8, chosen=5, live=False)]
    out = run(backend, kernel_device, rows, first=True, most=3, length=8)
    assert out["tokens"][0][-1] == 5
    assert out["num_draft"] == [1, 0, 0]


@pytest.mark.parametrize("most", range(10))
def test_h7_every_number_of_drafts(backend: Backend, kernel_device: str, most: int) -> None:
    launch = Launch(kernel_device, [Row(n=2), Row(n=1, wanted=most // 2)], first=True, most=most)
    for step in range(max(most, 1)):
        launch.arguments["first"] = step == 0
        launch.arguments["chosen"].copy_(torch.tensor([20 + step, 40 + step]))
        out = launch.run(backend)
        made = min(step + 1, most), min(step + 1, most // 2)
        assert out["num_drafted"] == [*made]
        drafts = [[first + place for place in range(count)] for first, count in zip((20, 40), made, strict=True)]
        assert out["out_tokens"] == [row + [-1] * (most - len(row)) for row in drafts]
        for number, (n, row) in enumerate(zip((2, 1), drafts, strict=True)):
            assert out["tokens"][number] == [*range(100, 100 + n), *row] + [-1] * (16 - n - len(row))
        assert out["num_draft"] == [most, most // 2]


def test_wanted_may_be_num_draft_itself(backend: Backend, kernel_device: str) -> None:
    launch = Launch(kernel_device, [Row(n=2, drafts=[7], num_draft=3, num_drafted=1, wanted=3)], first=False, most=3)
    expected = launch.expected()
    launch.arguments["wanted"] = launch.arguments["num_draft"]
    assert launch.run(backend) == expected


def test_chosen_may_be_longer_than_the_batch(backend: Backend, kernel_device: str) -> None:
    launch = Launch(kernel_device, [Row(n=2), Row(n=3)], first=True, most=2)
    launch.arguments["chosen"] = torch.tensor([7, 7, 999], dtype=torch.int32, device=kernel_device)
    assert launch.run(backend) == launch.expected()


def test_several_drafts_by_hand(backend: Backend, kernel_device: str) -> None:
    rows = [
        Row(n=2, chosen=[7, 8, 9], wanted=3),
        Row(n=2, chosen=[7, 8, 9], wanted=2),  # has all it planned
        Row(n=2, chosen=[7, -1, 9], wanted=3),  # what lies behind a gap is no draft
        Row(n=2, chosen=[-1, 8, 9], wanted=3),
        Row(n=2, chosen=[7, 8, 9], wanted=0),
        Row(n=2, chosen=[7, 8, 9], wanted=3, live=False),
    ]
    out = run(backend, kernel_device, rows, first=True, most=4, length=6, num_chosen=3)
    assert [tokens[2:] for tokens in out["tokens"]] == [[7, 8, 9, -1], [7, 8, -1, -1], [7, -1, -1, -1]] + [[-1] * 4] * 3
    assert out["num_drafted"] == [3, 2, 1, 0, 0, 0] and out["num_draft"] == [3, 2, 3, 3, 0, 0]
    assert out["out_tokens"] == [tokens[2:] for tokens in out["tokens"]]


def test_several_drafts_behind_earlier_ones(backend: Backend, kernel_device: str) -> None:
    rows = [
        Row(n=2, chosen=[8, 9], drafts=[7], num_draft=4, num_drafted=1),
        Row(n=2, chosen=[8, 9], drafts=[7], num_draft=2, num_drafted=1),
    ]
    out = run(backend, kernel_device, rows, first=False, most=4, length=6, num_chosen=2)
    assert out["out_tokens"] == [[7, 8, 9, -1], [7, 8, -1, -1]] and out["num_drafted"] == [3, 2]


def test_more_tokens_than_places(backend: Backend, kernel_device: str) -> None:
    """The rest of what was chosen goes nowhere: not behind the row, not into the next one."""
    rows = [Row(n=6, chosen=[1, 2, 3, 4], row_limit=8), Row(n=7, chosen=[5, 6, 7, 8], row_limit=8), Row(n=2, chosen=[9, 10, 11, 12])]
    out = run(backend, kernel_device, rows, first=True, most=2, length=8, num_chosen=4)
    assert out["num_drafted"] == [1, 0, 2] and out["tokens"][0][6:] == [1, -1]


@pytest.mark.parametrize("lag", [0, 1])
def test_the_newest_token_may_have_no_position_in_the_cache(backend: Backend, kernel_device: str, lag: int) -> None:
    """With a lag the limit counts a position more: at position x stands the token of x + 1."""
    rows = [Row(n=n, wanted=9) for n in (2, 31, 32, 33, 34, 35)] + [Row(n=5, draft_len=3, live=False)]
    out = run(backend, kernel_device, rows, first=True, most=4, draft_limit=32 + lag, length=48, lag=lag)
    assert out["draft_len"] == [2 - lag, 31 - lag, 32 - lag, *([32] * 3), 3]
    assert out["num_draft"] == [4, 2 + lag, 1 + lag, lag, 0, 0, 0]
    later = [Row(n=5, drafts=[7], num_draft=2, num_drafted=1, draft_len=3)]
    assert run(backend, kernel_device, later, first=False, most=4, lag=lag)["draft_len"] == [3]


@st.composite
def batches(draw: st.DrawFn) -> dict[str, Any]:
    first, most, length = draw(st.booleans()), draw(st.integers(0, 9)), 16
    num_chosen = draw(st.integers(1, 4))

    @st.composite
    def row(draw: st.DrawFn) -> Row:
        live = draw(st.booleans()) or draw(st.booleans())
        n = draw(st.integers(0, length))
        planned = draw(st.integers(0, max(min(most, length - n - 1), 0))) if live or first else 0
        made = draw(st.integers(0, planned))
        token = st.integers(0, 2**31 - 1)
        return Row(
            n=n,
            chosen=draw(st.lists(st.one_of(st.just(-1), token, token), min_size=num_chosen, max_size=num_chosen)),
            drafts=draw(st.lists(token, min_size=made, max_size=made)),
            row_limit=draw(st.integers(0, length)),
            wanted=draw(st.integers(-1, 11)),
            num_draft=planned,
            num_drafted=made,
            draft_len=draw(st.integers(0, n)),
            live=live,
        )

    return {
        "rows": draw(st.lists(row(), min_size=1, max_size=4)),
        "first": first,
        "most": most,
        "draft_limit": draw(st.integers(0, 20)),
        "length": length,
        "lag": draw(st.integers(0, 1)),
        "num_chosen": num_chosen,
    }


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=100)
@given(batch=batches())
def test_ragged_batches(backend: Backend, kernel_device: str, batch: dict[str, Any]) -> None:
    run(backend, kernel_device, **batch)


def test_refusals_write_nothing(backend: Backend, kernel_device: str) -> None:
    def refused(match: str, **changes: Any) -> None:
        launch = Launch(kernel_device, [Row(n=2), Row(n=3)], first=True, most=2)
        before = {name: launch.arguments[name].tolist() for name in ("tokens", *IN_PLACE)}
        launch.arguments.update(changes)
        with pytest.raises(ArgumentError, match=match):
            launch.run(backend)
        for name, value in before.items():
            assert launch.arguments[name].tolist() == value
        assert "out_tokens" in changes or (launch.arguments["out_tokens"] == POISON).all()

    def array(*shape: int) -> torch.Tensor:
        return torch.zeros(shape, dtype=torch.int32, device=kernel_device)

    refused("chosen: expected one token for each of 2 rows", chosen=array(1))
    refused("chosen: expected 3 tokens for each of 2 rows", chosen=array(5), num_chosen=3)
    refused("wanted", wanted=array(3))
    refused("out_tokens", out_tokens=array(3, 2))
    refused("out_tokens", out_tokens=array(4))
    for name in ("num_tokens", "row_limit", "is_live", "num_draft", "num_drafted", "draft_len"):
        launch = Launch(kernel_device, [Row(n=2), Row(n=3)], first=True, most=2)
        before = launch.arguments["tokens"].tolist()
        launch.arguments[name] = array(1)
        with pytest.raises(ArgumentError, match=rf"{name}: expected one entry for each of 2 rows, got shape \(1,\)"):
            launch.run(backend)
        assert launch.arguments["tokens"].tolist() == before
