"""Speculative decoding of language models as values and functions."""

from funcspec import drafters, graphs, interop, models, rules
from funcspec.admission import Admitted, admit, init, lower_limits, release, truncate
from funcspec.checks import check_shape_stable, same_as_plain
from funcspec.config import SpecConfig
from funcspec.errors import DonatedStateError, FuncspecError
from funcspec.generation import Emission, generate
from funcspec.noise import NOISE_VERSION
from funcspec.snapshots import Snapshot, restore, resume, snapshot
from funcspec.state import SpecState, any_active, fork
from funcspec.steps import Draft, Scores, Verdict, accept, decode, prefill, score, step_round, verify
from funcspec.storage import load, save

__version__ = "0.1.0"

__all__ = [
    "NOISE_VERSION",
    "Admitted",
    "DonatedStateError",
    "Draft",
    "Emission",
    "FuncspecError",
    "Scores",
    "Snapshot",
    "SpecConfig",
    "SpecState",
    "Verdict",
    "accept",
    "admit",
    "any_active",
    "check_shape_stable",
    "decode",
    "drafters",
    "fork",
    "generate",
    "graphs",
    "init",
    "interop",
    "load",
    "lower_limits",
    "models",
    "prefill",
    "release",
    "restore",
    "resume",
    "rules",
    "same_as_plain",
    "save",
    "score",
    "snapshot",
    "step_round",
    "truncate",
    "verify",
]
