"""Texts of a report for any renderer: its scope, figures, gains, caveats and skipped checks."""

import itertools
from collections.abc import Mapping
from pathlib import PurePath
from typing import Final

from advisor.advise.finding_text import (
    SMALL_SHARE,
    Line,
    gains_of_findings,
    is_replayed,
    ranked_findings,
)
from advisor.advise.program_wording import ask_to_record
from advisor.core import labels
from advisor.core import text as t
from advisor.core.auxiliary_inputs import AUXILIARY_INPUTS_BY_NAME, SNAPSHOT
from advisor.core.charts import FixSequence
from advisor.core.finding import LAYER_TIMES
from advisor.core.prices import format_money
from advisor.core.report import Report
from advisor.core.report_replay import Replay
from advisor.core.report_steps import EQUAL_STEP_SHARE

MAX_NAMES = 6

STATUS: Final = {
    "bottlenecks": "Bottlenecks found",
    "healthy": "Healthy",
    "limited": "Limited data",
}


def describe_scope(report: Report) -> list[Line]:
    """Describe the traces, device and steps of a report, and energy and cost per step."""
    lines = [
        ("trace", _trace(report)),
        ("device", _device(report)),
        ("run", describe_recorded_steps(report)),
        ("host", describe_phases(report)),
        (
            "steps" if report.step is None or report.step.window_slowdown is None else "window",
            _steps(report),
        ),
        ("energy", describe_energy(report)),
        ("cost", describe_cost(report)),
    ]
    return [(label, parts) for label, parts in lines if parts]


def describe_status(report: Report) -> str:
    """Describe the status in two words: logs and dumps show faults, snapshots memory, and not where
    the time goes."""
    if report.scope.step_source == SNAPSHOT.name:
        return "Memory problem found" if report.status == "bottlenecks" else "Memory snapshot"
    fault = report.status == "bottlenecks" and (report.flight or report.network)
    return "Problems found" if fault and report.scope.has_no_step_time else STATUS[report.status]


def status_class(report: Report) -> str:
    """Return the class of the status; ``critical`` where the run ended by what was found."""
    stopped = any(risk.severity == "critical" for risk in report.risks)
    return "critical" if stopped else report.status


def _trace(report: Report) -> list[str]:
    shown = next((i for i in report.inputs if i.rank == report.scope.rank), None)
    if shown is None:
        return []
    name = "standard input" if shown.path == "-" else PurePath(shown.path).name or shown.path
    if (kind := AUXILIARY_INPUTS_BY_NAME.get(report.scope.step_source)) is not None:
        several = len(report.kernel_counters) + len(report.triton_kernels)  # of all files given
        count = t.count_noun(several or shown.events_read, kind.counted)
        what = kind.description
        if any(view.source == "timeline" for view in report.memory):
            what = "a memory timeline, {count}"
        parts = [t.shorten_path(name, 60), *what.format(count=count).split(", ")]
    elif report.scope.step_source == "record":
        parts = [t.shorten_path(name, 60), "no profiled window"]
    else:
        parts = [t.shorten_path(name, 60), t.count_noun(shown.events_read, "event")]
    if shown.truncated:
        parts.append("cut off")
    if shown.windows > 1:
        parts.append(f"window {shown.window} (there are {shown.windows}: --window)")
    if len(report.inputs) > 1:
        which = "no rank known" if shown.rank is None else f"rank {shown.rank}"
        parts += [f"{which} of {len(report.inputs)}", *_other_ranks(report)]
    elif shown.rank is not None:
        parts.append(f"rank {shown.rank}")
    return parts


def _other_ranks(report: Report) -> list[str]:
    """Name the rank that the others wait for, and the one with the longest step if not shown."""
    lines = [] if report.ranks is None else report.ranks.lines
    if not lines:
        return []
    result, own = [], report.scope
    late = max(lines, key=lambda line: line.caused_wait_ns or 0.0)
    if (late.caused_wait_ns or 0.0) > EQUAL_STEP_SHARE * own.step_ns:
        who = "it" if late.rank == own.rank else f"rank {late.rank} (--rank {late.rank})"
        result.append(f"{who} keeps the other{'s' * (len(lines) > 2)} waiting")
    longest = max(lines, key=lambda line: line.step_ns)
    if longest.step_ns > (1 + EQUAL_STEP_SHARE) * own.step_ns:
        result.append(
            f"longest {report.per}: rank {longest.rank}, {t.format_duration(longest.step_ns)}"
        )
    return result


