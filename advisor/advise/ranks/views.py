"""What is drawn of a job: the ranks' steps as a histogram, and ranks × classes as a heat map.

Made here once, as data with its words, for every renderer and the dashboard.
"""

from __future__ import annotations

import math
from statistics import median
from typing import Final, NamedTuple

from advisor.core import text as t
from advisor.measure.ranks.job_report import JobReport, Row

BINS: Final = 8
EVEN: Final = 0.005
"""Share of the median below which all steps are the same: half of what a step of one rank differs
by from the next."""
MIN_SCALE: Final = 0.05
"""Of the median step: the colour's full scale is at least this, so that a job of like ranks looks
like one."""
CLIPPED: Final = 0.98
"""The scale ends at this quantile of the differences; what is beyond has the last colour."""
MAX_RANKS: Final = 2048
"""In a heat map; of more, those whose step differs most."""


class Bin(NamedTuple):
    """Ranks whose mean step is from ``low`` to ``high``, ns."""

    low: float
    high: float
    ranks: int

    @property
    def words(self) -> str:
        """The range, ``98.5 to 99.0 ms``."""
        return t.format_bin(self.low, self.high)


def histogram(report: JobReport, bins: int = BINS) -> list[Bin]:
    """Ranks by their mean step, in some ``bins`` ranges of an equal and round width; one range
    where they are all alike; empty: no rank has steps."""
    steps = [row.step_ns for row in report.rows if row.step_ns > 0]
    if not steps:
        return []
    low, high = min(steps), max(steps)
    if high - low <= EVEN * median(steps):
        return [Bin(low, high, len(steps))]
    width = _round((high - low) / bins)
    first = math.floor(low / width)
    counts = [0] * (math.floor(high / width) - first + 1)
    for step in steps:
        counts[math.floor(step / width) - first] += 1
    return [
        Bin((first + i) * width, (first + i + 1) * width, count) for i, count in enumerate(counts)
    ]


def _round(width: float) -> float:
    """The next of 1, 2, 5, 10 … that is not less."""
    ten: float = 10.0 ** math.floor(math.log10(width))
    return next(part * ten for part in (1, 2, 5, 10, 20) if part * ten >= width)


def bar(count: int, most: int, room: int) -> int:
    """Cells of a bar of ``room``; what is there is seen."""
    return 0 if not count else max(1, round(count / most * room))


class HeatMap(NamedTuple):
    """Ranks × classes: by how much each differs from the median rank."""

    classes: list[str]
    rows: list[Row]
    medians: list[float]
    """By class, ns a step."""
    scale_ns: float
    """Difference at which the colour ends."""
    note: str
    """What is left out; empty: nothing."""

    def tint(self, row: Row, place: int) -> float | None:
        """-1 (less than the median by ``scale_ns`` or more) to 1 (more); ``None``: not measured."""
        value = row.values[place]
        if value is None:
            return None
        return max(-1.0, min(1.0, (value - self.medians[place]) / self.scale_ns))

    def words(self, row: Row, place: int) -> str:
        """One cell: ``rank 7 · node-03 · idle 5.1 ms a step, 2.0 ms more than the median rank``."""
        value = row.values[place]
        if value is None:
            return f"{who(row)} · {label(self.classes[place])} {t.NOT_MEASURED}"
        against = value - self.medians[place]
        found = f"{label(self.classes[place])} {t.format_duration(value)} a step"
        if against:
            more = "more" if against > 0 else "less"
            found += f", {t.format_duration(abs(against))} {more} than the median rank"
        return f"{who(row)} · {found}"


def heat_map(report: JobReport, most: int = MAX_RANKS) -> HeatMap | None:
    """``None``: no rank, or no class that was measured."""
    places = range(len(report.classes))
    rows = [row for row in report.rows if len(row.values) == len(report.classes)]
    if not rows or not places:
        return None
    columns = [[v for row in rows if (v := row.values[place]) is not None] for place in places]
    medians = [median(column or [0.0]) for column in columns]
    step = median(row.step_ns for row in rows)
    apart = sorted(abs(v - medians[place]) for place in places for v in columns[place]) or [0.0]
    scale = max(apart[int(CLIPPED * (len(apart) - 1))], MIN_SCALE * step, 1.0)
    note = ""
    if len(rows) > most:
        note = (
            f"Shown are the {t.format_count(most)} of {t.format_count(len(rows))} ranks that "
            "differ most."
        )
        rows = sorted(rows, key=lambda row: -abs(row.step_ns - step))[:most]
        rows.sort(key=lambda row: row.rank)
    return HeatMap(report.classes, rows, medians, scale, note)


def who(row: Row) -> str:
    """``rank 7 · node-03``."""
    return f"rank {row.rank} · {t.clean(row.host)}" if row.host else f"rank {row.rank}"


def label(name: str) -> str:
    """A class of time as words: of device time, of idle time by cause, of the host's."""
    for head, labels in (
        ("idle:", t.CAUSE_LABELS),
        ("idle.", t.CAUSE_LABELS),
        ("host:", t.HOST_LABELS),
    ):
        if name.startswith(head):
            rest = name.removeprefix(head)
            return f"{head[:-1]}: {labels.get(rest, t.clean(rest))}"
    return t.CLASS_LABELS.get(name) or t.clean(name).replace("_", " ")
