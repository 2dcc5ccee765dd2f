"""The shape of the code base: imports go one way, files and functions stay short, nothing names a place outside the repository."""

import ast
import os
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "funcspec"

MAX_FILE_LINES = 450
MAX_FUNCTION_LINES = 60

# A module may import from earlier groups, and inside its own group only what WITHIN lists. Names are relative to the
# package; "models.*" is every module of a sub-package that has no entry of its own; "models" is its __init__.
GROUPS: list[list[str]] = [
    ["errors", "constants", "noise", "exact", "config", "text"],
    ["kernels.*", "kernels"],
    ["models.base"],  # plain dataclasses only, so pool, state and transition may use them
    ["requests"],
    ["pool"],
    ["interop"],
    ["state"],
    ["carried"],
    ["leases"],
    ["transitions.*", "transitions"],
    ["rules"],
    ["models.*", "models"],
    ["drafters.*", "drafters"],
    ["partners"],
    ["admission", "snapshots"],
    ["storage"],
    ["steps"],
    ["graphs"],
    ["generation"],
    ["checks"],
    ["metrics", "jobs", "traces", "loading", "cli"],
    ["", "__main__"],  # funcspec/__init__.py gathers the public names; nothing imports them from there
]

WITHIN: dict[str, set[str]] = {
    "config": {"errors", "constants"},
    "noise": {"errors", "constants"},
    "exact": {"noise"},
    "text": {"errors"},
    "kernels._triton": set(),
    "kernels._checks": {"kernels._triton"},
    "kernels._slots": {"kernels._triton"},
    "kernels._distributions": {"kernels._triton"},
    "kernels._suffix_search": {"kernels._triton"},
    "kernels.op": {"kernels._triton", "kernels._checks"},
    "kernels.noise": {"kernels._triton", "kernels._checks", "kernels.op"},
    "kernels.ratio": {"kernels._triton", "kernels._checks", "kernels.op", "kernels.noise", "kernels.normalisers"},
    "kernels.recovery": {"kernels._triton", "kernels._checks", "kernels.op", "kernels.noise", "kernels.normalisers", "kernels.ratio"},
    "kernels.dflash_inputs": {"kernels._triton", "kernels._checks", "kernels.op", "kernels._slots"},
    "kernels.new_slot_mapping": {"kernels._triton", "kernels._checks", "kernels.op", "kernels._slots"},
    "kernels.rejection": {"kernels._triton", "kernels._checks", "kernels.op", "kernels.noise", "kernels._distributions"},
    "kernels.suffix_lookup": {"kernels._triton", "kernels._checks", "kernels.op", "kernels._suffix_search"},
    "kernels.*": {"kernels._triton", "kernels._checks", "kernels.op", "kernels.noise"},
    "kernels": {"kernels.*"},
    "snapshots": {"admission"},
    "transitions.shapes": set(),
    "transitions.framework": {"transitions.shapes"},
    "transitions.drafting": {"transitions.framework", "transitions.shapes"},
    "transitions.judging": {"transitions.framework", "transitions.shapes"},
    "transitions.base": {"transitions.framework", "transitions.drafting", "transitions.judging"},
    "transitions.*": {"transitions.base", "transitions.framework", "transitions.shapes"},
    "transitions": {"transitions.*"},
    "models.functions": {"models.toy"},
    "models.attention": set(),
    "models.llama": {"models.attention", "models.gguf", "models.products"},
    "models.jax_llama": {"models.llama"},
    "models.heads": {"models.llama"},
    "models.jax_heads": {"models.heads", "models.jax_llama"},
    "models.parallel_heads": {"models.llama", "models.heads", "models.jax_heads"},
    "models.query_heads": {"models.attention", "models.llama", "models.heads", "models.jax_heads", "models.jax_llama"},
    "models.dflash": {"models.attention", "models.llama", "models.products"},
    "models.jax_dflash": {"models.jax_llama", "models.dflash"},
    "models.smollm2": {"models.llama", "models.jax_llama", "models.heads", "models.jax_heads", "models.gguf"},
    "models.huggingface": {"models.transformers_attention"},
    "models": {"models.*"},
    "drafters.base": set(),
    "drafters.pairs": set(),
    "drafters.standalone": {"drafters.base", "drafters.pairs"},
    "drafters.eagle": {"drafters.base", "drafters.pairs"},
    "drafters.mtp": {"drafters.base", "drafters.pairs", "drafters.eagle"},
    "drafters.cascade": {"drafters.base", "drafters.proposals", "drafters.standalone"},
    "drafters.early_exit": {"drafters.pairs", "drafters.standalone"},
    "drafters.ngram": {"drafters.base", "drafters.proposals"},
    "drafters.fallback": {"drafters.base", "drafters.proposals"},
    "drafters.best_of": {"drafters.base", "drafters.proposals"},
    "drafters.suffix": {"drafters.base", "drafters.proposals", "drafters.token_table"},
    "drafters.parallel": {"drafters.base", "drafters.masks", "drafters.pairs"},
    "drafters.medusa": {"drafters.base", "drafters.pairs"},
    "drafters.dflash": {"drafters.base", "drafters.masks", "drafters.pairs"},
    "drafters.fixed": {"drafters.base", "drafters.proposals", "drafters.token_table"},
    "drafters.files": {"drafters.*", "drafters.base", "drafters.standalone", "drafters.eagle", "drafters.mtp", "drafters.medusa"}
    | {"drafters.parallel", "drafters.dflash"},
    "drafters.*": {"drafters.base"},
    "drafters": {"drafters.*"},
    "cli": {"metrics", "jobs", "traces", "loading"},
}

