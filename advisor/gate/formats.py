"""Which formats there are of what a gate answers."""

from __future__ import annotations

from typing import Final

from advisor.report.formats import Formats

DECISIONS: Final = Formats(
    "advisor.gate.renderers", "advisor.decision_renderers", "what a gate answers"
)
