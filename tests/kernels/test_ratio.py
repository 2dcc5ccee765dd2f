"""The ratio test and the token after it: the specification against exact fractions, the operations against the specification."""

from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from funcspec import exact, noise
from funcspec.errors import ArgumentError, ArgumentTypeError
from funcspec.kernels.ratio import judge_drafts_
from funcspec.kernels.recovery import recover_tokens_

from .guarded import POISON, Buffers

pytestmark = pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning")  # of the interpreter, where a score overflows
INF, NAN = float("inf"), float("nan")
TEMPERATURES = (0.0, 0.01, 0.6, 1.0, 1.7, 1e6)


# ---------------------------------------------------------------- the specification against exact fractions


def keeping(p: tuple[int, int, int, int], q: tuple[int, int, int, int]) -> Fraction:
    """min(1, p / q) of probabilities given as a weight's exponent and mantissa, and its row's; p and q may be below any float."""
    if not p[1] or not p[3]:
        return Fraction(0)
    exponent = min(max((p[0] - p[2]) - (q[0] - q[2]), -2000), 2000)  # beyond these it is 0, or 1, to all intents
    return min(Fraction(p[1] * q[3], p[3] * q[1]) * Fraction(2) ** exponent, Fraction(1))


def weigh(scores: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    exponents, mantissas = exact.weights(scores)
    return exponents, mantissas, exact.normalisers(scores)


@settings(max_examples=150)
@given(data=st.data())
def test_thresholds_are_ratios(data: st.DataObject) -> None:
    count = data.draw(st.integers(1, 5))
    score = st.one_of(st.just(-np.inf), st.floats(-80, 80, width=32), st.floats(-1, 1, width=32), st.floats(width=32, allow_nan=False))
    p_row, q_row = (np.array([data.draw(st.lists(score, min_size=count, max_size=count))], np.float32) for _ in range(2))
    token, is_point = data.draw(st.integers(0, count - 1)), data.draw(st.booleans())
    (pe, pm, pt), (qe, qm, qt) = weigh(p_row), weigh(q_row)
    p_weight, q_weight = (pe[:, token], pm[:, token]), (qe[:, token], qm[:, token])
    found = int(exact.thresholds(p_weight, pt, q_weight, qt, np.array([is_point]))[0])
    p = (int(pe[0, token]), int(pm[0, token]), *pt[0].tolist())
    q = (int(qe[0, token]), int(qm[0, token]), *qt[0].tolist())
    ratio = keeping(p, (23, 1, 0, 1) if is_point or not q[1] else q)
    assert 0 <= found <= exact.CERTAIN
    assert abs(Fraction(found, exact.CERTAIN) - ratio) <= ratio / 2**28 + Fraction(1, 2**32)
    assert (ratio == 0) <= (found == 0)  # what the target does not allow is never kept


@settings(max_examples=100)
@given(scores=st.lists(st.floats(-1e6, 1e6, width=32), min_size=1, max_size=9), data=st.data())
def test_equal_probabilities_are_always_kept(scores: list[float], data: st.DataObject) -> None:
    row = np.array([scores], np.float32)
    exponents, mantissas, totals = weigh(row)
    token = data.draw(st.integers(0, len(scores) - 1))
    weight = exponents[:, token], mantissas[:, token]
    if mantissas[0, token] and totals[0, 1]:
        assert exact.thresholds(weight, totals, weight, totals, np.array([False]))[0] == exact.CERTAIN


def test_picks_are_inverse_sums() -> None:
    weights = np.array([0, 5, 0, 2**40, 1, 0], np.int64)
    total = int(weights.sum())
    for seed in range(50):
        low, high = noise.split_seed(seed * 7919)
        w0, w1 = (int(noise.noise_words(seed * 7919, 12, 0, noise.TARGET, token)[0]) for token in (0, 256))
        aim = Fraction((w1 << 32) + w0, 2**64) * total
        expected = next(token for token in range(6) if int(weights[: token + 1].sum()) > aim)
        assert exact.pick(weights, low, high, 12) == expected
    assert exact.pick(np.zeros(4, np.int64), 1, 2, 3) == 0


def test_draws_follow_the_weights() -> None:
    """Chi-square of 20,000 picks over 4 tokens: 3 degrees of freedom, 1e-9 quantile 44.8."""
    weights = np.array([10, 0, 30, 60], np.int64) * 2**40
    counts = np.bincount([exact.pick(weights, *noise.split_seed(seed), 5) for seed in range(20_000)], minlength=4)
    assert counts[1] == 0
    expected = np.array([0.1, 0.3, 0.6]) * 20_000
    assert ((counts[[0, 2, 3]] - expected) ** 2 / expected).sum() < 44.8


def test_residuals() -> None:
    p, q = np.array([5, 3, 2, 0]), np.array([1, 7, 0, 2])
    assert exact.residual(p, q, 1).tolist() == [4, 0, 2, 0]
    assert exact.residual(p, np.zeros(4, np.int64), 0).tolist() == [0, 3, 2, 0]  # a point
    assert exact.residual(p, p, 1).tolist() == [5, 0, 2, 0]  # rounding rejected what was equal: the target's others
    assert exact.residual(np.array([0, 3, 0]), np.array([0, 3, 0]), 1).tolist() == [0, 3, 0]  # there are no others
    assert exact.residual(np.zeros(3, np.int64), q[:3], 1).tolist() == [0, 0, 0]


# ---------------------------------------------------------------- the operations against the specification


@dataclass(frozen=True)
class Row:
    """One row: drafts as they stand behind n committed tokens, what they were drawn from, and the target's logits."""

    target: np.ndarray  # [W, V]
    drawn: np.ndarray  # [K, V]
    drafts: tuple[int, ...]
    temperature: float = 1.0
    seed: int = 5
    n: int = 3
    num_draft: int | None = None
    live: bool = True
    point: bool = False


class Batch:
    """Both operations over rows, in guarded buffers."""

    def __init__(
        self, device: str, rows: list[Row], *, dtype: torch.dtype = torch.float32, has_logits: bool = True, coins: list[int] | None = None
    ) -> None:
        self.rows, self.device, self.coins = rows, device, coins
        self.width, self.vocab = rows[0].target.shape
        width, vocab, count = self.width, self.vocab, len(rows)
        self.buffers = buffers = Buffers(device)
        self.length = max(row.n for row in rows) + width + 2
        heat = np.array([row.temperature for row in rows], np.float32)
        drawn = np.stack([row.drawn for row in rows]).astype(np.float32)
        totals = np.zeros((count, width - 1, 2), np.int32)
        for index in range(count):
            if heat[index] > 0:
                totals[index] = exact.normalisers(exact.sane_scores(drawn[index], heat[index : index + 1, None]))
        tokens = [[7] * row.n + list(row.drafts) + [-1] * (self.length - row.n - len(row.drafts)) for row in rows]
        self.logits = torch.from_numpy(np.concatenate([row.target for row in rows]).astype(np.float32)).to(dtype).to(device)
        self.drawn, self.totals = drawn, totals
        self.shared: dict[str, Any] = {
            "logits": self.logits,
            "positions": buffers.holding([row.n - 1 + place for row in rows for place in range(width)]),
            "temperature": torch.from_numpy(heat).to(device),
            "seed": torch.tensor([noise.split_seed(row.seed) for row in rows], dtype=torch.int32, device=device),
            "tokens": buffers.table(tokens),
            "num_tokens": buffers.holding([row.n for row in rows]),
            "is_point": buffers.holding([int(row.point) for row in rows]),
            "draft_logits": torch.from_numpy(drawn if has_logits else drawn[:, :, :0]).contiguous().to(device),
            "draft_normalisers": torch.from_numpy(totals).to(device),
        }
        self.judging = {
            "num_draft": buffers.holding([len(row.drafts) if row.num_draft is None else row.num_draft for row in rows]),
            "num_drafted": buffers.holding([len(row.drafts) for row in rows]),
            "is_live": buffers.holding([int(row.live) for row in rows]),
            "coins": None if coins is None else torch.tensor(coins, dtype=torch.int64).to(torch.int32).to(device),
        }
        self.has_logits = has_logits
        self.parts = -(-vocab // 1024)
        self.chosen = [900_000 + place for place in range(count * width)]
        self.chosen_bad = [place % 3 == 0 for place in range(count * width)]

    def run(self, backend: Any) -> dict[str, list[Any]]:
        count, width, buffers = len(self.rows), self.width, self.buffers
        judged = {name: buffers.poisoned(count * width) for name in ("out_verdicts", "out_indices", "out_bad")}
        judged["out_normalisers"] = buffers.poisoned(count * width * 2).view(-1, 2)
        scratch = buffers.poisoned(count * width * self.parts * 4).view(-1, self.parts, 4)
        judge_drafts_(**self.shared, **self.judging, **judged, scratch=scratch, backend=backend)
        recovered = {name: buffers.poisoned(count * width) for name in ("out_chosen", "out_bad")}
        recover_tokens_(
            **self.shared,
            verdicts=judged["out_verdicts"],
            judged_bad=judged["out_bad"],
            normalisers=judged["out_normalisers"],
            chosen=buffers.holding(self.chosen),
            chosen_bad=buffers.holding([int(flag) for flag in self.chosen_bad]),
            **recovered,
            scratch=buffers.poisoned(count * self.parts * 4).view(-1, self.parts, 4),
            backend=backend,
        )
        buffers.check()
        found = {name.removeprefix("out_"): value.tolist() for name, value in judged.items()}
        return found | {"chosen": recovered["out_chosen"].tolist(), "final_bad": recovered["out_bad"].tolist()}

    def expected(self) -> dict[str, list[Any]]:
        """The contract, one place at a time."""
        out: dict[str, list[Any]] = {name: [] for name in ("verdicts", "indices", "bad", "normalisers", "chosen", "final_bad")}
        for index, row in enumerate(self.rows):
            verdicts, bads, tokens, flags, sums = [], [], [], [], []
            planned = len(row.drafts) if row.num_draft is None else row.num_draft
            count = min(planned, len(row.drafts), self.width - 1) if row.live else 0
            count = next((place for place in range(count) if not 0 <= row.drafts[place] < self.vocab), count)
            for place in range(self.width):
                at = index * self.width + place
                verdict, bad, total = 2, 0, [0, 0]
                if row.temperature > 0 and place < count:
                    verdict, bad, total = self._judge(index, place)
                verdicts.append(verdict)
                bads.append(bad)
                sums.append(total)
                out["indices"].append(at if row.temperature == 0 or place == count else -1)
            first = next(place for place in range(self.width) if verdicts[place] != 1)
            for place in range(self.width):
                at = index * self.width + place
                ended = verdicts[first] == 0
                if place < first:
                    tokens.append(row.drafts[place])
                elif ended:
                    tokens.append(self._recover(index, place, sums[place]) if place == first else -1)
                else:
                    tokens.append(self.chosen[at])
                flags.append(bads[place] if place < first or ended else int(self.chosen_bad[at]))
            for name, values in zip(
                ("verdicts", "bad", "normalisers", "chosen", "final_bad"), (verdicts, bads, sums, tokens, flags), strict=True
            ):
                out[name] += values
        return out

    def _scores(self, index: int, place: int) -> tuple[np.ndarray, np.ndarray, bool]:
        row = self.rows[index]
        heat = np.array([[row.temperature]], np.float32)
        plain = self.logits[index * self.width + place].float().cpu().numpy()[None]
        spoiled = bool((np.isnan(plain) | (plain == INF)).any())
        return exact.sane_scores(plain, heat), exact.sane_scores(self.drawn[index, place][None], heat), spoiled

    def _judge(self, index: int, place: int) -> tuple[int, int, list[int]]:
        row = self.rows[index]
        scores, drawn, spoiled = self._scores(index, place)
        total, draft = exact.normalisers(scores), row.drafts[place]
        p, q = exact.weights(scores[:, draft]), exact.weights(drawn[:, draft])
        point = np.array([row.point or not self.has_logits])
        limit = int(exact.thresholds(p, total, q, self.totals[index, place : place + 1], point)[0])
        word = int(noise.noise_words(row.seed, row.n - 1 + place, row.n - 1, noise.ACCEPT, 0)[0])
        if self.coins is not None:
            word = self.coins[index * self.width + place]
        return int(word < limit), int(spoiled or total[0, 1] == 0), total[0].tolist()

    def _recover(self, index: int, place: int, total: list[int]) -> int:
        row = self.rows[index]
        scores, drawn, _ = self._scores(index, place)
        p = exact.probabilities(scores, np.array([total], np.int32))[0]
        q = exact.probabilities(drawn, self.totals[index, place : place + 1])[0]
        if row.point or not self.has_logits or drawn[0, row.drafts[place]] == -np.inf:
            q = q * 0
        return exact.pick(exact.residual(p, q, row.drafts[place]), *noise.split_seed(row.seed), row.n - 1 + place)


def check(device: str, backend: Any, rows: list[Row], **settings_: Any) -> dict[str, list[Any]]:
    batch = Batch(device, rows, **settings_)
    found, expected = batch.run(backend), batch.expected()
    for name, values in expected.items():
        assert found[name] == values, name
    return found


def random_row(rng: np.random.Generator, width: int, vocab: int, scale: float = 2.0, **changes: Any) -> Row:
    target, drawn = (rng.normal(size=(count, vocab)) * scale for count in (width, width - 1))
    return Row(**({"target": target, "drawn": drawn, "drafts": tuple(rng.integers(0, vocab, width - 1).tolist())} | changes))


@pytest.mark.parametrize("vocab", [1, 3, 1023, 1024, 1025, 3000])
@pytest.mark.parametrize("width", [2, 4])
def test_random_batches(backend: str, kernel_device: str, width: int, vocab: int) -> None:
    rng = np.random.default_rng(width * 10_000 + vocab)
    rows = [random_row(rng, width, vocab, seed=seed, n=1 + seed) for seed in range(6)]
    rows += [random_row(rng, width, vocab, temperature=0.6, point=True), random_row(rng, width, vocab, temperature=0.0)]
    rows += [random_row(rng, width, vocab, live=False), random_row(rng, width, vocab, num_draft=1)]
    found = check(kernel_device, backend, rows)
    assert vocab < 3 or set(found["verdicts"]) == {0, 1, 2}


def test_a_batch_by_hand(backend: str, kernel_device: str) -> None:
    """Certain verdicts: disjoint supports, equal rows, a point that is sure."""
    same = np.log(np.array([[0.5, 0.25, 0.25]] * 3))
    one, two = np.array([[0, -INF, -INF]] * 3), np.array([[-INF, 0, -INF]] * 3)
    rows = [
        Row(one, two[:2], (1, 1)),  # rejected for sure, and token 0 is all there is
        Row(same, same[:2], (2, 0)),  # equal: always kept
        Row(one, two[:2], (0, 0), point=True),  # a point the target is sure of
        Row(one, two[:2], (1, 1), point=True),
        Row(two, two[:2], (-1, 1)),  # a placeholder: nothing is judged
        Row(two, two[:2], (1, 3)),  # an id outside of the vocabulary is one, too
    ]
    found = check(kernel_device, backend, rows)
    assert found["verdicts"] == [0, 0, 2, 1, 1, 2, 1, 1, 2, 0, 0, 2, 2, 2, 2, 1, 2, 2]
    assert found["indices"] == [-1, -1, 2, -1, -1, 5, -1, -1, 8, -1, -1, 11, 12, -1, -1, -1, 16, -1]
    assert found["chosen"][:3] == [0, -1, -1] and found["chosen"][3:6] == [2, 0, 900_005] and found["chosen"][9:12] == [0, -1, -1]
    assert found["chosen"][12] == 900_012 and found["chosen"][15:17] == [1, 900_016]


def test_rows_that_are_no_distributions(backend: str, kernel_device: str) -> None:
    """Nothing allowed on either side, logits that are not finite, drafts that their own row excludes: defined, flagged, in range."""
    rng = np.random.default_rng(3)
    flat, nothing = np.zeros((3, 1030)), np.full((3, 1030), -INF)
    spoiled = flat.copy()
    spoiled[0, 4], spoiled[1, 1029] = NAN, INF
    excluded = flat[:2].copy()
    excluded[:, 9] = -INF
    sure = nothing.copy()
    sure[:, 9] = 0
    rows = [
        Row(nothing, flat[:2], (9, 9)),  # the target allows nothing: rejected, token 0, flagged
        Row(flat, nothing[:2], (9, 9)),  # the drafter had nothing: its draft counts as a point
        Row(nothing, nothing[:2], (9, 9)),
        Row(spoiled, flat[:2], (3, 3)),
        Row(flat, spoiled[:2], (3, 3)),
        Row(flat, excluded, (9, 9)),  # a draft that its own row excludes is a point as well
        Row(sure, excluded, (9, 9)),
        Row(np.full((3, 1030), 3e38), flat[:2], (9, 9), temperature=0.01),
    ]
    rows += [replace(row, seed=seed) for row in rows for seed in (11, 12)]
    rows += [random_row(rng, 3, 1030, 1e30), random_row(rng, 3, 1030, 1e5)]
    found = check(kernel_device, backend, rows)
    assert found["verdicts"][:2] == [0, 0] and found["chosen"][0] == 0 and found["bad"][:3] == [1, 1, 0]
    assert found["verdicts"][18:20] == [1, 1]
    assert all(-1 <= token < 1030 or token >= 900_000 for token in found["chosen"])


def test_without_draft_logits_all_rows_are_points(backend: str, kernel_device: str) -> None:
    rng = np.random.default_rng(8)
    rows = [random_row(rng, 3, 50, 0.5, seed=seed, point=bool(seed % 2)) for seed in range(6)]
    found = check(kernel_device, backend, rows, has_logits=False)
    as_points = check(kernel_device, backend, [replace(row, point=True) for row in rows])
    assert found == as_points


def test_coins_may_be_given(backend: str, kernel_device: str) -> None:
    """A coin just below and at the threshold; the largest coin keeps what is certain."""
    p, q = np.log(np.array([[0.25, 0.75]] * 2)), np.log(np.array([[0.5, 0.5]]))
    exponents, mantissas, total = weigh(p[:1].astype(np.float32))
    drawn = weigh(q.astype(np.float32))
    limit = int(
        exact.thresholds((exponents[:, 0], mantissas[:, 0]), total, (drawn[0][:, 0], drawn[1][:, 0]), drawn[2], np.array([False]))[0]
    )
    assert abs(limit / 2**32 - 0.5) < 1e-6
    rows = [Row(p, q, (0,)), Row(p, q, (0,)), Row(p, q, (1,)), Row(p, p[:1], (0,))]
    coins = [limit - 1, 0, limit, 0, 2**32 - 1, 0, 2**32 - 1, 0]
    found = check(kernel_device, backend, rows, coins=coins)
    assert found["verdicts"][::2] == [1, 0, 1, 1]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_dtypes_of_the_target(backend: str, kernel_device: str, dtype: torch.dtype) -> None:
    rng = np.random.default_rng(4)
    check(kernel_device, backend, [random_row(rng, 3, 300, seed=seed, temperature=0.8) for seed in range(4)], dtype=dtype)


def test_company_and_padding_change_nothing(backend: str, kernel_device: str) -> None:
    rng = np.random.default_rng(6)
    rows = [random_row(rng, 3, 70, seed=seed, temperature=TEMPERATURES[seed % 6]) for seed in range(6)]
    together = check(kernel_device, backend, rows)
    for index, row in enumerate(rows):
        wider = np.full((3, 2100), -INF)
        wider[:, :70] = row.target
        drawn = np.full((2, 2100), -INF)
        drawn[:, :70] = row.drawn
        for alone in ([row], [replace(row, target=wider, drawn=drawn)]):
            found = check(kernel_device, backend, alone)
            place = slice(3 * index, 3 * index + 3)
            assert found["verdicts"] == together["verdicts"][place] and found["normalisers"] == together["normalisers"][place]
            emitted = [token if token < 900_000 else None for token in together["chosen"][place]]
            assert [token if token < 900_000 else None for token in found["chosen"]] == emitted


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=40)
@given(data=st.data())
def test_ragged_batches(backend: str, kernel_device: str, data: st.DataObject) -> None:
    width, vocab = data.draw(st.integers(2, 6)), data.draw(st.sampled_from([1, 2, 5, 1024, 1025]))
    rng = np.random.default_rng(data.draw(st.integers(0, 999)))
    rows = []
    for _ in range(data.draw(st.integers(1, 4))):
        scale = data.draw(st.sampled_from([0.0, 0.1, 1.0, 5.0, 300.0]))
        made = data.draw(st.integers(0, width - 1))
        drafts = tuple(
            data.draw(st.lists(st.one_of(st.integers(0, vocab - 1), st.sampled_from([-1, vocab])), min_size=made, max_size=made))
        )
        row = random_row(
            rng,
            width,
            vocab,
            scale,
            drafts=drafts,
            temperature=data.draw(st.sampled_from(TEMPERATURES)),
            seed=data.draw(st.integers(-(2**63), 2**64 - 1)),
            n=data.draw(st.integers(1, 9)),
            num_draft=data.draw(st.integers(0, width)),
            live=data.draw(st.sampled_from([True, True, False])),
            point=data.draw(st.booleans()),
        )
        if data.draw(st.booleans()):
            row.target[rng.random(row.target.shape) < 0.3] = data.draw(st.sampled_from([-INF, NAN, INF]))
            row.drawn[rng.random(row.drawn.shape) < 0.3] = data.draw(st.sampled_from([-INF, NAN]))
        rows.append(row)
    check(kernel_device, backend, rows, has_logits=data.draw(st.sampled_from([True, True, False])))


def test_refusals_write_nothing(backend: str, kernel_device: str) -> None:
    def refused(error: type[Exception], match: str, **changes: Any) -> None:
        batch = Batch(kernel_device, [random_row(np.random.default_rng(1), 3, 9)] * 2)
        batch.shared |= {name: value for name, value in changes.items() if name in batch.shared}
        batch.judging |= {name: value for name, value in changes.items() if name in batch.judging}
        before = len(batch.buffers.bands)
        with pytest.raises(error, match=match):
            batch.run(backend)
        assert all((band == POISON).all() for band in batch.buffers.bands[before:])

    def array(*shape: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
        return torch.zeros(shape, dtype=dtype, device=kernel_device)

    refused(ArgumentError, "^logits: expected 2 \\* 3 rows", logits=array(5, 9, dtype=torch.float32))
    refused(ArgumentTypeError, "^logits", logits=array(6, 9))
    refused(ArgumentError, "^draft_logits", draft_logits=array(2, 2, 8, dtype=torch.float32))
    refused(ArgumentTypeError, "^positions", positions=array(6, dtype=torch.int64))
    refused(ArgumentError, "^is_live", is_live=array(3))
    refused(ArgumentError, "^is_point", is_point=array(1))
    refused(ArgumentError, "^coins", coins=array(5))
