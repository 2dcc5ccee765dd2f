"""What holds for every drafter there is: one battery over all of them."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from one_pass import DRAFTS, SHAPE, TARGET, VOCAB, finish, rows_of, start
from oracle import output

import funcspec as fs
from funcspec import drafters
from funcspec.drafters import Drafter, Proposer
from funcspec.models.dflash import DFlashConfig, random_dflash
from funcspec.models.heads import EagleConfig, random_head
from funcspec.models.llama import LlamaConfig, random_llama
from funcspec.models.medusa_heads import MedusaHeads
from funcspec.models.parallel_heads import ParallelConfig, random_parallel_head

SMALL: dict[str, Any] = SHAPE | {"num_layers": 1}


def medusa_heads() -> MedusaHeads:
    generator = torch.Generator().manual_seed(4)
    width = SHAPE["hidden_size"]
    shapes = {"blocks": (DRAFTS, 1, width, width), "biases": (DRAFTS, 1, width), "outputs": (DRAFTS, VOCAB, width)}
    return MedusaHeads({name: 0.4 * torch.randn(shape, generator=generator) for name, shape in shapes.items()}, layer=2)


def draft() -> drafters.Standalone:
    return drafters.standalone(random_llama(LlamaConfig(**SMALL), seed=8))


ALL: dict[str, Callable[[], Drafter]] = {
    "standalone": draft,
    "eagle": lambda: drafters.eagle(random_head(EagleConfig(**SMALL, target_layers=(2,), embed_norm=True), 5)),
    "eagle3": lambda: drafters.eagle(random_head(EagleConfig(**SMALL, target_layers=(0, 1, 2), style="eagle3"), 6)),
    "mtp": lambda: drafters.mtp(random_head(EagleConfig(**SMALL, target_layers=(2,), style="mtp"), 7)),
    "pard": lambda: drafters.parallel(random_llama(LlamaConfig(**SMALL), seed=8), mask_id=3),
    "p-eagle": lambda: drafters.parallel(random_parallel_head(ParallelConfig(**SMALL, target_layers=(0, 2), style="eagle3"), 9), mask_id=3),
    "medusa": lambda: drafters.medusa(medusa_heads()),
    "dflash": lambda: drafters.dflash(random_dflash(DFlashConfig(**SMALL, target_layers=(1, 2)), 10), mask_id=3),
    "dflash, anchored": lambda: drafters.dflash(random_dflash(DFlashConfig(**SMALL, target_layers=(1, 2)), 10), mask_id=3, anchor=True),
    "early_exit": lambda: drafters.early_exit(TARGET, 1),
    "ngram": drafters.ngram,
    "suffix": drafters.suffix,
    "fixed": lambda: drafters.fixed([[place % VOCAB for place in range(28)]] * 4),
    "best_of": lambda: drafters.best_of(drafters.ngram(), drafters.suffix()),
    "fallback": lambda: drafters.fallback(drafters.ngram(min_ngram=2), draft()),
    "fallback to eagle": lambda: drafters.fallback(drafters.ngram(min_ngram=2), ALL["eagle"]()),
    "cascade": lambda: drafters.cascade(drafters.ngram(min_ngram=1), draft()),
    "cascade, further steps": lambda: drafters.cascade(drafters.ngram(min_ngram=1), draft(), one_pass=False),
}
NAMES = sorted(ALL)
MADE: dict[str, Drafter] = {}


@pytest.fixture(params=NAMES)
def drafter(request: pytest.FixtureRequest) -> Drafter:
    if request.param not in MADE:
        MADE[request.param] = ALL[request.param]()
    return MADE[request.param]


def drafted(state: fs.SpecState, drafter: Drafter, *, donate: bool = False, **settings: Any) -> tuple[fs.SpecState, fs.steps.Draft]:
    """All draft steps of a round."""
    state, found = fs.prefill(state, drafter, donate=donate, **settings)
    for _ in range(state.config.num_speculative_tokens - 1):
        state, found = fs.decode(state, drafter, donate=donate)
    return state, found


def test_every_public_drafter_is_in_the_battery() -> None:
    functions = {name for name in drafters.__all__ if name[0].islower()} - {"place_proposals"}
    tested = {name.split(",")[0].split(" ")[0] for name in NAMES}
    assert functions == (tested - {"eagle3", "pard", "p-eagle"}) | {"parallel"}


def test_it_is_a_drafter(drafter: Drafter) -> None:
    assert isinstance(drafter, Drafter)
    assert drafter.proposal in ("sampled", "point")
    assert (drafter.proposal == "point") == (drafter.kv_model is None)
    assert isinstance(drafter, Proposer) or drafter.kv_model is not None
    with pytest.raises((AttributeError, TypeError)):
        drafter.proposal = "other"  # type: ignore[misc]


@pytest.mark.parametrize("most", [0, 1, DRAFTS])
def test_drafts_have_their_shape_and_their_limits(drafter: Drafter, most: int) -> None:
    """Rows near their end, one at its last token, an idle one: never more drafts than planned, and none past a row's limit."""
    state = start(drafter, fs.rules.coupled, drafts=most, max_tokens=[6, 2, 19])
    while rows_of(state):
        limits = (state.row_limit - state.num_tokens - 1).clamp(0, most) * state.is_live
        before = state.tokens.clone()
        state, draft = drafted(state, drafter)
        assert draft.tokens.shape == (4, most)
        assert (draft.num_draft <= limits).all()
        made = (draft.tokens >= 0).sum(1)
        assert (made <= draft.num_draft).all() and (draft.tokens < VOCAB).all()
        for row in range(4):
            count = int(state.num_tokens[row])
            assert draft.tokens[row].tolist() == draft.tokens[row, : made[row]].tolist() + [-1] * (most - int(made[row]))
            assert state.tokens[row, count : count + int(made[row])].tolist() == draft.tokens[row, : made[row]].tolist()
            assert torch.equal(state.tokens[row, :count], before[row, :count])
        state, verdict = fs.verify(state, TARGET)
        assert torch.equal(verdict.num_drafted, made.int())


