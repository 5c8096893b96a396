"""What the figures of a report are about, and those beside the bar: as words, for any renderer."""

from __future__ import annotations

from pathlib import PurePath

from advisor.model import Finding, Location
from advisor.report import text as t
from advisor.report.data import Report

MOST_NAMES = 6

Line = tuple[str, list[str]]
"""A label and the parts that follow it."""


def scope(report: Report) -> list[Line]:
    """Which traces, device and steps."""
    lines = [
        ("trace", _trace(report)),
        ("device", _device(report)),
        ("steps", _steps(report)),
        ("run", recorded(report)),
    ]
    return [(label, parts) for label, parts in lines if parts]


def _trace(report: Report) -> list[str]:
    shown = next((i for i in report.inputs if i.rank == report.scope.rank), None)
    if shown is None:
        return []
    name = "standard input" if shown.path == "-" else PurePath(shown.path).name or shown.path
    if report.scope.step_source == "record":
        parts = [t.path(name, 60), "no profiled window"]
    else:
        parts = [t.path(name, 60), f"{t.count(shown.events_read)} events"]
    if shown.truncated:
        parts.append("truncated")
    if shown.windows > 1:
        parts.append(f"window {shown.window} (there are {shown.windows}: --window)")
    if len(report.inputs) > 1:
        which = "no rank known" if shown.rank is None else f"rank {shown.rank}"
        parts.append(f"{which}, beside {len(report.inputs) - 1} more")
    elif shown.rank is not None:
        parts.append(f"rank {shown.rank}")
    return parts


def _device(report: Report) -> list[str]:
    scope_ = report.scope
    if scope_.device is None:
        return []
    name = "model not recorded" if scope_.device_name is None else t.clean(scope_.device_name)
    parts = [f"GPU {scope_.device}: {t.shorten(name, 50)}"]
    if scope_.devices_seen > 1:
        parts.append(f"of {scope_.devices_seen} in the trace, the one with most work")
    return parts


def _steps(report: Report) -> list[str]:
    scope_ = report.scope
    if scope_.step_source == "whole trace":
        return [f"none marked: the whole recording, {t.time(scope_.span_ns)}"]
    source = "recorded" if scope_.step_source == "record" else t.clean(scope_.step_source)
    used = f"{scope_.steps_used} of {scope_.steps_found}"
    mean = f"{t.time(scope_.step_ns)} a step"
    if scope_.steps_used == 1:
        parts = [f"{used} {source}", mean]
    else:
        spread = t.between(scope_.step_min_ns, scope_.step_max_ns)
        parts = [f"{used} {source}", f"{mean} on average", spread]
    if scope_.outliers:
        parts.append(f"outliers set aside: {names(scope_.outliers)}")
    return parts


def recorded(report: Report) -> list[str]:
    """What the recorder measured of every step, profiled or not."""
    view = report.recorded
    if view is None:
        return []
    parts = [f"{t.count(view.steps)} steps"]
    if view.median_ns is not None:
        parts.append(f"median {t.time(view.median_ns)} without the profiler")
    if view.observer_effect is not None and view.profiled_median_ns is not None:
        change = f" ({view.observer_effect:+.0%} there)" if view.observer_effect > 0 else ""
        parts.append(f"{t.time(view.profiled_median_ns)} with it{change}")
    if view.p99_ns is not None:
        parts.append(f"99th percentile {t.time(view.p99_ns)}")
    if view.samples_per_second is not None:
        parts.append(f"{view.samples_per_second:,.0f} samples/s")
    if view.phases and report.scope.step_source != "record":
        shown = ", ".join(
            f"{t.host_label(phase.name)} {t.percent(phase.share)}"
            for phase in view.phases[:MOST_NAMES]
        )
        parts.append(f"host: {shown}")
    if view.ended is None:
        parts.append("killed, or still going on")
    elif view.ended != "finished":
        parts.append(f"ended by {t.clean(view.ended)}")
    return parts


