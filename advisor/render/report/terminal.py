"""The terminal renderer: verdict first, then where the time goes, then what to do about it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from advisor.advise import facts, views
from advisor.core import text as t
from advisor.core.finding import Finding
from advisor.core.report import Report
from advisor.render import memory
from advisor.render.page import Page
from advisor.render.renderer import DEFAULT, Options, Renderer

if TYPE_CHECKING:
    from advisor.core.views import Segment, StepBar

MAX_RANKS = 16
_STATUS = {"bottlenecks": "bold yellow", "healthy": "bold green", "limited": "bold"}
_SEVERITY = {"critical": "bold red", "warning": "yellow", "info": ""}


class Terminal(Renderer[Report]):
    """Text of at most ``width`` columns."""

    def render(self, subject: Report, options: Options = DEFAULT) -> str:
        """The report; of the findings that come after ``top`` one line each."""
        page = Page(options.width, colour=options.colour)
        page.wrapped(t.clean(subject.verdict), style=_STATUS[subject.status])
        page.blank()
        for label, parts in facts.scope(subject):
            page.flow(label, parts, indent=0)
        _time(page, subject)
        _ranks(page, subject)
        _memory(page, subject)
        _findings(page, subject, options.top)
        _apart(page, subject)
        _rest(page, subject)
        return page.getvalue()


# -- where the time goes ------------------------------------------------------------------------


def _time(page: Page, report: Report) -> None:
    bar = views.step_bar(report)
    if bar is None:
        return
    page.section(bar.title, bar.aside)
    lengths = cells([segment.share for segment in bar.segments], page.width)
    both = zip(bar.segments, lengths, strict=True)
    page.line(*((s.look.glyph * length, s.look.style) for s, length in both if length))
    _legend(page, bar)
    figures = facts.figures(report)
    if figures:
        page.blank()
    for label, parts in figures:
        page.flow(label, parts, indent=2)


def cells(shares: list[float], width: int) -> list[int]:
    """Whole cells for each share, largest remainders first, so that they add up to what the
    shares add up to (never more than ``width``)."""
    total = sum(shares)
    if total <= 0:
        return [0] * len(shares)
    exact = [share / max(total, 1.0) * width for share in shares]
    found = [int(size) for size in exact]
    missing = min(width, round(sum(exact))) - sum(found)
    by_remainder = sorted(range(len(exact)), key=lambda i: (found[i] - exact[i], i))
    for index in by_remainder[: max(0, missing)]:
        found[index] += 1
    return found


def _legend(page: Page, bar: StepBar) -> None:
    """Work on the left, causes of idle time on the right; below each other on a narrow page."""
    wide = max(len(segment.time) for segment in bar.segments)
    room = page.width - wide - 12
    left_room = min(max((len(s.label) for s in bar.work), default=0), room)
    right_room = min(max((len(s.label) for s in bar.idle), default=0), room)
    second = left_room + wide + 16 if bar.work and bar.idle else 0
    if second + right_room + wide + 12 > page.width:
        second = 0
        left_room = right_room = max(left_room, right_room)
    left = [_entry(segment, left_room, wide) for segment in bar.work]
    right = [_entry(segment, right_room, wide) for segment in bar.idle]
    if right:
        right.insert(0, [(f"  {bar.idle_title}", "dim")])
    if not second:
        for entry in (*left, *right):
            page.line(*entry)
        return
    for row in range(max(len(left), len(right))):
        parts = list(left[row]) if row < len(left) else []
        if row < len(right):
            parts += [(" " * (second - sum(len(text) for text, _ in parts)), ""), *right[row]]
        page.line(*parts)


def _entry(segment: Segment, room: int, wide: int) -> list[tuple[str, str]]:
    label = t.shorten(segment.label, room)
    return [
        (f"  {segment.look.glyph} ", segment.look.style),
        (f"{label:<{room}}  ", ""),
        (f"{segment.time:>{wide}}  {segment.percent:>4}", ""),
    ]


def _ranks(page: Page, report: Report) -> None:
    table = views.rank_table(report, MAX_RANKS)
    if table is None:
        return
    page.section("Ranks", f"{table.total} in this recording")
    page.table(table.head, [row.cells for row in table.rows])
    page.wrapped(table.more, indent=2)
    page.wrapped(table.note, indent=2, style="dim")


def _memory(page: Page, report: Report) -> None:
    """What a memory snapshot shows."""
    for device in memory.devices(report):
        page.section(device.title, device.aside)
        for label, parts in device.lines:
            page.flow(label, parts, indent=2)
        for table in device.tables:
            page.blank()
            page.wrapped(table.title, indent=2, style="dim")
            page.table(table.head, table.rows)


# -- what to do ---------------------------------------------------------------------------------


def _findings(page: Page, report: Report, top: int | None) -> None:
    found = facts.ranked(report)
    if not found:
        return
    shown = found if top is None else found[:top]
    page.section("What to change", "by gain and confidence" if len(found) > 1 else "")
    if len(found) > 1:
        _index(page, report)
        page.wrapped(facts.outlook(report), indent=4, style="dim")
    for finding in shown:
        page.blank()
        _finding(page, report, finding)
        if len(found) == 1:
            page.field("then", facts.outlook(report), style="dim")
    if len(shown) < len(found):
        page.blank()
        page.wrapped(f"{len(found) - len(shown)} more in detail: --top {len(found)}.", indent=1)


def _index(page: Page, report: Report) -> None:
    """One line a finding: the whole picture, and what the step could come down to."""
    stairs = views.stairs(report)
    if stairs is None:
        return
    saves = f"saves {stairs.bound}".rstrip()
    then = f"{stairs.per} then"
    wide = max(len(saves), *(len(stair.saved) + 5 for stair in stairs.fixes))
    wider = max(len(then), *(len(stair.left) for stair in stairs.fixes))
    longest = max(len(stair.label) for stair in stairs.fixes)
    room = min(page.width - wide - wider - 7, longest + 2)
    page.line((f"{saves:>{wide + room + 4}}  {then:>{wider}}", "dim"), indent=1)
    for stair in stairs.fixes:
        title = stair.label if len(stair.label) <= room else f"{stair.label[: room - 1]}…"
        page.line(
            (f"{stair.number:>2}  ", _SEVERITY[stair.severity]),
            (f"{title:<{room}}", ""),
            (f"{f'{stair.saved} {stair.percent:>4}':>{wide + 1}}", "green"),
            (f"  {stair.left:>{wider}}", "dim"),
        )


def _finding(page: Page, report: Report, finding: Finding) -> None:
    number = f"{finding.rank:>2}" if finding.rank is not None else " ∙"
    page.wrapped(t.clean(finding.title), first=f"{number}  ", indent=4, style="bold")
    page.flow("gain", _gain(report, finding), style="green")
    room = page.width - 16
    where = facts.named_places(finding, name_width=min(room, 48), path_width=min(room - 8, 60))
    for index, (location, names) in enumerate(where):
        page.flow("where" if index == 0 else "", [*names, *t.location_figures(location)])
    page.field("why", finding.summary)
    page.flow("seen", [t.format_evidence(item) for item in finding.evidence])
    page.field("fix", finding.fix, style="bold")
    if finding.code:
        page.code("code", finding.code)
    page.field("check", finding.check)
    page.field("doubt", "; ".join(facts.doubts(finding)), style="dim")
    for other in facts.folded(report, finding):
        page.field(*facts.covered_line(finding, other), style="dim")


def _gain(report: Report, finding: Finding) -> list[str]:
    parts = facts.gain_parts(finding, report)
    if finding.validation == "synthetic":
        parts.append("not proven on real traces")
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
        for finding in report.notes:
            reason = facts.why_note(finding)
            aside = (f" ({reason})" if reason else "", "dim")
            page.wrapped(t.clean(finding.title), aside, first=" ∙  ", indent=4)
            page.wrapped(t.clean(finding.summary), indent=4, style="dim")
            page.field("gain", facts.note_gain(finding))
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
