"""States in files: one safetensors file, its header holding what is not an array as JSON. Nothing in it is ever executed.

A file is not trusted. Everything in it is checked against the models and the configuration before a state is made of it.
"""

import json
import os
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from funcspec import rules
from funcspec.carried import PROPOSALS, Partner, carried_layout
from funcspec.config import SpecConfig
from funcspec.drafters.base import Drafter
from funcspec.errors import ArgumentTypeError, FileError, FuncspecError, check_bool, refuse
from funcspec.kernels.acceptance import AT_LENGTH
from funcspec.models.base import Model
from funcspec.partners import check_drafter, check_model, partner_of
from funcspec.snapshots import Cache, Snapshot, cache_lengths, restore, snapshot
from funcspec.state import ARRAY_FIELDS, BLOCK_TABLES, DRAFTING, ROUND_START, SpecState, field_shape

FORMAT = "funcspec state 1"
"""Name and version of the format, the first thing that is checked."""

RULES = {rule.name: rule for rule in vars(rules).values() if isinstance(rule, rules.Rule)}
SAVED_FIELDS = tuple(name for name in ARRAY_FIELDS if name not in BLOCK_TABLES)


def save(state: SpecState | Snapshot, path: str | os.PathLike[str], *, kv: bool = True) -> None:
    """Write a state to a file. It is written beside `path` first and then put in its place, so no half of it is ever found there.

    Args:
        state: a live state that does not wait for `accept`, of either framework, or a snapshot of one.
        path: the file, overwritten if it is there.
        kv: whether to write the KV too. Without it `load` runs the tokens through the models again, which gives the same small
            buffers and KV to rounding. A snapshot is written as it is.

    Raises:
        DonatedStateError, StepOrderError: as for `snapshot`.
        ArgumentError, ArgumentTypeError: `path` names no file, or another argument has the wrong type.
        OSError: the file cannot be written.

    Example:
        ```
        fs.save(state, "state.safetensors")
        state = fs.load("state.safetensors", target, drafter)
        ```
    """
    check_bool("kv", kv)
    final = _file(path)
    taken = state if isinstance(state, Snapshot) else snapshot(state, kv=kv)
    arrays = {f"fields.{name}": np.ascontiguousarray(values) for name, values in taken.fields.items()}
    arrays |= {f"carried.{name}": np.ascontiguousarray(values) for name, values in taken.carried.items()}
    for role, cache in taken.caches.items():
        for index, row in enumerate(cache.rows or ()):
            arrays |= {f"kv.{role}.{index}.{name}": values for name, values in row.items()}
    header = {
        "format": FORMAT,
        "config": asdict(taken.config) | {"rule": taken.config.rule.name},
        "phase": taken.phase,
        "draft_steps": taken.draft_steps,
        "framework": taken.framework,
        "caches": {role: _describe(cache) for role, cache in taken.caches.items()},
        "digest": _digest(taken),
    }
    partial = final.with_name(f".{final.name}.{os.getpid()}.partial")
    try:
        partial.touch()  # where nothing can be written, this says so as the system does
        save_file(arrays, partial, {"funcspec": json.dumps(header)})
        os.replace(partial, final)
    except SafetensorError as error:
        raise OSError(f"{final}: {error}") from error
    finally:
        partial.unlink(missing_ok=True)


