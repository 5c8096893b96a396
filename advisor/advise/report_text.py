"""Texts of a report for any renderer: its scope, figures, gains, caveats and skipped checks."""

import itertools
from collections.abc import Mapping
from pathlib import PurePath
from typing import Final, NamedTuple

from advisor.advise.finding_text import (
    SMALL_SHARE,
    Line,
    describe_weak_steps,
    explain_larger_gain_after,
    fixes_of_step,
    gains_of_findings,
    is_conditional,
    is_unseen_code,
    is_unsure,
    ranked_findings,
)
from advisor.advise.gain_reasons import gain_of, is_replayed
from advisor.advise.program_wording import ask_to_record
from advisor.core import labels
from advisor.core import text as t
from advisor.core.auxiliary_inputs import AUXILIARY_INPUTS_BY_NAME, SNAPSHOT
from advisor.core.charts import FixSequence
from advisor.core.finding import HOST_CODE, LAYER_TIMES
from advisor.core.prices import format_money
from advisor.core.report import Report
from advisor.core.report_replay import Replay
from advisor.core.report_steps import EQUAL_STEP_SHARE, StepTime

MAX_LISTED_NAMES = 6

STATUS: Final = {
    "bottlenecks": "Bottlenecks found",
    "healthy": "Healthy",
    "limited": "Limited data",
}


def describe_scope(report: Report) -> list[Line]:
    """Describe the traces, device and steps of a report, and energy and cost per step."""
    lines = [
        ("trace", _describe_trace(report)),
        ("device", _describe_device(report)),
        ("run", describe_recorded_steps(report)),
        ("host", describe_phases(report)),
        (
            "steps" if report.step is None or report.step.window_slowdown is None else "window",
            _describe_steps(report),
        ),
        ("energy", describe_energy(report)),
        ("cost", describe_cost(report)),
    ]
    return [(label, parts) for label, parts in lines if parts]


def describe_status(report: Report) -> str:
    """Describe the status in two words. Logs and dumps show faults and snapshots show memory, not
    where the time goes."""
    if report.scope.step_source == SNAPSHOT.name:
        return "Memory problem found" if report.status == "bottlenecks" else "Memory snapshot"
    fault = report.status == "bottlenecks" and (report.flight or report.network)
    return "Problems found" if fault and report.scope.has_no_step_time else STATUS[report.status]


def status_class(report: Report) -> str:
    """Return the class of the status: ``critical`` if a finding says that the run failed."""
    stopped = any(risk.severity == "critical" for risk in report.risks)
    return "critical" if stopped else report.status


def _describe_trace(report: Report) -> list[str]:
    own_inputs = next((i for i in report.inputs if i.rank == report.scope.rank), None)
    if own_inputs is None:
        return []
    name = (
        "standard input"
        if own_inputs.path == "-"
        else PurePath(own_inputs.path).name or own_inputs.path
    )
    if (kind := AUXILIARY_INPUTS_BY_NAME.get(report.scope.step_source)) is not None:
        kernel_count = len(report.kernel_counters) + len(
            report.triton_kernels
        )  # of all files given
        count = t.count_noun(kernel_count or own_inputs.events_read, kind.counted)
        description = kind.description
        if any(view.source == "timeline" for view in report.memory):
            description = "a memory timeline, {count}"
        parts = [t.shorten_path(name, 60), *description.format(count=count).split(", ")]
    elif report.scope.step_source == "record":
        parts = [t.shorten_path(name, 60), "no profiled window"]
    else:
        parts = [t.shorten_path(name, 60), t.count_noun(own_inputs.events_read, "event")]
    if own_inputs.truncated:
        parts.append("cut off")
    if own_inputs.windows > 1:
        parts.append(f"window {own_inputs.window} (there are {own_inputs.windows}: --window)")
    if len(report.inputs) > 1:
        which = "no rank known" if own_inputs.rank is None else f"rank {own_inputs.rank}"
        parts += [f"{which} of {len(report.inputs)}", *_name_other_ranks(report)]
    elif own_inputs.rank is not None and name != f"rank{own_inputs.rank}":
        parts.append(f"rank {own_inputs.rank}")
    return parts


def _name_other_ranks(report: Report) -> list[str]:
    """Name the rank that the others wait for, and the longest one if not shown."""
    lines = [] if report.ranks is None else report.ranks.lines
    if not lines:
        return []
    result, scope = [], report.scope
    late = max(lines, key=lambda line: line.caused_wait_ns or 0.0)
    if (late.caused_wait_ns or 0.0) > EQUAL_STEP_SHARE * scope.step_ns:
        late_rank = "it" if late.rank == scope.rank else f"rank {late.rank} (--rank {late.rank})"
        result.append(f"{late_rank} keeps the other{'s' * (len(lines) > 2)} waiting")
    longest = max(lines, key=lambda line: line.step_ns)
    if longest.step_ns > (1 + EQUAL_STEP_SHARE) * scope.step_ns:
        result.append(
            f"longest {report.per}: rank {longest.rank}, {t.format_duration(longest.step_ns)}"
        )
    return result


