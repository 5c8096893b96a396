"""Findings: the cause, its gain, its place in the code, the fix, and how to verify it."""

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
    choices,
    code,
    draw_block,
    editor_href,
    element,
    empty_state,
    external_link,
    head,
    icon,
    link,
    page,
    remark,
    scrolling,
)
from advisor.dashboard.page_view import PageView
from advisor.dashboard.pages.overview import anchor, counter_command
from advisor.render.document import Items

MARGIN = 1.0
"""Part of the timeline shown on both sides of the worst instance, as a multiple of its duration."""
MIN_NS = 50_000
"""Least part of the timeline on either side of it, ns."""


def layout(category: object = None, **query: object) -> Any:
    """Build the page; ``category`` keeps the findings of one."""
    view = page_view.view(**query)
    report = view.loaded.report
    ranked, timeless = finding_text.ranked_findings(report), report.scope.has_no_step_time
    everything = [*ranked, *report.risks, *report.notes]
    if not everything:
        return page(_head(report), _nothing(report), *counter_command(report))
    categories = list(dict.fromkeys(f.category for f in everything if f.category))
    chosen = category if category in categories else None

    def kept(findings: list[Finding]) -> list[Finding]:
        return [f for f in findings if chosen is None or f.category == chosen]

    return page(
        _head(report),
        _filters(view, categories, chosen),
        *(finding_card(view, report, finding) for finding in kept(ranked)),
        _section("Memory and risks", view, report, kept(report.risks)),
        # without a step nothing is ranked, and each is a card
        *(finding_card(view, report, note) for note in kept(report.notes) if timeless),
        None if timeless else _notes(view, kept(report.notes)),
        *counter_command(report),
    )


def _head(report: Report) -> Any:
    count = len(finding_text.ranked_findings(report))
    title = "Findings"
    if count:
        lead = "Fix them in this order. Each gain is of its fix alone."
    elif report.status == "healthy":
        lead = "No change found that shortens the step."
    else:
        lead = ""
    return head(title, lead)


def _nothing(report: Report) -> Any:
    return empty_state(
        "Nothing to fix" if report.status == "healthy" else "No fix with an estimated gain",
        labels.clean(report.verdict),
        "",
        draw_block(Items([good.text for good in report.passed], "✓")) if report.passed else None,
    )


def _filters(view: PageView, categories: list[str], chosen: object) -> Any:
    if len(categories) < 2:
        return None
    options = [("All", view.href("/findings"), chosen is None)]
    options += [
        (name.capitalize(), view.href("/findings", category=name), name == chosen)
        for name in categories
    ]
    return choices("Category", options)


def _section(title: str, view: PageView, report: Report, findings: list[Finding]) -> Any:
    if not findings:
        return None
    cards = [finding_card(view, report, finding) for finding in findings]
    return element("Div", element("H2", title), *cards, cls="stack")


def finding_card(view: PageView, report: Report, finding: Finding) -> Any:
    conditions = finding_text.gain_conditions(finding, report)
    caveats = [*conditions, *finding_text.describe_caveats(finding, conditions)]
    return element(
        "Article",
        _title(report, finding),
        element(
            "Div",
            element("P", labels.clean(finding.summary), cls="summary"),
            _block("Where", _where(view, report, finding)),
            _block("What to change", element("P", labels.clean(finding.fix), cls="fix")),
            code(finding.code, name=labels.clean(finding.title)) if finding.code else None,
            _block(
                "How to verify",
                element("P", labels.clean(finding.verify)) if finding.verify else None,
            ),
            _grounds(finding, caveats),
            *_folded(report, finding),
            _actions(view, finding),
            cls="body",
        ),
        cls=f"card finding {finding.severity}",
        id=anchor(finding),
        tabIndex="-1",
    )


