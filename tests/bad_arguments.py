"""Calls with bad arguments: numbers, sequences, prompts, settings; for `test_bad_input.py`."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from refusals import CONFIG, DRAFTER, GREEDY, INF, NAN, TARGET, Bad, World, each
from tokenizers import Tokenizer

import funcspec as fs
from funcspec.drafters import Standalone, standalone
from funcspec.errors import ArgumentError, ArgumentTypeError, CapacityError, ModelError, PoolExhaustedError
from funcspec.models import ChecksumDraft, ChecksumModel, from_logits


def _admit(name: str, error: type[Exception], message: str, where: str = "state", **arguments: Any) -> Bad:
    """A bad `admit` into the world's state; one prompt unless told otherwise."""
    target, drafter = arguments.pop("target", TARGET), arguments.pop("drafter", DRAFTER)
    prompts = arguments.pop("prompts", [[5, 6]])

    def call(world: World) -> Any:
        return fs.admit(getattr(world, where), target, drafter, prompts, **{"donate": world.donate, **arguments})

    return Bad(f"admit: {name}", call, error, message)


def _config(name: str, error: type[Exception], message: str, **changes: Any) -> Bad:
    return Bad(f"SpecConfig: {name}", lambda world: CONFIG.replace(**changes), error, message)


def _prefill(name: str, error: type[Exception], message: str, num_draft: Any) -> list[Bad]:
    """A bad number of drafts, for both functions that take one."""
    return [
        Bad(
            f"prefill: {name}",
            lambda world: fs.prefill(world.state, DRAFTER, num_draft=num_draft, donate=world.donate),
            error,
            message,
        ),
        Bad(
            f"step_round: {name}",
            lambda world: fs.step_round(world.state, TARGET, DRAFTER, num_draft=num_draft, donate=world.donate),
            error,
            message,
        ),
    ]


def _configs() -> Iterator[Bad]:
    for field, low in (("max_num_reqs", 0), ("max_model_len", 1), ("num_speculative_tokens", -1), ("block_size", 0), ("num_blocks", 0)):
        yield _config(f"{field} too small", ArgumentError, rf"^{field}: expected at least {low + 1}, got {low}\.", **{field: low})
    yield _config("max_num_stop_ids negative", ArgumentError, r"^max_num_stop_ids: expected at least 0, got -1", max_num_stop_ids=-1)
    for wrong in (2.0, "2", True, None, torch.tensor(2), np.int64(2)):
        kind = type(wrong).__name__
        yield _config(f"max_num_reqs {kind}", ArgumentTypeError, rf"^max_num_reqs: expected an int, got .*\({kind}\)", max_num_reqs=wrong)
    yield _config("num_blocks float", ArgumentTypeError, r"^num_blocks: expected an int, got 8\.0 \(float\)", num_blocks=8.0)
    yield _config("K not below L", ArgumentError, r"^num_speculative_tokens: expected below max_model_len = 32", num_speculative_tokens=32)
    for wrong in ("greedy", None, 3, "coupled"):
        yield _config(f"rule {wrong!r}", ArgumentTypeError, r"^rule: expected an acceptance rule, got .*rules\.greedy", rule=wrong)
    yield from each(
        "SpecConfig: rule", (fs.rules, fs.rules.Rule), lambda world, wrong: CONFIG.replace(rule=wrong), r"^rule: expected an acc"
    )
    for wrong in (1, None, "yes"):
        message = r"^allows_min_tokens: expected True or False, got"
        yield _config(f"allows_min_tokens {wrong!r}", ArgumentTypeError, message, allows_min_tokens=wrong)
    for wrong in ("warp", "", None, "cuda:x"):
        yield _config(f"device {wrong!r}", ArgumentError, r"^device: expected a device that torch knows", device=wrong)
    yield _config("too many slots", ArgumentError, r"^num_blocks: expected fewer than 2\^31 slots", num_blocks=2**29)
    yield _config("too many tokens", ArgumentError, r"expected fewer than 2\^31", max_num_reqs=2**27)


