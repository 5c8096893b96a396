"""Device memory in a trace: peaks per step, calls that allocate or free memory, recomputation that
saves memory, and the allocator's events as a history."""

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
_DERIVATIVE_NODE = r"^\w+Backward\d+$"
_FORWARD_OPS = (
    r"^aten::(?:linear|addmm|layer_norm|rms_norm|group_norm|batch_norm|conv\dd|embedding|dropout"
    r"|scaled_dot_product_attention|gelu|relu|silu|softmax|cross_entropy_loss)$"
)
"""Operators that modules call, but no derivative does."""


def memory_by_step(a: Analysis) -> pl.DataFrame:
    """Measure device memory, with one row per device and used step. Empty without allocator events.

    ``peak_allocated`` and ``peak_reserved`` are the largest ``Total Allocated`` and ``Total
    Reserved`` of the caching allocator at any instant of the step, bytes, from its events in the
    step and the last one before it. Null if there is no event up to the end of the step. A reserved
    total of 0 is null, because that allocator does not report it. ``capacity`` is
    ``totalGlobalMem``, or null if not in the file. Memory outside PyTorch's allocator (NCCL,
    cuBLAS, other processes) is not included."""
    events = a.trace.memory.filter(pl.col("device") >= 0).sort("device", "ts", maintain_order=True)
    used = a.steps.used
    if events.is_empty() or used.is_empty():
        return pl.DataFrame(schema=MEMORY_SCHEMA)
    # an event also contains the total before it, which matters for the first event
    before = pl.col("allocated") - pl.col("bytes")
    events = events.with_columns(
        before=pl.when(pl.col("bytes") < 0).then(before),
        reserved=pl.when(pl.col("reserved") > 0).then("reserved"),
    )
    rows = []
    for (device,), group in events.group_by("device", maintain_order=True):
        find_device = a.trace.working_device if device == a.device_id else a.trace.device
        properties = find_device(int(device))
        ts = group["ts"].to_numpy()
        first_event = np.searchsorted(ts, used["ts"].to_numpy())
        end_event = np.searchsorted(ts, used["end"].to_numpy())
        for step, start, end in zip(used["index"], first_event, end_event, strict=True):
            in_step = group[max(0, start - 1) : end]
            step_events = group[start:end]
            rows.append(
                (
                    device,
                    step,
                    _find_largest(in_step["allocated"], step_events["before"]),
                    _find_largest(in_step["reserved"]),
                    properties.memory_bytes if properties else None,
                )
            )
    return pl.DataFrame(rows, schema=MEMORY_SCHEMA, orient="row")


def _find_largest(*columns: pl.Series) -> int | None:
    values_by_column = [column.drop_nulls().to_numpy() for column in columns]
    return max((int(values.max()) for values in values_by_column if len(values)), default=None)


def find_allocations(a: Analysis) -> pl.DataFrame:
    """Find runtime calls that allocate or free device or pinned memory (classes malloc, free,
    host_alloc and host_free) and touch ``spans``, in order of time.

    ``call`` is the class, ``step`` the used step in which the call starts (or that it reaches
    into), ``line`` the row of the user's Python frame and ``op`` the row of the innermost op around
    it, or null."""
    cpu = a.trace.cpu
    is_call = cpu["call"].is_in(["malloc", "free", "host_alloc", "host_free"]).fill_null(False)
    rows = np.flatnonzero(is_call.to_numpy())
    if not len(rows):
        return pl.DataFrame(schema=ALLOCATIONS_SCHEMA)
    ts, dur = (cpu[key].gather(rows).to_numpy() for key in ("ts", "dur"))
    # a call whose duration was rounded to 0 still happened
    is_inside = covered_length(ts, ts + np.maximum(dur, 1), a.spans) > 0
    rows, ts, dur = rows[is_inside], ts[is_inside], dur[is_inside]
    order = np.argsort(ts, kind="stable")
    rows, ts, dur = rows[order], ts[order], dur[order]
    frame = a.user_frame[rows]
    parent = parent_rows(a.trace)
    op = climb_stack(parent, is_operator(a.trace), rows_around(parent, rows))
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


