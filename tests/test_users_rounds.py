"""What breaks for users of speculative decoding, continued: placeholders, acceptance, seeds, stops, slots, mixed batches, pairs."""

import dataclasses
import gc
import pickle

import pytest
import torch
from oracle import CHECKSUM_RUNS, checksum_greedy, config, output, pair, run
from watching import Watching, checksum_drafter, free_blocks, live, window

import funcspec as fs
from funcspec.drafters import standalone
from funcspec.errors import ModelError, StaleScoresError, StepOrderError
from funcspec.metrics import statistics
from funcspec.models import ChecksumDraft, ChecksumModel, TableModel, from_logits
from funcspec.models.llama import LlamaConfig, random_llama

TARGET, DRAFTER = pair()
SPREAD, SPREAD_DRAFTER = pair(spread=True)
COUPLED = fs.rules.coupled


@pytest.fixture(params=[False, True], ids=["pure", "donated"])
def donate(request: pytest.FixtureRequest) -> bool:
    return request.param


def finish(state: fs.SpecState, target: object, drafter: object, **settings: object) -> fs.SpecState:
    """Rounds until no row generates."""
    while fs.any_active(state):
        state, _ = fs.step_round(state, target, drafter, **settings)
    return state


def sample(
    prompts: list[list[int]], seeds: list[int] | None, temperature: float, count: int = 10, *, donate: bool = False
) -> list[list[int]]:
    """Sampled tokens of prompts decoded together."""
    state = fs.init(config(rows=len(prompts), rule=COUPLED), SPREAD, SPREAD_DRAFTER)
    state, _ = fs.admit(state, SPREAD, SPREAD_DRAFTER, prompts, seeds=seeds, temperature=temperature, max_tokens=count, donate=donate)
    state = finish(state, SPREAD, SPREAD_DRAFTER, donate=donate)
    return [output(state, row) for row in range(len(prompts))]


def joined(words: list[int]) -> int:
    """A seed from its two words."""
    return (words[0] & 0xFFFFFFFF) | (words[1] & 0xFFFFFFFF) << 32


def drafting(target: object, drafter: object, prompt: list[int], *, donate: bool, **settings: object) -> fs.SpecState:
    """A state with K drafts in row 0, ready for `verify`."""
    state = fs.init(config(**settings), target, drafter)
    state, _ = fs.admit(state, target, drafter, [prompt], donate=donate)
    state, _ = fs.prefill(state, drafter, donate=donate)
    for _ in range(state.config.num_speculative_tokens - 1):
        state, _ = fs.decode(state, drafter, donate=donate)
    return state


def test_e1_placeholder_among_drafts(donate: bool) -> None:
    rows = tuple(tuple(float(token == (2 if newest == 5 else 5)) for token in range(10)) for newest in range(10))
    target = Watching(TableModel(rows))
    drafter = standalone(TableModel(rows))
    for rule in (fs.rules.greedy, COUPLED):
        state = drafting(target, drafter, [5], donate=donate, rule=rule)
        n = int(state.num_tokens[0])
        tokens = state.tokens.clone()
        tokens[0, n : n + 3] = torch.tensor([5, -1, 7])
        target.clear()
        _, verdict = fs.verify(dataclasses.replace(state, tokens=tokens), target, donate=donate)
        assert verdict.tokens[0].tolist() == [5, 2, -1, -1] and verdict.num_emitted.tolist() == [2] and verdict.num_accepted.tolist() == [1]
        assert int(target.seen[0].input_ids.min()) >= 0


def test_e2_placeholders_that_outlive_their_step(donate: bool) -> None:
    target = Watching(TARGET)
    state = drafting(target, DRAFTER, [5, 6, 7], donate=donate)
    tokens = state.tokens.clone()
    tokens[0, 4:7] = -1
    target.clear()
    state, verdict = fs.verify(dataclasses.replace(state, tokens=tokens), target, donate=donate)
    assert verdict.num_accepted.tolist() == [0] and verdict.num_emitted.tolist() == [1]
    assert live(target.seen[0], 0) == [3] and 0 <= int(target.seen[0].input_ids.min()) <= int(target.seen[0].input_ids.max()) < 97
    state = run(state, target, DRAFTER, 4, donate=donate)
    assert output(state, 0) == checksum_greedy([5, 6, 7], len(output(state, 0)))


