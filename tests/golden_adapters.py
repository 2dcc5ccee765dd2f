"""How each golden archive is run: adapters for each kernel, from the archive's names to the library's."""

import numpy as np
import torch

from funcspec.kernels.batch_change import update_num_computed_tokens_for_batch_change_
from funcspec.kernels.batch_expansion import expand_batch_to_tokens_
from funcspec.kernels.dflash_inputs import copy_and_expand_dflash_inputs_
from funcspec.kernels.eagle_inputs import copy_and_expand_eagle_inputs_
from funcspec.kernels.next_tokens import prepare_next_token_padded_
from funcspec.kernels.op import next_power_of_2
from funcspec.kernels.prefill_inputs import prepare_prefill_inputs_
from funcspec.kernels.query_extension import BatchCounts, extend_all_queries_by_
from funcspec.kernels.sample_indices import prepare_inputs_padded_
from funcspec.kernels.step_metadata import step_slot_mapping_metadata_
from funcspec.kernels.temperature import apply_temperature_
from funcspec.metrics import unconditional_to_conditional_rates

from . import golden_choices, golden_verification
from .golden_case import Adapter, Case


def prepare_prefill_inputs(case: Case) -> None:
    names = ("expanded_input_ids", "expanded_positions", "last_token_indices", "query_start_loc", "seq_lens")
    out = {name: case.poisoned(name) for name in names}
    given = {name: case.tensor(name) for name in ("last_sampled", "idx_mapping", "query_start_loc", "seq_lens", "num_rejected")}
    case.run(
        prepare_prefill_inputs_,
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
    )
    total = out["query_start_loc"][len(given["idx_mapping"])].long()
    case.expect(**out, total_expanded=total)


def eagle_step_slot_mapping_metadata(case: Case) -> None:
    assert case.number("pad_id") == -1
    out = {name: case.poisoned(name) for name in ("clamped_positions", "slot_mapping")}
    seq_lens = case.tensor("seq_lens")
    case.run(
        step_slot_mapping_metadata_,
        positions=case.tensor("positions")[: case.number("batch_size")],
        block_tables=case.table(),
        seq_lens=seq_lens,
        block_size=case.number("block_size"),
        max_model_len=case.number("max_model_len"),
        padded_num_reqs=case.number("input_batch_size"),
        overflow="reference",
        out_positions=out["clamped_positions"],
        out_slot_mapping=out["slot_mapping"],
    )
    case.expect(**out, seq_lens=seq_lens)


def eagle_prepare_inputs_padded(case: Case) -> None:
    out = {name: case.poisoned(name) for name in ("token_indices_to_sample", "num_rejected_tokens")}
    rows = case.number("num_reqs")
    case.run(
        prepare_inputs_padded_,
        cu_num_draft_tokens=case.tensor("cu_num_draft_tokens")[:rows],
        valid_sampled_tokens_count=case.tensor("valid_sampled_tokens_count"),
        query_start_loc=case.tensor("query_start_loc"),
        out_token_indices=out["token_indices_to_sample"],
        out_num_rejected=out["num_rejected_tokens"],
    )
    case.expect(**out)


def eagle_prepare_next_token_padded(case: Case) -> None:
    out = {name: case.poisoned(name) for name in ("next_token_ids", "valid_sampled_tokens_count")}
    rows, width = case.number("num_reqs"), case.number("num_sampled_tokens_per_req")
    case.run(
        prepare_next_token_padded_,
        sampled_token_ids=case.tensor("sampled_token_ids")[:rows, :width],
        discard_request_mask=case.tensor("discard_request_mask"),
        backup_next_token_ids=case.tensor("backup_next_token_ids"),
        vocab_size=case.number("vocab_size"),
        out_next_token_ids=out["next_token_ids"],
        out_valid_sampled_tokens_count=out["valid_sampled_tokens_count"],
    )
    case.expect(**out)


def power_of_2(case: Case) -> None:
    case.expect(result=torch.tensor([next_power_of_2(int(n)) for n in case.inputs["n"]]))


def copy_and_expand_eagle_inputs(case: Case) -> None:
    shift = bool(case.inputs["shift_input_ids"])
    names = ("input_ids", "positions", "new_token_indices", "hidden_state_mapping")
    out = {name: case.poisoned(name) for name in (*names, "is_rejected_token_mask", "is_masked_token_mask")}
    given = ("target_token_ids", "target_positions", "next_token_ids", "query_start_loc", "query_end_loc")
    case.run(
        copy_and_expand_eagle_inputs_,
        **{name: case.tensor(name) for name in given},
        padding_token_id=case.number("padding_token_id"),
        mask_token_id=case.number("parallel_drafting_token_id"),
        num_new_tokens=case.number("num_padding_slots_per_request"),
        shift_input_ids=shift,
        out_input_ids=out["input_ids"],
        out_positions=out["positions"],
        out_is_rejected=out["is_rejected_token_mask"],
        out_is_masked=out["is_masked_token_mask"],
        out_new_token_indices=out["new_token_indices"],
        out_hidden_state_mapping=out["hidden_state_mapping"] if shift else None,
    )
    case.expect(**out)


