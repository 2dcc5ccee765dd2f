"""The ratio rule in steps, against its written definition."""

from typing import Any

import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from oracle import checksum_greedy, config, output
from ratio_oracle import DRAFTER, LENGTH, PROMPTS, RATIO, TARGET, VOCAB, admitted, written_round

import funcspec as fs
from funcspec import noise
from funcspec.drafters import Standalone, standalone
from funcspec.models import ChecksumDraft, ChecksumModel, TableModel


@pytest.mark.parametrize("point", [False, True], ids=["sampled", "points"])
@pytest.mark.parametrize("donate", [False, True], ids=["pure", "donated"])
@settings(max_examples=20)
@given(data=st.data())
def test_rounds_are_the_written_definition(data: st.DataObject, donate: bool, point: bool) -> None:
    """Rows of any seed and temperature, with any number of drafts in any round, each as if alone."""
    drafts, rows = data.draw(st.integers(1, 4)), data.draw(st.integers(1, 4))
    drafter = Standalone(DRAFTER.model, proposal="point") if point else DRAFTER
    prompts = data.draw(st.lists(st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=6), min_size=rows, max_size=rows))
    seeds = data.draw(st.lists(st.integers(-(2**63), 2**64 - 1), min_size=rows, max_size=rows))
    heat = data.draw(st.lists(st.sampled_from([0.0, 0.5, 1.0, 3.0, 40.0]), min_size=rows, max_size=rows))
    state = fs.init(
        config(rows=rows, length=LENGTH, drafts=drafts, rule=RATIO, block_size=data.draw(st.sampled_from([1, 4, 16]))), TARGET, drafter
    )
    state, first = fs.admit(state, TARGET, drafter, prompts, seeds=seeds, temperature=heat, donate=donate)
    sequences = [[*prompt, token] for prompt, token in zip(prompts, first.tokens, strict=True)]
    for _ in range(3):
        wanted = data.draw(st.lists(st.integers(0, drafts), min_size=rows, max_size=rows))
        state, verdict = fs.step_round(state, TARGET, drafter, num_draft=wanted, donate=donate)
        for row in range(rows):
            made, emitted, origins = written_round(sequences[row], seeds[row], heat[row], wanted[row], point=point)
            count = int(verdict.num_emitted[row])
            assert verdict.tokens[row].tolist() == emitted + [-1] * (drafts + 1 - len(emitted))
            assert verdict.origin[row, :count].tolist() == origins and int(verdict.num_drafted[row]) == len(made)
            assert int(verdict.num_accepted[row]) == origins.count(0) and not verdict.bad_row.any()
            sequences[row] += emitted
    for row in range(rows):
        assert output(state, row) == sequences[row][len(prompts[row]) :]


def test_some_drafts_are_kept_and_some_are_not() -> None:
    state = admitted(config(rows=3, length=LENGTH, rule=RATIO), temperature=1.0)
    origins = []
    while fs.any_active(state):
        state, verdict = fs.step_round(state, TARGET, DRAFTER)
        origins += verdict.origin[verdict.origin >= 0].tolist()
    assert set(origins) == {0, 1, 2}


def test_drafting_again_is_drafting_anew() -> None:
    """A position that is drafted in two rounds is drafted with other noise in each."""
    table = TableModel(((0.25,) * 4,) * 4)
    drafter = standalone(table)
    again = 0
    for seed in range(40):
        state, _ = fs.admit(
            fs.init(config(length=LENGTH, rule=RATIO), table, drafter), table, drafter, [[0]], seeds=[seed], temperature=1.0
        )
        known: dict[int, int] = {}
        for _ in range(3):
            n = int(state.num_tokens[0])
            for count in range(3):
                state, draft = fs.prefill(state, drafter) if count == 0 else fs.decode(state, drafter)
            for place, token in enumerate(draft.tokens[0].tolist()):
                expected = noise.choose(np.zeros(4, np.float32), 1.0, seed, n - 1 + place, n - 1, noise.DRAFT)[0]
                assert token == expected
                again += known.get(n + place, token) != token
                known[n + place] = token
            state, scores = fs.score(state, table)
            # Logits that reject the second draft for sure, so that the third place is drafted once more.
            logits = scores.logits.clone()
            logits[0, 1, draft.tokens[0, 1]] = -torch.inf
            state, _ = fs.accept(state, fs.Scores(logits, scores.stamp))
    assert again > 10


@pytest.mark.parametrize("donate", [False, True], ids=["pure", "donated"])
def test_without_drafts_it_is_plain_sampling(donate: bool) -> None:
    expected = admitted(config(rows=3, length=LENGTH, drafts=0, rule=fs.rules.coupled), drafter=None)
    while fs.any_active(expected):
        expected, _ = fs.verify(expected, TARGET)
    for drafts, drafter in ((0, None), (3, None), (0, DRAFTER), (3, DRAFTER)):
        state = admitted(config(rows=3, length=LENGTH, drafts=drafts, rule=RATIO), drafter=drafter)
        while fs.any_active(state):
            state, _ = fs.step_round(state, TARGET, drafter, num_draft=0, donate=donate)
        assert [output(state, row) for row in range(3)] == [output(expected, row) for row in range(3)]