def _describe_device(report: Report) -> list[str]:
    scope = report.scope
    if scope.device is None:
        return []
    name = "model not recorded" if scope.device_name is None else labels.clean(scope.device_name)
    parts = [f"GPU {scope.device}: {labels.shorten(name, 50)}"]
    if scope.devices_seen > 1:
        parts.append(f"of {scope.devices_seen} in the trace, the one with most work")
    parts += [scope.device_shared] * bool(scope.device_shared)
    return parts


def _describe_steps(report: Report) -> list[str]:
    scope = report.scope
    if scope.has_no_step_time:
        return []
    if scope.per == "recording":
        span, recorded = scope.span_ns, scope.recorded_ns
        if recorded is None:
            return [f"none marked: the whole recording, {t.format_duration(span)}"]
        analyzed = (
            f"none marked: {t.format_duration(span)} from the first to the last kernel or copy"
        )
        whole_recording = f"{t.format_duration(recorded)} recorded"
        return (
            [analyzed]
            if recorded - span < MIN_OUTSIDE_SHARE * recorded
            else [analyzed, whole_recording]
        )
    if scope.step_source == LAYER_TIMES:
        return [f"one inference of {t.format_duration(scope.span_ns)}, the sum of its layers"]
    source = "recorded" if scope.step_source == "record" else labels.clean(scope.step_source)
    step = "step" if scope.steps_found == 1 else "steps"
    runs = "run" if scope.steps_found == 1 else "runs"
    source = {
        "optimizer": f"optimizer {step}",
        "engine": f"engine {step}",
        "program": f"{runs} of the program",
    }.get(source, source)
    if scope.per == "repetition":
        source = "repetitions, which may be parts of a step: none is marked"
    used = f"{scope.steps_used} of {scope.steps_found}"
    mean = f"{t.format_duration(scope.step_ns)} {t.format_per(scope.per)}"
    if scope.steps_used == 1:
        parts = [f"{used} {source}", mean, *compare_window_with_run(report)]
    else:
        shortest, longest = (t.format_duration(ns) for ns in (scope.step_min_ns, scope.step_max_ns))
        if shortest != longest:
            spread = t.format_range(scope.step_min_ns, scope.step_max_ns)
            mean = f"{mean} on average ({spread})"
        else:
            mean = f"each {report.per} takes {longest}"
        parts = [f"{used} {source}", mean, *compare_window_with_run(report)]
    if weakness := describe_weak_steps(report):
        parts.append(weakness)
    if report.replay is not None:
        parts += describe_replayed_others(report.replay.steps, report.replay.of_steps)
    if scope.outliers:
        shown = (labels.shorten(labels.clean(item), 30) for item in scope.outliers)
        parts.append(f"outliers set aside: {t.list_names(shown, 4)}")
    if scope.queue_delay_ns > scope.step_ns:
        steps_ahead = t.count_noun(round(scope.queue_delay_ns / scope.step_ns), report.per)
        ahead = f"the host runs {t.format_duration(scope.queue_delay_ns)} ({steps_ahead}) ahead"
        parts.append(f"{ahead}: the GPU's work sets the step time")
    return parts


def describe_replayed_others(replayed: int, measured: int) -> list[str]:
    """Say that the gains are those of more steps than the measured ones, which are too few to
    replay alone. Empty if they are enough."""
    if replayed <= measured:
        return []
    few = "1 is" if measured == 1 else f"{measured} are"
    return [f"gains are those of {replayed} steps in a row, because {few} too few to replay"]


MIN_OUTSIDE_SHARE = 0.01
"""Minimum share of a run's time at which the time between its steps is shown."""
MIN_PAUSES_SHARE = 0.05
"""Minimum share of long pauses in a run's time at which its line shows them."""
MIN_SAME_CAUSE_SHARE = 0.5
"""Minimum share of an excess that a cause must explain to be named. The window's steps may exceed
the run's because nearby unprofiled steps do too, and the mean the median because of slow steps."""
MAX_NAMED_STEPS = 3
"""Maximum number of slow steps that are named by their numbers."""
MIN_SLOW_STEP_RATIO = 2.0
"""Minimum ratio of a step to the median at which it is called slow."""


def compare_window_with_run(report: Report) -> list[str]:
    """Say how the profiled steps compare with the run's own, and why they differ."""
    step = report.step
    if step is None or step.window_excess is None:
        return []
    if not step.window_differs and not step.atypical:
        return ["as long as the run's steps"]
    longer = f"{format_longer(step.window_excess)} the run's {step.statistic} step"
    nearby = step.nearby_ns or step.reference_ns
    around, nearby_difference = t.format_duration(nearby), nearby / step.reference_ns - 1
    if step.profiler_overhead is not None and step.profiler_overhead >= EQUAL_STEP_SHARE:
        parts = [_describe_overhead(step, step.profiler_overhead)]
    elif step.nearby_ns is None or (report.scope.steps_used == 1 and not step.atypical):
        parts = [longer]
    elif step.atypical or nearby_difference / step.window_excess >= MIN_SAME_CAUSE_SHARE:
        parts = [f"the steps around them take {around} without the profiler"]
    else:
        parts = [f"{longer}; steps vary too much to tell the profiler's cost"]
    if step.in_warm_up:
        parts.append("these are first steps, before the run's time is measured")
    if step.atypical and step.nearby_ns is not None:
        share = t.format_share(step.share_beyond) if step.share_beyond else "none"
        kind = "long" if step.nearby_ns > step.ns else "short"
        parts.append(f"{share} of the run's steps are as {kind}")
    return ["; ".join(parts)]


