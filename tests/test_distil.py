"""The distillation example at a tiny size: what it writes, what it trains, and that what it saves drafts."""

from pathlib import Path

import pytest
import torch
from torch.nn import functional as F

import funcspec as fs
from examples.distil import prompts
from examples.distil.corpus import Passage, Source, passages, write
from examples.distil.drafts import load, save
from examples.distil.students import Head, Truncated
from examples.distil.training import Settings, most_frequent, train
from funcspec.models import ForwardBatch
from funcspec.models.llama import Llama, LlamaConfig

CONFIG = LlamaConfig(
    vocab_size=211, num_layers=3, hidden_size=48, intermediate_size=96, num_heads=6, num_kv_heads=2, head_dim=8, max_len=128
)


def tiny() -> Llama:
    generator = torch.Generator().manual_seed(0)
    weights = {}
    for name, shape in CONFIG.weight_shapes().items():
        weights[name] = torch.ones(shape) if len(shape) == 1 else torch.randn(shape, generator=generator) / shape[-1] ** 0.5
    weights["embed"] = 0.3 * torch.randn(CONFIG.vocab_size, CONFIG.hidden_size, generator=generator)
    return Llama(CONFIG, weights)


def spoken(target: Llama, layers: tuple[int, ...], rows: int = 6, new: int = 20) -> Passage:
    start = torch.randint(0, CONFIG.vocab_size, (rows, 5), generator=torch.Generator().manual_seed(1), dtype=torch.int32)
    return write(target, start, new, torch.tensor([0.0, 1.0, 0.7] * (rows // 3)), layers, seed=3)


def test_the_target_writes_what_it_foretells() -> None:
    """Greedy rows are the argmax of the kept states, and do not depend on the rows written beside them."""
    target = tiny()
    passage = spoken(target, (1, 3))
    logits = passage.states[3] @ target.weights["embed"].T
    assert torch.equal(passage.tokens[0, 5:], logits[0, 4:].argmax(-1).int())
    assert not passage.counts[:, :5].any()
    assert passage.counts[:, 5:].all()
    alone = write(target, passage.tokens[3:4, :5], 20, torch.zeros(1), (3,), seed=6)
    assert torch.equal(alone.tokens[0], passage.tokens[3])
    assert torch.allclose(alone.states[3][0], passage.states[3][3], atol=1e-5)
    sampled = {tuple(row) for row in passage.tokens[1::3].tolist()}
    assert len(sampled) == 2


def test_what_follows_an_end_token_does_not_count() -> None:
    target = tiny()
    start = torch.zeros(4, 3, dtype=torch.int32)
    settings = {"rows": 4, "new": 30, "layers": (3,), "seconds": 60.0, "most": 3}
    free = list(passages(target, (Source("one", lambda rows, seed: start, (1.0,)),), end_token=CONFIG.vocab_size, **settings))
    assert len(free) == 3
    end = int(free[0].tokens[0, 8])
    for turns in (1, 2):
        source = Source("one", lambda rows, seed: start, (1.0,), turns)
        (passage,) = passages(target, (source,), end_token=end, **settings | {"most": 1})
        for tokens, counts in zip(passage.tokens[:, 3:].tolist(), passage.counts[:, 3:].tolist(), strict=True):
            places = [place for place, token in enumerate(tokens) if token == end]
            last = places[turns - 1] if len(places) >= turns else len(tokens) - 1
            assert counts == [place <= last for place in range(len(tokens))]


def test_a_truncated_student_with_all_layers_is_the_target() -> None:
    target = tiny()
    passage = spoken(target, (3,))
    student = Truncated.of(target, range(3))
    (out,) = student.hidden(student.parameters, passage.tokens, passage.states)
    assert torch.allclose(out[:, :-1], passage.states[3], atol=1e-4)


@pytest.mark.parametrize("kind", ["standalone", "eagle", "eagle3"])
def test_training_teaches(kind: str) -> None:
    """A small draft comes clearly nearer to its target within 40 steps; what is frozen stays as it was."""
    target = tiny()
    layers = (1, 3)
    written = [spoken(target, layers, rows=24, new=28)]
    student = Truncated.of(target, [2]) if kind == "standalone" else Head.of(target, kind, (3,) if kind == "eagle" else layers, 2)
    ids = most_frequent(written, CONFIG.vocab_size, 100)
    embed = target.weights["embed"].clone()

    def distance() -> float:
        outs = student.hidden(student.parameters, written[0].tokens, written[0].states)
        draft = F.linear(outs[0], embed[ids.long()]).softmax(-1)
        told = F.linear(written[0].states[3], embed).softmax(-1)[:, student.lag :, ids.long()]
        return float(1 - torch.minimum(draft[:, : told.shape[1]], told).sum(-1).mean())

    before = distance()
    found = train(student, written, 3, embed, ids, Settings(120.0, steps=40, batch=12, learning_rate=3e-3))
    assert found["steps"] == 40
    assert distance() < before - 0.05
    assert torch.equal(target.weights["embed"], embed)


def test_the_most_frequent_tokens_come_first() -> None:
    tokens = torch.tensor([[9, 5, 5, 7, 7, 7, 2, 3]], dtype=torch.int32)
    counts = torch.tensor([[False, True, True, True, True, True, True, True]])
    assert most_frequent([Passage(tokens, counts, {})], 10, 4).tolist() == [7, 5, 2, 3]


def test_evaluation_texts_are_not_trained_on() -> None:
    training, held_out = prompts.training_texts(), prompts.held_out_texts()
    assert len(training) > 100
    assert len(held_out) >= 10
    assert not set(training) & set(held_out)


@pytest.mark.parametrize("kind", ["standalone", "eagle", "eagle3"])
def test_a_saved_draft_says_what_the_student_says(tmp_path: Path, kind: str) -> None:
    """Every draft of a chain that is accepted is the arg-max of the student's step at that place."""
    target, layers = tiny(), (0, 2, 3)
    student = Truncated.of(target, [0, 2]) if kind == "standalone" else Head.of(target, kind, (3,) if kind == "eagle" else layers, 3)
    student.parameters = {name: value.to(torch.bfloat16).float() for name, value in student.parameters.items()}
    ids = torch.randperm(CONFIG.vocab_size, generator=torch.Generator().manual_seed(2))[:150].to(torch.int32)
    save(tmp_path, kind, student, ids)
    drafter = load(tmp_path, target)
    prompt = list(range(40, 52))
    config = fs.SpecConfig(max_num_reqs=1, max_model_len=64, num_speculative_tokens=3, rule=fs.rules.greedy)
    state, _ = fs.admit(fs.init(config, target, drafter), target, drafter, [prompt])
    judged = 0
    for _ in range(8):
        count = int(state.num_tokens[0])
        state, draft = fs.prefill(state, drafter)
        state, draft = fs.decode(state, drafter)
        state, draft = fs.decode(state, drafter)
        text = state.tokens[:, :count].clone()
        for step, token in enumerate(draft.tokens[0].tolist()):
            passage = states_of(target, text, layers)
            outs = student.hidden(student.parameters, text, passage)
            # A head's later steps go on from its own states, one index further each.
            out = outs[step if kind != "standalone" else 0][0, -1]
            assert token == int(ids[int((out @ target.weights["embed"][ids.long()].T).argmax())])
            text = torch.cat([text, torch.tensor([[token]], dtype=torch.int32)], 1)
            judged += 1
        state, _ = fs.verify(state, target)
    assert judged == 24


def states_of(target: Llama, tokens: torch.Tensor, layers: tuple[int, ...]) -> dict[int, torch.Tensor]:
    """The target's hidden states of all tokens but the last."""
    length = tokens.shape[1]
    kv = {entry.name: torch.zeros((target.num_layers, 4, 16, *entry.shape)) for entry in target.kv_spec.entries}
    places = torch.arange(length, dtype=torch.int32)
    starts = torch.tensor([0, length], dtype=torch.int32)
    table = torch.arange(4, dtype=torch.int32)[None]
    batch = ForwardBatch(tokens[0], places, starts, starts[1:], places, table, None, length, layers)
    _, _, hidden = target.forward(kv, batch)
    return {layer: states[None, :-1] for layer, states in zip(layers, hidden, strict=True)}
