"""Calls of the tools around a state with bad arguments: checks, jobs, text, numbers; for `test_bad_input.py`."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from refusals import CONFIG, DRAFTER, GREEDY, NAN, TARGET, Bad, each
from tokenizers import Tokenizer
from tokenizers.models import WordLevel

import funcspec as fs
from funcspec.drafters import Standalone, standalone
from funcspec.errors import ArgumentError, ArgumentTypeError, CapacityError, ModelError
from funcspec.jobs import Job, Run, compare, run_job
from funcspec.metrics import statistics, unconditional_to_conditional_rates
from funcspec.models import ChecksumDraft, ChecksumModel
from funcspec.text import TextStream

TOKENIZER = Tokenizer(WordLevel({"one": 0, "two": 1}, unk_token="one"))
NO_BOOLS = (None, "yes", 1, [True])
REQUEST: dict[str, Any] = {  # what is wrong with a request, whoever takes it
    "prompts": (None, "5 6", [], [5, 6], 5, ["hello"], [[]], [[97]], [[5.0]]),
    "seeds": (3, [1, 2], [0.5], "1", [2**64]),
    "temperature": (None, -1, NAN, 0.001, "1", [0.5, 0.5]),
    "max_tokens": (0, -1, True, 2.5, "3"),
    "stop_ids": (None, 5, [97], [1.0], "1", [1, 2, 3]),
    "drafter": (3, "ngram", standalone, ChecksumDraft(), Standalone),
}
NO_MODELS = (None, "gpt2", 3, DRAFTER, ChecksumModel)


def _checks() -> Iterator[Bad]:
    def stable(target: Any = TARGET, config: Any = CONFIG, seed: Any = 0) -> Any:
        return fs.check_shape_stable(target, config, seed=seed)

    no_config, kind = (None, "config", 3, {}, fs.SpecConfig), r"^config: expected a SpecConfig, got"
    model = r"^target: expected a Model \(vocab_size, .*, got"
    yield from each("check_shape_stable: target", NO_MODELS, lambda world, wrong: stable(wrong), model, ArgumentTypeError)
    yield from each("check_shape_stable: config", no_config, lambda world, wrong: stable(config=wrong), kind, ArgumentTypeError)
    short, words = CONFIG.replace(max_model_len=5), r"^config\.max_model_len: expected at least 6, got 5"
    yield Bad("check_shape_stable: short rows", lambda world: stable(config=short), CapacityError, words)
    words = r"^target: expected max_len of at least max_model_len = 32, got 16"
    yield Bad("check_shape_stable: short target", lambda world: stable(ChecksumModel(max_len=16)), ModelError, words)
    wrongs = (None, "1", -1, True, 2.5, [1], torch.tensor(1))
    yield from each("check_shape_stable: seed", wrongs, lambda world, wrong: stable(seed=wrong), r"^seed: expected")

    def same(**changes: Any) -> Any:
        return fs.same_as_plain(**{"target": TARGET, "drafter": DRAFTER, "prompts": [[5, 6]], "config": CONFIG, **changes})

    for argument, wrongs in ({"target": NO_MODELS, "config": no_config} | REQUEST).items():
        words = rf"^{argument.rstrip('s')}s?(\[0\])?: expected"
        yield from each(f"same_as_plain: {argument}", wrongs, lambda world, wrong, a=argument: same(**{a: wrong}), words)
    sample = r"^rule: expected one whose output is the target's own sample path, got rules\.ratio at a temperature above 0"
    ratio = CONFIG.replace(rule=fs.rules.ratio)
    yield Bad("same_as_plain: rule", lambda world: same(config=ratio, temperature=0.5), ArgumentError, sample)
    greedy = r"^temperature: expected 0 under rules\.greedy"
    yield Bad("same_as_plain: temperature under greedy", lambda world: same(config=GREEDY, temperature=0.5), ArgumentError, greedy)


def _job(**changes: Any) -> Job:
    given = {"target": TARGET, "drafter": DRAFTER, "prompts": [[5, 6]], "seeds": [1], "temperature": 0.0, "max_tokens": 4, "stop_ids": ()}
    return Job(**given | {"rule": fs.rules.greedy, "num_speculative_tokens": 2} | changes)


def _jobs() -> Iterator[Bad]:
    kind = r"^job: expected a Job, got"
    yield from each("run_job: job", (None, "job", 3, {}, Job), lambda world, wrong: run_job(wrong), kind, ArgumentTypeError)
    wrongs: dict[str, Any] = {"max_num_reqs": ("1", 2.5, True, 0, -1), "num_speculative_tokens": (None, "2", 2.5, True, -1)}
    wrongs |= {"target": NO_MODELS, "rule": (None, "greedy", fs.rules.Rule), "device": (None, 3, "warp")}
    wrongs |= {"tokenizer": (3, "gpt2", Tokenizer), "min_tokens": (None, -1, 1.0, "1", True, 5)}
    for argument, values in (wrongs | REQUEST).items():
        words = rf"^(job\.)?{argument.rstrip('s')}s?(\[0\])?: expected"
        values = [value for value in values if (argument, value) != ("stop_ids", [1, 2, 3])]  # a job takes as many as it has
        yield from each(f"run_job: {argument}", values, lambda world, wrong, a=argument: run_job(_job(**{a: wrong})), words)
    for wrong in ("END", ["a", ""], 3, [1]):
        call = lambda world, wrong=wrong: run_job(_job(tokenizer=TOKENIZER, stop_strings=wrong))  # noqa: E731
        yield Bad(f"run_job: stop_strings {wrong!r}", call, fs.FuncspecError, r"^(job\.)?stop_strings: expected")
    words = r"^(job\.)?tokenizer: expected a tokenizer, to look for stop strings, got None"
    yield Bad("run_job: stop_strings alone", lambda world: run_job(_job(stop_strings=("END",))), ArgumentTypeError, words)
    yield from each("run_job: on_emission", (3, "print", [print]), lambda world, wrong: run_job(_job(), wrong), r"^on_emission: expected")
    yield from each("run_job: padded", NO_BOOLS, lambda world, wrong: run_job(_job(), padded=wrong), r"^padded: expected True or False")
    run = Run([[1, 2, 3, 4]], [""])
    yield from each("compare: job", (None, "job", 3, Job), lambda world, wrong: compare(wrong, run), kind, ArgumentTypeError)
    yield from each(
        "compare: run", (None, "run", [[1]], Run), lambda world, wrong: compare(_job(), wrong), r"^run: expected", ArgumentTypeError
    )
    wrong = Run([[1], [2]], ["", ""])
    yield Bad("compare: run of other prompts", lambda world: compare(_job(), wrong), ArgumentError, r"^run: expected")
    sample = r"^rule: expected one whose output is the target's own sample path"
    yield Bad("compare: rule", lambda world: compare(_job(rule=fs.rules.ratio, temperature=0.5), run), ArgumentError, sample)


def _texts() -> Iterator[Bad]:
    wrongs = (None, "gpt2", 3, Tokenizer, WordLevel({"one": 0}, unk_token="one"))
    kind = r"^tokenizer: expected a tokenizers\.Tokenizer or a fast tokenizer"
    yield from each("TextStream: tokenizer", wrongs, lambda world, wrong: TextStream(wrong), kind, ArgumentTypeError)
    wrongs = ("END", None, 3, [1], [None], [b"END"], {"END"}, ["a", ""], [""])
    yield from each("TextStream: stop_strings", wrongs, lambda world, wrong: TextStream(TOKENIZER, wrong), r"^stop_strings: expected")
    words = r"^skip_special_tokens: expected True or False"
    call = lambda world, wrong: TextStream(TOKENIZER, skip_special_tokens=wrong)  # noqa: E731
    yield from each("TextStream: skip_special_tokens", NO_BOOLS, call, words)
    wrongs = (None, -1, 1.0, "1", True)
    call = lambda world, wrong: TextStream(TOKENIZER, min_tokens=wrong)  # noqa: E731
    yield from each("TextStream: min_tokens", wrongs, call, r"^min_tokens: expected an int of 0 or more", ArgumentError)
    wrongs = (None, 3, "one", [None], ["one"], [-1], [1.0], [2**40], torch.tensor([1.0]), np.array([0.5]))
    yield from each("TextStream: added tokens", wrongs, lambda world, wrong: TextStream(TOKENIZER).add(wrong), r"^tokens: expected")


def _numbers() -> Iterator[Bad]:
    emission = fs.Emission(0, (1,), (0,), 3, 0, 0, False, 1)
    wrongs = (None, 3, "emissions", [None], [(1, 2)], emission)
    yield from each("statistics: emissions", wrongs, lambda world, wrong: statistics(wrong, 3), r"^emissions: expected")
    wrongs = (None, "3", 2.5, True, -1, 2)
    words = r"^num_speculative_tokens: expected"
    yield from each("statistics: num_speculative_tokens", wrongs, lambda world, wrong: statistics([emission], wrong), words)
    wrongs = (None, 3, "ab", [None], ["0.5"], [[0.5]], [-0.1], [1.1], [NAN])
    rates = unconditional_to_conditional_rates
    yield from each("unconditional_to_conditional_rates: rates", wrongs, lambda world, wrong: rates(wrong), r"^rates: expected")


TOOLS = [bad for group in (_checks, _jobs, _texts, _numbers) for bad in group()]
