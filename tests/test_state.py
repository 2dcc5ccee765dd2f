"""The state as a value: pytree, donation, aliases, errors, snapshots, threads."""

import copy
import dataclasses
import pickle
import threading

import chex
import jax
import pytest
import torch
import torch.utils._pytree as torch_pytree
from oracle import checksum_greedy, config, output, pair, run

import funcspec as fs
from funcspec.errors import ArgumentError, ArgumentTypeError, DonatedStateError, ModelError, StateError, StepOrderError
from funcspec.leases import ALIGNMENT, Buffers
from funcspec.models import ChecksumModel
from funcspec.state import ARRAY_FIELDS, field_shape

TARGET, DRAFTER = pair()


@pytest.fixture
def state() -> fs.SpecState:
    made = fs.init(config(rows=2), TARGET, DRAFTER)
    made, _ = fs.admit(made, TARGET, DRAFTER, [[5, 6, 7], [1]], seeds=[-1, 2**64 - 1], stop_ids=[96])
    return run(made, TARGET, DRAFTER, 2)


def test_fields_are_declared_once(state: fs.SpecState) -> None:
    assert [f.name for f in dataclasses.fields(state)][: len(ARRAY_FIELDS)] == list(ARRAY_FIELDS)
    empty = fs.init(config(rows=2), TARGET, DRAFTER)
    for name, declared in ARRAY_FIELDS.items():
        array = getattr(empty, name)
        assert array.dtype == declared["dtype"] and tuple(array.shape) == field_shape(empty.config, name)
        assert (array == declared["fill"]).all() and declared["meaning"]
        assert array.data_ptr() % ALIGNMENT == 0


def test_small_buffers_share_one_arena(state: fs.SpecState) -> None:
    arena = state.lease.buffers.arena
    assert all(getattr(state, name).untyped_storage().data_ptr() == arena.untyped_storage().data_ptr() for name in ARRAY_FIELDS)
    places, total = Buffers.layout(state.config)
    ends = [at + size for at, size in places.values()]
    assert max(ends) <= total and all(at % ALIGNMENT == 0 for at, _ in places.values())


def test_a_pure_step_leaves_its_input_bit_for_bit(state: fs.SpecState) -> None:
    before = state.lease.buffers.arena.clone()
    fs.step_round(state, TARGET, DRAFTER)
    assert torch.equal(state.lease.buffers.arena, before)


def test_donation_keeps_addresses(state: fs.SpecState) -> None:
    address = state.tokens.data_ptr()
    state = run(state, TARGET, DRAFTER, 2, donate=True)
    assert state.tokens.data_ptr() == address
    assert run(state, TARGET, DRAFTER, 1).tokens.data_ptr() != address


DEAD_USES = {
    "read": lambda s: s.num_tokens,
    "every field": lambda s: [getattr(s, f.name) for f in dataclasses.fields(s) if f.name in ARRAY_FIELDS],
    "jax flatten": jax.tree.leaves,
    "torch flatten": torch_pytree.tree_flatten,
    "chex": lambda s: chex.assert_trees_all_equal(s, s),
    "equality": lambda s: s == s,
    "pickle": pickle.dumps,
    "deepcopy": copy.deepcopy,
    "snapshot": fs.snapshot,
    "fork": fs.fork,
    "replace": lambda s: dataclasses.replace(s, num_tokens=torch.zeros(2, dtype=torch.int32)),
    "prefill": lambda s: fs.prefill(s, DRAFTER),
    "decode": lambda s: fs.decode(s, DRAFTER),
    "verify": lambda s: fs.verify(s, TARGET),
    "score": lambda s: fs.score(s, TARGET),
    "admit": lambda s: fs.admit(s, TARGET, DRAFTER, [[1]]),
    "release": lambda s: fs.release(s, [0]),
    "any_active": fs.any_active,
    "printing field by field": lambda s: [print(getattr(s, f.name)) for f in dataclasses.fields(s)],
}


@pytest.mark.parametrize("use", DEAD_USES)
def test_a_dead_state_refuses(state: fs.SpecState, use: str) -> None:
    """M10 for every use of a state."""
    fs.prefill(state, DRAFTER, donate=True)
    with pytest.raises(DonatedStateError, match=r"consumed by prefill #\d+ \(donate=True\)\. Fix: use the state that step returned"):
        DEAD_USES[use](state)
    assert "donated: consumed by prefill #" in repr(state)


def test_aliases_die_together(state: fs.SpecState) -> None:
    aliases = [copy.copy(state), jax.tree.map(lambda x: x, state), dataclasses.replace(state), torch_pytree.tree_map(lambda x: x, state)]
    loose = jax.tree.map(torch.clone, state)
    expected = fs.snapshot(fs.step_round(state, TARGET, DRAFTER)[0])
    fs.prefill(state, DRAFTER, donate=True)
    for alias in aliases:
        with pytest.raises(DonatedStateError):
            _ = alias.tokens
    assert fs.snapshot(fs.step_round(loose, TARGET, DRAFTER)[0]) == expected


