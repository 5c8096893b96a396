"""The timeline page: a place for the canvas, which ``assets/timeline/`` fills."""

from __future__ import annotations

from typing import Any

from advisor.dashboard import current, tracefile
from advisor.dashboard.dom import el


def layout(**query: object) -> Any:
    """The page. What it shows is in the address (``x0``, ``x1``, ns; ``rank``; ``focus``), which
    the script reads and keeps up to date."""
    view = current.view(**query)
    return el(
        "Div",
        el("H1", "Timeline", cls="visually-hidden"),
        el(
            "Div",
            id="timeline",
            data_run=view.entry.key,
            data_advisor_timeline="1",
        ),
        tracefile.buttons(view),
        cls="wide timeline-page",
    )
