"""The JAX Llama against the torch one, and against a dense one, on the same weights and the same caches."""

import gc
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from test_llama import BLOCK_SIZE, CONFIG, Cache, dense
from test_smollm2 import needs_weights, new_cache

from funcspec.errors import ArgumentError, ModelError
from funcspec.models import smollm2
from funcspec.models.base import ForwardBatch, Model
from funcspec.models.jax_llama import JaxLlama
from funcspec.models.llama import Llama, random_llama

SMALL = replace(CONFIG, num_layers=2)
Arrays = dict[str, jax.Array]


@pytest.fixture(autouse=True)
def on_the_cpu() -> Iterator[None]:
    """Where the weights of the torch models are."""
    with jax.default_device(jax.devices("cpu")[0]):
        yield


@jax.jit
def forward(model: JaxLlama, kv: Arrays, batch: ForwardBatch) -> tuple[Arrays, jax.Array, tuple[jax.Array, ...]]:
    return model.forward(kv, batch)


def to_jax(tree: Any) -> Any:
    """Copies of all torch tensors in a pytree, in memory of JAX, as only that can be donated."""
    return jax.tree.map(lambda tensor: jnp.copy(jnp.from_dlpack(tensor.clone())), tree)


def assert_same_bits(got: jax.Array, wanted: torch.Tensor) -> None:
    np.testing.assert_array_equal(np.asarray(got).view(np.int32), wanted.numpy().view(np.int32))


def run_both(llama: Llama, model: JaxLlama, kv: dict[str, torch.Tensor], batch: ForwardBatch, atol: float = 2e-5) -> torch.Tensor:
    """Run one pass of each, kv in place; logits and caches must agree, and nothing but the named slots may change."""
    before, in_jax = {name: buffer.clone() for name, buffer in kv.items()}, to_jax(kv)
    new, logits, hidden = forward(model, in_jax, to_jax(batch))
    _, wanted, states = llama.forward(kv, batch)
    assert logits.dtype == model.dtype and logits.shape == wanted.shape
    np.testing.assert_allclose(logits, wanted, atol=atol)
    for got, state in zip(hidden, states, strict=True):
        np.testing.assert_allclose(got, state, atol=atol)
    assert new.keys() == kv.keys()
    slots = batch.slot_mapping[batch.slot_mapping >= 0].long()
    for name in kv:
        assert_same_bits(in_jax[name], before[name])
        written = new[name].reshape(kv[name].flatten(1, 2).shape)
        np.testing.assert_allclose(written[:, slots.numpy()], kv[name].flatten(1, 2)[:, slots], atol=atol)
        untouched = np.asarray(written).copy()
        untouched[:, slots.numpy()] = before[name].flatten(1, 2)[:, slots]
        assert_same_bits(untouched.reshape(before[name].shape), before[name])
    return wanted


def test_is_a_model() -> None:
    llama = random_llama(SMALL)
    model = JaxLlama.from_torch(llama)
    assert isinstance(model, Model)
    assert (model.vocab_size, model.input_vocab_size, model.max_len) == (61, 61, 600)
    assert (model.framework, JaxLlama.framework, model.dtype) == ("jax", "jax", jnp.float32)
    assert model.kv_spec == llama.kv_spec
    assert JaxLlama.from_torch(random_llama(SMALL, dtype=torch.bfloat16)).kv_spec == random_llama(SMALL, dtype=torch.bfloat16).kv_spec