# Against the order, and so only inside functions: a state is pickled and copied by way of a snapshot.
LATE: dict[str, set[str]] = {"state": {"snapshots"}}


def package_files(package: Path) -> dict[str, Path]:
    """Modules of the package by their name inside it: "errors", "kernels.op", "kernels" for an __init__, "" for the root."""
    files = {}
    for path in sorted(package.rglob("*.py")):
        parts = path.relative_to(package).with_suffix("").parts
        files[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return files


def group_of(module: str) -> int | None:
    """Index of the module's group: an entry of its own wins over its sub-package's "*"."""
    for name in (module, module.rpartition(".")[0] + ".*"):
        for index, group in enumerate(GROUPS):
            if name in group:
                return index
    return None


def may_import(module: str, imported: str) -> bool:
    """Whether the order allows it."""
    own, other = group_of(module), group_of(imported)
    if own is None or other is None:
        return False
    if own != other:
        return other < own
    allowed = WITHIN.get(module, WITHIN.get(module.rpartition(".")[0] + ".*", set()))
    return imported in allowed or ("." in imported and imported.rpartition(".")[0] + ".*" in allowed)


def is_type_checking(node: ast.AST) -> bool:
    """Whether the node is `if TYPE_CHECKING:`."""
    return isinstance(node, ast.If) and ast.unparse(node.test) in ("TYPE_CHECKING", "typing.TYPE_CHECKING")


def run_time_nodes(tree: ast.AST, *, late: bool) -> Iterator[ast.AST]:
    """All nodes that run; imports for annotations only make no order, so what stands below TYPE_CHECKING is left out.

    With `late` what stands inside functions is among them, without it only what runs when the module is imported.
    """
    for child in ast.iter_child_nodes(tree):
        if is_type_checking(child):
            assert isinstance(child, ast.If)
            for other in child.orelse:
                yield other
                yield from run_time_nodes(other, late=late)
        else:
            yield child
            if late or not isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
                yield from run_time_nodes(child, late=late)


def imports_of(source: str, module: str, is_package: bool, known: set[str], *, late: bool) -> set[str]:
    """Modules of the package that the source imports: with `late` anywhere in it, without it when it is imported."""
    found = set()
    for node in run_time_nodes(ast.parse(source), late=late):
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                here = ["funcspec", *filter(None, module.split("."))]
                here = here[: len(here) - node.level + is_package]
                base = ".".join([*here, *filter(None, [base])])
            for alias in node.names:
                full = f"{base}.{alias.name}"
                found.add(full if full.removeprefix("funcspec.") in known else base)
    names = {name for name in found if name == "funcspec" or name.startswith("funcspec.")}
    return {name.removeprefix("funcspec").removeprefix(".") for name in names} - {module}


def order_faults(files: dict[str, Path]) -> list[str]:
    """Every breach of the order, in words."""
    faults = [f"{module}: is in no group of {Path(__file__).name}; give it a place" for module in files if group_of(module) is None]
    for module, path in files.items():
        early, anywhere = (
            imports_of(path.read_text(), module, path.name == "__init__.py", set(files), late=late) for late in (False, True)
        )
        for imported in sorted(anywhere):
            allowed_late = imported in LATE.get(module, set()) and imported not in early
            if not may_import(module, imported) and not allowed_late:
                faults.append(f"{module or 'funcspec'}: may not import {imported or 'the root package'}")
    return faults


def repository_files() -> list[Path]:
    """Files that are, or are about to be, part of the repository."""
    listing = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"], cwd=ROOT, capture_output=True, check=False
    )
    if listing.returncode == 0:
        paths = [ROOT / name for name in os.fsdecode(listing.stdout).split("\0") if name]
    else:  # an unpacked archive: take what is not hidden, nor a tool's
        paths = [path for path in ROOT.rglob("*") if not any(part.startswith(".") or part == "__pycache__" for part in path.parts)]
    return sorted(path for path in paths if path.is_file())


