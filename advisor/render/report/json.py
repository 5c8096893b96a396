"""The JSON renderer: the Report as it is, with nothing in it that a terminal could obey."""

from __future__ import annotations

from advisor.core.report import Report
from advisor.core.text import sanitize
from advisor.render.renderer import DEFAULT, Options, Renderer


class Json(Renderer[Report]):
    """The documented JSON (docs/report-schema.md), indented by two."""

    suffixes = (".json",)

    def render(self, subject: Report, options: Options = DEFAULT) -> str:
        """The whole report: nothing is shortened or left out. Reads back with
        ``Report.from_json``."""
        return sanitize(subject.to_json())
