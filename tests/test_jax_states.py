"""States of JAX: the same steps, eagerly and in programs, with the tokens and small buffers of states of torch."""

from collections.abc import Callable
from functools import partial
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from oracle import CHECKSUM_RUNS, checksum_greedy

import funcspec as fs
from funcspec.interop import jax_model
from funcspec.models import ChecksumDraft, ChecksumModel, TableModel
from funcspec.state import ARRAY_FIELDS

DEVICE = "cuda" if jax.default_backend() == "gpu" else "cpu"
PROMPTS = [[5, 6, 7], [1], [40, 2, 9, 9]]

pytestmark = pytest.mark.skipif(DEVICE == "cpu" and torch.cuda.is_available(), reason="JAX and torch see other devices")


def config(**changes: Any) -> fs.SpecConfig:
    defaults: dict[str, Any] = {"max_num_reqs": 3, "max_model_len": 40, "num_speculative_tokens": 3, "rule": fs.rules.coupled}
    return fs.SpecConfig(**(defaults | {"device": DEVICE, "block_size": 4} | changes))


def pair(framework: str, spread: bool = True) -> tuple[Any, fs.drafters.Standalone]:
    made = jax_model if framework == "jax" else lambda model: model
    return made(ChecksumModel(spread=spread)), fs.drafters.standalone(made(ChecksumDraft(spread=spread)))


def admitted(framework: str, settings: fs.SpecConfig, *, spread: bool = True, **arguments: Any) -> tuple[fs.SpecState, Any, Any]:
    target, drafter = pair(framework, spread)
    sampled = {"temperature": [0.0, 0.7, 1.3]} if settings.rule is fs.rules.coupled else {}
    options: dict[str, Any] = {"seeds": [3, -4, 2**63 - 1], "max_tokens": [12, 30, 21], **sampled} | arguments
    state, _ = fs.admit(fs.init(settings, target, drafter), target, drafter, PROMPTS, **options)
    return state, target, drafter


def same(left: Any, right: Any) -> None:
    """Compare info records of torch and of JAX."""
    for name, value in vars(left).items():
        expected = value.cpu().numpy() if isinstance(value, torch.Tensor) else value
        np.testing.assert_array_equal(np.asarray(getattr(right, name)), expected, err_msg=name)


def rounds_of_torch(count: int, settings: fs.SpecConfig) -> tuple[list[fs.Snapshot], list[fs.Verdict]]:
    state, target, drafter = admitted("torch", settings)
    snapshots, verdicts = [fs.snapshot(state)], []
    for _ in range(count):
        state, verdict = fs.step_round(state, target, drafter)
        snapshots.append(fs.snapshot(state))
        verdicts.append(verdict)
    return snapshots, verdicts


def test_eager_steps_equal_torch_one_by_one() -> None:
    settings = config()
    state, target, drafter = admitted("torch", settings)
    other, jax_target, jax_drafter = admitted("jax", settings)
    assert fs.snapshot(other) == fs.snapshot(state) and other.framework == "jax"
    for wanted in (3, [0, 2, 1], 0):
        state, draft = fs.prefill(state, drafter, num_draft=wanted)
        other, same_draft = fs.prefill(other, jax_drafter, num_draft=wanted)
        same(draft, same_draft)
        for _ in range(2):
            assert fs.snapshot(other) == fs.snapshot(state)
            state, draft = fs.decode(state, drafter)
            other, same_draft = fs.decode(other, jax_drafter)
            same(draft, same_draft)
        state, scores = fs.score(state, target)
        other, same_scores = fs.score(other, jax_target)
        np.testing.assert_array_equal(np.asarray(same_scores.logits), scores.logits.cpu().float().numpy())
        state, verdict = fs.accept(state, scores)
        other, same_verdict = fs.accept(other, same_scores)
        same(verdict, same_verdict)
        assert fs.snapshot(other) == fs.snapshot(state)


