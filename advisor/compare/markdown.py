"""A Comparison as Markdown, for a pull request."""

from __future__ import annotations

from advisor.compare import view
from advisor.compare.data import Comparison
from advisor.report.markdown import escape, table


def render(c: Comparison) -> str:
    """The comparison as GitHub-flavoured Markdown."""
    parts = [f"**{escape(c.verdict)}**"]
    parts.append(
        "\n".join(
            f"- {label}: {' · '.join(escape(part) for part in items)}"
            for label, items in view.sides(c)
        )
    )
    if c.limits:
        parts.append("\n".join(f"> {escape(limit)}\\" for limit in c.limits).removesuffix("\\"))
    parts += _table("Step times", view.step_table(c))
    parts += [f"*{escape(note)}*" for note in view.step_notes(c.steps)]
    parts += _table("Breakdown", view.breakdown(c))
    groups = view.findings(c)
    if groups:
        parts.append("### Findings")
    for title, items in groups:
        lines = "\n".join(
            f"- {' · '.join(escape(part) for part in view.finding(item))}" for item in items
        )
        parts.append(f"**{title}**\n\n{lines}")
    gained = view.realised(c)
    if gained:
        parts.append("### Predicted and gained")
        parts += [escape(line) for line in gained]
    parts += _table("Device work", view.work(c))
    return "\n\n".join(parts) + "\n"


def _table(title: str, given: view.Table | None) -> list[str]:
    if given is None or not given.rows:
        return []
    rows = [[escape(cell) for cell in row] for row in given.rows]
    return [f"### {title}", table(given.head, "l" + "r" * (len(given.head) - 1), rows)]
