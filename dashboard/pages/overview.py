"""Overview: verdict, time of the step by class, and the fixes in order with their gains."""

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
from advisor.dashboard import components as ui
from advisor.dashboard import memory_cards, page_view
from advisor.dashboard.loaded_runs import DashboardSession, LoadedRun
from advisor.dashboard.page_view import PageView
from advisor.dashboard.pages import network
from advisor.render.documents import auxiliary_sections, inference
from advisor.render.documents.report import checks

OUTLOOK_ID = "outlook"
MAX_LISTED_FINDINGS = 5
"""Number of findings listed. The Findings page has the others."""


def layout(**query: object) -> Any:
    """Build the page."""
    view = page_view.view(**query)
    report = view.loaded.report
    limits_last = _shows_limits_last(report)
    bar, has_no_step_time = report_charts.build_step_bar(report), report.scope.has_no_step_time
    return ui.page(
        _heading(view, report),
        None if limits_last else ui.banner(report.limits),
        *(
            memory_cards.draw_cards(view)[:1]
            if has_no_step_time
            else [ui.tiles(report_text.figures_of_merit(report))]
        ),
        *(_cards_without_trace(view, report) if has_no_step_time else ()),
        ui.card(
            bar.heading, ui.draw_bar(bar, _segment_links(view, bar)), tools=ui.png_button("step")
        )
        if bar is not None
        else None,
        *map(ui.draw_block, inference.sections(report)),
        _fix_sequence_card(view),
        None if has_no_step_time else _top_findings_card(view, report),
        *counter_command_sections(report),
        _checks_section(report),
        ui.banner(report.limits, cls="banner plain-note") if limits_last else None,
    )


def _shows_limits_last(report: Report) -> bool:
    """Return whether the limits do not affect the advice, so that they are shown below it."""
    is_truncated = any(recording.truncated for recording in report.inputs)
    return report.busy_share is not None and report.per == "step" and not is_truncated


def _cards_without_trace(view: PageView, report: Report) -> list[Any]:
    """Build the cards of a report without a trace, which has only counters, logs or dumps."""
    sections = map(
        ui.draw_section,
        [
            *auxiliary_sections.kernel_tables(report),
            *auxiliary_sections.build_profiler_advice(report),
        ],
    )
    return [_top_findings_card(view, report), *network.sections(view), *sections]


def _segment_links(view: PageView, bar: StepBar) -> dict[str, str]:
    """Return each bar part's address: a page, or its longest interval on the timeline."""
    a = view.loaded.main
    links = {part.key: view.href("/timeline") for part in bar.segments}
    if bar.idle_total is None:
        return links
    for name, intervals in (("copies", a.breakdown.copies), ("memset", a.breakdown.memset)):
        if name in links and len(intervals.start):
            longest = int((intervals.end - intervals.start).argmax())
            links[name] = _timeline_around(
                view, int(intervals.start[longest]), int(intervals.end[longest])
            )
    for gap in a.gaps.sort("dur").group_by("cause").last().iter_rows(named=True):
        links[gap["cause"]] = _timeline_around(view, gap["ts"], gap["ts"] + gap["dur"])
    links["compute"] = view.href("/kernels")
    links["communication"] = view.href("/distributed")
    return links


def _timeline_around(view: PageView, start: int, end: int) -> str:
    """Return the address of the timeline around an interval, ns."""
    margin = max(end - start, 50_000)
    return view.href("/timeline", x0=max(0, start - margin), x1=end + margin, focus=start)


def _heading(view: PageView, report: Report) -> Any:
    """Build the heading: status, verdict, first fix and scope."""
    lines = {
        label: ui.element("Span", ui.element("B", ", ".join(parts[:1])), " ", " · ".join(parts[1:]))
        for label, parts in report_text.describe_scope(report)
    }
    # one step time is shown; those of the whole run and of its window are folded
    details = [label for label in ("run", "window", "steps") if label in lines]
    run_lines = [lines.pop(label) for label in details] if "run" in details else []
    risks = report.risks if report.scope.has_no_step_time else []  # memory risks of a snapshot
    first_fix = next(iter((*finding_text.ranked_findings(report), *risks)), None)
    return ui.element(
        "Div",
        ui.element(
            "Span",
            report_text.describe_status(report),
            cls=f"pill {report_text.status_class(report)}",
        ),
        *ui.verdict_heading(report.verdict),
        ui.element(
            "P",
            ui.element("B", "First fix: "),
            ui.link(
                t.first_sentence(first_fix.fix),
                href=f"{view.href('/findings')}#{anchor(first_fix)}",
                id={"fix_link": "first-fix"},
            ),
            cls="first-fix",
        )
        if first_fix is not None
        else None,
        ui.element("Div", *lines.values(), cls="scope"),
        ui.expander("The run and its steps", ui.element("Div", *run_lines, cls="scope"))
        if run_lines
        else None,
        cls="page-head",
    )


