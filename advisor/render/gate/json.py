"""A gate's comparison as JSON."""

from __future__ import annotations

from advisor.compare.comparison import Comparison
from advisor.core.text import sanitize
from advisor.render.renderer import DEFAULT, Options, Renderer


class Json(Renderer[Comparison]):
    """The whole comparison, with the decision, indented by two."""

    suffixes = (".json",)

    def render(self, subject: Comparison, options: Options = DEFAULT) -> str:
        """Nothing is shortened or left out."""
        return sanitize(subject.to_json())
