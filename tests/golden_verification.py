"""Golden archives of the verification of drafts."""

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import numpy as np
import torch

from funcspec import exact
from funcspec.constants import NO_TOKEN
from funcspec.kernels.acceptance import accept_matching_
from funcspec.kernels.batch_rejection import rejection_greedy_sample_, rejection_random_sample_
from funcspec.kernels.ratio import judge_drafts_
from funcspec.kernels.rejection import rejection_sample_

from .golden_case import POISON, Adapter, Case
from .golden_choices import log_probabilities, words


def rejection_greedy_sample(case: Case) -> None:
    out = case.poisoned("output_token_ids")
    case.run(
        rejection_greedy_sample_,
        **{name: case.tensor(name) for name in ("cu_num_draft_tokens", "draft_token_ids", "target_argmax")},
        bonus_token_ids=case.tensor("bonus_token_ids")[:, 0].contiguous(),
        is_greedy=case.optional("is_greedy"),
        uniform_probs=case.optional("uniform_probs"),
        conditional_rates=case.optional("synthetic_conditional_rates"),
        out_token_ids=out,
    )
    case.expect(output_token_ids=out)


def rejection_random_sample(case: Case) -> None:
    out = case.poisoned("output_token_ids")
    names = ("cu_num_draft_tokens", "draft_token_ids", "target_probs", "recovered_token_ids", "uniform_probs", "is_greedy")
    case.run(
        rejection_random_sample_,
        **{name: case.tensor(name) for name in names},
        draft_probs=case.optional("draft_probs"),
        bonus_token_ids=case.tensor("bonus_token_ids")[:, 0].contiguous(),
        conditional_rates=case.optional("synthetic_conditional_rates"),
        out_token_ids=out,
    )
    case.expect(output_token_ids=out)


def rejection_sample(case: Case) -> None:
    """By the given uniform numbers. In unused places, where the reference leaves scratch, ours has -1."""
    out = {name: case.poisoned(name) for name in case.outputs}
    is_block, has_rates = case.inputs["use_block_verification"], "synthetic_conditional_rates" in case.inputs
    case.run(
        rejection_sample_,
        target_logits=case.tensor("target_logits"),
        draft_logits=case.optional("draft_logits"),
        draft_token_ids=case.tensor("draft_sampled"),
        **{name: case.tensor(name) for name in ("cu_num_logits", "idx_mapping", "temperature")},
        coins=case.place(words(case.inputs["accept_uniform"])),
        noise_words=case.place(words(case.inputs["resample_uniform"], bool(case.inputs["use_fp64"]))),
        rule="rates" if has_rates else "block" if is_block else "ratio",
        conditional_rates=case.optional("synthetic_conditional_rates"),
        out_token_ids=out["sampled"],
        out_num_sampled=out["num_sampled"],
    )
    expected = np.where(case.written["sampled"], case.outputs["sampled"], NO_TOKEN)
    np.testing.assert_array_equal(out["sampled"].cpu().numpy(), expected)
    np.testing.assert_array_equal(out["num_sampled"].cpu().numpy(), case.outputs["num_sampled"])


def accept(case: Case, drafts: list[np.ndarray], chosen: list[np.ndarray], live: np.ndarray, width: int) -> np.ndarray:
    """Run greedy acceptance over rows of drafts and the target's choices; the emitted tokens, -1 in unused places."""
    rows = len(drafts)

    def filled(*shape: int, value: int = POISON) -> torch.Tensor:
        return torch.full(shape, value, dtype=torch.int32, device=case.device)

    tokens = np.full((rows, width + 1), NO_TOKEN, np.int32)
    choices = np.full((rows, width), 0, np.int32)
    for row, (row_drafts, row_chosen) in enumerate(zip(drafts, chosen, strict=True)):
        tokens[row, 0] = 0  # the newest committed token
        tokens[row, 1 : 1 + len(row_drafts)] = row_drafts
        choices[row, : len(row_chosen)] = row_chosen
    num_draft = np.array([len(row_drafts) for row_drafts in drafts], np.int32)
    out: dict[str, Any] = {f"out_{name}": filled(rows) for name in ("num_drafted", "num_accepted", "num_emitted", "bad_row")}
    out_tokens = filled(rows, width)
    case.run(
        accept_matching_,
        chosen=case.place(choices.ravel()),
        bad=filled(rows * width, value=0),
        row_limit=filled(rows, value=width + 2),
        stop_ids=filled(rows, 1, value=NO_TOKEN),
        tokens=case.place(tokens),
        num_tokens=filled(rows, value=1),
        num_draft=case.place(num_draft),
        num_drafted=case.place(num_draft),
        is_live=case.place(live.astype(np.int32)),
        finish_reason=filled(rows, value=0),
        bad_row=filled(rows, value=0),
        out_tokens=out_tokens,
        out_origin=filled(rows, width),
        **out,
    )
    emitted = out_tokens.cpu().numpy()
    np.testing.assert_array_equal((emitted != NO_TOKEN).sum(1), out["out_num_emitted"].cpu().numpy())
    return emitted