def _prompts() -> Iterator[Bad]:
    for wrong in ("5 6 7", b"567", [], (), 5, None, {5: 6}, torch.tensor([[5, 6]]), np.array([[5, 6]])):
        yield _admit(f"prompts {wrong!r}", ArgumentError, r"^prompts: expected a non-empty sequence of token id seq", prompts=wrong)
    for wrong in ("hello", b"hello", 5, None, 2.5, True, {5}):
        yield _admit(f"prompt {wrong!r}", ArgumentTypeError, r"^prompts\[1\]: expected a sequence of token ids", prompts=[[5], wrong])
    yield _admit("flat prompt", ArgumentTypeError, r"^prompts\[0\]: expected a sequence of token ids, got 5", prompts=[5, 6, 7])
    empty = torch.zeros(0, dtype=torch.int32)
    for wrong in ([], (), empty):
        yield _admit(f"empty {type(wrong).__name__}", ArgumentError, r"^prompts\[1\]: expected at least one token id", prompts=[[5], wrong])
    for count in (32, 33, 5000):
        yield _admit(f"{count} ids", CapacityError, rf"^prompts\[0\]: expected at most .* = 31 ids, got {count}", prompts=[[1] * count])
    for wrong in (97, -1, 2**31, 2**70):
        yield _admit(f"id {wrong}", ArgumentError, rf"^prompts\[0\]: expected ids from 0 to 96, got {wrong}\.", prompts=[[5, wrong]])
    for wrong in (5.0, True, "5", None, [5], np.int64(5), torch.tensor(5)):
        yield _admit(f"id {wrong!r}", ArgumentTypeError, r"^prompts\[0\]: expected int token ids, got", prompts=[[5, wrong]])
    yield _admit("float tensor", ArgumentTypeError, r"^prompts\[0\]: expected int token ids, got 5\.0", prompts=[torch.tensor([5.0])])
    yield _admit("2-D tensor", ArgumentTypeError, r"^prompts\[0\]: expected int token ids, got \[5\]", prompts=[torch.tensor([[5]])])
    yield _admit("0-D tensor", ArgumentTypeError, r"^prompts\[0\]: expected", prompts=[torch.tensor(5)])
    yield _admit("two prompts, one free row", CapacityError, r"^prompts: .*, got 2 prompts for 1 free rows", prompts=[[5], [6]])


def _sampling() -> Iterator[Bad]:
    for wrong in (-0.5, NAN, INF, -INF, 0.009, 1e-9, -1):
        yield _admit(
            f"temperature {wrong}", ArgumentError, r"^temperature: expected 0 \(greedy\) or .* 0\.01 to 1e\+06, got", temperature=wrong
        )
        yield _admit(f"temperature [{wrong}]", ArgumentError, r"^temperature: expected 0 \(greedy\) or", temperature=[wrong])
    for wrong in (1e39, 10**400):
        yield _admit(f"temperature {float(min(wrong, 1e300)):g}", ArgumentError, r"^temperature: expected", temperature=wrong)
    for wrong in (True, None, [None], ["1"], [True], [[0.5]]):
        yield _admit(f"temperature {wrong!r}", ArgumentTypeError, r"^temperature: expected a number, got", temperature=wrong)
    for wrong in ([], [0.5, 0.5], torch.tensor([0.5]), {0: 0.5}):
        yield _admit(f"temperature {wrong!r}", ArgumentError, r"^temperature: expected one value or 1, one a prompt", temperature=wrong)
    for wrong in ([[[0, 1, 2]]], [None], 3, "abc"):
        message = r"^rope_positions: expected None, as the target has none but its positions"
        yield _admit(f"rope_positions {wrong!r}", ArgumentError, message, rope_positions=wrong)
    yield _admit(
        "temperature under greedy",
        ArgumentError,
        r"^temperature: expected 0 under rules\.greedy, got 0\.7",
        where="greedy",
        temperature=0.7,
    )
    for wrong in (True, 3, [], [1, 2]):
        yield _admit(f"seeds {wrong!r}", ArgumentError, r"^seeds: expected 1 seeds, one a prompt", seeds=wrong)
    for wrong in (3.0, np.int64(3), iter([3])):
        yield _admit(f"seeds {type(wrong).__name__}", ArgumentError, r"^seeds: expected 1 seeds, one a prompt", seeds=wrong)
    for wrong in (True, 1.0, "1", None, [1]):
        yield _admit(f"seed {wrong!r}", ArgumentTypeError, r"^seeds?: expected a 64-bit integer, got", seeds=[wrong])
    for wrong in (2**64, -(2**63) - 1, 10**30):
        yield _admit(f"seed {wrong}", ArgumentError, rf"^seeds?: expected a 64-bit integer, got {wrong}\. Fix: pass seed %", seeds=[wrong])