MAX_OVERHEAD_DIFFERENCE: Final = 0.02
"""Maximum relative difference between the ratio of the mean profiled step to the steps around it
and the ratio of the medians, at which the mean, which the report shows, gives the overhead."""


def _describe_overhead(step: StepTime, overhead: float) -> str:
    """Say what the profiler adds, as a share that follows from the times in the text. A long
    profiled step lengthens their mean, so both medians are shown in that case."""
    nearby = step.nearby_ns or step.reference_ns
    is_usual = not step.atypical and abs(nearby / step.reference_ns - 1) < EQUAL_STEP_SHARE
    of_mean = (step.window_ns or nearby) / (step.reference_ns if is_usual else nearby) - 1
    around = t.format_duration(nearby)
    if abs((1 + of_mean) / (1 + overhead) - 1) > MAX_OVERHEAD_DIFFERENCE:
        profiled = t.format_duration((1 + overhead) * nearby)
        return (
            f"the profiler adds {t.format_share(overhead)}: the median profiled step takes "
            f"{profiled}, the median step around them {around}"
        )
    base = f"run's {step.statistic} step" if is_usual else f"{around} of the steps around them"
    return f"the profiler adds {t.format_share(of_mean)} to the {base}"


def format_longer(share: float) -> str:
    """Format a relative difference of times: ``12% longer than``, ``2.5 times as long as``."""
    if share >= 1:
        return f"{1 + share:.1f} times as long as"
    return f"{abs(share):.0%} {'longer' if share >= 0 else 'shorter'} than"


def time_heading(report: Report) -> tuple[str, str]:
    """Return the title of the step's bar, and the step that its figures add up to. The second is
    empty if the report leads with that step."""
    where = "on the GPU" if report.time else "on the host's main thread"
    step = report.step
    is_other_step = step is not None and step.window_is_unrepresentative
    title = f"Where {'a profiled' if is_other_step else 'the'} {report.per}'s time goes {where}"
    if any(shown_input.truncated for shown_input in report.inputs):
        return title, "of what is left of the file"
    if step is None:
        return title, ""
    if step.window_differs:
        window = t.format_duration(step.window_ns)
        return title, window if is_other_step else f"profiled {report.per}, {window}"
    if step.window_ns is None and abs(step.mean_ns / step.ns - 1) >= EQUAL_STEP_SHARE:
        return title, f"mean step, {t.format_duration(step.mean_ns)}"
    return title, ""


def describe_recorded_steps(report: Report) -> list[str]:
    """Describe what the recorder measured of every step, profiled or not."""
    view = report.recorded
    if view is None:
        return []
    noun = f"{'inference ' * view.inference}step"
    parts = [t.count_noun(view.steps, noun) if view.steps else "no step was seen"]
    times = {"median": view.median_ns, "mean": view.mean_ns}
    if report.step is not None and report.step.varies:
        times = dict(reversed(times.items()))
    first, other = ((name, ns) for name, ns in times.items())
    if first[1]:
        parts.append(f"{first[0]} {t.format_duration(first[1])} without the profiler")
        if other[1] and abs(other[1] / first[1] - 1) > EQUAL_STEP_SHARE:
            parts.append(f"{other[0]} {t.format_duration(other[1])}")
    repeated = list_repeated_parts(report)
    parts += [] if repeated else _describe_slow_steps(report)
    if view.p99_ns is not None:
        parts.append(f"99th percentile {t.format_duration(view.p99_ns)}")
    if view.outside_ns and (view.outside_share or 0.0) >= MIN_PAUSES_SHARE:
        parts.append(
            f"long pauses between steps: {t.format_duration(view.outside_ns)} in all "
            f"({t.format_share(view.outside_share)} of the time after the first step)"
        )
    if view.ended is None:
        parts.append("the run was killed, or is still running")
    elif view.ended == "disk":
        parts.append("the disk was full: later steps are not recorded")
    elif view.ended != "finished":
        parts.append(f"ended by {labels.clean(view.ended)}")
    if view.samples_per_second is not None:
        parts.append(f"{view.samples_per_second:,.0f}{SAMPLE_RATE}")
    return [*parts, *repeated]  # last, as a full page leaves them out


OTHER_LOAD: Final = "other load on the CPUs"
SAMPLE_RATE: Final = " samples/s"
"""Unit of a part of a run's line."""


class SlowSteps(NamedTuple):
    """Slow steps that make the run's mean step longer than its median."""

    numbers: list[int]
    """Numbers of the slow steps."""
    timed: int
    """Number of timed steps, slow or not."""
    share: float
    """Share of the slow steps in the time of all timed ones, 0 to 1."""

    @property
    def sentence_start(self) -> str:
        """Count with the verb: ``6 of 19 timed steps exceed twice the median``."""
        verb = "exceeds" if len(self.numbers) == 1 else "exceed"
        timed = t.count_noun(self.timed, "timed step")
        return f"{len(self.numbers)} of {timed} {verb} twice the median"


