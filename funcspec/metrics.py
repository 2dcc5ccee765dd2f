"""Numbers to judge a drafter by, from what rounds emitted."""

from collections.abc import Iterable
from dataclasses import dataclass

from funcspec.errors import refuse
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

    Example:
        >>> import funcspec as fs
        >>> target, drafter = fs.models.ChecksumModel(), fs.drafters.standalone(fs.models.ChecksumDraft())
        >>> config = fs.SpecConfig(max_num_reqs=1, max_model_len=64, num_speculative_tokens=3, rule=fs.rules.greedy)
        >>> found = statistics(fs.generate(config, target, drafter, [[5, 6, 7]], max_tokens=9), 3)
        >>> found.rounds, found.accepted, found.acceptance_by_position
        (5, (2, 1, 0), (0.5, 0.25, 0.0))
    """
    rounds = emitted = 0
    drafted, accepted = [0] * num_speculative_tokens, [0] * num_speculative_tokens
    for emission in emissions:
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
