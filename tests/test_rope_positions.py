"""Models that rotate by other numbers than the places in the cache: M-RoPE, for toys that notice a wrong one and for a real model."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
import torch
from oracle import VOCAB, config, output

import funcspec as fs
from funcspec.drafters import ngram, standalone
from funcspec.errors import ArgumentError, ArgumentTypeError, ModelError
from funcspec.interop import jax_model
from funcspec.models import ChecksumModel, ForwardBatch
from funcspec.models.base import KV
from funcspec.models.toy import read_prefixes, write_tokens

AXES, LENGTH = 3, 40
FACTORS = (3, 5, 7)


@dataclass(frozen=True)
class RopeModel(ChecksumModel):
    """next(sequence) = (1 + sum of (weight + 1) * token) mod vocab_size, a token's weight being made of its rotary positions."""

    rope_axes: int = AXES

    def forward(self, kv: KV, batch: ForwardBatch) -> tuple[KV, torch.Tensor, tuple[torch.Tensor, ...]]:
        assert batch.rope_positions is not None
        assert batch.rope_positions.shape == (AXES, len(batch.input_ids))
        weights = (batch.rope_positions * torch.tensor(FACTORS, dtype=torch.int32)[:, None]).sum(0).int()
        write_tokens(kv, replace(batch, positions=weights))
        tokens, stored, visible = read_prefixes(kv, batch)
        total = ((stored.long() + 1) * tokens.long() * visible).sum(1)
        return kv, self._logits(self._answer((1 + total) % self.vocab_size)), ()


@dataclass(frozen=True)
class RopeDraft(RopeModel):
    """Right unless the right token is divisible by 3, then one too high."""

    def _answer(self, token: torch.Tensor) -> torch.Tensor:
        return torch.where(token % 3 == 0, (token + 1) % self.vocab_size, token)


TARGET, DRAFTER = RopeModel(), standalone(RopeDraft())
PROMPTS = [[5, 6, 7, 8], [1, 2], [9, 9, 4]]
GIVEN: list[Any] = [
    np.array([[0, 1, 1, 3], [0, 1, 2, 3], [0, 1, 1, 3]]),  # an image of one column and two rows, then text
    None,
    torch.tensor([[0, 0, 6], [2, 0, 6], [1, 5, 6]]),
]


def expected(prompt: list[int], given: Any, count: int) -> list[int]:
    """Plain greedy decoding, written out."""
    turned = np.tile(np.arange(len(prompt)), (AXES, 1)) if given is None else np.asarray(given)
    tokens, made = list(prompt), []
    for _ in range(count):
        behind = [int(turned.max()) + 1 + place for place in range(len(tokens) - len(prompt))]
        weights = [sum(factor * int(turned[axis, at]) for axis, factor in enumerate(FACTORS)) for at in range(len(prompt))]
        weights += [sum(FACTORS) * position for position in behind]
        made.append((1 + sum((weight + 1) * token for weight, token in zip(weights, tokens, strict=True))) % VOCAB)
        tokens.append(made[-1])
    return made


WANTED = [expected(prompt, given, 20) for prompt, given in zip(PROMPTS, GIVEN, strict=True)]


def started(drafter: Any = DRAFTER, target: Any = TARGET, **settings: Any) -> fs.SpecState:
    state = fs.init(config(4, LENGTH, 3, block_size=4), target, drafter)
    return fs.admit(state, target, drafter, PROMPTS, rope_positions=GIVEN, chunk=2, max_tokens=20, rows=[0, 2, 3], **settings)[0]


def outputs(state: fs.SpecState) -> list[list[int]]:
    return [output(state, row) for row in (0, 2, 3)]


def finished(state: fs.SpecState, drafter: Any = DRAFTER, target: Any = TARGET, *, donate: bool = False) -> list[list[int]]:
    while fs.any_active(state):
        state, _ = fs.step_round(state, target, drafter, donate=donate)
    return outputs(state)