def _title(report: Report, finding: Finding) -> Any:
    parts = [element("Span", finding.category, cls="tag") if finding.category else None]
    parts.append(_confidence(finding))
    parts.append(element("Span", finding.severity))
    if finding.validation == "synthetic":
        parts.append(element("Span", "not proven on real traces"))
    return element(
        "Header",
        element(
            "Span", str(finding.priority) if finding.priority is not None else "∙", cls="number"
        ),
        element("H2", labels.clean(finding.title)),
        _gain(report, finding),
        element("Div", *parts, cls="meta"),
        cls="head",
    )


def _confidence(finding: Finding) -> Any:
    share = max(0.0, min(1.0, finding.confidence))
    return element(
        "Span",
        "confidence",
        element("I", element("B", style={"width": f"{share:.0%}"}), aria_hidden="true"),
        t.format_share(finding.confidence),
        cls="meter",
    )


def _gain(report: Report, finding: Finding) -> Any:
    """Show the gain as a figure, or the reason why there is none."""
    impact = finding.impact
    if impact is None or impact.gain_ns is None:
        text = t.format_gain(finding)
        return (
            element("Div", element("Strong", text, cls="text"), cls="saving")
            if len(text) < 40
            else None
        )
    per = t.format_per(impact.unit)
    if impact.share is not None and impact.currency == "step_time":
        per = f"{t.format_share(impact.share)} {t.format_of(impact.unit)}"
    step = report.step_ns
    times = ""
    if impact.currency == "step_time" and 0 < impact.gain_ns < step and not finding.other_rank:
        times = f" · {step / (step - impact.gain_ns):.2f}×"
    spread = t.format_gain_range(finding)
    return element(
        "Div",
        element("Strong", t.format_saving(impact)),
        element("Span", f"{per}{times}"),
        element("Span", spread) if spread else None,
        cls="saving",
    )


def _block(title: str, body: Any) -> Any:
    return None if body is None else element("Section", element("H3", title), body)


def _lines(lines: list[str]) -> Any:
    return element("Ul", *(element("Li", line) for line in lines), cls="more") if lines else None


def _where(view: PageView, report: Report, finding: Finding) -> Any:
    places = finding_text.named_places(finding, 5, name_width=90, path_width=90)
    missing = finding_text.line_not_recorded(report, finding)
    if not places and not missing:
        return None
    lines = []
    for place, texts in places:
        full_names = t.location_names(place, name_width=2000, path_width=2000)
        names = [
            element("Code", abbreviation(*pair)) for pair in zip(texts, full_names, strict=True)
        ]
        figures = " · ".join(
            t.location_figures(place, finding_text.counted_steps(report), report.per)
        )
        href = timeline_href(view, finding, place)
        source = editor_href(view.session.editor, place)
        lines.append(
            element(
                "Li",
                *names,
                element("Span", figures, cls="dim") if figures else None,
                link("timeline", href=href, title="Show on the timeline") if href else None,
                element("A", "edit", href=source, title="Open in the editor") if source else None,
            )
        )
    if missing:
        lines.append(element("Li", element("Span", labels.clean(missing), cls="dim")))
    return element("Ul", *lines, cls="where-list")


def _grounds(finding: Finding, caveats: list[str]) -> Any:
    """Build evidence and caveats: open where there is room (assets/shell.js), on demand on a
    telephone."""
    parts = {"Evidence": _evidence(finding), "Caveats": _lines(caveats)}
    shown = {title: body for title, body in parts.items() if body is not None}
    if not shown:
        return None
    (_, first), *others = shown.items()
    return element(
        "Details",
        element("Summary", " and ".join(shown).capitalize()),
        element("Section", first),
        *(_block(title, body) for title, body in others),
        cls="fold grounds",
    )