@pytest.mark.parametrize("rule", [fs.rules.greedy, fs.rules.coupled], ids=repr)
def test_nothing_is_lost(drafter: Drafter, rule: fs.rules.Rule) -> None:
    """Text equals plain decoding in the same shape, whatever number of drafts is wanted from round to round and row to row."""
    found = []
    for wanted in ([[3, 0, 2, 1], [1, 1, 0, 3], [2, 2, 3, 0]], [0]):
        state, number = start(drafter, rule), 0
        while rows_of(state):
            state, _ = fs.step_round(state, TARGET, drafter, num_draft=wanted[number % len(wanted)], donate=True)
            number += 1
        found.append([output(state, row) for row in range(4)])
    assert found[0] == found[1]
    assert all(found[0][row] for row in (0, 2, 3))


@pytest.mark.parametrize("rule", [fs.rules.coupled, fs.rules.ratio], ids=repr)
def test_steps_are_pure_and_donation_changes_nothing(drafter: Drafter, rule: fs.rules.Rule) -> None:
    pure, donated = start(drafter, rule), start(drafter, rule)
    for _ in range(4):
        before = fs.snapshot(pure)
        once, first = drafted(pure, drafter)
        twice, again = drafted(pure, drafter)
        assert torch.equal(first.tokens, again.tokens)
        assert fs.snapshot(once) == fs.snapshot(twice)
        donated, same = drafted(donated, drafter, donate=True)
        assert torch.equal(first.tokens, same.tokens)
        assert fs.snapshot(pure) == before
        pure, verdict = fs.verify(once, TARGET)
        donated, other = fs.verify(donated, TARGET, donate=True)
        assert torch.equal(verdict.tokens, other.tokens)
    assert fs.snapshot(pure) == fs.snapshot(donated)


@pytest.mark.parametrize("rule", [fs.rules.coupled, fs.rules.ratio], ids=repr)
def test_branches_and_copies_go_on_alike(drafter: Drafter, rule: fs.rules.Rule) -> None:
    state = start(drafter, rule)
    for _ in range(2):
        state, _ = fs.step_round(state, TARGET, drafter)
    middle, _ = fs.prefill(state, drafter)
    twin, taken = fs.fork(middle), fs.restore(fs.snapshot(middle))
    expected = finish(middle, drafter)
    assert finish(twin, drafter, donate=True) == expected
    assert finish(taken, drafter, donate=True) == expected
    assert finish(middle, drafter, donate=True) == expected


def test_a_row_does_not_depend_on_its_company(drafter: Drafter) -> None:
    """Each request alone, in another row of a larger state: the same tokens and, unless rows share texts, the same drafts."""
    whole = start(drafter, fs.rules.coupled)
    companions = {row: [] for row in (0, 2, 3)}
    for _ in range(5):
        whole, draft = drafted(whole, drafter)
        whole, verdict = fs.verify(whole, TARGET)
        for row, seen in companions.items():
            seen.append((draft.tokens[row].tolist(), verdict.tokens[row].tolist()))
    place = {0: 0, 2: 1, 3: 2}
    for row, seen in companions.items():
        state = fs.init(whole.config, TARGET, drafter)
        prompt = whole.tokens[row, : int(whole.prompt_len[row])].tolist()
        seed = [3, -4, 2**63 - 1][place[row]]
        heat = [0.8, 1.5, 0.0][place[row]]
        state, _ = fs.admit(state, TARGET, drafter, [prompt], seeds=[seed], temperature=heat, rows=[row])
        alone = []
        for _ in range(5):
            state, draft = drafted(state, drafter)
            state, verdict = fs.verify(state, TARGET)
            alone.append((draft.tokens[row].tolist(), verdict.tokens[row].tolist()))
        assert alone == seen


def test_a_row_that_lets_others_in_and_out_is_not_disturbed(drafter: Drafter) -> None:
    """Preempted in mid-way, taken in again in another row, while others come and go."""
    quiet = start(drafter, fs.rules.coupled)
    busy = fs.fork(quiet)
    for number in range(8):
        quiet, _ = fs.step_round(quiet, TARGET, drafter, donate=True)
        busy, _ = fs.step_round(busy, TARGET, drafter, donate=True)
        if number == 1:
            paused, busy = fs.snapshot(busy, rows=[0]), fs.release(busy, [0])
            busy, _ = fs.admit(busy, TARGET, drafter, [[9, 9, 1]], seeds=[5], temperature=1.0, rows=[0])
        if number == 2:
            busy = fs.resume(busy, paused, rows=[1])
    while rows_of(quiet):
        quiet, _ = fs.step_round(quiet, TARGET, drafter)
    while rows_of(busy):
        busy, _ = fs.step_round(busy, TARGET, drafter)
    assert [output(busy, row) for row in (1, 2, 3)] == [output(quiet, row) for row in (0, 2, 3)]
