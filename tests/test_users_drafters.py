"""What breaks for users of speculative decoding, tried on every drafter there is: caches, blocks, padding.

The same failures with their own numbers and a model of exact integers are in `test_users.py`.
"""

import copy
import dataclasses
import pickle
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from all_drafters import NAMES, begin, caches, check_places, drafted, forced, fresh, made, recorded
from one_pass import BLOCK_SIZE, DRAFTS, LENGTH, TARGET, finish, rows_of
from oracle import output

import funcspec as fs
from funcspec.drafters import Drafter
from funcspec.state import ARRAY_FIELDS

NAN = float("nan")


@pytest.fixture(params=NAMES)
def drafter(request: pytest.FixtureRequest) -> Drafter:
    return made(request.param)


@pytest.fixture(params=[False, True], ids=["pure", "donated"])
def donate(request: pytest.FixtureRequest) -> bool:
    return request.param


def bits(array: torch.Tensor) -> torch.Tensor:
    """What an array is made of, so that NaN equals itself."""
    return array.clone().view(torch.int32)


def everything(state: fs.SpecState) -> list[torch.Tensor]:
    """All that a state holds, bit by bit: fields, features, and the pools of both models."""
    return [bits(array) for array in (*(getattr(state, name) for name in ARRAY_FIELDS), *state.lease.carried().values(), *caches(state))]


def same(left: list[torch.Tensor], right: list[torch.Tensor]) -> bool:
    return all(torch.equal(one, other) for one, other in zip(left, right, strict=True))


def rounds(state: fs.SpecState, drafter: Drafter, count: int, **settings: Any) -> list[Any]:
    """Drafts and tokens of some rounds."""
    found = []
    for _ in range(count):
        state, draft = drafted(state, drafter, **settings)
        state, verdict = fs.verify(state, TARGET, **settings)
        found.append((draft.tokens.tolist(), verdict.tokens.tolist()))
    return found


# ---------------------------------------------------------------- B: keys and values of rejected tokens


def test_b1_drafts_after_a_round_that_kept_all(drafter: Drafter) -> None:
    """The draft's cache once had a wrong entry where the bonus token belongs."""
    state, total = begin(drafter), 0
    for _ in range(4):
        expected = drafted(fresh(state, drafter), drafter)[1].tokens
        state, drafts = forced(state, drafter, [DRAFTS] * 4)
        assert torch.equal(drafts, expected)
        total += int((drafts >= 0).sum())
    assert total > 6


@pytest.mark.parametrize("rule", [fs.rules.coupled, fs.rules.ratio], ids=repr)
def test_b3_drafts_after_any_number_of_kept_ones(drafter: Drafter, rule: fs.rules.Rule) -> None:
    """The draft's cache was once wound back too far after rejections, as the draft had not run as often as the target."""
    state = begin(drafter, rule)
    for number in range(5):
        expected = drafted(fresh(state, drafter), drafter)[1].tokens
        state, drafts = forced(state, drafter, [(number + row) % (DRAFTS + 1) for row in range(4)])
        assert torch.equal(drafts, expected)


def lag_of(drafter: Drafter) -> int:
    """Tokens at the end of a row that the drafter's cache cannot hold yet: one where it reads hidden states."""
    return int(getattr(drafter.kv_model, "features", None) is not None)


