"""Cards of the Memory page: allocations over time and at the peak, and the segment map.

The data are a memory snapshot or the allocator events of a trace."""

from typing import Any

import numpy as np
import plotly.graph_objects as go
import polars as pl

from advisor.advise.memory import build_memory_views, select_histories
from advisor.core import labels
from advisor.core import text as t
from advisor.core.report_memory import MemoryView
from advisor.dashboard import components as ui
from advisor.dashboard import plotly_figures
from advisor.dashboard.loaded_runs import LoadedRun
from advisor.dashboard.page_view import PageView
from advisor.measure import Analysis
from advisor.measure.memory.memory_kinds import CATEGORIES
from advisor.measure.memory.peak_memory import PeakMemory
from advisor.render.documents import memory

CATEGORY_COLORS = dict(
    zip(
        CATEGORIES,
        ("#4a3fb0", "#2f8f6b", "#8c82d8", "#d9822b", "#7a5195", "#2b7fb8", "#b07aa1", "#c0392b",
         "#e7b98a", "#b9b3e6", "#5aa9a3", "#8a6d5b", "#c9a227", "#9a9aa5"),
        strict=True,
    )
)  # fmt: skip
FREE_COLOR, RESERVED_COLOR = "#dcdbd6", "#6f6f79"
MAX_SEGMENTS = 60
_MAX_ROWS = 25
_MAX_FRAMES = 6
_MAX_BLOCKS = 3_000
_MAX_DEVICES = 8
TIMELINE_POINTS = 500


def precompute(loaded: LoadedRun) -> None:
    """Compute the tables behind the figures, before the run is shown."""
    for peak in select_histories(loaded.main)[:_MAX_DEVICES]:
        _timeline_table(loaded, None, peak)


def draw_cards(view: PageView) -> list[Any]:
    """Build the cards of each device of the rank; none if no memory was recorded."""
    a = view.analysis
    views = {device_view.device: device_view for device_view in view.loaded.report.memory}
    if a is not view.loaded.main:
        views = view.loaded.get_or_compute(
            ("memory_views", view.rank),
            lambda: {memory_view.device: memory_view for memory_view in build_memory_views(a)},
        )
    parts: list[Any] = []
    for peak in select_histories(a)[:_MAX_DEVICES]:
        parts += _device_cards(view, a, peak, views.get(peak.device))
    return parts


def _device_cards(
    view: PageView, a: Analysis, peak: PeakMemory, device_view: MemoryView | None
) -> list[Any]:
    """Build the cards of one device."""
    title_prefix = f"GPU {peak.device}: " if len(select_histories(a)) > 1 else ""
    parts = []
    if device_view is not None:
        timeline = _timeline_table(view.loaded, view.rank, peak)
        parts.append(_category_card(peak, device_view, timeline, title_prefix))
        parts += _table_cards(device_view, title_prefix)
    if peak.history.segments.height and peak.snapshot.source != "trace":
        segment_map = ui.figure(
            _segment_figure(peak),
            f"memory-segments-gpu{peak.device}",
            height=_map_height(peak),
            has_table=True,
            description="Blocks in each segment of the allocator, at their addresses. The table of "
            "pools has their sums.",
        )
        pools = (
            []
            if device_view is None
            else [
                ui.draw_grid(section)
                for section in memory.describe_device(device_view).tables
                if section.title == memory.POOLS
            ]
        )
        parts.append(
            ui.card(
                f"{title_prefix}{memory.POOLS}",
                *pools,
                ui.expander("Show the map", segment_map, ui.remark(_map_note(peak))),
            )
        )
    return parts


