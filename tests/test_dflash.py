"""DFlash models, in steps and alone, against the same written out in float64 without a cache."""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from feature_toys import FeatureDraft
from one_pass import (
    DRAFTS,
    FLAT,
    LENGTH,
    SHAPE,
    TARGET,
    VOCAB,
    check_jax,
    check_lossless,
    check_ratio,
    check_rounds,
    check_values,
    committed,
    hidden_states,
    start,
    trace,
)

import funcspec as fs
from funcspec.drafters import BlockDrafter, dflash
from funcspec.errors import ArgumentError, ArgumentTypeError, ModelError
from funcspec.interop import jax_model
from funcspec.kernels.window_inputs import FEED, window_inputs_
from funcspec.models.base import ForwardBatch
from funcspec.models.dflash import Block, DFlash, DFlashConfig, block_of, random_dflash
from funcspec.models.jax_dflash import JaxDFlash
from funcspec.models.jax_llama import JaxLlama

RULES = {"greedy": fs.rules.greedy, "coupled": fs.rules.coupled, "ratio": fs.rules.ratio}
CONFIG = DFlashConfig(**{**SHAPE, "vocab_size": VOCAB + 1}, target_layers=(0, 2))
MASK = VOCAB  # a token that only the draft has


@pytest.fixture(params=[False, True], ids=["pure", "donated"])
def donate(request: pytest.FixtureRequest) -> bool:
    return request.param


@pytest.fixture(params=[False, True], ids=["in place", "anchor"])
def anchor(request: pytest.FixtureRequest) -> bool:
    return request.param


def model(outputs: int = VOCAB, **changes: Any) -> DFlash:
    made = random_dflash(replace(CONFIG, **changes), seed=7)
    return DFlash(made.config, {**made.weights, "head": FLAT * made.weights["embed"][:outputs]})


MODEL = model()