def find_slow_steps(report: Report) -> SlowSteps | None:
    """Return the slow steps of the run, or ``None`` if they do not make its mean step longer."""
    step, runs = report.step, [each for each in report.step_durations if each.source == "recorder"]
    if step is None or not step.varies or step.mean_ns <= step.ns or len(runs) != 1:
        return None
    durations = runs[0].durations_ns
    numbers = (n for first, last in runs[0].numbers for n in range(first, last + 1))
    slow = [
        (number, ns)
        for number, ns in zip(numbers, durations, strict=True)
        if ns >= MIN_SLOW_STEP_RATIO * step.ns
    ]
    slow_ns = sum(ns for _, ns in slow)
    excess = slow_ns - len(slow) * step.ns
    if excess < MIN_SAME_CAUSE_SHARE * (sum(durations) - len(durations) * step.ns):
        return None
    return SlowSteps([number for number, _ in slow], len(durations), slow_ns / sum(durations))


def _describe_slow_steps(report: Report) -> list[str]:
    """Say how many slow steps make the mean longer than the median. Empty if they do not."""
    slow = find_slow_steps(report)
    if slow is None:
        return []
    names = ", ".join(map(str, slow.numbers))
    steps = "step" if len(slow.numbers) == 1 else "steps"
    which = f" ({steps} {names})" if len(slow.numbers) <= MAX_NAMED_STEPS else ""
    slow_text = f"{slow.sentence_start}{which}: {t.format_share(slow.share)} of the time"
    load = other_load(report)
    return [slow_text, load] if load else [slow_text]


def list_repeated_parts(report: Report) -> list[str]:
    """Return the parts of a run's line that the verdict says too."""
    slow = find_slow_steps(report)
    return _describe_slow_steps(report) if slow and slow.sentence_start in report.verdict else []


def other_load(report: Report) -> str:
    """Say how much of the CPUs other programs used in slow steps. Empty if little or unknown."""
    skipped = (check for check in report.not_checked if check.missing == OTHER_LOAD)
    return next((check.why for check in skipped), "")


def describe_phases(report: Report) -> list[str]:
    """Describe the recorded share of the host's time in each phase of the step."""
    view = report.recorded
    if view is None or report.scope.step_source == "record":
        return []
    shown = [
        f"{t.host_label(phase.name, report.scope.framework)} {t.format_share(phase.share)}"
        for phase in view.phases[:MAX_LISTED_NAMES]
        if phase.name != "between steps" or (view.outside_share or 0.0) < MIN_OUTSIDE_SHARE
    ]
    return [f"{shown[0]} of the host's time", *shown[1:]] if shown else []


def quotes_phase(report: Report) -> bool:
    """Return whether the verdict gives the share of a phase of the run's steps."""
    phases = () if report.recorded is None else report.recorded.phases
    figures = ((t.host_label(p.name), t.format_share(p.share)) for p in phases)
    verdict = report.verdict.lower()
    return any(
        f"{name}{separator}{share}" in verdict
        for name, share in figures
        for separator in (": ", " ", " takes ")
    )


def quotes_operator(report: Report) -> bool:
    """Return whether the verdict gives the share of an operator in all operators' time."""
    return "of operators' time" in report.verdict


