"""The terminal renderer: verdict first, then where the time goes, then what to do about it."""

from __future__ import annotations

from advisor.model import Finding
from advisor.report import facts
from advisor.report import text as t
from advisor.report.data import RankLine, Report
from advisor.report.page import Page
from advisor.report.timebar import Segment, cells, device_segments, host_segments

MOST_RANKS = 16
_STATUS = {"bottlenecks": "bold yellow", "healthy": "bold green", "limited": "bold"}
_SEVERITY = {"critical": "bold red", "warning": "yellow", "info": ""}


def render(report: Report, *, width: int = 80, colour: bool = False, top: int | None = None) -> str:
    """The report as text of at most ``width`` columns. ``top``: only so many findings."""
    page = Page(width, colour=colour)
    page.wrapped(t.clean(report.verdict), style=_STATUS[report.status])
    page.blank()
    for label, parts in facts.scope(report):
        page.flow(label, parts, indent=0)
    _time(page, report)
    _ranks(page, report)
    _findings(page, report, top)
    _apart(page, report)
    _rest(page, report)
    return page.getvalue()


# -- where the time goes ------------------------------------------------------------------------


def _time(page: Page, report: Report) -> None:
    unit = t.loop_unit(report.scope.step_source)
    if report.time:
        work, idle = device_segments(report)
        page.section(f"Where the {unit}'s time goes on the GPU")
    elif report.host:
        work, idle = host_segments(report), []
        page.section(f"Where the {unit}'s time goes on the host's main thread")
    else:
        return
    lengths = cells([segment.share for segment in (*work, *idle)], page.width)
    both = zip((*work, *idle), lengths, strict=True)
    page.line(*((segment.glyph * length, segment.style) for segment, length in both if length))
    _legend(page, work, idle, report)
    figures = facts.figures(report)
    if figures:
        page.blank()
    for label, parts in figures:
        page.flow(label, parts, indent=2)


def _legend(page: Page, work: list[Segment], idle: list[Segment], report: Report) -> None:
    """Work on the left, causes of idle time on the right; below each other on a narrow page."""
    durations = t.times([segment.ns for segment in (*work, *idle)])
    wide = max(map(len, durations), default=0)
    figures = [
        f"{duration:>{wide}}  {t.percent(s.share):>4}"
        for s, duration in zip((*work, *idle), durations, strict=True)
    ]
    room = page.width - wide - 12
    left_room = min(max((len(s.label) for s in work), default=0), room)
    right_room = min(max((len(s.label) for s in idle), default=0), room)
    second = left_room + wide + 16 if work and idle else 0
    if second + right_room + wide + 12 > page.width:
        second = 0
        left_room = right_room = max(left_room, right_room)
    left = [_entry(s, text, left_room) for s, text in zip(work, figures, strict=False)]
    right = [
        _entry(s, text, right_room) for s, text in zip(idle, figures[len(work) :], strict=True)
    ]
    if right:
        total = next((part for part in report.time if part.name == "idle"), None)
        amount = f" {t.time(total.ns)}, {t.percent(total.share)}" if total is not None else ""
        right.insert(0, [(f"  idle{amount}, by cause", "dim")])
    if not second:
        for entry in (*left, *right):
            page.line(*entry)
        return
    for row in range(max(len(left), len(right))):
        parts = list(left[row]) if row < len(left) else []
        if row < len(right):
            parts += [(" " * (second - sum(len(text) for text, _ in parts)), ""), *right[row]]
        page.line(*parts)


def _entry(segment: Segment, figures: str, room: int) -> list[tuple[str, str]]:
    label = t.shorten(segment.label, room)
    return [(f"  {segment.glyph} ", segment.style), (f"{label:<{room}}  ", ""), (figures, "")]


def _ranks(page: Page, report: Report) -> None:
    if report.ranks is None:
        return
    lines = report.ranks.lines
    shown = sorted(lines, key=_slowness, reverse=True)[:MOST_RANKS]
    page.section("Ranks", f"{len(lines)}")
    head = ["rank", "step", "GPU busy", "exposed comm.", "idle", "comes last", "others wait"]
    rows = [
        [
            "–" if line.rank < 0 else str(line.rank),
            t.time(line.step_ns),
            _short(t.percent(line.busy_share)),
            _short(t.time(line.communication_ns)),
            _short(t.time(line.idle_ns)),
            _short(t.percent(line.last_share)),
            _short(t.time(line.caused_wait_ns)),
        ]
        for line in sorted(shown, key=lambda line: line.rank)
    ]
    page.table(head, rows)
    if len(lines) > len(shown):
        page.wrapped(
            f"{len(lines) - len(shown)} more ranks wait less; --format json has all.", indent=2
        )
    page.wrapped(t.clean(report.ranks.note), indent=2, style="dim")


def _slowness(line: RankLine) -> tuple[float, float]:
    return line.caused_wait_ns or 0.0, line.step_ns


def _short(text: str) -> str:
    return "–" if text == t.NOT_MEASURED else text


# -- what to do ---------------------------------------------------------------------------------