def _category_card(
    peak: PeakMemory, memory_view: MemoryView, timeline: pl.DataFrame, title_prefix: str
) -> Any:
    """Build the card of memory by category: over time, with the peak marked, and at the peak."""
    instant_name = {"peak": "the peak", "out of memory": "the failure"}.get(
        memory_view.at, "the snapshot"
    )
    reserved_note = (
        f"of {t.format_bytes(memory_view.reserved)} reserved" if memory_view.reserved else ""
    )
    figure_tiles = ui.tiles(
        [
            (f"In tensors at {instant_name}", t.format_bytes(memory_view.allocated), reserved_note),
            *[(each.category.capitalize(), t.format_bytes(each.bytes),
               t.format_share(each.bytes / max(memory_view.allocated, 1)))
              for each in memory_view.categories[:3]],
        ]
    )  # fmt: skip
    body: list[Any] = [figure_tiles]
    if not peak.history.is_too_short:
        description = f"Bytes in tensors by category over {peak.history.count:,} allocator events."
        timeline_figure = _timeline_figure(peak, timeline)
        name = f"memory-snapshot-gpu{peak.device}"
        body.append(
            ui.figure(timeline_figure, name, height=340, narrow_height=510, description=description)
        )
        hint = "Hover over the chart to see the largest blocks and a stack."
        body.append(ui.remark(f"{hint} Double-click to show the whole history."))
    rows = [
        [
            ui.element(
                "Span",
                ui.swatch(CATEGORY_COLORS[each.category]),
                f" {each.category}",
                cls="nowrap",
            ),
            ui.bar_cell(each.bytes / max(memory_view.allocated, 1), CATEGORY_COLORS[each.category]),
            t.format_bytes(each.bytes),
            t.format_share(each.bytes / max(memory_view.allocated, 1)),
            t.format_count(each.blocks),
        ]
        for each in memory_view.categories
    ]
    header = ["Category", "", "Bytes", "Share", "Blocks"]
    body.append(ui.table(header, rows, number_columns=(2, 3, 4), stacked=True))
    lines = [
        (label, " · ".join(parts))
        for label, parts in memory.describe_device(memory_view).lines
        if label not in ("held", "by")
    ]
    if lines:
        body.append(ui.fact_list(lines))
    return ui.card(f"{title_prefix}What held the memory at {instant_name}", *body)


def _table_cards(memory_view: MemoryView, title_prefix: str) -> list[Any]:
    """Build a card for each other table of a device. A saving has its assumption below it."""
    cards = []
    for section in memory.describe_device(memory_view, _MAX_ROWS).tables:
        if section.title == memory.POOLS:
            continue
        rows: list[Any] = list(section.rows)
        if section.title.startswith("What a change frees"):
            rows = [
                [
                    ui.element("Div", row[0], ui.element("Div", f"{saving.assumes}.", cls="sub")),
                    *row[1:],
                ]
                for row, saving in zip(rows, memory_view.savings, strict=False)
            ]
        cards.append(ui.card(f"{title_prefix}{section.title}", ui.draw_grid(section, rows)))
    return cards


def _timeline_table(loaded: LoadedRun, rank: int | None, peak: PeakMemory) -> pl.DataFrame:
    """Return memory by category over time, computed once."""
    key = ("memory_timeline", rank, peak.device)
    return loaded.get_or_compute(key, lambda: peak.timeline(TIMELINE_POINTS))


def _timeline_figure(peak: PeakMemory, timeline: pl.DataFrame) -> Any:
    """Draw memory by category over time, with the peak marked."""
    chart = plotly_figures.empty_figure(320)
    has_times = not timeline["time_us"].is_null().any()
    x = (timeline["time_us"] / 1e3).to_list() if has_times else timeline["event"].to_list()
    names = [name for name in CATEGORIES if name in timeline.columns]
    largest_by_category = {
        name: _largest_blocks(peak, name, timeline["event"].to_numpy()) for name in names
    }
    sizes = np.append(peak.history.block_lifetimes.size, 0)
    total = timeline.select(pl.sum_horizontal(*names)).to_series()
    unit, scale = (
        ("GiB", 1 << 30) if total.to_numpy().max(initial=0) >= 1 << 30 else ("MiB", 1 << 20)
    )
    for name in names:
        chart.add_trace(
            go.Scatter(
                x=x,
                y=(timeline[name] / scale).to_list(),
                name=name,
                stackgroup="held",
                mode="lines",
                line={"width": 0, "shape": "hv", "color": CATEGORY_COLORS[name]},
                fillcolor=CATEGORY_COLORS[name],
                text=[_largest_block_text(peak, row) for row in largest_by_category[name].tolist()],
                hovertemplate=f"{name} %{{y:.3g}} {unit}%{{text}}<extra></extra>",
            )
        )
    largest_rows = np.array([largest_by_category[name] for name in names] or [[-1] * len(x)])
    largest_overall = largest_rows[np.argmax(sizes[largest_rows], axis=0), np.arange(len(x))]
    stacks = [_stack_text(peak, row) for row in largest_overall.tolist()]
    line_name, line_bytes = (
        ("reserved", timeline["reserved"]) if peak.reserved else ("in tensors", total)
    )
    chart.add_trace(
        go.Scatter(
            x=x,
            y=(line_bytes / scale).to_list(),
            name=line_name,
            mode="lines",
            line={"width": 1.5, "shape": "hv", "color": RESERVED_COLOR, "dash": "dot"},
            text=stacks,
            hovertemplate=f"{line_name} %{{y:.3g}} {unit}%{{text}}<extra></extra>",
        )
    )
    row = int(np.searchsorted(timeline["event"].to_numpy(), peak.event))
    label = "out of memory" if peak.history.failed_event is not None else "peak"
    chart.add_annotation(
        x=x[row], y=peak.allocated / scale, text=f"{label} {t.format_bytes(peak.allocated)}",
        showarrow=True, arrowhead=0, arrowcolor=RESERVED_COLOR, ax=-10, ay=-34, xanchor="right",
        font={"size": 12},
    )  # fmt: skip
    chart.update_xaxes(
        title="ms into the history" if has_times else "event", range=_active_range(x, row)
    )
    chart.update_yaxes(title=unit, rangemode="tozero")
    chart.update_layout(
        showlegend=True, hovermode="x unified", hoverdistance=-1, margin={"t": 64},
        hoverlabel={"align": "left"}, legend={"maxheight": 1},
    )  # fmt: skip
    return chart


