"""What the tests of drafters of one pass share: a tiny target, and rounds held against drafts computed from committed tokens alone."""

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import jax
import numpy as np
import torch
from oracle import config, output
from ratio_oracle import written_round
from scipy.stats import chi2
from test_llama import dense

import funcspec as fs
from funcspec import noise
from funcspec.models.llama import Llama, LlamaConfig, random_llama

VOCAB, LENGTH, BLOCK_SIZE, DRAFTS = 11, 28, 4, 3
SHAPE: dict[str, Any] = {
    "vocab_size": VOCAB,
    "num_layers": 2,
    "hidden_size": 12,
    "intermediate_size": 20,
    "num_heads": 4,
    "num_kv_heads": 2,
    "head_dim": 4,
    "max_len": 64,
}
FLAT = 0.3
"""What output matrices are scaled by, so that at usual temperatures drafts are neither always kept nor never."""


def flat(llama: Llama) -> Llama:
    """The same with flatter logits."""
    return Llama(llama.config, {**llama.weights, "head": FLAT * llama.weights["embed"]})


TARGET = flat(random_llama(LlamaConfig(**SHAPE), seed=3))
PROMPTS = [[5, 6, 7, 1, 10], [1], [4, 2, 9, 9, 0, 3, 3, 8, 2]]
SEEDS, HEAT = [3, -4, 2**63 - 1], [0.8, 1.5, 0.0]

Expected = Callable[[Sequence[int], int], list[np.ndarray]]
"""From the committed tokens and a number of drafts, logits [V] that each of them is drawn from; fewer where positions end."""


@cache
def _target_pass(tokens: tuple[int, ...]) -> tuple[torch.Tensor, list[torch.Tensor]]:
    return dense(TARGET, list(tokens))


def hidden_states(tokens: Sequence[int], layers: Sequence[int]) -> torch.Tensor:
    """Hidden states of the target side by side, [n, F] in float64."""
    states = _target_pass(tuple(tokens))[1]
    return torch.cat([states[layer] for layer in layers], 1)


def target_logits(tokens: Sequence[int]) -> np.ndarray:
    """What the target makes of a sequence."""
    return _target_pass(tuple(tokens))[0][-1].float().numpy()


def start(
    drafter: Any,
    rule: fs.rules.Rule,
    *,
    target: Any = TARGET,
    drafts: int = DRAFTS,
    length: int = LENGTH,
    heat: Sequence[float] = HEAT,
    prompts: Sequence[Sequence[int]] = PROMPTS,
    seeds: Sequence[int] = SEEDS,
    donate: bool = False,
    **settings: Any,
) -> fs.SpecState:
    """A state with one row more than there are prompts, whose cache holds NaN wherever nothing was written."""
    state = fs.init(config(rows=len(prompts) + 1, length=length, drafts=drafts, rule=rule, block_size=BLOCK_SIZE), target, drafter)
    if state.framework == "torch":
        for branch in filter(None, (state.lease.target, state.lease.draft)):
            for cache in branch.pool.kv.values():
                cache.fill_(float("nan"))
    rows = list(range(len(prompts) + 1))
    rows.remove(1)  # an idle row in between
    heat = [0.0] * len(prompts) if rule is fs.rules.greedy else list(heat)
    return fs.admit(state, target, drafter, prompts, seeds=list(seeds), temperature=heat, rows=rows, chunk=4, donate=donate, **settings)[0]


def rows_of(state: fs.SpecState) -> list[int]:
    """Rows that are live."""
    return np.flatnonzero(np.asarray(state.is_live)).tolist()


def committed(state: fs.SpecState, row: int) -> list[int]:
    return np.asarray(state.tokens)[row, : int(state.num_tokens[row])].tolist()


def seed_and_heat(state: fs.SpecState, row: int) -> tuple[int, float]:
    low, high = (int(word) & 0xFFFFFFFF for word in np.asarray(state.seed)[row])
    return low | high << 32, float(state.temperature[row])


def expected_drafts(state: fs.SpecState, row: int, count: int, expected: Expected) -> list[int]:
    """The drafts of a row: drawn by the written definition from what is expected of the committed tokens."""
    sequence, (seed, heat) = committed(state, row), seed_and_heat(state, row)
    stream = state.config.rule.draft_stream
    nonce = len(sequence) - 1 if stream == noise.DRAFT else 0
    count = min(count, int(state.row_limit[row]) - len(sequence) - 1)
    return [
        noise.choose(logits.astype(np.float32), heat, seed, len(sequence) - 1 + place, nonce, stream)[0]
        for place, logits in enumerate(expected(sequence, count)[: max(count, 0)])
    ]