@pytest.fixture(params=[False, True], ids=["pure", "donated"])
def donate(request: pytest.FixtureRequest) -> bool:
    return request.param


@pytest.mark.parametrize("drafter", [DRAFTER, ngram(), None, standalone(ChecksumModel())], ids=["same", "none", "plain", "no axes"])
def test_every_token_has_its_rotary_positions(donate: bool, drafter: Any) -> None:
    """Those of the prompt as they were given, later ones on from the largest; drafts and target alike."""
    state, accepted = started(drafter, donate=donate), 0
    while fs.any_active(state):
        state, verdict = fs.step_round(state, TARGET, drafter, donate=donate)
        accepted += int(verdict.num_accepted.sum())
    assert outputs(state) == WANTED
    assert (accepted > 10) == (drafter is DRAFTER)


def test_without_any_they_are_the_positions() -> None:
    state = fs.init(config(1, LENGTH, 3), TARGET, DRAFTER)
    state, _ = fs.admit(state, TARGET, DRAFTER, [PROMPTS[0]], max_tokens=20)
    while fs.any_active(state):
        state, _ = fs.step_round(state, TARGET, DRAFTER)
    assert output(state, 0) == expected(PROMPTS[0], None, 20)
    (emissions,) = [[e.tokens for e in fs.generate(config(1, LENGTH, 3), TARGET, DRAFTER, [PROMPTS[0]], max_tokens=20)]]
    assert [token for tokens in emissions for token in tokens] == expected(PROMPTS[0], None, 20)


def test_copies_of_a_state_take_them_along(tmp_path: Path) -> None:
    """Forks, snapshots with and without KV, files, preempted rows and rows cut back."""
    state = started()
    for _ in range(2):
        state, _ = fs.step_round(state, TARGET, DRAFTER)
    for kv in (True, False):
        assert finished(fs.restore(fs.snapshot(state, kv=kv), TARGET, DRAFTER)) == WANTED
    fs.save(state, tmp_path / "state.safetensors")
    assert finished(fs.load(tmp_path / "state.safetensors", TARGET, DRAFTER)) == WANTED
    paused, other = fs.snapshot(state, rows=[0], kv=False), fs.release(state, [0])
    other, _ = fs.admit(other, TARGET, DRAFTER, [[3]], rows=[0], max_tokens=4)
    other = fs.resume(other, paused, TARGET, DRAFTER, rows=[1])
    while fs.any_active(other):
        other, _ = fs.step_round(other, TARGET, DRAFTER)
    assert [output(other, row) for row in (1, 2, 3)] == WANTED and output(other, 0) == expected([3], None, 4)
    assert finished(fs.fork(state), donate=True) == WANTED
    assert finished(fs.truncate(state, {0: len(PROMPTS[0]) + 1})) == WANTED
    middle, _ = fs.prefill(state, DRAFTER)
    assert finished(fs.verify(fs.restore(fs.snapshot(middle)), TARGET)[0]) == WANTED
    assert finished(state) == WANTED


def test_snapshots_tell_them_apart() -> None:
    state = fs.init(config(1, LENGTH, 0), TARGET)
    one, other = (fs.admit(state, TARGET, None, [[0, 0, 5]], rope_positions=[[[0, at, 2]] * AXES])[0] for at in (1, 0))
    assert torch.equal(one.tokens, other.tokens) and fs.snapshot(one) != fs.snapshot(other)


@pytest.mark.jax_on_cpu
def test_states_of_jax_go_on_alike() -> None:
    with jax.default_device(jax.devices("cpu")[0]):
        target, drafter = jax_model(TARGET), standalone(jax_model(RopeDraft()))
        state = started(drafter, target)
        turn = jax.jit(lambda state: fs.step_round(state, target, drafter))
        for _ in range(3):
            state, _ = turn(state)
        assert finished(fs.restore(fs.snapshot(state), TARGET, DRAFTER)) == WANTED
        assert finished(fs.restore(fs.snapshot(state, kv=False), target, drafter), drafter, target) == WANTED


