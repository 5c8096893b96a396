"""The step's time as segments of a bar: each instant once, idle time by its cause."""

from __future__ import annotations

from typing import NamedTuple

from advisor.report.data import Report
from advisor.report.text import LABELS, cause_label, host_label

MOST_CAUSES = 5
"""Causes with a segment of their own; smaller ones are summed."""
SMALL = 0.005
"""Share of the step below which a cause has no segment of its own: it would be less than half a
cell wide."""

_CLASSES = {
    "compute": ("█", "green"),
    "communication": ("▓", "magenta"),
    "copies": ("▒", "blue"),
    "memset": ("▚", "cyan"),
}
_IDLE = (
    ("░", "red"),
    ("╱", "yellow"),
    ("∙", "bright_red"),
    ("╲", "bright_yellow"),
    ("┄", "bright_magenta"),
    ("╳", "bright_black"),
)
_HOST = (
    ("█", "blue"),
    ("▓", "magenta"),
    ("▒", "yellow"),
    ("░", "cyan"),
    ("╱", "bright_blue"),
    ("∙", "bright_black"),
)


class Segment(NamedTuple):
    """One part of the bar, with its line in the legend."""

    label: str
    glyph: str
    style: str
    ns: float
    share: float
    """Of the step."""


def device_segments(report: Report) -> tuple[list[Segment], list[Segment]]:
    """Classes of device work, and causes of idle time: together they add up to the step."""
    work = []
    idle_ns = idle_share = 0.0
    for part in report.time:
        if part.name == "idle":
            idle_ns, idle_share = part.ns, part.share
        elif part.ns > 0:
            glyph, style = _CLASSES.get(part.name, ("▚", "cyan"))
            label = LABELS.get(part.name, cause_label(part.name))
            work.append(Segment(label, glyph, style, part.ns, part.share))
    if not report.idle:
        rest = [Segment("idle", "░", "red", idle_ns, idle_share)] if idle_ns > 0 else []
        return work, rest
    causes = [(cause_label(item.cause), item.ns, item.share) for item in report.idle]
    return work, _ranked(causes, _IDLE, "other causes")


def host_segments(report: Report) -> list[Segment]:
    """What the main thread did: the bar of a trace without device work."""
    parts = [(host_label(item.name), item.ns, item.share) for item in report.host]
    return _ranked(parts, _HOST, "other")


def _ranked(
    parts: list[tuple[str, float, float]], looks: tuple[tuple[str, str], ...], rest: str
) -> list[Segment]:
    parts = sorted((part for part in parts if part[1] > 0), key=lambda part: -part[1])
    large = [part for part in parts if part[2] >= SMALL]
    if len(large) > MOST_CAUSES + 1:
        large = large[:MOST_CAUSES]
    small = parts[len(large) :]
    if len(small) > 1:
        parts = [*large, (rest, sum(part[1] for part in small), sum(part[2] for part in small))]
    return [
        Segment(label, *look, ns, share)
        for (label, ns, share), look in zip(parts, looks, strict=False)
    ]


def cells(shares: list[float], width: int) -> list[int]:
    """Whole cells for each share, largest remainders first, so that they add up to what the
    shares add up to (never more than ``width``)."""
    total = sum(shares)
    if total <= 0:
        return [0] * len(shares)
    exact = [share / max(total, 1.0) * width for share in shares]
    found = [int(size) for size in exact]
    missing = min(width, round(sum(exact))) - sum(found)
    by_remainder = sorted(range(len(exact)), key=lambda i: (found[i] - exact[i], i))
    for index in by_remainder[: max(0, missing)]:
        found[index] += 1
    return found
