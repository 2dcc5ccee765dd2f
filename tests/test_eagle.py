"""Drafts that read the target's hidden states, one token a step."""

import pytest
from feature_toys import FeatureDraft, FeatureTarget
from oracle import CHECKSUM_RUNS, checksum_greedy, checksum_rounds, config, output

import funcspec as fs
from funcspec.drafters import eagle

PROMPTS = [list(prompt) for prompt in CHECKSUM_RUNS]


@pytest.fixture(params=[False, True], ids=["pure", "donated"])
def donate(request: pytest.FixtureRequest) -> bool:
    return request.param


@pytest.mark.parametrize("layers", [(0,), (0, 2, 1)], ids=["one layer", "three layers"])
@pytest.mark.parametrize("drafts", [0, 1, 3])
def test_every_feature_is_that_of_its_position(donate: bool, layers: tuple[int, ...], drafts: int) -> None:
    target, head = FeatureTarget(), FeatureDraft(layers=layers)
    drafter = eagle(head)
    state = fs.init(config(3, 64, drafts), target, drafter)
    state, _ = fs.admit(state, target, drafter, PROMPTS, chunk=2)
    accepted = [[], [], []]
    for _ in range(12):
        state, verdict = fs.step_round(state, target, drafter, donate=donate)
        for row, count in enumerate(verdict.num_accepted.tolist()):
            accepted[row].append(count)
    assert not head.mistakes
    for row, prompt in enumerate(PROMPTS):
        assert accepted[row] == [count for count, _ in checksum_rounds(prompt, 12, drafts)]
        assert output(state, row) == checksum_greedy(prompt, len(output(state, row)))
