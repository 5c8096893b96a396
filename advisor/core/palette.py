"""One look for each meaning: the colours of terminal, HTML, notebook and dashboard, in one table.

Work is compute green, communication magenta, copies blue, memsets cyan; idle time is warm or grey,
its cause telling which. Each colour reads on a light and on a dark ground. Nothing is shown by
colour alone: where there is no text beside it, a glyph differs too.
"""

from __future__ import annotations

from typing import Final

from advisor.core.charts import Look

CLASSES: Final = {
    "compute": Look("#2f9e6e", "█", "green"),
    "communication": Look("#b14bb8", "▓", "magenta"),
    "copies": Look("#3b82c4", "▒", "blue"),
    "memset": Look("#22a3b5", "▚", "cyan"),
    "idle": Look("#e8604c", "░", "red"),
}
"""Exclusive classes of device time (``Report.time``)."""

CAUSES: Final = {
    "loader": Look("#d6457a", "░", "bright_magenta"),
    "sync": Look("#d93a3a", "╱", "red"),
    "copy": Look("#b8572e", "╲", "red"),
    "dispatch": Look("#ec7a35", "∙", "yellow"),
    "python": Look("#e3a72f", "┄", "bright_yellow"),
    "launch": Look("#e8604c", "╳", "bright_red"),
    "compile": Look("#9c6b3f", "◇", "yellow"),
    "allocation": Look("#c98a5e", "□", "yellow"),
    "profiler": Look("#8f8f99", "◌", "bright_black"),
    "stream": Look("#7f8aa3", "≡", "bright_blue"),
    "other_thread": Look("#b9a046", "‡", "bright_yellow"),
    "end": Look("#b5b5bd", "┆", "bright_black"),
    "unknown": Look("#a3a3ad", "?", "bright_black"),
}
"""Causes of idle time (``measure.host.gaps.CAUSES``)."""

HOST: Final = {
    **CAUSES,
    "dispatch": Look("#3b82c4", "█", "blue"),
    "unrecorded": Look("#c4c4cc", "┆", "bright_black"),
    "autograd": Look("#1f7a55", "▓", "green"),
}
"""Classes of host time (``measure.steps.timeline.CLASSES``): operators are work there."""

PHASES: Final = {
    "data": CAUSES["loader"],
    "h2d": CLASSES["copies"],
    "forward": CLASSES["compute"],
    "backward": Look("#1f7a55", "▓", "green"),
    "optimizer": Look("#c9793f", "▚", "yellow"),
    "other": Look("#a3a3ad", "?", "bright_black"),
}
"""The recorder's phases."""

OTHER_LOOK: Final = Look("#9a9aa5", "┈", "bright_black")
"""What has no name of its own, summed."""
SPARE_GLYPHS: Final = "○◆■△▽◁▷☆◎●"
"""Glyphs of what is in none of the tables."""


def host_look(name: str) -> Look | None:
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
