"""Speculative output is plain output: token for token with the same seed, and by its law; whatever is drafted, in any company."""

import itertools
from collections.abc import Sequence
from typing import Any

import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from oracle import VOCAB, checksum_next, config, output
from scipy.stats import chi2

import funcspec as fs
from funcspec.drafters import standalone
from funcspec.models import ChecksumDraft, ChecksumModel, TableModel
from funcspec.noise import TARGET, choose

LENGTH = 32
TEMPERATURES = (0.0, 0.7, 1.3)
GREEDY, COUPLED = fs.rules.greedy, fs.rules.coupled
TABLE = TableModel(((0.5, 0.3, 0.15, 0.05), (0.1, 0.6, 0.3, 0.0), (0.2, 0.2, 0.2, 0.4), (0.97, 0.01, 0.01, 0.01)))


class Unrelated(ChecksumDraft):
    """A draft that has little to do with the target."""

    def _answer(self, token: torch.Tensor) -> torch.Tensor:
        return (token * 31 + 7) % VOCAB


SPREAD = ChecksumModel(spread=True)
TARGETS: dict[str, Any] = {"checksum": SPREAD, "table": TABLE}
DRAFTS: dict[str, dict[str, Any]] = {
    "checksum": {"right": SPREAD, "random": Unrelated(spread=True), "half right": ChecksumDraft(spread=True)},
    "table": {
        "right": TABLE,
        "random": TableModel(((0.1, 0.1, 0.1, 0.7), (0.7, 0.1, 0.1, 0.1), (0.25,) * 4, (0.0, 0.0, 0.0, 1.0))),
        "half right": TableModel(((0.25,) * 4, *TABLE.probabilities[1:3], (0.25,) * 4)),
    },
}


def plain(target: Any, prompt: Sequence[int], seed: int, temperature: float, count: int, rule: fs.rules.Rule = COUPLED) -> list[int]:
    """Plain decoding of a prompt alone: no drafter, no draft places."""
    state = fs.init(config(length=LENGTH, drafts=0, rule=rule), target)
    state, _ = fs.admit(state, target, None, [prompt], seeds=[seed], temperature=temperature, max_tokens=count, donate=True)
    while fs.any_active(state):
        state, _ = fs.verify(state, target, donate=True)
    return output(state, 0)


def by_definition(name: str, prompt: Sequence[int], seed: int, temperature: float, count: int) -> list[int]:
    """The written definition of sampling, without states, caches or kernels."""
    tokens = list(prompt)
    for _ in range(min(count, LENGTH - len(prompt))):
        if name == "checksum":
            away = (np.arange(VOCAB) - checksum_next(tokens)) % VOCAB
            logits = 1.0 * (away == 0) - ((5 * away) % VOCAB) / 8.0
        else:
            logits = TABLE.log_table[tokens[-1]].numpy()
        tokens.append(choose(logits.astype(np.float32), temperature, seed, len(tokens) - 1, 0, TARGET)[0])
    return tokens[len(prompt) :]


@settings(max_examples=30)
@given(data=st.data())
def test_plain_decoding_is_the_written_definition(data: st.DataObject) -> None:
    name = data.draw(st.sampled_from(list(TARGETS)))
    prompt = data.draw(st.lists(st.integers(0, TARGETS[name].vocab_size - 1), min_size=1, max_size=9))
    seed = data.draw(st.integers(-(2**63), 2**64 - 1))
    temperature = data.draw(st.sampled_from((*TEMPERATURES, 0.01, 30.0)))
    assert plain(TARGETS[name], prompt, seed, temperature, 8) == by_definition(name, prompt, seed, temperature, 8)


