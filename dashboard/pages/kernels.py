"""Kernels and ops: GPU work by kernel and operator, compared with the roofline."""

from typing import Any

import dash
import polars as pl
from dash import ClientsideFunction, Input, Output, State
from msgspec.structs import asdict

from advisor.advise.program_wording import ACTIVITIES, record_gpu_work, record_with
from advisor.advise.report_fields import list_families
from advisor.core import labels
from advisor.core import text as t
from advisor.dashboard import page_view, plotly_figures, theme
from advisor.dashboard.components import (
    bar_cell,
    card,
    draw_section,
    element,
    empty_state,
    fact_list,
    figure,
    head,
    icon,
    link,
    page,
    rank_choice,
    remark,
    swatch,
    table,
)
from advisor.dashboard.grid import (
    Column,
    Formatter,
    duration_column,
    grid,
    grid_rows,
    register_search,
    share_column,
)
from advisor.dashboard.loaded_runs import DashboardSession, LoadedRun
from advisor.dashboard.page_view import PageView, parse_query
from advisor.measure import Analysis
from advisor.measure.host.layers import report_layers
from advisor.measure.host.op_tree import KERNEL, op_table, op_tree
from advisor.measure.host.operators import list_attainable_rates, rooflines
from advisor.render.documents import auxiliary_sections, layers

MAX_ROWS = 2_000
"""Number of kernels in the grid; a line below counts the others."""
MAX_OPS = 500


def has_content(view: PageView) -> bool:
    """Return whether operators or kernels were recorded."""
    return view.entry.loaded is None or not view.analysis.record_only


def layout(**query: object) -> Any:
    view = page_view.view(**query)
    a = view.analysis
    title = head("Kernels and ops", _lead(a), rank_choice(view, "/kernels"))
    if a.device_id is None:
        why = "The trace has no GPU work, so kernels, occupancy and rooflines are not measured."
        how = record_gpu_work(a.trace.meta)
        return page(
            title, empty_state("No kernels", why, how), *_layers(view), _tree(view), _ops(view)
        )
    return page(
        title,
        _families(a),
        *map(draw_section, auxiliary_sections.build_kernel_sections(view.loaded.report)),
        _kernels(view),
        operator_rates(view),
        _roofline(view),
        *_layers(view),
        _tree(view),
        _ops(view),
    )


def warm(loaded: LoadedRun) -> None:
    """Make the tables of the reported rank."""
    a = loaded.main
    loaded.cached(("op_tree", None), lambda: op_tree(a))
    loaded.cached(("op_rows", None), lambda: op_rows(a))
    if a.device_id is not None:
        loaded.cached(("kernel_rows", None), lambda: kernel_rows(a))
        loaded.cached(("rate_rows", None), lambda: rate_rows(a))


def _lead(a: Analysis) -> str:
    if a.device_id is None:
        return "Operators by host time."
    per = "per step" if a.steps.source != "whole trace" else "in the recording"
    kernels = a.hot_kernels
    total = t.format_count(float(kernels["count"].sum()) / a.step_count)
    return f"{total} kernels {per}, {t.format_count(kernels.height)} distinct."


def _families(a: Analysis) -> Any:
    families = list_families(a)
    largest = max((family.ns for family in families), default=0) or 1
    lines = [
        [
            element("Span", swatch(theme.colour_of("kernels", each.name)), each.name, cls="nowrap"),
            bar_cell(each.ns / largest, theme.colour_of("kernels", each.name)),
            t.format_duration(each.ns),
            t.format_share(each.share),
            t.format_count(each.count),
        ]
        for each in families
        if each.ns > 0
    ]
    header = ["Family", "", "Time per step", "Share of GPU work", "Launches per step"]
    return card("By family", table(header, lines, numbers=(2, 3, 4), caption=OF_WORK, stacked=True))


OF_WORK = "GPU work: the summed durations of kernels, copies and memsets"


