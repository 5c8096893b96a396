"""A gate's decision for a person at a terminal."""

from __future__ import annotations

from textwrap import wrap

from advisor.compare import view
from advisor.compare.comparison import Comparison
from advisor.core.text import clean
from advisor.render.renderer import DEFAULT, Options, Renderer


class Terminal(Renderer[Comparison]):
    """The answer first, then why."""

    def render(self, subject: Comparison, options: Options = DEFAULT) -> str:
        """The text, ending in a line feed."""
        decision = subject.decision
        assert decision is not None
        notes = [*decision.reasons, *view.gate_notes(subject)]
        notes += [view.figure(item) for item in view.gate_figures(subject)]
        for what, items in view.gate_findings(subject):
            for item in items:
                place = f" ({clean(item.place)})" if item.place else ""
                notes.append(f"{what} finding: {clean(item.title)}{place}")
        notes += [f"! {clean(line)}" for line in subject.limits]
        lines = [view.headline(subject), ""]
        for line in notes:
            lines += wrap(
                line,
                options.width,
                initial_indent="  ",
                subsequent_indent="    ",
                break_on_hyphens=False,
            )
        lines += ["", f"exit code {int(decision.failed)}"]
        return "\n".join(lines) + "\n"