def load(
    path: str | os.PathLike[str],
    target: Model,
    drafter: Drafter | None = None,
    *,
    config: SpecConfig | None = None,
    framework: str | None = None,
) -> SpecState:
    """Make a state from a file that `save` wrote, for the same models.

    Args:
        path: the file. It need not be trusted.
        target, drafter: the models the state was made for.
        config: what the configuration must be, but for the device, which may be another. None takes the file's, whose
            `num_blocks` decides how much KV is allocated.
        framework: as for `restore`.

    Returns:
        a state that goes on exactly as the saved one.

    Raises:
        FileError: the file is no saved state, is damaged, or says things that cannot be; names what was expected.
        ModelError: the models are not those it was saved with.
        ArgumentError, ArgumentTypeError: `path` names no file, or another argument has the wrong type.
        OSError: the file cannot be read.
    """
    file_path = _file(path)
    if drafter is not None:
        check_drafter(drafter)
    if config is not None and not isinstance(config, SpecConfig):
        refuse("config", "a SpecConfig or None", type(config).__name__, "leave it out", ArgumentTypeError)
    models = {"target": target} | ({} if drafter is None or drafter.kv_model is None else {"draft": drafter.kv_model})
    for role, model in models.items():
        check_model("drafter" if role == "draft" else role, model)
    partners = {role: partner_of(model) for role, model in models.items()}
    try:
        with safe_open(os.fspath(file_path), "numpy") as file:
            found = _read(file, partners, config)
    except SafetensorError as error:
        refuse("path", "a safetensors file", str(error).splitlines()[0], "check that the file is whole", FileError)
    return restore(found, target, drafter, framework=framework)


def _file(path: Any) -> Path:
    """Refuse what cannot be the name of a file."""
    name = os.fspath(path) if isinstance(path, os.PathLike) else path
    if not isinstance(name, str):
        refuse("path", "a str or os.PathLike", type(path).__name__, "pass the name of a file", ArgumentTypeError)
    if not Path(name).name or "\0" in name:
        refuse("path", "the name of a file", repr(name)[:60], "name the file, not only its folder")
    return Path(name)


def _digest(taken: Snapshot) -> str:
    """The snapshot's digest, whatever the device."""
    return replace(taken, config=taken.config.replace(device="cpu")).digest


def _describe(cache: Cache) -> dict[str, Any]:
    partner = cache.partner
    entries = [[entry.name, list(entry.shape), str(entry.dtype).removeprefix("torch.")] for entry in partner.kv_spec.entries]
    model = {"vocab_size": partner.vocab_size, "max_len": partner.max_len, "num_layers": partner.kv_spec.num_layers, "entries": entries}
    if partner.features is not None:
        model["features"] = {
            name: list(value) if isinstance(value, tuple) else value for name, value in asdict(partner.features).items() if value != ()
        }
    if partner.rope_axes:
        model["rope_axes"] = partner.rope_axes
    return {"model": model, "lengths": list(cache.lengths), "num_blocks": list(cache.num_blocks), "kv": cache.rows is not None}


def _read(file: Any, partners: dict[str, Partner], wanted: SpecConfig | None) -> Snapshot:
    """Check the whole file and make a snapshot of it."""
    header = _header(file)
    config = _config(header["config"], wanted)
    phase, steps = header["phase"], header["draft_steps"]
    if phase not in (ROUND_START, DRAFTING) or type(steps) is not int or not 0 <= steps <= max(config.num_speculative_tokens, 1):
        _damaged("a phase of a round", f"{phase!r} after {steps!r} draft steps")
    if header["framework"] not in ("torch", "jax") or not isinstance(header["caches"], dict):
        _damaged("a framework and caches", f"{header['framework']!r}")
    if set(header["caches"]) != set(partners):
        refuse(
            "path", f"a state for {sorted(partners)}", f"one for {sorted(header['caches'])}", "pass the models it was saved with", FileError
        )
    fields = {name: _field(file, name, config) for name in SAVED_FIELDS}
    _check_values(fields, config, partners)
    caches = {role: _cache(file, role, header["caches"][role], partner, config) for role, partner in partners.items()}
    if any(live and count is None for live, count in zip(fields["is_live"].tolist(), caches["target"].num_blocks, strict=True)):
        _damaged("blocks for every live row", str(caches["target"].num_blocks)[:120])
    for role, cache in caches.items():
        room = [(count or 0) * config.block_size for count in cache.num_blocks]
        lengths = [min(length, most) for length, most in zip(cache_lengths(role, partners[role], fields), room, strict=True)]
        if list(cache.lengths) != lengths:
            _damaged(f"a {role}'s KV of {lengths} positions, as the rows are long", str(list(cache.lengths))[:120])
    carried = _carried(file, partners, config)
    names = {f"fields.{name}" for name in SAVED_FIELDS} | {f"carried.{name}" for name in carried}
    names |= {f"kv.{role}.{i}.{n}" for role, cache in caches.items() for i, row in enumerate(cache.rows or ()) for n in row}
    if set(file.keys()) != names:
        _damaged(f"{len(names)} arrays", f"also or without {sorted(set(file.keys()) ^ names)[:3]}")
    taken = Snapshot(config, phase, steps, fields, caches, header["framework"], carried)
    if _digest(taken) != header["digest"]:
        _damaged(f"contents of digest {str(header['digest'])[:12]}", _digest(taken)[:12])
    return taken


