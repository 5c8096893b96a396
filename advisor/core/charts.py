"""Charts of a report as data, built by ``advise/report_charts.py`` and part of the JSON. One table
has the look of each class, for terminal, HTML, notebook and dashboard.

Compute is green, communication magenta, copies blue, memsets cyan. Idle time is warm or grey, by
its cause. Each colour is legible on light and dark backgrounds. Nothing is shown by colour alone:
without text next to it, a glyph differs too."""

from typing import Final, Literal

from msgspec import Struct

from advisor.core import text as t
from advisor.core.finding import Severity
from advisor.core.rule import Per

Kind = Literal["work", "idle", "host"]


class Appearance(Struct, frozen=True):
    """Colour and glyph of one class of time."""

    colour: str
    """Colour, ``#rrggbb``."""
    glyph: str
    """Character, one column wide. Each class of a bar has its own."""
    style: str
    """Nearest of the terminal's colours."""


class Segment(Struct, frozen=True):
    """A part of the bar, with its line in the legend."""

    kind: Kind
    """Kind: device work, idle time of the device, or time of the host's main thread."""
    key: str
    """Key: class, cause, or class of host time, or ``rest`` for several of them."""
    label: str
    """Name of the part, for the legend."""
    look: Appearance
    """Colour and glyph of the part."""
    ns: float
    """Duration, ns."""
    share: float
    """Share of the step."""

    @property
    def time(self) -> str:
        """Duration as text."""
        return t.format_duration(self.ns)

    @property
    def share_text(self) -> str:
        """Share as text."""
        return t.format_share(self.share)

    @property
    def name(self) -> str:
        """Label outside the legend, with ``idle: `` before a cause."""
        return f"idle: {self.label}" if self.kind == "idle" and self.key != "idle" else self.label


class StepBar(Struct, frozen=True):
    """Bar of the step's time. Each instant counts once."""

    title: str
    """Title of the bar."""
    aside: str
    """Step that the figures add up to, if the report leads with another. Empty otherwise."""
    per: Per
    """Unit of the figures."""
    work: list[Segment]
    """Device work by class, or the host's main thread if the trace has no device work."""
    idle: list[Segment]
    """Idle time of the device by cause."""
    idle_total: Segment | None
    """Idle time as a whole, or ``null`` if it was not measured."""

    @property
    def segments(self) -> list[Segment]:
        """All parts in order. They add up to the step."""
        return [*self.work, *self.idle]

    @property
    def heading(self) -> str:
        """Title and aside in one line."""
        return " · ".join(part for part in (self.title, self.aside) if part)

    @property
    def idle_title(self) -> str:
        """Heading of the idle parts: ``idle 3 ms, 12%, by cause``."""
        total = self.idle_total
        if total is None or [segment.key for segment in self.idle] == ["idle"]:
            return "idle"
        causes = ", by cause" * (total.label == "idle")
        return f"{total.label} {total.time}, {total.share_text}{causes}"

    @property
    def alt_text(self) -> str:
        """Text alternative of the bar for screen readers."""
        return ", ".join(f"{segment.label} {segment.share_text}" for segment in self.segments)


class StepAfterFix(Struct, frozen=True):
    """Step time after a finding and all findings before it are fixed."""

    priority: int | None
    """Priority of the finding, or ``null`` for the measured step or an unranked finding."""
    severity: Severity
    """Severity of the finding."""
    label: str
    """Label of the finding."""
    saved_ns: float
    """Time that this fix saves after the fixes before it, ns."""
    left_ns: float
    """Remaining step time, ns."""
    saved_share: float
    """Share of the measured step that the fix saves."""
    left_share: float
    """Remaining share of the measured step."""

    @property
    def number(self) -> str:
        """Priority as text. Empty if there is none."""
        return "" if self.priority is None else str(self.priority)

    @property
    def saved(self) -> str:
        """Time saved as text. Empty if there is none."""
        return t.format_duration(self.saved_ns) if self.saved_ns else ""

    @property
    def left(self) -> str:
        """Step time left as text."""
        return t.format_duration(self.left_ns)

    @property
    def percent(self) -> str:
        """Saved share of the step as text."""
        return t.format_share(self.saved_share)


class FixSequence(Struct, frozen=True):
    """Step times, fix by fix."""

    per: Per
    """Unit of the figures."""
    bounded: bool
    """Whether some gain is an upper bound, so that the savings are too."""
    measured: StepAfterFix
    """Step as measured, with nothing fixed."""
    fixes: list[StepAfterFix]
    """Step after each fix, the most valuable fix first."""

    @property
    def bound_prefix(self) -> str:
        """Prefix of the time saved: ``up to `` if a gain is an upper bound. Empty otherwise."""
        return "up to " * self.bounded

    @property
    def all(self) -> list[StepAfterFix]:
        """The measured step, then each fix."""
        return [self.measured, *self.fixes]


