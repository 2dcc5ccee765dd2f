"""Every kind of draft of the distillation example at a tiny size: it learns, and what is saved drafts as the student did."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from test_distil import CONFIG, spoken, tiny

import funcspec as fs
from examples.distil.drafts import FILE, KINDS, MASKED, load, resume, save, student_of
from examples.distil.students import Student
from examples.distil.training import Settings, compare, draw_cuts, most_frequent, train
from funcspec.drafters import Drafter
from funcspec.errors import ArgumentError, ArgumentTypeError, FileError, FuncspecError, ModelError
from funcspec.metrics import statistics
from funcspec.models import ForwardBatch
from funcspec.models.llama import Llama, LlamaConfig, random_llama

DRAFTS, MASK = 3, 5
LAYERS = (0, 1, 2, 3)
ONE_PASS = ("medusa", *MASKED)


def student_for(target: Llama, kind: str, **settings: Any) -> Student:
    return student_of(target, kind, **{"depth": DRAFTS, "mask_id": MASK, "cuts": 8} | settings)


def shaken(student: Student) -> Student:
    """The same with noise over its parameters, in numbers that bfloat16 holds: then nothing that it computes is zero or one."""
    generator = torch.Generator().manual_seed(7)
    for name, value in student.parameters.items():
        noise = torch.randn(value.shape, generator=generator) * (0.1 if value.ndim == 1 else 0.3 * value.shape[-1] ** -0.5)
        student.parameters[name] = (value + noise).to(torch.bfloat16).float()
    return student


def states_of(target: Llama, tokens: torch.Tensor) -> dict[int, torch.Tensor]:
    """The target's hidden states of all tokens but the last."""
    length = tokens.shape[1]
    kv = {entry.name: torch.zeros((target.num_layers, 8, 16, *entry.shape)) for entry in target.kv_spec.entries}
    places = torch.arange(length, dtype=torch.int32)
    starts = torch.tensor([0, length], dtype=torch.int32)
    table = torch.arange(8, dtype=torch.int32)[None]
    batch = ForwardBatch(tokens[0], places, starts, starts[1:], places, table, None, length, LAYERS)
    _, _, hidden = target.forward(kv, batch)
    return {layer: states[None, :-1] for layer, states in zip(LAYERS, hidden, strict=True)}


def behind(student: Student, target: Llama, tokens: torch.Tensor) -> list[torch.Tensor]:
    """What the student says behind a text, [H] for each draft. A head's step s is about the same token, seen from a chain of s drafts."""
    last = tokens.shape[1] - 1
    guesses = student.guesses(student.parameters, tokens, states_of(target, tokens), torch.tensor([[last]]))
    foreseen = [last + 1 + draft * (student.kind in ONE_PASS) for draft in range(len(guesses))]
    assert [int(guess.places.flatten()[-1]) for guess in guesses] == foreseen
    return [guess.states[0, -1] for guess in guesses]


