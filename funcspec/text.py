"""Text of an output as its tokens come: whole characters only, and nothing of a stop string."""

import operator
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from tokenizers import Tokenizer
from tokenizers.decoders import DecodeStream

from funcspec.errors import ArgumentTypeError, check_bool, refuse

LARGEST_ID = 2**32 - 1
"""Tokenizers number tokens with 32 bits."""


@dataclass(frozen=True)
class Piece:
    """What some tokens added to a text.

    Attributes:
        text: new text. It may lag behind the tokens, while bytes do not make a whole character or could begin a stop string.
        kept: how many of the tokens count: all of them, or those up to the one that completed a stop string.
        stopped: whether a stop string was completed.
    """

    text: str
    kept: int
    stopped: bool


class TextStream:
    """Turns the tokens of one output into text, piece by piece.

    The pieces together are the decoded text up to, and without, the first stop string that is completed. If one token completes
    several, the one that ends first counts, and of those that end together the longest.

    Args:
        tokenizer: a `tokenizers.Tokenizer`, or a fast tokenizer of transformers.
        stop_strings: strings at which the text ends.
        skip_special_tokens: whether special tokens are left out of the text.
        min_tokens: a stop string counts only if a token after the first `min_tokens` completes it.

    Raises:
        ArgumentTypeError: a tokenizer without a Rust backend, or stop strings that are not strings.
        ArgumentError: an empty stop string, or a negative number of tokens.

    Example:
        >>> from tokenizers import Tokenizer, models, decoders
        >>> tokenizer = Tokenizer(models.WordLevel({"one": 0, "two": 1, "END": 2}, unk_token="one"))
        >>> tokenizer.decoder = decoders.Fuse()
        >>> stream = TextStream(tokenizer, ["oE"])
        >>> stream.add([0, 1]), stream.add([2, 0])
        (Piece(text='onetw', kept=2, stopped=False), Piece(text='', kept=1, stopped=True))
    """

    def __init__(self, tokenizer: Any, stop_strings: Sequence[str] = (), *, skip_special_tokens: bool = True, min_tokens: int = 0) -> None:
        if not isinstance(min_tokens, int) or isinstance(min_tokens, bool) or min_tokens < 0:
            refuse("min_tokens", "an int of 0 or more", repr(min_tokens), "leave it out to stop at any token")
        check_bool("skip_special_tokens", skip_special_tokens)
        self._tokenizer = backend(tokenizer)
        self._stops = check_stop_strings(stop_strings)
        self._stream = DecodeStream(skip_special_tokens=skip_special_tokens)
        self._skip = skip_special_tokens
        self._tokens: list[int] = []
        self._seen = ""  # all text so far, what is held back included
        self._given = 0  # how much of it was handed out
        self._min_tokens = min_tokens
        self._floor = 0  # where stop strings may end at the earliest
        self._stopped = False

    def add(self, tokens: Iterable[int]) -> Piece:
        """Take in tokens; after a stop string none count.

        Raises:
            ArgumentError, ArgumentTypeError: not all of them are token ids; none was taken in.
        """
        kept = 0
        for token in _token_ids(tokens):
            if self._stopped:
                break
            kept += 1
            self._tokens.append(token)
            self._seen += self._stream.step(self._tokenizer, token) or ""
            if len(self._tokens) <= self._min_tokens:
                self._floor = len(self._seen)
                continue
            end = self._find_stop()
            if end is not None:
                self._seen, self._stopped = self._seen[:end], True
        return Piece(self._release(len(self._seen) if self._stopped else self._safe()), kept, self._stopped)

    def finish(self) -> str:
        """The rest of the text, when no more tokens come: what was held back, and bytes that make no whole character."""
        if not self._stopped:
            whole = self._tokenizer.decode(self._tokens, skip_special_tokens=self._skip)
            if whole.startswith(self._seen):
                self._seen = whole
            self._stopped = True
        return self._release(len(self._seen))

    def _find_stop(self) -> int | None:
        """Where the first completed stop string begins, or None."""
        found = []
        for stop in self._stops:
            # Only what is not given out yet can hold one: text that could begin a stop string is held back.
            start = self._seen.find(stop, max(self._given, self._floor - len(stop) + 1))
            if start >= 0:
                found.append((start + len(stop), start))
        return min(found)[1] if found else None

    def _safe(self) -> int:
        """How much of the text cannot be the beginning of a stop string."""
        longest = max(map(len, self._stops), default=1)
        for held in range(min(longest - 1, len(self._seen) - self._given), 0, -1):
            if any(stop.startswith(self._seen[-held:]) for stop in self._stops):
                return len(self._seen) - held
        return len(self._seen)

    def _release(self, end: int) -> str:
        text, self._given = self._seen[self._given : end], max(end, self._given)
        return text


def _token_ids(tokens: Any) -> list[int]:
    """Refuse what are no token ids."""
    fix = "pass a list of ints"
    if isinstance(tokens, str | bytes) or not isinstance(tokens, Iterable):
        refuse("tokens", "token ids", repr(tokens)[:60], fix, ArgumentTypeError)
    found = []
    for token in tokens:
        try:
            number = operator.index(token)
        except TypeError:
            refuse("tokens", "int token ids", f"{token!r:.60} ({type(token).__name__})", fix, ArgumentTypeError)
        if not 0 <= number <= LARGEST_ID:
            refuse("tokens", f"ids from 0 to {LARGEST_ID}", number, "pass the ids of emitted tokens")
        found.append(number)
    return found


def backend(tokenizer: Any) -> Tokenizer:
    """The `tokenizers.Tokenizer` in a tokenizer.

    Raises:
        ArgumentTypeError: there is none.
    """
    inner = getattr(tokenizer, "backend_tokenizer", tokenizer)
    if not isinstance(inner, Tokenizer):
        expected, fix = "a tokenizers.Tokenizer or a fast tokenizer of transformers", "load it with use_fast=True"
        refuse("tokenizer", expected, type(tokenizer).__name__, fix, ArgumentTypeError)
    return inner


def check_stop_strings(stop_strings: Any) -> tuple[str, ...]:
    """Refuse what is no sequence of non-empty strings."""
    if isinstance(stop_strings, str) or not isinstance(stop_strings, Sequence) or not all(isinstance(s, str) for s in stop_strings):
        refuse("stop_strings", "a sequence of strings", repr(stop_strings)[:60], "pass a list, empty for none", ArgumentTypeError)
    if not all(stop_strings):
        refuse("stop_strings", "strings of at least one character", repr(list(stop_strings))[:60], "leave the empty one out")
    return tuple(stop_strings)


__all__ = ["Piece", "TextStream"]