def headline_numbers(report: Report) -> list[Line]:
    """Return the lines of figures next to the bar of the step."""
    lines: list[Line] = []
    if report.time:
        is_other_step = report.step is not None and report.step.window_is_unrepresentative
        profiled = t.format_share(report.busy_share)
        busy = [f"busy {profiled}{' while profiled' * is_other_step}"]
        if is_other_step and report.step is not None and report.step.busy_share is not None:
            own_busy = t.format_share(report.step.busy_share)
            busy = [f"busy {own_busy}" + f" ({profiled} while profiled)" * (own_busy != profiled)]
        if report.communication_ns is not None:
            hidden = t.format_share(report.communication_overlap)
            busy.append(
                f"communication {t.format_duration(report.communication_ns)}, {hidden} hidden"
            )
        of_format = f" of the {report.mfu_format} peak" if report.mfu_format else ""
        mfu, of_window = _scale_mfu(report)
        busy += [f"MFU {t.format_share(mfu)}{of_format}{' while profiled' * of_window}"]
        busy += [f"memory peak {memory_peak(report)}"]
        lines.append(("GPU", busy))
    if report.operators:
        items = report.operators[:MAX_LISTED_NAMES]
        short_names = labels.labels_by_name((op.name for op in items), 40)
        parts = [f"{short_names[op.name]} {t.format_share(op.share)}" for op in items]
        lines.append(("ops", [f"{parts[0]} of operators' time", *parts[1:]]))
    if report.ranges:
        items = report.ranges[:MAX_LISTED_NAMES]
        short_names = labels.labels_by_name((item.name for item in items), 40)
        lines.append(
            ("ranges", [f"{short_names[item.name]} {t.format_share(item.share)}" for item in items])
        )
    if report.families:
        lines.append(("work", _describe_families(report)))
    lines.append(("idle", describe_time_outside_operators(report)))
    if report.replay is not None and report.time:
        critical = report.replay.critical
        path = path_parts(critical, report.scope.framework)
        unknown = sum(part.share for part in report.idle if part.cause in ("unknown", "end"))
        idle = sum(part.share for part in report.idle)
        host_share = critical.get("host", 0.0) / (sum(critical.values()) or 1.0)
        if unknown >= MIN_UNKNOWN_IDLE_SHARE * idle and host_share >= MIN_HOST_PATH_SHARE:
            path = []  # the host's work in this time is not recorded
        busy_share = report.busy_share
        if report.replay.unprofiled and report.step is not None:
            busy_share = report.step.busy_share or busy_share
        if path and _has_hidden_work(critical, busy_share):
            works = f"the GPU works in {t.format_share(busy_share)} of the {report.per}"
            path[[*critical].index("host")] += f" ({works})"
            if (busy_share or 0.0) >= MIN_HIDING_BUSY_SHARE:
                most = t.format_share(1 - (busy_share or 0.0))
                path.append(f"a faster host saves at most {most}")
        named = "critical path" + " without the profiler" * report.replay.unprofiled
        lines.append(("path", [f"{named}: {path[0]}", *path[1:]] if path else []))
    if report.host and report.time:
        host_parts = [
            f"{t.host_label(part.name, report.scope.framework)} {t.format_share(part.share)}"
            for part in report.host
        ]
        of_step = t.format_of(report.per)
        if report.host_step_ns is not None:
            of_step = f"of its own steps of {t.format_duration(report.host_step_ns)}"
        host_parts[0] += f" {of_step}"
        lines.append(("host", host_parts[:MAX_LISTED_NAMES]))
    lines.append(("no fix", describe_time_without_fix(report)))
    return lines


MIN_OUTSIDE_OPERATORS = 0.1
"""Minimum share of the step at which idle time outside operators is described."""
MIN_NEXT_SHARE = 0.1
"""Minimum share of idle time outside operators at which the operator after it is named."""


def describe_time_outside_operators(report: Report) -> list[str]:
    """Describe the gaps in which the host is outside operators, and which operators end them."""
    for part in report.idle:
        if part.gaps is None or part.share < MIN_OUTSIDE_OPERATORS:
            continue
        count = t.count_noun(round(part.gaps), "gap") if part.gaps >= 0.5 else "less than one gap"
        mean = f"{t.format_duration(part.ns / part.gaps)} on average"
        operators = [each for each in part.next_operators if each.share >= MIN_NEXT_SHARE]
        next_operators = [
            f"{t.format_share(each.share)} before {labels.clean(each.name)}" for each in operators
        ]
        next_operators[:1] = [each.replace(" ", " of it ", 1) for each in next_operators[:1]]
        return [f"outside operators: {count} {t.format_per(report.per)}, {mean}", *next_operators]
    return []


def describe_time_without_fix(report: Report) -> list[str]:
    """Describe the parts of the time that no finding covers, with the reason. Parts that the
    verdict names are left out."""
    named_in_verdict = "unknown" if "The trace does not show why" in report.verdict else ""
    return [
        f"{', '.join(part.labels)} {t.format_duration(part.ns)} ({t.format_share(part.share)}): "
        f"{labels.clean(part.why)}"
        for part in report.without_fix
        if not any(
            name == named_in_verdict or f"{name} (" in report.verdict for name in part.labels
        )
    ]


def _scale_mfu(report: Report) -> tuple[float | None, bool]:
    """Return the MFU of the run's step: the profiled step's FLOPs over the run's step time. If the
    run's steps vary, maybe in their FLOPs too, return the profiled step's MFU and true."""
    step = report.step
    if report.mfu is None or step is None or step.window_ns is None or not step.window_differs:
        return report.mfu, False
    if step.varies:
        return report.mfu, True
    return report.mfu * step.window_ns / step.reference_ns, False


def figures_of_merit(report: Report) -> list[tuple[str, str, str]]:
    """Return the figures at the top of a page: name, value, and a note. For a program without GPU
    work, return those of the host."""
    scope, unit = report.scope, report.per
    spread_note = ""
    if scope.steps_used > 1:
        over = t.count_noun(scope.steps_used, "step")
        spread_note = f"{t.format_range(scope.step_min_ns, scope.step_max_ns)} over {over}"
    elif unit == "step":
        spread_note = "one step measured"
    of_step = t.format_of(unit)
    if (step := report.step) is not None:
        spread_note = f"{step.statistic} of the run, outside the profiler"
        if step.window_differs:
            of_step = f"of the profiled {unit}"
    unprofiled_busy_share = (
        None if step is None or not step.window_is_unrepresentative else step.busy_share
    )
    if unprofiled_busy_share is not None:
        of_step = f"of the run's {unit}; {t.format_share(report.busy_share)} while profiled"
    tiles = [(unit.capitalize(), t.format_duration(report.step_ns), spread_note)]
    if not report.time:
        return [*tiles, *_host_figures(report)]
    busy = "" if report.busy_share is None else of_step
    tiles.append(("GPU busy", t.format_share(unprofiled_busy_share or report.busy_share), busy))
    peak_name = f"{report.mfu_format} peak" if report.mfu_format else "peak of the formats used"
    mfu, of_window = _scale_mfu(report)
    note = f"of the {peak_name}{', while profiled' * of_window}" if mfu else ""
    tiles.append(("MFU", t.format_share(mfu), note))
    capacity, peak = report.memory_capacity_bytes, report.memory_peak_bytes
    note = f"reserved, of {t.format_bytes(capacity)}" if capacity is not None else "reserved"
    if peak is None:
        peak, note = held_at_peak(report), "in tensors"
    tiles.append(("Memory peak", t.format_bytes(peak), note if peak is not None else ""))
    if report.communication_ns is not None:
        hidden = f"{t.format_share(report.communication_overlap)} hidden under compute"
        tiles.append(("Communication", t.format_duration(report.communication_ns), hidden))
    return tiles