@pytest.mark.parametrize("kind", KINDS)
def test_a_saved_draft_says_what_the_student_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    """Every draft is made of the logits that the student computes with gradients, over rounds with a cache, drafts kept and refused."""
    target = tiny()
    written = spoken(target, LAYERS)
    student, ids = shaken(student_for(target, kind)), most_frequent([written], CONFIG.vocab_size, 150).flip(0)
    train(student, [written], 3, target.weights["embed"], ids, Settings(60.0, steps=30, batch=6, learning_rate=3e-3))
    student.parameters = {name: value.to(torch.bfloat16).float() for name, value in student.parameters.items()}
    save(tmp_path, student, ids)
    drafter = load(tmp_path, target)
    model = drafter.kv_model
    forward, said = type(model).forward, list[torch.Tensor]()

    def watched(self: Any, kv: Any, batch: ForwardBatch) -> Any:
        found = forward(self, kv, batch)
        if self is model:
            said.extend(found[1])
        return found

    monkeypatch.setattr(type(model), "forward", watched)
    config = fs.SpecConfig(max_num_reqs=1, max_model_len=64, num_speculative_tokens=DRAFTS, rule=fs.rules.greedy)
    state, _ = fs.admit(fs.init(config, target, drafter), target, drafter, [written.tokens[0, :9].tolist()])
    outputs, kept = target.weights["embed"][ids.long()], 0
    for _ in range(8):
        said.clear()
        text = state.tokens[:, : int(state.num_tokens[0])].clone()
        state, draft = fs.prefill(state, drafter)
        for _ in range(0 if kind in ONE_PASS else DRAFTS - 1):
            state, draft = fs.decode(state, drafter)
        assert len(said) == DRAFTS
        at_once = behind(student, target, text)
        for step, (token, logits) in enumerate(zip(draft.tokens[0].tolist(), said, strict=True)):
            state_there = at_once[step] if kind in ONE_PASS else behind(student, target, text)[step if kind != "standalone" else 0]
            assert torch.allclose(logits, state_there @ outputs.T, atol=1e-4)
            assert token == int(ids[int(logits.argmax())])
            text = torch.cat([text, torch.tensor([[token]], dtype=torch.int32)], 1)
        state, verdict = fs.verify(state, target)
        kept += int(verdict.num_accepted[0])
    assert 0 < kept < 24


@pytest.mark.parametrize("kind", MASKED)
def test_cuts_do_not_see_each_other_nor_what_comes_after_them(kind: str) -> None:
    """What a student says at many cuts at once is what it says of the text as it was at each of them."""
    target = tiny()
    student, passage = shaken(student_for(target, kind)), spoken(target, LAYERS)
    cuts = (torch.tensor([[0, 3, 4, 4, 17, 23, 24]]) + torch.arange(6)[:, None]) % 25
    together = student.guesses(student.parameters, passage.tokens, passage.states, cuts)
    masked = together[1:] if kind == "parallel" else together
    assert len(together) == DRAFTS
    for row in (1, 5):
        for number, cut in enumerate(cuts[row].tolist()):
            states = {layer: values[row : row + 1, :cut] for layer, values in passage.states.items()}
            tokens = passage.tokens[row : row + 1, : cut + 1]
            alone = student.guesses(student.parameters, tokens, states, torch.tensor([[cut]]))
            for one, many in zip(alone[-len(masked) :], masked, strict=True):
                assert torch.allclose(one.states[0, 0], many.states[row, number], atol=1e-4)
                assert int(one.places[0, 0]) == int(many.places[row, number])
            if kind == "parallel":
                assert torch.allclose(alone[0].states[0, -1], together[0].states[row, cut], atol=1e-4)


@pytest.mark.parametrize("kind", KINDS)
def test_every_draft_foresees_the_token_that_the_decoder_takes_it_for(kind: str) -> None:
    """The first draft behind place p is token p + 1, the next p + 2, and so on."""
    target = tiny()
    student, passage = student_for(target, kind), spoken(target, LAYERS)
    cuts = torch.tensor([[6]] * 6)
    for draft, guess in enumerate(student.guesses(student.parameters, passage.tokens, passage.states, cuts)):
        places = guess.places.expand(6, -1)
        assert guess.states.shape == (6, places.shape[1], CONFIG.hidden_size)
        if kind in MASKED and (kind, draft) != ("parallel", 0):
            assert places.tolist() == [[7 + draft]] * 6
        else:
            first = {"standalone": 1, "parallel": 1}.get(kind, 2 + draft)
            assert places[0].tolist() == list(range(first, first + places.shape[1]))


