"""What breaks for users of speculative decoding, with its numbers and right answers: positions, caches, blocks, padding."""

import dataclasses

import pytest
import torch
from oracle import checksum_greedy, checksum_rounds, config, kv_bytes, output, pair, run
from watching import Watching, cached, checksum_drafter, free_blocks, live, window

import funcspec as fs
from funcspec.drafters import standalone
from funcspec.errors import ArgumentTypeError, PoolExhaustedError
from funcspec.models import ChecksumDraft

TARGET, DRAFTER = pair()
LONG = [(7 * i + 3) % 97 for i in range(60)]


@pytest.fixture(params=[False, True], ids=["pure", "donated"])
def donate(request: pytest.FixtureRequest) -> bool:
    return request.param


def finish(state: fs.SpecState, target: object, drafter: object, **settings: object) -> tuple[fs.SpecState, list[fs.Verdict]]:
    """Rounds until no row generates."""
    verdicts = []
    while fs.any_active(state):
        state, verdict = fs.step_round(state, target, drafter, **settings)
        verdicts.append(verdict)
    return state, verdicts


def test_a1_draft_shorter_than_the_row(donate: bool) -> None:
    draft = Watching(ChecksumDraft(max_len=32))
    drafter = standalone(draft)
    state = fs.init(config(length=64, drafts=4), TARGET, drafter)
    state, _ = fs.admit(state, TARGET, drafter, [LONG[:29]], max_tokens=20, donate=donate)
    state, verdicts = finish(state, TARGET, drafter, donate=donate)
    assert output(state, 0) == checksum_greedy(LONG[:29], 20)
    assert max(int(batch.positions.max()) for batch in draft.seen) == 31
    assert max(int(batch.seq_lens.max()) for batch in draft.seen) <= 32
    starts = [30]
    for verdict in verdicts:
        starts.append(starts[-1] + int(verdict.num_emitted[0]))
    drafted = [int(verdict.num_drafted[0]) for verdict in verdicts]
    # Position 31 is the last that the draft can read; it draws one token more.
    assert drafted == [max(min(4, 33 - n, 49 - n - 1), 0) for n in starts[:-1]] and drafted[0] == 3 and drafted[-1] == 0


@pytest.mark.parametrize("prompt_len", [30, 31, 32, 33, 40, 60])
def test_a2_draft_limit_is_kept_for_every_row(donate: bool, prompt_len: int) -> None:
    draft = Watching(ChecksumDraft(max_len=32))
    drafter = standalone(draft)
    state = fs.init(config(rows=2, length=64, drafts=4), TARGET, drafter)
    state, _ = fs.admit(state, TARGET, drafter, [LONG[:prompt_len], [1]], donate=donate)
    draft.clear()
    state, verdicts = finish(state, TARGET, drafter, donate=donate)
    assert output(state, 0) == checksum_greedy(LONG[:prompt_len], 64 - prompt_len)
    assert output(state, 1) == checksum_greedy([1], 63)
    assert all(int(batch.positions.max()) < 32 and int(batch.input_ids.min()) >= 0 for batch in draft.seen)
    assert sum(int(verdict.num_drafted[0]) for verdict in verdicts) == {30: 2, 31: 1}.get(prompt_len, 0)


def test_a3_rejected_places_are_padding_not_tokens(donate: bool) -> None:
    def drafts(prompts: list[list[int]]) -> tuple[list[list[list[int]]], list[list[int]], list[object]]:
        draft = Watching(ChecksumDraft())
        drafter = standalone(draft)
        state = fs.init(config(rows=len(prompts)), TARGET, drafter)
        state, _ = fs.admit(state, TARGET, drafter, prompts, donate=donate)
        found, accepted, feeds = [], [], []
        for _ in range(8):
            draft.clear()
            state, _ = fs.prefill(state, drafter, donate=donate)
            feeds.append(draft.seen[0])
            for _ in range(2):
                state, draft_ = fs.decode(state, drafter, donate=donate)
            found.append(draft_.tokens.tolist())
            state, verdict = fs.verify(state, TARGET, donate=donate)
            accepted.append(verdict.num_accepted.tolist())
        return found, accepted, feeds

    both, accepted, feeds = drafts([[1], [5, 6, 7]])
    assert accepted[5] == [0, 3]
    alone = [drafts([prompt])[0] for prompt in ([1], [5, 6, 7])]
    assert both == [[a[0], b[0]] for a, b in zip(*alone, strict=True)]
    slots = [window(feeds[6], row, "slot_mapping") for row in (0, 1)]
    assert [slot >= 0 for slot in slots[0]] == [True, False, False, False] and all(slot >= 0 for slot in slots[1])
    assert window(feeds[6], 0, "input_ids")[1:] == window(feeds[6], 0)[1:] == [0, 0, 0]


