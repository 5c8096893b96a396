"""Limits of a recording: what it cannot show and what was left out, a sentence each."""

from typing import Any

import numpy as np
import polars as pl

from advisor.advise.memory import memory_limits
from advisor.advise.program_wording import (
    ACTIVITIES,
    OTHER_FRAMEWORKS,
    mark_steps,
    record_gpu_work,
    record_with,
    tool_of,
)
from advisor.core import labels
from advisor.core import text as t
from advisor.core.finding import GUESSED_STEP_SOURCES, LAYER_TIMES, Limit
from advisor.core.intervals import covered_length, intersect, union
from advisor.core.report_steps import StepVariationPart
from advisor.core.trace import ANOTHER_TRACE, DEVICE_STEPS, JAX, Run, Trace, TraceMeta
from advisor.measure import Analysis
from advisor.measure.device.families import MATRIX
from advisor.measure.host.names import name_matches
from advisor.measure.steps.step_differences import CAPTURE, LOADING, MAX_BUSY
from advisor.measure.steps.step_records import MIN_DEVICE_TIMED, StepRecords
from advisor.measure.steps.steps import recorded_extent
from advisor.measure.steps.unmarked_steps import range_groups

ONE_OFF_CALLS = ("other", "free", "malloc", "launch", "module_load")
"""Classes of runtime calls that wait for nothing in a steady step."""
MIN_START_UP_SHARE = 0.10
"""Share of the window from which one such call is start-up: loading modules or creating the
context. These take seconds each in public traces of a first iteration."""
UNEVEN_STEP_RATIO = 1.5
"""Ratio of longest to shortest step from which the mean stands for neither."""
MIN_ONE_OFF_SHARE = 0.02
"""Share of the analysed time from which costs of first calls are reported."""
MIN_LEFT_OUT_SHARE = 0.01
"""Share of a recording from which the time before the first or after the last GPU work is named."""
POSSIBLE_SHARE = 0.5
"""Share of the GPU's work launched in ranges that could be the step."""
MIN_UNSEEN_SHARE, MIN_UNSEEN_NS = 0.5, 1e9
"""Share of the run, and time, after the last step, from which the steps are not what it does."""
MIN_KERNELS_OF_STEP = 100
"""Number of kernels from which a step of a network without any matrix product is no whole one."""
_MATRIX_LAYERS = r"(?i)\beinsum|/(?:Batch)?MatMul(?:/|:|$)|/Conv[123]D(?:/|:|$)|self_attention/"
"""Names of XLA's and TensorFlow's operators that multiply matrices, or of the layers around."""
MAX_NAMED = 3
DONE = ": done"
"""End of the line of a window that was recorded."""
MIN_EVENTS = 100
"""Number of events below which a file holds less than a small network's step. Its forward pass,
backward pass and optimizer are some hundred operators, calls and kernels."""


def part_of_step(a: Analysis) -> str:
    """Say that no matrix product is recorded although layers of the program have them; empty if
    there is one, or nothing shows that there should be."""
    if a.trace.meta.framework not in OTHER_FRAMEWORKS or a.device_id is None:
        return ""
    families = a.kernels["family"].filter(pl.Series(a.in_window))
    if families.len() < MIN_KERNELS_OF_STEP or families.is_in(MATRIX).any():
        return ""
    if not name_matches(a.trace.cpu["name"], _MATRIX_LAYERS).any():
        return ""
    return (
        f"Only a part of a {a.per} is recorded: no matrix product ran, although the program has "
        "some."
    )


