"""What breaks for users of speculative decoding, continued: the acceptance rule and numbers inside kernels, with their right answers."""

import bisect
import dataclasses
import itertools
import math
from typing import Any

import numpy as np
import pytest
import torch
from oracle import checksum_greedy, config, output, pair, run
from watching import Watching

import funcspec as fs
from funcspec import exact, noise
from funcspec.drafters import Standalone, standalone
from funcspec.errors import ArgumentError
from funcspec.kernels.choose_tokens import choose_tokens_, choose_tokens_partials
from funcspec.kernels.noise import gumbel_from_words_
from funcspec.kernels.normalisers import keep_proposals_
from funcspec.kernels.recovery import recover_tokens_
from funcspec.models import ChecksumDraft, TableModel, from_logits

RULES = [fs.rules.greedy, fs.rules.coupled, fs.rules.ratio]
SAMPLING = RULES[1:]
SEEDS, GAP = 131_072, 0.006  # draws, and how near their shares must come to the law
INF, NAN = math.inf, math.nan


@pytest.fixture(params=[False, True], ids=["pure", "donated"])
def donate(request: pytest.FixtureRequest) -> bool:
    return request.param


def choose(logits: torch.Tensor, temperature: float, backend: Any, seeds: list[int] | None = None) -> tuple[list[int], list[int]]:
    """Tokens and flags of rows of logits, at position 1, in poisoned outputs."""
    count, device, parts = logits.shape[0], logits.device, choose_tokens_partials(logits.shape[1])
    out = torch.full((2, count), -77, dtype=torch.int32, device=device)
    keys = [noise.split_seed(seed) for seed in seeds or range(count)]
    choose_tokens_(
        backend=backend,
        logits=logits,
        logits_indices=None,
        token_rows=torch.arange(count, dtype=torch.int32, device=device),
        positions=torch.ones(count, dtype=torch.int32, device=device),
        temperature=torch.full((count,), temperature, device=device),
        seed=torch.tensor(keys, dtype=torch.int32, device=device),
        stream=noise.TARGET,
        nonce_length=None,
        token_ids=None,
        out_tokens=out[0],
        out_bad=out[1],
        scratch_scores=torch.full((count, parts), NAN, device=device),
        scratch_tokens=torch.full((count, parts), -77, dtype=torch.int32, device=device),
        scratch_bad=torch.full((count, parts), -77, dtype=torch.int32, device=device),
    )
    return out[0].tolist(), out[1].tolist()


# ---------------------------------------------------------------- placeholders and ids outside of the vocabulary


@pytest.mark.parametrize("rule", SAMPLING, ids=repr)
def test_e1_placeholder_among_drafts_of_a_row_that_samples(donate: bool, rule: fs.rules.Rule) -> None:
    """E1 on the random path: p(5) = 1 at the first place, so 5 is kept; nothing behind the placeholder is."""
    rows = tuple(tuple(float(token == (2 if newest == 5 else 5)) for token in range(10)) for newest in range(10))
    target, drafter = Watching(TableModel(rows)), standalone(TableModel(((0.1,) * 10,) * 10))
    state = fs.init(config(rule=rule), target, drafter)
    state, _ = fs.admit(state, target, drafter, [[4]], temperature=1.0, seeds=[3], donate=donate)
    assert output(state, 0) == [5]
    for step in (fs.prefill, fs.decode, fs.decode):
        state, _ = step(state, drafter, donate=donate)
    tokens, n = state.tokens.clone(), int(state.num_tokens[0])
    tokens[0, n - 1] = 4  # the newest token, after which 5 is certain
    tokens[0, n : n + 3] = torch.tensor([5, -1, 7])
    target.clear()
    _, verdict = fs.verify(dataclasses.replace(state, tokens=tokens), target, donate=donate)
    assert verdict.tokens.tolist() == [[5, 2, -1, -1]] and verdict.num_emitted.tolist() == [2] and verdict.num_accepted.tolist() == [1]
    assert target.seen[0].input_ids.tolist() == [4, 5, 0, 0] and target.seen[0].slot_mapping.ge(0).tolist() == [True, True, False, False]


def test_e5_a_row_without_a_valid_score_gives_no_id_of_the_padding(backend: str, kernel_device: str) -> None:
    """E5: V = 97 in tiles of 1024 with every real score -inf."""
    logits = torch.full((3, 97), -INF, device=kernel_device)
    logits[1, 40] = 0.0
    for temperature in (0.0, 1.0):
        assert choose(logits, temperature, backend) == ([0, 40, 0], [1, 0, 1])


