"""Lifted operations: equal to torch, pure, donated in place, inside jit, scan and while_loop."""

import os
import subprocess
import sys
import threading
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from oracle import checksum_next

from funcspec.errors import ArgumentTypeError
from funcspec.interop import lift
from funcspec.kernels.acceptance import accept_matching_
from funcspec.kernels.append_drafts import append_drafts_
from funcspec.kernels.choose_tokens import choose_tokens_, choose_tokens_partials
from funcspec.kernels.op import Op
from funcspec.kernels.window_inputs import VERIFY, window_inputs_
from funcspec.noise import TARGET

pytestmark = pytest.mark.skipif(jax.default_backend() != "cpu" and not torch.cuda.is_available(), reason="JAX and torch see other devices")


def ints(*values: Any) -> np.ndarray:
    return np.array(values, np.int32)


def window_arguments() -> dict[str, Any]:
    return {
        "kind": VERIFY,
        "tokens": ints([5, 6, 7, 39, 1, 7, -1, -1], [9, -1, -1, -1, -1, -1, -1, -1]),
        "num_tokens": ints(4, 1),
        "fed_len": ints(3, 0),
        "num_draft": ints(2, 0),
        "num_drafted": ints(2, 0),
        "is_live": ints(1, 1),
        "block_tables": ints([3, 1], [0, -1]),
        "block_size": 4,
        "width": 3,
        "limit": 8,
        **{f"out_{name}": np.full(6, -7, np.int32) for name in ("input_ids", "positions", "slot_mapping", "token_rows")},
        **{f"out_{name}": np.full(2, -7, np.int32) for name in ("seq_lens", "last_token_indices")},
    }


def choose_arguments() -> dict[str, Any]:
    parts = choose_tokens_partials(97)
    return {
        "logits": np.random.default_rng(0).normal(size=(3, 97)).astype(np.float32),
        "logits_indices": None,
        "token_rows": ints(0, 1, -1),
        "positions": ints(4, 9, 0),
        "temperature": np.array([0.0, 0.7], np.float32),
        "seed": ints([1, 0], [-5, -1]),
        "stream": TARGET,
        "nonce_length": None,
        "token_ids": None,
        "out_tokens": ints(-7, -7, -7),
        "out_bad": ints(-7, -7, -7),
        "scratch_scores": np.zeros((3, parts), np.float32),
        "scratch_tokens": np.zeros((3, parts), np.int32),
        "scratch_bad": np.zeros((3, parts), np.int32),
    }


def accept_arguments() -> dict[str, Any]:
    return {
        "chosen": ints(1, 6, 0, 4, 0, 0),
        "bad": ints(0, 0, 0, 1, 0, 0),
        "row_limit": ints(8, 8),
        "stop_ids": ints([6, -1], [-1, -1]),
        "tokens": window_arguments()["tokens"],
        **{name: window_arguments()[name] for name in ("num_tokens", "num_draft", "num_drafted", "is_live")},
        "finish_reason": ints(0, 0),
        "bad_row": ints(0, 0),
        "out_tokens": np.full((2, 3), -7, np.int32),
        "out_origin": np.full((2, 3), -7, np.int32),
        **{f"out_{name}": ints(-7, -7) for name in ("num_accepted", "num_emitted", "num_drafted", "bad_row")},
    }


def append_arguments() -> dict[str, Any]:
    return {
        "first": True,
        "chosen": ints(11, 12),
        "tokens": ints([5, 6, 7, 39, -1, -1, -1, -1], [9, -1, -1, -1, -1, -1, -1, -1]),
        "num_tokens": ints(4, 1),
        "row_limit": ints(8, 2),
        "is_live": ints(1, 1),
        "wanted": ints(3, 3),
        "num_draft": ints(0, 0),
        "num_drafted": ints(0, 0),
        "draft_len": ints(3, 0),
        "draft_limit": 8,
        "out_tokens": np.full((2, 3), -7, np.int32),
    }


CASES: dict[str, tuple[Op, Callable[[], dict[str, Any]]]] = {
    "window_inputs": (window_inputs_, window_arguments),
    "choose_tokens": (choose_tokens_, choose_arguments),
    "accept_matching": (accept_matching_, accept_arguments),
    "append_drafts": (append_drafts_, append_arguments),
}


def expected(op: Op, arguments: dict[str, Any]) -> dict[str, np.ndarray]:
    """What the operation writes on torch tensors."""
    tensors = {name: torch.from_numpy(value.copy()) if isinstance(value, np.ndarray) else value for name, value in arguments.items()}
    op(**tensors)
    return {name: tensors[name].numpy() for name in op.writes if not name.startswith("scratch")}


