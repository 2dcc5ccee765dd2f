"""Multi-token prediction with one module for each draft, against modules written out as they are trained; and with one used again."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import numpy as np
import pytest
import torch
from head_oracle import CONFIGS, SMALL, Pair, agreeing_pair, said, target_features, target_says
from oracle import config, output
from ratio_oracle import written_round
from test_llama import Cache

import funcspec as fs
from funcspec.drafters import Eagle, eagle, mtp
from funcspec.errors import ArgumentTypeError, FuncspecError, ModelError
from funcspec.models.base import Model
from funcspec.models.heads import EagleHead, MtpModules, random_head
from funcspec.models.jax_heads import JaxEagleHead, JaxMtpModules
from funcspec.models.jax_llama import JaxLlama
from funcspec.models.llama import Llama, random_llama

PROMPTS = [[5, 6, 7], [1, 2], [40, 2, 9, 9, 33], [17]]
LENGTH = 32
LAYERED = replace(CONFIGS["mtp"], num_layers=2)


@pytest.fixture(autouse=True)
def on_the_cpu() -> Iterator[None]:
    """Where the weights of the torch models are."""
    with jax.default_device(jax.devices("cpu")[0]):
        yield


@pytest.fixture(params=[False, True], ids=["pure", "donated"])
def donate(request: pytest.FixtureRequest) -> bool:
    return request.param


@dataclass(frozen=True)
class Modules:
    """A target with three modules that often agree with it."""

    target: Llama
    modules: tuple[EagleHead, ...]
    token_ids: torch.Tensor | None

    def logits(self, tokens: Sequence[int], drafts: Sequence[int]) -> torch.Tensor:
        """Of the module for the next draft: place i of module d has the state of place i of the one before, and token i + d + 1."""
        known, places = [*tokens, *drafts], len(tokens) - 1
        states = list(target_features(self.target, self.modules[0], tokens)[:places])
        answers = torch.empty(0)
        for depth, module in enumerate(self.modules[: len(drafts) + 1]):
            answers, handed = said(module, known[depth + 1 : depth + 1 + places], states)
            states = list(handed)
        return answers[-1]

    def drafted(self, tokens: Sequence[int], drafts: Sequence[int]) -> np.ndarray:
        """Logits over all target ids, float32; -inf for ids that the modules do not know."""
        whole = torch.full((self.target.vocab_size,), float("-inf"))
        ids = torch.arange(len(whole)) if self.token_ids is None else self.token_ids.long()
        whole[ids] = self.logits(tokens, drafts).float()
        return whole.numpy()

    def drafts(self, tokens: Sequence[int], count: int) -> list[int]:
        made: list[int] = []
        for _ in range(count):
            made.append(int(self.drafted(tokens, made).argmax()))
        return made


def agreeing_modules(*, reduced: bool = False) -> Modules:
    """Like `agreeing_pair`, three heads for one target, all different."""
    pairs = [agreeing_pair("mtp", reduced=reduced) for _ in range(3)]
    modules = []
    for seed, pair in enumerate(pairs):
        other = random_head(pair.head.config, seed=10 + seed)
        weights = {
            name: weight if name in ("embed", "head") else weight + 0.1 * other.weights[name] for name, weight in pair.head.weights.items()
        }
        modules.append(EagleHead(pair.head.config, weights, pair.token_ids))
    return Modules(pairs[0].target, tuple(modules), pairs[0].token_ids)


def started(models: Modules, drafter: Any, drafts: int = 3, rule: fs.rules.Rule = fs.rules.greedy, **settings: Any) -> fs.SpecState:
    state = fs.init(config(len(PROMPTS), LENGTH, drafts, rule=rule, block_size=4), models.target, drafter)
    return fs.admit(state, models.target, drafter, PROMPTS, chunk=2, **settings)[0]


def committed(state: fs.SpecState, row: int) -> list[int]:
    return state.tokens[row, : int(state.num_tokens[row])].tolist()


def draft(state: fs.SpecState, drafter: Any, **settings: Any) -> tuple[fs.SpecState, list[list[int]]]:
    state, made = fs.prefill(state, drafter, **settings)
    for _ in range(state.config.num_speculative_tokens - 1):
        state, made = fs.decode(state, drafter)
    return state, [[token for token in row if token >= 0] for row in made.tokens.tolist()]


def test_is_a_model() -> None:
    heads = tuple(random_head(LAYERED, seed=seed) for seed in range(3))
    for model in (MtpModules(heads), JaxMtpModules(tuple(map(JaxEagleHead.from_torch, heads)))):
        assert isinstance(model, Model)
        assert (model.vocab_size, model.input_vocab_size, model.max_len, model.features.feedback) == (61, 61, 64, 24)
        assert model.kv_spec.num_layers == 6 and [entry.shape for entry in model.kv_spec.entries] == [(2, 8), (2, 8), (24,)]
        assert model.at_depth(2).depth == 2 and model.at_depth(2).modules is model.modules


@pytest.mark.parametrize("reduced", [False, True], ids=["whole", "reduced"])
def test_each_module_drafts_as_it_was_trained(reduced: bool, donate: bool) -> None:
    """Rows of any length, shorter than there are modules too, that want any number of drafts."""
    models = agreeing_modules(reduced=reduced)
    drafter = mtp(list(models.modules), models.token_ids)
    state = started(models, drafter)
    rng = np.random.default_rng(1)
    accepted, made = 0, 0
    for _ in range(6):
        wanted = rng.integers(0, 4, len(PROMPTS)).tolist()
        before = [committed(state, row) for row in range(len(PROMPTS))]
        state, drafts = draft(state, drafter, num_draft=wanted, donate=donate)
        assert drafts == [models.drafts(tokens, count) for tokens, count in zip(before, wanted, strict=True)]
        state, verdict = fs.verify(state, models.target, donate=donate)
        for row, (tokens, own) in enumerate(zip(before, drafts, strict=True)):
            said_here = target_says(models.target, tokens + own).argmax(-1).tolist()[len(tokens) - 1 :]
            kept = next((place for place, token in enumerate(own) if token != said_here[place]), len(own))
            assert committed(state, row) == tokens + said_here[: kept + 1] and int(verdict.num_accepted[row]) == kept
            accepted, made = accepted + kept, made + len(own)
    assert 0 < accepted < made


def test_modules_of_several_layers() -> None:
    target = random_llama(SMALL, seed=3)
    models = Modules(target, tuple(random_head(LAYERED, seed=seed) for seed in range(3)), None)
    drafter = mtp(models.modules)
    state = started(models, drafter)
    for _ in range(3):
        before = [committed(state, row) for row in range(len(PROMPTS))]
        state, drafts = draft(state, drafter)
        assert drafts == [models.drafts(tokens, 3) for tokens in before]
        state, _ = fs.verify(state, target)


def test_the_ratio_rule_knows_what_drafts_were_drawn_from(donate: bool) -> None:
    models = agreeing_modules(reduced=donate)
    drafter = mtp(models.modules, models.token_ids)
    seeds, heat = [3, -4, 2**63 - 1, 9], [0.7, 1.3, 0.0, 2.0]
    state = started(models, drafter, rule=fs.rules.ratio, seeds=seeds, temperature=heat)
    origins = []
    for _ in range(4):
        before = [committed(state, row) for row in range(4)]
        state, drafts = draft(state, drafter, donate=donate)
        kept = state.lease.carried()["draft_logits"]
        for row, (tokens, own) in enumerate(zip(before, drafts, strict=True)):
            if heat[row]:  # greedy rows keep nothing
                wanted = np.stack([models.drafted(tokens, own[:count]) for count in range(3)])
                np.testing.assert_allclose(kept[row], wanted, atol=3e-5)
        state, verdict = fs.verify(state, models.target, donate=donate)
        for row, tokens in enumerate(before):
            made, emitted, found = written_round(
                tokens,
                seeds[row],
                heat[row],
                3,
                p=lambda sequence: target_says(models.target, sequence)[-1].float().numpy(),
                q=lambda sequence, tokens=tokens: models.drafted(tokens, sequence[len(tokens) :]),
            )
            assert made == drafts[row] and committed(state, row) == tokens + emitted
            assert [origin for origin in verdict.origin[row].tolist() if origin >= 0] == found
            origins += found
    assert set(origins) == {0, 1, 2}


def test_output_is_that_of_plain_decoding(donate: bool) -> None:
    models = agreeing_modules()
    settings = {"seeds": [1, 2, 3, 4], "temperature": 0.8, "max_tokens": [20, 9, 14, 17]}
    plain = fs.init(config(len(PROMPTS), LENGTH, 0, rule=fs.rules.coupled), models.target)
    plain, _ = fs.admit(plain, models.target, None, PROMPTS, **settings)
    while fs.any_active(plain):
        plain, _ = fs.verify(plain, models.target, donate=True)
    drafter = mtp(models.modules)
    state = started(models, drafter, rule=fs.rules.coupled, **settings)
    accepted = 0
    while fs.any_active(state):
        state, verdict = fs.step_round(state, models.target, drafter, donate=donate)
        accepted += int(verdict.num_accepted.sum())
    assert [output(state, row) for row in range(4)] == [output(plain, row) for row in range(4)] and accepted > 0


def test_pure_and_donated_runs_are_bit_equal_and_forks_do_not_show() -> None:
    models = agreeing_modules()
    drafter = mtp(models.modules)
    found = []
    for donate in (False, True):
        state = started(models, drafter, rule=fs.rules.coupled, seeds=[1, 2, 3, 4], temperature=1.0)
        taken = []
        for _ in range(5):
            other = fs.fork(state, seeds=[9, 8, 7, 6])
            for _ in range(2):
                other, _ = fs.step_round(other, models.target, drafter, donate=True)
            state, drafts = draft(state, drafter, donate=donate)
            taken += [fs.snapshot(state), drafts]
            state, _ = fs.verify(state, models.target, donate=donate)
            taken.append(fs.snapshot(state))
        found.append(taken)
    assert found[0] == found[1]


def test_rows_that_were_cut_back_draft_like_others_a_round_later(donate: bool) -> None:
    models = agreeing_modules()
    drafter = mtp(models.modules)
    state = started(models, drafter)
    for _ in range(3):
        state, _ = fs.step_round(state, models.target, drafter, donate=donate)
    state = fs.truncate(state, {row: len(prompt) + 1 + row for row, prompt in enumerate(PROMPTS)}, donate=donate)
    state, drafts = draft(state, drafter, donate=donate)
    assert drafts == [[], [], [], []]
    state, _ = fs.verify(state, models.target, donate=donate)
    for _ in range(3):
        before = [committed(state, row) for row in range(4)]
        state, drafts = draft(state, drafter, donate=donate)
        assert drafts == [models.drafts(tokens, 3) for tokens in before]
        state, _ = fs.verify(state, models.target, donate=donate)


@pytest.mark.jax_on_cpu
@pytest.mark.slow
def test_jax_states_draft_like_those_of_torch() -> None:
    """Eagerly, in jit and in a scan, with the modules as arguments."""
    models = agreeing_modules(reduced=True)
    drafter = mtp(models.modules, models.token_ids)
    settings = {"seeds": [1, 2, 3, 4], "temperature": [0.0, 0.7, 1.0, 1.4]}
    state = started(models, drafter, rule=fs.rules.coupled, **settings)
    heads = tuple(map(JaxEagleHead.from_torch, models.modules))
    twin = Modules(JaxLlama.from_torch(models.target), heads, heads[0].output_token_ids)  # type: ignore[arg-type]
    other = mtp(heads, twin.token_ids)
    start = started(twin, other, rule=fs.rules.coupled, **settings)
    expected = []
    for _ in range(4):
        state, verdict = fs.step_round(state, models.target, drafter)
        expected.append(verdict)
    _, verdict = fs.step_round(start, twin.target, other)
    assert verdict.tokens.tolist() == expected[0].tokens.tolist()
    run = jax.jit(lambda state, target, drafter: jax.lax.scan(lambda s, _: fs.step_round(s, target, drafter), state, length=4))
    end, verdicts = run(start, twin.target, other)
    assert verdicts.tokens.tolist() == [verdict.tokens.tolist() for verdict in expected]
    assert sum(int(verdict.num_accepted.sum()) for verdict in expected) > 0
    np.testing.assert_allclose(end.lease.carried()["features"], state.lease.carried()["features"], atol=1e-4)


def test_one_module_is_an_eagle_head() -> None:
    pair: Pair = agreeing_pair("mtp")
    for given in (pair.head, [pair.head], (pair.head,)):
        drafter = mtp(given)
        assert isinstance(drafter, Eagle) and drafter.model is pair.head
    outputs = []
    for drafter in (mtp(pair.head), eagle(pair.head)):
        state = started(Modules(pair.target, (pair.head,), None), drafter, seeds=[1, 2, 3, 4])
        for _ in range(4):
            state, _ = fs.step_round(state, pair.target, drafter)
        outputs.append(fs.snapshot(state))
    assert outputs[0] == outputs[1]


def test_refuses_what_does_not_fit() -> None:
    head, other = random_head(CONFIGS["mtp"]), random_head(LAYERED)
    eagle3, target = random_head(CONFIGS["eagle3"]), random_llama(SMALL)
    refused: list[tuple[Any, Any, type[Exception], str]] = [
        ([], None, ModelError, r"^modules: expected two or more, got 0"),
        ([head, target], None, ArgumentTypeError, r"^modules: expected a tuple of EagleHead, got"),
        ([head, JaxEagleHead.from_torch(head)], None, ArgumentTypeError, r"^modules: expected a tuple of EagleHead, got"),
        ([JaxEagleHead.from_torch(head), head], None, ArgumentTypeError, r"^modules: expected a tuple of JaxEagleHead, got"),
        ([head, other], None, ModelError, r"^modules: expected one configuration, vocabulary and dtype, .* got 2 configurations"),
        ([head, random_head(head.config, dtype=torch.bfloat16)], None, ModelError, r"^modules: expected one configuration"),
        ([eagle3, eagle3], None, ModelError, r"^modules: expected one configuration, .* of 'eagle3'"),
        (target, None, ModelError, r"^modules: expected a model that reads hidden states and hands its own on, got one that reads no"),
        ("head", None, ArgumentTypeError, r"^modules: expected a Model"),
        ([head, head], torch.tensor([1, 2], dtype=torch.int32), FuncspecError, r"^token_ids: expected 61 distinct ids, got 2"),
    ]
    for modules, ids, error, message in refused:
        with pytest.raises(error, match=message):
            mtp(modules, ids)
    with pytest.raises(ModelError, match=r"^num_speculative_tokens: expected at most 2, one a module, got 3"):
        fs.init(config(1, LENGTH, 3), target, mtp([head, head]))
    model = MtpModules((head, head))
    cache = Cache(model, 1, 2)  # type: ignore[arg-type]
    with pytest.raises(ModelError, match=r"^features: expected \[2, 24\]"):
        model.forward(cache.kv, cache.batch([(0, [1, 2])]))
    assert all(buffer.isnan().all() for buffer in cache.kv.values())
