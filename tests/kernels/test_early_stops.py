"""Logits in which rows that are too short cannot stop."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from funcspec.errors import ArgumentError, ArgumentTypeError
from funcspec.kernels.early_stops import mask_early_stops_
from funcspec.kernels.op import Backend

POISON = -777.0


@pytest.fixture(params=["reference", "triton"])
def backend(request: pytest.FixtureRequest) -> Backend:
    return request.param


def arguments(device: str, dtype: torch.dtype = torch.float32, vocab_size: int = 1500) -> dict[str, torch.Tensor]:
    """Four places: row 0 too short, no row, row 1 just long enough, row 1 with one token more."""
    wide = torch.arange(4 * (vocab_size + 3), device=device).reshape(4, -1).remainder(251).to(dtype)
    return {
        "logits": wide[:, :vocab_size],
        "token_rows": torch.tensor([0, -1, 1, 1], dtype=torch.int32, device=device),
        "positions": torch.tensor([4, 0, 4, 5], dtype=torch.int32, device=device),
        "stop_ids": torch.tensor([[7, vocab_size - 1, -1], [3, 1024, 1023]], dtype=torch.int32, device=device),
        "min_len": torch.tensor([6, 6], dtype=torch.int32, device=device),
        "out_logits": torch.full((4, vocab_size), POISON, dtype=dtype, device=device),
    }


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_stops_of_short_rows_are_forbidden_and_nothing_else_changes(backend: Backend, kernel_device: str, dtype: torch.dtype) -> None:
    given_arrays = arguments(kernel_device, dtype)
    before = given_arrays["logits"].clone()
    mask_early_stops_(backend=backend, **given_arrays)
    out, logits = given_arrays["out_logits"].float(), before.float()
    expected = logits.clone()
    expected[0, [7, 1499]] = -float("inf")  # 5 + 1 tokens would not be 6 yet; places 2 and 3 have 5 < 6 and 6 = 6
    expected[2, [3, 1024, 1023]] = -float("inf")
    expected[1] = POISON if dtype != torch.bfloat16 else torch.tensor(POISON, dtype=dtype).float()
    assert torch.equal(out, expected)
    assert torch.equal(given_arrays["logits"], before)


@given(st.data())
def test_random_batches_agree(kernel_device: str, data: st.DataObject) -> None:
    vocab_size, rows, places, stops = (data.draw(st.integers(low, high)) for low, high in ((1, 40), (1, 4), (0, 6), (0, 3)))
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 99)))

    def numbers(low: int, high: int, *shape: int) -> torch.Tensor:
        return torch.randint(low, high, shape, generator=generator, dtype=torch.int32).to(kernel_device)

    batch = {
        "logits": torch.randn(places, vocab_size, generator=generator).to(kernel_device),
        "token_rows": numbers(-1, rows, places),
        "positions": numbers(0, 9, places),
        "stop_ids": numbers(-1, vocab_size, rows, stops),
        "min_len": numbers(0, 9, rows),
    }
    outs = {}
    for backend in ("reference", "triton"):
        outs[backend] = torch.full((places, vocab_size), POISON, device=kernel_device)
        mask_early_stops_(backend=backend, **batch, out_logits=outs[backend])
    assert torch.equal(outs["reference"], outs["triton"])
    for place, row in enumerate(batch["token_rows"].tolist()):
        early = row >= 0 and int(batch["positions"][place]) + 1 < int(batch["min_len"][row])
        forbidden = set(batch["stop_ids"][row].tolist()) if early else set()
        for token in range(vocab_size):
            expected = POISON if row < 0 else -float("inf") if token in forbidden else float(batch["logits"][place, token])
            assert float(outs["reference"][place, token]) == expected


@pytest.mark.parametrize(
    ("name", "value", "error"),
    [
        ("logits", torch.zeros(4, 1500, dtype=torch.float64), ArgumentTypeError),
        ("logits", torch.zeros(1500, 4).T, ArgumentError),
        ("token_rows", torch.zeros(3, dtype=torch.int32), ArgumentError),
        ("positions", torch.zeros(4, dtype=torch.int64), ArgumentTypeError),
        ("stop_ids", torch.zeros(3, 2, dtype=torch.int32), ArgumentError),
        ("out_logits", torch.zeros(4, 1500, dtype=torch.bfloat16), ArgumentTypeError),
        ("out_logits", torch.zeros(4, 1499), ArgumentError),
    ],
)
def test_wrong_arguments_are_refused_before_anything_is_written(
    backend: Backend, kernel_device: str, name: str, value: torch.Tensor, error: type[Exception]
) -> None:
    given_arrays = arguments(kernel_device)
    out = given_arrays["out_logits"]
    with pytest.raises(error, match=name):
        mask_early_stops_(backend=backend, **given_arrays | {name: value.to(kernel_device)})
    assert (out == POISON).all()