@pytest.mark.parametrize("rule", [fs.rules.greedy, COUPLED], ids=repr)
def test_f6_drafting_at_temperature_0(donate: bool, rule: fs.rules.Rule) -> None:
    drafter = standalone(TARGET)
    state = drafting(TARGET, drafter, [5, 6, 7], donate=donate, rule=rule)
    state, verdict = fs.verify(state, TARGET, donate=donate)
    assert verdict.num_drafted.tolist() == [3] and verdict.num_accepted.tolist() == [3]


def test_f7_bonus_token_after_three_hits(donate: bool) -> None:
    drafter = standalone(TARGET)
    state = drafting(TARGET, drafter, [5, 6, 7], donate=donate)
    drafts = state.tokens[0, 4:7].tolist()
    state, verdict = fs.verify(state, TARGET, donate=donate)
    assert verdict.tokens.tolist() == [[*drafts, 45]] == [[1, 6, 42, 45]] and verdict.origin.tolist() == [[0, 0, 0, 2]]
    _, verdict = fs.step_round(state, TARGET, drafter, donate=donate)
    assert verdict.tokens.tolist() == [[17, 73, 27, 33]]


def test_f8_prompt_of_one_repeated_word(donate: bool) -> None:
    for drafter in (DRAFTER, standalone(TARGET), checksum_drafter(lambda prefix: len(prefix) % 3 > 0)):
        state = fs.init(config(length=128, drafts=4), TARGET, drafter)
        state, _ = fs.admit(state, TARGET, drafter, [[12] * 48], max_tokens=32, donate=donate)
        state = finish(state, TARGET, drafter, donate=donate)
        assert output(state, 0) == checksum_greedy([12] * 48, 32)


def test_g1_seeds_are_honoured(donate: bool) -> None:
    first, again, other = (sample([[5, 6, 7]], [seed], 2.0, donate=donate) for seed in (42, 42, 43))
    assert first == again != other


def test_g2_rows_with_and_without_seeds(donate: bool) -> None:
    state = fs.init(config(rows=3, rule=COUPLED), SPREAD, SPREAD_DRAFTER)
    prompts = [[5, 6, 7], [1], [40, 2, 9, 9]]
    for row, seeds in ((1, None), (0, [7]), (2, [9])):
        settings = {"seeds": seeds, "temperature": 1.0, "max_tokens": 10, "rows": [row], "donate": donate}
        state, _ = fs.admit(state, SPREAD, SPREAD_DRAFTER, [prompts[row]], **settings)
    state = finish(state, SPREAD, SPREAD_DRAFTER, donate=donate)
    assert output(state, 0) == sample([prompts[0]], [7], 1.0)[0] and output(state, 2) == sample([prompts[2]], [9], 1.0)[0]
    assert len(output(state, 1)) == 10 and all(0 <= token < 97 for token in output(state, 1)) and len(set(output(state, 1))) > 1
    assert output(state, 1) == sample([prompts[1]], [joined(state.seed[1].tolist())], 1.0)[0]


def test_g3_output_does_not_depend_on_earlier_rounds(donate: bool) -> None:
    state = fs.init(config(rows=2, rule=COUPLED), SPREAD, SPREAD_DRAFTER)
    found = []
    for rounds in (0, 5):
        state, _ = fs.admit(state, SPREAD, SPREAD_DRAFTER, [[9, 9]], temperature=1.3, donate=donate)
        state = run(state, SPREAD, SPREAD_DRAFTER, rounds, donate=donate)
        state, admitted = fs.admit(state, SPREAD, SPREAD_DRAFTER, [[5, 6, 7]], seeds=[3], temperature=1.0, donate=donate)
        row = admitted.rows[0]
        while len(output(state, row)) < 10:
            state, _ = fs.step_round(state, SPREAD, SPREAD_DRAFTER, donate=donate)
        found.append(output(state, row)[:10])
        state = fs.release(state, [0, 1], donate=donate)
    assert found[0] == found[1] == sample([[5, 6, 7]], [3], 1.0)[0]


def test_g4_rows_without_seeds_differ_and_can_be_replayed(donate: bool) -> None:
    found, seeds = [], []
    for _ in range(8):
        state = fs.init(config(rule=COUPLED), SPREAD, SPREAD_DRAFTER)
        state, _ = fs.admit(state, SPREAD, SPREAD_DRAFTER, [[5, 6, 7]], temperature=1.0, max_tokens=10, donate=donate)
        seeds.append(joined(state.seed[0].tolist()))
        found.append(output(finish(state, SPREAD, SPREAD_DRAFTER, donate=donate), 0))
    assert len(set(seeds)) == 8 and len({tuple(tokens) for tokens in found}) > 1
    assert [sample([[5, 6, 7]], [seed], 1.0)[0] for seed in seeds] == found