def speculate(data: st.DataObject, drafts: int, *, donate: bool, rule: fs.rules.Rule, temperatures: Sequence[float]) -> None:
    """Rows that come when they like, in any row, with any number of drafts in any round, against plain decoding."""
    name = data.draw(st.sampled_from(list(TARGETS)))
    target = TARGETS[name]
    drafter = standalone(DRAFTS[name][data.draw(st.sampled_from(["right", "random", "half right"]))])
    count = data.draw(st.integers(1, 4))
    prompt = st.lists(st.integers(0, target.vocab_size - 1), min_size=1, max_size=LENGTH - 1 if data.draw(st.booleans()) else 6)
    requests = [
        (
            data.draw(prompt),
            data.draw(st.integers(-(2**63), 2**64 - 1)),
            data.draw(st.sampled_from(temperatures)),
            data.draw(st.integers(1, 14)),
            data.draw(st.integers(0, 3)),  # the round it comes in
        )
        for _ in range(count)
    ]
    rows = data.draw(st.permutations(range(count)))
    state = fs.init(
        config(rows=count, length=LENGTH, drafts=drafts, rule=rule, block_size=data.draw(st.sampled_from([1, 4, 16]))), target, drafter
    )
    waiting = list(zip(rows, requests, strict=True))
    number = 0
    while waiting or fs.any_active(state):
        for row, (tokens, seed, temperature, most, _) in [entry for entry in waiting if entry[1][4] <= number]:
            some = {"seeds": [seed], "temperature": temperature, "max_tokens": most, "rows": [row], "donate": donate}
            state, _ = fs.admit(state, target, drafter, [tokens], **some)
        waiting = [entry for entry in waiting if entry[1][4] > number]
        wanted = data.draw(st.lists(st.integers(0, drafts), min_size=count, max_size=count))
        state, verdict = fs.step_round(state, target, drafter, num_draft=wanted, donate=donate)
        assert (verdict.num_drafted <= torch.tensor(wanted)).all() and (verdict.num_accepted <= verdict.num_drafted).all()
        number += 1
    for row, (tokens, seed, temperature, most, _) in zip(rows, requests, strict=True):
        assert output(state, row) == plain(target, tokens, seed, temperature, most, rule)


@pytest.mark.parametrize("donate", [False, True], ids=["pure", "donated"])
@pytest.mark.parametrize("drafts", range(6))
@settings(max_examples=12)
@given(data=st.data())
def test_coupled_equals_plain_sampling(data: st.DataObject, drafts: int, donate: bool) -> None:
    speculate(data, drafts, donate=donate, rule=COUPLED, temperatures=TEMPERATURES)


@pytest.mark.parametrize("donate", [False, True], ids=["pure", "donated"])
@pytest.mark.parametrize("drafts", range(6))
@settings(max_examples=6)
@given(data=st.data())
def test_greedy_equals_plain_decoding(data: st.DataObject, drafts: int, donate: bool) -> None:
    speculate(data, drafts, donate=donate, rule=GREEDY, temperatures=(0.0,))


@pytest.mark.parametrize("donate", [False, True], ids=["pure", "donated"])
@pytest.mark.parametrize("kind", ["right", "random", "half right"])
@pytest.mark.parametrize("name", list(TARGETS))
def test_tokens_do_not_depend_on_company(name: str, kind: str, donate: bool) -> None:
    """Each of six rows in every one of several batches, orders and row numbers gives the tokens it gives alone."""
    target, drafter = TARGETS[name], standalone(DRAFTS[name][kind])
    prompts = [[token % target.vocab_size for token in prompt] for prompt in ([5, 6, 7], [1], [40, 2, 9, 9], [8] * 12, [3], [2, 1])]
    temperatures = [0.0, 0.7, 1.3, 0.7, 1.3, 0.0]
    alone = [plain(target, prompts[i], 100 + i, temperatures[i], 12) for i in range(6)]
    for order in ([0, 1, 2, 3, 4, 5], [5, 4, 3, 2, 1, 0], [2, 4], [4, 2, 0, 1], [3]):
        for capacity in (len(order), 8):
            state = fs.init(config(rows=capacity, length=LENGTH, rule=COUPLED), target, drafter)
            some = {"seeds": [100 + i for i in order], "temperature": [temperatures[i] for i in order], "max_tokens": 12}
            rows = list(range(capacity))[-len(order) :]
            state, _ = fs.admit(state, target, drafter, [prompts[i] for i in order], rows=rows, donate=donate, **some)
            while fs.any_active(state):
                state, _ = fs.step_round(state, target, drafter, donate=donate)
            assert [output(state, row) for row in rows] == [alone[i] for i in order]