def _header(file: Any) -> dict[str, Any]:
    text = (file.metadata() or {}).get("funcspec")
    try:
        header = json.loads(text) if text is not None else None
    except (ValueError, RecursionError):
        header = None
    if not isinstance(header, dict) or header.get("format") != FORMAT:
        found = header.get("format") if isinstance(header, dict) else "no header of funcspec"
        refuse("path", f"a file of format {FORMAT!r}", repr(found)[:80], "save it again with this version", FileError)
    keys = {"format", "config", "phase", "draft_steps", "framework", "caches", "digest"}
    if set(header) != keys:
        _damaged(f"the keys {sorted(keys)}", str(sorted(map(str, header)))[:200])
    return header


def _config(values: Any, wanted: SpecConfig | None) -> SpecConfig:
    if not isinstance(values, dict) or not isinstance(values.get("rule"), str) or values["rule"] not in RULES:
        _damaged(f"a configuration with a rule of {sorted(RULES)}", repr(values)[:200])
    try:
        chosen: dict[str, Any] = values | {"rule": RULES[values["rule"]]} | ({} if wanted is None else {"device": wanted.device})
        found = SpecConfig(**chosen)
    except (FuncspecError, TypeError) as error:
        refuse("path", "a valid configuration", str(error)[:200], "pass config, or save the state again", FileError)
    if wanted is not None and found != wanted:
        refuse("path", f"a state of {wanted}", f"one of {found}", "pass the configuration it was saved with", FileError)
    return found


def _field(file: Any, name: str, config: SpecConfig) -> np.ndarray:
    declared = ARRAY_FIELDS[name]
    wanted = np.dtype(str(declared["dtype"]).removeprefix("torch."))
    values = _array(file, f"fields.{name}", field_shape(config, name), wanted)
    values.flags.writeable = False
    return values


def _carried(file: Any, partners: dict[str, Partner], config: SpecConfig) -> dict[str, np.ndarray]:
    """What the state carries along, as far as the file has it."""
    layout = carried_layout(config, partners)
    if not any(f"carried.{name}" in file.keys() for name in PROPOSALS):  # noqa: SIM118
        layout = {name: declared for name, declared in layout.items() if name not in PROPOSALS}
    found = {}
    for name, (shape, dtype, _) in layout.items():
        found[name] = _array(file, f"carried.{name}", shape, np.dtype(str(dtype).removeprefix("torch.")))
        found[name].flags.writeable = False
    if "is_point" in found and ((found["draft_normalisers"][:, :, 1] < 0).any() or not np.isin(found["is_point"], (0, 1)).all()):
        _damaged("normalisers of at least 0, and flags", "others")
    return found