def test_a_failed_donated_step_kills_nothing(state: fs.SpecState) -> None:
    with pytest.raises(ArgumentError):
        fs.prefill(state, DRAFTER, num_draft=9, donate=True)
    assert fs.any_active(state)


def test_structures_of_successive_states_are_equal(state: fs.SpecState) -> None:
    later = run(state, TARGET, DRAFTER, 3, donate=True)
    other = fs.init(config(rows=2), TARGET, DRAFTER)
    assert jax.tree.structure(later) == jax.tree.structure(other)
    assert hash(jax.tree.structure(later)) == hash(jax.tree.structure(other))
    assert jax.tree.structure(later) != jax.tree.structure(fs.init(config(rows=3), TARGET, DRAFTER))
    names = [jax.tree_util.keystr(path) for path, _ in jax.tree_util.tree_leaves_with_path(later)]
    assert names == [f".{name}" for name in ARRAY_FIELDS]


def test_chex_works_on_states(state: fs.SpecState) -> None:
    chex.assert_trees_all_equal(state, fs.fork(state))
    chex.assert_trees_all_equal_shapes_and_dtypes(state, fs.fork(state))
    with pytest.raises(AssertionError):
        chex.assert_trees_all_equal(state, fs.step_round(state, TARGET, DRAFTER)[0])


def test_loose_arrays_are_packed_at_the_next_step(state: fs.SpecState) -> None:
    warmer = dataclasses.replace(state, stop_ids=torch.full_like(state.stop_ids, -1))
    assert warmer.stop_ids.eq(-1).all() and not state.stop_ids.eq(-1).all()
    stepped, _ = fs.step_round(warmer, TARGET, DRAFTER)
    assert stepped.lease.buffers.arena is not None
    assert output(stepped, 0) == checksum_greedy([5, 6, 7], len(output(stepped, 0)))
    original, _ = fs.step_round(state, TARGET, DRAFTER)
    assert output(original, 0) == output(stepped, 0)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_tokens": torch.zeros(2)}, r"state.num_tokens: expected a torch tensor of torch.int32, got torch.float32"),
        ({"num_tokens": torch.zeros(3, dtype=torch.int32)}, r"state.num_tokens: expected shape \(2,\), got \(3,\)"),
        ({"temperature": 0.5}, r"state.temperature: expected a torch tensor"),
    ],
)
def test_loose_arrays_that_do_not_fit_are_refused(state: fs.SpecState, change: dict, message: str) -> None:
    with pytest.raises((ArgumentError, ArgumentTypeError), match=message):
        fs.prefill(dataclasses.replace(state, **change), DRAFTER)
    assert fs.any_active(state)


def test_a_copy_with_one_field_replaced_outlives_a_donated_original(state: fs.SpecState) -> None:
    changed = dataclasses.replace(state, temperature=torch.zeros(2))
    expected, tokens = fs.snapshot(fs.step_round(changed, TARGET, DRAFTER)[0]), changed.tokens.clone()
    run(state, TARGET, DRAFTER, 2, donate=True)
    assert torch.equal(changed.tokens, tokens)
    assert fs.snapshot(fs.step_round(changed, TARGET, DRAFTER)[0]) == expected


def test_a_pytree_map_that_makes_views_outlives_a_donated_original(state: fs.SpecState) -> None:
    viewed = jax.tree.map(lambda array: array[:], state)
    expected, tokens = fs.snapshot(fs.step_round(viewed, TARGET, DRAFTER)[0]), viewed.tokens.clone()
    run(state, TARGET, DRAFTER, 2, donate=True)
    assert torch.equal(viewed.tokens, tokens)
    assert fs.snapshot(fs.step_round(viewed, TARGET, DRAFTER)[0]) == expected


def test_another_configuration_is_refused(state: fs.SpecState) -> None:
    with pytest.raises(StateError, match="config: expected the configuration the state was made with"):
        dataclasses.replace(state, config=config(rows=2, block_size=4))


def test_snapshots_cannot_be_written(state: fs.SpecState) -> None:
    with pytest.raises(ValueError, match="read-only"):
        fs.snapshot(state).fields["tokens"][0, 0] = 1


def test_a_truncated_copy_does_not_disturb_the_original(state: fs.SpecState) -> None:
    """A caller may shorten a row; the copy must not write over what the original relies on."""
    before = len(output(state, 0))
    shorter = dataclasses.replace(state, num_tokens=state.num_tokens - 1, draft_len=state.num_tokens - 2, tokens=state.tokens.clone())
    shorter.tokens[0, int(state.num_tokens[0]) - 2] = 50
    run(shorter, TARGET, DRAFTER, 3)
    after = run(state, TARGET, DRAFTER, 3)
    assert output(after, 0) == checksum_greedy([5, 6, 7], len(output(after, 0))) and len(output(after, 0)) > before


