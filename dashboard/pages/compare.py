"""Compare: two runs side by side, with the predicted and the measured gain of each fix."""

import re
from typing import Any

import plotly.graph_objects as go

from advisor.advise import report_charts
from advisor.compare import comparison_text
from advisor.compare.comparison import Comparison, Distribution, FindingChange
from advisor.compare.comparison_text import ComparedFigure, per_suffix
from advisor.core import labels
from advisor.core import text as t
from advisor.core.finding import unit_of
from advisor.dashboard import components as ui
from advisor.dashboard import page_view, plotly_figures, theme
from advisor.dashboard.loaded_runs import OpenedPath
from advisor.dashboard.page_view import PageView
from advisor.render.documents.comparison import predicted_gain

BEFORE_COLOR, AFTER_COLOR = "#9a9aa5", theme.ACCENT
BEFORE_BAR_COLOR, AFTER_BAR_COLOR = BEFORE_COLOR, "var(--accent)"
"""Colors of the two bars of a row (assets/parts.css)."""
MAX_WORK_LINES = 20
MAX_OPERATOR_LENGTH = 72
"""Length limit of an operator with its shapes, characters."""
BADGE_CLASSES = {"Slower": "failed", "Faster": "healthy"}
CHANGE_CLASSES = {"fixed": "healthy", "new": "failed", "remaining": "bottlenecks"}


def has_content(view: PageView) -> bool:
    """Return whether two runs are open, or a folder with several runs."""
    entries = view.session.entries
    others = bool(view.session.folder) and len(entries) > 1 and entries[0].job is None
    return bool(view.session.pairs) or others


def layout(other: object = None, **query: object) -> Any:
    """Build the page. ``other``: key of the run that is compared with the first one."""
    view = page_view.view(**query)
    pairs = view.session.pairs
    if not pairs and has_content(view):
        return ui.empty_page(
            "Compare",
            "No run is compared yet",
            "Runs that have been read are compared with the newest run.",
            "Open a second run on the Runs page.",
        )
    if not pairs:
        return ui.empty_page(
            "Compare",
            "One run is open",
            "A comparison needs two runs.",
            "Start advisor dashboard BEFORE AFTER, or use advisor compare.",
        )
    first = view.session.entries[0].key
    by_key = {before if after == first else after: (before, after) for before, after in pairs}
    # the selected run, unless it is the first one, with which all others are compared
    requested = str(other) if str(other) in by_key else view.entry.key
    chosen = requested if requested in by_key else next(iter(by_key))
    before, after = map(view.session.entry, by_key[chosen])
    comparison = view.session.comparison(before.key, after.key)
    run_selector = _run_selector(view, list(by_key), chosen)
    if comparison is None or isinstance(comparison, str):
        reason = (
            labels.clean(comparison)
            if comparison
            else "The comparison is being computed. Reload in a moment."
        )
        title = "These runs cannot be compared" if comparison else "Comparing the runs"
        return ui.page(
            ui.page_heading("Compare", None, run_selector), ui.empty_state(title, reason)
        )
    return ui.page(
        _heading(comparison, run_selector),
        ui.banner(comparison.limits),
        _step_card(comparison),
        _breakdown_card(comparison, before, after),
        _finding_card(comparison),
        *map(ui.draw_block, predicted_gain(comparison)),
        _work_card(comparison),
    )


def _run_selector(view: PageView, keys: list[str], chosen: str) -> Any:
    """Build the links to the runs to compare with, or ``None`` for one run."""
    if len(keys) < 2:
        return None
    entries = [view.session.entry(key) for key in keys]
    names = labels.distinct_labels((entry.name for entry in entries), 40)
    return ui.choice_links(
        "With",
        [
            (name, view.href("/compare", other=entry.key), entry.key == chosen)
            for entry, name in zip(entries, names, strict=True)
        ],
    )


def _heading(comparison: Comparison, run_selector: Any) -> Any:
    """Build the heading: badge, verdict, both runs, and the run selector."""
    badge = comparison_text.write_badge(comparison)
    sides = [
        ui.element("Span", ui.element("B", label), " ", labels.clean(" · ".join(parts)))
        for label, parts in comparison_text.describe_sides(comparison)
    ]
    return ui.element(
        "Div",
        ui.element("Span", badge, cls=f"pill {BADGE_CLASSES.get(badge, '')}"),
        *ui.verdict_heading(comparison.verdict),
        ui.element("Div", *sides, cls="scope"),
        run_selector,
        cls="page-head",
    )


