"""Limits of a recording: what it cannot show and what was left out, one sentence per limit."""

from typing import Any, NamedTuple

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
from advisor.measure.steps.run_steps import MIN_DEVICE_TIMED, RunSteps
from advisor.measure.steps.step_differences import CAPTURE, LOADING, MAX_BUSY
from advisor.measure.steps.steps import recorded_extent
from advisor.measure.steps.unmarked_steps import range_groups

ONE_OFF_CALLS = ("other", "free", "malloc", "launch", "module_load")
"""Classes of runtime calls that wait for nothing in a steady step."""
MIN_START_UP_SHARE = 0.10
"""Minimum share of the window at which one call of ``ONE_OFF_CALLS`` is start-up: loading modules
or creating the context. Each takes seconds in public traces of a first iteration."""
UNEVEN_STEP_RATIO = 1.5
"""Minimum ratio of the longest to the shortest step at which a limit says that they differ."""
MIN_ONE_OFF_SHARE = 0.02
"""Minimum share of the analysed time at which costs of first calls are reported."""
MIN_LEFT_OUT_SHARE = 0.01
"""Minimum share of a recording at which time around the GPU work is named."""
MIN_POSSIBLE_STEP_SHARE = 0.5
"""Minimum share of the GPU's work launched in ranges that could be the step."""
MIN_UNSEEN_SHARE, MIN_UNSEEN_NS = 0.5, 1e9
"""Minimum share of the run, and time in ns, after the last step, at which a limit reports it."""
MIN_KERNELS_OF_STEP = 100
"""Minimum number of kernels at which a network's step without matrix products is incomplete."""
_MATRIX_LAYERS = r"(?i)\beinsum|/(?:Batch)?MatMul(?:/|:|$)|/Conv[123]D(?:/|:|$)|self_attention/"
"""Pattern of XLA's and TensorFlow's operators that multiply matrices, or of their layers."""
MAX_NAMED = 3
DONE = ": done"
"""End of the line of a window that was recorded."""
MIN_EVENTS = 100
"""Number of events below which a file holds less than a small network's step. The forward pass,
backward pass and optimizer of one have some hundred operators, calls and kernels."""


def part_of_step(a: Analysis) -> str:
    """Say that no matrix product is recorded although layers of the program have them. Empty if
    there is one, or if nothing shows that there should be."""
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
        limits = [] if a.only_input else _list_record_limits(a)
        return [
            *limits,
            *memory_limits(a),
            *_list_profile_limits(a),
            *map(Limit, run.problems),
        ]
    result = []
    if meta.truncated:
        damage = f" ({meta.damage})" if meta.damage else ""
        read_count = t.count_noun(meta.events_read, "event")
        result.append(Limit(f"The file is cut off{damage}: {read_count} kept.", "cut off"))
    # a recording says whether its machine has a GPU: where there is none, nothing is missing
    on_host = a.rank_record is not None and a.trains_on_host
    if a.trace.gpu.is_empty() and (not on_host or count_launches(a.trace)):
        result.append(Limit(_explain_missing_device_work(a.trace), "no GPU work"))
    result += _list_window_limits(a)
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
        result.append(Limit(_explain_missing_operators(a.trace), "no operators"))
    if part := part_of_step(a):
        advice = record_whole_steps(meta)
        result.append(Limit(f"{part} Times and gains are of that part. {advice}", "part of a step"))
    result += _describe_start_up(a)
    result += _explain_unknown_step(a)
    shortest, longest = _find_step_extremes(a)
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
    result += _explain_unmarked_steps(a)
    if a.steps.source == "whole trace" or a.steps.source in GUESSED_STEP_SOURCES:
        result += _list_possible_steps(a.trace)
    result += memory_limits(a)
    result += _list_profile_limits(a)
    result += map(Limit, run.problems)
    return result