def _fix_sequence_card(view: PageView) -> Any:
    """Build the card of the step as measured, after fix 1, after fixes 1 and 2, and so on.

    Each fix has a checkbox; an unticked fix is left out."""
    full_sequence = report_charts.build_fix_sequence(view.loaded.report)
    if full_sequence is None:
        return None
    all_fixes = _fix_priorities(full_sequence)
    kept_fixes = {fix for fix in all_fixes if str(fix) not in view.unticked_fixes.split(",")}
    partial = _sequence_with_fixes(view.loaded, kept_fixes) if kept_fixes != all_fixes else None
    sequence, outlook = partial or (
        full_sequence,
        report_text.describe_all_fixes(view.loaded.report),
    )
    kept_fixes = kept_fixes if partial else all_fixes
    rows = []
    for stage in sequence.all:
        title = f"{stage.number}. {stage.label}" if stage.number else stage.label.capitalize()
        checkbox: Any = dmc.Checkbox
        label = (
            checkbox(
                id={"fix": stage.priority},
                label=title,
                checked=stage.priority in kept_fixes,
                size=24,
                radius="sm",
            )
            if stage.priority is not None
            else title
        )
        rows.append(
            ui.element(
                "Li",
                ui.element("Span", label, cls="what", title=title),
                *(
                    ui.element("Span", cell, id={"stage": stage.number, "part": part}, cls=part)
                    for part, cell in _row_cells(
                        sequence, stage, is_kept=_is_kept(stage, kept_fixes)
                    ).items()
                ),
                cls="fix-row",
            )
        )
    return ui.card(
        f"{sequence.per.capitalize()} time after each fix",
        ui.element("Ol", *rows, cls="fix-rows"),
        ui.element("P", outlook, id=OUTLOOK_ID, cls="note-line", role="status"),
        aside="each row adds one fix to those above; untick a fix to leave it out",
        tools=ui.png_button("gains"),
    )


def _fix_priorities(sequence: FixSequence) -> set[int]:
    """Return the priorities of all fixes in a sequence."""
    return {stage.priority or 0 for stage in sequence.fixes}


def _is_kept(stage: StepAfterFix, kept_fixes: set[int]) -> bool:
    """Return whether the fix of a stage is ticked; stages without a fix are."""
    return stage.priority is None or stage.priority in kept_fixes


def _sequence_with_fixes(loaded: LoadedRun, kept_fixes: set[int]) -> tuple[FixSequence, str] | None:
    """Return the step after each kept fix, and the text below, or ``None`` without fixes."""
    sequence = loaded.get_or_compute(
        ("fix_sequence", frozenset(kept_fixes)),
        lambda: report_charts.build_chosen_fix_sequence(
            loaded.report, kept_fixes, loaded.result.estimator
        ),
    )
    return None if sequence is None else (sequence, report_text.describe_chosen_fixes(sequence))


def _row_cells(sequence: FixSequence, stage: StepAfterFix, *, is_kept: bool) -> dict[str, Any]:
    """Build the bar and the figures of a row, by CSS class."""
    left_width, saved_width = f"{stage.left_share:.4%}", f"{stage.saved_share:.4%}"
    saved_start = left_width if is_kept else f"{max(0.0, stage.left_share - stage.saved_share):.4%}"
    gain = f"{sequence.bound_prefix}−{stage.saved}" if stage.saved else ""
    gain = gain if is_kept or not gain else f"({gain})"
    bar = ui.element(
        "Span",
        ui.element("Span", cls="left", style={"width": left_width}),
        ui.element(
            "Span",
            cls="saved",
            style={"left": saved_start, "width": saved_width if is_kept else "0%"},
        ),
        cls="bars",
        aria_hidden="true",
    )
    figures = ui.element(
        "Span", stage.left, ui.element("Span", gain, cls="gain" if is_kept else "gain out")
    )
    return {"after-bar": bar, "after-figures": figures}


