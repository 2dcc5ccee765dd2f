"""`from funcspec import *` is small and does not change unnoticed."""

import subprocess
import sys

import funcspec

NAMES = [
    "Admitted",
    "DonatedStateError",
    "Draft",
    "Emission",
    "FuncspecError",
    "NOISE_VERSION",
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


def test_public_names_are_pinned() -> None:
    assert sorted(funcspec.__all__) == sorted(NAMES)


def test_star_import_brings_them_all() -> None:
    namespace: dict[str, object] = {}
    exec("from funcspec import *", namespace)
    assert set(NAMES) <= set(namespace)


def test_importing_starts_neither_jax_backends_nor_cuda() -> None:
    """Registering a pytree is cheap; a GPU backend of JAX would take most of the card's memory."""
    code = (
        "import funcspec as fs, jax, torch\n"
        "c = fs.SpecConfig(max_num_reqs=1, max_model_len=16, num_speculative_tokens=1, rule=fs.rules.greedy)\n"
        "t, d = fs.models.ChecksumModel(), fs.drafters.standalone(fs.models.ChecksumDraft())\n"
        "list(fs.generate(c, t, d, [[1]]))\n"
        "import jax._src.xla_bridge as bridge\n"
        "assert not bridge.backends_are_initialized() and not torch.cuda.is_initialized()\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)