def test_rounds_in_jit_equal_torch_and_trace_once() -> None:
    settings = config()
    snapshots, verdicts = rounds_of_torch(12, settings)
    state, target, drafter = admitted("jax", settings)
    traces = []

    @partial(jax.jit, donate_argnums=0)
    def turn(state: fs.SpecState) -> tuple[fs.SpecState, fs.Verdict]:
        traces.append(1)
        return fs.step_round(state, target, drafter)

    for number, expected in enumerate(verdicts):
        state, verdict = turn(state)
        same(expected, verdict)
        assert fs.snapshot(state) == snapshots[number + 1]
    assert len(traces) == 1 and not fs.any_active(state)


def test_a_scan_over_rounds_equals_torch() -> None:
    settings = config()
    snapshots, verdicts = rounds_of_torch(10, settings)
    state, target, drafter = admitted("jax", settings)
    run = jax.jit(lambda state: jax.lax.scan(lambda state, _: fs.step_round(state, target, drafter), state, length=10))
    for _ in range(2):  # undonated: the second run starts from the same state
        end, stacked = run(state)
        for number, expected in enumerate(verdicts):
            same(expected, jax.tree.map(lambda array: array[number], stacked))  # noqa: B023
        assert fs.snapshot(end) == snapshots[-1]
    assert fs.snapshot(state) == snapshots[0]


def test_a_while_loop_runs_until_all_rows_are_done() -> None:
    settings = config()
    state, target, drafter = admitted("torch", settings)
    start, jax_target, jax_drafter = admitted("jax", settings)
    run = jax.jit(lambda state: jax.lax.while_loop(fs.any_active, lambda state: fs.step_round(state, jax_target, jax_drafter)[0], state))
    end = run(start)
    while fs.any_active(state):
        state, _ = fs.step_round(state, target, drafter)
    assert fs.snapshot(end) == fs.snapshot(state)


def test_the_interpreter_gives_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    """One round with every kernel in Triton, from the same logits."""
    settings = config(max_num_reqs=3, max_model_len=16, num_speculative_tokens=2)
    state, target, drafter = admitted("torch", settings, max_tokens=6)
    other, jax_target, jax_drafter = admitted("jax", settings, max_tokens=6)
    from funcspec.kernels.op import Op

    chosen = Op.__call__
    monkeypatch.setattr(Op, "__call__", lambda op, *, backend=None, **arguments: chosen(op, backend="triton", **arguments))
    state, verdict = fs.step_round(state, target, drafter)
    lifted, same_verdict = jax.jit(fs.step_round)(other, jax_target, jax_drafter)
    monkeypatch.undo()
    same(verdict, same_verdict)
    assert fs.snapshot(state) == fs.snapshot(lifted) == fs.snapshot(fs.step_round(other, jax_target, jax_drafter)[0])


def test_greedy_output_is_the_targets_own() -> None:
    target, drafter = pair("jax", spread=False)
    emitted: dict[int, list[int]] = {index: [] for index in range(3)}
    settings = config(rule=fs.rules.greedy, max_num_reqs=2)  # fewer rows than prompts: release and admission between programs
    for emission in fs.generate(settings, target, drafter, [list(prompt) for prompt in CHECKSUM_RUNS], max_tokens=16):
        emitted[emission.prompt_index] += emission.tokens
    assert [emitted[index] for index in range(3)] == [list(tokens) for tokens, _, _ in CHECKSUM_RUNS.values()]


def test_num_draft_is_data() -> None:
    settings = config(rule=fs.rules.greedy)
    state, target, drafter = admitted("jax", settings, spread=False)
    traces = []

    @jax.jit
    def turn(state: fs.SpecState, wanted: jax.Array) -> tuple[fs.SpecState, fs.Verdict]:
        traces.append(1)
        return fs.step_round(state, target, drafter, num_draft=wanted)

    counts = []
    for wanted in ([0, 1, 2], [3, 0, 9], [-1, 2, 2]):
        state, verdict = turn(state, jnp.array(wanted, jnp.int32))
        counts.append(verdict.num_drafted.tolist())
    assert counts == [[0, 1, 2], [3, 0, 3], [0, 2, 2]] and len(traces) == 1