def copy_and_expand_dflash_inputs(case: Case) -> None:
    out = {name: case.poisoned(name) for name in case.outputs}
    case.run(
        copy_and_expand_dflash_inputs_,
        **{name: case.tensor(name) for name in ("next_token_ids", "target_positions", "query_start_loc")},
        num_rejected=case.optional("num_rejected_tokens"),
        block_tables=case.table(),
        mask_token_id=case.number("parallel_drafting_token_id"),
        **{name: case.number(name) for name in ("block_size", "num_query_per_req", "num_speculative_tokens")},
        **{f"out_{name}": buffer for name, buffer in out.items()},
    )
    case.expect(**out)


def extend_all_queries_by_n(case: Case) -> None:
    """The device's arrays, the host's mirror of the starts, and the host's counts. Slots are a new array in the reference, too."""
    grown = case.number("N")
    out: dict[str, torch.Tensor] = {}
    for name in ("query_start_loc", "query_start_loc_cpu"):
        out[name], out["seq_lens"] = case.poisoned(name), case.poisoned("seq_lens")
        case.run(
            extend_all_queries_by_,
            query_start_loc=case.tensor(name),
            seq_lens=case.tensor("seq_lens"),
            num_new_tokens=grown,
            out_query_start_loc=out[name],
            out_seq_lens=out["seq_lens"],
        )
    counts = BatchCounts(*(case.number(name) for name in ("num_reqs", "num_actual_tokens", "max_query_len", "max_seq_len")))
    counts = counts.extended_by(grown)
    numbers = {"num_reqs": counts.num_reqs, "num_actual_tokens": counts.num_tokens}
    numbers |= {"max_query_len": counts.max_query_len, "max_seq_len": counts.max_seq_len}
    case.expect(**out, slot_mapping=case.tensor("new_slot_mapping"), **{name: torch.tensor(value) for name, value in numbers.items()})


def update_num_computed_tokens_for_batch_change(case: Case) -> None:
    changed = {name: case.tensor(name) for name in case.outputs}
    given = ("prev_positions", "valid_sampled_token_count", "prev_num_draft_tokens", "cpu_num_computed_tokens")
    case.run(update_num_computed_tokens_for_batch_change_, **changed, **{name: case.tensor(name) for name in given})
    case.expect(**changed)


def apply_temperature(case: Case) -> None:
    logits = case.tensor("logits")
    idx_mapping, temperature = case.tensor("expanded_idx_mapping"), case.tensor("temperature")
    case.run(apply_temperature_, logits=logits, idx_mapping=idx_mapping, temperature=temperature)
    np.testing.assert_allclose(logits.cpu().numpy(), case.outputs["logits"], rtol=2e-6)


def expand_batch_to_tokens(case: Case) -> None:
    expanded = case.poisoned("expanded")
    case.run(
        expand_batch_to_tokens_,
        values=case.tensor("x"),
        cu_num_tokens=case.tensor("cu_num_tokens"),
        replace_from=case.number("replace_from"),
        replace_to=case.number("replace_to"),
        out_expanded=expanded,
    )
    case.expect(expanded=expanded)


def conditional_rates(case: Case) -> None:
    found = unconditional_to_conditional_rates(case.inputs["rates"].tolist())
    np.testing.assert_allclose(np.array(found), case.outputs["conditional"], rtol=1e-15)


ADAPTERS: dict[str, tuple[Adapter, ...]] = {
    "prepare_prefill_inputs": (Adapter(prepare_prefill_inputs),),
    "copy_and_expand_eagle_inputs": (Adapter(copy_and_expand_eagle_inputs),),
    "copy_and_expand_dflash_inputs": (Adapter(copy_and_expand_dflash_inputs),),
    "eagle_step_slot_mapping_metadata": (Adapter(eagle_step_slot_mapping_metadata),),
    "eagle_prepare_inputs_padded": (Adapter(eagle_prepare_inputs_padded),),
    "eagle_prepare_next_token_padded": (Adapter(eagle_prepare_next_token_padded),),
    "extend_all_queries_by_N": (Adapter(extend_all_queries_by_n),),
    "update_num_computed_tokens_for_batch_change": (Adapter(update_num_computed_tokens_for_batch_change),),
    "apply_temperature": (Adapter(apply_temperature),),
    "expand_batch_to_tokens": (Adapter(expand_batch_to_tokens),),
    "next_power_of_2": (Adapter(power_of_2, is_host=True),),
    "unconditional_to_conditional_rates": (Adapter(conditional_rates, is_host=True),),
    **golden_choices.ADAPTERS,
    **golden_verification.ADAPTERS,
}
"""By archive. The first adapter of each runs every case, with the kernel that the archive is of; the others run what they cover."""
