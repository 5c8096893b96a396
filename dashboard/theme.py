"""Colours: one for each class of time, the same on every page, in every figure and in the timeline.

Those of classes of time are the reports' (``advisor.core.charts``). Each reads on a light and on
a dark ground. No meaning depends on colour alone."""

from typing import Final

from advisor.core import charts

ACCENT: Final = "#5b5bd6"

CLASSES: Final = {name: look.colour for name, look in charts.CLASSES.items()}
CAUSES: Final = {name: look.colour for name, look in charts.CAUSES.items()}
HOST: Final = {name: look.colour for name, look in charts.HOST.items()}
PHASES: Final = {name: look.colour for name, look in charts.PHASES.items()}

FAMILIES: Final = {
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
"""Colours of kernel families (``advisor.measure.device.families.FAMILIES``)."""

PLAIN: Final = charts.OTHER_LOOK.colour


GROUPS: Final = {
    "time": CLASSES, "idle": CAUSES, "host": PHASES | HOST, "kernels": FAMILIES, "phases": PHASES,
}  # fmt: skip
"""Colours by group: classes of device time, causes of idle time, classes of host time and phases,
kernel families, phases of the step."""


def colour_of(group: str, name: str) -> str:
    """Return the colour of a member of a group."""
    return GROUPS[group].get(name, PLAIN)
