"""A folder of runs: what is in it, to choose one."""

from __future__ import annotations

import os
from itertools import islice
from pathlib import Path
from typing import NamedTuple

import msgspec

from advisor.core.errors import AdvisorError
from advisor.core.run_directory import MANIFEST, STEPS, Manifest, is_run

MAX_FOLDERS = 2_000
"""Folders that are looked into."""
DEPTH = 2
"""Levels at which runs are looked for: ``runs/…`` and ``.``, of a project, that has ``runs/``."""
MAX_MANIFEST = 1 << 20
MAX_COUNTED = 64 << 20
"""Bytes of a run's records that are counted."""


class RunLine(NamedTuple):
    """What is said of a run in a list."""

    path: Path
    started_unix_ns: int
    """0: its manifest does not tell."""
    command: tuple[str, ...]
    """As it was typed."""
    steps: int | None
    """Recorded steps of its first rank; ``None``: more than are counted."""
    ranks: int
    windows: int
    """Profiled windows of its first rank."""


class SeveralRuns(AdvisorError):
    """A folder was given that holds runs and is none."""

    def __init__(self, given: str, found: list[Path]) -> None:
        self.given = given
        self.found = found
        """The newest first, by their names, which begin with the date."""
        count = "a run" if len(found) == 1 else f"{len(found)} runs"
        super().__init__(f"{given}: a folder with {count} in it; give one, such as {found[0]}")


def runs_in(folder: Path) -> list[Path]:
    """Run directories below a folder, the newest name first; none if it is one itself."""
    if is_run(folder):
        return []
    paths: list[Path] = []
    level = [folder]
    for _ in range(DEPTH):
        below = [sub for item in level for sub in _folders(item)][:MAX_FOLDERS]
        paths += [sub for sub in below if is_run(sub)]
        level = [sub for sub in below if not is_run(sub)]
    return sorted(paths, key=lambda path: (path.name, str(path)), reverse=True)


def _folders(folder: Path) -> list[Path]:
    try:
        with os.scandir(folder) as entries:
            return [
                Path(entry.path)
                for entry in islice(entries, MAX_FOLDERS)
                if not entry.name.startswith(".") and entry.is_dir()
            ]
    except OSError:
        return []


def describe_run(run: Path) -> RunLine:
    """A run's line. What is damaged or missing is left out of it."""
    manifest = Manifest()
    try:
        with (run / MANIFEST).open("rb") as file:
            manifest = msgspec.json.decode(file.read(MAX_MANIFEST), type=Manifest)
    except (OSError, msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        pass  # listed all the same: reading it says what is wrong
    ranks = sorted(
        (folder for folder in _folders(run) if folder.name.removeprefix("rank").isdecimal()),
        key=lambda folder: int(folder.name.removeprefix("rank")),
    )
    windows = sum(1 for _ in ranks[0].glob("trace_w*.json*")) if ranks else 0
    return RunLine(
        path=run,
        started_unix_ns=manifest.started_unix_ns,
        command=tuple(manifest.command),
        steps=_lines(ranks[0] / STEPS) if ranks else 0,
        ranks=len(ranks),
        windows=windows,
    )


def _lines(file: Path) -> int | None:
    """Lines of a file that ends after MAX_COUNTED bytes at most."""
    try:
        if not file.is_file():
            return 0
        with file.open("rb") as opened:
            data = opened.read(MAX_COUNTED + 1)
    except OSError:
        return 0
    return None if len(data) > MAX_COUNTED else data.count(b"\n")
