"""Open steps: what the steps of a round do, and how each framework does it."""

from funcspec.errors import refuse
from funcspec.state import SpecState, check_state
from funcspec.transitions.base import Transition
from funcspec.transitions.framework import Window
from funcspec.transitions.jax import JaxTransition
from funcspec.transitions.torch import TorchTransition


def open_step(state: SpecState, step: str, *, donate: bool) -> Transition:
    """Open a step on a live state; see `Transition`.

    Args:
        state: the state, of either framework.
        step: the step's name, for messages.
        donate: whether the state's buffers may be reused. In JAX that is said to `jax.jit`; here it only allows the new state to share
            arrays that the step does not write.
    """
    check_state(state, step)
    if not isinstance(donate, bool):
        refuse("donate", "True or False", repr(donate), "pass a bool")
    kind = JaxTransition if state.framework == "jax" else TorchTransition
    return kind(state, step, donate=donate)


__all__ = ["JaxTransition", "TorchTransition", "Transition", "Window", "open_step"]