def addresses(state: fs.SpecState) -> list[int]:
    return [leaf.unsafe_buffer_pointer() for leaf in jax.tree.leaves(state) if leaf.size]


def test_donated_buffers_keep_their_addresses() -> None:
    settings = config()
    state, target, drafter = admitted("jax", settings)
    turn = jax.jit(fs.step_round, donate_argnums=0)
    state, _ = turn(state, target, drafter)
    before, old = sorted(addresses(state)), state
    state, _ = turn(state, target, drafter)
    assert sorted(addresses(state)) == before
    assert old.tokens.is_deleted() and old.kv["target"]["token"].is_deleted()
    with pytest.raises(RuntimeError, match="deleted"):
        np.asarray(old.tokens)


def test_undonated_arrays_are_untouched() -> None:
    """M1 for all leaves of a state."""
    state, target, drafter = admitted("jax", config())
    before = jax.tree.map(np.array, state)
    for step in (fs.step_round, jax.jit(fs.step_round)):
        step(state, target, drafter)
        chex.assert_trees_all_equal(jax.tree.map(np.array, state), before)


def test_nothing_dies_with_what_was_made_of_it() -> None:
    """Eager steps share no array with their input or their record, so donating the new state leaves both alone."""
    state, target, drafter = admitted("jax", config())
    drafting, _ = fs.prefill(state, drafter)
    scored, scores = fs.score(drafting, target)
    kept = fs.snapshot(state, rows=[0])
    made: list[tuple[Any, Any]] = [
        (state, fs.prefill(state, drafter)),
        (drafting, fs.decode(drafting, drafter)),
        (drafting, (scored, scores)),
    ]
    made += [
        (scored, fs.accept(scored, scores)),
        (state, fs.step_round(state, target, drafter)),
        (state, (fs.truncate(state, {0: 4}), None)),
    ]
    released = fs.release(state, [0])
    made += [
        (state, (released, None)),
        (released, (fs.resume(released, kept), None)),
        (released, fs.admit(released, target, drafter, [[3]])),
    ]
    for before, (after, record) in made:
        held = {id(leaf) for leaf in jax.tree.leaves((before, record))}
        assert held.isdisjoint(id(leaf) for leaf in jax.tree.leaves(after))
    after, verdict = fs.step_round(state, target, drafter)
    jax.jit(fs.step_round, donate_argnums=0)(after, target, drafter)
    assert verdict.finish_reason.tolist() == [0, 0, 0] and fs.snapshot(state, rows=[0]) == kept


def test_admission_and_release_between_programs_do_not_retrace() -> None:
    settings = config(max_num_reqs=2)
    traces = []
    results = {}
    for framework in ("torch", "jax"):
        target, drafter = pair(framework)

        def turn(state: fs.SpecState) -> fs.SpecState:
            traces.append(1)
            return fs.step_round(state, target, drafter)[0]  # noqa: B023

        step: Callable[[fs.SpecState], fs.SpecState] = jax.jit(turn, donate_argnums=0) if framework == "jax" else turn
        state = fs.init(settings, target, drafter)
        found = []
        state, _ = fs.admit(state, target, drafter, [[5, 6, 7]], seeds=[1], temperature=0.9)
        traces.clear()
        for number in range(6):
            if number == 2:
                state, first = fs.admit(state, target, drafter, [list(range(1, 24))], seeds=[2], temperature=0.5, chunk=5)
                found.append(first)
            if number == 4:
                state = fs.release(state, [0])
                state, first = fs.admit(state, target, drafter, [[9, 9]], seeds=[7], rows=[0], max_tokens=5)
                found.append(first)
            state = step(state)
            found.append(fs.snapshot(state))
        results[framework] = found
    assert results["torch"] == results["jax"] and len(traces) == 1


