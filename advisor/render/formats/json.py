"""The JSON renderer: the data as it is, with nothing in it that a terminal could obey."""

from typing import Any

from advisor.core.labels import sanitize
from advisor.render.renderer import DEFAULT, Renderer, RenderOptions


class Json(Renderer[Any]):
    """The documented JSON of a subject (docs/report-schema.md), indented by two."""

    suffixes = (".json",)

    def render(self, subject: Any, options: RenderOptions = DEFAULT) -> str:
        """Return all data: nothing is shortened or left out. Reads back with ``from_json``."""
        return sanitize(subject.to_json().rstrip(b"\n") + b"\n")
