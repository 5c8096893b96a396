"""What is drawn of a report, as data, made by ``advise/report_charts.py`` and part of the JSON; and
one look for each meaning: the colours of terminal, HTML, notebook and dashboard, in one table.

Work is compute green, communication magenta, copies blue, memsets cyan; idle time is warm or grey,
its cause telling which. Each colour reads on a light and on a dark ground. Nothing is shown by
colour alone: where there is no text beside it, a glyph differs too.
"""

from __future__ import annotations

from typing import Final, Literal

from msgspec import Struct

from advisor.core import text as t
from advisor.core.finding import Severity
from advisor.core.rule import Per

Kind = Literal["work", "idle", "host"]


class Appearance(Struct, frozen=True):
    """How one class of time is drawn."""

    colour: str
    """``#rrggbb``."""
    glyph: str
    """One column of a terminal; no two classes of one bar have the same."""
    style: str
    """The nearest of a terminal's own colours."""


class Segment(Struct, frozen=True):
    """One part of the bar, with its line in the legend."""

    kind: Kind
    """Device work, idle time of the device, or time of the host's main thread."""
    key: str
    """Class, cause, or class of host time; ``rest``: several of them."""
    label: str
    """Name of the part, for the legend."""
    look: Appearance
    """How it is drawn."""
    ns: float
    """How long it takes, ns."""
    share: float
    """Of the step."""

    @property
    def time(self) -> str:
        """The duration in words."""
        return t.format_duration(self.ns)

    @property
    def share_text(self) -> str:
        """The share in words."""
        return t.format_share(self.share)

    @property
    def name(self) -> str:
        """The label where it stands by itself."""
        return f"idle: {self.label}" if self.kind == "idle" and self.key != "idle" else self.label


class StepBar(Struct, frozen=True):
    """The step's time, each instant once."""

    title: str
    """What it shows, in words."""
    aside: str
    """The step that the figures add up to, where the report leads with another; else empty."""
    per: Per
    """What the figures are of."""
    work: list[Segment]
    """Device work by class; without any in the trace, the host's main thread."""
    idle: list[Segment]
    """Idle time of the device by cause."""
    idle_total: Segment | None
    """All of it; ``null``: it was not measured."""

    @property
    def segments(self) -> list[Segment]:
        """All parts in their order; they add up to the step."""
        return [*self.work, *self.idle]

    @property
    def heading(self) -> str:
        """Title and aside in a line."""
        return " · ".join(part for part in (self.title, self.aside) if part)

    @property
    def idle_title(self) -> str:
        """Heading of the idle parts: ``idle 3 ms, 12%, by cause``."""
        total = self.idle_total
        if total is None or [segment.key for segment in self.idle] == ["idle"]:
            return "idle"
        return f"idle {total.time}, {total.share_text}, by cause"

    @property
    def alt_text(self) -> str:
        """The bar for who does not see it."""
        return ", ".join(f"{segment.label} {segment.share_text}" for segment in self.segments)


class Stair(Struct, frozen=True):
    """The step once a finding and all before it are fixed."""

    priority: int | None
    """Of the finding; ``null``: the first, as measured, or one that is not ranked."""
    severity: Severity
    """Of the finding."""
    label: str
    """Of the finding."""
    saved_ns: float
    """What this fix saves on top of those before it, ns."""
    left_ns: float
    """What is left of the step, ns."""
    saved_share: float
    """Of the step as measured."""
    left_share: float
    """Of the step as measured."""

    @property
    def number(self) -> str:
        """Of the finding, in words."""
        return "" if self.priority is None else str(self.priority)

    @property
    def saved(self) -> str:
        """The time saved as text; empty: nothing."""
        return t.format_duration(self.saved_ns) if self.saved_ns else ""

    @property
    def left(self) -> str:
        """The step time left as text."""
        return t.format_duration(self.left_ns)

    @property
    def percent(self) -> str:
        """What it saves, as a share of the step, in words."""
        return t.format_share(self.saved_share)


class Stairs(Struct, frozen=True):
    """The step, fix by fix."""

    per: Per
    """What the figures are of."""
    bounded: bool
    """Some gain is an upper bound: what is saved is that at most."""
    measured: Stair
    """Nothing fixed."""
    fixes: list[Stair]
    """The most valuable first."""

    @property
    def bound_prefix(self) -> str:
        """Before what is saved: ``up to `` where a gain is an upper bound; else empty."""
        return "up to " * self.bounded

    @property
    def all(self) -> list[Stair]:
        """The measured step, then each fix."""
        return [self.measured, *self.fixes]


