"""Rounds of every drafter as one JAX program: nothing that a round depends on is a constant of it."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import pytest
import torch
from all_drafters import NAMES, made
from one_pass import TARGET, start
from oracle import output

import funcspec as fs
from funcspec.interop import jax_model
from funcspec.models.heads import MtpModules
from funcspec.models.jax_heads import JaxEagleHead, JaxMtpModules

pytestmark = pytest.mark.jax_on_cpu


def in_jax(value: Any) -> Any:
    """The same drafter with arrays of JAX, and its models wrapped for JAX."""
    if isinstance(value, torch.Tensor):
        return jnp.asarray(value.numpy())
    if isinstance(value, tuple):
        return tuple(map(in_jax, value))
    if isinstance(value, MtpModules):
        return JaxMtpModules(tuple(map(JaxEagleHead.from_torch, value.modules)))
    if hasattr(value, "kv_spec"):
        return jax_model(value)
    if dataclasses.is_dataclass(value) and not isinstance(value, type) and hasattr(value, "proposal"):
        return dataclasses.replace(value, **{one.name: in_jax(getattr(value, one.name)) for one in dataclasses.fields(value) if one.init})
    return value


@pytest.mark.parametrize("rule", [fs.rules.coupled, fs.rules.ratio], ids=repr)
@pytest.mark.parametrize("name", NAMES)
def test_d2_one_program_serves_all_positions(name: str, rule: fs.rules.Rule) -> None:
    """D2: compiled once, run with rows at all lengths, rows that end and rows that were never there, to the end of all of them."""
    drafter = made(name)
    target, other = jax_model(TARGET), in_jax(drafter)
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
