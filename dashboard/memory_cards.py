"""Cards of the Memory page: allocations over time, the map of segments, and the allocations live at
the peak; of a snapshot or of a trace's allocator events."""

from typing import Any

import numpy as np
import plotly.graph_objects as go
import polars as pl

from advisor.advise.memory import build_memory_views, select_histories
from advisor.core import labels
from advisor.core import text as t
from advisor.core.report_memory import MemoryView
from advisor.dashboard import plotly_figures
from advisor.dashboard.components import (
    bar_cell,
    card,
    draw_grid,
    element,
    fact_list,
    figure,
    foldable,
    remark,
    swatch,
    table,
    tiles,
)
from advisor.dashboard.loaded_runs import LoadedRun
from advisor.dashboard.page_view import PageView
from advisor.measure import Analysis
from advisor.measure.memory.memory_kinds import CATEGORIES
from advisor.measure.memory.peak_memory import PeakMemory
from advisor.render.documents import memory

COLOURS = dict(
    zip(
        CATEGORIES,
        ("#4a3fb0", "#2f8f6b", "#8c82d8", "#d9822b", "#7a5195", "#2b7fb8", "#b07aa1", "#c0392b",
         "#e7b98a", "#b9b3e6", "#5aa9a3", "#8a6d5b", "#c9a227", "#9a9aa5"),
        strict=True,
    )
)  # fmt: skip
FREE, RESERVED = "#dcdbd6", "#6f6f79"
MAX_SEGMENTS = 60
MAX_ROWS = 25
MAX_FRAMES = 6
MAX_BLOCKS = 3_000
MAX_DEVICES = 8
POINTS = 500


def warm(loaded: LoadedRun) -> None:
    """Make the tables that the figures are drawn from."""
    for peak in select_histories(loaded.main)[:MAX_DEVICES]:
        _timeline_table(loaded, None, peak)


def draw_cards(view: PageView) -> list[Any]:
    """Build cards of each device of the rank; empty where no memory was recorded."""
    a = view.analysis
    views = {device_view.device: device_view for device_view in view.loaded.report.memory}
    if a is not view.loaded.main:
        views = view.loaded.cached(
            ("memory_views", view.rank), lambda: {e.device: e for e in build_memory_views(a)}
        )
    parts: list[Any] = []
    for peak in select_histories(a)[:MAX_DEVICES]:
        parts += _device(view, a, peak, views.get(peak.device))
    return parts


def _device(
    view: PageView, a: Analysis, peak: PeakMemory, device_view: MemoryView | None
) -> list[Any]:
    named = f"GPU {peak.device}: " if len(select_histories(a)) > 1 else ""
    parts = []
    if device_view is not None:
        table_ = _timeline_table(view.loaded, view.rank, peak)
        parts.append(_picture(peak, device_view, table_, named))
        parts += _tables(device_view, named)
    if peak.history.segments.height and peak.snapshot.source != "trace":
        made = figure(
            _segments(peak),
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
                draw_grid(each)
                for each in memory.describe_device(device_view).tables
                if each.title == memory.POOLS
            ]
        )
        parts.append(
            card(
                f"{named}{memory.POOLS}",
                *pools,
                foldable("Show the map", made, remark(_map_note(peak))),
            )
        )
    return parts