@pytest.mark.parametrize("prompt_len", range(14, 35))
def test_a4_every_call_starts_at_the_cached_length(prompt_len: int) -> None:
    target, draft = Watching(TARGET), Watching(ChecksumDraft())
    drafter = standalone(draft)
    state = fs.init(config(length=64, block_size=16), target, drafter)
    state, _ = fs.admit(state, target, drafter, [LONG[:prompt_len]])
    for _ in range(4):
        target.clear()
        draft.clear()
        n, fed = int(state.num_tokens[0]), int(state.draft_len[0])
        state, verdict = fs.step_round(state, target, drafter)
        assert live(draft.seen[0], 0) == list(range(fed, n))
        assert [live(batch, 0) for batch in draft.seen[1:]] == [[n], [n + 1]]
        assert live(target.seen[0], 0) == list(range(n - 1, n + 3))
        tokens, positions = cached(state, 0, "target")
        kept = n + int(verdict.num_accepted[0])
        assert positions[:kept] == list(range(kept)) and tokens[:kept] == state.tokens[0, :kept].tolist()


def test_a5_lengths_of_draft_steps_do_not_count_rejected_tokens(donate: bool) -> None:
    draft = Watching(checksum_drafter(lambda prefix: True).model)
    drafter = standalone(draft)
    state = fs.init(config(length=64), TARGET, drafter)
    state, _ = fs.admit(state, TARGET, drafter, [LONG[:42]], donate=donate)
    state, verdict = fs.step_round(state, TARGET, drafter, donate=donate)
    assert verdict.num_drafted.tolist() == [3] and verdict.num_accepted.tolist() == [0] and state.num_tokens.tolist() == [44]
    draft.clear()
    fs.step_round(state, TARGET, drafter, donate=donate)
    assert [batch.seq_lens.tolist() for batch in draft.seen] == [[44], [45], [46]]


def test_b1_draft_cache_holds_the_bonus_token(donate: bool) -> None:
    state = fs.init(config(), TARGET, DRAFTER)
    state, _ = fs.admit(state, TARGET, DRAFTER, [[5, 6, 7]], donate=donate)
    accepted = []
    for _ in range(8):
        n = int(state.num_tokens[0])
        state, _ = fs.prefill(state, DRAFTER, donate=donate)
        tokens, positions = cached(state, 0)
        assert tokens[:n] == state.tokens[0, :n].tolist() and positions[:n] == list(range(n))
        for _ in range(2):
            state, _ = fs.decode(state, DRAFTER, donate=donate)
        state, verdict = fs.verify(state, TARGET, donate=donate)
        accepted.append(int(verdict.num_accepted[0]))
    assert accepted == [1, 0, 0, 2, 0, 3, 1, 3]


@pytest.mark.parametrize("accepted", range(5))
def test_b3_rewind_of_target_and_drafter(donate: bool, accepted: int) -> None:
    n = 4  # three tokens of prompt and the first token
    target, draft = Watching(TARGET), Watching(checksum_drafter(lambda prefix: len(prefix) == n + accepted).model)
    drafter = standalone(draft)
    state = fs.init(config(drafts=4), target, drafter)
    state, _ = fs.admit(state, target, drafter, [[5, 6, 7]], donate=donate)
    state, verdict = fs.step_round(state, target, drafter, donate=donate)
    assert verdict.num_drafted.tolist() == [4] and verdict.num_accepted.tolist() == [accepted]
    target.clear()
    draft.clear()
    fs.step_round(state, target, drafter, donate=donate)
    assert live(target.seen[0], 0)[0] == n - 1 + accepted + 1  # of 5 new entries accepted + 1 are kept
    assert live(draft.seen[0], 0) == list(range(n, n + accepted + 1))  # all that was committed, also after 4 of 4