def _device(report: Report) -> list[str]:
    scope_ = report.scope
    if scope_.device is None:
        return []
    name = "model not recorded" if scope_.device_name is None else labels.clean(scope_.device_name)
    parts = [f"GPU {scope_.device}: {labels.shorten(name, 50)}"]
    if scope_.devices_seen > 1:
        parts.append(f"of {scope_.devices_seen} in the trace, the one with most work")
    parts += [scope_.device_shared] * bool(scope_.device_shared)
    return parts


def _steps(report: Report) -> list[str]:
    scope_ = report.scope
    if scope_.has_no_step_time:
        return []
    if scope_.per == "recording":
        span, recorded = scope_.span_ns, scope_.recorded_ns
        if recorded is None:
            return [f"none marked: the whole recording, {t.format_duration(span)}"]
        what = f"none marked: {t.format_duration(span)} from the first to the last GPU work"
        more = f"{t.format_duration(recorded)} recorded"
        return [what] if recorded - span < MIN_OUTSIDE_SHARE * recorded else [what, more]
    if scope_.step_source == LAYER_TIMES:
        return [f"one inference of {t.format_duration(scope_.span_ns)}, the sum of its layers"]
    source = "recorded" if scope_.step_source == "record" else labels.clean(scope_.step_source)
    step = "step" if scope_.steps_found == 1 else "steps"
    runs = "run" if scope_.steps_found == 1 else "runs"
    source = {
        "optimizer": f"optimizer {step}",
        "engine": f"{step} of the engine",
        "program": f"{runs} of the program",
    }.get(source, source)
    if scope_.per == "repetition":
        source = "repetitions, which may be parts of a step: none is marked"
    used = f"{scope_.steps_used} of {scope_.steps_found}"
    mean = f"{t.format_duration(scope_.step_ns)} {t.format_per(scope_.per)}"
    if scope_.steps_used == 1:
        parts = [f"{used} {source}", mean, *compare_window_with_run(report)]
    else:
        spread = t.format_range(scope_.step_min_ns, scope_.step_max_ns)
        mean = f"{mean} on average ({spread})"
        parts = [f"{used} {source}", mean, *compare_window_with_run(report)]
    if scope_.outliers:
        shown = (labels.shorten(labels.clean(item), 30) for item in scope_.outliers)
        parts.append(f"outliers set aside: {t.list_names(shown, 4)}")
    if scope_.behind_ns > scope_.step_ns:
        ahead = f"the host queues work {t.format_duration(scope_.behind_ns)} ahead"
        parts.append(f"{ahead}, so steps are timed by the GPU's work")
    return parts


MIN_OUTSIDE_SHARE = 0.01
"""Share of a run's time from which the time between its steps is shown."""
SAME_CAUSE = 0.5
"""Part of an excess from which its cause is named: of the window's over the run's steps, what the
unprofiled steps around it have too; of the mean's over the median, that of slow steps."""
SLOW_STEP = 2.0
"""Ratio of a step to the median from which it is called slow."""


def compare_window_with_run(report: Report) -> list[str]:
    """Say how the profiled steps compare with the run's own, and why they differ."""
    step = report.step
    if step is None or step.window_excess is None:
        return []
    if not step.window_differs and not step.atypical:
        return ["as long as the run's steps"]
    longer = f"{format_longer(step.window_excess)} the run's {step.statistic} step"
    nearby = step.nearby_ns or step.reference_ns
    around, differs = t.format_duration(nearby), nearby / step.reference_ns - 1
    if step.profiler_overhead is not None and step.profiler_overhead >= EQUAL_STEP_SHARE:
        parts = [f"the profiler adds {t.format_share(step.profiler_overhead)}"]
        if step.atypical or abs(differs) >= EQUAL_STEP_SHARE:
            parts[0] += f" to the {around} of the steps around them"
    elif step.nearby_ns is None or (report.scope.steps_used == 1 and not step.atypical):
        parts = [longer]
    elif step.atypical or differs / step.window_excess >= SAME_CAUSE:
        parts = [f"the steps around them take {around} without the profiler"]
    else:
        parts = [f"{longer}; steps vary too much to tell the profiler's cost"]
    if step.in_warm_up:
        parts.append("they are among the first steps")
    if step.atypical and step.nearby_ns is not None:
        share = t.format_share(step.share_beyond) if step.share_beyond else "none"
        kind = "long" if step.nearby_ns > step.ns else "short"
        parts.append(f"{share} of the run's steps are as {kind}")
    return ["; ".join(parts)]