def _limits() -> Iterator[Bad]:
    for wrong in (0, -1, True, [0], ["3"], [2.0], [True]):
        yield _admit(f"max_tokens {wrong!r}", ArgumentError, r"^max_tokens: expected a positive int or None, got", max_tokens=wrong)
    for wrong in (2.0, [], [3, 3], torch.tensor([3])):
        yield _admit(f"max_tokens {wrong!r}", ArgumentError, r"^max_tokens: expected one value or 1, one a prompt", max_tokens=wrong)
    for wrong in (-1, True, [-1], ["3"], [2.0], [None], None):
        yield _admit(f"min_tokens {wrong!r}", ArgumentError, r"^min_tokens: expected an int of 0 or more, got", min_tokens=wrong)
    for wrong in (2.0, [], [3, 3], torch.tensor([3])):
        yield _admit(f"min_tokens {wrong!r}", ArgumentError, r"^min_tokens: expected one value or 1, one a prompt", min_tokens=wrong)
    yield _admit("min_tokens not allowed", ArgumentError, r"^min_tokens: expected 0 in this configuration, got 1", min_tokens=1)
    for wrong in ([1, 2, 3], [[1, 2, 3]]):
        yield _admit(f"stop_ids {wrong!r}", CapacityError, r"^stop_ids: expected at most max_num_stop_ids = 2 ids, got 3", stop_ids=wrong)
    for wrong in ([97], [-1], [[97]], [5, 2**40]):
        yield _admit(f"stop_ids {wrong!r}", ArgumentError, r"^stop_ids: expected ids from 0 to 96, got", stop_ids=wrong)
    for wrong in ([True], [[5.0]], ["5"], [["5"]], [[None]]):
        yield _admit(f"stop_ids {wrong!r}", ArgumentTypeError, r"^stop_ids: expected int token ids, got", stop_ids=wrong)
    yield _admit("stop_ids for 2", ArgumentError, r"^stop_ids: expected one value or 1, one a prompt", stop_ids=[[1], [2]])
    for wrong in (5, 0, None, {5}, torch.tensor([5, 6]), np.array([5, 6])):
        yield _admit(f"stop_ids {wrong!r}", ArgumentError, r"^stop_ids: expected a list of token ids, or one for each", stop_ids=wrong)
    for wrong in ([5.0], [None]):
        yield _admit(f"stop_ids {wrong!r}", ArgumentTypeError, r"^stop_ids: expected int token ids", stop_ids=wrong)