class RankRow(Struct, frozen=True):
    """One rank."""

    rank: int
    """Its number; below 0: not known."""
    cells: list[str]
    """As ``RankTable.head`` names them; ``–``: not measured."""
    latest: bool
    """It makes the others wait longest."""


class RankTable(Struct, frozen=True):
    """The ranks that are listed, by number."""

    head: list[str]
    """What the columns are called."""
    rows: list[RankRow]
    """A line a rank."""
    total: int
    """Ranks there are."""
    note: str
    """How they were aligned, or why not."""

    @property
    def more(self) -> str:
        """A line about the ranks that are not listed; empty: all are."""
        left = self.total - len(self.rows)
        if not left:
            return ""
        return f"{t.count_noun(left, 'more rank')} wait{'s' * (left == 1)} less; the JSON has all."


class Views(Struct, frozen=True):
    """What every renderer and the dashboard draw, for others to draw the same."""

    bar: StepBar | None
    """Where the step's time goes; ``null``: it is not measured."""
    stairs: Stairs | None
    """What the step could come down to; ``null``: nothing is ranked."""
    ranks: RankTable | None
    """The ranks side by side, by number; ``null``: one rank."""


CLASSES: Final = {
    "compute": Appearance("#2f9e6e", "█", "green"),
    "communication": Appearance("#b14bb8", "▓", "magenta"),
    "copies": Appearance("#3b82c4", "▒", "blue"),
    "memset": Appearance("#22a3b5", "▚", "cyan"),
    "idle": Appearance("#e8604c", "░", "red"),
}
"""Exclusive classes of device time (``Report.time``)."""

CAUSES: Final = {
    "loader": Appearance("#d6457a", "░", "bright_magenta"),
    "sync": Appearance("#d93a3a", "╱", "red"),
    "copy": Appearance("#b8572e", "╲", "red"),
    "dispatch": Appearance("#ec7a35", "∙", "yellow"),
    "python": Appearance("#e3a72f", "┄", "bright_yellow"),
    "launch": Appearance("#e8604c", "╳", "bright_red"),
    "compile": Appearance("#9c6b3f", "◇", "yellow"),
    "allocation": Appearance("#c98a5e", "□", "yellow"),
    "profiler": Appearance("#8f8f99", "◌", "bright_black"),
    "stream": Appearance("#7f8aa3", "≡", "bright_blue"),
    "other_thread": Appearance("#b9a046", "‡", "bright_yellow"),
    "end": Appearance("#b5b5bd", "┆", "bright_black"),
    "unknown": Appearance("#a3a3ad", "?", "bright_black"),
}
"""Causes of idle time (``measure.host.gaps.CAUSES``)."""

HOST: Final = {
    **CAUSES,
    "dispatch": Appearance("#3b82c4", "█", "blue"),
    "unrecorded": Appearance("#c4c4cc", "┆", "bright_black"),
    "autograd": Appearance("#1f7a55", "▓", "green"),
}
"""Classes of host time (``measure.steps.timeline.CLASSES``): operators are work there."""

PHASES: Final = {
    "data": CAUSES["loader"],
    "h2d": CLASSES["copies"],
    "forward": CLASSES["compute"],
    "backward": Appearance("#1f7a55", "▓", "green"),
    "optimizer": Appearance("#c9793f", "▚", "yellow"),
    "other": Appearance("#a3a3ad", "?", "bright_black"),
}
"""The recorder's phases."""

OTHER_LOOK: Final = Appearance("#9a9aa5", "┈", "bright_black")
"""What has no name of its own, summed."""
SPARE_GLYPHS: Final = "○◆■△▽◁▷☆◎●"
"""Glyphs of what is in none of the tables."""


def host_look(name: str) -> Appearance | None:
    """Of a class of host time, or of a phase."""
    return HOST.get(name) or PHASES.get(name)


def css_rules() -> str:
    """The tables as classes of a style sheet: ``c-compute``, ``c-idle-sync``, ``c-host-python``."""
    named = {f"c-{key}": look for key, look in CLASSES.items()}
    named |= {f"c-idle-{key}": look for key, look in CAUSES.items()}
    named |= {f"c-host-{key}": look for key, look in {**PHASES, **HOST}.items()}
    named["c-rest"] = OTHER_LOOK
    return "".join(
        f".{name} {{ fill: {look.colour}; background: {look.colour}; }}\n"
        for name, look in named.items()
    )
