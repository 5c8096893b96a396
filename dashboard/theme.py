"""Colours: one for each class of time, the same on every page, in every figure and in the timeline.

The hues are those of the terminal's bar: compute green, communication magenta, copies blue,
memsets cyan; idle time is warm, its cause telling which. Each reads on a light and on a dark
ground. Text is never told by colour alone.
"""

from __future__ import annotations

from typing import Final

ACCENT: Final = "#5b5bd6"

CLASSES: Final = {
    "compute": "#2f9e6e",
    "communication": "#b14bb8",
    "copies": "#3b82c4",
    "memset": "#22a3b5",
    "idle": "#e8604c",
}
"""Exclusive classes of device time (``Report.time``)."""

CAUSES: Final = {
    "loader": "#d6457a",
    "sync": "#d93a3a",
    "copy": "#b8572e",
    "dispatch": "#ec7a35",
    "python": "#e3a72f",
    "launch": "#e8604c",
    "compile": "#9c6b3f",
    "allocation": "#c98a5e",
    "profiler": "#8f8f99",
    "stream": "#7f8aa3",
    "other_thread": "#b9a046",
    "end": "#b5b5bd",
    "unknown": "#a3a3ad",
}
"""Causes of idle time (``analysis.gaps.CAUSES``)."""

HOST: Final = {**CAUSES, "dispatch": "#3b82c4", "python": "#e3a72f", "unrecorded": "#c4c4cc"}
"""Classes of host time (``analysis.host.CLASSES``): operators are work there, not waiting."""

FAMILIES: Final = {
    "gemm": "#2f9e6e",
    "convolution": "#1f7a55",
    "attention": "#58b98c",
    "elementwise": "#6c8fd9",
    "reduction": "#4f74c8",
    "normalisation": "#8a7fd6",
    "softmax": "#7a5fc0",
    "embedding": "#d4a13a",
    "optimizer": "#c9793f",
    "layout": "#a7855f",
    "copy": "#3b82c4",
    "memset": "#22a3b5",
    "sort": "#b7736b",
    "random": "#94a35a",
    "pooling": "#5fa8a0",
    "loss": "#c2607f",
    "communication": "#b14bb8",
    "other": "#9a9aa5",
}
"""Kernel families (``analysis.families.FAMILIES``)."""

PHASES: Final = {
    "data": CAUSES["loader"],
    "h2d": CLASSES["copies"],
    "forward": CLASSES["compute"],
    "backward": "#1f7a55",
    "optimizer": FAMILIES["optimizer"],
    "other": "#a3a3ad",
}
"""The recorder's phases."""

PLAIN: Final = "#9a9aa5"


def of_class(name: str) -> str:
    """Colour of a class of device time."""
    return CLASSES.get(name, PLAIN)


def of_cause(name: str) -> str:
    """Colour of an idle cause."""
    return CAUSES.get(name, PLAIN)


def of_host(name: str) -> str:
    """Colour of a class of host time, or of a phase."""
    return HOST.get(name) or PHASES.get(name, PLAIN)


def of_family(name: str) -> str:
    """Colour of a kernel family."""
    return FAMILIES.get(name, PLAIN)


def of_phase(name: str) -> str:
    """Colour of a phase of the step."""
    return PHASES.get(name, PLAIN)
