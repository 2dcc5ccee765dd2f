"""Snapshots and files of states whose draft reads hidden states, rows that move, and that company changes nothing."""

import copy
import json
import pickle
import random
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from feature_toys import FeatureDraft, FeatureTarget
from feature_truth import check_features, feature_pair, same_bits
from oracle import CHECKSUM_RUNS, checksum_greedy, config, output, run
from safetensors.numpy import load_file, save_file

import funcspec as fs
from funcspec.drafters.eagle import eagle
from funcspec.errors import DonatedStateError, FileError, ModelError
from funcspec.models import ChecksumDraft
from funcspec.models.base import KV, ForwardBatch
from funcspec.storage import _digest

PROMPTS = [list(prompt) for prompt in CHECKSUM_RUNS]
REQUESTS = [([5, 6, 7], 3, 0.0), ([1], -4, 0.7), ([40, 2, 9, 9], 5, 1.3), ([8, 8], 6, 0.9), (list(range(1, 20)), 2**63, 0.4)]
RULES = [fs.rules.greedy, fs.rules.coupled, fs.rules.ratio]

with_kv = pytest.mark.parametrize("kv", [True, False], ids=["with KV", "without KV"])


def begin(target: Any, drafter: Any, prompts: list[list[int]] = PROMPTS, **changes: Any) -> fs.SpecState:
    settings = config(**{"rows": 3, "block_size": 4, "num_blocks": 400} | changes)
    sampled = {"temperature": [0.0, 0.8, 1.3][: len(prompts)]} if settings.rule.samples else {}
    state = fs.init(settings, target, drafter)
    return fs.admit(state, target, drafter, prompts, seeds=[7, -8, 9][: len(prompts)], max_tokens=40, **sampled)[0]


def to_the_end(state: fs.SpecState, target: Any, drafter: Any) -> fs.Snapshot:
    """Finish the round if one has begun, and go on."""
    if state.lease.phase == "drafting":
        state, _ = fs.decode(state, drafter)
        state, _ = fs.verify(state, target)
    check_features(state)
    return fs.snapshot(run(state, target, drafter, 5))


# ---------------------------------------------------------------- whole states


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.name)
@pytest.mark.parametrize("steps", [0, 1, 2])
@with_kv
def test_a_restored_state_goes_on_exactly(tmp_path: Path, kv: bool, steps: int, rule: fs.rules.Rule) -> None:
    """At a round's start and in mid-round; from a snapshot, a file, a pickle and a copy."""
    target, drafter, head = feature_pair(spread=rule.samples)
    state = run(begin(target, drafter, rule=rule), target, drafter, 2)
    for step in (fs.prefill, fs.decode)[:steps]:
        state, _ = step(state, drafter)
    taken, whole = fs.snapshot(state, kv=kv), fs.snapshot(state)
    fs.save(state, tmp_path / "state", kv=kv)
    expected = to_the_end(state, target, drafter)
    if steps and not kv:  # what the draft handed on cannot be found again
        for again in (lambda: fs.restore(taken, target, drafter), lambda: fs.load(tmp_path / "state", target, drafter)):
            with pytest.raises(ModelError, match="snapshot: expected KV in a snapshot taken in mid-round for a draft that reads hidden"):
                again()
        return
    made = [fs.restore(taken, target, drafter), fs.load(tmp_path / "state", target, drafter)]
    if kv:
        made += [fs.restore(taken), pickle.loads(pickle.dumps(state)), copy.deepcopy(state)]
    for one in made:
        same_bits(fs.snapshot(one), whole)
        same_bits(to_the_end(one, target, drafter), expected)
    assert not head.mistakes


@pytest.mark.parametrize("prompt", [[1], [5, 6], [5, 6, 7, 8]])
@with_kv
def test_a_row_that_the_draft_has_not_been_fed_yet(kv: bool, prompt: list[int]) -> None:
    """Right after admission its cache ends a position before the prompt's last one, and is empty for a prompt of one token."""
    target, drafter, head = feature_pair()
    state = begin(target, drafter, [prompt])
    restored = fs.restore(fs.snapshot(state, kv=kv), target, drafter)
    same_bits(fs.snapshot(restored), fs.snapshot(state))
    same_bits(to_the_end(restored, target, drafter), to_the_end(state, target, drafter))
    assert not head.mistakes