@pytest.mark.parametrize(("chunks", "padding"), [([1, 1, 1, 1], 0), ([2, 5], 3), ([17, 3], 1)])
def test_two_ragged_rows_in_uneven_chunks(chunks: list[int], padding: int) -> None:
    llama = random_llama(SMALL, seed=1)
    model = JaxLlama.from_torch(llama)
    first = np.random.default_rng(0).integers(0, 61, sum(chunks)).tolist()
    second = np.random.default_rng(1).integers(0, 61, 2 * len(chunks)).tolist()
    cache, truth = Cache(llama, 2, 10), dense(llama, first)[0]
    done, other = 0, 0
    for size in chunks:
        batch = cache.batch([(done, first[done : done + size]), (other, second[other : other + 2])], padding)
        logits = run_both(llama, model, cache.kv, batch)
        np.testing.assert_allclose(logits[:size], truth[done : done + size], atol=2e-5)
        done, other = done + size, other + 2


def random_batch(rng: np.random.Generator, cache: Cache) -> ForwardBatch:
    """Rows of any lengths, idle ones too, with places that hold no token inside rows and behind them; stale cells are NaN."""
    rows = []
    for table in cache.tables.tolist():
        start, count = int(rng.integers(0, 12)), int(rng.integers(0, 7))
        rows.append((start, rng.integers(0, 61, count).tolist()))
        for buffer in cache.kv.values():
            for block, first in zip(table, range(0, len(table) * BLOCK_SIZE, BLOCK_SIZE), strict=True):
                known = torch.arange(first, first + BLOCK_SIZE) < start
                noise = torch.from_numpy(rng.normal(size=buffer[:, block].shape)).float()
                buffer[:, block] = torch.where(known[:, None, None], noise, float("nan"))
    batch = cache.batch(rows, padding=int(rng.integers(0, 3)))
    room = 30 - batch.input_ids.shape[0]
    longer = {
        name: torch.nn.functional.pad(getattr(batch, name), (0, room), value=fill)
        for name, fill in (("input_ids", 0), ("positions", 0), ("slot_mapping", -1))
    }
    return replace(batch, **longer, max_query_len=8)


def test_any_layout_of_rows() -> None:
    llama = random_llama(SMALL, seed=3)
    model, cache = JaxLlama.from_torch(llama), Cache(llama, 3, 6)
    traces = forward._cache_size()
    for seed in range(25):
        run_both(llama, model, cache.kv, random_batch(np.random.default_rng(seed), cache))
    assert forward._cache_size() == traces + 1


def test_holes_in_a_table_are_not_seen() -> None:
    llama = random_llama(SMALL)
    cache = Cache(llama, 1, 4)
    rng = np.random.default_rng(0)
    for buffer in cache.kv.values():
        buffer[:, cache.tables[0, [0, 2]].long()] = torch.from_numpy(rng.normal(size=(2, 2, BLOCK_SIZE, 2, 8))).float()
    batch = cache.batch([(12, [3, 4])])
    tables = batch.block_tables.clone()
    tables[0, 1] = -1
    run_both(llama, JaxLlama.from_torch(llama), cache.kv, replace(batch, block_tables=tables))


@pytest.mark.parametrize("padding", [0, 4])
def test_a_pass_without_tokens_writes_nothing(padding: int) -> None:
    llama = random_llama(SMALL)
    cache = Cache(llama, 2, 4)
    batch = cache.batch([(3, []), (0, [])], padding)
    _, logits, _ = forward(JaxLlama.from_torch(llama), to_jax(cache.kv), to_jax(batch))
    assert logits.shape == (2 * padding, 61) and np.isfinite(logits).all()
    if padding:
        run_both(llama, JaxLlama.from_torch(llama), cache.kv, batch)


def test_wanted_logits_and_hidden_states() -> None:
    llama = random_llama(SMALL)
    model, cache = JaxLlama.from_torch(llama), Cache(llama, 1, 4)
    batch = cache.batch([(0, [5, 9, 2, 60, 33])])
    wanted = replace(batch, logits_indices=torch.tensor([4, 1], dtype=torch.int32), hidden_layers=(2, 0, 1, 2))
    logits = run_both(llama, model, cache.kv, wanted)
    np.testing.assert_allclose(logits, dense(llama, [5, 9, 2, 60, 33])[0][[4, 1]], atol=2e-5)
    for layers in ((3,), (0, -1)):
        with pytest.raises(ModelError, match="hidden_layers"):
            model.forward(to_jax(cache.kv), to_jax(replace(batch, hidden_layers=layers)))


