"""Text for numbers: the only place that formats units, phrases and counted nouns.

A value looks the same everywhere: three digits, in its most readable unit."""

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
"""Full names of the classes of device time. ``exposed``: not hidden by the classes before it."""

CAUSE_LABELS: Final = {
    "loader": "data loader", "sync": "host in a sync", "copy": "host in a copy",
    "dispatch": "CPU operators", "python": "Python code", "communication": "host in MPI",
    "host_code": "CPU code (sampled)", "launch": "launch delay", "compile": "first-call set-up",
    "allocation": "allocating memory", "profiler": "the profiler", "stream": "another stream",
    "device": "another GPU", "other_thread": "another thread", "end": "end of recording",
}  # fmt: skip
"""Names of idle causes (``measure.host.gaps.CAUSES``)."""

HOST_LABELS: Final = {
    **CAUSE_LABELS, "sync": "waiting in a sync", "copy": "waiting in a copy",
    "launch": "launch calls",
    "communication": "in MPI", "drain": "waiting for the queue to drain",
    "unknown": "outside operators", "unrecorded": "outside operators",
    "autograd": "waiting for backward", "data": "loading data", "h2d": "uploads",
    "other": "the loop's own code", "between steps": "code between steps",
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

_INPUT_NAMES: Final = {"loader": "input pipeline"}
_FRAMEWORK_NAMES: Final[Mapping[str | None, Mapping[str, str]]] = {
    "tensorflow": _INPUT_NAMES,
    "jax": _INPUT_NAMES,
}
"""Names that differ from PyTorch's, by ``TraceMeta.framework``."""


def shorten_path(file: str, width: int) -> str:
    """Return a path in ``width`` characters, relative to the working folder. If it is longer,
    return its last folders and its name."""
    file = clean(file.removeprefix(_get_working_folder()))
    if len(file) <= width:
        return file
    end = file[len(file) - width + 1 :]
    return f"…{end[max(0, end.find('/')) :]}"


def _get_working_folder() -> str:
    try:
        return f"{Path.cwd()}{os.sep}"
    except OSError:  # the working folder was deleted
        return ""


def format_duration(ns: float | None) -> str:
    """Return a duration with its unit: ``87.9 ms``, ``1.22 s``, ``104 µs``, ``1,230 s``."""
    if ns is None:
        return NOT_MEASURED
    number, unit = _split_duration(ns)
    return f"{number} {unit}"


_TIME_UNITS: Final = (("s", 1e9), ("ms", 1e6), ("µs", 1e3))


def _split_duration(ns: float) -> tuple[str, str]:
    if not ns:
        return "0", "ms"
    for unit, size in _TIME_UNITS:
        if abs(ns) >= 0.9995 * size:  # what rounds to 1,000 of the smaller unit
            return _format_digits(ns / size), unit
    return f"{ns:.0f}", "ns"


def _format_digits(value: float) -> str:
    """Return a number with three significant digits, or all digits before the point."""
    return (f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}").replace("-", "−")


def format_range(low: float, high: float) -> str:
    """Return a range. If both ends have the same unit, it is written once: ``390 to 412 ms``."""
    (first, unit), (second, other) = _split_duration(low), _split_duration(high)
    if unit == other or not low:
        return f"{first} to {second} {other}"
    return f"{first} {unit} to {second} {other}"


def format_bin(low: float, high: float) -> str:
    """Return a bin of a histogram, with as many digits as its width needs: ``100.5 to 101.0
    ms``."""
    unit, size = next((item for item in _TIME_UNITS if high >= item[1]), ("ns", 1.0))
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
    """Return a table's cell: the value formatted by ``write``, or the text of an empty cell."""
    return EMPTY_CELL if value is None else write(value)


def format_share_change(share: float | None) -> str:
    """Return a relative difference with its sign: ``+12.3%``. Zero has no sign."""
    if share is None:
        return NOT_MEASURED
    text = f"{abs(share):,.{1 if abs(share) < 10 else 0}%}"
    return with_sign(share if text.strip("0.%") else 0, text)


def with_sign(value: float, text: str) -> str:
    """Return the text of an amount with the value's sign before it. Zero has no sign."""
    return f"{'+' if value > 0 else '−' if value < 0 else ''}{text}"


def format_share(share: float | None) -> str:
    """Return a share (0 to 1) as a percentage, or ``<1%`` if it would round to zero."""
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
        if abs(size) >= 0.9995 * scale:  # would have four digits in the smaller unit
            return f"{_format_digits(size / scale)} {unit}"
    return f"{size:.0f} B"


def format_count(value: float | None) -> str:
    """Return a number of things, without decimals if it is whole."""
    if value is None:
        return NOT_MEASURED
    return f"{value:,.0f}" if value == round(value) or abs(value) >= 100 else f"{value:,.1f}"


def count_noun(value: float, noun: str, plural: str = "") -> str:
    """Return a number of things with its noun: ``1 kernel``, ``3 copies``, ``1,234 steps``.
    ``plural``: an irregular plural."""
    return f"{format_count(value)} {noun if value == 1 else plural or _make_plural(noun)}"


def format_speedup(ratio: float) -> str:
    """Format a time before over the time after: ``1.32× faster``, ``1.20× slower``, ``no
    faster``."""
    size = max(ratio, 1 / ratio) if ratio > 0 else float("inf")
    if size < 1.005:
        return "no faster"
    digits = 2 if size < 2 else 1 if size < 100 else 0
    return f"{size:.{digits}f}× {'faster' if ratio >= 1 else 'slower'}"


def lower_first(sentence: str) -> str:
    """Return a sentence with its first letter in lower case, for use within another sentence."""
    return sentence[:1].lower() + sentence[1:]


def upper_first(sentence: str) -> str:
    """Return a sentence with its first letter in upper case."""
    return sentence[:1].upper() + sentence[1:]


def with_article(words: str) -> str:
    """Return words with their indefinite article: ``an 87.1 ms step``, ``a 90 ms step``."""
    return f"{'an' if _VOWEL.match(words) else 'a'} {words}"


_VOWEL: Final = re.compile(r"8|(11|18)(?!\d)|[aeio]|NVIDIA\b|RTX\b|MI\d|[HL]\d", re.IGNORECASE)
"""Pattern of words read with "an": 8, 80 …, 11 and 18 alone or as thousands, vowels, and names of
GPUs that begin with the name of such a letter."""


def _make_plural(noun: str) -> str:
    if noun.endswith("y") and noun[-2:-1] not in "aeiou":
        return f"{noun[:-1]}ies"
    hissing = noun.endswith(("s", "x", "ch", "sh")) and not noun.endswith("epoch")
    return f"{noun}{'es' if hissing else 's'}"


def format_number(value: float) -> str:
    """Return three significant digits, or all digits before the point or of a whole number."""
    return f"{value:,.0f}" if value == round(value) else _format_digits(value)


def format_rate(amount: float, unit: str) -> str:
    """Return a rate in the usual unit of GPUs (TFLOP/s, GB/s), or a smaller one."""
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


RECORDER_RANGE: Final = "advisor::"
"""Beginning of the names of ranges that the recorder puts around phases of a step."""


def location_names(
    location: Location,
    *,
    name_width: int = 48,
    path_width: int = 60,
    short: Mapping[str, str] | None = None,
) -> list[str]:
    """Return the parts of a place: line of code, operator, kernel, step. ``short``: labels that
    tell names in a list apart (:func:`labels_by_name`)."""
    labels = short or {}
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
    if location.op is not None and location.op.startswith(RECORDER_RANGE):
        parts.append(f"the {clean(location.op.removeprefix(RECORDER_RANGE))} phase")
    elif location.op is not None:
        parts.append(labels.get(location.op) or kernel_label(location.op, name_width))
    if location.kernel is not None:
        parts.append(labels.get(location.kernel) or kernel_label(location.kernel, name_width))
    if location.step is not None:
        parts.append(shorten(clean(location.step), name_width))
    return parts


MIN_MAIN_SHARE: Final = 0.9
"""Minimum share of a finding's time at which one place represents all."""


def location_figures(
    location: Location, steps: int = 1, per: Per = "step", time_ns: float | None = None
) -> list[str]:
    """Return how often a finding occurs at a place, and how long the worst instance takes.
    ``steps``: number of steps in which events are counted. ``per``: their unit. ``time_ns``: the
    finding's time per step, ns, if the place's own instances are a part of it."""
    parts = []
    # one instance of one of several layers is an example
    count = None if location.count == 1 and (location.layer or "")[:1].isdigit() else location.count
    if count is not None:
        steps = steps if location.dur_ns is not None else 1
        mean_count = count / steps if count >= steps else count
        amount = f"{format_number(mean_count)}×"
        if location.counted:
            amount = f"{format_number(mean_count)} {location.counted}{'s' * (mean_count != 1)} here"
        unit = f" {format_per(per)}" if count >= steps else f" in {count_noun(steps, per)}"
        parts.append(f"{amount}{unit}" if steps > 1 else amount)
    share = 1.0 if location.share is None else location.share
    most_ns = (location.dur_ns or 0) * (count or 1) / steps
    part_ns = (time_ns or 0.0) * min(share, MIN_MAIN_SHARE)
    is_bounded = 0 < most_ns < part_ns  # the share is of the calls that are listed
    if share < MIN_MAIN_SHARE and not is_bounded:
        parts.append(f"{format_share(share)} of this finding's time")
    if is_bounded:
        parts.append(f"at most {format_duration(most_ns)} of the {format_duration(time_ns)}")
    elif location.dur_ns is not None:
        worst = "worst " if count is not None and count > 1 else ""
        if count is None and (location.op or location.kernel):
            worst = "one takes "
        parts.append(f"{worst}{format_duration(location.dur_ns)}")
    if location.sampled_share is not None:
        parts.append(f"line in {format_share(location.sampled_share)} of stack samples")
    return parts


def format_gain(finding: Finding) -> str:
    """Return the saving of a fix, ``up to 87.9 ms per step, 19%``, or why there is no figure."""
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
    missing = "unknown" if finding.costs_more_than_recorded else "no estimated gain"
    return f"{missing}: {reason}" if reason else missing


def format_saving(impact: Impact) -> str:
    """Return the time that a fix saves: ``up to 87.9 ms``."""
    gain = format_duration(impact.gain_ns)
    if impact.kind == "lower bound":
        has_no_range = impact.low_ns is None or format_duration(impact.low_ns) == gain
        return f"{'at least ' * has_no_range}{gain}"
    return f"{'up to ' * is_upper_bound(impact)}{gain}"


def is_upper_bound(impact: Impact) -> bool:
    """Return whether the gain is the upper end of its range, and the range is wide or the gain is
    exposed time. The fix saves no more, and may save much less."""
    gain = impact.gain_ns or 0
    if (impact.high_ns or 0) > _MAX_HIGH_RATIO * gain:
        return False
    is_wide = impact.low_ns is not None and impact.low_ns < WIDE_UPPER_BOUND * gain
    return impact.kind == "upper bound" or (is_wide and impact.high_ns is not None)


_MAX_HIGH_RATIO = 1.05
"""Maximum ratio of a range's high end to the gain at which they count as equal."""
WIDE_UPPER_BOUND = 0.75
"""Ratio of a range's low end to the gain below which a gain that is the high end is a bound."""
WIDE_LOW = 0.5
"""Ratio of a range's low end to the gain below which the range is wide."""


def format_gain_range(finding: Finding) -> str | None:
    """Return the range of the gain, ``8 to 15 ms`` or ``8 ms or more``, or ``None`` without one."""
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
    """Join names: ``a, b and c``. Beyond ``limit`` names, count the others: ``a, b and 12
    more``."""
    items = list(names)
    if 0 < limit < len(items):
        items[limit:] = [f"{len(items) - limit:,} more"]
    return " and ".join(part for part in (", ".join(items[:-1]), *items[-1:]) if part)


def describe_crashes(result: Sequence[Crash]) -> str:
    """Return a sentence on the ranks that ended with an exception. Empty without any."""
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
"""Maximum length of a sentence, characters: two lines of an overview."""


def split_sentences(text: str, room: int) -> tuple[str, str]:
    """Return the text's first sentences that fit in ``room`` characters, at least one, and the
    others."""
    first, *others = re.split(r"(?<=[a-z)`%\d_]\.)\s+(?=[A-Z\d])", clean(text))
    while others and len(first) + 1 + len(others[0]) <= room:
        first = f"{first} {others.pop(0)}"
    return first, " ".join(others)


def split_verdict(verdict: str, room: int) -> tuple[str, str]:
    """Return a page's headline and the text below it. The first problem comes before the
    measurement that opens a verdict, because the page's figures show it too."""
    measurement, separator, problem = verdict.partition(" First: ")
    if not separator or split_sentences(measurement, 0)[1]:  # for example, a crash comes first
        return split_sentences(verdict, room)
    title, remaining = split_sentences(upper_first(problem), room)
    return title, f"{remaining} {clean(measurement)}".strip()


def first_sentence(text: str) -> str:
    """Return a text's first sentence, cut if it is too long."""
    text = clean(text).strip()
    first = _SENTENCE_END.split(text, maxsplit=1)[0].rstrip(".:;")
    if len(first) <= _MAX_SENTENCE:
        return first
    cut = first[:_MAX_SENTENCE].rsplit(" ", 1)[0]
    clause = max(cut.rfind(mark) for mark in (", ", "; ", ": "))
    return f"{(cut[:clause] if clause > _MAX_SENTENCE // 2 else cut).rstrip(',;:')} …"


def first_clause(text: str) -> str:
    """Return the action in a text's first sentence, without the reason."""
    return _REASON_START.split(first_sentence(text))[0]


def shorten_evidence(text: str, shorten: Callable[[str], str] = first_sentence) -> str:
    """Return the beginning of a text, as ``shorten`` cuts it. If it states no time and a later
    sentence does, return both sentences."""
    first, *others = _SENTENCE_END.split(clean(text).strip())
    result = shorten(text)
    timed = next((other for other in others if _TIME.search(other)), "")
    if _TIME.search(result) or not timed:
        return result
    return f"{first_sentence(first)}. {first_sentence(timed)}"


_TIME: Final = re.compile(r"\d (?:ns|µs|ms|s|min|h)\b")
_SENTENCE_END: Final = re.compile(
    r"(?<=[a-z)`%\d_][.:;])\s+(?=[A-Z])|(?<=[A-Za-z_)%`]{2}\.)\s+(?=[A-Z\d]|[a-z]+(?:::|[A-Z_(]|\.[a-z]))"
)
"""End of a sentence: before a capital letter, or after a longer word before a figure or a code name
such as ``cudaFree``, ``aten::copy_`` or ``torch.compile``."""
_REASON_START: Final = re.compile(
    r"(?<=.{12})(?:: (?=(?:the|it|this|that|one|\d)\b)|, (?:which|because|so that|and) |; )"
)
"""Beginning of a reason, after a clause that is long enough to be read alone."""

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
    """Return the name of an idle cause, in the words of the program's framework. ``outside``: an
    unknown cause is code outside operators (``IdleCause.outside_operators``)."""
    if outside and cause == "unknown":
        return HOST_LABELS[cause]
    return _find_framework_name(cause, framework) or CAUSE_LABELS.get(
        cause, clean(cause).replace("_", " ")
    )


def idle_label(part: IdleCause, framework: str | None = None) -> str:
    """Return the name of a part of the idle time, with what is known about an unknown cause."""
    return cause_label(part.cause, framework, outside=part.outside_operators)


def host_label(name: str, framework: str | None = None) -> str:
    """Return the name of a class of host time, in the words of the program's framework."""
    return _find_framework_name(name, framework) or HOST_LABELS.get(
        name, clean(name).replace("_", " ")
    )


def path_label(name: str, framework: str | None = None) -> str:
    """Return the name of a part of the critical path, in the words of the program's framework."""
    framework_name = _find_framework_name(name, framework)
    return f"the {framework_name}" if framework_name else PATH_LABELS.get(name, clean(name))


def _find_framework_name(name: str, framework: str | None) -> str | None:
    return _FRAMEWORK_NAMES.get(framework, {}).get(name)
