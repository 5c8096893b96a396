"""The allocator's snapshot (``torch.cuda.memory._dump_snapshot``): a trace of memory alone."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from advisor.read.plain_pickle import looks_like_pickle
from advisor.read.reader import Reader, ReaderClaim, ReadOptions
from advisor.read.source import ByteSource

if TYPE_CHECKING:
    from advisor.core.trace import Trace


class MemorySnapshotReader(Reader):
    """A pickle of plain values, and nothing of it is run (``plain_pickle.py``)."""

    name = "memory-snapshot"
    reads = "a memory snapshot of PyTorch's allocator (.pickle)"
    suffixes = (".pickle", ".pkl")

    def sniff(self, head: bytes, path: str) -> ReaderClaim:
        """Any pickle: only reading it shows what is in it."""
        del path
        return ReaderClaim.PERHAPS if looks_like_pickle(head) else ReaderClaim.NO

    def read(self, source: ByteSource, options: ReadOptions) -> Trace:
        """A trace that holds a snapshot and nothing else."""
        from advisor.core.trace import blank_trace
        from advisor.read.snapshot import read_snapshot

        made = read_snapshot(source.blocks(), source.path, max_bytes=options.max_bytes)
        trace = blank_trace(source.path)
        meta = replace(
            trace.meta,
            bytes_read=source.bytes_read,
            events_read=made.events.height,
            snapshot=made,
        )
        return replace(trace, meta=meta)