def _step_card(comparison: Comparison) -> Any:
    """Build the card of step times, or the reason why they are not compared."""
    if comparison_text.is_of_whole_recordings(comparison):
        return None  # the limits say so, and what to do
    if comparison.steps.before is None or comparison.steps.after is None:
        return ui.empty_state("Step times are not compared", labels.clean(comparison.steps.reason))
    notes = [
        *comparison_text.step_notes(comparison.steps),
        *comparison_text.interval_method(comparison.steps),
    ]
    notes = [labels.clean(note) for note in notes]
    return ui.card(
        "Step times",
        ui.figure(
            _distribution_figure(comparison.steps.before, comparison.steps.after),
            "step-times",
            height=230,
            description="Cumulative share of steps by duration, before and after.",
        ),
        _comparison_table("Step time", comparison_text.step_lines(comparison)),
        *(ui.remark(note) for note in notes),
    )


def _distribution_figure(before: Distribution, after: Distribution) -> Any:
    """Draw both distributions as cumulative shares, which show every step and need no bins."""
    chart = plotly_figures.empty_figure(230)
    for name, side, color in (("before", before, BEFORE_COLOR), ("after", after, AFTER_COLOR)):
        durations = sorted(side.durations_ns)
        shares = [(i + 1) / len(durations) for i in range(len(durations))]
        x, y = plotly_figures.downsample([ns / 1e6 for ns in durations], shares)
        chart.add_trace(
            go.Scatter(
                x=x,
                y=y,
                name=name,
                mode="lines+markers" if len(durations) < 40 else "lines",
                line={"shape": "hv", "width": 1.8, "color": color},
                marker={"size": 5, "color": color},
                hovertemplate="%{y:.0%} take at most %{x:,.2f} ms<extra>" + name + "</extra>",
            )
        )
    chart.update_xaxes(title="ms per step")
    chart.update_yaxes(title="share of steps", tickformat=".0%", range=[0, 1.04], nticks=5)
    chart.update_layout(showlegend=True, margin={"t": 34})
    return chart


VERDICT_CLASSES = {
    "better": ("better", "better"),
    "worse": ("worse", "worse"),
    "new": ("dim", "new"),
    "gone": ("dim", "gone"),
}
"""CSS class and text of each verdict on a change."""


def _change_cell(line: ComparedFigure) -> Any:
    """Build a cell with a difference: an arrow, the number, and a word such as "better"."""
    if not line.change:
        return ui.element("Span", t.EMPTY_CELL, cls="dim")
    arrow = "▲" if line.change.startswith("+") else "▼"
    css_class, meaning = VERDICT_CLASSES.get(line.verdict, ("dim", ""))
    return ui.element(
        "Span",
        ui.element("Span", arrow, cls="arrow", aria_hidden="true"),
        ui.element("Span", labels.clean(line.change)),
        ui.element("Span", meaning, cls="word") if meaning else None,
        cls=f"change {css_class}",
    )


def _comparison_table(
    title: str, lines: list[ComparedFigure], *, bars: bool = False, caption: str = ""
) -> Any:
    """Build a table of figures before and after.

    ``bars``: also draw both as bars, all on one scale."""
    largest = max(
        (value for line in lines for value in (line.before, line.after) if value), default=0.0
    )
    rows = []
    for line in lines:
        # the same colors as in the bars above and on the other pages
        color = (
            theme.color_of(line.group, line.name) if line.group in theme.COLORS_BY_GROUP else None
        )
        label: Any = line.name if line.group == "kernels" else line.label
        if line.group == "work":
            label = _work_label(line)
        label_cell = ui.element(
            "Span", ui.swatch(color) if color else None, label, cls="nowrap" if color else ""
        )
        bar_cells = [_bar_pair(line, largest)] if bars else []
        rows.append([label_cell, *bar_cells, *line.texts, _change_cell(line)])
    header = [title, *([""] if bars else []), "before", "after", "difference"]
    legend = (
        [ui.swatch(BEFORE_BAR_COLOR), "before ", ui.swatch(AFTER_BAR_COLOR), f"after · {caption}"]
        if bars
        else [caption]
    )
    number_columns = range(len(header) - 3, len(header))
    return ui.table(
        header,
        rows,
        number_columns=number_columns,
        caption=ui.element("Span", *legend),
        stacked=True,
    )


