"""Follower of a run during its recording. It reads only what was appended since the last read."""

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

MAX_READ_BYTES = 64 << 20
"""Number of bytes read from a file at once. The rest follows with the next read."""
MAX_KEPT_LINES = 200_000
"""Number of lines kept per file. The oldest ones are dropped."""


class _JsonLinesTail:
    """Reader of a growing file of JSON lines. Damaged lines are skipped."""

    def __init__(self, file: Path, kind: type[Any]) -> None:
        self.file = file
        self.lines: list[Any] = []
        self._decoder = msgspec.json.Decoder(kind)
        self._weights: list[int] = []
        self._offset = 0
        self._partial_line = b""

    def read(self) -> list[Any]:
        """Read new lines, and return all lines so far. A file that became shorter is read anew."""
        try:
            with open_regular(self.file) as stream:
                if stream.seek(0, 2) < self._offset:
                    self._offset, self._partial_line, self.lines, self._weights = 0, b"", [], []
                stream.seek(self._offset)
                for _ in range(MAX_READ_BYTES // BLOCK):
                    data = stream.read(BLOCK)
                    self._add_data(data)
                    if len(data) < BLOCK:
                        break
        except OSError:  # not written yet, or removed
            pass
        return self.lines

    def _add_data(self, data: bytes) -> None:
        """Decode the complete lines in new data. Drop the oldest lines if there are too many."""
        self._offset += len(data)
        *lines, self._partial_line = (self._partial_line + data).split(b"\n")
        if len(self._partial_line) > MAX_LINE_BYTES:  # the rest of it counts as a damaged line
            self._partial_line = self._partial_line[:1]
        for line in lines:
            if len(line) > MAX_LINE_BYTES:
                continue
            try:
                item = self._decoder.decode(line)
            except DAMAGE_ERRORS:
                continue  # skip a damaged line
            if not is_sane(item):
                continue
            self.lines.append(item)
            self._weights.append(memory_weight(item))
        dropped, excess_bytes = (
            max(0, len(self.lines) - MAX_KEPT_LINES),
            sum(self._weights) - ROOM_BYTES,
        )
        for weight in self._weights[:-1]:
            if excess_bytes <= 0:
                break
            excess_bytes -= weight
            dropped += 1
        dropped = min(dropped, len(self.lines))
        del self.lines[:dropped], self._weights[:dropped]


class Follower:
    """Reader of the ranks of a run directory. Thread-safe."""

    def __init__(self, path: str) -> None:
        self.path = Path(path)
        self._ranks: dict[int, tuple[_JsonLinesTail, _JsonLinesTail, _JsonLinesTail]] = {}
        self._rank_info: dict[int, RankInfo] = {}
        self._lock = threading.Lock()

    def ranks(self) -> list[int]:
        """Return the numbers of the ranks that have a folder, in order."""
        try:
            return sorted(number for number, _ in rank_folders(self.path))
        except AdvisorError:  # removed, or not readable
            return []

    def read(self, rank: int) -> RankRecord | None:
        """Read what a rank has written so far. Return ``None`` if there is no such rank."""
        if rank not in self.ranks():
            return None
        folder = self.path / f"rank{rank}"
        with self._lock:
            if rank not in self._ranks:
                self._ranks[rank] = (
                    _JsonLinesTail(folder / STEPS, StepRow),
                    _JsonLinesTail(folder / TELEMETRY, Sample),
                    _JsonLinesTail(folder / EVENTS, Event),
                )
            if rank not in self._rank_info:
                # written when the first step starts, so it may not exist yet
                with contextlib.suppress(OSError, *DAMAGE_ERRORS):
                    text = read_regular(folder / RANK, MAX_JSON_BYTES)
                    self._rank_info[rank] = msgspec.json.decode(text, type=RankInfo)
            steps, samples, events = (tail.read() for tail in self._ranks[rank])
            return RankRecord(
                rank=self._rank_info.get(rank, RankInfo()),
                steps=list(steps),
                samples=list(samples),
                events=list(events),
                folder=str(folder),
            )
