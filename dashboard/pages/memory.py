"""Memory: allocations over time and at the peak, and memory by recorded step."""

from bisect import bisect_right
from typing import Any, Final

import polars as pl

from advisor.core import text as t
from advisor.core.labels import clean
from advisor.dashboard import components as ui
from advisor.dashboard import memory_cards, page_view, plotly_figures, theme
from advisor.dashboard.page_view import PageView
from advisor.measure import Analysis
from advisor.measure.memory.trace_memory import memory_devices

precompute = memory_cards.precompute
ALLOCATED_COLOR, RESERVED_COLOR = theme.CLASS_COLORS["compute"], "#9a9aa5"


def has_content(view: PageView) -> bool:
    """Return whether memory was recorded: of the GPU, of the host, or allocation calls."""
    if view.entry.loaded is None:
        return False
    a = view.analysis
    has_samples = a.run_steps is not None and any(
        step.rss is not None for step in a.run_steps.steps
    )
    return _has_device_memory(a) or has_samples or not a.allocations.is_empty()


def layout(**query: object) -> Any:
    """Build the page."""
    view = page_view.view(**query)
    a = view.analysis
    has_memory = _has_device_memory(a)
    is_pytorch = a.trace.meta.is_pytorch
    source = "PyTorch's allocator counts" if is_pytorch else "the program's allocators count"
    lead = f"GPU memory as {source} it." if has_memory else ""
    heading = ui.page_heading("Memory", lead, ui.rank_selector(view, "/memory"))
    out_of_memory = _out_of_memory_card(a)
    device_cards = memory_cards.draw_cards(view)
    by_step = _memory_by_step_card(a)
    if not has_memory and not device_cards and by_step is None:
        device_cards.append(
            ui.empty_state(
                "No device memory",
                "The trace has no allocator events, so memory over time is not measured.",
                _RECORDING_ADVICE if is_pytorch else "",
            )
        )
    return ui.page(
        heading, out_of_memory, _peak_tiles(view), *device_cards, by_step, _allocation_call_card(a)
    )


def _peak_tiles(view: PageView) -> Any:
    """Build the tiles of peak memory, each with the total that it is part of."""
    report, a = view.loaded.report, view.analysis
    if view.rank is not None or a.run_steps is None or not a.run_steps.steps:
        return None
    steps, capacity = a.run_steps.steps, report.memory_capacity_bytes
    largest = {
        field: max(
            (value for step in steps if (value := getattr(step, field)) is not None), default=None
        )
        for field in ("reserved", "peak", "rss")
    }
    of_capacity = "" if capacity is None else f"of {t.format_bytes(capacity)}"
    figures = [
        (
            "Peak reserved",
            largest["reserved"],
            f"from the driver{f', {of_capacity}' if of_capacity else ''}",
        ),
        (
            "Peak in tensors",
            largest["peak"],
            "the rest of the reserved memory is cached or unusable",
        ),
        ("Host memory", largest["rss"], "resident memory of the process"),
    ]
    known = [(name, t.format_bytes(value), note) for name, value, note in figures if value]
    return ui.tiles(known) if known else None


_RECORDING_ADVICE: Final = (
    "Record on a GPU with profile_memory=True, or use advisor record, which samples memory "
    "after each step."
)


def _has_device_memory(a: Analysis) -> bool:
    """Return whether device memory was recorded, by the trace, the recorder or a snapshot."""
    steps = [] if a.run_steps is None else a.run_steps.steps
    has_samples = any(step.allocated is not None for step in steps)
    return has_samples or a.snapshot is not None or bool(memory_devices(a))


