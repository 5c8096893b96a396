"""Colors of the classes of time: the same on every page, in every figure and in the timeline.

The classes of time take their colors from the reports (``advisor.core.charts``). Each color is
readable on a light and on a dark background. No meaning depends on color alone."""

from typing import Final

from advisor.core import charts

ACCENT: Final = "#5b5bd6"

CLASS_COLORS: Final = {name: look.colour for name, look in charts.CLASSES.items()}
CAUSE_COLORS: Final = {name: look.colour for name, look in charts.CAUSES.items()}
HOST_COLORS: Final = {name: look.colour for name, look in charts.HOST.items()}
PHASE_COLORS: Final = {name: look.colour for name, look in charts.PHASES.items()}

FAMILY_COLORS: Final = {
    "gemm": "#2f9e6e",
    "convolution": "#1f7a55",
    "attention": "#58b98c",
    "elementwise": "#6c8fd9",
    "reduction": "#4f74c8",
    "normalisation": "#8a7fd6",
    "softmax": "#7a5fc0",
    "embedding": "#d4a13a",
    "indexing": "#e0b75e",
    "optimizer": "#c9793f",
    "layout": "#a7855f",
    "copy": "#3b82c4",
    "memset": "#22a3b5",
    "sort": "#b7736b",
    "random": "#94a35a",
    "pooling": "#5fa8a0",
    "transform": "#8c9a3f",
    "loss": "#c2607f",
    "communication": "#b14bb8",
    "other": "#9a9aa5",
}
"""Colors of kernel families (``advisor.measure.device.families.FAMILIES``)."""

OTHER_COLOR: Final = charts.OTHER_LOOK.colour


COLORS_BY_GROUP: Final = {
    "time": CLASS_COLORS,
    "idle": CAUSE_COLORS,
    "host": PHASE_COLORS | HOST_COLORS,
    "kernels": FAMILY_COLORS,
    "phases": PHASE_COLORS,
}
"""Colors by group: classes of device time, causes of idle time, classes of host time and phases,
kernel families, phases of the step."""


def color_of(group: str, name: str) -> str:
    """Return the color of a member of a group, as CSS writes it."""
    return COLORS_BY_GROUP[group].get(name, OTHER_COLOR)