def _picture(peak: PeakMemory, shown: MemoryView, table_: pl.DataFrame, named: str) -> Any:
    """Draw the categories over time with the peak marked, and what they hold there."""
    moment = {"peak": "the peak", "out of memory": "the failure"}.get(shown.at, "the snapshot")
    reserved = f"of {t.format_bytes(shown.reserved)} reserved" if shown.reserved else ""
    figures_ = tiles(
        [
            (f"In tensors at {moment}", t.format_bytes(shown.allocated), reserved),
            *[(each.category.capitalize(), t.format_bytes(each.bytes),
               t.format_share(each.bytes / max(shown.allocated, 1)))
              for each in shown.categories[:3]],
        ]
    )  # fmt: skip
    body: list[Any] = [figures_]
    if not peak.history.is_too_short:
        description = f"Bytes in tensors by category over {peak.history.count:,} allocator events."
        made = _timeline(peak, table_)
        name = f"memory-snapshot-gpu{peak.device}"
        body.append(figure(made, name, height=340, narrow_height=510, description=description))
        hint = "Point at the picture for the largest blocks then, and a stack."
        body.append(remark(f"{hint} Double click: the whole history."))
    rows = [
        [
            element("Span", swatch(COLOURS[each.category]), f" {each.category}", cls="nowrap"),
            bar_cell(each.bytes / max(shown.allocated, 1), COLOURS[each.category]),
            t.format_bytes(each.bytes), t.format_share(each.bytes / max(shown.allocated, 1)),
            t.format_count(each.blocks),
        ]
        for each in shown.categories
    ]  # fmt: skip
    header = ["Category", "", "Bytes", "Share", "Blocks"]
    body.append(table(header, rows, numbers=(2, 3, 4), stacked=True))
    lines = [(label, " · ".join(parts)) for label, parts in memory.describe_device(shown).lines
             if label not in ("held", "by")]  # fmt: skip
    if lines:
        body.append(fact_list(lines))
    return card(f"{named}What held the memory at {moment}", *body)


def _tables(shown: MemoryView, named: str) -> list[Any]:
    """Build the rest of a device, a card each; the assumption of a saving below it."""
    cards = []
    for section in memory.describe_device(shown, MAX_ROWS).tables:
        if section.title == memory.POOLS:
            continue
        rows: list[Any] = list(section.rows)
        if section.title.startswith("What a change frees"):
            rows = [
                [element("Div", row[0], element("Div", f"{each.assumes}.", cls="sub")), *row[1:]]
                for row, each in zip(rows, shown.savings, strict=False)
            ]
        cards.append(card(f"{named}{section.title}", draw_grid(section, rows)))
    return cards


def _timeline_table(loaded: LoadedRun, rank: int | None, peak: PeakMemory) -> pl.DataFrame:
    key = ("memory_timeline", rank, peak.device)
    return loaded.cached(key, lambda: peak.timeline(POINTS))


def _timeline(peak: PeakMemory, table_: pl.DataFrame) -> Any:
    made = plotly_figures.empty_figure(320)
    timed = not table_["time_us"].is_null().any()
    x = (table_["time_us"] / 1e3).to_list() if timed else table_["event"].to_list()
    names = [name for name in CATEGORIES if name in table_.columns]
    largest = {name: _largest_blocks(peak, name, table_["event"].to_numpy()) for name in names}
    sizes = np.append(peak.history.block_lifetimes.size, 0)
    total = table_.select(pl.sum_horizontal(*names)).to_series()
    unit, scale = (
        ("GiB", 1 << 30) if total.to_numpy().max(initial=0) >= 1 << 30 else ("MiB", 1 << 20)
    )
    for name in names:
        made.add_trace(
            go.Scatter(
                x=x,
                y=(table_[name] / scale).to_list(),
                name=name,
                stackgroup="held",
                mode="lines",
                line={"width": 0, "shape": "hv", "color": COLOURS[name]},
                fillcolor=COLOURS[name],
                text=[_block_line(peak, row) for row in largest[name].tolist()],
                hovertemplate=f"{name} %{{y:.3g}} {unit}%{{text}}<extra></extra>",
            )
        )
    every = np.array([largest[name] for name in names] or [[-1] * len(x)])
    chosen = every[np.argmax(sizes[every], axis=0), np.arange(len(x))]
    stacks = [_block_stack(peak, row) for row in chosen.tolist()]
    line, drawn = ("reserved", table_["reserved"]) if peak.reserved else ("in tensors", total)
    made.add_trace(
        go.Scatter(
            x=x,
            y=(drawn / scale).to_list(),
            name=line,
            mode="lines",
            line={"width": 1.5, "shape": "hv", "color": RESERVED, "dash": "dot"},
            text=stacks,
            hovertemplate=f"{line} %{{y:.3g}} {unit}%{{text}}<extra></extra>",
        )
    )
    row = int(np.searchsorted(table_["event"].to_numpy(), peak.event))
    label = "out of memory" if peak.history.failed_event is not None else "peak"
    made.add_annotation(
        x=x[row], y=peak.allocated / scale, text=f"{label} {t.format_bytes(peak.allocated)}",
        showarrow=True, arrowhead=0, arrowcolor=RESERVED, ax=-10, ay=-34, xanchor="right",
        font={"size": 12},
    )  # fmt: skip
    made.update_xaxes(title="ms into the history" if timed else "event", range=_busy_part(x, row))
    made.update_yaxes(title=unit, rangemode="tozero")
    made.update_layout(
        showlegend=True, hovermode="x unified", hoverdistance=-1, margin={"t": 64},
        hoverlabel={"align": "left"}, legend={"maxheight": 1},
    )  # fmt: skip
    return made