def block_logits(one: DFlash, tokens: Sequence[int], masks: int, mask_id: int = MASK) -> torch.Tensor:
    """Logits [1 + masks, outputs] of the block behind the committed tokens: dense attention, positions and all written out."""
    config, n, dim = one.config, len(tokens) - 1, one.config.head_dim
    weights = {name: weight.double() for name, weight in one.weights.items()}

    def norm(x: torch.Tensor, name: str) -> torch.Tensor:
        return x / (x.pow(2).mean(-1, keepdim=True) + config.norm_eps).sqrt() * weights[name]

    def rotate(x: torch.Tensor, name: str, first: int) -> torch.Tensor:
        x = norm(x, name) if name in weights else x
        angles = (first + torch.arange(len(x)))[:, None] * config.rope_theta ** (-torch.arange(0, dim, 2, dtype=torch.float64) / dim)
        turned = torch.complex(x[..., : dim // 2], x[..., dim // 2 :]) * torch.polar(torch.ones_like(angles), angles)
        return torch.cat([turned.real, turned.imag], 1)

    context = norm(hidden_states(tokens[:-1], config.target_layers) @ weights["fc"].T, "feature_norm")
    x = weights["embed"][torch.tensor([tokens[-1], *[mask_id] * masks])]
    sizes = [config.num_heads * dim, config.num_kv_heads * dim, config.num_kv_heads * dim]
    for layer in range(config.num_layers):
        own = norm(x, f"{layer}.attention_norm")
        to_q, to_k, to_v = weights[f"{layer}.qkv"].split(sizes)
        heads = []
        for head in range(config.num_heads):
            mine = slice(head * dim, (head + 1) * dim)
            shared = slice(head // 2 * dim, (head // 2 + 1) * dim)
            query = rotate(own @ to_q[mine].T, f"{layer}.query_norm", n)
            keys = rotate(torch.cat([context, own]) @ to_k[shared].T, f"{layer}.key_norm", 0)
            values = torch.cat([context, own]) @ to_v[shared].T
            heads.append((query @ keys.T / dim**0.5).softmax(-1) @ values)
        x = x + torch.cat(heads, 1) @ weights[f"{layer}.attention_output"].T
        gate, up = (norm(x, f"{layer}.mlp_norm") @ weights[f"{layer}.gate_up"].T).chunk(2, 1)
        x = x + (gate * gate.sigmoid() * up) @ weights[f"{layer}.down"].T
    return norm(x, "norm") @ weights["head"].T


def expected(tokens: Sequence[int], count: int, *, drafter: BlockDrafter, drafts: int = DRAFTS, length: int = LENGTH) -> list[np.ndarray]:
    """What the drafts are drawn from: there are as many masks as a round has drafts, or as there are positions, however few are wanted."""
    one, n = drafter.model, len(tokens)
    room = min(one.max_len, length) - n
    if room < 0 or drafts == 0:
        return []
    logits = block_logits(one, tokens, min(drafts - drafter.anchor, room), drafter.mask_id)
    logits = logits if drafter.anchor else logits[1:]
    whole = np.full((len(logits), VOCAB), -np.inf)
    ids = np.arange(VOCAB) if drafter.token_ids is None else drafter.token_ids.numpy()
    whole[:, ids] = logits.numpy()
    return list(whole[:count])


@pytest.mark.parametrize("rule", ["greedy", "coupled", "ratio"])
def test_drafts_are_those_of_the_committed_tokens(rule: str, anchor: bool, donate: bool) -> None:
    drafter = dflash(MODEL, MASK, anchor=anchor)
    assert check_rounds(start(drafter, RULES[rule], donate=donate), drafter, partial(expected, drafter=drafter), donate=donate) > 40


@pytest.mark.parametrize("drafts", [0, 1, 2, 6])
def test_any_number_of_drafts(drafts: int, anchor: bool) -> None:
    drafter = dflash(MODEL, MASK, anchor=anchor)
    state = start(drafter, fs.rules.coupled, drafts=drafts)
    made = check_rounds(state, drafter, partial(expected, drafter=drafter, drafts=drafts), donate=True)
    assert (made > 0) == (drafts > 0)


@pytest.mark.parametrize("longest", [9, 15, 20])
def test_rows_that_outgrow_the_draft(longest: int, anchor: bool) -> None:
    """Its positions end before the rows do: they draft fewer, then none; one prompt is as long as it from the start."""
    drafter = dflash(model(max_len=longest), MASK, anchor=anchor)
    state = start(drafter, fs.rules.coupled)
    check_rounds(state, drafter, partial(expected, drafter=drafter), donate=True, wanted=DRAFTS)


@pytest.mark.parametrize("changes", [{"head_norms": False}, {"num_layers": 1, "target_layers": (1,)}], ids=["no head norms", "small"])
def test_other_shapes(changes: dict[str, Any]) -> None:
    drafter = dflash(model(**changes), MASK)
    check_rounds(start(drafter, fs.rules.coupled), drafter, partial(expected, drafter=drafter), donate=True)


@pytest.mark.jax_on_cpu
def test_jax_equals_torch(anchor: bool) -> None:
    other = dflash(JaxDFlash.from_torch(MODEL), MASK, anchor=anchor)
    check_jax(dflash(MODEL, MASK, anchor=anchor), fs.rules.ratio, JaxLlama.from_torch(TARGET), other)


@pytest.mark.jax_on_cpu
def test_a_torch_model_in_programs_of_jax() -> None:
    check_jax(dflash(MODEL, MASK), fs.rules.coupled, jax_model(TARGET), dflash(jax_model(MODEL), MASK))


def test_a_mask_token_that_is_committed_is_a_token_like_others(anchor: bool) -> None:
    """What is context does not follow from ids."""
    drafter = dflash(MODEL, 2, anchor=anchor)
    state = start(drafter, fs.rules.coupled, prompts=[[2, 2, 5, 2], [2], [7, 2, 2]])
    check_rounds(state, drafter, partial(expected, drafter=drafter), donate=True)


def test_a_reduced_vocabulary() -> None:
    drafter = dflash(model(outputs=5), MASK, torch.tensor([9, 2, 4, 0, 7], dtype=torch.int32))
    check_rounds(start(drafter, fs.rules.coupled), drafter, partial(expected, drafter=drafter), donate=True)


@pytest.mark.parametrize("rule", ["greedy", "coupled"])
def test_output_is_that_of_plain_decoding(rule: str, anchor: bool, donate: bool) -> None:
    check_lossless(dflash(MODEL, MASK, anchor=anchor), RULES[rule], donate=donate)


def test_ratio_rounds_are_the_written_definition(anchor: bool, donate: bool) -> None:
    drafter = dflash(MODEL, MASK, anchor=anchor)
    check_ratio(drafter, partial(expected, drafter=drafter), donate=donate)


def test_pure_and_donated_rounds_are_bit_equal(anchor: bool) -> None:
    drafter = dflash(MODEL, MASK, anchor=anchor)
    assert trace(drafter, fs.rules.ratio, donate=False) == trace(drafter, fs.rules.ratio, donate=True)


@pytest.mark.parametrize("rule", ["coupled", "ratio"])
def test_states_are_values(rule: str) -> None:
    check_values(dflash(MODEL, MASK), RULES[rule])


def test_a_row_that_was_cut_back_drafts_on_at_once(anchor: bool) -> None:
    """The newest token needs no hidden state, and those of all tokens before it are in the cache."""
    drafter = dflash(MODEL, MASK, anchor=anchor)
    state = start(drafter, fs.rules.coupled)
    for _ in range(4):
        state, _ = fs.step_round(state, TARGET, drafter)
    state = fs.truncate(state, {0: int(state.num_tokens[0]) - 3, 2: int(state.num_tokens[2]) - 1})
    check_rounds(state, drafter, partial(expected, drafter=drafter), donate=True)


def test_only_context_and_block_are_written(anchor: bool) -> None:
    """After a round every slot of the cache that is no place of a row's window is as it was."""
    drafter = dflash(MODEL, MASK, anchor=anchor)
    state = start(drafter, fs.rules.coupled)
    written = set()
    for row in (0, 2, 3):
        for position in range(len(committed(state, row)) + DRAFTS - anchor):
            written.add(int(state.draft_block_tables[row, position // 4]) * 4 + position % 4)
    state, _ = fs.prefill(state, drafter, donate=True)
    for cache in state.lease.draft.pool.kv.values():
        finite = cache.flatten(1, 2).isfinite().flatten(2).all(2)
        assert all(layer.nonzero().flatten().tolist() == sorted(written) for layer in finite)


def test_a_draft_sees_the_masks_behind_it() -> None:
    """A block of more masks makes other drafts: attention is not causal."""
    tokens = [5, 6, 7, 1, 10, 3]
    few, many = (block_logits(MODEL, tokens, masks)[1] for masks in (2, 4))
    assert (few - many).abs().max() > 1e-2


# ---------------------------------------------------------------- windows


def ints(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def window(
    drafts: int, rows: Sequence[tuple[int, Sequence[int]]], tables: torch.Tensor, config: DFlashConfig = CONFIG
) -> tuple[ForwardBatch, Block]:
    """The first pass of a round for rows of (tokens that are context already, all tokens), in blocks of four."""
    count, width = len(rows), 2 * drafts + 2
    tokens = torch.full((count, 24), -1, dtype=torch.int32)
    for row, (_, committed_tokens) in enumerate(rows):
        tokens[row, : len(committed_tokens)] = ints(*committed_tokens)
    names = ("out_input_ids", "out_positions", "out_slot_mapping", "out_token_rows")
    out = {name: torch.full((count * width,), 77, dtype=torch.int32) for name in names}
    out |= {"out_seq_lens": ints(*[77] * count), "out_last_token_indices": ints(*[77] * count * drafts)}
    window_inputs_(
        kind=FEED,
        tokens=tokens,
        num_tokens=ints(*[len(committed_tokens) for _, committed_tokens in rows]),
        fed_len=ints(*[held for held, _ in rows]),
        num_draft=ints(*[0] * count),
        num_drafted=ints(*[0] * count),
        is_live=ints(*[1] * count),
        block_tables=tables,
        block_size=4,
        width=width,
        limit=64,
        num_masks=drafts,
        mask_id=0,
        num_choices=drafts,
        choice_offset=1,
        **out,
    )
    features = torch.zeros(count * (drafts + 1), config.features.size)
    batch = ForwardBatch(
        out["out_input_ids"], out["out_positions"], torch.arange(0, (count + 1) * width, width).int(), out["out_seq_lens"],
        out["out_slot_mapping"], tables, out["out_last_token_indices"], width, (), features,
    )  # fmt: skip
    return batch, block_of(config, batch, torch.arange(count * width).int())


def test_the_first_example_of_the_written_contract() -> None:
    """Two rows: context by value, one of row 1's four tokens was refused, and queries go on from the kept end."""
    rows = [(0, [7, 8, 9, 21]), (10, [*range(1, 14), 22])]
    batch, block = window(2, rows, torch.arange(16).view(2, 8).int())
    queries = block.queries
    assert batch.input_ids[queries].tolist() == [21, 0, 0, 22, 0, 0]
    assert batch.positions[queries].tolist() == [3, 4, 5, 13, 14, 15]
    assert batch.slot_mapping[queries].tolist() == [3, 4, 5, 45, 46, 47]
    assert batch.positions[block.context].tolist() == [0, 1, 2, 10, 11, 12]
    assert block.slots.tolist() == [0, 1, 2, 42, 43, 44]
    wanted = {int(place): index for index, place in enumerate(queries)}
    assert [wanted[int(place)] for place in batch.logits_indices] == [1, 2, 4, 5]


def test_more_rows_and_fewer_blocks() -> None:
    """Three rows of four queries; refused context and what has no block writes nothing."""
    tables = ints(*[3, 5, -1, -1], *[6, -1, -1, -1], *[8, 9, -1, -1]).view(3, 4)
    batch, block = window(3, [(1, [4, 4, 4, 31]), (2, [5, 5, 32]), (3, [6, 6, 6, 6, 6, 6, 33])], tables)
    assert (block.width, block.choices) == (4, 3)
    assert batch.input_ids[block.queries].tolist() == [31, 0, 0, 0, 32, 0, 0, 0, 33, 0, 0, 0]
    assert batch.positions[block.queries].view(3, 4).tolist() == [[3, 4, 5, 6], [2, 3, 4, 5], [6, 7, 8, 9]]
    assert batch.slot_mapping[block.queries].view(3, 4).tolist() == [[15, 20, 21, 22], [26, 27, -1, -1], [38, 39, -1, -1]]
    assert block.slots.view(3, 4).tolist() == [[13, 14, -1, -1], [-1, -1, -1, -1], [35, 36, 37, -1]]
    wanted = {int(place): index for index, place in enumerate(block.queries)}
    assert [wanted[int(place)] for place in batch.logits_indices] == [1, 2, 3, 5, 6, 7, 9, 10, 11]


# ---------------------------------------------------------------- what does not fit


def test_half_precision() -> None:
    half = DFlash(CONFIG, {name: weight.bfloat16() for name, weight in MODEL.weights.items()})
    drafter = dflash(half, MASK)
    state, _ = fs.prefill(start(drafter, fs.rules.ratio), drafter)
    wanted = np.stack(expected(committed(state, 0), DRAFTS, drafter=dflash(MODEL, MASK)))
    assert np.abs(state.lease.carried()["draft_logits"][0].numpy() - wanted).max() < 0.15


def test_refuses_what_does_not_fit() -> None:
    for mask_id, error, words in ((None, ArgumentError, "mask token, got None"), (1.5, ArgumentTypeError, r"got 1.5 \(float\)")):
        with pytest.raises(error, match=words):
            dflash(MODEL, mask_id)
    with pytest.raises(ArgumentTypeError, match="anchor: expected True or False, got 1"):
        dflash(MODEL, MASK, anchor=1)
    for other, words in ((TARGET, "one that reads no hidden states"), (FeatureDraft(passes="parallel"), "ahead=1")):
        with pytest.raises(ModelError, match=words):
            dflash(other, MASK)
    with pytest.raises(ModelError, match="an id that the draft can read, below 12, got 12"):
        start(dflash(MODEL, 12), fs.rules.greedy)
    with pytest.raises(ModelError, match="vocabulary of 11, got a draft of 12"):
        start(dflash(model(outputs=12), MASK), fs.rules.greedy)
    with pytest.raises(ModelError, match=r"hidden states 0 to 2, got one for \(1, 3\)"):
        start(dflash(model(target_layers=(1, 3)), MASK), fs.rules.greedy)
    weights = dict(MODEL.weights)
    with pytest.raises(ModelError, match=r"\(12, 24\) for 'fc', got \(12, 12\)"):
        DFlash(CONFIG, weights | {"fc": weights["fc"][:, :12]})
    with pytest.raises(ModelError, match=r"'1\.key_norm', got none"):
        DFlash(CONFIG, {name: weight for name, weight in weights.items() if name != "1.key_norm"})
    with pytest.raises(ModelError, match=r"also \['0.key_norm', '0.query_norm'"):
        DFlash(replace(CONFIG, head_norms=False), weights)
    with pytest.raises(ModelError, match=r"also \['mask_feature'\]"):
        JaxDFlash(CONFIG, {"mask_feature": weights["norm"]})
    with pytest.raises(ArgumentTypeError, match="a DFlashConfig, got LlamaConfig"):
        DFlash(TARGET.config, TARGET.weights)


@pytest.mark.parametrize("drafts", [1, 3])
def test_refuses_windows_of_other_drafters(drafts: int) -> None:
    """Before anything is written."""
    batch, _ = window(drafts, [(0, [7, 8, 9, 5])], torch.arange(8)[None].int())
    kv = {entry.name: torch.zeros(2, 8, 4, *entry.shape) for entry in MODEL.kv_spec.entries}
    size = CONFIG.features.size
    for changes in (
        {"features": None},
        {"features": torch.zeros(drafts + 1, size + 1)},
        {"features": torch.zeros(2 * drafts + 2, size)},  # no block, though logits are wanted
        {"logits_indices": batch.logits_indices[:0]},  # a block, of which nothing is wanted
        {"logits_indices": None},
    ):
        with pytest.raises(ModelError, match=r"features \[R \* P, 24\], tokens \[R \* \(P \+ Q\)\] and up to Q wanted .* in 1 rows"):
            MODEL.forward(kv, replace(batch, **changes))
    assert all(not cache.any() for cache in kv.values())
