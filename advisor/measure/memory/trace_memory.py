"""Device memory in a trace: peaks per step, calls that allocate or free it, recomputation that
saves it, and the allocator's events as a history."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import polars as pl
from numpy.typing import NDArray

from advisor.core.intervals import EMPTY, Intervals, covered_length, intersect, subtract, union
from advisor.core.snapshot import (
    ANNOTATION_SCHEMA,
    BLOCK_SCHEMA,
    EVENT_SCHEMA,
    SEGMENT_SCHEMA,
    MemorySnapshot,
    SnapshotFrame,
    Stack,
)
from advisor.measure.comm.comms import step_at
from advisor.measure.host.names import name_matches
from advisor.measure.host.stacks import (
    ENGINE_NODE,
    climb_stack,
    innermost_ancestor,
    is_operator,
    nullable_rows,
    parent_rows,
    rows_around,
)

if TYPE_CHECKING:
    from advisor.core.trace import Trace
    from advisor.measure import Analysis

MEMORY_SCHEMA: dict[str, Any] = {
    "device": pl.Int32,
    "step": pl.Int32,
    "peak_allocated": pl.Int64,
    "peak_reserved": pl.Int64,
    "capacity": pl.Int64,
}
"""Columns of ``Analysis.memory``."""

ALLOCATIONS_SCHEMA: dict[str, Any] = {
    "host": pl.Int32, "call": pl.String, "ts": pl.Int64, "dur": pl.Int64, "step": pl.Int32,
    "line": pl.Int32, "op": pl.Int32,
}  # fmt: skip
"""Columns of ``Analysis.allocations``."""

RECOMPUTE_SCHEMA: dict[str, Any] = {
    "step": pl.Int32,
    "kernels": pl.Int64,
    "dur": pl.Int64,
    "busy": pl.Int64,
}
"""Columns of :func:`find_recompute`."""

_CHECKPOINT = r"torch/utils/checkpoint\.py\(\d+\): "
RECOMPUTE = _CHECKPOINT + r"(\w+\.)*recompute_fn\b"
REENTRANT = r"^CheckpointFunctionBackward$"
_DERIVATIVE = r"^\w+Backward\d+$"
_FORWARD = (
    r"^aten::(?:linear|addmm|layer_norm|rms_norm|group_norm|batch_norm|conv\dd|embedding|dropout"
    r"|scaled_dot_product_attention|gelu|relu|silu|softmax|cross_entropy_loss)$"
)
"""Operators that modules call, and no derivative does."""


def memory_by_step(a: Analysis) -> pl.DataFrame:
    """Measure device memory, one row per device and used step. Empty: no allocator events.

    ``peak_allocated`` and ``peak_reserved``: largest ``Total Allocated`` and ``Total Reserved`` of
    the caching allocator in force at some instant of the step, bytes: its events in the step, and
    the last one before it. Null: no event up to the end of the step. A reserved total of 0 is an
    allocator that does not tell it, so null. ``capacity``: ``totalGlobalMem``; null: not in the
    file. Memory outside PyTorch's allocator (NCCL, cuBLAS, other processes) is not in it."""
    events = a.trace.memory.filter(pl.col("device") >= 0).sort("device", "ts", maintain_order=True)
    used = a.steps.used
    if events.is_empty() or used.is_empty():
        return pl.DataFrame(schema=MEMORY_SCHEMA)
    # what was in force until an event is in the event itself, which matters for the first
    before = pl.col("allocated") - pl.col("bytes")
    events = events.with_columns(
        before=pl.when(pl.col("bytes") < 0).then(before),
        reserved=pl.when(pl.col("reserved") > 0).then("reserved"),
    )
    rows = []
    for (device,), group in events.group_by("device", maintain_order=True):
        known = a.trace.working_device if device == a.device_id else a.trace.device
        properties = known(int(device))
        ts = group["ts"].to_numpy()
        first = np.searchsorted(ts, used["ts"].to_numpy())
        last = np.searchsorted(ts, used["end"].to_numpy())
        for step, start, end in zip(used["index"], first, last, strict=True):
            inside = group[max(0, start - 1) : end]
            own = group[start:end]
            rows.append(
                (
                    device,
                    step,
                    _largest(inside["allocated"], own["before"]),
                    _largest(inside["reserved"]),
                    properties.memory_bytes if properties else None,
                )
            )
    return pl.DataFrame(rows, schema=MEMORY_SCHEMA, orient="row")