@pytest.mark.parametrize("steps", [0, 1, 3])
def test_finished_rows_keep_their_features_in_mid_round(steps: int) -> None:
    """A state in mid-round has finished rows too; after the round they can be cut back and draft on at once."""
    target, drafter, head = feature_pair()
    state = fs.init(config(rows=2, block_size=4, num_blocks=400), target, drafter)
    state, _ = fs.admit(state, target, drafter, PROMPTS[:2], max_tokens=[8, 40])
    while int(state.is_live[0]):
        state, _ = fs.step_round(state, target, drafter)
    kept = int(state.draft_len[0]) + 2
    assert kept == int(state.num_tokens[0]) - 2
    for number in range(steps):
        state, _ = fs.prefill(state, drafter) if number == 0 else fs.decode(state, drafter)
    ends = []
    for one in (state, fs.restore(fs.snapshot(state))):
        one, _ = fs.verify(one, target) if steps else fs.step_round(one, target, drafter)
        one, verdict = fs.step_round(fs.truncate(one, {0: kept}), target, drafter)
        assert int(verdict.num_drafted[0]) == 1
        ends.append(to_the_end(one, target, drafter))
    same_bits(*ends)
    assert not head.mistakes


# ---------------------------------------------------------------- equal futures, equal values


def test_what_a_row_left_behind_is_no_part_of_a_value() -> None:
    """A row in a used slot and in a fresh one, at any time, also where it has outgrown its draft."""
    target, drafter, head = feature_pair(max_len=10)
    used = run(begin(target, drafter, [[9, 9, 9], [1, 2]]), target, drafter, 3)
    used = fs.release(used, [0, 1])
    fresh = fs.init(used.config, target, drafter)
    for prompt in ([5, 6, 7], list(range(1, 20))):  # the second is longer than the draft can read
        states = [fs.admit(one, target, drafter, [prompt], seeds=[3])[0] for one in (used, fresh)]
        for number in range(5):
            same_bits(*(fs.snapshot(one) for one in states))
            begun = [fs.prefill(one, drafter, num_draft=number % 4)[0] for one in states]
            same_bits(*(fs.snapshot(one) for one in begun))
            begun = [fs.decode(one, drafter)[0] for one in begun]
            same_bits(*(fs.snapshot(one) for one in begun))
            states = [fs.verify(one, target)[0] for one in begun]
    assert not head.mistakes


class Careless(FeatureDraft):
    """Answers and hands on anything at places without a token, as a real model may: nobody looks there."""

    def forward(self, kv: KV, batch: ForwardBatch) -> Any:
        kv, logits, (states,) = super().forward(kv, batch)
        for row in torch.nonzero(batch.seq_lens[: len(states)] == 0).flatten().tolist():
            logits[row], states[row] = torch.randn(logits.shape[1]), torch.randn(states.shape[1])
        return kv, logits, (states,)


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.name)
def test_a_row_is_worth_the_same_in_any_company(rule: fs.rules.Rule) -> None:
    """Row 1 of three, alone in its state, and after others have drafted more or fewer tokens: the same row to the bit."""
    target, head = FeatureTarget(spread=rule.samples), Careless(layers=(0, 2), spread=rule.samples)
    drafter = eagle(head)
    together = begin(target, drafter, rule=rule)
    sampled = {"temperature": 0.8} if rule.samples else {}
    alone = fs.init(config(rows=1, block_size=4, num_blocks=400, rule=rule), target, drafter)
    alone, _ = fs.admit(alone, target, drafter, [PROMPTS[1]], seeds=[-8], max_tokens=40, **sampled)

    def same() -> None:
        same_bits(fs.snapshot(together, rows=[1]), fs.snapshot(alone))

    for number in range(8):
        same()
        wanted = [number % 4, (number * 2 + 1) % 4, 3 - number % 3]
        together, _ = fs.prefill(together, drafter, num_draft=wanted)
        alone, _ = fs.prefill(alone, drafter, num_draft=wanted[1:2])
        same()
        for _ in range(2):  # rows that have all they planned take no part
            together, alone = fs.decode(together, drafter)[0], fs.decode(alone, drafter)[0]
            same()
        together, verdict = fs.verify(together, target)
        alone, other = fs.verify(alone, target)
        assert verdict.tokens[1].tolist() == other.tokens[0].tolist()
        if number == 3:
            together = fs.release(together, [0])
        if number == 5:
            together, _ = fs.admit(together, target, drafter, [[3, 3, 3]], seeds=[1])
    assert not head.mistakes


