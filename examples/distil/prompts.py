"""Text without a download: what the installed Python and its packages document about themselves, and a few questions."""

import ast
import functools
import importlib.metadata
import importlib.util
import inspect
import random
import sys

HELD_OUT_TOPICS = ("assert", "class", "comparisons", "debugger", "exceptions", "formatstrings", "import", "lambda", "naming", "try")
HELD_OUT_MODULES = ("heapq", "decimal", "random", "difflib", "textwrap", "argparse", "logging", "statistics", "fractions", "bisect")

QUESTIONS = (
    "Why do leaves change colour in autumn?",
    "Write a short poem about a lighthouse.",
    "Give me three tips for learning to cook.",
    "What is the difference between a virus and a bacterium?",
    "Write a Python function that reverses a string.",
    "Summarise the story of Romeo and Juliet in two sentences.",
    "How does a bicycle stay upright?",
    "List five countries in Africa and their capitals.",
    "Translate 'good morning' into French, Spanish and German.",
    "Explain what a hash table is to a beginner.",
)
"""For evaluation only; the target never writes training text from them."""

SHORTEST = 240
"""Characters of a docstring that is worth continuing."""


def held_out_texts() -> list[str]:
    """Passages for evaluation; none of them is among `training_texts`."""
    topics = _topics()
    documented = [_module_doc(name) for name in HELD_OUT_MODULES]
    return [_body(text) for text in [topics[name] for name in HELD_OUT_TOPICS if name in topics] + documented if text]


@functools.cache
def training_texts(seed: int = 0) -> tuple[str, ...]:
    """All other passages, in an order that depends on the seed alone."""
    found = [text for name, text in _topics().items() if name not in HELD_OUT_TOPICS]
    for name in sorted(sys.stdlib_module_names):
        if name not in HELD_OUT_MODULES and not name.startswith("_") and name not in ("antigravity", "this"):
            found += _docstrings(name)
    for distribution in importlib.metadata.distributions():
        found.append(str(distribution.metadata.json.get("description", "")))
    texts = sorted({_body(text) for text in found if len(text) > SHORTEST})
    random.Random(seed).shuffle(texts)
    return tuple(texts)


def _topics() -> dict[str, str]:
    try:
        from pydoc_data import topics
    except ImportError:  # some distributions ship Python without it
        return {}
    return topics.topics


def _source(name: str) -> ast.Module | None:
    """A module's source, without importing it."""
    try:
        spec = importlib.util.find_spec(name)
        if spec is None or not (spec.origin or "").endswith(".py"):
            return None
        with open(str(spec.origin), encoding="utf-8") as file:
            return ast.parse(file.read())
    except (OSError, ImportError, SyntaxError, ValueError):
        return None


def _module_doc(name: str) -> str:
    tree = _source(name)
    return (ast.get_docstring(tree) if tree is not None else "") or ""


def _docstrings(name: str) -> list[str]:
    tree = _source(name)
    nodes = ast.walk(tree) if tree is not None else ()
    kinds = (ast.Module, ast.ClassDef, ast.FunctionDef)
    return [inspect.cleandoc(doc) for node in nodes if isinstance(node, kinds) and (doc := ast.get_docstring(node))]


def _body(text: str) -> str:
    """A text without its heading, so that it begins with prose."""
    lines = text.strip().splitlines()
    ruled = set("*=-~^#")
    while len(lines) > 1 and (not lines[0].strip() or set(lines[1].strip()) <= ruled or set(lines[0].strip()) <= ruled):
        lines.pop(0)
    return "\n".join(lines).strip()
