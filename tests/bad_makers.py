"""Calls that make drafters, models, rules and JAX functions of bad arguments; for `test_bad_input.py`."""

import importlib.util
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from feature_toys import FeatureDraft
from refusals import CONFIG, DRAFTER, INF, NAN, TARGET, Bad, each

import funcspec as fs
from funcspec.drafters import (
    Drafter,
    argmax,
    best_of,
    cascade,
    dflash,
    eagle,
    early_exit,
    fallback,
    fixed,
    load_draft,
    medusa,
    mtp,
    ngram,
    parallel,
    place_proposals,
    standalone,
    suffix,
)
from funcspec.errors import ArgumentError, ArgumentTypeError, FileError, FuncspecError, ModelError
from funcspec.interop import jax_dtype, jax_model, lift
from funcspec.kernels.append_drafts import append_drafts_
from funcspec.models import ChecksumDraft, ChecksumModel, TableModel, from_logits, huggingface, match_vocabularies, shared_vocabulary
from funcspec.models.llama import Llama, LlamaConfig, random_llama
from funcspec.rules import Rule

HAS_TRANSFORMERS = importlib.util.find_spec("transformers") is not None
NO_MODELS = (None, "gpt2", 3, DRAFTER, ChecksumDraft, torch.nn.Linear(2, 2))
NO_INTS = (None, "3", 2.5, True, torch.tensor(3), np.int64(3))


def _refused(name: str, wrongs: Any, make: Callable[[Any], Any], message: str, error: type[Exception] = FuncspecError) -> Iterator[Bad]:
    """As `each`, for calls that have nothing to do with a state."""
    yield from each(name, wrongs, lambda world, wrong: make(wrong), message, error)


def _with_models() -> Iterator[Bad]:
    """Drafters of a model: what is none, one of another kind, and maps of ids that are not its own."""
    makers: dict[str, tuple[str, Callable[..., Any], Any]] = {
        "standalone": ("model", standalone, ChecksumDraft(vocab_size=3)),
        "eagle": ("head", eagle, FeatureDraft(vocab_size=3)),
        "mtp": ("modules", mtp, FeatureDraft(vocab_size=3)),
        "medusa": ("heads", medusa, ChecksumDraft(vocab_size=3)),
        "parallel": ("model", lambda model, ids=None: parallel(model, 2, ids), ChecksumDraft(vocab_size=3)),
        "dflash": ("model", lambda model, ids=None: dflash(model, 2, ids), ChecksumDraft(vocab_size=3)),
    }
    ids = [
        (
            [3, 10, 50],
            "abc",
            torch.tensor([3, 10, 50]),
            torch.tensor([3.0, 10, 50]),
            np.array([3, 10, 50]),
            torch.zeros(3, dtype=torch.bool),
        ),
        [torch.tensor(wrong, dtype=torch.int32) for wrong in (3, [[3, 10, 50]])],
        [torch.tensor(wrong, dtype=torch.int32) for wrong in ([3, 10], [3, 10, 10], [1, 2, 3, 4], [])],
    ]
    for name, (argument, make, three) in makers.items():
        message = rf"^{argument}: expected a Model \(vocab_size, max_len, kv_spec, forward\), got"
        yield from _refused(f"{name}: {argument}", NO_MODELS, make, message, ArgumentTypeError)
        kind, count = (
            r"^token_ids: expected a one-dimensional int32 tensor, got",
            r"^token_ids: expected 3 distinct ids, got \d distinct of",
        )
        for wrongs, words, error in zip(ids, (kind, kind, count), (ArgumentTypeError, ArgumentTypeError, ArgumentError), strict=True):
            yield from _refused(f"{name}: token_ids", wrongs, lambda wrong, make=make, three=three: make(three, wrong), words, error)
    plain, chain, at_once = ChecksumDraft(), FeatureDraft(), FeatureDraft(passes="parallel")
    yield from _refused("eagle: head of another kind", (plain, at_once), eagle, r"^head: expected a model that reads", ModelError)
    yield from _refused("mtp: module of another kind", (plain, at_once), mtp, r"^modules: expected a model that reads", ModelError)
    yield from _refused("mtp: modules", ([], [chain, chain], [3, 3], (chain, None)), mtp, r"^modules(\[\d\])?: expected")
    yield from _refused("medusa: heads of another kind", (plain, chain), medusa, r"^heads: expected heads that read", ModelError)
    yield from _refused(
        "dflash: model of another kind", (plain, chain), lambda m: dflash(m, 2), r"^model: expected a model that", ModelError
    )
    yield from _refused(
        "parallel: model of another kind", (chain,), lambda m: parallel(m, 2), r"^model: expected a language model", ModelError
    )
    for name, make in {"parallel": parallel, "dflash": dflash}.items():
        wrongs = (*NO_INTS, -1)
        yield from _refused(f"{name}: mask_id", wrongs, lambda wrong, make=make: make(plain, wrong), r"^mask_id: expected")
    yield from _refused(
        "dflash: anchor", (None, 1, "yes"), lambda wrong: dflash(plain, 2, anchor=wrong), r"^anchor: expected True or False"
    )


