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
from advisor.dashboard import components as ui
from advisor.dashboard import page_view, plotly_figures, theme
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

_MAX_ROWS = 2_000
"""Number of kernels in the grid. A remark below counts the others."""
_MAX_OPERATORS = 500


def has_content(view: PageView) -> bool:
    """Return whether operators or kernels were recorded."""
    return view.entry.loaded is None or not view.analysis.record_only


def layout(**query: object) -> Any:
    """Build the page."""
    view = page_view.view(**query)
    a = view.analysis
    heading = ui.page_heading("Kernels and ops", _lead_text(a), ui.rank_selector(view, "/kernels"))
    if a.device_id is None:
        reason = "The trace has no GPU work, so kernels, occupancy and rooflines are not measured."
        remedy = record_gpu_work(a.trace.meta)
        return ui.page(
            heading,
            ui.empty_state("No kernels", reason, remedy),
            *_layer_cards(view),
            _tree_card(view),
            _operator_card(view),
        )
    return ui.page(
        heading,
        _family_card(a),
        *map(ui.draw_section, auxiliary_sections.build_kernel_sections(view.loaded.report)),
        _kernel_card(view),
        _rate_card(view),
        _roofline_card(view),
        *_layer_cards(view),
        _tree_card(view),
        _operator_card(view),
    )


def precompute(loaded: LoadedRun) -> None:
    """Compute the tables of the reported rank."""
    a = loaded.main
    loaded.get_or_compute(("op_tree", None), lambda: op_tree(a))
    loaded.get_or_compute(("op_rows", None), lambda: operator_rows(a))
    if a.device_id is not None:
        loaded.get_or_compute(("kernel_rows", None), lambda: kernel_rows(a))
        loaded.get_or_compute(("rate_rows", None), lambda: rate_rows(a))


def _lead_text(a: Analysis) -> str:
    """Write the number of kernels, launched and distinct."""
    if a.device_id is None:
        return "Operators by host time."
    per_unit = "per step" if a.steps.source != "whole trace" else "in the recording"
    kernels = a.hot_kernels
    total = t.format_count(float(kernels["count"].sum()) / a.step_count)
    return f"{total} kernels {per_unit}, {t.format_count(kernels.height)} distinct."


def _family_card(a: Analysis) -> Any:
    """Build the card of GPU work by kernel family."""
    families = list_families(a)
    largest = max((family.ns for family in families), default=0) or 1
    rows = [
        [
            ui.element(
                "Span", ui.swatch(theme.color_of("kernels", family.name)), family.name, cls="nowrap"
            ),
            ui.bar_cell(family.ns / largest, theme.color_of("kernels", family.name)),
            t.format_duration(family.ns),
            t.format_share(family.share),
            t.format_count(family.count),
        ]
        for family in families
        if family.ns > 0
    ]
    header = ["Family", "", "Time per step", "Share of GPU work", "Launches per step"]
    return ui.card(
        "By family",
        ui.table(header, rows, number_columns=(2, 3, 4), caption=GPU_WORK_CAPTION, stacked=True),
    )


GPU_WORK_CAPTION = "GPU work: the summed durations of kernels, copies and memsets"


def _device_work_ns(a: Analysis) -> int:
    """Return the sum of all GPU work, ns: the denominator of this page's shares."""
    return max(int(a.families["dur"].sum()), 1)


def _rate_formatter(scale: float) -> Formatter:
    """Return a formatter of rates in units of ``scale`` FLOP/s or bytes/s."""

    def format_rate(value: float | None) -> str:
        if value is None:
            return t.NOT_MEASURED
        return "<0.01" if 0 < value / scale < 0.01 else t.format_number(value / scale)

    return format_rate


