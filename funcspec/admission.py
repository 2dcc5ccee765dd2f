"""Who is in the state: making it, taking prompts in, letting rows go. Outside the steps of a round."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from funcspec.carried import FEATURES, ROPE_POSITIONS
from funcspec.config import SpecConfig, check_config
from funcspec.constants import NO_TOKEN
from funcspec.drafters.base import Drafter
from funcspec.errors import CapacityError, ModelError, check_bool, refuse
from funcspec.kernels.acceptance import AT_LENGTH, NOT_FINISHED, STOPPED
from funcspec.kernels.choose_tokens import choose_tokens_, choose_tokens_partials
from funcspec.leases import JaxLease, Lease, host_copy
from funcspec.models.base import Model
from funcspec.noise import TARGET
from funcspec.partners import (
    check_device,
    check_drafter,
    check_features,
    check_framework,
    check_model,
    check_partner,
    check_rope,
    framework_of,
    partner_model,
    partner_of,
)
from funcspec.requests import Request, validate
from funcspec.state import ARRAY_FIELDS, BLOCK_TABLES, ROUND_START, SpecState, check_fields, check_phase, check_state, field_shape
from funcspec.transitions import open_step

DEFAULT_CHUNK = 512


@dataclass(frozen=True)
class Admitted:
    """What `admit` did, one entry a prompt.

    Attributes:
        rows: the row each prompt went to.
        tokens: the first token of each, sampled by the target.
        finish_reason: 0, or why a row ended at once (1 stop id, 2 length).
        bad_row: 1 where the logits were not finite.
    """

    rows: tuple[int, ...]
    tokens: tuple[int, ...]
    finish_reason: tuple[int, ...]
    bad_row: tuple[int, ...]


def init(config: SpecConfig, target: Model, drafter: Drafter | None = None) -> SpecState:
    """Make an empty state for a target and a drafter, with all buffers preallocated.

    Args:
        config: capacities, rule, device.
        target: the model whose output is kept.
        drafter: who drafts; None for plain decoding in the shape of speculative passes.

    Returns:
        a state without live rows.

    Raises:
        ModelError: target, drafter and configuration do not fit; names both values.

    Example:
        >>> import funcspec as fs
        >>> config = fs.SpecConfig(max_num_reqs=2, max_model_len=32, num_speculative_tokens=3, rule=fs.rules.greedy)
        >>> fs.init(config, fs.models.ChecksumModel())
        SpecState(round start, 0 of 2 rows live, K=3, L=32, rules.greedy)
    """
    check_config(config)
    check_model("target", target)
    check_device("target", target, config)
    if target.max_len < config.max_model_len:
        raise ModelError(
            f"target: expected max_len of at least max_model_len = {config.max_model_len}, got {target.max_len}. "
            "Fix: lower max_model_len, or use a target with a longer context."
        )
    draft_model = None
    if drafter is not None:
        check_drafter(drafter)
        draft_model = drafter.kv_model
        if draft_model is not None:
            check_model("drafter", draft_model)
            check_device("drafter", draft_model, config)
        drafter.init(config, target)
        if draft_model is not None:
            check_features(draft_model, target)
            check_rope(draft_model, target)
    check_framework(config, target, draft_model)
    partners = {"target": partner_of(target)} | ({} if draft_model is None else {"draft": partner_of(draft_model)})
    lease = (JaxLease if framework_of(target) == "jax" else Lease).empty(config, partners)
    return SpecState(config, lease)


def admit(
    state: SpecState,
    target: Model,
    drafter: Drafter | None,
    prompts: Sequence[Sequence[int]],
    *,
    seeds: Sequence[int] | None = None,
    temperature: float | Sequence[float] = 0.0,
    max_tokens: int | Sequence[int] | None = None,
    min_tokens: int | Sequence[int] = 0,
    stop_ids: Sequence[int] | Sequence[Sequence[int]] = (),
    rope_positions: Sequence[Any] | None = None,
    rows: Sequence[int] | None = None,
    chunk: int | None = None,
    donate: bool = False,
) -> tuple[SpecState, Admitted]:
    """Take prompts into free rows: into the KV of both models, and sample the first token of each.

    Prompts are ingested one by one, so that what a row gets does not depend on its company. Blocks for the whole row are
    reserved here; no later step can run out of them except when it copies on write.

    Args:
        state: a state at the start of a round.
        target, drafter: the models the state was made for.
        prompts: token ids of each prompt, at least one id and at most max_model_len - 1.
        seeds: a 64-bit seed for each prompt. None draws fresh ones; they are in the state, so the run can be replayed.
        temperature: 0 (greedy) or at least 0.01; one number, or one for each prompt.
        max_tokens: most tokens to generate, at least 1; None up to max_model_len.
        min_tokens: least tokens to generate before a stop id may come, which until then is as if its logit were -inf; needs
            `SpecConfig.allows_min_tokens`. A number, or one for each prompt.
        stop_ids: ids that end a row (they are emitted): one list for all prompts, or one for each.
        rope_positions: for a target with rotary positions of its own (M-RoPE): for each prompt [A, len(prompt)] integers, or None for those
            of plain text. What is generated goes on behind the largest of them, on all axes alike.
        rows: free rows to use; None takes the lowest ones.
        chunk: tokens ingested in one pass; None is 512. Smaller chunks give the same small buffers, KV to rounding.
        donate: reuse the state's buffers and leave the state dead.

    Returns:
        the new state and an `Admitted`.

    Raises:
        ArgumentError, ArgumentTypeError: a prompt or setting is out of range.
        CapacityError: no free row, a prompt or a stop list too long.
        PoolExhaustedError: too few blocks. In all cases nothing was written and the state stays usable.
    """
    lease = check_state(state, "admit").lease
    check_partner("target", target, lease.models["target"], state.framework)
    requests = validate(state.config, target, prompts, seeds, temperature, max_tokens, min_tokens, stop_ids, rope_positions)
    return admit_requests(state, target, drafter, requests, rows=rows, chunk=chunk, donate=donate)


def admit_requests(
    state: SpecState,
    target: Model,
    drafter: Drafter | None,
    requests: list[Request],
    *,
    rows: Sequence[int] | None = None,
    chunk: int | None = None,
    donate: bool = False,
) -> tuple[SpecState, Admitted]:
    """`admit` for requests that `validate` has checked against the same configuration."""
    check_phase(check_state(state, "admit"), "admit", (ROUND_START,), "finish the round with verify first")
    chosen = free_rows(state, len(requests), rows)
    if chunk is not None and (not isinstance(chunk, int) or isinstance(chunk, bool) or chunk < 1):
        refuse("chunk", "a positive int or None", repr(chunk), "leave it out for the default")
    draft_model = partner_model(state, target, drafter)
    if drafter is not None:
        check_drafter(drafter)
    step = open_step(state, "admit", donate=donate)
    size = chunk or DEFAULT_CHUNK
    models = {"target": target} if draft_model is None else {"target": target, "draft": draft_model}
    reach = {role: min(model.max_len, state.config.max_model_len) for role, model in models.items()}
    blocks = {role: step.reserve(role, _block_counts(requests, reach[role], state.config)) for role in models}
    firsts, flags, last_features = [], [], []
    lag, draft_limit = (0, 0) if draft_model is None else (step.partners["draft"].lag, draft_model.max_len)
    held = [min(len(request.prompt) - lag, draft_limit) for request in requests]
    for index, request in enumerate(requests):
        taken = {role: blocks[role][index] for role in models}
        found = step.ingest_row(models, taken, request.prompt, {"target": len(request.prompt), "draft": held[index]}, size, request.rope)
        token, bad = _first_token(found.logits, request, state.config.device)
        firsts.append(token)
        flags.append(bad)
        if found.features is not None:
            last_features.append(found.features[-1:])
    reasons = [_first_reason(request, token) for request, token in zip(requests, firsts, strict=True)]
    step.put_rows(chosen, _row_values(state.config, requests, firsts, reasons, flags, held), blocks)
    if last_features:
        step.put_carried(chosen, {FEATURES: torch.stack(last_features)})
    turned = [request.rope for request in requests if request.rope is not None]
    if turned:
        step.put_carried(chosen, {ROPE_POSITIONS: np.stack(turned)})
    return step.close(ROUND_START), Admitted(tuple(chosen), tuple(firsts), tuple(reasons), tuple(flags))


def release(state: SpecState, rows: Sequence[int], *, donate: bool = False) -> SpecState:
    """Let rows go: they become idle and their blocks return to the pools once no other state holds them.

    Args:
        state: any live state.
        rows: distinct row numbers; releasing an idle row does nothing.
        donate: reuse the state's buffers and leave the state dead.

    Raises:
        ArgumentError: a row number is out of range or twice in the list.
    """
    check_state(state, "release")
    numbers = row_numbers(rows, state.config)
    step = open_step(state, "release", donate=donate)
    idle = {name: np.full((len(numbers), *field_shape(state.config, name)[1:]), ARRAY_FIELDS[name]["fill"]) for name in ARRAY_FIELDS}
    values = {name: value for name, value in idle.items() if name not in BLOCK_TABLES}
    step.put_rows(numbers, values, {role: [None] * len(numbers) for role in state.lease.models})
    return step.close(step.phase, stamp=step.stamp, draft_steps=step.draft_steps)


def truncate(state: SpecState, lengths: Mapping[int, int], *, finish: bool = False, donate: bool = False) -> SpecState:
    """Cut rows back: drop their newest committed tokens, as if they had never come.

    What follows is generated anew from the token that is then the newest. A row that is generated on writes where older states may
    still read, so the next step gives it its own copy of those blocks.

    Args:
        state: a state at the start of a round.
        lengths: by row, the committed length to keep: at least the prompt and one token, at most the present length.
        finish: whether the rows end there with reason "stop id"; else finished rows among them are live again if they may grow.
        donate: reuse the state's buffers and leave the state dead.

    Returns:
        the new state. Waits for the GPU.

    Raises:
        StepOrderError: the state is in mid-round.
        ArgumentError: a row is idle or no row, or a length is out of range. Nothing was written.

    Example:
        >>> import funcspec as fs
        >>> target = fs.models.ChecksumModel()
        >>> config = fs.SpecConfig(max_num_reqs=1, max_model_len=32, num_speculative_tokens=0, rule=fs.rules.greedy)
        >>> state, _ = fs.admit(fs.init(config, target), target, None, [[5, 6, 7]])
        >>> longer, _ = fs.verify(state, target)
        >>> shorter = truncate(longer, {0: 4})
        >>> shorter.num_tokens.tolist(), fs.verify(shorter, target)[1].tokens.tolist()
        ([4], [[1]])
    """
    check_phase(check_state(state, "truncate"), "truncate", (ROUND_START,), "finish the round with verify first")
    if not isinstance(lengths, Mapping) or not lengths:
        refuse("lengths", "a length for at least one row", repr(lengths)[:60], "pass {row: length}")
    check_bool("finish", finish)
    check_fields(state)
    rows = row_numbers(list(lengths), state.config)
    held = {name: host_copy(getattr(state, name))[rows] for name in ("tokens", "num_tokens", "prompt_len", "row_limit", "draft_len")}
    for row, most, prompt in zip(rows, held["num_tokens"].tolist(), held["prompt_len"].tolist(), strict=True):
        length = lengths[row]
        if most == 0:
            refuse("lengths", "rows that hold a request", f"row {row}, which is idle", "leave it out")
        if not isinstance(length, int) or isinstance(length, bool) or not prompt < length <= most:
            refuse("lengths", f"a length from {prompt + 1} to {most} for row {row}", repr(length), "keep the prompt and one token")
    kept = np.array([lengths[row] for row in rows], np.int32)
    places = np.arange(state.config.max_model_len)
    grows = ~np.array(finish) & (kept < held["row_limit"])
    step = open_step(state, "truncate", donate=donate)
    values = {
        "tokens": np.where(places < kept[:, None], held["tokens"], NO_TOKEN),
        "num_tokens": kept,
        # The newest token is fed again, so that drafting goes on from its logits.
        "draft_len": np.minimum(held["draft_len"], kept - 1),
        "is_live": grows.astype(np.int32),
        "finish_reason": np.where(grows, NOT_FINISHED, STOPPED if finish else AT_LENGTH),
    }
    step.put_rows(rows, values, {})
    if grows.any():
        step.rewind()
    return step.close(ROUND_START)


def lower_limits(state: SpecState, limits: Mapping[int, int] | int, *, donate: bool = False) -> SpecState:
    """Let rows end earlier than was asked for, while they run.

    Limits only shrink: blocks are reserved for what `admit` was asked for, and no more. A row that has reached its new limit ends at once,
    with reason "length", and keeps its tokens.

    Args:
        state: a state at the start of a round.
        limits: by row, the committed length at which it ends, prompt included, from 1 to its present limit; or one number for all rows
            with a request, which leaves lower limits as they are.
        donate: reuse the state's buffers and leave the state dead.

    Returns:
        the new state. Waits for the GPU.

    Raises:
        StepOrderError: the state is in mid-round.
        ArgumentError: a row is idle or no row, or a limit is out of range. Nothing was written.

    Example:
        >>> import funcspec as fs
        >>> target = fs.models.ChecksumModel()
        >>> config = fs.SpecConfig(max_num_reqs=1, max_model_len=32, num_speculative_tokens=0, rule=fs.rules.greedy)
        >>> state, _ = fs.admit(fs.init(config, target), target, None, [[5, 6, 7]], max_tokens=10)
        >>> state = lower_limits(state, {0: 5})
        >>> state, verdict = fs.verify(state, target)
        >>> state.num_tokens.tolist(), verdict.finish_reason.tolist()
        ([5], [2])
    """
    check_phase(check_state(state, "lower_limits"), "lower_limits", (ROUND_START,), "finish the round with verify first")
    check_fields(state)
    names = ("num_tokens", "row_limit", "min_len", "is_live", "finish_reason")
    held = {name: host_copy(getattr(state, name)) for name in names}
    if isinstance(limits, int) and not isinstance(limits, bool):
        chosen = {row: min(limits, int(held["row_limit"][row])) for row in np.flatnonzero(held["num_tokens"]).tolist()}
    elif isinstance(limits, Mapping) and limits:
        chosen = dict(limits)
    else:
        refuse("limits", "a length for at least one row, or one for all", repr(limits)[:60], "pass {row: length} or a number")
    rows = row_numbers(list(chosen), state.config)
    for row in rows:
        most = int(held["row_limit"][row])
        if most == 0:
            refuse("limits", "rows that hold a request", f"row {row}, which is idle", "leave it out")
        if not isinstance(chosen[row], int) or isinstance(chosen[row], bool) or not 1 <= chosen[row] <= most:
            refuse("limits", f"a length from 1 to {most} for row {row}", repr(chosen[row]), "limits can only be lowered")
    held = {name: values[rows] for name, values in held.items()}
    wanted = np.maximum(np.array([chosen[row] for row in rows], np.int32), held["num_tokens"])
    ends = (held["is_live"] != 0) & (held["num_tokens"] >= wanted)
    values = {
        "row_limit": wanted,
        "num_tokens": held["num_tokens"],
        "min_len": np.minimum(held["min_len"], wanted),
        "is_live": np.where(ends, 0, held["is_live"]),
        "finish_reason": np.where(ends, AT_LENGTH, held["finish_reason"]),
    }
    step = open_step(state, "lower_limits", donate=donate)
    step.put_rows(rows, values, {})
    return step.close(ROUND_START)


def row_numbers(rows: Any, config: SpecConfig) -> list[int]:
    """Refuse what are no distinct row numbers."""
    numbers = list(rows) if isinstance(rows, Sequence) else [rows]
    for row in numbers:
        if not isinstance(row, int) or isinstance(row, bool) or not 0 <= row < config.max_num_reqs:
            refuse("rows", f"row numbers from 0 to {config.max_num_reqs - 1}", repr(row), "use rows of this state")
    if len(set(numbers)) != len(numbers):
        refuse("rows", "distinct rows", numbers, "name every row once")
    return numbers


def free_rows(state: SpecState, count: int, rows: Any) -> list[int]:
    """Choose free rows for `count` requests, or check those that a caller named."""
    free = [row for row, blocks in enumerate(state.lease.blocks("target")) if blocks is None]
    if rows is None:
        if count > len(free):
            found = f"{count} prompts for {len(free)} free rows"
            refuse("prompts", "a free row for each prompt", found, "release finished rows, or raise max_num_reqs", CapacityError)
        return free[:count]
    numbers = row_numbers(rows, state.config)
    if len(numbers) != count:
        refuse("rows", f"{count} rows, one a prompt", len(numbers), "name one row for each prompt")
    for row in numbers:
        if row not in free:
            refuse("rows", f"free rows ({free})", row, "release the row first", CapacityError)
    return numbers


def _block_counts(requests: list[Request], longest: int, config: SpecConfig) -> list[int]:
    ahead = config.num_speculative_tokens + 1
    return [-(-min(longest, request.row_limit + ahead) // config.block_size) for request in requests]


def _first_token(logits: torch.Tensor | None, request: Request, device: str) -> tuple[int, int]:
    """Sample the token after the prompt, with the same kernel and noise as every later token."""
    assert logits is not None
    if request.min_len > len(request.prompt):
        logits = logits.clone()
        logits[:, request.stop_ids] = -float("inf")
    partials = choose_tokens_partials(logits.shape[1])
    low, high = request.seed
    integers = torch.tensor([0, len(request.prompt) - 1, low, high, NO_TOKEN, 0], dtype=torch.int32).to(device)
    choose_tokens_(
        logits=logits,
        logits_indices=None,
        token_rows=integers[0:1],
        positions=integers[1:2],
        temperature=torch.tensor([request.temperature], dtype=torch.float32).to(device),
        seed=integers[2:4].view(1, 2),
        stream=TARGET,
        nonce_length=None,
        token_ids=None,
        out_tokens=integers[4:5],
        out_bad=integers[5:6],
        scratch_scores=torch.zeros(1, partials, device=device),
        scratch_tokens=torch.zeros(1, partials, dtype=torch.int32, device=device),
        scratch_bad=torch.zeros(1, partials, dtype=torch.int32, device=device),
    )
    _, _, _, _, token, bad = integers.tolist()
    return token, bad


def _first_reason(request: Request, token: int) -> int:
    if token in request.stop_ids:
        return STOPPED
    return AT_LENGTH if len(request.prompt) + 1 >= request.row_limit else NOT_FINISHED


def _row_values(
    config: SpecConfig,
    requests: list[Request],
    firsts: list[int],
    reasons: list[int],
    flags: list[int],
    draft_lens: list[int],
) -> dict[str, list[Any]]:
    """What the fields of admitted rows hold; every one is given, so that nothing of a row's former owner survives."""

    def pad(values: list[int], width: int) -> list[int]:
        return values + [NO_TOKEN] * (width - len(values))

    return {
        "tokens": [pad([*request.prompt, first], config.max_model_len) for request, first in zip(requests, firsts, strict=True)],
        "num_tokens": [len(request.prompt) + 1 for request in requests],
        "prompt_len": [len(request.prompt) for request in requests],
        "row_limit": [request.row_limit for request in requests],
        "min_len": [request.min_len for request in requests],
        "draft_len": draft_lens,
        "num_draft": [0] * len(requests),
        "num_drafted": [0] * len(requests),
        "is_live": [int(reason == NOT_FINISHED) for reason in reasons],
        "finish_reason": reasons,
        "bad_row": flags,
        "temperature": [request.temperature for request in requests],
        "seed": [list(request.seed) for request in requests],
        "stop_ids": [pad(request.stop_ids, config.max_num_stop_ids) for request in requests],
    }
