"""Suffix decoding by its definition, in plain Python: every substring is counted, and probabilities are products of ratios."""

from collections import Counter
from collections.abc import Iterable, Sequence
from fractions import Fraction

TENTH = Fraction(1, 10)


def substrings(texts: Iterable[Sequence[int]], depth: int) -> Counter[tuple[int, ...]]:
    """How often every run of 1 to `depth` tokens stands in the texts; -1 is no token and in no run."""
    counts: Counter[tuple[int, ...]] = Counter()
    for text in texts:
        for start in range(len(text)):
            for end in range(start + 1, min(start + depth, len(text)) + 1):
                if -1 in text[start:end]:
                    break
                counts[tuple(text[start:end])] += 1
    return counts


def speculate(
    counts: Counter[tuple[int, ...]], pattern: Sequence[int], budgets: Sequence[int], most: int, min_probability: Fraction = TENTH
) -> tuple[Fraction, list[int]]:
    """The best score and its draft, over every suffix of the pattern, longest first; budgets[m - 1] is for one of m tokens."""
    best: tuple[Fraction, list[int]] = Fraction(0), []
    for size in range(min(len(budgets), len(pattern)), 0, -1):
        suffix = tuple(pattern[len(pattern) - size :])
        drafts: list[int] = []
        probability, score = Fraction(1), Fraction(0)
        while counts[suffix] and len(drafts) < min(budgets[size - 1], most):
            here = (*suffix, *drafts)
            ways = {run[-1]: count for run, count in counts.items() if len(run) == len(here) + 1 and run[:-1] == here}
            if not ways:
                break
            token = min(ways, key=lambda way: (-ways[way], way))
            probability *= Fraction(ways[token], counts[here])
            if probability < min_probability:
                break
            drafts.append(token)
            score += probability
        if score > best[0]:
            best = score, drafts
    return best


def limits(depth: int = 24, factor: Fraction = Fraction(1), offset: Fraction = Fraction(0)) -> tuple[int, ...]:
    """Most drafts behind a match of 1, 2, ... tokens: the two together are at most `depth`."""
    return tuple(max(0, min(int((size * factor + offset) // 1), depth - size)) for size in range(1, depth))


def proposed(
    rows: Sequence[Sequence[int]],
    row: int,
    most: int,
    *,
    budgets: Sequence[int] | None = None,
    min_probability: Fraction = TENTH,
    corpus: Sequence[Sequence[int]] = (),
    shared: bool = False,
) -> list[int]:
    """What a row is proposed, all rows given: by itself, or by all else that it may look at where that scores higher."""
    budgets = limits() if budgets is None else budgets
    others = [text for number, text in enumerate(rows) if number != row] if shared else []
    best: tuple[Fraction, list[int]] = Fraction(0), []
    for texts in ([rows[row]], [*others, *corpus]):
        found = speculate(substrings(texts, len(budgets) + max(budgets)), rows[row], budgets, most, min_probability)
        best = found if found[0] > best[0] else best
    return best[1]
