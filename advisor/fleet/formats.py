"""The formats of the report of a job."""

from __future__ import annotations

from typing import Final

from advisor.report.formats import Formats

JOBS: Final = Formats("advisor.fleet.renderers", "advisor.job_renderers", "the report of a job")
