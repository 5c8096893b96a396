"""A JobReport as JSON."""

from __future__ import annotations

import msgspec

from advisor.core.text import sanitize
from advisor.measure.ranks.job_report import JobReport
from advisor.render.renderer import DEFAULT, Options, Renderer


class Json(Renderer[JobReport]):
    """All of it, indented by two; ``advisor dashboard`` opens it."""

    suffixes = (".json",)

    def render(self, subject: JobReport, options: Options = DEFAULT) -> str:
        """Nothing is shortened or left out."""
        return sanitize(msgspec.json.format(subject.to_json(), indent=2)) + "\n"
