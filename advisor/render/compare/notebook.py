"""What a notebook shows of a Comparison: styled and escaped as a Report is."""

from __future__ import annotations

from advisor.compare import view
from advisor.compare.comparison import Comparison
from advisor.compare.view import per
from advisor.render.html import fill
from advisor.render.renderer import DEFAULT, Options, Renderer

MAX_FINDINGS = 5


class Notebook(Renderer[Comparison]):
    """A fragment of HTML."""

    def render(self, subject: Comparison, options: Options = DEFAULT) -> str:
        """Verdict, limits, step times, what became of the findings."""
        steps = view.step_table(subject)
        tables = [(steps.head, steps.rows)] if steps is not None else []
        for title, items in view.findings(subject):
            rows = [view.finding(item, per(subject))[:2] for item in items[:MAX_FINDINGS]]
            head = [f"{title} ({len(items)})", ""]
            tables.append((head, [[*row, ""][:2] for row in rows]))
        return fill("render/comparison_notebook.html", comparison=subject, tables=tables)