def list_limits(a: Analysis, run: Run) -> list[Limit]:
    """List what this trace cannot show and what was left out of it."""
    meta = a.trace.meta
    if a.record_only:
        own = [] if a.only_input else _record_limits(a)
        return [*own, *memory_limits(a), *_profile_limits(a), *map(Limit, run.problems)]
    result = []
    if meta.truncated:
        damage = f" ({meta.damage})" if meta.damage else ""
        kept = t.count_noun(meta.events_read, "event")
        result.append(Limit(f"The file is cut off{damage}: {kept} kept.", "cut off"))
    # a recording says whether its machine has a GPU: where there is none, nothing is missing
    on_host = a.record is not None and a.trains_on_host
    if a.trace.gpu.is_empty() and (not on_host or count_launches(a.trace)):
        result.append(Limit(_no_device_work(a.trace), "no GPU work"))
    result += _window_limits(a)
    if a.steps.source == LAYER_TIMES:
        result.append(
            Limit(
                "Layer times are means of many inferences, without starts: idle time, launches and "
                f"the host are not measured. {record_with(ACTIVITIES, meta)}",
                "no start times",
            )
        )
    elif a.trace.cpu.is_empty():
        result.append(
            Limit(
                "No host events in the trace: who launched what, why the device idles and which "
                f"line of code is responsible are unknown. {record_with(ACTIVITIES, meta)}",
                "no host events",
            )
        )
    elif not (a.trace.cpu["kind"] == "op").any():
        result.append(Limit(_no_operators(a.trace), "no operators"))
    if part := part_of_step(a):
        whole = record_whole_steps(meta)
        result.append(Limit(f"{part} Times and gains are of that part. {whole}", "part of a step"))
    result += _start_up(a)
    result += _unknown_step(a)
    shortest, longest = _extremes(a)
    if a.step_count > 1 and longest > UNEVEN_STEP_RATIO * max(1, shortest):
        result.append(
            Limit(
                f"The steps differ: {t.format_range(shortest, longest)}. Figures are means over "
                f"them. {longer_steps(a)}",
                "steps differ",
            )
        )
    for reason, count in meta.events_dropped.items():
        if reason == ANOTHER_TRACE:
            another = "Another trace follows in the same file: it is left out. Split the file."
            result.append(Limit(another, "a second trace"))
            continue
        result.append(Limit(f"{count:,} event{'' if count == 1 else 's'}: {reason}."))
    result += _unmarked_steps(a)
    if a.steps.source == "whole trace" or a.steps.source in GUESSED_STEP_SOURCES:
        result += _possible_steps(a.trace)
    result += memory_limits(a)
    result += _profile_limits(a)
    result += map(Limit, run.problems)
    return result


def _unmarked_steps(a: Analysis) -> list[Limit]:
    """Say what stands for steps where nothing marks them."""
    how = mark_steps(a.trace.meta.format, a.trace.meta.framework)
    if a.steps.source == "whole trace":
        return [
            Limit(
                f"Steps were not recorded: the figures are for {_unmarked(a)}. "
                f"{how[0].upper()}{how[1:]} for figures per step.",
                UNMARKED,
            )
        ]
    if a.steps.source in GUESSED_STEP_SOURCES:
        return [
            Limit(
                "Nothing marks the steps. A repetition is where the same work comes again; it may "
                f"be a part of an iteration, such as a layer.{_left_out(a)} "
                f"{how[0].upper()}{how[1:]}.",
                UNMARKED,
            )
        ]
    if a.steps.source == DEVICE_STEPS:
        return [
            Limit(
                "The program marks no steps. These are the ones that the profiler derived from the "
                f"GPU's work; work outside them is left out. {how[0].upper()}{how[1:]}.",
                UNMARKED,
            )
        ]
    return []


UNMARKED = "no marked steps"


def _profile_limits(a: Analysis) -> list[Limit]:
    """Say what was left out of the kernel profiles."""
    profiles = a.trace.meta.kernel_profiles
    if profiles is None or not profiles.dropped:
        return []
    parts = [f"{why} ({n:,})" if n > 1 else why for why, n in profiles.dropped.items()]
    return [Limit(f"Left out of the kernels of {profiles.tool}: {', '.join(parts)}.")]


