"""The whole loop: prompts in, emitted tokens out, streamed row by row."""

from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax

from funcspec.admission import admit_requests, init, release
from funcspec.config import SpecConfig
from funcspec.drafters.base import Drafter
from funcspec.errors import ArgumentTypeError, refuse
from funcspec.kernels.acceptance import BONUS, STOPPED
from funcspec.models.base import Model
from funcspec.requests import Request, validate
from funcspec.state import SpecState
from funcspec.steps import Verdict, step_round
from funcspec.text import TextStream, check_stop_strings


@dataclass(frozen=True)
class Emission:
    """Tokens that one prompt got in one round.

    Attributes:
        prompt_index: which prompt.
        tokens: the emitted tokens, already trimmed by stop ids and length caps.
        origin: for each token 0 accepted draft, 1 recovered, 2 bonus (the first token of a prompt counts as bonus).
        num_drafted: drafts that were verified in the round.
        num_accepted: how many of `tokens` are accepted drafts.
        finish_reason: 0 goes on, 1 stop id or stop string, 2 length.
        bad_row: whether a token came from logits with NaN, +inf or nothing allowed.
        round: number of the prompt's round, 0 for its first token.
        text: what `tokens` added to the prompt's text, if there is a tokenizer; see `funcspec.text.TextStream`.
    """

    prompt_index: int
    tokens: tuple[int, ...]
    origin: tuple[int, ...]
    num_drafted: int
    num_accepted: int
    finish_reason: int
    bad_row: bool
    round: int
    text: str = ""


def generate(
    config: SpecConfig,
    target: Model,
    drafter: Drafter | None,
    prompts: Sequence[Sequence[int]],
    *,
    seeds: Sequence[int] | None = None,
    temperature: float | Sequence[float] = 0.0,
    max_tokens: int | Sequence[int] | None = None,
    min_tokens: int | Sequence[int] = 0,
    stop_ids: Sequence[int] | Sequence[Sequence[int]] = (),
    num_draft: int | None = None,
    tokenizer: Any = None,
    stop_strings: Sequence[str] = (),
) -> Iterator[Emission]:
    """Decode prompts to their end and stream what each gets, round by round.

    More prompts than rows are fine: a prompt waits until a row is free. A short composition of `init`, `admit`, `step_round`
    and `release`; write your own for anything special.

    Args:
        config: capacities and rule.
        target, drafter: the models; a drafter of None decodes plainly.
        prompts, seeds, temperature, max_tokens, stop_ids: as for `admit`.
        min_tokens: as for `admit`; the configuration need not allow it beforehand. It also holds off stop strings: one ends a prompt
            if it is completed by a later token.
        num_draft: drafts wanted in each round; None is K.
        tokenizer: a `tokenizers.Tokenizer`, or a fast tokenizer of transformers; then emissions carry text, never part of a character.
        stop_strings: a prompt ends with the token that completes one of these. Its text ends before the string; tokens that the same
            round emitted behind that token are left out. Needs the tokenizer.

    Yields:
        an `Emission` for each prompt that got tokens; the first of a prompt holds its first token.

    Raises:
        ArgumentError, ArgumentTypeError, ModelError: as for `init` and `admit`, before anything is yielded.

    Example:
        >>> import funcspec as fs
        >>> target, drafter = fs.models.ChecksumModel(), fs.drafters.standalone(fs.models.ChecksumDraft())
        >>> config = fs.SpecConfig(max_num_reqs=1, max_model_len=32, num_speculative_tokens=3, rule=fs.rules.greedy)
        >>> [e.tokens for e in fs.generate(config, target, drafter, [[5, 6, 7]], max_tokens=6)]
        [(39,), (1, 6), (42,), (45,), (17,)]
    """
    if not (isinstance(min_tokens, int) and min_tokens == 0) and isinstance(config, SpecConfig):
        config = config.replace(allows_min_tokens=True)
    state = init(config, target, drafter)
    most = config.num_speculative_tokens
    if num_draft is not None and (not isinstance(num_draft, int) or isinstance(num_draft, bool) or not 0 <= num_draft <= most):
        refuse("num_draft", f"None or an int from 0 to num_speculative_tokens = {most}", repr(num_draft), "draft fewer or raise K")
    requests = validate(config, target, prompts, seeds, temperature, max_tokens, min_tokens, stop_ids)
    if check_stop_strings(stop_strings) and tokenizer is None:
        refuse("tokenizer", "a tokenizer, to look for stop strings", "None", "pass the target's tokenizer", ArgumentTypeError)
    emitted = _loop(state, target, drafter, requests, num_draft)
    if tokenizer is None:
        return emitted
    least = [max(request.min_len - len(request.prompt), 0) for request in requests]
    streams = [TextStream(tokenizer, stop_strings, min_tokens=count) for count in least]
    return _with_text(emitted, streams)


