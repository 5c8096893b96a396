"""Findings: cause, gain, place in the code, fix, and how to verify it."""

from typing import Any
from urllib.parse import urlsplit

from advisor.advise import finding_text
from advisor.core import labels
from advisor.core import text as t
from advisor.core.finding import Finding, Location
from advisor.core.report import Report
from advisor.core.rule import Evidence
from advisor.dashboard import page_view
from advisor.dashboard.components import (
    abbreviation,
    card,
    choice_links,
    code,
    draw_block,
    editor_href,
    element,
    empty_state,
    external_link,
    icon,
    link,
    page,
    page_heading,
    remark,
    scroll_box,
)
from advisor.dashboard.page_view import PageView
from advisor.dashboard.pages.overview import anchor, counter_command_sections
from advisor.render.document import Items

MARGIN_DURATIONS = 1.0
"""Time shown on each side of the worst instance, as a multiple of its duration."""
MIN_MARGIN_NS = 50_000
"""Minimum time shown on each side of the worst instance, ns."""


def layout(category: object = None, **query: object) -> Any:
    """Build the page. ``category``: show only findings of this category."""
    view = page_view.view(**query)
    report = view.loaded.report
    ranked, has_no_step_time = finding_text.ranked_findings(report), report.scope.has_no_step_time
    all_findings = [*ranked, *report.risks, *report.notes]
    if not all_findings:
        return page(
            _heading(report), _no_findings_notice(report), *counter_command_sections(report)
        )
    categories = list(
        dict.fromkeys(finding.category for finding in all_findings if finding.category)
    )
    chosen = category if category in categories else None

    def in_category(findings: list[Finding]) -> list[Finding]:
        return [finding for finding in findings if chosen is None or finding.category == chosen]

    return page(
        _heading(report),
        _category_filter(view, categories, chosen),
        *(finding_card(view, report, finding) for finding in in_category(ranked)),
        _finding_section("Memory and risks", view, report, in_category(report.risks)),
        # without a step time nothing is ranked, so each note is a card
        *(
            finding_card(view, report, note)
            for note in in_category(report.notes)
            if has_no_step_time
        ),
        None if has_no_step_time else _note_card(view, in_category(report.notes)),
        *counter_command_sections(report),
    )


def _heading(report: Report) -> Any:
    """Build the heading of the page."""
    count = len(finding_text.ranked_findings(report))
    title = "Findings"
    if count:
        lead = "Fix them in this order. Each gain is of its fix alone."
    elif report.status == "healthy":
        lead = "No change found that shortens the step."
    else:
        lead = ""
    return page_heading(title, lead)


def _no_findings_notice(report: Report) -> Any:
    """Build the notice that there are no findings, with the passed checks."""
    return empty_state(
        "Nothing to fix" if report.status == "healthy" else "No fix with an estimated gain",
        labels.clean(report.verdict),
        "",
        draw_block(Items([check.text for check in report.passed], "✓")) if report.passed else None,
    )


def _category_filter(view: PageView, categories: list[str], chosen: object) -> Any:
    """Build the links to the categories, or ``None`` for a single one."""
    if len(categories) < 2:
        return None
    options = [("All", view.href("/findings"), chosen is None)]
    options += [
        (name.capitalize(), view.href("/findings", category=name), name == chosen)
        for name in categories
    ]
    return choice_links("Category", options)


def _finding_section(title: str, view: PageView, report: Report, findings: list[Finding]) -> Any:
    """Build a section of findings under a heading, or ``None`` without any."""
    if not findings:
        return None
    cards = [finding_card(view, report, finding) for finding in findings]
    return element("Div", element("H2", title), *cards, cls="stack")


def finding_card(view: PageView, report: Report, finding: Finding) -> Any:
    """Build the card of a finding."""
    conditions = finding_text.gain_conditions(finding, report)
    caveats = [*conditions, *finding_text.describe_caveats(finding, conditions)]
    return element(
        "Article",
        _card_header(report, finding),
        element(
            "Div",
            element("P", labels.clean(finding.summary), cls="summary"),
            _titled_section("Where", _place_list(view, report, finding)),
            _titled_section("What to change", element("P", labels.clean(finding.fix), cls="fix")),
            code(finding.code, name=labels.clean(finding.title)) if finding.code else None,
            _titled_section(
                "How to verify",
                element("P", labels.clean(finding.verify)) if finding.verify else None,
            ),
            _evidence_and_caveats(finding, caveats),
            *_covered_findings(report, finding),
            _action_buttons(view, finding),
            cls="body",
        ),
        cls=f"card finding {finding.severity}",
        id=anchor(finding),
        tabIndex="-1",
    )


