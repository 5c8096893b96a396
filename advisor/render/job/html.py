"""A JobReport as one HTML file, that loads nothing and runs nothing."""

from __future__ import annotations

from functools import cache
from importlib.resources import files
from typing import Final, NamedTuple

from advisor.advise.ranks import sentences as w
from advisor.advise.ranks import views
from advisor.core import palette
from advisor.core import text as t
from advisor.measure.ranks.job_report import JobReport
from advisor.render.html import fill
from advisor.render.renderer import DEFAULT, Options, Renderer

POLICY: Final = "default-src 'none'; style-src 'unsafe-inline'; base-uri 'none'; form-action 'none'"
"""Content security policy: styles of the page itself, and nothing else from anywhere."""
SHADES: Final = 4
"""Colours on either side of the median's."""
STRIP: Final = 128
"""Ranks beside each other; of more, strips below each other."""
WIDE, HIGH, LABELS, GAP, TOP = 1024, 15, 132, 10, 14
"""Of the map: width of a full strip, height of a class, room for names, between strips, for the
numbers above one."""
LIMIT: Final = 200
"""Of a kind of lines."""


class Cell(NamedTuple):
    """One rectangle of the map."""

    look: str
    x: str
    y: int
    words: str


class Strip(NamedTuple):
    """The classes of up to ``STRIP`` ranks."""

    top: int
    cells: list[Cell]
    labels: list[tuple[int, str]]
    """Baseline, name of the class."""
    ticks: list[tuple[str, str]]
    """x, rank."""


class Html(Renderer[JobReport]):
    """A whole document; hovering over the map tells its numbers, a table has all of them."""

    suffixes = (".html", ".htm")

    def render(self, subject: JobReport, options: Options = DEFAULT) -> str:
        """The page."""
        heat = views.heat_map(subject)
        bins = views.histogram(subject)
        most = max((one.ranks for one in bins), default=1)
        found = [] if heat is None else strips(heat)
        high = 0
        if found and heat is not None:
            high = found[-1].top + TOP + HIGH * len(heat.classes)
        return fill(
            "render/job.html",
            report=subject,
            w=w,
            views=views,
            policy=POLICY,
            style=style(),
            bins=[(one, f"{views.bar(one.ranks, most, 1000) / 10:.1f}") for one in bins],
            heat=heat,
            strips=found,
            size=(LABELS + WIDE, high),
            cell=(0 if heat is None else width(heat), HIGH),
            left=LABELS,
            shades=range(-SHADES, SHADES + 1),
            most=LIMIT,
            top=options.top,
            missing=w.missing_count(subject),
        )


def width(heat: views.HeatMap) -> float:
    """Of a cell."""
    return min(48.0, WIDE / min(STRIP, len(heat.rows)))


def strips(heat: views.HeatMap) -> list[Strip]:
    """The map, as rectangles in places."""
    wide = width(heat)
    found: list[Strip] = []
    each = TOP + HIGH * len(heat.classes) + GAP
    every = max(1, round(64 / wide))  # a number of four digits is some 30 wide
    for first in range(0, len(heat.rows), STRIP):
        rows = heat.rows[first : first + STRIP]
        top = len(found) * each
        lines = [top + TOP + HIGH * place for place in range(len(heat.classes))]
        cells = [
            Cell(
                shade(heat.tint(row, place)),
                f"{LABELS + at * wide:.6g}",
                line,
                heat.words(row, place),
            )
            for at, row in enumerate(rows)
            for place, line in enumerate(lines)
        ]
        names = [
            (line + HIGH - 4, t.shorten(views.label(name), 20))
            for line, name in zip(lines, heat.classes, strict=True)
        ]
        ticks = [
            (f"{LABELS + at * wide:.6g}", str(rows[at].rank)) for at in range(0, len(rows), every)
        ]
        found.append(Strip(top, cells, names, ticks))
    return found


def shade(tint: float | None) -> str:
    """The class of a colour: ``h-4`` … ``h0`` … ``h4``; ``hx``: not measured."""
    return "hx" if tint is None else f"h{round(tint * SHADES)}"


@cache
def style() -> str:
    """The page's style sheet: that of every report, and the map's."""
    sheet = files("advisor.render").joinpath("report.css").read_text(encoding="utf-8")
    own = files("advisor.render").joinpath("job.css").read_text(encoding="utf-8")
    return f"{sheet}{palette.css()}{own}"