def format_longer(share: float) -> str:
    """Format a relative difference of times: ``12% longer than``, ``2.5 times as long as``."""
    if share >= 1:
        return f"{1 + share:.1f} times as long as"
    return f"{abs(share):.0%} {'longer' if share >= 0 else 'shorter'} than"


def time_heading(report: Report) -> tuple[str, str]:
    """Return the title of the step's bar, and the step that its figures add up to. That step is
    empty if the report leads with it."""
    where = "on the GPU" if report.time else "on the host's main thread"
    step = report.step
    other = step is not None and step.window_is_other
    title = f"Where {'a profiled' if other else 'the'} {report.per}'s time goes {where}"
    if any(each.truncated for each in report.inputs):
        return title, "of what is left of the file"
    if step is None:
        return title, ""
    if step.window_differs:
        window = t.format_duration(step.window_ns)
        return title, window if other else f"profiled {report.per}, {window}"
    if step.window_ns is None and abs(step.mean_ns / step.ns - 1) >= EQUAL_STEP_SHARE:
        return title, f"mean step, {t.format_duration(step.mean_ns)}"
    return title, ""


def describe_recorded_steps(report: Report) -> list[str]:
    """Describe what the recorder measured of every step, profiled or not."""
    view = report.recorded
    if view is None:
        return []
    kind = f"{'inference ' * view.inference}step"
    parts = [t.count_noun(view.steps, kind) if view.steps else "no step was seen"]
    times = {"median": view.median_ns, "mean": view.mean_ns}
    if report.step is not None and report.step.varies:
        times = dict(reversed(times.items()))
    first, other = ((name, ns) for name, ns in times.items())
    if first[1]:
        parts.append(f"{first[0]} {t.format_duration(first[1])} without the profiler")
        if other[1] and abs(other[1] / first[1] - 1) > EQUAL_STEP_SHARE:
            parts.append(f"{other[0]} {t.format_duration(other[1])}")
    parts += _describe_slow_steps(report)
    if view.p99_ns is not None:
        parts.append(f"99th percentile {t.format_duration(view.p99_ns)}")
    if view.samples_per_second is not None:
        parts.append(f"{view.samples_per_second:,.0f} samples/s")
    if view.outside_ns and (view.outside_share or 0.0) >= MIN_OUTSIDE_SHARE:
        parts.append(
            f"pauses of {t.format_duration(view.outside_ns)} in all between steps "
            f"({t.format_share(view.outside_share)} of the time after the first): "
            "validation, rollouts, checkpoints and the like"
        )
    if view.ended is None:
        parts.append("killed, or still going on")
    elif view.ended == "disk":
        parts.append("the disk was full: later steps are not recorded")
    elif view.ended != "finished":
        parts.append(f"ended by {labels.clean(view.ended)}")
    return parts


def _describe_slow_steps(report: Report) -> list[str]:
    """Say how many steps make the mean longer than the median, where a few do."""
    step, runs = report.step, [each for each in report.step_durations if each.source == "recorder"]
    if step is None or not step.varies or step.mean_ns <= step.ns or len(runs) != 1:
        return []
    durations = runs[0].durations_ns
    slow = [ns for ns in durations if ns >= SLOW_STEP * step.ns]
    excess = sum(slow) - len(slow) * step.ns
    if excess < SAME_CAUSE * (sum(durations) - len(durations) * step.ns):
        return []
    share = t.format_share(sum(slow) / sum(durations))
    verb = "takes" if len(slow) == 1 else "take"
    count = t.count_noun(len(slow), "step")
    return [f"{count} over twice the median {verb} {share} of the time"]


def describe_phases(report: Report) -> list[str]:
    """Describe the recorder's shares of the host's time by phase of the step."""
    view = report.recorded
    if view is None or report.scope.step_source == "record":
        return []
    shown = [
        f"{t.host_label(phase.name, report.scope.framework)} {t.format_share(phase.share)}"
        for phase in view.phases[:MAX_NAMES]
        if phase.name != "between steps" or (view.outside_share or 0.0) < MIN_OUTSIDE_SHARE
    ]
    return [f"{shown[0]} of the host's time", *shown[1:]] if shown else []


