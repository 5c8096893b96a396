"""Overview: the verdict, what the step is made of, what to fix first."""

from __future__ import annotations

from typing import Any

from advisor.dashboard import current
from advisor.dashboard.dom import el
from advisor.report import text as t


def layout(**query: object) -> Any:
    """The page."""
    view = current.view(**query)
    return el("H1", t.clean(view.loaded.report.verdict))