def _explain_unmarked_steps(a: Analysis) -> list[Limit]:
    """Say what the report uses in place of steps if nothing marks them."""
    marking = mark_steps(a.trace.meta.format, a.trace.meta.framework)
    if a.steps.source == "whole trace":
        return [
            Limit(
                f"Steps were not recorded: the figures are for {_name_analyzed_part(a)}. "
                f"{t.upper_first(marking)} for figures per step.",
                UNMARKED,
            )
        ]
    if a.steps.source in GUESSED_STEP_SOURCES:
        return [
            Limit(
                "Nothing marks the steps. A repetition is where the same work recurs. It may be a "
                f"part of an iteration, such as a layer.{_name_left_out_time(a)} "
                f"{t.upper_first(marking)}.",
                UNMARKED,
            )
        ]
    if a.steps.source == DEVICE_STEPS:
        return [
            Limit(
                "The program marks no steps. The profiler derived these from the GPU's work. Work "
                f"outside them is left out. {t.upper_first(marking)}.",
                UNMARKED,
            )
        ]
    return []


UNMARKED = "no marked steps"


def _list_profile_limits(a: Analysis) -> list[Limit]:
    """Say what was left out of the kernel profiles."""
    profiles = a.trace.meta.kernel_profiles
    if profiles is None or not profiles.dropped:
        return []
    parts = [f"{why} ({n:,})" if n > 1 else why for why, n in profiles.dropped.items()]
    return [Limit(f"Left out of the kernels of {profiles.tool}: {', '.join(parts)}.")]


def _list_possible_steps(trace: Trace) -> list[Limit]:
    """List ranges that repeat and hold much of the GPU's work: one of them may be the step."""
    groups = [g for g in range_groups(trace) if g.share >= MIN_POSSIBLE_STEP_SHARE]
    groups.sort(key=lambda g: (not g.is_step_range, -g.share, g.marks.height))
    named = [
        f"{labels.shorten(labels.clean(g.name), 50)!r} ({g.marks.height:,}×, "
        f"{t.format_duration(float(g.marks['dur'].mean()))}, "  # type: ignore[arg-type]
        f"{t.format_share(g.share)} of GPU work)"
        for g in groups[:MAX_NAMED]
    ]
    text = f"Ranges that could be the step (--steps NAME): {', '.join(named)}."
    return [Limit(text)] if named else []


def _name_analyzed_part(a: Analysis) -> str:
    """Name the analysed part of a recording without steps, and the time left out."""
    if a.device_id is None:
        return "the whole recording"
    outside = _name_time_outside(a)
    text = "the time from the first to the last kernel or copy"
    call, took = call_before(a)
    longest_call = f" ({t.format_duration(took)} of it in {call})" * bool(call)
    return (
        f"{text}; {outside} it are not idle time and are left out{longest_call}"
        if outside
        else text
    )


def call_before(a: Analysis) -> tuple[str, int]:
    """Return the driver call that takes most of the time before the first GPU work, because it
    starts CUDA, and its time there, ns. The name is empty if no call takes half of that time."""
    steps_start, start = int(a.spans.start.min()), recorded_extent(a.trace)[0]
    calls = a.trace.cpu.filter(pl.col("kind") == "runtime", pl.col("ts") < steps_start)
    took = pl.min_horizontal(pl.col("dur"), steps_start - pl.col("ts"))
    longest = calls.select(pl.col("name").cast(pl.String), took=took).sort("took").tail(1)
    if longest.is_empty() or longest["took"][0] < MIN_CALL_SHARE * max(1, steps_start - start):
        return "", 0
    return labels.shorten(labels.clean(longest["name"][0]), 50), int(longest["took"][0])


MIN_CALL_SHARE = 0.5
"""Minimum share of the time before the first GPU work at which a call is named for it."""


def _name_left_out_time(a: Analysis) -> str:
    """Say how much of the recording is outside the repetitions. Empty if that is little."""
    outside = _name_time_outside(a)
    return f" {t.upper_first(outside)} the repetitions are left out." if outside else ""


def _name_time_outside(a: Analysis) -> str:
    """Name the time before and after the analysed part. Empty if that is little."""
    start, end = recorded_extent(a.trace)
    before, after = int(a.spans.start.min()) - start, end - int(a.spans.end.max())
    return t.list_names(
        f"{t.format_duration(ns)} {word}"
        for ns, word in ((before, "before"), (after, "after"))
        if ns > MIN_LEFT_OUT_SHARE * (end - start)
    )