def headline_numbers(report: Report) -> list[Line]:
    """Return the lines of figures next to the step's bar."""
    lines: list[Line] = []
    if report.time:
        other = report.step is not None and report.step.window_is_other
        profiled = t.format_share(report.busy_share)
        busy = [f"busy {profiled}{' while profiled' * other}"]
        if other and report.step is not None and report.step.busy_share is not None:
            own = t.format_share(report.step.busy_share)
            busy = [f"busy {own}" + f" ({profiled} while profiled)" * (own != profiled)]
        if report.communication_ns is not None:
            hidden = t.format_share(report.communication_overlap)
            busy.append(
                f"communication {t.format_duration(report.communication_ns)}, {hidden} hidden"
            )
        of_format = f" of the {report.mfu_format} peak" if report.mfu_format else ""
        mfu, of_window = _mfu(report)
        busy += [f"MFU {t.format_share(mfu)}{of_format}{' while profiled' * of_window}"]
        busy += [f"memory peak {memory_peak(report)}"]
        lines.append(("GPU", busy))
    if report.operators:
        shown = report.operators[:MAX_NAMES]
        short = labels.labels_by_name((op.name for op in shown), 40)
        parts = [f"{short[op.name]} {t.format_share(op.share)}" for op in shown]
        lines.append(("ops", [f"{parts[0]} of operators' time", *parts[1:]]))
    if report.ranges:
        shown = report.ranges[:MAX_NAMES]
        short = labels.labels_by_name((item.name for item in shown), 40)
        lines.append(
            ("ranges", [f"{short[item.name]} {t.format_share(item.share)}" for item in shown])
        )
    if report.families:
        lines.append(("work", _families(report)))
    lines.append(("idle", describe_time_outside_operators(report)))
    if report.replay is not None and report.time:
        critical = report.replay.critical
        path = path_parts(critical, report.scope.framework)
        unknown = sum(part.share for part in report.idle if part.cause in ("unknown", "end"))
        if unknown >= MOSTLY_UNKNOWN:  # what the host does then is not recorded
            path = []
        share = report.busy_share
        if report.replay.unprofiled and report.step is not None:
            share = report.step.busy_share or share
        if path and _has_hidden_work(critical, share):
            path[[*critical].index("host")] += ", beside GPU work"
            if (share or 0.0) >= ABOUT_EVEN:
                path[0] += f"; a faster host saves {t.format_share(1 - (share or 0.0))} at most"
        named = "critical path" + ", unprofiled" * report.replay.unprofiled
        lines.append(("path", [f"{named}: {path[0]}", *path[1:]] if path else []))
    if report.host and report.time:
        host = [
            f"{t.host_label(part.name, report.scope.framework)} {t.format_share(part.share)}"
            for part in report.host
        ]
        whose = t.format_of(report.per)
        if report.host_step_ns is not None:
            whose = f"of its own steps of {t.format_duration(report.host_step_ns)}"
        host[0] += f" {whose}"
        lines.append(("host", host[:MAX_NAMES]))
    lines.append(("no fix", describe_time_without_fix(report)))
    return lines


MIN_OUTSIDE_OPERATORS = 0.1
"""Share of the step from which idle time outside operators is described."""
MIN_NEXT_SHARE = 0.1
"""Share of that time from which the operator after it is named."""


def describe_time_outside_operators(report: Report) -> list[str]:
    """Describe the gaps in which the host is outside operators, and which operators end them."""
    for part in report.idle:
        if part.gaps is None or part.share < MIN_OUTSIDE_OPERATORS:
            continue
        count = t.count_noun(round(part.gaps), "gap") if part.gaps >= 0.5 else "less than one gap"
        mean = f"{t.format_duration(part.ns / part.gaps)} on average"
        named = [each for each in part.next_operators if each.share >= MIN_NEXT_SHARE]
        before = [f"{labels.clean(each.name)} {t.format_share(each.share)}" for each in named]
        before[:1] = [f"before {each}" for each in before[:1]]
        return [f"outside operators: {count} {t.format_per(report.per)}, {mean}", *before]
    return []


