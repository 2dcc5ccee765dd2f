"""`choose_tokens_` against `funcspec.noise.choose`, row by row and bit for bit."""

import math
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from funcspec import noise
from funcspec.errors import ArgumentError, ArgumentTypeError
from funcspec.kernels import choose_tokens as module
from funcspec.kernels.choose_tokens import choose_tokens_, choose_tokens_partials

GUARD = 16
POISON = -77


@dataclass
class Batch:
    """What one call needs, in plain Python and NumPy."""

    logits: torch.Tensor  # [T, V]
    token_rows: list[int]
    positions: list[int]
    temperature: list[float]
    seeds: list[int]
    stream: int = noise.TARGET
    logits_indices: list[int] | None = None
    nonce_length: list[int] | None = None
    token_ids: np.ndarray | None = None
    index_dtype: torch.dtype = field(default=torch.int32)
    position_offset: int = 0


def guarded(shape: tuple[int, ...], dtype: torch.dtype, device: str) -> tuple[torch.Tensor, torch.Tensor]:
    """A poisoned buffer of `shape` between two guard bands, and the whole allocation."""
    whole = torch.full((math.prod(shape) + 2 * GUARD,), POISON, dtype=dtype, device=device)
    return whole[GUARD:-GUARD].view(shape), whole


def run(batch: Batch, backend: Any, device: str) -> list[tuple[int, int]]:
    """One call with poisoned, guarded outputs; the (token, bad) of every row of logits."""

    def array(values: Any, dtype: torch.dtype) -> torch.Tensor:
        return torch.tensor(values, dtype=dtype, device=device)

    count, vocab_size = batch.logits.shape
    parts = choose_tokens_partials(vocab_size)
    out_tokens, tokens_guard = guarded((count,), torch.int32, device)
    out_bad, bad_guard = guarded((count,), torch.int32, device)
    scratch = [guarded((count, parts), dtype, device) for dtype in (torch.float32, torch.int32, torch.int32)]
    choose_tokens_(
        backend=backend,
        logits=batch.logits.to(device) if device != "cpu" else batch.logits,
        logits_indices=None if batch.logits_indices is None else array(batch.logits_indices, batch.index_dtype),
        token_rows=array(batch.token_rows, torch.int32),
        positions=array(batch.positions, batch.index_dtype),
        temperature=array(batch.temperature, torch.float32),
        seed=array([noise.split_seed(seed) for seed in batch.seeds], torch.int32),
        stream=batch.stream,
        nonce_length=None if batch.nonce_length is None else array(batch.nonce_length, torch.int32),
        token_ids=None if batch.token_ids is None else array(batch.token_ids, torch.int32),
        position_offset=batch.position_offset,
        out_tokens=out_tokens,
        out_bad=out_bad,
        scratch_scores=scratch[0][0],
        scratch_tokens=scratch[1][0],
        scratch_bad=scratch[2][0],
    )
    for whole in (tokens_guard, bad_guard, *(pair[1] for pair in scratch)):
        assert (whole[:GUARD] == POISON).all()
        assert (whole[-GUARD:] == POISON).all()
    return list(zip(out_tokens.tolist(), out_bad.tolist(), strict=True))


def expect(batch: Batch) -> list[tuple[int, int]]:
    """The same by the specification, which prunes nothing."""
    answers = []
    for t in range(batch.logits.shape[0]):
        flat = t if batch.logits_indices is None else batch.logits_indices[t]
        row = batch.token_rows[flat] if flat >= 0 else -1
        if row < 0:
            answers.append((-1, 0))
            continue
        nonce = 0 if batch.nonce_length is None else batch.nonce_length[row] - 1
        token, bad = noise.choose(
            batch.logits[t].float().numpy(),
            batch.temperature[row],
            batch.seeds[row],
            batch.positions[flat] + batch.position_offset,
            nonce,
            batch.stream,
            batch.token_ids,
        )
        answers.append((token, int(bad)))
    return answers


