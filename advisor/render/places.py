"""Places in code as other tools name them: files relative to the repository, lines from 1."""

from __future__ import annotations

import re
from contextlib import suppress
from pathlib import Path, PurePath

from advisor.core import text as t
from advisor.core.finding import Finding, Location

_DRIVE = re.compile(r"^[A-Za-z]:[\\/]")


def code_place(finding: Finding) -> Location | None:
    """The worst place that is a line of code; ``None``: stacks were not recorded."""
    return next((place for place in finding.where if place.file), None)


def relative(file: str) -> tuple[str, bool]:
    """(path with forward slashes, whether it is relative to the repository).

    A path below the working folder becomes relative to it, as CI expects; one that was recorded
    relative (profilers cut a common beginning off) stays so.
    """
    file = t.clean(file)
    with suppress(ValueError, OSError):
        file = str(PurePath(file).relative_to(Path.cwd()))
    shown = file.replace("\\", "/")
    absolute = shown.startswith("/") or _DRIVE.match(file) is not None
    inside = not absolute and ".." not in shown.split("/")
    return shown, inside