def accept_matching(case: Case) -> None:
    """By the exact rule of rounds."""
    ends = case.inputs["cu_num_draft_tokens"]
    spans = [slice(begin, end) for begin, end in zip([0, *ends[:-1]], ends, strict=True)]
    drafts = [case.inputs["draft_token_ids"][span] for span in spans]
    bonus = case.inputs["bonus_token_ids"]
    chosen = [np.append(case.inputs["target_argmax"][span], bonus[row, 0]) for row, span in enumerate(spans)]
    live = case.inputs.get("is_greedy", np.ones(len(ends), bool))
    emitted = accept(case, drafts, chosen, live, case.number("max_spec_len") + 1)
    expected = np.where(case.written["output_token_ids"], case.outputs["output_token_ids"], NO_TOKEN)
    np.testing.assert_array_equal(emitted, expected)


def kept_drafts(
    case: Case, drafts: list[np.ndarray], target: list[np.ndarray], drawn: list[np.ndarray] | None, uniforms: list[np.ndarray], width: int
) -> list[int]:
    """Run the ratio test with given uniforms at temperature 1; how many drafts of each row are kept. Logits are given as scores."""
    rows, vocabulary = len(drafts), target[0].shape[1]
    logits = np.zeros((rows, width, vocabulary), np.float32)
    draft_logits = np.zeros((rows, width - 1, vocabulary if drawn is not None else 0), np.float32)
    normalisers = np.zeros((rows, width - 1, 2), np.int32)
    coins = np.zeros((rows, width), np.int64)
    tokens = np.full((rows, width + 1), NO_TOKEN, np.int32)
    for row, row_drafts in enumerate(drafts):
        count = len(row_drafts)
        tokens[row, 1 : 1 + count] = row_drafts
        logits[row, :count] = target[row][:count]
        coins[row, :count] = np.floor(uniforms[row][:count].astype(np.float64) * 2**32)
        if drawn is not None and count:
            draft_logits[row, :count, : drawn[row].shape[1]] = drawn[row][:count]
            normalisers[row, :count] = exact.normalisers(draft_logits[row, :count])
    counts = np.array([len(row_drafts) for row_drafts in drafts], np.int32)
    verdicts = case.place(np.full(rows * width, POISON, np.int32))
    case.run(
        judge_drafts_,
        logits=case.place(logits.reshape(rows * width, vocabulary)),
        positions=case.place(np.zeros(rows * width, np.int32)),
        temperature=case.place(np.ones(rows, np.float32)),
        seed=case.place(np.zeros((rows, 2), np.int32)),
        tokens=case.place(tokens),
        num_tokens=case.place(np.ones(rows, np.int32)),
        num_draft=case.place(counts),
        num_drafted=case.place(counts),
        is_live=case.place(np.ones(rows, np.int32)),
        is_point=case.place(np.full(rows, drawn is None, np.int32)),
        draft_logits=case.place(draft_logits),
        draft_normalisers=case.place(normalisers),
        coins=case.place(coins.reshape(-1).astype(np.uint32).view(np.int32)),
        out_verdicts=verdicts,
        out_indices=torch.empty_like(verdicts),
        out_bad=torch.empty_like(verdicts),
        out_normalisers=verdicts.new_empty(rows * width, 2),
        scratch=verdicts.new_empty(rows * width, -(-vocabulary // 1024), 4),
    )
    return [row.index(next(code for code in row if code != exact.ACCEPTED)) for row in verdicts.view(rows, width).tolist()]


def judge_drafts(case: Case) -> None:
    """By the exact rule of rounds; the token after a rejection is an input of the reference."""
    ends, width = case.inputs["cu_num_draft_tokens"], case.number("max_spec_len") + 1
    spans = [slice(begin, end) for begin, end in zip([0, *ends[:-1]], ends, strict=True)]
    sampled = [row for row in range(len(ends)) if not case.inputs["is_greedy"][row]]
    target, proposed = log_probabilities(case.inputs["target_probs"]), case.inputs.get("draft_probs")
    drawn = None if proposed is None else [log_probabilities(proposed)[spans[row]] for row in sampled]
    drafts = [case.inputs["draft_token_ids"][spans[row]] for row in sampled]
    uniforms = [case.inputs["uniform_probs"][spans[row]] for row in sampled]
    found = np.full_like(case.outputs["output_token_ids"], NO_TOKEN)
    if sampled and width > 1:
        kept = kept_drafts(case, drafts, [target[spans[row]] for row in sampled], drawn, uniforms, width)
    else:
        kept = [0] * len(sampled)
    for row, row_drafts, count in zip(sampled, drafts, kept, strict=True):
        last = case.inputs["recovered_token_ids"][spans[row]][count] if count < len(row_drafts) else case.inputs["bonus_token_ids"][row, 0]
        found[row, : count + 1] = [*row_drafts[:count], last]
    expected = np.where(case.written["output_token_ids"], case.outputs["output_token_ids"], NO_TOKEN)
    np.testing.assert_array_equal(found, expected)


def accept_or_judge(case: Case) -> None:
    """By the exact rules of rounds: greedy rows, and how many drafts of sampled ones are kept by the ratio test."""
    greedy = case.inputs["temperature"][case.inputs["idx_mapping"]] == 0
    starts = case.inputs["cu_num_logits"]
    spans = list(pairwise(starts))
    drafts = [case.inputs["draft_sampled"][begin + 1 : end] for begin, end in spans]
    chosen = [case.inputs["target_logits"][begin:end].argmax(1) for begin, end in spans]
    emitted = accept(case, drafts, chosen, greedy, case.number("num_speculative_steps") + 1)
    expected = np.where(case.written["sampled"], case.outputs["sampled"], NO_TOKEN)
    np.testing.assert_array_equal(emitted[greedy], expected[greedy])
    np.testing.assert_array_equal(emitted[~greedy], NO_TOKEN)
    sampled = np.flatnonzero(~greedy).tolist()
    if not sampled or case.inputs["use_block_verification"]:
        return
    states = case.inputs["idx_mapping"]
    drawn = None
    if "draft_logits" in case.inputs:
        temperature = case.inputs["temperature"][states][:, None, None]
        drawn = [case.inputs["draft_logits"][states[row]] / temperature[row] for row in sampled]
        width = case.inputs["target_logits"].shape[1]
        drawn = [np.pad(part, ((0, 0), (0, max(width - part.shape[1], 0))), constant_values=-np.inf)[:, :width] for part in drawn]
    scores = [case.inputs["target_logits"][begin:end] for begin, end in spans]
    uniforms = [case.inputs["accept_uniform"][begin:end] for begin, end in spans]
    picked = ([part[row] for row in sampled] for part in (drafts, scores))
    kept = kept_drafts(case, *picked, drawn, [uniforms[row] for row in sampled], case.number("num_speculative_steps") + 1)
    np.testing.assert_array_equal(np.array(kept) + 1, case.outputs["num_sampled"][sampled])


def has_greedy_row_or_ratios(tags: frozenset[str], inputs: Callable[[str], np.ndarray]) -> bool:
    greedy = bool((inputs("temperature")[inputs("idx_mapping")] == 0).any())
    return "synthetic" not in tags and (greedy or "block" not in tags)


def draws_what_it_could(tags: frozenset[str], inputs: Callable[[str], np.ndarray]) -> bool:
    """Whether no draft has a probability of 0 in its own row; the reference rejects such drafts, here they are points."""
    if "synthetic" in tags:
        return False
    drafts = inputs("draft_token_ids")
    real = drafts >= 0
    return "no_draft_probs" in tags or bool((inputs("draft_probs")[np.arange(len(drafts))[real], drafts[real]] > 0).all())


def is_not_synthetic(tags: frozenset[str], inputs: Callable[[str], np.ndarray]) -> bool:
    return "synthetic" not in tags


ADAPTERS: dict[str, tuple[Adapter, ...]] = {
    "rejection_greedy_sample": (Adapter(rejection_greedy_sample), Adapter(accept_matching, covers=is_not_synthetic)),
    "rejection_random_sample": (Adapter(rejection_random_sample), Adapter(judge_drafts, covers=draws_what_it_could)),
    "rejection_sample": (Adapter(rejection_sample), Adapter(accept_or_judge, covers=has_greedy_row_or_ratios)),
}
"""By archive, as in `golden_adapters`."""
