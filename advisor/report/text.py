"""How reports write names and numbers: units, missing values, hostile names made harmless."""

from __future__ import annotations

import os
import re
import unicodedata
from pathlib import Path
from typing import Final

from advisor.model import Evidence, Finding, Location

NOT_MEASURED: Final = "not measured"

LABELS: Final = {
    "compute": "compute",
    "communication": "exposed comm.",
    "copies": "exposed copies",
    "memset": "exposed memsets",
    "idle": "idle",
}
"""How a class of device time is called in full; ``exposed``: under none of those before it."""

CAUSES: Final = {
    "loader": "data loader",
    "sync": "host in a sync",
    "copy": "host in a copy",
    "dispatch": "dispatching ops",
    "python": "Python code",
    "launch": "launching",
    "compile": "compiling, loading",
    "allocation": "allocating memory",
    "profiler": "the profiler",
    "stream": "another stream",
    "other_thread": "another thread",
    "end": "nothing recorded",
}
"""Idle causes (``analysis.gaps.CAUSES``) as they are shown."""

HOST: Final = {
    **CAUSES,
    "sync": "waiting in a sync",
    "copy": "waiting in a copy",
    "dispatch": "operators",
    "launch": "launch calls",
    "unrecorded": "nothing recorded",
}
"""Classes of host time (``analysis.timeline.CLASSES``) as they are shown."""

_SAFE = re.compile(r"[\x20-\x7e]*")
_HIDDEN = frozenset({"Cc", "Cf", "Cs", "Zl", "Zp"})
"""Control characters, invisible and direction-changing ones, halves of surrogate pairs, line and
paragraph separators: what can move the cursor, recolour, reorder or break the text around it."""


def clean(text: object, *, lines: bool = False) -> str:
    """Text that is safe to show: hidden characters are written as escapes (``\\x1b``).

    ``lines`` keeps line feeds (and turns tabs into blanks): for code, not for names.
    """
    value = str(text)
    if _SAFE.fullmatch(value):
        return value
    if lines:
        value = value.expandtabs(4).replace("\r\n", "\n")
        return "\n".join(clean(line) for line in value.split("\n"))
    return "".join(
        _escaped(char) if unicodedata.category(char) in _HIDDEN else char for char in value
    )


def _escaped(char: str) -> str:
    if char in "\n\t\r":
        return {"\n": "\\n", "\t": "\\t", "\r": "\\r"}[char]
    code = ord(char)
    return f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}"


def shorten(text: str, width: int) -> str:
    """At most ``width`` characters: the middle is replaced by ``…``, the head kept longer."""
    if len(text) <= width:
        return text
    if width <= 1:
        return "…"[:width]
    tail = (width - 1) // 3
    return f"{text[: width - 1 - tail]}…{text[len(text) - tail :] if tail else ''}"


def kernel(name: str, width: int) -> str:
    """A kernel's name in ``width`` characters: the return type and the argument list go first."""
    name = clean(name)
    if len(name) <= width:
        return name
    name = name.removeprefix("void ")
    # The argument list of a demangled C++ name says nothing that the template arguments do not.
    if name.endswith(")") and (start := _matching(name)) > 0:
        name = name[:start]
    return shorten(name, width)


def _matching(name: str) -> int:
    """Index of the parenthesis that the last character closes; -1: none."""
    depth = 0
    for index in range(len(name) - 1, -1, -1):
        depth += (name[index] == ")") - (name[index] == "(")
        if depth == 0:
            return index
    return -1


def path(file: str, width: int) -> str:
    """A path in ``width`` characters: from here when it is below, else its end if it is long."""
    file = clean(file.removeprefix(_here()))
    return file if len(file) <= width else f"…{file[len(file) - width + 1 :]}"


def _here() -> str:
    try:
        return f"{Path.cwd()}{os.sep}"
    except OSError:  # the working folder was deleted
        return ""


def time(ns: float | None) -> str:
    """A duration with its unit: ``87.9 ms``, ``1,223 ms``, ``12.3 s``, ``104 µs``."""
    if ns is None:
        return NOT_MEASURED
    size = abs(ns)
    if size >= 10e9:
        return f"{ns / 1e9:,.1f} s"
    if size >= 999.95e6:
        return f"{ns / 1e6:,.0f} ms"
    if size >= 0.9995e6 or ns == 0:
        return f"{ns / 1e6:.1f} ms" if ns else "0 ms"
    if size >= 9.95e3:
        return f"{ns / 1e3:.0f} µs"
    return f"{ns / 1e3:.1f} µs" if size >= 999.5 else f"{ns:.0f} ns"


def times(values: list[float]) -> list[str]:
    """Durations in one unit, that of the largest, so that a column can be read down; what would
    be nothing in it keeps a unit of its own."""
    largest = max(map(abs, values), default=0.0)
    scale, unit = (1e9, "s") if largest >= 10e9 else (1e6, "ms") if largest >= 1e6 else (1e3, "µs")
    return [
        f"{value / scale:,.1f} {unit}" if abs(value) >= 0.05 * scale or value == 0 else time(value)
        for value in values
    ]


def between(low: float, high: float) -> str:
    """A range in one unit: ``390.0 to 412.0 ms``."""
    first, second = times([low, high])
    number, unit = first.split(" ")
    return f"{number} to {second}" if second.endswith(unit) else f"{first} to {second}"