def _busy_part(x: list[float], peak: int) -> list[float] | None:
    """Return the ends of the axis where nothing changes for most of it, with the peak after that:
    what follows. ``None`` for all of it."""
    if len(x) < 2:
        return None
    still = np.diff(x)
    last = int(still.argmax())
    if still[last] <= (x[-1] - x[0]) / 2 or peak <= last:
        return None
    return [x[last + 1] - (x[-1] - x[last + 1]) / 20, x[-1]]


def _largest_blocks(peak: PeakMemory, category: str, events: Any) -> Any:
    """Return the row of a category's largest block at each event; -1: it holds none then."""
    lives = peak.history.block_lifetimes
    rows = np.flatnonzero(peak.category_codes == CATEGORIES.index(category))
    rows = rows[np.argsort(-lives.size[rows], kind="stable")[:MAX_BLOCKS]]
    largest = np.full(len(events), -1)
    for row in rows.tolist():  # the largest first: a few cover everything
        lived = (events >= lives.start_event[row]) & (events < lives.end_event[row])
        largest[(largest < 0) & lived] = row
        if (largest >= 0).all():
            break
    return largest


def _block_line(peak: PeakMemory, row: int) -> str:
    """Write size and line of a category's largest block, for a tooltip."""
    if row < 0:
        return ""
    lives = peak.history.block_lifetimes
    origin = peak.history.origins[int(lives.stack[row])]
    where = "" if origin.file is None else f" at {memory.shorten(origin.file)}:{origin.line}"
    shown = f" · largest {t.format_bytes(int(lives.size[row]))}{where}"
    return plotly_figures.escape_markup(shown)


def _block_stack(peak: PeakMemory, row: int) -> str:
    """Show the largest block of all, with the innermost frames of its stack that have a line."""
    if row < 0:
        return ""
    lives = peak.history.block_lifetimes
    stack = int(lives.stack[row])
    frames = peak.snapshot.stacks[stack] if stack >= 0 else ()
    shown = [f"{f.name} at {memory.shorten(f.file)}:{f.line}" for f in frames if f.line > 0]
    first = f"largest block: {t.format_bytes(int(lives.size[row]))}"
    lines = [first, *shown[:MAX_FRAMES]] if shown else [f"{first}, no stack"]
    return "".join(f"<br>{plotly_figures.escape_markup(labels.clean(line))}" for line in lines)


def _map_rows(peak: PeakMemory) -> pl.DataFrame:
    """Return the segments that are drawn, the largest first."""
    return (
        peak.snapshot.segments.with_row_index("row")
        .filter(pl.col("device") == peak.device)
        .sort("total", descending=True)
        .head(MAX_SEGMENTS)
    )


def _map_height(peak: PeakMemory) -> int:
    return 110 + 14 * _map_rows(peak).height


def _map_note(peak: PeakMemory) -> str:
    shown, total = _map_rows(peak).height, peak.history.segments.height
    more = f" The {shown} largest of {total:,} segments are drawn." if shown < total else ""
    return (
        f"Grey is free memory. A request needs one contiguous piece of its pool and stream.{more}"
    )