def _findings(page: Page, report: Report, top: int | None) -> None:
    found = facts.ranked(report)
    if not found:
        return
    shown = found if top is None else found[:top]
    page.section("What to change", "by gain and confidence" if len(found) > 1 else "")
    if len(found) > 1:
        _index(page, report, found)
        page.wrapped(facts.outlook(report), indent=4, style="dim")
    for finding in shown:
        page.blank()
        _finding(page, report, finding)
        if len(found) == 1:
            page.field("then", facts.outlook(report), style="dim")
    if len(shown) < len(found):
        page.blank()
        page.wrapped(f"{len(found) - len(shown)} more in detail: --top {len(found)}.", indent=1)


def _index(page: Page, report: Report, found: list[Finding]) -> None:
    """One line a finding: the whole picture, and what the step could come down to."""
    left = report.scope.step_ns
    rows = []
    for finding in found:
        gain = finding.rank_gain_ns or 0
        left -= gain
        rows.append((finding, gain, max(0.0, left)))
    gains = t.times([float(gain) for _, gain, _ in rows])
    lefts = t.times([after for _, _, after in rows])
    saves = "saves up to" if facts.bounded(report) else "saves"
    wide = max(len(saves), *(len(gain) + 5 for gain in gains))
    wider = max(len("step then"), *map(len, lefts))
    titles = [t.clean(finding.title) for finding in found]
    room = min(page.width - wide - wider - 7, max(map(len, titles)) + 2)
    page.line((f"{saves:>{wide + room + 4}}  {'step then':>{wider}}", "dim"), indent=1)
    for (finding, gain, _), title, gain_text, left_text in zip(
        rows, titles, gains, lefts, strict=True
    ):
        share = t.percent(gain / report.scope.step_ns if report.scope.step_ns else None)
        short = title if len(title) <= room else f"{title[: room - 1]}…"
        page.line(
            (f"{finding.rank:>2}  ", _SEVERITY[finding.severity]),
            (f"{short:<{room}}", ""),
            (f"{f'{gain_text} {share:>4}':>{wide + 1}}", "green"),
            (f"  {left_text:>{wider}}", "dim"),
        )


def _finding(page: Page, report: Report, finding: Finding) -> None:
    number = f"{finding.rank:>2}" if finding.rank is not None else " ∙"
    page.wrapped(t.clean(finding.title), first=f"{number}  ", indent=4, style="bold")
    page.flow("gain", _gain(report, finding), style="green")
    for index, location in enumerate(facts.places(finding)):
        room = page.width - 16
        names = t.place_names(location, name_width=min(room, 48), path_width=min(room - 8, 60))
        page.flow("where" if index == 0 else "", [*names, *t.place_figures(location)])
    page.field("why", finding.summary)
    page.flow("seen", [t.evidence(item) for item in finding.evidence])
    page.field("fix", finding.fix, style="bold")
    if finding.code:
        page.code("code", finding.code)
    page.field("check", finding.check)
    page.field("doubt", "; ".join(facts.doubts(finding)), style="dim")
    for other in facts.folded(report, finding):
        page.field(*facts.covered_line(finding, other), style="dim")


def _gain(report: Report, finding: Finding) -> list[str]:
    unit = t.loop_unit(report.scope.step_source)
    parts = [t.gain(finding, step=unit)]
    spread = t.band(finding)
    if spread is not None:
        parts.append(spread)
    parts += facts.order_parts(finding, report)
    parts.append(f"confidence {t.percent(finding.confidence)}")
    if finding.severity != "info":
        parts.append(finding.severity)
    return parts


# -- what else there is -------------------------------------------------------------------------


def _apart(page: Page, report: Report) -> None:
    """Risks, in full but for what they are worth; notes in two lines each."""
    if report.risks:
        page.section("Memory and risks")
        for finding in report.risks:
            _finding(page, report, finding)
    if report.notes:
        page.section("Notes")
        unit = t.loop_unit(report.scope.step_source)
        for finding in report.notes:
            reason = facts.why_note(finding)
            aside = (f" ({reason})" if reason else "", "dim")
            page.wrapped(t.clean(finding.title), aside, first=" ∙  ", indent=4)
            page.wrapped(t.clean(finding.summary), indent=4, style="dim")
            worth = finding.worth
            if worth is not None and worth.currency == "step_time" and worth.gain_ns:
                page.flow(
                    "gain", [part for part in (t.gain(finding, step=unit), t.band(finding)) if part]
                )
            page.field("fix", finding.fix)


def _rest(page: Page, report: Report) -> None:
    if report.hot_lines:
        page.section("Hot Python lines", "of a separate pass under Scalene")
        for share, place, text in facts.hot_lines(report):
            page.wrapped((f"{place}  ", ""), (text, "dim"), first=f" {share:>4}  ", indent=7)
    if report.good:
        page.section("What is good")
        for good in report.good:
            page.wrapped(t.clean(good.text), first=" ✓  ", indent=4)
    missing = facts.abstentions(report)
    if missing:
        page.section("Not checked")
        for what, why in missing:
            page.wrapped((f"{what}: ", ""), (why, "dim"), first=" ?  ", indent=4)
    if report.limits:
        page.section("Limits of this trace")
        for limit in report.limits:
            page.wrapped(t.clean(limit), first=" !  ", indent=4)
    closing = facts.definitions(report)
    if closing:
        page.blank()
        page.wrapped(" ".join(closing), style="dim")