def test_reduced_output_vocabulary() -> None:
    whole = random_llama(SMALL)
    ids = torch.tensor([60, 3, 17], dtype=torch.int32)
    llama = Llama(SMALL, {**whole.weights, "head": whole.weights["embed"][ids.long()]}, ids)
    model = JaxLlama.from_torch(llama)
    assert (model.vocab_size, model.input_vocab_size) == (3, 61)
    assert (
        model.output_token_ids is not None and model.output_token_ids.dtype == jnp.int32 and model.output_token_ids.tolist() == [60, 3, 17]
    )
    cache = Cache(llama, 1, 4)
    logits = run_both(llama, model, cache.kv, cache.batch([(0, [5, 60, 2])]))
    np.testing.assert_allclose(logits, dense(whole, [5, 60, 2])[0][:, ids.long()], atol=2e-5)


@pytest.mark.parametrize(("dtype", "unit", "atol"), [(torch.bfloat16, 2**-7, 0.2), (torch.float16, 2**-10, 0.025)])
def test_half_precision(dtype: torch.dtype, unit: float, atol: float) -> None:
    """Rounded where torch rounds: one unit apart at most, unless XLA may leave roundings out, as it does. Logits are of size 10."""
    llama = random_llama(SMALL, dtype=dtype)
    model, cache = JaxLlama.from_torch(llama), Cache(llama, 1, 4)
    tokens = [5, 9, 2, 60, 33]
    kv, batch = to_jax(cache.kv), to_jax(cache.batch([(0, tokens)]))
    _, wanted, _ = llama.forward(cache.kv, cache.batch([(0, tokens)]))
    exact = forward.lower(model, kv, batch).compile(compiler_options={"xla_allow_excess_precision": False})
    new, logits, _ = exact(model, kv, batch)
    assert logits.dtype == new["key"].dtype == model.dtype and new["key"].dtype.name in str(dtype)
    np.testing.assert_allclose(logits.astype(jnp.float32), wanted.float(), rtol=unit, atol=unit)
    compiled = forward(model, kv, batch)[1].astype(jnp.float32)
    np.testing.assert_allclose(compiled, wanted.float(), atol=atol)
    np.testing.assert_allclose(compiled, dense(llama, tokens)[0], atol=atol)


def decode(llama: Llama, cache: Cache, size: int) -> tuple[np.ndarray, Arrays]:
    """Logits [8, vocab_size] of eight tokens behind a prompt of eight, fed `size` at a time, and the cache that they leave."""
    model = JaxLlama.from_torch(llama)
    kv, _, _ = forward(model, to_jax(cache.kv), to_jax(cache.batch([(0, [1, 2, 3, 4, 5, 6, 7, 8])])))
    tokens, rows = [9, 60, 7, 12, 33, 2, 41, 8], []
    for start in range(0, 8, size):
        kv, logits, _ = forward(model, kv, to_jax(cache.batch([(8 + start, tokens[start : start + size])])))
        rows.append(np.asarray(logits))
    return np.concatenate(rows), kv


def test_up_to_eight_tokens_of_a_row_give_the_same_bits_alone_and_together() -> None:
    llama = random_llama(SMALL)
    cache = Cache(llama, 1, 4)
    together, kv = decode(llama, cache, 8)
    for size in (1, 4):
        logits, other = decode(llama, cache, size)
        np.testing.assert_array_equal(logits, together)
        for name, buffer in kv.items():
            np.testing.assert_array_equal(other[name], buffer)


