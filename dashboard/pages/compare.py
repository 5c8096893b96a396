"""Compare: two runs side by side, with the predicted and the measured gain of each fix."""

from typing import Any

import plotly.graph_objects as go

from advisor.advise import report_charts
from advisor.compare import comparison_text as words
from advisor.compare.comparison import Comparison, Distribution, FindingChange
from advisor.compare.comparison_text import ComparedFigure, per_suffix
from advisor.core import labels
from advisor.core import text as t
from advisor.core.finding import unit_of
from advisor.dashboard import page_view, plotly_figures, theme
from advisor.dashboard.components import (
    abbreviation,
    banner,
    card,
    choices,
    draw_block,
    draw_strip,
    element,
    empty_page,
    empty_state,
    figure,
    head,
    page,
    remark,
    swatch,
    table,
    verdict_head,
)
from advisor.dashboard.loaded_runs import OpenedPath
from advisor.dashboard.page_view import PageView
from advisor.render.documents.comparison import predicted_gain

BEFORE, AFTER = "#9a9aa5", theme.ACCENT
WAS, IS = BEFORE, "var(--accent)"
"""Colours of the two bars of a line (assets/parts.css)."""
MAX_WORK = 20
WORK_WIDTH = 44
"""Length of an operator with its shapes, characters."""
LOOKS = {"Slower": "failed", "Faster": "healthy"}
MARKS = {"fixed": "healthy", "new": "failed", "remaining": "bottlenecks"}


def has_content(view: PageView) -> bool:
    """Return whether two runs are open, or a folder with runs that can be."""
    entries = view.session.entries
    others = bool(view.session.folder) and len(entries) > 1 and entries[0].job is None
    return bool(view.session.pairs) or others


def layout(other: object = None, **query: object) -> Any:
    """Build the page; ``other`` is the run that the first is compared with."""
    view = page_view.view(**query)
    pairs = view.session.pairs
    if not pairs and has_content(view):
        return empty_page(
            "Compare",
            "No run is compared yet",
            "A run that is read is compared with the newest one.",
            "Open a second one on the page Runs.",
        )
    if not pairs:
        return empty_page(
            "Compare",
            "One run is open",
            "A comparison needs two runs.",
            "Start advisor dashboard BEFORE AFTER, or use advisor compare.",
        )
    first = view.session.entries[0].key
    by_key = {before if after == first else after: (before, after) for before, after in pairs}
    # the chosen run, unless it is the first, which all others are compared with
    wanted = str(other) if str(other) in by_key else view.entry.key
    chosen = wanted if wanted in by_key else next(iter(by_key))
    before, after = map(view.session.entry, by_key[chosen])
    comparison = view.session.comparison(before.key, after.key)
    chooser = _chooser(view, list(by_key), chosen)
    if comparison is None or isinstance(comparison, str):
        why = (
            labels.clean(comparison)
            if comparison
            else "The comparison is being computed. Reload in a moment."
        )
        title = "These cannot be compared" if comparison else "Not yet"
        return page(head("Compare", None, chooser), empty_state(title, why))
    return page(
        _head(comparison, chooser),
        banner(comparison.limits),
        _steps(comparison),
        _breakdown(comparison, before, after),
        _findings(comparison),
        *map(draw_block, predicted_gain(comparison)),
        _work(comparison),
    )


def _chooser(view: PageView, keys: list[str], chosen: str) -> Any:
    if len(keys) < 2:
        return None
    entries = [view.session.entry(key) for key in keys]
    names = labels.distinct_labels((entry.name for entry in entries), 40)
    return choices(
        "With",
        [
            (name, view.href("/compare", other=entry.key), entry.key == chosen)
            for entry, name in zip(entries, names, strict=True)
        ],
    )


def _head(c: Comparison, chooser: Any) -> Any:
    word = words.write_badge(c)
    sides = [
        element("Span", element("B", label), " ", labels.clean(" · ".join(parts)))
        for label, parts in words.describe_sides(c)
    ]
    return element(
        "Div",
        element("Span", word, cls=f"pill {LOOKS.get(word, '')}"),
        *verdict_head(c.verdict),
        element("Div", *sides, cls="scope"),
        chooser,
        cls="page-head",
    )


def _steps(c: Comparison) -> Any:
    if words.is_of_whole_recordings(c):
        return None  # the limits say so, and what to do
    if c.steps.before is None or c.steps.after is None:
        return empty_state("Step times are not compared", labels.clean(c.steps.reason))
    notes = [*words.step_notes(c.steps), *words.interval_method(c.steps)]
    notes = [labels.clean(note) for note in notes]
    return card(
        "Step times",
        figure(
            _distribution(c.steps.before, c.steps.after),
            "step-times",
            height=230,
            description="Cumulative share of steps by duration, before and after.",
        ),
        _table("Step time", words.step_lines(c)),
        *(remark(note) for note in notes),
    )


def _distribution(before: Distribution, after: Distribution) -> Any:
    """Draw both as cumulative shares: no bins to choose, every step is in it."""
    made = plotly_figures.empty_figure(230)
    for name, side, colour in (("before", before, BEFORE), ("after", after, AFTER)):
        durations = sorted(side.durations_ns)
        shares = [(i + 1) / len(durations) for i in range(len(durations))]
        x, y = plotly_figures.downsample([ns / 1e6 for ns in durations], shares)
        made.add_trace(
            go.Scatter(
                x=x,
                y=y,
                name=name,
                mode="lines+markers" if len(durations) < 40 else "lines",
                line={"shape": "hv", "width": 1.8, "color": colour},
                marker={"size": 5, "color": colour},
                hovertemplate="%{y:.0%} take at most %{x:,.2f} ms<extra>" + name + "</extra>",
            )
        )
    made.update_xaxes(title="ms per step")
    made.update_yaxes(title="share of steps", tickformat=".0%", range=[0, 1.04], nticks=5)
    made.update_layout(showlegend=True, margin={"t": 34})
    return made


