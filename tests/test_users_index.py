"""Every known way in which speculative decoding has broken for users has a test that carries its number, or a reason why not.

The letters: A positions and limits, B keys and values of rejected tokens, C slots and blocks, D padding and fixed shapes, E ids outside of
the vocabulary, F acceptance, G seeds, H numbers in kernels, I stops and counters, J lives of rows, K batches and budgets, L pairs of
models, M the boundary between JAX, torch and Triton.
"""

import ast
import functools
import re
from pathlib import Path

FOLDER = Path(__file__).parent

NUMBERS = {
    "A": (1, 2, 3, 4, 5, 7),
    "B": (1, 3, 4, 5, 6, 7, 8),
    "C": (1, 2, 4, 5, 6, 7),
    "D": (1, 2, 3, 4, 5, 6, 8),
    "E": (1, 2, 3, 5),
    "F": (1, 2, 4, 5, 6, 7, 8),
    "G": (1, 2, 3, 4, 5, 6, 8, 9),
    "H": (1, 2, 4, 5, 6, 7, 8, 9),
    "I": (1, 3, 4, 5, 6, 7, 8),
    "J": (1, 2, 3, 5, 6, 7, 8),
    "K": (2, 3, 4, 5, 6, 7, 8, 9),
    "L": (1, 2, 3, 5),
    "M": (1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 12, 13),
}

KNOWN = [f"{letter}{number}" for letter, numbers in NUMBERS.items() for number in numbers]

NOT_TESTED = {
    "I5": "No log-probabilities are returned; who wants them takes them from the logits of Scores.",
}

OTHER_NUMBERS = ("test_g1_the_known_table", "test_g2_around_the_sizes_of_tiles", "test_g4_generation_up_to_the_longest_row")
"""Tests of looking up drafts whose numbers are those of another list."""


@functools.cache
def ids_of_tests() -> dict[str, list[str]]:
    """Tests that carry an id: at the beginning of the name (`test_a1_...`) or anywhere in the docstring."""
    found: dict[str, list[str]] = {}
    for path in sorted(FOLDER.rglob("test_*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.FunctionDef) and node.name.startswith("test_") and node.name not in OTHER_NUMBERS:
                ids = set(re.findall(r"\b[A-M]\d+\b", ast.get_docstring(node) or ""))
                ids |= {match[1].upper() for match in [re.match(r"test_([a-m]\d+)_", node.name)] if match}
                for each in ids:
                    found.setdefault(each, []).append(f"{path.relative_to(FOLDER)}::{node.name}")
    return found


def test_every_known_failure_has_a_test_or_a_reason() -> None:
    tested = set(ids_of_tests()) & set(KNOWN)
    assert len(KNOWN) == len(set(KNOWN)) == 91
    assert set(NOT_TESTED) <= set(KNOWN)
    assert all(reason.endswith(".") and len(reason.split()) > 4 for reason in NOT_TESTED.values())
    assert sorted(set(KNOWN) - tested - set(NOT_TESTED)) == [], "neither a test nor a reason"
    assert sorted(tested & set(NOT_TESTED)) == [], "a test and a reason why there is none"


def test_the_index_sees_what_it_looks_for() -> None:
    found = ids_of_tests()
    assert "test_users.py::test_a1_draft_shorter_than_the_row" in found["A1"]
    assert "kernels/test_kv_cache.py::test_addresses_are_64_bit_wide" in found["H2"]  # by its docstring
    assert "I5" not in found and "A6" not in found