def _active_range(x: list[float], peak: int) -> list[float] | None:
    """Return the ends of the x axis that cover the part with activity, or ``None`` for all of it.

    The axis is cut if nothing changes during more than half of it and the peak comes later."""
    if len(x) < 2:
        return None
    intervals = np.diff(x)
    longest = int(intervals.argmax())
    if intervals[longest] <= (x[-1] - x[0]) / 2 or peak <= longest:
        return None
    return [x[longest + 1] - (x[-1] - x[longest + 1]) / 20, x[-1]]


def _largest_blocks(peak: PeakMemory, category: str, events: Any) -> Any:
    """Return the row of a category's largest block at each event, or -1 if it has no block."""
    lifetimes = peak.history.block_lifetimes
    rows = np.flatnonzero(peak.category_codes == CATEGORIES.index(category))
    rows = rows[np.argsort(-lifetimes.size[rows], kind="stable")[:_MAX_BLOCKS]]
    largest = np.full(len(events), -1)
    for row in rows.tolist():  # the largest come first, so that a few cover all events
        is_live = (events >= lifetimes.start_event[row]) & (events < lifetimes.end_event[row])
        largest[(largest < 0) & is_live] = row
        if (largest >= 0).all():
            break
    return largest


def _largest_block_text(peak: PeakMemory, row: int) -> str:
    """Describe a category's largest block for a tooltip: its size and source line."""
    if row < 0:
        return ""
    lifetimes = peak.history.block_lifetimes
    origin = peak.history.origins[int(lifetimes.stack[row])]
    place = "" if origin.file is None else f" at {memory.shorten(origin.file)}:{origin.line}"
    text = f" · largest {t.format_bytes(int(lifetimes.size[row]))}{place}"
    return plotly_figures.escape_markup(text)


def _stack_text(peak: PeakMemory, row: int) -> str:
    """Describe the largest block for a tooltip: its size and the innermost stack frames."""
    if row < 0:
        return ""
    lifetimes = peak.history.block_lifetimes
    stack = int(lifetimes.stack[row])
    frames = peak.snapshot.stacks[stack] if stack >= 0 else ()
    frame_lines = [
        f"{frame.name} at {memory.shorten(frame.file)}:{frame.line}"
        for frame in frames
        if frame.line > 0
    ]
    size_line = f"largest block: {t.format_bytes(int(lifetimes.size[row]))}"
    lines = [size_line, *frame_lines[:_MAX_FRAMES]] if frame_lines else [f"{size_line}, no stack"]
    return "".join(f"<br>{plotly_figures.escape_markup(labels.clean(line))}" for line in lines)


def _map_rows(peak: PeakMemory) -> pl.DataFrame:
    """Return the segments on the map, the largest first."""
    return (
        peak.snapshot.segments.with_row_index("row")
        .filter(pl.col("device") == peak.device)
        .sort("total", descending=True)
        .head(MAX_SEGMENTS)
    )


def _map_height(peak: PeakMemory) -> int:
    """Return the height of the segment map, pixels."""
    return 110 + 14 * _map_rows(peak).height


def _map_note(peak: PeakMemory) -> str:
    """Write the remark below the segment map."""
    shown_count, total = _map_rows(peak).height, peak.history.segments.height
    limit_note = (
        f" The {shown_count} largest of {total:,} segments are drawn."
        if shown_count < total
        else ""
    )
    return (
        "Gray is free memory. A request needs one contiguous piece of its pool and stream."
        f"{limit_note}"
    )


