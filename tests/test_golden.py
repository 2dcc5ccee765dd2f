"""The library's kernels against the golden vectors: `pytest tests/test_golden.py [--golden-dir DIR] [--backend BACKEND]`."""

import json
from functools import lru_cache
from pathlib import Path

import jax
import numpy as np
import pytest
import torch

from funcspec.errors import ArgumentError
from funcspec.kernels._triton import HAS_TRITON, INTERPRETED

from .golden_adapters import ADAPTERS
from .golden_case import Adapter, Case

LIFTED_SHARE = 8
"""Of how many cases one is lifted into JAX where no backend is asked for: every shape is a program to compile."""


@lru_cache(maxsize=1)
def archive(path: Path) -> dict[str, dict[str, np.ndarray]]:
    """Every array of an archive, by case and by name inside it. One archive at a time is kept: cases come in its order."""
    cases: dict[str, dict[str, np.ndarray]] = {}
    with np.load(path, allow_pickle=False) as file:
        for key in file.files:
            case, _, name = key.partition("/")
            if name:
                cases.setdefault(case, {})[name] = file[key]
    return cases


def runs(path: Path) -> list[tuple[str, str, Adapter]]:
    """Key and name of each case, with each adapter that runs it. Reads little, as it runs at collection."""
    found = []
    with np.load(path, allow_pickle=False) as file:
        for key in (f"case{number:03d}" for number in range(json.loads(str(file["meta"]))["num_cases"])):
            meta = json.loads(str(file[f"{key}/meta"]))

            def inputs(name: str, key: str = key) -> np.ndarray:
                return file[f"{key}/in/{name}"]

            for adapter in ADAPTERS[path.stem]:
                if adapter.covers is None or adapter.covers(frozenset(meta["tags"]), inputs):
                    found.append((key, meta["name"], adapter))
    return found


def chosen_backends(option: str | None) -> list[str]:
    """What the options ask for; by default the reference, whichever way Triton runs here, and the lift into JAX."""
    if option == "cuda" and not torch.cuda.is_available():
        raise pytest.UsageError("--backend cuda: there is no GPU")
    if option == "interpret" and not INTERPRETED:
        raise pytest.UsageError("--backend interpret: set TRITON_INTERPRET=1, and Triton must be installed")
    if option is not None:
        return [option]
    if torch.cuda.is_available():
        return ["reference", "cuda", "lift"]
    return ["reference", "interpret", "lift"] if INTERPRETED and HAS_TRITON else ["reference", "lift"]


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "golden_case" not in metafunc.fixturenames:
        return
    directory = Path(metafunc.config.getoption("--golden-dir") or Path(__file__).parent / "golden")
    paths = sorted(directory.glob("*.npz"))
    if not paths:
        raise pytest.UsageError(f"--golden-dir: no .npz files in {directory}")
    option = metafunc.config.getoption("--backend")
    backends = chosen_backends(option)
    parameters = []
    for path in paths:
        if path.stem not in ADAPTERS:
            reason = f"the library has no kernel {path.stem}"
            parameters.append(pytest.param(None, "", marks=pytest.mark.skip(reason), id=path.stem))
            continue
        for number, (key, name, adapter) in enumerate(runs(path)):
            for backend in backends[:1] if adapter.is_host else backends:
                if backend == "lift" and option is None and number % LIFTED_SHARE:
                    continue
                label = f"{path.stem}-{key}-{name}-{adapter.run.__name__}-{backend}"
                parameters.append(pytest.param((path, key, adapter), backend, id=label))
    metafunc.parametrize(("golden_case", "golden_backend"), parameters)


def test_golden(golden_case: tuple[Path, str, Adapter], golden_backend: str) -> None:
    path, key, adapter = golden_case
    backend = golden_backend if golden_backend in ("reference", "lift") else "triton"
    case = Case.of(archive(path)[key], backend, "cuda" if golden_backend == "cuda" else "cpu")
    try:
        adapter.run(case)
    except (ArgumentError, jax.errors.JaxRuntimeError):
        # Well defined by the reference, but no correct pipeline produces it.
        assert "degenerate" in case.tags