def _rows() -> Iterator[Bad]:
    for wrong in ([-1], [3], [True], [1.0], ["1"], [None], "1", 7, [[1]]):
        yield _admit(f"rows {wrong!r}", ArgumentError, r"^rows: expected row numbers from 0 to 2, got", rows=wrong)
    yield _admit("rows twice", ArgumentError, r"^rows: expected distinct rows, got \[1, 1\]", rows=[1, 1], prompts=[[5], [6]])
    yield _admit("rows taken", CapacityError, r"^rows: expected free rows \(\[1\]\), got 0\. Fix: release the row first", rows=[0])
    yield _admit("rows too many", ArgumentError, r"^rows: expected 1 rows, one a prompt, got 2", rows=[0, 1])
    yield _admit("rows none", ArgumentError, r"^rows: expected 1 rows, one a prompt, got 0", rows=[])
    for wrong in (0, -4, 2.0, True, "8", [4]):
        yield _admit(f"chunk {wrong!r}", ArgumentError, r"^chunk: expected a positive int or None, got", chunk=wrong)
    for wrong in ("yes", 1, None):
        yield _admit(f"donate {wrong!r}", ArgumentError, r"^donate: expected True or False, got", donate=wrong)
    for wrong in ([-1], [3], [0, 7], [True], [0.0], None, "0", torch.tensor([0])):
        yield Bad(
            f"release: rows {wrong!r}",
            lambda world, wrong=wrong: fs.release(world.state, wrong, donate=world.donate),
            ArgumentError,
            r"^rows: expected row numbers from 0 to 2, got",
        )
    yield Bad(
        "release: rows twice",
        lambda world: fs.release(world.state, [0, 0], donate=world.donate),
        ArgumentError,
        r"distinct rows, got \[0, 0\]",
    )
    yield Bad(
        "release: donate",
        lambda world: fs.release(world.state, [0], donate="no"),
        ArgumentError,
        r"^donate: expected True or False, got 'no'",
    )


def _pools() -> Iterator[Bad]:
    """Too few blocks, in either pool; what was taken from the other goes back."""
    message = r"^num_blocks: expected 8 free blocks in the target pool, got 0 of 8\. Fix: drop old states"
    yield _admit("no blocks", PoolExhaustedError, message, where="full")
    logits = from_logits(lambda prefix: torch.zeros(97), vocab_size=97)
    yield Bad(
        "admit: more prompts than blocks",
        lambda world: fs.admit(fs.init(CONFIG.replace(num_blocks=15), logits), logits, None, [[5], [6]], donate=world.donate),
        PoolExhaustedError,
        r"^num_blocks: expected 16 free blocks in the target pool, got 15 of 15",
    )


def _num_draft() -> Iterator[Bad]:
    most = r"^num_draft: expected numbers from 0 to num_speculative_tokens = 3, got"
    for wrong in (-1, 4, True, [0, 1, 4], [0, -1, 0], [0, True, 0], [0, 1.0, 0], [None, 1, 1], [1, "1", 1], [[1], [1], [1]], "123"):
        yield from _prefill(f"num_draft {wrong!r}", ArgumentError, most, wrong)
    count = r"^num_draft: expected an int or 3 ints, got"
    for wrong in (1.0, NAN, [], [1, 1], [1] * 4, "3", {0: 1}, np.array([1, 1, 1], dtype=np.int32), np.int64(1)):
        yield from _prefill(f"num_draft {wrong!r}", ArgumentError, count, wrong)
    kind = r"^num_draft: expected an int32 tensor \[3\] on cpu, got \["
    wrong_tensors = (
        torch.tensor(1),
        torch.tensor([1, 1, 1]),
        torch.ones(3),
        torch.ones(2, dtype=torch.int32),
        torch.ones(3, 1, dtype=torch.int32),
    )
    for wrong in (*wrong_tensors, torch.ones(3, dtype=torch.bool)):
        yield from _prefill(f"num_draft {tuple(wrong.shape)} {wrong.dtype}", ArgumentError, kind, wrong)
    elsewhere = torch.ones(3, dtype=torch.int32, device="meta")
    yield from _prefill("num_draft elsewhere", ArgumentError, r"^num_draft: expected", elsewhere)
    for wrong in (-1, 99, "3"):
        yield Bad(
            f"step_round: num_draft {wrong!r} without drafter",
            lambda world, wrong=wrong: fs.step_round(world.plain, TARGET, None, num_draft=wrong, donate=world.donate),
            ArgumentError,
            r"^num_draft: expected",
        )


