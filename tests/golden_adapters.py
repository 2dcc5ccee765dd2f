"""How each golden archive is run: one adapter a kernel, from the archive's names to the library's."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import torch

from funcspec import exact
from funcspec.constants import NO_TOKEN
from funcspec.kernels.acceptance import accept_matching_
from funcspec.kernels.next_tokens import prepare_next_token_padded_
from funcspec.kernels.op import next_power_of_2
from funcspec.kernels.prefill_inputs import prepare_prefill_inputs_
from funcspec.kernels.ratio import judge_drafts_
from funcspec.kernels.sample_indices import prepare_inputs_padded_
from funcspec.kernels.step_metadata import step_slot_mapping_metadata_
from funcspec.noise import DRAFT

try:
    from funcspec.kernels.choose_tokens import choose_tokens_, choose_tokens_partials
except ImportError:
    choose_tokens_ = choose_tokens_partials = None

POISON = -777


@dataclass(frozen=True)
class Case:
    """One case of an archive, and where to run it.

    Attributes:
        tags: what the case stresses.
        inputs, outputs, written: the archive's arrays by name.
        backend: "reference" or "triton".
        device: of the tensors.
    """

    tags: frozenset[str]
    inputs: Mapping[str, np.ndarray]
    outputs: Mapping[str, np.ndarray]
    written: Mapping[str, np.ndarray]
    backend: str = "reference"
    device: str = "cpu"

    def tensor(self, name: str) -> torch.Tensor:
        """A private copy of an input."""
        return self.place(self.inputs[name])

    def place(self, array: np.ndarray) -> torch.Tensor:
        """A private copy of any array, on the device."""
        return torch.tensor(array, device=self.device)

    def number(self, name: str) -> int:
        """A scalar input."""
        return int(self.inputs[name])

    def poisoned(self, name: str) -> torch.Tensor:
        """A buffer like the output, full of poison."""
        return self.place(np.full_like(self.outputs[name], POISON))

    def table(self) -> torch.Tensor:
        """The block table: the leading columns of a wider buffer."""
        return self.tensor("block_table")[:, : self.number("block_table_num_cols")]

    def expect(self, **actual: torch.Tensor) -> None:
        """Compare whole buffers, written or not, with the archive."""
        assert set(actual) == set(self.outputs)
        for name, array in actual.items():
            np.testing.assert_array_equal(array.cpu().numpy(), self.outputs[name], err_msg=name)


def prepare_prefill_inputs(case: Case) -> None:
    names = ("expanded_input_ids", "expanded_positions", "last_token_indices", "query_start_loc", "seq_lens")
    out = {name: case.poisoned(name) for name in names}
    given = {name: case.tensor(name) for name in ("last_sampled", "idx_mapping", "query_start_loc", "seq_lens", "num_rejected")}
    prepare_prefill_inputs_(
        target_input_ids=case.tensor("input_ids"),
        target_positions=case.tensor("positions"),
        **given,
        max_num_reqs=case.number("max_num_reqs"),
        max_model_len=case.number("max_model_len"),
        overflow="reference",
        out_input_ids=out["expanded_input_ids"],
        out_positions=out["expanded_positions"],
        out_last_token_indices=out["last_token_indices"],
        out_query_start_loc=out["query_start_loc"],
        out_seq_lens=out["seq_lens"],
        backend=case.backend,
    )
    total = out["query_start_loc"][len(given["idx_mapping"])].long()
    case.expect(**out, total_expanded=total)


def eagle_step_slot_mapping_metadata(case: Case) -> None:
    assert case.number("pad_id") == -1
    out = {name: case.poisoned(name) for name in ("clamped_positions", "slot_mapping")}
    seq_lens = case.tensor("seq_lens")
    step_slot_mapping_metadata_(
        positions=case.tensor("positions")[: case.number("batch_size")],
        block_tables=case.table(),
        seq_lens=seq_lens,
        block_size=case.number("block_size"),
        max_model_len=case.number("max_model_len"),
        padded_num_reqs=case.number("input_batch_size"),
        overflow="reference",
        out_positions=out["clamped_positions"],
        out_slot_mapping=out["slot_mapping"],
        backend=case.backend,
    )
    case.expect(**out, seq_lens=seq_lens)


def eagle_prepare_inputs_padded(case: Case) -> None:
    out = {name: case.poisoned(name) for name in ("token_indices_to_sample", "num_rejected_tokens")}
    rows = case.number("num_reqs")
    prepare_inputs_padded_(
        cu_num_draft_tokens=case.tensor("cu_num_draft_tokens")[:rows],
        valid_sampled_tokens_count=case.tensor("valid_sampled_tokens_count"),
        query_start_loc=case.tensor("query_start_loc"),
        out_token_indices=out["token_indices_to_sample"],
        out_num_rejected=out["num_rejected_tokens"],
        backend=case.backend,
    )
    case.expect(**out)


def eagle_prepare_next_token_padded(case: Case) -> None:
    out = {name: case.poisoned(name) for name in ("next_token_ids", "valid_sampled_tokens_count")}
    rows, width = case.number("num_reqs"), case.number("num_sampled_tokens_per_req")
    prepare_next_token_padded_(
        sampled_token_ids=case.tensor("sampled_token_ids")[:rows, :width],
        discard_request_mask=case.tensor("discard_request_mask"),
        backup_next_token_ids=case.tensor("backup_next_token_ids"),
        vocab_size=case.number("vocab_size"),
        out_next_token_ids=out["next_token_ids"],
        out_valid_sampled_tokens_count=out["valid_sampled_tokens_count"],
        backend=case.backend,
    )
    case.expect(**out)


def power_of_2(case: Case) -> None:
    case.expect(result=torch.tensor([next_power_of_2(int(n)) for n in case.inputs["n"]]))


def gumbel_sample(case: Case) -> None:
    """Greedy rows. What the reference samples for padding rows and what it keeps in a cache are no part of our kernel."""
    assert choose_tokens_ is not None
    assert choose_tokens_partials is not None
    logits = case.tensor("logits")
    tokens, vocabulary = logits.shape
    partials = choose_tokens_partials(vocabulary)
    temperature = case.tensor("temperature")

    def filled(*shape: int, value: float = POISON, dtype: torch.dtype = torch.int32) -> torch.Tensor:
        return torch.full(shape, value, dtype=dtype, device=case.device)

    out = filled(tokens + 2)
    choose_tokens_(
        logits=logits,
        logits_indices=None,
        token_rows=case.tensor("expanded_idx_mapping"),
        positions=case.tensor("pos").int(),
        temperature=temperature,
        seed=filled(len(temperature), 2, value=0),
        stream=DRAFT,
        nonce_length=None,
        token_ids=None,
        out_tokens=out[:tokens],
        out_bad=filled(tokens),
        scratch_scores=filled(tokens, partials, dtype=torch.float32),
        scratch_tokens=filled(tokens, partials),
        scratch_bad=filled(tokens, partials),
        backend=case.backend,
    )
    real = case.inputs["expanded_idx_mapping"] >= 0
    actual = out.cpu().numpy()
    np.testing.assert_array_equal(actual[:tokens][real], case.outputs["sampled"][real])
    np.testing.assert_array_equal(actual[tokens:], POISON)


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
    accept_matching_(
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
        backend=case.backend,
    )
    emitted = out_tokens.cpu().numpy()
    np.testing.assert_array_equal((emitted != NO_TOKEN).sum(1), out["out_num_emitted"].cpu().numpy())
    return emitted


def rejection_greedy_sample(case: Case) -> None:
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
    judge_drafts_(
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
        backend=case.backend,
    )
    return [row.index(next(code for code in row if code != exact.ACCEPTED)) for row in verdicts.view(rows, width).tolist()]


def log_probabilities(probabilities: np.ndarray) -> np.ndarray:
    with np.errstate(divide="ignore"):
        return np.log(probabilities.astype(np.float64)).astype(np.float32)


def rejection_random_sample(case: Case) -> None:
    """Sampled rows; the token after a rejection is an input of the reference."""
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


def sample_recovered_tokens(case: Case) -> None:
    """The residual's weights, drawn in the reference's own way: the largest of weight times a given number."""
    ends = case.inputs["cu_num_draft_tokens"]
    heat = np.ones((1, 1), np.float32)
    for row, (begin, end) in enumerate(zip([0, *ends[:-1]], ends, strict=True)):
        for place in range(begin, end):
            scores = exact.sane_scores(log_probabilities(case.inputs["target_probs"][place : place + 1]), heat)
            p = exact.probabilities(scores, exact.normalisers(scores))[0]
            if "draft_probs" in case.inputs:
                drawn = exact.sane_scores(log_probabilities(case.inputs["draft_probs"][place : place + 1]), heat)
                weights = exact.residual(p, exact.probabilities(drawn, exact.normalisers(drawn))[0], NO_TOKEN)
            else:
                weights = exact.residual(p, np.zeros_like(p), int(case.inputs["draft_token_ids"][place]))
            assert int((weights * case.inputs["inv_q"][row]).argmax()) == case.outputs["recovered_token_ids"][place]


def rejection_sample(case: Case) -> None:
    """Greedy rows, and how many drafts of sampled ones are kept by the ratio test."""
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


def is_greedy_gumbel(tags: frozenset[str], inputs: Callable[[str], np.ndarray]) -> bool:
    return "greedy" in tags


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


@dataclass(frozen=True)
class Adapter:
    """How to run an archive.

    Attributes:
        run: compares one case.
        covers: which cases it can run, from tags and inputs; all of them if None.
        is_host: a plain function, for which backends do not matter.
    """

    run: Callable[[Case], None]
    covers: Callable[[frozenset[str], Callable[[str], np.ndarray]], bool] | None = None
    is_host: bool = False


ADAPTERS: dict[str, Adapter] = {
    "prepare_prefill_inputs": Adapter(prepare_prefill_inputs),
    "eagle_step_slot_mapping_metadata": Adapter(eagle_step_slot_mapping_metadata),
    "eagle_prepare_inputs_padded": Adapter(eagle_prepare_inputs_padded),
    "eagle_prepare_next_token_padded": Adapter(eagle_prepare_next_token_padded),
    "next_power_of_2": Adapter(power_of_2, is_host=True),
    "rejection_greedy_sample": Adapter(rejection_greedy_sample, covers=is_not_synthetic),
    "rejection_random_sample": Adapter(rejection_random_sample, covers=draws_what_it_could),
    "sample_recovered_tokens": Adapter(sample_recovered_tokens, is_host=True),
    "rejection_sample": Adapter(rejection_sample, covers=has_greedy_row_or_ratios),
}
if choose_tokens_ is not None:
    ADAPTERS["gumbel_sample"] = Adapter(gumbel_sample, covers=is_greedy_gumbel)

NOT_COVERED = {
    "gumbel_sample": "only greedy cases: the reference draws its noise from another stream",
    "rejection_greedy_sample": "no rule accepts at given rates yet",
    "rejection_sample": "only greedy and ratio rows: no rule verifies blocks or accepts at given rates yet",
    "rejection_random_sample": "no rule accepts at given rates yet; drafts that their own row excludes are points here, not rejected",
}
"""Why the remaining cases of an archive are skipped."""
