"""Exact weights and sums against float64, and `keep_proposals_` against the specification."""

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from funcspec import exact
from funcspec.errors import ArgumentError, ArgumentTypeError
from funcspec.kernels.normalisers import keep_proposals_

from .guarded import POISON, Buffers

pytestmark = pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning")  # of the interpreter, where a score overflows


def test_weights_are_exponentials() -> None:
    """Every fraction that differs in float32 by more than 2^-20, and scores of all sizes."""
    scores = np.concatenate(
        [
            np.linspace(-1, 1, 2**20, dtype=np.float32),
            np.geomspace(1e-8, 600, 50_000).astype(np.float32),
            -np.geomspace(1e-8, 600, 50_000).astype(np.float32),
        ]
    )
    exponents, mantissas = exact.weights(scores)
    assert mantissas.min() >= 2**23 and mantissas.max() <= 2**24
    found = np.log(mantissas / 2.0**23) + exponents * np.log(2.0)
    assert np.abs(found - scores.astype(np.float64)).max() < 1.5e-7
    order = np.argsort(scores, kind="stable")
    assert (np.diff(np.ldexp(mantissas.astype(np.float64), exponents)[order]) >= 0).all()


def test_weights_at_the_ends() -> None:
    scores = np.array([-np.inf, -3e38, -(2.0**29), 2.0**29, 3e38, np.inf, 0.0, -0.0], np.float32)
    exponents, mantissas = exact.weights(scores)
    assert mantissas[0] == 0 and exponents[0] == exact.NO_EXPONENT
    assert exponents[1] == exponents[2] == -exponents[3] - 1 and exponents[3] == exponents[4] == exponents[5]
    assert (exponents[6:] == 0).all() and (mantissas[6:] == 2**23).all()


@pytest.mark.parametrize("vocab_size", [1, 7, 1023, 1024, 1025, 5000, 151_936])
@pytest.mark.parametrize("spread", [0.0, 1.0, 12.0, 3000.0])
def test_normalisers_are_sums_of_exponentials(vocab_size: int, spread: float) -> None:
    rng = np.random.default_rng(vocab_size)
    scores = (rng.normal(size=(3, vocab_size)) * spread).astype(np.float32)
    scores[1, rng.random(vocab_size) < 0.5] = -np.inf
    scores[1, 0] = 1.0
    exponents, mantissas = exact.normalisers(scores).T
    assert mantissas.min() >= 2**30
    wide = scores.astype(np.float64)
    top = wide.max(1)
    ideal = np.log(np.exp(wide - top[:, None]).sum(1)) + top
    found = np.log(mantissas.astype(np.float64)) + exponents * np.log(2.0)
    assert np.abs(found - ideal).max() < 1.5e-7 + 1e-12 * spread
    p = exact.probabilities(scores, exact.normalisers(scores)) / 2.0**52
    expected = np.exp(wide - ideal[:, None])
    assert 0.5 * np.abs(p - expected).sum(1).max() < 3e-7
    assert np.abs(p - expected).max() < 4e-7 and (p[scores == -np.inf] == 0).all()


def test_order_and_padding_change_nothing() -> None:
    """Sums are integers: any order inside a tile, any order of tiles, and -inf behind the row."""
    rng = np.random.default_rng(5)
    scores = (rng.normal(size=(1, 4096)) * 8).astype(np.float32)
    expected = exact.normalisers(scores).tolist()
    tiles = scores.reshape(4, 1024)
    for _ in range(5):
        shuffled = rng.permuted(tiles, axis=1)[rng.permutation(4)].reshape(1, -1)
        assert exact.normalisers(shuffled).tolist() == expected
    longer = np.concatenate([scores, np.full((1, 3000), -np.inf, np.float32)], axis=1)
    assert exact.normalisers(longer).tolist() == expected


def test_rows_without_anything_have_no_sum() -> None:
    scores = np.full((2, 1500), -np.inf, np.float32)
    assert exact.normalisers(scores).tolist() == [[0, 0]] * 2
    assert (exact.probabilities(scores, exact.normalisers(scores)) == 0).all()


