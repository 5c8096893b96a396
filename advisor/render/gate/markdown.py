"""A gate's decision as Markdown, for the summary of a job."""

from __future__ import annotations

from advisor.compare import view
from advisor.compare.comparison import Comparison
from advisor.core.text import format_value
from advisor.render.markdown import code, escape
from advisor.render.renderer import DEFAULT, Options, Renderer


class Markdown(Renderer[Comparison]):
    """A table with the step and what else was measured, and the reasons."""

    suffixes = (".md", ".markdown")

    def render(self, subject: Comparison, options: Options = DEFAULT) -> str:
        """The text, ending in a line feed."""
        decision, steps = subject.decision, subject.steps
        assert decision is not None
        mark = "❌" if decision.failed else "⚠️" if decision.answer == "not shown" else "✅"
        lines = [f"### {mark} advisor gate: {view.HEADLINES[decision.answer].lower()}", ""]
        lines += ["| | baseline | this run | difference |", "|---|---|---|---|"]
        change = f"{view.signed(steps.share)} ({view.interval(steps)})"
        pair = " | ".join(view.centers(steps))
        lines.append(f"| step ({steps.statistic}) | {pair} | {change} |")
        for item in view.gate_figures(subject):
            cells = [
                item.name,
                format_value(item.before, item.unit),
                format_value(item.after, item.unit),
            ]
            both = item.before and item.after is not None
            share = item.after / item.before - 1 if both else None  # type: ignore[operator]
            lines.append(f"| {' | '.join([*cells, view.signed(share)])} |")
        notes = (*decision.reasons, *view.gate_notes(subject), *subject.limits)
        lines += ["", *(f"- {escape(line)}" for line in notes)]
        for what, items in view.gate_findings(subject):
            if items:
                lines += ["", f"{what.capitalize()} findings:", ""]
                lines += [f"- {escape(item.title)} ({code(item.rule)})" for item in items]
        return "\n".join(lines) + "\n"
