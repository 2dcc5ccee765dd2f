"""The loop against plain decoding: checksum model, both modes, every K, ragged batches, stops, limits."""

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings
from oracle import CHECKSUM_RUNS, checksum_greedy, checksum_rounds, config, kv_bytes, output, pair, run

import funcspec as fs
from funcspec.errors import ModelError, StaleScoresError, StepOrderError
from funcspec.models import ChecksumDraft, ChecksumModel

TARGET, DRAFTER = pair()


@pytest.mark.parametrize("donate", [False, True])
@pytest.mark.parametrize("block_size", [4, 16])
@pytest.mark.parametrize("drafts", [0, 1, 2, 3, 7])
@pytest.mark.parametrize("prompt", CHECKSUM_RUNS)
def test_checksum_reference_sequences(prompt: tuple[int, ...], drafts: int, block_size: int, donate: bool) -> None:
    expected, accepted_k3, accepted_k1 = CHECKSUM_RUNS[prompt]
    state = fs.init(config(drafts=drafts, block_size=block_size), TARGET, DRAFTER)
    state, first = fs.admit(state, TARGET, DRAFTER, [prompt], donate=donate)
    tokens, accepted = list(first.tokens), []
    while len(tokens) < 16:
        state, verdict = fs.step_round(state, TARGET, DRAFTER, donate=donate)
        count = int(verdict.num_emitted[0])
        tokens += verdict.tokens[0, :count].tolist()
        accepted.append(int(verdict.num_accepted[0]))
    assert tuple(tokens[:16]) == expected
    for k, counts in ((3, accepted_k3), (1, accepted_k1)):
        if drafts == k:
            assert tuple(accepted[: len(counts)]) == counts[: len(accepted)]
    assert [count for count, _ in checksum_rounds(prompt, len(accepted), drafts)] == accepted


def test_verify_starts_at_the_positions_of_the_reference() -> None:
    starts = []

    class Watching(ChecksumModel):
        def forward(self, kv, batch):
            if batch.max_query_len == 4:
                starts.append(int(batch.positions[0]))
            return super().forward(kv, batch)

    target = Watching()
    state = fs.init(config(block_size=4), target, DRAFTER)
    state, _ = fs.admit(state, target, DRAFTER, [[5, 6, 7]])
    run(state, target, DRAFTER, 8)
    assert starts == [3, 5, 6, 7, 10, 11, 15, 17]


@settings(max_examples=25)
@given(data=st.data())
def test_ragged_batches_equal_rows_alone(data: st.DataObject) -> None:
    rows = data.draw(st.integers(2, 5))
    drafts = data.draw(st.integers(0, 4))
    prompts = data.draw(st.lists(st.lists(st.integers(0, 96), min_size=1, max_size=9), min_size=rows, max_size=rows))
    limits = data.draw(st.lists(st.integers(1, 20), min_size=rows, max_size=rows))
    donate = data.draw(st.booleans())
    settings_ = config(rows=rows, length=32, drafts=drafts, block_size=data.draw(st.sampled_from([1, 3, 4, 16])))
    state = fs.init(settings_, TARGET, DRAFTER)
    state, _ = fs.admit(state, TARGET, DRAFTER, prompts, max_tokens=limits, donate=donate)
    while fs.any_active(state):
        wanted = data.draw(st.lists(st.integers(0, drafts), min_size=rows, max_size=rows))
        state, verdict = fs.step_round(state, TARGET, DRAFTER, num_draft=wanted, donate=donate)
        assert (verdict.num_drafted <= torch.tensor(wanted)).all()
    for row in range(rows):
        count = min(limits[row], 32 - len(prompts[row]))
        assert output(state, row) == checksum_greedy(prompts[row], count)
        assert int(state.finish_reason[row]) == 2


@pytest.mark.parametrize("donate", [False, True])
def test_pure_and_donated_runs_are_bit_equal(donate: bool) -> None:
    def trace(donate: bool) -> list[fs.Snapshot]:
        state = fs.init(config(rows=3), TARGET, DRAFTER)
        state, _ = fs.admit(state, TARGET, DRAFTER, [[5, 6, 7], [1]], seeds=[1, 2], donate=donate)
        found = [fs.snapshot(state)]
        for _ in range(4):
            state, _ = fs.prefill(state, DRAFTER, donate=donate)
            found.append(fs.snapshot(state))
            state, _ = fs.decode(state, DRAFTER, donate=donate)
            found.append(fs.snapshot(state))
            state, _ = fs.verify(state, TARGET, donate=donate)
            found.append(fs.snapshot(state))
        return found

    assert trace(donate) == trace(False)