def _work_label(line: ComparedFigure) -> Any:
    """Build the label of device work: an operator above its shapes, or a kernel's name."""
    parts = re.fullmatch(r"(\S+) (\d.*)", line.label)
    if parts is None:
        return ui.abbreviation(line.label, line.name)
    operator, shapes = parts.groups()
    shape_line = ui.element("Span", shapes, cls="sub shapes")
    return ui.element("Span", operator, " ", shape_line, title=line.name, data_full=line.name)


def _bar_pair(line: ComparedFigure, largest: float) -> Any:
    """Build the two bars of a row. ``largest``: value of a full bar."""
    bars = [
        ui.element("I", cls=css_class, style={"width": f"{(value or 0.0) / (largest or 1.0):.4%}"})
        for css_class, value in (("before", line.before), ("after", line.after))
    ]
    return ui.element("Span", *bars, cls="two-bars", aria_hidden="true")


def _breakdown_card(comparison: Comparison, before: OpenedPath, after: OpenedPath) -> Any:
    """Build the card of the step's time by class, before and after."""
    lines = comparison_text.breakdown_lines(comparison)
    longer_ns = max(comparison.before.step_ns, comparison.after.step_ns)
    strips = []
    for name, entry in (("before", before), ("after", after)):
        if entry.loaded is None:
            continue
        report = entry.loaded.report
        bar = report_charts.build_step_bar(report)
        if bar is not None and longer_ns:
            strip = ui.draw_strip(bar.segments, f"The step {name}", thin=True)
            share = report.scope.step_ns / longer_ns
            strips.append(
                ui.element(
                    "Div",
                    ui.element("Span", name, cls="dim"),
                    ui.element(
                        "Div",
                        ui.element("Div", strip, style={"width": f"{share:.4%}"}),
                        cls="track",
                    ),
                    ui.element("Span", t.format_duration(report.scope.step_ns), cls="num"),
                    cls="strip-line",
                )
            )
    units = {unit_of(side.step_source) for side in (comparison.before, comparison.after)}
    unit = t.format_per("step" if units == {"step"} else "recording")
    time_title = "GPU time" if any(line.group == "time" for line in lines) else "Host time"
    groups = [
        (time_title, [line for line in lines if line.group in ("time", "idle", "host")]),
        ("Kernels by family", [line for line in lines if line.group == "kernels"]),
    ]
    figure_lines = [line for line in lines if line.group == "figures"]
    return ui.card(
        "Breakdown",
        ui.element("Div", *strips, cls="strips") if strips else None,
        *(
            _comparison_table(
                title, group_lines, bars=True, caption=f"{unit}, all bars on one scale"
            )
            for title, group_lines in groups
            if group_lines
        ),
        _comparison_table("Figure", figure_lines) if figure_lines else None,
        cls="compared",
    )


def _finding_card(comparison: Comparison) -> Any:
    """Build the card of new, remaining and fixed findings."""
    groups = comparison_text.group_findings(comparison)
    if not groups:
        return ui.empty_state("No findings", "Neither run has findings.")
    sections: list[Any] = []
    for title, items in groups:
        sections.append(
            ui.element(
                "Section",
                ui.element(
                    "Span",
                    f"{title} {len(items)}",
                    cls=f"pill {CHANGE_CLASSES.get(items[0].change, '')}",
                ),
                ui.element(
                    "Ul",
                    *(_finding_item(item, per_suffix(comparison)) for item in items),
                    cls="changes",
                ),
            )
        )
    return ui.card("Findings", ui.element("Div", *sections, cls="stack"))


def _finding_item(item: FindingChange, unit: str) -> Any:
    """Build the list item of a finding."""
    title, *details = (labels.clean(part) for part in comparison_text.describe_finding(item, unit))
    return ui.element(
        "Li",
        ui.element("B", title),
        ui.element("Span", " · ".join(details), cls="dim") if details else None,
    )


def _work_card(comparison: Comparison) -> Any:
    """Build the card of GPU work by operator, before and after."""
    lines = comparison_text.work_lines(comparison, MAX_WORK_LINES, MAX_OPERATOR_LENGTH)
    if not lines:
        return None
    return ui.card(
        "Device work",
        _comparison_table(
            "GPU work", lines, bars=True, caption=f"time / launches{per_suffix(comparison)}"
        ),
        aside="matched by operator and shape, also across GPUs",
        cls="compared",
    )
