"""The memory snapshot's part of the Memory page: allocations over time, the map of segments, and
the allocations live at the peak."""

from __future__ import annotations

from typing import Any

import numpy as np
import plotly.graph_objects as go
import polars as pl

from advisor.core import text as t
from advisor.core.report import MemoryView
from advisor.dashboard import figures
from advisor.dashboard.current import PageView
from advisor.dashboard.parts import card, el, figure, remark, table
from advisor.dashboard.session import LoadedRun
from advisor.measure import Analysis
from advisor.measure.memory.memory_kinds import CATEGORIES
from advisor.measure.memory.post_mortem import PostMortem
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
MAX_BLOCKS = 3_000
MAX_DEVICES = 8
POINTS = 500


def warm(loaded: LoadedRun) -> None:
    """Make what the figures are drawn from."""
    for post in loaded.main.post_mortems[:MAX_DEVICES]:
        _timeline_table(loaded, None, post)


def sections(view: PageView) -> list[Any]:
    """Cards of each device in the rank's snapshot; empty without a snapshot."""
    a = view.analysis
    views = {device_view.device: device_view for device_view in view.loaded.report.memory}
    if a is not view.loaded.main:
        from advisor.advise.memory import memory_views

        views = view.loaded.view(
            ("memory_views", view.rank), lambda: {e.device: e for e in memory_views(a)}
        )
    parts: list[Any] = []
    for post in a.post_mortems[:MAX_DEVICES]:
        parts += _device(view, a, post, views.get(post.device))
    return parts


def _device(
    view: PageView, a: Analysis, post: PostMortem, device_view: MemoryView | None
) -> list[Any]:
    name = f"GPU {post.device}" if len(a.post_mortems) > 1 else "Memory"
    parts = []
    if post.history.count:
        made = _timeline(post, _timeline_table(view.loaded, view.rank, post))
        parts.append(
            card(
                f"{name} over the history",
                figure(
                    made,
                    f"memory-snapshot-gpu{post.device}",
                    height=320,
                    description="Allocated bytes by category at each allocator event.",
                ),
                aside="by category, inferred from allocation stacks",
            )
        )
    if post.history.segments.height:
        parts.append(
            card(
                f"{name}: segments",
                figure(
                    _segments(post),
                    f"memory-segments-gpu{post.device}",
                    height=_map_height(post),
                    description="Blocks in each segment of the allocator, at their addresses.",
                ),
                remark(_map_note(post)),
                aside="when the snapshot was taken",
            )
        )
    if device_view is not None:
        parts.append(_post_mortem(device_view))
    return parts


def _timeline_table(loaded: LoadedRun, rank: int | None, post: PostMortem) -> pl.DataFrame:
    key = ("memory_timeline", rank, post.device)
    return loaded.view(key, lambda: post.timeline(POINTS))


def _timeline(post: PostMortem, table_: pl.DataFrame) -> Any:
    made = figures.empty_figure(320)
    timed = not table_["time_us"].is_null().any()
    x = (table_["time_us"] / 1e3).to_list() if timed else table_["event"].to_list()
    names = [name for name in CATEGORIES if name in table_.columns]
    for name in names:
        made.add_trace(
            go.Scatter(
                x=x,
                y=(table_[name] / (1 << 30)).to_list(),
                name=name,
                stackgroup="held",
                mode="lines",
                line={"width": 0, "shape": "hv", "color": COLOURS[name]},
                fillcolor=COLOURS[name],
                hovertemplate=f"{name} %{{y:.3g}} GiB<extra></extra>",
            )
        )
    made.add_trace(
        go.Scatter(
            x=x,
            y=(table_["reserved"] / (1 << 30)).to_list(),
            name="reserved",
            mode="lines",
            line={"width": 1.5, "shape": "hv", "color": RESERVED, "dash": "dot"},
            hovertemplate="reserved %{y:.3g} GiB<extra></extra>",
        )
    )
    row = int(np.searchsorted(table_["event"].to_numpy(), post.moment))
    label = "out of memory" if post.history.failed is not None else "peak"
    made.add_annotation(
        x=x[row], y=post.allocated / (1 << 30), text=f"{label} {t.format_bytes(post.allocated)}",
        showarrow=True, arrowhead=0, arrowcolor=RESERVED, ax=0, ay=-24, font={"size": 12},
    )  # fmt: skip
    made.update_xaxes(title="ms into the history" if timed else "event")
    made.update_yaxes(title="GiB", rangemode="tozero")
    made.update_layout(showlegend=True, hovermode="x unified", margin={"t": 64})
    return made


