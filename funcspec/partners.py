"""The models that work on a state: which ones fit, and which ones it was made for."""

from typing import NoReturn

import jax
import torch

from funcspec.carried import Partner
from funcspec.config import SpecConfig
from funcspec.drafters.base import Drafter
from funcspec.errors import ArgumentTypeError, ModelError, refuse, type_name
from funcspec.models.base import FeatureSpec, KVEntry, KVSpec, Model
from funcspec.state import SpecState


def partner_of(model: Model) -> Partner:
    """What a state remembers of a model."""
    return Partner(model.vocab_size, model.max_len, model.kv_spec, features_of(model), rope_axes_of(model))


def features_of(model: Model) -> FeatureSpec | None:
    """What a draft reads of its target's hidden states: its attribute `features`, if it has one."""
    return getattr(model, "features", None)


def rope_axes_of(model: Model) -> int:
    """How many rotary positions a token has for this model, 0 if its position is the only one."""
    return getattr(model, "rope_axes", 0)


def partner_model(state: SpecState, target: Model | None, drafter: Drafter | None) -> Model | None:
    """Refuse models that the state was not made for; return the model that drafts, if any."""
    partners = state.lease.models
    if target is not None:
        check_partner("target", target, partners["target"], state.framework)
    expects = "draft" in partners
    # A plain attribute look-up: checking the whole protocol takes longer than the rest of a step's own work.
    model = getattr(drafter, "kv_model", None)
    if expects != (model is not None):
        raise ModelError(
            f"drafter: expected {'the drafter' if expects else 'None, as'} the state was made with, got {type(drafter).__name__}. "
            "Fix: pass the same drafter to init and to every step."
        )
    if model is not None:
        check_partner("drafter", model, partners["draft"], state.framework)
    return model


def check_drafter(drafter: object) -> None:
    """Refuse what is no drafter. Checks the whole protocol: for use where objects are made, not in steps."""
    if not isinstance(drafter, Drafter) or isinstance(drafter, type):
        fix = "wrap a model with funcspec.drafters.standalone"
        refuse("drafter", "a drafter or None", type_name(drafter), fix, ArgumentTypeError)
    proposal, ids = drafter.proposal, drafter.token_ids
    if not isinstance(proposal, str) or proposal not in ("sampled", "argmax", "point"):
        refuse("drafter.proposal", "'sampled', 'argmax' or 'point'", repr(proposal)[:60], "say how drafts are made", ModelError)
    fits = isinstance(ids, torch.Tensor | jax.Array) and ids.ndim == 1 and str(ids.dtype).removeprefix("torch.") == "int32"
    if ids is not None and not fits:
        found = getattr(ids, "dtype", type(ids).__name__)
        refuse("drafter.token_ids", "a one-dimensional int32 array or None", found, "convert it", ModelError)


def check_partner(argument: str, model: Model, partner: Partner, framework: str) -> None:
    """Refuse a model whose sizes or framework differ from those of the model the state was made for."""
    if isinstance(model, type):
        _refuse_model(argument, model)
    try:
        found = (model.vocab_size, model.max_len, model.kv_spec, features_of(model), rope_axes_of(model))
    except AttributeError:
        _refuse_model(argument, model)
    known = (partner.vocab_size, partner.max_len, partner.kv_spec, partner.features, partner.rope_axes)
    if found != known or framework_of(model) != framework:
        check_model(argument, model)
        expected, got = (
            f"of {kind}, vocabulary {one[0]}, max_len {one[1]}, {one[2].num_layers} KV layers"
            + (f", hidden states {one[3].layers}" if one[3] is not None else "")
            + (f", {one[4]} rotary positions" if one[4] else "")
            for kind, one in ((framework, known), (framework_of(model), found))
        )
        raise ModelError(
            f"{argument}: expected the model the state was made for ({expected}), got one {got}. "
            "Fix: make a new state with init for another pair."
        )


def framework_of(model: object) -> str:
    """What a model's arrays are of: "torch", unless its attribute `framework` says "jax"."""
    return getattr(model, "framework", "torch")


def _refuse_model(argument: str, model: object) -> NoReturn:
    fix = "wrap it with a function of funcspec.models"
    refuse(argument, "a Model (vocab_size, max_len, kv_spec, forward)", type_name(model), fix, ArgumentTypeError)