def percent(share: float | None) -> str:
    """A share of 1 as a percentage; what rounds to nothing is not shown as nothing."""
    if share is None:
        return NOT_MEASURED
    if 0 < share < 0.005:
        return "<1%"
    return f"{share:.0%}"


def memory(size: float | None) -> str:
    """Bytes in binary units, as allocators and driver tools count them."""
    if size is None:
        return NOT_MEASURED
    for unit, scale in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if abs(size) >= scale:
            return f"{size / scale:.1f} {unit}"
    return f"{size:.0f} B"


def count(value: float | None) -> str:
    """A number of things: whole when it is."""
    if value is None:
        return NOT_MEASURED
    return f"{value:,.0f}" if value == round(value) or abs(value) >= 100 else f"{value:,.1f}"


def number(value: float) -> str:
    """Three significant digits, or all of them before the point."""
    if value == round(value) or abs(value) >= 100:
        return f"{value:,.0f}"
    return f"{value:.3g}"


def rate(amount: float, unit: str) -> str:
    """A rate in the unit that GPUs' are given in (TFLOP/s, GB/s); a small one in a smaller."""
    units = (("T", 1e12), ("G", 1e9), ("M", 1e6)) if unit == "FLOP/s" else (("G", 1e9), ("M", 1e6))
    for letter, scale in units:
        if abs(amount) >= 0.1 * scale or amount == 0:
            return f"{number(amount / scale)} {letter}{unit}"
    return f"{number(amount)} {unit}"


def value(amount: float | str | None, unit: str) -> str:
    """A measured value as :class:`~advisor.model.Evidence` holds it, with its unit."""
    if amount is None:
        return NOT_MEASURED
    if isinstance(amount, str):
        return clean(f"{amount} {unit}".rstrip())
    if isinstance(amount, bool):
        return "yes" if amount else "no"
    match unit:
        case "ns":
            return time(amount)
        case "bytes":
            return memory(amount)
        case "share":
            return percent(amount)
        case "count":
            return count(amount)
        case "FLOP/s":
            return rate(amount, "FLOP/s")
        case "B/s":
            return rate(amount, "B/s")
    return f"{number(amount)} {clean(unit)}".rstrip()


def evidence(item: Evidence) -> str:
    """One fact in a line: ``share of the step 19% (limit 5%, TraceLens)``."""
    text = f"{clean(item.label)} {value(item.value, item.unit)}"
    if item.threshold is None:
        return text
    limit = f"limit {value(item.threshold, item.unit)}"
    source = clean(item.source)
    return f"{text} ({limit}, {source})" if source else f"{text} ({limit})"


def place_names(location: Location, *, name_width: int = 48, path_width: int = 60) -> list[str]:
    """Where it is: the line of code, the op, the kernel, the step."""
    parts = []
    if location.file is not None:
        line = path(location.file, path_width) + (f":{location.line}" if location.line else "")
        inside = f" in {shorten(clean(location.function), 40)}" if location.function else ""
        parts.append(line + inside)
    if location.op is not None:
        parts.append(shorten(clean(location.op), name_width))
    if location.kernel is not None:
        parts.append(kernel(location.kernel, name_width))
    if location.step is not None:
        parts.append(shorten(clean(location.step), name_width))
    return parts


def place_figures(location: Location) -> list[str]:
    """How often it happens, and how long the worst of them takes."""
    parts = []
    if location.count is not None:
        parts.append(f"{count(location.count)}×")
    if location.dur_ns is not None:
        worst = "worst " if location.count is not None and location.count > 1 else ""
        parts.append(f"{worst}{time(location.dur_ns)}")
    return parts


def gain(finding: Finding, *, step: str = "step") -> str:
    """What the fix is worth: ``up to 87.9 ms a step, 19%``; else why there is no figure."""
    worth = finding.worth
    if worth is None:
        return "not priced"
    if worth.gain_ns is not None:
        bound = "up to " if worth.method.startswith("upper bound") else ""
        loop = " of the recording" if step == "recording" else f" a {step}"
        per = loop if worth.currency == "step_time" else " over the run"
        share = f", {percent(worth.share)}" if worth.share is not None else ""
        return f"{bound}{time(worth.gain_ns)}{per}{share}"
    if worth.freed_bytes is not None:
        return f"frees {memory(worth.freed_bytes)}"
    reason = clean(worth.reason)
    if worth.currency == "risk":
        return f"risk: {reason}" if reason else "risk"
    return f"not priced: {reason}" if reason else "not priced"


def band(finding: Finding) -> str | None:
    """The range of the gain where assumptions leave one: ``8.0 ms to 15.0 ms``."""
    worth = finding.worth
    if worth is None or worth.low_ns is None or worth.high_ns is None:
        return None
    return None if time(worth.low_ns) == time(worth.high_ns) else between(
        worth.low_ns, worth.high_ns
    )  # fmt: skip


def loop_unit(step_source: str) -> str:
    """What the times are a share of: a step, or the recording when it has none."""
    return "recording" if step_source == "whole trace" else "step"


def cause_label(cause: str) -> str:
    """An idle cause as words."""
    return CAUSES.get(cause, clean(cause).replace("_", " "))


def host_label(name: str) -> str:
    """A class of host time as words."""
    return HOST.get(name, clean(name).replace("_", " "))