def _explain_missing_operators(trace: Trace) -> str:
    """Say what is unknown because the trace has no operators, and how to record them."""
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
    """Return PyTorch's profiler schedule and the call that advances it, between ``before`` and
    ``after``. Empty if another tool recorded the trace."""
    schedule = f"schedule({arguments}) and prof.step() after each step"
    return "" if tool_of(meta) is not None else f"{before}{schedule}{after}"


def record_whole_steps(meta: TraceMeta) -> str:
    """Ask to record whole steps, with the options of the tool that recorded the trace."""
    tool = tool_of(meta)
    instruction = (
        schedule_of(meta, ": ", "wait=1, warmup=3, active=5") if tool is None else f": {tool.step}"
    )
    return f"Record several whole steps{instruction}."


def _explain_missing_device_work(trace: Trace) -> str:
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
        f"{lost}the profiler lost the records of all of it, as calls are only recorded together "
        f"with what they launch. {t.upper_first(measured)} Record again, after a warm-up"
        f"{schedule_of(trace.meta, ' (', 'wait=1, warmup=1, active=5', ')')} and without another "
        "profiler on the same GPU."
    )


def _list_window_limits(a: Analysis) -> list[Limit]:
    """List limits that come from the recording, not from the steps."""
    result = []
    if is_too_small(a):
        result.append(
            Limit(
                f"The trace holds {count_events(a):,} operators, calls and kernels: too few to "
                f"tell how the program runs. {record_whole_steps(a.trace.meta)}",
                "too few events",
            )
        )
    result += _describe_earlier_work(a)
    if a.steps.ahead_ns is not None and a.steps.host_ns is not None:
        result.append(
            Limit(
                "The host runs ahead: the first work of a step waits "
                f"{t.format_duration(a.steps.ahead_ns)} in the queue (median). So a step is the "
                "device's period, from the first work of a step to the first of the next. The "
                f"host's own marks are {t.format_duration(a.steps.host_ns)} apart."
            )
        )
    result += _warn_of_work_after_steps(a)
    result += _explain_steps_before_window(a)
    result += _describe_one_off_costs(a)
    if describe_lost_replays(a):
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
            "GPU work may be missing anywhere: events are not written in order of time"
            if a.lost_records.truncated
            else f"The profiler lost the records of {a.lost_records.lost:,} of "
            f"{a.lost_records.launches:,} launched kernels ({t.format_share(share)})"
        )
        again = (
            "Copy or record it again." if a.lost_records.truncated else "Record a shorter window."
        )
        result.append(
            Limit(
                f"{missing}: busy time is a lower bound, idle time is unknown, no gain is "
                f"estimated, and rules on idle time are skipped. {again}",
                LOST,
            )
        )
    return result


LOST = "lost kernels"


def _describe_earlier_work(a: Analysis) -> list[Limit]:
    """Say how much work was launched before the recording, and whether its time counts."""
    rows = a.launched_before
    if not rows.any():
        return []
    gpu = a.trace.gpu
    amounts = []
    for kind, matching in (
        ("kernel", rows & (gpu["kind"] == "kernel").to_numpy()),
        ("copy or memset", rows & (gpu["kind"] != "kernel").to_numpy()),
    ):
        count = int(np.count_nonzero(matching))
        if count:
            plural = "copies and memsets" if kind != "kernel" else "kernels"
            time = t.format_duration(int(gpu["dur"].to_numpy()[matching].sum()))
            amounts.append(f"{count:,} {kind if count == 1 else plural} ({time})")
    ts = gpu["ts"].to_numpy()[rows]
    inside = covered_length(ts, ts + gpu["dur"].to_numpy()[rows], a.spans).sum()
    if inside:
        return [
            Limit(
                f"Work launched before the recording is in the GPU time of the first steps, but in "
                f"no table of kernels and no gain: {' and '.join(amounts)}."
            )
        ]
    return [Limit(f"Work launched before the recording is excluded: {' and '.join(amounts)}.")]


