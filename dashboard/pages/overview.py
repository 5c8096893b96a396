"""Overview: the verdict, the step's time by class, and the fixes in order with their gains."""

from typing import Any

import dash
import dash_mantine_components as dmc
from dash import ClientsideFunction, Input, Output, State

from advisor.advise import finding_text, report_charts, report_text
from advisor.core import labels
from advisor.core import text as t
from advisor.core.charts import FixSequence, StepAfterFix, StepBar
from advisor.core.finding import Finding, Impact
from advisor.core.report import Report
from advisor.dashboard import memory_cards, page_view
from advisor.dashboard.components import (
    banner,
    card,
    draw_bar,
    draw_block,
    draw_section,
    element,
    foldable,
    link,
    page,
    png_button,
    remark,
    tiles,
    verdict_head,
)
from advisor.dashboard.loaded_runs import DashboardSession, LoadedRun
from advisor.dashboard.page_view import PageView
from advisor.dashboard.pages import network
from advisor.render.documents import auxiliary_sections, inference
from advisor.render.documents.report import checks

OUTLOOK = "outlook"
MAX_LISTED_FINDINGS = 5
"""Number of findings listed; the others are a click away."""


def layout(**query: object) -> Any:
    view = page_view.view(**query)
    report = view.loaded.report
    quiet = _is_quiet(report)
    bar, timeless = report_charts.build_step_bar(report), report.scope.has_no_step_time
    return page(
        _head(view, report),
        None if quiet else banner(report.limits),
        *(
            memory_cards.draw_cards(view)[:1]
            if timeless
            else [tiles(report_text.figures_of_merit(report))]
        ),
        *(_timeless(view, report) if timeless else ()),
        card(bar.heading, draw_bar(bar, _segment_links(view, bar)), tools=png_button("step"))
        if bar is not None
        else None,
        *map(draw_block, inference.sections(report)),
        _staircase(view),
        None if timeless else _top(view, report),
        *counter_command(report),
        _rest(report),
        banner(report.limits, cls="banner plain-note") if quiet else None,
    )


def _is_quiet(report: Report) -> bool:
    """Return whether the limits leave the advice as it is, so that they are shown below it."""
    cut_off = any(each.truncated for each in report.inputs)
    return report.busy_share is not None and report.per == "step" and not cut_off


def _timeless(view: PageView, report: Report) -> list[Any]:
    """Build the page of counters, logs or dumps without a trace: what to change, what they show."""
    sections = map(
        draw_section,
        [
            *auxiliary_sections.kernel_tables(report),
            *auxiliary_sections.build_profiler_advice(report),
        ],
    )
    return [_top(view, report), *network.sections(view), *sections]


def _segment_links(view: PageView, bar: StepBar) -> dict[str, str]:
    """Return each bar part's address: its kernels, or its longest stretch on the timeline."""
    a = view.loaded.main
    links = {part.key: view.href("/timeline") for part in bar.segments}
    if bar.idle_total is None:
        return links
    for name, spans in (("copies", a.breakdown.copies), ("memset", a.breakdown.memset)):
        if name in links and len(spans.start):
            longest = int((spans.end - spans.start).argmax())
            links[name] = _around(view, int(spans.start[longest]), int(spans.end[longest]))
    for gap in a.gaps.sort("dur").group_by("cause").last().iter_rows(named=True):
        links[gap["cause"]] = _around(view, gap["ts"], gap["ts"] + gap["dur"])
    links["compute"] = view.href("/kernels")
    links["communication"] = view.href("/distributed")
    return links


def _around(view: PageView, start: int, end: int) -> str:
    margin = max(end - start, 50_000)
    return view.href("/timeline", x0=max(0, start - margin), x1=end + margin, focus=start)


def _head(view: PageView, report: Report) -> Any:
    lines = {
        label: element("Span", element("B", ", ".join(parts[:1])), " ", " · ".join(parts[1:]))
        for label, parts in report_text.describe_scope(report)
    }
    # one step time leads; those of the whole run and of its window are a click away
    folded = [lines.pop(label) for label in ("run", "window") if "window" in lines]
    risks = report.risks if report.scope.has_no_step_time else []  # of a snapshot's memory
    first = next(iter((*finding_text.ranked_findings(report), *risks)), None)
    return element(
        "Div",
        element(
            "Span",
            report_text.describe_status(report),
            cls=f"pill {report_text.status_class(report)}",
        ),
        *verdict_head(report.verdict),
        element(
            "P",
            element("B", "First fix: "),
            link(
                t.first_sentence(first.fix),
                href=f"{view.href('/findings')}#{anchor(first)}",
                id={"keeps": "first-fix"},
            ),
            cls="first-fix",
        )
        if first is not None
        else None,
        element("Div", *lines.values(), cls="scope"),
        foldable("The run and its profiled window", element("Div", *folded, cls="scope"))
        if folded
        else None,
        cls="page-head",
    )