def test_b4_next_draft_call_sees_committed_tokens_only(donate: bool) -> None:
    seen: list[list[int]] = []
    drafter = checksum_drafter(lambda prefix: len(prefix) != 4, seen)
    state = fs.init(config(drafts=4), TARGET, drafter)
    state, _ = fs.admit(state, TARGET, drafter, [[5, 6, 7]], donate=donate)
    state, verdict = fs.step_round(state, TARGET, drafter, donate=donate)
    assert verdict.num_drafted.tolist() == [4] and verdict.num_accepted.tolist() == [1]
    committed = [5, 6, 7, *checksum_greedy([5, 6, 7], 3)]
    seen.clear()
    fs.step_round(state, TARGET, drafter, donate=donate)
    assert seen[0] == committed
    assert [prefix[:6] for prefix in seen] == [committed] * 4


def test_b5_no_guess_below_the_committed_length(donate: bool) -> None:
    draft = Watching(ChecksumDraft())
    drafter = standalone(draft)
    state = fs.init(config(), TARGET, drafter)
    state, _ = fs.admit(state, TARGET, drafter, [[5, 6, 7]], donate=donate)
    written: dict[int, str] = dict.fromkeys(range(3), "verified")
    for _ in range(10):
        draft.clear()
        n = int(state.num_tokens[0])
        state, _ = fs.prefill(state, drafter, donate=donate)
        written.update(dict.fromkeys(live(draft.seen[0], 0), "verified"))
        assert [written[position] for position in range(n)] == ["verified"] * n
        for _ in range(2):
            state, _ = fs.decode(state, drafter, donate=donate)
        written.update({position: "guess" for batch in draft.seen[1:] for position in live(batch, 0)})
        state, _ = fs.verify(state, TARGET, donate=donate)


def test_b6_rounds_without_drafts_keep_the_drafter_in_step(donate: bool) -> None:
    state = fs.init(config(), TARGET, DRAFTER)
    state, _ = fs.admit(state, TARGET, DRAFTER, [[5, 6, 7]], donate=donate)
    accepted = []
    for number, wanted in enumerate([3, 0, 0, 3]):
        tokens = state.tokens[0, : int(state.num_tokens[0])].tolist()
        state, draft = fs.prefill(state, DRAFTER, num_draft=wanted, donate=donate)
        assert state.draft_len.tolist() == state.num_tokens.tolist() == [len(tokens)] and draft.num_draft.tolist() == [wanted]
        assert cached(state, 0)[0][: len(tokens)] == tokens
        for _ in range(2):
            state, draft = fs.decode(state, DRAFTER, donate=donate)
        if number == 3:
            fresh = fs.init(config(), TARGET, DRAFTER)
            fresh, _ = fs.admit(fresh, TARGET, DRAFTER, [tokens[:-1]])
            _, expected = fs.step_round(fresh, TARGET, DRAFTER)
        state, verdict = fs.verify(state, TARGET, donate=donate)
        accepted.append(int(verdict.num_accepted[0]))
    assert accepted == [count for count, _ in checksum_rounds([5, 6, 7], 4, [3, 0, 0, 3])]
    assert torch.equal(verdict.tokens, expected.tokens) and torch.equal(verdict.num_accepted, expected.num_accepted)


@pytest.mark.parametrize("name", ["tokens", "num_tokens", "draft_len", "block_tables", "draft_block_tables"])
def test_b8_a_buffer_copied_at_the_boundary_still_takes_part(donate: bool, name: str) -> None:
    state = fs.init(config(rows=2, block_size=4, num_blocks=200), TARGET, DRAFTER)
    state, _ = fs.admit(state, TARGET, DRAFTER, [[5, 6, 7], [1]])
    value = getattr(state, name)
    shifted = torch.cat([torch.zeros(1, dtype=torch.int32), value.flatten()])[1:].view(value.shape)
    strided = torch.stack([value, value], -1)[..., 0]
    assert shifted.data_ptr() % 64 != 0 and not strided.is_contiguous()
    for odd in (shifted, strided):
        kept = odd.clone()
        stepped = run(dataclasses.replace(state, **{name: odd}), TARGET, DRAFTER, 3, donate=donate)
        assert torch.equal(odd, kept)
        for row, prompt in enumerate(([5, 6, 7], [1])):
            assert output(stepped, row) == checksum_greedy(prompt, len(output(stepped, row))) and len(output(stepped, row)) > 3
    with pytest.raises(ArgumentTypeError, match=rf"state\.{name}: expected a torch tensor of torch\.int32, got torch\.int64"):
        fs.step_round(dataclasses.replace(state, **{name: value.long()}), TARGET, DRAFTER, donate=donate)
    assert output(state, 0) == [39]