def _segment_figure(peak: PeakMemory) -> Any:
    """Draw a bar per segment with its blocks. Tooltips give size, category, line and age."""
    history, lifetimes = peak.history, peak.history.block_lifetimes
    live_rows = np.flatnonzero(lifetimes.end_event == history.count)
    row_by_address = dict(
        zip(lifetimes.address[live_rows].tolist(), live_rows.tolist(), strict=True)
    )
    rows = _map_rows(peak)
    position_by_segment = {row: position for position, row in enumerate(rows["row"].to_list())}
    blocks = (
        peak.history.blocks.filter(pl.col("segment").is_in(rows["row"].cast(pl.Int32).to_list()))
        .sort("size", descending=True)
        .head(_MAX_BLOCKS)
    )
    start = dict(zip(rows["row"].to_list(), rows["address"].to_list(), strict=True))
    bars_by_category: dict[str, list[tuple[float, float, str, str]]] = {}
    names = [_segment_name(row) for row in rows.iter_rows(named=True)]
    for block in blocks.iter_rows(named=True):
        segment = block["segment"]
        category, tooltip = _describe_block(peak, block, row_by_address.get(block["address"]))
        bars_by_category.setdefault(category, []).append(
            (
                (block["address"] - start[segment]) / (1 << 20),
                block["size"] / (1 << 20),
                names[position_by_segment[segment]],
                tooltip,
            )
        )
    chart = plotly_figures.empty_figure(_map_height(peak))
    for category in (*CATEGORIES, "pending", "free"):
        bars = bars_by_category.get(category)
        if not bars:
            continue
        chart.add_trace(
            go.Bar(
                orientation="h", name=category, base=[b[0] for b in bars], x=[b[1] for b in bars],
                y=[b[2] for b in bars], customdata=[[b[3]] for b in bars],
                marker={"color": CATEGORY_COLORS.get(category, FREE_COLOR),
                        "line": {"width": 0.5, "color": "#ffffff"}},
                hovertemplate="%{customdata[0]}<extra></extra>",
            )
        )  # fmt: skip
    chart.update_layout(barmode="overlay", showlegend=True, bargap=0.15, margin={"t": 64, "l": 150})
    chart.update_xaxes(title="MiB into the segment")
    chart.update_yaxes(
        categoryorder="array", categoryarray=names[::-1], showgrid=False, tickfont={"size": 10}
    )
    return chart


def _segment_name(row: dict[str, Any]) -> str:
    """Write a segment's size class, stream, pool and address."""
    size_class = {True: "large", False: "small"}.get(row["large"], "")
    stream = f" s{row['stream']}" if row["stream"] else ""
    pool = f" p{row['pool']}" if row["pool"] is not None else ""
    return f"{size_class}{stream}{pool} …{row['address'] & 0xFFFFFFFFFF:x}"


def _describe_block(
    peak: PeakMemory, block: dict[str, Any], lifetime_row: int | None
) -> tuple[str, str]:
    """Return the category of a block and its tooltip with size, line and age.

    ``lifetime_row``: row of the block in ``block_lifetimes``, or ``None`` if unknown."""
    if block["state"] == "inactive":
        return "free", f"free {t.format_bytes(block['size'])}"
    if block["state"] == "pending":
        return "pending", f"{t.format_bytes(block['size'])}, freed; another stream still uses it"
    history = peak.history
    category = (
        CATEGORIES[int(peak.category_codes[lifetime_row])]
        if lifetime_row is not None
        else "unknown"
    )
    origin = history.origins[-1 if block["stack"] is None else block["stack"]]
    place = (
        "line unknown"
        if origin.file is None
        else f"{t.shorten_path(origin.file, 50)}:{origin.line}"
    )
    allocation_event = (
        -1 if lifetime_row is None else int(history.block_lifetimes.start_event[lifetime_row])
    )
    age = "allocated before the history"
    if allocation_event >= 0:
        age = f"{history.count - allocation_event:,} events old"
        times = history.events["time_us"]
        if times[allocation_event] is not None and times[history.count - 1] is not None:
            age += (
                f", {t.format_duration((times[history.count - 1] - times[allocation_event]) * 1e3)}"
            )
    label = (
        ""
        if block["label"] is None
        else f"<br>{plotly_figures.escape_markup(labels.clean(block['label']))}"
    )
    text = (
        f"{t.format_bytes(block['requested'])} "
        f"{category}<br>{plotly_figures.escape_markup(labels.clean(place))}<br>{age}"
    )
    return category, f"{text}{label}"
