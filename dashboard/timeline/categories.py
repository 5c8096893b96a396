"""The categories of slices, which give the timeline its colours."""

from __future__ import annotations

from typing import NamedTuple

from advisor.core.text import cause_label, host_label
from advisor.core.trace import SYNC_KINDS
from advisor.dashboard import theme
from advisor.measure.device.families import FAMILIES
from advisor.measure.host.gaps import CAUSES
from advisor.measure.steps.timeline import CLASSES


class Category(NamedTuple):
    """One category. ``key`` is stable."""

    key: str
    label: str
    colour: str
    """As on the other pages where they show the same."""


STEPS = (
    Category("step", "step", "#7f8aa3"),
    Category("step-aside", "step not analysed", "#b5b5bd"),
)
PHASES = tuple(
    Category(f"phase-{name}", name, theme.colour_of("phases", name)) for name in theme.PHASES
)
IDLE = tuple(
    Category(f"idle-{name}", cause_label(name), theme.colour_of("idle", name)) for name in CAUSES
)
KERNELS = tuple(
    Category(f"gpu-{name}", name, theme.colour_of("kernels", name)) for name in FAMILIES
)
COPIES = (
    Category("copy-htod", "host to device", theme.CLASSES["copies"]),
    Category("copy-htod-pageable", "host to device, pageable", "#d98a3d"),
    Category("copy-dtoh", "device to host", "#6c8fd9"),
    Category("copy-dtoh-pageable", "device to host, pageable", "#c96a4a"),
    Category("copy-dtod", "on the device", "#5fa8a0"),
    Category("copy-ptop", "device to device", "#8a7fd6"),
    Category("copy-other", "other copy", theme.PLAIN),
    Category("copy-memset", "memset", theme.CLASSES["memset"]),
)
SYNCS = tuple(
    Category(f"sync-{name}", f"{name.replace('_', ' ')} sync", theme.colour_of("idle", "sync"))
    for name in SYNC_KINDS
)
ACTIVITY = tuple(
    Category(f"act-{name}", host_label(name), theme.colour_of("host", name)) for name in CLASSES
)
HOST = (
    Category("host-op", "operator", theme.colour_of("host", "dispatch")),
    Category("host-range", "range", "#7f8aa3"),
    Category("host-python", "Python, libraries", "#c9b78a"),
    Category("host-user", "Python, your code", theme.colour_of("host", "python")),
    Category("host-launch", "launch", theme.colour_of("host", "launch")),
    Category("host-sync", "sync", theme.colour_of("host", "sync")),
    Category("host-copy", "copy call", theme.colour_of("host", "copy")),
    Category("host-allocation", "allocation", theme.colour_of("host", "allocation")),
    Category("host-load", "code loading", theme.colour_of("host", "compile")),
    Category("host-call", "other runtime call", "#94a35a"),
    Category("host-loader", "data loader", theme.colour_of("host", "loader")),
    Category("host-overhead", "profiler overhead", theme.colour_of("host", "profiler")),
)

ALL = (*STEPS, *PHASES, *IDLE, *KERNELS, *COPIES, *SYNCS, *ACTIVITY, *HOST)
"""Every category; what is sent to the browser is the place in here."""

SETS = (STEPS, PHASES, IDLE, KERNELS, COPIES, SYNCS, ACTIVITY, HOST)
BASE = {part: ALL.index(part[0]) for part in SETS}
"""Where each set begins: a lane holds one set, its slices the place in the set."""

TITLES = (
    (STEPS, "Steps"),
    (PHASES, "Phases"),
    (IDLE, "Idle, by cause"),
    (KERNELS, "GPU work"),
    (COPIES, "Copies"),
    (SYNCS, "Syncs"),
    (ACTIVITY, "Thread activity"),
    (HOST, "Host calls"),
)
"""The sets by name, for a legend."""

SLOTS = max(len(part) for part in BASE)
"""Size of the largest set."""


def category_label(category: Category, framework: str | None) -> str:
    """The label of a category, in the words of the framework that the program is written with."""
    kind, _, name = category.key.partition("-")
    if kind == "idle" or category.key == "host-loader":
        return cause_label(name, framework)
    if kind == "act":
        return host_label(name, framework)
    return category.label