def _generates() -> Iterator[Bad]:
    """`generate` refuses before it yields anything."""

    def call(**changes: Any) -> Any:
        return fs.generate(**{"config": CONFIG, "target": TARGET, "drafter": DRAFTER, "prompts": [[5, 6]], **changes})

    def bad(name: str, error: type[Exception], message: str, **changes: Any) -> Bad:
        return Bad(f"generate: {name}", lambda world: call(**changes), error, message)

    yield bad("config", ArgumentTypeError, r"^config: expected a SpecConfig, got str", config="config")
    yield bad("target", ArgumentTypeError, r"^target: expected a Model", target="gpt2")
    yield bad("drafter", ArgumentTypeError, r"^drafter: expected a drafter or None, got ChecksumDraft", drafter=ChecksumDraft())
    yield bad("vocabularies", ModelError, r"vocabulary of 97, got a draft of 49", drafter=standalone(ChecksumDraft(vocab_size=49)))
    yield bad("text", ArgumentError, r"^prompts: expected a non-empty sequence", prompts="5 6")
    yield bad("no prompts", ArgumentError, r"^prompts: expected a non-empty sequence", prompts=[])
    yield bad("texts", ArgumentTypeError, r"^prompts\[0\]: expected a sequence of token ids, got 'hello'", prompts=["hello"])
    yield bad("empty prompt", ArgumentError, r"^prompts\[1\]: expected at least one token id", prompts=[[5], []])
    yield bad("long prompt", CapacityError, r"^prompts\[0\]: expected at most max_model_len - 1 = 31 ids, got 32", prompts=[[1] * 32])
    yield bad("id outside", ArgumentError, r"^prompts\[0\]: expected ids from 0 to 96, got 97", prompts=[[97]])
    yield bad("seeds", ArgumentError, r"^seeds: expected 1 seeds", seeds=[1, 2])
    yield bad("seed", ArgumentTypeError, r"^seeds?: expected a 64-bit integer, got float", seeds=[0.5])
    yield bad("temperature", ArgumentError, r"^temperature: expected 0 \(greedy\) or", temperature=0.001)
    yield bad("temperature under greedy", ArgumentError, r"^temperature: expected 0 under rules\.greedy", config=GREEDY, temperature=1.0)
    yield bad("max_tokens", ArgumentError, r"^max_tokens: expected a positive int or None, got 0", max_tokens=0)
    yield bad("stop_ids", CapacityError, r"^stop_ids: expected at most max_num_stop_ids = 2 ids, got 3", stop_ids=[1, 2, 3])
    for wrong in (-1, 4, True, 1.5, "1"):
        yield bad(f"num_draft {wrong!r}", ArgumentError, r"^num_draft: expected", num_draft=wrong)
    yield bad("num_draft without drafter", ArgumentError, r"^num_draft: expected", drafter=None, num_draft=-1)
    for name, wrongs in {
        "target": (None, 3, DRAFTER, ChecksumModel),
        "drafter": (3, standalone, Standalone),
        "min_tokens": (-1, 1.0, "1", [1, 1], torch.ones(2)),
        "tokenizer": (3, "gpt2", Tokenizer),
        "stop_strings": ("END", [1], ["a", ""], 3, None),
    }.items():
        yield from each(f"generate: {name}", wrongs, lambda world, wrong, name=name: call(**{name: wrong}), rf"^{name}: expected")
    yield bad("stop_strings without tokenizer", ArgumentTypeError, r"^tokenizer: expected a tokenizer", stop_strings=["END"])
    yield bad("min_tokens over max_tokens", ArgumentError, r"^min_tokens: expected at most max_tokens = 2", min_tokens=3, max_tokens=2)


ARGUMENTS = [bad for group in (_configs, _prompts, _sampling, _limits, _rows, _pools, _num_draft, _generates) for bad in group()]
