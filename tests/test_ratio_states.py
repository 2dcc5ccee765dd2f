"""States under the ratio rule are values, in torch and in JAX, in mid-round too."""

import pickle
from typing import Any

import jax
import pytest
import torch
from oracle import config
from ratio_oracle import DRAFTER, LENGTH, PROMPTS, RATIO, TARGET, VOCAB, admitted

import funcspec as fs
from funcspec.drafters import Standalone, standalone
from funcspec.interop import jax_model
from funcspec.kernels.op import Op
from funcspec.models import ChecksumDraft, ChecksumModel


def trace(donate: bool) -> list[Any]:
    state = admitted(config(rows=3, length=LENGTH, rule=RATIO), donate=donate)
    found: list[Any] = []
    for _ in range(4):
        state, _ = fs.prefill(state, DRAFTER, donate=donate)
        found.append(fs.snapshot(state))
        state, _ = fs.decode(state, DRAFTER, donate=donate)
        found.append(fs.snapshot(state))
        state, scores = fs.score(state, TARGET, donate=donate)
        state, verdict = fs.accept(state, scores, donate=donate)
        found += [fs.snapshot(state), verdict.tokens.tolist()]
    return found


def test_pure_and_donated_runs_are_bit_equal() -> None:
    assert trace(True) == trace(False)


def finish(state: fs.SpecState, donate: bool = False) -> list[Any]:
    """The rest of the round and one more."""
    state, _ = fs.decode(state, DRAFTER, donate=donate)
    state, verdict = fs.verify(state, TARGET, donate=donate)
    state, after = fs.step_round(state, TARGET, DRAFTER, donate=donate)
    return [verdict.tokens.tolist(), after.tokens.tolist(), fs.snapshot(state)]


def middle() -> fs.SpecState:
    state = admitted(config(rows=3, length=LENGTH, rule=RATIO))
    return fs.prefill(state, DRAFTER)[0]


def test_what_drafts_were_drawn_from_is_part_of_a_state() -> None:
    """Forks, snapshots, pickles and pytree copies in mid-round go on alike, also after the original was donated."""
    state = middle()
    expected = finish(state)
    twin, taken, packed = fs.fork(state), fs.snapshot(state), pickle.dumps(state)
    mapped = jax.tree.map(lambda array: array.clone(), state)
    assert finish(state, donate=True) == expected
    for other in (twin, fs.restore(taken), pickle.loads(packed), mapped):
        assert finish(fs.fork(other)) == expected
        assert finish(other, donate=True) == expected
    bare = fs.restore(fs.snapshot(middle(), kv=False), TARGET, DRAFTER)
    assert finish(bare) == expected


@pytest.mark.parametrize("donate", [False, True], ids=["pure", "donated"])
def test_siblings_do_not_share_what_they_write(donate: bool) -> None:
    """Several futures of one state in mid-round, with drafts of their own: the later ones do not show in the earlier ones."""
    state = fs.decode(middle(), DRAFTER)[0]
    reseeded = fs.fork(state, seeds=[7, 8, 9])
    longer, released = fs.decode(state, DRAFTER)[0], fs.release(state, [2])
    scored, scores = fs.score(state, TARGET)
    expected = fs.accept(scored, scores)[1].tokens.tolist()
    before = [fs.snapshot(one) for one in (state, longer, released)]
    # Two drafts more with other noise: what the last one is drawn from differs.
    other = fs.prefill(fs.fork(admitted(config(rows=3, length=LENGTH, rule=RATIO)), seeds=[7, 8, 9]), DRAFTER)[0]
    for _ in range(2):
        other, _ = fs.decode(other, DRAFTER, donate=donate)
    branch, _ = fs.decode(reseeded, DRAFTER, donate=donate)
    addresses = {one.lease.carried()["draft_logits"].data_ptr() for one in (state, longer, released, scored, branch, other)}
    assert len(addresses) == 6
    for one in (branch, other):
        assert fs.snapshot(one) != before[1]
    assert [fs.snapshot(one) for one in (state, longer, released)] == before
    assert fs.accept(scored, scores)[1].tokens.tolist() == expected
    assert fs.verify(released, TARGET)[1].tokens[:2].tolist() == expected[:2]
    if donate:
        assert fs.verify(state, TARGET, donate=True)[1].tokens.tolist() == expected


