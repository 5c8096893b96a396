"""A Comparison for the terminal."""

from __future__ import annotations

from advisor.compare import view
from advisor.compare.data import Comparison
from advisor.report.page import Page
from advisor.report.text import clean

_STYLE = {"slower": "bold red", "faster": "bold green"}
_CHANGE = {"fixed": "green", "new": "red"}


def render(c: Comparison, *, width: int = 80, colour: bool = False) -> str:
    """The comparison as text of at most ``width`` columns."""
    page = Page(width, colour=colour)
    page.wrapped(clean(c.verdict), style=_STYLE.get(c.steps.verdict, "bold"))
    page.blank()
    for label, parts in view.sides(c):
        page.flow(label, parts, indent=0)
    for limit in c.limits:
        page.wrapped(clean(limit), first=" !  ", indent=4)
    _table(page, view.step_table(c))
    for note in view.step_notes(c.steps):
        page.wrapped(clean(note), indent=2, style="dim")
    _table(page, view.breakdown(c), "Breakdown")
    _findings(page, c)
    lines = view.realised(c)
    if lines:
        page.section("Predicted and gained")
        for line in lines:
            page.wrapped(clean(line), indent=2)
    _table(page, view.work(c), "Device work")
    return page.getvalue()


def _table(page: Page, table: view.Table | None, title: str = "Step times") -> None:
    if table is None or not table.rows:
        return
    page.section(title)
    page.table(table.head, table.rows)


def _findings(page: Page, c: Comparison) -> None:
    groups = view.findings(c)
    if groups:
        page.section("Findings")
    for title, items in groups:
        page.line((f"{title} ({len(items)})", _CHANGE.get(title, "bold")), indent=2)
        for item in items:
            head, *rest = view.finding(item)
            page.wrapped(clean(head), first="    ∙ ", indent=6)
            page.flow("", rest, indent=-2)