def _map_rows(post: PostMortem) -> pl.DataFrame:
    """The segments that are drawn, the largest first."""
    return (
        post.snapshot.segments.with_row_index("row")
        .filter(pl.col("device") == post.device)
        .sort("total", descending=True)
        .head(MAX_SEGMENTS)
    )


def _map_height(post: PostMortem) -> int:
    return 110 + 14 * _map_rows(post).height


def _map_note(post: PostMortem) -> str:
    shown, total = _map_rows(post).height, post.history.segments.height
    more = f" The {shown} largest of {total:,} segments are drawn." if shown < total else ""
    return (
        f"Grey is free memory. A request needs one contiguous piece of its pool and stream.{more}"
    )


def _segments(post: PostMortem) -> Any:
    """One bar per segment with its blocks; the tooltip gives size, category, line and age."""
    h, lives = post.history, post.history.lives
    alive = np.flatnonzero(lives.ended == h.count)
    live = dict(zip(lives.address[alive].tolist(), alive.tolist(), strict=True))
    rows = _map_rows(post)
    place = {row: n for n, row in enumerate(rows["row"].to_list())}
    blocks = (
        post.history.blocks.filter(pl.col("segment").is_in(rows["row"].cast(pl.Int32).to_list()))
        .sort("size", descending=True)
        .head(MAX_BLOCKS)
    )
    start = dict(zip(rows["row"].to_list(), rows["address"].to_list(), strict=True))
    drawn: dict[str, list[tuple[float, float, str, str]]] = {}
    names = [_segment_name(row) for row in rows.iter_rows(named=True)]
    for block in blocks.iter_rows(named=True):
        segment = block["segment"]
        kind, said = _block_words(post, block, live.get(block["address"]))
        drawn.setdefault(kind, []).append(
            (
                (block["address"] - start[segment]) / (1 << 20),
                block["size"] / (1 << 20),
                names[place[segment]],
                said,
            )
        )
    made = figures.empty_figure(_map_height(post))
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


def _block_words(post: PostMortem, block: dict[str, Any], life: int | None) -> tuple[str, str]:
    """Category of a block, and its tooltip: size, line, age."""
    if block["state"] == "inactive":
        return "free", f"free {t.format_bytes(block['size'])}"
    if block["state"] == "pending":
        return "pending", f"{t.format_bytes(block['size'])}, freed; another stream still uses it"
    h = post.history
    kind = CATEGORIES[int(post.kinds[life])] if life is not None else "unknown"
    origin = h.origins[-1 if block["stack"] is None else block["stack"]]
    where = (
        "line unknown"
        if origin.file is None
        else f"{t.shorten_path(origin.file, 50)}:{origin.line}"
    )
    born = -1 if life is None else int(h.lives.born[life])
    age = "allocated before the history"
    if born >= 0:
        age = f"{h.count - born:,} events old"
        times = h.events["time_us"]
        if times[born] is not None and times[h.count - 1] is not None:
            age += f", {t.format_duration((times[h.count - 1] - times[born]) * 1e3)}"
    label = (
        "" if block["label"] is None else f"<br>{figures.escape_markup(t.clean(block['label']))}"
    )
    said = (
        f"{t.format_bytes(block['requested'])} "
        f"{kind}<br>{figures.escape_markup(t.clean(where))}<br>{age}"
    )
    return kind, f"{said}{label}"


def _post_mortem(device_view: MemoryView) -> Any:
    shown = memory.device(device_view, 25, named=True)
    body: list[Any] = [
        table(["", ""], [[label, " · ".join(parts)] for label, parts in shown.lines], numbers=())
    ]
    for section in shown.tables:
        body += [
            el("H3", section.title),
            table(section.head, section.rows, numbers=range(1, len(section.head)), stacked=True),
        ]
    if device_view.savings:
        items = [el("Li", line) for line in memory.assumptions(device_view)]
        body += [remark("Assumptions:"), el("Ul", *items, cls="more")]
    return card(shown.title, *body, aside=shown.aside)