def _without_models() -> Iterator[Bad]:
    def settings(name: str, make: Callable[..., Any], table: dict[str, Any]) -> Iterator[Bad]:
        for argument, wrongs in table.items():
            call = lambda wrong, argument=argument: make(**{argument: wrong})  # noqa: E731
            yield from _refused(f"{name}: {argument}", wrongs, call, rf"^{argument}(\[0\])?: expected")

    words = {"occurrence": ("middle", "", None, 1, True, np.array(["first", "last"]))}
    yield from settings("ngram", ngram, {"max_ngram": NO_INTS, "min_ngram": (*NO_INTS, 0, -1, 4), "window": ("3", 2.5, True, 1, 0)} | words)
    yield from _refused(
        "ngram: most below least", (0, 1), lambda most: ngram(max_ngram=most, min_ngram=2), r"^min_ngram: expected from 1 to"
    )
    no_numbers = (None, "1", True, [1.0], torch.tensor(1.0), NAN, INF)
    no_lists = ("abc", 5, {5}, [5], [[5.0]], [[True]], ["ab"], np.zeros(3), np.zeros((1, 2)), [[-2]], [[2**31]])
    table = dict.fromkeys(("factor", "offset", "min_probability"), no_numbers) | {"corpus": no_lists}
    table |= {"max_depth": (*NO_INTS, 1, -1), "max_outputs": (*NO_INTS, 0), "shared": (None, 1, "yes")}
    yield from settings("suffix", suffix, table)
    yield from _refused(
        "suffix: probability", (-0.1, 1.1), lambda wrong: suffix(min_probability=wrong), r"^min_probability: expected from 0 to 1"
    )
    yield from _refused("suffix: negative factor", (-1.0,), lambda wrong: suffix(factor=wrong), r"^factor: expected at least 0")
    yield from _refused(
        "suffix: drafts nothing", (0,), lambda wrong: suffix(factor=wrong), r"^offset: expected a draft of at least one token"
    )
    yield from _refused("suffix: outputs", (None, *no_lists), lambda wrong: suffix().with_outputs(wrong), r"^outputs(\[0\])?: expected")
    yield from _refused("fixed: tokens", (None, *no_lists), fixed, r"^tokens(\[0\])?: expected")
    wrongs = (None, "ngram", 3, ngram, fs.drafters.Ngram, ChecksumDraft(), DRAFTER)
    yield from _refused("best_of: proposers", wrongs, lambda wrong: best_of(ngram(), wrong), r"^proposers\[1\]: expected a drafter")
    yield from _refused(
        "best_of: no", ("proposers",), lambda wrong: best_of(), r"^proposers: expected at least one drafter", ArgumentTypeError
    )
    for name, make in {"fallback": fallback, "cascade": cascade}.items():
        yield from _refused(f"{name}: first", wrongs, lambda wrong, make=make: make(wrong, DRAFTER), r"^first: expected a drafter")
    wrongs = (None, "ngram", 3, ngram, fs.drafters.Standalone, ChecksumDraft(), fallback(ngram(), DRAFTER))
    for name, make in {"fallback": fallback, "cascade": cascade}.items():
        yield from _refused(f"{name}: second", wrongs, lambda wrong, make=make: make(ngram(), wrong), r"^second: expected a drafter")
    words = r"^one_pass: expected True or False"
    yield from _refused("cascade: one_pass", (None, 1, "yes"), lambda wrong: cascade(ngram(), DRAFTER, one_pass=wrong), words)


def _argmaxes() -> Iterator[Bad]:
    words = r"^drafter: expected a drafter of funcspec\.drafters, got"
    yield from _refused("argmax: drafter", (None, "ngram", 3, ChecksumDraft(), standalone, Drafter), argmax, words, ArgumentTypeError)
    points = (ngram(), suffix(), fixed([[1]]))
    yield from _refused("argmax: points", points, argmax, r"^drafter: expected a drafter with a model, got", ModelError)