_format_tflops, _format_gbps = _rate_formatter(1e12), _rate_formatter(1e9)
KERNEL_COLUMNS = (
    Column("name", "Kernel", flex=2, is_name=True),
    Column("family", "Family", width=126),
    duration_column("time", "Time per step", 78),
    share_column("share", "Share", 62),
    Column("count", "Launches per step", width=90, number_format=t.format_count),
    share_column("occupancy", "Occupancy", 92),
    Column("flops", "TFLOP/s", width=74, number_format=_format_tflops, csv_title="FLOP/s"),
    Column("bytes", "GB/s", width=66, number_format=_format_gbps, csv_title="Bytes/s"),
    share_column("roofline", "Of roofline", 78),
    Column("tensor", "Tensor", width=66),
    Column("op", "Launched by", flex=1, is_name=True),
)


def kernel_rows(a: Analysis) -> list[dict[str, Any]]:
    """Build the rows of the grid of kernels."""
    kernels = a.hot_kernels.head(_MAX_ROWS).select(
        pl.col("name", "family").cast(pl.String),
        "roofline",
        count=pl.col("count") / a.step_count,
        time=pl.col("dur") / a.step_count,
        share=pl.col("dur") / _device_work_ns(a),
        occupancy=pl.col("occupancy") / 100,
        flops="flops_per_s",
        bytes="bytes_per_s",
        tensor=pl.col("tensor_core").replace_strict({True: "yes", False: "no"}, default=None),
        op=pl.col("op_name").cast(pl.String),
    )
    return grid_rows(KERNEL_COLUMNS, kernels.iter_rows(named=True))


def _kernel_card(view: PageView) -> Any:
    """Build the card of the grid of kernels."""
    a = view.analysis
    rows = view.loaded.get_or_compute(("kernel_rows", view.rank), lambda: kernel_rows(a))
    unlisted = a.hot_kernels.height - len(rows)
    aside = "select a kernel to find it on the timeline; – means not measured"
    return ui.card(
        "Kernels",
        grid("kernel-grid", KERNEL_COLUMNS, rows, height=460, label="Kernels"),
        ui.remark(f"{t.format_count(unlisted)} smaller kernels are not listed.")
        if unlisted
        else None,
        ui.element("Div", id="kernel-detail", aria_live="polite"),
        aside=aside,
    )


def _roofline_card(view: PageView) -> Any:
    """Build the card of the roofline, or the reason why there is none."""
    a = view.analysis
    measured = a.hot_kernels.filter((pl.col("flops_per_s") > 0) & (pl.col("bytes_per_s") > 0)).head(
        400
    )
    if a.hardware is None:
        reason = (
            f"advisor has no peak figures for {labels.clean(a.device.name)}."
            if a.device is not None and a.device.name
            else "The trace does not name its GPU."
        )
        return ui.empty_state("No roofline", reason)
    if measured.is_empty():
        return ui.empty_state(
            "No roofline",
            "FLOPs and bytes of a kernel need the input shapes of its operator.",
            record_with("record_shapes=True", a.trace.meta),
        )
    share = float(measured["dur"].sum()) / _device_work_ns(a)
    description = (
        f"{t.count_noun(measured.height, 'kernel')}, {t.format_share(share)} of GPU work, by "
        "arithmetic "
        f"intensity and FLOP rate, below the roofline of {a.hardware.name}."
    )
    return ui.card(
        "Roofline",
        ui.figure(
            plotly_figures.roofline(measured, a.hardware, _device_work_ns(a)),
            "roofline",
            height=420,
            narrow_height=600,
            has_table=True,
            description=f"{description} The table of kernels has the numbers.",
        ),
        ui.remark(description + " Area shows time. Peaks are the vendor's figures."),
    )


def _layer_cards(view: PageView) -> list[Any]:
    """Build the cards of ``advisor analyze --by layer``, or none if no module was recorded."""
    a = view.analysis
    layer_report = view.loaded.get_or_compute(("layers", view.rank), lambda: report_layers(a))
    if layer_report is None:
        return []
    return [
        ui.draw_section(section)
        for section in layers.sections(layer_report, a.per, a.steps.used.height)
    ]


