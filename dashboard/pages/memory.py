"""Memory: its holders over time and at the peak, by snapshot or by trace; the recorded steps."""

from bisect import bisect_right
from typing import Any

import polars as pl

from advisor.core import text as t
from advisor.core.labels import clean
from advisor.dashboard import memory_cards, page_view, plotly_figures, theme
from advisor.dashboard.components import (
    card,
    element,
    empty_state,
    figure,
    head,
    page,
    rank_choice,
    table,
    tiles,
)
from advisor.dashboard.page_view import PageView
from advisor.measure import Analysis
from advisor.measure.memory.trace_memory import memory_devices

warm = memory_cards.warm
ALLOCATED, RESERVED = theme.CLASSES["compute"], "#9a9aa5"


def has_content(view: PageView) -> bool:
    if view.entry.loaded is None:
        return False
    a = view.analysis
    return _is_recorded(a) or a.record is not None or not a.allocations.is_empty()


def layout(**query: object) -> Any:
    view = page_view.view(**query)
    a = view.analysis
    known = _is_recorded(a)
    ours = a.trace.meta.is_pytorch
    whose = "PyTorch's allocator counts" if ours else "the allocators of the program count"
    lead = f"GPU memory as {whose} it." if known else ""
    title = head("Memory", lead, rank_choice(view, "/memory"))
    ooms = _out_of_memory(a)
    parts = memory_cards.draw_cards(view)
    recorded = _recorded(a)
    if not known and not parts:
        parts.append(
            empty_state(
                "No device memory",
                "The trace has no allocator events, so memory over time is not measured.",
                _how_to_record(a) if ours else "",
            )
        )
    return page(title, ooms, _figures(view), *parts, recorded, _calls(a))


def _figures(view: PageView) -> Any:
    """Build the largest amounts that were recorded, and of what they are a part."""
    report, a = view.loaded.report, view.analysis
    if view.rank is not None or a.recorded is None or not a.recorded.steps:
        return None
    steps, capacity = a.recorded.steps, report.memory_capacity_bytes
    largest = {
        field: max((value for s in steps if (value := getattr(s, field)) is not None), default=None)
        for field in ("reserved", "peak", "rss")
    }
    of = "" if capacity is None else f"of {t.format_bytes(capacity)}"
    result = [
        ("Peak reserved", largest["reserved"], f"from the driver{f', {of}' if of else ''}"),
        ("Peak in tensors", largest["peak"], "the rest of what is reserved is cached or unusable"),
        ("Host memory", largest["rss"], "resident, of the process"),
    ]
    known = [(name, t.format_bytes(value), note) for name, value, note in result if value]
    return tiles(known) if known else None


def _how_to_record(a: Analysis) -> str:
    if a.recorded is not None:
        return "The run used no GPU."
    return (
        "Record on a GPU with profile_memory=True, or use advisor record, which samples memory "
        "after each step."
    )


def _is_recorded(a: Analysis) -> bool:
    """Return whether the trace, the recorder or a snapshot has device memory, or memory events."""
    steps = [] if a.recorded is None else a.recorded.steps
    noted = any(step.allocated is not None for step in steps)
    return noted or a.snapshot is not None or bool(memory_devices(a))


def _recorded(a: Analysis) -> Any:
    """Draw memory at the end of the recorded steps. The recorder samples it, so most have none."""
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
        known = [
            (n, value / (1 << 30))
            for n, step in zip(numbers, steps.steps, strict=True)
            if (value := getattr(step, field)) is not None
        ]
        if known:
            at, shown = [n for n, _ in known], [value for _, value in known]
            series.append((name, *plotly_figures.downsample(at, shown), colour))
    rss = [(float(s.n), s.rss) for s in steps.steps if s.rss is not None]
    made, ends = [], (numbers[0], numbers[-1])
    if series:
        made.append(
            figure(
                plotly_figures.line_chart(
                    series, x="step", y="GiB", height=230, step=True, ends=ends
                ),
                "memory-by-step",
                height=230,
                description="Device memory at the end of recorded steps.",
            )
        )
    if rss:
        times = [step.t for step in steps.steps]
        children = [
            (numbers[max(0, bisect_right(times, when) - 1)], host.children_rss)
            for when, host in steps.hosts
            if host.children_rss is not None
        ]
        hosts = [
            (label, [n for n, _ in rows], [value / (1 << 30) for _, value in rows], colour)
            for label, rows, colour in (
                ("the process", rss, theme.CLASSES["copies"]),
                ("its child processes", children, ALLOCATED),
            )
            if rows
        ]
        made.append(
            figure(
                plotly_figures.line_chart(hosts, x="step", y="host, GiB", height=170, ends=ends),
                "host-memory-by-step",
                height=170,
                description="Resident memory over the recorded steps: of the process and of its "
                "children, such as workers of a DataLoader.",
            )
        )
    name = "Over the run" if series else "Host memory over the run"
    return card(name, *made, aside="sampled at the end of steps") if made else None


def _out_of_memory(a: Analysis) -> Any:
    """Show the last recorded out-of-memory event."""
    events = [] if a.record is None else a.record.events_of("oom")
    if not events:
        return None
    last = events[-1]
    rows = [
        ("allocated", t.format_bytes(_number(last.get("allocated")))),
        ("reserved", t.format_bytes(_number(last.get("reserved")))),
    ]
    snapshot = last.get("snapshot")
    if snapshot:
        rows.append(("snapshot", clean(snapshot)))
    return card(
        "Out of memory",
        element("P", clean(last.get("message", "")), cls="mono"),
        table(["At the failure", ""], rows, numbers=()),
        aside=f"{t.format_count(len(events))}×",
        cls="alarm",
    )


def _number(value: object) -> float | None:
    return float(value) if isinstance(value, int | float) else None


def _calls(a: Analysis) -> Any:
    """Show runtime calls that allocate or free memory in the steps: slow, and most of them wait."""
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