def _draft_files() -> Iterator[Bad]:
    target = random_llama(LlamaConfig(11, 1, 8, 8, 2, 1, 4, 32))
    here = str(Path(__file__))
    yield from _refused(
        "load_draft: path", (None, 3, ["a"]), lambda wrong: load_draft(wrong, target), r"^path: expected the name of a file"
    )
    words = r"^path: expected a safetensors file, got"
    yield from _refused("load_draft: file", ("missing", here), lambda wrong: load_draft(wrong, target), words, FileError)
    words = r"^target: expected a Llama of torch, got"
    yield from _refused("load_draft: target", NO_MODELS, lambda wrong: load_draft(here, wrong), words, ArgumentTypeError)


def _early_exits() -> Iterator[Bad]:
    target = random_llama(LlamaConfig(11, 3, 8, 16, 2, 1, 4, 32))
    wrongs = (None, "llama", 3, ChecksumModel(), Llama, target.config)
    yield from _refused("early_exit: target", wrongs, lambda wrong: early_exit(wrong, 2), r"^target: expected a Llama", ArgumentTypeError)
    wrongs = (*NO_INTS, 0, -1, 4)
    yield from _refused("early_exit: num_layers", wrongs, lambda wrong: early_exit(target, wrong), r"^num_layers: expected")
    wrongs = ([1, 2], "ab", 3, np.array([1, 2]), torch.tensor([1, 2]), torch.tensor([1.0]), torch.tensor([[1]], dtype=torch.int32))
    wrongs += tuple(torch.tensor(ids, dtype=torch.int32) for ids in ([1, 1, 1], [-1, 1], [1, 2, 3, 11]))
    yield from _refused("early_exit: token_ids", wrongs, lambda wrong: early_exit(target, 2, wrong), r"^token_ids: expected")


class _Proposes:
    """A drafter that proposes what it is told to."""

    proposal, token_ids, kv_model = "point", None, None

    def __init__(self, **changes: Any) -> None:
        three = torch.ones(3, dtype=torch.int32)
        self.values: dict[str, Any] = {"proposals": torch.ones(3, 3, dtype=torch.int32), "counts": three, "wanted": three, "points": three}
        self.values |= changes

    def init(self, config: fs.SpecConfig, target: Any) -> None:
        pass

    def propose(self, transition: Any) -> tuple[Any, Any]:
        return self.values["proposals"], self.values["counts"]

    def first(self, transition: Any, wanted: Any) -> None:
        place_proposals(transition, **self.values)

    def next(self, transition: Any) -> None:
        pass


@cache
def _admitted() -> fs.SpecState:
    """A state of a drafter without a model."""
    return fs.admit(fs.init(CONFIG.replace(rule=fs.rules.ratio), TARGET, ngram()), TARGET, ngram(), [[5, 6]])[0]


def _proposals() -> Iterator[Bad]:
    """What a drafter of one's own may propose."""
    no_rows = (None, [1, 1, 1], torch.ones(2, dtype=torch.int32), torch.ones(3), torch.ones(3, 1, dtype=torch.int32))
    table = dict.fromkeys(("counts", "wanted", "points"), no_rows)
    table["proposals"] = (None, [[1] * 3] * 3, torch.ones(3, 2, dtype=torch.int32), torch.ones(3, 3), torch.ones(9, dtype=torch.int32))
    for name, wrongs in table.items():
        call = lambda wrong, name=name: fs.prefill(_admitted(), _Proposes(**{name: wrong}))  # noqa: E731
        yield from _refused(f"place_proposals: {name}", wrongs, call, rf"^{name}: expected")
    for field, wrongs in {"proposal": ("banana", None, 3), "kv_model": (3, "gpt2", ChecksumDraft), "token_ids": ([1], "ab")}.items():

        def call(wrong: Any, field: str = field) -> Any:
            return fs.init(CONFIG, TARGET, type("Odd", (_Proposes,), {field: wrong})())

        yield from _refused(f"init: drafter of {field}", wrongs, call, r"^drafter")