def figures(report: Report) -> list[Line]:
    """The figures beside the bar."""
    lines: list[Line] = []
    if report.time:
        busy = [f"busy {t.percent(report.busy_share)}"]
        if report.communication_ns is not None:
            hidden = t.percent(report.communication_overlap)
            busy.append(f"communication {t.time(report.communication_ns)}, {hidden} hidden")
        busy += [f"MFU {t.percent(report.mfu)}", f"memory peak {_memory(report)}"]
        lines.append(("GPU", busy))
    if report.operators:
        ops = [f"{t.shorten(t.clean(o.name), 40)} {t.percent(o.share)}" for o in report.operators]
        lines.append(("ops", ops[:MOST_NAMES]))
    if report.families:
        lines.append(("work", _families(report)))
    if report.replay is not None:
        lines.append(("path", path_parts(report.replay.critical)))
    if report.host and report.time:
        host = [f"{t.host_label(part.name)} {t.percent(part.share)}" for part in report.host]
        lines.append(("host", host[:MOST_NAMES]))
    return lines


def _families(report: Report) -> list[str]:
    """Device work by kind, as shares of all of it."""
    parts = sorted(report.families, key=lambda family: -family.ns)
    whole = sum(family.ns for family in parts) or 1.0
    shown = [f"{t.clean(f.name)} {t.percent(f.ns / whole)}" for f in parts[:MOST_NAMES]]
    total = t.count(round(sum(family.count for family in report.families)))
    per = "a step" if t.loop_unit(report.scope.step_source) == "step" else "in the recording"
    return [*shown, f"{total} kernels and copies {per}"]


def path_parts(critical: dict[str, float]) -> list[str]:
    """What the critical path consists of: what the step's length hangs on."""
    total = sum(critical.values()) or 1.0
    parts = [f"{t.clean(name)} {t.percent(ns / total)}" for name, ns in critical.items()]
    return ["critical: " + parts[0], *parts[1:MOST_NAMES]] if parts else []


def _memory(report: Report) -> str:
    peak, capacity = report.memory_peak_bytes, report.memory_capacity_bytes
    if peak is None or capacity is None:
        return t.memory(peak)
    return f"{t.memory(peak)} of {t.memory(capacity)}"


def names(items: list[str], most: int = 4) -> str:
    """``a, b, c and 12 more``."""
    shown = ", ".join(t.shorten(t.clean(item), 30) for item in items[:most])
    return shown if len(items) <= most else f"{shown} and {len(items) - most} more"


def ranked(report: Report) -> list[Finding]:
    """The findings that count, the most valuable first."""
    return [finding for finding in report.findings if finding.folded_under is None]


def places(finding: Finding, most: int = 3) -> list[Location]:
    """Where it is, worst first, places of the same name once."""
    found: dict[tuple[str, ...], Location] = {}
    for location in finding.where:
        found.setdefault(tuple(t.place_names(location)), location)
    return list(found.values())[:most]


def hot_lines(report: Report, most: int = 8) -> list[tuple[str, str, str]]:
    """(share of the samples, place, text) of the hottest lines."""
    return [
        (
            t.percent(line.share),
            f"{t.path(line.file, 50)}:{line.line}",
            t.shorten(t.clean(line.text), 80),
        )
        for line in report.hot_lines[:most]
    ]


def folded(report: Report, finding: Finding) -> list[Finding]:
    """Symptoms and alternatives that a finding already covers."""
    return [other for other in report.findings if other.folded_under == finding.rule]