class RankRow(Struct, frozen=True):
    """Row of one rank."""

    rank: int
    """Number of the rank, or a negative number if unknown."""
    cells: list[str]
    """Texts of the columns in ``RankTable.head``, with ``–`` for values that were not measured."""
    latest: bool
    """Whether this rank makes the others wait longest."""


class RankTable(Struct, frozen=True):
    """Table of the listed ranks, by number."""

    head: list[str]
    """Headings of the columns."""
    rows: list[RankRow]
    """Rows, one per rank."""
    total: int
    """Number of ranks of the job."""
    note: str
    """Note on how the ranks were aligned, or why not."""

    @property
    def more(self) -> str:
        """Line about the ranks that are not listed. Empty if all are listed."""
        left = self.total - len(self.rows)
        if not left:
            return ""
        return f"{t.count_noun(left, 'more rank')} wait{'s' * (left == 1)} less; the JSON has all."


class ReportCharts(Struct, frozen=True):
    """Charts that every renderer and the dashboard draw."""

    bar: StepBar | None
    """Bar of the step's time, or ``null`` if it was not measured."""
    fix_sequence: FixSequence | None
    """Step times after the fixes, or ``null`` if no finding is ranked."""
    ranks: RankTable | None
    """Table of the ranks, by number, or ``null`` for one rank."""


CLASSES: Final = {
    "compute": Appearance("#2f9e6e", "█", "green"),
    "communication": Appearance("#b14bb8", "▓", "magenta"),
    "copies": Appearance("#3b82c4", "▒", "blue"),
    "memset": Appearance("#22a3b5", "▚", "cyan"),
    "idle": Appearance("#74798a", "░", "red"),
}
"""Looks of the exclusive classes of device time (``Report.time``)."""

CAUSES: Final = {
    "loader": Appearance("#d6457a", "░", "bright_magenta"),
    "sync": Appearance("#d93a3a", "╱", "red"),
    "copy": Appearance("#b8572e", "╲", "red"),
    "dispatch": Appearance("#ec7a35", "∙", "yellow"),
    "python": Appearance("#e3a72f", "┄", "bright_yellow"),
    "communication": Appearance("#8a4fd0", "◈", "magenta"),
    "host_code": Appearance("#cfa35a", "▪", "bright_yellow"),
    "launch": Appearance("#e8604c", "╳", "bright_red"),
    "compile": Appearance("#9c6b3f", "◇", "yellow"),
    "allocation": Appearance("#c98a5e", "□", "yellow"),
    "profiler": Appearance("#8f8f99", "◌", "bright_black"),
    "stream": Appearance("#7f8aa3", "≡", "bright_blue"),
    "device": Appearance("#5d6f9e", "≣", "bright_blue"),
    "other_thread": Appearance("#b9a046", "‡", "bright_yellow"),
    "end": Appearance("#b5b5bd", "┆", "bright_black"),
    "unknown": Appearance("#a3a3ad", "?", "bright_black"),
}
"""Looks of the causes of idle time (``measure.host.gaps.CAUSES``)."""

HOST: Final = {
    **CAUSES,
    "dispatch": Appearance("#3a7f96", "█", "blue"),
    "drain": Appearance("#a8325e", "▞", "red"),
    "unrecorded": Appearance("#c4c4cc", "┆", "bright_black"),
    "autograd": Appearance("#1f7a55", "▓", "green"),
}
"""Looks of the classes of host time (``measure.steps.timeline.CLASSES``): operators are work."""

PHASES: Final = {
    "data": CAUSES["loader"],
    "h2d": CLASSES["copies"],
    "forward": CLASSES["compute"],
    "backward": Appearance("#1f7a55", "▓", "green"),
    "optimizer": Appearance("#c9793f", "▚", "yellow"),
    "other": Appearance("#a3a3ad", "?", "bright_black"),
}
"""Looks of the recorder's phases."""

OTHER_LOOK: Final = Appearance("#9a9aa5", "┈", "bright_black")
"""Look of the sum of all parts without their own name."""
SPARE_GLYPHS: Final = "○◆■△▽◁▷☆◎●"
"""Glyphs for classes that are not in the tables."""


def host_look(name: str) -> Appearance | None:
    """Return the look of a class of host time or of a phase, or ``None`` if it has none."""
    return HOST.get(name) or PHASES.get(name)


def css_rules() -> str:
    """Return the looks as CSS classes: ``c-compute``, ``c-idle-sync``, ``c-host-python``."""
    looks = {f"c-{key}": look for key, look in CLASSES.items()}
    looks |= {f"c-idle-{key}": look for key, look in CAUSES.items()}
    looks |= {f"c-host-{key}": look for key, look in {**PHASES, **HOST}.items()}
    looks["c-rest"] = OTHER_LOOK
    return "".join(
        f".{name} {{ fill: {look.colour}; background: {look.colour}; }}\n"
        for name, look in looks.items()
    )
