"""Suffix decoding against its definition."""

from collections.abc import Sequence
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from suffixes import TENTH, limits, proposed, speculate, substrings

from funcspec.errors import ArgumentError
from funcspec.kernels import suffix_lookup
from funcspec.kernels.op import Backend
from funcspec.kernels.suffix_lookup import WALK, suffix_lookup_

from .guarded import POISON, Buffers

READ = ("tokens", "num_tokens", "row_limit", "is_live")
FAR = 10**6


@pytest.fixture(params=["reference", "host", "triton"])
def backend(request: pytest.FixtureRequest, kernel_device: str) -> Backend:
    if request.param == "host" and kernel_device != "cpu":
        pytest.skip("the host form is for CPU tensors")
    return request.param


@pytest.fixture
def small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tiles so small that short rows have many of them, and bins so few that tokens share them."""
    monkeypatch.setattr(suffix_lookup, "TILE", 4)
    monkeypatch.setattr(suffix_lookup, "BINS", 2)


def look_up(
    backend: Backend,
    device: str,
    rows: Sequence[Sequence[int]],
    most: int,
    *,
    budgets: tuple[int, ...] = (1, 2, 3, 4, 5),
    min_probability: Fraction = TENTH,
    corpus: Sequence[Sequence[int]] | None = None,
    shared: bool = False,
    live: Sequence[int] | None = None,
    row_limits: Sequence[int] | None = None,
    length: int | None = None,
    behind: int = 5,
    gap: int = 3,
    expected: Sequence[Sequence[int]] | None = None,
) -> list[list[int]]:
    """Run a batch between guard bands, compare it with the definition; what each row is proposed.

    Args:
        behind: token that fills the rows past their committed length; it may not matter.
        gap: what lies between rows and between lines; without it each goes on in the next.
        expected: what to expect, where the definition would take too long.
    """
    buffers = Buffers(device)
    count, length = len(rows), length or max(map(len, rows), default=1) or 1
    whole = buffers.poisoned(count * (length + gap)).view(count, length + gap)
    buffers.bands.append(whole[:, length:])
    tokens = whole[:, :length]
    tokens.copy_(torch.tensor([[*row, *[behind] * (length - len(row))] for row in rows], dtype=torch.int32))
    live = [1] * count if live is None else live
    row_limits = [FAR] * count if row_limits is None else row_limits
    width = max(map(len, corpus), default=1) if corpus else 0
    lines = None if corpus is None else [[*line, *[-1] * (width - len(line))] for line in corpus]
    arguments: dict[str, Any] = {
        "tokens": tokens,
        "num_tokens": buffers.holding([len(row) for row in rows]),
        "row_limit": buffers.holding(row_limits),
        "is_live": buffers.holding(live),
        "out_proposals": buffers.poisoned(count * most).view(count, most),
        "out_counts": buffers.poisoned(count),
        "scratch": buffers.poisoned(count * 2 * len(budgets) * WALK).view(count, 2, len(budgets), WALK),
    }
    texts = None if lines is None else buffers.table(lines, extra_columns=gap)
    before = {name: arguments[name].clone() for name in READ}
    suffix_lookup_(**arguments, corpus=texts, shared=shared, budgets=budgets, min_probability=min_probability, backend=backend)
    buffers.check()
    assert all(torch.equal(arguments[name], value) for name, value in before.items())
    assert texts is None or texts.tolist() == lines
    if expected is None:
        options: dict[str, Any] = {"budgets": budgets, "min_probability": min_probability, "corpus": corpus or (), "shared": shared}
        room = [min(most, limit - len(row) - 1) if alive else 0 for row, limit, alive in zip(rows, row_limits, live, strict=True)]
        expected = [proposed(rows, row, room[row], **options) for row in range(count)]
    proposals, counts = arguments["out_proposals"].tolist(), arguments["out_counts"].tolist()
    assert counts == [len(row) for row in expected]
    assert proposals == [[*row, *[-1] * (most - len(row))] for row in expected]
    return [list(row) for row in expected]


def test_g3_the_written_example(backend: Backend, kernel_device: str) -> None:
    text, pattern = [1, 2, 3, 1, 2, 4, 1, 2, 3], [1, 2]
    counts = substrings([text], 24)
    assert counts[(1, 2)] == 3 and speculate(counts, pattern, limits(), 4) == (1, [3, 1])
    assert speculate(counts, pattern[1:], limits(), 4) == (Fraction(2, 3), [3])
    assert look_up(backend, kernel_device, [pattern], 4, corpus=[text]) == [[3, 1]]


def test_a_rows_own_end_counts(backend: Backend, kernel_device: str) -> None:
    """1 stands twice, once with 2 behind it: the draft is as likely as not."""
    for least, expected in ((Fraction(1, 2), [2]), (Fraction(500_001, 10**6), [])):
        assert look_up(backend, kernel_device, [[1, 2, 1]], 4, budgets=(1,), min_probability=least) == [expected]
    assert look_up(backend, kernel_device, [[1]], 4, budgets=(1,), min_probability=Fraction(1), corpus=[[1, 2]]) == [[2]]


def test_probabilities_multiply(backend: Backend, kernel_device: str) -> None:
    """After 9: 1 in 4 of 5, then 2 in 3 of 5, then 3 in 1 of 5."""
    corpus = [[9, 1, 2, 3], [9, 1, 2, 4], [9, 1, 2], [9, 1, 5], [9, 6]]
    for least, count in ((Fraction(1), 0), (Fraction(4, 5), 1), (Fraction(3, 5), 2), (Fraction(21, 100), 2), (Fraction(1, 5), 3)):
        options: dict[str, Any] = {"budgets": (9,), "min_probability": least}
        assert look_up(backend, kernel_device, [[9]], 4, corpus=corpus, **options) == [[1, 2, 3][:count]]


def test_a_tenth_is_a_tenth(backend: Backend, kernel_device: str) -> None:
    for count, expected in ((10, [100]), (11, [])):
        corpus = [[9, 100 + number] for number in range(count)]
        assert look_up(backend, kernel_device, [[9]], 2, corpus=corpus, budgets=(1,)) == [expected]


def test_of_equally_frequent_tokens_the_lowest(backend: Backend, kernel_device: str) -> None:
    for corpus in ([[9, 7], [9, 3], [9, 5]], [[9, 5], [9, 7], [9, 3]], [[9, 7, 9, 3], [9, 3, 9, 7], [9, 8]]):
        assert look_up(backend, kernel_device, [[9]], 1, corpus=corpus) == [[3]]
    assert look_up(backend, kernel_device, [[9, 513, 9, 1, 9]], 1, budgets=(1,)) == [[1]]
    assert look_up(backend, kernel_device, [[9, 513, 9, 1, 9, 513, 9]], 1, budgets=(1,)) == [[513]]
    assert look_up(backend, kernel_device, [[9, 1025, 9, 513, 9, 1, 9]], 1, budgets=(1,)) == [[1]]


def test_a_longer_match_wins_a_tie(backend: Backend, kernel_device: str) -> None:
    """Half of what follows 2 is a 5, half of what follows 1 2 an 8."""
    corpus = [[1, 2, 8], [1, 2, 9], [3, 2, 5], [4, 2, 5]]
    assert look_up(backend, kernel_device, [[1, 2]], 1, corpus=corpus, budgets=(1, 1)) == [[8]]
    assert look_up(backend, kernel_device, [[1, 2]], 1, corpus=[*corpus, [3, 2, 5]], budgets=(1, 1)) == [[5]]


def test_the_row_itself_wins_a_tie(backend: Backend, kernel_device: str) -> None:
    assert look_up(backend, kernel_device, [[1, 5, 1]], 1, corpus=[[1, 3], [1, 4]]) == [[5]]
    assert look_up(backend, kernel_device, [[1, 5, 1]], 1, corpus=[[1, 3], [1, 3], [1, 4]]) == [[3]]


def test_a_score_counts_all_its_tokens(backend: Backend, kernel_device: str) -> None:
    """A sure token loses against three that are likely: 1 against 3 * 3/4."""
    corpus = [[1, 2, 3, 4, 5], [1, 2, 3, 4, 5], [1, 2, 3, 4, 5], [6, 2, 3], [7, 6, 2, 9]]
    assert look_up(backend, kernel_device, [[7, 6, 2]], 3, corpus=corpus, budgets=(3, 0, 1)) == [[3, 4, 5]]
    assert look_up(backend, kernel_device, [[7, 6, 2]], 3, corpus=corpus, budgets=(1, 0, 1)) == [[9]]


def test_budgets_are_for_sizes_of_match(backend: Backend, kernel_device: str) -> None:
    text = [*range(1, 10), *range(1, 5)]
    for budgets, count in (((1,), 1), ((0, 2), 2), ((0, 0, 0, 5), 5), ((0, 0, 0, 0, 3), 0), ((0,), 0), (limits(6), 3), (limits(24), 4)):
        assert look_up(backend, kernel_device, [text], 8, budgets=budgets) == [text[4:][:count]]


@pytest.mark.parametrize("gap", [0, 3])
def test_no_match_reaches_over_an_end(backend: Backend, kernel_device: str, gap: int) -> None:
    """Of a row, of a line, or of the padding in a line."""
    rows = [[7, 1, 2], [5, 4, 8], [1, 2, 3], [2]]
    assert look_up(backend, kernel_device, rows, 3, shared=True, gap=gap) == [[3], [], [], [3]]
    assert look_up(backend, kernel_device, [[2], [6]], 3, corpus=[[1, 2], [3, 2], [6, -1]], gap=gap) == [[], []]
    across = [[0, 1], [2, 3], [4, 5]]
    assert look_up(backend, kernel_device, [[1, 2], [2, 3]], 3, corpus=across, budgets=(0, 3), gap=gap) == [[], []]
    assert look_up(backend, kernel_device, [[2], [3]], 3, corpus=across, budgets=(3,), gap=gap) == [[3], []]


def test_rows_look_at_each_other_on_demand(backend: Backend, kernel_device: str) -> None:
    rows = [[1, 2, 3], [1, 2], [9, 1], []]
    assert look_up(backend, kernel_device, rows, 3) == [[], [], [], []]
    assert look_up(backend, kernel_device, rows, 3, shared=True) == [[], [3], [2], []]
    assert look_up(backend, kernel_device, rows, 3, shared=True, live=[0, 1, 1, 0]) == [[], [3], [2], []]
    # A row is not among the others: 3 follows 1 in all of them, though not in all of the text.
    assert look_up(backend, kernel_device, [[1, 5, 1], [1, 3], [1, 3]], 1, shared=True) == [[3], [], []]
    # Other rows and past outputs are one collection: 2 of 3 against 1 of 1 alone.
    assert look_up(backend, kernel_device, [[1, 7], [1]], 1, shared=True, corpus=[[1, 8], [1, 8]]) == [[], [8]]


def test_rows_that_are_not_live_are_proposed_nothing(backend: Backend, kernel_device: str) -> None:
    rows = [[1, 2, 1], [1, 2, 1], [], [3, 4, 3]]
    assert look_up(backend, kernel_device, rows, 3, live=[1, 0, 0, 1]) == [[2], [], [], [4]]


def test_a_row_has_room_for_its_drafts(backend: Backend, kernel_device: str) -> None:
    row = [1, 2, 3, 4, 1, 2, 3]
    for limit, count in ((FAR, 3), (11, 3), (10, 2), (9, 1), (8, 0), (7, 0)):
        assert look_up(backend, kernel_device, [row], 3, row_limits=[limit]) == [[4, 1, 2][:count]]


def test_what_lies_past_the_committed_length_does_not_matter(backend: Backend, kernel_device: str) -> None:
    for behind in (-1, 1, 2, 2**31 - 1):
        assert look_up(backend, kernel_device, [[1, 2, 3, 1], [2]], 8, behind=behind, length=16, shared=True) == [[2], [3]]


def test_short_rows_find_nothing(backend: Backend, kernel_device: str) -> None:
    assert look_up(backend, kernel_device, [[], [5], [5, 6], [5, 5], []], 3) == [[], [], [], [5], []]
    assert look_up(backend, kernel_device, [[], [], []], 3, shared=True, corpus=[[-1]]) == [[], [], []]


@pytest.mark.parametrize("most", range(9))
def test_every_number_of_drafts(backend: Backend, kernel_device: str, most: int) -> None:
    row = [*range(20, 40), 96, 0, *range(22, 28)]
    assert look_up(backend, kernel_device, [row, row[:-1]], most, budgets=(0, 0, 0, 0, 8))[0] == row[8:][:most]


@pytest.mark.parametrize("count", [100, 400])
@pytest.mark.parametrize("is_full", [False, True])
@pytest.mark.parametrize("form", ["reference", "host"])
def test_ties_among_many_go_to_the_lowest_id(form: Backend, count: int, is_full: bool) -> None:
    """Of 5 and 3, each behind half of all 9s, the 3 and nothing behind it; also where texts fill their lines."""
    corpus = [[9, (5, 3)[number % 2]] for number in range(count)]
    lines = corpus if is_full else [[*line, -1] for line in corpus]
    assert look_up(form, "cpu", [[8, 9]], 2, corpus=lines, budgets=(2,)) == [[3]]
    assert look_up(form, "cpu", [[8, 9]], 2, corpus=[[9, 3], *lines, [9, 5]], budgets=(2,)) == [[3]]
    assert look_up(form, "cpu", [[8, 9]], 2, corpus=[[9, 5], *lines], budgets=(2,)) == [[5]]


def test_a_frequent_token_among_many(backend: Backend, kernel_device: str) -> None:
    """Two hundred tokens come once after 9, one comes twice; what shares a bin with it or with another does not."""
    others = np.random.default_rng(0).permutation(np.arange(10, 1010, 5)).tolist()
    row = [value for token in [*others[:80], 700, *others[80:]] for value in (9, token)] + [9]
    assert look_up(backend, kernel_device, [row], 1, budgets=(1,), min_probability=Fraction(0), expected=[[700]]) == [[700]]
    assert look_up(backend, kernel_device, [row], 1, budgets=(1,), expected=[[]]) == [[]]
    alike = [value for token in others for value in (9, token)] + [9]
    assert look_up(backend, kernel_device, [alike], 1, budgets=(1,), min_probability=Fraction(0), expected=[[10]]) == [[10]]


@pytest.mark.parametrize("length", [32, 33, 128, 257, 1025, 4096, 5000])
def test_g2_around_the_sizes_of_tiles(backend: Backend, kernel_device: str, length: int) -> None:
    """A match in front of, across and behind each border, and as far away as can be."""
    rows = []
    for place in {0, 1, length // 2, length - 9, *(border + shift for border in (32, 256, 2048, 4096) for shift in (-2, -1))}:
        if place <= length - 9:
            row = [*range(1000, 1000 + length)]
            row[place : place + 3] = row[-3:] = [1, 2, 3]
            rows.append((row, row[place + 3 :][:2]))
    texts, expected = [row for row, _ in rows], [drafts for _, drafts in rows]
    look_up(backend, kernel_device, texts, 2, budgets=(0, 0, 2), expected=expected)
    look_up(backend, kernel_device, [[1, 2, 3]], 2, budgets=(0, 0, 2), corpus=texts[:1], length=length, expected=expected[:1])


def test_addresses_are_64_bit_wide(backend: Backend, kernel_device: str) -> None:
    """The third row begins 2^31 tokens behind the first; nearly all of it is virtual memory that is never touched."""
    stride = 2**30
    try:
        whole = torch.empty(2 * stride + 8, dtype=torch.int32, device=kernel_device)
    except RuntimeError:
        pytest.skip("too little address space")
    tokens = whole.as_strided((3, 8), (stride, 1))
    tokens.copy_(torch.tensor([[1, 2, 3, 1, 0, 0, 0, 0], [5] * 8, [7, 8, 9, 6, 7, 8, 0, 0]]))
    by_row = [torch.tensor(values, dtype=torch.int32, device=kernel_device) for values in ([4, 0, 6], [99] * 3, [1, 1, 1], [POISON] * 3)]
    proposals, scratch = (torch.full(shape, POISON, dtype=torch.int32, device=kernel_device) for shape in ((3, 2), (3, 2, 2, WALK)))
    names = ("num_tokens", "row_limit", "is_live", "out_counts")
    arguments = {"tokens": tokens, **dict(zip(names, by_row, strict=True)), "out_proposals": proposals, "scratch": scratch}
    settings_ = {"budgets": (1, 2), "min_probability": TENTH, "shared": False}
    suffix_lookup_(**arguments, **settings_, corpus=None, backend=backend)
    assert proposals.tolist() == [[2, -1], [-1, -1], [9, 6]] and by_row[3].tolist() == [1, 0, 2]


@st.composite
def batches(draw: st.DrawFn) -> dict[str, Any]:
    token = st.integers(0, draw(st.sampled_from([0, 1, 2, 5])))
    rows = draw(st.lists(st.lists(token, max_size=20), min_size=1, max_size=3))
    lines = st.lists(st.lists(st.one_of(token, token, st.just(-1)), min_size=1, max_size=8), min_size=1, max_size=3)
    depth = draw(st.integers(2, 7))
    steps = draw(st.tuples(st.fractions(0, 3, max_denominator=4), st.fractions(-2, 3, max_denominator=4)))
    bound = st.integers(0, 26)
    return {
        "rows": rows,
        "most": draw(st.integers(0, 6)),
        "budgets": limits(depth, *steps),
        "min_probability": draw(st.one_of(st.sampled_from([TENTH, Fraction(0), Fraction(1)]), st.fractions(0, 1, max_denominator=12))),
        "corpus": draw(st.one_of(st.none(), lines)),
        "shared": draw(st.booleans()),
        "live": draw(st.lists(st.integers(0, 1), min_size=len(rows), max_size=len(rows))) if draw(st.booleans()) else None,
        "row_limits": draw(st.lists(bound, min_size=len(rows), max_size=len(rows))) if draw(st.booleans()) else None,
        "length": draw(st.integers(20, 26)),
        "behind": draw(st.one_of(st.just(-1), token)),
        "gap": draw(st.integers(0, 2)),
    }


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=25)
@given(batch=batches())
def test_ragged_batches(backend: Backend, kernel_device: str, small_tiles: None, batch: dict[str, Any]) -> None:
    look_up(backend, kernel_device, **batch)


@settings(max_examples=150)
@given(batch=batches())
def test_more_ragged_batches(kernel_device: str, batch: dict[str, Any]) -> None:
    """Where a launch is cheap: compiled, or without Triton."""
    backends: tuple[Backend, ...] = ("triton",) if kernel_device == "cuda" else ("reference", "host")
    for backend in backends:
        look_up(backend, kernel_device, **batch)


def test_refusals_write_nothing(backend: Backend, kernel_device: str) -> None:
    def array(*shape: int) -> torch.Tensor:
        return torch.full(shape, 1, dtype=torch.int32, device=kernel_device)

    def refused(match: str, **changes: Any) -> None:
        outputs = {"out_proposals": array(2, 3), "out_counts": array(2), "scratch": array(2, 2, 2, WALK)}
        for buffer in outputs.values():
            buffer.fill_(POISON)
        by_row = {name: array(2) for name in ("num_tokens", "row_limit", "is_live")}
        fixed: dict[str, Any] = {"budgets": (1, 2), "min_probability": TENTH, "shared": False, "corpus": None}
        arguments = {"tokens": array(2, 9)} | by_row | fixed | outputs | changes
        with pytest.raises(ArgumentError, match=match):
            suffix_lookup_(**arguments, backend=backend)
        assert all((buffer == POISON).all() for buffer in outputs.values())

    refused(r"num_tokens: expected one entry for each of 2 rows, got shape \(3,\)", num_tokens=array(3))
    refused("row_limit", row_limit=array(1))
    refused("is_live", is_live=array(1))
    refused("out_counts", out_counts=array(3))
    refused(r"out_proposals: expected \[2, K\]", out_proposals=array(3, 3))
    refused("out_proposals", out_proposals=array(6))
    refused(r"scratch: expected \(2, 2, 2, 4\)", scratch=array(2, 2, 3, WALK))
    refused("corpus: expected None or", corpus=array(5))
    refused("corpus", corpus=array(0, 5))
    refused("budgets: expected a number of drafts for each size of match", budgets=())
    refused("budgets", budgets=(1, -1))
    refused("min_probability: expected a fraction from 0 to 1", min_probability=Fraction(3, 2))
    refused("min_probability", min_probability=Fraction(1, 10**6 + 1))
    endless = array(2**15).expand(2**15, -1)
    refused(r"corpus: expected fewer than 2\^31 places times drafts", corpus=endless)