def _staircase(view: PageView) -> Any:
    """Draw the step as measured, then after fix 1, after fixes 1 and 2 and so on. Fixes are ticked
    to be in or out."""
    full = report_charts.build_fix_sequence(view.loaded.report)
    if full is None:
        return None
    known = _fixes(full)
    kept = {fix for fix in known if str(fix) not in view.without.split(",")}
    drawn = _chosen(view.loaded, kept) if kept != known else None
    shown, outlook = drawn or (full, report_text.describe_all_fixes(view.loaded.report))
    kept = kept if drawn else known
    stairs = []
    for stair in shown.all:
        what = f"{stair.number}. {stair.label}" if stair.number else stair.label.capitalize()
        tick: Any = dmc.Checkbox
        label = (
            tick(
                id={"fix": stair.priority},
                label=what,
                checked=stair.priority in kept,
                size=24,
                radius="sm",
            )
            if stair.priority is not None
            else what
        )
        stairs.append(
            element(
                "Li",
                element("Span", label, cls="what", title=what),
                *(
                    element("Span", made, id={"of": stair.number, "part": part}, cls=part)
                    for part, made in _parts(shown, stair, kept=_is_kept(stair, kept)).items()
                ),
                cls="stair",
            )
        )
    return card(
        f"{shown.per.capitalize()} time after each fix",
        element("Ol", *stairs, cls="stairs"),
        element("P", outlook, id=OUTLOOK, cls="note-line", role="status"),
        aside="each row adds one fix to those above; untick a fix to leave it out",
        tools=png_button("gains"),
    )


def _fixes(sequence: FixSequence) -> set[int]:
    return {stair.priority or 0 for stair in sequence.fixes}


def _is_kept(stair: StepAfterFix, kept: set[int]) -> bool:
    return stair.priority is None or stair.priority in kept


def _chosen(loaded: LoadedRun, kept: set[int]) -> tuple[FixSequence, str] | None:
    """Return the step after each of some fixes, and the text below, or ``None`` without fixes."""
    shown = loaded.cached(
        ("fix_sequence", frozenset(kept)),
        lambda: report_charts.build_chosen_fix_sequence(
            loaded.report, kept, loaded.examined.estimator
        ),
    )
    return None if shown is None else (shown, report_text.describe_chosen_fixes(shown))


def _parts(sequence: FixSequence, stair: StepAfterFix, *, kept: bool) -> dict[str, Any]:
    """Return a row's bar and its figures."""
    left, saved = f"{stair.left_share:.4%}", f"{stair.saved_share:.4%}"
    start = left if kept else f"{max(0.0, stair.left_share - stair.saved_share):.4%}"
    gain = f"{sequence.bound_prefix}−{stair.saved}" if stair.saved else ""
    gain = gain if kept or not gain else f"({gain})"
    bar = element(
        "Span",
        element("Span", cls="left", style={"width": left}),
        element("Span", cls="saved", style={"left": start, "width": saved if kept else "0%"}),
        cls="bars",
        aria_hidden="true",
    )
    figures = element("Span", stair.left, element("Span", gain, cls="gain" if kept else "gain out"))
    return {"run": bar, "then": figures}


