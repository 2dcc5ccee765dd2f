"""The steps of a round. Each takes a state and returns a new state and what happened.

    state, draft = prefill(state, drafter)      # draft step 0: feed what was committed, draft one token
    state, draft = decode(state, drafter)       # one more draft token, K - 1 times
    state, verdict = verify(state, target)      # score, then accept

Steps are pure: the state they are given stays as it was, and the same state and inputs give the same new state. With
`donate=True` a step reuses its input's buffers, and the input is dead from then on.
"""

from dataclasses import dataclass, fields

import jax

from funcspec.drafters.base import Drafter
from funcspec.errors import ArgumentTypeError, StaleScoresError, refuse
from funcspec.models.base import Array, Model
from funcspec.partners import check_partner, partner_model
from funcspec.state import DRAFTING, ROUND_START, SCORED, SpecState, check_phase, check_state
from funcspec.transitions import Transition, open_step
from funcspec.transitions.torch import revive


@dataclass(frozen=True)
class Draft:
    """This round's drafts so far; a copy that no later step touches.

    Attributes:
        tokens: [R, K] int32 drafts in target ids, -1 where there is none.
        num_draft: [R] int32, drafts planned for the round.
        step: how many draft steps the round has had, at most K.
    """

    tokens: Array
    num_draft: Array
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

    tokens: Array
    num_accepted: Array
    num_emitted: Array
    num_drafted: Array
    origin: Array
    finish_reason: Array
    bad_row: Array


@dataclass(frozen=True)
class Scores:
    """The target's logits over a round, for `accept`; replace `logits` to decode in your own way.

    Attributes:
        logits: [R, K + 1, V]; place j of row r judges draft j, the place after the last draft is for the bonus token.
        stamp: identity of the state the scores belong to.
    """

    logits: Array
    stamp: object


# What happened in a step leaves a JAX program like any other arrays.
jax.tree_util.register_dataclass(Draft, data_fields=["tokens", "num_draft"], meta_fields=["step"])
jax.tree_util.register_dataclass(Verdict, data_fields=[field.name for field in fields(Verdict)], meta_fields=[])
jax.tree_util.register_dataclass(Scores, data_fields=["logits"], meta_fields=["stamp"])


def prefill(
    state: SpecState,
    drafter: Drafter,
    *,
    num_draft: int | list[int] | Array | None = None,
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
    _, logits = step.score(target)
    stamp = object() if state.framework == "torch" else None
    shape = (step.config.max_num_reqs, step.config.num_speculative_tokens + 1, target.vocab_size)
    return step.close(SCORED, stamp=stamp), Scores(step.copied(logits.reshape(shape)), stamp)


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
    step = open_step(state, "accept", donate=donate)
    step.check_array("scores.logits", scores.logits, shape, "a float", "change values, not the shape")
    verdict = Verdict(**step.accept(step.verified_window(), step.detached(scores.logits).reshape(-1, shape[2])))
    return step.close(ROUND_START), verdict


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
    verdict = Verdict(**step.accept(*step.score(target)))
    return step.close(ROUND_START), verdict


def step_round(
    state: SpecState,
    target: Model,
    drafter: Drafter | None,
    *,
    num_draft: int | list[int] | Array | None = None,
    donate: bool = False,
) -> tuple[SpecState, Verdict]:
    """One turn of the loop: `prefill`, K - 1 times `decode` (never for a drafter of one pass), `verify`.

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
    check_partner("target", target, check_state(state, "step_round").lease.models["target"], state.framework)
    newest, _ = prefill(state, drafter, num_draft=num_draft, donate=donate)
    try:
        for _ in range(0 if getattr(drafter, "one_pass", False) else state.config.num_speculative_tokens - 1):
            newest, _ = decode(newest, drafter, donate=True)
        return verify(newest, target, donate=True)
    except BaseException:
        if donate and state.framework == "torch":
            revive(state, newest)
        raise


def _drafting_step(
    state: SpecState, drafter: Drafter, name: str, num_draft: object, *, first: bool, donate: bool
) -> tuple[SpecState, Draft]:
    partner_model(state, None, drafter)
    if not hasattr(drafter, "first"):
        refuse("drafter", "a drafter", type(drafter).__name__, "call verify alone to decode without drafts", ArgumentTypeError)
    step = open_step(state, name, donate=donate)
    step.proposes_points, step.drafts_argmax = drafter.proposal != "sampled", drafter.proposal == "argmax"
    if first:
        drafter.first(step, step.wanted(num_draft))
    else:
        drafter.next(step)
    # A step past the last place drafts nothing, and is not counted.
    count = 1 if first else min(step.draft_steps + 1, max(step.config.num_speculative_tokens, 1))
    draft = Draft(step.drafts(), step.copied(step.fields.num_draft), count)
    return step.close(DRAFTING, draft_steps=count), draft


def _open_scoring(state: SpecState, target: Model, name: str, donate: bool) -> Transition:
    partners = check_state(state, name).lease.models
    expected = (DRAFTING,) if "draft" in partners else (ROUND_START, DRAFTING)
    check_phase(
        state, name, expected, "call prefill first (num_draft=0 drafts nothing but keeps the drafter in step), and accept after score"
    )
    check_partner("target", target, partners["target"], state.framework)
    return open_step(state, name, donate=donate)