def _largest(*columns: pl.Series) -> int | None:
    known = [column.drop_nulls().to_numpy() for column in columns]
    return max((int(values.max()) for values in known if len(values)), default=None)


def find_allocations(a: Analysis) -> pl.DataFrame:
    """Find runtime calls that allocate or free device or pinned memory (classes malloc, free,
    host_alloc and host_free) and touch ``spans``, in order of time.

    ``call`` is that class; ``step`` the used step in which the call starts (or that it reaches
    into); ``line`` the row of the user's Python frame and ``op`` of the innermost op around it,
    null where there is none."""
    cpu = a.trace.cpu
    wanted = cpu["call"].is_in(["malloc", "free", "host_alloc", "host_free"]).fill_null(False)
    rows = np.flatnonzero(wanted.to_numpy())
    if not len(rows):
        return pl.DataFrame(schema=ALLOCATIONS_SCHEMA)
    ts, dur = (cpu[key].gather(rows).to_numpy() for key in ("ts", "dur"))
    # a call whose duration was rounded to 0 still happened
    inside = covered_length(ts, ts + np.maximum(dur, 1), a.spans) > 0
    rows, ts, dur = rows[inside], ts[inside], dur[inside]
    order = np.argsort(ts, kind="stable")
    rows, ts, dur = rows[order], ts[order], dur[order]
    frame = a.user_frame[rows]
    op = _op_around(a.trace, rows)
    return pl.DataFrame(
        {
            "host": rows,
            "call": cpu["call"].gather(rows).cast(pl.String),
            "ts": ts,
            "dur": dur,
            "step": step_at(a, ts),
            "line": nullable_rows(frame),
            "op": nullable_rows(op),
        },
        schema_overrides=ALLOCATIONS_SCHEMA,
    )


