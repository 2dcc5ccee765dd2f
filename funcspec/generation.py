"""The whole loop: prompts in, emitted tokens out, streamed row by row."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import jax

from funcspec.admission import admit_requests, init, release
from funcspec.config import SpecConfig
from funcspec.drafters.base import Drafter
from funcspec.errors import refuse
from funcspec.kernels.acceptance import BONUS
from funcspec.models.base import Model
from funcspec.requests import Request, validate
from funcspec.state import SpecState
from funcspec.steps import Verdict, step_round


@dataclass(frozen=True)
class Emission:
    """Tokens that one prompt got in one round.

    Attributes:
        prompt_index: which prompt.
        tokens: the emitted tokens, already trimmed by stop ids and length caps.
        origin: for each token 0 accepted draft, 1 recovered, 2 bonus (the first token of a prompt counts as bonus).
        num_drafted: drafts that were verified in the round.
        num_accepted: how many of `tokens` are accepted drafts.
        finish_reason: 0 goes on, 1 stop id, 2 length.
        bad_row: whether a token came from logits with NaN, +inf or nothing allowed.
        round: number of the prompt's round, 0 for its first token.
    """

    prompt_index: int
    tokens: tuple[int, ...]
    origin: tuple[int, ...]
    num_drafted: int
    num_accepted: int
    finish_reason: int
    bad_row: bool
    round: int


def generate(
    config: SpecConfig,
    target: Model,
    drafter: Drafter | None,
    prompts: Sequence[Sequence[int]],
    *,
    seeds: Sequence[int] | None = None,
    temperature: float | Sequence[float] = 0.0,
    max_tokens: int | Sequence[int] | None = None,
    stop_ids: Sequence[int] | Sequence[Sequence[int]] = (),
    num_draft: int | None = None,
) -> Iterator[Emission]:
    """Decode prompts to their end and stream what each gets, round by round.

    More prompts than rows are fine: a prompt waits until a row is free. A short composition of `init`, `admit`, `step_round`
    and `release`; write your own for anything special.

    Args:
        config: capacities and rule.
        target, drafter: the models; a drafter of None decodes plainly.
        prompts, seeds, temperature, max_tokens, stop_ids: as for `admit`.
        num_draft: drafts wanted in each round; None is K.

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
    state = init(config, target, drafter)
    most = config.num_speculative_tokens
    if num_draft is not None and (not isinstance(num_draft, int) or isinstance(num_draft, bool) or not 0 <= num_draft <= most):
        refuse("num_draft", f"None or an int from 0 to num_speculative_tokens = {most}", repr(num_draft), "draft fewer or raise K")
    requests = validate(config, target, prompts, seeds, temperature, max_tokens, stop_ids)
    return _loop(state, target, drafter, requests, num_draft)


def _loop(state: SpecState, target: Model, drafter: Drafter | None, requests: list[Request], num_draft: int | None) -> Iterator[Emission]:
    turn = _round_function(state, target, drafter, num_draft)
    waiting = list(enumerate(requests))[::-1]
    rows: dict[int, int] = {}  # row -> prompt
    rounds = [0] * len(requests)
    while waiting or rows:
        while waiting and len(rows) < state.config.max_num_reqs:
            index, request = waiting.pop()
            state, first = admit_requests(state, target, drafter, [request], donate=True)
            yield Emission(index, first.tokens, (BONUS,), 0, 0, first.finish_reason[0], bool(first.bad_row[0]), 0)
            if first.finish_reason[0]:
                state = release(state, first.rows, donate=True)
            else:
                rows[first.rows[0]] = index
        if not rows:
            continue
        state, verdict = turn(state)
        for row, emission in emissions(verdict, rows, rounds):
            yield emission
            if emission.finish_reason:
                del rows[row]
                state = release(state, [row], donate=True)


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
