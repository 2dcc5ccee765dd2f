"""The steps of a round. Each takes a state and returns a new state and what happened.

    state, draft = prefill(state, drafter)      # draft step 0: feed what was committed, draft one token
    state, draft = decode(state, drafter)       # one more draft token, K - 1 times
    state, verdict = verify(state, target)      # score, then accept

Steps are pure: the state they are given stays as it was, and the same state and inputs give the same new state. With
`donate=True` a step reuses its input's buffers, and the input is dead from then on.
"""

from dataclasses import dataclass

import torch

from funcspec.admission import check_partner, partner_model
from funcspec.drafters.base import Drafter
from funcspec.errors import ArgumentTypeError, StaleScoresError, refuse
from funcspec.kernels.acceptance import accept_matching_
from funcspec.kernels.window_inputs import VERIFY
from funcspec.models.base import ForwardBatch, Model
from funcspec.noise import TARGET
from funcspec.state import DRAFTING, ROUND_START, SCORED, SpecState, check_phase, check_state
from funcspec.transition import Transition, Window, revive


@dataclass(frozen=True)
class Draft:
    """This round's drafts so far; a copy that no later step touches.

    Attributes:
        tokens: [R, K] int32 drafts in target ids, -1 where there is none.
        num_draft: [R] int32, drafts planned for the round.
        step: how many draft steps the round has had.
    """

    tokens: torch.Tensor
    num_draft: torch.Tensor
    step: int


@dataclass(frozen=True)
class Verdict:
    """What a round emitted, after trimming; unused places are -1. A copy that no later step touches.

    Attributes:
        tokens: [R, K + 1] int32 emitted tokens.
        num_accepted: [R] int32, how many of them are accepted drafts.
        num_emitted: [R] int32, how many there are.
        num_drafted: [R] int32, how many drafts were judged.
        origin: [R, K + 1] int32: 0 accepted draft, 1 recovered, 2 bonus.
        finish_reason: [R] int32: 0 goes on, 1 stop id, 2 length.
        bad_row: [R] int32, 1 where an emitted token came from logits with NaN, +inf or nothing allowed.
    """

    tokens: torch.Tensor
    num_accepted: torch.Tensor
    num_emitted: torch.Tensor
    num_drafted: torch.Tensor
    origin: torch.Tensor
    finish_reason: torch.Tensor
    bad_row: torch.Tensor


@dataclass(frozen=True)
class Scores:
    """The target's logits over a round, for `accept`; replace `logits` to decode in your own way.

    Attributes:
        logits: [R, K + 1, V]; place j of row r judges draft j, the place after the last draft is for the bonus token.
        stamp: identity of the state the scores belong to.
    """

    logits: torch.Tensor
    stamp: object


def prefill(
    state: SpecState,
    drafter: Drafter,
    *,
    num_draft: int | list[int] | torch.Tensor | None = None,
    donate: bool = False,
) -> tuple[SpecState, Draft]:
    """Draft step 0: feed the drafter what was committed since the last round and draft one token a row.

    Accepted drafts and the correction token are fed in R rows of K + 1 places; places of rejected drafts write nothing. A
    row drafts at most clip(limit - n - 1, 0, K) tokens this round, where n is its committed length.

    Args:
        state: a state at the start of a round.
        drafter: the drafter the state was made for.
        num_draft: drafts wanted this round: a number, one for each row, or [R] int32 on the device (clipped to 0..K); None
            is K. Rows that want 0 are fed all the same.
        donate: reuse the state's buffers and leave the state dead.

    Returns:
        the new state and a `Draft`.

    Raises:
        StepOrderError: the round has begun already.
        ModelError, ArgumentError: the drafter or `num_draft` does not fit.
        PoolExhaustedError: no room to copy on write. In all cases nothing was written.

    Example:
        >>> import funcspec as fs
        >>> target, drafter = fs.models.ChecksumModel(), fs.drafters.standalone(fs.models.ChecksumDraft())
        >>> config = fs.SpecConfig(max_num_reqs=1, max_model_len=32, num_speculative_tokens=3, rule=fs.rules.greedy)
        >>> state, _ = fs.admit(fs.init(config, target, drafter), target, drafter, [[5, 6, 7]])
        >>> state, draft = fs.prefill(state, drafter)
        >>> draft.tokens.tolist()
        [[1, -1, -1]]

    Reference: Leviathan et al. 2023, arXiv 2211.17192.
    """
    check_phase(check_state(state, "prefill"), "prefill", (ROUND_START,), "call decode for more drafts, or verify to finish the round")
    return _drafting_step(state, drafter, "prefill", num_draft, first=True, donate=donate)


