"""Text for numbers: each unit, phrase and counted noun is written here, once for everybody.

A value is written in one way wherever it stands: three digits, in the unit it is read best in."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Final, TypeVar

from advisor.core.labels import clean, kernel_label, shorten

if TYPE_CHECKING:
    from advisor.core.finding import Finding, Impact, Location
    from advisor.core.report import Crash
    from advisor.core.report_time import IdleCause
    from advisor.core.rule import Evidence, Per


Value = TypeVar("Value")
EMPTY_CELL: Final = "–"
"""Text of a table's cell without a value."""
NOT_MEASURED: Final = "not measured"

CLASS_LABELS: Final = {
    "compute": "compute",
    "communication": "exposed comm.",
    "copies": "exposed copies",
    "memset": "exposed memsets",
    "idle": "idle",
}
"""Full names of the classes of device time; ``exposed``: under none of those before it."""

CAUSE_LABELS: Final = {
    "loader": "data loader", "sync": "host in a sync", "copy": "host in a copy",
    "dispatch": "CPU operators", "python": "Python code", "communication": "host in MPI",
    "host_code": "CPU code (sampled)", "launch": "launch calls", "compile": "first-call set-up",
    "allocation": "allocating memory", "profiler": "the profiler", "stream": "another stream",
    "other_thread": "another thread", "end": "nothing recorded",
}  # fmt: skip
"""Names of idle causes (``measure.host.gaps.CAUSES``)."""

HOST_LABELS: Final = {
    **CAUSE_LABELS, "sync": "waiting in a sync", "copy": "waiting in a copy",
    "communication": "in MPI", "drain": "waiting for the queue to drain",
    "unknown": "outside operators", "unrecorded": "nothing recorded",
    "autograd": "waiting for backward", "data": "loading data", "h2d": "uploads",
    "other": "code outside these phases",
}  # fmt: skip
"""Names of classes of host time (``measure.steps.timeline.CLASSES``), and of recorded phases."""

PATH_LABELS: Final = {
    "host": "the host",
    "compute": "GPU compute",
    "copying": "copies",
    "loader": "the data loader",
    "latency": "launch latency",
}
"""Names of parts of the critical path (``replay.replay_quality.path_composition``)."""

_INPUT: Final = {"loader": "input pipeline"}
_ELSEWHERE: Final[Mapping[str | None, Mapping[str, str]]] = {"tensorflow": _INPUT, "jax": _INPUT}
"""Names that differ from those of PyTorch, by ``TraceMeta.framework``."""


def shorten_path(file: str, width: int) -> str:
    """Return a path in ``width`` characters: relative to here when it is below, else its last
    folders and its name if it is long."""
    file = clean(file.removeprefix(_here()))
    if len(file) <= width:
        return file
    end = file[len(file) - width + 1 :]
    return f"…{end[max(0, end.find('/')) :]}"


def _here() -> str:
    try:
        return f"{Path.cwd()}{os.sep}"
    except OSError:  # the working folder was deleted
        return ""


def format_duration(ns: float | None) -> str:
    """Return a duration with its unit: ``87.9 ms``, ``1.22 s``, ``104 µs``, ``1,230 s``."""
    if ns is None:
        return NOT_MEASURED
    number, unit = _time(ns)
    return f"{number} {unit}"


_SECONDS: Final = (("s", 1e9), ("ms", 1e6), ("µs", 1e3))


def _time(ns: float) -> tuple[str, str]:
    if not ns:
        return "0", "ms"
    for unit, size in _SECONDS:
        if abs(ns) >= 0.9995 * size:  # what rounds to 1,000 of the smaller unit
            return _digits(ns / size), unit
    return f"{ns:.0f}", "ns"


def _digits(value: float) -> str:
    """Return a number with three significant digits, or all of them before the point."""
    return (f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}").replace("-", "−")


