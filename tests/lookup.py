"""Prompt lookup by its definition, in plain Python, and what rounds with it must do."""

from collections.abc import Callable, Sequence

Next = Callable[[Sequence[int]], int]


def found(
    text: Sequence[int], most: int, *, max_ngram: int = 3, min_ngram: int = 1, window: int | None = None, latest: bool = False
) -> list[int]:
    """Every size, longest first; every earlier occurrence, in order; at most `most` of the tokens behind it."""
    text = list(text[-window:] if window is not None else text)
    for size in range(min(max_ngram, len(text)), min_ngram - 1, -1):
        ends = [end for end in range(size, len(text)) if text[end - size : end] == text[len(text) - size :]]
        if ends:
            end = ends[-1] if latest else ends[0]
            return text[end : end + most]
    return []


def checksum(vocab_size: int) -> tuple[Next, Next]:
    """Next tokens of `ChecksumModel` and `ChecksumDraft`."""

    def target(sequence: Sequence[int]) -> int:
        return (1 + sum((place + 1) * token for place, token in enumerate(sequence))) % vocab_size

    def draft(sequence: Sequence[int]) -> int:
        token = target(sequence)
        return (token + 1) % vocab_size if token % 3 == 0 else token

    return target, draft


def drafted(sequence: Sequence[int], most: int, second: Next | None, **lookup: object) -> list[int]:
    """What a round drafts behind a sequence: what lookup finds, or what `second` says where it finds nothing."""
    proposal = found(sequence, 10**9, **lookup)  # type: ignore[arg-type]
    if proposal or second is None:
        return proposal[: max(most, 0)]
    drafts: list[int] = []
    while len(drafts) < most:
        drafts.append(second([*sequence, *drafts]))
    return drafts


def emitted(sequence: Sequence[int], drafts: Sequence[int], target: Next) -> tuple[int, list[int]]:
    """How many drafts greedy acceptance keeps, and the tokens of the round."""
    tokens: list[int] = []
    for draft in [*drafts, None]:
        tokens.append(target([*sequence, *tokens]))
        if draft != tokens[-1]:
            break
    return len(tokens) - 1, tokens