def _array(file: Any, name: str, shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    """One array of the file, its shape checked before it is read."""
    if name not in file.keys():  # noqa: SIM118
        _damaged(f"an array {name!r}", "none")
    part = file.get_slice(name)
    if tuple(part.get_shape()) != shape:
        _damaged(f"{name!r} of shape {shape}", str(part.get_shape()))
    values = file.get_tensor(name)
    if values.dtype != dtype:
        _damaged(f"{name!r} of {dtype}", str(values.dtype))
    return values.copy()


def _check_values(fields: dict[str, np.ndarray], config: SpecConfig, partners: dict[str, Partner]) -> None:
    """Refuse lengths that would reach outside of a row, ids outside of the vocabulary, and values no step could have written."""
    most, drafts, vocab_size = config.max_model_len, config.num_speculative_tokens, partners["target"].vocab_size
    bounds = {"num_tokens": most, "prompt_len": most, "row_limit": most, "draft_len": most, "num_draft": drafts, "num_drafted": drafts}
    bounds["min_len"] = most
    bounds |= {"is_live": 1, "finish_reason": AT_LENGTH, "bad_row": 1}
    for name, high in bounds.items():
        low, top = int(fields[name].min()), int(fields[name].max())
        if low < 0 or top > high:
            _damaged(f"{name} from 0 to {high}", f"values from {low} to {top}")
    lengths = fields["num_tokens"]
    if (lengths + fields["num_drafted"] > most).any() or (fields["num_drafted"] > fields["num_draft"]).any():
        _damaged("drafts that fit their rows", "more")
    lag = partners["draft"].lag if "draft" in partners else 0
    if (fields["draft_len"] > np.maximum(lengths - lag, 0)).any() or (fields["prompt_len"] > lengths).any():
        _damaged("prompts and fed tokens inside of their rows", "longer ones")
    filled = np.arange(most) < (lengths + fields["num_drafted"])[:, None]
    tokens = fields["tokens"][filled]
    if (tokens < 0).any() or (tokens >= vocab_size).any():
        _damaged(f"ids from 0 to {vocab_size - 1} at every place of a row", "gaps or other ids")
    if not (np.isfinite(fields["temperature"]).all() and (fields["temperature"] >= 0).all()):
        _damaged("temperatures of at least 0", str(fields["temperature"].tolist())[:80])


def _cache(file: Any, role: str, values: Any, partner: Partner, config: SpecConfig) -> Cache:
    if not isinstance(values, dict) or set(values) != {"model", "lengths", "num_blocks", "kv"}:
        _damaged(f"a description of the {role}'s KV", repr(values)[:120])
    rows = config.max_num_reqs
    lengths, counts = values["lengths"], values["num_blocks"]
    if not all(isinstance(part, list) and len(part) == rows for part in (lengths, counts)):
        _damaged(f"{rows} lengths and numbers of blocks", repr((lengths, counts))[:120])
    if any(type(count) is not int or not 1 <= count <= config.blocks_per_row for count in counts if count is not None):
        _damaged(f"1 to {config.blocks_per_row} blocks a row", repr(counts)[:120])
    room = [(count or 0) * config.block_size for count in counts]
    if sum(count or 0 for count in counts) > config.num_kv_blocks or any(
        type(length) is not int or not 0 <= length <= most for length, most in zip(lengths, room, strict=True)
    ):
        _damaged("rows that fit their blocks, and blocks that fit the pool", repr((lengths, counts))[:120])
    described = _describe(Cache(partner, (), (), None))["model"]
    if values["model"] != described:
        refuse("path", f"a state for a {role} of {described}", repr(values["model"])[:200], "pass the models it was saved with", FileError)
    if values["kv"] is not True:
        return Cache(partner, tuple(lengths), tuple(counts), None)
    spec = partner.kv_spec
    caches = []
    for index, (length, count) in enumerate(zip(lengths, counts, strict=True)):
        sizes = {e.name: spec.num_layers * length * int(np.prod(e.shape, dtype=np.int64)) * e.dtype.itemsize for e in spec.entries}
        held = {} if count is None else sizes
        caches.append({name: _array(file, f"kv.{role}.{index}.{name}", (size,), np.dtype(np.uint8)) for name, size in held.items()})
    return Cache(partner, tuple(lengths), tuple(counts), tuple(caches))


def _damaged(expected: str, found: str) -> NoReturn:
    refuse("path", expected, found, "the file is damaged or was not written by save; save the state again", FileError)


__all__ = ["FORMAT", "load", "save"]