def _loop(
    state: SpecState, target: Model, drafter: Drafter | None, requests: list[Request], num_draft: int | None
) -> Generator[Emission, bool | None, None]:
    """Yield what each prompt gets; what is sent back says whether the prompt is to end there."""
    turn = _round_function(state, target, drafter, num_draft)
    waiting = list(enumerate(requests))[::-1]
    rows: dict[int, int] = {}  # row -> prompt
    rounds = [0] * len(requests)
    while waiting or rows:
        while waiting and len(rows) < state.config.max_num_reqs:
            index, request = waiting.pop()
            state, first = admit_requests(state, target, drafter, [request], donate=True)
            ended = yield Emission(index, first.tokens, (BONUS,), 0, 0, first.finish_reason[0], bool(first.bad_row[0]), 0)
            if first.finish_reason[0] or ended:
                state = release(state, first.rows, donate=True)
            else:
                rows[first.rows[0]] = index
        if not rows:
            continue
        state, verdict = turn(state)
        for row, emission in emissions(verdict, rows, rounds):
            ended = yield emission
            if emission.finish_reason or ended:
                del rows[row]
                state = release(state, [row], donate=True)


def _with_text(emitted: Generator[Emission, bool | None, None], streams: list[TextStream]) -> Iterator[Emission]:
    """Add text to emissions, and end prompts at stop strings."""
    ended: bool | None = None
    while True:
        try:
            emission = emitted.send(ended)
        except StopIteration:
            return
        stream = streams[emission.prompt_index]
        piece = stream.add(emission.tokens)
        ended = piece.stopped
        reason = STOPPED if ended else emission.finish_reason
        yield replace(
            emission,
            tokens=emission.tokens[: piece.kept],
            origin=emission.origin[: piece.kept],
            num_accepted=min(emission.num_accepted, piece.kept),
            finish_reason=reason,
            text=piece.text + (stream.finish() if reason and not ended else ""),
        )


def _round_function(
    state: SpecState, target: Model, drafter: Drafter | None, num_draft: int | None
) -> Callable[[SpecState], tuple[SpecState, Verdict]]:
    """A donated round; for a state of JAX as one compiled program."""
    if state.framework == "torch":
        return lambda state: step_round(state, target, drafter, num_draft=num_draft, donate=True)
    if all(isinstance(leaf, jax.Array) for leaf in jax.tree.leaves((target, drafter))):
        program = jax.jit(partial(step_round, num_draft=num_draft), donate_argnums=0)
        return lambda state: program(state, target, drafter)
    # A model that is no pytree cannot be an argument; its arrays become constants of the program.
    return jax.jit(lambda state: step_round(state, target, drafter, num_draft=num_draft), donate_argnums=0)


def emissions(verdict: Verdict, rows: dict[int, int], rounds: list[int]) -> list[tuple[int, Emission]]:
    """Read a verdict on the host: the emission of each live row, and the row. Counts up `rounds` of their prompts."""
    tokens, origin = verdict.tokens.tolist(), verdict.origin.tolist()
    emitted, drafted, accepted = verdict.num_emitted.tolist(), verdict.num_drafted.tolist(), verdict.num_accepted.tolist()
    reasons, bad = verdict.finish_reason.tolist(), verdict.bad_row.tolist()
    found = []
    for row, index in sorted(rows.items()):
        rounds[index] += 1
        run = slice(emitted[row])
        emission = Emission(
            index,
            tuple(tokens[row][run]),
            tuple(origin[row][run]),
            drafted[row],
            accepted[row],
            reasons[row],
            bool(bad[row]),
            rounds[index],
        )
        found.append((row, emission))
    return found