def test_greedy_rows_are_greedy_in_any_company() -> None:
    target, drafter = ChecksumModel(), standalone(ChecksumDraft())
    state = fs.init(config(rows=3, length=LENGTH, rule=RATIO), target, drafter)
    state, _ = fs.admit(state, target, drafter, PROMPTS, seeds=[1, 2, 3], temperature=[0.0, 0.9, 0.0], max_tokens=20)
    accepted = 0
    while fs.any_active(state):
        state, verdict = fs.step_round(state, target, drafter)
        accepted += int(verdict.num_accepted[0])
    assert output(state, 0) == checksum_greedy(PROMPTS[0], 20) and output(state, 2) == checksum_greedy(PROMPTS[2], 20) and accepted > 3


def test_a_right_drafter_is_never_rejected() -> None:
    """p = q: every draft is kept, at every temperature."""
    drafter = standalone(TARGET)
    state = admitted(config(rows=3, length=LENGTH, rule=RATIO), drafter=drafter, temperature=[0.3, 1.0, 5.0])
    while fs.any_active(state):
        state, verdict = fs.step_round(state, TARGET, drafter)
        trimmed = verdict.finish_reason != 0
        assert (trimmed | (verdict.num_accepted == verdict.num_drafted)).all()


class Part(ChecksumDraft):
    """The draft's logits for some ids only, in another order."""

    ids = tuple(np.random.default_rng(1).permutation(VOCAB)[:60].tolist())
    input_vocab_size = VOCAB

    def forward(self, kv: Any, batch: Any) -> Any:
        kv, logits, hidden = ChecksumDraft(spread=True).forward(kv, batch)
        return kv, logits[:, list(self.ids)], hidden


class Masked(ChecksumDraft):
    """The same as a draft of all ids: those that are left out have no probability."""

    def forward(self, kv: Any, batch: Any) -> Any:
        kv, logits, hidden = ChecksumDraft(spread=True).forward(kv, batch)
        allowed = torch.zeros(VOCAB, dtype=torch.bool)
        allowed[list(Part.ids)] = True
        return kv, logits.masked_fill(~allowed, -torch.inf), hidden


@pytest.mark.parametrize("donate", [False, True], ids=["pure", "donated"])
def test_a_part_of_the_vocabulary(donate: bool) -> None:
    """Drafts of a part are those of a full draft that masks the rest, and the target keeps all of its tokens."""
    found, seen = [], set()
    for drafter in (standalone(Part(vocab_size=60), torch.tensor(Part.ids, dtype=torch.int32)), standalone(Masked())):
        state = admitted(config(rows=3, length=LENGTH, rule=RATIO), drafter=drafter, temperature=[1.0, 4.0, 0.0])
        while fs.any_active(state):
            state, _ = fs.step_round(state, TARGET, drafter, donate=donate)
        found.append([output(state, row) for row in range(3)])
        seen |= set(output(state, 1))
    assert found[0] == found[1] and seen - set(Part.ids)


class Mixed(Standalone):
    """A drafter whose rows of odd number are points."""

    def first(self, transition: Any, wanted: Any) -> None:
        super().first(transition, wanted)
        transition.keep_drafts(transition.drafts(), points=torch.tensor([row % 2 for row in range(len(wanted))], dtype=torch.int32))


@pytest.mark.parametrize("donate", [False, True], ids=["pure", "donated"])
def test_points_among_others(donate: bool) -> None:
    drafter = Mixed(DRAFTER.model)
    state = fs.init(config(rows=3, length=LENGTH, rule=RATIO), TARGET, drafter)
    seeds, heat = [11, 12, 13], [1.0, 1.0, 2.0]
    state, first = fs.admit(state, TARGET, drafter, PROMPTS, seeds=seeds, temperature=heat, donate=donate)
    sequences = [[*prompt, token] for prompt, token in zip(PROMPTS, first.tokens, strict=True)]
    for _ in range(6):
        state, verdict = fs.step_round(state, TARGET, drafter, donate=donate)
        for row in range(3):
            emitted = written_round(sequences[row], seeds[row], heat[row], 3, point=bool(row % 2))[1]
            assert verdict.tokens[row, : len(emitted)].tolist() == emitted and int(verdict.num_emitted[row]) == len(emitted)
            sequences[row] += emitted


def test_proposed_rows_are_points() -> None:
    """Look-up drafts fall back on a model; both kinds in one batch, and look-up alone, which keeps no logits at all."""
    prompt = [3, 4, 5, 6, 3, 4, 5, 6, 3, 4]
    for drafter in (fs.drafters.ngram(), fs.drafters.fallback(fs.drafters.ngram(), DRAFTER)):
        traces = []
        for donate in (False, True):
            state = fs.init(config(rows=2, length=LENGTH, rule=RATIO), TARGET, drafter)
            state, _ = fs.admit(state, TARGET, drafter, [prompt, [9]], seeds=[1, 2], temperature=30.0, donate=donate)
            found = []
            while fs.any_active(state):
                state, verdict = fs.step_round(state, TARGET, drafter, donate=donate)
                found.append(verdict.tokens.tolist())
            traces.append(found)
        assert traces[0] == traces[1]


def test_logits_that_are_no_logits_are_flagged() -> None:
    """At a judged place, at the place of the bonus, and where nothing is allowed; a spoiled draft costs acceptance only."""
    state = admitted(config(rows=3, length=LENGTH, rule=RATIO), temperature=1.0)
    state, _ = fs.prefill(state, DRAFTER)
    state, scores = fs.score(state, TARGET)
    logits = scores.logits.clone()
    logits[0, 0, 5], logits[1, 0] = torch.nan, -torch.inf
    _, verdict = fs.accept(state, fs.Scores(logits, scores.stamp))
    assert verdict.bad_row.tolist() == [1, 1, 0]
    assert verdict.tokens[1].tolist() == [0, -1, -1, -1] and verdict.origin[1, 0] == 1