def check_model(argument: str, model: object) -> None:
    """Refuse what is no model, or one that says impossible things of itself. For use where objects are made, not in steps."""
    if not isinstance(model, Model) or isinstance(model, type):
        _refuse_model(argument, model)
    for name, size in (("vocab_size", model.vocab_size), ("max_len", model.max_len)):
        if not _is_count(size, 1):
            refuse(f"{argument}.{name}", "a positive int", repr(size)[:60], "correct the model", ModelError)
    spec = model.kv_spec
    fits = isinstance(spec, KVSpec) and _is_count(spec.num_layers, 0) and isinstance(spec.entries, tuple)
    if not fits or not all(map(_is_entry, spec.entries)):
        expected = "a KVSpec of a number of layers and a tuple of KVEntry(name, shape, torch dtype)"
        refuse(f"{argument}.kv_spec", expected, repr(spec)[:120], "correct the model", ModelError)
    features = features_of(model)
    if features is not None and not isinstance(features, FeatureSpec):
        refuse(f"{argument}.features", "a FeatureSpec or None", type_name(features), "correct the model", ModelError)
    if not _is_count(rope_axes_of(model), 0):
        refuse(f"{argument}.rope_axes", "an int of 0 or more", repr(rope_axes_of(model))[:60], "correct the model", ModelError)


def _is_count(value: object, least: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= least


def _is_entry(entry: object) -> bool:
    """Whether it describes what a cache can hold."""
    if not isinstance(entry, KVEntry) or not isinstance(entry.name, str) or not isinstance(entry.dtype, torch.dtype):
        return False
    return isinstance(entry.shape, tuple) and all(_is_count(extent, 1) for extent in entry.shape)


def check_device(argument: str, model: Model, config: SpecConfig) -> None:
    """Refuse a model on another device."""
    device = getattr(model, "device", None)
    if device is not None and torch.device(device).type != torch.device(config.device).type:
        raise ModelError(
            f"{argument}: expected a model on {config.device}, got one on {device}. Fix: move the model, or set SpecConfig.device."
        )


def check_features(draft_model: Model, target: Model) -> None:
    """Refuse a draft that reads hidden states which the target does not have, as far as the target says what it has."""
    spec = features_of(draft_model)
    if spec is None:
        return
    size, layers = getattr(target, "hidden_size", None), getattr(target, "num_layers", None)
    if size is not None:  # a target may hand over several residual streams side by side
        size *= getattr(target, "residual_multiplier", 1)
    if size is not None and spec.size != size * len(spec.layers):
        raise ModelError(
            f"drafter: expected a draft for hidden states of {size} from {len(spec.layers)} layers, {size * len(spec.layers)} in all, "
            f"got one for {spec.size}. Fix: use the draft that was trained for this target."
        )
    if layers is not None and max(spec.layers) > layers:
        raise ModelError(
            f"drafter: expected a draft for hidden states 0 to {layers}, got one for {spec.layers}. "
            "Fix: use the draft that was trained for this target."
        )
    held, wanted = target.kv_spec, set(getattr(draft_model, "cache_entries", ()))
    if spec.cache_layers and (max(spec.cache_layers) >= held.num_layers or not wanted <= set(held.entries)):
        raise ModelError(
            f"drafter: expected a draft that reads a cache of {held.num_layers} layers with {held.entries}, got one for the layers "
            f"{spec.cache_layers} with {tuple(wanted)}. Fix: use the draft that was trained for this target, with the target's dtype."
        )


def check_rope(draft_model: Model, target: Model) -> None:
    """Refuse a draft with other rotary positions than its target; one without any is fine."""
    ours, theirs = rope_axes_of(draft_model), rope_axes_of(target)
    if ours not in (0, theirs):
        raise ModelError(
            f"drafter: expected a draft with 0 or {theirs} rotary positions a token, as the target has, got one with {ours}. "
            "Fix: use a draft of the target's family."
        )


def check_framework(config: SpecConfig, target: Model, draft_model: Model | None) -> None:
    """Refuse a pair of two frameworks, and JAX where it would work on another device."""
    framework = framework_of(target)
    if draft_model is not None and framework_of(draft_model) != framework:
        raise ModelError(
            f"drafter: expected a draft of {framework}, as the target is, got one of {framework_of(draft_model)}. "
            "Fix: make the torch model one of JAX with funcspec.interop.jax_model."
        )
    platform = {"cpu": "cpu", "cuda": "gpu"}[config.device_type]
    if framework == "jax" and jax.default_backend() != platform:
        found = f"{config.device!r} while JAX works on {jax.default_backend()!r} by default"
        refuse("device", "the device that JAX works on", found, "set SpecConfig.device, or JAX_PLATFORMS before JAX starts")