def find_recompute(a: Analysis) -> pl.DataFrame | None:
    """Find forward work that activation checkpointing repeats during backward.

    There is one row per used step: ``step``, ``kernels`` (number launched by recomputation that run
    in the step, without communication), ``dur`` (their summed device time inside the step, ns),
    ``busy`` (ns during which at least one of them runs). Work counts if the innermost of these
    around its launch is one of the first two: a Python frame ``torch/utils/checkpoint.py(…):
    recompute_fn`` (``use_reentrant=False``), the op ``CheckpointFunctionBackward``
    (``use_reentrant=True``), an autograd node (the reentrant form runs backward inside its own
    node). Without frames, operators count that a node of PyTorch's own derivatives runs before its
    own ones, if forward operators are among them (:func:`_find_unpacked`).

    ``None`` if unknown, because none of these is recorded. With frames, a call of ``checkpoint``
    without either of the two was recorded only on the forward thread. Recomputation planned by a
    compiler is inside its kernels and is not found."""
    trace = a.trace
    cpu = trace.cpu
    if cpu.is_empty() or a.device_id is None:
        return None
    is_recomputing, is_op = _find_recomputing(a), is_operator(trace)
    if not is_recomputing.any():
        stacks = bool((cpu["kind"] == "python").any())
        if not stacks or name_matches(cpu["name"], _CHECKPOINT + "checkpoint$").any():
            return None
    is_barrier = is_recomputing | (is_op & name_matches(cpu["name"], ENGINE_NODE).to_numpy())
    nearest = (
        innermost_ancestor(parent_rows(trace), is_barrier)
        if is_recomputing.any()
        else np.full(cpu.height, -1)
    )
    inside_recompute = (nearest >= 0) & is_recomputing[np.maximum(nearest, 0)]
    launch = trace.gpu["launch"].fill_null(-1).to_numpy()
    is_recomputed = (launch >= 0) & inside_recompute[np.maximum(launch, 0)] & a.in_window
    is_recomputed &= ~a.kernels["communication"].to_numpy()
    used = a.steps.used
    starts, ends = used["ts"].to_numpy(), used["end"].to_numpy()
    ts = trace.gpu["ts"].to_numpy()[is_recomputed]
    end = ts + trace.gpu["dur"].to_numpy()[is_recomputed]
    busy = intersect(union(ts, end), a.spans)
    table = []
    for step, low, high in zip(used["index"], starts, ends, strict=True):
        overlap = np.minimum(end, high) - np.maximum(ts, low)
        table.append((step, int((overlap > 0).sum()), int(overlap[overlap > 0].sum())))
    return pl.DataFrame(
        [
            (*row, ns)
            for row, ns in zip(table, covered_length(starts, ends, busy).tolist(), strict=True)
        ],
        schema=RECOMPUTE_SCHEMA,
        orient="row",
    )


def _find_recomputing(a: Analysis) -> NDArray[np.bool_]:
    """Return which rows of ``trace.cpu`` recompute, with their children except autograd nodes."""
    cpu = a.trace.cpu
    is_recomputing: NDArray[np.bool_] = (cpu["kind"] == "python").to_numpy()
    is_recomputing = is_recomputing & name_matches(cpu["name"], RECOMPUTE).to_numpy()
    is_recomputing = is_recomputing | (
        is_operator(a.trace) & name_matches(cpu["name"], REENTRANT).to_numpy()
    )
    if not is_recomputing.any():
        is_recomputing[_find_unpacked(a)] = True
    return is_recomputing


def _find_unpacked(a: Analysis) -> NDArray[np.int64]:
    """Find operators directly inside a node of PyTorch's own derivatives (``AddmmBackward0``) that
    run there because the node requests a missing saved tensor, which ``use_reentrant=False`` then
    recomputes. A derivative does not call ``aten::linear`` or ``aten::layer_norm``. The node's own
    operators come last, as many as most nodes of its name have."""
    cpu = a.trace.cpu
    parent, names = parent_rows(a.trace), cpu["name"]
    is_node = is_operator(a.trace) & name_matches(names, _DERIVATIVE_NODE).to_numpy()
    child = np.flatnonzero(is_operator(a.trace) & (parent >= 0) & is_node[np.maximum(parent, 0)])
    if not len(child):
        return child
    is_forward = name_matches(names, _FORWARD_OPS).to_numpy()[child]
    order = np.lexsort((child, parent[child]))
    child, is_forward = child[order], is_forward[order]
    owners, first_child, count = np.unique(parent[child], return_index=True, return_counts=True)
    replays = np.add.reduceat(is_forward.astype(np.int64), first_child) > 0
    table = pl.DataFrame(
        {"name": names.gather(owners), "count": count, "replays": replays, "first": first_child}
    )
    usual_counts = (
        table.filter(~pl.col("replays")).group_by("name").agg(pl.col("count").median().alias("own"))
    )
    table = table.filter("replays").join(usual_counts, on="name", how="left", maintain_order="left")
    recomputed = [
        child[start : start + max(0, total - int(own or 0))]
        for start, total, own in table.select("first", "count", "own").iter_rows()
    ]  # one node per block
    return np.concatenate(recomputed) if recomputed else child[:0]


