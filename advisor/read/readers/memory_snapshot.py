"""Memory alone: the allocator's snapshot (``torch.cuda.memory._dump_snapshot``), and the profiler's
memory timeline (``export_memory_timeline``)."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import TYPE_CHECKING

from advisor.core.errors import AdvisorError
from advisor.read.plain_pickle import looks_like_pickle
from advisor.read.reader import Reader, ReaderClaim, ReadOptions
from advisor.read.source import ByteSource

if TYPE_CHECKING:
    from advisor.core.snapshot import MemorySnapshot
    from advisor.core.trace import Trace

MAX_TIMELINE = 256 << 20
"""Bytes of a memory timeline."""
_TIMELINE = re.compile(rb"\s*\[\s*\[\s*-?\d+\s*[,\]]")


def _trace(source: ByteSource, made: MemorySnapshot) -> Trace:
    from advisor.core.trace import blank_trace

    trace = blank_trace(source.path)
    read, events = source.bytes_read, made.events.height
    return replace(trace, meta=replace(trace.meta, bytes_read=read, events_read=events,
                                       snapshot=made))  # fmt: skip


class MemorySnapshotReader(Reader):
    """A pickle of plain values, and nothing of it is run (``plain_pickle.py``)."""

    name = "memory-snapshot"
    reads = "a PyTorch memory snapshot (.pickle)"
    suffixes = (".pickle", ".pkl")

    def sniff(self, head: bytes, path: str) -> ReaderClaim:
        """Any pickle: only reading it shows what is in it."""
        del path
        return ReaderClaim.PERHAPS if looks_like_pickle(head) else ReaderClaim.NO

    def read(self, source: ByteSource, options: ReadOptions) -> Trace:
        """A trace that holds a snapshot and nothing else."""
        from advisor.read.snapshot import read_snapshot

        made = read_snapshot(source.blocks(), source.path, max_bytes=options.max_bytes)
        return _trace(source, made)


class MemoryTimelineReader(Reader):
    """Lists of numbers alone: bytes by category over time."""

    name = "memory-timeline"
    reads = "a memory timeline (.raw.json.gz)"
    suffixes = ()  # given by name: in a folder it stands beside the trace of the same program

    def sniff(self, head: bytes, path: str) -> ReaderClaim:
        """A list that begins with a list of whole numbers."""
        del path
        return ReaderClaim.SURE if _TIMELINE.match(head) else ReaderClaim.NO

    def read(self, source: ByteSource, options: ReadOptions) -> Trace:
        """A trace that holds a snapshot and nothing else."""
        from advisor.read.memory_timeline import read_memory_timeline

        data = bytearray()
        for block in source.blocks():
            data += block
            if len(data) > min(MAX_TIMELINE, options.max_bytes):
                raise AdvisorError(f"{source.path}: larger than {MAX_TIMELINE >> 20} MiB")
        return _trace(source, read_memory_timeline(bytes(data), source.path))