class Launch:
    """One call in guarded buffers; what is not written shows."""

    def __init__(self, device: str, logits: torch.Tensor, *, most: int = 3, kept: int | None = None, **values: Any) -> None:
        self.buffers = buffers = Buffers(device)
        count, vocab = logits.shape
        rows = len(values["temperature"]) if "temperature" in values else count
        kept = vocab if kept is None else kept
        defaults = {"chosen": [1] * count, "num_draft": [most] * rows, "num_drafted": [0] * rows}
        given_ = defaults | values
        ids = given_.get("token_ids")
        self.inputs: dict[str, Any] = {
            "first": given_.get("first", False),
            "logits": logits.to(device),
            "temperature": torch.tensor(given_.get("temperature", [1.0] * rows), dtype=torch.float32, device=device),
            "token_ids": None if ids is None else buffers.holding(ids),
            **{name: buffers.holding(given_[name]) for name in ("chosen", "num_draft", "num_drafted")},
        }
        self.outputs = {
            "draft_logits": buffers.poisoned(rows * most * kept, torch.float32).view(rows, most, kept),
            "draft_normalisers": buffers.poisoned(rows * most * 2).view(rows, most, 2),
            "is_point": buffers.poisoned(rows),
        }
        self.scratch = buffers.poisoned(count * -(-vocab // 1024) * 4).view(count, -1, 4)

    def run(self, backend: Any) -> dict[str, np.ndarray]:
        before = {name: value.clone() for name, value in self.inputs.items() if isinstance(value, torch.Tensor)}
        keep_proposals_(**self.inputs, **self.outputs, scratch=self.scratch, backend=backend)
        self.buffers.check()
        for name, value in before.items():
            assert torch.equal(torch.nan_to_num(self.inputs[name]), torch.nan_to_num(value)), f"{name} was written"
        return {name: value.cpu().numpy() for name, value in self.outputs.items()}

    def expected(self) -> dict[str, np.ndarray]:
        """The contract in words, a row at a time."""
        out = {name: np.full(value.shape, POISON, value.cpu().numpy().dtype) for name, value in self.outputs.items()}
        logits, heat = self.inputs["logits"].float().cpu().numpy(), self.inputs["temperature"].cpu().numpy()
        ids = self.inputs["token_ids"]
        columns = np.arange(logits.shape[1]) if ids is None else ids.cpu().numpy()
        most, each = out["draft_logits"].shape[1], len(logits) // len(heat)
        for t in range(len(logits)):
            row = t // each
            place = t % each + (0 if self.inputs["first"] else int(self.inputs["num_drafted"][row]))
            planned = most if self.inputs["first"] else int(self.inputs["num_draft"][row])
            if self.inputs["first"]:
                out["is_point"][row] = 0
            if int(self.inputs["chosen"][t]) < 0 or heat[row] == 0 or place >= planned:
                continue
            out["draft_logits"][row, place, columns] = logits[t]
            out["draft_normalisers"][row, place] = exact.normalisers(exact.sane_scores(logits[t][None], heat[row : row + 1, None]))[0]
        return out


def check(device: str, backend: Any, logits: torch.Tensor, **values: Any) -> dict[str, np.ndarray]:
    launch = Launch(device, logits, **values)
    found, expected = launch.run(backend), launch.expected()
    for name, value in expected.items():
        np.testing.assert_array_equal(found[name], value, err_msg=name)
    return found


def test_every_kind_of_row(backend: str, kernel_device: str) -> None:
    """Drawn, without a token, greedy, complete, in the middle of the round."""
    logits = torch.randn(6, 40, generator=torch.Generator().manual_seed(1)) * 4
    values = {
        "chosen": [3, -1, 5, 0, 7, 2],
        "temperature": [0.7, 1.0, 0.0, 1.0, 1.3, 1.0],
        "num_draft": [3, 3, 3, 2, 2, 0],
        "num_drafted": [2, 1, 1, 2, 1, 0],
    }
    found = check(kernel_device, backend, logits, **values)
    assert (found["draft_normalisers"][:, :, 1] != POISON).tolist() == [
        [False, False, True],
        [False] * 3,
        [False] * 3,
        [False] * 3,
        [False, True, False],
        [False] * 3,
    ]
    check(kernel_device, backend, logits, **values, first=True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("vocab_size", [1, 1024, 2500])
def test_sizes_and_dtypes(backend: str, kernel_device: str, vocab_size: int, dtype: torch.dtype) -> None:
    logits = torch.randn(3, vocab_size, generator=torch.Generator().manual_seed(2)).mul(9).to(dtype)
    check(kernel_device, backend, logits, temperature=[0.01, 0.6, 1e6])
    wide = torch.full((3, vocab_size + 5), 7.0, dtype=dtype)
    wide[:, :vocab_size] = logits
    check(kernel_device, backend, wide[:, :vocab_size], kept=vocab_size + 3)  # rows apart, room to spare


def test_a_map_scatters(backend: str, kernel_device: str) -> None:
    logits = torch.randn(2, 1100, generator=torch.Generator().manual_seed(3))
    ids = np.random.default_rng(3).permutation(3000)[:1100].tolist()
    check(kernel_device, backend, logits, kept=3000, token_ids=ids)


def test_logits_that_are_no_logits(backend: str, kernel_device: str) -> None:
    inf, nan = float("inf"), float("nan")
    logits = torch.zeros(5, 1030)
    logits[0] = -inf
    logits[1] = nan
    logits[2, 5], logits[2, 1029] = nan, inf
    logits[3, 1:] = -inf
    logits[4, 3] = 3e38
    found = check(kernel_device, backend, logits, temperature=[1.0, 1.0, 1.0, 1.0, 0.01])
    assert found["draft_normalisers"][:2, 0].tolist() == [[0, 0]] * 2
    assert found["draft_normalisers"][3, 0].tolist() == [-30, 2**30]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_several_drafts_of_a_row(backend: str, kernel_device: str, dtype: torch.dtype) -> None:
    """Three rows of logits a request: places follow one another, up to what is planned and there is room for."""
    logits = (torch.randn(12, 1100, generator=torch.Generator().manual_seed(4)) * 5).to(dtype)
    values = {
        "chosen": [1, 2, 3, 4, -1, 5, 6, 7, 8, 9, 10, 11],
        "temperature": [0.7, 1.0, 0.0, 1.3],
        "num_draft": [4, 4, 4, 2],
        "num_drafted": [1, 0, 0, 0],
    }
    found = check(kernel_device, backend, logits, most=4, **values)
    kept = (found["draft_normalisers"][:, :, 1] != POISON).astype(int).tolist()
    assert kept == [[0, 1, 1, 1], [1, 0, 1, 0], [0, 0, 0, 0], [1, 1, 0, 0]]
    assert (found["draft_logits"][1, 2] == logits[5].float().numpy()).all()
    found = check(kernel_device, backend, logits, most=2, **values, first=True)
    assert (found["draft_normalisers"][:, :, 1] != POISON).astype(int).tolist() == [[1, 1], [1, 0], [0, 0], [1, 1]]
    assert found["is_point"].tolist() == [0] * 4
    ids = np.random.default_rng(4).permutation(3000)[:1100].tolist()
    check(kernel_device, backend, logits, most=4, kept=3000, token_ids=ids, **values)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=25)
@given(data=st.data())
def test_ragged_batches(backend: str, kernel_device: str, data: st.DataObject) -> None:
    rows, most, vocab = data.draw(st.integers(1, 4)), data.draw(st.integers(1, 4)), data.draw(st.sampled_from([1, 3, 1024, 1025]))
    scale = data.draw(st.sampled_from([0.0, 1.0, 30.0, 1e5, 1e30]))
    each = data.draw(st.sampled_from([1, 1, 2, 3]))
    logits = torch.from_numpy(np.random.default_rng(data.draw(st.integers(0, 99))).normal(size=(rows * each, vocab)) * scale).float()

    def numbers(low: int, high: int, count: int = rows) -> list[int]:
        return data.draw(st.lists(st.integers(low, high), min_size=count, max_size=count))

    values = {"chosen": numbers(-1, vocab - 1, rows * each), "num_draft": numbers(0, most), "num_drafted": numbers(0, most)}
    heat = data.draw(st.lists(st.sampled_from([0.0, 0.01, 0.7, 1.0, 1e6]), min_size=rows, max_size=rows))
    check(kernel_device, backend, logits, most=most, temperature=heat, first=data.draw(st.booleans()), **values)


def test_refusals_write_nothing(backend: str, kernel_device: str) -> None:
    def refused(error: type[Exception], match: str, **changes: Any) -> None:
        launch = Launch(kernel_device, torch.zeros(2, 9))
        launch.inputs |= {name: value for name, value in changes.items() if name in launch.inputs}
        launch.outputs |= {name: value for name, value in changes.items() if name in launch.outputs}
        before = {name: value.clone() for name, value in launch.outputs.items()}
        with pytest.raises(error, match=match):
            launch.run(backend)
        assert all(torch.equal(launch.outputs[name], value) for name, value in before.items())

    def array(*shape: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
        return torch.zeros(shape, dtype=dtype, device=kernel_device)

    refused(ArgumentTypeError, "^logits: expected float32", logits=array(2, 9))
    refused(ArgumentError, "^chosen", chosen=array(3))
    uneven = {"chosen": array(3), "logits": array(3, 9, dtype=torch.float32)}
    refused(ArgumentError, "^logits: expected as many rows for each of 2 requests, got 3", **uneven)
    refused(ArgumentError, "^draft_logits: expected room for 9 logits", draft_logits=array(2, 3, 8, dtype=torch.float32))
    refused(ArgumentTypeError, "^draft_logits", draft_logits=array(2, 3, 9))
    refused(ArgumentError, "^draft_normalisers", draft_normalisers=array(2, 2, 2))
    refused(ArgumentError, "^token_ids", token_ids=array(8))