def _possible_steps(trace: Trace) -> list[Limit]:
    """List ranges that repeat and hold much of the GPU's work: one of them may be the step."""
    groups = [g for g in range_groups(trace) if g.share >= POSSIBLE_SHARE]
    groups.sort(key=lambda g: (not g.is_step_range, -g.share, g.marks.height))
    named = [
        f"{labels.shorten(labels.clean(g.name), 50)!r} ({g.marks.height:,}×, "
        f"{t.format_duration(float(g.marks['dur'].mean()))}, "  # type: ignore[arg-type]
        f"{t.format_share(g.share)} of GPU work)"
        for g in groups[:MAX_NAMED]
    ]
    text = f"Ranges that could be the step (--steps NAME): {', '.join(named)}."
    return [Limit(text)] if named else []


def _unmarked(a: Analysis) -> str:
    """Say what figures without steps are of, and how much time is left out around it."""
    if a.device_id is None:
        return "the whole recording"
    outside = _outside(a)
    text = "the time from the first to the last GPU work"
    call, took = call_before(a)
    most = f" ({t.format_duration(took)} of it in {call})" * bool(call)
    return f"{text}; {outside} it are no idle time and left out{most}" if outside else text


def call_before(a: Analysis) -> tuple[str, int]:
    """Return the driver call that takes most of the recording before the first GPU work, and its
    time there, ns: it starts CUDA. Empty name: none takes half of what is left out there."""
    begin, start = int(a.spans.start.min()), recorded_extent(a.trace)[0]
    calls = a.trace.cpu.filter(pl.col("kind") == "runtime", pl.col("ts") < begin)
    took = pl.min_horizontal(pl.col("dur"), begin - pl.col("ts"))
    first = calls.select(pl.col("name").cast(pl.String), took=took).sort("took").tail(1)
    if first.is_empty() or first["took"][0] < MIN_CALL_SHARE * max(1, begin - start):
        return "", 0
    return labels.shorten(labels.clean(first["name"][0]), 50), int(first["took"][0])


MIN_CALL_SHARE = 0.5
"""Share of the time before the first GPU work from which a call is what takes it."""


def _left_out(a: Analysis) -> str:
    """Say how much of the recording is around repetitions; empty if that is little."""
    outside = _outside(a)
    return f" {outside[0].upper()}{outside[1:]} the repetitions are left out." if outside else ""


def _outside(a: Analysis) -> str:
    """Name the time of the recording before and after what is analysed; empty if it is little."""
    start, end = recorded_extent(a.trace)
    before, after = int(a.spans.start.min()) - start, end - int(a.spans.end.max())
    return t.list_names(
        f"{t.format_duration(ns)} {word}"
        for ns, word in ((before, "before"), (after, "after"))
        if ns > MIN_LEFT_OUT_SHARE * (end - start)
    )


def _no_operators(trace: Trace) -> str:
    calls = (trace.cpu["kind"] == "runtime").any()
    if tool_of(trace.meta) is None:
        return (
            "No operators in the trace, only runtime calls: kernels cannot be tied to the code "
            f"that launched them. {record_with(ACTIVITIES, trace.meta)}"
            if calls
            else "No operators in the trace: nothing ran between its start and its end, or the "
            "profiler was restarted before the file was written (schedule(..., repeat=1))."
        )
    if calls:
        return (
            "No operators in the trace: kernels are tied to the calls and ranges that launched "
            "them."
        )
    return f"No calls in the trace, only ranges. {record_with(ACTIVITIES, trace.meta)}"


LATER_STEPS = "skip_first=10, wait=1, warmup=3, active=5"
"""Arguments of the profiler's schedule that leave start-up out."""


def schedule_of(meta: TraceMeta, before: str, arguments: str, after: str = "") -> str:
    """Return PyTorch's profiler schedule, and the call that moves it on, within a text; empty if
    another tool recorded this."""
    schedule = f"schedule({arguments}) and prof.step() after each step"
    return "" if tool_of(meta) is not None else f"{before}{schedule}{after}"


def record_whole_steps(meta: TraceMeta) -> str:
    """Ask for whole steps, by the means of the tool that recorded this."""
    tool = tool_of(meta)
    how = (
        schedule_of(meta, ": ", "wait=1, warmup=3, active=5") if tool is None else f": {tool.step}"
    )
    return f"Record whole steps{how}."


