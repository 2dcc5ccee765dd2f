"""Limits that shrink while rows run: what is emitted is what a smaller limit from the start would have let through."""

from pathlib import Path

import jax
import numpy as np
import pytest
from oracle import CHECKSUM_RUNS, config, output, pair

import funcspec as fs
from funcspec.drafters import standalone
from funcspec.interop import jax_model

PROMPTS = [list(prompt) for prompt in CHECKSUM_RUNS]


@pytest.fixture(params=[False, True], ids=["pure", "donated"])
def donate(request: pytest.FixtureRequest) -> bool:
    return request.param


def started(max_tokens: list[int] | int = 16) -> fs.SpecState:
    target, drafter = pair()
    state = fs.init(config(4, 40, 3), target, drafter)
    return fs.admit(state, target, drafter, PROMPTS, max_tokens=max_tokens, rows=[0, 1, 3])[0]


def finish(state: fs.SpecState, *, donate: bool = False) -> list[list[int]]:
    target, drafter = pair()
    while fs.any_active(state):
        state, verdict = fs.step_round(state, target, drafter, donate=donate)
        assert (state.num_tokens <= state.row_limit).all()
        assert (verdict.num_drafted <= 3).all()
    return [output(state, row) for row in (0, 1, 3)]


@pytest.mark.parametrize("rounds", [0, 1, 3])
@pytest.mark.parametrize("least", [1, 6, 12])
def test_rows_end_at_the_lower_limit(donate: bool, rounds: int, least: int) -> None:
    """At once where they are past it; others go on to it and not further."""
    target, drafter = pair()
    state = started()
    for _ in range(rounds):
        state, _ = fs.step_round(state, target, drafter, donate=donate)
    had = [len(output(state, row)) for row in (0, 1, 3)]
    limits = {row: len(PROMPTS[index]) + least for index, row in enumerate((0, 1, 3))}
    lowered = fs.lower_limits(state, limits, donate=donate)
    assert lowered.finish_reason.tolist() == [2 * (had[0] >= least), 2 * (had[1] >= least), 0, 2 * (had[2] >= least)]
    wanted = [list(run[0][: max(least, count)]) for run, count in zip(CHECKSUM_RUNS.values(), had, strict=True)]
    assert finish(lowered, donate=donate) == wanted
    if not donate:
        assert finish(state) == [list(run[0]) for run in CHECKSUM_RUNS.values()]


def test_one_number_for_all_rows_raises_no_limit() -> None:
    state = fs.lower_limits(started([16, 4, 16]), 12)
    assert state.row_limit.tolist() == [12, 5, 0, 12]
    assert finish(state) == [list(run[0])[:count] for run, count in zip(CHECKSUM_RUNS.values(), (9, 4, 8), strict=True)]


def test_rows_of_a_shrunken_state_are_those_of_one_admitted_so(tmp_path: Path) -> None:
    """Snapshots are equal, and files take the new limits along."""
    lowered = fs.lower_limits(started(16), {0: 8, 1: 6, 3: 9})
    assert fs.snapshot(lowered, kv=False).fields["row_limit"].tolist() == fs.snapshot(started(5), kv=False).fields["row_limit"].tolist()
    fs.save(lowered, tmp_path / "lowered")
    target, drafter = pair()
    assert finish(fs.load(tmp_path / "lowered", target, drafter)) == finish(lowered) == finish(started(5))


def test_finished_rows_stay_finished() -> None:
    target, drafter = pair()
    state = fs.init(config(1, 40, 3), target, drafter)
    state, _ = fs.admit(state, target, drafter, [PROMPTS[0]], stop_ids=[42])
    while fs.any_active(state):
        state, _ = fs.step_round(state, target, drafter)
    lowered = fs.lower_limits(state, {0: 2})
    assert lowered.finish_reason.tolist() == [1] and lowered.row_limit.tolist() == lowered.num_tokens.tolist()


@pytest.mark.jax_on_cpu
def test_states_of_jax() -> None:
    with jax.default_device(jax.devices("cpu")[0]):
        target, drafter = pair()
        target, drafter = jax_model(target), standalone(jax_model(drafter.model))
        state = fs.init(config(1, 40, 3), target, drafter)
        state, _ = fs.admit(state, target, drafter, [PROMPTS[0]])
        state = fs.lower_limits(state, {0: 9}, donate=True)
        while fs.any_active(state):
            state, _ = fs.step_round(state, target, drafter)
        made = np.asarray(state.tokens)[0, 3:9].tolist()
        assert made == list(CHECKSUM_RUNS[(5, 6, 7)][0][:6]) and state.num_tokens.tolist() == [9]