def _host_figures(report: Report) -> list[tuple[str, str, str]]:
    """Return the figures of a program without GPU work, as ``figures_of_merit`` does."""
    tiles, recorded = [], report.recorded
    part = max(report.host, key=lambda part: part.ns, default=None)
    if part is not None and not report.ranges:
        label = t.upper_first(t.host_label(part.name, report.scope.framework))
        share = f"{t.format_share(part.share)} {t.format_of(report.per)}"
        tiles.append((label, t.format_duration(part.ns), share))
    if recorded is not None and recorded.p99_ns is not None:
        timed = f"of {t.count_noun(recorded.used, f'timed {report.per}')}"
        tiles.append(("99th percentile", t.format_duration(recorded.p99_ns), timed))
    if recorded is not None and recorded.samples_per_second is not None:
        rate = f"{recorded.samples_per_second:,.0f}/s"
        tiles.append(("Throughput", rate, "samples, this rank"))
    return tiles


def describe_energy(report: Report) -> list[str]:
    """Describe the energy per step and how it was measured. Empty if it was not measured."""
    energy = report.energy
    if energy is None:
        return []
    ranks = energy.ranks
    methods = {"counter": "the driver's counter", "power": "sampled power"}
    method = t.list_names(methods[name] for name in dict.fromkeys(item.method for item in ranks))
    if energy.joules is None or energy.watts is None:
        shown = ", ".join(
            f"rank {item.rank} {t.format_value(item.joules, 'J')}" for item in ranks[:4]
        )
        return [f"{shown} {t.format_per(report.per)}", "not measured on all ranks", method]
    parts = [
        f"{t.format_value(energy.joules, 'J')} {t.format_per(report.per)}",
        t.format_value(energy.watts, "W"),
    ]
    if len(ranks) > 1:
        low, high = min(item.joules for item in ranks), max(item.joules for item in ranks)
        if t.format_value(low, "J") != t.format_value(high, "J"):
            parts.append(f"{t.format_value(low, 'J')} to {t.format_value(high, 'J')} per rank")
    measured_ns = energy.joules / max(energy.watts, 1e-9) * 1e9 * len(ranks)
    if len(ranks) == 1 and abs(measured_ns / report.step_ns - 1) >= MIN_ENERGY_DIFFERENCE:
        steps = t.count_noun(ranks[0].steps, report.per)
        mean = t.format_duration(energy.joules / energy.watts * 1e9)
        parts.append(f"measured in {steps} of {mean} on average")
    return [*parts, method]


MIN_ENERGY_DIFFERENCE: Final = 0.02
"""Minimum relative difference between the steps whose energy is measured and the report's step, at
which the report says which steps were measured."""
COSTED_STEPS = 1000
"""Number of steps whose cost is shown, as the cost of a single step has many zeros."""


def describe_cost(report: Report) -> list[str]:
    """Describe the cost of the steps, now and with the fixes. Empty without a price."""
    cost = report.cost
    if cost is None:
        return []
    is_recording = report.per == "recording"
    steps = 1 if is_recording else COSTED_STEPS
    unit = "the recording" if is_recording else f"{COSTED_STEPS:,} {report.per}s"
    parts = [f"{format_money(cost.step * steps, cost.currency)} for {unit}"]
    if cost.step_after is not None:
        bound = "at least " if cost.bound else ""
        parts.append(
            f"{bound}{format_money(cost.step_after * steps, cost.currency)} with the fixes"
        )
    if cost.run is not None:
        parts.append(f"{format_money(cost.run, cost.currency)} this run")
    gpus = "" if cost.gpus == 1 else f"{cost.gpus} × "
    return [*parts, f"at {gpus}{format_money(cost.per_hour, cost.currency)} per hour"]


def _describe_families(report: Report) -> list[str]:
    """Describe the share of each kind of device work, and count the kernels and copies."""
    parts = sorted(report.families, key=lambda family: -family.ns)
    names = [f"{labels.clean(f.name)} {t.format_share(f.share)}" for f in parts[:MAX_LISTED_NAMES]]
    if names:
        names[0] += " of device work"
    total = round(sum(family.count for family in report.families))
    work = t.count_noun(total, "kernel or copy", "kernels and copies")
    return [*names, f"{work} {t.format_per(report.per)}"]


