"""Functions of the product have at most 80 lines: each fits a screen, and has one purpose."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
TREES = ("advisor", "rules", "dashboard", "sample_workloads")
MAX_LINES = 80
"""Lines from ``def`` to the last statement, docstring included."""


def lengths(text: str) -> Iterator[tuple[str, int]]:
    """Yield name and lines of each function, methods and inner functions too."""
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node.name, (node.end_lineno or node.lineno) - node.lineno + 1


def test_no_function_is_longer_than_a_screen() -> None:
    result = {
        f"{file.relative_to(ROOT)}: {name}": lines
        for tree in TREES
        for file in sorted((ROOT / tree).rglob("*.py"))
        for name, lines in lengths(file.read_text(encoding="utf-8"))
        if lines > MAX_LINES
    }
    assert result == {}


def test_the_length_of_a_method_is_counted_with_its_docstring() -> None:
    text = 'class A:\n    async def f(self):\n        """Do."""\n        return 1\n'
    assert dict(lengths(text)) == {"f": 3}