def format_range(low: float, high: float) -> str:
    """Return a range, its unit once where both ends have the same: ``390 to 412 ms``."""
    (first, unit), (second, other) = _time(low), _time(high)
    if unit == other or not low:
        return f"{first} to {second} {other}"
    return f"{first} {unit} to {second} {other}"


def format_bin(low: float, high: float) -> str:
    """Return a bin of a histogram, as exact as it is narrow: ``100.5 to 101.0 ms``."""
    unit, size = next((item for item in _SECONDS if high >= item[1]), ("ns", 1.0))
    width = (high - low) / size
    if width <= 0:
        return format_duration(low)
    places = max(0, min(6, 1 - math.floor(math.log10(width)))) if width < 10 else 0
    exact = places - 1 if places and round(width, places - 1) == round(width, 6) else places
    return f"{low / size:,.{exact}f} to {high / size:,.{exact}f} {unit}"


def format_change(ns: float) -> str:
    """Return a difference in time with its sign: ``+3.1 ms``."""
    return with_sign(ns, format_duration(abs(ns)))


def format_bytes_change(size: float) -> str:
    """Return a difference in bytes with its sign: ``+3.1 GiB``."""
    return with_sign(size, format_bytes(abs(size)))


def format_cell(value: Value | None, write: Callable[[Value], str]) -> str:
    """Return a table's cell: the value as ``write`` gives it, or the cell without a value."""
    return EMPTY_CELL if value is None else write(value)


def format_share_change(share: float | None) -> str:
    """Return a relative difference with its sign: ``+12.3%``; no sign for zero."""
    if share is None:
        return NOT_MEASURED
    text = f"{abs(share):,.{1 if abs(share) < 10 else 0}%}"
    return with_sign(share if text.strip("0.%") else 0, text)


def with_sign(value: float, text: str) -> str:
    """Return the text of a value's amount with the value's sign before it; none for zero."""
    return f"{'+' if value > 0 else '−' if value < 0 else ''}{text}"


def format_share(share: float | None) -> str:
    """Return a share of 1 as a percentage; ``<1%`` for what would round to nothing."""
    if share is None:
        return NOT_MEASURED
    if 0 < share < 0.005:
        return "<1%"
    return f"{share:.0%}"


def format_bytes(size: float | None) -> str:
    """Return bytes in binary units, as allocators and driver tools count them."""
    if size is None:
        return NOT_MEASURED
    for unit, scale in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if abs(size) >= 0.9995 * scale:  # what would be written with four digits of the smaller one
            return f"{_digits(size / scale)} {unit}"
    return f"{size:.0f} B"


def format_count(value: float | None) -> str:
    """Return a number of things: whole when it is."""
    if value is None:
        return NOT_MEASURED
    return f"{value:,.0f}" if value == round(value) or abs(value) >= 100 else f"{value:,.1f}"


def count_noun(value: float, noun: str, plural: str = "") -> str:
    """Return a number of things with its noun: ``1 kernel``, ``3 copies``, ``1,234 steps``.
    ``plural``: where it is not made with -s or -ies."""
    return f"{format_count(value)} {noun if value == 1 else plural or _plural(noun)}"


def lower_first(sentence: str) -> str:
    """Return a sentence with its first letter in lower case, to go on within another sentence."""
    return sentence[:1].lower() + sentence[1:]


def with_article(words: str) -> str:
    """Return words with the article of their first one: ``an 87.1 ms step``, ``a 90 ms step``."""
    return f"{'an' if _VOWEL.match(words) else 'a'} {words}"


_VOWEL: Final = re.compile(r"8|(11|18)(?!\d)|[aeio]", re.IGNORECASE)
"""Beginnings read with "an": 8, 80 …; 11 and 18, alone or of thousands; vowels."""


def _plural(noun: str) -> str:
    if noun.endswith("y") and noun[-2:-1] not in "aeiou":
        return f"{noun[:-1]}ies"
    hissing = noun.endswith(("s", "x", "ch", "sh")) and not noun.endswith("epoch")
    return f"{noun}{'es' if hissing else 's'}"