@pytest.mark.parametrize("rule", RULES, ids=repr)
def test_e5_a_drafter_without_a_valid_score_drafts_ids_of_the_vocabulary(donate: bool, rule: fs.rules.Rule) -> None:
    draft = Watching(from_logits(lambda prefix: torch.full((97,), -INF), vocab_size=97))
    target, drafter = Watching(pair()[0]), standalone(draft)
    state = fs.init(config(rows=2, rule=rule), target, drafter)
    heat = [0.0, 1.0] if rule.samples else 0.0
    state, _ = fs.admit(state, target, drafter, [[5, 6, 7], [1]], seeds=[1, 2], temperature=heat, max_tokens=12, donate=donate)
    while fs.any_active(state):
        state, verdict = fs.step_round(state, target, drafter, donate=donate)
        assert not verdict.bad_row.any()
    assert [output(state, row) for row in (0, 1)] == [checksum_greedy([5, 6, 7], 12), checksum_greedy([1], 12)]
    for batch in target.seen + draft.seen:
        assert int(batch.input_ids.min()) >= 0 and int(batch.input_ids.max()) < 97


# ---------------------------------------------------------------- the acceptance rule


def law(logits: list[float], temperature: float) -> np.ndarray:
    wide = np.exp(np.array(logits) / temperature - max(logits) / temperature)
    return wide / wide.sum()


def drawn(logits: np.ndarray, seeds: np.ndarray, nonce: int, stream: int) -> np.ndarray:
    """One token for each seed from scores [V] after the token at position 1."""
    low, high, position, nonces = (noise.as_words(np.asarray(value))[..., None] for value in (seeds, seeds >> 32, 1, nonce))
    words = noise.token_words(low, high, position, nonces, stream, noise.as_words(np.arange(logits.size))[None])
    return (logits + noise.gumbel(words)).argmax(axis=1)


