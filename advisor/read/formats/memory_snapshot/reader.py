"""Readers of files with only memory: the allocator's snapshot
(``torch.cuda.memory._dump_snapshot``) and the profiler's memory timeline
(``export_memory_timeline``) with categories over time."""

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

MAX_TIMELINE_BYTES = 256 << 20
"""Maximum size of a memory timeline, bytes."""
_TIMELINE_START = re.compile(rb"\s*\[\s*\[\s*-?\d+\s*[,\]]")
CATEGORIES = ("weights", "optimizer state", "inputs", "not attributed", "activations", "gradients",
              "backward temporaries", "not attributed")  # fmt: skip
"""Categories in the order of ``torch/profiler/_memory_profiler.py``."""
MAX_ENTRY_BYTES = 1 << 50
MAX_TIME_NS = 1 << 63
"""Limits in bytes and ns above which an entry is invalid."""
INCREMENT_VERSION = 3
"""Value of ``Action.INCREMENT_VERSION``: bytes move from one category to another."""
_Delta = tuple[int, int, int]
"""Change of memory: time (ns), bytes (negative: freed), index in CATEGORIES."""


def _build_trace(source: ByteSource, snapshot: MemorySnapshot) -> Trace:
    from advisor.core.trace import blank_trace

    bytes_read, events = source.bytes_read, snapshot.events.height
    return blank_trace(source.path, bytes_read=bytes_read, events_read=events, snapshot=snapshot)


class MemorySnapshotReader(Reader):
    """Reader of a memory snapshot, a pickle that is never executed (``plain_pickle.py``)."""

    name = "memory-snapshot"
    description = "a PyTorch memory snapshot (.pickle)"
    suffixes = (".pickle", ".pkl")

    def sniff(self, head: bytes, path: str) -> ReaderClaim:
        """Recognise any pickle. The claim is sure if keys of a snapshot are in the first block."""
        if not looks_like_pickle(head):
            return ReaderClaim.NO
        has_keys = b"segments" in head or b"device_traces" in head
        return ReaderClaim.SURE if has_keys else ReaderClaim.PERHAPS

    def read(self, source: ByteSource, options: ReadOptions) -> Trace:
        from advisor.read.formats.memory_snapshot.tables import read_snapshot

        snapshot = read_snapshot(source.blocks(), source.path, max_bytes=options.max_bytes)
        return _build_trace(source, snapshot)


class MemoryTimelineReader(Reader):
    """Reader of a memory timeline, lists of numbers: bytes by category over time."""

    name = "memory-timeline"
    description = "a memory timeline (.raw.json.gz)"
    suffixes = ()  # must be given by name: in a folder it is next to the program's trace

    def sniff(self, head: bytes, path: str) -> ReaderClaim:
        """Recognise a list that begins with a list of integers."""
        return ReaderClaim.SURE if _TIMELINE_START.match(head) else ReaderClaim.NO

    def read(self, source: ByteSource, options: ReadOptions) -> Trace:
        max_bytes = min(MAX_TIMELINE_BYTES, options.max_bytes)
        data = source.read_all(max_bytes, f"larger than {MAX_TIMELINE_BYTES >> 20} MiB")
        return _build_trace(source, read_memory_timeline(data, source.path))


# -- the timeline -------------------------------------------------------------------------------


def read_memory_timeline(data: bytes, path: str) -> MemorySnapshot:
    """Read a timeline: events ``[time, action, bytes, category]`` (``.raw.json.gz``), or ``[times,
    bytes by category]`` (``.json``). Raises AdvisorError if it is neither.

    The file does not say which block an event frees, so any block of the same size and category is
    used. Sums by category are exact at each event; lifetimes of single blocks are unknown."""
    deltas, dropped = _read_deltas(data, path)
    if not deltas:
        raise AdvisorError(f"{path}: a memory timeline with no event of device memory")
    names = ("device", "action", "size", "address", "time_us", "stack")
    events: dict[str, list[Any]] = {name: [] for name in names}
    live: dict[tuple[int, int], list[int]] = {}
    sizes: dict[int, tuple[int, int]] = {}
    for time, size, category in deltas:  # in order, because it decides which blocks are free
        addresses_of_kind = live.setdefault((abs(size), category), [])
        if size > 0:
            address = len(sizes) + 1
            sizes[address] = (size, category)
            addresses_of_kind.append(address)
        elif addresses_of_kind:
            address = addresses_of_kind.pop(0)
        else:
            dropped += 1
            continue
        row = (0, "alloc" if size > 0 else "free_completed", abs(size), address,
               max(time, 0) // 1000, category)  # fmt: skip
        for column, value in zip(events.values(), row, strict=True):
            column.append(value)
    live_addresses = [address for addresses in live.values() for address in addresses]
    blocks: dict[str, list[Any]] = {
        "device": [0] * len(live_addresses), "address": live_addresses,
        "size": [sizes[n][0] for n in live_addresses],
        "requested": [sizes[n][0] for n in live_addresses],
        "state": ["allocated"] * len(live_addresses),
        "stack": [sizes[n][1] for n in live_addresses],
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


def _read_deltas(data: bytes, path: str) -> tuple[list[_Delta], int]:
    """Return the changes in order of time, and the number of invalid entries."""
    try:
        raw = msgspec.json.decode(data, type=list[tuple[int, int, int, int]])
    except (msgspec.DecodeError, msgspec.ValidationError):
        return _read_samples(data, path), 0
    deltas: list[_Delta] = []
    dropped = 0
    for time, action, size, category in raw:
        is_known_category = 0 <= category < len(CATEGORIES)
        if abs(size) >= MAX_ENTRY_BYTES or abs(time) >= MAX_TIME_NS or not is_known_category:
            dropped += 1
        elif (
            action == INCREMENT_VERSION
            and size > 0
            and deltas
            and deltas[-1] == (time, -size, category)
        ):
            deltas.pop()  # a new version in the same category
        elif size:
            deltas.append((time, size, category))
    return sorted(deltas, key=lambda delta: delta[0]), dropped


def _read_samples(data: bytes, path: str) -> list[_Delta]:
    try:
        times, rows = msgspec.json.decode(data, type=tuple[list[int], list[list[int]]])
    except (msgspec.DecodeError, msgspec.ValidationError):
        times, rows = [], []
    width = len(CATEGORIES) + 1  # the first column is unused
    is_complete = len(times) == len(rows) and all(len(row) == width for row in rows)
    is_valid = all(abs(time) < MAX_TIME_NS for time in times)
    is_valid = is_valid and all(0 <= n < MAX_ENTRY_BYTES for row in rows for n in row)
    if not times or not is_complete or not is_valid:
        raise AdvisorError(f"{path}: a list of numbers, but not a complete PyTorch memory timeline")
    deltas: list[_Delta] = []
    stacks: dict[int, list[int]] = {n: [] for n in range(len(CATEGORIES))}
    for time, (previous_row, row) in zip(times, pairwise([[0] * width, *rows]), strict=True):
        for category, stack in stacks.items():
            change = row[category + 1] - previous_row[category + 1]
            if change > 0:
                stack.append(change)
                deltas.append((time * 1000, change, category))
            while change < 0:  # a decrease frees the last increase, and re-adds what is left
                size = stack.pop()
                deltas.append((time * 1000, -size, category))
                change += size
                if change > 0:
                    stack.append(change)
                    deltas.append((time * 1000, change, category))
                    break
    return deltas
