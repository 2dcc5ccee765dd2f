"""Public things are described, and the Python of the README and the documents runs as written."""

import inspect
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

import funcspec

ROOT = Path(__file__).resolve().parents[1]
TEXTS = [ROOT / "README.md", ROOT / "docs/drafters.md"]  # the others show models of the reader's own


def public_objects(module: ModuleType, seen: set[int]) -> Iterator[tuple[str, object]]:
    """Modules, functions and classes in the module's `__all__`, into public modules, and the classes' own public methods."""
    for name in module.__all__:
        value = getattr(module, name)
        if id(value) in seen:
            continue
        seen.add(id(value))
        path = f"{module.__name__}.{name}"
        if inspect.ismodule(value):
            yield path, value
            if hasattr(value, "__all__"):
                yield from public_objects(value, seen)
        elif inspect.isclass(value):
            yield path, value
            for member, inner in vars(value).items():
                if not member.startswith("_") and (inspect.isfunction(inner) or isinstance(inner, property | classmethod | staticmethod)):
                    yield f"{path}.{member}", inner
        elif inspect.isroutine(value):
            yield path, value


def is_described(value: object) -> bool:
    """Whether the value has words of its own: dataclasses without a docstring get their signature as one."""
    text = (getattr(value, "__doc__", None) or "").strip()
    return bool(text) and not (inspect.isclass(value) and text.startswith(f"{value.__name__}("))


def python_blocks(path: Path) -> list[tuple[int, str]]:
    """The first line number and the text of each Python block."""
    text = path.read_text()
    blocks = re.finditer(r"^```python\n(.*?)^```$", text, flags=re.MULTILINE | re.DOTALL)
    return [(text.count("\n", 0, block.start(1)) + 1, block[1]) for block in blocks]


def test_public_names_exist() -> None:
    assert len(funcspec.__all__) == len(set(funcspec.__all__))
    missing = [name for name in funcspec.__all__ if not hasattr(funcspec, name)]
    assert not missing


def test_public_functions_and_classes_are_described() -> None:
    objects = dict(public_objects(funcspec, set()))
    assert objects
    bare = [path for path, value in objects.items() if not is_described(value)]
    assert not bare, f"no docstring: {', '.join(bare)}"


@pytest.mark.jax_on_cpu
@pytest.mark.parametrize("path", TEXTS, ids=lambda path: path.stem)
def test_documents_run(path: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """All blocks, in order, in one module, as a reader would type them."""
    module = ModuleType("document")
    monkeypatch.setitem(sys.modules, "document", module)  # dataclasses look their module up
    monkeypatch.chdir(tmp_path)
    blocks = python_blocks(path)
    assert blocks
    for line, block in blocks:
        # Empty lines first, so that a traceback names the README's own line.
        exec(compile("\n" * (line - 1) + block, str(path), "exec"), module.__dict__)
