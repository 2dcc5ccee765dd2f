"""States of JAX whose draft reads hidden states, with lifted torch models: equal to states of torch, eagerly and in programs."""

from collections.abc import Iterator
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from feature_toys import FeatureDraft, FeatureTarget
from feature_truth import check_features, same_bits
from oracle import checksum_greedy, output

import funcspec as fs
from funcspec.drafters import fallback, ngram
from funcspec.drafters.eagle import Eagle, eagle
from funcspec.errors import ModelError
from funcspec.interop import jax_model
from funcspec.models import ChecksumModel
from funcspec.models.base import ForwardBatch
from funcspec.models.heads import EagleConfig, random_head
from funcspec.models.llama import LlamaConfig, random_llama

PROMPTS = [[5, 6, 7], [1], [40, 2, 9, 9]]
PROMPTS_OF_31 = [[5, 6, 7], [1], [30, 2, 9, 9]]
RULES = [fs.rules.greedy, fs.rules.coupled, fs.rules.ratio]

pytestmark = pytest.mark.skipif(jax.default_backend() != "cpu" or torch.cuda.is_available(), reason="the toy models are for a CPU")

# Equal models share one compiled program, which calls back the first of them: so there is one of each kind.
HEADS = {spread: FeatureDraft(layers=(0, 2), spread=spread) for spread in (False, True)}


@pytest.fixture(autouse=True)
def no_mistakes() -> Iterator[None]:
    yield
    assert not any(head.mistakes for head in HEADS.values())


def config(**changes: Any) -> fs.SpecConfig:
    defaults: dict[str, Any] = {"max_num_reqs": 3, "max_model_len": 40, "num_speculative_tokens": 3, "rule": fs.rules.greedy}
    return fs.SpecConfig(**(defaults | {"block_size": 4} | changes))


def pair(framework: str, spread: bool = False) -> tuple[Any, Eagle]:
    made = jax_model if framework == "jax" else lambda model: model
    return made(FeatureTarget(spread=spread)), eagle(made(HEADS[spread]))


def admitted(framework: str, settings: fs.SpecConfig, **changes: Any) -> tuple[fs.SpecState, Any, Eagle]:
    target, drafter = pair(framework, settings.rule.samples)
    sampled = {"temperature": [0.0, 0.7, 1.3]} if settings.rule.samples else {}
    options: dict[str, Any] = {"seeds": [3, -4, 2**63 - 1], "max_tokens": [12, 30, 21], "chunk": 3, **sampled} | changes
    return fs.admit(fs.init(settings, target, drafter), target, drafter, PROMPTS, **options)[0], target, drafter


def same(left: Any, right: Any) -> None:
    """Compare info records of torch and of JAX."""
    for name, value in vars(left).items():
        np.testing.assert_array_equal(np.asarray(getattr(right, name)), np.asarray(value), err_msg=name)


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.name)
def test_eager_steps_equal_torch_one_by_one(rule: fs.rules.Rule) -> None:
    settings = config(rule=rule)
    state, target, drafter = admitted("torch", settings)
    other, jax_target, jax_drafter = admitted("jax", settings)
    same_bits(fs.snapshot(state), fs.snapshot(other))
    for wanted in (3, [0, 2, 1], 0, 3):
        state, draft = fs.prefill(state, drafter, num_draft=wanted)
        other, same_draft = fs.prefill(other, jax_drafter, num_draft=wanted)
        same(draft, same_draft)
        for _ in range(2):
            same_bits(fs.snapshot(state), fs.snapshot(other))
            state, draft = fs.decode(state, drafter)
            other, same_draft = fs.decode(other, jax_drafter)
            same(draft, same_draft)
        state, scores = fs.score(state, target)
        other, same_scores = fs.score(other, jax_target)
        np.testing.assert_array_equal(np.asarray(same_scores.logits), scores.logits.numpy())
        state, verdict = fs.accept(state, scores)
        other, same_verdict = fs.accept(other, same_scores)
        same(verdict, same_verdict)
        same_bits(fs.snapshot(state), fs.snapshot(other))
        check_features(other)


@pytest.mark.parametrize(("rule", "drafts"), [*((rule, 3) for rule in RULES), (fs.rules.coupled, 0), (fs.rules.coupled, 1)], ids=str)
def test_rounds_in_jit_equal_torch_and_trace_once(rule: fs.rules.Rule, drafts: int) -> None:
    settings = config(rule=rule, num_speculative_tokens=drafts)
    state, target, drafter = admitted("torch", settings)
    other, jax_target, jax_drafter = admitted("jax", settings)
    traces = []

    @partial(jax.jit, donate_argnums=0)
    def turn(state: fs.SpecState) -> tuple[fs.SpecState, fs.Verdict]:
        traces.append(1)
        return fs.step_round(state, jax_target, jax_drafter)

    for number in range(8):
        if number == 5:  # between programs a row is cut back, further than its last round reaches
            state, other = (fs.truncate(one, {1: 3}) for one in (state, other))
        state, verdict = fs.step_round(state, target, drafter)
        other, same_verdict = turn(other)
        same(verdict, same_verdict)
        assert number != 5 or int(verdict.num_drafted[1]) == 0
        same_bits(fs.snapshot(state), fs.snapshot(other))
        check_features(other)
    assert len(traces) == 1


