"""Rows that come and go while others decode: a request's tokens depend on nothing but the request."""

import random
from typing import Any

import jax
import pytest
from oracle import checksum_greedy, config, output, pair

import funcspec as fs
from funcspec.errors import ArgumentError, ArgumentTypeError, CapacityError, ModelError, PoolExhaustedError, StepOrderError
from funcspec.interop import jax_model
from funcspec.models import ChecksumDraft, ChecksumModel

REQUESTS = [([5, 6, 7], 3, 0.0), ([1], -4, 0.7), ([40, 2, 9, 9], 5, 1.3), ([8, 8], 6, 0.9), (list(range(1, 20)), 2**63, 0.4)]


def models(framework: str) -> tuple[Any, Any]:
    made = jax_model if framework == "jax" else lambda model: model
    return made(ChecksumModel(spread=True)), fs.drafters.standalone(made(ChecksumDraft(spread=True)))


def alone(index: int, drafts: int) -> list[int]:
    target, drafter = models("torch")
    prompt, seed, temperature = REQUESTS[index]
    settings = config(rows=1, drafts=drafts, length=48, rule=fs.rules.coupled)
    emitted = fs.generate(settings, target, drafter if drafts else None, [prompt], seeds=[seed], temperature=temperature, max_tokens=16)
    return [token for emission in emitted for token in emission.tokens]


@pytest.mark.parametrize("framework", ["torch", "jax"])
@pytest.mark.parametrize("seed", range(6))
def test_any_schedule_with_preemption_gives_the_same_tokens(framework: str, seed: int) -> None:
    """A random schedule: requests are admitted, preempted, resumed elsewhere, forked away from and released."""
    if framework == "jax" and (seed > 1 or jax.default_backend() != "cpu"):
        pytest.skip("eager JAX is slow, and the states are on the CPU")
    source = random.Random(seed)
    target, drafter = models(framework)
    donate = bool(seed % 2)
    settings = config(rows=3, length=48, rule=fs.rules.coupled, block_size=4, num_blocks=120)
    state = fs.init(settings, target, drafter)
    waiting, paused = list(range(len(REQUESTS))), {}
    rows: dict[int, int] = {}
    done: dict[int, list[int]] = {}
    while waiting or paused or rows:
        free = [row for row in range(3) if row not in rows]
        source.shuffle(free)
        while free and (waiting or paused) and source.random() < 0.7:
            row = free.pop()
            if paused and (not waiting or source.random() < 0.5):
                index = source.choice(list(paused))
                state = fs.resume(state, paused.pop(index), target, drafter, rows=[row], donate=donate)
            else:
                index = waiting.pop(source.randrange(len(waiting)))
                prompt, noise, temperature = REQUESTS[index]
                options: dict[str, Any] = {
                    "seeds": [noise],
                    "temperature": temperature,
                    "max_tokens": 16,
                    "chunk": source.choice([None, 3]),
                }
                state, _ = fs.admit(state, target, drafter, [prompt], rows=[row], donate=donate, **options)
            rows[row] = index
        if rows:
            state, _ = fs.step_round(state, target, drafter, num_draft=[source.randint(0, 3) for _ in range(3)], donate=donate)
        live = state.is_live.tolist()
        for row, index in list(rows.items()):
            if not live[row]:
                done[index] = output(state, row)
                state = fs.release(state, [row], donate=donate)
                del rows[row]
            elif source.random() < 0.15:
                paused[index] = fs.snapshot(state, rows=[row], kv=source.random() < 0.5)
                state = fs.release(state, [row], donate=donate)
                del rows[row]
    assert done == {index: alone(index, 0) for index in range(len(REQUESTS))}
    assert alone(2, 3) == done[2]


def paused_row(**changes: Any) -> tuple[fs.SpecState, fs.Snapshot, Any, Any]:
    target, drafter = pair()
    state, _ = fs.admit(fs.init(config(rows=2, **changes), target, drafter), target, drafter, [[5, 6, 7], [1]])
    state, _ = fs.step_round(state, target, drafter)
    return fs.release(state, [0]), fs.snapshot(state, rows=[0]), target, drafter


