"""JSON Lines files that are only ever appended to, whole lines at a time."""

from __future__ import annotations

import os
from pathlib import Path

import msgspec


class Lines:
    """One file. ``add`` keeps, ``flush`` writes what was kept in one call: a process that is
    killed leaves whole lines, or a torn last one if the disk filled up under it."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._descriptor: int | None = None
        self._encoder = msgspec.json.Encoder()
        self._kept = bytearray()

    def add(self, record: msgspec.Struct) -> None:
        """Keep a record for the next ``flush``."""
        self._kept += self._encoder.encode(record)
        self._kept += b"\n"

    def add_lines(self, lines: bytes) -> None:
        """The same of records that are encoded, each with its end of line."""
        self._kept += lines

    def flush(self) -> None:
        """Write what was kept. Raises OSError; what was kept is then forgotten."""
        if not self._kept:
            return
        kept, self._kept = self._kept, bytearray()
        if self._descriptor is None:
            flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | getattr(os, "O_CLOEXEC", 0)
            self._descriptor = os.open(self._path, flags, 0o644)
        view = memoryview(kept)
        while view:
            view = view[os.write(self._descriptor, view) :]

    def remove(self) -> None:
        """Take the file away, and what was kept."""
        self.close()
        self._kept = bytearray()
        self._path.unlink(missing_ok=True)

    def close(self) -> None:
        """Close the file; what was kept is not written."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None
