"""Readers of memory alone: the allocator's snapshot (``torch.cuda.memory._dump_snapshot``), and the
profiler's memory timeline (``export_memory_timeline``), categories over time."""

from __future__ import annotations

import re
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import msgspec

from advisor.core.errors import AdvisorError
from advisor.core.snapshot import (
    ANNOTATION_SCHEMA,
    BLOCK_SCHEMA,
    EVENT_SCHEMA,
    SEGMENT_SCHEMA,
    MemorySnapshot,
    typed_table,
)
from advisor.read.plain_pickle import looks_like_pickle
from advisor.read.reader import Reader, ReaderClaim, ReadOptions
from advisor.read.source import ByteSource

if TYPE_CHECKING:
    from advisor.core.trace import Trace

MAX_TIMELINE = 256 << 20
"""Largest memory timeline, bytes."""
_TIMELINE = re.compile(rb"\s*\[\s*\[\s*-?\d+\s*[,\]]")
CATEGORIES = ("weights", "optimizer state", "inputs", "not attributed", "activations", "gradients",
              "backward temporaries", "not attributed")  # fmt: skip
"""Categories in ``torch/profiler/_memory_profiler.py``'s order; its temporaries: of any phase."""
LARGEST = 1 << 50
LATEST = 1 << 63
"""Bytes and ns from which an entry makes no sense."""
NEW_VERSION = 3
"""Number of ``Action.INCREMENT_VERSION``: bytes leave one category and enter another."""
_Delta = tuple[int, int, int]
"""Change of memory: time (ns), bytes (negative: freed), index in CATEGORIES."""


def _trace(source: ByteSource, made: MemorySnapshot) -> Trace:
    from advisor.core.trace import blank_trace

    read, events = source.bytes_read, made.events.height
    return blank_trace(source.path, bytes_read=read, events_read=events, snapshot=made)


class MemorySnapshotReader(Reader):
    """Reader of a memory snapshot, a pickle that is never executed (``plain_pickle.py``)."""

    name = "memory-snapshot"
    description = "a PyTorch memory snapshot (.pickle)"
    suffixes = (".pickle", ".pkl")

    def sniff(self, head: bytes, path: str) -> ReaderClaim:
        """Recognise any pickle; surely, if a snapshot's own keys are in the first block."""
        if not looks_like_pickle(head):
            return ReaderClaim.NO
        own = b"segments" in head or b"device_traces" in head
        return ReaderClaim.SURE if own else ReaderClaim.PERHAPS

    def read(self, source: ByteSource, options: ReadOptions) -> Trace:
        from advisor.read.formats.memory_snapshot.tables import read_snapshot

        made = read_snapshot(source.blocks(), source.path, max_bytes=options.max_bytes)
        return _trace(source, made)


class MemoryTimelineReader(Reader):
    """Reader of a memory timeline, lists of numbers: bytes by category over time."""

    name = "memory-timeline"
    description = "a memory timeline (.raw.json.gz)"
    suffixes = ()  # given by name: in a folder it stands beside the trace of the same program

    def sniff(self, head: bytes, path: str) -> ReaderClaim:
        """Recognise a list that begins with a list of integers."""
        return ReaderClaim.SURE if _TIMELINE.match(head) else ReaderClaim.NO

    def read(self, source: ByteSource, options: ReadOptions) -> Trace:
        most = min(MAX_TIMELINE, options.max_bytes)
        data = source.read_all(most, f"larger than {MAX_TIMELINE >> 20} MiB")
        return _trace(source, read_memory_timeline(data, source.path))


# -- the timeline -------------------------------------------------------------------------------


