"""The pieces of `python -m benchmarks.cpu_peers` over tiny random weights: what they compute, not how long anything takes."""

import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[1]))  # benchmarks are no part of the installed package
pytest.importorskip("transformers", minversion="5.24", exc_type=ImportError)

import funcspec as fs
from benchmarks import cpu_peers, peers
from benchmarks.contest import Aim, Case, Company, Contest, Entrant, Sample, hold
from benchmarks.decoding import Settings
from funcspec.models.llama import Llama, LlamaConfig, random_llama

VOCAB, REDUCED = 97, 60
SHAPE = LlamaConfig(VOCAB, 3, 64, 96, 4, 2, 16, 256, 500.0)
CASES = [[[5, 6, 7]], [[40, 2, 9, 9]], [[1] * 20]]
SETTINGS = Settings("cpu", max_tokens=9, max_model_len=64, stop_ids=(96,))


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    """The models are too small for two, and on a busy machine threads wait for each other."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def models() -> cpu_peers.Models:
    """A target with a head of its own, and its first layer as a draft that knows a part of the vocabulary."""
    tied = random_llama(SHAPE, 0)
    head = torch.randn(VOCAB, 64, generator=torch.Generator().manual_seed(5))
    ids = torch.randperm(VOCAB, generator=torch.Generator().manual_seed(6))[:REDUCED].int()
    target = Llama(SHAPE, {**tied.weights, "head": head})
    draft = Llama(replace(SHAPE, num_layers=1), {**tied.weights, "head": head[ids.long()]}, ids)
    return cpu_peers.make_models(target, fs.drafters.standalone(draft, ids))


def plain_outputs(models: cpu_peers.Models, cases: Sequence[Case], stop_ids: tuple[int, ...] = SETTINGS.stop_ids) -> list[list[int]]:
    config = fs.SpecConfig(1, 64, 0, fs.rules.greedy)
    found = []
    for case in cases:
        for prompt in case:
            emitted = fs.generate(config, models.target, None, [prompt], max_tokens=SETTINGS.max_tokens, stop_ids=stop_ids)
            found.append([token for emission in emitted for token in emission.tokens])
    return found


def run_all(found: Contest, repeat: int = 0) -> dict[str, list[list[int]]]:
    return {entrant.name: [output for case in found.cases for output in entrant.run(case, repeat).outputs] for entrant in found.entrants}


@pytest.mark.parametrize("stopping", [False, True])
def test_greedy_contests_give_one_output(models: cpu_peers.Models, stopping: bool) -> None:
    expected = plain_outputs(models, CASES)
    stop_ids = (expected[0][4], expected[2][7]) if stopping else SETTINGS.stop_ids
    settings, expected = replace(SETTINGS, stop_ids=stop_ids), plain_outputs(models, CASES, stop_ids)
    assert (min(map(len, expected)) < SETTINGS.max_tokens) == stopping
    for found in (
        cpu_peers.plain(models, settings, CASES),
        cpu_peers.assisted(models, settings, CASES, 3),
        cpu_peers.lookup(models, settings, CASES),
        cpu_peers.together(models, settings, CASES, 3),
    ):
        outputs = run_all(found)
        assert len(outputs) == len(found.entrants) and {aim.ours for aim in found.aims} | {aim.peer for aim in found.aims} == set(outputs)
        for name, tokens in outputs.items():
            assert tokens == expected, (found.title, name)


def test_counts_of_rounds(models: cpu_peers.Models) -> None:
    found = cpu_peers.assisted(models, SETTINGS, CASES, 3)
    for entrant in found.entrants:
        sample = entrant.run(CASES[0], 0)
        length = len(sample.outputs[0])
        assert 0 < sample.rounds <= sample.counted < length
        if "plain" in entrant.name:
            assert sample.rounds == sample.counted == length - 1
        if "K=3" in entrant.name:
            assert sample.counted <= 4 * sample.rounds


def test_the_assistant_draws_from_the_law_of_our_draft(models: cpu_peers.Models) -> None:
    draft = models.drafter.model
    whole = peers.hugging_face_model(Llama(draft.config, {**draft.weights, "head": models.target.weights["head"]}))
    ids = torch.tensor([CASES[1][0]])
    with torch.no_grad():
        found, expected = models.assistant(ids).logits, whole(ids).logits
    known = draft.output_token_ids.long()
    torch.testing.assert_close(found[..., known], expected[..., known])
    unknown = torch.ones(VOCAB, dtype=torch.bool).index_fill(0, known, False)
    assert unknown.sum() == VOCAB - REDUCED and (found[..., unknown] == -torch.inf).all()


def test_sampling_follows_the_repeat_and_nothing_ends_it(models: cpu_peers.Models) -> None:
    found = cpu_peers.sampled(models, replace(SETTINGS, stop_ids=tuple(range(4))), CASES, 3)
    assert not found.exact
    first, again, other = run_all(found), run_all(found), run_all(found, 1)
    assert first == again
    for name, outputs in first.items():
        assert all(len(output) == SETTINGS.max_tokens for output in outputs)
        assert other[name] != outputs, name


def test_stubs_run_equal_rounds() -> None:
    found = cpu_peers.overhead(3, tokens=41)
    samples = [entrant.run(found.cases[0], 0) for entrant in found.entrants]
    assert all(sample.outputs == [[0] * 41] for sample in samples)
    ours, assisted, lookup, other_lookup, plain, other_plain = samples
    assert ours.rounds == 10 and assisted.rounds in (9, 10)  # the peer drafts before it has read the prompt
    assert abs(lookup.rounds - other_lookup.rounds) <= 1 and plain.rounds == other_plain.rounds == 40
    assert set(cpu_peers.round_alone(3, 5)) == {"median_us", "least_us"}


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def entrant(name: str, seconds: list[float], outputs: list[list[int]], clock: Clock, log: list[str]) -> Entrant:
    """Takes the given times in turn on a clock of its own, the first for the turn that is not counted."""
    left = iter(seconds)

    def run(case: Case, repeat: int) -> Sample:
        log.append(f"{name}{case[0][0]}")
        clock.now += next(left)
        return Sample([outputs[case[0][0]]], 2, 4)

    return Entrant(name, run)


def test_ratios_are_taken_turn_by_turn(capsys: pytest.CaptureFixture[str]) -> None:
    outputs, other = [[1, 2, 3, 4], [5, 6]], [[1, 2, 9, 4], [5, 6]]
    clock, log = Clock(), []
    ours = entrant("a", [9, 1, 1, 2, 1, 4, 1], outputs, clock, log)  # the first case takes 1, 2, 4 and the second 1, 1, 1
    peer = entrant("b", [9, 3, 8, 4, 8, 40, 8], other, clock, log)  # ratios 3, 2, 10 and 8, 8, 8
    found = hold(Contest("title", (ours, peer), [[[0]], [[1]]], (Aim("a", "b", 4.0), Aim("b", "a", 1.0), Aim("a", "b"))), 3, clock)
    assert log == ["a0", "b0", "a0", "b0", "a1", "b1", "b0", "a0", "b1", "a1", "a0", "b0", "a1", "b1"]
    mine, theirs = found["rates"]
    assert (mine.same, theirs.same, theirs.outputs, theirs.first_differences) == (2, 1, 2, [(0, 2)])
    assert mine.tokens_per_second == pytest.approx(6 / (2 + 1)) and mine.most_tokens_per_second == pytest.approx(6 / (1 + 1))
    assert mine.tokens_per_round == 2.0
    first, back, without = found["ratios"]
    assert first.ratio == pytest.approx(24**0.5) and (first.low, first.high) == (3.0, 8.0)
    assert first.by_least == pytest.approx(24**0.5) and first.verdict == "aim 4: met"
    assert back.verdict == "aim 1: missed" and without.verdict == "no aim"
    printed = capsys.readouterr().out
    assert "b differs from a: prompt 0 at token 2" in printed and "aim 1: missed" in printed


def test_company(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Company()
    share = clock.share()
    assert share is None or 0 <= share <= 1
    readings = iter([(1.0, 10.0), (4.0, 16.0)])
    monkeypatch.setattr(Company, "_now", lambda self: next(readings))
    assert Company().share() == 0.5
    monkeypatch.setattr(Company, "_now", lambda self: None)
    assert Company().share() is None


def test_the_command(models: cpu_peers.Models, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(cpu_peers.smollm2, "load_target", lambda: models.target)
    monkeypatch.setattr(cpu_peers.smollm2, "load_draft", lambda target: (models.drafter.model, models.drafter.token_ids))
    monkeypatch.setattr(cpu_peers.smollm2, "load_tokenizer", lambda: None)
    monkeypatch.setattr(cpu_peers, "COPY", ())
    monkeypatch.setattr(cpu_peers, "prompt_tokens", lambda tokenizer, count: {"text": [prompt for [prompt] in CASES]})
    file = tmp_path / "numbers.json"
    cpu_peers.main(["--only", "C1", "C4", "--repeats", "1", "--max-tokens", "4", "--threads", "1", "--json", str(file)])
    found = json.loads(file.read_text())
    assert set(found) == {"machine", "options", "C1", "C4"} and found["C1"]["rates"][0]["same"] == len(CASES)
    printed = capsys.readouterr().out
    assert "C1: plain" in printed and "aim 1.25" in printed and "C4: sampling" in printed
    for bad in (["--only", "C9"], ["--repeats", "0"]):
        with pytest.raises(SystemExit):
            cpu_peers.parse(bad)
    monkeypatch.setattr(cpu_peers.transformers.LlamaForCausalLM, "forward", lambda self, past_key_values: None)
    with pytest.raises(SystemExit, match=r"5\.24 or later"):
        cpu_peers.main(["--only", "C8"])


def test_aims(models: cpu_peers.Models) -> None:
    wanted = (
        (cpu_peers.plain(models, SETTINGS, CASES), [1.25, 1.25]),
        (cpu_peers.lookup(models, SETTINGS, CASES), [1.5, 1.3]),
        (cpu_peers.sampled(models, SETTINGS, CASES, 3), [None, 1.3, 1.3]),
        (cpu_peers.together(models, SETTINGS, CASES, 3), [None, 2.0, 2.0, None]),
        (cpu_peers.overhead(3), [5.0, None, None]),
    )
    for held, aims in wanted:
        assert [aim.least for aim in held.aims] == aims
