"""The paged Llama against a dense one written out token by token, on tiny random models."""

import struct
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch

from funcspec.errors import ModelError
from funcspec.models.base import ForwardBatch, Model
from funcspec.models.gguf import dequantise, read_gguf
from funcspec.models.llama import Llama, LlamaConfig, random_llama

CONFIG = LlamaConfig(
    vocab_size=61,
    num_layers=3,
    hidden_size=24,
    intermediate_size=40,
    num_heads=6,
    num_kv_heads=2,
    head_dim=8,
    max_len=600,
    rope_theta=500.0,
)
BLOCK_SIZE = 4


def dense(model: Llama, tokens: list[int]) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Logits [n, vocab_size] and hidden states by layer, in float64, with complex rotations and explicit masks."""
    config = model.config
    weights = {name: weight.double() for name, weight in model.weights.items()}
    n, dim, group = len(tokens), config.head_dim, config.num_heads // config.num_kv_heads
    angles = torch.arange(n)[:, None] * config.rope_theta ** (-torch.arange(0, dim, 2, dtype=torch.float64) / dim)
    turn = torch.polar(torch.ones_like(angles), angles)

    def norm(x: torch.Tensor, name: str) -> torch.Tensor:
        return x / (x.pow(2).mean(-1, keepdim=True) + config.norm_eps).sqrt() * weights[name]

    def rotate(x: torch.Tensor) -> torch.Tensor:
        turned = torch.complex(x[:, : dim // 2], x[:, dim // 2 :]) * turn
        return torch.cat([turned.real, turned.imag], 1)

    x = weights["embed"][torch.tensor(tokens)]
    hidden = [x]
    for layer in range(config.num_layers):
        q, k, v = (norm(x, f"{layer}.attention_norm") @ weights[f"{layer}.qkv"].T).split(
            [config.num_heads * dim, *2 * [config.num_kv_heads * dim]], 1
        )
        heads = []
        for head in range(config.num_heads):
            own, shared = slice(head * dim, (head + 1) * dim), slice(head // group * dim, (head // group + 1) * dim)
            scores = rotate(q[:, own]) @ rotate(k[:, shared]).T / dim**0.5
            heads.append(scores.masked_fill(torch.ones(n, n).triu(1).bool(), float("-inf")).softmax(-1) @ v[:, shared])
        x = x + torch.cat(heads, 1) @ weights[f"{layer}.attention_output"].T
        gate, up = (norm(x, f"{layer}.mlp_norm") @ weights[f"{layer}.gate_up"].T).chunk(2, 1)
        x = x + (gate * gate.sigmoid() * up) @ weights[f"{layer}.down"].T
        hidden.append(x)
    hidden[-1] = norm(x, "norm")
    return hidden[-1] @ weights.get("head", weights["embed"]).T, hidden


class Cache:
    """A paged cache with shuffled blocks and a row for each table."""

    def __init__(self, model: Llama, rows: int, columns: int) -> None:
        self.model = model
        order = torch.randperm(rows * columns, generator=torch.Generator().manual_seed(4))
        self.tables = order.reshape(rows, columns).int()
        spec = model.kv_spec
        shapes = {entry.name: (spec.num_layers, rows * columns, BLOCK_SIZE, *entry.shape) for entry in spec.entries}
        self.kv = {name: torch.full(shape, float("nan"), dtype=model.dtype) for name, shape in shapes.items()}

    def batch(self, rows: list[tuple[int, list[int]]], padding: int = 0) -> ForwardBatch:
        """Feed each row (cached length, new tokens); `padding` places without a token at the end of each row."""
        ids, positions, slots, bounds = [], [], [], [0]
        for table, (start, tokens) in zip(self.tables.tolist(), rows, strict=True):
            places = range(start, start + len(tokens))
            ids += tokens + [0] * padding
            positions += [*places] + [0] * padding
            slots += [table[p // BLOCK_SIZE] * BLOCK_SIZE + p % BLOCK_SIZE for p in places] + [-1] * padding
            bounds.append(len(ids))

        def ints(values: list[int]) -> torch.Tensor:
            return torch.tensor(values, dtype=torch.int32)

        lengths = [start + len(tokens) if tokens else 0 for start, tokens in rows]
        longest = max(stop - start for start, stop in pairwise(bounds))
        return ForwardBatch(ints(ids), ints(positions), ints(bounds), ints(lengths), ints(slots), self.tables, None, longest)


def test_is_a_model() -> None:
    model = random_llama(CONFIG)
    assert isinstance(model, Model)
    assert (model.vocab_size, model.input_vocab_size, model.max_len) == (61, 61, 600)
    assert [(e.name, e.shape, e.dtype) for e in model.kv_spec.entries] == [("key", (2, 8), torch.float32), ("value", (2, 8), torch.float32)]


@pytest.mark.parametrize("chunks", [[1] * 9, [4, 4, 1], [9], [2, 5, 2], [13, 3, 20, 1, 6]])
@pytest.mark.parametrize("padding", [0, 1, 3])
def test_two_ragged_rows_in_uneven_chunks_equal_dense_passes(chunks: list[int], padding: int) -> None:
    model = random_llama(CONFIG, seed=1)
    first = np.random.default_rng(0).integers(0, 61, sum(chunks)).tolist()
    second = np.random.default_rng(1).integers(0, 61, 2 * len(chunks)).tolist()
    cache = Cache(model, 2, 16)
    wanted = [dense(model, first)[0], dense(model, second)[0]]
    done, other = 0, 0
    for size in chunks:
        batch = cache.batch([(done, first[done : done + size]), (other, second[other : other + 2])], padding)
        kv, logits, hidden = model.forward(cache.kv, batch)
        assert kv is cache.kv and hidden == ()
        assert logits.is_contiguous()
        expected = wanted[0][done : done + size], wanted[1][other : other + 2]
        np.testing.assert_allclose(logits[:size], expected[0], atol=2e-5)
        np.testing.assert_allclose(logits[size + padding : size + padding + 2], expected[1], atol=2e-5)
        done, other = done + size, other + 2


def test_a_long_prompt() -> None:
    model = random_llama(CONFIG, seed=2)
    tokens = np.random.default_rng(2).integers(0, 61, 530).tolist()
    cache = Cache(model, 1, 140)
    _, logits, _ = model.forward(cache.kv, cache.batch([(0, tokens)]))
    np.testing.assert_allclose(logits, dense(model, tokens)[0], atol=5e-5)


def test_wanted_logits_and_hidden_states() -> None:
    model = random_llama(CONFIG)
    cache = Cache(model, 1, 4)
    tokens = [5, 9, 2, 60, 33]
    batch = replace(cache.batch([(0, tokens)]), logits_indices=torch.tensor([4, 1], dtype=torch.int32), hidden_layers=(3, 0, 1))
    _, logits, hidden = model.forward(cache.kv, batch)
    wanted, states = dense(model, tokens)
    np.testing.assert_allclose(logits, wanted[[4, 1]], atol=2e-5)
    for got, layer in zip(hidden, (3, 0, 1), strict=True):
        np.testing.assert_allclose(got, states[layer], atol=2e-5)
    with pytest.raises(ModelError, match="hidden_layers"):
        model.forward(cache.kv, replace(batch, hidden_layers=(4,)))


def test_a_pass_without_tokens_writes_nothing() -> None:
    """An idle step must not write through old table rows (vllm-project/vllm#56734)."""
    model = random_llama(CONFIG)
    cache = Cache(model, 2, 4)
    before = {name: buffer.clone() for name, buffer in cache.kv.items()}
    _, logits, _ = model.forward(cache.kv, cache.batch([(3, []), (0, [])], padding=4))
    assert logits.shape == (8, 61) and logits.isfinite().all()
    for name, buffer in before.items():
        np.testing.assert_array_equal(cache.kv[name], buffer)


def test_rolling_back_is_a_smaller_position() -> None:
    model = random_llama(CONFIG)
    cache = Cache(model, 1, 8)
    model.forward(cache.kv, cache.batch([(0, [1, 2, 3, 4, 50, 51])]))
    _, logits, _ = model.forward(cache.kv, cache.batch([(4, [7, 8])]))
    np.testing.assert_allclose(logits, dense(model, [1, 2, 3, 4, 7, 8])[0][4:], atol=2e-5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision(dtype: torch.dtype) -> None:
    model = random_llama(CONFIG, dtype=dtype)
    cache = Cache(model, 1, 4)
    tokens = [5, 9, 2, 60, 33]
    _, logits, _ = model.forward(cache.kv, cache.batch([(0, tokens)]))
    assert logits.dtype == dtype
    np.testing.assert_allclose(logits.float(), dense(model, tokens)[0], atol=0.3, rtol=0.05)


def test_reduced_output_vocabulary(tmp_path: Path) -> None:
    from safetensors.torch import save_file

    model = random_llama(CONFIG)
    sizes = {"qkv": [48, 16, 16], "gate_up": [40, 40]}
    apart = {"norm": model.weights["norm"]}
    short = {
        "qkv": ("q", "k", "v"),
        "gate_up": ("gate", "up"),
        "attention_norm": ("ln1",),
        "mlp_norm": ("ln2",),
        "attention_output": ("o",),
    }
    for name, weight in model.weights.items():
        layer, _, part = name.rpartition(".")
        if layer:
            names = short.get(part, (part,))
            pieces = weight.split(sizes.get(part, [weight.shape[0]]))
            apart |= {f"{layer}.{piece}": tensor.contiguous() for piece, tensor in zip(names, pieces, strict=True)}
    save_file(apart, tmp_path / "draft.safetensors")
    ids = torch.tensor([60, 3, 17], dtype=torch.int32)
    draft = Llama.from_safetensors(tmp_path / "draft.safetensors", CONFIG, embed=model.weights["embed"], output_token_ids=ids)
    assert draft.weights["embed"] is model.weights["embed"]
    assert (draft.vocab_size, draft.input_vocab_size) == (3, 61)
    logits = [m.forward((cache := Cache(m, 1, 4)).kv, cache.batch([(0, [5, 60, 2])]))[1] for m in (model, draft)]
    np.testing.assert_allclose(logits[1], logits[0][:, ids.long()], atol=1e-5)
    with pytest.raises(ModelError, match="embed"):
        Llama.from_safetensors(tmp_path / "draft.safetensors", CONFIG)


def test_refuses_weights_that_do_not_fit() -> None:
    weights = random_llama(CONFIG).weights
    with pytest.raises(ModelError, match=r"0\.down"):
        Llama(CONFIG, {name: weight for name, weight in weights.items() if name != "0.down"})
    with pytest.raises(ModelError, match=r"norm"):
        Llama(CONFIG, {**weights, "norm": weights["norm"][:3]})
    with pytest.raises(ModelError, match=r"bfloat16"):
        Llama(CONFIG, {**weights, "norm": weights["norm"].bfloat16()})
    with pytest.raises(ModelError, match="output_token_ids"):
        Llama(CONFIG, weights, torch.tensor([1, 2]))
    with pytest.raises(ModelError, match="num_kv_heads"):
        replace(CONFIG, num_kv_heads=4)


def write_gguf(path: Path, metadata: dict[str, object], tensors: dict[str, torch.Tensor]) -> None:
    """A GGUF file of F32 tensors."""

    def text(value: str) -> bytes:
        return struct.pack("<Q", len(value.encode())) + value.encode()

    data = b"GGUF" + struct.pack("<IQQ", 3, len(tensors), len(metadata))
    for key, value in metadata.items():
        data += text(key)
        if isinstance(value, str):
            data += struct.pack("<I", 8) + text(value)
        else:
            data += struct.pack("<If", 6, value) if isinstance(value, float) else struct.pack("<II", 4, value)
    offset = 0
    for name, tensor in tensors.items():
        data += (
            text(name)
            + struct.pack("<I", tensor.dim())
            + struct.pack(f"<{tensor.dim()}Q", *reversed(tensor.shape))
            + struct.pack("<IQ", 0, offset)
        )
        offset += -(-4 * tensor.numel() // 32) * 32
    data += b"\0" * (-len(data) % 32)
    for tensor in tensors.values():
        raw = tensor.contiguous().numpy().tobytes()
        data += raw + b"\0" * (-len(raw) % 32)
    path.write_bytes(data)


def gguf_parts(model: Llama) -> tuple[dict[str, object], dict[str, torch.Tensor]]:
    """Metadata and tensors as a converter would write them, rotary halves interleaved."""
    c = model.config
    metadata: dict[str, object] = {
        "general.architecture": "llama",
        "llama.block_count": c.num_layers,
        "llama.embedding_length": c.hidden_size,
        "llama.feed_forward_length": c.intermediate_size,
        "llama.attention.head_count": c.num_heads,
        "llama.attention.head_count_kv": c.num_kv_heads,
        "llama.attention.key_length": c.head_dim,
        "llama.context_length": c.max_len,
        "llama.rope.freq_base": c.rope_theta,
        "llama.attention.layer_norm_rms_epsilon": c.norm_eps,
    }
    tensors = {"token_embd.weight": model.weights["embed"], "output_norm.weight": model.weights["norm"]}
    for layer in range(c.num_layers):
        w = {
            part: model.weights[f"{layer}.{part}"] for part in ("attention_norm", "qkv", "attention_output", "mlp_norm", "gate_up", "down")
        }
        q, k, v = w["qkv"].split([c.num_heads * c.head_dim, *2 * [c.num_kv_heads * c.head_dim]])
        q, k = (m.unflatten(0, (-1, 2, c.head_dim // 2)).transpose(1, 2).flatten(0, 2) for m in (q, k))
        gate, up = w["gate_up"].chunk(2)
        names = ("attn_norm", "attn_q", "attn_k", "attn_v", "attn_output", "ffn_norm", "ffn_gate", "ffn_up", "ffn_down")
        parts = (w["attention_norm"], q, k, v, w["attention_output"], w["mlp_norm"], gate, up, w["down"])
        tensors |= {f"blk.{layer}.{name}.weight": part for name, part in zip(names, parts, strict=True)}
    return metadata, tensors


def test_gguf_round_trip_and_refusals(tmp_path: Path) -> None:
    model = random_llama(CONFIG)
    metadata, tensors = gguf_parts(model)
    path = tmp_path / "model.gguf"
    write_gguf(path, metadata, tensors)
    loaded = Llama.from_gguf(path)
    assert loaded.config == replace(CONFIG, norm_eps=loaded.config.norm_eps)
    assert loaded.weights.keys() == model.weights.keys()
    assert all(torch.equal(loaded.weights[name], weight) for name, weight in model.weights.items())
    assert Llama.from_gguf(path, torch.bfloat16).dtype == torch.bfloat16
    for changed, extra in (
        ({"general.architecture": "qwen2"}, {}),
        ({"llama.rope.scaling.type": "yarn"}, {}),
        ({}, {"blk.0.attn_q.bias": torch.zeros(4)}),
    ):
        write_gguf(path, metadata | changed, tensors | extra)
        with pytest.raises(ModelError):
            Llama.from_gguf(path)
    whole = path.read_bytes()
    for size in (3, 60, len(whole) // 2):
        path.write_bytes(whole[:size])
        with pytest.raises(ModelError):
            Llama.from_gguf(path)
    path.write_bytes(b"GGUF" + struct.pack("<I", 9) + whole[8:])
    with pytest.raises(ModelError, match="version"):
        read_gguf(path)


def test_dequantisation_by_hand() -> None:
    scale, low = np.float16(0.5), np.float16(-2)
    nibbles = bytes(range(16))  # low halves 0..15, high halves 0
    q4_1 = np.frombuffer(scale.tobytes() + low.tobytes() + nibbles, np.uint8)
    assert dequantise(q4_1, 3).tolist() == [0.5 * i - 2 for i in range(16)] + [-2.0] * 16
    q4_0 = np.frombuffer(scale.tobytes() + nibbles, np.uint8)
    assert dequantise(q4_0, 2).tolist() == [0.5 * (i - 8) for i in range(16)] + [-4.0] * 16
    q8_0 = np.frombuffer(scale.tobytes() + np.arange(-16, 16, dtype=np.int8).tobytes(), np.uint8)
    assert dequantise(q8_0, 8).tolist() == [0.5 * i for i in range(-16, 16)]
    assert dequantise(np.frombuffer(low.tobytes(), np.uint8), 1).tolist() == [-2.0]