def simple(logits: torch.Tensor, temperature: float | list[float] = 1.0, **changes: Any) -> Batch:
    """Every row of logits is its own request, at position 5 + t with seed 100 + t."""
    count = logits.shape[0]
    values: dict[str, Any] = {
        "token_rows": list(range(count)),
        "positions": [5 + t for t in range(count)],
        "temperature": temperature if isinstance(temperature, list) else [temperature] * count,
        "seeds": [100 + t for t in range(count)],
    }
    return Batch(logits, **(values | changes))


def normal(count: int, vocab_size: int, scale: float = 3.0, seed: int = 0) -> torch.Tensor:
    return torch.randn(count, vocab_size, generator=torch.Generator().manual_seed(seed)) * scale


# ---------------------------------------------------------------- both backends against the specification


@pytest.mark.parametrize("vocab_size", [1, 2, 97, 1024, 1025, 2050])
@pytest.mark.parametrize("temperature", [0.0, 0.01, 0.7, 2.0])
def test_every_vocabulary_and_temperature(backend: str, kernel_device: str, vocab_size: int, temperature: float) -> None:
    batch = simple(normal(2, vocab_size, seed=vocab_size), temperature)
    assert run(batch, backend, kernel_device) == expect(batch)


@st.composite
def batches(draw: st.DrawFn) -> Batch:
    """Ragged batches: padding, shared rows, mixed temperatures, ties, NaN, infinities, reduced vocabularies."""
    vocab_size = draw(st.sampled_from([1, 2, 3, 33, 257, 1030]))
    flat_count, rows = draw(st.integers(1, 4)), draw(st.integers(1, 3))
    count = draw(st.integers(1, 3))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    values = rng.normal(size=(count, vocab_size)) * draw(st.sampled_from([0.0, 1.0, 30.0]))
    if draw(st.booleans()):
        values = np.round(values)
    for value in (math.nan, math.inf, -math.inf):
        values[rng.random(values.shape) < draw(st.sampled_from([0.0, 0.0, 0.3, 1.0]))] = value
    dtype = draw(st.sampled_from([torch.float32, torch.bfloat16, torch.float16]))
    wide = torch.full((count, vocab_size + draw(st.integers(0, 3))), math.inf, dtype=dtype)
    wide[:, :vocab_size] = torch.from_numpy(values).to(dtype)
    stream = draw(st.sampled_from(noise.STREAMS))
    indexed = draw(st.booleans())
    integers = draw(st.sampled_from([torch.int32, torch.int64]))
    flat_count = flat_count if indexed else max(flat_count, count)
    return Batch(
        wide[:, :vocab_size],
        draw(st.lists(st.integers(-1, rows - 1), min_size=flat_count, max_size=flat_count)),
        draw(st.lists(st.integers(3, 2**30 - 1), min_size=flat_count, max_size=flat_count)),
        draw(st.lists(st.sampled_from([0.0, 0.01, 0.7, 1.0, 2.0]), min_size=rows, max_size=rows)),
        draw(st.lists(st.integers(-(2**63), 2**64 - 1), min_size=rows, max_size=rows)),
        stream,
        draw(st.lists(st.integers(-1, flat_count - 1), min_size=count, max_size=count)) if indexed else None,
        draw(st.lists(st.integers(1, 4096), min_size=rows, max_size=rows)) if stream != noise.TARGET and draw(st.booleans()) else None,
        rng.permutation(4000)[:vocab_size].astype(np.int32) if draw(st.booleans()) else None,
        integers,
        draw(st.sampled_from([0, 0, 1, -1, -3, 7])),
    )


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(batch=batches())
def test_ragged_batches(backend: str, kernel_device: str, batch: Batch) -> None:
    assert run(batch, backend, kernel_device) == expect(batch)


@pytest.mark.parametrize("offset", [-4, -1, 1, 9])
def test_an_offset_is_that_of_the_positions(backend: str, kernel_device: str, offset: int) -> None:
    """Drafts whose positions lag behind draw with the noise of the positions they mean."""
    logits = normal(3, 97, scale=0.5, seed=7)
    for integers in (torch.int32, torch.int64):
        shared: dict[str, Any] = {"index_dtype": integers, "stream": noise.DRAFT, "nonce_length": [4, 9, 1], "logits_indices": [2, 0, 1]}
        moved = simple(logits, positions=[5 + offset, 90 + offset, 7 + offset], **shared)
        lagging = simple(logits, positions=[5, 90, 7], position_offset=offset, **shared)
        answers = run(lagging, backend, kernel_device)
        assert answers == run(moved, backend, kernel_device) == expect(lagging)
        assert answers != run(simple(logits, positions=[5, 90, 7], **shared), backend, kernel_device)


