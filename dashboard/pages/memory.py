"""Memory: allocated and reserved bytes over time, the allocations live at the peak."""

from __future__ import annotations

from functools import partial
from typing import Any

import polars as pl

from advisor.advise.terms import foreign
from advisor.core import text as t
from advisor.dashboard import current, figures, snapshot, theme
from advisor.dashboard.current import PageView
from advisor.dashboard.parts import (
    card,
    el,
    empty,
    figure,
    head,
    page,
    rank_choice,
    remark,
    share_bar,
    table,
    tiles,
)
from advisor.dashboard.session import LoadedRun
from advisor.measure import Analysis
from advisor.measure.memory.peak import Peak, memory_curve, memory_devices, memory_peak

MAX_OWNERS = 25
ALLOCATED, RESERVED = theme.CLASSES["compute"], "#9a9aa5"


def has_content(view: PageView) -> bool:
    """Whether memory was recorded."""
    if view.entry.loaded is None:
        return False
    a = view.analysis
    return _is_recorded(a) or a.record is not None or not a.allocations.is_empty()


def layout(**query: object) -> Any:
    """The page."""
    view = current.view(**query)
    a = view.analysis
    devices = memory_devices(a)
    known = _is_recorded(a)
    ours = not foreign(a.trace.meta)
    whose = "PyTorch's allocator counts" if ours else "the allocators of the program count"
    lead = f"GPU memory as {whose} it." if known else ""
    title = head("Memory", lead, rank_choice(view, "/memory"))
    ooms = _out_of_memory(a)
    parts: list[Any] = snapshot.sections(view)
    for device in devices:
        parts += _device(view, device, named=len(devices) > 1)
    recorded = _recorded(a)
    if not known:
        parts.append(
            empty(
                "No device memory",
                "The trace has no allocator events, so memory over time is not measured.",
                "Record on a GPU with profile_memory=True, or use advisor record, which samples "
                "memory after each step."
                if ours
                else "",
            )
        )
    return page(title, ooms, *parts, recorded, _calls(a))


def _is_recorded(a: Analysis) -> bool:
    """Whether the trace, the recorder or a snapshot has device memory, or memory events."""
    steps = [] if a.recorded is None else a.recorded.steps
    noted = any(step.allocated is not None for step in steps)
    return noted or a.snapshot is not None or bool(memory_devices(a))


def warm(loaded: LoadedRun) -> None:
    """Make the curves and peaks of the reported rank."""
    a = loaded.main
    snapshot.warm(loaded)
    for device in memory_devices(a):
        loaded.view(("memory_curve", None, device), partial(memory_curve, a, device))
        loaded.view(("memory_peak", None, device), partial(memory_peak, a, device))


def _device(view: PageView, device: int, *, named: bool) -> list[Any]:
    a = view.analysis
    curve = view.loaded.view(("memory_curve", view.rank, device), lambda: memory_curve(a, device))
    peak = view.loaded.view(("memory_peak", view.rank, device), lambda: memory_peak(a, device))
    name = f"GPU {device}" if named else "Allocator"
    parts = [_figures(a, device, peak)] if peak is not None else []
    parts.append(
        card(
            f"{name} over time",
            figure(
                _curve(a, curve, peak),
                f"memory-gpu{device}",
                height=280,
                description="Allocated and reserved bytes over the recording.",
            ),
            aside="ticks mark the steps",
        )
    )
    if peak is not None:
        parts.append(_held(peak))
    return parts


def _figures(a: Analysis, device: int, peak: Peak) -> Any:
    """The peak, the reserved bytes then, and the unused part of them."""
    by_step = a.memory.filter(pl.col("device") == device)
    capacity = by_step["capacity"].max() if not by_step.is_empty() else None
    cached = None if peak.reserved is None else peak.reserved - peak.allocated
    total = f"of {t.format_bytes(capacity)}" if isinstance(capacity, int) else ""
    share = None if not cached or not peak.reserved else cached / peak.reserved
    return tiles(
        [
            (
                "Peak allocated",
                t.format_bytes(peak.allocated),
                f"{t.format_duration(peak.ts)} into the trace",
            ),
            (
                "Reserved at the peak",
                t.format_bytes(peak.reserved),
                total if peak.reserved is not None else "",
            ),
            (
                "Reserved, unused",
                t.format_bytes(cached),
                f"{t.format_share(share)}: cache and fragmentation" if share is not None else "",
            ),
            (
                "Allocated earlier",
                t.format_bytes(peak.before),
                "part of the peak, from before the recording",
            ),
        ]
    )


def _curve(a: Analysis, curve: pl.DataFrame, peak: Peak | None) -> Any:
    x = (curve["ts"] / 1e6).to_list()
    gib = 1 << 30
    largest = max([1, *curve["allocated"].drop_nulls().to_list()])
    scale, unit = (gib, "GiB") if largest >= gib else (1 << 20, "MiB")
    series = [("allocated", x, (curve["allocated"] / scale).to_list(), ALLOCATED)]
    if not curve["reserved"].is_null().all():
        series.append(("reserved", x, (curve["reserved"] / scale).to_list(), RESERVED))
    made = figures.lines(series, x="ms into the trace", y=unit, height=280, step=True)
    for row in a.steps.table.iter_rows(named=True) if a.steps.source != "whole trace" else ():
        made.add_shape(
            type="line",
            xref="x",
            yref="paper",
            x0=row["ts"] / 1e6,
            x1=row["ts"] / 1e6,
            y0=0,
            y1=0.03,
            line={"color": "#9a9aa5", "width": 1},
        )
    if peak is not None:
        made.add_annotation(
            x=peak.ts / 1e6,
            y=peak.allocated / scale,
            text=f"peak {t.format_bytes(peak.allocated)}",
            showarrow=True,
            arrowhead=0,
            arrowcolor="#9a9aa5",
            ax=0,
            ay=-26,
            font={"size": 12},
        )
    return made


