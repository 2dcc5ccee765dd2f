"""The models that work on a state: which ones fit, and which ones it was made for."""

from typing import NoReturn

import jax
import torch

from funcspec.config import SpecConfig
from funcspec.drafters.base import Drafter
from funcspec.errors import ArgumentTypeError, ModelError, refuse
from funcspec.leases import Partner
from funcspec.models.base import FeatureSpec, Model
from funcspec.state import SpecState


def partner_of(model: Model) -> Partner:
    """What a state remembers of a model."""
    return Partner(model.vocab_size, model.max_len, model.kv_spec, features_of(model))


def features_of(model: Model) -> FeatureSpec | None:
    """What a draft reads of its target's hidden states: its attribute `features`, if it has one."""
    return getattr(model, "features", None)


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
    if not isinstance(drafter, Drafter):
        fix = "wrap a model with funcspec.drafters.standalone"
        refuse("drafter", "a drafter or None", type(drafter).__name__, fix, ArgumentTypeError)


def check_partner(argument: str, model: Model, partner: Partner, framework: str) -> None:
    """Refuse a model whose sizes or framework differ from those of the model the state was made for."""
    try:
        found = (model.vocab_size, model.max_len, model.kv_spec, features_of(model))
    except AttributeError:
        _refuse_model(argument, model)
    if found != (partner.vocab_size, partner.max_len, partner.kv_spec, partner.features) or framework_of(model) != framework:
        expected, got = (
            f"of {kind}, vocabulary {one[0]}, max_len {one[1]}, {one[2].num_layers} KV layers"
            + (f", hidden states {one[3].layers}" if one[3] is not None else "")
            for kind, one in (
                (framework, (partner.vocab_size, partner.max_len, partner.kv_spec, partner.features)),
                (framework_of(model), found),
            )
        )
        raise ModelError(
            f"{argument}: expected the model the state was made for ({expected}), got one {got}. "
            "Fix: make a new state with init for another pair."
        )


def framework_of(model: object) -> str:
    """What a model's arrays are of: "torch", unless its attribute `framework` says "jax"."""
    return getattr(model, "framework", "torch")


def _refuse_model(argument: str, model: object) -> NoReturn:
    found = f"the class {model.__name__}" if isinstance(model, type) else type(model).__name__
    fix = "wrap it with a function of funcspec.models"
    refuse(argument, "a Model (vocab_size, max_len, kv_spec, forward)", found, fix, ArgumentTypeError)


def check_model(argument: str, model: object, config: SpecConfig) -> None:
    """Refuse what is no model, or one on another device. For use where objects are made, not in steps."""
    if not isinstance(model, Model) or isinstance(model, type):
        _refuse_model(argument, model)
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
