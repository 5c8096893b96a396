"""Follower of a recorded run that goes on: reads only what was appended since the last look."""

import contextlib
import threading
from pathlib import Path
from typing import Any

import msgspec

from advisor.core.errors import AdvisorError
from advisor.core.files import BLOCK, open_regular, read_regular
from advisor.core.run_directory import (
    DAMAGE_ERRORS,
    EVENTS,
    MAX_JSON_BYTES,
    MAX_LINE_BYTES,
    RANK,
    ROOM_BYTES,
    STEPS,
    TELEMETRY,
    Event,
    RankInfo,
    RankRecord,
    Sample,
    StepRow,
    is_sane,
    memory_weight,
    rank_folders,
)

MAX_AT_ONCE = 64 << 20
"""Bytes that one look reads of a file; the rest is read in the next."""
MAX_KEPT = 200_000
"""Lines kept of a file: the oldest go."""


class _Tail:
    """Reader of a file of JSON lines that grows."""

    def __init__(self, file: Path, kind: type[Any]) -> None:
        self.file = file
        self.lines: list[Any] = []
        self._decoder = msgspec.json.Decoder(kind)
        self._weights: list[int] = []
        self._at = 0
        self._torn = b""

    def read(self) -> list[Any]:
        """Return all lines so far. A file that became shorter is read from its start again."""
        try:
            with open_regular(self.file) as stream:
                if stream.seek(0, 2) < self._at:
                    self._at, self._torn, self.lines, self._weights = 0, b"", [], []
                stream.seek(self._at)
                for _ in range(MAX_AT_ONCE // BLOCK):
                    data = stream.read(BLOCK)
                    self._take(data)
                    if len(data) < BLOCK:
                        break
        except OSError:  # not there yet, or gone
            pass
        return self.lines

    def _take(self, data: bytes) -> None:
        self._at += len(data)
        *lines, self._torn = (self._torn + data).split(b"\n")
        if len(self._torn) > MAX_LINE_BYTES:  # its end, when it comes, is a damaged line
            self._torn = self._torn[:1]
        for line in lines:
            if len(line) > MAX_LINE_BYTES:
                continue
            try:
                item = self._decoder.decode(line)
            except DAMAGE_ERRORS:
                continue  # a damaged line costs itself
            if not is_sane(item):
                continue
            self.lines.append(item)
            self._weights.append(memory_weight(item))
        gone, over = max(0, len(self.lines) - MAX_KEPT), sum(self._weights) - ROOM_BYTES
        for heavy in self._weights[:-1]:
            if over <= 0:
                break
            over -= heavy
            gone += 1
        gone = min(gone, len(self.lines))
        del self.lines[:gone], self._weights[:gone]


class Follower:
    """Reader of the ranks of a run directory. Safe to be used by several threads."""

    def __init__(self, path: str) -> None:
        self.path = Path(path)
        self._ranks: dict[int, tuple[_Tail, _Tail, _Tail]] = {}
        self._about: dict[int, RankInfo] = {}
        self._lock = threading.Lock()

    def ranks(self) -> list[int]:
        try:
            return sorted(number for number, _ in rank_folders(self.path))
        except AdvisorError:  # gone, or not to be looked into
            return []

    def read(self, rank: int) -> RankRecord | None:
        """Read what a rank has written so far. Return ``None`` for no such rank."""
        if rank not in self.ranks():
            return None
        folder = self.path / f"rank{rank}"
        with self._lock:
            if rank not in self._ranks:
                self._ranks[rank] = (
                    _Tail(folder / STEPS, StepRow),
                    _Tail(folder / TELEMETRY, Sample),
                    _Tail(folder / EVENTS, Event),
                )
            if rank not in self._about:
                # written when the first step begins, so maybe not there yet
                with contextlib.suppress(OSError, *DAMAGE_ERRORS):
                    text = read_regular(folder / RANK, MAX_JSON_BYTES)
                    self._about[rank] = msgspec.json.decode(text, type=RankInfo)
            steps, samples, events = (tail.read() for tail in self._ranks[rank])
            return RankRecord(
                rank=self._about.get(rank, RankInfo()),
                steps=list(steps),
                samples=list(samples),
                events=list(events),
                folder=str(folder),
            )