def test_verify_is_score_then_accept() -> None:
    state = fs.init(config(), TARGET, DRAFTER)
    state, _ = fs.admit(state, TARGET, DRAFTER, [[5, 6, 7]])
    state, _ = fs.prefill(state, DRAFTER)
    whole, verdict = fs.verify(state, TARGET)
    scored, scores = fs.score(state, TARGET)
    parts, other = fs.accept(scored, scores)
    assert fs.snapshot(whole) == fs.snapshot(parts)
    for name in ("tokens", "origin", "num_accepted", "num_emitted", "num_drafted", "finish_reason", "bad_row"):
        assert torch.equal(getattr(verdict, name), getattr(other, name))


def test_verify_uses_the_drafts_made_so_far() -> None:
    state = fs.init(config(), TARGET, DRAFTER)
    state, _ = fs.admit(state, TARGET, DRAFTER, [[5, 6, 7]])
    state, draft = fs.prefill(state, DRAFTER)
    assert draft.tokens.tolist() == [[1, -1, -1]] and draft.num_draft.tolist() == [3] and draft.step == 1
    state, verdict = fs.verify(state, TARGET)
    assert verdict.num_drafted.tolist() == [1] and verdict.tokens[0, :2].tolist() == [1, 6]


def test_steps_out_of_order_are_refused() -> None:
    state = fs.init(config(), TARGET, DRAFTER)
    state, _ = fs.admit(state, TARGET, DRAFTER, [[5]])
    for step in (lambda: fs.decode(state, DRAFTER), lambda: fs.verify(state, TARGET), lambda: fs.score(state, TARGET)):
        with pytest.raises(StepOrderError, match="Fix: call prefill first"):
            step()
    drafting, _ = fs.prefill(state, DRAFTER)
    with pytest.raises(StepOrderError, match="got 'drafting'"):
        fs.prefill(drafting, DRAFTER)
    with pytest.raises(StepOrderError):
        fs.admit(drafting, TARGET, DRAFTER, [[1]])
    scored, scores = fs.score(drafting, TARGET)
    with pytest.raises(StepOrderError):
        fs.snapshot(scored)
    with pytest.raises(StaleScoresError):
        fs.accept(fs.score(drafting, TARGET)[0], scores)


def test_extra_decodes_change_nothing() -> None:
    state = fs.init(config(drafts=2), TARGET, DRAFTER)
    state, _ = fs.admit(state, TARGET, DRAFTER, [[5, 6, 7]])
    state, _ = fs.prefill(state, DRAFTER)
    state, full = fs.decode(state, DRAFTER)
    before = kv_bytes(state)
    state, more = fs.decode(state, DRAFTER)
    assert torch.equal(full.tokens, more.tokens)
    assert all(torch.equal(a, b) for a, b in zip(before, kv_bytes(state), strict=True))


@pytest.mark.parametrize("where", range(4))
def test_stop_ids_cut_inside_a_block(where: int) -> None:
    tokens = checksum_greedy([5, 6, 7], 12)
    drafter = fs.drafters.standalone(ChecksumModel())  # draft = target: everything is accepted
    state = fs.init(config(), TARGET, drafter)
    state, _ = fs.admit(state, TARGET, drafter, [[5, 6, 7]], stop_ids=[tokens[1 + where], 96])
    state, verdict = fs.step_round(state, TARGET, drafter)
    assert verdict.tokens[0, : where + 1].tolist() == tokens[1 : where + 2]
    assert verdict.tokens[0, where + 1 :].tolist() == [-1] * (3 - where)
    assert verdict.num_emitted.tolist() == [where + 1] and verdict.num_accepted.tolist() == [min(where + 1, 3)]
    assert verdict.finish_reason.tolist() == [1] and not fs.any_active(state)
    assert state.tokens[0, 4 + where + 1 :].eq(-1).all()


def test_first_token_can_finish_a_row() -> None:
    state = fs.init(config(rows=2), TARGET, DRAFTER)
    state, first = fs.admit(state, TARGET, DRAFTER, [[5, 6, 7], [1]], stop_ids=[[39], []], max_tokens=[5, 1])
    assert first.finish_reason == (1, 2) and not fs.any_active(state)


def test_drafting_stops_before_the_length_limit() -> None:
    for length in range(5, 12):
        state = fs.init(config(length=length), TARGET, DRAFTER)
        state, _ = fs.admit(state, TARGET, DRAFTER, [[5, 6, 7]])
        while fs.any_active(state):
            n = int(state.num_tokens[0])
            state, draft = fs.prefill(state, DRAFTER)
            assert draft.num_draft.tolist() == [max(min(length - n - 1, 3), 0)]
            state, _ = fs.decode(state, DRAFTER)
            state, _ = fs.decode(state, DRAFTER)
            state, _ = fs.verify(state, TARGET)
        assert output(state, 0) == checksum_greedy([5, 6, 7], length - 3)