def test_a_fork_is_independent_of_donation() -> None:
    settings = config()
    state, target, drafter = admitted("jax", settings)
    branch, reseeded = fs.fork(state), fs.fork(state, seeds=[9, 8, 7])
    before = fs.snapshot(state)
    jax.jit(fs.step_round, donate_argnums=0)(state, target, drafter)
    assert fs.snapshot(branch) == before
    assert reseeded.seed.tolist() == [[9, 0], [8, 0], [7, 0]]


@pytest.mark.parametrize("kv", [True, False], ids=["with KV", "without KV"])
@pytest.mark.parametrize("phase", ["round start", "drafting"])
def test_snapshots_cross_between_frameworks(phase: str, kv: bool) -> None:
    settings = config()
    for here, there in (("torch", "jax"), ("jax", "torch")):
        state, target, drafter = admitted(here, settings)
        state, _ = fs.step_round(state, target, drafter)
        if phase == "drafting":
            state, _ = fs.prefill(state, drafter)
        other_target, other_drafter = pair(there)
        models = {} if kv else {"target": other_target, "drafter": other_drafter}
        other = fs.restore(fs.snapshot(state, kv=kv), **models, framework=there)
        assert other.framework == there and fs.snapshot(other) == fs.snapshot(state)
        assert fs.restore(fs.snapshot(state)).framework == here
        ends = []
        for one, models_of in ((state, (target, drafter)), (other, (other_target, other_drafter))):
            after = fs.decode(one, models_of[1])[0] if phase == "drafting" else fs.prefill(one, models_of[1])[0]
            ends.append(fs.snapshot(fs.verify(after, models_of[0])[0]))
        assert ends[0] == ends[1]


def test_leaves_and_their_names() -> None:
    state, _, _ = admitted("jax", config())
    paths = [jax.tree_util.keystr(path) for path, _ in jax.tree_util.tree_leaves_with_path(state)]
    kv = [f".kv['{role}']['{name}']" for role in ("draft", "target") for name in ("position", "token")]
    assert paths == [f".{name}" for name in ARRAY_FIELDS] + kv
    assert jax.tree.structure(state) == jax.tree.structure(fs.fork(state))
    doubled = jax.tree.map(lambda array: array + array, state)
    assert doubled.num_tokens.tolist() == (2 * state.num_tokens).tolist()


def test_a_model_without_a_cache_and_plain_decoding() -> None:
    table = ((0.0, 1.0, 0.0), (0.0, 0.0, 1.0), (0.5, 0.5, 0.0))
    outputs = []
    for target in (TableModel(table), jax_model(TableModel(table))):
        settings = config(max_num_reqs=1, num_speculative_tokens=0)
        found = fs.generate(settings, target, None, [[0, 1]], seeds=[5], temperature=1.0, max_tokens=20)
        outputs.append([token for emission in found for token in emission.tokens])
    assert outputs[0] == outputs[1] and len(outputs[0]) == 20


def test_changed_logits_decode_in_ones_own_way() -> None:
    settings = config(rule=fs.rules.greedy)
    state, target, drafter = admitted("jax", settings, spread=False)

    @jax.jit
    def banned(state: fs.SpecState) -> tuple[fs.SpecState, fs.Verdict]:
        state, _ = fs.prefill(state, drafter)
        state, scores = fs.score(state, target)
        allowed = scores.logits.at[:, :, 1].set(-jnp.inf)
        return fs.accept(state, fs.Scores(allowed, scores.stamp))

    _, verdict = banned(state)
    assert checksum_greedy([5, 6, 7], 2)[1] == 1 and int(verdict.tokens[0, 0]) == 0  # the lowest of the rest
