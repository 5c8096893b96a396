"""Device memory: peaks a step, calls that allocate or free it, and work done twice to save it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import polars as pl
from numpy.typing import NDArray

from advisor.core.intervals import covered_length, intersect, union
from advisor.measure.comm.comms import step_at
from advisor.measure.host.names import name_matches
from advisor.measure.host.stacks import around, climb_stack, nearest, operators, parents

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
    "host": pl.Int32,
    "call": pl.String,
    "ts": pl.Int64,
    "dur": pl.Int64,
    "step": pl.Int32,
    "line": pl.Int32,
    "op": pl.Int32,
}
"""Columns of ``Analysis.allocations``."""

RECOMPUTE_SCHEMA: dict[str, Any] = {
    "step": pl.Int32,
    "kernels": pl.Int64,
    "dur": pl.Int64,
    "busy": pl.Int64,
}
"""Columns of :func:`recompute`."""

_CHECKPOINT = r"torch/utils/checkpoint\.py\(\d+\): "
_RECOMPUTE = _CHECKPOINT + r"(\w+\.)*recompute_fn\b"
_REENTRANT = r"^CheckpointFunctionBackward$"
_BACKWARD = r"^autograd::engine::evaluate_function"


def memory_by_step(a: Analysis) -> pl.DataFrame:
    """See ``Analysis.memory``: a row a device with allocator events and used step.

    ``peak_allocated`` and ``peak_reserved``: largest ``Total Allocated`` and ``Total Reserved``
    of the caching allocator in force at some instant of the step, bytes: its events in the step,
    and the last one before it. Null: no event up to the end of the step. A reserved total of 0
    is an allocator that does not tell it, so null. ``capacity``: ``totalGlobalMem``; null: not in
    the file. Memory outside PyTorch's allocator (NCCL, cuBLAS, other processes) is not in it.
    """
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
    """See ``Analysis.allocations``: runtime calls of class malloc, free, host_alloc and host_free
    that touch ``spans``, in order of time.

    ``call`` is that class; ``step`` the used step in which the call starts (or that it reaches
    into); ``line`` the row of the user's Python frame and ``op`` of the innermost op around it,
    null where there is none.
    """
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
            "line": pl.Series(frame).set(pl.Series(frame < 0), None),
            "op": pl.Series(op).set(pl.Series(op < 0), None),
        },
        schema_overrides=ALLOCATIONS_SCHEMA,
    )


def _op_around(trace: Trace, rows: NDArray[np.int64]) -> NDArray[np.int64]:
    """Innermost op around each of a few host rows, -1: none."""
    parent = parents(trace)
    return climb_stack(parent, operators(trace), around(parent, rows))


def recompute(a: Analysis) -> pl.DataFrame | None:
    """Forward work that activation checkpointing runs a second time during backward.

    A row a used step: ``step``, ``kernels`` (launched by recomputation, not communication, that
    run in the step), ``dur`` (their summed device time inside the step, ns), ``busy`` (ns during
    which at least one of them runs). Work counts when the innermost of these around its launch is
    one of the first two: a Python frame ``torch/utils/checkpoint.py(…): recompute_fn``
    (``use_reentrant=False``), the op ``CheckpointFunctionBackward`` (``use_reentrant=True``), an
    autograd node (the reentrant form runs backward inside its own node).

    ``None``: unknown. Without Python frames only the reentrant form leaves a trace; with
    frames, a call of ``checkpoint`` that is seen with neither of the two was recorded on the
    forward thread only. Recomputation that a compiler planned is inside its kernels: not seen.
    """
    trace = a.trace
    cpu = trace.cpu
    if cpu.is_empty() or a.device_id is None:
        return None
    again = (cpu["kind"] == "python").to_numpy() & name_matches(cpu["name"], _RECOMPUTE).to_numpy()
    op = (cpu["kind"] == "op").to_numpy()
    again |= op & name_matches(cpu["name"], _REENTRANT).to_numpy()
    if not again.any():
        stacks = bool((cpu["kind"] == "python").any())
        if not stacks or name_matches(cpu["name"], _CHECKPOINT + "checkpoint$").any():
            return None
    barrier = again | (op & name_matches(cpu["name"], _BACKWARD).to_numpy())
    around = nearest(parents(trace), barrier) if again.any() else np.full(cpu.height, -1)
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
