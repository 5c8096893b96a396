"""A JobReport for a person at a terminal: a page, the verdict first."""

from __future__ import annotations

from typing import Final

from advisor.advise.ranks import sentences as w
from advisor.advise.ranks import views
from advisor.core import text as t
from advisor.measure.ranks.job_report import JobReport
from advisor.render.page import Page
from advisor.render.renderer import DEFAULT, Options, Renderer

MAX_ALIKE: Final = 6
MAX_ODD: Final = 6
MAX_FINDINGS: Final = 2
"""Told in full; of as many again a line."""
MAX_LINES: Final = 3
LONGEST: Final = 200
"""Characters of a reason."""
COLUMNS: Final = 4
"""Classes in the table of groups, largest first."""
_SEVERITY: Final = {"critical": "bold red", "warning": "yellow"}


class Terminal(Renderer[JobReport]):
    """Text of at most ``width`` columns; JSON and HTML have what is left out."""

    def render(self, subject: JobReport, options: Options = DEFAULT) -> str:
        """The page; ``top`` findings are told in full, not two."""
        page = Page(options.width, colour=options.colour)
        page.wrapped(t.clean(subject.verdict), style="bold")
        page.blank()
        for label, parts in w.scope(subject):
            page.flow(label, parts, indent=0)
        _steps(page, subject)
        _alike(page, subject)
        _odd(page, subject)
        _findings(page, subject, MAX_FINDINGS if options.top is None else options.top)
        _what_if(page, subject)
        _missing(page, subject)
        took = w.work(subject)
        if took:
            page.blank()
            page.wrapped(took, style="dim")
        return page.getvalue()


def _more(page: Page, count: int, noun: str, most: int) -> None:
    if count > most:
        page.line(
            (f"… and {t.count_noun(count - most, noun)} more: --format json", "dim"), indent=2
        )


def _steps(page: Page, report: JobReport) -> None:
    bins = views.histogram(report)
    if not bins:
        return
    page.section("The ranks' steps", "mean step, ranks")
    most = max(one.ranks for one in bins)
    names = [one.words for one in bins]
    wide, digits = max(map(len, names)), len(t.format_count(most))
    room = page.width - wide - digits - 6
    for one, name in zip(bins, names, strict=True):
        length = views.bar(one.ranks, most, room)
        told = f"{name:>{wide}}  {t.format_count(one.ranks):>{digits}}  "
        page.line(told, ("█" * length, "green"), indent=2)


def _alike(page: Page, report: JobReport) -> None:
    if not report.alike:
        return
    page.section("Ranks that are alike", "median, a step")
    total: dict[str, float] = {}
    for group in report.alike:
        for name, ns in group.time.items():
            total[name] = total.get(name, 0.0) + ns * group.count
    classes = sorted(total, key=lambda name: -total[name])[:COLUMNS]
    while True:  # as many classes as there is room for
        head = ["group", "ranks", "step", *(t.shorten(t.clean(name), 14) for name in classes)]
        rows = [
            [
                t.shorten(t.clean(group.name), 24),
                t.format_count(group.count),
                t.format_duration(group.step_ns),
                *(t.format_duration(group.time.get(name)) for name in classes),
            ]
            for group in report.alike[:MAX_ALIKE]
        ]
        wide = sum(max(map(len, column)) + 2 for column in zip(head, *rows, strict=True))
        if wide <= page.width or not classes:
            break
        classes.pop()
    page.table(head, rows)
    for group in report.alike[:MAX_ALIKE] if len(report.alike) > 1 else []:
        page.wrapped(f"{t.clean(group.name)}: {w.ranks(group.ranks)}", indent=2, style="dim")
    _more(page, len(report.alike), "group", MAX_ALIKE)


def _odd(page: Page, report: JobReport) -> None:
    if not report.odd:
        return
    page.section("Not like the others")
    for odd in report.odd[:MAX_ODD]:
        page.wrapped((w.odd_name(odd), "bold"), f": {w.odd_kind(odd)}", first=" •", indent=3)
        page.wrapped(" · ".join(w.odd_figures(odd)), indent=3)
        if odd.why:
            page.wrapped(t.clean(odd.why), indent=3, style="dim")
        if odd.fix:
            page.wrapped(f"fix: {t.clean(odd.fix)}", indent=3)
    _more(page, len(report.odd), "rank or host", MAX_ODD)


def _findings(page: Page, report: JobReport, most: int) -> None:
    if not report.findings:
        return
    page.section("What to change", "worth of the job's step")
    for number, found in enumerate(report.findings[:most], start=1):
        style = _SEVERITY.get(found.severity, "")
        page.wrapped((t.clean(found.title), style or "bold"), first=f"{number:>2}", indent=4)
        page.flow("worth", w.finding_parts(report, found), indent=4)
        page.field("why", t.clean(found.summary))
        page.field("fix", t.clean(found.fix))
        page.field("check", t.clean(found.verify))
    for number, found in enumerate(report.findings[most : 3 * most], start=most + 1):
        page.line(f"{number:>2}  {t.clean(found.title)} · {w.gain(found) or 'not priced'}")
    _more(page, len(report.findings), "finding", 3 * most)


def _what_if(page: Page, report: JobReport) -> None:
    if not report.what_if:
        return
    page.section("What if", "by replay of the ranks' collectives")
    for item in report.what_if[:MAX_LINES]:
        page.wrapped(f"{t.clean(item.text)}: {w.gain(item)}", first=" •", indent=3)
    _more(page, len(report.what_if), "case", MAX_LINES)


def _missing(page: Page, report: JobReport) -> None:
    lines = [w.missing(item) for item in report.missing]
    unchecked = [f"{t.clean(name)}: {t.clean(why)}" for name, why in report.not_checked.items()]
    for title, found in (("Ranks that were not read", lines), ("Not checked", unchecked)):
        if found:
            page.section(title)
            for line in found[:MAX_LINES]:
                page.wrapped(t.shorten(line, LONGEST), first=" !", indent=3)
            _more(page, len(found), "reason", MAX_LINES)
