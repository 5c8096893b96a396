"""A Decision for a person at a terminal."""

from __future__ import annotations

from textwrap import wrap

from advisor.compare.gate import words as w
from advisor.compare.gate.decide import Decision
from advisor.core.text import clean
from advisor.render.renderer import DEFAULT, Options, Renderer


class Terminal(Renderer[Decision]):
    """The answer first, then why."""

    def render(self, subject: Decision, options: Options = DEFAULT) -> str:
        """The text, ending in a line feed."""
        told = [*subject.reasons, *w.about(subject), *(w.figure(item) for item in subject.figures)]
        for what, found in (("new", subject.new), ("gone", subject.gone)):
            for item in found[: w.LIMIT]:
                at = f" ({clean(item.place)})" if item.place else ""
                told.append(f"{what} finding: {clean(item.title)}{at}")
        told += [f"! {line}" for line in subject.limits]
        lines = [w.headline(subject), ""]
        for line in told:
            lines += wrap(
                line,
                options.width,
                initial_indent="  ",
                subsequent_indent="    ",
                break_on_hyphens=False,
            )
        lines += ["", f"exit code {int(subject.failed)}"]
        return "\n".join(lines) + "\n"
