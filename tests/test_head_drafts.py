"""Drafting with heads, step by step and whole rows, against a target and a head written out: EAGLE, EAGLE-3, multi-token prediction."""

from collections.abc import Iterator
from typing import Any

import jax
import numpy as np
import pytest
from head_oracle import CONFIGS, QUERIES, Pair, agreeing_pair, target_says
from oracle import config, output
from ratio_oracle import written_round

import funcspec as fs
from funcspec.drafters import eagle
from funcspec.models.jax_heads import JaxEagleHead
from funcspec.models.jax_llama import JaxLlama
from funcspec.models.query_heads import JaxQueryHead

PROMPTS = [[5, 6, 7], [1, 2], [40, 2, 9, 9, 33], [17]]
LENGTH = 32


@pytest.fixture(autouse=True)
def on_the_cpu() -> Iterator[None]:
    """Where the weights of the torch models are."""
    with jax.default_device(jax.devices("cpu")[0]):
        yield


@pytest.fixture(params=[False, True], ids=["pure", "donated"])
def donate(request: pytest.FixtureRequest) -> bool:
    return request.param


@pytest.fixture(params=CONFIGS | QUERIES)
def name(request: pytest.FixtureRequest) -> str:
    return request.param


def started(pair: Pair, drafts: int = 3, rule: fs.rules.Rule = fs.rules.greedy, **settings: Any) -> tuple[fs.SpecState, Any]:
    """All prompts in a state, in passes of two tokens."""
    drafter = eagle(pair.head, pair.token_ids)
    state = fs.init(config(len(PROMPTS), LENGTH, drafts, rule=rule, block_size=4), pair.target, drafter)
    return fs.admit(state, pair.target, drafter, PROMPTS, chunk=2, **settings)[0], drafter


def committed(state: fs.SpecState, row: int) -> list[int]:
    return state.tokens[row, : int(state.num_tokens[row])].tolist()


def draft(state: fs.SpecState, drafter: Any, **settings: Any) -> tuple[fs.SpecState, list[list[int]]]:
    """All draft steps of a round; the drafts of each row."""
    state, made = fs.prefill(state, drafter, **settings)
    for _ in range(state.config.num_speculative_tokens - 1):
        state, made = fs.decode(state, drafter)
    return state, [[token for token in row if token >= 0] for row in made.tokens.tolist()]


@pytest.mark.parametrize(("reduced", "donate"), [(False, True), (True, False)], ids=["whole-donated", "reduced-pure"])
def test_drafts_are_those_of_whole_sequences(name: str, reduced: bool, donate: bool) -> None:
    """Rows of any length that want any number of drafts, against the target and the head written out."""
    pair = agreeing_pair(name, reduced=reduced)
    state, drafter = started(pair)
    rng = np.random.default_rng(1)
    accepted, made = 0, 0
    for _ in range(5):
        wanted = rng.integers(0, 4, len(PROMPTS)).tolist()
        before = [committed(state, row) for row in range(len(PROMPTS))]
        state, drafts = draft(state, drafter, num_draft=wanted, donate=donate)
        assert drafts == [pair.drafts(tokens, count) for tokens, count in zip(before, wanted, strict=True)]
        state, verdict = fs.verify(state, pair.target, donate=donate)
        for row, (tokens, own) in enumerate(zip(before, drafts, strict=True)):
            said = target_says(pair.target, tokens + own).argmax(-1).tolist()[len(tokens) - 1 :]
            kept = next((place for place, token in enumerate(own) if token != said[place]), len(own))
            assert committed(state, row) == tokens + said[: kept + 1] and int(verdict.num_accepted[row]) == kept
            accepted, made = accepted + kept, made + len(own)
    assert 0 < accepted < made


@pytest.mark.parametrize(("rule", "temperature"), [(fs.rules.greedy, 0.0), (fs.rules.coupled, 0.8)], ids=["greedy", "coupled"])
@pytest.mark.parametrize(("reduced", "donate"), [(False, True), (True, False)], ids=["whole-donated", "reduced-pure"])
def test_output_is_that_of_plain_decoding(name: str, rule: fs.rules.Rule, temperature: float, reduced: bool, donate: bool) -> None:
    pair = agreeing_pair(name, reduced=reduced)
    settings = {"seeds": [1, 2, 3, 4], "temperature": temperature, "max_tokens": [20, 9, 14, 17]}
    plain = fs.init(config(len(PROMPTS), LENGTH, 0, rule=rule), pair.target)
    plain, _ = fs.admit(plain, pair.target, None, PROMPTS, **settings)
    while fs.any_active(plain):
        plain, _ = fs.verify(plain, pair.target, donate=True)
    state, drafter = started(pair, rule=rule, **settings)
    origins = []
    while fs.any_active(state):
        state, verdict = fs.step_round(state, pair.target, drafter, donate=donate)
        origins += verdict.origin[verdict.origin >= 0].tolist()
    assert [output(state, row) for row in range(4)] == [output(plain, row) for row in range(4)]
    assert set(origins) == {0, 1, 2}, "some drafts are kept and some are not"


