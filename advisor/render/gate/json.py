"""A Decision as JSON."""

from __future__ import annotations

from advisor.compare.gate.decide import Decision
from advisor.core.text import sanitize
from advisor.render.renderer import DEFAULT, Options, Renderer


class Json(Renderer[Decision]):
    """The whole decision, indented by two."""

    suffixes = (".json",)

    def render(self, subject: Decision, options: Options = DEFAULT) -> str:
        """Nothing is shortened or left out."""
        return sanitize(subject.to_json())
