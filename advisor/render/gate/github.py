"""A Decision as workflow commands, which GitHub Actions shows with the job."""

from __future__ import annotations

from advisor.compare.gate import words as w
from advisor.compare.gate.decide import Decision
from advisor.core.text import clean
from advisor.render.renderer import DEFAULT, Options, Renderer
from advisor.render.report.github import escape_data, escape_property


class Github(Renderer[Decision]):
    """One for the decision, and a warning for each new finding."""

    def render(self, subject: Decision, options: Options = DEFAULT) -> str:
        """The text, ending in a line feed."""
        level = "warning" if subject.answer == "not shown" else "notice"
        level = "error" if subject.failed else level
        text = clean(f"{w.headline(subject)}. {'; '.join(subject.reasons)}.")
        lines = [f"::{level} title=advisor gate::{escape_data(text)}"]
        for item in subject.new[: w.LIMIT]:
            title = escape_property("advisor: new finding")
            at = f" ({item.place})" if item.place else ""
            lines.append(f"::warning title={title}::{escape_data(clean(item.title + at))}")
        return "".join(f"{line}\n" for line in lines)