MIN_UNKNOWN_IDLE_SHARE, MIN_HOST_PATH_SHARE = 0.5, 0.1
"""Minimum share of unknown causes in the idle time, and of the host in the critical path, at which
this path is not shown: most of the host's part is not recorded."""
MIN_OVERLAP_TOTAL: Final = 1.05
"""Minimum sum of the host's share of the critical path and the device's busy share at which the
report says that they overlap. The two do not add up to one whole."""


MIN_HIDING_BUSY_SHARE: Final = 0.8
"""Minimum busy share at which a host that makes up the critical path limits the step little."""


def _has_hidden_work(critical: Mapping[str, float], busy: float | None) -> bool:
    """Return whether the device works while the step depends on the host, so that the shares of
    both add up to more than the whole step."""
    total = sum(critical.values()) or 1.0
    return busy is not None and busy + critical.get("host", 0.0) / total >= MIN_OVERLAP_TOTAL


def path_parts(critical: Mapping[str, float], framework: str | None) -> list[str]:
    """List the parts of a step's critical path, such as ``68% on the host``, ``4% on GPU compute``.
    Parts below 1% are left out."""
    total = sum(critical.values()) or 1.0
    return [
        f"{t.format_share(ns / total)} on {t.path_label(name, framework)}"
        for name, ns in critical.items()
        if ns >= 0.01 * total
    ]


def held_at_peak(report: Report) -> int | None:
    """Return the analysed device's peak of bytes in tensors, or ``None`` if it is unknown."""
    of_device = (view for view in report.memory if view.device == report.scope.device)
    return next((view.allocated for view in of_device), None)


def memory_peak(report: Report) -> str:
    """Format the peak of reserved memory, or of memory in tensors if only that is recorded."""
    peak, capacity = report.memory_peak_bytes, report.memory_capacity_bytes
    if peak is None and (amount := held_at_peak(report)) is not None:
        return f"{t.format_bytes(amount)} in tensors"
    if peak is None or capacity is None:
        return t.format_bytes(peak)
    return f"{t.format_bytes(peak)} of {t.format_bytes(capacity)}"


def describe_skipped_checks(report: Report) -> list[tuple[str, str]]:
    """List the skipped checks: what was not checked, and why, with what to record."""
    result = []
    for item in report.not_checked:
        why = labels.clean(item.why).rstrip(".")
        record = f". {ask_to_record(labels.clean(item.record))}" if item.record else ""
        result.append((labels.clean(item.what), f"{why}{record}."))
    return result


def has_upper_bound(report: Report) -> bool:
    """Return whether some gain is an upper bound, not a replayed gain."""
    return any(
        finding.impact is not None and t.is_upper_bound(finding.impact)
        for finding in report.findings
    )


def step_after_fixes(report: Report) -> float:
    """Return the step time, ns, after every ranked fix."""
    saved = sum(max(0, f.marginal_gain_ns or 0) for f in ranked_findings(report))
    return max(0.0, report.step_ns - saved)


MIN_UNCERTAIN_SHARE = 0.5
"""Minimum share of gains that may be nothing at which their sum is an upper bound."""


def format_speedup(report: Report) -> str:
    """Format how much faster the step gets with every ranked fix: ``1.53× faster``. Empty if the
    fixes do not shorten it, if only a part of a step is recorded, or if one is code that nobody has
    seen."""
    before, after = report.step_ns, step_after_fixes(report)
    ratio = before / after if after > 0 else 1.0
    if ratio - 1 < SMALL_SHARE or t.format_duration(before) == t.format_duration(after):
        return ""
    gains = gains_of_findings(report)
    if all(impact.share is None for impact in gains):
        return ""
    if any(map(is_unseen_code, ranked_findings(report))):
        return ""
    total = sum(impact.gain_ns or 0 for impact in gains)
    uncertain = sum(
        f.impact.gain_ns or 0
        for f in ranked_findings(report)
        if f.impact is not None and (f.impact.low_ns == 0 or is_conditional(f, report))
    )
    bound = "up to " * any(map(t.is_upper_bound, gains))
    may_be_less = uncertain > 0 and uncertain >= MIN_UNCERTAIN_SHARE * total
    if may_be_less and not bound:
        bound = "perhaps "
    return f"{bound}{t.format_speedup(ratio)}"


MIN_LESS_BUSY = 0.01
"""Minimum decrease of the GPU-busy share by all fixes that needs a reason."""