def test_plain_decoding_needs_no_drafter() -> None:
    for drafts in (0, 3):
        state = fs.init(config(drafts=drafts), TARGET)
        state, _ = fs.admit(state, TARGET, None, [[5, 6, 7]], max_tokens=10)
        while fs.any_active(state):
            state, verdict = fs.verify(state, TARGET)
            assert verdict.num_emitted.tolist() == [1]
        assert output(state, 0) == checksum_greedy([5, 6, 7], 10)


def test_a_raising_model_leaves_the_state_usable() -> None:
    class Failing(ChecksumModel):
        fail = False

        def forward(self, kv, batch):
            result = super().forward(kv, batch)
            if Failing.fail:
                raise RuntimeError("out of luck")
            return result

    target, drafter = Failing(), fs.drafters.standalone(Failing())
    state = fs.init(config(), target, drafter)
    state, _ = fs.admit(state, target, drafter, [[5, 6, 7]])
    for donate in (False, True):
        for step in (
            lambda s, d: fs.prefill(s, drafter, donate=d),
            lambda s, d: fs.decode(s, drafter, donate=d),
            lambda s, d: fs.verify(s, target, donate=d),
        ):
            before = fs.snapshot(state)
            Failing.fail = True
            with pytest.raises(RuntimeError, match="out of luck"):
                step(state, donate)
            Failing.fail = False
            assert fs.snapshot(state) == before
            state, _ = step(state, donate)
    assert output(state, 0) == checksum_greedy([5, 6, 7], len(output(state, 0)))


@pytest.mark.parametrize("passes", [0, 1, 2, 3])
@pytest.mark.parametrize("donate", [False, True])
def test_a_round_that_fails_leaves_the_state_usable(donate: bool, passes: int) -> None:
    class Failing(ChecksumModel):
        left = 10**9

        def forward(self, kv, batch):
            Failing.left -= 1
            if Failing.left < 0:
                raise RuntimeError("out of luck")
            return super().forward(kv, batch)

    target, drafter = Failing(), fs.drafters.standalone(Failing())
    state = fs.init(config(), target, drafter)
    state, _ = fs.admit(state, target, drafter, [[5, 6, 7]])
    state = run(state, target, drafter, 2, donate=donate)
    before = state.tokens.clone()
    Failing.left = passes
    with pytest.raises(RuntimeError, match="out of luck"):
        fs.step_round(state, target, drafter, donate=donate)
    Failing.left = 10**9
    assert torch.equal(state.tokens, before) and state.lease.phase == "round start"
    state = run(state, target, drafter, 3, donate=donate)
    assert output(state, 0) == checksum_greedy([5, 6, 7], len(output(state, 0))) and len(output(state, 0)) == 1 + 5 * 4


def test_wrong_logits_are_refused() -> None:
    class Short(ChecksumModel):
        def forward(self, kv, batch):
            kv, logits, hidden = super().forward(kv, batch)
            return kv, logits[:, :-1], hidden

    state = fs.init(config(), Short())
    with pytest.raises(ModelError, match=r"expected float logits \[1, 97\], got \(1, 96\)"):
        fs.admit(state, Short(), None, [[5]])


def test_changed_scores_change_what_is_accepted() -> None:
    state = fs.init(config(), TARGET, DRAFTER)
    state, _ = fs.admit(state, TARGET, DRAFTER, [[5, 6, 7]])
    state, _ = fs.prefill(state, DRAFTER)
    scored, scores = fs.score(state, TARGET)
    logits = scores.logits.clone()
    logits[0, 0] = 0
    logits[0, 0, 33] = 1
    forced, verdict = fs.accept(scored, fs.Scores(logits, scores.stamp))
    assert verdict.tokens[0].tolist() == [33, -1, -1, -1] and verdict.origin[0, 0] == 1
    usual, verdict = fs.accept(scored, scores)
    assert verdict.tokens[0, :2].tolist() == [1, 6]
    assert output(run(usual, TARGET, DRAFTER, 3), 0) == checksum_greedy([5, 6, 7], len(output(run(usual, TARGET, DRAFTER, 3), 0)))
    forced = run(forced, TARGET, DRAFTER, 3)
    assert output(forced, 0)[2:] == checksum_greedy([5, 6, 7, 39, 33], len(output(forced, 0)) - 2)


