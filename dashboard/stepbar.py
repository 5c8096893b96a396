"""The step's bar (``advisor.advise.views``), drawn: each instant once, idle time by its cause."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from advisor.core import text as t
from advisor.core.views import Segment, StepBar
from advisor.dashboard.dom import el
from advisor.dashboard.parts import swatch


def bar(shown: StepBar) -> Any:
    """The bar and its legend."""
    working = [legend(f"Working, share {t.of(shown.per)}", shown.work)]
    return el(
        "Div",
        strip(shown.segments, f"Where the {shown.per}'s time goes"),
        el(
            "Div",
            *(working if shown.idle_total is not None else halves(shown.work)),
            legend(shown.idle_title.capitalize(), shown.idle) if shown.idle else None,
            cls="legend",
        ),
    )


def halves(parts: Sequence[Segment]) -> list[Any]:
    """The legend of parts of one kind, in two columns."""
    middle = (len(parts) + 1) // 2
    return [legend("", half) for half in (parts[:middle], parts[middle:]) if half]


def strip(parts: Sequence[Segment], label: str, *, thin: bool = False) -> Any:
    """Only the bar. Read out as one picture with its figures."""
    words = ", ".join(f"{part.label} {part.percent}" for part in parts)
    return el(
        "Div",
        *(
            el(
                "Span",
                cls="idle" if part.kind == "idle" else "",
                style={
                    "flex": f"{max(part.share, 0.0):.6f} 1 0",
                    "backgroundColor": part.look.colour,
                },
                title=f"{part.label}: {part.time}, {part.percent}",
            )
            for part in parts
        ),
        cls="bar thin" if thin else "bar",
        role="img",
        aria_label=f"{label}: {words}",
    )


def legend(title: str, parts: Sequence[Segment]) -> Any:
    """The parts with their figures."""
    rows = [
        el(
            "Tr",
            el("Th", swatch(part.look.colour), part.label, scope="row"),
            el("Td", part.time, cls="num"),
            el("Td", part.percent, cls="num share"),
        )
        for part in parts
    ]
    return el("Table", el("Caption", title) if title else None, el("Tbody", *rows))