def _held(peak: Peak) -> Any:
    if peak.held.is_empty():
        return empty(
            "The contents of the peak are unknown",
            f"All {t.format_bytes(peak.allocated)} were allocated before the recording began.",
        )
    largest = max(peak.held["bytes"].to_list())
    rows = []
    for row in peak.held.head(MAX_OWNERS).iter_rows(named=True):
        where = "" if row["file"] is None else f"{t.shorten_path(row['file'], 60)}:{row['line']}"
        rows.append(
            [
                el("Code", t.clean(row["op"])) if row["op"] is not None else "no operator",
                el("Code", where) if where else "",
                el("Div", share_bar(row["bytes"] / largest, ALLOCATED), cls="bar-cell"),
                t.format_bytes(row["bytes"]),
                t.format_share(row["bytes"] / max(peak.allocated, 1)),
                t.format_count(row["blocks"]),
            ]
        )
    more = peak.held.height - len(rows)
    notes = []
    if peak.before:
        notes.append(
            f"Another {t.format_bytes(peak.before)} was allocated before the recording, for "
            "example "
            "parameters and optimizer state."
        )
    if more:
        notes.append(f"{t.format_count(more)} smaller rows are not listed.")
    return card(
        "Live at the peak",
        table(
            ["Operator", "Line", "", "Bytes", "Of the peak", "Blocks"],
            rows,
            numbers=(3, 4, 5),
            names=(0, 1),
            caption="By the outermost operator at the time of allocation",
        ),
        remark(" ".join(notes)),
    )


def _recorded(a: Analysis) -> Any:
    """Memory at the end of each recorded step."""
    if a.recorded is None or not a.recorded.steps:
        return None
    steps = a.recorded
    numbers = [float(step.n) for step in steps.steps]
    series = []
    for field, name, colour in (
        ("allocated", "allocated", ALLOCATED),
        ("reserved", "reserved", RESERVED),
        ("peak", "peak so far", theme.CLASSES["communication"]),
    ):
        values = [getattr(step, field) for step in steps.steps]
        if any(value is not None for value in values):
            shown = [None if value is None else value / (1 << 30) for value in values]
            series.append((name, *figures.downsample(numbers, shown), colour))
    rss = [(float(s.n), s.rss) for s in steps.steps if s.rss is not None]
    made = []
    if series:
        made.append(
            figure(
                figures.lines(series, x="step", y="GiB", height=230, step=True),
                "memory-by-step",
                height=230,
                description="Device memory at the end of each recorded step.",
            )
        )
    if rss:
        host = (
            "resident memory of the process",
            [n for n, _ in rss],
            [value / (1 << 30) for _, value in rss],
            theme.CLASSES["copies"],
        )
        made.append(
            figure(
                figures.lines([host], x="step", y="host, GiB", height=170),
                "host-memory-by-step",
                height=170,
                description="Resident memory of the process over the recorded steps.",
            )
        )
    name = "Over the run" if series else "Host memory over the run"
    return card(name, *made, aside="recorded at the end of each step") if made else None


def _out_of_memory(a: Analysis) -> Any:
    """The last recorded out-of-memory event."""
    events = [] if a.record is None else a.record.of_kind("oom")
    if not events:
        return None
    last = events[-1]
    rows = [
        ("allocated", t.format_bytes(_number(last.get("allocated")))),
        ("reserved", t.format_bytes(_number(last.get("reserved")))),
    ]
    snapshot = last.get("snapshot")
    if snapshot:
        rows.append(("snapshot", t.clean(snapshot)))
    return card(
        "Out of memory",
        el("P", t.clean(last.get("message", "")), cls="mono"),
        table(["At the failure", ""], rows, numbers=()),
        aside=f"{t.format_count(len(events))}×",
        cls="alarm",
    )


def _number(value: object) -> float | None:
    return float(value) if isinstance(value, int | float) else None


def _calls(a: Analysis) -> Any:
    """Runtime calls that allocate or free memory during the steps: each is slow, and most wait."""
    calls = a.allocations
    if calls.is_empty():
        return None
    sums = (
        calls.group_by("call")
        .agg(pl.len().alias("count"), pl.col("dur").sum(), pl.col("dur").max().alias("worst"))
        .sort("dur", descending=True)
    )
    labels = {
        "malloc": "allocate device memory",
        "free": "free device memory",
        "host_alloc": "pin host memory",
        "host_free": "unpin host memory",
    }
    rows = [
        [
            labels.get(call, call),
            t.format_count(count),
            t.format_duration(dur / a.step_count),
            t.format_duration(worst),
        ]
        for call, count, dur, worst in sums.iter_rows()
    ]
    return card(
        "Allocation calls to the driver",
        table(["What", "Calls", "Time per step", "Longest"], rows, numbers=(1, 2, 3)),
        aside="in the analysed steps; a warm caching allocator makes none",
    )