def _no_device_work(trace: Trace) -> str:
    measured = "device time, transfers, kernels and idle gaps are not measured."
    if trace.meta.truncated:
        return f"No device work in what is left of the trace: {measured}"
    calls = count_launches(trace)
    if not calls:
        return f"No device work in the trace: {measured} {record_gpu_work(trace.meta)}"
    lost = f"No device work in the trace although the host launched some ({calls:,} calls): "
    if trace.counters.height:
        return (
            f"{lost}{measured} Probably hardware counters were recorded in place of their times, "
            "and make the host wait for each. Record without counters to get them."
        )
    return (
        f"{lost}the profiler lost the records of all of it, for calls are only recorded together "
        f"with what they launch. {measured[0].upper()}{measured[1:]} Record again, after a warm-up"
        f"{schedule_of(trace.meta, ' (', 'wait=1, warmup=1, active=3', ')')} and without another "
        "profiler on the same GPU."
    )


def _window_limits(a: Analysis) -> list[Limit]:
    """List limits that come from the recording and not from the steps."""
    result = []
    if is_too_small(a):
        result.append(
            Limit(
                f"The trace holds {count_events(a):,} operators, calls and kernels: too few to "
                f"tell how the program runs. {record_whole_steps(a.trace.meta)}",
                "too few events",
            )
        )
    result += _earlier(a)
    if a.steps.ahead_ns is not None and a.steps.host_ns is not None:
        result.append(
            Limit(
                "The host runs ahead: the first work of a step waits "
                f"{t.format_duration(a.steps.ahead_ns)} in the queue (median). So a step is the "
                "device's period, from the first work of a step to the first of the next; the "
                f"host's own marks are {t.format_duration(a.steps.host_ns)} apart."
            )
        )
    result += _behind(a)
    result += _one_off(a)
    if lost_replays(a):
        result.append(
            Limit(
                "Graph replays hold fewer kernels than others of the same graph or than its "
                "capture, or they pause where a graph cannot. Idle time and gains are unknown, and "
                "rules on idle time are skipped.",
                LOST,
            )
        )
    elif a.lost_records.reported and not a.trace.gpu.is_empty():
        share = a.lost_records.lost / max(a.lost_records.launches, 1)
        missing = (
            "GPU work may be missing anywhere: events are not written in the order of time"
            if a.lost_records.truncated
            else f"The profiler lost the records of {a.lost_records.lost:,} of "
            f"{a.lost_records.launches:,} launched kernels ({t.format_share(share)})"
        )
        again = (
            "Copy or record it again." if a.lost_records.truncated else "Record a shorter window."
        )
        result.append(
            Limit(
                f"{missing}: busy time is a lower bound, idle time is not known, no gain is "
                f"estimated, and rules on idle time are skipped. {again}",
                LOST,
            )
        )
    return result


LOST = "lost kernels"


def _earlier(a: Analysis) -> list[Limit]:
    rows = a.launched_before
    if not rows.any():
        return []
    gpu = a.trace.gpu
    parts = []
    for what, chosen in (
        ("kernel", rows & (gpu["kind"] == "kernel").to_numpy()),
        ("copy or memset", rows & (gpu["kind"] != "kernel").to_numpy()),
    ):
        count = int(np.count_nonzero(chosen))
        if count:
            plural = "copies and memsets" if what != "kernel" else "kernels"
            time = t.format_duration(int(gpu["dur"].to_numpy()[chosen].sum()))
            parts.append(f"{count:,} {what if count == 1 else plural} ({time})")
    ts = gpu["ts"].to_numpy()[rows]
    inside = covered_length(ts, ts + gpu["dur"].to_numpy()[rows], a.spans).sum()
    if inside:
        return [
            Limit(
                f"Work launched before the recording is in the GPU time of the first steps, but in "
                f"no table of kernels and no gain: {' and '.join(parts)}."
            )
        ]
    return [Limit(f"Work launched before the recording is excluded: {' and '.join(parts)}.")]


