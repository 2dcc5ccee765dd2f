"""Verify drafts with coins and noise from outside: for engines that bring their own generator, and to compare with theirs.

Draw by draw: Leviathan et al. 2023, arXiv 2211.17192. As a block: Sun et al. 2024, arXiv 2403.10444. Probabilities are float64 here;
the rounds of this library use `judge_drafts_`, whose integers are the same to the bit everywhere.
"""

import torch

from funcspec.constants import NO_TOKEN
from funcspec.errors import ArgumentTypeError, refuse
from funcspec.kernels._checks import check_index_array, check_index_matrix
from funcspec.kernels._distributions import best_of, drawn_from, excess_of, probabilities_of, sane_scores, scores_of, total_of
from funcspec.kernels._triton import jit, tl
from funcspec.kernels.noise import gumbel, gumbel_reference
from funcspec.kernels.op import Op, next_power_of_2

BLOCK = 1024
LOGIT_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
RATIO, BLOCKS, RATES = "ratio", "block", "rates"
RULES = (RATIO, BLOCKS, RATES)


@jit
def _judge(target_ptr, drawn_ptr, draft, heat, vocab_size, draft_vocab_size, HAS_DRAFT: tl.constexpr, BLOCK: tl.constexpr):
    """Probabilities of a draft under the target and under what it was drawn from, and the target's arg-max."""
    best, total, winner = total_of(target_ptr, vocab_size, 1.0, BLOCK)
    p = probabilities_of(target_ptr, draft, vocab_size, 1.0, best, total)
    q = p * 0.0 + 1.0
    if HAS_DRAFT:
        _best, _total, q, _is_point = drawn_from(drawn_ptr, draft, draft_vocab_size, heat, BLOCK)
    return p, q, winner