@pytest.mark.parametrize("way", ["restore", "restore without KV", "pickle", "admit again"])
def test_g5_interrupted_between_draft_and_verify(donate: bool, way: str) -> None:
    expected = sample([[5, 6, 7]], [42], 1.0, 16)[0]
    state = fs.init(config(rule=COUPLED), SPREAD, SPREAD_DRAFTER)
    state, _ = fs.admit(state, SPREAD, SPREAD_DRAFTER, [[5, 6, 7]], seeds=[42], temperature=1.0, max_tokens=16, donate=donate)
    state = run(state, SPREAD, SPREAD_DRAFTER, 2, donate=donate)
    state, _ = fs.prefill(state, SPREAD_DRAFTER, donate=donate)
    state, _ = fs.decode(state, SPREAD_DRAFTER, donate=donate)
    if way == "admit again":  # the drafts are thrown away, and so is the newest token: admission draws it again
        tokens = state.tokens[0, : int(state.num_tokens[0]) - 1].tolist()
        state = fs.init(config(rule=COUPLED), SPREAD, SPREAD_DRAFTER)
        settings = {"seeds": [42], "temperature": 1.0, "max_tokens": 19 - len(tokens), "donate": donate}
        state, _ = fs.admit(state, SPREAD, SPREAD_DRAFTER, [tokens], **settings)
        state = finish(state, SPREAD, SPREAD_DRAFTER, donate=donate)
        assert (tokens + output(state, 0))[3:] == expected
        return
    taken = fs.snapshot(state, kv=way != "restore without KV")
    state = pickle.loads(pickle.dumps(state)) if way == "pickle" else fs.restore(taken, SPREAD, SPREAD_DRAFTER)
    state, _ = fs.verify(state, SPREAD, donate=donate)
    assert output(finish(state, SPREAD, SPREAD_DRAFTER, donate=donate), 0) == expected


def test_g6_the_second_call_equals_the_first(donate: bool) -> None:
    first = fs.init(config(rows=2, rule=COUPLED), SPREAD, SPREAD_DRAFTER)
    first, _ = fs.admit(first, SPREAD, SPREAD_DRAFTER, [[5, 6, 7], [1]], seeds=[1, 2], temperature=[0.7, 1.3], max_tokens=20)
    before = fs.snapshot(first)
    ends = [fs.snapshot(finish(fs.fork(first) if donate else first, SPREAD, SPREAD_DRAFTER, donate=donate)) for _ in range(3)]
    assert ends[0] == ends[1] == ends[2] and fs.snapshot(first) == before
    loops = [
        [e.tokens for e in fs.generate(first.config, SPREAD, SPREAD_DRAFTER, [[5], [1], [2]], seeds=[1, 2, 3], temperature=1.0)]
        for _ in "ab"
    ]
    assert loops[0] == loops[1]


def test_g8_acceptance_is_decided_once_and_ties_go_to_the_lowest_id(donate: bool) -> None:
    state = fs.init(config(drafts=1), TARGET, DRAFTER)
    state, _ = fs.admit(state, TARGET, DRAFTER, [[5, 6, 7]])
    state, _ = fs.prefill(state, DRAFTER, num_draft=0)
    scored, scores = fs.score(state, TARGET)
    tie = torch.zeros_like(scores.logits)
    tie[0, 0, [20, 40, 60]] = 1.0
    near = tie.clone()
    near[0, 0, 40] = torch.nextafter(torch.tensor(1.0), torch.tensor(2.0))
    for logits, token in ((tie, 20), (near, 40)):
        # Two ranks: each takes the logits of the first as data, whatever it has computed itself.
        verdicts = [
            fs.accept(rank, dataclasses.replace(scores, logits=logits), donate=donate)[1] for rank in (fs.fork(scored), fs.fork(scored))
        ]
        assert [verdict.tokens[0].tolist() for verdict in verdicts] == [[token, -1]] * 2


