"""Hint: one place in a program's source that may cost time."""

from __future__ import annotations

import ast
from typing import Any

from msgspec import Struct


class Hint(Struct, kw_only=True):
    """One place, why it may cost time, and what would show whether it does."""

    id: str
    """Stable identifier."""
    title: str
    """What is there, in a line."""
    why: str
    """Why it may cost time."""
    fix: str
    """What to write instead."""
    confirmed_by: str
    """Rule that shows on a trace or a recording whether it costs anything."""
    line: int
    column: int = 0
    """From 0."""
    end_line: int | None = None
    file: str = ""
    code: str | None = None
    """The fix as a line or two to take over by hand; ``null``: ``fix`` says all."""


def place(node: ast.stmt | ast.expr) -> dict[str, Any]:
    """Where a hint stands, as its fields."""
    return {"line": node.lineno, "column": node.col_offset, "end_line": node.end_lineno}