def read_memory_timeline(data: bytes, path: str) -> MemorySnapshot:
    """Read a timeline: events ``[time, action, bytes, category]`` (``.raw.json.gz``), or ``[times,
    bytes by category]`` (``.json``). Raises AdvisorError if it is neither.

    Which block an event frees is not in the file: one of its size and category does. So sums by
    category are exact at each event, and how long a single block lived is not known."""
    deltas, dropped = _deltas(data, path)
    if not deltas:
        raise AdvisorError(f"{path}: a memory timeline with no event of device memory")
    names = ("device", "action", "size", "address", "time_us", "stack")
    events: dict[str, list[Any]] = {name: [] for name in names}
    live: dict[tuple[int, int], list[int]] = {}
    sizes: dict[int, tuple[int, int]] = {}
    for time, size, category in deltas:  # one after the other: which block is free depends on it
        same = live.setdefault((abs(size), category), [])
        if size > 0:
            address = len(sizes) + 1
            sizes[address] = (size, category)
            same.append(address)
        elif same:
            address = same.pop(0)
        else:
            dropped += 1
            continue
        row = (0, "alloc" if size > 0 else "free_completed", abs(size), address,
               max(time, 0) // 1000, category)  # fmt: skip
        for column, value in zip(events.values(), row, strict=True):
            column.append(value)
    held = [address for addresses in live.values() for address in addresses]
    blocks: dict[str, list[Any]] = {
        "device": [0] * len(held), "address": held, "size": [sizes[n][0] for n in held],
        "requested": [sizes[n][0] for n in held], "state": ["allocated"] * len(held),
        "stack": [sizes[n][1] for n in held],
    }  # fmt: skip
    return MemorySnapshot(
        path=path,
        segments=typed_table(SEGMENT_SCHEMA, {}),
        blocks=typed_table(BLOCK_SCHEMA, blocks),
        events=typed_table(EVENT_SCHEMA, events),
        annotations=typed_table(ANNOTATION_SCHEMA, {}),
        stacks=((),) * len(CATEGORIES),
        dropped={"frees of what was never allocated": dropped} if dropped else {},
        source="timeline",
        categories=CATEGORIES,
    )


def _deltas(data: bytes, path: str) -> tuple[list[_Delta], int]:
    """Return the changes in order of time, and the number of invalid entries."""
    try:
        raw = msgspec.json.decode(data, type=list[tuple[int, int, int, int]])
    except (msgspec.DecodeError, msgspec.ValidationError):
        return _sampled(data, path), 0
    made: list[_Delta] = []
    dropped = 0
    for time, action, size, category in raw:
        known = 0 <= category < len(CATEGORIES)
        if abs(size) >= LARGEST or abs(time) >= LATEST or not known:
            dropped += 1
        elif action == NEW_VERSION and size > 0 and made and made[-1] == (time, -size, category):
            made.pop()  # written to, and still for the same
        elif size:
            made.append((time, size, category))
    return sorted(made, key=lambda delta: delta[0]), dropped


def _sampled(data: bytes, path: str) -> list[_Delta]:
    try:
        times, rows = msgspec.json.decode(data, type=tuple[list[int], list[list[int]]])
    except (msgspec.DecodeError, msgspec.ValidationError):
        times, rows = [], []
    width = len(CATEGORIES) + 1  # the first is a spare
    whole = len(times) == len(rows) and all(len(row) == width for row in rows)
    sane = all(abs(time) < LATEST for time in times)
    sane = sane and all(0 <= n < LARGEST for row in rows for n in row)
    if not times or not whole or not sane:
        raise AdvisorError(f"{path}: a list of numbers, but no whole memory timeline of PyTorch")
    made: list[_Delta] = []
    held: dict[int, list[int]] = {n: [] for n in range(len(CATEGORIES))}
    for time, (before, row) in zip(times, pairwise([[0] * width, *rows]), strict=True):
        for category, stack in held.items():
            change = row[category + 1] - before[category + 1]
            if change > 0:
                stack.append(change)
                made.append((time * 1000, change, category))
            while change < 0:  # a fall ends what rose last, and what is left of it begins anew
                size = stack.pop()
                made.append((time * 1000, -size, category))
                change += size
                if change > 0:
                    stack.append(change)
                    made.append((time * 1000, change, category))
                    break
    return made