def decode(state: SpecState, drafter: Drafter, *, donate: bool = False) -> tuple[SpecState, Draft]:
    """One more draft token for every row that has fewer than it planned.

    Args:
        state: a state after `prefill` or `decode`.
        drafter: the drafter the state was made for.
        donate: reuse the state's buffers and leave the state dead.

    Returns:
        the new state and a `Draft`.

    Raises:
        StepOrderError: the round has not begun; call `prefill` first.
        ModelError, PoolExhaustedError: as for `prefill`.
    """
    check_phase(check_state(state, "decode"), "decode", (DRAFTING,), "call prefill first")
    return _drafting_step(state, drafter, "decode", None, first=False, donate=donate)


def score(state: SpecState, target: Model, *, donate: bool = False) -> tuple[SpecState, Scores]:
    """Run the target over the newest token and the drafts of every row, in one pass of R rows of K + 1 places.

    Args:
        state: a state with drafts, or without a drafter.
        target: the target the state was made for.
        donate: reuse the state's buffers and leave the state dead.

    Returns:
        the new state, which waits for `accept`, and its `Scores`.

    Raises:
        StepOrderError: the state has a drafter and `prefill` was not called; the drafter would fall behind.
        ModelError, PoolExhaustedError: as for `prefill`.
    """
    step = _open_scoring(state, target, "score", donate)
    _, _, logits = step.score(target)
    stamp = object()
    shape = (step.config.max_num_reqs, step.config.num_speculative_tokens + 1, target.vocab_size)
    return step.close(SCORED, stamp=stamp), Scores(logits.reshape(shape).clone(), stamp)


def accept(state: SpecState, scores: Scores, *, donate: bool = False) -> tuple[SpecState, Verdict]:
    """Apply the rule to scores: keep the drafts it keeps, emit one token more, trim, commit.

    Stop ids and length caps are applied before anything is counted.

    Args:
        state: the state that `score` returned with these scores.
        scores: its scores; logits may have been changed in between.
        donate: reuse the state's buffers and leave the state dead.

    Returns:
        the new state, at the start of the next round, and a `Verdict`.

    Raises:
        StaleScoresError: the scores belong to another state.
        StepOrderError: the state has not been scored.
        ArgumentError: the logits have another shape.
    """
    check_phase(check_state(state, "accept"), "accept", (SCORED,), "call score first")
    if not isinstance(scores, Scores):
        refuse("scores", "the Scores that score returned", type(scores).__name__, "pass its second result", ArgumentTypeError)
    if scores.stamp is not state.lease.stamp:
        raise StaleScoresError("scores: expected the scores of this very state, got those of another. Fix: call score on this state again.")
    config = state.config
    shape = (config.max_num_reqs, config.num_speculative_tokens + 1, state.lease.models["target"].vocab_size)
    logits = scores.logits
    if not isinstance(logits, torch.Tensor) or tuple(logits.shape) != shape or not logits.is_floating_point():
        found = f"{list(logits.shape)} {logits.dtype}" if isinstance(logits, torch.Tensor) else type(logits).__name__
        refuse("scores.logits", f"float logits {list(shape)}, a torch tensor", found, "change values, not the shape")
    step = Transition(state, "accept", donate=donate)
    width = shape[1]
    window, batch = step.window("target", VERIFY, width, limit=config.max_model_len, all_logits=True)
    return _accept(step, window, batch, scores.logits.detach().reshape(-1, shape[2]))


def verify(state: SpecState, target: Model, *, donate: bool = False) -> tuple[SpecState, Verdict]:
    """`score`, then `accept`: run the target once and commit what the rule keeps.

    Args:
        state: a state with drafts, or without a drafter (plain decoding).
        target: the target the state was made for.
        donate: reuse the state's buffers and leave the state dead.

    Returns:
        the new state, at the start of the next round, and a `Verdict`.

    Raises:
        StepOrderError, ModelError, PoolExhaustedError: as for `score`.
    """
    step = _open_scoring(state, target, "verify", donate)
    window, batch, logits = step.score(target)
    return _accept(step, window, batch, logits)