def code_lines(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """Lines of the body, without the docstring; arguments stand one a line and do not count."""
    body = function.body[1:] if ast.get_docstring(function) is not None else function.body
    assert function.end_lineno is not None
    return function.end_lineno - body[0].lineno + 1 if body else 0


def length_faults(name: str, source: str) -> list[str]:
    """The file and its functions, where they are too long."""
    faults = []
    if (lines := len(source.splitlines())) >= MAX_FILE_LINES:
        faults.append(f"{name}: {lines} lines, fewer than {MAX_FILE_LINES} allowed; split it by concern")
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and (lines := code_lines(node)) >= MAX_FUNCTION_LINES:
            faults.append(f"{name}:{node.lineno}: {node.name} has {lines} lines, fewer than {MAX_FUNCTION_LINES} allowed")
    return faults


def test_imports_go_one_way() -> None:
    faults = order_faults(package_files(PACKAGE))
    assert not faults, "\n".join(faults)


@pytest.mark.parametrize(
    ("module", "source", "allowed"),
    [
        ("pool", "from funcspec.errors import refuse", True),
        ("pool", "from funcspec.models.base import KVSpec", True),
        ("pool", "from funcspec.models import base", True),
        ("pool", "import funcspec.state", False),
        ("pool", "from funcspec import state", False),
        ("pool", "from funcspec import SpecConfig", False),
        ("pool", "def late():\n    from funcspec.steps import verify", False),
        ("config", "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from funcspec.rules import Rule", True),
        ("config", "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    pass\nelse:\n    from funcspec.rules import Rule", False),
        ("state", "class State:\n    def copy(self):\n        from funcspec.snapshots import restore", True),
        ("state", "from funcspec.snapshots import restore", False),
        ("errors", "from funcspec.config import SpecConfig", False),
        ("kernels.acceptance", "from funcspec.kernels.op import Op", True),
        ("kernels.acceptance", "from .op import Op", True),
        ("kernels.acceptance", "from funcspec.kernels.append_drafts import append_drafts_", False),
        ("kernels.acceptance", "from ..pool import Pool", False),
        ("kernels.op", "from funcspec.kernels.acceptance import accept_", False),
        ("models.smollm2", "from funcspec.models import gguf, llama", True),
        ("models.toy", "from funcspec.models.llama import llama", False),
        ("models", "from funcspec.models import toy", True),
        ("models", "from . import toy", True),
        ("models.base", "from funcspec.models.toy import table", False),
        ("drafters.standalone", "from funcspec.models.llama import llama", True),
        ("models.toy", "from funcspec.drafters.standalone import standalone", False),
        ("cli", "from funcspec.generation import generate", True),
        ("generation", "from funcspec.cli import main", False),
        ("", "from funcspec.steps import verify", True),
        ("newcomer", "import os", False),
    ],
)
def test_the_order_is_understood(tmp_path: Path, module: str, source: str, allowed: bool) -> None:
    names = "errors config pool state snapshots steps rules cli generation models.base models.toy models.gguf models.llama "
    names += "kernels.op kernels.acceptance kernels.append_drafts drafters.standalone"
    for name in names.split():
        path = tmp_path.joinpath(*name.split(".")).with_suffix(".py")
        path.parent.mkdir(exist_ok=True)
        path.touch()
    for directory in (tmp_path, *(tmp_path / name for name in ("kernels", "models", "drafters"))):
        (directory / "__init__.py").touch()
    path = tmp_path.joinpath(*module.split("."))
    (path / "__init__.py" if path.is_dir() else path.with_suffix(".py")).write_text(source)
    faults = order_faults(package_files(tmp_path))
    assert (not faults) == allowed, faults
    assert all(fault.startswith(f"{module or 'funcspec'}:") for fault in faults)


def test_groups_are_consistent() -> None:
    entries = [name for group in GROUPS for name in group]
    assert len(entries) == len(set(entries))
    for module, allowed in WITHIN.items():
        for imported in allowed:
            assert group_of(module) == group_of(imported), f"{module} and {imported} are in different groups: nothing to list"


def test_files_and_functions_are_short() -> None:
    sources = [path for path in repository_files() if path.suffix == ".py"]
    assert sources
    faults = [fault for path in sources for fault in length_faults(str(path.relative_to(ROOT)), path.read_text())]
    assert not faults, "\n".join(faults)


def test_lengths_are_counted() -> None:
    def source(lines: int) -> str:
        return '@cache\ndef long():\n    """One.\n\n    Two.\n    """\n' + "    x = 1\n" * lines

    assert not length_faults("a.py", source(MAX_FUNCTION_LINES - 1))
    assert length_faults("a.py", source(MAX_FUNCTION_LINES)) == ["a.py:2: long has 60 lines, fewer than 60 allowed"]
    assert not length_faults("a.py", "x = 1\n" * (MAX_FILE_LINES - 1))
    assert length_faults("a.py", "x = 1\n" * MAX_FILE_LINES)


# Spelt in pieces, so that this file does not find itself.
STRAY = re.compile("/wor" + "k/|/tm" + "p/v|" + r"\bsand" + r"box", re.IGNORECASE)


def test_nothing_names_a_place_outside_the_repository() -> None:
    faults = []
    for path in repository_files():
        name = path.relative_to(ROOT)
        if name.parts[:2] == ("tests", "data"):
            continue
        try:
            lines = path.read_text().splitlines()
        except UnicodeDecodeError:  # weights and pictures
            continue
        faults += [f"{name}:{number}: {match[0]!r}" for number, line in enumerate(lines, 1) if (match := STRAY.search(line))]
    assert not faults, "\n".join(faults)