def _tree_card(view: PageView) -> Any:
    """Build the card of time by module and operator, as an icicle chart."""
    a = view.analysis
    tree = view.loaded.get_or_compute(("op_tree", view.rank), lambda: op_tree(a))
    per_step = tree.with_columns((pl.col("ns") / a.step_count).round().cast(pl.Int64))
    if tree.is_empty():
        return ui.empty_state(
            "No modules or operators",
            "The trace has no operators, so launches cannot be attributed.",
            record_with(ACTIVITIES, a.trace.meta),
        )
    time_kind = "GPU time" if a.device_id is not None else "host time"
    amount = f"{time_kind} {t.format_per(a.per)}"
    description = f"Modules and operators by {amount}, outermost on top. Click one to zoom in."
    description += " Violet: modules and ranges, darker for the backward pass. Green: operators."
    if tree["name"].str.starts_with(KERNEL).any():
        description += " Blue: kernels, if an operator launches several."
    return ui.card(
        f"{t.upper_first(time_kind)} by module and operator",
        ui.figure(
            plotly_figures.module_tree_figure(per_step, f"all {time_kind}"),
            "modules-and-ops",
            height=460,
            has_table=True,
            description=f"{description} The table of operators has the numbers.",
        ),
        ui.remark(description),
    )


OPERATOR_COLUMNS = (
    Column("name", "Operator", flex=3, is_name=True),
    Column("count", "Calls", width=100, number_format=t.format_count),
    duration_column("device", "GPU time per step", 160),
    duration_column("host", "Self host time per step", 176),
)


def operator_rows(a: Analysis) -> list[dict[str, Any]]:
    """Build the rows of the grid of operators."""
    operators = (
        op_table(a).head(_MAX_OPERATORS).with_columns(pl.col("device", "host") / a.step_count)
    )
    return grid_rows(OPERATOR_COLUMNS, operators.iter_rows(named=True))


def _operator_card(view: PageView) -> Any:
    """Build the card of the grid of operators."""
    a = view.analysis
    rows = view.loaded.get_or_compute(("op_rows", view.rank), lambda: operator_rows(a))
    if not rows:
        return None
    # without GPU work, a column of zeros would look measured
    has_device_work = a.trace.gpu.height > 0
    columns = (
        OPERATOR_COLUMNS
        if has_device_work
        else tuple(column for column in OPERATOR_COLUMNS if column.field != "device")
    )
    note = "Self host time excludes the operators called."
    if has_device_work:
        note = f"GPU time counts kernels that the operator launches itself. {note}"
    return ui.card(
        "Operators", grid("op-grid", columns, rows, height=380, label="Operators"), ui.remark(note)
    )


# -- one kernel ---------------------------------------------------------------------------------


