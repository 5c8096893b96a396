"""The step's bar: each instant once, idle time by its cause, as on the terminal."""

from __future__ import annotations

from typing import Any, NamedTuple

from advisor.dashboard import theme
from advisor.dashboard.dom import el
from advisor.dashboard.parts import swatch
from advisor.report import text as t
from advisor.report.data import Report
from advisor.report.timebar import SMALL


class Piece(NamedTuple):
    """One part of the bar."""

    label: str
    colour: str
    ns: float
    share: float
    """Of the step."""
    idle: bool = False


def pieces(report: Report) -> tuple[list[Piece], list[Piece]]:
    """Work, and idle time by cause; without device work the main thread's time and nothing."""
    if not report.time:
        return [
            Piece(t.host_label(part.name), theme.of_host(part.name), part.ns, part.share)
            for part in report.host
        ], []
    work = [
        Piece(t.LABELS.get(part.name, part.name), theme.of_class(part.name), part.ns, part.share)
        for part in report.time
        if part.name != "idle" and part.ns > 0
    ]
    idle = [
        Piece(t.cause_label(item.cause), theme.of_cause(item.cause), item.ns, item.share, True)
        for item in report.idle
        if item.ns > 0
    ]
    idle = _folded(idle)
    if not report.idle:
        idle = [
            Piece(t.LABELS["idle"], theme.of_class("idle"), part.ns, part.share, True)
            for part in report.time
            if part.name == "idle" and part.ns > 0
        ]
    return work, idle


def _folded(causes: list[Piece]) -> list[Piece]:
    """Causes too small for a segment of their own, summed, as the terminal does."""
    large = [cause for cause in causes if cause.share >= SMALL]
    small = [cause for cause in causes if cause.share < SMALL]
    if len(small) < 2:
        return causes
    ns, share = sum(cause.ns for cause in small), sum(cause.share for cause in small)
    return [*large, Piece("other causes", theme.PLAIN, ns, share, True)]


def bar(report: Report) -> Any:
    """The bar and its legend."""
    work, idle = pieces(report)
    if not work and not idle:
        return None
    unit = t.loop_unit(report.scope.step_source)
    return el(
        "Div",
        strip([*work, *idle], f"Where the {unit}'s time goes"),
        el(
            "Div",
            *([legend("Working", work)] if report.time else halves(work)),
            legend(_idle_title(report), idle) if idle else None,
            cls="legend",
        ),
    )


def halves(parts: list[Piece]) -> list[Any]:
    """The legend of parts of one kind, in two columns."""
    middle = (len(parts) + 1) // 2
    return [legend("", half) for half in (parts[:middle], parts[middle:]) if half]


def strip(parts: list[Piece], label: str, *, thin: bool = False) -> Any:
    """Only the bar. Read out as one picture with its figures."""
    words = ", ".join(f"{part.label} {t.percent(part.share)}" for part in parts)
    return el(
        "Div",
        *(
            el(
                "Span",
                cls="idle" if part.idle else "",
                style={"flex": f"{max(part.share, 0.0):.6f} 1 0", "backgroundColor": part.colour},
                title=f"{part.label}: {t.time(part.ns)}, {t.percent(part.share)}",
            )
            for part in parts
        ),
        cls="bar thin" if thin else "bar",
        role="img",
        aria_label=f"{label}: {words}",
    )


def _idle_title(report: Report) -> str:
    total = next((part for part in report.time if part.name == "idle"), None)
    if total is None:
        return "Idle"
    return f"Idle {t.time(total.ns)}, {t.percent(total.share)}, by cause"


def legend(title: str, parts: list[Piece]) -> Any:
    """The parts with their figures."""
    durations = t.times([part.ns for part in parts])
    rows = [
        el(
            "Tr",
            el("Th", swatch(part.colour), part.label, scope="row"),
            el("Td", duration, cls="num"),
            el("Td", t.percent(part.share), cls="num share"),
        )
        for part, duration in zip(parts, durations, strict=True)
    ]
    return el("Table", el("Caption", title) if title else None, el("Tbody", *rows))
