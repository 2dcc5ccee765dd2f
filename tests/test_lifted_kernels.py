"""The public launchers as pure JAX functions: equal to torch, eagerly and inside `jit`, and nothing that was given changes."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

from funcspec.interop import lift
from funcspec.kernels.batch_change import update_num_computed_tokens_for_batch_change_
from funcspec.kernels.batch_expansion import expand_batch_to_tokens_
from funcspec.kernels.batch_rejection import rejection_greedy_sample_, rejection_random_sample_
from funcspec.kernels.dflash_inputs import copy_and_expand_dflash_inputs_
from funcspec.kernels.eagle_inputs import copy_and_expand_eagle_inputs_
from funcspec.kernels.given_noise import gumbel_sample_
from funcspec.kernels.new_slot_mapping import compute_new_slot_mapping_
from funcspec.kernels.op import Op
from funcspec.kernels.query_extension import extend_all_queries_by_
from funcspec.kernels.recovered_tokens import sample_recovered_tokens_
from funcspec.kernels.rejection import rejection_sample_
from funcspec.kernels.temperature import apply_temperature_

pytestmark = pytest.mark.skipif(jax.default_backend() != "cpu" and not torch.cuda.is_available(), reason="JAX and torch see other devices")

POISON = -7


def ints(*values: Any) -> np.ndarray:
    return np.array(values, np.int32)


def floats(*values: Any) -> np.ndarray:
    return np.array(values, np.float32)


def flags(*values: Any) -> np.ndarray:
    return np.array(values, bool)


def poisoned(*shape: int) -> np.ndarray:
    return np.full(shape, POISON, np.int32)


EXPANDED = {
    "target_token_ids": ints(10, 11, 12, 20, 21),
    "target_positions": ints(4, 5, 6, 13, 14),
    "next_token_ids": ints(100, 200),
    "query_start_loc": ints(0, 3, 5),
    "query_end_loc": ints(0, 4),
    "padding_token_id": 0,
    "mask_token_id": 1,
    "num_new_tokens": 2,
    "shift_input_ids": True,
    "clear_tail": True,
    "out_input_ids": poisoned(9),
    "out_positions": poisoned(9),
    "out_is_rejected": np.zeros(9, bool),
    "out_is_masked": np.ones(9, bool),
    "out_new_token_indices": poisoned(4),
    "out_hidden_state_mapping": poisoned(5),
}
BLOCKS = {
    "next_token_ids": ints(21, 22),
    "target_positions": ints(0, 1, 2, 10, 11, 12, 13),
    "query_start_loc": ints(0, 3, 7),
    "num_rejected": ints(0, 1),
    "block_tables": ints([0, 1, 2, 3], [4, 5, 6, 7]),
    "mask_token_id": 9,
    "block_size": 4,
    "num_query_per_req": 3,
    "num_speculative_tokens": 2,
    "overflow": "freeze",
    "max_model_len": 15,
    "out_input_ids": poisoned(8),
    "out_query_positions": poisoned(8),
    "out_query_slot_mapping": poisoned(8),
    "out_context_positions": poisoned(9),
    "out_context_slot_mapping": poisoned(9),
    "out_token_indices": poisoned(5),
    "out_query_start_loc": poisoned(4),
    "out_seq_lens": poisoned(3),
}
FLAT = {
    "cu_num_draft_tokens": ints(2, 3),
    "draft_token_ids": ints(1, 0, 1),
    "bonus_token_ids": ints(90, 91),
    "out_token_ids": poisoned(2, 3),
}
PROBABILITIES = {
    "draft_probs": floats([0.5, 0.5], [0.9, 0.1], [0.2, 0.8]),
    "target_probs": floats([0.4, 0.6], [0.3, 0.7], [0.1, 0.9]),
}
CASES: dict[str, tuple[Op, dict[str, Any]]] = {
    "copy_and_expand_eagle_inputs": (copy_and_expand_eagle_inputs_, EXPANDED),
    "copy_and_expand_dflash_inputs": (copy_and_expand_dflash_inputs_, BLOCKS),
    "compute_new_slot_mapping": (
        compute_new_slot_mapping_,
        {
            "query_start_loc": ints(0, 3, 5),
            "num_new_tokens": 1,
            "positions": ints(4, 5, 6, 7, 13, 14, 15),
            "is_rejected": flags(0, 0, 1, 0, 0, 0, 0),
            "block_tables": ints([2, 3], [0, 1]),
            "block_size": 8,
            "max_model_len": 15,
            "out_slot_mapping": poisoned(9),
        },
    ),
    "extend_all_queries_by": (
        extend_all_queries_by_,
        {
            "query_start_loc": ints(0, 3, 5),
            "seq_lens": ints(9, 5),
            "num_new_tokens": 2,
            "out_query_start_loc": poisoned(4),
            "out_seq_lens": poisoned(3),
        },
    ),
    "update_num_computed_tokens_for_batch_change": (
        update_num_computed_tokens_for_batch_change_,
        {
            "num_computed_tokens": ints(10, 20, 30, 40),
            "num_accepted_tokens": ints(1, 1, 1),
            "prev_positions": ints(2, 1, -1),
            "valid_sampled_token_count": ints(3, 1, 2),
            "prev_num_draft_tokens": ints(3, 0, 3),
            "cpu_num_computed_tokens": ints(99, 11, 7),
        },
    ),
    "apply_temperature": (
        apply_temperature_,
        {"logits": floats([1, 2], [3, 4], [5, 6]), "idx_mapping": ints(1, -1, 0), "temperature": floats(0.5, 0.7)},
    ),
    "expand_batch_to_tokens": (
        expand_batch_to_tokens_,
        {
            "values": floats(0.0, 2.0),
            "cu_num_tokens": ints(2, 3),
            "replace_from": 0,
            "replace_to": 1,
            "out_expanded": floats(-7, -7, -7, -7),
        },
    ),
    "gumbel_sample": (
        gumbel_sample_,
        {
            "logits": floats([1, 2, 3], [3, 2, 1], [0, 0, 0]),
            "idx_mapping": ints(1, 0, -1),
            "temperature": floats(0.0, 0.8),
            "noise_words": ints([7, -9, 2**31 - 1], [0, 0, 0], [1, 2, 3]),
            "logits_cache": np.full((2, 2, 4), -7, np.float32),
            "logits_cache_col": ints(1, 0, 0),
            "out_tokens": poisoned(3),
        },
    ),
    "rejection_greedy_sample": (
        rejection_greedy_sample_,
        {**FLAT, "target_argmax": ints(1, 1, 1), "is_greedy": None, "uniform_probs": None, "conditional_rates": None},
    ),
    "rejection_random_sample": (
        rejection_random_sample_,
        {
            **FLAT,
            **PROBABILITIES,
            "recovered_token_ids": ints(70, 71, 72),
            "uniform_probs": floats(0.9, 0.5, 0.1),
            "is_greedy": flags(0, 0),
            "conditional_rates": None,
        },
    ),
    "sample_recovered_tokens": (
        sample_recovered_tokens_,
        {
            "cu_num_draft_tokens": ints(2, 3),
            "draft_token_ids": ints(1, 0, 1),
            **PROBABILITIES,
            "inv_q": floats([1, 2], [2, 1]),
            "max_spec_len": 2,
            "out_token_ids": poisoned(3),
        },
    ),
    "rejection_sample": (
        rejection_sample_,
        {
            "target_logits": floats([1, 2, 0], [0, 1, 2], [2, 1, 0], [0, 0, 3], [3, 0, 0]),
            "draft_logits": floats([[0, 1, 0], [1, 0, 1]], [[0, 0, 0], [0, 0, 0]]),
            "draft_token_ids": ints(-1, 1, 2, -1, 2),
            "cu_num_logits": ints(0, 3, 5),
            "idx_mapping": ints(0, 1),
            "temperature": floats(0.9, 0.0),
            "coins": ints(5, -3, 0, 0, 0),
            "noise_words": ints([1, -2, 3], [4, 5, 6]),
            "rule": "block",
            "conditional_rates": None,
            "out_token_ids": poisoned(2, 3),
            "out_num_sampled": poisoned(2),
        },
    ),
}


@pytest.mark.parametrize("mode", ["eager", "jit"])
@pytest.mark.parametrize("case", CASES)
def test_lifted_launchers_equal_torch_and_are_pure(case: str, mode: str) -> None:
    op, arguments = CASES[case]
    given = {name: value for name, value in arguments.items() if isinstance(value, np.ndarray)}
    static = {name: value for name, value in arguments.items() if name not in given}
    tensors = {name: torch.from_numpy(value.copy()) for name, value in given.items()}
    op(**tensors, **static)
    arrays = {name: jnp.array(value) for name, value in given.items()}

    def function(arrays: dict[str, jax.Array]) -> dict[str, jax.Array]:
        return lift(op)(**arrays, **static)

    found = jax.jit(function)(arrays) if mode == "jit" else function(arrays)
    assert set(found) == {name for name in op.writes if name in given}
    assert any(not np.array_equal(value, given[name]) for name, value in found.items())
    for name, value in found.items():
        np.testing.assert_array_equal(np.asarray(value), tensors[name].numpy(), err_msg=name)
    for name, value in arrays.items():
        np.testing.assert_array_equal(np.asarray(value), given[name], err_msg=name)
