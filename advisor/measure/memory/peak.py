"""A trace's allocator events as a history."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

import numpy as np
import polars as pl
from numpy.typing import NDArray

from advisor.core.snapshot import (
    ANNOTATION_SCHEMA,
    BLOCK_SCHEMA,
    EVENT_SCHEMA,
    SEGMENT_SCHEMA,
    MemorySnapshot,
    SnapshotFrame,
    Stack,
)
from advisor.measure.host.stacks import parents

if TYPE_CHECKING:
    from advisor.measure import Analysis

MAX_DEPTH = 512
"""Frames of a stack, the innermost."""
_PYTHON = re.compile(r"^(.{1,4096})\((\d{1,9})\): (.{1,1024})$")
_NODE = re.compile(r"^autograd::engine::evaluate_function: (.{1,1024})$")
_OPTIMIZER = re.compile(r"^Optimizer\.(step|zero_grad)#")
OPTIMIZER, FUNCTIONAL = "torch/optim/optimizer_of_trace.py", "torch/nn/functional.py"
"""Files that stand for what a trace names without one."""


def memory_devices(a: Analysis) -> list[int]:
    """Devices with allocator events, in order (-1 is the host's memory, left out)."""
    devices = a.trace.memory.filter(pl.col("device") >= 0)["device"].unique().sort()
    return [int(device) for device in devices]


def _running(a: Analysis, thread: NDArray[np.int32], ts: NDArray[np.int64]) -> NDArray[np.int32]:
    """Innermost host row that is running on a thread at an instant, -1: none."""
    cpu = a.trace.cpu
    result = np.full(len(ts), -1, dtype=np.int32)
    if cpu.is_empty():
        return result
    starts, ends = cpu["ts"].to_numpy(), (cpu["ts"] + cpu["dur"]).to_numpy()
    threads, parent = cpu["thread"].to_numpy(), cpu["parent"].fill_null(-1).to_numpy()
    for number in np.unique(thread):  # a handful of threads
        low, high = np.searchsorted(threads, [number, number + 1])
        own = np.flatnonzero(thread == number)
        index = low + np.searchsorted(starts[low:high], ts[own], side="right") - 1
        index = np.where(index >= low, index, -1)
        while (late := (index >= 0) & (ends[np.maximum(index, 0)] < ts[own])).any():
            index[late] = parent[index[late]]  # as often as stacks are deep
        result[own] = index
    return result


def recorded_snapshot(a: Analysis) -> MemorySnapshot | None:
    """The allocator events of a trace (``profile_memory=True``, XPlane, Nsight Systems) as a
    history; ``None``: the trace has none. Device -1 is the host's memory.

    What was allocated before the recording is one block without a line, by the total that the
    first event notes. Segments are what the allocator's total of reserved bytes grew by. Stacks
    are the host's: Python frames, operators of the autograd engine and of optimizers.
    """
    events = a.trace.memory.filter((pl.col("bytes") != 0) & pl.col("allocated").is_not_null())
    if events.is_empty():
        return None
    events = events.sort("device", "ts", maintain_order=True)
    stacks = _Stacks(a)
    thread = events["thread"].fill_null(-1).to_numpy()
    rows = _running(a, thread, events["ts"].to_numpy())
    events = events.with_columns(stack=pl.Series([stacks.of(row) for row in rows.tolist()]))
    parts = [_of_device(device) for _, device in events.group_by("device", maintain_order=True)]
    begin = pl.col("ts").cast(pl.Int64) // 1000
    marks = a.steps.table if a.steps.source != "whole trace" else a.steps.table.clear()
    annotations = [
        marks.select(device=pl.lit(device), time_us=begin, name=pl.lit("ProfilerStep#"),
                     stage=pl.lit("START"))
        for device in events["device"].unique().to_list()
    ]  # fmt: skip
    return MemorySnapshot(
        path=a.trace.meta.path,
        segments=_table(SEGMENT_SCHEMA, [part[0] for part in parts]),
        blocks=_table(BLOCK_SCHEMA, [part[1] for part in parts]),
        events=_table(EVENT_SCHEMA, [part[2] for part in parts]),
        annotations=_table(ANNOTATION_SCHEMA, annotations),
        stacks=tuple(stacks.made),
        source="trace",
    )


def _table(schema: dict[str, Any], parts: list[pl.DataFrame]) -> pl.DataFrame:
    """Parts of a table under one another, null where a part has no such column."""
    return pl.concat([pl.DataFrame(schema=schema), *(
        part.select(*(pl.col(name) if name in part.columns else pl.lit(None, kind).alias(name)
                      for name, kind in schema.items())).cast(pl.Schema(schema))
        for part in parts
    )])  # fmt: skip


def _of_device(events: pl.DataFrame) -> tuple[pl.DataFrame, pl.DataFrame, pl.DataFrame]:
    """Segments, blocks and events of one device, in order of time."""
    device = pl.lit(events["device"][0], pl.Int32)
    freed = pl.col("bytes") < 0
    plain = events.with_row_index("place").select(
        "place", "address", "stack", device=device, time_us=pl.col("ts") // 1000,
        action=pl.when(freed).then(pl.lit("free_completed")).otherwise(pl.lit("alloc")),
        size=pl.col("bytes").abs(),
    )  # fmt: skip
    last = events.group_by("address", maintain_order=True).last().filter(~freed)
    blocks = last.select("address", "stack", size="bytes", requested="bytes")
    # a block that is freed but was not allocated in the recording is in the history itself
    first = events.group_by("address", maintain_order=True).first().filter(freed)
    before = int((events["allocated"] - events["bytes"])[0] or 0) + int(first["bytes"].sum())
    if before > 0:
        old = {"address": [-1], "stack": [None], "size": [before], "requested": [before]}
        blocks = pl.concat([blocks, pl.DataFrame(old, schema=blocks.schema)])
    blocks = blocks.with_columns(device=device, state=pl.lit("allocated"), segment=pl.lit(0))
    reserved = events["reserved"].set(events["reserved"] <= 0, None)
    segments = pl.DataFrame(schema=SEGMENT_SCHEMA)
    if reserved.null_count() == 0:
        segments = pl.DataFrame({"address": [0], "total": [reserved[-1]]}).with_columns(
            device=device, stream=pl.lit(0)
        )
        grown = plain.with_columns(more=reserved.diff().fill_null(0)).filter(pl.col("more") != 0)
        rises = pl.col("more") > 0
        grown = grown.select(
            "place", "stack", "device", "time_us", address=pl.lit(0, pl.Int64),
            action=pl.when(rises).then(pl.lit("segment_map")).otherwise(pl.lit("segment_unmap")),
            size=pl.col("more").abs(),
        ).select(plain.columns)  # fmt: skip
        plain = pl.concat([grown, plain]).sort("place", maintain_order=True)  # mapped, then used
    return segments, blocks, plain


class _Stacks:
    """Stacks of host rows, the same call path once."""

    def __init__(self, a: Analysis) -> None:
        cpu = a.trace.cpu
        self._parent = parents(a.trace)
        self._names = cpu["name"]
        self._kind = cpu["kind"].cast(pl.String).to_numpy()
        self._recorded = cpu["sequence"].is_not_null().to_numpy()
        self._by_row: dict[int, int] = {-1: -1}
        self._by_path: dict[tuple[int, SnapshotFrame | None], int] = {}
        self.made: list[Stack] = []

    def of(self, row: int) -> int | None:
        """Place of a row's stack in ``made``; ``None``: it has no frame."""
        path = []
        while row not in self._by_row:  # outwards, up to what is known
            path.append(row)
            row = int(self._parent[row])
        number = self._by_row[row]
        for inner in reversed(path):
            number = self._by_row[inner] = self._number(number, self._frame(inner))
        return None if number < 0 else number

    def _number(self, outer: int, frame: SnapshotFrame | None) -> int:
        if frame is None:
            return outer
        key = (outer, frame)
        if key not in self._by_path:
            self._by_path[key] = len(self.made)
            self.made.append((frame, *(self.made[outer] if outer >= 0 else ()))[:MAX_DEPTH])
        return self._by_path[key]

    def _frame(self, row: int) -> SnapshotFrame | None:
        """As PyTorch writes it into a snapshot; ``None``: it says nothing of what memory is for."""
        name = str(self._names[row])
        if self._kind[row] == "python":
            match = _PYTHON.match(name)
            return SnapshotFrame(match[1], int(match[2]), match[3]) if match else None
        if node := _NODE.match(name):
            return SnapshotFrame("", 0, f"{node[1]}::apply")
        if optimizer := _OPTIMIZER.match(name):
            return SnapshotFrame(OPTIMIZER, 1, optimizer[1])
        if self._recorded[row]:  # autograd keeps it for the backward pass
            return SnapshotFrame(FUNCTIONAL, 1, name)
        return SnapshotFrame("", 0, name) if self._kind[row] == "op" else None
