"""A Comparison for the terminal."""

from __future__ import annotations

from advisor.compare import view
from advisor.compare.comparison import Comparison
from advisor.compare.view import per
from advisor.core.text import clean
from advisor.render.page import Page
from advisor.render.renderer import DEFAULT, Options, Renderer

_STYLE = {"slower": "bold red", "faster": "bold green"}
_CHANGE = {"fixed": "green", "new": "red"}


class Terminal(Renderer[Comparison]):
    """Text of at most ``width`` columns."""

    def render(self, subject: Comparison, options: Options = DEFAULT) -> str:
        """The comparison, each table as wide as it must be."""
        page = Page(options.width, colour=options.colour)
        page.wrapped(clean(subject.verdict), style=_STYLE.get(subject.steps.verdict, "bold"))
        page.blank()
        for label, parts in view.sides(subject):
            page.flow(label, parts, indent=0)
        for limit in subject.limits:
            page.wrapped(clean(limit), first=" !  ", indent=4)
        _table(page, view.step_table(subject))
        for note in view.step_notes(subject.steps):
            page.wrapped(clean(note), indent=2, style="dim")
        _table(page, view.breakdown(subject), "Breakdown")
        _findings(page, subject)
        lines = view.realised(subject)
        if lines:
            page.section("Predicted and gained")
            for line in lines:
                page.wrapped(clean(line), indent=2)
        _table(page, view.work(subject), "Device work")
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
            head, *rest = view.finding(item, per(c))
            page.wrapped(clean(head), first="    ∙ ", indent=6)
            page.flow("", rest, indent=-2)