MARKS_OF = {
    "better": ("better", "better"),
    "worse": ("worse", "worse"),
    "new": ("dim", "new"),
    "gone": ("dim", "gone"),
}
"""Class of each change, and the word that says what its colour means."""


def _change(line: ComparedFigure) -> Any:
    """Show a difference: an arrow for its direction, its sign, and a word for what that means."""
    if not line.change:
        return element("Span", t.EMPTY_CELL, cls="dim")
    arrow = "▲" if line.change.startswith("+") else "▼"
    look, word = MARKS_OF.get(line.verdict, ("dim", ""))
    return element(
        "Span",
        element("Span", arrow, cls="arrow", aria_hidden="true"),
        element("Span", labels.clean(line.change)),
        element("Span", word, cls="word") if word else None,
        cls=f"change {look}",
    )


def _table(
    title: str, lines: list[ComparedFigure], *, bars: bool = False, caption: str = ""
) -> Any:
    """Build lines side by side; with ``bars`` before and after also as two bars, all to one scale.
    In a narrow window a line is a block of its own."""
    largest = max((value for li in lines for value in (li.before, li.after) if value), default=0.0)
    rows = []
    for line in lines:
        # as in the bars above, and on the other pages
        colour = theme.colour_of(line.group, line.name) if line.group in theme.GROUPS else None
        label: Any = line.name if line.group == "kernels" else line.label
        if line.group == "work":
            label = abbreviation(line.label, line.name)
        first = element(
            "Span", swatch(colour) if colour else None, label, cls="nowrap" if colour else ""
        )
        pair = [_pair(line, largest)] if bars else []
        rows.append([first, *pair, *line.texts, _change(line)])
    head = [title, *([""] if bars else []), "before", "after", "difference"]
    keys = [swatch(WAS), "before ", swatch(IS), f"after · {caption}"] if bars else [caption]
    numbers = range(len(head) - 3, len(head))
    return table(head, rows, numbers=numbers, caption=element("Span", *keys), stacked=True)


def _pair(line: ComparedFigure, largest: float) -> Any:
    bars = [
        element("I", cls=look, style={"width": f"{(value or 0.0) / (largest or 1.0):.4%}"})
        for look, value in (("was", line.before), ("is", line.after))
    ]
    return element("Span", *bars, cls="two-bars", aria_hidden="true")


def _breakdown(c: Comparison, before: OpenedPath, after: OpenedPath) -> Any:
    lines = words.breakdown_lines(c)
    longer_ns = max(c.before.step_ns, c.after.step_ns)
    strips = []
    for name, entry in (("before", before), ("after", after)):
        if entry.loaded is None:
            continue
        report = entry.loaded.report
        bar = report_charts.build_step_bar(report)
        if bar is not None and longer_ns:
            made = draw_strip(bar.segments, f"The step {name}", thin=True)
            share = report.scope.step_ns / longer_ns
            strips.append(
                element(
                    "Div",
                    element("Span", name, cls="dim"),
                    element(
                        "Div", element("Div", made, style={"width": f"{share:.4%}"}), cls="track"
                    ),
                    element("Span", t.format_duration(report.scope.step_ns), cls="num"),
                    cls="strip-line",
                )
            )
    units = {unit_of(side.step_source) for side in (c.before, c.after)}
    unit = t.format_per("step" if units == {"step"} else "recording")
    whose = "GPU time" if any(line.group == "time" for line in lines) else "Host time"
    groups = [
        (whose, [line for line in lines if line.group in ("time", "idle", "host")]),
        ("Kernels by family", [line for line in lines if line.group == "kernels"]),
    ]
    figures_ = [li for li in lines if li.group == "figures"]
    return card(
        "Breakdown",
        element("Div", *strips, cls="strips") if strips else None,
        *(
            _table(title, part, bars=True, caption=f"{unit}, all bars on one scale")
            for title, part in groups
            if part
        ),
        _table("Figure", figures_) if figures_ else None,
        cls="compared",
    )


def _findings(c: Comparison) -> Any:
    groups = words.group_findings(c)
    if not groups:
        return empty_state("No findings", "Neither run has findings.")
    parts: list[Any] = []
    marks = {} if words.is_unjudged(c) else MARKS
    for title, items in groups:
        parts.append(
            element(
                "Section",
                element(
                    "Span", f"{title} {len(items)}", cls=f"pill {marks.get(items[0].change, '')}"
                ),
                element("Ul", *(_finding(item, per_suffix(c)) for item in items), cls="changes"),
            )
        )
    return card("Findings", element("Div", *parts, cls="stack"))


def _finding(item: FindingChange, unit: str) -> Any:
    title, *rest = (labels.clean(part) for part in words.describe_finding(item, unit))
    return element(
        "Li", element("B", title), element("Span", " · ".join(rest), cls="dim") if rest else None
    )


def _work(c: Comparison) -> Any:
    lines = words.work_lines(c, MAX_WORK, WORK_WIDTH)
    if not lines:
        return None
    return card(
        "Device work",
        _table("GPU work", lines, bars=True, caption=f"time / launches{per_suffix(c)}"),
        aside="matched by operator and shape, also across GPUs",
        cls="compared",
    )