def test_snapshots_compare_hash_pickle_and_print(state: fs.SpecState) -> None:
    first, second = fs.snapshot(state), fs.snapshot(fs.fork(state))
    assert first == second and hash(first) == hash(second) and len({first, second}) == 1
    assert first != fs.snapshot(fs.step_round(state, TARGET, DRAFTER)[0])
    assert first != fs.snapshot(fs.fork(state, seeds=[1, 2])) and first != fs.snapshot(state, kv=False)
    assert pickle.loads(pickle.dumps(first)) == first
    assert repr(first).startswith("Snapshot(round start, rows [0, 1], with KV, ")


@pytest.mark.parametrize("kv", [True, False])
@pytest.mark.parametrize("decodes", [None, 0, 1, 2])
def test_restore_goes_on_exactly(state: fs.SpecState, kv: bool, decodes: int | None) -> None:
    if decodes is not None:
        state, _ = fs.prefill(state, DRAFTER)
        for _ in range(decodes):
            state, _ = fs.decode(state, DRAFTER)
    restored = fs.restore(fs.snapshot(state, kv=kv), TARGET, DRAFTER)
    if decodes is not None:
        restored, state = fs.verify(restored, TARGET)[0], fs.verify(state, TARGET)[0]
    assert fs.snapshot(run(restored, TARGET, DRAFTER, 3)) == fs.snapshot(run(state, TARGET, DRAFTER, 3))


def test_restore_needs_models_only_without_kv(state: fs.SpecState) -> None:
    assert fs.snapshot(fs.restore(fs.snapshot(state))) == fs.snapshot(state)
    with pytest.raises(ModelError, match="snapshot has no KV"):
        fs.restore(fs.snapshot(state, kv=False))
    with pytest.raises(ModelError, match="expected the model the state was made for"):
        fs.restore(fs.snapshot(state), ChecksumModel(vocab_size=50))


def test_pickle_and_deepcopy_make_independent_states(state: fs.SpecState) -> None:
    expected = fs.snapshot(run(state, TARGET, DRAFTER, 2))
    for made in (pickle.loads(pickle.dumps(state)), copy.deepcopy(state)):
        assert fs.snapshot(run(made, TARGET, DRAFTER, 2, donate=True)) == expected


def test_fork_reseeds(state: fs.SpecState) -> None:
    assert fs.fork(state, seeds=[1, 2]).seed.tolist() == [[1, 0], [2, 0]]
    assert state.seed.tolist() == [[-1, -1], [-1, -1]]
    with pytest.raises(ArgumentError, match="seeds: expected 2 seeds"):
        fs.fork(state, seeds=[1])


def test_another_thread_is_refused(state: fs.SpecState) -> None:
    found: list[Exception] = []

    def work() -> None:
        try:
            fs.step_round(state, TARGET, DRAFTER)
        except StateError as error:
            found.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert found and "another thread" in str(found[0])


def test_repr_is_readable(state: fs.SpecState) -> None:
    text = repr(state)
    assert text.startswith("SpecState(round start, 2 of 2 rows live, K=3, L=64, rules.greedy)")
    assert "row 0: live, 7/64 tokens, T=0" in text
    drafting, _ = fs.prefill(state, DRAFTER)
    assert "drafts [" in repr(drafting)


def test_states_are_immutable(state: fs.SpecState) -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        state.tokens = torch.zeros(1)
    with pytest.raises(AttributeError, match="no attribute 'positions'"):
        _ = state.positions


def test_models_that_do_not_fit_are_refused() -> None:
    small = fs.drafters.standalone(ChecksumModel(vocab_size=49))
    with pytest.raises(ModelError, match=r"vocabulary of 97, got a draft of 49"):
        fs.init(config(), TARGET, small)
    with pytest.raises(ModelError, match=r"max_len of at least max_model_len = 64, got 32"):
        fs.init(config(), ChecksumModel(max_len=32))
    state = fs.init(config(rows=2), TARGET, DRAFTER)
    state, _ = fs.admit(state, TARGET, DRAFTER, [[5]])
    with pytest.raises(ModelError, match="expected the drafter the state was made with, got NoneType"):
        fs.admit(state, TARGET, None, [[5]])
    with pytest.raises(ModelError, match=r"drafter: expected the model the state was made for \(of torch, vocabulary 97, max_len 4096"):
        fs.prefill(state, fs.drafters.standalone(ChecksumModel(max_len=100)))
    plain = fs.init(config(), TARGET)
    with pytest.raises(ModelError, match="expected None, as the state was made with"):
        fs.prefill(plain, DRAFTER)
    with pytest.raises(StepOrderError):
        fs.verify(state, TARGET)
