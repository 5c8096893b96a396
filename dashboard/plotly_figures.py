"""Figures drawn by plotly: plain, with units on the axes, readable on light and dark.

Colours of text and lines on the page come from assets/parts.css; those set here are what a saved
PNG has, on white."""

import math
from collections import Counter
from collections.abc import Collection, Sequence
from itertools import cycle
from typing import Any

import plotly.graph_objects as go
import polars as pl

from advisor.core import text as t
from advisor.core.gpus import GpuSpec
from advisor.core.labels import clean, kernel_label, shorten
from advisor.dashboard import theme
from advisor.measure.host.op_tree import KERNEL

INK, GRID = "#4a4a52", "#e6e5e1"
FONT = 'Inter, -apple-system, "Segoe UI", Roboto, "DejaVu Sans", sans-serif'
BAR = "#6366d4"
"""Colour of bars and lines that stand for no class of time."""
NO_COMMIT = "no commit"
SEQUENTIAL = ((0.0, "#eceaf9"), (0.5, "#9d97e0"), (1.0, "#4a3fb0"))
DIVERGING = (
    (0.0, "#1f5f9e"),
    (0.25, "#8fb8de"),
    (0.5, "#f3f2ef"),
    (0.75, "#eda184"),
    (1.0, "#a83214"),
)
GREYS = ((0.0, "#f3f2ef"), (1.0, "#62626b"))
DECADES = 1e5
"""Decades that a roofline shows below its roof: slower kernels are idle in all but name."""


def empty_figure(height: int, **layout: Any) -> Any:
    made = go.Figure()
    made.update_layout(
        template="none",
        height=height,
        margin={"l": 64, "r": 16, "t": 16, "b": 48},
        font={"family": FONT, "size": 12.5, "color": INK},
        paper_bgcolor="#ffffff",
        plot_bgcolor="#ffffff",
        hoverlabel={"bgcolor": "#26262b", "font": {"color": "#ffffff", "family": FONT}},
        legend={
            "orientation": "h",
            "y": 1.02,
            "yanchor": "bottom",
            "x": 0,
            "xanchor": "left",
            "font": {"size": 12.5},
            "itemsizing": "constant",
        },
        showlegend=False,
        **layout,
    )
    axis: dict[str, Any] = {"gridcolor": GRID, "zeroline": False, "ticks": ""}
    axis |= {"linecolor": "#cfcec8", "title": {"standoff": 8, "font": {"size": 12.5}}}
    made.update_xaxes(**axis, showgrid=False, showline=True)
    made.update_yaxes(**axis)
    return made