def test_the_number_of_drafts_changes_rounds_only() -> None:
    """Drafts that are right are all kept, drafts that are wrong cost nothing but their round."""
    kept = {}
    for kind in ("right", "random", "half right"):
        drafter = standalone(DRAFTS["table"][kind])
        state = fs.init(config(rows=32, length=LENGTH, rule=COUPLED), TABLE, drafter)
        state, _ = fs.admit(state, TABLE, drafter, [[0]] * 32, seeds=range(32), temperature=1.0, max_tokens=16)
        drafted = accepted = 0
        while fs.any_active(state):
            state, verdict = fs.step_round(state, TABLE, drafter)
            drafted, accepted = drafted + int(verdict.num_drafted.sum()), accepted + int(verdict.num_accepted.sum())
        kept[kind] = accepted / drafted
    assert kept["right"] == 1.0 > kept["half right"] > kept["random"] > 0.0


LAW = TableModel(((0.5, 0.3, 0.2), (0.1, 0.6, 0.3), (0.25, 0.25, 0.5)))
LAW_DRAFTS = {
    "random": TableModel(((0.2, 0.3, 0.5), (0.6, 0.1, 0.3), (0.4, 0.4, 0.2))),
    "half right": TableModel(((0.5, 0.3, 0.2), (0.1, 0.6, 0.3), (0.6, 0.2, 0.2))),
}
BATCH, BATCHES, TOKENS = 256, 80, 3


def law(table: TableModel, temperature: float) -> np.ndarray:
    """Probability of each run of `TOKENS` tokens after token 0, in lexicographic order."""
    rows = np.asarray(table.probabilities) ** (1 / temperature)
    rows /= rows.sum(1, keepdims=True)
    runs = itertools.product(range(3), repeat=TOKENS)
    return np.array([np.prod([rows[a, b] for a, b in zip((0, *run), run, strict=False)]) for run in runs])


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "temperature", "donate"), [("random", 1.0, True), ("half right", 0.7, False)])
def test_sampled_law(kind: str, temperature: float, donate: bool) -> None:
    """Joint law of the first 3 tokens over 20,480 seeds: chi-square with 26 degrees of freedom, false alarms 1 in 10^9.

    The first token comes from admission, the others from rounds with drafts. The same counts, held against the law of the
    drafter, must be far off: the sample tells the two apart.
    """
    drafter = standalone(LAW_DRAFTS[kind])
    counts = np.zeros(3**TOKENS)
    accepted = drafted = 0
    for batch in range(BATCHES):
        state = fs.init(config(rows=BATCH, length=8, rule=COUPLED, block_size=8), LAW, drafter)
        seeds = range(batch * BATCH, (batch + 1) * BATCH)
        state, _ = fs.admit(state, LAW, drafter, [[0]] * BATCH, seeds=seeds, temperature=temperature, max_tokens=4, donate=donate)
        while int(state.num_tokens.min()) < 1 + TOKENS:
            state, verdict = fs.step_round(state, LAW, drafter, donate=donate)
            drafted, accepted = drafted + int(verdict.num_drafted.sum()), accepted + int(verdict.num_accepted.sum())
        tokens = state.tokens[:, 1 : 1 + TOKENS].numpy()
        np.add.at(counts, tokens @ 3 ** np.arange(TOKENS)[::-1], 1)
    assert counts.sum() == BATCH * BATCHES == 20_480 and 0 < accepted < drafted
    threshold = chi2.isf(1e-9, counts.size - 1)
    expected, other = law(LAW, temperature) * counts.sum(), law(LAW_DRAFTS[kind], temperature) * counts.sum()
    assert expected.min() > 5
    assert ((counts - expected) ** 2 / expected).sum() < threshold
    assert ((counts - other) ** 2 / other).sum() > 5 * threshold