def format_number(value: float) -> str:
    """Return three significant digits, or all before the point; a whole number with all."""
    return f"{value:,.0f}" if value == round(value) else _digits(value)


def format_rate(amount: float, unit: str) -> str:
    """Return a rate in the unit that GPUs' are given in (TFLOP/s, GB/s), or a smaller one."""
    units = (("T", 1e12), ("G", 1e9), ("M", 1e6)) if unit == "FLOP/s" else (("G", 1e9), ("M", 1e6))
    for letter, scale in units:
        if abs(amount) >= 0.1 * scale or amount == 0:
            return f"{format_number(amount / scale)} {letter}{unit}"
    return f"{format_number(amount)} {unit}"


def format_value(amount: float | str | None, unit: str) -> str:
    """Return a value of :class:`~advisor.core.finding.Evidence` as text, with its unit."""
    if amount is None:
        return NOT_MEASURED
    if isinstance(amount, str):
        return clean(f"{amount} {unit}".rstrip())
    if isinstance(amount, bool):
        return "yes" if amount else "no"
    match unit:
        case "ns":
            return format_duration(amount)
        case "bytes":
            return format_bytes(amount)
        case "share":
            return format_share(amount)
        case "count":
            return format_count(amount)
        case "FLOP/s" | "B/s":
            return format_rate(amount, unit)
    return f"{format_number(amount)} {clean(unit)}".rstrip()


def evidence_label(item: Evidence) -> str:
    """Return the label with its unit of work: ``kernels per step``, ``share of the recording``."""
    if item.per is None:
        return clean(item.label)
    return (
        f"{clean(item.label)} "
        f"{format_of(item.per) if item.unit == 'share' else format_per(item.per)}"
    )


def location_names(
    location: Location,
    *,
    name_width: int = 48,
    path_width: int = 60,
    short: Mapping[str, str] | None = None,
) -> list[str]:
    """Return the parts of a place: the line of code, the op, the kernel, the step. ``short``:
    labels of names that are listed with others (:func:`labels_by_name`)."""
    known = short or {}
    parts = []
    if location.layer is not None and location.around_layer:
        parts.append(shorten(clean(location.layer), path_width))
    elif location.file is not None:
        line = shorten_path(location.file, path_width) + (
            f":{location.line}" if location.line else ""
        )
        inside = f" in {shorten(clean(location.function), 40)}" if location.function else ""
        parts.append(line + inside)
        if location.layer is not None:
            parts.append(shorten(clean(location.layer), path_width))
    if location.op is not None:
        parts.append(known.get(location.op) or kernel_label(location.op, name_width))
    if location.kernel is not None:
        parts.append(known.get(location.kernel) or kernel_label(location.kernel, name_width))
    if location.step is not None:
        parts.append(shorten(clean(location.step), name_width))
    return parts


NEARLY_ALL: Final = 0.9
"""Share of a finding's time from which one place stands for all."""


def location_figures(location: Location, steps: int = 1, per: Per = "step") -> list[str]:
    """Return how often it happens here, and how long the worst instance takes. ``steps``: those
    that events of the trace are counted in, each a ``per``."""
    parts = []
    # one instance of one of several layers is an example
    count = None if location.count == 1 and (location.layer or "")[:1].isdigit() else location.count
    if count is not None:
        steps = steps if location.dur_ns is not None else 1
        each = count / steps if count >= steps else count
        often = f"{format_number(each)}×"
        if location.counted:
            often = f"{format_number(each)} {location.counted}{'s' * (each != 1)} here"
        over = f" {format_per(per)}" if count >= steps else f" in {count_noun(steps, per)}"
        parts.append(f"{often}{over}" if steps > 1 else often)
    if location.share is not None and location.share < NEARLY_ALL:
        parts.append(f"{format_share(location.share)} of this finding's time")
    if location.dur_ns is not None:
        worst = "worst " if count is not None and count > 1 else ""
        if count is None and (location.op or location.kernel):
            worst = "one takes "
        parts.append(f"{worst}{format_duration(location.dur_ns)}")
    if location.sampled_share is not None:
        parts.append(f"line from {format_share(location.sampled_share)} of stack samples")
    return parts