def test_g9_a_neighbour_without_a_seed(donate: bool) -> None:
    alone = sample([[5, 6, 7]], [42], 1.0)[0]
    state = fs.init(config(rows=2, rule=COUPLED), SPREAD, SPREAD_DRAFTER)
    state, _ = fs.admit(state, SPREAD, SPREAD_DRAFTER, [[5, 6, 7]], seeds=[42], temperature=1.0, max_tokens=10, donate=donate)
    state, _ = fs.admit(state, SPREAD, SPREAD_DRAFTER, [[5, 6, 7]], temperature=1.0, max_tokens=10, donate=donate)
    assert output(finish(state, SPREAD, SPREAD_DRAFTER, donate=donate), 0) == alone
    assert sample([[5, 6, 7], [5, 6, 7]], [42, 7], 1.0, donate=donate)[0] == alone


def test_i1_end_token_in_the_middle_of_a_block(donate: bool) -> None:
    drafter = standalone(TARGET)
    state = fs.init(config(), TARGET, drafter)
    state, _ = fs.admit(state, TARGET, drafter, [[5, 6, 7]], stop_ids=[42], donate=donate)
    state = finish(state, TARGET, drafter, donate=donate)
    assert output(state, 0) == [39, 1, 6, 42] and state.finish_reason.tolist() == [1]


def test_i3_everything_is_cut_at_the_stop() -> None:
    emissions = list(fs.generate(config(), TARGET, standalone(TARGET), [[5, 6, 7]], stop_ids=[6]))
    last = emissions[-1]
    assert last.tokens == (1, 6) and last.origin == (0, 0) and last.num_accepted == 2 and last.finish_reason == 1


def test_i4_counters_are_raised_after_the_stop(donate: bool) -> None:
    drafter = standalone(TARGET)
    stop = CHECKSUM_RUNS[(5, 6, 7)][0][3]
    state = fs.init(config(drafts=6), TARGET, drafter)
    state, _ = fs.admit(state, TARGET, drafter, [[5, 6, 7]], stop_ids=[stop], donate=donate)
    state, verdict = fs.step_round(state, TARGET, drafter, donate=donate)
    assert verdict.num_drafted.tolist() == [6]
    assert verdict.num_emitted.tolist() == verdict.num_accepted.tolist() == [3] and state.num_tokens.tolist() == [4 + 3]
    assert verdict.tokens[0].ge(0).sum() == verdict.origin[0].ge(0).sum() == 3 and state.tokens[0, 7:].eq(-1).all()
    found = statistics(fs.generate(config(drafts=6), TARGET, drafter, [[5, 6, 7]], stop_ids=[stop]), 6)
    assert found.rounds == 1 and found.emitted == sum(found.accepted) == 3


def test_j1_a_reused_row_starts_from_its_own_token(donate: bool) -> None:
    target = Watching(TARGET)
    state = fs.init(config(rows=3), target, DRAFTER)
    state, first = fs.admit(state, target, DRAFTER, [[54]], max_tokens=1, rows=[2], donate=donate)
    assert first.tokens == (55,)
    state = fs.release(state, [2], donate=donate)
    state, first = fs.admit(state, target, DRAFTER, [[12, 0, 0, 0, 0]], rows=[2], donate=donate)
    assert first.tokens == (13,) and state.tokens[2].tolist() == [12, 0, 0, 0, 0, 13] + [-1] * 58
    target.clear()
    fs.step_round(state, target, DRAFTER, donate=donate)
    assert window(target.seen[0], 2, "input_ids")[0] == 13 and window(target.seen[0], 2)[0] == 5


def test_j2_drafts_of_a_removed_row_do_not_survive(donate: bool) -> None:
    drafter = standalone(from_logits(lambda prefix: 1.0 * (torch.arange(97) == 33), vocab_size=97))
    state = drafting(TARGET, drafter, [5, 6, 7], donate=donate, rows=2)
    assert state.tokens[0, 4:7].tolist() == [33, 33, 33]
    state = fs.release(state, [0], donate=donate)
    state, verdict = fs.verify(state, TARGET, donate=donate)
    assert verdict.num_drafted.tolist() == verdict.num_emitted.tolist() == [0, 0]
    state, _ = fs.admit(state, TARGET, drafter, [[5, 6, 7]], donate=donate)
    assert state.num_draft.tolist() == state.num_drafted.tolist() == [0, 0] and 33 not in state.tokens[0].tolist()
    state, _ = fs.prefill(state, drafter, num_draft=0, donate=donate)
    state, verdict = fs.verify(state, TARGET, donate=donate)
    assert verdict.num_drafted.tolist() == [0, 0] and output(state, 0) == checksum_greedy([5, 6, 7], 2)