def _evidence(finding: Finding) -> Any:
    if not finding.evidence:
        return None
    limits = any(item.threshold is not None for item in finding.evidence)
    lines = []
    for item in finding.evidence:
        shown = t.format_value(item.value, item.unit)
        cells = [element("Th", t.evidence_label(item), scope="row", cls="name")]
        if isinstance(item.value, str):  # words, which need the room of the limit as well
            cells.append(element("Td", shown, colSpan=2 if limits else 1, cls="words"))
        else:
            cells.append(element("Td", shown, cls="num"))
            cells += [element("Td", *_limit(item), cls="limit")] if limits else []
        lines.append(element("Tr", *cells))
    heads = [
        element("Th", "Measurement", scope="col"),
        element("Th", "Value", scope="col", cls="num"),
    ]
    heads += [element("Th", "Threshold", scope="col", cls="limit")] if limits else []
    made = element(
        "Table",
        element("Thead", element("Tr", *heads)),
        element("Tbody", *lines),
        cls="data evidence",
    )
    return scrolling(made, f"Evidence: {labels.clean(finding.title)}")


def _limit(item: Evidence) -> list[Any]:
    """Show the threshold and its source."""
    if item.threshold is None:
        return []
    source = labels.clean(item.source)
    return [
        t.format_value(item.threshold, item.unit),
        element("Span", source, cls="dim") if source else None,
    ]


def _folded(report: Report, finding: Finding) -> list[Any]:
    """List what the fix covers, and apart from that the fixes that could stand in its place."""
    lines: dict[str, list[Any]] = {}
    for other in finding_text.folded_findings(report, finding):
        word, text = finding_text.covered_line(finding, other)
        lines.setdefault(word, []).append(element("Li", text))
    titles = {"also": "Also fixed by this", "or": "Alternatives to this fix"}
    return [_block(titles[word], element("Ul", *own, cls="folded")) for word, own in lines.items()]


def timeline_href(view: PageView, finding: Finding, place: Location) -> str | None:
    """Return the timeline's address around the worst instance, or ``None`` without a time."""
    if place.ts_ns is None or finding.trace_rank not in (None, *view.loaded.analyses):
        return None
    dur = place.dur_ns or 0
    margin = max(round(MARGIN * dur), MIN_NS)
    return view.href(
        "/timeline",
        x0=max(0, place.ts_ns - margin),
        x1=place.ts_ns + dur + margin,
        rank=finding.trace_rank,
        focus=place.ts_ns,
        finding=finding.rule,
    )


def _actions(view: PageView, finding: Finding) -> Any:
    buttons = []
    target = next((href for p in finding.where if (href := timeline_href(view, finding, p))), None)
    if target is not None:
        buttons.append(link(icon("show"), "Show on the timeline", href=target, cls="button main"))
    for reference in finding.references:
        parts = urlsplit(reference)
        if parts.scheme in ("http", "https"):
            buttons.append(external_link(labels.clean(_short(reference)), href=reference))
        else:
            buttons.append(element("Span", labels.clean(reference), cls="dim"))
    return element("Div", *buttons, cls="actions") if buttons else None


def _short(address: str) -> str:
    parts = urlsplit(address)
    last = parts.path.rstrip("/").rpartition("/")[2].removesuffix(".html")
    return labels.shorten(
        f"{parts.netloc.removeprefix('www.')} … {last}" if last else parts.netloc, 60
    )


def _notes(view: PageView, notes: list[Finding]) -> Any:
    if not notes:
        return None
    lines = []
    for finding in notes:
        reason = finding_text.explain_note(finding)
        target = next(
            (href for p in finding.where if (href := timeline_href(view, finding, p))), None
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
                    link("Show on the timeline", href=target) if target else None,
                ),
                _note_gain(finding),
                id=anchor(finding),
            )
        )
    return card("Notes", element("Ul", *lines, cls="lines"), aside="not ranked; each says why")


def _note_gain(finding: Finding) -> Any:
    impact = finding.impact
    if not finding_text.note_gain(finding) or impact is None:
        return None
    return element(
        "Span",
        t.format_saving(impact),
        element("Small", f"{t.format_share(impact.share)} {t.format_of(impact.unit)}, uncertain"),
        cls="saving uncertain",
    )