def split(arguments: dict[str, Any]) -> tuple[dict[str, jax.Array], dict[str, Any]]:
    arrays = {name: jnp.array(value) for name, value in arguments.items() if isinstance(value, np.ndarray)}
    return arrays, {name: value for name, value in arguments.items() if name not in arrays}


@pytest.mark.parametrize("mode", ["eager", "jit"])
@pytest.mark.parametrize("case", CASES)
def test_lifted_operations_equal_torch_and_are_pure(case: str, mode: str) -> None:
    op, make = CASES[case]
    arrays, static = split(make())
    function = lift(op)
    call = jax.jit(lambda arrays: function(**arrays, **static)) if mode == "jit" else lambda arrays: function(**arrays, **static)
    found = call(arrays)
    for name, value in expected(op, make()).items():
        np.testing.assert_array_equal(np.asarray(found[name]), value, err_msg=name)
    for name, value in arrays.items():  # what the caller holds is untouched
        np.testing.assert_array_equal(np.asarray(value), make()[name], err_msg=name)


def test_donated_arrays_keep_their_address() -> None:
    op, make = CASES["append_drafts"]
    arrays, static = split(make())
    function = jax.jit(lambda tokens, rest: lift(op)(tokens=tokens, **rest, **static)["tokens"], donate_argnums=0)
    tokens, rest = arrays.pop("tokens"), arrays
    address = tokens.unsafe_buffer_pointer()
    out = function(tokens, rest)
    assert out.unsafe_buffer_pointer() == address and tokens.is_deleted()
    np.testing.assert_array_equal(np.asarray(out), expected(op, make())["tokens"])


def test_scan_over_steps_traces_once() -> None:
    """Three draft steps as a scan; the drafts come from a table, so that all is known."""
    op, make = CASES["append_drafts"]
    arrays, static = split(make() | {"row_limit": ints(8, 8)})
    static.pop("first")
    traces = []

    def body(carry: dict[str, jax.Array], chosen: jax.Array) -> tuple[dict[str, jax.Array], jax.Array]:
        traces.append(1)
        new = lift(op)(first=False, **(carry | {"chosen": chosen}), **static)
        return carry | new, new["num_drafted"]

    start = arrays | lift(op)(first=True, **arrays, **static)
    run = jax.jit(lambda start, drafts: jax.lax.scan(body, start, drafts))
    for _ in range(2):
        end, counts = run(start, jnp.array([[21, 22], [31, 32]], jnp.int32))
    assert len(traces) == 1
    assert counts.tolist() == [[2, 2], [3, 3]]
    assert end["tokens"][:, :8].tolist() == [[5, 6, 7, 39, 11, 21, 31, -1], [9, 12, 22, 32, -1, -1, -1, -1]]


def test_errors_name_the_operation() -> None:
    op, make = CASES["accept_matching"]
    arrays, static = split(make() | {"chosen": ints(1)})
    with pytest.raises(Exception, match=r"accept_matching_: chosen: expected 2 \* 3 choices, got 1"):
        jax.block_until_ready(lift(op)(**arrays, **static))


def test_arguments_are_checked_before_anything_runs() -> None:
    op, make = CASES["append_drafts"]
    arrays, static = split(make())
    with pytest.raises(ArgumentTypeError, match="tokens: expected an array, as append_drafts_ writes it, got nothing"):
        lift(op)(**{name: value for name, value in arrays.items() if name != "tokens"}, **static)
    with pytest.raises(ArgumentTypeError, match=r"tokens: expected a jax\.Array, as a pure function writes nothing of yours"):
        lift(op)(**(arrays | {"tokens": np.asarray(arrays["tokens"])}), **static)
    with pytest.raises(ArgumentTypeError, match="chosen: expected 32-bit elements or fewer, got int64"):
        lift(op)(**(arrays | {"chosen": np.array([1, 2])}), **static)


