"""The distillation example at a tiny size: what the target writes, and how drafts are compared with it. See also `test_distil_kinds.py`."""

import pytest
import torch
from torch.nn import functional as F

from examples.distil import prompts
from examples.distil.corpus import Passage, Source, passages, write
from examples.distil.students import Guesses, Truncated
from examples.distil.training import compare, draw_cuts, most_frequent
from funcspec.errors import ModelError
from funcspec.kernels.op import Op
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


@pytest.mark.parametrize("kernels", ["reference", "triton"])
def test_it_writes_the_same_with_all_kernels(kernel_device: str, monkeypatch: pytest.MonkeyPatch, kernels: str) -> None:
    """Prompts at once and then token by token, through the cache: what a pass over the whole text says, as on a GPU."""
    real = Op.__call__
    monkeypatch.setattr(Op, "__call__", lambda op, *, backend=None, **arguments: real(op, backend=kernels, **arguments))
    target = Llama(CONFIG, {name: weight.to(kernel_device) for name, weight in tiny().weights.items()})
    start = torch.randint(0, CONFIG.vocab_size, (3, 5), generator=torch.Generator().manual_seed(1), dtype=torch.int32).to(kernel_device)
    passage = write(target, start, 14, torch.zeros(3, device=kernel_device), (3,), seed=3)
    whole = write(target, passage.tokens[:, :-1].contiguous(), 1, torch.zeros(3, device=kernel_device), (3,), seed=3)
    assert torch.equal(whole.tokens, passage.tokens)
    assert torch.allclose(whole.states[3], passage.states[3], atol=1e-4)


def test_what_follows_an_end_token_does_not_count() -> None:
    target = tiny()
    start = torch.zeros(4, 3, dtype=torch.int32)
    settings = {"rows": 4, "new": 30, "layers": (3,), "seconds": 60.0, "most": 3}
    free = list(passages(target, (Source("one", lambda rows, seed: start, (1.0,)),), end_tokens=(), **settings))
    assert len(free) == 3
    assert all(passage.counts[:, 3:].all() for passage in free)
    ends = {int(free[0].tokens[0, 8]), int(free[0].tokens[1, 20])}
    for turns in (1, 2):
        source = Source("one", lambda rows, seed: start, (1.0,), turns)
        (passage,) = passages(target, (source,), end_tokens=tuple(ends), **settings | {"most": 1})
        assert torch.equal(passage.tokens, free[0].tokens)
        for tokens, counts in zip(passage.tokens[:, 3:].tolist(), passage.counts[:, 3:].tolist(), strict=True):
            places = [place for place, token in enumerate(tokens) if token in ends]
            last = places[turns - 1] if len(places) >= turns else len(tokens) - 1
            assert counts == [place <= last for place in range(len(tokens))]


def test_texts_past_the_targets_positions_are_refused() -> None:
    with pytest.raises(ModelError, match=r"at most 128 tokens, got 5 \+ 124"):
        spoken(tiny(), (3,), new=124)


def test_a_truncated_student_with_all_layers_is_the_target() -> None:
    """So the target finds nothing to tell it: what it says of each token is what the target said."""
    target = tiny()
    passage = spoken(target, (3,))
    student = Truncated.of(target, (0, 1, 2))
    (guess,) = student.guesses(student.parameters, passage.tokens, passage.states, passage.tokens[:, :0])
    assert torch.allclose(guess.states[:, :-1], passage.states[3], atol=1e-4)
    matrix, every = target.weights["embed"], torch.arange(CONFIG.vocab_size)
    assert compare([guess], passage.states[3], passage.counts, matrix, matrix, every, variation=1.0).abs() < 1e-4


@pytest.mark.parametrize("variation", [0.0, 0.5])
def test_each_guess_is_held_against_what_the_target_said_of_its_token(variation: float) -> None:
    """Guesses of places all over the text and past its end, the same for all rows or of their own; and one of tokens that do not count."""
    generator = torch.Generator().manual_seed(4)
    rows, length, size, vocab = 3, 9, 8, 17
    final, matrix = torch.randn(rows, length - 1, size, generator=generator), torch.randn(vocab, size, generator=generator)
    counts, ids = torch.rand(rows, length, generator=generator) < 0.6, torch.tensor([3, 11, 0, 16, 5])
    shared, own = torch.tensor([2, 8, 9, 4]), torch.randint(1, 12, (rows, 7), generator=generator)
    none = torch.full((rows, 2), length)
    guesses = [Guesses(torch.randn(rows, places.shape[-1], size, generator=generator), places) for places in (shared, own, none)]
    found = compare(guesses, final, counts, matrix, matrix[ids], ids, variation)
    for guess, loss in zip(guesses, found.tolist(), strict=True):
        expected = []
        for row in range(rows):
            for place, state in zip(guess.places.expand(rows, -1)[row].tolist(), guess.states[row], strict=True):
                if place < length and counts[row, place]:
                    told = (matrix @ final[row, place - 1]).double().softmax(0)[ids]
                    said = (matrix[ids] @ state).double().softmax(0)
                    apart = 1 - float(torch.minimum(told, said).sum())
                    expected.append((1 - variation) * -float((told * said.log()).sum()) + variation * apart)
        assert loss == pytest.approx(sum(expected) / max(len(expected), 1), abs=1e-5)
    assert found[2] == 0


def test_cuts_lie_before_tokens_that_count() -> None:
    """All of these are drawn, about equally often; a text without any gives some place of its own."""
    counts = torch.tensor([[0, 0, 1, 1, 0, 1, 1], [0, 1, 0, 0, 0, 0, 0], [0] * 7], dtype=torch.bool)
    cuts = draw_cuts(counts, 4000, torch.Generator().manual_seed(0))
    assert F.one_hot(cuts[0], 7).float().mean(0)[[1, 2, 4, 5]].tolist() == pytest.approx([0.25] * 4, abs=0.03)
    assert (cuts[1] == 0).all()
    assert cuts[2].min() >= 0 and cuts[2].max() <= 5


def test_the_most_frequent_tokens_come_first() -> None:
    tokens = torch.tensor([[9, 5, 5, 7, 7, 7, 2, 3]], dtype=torch.int32)
    counts = torch.tensor([[False, True, True, True, True, True, True, True]])
    assert most_frequent([Passage(tokens, counts, {})], 10, 4).tolist() == [7, 5, 2, 3]


def test_evaluation_texts_are_not_trained_on() -> None:
    training, held_out = prompts.training_texts(), prompts.held_out_texts()
    assert len(training) > 100
    assert len(held_out) >= 10
    assert not set(training) & set(held_out)