def test_infos_never_alias_the_state() -> None:
    state = fs.init(config(), TARGET, DRAFTER)
    state, _ = fs.admit(state, TARGET, DRAFTER, [[5, 6, 7]])
    state, draft = fs.prefill(state, DRAFTER, donate=True)
    kept = draft.tokens.clone(), draft.num_draft.clone()
    state, _ = fs.decode(state, DRAFTER, donate=True)
    state, verdict = fs.verify(state, TARGET, donate=True)
    values = {name: getattr(verdict, name).clone() for name in ("tokens", "origin", "num_emitted", "finish_reason")}
    run(state, TARGET, DRAFTER, 3, donate=True)
    assert torch.equal(draft.tokens, kept[0]) and torch.equal(draft.num_draft, kept[1])
    assert all(torch.equal(getattr(verdict, name), value) for name, value in values.items())


def test_a_drafter_that_needs_no_pass_reports_its_drafts() -> None:
    class Once(fs.drafters.Standalone):
        def next(self, transition):
            pass

    drafter = Once(ChecksumDraft())
    state, _ = fs.admit(fs.init(config(), TARGET, drafter), TARGET, drafter, [[5, 6, 7]])
    state, draft = fs.prefill(state, drafter)
    state, more = fs.decode(state, drafter)
    assert more.tokens.tolist() == draft.tokens.tolist() == [[1, -1, -1]] and more.step == 2


def test_a_drafter_may_write_once_a_step() -> None:
    class Twice(fs.drafters.Standalone):
        def next(self, transition):
            super().next(transition)
            super().next(transition)

    drafter = Twice(ChecksumDraft())
    state, _ = fs.admit(fs.init(config(), TARGET, drafter), TARGET, drafter, [[5, 6, 7]])
    state, _ = fs.prefill(state, drafter)
    with pytest.raises(StepOrderError, match="one call of draft_once in a step"):
        fs.decode(state, drafter)


@pytest.mark.parametrize(
    ("result", "message"),
    [
        (lambda kv, logits: (dict.fromkeys(kv, logits), logits, ()), "expected the KV buffers it was given"),
        (lambda kv, logits: logits, r"expected \(kv, logits, hidden\), got Tensor"),
        (lambda kv, logits: (kv, logits), r"expected \(kv, logits, hidden\), got tuple"),
        (lambda kv, logits: (kv, logits.double(), ()), "got .* torch.float64"),
    ],
)
def test_a_forward_that_breaks_its_contract_is_refused(result, message: str) -> None:
    class Breaking(ChecksumModel):
        def forward(self, kv, batch):
            return result(kv, super().forward(kv, batch)[1])

    with pytest.raises(ModelError, match=message):
        fs.admit(fs.init(config(), Breaking()), Breaking(), None, [[5]])


def test_scores_that_carry_gradients_are_accepted() -> None:
    state, _ = fs.admit(fs.init(config(), TARGET), TARGET, None, [[5, 6, 7]])
    state, scores = fs.score(state, TARGET)
    logits = scores.logits.clone().requires_grad_() * 1.0
    _, verdict = fs.accept(state, fs.Scores(logits, scores.stamp))
    assert verdict.tokens[0, 0] == 1


def test_generate_queues_more_prompts_than_rows() -> None:
    prompts = [[5, 6, 7], [1], [40, 2, 9, 9], [8, 8], [3]]
    outputs: dict[int, list[int]] = {}
    origins = set()
    for emission in fs.generate(config(rows=2), TARGET, DRAFTER, prompts, max_tokens=[3, 9, 1, 7, 12]):
        outputs.setdefault(emission.prompt_index, []).extend(emission.tokens)
        origins.update(emission.origin)
        assert emission.num_accepted == emission.origin.count(0)
    assert outputs == {i: checksum_greedy(p, n) for i, (p, n) in enumerate(zip(prompts, [3, 9, 1, 7, 12], strict=True))}
    assert origins == {0, 1, 2}


def test_drafter_with_a_random_model_is_still_lossless() -> None:
    class Noise(ChecksumDraft):
        def _answer(self, token):
            return (token * 31 + 7) % 97

    drafter = fs.drafters.standalone(Noise())
    for drafts in (1, 2, 5):
        state = fs.init(config(drafts=drafts), TARGET, drafter)
        state, _ = fs.admit(state, TARGET, drafter, [[5, 6, 7]], max_tokens=20)
        while fs.any_active(state):
            state, _ = fs.step_round(state, TARGET, drafter)
        assert output(state, 0) == checksum_greedy([5, 6, 7], 20)