@jit
def _threshold(
    running,
    has_next,
    next_draft_ptr,
    next_target_ptr,
    next_drawn_ptr,
    heat,
    vocab_size,
    draft_vocab_size,
    HAS_DRAFT: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """What a coin must stay below for a block to reach beyond a place with this running weight."""
    threshold = running
    if has_next:
        draft = tl.load(next_draft_ptr).to(tl.int64)
        excess = excess_of(next_target_ptr, next_drawn_ptr, draft, running, heat, vocab_size, draft_vocab_size, HAS_DRAFT, BLOCK)
        whole = excess + 1.0 - running
        threshold = tl.where(whole > 0, excess / tl.where(whole > 0, whole, 1.0), 1.0)
    return threshold


@jit
def _last_token(
    target_ptr,
    drawn_ptr,
    words_ptr,
    rejected,
    weight,
    heat,
    is_greedy,
    vocab_size,
    draft_vocab_size,
    HAS_DRAFT: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """The token behind the kept drafts: from the residual if a draft was `rejected` (else -1), from the target otherwise."""
    best, total, _winner = total_of(target_ptr, vocab_size, 1.0, BLOCK)
    drawn_best = best
    drawn_total = total
    is_drawn = rejected < -1
    columns = tl.where(rejected >= 0, draft_vocab_size, 0)  # behind the last draft there is no such row
    if HAS_DRAFT:
        drawn_best, drawn_total, _q, is_point = drawn_from(drawn_ptr, rejected, columns, heat, BLOCK)
        is_drawn = (rejected >= 0) & (is_point == 0)
    first_best = tl.full((), float("-inf"), tl.float64)
    other_best = tl.full((), float("-inf"), tl.float64)
    first = tl.full((), -1, tl.int64)
    other = tl.full((), -1, tl.int64)
    start = tl.full((), 0, tl.int64)
    while start < vocab_size:
        token = start + tl.arange(0, BLOCK)
        noise = gumbel(tl.load(words_ptr + token, mask=token < vocab_size, other=0).to(tl.uint32, bitcast=True))
        noise = tl.where(is_greedy, 0.0, noise).to(tl.float64)
        score = scores_of(target_ptr, token, vocab_size, 1.0)
        score = tl.where(token == rejected, float("-inf"), score) + noise
        top = tl.max(score, axis=0)
        other = tl.where(top > other_best, tl.min(tl.where(score == top, token, vocab_size), axis=0), other)
        other_best = tl.maximum(other_best, top)
        if HAS_DRAFT:
            p = probabilities_of(target_ptr, token, vocab_size, 1.0, best, total)
            q = probabilities_of(drawn_ptr, token, columns, heat, drawn_best, drawn_total)
            left = tl.where(is_drawn, weight * p - q, 0.0)
            score = tl.where(left > 0, tl.log(tl.where(left > 0, left, 1.0)) + noise, float("-inf"))
            top = tl.max(score, axis=0)
            first = tl.where(top > first_best, tl.min(tl.where(score == top, token, vocab_size), axis=0), first)
            first_best = tl.maximum(first_best, top)
        start += BLOCK
    return tl.where(first >= 0, first, tl.where(other >= 0, other, tl.maximum(rejected, 0)))


@jit
def rejection_sample_kernel(
    target_logits_ptr,  # [L, V]
    draft_token_ids_ptr,  # [L]
    draft_logits_ptr,  # [S, K, Vd], read when HAS_DRAFT
    cu_num_logits_ptr,  # [R + 1]
    idx_mapping_ptr,  # [R]
    temperature_ptr,  # [S] float32
    coins_ptr,  # [L] int32
    noise_words_ptr,  # [R, V] int32
    conditional_rates_ptr,  # [>= W - 1] float32, read by the rule of rates
    out_token_ids_ptr,  # [R, W], written
    out_num_sampled_ptr,  # [R], written
    target_stride,
    state_stride,
    step_stride,
    words_stride,
    out_stride,
    num_logits,
    num_states,
    vocab_size,
    draft_vocab_size,
    WIDTH: tl.constexpr,
    RULE: tl.constexpr,
    HAS_DRAFT: tl.constexpr,
    LANES: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One program a row. RULE: 0 draw by draw, 1 as a block, 2 at given rates."""
    row = tl.program_id(0).to(tl.int64)
    lane = tl.arange(0, LANES)
    begin = tl.load(cu_num_logits_ptr + row).to(tl.int64)
    end = tl.load(cu_num_logits_ptr + row + 1).to(tl.int64)
    state = tl.load(idx_mapping_ptr + row).to(tl.int64)
    active = (end > begin) & (begin >= 0) & (end <= num_logits) & (state >= 0) & (state < num_states)
    count = tl.where(active, tl.minimum(end - begin, WIDTH) - 1, 0)
    drafts = tl.load(draft_token_ids_ptr + begin + 1 + lane, mask=lane < count, other=-1).to(tl.int64)
    count = tl.min(tl.where((drafts < 0) | (drafts >= vocab_size), tl.minimum(lane, count), LANES), axis=0)
    kept = count * 0
    last = tl.full((), -1, tl.int64)
    if active:
        temperature = tl.load(temperature_ptr + state)
        is_greedy = temperature == 0
        heat = tl.where(is_greedy, 1.0, temperature)
        draft_ptr = draft_token_ids_ptr + begin + 1
        target_ptr = target_logits_ptr + begin * target_stride
        drawn_ptr = draft_logits_ptr + state * state_stride
        running = tl.full((), 1.0, tl.float64)
        weight = tl.full((), 1.0, tl.float64)
        place = count * 0
        is_open = active
        while is_open & (place < count):
            draft = tl.load(draft_ptr + place).to(tl.int64)
            coin = (tl.load(coins_ptr + begin + place).to(tl.int64) & 0xFFFFFFFF).to(tl.float64) * 2.3283064365386963e-10
            if RULE == 2:
                is_kept = coin < tl.load(conditional_rates_ptr + place).to(tl.float64)
                is_open = is_kept
            else:
                at_ptr = target_ptr + place * target_stride
                from_ptr = drawn_ptr + place * step_stride
                p, q, winner = _judge(at_ptr, from_ptr, draft, heat, vocab_size, draft_vocab_size, HAS_DRAFT, BLOCK)
                is_kept = p > coin * q
                if RULE == 1:
                    running = tl.minimum(running * p / q, 1.0)
                    next_ptr = draft_ptr + place + 1
                    at_ptr += target_stride
                    from_ptr += step_stride
                    threshold = _threshold(
                        running, place + 1 < count, next_ptr, at_ptr, from_ptr, heat, vocab_size, draft_vocab_size, HAS_DRAFT, BLOCK
                    )
                    is_kept = coin < threshold
                    weight = tl.where(is_kept, running, weight)
                is_kept = tl.where(is_greedy, draft == winner, is_kept)
                is_open = is_kept | ((RULE == 1) & (is_greedy == 0))  # a block has no early end
            kept = tl.where(is_kept, place + 1, kept)
            place += 1
        rejected = tl.min(tl.where(lane == kept, drafts, vocab_size), axis=0)
        rejected = tl.where((kept < count) & (is_greedy == 0), rejected, -1)
        target_ptr += kept * target_stride
        drawn_ptr += kept * step_stride
        words_ptr = noise_words_ptr + row * words_stride
        last = _last_token(
            target_ptr, drawn_ptr, words_ptr, rejected, weight, heat, is_greedy, vocab_size, draft_vocab_size, HAS_DRAFT, BLOCK
        )
    emitted = tl.where(last >= 0, kept + 1, 0)
    token = tl.where(lane < kept, drafts, tl.where(lane < emitted, last, -1))
    tl.store(out_token_ids_ptr + row * out_stride + lane, token, mask=lane < WIDTH)
    tl.store(out_num_sampled_ptr + row, emitted)


def _check_floats(name: str, array: torch.Tensor, dtypes: tuple[torch.dtype, ...], shape: tuple[int, ...]) -> None:
    """Refuse another dtype or a smaller shape."""
    if array.dtype not in dtypes:
        refuse(name, " or ".join(map(str, dtypes)), array.dtype, "convert it once, outside the loop", ArgumentTypeError)
    is_large = array.dim() == len(shape) and all(size >= least for size, least in zip(array.shape, shape, strict=True))
    if not is_large:
        refuse(name, f"at least {list(shape)}", f"shape {tuple(array.shape)}", "pass arrays that belong to one batch")


def _check(
    logits: tuple[torch.Tensor, torch.Tensor | None],
    draft_token_ids: torch.Tensor,
    by_row: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    words: tuple[torch.Tensor, torch.Tensor],
    rule: str,
    conditional_rates: torch.Tensor | None,
    outputs: tuple[torch.Tensor, torch.Tensor],
) -> tuple[int, int]:
    """Check everything; return R and W."""
    (target_logits, draft_logits), (cu_num_logits, idx_mapping, temperature) = logits, by_row
    if rule not in RULES:
        refuse("rule", " or ".join(map(repr, RULES)), repr(rule), "use one of these")
    check_index_array("idx_mapping", idx_mapping, 0)
    rows = idx_mapping.shape[0]
    check_index_array("cu_num_logits", cu_num_logits, rows + 1)
    check_index_matrix("out_token_ids", outputs[0], rows)
    check_index_array("out_num_sampled", outputs[1], rows)
    _check_floats("target_logits", target_logits, LOGIT_DTYPES, (0, 1))
    _check_floats("temperature", temperature, (torch.float32,), (0,))
    places, vocab_size = target_logits.shape
    width = outputs[0].shape[1]
    check_index_array("draft_token_ids", draft_token_ids, places)
    _check_floats("coins", words[0], (torch.int32,), (places,))
    _check_floats("noise_words", words[1], (torch.int32,), (rows, vocab_size))
    if width < 1:
        refuse("out_token_ids", "at least 1 column", width, "allocate a place for each draft and one more")
    if draft_logits is not None:
        _check_floats("draft_logits", draft_logits, LOGIT_DTYPES, (temperature.shape[0], width - 1, 1))
        if draft_logits.shape[2] > vocab_size:
            expected = f"at most the {vocab_size} columns of target_logits"
            refuse("draft_logits", expected, draft_logits.shape[2], "cut off tokens that the target does not have")
    if (rule == RATES) != (conditional_rates is not None):
        fix = "pass conditional_rates with rule='rates', and with no other"
        refuse("conditional_rates", f"{'an array' if rule == RATES else 'None'} for rule {rule!r}", type(conditional_rates).__name__, fix)
    if conditional_rates is not None:
        _check_floats("conditional_rates", conditional_rates, (torch.float32,), (width - 1,))
    return rows, width


def _launch_rejection_sample(
    *,
    target_logits: torch.Tensor,
    draft_logits: torch.Tensor | None = None,
    draft_token_ids: torch.Tensor,
    cu_num_logits: torch.Tensor,
    idx_mapping: torch.Tensor,
    temperature: torch.Tensor,
    coins: torch.Tensor,
    noise_words: torch.Tensor,
    rule: str = RATIO,
    conditional_rates: torch.Tensor | None = None,
    out_token_ids: torch.Tensor,
    out_num_sampled: torch.Tensor,
) -> None:
    by_row = (cu_num_logits, idx_mapping, temperature)
    outputs = (out_token_ids, out_num_sampled)
    logits, words = (target_logits, draft_logits), (coins, noise_words)
    rows, width = _check(logits, draft_token_ids, by_row, words, rule, conditional_rates, outputs)
    if rows == 0:
        return
    rejection_sample_kernel[(rows,)](
        target_logits,
        draft_token_ids,
        target_logits if draft_logits is None else draft_logits,
        *by_row,
        *words,
        temperature if conditional_rates is None else conditional_rates,
        *outputs,
        target_logits.stride(0),
        0 if draft_logits is None else draft_logits.stride(0),
        0 if draft_logits is None else draft_logits.stride(1),
        noise_words.stride(0),
        out_token_ids.stride(0),
        target_logits.shape[0],
        temperature.shape[0],
        target_logits.shape[1],
        0 if draft_logits is None else draft_logits.shape[2],
        WIDTH=width,
        RULE=RULES.index(rule),
        HAS_DRAFT=draft_logits is not None,
        LANES=next_power_of_2(width),
        BLOCK=BLOCK,
        num_warps=4,
        enable_fp_fusion=False,
    )


class _Row:
    """One row of the batch: its drafts, the target's scores and probabilities at every place, and what drafts were drawn from."""

    def __init__(self, target_logits: torch.Tensor, draft_logits: torch.Tensor | None, drafts: list[int], heat: float) -> None:
        self.drafts, self.is_greedy = drafts, heat == 0
        self.scores = [sane_scores(row) for row in target_logits]
        self.p = [scores.softmax(0).nan_to_num_(nan=0.0) for scores in self.scores]
        self.q: list[torch.Tensor | None] = [None] * len(drafts)
        if draft_logits is not None and not self.is_greedy:
            for place, draft in enumerate(drafts):
                q = torch.zeros_like(self.p[place])
                q[: draft_logits.shape[1]] = sane_scores(draft_logits[place], heat).softmax(0).nan_to_num_(nan=0.0)
                self.q[place] = q if q[draft] > 0 else None

    def excess(self, place: int, weight: float) -> torch.Tensor:
        """max(weight * p - q, 0) of every token."""
        q = self.q[place]
        if q is None:  # a point: all of q is on the draft
            q = torch.zeros_like(self.p[place])
            q[self.drafts[place]] = 1.0
        return (weight * self.p[place] - q).clamp(min=0)

    def count_kept(self, coins: list[float], rule: str, rates: list[float]) -> tuple[int, float]:
        """How many drafts are kept, and the weight of p in the residual behind them."""
        kept, weight, running = 0, 1.0, 1.0
        for place, draft in enumerate(self.drafts):
            q = self.q[place]
            p_draft, q_draft = float(self.p[place][draft]), 1.0 if q is None else float(q[draft])
            if rule == BLOCKS and not self.is_greedy:
                running = threshold = min(running * p_draft / q_draft, 1.0)
                if place + 1 < len(self.drafts):
                    excess = float(self.excess(place + 1, running).sum())
                    whole = excess + 1.0 - running
                    threshold = excess / whole if whole > 0 else 1.0
                if coins[place] < threshold:
                    kept, weight = place + 1, running
                continue
            is_kept = draft == max(best_of(self.scores[place]), 0) if self.is_greedy else p_draft > coins[place] * q_draft
            if not (coins[place] < rates[place] if rule == RATES else is_kept):
                break
            kept = place + 1
        return kept, weight

    def last_token(self, kept: int, weight: float, noise: torch.Tensor) -> int:
        """The token behind the kept drafts."""
        scores, rejected = self.scores[kept], -1
        if not self.is_greedy:
            scores = scores + noise
            if kept < len(self.drafts):
                rejected = self.drafts[kept]
                first = best_of(self.excess(kept, weight).log() + noise) if self.q[kept] is not None else -1
                if first >= 0:
                    return first
                scores[rejected] = -torch.inf
        best = best_of(scores)
        return best if best >= 0 else max(rejected, 0)


def rejection_sample_reference_(
    *,
    target_logits: torch.Tensor,
    draft_logits: torch.Tensor | None = None,
    draft_token_ids: torch.Tensor,
    cu_num_logits: torch.Tensor,
    idx_mapping: torch.Tensor,
    temperature: torch.Tensor,
    coins: torch.Tensor,
    noise_words: torch.Tensor,
    rule: str = RATIO,
    conditional_rates: torch.Tensor | None = None,
    out_token_ids: torch.Tensor,
    out_num_sampled: torch.Tensor,
) -> None:
    """Specify `rejection_sample_` in plain torch, row by row."""
    by_row = (cu_num_logits, idx_mapping, temperature)
    outputs = (out_token_ids, out_num_sampled)
    rows, width = _check((target_logits, draft_logits), draft_token_ids, by_row, (coins, noise_words), rule, conditional_rates, outputs)
    out_token_ids[:rows] = NO_TOKEN
    out_num_sampled[:rows] = 0
    starts, states, heats = cu_num_logits.tolist(), idx_mapping.tolist(), temperature.tolist()
    rates = [] if conditional_rates is None else conditional_rates.tolist()
    places, vocab_size = target_logits.shape
    for row, state in enumerate(states):
        begin, end = starts[row], starts[row + 1]
        if not (0 <= begin < end <= places and 0 <= state < len(heats)):
            continue
        drafts = draft_token_ids[begin + 1 : min(end, begin + width)].tolist()
        drafts = drafts[: next((place for place, draft in enumerate(drafts) if not 0 <= draft < vocab_size), len(drafts))]
        own_logits = None if draft_logits is None else draft_logits[state]
        one = _Row(target_logits[begin : begin + len(drafts) + 1], own_logits, drafts, heats[state])
        uniforms = [(coin & 0xFFFFFFFF) * 2.0**-32 for coin in coins[begin : begin + len(drafts)].tolist()]
        kept, weight = one.count_kept(uniforms, rule, rates)
        noise = gumbel_reference(noise_words[row, :vocab_size].long() & 0xFFFFFFFF).double()
        emitted = [*drafts[:kept], one.last_token(kept, weight, noise)]
        out_token_ids[row, : kept + 1] = torch.tensor(emitted, dtype=out_token_ids.dtype)
        out_num_sampled[row] = kept + 1


rejection_sample_ = Op(
    "rejection_sample",
    writes=("out_token_ids", "out_num_sampled"),
    triton=_launch_rejection_sample,
    reference=rejection_sample_reference_,
    strided=("target_logits", "draft_logits", "noise_words", "out_token_ids"),
)
"""Verify the drafts of a batch and choose the token behind those that are kept, with given coins and noise.

R rows, W = K + 1 places a row, L logits rows in all, V tokens of the target and Vd <= V of the drafter, S request states. Index arrays
are int32 or int64. The logits rows b to e - 1 of a row judge its e - b - 1 drafts and give its bonus token: row b + j judges draft
draft_token_ids[b + j + 1]. Drafts end at the first that is no token, such as -1. With p the target's probability of a draft, q the
drafter's and u the coin, a sampled row keeps

* rule "ratio": drafts while p > u q;
* rule "block": the longest prefix whose coin is below its threshold, all of them looked at. Draft i has the running weight
  P = min(P p / q, 1) and the threshold P if it is the last, else E / (E + 1 - P), E the sum of max(P p' - q', 0) at the next place;
* rule "rates": drafts while u is below the rate of their place, whatever the target says: for benchmarks at a given acceptance.

The token behind a rejected draft is drawn from max(P p - q, 0), P = 1 but for blocks; where that is 0 everywhere, from p without the
draft; where that is 0 too it is the draft. Behind all drafts it is drawn from p. A draw takes the highest logarithm plus
`funcspec.noise.gumbel` of the row's words. Where a draft was just proposed, or its own row excludes it, q is 1 for it and 0 for all
other tokens. Tokens that the drafter does not know have q = 0.

Rows at temperature 0 keep drafts while they equal the target's arg-max, or by rates, and end with that arg-max. Rows without logits,
with logits out of bounds or with a state outside of [0, S) emit nothing. Probabilities are float64, which differ between backends in
their last bits.

One program works through a row, so this is for comparisons rather than for speed. "block" is exact within a round; across rounds only
if coins and noise are new in every round, for accepted lengths depend on coins of later places.

Args:
    target_logits: [L, V] float32, bfloat16 or float16, divided by the temperature already; any row stride.
    draft_logits: [>= S, >= K, Vd] before temperature, or None for drafts that were just proposed.
    draft_token_ids: [L] as above; entry b is not read.
    cu_num_logits: [R + 1] exclusive prefix sums of the rows' numbers of logits rows.
    idx_mapping: [R] request state of each row; -1 for none.
    temperature: [S] float32, 0 or positive and finite.
    coins: [L] int32 bit patterns; u is the word times 2^-32.
    noise_words: [>= R, >= V] int32 bit patterns; small words win.
    rule: "ratio", "block" or "rates".
    conditional_rates: [>= K] float32; exactly with rates.
    out_token_ids: [>= R, W] written, -1 in unused places; rows any stride apart.
    out_num_sampled: [R] written.

Raises:
    ArgumentError, ArgumentTypeError: arrays that do not belong together; nothing has been written.
"""
