"""How each golden archive is run: one adapter a kernel, from the archive's names to the library's."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import torch

from funcspec.constants import NO_TOKEN
from funcspec.kernels.acceptance import accept_matching_
from funcspec.kernels.next_tokens import prepare_next_token_padded_
from funcspec.kernels.op import next_power_of_2
from funcspec.kernels.prefill_inputs import prepare_prefill_inputs_
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


def rejection_sample(case: Case) -> None:
    """Greedy rows only."""
    greedy = case.inputs["temperature"][case.inputs["idx_mapping"]] == 0
    starts = case.inputs["cu_num_logits"]
    spans = list(pairwise(starts))
    drafts = [case.inputs["draft_sampled"][begin + 1 : end] for begin, end in spans]
    chosen = [case.inputs["target_logits"][begin:end].argmax(1) for begin, end in spans]
    emitted = accept(case, drafts, chosen, greedy, case.number("num_speculative_steps") + 1)
    expected = np.where(case.written["sampled"], case.outputs["sampled"], NO_TOKEN)
    np.testing.assert_array_equal(emitted[greedy], expected[greedy])
    np.testing.assert_array_equal(emitted[~greedy], NO_TOKEN)


def is_greedy_gumbel(tags: frozenset[str], inputs: Callable[[str], np.ndarray]) -> bool:
    return "greedy" in tags


def has_greedy_row(tags: frozenset[str], inputs: Callable[[str], np.ndarray]) -> bool:
    return "synthetic" not in tags and bool((inputs("temperature")[inputs("idx_mapping")] == 0).any())


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
    "rejection_sample": Adapter(rejection_sample, covers=has_greedy_row),
}
if choose_tokens_ is not None:
    ADAPTERS["gumbel_sample"] = Adapter(gumbel_sample, covers=is_greedy_gumbel)

NOT_COVERED = {
    "gumbel_sample": "only greedy cases: the reference draws its noise from another stream",
    "rejection_greedy_sample": "no rule accepts at given rates yet",
    "rejection_sample": "only greedy rows: no rule takes the uniforms of the archive yet",
    "rejection_random_sample": "no rule takes the uniforms of the archive yet",
}
"""Why the remaining cases of an archive are skipped."""
