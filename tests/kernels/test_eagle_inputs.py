"""The target's batch laid out again with new places in every row."""

from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from funcspec.errors import ArgumentError, ArgumentTypeError
from funcspec.kernels.eagle_inputs import copy_and_expand_eagle_inputs_

from .guarded import POISON, Buffers

OUTPUTS = ("input_ids", "positions", "is_rejected", "is_masked", "new_token_indices", "hidden_state_mapping")
PADDING, MASK = 0, -2
BOTH = pytest.mark.parametrize("shift", [False, True])


class Launch:
    """One batch and its buffers. Rows are dictionaries of `ids`, the `start` position, `rejected` and the `bonus` token."""

    def __init__(
        self,
        device: str,
        rows: list[dict[str, Any]],
        new: int,
        shift: bool,
        spare: int = 3,
        clear_tail: bool = False,
        dtype: torch.dtype = torch.int32,
    ) -> None:
        self.buffers = Buffers(device)
        starts = [0]
        for row in rows:
            starts.append(starts[-1] + len(row["ids"]))

        def array(values: list[int]) -> torch.Tensor:
            return torch.tensor(values, dtype=dtype, device=device)

        places = starts[-1] + len(rows) * (new - shift) + spare
        self.flags = {name: torch.zeros(places + 14, dtype=torch.bool, device=device) for name in ("is_rejected", "is_masked")}
        self.arguments: dict[str, Any] = {
            "target_token_ids": array([token for row in rows for token in row["ids"]]),
            "target_positions": array([row["start"] + j for row in rows for j in range(len(row["ids"]))]),
            "next_token_ids": array([row["bonus"] for row in rows]),
            "query_start_loc": array(starts),
            "query_end_loc": array([end - 1 - row["rejected"] for end, row in zip(starts[1:], rows, strict=True)]),
            "padding_token_id": PADDING,
            "mask_token_id": MASK,
            "num_new_tokens": new,
            "shift_input_ids": shift,
            "clear_tail": clear_tail,
            "out_input_ids": self.buffers.poisoned(places, dtype),
            "out_positions": self.buffers.poisoned(places, dtype),
            "out_new_token_indices": self.buffers.poisoned(len(rows) * new + 1, dtype),
            "out_hidden_state_mapping": self.buffers.poisoned(starts[-1] + 1, dtype) if shift else None,
            **{f"out_{name}": whole[7 : places + 7] for name, whole in self.flags.items()},
        }

    def run(self, backend: str, flag_poison: bool = False) -> dict[str, list[int]]:
        for whole in self.flags.values():
            whole.fill_(flag_poison)
        copy_and_expand_eagle_inputs_(**self.arguments, backend=backend)
        self.buffers.check()
        for whole in self.flags.values():
            assert (whole[:7] == flag_poison).all() and (whole[-7:] == flag_poison).all()
        found = {name: self.arguments[f"out_{name}"] for name in OUTPUTS}
        return {name: [int(x) for x in array.tolist()] for name, array in found.items() if array is not None}


def oracle(launch: Launch, rows: list[dict[str, Any]], flag_poison: bool = False) -> dict[str, list[int]]:
    """The contract, a place at a time."""
    arguments = launch.arguments
    new, shift = arguments["num_new_tokens"], int(arguments["shift_input_ids"])
    out = {name: [POISON] * len(arguments[f"out_{name}"]) for name in OUTPUTS if arguments[f"out_{name}"] is not None}
    for name in ("is_rejected", "is_masked"):
        out[name] = [int(flag_poison)] * len(out[name])
    place = token = 0

    def write(at: int, token_id: int, position: int, rejected: int, masked: int) -> None:
        values = (token_id, position, rejected, masked)
        for name, value in zip(OUTPUTS[:4], values, strict=True):
            out[name][at] = value

    for i, row in enumerate(rows):
        ids, kept = row["ids"], max(len(row["ids"]) - max(row["rejected"], 0), 0)
        placed = [*ids[shift : max(kept, shift)], row["bonus"], *[MASK] * (new - 1)] if ids else []
        first_new = len(placed) - new
        for j in range(len(ids) + new - shift):
            if j < len(placed):
                write(place + j, placed[j], row["start"] + j, 0, int(j > first_new))
            else:
                write(place + j, PADDING, 0, 1, 0)
        for k in range(new):
            out["new_token_indices"][i * new + k] = place + first_new + k if ids else 0
        if shift:
            out["hidden_state_mapping"][token : token + len(ids)] = range(place, place + len(ids))
        place, token = place + len(ids) + new - shift, token + len(ids)
    if arguments["clear_tail"]:
        for at in range(place, len(out["input_ids"])):
            write(at, PADDING, 0, 1, 0)
    return out


