"""A recorded run that is going on: reads only what was appended since the last look."""

from __future__ import annotations

import contextlib
import threading
from pathlib import Path
from typing import Any

import msgspec

from advisor.rundir import EVENTS, RANK, STEPS, TELEMETRY, Event, Rank, RankRecord, Sample, Step

MOST_AT_ONCE = 64 << 20
"""Bytes read of a file in one look; the rest is read in the next."""
MOST_KEPT = 200_000
"""Lines kept of a file: the oldest go."""


class _Tail:
    """One file of JSON lines, read as it grows."""

    def __init__(self, file: Path, kind: type[Any]) -> None:
        self.file = file
        self.lines: list[Any] = []
        self._decoder = msgspec.json.Decoder(kind)
        self._at = 0
        self._torn = b""

    def read(self) -> list[Any]:
        """All lines so far. A file that became shorter is read from its start again."""
        try:
            with self.file.open("rb") as stream:
                if stream.seek(0, 2) < self._at:
                    self._at, self._torn, self.lines = 0, b"", []
                stream.seek(self._at)
                data = stream.read(MOST_AT_ONCE)
        except OSError:  # not there yet, or gone
            return self.lines
        self._at += len(data)
        *whole, self._torn = (self._torn + data).split(b"\n")
        for line in whole:
            try:
                self.lines.append(self._decoder.decode(line))
            except (msgspec.MsgspecError, UnicodeDecodeError):
                continue  # a damaged line costs itself
        del self.lines[: max(0, len(self.lines) - MOST_KEPT)]
        return self.lines


class Follower:
    """The ranks of a run directory. Safe to be used by several threads."""

    def __init__(self, path: str) -> None:
        self.path = Path(path)
        self._ranks: dict[int, tuple[_Tail, _Tail, _Tail]] = {}
        self._about: dict[int, Rank] = {}
        self._lock = threading.Lock()

    def ranks(self) -> list[int]:
        """Ranks that have a folder."""
        found = []
        for folder in self.path.glob("rank*"):
            number = folder.name.removeprefix("rank")
            if folder.is_dir() and number.isascii() and number.isdigit() and len(number) <= 6:
                found.append(int(number))
        return sorted(found)

    def read(self, rank: int) -> RankRecord | None:
        """What a rank has written so far; ``None``: there is no such rank."""
        if rank not in self.ranks():
            return None
        folder = self.path / f"rank{rank}"
        with self._lock:
            if rank not in self._ranks:
                self._ranks[rank] = (
                    _Tail(folder / STEPS, Step),
                    _Tail(folder / TELEMETRY, Sample),
                    _Tail(folder / EVENTS, Event),
                )
            if rank not in self._about:
                # written when the first step begins, so maybe not there yet
                with contextlib.suppress(OSError, msgspec.MsgspecError):
                    self._about[rank] = msgspec.json.decode((folder / RANK).read_bytes(), type=Rank)
            steps, samples, events = (tail.read() for tail in self._ranks[rank])
            return RankRecord(
                rank=self._about.get(rank, Rank()),
                steps=list(steps),
                samples=list(samples),
                events=list(events),
                folder=str(folder),
            )