def step_round(
    state: SpecState,
    target: Model,
    drafter: Drafter | None,
    *,
    num_draft: int | list[int] | torch.Tensor | None = None,
    donate: bool = False,
) -> tuple[SpecState, Verdict]:
    """One turn of the loop: `prefill`, K - 1 times `decode`, `verify`.

    Args:
        state: a state at the start of a round.
        target, drafter: the models the state was made for.
        num_draft: as for `prefill`.
        donate: reuse the state's buffers and leave the state dead. States in between are always reused. If a model raises in
            mid-round the drafts are dropped and the state lives on at the start of the round.

    Returns:
        the new state and the round's `Verdict`.
    """
    if drafter is None:
        if num_draft is not None and (type(num_draft) is not int or num_draft != 0):
            refuse("num_draft", "None or 0 without a drafter", repr(num_draft)[:60], "pass a drafter")
        return verify(state, target, donate=donate)
    check_partner("target", target, check_state(state, "step_round").lease.models["target"], state.lease.target.pool)
    newest, _ = prefill(state, drafter, num_draft=num_draft, donate=donate)
    try:
        for _ in range(state.config.num_speculative_tokens - 1):
            newest, _ = decode(newest, drafter, donate=True)
        return verify(newest, target, donate=True)
    except BaseException:
        if donate:
            revive(state, newest)
        raise


def _drafting_step(
    state: SpecState, drafter: Drafter, name: str, num_draft: object, *, first: bool, donate: bool
) -> tuple[SpecState, Draft]:
    partner_model(state, None, drafter)
    if not hasattr(drafter, "first"):
        refuse("drafter", "a drafter", type(drafter).__name__, "call verify alone to decode without drafts", ArgumentTypeError)
    step = Transition(state, name, donate=donate)
    if first:
        drafter.first(step, step.wanted(num_draft))
    else:
        drafter.next(step)
    count = 1 if first else step.draft_steps + 1
    draft = Draft(step.drafts(), step.fields.num_draft.clone(), count)
    return step.close(DRAFTING, draft_steps=count), draft


def _open_scoring(state: SpecState, target: Model, name: str, donate: bool) -> Transition:
    lease = check_state(state, name).lease
    expected = (DRAFTING,) if lease.draft is not None else (ROUND_START, DRAFTING)
    check_phase(
        state, name, expected, "call prefill first (num_draft=0 drafts nothing but keeps the drafter in step), and accept after score"
    )
    check_partner("target", target, lease.models["target"], lease.target.pool)
    return Transition(state, name, donate=donate)


def _accept(step: Transition, window: Window, batch: ForwardBatch, logits: torch.Tensor) -> tuple[SpecState, Verdict]:
    """Choose the target's tokens, match, commit; the rest of `verify` after the forward."""
    choice = step.choose("target", logits, window, batch, stream=TARGET)
    fields, rows, width = step.fields, step.config.max_num_reqs, window.width
    out = torch.empty(2 * width + 4, rows, dtype=torch.int32, device=step.config.device)
    tokens, origin = out[:width].view(rows, width), out[width : 2 * width].view(rows, width)
    num_accepted, num_emitted, num_drafted, bad_row = out[2 * width :].unbind()
    accept_matching_(
        chosen=choice.tokens,
        bad=choice.bad,
        row_limit=fields.row_limit,
        stop_ids=fields.stop_ids,
        tokens=fields.tokens,
        num_tokens=fields.num_tokens,
        num_draft=fields.num_draft,
        num_drafted=fields.num_drafted,
        is_live=fields.is_live,
        finish_reason=fields.finish_reason,
        bad_row=fields.bad_row,
        out_tokens=tokens,
        out_origin=origin,
        out_num_accepted=num_accepted,
        out_num_emitted=num_emitted,
        out_num_drafted=num_drafted,
        out_bad_row=bad_row,
    )
    step.target = step.target.settle()
    verdict = Verdict(tokens, num_accepted, num_emitted, num_drafted, origin, fields.finish_reason.clone(), bad_row)
    return step.close(ROUND_START), verdict