def format_gain(finding: Finding) -> str:
    """Return the saving of a fix: ``up to 87.9 ms per step, 19%``; else why there is no figure."""
    impact = finding.impact
    if impact is None:
        return "no estimated gain"
    if impact.gain_ns is not None:
        share = f", {format_share(impact.share)}" if impact.share is not None else ""
        return f"{format_saving(impact)} {format_per(impact.unit)}{share}"
    if impact.freed_bytes is not None:
        return f"frees {format_bytes(impact.freed_bytes)}"
    reason = clean(impact.reason)
    if impact.currency == "risk":
        return f"risk: {reason}" if reason else "risk"
    missing = "unknown" if finding.known_cost else "no estimated gain"
    return f"{missing}: {reason}" if reason else missing


def format_saving(impact: Impact) -> str:
    """Return the time that a fix saves: ``up to 87.9 ms``."""
    gain = format_duration(impact.gain_ns)
    if impact.kind == "lower bound":
        known = impact.low_ns is None or format_duration(impact.low_ns) == gain
        return f"{'at least ' * known}{gain}"
    return f"{'up to ' * is_upper_bound(impact)}{gain}"


def is_upper_bound(impact: Impact) -> bool:
    """Return whether the gain is the upper end of its range, and the range is wide or the gain is
    exposed time: no fix saves more, and it may save much less."""
    gain = impact.gain_ns or 0
    if (impact.high_ns or 0) > NEAR_HIGH * gain:
        return False
    wide = impact.low_ns is not None and impact.low_ns < WIDE_LOW * gain
    return impact.kind == "upper bound" or (wide and impact.high_ns is not None)


NEAR_HIGH = 1.05
"""High end of a range over the gain, up to which they count as one."""
WIDE_LOW = 0.5
"""Share of a gain below which the low end of its range is far from it."""


def format_gain_range(finding: Finding) -> str | None:
    """Return the range of the gain, ``8 to 15 ms``, ``8 ms or more``; ``None``: it has none."""
    impact = finding.impact
    if impact is None or impact.low_ns is None:
        return None
    high = impact.high_ns if impact.high_ns is not None else impact.gain_ns
    if high is not None and is_upper_bound(impact):
        high = impact.gain_ns
    if high is None or format_duration(impact.low_ns) == format_duration(high):
        return None
    if impact.high_ns is None and impact.kind == "lower bound":
        return f"{format_duration(impact.low_ns)} or more"
    return format_range(impact.low_ns, high)


def list_names(names: Iterable[str], limit: int = 0) -> str:
    """Join names: ``a, b and c``; the first ``limit`` of more: ``a, b and 12 more``."""
    items = list(names)
    if 0 < limit < len(items):
        items[limit:] = [f"{len(items) - limit:,} more"]
    return " and ".join(part for part in (", ".join(items[:-1]), *items[-1:]) if part)


def describe_crashes(result: Sequence[Crash]) -> str:
    """Return a sentence on the ranks that an exception ended; empty: there is none."""
    if not result:
        return ""
    first = result[0]
    steps = "" if first.steps is None else f" after {count_noun(first.steps, 'step')}"
    message = f": {shorten(clean(first.message), 160).rstrip('. ')}" if first.message else ""
    others = ""
    if len(result) > 1:
        names = [f"{crash.rank} ({clean(crash.exception)})" for crash in result[1:]]
        ranks = "ranks" if len(names) > 1 else "rank"
        others = f" Then {ranks} {list_names(names, 4)} ended too."
    return f"Rank {first.rank} ended{steps} with {clean(first.exception)}{message}.{others}"


_MAX_SENTENCE: Final = 200
"""Length limit of a sentence, characters: two lines of an overview."""


