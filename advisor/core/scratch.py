"""Private folders for temporary files, gone afterwards: those of killed processes too.

Each has a file that its process keeps locked. Whoever makes the next one removes those whose lock
is free. Imports the standard library alone: ``advisor record`` uses it too.
"""

from __future__ import annotations

import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from itertools import islice
from pathlib import Path

from advisor.core.errors import AdvisorError

PREFIX = "advisor-"
_LOCK = ".lock"
MIN_AGE_SECONDS = 60.0
"""Seconds for which a folder may not be locked yet."""
MAX_SWEPT = 1000


@contextmanager
def scratch_folder(folder: str | Path | None = None) -> Iterator[Path]:
    """A new folder (mode 0700), in the system's for temporary files by default. Raises
    AdvisorError: there is no place for one."""
    parent = Path(folder if folder is not None else tempfile.gettempdir())
    try:
        _sweep(parent)
        inside = tempfile.TemporaryDirectory(prefix=PREFIX, dir=parent, ignore_cleanup_errors=True)
    except OSError as error:
        raise AdvisorError(f"{parent}: no temporary files there ({error.strerror})") from None
    with inside as made:
        number = _locked(Path(made, _LOCK), os.O_CREAT)
        try:
            yield Path(made)
        finally:
            if number is not None:
                os.close(number)


def _locked(file: Path, flags: int = 0) -> int | None:
    """An open file that nobody else holds, which ends with the process at the latest; ``None``:
    somebody does, or this system has no locks."""
    try:
        import fcntl
    except ImportError:  # Windows, where a file in use stays in any case
        return None
    number = -1
    try:
        number = os.open(file, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW | flags, 0o600)
        fcntl.flock(number, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        if number >= 0:
            os.close(number)
        return None
    return number


def _sweep(parent: Path) -> None:
    """Remove folders whose process is gone."""
    with os.scandir(parent) as entries:
        ours = (entry for entry in entries if entry.name.startswith(PREFIX))
        for entry in islice(ours, MAX_SWEPT):
            with suppress(OSError):
                if time.time() - entry.stat(follow_symlinks=False).st_mtime < MIN_AGE_SECONDS:
                    continue
                number = _locked(Path(entry.path, _LOCK))
                if number is not None:
                    shutil.rmtree(entry.path, ignore_errors=True)
                    os.close(number)