def test_bad_rows_are_flagged_and_leave_neighbours_alone(backend: str, kernel_device: str) -> None:
    logits = normal(6, 97)
    clean = expect(simple(logits, 0.7))
    logits[1] = math.nan
    logits[2, 40] = math.nan
    logits[3, 41] = math.inf
    logits[4] = -math.inf
    for temperature in (0.0, 0.7):
        batch = simple(logits, temperature)
        answers = run(batch, backend, kernel_device)
        assert answers == expect(batch)
        assert [bad for _, bad in answers] == [0, 1, 1, 1, 1, 0]
        assert answers[1] == answers[4] == (0, 1)
        assert all(0 <= token < 97 for token, _ in answers)
        assert answers[2][0] != 40
        assert answers[3][0] != 41
    assert answers[0] == clean[0]
    assert answers[5] == clean[5]


def test_ties_go_to_the_lowest_target_id_across_tiles_and_parts(backend: str, kernel_device: str) -> None:
    logits = torch.zeros(2, 5000)
    logits[0, [4999, 4096, 1023, 700]] = 2.0
    logits[1, [4999, 4097]] = 2.0
    assert run(simple(logits, 0.0), backend, kernel_device) == [(700, 0), (4097, 0)]
    backwards = np.arange(5000, 0, -1, dtype=np.int32)
    batch = simple(logits, 0.0, token_ids=backwards)
    assert run(batch, backend, kernel_device) == expect(batch) == [(1, 0), (1, 0)]
    nothing = simple(torch.full((1, 2500), -math.inf), 0.7, token_ids=backwards[:2500])
    assert run(nothing, backend, kernel_device) == [(2501, 1)]
    # Scores near 2^26 are 8 apart, so noise only makes ties there, and every tile holds one.
    huge = simple(torch.full((1, 2500), 2.0**26), 1.0, token_ids=backwards[:2500])
    assert run(huge, backend, kernel_device) == expect(huge)


def test_noise_never_rescues_a_masked_token(backend: str, kernel_device: str) -> None:
    """H5 with a logit that is just above -inf."""
    logits = torch.full((4, 97), -math.inf)
    logits[:, 50] = -1e30
    assert run(simple(logits, 2.0), backend, kernel_device) == [(50, 0)] * 4


def test_padding_reads_and_writes_nothing_else(backend: str, kernel_device: str) -> None:
    batch = simple(torch.full((3, 33), math.nan), token_rows=[-1, -1, -1])
    assert run(batch, backend, kernel_device) == [(-1, 0)] * 3
    batch = simple(torch.full((2, 33), math.nan), logits_indices=[-1, -1])
    assert run(batch, backend, kernel_device) == [(-1, 0)] * 2
    empty = simple(torch.zeros(0, 33), token_rows=[0], positions=[0], temperature=[1.0], seeds=[1])
    assert run(empty, backend, kernel_device) == []


def test_a_row_does_not_depend_on_its_company_place_or_padding(backend: str, kernel_device: str) -> None:
    logits = normal(3, 97, scale=1.0)
    keys: dict[str, Any] = {"positions": [9, 8, 7], "seeds": [1, -2, 3], "temperature": [1.0, 0.7, 2.0]}
    together = run(simple(logits, **keys), backend, kernel_device)
    order = [2, 0, 1]
    shuffled = simple(logits[order], **{name: [values[k] for k in order] for name, values in keys.items()})
    assert run(shuffled, backend, kernel_device) == [together[k] for k in order]
    wider = torch.cat([logits, torch.full((3, 1000), -math.inf)], dim=1)
    assert run(simple(wider, **keys), backend, kernel_device) == together
    for k in range(3):
        alone = simple(logits[k : k + 1], **{name: values[k : k + 1] for name, values in keys.items()})
        assert run(alone, backend, kernel_device) == together[k : k + 1]


