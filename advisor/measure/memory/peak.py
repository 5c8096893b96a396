"""Device memory over time: the curve, its peak, what was held then, and a trace's allocator events
as a history."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any, NamedTuple

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
from advisor.measure.host.stacks import climb_stack, locate, operators, parents

if TYPE_CHECKING:
    from advisor.measure import Analysis

HELD_SCHEMA: dict[str, Any] = {
    "op": pl.String,
    "file": pl.String,
    "line": pl.Int64,
    "blocks": pl.Int64,
    "bytes": pl.Int64,
}
MAX_POINTS = 4_000
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


def memory_curve(a: Analysis, device: int, most: int = MAX_POINTS) -> pl.DataFrame:
    """Bytes in tensors and bytes held by the allocator over the whole recording: ``ts``,
    ``allocated``, ``reserved`` (null: the allocator does not tell). Values hold until the next
    row. Long curves are thinned to about ``most`` rows: of each stretch its lowest and highest
    ``allocated`` are kept, so that no peak is lost."""
    events = _events(a, device).select("ts", "allocated", "reserved")
    if events.height <= most:
        return events
    bucket = np.arange(events.height) * (most // 2) // events.height
    kept = (
        events.with_row_index("row")
        .group_by(pl.Series("bucket", bucket), maintain_order=True)
        .agg(
            pl.col("row").get(pl.col("allocated").arg_min()).alias("low"),
            pl.col("row").get(pl.col("allocated").arg_max()).alias("high"),
        )
    )
    rows = np.unique(np.concatenate([kept["low"].to_numpy(), kept["high"].to_numpy()]))
    return events[rows]


class Peak(NamedTuple):
    """The moment at which most bytes were in tensors."""

    ts: int
    """ns."""
    allocated: int
    """Bytes in tensors."""
    reserved: int | None
    """Bytes held by the allocator then; the difference is its cache and fragmentation."""
    before: int
    """Bytes of it that were allocated before the recording began: who did is not recorded."""
    held: pl.DataFrame
    """The rest by who allocated it: ``op`` (outermost operator at that moment, null: none),
    ``file`` and ``line`` (of the user's code; null: no stacks), ``blocks``, ``bytes``; largest
    first."""


def memory_peak(a: Analysis, device: int) -> Peak | None:
    """What was held at the peak of a device; ``None``: no allocator events.

    A block is held when it was allocated before the peak and not freed by then; each is tied to
    the host event that was running on its thread. Without ``Total Allocated`` in the file there
    is no peak to find.
    """
    events = _events(a, device)
    if events.is_empty() or events["allocated"].is_null().all():
        return None
    index = int(events["allocated"].arg_max() or 0)
    upto = events[: index + 1]
    # the last event of an address tells whether its block is held
    last = upto.with_row_index("row").group_by("address").agg(pl.col("row").max())
    held = upto[np.sort(last["row"].to_numpy())].filter(pl.col("bytes") > 0)
    total = int(events["allocated"][index])
    reserved = events["reserved"][index]
    own = int(held["bytes"].sum())
    return Peak(
        ts=int(events["ts"][index]),
        allocated=total,
        reserved=int(reserved) if reserved else None,
        before=max(0, total - own),
        held=_by_owner(a, held),
    )


def _events(a: Analysis, device: int) -> pl.DataFrame:
    events = a.trace.memory.filter(pl.col("device") == device).sort("ts", maintain_order=True)
    return events.with_columns(reserved=pl.when(pl.col("reserved") > 0).then("reserved"))


def _by_owner(a: Analysis, held: pl.DataFrame) -> pl.DataFrame:
    if held.is_empty():
        return pl.DataFrame(schema=HELD_SCHEMA)
    row = _running(a, held["thread"].fill_null(-1).to_numpy(), held["ts"].to_numpy())
    op = _outermost_op(a, row)
    frame = np.where(row >= 0, a.user_frame[np.maximum(row, 0)], -1) if a.trace.cpu.height else row
    missing = (frame < 0) & (row >= 0)
    if missing.any():
        frame[missing] = a.forward_frame[row[missing]]
    groups = (
        pl.DataFrame({"op_row": op, "frame": frame, "bytes": held["bytes"]})
        .with_columns(op=a.trace.cpu["name"].gather(pl.Series(op).set(pl.Series(op < 0), None)))
        .group_by("op", "frame")
        .agg(pl.len().cast(pl.Int64).alias("blocks"), pl.col("bytes").sum())
        .sort("bytes", "blocks", descending=True)
    )
    places = [locate(a, int(row)) if row >= 0 else (None, None, None) for row in groups["frame"]]
    return groups.select(
        pl.col("op").cast(pl.String),
        pl.Series("file", [place[0] for place in places], dtype=pl.String),
        pl.Series("line", [place[1] for place in places], dtype=pl.Int64),
        "blocks",
        "bytes",
    )


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


def _outermost_op(a: Analysis, rows: NDArray[np.int32]) -> NDArray[np.int32]:
    if not len(rows) or a.trace.cpu.is_empty():
        return np.full(len(rows), -1, dtype=np.int32)
    return climb_stack(parents(a.trace), operators(a.trace), rows.astype(np.int64), top=True)


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
