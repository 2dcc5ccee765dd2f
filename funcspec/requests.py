"""Prompts and their settings, validated: what a caller passes becomes `Request` values or a clear error."""

import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from funcspec.config import MAX_TEMPERATURE, MIN_TEMPERATURE, SpecConfig
from funcspec.errors import ArgumentTypeError, CapacityError, refuse
from funcspec.models.base import Model
from funcspec.noise import split_seed


@dataclass(frozen=True)
class Request:
    """One prompt with its validated settings: what `validate` makes and `admit_requests` takes.

    Attributes:
        rope: [A, L] int32 rotary positions of the whole row, for a target that has its own.
    """

    prompt: list[int]
    seed: tuple[int, int]
    temperature: float
    row_limit: int
    min_len: int
    stop_ids: list[int]
    rope: np.ndarray | None = None


def _each(argument: str, value: Any, count: int, kinds: tuple[type, ...]) -> list[Any]:
    """One value for every prompt, from one value or a sequence."""
    values = [value] * count if isinstance(value, kinds) or value is None else list(value) if isinstance(value, Sequence) else None
    if values is None or len(values) != count:
        refuse(argument, f"one value or {count}, one a prompt", repr(value), "match the number of prompts")
    return values


def validate(
    config: SpecConfig,
    target: Model,
    prompts: Any,
    seeds: Any,
    temperature: Any,
    max_tokens: Any,
    min_tokens: Any,
    stop_ids: Any,
    rope_positions: Any = None,
) -> list[Request]:
    """Check prompts and settings as `admit` takes them; refuses the first thing that is out of range."""
    lists = prompt_lists(prompts)
    count = len(lists)
    if seeds is not None and (not isinstance(seeds, Sequence) or isinstance(seeds, str | bytes) or len(seeds) != count):
        refuse("seeds", f"{count} seeds, one a prompt", repr(seeds), "give every prompt a seed, or None for fresh ones")
    seeds = [secrets.randbits(64) for _ in range(count)] if seeds is None else seeds
    temperatures = _each("temperature", temperature, count, (int, float))
    limits = _each("max_tokens", max_tokens, count, (int,))
    least = _each("min_tokens", min_tokens, count, (int,))
    stops = _stop_lists(stop_ids, count)
    given = _rope_lists(rope_positions, count, getattr(target, "rope_axes", 0))
    return [
        Request(
            _check_prompt(index, lists[index], config, target.vocab_size),
            split_seed(seeds[index]),
            _check_temperature(temperatures[index], config),
            _row_limit(limits[index], len(lists[index]), config),
            _min_len(least[index], limits[index], len(lists[index]), config),
            _check_ids("stop_ids", stops[index], target.vocab_size, config.max_num_stop_ids),
            _rope_row(f"rope_positions[{index}]", given[index], getattr(target, "rope_axes", 0), len(lists[index]), config.max_model_len),
        )
        for index in range(count)
    ]


def _rope_lists(rope_positions: Any, count: int, axes: int) -> list[Any]:
    """Rotary positions of each prompt, None for those of plain text."""
    if rope_positions is None:
        return [None] * count
    if not axes:
        refuse("rope_positions", "None, as the target has none but its positions", type(rope_positions).__name__, "leave them out")
    if not isinstance(rope_positions, Sequence) or len(rope_positions) != count:
        refuse(
            "rope_positions", f"{count} arrays, one a prompt", repr(rope_positions)[:60], "give every prompt its own, None for plain text"
        )
    return list(rope_positions)


def _rope_row(name: str, given: Any, axes: int, prompt_len: int, length: int) -> np.ndarray | None:
    """Rotary positions [A, L] of a row: those of its prompt, and from there on by one on all axes alike."""
    if not axes:
        return None
    if given is None:
        given = np.tile(np.arange(prompt_len), (axes, 1))
    try:
        values = np.asarray(given.cpu() if hasattr(given, "cpu") else given)
    except (TypeError, ValueError) as error:
        refuse(name, f"integers [{axes}, {prompt_len}]", str(error)[:80], "pass an array", ArgumentTypeError)
    if values.dtype.kind not in "iu":
        refuse(name, f"integers [{axes}, {prompt_len}]", f"{values.dtype} {values.shape}", "pass an integer array", ArgumentTypeError)
    if values.shape != (axes, prompt_len):
        refuse(
            name, f"shape [{axes}, {prompt_len}], positions by axis for every token of the prompt", values.shape, "transpose or complete it"
        )
    most = 2**31 - 1 - length
    if values.min() < 0 or values.max() > most:
        refuse(name, f"positions from 0 to {most}", f"{values.min()} to {values.max()}", "count from the first token")
    behind = np.arange(1, length - prompt_len + 1) + values.max()
    return np.concatenate([values, np.tile(behind, (axes, 1))], 1).astype(np.int32)