def check_rounds(state: fs.SpecState, drafter: Any, expected: Expected, *, donate: bool, wanted: int | None = None) -> int:
    """Every draft of every round is the one expected of the committed tokens, of which any number were drafts; returns how many."""
    rng, most, rows = np.random.default_rng(5), state.config.num_speculative_tokens, range(state.config.max_num_reqs)
    made = kept = 0
    while rows_of(state):
        counts = [int(rng.integers(0, most + 1)) if wanted is None else wanted for _ in rows]
        right = {row: expected_drafts(state, row, counts[row], expected) for row in rows_of(state)}
        state, draft = fs.prefill(state, drafter, num_draft=counts, donate=donate)
        assert draft.tokens.tolist() == [right.get(row, []) + [-1] * (most - len(right.get(row, []))) for row in rows]
        state, scores = fs.score(state, TARGET, donate=donate)
        for row, drafts in right.items():  # the target is made to want some of them
            for place in range(int(rng.integers(0, len(drafts) + 1))):
                scores.logits[row, place, drafts[place]] += 100
        state, verdict = fs.accept(state, scores, donate=donate)
        assert not verdict.bad_row.any()
        made, kept = made + sum(map(len, right.values())), kept + int(verdict.num_accepted.sum())
    assert made < 20 or made / 4 < kept < made
    return made


def check_lossless(drafter: Any, rule: fs.rules.Rule, *, donate: bool, **settings: Any) -> None:
    """Output equals plain decoding with the same seeds."""
    found = []
    for num_draft in (None, 0):
        state = start(drafter, rule, donate=donate, **settings)
        while rows_of(state):
            state, _ = fs.step_round(state, settings.get("target", TARGET), drafter, num_draft=num_draft, donate=donate)
        found.append([output(state, row) for row in range(state.config.max_num_reqs)])
    assert found[0] == found[1] and all(found[0][row] for row in (0, 2, 3))


def check_ratio(drafter: Any, expected: Expected, *, donate: bool, rounds: int = 10) -> None:
    """Rounds under the ratio rule are those of its written definition, with the distributions that are expected of the prefix."""
    state = start(drafter, fs.rules.ratio, donate=donate, heat=[0.8, 1.5, 3.0])
    origins: set[int] = set()
    for number in range(rounds):
        rows, count = rows_of(state), (DRAFTS, 1, 2)[number % 3]
        right = {}
        for row in rows:
            prefix, (seed, heat) = committed(state, row), seed_and_heat(state, row)
            planned = min(count, int(state.row_limit[row]) - len(prefix) - 1)
            logits = [one.astype(np.float32) for one in expected(prefix, planned)]

            def drawn(sequence: Sequence[int], logits: list[np.ndarray] = logits, prefix: list[int] = prefix) -> np.ndarray:
                return logits[len(sequence) - len(prefix)]

            right[row] = written_round(prefix, seed, heat, min(planned, len(logits)), p=target_logits, q=drawn)
        state, verdict = fs.step_round(state, TARGET, drafter, num_draft=count, donate=donate)
        for row, (_, emitted, origin) in right.items():
            assert verdict.tokens[row, : len(emitted)].tolist() == emitted
            assert verdict.origin[row, : len(emitted)].tolist() == origin
            origins.update(origin)
    assert origins == {0, 1, 2}


CLASSES, BATCH, BATCHES = 4, 256, 16


