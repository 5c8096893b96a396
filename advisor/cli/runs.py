"""The runs of a folder, offered to who gave the folder instead of one of them."""

from __future__ import annotations

import shlex
import sys
from datetime import datetime
from pathlib import PurePath

from advisor.read.runs import RunLine, SeveralRuns, describe

MAX_RUNS = 20
PROGRAM = 34
"""Characters of a program's command line."""


def offer(error: SeveralRuns, arguments: list[str]) -> str:
    """List the runs on stderr, newest first, and return what to type to have one of them."""
    from advisor.core.text import clean

    lines = [describe(path) for path in error.found[:MAX_RUNS]]
    lines.sort(key=lambda line: line.started_unix_ns, reverse=True)
    wide = max(len(clean(line.path)) for line in lines)
    for line in lines:
        print(f"  {clean(line.path):<{wide}}  {_about(line)}".rstrip(), file=sys.stderr)
    more = len(error.found) - len(lines)
    if more:
        print(f"  and {more:,} older ones", file=sys.stderr)
    chosen = str(lines[0].path)
    words = [chosen if word == error.given else word for word in arguments]
    if chosen not in words:
        return str(error)
    return f"{error.given} holds runs, listed above; give one: {_typed(words)}"


def _typed(words: list[str]) -> str:
    return shlex.join(["advisor", *words])


def _about(line: RunLine) -> str:
    """``2026-11-21 16:00  1,024 steps  2 ranks  train.py --epochs 1``."""
    from advisor.core import text as t

    parts = []
    if 0 < line.started_unix_ns < 4 << 60:
        started = datetime.fromtimestamp(line.started_unix_ns / 1e9)
        parts.append(started.strftime("%Y-%m-%d %H:%M"))
    steps = "many" if line.steps is None else t.format_count(line.steps)
    parts.append(f"{steps:>7} step{' ' if line.steps == 1 else 's'}")
    if line.ranks > 1:
        parts.append(f"{line.ranks} ranks")
    if not line.windows:
        parts.append("no window")
    if line.command:
        head, *rest = line.command
        name = PurePath(head).name
        words = rest if rest and name.startswith("python") else [name, *rest]
        parts.append(t.shorten(t.clean(shlex.join(words)), PROGRAM))
    return "  ".join(parts)