def donating(traces: list[int]) -> Callable[..., Any]:
    def run(model: JaxLlama, kv: Arrays, batch: ForwardBatch) -> tuple[Arrays, jax.Array]:
        traces.append(batch.input_ids.shape[0])
        assert (model.vocab_size, model.max_len, model.dtype) == (61, 600, jnp.float32)
        assert model.kv_spec == random_llama(SMALL).kv_spec
        return model.forward(kv, batch)[:2]

    return jax.jit(run, donate_argnums=1)


@pytest.mark.parametrize("size", [1, 4])
def test_donated_caches_are_written_in_place(size: int) -> None:
    traces: list[int] = []
    run, llama = donating(traces), random_llama(SMALL)
    model, cache = JaxLlama.from_torch(llama), Cache(llama, 1, 40)
    kv = to_jax(cache.kv)
    addresses = {name: buffer.unsafe_buffer_pointer() for name, buffer in kv.items()}
    tokens = np.random.default_rng(0).integers(0, 61, 3 * size).tolist()
    truth = dense(llama, tokens)[0]
    for start in range(0, 3 * size, size):
        given = kv
        kv, logits = run(model, kv, to_jax(cache.batch([(start, tokens[start : start + size])])))
        np.testing.assert_allclose(logits, truth[start : start + size], atol=2e-5)
        assert all(buffer.is_deleted() for buffer in given.values())
        assert {name: buffer.unsafe_buffer_pointer() for name, buffer in kv.items()} == addresses
    assert traces == [size]
    program = run.lower(model, kv, to_jax(cache.batch([(0, tokens[:size])]))).compile().as_text()
    buffers = tuple(f"f32[{SMALL.num_layers},{blocks}" for blocks in ("40,4", "160"))
    results = [line.split(" = ", 1)[1] for line in program.splitlines() if " = " in line]
    assert any(result.startswith(buffers) for result in results)
    assert not [result for result in results if result.startswith(buffers) and " copy(" in result]


def test_weights_are_no_constants_of_a_program() -> None:
    llama = random_llama(SMALL)
    model, cache = JaxLlama.from_torch(llama), Cache(llama, 1, 4)
    batch = to_jax(cache.batch([(0, [1, 2, 3])]))
    traced = jax.make_jaxpr(lambda model, kv, batch: model.forward(kv, batch))(model, to_jax(cache.kv), batch)
    assert sum(np.size(constant) for constant in traced.consts) < 100
    closed = jax.make_jaxpr(lambda kv, batch: model.forward(kv, batch))(to_jax(cache.kv), batch)
    assert sum(np.size(constant) for constant in closed.consts) > 1000, "what the check above would see"


def test_is_a_pytree() -> None:
    whole = random_llama(SMALL)
    llama = Llama(SMALL, {**whole.weights, "head": whole.weights["embed"][:3].clone()}, torch.tensor([5, 6, 7], dtype=torch.int32))
    model = JaxLlama.from_torch(llama)
    leaves, tree = jax.tree_util.tree_flatten_with_path(model)
    named = {jax.tree_util.keystr(path): leaf for path, leaf in leaves}
    assert named.keys() == {
        *(f".weights[{name!r}]" for name in llama.weights),
        ".output_token_ids",
        "._rotary[0]",
        "._rotary[1]",
    }
    assert named[".weights['0.qkv']"] is model.weights["0.qkv"]
    again = jax.tree.map(lambda leaf: leaf, model)
    assert jax.tree.structure(again) == tree and again.config == model.config and again is not model
    assert all(a is b for a, b in zip(jax.tree.leaves(again), jax.tree.leaves(model), strict=True))
    placeholder = jax.tree.unflatten(tree, range(len(leaves)))
    assert isinstance(placeholder, JaxLlama) and jax.tree.leaves(placeholder) == list(range(len(leaves)))
    shapes = jax.eval_shape(lambda model: model, model)
    assert shapes.kv_spec == model.kv_spec and shapes.vocab_size == 3
    cache = Cache(llama, 1, 4)
    run_both(llama, again, cache.kv, cache.batch([(0, [5, 60, 2])]))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_weights_are_shared_with_torch_and_outlive_it(dtype: torch.dtype) -> None:
    llama = random_llama(SMALL, dtype=dtype)
    model = JaxLlama.from_torch(llama)
    values = {name: weight.float().numpy().copy() for name, weight in llama.weights.items()}
    assert values.keys() == model.weights.keys()
    for name, weight in model.weights.items():
        assert weight.unsafe_buffer_pointer() == llama.weights[name].data_ptr()
    del llama
    gc.collect()
    assert all((np.asarray(weight, np.float32) == values[name]).all() for name, weight in model.weights.items())