def test_equal_futures_are_equal_snapshots() -> None:
    """Buffers that an earlier round has written to do not show."""
    state = admitted(config(rows=3, length=LENGTH, rule=RATIO))
    used = fs.step_round(fs.fork(state), TARGET, DRAFTER, donate=True)[0]
    fresh = fs.restore(fs.snapshot(used))
    for donate in (False, True):
        one, two = (fs.prefill(fs.fork(start), DRAFTER, num_draft=[1, 2, 0], donate=donate)[0] for start in (used, fresh))
        assert fs.snapshot(one) == fs.snapshot(two)
    other = fs.restore(fs.snapshot(one))
    changed = fs.snapshot(other)
    changed.carried["draft_normalisers"].flags.writeable = True
    changed.carried["draft_normalisers"][0, 0, 0] += 1
    assert changed != fs.snapshot(one)


class Failing(ChecksumDraft):
    """Raises when it is told to."""

    def forward(self, kv: Any, batch: Any) -> Any:
        if FAILURE:
            raise ValueError("no")
        return super().forward(kv, batch)


FAILURE: list[int] = []


@pytest.mark.parametrize("donate", [False, True], ids=["pure", "donated"])
def test_a_model_that_raises_leaves_the_state_usable(donate: bool) -> None:
    drafter = standalone(Failing(spread=True))
    state = admitted(config(rows=3, length=LENGTH, rule=RATIO), drafter=drafter)
    expected = finish(fs.prefill(state, DRAFTER)[0])
    for step in (lambda s: fs.prefill(s, drafter, donate=donate), lambda s: fs.decode(s, drafter, donate=donate)):
        FAILURE.append(1)
        with pytest.raises(ValueError, match="no"):
            step(state)
        FAILURE.clear()
        if state.lease.phase == "round start":
            state, _ = step(state)
    state, _ = fs.decode(state, drafter, donate=donate)
    state, verdict = fs.verify(state, TARGET, donate=donate)
    assert verdict.tokens.tolist() == expected[0]


def test_a_failed_round_goes_on_as_if_it_had_not_been() -> None:
    class FailsOnce(ChecksumModel):
        def forward(self, kv: Any, batch: Any) -> Any:
            if FAILURE and batch.max_query_len == 4:
                FAILURE.clear()
                raise ValueError("no")
            return super().forward(kv, batch)

    target = FailsOnce(spread=True)
    state = admitted(config(rows=3, length=LENGTH, rule=RATIO), target=target)
    expected = fs.step_round(state, target, DRAFTER)[1]
    FAILURE.append(1)
    with pytest.raises(ValueError, match="no"):
        fs.step_round(state, target, DRAFTER, donate=True)
    assert fs.step_round(state, target, DRAFTER, donate=True)[1].tokens.tolist() == expected.tokens.tolist()


def test_other_rules_keep_nothing() -> None:
    state = middle()
    assert set(state.lease.carried()) == {"draft_logits", "draft_normalisers", "is_point"}
    assert tuple(state.lease.carried()["draft_logits"].shape) == (3, 3, VOCAB)
    other = fs.prefill(admitted(config(rows=3, length=LENGTH, rule=fs.rules.coupled)), DRAFTER)[0]
    assert not other.lease.carried() and not fs.snapshot(other).carried


def test_donated_rounds_keep_their_buffers() -> None:
    state = admitted(config(rows=3, length=LENGTH, rule=RATIO))
    addresses = set()
    for _ in range(4):
        state, _ = fs.prefill(state, DRAFTER, donate=True)
        addresses.add(state.lease.carried()["draft_logits"].data_ptr())
        state, _ = fs.verify(state, TARGET, donate=True)
    assert len(addresses) == 1


# ---------------------------------------------------------------- JAX


def jax_pair(device: str = "cpu") -> tuple[Any, Standalone]:
    if jax.default_backend() != {"cpu": "cpu", "cuda": "gpu"}[device]:
        pytest.skip(f"JAX does not work on {device} here")
    return jax_model(TARGET), standalone(jax_model(DRAFTER.model))


