"""What hardware counters show, a row per kernel."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from advisor.core import text as t
from advisor.render.document import Block, Code, Grid, Items, Paragraph, Section

if TYPE_CHECKING:
    from advisor.core.report import KernelCounters, Report

MAX_ROWS: Final = 50
MAX_SHORT: Final = 10
MAX_ADVICE: Final = 12
MAX_LINES: Final = 3
"""Of a kernel."""
MIN_SHARE: Final = 0.05
"""Of its samples."""


def sections(report: Report) -> list[Block]:
    """The kernels with their limits, and what the profiler's own rules say of them."""
    views = report.kernel_counters
    if not views:
        return _command(report)
    traced = any(view.step_ns is not None for view in views)
    absent = sum(view.step_ns is None for view in views) if traced else 0
    views = [view for view in views if view.step_ns is not None] if traced else views
    head = ["kernel", "time", "limited by", "use", "occupancy"]
    if traced:
        head = ["kernel", "per step", "gain at most", "limited by", "use", "occupancy"]
    rows = [_row(view, traced) for view in views[:MAX_ROWS]]
    more = len(views) - MAX_SHORT
    grid = Grid(
        head,
        rows,
        short=rows[:MAX_SHORT],
        more=f"{t.count_noun(more, 'more kernel')}" if more > 0 else "",
        align="l" + "r" * (len(head) - 1),
        optional=(len(head) - 1,),
    )
    aside = "per launch"
    if traced:
        aside = f"{absent} more are not in this trace" if absent else "counters beside this trace"
    blocks: list[Block] = [Section("Kernels with hardware counters", [grid], aside)]
    sampled = [
        [
            f"{t.shorten_path(each.file, 34)}:{each.line}",
            t.format_share(each.share),
            "issuing" if each.stall == "selected" else each.stall,
            t.shorten(view.short, 26),
        ]
        for view in views[:MAX_SHORT]
        for each in view.lines[:MAX_LINES]
        if each.share >= MIN_SHARE
    ]
    if sampled:
        grid = Grid(["line", "samples", "most wait for", "kernel"], sampled, align="lrll")
        blocks.append(Section("Where warps were sampled", [grid], "share of the kernel's samples"))
    advice = [f"{t.shorten(view.short, 40)}: {text}" for view in views for text in view.advice]
    if advice:
        count = f"{len(advice)} texts"
        items = Items(advice[:MAX_ADVICE])
        blocks.append(
            Section("The kernel profiler's own advice", [items], folded=True, counted=count)
        )
    return blocks


def _row(view: KernelCounters, traced: bool) -> list[str]:
    name = t.shorten(view.short, 34)
    busiest = max(view.use.values(), default=None)
    use = t.NOT_MEASURED if busiest is None else t.format_share(busiest)
    if busiest is None and view.bandwidth is not None:
        use = f"{view.bandwidth / 1e9:,.0f} GB/s of DRAM"
    limit = [
        view.limit,
        use,
        t.NOT_MEASURED if view.occupancy is None else t.format_share(view.occupancy),
    ]
    if not traced:
        return [name, t.format_duration(view.duration_ns), *limit]
    return [name, t.format_duration(view.step_ns), t.format_duration(view.gain_ns), *limit]


def _command(report: Report) -> list[Block]:
    """What to run for the counters of the kernels that matter."""
    if not report.profile_kernels:
        return []
    command, cost = report.profile_kernels
    blocks: list[Block] = [Code(command, "console", "run"), Paragraph(cost, "soft")]
    title = "Hardware counters of the slow kernels"
    return [Section(title, blocks, "what limits each of them", folded=True, counted="command")]