def _stop_lists(stop_ids: Any, count: int) -> list[Sequence[Any]]:
    """A list of stop ids for each prompt, from one list or one for each."""

    def is_list(value: Any) -> bool:
        return isinstance(value, Sequence) and not isinstance(value, str | bytes)

    if not is_list(stop_ids):
        refuse("stop_ids", "a list of token ids, or one for each prompt", repr(stop_ids)[:60], "pass a list, empty for none")
    own = len(stop_ids) > 0 and all(map(is_list, stop_ids))
    return _each("stop_ids", stop_ids, count, ()) if own else [stop_ids] * count


def prompt_lists(prompts: Any) -> list[list[Any]]:
    """Refuse what is no sequence of prompts; return each as a list. Its items are still to be looked at."""
    if isinstance(prompts, str | bytes) or not isinstance(prompts, Sequence) or not prompts:
        refuse("prompts", "a non-empty sequence of token id sequences", repr(prompts)[:60], "tokenise first and pass a list of prompts")
    return [_prompt_list(f"prompts[{index}]", prompt) for index, prompt in enumerate(prompts)]


def _prompt_list(name: str, prompt: Any) -> list[Any]:
    if isinstance(prompt, int | str | bytes) or not (isinstance(prompt, Sequence) or hasattr(prompt, "tolist")):
        refuse(name, "a sequence of token ids", repr(prompt)[:60], "pass a list of prompts, each a list of ints", ArgumentTypeError)
    ids = list(prompt) if isinstance(prompt, Sequence) else prompt.tolist()
    if not isinstance(ids, list):
        refuse(name, "a sequence of token ids", repr(prompt)[:60], "pass a one-dimensional array", ArgumentTypeError)
    if not ids:
        refuse(name, "at least one token id", "an empty prompt", "start with the model's first token")
    return ids


def _check_prompt(index: int, ids: list[Any], config: SpecConfig, vocab_size: int) -> list[int]:
    name = f"prompts[{index}]"
    if len(ids) >= config.max_model_len:
        refuse(
            name,
            f"at most max_model_len - 1 = {config.max_model_len - 1} ids",
            len(ids),
            "shorten it or raise max_model_len",
            CapacityError,
        )
    return _check_ids(name, ids, vocab_size, len(ids))


def _check_ids(argument: str, ids: Sequence[Any], vocab_size: int, most: int) -> list[int]:
    if len(ids) > most:
        refuse(argument, f"at most max_num_stop_ids = {most} ids", len(ids), "raise SpecConfig.max_num_stop_ids", CapacityError)
    for token in ids:
        if not isinstance(token, int) or isinstance(token, bool):
            refuse(argument, "int token ids", f"{token!r} ({type(token).__name__})", "convert ids to Python ints", ArgumentTypeError)
        if not 0 <= token < vocab_size:
            refuse(argument, f"ids from 0 to {vocab_size - 1}", token, "use the target's tokenizer")
    return list(ids)


def _check_temperature(value: Any, config: SpecConfig) -> float:
    if not isinstance(value, int | float) or isinstance(value, bool):
        refuse("temperature", "a number", f"{value!r} ({type(value).__name__})", "use 0 for greedy", ArgumentTypeError)
    if not (value == 0 or MIN_TEMPERATURE <= value <= MAX_TEMPERATURE):  # NaN fails both
        refuse("temperature", f"0 (greedy) or a number from {MIN_TEMPERATURE} to {MAX_TEMPERATURE:g}", repr(value)[:60], "use 0 for greedy")
    if value > 0 and not config.rule.samples:
        refuse("temperature", f"0 under {config.rule!r}", value, "use rules.coupled to sample")
    return float(value)


def _row_limit(max_tokens: Any, prompt_len: int, config: SpecConfig) -> int:
    if max_tokens is None:
        return config.max_model_len
    if not isinstance(max_tokens, int) or isinstance(max_tokens, bool) or max_tokens < 1:
        refuse("max_tokens", "a positive int or None", repr(max_tokens), "ask for at least one token")
    return min(config.max_model_len, prompt_len + max_tokens)


def _min_len(min_tokens: Any, max_tokens: Any, prompt_len: int, config: SpecConfig) -> int:
    if not isinstance(min_tokens, int) or isinstance(min_tokens, bool) or min_tokens < 0:
        refuse("min_tokens", "an int of 0 or more", repr(min_tokens), "leave it out to let rows stop at any time")
    if min_tokens == 0:
        return 0
    if not config.allows_min_tokens:
        refuse("min_tokens", "0 in this configuration", min_tokens, "make the state with SpecConfig(allows_min_tokens=True)")
    if max_tokens is not None and min_tokens > max_tokens:
        refuse("min_tokens", f"at most max_tokens = {max_tokens}", min_tokens, "ask for fewer tokens at least, or more at most")
    return min(prompt_len + min_tokens, config.max_model_len)