# ---------------------------------------------------------------- rows that move


@pytest.fixture(scope="module")
def undisturbed() -> dict[int, list[int]]:
    """What each request gets from the target alone."""
    found = {}
    for index, (prompt, seed, temperature) in enumerate(REQUESTS):
        settings = config(rows=1, drafts=0, length=48, rule=fs.rules.coupled)
        target = FeatureTarget(spread=True)
        emissions = fs.generate(settings, target, None, [prompt], seeds=[seed], temperature=temperature, max_tokens=16)
        found[index] = [token for emission in emissions for token in emission.tokens]
    return found


@pytest.mark.parametrize("seed", range(8))
def test_any_schedule_with_preemption_gives_the_same_tokens(seed: int, undisturbed: dict[int, list[int]]) -> None:
    """A random schedule: requests are admitted, preempted with or without KV, resumed elsewhere, cut back and released."""
    source, donate = random.Random(seed), bool(seed % 2)
    target, drafter, head = feature_pair(spread=True)
    settings = config(rows=3, length=48, rule=fs.rules.coupled, block_size=4, num_blocks=300)
    state = fs.init(settings, target, drafter)
    waiting, paused = list(range(len(REQUESTS))), {}
    rows: dict[int, int] = {}
    done: dict[int, list[int]] = {}
    while waiting or paused or rows:
        free = [row for row in range(3) if row not in rows]
        source.shuffle(free)
        while free and (waiting or paused) and source.random() < 0.7:
            row = free.pop()
            if paused and (not waiting or source.random() < 0.5):
                index = source.choice(list(paused))
                state = fs.resume(state, paused.pop(index), target, drafter, rows=[row], donate=donate)
            else:
                index = waiting.pop(source.randrange(len(waiting)))
                prompt, noise, temperature = REQUESTS[index]
                options: dict[str, Any] = {
                    "seeds": [noise],
                    "temperature": temperature,
                    "max_tokens": 16,
                    "chunk": source.choice([None, 3]),
                }
                state, _ = fs.admit(state, target, drafter, [prompt], rows=[row], donate=donate, **options)
            rows[row] = index
        if rows:
            state, _ = fs.step_round(state, target, drafter, num_draft=[source.randint(0, 3) for _ in range(3)], donate=donate)
            check_features(state)
        live = state.is_live.tolist()
        for row, index in list(rows.items()):
            if not live[row]:
                done[index] = output(state, row)
                state = fs.release(state, [row], donate=donate)
                del rows[row]
            elif source.random() < 0.15:
                paused[index] = fs.snapshot(state, rows=[row], kv=source.random() < 0.5)
                state = fs.release(state, [row], donate=donate)
                del rows[row]
            elif source.random() < 0.2:
                first = int(state.prompt_len[row]) + 1
                state = fs.truncate(state, {row: source.randint(first, int(state.num_tokens[row]))}, donate=donate)
    assert done == undisturbed and not head.mistakes


@with_kv
def test_a_preempted_row_is_the_same_when_it_comes_back(kv: bool) -> None:
    target, drafter, head = feature_pair()
    state = run(begin(target, drafter), target, drafter, 3)
    paused = fs.snapshot(state, rows=[2, 0], kv=kv)
    expected = to_the_end(fs.restore(fs.snapshot(state, rows=[2, 0])), target, drafter)
    state = run(fs.release(state, [0, 2]), target, drafter, 2)
    back = fs.resume(state, paused, target, drafter, rows=[0, 2])
    same_bits(fs.snapshot(back, rows=[0, 2]), fs.snapshot(fs.restore(paused, target, drafter)))
    same_bits(fs.snapshot(run(back, target, drafter, 5), rows=[0, 2]), expected)
    for row, prompt in ((0, PROMPTS[2]), (1, PROMPTS[1]), (2, PROMPTS[0])):
        assert output(back, row) == checksum_greedy(prompt, len(output(back, row)))
    assert not head.mistakes
    with pytest.raises(ModelError, match="snapshot: expected rows for the models of this state, got rows for others"):
        fs.resume(fs.init(state.config, target, eagle(FeatureDraft(layers=(1, 2)))), paused, target, eagle(FeatureDraft(layers=(1, 2))))


