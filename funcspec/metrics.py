"""Numbers to judge a drafter by, from what rounds emitted."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from numbers import Real

from funcspec.errors import ArgumentTypeError, check_int, refuse
from funcspec.generation import Emission


@dataclass(frozen=True)
class Statistics:
    """Counts over rounds. Rates are 0 where nothing was counted, never NaN.

    Attributes:
        rounds: rounds counted; first tokens of prompts are no rounds.
        emitted: tokens those rounds emitted.
        drafted: for each draft position, rounds in which a draft there was judged.
        accepted: for each draft position, rounds in which it was kept.
    """

    rounds: int
    emitted: int
    drafted: tuple[int, ...]
    accepted: tuple[int, ...]

    @property
    def acceptance_by_position(self) -> tuple[float, ...]:
        """Share of the judged drafts that was kept, by position; a draft is kept only if all before it are."""
        return tuple(kept / judged if judged else 0.0 for kept, judged in zip(self.accepted, self.drafted, strict=True))

    @property
    def acceptance(self) -> float:
        """Share of all judged drafts that was kept."""
        return sum(self.accepted) / sum(self.drafted) if sum(self.drafted) else 0.0

    @property
    def tokens_per_round(self) -> float:
        """Mean number of tokens a round emitted."""
        return self.emitted / self.rounds if self.rounds else 0.0


def statistics(emissions: Iterable[Emission], num_speculative_tokens: int) -> Statistics:
    """Count what rounds drafted, kept and emitted.

    Args:
        emissions: from `generate` or your own loop.
        num_speculative_tokens: K, number of draft positions.

    Raises:
        ArgumentError, ArgumentTypeError: not emissions, or K is no int or below the drafts of a round.

    Example:
        >>> import funcspec as fs
        >>> target, drafter = fs.models.ChecksumModel(), fs.drafters.standalone(fs.models.ChecksumDraft())
        >>> config = fs.SpecConfig(max_num_reqs=1, max_model_len=64, num_speculative_tokens=3, rule=fs.rules.greedy)
        >>> found = statistics(fs.generate(config, target, drafter, [[5, 6, 7]], max_tokens=9), 3)
        >>> found.rounds, found.accepted, found.acceptance_by_position
        (5, (2, 1, 0), (0.5, 0.25, 0.0))
    """
    check_int("num_speculative_tokens", num_speculative_tokens, 0)
    fix = "pass what generate yields"
    if not isinstance(emissions, Iterable):
        refuse("emissions", "emissions to go through", type(emissions).__name__, fix, ArgumentTypeError)
    rounds = emitted = 0
    drafted, accepted = [0] * num_speculative_tokens, [0] * num_speculative_tokens
    for emission in emissions:
        if not isinstance(emission, Emission):
            refuse("emissions", "values of type Emission", type(emission).__name__, fix, ArgumentTypeError)
        if emission.round == 0:
            continue
        if emission.num_drafted > num_speculative_tokens:
            refuse("num_speculative_tokens", f"at least {emission.num_drafted}, as many as were drafted", num_speculative_tokens, "pass K")
        rounds += 1
        emitted += len(emission.tokens)
        for place in range(emission.num_drafted):
            drafted[place] += 1
            accepted[place] += place < emission.num_accepted
    return Statistics(rounds, emitted, tuple(drafted), tuple(accepted))


def unconditional_to_conditional_rates(rates: Sequence[float]) -> tuple[float, ...]:
    """Turn rates at which drafts are kept into rates given that all drafts before them were.

    A draft is kept only if all before it are, so such rates do not rise along the positions. Where they do, as rates measured on
    few rounds may, the conditional rate is 1: no rate says more than "always".

    Args:
        rates: for each draft position, the share of rounds in which its draft is kept, from 0 to 1.

    Returns:
        the first rate, then the ratio of each to the one before it, at most 1; 0 after a 0.

    Raises:
        ArgumentError: a rate outside of 0 to 1.
        ArgumentTypeError: not numbers.

    Example:
        >>> unconditional_to_conditional_rates([0.8, 0.4, 0.4, 0.0, 0.1])
        (0.8, 0.5, 1.0, 0.0, 0.0)
        >>> unconditional_to_conditional_rates([0.5, 0.8])
        (0.5, 1.0)
    """
    if not isinstance(rates, Sequence):
        refuse("rates", "a sequence of numbers", type(rates).__name__, "pass a list", ArgumentTypeError)
    for position, rate in enumerate(rates):
        if not isinstance(rate, Real) or isinstance(rate, bool):
            refuse("rates", "numbers from 0 to 1", f"{rate!r:.60} at position {position}", "convert it to a float", ArgumentTypeError)
        if not 0 <= rate <= 1:
            refuse("rates", "numbers from 0 to 1", f"{rate} at position {position}", "pass shares of rounds, such as 0.8")
    before = (1.0, *rates)
    return tuple(min(rate / last, 1.0) if last > 0 else 0.0 for last, rate in zip(before, rates, strict=False))


__all__ = ["Statistics", "statistics", "unconditional_to_conditional_rates"]
