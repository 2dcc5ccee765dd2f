"""A cheap drafter that drafts for a better one."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from oracle import CHECKSUM_RUNS, checksum_draft_next, checksum_greedy, config, output, pair

import funcspec as fs
from funcspec.drafters import cascade, fixed, ngram, standalone
from funcspec.errors import ArgumentTypeError, ModelError
from funcspec.kernels.keep_matching import keep_matching_
from funcspec.kernels.op import Backend
from funcspec.models import ChecksumDraft, ChecksumModel

PROMPTS = [list(prompt) for prompt in CHECKSUM_RUNS]
BACKENDS: tuple[Backend, ...] = ("reference", "triton")


def guesses(right: int) -> list[list[int]]:
    """For each row the draft's own continuation of the target's greedy text, wrong at every place that `right` does not divide."""
    rows = []
    for prompt in PROMPTS:
        text = prompt + checksum_greedy(prompt, 40)
        own = [checksum_draft_next(text[:place]) if place >= len(prompt) else 0 for place in range(len(text))]
        rows.append([token if place % right else (token + 1) % 97 for place, token in enumerate(own)])
    return rows


@pytest.mark.parametrize("donate", [False, True])
@pytest.mark.parametrize("rule", [fs.rules.greedy, fs.rules.coupled, fs.rules.ratio], ids=repr)
@pytest.mark.parametrize("right", [2, 3, 50])
def test_drafts_are_those_of_the_second_alone(donate: bool, rule: fs.rules.Rule, right: int) -> None:
    """Round by round from equal states: with further steps all drafts are the same, in one pass a beginning of them."""
    target, second = pair(spread=True)
    heat = [0.0, 0.8, 1.3] if rule.samples else 0.0
    settings = config(3, 48, 4, rule)
    drafters = {
        "alone": second,
        "on": cascade(fixed(guesses(right)), second, one_pass=False),
        "once": cascade(fixed(guesses(right)), second),
    }
    state = fs.init(settings, target, second)
    state, _ = fs.admit(state, target, second, PROMPTS, seeds=[1, 2, 3], temperature=heat)
    lengths = set()
    for _ in range(9):
        drafts = {}
        for name, drafter in drafters.items():
            branch = fs.fork(state)
            branch, draft = fs.prefill(branch, drafter, donate=donate)
            for _ in range(3):
                branch, draft = fs.decode(branch, drafter, donate=donate)
            drafts[name] = draft.tokens
            if name == "alone":
                after, _ = fs.verify(fs.fork(branch), target, donate=donate)
            elif name == "on":
                again, _ = fs.verify(branch, target, donate=donate)
                assert fs.snapshot(again) == fs.snapshot(after)
        assert torch.equal(drafts["on"], drafts["alone"])
        counts = (drafts["once"] >= 0).sum(1)
        lengths |= set(counts.tolist())
        assert torch.equal(torch.where(drafts["once"] >= 0, drafts["alone"], -1), drafts["once"])
        state = after
    assert len(lengths) > 1 or right == 2


@pytest.mark.parametrize("most", [0, 1, 3])
@pytest.mark.parametrize("one_pass", [False, True])
def test_the_text_is_plain_decoding_s(most: int, one_pass: bool) -> None:
    target, second = pair()
    drafter = cascade(ngram(min_ngram=1), second, one_pass=one_pass)
    state, _ = fs.admit(fs.init(config(3, 40, most), target, drafter), target, drafter, PROMPTS)
    while fs.any_active(state):
        state, _ = fs.step_round(state, target, drafter, donate=True)
    for row, prompt in enumerate(PROMPTS):
        found = output(state, row)
        assert found == checksum_greedy(prompt, len(found))
        assert len(prompt) + len(found) == 40


@pytest.mark.jax_on_cpu
def test_states_of_jax_draft_the_same() -> None:
    target, second = pair(spread=True)
    lifted, lifted_second = fs.interop.jax_model(target), standalone(fs.interop.jax_model(second.model))
    table = fixed(guesses(3))
    found = {}
    for name, (model, drafter) in {"torch": (target, cascade(table, second)), "jax": (lifted, cascade(table, lifted_second))}.items():
        state = fs.init(config(3, 40, 3, fs.rules.ratio), model, drafter)
        state, _ = fs.admit(state, model, drafter, PROMPTS, seeds=[1, 2, 3], temperature=0.9)
        for _ in range(4):
            state, _ = fs.step_round(state, model, drafter)
        found[name] = [np.asarray(getattr(state, field)).tolist() for field in ("tokens", "num_tokens", "draft_len")]
    assert found["torch"] == found["jax"]


@given(st.data())
def test_what_stands_behind_a_wrong_guess_is_dropped(kernel_device: str, data: st.DataObject) -> None:
    rows, count, wide = data.draw(st.integers(1, 4)), data.draw(st.integers(1, 6)), data.draw(st.integers(1, 7))
    token = st.integers(-1, 2)
    guessed = data.draw(st.lists(st.lists(token, min_size=wide, max_size=wide), min_size=rows, max_size=rows))
    chosen = data.draw(st.lists(st.lists(token, min_size=count, max_size=count), min_size=rows, max_size=rows))
    expected = []
    for own, guess in zip(chosen, guessed, strict=True):
        kept = 0
        while kept < min(count, wide) and own[kept] == guess[kept] and own[kept] >= 0:
            kept += 1
        expected.append([*own[: kept + 1], *[-1] * (count - kept - 1)][:count])
    for backend in BACKENDS:
        out = torch.tensor(chosen, dtype=torch.int32, device=kernel_device).view(-1)
        keep_matching_(guesses=torch.tensor(guessed, dtype=torch.int32, device=kernel_device), chosen=out, backend=backend)
        assert out.view(rows, count).tolist() == expected


def test_what_cannot_be_put_together_is_refused() -> None:
    draft = standalone(ChecksumDraft())
    for first in (draft, ngram, 3):
        with pytest.raises(ArgumentTypeError, match="first"):
            cascade(first, draft)
    for second in (ngram(), standalone, ChecksumDraft()):
        with pytest.raises(ArgumentTypeError, match="second"):
            cascade(ngram(), second)
    with pytest.raises(ArgumentTypeError, match="one_pass"):
        cascade(ngram(), draft, one_pass=1)
    with pytest.raises(ModelError, match="vocabulary"):
        fs.init(config(), ChecksumModel(), cascade(ngram(), standalone(ChecksumDraft(vocab_size=49))))
