"""The change as a diff of the user's script, where there is one place that it can be in."""

from __future__ import annotations

import ast
import difflib
from collections.abc import Mapping
from pathlib import Path

from advisor.core.errors import AdvisorError
from advisor.lint.source import Script, keyword, parse

MAX_BYTES = 4 << 20


def diff(file: Path, callees: frozenset[str], arguments: Mapping[str, object]) -> str:
    """Set keyword arguments of the only call of one of these names; empty: there is none, several,
    or one whose arguments are not all written out."""
    try:
        if file.stat().st_size > MAX_BYTES:
            return ""
        text = file.read_text("utf-8")
        script = parse(text, file.name)
    except (OSError, UnicodeError, AdvisorError):
        return ""
    calls = [call for call in script.calls if script.qualified_name(call.func) in callees]
    if len(calls) != 1:
        return ""
    changed = _with(script, text, calls[0], arguments)
    if changed is None or not _parses(changed):
        return ""
    lines = difflib.unified_diff(
        text.splitlines(keepends=True),
        changed.splitlines(keepends=True),
        f"a/{file.name}",
        f"b/{file.name}",
        n=1,
    )
    return "".join(line if line.endswith("\n") else f"{line}\n" for line in lines)


def _parses(text: str) -> bool:
    try:
        ast.parse(text)
    except (SyntaxError, ValueError):
        return False
    return True


def _with(script: Script, text: str, call: ast.Call, arguments: Mapping[str, object]) -> str | None:
    """The text with the call changed. Only calls whose arguments are by name, but for the first."""
    if len(call.args) > 1 or any(item.arg is None for item in call.keywords):
        return None
    if any(isinstance(item, ast.Starred) for item in call.args):
        return None
    edits: list[tuple[int, int, str]] = []
    more = []
    for name, value in arguments.items():
        there = keyword(call, name)
        if there is None:
            more.append(f"{name}={value!r}")
        else:
            edits.append((*script.span(there), repr(value)))
    if more:
        given = [*call.args, *(item.value for item in call.keywords)]
        if not given:
            return None
        last = max(script.span(node)[1] for node in given)
        edits.append((last, last, f", {', '.join(more)}"))
    for begin, end, new in sorted(edits, reverse=True):
        text = text[:begin] + new + text[end:]
    return text