def test_a_real_model_rotates_by_them() -> None:
    """Qwen2-VL's language model: greedy decoding equals whole passes of transformers with the same position ids."""
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    shape = {"vocab_size": 61, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64}
    rotary = {"rope_type": "default", "rope_theta": 100.0, "mrope_section": [1, 1, 2]}
    text = shape | heads | {"rope_parameters": rotary, "eos_token_id": None, "bos_token_id": None}
    vision = {"depth": 1, "embed_dim": 8, "hidden_size": 32, "num_heads": 2}
    lm = transformers.Qwen2VLForConditionalGeneration(transformers.Qwen2VLConfig(text_config=text, vision_config=vision)).eval()
    target = fs.models.huggingface(lm)
    assert target.rope_axes == 3
    prompt, given = [5, 6, 7, 8, 9], np.array([[0, 1, 1, 1, 9], [0, 1, 4, 2, 9], [0, 1, 2, 6, 9]])
    drafter = standalone(fs.models.huggingface(lm))
    for positions in (given, None):
        state = fs.init(config(1, 32, 2), target, drafter)
        state, _ = fs.admit(state, target, drafter, [prompt], rope_positions=[positions], max_tokens=12)
        while fs.any_active(state):
            state, _ = fs.step_round(state, target, drafter)
        tokens, turned = list(prompt), np.tile(np.arange(5), (3, 1)) if positions is None else given
        for _ in range(12):
            ids = torch.tensor(turned)[:, None]
            with torch.no_grad():
                tokens.append(int(lm(input_ids=torch.tensor([tokens]), position_ids=ids).logits[0, -1].argmax()))
            turned = np.concatenate([turned, np.full((3, 1), turned.max() + 1)], 1)
        assert output(state, 0) == tokens[5:]


def test_what_does_not_fit_is_refused() -> None:
    state = fs.init(config(1, LENGTH, 0), TARGET)

    def refused(error: type[Exception], match: str, given: Any, target: Any = TARGET, at: Any = state) -> None:
        with pytest.raises(error, match=match):
            fs.admit(at, target, None, [[1, 2]], rope_positions=given)
        assert not fs.any_active(at)

    plain = ChecksumModel()
    refused(ArgumentError, "^rope_positions: expected None, as the target has none", [[[0, 1]]], plain, fs.init(config(1), plain))
    refused(ArgumentError, "^rope_positions: expected 1 arrays, one a prompt", [])
    refused(ArgumentError, "^rope_positions: expected 1 arrays, one a prompt", 3)
    refused(ArgumentError, r"^rope_positions\[0\]: expected shape \[3, 2\]", [[[0, 1]]])
    refused(ArgumentError, r"^rope_positions\[0\]: expected shape \[3, 2\]", [[[0, 1, 2]] * 3])
    refused(ArgumentTypeError, r"^rope_positions\[0\]: expected integers \[3, 2\]", [[[0.0, 1.0]] * 3])
    refused(ArgumentTypeError, r"^rope_positions\[0\]: expected integers \[3, 2\]", [[[0], [0, 1], [0]]])
    refused(ArgumentTypeError, r"^rope_positions\[0\]: expected integers", ["ab"])
    refused(ArgumentError, r"^rope_positions\[0\]: expected positions from 0 to 2147483607, got -1 to 1", [[[-1, 1]] * 3])
    refused(ArgumentError, r"^rope_positions\[0\]: expected positions from 0 to", [[[0, 2**31 - 1]] * 3])
    with pytest.raises(ModelError, match=r"^drafter: expected a draft with 0 or 3 rotary positions a token, .* got one with 2"):
        fs.init(config(1), TARGET, standalone(RopeDraft(rope_axes=2)))
    with pytest.raises(ModelError, match=r"^target.rope_axes: expected an int of 0 or more"):
        fs.init(config(1), RopeModel(rope_axes=-1))
    with pytest.raises(ModelError, match="3 rotary positions"):
        fs.verify(state, plain)