@pytest.mark.parametrize(("reduced", "donate"), [(False, True), (True, False)], ids=["whole-donated", "reduced-pure"])
def test_the_ratio_rule_knows_what_drafts_were_drawn_from(name: str, reduced: bool, donate: bool) -> None:
    pair = agreeing_pair(name, reduced=reduced)
    seeds, heat = [3, -4, 2**63 - 1, 9], [0.7, 1.3, 0.0, 2.0]
    state, drafter = started(pair, rule=fs.rules.ratio, seeds=seeds, temperature=heat)
    origins = []
    for _ in range(4):
        before = [committed(state, row) for row in range(4)]
        state, drafts = draft(state, drafter, num_draft=[3, 2, 3, 3], donate=donate)
        kept = state.lease.carried()["draft_logits"]
        for row, (tokens, own) in enumerate(zip(before, drafts, strict=True)):
            wanted = np.stack([pair.drafted(tokens, own[:count]) for count in range(len(own))])
            if heat[row]:  # greedy rows keep nothing
                np.testing.assert_allclose(kept[row, : len(own)], wanted, atol=3e-5)
        state, verdict = fs.verify(state, pair.target, donate=donate)
        for row, tokens in enumerate(before):
            made, emitted, found = written_round(
                tokens,
                seeds[row],
                heat[row],
                [3, 2, 3, 3][row],
                p=lambda sequence: target_says(pair.target, sequence)[-1].float().numpy(),
                q=lambda sequence, tokens=tokens: pair.drafted(tokens, sequence[len(tokens) :]),
            )
            assert made == drafts[row] and committed(state, row) == tokens + emitted
            assert [origin for origin in verdict.origin[row].tolist() if origin >= 0] == found
            origins += found
    assert set(origins) == {0, 1, 2}


def test_pure_and_donated_runs_are_bit_equal(name: str) -> None:
    pair = agreeing_pair(name)
    found = []
    for donate in (False, True):
        state, drafter = started(pair, rule=fs.rules.coupled, seeds=[1, 2, 3, 4], temperature=0.7)
        taken = []
        for _ in range(4):
            state, _ = fs.prefill(state, drafter, donate=donate)
            taken.append(fs.snapshot(state))
            state, _ = fs.decode(state, drafter, donate=donate)
            state, _ = fs.verify(state, pair.target, donate=donate)
            taken.append(fs.snapshot(state))
        found.append(taken)
    assert found[0] == found[1]


def test_rows_that_were_cut_back_draft_like_others_a_round_later(name: str, donate: bool) -> None:
    pair = agreeing_pair(name)
    state, drafter = started(pair)
    for _ in range(3):
        state, _ = fs.step_round(state, pair.target, drafter, donate=donate)
    kept = [len(prompt) + 1 + row for row, prompt in enumerate(PROMPTS)]
    whole = [committed(state, row) for row in range(4)]
    state = fs.truncate(state, dict(enumerate(kept)), donate=donate)
    state, drafts = draft(state, drafter, donate=donate)
    assert drafts == [[], [], [], []]
    state, _ = fs.verify(state, pair.target, donate=donate)
    for _ in range(3):
        before = [committed(state, row) for row in range(4)]
        state, drafts = draft(state, drafter, donate=donate)
        assert drafts == [pair.drafts(tokens, 3) for tokens in before]
        state, _ = fs.verify(state, pair.target, donate=donate)
    for row in range(4):
        common = min(len(whole[row]), int(state.num_tokens[row]))
        assert common > kept[row] and committed(state, row)[:common] == whole[row][:common]


def test_a_fork_does_not_show_in_its_sibling(name: str) -> None:
    pair = agreeing_pair(name)
    state, drafter = started(pair, rule=fs.rules.coupled, seeds=[1, 2, 3, 4], temperature=1.0)
    state, _ = fs.step_round(state, pair.target, drafter)
    alone, other = fs.restore(fs.snapshot(state)), fs.fork(state, seeds=[9, 8, 7, 6])
    for _ in range(3):
        other, _ = fs.step_round(other, pair.target, drafter, donate=True)
        state, verdict = fs.step_round(state, pair.target, drafter)
        alone, expected = fs.step_round(alone, pair.target, drafter)
        assert verdict.tokens.tolist() == expected.tokens.tolist()
    assert fs.snapshot(state) == fs.snapshot(alone)


@pytest.mark.jax_on_cpu
@pytest.mark.slow
@pytest.mark.parametrize("name", ["normalised embedding", "eagle3", "query-only"], indirect=True)
def test_jax_states_draft_like_those_of_torch(name: str) -> None:
    """Eagerly, in jit and in a scan, with the head as an argument: the same tokens, and what is carried to rounding."""
    pair = agreeing_pair(name, reduced=True)
    settings = {"seeds": [1, 2, 3, 4], "temperature": [0.0, 0.7, 1.0, 1.4]}
    state, drafter = started(pair, rule=fs.rules.coupled, **settings)
    head = (JaxQueryHead if name in QUERIES else JaxEagleHead).from_torch(pair.head)
    twin = Pair(JaxLlama.from_torch(pair.target), head, head.output_token_ids)  # type: ignore[arg-type]
    start, other = started(twin, rule=fs.rules.coupled, **settings)
    np.testing.assert_allclose(start.lease.carried()["features"], state.lease.carried()["features"], atol=1e-5)
    expected = []
    for _ in range(4):
        state, verdict = fs.step_round(state, pair.target, drafter)
        expected.append(verdict)
    eager, verdict = fs.step_round(start, twin.target, other)
    assert verdict.tokens.tolist() == expected[0].tokens.tolist()
    turn = jax.jit(fs.step_round)
    compiled, verdict = turn(start, twin.target, other)
    assert verdict.tokens.tolist() == expected[0].tokens.tolist() and eager.num_tokens.tolist() == compiled.num_tokens.tolist()
    run = jax.jit(lambda state, target, drafter: jax.lax.scan(lambda s, _: fs.step_round(s, target, drafter), state, length=4))
    end, verdicts = run(start, twin.target, other)
    assert verdicts.tokens.tolist() == [verdict.tokens.tolist() for verdict in expected]
    assert sum(int(verdict.num_accepted.sum()) for verdict in expected) > 0
    np.testing.assert_allclose(end.lease.carried()["features"], state.lease.carried()["features"], atol=1e-4)