def _op_around(trace: Trace, rows: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return the innermost op around each of a few host rows, -1: none."""
    parent = parent_rows(trace)
    return climb_stack(parent, is_operator(trace), rows_around(parent, rows))


def find_recompute(a: Analysis) -> pl.DataFrame | None:
    """Find forward work that activation checkpointing runs a second time during backward.

    A row a used step: ``step``, ``kernels`` (launched by recomputation, not communication, that run
    in the step), ``dur`` (their summed device time inside the step, ns), ``busy`` (ns during which
    at least one of them runs). Work counts when the innermost of these around its launch is one of
    the first two: a Python frame ``torch/utils/checkpoint.py(…): recompute_fn``
    (``use_reentrant=False``), the op ``CheckpointFunctionBackward`` (``use_reentrant=True``), an
    autograd node (the reentrant form runs backward inside its own node). Without frames, operators
    count that a node of PyTorch's own derivatives runs before those of its kind do, where forward
    ones are among them (:func:`_unpacked`).

    ``None``: unknown, nothing of the kind is recorded. With frames, a call of ``checkpoint`` that
    is seen with neither of the two was recorded on the forward thread only. Recomputation that a
    compiler planned is inside its kernels: not seen."""
    trace = a.trace
    cpu = trace.cpu
    if cpu.is_empty() or a.device_id is None:
        return None
    again, op = _recomputing(a), is_operator(trace)
    if not again.any():
        stacks = bool((cpu["kind"] == "python").any())
        if not stacks or name_matches(cpu["name"], _CHECKPOINT + "checkpoint$").any():
            return None
    barrier = again | (op & name_matches(cpu["name"], ENGINE_NODE).to_numpy())
    around = (
        innermost_ancestor(parent_rows(trace), barrier) if again.any() else np.full(cpu.height, -1)
    )
    inner = (around >= 0) & again[np.maximum(around, 0)]
    launch = trace.gpu["launch"].fill_null(-1).to_numpy()
    rows = (launch >= 0) & inner[np.maximum(launch, 0)] & a.in_window
    rows &= ~a.kernels["communication"].to_numpy()
    used = a.steps.used
    starts, ends = used["ts"].to_numpy(), used["end"].to_numpy()
    ts = trace.gpu["ts"].to_numpy()[rows]
    end = ts + trace.gpu["dur"].to_numpy()[rows]
    busy = intersect(union(ts, end), a.spans)
    table = []
    for step, low, high in zip(used["index"], starts, ends, strict=True):
        inside = np.minimum(end, high) - np.maximum(ts, low)
        table.append((step, int((inside > 0).sum()), int(inside[inside > 0].sum())))
    return pl.DataFrame(
        [
            (*row, ns)
            for row, ns in zip(table, covered_length(starts, ends, busy).tolist(), strict=True)
        ],
        schema=RECOMPUTE_SCHEMA,
        orient="row",
    )


def _recomputing(a: Analysis) -> NDArray[np.bool_]:
    """Return which rows of ``trace.cpu`` recompute, with their children but for autograd nodes."""
    cpu = a.trace.cpu
    again: NDArray[np.bool_] = (cpu["kind"] == "python").to_numpy()
    again = again & name_matches(cpu["name"], RECOMPUTE).to_numpy()
    again = again | (is_operator(a.trace) & name_matches(cpu["name"], REENTRANT).to_numpy())
    if not again.any():
        again[_unpacked(a)] = True
    return again


def _unpacked(a: Analysis) -> NDArray[np.int64]:
    """Find operators directly inside a node of PyTorch's own derivatives (``AddmmBackward0``) that
    run there because the node asks for a saved tensor that is not there: ``use_reentrant=False``
    recomputes it then. A derivative calls no ``aten::linear`` or ``aten::layer_norm``; the node's
    own operators come last, as many as most nodes of its name have."""
    cpu = a.trace.cpu
    parent, names = parent_rows(a.trace), cpu["name"]
    node = is_operator(a.trace) & name_matches(names, _DERIVATIVE).to_numpy()
    child = np.flatnonzero(is_operator(a.trace) & (parent >= 0) & node[np.maximum(parent, 0)])
    if not len(child):
        return child
    forward = name_matches(names, _FORWARD).to_numpy()[child]
    order = np.lexsort((child, parent[child]))
    child, forward = child[order], forward[order]
    owner, first, count = np.unique(parent[child], return_index=True, return_counts=True)
    replays = np.add.reduceat(forward.astype(np.int64), first) > 0
    table = pl.DataFrame(
        {"name": names.gather(owner), "count": count, "replays": replays, "first": first}
    )
    usual = (
        table.filter(~pl.col("replays")).group_by("name").agg(pl.col("count").median().alias("own"))
    )
    table = table.filter("replays").join(usual, on="name", how="left", maintain_order="left")
    kept = [
        child[start : start + max(0, total - int(own or 0))]
        for start, total, own in table.select("first", "count", "own").iter_rows()
    ]  # a node for each block
    return np.concatenate(kept) if kept else child[:0]


def recompute_time(a: Analysis) -> Intervals:
    """Find host time of recomputation, without the backward pass that runs inside it."""
    if a.trace.cpu.is_empty() or a.device_id is None:
        return EMPTY
    cpu, parent = a.trace.cpu, parent_rows(a.trace)
    again = _recomputing(a)
    rows = np.flatnonzero(again)
    if not len(rows):
        return EMPTY
    ts = cpu["ts"].to_numpy()
    end = ts + cpu["dur"].to_numpy()
    backward = is_operator(a.trace) & name_matches(cpu["name"], ENGINE_NODE).to_numpy()
    around = innermost_ancestor(parent, again)
    nested = np.flatnonzero(backward & (around >= 0))
    node = is_operator(a.trace)[rows] & (parent[rows] >= 0)
    begins, ends = ts[rows[~node]], end[rows[~node]]
    if node.any():
        # a node that recomputes does nothing else, in Python too, until its own operators come
        again_in = pl.DataFrame({"node": parent[rows[node]], "row": rows[node]})
        inside = pl.DataFrame({"node": parent, "child": np.arange(len(parent))})
        table = again_in.group_by("node").agg(pl.col("row").max()).join(inside, on="node")
        after = pl.col("child").filter(pl.col("child") > pl.col("row")).min()
        table = table.group_by("node").agg(after)
        owner, own = table["node"].to_numpy(), table["child"].fill_null(-1).to_numpy()
        begins = np.append(begins, ts[owner])
        ends = np.append(ends, np.where(own >= 0, ts[own], end[owner]))
    whole = union(begins, ends)
    return intersect(subtract(whole, union(ts[nested], end[nested])), a.steps.host_spans)


# -- a trace's allocator events as a history -------------------------------------------------------

MAX_DEPTH = 512
"""Innermost frames of a stack that are kept, at most."""
_PYTHON = re.compile(r"^(.{1,4096})\((\d{1,9})\): (.{1,1024})$")
_NODE = re.compile(r"^autograd::engine::evaluate_function: (.{1,1024})$")
_OPTIMIZER = re.compile(r"^Optimizer\.(step|zero_grad)#")
OPTIMIZER, FUNCTIONAL = "torch/optim/optimizer_of_trace.py", "torch/nn/functional.py"
"""Files that stand for what a trace names without one."""


def memory_devices(a: Analysis) -> list[int]:
    """List devices with allocator events, in order (-1 is the host's memory, left out)."""
    devices = a.trace.memory.filter(pl.col("device") >= 0)["device"].unique().sort()
    return [int(device) for device in devices]


def find_running(
    a: Analysis, thread: NDArray[np.int32], ts: NDArray[np.int64]
) -> NDArray[np.int32]:
    """Return the innermost host row that is running on a thread at an instant, -1: none."""
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
    """Convert the allocator events of a trace (``profile_memory=True``, XPlane, Nsight Systems) to
    a history; ``None``: the trace has none. Device -1 is the host's memory.

    What was allocated before the recording is one block without a line, by the total that the first
    event notes. Segments are what the allocator's total of reserved bytes grew by. Stacks are the
    host's: Python frames, operators of the autograd engine and of optimizers."""
    events = a.trace.memory.filter((pl.col("bytes") != 0) & pl.col("allocated").is_not_null())
    if events.is_empty():
        return None
    events = events.sort("device", "ts", maintain_order=True)
    stacks = _Stacks(a)
    thread = events["thread"].fill_null(-1).to_numpy()
    rows = find_running(a, thread, events["ts"].to_numpy())
    events = events.with_columns(stack=pl.Series([stacks.index_of(row) for row in rows.tolist()]))
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
    """Concatenate parts of a table, null where a part has no such column."""
    return pl.concat([pl.DataFrame(schema=schema), *(
        part.select(*(pl.col(name) if name in part.columns else pl.lit(None, kind).alias(name)
                      for name, kind in schema.items())).cast(pl.Schema(schema))
        for part in parts
    )])  # fmt: skip


def _of_device(events: pl.DataFrame) -> tuple[pl.DataFrame, pl.DataFrame, pl.DataFrame]:
    """Return segments, blocks and events of one device, in order of time."""
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
    """Stacks of host rows, each call path once."""

    def __init__(self, a: Analysis) -> None:
        cpu = a.trace.cpu
        self._parent = parent_rows(a.trace)
        self._names = cpu["name"]
        self._kind = cpu["kind"].cast(pl.String).to_numpy()
        self._recorded = cpu["sequence"].is_not_null().to_numpy()
        self._by_row: dict[int, int] = {-1: -1}
        self._by_path: dict[tuple[int, SnapshotFrame | None], int] = {}
        self.made: list[Stack] = []

    def index_of(self, row: int) -> int | None:
        """Return the place of a row's stack in ``made``; ``None``: it has no frame."""
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
        """Return the frame that a snapshot has for a row; ``None``: it shows no purpose."""
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


class MemoryPeaks(NamedTuple):
    """Memory of the analysed GPU, bytes; ``None``: not measured."""

    reserved: int | None
    """Most that PyTorch's allocator held, cached memory included."""
    allocated: int | None
    """Most that tensors held."""
    capacity: int | None
    """Memory of the GPU."""


def measure_peaks(a: Analysis) -> MemoryPeaks:
    """Return the largest values of any used step."""
    if a.device_id is None:
        return MemoryPeaks(None, None, None)
    rows = a.memory.filter(a.memory["device"] == a.device_id)

    def largest(name: str) -> int | None:
        return max((int(value) for value in rows[name].drop_nulls()), default=None)

    return MemoryPeaks(largest("peak_reserved"), largest("peak_allocated"), largest("capacity"))


def measure_held(a: Analysis) -> tuple[int | None, int | None]:
    """Return the most PyTorch held and what the GPU has, bytes: from the trace, else the record."""
    held, allocated, capacity = measure_peaks(a)
    held = allocated if held is None else held
    if held is None and a.recorded is not None:
        for name in ("reserved", "peak"):
            known = a.recorded.column(name)
            known = known[~np.isnan(known)]
            if held is None and len(known):
                held = int(known.max())
        capacity = capacity or gpu_capacity(a)
    return held, capacity


def gpu_capacity(a: Analysis) -> int | None:
    """Return the memory of the rank's GPU, bytes; ``None``: not recorded."""
    recorded = a.recorded
    if recorded is None:
        return None
    device = next(iter(recorded.record.rank.devices), None)
    if device is not None and device.total_bytes:
        return device.total_bytes
    totals = recorded.gpu("memory_total")
    return int(totals.max()) if len(totals) else None