def _behind(a: Analysis) -> list[Limit]:
    """Warn of steps that only hand work to other threads, as JAX's on a CPU. Most of the work is
    then after the last step."""
    meta, last = a.trace.meta, a.spans.end.max(initial=0)
    if meta.step_marks is None or not a.trace.gpu.is_empty() or not a.span_ns:
        return []
    rows = a.trace.cpu.filter(
        pl.col("kind") == "op", pl.col("thread") != a.trace.main_thread
    ).select("ts", end=pl.col("ts") + pl.col("dur"))
    work = union(rows["ts"].to_numpy(), rows["end"].to_numpy())
    inside = intersect(work, a.spans).total
    behind = int((work.end - np.maximum(work.start, last)).clip(0).sum())
    if behind <= max(inside, a.span_ns):
        return []
    wait = " (jax.block_until_ready(state))" if meta.framework == JAX else ""
    return [
        Limit(
            f"The work runs behind the steps: {t.format_duration(behind)} of other threads' lie "
            f"after the last one, {t.format_duration(inside)} in the steps. Their times are those "
            f"of handing work over. Wait for it in the loop while you record{wait}.",
            "work after the steps",
        )
    ]


def _one_off(a: Analysis) -> list[Limit]:
    """Name the first calls within the used steps that cost time once."""
    table = a.one_off_costs
    ts = table["ts"].to_numpy()
    end = ts + table["dur"].to_numpy()
    inside = covered_length(ts, end, a.spans)
    whole = intersect(union(ts, end), a.spans).total
    if not whole or whole < MIN_ONE_OFF_SHARE * a.span_ns:
        return []
    table = table.with_columns(inside=inside).filter(pl.col("inside") > 0)
    longest = str(table.sort("inside")["name"][-1])
    named = [
        f"{labels.shorten(labels.clean(row['name']), 50)} {t.format_duration(row['inside'])} "
        + (
            ("(its only call)" if row["count"] == 1 else f"(one of {row['count']:,})")
            if row["usual"] is None
            else f"({t.format_duration(row['usual'])} in its {row['count']:,} calls)"
            if row["name"].startswith(LOADING)
            else f"(first of {row['count']:,} calls, the others {t.format_duration(row['usual'])})"
        )
        for row in table.sort("inside", descending=True).head(MAX_NAMED).iter_rows(named=True)
    ]
    again = "Record after a few steps."
    if longest == CAPTURE:
        again = "Record replays of the graph."
    more = table.height - len(named)
    others = f" and {t.count_noun(more, 'more first call')}" if more > 0 else ""
    return [
        Limit(
            f"One-off costs are in what is analysed, {t.format_duration(whole)} "
            f"({t.format_share(whole / a.span_ns)}), calls inside each other counted once: "
            f"{', '.join(named)}{others}. Loading of code, search of algorithms and compilation at "
            f"a first call: later steps do not have them, and no advice is made of them. {again}",
            ONE_OFF,
        )
    ]


ONE_OFF = "one-off costs"


def one_off_costs(a: Analysis) -> tuple[float, str]:
    """Return the share of the analysed time, 0 to 1, in first calls, graph captures and long driver
    calls; and the longest one."""
    tables = [
        table.select(pl.col("name").cast(pl.String), "ts", "dur")
        for table in (a.one_off_costs, _long_calls(a))
    ]
    calls = pl.concat(tables)
    if calls.is_empty() or not a.span_ns:
        return 0.0, ""
    ts = calls["ts"].to_numpy()
    end = ts + calls["dur"].to_numpy()
    longest = calls["name"][int(covered_length(ts, end, a.spans).argmax())]
    share = intersect(union(ts, end), a.spans).total / a.span_ns
    return float(share), labels.shorten(labels.clean(longest), 50)