def describe_time_without_fix(report: Report) -> list[str]:
    """Describe the parts of the time that no finding is about, with the reason. Those that the
    verdict names are left out."""
    said = "unknown" if "The trace does not show why" in report.verdict else ""
    return [
        f"{', '.join(part.labels)} {t.format_duration(part.ns)} ({t.format_share(part.share)}): "
        f"{labels.clean(part.why)}"
        for part in report.without_fix
        if not any(name == said or f"{name} (" in report.verdict for name in part.labels)
    ]


def _mfu(report: Report) -> tuple[float | None, bool]:
    """Return the MFU of the run's step, which has the profiled step's FLOPs in its own time; that
    of the profiled step, and true, where the run's steps vary, maybe in their FLOPs too."""
    step = report.step
    if report.mfu is None or step is None or step.window_ns is None or not step.window_differs:
        return report.mfu, False
    if step.varies:
        return report.mfu, True
    return report.mfu * step.window_ns / step.reference_ns, False


def figures_of_merit(report: Report) -> list[tuple[str, str, str]]:
    """Return the figures at the top of a page: name, value, and a note. Of a program without GPU
    work only those that were measured: the others do not apply."""
    scope, unit = report.scope, report.per
    spread = ""
    if scope.steps_used > 1:
        over = t.count_noun(scope.steps_used, "step")
        spread = f"{t.format_range(scope.step_min_ns, scope.step_max_ns)} over {over}"
    elif unit == "step":
        spread = "one step measured"
    of = t.format_of(unit)
    if (step := report.step) is not None:
        spread = f"{step.statistic} of the run, outside the profiler"
        if step.window_differs:
            of = f"of the profiled {unit}"
    own = None if step is None or not step.window_is_other else step.busy_share
    if own is not None:
        of = f"of the run's {unit}; {t.format_share(report.busy_share)} while profiled"
    tiles = [(unit.capitalize(), t.format_duration(report.step_ns), spread)]
    busy = "" if report.busy_share is None else of
    tiles.append(("GPU busy", t.format_share(own or report.busy_share), busy))
    whose = f"{report.mfu_format} peak" if report.mfu_format else "peak of the formats used"
    mfu, of_window = _mfu(report)
    note = f"of the {whose}{', while profiled' * of_window}" if mfu else ""
    tiles.append(("MFU", t.format_share(mfu), note))
    capacity, peak = report.memory_capacity_bytes, report.memory_peak_bytes
    note = f"reserved, of {t.format_bytes(capacity)}" if capacity is not None else "reserved"
    if peak is None:
        peak, note = held_at_peak(report), "in tensors"
    tiles.append(("Memory peak", t.format_bytes(peak), note if peak is not None else ""))
    if report.communication_ns is not None:
        hidden = f"{t.format_share(report.communication_overlap)} hidden under compute"
        tiles.append(("Communication", t.format_duration(report.communication_ns), hidden))
    return tiles if report.time else [tile for tile in tiles if tile[1] != t.NOT_MEASURED]


def describe_energy(report: Report) -> list[str]:
    """Describe the energy per step and how it was measured; empty if it was not."""
    use = report.energy
    if use is None:
        return []
    ranks = use.ranks
    methods = {"counter": "the driver's counter", "power": "sampled power"}
    how = t.list_names(methods[name] for name in dict.fromkeys(item.method for item in ranks))
    if use.joules is None or use.watts is None:
        shown = ", ".join(
            f"rank {item.rank} {t.format_value(item.joules, 'J')}" for item in ranks[:4]
        )
        return [f"{shown} {t.format_per(report.per)}", "not measured on all ranks", how]
    parts = [
        f"{t.format_value(use.joules, 'J')} {t.format_per(report.per)}",
        t.format_value(use.watts, "W"),
    ]
    if len(ranks) > 1:
        low, high = min(item.joules for item in ranks), max(item.joules for item in ranks)
        if t.format_value(low, "J") != t.format_value(high, "J"):
            parts.append(f"{t.format_value(low, 'J')} to {t.format_value(high, 'J')} a rank")
    return [*parts, how]


COSTED_STEPS = 1000
"""Number of steps whose cost is shown: the cost of one has many zeros."""


