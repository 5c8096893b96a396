"""A Decision as JSON."""

from __future__ import annotations

from advisor.gate.decide import Decision
from advisor.report.renderer import DEFAULT, Options, Renderer
from advisor.text import harmless


class Json(Renderer[Decision]):
    """The whole decision, indented by two."""

    suffixes = (".json",)

    def render(self, subject: Decision, options: Options = DEFAULT) -> str:
        """Nothing is shortened or left out."""
        return harmless(subject.to_json())