def check_law(drafter: Any, expected: Expected) -> None:
    """Joint law of the two tokens after a prefix, drawn by rounds under the ratio rule from 4,096 seeds, is the target's.

    Chi-square over 4 x 4 classes of tokens, 15 degrees of freedom, false alarms 1 in 10^9. Held against the law of the drafts, the same
    counts must be far off: the sample tells the two apart.
    """
    state = fs.init(config(rows=BATCH, length=16, drafts=2, rule=fs.rules.ratio, block_size=BLOCK_SIZE), TARGET, drafter)
    state, first = fs.admit(state, TARGET, drafter, [PROMPTS[0]] * BATCH, seeds=[1] * BATCH, temperature=1.0)
    prefix, counts = [*PROMPTS[0], first.tokens[0]], np.zeros((CLASSES, CLASSES))
    accepted = 0
    for batch in range(BATCHES):
        one = fs.fork(state, seeds=range(batch * BATCH, (batch + 1) * BATCH))
        while int(one.num_tokens.min()) < len(prefix) + 2:
            one, verdict = fs.step_round(one, TARGET, drafter, donate=True)
            accepted += int(verdict.num_accepted.sum())
        pairs = one.tokens[:, len(prefix) : len(prefix) + 2].numpy() * CLASSES // VOCAB
        np.add.at(counts, (pairs[:, 0], pairs[:, 1]), 1)

    def law(logits: np.ndarray) -> np.ndarray:
        weights = np.exp(logits.astype(np.float64))
        return weights / weights.sum()

    chosen = np.eye(CLASSES)[np.arange(VOCAB) * CLASSES // VOCAB]
    ours = sum(law(target_logits(prefix))[a] * np.outer(chosen[a], law(target_logits([*prefix, a])) @ chosen) for a in range(VOCAB))
    theirs = np.outer(*(law(logits) @ chosen for logits in expected(prefix, 2)))
    assert counts.sum() == BATCH * BATCHES == 4_096 and accepted > BATCH and min(ours.min(), theirs.min()) * counts.sum() > 5
    found = [((counts - p * counts.sum()) ** 2 / (p * counts.sum())).sum() for p in (ours, theirs)]
    threshold = chi2.isf(1e-9, counts.size - 1)
    assert found[0] < threshold and found[1] > 5 * threshold, (found, threshold)


def trace(drafter: Any, rule: fs.rules.Rule, *, donate: bool) -> list[Any]:
    """Everything there is to know of some rounds."""
    state, found = start(drafter, rule, donate=donate), []
    for _ in range(5):
        state, draft = fs.prefill(state, drafter, donate=donate)
        found += [draft.tokens.tolist(), fs.snapshot(state)]
        state, verdict = fs.verify(state, TARGET, donate=donate)
        found += [verdict.tokens.tolist(), fs.snapshot(state)]
    return found


def finish(state: fs.SpecState, drafter: Any, *, target: Any = TARGET, donate: bool = False) -> list[Any]:
    """The rest of the round and two more."""
    if "drafting" in repr(state):
        state, verdict = fs.verify(state, target, donate=donate)
        found = [np.asarray(verdict.tokens).tolist()]
    else:
        found = []
    for _ in range(2):
        state, draft = fs.prefill(state, drafter, donate=donate)
        state, verdict = fs.verify(state, target, donate=donate)
        found += [np.asarray(draft.tokens).tolist(), np.asarray(verdict.tokens).tolist()]
    return found


def check_values(drafter: Any, rule: fs.rules.Rule) -> None:
    """Forks, snapshots and siblings go on alike, in mid-round too; without KV at the start of a round."""
    state = start(drafter, rule)
    for _ in range(2):
        state, _ = fs.step_round(state, TARGET, drafter)
    middle, _ = fs.prefill(state, drafter)
    expected, whole = finish(middle, drafter), finish(state, drafter)
    twin, taken = fs.fork(middle), fs.snapshot(middle)
    early, bare = fs.snapshot(state), fs.snapshot(state, kv=False)
    other, _ = fs.prefill(fs.fork(state, seeds=[7, 8, 9, 10]), drafter, donate=True)
    fs.verify(other, TARGET, donate=True)
    assert fs.snapshot(middle) == taken and fs.snapshot(state) == early
    assert finish(fs.restore(taken), drafter) == expected and finish(fs.restore(early), drafter, donate=True) == whole
    assert finish(fs.restore(bare, TARGET, drafter), drafter) == whole
    assert finish(middle, drafter, donate=True) == expected == finish(twin, drafter, donate=True)
    assert finish(state, drafter) == whole


def check_jax(drafter: Any, rule: fs.rules.Rule, target: Any, jax_drafter: Any) -> None:
    """Programs of JAX draft and emit the same tokens."""
    state, other = start(drafter, rule), start(jax_drafter, rule, target=target)
    prefill, verify = jax.jit(fs.prefill), jax.jit(fs.verify)
    for _ in range(4):
        (state, draft), (other, same) = fs.prefill(state, drafter), prefill(other, jax_drafter)
        assert same.tokens.tolist() == draft.tokens.tolist()
        (state, verdict), (other, also) = fs.verify(state, TARGET), verify(other, target)
        assert also.tokens.tolist() == verdict.tokens.tolist()