def _card_header(report: Report, finding: Finding) -> Any:
    """Build the header of a finding's card: number, title, gain, category and confidence."""
    parts = [element("Span", finding.category, cls="tag") if finding.category else None]
    parts.append(_confidence_meter(finding))
    parts.append(element("Span", finding.severity))
    if finding.validation == "synthetic":
        parts.append(element("Span", "not proven on real traces"))
    return element(
        "Header",
        element(
            "Span", str(finding.priority) if finding.priority is not None else "∙", cls="number"
        ),
        element("H2", labels.clean(finding.title)),
        _gain_element(report, finding),
        element("Div", *parts, cls="meta"),
        cls="head",
    )


def _confidence_meter(finding: Finding) -> Any:
    """Build a bar of the confidence in the cause."""
    share = max(0.0, min(1.0, finding.confidence))
    return element(
        "Span",
        "confidence",
        element("I", element("B", style={"width": f"{share:.0%}"}), aria_hidden="true"),
        t.format_share(finding.confidence),
        cls="meter",
    )


def _gain_element(report: Report, finding: Finding) -> Any:
    """Build the gain, or the reason why there is none."""
    impact = finding.impact
    if impact is None or impact.gain_ns is None:
        text = t.format_gain(finding)
        return (
            element("Div", element("Strong", text, cls="text"), cls="saving")
            if len(text) < 40
            else None
        )
    per_unit = t.format_per(impact.unit)
    if impact.share is not None and impact.currency == "step_time":
        per_unit = f"{t.format_share(impact.share)} {t.format_of(impact.unit)}"
    step = report.step_ns
    speedup = ""
    if impact.currency == "step_time" and 0 < impact.gain_ns < step and not finding.other_rank:
        speedup = f" · {step / (step - impact.gain_ns):.2f}×"
    gain_range = t.format_gain_range(finding)
    return element(
        "Div",
        element("Strong", t.format_saving(impact)),
        element("Span", f"{per_unit}{speedup}"),
        element("Span", gain_range) if gain_range else None,
        cls="saving",
    )


def _titled_section(title: str, body: Any) -> Any:
    """Build a section with a heading, or ``None`` without a body."""
    return None if body is None else element("Section", element("H3", title), body)


def _bullet_list(lines: list[str]) -> Any:
    """Build a bullet list, or ``None`` without items."""
    return element("Ul", *(element("Li", line) for line in lines), cls="more") if lines else None


def _place_list(view: PageView, report: Report, finding: Finding) -> Any:
    """Build the list of a finding's places, with links to timeline and editor."""
    places = finding_text.named_places(finding, 5, name_width=90, path_width=90)
    line_note = finding_text.line_not_recorded(report, finding)
    if not places and not line_note:
        return None
    lines = []
    for place, texts in places:
        full_names = t.location_names(place, name_width=2000, path_width=2000)
        names = [
            element("Code", abbreviation(*label_and_name))
            for label_and_name in zip(texts, full_names, strict=True)
        ]
        figures = " · ".join(
            t.location_figures(
                place,
                finding_text.counted_steps(report),
                report.per,
                finding_text.host_operator_time(report, finding),
            )
        )
        href = timeline_href(view, finding, place)
        editor_address = editor_href(view.session.editor, place)
        lines.append(
            element(
                "Li",
                *names,
                element("Span", figures, cls="dim") if figures else None,
                link("timeline", href=href, title="Show on the timeline") if href else None,
                element("A", "edit", href=editor_address, title="Open in the editor")
                if editor_address
                else None,
            )
        )
    if line_note:
        lines.append(element("Li", element("Span", labels.clean(line_note), cls="dim")))
    return element("Ul", *lines, cls="where-list")


def _evidence_and_caveats(finding: Finding, caveats: list[str]) -> Any:
    """Build evidence and caveats. assets/shell.js opens them, except on a phone."""
    parts = {"Evidence": _evidence_table(finding), "Caveats": _bullet_list(caveats)}
    bodies = {title: body for title, body in parts.items() if body is not None}
    if not bodies:
        return None
    (_, first_body), *others = bodies.items()
    return element(
        "Details",
        element("Summary", " and ".join(bodies).capitalize()),
        element("Section", first_body),
        *(_titled_section(title, body) for title, body in others),
        cls="fold evidence-fold",
    )