def _long_calls(a: Analysis) -> pl.DataFrame:
    """Return driver calls that are no waits and take a large share of the window. They are rows of
    ``Trace.cpu``, the longest first."""
    cpu = a.trace.cpu
    once = (cpu["kind"] == "runtime") & cpu["call"].is_in(ONE_OFF_CALLS).fill_null(False)
    long = cpu["dur"] >= MIN_START_UP_SHARE * a.span_ns
    longest = cpu.filter(once & long & (cpu["ts"] < a.spans.end.max(initial=0)))
    ts, dur = longest["ts"].to_numpy(), longest["dur"].to_numpy()
    if longest.height and a.device_id is not None:
        # a launch that waits for room in a full queue has the device at work meanwhile
        idle = covered_length(ts, ts + dur, a.breakdown.busy) <= MAX_BUSY * dur
        longest = longest.filter(pl.Series(idle))
    return longest.sort("dur", descending=True)


def _start_up(a: Analysis) -> list[Limit]:
    longest = _long_calls(a).head(1)
    if longest.is_empty() or not a.span_ns or longest["ts"][0] in a.one_off_costs["ts"]:
        return []  # the line of one-off costs names it
    name, took = str(longest["name"][0]), int(longest["dur"][0])
    begin = int(longest["ts"][0])
    within = covered_length(np.array([begin]), np.array([begin + took]), a.spans)[0]
    if within < took / 2 or took >= a.span_ns:
        return []  # no figure is of it
    return [
        Limit(
            f"{labels.shorten(labels.clean(name), 50)} alone takes {t.format_duration(took)} "
            f"({t.format_share(took / a.span_ns)} of what is analysed): this is start-up, which "
            "later steps do not have. Record after a few steps"
            f"{schedule_of(a.trace.meta, ': ', LATER_STEPS)}.",
            ONE_OFF,
        )
    ]


def _extremes(a: Analysis) -> tuple[int, int]:
    """Return the shortest and the longest used step, ns."""
    dur = a.steps.used["dur"].to_numpy()
    return (int(dur.min()), int(dur.max())) if len(dur) else (0, 0)


def _unknown_step(a: Analysis) -> list[Limit]:
    """Say that the run's own step time is unknown, if it is."""
    recorded = a.recorded
    if recorded is None or recorded.median is not None or not recorded.host_is_ahead:
        return []
    return [
        Limit(
            "What the run's own steps take is not measured: the host runs ahead of the GPU, and "
            f"fewer than {MIN_DEVICE_TIMED} steps have CUDA events. Figures are of the profiled "
            "steps.",
            "run not timed",
        )
    ]


def _record_limits(a: Analysis) -> list[Limit]:
    """List what a record without a profiled window cannot show."""
    recorded = a.recorded
    assert recorded is not None
    windows = window_lines(recorded.record.events_of("window"))
    done = [line.removesuffix(DONE) for line in windows if line.endswith(DONE)]
    lack = f"The trace of {', '.join(done)} is missing" if done else "No window was profiled"
    result = [
        Limit(
            f"{lack}: what the host did is known by phase, and nothing of what ran on the device. "
            "Host times of phases that only launch work say little about the device.",
            "no profiled window",
        )
    ]
    result += [Limit(f"{line}.") for line in windows if not line.endswith(DONE)]
    if not recorded.record.has_ended:
        killed = "The run was killed, or is still going on: figures are up to its last step."
        result.append(Limit(killed))
    if unseen := describe_unseen_end(recorded):
        result.append(Limit(unseen))
    if not recorded.steps:
        result.append(Limit("No step was recorded."))
    elif not recorded.used.any():
        result.append(Limit("No step without a profiler was recorded."))
    return result


def describe_unseen_end(recorded: StepRecords) -> str:
    """Say how much of the run follows its last step; empty if that is little."""
    ns, share = recorded.unseen_end
    if share < MIN_UNSEEN_SHARE or ns < MIN_UNSEEN_NS:
        return ""
    return (
        f"No step was found in the last {t.format_duration(ns)} of the run "
        f"({t.format_share(share)}): what calls no module is not seen. Mark the steps with "
        "advisor.step()."
    )


def is_too_small(a: Analysis) -> bool:
    """Return whether a file is too small for any advice. Traces written as code are examples."""
    meta = a.trace.meta
    return count_events(a) < MIN_EVENTS and not meta.example and not meta.layer_times


