"""What states and models of JAX refuse, and that nothing is lost by it."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from test_jax_states import DEVICE, admitted, config, pair

import funcspec as fs
from funcspec import graphs
from funcspec.errors import (
    ArgumentError,
    ArgumentTypeError,
    BackendError,
    CapacityError,
    ModelError,
    PoolExhaustedError,
    StateError,
    StepOrderError,
)
from funcspec.interop import jax_dtype, jax_model
from funcspec.models import ChecksumDraft, ChecksumModel

pytestmark = pytest.mark.skipif(DEVICE == "cpu" and torch.cuda.is_available(), reason="JAX and torch see other devices")


class Wrong:
    """A model of JAX whose forward returns what it is told to."""

    framework = "jax"
    vocab_size, max_len, kv_spec = 97, 4096, ChecksumModel().kv_spec

    def __init__(self, change: Any) -> None:
        self.change = change

    def forward(self, kv: Any, batch: Any) -> Any:
        return self.change(*jax_model(ChecksumModel()).forward(kv, batch))


def test_two_frameworks_do_not_mix() -> None:
    target, drafter = pair("torch")
    with pytest.raises(ModelError, match=r"drafter: expected a draft of torch, as the target is, got one of jax\. Fix: .*jax_model"):
        fs.init(config(), target, fs.drafters.standalone(jax_model(ChecksumDraft())))
    with pytest.raises(ModelError, match="drafter: expected a draft of jax"):
        fs.init(config(), jax_model(target), drafter)


def test_a_step_refuses_models_of_the_other_framework() -> None:
    state, target, drafter = admitted("jax", config())
    torch_target, torch_drafter = pair("torch")
    for step in (lambda: fs.verify(fs.prefill(state, drafter)[0], torch_target), lambda: fs.prefill(state, torch_drafter)):
        with pytest.raises(ModelError, match=r"expected the model the state was made for \(of jax"):
            step()
    assert fs.step_round(state, target, drafter)[1].num_emitted.min() >= 1


def test_lifting_what_is_no_torch_model() -> None:
    for wrong in (ChecksumModel, object(), jax_model(ChecksumModel())):
        with pytest.raises(ArgumentTypeError, match="model: expected a model of torch"):
            jax_model(wrong)  # type: ignore[arg-type]
    with pytest.raises(ArgumentTypeError, match=r"dtype: expected a dtype of at most 32 bits, got torch\.int64"):
        jax_dtype(torch.int64)


def test_admission_looks_at_values() -> None:
    state, target, drafter = admitted("jax", config())
    with pytest.raises(StateError, match="state: expected values, got a state that JAX traces"):
        jax.jit(lambda state: fs.release(state, [0]))(state)
    with pytest.raises(StateError, match="Fix: admit, release and take snapshots outside jit"):
        jax.jit(lambda state: fs.admit(state, target, drafter, [[1]])[0])(state)
    with pytest.raises(CapacityError, match="1 prompts for 0 free rows"):
        fs.admit(state, target, drafter, [[1]])


def test_too_few_blocks() -> None:
    target, drafter = pair("jax")
    state = fs.init(config(num_blocks=12), target, drafter)
    state, _ = fs.admit(state, target, drafter, [[1]])
    with pytest.raises(PoolExhaustedError, match="num_blocks: expected 10 free blocks in the target pool, got 2 of 12"):
        fs.admit(state, target, drafter, [[2]])
    assert fs.admit(state, target, drafter, [[2]], max_tokens=2)[1].rows == (1,)


def test_graphs_are_for_torch() -> None:
    state, target, drafter = admitted("jax", config())
    with pytest.raises(BackendError, match=r"state: expected a state of torch, got one of JAX\. Fix: use jax\.jit"):
        graphs.capture(fs.step_round, state, target, drafter)


def test_steps_out_of_order() -> None:
    state, target, drafter = admitted("jax", config())
    with pytest.raises(StepOrderError):
        jax.jit(fs.decode)(state, drafter)
    with pytest.raises(StepOrderError):
        fs.verify(state, target)


@pytest.mark.parametrize(
    ("wrong", "error", "message"),
    [
        (jnp.zeros(3, jnp.float32), ArgumentError, r"num_draft: expected an int32 jax\.Array \[3\], got \[3\] float32"),
        (jnp.zeros(2, jnp.int32), ArgumentError, r"num_draft: expected an int32 jax\.Array \[3\], got \[2\] int32"),
        (torch.zeros(3, dtype=torch.int32), ArgumentError, "num_draft: expected an int or 3 ints"),
        (4, ArgumentError, "num_draft: expected numbers from 0 to num_speculative_tokens = 3"),
    ],
)
def test_num_draft(wrong: Any, error: type[Exception], message: str) -> None:
    state, _, drafter = admitted("jax", config())
    with pytest.raises(error, match=message):
        fs.prefill(state, drafter, num_draft=wrong)


def test_scores_of_another_shape() -> None:
    state, target, drafter = admitted("jax", config())
    state, scores = fs.score(fs.prefill(state, drafter)[0], target)
    with pytest.raises(ArgumentError, match=r"scores\.logits: expected a float jax\.Array \[3, 4, 97\], got \[3, 97\] float32"):
        fs.accept(state, fs.Scores(scores.logits[:, 0], scores.stamp))
    with pytest.raises(ArgumentTypeError, match=r"scores\.logits: expected a float jax\.Array \[3, 4, 97\], got Tensor"):
        fs.accept(state, fs.Scores(torch.zeros(3, 4, 97), scores.stamp))
    assert fs.accept(state, scores)[1].num_emitted.min() >= 1


def test_fields_of_another_dtype_or_shape() -> None:
    state, _, drafter = admitted("jax", config())
    floats = jax.tree.map(lambda array: array.astype(jnp.float32), state)
    with pytest.raises(ArgumentTypeError, match=r"state\.tokens: expected a jax\.Array of int32, got float32"):
        fs.prefill(floats, drafter)
    with pytest.raises(ArgumentError, match=r"state\.tokens: expected shape \(3, 40\), got \(2, 40\)"):
        fs.prefill(jax.tree.map(lambda array: array[:2], state), drafter)
    assert fs.prefill(jax.tree.map(np.asarray, state), drafter)[0].framework == "jax"  # NumPy leaves are taken as they are


@pytest.mark.parametrize("program", [False, True], ids=["eager", "jit"])
@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda kv, logits, hidden: (kv, logits), r"forward: expected \(kv, logits, hidden\), got tuple"),
        (lambda kv, logits, hidden: ({"token": kv["token"]}, logits, hidden), "forward: expected new KV with the shapes"),
        (lambda kv, logits, hidden: (kv | {"token": kv["token"][0]}, logits, hidden), "forward: expected new KV with the shapes"),
        (lambda kv, logits, hidden: (kv, logits[:1], hidden), r"forward: expected float logits \[12, 97\], got \(1, 97\)"),
        (lambda kv, logits, hidden: (kv, logits.astype(jnp.int32), hidden), r"forward: expected float logits \[12, 97\].*int32"),
        (lambda kv, logits, hidden: (kv, np.zeros((12, 97), np.float32), hidden), "forward: expected float logits .* got ndarray"),
    ],
)
def test_what_a_model_returns_is_checked(change: Any, message: str, program: bool) -> None:
    state, target, drafter = admitted("jax", config())
    state, _ = fs.prefill(state, drafter)
    before = fs.snapshot(state)
    step = jax.jit(lambda state: fs.verify(state, Wrong(change))) if program else lambda state: fs.verify(state, Wrong(change))
    with pytest.raises(ModelError, match=message):
        step(state)
    assert fs.snapshot(state) == before and fs.verify(state, target)[1].num_emitted.min() >= 1


class Failing(ChecksumModel):
    """A torch model that raises once a flag is set."""

    raises = False

    def forward(self, kv: Any, batch: Any) -> Any:
        if Failing.raises:
            raise ValueError("the model failed")
        return super().forward(kv, batch)


@pytest.mark.parametrize("program", [False, True], ids=["eager", "jit"])
def test_a_torch_model_that_raises_leaves_the_state_usable(program: bool) -> None:
    target, drafter = jax_model(Failing()), pair("jax")[1]
    state, _ = fs.admit(fs.init(config(), target, drafter), target, drafter, [[5, 6, 7]])
    step = jax.jit(fs.step_round) if program else fs.step_round
    before = fs.snapshot(state)
    Failing.raises = True
    try:
        with pytest.raises(Exception, match="the model failed"):
            jax.block_until_ready(step(state, target, drafter))
    finally:
        Failing.raises = False
    assert fs.snapshot(state) == before
    assert step(state, target, drafter)[1].num_emitted.tolist() == [2, 0, 0]