def recompute_time(a: Analysis) -> Intervals:
    """Find host time of recomputation, without the backward pass that runs inside it."""
    if a.trace.cpu.is_empty():
        return EMPTY
    cpu, parent = a.trace.cpu, parent_rows(a.trace)
    is_recomputing = _find_recomputing(a)
    rows = np.flatnonzero(is_recomputing)
    if not len(rows):
        return EMPTY
    ts = cpu["ts"].to_numpy()
    end = ts + cpu["dur"].to_numpy()
    is_backward = is_operator(a.trace) & name_matches(cpu["name"], ENGINE_NODE).to_numpy()
    recomputing_row = innermost_ancestor(parent, is_recomputing)
    nested = np.flatnonzero(is_backward & (recomputing_row >= 0))
    in_node = is_operator(a.trace)[rows] & (parent[rows] >= 0)
    starts, ends = ts[rows[~in_node]], end[rows[~in_node]]
    if in_node.any():
        # a node that recomputes does nothing else, including in Python, until its own operators
        recomputed = pl.DataFrame({"node": parent[rows[in_node]], "row": rows[in_node]})
        inside = pl.DataFrame({"node": parent, "child": np.arange(len(parent))})
        table = recomputed.group_by("node").agg(pl.col("row").max()).join(inside, on="node")
        next_child = pl.col("child").filter(pl.col("child") > pl.col("row")).min()
        table = table.group_by("node").agg(next_child)
        nodes, first_own = table["node"].to_numpy(), table["child"].fill_null(-1).to_numpy()
        starts = np.append(starts, ts[nodes])
        ends = np.append(ends, np.where(first_own >= 0, ts[first_own], end[nodes]))
    spans = union(starts, ends)
    return intersect(subtract(spans, union(ts[nested], end[nested])), a.steps.host_spans)


# -- a trace's allocator events as a history -------------------------------------------------------

_MAX_DEPTH = 512
"""Maximum number of innermost frames of a stack that are kept."""
_PYTHON_FRAME = re.compile(r"^(.{1,4096})\((\d{1,9})\): (.{1,1024})$")
_ENGINE_NODE = re.compile(r"^autograd::engine::evaluate_function: (.{1,1024})$")
_OPTIMIZER_RANGE = re.compile(r"^Optimizer\.(step|zero_grad)#")
OPTIMIZER, FUNCTIONAL = "torch/optim/optimizer_of_trace.py", "torch/nn/functional.py"
"""Placeholder files for names that a trace records without a file."""


def memory_devices(a: Analysis) -> list[int]:
    """List devices with allocator events, in order, without the host's memory (-1)."""
    devices = a.trace.memory.filter(pl.col("device") >= 0)["device"].unique().sort()
    return [int(device) for device in devices]


def find_running(
    a: Analysis, thread: NDArray[np.int32], ts: NDArray[np.int64]
) -> NDArray[np.int32]:
    """Return the innermost host row that is running on a thread at an instant, or -1."""
    cpu = a.trace.cpu
    result = np.full(len(ts), -1, dtype=np.int32)
    if cpu.is_empty():
        return result
    starts, ends = cpu["ts"].to_numpy(), (cpu["ts"] + cpu["dur"]).to_numpy()
    threads, parent = cpu["thread"].to_numpy(), cpu["parent"].fill_null(-1).to_numpy()
    for thread_id in np.unique(thread):  # a handful of threads
        first, last = np.searchsorted(threads, [thread_id, thread_id + 1])
        of_thread = np.flatnonzero(thread == thread_id)
        index = first + np.searchsorted(starts[first:last], ts[of_thread], side="right") - 1
        index = np.where(index >= first, index, -1)
        while (has_ended := (index >= 0) & (ends[np.maximum(index, 0)] < ts[of_thread])).any():
            index[has_ended] = parent[index[has_ended]]  # as many rounds as stacks are deep
        result[of_thread] = index
    return result