def describe_cost(report: Report) -> list[str]:
    """Describe the cost of the steps, now and with the fixes; empty without a price."""
    paid = report.cost
    if paid is None:
        return []
    whole = report.per == "recording"
    times = 1 if whole else COSTED_STEPS
    each = "the recording" if whole else f"{COSTED_STEPS:,} {report.per}s"
    parts = [f"{format_money(paid.step * times, paid.currency)} for {each}"]
    if paid.step_after is not None:
        least = "at least " if paid.bound else ""
        parts.append(
            f"{least}{format_money(paid.step_after * times, paid.currency)} with the fixes"
        )
    if paid.run is not None:
        parts.append(f"{format_money(paid.run, paid.currency)} this run")
    gpus = "" if paid.gpus == 1 else f"{paid.gpus} × "
    return [*parts, f"at {gpus}{format_money(paid.per_hour, paid.currency)} an hour"]


def _families(report: Report) -> list[str]:
    """Describe the kinds of device work by their shares of all of it, and count it."""
    parts = sorted(report.families, key=lambda family: -family.ns)
    shown = [f"{labels.clean(f.name)} {t.format_share(f.share)}" for f in parts[:MAX_NAMES]]
    if shown:
        shown[0] += " of device work"
    total = round(sum(family.count for family in report.families))
    work = t.count_noun(total, "kernel or copy", "kernels and copies")
    return [*shown, f"{work} {t.format_per(report.per)}"]


MOSTLY_UNKNOWN: Final = 0.5
"""Share of the step in which the device idles for an unknown cause, from which its path is too."""
BOTH_WORK: Final = 1.05
"""Share of the step on the host plus share in which the device works, from which the report
says that they overlap: the two are not shares of one whole."""


ABOUT_EVEN: Final = 0.8
"""Busy share from which a host that is all of the critical path limits little."""


def _has_hidden_work(critical: Mapping[str, float], busy: float | None) -> bool:
    """Return whether the device works beside the host while the step depends on the host: the
    shares of both say more than the whole step."""
    total = sum(critical.values()) or 1.0
    return busy is not None and busy + critical.get("host", 0.0) / total >= BOTH_WORK


def path_parts(critical: Mapping[str, float], framework: str | None) -> list[str]:
    """List the parts of a step's critical path; those of less than 1% are left out: ``68% on the
    host``, ``4% on GPU compute``."""
    total = sum(critical.values()) or 1.0
    return [
        f"{t.format_share(ns / total)} on {t.path_label(name, framework)}"
        for name, ns in critical.items()
        if ns >= 0.01 * total
    ]


def held_at_peak(report: Report) -> int | None:
    """Return the analysed device's largest number of bytes in tensors; ``None``: unknown."""
    of_device = (view for view in report.memory if view.device == report.scope.device)
    return next((view.allocated for view in of_device), None)


def memory_peak(report: Report) -> str:
    """Format the peak of reserved memory; of memory in tensors if only that is recorded."""
    peak, capacity = report.memory_peak_bytes, report.memory_capacity_bytes
    if peak is None and (held := held_at_peak(report)) is not None:
        return f"{t.format_bytes(held)} in tensors"
    if peak is None or capacity is None:
        return t.format_bytes(peak)
    return f"{t.format_bytes(peak)} of {t.format_bytes(capacity)}"


def describe_skipped_checks(report: Report) -> list[tuple[str, str]]:
    """List what could not be checked: (what, why and what to record)."""
    result = []
    for item in report.not_checked:
        why = labels.clean(item.why).rstrip(".")
        record = f". {ask_to_record(labels.clean(item.record))}" if item.record else ""
        result.append((labels.clean(item.what), f"{why}{record}."))
    return result


def has_upper_bound(report: Report) -> bool:
    """Return whether some gain is an upper bound and not replayed."""
    return any(
        finding.impact is not None and t.is_upper_bound(finding.impact)
        for finding in report.findings
    )


def step_after_fixes(report: Report) -> float:
    """Return what the step takes with every ranked fix, ns: each saves what is left to it after
    those before it."""
    saved = sum(max(0, f.marginal_gain_ns or 0) for f in ranked_findings(report))
    return max(0.0, report.step_ns - saved)