def test_takes_weights_of_any_layout() -> None:
    llama = random_llama(SMALL)
    name = "1.down"
    storage = torch.empty(llama.weights[name].numel() + 1)
    shifted = storage[1:].view(llama.weights[name].shape).copy_(llama.weights[name])
    turned = llama.weights[name].T.contiguous().T.requires_grad_()
    for weight in (shifted, turned):
        model = JaxLlama.from_torch(Llama(SMALL, {**llama.weights, name: weight}))
        np.testing.assert_array_equal(model.weights[name], llama.weights[name])


def test_refuses_what_does_not_fit() -> None:
    llama = random_llama(SMALL)
    model, cache = JaxLlama.from_torch(llama), Cache(llama, 1, 4)
    weights = model.weights
    refused: list[tuple[str, dict[str, Any], Any]] = [
        (r"0\.down", {name: weight for name, weight in weights.items() if name != "0.down"}, None),
        (r"\(24,\) for 'norm'", {**weights, "norm": weights["norm"][:3]}, None),
        (r"bfloat16", {**weights, "norm": weights["norm"].astype(jnp.bfloat16)}, None),
        (r"'head'", {**weights, "head": weights["embed"][:, :5]}, None),
        (r"from_torch", {**weights, "norm": llama.weights["norm"]}, None),
        (r"output_token_ids", weights, jnp.array([1, 2])),
    ]
    for message, changed, ids in refused:
        with pytest.raises(ModelError, match=message):
            JaxLlama(SMALL, changed, ids)
    with pytest.raises(ModelError, match="meta"):
        JaxLlama.from_torch(random_llama(SMALL, device="meta"))
    kv, batch = to_jax(cache.kv), to_jax(cache.batch([(0, [5, 60, 2])]))
    for changed in ({"key": kv["key"]}, {**kv, "value": kv["value"][:1]}, {**kv, "key": kv["key"][..., :4]}, {**kv, "key": kv["key"][0]}):
        with pytest.raises(ModelError, match="kv"):
            model.forward(changed, batch)
    for name in ("positions", "slot_mapping", "query_start_loc", "block_tables"):
        with pytest.raises(ArgumentError, match=name):
            model.forward(kv, replace(batch, **{name: jnp.concatenate([getattr(batch, name)] * 2)}))
    with pytest.raises(ArgumentError, match="seq_lens"):
        model.forward(kv, replace(batch, seq_lens=batch.seq_lens[:0]))


@needs_weights
def test_smollm2_gives_the_same_logits() -> None:
    llama = smollm2.load_target()
    tokens = smollm2.load_tokenizer().encode("The Baltic Sea is an arm of the Atlantic Ocean. It is").ids[:12]
    kv = new_cache(llama)

    def ints(values: list[int]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int32)

    places = list(range(12))
    batch = ForwardBatch(ints(tokens), ints(places), ints([0, 12]), ints([12]), ints(places), ints(places)[None], None, 12)
    _, got, _ = forward(JaxLlama.from_torch(llama), to_jax(kv), to_jax(batch))
    _, wanted, _ = llama.forward(kv, batch)
    difference = np.abs(np.asarray(got) - wanted.numpy()).max()
    assert difference < 2e-3
    assert np.asarray(got).argmax(1).tolist() == wanted.argmax(1).tolist()
