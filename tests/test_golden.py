"""The library's kernels against the golden vectors: `pytest tests/test_golden.py [--golden-dir DIR] [--backend BACKEND]`."""

import json
from functools import lru_cache
from pathlib import Path

import numpy as np
import pytest
import torch

from funcspec.errors import ArgumentError
from funcspec.kernels._triton import HAS_TRITON, INTERPRETED

from .golden_adapters import ADAPTERS, NOT_COVERED, Case


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


def covered_cases(path: Path) -> tuple[list[tuple[str, str]], int]:
    """Key and name of the cases that the adapter runs, and how many it does not. Reads little, as it runs at collection."""
    adapter = ADAPTERS[path.stem]
    covered = []
    with np.load(path, allow_pickle=False) as file:
        count = json.loads(str(file["meta"]))["num_cases"]
        for key in (f"case{number:03d}" for number in range(count)):
            meta = json.loads(str(file[f"{key}/meta"]))

            def inputs(name: str, key: str = key) -> np.ndarray:
                return file[f"{key}/in/{name}"]

            if adapter.covers is None or adapter.covers(frozenset(meta["tags"]), inputs):
                covered.append((key, meta["name"]))
    return covered, count - len(covered)


def chosen_backends(option: str | None) -> list[str]:
    """What the options ask for; by default the reference and whichever way Triton runs here."""
    if option == "cuda" and not torch.cuda.is_available():
        raise pytest.UsageError("--backend cuda: there is no GPU")
    if option == "interpret" and not INTERPRETED:
        raise pytest.UsageError("--backend interpret: set TRITON_INTERPRET=1, and Triton must be installed")
    if option is not None:
        return [option]
    if torch.cuda.is_available():
        return ["reference", "cuda"]
    return ["reference", "interpret"] if INTERPRETED and HAS_TRITON else ["reference"]


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "golden_case" not in metafunc.fixturenames:
        return
    directory = Path(metafunc.config.getoption("--golden-dir") or Path(__file__).parent / "golden")
    paths = sorted(directory.glob("*.npz"))
    if not paths:
        raise pytest.UsageError(f"--golden-dir: no .npz files in {directory}")
    backends = chosen_backends(metafunc.config.getoption("--backend"))
    parameters = []
    for path in paths:
        if path.stem not in ADAPTERS:
            reason = NOT_COVERED.get(path.stem, f"the library has no kernel {path.stem} yet")
            parameters.append(pytest.param(None, "", marks=pytest.mark.skip(reason), id=path.stem))
            continue
        covered, others = covered_cases(path)
        for key, name in covered:
            for backend in backends[:1] if ADAPTERS[path.stem].is_host else backends:
                parameters.append(pytest.param((path, key), backend, id=f"{path.stem}-{key}-{name}-{backend}"))
        if others:
            reason = f"{others} cases of {path.stem}: {NOT_COVERED[path.stem]}"
            parameters.append(pytest.param(None, "", marks=pytest.mark.skip(reason), id=f"{path.stem}-others"))
    metafunc.parametrize(("golden_case", "golden_backend"), parameters)


def test_golden(golden_case: tuple[Path, str], golden_backend: str) -> None:
    path, key = golden_case
    arrays = archive(path)[key]

    def group(prefix: str) -> dict[str, np.ndarray]:
        return {name.removeprefix(prefix): array for name, array in arrays.items() if name.startswith(prefix)}

    case = Case(
        tags=frozenset(json.loads(str(arrays["meta"]))["tags"]),
        inputs=group("in/"),
        outputs=group("out/"),
        written=group("written/"),
        backend="reference" if golden_backend == "reference" else "triton",
        device="cuda" if golden_backend == "cuda" else "cpu",
    )
    try:
        ADAPTERS[path.stem].run(case)
    except ArgumentError:
        # Well defined by the reference, but no correct pipeline produces it.
        assert "degenerate" in case.tags