def format_speedup(report: Report) -> str:
    """Format how much faster the step gets with every ranked fix: ``1.53× faster``. Empty if they
    do not shorten it, or only a part of a step is recorded."""
    before, after = report.step_ns, step_after_fixes(report)
    ratio = before / after if after > 0 else 1.0
    if ratio - 1 < SMALL_SHARE or t.format_duration(before) == t.format_duration(after):
        return ""
    gains = gains_of_findings(report)
    if all(impact.share is None for impact in gains):
        return ""
    bound = "up to " * any(map(t.is_upper_bound, gains))
    return f"{bound}{f'{ratio:.1f}' if ratio >= 2 else f'{ratio:.2f}'}× faster"


def describe_all_fixes(report: Report) -> str:
    """Say what the step takes with every ranked fix, and how busy the device is then. Empty if
    they do not shorten it."""
    if not (faster := format_speedup(report)):
        return ""
    found = ranked_findings(report)
    before, after = report.step_ns, step_after_fixes(report)
    fixes = "all fixes" if len(found) > 1 else "this fix"
    busy = None if report.replay is None else report.replay.busy_after_ns
    then = ""
    if busy is not None and report.time:
        then = f", GPU busy {t.format_share(min(1.0, busy / after))}"
    return (
        f"With {fixes}: {t.format_duration(before)} → {t.format_duration(after)} "
        f"({faster}){then}."
        + "".join(
            f" Fix {f.priority} saves {t.format_duration(f.impact.gain_ns)} over the run, "
            "outside these steps."
            for f in found
            if f.impact is not None and f.impact.unit == "run" and f.impact.gain_ns
        )
    )


def gains_overlap(report: Report) -> bool:
    """Return whether the sum or order of the list's gains lets one wonder what they are of."""
    own = [each.gain_ns or 0 for each in gains_of_findings(report) if each.unit != "run"]
    ordered = all(after <= before for before, after in itertools.pairwise(own))
    together = report.step_ns - step_after_fixes(report)
    return len(own) > 1 and not (ordered and abs(sum(own) - together) < 0.01 * together)


def describe_chosen_fixes(fix_sequence: FixSequence) -> str:
    """Say what the step takes with the chosen fixes."""
    step, left = fix_sequence.measured.left_ns, fix_sequence.fixes[-1].left_ns
    if left >= step:
        return f"Without a fix: {t.format_duration(step)}."
    times = f"{step / left:.2f}× faster" if left else ""
    after = f"{t.format_duration(step)} → {fix_sequence.bound_prefix}{t.format_duration(left)}"
    return f"With the ticked fixes: {after} ({times})."


def _explained(replay: Replay) -> str:
    """Say how much of the waiting the replay reproduces by what was waited for; may be empty."""
    parts = [
        f"{t.format_share(share)} of the time that {who}"
        for share, of, who in (
            (replay.waits_explained, replay.waits, "the host waits for the GPU"),
            (replay.idle_explained, replay.idle, "the GPU idles"),
        )
        if share is not None and of >= 0.01
    ]
    return f" It reproduces {' and '.join(parts)}." * bool(parts)


def replay_error(replay: Replay) -> str:
    """Format the difference of the replay without edits from the measurement, as a step's share."""
    return "0.1%" if replay.step_error < 0.001 else f"{replay.step_error:.1%}"


def define_gains(report: Report) -> list[str]:
    """Say how the gains of this report were estimated, and how far to trust them."""
    result = []
    replay = report.replay
    if replay is not None and any(map(is_replayed, report.findings)):
        steps, unit = f"the {report.per}", str(report.per)
        if replay.steps > 1:
            steps, unit = t.count_noun(replay.steps, unit), f"{unit}s"
        error = replay_error(replay)
        starts = ""
        if replay.explained is not None:
            of = t.count_noun(replay.starts, "start of GPU work", "starts of GPU work")
            starts = f" and predicts {t.format_share(replay.explained)} of {of} within 5 µs"
        result.append(
            "Gains are replayed: the dependency graph of "
            f"{steps} is run again with the fix in it. Without any fix it comes "
            f"within {error} of the measured {unit}{starts}.{_explained(replay)}"
        )
    step = report.step
    if report.findings and step is not None and step.window_differs:
        result.append(
            "What is measured in the profiled window is of its own step; "
            f"gains are of the run's {step.statistic} step."
        )
    if has_upper_bound(report):
        result.append(
            "'Up to' is the most that a fix gains, such as the time during which nothing but the "
            "cause keeps the GPU or the step waiting."
        )
    return result