def _device_work(a: Analysis) -> int:
    """Return the denominator of this page's shares, as in ``Report.families``, ns."""
    return max(int(a.families["dur"].sum()), 1)


def _per(scale: float) -> Formatter:
    """Return a formatter of rates: a number of so many FLOP/s or bytes/s."""

    def write(value: float | None) -> str:
        if value is None:
            return t.NOT_MEASURED
        return "<0.01" if 0 < value / scale < 0.01 else t.format_number(value / scale)

    return write


TFLOPS, GBPS = _per(1e12), _per(1e9)
KERNELS = (
    Column("name", "Kernel", flex=2, names=True),
    Column("family", "Family", width=126),
    duration_column("time", "Time per step", 78),
    share_column("share", "Share", 62),
    Column("count", "Launches per step", width=90, number=t.format_count),
    share_column("occupancy", "Occupancy", 92),
    Column("flops", "TFLOP/s", width=74, number=TFLOPS, csv="FLOP/s"),
    Column("bytes", "GB/s", width=66, number=GBPS, csv="Bytes/s"),
    share_column("roofline", "Of roofline", 78),
    Column("tensor", "Tensor", width=66),
    Column("op", "Launched by", flex=1, names=True),
)


def kernel_rows(a: Analysis) -> list[dict[str, Any]]:
    kernels = a.hot_kernels.head(MAX_ROWS).select(
        pl.col("name", "family").cast(pl.String),
        "roofline",
        count=pl.col("count") / a.step_count,
        time=pl.col("dur") / a.step_count,
        share=pl.col("dur") / _device_work(a),
        occupancy=pl.col("occupancy") / 100,
        flops="flops_per_s",
        bytes="bytes_per_s",
        tensor=pl.col("tensor_core").replace_strict({True: "yes", False: "no"}, default=None),
        op=pl.col("op_name").cast(pl.String),
    )
    return grid_rows(KERNELS, kernels.iter_rows(named=True))


def _kernels(view: PageView) -> Any:
    a = view.analysis
    rows = view.loaded.cached(("kernel_rows", view.rank), lambda: kernel_rows(a))
    more = a.hot_kernels.height - len(rows)
    aside = "select a kernel to find it on the timeline; – means not measured"
    return card(
        "Kernels",
        grid("kernel-grid", KERNELS, rows, height=460, label="Kernels"),
        remark(f"{t.format_count(more)} smaller kernels are not listed.") if more else None,
        element("Div", id="kernel-detail", aria_live="polite"),
        aside=aside,
    )


def _roofline(view: PageView) -> Any:
    a = view.analysis
    known = a.hot_kernels.filter((pl.col("flops_per_s") > 0) & (pl.col("bytes_per_s") > 0)).head(
        400
    )
    if a.hardware is None:
        why = (
            f"advisor has no peak figures for {labels.clean(a.device.name)}."
            if a.device is not None and a.device.name
            else "The trace does not name its GPU."
        )
        return empty_state("No roofline", why)
    if known.is_empty():
        return empty_state(
            "No roofline",
            "FLOPs and bytes of a kernel need the input shapes of its operator.",
            record_with("record_shapes=True", a.trace.meta),
        )
    share = float(known["dur"].sum()) / _device_work(a)
    description = (
        f"{t.count_noun(known.height, 'kernel')}, {t.format_share(share)} of GPU work, by "
        "arithmetic "
        f"intensity and FLOP rate, below the roofline of {a.hardware.name}."
    )
    return card(
        "Roofline",
        figure(
            plotly_figures.roofline(known, a.hardware, _device_work(a)),
            "roofline",
            height=420,
            narrow_height=600,
            has_table=True,
            description=f"{description} The table of kernels has the numbers.",
        ),
        remark(description + " Area shows time. Peaks are the vendor's figures."),
    )


