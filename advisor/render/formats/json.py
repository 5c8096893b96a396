"""The JSON renderer: the unchanged data, without text that a terminal could interpret."""

from typing import Any

from advisor.core.labels import escape_terminal_controls
from advisor.render.renderer import DEFAULT, Renderer, RenderOptions


class Json(Renderer[Any]):
    """The documented JSON of a subject (docs/report-schema.md), indented by two."""

    suffixes = (".json",)

    def render(self, subject: Any, options: RenderOptions = DEFAULT) -> str:
        """Return all data, without shortening. ``from_json`` reads it back."""
        return escape_terminal_controls(subject.to_json().rstrip(b"\n") + b"\n")
