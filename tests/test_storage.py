"""States in files: what goes on exactly, and files that are damaged, foreign or hostile."""

import json
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from oracle import checksum_greedy, config
from safetensors.numpy import load_file, save_file

import funcspec as fs
from funcspec.errors import ArgumentTypeError, DonatedStateError, FileError, ModelError, StepOrderError
from funcspec.interop import jax_model
from funcspec.models import ChecksumDraft, ChecksumModel

PROMPTS = [[5, 6, 7], [1]]


def start(rule: fs.rules.Rule) -> tuple[fs.SpecState, Any, Any]:
    target, drafter = ChecksumModel(spread=True), fs.drafters.standalone(ChecksumDraft(spread=True))
    settings = config(rows=3, rule=rule)
    state, _ = fs.admit(fs.init(settings, target, drafter), target, drafter, PROMPTS, seeds=[1, -2], temperature=[0.0, 0.8])
    return fs.step_round(state, target, drafter)[0], target, drafter


@pytest.fixture
def started() -> tuple[fs.SpecState, Any, Any]:
    return start(fs.rules.coupled)


@pytest.mark.parametrize("rule", [fs.rules.coupled, fs.rules.ratio], ids=lambda rule: rule.name)
@pytest.mark.parametrize("kv", [True, False], ids=["with KV", "without KV"])
@pytest.mark.parametrize("phase", ["round start", "drafting"])
def test_a_loaded_state_goes_on_exactly(tmp_path: Path, phase: str, kv: bool, rule: fs.rules.Rule) -> None:
    state, target, drafter = start(rule)
    if phase == "drafting":
        state, _ = fs.prefill(state, drafter)
    fs.save(state, tmp_path / "state.safetensors", kv=kv)
    loaded = fs.load(tmp_path / "state.safetensors", target, drafter, config=state.config)
    assert fs.snapshot(loaded) == fs.snapshot(state)
    assert [path.name for path in tmp_path.iterdir()] == ["state.safetensors"]
    ends = []
    for one in (state, loaded):
        one = fs.decode(one, drafter)[0] if phase == "drafting" else fs.prefill(one, drafter)[0]
        one, _ = fs.verify(one, target)
        while fs.any_active(one):
            one, _ = fs.step_round(one, target, drafter)
        ends.append(fs.snapshot(one))
    assert ends[0] == ends[1]


def test_snapshots_plain_states_and_frameworks(tmp_path: Path) -> None:
    target = ChecksumModel()
    state, _ = fs.admit(fs.init(config(drafts=0), target), target, None, [[5, 6, 7]])
    taken = fs.snapshot(state)
    fs.save(taken, tmp_path / "a")
    assert fs.snapshot(fs.load(tmp_path / "a", target)) == taken
    if not torch.cuda.is_available():
        of_jax = fs.load(tmp_path / "a", jax_model(target))
        assert of_jax.framework == "jax" and fs.snapshot(of_jax) == taken
        fs.save(of_jax, tmp_path / "b")
        again = fs.load(tmp_path / "b", target)
        assert fs.verify(again, target)[1].tokens[0, 0] == checksum_greedy([5, 6, 7], 2)[1]


