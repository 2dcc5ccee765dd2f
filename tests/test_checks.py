"""Shape stability and equality with plain decoding, on models that are stable and on models that are not."""

from dataclasses import dataclass
from typing import Any

import jax
import pytest
import torch
from oracle import config

import funcspec as fs
from funcspec.checks import ShapeReport, first_difference, preference_margin
from funcspec.errors import ArgumentError, CapacityError
from funcspec.interop import jax_model
from funcspec.models import ChecksumDraft, ChecksumModel, TableModel
from funcspec.models.llama import LlamaConfig, random_llama


@dataclass(frozen=True)
class Uneven(ChecksumModel):
    """Logits that depend on something besides the prefix: the place in the pass, or the company."""

    on: str = "column"
    amount: float = 1e-3

    def forward(self, kv: Any, batch: Any) -> Any:
        kv, logits, hidden = super().forward(kv, batch)
        count = logits.shape[0]
        width = batch.max_query_len if batch.logits_indices is None else 1
        column, company = torch.arange(count, device=logits.device) % width, (batch.seq_lens > 0).sum().expand(count)
        shift = column if self.on == "column" else company
        lane = torch.arange(self.vocab_size, device=logits.device) % 3 == 0
        return kv, logits + self.amount * shift[:, None] * lane, hidden


@pytest.mark.parametrize("drafts", [0, 1, 3])
@pytest.mark.parametrize("rows", [1, 3])
def test_models_of_the_prefix_are_stable(rows: int, drafts: int) -> None:
    for target in (ChecksumModel(spread=True), TableModel(((0.5, 0.5), (0.25, 0.75)))):
        report = fs.check_shape_stable(target, config(rows=rows, drafts=drafts))
        assert report == ShapeReport(True, 0.0, 0, (rows + 1) * (drafts + 1)) and report


def test_jax_models_are_checked_the_same_way() -> None:
    if jax.default_backend() != "cpu":
        pytest.skip("a state on the CPU")
    assert fs.check_shape_stable(jax_model(ChecksumModel()), config(rows=2))
    assert not fs.check_shape_stable(jax_model(Uneven()), config(rows=2))


@pytest.mark.parametrize(("on", "drafts"), [("column", 3), ("company", 0), ("company", 3)])
def test_what_depends_on_the_pass_is_found(on: str, drafts: int) -> None:
    report = fs.check_shape_stable(Uneven(on=on), config(rows=3, drafts=drafts))
    assert not report and 1e-3 <= report.max_difference < 0.01 and report.flips == 0
    if on == "column":  # no token is preferred at column 0, some are elsewhere
        assert fs.check_shape_stable(Uneven(on=on, amount=1e4), config(rows=3, drafts=drafts)).flips > 0


def test_a_llama_on_this_device() -> None:
    """Measured, not promised: a report, whatever it says, has small numbers."""
    shape = LlamaConfig(
        vocab_size=97, num_layers=2, hidden_size=32, intermediate_size=48, num_heads=4, num_kv_heads=2, head_dim=8, max_len=64
    )
    report = fs.check_shape_stable(random_llama(shape), config(rows=2))
    assert report.max_difference < 1e-4 and report.flips == 0


def test_too_short_rows() -> None:
    with pytest.raises(CapacityError, match=r"config\.max_model_len: expected at least 6, got 5"):
        fs.check_shape_stable(ChecksumModel(), config(length=5, drafts=3))


@pytest.mark.parametrize(("rule", "temperature"), [(fs.rules.greedy, 0.0), (fs.rules.coupled, [0.0, 0.9, 0.4])])
def test_output_is_plain_output(rule: fs.rules.Rule, temperature: Any) -> None:
    target, drafter = ChecksumModel(spread=True), fs.drafters.standalone(ChecksumDraft(spread=True))
    settings = config(rows=2, length=40, rule=rule)
    found = fs.same_as_plain(target, drafter, [[5, 6, 7], [1], [9, 9]], config=settings, temperature=temperature, max_tokens=[9, 20, 14])
    assert found and found.first_difference is None and found.margin is None


def test_differences_are_found_with_their_margin() -> None:
    """An uneven target: what its first token of a pass prefers, later ones do not."""
    target = Uneven(spread=True, amount=0.6)
    drafter = fs.drafters.standalone(ChecksumModel(spread=True))
    found = fs.same_as_plain(target, drafter, [[5, 6, 7]], config=config(rows=1, length=60), max_tokens=40)
    assert not found and found.first_difference is not None and found.margin is not None
    assert 0 <= found.margin < 4 and found.first_difference[0] == 0


def test_first_difference() -> None:
    assert first_difference([[1, 2], [3]], [[1, 2], [3]]) is None
    assert first_difference([[1, 2], [3]], [[1, 5], [4]]) == (0, 1)
    assert first_difference([[1], [3, 4]], [[1], [3]]) == (1, 1)


def test_the_margin_is_that_of_the_scores() -> None:
    target = TableModel(((0.25, 0.75), (0.9, 0.1)))
    assert preference_margin(target, [1, 0], 0, 0.0) == pytest.approx(1.0986, abs=1e-4)
    warm = preference_margin(target, [1, 0], 7, 1.0)
    assert warm >= 0 and warm != pytest.approx(1.0986, abs=1e-4)
    assert preference_margin(target, [1, 0], 7, 1.0) == warm != preference_margin(target, [1, 0], 8, 1.0)


def test_rules_that_draw_another_sample_are_not_compared() -> None:
    target, drafter = ChecksumModel(spread=True), fs.drafters.standalone(ChecksumDraft(spread=True))
    settings = config(rows=1, rule=fs.rules.ratio)
    with pytest.raises(ArgumentError, match=r"rule: expected one whose output is the target's own sample path, got rules\.ratio at"):
        fs.same_as_plain(target, drafter, [[5, 6, 7]], config=settings, temperature=0.8, max_tokens=4)
    assert fs.same_as_plain(target, drafter, [[5, 6, 7]], config=settings, max_tokens=12)