def test_jax_equals_torch() -> None:
    """Eagerly, in jit and in a scan: the same verdicts and snapshots, in mid-round too, where they cross between the two."""
    settings_ = config(rows=3, length=LENGTH, rule=RATIO)
    state = admitted(settings_)
    target, drafter = jax_pair()
    start = admitted(settings_, target, drafter)
    assert fs.snapshot(start) == fs.snapshot(state)
    verdicts, snapshots = [], []
    for _ in range(5):
        state, verdict = fs.step_round(state, TARGET, DRAFTER)
        verdicts.append(verdict)
        snapshots.append(fs.snapshot(state))
    eager, drafting = start, middle()
    other, _ = fs.prefill(eager, drafter)
    assert fs.snapshot(other) == fs.snapshot(drafting)
    assert finish(fs.restore(fs.snapshot(other), framework="torch")) == finish(drafting)
    crossed = fs.restore(fs.snapshot(drafting), framework="jax")
    for one in (other, crossed):
        one, _ = fs.decode(one, drafter)
        one, _ = fs.decode(one, drafter)
        one, verdict = fs.verify(one, target)
        assert verdict.tokens.tolist() == verdicts[0].tokens.tolist()
    end, stacked = jax.jit(lambda s: jax.lax.scan(lambda s, _: fs.step_round(s, target, drafter), s, length=5))(start)
    assert fs.snapshot(end) == snapshots[-1]
    assert stacked.tokens.tolist() == [verdict.tokens.tolist() for verdict in verdicts]
    turn = jax.jit(fs.step_round, donate_argnums=0)
    again = fs.fork(start)
    for number in range(3):
        again, verdict = turn(again, target, drafter)
        assert verdict.tokens.tolist() == verdicts[number].tokens.tolist() and fs.snapshot(again) == snapshots[number]


def test_the_interpreter_gives_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two rounds with every kernel in Triton, in torch and lifted."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    settings_ = config(rows=3, length=16, drafts=2, rule=RATIO, device=device)
    target, drafter = jax_pair(device)
    few: dict[str, Any] = {"temperature": [1.0, 4.0, 0.0], "max_tokens": 7}
    state, other = admitted(settings_, **few), admitted(settings_, target, drafter, **few)
    expected = [fs.step_round(state, TARGET, DRAFTER), fs.step_round(other, target, drafter)]
    chosen = Op.__call__
    monkeypatch.setattr(Op, "__call__", lambda op, *, backend=None, **arguments: chosen(op, backend="triton", **arguments))
    found = [fs.step_round(state, TARGET, DRAFTER), jax.jit(fs.step_round)(other, target, drafter)]
    after = fs.step_round(found[0][0], TARGET, DRAFTER)[1]
    monkeypatch.undo()
    for (new, verdict), (same, other_verdict) in zip(found, expected, strict=True):
        assert fs.snapshot(new) == fs.snapshot(same) and verdict.tokens.tolist() == other_verdict.tokens.tolist()
    assert after.tokens.tolist() == fs.step_round(expected[0][0], TARGET, DRAFTER)[1].tokens.tolist()


def test_jax_states_have_equal_structures() -> None:
    target, drafter = jax_pair()
    start = admitted(config(rows=3, length=LENGTH, rule=RATIO), target, drafter)
    after, _ = fs.step_round(start, target, drafter)
    assert jax.tree.structure(start) == jax.tree.structure(after) == jax.tree.structure(fs.fork(start))
    assert set(start.kv) == {"target", "draft", "carried"}
    plain = fs.init(config(rows=3, length=LENGTH, rule=fs.rules.coupled), target, drafter)
    assert set(plain.kv) == {"target", "draft"}


def test_generate_streams_whole_jobs() -> None:
    """More prompts than rows, stop ids, both frameworks."""
    found = []
    for target, drafter in ((TARGET, DRAFTER), jax_pair()):
        emissions = fs.generate(
            config(rows=2, length=LENGTH, rule=RATIO),
            target,
            drafter,
            PROMPTS,
            seeds=[1, 2, 3],
            temperature=0.9,
            max_tokens=9,
            stop_ids=[11],
        )
        found.append(sorted((emission.prompt_index, emission.round, emission.tokens) for emission in emissions))
    assert found[0] == found[1]