def _models() -> Iterator[Bad]:
    wrongs = (None, "f", 3, torch.zeros(5))
    kind = r"^function: expected a callable, got"
    yield from _refused("from_logits: function", wrongs, lambda wrong: from_logits(wrong, vocab_size=5), kind, ArgumentTypeError)
    wrongs = ("numpy", "", None, 3)
    words = r"^array: expected 'torch' or 'jax', got"
    yield from _refused("from_logits: array", wrongs, lambda wrong: from_logits(torch.sin, vocab_size=5, array=wrong), words, ArgumentError)
    for field in ("vocab_size", "max_len"):
        call = lambda wrong, field=field: from_logits(torch.sin, **{"vocab_size": 5, field: wrong})  # noqa: E731
        yield from _refused(f"from_logits: {field}", (0, -5, *NO_INTS), call, rf"^{field}: expected")
    half = (0.5, 0.5)
    tables = (None, 5, "ab", (), ((),), (half,), (half, (1.0,)), (half, half, half), (half, (0.5, 0.6)), (half, (-0.5, 1.5)))
    tables += ((half, (NAN, 1.0)), (half, (INF, 1.0)), (half, ("a", "b")))
    words = r"^probabilities: expected a square table whose rows are distributions, got"
    yield from _refused("TableModel: probabilities", tables, TableModel, words, ArgumentError)
    yield from _refused("TableModel: max_len", (0, -5, *NO_INTS), lambda wrong: TableModel(((1.0,),), wrong), r"^max_len: expected")
    if HAS_TRANSFORMERS:
        yield from _of_transformers()


@cache
def _lm() -> Any:
    from tiny_transformers import make

    return make("llama")


def _of_transformers() -> Iterator[Bad]:
    wrongs = (None, 3, "gpt2", TARGET, torch.nn.Linear(2, 2), torch.nn.Module)
    kind = r"^lm: expected a transformers\.PreTrainedModel, got"
    yield from _refused("huggingface: lm", wrongs, huggingface, kind, ArgumentTypeError)
    yield from _refused("huggingface: lm as", ("class",), lambda wrong: huggingface(type(_lm())), kind, ArgumentTypeError)
    wrongs = ("64", 2.5, True, torch.tensor(64), 0, 1, -1)
    yield from _refused("huggingface: max_len", wrongs, lambda wrong: huggingface(_lm(), max_len=wrong), r"^max_len: expected")
    wrongs = ("float32", torch.int32, torch.float64, 3, np.float32, np.zeros(2), torch.zeros(2))
    words = r"^kv_dtype: expected float32, bfloat16, float16 or None, got"
    yield from _refused("huggingface: kv_dtype", wrongs, lambda wrong: huggingface(_lm(), kv_dtype=wrong), words, ArgumentTypeError)


def _others() -> Iterator[Bad]:
    for argument, wrongs in {
        "name": (None, 3),
        "samples": (None, 1, "yes"),
        "draft_stream": (None, 0, 5, "draft"),
        "judges_by": (None, "luck", 3),
    }.items():
        call = lambda wrong, argument=argument: Rule(**{"name": "own", "samples": True, "draft_stream": 1, argument: wrong})  # noqa: E731
        yield from _refused(f"Rule: {argument}", wrongs, call, rf"^{argument}: expected")
    wrongs = (None, "gpt2", 3, DRAFTER, ChecksumModel, jax_model(TARGET))
    yield from _refused("jax_model: model", wrongs, jax_model, r"^model: expected a model of torch, got", ArgumentTypeError)
    wrongs = (None, 3, "float32", torch.int64, torch.float64, np.float32, [], torch.zeros(2))
    yield from _refused("jax_dtype: dtype", wrongs, jax_dtype, r"^dtype: expected a dtype of at most 32 bits, got", ArgumentTypeError)
    yield from _refused("lift: op", (None, "append_drafts", 3, print), lift, r"^op: expected", ArgumentTypeError)
    wrongs = ("cuda", "", 3, True)
    yield from _refused("lift: backend", wrongs, lambda wrong: lift(append_drafts_, backend=wrong), r"^backend: expected")
    words = r"^tokens: expected an array, as append_drafts_ writes it, got"
    wrongs = (3, "tokens", [1], torch.zeros(3))
    yield from _refused("lift: written argument", wrongs, lambda wrong: lift(append_drafts_)(tokens=wrong), words, ArgumentTypeError)