def test_threads_may_run_lifted_operations_together() -> None:
    op, make = CASES["window_inputs"]
    arrays, static = split(make())
    wanted, wrong = expected(op, make()), []

    def work() -> None:
        for _ in range(10):
            found = lift(op)(**arrays, **static)
            wrong.extend(name for name, value in wanted.items() if not np.array_equal(np.asarray(found[name]), value))

    threads = [threading.Thread(target=work) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


ENDLESS_IF_HOISTED = """
import jax, jax.numpy as jnp
from funcspec.interop import lift
from funcspec.kernels.append_drafts import append_drafts_
names = ("tokens", "num_draft", "num_drafted", "draft_len", "out_tokens")
ints = lambda *x: jnp.array(x, jnp.int32)
fixed = dict(chosen=ints(4), num_tokens=ints(1), row_limit=ints(8), is_live=ints(1), wanted=ints(3))
def body(carry):
    return tuple(lift(append_drafts_)(first=False, draft_limit=8, **fixed, **dict(zip(names, carry)))[n] for n in names)
start = (jnp.full((1, 8), -1, jnp.int32), ints(3), ints(0), ints(1), jnp.full((1, 3), -1, jnp.int32))
end = jax.jit(lambda s: jax.lax.while_loop(lambda c: c[2][0] < 3, body, s))(start)
assert end[2].tolist() == [3] and end[0][0, :5].tolist() == [-1, 4, 4, 4, -1], end
"""


def test_a_while_loop_whose_whole_carry_is_written_ends() -> None:
    """XLA hoists pure calls of this kind out of the loop, and then it never ends; ours must not be hoisted."""
    environment = os.environ | {"JAX_PLATFORMS": "cpu"}
    subprocess.run([sys.executable, "-c", ENDLESS_IF_HOISTED], check=True, timeout=120, env=environment)


def test_a_whole_greedy_round_in_one_jitted_program() -> None:
    """Draft and verify the checksum pair with lifted kernels inside `jit`; the models are JAX functions of the row."""
    length, width = 16, 4
    place = jnp.arange(length)

    def following(tokens: jax.Array, count: jax.Array) -> jax.Array:
        return (1 + jnp.sum(jnp.where(place < count, (place + 1) * tokens, 0))) % 97

    def drafted(tokens: jax.Array, count: jax.Array) -> jax.Array:
        token = following(tokens, count)
        return jnp.where(token % 3 == 0, (token + 1) % 97, token)

    @jax.jit
    def round_(state: dict[str, jax.Array]) -> tuple[dict[str, jax.Array], dict[str, jax.Array]]:
        rows = {name: state[name] for name in ("num_tokens", "row_limit", "is_live")}
        scratch = {"out_tokens": jnp.full((1, 3), -1, jnp.int32)}
        for step in range(3):
            chosen = drafted(state["tokens"][0], state["num_tokens"][0] + step)[None]
            drafts = {name: state[name] for name in ("tokens", "num_draft", "num_drafted", "draft_len")}
            new = lift(append_drafts_)(
                first=step == 0, chosen=chosen, wanted=jnp.array([3], jnp.int32), draft_limit=length, **rows, **drafts, **scratch
            )
            state = state | {name: new[name] for name in drafts}
        row, count = state["tokens"][0], state["num_tokens"][0]
        chosen = jnp.stack([following(row, count + j) for j in range(width)]).astype(jnp.int32)
        fields = ("tokens", "num_tokens", "num_draft", "num_drafted", "is_live", "finish_reason", "bad_row")
        outs = {f"out_{name}": jnp.zeros(1, jnp.int32) for name in ("num_accepted", "num_emitted", "num_drafted", "bad_row")}
        new = lift(accept_matching_)(
            chosen=chosen,
            bad=jnp.zeros(width, jnp.int32),
            row_limit=state["row_limit"],
            stop_ids=jnp.full((1, 1), -1, jnp.int32),
            **{name: state[name] for name in fields},
            **outs,
            out_tokens=jnp.zeros((1, width), jnp.int32),
            out_origin=jnp.zeros((1, width), jnp.int32),
        )
        return state | {name: new[name] for name in fields}, new

    prompt = [5, 6, 7, 39]
    state = {name: jnp.zeros(1, jnp.int32) for name in ("num_draft", "num_drafted", "finish_reason", "bad_row", "draft_len")}
    state |= {"tokens": jnp.full((1, length), -1, jnp.int32).at[0, :4].set(jnp.array(prompt)), "num_tokens": jnp.array([4], jnp.int32)}
    state |= {"row_limit": jnp.array([length], jnp.int32), "is_live": jnp.array([1], jnp.int32)}
    sequence, accepted = list(prompt), []
    while int(state["is_live"][0]):
        state, verdict = round_(state)
        accepted.append(int(verdict["out_num_accepted"][0]))
    for _ in range(length - 4):
        sequence.append(checksum_next(sequence))
    assert state["tokens"][0].tolist() == sequence
    assert accepted[:4] == [1, 0, 0, 2]