def recorded_snapshot(a: Analysis) -> MemorySnapshot | None:
    """Convert the allocator events of a trace (``profile_memory=True``, XPlane, Nsight Systems) to
    a history, or return ``None`` without events. Device -1 is the host's memory.

    Memory allocated before the recording is one block without a line, from the total in the first
    event. Segments are derived from increases of the allocator's reserved total. Stacks are taken
    from the host: Python frames, operators of the autograd engine and of optimizers."""
    events = a.trace.memory.filter((pl.col("bytes") != 0) & pl.col("allocated").is_not_null())
    if events.is_empty():
        return None
    events = events.sort("device", "ts", maintain_order=True)
    stacks = _StackTable(a)
    thread = events["thread"].fill_null(-1).to_numpy()
    rows = find_running(a, thread, events["ts"].to_numpy())
    events = events.with_columns(stack=pl.Series([stacks.index_of(row) for row in rows.tolist()]))
    parts = [_split_device(device) for _, device in events.group_by("device", maintain_order=True)]
    start_us = pl.col("ts").cast(pl.Int64) // 1000
    marks = a.steps.table if a.steps.source != "whole trace" else a.steps.table.clear()
    annotations = [
        marks.select(device=pl.lit(device), time_us=start_us, name=pl.lit("ProfilerStep#"),
                     stage=pl.lit("START"))
        for device in events["device"].unique().to_list()
    ]  # fmt: skip
    return MemorySnapshot(
        path=a.trace.meta.path,
        segments=_concat_parts(SEGMENT_SCHEMA, [part[0] for part in parts]),
        blocks=_concat_parts(BLOCK_SCHEMA, [part[1] for part in parts]),
        events=_concat_parts(EVENT_SCHEMA, [part[2] for part in parts]),
        annotations=_concat_parts(ANNOTATION_SCHEMA, annotations),
        stacks=tuple(stacks.stacks),
        source="trace",
    )


def _concat_parts(schema: dict[str, Any], parts: list[pl.DataFrame]) -> pl.DataFrame:
    """Concatenate parts of a table, with null for columns that a part lacks."""
    return pl.concat([pl.DataFrame(schema=schema), *(
        part.select(*(pl.col(name) if name in part.columns else pl.lit(None, kind).alias(name)
                      for name, kind in schema.items())).cast(pl.Schema(schema))
        for part in parts
    )])  # fmt: skip


def _split_device(events: pl.DataFrame) -> tuple[pl.DataFrame, pl.DataFrame, pl.DataFrame]:
    """Return segments, blocks and events of one device, in order of time."""
    device = pl.lit(events["device"][0], pl.Int32)
    is_freed = pl.col("bytes") < 0
    changes = events.with_row_index("place").select(
        "place", "address", "stack", device=device, time_us=pl.col("ts") // 1000,
        action=pl.when(is_freed).then(pl.lit("free_completed")).otherwise(pl.lit("alloc")),
        size=pl.col("bytes").abs(),
    )  # fmt: skip
    last_events = events.group_by("address", maintain_order=True).last().filter(~is_freed)
    blocks = last_events.select("address", "stack", size="bytes", requested="bytes")
    # a block that is only freed in the recording is in the history already
    first_frees = events.group_by("address", maintain_order=True).first().filter(is_freed)
    before = int((events["allocated"] - events["bytes"])[0] or 0) + int(first_frees["bytes"].sum())
    if before > 0:
        older_block = {"address": [-1], "stack": [None], "size": [before], "requested": [before]}
        blocks = pl.concat([blocks, pl.DataFrame(older_block, schema=blocks.schema)])
    blocks = blocks.with_columns(device=device, state=pl.lit("allocated"), segment=pl.lit(0))
    reserved = events["reserved"].set(events["reserved"] <= 0, None)
    segments = pl.DataFrame(schema=SEGMENT_SCHEMA)
    if reserved.null_count() == 0:
        segments = pl.DataFrame({"address": [0], "total": [reserved[-1]]}).with_columns(
            device=device, stream=pl.lit(0)
        )
        reserved_changes = changes.with_columns(more=reserved.diff().fill_null(0)).filter(
            pl.col("more") != 0
        )
        is_rise = pl.col("more") > 0
        reserved_changes = reserved_changes.select(
            "place", "stack", "device", "time_us", address=pl.lit(0, pl.Int64),
            action=pl.when(is_rise).then(pl.lit("segment_map")).otherwise(pl.lit("segment_unmap")),
            size=pl.col("more").abs(),
        ).select(changes.columns)  # fmt: skip
        changes = pl.concat([reserved_changes, changes]).sort(
            "place", maintain_order=True
        )  # first mapped, then used
    return segments, blocks, changes