def _evidence_table(finding: Finding) -> Any:
    """Build the table of evidence, or ``None`` without any."""
    if not finding.evidence:
        return None
    has_thresholds = any(item.threshold is not None for item in finding.evidence)
    lines = []
    for item in finding.evidence:
        value = t.format_value(item.value, item.unit)
        cells = [element("Th", t.evidence_label(item), scope="row", cls="name")]
        if isinstance(item.value, str):  # text, which also takes the width of the threshold
            cells.append(element("Td", value, colSpan=2 if has_thresholds else 1, cls="words"))
        else:
            cells.append(element("Td", value, cls="num"))
            cells += [element("Td", *_threshold_cell(item), cls="limit")] if has_thresholds else []
        lines.append(element("Tr", *cells))
    heads = [
        element("Th", "Measurement", scope="col"),
        element("Th", "Value", scope="col", cls="num"),
    ]
    heads += [element("Th", "Threshold", scope="col", cls="limit")] if has_thresholds else []
    evidence_table = element(
        "Table",
        element("Thead", element("Tr", *heads)),
        element("Tbody", *lines),
        cls="data evidence",
    )
    return scroll_box(evidence_table, f"Evidence: {labels.clean(finding.title)}")


def _threshold_cell(item: Evidence) -> list[Any]:
    """Build the content of a threshold cell: the threshold and its source."""
    if item.threshold is None:
        return []
    source = labels.clean(item.source)
    return [
        t.format_value(item.threshold, item.unit),
        element("Span", source, cls="dim") if source else None,
    ]


def _covered_findings(report: Report, finding: Finding) -> list[Any]:
    """List the findings that the fix also covers, and the alternatives to the fix."""
    lines: dict[str, list[Any]] = {}
    for other in finding_text.folded_findings(report, finding):
        relation, text = finding_text.covered_line(finding, other)
        lines.setdefault(relation, []).append(element("Li", text))
    titles = {"also": "Also fixed by this", "or": "Alternatives to this fix"}
    return [
        _titled_section(titles[relation], element("Ul", *items, cls="folded"))
        for relation, items in lines.items()
    ]


def timeline_href(view: PageView, finding: Finding, place: Location) -> str | None:
    """Return the address of the timeline around a place, or ``None`` if its time is unknown."""
    if place.ts_ns is None or finding.trace_rank not in (None, *view.loaded.analyses):
        return None
    dur = place.dur_ns or 0
    margin = max(round(MARGIN_DURATIONS * dur), MIN_MARGIN_NS)
    return view.href(
        "/timeline",
        x0=max(0, place.ts_ns - margin),
        x1=place.ts_ns + dur + margin,
        rank=finding.trace_rank,
        focus=place.ts_ns,
        finding=finding.rule,
    )


def _action_buttons(view: PageView, finding: Finding) -> Any:
    """Build the links to the timeline and to references, or ``None`` without any."""
    buttons = []
    timeline_address = next(
        (href for place in finding.where if (href := timeline_href(view, finding, place))), None
    )
    if timeline_address is not None:
        buttons.append(
            link(icon("show"), "Show on the timeline", href=timeline_address, cls="button main")
        )
    for reference in finding.references:
        parts = urlsplit(reference)
        if parts.scheme in ("http", "https"):
            buttons.append(external_link(labels.clean(_shorten_address(reference)), href=reference))
        else:
            buttons.append(element("Span", labels.clean(reference), cls="dim"))
    return element("Div", *buttons, cls="actions") if buttons else None


def _shorten_address(address: str) -> str:
    """Write an address as host and last part of the path."""
    parts = urlsplit(address)
    last_part = parts.path.rstrip("/").rpartition("/")[2].removesuffix(".html")
    return labels.shorten(
        f"{parts.netloc.removeprefix('www.')} … {last_part}" if last_part else parts.netloc, 60
    )


def _note_card(view: PageView, notes: list[Finding]) -> Any:
    """Build the card of notes, which are not ranked."""
    if not notes:
        return None
    lines = []
    for finding in notes:
        reason = finding_text.explain_note(finding)
        timeline_address = next(
            (href for place in finding.where if (href := timeline_href(view, finding, place))), None
        )
        lines.append(
            element(
                "Li",
                element("Span", "∙", cls="rank", aria_hidden="true"),
                element(
                    "Span",
                    element("Span", labels.clean(finding.title), cls="title"),
                    element("Span", f" ({reason})", cls="dim") if reason else None,
                    remark(labels.clean(finding.summary)),
                    remark(labels.clean(finding.fix)),
                    link("Show on the timeline", href=timeline_address)
                    if timeline_address
                    else None,
                ),
                _note_gain_element(finding),
                id=anchor(finding),
            )
        )
    return card(
        "Notes",
        element("Ul", *lines, cls="lines"),
        aside="not ranked, for the reason given with each",
    )


def _note_gain_element(finding: Finding) -> Any:
    """Build the uncertain gain of a note, or ``None`` without one."""
    impact = finding.impact
    if not finding_text.note_gain(finding) or impact is None:
        return None
    return element(
        "Span",
        t.format_saving(impact),
        element("Small", f"{t.format_share(impact.share)} {t.format_of(impact.unit)}, uncertain"),
        cls="saving uncertain",
    )