def _warn_of_work_after_steps(a: Analysis) -> list[Limit]:
    """Warn of steps that only hand work to other threads, such as JAX's on a CPU. Most of the work
    then comes after the last step."""
    meta, last_end = a.trace.meta, a.spans.end.max(initial=0)
    if meta.step_marks is None or not a.trace.gpu.is_empty() or not a.span_ns:
        return []
    rows = a.trace.cpu.filter(
        pl.col("kind") == "op", pl.col("thread") != a.trace.main_thread
    ).select("ts", end=pl.col("ts") + pl.col("dur"))
    work = union(rows["ts"].to_numpy(), rows["end"].to_numpy())
    inside = intersect(work, a.spans).total
    behind = int((work.end - np.maximum(work.start, last_end)).clip(0).sum())
    if behind <= max(inside, a.span_ns):
        return []
    wait = " (jax.block_until_ready(state))" if meta.framework == JAX else ""
    return [
        Limit(
            f"The work runs after the steps: other threads work {t.format_duration(behind)} after "
            f"the last one, {t.format_duration(inside)} in the steps. Step times only show how "
            f"long handing work over takes. Wait for it in the loop while you record{wait}.",
            "work after the steps",
        )
    ]


def _describe_one_off_costs(a: Analysis) -> list[Limit]:
    """Name the first calls within the used steps that take extra time once."""
    table = a.one_off_costs
    ts = table["ts"].to_numpy()
    end = ts + table["dur"].to_numpy()
    inside = covered_length(ts, end, a.spans)
    total = intersect(union(ts, end), a.spans).total
    if not total or total < MIN_ONE_OFF_SHARE * a.span_ns:
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
    advice = "Record after a few steps."
    if longest == CAPTURE:
        advice = "Record replays of the graph."
    remaining = table.height - len(named)
    others = f" and {t.count_noun(remaining, 'more first call')}" if remaining > 0 else ""
    return [
        Limit(
            f"One-off costs are in the analysed time, {t.format_duration(total)} "
            f"({t.format_share(total / a.span_ns)}), calls inside each other counted once: "
            f"{', '.join(named)}{others}. Loading code, choosing algorithms and compiling at a "
            f"first call do not recur in later steps, so no advice is based on them. {advice}",
            ONE_OFF,
        )
    ]


ONE_OFF = "one-off costs"


class OneOffCosts(NamedTuple):
    """First calls, graph captures and long driver calls in the analysed time."""

    share: float
    """Their share of the analysed time, 0 to 1."""
    longest: str
    """Name of the longest one. Empty without any."""
    longest_share: float
    """Share of the calls of that name in the time of all of them."""


def one_off_costs(a: Analysis) -> OneOffCosts:
    """Return the one-off costs in the analysed time."""
    tables = [
        table.select(pl.col("name").cast(pl.String), "ts", "dur")
        for table in (a.one_off_costs, _find_long_calls(a))
    ]
    calls = pl.concat(tables)
    if calls.is_empty() or not a.span_ns:
        return OneOffCosts(0.0, "", 0.0)
    ts = calls["ts"].to_numpy()
    end = ts + calls["dur"].to_numpy()
    longest = calls["name"][int(covered_length(ts, end, a.spans).argmax())]
    total = intersect(union(ts, end), a.spans).total
    named = (calls["name"] == longest).to_numpy()
    of_name = intersect(union(ts[named], end[named]), a.spans).total
    name = labels.shorten(labels.clean(longest), 50)
    return OneOffCosts(total / a.span_ns, name, of_name / max(1, total))


def _find_long_calls(a: Analysis) -> pl.DataFrame:
    """Return driver calls that do not wait and take a large share of the window, as rows of
    ``Trace.cpu``, longest first."""
    cpu = a.trace.cpu
    is_one_off = (cpu["kind"] == "runtime") & cpu["call"].is_in(ONE_OFF_CALLS).fill_null(False)
    is_long = cpu["dur"] >= MIN_START_UP_SHARE * a.span_ns
    calls = cpu.filter(is_one_off & is_long & (cpu["ts"] < a.spans.end.max(initial=0)))
    ts, dur = calls["ts"].to_numpy(), calls["dur"].to_numpy()
    if calls.height and a.device_id is not None:
        # a launch that waits for room in a full queue has the device at work meanwhile
        idle = covered_length(ts, ts + dur, a.breakdown.busy) <= MAX_BUSY * dur
        calls = calls.filter(pl.Series(idle))
    return calls.sort("dur", descending=True)


