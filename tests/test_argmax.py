"""Arg-max drafting: what a drafter would draft for greedy rows, in rows of any temperature; judged as points."""

from collections.abc import Callable
from dataclasses import replace

import jax
import pytest
import torch
from all_drafters import ALL, drafted, made
from one_pass import TARGET, check_lossless, check_values, rows_of, start
from oracle import output

import funcspec as fs
from funcspec import drafters
from funcspec.drafters import argmax, standalone
from funcspec.errors import ArgumentTypeError, ModelError
from funcspec.interop import jax_model
from funcspec.models import ChecksumModel, TableModel

WITH_MODEL = [name for name in ALL if made(name).kv_model is not None]
RULES = {"coupled": fs.rules.coupled, "ratio": fs.rules.ratio}


@pytest.fixture(params=[False, True], ids=["pure", "donated"])
def donate(request: pytest.FixtureRequest) -> bool:
    return request.param


@pytest.mark.parametrize("name", WITH_MODEL)
@pytest.mark.parametrize("rule", RULES)
def test_drafts_are_those_of_greedy_rows(name: str, rule: str, donate: bool) -> None:
    drafter = made(name)
    likeliest = argmax(drafter)
    assert (likeliest.proposal, type(likeliest), likeliest.kv_model) == ("argmax", type(drafter), drafter.kv_model)
    state, count, unlike = start(likeliest, RULES[rule], heat=[0.9, 1.7, 3.0]), 0, 0
    for _ in range(5):
        cold = replace(state, temperature=torch.zeros(4))
        expected = drafted(cold, drafter)[1].tokens
        unlike += int((drafted(state, drafter)[1].tokens != expected).sum())
        state, draft = drafted(state, likeliest, donate=donate)
        assert torch.equal(draft.tokens, expected)
        count += int((draft.tokens >= 0).sum())
        state, _ = fs.verify(state, TARGET, donate=donate)
    assert count > 10 and unlike > 0


def test_nothing_is_lost(donate: bool) -> None:
    check_lossless(argmax(made("standalone")), fs.rules.coupled, donate=donate)


@pytest.mark.parametrize("rule", RULES)
def test_copies_go_on_alike(rule: str) -> None:
    check_values(argmax(made("eagle")), RULES[rule])


def test_the_target_decides_how_often_a_point_is_kept() -> None:
    """p = (.3, .5, .2), a draft that always likes token 0: kept in 0.3 of 4,000 rounds, and the law of the token is p.

    Within 5 standard deviations, false alarms below 1 in 10^6.
    """
    table = ((0.3, 0.5, 0.2),) * 3
    target, drafter = TableModel(table), argmax(standalone(TableModel(((0.5, 0.3, 0.2),) * 3)))
    config = fs.SpecConfig(max_num_reqs=500, max_model_len=8, num_speculative_tokens=1, rule=fs.rules.ratio)
    state, _ = fs.admit(fs.init(config, target, drafter), target, drafter, [[0]] * 500, seeds=[0] * 500, temperature=1.0)
    kept, counts = 0, torch.zeros(3)
    for batch in range(8):
        one = fs.fork(state, seeds=range(batch * 500, batch * 500 + 500))
        one, draft = fs.prefill(one, drafter, donate=True)
        assert (draft.tokens == 0).all()
        one, verdict = fs.verify(one, target, donate=True)
        kept += int(verdict.num_accepted.sum())
        counts += torch.bincount(verdict.tokens[:, 0].long(), minlength=3)
    for found, share in zip((kept, *counts.tolist()), (0.3, *table[0]), strict=True):
        assert abs(found - 4000 * share) < 5 * (4000 * share * (1 - share)) ** 0.5


@pytest.mark.jax_on_cpu
def test_states_of_jax_draft_alike() -> None:
    with jax.default_device(jax.devices("cpu")[0]):
        drafter = argmax(made("standalone"))
        state = start(drafter, fs.rules.ratio, heat=[0.9, 1.7, 3.0])
        other = argmax(standalone(jax_model(drafter.model)))
        target = jax_model(TARGET)
        twin = start(other, fs.rules.ratio, heat=[0.9, 1.7, 3.0], target=target)
        turn = jax.jit(lambda state: fs.step_round(state, target, other))
        for _ in range(3):
            state, verdict = fs.step_round(state, TARGET, drafter)
            twin, same = turn(twin)
            assert same.tokens.tolist() == verdict.tokens.tolist()


def test_combinations_draft_the_seconds_arg_max() -> None:
    both = drafters.fallback(drafters.ngram(min_ngram=1), made("standalone"))
    likeliest = argmax(both)
    assert (likeliest.second.proposal, likeliest.proposer) == ("argmax", both.proposer)
    state = start(likeliest, fs.rules.coupled)
    while rows_of(state):
        state, _ = fs.step_round(state, TARGET, likeliest, donate=True)
    assert output(state, 0)


@pytest.mark.parametrize("make", [drafters.ngram, drafters.suffix, lambda: drafters.fixed([[1]])])
def test_points_are_no_draws(make: Callable[[], drafters.Drafter]) -> None:
    with pytest.raises(ModelError, match=r"^drafter: expected a drafter with a model, got "):
        argmax(make())
    with pytest.raises(ArgumentTypeError, match=r"^drafter: expected a drafter of funcspec.drafters, got ChecksumModel"):
        argmax(ChecksumModel())  # type: ignore[arg-type]