def count_events(a: Analysis) -> int:
    """Return the number of host and device events."""
    return a.trace.cpu.height + a.trace.gpu.height


MIN_COUNT_CHANGE = 0.25
"""Relative difference of call counts from which longer steps are said to run more work."""


def longer_steps(a: Analysis) -> str:
    """Say in a sentence or two what makes some steps longer."""
    result, own = a.step_halves, a.trace.meta.framework
    if result is None:
        return "There are too few steps to say what makes one longer."
    said = f"The longer half takes {t.format_duration(result.difference_ns)} more per step"
    if not result.classes:
        return f"{said}, spread over many causes."
    parts = (f"{_class(part.name, own)} {t.format_duration(part.ns)}" for part in result.classes)
    said += f": {', '.join(parts)}."
    if not result.work:
        return said
    host = a.device_id is None
    said += " Most of it in " if host else " Device work that takes longer, hidden or not: "
    said += f"{', '.join(_work(part) for part in result.work)}."
    if any(_more_calls(part) for part in result.work):
        said += (
            " The longer steps run more of it: their work is larger, or the device runs what an "
            "earlier step has launched."
        )
    return said


def _class(name: str, framework: str | None) -> str:
    if name.startswith("host: "):
        return t.host_label(name.removeprefix("host: "), framework)
    cause = name.removeprefix("idle: ")
    if cause != name:
        label = t.cause_label(cause, framework) if cause in t.CAUSE_LABELS else "no known cause"
        return f"idle ({label})"
    return t.CLASS_LABELS.get(name, name)


def _work(part: StepVariationPart) -> str:
    few, many = (
        f"{count or 0:,.1f}".removesuffix(".0") for count in (part.short_count, part.long_count)
    )
    calls = f" ({few} times in a shorter step, {many} in a longer one)" if _more_calls(part) else ""
    return f"{labels.kernel_label(part.name, 40)} {t.format_duration(part.ns)}{calls}"


def _more_calls(part: StepVariationPart) -> bool:
    few, many = part.short_count or 0.0, part.long_count or 0.0
    return many - few >= MIN_COUNT_CHANGE * max(many, 1e-9)


def window_lines(events: list[dict[str, Any]]) -> list[str]:
    """Return the last state of each window: ``window 0: done``."""
    last: dict[Any, dict[str, Any]] = {}
    for event in events:
        last[str(event.get("window"))] = event
    return [
        " ".join(
            part
            for part in (
                f"window {number}:",
                str(event.get("state", "open"))[:40],
                f"({str(event['why'])[:200]})" if event.get("why") else "",
            )
            if part
        )
        for number, event in list(last.items())[:100]
    ]


def lost_replays(a: Analysis) -> str:
    """Say that records of graph replays are lost, and what to record; empty if none is."""
    if not a.lost_records.has_lost_replays:
        return ""
    schedule = schedule_of(a.trace.meta, ", for instance ", "wait=1, warmup=3, active=3")
    return (
        f"The profiler lost about {a.lost_records.replayed:,} of {a.lost_records.launches:,} "
        f"kernels of graph replays: record fewer steps{schedule}."
    )


def lost_records(a: Analysis) -> str:
    """Return why idle time and gains are unknown; empty if no records are lost."""
    if a.lost_records.truncated:
        return "the file is cut off, and GPU work may be missing from it"
    if a.lost_records.reported:
        return (
            f"the records of {a.lost_records.lost:,} of {a.lost_records.launches:,} launched "
            "kernels are lost, and what looks idle may be one of them"
        )
    if a.device_id is not None and not (a.trace.gpu["kind"] == "kernel").any():
        return "the trace holds copies but no kernel, so when the device computes is not known"
    if a.device_id is None and count_launches(a.trace):
        return (
            "the host launched GPU work of which no record is left, and behind which this may "
            "be hidden"
        )
    return ""


def count_launches(trace: Trace) -> int:
    """Count the calls that launch device work, whether that was recorded or not."""
    return int(trace.cpu["call"].is_in(["launch", "graph_launch"]).sum())
