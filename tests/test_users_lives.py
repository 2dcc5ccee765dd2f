"""What breaks for users of speculative decoding, continued: positions, rollback, stops, penalties, budgets, resumed rows, pairs."""

import dataclasses
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from lookup import checksum
from oracle import CHECKSUM_RUNS, checksum_greedy, config, output, pair, run
from tokenizers import Tokenizer, decoders, models
from watching import Watching, checksum_drafter, live, window

import funcspec as fs
from funcspec.cli import main
from funcspec.drafters import standalone
from funcspec.errors import ArgumentError, ModelError
from funcspec.kernels.append_drafts import append_drafts_
from funcspec.kernels.window_inputs import OUTPUTS, VERIFY, window_inputs_
from funcspec.models import ChecksumDraft, ChecksumModel
from funcspec.models.base import KV, ForwardBatch, KVEntry, KVSpec

TARGET, DRAFTER = pair()
LONG = [(7 * i + 3) % 97 for i in range(60)]


@pytest.fixture(params=[False, True], ids=["pure", "donated"])
def donate(request: pytest.FixtureRequest) -> bool:
    return request.param


def finish(state: fs.SpecState, target: object, drafter: object, **settings: object) -> fs.SpecState:
    """Rounds until no row generates."""
    while fs.any_active(state):
        state, _ = fs.step_round(state, target, drafter, **settings)
    return state


# ---------------------------------------------------------------- positions and rollback


def test_a7_draft_positions_are_those_of_its_own_row(donate: bool) -> None:
    """A7: 23 tokens for the target, of which the draft takes 14: its positions are 0..13, whatever the target's are."""
    target, draft = Watching(TARGET), Watching(ChecksumDraft(max_len=14))
    drafter = standalone(draft)
    state = fs.init(config(), target, drafter)
    state, _ = fs.admit(state, target, drafter, [LONG[:23]], max_tokens=12, donate=donate)
    assert [position for batch in target.seen for position in live(batch, 0)] == list(range(23))
    assert [position for batch in draft.seen for position in live(batch, 0)] == list(range(14))
    assert [token for batch in draft.seen for token in live(batch, 0, "input_ids")] == LONG[:14]
    assert state.draft_len.tolist() == [14]
    state = finish(state, target, drafter, donate=donate)
    assert output(state, 0) == checksum_greedy(LONG[:23], 12)
    assert max(int(batch.positions.max()) for batch in draft.seen) == 13 and max(int(batch.seq_lens.max()) for batch in draft.seen) <= 14