def test_j3_a_result_in_flight_is_not_applied_to_a_newer_state(donate: bool) -> None:
    state = drafting(TARGET, DRAFTER, [5, 6, 7], donate=donate)
    scored, scores = fs.score(state, TARGET)
    newer, _ = fs.accept(fs.fork(scored), scores)
    with pytest.raises(StepOrderError, match="call score first"):
        fs.accept(newer, scores, donate=donate)
    newer, _ = fs.prefill(newer, DRAFTER, donate=donate)
    newer, newest = fs.score(newer, TARGET, donate=donate)
    with pytest.raises(StaleScoresError, match=r"scores of this very state.*Fix: call score on this state again"):
        fs.accept(newer, scores, donate=donate)
    newer, _ = fs.accept(newer, newest, donate=donate)
    assert output(newer, 0) == checksum_greedy([5, 6, 7], len(output(newer, 0)))


def test_j5_memory_does_not_grow_without_drafts(donate: bool) -> None:
    def tensors() -> int:
        gc.collect()
        return sum(type(each) is torch.Tensor for each in gc.get_objects())

    state = fs.init(config(length=520), TARGET, DRAFTER)
    state, _ = fs.admit(state, TARGET, DRAFTER, [[5, 6, 7]], donate=donate)
    state = run(state, TARGET, DRAFTER, 20, num_draft=0, donate=donate)
    before, free = tensors(), free_blocks(state)
    state = run(state, TARGET, DRAFTER, 480, num_draft=0, donate=donate)
    assert tensors() == before and free_blocks(state) == free and len(output(state, 0)) == 501


def test_j6_no_pages_leak_from_finished_requests(donate: bool) -> None:
    state = fs.init(config(length=200, block_size=64, num_blocks=8), TARGET, DRAFTER)
    for number in range(20):
        state, _ = fs.admit(state, TARGET, DRAFTER, [[number + 1] * 62], max_tokens=5, donate=donate)
        assert free_blocks(state) == (6, 6)
        state = finish(state, TARGET, DRAFTER, donate=donate)
        state = fs.release(state, [0], donate=donate)
        assert free_blocks(state) == (8, 8)


def test_j7_rows_do_not_move_when_one_ends(donate: bool) -> None:
    prompts = [[5, 6, 7], [1], [40, 2, 9, 9]]
    state = fs.init(config(rows=3), TARGET, DRAFTER)
    state, _ = fs.admit(state, TARGET, DRAFTER, prompts, max_tokens=[20, 2, 20], donate=donate)
    while not int(state.finish_reason[1]):
        state, _ = fs.step_round(state, TARGET, DRAFTER, donate=donate)
    state, _ = fs.prefill(state, DRAFTER, donate=donate)
    before = int(state.num_tokens[2])
    state = fs.release(state, [1], donate=donate)  # between submitting a round and committing it
    state, verdict = fs.verify(state, TARGET, donate=donate)
    assert int(state.num_tokens[2]) == before + int(verdict.num_emitted[2]) and verdict.num_emitted[1] == 0
    state = finish(state, TARGET, DRAFTER, donate=donate)
    assert output(state, 0) == checksum_greedy(prompts[0], 20) and output(state, 2) == checksum_greedy(prompts[2], 20)


def test_j8_the_drafter_takes_in_what_the_target_need_not(donate: bool) -> None:
    """A state whose target has its tokens already: the drafter ingests all of them, and drafts as in a fresh run."""
    prompt = list(range(3, 13))
    fresh = drafting(TARGET, DRAFTER, prompt, donate=donate)
    draft = Watching(ChecksumDraft())
    state = fs.init(config(), TARGET, DRAFTER)
    state, _ = fs.admit(state, TARGET, DRAFTER, [prompt], donate=donate)
    state = fs.restore(fs.snapshot(state, kv=False), TARGET, standalone(draft))
    assert [position for batch in draft.seen for position in live(batch, 0)] == list(range(10))
    for step in (fs.prefill, fs.decode, fs.decode):
        state, found = step(state, DRAFTER, donate=donate)
    assert found.tokens.tolist() == [fresh.tokens[0, 11:14].tolist()]