def spoil(state: fs.SpecState, held: list[int]) -> None:
    """NaN in place of whatever holds nothing of committed tokens: keys and values behind them, and features that were fed.

    `held` is how many tokens of each row the draft was fed as committed ones.
    """
    counts = state.num_tokens.tolist()
    for role, lengths in (("target", [count - 1 for count in counts]), ("draft", held)):
        branch = getattr(state.lease, role)
        for cache in {} if branch is None else branch.pool.kv.values():
            kept = torch.zeros(cache.shape[1:3], dtype=torch.bool)
            for blocks, length in zip(state.lease.blocks(role), lengths, strict=True):
                for position in range(length):
                    kept[blocks[position // BLOCK_SIZE], position % BLOCK_SIZE] = True
            cache[:, ~kept] = NAN
    for features in state.lease.carried().values():
        for row, count in enumerate(counts):
            features[row, max(count - 1 - held[row], 0) :] = NAN


def test_b4_rejected_tokens_are_seen_by_nobody(drafter: Drafter) -> None:
    """Entries of rejected drafts were once still attended to in the next round; and (B5) those of accepted ones were not made anew."""
    clean, spoilt = begin(drafter), begin(drafter)
    held = (spoilt.prompt_len - lag_of(drafter)).tolist()
    for number in range(5):
        spoil(spoilt, held)
        held = (spoilt.num_tokens - lag_of(drafter)).tolist()
        accepted = [(number + row) % (DRAFTS + 1) for row in range(4)]
        (clean, expected), (spoilt, drafts) = (forced(state, drafter, accepted) for state in (clean, spoilt))
        assert torch.equal(drafts, expected) and torch.equal(spoilt.tokens, clean.tokens)
    assert rounds(spoilt, drafter, 2) == rounds(clean, drafter, 2)


def test_b6_rounds_without_drafts_keep_the_drafter_in_step(drafter: Drafter) -> None:
    """After rounds that drafted nothing the drafter once went on from a cache that had missed their tokens."""
    state = begin(drafter)
    for wanted in ([3, 0, 1, 2], [0] * 4, [0, 0, 0, 2], [3] * 4):
        rows = rows_of(state)
        expected, counts = drafted(fresh(state, drafter), drafter, num_draft=wanted)[1].tokens, state.num_tokens[rows]
        state, drafts = forced(state, drafter, [1, 1, 0, 3], num_draft=wanted)
        assert torch.equal(drafts, expected)
        assert drafter.kv_model is None or torch.equal(state.draft_len[rows], counts - lag_of(drafter))


def test_b8_a_state_that_was_moved_or_copied_goes_on(drafter: Drafter, donate: bool, tmp_path: Path) -> None:
    """What was written to the copy of a buffer once did not reach the state."""
    state = begin(drafter)
    state, _ = forced(state, drafter, [1, 0, 2, 3])
    whole = fs.snapshot(state)
    expected = finish(state, drafter)
    fs.save(state, tmp_path / "state")
    odd = {}
    for name in ARRAY_FIELDS:
        value = getattr(state, name)
        shifted = torch.cat([torch.zeros(1, dtype=value.dtype), value.flatten()])[1:].view(value.shape)  # not aligned
        odd[name] = shifted if len(odd) % 2 else torch.stack([value, value], -1)[..., 0]  # with gaps
    kept = {name: value.clone() for name, value in odd.items()}
    for moved in (
        dataclasses.replace(state, **odd),
        pickle.loads(pickle.dumps(state)),
        copy.deepcopy(state),
        fs.load(tmp_path / "state", TARGET, drafter),
        fs.restore(fs.snapshot(state, kv=False), TARGET, drafter),
    ):
        assert finish(moved, drafter, donate=donate) == expected
    assert all(torch.equal(odd[name], kept[name]) for name in odd) and fs.snapshot(state) == whole
    moved = fs.resume(fs.release(state, [3]), fs.snapshot(state, rows=[3]), rows=[1], donate=donate)  # to another row
    found = finish(moved, drafter, donate=donate)
    assert [rows[1] for rows in found] == [rows[3] for rows in expected]


# ---------------------------------------------------------------- C: slots and blocks


@pytest.mark.parametrize("drafts", range(1, DRAFTS + 1))
def test_c1_look_ahead_is_reserved(drafter: Drafter, drafts: int) -> None:
    """The places of drafts past a row's last block were once forgotten. Rows that end before, on and behind a border of blocks."""
    prompts = [[7] * length for length in range(2, 6)]
    found = []
    for block_size in (BLOCK_SIZE, 32):
        sizes = {"capacity": 5, "rows": [0, 2, 3, 4], "block_size": block_size, "drafts": drafts}
        state = begin(drafter, **sizes, prompts=prompts, seeds=range(4), temperature=[0.0, 0.7, 1.0, 1.5], max_tokens=[9, 8, 7, 6])
        for role in state.lease.models:
            limits = [int(state.row_limit[row]) + drafts + 1 for row in rows_of(state)]
            owned = [len(blocks) for blocks in state.lease.blocks(role) if blocks is not None]
            assert owned == [-(-min(limit, LENGTH) // block_size) for limit in limits]
        found.append(rounds(state, drafter, 8, donate=True))
    assert found[0] == found[1]


def of_others(state: fs.SpecState, rows: Sequence[int]) -> list[torch.Tensor]:
    """The blocks of both pools that belong to none of these rows, bit by bit."""
    found = []
    for role in state.lease.models:
        branch, blocks = getattr(state.lease, role), state.lease.blocks(role)
        owned = {block for row in rows for block in blocks[row]}
        others = sorted(set(range(branch.pool.num_blocks)) - owned)
        found += [bits(cache[:, others]) for cache in branch.pool.kv.values()]
    return found


def test_c2_nothing_is_written_outside_of_a_rows_own_blocks(drafter: Drafter) -> None:
    """Positions past a row's blocks were once written to block 0. Also where a caller lets a row grow past what it reserved."""
    state = begin(drafter, max_tokens=[1, 3, 2], num_blocks=40)
    assert state.is_live.tolist() == [0, 0, 1, 1] and 0 in state.lease.blocks("target")[0]
    before = of_others(state, [2, 3])
    state, _ = fs.step_round(state, TARGET, drafter, donate=True)
    lifted = torch.tensor([0, 0, LENGTH, LENGTH], dtype=torch.int32)
    state = dataclasses.replace(state, row_limit=lifted, is_live=torch.tensor([0, 0, 1, 1], dtype=torch.int32))
    assert same(of_others(state, [2, 3]), before)
    state, _ = fs.step_round(state, TARGET, drafter)  # writes to blocks of its own
    before, tables = of_others(state, [2, 3]), state.block_tables.clone()
    while int(state.num_tokens[2]) < LENGTH - 2:
        state, _ = fs.step_round(state, TARGET, drafter, donate=True)
    assert torch.equal(state.block_tables, tables) and int((tables[2] >= 0).sum()) * BLOCK_SIZE < LENGTH - 2
    assert same(of_others(state, [2, 3]), before)


def test_c5_the_previous_owners_page_is_left_alone(drafter: Drafter) -> None:
    """A window of fixed size was once written past a row's blocks, to a page that had been the row's before."""
    state = begin(drafter, num_blocks=14, prompts=[[5, 6, 7] * 4], rows=[0], seeds=[1], temperature=[1.0])
    pages = state.lease.blocks("target")[0]
    state = fs.release(state, [0], donate=True)
    prompts, settings = [[5, 6, 7] * 4, [5, 6, 7] * 6], {"seeds": [1, 2], "temperature": [1.0, 0.0], "max_tokens": [3, 1]}
    state, _ = fs.admit(state, TARGET, drafter, prompts, rows=[0, 1], donate=True, **settings)
    assert state.is_live.tolist() == [1, 0, 0, 0] and set(state.lease.blocks("target")[1]) & set(pages)

    def neighbour() -> list[torch.Tensor]:
        found = []
        for role in state.lease.models:
            found += [bits(cache[:, list(state.lease.blocks(role)[1])]) for cache in getattr(state.lease, role).pool.kv.values()]
        return found

    before, alone = neighbour(), begin(drafter, prompts=prompts[:1], rows=[0], seeds=[1], temperature=[1.0], max_tokens=[3])
    for expected in rounds(alone, drafter, 2):
        state, draft = drafted(state, drafter, donate=True)
        state, verdict = fs.verify(state, TARGET, donate=True)
        assert (draft.tokens.tolist(), verdict.tokens.tolist()) == expected
    assert same(neighbour(), before)


@pytest.mark.parametrize("released", [False, True])
def test_c6_a_step_without_live_rows_changes_nothing(drafter: Drafter, donate: bool, released: bool) -> None:
    """An idle step once wrote the draft's keys and values through the block tables of rows that were gone."""
    state = begin(drafter, max_tokens=[4, 7, 1])
    while rows_of(state):
        state, _ = fs.step_round(state, TARGET, drafter, donate=donate)
    state = fs.release(state, [0, 2, 3], donate=donate) if released else state
    for cache in caches(state):
        cache.fill_(7.25)  # nobody reads it any more
    before = everything(state)
    for _ in range(2):
        state, draft = drafted(state, drafter, donate=donate)
        assert draft.tokens.eq(-1).all() and not draft.num_draft.any()
        state, verdict = fs.verify(state, TARGET, donate=donate)
        assert not verdict.num_emitted.any() and not verdict.num_drafted.any() and verdict.tokens.eq(-1).all()
        assert same(everything(state), before)


def test_c7_an_idle_row_is_idle_in_every_pass(drafter: Drafter, monkeypatch: pytest.MonkeyPatch) -> None:
    """Slots were once derived before a row was marked idle. One that is, between live ones, keeps every bit, and they do not notice."""
    state = begin(drafter)
    state, _ = forced(state, drafter, [1, 0, 2, 0])
    expected = [rows[::3] for pair in rounds(state, drafter, 2) for rows in pair]
    state = dataclasses.replace(state, is_live=torch.tensor([1, 0, 0, 1], dtype=torch.int32))
    state, seen = fs.fork(state), recorded(monkeypatch)

    def row() -> list[torch.Tensor]:
        names = [name for name in ARRAY_FIELDS if "block" not in name]
        found = [bits(array[2]) for array in (*(getattr(state, name) for name in names), *state.lease.carried().values())]
        lengths = {"target": int(state.num_tokens[2]) - 1, "draft": int(state.draft_len[2])}
        for role in state.lease.models:
            blocks = list(state.lease.blocks(role)[2])
            found += [bits(cache[:, blocks].flatten(1, 2)[:, : lengths[role]]) for cache in getattr(state.lease, role).pool.kv.values()]
        return found

    before, found = row(), []
    for _ in range(2):
        state, draft = drafted(state, drafter, donate=True)
        state, verdict = fs.verify(state, TARGET, donate=True)
        found += [draft.tokens.tolist()[::3], verdict.tokens.tolist()[::3]]
        assert draft.tokens[2].eq(-1).all() and verdict.num_emitted[2] == 0 and same(row(), before)
    assert found == expected
    assert seen and all({1, 2} <= set(check_places(one.batch)) for one in seen)


# ---------------------------------------------------------------- D: padding rows and fixed shapes


def test_d1_extra_rows_are_empty_in_every_pass(drafter: Drafter, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows of padding once got a length of 1 and a slot; and (D4) passes of a larger capacity once described the live rows only."""
    expected = rounds(begin(drafter), drafter, 4, donate=True)
    state = begin(drafter, capacity=8)
    seen = recorded(monkeypatch)
    found = rounds(state, drafter, 4, donate=True)
    assert [[rows[:4] for rows in pair] for pair in found] == [list(pair) for pair in expected]
    for one in seen:
        assert len(one.batch.query_start_loc) == 9 and {1, 4, 5, 6, 7} <= set(check_places(one.batch))


def test_d3_fewer_rows_than_before_in_the_same_buffers(drafter: Drafter) -> None:
    """Positions of rows that were gone were once still in the buffers."""
    state = begin(drafter)
    for _ in range(3):
        state, _ = fs.step_round(state, TARGET, drafter, donate=True)
    state = fs.release(state, [0, 2, 3], donate=True)
    prompts, settings = [[5, 6, 7], [1, 1, 4, 1]], {"seeds": [1, 2], "temperature": [1.0, 0.0], "rows": [1, 3]}
    state, _ = fs.admit(state, TARGET, drafter, prompts, donate=True, **settings)
    new = begin(drafter, prompts=prompts, **settings)
    for _ in range(3):
        assert fs.snapshot(state) == fs.snapshot(new)
        state, draft = drafted(state, drafter, donate=True)
        new, expected = drafted(new, drafter, donate=True)
        assert torch.equal(draft.tokens, expected.tokens)
        state, _ = fs.verify(state, TARGET, donate=True)
        new, _ = fs.verify(new, TARGET, donate=True)


@pytest.mark.parametrize("rule", [fs.rules.coupled, fs.rules.ratio], ids=repr)
def test_d5_padding_values_do_not_reach_live_rows(drafter: Drafter, rule: fs.rules.Rule) -> None:
    """The temperature of padding rows once reached live ones where a batch was split."""
    prompts, seeds = [[5, 6, 7, 5], [1], [4, 2, 9, 9], [8, 8]], [11, 12, 13, 14]

    def found(capacity: int, rows: list[int]) -> list[Any]:
        some = {"prompts": [prompts[row] for row in rows], "seeds": [seeds[row] for row in rows], "temperature": [0.7] * len(rows)}
        state = begin(drafter, rule, capacity=capacity, rows=rows, **some)
        assert state.temperature.tolist() == [pytest.approx(0.7) if row in rows else 0 for row in range(capacity)]
        made = rounds(state, drafter, 4, donate=True)
        return [[(drafts[row], tokens[row]) for drafts, tokens in made] for row in rows]

    whole = found(8, [0, 1, 2, 3])
    assert found(4, [0, 1]) + found(4, [2, 3]) == whole
    assert found(4, [0]) + found(4, [1, 2, 3]) == whole


def test_d6_a_row_that_emits_nothing_gives_no_negative_index(drafter: Drafter, monkeypatch: pytest.MonkeyPatch) -> None:
    """A count of 0 once became the index -1. Rows that keep two drafts, none, and one; one more has ended."""
    prompts, settings = [[5, 6, 7, 1], [1, 4, 1], [4, 2, 4], [8, 8]], {"seeds": range(4), "temperature": [1.0] * 4}
    state = begin(drafter, rows=range(4), prompts=prompts, max_tokens=[20, 20, 1, 20], **settings)
    assert state.is_live.tolist() == [1, 1, 0, 1]
    seen = recorded(monkeypatch)
    state, _ = forced(state, drafter, [2, 0, 0, 1])
    state, draft = drafted(state, drafter, donate=True)
    assert torch.equal(draft.tokens, drafted(fresh(state, drafter), drafter)[1].tokens)
    state, verdict = fs.verify(state, TARGET, donate=True)
    assert verdict.num_emitted[2] == 0 and verdict.tokens[2].eq(-1).all() and verdict.origin[2].eq(-1).all()
    assert len(output(state, 2)) == 1 and all(2 in check_places(one.batch) for one in seen if len(one.batch.seq_lens) == 4)


def test_d8_results_of_a_round_outlive_the_next(drafter: Drafter, donate: bool) -> None:
    """A result was once a view of a buffer that the next round wrote."""
    state = begin(drafter, fs.rules.ratio)
    results: list[torch.Tensor] = []
    copies: list[torch.Tensor] = []

    def keep(*values: torch.Tensor) -> None:
        results.extend(values)
        copies.extend(map(bits, values))

    for _ in range(2):
        for step in (fs.prefill, fs.decode):
            state, draft = step(state, drafter, donate=donate)
            keep(draft.tokens, draft.num_draft)
        state, scores = fs.score(state, TARGET, donate=donate)
        keep(scores.logits)
        state, verdict = fs.accept(state, scores, donate=donate)
        keep(*vars(verdict).values())
    rounds(state, drafter, 2, donate=donate)
    assert same(list(map(bits, results)), copies)