def _layers(view: PageView) -> list[Any]:
    """Build the cards of ``advisor analyze --by layer``; none where no module was recorded."""
    a = view.analysis
    shown = view.loaded.cached(("layers", view.rank), lambda: report_layers(a))
    if shown is None:
        return []
    return [draw_section(each) for each in layers.sections(shown, a.per, a.steps.used.height)]


def _tree(view: PageView) -> Any:
    a = view.analysis
    tree = view.loaded.cached(("op_tree", view.rank), lambda: op_tree(a))
    if tree.is_empty():
        return empty_state(
            "No modules or operators",
            "The trace has no operators, so launches cannot be attributed.",
            record_with(ACTIVITIES, a.trace.meta),
        )
    what = "GPU time" if a.device_id is not None else "host time"
    description = f"Modules and operators by {what}, outermost on top. Click one to zoom in."
    description += " Violet: modules and ranges, darker for the backward pass. Green: operators."
    if tree["name"].str.starts_with(KERNEL).any():
        description += " Blue: kernels of what launches several."
    return card(
        f"{t.upper_first(what)} by module and operator",
        figure(
            plotly_figures.icicle(tree, f"all {what}"),
            "modules-and-ops",
            height=460,
            has_table=True,
            description=f"{description} The table of operators has the numbers.",
        ),
        remark(description),
    )


OPS = (
    Column("name", "Operator", flex=3, names=True),
    Column("count", "Calls", width=100, number=t.format_count),
    duration_column("device", "GPU time per step", 160),
    duration_column("host", "Self host time per step", 176),
)


def op_rows(a: Analysis) -> list[dict[str, Any]]:
    table_ = op_table(a).head(MAX_OPS).with_columns(pl.col("device", "host") / a.step_count)
    return grid_rows(OPS, table_.iter_rows(named=True))


def _ops(view: PageView) -> Any:
    a = view.analysis
    rows = view.loaded.cached(("op_rows", view.rank), lambda: op_rows(a))
    if not rows:
        return None
    # without any, a column of zeros would say that it was measured
    device = a.trace.gpu.height > 0
    columns = OPS if device else tuple(column for column in OPS if column.field != "device")
    text = "Self host time excludes the operators called."
    if device:
        text = f"GPU time counts kernels that the operator launches itself. {text}"
    return card(
        "Operators", grid("op-grid", columns, rows, height=380, label="Operators"), remark(text)
    )


# -- one kernel ---------------------------------------------------------------------------------


def register(app: dash.Dash, session: DashboardSession) -> None:
    """Show the selected kernel below the grid."""

    register_search(app, "kernel-grid")
    register_search(app, RATES)
    register_search(app, "op-grid")
    app.clientside_callback(
        ClientsideFunction("advisor", "reveal"),
        Output("kernel-detail", "title"),
        Input("kernel-detail", "children"),
        prevent_initial_call=True,
    )

    @app.callback(
        Output("kernel-detail", "children"),
        Input("kernel-grid", "selectedRows"),
        State("_pages_location", "search"),
        prevent_initial_call=True,
    )
    def show(selected: object, search: object) -> Any:
        query: dict[str, Any] = parse_query(search)
        view = page_view.view(**query)
        if not isinstance(selected, list) or not selected or not isinstance(selected[0], dict):
            return None
        number = str(selected[0].get("id", ""))
        if view.entry.loaded is None or not number.isdecimal() or len(number) > 6:
            return None
        return _detail(view, int(number))