@pytest.mark.parametrize("kind", KINDS)
def test_training_teaches(tmp_path: Path, kind: str) -> None:
    """A small draft comes clearly nearer to its target, at each of its drafts; what is frozen stays; the decoder keeps some of them."""
    target = tiny()
    written = [spoken(target, LAYERS, rows=24, new=28)]
    student = student_for(target, kind)
    ids = most_frequent(written, CONFIG.vocab_size, 100)
    embed = target.weights["embed"]
    frozen, counts = embed.clone(), written[0].counts
    cuts = draw_cuts(counts, student.cuts, torch.Generator().manual_seed(9))

    def distance() -> torch.Tensor:
        guesses = student.guesses(student.parameters, written[0].tokens, written[0].states, cuts)
        return compare(guesses, written[0].states[3], counts, embed, embed[ids.long()], ids, variation=1.0)

    before = distance()
    # Medusa's heads, which see one state alone, begin as the target's own and have the longest way to go.
    steps, rate = (200, 1e-2) if kind == "medusa" else (60, 3e-3)
    found = train(student, written, 3, embed, ids, Settings(120.0, steps=steps, batch=12, learning_rate=rate))
    assert found["steps"] == steps
    assert len(found["loss_by_draft"]) == len(before) == (1 if kind == "standalone" else DRAFTS)
    assert (distance() < before - 0.05).all()
    assert torch.equal(embed, frozen)
    save(tmp_path, student, ids)
    prompts = [row[:5] for row in written[0].tokens[::3].tolist()]
    assert sum(outputs(target, load(tmp_path, target), prompts)[1].accepted) > 10


def outputs(target: Llama, drafter: Drafter | None, prompts: list[list[int]], heat: float = 0.0) -> tuple[list[list[int]], Any]:
    """What comes out for each prompt, and counts."""
    rule = fs.rules.coupled if heat else fs.rules.greedy
    config = fs.SpecConfig(max_num_reqs=3, max_model_len=48, num_speculative_tokens=DRAFTS, rule=rule)
    emissions = list(fs.generate(config, target, drafter, prompts, seeds=range(len(prompts)), temperature=heat, max_tokens=24))
    texts = [[token for emission in emissions if emission.prompt_index == row for token in emission.tokens] for row in range(len(prompts))]
    return texts, statistics(emissions, DRAFTS)


@pytest.mark.parametrize("kind", KINDS)
def test_a_saved_draft_is_trained_further(tmp_path: Path, kind: str) -> None:
    """It is taken up as it was left, its tokens too, and then learns more."""
    target = tiny()
    written, matrix = spoken(target, LAYERS), target.weights["embed"]
    ids = most_frequent([written], CONFIG.vocab_size, 150).flip(0)
    student = student_for(target, kind)
    first = train(student, [written], 3, matrix, ids, Settings(60.0, steps=20, batch=6, learning_rate=3e-3))
    resumed, own_ids = resume(save(tmp_path, student, ids), target, DRAFTS, 8)
    assert torch.equal(own_ids, ids)
    assert (resumed.kind, resumed.layers) == (student.kind, student.layers)
    for name, value in student.parameters.items():
        assert torch.equal(resumed.parameters[name], value.to(torch.bfloat16).float()), name
    cuts = torch.tensor([[6, 9]] * 6)
    for mine, its in zip(*(one.guesses(one.parameters, written.tokens, written.states, cuts) for one in (resumed, student)), strict=True):
        assert torch.equal(mine.places, its.places) and torch.allclose(mine.states, its.states, atol=0.05)
    further = train(resumed, [written], 3, matrix, own_ids, Settings(60.0, steps=40, batch=6, learning_rate=3e-3))
    assert further["loss"] < first["loss"]


@pytest.mark.parametrize(("kind", "change"), [("mtp", {"hidden_size": 24}), ("standalone", {"intermediate_size": 24})])
def test_a_draft_for_another_target_is_not_trained_further(tmp_path: Path, kind: str, change: dict[str, int]) -> None:
    path = save(tmp_path, student_for(tiny(), kind), torch.arange(20, dtype=torch.int32))
    other = random_llama(LlamaConfig(**vars(CONFIG) | change), seed=0)
    with pytest.raises(ModelError, match=r"path: expected .* Fix: start from a draft of this target"):
        resume(path, other)


