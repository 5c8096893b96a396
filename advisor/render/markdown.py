"""Markdown that GitHub reads: text it leaves alone, code, blocks, tables."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

from advisor.core import text as t

_SPECIAL = re.compile(r"[\\`*\[\]|~$]|(?<![0-9A-Za-z])_|_(?![0-9A-Za-z])")
_LIST = re.compile(r"^(\s*)([-+=#]|\d+(?=[.)](?:\s|$)))")


def escape(text: object) -> str:
    """Text that Markdown, HTML and GitHub's own syntax (mentions, issue numbers) leave alone."""
    safe = t.clean(text).replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
    safe = _SPECIAL.sub(r"\\\g<0>", safe)
    safe = _LIST.sub(lambda m: f"{m[1]}{m[2]}\\" if m[2].isdigit() else f"{m[1]}\\{m[2]}", safe)
    # An empty comment keeps the two apart: nobody is notified, no issue or address is linked.
    safe = re.sub(r"@|#(?=\d)", r"\g<0><!-- -->", safe).replace("://", ":<!-- -->//")
    return safe.replace("www.", "www<!-- -->.")


def code(text: object) -> str:
    """A code span, whatever backticks are inside; its pipes do not end a table cell."""
    safe = t.clean(text).replace("|", "\\|")
    fence = "`" * (_longest_run(safe) + 1)
    if not safe.strip():
        return f"{fence} {safe} {fence}" if safe else ""
    blank = " " if safe[0] in "` " or safe[-1] in "` " else ""
    return f"{fence}{blank}{safe}{blank}{fence}"


def block(text: str, language: str = "python") -> str:
    """A fenced block that its content cannot end."""
    safe = t.clean(text, lines=True).strip("\n")
    fence = "`" * max(3, _longest_run(safe) + 1)
    return f"{fence}{language}\n{safe}\n{fence}"


def _longest_run(text: str) -> int:
    return max((len(run) for run in re.findall("`+", text)), default=0)


def table(head: Sequence[str], align: str, rows: Iterable[Sequence[str]]) -> str:
    """``align``: a letter a column, l or r."""
    marks = [{"l": ":---", "r": "---:"}[letter] for letter in align]
    return "\n".join(f"| {' | '.join(line)} |" for line in (head, marks, *rows))