def _vocabularies() -> Iterator[Bad]:
    """Of a target of 11 tokens and a draft of 17, two of which are shared."""
    fit: dict[str, Any] = {"target_ids": [3, 9], "draft_ids": [16, 4], "target_vocab_size": 11, "unknown_id": 14}

    def shared(argument: str, wrong: Any) -> Any:
        arguments = {"model": ChecksumDraft(vocab_size=17), **fit, argument: wrong}
        ids = {name: np.array(value, np.int32) for name, value in arguments.items() if isinstance(value, list)}
        return shared_vocabulary(**(arguments | ids))

    kinds = (None, "abc", (3, 9), {3, 9}, np.array([3, 9]), torch.tensor([3, 9]), torch.tensor([3.0, 9]), [[3, 9]], [[3], [9]])
    both = "11 tokens of the target and 17 of the draft"
    table: list[tuple[str, str, Any, str, type[Exception]]] = [
        ("model", "", NO_MODELS, r"a Model \(vocab_size, max_len, kv_spec, forward\), got", ArgumentTypeError),
        ("model", " that reads states", (FeatureDraft(),), "a language model, got a draft that reads hidden states", ModelError),
        ("target_vocab_size", "", NO_INTS, "an int, got", ArgumentTypeError),
        ("target_vocab_size", "", (0, -11), "at least 1, got", ArgumentError),
        ("unknown_id", "", NO_INTS, "an int, got", ArgumentTypeError),
        ("unknown_id", "", (-1,), "at least 0, got -1", ArgumentError),
        ("unknown_id", "", (17, 2**31), f"an id of the draft, from 0 to 16, for {both}, got", ArgumentError),
        ("draft_ids", "", ([16], [16, 4, 5]), r"2 ids, one for each of target_ids, got \d", ArgumentError),
    ]
    for name, most in (("target_ids", 10), ("draft_ids", 16)):
        table += [
            (name, " as", kinds, "a one-dimensional int32 array, got", ArgumentTypeError),
            (name, "", ([],), f"at least one id, for {both}, got none", ArgumentError),
            (name, "", ([3, most + 1], [-1, 3]), f"ids from 0 to {most}, for {both}, got ids from -?\\d+ to \\d+", ArgumentError),
            (name, "", ([3, 3],), f"distinct ids, for {both}, got 1 distinct of 2", ArgumentError),
        ]
    for argument, kind, wrongs, words, error in table:
        call = lambda wrong, argument=argument: shared(argument, wrong)  # noqa: E731
        yield from _refused(f"shared_vocabulary: {argument}{kind}", wrongs, call, f"^{argument}: expected {words}", error)
    small = "^target_ids: expected ids from 0 to 4, for 5 tokens of the target and 17 of the draft, got ids from 3 to 9"
    yield from _refused("shared_vocabulary: target of", (5,), lambda wrong: shared("target_vocab_size", wrong), small, ArgumentError)
    for size, words in ((14, "^unknown_id: expected .* 0 to 13, for 11 .* and 14 of"), (15, "^draft_ids: expected .* 0 to 14, for 11 .*")):
        call = lambda wrong: shared("model", ChecksumDraft(vocab_size=wrong))  # noqa: E731
        yield from _refused("shared_vocabulary: draft of", (size,), call, words, ArgumentError)
    yield from _unlike_vocabularies()


def _unlike_vocabularies() -> Iterator[Bad]:
    """What are no vocabularies, and two that share nothing."""
    table: list[tuple[Any, str, type[Exception]]] = [
        ((None, "ab", ["a"], [("a", 0)], ChecksumDraft()), "a mapping of tokens to ids, got", ArgumentTypeError),
        (({"a": 0.0}, {"a": None}, {"a": True}, {"a": "0"}, {b"a": 0}, {0: "a"}), "a mapping of strings to ints, got", ArgumentTypeError),
        (({"a": -1}, {"a": 2**31}), r"ids from 0 to 2147483647, got -?\d+ for 'a'", ArgumentError),
        (({"a": 0, "b": 0}, {"a": 0, "b": 1, "c": 1}), r"one token for each id, got \d ids for \d tokens", ArgumentError),
    ]
    for wrongs, words, error in table:
        for argument, make in (
            ("target_tokens", lambda wrong: match_vocabularies(wrong, {"a": 0})),
            ("draft_tokens", lambda wrong: match_vocabularies({"a": 0}, wrong)),
        ):
            yield from _refused(f"match_vocabularies: {argument}", wrongs, make, f"^{argument}: expected {words}", error)
    nothing = "^draft_tokens: expected at least one token that the target has too, got none among 1 of the target and {} of the draft"
    for other in ({}, {"b": 0}, {"b": 0, "c": 4}):
        call = lambda wrong: match_vocabularies({"a": 0}, wrong)  # noqa: E731
        yield from _refused("match_vocabularies: apart", (other,), call, nothing.format(len(other)), ArgumentError)


GROUPS = (_argmaxes, _draft_files, _with_models, _without_models, _early_exits, _proposals, _models, _vocabularies, _others)
MAKERS = [bad for group in GROUPS for bad in group()]