def position_words(seeds: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The two words of the stream TARGET at position 1 that a recovered token is drawn with."""
    zero = np.zeros(seeds.size, np.uint32)
    key = (zero, zero + np.uint32(1), zero, zero + np.uint32(noise.TARGET), noise.as_words(seeds), noise.as_words(seeds >> 32))
    return noise.philox4x32(*key)[:2]


def first_tokens(target: list[float], draft: list[float], temperature: float, *, point: bool = False) -> np.ndarray:
    """First token of a ratio round behind two committed tokens, for every seed: the written definition, all of them at once."""
    heat, seeds = np.array([[temperature]], np.float32), np.arange(SEEDS)
    p, q = (exact.sane_scores(np.array([row], np.float32), heat) for row in (target, draft))
    totals, sums = exact.normalisers(p), exact.normalisers(q)
    drafts = drawn(q[0], seeds, 1, noise.DRAFT)
    every = [np.repeat(array, len(target), axis=0) for array in (totals, sums)]
    limits = exact.thresholds(exact.weights(p[0]), every[0], exact.weights(q[0]), every[1], np.full(len(target), point))
    low, high = noise.as_words(seeds), noise.as_words(seeds >> 32)
    coins = exact.coin_words(low, high, noise.as_words(np.array([1])), noise.as_words(np.array([1])))
    fixed, other = exact.probabilities(p, totals)[0], exact.probabilities(q, sums)[0] * (not point)
    sums_of = [exact.residual(fixed, other, draft).cumsum().tolist() for draft in range(len(target))]
    rejected = np.flatnonzero(coins >= limits[drafts])
    emitted = drafts.copy()
    for row, first, second in zip(rejected.tolist(), *(word[rejected].tolist() for word in position_words(seeds)), strict=True):
        rest = sums_of[drafts[row]]
        emitted[row] = bisect.bisect_right(rest, (((second << 32) | first) * rest[-1]) >> 64)
    return emitted


def emitted_by_steps(target: list[float], drafter: Any, temperature: float, count: int, rule: fs.rules.Rule) -> np.ndarray:
    """The same for the first `count` seeds by real steps."""
    model = from_logits(lambda prefix: torch.tensor(target), vocab_size=len(target))
    state = fs.init(config(rows=count, length=8, drafts=1, rule=rule, block_size=8), model, drafter)
    state, _ = fs.admit(state, model, drafter, [[0]] * count, seeds=range(count), temperature=temperature)
    return fs.step_round(state, model, drafter)[1].tokens[:, 0].numpy()


def shares(tokens: np.ndarray, size: int) -> np.ndarray:
    assert tokens.shape == (SEEDS,)
    return np.bincount(tokens, minlength=size) / SEEDS


def logs(probabilities: tuple[float, ...]) -> list[float]:
    return np.log(np.array(probabilities)).astype(np.float32).tolist()


@pytest.mark.parametrize(
    ("p", "q"), [((0.1, 0.6, 0.3), (0.6, 0.3, 0.1)), ((0.1, 0.5, 0.4), (0.8, 0.15, 0.05))], ids=["one shifted", "one peaked"]
)
def test_f1_noise_of_drafts_and_of_recovered_tokens_is_apart(p: tuple[float, ...], q: tuple[float, ...]) -> None:
    """F1: with the same noise for both the shares would be .10 .57 .33, and .10 .47 .43 for the second pair."""
    tokens = first_tokens(logs(p), logs(q), 1.0)
    assert np.abs(shares(tokens, 3) - p).max() < GAP
    drafter = standalone(from_logits(lambda prefix: torch.tensor(logs(q)), vocab_size=3))
    assert (emitted_by_steps(logs(p), drafter, 1.0, 64, fs.rules.ratio) == tokens[:64]).all()
    # Under the coupled rule the two share their noise on purpose: what is emitted is the target's own draw.
    plain = drawn(np.array(logs(p), np.float32), np.arange(SEEDS), 0, noise.TARGET)
    assert np.abs(shares(plain, 3) - p).max() < GAP
    assert (emitted_by_steps(logs(p), drafter, 1.0, 64, fs.rules.coupled) == plain[:64]).all()


@pytest.mark.parametrize("point", [False, True], ids=["sampled", "point"])
def test_f2_greedy_drafts_are_judged_as_what_they_are(point: bool) -> None:
    """F2: p = .3 .5 .2, the draft the arg-max of .5 .3 .2; judged by that softmax the shares would be .6 .4 0."""
    p, sure = (0.3, 0.5, 0.2), [0.0, -INF, -INF]
    tokens = first_tokens(logs(p), sure, 1.0, point=point)
    assert np.abs(shares(tokens, 3) - p).max() < GAP
    drafter = Standalone(from_logits(lambda prefix: torch.tensor(sure), vocab_size=3), proposal="point" if point else "sampled")
    assert (emitted_by_steps(logs(p), drafter, 1.0, 64, fs.rules.ratio) == tokens[:64]).all()
    # A drafter that samples draws from the very q that it is judged by.
    q = (0.5, 0.3, 0.2)
    assert np.abs(shares(drawn(np.array(logs(q), np.float32), np.arange(SEEDS), 1, noise.DRAFT), 3) - q).max() < GAP
    assert np.abs(shares(first_tokens(logs(p), logs(q), 1.0), 3) - p).max() < GAP


@pytest.mark.parametrize("rule", SAMPLING, ids=repr)
def test_f4_the_targets_own_sampling_options_decide(donate: bool, rule: fs.rules.Rule) -> None:
    """F4: logits 2 1 0 at temperature .5 with the two best allowed; a draft of token 2 is rejected, and p = .881 .119 0."""
    allowed, always = [2.0, 1.0, -INF], [-INF, -INF, 0.0]
    expected = [*law([2.0, 1.0], 0.5), 0.0]
    assert [round(share, 3) for share in expected] == [0.881, 0.119, 0.0]
    tokens = first_tokens(allowed, always, 0.5)
    if rule == fs.rules.coupled:
        tokens = drawn(np.array(allowed, np.float32) / np.float32(0.5), np.arange(SEEDS), 0, noise.TARGET)
    assert np.abs(shares(tokens, 3) - expected).max() < GAP
    target = from_logits(lambda prefix: torch.tensor([2.0, 1.0, 0.0]), vocab_size=3)
    drafter = standalone(from_logits(lambda prefix: torch.tensor(always), vocab_size=3))
    state = fs.init(config(rows=64, length=8, drafts=1, rule=rule, block_size=8), target, drafter)
    state, _ = fs.admit(state, target, drafter, [[0]] * 64, seeds=range(64), temperature=0.5)
    state, draft = fs.prefill(state, drafter, donate=donate)
    state, scores = fs.score(state, target, donate=donate)
    logits = scores.logits.masked_fill(scores.logits < scores.logits.topk(2).values[..., -1:], -INF)
    _, verdict = fs.accept(state, dataclasses.replace(scores, logits=logits), donate=donate)
    assert draft.tokens.eq(2).all() and verdict.num_accepted.eq(0).all()
    assert verdict.tokens[:, 0].tolist() == tokens[:64].tolist()


@pytest.mark.parametrize("rule", SAMPLING, ids=repr)
def test_f5_a_greedy_row_beside_one_that_samples(donate: bool, rule: fs.rules.Rule) -> None:
    """F5: temperatures 0 and 1. No number stands for "greedy" but 0, and nothing is divided by it."""
    target, drafter = pair(spread=True)

    def rounds(prompts: list[list[int]], seeds: list[int], temperature: list[float]) -> list[list[list[int]]]:
        state = fs.init(config(rows=len(prompts), rule=rule), target, drafter)
        state, _ = fs.admit(state, target, drafter, prompts, seeds=seeds, temperature=temperature, max_tokens=20, donate=donate)
        found = [[[token] for token in state.tokens[row, int(state.prompt_len[row])].view(1).tolist()] for row in range(len(prompts))]
        while fs.any_active(state):
            state, verdict = fs.step_round(state, target, drafter, donate=donate)
            assert verdict.num_accepted.ge(0).all() and not verdict.bad_row.any()
            for row, emitted in enumerate(verdict.num_emitted.tolist()):
                found[row] += [verdict.tokens[row, :emitted].tolist()] if emitted else []
        return found

    together = rounds([[5, 6, 7], [1]], [8, 9], [0.0, 1.0])
    assert list(itertools.chain(*together[0])) == checksum_greedy([5, 6, 7], 20)
    assert together[1] == rounds([[1]], [9], [1.0])[0] and list(itertools.chain(*together[1])) != checksum_greedy([1], 20)
    with pytest.raises(ArgumentError, match=r"temperature: expected 0 \(greedy\) or a number from 0\.01"):
        rounds([[5, 6, 7], [1]], [8, 9], [-1.0, 1.0])


# ---------------------------------------------------------------- numbers inside kernels


@pytest.mark.parametrize(("row", "offset"), [(14134, 2147463424), (14135, 2147615360), (15407, 2340877952)])
def test_h1_row_times_vocabulary_is_64_bits_wide(backend: str, kernel_device: str, row: int, offset: int) -> None:
    """H1: V = 151936. Two rows of logits that lie as far apart as row 0 and this one; what lies between is never touched."""
    assert row * 151936 == offset
    room = torch.empty(offset + 97, dtype=torch.float16, device=kernel_device)
    logits = room.as_strided((2, 97), (offset, 1))
    logits.copy_(-(torch.arange(97) - torch.tensor([[5], [70]])).abs())
    assert choose(logits, 0.0, backend) == ([5, 70], [0, 0])
    kept = torch.full((2, 1, 97), NAN, device=kernel_device)
    ints = torch.tensor([[5, 70], [1, 1], [0, 0], [9, 9]], dtype=torch.int32, device=kernel_device)
    keep_proposals_(
        backend=backend,
        first=True,
        logits=logits,
        chosen=ints[0],
        temperature=torch.ones(2, device=kernel_device),
        num_draft=ints[1],
        num_drafted=ints[2],
        token_ids=None,
        draft_logits=kept,
        draft_normalisers=torch.zeros(2, 1, 2, dtype=torch.int32, device=kernel_device),
        is_point=ints[3],
        scratch=torch.zeros(2, 1, 4, dtype=torch.int32, device=kernel_device),
    )
    assert torch.equal(kept[:, 0], logits.float())


@pytest.mark.parametrize("rule", RULES, ids=repr)
def test_h4_one_row_of_nan_in_a_verdict(donate: bool, rule: fs.rules.Rule) -> None:
    """H4: ids stay in range, the row is flagged, and its neighbours are as if it were sane."""
    target, drafter = pair(spread=True)
    heat = 1.0 if rule.samples else 0.0
    state = fs.init(config(rows=4, rule=rule), target, drafter)
    prompts = [[5, 6, 7], [1], [40, 2, 9, 9]]
    state, _ = fs.admit(state, target, drafter, prompts, seeds=[1, 2, 3], temperature=heat, max_tokens=20)
    state, _ = fs.prefill(state, drafter)
    state, scores = fs.score(state, target)
    _, sane = fs.accept(fs.fork(state), scores)
    logits = scores.logits.clone()
    logits[1] = NAN
    state, verdict = fs.accept(state, dataclasses.replace(scores, logits=logits), donate=donate)
    assert verdict.bad_row.tolist() == [0, 1, 0, 0] and sane.bad_row.tolist() == [0, 0, 0, 0]
    assert verdict.tokens[[0, 2, 3]].tolist() == sane.tokens[[0, 2, 3]].tolist()
    assert verdict.num_emitted.tolist() == [*sane.num_emitted[:1].tolist(), 1, *sane.num_emitted[2:].tolist()]
    assert 0 <= int(verdict.tokens[1, 0]) < 97
    for _ in range(4):  # and it does not blow up some steps later
        state = run(state, target, drafter, 1, donate=donate)
        assert all(0 <= token < 97 for row in range(3) for token in output(state, row)) and state.bad_row.tolist() == [0, 1, 0, 0]


def extremes(words: np.ndarray, backend: str, device: str) -> torch.Tensor:
    out = torch.full(words.shape, NAN, device=device)
    gumbel_from_words_(backend=backend, words=torch.from_numpy(words.view(np.int32)).to(device), out_noise=out)
    return out


def test_h5_a_masked_logit_never_wins(backend: str, kernel_device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """H5: logits -inf and 0 with the draw forced to either end; -inf plus noise is -inf, never NaN."""
    edge = extremes(np.array([0, 0xFFFFFFFF, 1, 0xFFFFFF00], np.uint32), backend, kernel_device)
    assert edge.isfinite().all() and (edge - INF).eq(-INF).all()
    logits = torch.tensor([[-INF, 0.0]] * 8, device=kernel_device)
    assert choose(logits, 1.0, backend) == ([1] * 8, [0] * 8)
    for forced in ((0, 0xFFFFFFFF), (0xFFFFFFFF, 0)):
        monkeypatch.setattr(noise, "token_words", lambda *key, forced=forced: np.array(forced, np.uint32))
        assert noise.choose(np.array([-INF, 0.0], np.float32), 1.0, 7, 3, 0, noise.TARGET) == (1, False)


def test_h6_no_word_gives_infinite_noise(backend: str, kernel_device: str) -> None:
    """H6: the word of all ones, and those around u = 1 - 2^-25, which float32 would round to 1."""
    words = np.array([0xFFFFFFFF, 0xFFFFFF80, 0xFFFFFF7F, 0xFFFFFF00, 0x80000000, 2, 1, 0], np.uint32)
    found = extremes(words, backend, kernel_device).cpu().numpy()
    assert np.isfinite(found).all() and 22.1 < found.max() < 22.2 and -2.82 < found.min() < -2.8
    assert (noise.uniform(words) < 1).all() and (noise.uniform(words) > 0).all()
    np.testing.assert_array_equal(found.view(np.int32), noise.gumbel(words).view(np.int32))


def above(limits: np.ndarray) -> np.ndarray:
    """Exact probability that noise exceeds each limit: noise falls in the word, so words are counted by bisection."""
    low, high = np.zeros(limits.shape, np.int64), np.full(limits.shape, 2**32, np.int64)
    while (low < high).any():
        middle = np.minimum((low + high) // 2, 2**32 - 1)
        larger = (noise.gumbel(middle.astype(np.uint32)) > limits) & (low < high)
        low, high = np.where(larger, middle + 1, low), np.where(larger, high, np.minimum(middle, high))
    return low / 2**32


def test_h8_rare_tokens_are_within_reach() -> None:
    """H8 without sampling: how often 262,144 tokens 20.5 nats below the head win in 100,000 draws, from exact counts of words."""
    heads = noise.gumbel(((np.arange(65_536, dtype=np.int64) << 16) + 32_768).astype(np.uint32))
    wins = -np.expm1(262_144 * np.log1p(-above(heads.astype(np.float64) + 20.5)))
    tail = 262_144 * math.exp(-20.5)
    assert round(1e5 * tail / (1 + tail)) == 33
    assert abs(1e5 * wins.mean() - 1e5 * tail / (1 + tail)) < 1.5


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_h8_rare_tokens_are_drawn() -> None:
    """H8 at full size: about 33 of 100,000 draws fall into the tail; the limits are 1e-6 quantiles. Float32 races give none."""
    logits = torch.full((1, 262_145), -20.5, device="cuda")
    logits[0, 0] = 0.0
    tokens, bad = [], []
    for start in range(0, 100_000, 12_500):
        found = choose(logits.expand(12_500, -1), 1.0, None, list(range(start, start + 12_500)))
        tokens += found[0]
        bad += found[1]
    assert 10 <= sum(token > 0 for token in tokens) <= 65 and not any(bad)


@pytest.mark.parametrize("is_point", [0, 1])
def test_h9_a_rejection_where_p_equals_q(backend: str, kernel_device: str, is_point: int) -> None:
    """H9: p = q = .2 .3 .5. Nothing is left of p - q; the token then comes from p, and no number is NaN."""
    p = np.array([logs((0.2, 0.3, 0.5))], np.float32)
    fixed = exact.probabilities(p, exact.normalisers(p))[0]
    rest = [exact.residual(fixed, fixed, draft).tolist() for draft in range(3)]
    assert rest == [(fixed * (np.arange(3) != draft)).tolist() for draft in range(3)]
    weight, sums = exact.weights(p[0]), np.repeat(exact.normalisers(p), 3, axis=0)
    assert exact.thresholds(weight, sums, weight, sums, np.zeros(3, bool)).tolist() == [exact.CERTAIN] * 3  # so it has to be forced
    assert exact.residual(np.array([0, 4, 0]), np.array([0, 4, 0]), 1).tolist() == [0, 4, 0]  # p has nothing but the draft
    count = 12

    def full(shape: tuple[int, ...], value: int) -> torch.Tensor:
        return torch.full(shape, value, dtype=torch.int32, device=kernel_device)

    total = torch.from_numpy(exact.normalisers(p)).to(kernel_device)
    out = full((2, count * 2), -77)
    logits = torch.from_numpy(p).to(kernel_device)
    recover_tokens_(
        backend=backend,
        logits=logits.repeat(count * 2, 1),
        positions=full((count * 2,), 1),
        temperature=torch.ones(count, device=kernel_device),
        seed=torch.tensor([noise.split_seed(seed) for seed in range(count)], dtype=torch.int32, device=kernel_device),
        tokens=full((count, 4), 2),
        num_tokens=full((count,), 2),
        is_point=full((count,), is_point),
        draft_logits=logits.repeat(count, 1, 1),
        draft_normalisers=total.repeat(count, 1, 1),
        verdicts=torch.tensor([exact.REJECTED, exact.UNDECIDED] * count, dtype=torch.int32, device=kernel_device),
        judged_bad=full((count * 2,), 0),
        normalisers=total.repeat(count * 2, 1),
        chosen=full((count * 2,), 900),
        chosen_bad=full((count * 2,), 0),
        out_chosen=out[0],
        out_bad=out[1],
        scratch=full((count, 1, 4), -77),
    )
    expected = [exact.pick(np.array(rest[2]), seed, 0, 1) for seed in range(count)]
    assert out[0].view(count, 2).tolist() == [[token, -1] for token in expected] and set(expected) == {0, 1}
    assert out[1].eq(0).all()


def test_h9_equal_rows_reject_nothing(donate: bool) -> None:
    model = TableModel(((0.2, 0.3, 0.5),) * 3)
    drafter = standalone(model)
    state = fs.init(config(rows=16, rule=fs.rules.ratio), model, drafter)
    state, _ = fs.admit(state, model, drafter, [[0]] * 16, seeds=range(16), temperature=1.0, max_tokens=12, donate=donate)
    while fs.any_active(state):
        state, verdict = fs.step_round(state, model, drafter, donate=donate)
        assert not verdict.origin.eq(1).any() and not verdict.bad_row.any()
    assert {token for row in range(16) for token in output(state, row)} == {0, 1, 2}


def test_h7_the_checksum_pair_with_every_number_of_drafts() -> None:
    """H7: K = 1..9 in whole rounds, V = 97, with look-up of 1..5 tokens besides."""
    target = pair()[0]
    for drafts in range(1, 10):
        for drafter in (standalone(ChecksumDraft()), fs.drafters.ngram(max_ngram=1 + drafts % 5)):
            state = fs.init(config(drafts=drafts), target, drafter)
            state, _ = fs.admit(state, target, drafter, [[5, 6, 7]], max_tokens=20)
            while fs.any_active(state):
                state, _ = fs.step_round(state, target, drafter, donate=True)
            assert output(state, 0) == checksum_greedy([5, 6, 7], 20)