def register(app: dash.Dash, session: DashboardSession) -> None:
    """Redraw the step after each when fixes are ticked."""

    @app.callback(
        Output({"of": dash.ALL, "part": "run"}, "children"),
        Output({"of": dash.ALL, "part": "then"}, "children"),
        Output(OUTLOOK, "children"),
        Input({"fix": dash.ALL}, "checked"),
        State({"fix": dash.ALL}, "id"),
        State("_pages_location", "search"),
        prevent_initial_call=True,
    )
    def tick(ticks: Any, fixes: Any, search: Any) -> tuple[list[Any], list[Any], str]:
        loaded = page_view.view(**page_view.parse_query(search)).loaded
        full = report_charts.build_fix_sequence(loaded.report)
        known = _fixes(full) if full is not None else set()
        ticked = zip(fixes or (), ticks or (), strict=False)
        on = [fix.get("fix") for fix, is_on in ticked if is_on is True and isinstance(fix, dict)]
        kept = known & set(filter(lambda fix: isinstance(fix, int), on))
        chosen = _chosen(loaded, kept)
        if chosen is None:
            raise dash.exceptions.PreventUpdate
        shown, outlook = chosen
        rows = [_parts(shown, stair, kept=_is_kept(stair, kept)) for stair in shown.all]
        if kept == known:
            outlook = report_text.describe_all_fixes(loaded.report)
        return [row["run"] for row in rows], [row["then"] for row in rows], outlook

    app.clientside_callback(
        ClientsideFunction("advisor", "keepTicks"),
        Output({"keeps": dash.ALL}, "href"),
        Input({"fix": dash.ALL}, "checked"),
        State({"fix": dash.ALL}, "id"),
        State({"keeps": dash.ALL}, "href"),
        prevent_initial_call=True,
    )


def finding_line(view: PageView, finding: Finding) -> Any:
    """Show a finding in two lines, linked to its details."""
    impact = finding.impact
    where = finding_text.named_places(finding, 1)
    sampled = finding_text.line_not_recorded(view.loaded.report, finding)
    places = [" · ".join(where[0][1])] if where else []
    if sampled.startswith(finding_text.SAMPLED_LINE):
        places.insert(0, f"{t.upper_first(sampled)}")
    order = finding_text.order_parts(finding, view.loaded.report)
    amount: Any = None
    if impact is not None and impact.gain_ns is not None:
        amount = element(
            "Span",
            t.format_saving(impact),
            element("Small", _share(impact)),
            cls="saving uncertain" if impact.unit == "run" else "saving",
        )
    elif impact is not None and impact.freed_bytes:
        amount = element("Span", t.format_gain(finding), cls="saving")
    return element(
        "Li",
        element("Span", str(finding.priority or "∙"), cls="rank"),
        link(
            labels.clean(finding.title),
            href=f"{view.href('/findings')}#{anchor(finding)}",
            cls="title",
            id={"keeps": anchor(finding)},
        ),
        amount,
        element("Span", t.first_sentence(finding.fix), cls="fix"),
        *(
            element("Span", labels.clean(line), cls="where")
            for line in (*places, *(t.upper_first(why) for why in order))
        ),
    )


def _share(impact: Impact) -> str:
    """Say what a gain is a share of; of one whose share is not known, what it is a part of."""
    of = t.format_of(impact.unit)
    return of if impact.share is None else f"{t.format_share(impact.share)} {of}"


def anchor(finding: Finding) -> str:
    """Return the HTML id of a finding on the findings page."""
    name = "".join(char if char.isalnum() or char == "-" else "-" for char in finding.rule)
    return f"finding-{name}"


def _top(view: PageView, report: Report) -> Any:
    timeless = report.scope.has_no_step_time
    ranked = report.notes if timeless else finding_text.ranked_findings(report)
    listed = [*ranked[:MAX_LISTED_FINDINGS], *report.risks]
    if not listed:
        return None
    more = len(ranked) - MAX_LISTED_FINDINGS
    return card(
        "What to fix first" if ranked else "Memory and risks",
        element("Ol", *(finding_line(view, finding) for finding in listed), cls="lines"),
        aside="each gain is of that fix alone" if len(ranked) > 1 and not timeless else "",
        tools=link(
            f"All {len(ranked)}" if more > 0 else "Details",
            href=view.href("/findings"),
            id={"keeps": "details"},
        ),
    )


def counter_command(report: Report) -> list[Any]:
    """Show the command that the verdict speaks of, where no fix is known; else Kernels has it."""
    ranked = finding_text.ranked_findings(report)
    return [] if ranked else [*map(draw_section, auxiliary_sections.counter_command(report))]


def _rest(report: Report) -> Any:
    cards = [draw_section(each) for each in checks(report)]
    if not cards:
        return None
    definitions = report_text.define_gains(report)
    return element(
        "Div",
        element("Div", *cards, cls="pair") if len(cards) > 1 else cards[0],
        remark(" ".join(definitions)),
        cls="stack",
    )