def run_history(names: Sequence[str], values: Sequence[float], about: Sequence[str]) -> Any:
    """Draw the step time of runs, in their order. ``values``: ms."""
    made = empty_figure(280)
    made.add_trace(
        go.Scatter(
            x=list(range(len(names))),
            y=list(values),
            mode="lines+markers",
            line={"color": BAR, "width": 2},
            marker={"size": 8},
            customdata=[
                [escape_markup(name), line] for name, line in zip(names, about, strict=True)
            ],
            hovertemplate="%{customdata[0]}<br>%{y:.4g} ms<br>%{customdata[1]}<extra></extra>",
        )
    )
    step = -(-len(names) // 4)
    at = list(range(0, len(names), step))
    labels = [
        escape_markup(shorten(name, 10)) if line.startswith(NO_COMMIT) else line.partition(" ")[0]
        for name, line in zip(names, about, strict=True)
    ]
    made.update_xaxes(tickvals=at, ticktext=[labels[i] for i in at], tickangle=0)
    made.update_yaxes(title_text="step, ms", rangemode="tozero")
    return made


# -- kernels ------------------------------------------------------------------------------------


def roofline(kernels: pl.DataFrame, hardware: GpuSpec, work_ns: int) -> Any:
    """Draw kernels by arithmetic intensity and rate, under the device's roofs; area is time.

    ``kernels``: rows of ``Analysis.hot_kernels`` with both rates known. ``work_ns``: all GPU work.
    """
    made = empty_figure(420)
    intensity = (kernels["flops_per_s"] / kernels["bytes_per_s"]).to_list()
    rates = (kernels["flops_per_s"] / 1e12).to_list()
    low = 10 ** math.floor(math.log10(max(min([*intensity, 1.0]), 1e-3)))
    # a decade of its own for the labels of the roofs
    high = 10 ** (math.ceil(math.log10(max([*intensity, 1e3]))) + 1)
    top = max([peak for name in ROOFS if (peak := hardware.peak(name))], default=1e12) / 1e12
    bottom = max(min([rate for rate in rates if rate > 0], default=0.01), top / DECADES)
    bottom = 10 ** math.floor(math.log10(bottom))
    _roofs(made, hardware, low, high, bottom * 1e12)
    largest = max(kernels["dur"].max() or 1, 1)
    rows = zip(
        intensity,
        rates,
        kernels["name"].cast(pl.String),
        kernels["family"].cast(pl.String),
        kernels["dur"],
        kernels["dur"] / work_ns,
        kernels["roofline"],
        strict=True,
    )
    by_family: dict[str, list[Any]] = {}
    for row in rows:
        by_family.setdefault(row[3], []).append(row)
    for symbol, (family, points) in zip(cycle(SYMBOLS), by_family.items(), strict=False):
        made.add_trace(
            go.Scatter(
                x=[p[0] for p in points],
                y=[p[1] for p in points],
                name=family,
                mode="markers",
                marker={
                    "size": [6 + 30 * math.sqrt(p[4] / largest) for p in points],
                    "color": theme.colour_of("kernels", family),
                    "symbol": symbol,  # neighbouring families have like colours
                    "opacity": 0.78,
                    "line": {"width": 1, "color": "#ffffff"},
                },
                customdata=[
                    [
                        escape_markup(kernel_label(p[2], 70)),
                        t.format_share(p[5]),
                        t.format_share(p[6]),
                    ]
                    for p in points
                ],
                hovertemplate="%{customdata[0]}<br>%{y:.3g} TFLOP/s at %{x:.3g} FLOP/byte<br>"
                "%{customdata[1]} of device work, %{customdata[2]} of the roof<extra></extra>",
            )
        )
    made.update_xaxes(
        type="log",
        range=[math.log10(low), math.log10(high)],
        showgrid=True,
        dtick=2 if high / low > 1e5 else 1,  # on a telephone each decade's label would not fit
        exponentformat="power",
        title="FLOP per byte moved",
    )
    made.update_yaxes(
        type="log",
        range=[math.log10(bottom), math.log10(top) + 0.35],
        dtick=1,
        exponentformat="power",
        title="TFLOP/s",
    )
    made.update_layout(showlegend=True, margin={"t": 44})
    return made


ROOFS = ("fp64", "fp32", "tf32", "fp16", "bf16", "fp8", "int8")


def _roofs(made: Any, hardware: GpuSpec, low: float, high: float, bottom: float) -> None:
    """Draw the memory roof, and a flat one for each peak that the device has (equal ones once).
    ``bottom``: the lowest rate that is seen, FLOP/s."""
    peaks: dict[float, list[str]] = {}
    for name in ROOFS:
        if name != "int8" and (peak := hardware.peak(name)):
            peaks.setdefault(peak, []).append(name)
    bandwidth = hardware.bandwidth
    top = max(peaks, default=bandwidth * high)
    ridge = min(top / bandwidth, high)
    _roof(made, [low, ridge], [low * bandwidth, ridge * bandwidth])
    start = max(low, bottom / bandwidth) * 10**ROOM  # below the roof, and above the axis
    made.add_annotation(
        **_LABEL | {"yanchor": "top"},
        x=math.log10(start),
        y=math.log10(start * bandwidth / 1e12),
        xanchor="left",
        text=f"{t.format_value(bandwidth, 'B/s')}",
        xshift=6,
    )
    labels: list[tuple[float, list[str]]] = []  # above the highest roof of each
    nearest = math.inf
    for peak, names in sorted(peaks.items(), reverse=True):
        _roof(made, [peak / bandwidth, high], [peak, peak])
        text = f"{', '.join(names)} {t.format_number(peak / 1e12)}"
        if math.log10(nearest / peak) < ROOM:
            labels[-1][1].append(text)
        else:
            labels.append((peak, [text]))
        nearest = peak
    for highest, texts in labels:
        made.add_annotation(
            **_LABEL,
            x=math.log10(high),
            y=math.log10(highest / 1e12),
            xanchor="right",
            text=" · ".join(texts),
        )


SYMBOLS = ("circle", "square", "diamond", "triangle-up", "cross", "pentagon", "star")
ROOM = 0.27
"""Decades between two roofs up to which they share a label: two would collide."""
_LABEL: dict[str, Any] = {"yanchor": "bottom", "showarrow": False, "font": {"size": 11.5}}


def _roof(made: Any, intensity: list[float], flops_per_s: list[float]) -> None:
    made.add_trace(
        go.Scatter(
            x=intensity,
            y=[rate / 1e12 for rate in flops_per_s],
            mode="lines",
            line={"color": "#8f8f99", "width": 1.4},
            hoverinfo="skip",
            showlegend=False,
        )
    )


def icicle(tree: pl.DataFrame, root: str) -> Any:
    """Draw the tree of modules and operators (``op_tree.op_tree``), outermost on top."""
    made = empty_figure(460)
    total = int(tree.filter(pl.col("parent").is_null())["ns"].sum())
    ids = [str(node) for node in tree["node"]]
    parents = ["all" if parent is None else str(parent) for parent in tree["parent"]]
    values = tree["ns"].to_list()
    full = [escape_markup(shorten(clean(name), 90)) for name in tree["name"]]
    names = [
        escape_markup(shorten(clean(_bare(name)), max(9, int(ns / max(total, 1) * 190))))
        for name, ns in zip(tree["name"], values, strict=True)
    ]
    made.add_trace(
        go.Icicle(
            ids=["all", *ids],
            parents=["", *parents],
            labels=[root, *names],
            values=_containing(tree, total),
            branchvalues="total",
            sort=False,
            tiling={"orientation": "v", "pad": 1},
            marker={"colors": ["#dedcf6", *(_shade(name) for name in tree["name"])]},
            textfont={"size": 12, "color": "#1c1c1f"},
            texttemplate="%{label}<br>%{customdata[1]}, %{customdata[2]}",
            customdata=[
                [name, t.format_duration(value), t.format_share(value / max(total, 1))]
                for name, value in zip([root, *full], [total, *values], strict=True)
            ],
            hovertemplate="%{customdata[0]}<br>%{customdata[1]}, %{customdata[2]}<extra></extra>",
            pathbar={"visible": True, "thickness": 22},
            maxdepth=9,
            leaf={"opacity": 1},
        )
    )
    made.update_layout(
        margin={"l": 0, "r": 0, "t": 24, "b": 0}, uniformtext={"minsize": 9, "mode": "hide"}
    )
    return made


def _containing(tree: pl.DataFrame, total: int) -> list[int]:
    """Areas of the root and of each node, none smaller than its children together. Host ranges may
    overlap (a phase and the loader's own), and plotly draws nothing where they do not fit."""
    areas, inside = dict(zip(tree["node"], tree["ns"], strict=True)), Counter[int | None]()
    for node, parent in zip(reversed(tree["node"]), reversed(tree["parent"]), strict=True):
        areas[node] = max(areas[node], inside[node])
        inside[parent] += areas[node]
    return [max(total, inside[None]), *areas.values()]


def _bare(name: str) -> str:
    """Remove from a label what every other has too."""
    for prefix in ("autograd::engine::evaluate_function: ", KERNEL):
        name = name.removeprefix(prefix)
    return name.strip("# ")


def _shade(name: str) -> str:
    """Return a pale colour by kind: kernels, operators, what autograd runs, ranges, modules."""
    if name.startswith("(rest)"):
        return "#e4e3df"
    if name.startswith(KERNEL):
        return "#cfe0f5"
    if "Backward" in name or name.startswith("autograd::"):
        return "#b9b2ec"
    if "::" in name:
        return "#bfe3d1"
    return "#dedcf6"


# -- over time ----------------------------------------------------------------------------------


def line_chart(
    series: Sequence[tuple[str, Sequence[float], Sequence[Any], str]],
    *,
    x: str,
    y: str,
    height: int = 200,
    step: bool = False,
    ends: tuple[float, float] | None = None,
    marks: Sequence[tuple[str, Sequence[float], Sequence[Any], str]] = (),
) -> Any:
    """Draw series over time: (name, x, y, colour) each. ``ends``: of the x axis. ``marks``: points
    that no line joins, each series with a symbol of its own."""
    made = empty_figure(height)
    for name, positions, values, colour in series:
        made.add_trace(
            go.Scatter(
                x=list(positions),
                y=list(values),
                name=escape_markup(name),
                mode="lines+markers" if len(values) < FEW_POINTS else "lines",
                marker={"size": 5},
                line={"width": 1.5, "color": colour, "shape": "hv" if step else "linear"},
                hovertemplate="%{y:,.4g}<extra>" + escape_markup(name) + "</extra>",
            )
        )
    for symbol, (name, positions, values, colour) in zip(cycle(SYMBOLS), marks, strict=False):
        made.add_trace(
            go.Scatter(
                x=list(positions),
                y=list(values),
                name=name,
                mode="markers",
                marker={"size": 6, "color": colour, "symbol": symbol},
                hovertemplate="%{y:,.4g}<extra>" + name + "</extra>",
            )
        )
    made.update_xaxes(title=x or None, range=ends)
    made.update_yaxes(title=y or None, rangemode="tozero", nticks=5)
    made.update_layout(
        showlegend=len(made.data) > 1,
        hovermode="x unified",
        margin={"t": 34 if len(made.data) > 1 else 12},
    )
    return made


def rank_step_heatmap(
    values: Sequence[Sequence[float | None]], rows: Sequence[str], columns: Sequence[str], unit: str
) -> Any:
    """Draw a value per rank and step; what is missing stays blank."""
    made = empty_figure(max(150, 60 + 26 * len(rows)))
    made.add_trace(
        go.Heatmap(
            z=values,
            x=[escape_markup(c) for c in columns],
            y=[escape_markup(r) for r in rows],
            colorscale=[list(stop) for stop in SEQUENTIAL],
            xgap=2,
            ygap=2,
            colorbar={"title": {"text": unit, "side": "right"}, "thickness": 10, "outlinewidth": 0},
            hovertemplate=f"%{{y}}, %{{x}}: %{{z:,.2f}} {unit}<extra></extra>",
            texttemplate="%{z:,.1f}" if len(rows) * len(columns) <= 48 else None,
        )
    )
    made.update_yaxes(autorange="reversed", showgrid=False, type="category")
    made.update_xaxes(showline=False, type="category", nticks=12)
    made.update_layout(margin={"l": 72, "t": 8, "b": 40})
    return made


def escape_markup(text: str) -> str:
    """Escape text for plotly, which reads a few tags: none of it is one."""
    text = clean(text)
    return text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")


FEW_POINTS = 40
"""Number of points of a line below which each is marked: of one alone nothing else is drawn."""
MAX_POINTS = 3_000
"""Number of points of a line: more are not visible, and cost the browser time."""


def downsample(x: Sequence[float], y: Sequence[Any]) -> tuple[list[float], list[Any]]:
    """Return at most ``MAX_POINTS`` points: the lowest and highest value of each stretch, so that
    no spike is lost. Missing values (``None``) stay where a stretch has nothing else."""
    if len(x) <= MAX_POINTS:
        return list(x), list(y)
    size = -(-2 * len(x) // MAX_POINTS)
    indices: list[int] = []
    for start in range(0, len(x), size):
        present = [i for i in range(start, min(start + size, len(x))) if y[i] is not None]
        indices += (
            sorted({min(present, key=y.__getitem__), max(present, key=y.__getitem__)})
            if present
            else [start]
        )
    return [x[i] for i in indices], [y[i] for i in indices]


def rank_class_heatmap(
    values: Sequence[Sequence[float | None]],
    about: Sequence[Sequence[str | None]],
    keys: Sequence[Sequence[str | None]],
    labels: Sequence[str],
    ranks: Sequence[str] | None,
    scale: float,
    height: int,
    effects: Collection[int] = (),
) -> Any:
    """Draw ranks × classes, in strips below each other: less than the median blue, more red; rows
    in ``effects`` in greys.

    ``values``: ms apart from the median, at most ``scale``. ``about``: each cell in words.
    ``ranks``: names of the columns, where there is one strip. ``keys``: of each cell, which a click
    finds as the point's text (Dash hands on no other)."""
    made = empty_figure(height)
    blank = [None] * max(map(len, values))
    for colours, is_grey in ((DIVERGING, False), (GREYS, True)):
        made.add_trace(
            go.Heatmap(
                z=[row if at in effects else blank for at, row in enumerate(values)]
                if is_grey
                else [blank if at in effects else row for at, row in enumerate(values)],
                y=list(range(len(labels))),
                customdata=about,
                text=keys,
                zmin=-scale,
                zmax=scale,
                colorscale=[list(stop) for stop in colours],
                xgap=0.5,
                ygap=1,
                hoverongaps=False,
                showscale=not is_grey,
                colorbar={
                    "title": {"text": "ms", "side": "right"}, "thickness": 10, "outlinewidth": 0
                },
                hovertemplate="%{customdata}<extra></extra>",
            )
        )  # fmt: skip
    made.update_yaxes(
        autorange="reversed",
        showgrid=False,
        showline=False,
        tickvals=[place for place, label in enumerate(labels) if label],
        ticktext=[escape_markup(label) for label in labels if label],
        tickfont={"size": 11},
    )
    made.update_yaxes(automargin=True)
    made.update_xaxes(showline=False, showticklabels=ranks is not None, title="")
    if ranks is not None:
        made.update_traces(x=list(ranks))
        made.update_xaxes(type="category", nticks=16, title="rank", tickangle=0)
    made.update_layout(margin={"l": 8, "t": 8, "b": 44 if ranks else 8})
    return made
