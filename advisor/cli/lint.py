"""``advisor lint``: static hints about a training program."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from advisor.cli import output as out

if TYPE_CHECKING:
    from advisor.lint import Hint

SCHEMA = "advisor.hints/2"


def command(
    paths: Annotated[
        list[str], typer.Argument(metavar="PATH", help="Python files, or folders of them.")
    ],
    format_name: Annotated[
        Literal["terminal", "json"],
        typer.Option("--format", metavar="FORMAT", help="terminal, or json: one JSON object."),
    ] = "terminal",
    fail: Annotated[bool, typer.Option("--fail", help="Exit with 1 when there is a hint.")] = False,
) -> None:
    """Check the source of a training program for common causes of slow steps.

    Nothing is run. Each hint names the rule that shows on a recording whether it costs time.
    '# advisor: ignore' on its line removes the hint."""
    from advisor.lint import lint_paths

    hints, problems = lint_paths(paths)
    if format_name == "json":
        out.show_json({"schema": SCHEMA, "hints": hints, "problems": problems})
    else:
        out.show(_format_hints(hints, problems))
    if fail and hints:
        raise typer.Exit(1)


def _format_hints(hints: list[Hint], problems: list[str]) -> str:
    from advisor.core import labels
    from advisor.core import text as t
    from advisor.render.formats.terminal import Page

    page = Page(out.find_report_width(sys.stdout), colour=out.can_use_color(sys.stdout))
    count = t.count_noun(len(hints), "hint") if hints else "No hints"
    page.wrap(f"{count} from the source: only a recording shows the cost (advisor record).")
    page.blank_line()
    for number, hint in enumerate(hints, 1):
        place = f"{t.shorten_path(hint.file, 60)}:{hint.line}"
        title = labels.clean(hint.title)
        page.wrap((f"{place}  ", "bold"), title, first=f"{number:>2}", indent=4)
        page.flow("why", [labels.clean(hint.why)])
        page.flow("fix", [labels.clean(hint.fix)], style="bold")
        if hint.confirmed_by:
            page.flow("check", [f"a recording: rule {hint.confirmed_by}"], style="dim")
        if hint.code:
            page.code("code", hint.code)
        page.blank_line()
    for problem in problems:
        page.wrap(labels.clean(problem), style="yellow")
    return page.getvalue()