def test_k2_rows_with_and_without_drafts_and_a_padding_row(donate: bool) -> None:
    prompts = {0: [5, 6, 7], 1: [1], 3: [40, 2, 9, 9], 4: [8, 8]}
    state = fs.init(config(rows=5), TARGET, DRAFTER)
    state, _ = fs.admit(state, TARGET, DRAFTER, list(prompts.values()), rows=list(prompts), donate=donate)
    alone = {}
    for (row, prompt), wanted in zip(prompts.items(), [0, 3, 0, 3], strict=True):
        single = fs.init(config(), TARGET, DRAFTER)
        single, _ = fs.admit(single, TARGET, DRAFTER, [prompt])
        alone[row] = []
        for _ in range(6):
            single, verdict = fs.step_round(single, TARGET, DRAFTER, num_draft=wanted)
            alone[row].append(verdict.tokens[0].tolist())
    for number in range(6):
        state, verdict = fs.step_round(state, TARGET, DRAFTER, num_draft=[0, 3, 0, 0, 3], donate=donate)
        assert verdict.num_drafted.tolist() == [0, 3, 0, 0, 3] and verdict.num_emitted[2] == 0
        assert {row: verdict.tokens[row].tolist() for row in prompts} == {row: tokens[number] for row, tokens in alone.items()}


@pytest.mark.parametrize("chunk", [1, 3, 4, 9, 10, 11])
def test_k5_prompt_in_chunks(donate: bool, chunk: int) -> None:
    target = Watching(TARGET)
    prompt = list(range(3, 13))
    whole, pieces = (fs.init(config(), target, DRAFTER) for _ in range(2))
    whole, _ = fs.admit(whole, TARGET, DRAFTER, [prompt], seeds=[1], donate=donate)
    pieces, _ = fs.admit(pieces, target, DRAFTER, [prompt], seeds=[1], chunk=chunk, donate=donate)
    assert [len(live(batch, 0)) for batch in target.seen] == [min(chunk, 10 - begin) for begin in range(0, 10, chunk)]
    assert fs.snapshot(pieces) == fs.snapshot(whole)
    assert fs.snapshot(run(pieces, target, DRAFTER, 3, donate=donate)) == fs.snapshot(run(whole, TARGET, DRAFTER, 3, donate=donate))


def test_l1_different_vocabularies_are_refused_with_both_sizes() -> None:
    for large, small in ((97, 49), (49, 97)):
        with pytest.raises(ModelError, match=rf"vocabulary of {large}, got a draft of {small}.*token_ids"):
            fs.init(config(), ChecksumModel(vocab_size=large), standalone(ChecksumDraft(vocab_size=small)))


def test_l3_reduced_vocabulary_with_an_id_map(donate: bool) -> None:
    seen: list[list[int]] = []

    def second(prefix: torch.Tensor) -> torch.Tensor:
        seen.append(prefix.tolist())
        return torch.tensor([0.0, 1.0, 0.0])

    target = Watching(from_logits(lambda prefix: 1.0 * (torch.arange(97) == (10 if len(prefix) < 6 else 50)), vocab_size=97))
    drafter = standalone(from_logits(second, vocab_size=3), torch.tensor([3, 10, 50], dtype=torch.int32))
    for rule in (fs.rules.greedy, COUPLED):
        state = fs.init(config(rule=rule), target, drafter)
        state, _ = fs.admit(state, target, drafter, [[5, 6, 7]], donate=donate)
        seen.clear()
        target.clear()
        state, verdict = fs.step_round(state, target, drafter, donate=donate)
        assert seen == [[5, 6, 7, 10], [5, 6, 7, 10, 10], [5, 6, 7, 10, 10, 10]]
        assert live(target.seen[0], 0, "input_ids") == [10, 10, 10, 10]
        assert verdict.tokens[0].tolist() == [10, 10, 50, -1] and verdict.num_accepted.tolist() == [2]


def test_l5_hidden_sizes_of_target_and_draft_are_never_compared(donate: bool) -> None:
    shape = {"vocab_size": 50, "num_layers": 1, "num_heads": 2, "num_kv_heads": 1, "max_len": 64, "rope_theta": 1e4, "norm_eps": 1e-5}
    target = random_llama(LlamaConfig(hidden_size=64, intermediate_size=32, head_dim=32, **shape))
    drafter = standalone(random_llama(LlamaConfig(hidden_size=16, intermediate_size=24, head_dim=8, **shape), seed=1))
    found = []
    for pair_ in ((target, drafter), (target, None)):
        state = fs.init(config(), *pair_)
        state, _ = fs.admit(state, *pair_, [[5, 6, 7]], max_tokens=12, donate=donate)
        found.append(output(finish(state, *pair_, donate=donate), 0))
    assert found[0] == found[1] and len(found[0]) == 12
