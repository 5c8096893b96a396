"""A line of progress on stderr: only on a terminal, only for work that lasts over a second."""

from __future__ import annotations

import os
import shutil
import sys
import threading
import time
from types import TracebackType
from typing import Self

PATIENCE, PAUSE = 1.0, 0.2
"""Seconds of silence before the first line; seconds between two."""


class Progress:
    """Shows what is being done and for how long, and wipes the line at the end.

    A thread writes it, so that work which reports nothing in between (one long measurement)
    still shows that it is alive.
    """

    def __init__(self, enabled: bool = True) -> None:
        self.enabled = enabled and sys.stderr.isatty() and os.environ.get("TERM") != "dumb"
        self._what = ""
        self._started = time.monotonic()
        self._done = threading.Event()
        self._thread: threading.Thread | None = None
        self._shown = False

    def say(self, what: str) -> None:
        """What is being done now."""
        self._what = what

    def reading(self, path: str, size: int) -> None:
        """For ``ReadOptions.progress``: a file and the uncompressed bytes read of it so far."""
        from advisor.core.text import shorten_path

        name = "standard input" if path == "-" else shorten_path(path, 40)
        self.say(f"reading {name}: {size / 1e6:,.0f} MB")

    def __enter__(self) -> Self:
        if self.enabled:
            self._thread = threading.Thread(target=self._run, daemon=True)
            self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._done.set()
        if self._thread is not None:
            self._thread.join()
        if self._shown:
            self._write("\r\x1b[K")

    def _run(self) -> None:
        if self._done.wait(PATIENCE):
            return
        while not self._done.wait(PAUSE):
            if self._what:
                seconds = time.monotonic() - self._started
                room = shutil.get_terminal_size().columns - 1
                self._shown = True
                self._write(f"\r\x1b[K{f'{self._what} ({seconds:.0f} s)'[:room]}")

    def _write(self, text: str) -> None:
        try:
            sys.stderr.write(text)
            sys.stderr.flush()
        except (OSError, UnicodeEncodeError):
            self._what = ""  # nobody to show it to
