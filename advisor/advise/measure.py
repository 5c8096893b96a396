"""The parts of a Report that are measurements: inputs, scope, time, host, kernels, memory."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import polars as pl

from advisor.advise.holes import holes
from advisor.advise.longer import steps_apart
from advisor.advise.memory import snapshot_scope
from advisor.advise.recorded import recorded_view
from advisor.core.report import (
    Family,
    HostShare,
    IdleCause,
    Input,
    OperatorTime,
    Scope,
    TimeShare,
)
from advisor.measure.device.rooflines import attained, rooflines
from advisor.measure.host.optree import op_table, range_table

if TYPE_CHECKING:
    from advisor.core.trace import Run
    from advisor.measure import Analysis

MAX_OPERATORS = 10


def inputs(run: Run, analyses: dict[int, Analysis]) -> list[Input]:
    """One entry a rank: the window that is analysed."""
    found = []
    for number, a in analyses.items():
        meta = a.trace.meta
        found.append(
            Input(
                path=meta.path,
                rank=None if number < 0 else number,
                window=meta.window,
                windows=sum(1 for r, _ in (*run.traces, *run.unread) if r == number),
                events_read=meta.events_read,
                events_dropped=meta.events_dropped,
                bytes_read=meta.bytes_read,
                truncated=meta.truncated,
                damage=meta.damage,
                format=meta.format,
                record_shapes=meta.record_shapes,
                with_stack=meta.with_stack,
                profile_memory=meta.profile_memory,
            )
        )
    return found


def measure(a: Analysis) -> dict[str, Any]:
    """The measured fields of a Report."""
    if a.snapshot_only:
        return {"scope": snapshot_scope(a)}
    if a.record_only:
        return {"scope": _recorded_scope(a), "host": _phases(a)}
    fields: dict[str, Any] = {"scope": _scope(a), "host": _host(a), "uneven": steps_apart(a)}
    if a.device_id is not None:
        per_step = a.step_count
        totals = a.breakdown.totals()
        span = max(a.span_ns, 1)
        communication = a.breakdown.all_communication.total
        fields |= {
            "time": [TimeShare(n, ns / per_step, ns / span) for n, ns in totals.items()],
            "busy_share": a.breakdown.busy.total / span,
            "communication_ns": communication / per_step if communication else None,
            "communication_overlap": a.breakdown.communication_overlap,
            "families": _families(a),
            "rooflines": rooflines(a),
            "attainable": attained(a),
            "mfu": a.mfu,
            **_idle(a, totals["idle"]),
        }
    else:
        fields["operators"] = _operators(a)
    if not (a.trace.cpu["kind"] == "op").any():
        fields["ranges"] = _ranges(a)
    memory = a.memory
    if not memory.is_empty():
        peak, capacity = memory["peak_reserved"].max(), memory["capacity"].max()
        fields["memory_peak_bytes"] = peak
        fields["memory_capacity_bytes"] = capacity
    return fields


def _scope(a: Analysis) -> Scope:
    table, used = a.steps.table, a.steps.used
    return Scope(
        rank=a.trace.meta.rank,
        step_source=a.steps.source,
        steps_found=table.height,
        steps_used=used.height,
        outliers=table.filter("outlier")["name"].to_list(),
        span_ns=a.span_ns,
        step_ns=a.step_ns,
        step_min_ns=_whole(used["dur"].min()),
        step_max_ns=_whole(used["dur"].max()),
        step_median_ns=float(used["dur"].median() or 0),  # type: ignore[arg-type]
        device=a.device_id,
        device_name=a.device.name if a.device else None,
        device_known=a.hardware is not None,
        devices_seen=a.trace.gpu["device"].n_unique(),
        framework=a.trace.meta.framework,
    )


def _recorded_scope(a: Analysis) -> Scope:
    """Of a run without a profiled window: the recorder's own steps."""
    recorded = a.recorded
    assert recorded is not None
    dur = recorded.dur[recorded.used]
    device = next(iter(recorded.record.rank.devices), None)
    return Scope(
        rank=a.trace.meta.rank,
        step_source="record",
        steps_found=len(recorded.steps),
        steps_used=recorded.count,
        outliers=[],
        span_ns=int(dur.sum()),
        step_ns=a.step_ns,
        step_min_ns=int(dur.min()) if len(dur) else 0,
        step_max_ns=int(dur.max()) if len(dur) else 0,
        step_median_ns=recorded.median or 0.0,
        device=None if device is None else device.index,
        device_name=None if device is None else device.name,
        device_known=False,
        devices_seen=0,
        framework=a.trace.meta.framework,
    )


def _phases(a: Analysis) -> list[HostShare]:
    view = recorded_view(a)
    return [] if view is None else [HostShare(p.name, p.ns, p.share) for p in view.phases]


def _whole(value: Any) -> int:
    return int(value) if value is not None else 0


def _host(a: Analysis) -> list[HostShare]:
    main = a.trace.main_thread
    if main is None:
        return []
    table = a.host.filter(pl.col("thread") == main).sort("ns", descending=True)
    return [
        HostShare(name, ns / a.step_count, ns / max(a.span_ns, 1))
        for name, ns in zip(table["class"].to_list(), table["ns"].to_list(), strict=True)
        if ns
    ]


def _operators(a: Analysis) -> list[OperatorTime]:
    table = op_table(a).filter(pl.col("host") > 0).sort("host", descending=True)
    whole = max(int(table["host"].sum()), 1)
    rows = table.select("name", "host", "count").head(MAX_OPERATORS).iter_rows()
    return [
        OperatorTime(name, ns / a.step_count, ns / whole, count / a.step_count)
        for name, ns, count in rows
    ]


def _ranges(a: Analysis) -> list[OperatorTime]:
    rows = range_table(a).head(MAX_OPERATORS).iter_rows()
    whole = max(a.span_ns, 1)
    return [
        OperatorTime(name, ns / a.step_count, ns / whole, count / a.step_count)
        for name, ns, count in rows
    ]


def _families(a: Analysis) -> list[Family]:
    """Shares are of all device work that is listed, so that they add up to 1."""
    table = a.families.sort("dur", descending=True)
    whole = int(table["dur"].sum())
    rows = table.select("family", "dur", "count").iter_rows() if whole else ()
    return [
        Family(name, dur / a.step_count, dur / whole, count / a.step_count)
        for name, dur, count in rows
    ]


def _idle(a: Analysis, idle: int) -> dict[str, Any]:
    if holes(a):
        return {"idle": [], "unknown_idle_share": None}
    table = a.gaps.group_by("cause").agg(pl.col("dur").sum()).sort("dur", descending=True)
    rows = list(zip(table["cause"].cast(pl.String), table["dur"], strict=True))
    unknown = sum(ns for cause, ns in rows if cause == "unknown")
    span = max(a.span_ns, 1)
    return {
        "idle": [IdleCause(cause, ns / a.step_count, ns / span) for cause, ns in rows if ns],
        "unknown_idle_share": unknown / idle if idle else None,
    }
