"""`paged_attention_` against float64 softmax per query, and against itself in other company."""

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from funcspec.errors import ArgumentError, ArgumentTypeError
from funcspec.kernels.paged_attention import KEY_TILE, paged_attention_

GUARD = 64
POISON = -7.5
RUNS = settings(suppress_health_check=[HealthCheck.function_scoped_fixture])


@dataclass
class Case:
    """A batch in plain Python: per row its cached length with this pass, query positions and blocks."""

    seq_lens: list[int]
    queries: list[list[int]]  # positions, one list per row
    tables: list[list[int]]
    num_blocks: int
    block_size: int = 4
    heads: int = 3
    kv_heads: int = 1
    head_dim: int = 8
    dtype: torch.dtype = torch.float32
    index_dtype: torch.dtype = torch.int32
    seed: int = 0
    window: int | None = None
    softcap: float | None = None
    sinks: bool = False

    def tensors(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Query [T, heads, head_dim], key and value cache."""
        generator = torch.Generator().manual_seed(self.seed)
        count = sum(len(positions) for positions in self.queries)
        cache = (self.num_blocks, self.block_size, self.kv_heads, self.head_dim)
        key, value = (torch.randn(cache, generator=generator).to(self.dtype) for _ in range(2))
        query = torch.randn(count, self.heads, self.head_dim, generator=generator).to(self.dtype)
        return query, key, value

    def variants(self) -> dict[str, Any]:
        """The optional arguments that the case uses."""
        sinks = torch.randn(self.heads, generator=torch.Generator().manual_seed(self.seed + 1)).mul(3).to(self.dtype)
        found = {"sliding_window": self.window, "softcap": self.softcap, "sinks": sinks if self.sinks else None}
        return {name: value for name, value in found.items() if value is not None}


def run(
    case: Case, backend: Any, device: str, tensors: Any = None, columns: int = 0, max_query_len: int = 0, spare: int = 0
) -> torch.Tensor:
    """One call with a poisoned, guarded output; `spare` tokens at the end belong to no row and must stay as they are."""
    query, key, value = (tensor.to(device) for tensor in (tensors or case.tensors()))
    width = max([columns, *(len(table) for table in case.tables)])
    tables = [table + [-1] * (width - len(table)) for table in case.tables]
    bounds = np.cumsum([0] + [len(positions) for positions in case.queries]).tolist()
    query = torch.cat([query, torch.full((spare, *query.shape[1:]), float("nan"), dtype=query.dtype, device=device)])
    whole = torch.full((query.numel() + 2 * GUARD,), POISON, dtype=query.dtype, device=device)
    out = whole[GUARD:-GUARD].view(query.shape)

    def ints(values: Any) -> torch.Tensor:
        return torch.tensor(values, dtype=case.index_dtype, device=device)

    paged_attention_(
        backend=backend,
        out=out,
        query=query,
        key_cache=key,
        value_cache=value,
        block_tables=ints(tables).reshape(len(tables), width),
        seq_lens=ints(case.seq_lens),
        query_start_loc=ints(bounds),
        positions=ints([p for positions in case.queries for p in positions] + [0] * spare),
        scale=case.head_dim**-0.5,
        max_query_len=max_query_len or max([0, *(len(positions) for positions in case.queries)]),
        **{name: item.to(device) if isinstance(item, torch.Tensor) else item for name, item in case.variants().items()},
    )
    assert (whole[:GUARD] == POISON).all() and (whole[-GUARD:] == POISON).all()
    assert (out[bounds[-1] :] == POISON).all()
    return out[: bounds[-1]].cpu()


def oracle(case: Case, tensors: Any = None) -> np.ndarray:
    """Attention in float64, one query head at a time."""
    query, key, value = (tensor.double().numpy() for tensor in (tensors or case.tensors()))
    out, token = np.zeros(query.shape), 0
    sinks = case.variants()["sinks"].double().numpy() if case.sinks else np.full(case.heads, -np.inf)
    for length, positions, table in zip(case.seq_lens, case.queries, case.tables, strict=True):
        for position in positions:
            oldest = 0 if case.window is None else max(position - case.window + 1, 0)
            places = range(oldest, min(position + 1, length))
            places = [p for p in places if p // case.block_size < len(table) and table[p // case.block_size] >= 0]
            for head in range(case.heads):
                shared = head // (case.heads // case.kv_heads)
                keys = np.array([key[table[p // case.block_size], p % case.block_size, shared] for p in places])
                values = np.array([value[table[p // case.block_size], p % case.block_size, shared] for p in places])
                if places:
                    scores = keys @ query[token, head] * case.head_dim**-0.5
                    if case.softcap is not None:
                        scores = case.softcap * np.tanh(scores / case.softcap)
                    best = max(scores.max(), sinks[head])
                    weights = np.exp(scores - best)
                    out[token, head] = weights @ values / (weights.sum() + np.exp(sinks[head] - best))
            token += 1
    return out


@st.composite
def cases(draw: st.DrawFn) -> Case:
    block_size = draw(st.sampled_from([1, 3, 4, 16]))
    kv_heads = draw(st.integers(1, 2))
    lengths = draw(st.lists(st.integers(0, 12), min_size=1, max_size=3))
    queries = []
    for length in lengths:
        count = draw(st.integers(0, min(length, 6))) if length else draw(st.integers(0, 1))
        queries.append([max(length - count + i, 0) for i in range(count)])
        if count and draw(st.booleans()):
            queries[-1][-1] = draw(st.sampled_from([0, -1]))  # a place without a token
    blocks = draw(st.permutations(range(40)))
    tables, taken = [], 0
    for length in lengths:
        needed = -(-length // block_size)
        tables.append(list(blocks[taken : taken + needed]))
        taken += needed
        if needed and draw(st.integers(0, 4)) == 0:
            tables[-1][draw(st.integers(0, needed - 1))] = -1
    return Case(
        lengths,
        queries,
        tables,
        40,
        block_size,
        kv_heads * draw(st.sampled_from([1, 3])),
        kv_heads,
        draw(st.sampled_from([4, 20, 32])),
        draw(st.sampled_from([torch.float32, torch.bfloat16, torch.float16])),
        draw(st.sampled_from([torch.int32, torch.int64])),
        window=draw(st.sampled_from([None, None, 1, 2, 5, 2**31 - 1])),
        softcap=draw(st.sampled_from([None, None, 0.5, 30])),
        sinks=draw(st.sampled_from([False, False, True])),
    )


@RUNS
@given(case=cases(), spare=st.integers(0, 1))
def test_equals_dense_attention(backend: Any, kernel_device: str, case: Case, spare: int) -> None:
    got = run(case, backend, kernel_device, spare=spare).double().numpy()
    tolerance = {torch.float32: 2e-6, torch.bfloat16: 2e-2, torch.float16: 2e-3}[case.dtype]
    np.testing.assert_allclose(got, oracle(case), atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize(("head_dim", "heads", "kv_heads"), [(64, 9, 3), (80, 2, 1), (256, 2, 2), (512, 2, 1)])
def test_many_tiles(backend: Any, kernel_device: str, head_dim: int, heads: int, kv_heads: int) -> None:
    length = 2 * KEY_TILE + 40 if backend == "reference" else 100
    needed = -(-length // 16)
    table = np.random.default_rng(0).permutation(needed + 3)[:needed].tolist()
    case = Case([length], [[length - 70, 5, length - 1]], [table], needed + 3, 16, heads, kv_heads, head_dim)
    np.testing.assert_allclose(run(case, backend, kernel_device).numpy(), oracle(case), atol=3e-6, rtol=3e-6)


@pytest.mark.parametrize(("window", "softcap", "sinks"), [(40, None, False), (KEY_TILE, 2.0, True), (3, 50.0, False), (None, None, True)])
def test_many_tiles_with_windows_caps_and_sinks(
    backend: Any, kernel_device: str, window: int | None, softcap: float | None, sinks: bool
) -> None:
    length = 2 * KEY_TILE + 40 if backend == "reference" else 150
    needed = -(-length // 16)
    table = np.random.default_rng(0).permutation(needed + 3)[:needed].tolist()
    queries = [[5, length - 70, length - 2, length - 1], [length - 1]]
    case = Case([length] * 2, queries, [table] * 2, needed + 3, 16, 4, 2, 64, window=window, softcap=softcap, sinks=sinks)
    np.testing.assert_allclose(run(case, backend, kernel_device).numpy(), oracle(case), atol=3e-6, rtol=3e-6)


def test_variants_that_change_nothing_are_the_plain_function(backend: Any, kernel_device: str) -> None:
    """A window that hides nothing is the same to the bit, a cap far above all scores nearly so; a window of one is the value itself."""
    plain = Case([70], [[3, 68, 69]], [list(range(18))], 18)
    expected = run(plain, backend, kernel_device)
    assert torch.equal(run(replace(plain, window=70), backend, kernel_device), expected)
    torch.testing.assert_close(run(replace(plain, softcap=1e5), backend, kernel_device), expected, atol=1e-6, rtol=0)
    value = plain.tensors()[2].flatten(0, 1)[:, 0]
    got = run(replace(plain, window=1), backend, kernel_device)
    torch.testing.assert_close(got, value[[3, 68, 69], None].expand(-1, 3, -1), atol=1e-6, rtol=0)


@pytest.fixture
def exact_backend(backend: Any, kernel_device: str) -> Any:
    """Independence to the bit is promised of what runs: the kernel on GPUs, the reference on CPUs."""
    if (backend == "reference") == (kernel_device == "cuda"):
        pytest.skip("not what runs on this device; the interpreter's products are NumPy's, which differ from shape to shape")
    return backend


def long_case(backend: Any) -> Case:
    """One row whose last keys lie in a second tile."""
    length = KEY_TILE + 9 if backend == "reference" else 80
    return Case([length], [[length - 4, length - 3, length - 2, length - 1]], [list(range(-(-length // 4)))], 130, head_dim=16)


VARIANTS = [{}, {"window": 7}, {"window": 30, "softcap": 5.0}, {"sinks": True}]


@pytest.mark.parametrize("variant", VARIANTS)
def test_alone_or_in_company_is_the_same_to_the_bit(exact_backend: Any, kernel_device: str, variant: dict[str, Any]) -> None:
    case = replace(long_case(exact_backend), **variant)
    query, key, value = case.tensors()
    alone = run(case, exact_backend, kernel_device, (query, key, value))
    others = [[0, 1, 2, 3, 4], case.queries[0], [2]]
    company = Case([5, case.seq_lens[0], 0], others, [[120, 100], case.tables[0], []], 130, head_dim=16, **variant)
    mixed = torch.cat([torch.randn(5, 3, 16), query, torch.randn(1, 3, 16)])
    together = run(company, exact_backend, kernel_device, (mixed, key, value), columns=95, max_query_len=17)
    assert torch.equal(together[5:9], alone)
    assert (together[9] == 0).all()


@pytest.mark.parametrize("more", [1, 3, 40, 300])
def test_hidden_keys_change_no_bit(exact_backend: Any, kernel_device: str, more: int) -> None:
    case = long_case(exact_backend)
    tensors = case.tensors()
    longer = long_case(exact_backend)
    longer.seq_lens = [case.seq_lens[0] + more]
    longer.tables = [list(range(-(-longer.seq_lens[0] // 4)))]
    longer.num_blocks = 160
    grown = [torch.cat([tensor, torch.randn(30, *tensor.shape[1:])]) for tensor in tensors[1:]]
    queries = torch.cat([tensors[0], torch.randn(1, 3, 16)])
    longer.queries = [[*case.queries[0], longer.seq_lens[0] - 1]]
    assert torch.equal(run(longer, exact_backend, kernel_device, (queries, *grown))[:4], run(case, exact_backend, kernel_device, tensors))


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize(("heads", "kv_heads"), [(9, 3), (4, 4), (5, 1)])
def test_a_query_does_not_depend_on_the_number_of_queries(
    exact_backend: Any, kernel_device: str, heads: int, kv_heads: int, variant: dict[str, Any]
) -> None:
    positions = [40, 41, 42, 43, 44, 45, 46, 47] if exact_backend == "reference" else [20, 21, 22, 23, 24, 25]
    case = Case([48], [positions], [list(range(12))], 12, 4, heads, kv_heads, 16, **variant)
    query, key, value = case.tensors()
    whole = run(case, exact_backend, kernel_device, (query, key, value))
    for first, stop in ((0, 1), (1, 4), (2, 6), (3, len(positions))):
        part = Case([48], [positions[first:stop]], case.tables, 12, 4, heads, kv_heads, 16, **variant)
        assert torch.equal(run(part, exact_backend, kernel_device, (query[first:stop], key, value)), whole[first:stop])


def test_where_blocks_lie_changes_no_bit(kernel_device: str) -> None:
    case = long_case("reference")
    query, key, value = case.tensors()
    order = torch.randperm(130, generator=torch.Generator().manual_seed(3))
    moved = long_case("reference")
    moved.tables = [[int((order == block).nonzero()) for block in case.tables[0]]]
    got = run(moved, "reference", kernel_device, (query, key[order], value[order]))
    assert torch.equal(got, run(case, "reference", kernel_device, (query, key, value)))


def test_garbage_behind_the_keys_is_not_read(backend: Any, kernel_device: str) -> None:
    case = Case([5, 0], [[3, 4], [0]], [[2, 1], [0]], 5)
    query, key, value = case.tensors()
    clean = run(case, backend, kernel_device, (query, key, value))
    key[[0, 3, 4]], value[[0, 3, 4]] = float("nan"), float("nan")
    key[1, 1:], value[1, 1:] = float("nan"), float("inf")
    assert torch.equal(run(case, backend, kernel_device, (query, key, value)), clean)
    assert (clean[2] == 0).all()


def test_a_windowed_query_in_an_earlier_tile_changes_no_bit_of_a_later_one(exact_backend: Any, kernel_device: str) -> None:
    """Company decides at which tile the walk begins: an early query makes it walk tiles that the later one does not see."""
    length = 2 * KEY_TILE + 9 if exact_backend == "reference" else 200
    early = Case([length], [[4, length - 1]], [list(range(-(-length // 4)))], 140, window=6, head_dim=16)
    query, key, value = early.tensors()
    late = replace(early, queries=[[length - 1]])
    together = run(early, exact_backend, kernel_device, (query, key, value))
    assert torch.equal(together[1:], run(late, exact_backend, kernel_device, (query[1:], key, value)))


def test_a_window_past_the_last_key_sees_nothing(backend: Any, kernel_device: str) -> None:
    for position in (20, 3 * KEY_TILE):
        case = Case([5], [[position]], [[0, 1]], 2, window=4, sinks=True)
        assert (run(case, backend, kernel_device) == 0).all()


def test_sinks_are_only_read(backend: Any, kernel_device: str) -> None:
    case = Case([6], [[5]], [[1, 0]], 2, sinks=True)
    sinks = torch.tensor([1.0, -2.0, 30.0], device=kernel_device)
    before = sinks.clone()
    query, key, value = (tensor.to(kernel_device) for tensor in case.tensors())
    tables, length, bounds, place = (torch.tensor(numbers, device=kernel_device) for numbers in ([[1, 0]], [6], [0, 1], [5]))
    for _ in range(2):
        paged_attention_(
            backend=backend,
            out=torch.empty_like(query),
            query=query,
            key_cache=key,
            value_cache=value,
            block_tables=tables,
            seq_lens=length,
            query_start_loc=bounds,
            positions=place,
            scale=1.0,
            max_query_len=1,
            sinks=sinks,
        )
    assert torch.equal(sinks, before)


@pytest.mark.parametrize("strided", [False, True])
def test_query_may_be_a_slice(backend: Any, kernel_device: str, strided: bool) -> None:
    case = Case([6], [[4, 5]], [[1, 0]], 2)
    query, key, value = case.tensors()
    wide = torch.cat([query, torch.full_like(query, float("nan"))], 1)[:, :3] if strided else query
    assert torch.equal(run(case, backend, kernel_device, (wide, key, value)), run(case, backend, kernel_device, (query, key, value)))


@pytest.mark.parametrize(
    ("name", "value", "error"),
    [
        ("query", torch.zeros(2, 3, 7), ArgumentError),
        ("out", torch.zeros(1, 3, 8), ArgumentError),
        ("positions", torch.zeros(3, dtype=torch.int32), ArgumentError),
        ("positions", torch.zeros(2), ArgumentTypeError),
        ("query_start_loc", torch.zeros(3, dtype=torch.int32), ArgumentError),
        ("value_cache", torch.zeros(2, 4, 2, 8), ArgumentError),
        ("max_query_len", -1, ArgumentError),
        ("sliding_window", 0, ArgumentError),
        ("sliding_window", 2**31, ArgumentError),
        ("sliding_window", 4.0, ArgumentTypeError),
        ("sliding_window", True, ArgumentTypeError),
        ("softcap", 0.0, ArgumentError),
        ("softcap", float("inf"), ArgumentError),
        ("softcap", float("nan"), ArgumentError),
        ("softcap", "30", ArgumentTypeError),
        ("sinks", torch.zeros(2), ArgumentError),
        ("sinks", torch.zeros(6)[::2], ArgumentError),
    ],
)
def test_refuses_what_does_not_fit(backend: Any, kernel_device: str, name: str, value: Any, error: type[Exception]) -> None:
    arguments = {
        "out": torch.full((2, 3, 8), POISON),
        "query": torch.zeros(2, 3, 8),
        "key_cache": torch.zeros(2, 4, 1, 8),
        "value_cache": torch.zeros(2, 4, 1, 8),
        "block_tables": torch.zeros(1, 1, dtype=torch.int32),
        "seq_lens": torch.ones(1, dtype=torch.int32),
        "query_start_loc": torch.tensor([0, 2], dtype=torch.int32),
        "positions": torch.zeros(2, dtype=torch.int32),
    } | {name: value}
    moved = {key: item.to(kernel_device) if isinstance(item, torch.Tensor) else item for key, item in arguments.items()}
    if isinstance(value, torch.Tensor) and not value.is_contiguous():
        moved[name] = torch.zeros(6, device=kernel_device)[::2]  # moving it would have made it contiguous
    with pytest.raises(error):
        paged_attention_(backend=backend, **({"scale": 1.0, "max_query_len": 2} | moved))
    if name != "out":
        assert (moved["out"] == POISON).all()
