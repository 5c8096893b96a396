"""What hardware counters and Triton's cache show, a row per kernel."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Final

from advisor.core import labels
from advisor.core import text as t
from advisor.measure.device.kernel_profiles import label_kernels
from advisor.render.document import Block, Code, Grid, Items, Paragraph, Section

if TYPE_CHECKING:
    from advisor.core.report import KernelCounters, Report, TritonKernel

MAX_ROWS: Final = 50
MAX_SHORT: Final = 10
MAX_ADVICE: Final = 12
MAX_LINES: Final = 3
"""Of a kernel."""
MIN_SHARE: Final = 0.05
"""Of its samples."""


def sections(report: Report) -> list[Section]:
    """The tables, else what to run for the counters."""
    return tables(report) + _command(report)


def tables(report: Report) -> list[Section]:
    """The kernels with their limits, what the profiler's own rules say of them, and what Triton
    compiled."""
    views = report.kernel_counters
    if not views:
        return _triton(report)
    traced = any(view.step_ns is not None for view in views)
    absent = sum(view.step_ns is None for view in views)
    views = [view for view in views if view.step_ns is not None] if traced else views
    short = label_kernels(view.short for view in report.kernel_counters)
    several = any(view.profiled > 1 for view in views)
    rows = [_row(view, short[view.short], traced, several) for view in views[:MAX_ROWS]]
    head = [name for name in rows[0] if any(row[name] for row in rows)]
    cells = [[row[name] or t.NOT_MEASURED for name in head] for row in rows]
    last = (len(head) - 1,) if head[-1] == "occupancy" else ()
    grid = _grid(head, cells, "l" + "r" * (len(head) - 1), optional=last)
    aside = _absence(report, absent, len(report.kernel_counters))
    aside = aside if aside or traced else "per launch"
    counted = any(view.use or view.occupancy is not None or view.dram_bytes for view in views)
    title = "Kernels with hardware counters" if counted else "Profiled kernels"
    blocks = [Section(title, [grid], aside)]
    sampled = [
        [
            f"{t.shorten_path(each.file, 28)}:{each.line}",
            t.format_share(each.share),
            "issuing" if each.stall == "selected" else each.stall,
            short[view.short],
        ]
        for view in views[:MAX_SHORT]
        for each in view.lines[:MAX_LINES]
        if each.share >= MIN_SHARE
    ]
    if sampled:
        grid = Grid(["line", "samples", "most wait for", "kernel"], sampled, align="lrll")
        blocks.append(Section("Where warps were sampled", [grid], "share of the kernel's samples"))
    advice = [f"{short[view.short]}: {text}" for view in views for text in view.advice]
    if advice:
        count = t.count_noun(len(advice), "note") + " of the profiler"
        items = Items(advice[:MAX_ADVICE])
        blocks.append(
            Section("The kernel profiler's own advice", [items], folded=True, counted=count)
        )
    return [*blocks, *_triton(report)]


def _triton(report: Report) -> list[Section]:
    """The kernels of Triton's cache; beside a trace those that it has, and their functions."""
    views = report.triton_kernels
    if not views:
        return []
    timed = [view for view in views if view.step_ns is not None]
    shown = timed or views
    targets = sorted({view.target for view in shown if view.target})
    head = ["kernel", "spills", "registers", "shared", "warps", "stages"]
    head[1:1] = ["per step"] if timed else []
    head += ["target"] if len(targets) > 1 else []
    head += ["occupancy"]
    rows = [_triton_row(view, head) for view in shown[:MAX_ROWS]]
    absence = _absence(report, len(views) - len(timed), len(views))
    aside = " · ".join(filter(None, [absence, *(targets if len(targets) == 1 else [])]))
    grid = _grid(head, rows, "l" + "r" * (len(head) - 2) + "l", optional=(len(head) - 1,))
    places = {
        (view.name, view.file, view.line): [
            labels.shorten(view.name, 34),
            f"{t.shorten_path(view.file, 42)}:{view.line}",
        ]
        for view in shown[:MAX_ROWS]
        if view.file is not None
    }
    blocks: list[Block] = [grid]
    if places:
        blocks.append(_grid(["function", "source"], list(places.values()), "ll"))
    text = "Spills: registers of a thread that are kept in local memory, in bytes."
    return [Section("Kernels compiled by Triton", [*blocks, Paragraph(text, "soft")], aside)]


def _absence(report: Report, absent: int, count: int) -> str:
    """How many of so many kernels a trace has not; empty: there is no trace, or it has all."""
    if report.scope.timeless or not absent:
        return ""
    if absent == count:
        return "none is in this trace"
    return f"{absent} more {'is' if absent == 1 else 'are'} not in this trace"


def _grid(
    head: list[str], rows: list[list[str]], align: str, optional: tuple[int, ...] = ()
) -> Grid:
    """Where room is short, the first rows."""
    more = t.count_noun(len(rows) - MAX_SHORT, f"more {head[0]}")
    return Grid(head, rows, short=rows[:MAX_SHORT], more=more, align=align, optional=optional)


def _triton_row(view: TritonKernel, head: list[str]) -> list[str]:
    spilled, occupancy = view.spilled_bytes, view.occupancy
    by = f", {view.occupancy_limiter}" if view.occupancy_limiter else ""
    cells = {
        "kernel": labels.shorten(view.name, 26),
        "per step": t.format_duration(view.step_ns or 0.0),
        "spills": t.NOT_MEASURED if spilled is None else _size(spilled),
        "registers": t.NOT_MEASURED if view.registers is None else str(view.registers),
        "shared": _size(view.shared_bytes),
        "warps": str(view.num_warps),
        "stages": ", ".join(map(str, view.num_stages)),
        "target": view.target,
        "occupancy": t.NOT_MEASURED if occupancy is None else f"{t.format_share(occupancy)}{by}",
    }
    return [cells[name] for name in head]


def _size(size: int) -> str:
    return t.format_bytes(size) if size else "none"


def _row(view: KernelCounters, name: str, traced: bool, several: bool) -> dict[str, str]:
    """Cells by column; empty: not collected. ``several``: some figures are means of launches."""
    busiest = max(view.use.values(), default=None)
    rate = "" if view.bandwidth is None else t.format_rate(view.bandwidth, "B/s")
    times = {
        "launches": f"{view.profiled:,}" if several else "",
        "time": _or_empty(view.duration_ns, t.format_duration),
    }
    if traced:
        times = {
            "per step": t.format_duration(view.step_ns),
            "gain at most": t.format_duration(view.gain_ns),
        }
    return {
        "kernel": name,
        **times,
        "limited by": "" if view.limit == "unknown" else view.limit,
        "use": _or_empty(busiest, t.format_share),
        "DRAM bytes": _or_empty(view.dram_bytes, t.format_bytes) if busiest is None else "",
        "DRAM rate": rate if busiest is None else "",
        "occupancy": _or_empty(view.occupancy, t.format_share),
    }


def _or_empty(value: float | None, written: Callable[[float], str]) -> str:
    return "" if value is None else written(value)


def _command(report: Report) -> list[Section]:
    """What to run for the counters of the kernels that matter."""
    if not report.profile_kernels:
        return []
    command, cost = report.profile_kernels
    blocks: list[Block] = [Code(command, "console", "run"), Paragraph(cost, "soft")]
    title = "Hardware counters of the slow kernels"
    return [
        Section(
            title, blocks, "what limits each of them", folded=True, counted="command for counters"
        )
    ]