def _segments(peak: PeakMemory) -> Any:
    """Draw a bar per segment with its blocks; the tooltip gives size, category, line and age."""
    h, lives = peak.history, peak.history.block_lifetimes
    alive = np.flatnonzero(lives.end_event == h.count)
    live = dict(zip(lives.address[alive].tolist(), alive.tolist(), strict=True))
    rows = _map_rows(peak)
    place = {row: n for n, row in enumerate(rows["row"].to_list())}
    blocks = (
        peak.history.blocks.filter(pl.col("segment").is_in(rows["row"].cast(pl.Int32).to_list()))
        .sort("size", descending=True)
        .head(MAX_BLOCKS)
    )
    start = dict(zip(rows["row"].to_list(), rows["address"].to_list(), strict=True))
    drawn: dict[str, list[tuple[float, float, str, str]]] = {}
    names = [_segment_name(row) for row in rows.iter_rows(named=True)]
    for block in blocks.iter_rows(named=True):
        segment = block["segment"]
        kind, said = _block_words(peak, block, live.get(block["address"]))
        drawn.setdefault(kind, []).append(
            (
                (block["address"] - start[segment]) / (1 << 20),
                block["size"] / (1 << 20),
                names[place[segment]],
                said,
            )
        )
    made = plotly_figures.empty_figure(_map_height(peak))
    for kind in (*CATEGORIES, "pending", "free"):
        bars = drawn.get(kind)
        if not bars:
            continue
        made.add_trace(
            go.Bar(
                orientation="h", name=kind, base=[b[0] for b in bars], x=[b[1] for b in bars],
                y=[b[2] for b in bars], customdata=[[b[3]] for b in bars],
                marker={"color": COLOURS.get(kind, FREE),
                        "line": {"width": 0.5, "color": "#ffffff"}},
                hovertemplate="%{customdata[0]}<extra></extra>",
            )
        )  # fmt: skip
    made.update_layout(barmode="overlay", showlegend=True, bargap=0.15, margin={"t": 64, "l": 150})
    made.update_xaxes(title="MiB into the segment")
    made.update_yaxes(
        categoryorder="array", categoryarray=names[::-1], showgrid=False, tickfont={"size": 10}
    )
    return made


def _segment_name(row: dict[str, Any]) -> str:
    kind = {True: "large", False: "small"}.get(row["large"], "")
    stream = f" s{row['stream']}" if row["stream"] else ""
    pool = f" p{row['pool']}" if row["pool"] is not None else ""
    return f"{kind}{stream}{pool} …{row['address'] & 0xFFFFFFFFFF:x}"


def _block_words(peak: PeakMemory, block: dict[str, Any], life: int | None) -> tuple[str, str]:
    """Return the category of a block, and its tooltip: size, line, age."""
    if block["state"] == "inactive":
        return "free", f"free {t.format_bytes(block['size'])}"
    if block["state"] == "pending":
        return "pending", f"{t.format_bytes(block['size'])}, freed; another stream still uses it"
    h = peak.history
    kind = CATEGORIES[int(peak.category_codes[life])] if life is not None else "unknown"
    origin = h.origins[-1 if block["stack"] is None else block["stack"]]
    where = (
        "line unknown"
        if origin.file is None
        else f"{t.shorten_path(origin.file, 50)}:{origin.line}"
    )
    born = -1 if life is None else int(h.block_lifetimes.start_event[life])
    age = "allocated before the history"
    if born >= 0:
        age = f"{h.count - born:,} events old"
        times = h.events["time_us"]
        if times[born] is not None and times[h.count - 1] is not None:
            age += f", {t.format_duration((times[h.count - 1] - times[born]) * 1e3)}"
    label = (
        ""
        if block["label"] is None
        else f"<br>{plotly_figures.escape_markup(labels.clean(block['label']))}"
    )
    said = (
        f"{t.format_bytes(block['requested'])} "
        f"{kind}<br>{plotly_figures.escape_markup(labels.clean(where))}<br>{age}"
    )
    return kind, f"{said}{label}"
