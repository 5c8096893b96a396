"""A Comparison as Markdown, for a pull request."""

from __future__ import annotations

from advisor.compare import view
from advisor.compare.comparison import Comparison
from advisor.compare.view import per
from advisor.render.markdown import escape, table
from advisor.render.renderer import DEFAULT, Options, Renderer


class Markdown(Renderer[Comparison]):
    """GitHub-flavoured Markdown."""

    suffixes = (".md", ".markdown")

    def render(self, subject: Comparison, options: Options = DEFAULT) -> str:
        """The comparison with all its tables."""
        parts = [f"**{escape(subject.verdict)}**"]
        parts.append(
            "\n".join(
                f"- {label}: {' · '.join(escape(part) for part in items)}"
                for label, items in view.sides(subject)
            )
        )
        if subject.limits:
            parts.append(
                "\n".join(f"> {escape(limit)}\\" for limit in subject.limits).removesuffix("\\")
            )
        parts += _table("Step times", view.step_table(subject))
        parts += [f"*{escape(note)}*" for note in view.step_notes(subject.steps)]
        parts += _table("Breakdown", view.breakdown(subject))
        groups = view.findings(subject)
        if groups:
            parts.append("### Findings")
        for title, items in groups:
            lines = "\n".join(
                f"- {' · '.join(escape(part) for part in view.finding(item, per(subject)))}"
                for item in items
            )
            parts.append(f"**{title}**\n\n{lines}")
        gained = view.realised(subject)
        if gained:
            parts.append("### Predicted and gained")
            parts += [escape(line) for line in gained]
        parts += _table("Device work", view.work(subject))
        return "\n\n".join(parts) + "\n"


def _table(title: str, given: view.Table | None) -> list[str]:
    if given is None or not given.rows:
        return []
    rows = [[escape(cell) for cell in row] for row in given.rows]
    return [f"### {title}", table(given.head, "l" + "r" * (len(given.head) - 1), rows)]