def test_nonce_and_stream_change_the_draw() -> None:
    logits = torch.zeros(16, 4000)
    plain = run(simple(logits), "reference", "cpu")
    assert run(simple(logits), "reference", "cpu") == plain
    draft = run(simple(logits, stream=noise.DRAFT, nonce_length=[9] * 16), "reference", "cpu")
    later = run(simple(logits, stream=noise.DRAFT, nonce_length=[10] * 16), "reference", "cpu")
    assert sum(a == b for a, b in zip(plain, draft, strict=True)) <= 2
    assert sum(a == b for a, b in zip(draft, later, strict=True)) <= 2
    first = run(simple(logits, stream=noise.DRAFT, nonce_length=[1] * 16), "reference", "cpu")
    assert first == run(simple(logits, stream=noise.DRAFT), "reference", "cpu")


# ---------------------------------------------------------------- pruning of the reference, on vocabularies of real size


def adversarial() -> dict[str, torch.Tensor]:
    """Rows that are hard for pruning: [2, V] each."""
    base = normal(2, 20_011, seed=4)
    peaked, masked, cliff, few = base.clone(), base.clone(), torch.zeros(2, 20_011), torch.full((2, 20_011), -math.inf)
    peaked[:, 7777] += 40
    masked[:, ::3] = -math.inf
    cliff[:, 0] = 22.0
    few[:, [3, 20_000]] = torch.tensor([1.0, 2.0])
    lowest = torch.full((2, 20_011), torch.finfo(torch.float32).min)
    lowest[:, 5000] = -3.3e38
    near = torch.zeros(2, 20_011)
    near[:, 10_000:] = -1e-6
    return {
        "flat": torch.zeros(2, 20_011),
        "normal": base,
        "bfloat16": base.bfloat16(),
        "float16": base.half(),
        "peaked": peaked,
        "masked": masked,
        "cliff": cliff,
        "two tokens": few,
        "near ties": near,
        "high": base + 1e6,
        "low": base - 1e6,
        "both": torch.where(base > 0, 1e6, -1e6),
        "steep": base * 1e5,
        "2^26": torch.full((2, 20_011), 2.0**26),
        "1e20": base * 1e20,
        "1e37": base.sign() * 1e37,
        "lowest": lowest,
        "all masked": torch.full((2, 20_011), -math.inf),
    }


@pytest.mark.parametrize("name", list(adversarial()))
def test_pruning_changes_nothing(name: str) -> None:
    logits = adversarial()[name]
    for temperature in (0.01, 0.7, 2.0):
        for seed in range(3):
            batch = simple(logits, temperature, seeds=[seed, -seed - 1])
            assert run(batch, "reference", "cpu") == expect(batch)


def test_pruning_changes_nothing_under_a_map() -> None:
    ids = np.random.default_rng(2).permutation(100_000)[:20_011].astype(np.int32)
    for name, logits in adversarial().items():
        batch = simple(logits, 1.0, token_ids=ids, stream=noise.DRAFT, nonce_length=[4, 5])
        assert run(batch, "reference", "cpu") == expect(batch), name


def test_many_small_rows_are_drawn_together() -> None:
    batch = simple(normal(300, 700, scale=0.5, seed=8), 1.0)
    assert run(batch, "reference", "cpu") == expect(batch)


