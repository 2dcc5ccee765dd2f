"""Independent truth for the tests: plain Python, no library code."""

from collections.abc import Sequence

import torch

import funcspec as fs
from funcspec.models import ChecksumDraft, ChecksumModel

VOCAB = 97

# Reference sequences of the checksum pair: prompt -> 16 greedy tokens, accepted per round for K=3 and K=1.
CHECKSUM_RUNS = {
    (5, 6, 7): (
        (39, 1, 6, 42, 45, 17, 73, 27, 33, 41, 89, 74, 20, 49, 9, 74),
        (1, 0, 0, 2, 0, 3, 1, 3),
        (1, 0, 0, 1, 0, 0, 1, 1, 1, 1),
    ),
    (1,): (
        (2, 6, 24, 23, 41, 93, 65, 3, 30, 39, 80, 70, 10, 53, 72, 60),
        (0, 0, 2, 1, 0, 0, 3, 0, 0),
        (0, 0, 1, 0, 1, 0, 0, 1, 1, 0, 0),
    ),
    (40, 2, 9, 9): (
        (11, 66, 74, 10, 90, 27, 6, 72, 63, 9, 38, 26, 54, 2, 38, 81),
        (0, 2, 0, 0, 0, 0, 0, 2, 2),
        (0, 1, 0, 0, 0, 0, 0, 0, 1, 0, 1, 0),
    ),
}


def checksum_next(sequence: Sequence[int]) -> int:
    """Next token of the checksum target."""
    return (1 + sum((i + 1) * token for i, token in enumerate(sequence))) % VOCAB


def checksum_draft_next(sequence: Sequence[int]) -> int:
    """Next token of the checksum draft."""
    token = checksum_next(sequence)
    return (token + 1) % VOCAB if token % 3 == 0 else token


def checksum_greedy(prompt: Sequence[int], count: int) -> list[int]:
    """Plain greedy decoding."""
    sequence = list(prompt)
    for _ in range(count):
        sequence.append(checksum_next(sequence))
    return sequence[len(prompt) :]


def checksum_rounds(prompt: Sequence[int], rounds: int, num_draft: int | Sequence[int], limit: int = 10**9) -> list[tuple[int, list[int]]]:
    """Accepted count and emitted tokens of each round of greedy speculative decoding, without caches."""
    sequence = [*prompt, checksum_next(prompt)]
    found = []
    for number in range(rounds):
        wanted = num_draft if isinstance(num_draft, int) else num_draft[number]
        drafts = list(sequence)
        for _ in range(min(wanted, limit - len(sequence) - 1)):
            drafts.append(checksum_draft_next(drafts))
        accepted = 0
        emitted = []
        for place in range(len(sequence), len(drafts) + 1):
            token = checksum_next([*sequence, *emitted])
            emitted.append(token)
            if place == len(drafts) or drafts[place] != token:
                break
            accepted += 1
        sequence += emitted
        found.append((accepted, emitted))
        if len(sequence) >= limit:
            break
    return found


def pair(**settings: bool) -> tuple[ChecksumModel, fs.drafters.Standalone]:
    """The checksum target and its drafter."""
    return ChecksumModel(**settings), fs.drafters.standalone(ChecksumDraft(**settings))


def config(rows: int = 1, length: int = 64, drafts: int = 3, rule: fs.rules.Rule = fs.rules.greedy, **settings: object) -> fs.SpecConfig:
    """A small configuration."""
    return fs.SpecConfig(max_num_reqs=rows, max_model_len=length, num_speculative_tokens=drafts, rule=rule, **settings)


def output(state: fs.SpecState, row: int) -> list[int]:
    """Committed output of a row."""
    return state.tokens[row, int(state.prompt_len[row]) : int(state.num_tokens[row])].tolist()


def run(state: fs.SpecState, target: object, drafter: object, rounds: int, **settings: object) -> fs.SpecState:
    """Some rounds."""
    for _ in range(rounds):
        state, _ = fs.step_round(state, target, drafter, **settings)
    return state


def kv_bytes(state: fs.SpecState) -> list[torch.Tensor]:
    """A copy of all KV buffers of both pools."""
    branches = [state.lease.target] + ([state.lease.draft] if state.lease.draft is not None else [])
    return [cache.clone() for branch in branches for cache in branch.pool.kv.values()]
