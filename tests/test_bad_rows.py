"""Logits that are no logits: one defined outcome, flagged, and neighbours go on undisturbed."""

import pytest
import torch
from oracle import checksum_greedy, config, output

import funcspec as fs
from funcspec.models import ChecksumDraft, ChecksumModel

KINDS = {
    "all NaN": (lambda logits: torch.full_like(logits, torch.nan), 0),
    "all masked": (lambda logits: torch.full_like(logits, -torch.inf), 0),
    "one NaN": (lambda logits: torch.where(torch.arange(len(logits)) == 3, torch.nan, logits), None),
    "one +inf": (lambda logits: torch.where(torch.arange(len(logits)) == 3, torch.inf, logits), None),
}


class Spoiled(ChecksumModel):
    """Spoils the logits after a given token at a given position of row 0."""

    def __init__(self, kind: str, position: int) -> None:
        super().__init__()
        object.__setattr__(self, "kind", kind)
        object.__setattr__(self, "position", position)

    def forward(self, kv, batch):
        kv, logits, hidden = super().forward(kv, batch)
        wanted = range(len(batch.input_ids)) if batch.logits_indices is None else batch.logits_indices.tolist()
        first_row = int(batch.query_start_loc[1])
        for place, index in enumerate(wanted):
            if index < first_row and int(batch.positions[index]) == self.position and int(batch.slot_mapping[index]) >= 0:
                logits[place] = KINDS[self.kind][0](logits[place])
        return kv, logits, hidden


@pytest.mark.parametrize("donate", [False, True])
@pytest.mark.parametrize("drafts", [0, 1, 3])
@pytest.mark.parametrize("rule", [fs.rules.greedy, fs.rules.coupled])
@pytest.mark.parametrize("kind", KINDS)
def test_a_spoiled_row_is_flagged_and_alone(kind: str, rule: fs.rules.Rule, drafts: int, donate: bool) -> None:
    """H4 from the model on, wherever the row is spoiled."""
    target, drafter = Spoiled(kind, 6), fs.drafters.standalone(ChecksumDraft())
    temperature = [0.7, 0.0] if rule.samples else 0.0
    state = fs.init(config(rows=3, drafts=drafts, rule=rule), target, drafter)
    state, first = fs.admit(state, target, drafter, [[5, 6, 7], [1]], seeds=[1, 2], temperature=temperature, max_tokens=12)
    assert first.bad_row == (0, 0)
    flagged = []
    while fs.any_active(state):
        before = int(state.num_tokens[0])
        state, verdict = fs.step_round(state, target, drafter, donate=donate)
        assert verdict.bad_row.tolist()[1:] == [0, 0]
        if int(verdict.bad_row[0]):
            flagged.append((before, int(state.num_tokens[0])))
    assert len(flagged) == 1 and flagged[0][0] <= 7 < flagged[0][1]  # the token at place 7 was drawn after position 6
    assert state.bad_row.tolist() == [1, 0, 0]
    assert output(state, 1) == checksum_greedy([1], 12)
    tokens = output(state, 0)
    assert all(0 <= token < 97 for token in tokens)
    expected = KINDS[kind][1]
    prefix = [5, 6, 7, *tokens[:4]]
    assert tokens[4] == (expected if expected is not None else checksum_greedy(prefix, 1)[0])
    assert tokens[5:] == checksum_greedy([*prefix, tokens[4]], 7)


def test_a_spoiled_first_token_is_flagged() -> None:
    target = Spoiled("all NaN", 2)
    state = fs.init(config(), target)
    state, first = fs.admit(state, target, None, [[5, 6, 7]])
    assert first.tokens == (0,) and first.bad_row == (1,) and state.bad_row.tolist() == [1]


def test_a_spoiled_draft_costs_nothing_but_acceptance() -> None:
    target, drafter = ChecksumModel(), fs.drafters.standalone(Spoiled("all NaN", 5))
    state = fs.init(config(), target, drafter)
    state, _ = fs.admit(state, target, drafter, [[5, 6, 7]], max_tokens=15)
    while fs.any_active(state):
        state, verdict = fs.step_round(state, target, drafter)
        assert not verdict.bad_row.any()
    assert output(state, 0) == checksum_greedy([5, 6, 7], 15)