@pytest.mark.parametrize("tiles_per_part", [4, 16])
def test_skipping_changes_nothing(backend: Any, kernel_device: str, tiles_per_part: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Parts of several tiles, as for many rows; on a GPU every adversarial row, interpreted the most telling ones."""
    if backend == "reference":
        pytest.skip("the reference does not cut rows into parts")
    monkeypatch.setattr(module, "_tiles_per_part", lambda count, tiles: tiles_per_part)
    compiled = kernel_device == "cuda"
    for name in adversarial() if compiled else ("normal", "lowest"):
        logits = adversarial()[name][: 2 if compiled else 1, : 20_011 if compiled else 6000]
        backwards = np.arange(logits.shape[1], 0, -1, dtype=np.int32)
        for ids in (None, backwards):
            batch = simple(logits, 1.0, token_ids=ids)
            assert run(batch, backend, kernel_device) == expect(batch), name
    nothing = simple(torch.full((1, 2500), -math.inf), 0.7, token_ids=np.arange(2500, 0, -1, dtype=np.int32))
    assert run(nothing, backend, kernel_device) == [(1, 1)]


def test_many_rows_take_long_parts() -> None:
    assert [module._tiles_per_part(count, 126) for count in (1, 32, 64, 512)] == [1, 1, 4, 16]


def test_draws_have_the_softmax_distribution() -> None:
    """Chi-square of 60,000 draws of 8 tokens, 7 degrees of freedom; the limit is the 1e-9 quantile 55.2."""
    logits = torch.tensor([0.0, 1.0, -1.0, 0.5, 2.0, -0.25, 1.5, 0.75])
    count = 60_000
    batch = Batch(logits.expand(count, 8), [0] * count, list(range(count)), [2.0], [17])
    tokens = [token for token, _ in run(batch, "reference", "cpu")]
    expected = count * torch.softmax(logits.double() / 2, 0).numpy()
    assert ((np.bincount(tokens, minlength=8) - expected) ** 2 / expected).sum() < 55.2


# ---------------------------------------------------------------- refusals


def test_bad_input_is_refused_before_anything_is_written(backend: Any, kernel_device: str) -> None:
    def call(**changes: Any) -> None:
        def integers(*shape: int) -> torch.Tensor:
            return torch.full(shape, POISON, dtype=torch.int32, device=kernel_device)

        arguments: dict[str, Any] = {
            "logits": torch.zeros(3, 33, device=kernel_device),
            "logits_indices": None,
            "token_rows": torch.zeros(3, dtype=torch.int32, device=kernel_device),
            "positions": torch.zeros(3, dtype=torch.int32, device=kernel_device),
            "temperature": torch.zeros(2, device=kernel_device),
            "seed": integers(2, 2),
            "stream": noise.DRAFT,
            "nonce_length": integers(2),
            "token_ids": integers(33),
            "out_tokens": integers(3),
            "out_bad": integers(3),
            "scratch_scores": torch.zeros(3, 1, device=kernel_device),
            "scratch_tokens": integers(3, 1),
            "scratch_bad": integers(3, 1),
        } | changes
        try:
            choose_tokens_(backend=backend, **arguments)
        finally:
            assert (arguments["out_tokens"] == POISON).all()

    def zeros(*shape: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
        return torch.zeros(shape, dtype=dtype, device=kernel_device)

    for name, value, error in (
        ("logits", zeros(3, 33, dtype=torch.float64), ArgumentTypeError),
        ("logits", zeros(33, dtype=torch.float32), ArgumentError),
        ("logits", zeros(33, 3, dtype=torch.float32).T, ArgumentError),
        ("logits_indices", zeros(2), ArgumentError),
        ("logits_indices", zeros(3, dtype=torch.float32), ArgumentTypeError),
        ("token_rows", zeros(2), ArgumentError),
        ("token_rows", zeros(3, dtype=torch.int64), ArgumentTypeError),
        ("positions", zeros(4), ArgumentError),
        ("temperature", zeros(2, dtype=torch.float64), ArgumentTypeError),
        ("seed", zeros(3, 2), ArgumentError),
        ("seed", zeros(2, 2, dtype=torch.int64), ArgumentTypeError),
        ("stream", 7, ArgumentError),
        ("stream", noise.TARGET, ArgumentError),
        ("nonce_length", zeros(3), ArgumentError),
        ("token_ids", zeros(32), ArgumentError),
        ("out_bad", zeros(2), ArgumentError),
        ("scratch_scores", zeros(3, 2, dtype=torch.float32), ArgumentError),
        ("scratch_tokens", zeros(3, 1, dtype=torch.int64), ArgumentTypeError),
    ):
        with pytest.raises(error, match=r"nonce_length|" + name):
            call(**{name: value})
    with pytest.raises(ArgumentError, match="vocab_size"):
        choose_tokens_partials(0)
