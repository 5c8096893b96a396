"""Documents, one file a subject: the only place that words a subject for every format."""

from __future__ import annotations

from importlib import import_module
from typing import Any, Final

from advisor.render.document import DEFAULT, Document, RenderOptions

HOMES: Final = {
    "Report": "report",
    "Comparison": "comparison",
    "TrialReport": "trial",
}
"""Class of a subject -> the module here whose ``build(subject, options)`` makes its document."""


def document_of(subject: Any, options: RenderOptions = DEFAULT) -> Document:
    """The document of a report, a comparison, a decision, a trial. Only its module is imported."""
    home = import_module(f"{__name__}.{HOMES[type(subject).__name__]}")
    made: Document = home.build(subject, options)
    return made