def test_c1_look_ahead_is_reserved(donate: bool) -> None:
    target = Watching(TARGET)
    state = fs.init(config(length=64, drafts=4, block_size=4), target, DRAFTER)
    state, _ = fs.admit(state, target, DRAFTER, [LONG[:14]], max_tokens=1, donate=donate)
    assert int((state.block_tables[0] >= 0).sum()) == int((state.draft_block_tables[0] >= 0).sum()) == 5
    state = fs.release(state, [0], donate=donate)
    state, _ = fs.admit(state, target, DRAFTER, [LONG[:14]], max_tokens=6, donate=donate)
    target.clear()
    state, _ = fs.step_round(state, target, DRAFTER, donate=donate)
    assert live(target.seen[0], 0) == [14, 15, 16, 17, 18]
    table = state.block_tables[0].tolist()
    assert window(target.seen[0], 0, "slot_mapping") == [table[position // 4] * 4 + position % 4 for position in range(14, 19)]


def test_c2_columns_past_the_reservation_are_not_block_0(donate: bool) -> None:
    target = Watching(TARGET)
    state = fs.init(config(length=20, drafts=2, block_size=4), target, DRAFTER)
    state, _ = fs.admit(state, target, DRAFTER, [LONG[:10]], max_tokens=3, donate=donate)
    assert (state.block_tables[0] >= 0).tolist() == (state.draft_block_tables[0] >= 0).tolist() == [True] * 4 + [False]
    assert state.block_tables[0, 4] == state.draft_block_tables[0, 4] == -1
    # A caller may lift the limit: what lies past the row's own blocks is then written nowhere.
    state = dataclasses.replace(state, row_limit=torch.tensor([20], dtype=torch.int32))
    target.clear()
    while int(state.num_tokens[0]) < 17:
        state, _ = fs.step_round(state, target, DRAFTER, donate=donate)
    slots = {
        position: slot for batch in target.seen for position, slot in zip(window(batch, 0), window(batch, 0, "slot_mapping"), strict=True)
    }
    owned = {block for block in state.block_tables[0].tolist() if block >= 0}
    assert all(slots[position] == -1 for position in slots if position >= 16)
    assert all(slots[position] // 4 in owned for position in slots if 0 < position < 16)


def test_c4_a_request_that_needs_two_blocks_more_does_not_start_with_one(donate: bool) -> None:
    settings = config(length=32, drafts=0, block_size=4, num_blocks=3)
    state = fs.init(settings, TARGET)
    before = fs.snapshot(state)
    with pytest.raises(PoolExhaustedError, match="expected 4 free blocks in the target pool, got 3 of 3"):
        fs.admit(state, TARGET, None, [LONG[:8]], max_tokens=6, donate=donate)
    assert fs.snapshot(state) == before and free_blocks(state) == (3,)
    state = fs.init(settings.replace(num_blocks=4), TARGET)
    state, _ = fs.admit(state, TARGET, None, [LONG[:8]], max_tokens=6, donate=donate)
    state, _ = finish(state, TARGET, None, donate=donate)
    assert output(state, 0) == checksum_greedy(LONG[:8], 6)


def test_c5_the_previous_owners_page_is_left_alone(donate: bool) -> None:
    state = fs.init(config(rows=2, length=128, drafts=4, block_size=16, num_blocks=16), TARGET, DRAFTER)
    state, _ = fs.admit(state, TARGET, DRAFTER, [LONG[:13]], max_tokens=100, donate=donate)
    pages = state.block_tables[0].tolist()
    state = fs.release(state, [0], donate=donate)
    state, _ = fs.admit(state, TARGET, DRAFTER, [LONG[:13]], max_tokens=3, donate=donate)
    state, _ = fs.admit(state, TARGET, DRAFTER, [LONG[:50]], max_tokens=20, donate=donate)
    owned = [{block for block in row if block >= 0} for row in state.block_tables.tolist()]
    assert state.block_tables[0, 2:].eq(-1).all() and owned[0].isdisjoint(owned[1]) and owned[1] & set(pages)
    before = state.lease.target.pool.kv["token"][0, sorted(owned[1])].clone()
    while int(state.is_live[0]):
        state, _ = fs.step_round(dataclasses.replace(state, is_live=torch.tensor([1, 0], dtype=torch.int32)), TARGET, DRAFTER)
    table = state.block_tables[1]
    after = state.lease.target.pool.kv["token"][0, table[table >= 0].long().sort().values]
    assert output(state, 0) == checksum_greedy(LONG[:13], 3) and torch.equal(before, after)


@pytest.mark.parametrize("released", [False, True])
def test_c6_a_step_without_live_rows_writes_nothing(donate: bool, released: bool) -> None:
    state = fs.init(config(rows=2, block_size=4), TARGET, DRAFTER)
    state, _ = fs.admit(state, TARGET, DRAFTER, [[5, 6, 7], [1]], max_tokens=[4, 7], donate=donate)
    state, _ = finish(state, TARGET, DRAFTER, donate=donate)
    if released:
        state = fs.release(state, [0, 1], donate=donate)
    before, tokens = kv_bytes(state), state.tokens.clone()
    for _ in range(3):
        state, verdict = fs.step_round(state, TARGET, DRAFTER, donate=donate)
        assert verdict.num_emitted.tolist() == verdict.num_drafted.tolist() == [0, 0] and verdict.tokens.eq(-1).all()
    assert all(torch.equal(a, b) for a, b in zip(before, kv_bytes(state), strict=True)) and torch.equal(tokens, state.tokens)


def test_c7_an_inactive_row_is_inactive_in_every_derived_view(donate: bool) -> None:
    target, draft = Watching(TARGET), Watching(ChecksumDraft())
    drafter = standalone(draft)
    state = fs.init(config(rows=2), target, drafter)
    state, _ = fs.admit(state, target, drafter, [[5, 6, 7], [1]], donate=donate)
    state = run(state, target, drafter, 2, donate=donate)
    before = output(state, 0)
    state = dataclasses.replace(state, is_live=torch.tensor([0, 1], dtype=torch.int32))
    target.clear()
    draft.clear()
    state, verdict = fs.step_round(state, target, drafter, donate=donate)
    for batch in target.seen + draft.seen:
        assert batch.seq_lens[0] == 0 and set(window(batch, 0, "slot_mapping")) == {-1} and set(window(batch, 0, "input_ids")) == {0}
    assert verdict.num_emitted[0] == 0 and output(state, 0) == before
    assert output(state, 1) == checksum_greedy([1], len(output(state, 1)))


def test_d1_padding_rows_keep_length_0(donate: bool) -> None:
    target, draft = Watching(TARGET), Watching(ChecksumDraft())
    drafter = standalone(draft)
    state = fs.init(config(rows=2, length=64, block_size=16), target, drafter)
    state, _ = fs.admit(state, target, drafter, [LONG[:10]], donate=donate)
    target.clear()
    draft.clear()
    state, _ = fs.step_round(state, target, drafter, donate=donate)
    assert [batch.seq_lens.tolist() for batch in draft.seen] == [[11, 0], [12, 0], [13, 0]]
    block = int(state.draft_block_tables[0, 0])
    assert window(draft.seen[1], 0) == [11] and window(draft.seen[1], 0, "slot_mapping") == [block * 16 + 11]
    for batch in target.seen + draft.seen:
        assert batch.seq_lens[1] == 0 and set(window(batch, 1, "slot_mapping")) == {-1} and set(window(batch, 1)) == {0}


def test_d2_write_positions_are_data(donate: bool) -> None:
    target = Watching(TARGET)
    state = fs.init(config(length=64, drafts=2), target, DRAFTER)
    found = []
    for prompt_len in (8, 20):
        state, _ = fs.admit(state, target, DRAFTER, [LONG[:prompt_len]], donate=donate)
        target.clear()
        state, _ = fs.step_round(state, target, DRAFTER, donate=donate)
        found.append(live(target.seen[0], 0))
        state = fs.release(state, [0], donate=donate)
    assert found == [[8, 9, 10], [20, 21, 22]]


def test_d3_fewer_rows_than_before_in_the_same_buffers(donate: bool) -> None:
    target = Watching(TARGET)
    state = fs.init(config(rows=4), target, DRAFTER)
    state, _ = fs.admit(state, target, DRAFTER, [LONG[:20], LONG[:9], LONG[:30], [4]], seeds=range(4), donate=donate)
    state = run(state, target, DRAFTER, 3, donate=donate)
    state = fs.release(state, [0, 1, 2, 3], donate=donate)
    fresh = fs.init(config(rows=4), target, DRAFTER)
    state, _ = fs.admit(state, target, DRAFTER, [[5, 6, 7], [1]], seeds=[1, 2], donate=donate)
    fresh, _ = fs.admit(fresh, target, DRAFTER, [[5, 6, 7], [1]], seeds=[1, 2], donate=donate)
    for _ in range(6):
        assert fs.snapshot(state) == fs.snapshot(fresh)
        target.clear()
        state, verdict = fs.step_round(state, target, DRAFTER, donate=donate)
        fresh, expected = fs.step_round(fresh, target, DRAFTER, donate=donate)
        assert torch.equal(verdict.tokens, expected.tokens)
        for row in (2, 3):
            assert target.seen[0].seq_lens[row] == 0 and set(window(target.seen[0], row, "slot_mapping")) == {-1}


def test_d4_five_live_rows_of_eight(donate: bool) -> None:
    target, draft = Watching(TARGET), Watching(ChecksumDraft())
    drafter = standalone(draft)
    prompts = [[5, 6, 7], [1], [40, 2, 9, 9], [8, 8], [3]]
    state = fs.init(config(rows=8), target, drafter)
    state, _ = fs.admit(state, target, drafter, prompts, donate=donate)
    target.clear()
    draft.clear()
    state = run(state, target, drafter, 4, donate=donate)
    for batch in target.seen + draft.seen:
        assert batch.query_start_loc.shape == (9,) and int(batch.query_start_loc[-1]) == batch.input_ids.shape[0]
        assert batch.seq_lens[5:].tolist() == [0, 0, 0] and batch.seq_lens[:5].gt(0).any()
        assert batch.slot_mapping[int(batch.query_start_loc[5]) :].eq(-1).all() and batch.block_tables[5:].eq(-1).all()
    for row, prompt in enumerate(prompts):
        assert output(state, row) == checksum_greedy(prompt, len(output(state, row)))


def test_d5_padding_values_do_not_reach_live_rows(donate: bool) -> None:
    target, drafter = pair(spread=True)
    prompts, seeds = [[5, 6, 7], [1], [40, 2, 9, 9], [8, 8], [3]], [11, 12, 13, 14, 15]

    def tokens(capacity: int, rows: list[int]) -> list[list[int]]:
        state = fs.init(config(rows=capacity, rule=fs.rules.coupled), target, drafter)
        some = [prompts[row] for row in rows]
        state, _ = fs.admit(state, target, drafter, some, seeds=[seeds[row] for row in rows], temperature=0.7, max_tokens=12, donate=donate)
        assert state.temperature[len(rows) :].eq(0).all() and torch.equal(state.temperature[: len(rows)], torch.full((len(rows),), 0.7))
        state, _ = finish(state, target, drafter, donate=donate)
        return [output(state, row) for row in range(len(rows))]

    whole = tokens(8, [0, 1, 2, 3, 4])
    assert tokens(4, [0, 1, 2, 3]) + tokens(4, [4]) == whole
    assert tokens(4, [0]) + tokens(4, [1, 2, 3, 4]) == whole
    assert whole != [checksum_greedy(prompt, 12) for prompt in prompts]


def test_d6_a_row_that_emits_nothing_gives_no_negative_index(donate: bool) -> None:
    target, draft = Watching(TARGET), Watching(checksum_drafter(lambda prefix: len(prefix) >= 5).model)
    drafter = standalone(draft)
    state = fs.init(config(rows=3), target, drafter)
    state, _ = fs.admit(state, target, drafter, [[5, 6, 7], [1], LONG[:8]], max_tokens=[9, 1, 9], donate=donate)
    draft.clear()
    state, verdict = fs.step_round(state, target, drafter, donate=donate)
    assert verdict.num_emitted.tolist() == [2, 0, 1] and verdict.tokens[1].eq(-1).all() and verdict.origin[1].eq(-1).all()
    state, _ = finish(state, target, drafter, donate=donate)
    for batch in draft.seen:
        assert batch.logits_indices is None or int(batch.logits_indices.min()) >= 0
        assert set(window(batch, 1, "slot_mapping")) == {-1}
    assert output(state, 1) == checksum_greedy([1], 1) and output(state, 2) == checksum_greedy(LONG[:8], 9)


def test_d8_results_of_a_round_outlive_the_next(donate: bool) -> None:
    state = fs.init(config(rows=2), TARGET, DRAFTER)
    state, first = fs.admit(state, TARGET, DRAFTER, [[5, 6, 7], [1]], donate=donate)
    state, _ = fs.prefill(state, DRAFTER, donate=donate)
    state, scores = fs.score(state, TARGET, donate=donate)
    kept = scores.logits.clone()
    state, _ = fs.accept(state, scores, donate=donate)
    run(state, TARGET, DRAFTER, 4, donate=donate)
    assert torch.equal(scores.logits, kept) and first.tokens == (39, 2)
