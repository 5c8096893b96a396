"""``export_memory_timeline`` of PyTorch's profiler to a snapshot: categories over time."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import msgspec
import polars as pl

from advisor.core.errors import AdvisorError
from advisor.core.snapshot import (
    ANNOTATION_SCHEMA,
    BLOCK_SCHEMA,
    EVENT_SCHEMA,
    SEGMENT_SCHEMA,
    MemorySnapshot,
)

CATEGORIES = ("weights", "optimizer state", "inputs", "not attributed", "activations", "gradients",
              "backward temporaries", "not attributed")  # fmt: skip
"""In the order of ``torch/profiler/_memory_profiler.py``: its temporaries may be of any phase."""
LARGEST = 1 << 50
LATEST = 1 << 63
"""Bytes and ns from which on an entry makes no sense."""
NEW_VERSION = 3
"""``Action.INCREMENT_VERSION``: bytes leave one category and enter another."""
_Delta = tuple[int, int, int]
"""Time (ns), bytes (negative: freed), place in CATEGORIES."""


def read_memory_timeline(data: bytes, path: str) -> MemorySnapshot:
    """Both layouts: events ``[time, action, bytes, category]`` (``.raw.json.gz``), and
    ``[times, bytes by category]`` (``.json``). Raises AdvisorError: it is neither.

    Which block an event frees is not in the file: one of its size and category does. So sums by
    category are exact at each event, and how long a single block lived is not known.
    """
    deltas, dropped = _deltas(data, path)
    if not deltas:
        raise AdvisorError(f"{path}: a memory timeline with no event of device memory")
    events: dict[str, list[Any]] = {name: [] for name in EVENT_SCHEMA}
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
        row = {"device": 0, "action": "alloc" if size > 0 else "free_completed", "size": abs(size),
               "address": address, "time_us": max(time, 0) // 1000, "stack": category}  # fmt: skip
        for name, column in events.items():
            column.append(row.get(name))
    held = [address for addresses in live.values() for address in addresses]
    blocks: dict[str, list[Any]] = {
        "device": [0] * len(held), "address": held, "size": [sizes[n][0] for n in held],
        "requested": [sizes[n][0] for n in held], "state": ["allocated"] * len(held),
        "stack": [sizes[n][1] for n in held],
    }  # fmt: skip
    return MemorySnapshot(
        path=path,
        segments=pl.DataFrame(schema=SEGMENT_SCHEMA),
        blocks=pl.DataFrame(
            {name: pl.Series(blocks.get(name, [None] * len(held)), dtype=kind)
             for name, kind in BLOCK_SCHEMA.items()}
        ),
        events=pl.DataFrame(
            {name: pl.Series(events[name], dtype=kind) for name, kind in EVENT_SCHEMA.items()}
        ),
        annotations=pl.DataFrame(schema=ANNOTATION_SCHEMA),
        stacks=((),) * len(CATEGORIES),
        dropped={"frees of what was never allocated": dropped} if dropped else {},
        source="timeline",
        categories=CATEGORIES,
    )  # fmt: skip


def _deltas(data: bytes, path: str) -> tuple[list[_Delta], int]:
    """Changes in order of time, and how many entries made no sense."""
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
