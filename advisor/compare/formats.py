"""The formats of a comparison."""

from __future__ import annotations

from typing import Final

from advisor.report.formats import Formats

COMPARISONS: Final = Formats(
    "advisor.compare.renderers", "advisor.comparison_renderers", "a comparison"
)