@dataclass(frozen=True)
class RunningSum(ChecksumModel):
    """The checksum target as a recurrence: a row's whole state is one running sum.

    Attributes:
        per_position: True keeps the sum after each position in that position's slot, so that an older one can be gone back to.
            False keeps the newest only, in the row's first slot; then nothing can be taken back.
    """

    per_position: bool = True

    @property
    def kv_spec(self) -> KVSpec:
        return KVSpec(1, (KVEntry("sum", (), torch.int32),))

    def forward(self, kv: KV, batch: ForwardBatch) -> tuple[KV, torch.Tensor, tuple[torch.Tensor, ...]]:
        sums, size = kv["sum"].view(-1), kv["sum"].shape[2]
        starts, answers = batch.query_start_loc.tolist(), torch.zeros(len(batch.input_ids), dtype=torch.int64)
        for row, table in enumerate(batch.block_tables.tolist()):
            for place in range(starts[row], starts[row + 1]):
                slot, position = int(batch.slot_mapping[place]), int(batch.positions[place])
                if slot < 0:
                    continue
                before = (position - 1) if self.per_position else 0
                total = int(sums[table[before // size] * size + before % size]) if position else 0
                total = (total + (position + 1) * int(batch.input_ids[place])) % self.vocab_size
                sums[slot if self.per_position else table[0] * size] = total
                answers[place] = (1 + total) % self.vocab_size
        wanted = answers if batch.logits_indices is None else answers[batch.logits_indices.long()]
        return kv, self._logits(wanted), ()


def test_b7_a_recurrent_target_is_rolled_back_by_position(donate: bool) -> None:
    """B7: a target whose state is one running sum, kept for each position. Its output is plain greedy output."""
    target = RunningSum()
    for prompt, (tokens, accepted, _) in CHECKSUM_RUNS.items():
        state = fs.init(config(block_size=4), target, DRAFTER)
        state, _ = fs.admit(state, target, DRAFTER, [list(prompt)], max_tokens=16, chunk=2, donate=donate)
        found = []
        for _ in accepted:
            state, verdict = fs.step_round(state, target, DRAFTER, donate=donate)
            found.append(int(verdict.num_accepted[0]))
        assert output(state, 0) == list(tokens)[: len(output(state, 0))] and tuple(found[:-1]) == accepted[:-1]


def test_b7_a_target_that_cannot_be_rolled_back_is_found_out() -> None:
    """B7: one that keeps the newest sum only decodes well alone; the check of the promise sees that it does not with drafts."""
    settings = config(block_size=64)
    for target, same in ((RunningSum(), True), (RunningSum(per_position=False), False)):
        found = fs.same_as_plain(target, DRAFTER, [[5, 6, 7]], config=settings, max_tokens=12)
        assert found.identical is same and (found.first_difference is None) is same
    plain = [token for emission in fs.generate(settings, target, None, [[5, 6, 7]], max_tokens=12) for token in emission.tokens]
    assert plain == checksum_greedy([5, 6, 7], 12)


# ---------------------------------------------------------------- stops, options, penalties


def letters() -> Tokenizer:
    """One character for each of 97 ids."""
    plain = Tokenizer(models.WordLevel({chr(0x4E00 + token): token for token in range(97)}, unk_token=chr(0x4E00)))
    plain.decoder = decoders.Fuse()
    return plain


def test_i3_a_stop_string_completes_at_the_second_of_four(donate: bool) -> None:
    """I3: the round emits 1 6 42 45; ids, origins and text all end where the string does, and so does a row that is cut back."""
    tokenizer, drafter = letters(), standalone(TARGET)
    stop = tokenizer.decode([1, 6])
    emissions = list(fs.generate(config(), TARGET, drafter, [[5, 6, 7]], tokenizer=tokenizer, stop_strings=[stop[1]]))
    assert [emission.tokens for emission in emissions] == [(39,), (1, 6)]
    last = emissions[-1]
    assert len(last.tokens) == len(last.origin) == last.num_accepted == 2 and last.num_drafted == 3 and last.finish_reason == 1
    assert emissions[0].text + last.text == tokenizer.decode([39, 1])  # the text ends before the stop string
    state, _ = fs.admit(fs.init(config(), TARGET, drafter), TARGET, drafter, [[5, 6, 7]])
    state, verdict = fs.step_round(state, TARGET, drafter, donate=donate)
    assert verdict.tokens.tolist() == [[1, 6, 42, 45]]
    state = fs.truncate(state, {0: 6}, finish=True, donate=donate)
    assert output(state, 0) == [39, 1, 6] and state.tokens[0, 6:].eq(-1).all() and state.num_tokens.tolist() == [6]
    assert state.finish_reason.tolist() == [1] and not fs.any_active(state)


@pytest.mark.parametrize("option", ["presence_penalty", "repetition_penalty", "top_k", "logit_bias"])
def test_i7_options_that_do_not_exist_are_refused_by_name(option: str, capsys: pytest.CaptureFixture[str]) -> None:
    """I7: nowhere is an option taken and then ignored."""
    unknown: dict[str, Any] = {option: 1}
    state = fs.init(config(), TARGET, DRAFTER)
    for call in (
        lambda: fs.admit(state, TARGET, DRAFTER, [[5]], **unknown),
        lambda: fs.generate(config(), TARGET, DRAFTER, [[5]], **unknown),
        lambda: fs.step_round(state, TARGET, DRAFTER, **unknown),
        lambda: config(**unknown),
    ):
        with pytest.raises(TypeError, match=option):
            call()
    with pytest.raises(SystemExit, match="2"):
        main(["generate", f"--{option}", "1"])
    assert option in capsys.readouterr().err


PENALTY = 60.0


def penalised(sequence: list[int], count: int, vocab: int) -> list[int]:
    """Plain greedy decoding where each occurrence of a token so far costs it `PENALTY`, from a table of counts."""
    following, sequence = checksum(vocab)[0], list(sequence)
    for _ in range(count):
        scores = [-100.0 * (token != following(sequence)) - PENALTY * sequence.count(token) for token in range(vocab)]
        sequence.append(scores.index(max(scores)))
    return sequence


@pytest.mark.parametrize("drafts", [0, 2])
def test_i8_penalties_of_ones_own_count_committed_tokens_once(donate: bool, drafts: int) -> None:
    """I8: a user's counts, taken from what rounds emitted, at K = 2. Rejected drafts are not counted, accepted ones once."""
    vocab, prompts, rows = 7, [[5, 6, 1], [2, 2]], 2
    target, drafter = ChecksumModel(vocab_size=vocab), standalone(ChecksumDraft(vocab_size=vocab))
    state = fs.init(config(rows=rows, drafts=drafts), target, drafter)
    state, first = fs.admit(state, target, drafter, prompts, donate=donate)
    counts = torch.zeros(rows, vocab)
    for row, prompt in enumerate(prompts):
        for token in [*prompt, first.tokens[row]]:
            counts[row, token] += 1
    for _ in range(12):
        state, _ = fs.prefill(state, drafter, donate=donate)
        for _ in range(drafts - 1):
            state, _ = fs.decode(state, drafter, donate=donate)
        state, scores = fs.score(state, target, donate=donate)
        logits = scores.logits.clone()
        for row in range(rows):
            n, seen = int(state.num_tokens[row]), counts[row].clone()
            for place in range(drafts + 1):
                logits[row, place] -= PENALTY * seen
                if place < int(state.num_drafted[row]):
                    seen[state.tokens[row, n + place]] += 1  # what the next place sees, if this draft is kept
        state, verdict = fs.accept(state, dataclasses.replace(scores, logits=logits), donate=donate)
        for row in range(rows):
            for token in verdict.tokens[row, : int(verdict.num_emitted[row])].tolist():
                counts[row, token] += 1
            committed = state.tokens[row, : int(state.num_tokens[row])]
            assert counts[row].tolist() == np.bincount(committed.numpy(), minlength=vocab).tolist()
    for row, prompt in enumerate(prompts):
        start = [*prompt, first.tokens[row]]
        committed = state.tokens[row, : int(state.num_tokens[row])].tolist()
        assert committed == penalised(start, len(committed) - len(start), vocab) and len(committed) > 12
        assert committed != [*prompt, *plain_greedy(prompt, len(committed) - len(prompt), vocab)]  # the penalty tells


def plain_greedy(prompt: list[int], count: int, vocab: int) -> list[int]:
    sequence = list(prompt)
    for _ in range(count):
        sequence.append(checksum(vocab)[0](sequence))
    return sequence[len(prompt) :]


# ---------------------------------------------------------------- batches and budgets


def test_k3_a_round_of_eight_rows_and_four_drafts_has_forty_places(donate: bool) -> None:
    """K3: max_tokens 32 says how long an output may be, never how large a pass is: B * (K + 1) = 40."""
    target, draft = Watching(TARGET), Watching(checksum_drafter(lambda prefix: False).model)
    drafter = standalone(draft)
    state = fs.init(config(rows=8, drafts=4), target, drafter)
    state, _ = fs.admit(state, target, drafter, [[row + 1] for row in range(8)], max_tokens=32, donate=donate)
    target.clear()
    state, verdict = fs.step_round(state, target, drafter, donate=donate)
    draft.clear()
    assert target.seen[0].input_ids.shape == (40,) and target.seen[0].slot_mapping.ge(0).all()
    assert verdict.tokens.shape == (8, 5) and verdict.num_emitted.eq(5).all()
    state, _ = fs.prefill(state, drafter, donate=donate)
    assert draft.seen[0].input_ids.shape == (40,) and draft.seen[0].slot_mapping.ge(0).all()  # all five tokens of a row are fed
    state, scores = fs.score(state, target, donate=donate)
    assert tuple(scores.logits.shape) == (8, 5, 97)
    state, _ = fs.accept(state, scores, donate=donate)
    state = finish(state, target, drafter, donate=donate)
    assert [output(state, row) for row in range(8)] == [checksum_greedy([row + 1], 32) for row in range(8)]


def test_k6_vectors_of_another_length_than_the_batch(donate: bool, backend: str, kernel_device: str) -> None:
    """K6: two entries for three rows are refused before anything runs."""
    target, draft = Watching(TARGET), Watching(ChecksumDraft())
    drafter = standalone(draft)
    state = fs.init(config(rows=3), target, drafter)
    state, _ = fs.admit(state, target, drafter, [[5, 6, 7], [1], [8, 8]], seeds=[1, 2, 3])
    before, _ = fs.snapshot(state), draft.clear()
    for wanted in ([1, 2], torch.tensor([1, 2], dtype=torch.int32)):
        with pytest.raises(ArgumentError, match=r"num_draft: expected .*3.*, got"):
            fs.prefill(state, drafter, num_draft=wanted, donate=donate)
    with pytest.raises(ArgumentError, match="seeds: expected 3 seeds"):
        fs.fork(state, seeds=[1, 2])
    with pytest.raises(ArgumentError, match=r"state\.draft_len: expected shape \(3,\), got \(2,\)"):
        fs.prefill(dataclasses.replace(state, draft_len=state.draft_len[:2]), drafter, donate=donate)
    assert fs.snapshot(state) == before and not draft.seen
    names = ("chosen", "num_tokens", "row_limit", "is_live", "wanted", "num_draft", "num_drafted", "draft_len")
    for short in names:
        arrays = {name: torch.ones(2 if name == short else 3, dtype=torch.int32, device=kernel_device) for name in names}
        written = {name: torch.full((3, 4), -77, dtype=torch.int32, device=kernel_device) for name in ("tokens", "out_tokens")}
        with pytest.raises(ArgumentError, match=f"^{short}: expected one (entry|token) for each of 3 rows, got .*2"):
            append_drafts_(backend=backend, first=True, draft_limit=4, **arrays, **written)
        assert all(array.eq(1).all() for array in arrays.values()) and all(array.eq(-77).all() for array in written.values())


@pytest.mark.parametrize("short", ["fed_len", "num_draft", "num_drafted", "is_live"])
def test_k6_the_inputs_of_a_pass(backend: str, kernel_device: str, short: str) -> None:
    """K6: two entries for the three rows of `window_inputs_`, which then reads past the end."""
    names = ("num_tokens", "fed_len", "num_draft", "num_drafted", "is_live")
    arrays = {name: torch.ones(2 if name == short else 3, dtype=torch.int32, device=kernel_device) for name in names}
    out = {name: torch.full((3 if name in OUTPUTS[4:] else 12,), -77, dtype=torch.int32, device=kernel_device) for name in OUTPUTS}
    table, tokens = (torch.ones(3, columns, dtype=torch.int32, device=kernel_device) for columns in (2, 8))
    sizes = {"block_size": 4, "width": 4, "limit": 8}
    with pytest.raises(ArgumentError, match=f"^{short}: "):
        window_inputs_(backend=backend, kind=VERIFY, tokens=tokens, block_tables=table, **sizes, **arrays, **out)
    assert all(buffer.eq(-77).all() for buffer in out.values())


def test_k7_a_chunk_of_a_prompt_takes_no_room_from_drafts(donate: bool) -> None:
    """K7: three rows with K = 3 and a prompt in chunks of 8. Chunks have passes of their own, and a round always has its 16 places."""
    target = Watching(TARGET)
    state = fs.init(config(rows=4), target, DRAFTER)
    state, _ = fs.admit(state, target, DRAFTER, [[5, 6, 7], [1], [40, 2, 9, 9]], donate=donate)
    state = run(state, target, DRAFTER, 1, donate=donate)
    target.clear()
    state, _ = fs.admit(state, target, DRAFTER, [LONG[:20]], chunk=8, donate=donate)
    assert [live(batch, 0) for batch in target.seen] == [list(range(8)), list(range(8, 16)), list(range(16, 20))]
    assert all(len(batch.seq_lens) == 1 and batch.max_query_len <= 8 for batch in target.seen)
    target.clear()
    state, verdict = fs.step_round(state, target, DRAFTER, donate=donate)
    assert target.seen[0].query_start_loc.tolist() == [0, 4, 8, 12, 16] and verdict.num_drafted.tolist() == [3, 3, 3, 3]
    for row, prompt in enumerate([[5, 6, 7], [1], [40, 2, 9, 9], LONG[:20]]):
        assert output(state, row) == checksum_greedy(prompt, len(output(state, row)))


def test_k8_a_row_at_its_limit_changes_no_number_of_calls(donate: bool) -> None:
    """K8: one row at mml - 1 = 63 drafts nothing; the drafter is called as often as without it."""
    calls = []
    for prompt in (LONG + LONG[:2], LONG[:9]):
        target, draft = Watching(TARGET), Watching(ChecksumDraft())
        drafter = standalone(draft)
        state = fs.init(config(rows=2, length=64), target, drafter)
        state, _ = fs.admit(state, target, drafter, [prompt, [5, 6, 7]], donate=donate)
        assert state.is_live.tolist() == [1, 1] and int(state.num_tokens[0]) == len(prompt) + 1
        target.clear()
        draft.clear()
        state, verdict = fs.step_round(state, target, drafter, donate=donate)
        calls.append((len(draft.seen), len(target.seen), verdict.num_drafted.tolist(), [batch.input_ids.shape for batch in draft.seen]))
        assert output(state, 1) == checksum_greedy([5, 6, 7], len(output(state, 1)))
        assert output(state, 0) == checksum_greedy(prompt, len(output(state, 0)))
    assert [call[:2] for call in calls] == [(3, 1), (3, 1)] and calls[0][3] == calls[1][3]
    assert [call[2] for call in calls] == [[0, 3], [3, 3]]


@pytest.mark.parametrize("way", ["resume", "admit again"])
def test_k9_a_resumed_row_reads_on_in_its_output(donate: bool, way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """K9: a prompt of 6 and 4 tokens of output, taken in again in chunks of 8: the second chunk begins with output[2]."""
    monkeypatch.setattr("funcspec.snapshots.DEFAULT_CHUNK", 8)
    prompt = LONG[:6]
    expected = checksum_greedy(prompt, 20)
    state = fs.init(config(rows=2), TARGET, DRAFTER)
    state, _ = fs.admit(state, TARGET, DRAFTER, [prompt], max_tokens=20, donate=donate)
    while len(output(state, 0)) < 4:
        state, _ = fs.step_round(state, TARGET, DRAFTER, num_draft=0, donate=donate)
    paused, state = fs.snapshot(state, rows=[0], kv=False), fs.release(state, [0], donate=donate)
    target, draft = Watching(TARGET), Watching(ChecksumDraft())
    drafter = standalone(draft)
    if way == "resume":
        state = fs.resume(state, paused, target, drafter, rows=[1], donate=donate)
        assert [window(batch, 0, "input_ids") for batch in target.seen] == [[*prompt, *expected[:2]], [expected[2]]]
    else:
        state, _ = fs.admit(state, target, drafter, [prompt + expected[:4]], max_tokens=16, rows=[1], chunk=8, donate=donate)
        assert [live(batch, 0, "input_ids") for batch in target.seen] == [[*prompt, *expected[:2]], [expected[2], expected[3]]]
    assert [live(batch, 0) for batch in draft.seen] == [list(range(8)), [8] if way == "resume" else [8, 9]]
    state = finish(state, target, drafter, donate=donate)
    assert state.tokens[1, 6:26].tolist() == expected


# ---------------------------------------------------------------- pairs


@dataclass(frozen=True)
class Branded(ChecksumModel):
    """A target that says which tokenizer its ids are of."""

    vocab_fingerprint: str | None = None


@dataclass(frozen=True)
class BrandedDraft(ChecksumDraft):
    """A draft that does."""

    vocab_fingerprint: str | None = None


def test_l2_ids_of_another_meaning_are_refused() -> None:
    """L2: vocabularies of one size whose fingerprints differ. Where one is not known, nothing can be compared."""
    with pytest.raises(ModelError, match="expected the target's vocabulary fingerprint 'a', got 'b'"):
        fs.init(config(), Branded(vocab_fingerprint="a"), standalone(BrandedDraft(vocab_fingerprint="b")))
    for ours, theirs in (("a", "a"), ("a", None), (None, "b"), (None, None)):
        target, drafter = Branded(vocab_fingerprint=ours), standalone(BrandedDraft(vocab_fingerprint=theirs))
        state, _ = fs.admit(fs.init(config(), target, drafter), target, drafter, [[5, 6, 7]], max_tokens=8)
        assert output(finish(state, target, drafter), 0) == checksum_greedy([5, 6, 7], 8)
