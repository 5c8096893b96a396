"""A gate's decision as workflow commands, which GitHub Actions shows with the job."""

from __future__ import annotations

from advisor.compare import view
from advisor.compare.comparison import Comparison
from advisor.core.text import clean
from advisor.render.renderer import DEFAULT, Options, Renderer
from advisor.render.report.github import escape_data, escape_property


class Github(Renderer[Comparison]):
    """One for the decision, and a warning for each new finding."""

    def render(self, subject: Comparison, options: Options = DEFAULT) -> str:
        """The text, ending in a line feed."""
        decision = subject.decision
        assert decision is not None
        level = "warning" if decision.answer == "not shown" else "notice"
        level = "error" if decision.failed else level
        text = clean(f"{view.headline(subject)}. {'; '.join(decision.reasons)}.")
        lines = [f"::{level} title=advisor gate::{escape_data(text)}"]
        for item in dict(view.gate_findings(subject))["new"]:
            title = escape_property("advisor: new finding")
            at = f" ({item.place})" if item.place else ""
            lines.append(f"::warning title={title}::{escape_data(clean(item.title + at))}")
        return "".join(f"{line}\n" for line in lines)