def _detail(view: PageView, number: int) -> Any:
    """Show the kernel of a row: its full name, and its longest instance on the timeline."""
    a = view.analysis
    if number >= min(a.hot_kernels.height, MAX_ROWS):
        return None
    name = a.hot_kernels["name"][number]
    gpu = a.trace.gpu.filter(pl.Series(a.in_window)).filter(pl.col("name") == name)
    if gpu.is_empty():
        return None
    longest = gpu.sort("dur", descending=True).row(0, named=True)
    margin = max(longest["dur"], 20_000)
    href = view.href(
        "/timeline",
        x0=max(0, longest["ts"] - margin),
        x1=longest["ts"] + longest["dur"] + margin,
        rank=view.rank,
        focus=longest["ts"],
    )
    launch = [
        ("Name", element("Code", labels.clean(name))),
        ("Longest", t.format_duration(longest["dur"])),
        ("Grid", _launched(longest)),
        ("Stream", str(longest["stream"])),
    ]
    fused = a.fused_kernels.get(name)
    if fused is not None:
        launch.append(("Fused operators", ", ".join(map(labels.clean, fused.operators))))
        lines = "; ".join(f"{t.shorten_path(at.file or '', 60)}:{at.line}" for at in fused.lines)
        launch += [("From", element("Code", lines))] if lines else []
    where = a.location(longest["launch"])
    if where[0] is not None:
        launch.append(("Line", element("Code", f"{t.shorten_path(where[0], 90)}:{where[1]}")))
    return element(
        "Div",
        fact_list(launch),
        element(
            "Div",
            link(icon("show"), "Longest instance on the timeline", href=href, cls="button main"),
            cls="actions",
        ),
        cls="detail",
    )


def _launched(row: dict[str, Any]) -> str:
    if row["blocks"] is None:
        return t.NOT_MEASURED
    return f"{t.format_count(row['blocks'])} blocks of {t.format_count(row['threads'])} threads"


RATES = "rate-grid"
MAX_RATES = 500

RATE_COLUMNS = (
    Column("name", "Operator", flex=2, names=True),
    Column("shapes", "Shapes", flex=2, names=True),
    Column("dtype", "dtype", width=66),
    Column("calls", "Calls", width=58, number=t.format_count, csv="Calls per step"),
    duration_column("ns", "Time per step", 80),
    Column("bound", "Bound", width=86),
    Column("flops_per_s", "TFLOP/s", width=74, number=TFLOPS, csv="FLOP/s"),
    Column("bytes_per_s", "GB/s", width=70, number=GBPS, csv="Bytes/s"),
    share_column("efficiency", "Of attainable", 86),
    duration_column("saved_ns", "Saving per step", 80),
)


def rate_rows(a: Analysis) -> list[dict[str, Any]]:
    """Return rows of the grid of operators by shape."""
    rows = [asdict(rate) for rate in rooflines(a, MAX_RATES)]
    for row in rows:
        row["name"], row["shapes"] = row["name"] or row["kernel"], row["shapes"] or None
        row["bound"] = None if row["bound"] == "unknown" else row["bound"]
    return grid_rows(RATE_COLUMNS, rows)


def operator_rates(view: PageView) -> Any:
    """Build the card of operators by shape."""
    a = view.analysis
    rows = view.loaded.cached(("rate_rows", view.rank), lambda: rate_rows(a))
    if not rows:
        return empty_state("No operators by shape", "These steps run no compute kernel.")
    return card(
        "Operators by shape",
        grid(RATES, RATE_COLUMNS, rows, height=420, label="Operators by shape"),
        remark(_rate_note(a)),
        aside="compared with rates measured on such a GPU; – means not measured",
    )


def _rate_note(a: Analysis) -> str:
    """Write the attainable rates and their sources."""
    sources = []
    for rate in list_attainable_rates(a):
        memory = rate.of == "memory"
        unit = "GB/s" if memory else "TFLOP/s"
        shown = f"{t.format_number(rate.rate / (1e9 if memory else 1e12))} {unit}"
        where = "estimated from similar GPUs" if rate.source is None else labels.clean(rate.source)
        sources.append(f"{rate.of} {shown} ({where})")
    rates = (
        f"Attainable: {', '.join(sources)}. "
        if sources
        else "The attainable rates of this GPU are unknown. "
    )
    return (
        f"{rates}Launch-bound: starting the kernel takes longer than its work, so no rate applies."
    )