class _StackTable:
    """Stacks of host rows, with each call path stored once."""

    def __init__(self, a: Analysis) -> None:
        cpu = a.trace.cpu
        self._parent = parent_rows(a.trace)
        self._names = cpu["name"]
        self._kind = cpu["kind"].cast(pl.String).to_numpy()
        self._recorded = cpu["sequence"].is_not_null().to_numpy()
        self._by_row: dict[int, int] = {-1: -1}
        self._by_path: dict[tuple[int, SnapshotFrame | None], int] = {}
        self.stacks: list[Stack] = []

    def index_of(self, row: int) -> int | None:
        """Return the index of a row's stack in ``made``, or ``None`` if it has no frame."""
        path = []
        while row not in self._by_row:  # outwards, up to a known row
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
            self._by_path[key] = len(self.stacks)
            self.stacks.append((frame, *(self.stacks[outer] if outer >= 0 else ()))[:_MAX_DEPTH])
        return self._by_path[key]

    def _frame(self, row: int) -> SnapshotFrame | None:
        """Return the frame that a snapshot has for a row, or ``None`` if it shows no purpose."""
        name = str(self._names[row])
        if self._kind[row] == "python":
            match = _PYTHON_FRAME.match(name)
            return SnapshotFrame(match[1], int(match[2]), match[3]) if match else None
        if node := _ENGINE_NODE.match(name):
            return SnapshotFrame("", 0, f"{node[1]}::apply")
        if optimizer := _OPTIMIZER_RANGE.match(name):
            return SnapshotFrame(OPTIMIZER, 1, optimizer[1])
        if self._recorded[row]:  # autograd keeps the operator for the backward pass
            return SnapshotFrame(FUNCTIONAL, 1, name)
        return SnapshotFrame("", 0, name) if self._kind[row] == "op" else None


class MemoryPeaks(NamedTuple):
    """Memory of the analysed GPU, bytes, or ``None`` if not measured."""

    reserved: int | None
    """Maximum that PyTorch's allocator reserved, including cached memory."""
    allocated: int | None
    """Maximum allocated in tensors."""
    capacity: int | None
    """Memory size of the GPU."""


def measure_peaks(a: Analysis) -> MemoryPeaks:
    """Return the largest values of any used step."""
    if a.device_id is None:
        return MemoryPeaks(None, None, None)
    rows = a.memory.filter(a.memory["device"] == a.device_id)

    def largest(name: str) -> int | None:
        return max((int(value) for value in rows[name].drop_nulls()), default=None)

    return MemoryPeaks(largest("peak_reserved"), largest("peak_allocated"), largest("capacity"))


def measure_held(a: Analysis) -> tuple[int | None, int | None]:
    """Return PyTorch's maximum reserved and the GPU's memory, bytes, from the trace or the
    record."""
    reserved, allocated, capacity = measure_peaks(a)
    reserved = allocated if reserved is None else reserved
    if reserved is None and a.run_steps is not None:
        for name in ("reserved", "peak"):
            values = a.run_steps.column(name)
            values = values[~np.isnan(values)]
            if reserved is None and len(values):
                reserved = int(values.max())
        capacity = capacity or gpu_capacity(a)
    return reserved, capacity


def gpu_capacity(a: Analysis) -> int | None:
    """Return the memory of the rank's GPU, bytes, or ``None`` if not recorded."""
    run_steps = a.run_steps
    if run_steps is None:
        return None
    device = next(iter(run_steps.rank_record.rank.devices), None)
    if device is not None and device.total_bytes:
        return device.total_bytes
    totals = run_steps.gpu("memory_total")
    return int(totals.max()) if len(totals) else None