def _describe_start_up(a: Analysis) -> list[Limit]:
    """Name the longest call of start-up in the analysed time. Empty if there is none."""
    longest = _find_long_calls(a).head(1)
    if longest.is_empty() or not a.span_ns or longest["ts"][0] in a.one_off_costs["ts"]:
        return []  # the line of one-off costs names it
    name, took = str(longest["name"][0]), int(longest["dur"][0])
    start = int(longest["ts"][0])
    within = covered_length(np.array([start]), np.array([start + took]), a.spans)[0]
    if within < took / 2 or took >= a.span_ns:
        return []  # no figure includes it
    return [
        Limit(
            f"{labels.shorten(labels.clean(name), 50)} alone takes {t.format_duration(took)} "
            f"({t.format_share(took / a.span_ns)} of the analysed time): this is start-up, which "
            "later steps do not have. Record after a few steps"
            f"{schedule_of(a.trace.meta, ': ', LATER_STEPS)}.",
            ONE_OFF,
        )
    ]


def _find_step_extremes(a: Analysis) -> tuple[int, int]:
    """Return the shortest and the longest used step, ns."""
    dur = a.steps.used["dur"].to_numpy()
    return (int(dur.min()), int(dur.max())) if len(dur) else (0, 0)


def _explain_steps_before_window(a: Analysis) -> list[Limit]:
    """Say that only steps before the window count, because it ended page faults. Empty if it did
    not."""
    run_steps = a.run_steps
    if run_steps is None or run_steps.saved_by_window is None:
        return []
    return [
        Limit(
            f"Only the {t.count_noun(run_steps.count, 'step')} before the profiled window count "
            f"for the run's step. Steps after it take "
            f"{t.format_duration(run_steps.saved_by_window)} less: the window ended page faults, "
            "which the program has without a profiler."
        )
    ]


def _explain_unknown_step(a: Analysis) -> list[Limit]:
    """Say that the run's own step time is unknown. Empty if it is known."""
    run_steps = a.run_steps
    if run_steps is None or run_steps.median is not None or not run_steps.host_is_ahead:
        return []
    return [
        Limit(
            "The run's own step time is not measured: the host runs ahead of the GPU, and "
            f"fewer than {MIN_DEVICE_TIMED} steps have CUDA events. Figures are for the profiled "
            "steps.",
            "run not timed",
        )
    ]


def _list_record_limits(a: Analysis) -> list[Limit]:
    """List what a record without a profiled window cannot show."""
    run_steps = a.run_steps
    assert run_steps is not None
    windows = window_lines(run_steps.rank_record.events_of("window"))
    done = [line.removesuffix(DONE) for line in windows if line.endswith(DONE)]
    lack = f"The trace of {', '.join(done)} is missing" if done else "No window was profiled"
    known = "the host's work is known by phase"
    consequence = (
        f"{known}, not by operator."
        if a.trains_on_host
        else f"{known}, but the device's work is unknown. Host times of phases that only launch "
        "work say little about the device."
    )
    result = [Limit(f"{lack}: {consequence}", "no profiled window")]
    result += [Limit(f"{line}.") for line in windows if not line.endswith(DONE)]
    if not run_steps.rank_record.has_ended:
        killed = "The run was killed or is still going on: figures cover it up to its last step."
        result.append(Limit(killed))
    if unseen := describe_unseen_end(run_steps):
        result.append(Limit(unseen))
    if not run_steps.steps:
        result.append(Limit("No step was recorded."))
    elif not run_steps.used.any():
        result.append(Limit("No step without a profiler was recorded."))
    return result


def describe_unseen_end(run_steps: RunSteps) -> str:
    """Say how much of the run follows its last step. Empty if that is little."""
    ns, share = run_steps.unseen_end
    if share < MIN_UNSEEN_SHARE or ns < MIN_UNSEEN_NS:
        return ""
    return (
        f"No step was found in the last {t.format_duration(ns)} of the run "
        f"({t.format_share(share)}): code that calls no module is not seen. Mark the steps with "
        "advisor.step()."
    )


def is_too_small(a: Analysis) -> bool:
    """Return whether a file is too small for advice. Examples written as code never are."""
    meta = a.trace.meta
    return count_events(a) < MIN_EVENTS and not meta.example and not meta.layer_times