def register(app: dash.Dash, session: DashboardSession) -> None:
    """Register the callbacks: search, and the details of the selected kernel."""
    register_search(app, "kernel-grid")
    register_search(app, RATE_GRID_ID)
    register_search(app, "op-grid")
    app.clientside_callback(
        ClientsideFunction("advisor", "scrollToKernel"),
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
        return _kernel_detail(view, int(number))


def _kernel_detail(view: PageView, row: int) -> Any:
    """Build the details of the kernel in a row: its full name, launch and longest instance."""
    a = view.analysis
    if row >= min(a.hot_kernels.height, _MAX_ROWS):
        return None
    name = a.hot_kernels["name"][row]
    instances = a.trace.gpu.filter(pl.Series(a.in_window)).filter(pl.col("name") == name)
    if instances.is_empty():
        return None
    longest = instances.sort("dur", descending=True).row(0, named=True)
    margin = max(longest["dur"], 20_000)
    href = view.href(
        "/timeline",
        x0=max(0, longest["ts"] - margin),
        x1=longest["ts"] + longest["dur"] + margin,
        rank=view.rank,
        focus=longest["ts"],
    )
    facts = [
        ("Name", ui.element("Code", labels.clean(name))),
        ("Longest", t.format_duration(longest["dur"])),
        ("Grid", _launch_size(longest)),
        ("Stream", str(longest["stream"])),
    ]
    fused_kernel = a.fused_kernels.get(name)
    if fused_kernel is not None:
        facts.append(("Fused operators", ", ".join(map(labels.clean, fused_kernel.operators))))
        lines = "; ".join(
            f"{t.shorten_path(line.file or '', 60)}:{line.line}" for line in fused_kernel.lines
        )
        facts += [("From", ui.element("Code", lines))] if lines else []
    location = a.location(longest["launch"])
    if location[0] is not None:
        facts.append(
            ("Line", ui.element("Code", f"{t.shorten_path(location[0], 90)}:{location[1]}"))
        )
    return ui.element(
        "Div",
        ui.fact_list(facts),
        ui.element(
            "Div",
            ui.link(
                ui.icon("show"), "Longest instance on the timeline", href=href, cls="button main"
            ),
            cls="actions",
        ),
        cls="detail",
    )


def _launch_size(row: dict[str, Any]) -> str:
    """Write the launch grid of a kernel."""
    if row["blocks"] is None:
        return t.NOT_MEASURED
    return f"{t.format_count(row['blocks'])} blocks of {t.format_count(row['threads'])} threads"


RATE_GRID_ID = "rate-grid"
MAX_RATES = 500

RATE_COLUMNS = (
    Column("name", "Operator", flex=2, is_name=True),
    Column("shapes", "Shapes", flex=2, is_name=True),
    Column("dtype", "dtype", width=66),
    Column("calls", "Calls", width=58, number_format=t.format_count, csv_title="Calls per step"),
    duration_column("ns", "Time per step", 80),
    Column("bound", "Bound", width=86),
    Column("flops_per_s", "TFLOP/s", width=74, number_format=_format_tflops, csv_title="FLOP/s"),
    Column("bytes_per_s", "GB/s", width=70, number_format=_format_gbps, csv_title="Bytes/s"),
    share_column("efficiency", "Of attainable", 86),
    duration_column("saved_ns", "Saving per step", 80),
)


def rate_rows(a: Analysis) -> list[dict[str, Any]]:
    """Build the rows of the grid of operators by shape."""
    rows = [asdict(rate) for rate in rooflines(a, MAX_RATES)]
    for row in rows:
        row["name"], row["shapes"] = row["name"] or row["kernel"], row["shapes"] or None
        row["bound"] = None if row["bound"] == "unknown" else row["bound"]
    return grid_rows(RATE_COLUMNS, rows)


def _rate_card(view: PageView) -> Any:
    """Build the card of operators by shape."""
    a = view.analysis
    rows = view.loaded.get_or_compute(("rate_rows", view.rank), lambda: rate_rows(a))
    if not rows:
        return ui.empty_state("No operators by shape", "These steps run no compute kernel.")
    return ui.card(
        "Operators by shape",
        grid(RATE_GRID_ID, RATE_COLUMNS, rows, height=420, label="Operators by shape"),
        ui.remark(_describe_rates(a)),
        aside="compared with rates measured on this GPU model; – means not measured",
    )


def _describe_rates(a: Analysis) -> str:
    """Describe the attainable rates and their sources."""
    sources = []
    for rate in list_attainable_rates(a):
        is_memory = rate.of == "memory"
        unit = "GB/s" if is_memory else "TFLOP/s"
        amount = f"{t.format_number(rate.rate / (1e9 if is_memory else 1e12))} {unit}"
        source = "estimated from similar GPUs" if rate.source is None else labels.clean(rate.source)
        sources.append(f"{rate.of} {amount} ({source})")
    rates = (
        f"Attainable: {', '.join(sources)}. "
        if sources
        else "The attainable rates of this GPU are unknown. "
    )
    return (
        f"{rates}Launch-bound: starting the kernel takes longer than its work, so no rate applies."
    )