def test_rows_move_between_states_and_frameworks() -> None:
    _, paused, target, drafter = paused_row()
    assert paused.config.max_num_reqs == 1 and fs.snapshot(fs.restore(paused)) == paused
    other = fs.resume(fs.init(config(rows=5, num_blocks=77), target, drafter), paused, rows=[3])
    while fs.any_active(other):
        other, _ = fs.step_round(other, target, drafter)
    assert other.tokens[3].tolist()[3:] == checksum_greedy([5, 6, 7], 61)[: other.config.max_model_len - 3]
    assert other.num_tokens.tolist()[:3] == [0, 0, 0]
    if jax.default_backend() == "cpu":
        target, drafter = models("jax")
        moved = fs.resume(fs.init(config(rows=2), target, drafter), paused)
        assert moved.framework == "jax" and fs.snapshot(moved, rows=[0]) == paused


def test_a_preempted_row_has_no_drafts_left() -> None:
    state, paused, target, drafter = paused_row()
    back = fs.resume(state, paused, target, drafter)
    assert back.num_drafted.tolist() == [0, 0] and back.tokens[0, int(back.num_tokens[0])] == -1
    _, draft = fs.prefill(state, drafter)
    assert draft.tokens.shape == (2, 3)
    drafting, _ = fs.prefill(state, drafter)
    with pytest.raises(StepOrderError, match="expected phase 'round start' for resume"):
        fs.resume(drafting, paused)
    with pytest.raises(StepOrderError, match="snapshot: expected one taken at a round's start"):
        fs.resume(state, fs.snapshot(drafting, rows=[1]))


def test_what_resume_refuses() -> None:
    state, paused, target, drafter = paused_row()
    full = fs.resume(state, paused)
    with pytest.raises(CapacityError, match="0 free rows"):
        fs.resume(full, paused)
    with pytest.raises(CapacityError, match="free rows"):
        fs.resume(state, paused, rows=[1])
    with pytest.raises(ArgumentTypeError, match="snapshot: expected a Snapshot, got SpecState"):
        fs.resume(state, state)  # type: ignore[arg-type]
    with pytest.raises(ArgumentError, match="snapshot: expected rows of a state of"):
        fs.resume(fs.init(config(rows=2, length=48), target, drafter), paused)
    with pytest.raises(ModelError, match="snapshot: expected rows for the models of this state"):
        fs.resume(fs.init(config(rows=2), target), paused)
    with pytest.raises(ArgumentError, match="snapshot: expected a request in every row"):
        fs.resume(state, fs.snapshot(state, rows=[0]))
    with pytest.raises(ArgumentError, match="rows: expected at least one row"):
        fs.snapshot(state, rows=[])
    with pytest.raises(ArgumentError, match="rows: expected distinct rows"):
        fs.snapshot(state, rows=[0, 0])
    with pytest.raises(ModelError, match="target: expected the model, as this snapshot has no KV"):
        fs.resume(state, fs.snapshot(full, rows=[0], kv=False))


def test_too_few_blocks_leave_everything_as_it_was() -> None:
    target, drafter = pair()
    settings = config(rows=2, length=32, block_size=4, num_blocks=18)
    state, _ = fs.admit(fs.init(settings, target, drafter), target, drafter, [[5, 6, 7], [1]])
    paused, older = fs.snapshot(state, rows=[0]), state  # the older state still holds the row's blocks
    state = fs.release(state, [0])
    before, free = fs.snapshot(state), state.lease.target.pool.num_free_blocks
    with pytest.raises(PoolExhaustedError, match="num_blocks: expected 8 free blocks in the target pool, got 2 of 18"):
        fs.resume(state, paused)
    assert fs.snapshot(state) == before and state.lease.target.pool.num_free_blocks == free
    del older
    assert fs.snapshot(fs.resume(state, paused), rows=[0]) == paused