def test_a_scan_over_rounds_leaves_the_state_alone() -> None:
    state, target, drafter = admitted("torch", config())
    start, jax_target, jax_drafter = admitted("jax", config())
    before = fs.snapshot(start)
    end, stacked = jax.jit(lambda one: jax.lax.scan(lambda s, _: fs.step_round(s, jax_target, jax_drafter), one, length=6))(start)
    for number in range(6):
        state, verdict = fs.step_round(state, target, drafter)
        assert stacked.tokens[number].tolist() == verdict.tokens.tolist()
    same_bits(fs.snapshot(end), fs.snapshot(state))
    same_bits(fs.snapshot(start), before)
    branch = fs.fork(start)
    jax.jit(lambda one: fs.step_round(one, jax_target, jax_drafter), donate_argnums=0)(start)
    same_bits(fs.snapshot(branch), before)


def test_features_are_leaves_of_a_state() -> None:
    state, _, _ = admitted("jax", config())
    paths = {jax.tree_util.keystr(path): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(state)}
    assert paths[".kv['carried']['features']"].shape == (3, 4, 6) and paths[".kv['draft']['feature']"].dtype == jnp.float32


def test_lookup_in_front() -> None:
    ends = []
    for framework in ("torch", "jax"):
        target, second = pair(framework)
        drafter = fallback(ngram(), second)
        state, _ = fs.admit(fs.init(config(), target, drafter), target, drafter, [[0, 1, 2, 0, 1], [1], [5, 6, 7]], seeds=[1, 2, 3])
        turn = jax.jit(fs.step_round) if framework == "jax" else fs.step_round
        found = []
        for _ in range(8):
            state, verdict = turn(state, target, drafter)
            found.append((fs.snapshot(state), verdict.tokens.tolist()))
            check_features(state)
        ends.append(found)
    assert ends[0] == ends[1]


@pytest.mark.parametrize("kv", [True, False], ids=["with KV", "without KV"])
@pytest.mark.parametrize("phase", ["round start", "drafting"])
def test_snapshots_cross_between_frameworks(phase: str, kv: bool) -> None:
    for here, there in (("torch", "jax"), ("jax", "torch")):
        state, target, drafter = admitted(here, config())
        state, _ = fs.step_round(state, target, drafter)
        if phase == "drafting":
            state, _ = fs.prefill(state, drafter)
        other_target, other_drafter = pair(there)
        if phase == "drafting" and not kv:
            with pytest.raises(ModelError, match="snapshot: expected KV in a snapshot taken in mid-round"):
                fs.restore(fs.snapshot(state, kv=False), other_target, other_drafter)
            continue
        other = fs.restore(fs.snapshot(state, kv=kv), other_target, other_drafter)
        assert other.framework == there
        same_bits(fs.snapshot(other), fs.snapshot(state))
        ends = []
        for one, models in ((state, (target, drafter)), (other, (other_target, other_drafter))):
            after = fs.decode(one, models[1])[0] if phase == "drafting" else fs.prefill(one, models[1])[0]
            ends.append(fs.snapshot(fs.verify(after, models[0])[0]))
        same_bits(*ends)


def test_rows_come_and_go_and_move() -> None:
    """Slots are used again; a row moves from a state of JAX to one of torch and back, with and without KV."""
    state, target, drafter = admitted("jax", config())
    state, _ = fs.step_round(state, target, drafter)
    paused = fs.snapshot(state, rows=[1], kv=False)
    state = fs.release(state, [1])
    state, _ = fs.admit(state, target, drafter, [[9, 9]], seeds=[6])
    torch_target, torch_drafter = pair("torch")
    elsewhere = fs.resume(fs.init(config(), torch_target, torch_drafter), paused, torch_target, torch_drafter, rows=[2])
    elsewhere, _ = fs.step_round(elsewhere, torch_target, torch_drafter)
    back = fs.resume(fs.release(state, [0]), fs.snapshot(elsewhere, rows=[2]), target, drafter, rows=[0])
    for _ in range(4):
        check_features(back)
        back, _ = fs.step_round(back, target, drafter)
    for row, prompt in ((0, [1]), (1, [9, 9]), (2, PROMPTS[2])):
        assert output(back, row) == checksum_greedy(prompt, len(output(back, row)))


# ---------------------------------------------------------------- what is lifted