def test_saving_over_a_file_is_all_or_nothing(
    started: tuple[fs.SpecState, Any, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    state, target, drafter = started
    path = tmp_path / "state"
    fs.save(state, path)

    def broken(arrays: Any, name: Path, metadata: Any) -> None:
        Path(name).write_bytes(b"half")
        raise OSError("the disk is full")

    monkeypatch.setattr("funcspec.storage.save_file", broken)
    with pytest.raises(OSError, match="full"):
        fs.save(fs.step_round(state, target, drafter)[0], path)
    assert fs.snapshot(fs.load(path, target, drafter)) == fs.snapshot(state) and len(list(tmp_path.iterdir())) == 1


def test_what_cannot_be_saved(started: tuple[fs.SpecState, Any, Any], tmp_path: Path) -> None:
    state, target, drafter = started
    scored, _ = fs.score(fs.prefill(state, drafter)[0], target)
    with pytest.raises(StepOrderError):
        fs.save(scored, tmp_path / "state")
    fs.step_round(state, target, drafter, donate=True)
    with pytest.raises(DonatedStateError):
        fs.save(state, tmp_path / "state")
    assert not list(tmp_path.iterdir())


def test_other_models_and_configurations(started: tuple[fs.SpecState, Any, Any], tmp_path: Path) -> None:
    state, target, drafter = started
    path = tmp_path / "state"
    fs.save(state, path)
    with pytest.raises(FileError, match=r"path: expected a state for \['target'\], got one for \['draft', 'target'\]"):
        fs.load(path, target)
    with pytest.raises(FileError, match=r"path: expected a state for a target of .*'vocab_size': 50"):
        fs.load(path, ChecksumModel(vocab_size=50), drafter)
    with pytest.raises(FileError, match="path: expected a state of SpecConfig"):
        fs.load(path, target, drafter, config=state.config.replace(block_size=8))
    with pytest.raises(ArgumentTypeError, match="config: expected a SpecConfig or None, got dict"):
        fs.load(path, target, drafter, config={})  # type: ignore[arg-type]
    with pytest.raises(ModelError, match="of torch"):
        fs.load(path, target, fs.drafters.standalone(jax_model(ChecksumDraft())), framework="torch")
    with pytest.raises(OSError, match="missing"):
        fs.load(tmp_path / "missing", target, drafter)


def rewritten(path: Path, change: Callable[[dict[str, Any], dict[str, np.ndarray]], None]) -> None:
    """Change a file's header and arrays, as an attacker could."""
    raw = path.read_bytes()
    size = struct.unpack("<Q", raw[:8])[0]
    header = json.loads(json.loads(raw[8 : 8 + size])["__metadata__"]["funcspec"])
    arrays = load_file(path)
    change(header, arrays)
    save_file(arrays, path, {"funcspec": json.dumps(header)})


def set_field(name: str, value: Any, row: int = 0) -> Callable[[dict[str, Any], dict[str, np.ndarray]], None]:
    def change(header: dict[str, Any], arrays: dict[str, np.ndarray]) -> None:
        arrays[f"fields.{name}"][row] = value

    return change


def set_header(*keys: str, value: Any) -> Callable[[dict[str, Any], dict[str, np.ndarray]], None]:
    def change(header: dict[str, Any], arrays: dict[str, np.ndarray]) -> None:
        inner: Any = header
        for key in keys[:-1]:
            inner = inner[key]
        inner[keys[-1]] = value

    return change


def swap_array(name: str, value: np.ndarray | None) -> Callable[[dict[str, Any], dict[str, np.ndarray]], None]:
    def change(header: dict[str, Any], arrays: dict[str, np.ndarray]) -> None:
        arrays.pop(name, None)
        if value is not None:
            arrays[name] = value

    return change


HOSTILE: dict[str, tuple[Callable[[dict[str, Any], dict[str, np.ndarray]], None], str]] = {
    "another version": (set_header("format", value="funcspec state 0"), "a file of format 'funcspec state 1'"),
    "a key more": (set_header("more", value=1), "the keys"),
    "a phase that is none": (set_header("phase", value="scored"), "a phase of a round"),
    "a phase that is a list": (set_header("phase", value=["round start"]), "a phase of a round"),
    "many draft steps": (set_header("draft_steps", value=10**9), "a phase of a round"),
    "a rule that is none": (set_header("config", "rule", value="__class__"), "a configuration with a rule"),
    "a configuration's field more": (set_header("config", "exec", value="x"), "a valid configuration"),
    "an impossible configuration": (set_header("config", "block_size", value=-1), "a valid configuration"),
    "more rows than arrays": (set_header("config", "max_num_reqs", value=10**6), "'fields.tokens' of shape"),
    "longer rows than arrays": (set_header("config", "max_model_len", value=10**6), "'fields.tokens' of shape"),
    "caches that are no dictionary": (set_header("caches", value=[]), "a framework and caches"),
    "lengths beyond the blocks": (set_header("caches", "target", "lengths", value=[10**6, 0, 0]), "rows that fit their blocks"),
    "a negative length": (set_header("caches", "target", "lengths", value=[-1, 0, 0]), "rows that fit their blocks"),
    "lengths of another type": (set_header("caches", "target", "lengths", value=[True, 0, 0]), "rows that fit their blocks"),
    "too many blocks": (set_header("caches", "target", "num_blocks", value=[10**6, 4, None]), "blocks a row"),
    "a live row without blocks": (
        set_header("caches", "target", "num_blocks", value=[None, None, None]),
        "rows that fit|'kv|blocks for every live",
    ),
    "tokens out of the vocabulary": (set_field("tokens", 10**6), "ids from 0 to 96"),
    "a gap among tokens": (set_field("tokens", -1), "ids from 0 to 96"),
    "a length past the row": (set_field("num_tokens", 10**6), "num_tokens from 0 to"),
    "a negative length of a row": (set_field("num_tokens", -5), "num_tokens from 0 to"),
    "a drafter ahead of its row": (set_field("draft_len", 63), "prompts and fed tokens"),
    "more drafts than planned": (set_field("num_drafted", 1), "drafts that fit"),
    "too many drafts": (set_field("num_draft", 9), "num_draft from 0 to 3"),
    "a temperature that is none": (set_field("temperature", np.nan), "temperatures of at least 0"),
    "a changed temperature": (set_field("temperature", 0.5), "contents of digest"),
    "a changed seed": (set_field("seed", 7), "contents of digest"),
    "a missing array": (swap_array("fields.seed", None), "an array 'fields.seed', got none"),
    "an array too many": (swap_array("fields.other", np.zeros(3)), "arrays, got also"),
    "another dtype": (swap_array("fields.num_tokens", np.zeros(3, np.float64)), "'fields.num_tokens' of int32"),
    "KV of another size": (swap_array("kv.target.0.token", np.zeros(3, np.uint8)), "'kv.target.0.token' of shape"),
    "KV with other bytes": (swap_array("kv.target.0.token", np.zeros(16, np.uint8)), "contents of digest|of shape"),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_files_are_refused(started: tuple[fs.SpecState, Any, Any], tmp_path: Path, name: str) -> None:
    state, target, drafter = started
    path = tmp_path / "state"
    fs.save(state, path)
    change, message = HOSTILE[name]
    rewritten(path, change)
    with pytest.raises(FileError, match=f"path: expected .*({message})"):
        fs.load(path, target, drafter)


def test_files_that_are_no_states(started: tuple[fs.SpecState, Any, Any], tmp_path: Path) -> None:
    _, target, drafter = started
    path = tmp_path / "state"
    save_file({"x": np.zeros(3)}, path)
    with pytest.raises(FileError, match="got 'no header of funcspec'"):
        fs.load(path, target, drafter)
    for text in ("[" * 100_000, "not json", "[]", '"funcspec state 1"'):
        save_file({"x": np.zeros(3)}, path, {"funcspec": text})
        with pytest.raises(FileError, match="path: expected a file of format"):
            fs.load(path, target, drafter)
    for raw in (b"", b"\x80\x04cos\nsystem\n", struct.pack("<Q", 2**62) + b"{}", struct.pack("<Q", 4) + b"{}"):
        path.write_bytes(raw)
        with pytest.raises(FileError, match="path: expected a safetensors file"):
            fs.load(path, target, drafter)


def test_a_truncated_file(started: tuple[fs.SpecState, Any, Any], tmp_path: Path) -> None:
    state, target, drafter = started
    path = tmp_path / "state"
    fs.save(state, path)
    raw = path.read_bytes()
    for size in (5, 200, len(raw) // 2, len(raw) - 1):
        path.write_bytes(raw[:size])
        with pytest.raises(FileError, match="path: expected a safetensors file"):
            fs.load(path, target, drafter)
