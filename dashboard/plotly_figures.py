"""Plotly figures, with units on the axes, readable on a light and on a dark page.

On the page assets/parts.css sets the colors of text and lines. The colors set here are those of a
saved PNG, on white."""

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

TEXT_COLOR, GRID_COLOR = "#4a4a52", "#e6e5e1"
FONT = 'Inter, -apple-system, "Segoe UI", Roboto, "DejaVu Sans", sans-serif'
LINE_COLOR = "#6366d4"
"""Color of lines that stand for no class of time."""
NO_COMMIT = "no commit"
SEQUENTIAL_SCALE = ((0.0, "#eceaf9"), (0.5, "#9d97e0"), (1.0, "#4a3fb0"))
DIVERGING_SCALE = (
    (0.0, "#1f5f9e"),
    (0.25, "#8fb8de"),
    (0.5, "#f3f2ef"),
    (0.75, "#eda184"),
    (1.0, "#a83214"),
)
GRAY_SCALE = ((0.0, "#f3f2ef"), (1.0, "#62626b"))
MAX_RATE_RATIO = 1e5
"""Ratio of the highest roof to the lowest rate that a roofline shows."""


def empty_figure(height: int, **layout: Any) -> Any:
    """Build a figure with the layout and axes that all figures share."""
    figure = go.Figure()
    figure.update_layout(
        template="none",
        height=height,
        margin={"l": 64, "r": 16, "t": 16, "b": 48},
        font={"family": FONT, "size": 12.5, "color": TEXT_COLOR},
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
    axis: dict[str, Any] = {"gridcolor": GRID_COLOR, "zeroline": False, "ticks": ""}
    axis |= {"linecolor": "#cfcec8", "title": {"standoff": 8, "font": {"size": 12.5}}}
    figure.update_xaxes(**axis, showgrid=False, showline=True)
    figure.update_yaxes(**axis)
    return figure


MAX_LABELS_LENGTH = 40
"""Length of all names on the axis of runs, characters, which fits a narrow window."""


def run_history(names: Sequence[str], values: Sequence[float], details: Sequence[str]) -> Any:
    """Draw the step time of runs, in their order.

    ``values``: ms. ``details``: a line for each run, which begins with its commit."""
    figure = empty_figure(280)
    figure.add_trace(
        go.Scatter(
            x=list(range(len(names))),
            y=list(values),
            mode="lines+markers",
            line={"color": LINE_COLOR, "width": 2},
            marker={"size": 8},
            customdata=[
                [escape_markup(name), line] for name, line in zip(names, details, strict=True)
            ],
            hovertemplate="%{customdata[0]}<br>%{y:.4g} ms<br>%{customdata[1]}<extra></extra>",
        )
    )
    label_step = -(-len(names) // 4)
    label_positions = list(range(0, len(names), label_step))
    room = MAX_LABELS_LENGTH // len(label_positions)
    labels = [
        escape_markup(shorten(name, room)) if line.startswith(NO_COMMIT) else line.partition(" ")[0]
        for name, line in zip(names, details, strict=True)
    ]
    figure.update_xaxes(
        tickvals=label_positions, ticktext=[labels[i] for i in label_positions], tickangle=0
    )
    figure.update_yaxes(title_text="step, ms", rangemode="tozero")
    return figure


# -- kernels ------------------------------------------------------------------------------------


def roofline(kernels: pl.DataFrame, hardware: GpuSpec, work_ns: int) -> Any:
    """Draw kernels by arithmetic intensity and rate, under the device's roofs; area is time.

    ``kernels``: rows of ``Analysis.hot_kernels`` with both rates known. ``work_ns``: all GPU work.
    """
    figure = empty_figure(420)
    intensity = (kernels["flops_per_s"] / kernels["bytes_per_s"]).to_list()
    rates = (kernels["flops_per_s"] / 1e12).to_list()
    low = 10 ** math.floor(math.log10(max(min([*intensity, 1.0]), 1e-3)))
    # one more decade, for the labels of the roofs
    high = 10 ** (math.ceil(math.log10(max([*intensity, 1e3]))) + 1)
    top = max([peak for name in ROOFS if (peak := hardware.peak(name))], default=1e12) / 1e12
    bottom = max(min([rate for rate in rates if rate > 0], default=0.01), top / MAX_RATE_RATIO)
    bottom = 10 ** math.floor(math.log10(bottom))
    _add_roofs(figure, hardware, low, high, bottom * 1e12)
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
        figure.add_trace(
            go.Scatter(
                x=[p[0] for p in points],
                y=[p[1] for p in points],
                name=family,
                mode="markers",
                marker={
                    "size": [6 + 30 * math.sqrt(p[4] / largest) for p in points],
                    "color": theme.color_of("kernels", family),
                    "symbol": symbol,  # neighboring families have similar colors
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
    figure.update_xaxes(
        type="log",
        range=[math.log10(low), math.log10(high)],
        showgrid=True,
        dtick=2 if high / low > 1e5 else 1,  # a phone has no room for a label per decade
        exponentformat="power",
        title="FLOP per byte moved",
    )
    figure.update_yaxes(
        type="log",
        range=[math.log10(bottom), math.log10(top) + 0.35],
        dtick=1,
        exponentformat="power",
        title="TFLOP/s",
    )
    figure.update_layout(showlegend=True, margin={"t": 44})
    return figure


ROOFS = ("fp64", "fp32", "tf32", "fp16", "bf16", "fp8", "int8")


def _add_roofs(figure: Any, hardware: GpuSpec, low: float, high: float, bottom: float) -> None:
    """Draw the memory roof, and a flat roof for each distinct peak rate of the device.

    ``low``, ``high``: ends of the x axis, FLOP/byte. ``bottom``: start of the y axis, FLOP/s."""
    peaks: dict[float, list[str]] = {}
    for name in ROOFS:
        if name != "int8" and (peak := hardware.peak(name)):
            peaks.setdefault(peak, []).append(name)
    bandwidth = hardware.bandwidth
    top = max(peaks, default=bandwidth * high)
    ridge = min(top / bandwidth, high)
    _add_roof(figure, [low, ridge], [low * bandwidth, ridge * bandwidth])
    start = max(low, bottom / bandwidth) * 10**LABEL_DECADES  # below the roof, and above the axis
    figure.add_annotation(
        **_ROOF_LABEL | {"yanchor": "top"},
        x=math.log10(start),
        y=math.log10(start * bandwidth / 1e12),
        xanchor="left",
        text=f"{t.format_value(bandwidth, 'B/s')}",
        xshift=6,
    )
    labels: list[tuple[float, list[str]]] = []  # by the highest roof of each label
    nearest = math.inf
    for peak, names in sorted(peaks.items(), reverse=True):
        _add_roof(figure, [peak / bandwidth, high], [peak, peak])
        text = f"{', '.join(names)} {t.format_number(peak / 1e12)}"
        if math.log10(nearest / peak) < LABEL_DECADES:
            labels[-1][1].append(text)
        else:
            labels.append((peak, [text]))
        nearest = peak
    for highest, texts in labels:
        figure.add_annotation(
            **_ROOF_LABEL,
            x=math.log10(high),
            y=math.log10(highest / 1e12),
            xanchor="right",
            text=" · ".join(texts),
        )


SYMBOLS = ("circle", "square", "diamond", "triangle-up", "cross", "pentagon", "star")
LABEL_DECADES = 0.27
"""Distance of two roofs, in decades, below which they share a label."""
_ROOF_LABEL: dict[str, Any] = {"yanchor": "bottom", "showarrow": False, "font": {"size": 11.5}}


def _add_roof(figure: Any, intensity: list[float], flops_per_s: list[float]) -> None:
    """Add one line of the roofline."""
    figure.add_trace(
        go.Scatter(
            x=intensity,
            y=[rate / 1e12 for rate in flops_per_s],
            mode="lines",
            line={"color": "#8f8f99", "width": 1.4},
            hoverinfo="skip",
            showlegend=False,
        )
    )


def module_tree_figure(tree: pl.DataFrame, root: str) -> Any:
    """Draw the tree of modules and operators (``op_tree.op_tree``), outermost on top."""
    figure = empty_figure(460)
    total = int(tree.filter(pl.col("parent").is_null())["ns"].sum())
    ids = [str(node) for node in tree["node"]]
    parents = ["all" if parent is None else str(parent) for parent in tree["parent"]]
    values = tree["ns"].to_list()
    full_names = [escape_markup(shorten(clean(name), 90)) for name in tree["name"]]
    names = [
        escape_markup(shorten(clean(_strip_prefix(name)), max(9, int(ns / max(total, 1) * 190))))
        for name, ns in zip(tree["name"], values, strict=True)
    ]
    figure.add_trace(
        go.Icicle(
            ids=["all", *ids],
            parents=["", *parents],
            labels=[root, *names],
            values=_node_areas(tree, total),
            branchvalues="total",
            sort=False,
            tiling={"orientation": "v", "pad": 1},
            marker={"colors": ["#dedcf6", *(_node_color(name) for name in tree["name"])]},
            textfont={"size": 12, "color": "#1c1c1f"},
            texttemplate="%{label}<br>%{customdata[1]}, %{customdata[2]}",
            customdata=[
                [name, t.format_duration(value), t.format_share(value / max(total, 1))]
                for name, value in zip([root, *full_names], [total, *values], strict=True)
            ],
            hovertemplate="%{customdata[0]}<br>%{customdata[1]}, %{customdata[2]}<extra></extra>",
            pathbar={"visible": True, "thickness": 22},
            maxdepth=9,
            leaf={"opacity": 1},
        )
    )
    figure.update_layout(
        margin={"l": 0, "r": 0, "t": 24, "b": 0}, uniformtext={"minsize": 9, "mode": "hide"}
    )
    return figure


def _node_areas(tree: pl.DataFrame, total: int) -> list[int]:
    """Return the areas of the root and of each node, none smaller than the sum of its children.

    Host ranges may overlap, such as a phase and the loader's own range. Plotly draws nothing if
    children are larger than their parent."""
    areas, child_sums = dict(zip(tree["node"], tree["ns"], strict=True)), Counter[int | None]()
    for node, parent in zip(reversed(tree["node"]), reversed(tree["parent"]), strict=True):
        areas[node] = max(areas[node], child_sums[node])
        child_sums[parent] += areas[node]
    return [max(total, child_sums[None]), *areas.values()]


def _strip_prefix(name: str) -> str:
    """Remove a prefix that most labels share."""
    for prefix in ("autograd::engine::evaluate_function: ", KERNEL):
        name = name.removeprefix(prefix)
    return name.strip("# ")


def _node_color(name: str) -> str:
    """Return a pale color for a kernel, operator, backward pass, module or range."""
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
    x_title: str,
    y_title: str,
    height: int = 200,
    is_step: bool = False,
    x_range: tuple[float, float] | None = None,
    point_series: Sequence[tuple[str, Sequence[float], Sequence[Any], str]] = (),
) -> Any:
    """Draw series as lines: (name, x, y, color) each.

    ``x_range``: ends of the x axis. ``point_series``: series drawn as points without a line, each
    with its own symbol. ``is_step``: each value holds until the next one."""
    figure = empty_figure(height)
    for name, positions, values, color in series:
        figure.add_trace(
            go.Scatter(
                x=list(positions),
                y=list(values),
                name=escape_markup(name),
                mode="lines+markers" if len(values) < MAX_MARKED_POINTS else "lines",
                marker={"size": 5},
                line={"width": 1.5, "color": color, "shape": "hv" if is_step else "linear"},
                hovertemplate="%{y:,.4g}<extra>" + escape_markup(name) + "</extra>",
            )
        )
    for symbol, (name, positions, values, color) in zip(cycle(SYMBOLS), point_series, strict=False):
        figure.add_trace(
            go.Scatter(
                x=list(positions),
                y=list(values),
                name=name,
                mode="markers",
                marker={"size": 6, "color": color, "symbol": symbol},
                hovertemplate="%{y:,.4g}<extra>" + name + "</extra>",
            )
        )
    figure.update_xaxes(title=x_title or None, range=x_range)
    figure.update_yaxes(title=y_title or None, rangemode="tozero", nticks=5)
    figure.update_layout(
        showlegend=len(figure.data) > 1,
        hovermode="x unified",
        margin={"t": 34 if len(figure.data) > 1 else 12},
    )
    return figure


def rank_step_heatmap(
    values: Sequence[Sequence[float | None]], rows: Sequence[str], columns: Sequence[str], unit: str
) -> Any:
    """Draw a value per rank (row) and step (column). Missing values stay blank."""
    figure = empty_figure(max(150, 60 + 26 * len(rows)))
    figure.add_trace(
        go.Heatmap(
            z=values,
            x=[escape_markup(c) for c in columns],
            y=[escape_markup(r) for r in rows],
            colorscale=[list(stop) for stop in SEQUENTIAL_SCALE],
            xgap=2,
            ygap=2,
            colorbar={"title": {"text": unit, "side": "right"}, "thickness": 10, "outlinewidth": 0},
            hovertemplate=f"%{{y}}, %{{x}}: %{{z:,.2f}} {unit}<extra></extra>",
            texttemplate="%{z:,.1f}" if len(rows) * len(columns) <= 48 else None,
        )
    )
    figure.update_yaxes(autorange="reversed", showgrid=False, type="category")
    figure.update_xaxes(showline=False, type="category", nticks=12)
    figure.update_layout(margin={"l": 72, "t": 8, "b": 40})
    return figure


def escape_markup(text: str) -> str:
    """Escape text for plotly, which interprets some HTML tags."""
    text = clean(text)
    return text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")


MAX_MARKED_POINTS = 40
"""Number of points below which each point of a line is marked. A single point has no line."""
MAX_POINTS = 3_000
"""Number of points in a line. More are not visible and slow the browser down."""


def downsample(x: Sequence[float], y: Sequence[Any]) -> tuple[list[float], list[Any]]:
    """Return at most ``MAX_POINTS`` points: the lowest and highest value of each stretch.

    No spike is lost. A stretch with missing values (``None``) only keeps one of them."""
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
    tooltips: Sequence[Sequence[str | None]],
    keys: Sequence[Sequence[str | None]],
    labels: Sequence[str],
    ranks: Sequence[str] | None,
    scale: float,
    height: int,
    effect_rows: Collection[int] = (),
) -> Any:
    """Draw ranks × classes in strips below each other.

    Blue is less than the median, red is more. Rows in ``effect_rows`` are gray.

    ``values``: difference from the median, ms, at most ``scale``. ``tooltips``: text of each cell.
    ``ranks``: names of the columns, if there is one strip. ``keys``: query of each cell. It is the
    text of the point, because Dash passes no other field on to the click's callback."""
    figure = empty_figure(height)
    blank_row = [None] * max(map(len, values))
    for color_scale, is_gray in ((DIVERGING_SCALE, False), (GRAY_SCALE, True)):
        figure.add_trace(
            go.Heatmap(
                z=[
                    row if (index in effect_rows) == is_gray else blank_row
                    for index, row in enumerate(values)
                ],
                y=list(range(len(labels))),
                customdata=tooltips,
                text=keys,
                zmin=-scale,
                zmax=scale,
                colorscale=[list(stop) for stop in color_scale],
                xgap=0.5,
                ygap=1,
                hoverongaps=False,
                showscale=not is_gray,
                colorbar={
                    "title": {"text": "ms", "side": "right"}, "thickness": 10, "outlinewidth": 0
                },
                hovertemplate="%{customdata}<extra></extra>",
            )
        )  # fmt: skip
    figure.update_yaxes(
        autorange="reversed",
        showgrid=False,
        showline=False,
        tickvals=[index for index, label in enumerate(labels) if label],
        ticktext=[escape_markup(label) for label in labels if label],
        tickfont={"size": 11},
    )
    figure.update_yaxes(automargin=True)
    figure.update_xaxes(showline=False, showticklabels=ranks is not None, title="")
    if ranks is not None:
        figure.update_traces(x=[rank.replace(" ", "<br>") for rank in ranks])
        figure.update_xaxes(type="category", nticks=16, title="rank", tickangle=0)
    figure.update_layout(margin={"l": 8, "t": 8, "b": 44 if ranks else 8})
    return figure