def test_a_lifted_llama_and_a_head_with_a_narrow_state() -> None:
    """What the head hands on is a third as wide as its features; in mid-round no more than that is a value."""
    shape = {"vocab_size": 31, "hidden_size": 16, "intermediate_size": 32, "num_heads": 2, "num_kv_heads": 1, "head_dim": 8, "max_len": 64}
    target = random_llama(LlamaConfig(num_layers=2, **shape), 3)
    head = random_head(EagleConfig(num_layers=1, style="eagle3", target_layers=(0, 1, 2), **shape), 1)
    ends = []
    for made in (lambda model: model, jax_model):
        models = made(target), eagle(made(head))
        state = fs.init(config(rule=fs.rules.coupled), *models)
        state, _ = fs.admit(state, *models, PROMPTS_OF_31, seeds=[1, 2, 3], temperature=[0.0, 0.9, 1.2])
        found = []
        for _ in range(4):
            state, _ = fs.prefill(state, models[1], num_draft=[3, 1, 2])
            state, _ = fs.decode(state, models[1])
            found.append(fs.snapshot(state))
            assert not found[-1].carried["features"][:, :, 16:].any() and found[-1].carried["features"][0, 0, :16].any()
            state, _ = fs.verify(state, models[0])
            found.append(fs.snapshot(state))
        ends.append(found)
    for left, right in zip(*ends, strict=True):
        same_bits(left, right)


def test_a_lifted_model_says_what_the_torch_model_says() -> None:
    target, head = jax_model(FeatureTarget()), jax_model(HEADS[False])
    assert (target.hidden_size, target.num_layers) == (3, 2) and head.features == HEADS[False].features
    plain = jax_model(ChecksumModel())
    for name in ("features", "hidden_size", "num_layers", "input_vocab_size", "vocab_fingerprint", "spread", "anything"):
        with pytest.raises(AttributeError):
            getattr(plain, name)
    assert target == jax_model(FeatureTarget()) and hash(target) == hash(jax_model(FeatureTarget()))
    with pytest.raises(ModelError, match=r"drafter: expected a draft for hidden states of 4 from 2 layers"):
        fs.init(config(), jax_model(FeatureTarget(hidden_size=4)), eagle(head))


def batch_of(*tokens: int, layers: tuple[int, ...]) -> ForwardBatch:
    count = len(tokens)
    arrays = (tokens, range(count), (0, count), (count,), range(count))
    ids, positions, starts, lengths, slots = (jnp.array(list(values), jnp.int32) for values in arrays)
    return ForwardBatch(ids, positions, starts, lengths, slots, jnp.zeros((1, 1), jnp.int32), None, count, layers)


def cache() -> dict[str, jax.Array]:
    return {name: jnp.zeros((1, 1, 8), jnp.int32) for name in ("token", "position")}


class Narrow(FeatureTarget):
    """Computes in bfloat16."""

    def forward(self, kv: Any, batch: ForwardBatch) -> Any:
        kv, logits, hidden = super().forward(kv, batch)
        return kv, logits.bfloat16(), tuple(states.bfloat16() for states in hidden)


@pytest.mark.parametrize("jit", [False, True])
def test_hidden_states_are_handed_over_exactly(jit: bool) -> None:
    call = jax.jit(lambda kv, batch: jax_model(Narrow()).forward(kv, batch)) if jit else jax_model(Narrow()).forward
    _, logits, hidden = call(cache(), batch_of(5, 6, 7, layers=(2, 0, 2)))
    assert logits.dtype == jnp.float32 and [states.dtype for states in hidden] == [jnp.float32] * 3
    right = np.array([[0, 5, 6], [1, 6, 18], [2, 7, 39]], np.float32)
    for states, layer in zip(hidden, (2, 0, 2), strict=True):
        np.testing.assert_array_equal(np.asarray(states), right + layer)


class Wide(FeatureTarget):
    """Returns hidden states wider than it says."""

    def forward(self, kv: Any, batch: ForwardBatch) -> Any:
        kv, logits, hidden = super().forward(kv, batch)
        return kv, logits, tuple(torch.cat([states, states], 1) for states in hidden)


class Silent(FeatureDraft):
    """Hands nothing on."""

    def forward(self, kv: Any, batch: ForwardBatch) -> Any:
        kv, logits, _ = super().forward(kv, batch)
        return kv, logits, ()


def test_hidden_states_of_another_kind_are_refused() -> None:
    with pytest.raises(
        ModelError, match="model: expected a model that says its hidden_size, as hidden states are wanted, got ChecksumModel"
    ):
        jax_model(ChecksumModel()).forward(cache(), batch_of(5, 6, layers=(0,)))
    with pytest.raises(Exception, match=r"forward: expected hidden states \[\[2, 3\]\], got \[\[2, 6\]\]\. Fix: return one for each"):
        jax.block_until_ready(jax_model(Wide()).forward(cache(), batch_of(5, 6, layers=(0,))))
    target, drafter = pair("jax")
    for wrong in (ChecksumModel(), Wide()):
        state = fs.init(config(), jax_model(wrong), drafter)
        before = fs.snapshot(state)
        with pytest.raises(Exception, match=r"expected a model that says its hidden_size|forward: expected hidden states"):
            fs.admit(state, jax_model(wrong), drafter, [[5, 6, 7]])
        same_bits(fs.snapshot(state), before)
    silent = eagle(jax_model(Silent(layers=(0, 2))))
    state, _ = fs.admit(fs.init(config(), target, silent), target, silent, PROMPTS)
    before = fs.snapshot(state)
    with pytest.raises(Exception, match=r"forward: expected hidden states \[\[3, 6\]\], got \[\]"):
        jax.block_until_ready(fs.prefill(state, silent)[0].tokens)
    same_bits(fs.snapshot(state), before)