def order_parts(finding: Finding, report: Report) -> list[str]:
    """What the order of the findings does to this one's gain, and whose rank it is of."""
    parts = []
    own = finding.worth.gain_ns if finding.worth is not None else None
    left = finding.rank_gain_ns
    if finding.pays_after is not None:
        before = next((f.title for f in report.findings if f.rule == finding.pays_after), "")
        before = t.clean(before) or t.clean(finding.pays_after)
        parts.append(f"pays only after '{before}': {t.time(left)} then")
    elif own is not None and left is not None and finding.rank != 1:
        if left < 0.95 * own:
            parts.append(f"{t.time(left)} of it once those above are fixed")
        elif left > 1.05 * own:
            parts.append(f"{t.time(left)} once those above are fixed")
    if finding.other_rank and finding.trace_rank is not None:
        parts.append(f"on rank {finding.trace_rank}")
    return parts


def doubts(finding: Finding) -> list[str]:
    """Why a finding may be wrong: what lowered its confidence, what it takes for granted."""
    found = [*finding.confidence_notes]
    if finding.assumptions:
        found.append(f"assumes: {'; '.join(finding.assumptions)}")
    if finding.falsified_by:
        found.append(f"wrong if you see: {finding.falsified_by}")
    return [t.clean(doubt) for doubt in found]


def covered_line(finding: Finding, other: Finding) -> tuple[str, str]:
    """How to name a folded finding: (``or``, …) for an alternative, (``also``, …) for a symptom."""
    alternative = bool(finding.alternatives) and finding.alternatives == other.alternatives
    title = t.clean(other.title)
    if alternative:
        return "or", f"{title}: {t.gain(other)}, in place of this one"
    return "also", f"{title}: {t.gain(other)} by itself"


def why_note(finding: Finding) -> str:
    """Why a finding is a note and not ranked."""
    worth = finding.worth
    if finding.validation == "synthetic":
        return "not proven on real traces"
    if worth is not None and worth.currency == "unpriced":
        return t.clean(worth.reason)
    return ""


def abstentions(report: Report) -> list[tuple[str, str]]:
    """What could not be checked: (what, why and what to record)."""
    found = []
    for item in report.not_checked:
        why = t.clean(item.why).rstrip(".")
        record = f". Record with {t.clean(item.record)}" if item.record else ""
        found.append((t.clean(item.what), f"{why}{record}."))
    return found


def bounded(report: Report) -> bool:
    """Some gain is an upper bound, not a replay."""
    return any(
        finding.worth is not None and finding.worth.method.startswith("upper bound")
        for finding in report.findings
    )


def outlook(report: Report) -> str:
    """What is left when everything that is ranked is fixed."""
    replay = report.replay
    if replay is None or not ranked(report):
        return ""
    parts = ", ".join(path_parts(replay.critical_after)).removeprefix("critical: ")
    fixed = "all are" if len(ranked(report)) > 1 else "it is"
    unit = t.loop_unit(report.scope.step_source)
    both = f"from {t.time(replay.measured_ns)} to {t.time(replay.step_after_ns)}"
    return f"Once {fixed} fixed, the {unit} goes {both} by replay and hangs on: {parts}."


def definitions(report: Report) -> list[str]:
    """How the gains of this report were got, and how far to trust them."""
    found = []
    replay = report.replay
    if report.findings and replay is not None:
        steps = f"{replay.steps} steps" if replay.steps > 1 else (
            f"the {t.loop_unit(report.scope.step_source)}")  # fmt: skip
        unit = t.loop_unit(report.scope.step_source) + "s" * (replay.steps > 1)
        error = "0.1%" if replay.step_error < 0.001 else f"{replay.step_error:.1%}"
        starts = "" if replay.explained is None else (
            f" and explains {t.percent(replay.explained)} of {t.count(replay.starts)} device "
            "starts to 5 µs")  # fmt: skip
        found.append(
            "Gains are replayed: the dependency graph of "
            f"{steps} is run again with the fix in it. Without any fix it comes "
            f"within {error} of the measured {unit}{starts}."
        )
    if bounded(report):
        found.append(
            "'Up to' is the time during which nothing but the cause keeps the GPU or the step "
            "waiting: a fix cannot gain more."
        )
    return found