def _memory_by_step_card(a: Analysis) -> Any:
    """Build the card of memory at the end of recorded steps. Only sampled steps have a value."""
    if a.run_steps is None or not a.run_steps.steps:
        return None
    run_steps = a.run_steps
    step_numbers = [float(step.n) for step in run_steps.steps]
    series = []
    for field, name, color in (
        ("allocated", "allocated", ALLOCATED_COLOR),
        ("reserved", "reserved", RESERVED_COLOR),
        ("peak", "peak so far", theme.CLASS_COLORS["communication"]),
    ):
        values = [
            (n, value / (1 << 30))
            for n, step in zip(step_numbers, run_steps.steps, strict=True)
            if (value := getattr(step, field)) is not None
        ]
        if values:
            positions, sizes = [n for n, _ in values], [value for _, value in values]
            series.append((name, *plotly_figures.downsample(positions, sizes), color))
    host_memory = [(float(step.n), step.rss) for step in run_steps.steps if step.rss is not None]
    figures, x_range = [], (step_numbers[0], step_numbers[-1])
    if series:
        figures.append(
            ui.figure(
                plotly_figures.line_chart(
                    series, x_title="step", y_title="GiB", height=230, is_step=True, x_range=x_range
                ),
                "memory-by-step",
                height=230,
                description="Device memory at the end of recorded steps.",
            )
        )
    if host_memory:
        times = [step.t for step in run_steps.steps]
        children = [
            (step_numbers[max(0, bisect_right(times, when) - 1)], host.children_rss)
            for when, host in run_steps.hosts
            if host.children_rss is not None
        ]
        host_series = [
            (label, [n for n, _ in rows], [value / (1 << 30) for _, value in rows], color)
            for label, rows, color in (
                ("the process", host_memory, theme.CLASS_COLORS["copies"]),
                ("its child processes", children, ALLOCATED_COLOR),
            )
            if rows
        ]
        figures.append(
            ui.figure(
                plotly_figures.line_chart(
                    host_series, x_title="step", y_title="host, GiB", height=170, x_range=x_range
                ),
                "host-memory-by-step",
                height=170,
                description="Resident memory over the recorded steps: of the process and of its "
                "children, such as workers of a DataLoader.",
            )
        )
    name = "Over the run" if series else "Host memory over the run"
    return ui.card(name, *figures, aside="sampled at the end of steps") if figures else None


def _out_of_memory_card(a: Analysis) -> Any:
    """Build the card of the last recorded out-of-memory event."""
    events = [] if a.rank_record is None else a.rank_record.events_of("oom")
    if not events:
        return None
    last = events[-1]
    rows = [
        ("allocated", t.format_bytes(_to_float(last.get("allocated")))),
        ("reserved", t.format_bytes(_to_float(last.get("reserved")))),
    ]
    snapshot = last.get("snapshot")
    if snapshot:
        rows.append(("snapshot", clean(snapshot)))
    return ui.card(
        "Out of memory",
        ui.element("P", clean(last.get("message", "")), cls="mono"),
        ui.table(["At the failure", ""], rows, number_columns=()),
        aside=f"{t.format_count(len(events))}×",
        cls="alarm",
    )


def _to_float(value: object) -> float | None:
    """Return a number, or ``None`` for any other value."""
    return float(value) if isinstance(value, int | float) else None


def _allocation_call_card(a: Analysis) -> Any:
    """Build the card of runtime calls in the steps that allocate or free memory."""
    calls = a.allocations
    if calls.is_empty():
        return None
    sums = (
        calls.group_by("call")
        .agg(pl.len().alias("count"), pl.col("dur").sum(), pl.col("dur").max().alias("worst"))
        .sort("dur", descending=True)
    )
    call_labels = {
        "malloc": "allocate device memory",
        "free": "free device memory",
        "host_alloc": "pin host memory",
        "host_free": "unpin host memory",
    }
    rows = [
        [
            call_labels.get(call, call),
            t.format_count(count),
            t.format_duration(dur / a.step_count),
            t.format_duration(worst),
        ]
        for call, count, dur, worst in sums.iter_rows()
    ]
    return ui.card(
        "Allocation calls to the driver",
        ui.table(["What", "Calls", "Time per step", "Longest"], rows, number_columns=(1, 2, 3)),
        aside="in the analysed steps; a warmed-up caching allocator makes none",
    )
