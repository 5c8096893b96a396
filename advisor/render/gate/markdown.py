"""A Decision as Markdown, for the summary of a job."""

from __future__ import annotations

from advisor.compare.gate import words as w
from advisor.compare.gate.decide import Decision
from advisor.core.text import NOT_MEASURED, format_duration
from advisor.render.markdown import code, escape
from advisor.render.renderer import DEFAULT, Options, Renderer


class Markdown(Renderer[Decision]):
    """A table with the step and what else was measured, and the reasons."""

    suffixes = (".md", ".markdown")

    def render(self, subject: Decision, options: Options = DEFAULT) -> str:
        """The text, ending in a line feed."""
        mark = "❌" if subject.failed else "⚠️" if subject.answer == "not shown" else "✅"
        lines = [f"### {mark} advisor gate: {w.TITLES[subject.answer].lower()}", ""]
        lines += ["| | baseline | this run | difference |", "|---|---|---|---|"]
        ends = f"{w.signed(subject.share_low)} to {w.signed(subject.share_high)}"
        pair = f"{format_duration(subject.before_ns)} | {format_duration(subject.after_ns)}"
        lines.append(
            f"| step ({subject.statistic}) | {pair} | {w.signed(subject.share)} ({ends}) |"
        )
        for item in subject.figures:
            one, other = w.amount(item, item.before), w.amount(item, item.after)
            share = (
                w.signed(item.after / item.before - 1)
                if item.before and item.after is not None
                else NOT_MEASURED
            )
            lines.append(f"| {item.name} | {one} | {other} | {share} |")
        told = (*subject.reasons, *w.about(subject), *subject.limits)
        lines += ["", *(f"- {escape(line)}" for line in told)]
        for what, found in (("New", subject.new), ("Gone", subject.gone)):
            if found:
                lines += ["", f"{what} findings:", ""]
                lines += [
                    f"- {escape(item.title)} ({code(item.rule)})" for item in found[: w.LIMIT]
                ]
        return "\n".join(lines) + "\n"