def split_sentences(text: str, room: int) -> tuple[str, str]:
    """Return as many of a text's sentences as have room, one at least, and the others."""
    first, *others = re.split(r"(?<=[a-z)`%\d_]\.)\s+(?=[A-Z])", clean(text))
    while others and len(first) + 1 + len(others[0]) <= room:
        first = f"{first} {others.pop(0)}"
    return first, " ".join(others)


def split_verdict(verdict: str, room: int) -> tuple[str, str]:
    """Return a page's headline and the text below it: the first problem comes before the
    measurement that a verdict opens with, which the page's figures have too."""
    measured, first, rest = verdict.partition(" First: ")
    if not first or split_sentences(measured, 0)[1]:  # a crash, say, comes before all
        return split_sentences(verdict, room)
    title, more = split_sentences(f"{rest[:1].upper()}{rest[1:]}", room)
    return title, f"{more} {clean(measured)}".strip()


def first_sentence(text: str) -> str:
    """Return a text's first sentence, or as many of its words as have room."""
    text = clean(text).strip()
    first = _END.split(text, maxsplit=1)[0].rstrip(".:;")
    if len(first) <= _MAX_SENTENCE:
        return first
    cut = first[:_MAX_SENTENCE].rsplit(" ", 1)[0]
    clause = max(cut.rfind(mark) for mark in (", ", "; ", ": "))
    return f"{(cut[:clause] if clause > _MAX_SENTENCE // 2 else cut).rstrip(',;:')} …"


def first_clause(text: str) -> str:
    """Return the part of a text's first sentence that says what to do, without the reason."""
    return _REASON.split(first_sentence(text))[0]


_END: Final = re.compile(
    r"(?<=[a-z)`%\d_][.:;])\s+(?=[A-Z])|(?<=[A-Za-z_)%`]{2}\.)\s+(?=[A-Z\d]|[a-z]+(?:::|[A-Z_(]|\.[a-z]))"
)
"""End of a sentence: before a capital letter, and of a longer word before a figure or a name of
code such as ``cudaFree``, ``aten::copy_`` and ``torch.compile``."""
_REASON: Final = re.compile(
    r"(?<=.{12})(?:: (?=(?:the|it|this|that|one|\d)\b)|, (?:which|because|so that|and) |; )"
)
"""Begin of a reason, behind a clause long enough to stand alone."""

_PER: Final[Mapping[str, str]] = {
    "step": "per step", "repetition": "per repetition", "inference": "per inference",
    "recording": "of the recording", "window": "of the window", "run": "over the run",
}  # fmt: skip


def format_per(unit: Per) -> str:
    """Return the words after an amount: ``per step``, ``of the recording``."""
    return _PER[unit]


def format_of(unit: Per) -> str:
    """Return the words after a share: ``of the step``, ``of the recording``."""
    return f"of the {unit}"


def cause_label(cause: str, framework: str | None = None, *, outside: bool = False) -> str:
    """Return the name of an idle cause, in the words of the program's framework. ``outside``: what
    is unknown is of code outside operators (``IdleCause.outside_operators``)."""
    if outside and cause == "unknown":
        return HOST_LABELS[cause]
    return _own(cause, framework) or CAUSE_LABELS.get(cause, clean(cause).replace("_", " "))


def idle_label(part: IdleCause, framework: str | None = None) -> str:
    """Return the name of a part of the idle time; of an unknown one, what is known of it."""
    return cause_label(part.cause, framework, outside=part.outside_operators)


def host_label(name: str, framework: str | None = None) -> str:
    """Return the name of a class of host time, in the words of the program's framework."""
    return _own(name, framework) or HOST_LABELS.get(name, clean(name).replace("_", " "))


def path_label(name: str, framework: str | None = None) -> str:
    """Return the name of a part of the critical path, in the words of the program's framework."""
    own = _own(name, framework)
    return f"the {own}" if own else PATH_LABELS.get(name, clean(name))


def _own(name: str, framework: str | None) -> str | None:
    return _ELSEWHERE.get(framework, {}).get(name)