def example(*sizes: tuple[int, int, int]) -> list[dict[str, Any]]:
    """Rows of (length, first position, rejected)."""
    return [
        {"ids": [10 * (i + 1) + j for j in range(size)], "start": start, "rejected": rejected, "bonus": 100 * (i + 1)}
        for i, (size, start, rejected) in enumerate(sizes)
    ]


def test_k5a_draft_model(backend: str, kernel_device: str) -> None:
    out = Launch(kernel_device, example((3, 5, 1), (2, 0, 0)), new=1, shift=False).run(backend)
    assert out["input_ids"] == [10, 11, 100, 0, 20, 21, 200] + [POISON] * 3
    assert out["positions"] == [5, 6, 7, 0, 0, 1, 2] + [POISON] * 3
    assert out["is_rejected"] == [0, 0, 0, 1] + [0] * 6
    assert not any(out["is_masked"])
    assert out["new_token_indices"] == [2, 6, POISON]


def test_k5b_parallel_eagle(backend: str, kernel_device: str) -> None:
    out = Launch(kernel_device, example((4, 5, 1), (4, 10, 0)), new=3, shift=True, spare=0).run(backend)
    assert out["input_ids"] == [11, 12, 100, -2, -2, 0, 21, 22, 23, 200, -2, -2]
    assert out["positions"] == [5, 6, 7, 8, 9, 0, 10, 11, 12, 13, 14, 15]
    assert out["is_rejected"] == [0, 0, 0, 0, 0, 1] + [0] * 6
    assert [place for place, masked in enumerate(out["is_masked"]) if masked] == [3, 4, 10, 11]
    assert out["new_token_indices"] == [2, 3, 4, 9, 10, 11, POISON]
    assert out["hidden_state_mapping"] == [0, 1, 2, 3, 6, 7, 8, 9, POISON]


def test_all_drafts_rejected(backend: str, kernel_device: str) -> None:
    out = Launch(kernel_device, example((3, 0, 2)), new=3, shift=False, spare=0).run(backend)
    assert out["input_ids"] == [10, 100, -2, -2, 0, 0]
    assert out["new_token_indices"] == [1, 2, 3, POISON]


def test_k5c_one_shifted_place_replaces_the_last_kept_id(backend: str, kernel_device: str) -> None:
    out = Launch(kernel_device, example((4, 5, 0)), new=1, shift=True, spare=0).run(backend)
    assert out["input_ids"] == [11, 12, 13, 100]
    assert out["positions"] == [5, 6, 7, 8]
    assert out["hidden_state_mapping"] == [0, 1, 2, 3, POISON]


@BOTH
def test_k5c_a_row_longer_than_a_tile(backend: str, kernel_device: str, shift: bool) -> None:
    rows = example((2, 3, 1), (300, 7, 20), (1, 0, 0))
    launch = Launch(kernel_device, rows, new=140, shift=shift)
    assert launch.run(backend) == oracle(launch, rows)


def test_nothing_kept(backend: str, kernel_device: str) -> None:
    """Without shifting the bonus comes first; shifting is as with the first token kept, where the reference loses the bonus."""
    out = Launch(kernel_device, example((2, 4, 2)), new=2, shift=False, spare=0).run(backend)
    assert out["input_ids"] == [100, -2, 0, 0] and out["positions"] == [4, 5, 0, 0]
    nothing = Launch(kernel_device, example((3, 4, 3)), new=2, shift=True, spare=0).run(backend)
    assert nothing == Launch(kernel_device, example((3, 4, 2)), new=2, shift=True, spare=0).run(backend)
    assert nothing["input_ids"] == [100, -2, 0, 0] and nothing["new_token_indices"][:2] == [0, 1]


@pytest.mark.parametrize("rejected", [-5, 9])
@BOTH
def test_ends_outside_of_the_query_are_limited_to_it(backend: str, kernel_device: str, shift: bool, rejected: int) -> None:
    rows = example((3, 4, rejected), (2, 0, 0))
    launch = Launch(kernel_device, rows, new=2, shift=shift)
    limited = example((3, 4, min(max(rejected, 0), 3)), (2, 0, 0))
    assert launch.run(backend) == oracle(launch, limited)


@BOTH
def test_d13_empty_rows_are_inert(backend: str, kernel_device: str, shift: bool) -> None:
    rows = example((0, 0, 0), (2, 6, 0), (0, 0, 3))
    launch = Launch(kernel_device, rows, new=2, shift=shift, spare=0)
    out = launch.run(backend)
    assert out == oracle(launch, rows)
    grown = 2 - shift
    assert out["input_ids"][:grown] == out["input_ids"][-grown:] == [PADDING] * grown
    assert out["is_rejected"][:grown] == [1] * grown
    assert out["new_token_indices"][:2] == out["new_token_indices"][4:6] == [0, 0]