def count_events(a: Analysis) -> int:
    """Return the number of host and device events."""
    return a.trace.cpu.height + a.trace.gpu.height


MIN_COUNT_CHANGE = 0.25
"""Minimum relative difference of call counts at which longer steps are said to run more work."""


def longer_steps(a: Analysis) -> str:
    """Say in a sentence or two what makes some steps longer."""
    result, framework = a.step_halves, a.trace.meta.framework
    if result is None:
        return "There are too few steps to say what makes some longer."
    text = f"The longer half takes {t.format_duration(result.difference_ns)} more per step"
    if not result.classes:
        return f"{text}, spread over many causes."
    parts = (
        f"{_name_class(part.name, framework)} {t.format_duration(part.ns)}"
        for part in result.classes
    )
    text += f": {', '.join(parts)}."
    if not result.work:
        return text
    is_most = 2 * sum(part.ns for part in result.work) > result.difference_ns
    on_host = " Most of it is in " if is_most else " The work that differs most is "
    is_on_host = a.device_id is None
    text += on_host if is_on_host else " Device work that takes longer, hidden or not: "
    text += f"{', '.join(_describe_work(part) for part in result.work)}."
    if any(_has_more_calls(part) for part in result.work):
        text += (
            " The longer steps run more of it: their work is larger, or the device runs what an "
            "earlier step launched."
        )
    return text


def _name_class(name: str, framework: str | None) -> str:
    if name.startswith("host: "):
        return t.host_label(name.removeprefix("host: "), framework)
    cause = name.removeprefix("idle: ")
    if cause != name:
        label = t.cause_label(cause, framework) if cause in t.CAUSE_LABELS else "no known cause"
        return f"idle ({label})"
    return t.CLASS_LABELS.get(name, name)


def _describe_work(part: StepVariationPart) -> str:
    short_count, long_count = (
        f"{count or 0:,.1f}".removesuffix(".0") for count in (part.short_count, part.long_count)
    )
    calls = (
        f" ({short_count} times in a shorter step, {long_count} in a longer one)"
        if _has_more_calls(part)
        else ""
    )
    return f"{labels.kernel_label(part.name, 40)} {t.format_duration(part.ns)}{calls}"


def _has_more_calls(part: StepVariationPart) -> bool:
    short_count, long_count = part.short_count or 0.0, part.long_count or 0.0
    return long_count - short_count >= MIN_COUNT_CHANGE * max(long_count, 1e-9)


def window_lines(events: list[dict[str, Any]]) -> list[str]:
    """Return the last state of each window, such as ``window 0: done``."""
    latest: dict[Any, dict[str, Any]] = {}
    for event in events:
        latest[str(event.get("window"))] = event
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
        for number, event in list(latest.items())[:100]
    ]


def describe_lost_replays(a: Analysis) -> str:
    """Say that records of graph replays are lost, and what to record. Empty if none are lost."""
    if not a.lost_records.has_lost_replays:
        return ""
    schedule = schedule_of(a.trace.meta, ", for instance ", "wait=1, warmup=3, active=5")
    return (
        f"The profiler lost about {a.lost_records.replayed:,} of {a.lost_records.launches:,} "
        f"kernels of graph replays: record fewer steps{schedule}."
    )


def explain_lost_records(a: Analysis) -> str:
    """Say why idle time and gains are unknown. Empty if no records are lost."""
    if a.lost_records.truncated:
        return "the file is cut off, and GPU work may be missing from it"
    if a.lost_records.reported:
        return (
            f"the records of {a.lost_records.lost:,} of {a.lost_records.launches:,} launched "
            "kernels are lost, and time that looks idle may belong to them"
        )
    if a.device_id is not None and not (a.trace.gpu["kind"] == "kernel").any():
        return "the trace holds copies but no kernel, so when the device computes is unknown"
    if a.device_id is None and count_launches(a.trace):
        return "the host launched GPU work whose records are lost, so exposed time is unknown"
    return ""


def count_launches(trace: Trace) -> int:
    """Count the calls that launch device work, whether or not that work was recorded."""
    return int(trace.cpu["call"].is_in(["launch", "graph_launch"]).sum())
