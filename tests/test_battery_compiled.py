"""Rounds of every drafter as one JAX program: nothing that a round depends on is a constant of it."""

from typing import Any

import jax
import jax.numpy as jnp
import pytest
import torch
from all_drafters import NAMES, made, rebuilt
from one_pass import TARGET, start
from oracle import output

import funcspec as fs
from funcspec.interop import jax_model
from funcspec.models.heads import MtpModules
from funcspec.models.jax_heads import JaxEagleHead, JaxMtpModules

pytestmark = pytest.mark.jax_on_cpu


def in_jax(part: Any) -> Any:
    """Arrays and models of JAX for those of torch; None for what is neither."""
    if isinstance(part, torch.Tensor):
        return jnp.asarray(part.numpy())
    if isinstance(part, MtpModules):
        return JaxMtpModules(tuple(map(JaxEagleHead.from_torch, part.modules)))
    return jax_model(part) if hasattr(part, "kv_spec") else None


@pytest.mark.parametrize("rule", [fs.rules.coupled, fs.rules.ratio], ids=repr)
@pytest.mark.parametrize("name", NAMES)
def test_d2_one_program_serves_all_positions(name: str, rule: fs.rules.Rule) -> None:
    """D2: compiled once, run with rows at all lengths, rows that end and rows that were never there, to the end of all of them."""
    drafter = made(name)
    target, other = jax_model(TARGET), rebuilt(drafter, in_jax)
    traces = []

    @jax.jit
    def turn(state: fs.SpecState) -> tuple[fs.SpecState, fs.Verdict]:
        traces.append(1)
        return fs.step_round(state, target, other)

    state, compiled = start(drafter, rule), start(other, rule, target=target)
    rounds = 0
    while fs.any_active(state):
        (state, verdict), (compiled, same) = fs.step_round(state, TARGET, drafter), turn(compiled)
        assert same.tokens.tolist() == verdict.tokens.tolist()
        rounds += 1
    assert rounds > 3 and len(traces) == 1
    assert [output(compiled, row) for row in range(4)] == [output(state, row) for row in range(4)]