def test_rows_outside_of_the_tokens_are_inert(backend: str, kernel_device: str) -> None:
    launch = Launch(kernel_device, example((2, 6, 0), (2, 1, 0)), new=1, shift=True)
    launch.arguments["target_token_ids"] = launch.arguments["target_token_ids"][:3]
    out = launch.run(backend)
    assert out["input_ids"] == [11, 100, PADDING, PADDING] + [POISON] * 3
    assert out["is_rejected"][:4] == [0, 0, 1, 1]
    assert out["new_token_indices"] == [1, 0, POISON]
    assert out["hidden_state_mapping"] == [0, 1] + [POISON] * 3


@BOTH
def test_d3_smaller_batch_in_old_buffers_equals_fresh_buffers(backend: str, kernel_device: str, shift: bool) -> None:
    old = Launch(kernel_device, example((3, 1, 0), (3, 2, 1), (3, 3, 2)), new=2, shift=shift)
    old.run(backend)
    grown = 2 - shift
    small = Launch(kernel_device, example((3, 4, 1)), new=2, shift=shift, spare=6 + 2 * grown + 3, clear_tail=True)
    fresh = small.run(backend, flag_poison=True)
    assert fresh["input_ids"][3 + grown :] == [PADDING] * (9 + 2 * grown)
    assert fresh["is_rejected"][3 + grown :] == [1] * (9 + 2 * grown)
    names = ("out_input_ids", "out_positions")
    small.arguments.update({name: old.arguments[name] for name in names})
    again = small.run(backend)
    assert {name: again[name] for name in OUTPUTS[:4]} == {name: fresh[name] for name in OUTPUTS[:4]}


@pytest.mark.parametrize("clear_tail", [False, True])
@BOTH
def test_no_rows(backend: str, kernel_device: str, shift: bool, clear_tail: bool) -> None:
    launch = Launch(kernel_device, [], new=2, shift=shift, clear_tail=clear_tail)
    assert launch.run(backend) == oracle(launch, [])


def test_ids_and_positions_at_the_limit_of_int32(backend: str, kernel_device: str) -> None:
    last = 2**31 - 1
    rows = [{"ids": [last, last - 1], "start": last - 2, "rejected": 0, "bonus": last}]
    out = Launch(kernel_device, rows, new=1, shift=False, spare=0).run(backend)
    assert out["input_ids"] == [last, last - 1, last] and out["positions"] == [last - 2, last - 1, last]


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.lists(st.tuples(st.integers(0, 6), st.integers(0, 50), st.integers(-1, 7)), max_size=5),
    st.integers(1, 5),
    st.booleans(),
    st.booleans(),
    st.sampled_from([torch.int32, torch.int64]),
)
def test_ragged_batches(
    backend: str, kernel_device: str, sizes: list[tuple[int, int, int]], new: int, shift: bool, clear_tail: bool, dtype: torch.dtype
) -> None:
    rows = example(*sizes)
    launch = Launch(kernel_device, rows, new, shift, clear_tail=clear_tail, dtype=dtype)
    for flag_poison in (False, True):
        assert launch.run(backend, flag_poison) == oracle(launch, rows, flag_poison)


def test_refusals_write_nothing(backend: str, kernel_device: str) -> None:
    def refused(error: type[Exception], match: str, shift: bool = True, **changes: Any) -> None:
        launch = Launch(kernel_device, example((3, 0, 1), (2, 4, 0)), new=2, shift=shift, spare=0)
        launch.arguments.update(changes)
        with pytest.raises(error, match=match):
            launch.run(backend)
        assert (launch.arguments["out_positions"] == POISON).all()

    short = torch.zeros(1, dtype=torch.int32, device=kernel_device)
    refused(ArgumentError, "num_new_tokens", num_new_tokens=0)
    refused(ArgumentError, "out_input_ids", num_new_tokens=3)
    refused(ArgumentError, "query_end_loc", query_end_loc=short)
    refused(ArgumentError, "target_positions", target_positions=short)
    refused(ArgumentTypeError, "next_token_ids", next_token_ids=torch.zeros(2, device=kernel_device))
    refused(ArgumentTypeError, "out_is_masked", out_is_masked=torch.zeros(9, dtype=torch.int32, device=kernel_device))
    refused(ArgumentError, "out_is_rejected", out_is_rejected=torch.zeros(2, dtype=torch.bool, device=kernel_device))
    refused(ArgumentError, "out_hidden_state_mapping", out_hidden_state_mapping=None)
    refused(ArgumentError, "out_hidden_state_mapping", shift=False, out_hidden_state_mapping=torch.zeros_like(short).expand(9))
    launch = Launch(kernel_device, example((3, 0, 1)), new=1, shift=True)
    launch.arguments["out_input_ids"] = launch.arguments["target_token_ids"]
    with pytest.raises(ArgumentError, match="out_input_ids: expected another buffer"):
        launch.run(backend)