@pytest.mark.parametrize("kind", KINDS)
def test_a_saved_draft_changes_no_text(tmp_path: Path, kind: str) -> None:
    target = tiny()
    save(tmp_path, student_for(target, kind), torch.arange(0, CONFIG.vocab_size, 2, dtype=torch.int32))
    drafter = load(tmp_path, target)
    prompts = [[1, 2, 3], [200], [9, 9, 8, 7, 6, 5, 4], [30, 31]]
    for heat in (0.0, 1.0):
        texts, counted = outputs(target, drafter, prompts, heat)
        assert texts == outputs(target, None, prompts, heat)[0]
        assert sum(counted.drafted) > 20


@pytest.mark.parametrize(
    ("kind", "settings", "error", "says"),
    [
        ("other", {}, ArgumentError, "kind: expected one of standalone, "),
        ("standalone", {"layers": (0, 3)}, ModelError, "layers: expected numbers from 0 to 2"),
        ("parallel", {"layers": (-1,)}, ModelError, "layers: expected numbers from 0 to 2"),
        ("parallel", {"mask_id": None}, ArgumentError, "mask_id: expected a token for the masks of 'parallel'"),
        ("dflash", {"mask_id": None}, ArgumentError, "mask_id: expected a token for the masks of 'dflash'"),
        ("dflash", {"mask_id": 211}, ModelError, "mask_id: expected below 211"),
        ("parallel", {"mask_id": -1}, ArgumentError, "mask_id: expected 0 or more"),
        ("dflash", {"layers": (1, 4)}, ModelError, "layers: expected numbers from 0 to 3"),
        ("dflash", {"cuts": 0}, ArgumentError, "cuts: expected at least 1"),
        ("medusa", {"layers": (2,)}, ModelError, "layers: expected the last hidden state, 3"),
        ("medusa", {"depth": 0}, ArgumentError, "depth: expected at least 1"),
        ("mtp", {"depth": 2.0}, ArgumentTypeError, "depth: expected an int"),
        ("mtp", {"layers": (1, 3)}, ModelError, "target_layers: expected one with 'mtp'"),
        ("eagle", {"layers": (1, 3)}, ModelError, "target_layers: expected one with 'eagle'"),
        ("eagle3", {"layers": (3,)}, ModelError, "target_layers: expected two or more"),
    ],
)
def test_what_does_not_go_together_is_refused(kind: str, settings: dict[str, Any], error: type[FuncspecError], says: str) -> None:
    with pytest.raises(error) as caught:
        student_for(tiny(), kind, **settings)
    assert str(caught.value).startswith(says)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("change", [{"hidden_size": 40}, {"vocab_size": 150}])
def test_a_draft_for_another_target_is_refused(tmp_path: Path, kind: str, change: dict[str, int]) -> None:
    save(tmp_path, student_for(tiny(), kind), torch.arange(100, 200, dtype=torch.int32))
    with pytest.raises(ModelError):
        load(tmp_path, random_llama(LlamaConfig(**vars(CONFIG) | change)))


def test_a_draft_that_reads_more_layers_than_there_are_is_refused(tmp_path: Path) -> None:
    save(tmp_path, student_for(tiny(), "mtp"), torch.arange(9, dtype=torch.int32))
    with pytest.raises(ModelError, match=r"target: expected a target with hidden states \(3,\)"):
        load(tmp_path, random_llama(LlamaConfig(**vars(CONFIG) | {"num_layers": 2})))


def test_folders_without_a_draft_are_refused(tmp_path: Path) -> None:
    with pytest.raises(FileError, match=r"^path: expected a safetensors file, got"):
        load(tmp_path, tiny())
    about = {"kind": "oracle", "target_layers": json.dumps([])}
    save_file({"token_ids": torch.zeros(1, dtype=torch.int32)}, tmp_path / FILE, about)
    with pytest.raises(FileError, match=r"^path: expected a draft of a kind among .*, got 'oracle'"):
        load(tmp_path, tiny())