def describe_all_fixes(report: Report) -> str:
    """Say how long the step takes with every ranked fix, and how busy the device is then. Empty if
    the fixes do not shorten it."""
    if not (speedup := format_speedup(report)):
        return ""
    findings = ranked_findings(report)
    before, after = report.step_ns, step_after_fixes(report)
    fixes = "With all fixes" if len(findings) > 1 else "With this fix"
    if len(findings) == 1 and findings[0].subject == HOST_CODE and has_upper_bound(report):
        fixes = "Without this code"
    if len(findings) == 1 and is_unsure(findings[0]):
        sure = t.format_share(findings[0].confidence)
        fixes = f"If this is the cause, of which advisor is {sure} sure"
    busy = None if report.replay is None else report.replay.busy_after_ns
    of_other_step = report.step is not None and report.step.window_differs
    busy_after = ""
    if busy is not None and report.time and not of_other_step and speedup[0].isdigit():
        busy_after = f", GPU busy {t.format_share(min(1.0, busy / after))}"
        if busy / after < (report.busy_share or 0.0) - MIN_LESS_BUSY:
            busy_after += " (waits stay)"
    certain = _describe_certain_fix(report) if speedup.startswith("perhaps") else ""
    return (
        f"{fixes}: {t.format_duration(before)} → {t.format_duration(after)} "
        f"({speedup}{certain}){busy_after}."
        + "".join(
            f" Fix {f.priority} saves {t.format_duration(f.impact.gain_ns)} over the run, "
            "outside these steps."
            for f in findings
            if f.impact is not None and f.impact.unit == "run" and f.impact.gain_ns
        )
        + _explain_larger_total(report)
    )


def _describe_certain_fix(report: Report) -> str:
    """Give the step with the certain one of two fixes. Empty unless one of two may gain nothing."""
    fixes = fixes_of_step(report)
    certain = [f for f in fixes if f.impact is not None and f.impact.low_ns]
    if len(fixes) != 2 or len(certain) != 1 or certain[0].after_fix or not gain_of(certain[0]):
        return ""
    left = t.format_duration(report.step_ns - gain_of(certain[0]))
    return f"; with fix {certain[0].priority} alone {left}"


def _explain_larger_total(report: Report) -> str:
    """Name the fix that saves more after the others, if all save more than the sum of their gains.
    Empty if they do not."""
    fixes = [
        (f.marginal_gain_ns - (f.impact.gain_ns or 0), f)
        for f in ranked_findings(report)
        if f.impact is not None and f.impact.unit != "run" and f.marginal_gain_ns is not None
    ]
    if sum(more for more, _ in fixes) < MIN_LARGER_TOTAL * report.step_ns:
        return ""
    largest = max(fixes, key=lambda fix: fix[0])[1]
    saved = t.format_duration(largest.marginal_gain_ns)
    why = "" if report.scope.device is None else explain_larger_gain_after(largest, report)
    return f" Fix {largest.priority} then saves {saved}{why}."


MIN_LARGER_TOTAL = 0.005
"""Minimum excess of the total gain over the sum of the gains, as a share of the step, that needs a
reason."""


def gains_overlap(report: Report) -> bool:
    """Return whether the listed gains are out of order, or do not add up."""
    gains = [impact.gain_ns or 0 for impact in gains_of_findings(report) if impact.unit != "run"]
    total = report.step_ns - step_after_fixes(report)
    return len(gains) > 1 and not (gains_fall(report) and abs(sum(gains) - total) < 0.01 * total)


def gains_fall(report: Report) -> bool:
    """Return whether no listed fix gains more than one before it."""
    gains = [impact.gain_ns or 0 for impact in gains_of_findings(report) if impact.unit != "run"]
    return all(after <= before for before, after in itertools.pairwise(gains))


def describe_chosen_fixes(fix_sequence: FixSequence) -> str:
    """Say how long the step takes with the chosen fixes."""
    step, left = fix_sequence.measured.left_ns, fix_sequence.fixes[-1].left_ns
    if left >= step:
        return f"Without a fix: {t.format_duration(step)}."
    speedup = t.format_speedup(step / left) if left else ""
    after = f"{t.format_duration(step)} → {fix_sequence.bound_prefix}{t.format_duration(left)}"
    return f"With the ticked fixes: {after} ({speedup})."


def _describe_reproduced_waits(replay: Replay) -> str:
    """Say how much of the GPU's idle time, and of waits for it, the replay reproduces."""
    parts = [
        f"{t.format_share(share)} of the time that {wait}"
        for share, total_share, wait in (
            (replay.waits_explained, replay.waits, "the host waits for the GPU"),
            (replay.idle_explained, replay.idle, "the GPU idles"),
        )
        if share is not None and total_share >= 0.01
    ]
    return f" It reproduces {' and '.join(parts)}." * bool(parts)


def replay_error(replay: Replay) -> str:
    """Format the error of the replay without edits, as a share of the measured step."""
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
            replayed_starts = t.count_noun(replay.starts, "start of GPU work", "starts of GPU work")
            starts = (
                f" and predicts {t.format_share(replay.explained)} of {replayed_starts} within 5 µs"
            )
        result.append(
            "Gains are replayed: the dependency graph of "
            f"{steps} is run again with the fix in it. Without any fix it comes "
            f"within {error} of the measured {unit}{starts}.{_describe_reproduced_waits(replay)}"
        )
    step = report.step
    if report.findings and step is not None and step.window_differs:
        result.append(
            "Times measured in the profiled window are of a profiled step; "
            f"gains are of the run's {step.statistic} step."
        )
    if has_upper_bound(report):
        result.append(
            "'Up to' is the most that a fix can gain, such as the time in which only this cause "
            "keeps the GPU or the step waiting."
        )
    return result