# ---------------------------------------------------------------- files


Change = Callable[[dict[str, Any], dict[str, np.ndarray]], None]


def rewritten(path: Path, change: Change) -> None:
    """Change a file's header and arrays, as an attacker could."""
    raw = path.read_bytes()
    size = struct.unpack("<Q", raw[:8])[0]
    header = json.loads(json.loads(raw[8 : 8 + size])["__metadata__"]["funcspec"])
    arrays = load_file(path)
    change(header, arrays)
    save_file(arrays, path, {"funcspec": json.dumps(header)})


def features(change: Callable[[np.ndarray], np.ndarray | None]) -> Change:
    def change_them(_: dict[str, Any], arrays: dict[str, np.ndarray]) -> None:
        new = change(arrays.pop("carried.features").copy())
        arrays.update({} if new is None else {"carried.features": new})

    return change_them


def spoil(array: np.ndarray) -> np.ndarray:
    array[0, 0, 0] += 1
    return array


def model(**values: Any) -> Change:
    return lambda header, _: header["caches"]["draft"]["model"].update(values)


def lengths(role: str, row: int, value: int) -> Change:
    return lambda header, _: header["caches"][role]["lengths"].__setitem__(row, value)


SPEC = {"layers": [0, 2], "size": 6, "feedback": 6, "ahead": 1}
HOSTILE: dict[str, tuple[Change, str]] = {
    "no features": (features(lambda _: None), "an array 'carried.features', got none"),
    "features of fewer rows": (features(lambda array: array[:2].copy()), r"'carried.features' of shape \(3, 4, 6\)"),
    "features of fewer places": (features(lambda array: array[:, :3].copy()), "'carried.features' of shape"),
    "wider features": (features(lambda array: np.zeros((3, 4, 7), np.float32)), "'carried.features' of shape"),
    "features of another dtype": (features(lambda array: array.astype(np.float64)), "'carried.features' of float32"),
    "a changed feature": (features(spoil), "contents of digest"),
    "a draft of other layers": (model(features=SPEC | {"layers": [1, 2]}), "a state for a draft of"),
    "a draft of other widths": (model(features=SPEC | {"size": 8}), "a state for a draft of"),
    "a draft without features": (lambda header, _: header["caches"]["draft"]["model"].pop("features"), "a state for a draft of"),
    "features that are a list": (model(features=[]), "a state for a draft of"),
    "a draft that knows the newest token": (
        lambda _, arrays: arrays.update({"fields.draft_len": arrays["fields.num_tokens"]}),
        "fed tokens inside of their rows",
    ),
    "more of the draft's KV than was fed": (lengths("draft", 0, 15), "a draft's KV of|'kv.draft.0.*of shape"),
    "more of the target's KV than there are tokens": (lengths("target", 1, 20), "a target's KV of|'kv.target.1.*of shape"),
}


@pytest.mark.parametrize("name", HOSTILE)
@with_kv
def test_hostile_files_are_refused(tmp_path: Path, kv: bool, name: str) -> None:
    target, drafter, head = feature_pair()
    state = run(begin(target, drafter), target, drafter, 2)
    fs.save(state, tmp_path / "state", kv=kv)
    change, message = HOSTILE[name]
    rewritten(tmp_path / "state", change)
    with pytest.raises(FileError, match=f"path: expected .*({message})"):
        fs.load(tmp_path / "state", target, drafter)
    assert not head.mistakes


def test_a_file_is_for_the_models_it_was_saved_with(tmp_path: Path) -> None:
    target, drafter, _ = feature_pair()
    state = begin(target, drafter)
    fs.save(state, tmp_path / "state")
    for other in (feature_pair((0, 1))[1], feature_pair((0,))[1], fs.drafters.standalone(ChecksumDraft())):
        with pytest.raises(FileError, match="path: expected a state for a draft of"):
            fs.load(tmp_path / "state", target, other)
    assert _digest(fs.snapshot(fs.load(tmp_path / "state", target, drafter))) == _digest(fs.snapshot(state))
    fs.step_round(state, target, drafter, donate=True)
    with pytest.raises(DonatedStateError):
        fs.save(state, tmp_path / "state")
