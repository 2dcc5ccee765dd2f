"""Heads over hidden states, in torch and JAX, against heads written out; their weights and configurations."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from head_oracle import CONFIGS, SHAPE, SMALL, chain, target_features
from oracle import config
from test_llama import Cache

import funcspec as fs
from funcspec.drafters import eagle
from funcspec.errors import ArgumentTypeError, FuncspecError, ModelError
from funcspec.models.base import ForwardBatch, Model
from funcspec.models.heads import EagleConfig, EagleHead, random_head
from funcspec.models.jax_heads import JaxEagleHead
from funcspec.models.llama import random_llama

TARGET = random_llama(SMALL, seed=3)


@pytest.fixture(autouse=True)
def on_the_cpu() -> Iterator[None]:
    """Where the weights of the torch models are."""
    with jax.default_device(jax.devices("cpu")[0]):
        yield


@pytest.fixture(params=CONFIGS)
def name(request: pytest.FixtureRequest) -> str:
    return request.param


def test_is_a_model(name: str) -> None:
    head = random_head(CONFIGS[name])
    assert isinstance(head, Model) and isinstance(JaxEagleHead.from_torch(head), Model)
    for one in (head, JaxEagleHead.from_torch(head)):
        assert (one.vocab_size, one.input_vocab_size, one.max_len) == (61, 61, 64)
        assert one.features.size == 24 * len(one.features.layers) and (one.features.feedback, one.features.ahead) == (24, 1)
        assert one.kv_spec == head.kv_spec and one.kv_spec.num_layers == head.config.num_layers


def ragged_passes(head: EagleHead, cache: Cache) -> Iterator[tuple[ForwardBatch, list[tuple[int, torch.Tensor, torch.Tensor]]]]:
    """Passes over two rows, with places that hold no token, and for each row a place and the logits and state it must get.

    The rows take in what is known in uneven pieces, draft three tokens, and take in what really came.
    """
    rng = np.random.default_rng(5)
    rows = [rng.integers(0, 61, 16).tolist() for _ in range(2)]
    features = [target_features(TARGET, head, tokens) for tokens in rows]
    done = [0, 0]
    for size, other, drafts in ((5, 3, 0), (2, 4, 3), (3, 1, 3), (1, 2, 1)):
        pieces, fed, wanted, at = [], [], [], 0
        for row, count in enumerate((size, other)):
            stop = done[row] + count
            pieces.append((done[row], rows[row][done[row] + 1 : stop + 1]))
            fed.append(torch.nn.functional.pad(features[row][done[row] : stop].float(), (0, 0, 0, 2), value=float("nan")))
            logits, states = chain(head, rows[row][: stop + 1], features[row][:stop], [7 + row, 30, 2][:drafts])
            wanted.append((logits, states))
            done[row], at = stop, at + count + 2
        batch = replace(cache.batch(pieces, padding=2), features=torch.cat(fed))
        last = torch.tensor([size - 1, size + 2 + other - 1], dtype=torch.int32)
        batch = replace(batch, logits_indices=last)
        yield batch, [(row, wanted[row][0][0], wanted[row][1][0]) for row in range(2)]
        for number in range(drafts):
            batch = cache.batch([(done[row] + number, [[7 + row, 30, 2][number]]) for row in range(2)])
            handed = torch.stack([wanted[row][1][number] for row in range(2)]).float()
            said = [(row, wanted[row][0][number + 1], wanted[row][1][number + 1]) for row in range(2)]
            yield replace(batch, features=handed), said


def test_ragged_passes_and_chains_equal_whole_sequences(name: str) -> None:
    head = random_head(CONFIGS[name], seed=2)
    cache = Cache(head, 2, 6)
    for batch, expected in ragged_passes(head, cache):
        kv, logits, (states,) = head.forward(cache.kv, batch)
        assert kv is cache.kv and logits.shape == (2, 61) and states.shape == (2, 24)
        for row, wanted, state in expected:
            np.testing.assert_allclose(logits[row], wanted, atol=3e-5)
            np.testing.assert_allclose(states[row], state, atol=1e-5)


def to_jax(tree: Any) -> Any:
    return jax.tree.map(lambda tensor: jnp.copy(jnp.from_dlpack(tensor.clone())), tree)


@jax.jit
def jax_forward(model: JaxEagleHead, kv: Any, batch: ForwardBatch) -> Any:
    return model.forward(kv, batch)


@pytest.mark.parametrize("name", ["as published", "mtp", "two layers"], indirect=True)
def test_jax_equals_torch_pass_by_pass(name: str) -> None:
    head = random_head(CONFIGS[name], seed=2)
    model, cache = JaxEagleHead.from_torch(head), Cache(head, 2, 6)
    kv = to_jax(cache.kv)
    for batch, _ in ragged_passes(head, cache):
        _, logits, (states,) = head.forward(cache.kv, batch)
        kv, found, (handed,) = jax_forward(model, kv, to_jax(batch))
        np.testing.assert_allclose(found, logits, atol=3e-5)
        np.testing.assert_allclose(handed, states, atol=1e-5)
        for key, buffer in cache.kv.items():
            np.testing.assert_allclose(kv[key], buffer, atol=1e-5)  # NaN where nothing was written, in both


def test_a_prompt_is_taken_in_without_logits(name: str) -> None:
    head = random_head(CONFIGS[name], seed=2)
    tokens = [5, 9, 2, 60, 33, 8]
    features = target_features(TARGET, head, tokens)
    caches = [Cache(head, 1, 2) for _ in range(2)]
    batches = [replace(cache.batch([(0, tokens[1:])]), features=features[:-1].float()) for cache in caches]
    batches[1] = replace(batches[1], logits_indices=torch.zeros(0, dtype=torch.int32))
    _, logits, (states,) = head.forward(caches[1].kv, batches[1])
    assert logits.shape == (0, 61) and states.shape == (0, 24)
    new, found, (handed,) = jax_forward(JaxEagleHead.from_torch(head), to_jax(Cache(head, 1, 2).kv), to_jax(batches[1]))
    assert found.shape == (0, 61) and handed.shape == (0, 24)
    head.forward(caches[0].kv, batches[0])
    for key, buffer in caches[0].kv.items():
        assert torch.equal(buffer.nan_to_num(9.0), caches[1].kv[key].nan_to_num(9.0))
        np.testing.assert_allclose(new[key], buffer, atol=1e-5)


def test_a_pass_without_tokens_writes_nothing(name: str) -> None:
    head = random_head(CONFIGS[name])
    cache = Cache(head, 2, 4)
    before = {key: buffer.clone() for key, buffer in cache.kv.items()}
    batch = replace(cache.batch([(3, []), (0, [])], padding=4), features=torch.full((8, head.features.size), 3.0))
    _, logits, _ = head.forward(cache.kv, batch)
    assert logits.shape == (8, 61) and logits.isfinite().all()
    for key, buffer in before.items():
        np.testing.assert_array_equal(cache.kv[key], buffer)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision(name: str, dtype: torch.dtype) -> None:
    """Features come in float32 whatever the head is of."""
    head = random_head(CONFIGS[name], dtype=dtype)
    tokens, cache = [5, 9, 2, 60, 33], Cache(head, 1, 2)
    features = target_features(TARGET, head, tokens)[:-1]
    batch = replace(cache.batch([(0, tokens[1:])]), features=features.float(), logits_indices=torch.tensor([3], dtype=torch.int32))
    _, logits, (states,) = head.forward(cache.kv, batch)
    wanted, handed = chain(head, tokens, features)
    assert logits.dtype == states.dtype == dtype
    np.testing.assert_allclose(logits.float(), wanted, atol=0.5, rtol=0.05)
    np.testing.assert_allclose(states.float(), handed, atol=0.1, rtol=0.05)


def test_weights_from_a_file(tmp_path: Path) -> None:
    """Matrices apart or joined, embedding and output matrix shared or in the file."""
    from safetensors.torch import save_file

    head = random_head(CONFIGS["eagle3"])
    weights = dict(head.weights)
    joined = {**weights, "head": torch.randn(61, 24)}
    q, k, v = weights["0.qkv"].split([48, 16, 16])
    gate, up = weights["0.gate_up"].split([40, 40])
    apart = {name: weight for name, weight in weights.items() if name not in ("0.qkv", "0.gate_up", "0.mlp_norm", "embed", "embed_norm")}
    apart |= {"0.q": q, "0.k": k, "0.v": v, "0.gate": gate, "0.up": up, "0.ln2": weights["0.mlp_norm"], "ln_e": weights["embed_norm"]}
    for stem, tensors in (("joined", joined), ("apart", apart)):
        save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, tmp_path / f"{stem}.safetensors")
    embed, ids = TARGET.weights["embed"], torch.tensor([60, 3, 17], dtype=torch.int32)
    own = EagleHead.from_safetensors(tmp_path / "joined.safetensors", head.config)
    assert own.weights.keys() == joined.keys() and all(torch.equal(own.weights[name], joined[name]) for name in joined)
    shared = EagleHead.from_safetensors(tmp_path / "apart.safetensors", head.config, embed=embed)
    assert shared.weights["embed"] is embed and shared.vocab_size == 61 and "head" not in shared.weights
    assert all(torch.equal(shared.weights[name], weights[name]) for name in weights if name != "embed")
    output = torch.randn(61, 24)
    both = EagleHead.from_safetensors(tmp_path / "apart.safetensors", head.config, embed=embed, head=output)
    assert both.weights["head"] is output
    for given, rows in ((None, embed), (output, output)):
        less = EagleHead.from_safetensors(tmp_path / "apart.safetensors", head.config, embed=embed, head=given, output_token_ids=ids)
        assert torch.equal(less.weights["head"], rows[ids.long()]) and less.output_token_ids is not None and less.vocab_size == 3
    with pytest.raises(ModelError, match="embed"):
        EagleHead.from_safetensors(tmp_path / "apart.safetensors", head.config)


def test_weights_are_shared_and_no_constants_of_a_program() -> None:
    head = random_head(CONFIGS["mtp"])
    model, cache = JaxEagleHead.from_torch(head), Cache(head, 1, 2)
    assert all(weight.unsafe_buffer_pointer() == head.weights[name].data_ptr() for name, weight in model.weights.items())
    batch = to_jax(replace(cache.batch([(0, [1, 2, 3])]), features=torch.zeros(3, 24)))
    traced = jax.make_jaxpr(lambda model, kv, batch: model.forward(kv, batch))(model, to_jax(cache.kv), batch)
    assert sum(np.size(constant) for constant in traced.consts) < 100
    again = jax.tree.map(lambda leaf: leaf, model)
    assert isinstance(again, JaxEagleHead) and again.config == model.config and again.features == model.features


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"style": "medusa"}, r"^style: expected 'eagle', 'eagle3' or 'mtp', got 'medusa'"),
        ({"num_layers": 0}, r"^num_layers: expected at least 1, got 0"),
        ({"num_kv_heads": 4}, r"^num_kv_heads: expected a divisor of 6"),
        ({"target_layers": 3}, r"^target_layers: expected a tuple of layer numbers, got 3"),
        ({"target_layers": ()}, r"^target_layers: expected one with 'eagle', got \(\)"),
        ({"target_layers": (1, 2)}, r"^target_layers: expected one with 'eagle', got \(1, 2\)"),
        ({"style": "mtp", "target_layers": (1, 2)}, r"^target_layers: expected one with 'mtp'"),
        ({"style": "eagle3"}, r"^target_layers: expected two or more with 'eagle3', got \(3,\)"),
        ({"style": "mtp", "embed_norm": False}, r"^embed_norm: expected True with 'mtp', got False"),
        ({"style": "eagle3", "target_layers": (1, 2), "feedback": "normalised"}, r"^feedback: expected 'raw' with 'eagle3'"),
        ({"style": "mtp", "outer_norms": False}, r"^outer_norms: expected True with 'mtp', got False"),
        ({"feedback": "own"}, r"^feedback: expected 'normalised' or 'raw', got 'own'"),
    ],
)
def test_refuses_configurations(changes: dict[str, Any], message: str) -> None:
    with pytest.raises((ModelError, ArgumentTypeError), match=message):
        EagleConfig(**({**SHAPE, "target_layers": (3,)} | changes))


def test_refuses_weights_that_do_not_fit() -> None:
    head = random_head(CONFIGS["normalised embedding"])
    weights = dict(head.weights)
    refused: list[tuple[str, Any, Any, Any]] = [
        (r"^config: expected an EagleConfig, got LlamaConfig", SMALL, weights, None),
        (r"^weights: expected an array named 'fc', got none", head.config, {k: w for k, w in weights.items() if k != "fc"}, None),
        (r"^weights: expected only .*, got also \['embed_norm'\]", CONFIGS["eagle"], weights, None),
        (r"^weights: expected \(24, 48\) for 'fc', got \(24, 24\)", head.config, {**weights, "fc": weights["fc"][:, :24]}, None),
        (r"^weights: expected \[rows, 24\] for 'head'", head.config, {**weights, "head": weights["fc"]}, None),
        (r"^weights: expected torch.float32 on cpu for 'norm'", head.config, {**weights, "norm": weights["norm"].half()}, None),
        (r"^output_token_ids: expected 61 ids", head.config, weights, torch.tensor([1, 2])),
    ]
    for message, shape, changed, ids in refused:
        with pytest.raises(FuncspecError, match=message) as found:
            EagleHead(shape, changed, ids)
        assert isinstance(found.value, ArgumentTypeError if shape is SMALL else ModelError)
    model = JaxEagleHead.from_torch(head)
    with pytest.raises(ModelError, match="also"):
        JaxEagleHead(CONFIGS["eagle"], model.weights)
    with pytest.raises(ModelError, match="from_torch"):
        JaxEagleHead(head.config, weights)  # type: ignore[arg-type]


@pytest.mark.parametrize("framework", ["torch", "jax"])
def test_refuses_batches_that_do_not_fit_before_anything_is_written(framework: str) -> None:
    head = random_head(CONFIGS["eagle3"])
    model, cache = JaxEagleHead.from_torch(head), Cache(head, 1, 2)
    batch = replace(cache.batch([(0, [1, 2, 3])]), features=torch.zeros(3, 72))
    refused = [
        ("features: expected [3, 72] or [3, 24], got None", replace(batch, features=None)),
        ("features: expected [3, 72] or [3, 24], got (2, 72)", replace(batch, features=torch.zeros(2, 72))),
        ("features: expected [3, 72] or [3, 24], got (3, 48)", replace(batch, features=torch.zeros(3, 48))),
        ("hidden_layers: expected none, as a head hands on its own state, got (1,)", replace(batch, hidden_layers=(1,))),
    ]
    for message, changed in refused:
        one, kv, given = (head, cache.kv, changed) if framework == "torch" else (model, to_jax(cache.kv), to_jax(changed))
        with pytest.raises(ModelError) as found:
            one.forward(kv, given)
        assert str(found.value).startswith(message)
        assert all(buffer.isnan().all() for buffer in cache.kv.values())


def test_refuses_targets_that_do_not_fit() -> None:
    wide = random_llama(replace(SMALL, hidden_size=32))
    shallow = random_llama(replace(SMALL, num_layers=2))
    drafter = eagle(random_head(CONFIGS["eagle3"]))
    for target in (wide, shallow):
        with pytest.raises(ModelError, match=r"^drafter: expected a draft for hidden states"):
            fs.init(config(1, 32, 3), target, drafter)
    with pytest.raises(ModelError, match="head: expected a model that reads hidden states"):
        eagle(TARGET)