def register(app: dash.Dash, session: DashboardSession) -> None:
    """Register the callbacks that redraw the rows when a fix is ticked or unticked."""

    @app.callback(
        Output({"stage": dash.ALL, "part": "after-bar"}, "children"),
        Output({"stage": dash.ALL, "part": "after-figures"}, "children"),
        Output(OUTLOOK_ID, "children"),
        Input({"fix": dash.ALL}, "checked"),
        State({"fix": dash.ALL}, "id"),
        State("_pages_location", "search"),
        prevent_initial_call=True,
    )
    def update_fixes(ticks: Any, fixes: Any, search: Any) -> tuple[list[Any], list[Any], str]:
        loaded = page_view.view(**page_view.parse_query(search)).loaded
        full_sequence = report_charts.build_fix_sequence(loaded.report)
        all_fixes = _fix_priorities(full_sequence) if full_sequence is not None else set()
        fix_ticks = zip(fixes or (), ticks or (), strict=False)
        ticked_numbers = [
            fix.get("fix") for fix, is_on in fix_ticks if is_on is True and isinstance(fix, dict)
        ]
        kept_fixes = all_fixes & set(filter(lambda fix: isinstance(fix, int), ticked_numbers))
        partial = _sequence_with_fixes(loaded, kept_fixes)
        if partial is None:
            raise dash.exceptions.PreventUpdate
        sequence, outlook = partial
        rows = [
            _row_cells(sequence, stage, is_kept=_is_kept(stage, kept_fixes))
            for stage in sequence.all
        ]
        if kept_fixes == all_fixes:
            outlook = report_text.describe_all_fixes(loaded.report)
        return [row["after-bar"] for row in rows], [row["after-figures"] for row in rows], outlook

    app.clientside_callback(
        ClientsideFunction("advisor", "putFixesInLinks"),
        Output({"fix_link": dash.ALL}, "href"),
        Input({"fix": dash.ALL}, "checked"),
        State({"fix": dash.ALL}, "id"),
        State({"fix_link": dash.ALL}, "href"),
        prevent_initial_call=True,
    )


def finding_line(view: PageView, finding: Finding) -> Any:
    """Build a list item of a finding, linked to its details."""
    impact = finding.impact
    named_places = finding_text.named_places(finding, 1)
    line_note = finding_text.line_not_recorded(view.loaded.report, finding)
    places = [" · ".join(named_places[0][1])] if named_places else []
    if line_note.startswith(finding_text.SAMPLED_LINE):
        places.insert(0, f"{t.upper_first(line_note)}")
    order_reasons = finding_text.order_parts(finding, view.loaded.report)
    amount: Any = None
    if impact is not None and impact.gain_ns is not None:
        amount = ui.element(
            "Span",
            t.format_saving(impact),
            ui.element("Small", _describe_share(impact)),
            cls="saving uncertain" if impact.unit == "run" else "saving",
        )
    elif impact is not None and impact.freed_bytes:
        amount = ui.element("Span", t.format_gain(finding), cls="saving")
    return ui.element(
        "Li",
        ui.element("Span", str(finding.priority or "∙"), cls="rank"),
        ui.link(
            labels.clean(finding.title),
            href=f"{view.href('/findings')}#{anchor(finding)}",
            cls="title",
            id={"fix_link": anchor(finding)},
        ),
        amount,
        ui.element("Span", t.first_sentence(finding.fix), cls="fix"),
        *(
            ui.element("Span", labels.clean(line), cls="where")
            for line in (*places, *(t.upper_first(reason) for reason in order_reasons))
        ),
    )


def _describe_share(impact: Impact) -> str:
    """Write a gain's share and what it is a share of. An unknown share is left out."""
    of_unit = t.format_of(impact.unit)
    return of_unit if impact.share is None else f"{t.format_share(impact.share)} {of_unit}"


def anchor(finding: Finding) -> str:
    """Return the HTML id of a finding on the findings page."""
    name = "".join(char if char.isalnum() or char == "-" else "-" for char in finding.rule)
    return f"finding-{name}"


def _top_findings_card(view: PageView, report: Report) -> Any:
    """Build the card of the first findings, or ``None`` without any."""
    has_no_step_time = report.scope.has_no_step_time
    ranked = report.notes if has_no_step_time else finding_text.ranked_findings(report)
    listed = [*ranked[:MAX_LISTED_FINDINGS], *report.risks]
    if not listed:
        return None
    unlisted = len(ranked) - MAX_LISTED_FINDINGS
    return ui.card(
        "What to fix first" if ranked else "Memory and risks",
        ui.element("Ol", *(finding_line(view, finding) for finding in listed), cls="lines"),
        aside="each gain is of that fix alone" if len(ranked) > 1 and not has_no_step_time else "",
        tools=ui.link(
            f"All {len(ranked)}" if unlisted > 0 else "Details",
            href=view.href("/findings"),
            id={"fix_link": "details"},
        ),
    )


def counter_command_sections(report: Report) -> list[Any]:
    """Build the section with the command for hardware counters, if there is no fix.

    Otherwise the Kernels page has it."""
    ranked = finding_text.ranked_findings(report)
    return [] if ranked else [*map(ui.draw_section, auxiliary_sections.counter_command(report))]


def _checks_section(report: Report) -> Any:
    """Build the section of passed and skipped checks, or ``None`` without any."""
    cards = [ui.draw_section(section) for section in checks(report)]
    if not cards:
        return None
    definitions = report_text.define_gains(report)
    return ui.element(
        "Div",
        ui.element("Div", *cards, cls="pair") if len(cards) > 1 else cards[0],
        ui.remark(" ".join(definitions)),
        cls="stack",
    )
