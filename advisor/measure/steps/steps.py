"""Steps: the analysed spans of time, and how they were found."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np
import polars as pl
from numpy.typing import NDArray

from advisor.core import labels
from advisor.core import text as t
from advisor.core.errors import AdvisorError, suggest
from advisor.core.finding import GUESSED_STEP_SOURCES, LAYER_TIMES
from advisor.core.intervals import Intervals, covered_length, union
from advisor.core.trace import KINETO, LOADER, STEP_MARKS, Run, Trace
from advisor.measure.host.launches import (
    AHEAD_SHARE,
    analyzed_device,
    device_steps,
    find_drain_time,
    launched_before_recording,
)
from advisor.measure.host.names import OPTIMIZER_STEP, name_matches
from advisor.measure.inference.inference_steps import (
    ENGINE,
    InferenceSteps,
    find_inference_steps,
    has_training_rows,
)
from advisor.measure.steps.unmarked_steps import SIMILAR_TIME, find_repeats, without_fragments

if TYPE_CHECKING:
    from advisor.measure import Analysis

MIN_OPTIMIZER_STEPS = 3
SIMILAR_OPERATORS = 0.1
"""Maximum share of different operators in two steps of one optimizer."""
OUTLIER_FACTOR = 1.5
"""Multiple of the median above which a step is set aside as an outlier, if it is also more than 5
median absolute deviations away. gpuprof uses 3x for a first step; Hampel's test 3 MAD."""
OUTLIER_MADS = 5.0
MIN_KEPT_STEPS = 3
_MAX_PERIOD = 16
"""Maximum distance of recurring long steps, in steps: few ranks have more loader workers."""
MAX_PERIODIC_RATIO = 2.5
"""Maximum ratio of the longest to the shortest recurring long step."""
MAX_UNEXPLAINED_WAIT_NS = 1_000_000
"""Maximum time that queued work of an idle device may wait for no recorded reason, ns. Launch
latency is some 10 us."""
MAX_LEADING_SHARE = 0.01
"""Maximum share of device work before an unexplained wait if the figures begin after it."""
PARTIAL_SHARE = 0.25
"""Share of the median below which a last step may be cut off by the recording's end. A first step
shorter than this share of every other step was cut off by the begin."""
_MIN_WHOLE_SHARE = 0.5
"""Minimum share of the others' host events in a short last step that was not cut off."""

STEPS_SCHEMA = {
    "index": pl.Int32,  # 0, 1, … in order of time
    "name": pl.String,
    "ts": pl.Int64,  # ns
    "end": pl.Int64,  # ns; contiguous steps end where the next one starts
    "dur": pl.Int64,  # ns: end - ts
    "outlier": pl.Boolean,
    "used": pl.Boolean,  # selected and not an outlier
}


@dataclass(frozen=True)
class Steps:
    """Steps of a trace. ``table`` has the columns of STEPS_SCHEMA; ``source`` says what a step is:
    ``ProfilerStep`` (or the name of other frameworks' marks, ``TraceMeta.step_marks``), ``engine``,
    ``recorder``, ``optimizer``, ``module calls``, ``vocabulary look-ups``, ``ranges``, ``layer
    times``, one of ``GUESSED_STEP_SOURCES`` or ``whole trace``.

    If the host runs ahead of the device, a step is the device's period, from the first work of a
    step to the first of the next (``launches.py``). ``ahead_ns`` is the time that the work of a
    step waits in the queue, and ``host_ns`` is the mean step by the host's own marks."""

    table: pl.DataFrame
    source: str
    ahead_ns: float | None = None
    host_ns: float | None = None
    launched: pl.DataFrame | None = None
    """Rows of ``table`` as the host marked them (``ts``, ``end``, ``dur``), if it runs ahead."""

    @property
    def marks(self) -> pl.DataFrame:
        """Rows of ``table`` with the host's times. Work launched in a row belongs to its step."""
        if self.launched is None:
            return self.table
        return self.table.with_columns(self.launched.get_columns())

    @property
    def are_numbered(self) -> bool:
        """Whether the program marked the steps, so that their names correspond across ranks."""
        return self.source in ("ProfilerStep", "recorder", *STEP_MARKS[:2])

    @cached_property
    def used(self) -> pl.DataFrame:
        return self.table.filter("used")

    @cached_property
    def spans(self) -> Intervals:
        """Intervals of the used steps, ns."""
        return union(self.used["ts"].to_numpy(), self.used["end"].to_numpy())

    @cached_property
    def host_spans(self) -> Intervals:
        """Intervals of the used steps by the host's times, ns."""
        used = self.marks.filter("used")
        return union(used["ts"].to_numpy(), used["end"].to_numpy())


def rename_step_mark(name: str) -> str:
    """Rename a mark of another framework than PyTorch to ``step N`` (``TraceMeta.step_marks``)."""
    return re.sub(r"^(?:step #|ProfilerStep\s*#?)(?=\d+$)", "step ", name)


def require_window(run: Run, consequence: str) -> None:
    """Raise AdvisorError with the consequence if no rank has a profiled window."""
    if not run.traces:
        raise AdvisorError(f"{run.path or 'run'}: no profiled window, so {consequence}")


def require_used_steps(steps: Steps, path: str, rank: int, *, selected: bool) -> None:
    """Check that there are used steps. Raises AdvisorError if the steps ``selected`` by hand do not
    exist, or the marks have no length."""
    if steps.used.height or not steps.table.height:
        return
    count = steps.table.height
    steps_text = f"{count} steps" + (f" of rank {rank}" if rank >= 0 else "")
    if selected:
        raise AdvisorError(
            f"{path}: --steps selects none of the {steps_text}; give 0:{count} or a part of it"
        )
    problem = (
        "it spans no time" if steps.source == "whole trace" else f"its {steps_text} have no length"
    )
    raise AdvisorError(f"{path}: {problem}, so there is nothing to measure; record the trace again")


def step_of(steps: Steps, start: np.ndarray, end: np.ndarray | None = None) -> pl.Series:
    """Return the index of the first used step that each interval [start, end) touches, or null.
    Without ``end``, return the step that contains each instant."""
    used = steps.used
    step_start, step_end = used["ts"].to_numpy(), used["end"].to_numpy()
    if not len(step_start) or not len(start):
        return pl.Series([None], dtype=pl.Int32).new_from_index(0, len(start))
    query_end = start + 1 if end is None else np.maximum(end, start + 1)
    first_index = np.searchsorted(step_end, start, side="right")
    index = np.minimum(first_index, len(step_start) - 1)
    is_touching = (first_index < len(step_start)) & (step_start[index] < query_end)
    step_index = used["index"].gather(index)
    return step_index.set(pl.Series(~is_touching), None)


def step_of_call(steps: Steps, start: np.ndarray) -> pl.Series:
    """Return :func:`step_of` for calls on the host, by the host's own marks: if it runs ahead, the
    steps of the device come later."""
    return step_of(replace(steps, table=steps.marks), start)


def find_steps(trace: Trace, select: tuple[int | None, int | None] | None = None) -> Steps:
    """Find the steps. The first of these that the trace has:

    1. The ranges that the user named as steps.
    2. The marks of an inference engine.
    3. ProfilerStep ranges.
    4. The recorder's ``advisor::step`` ranges.
    5. The period of ``Optimizer.step``.
    6. The calls of a model that only infers (``inference/inference_steps.py``).
    7. In formats without marks of their own, the range or the sequence of device work that repeats
       (``unmarked_steps.py``).
    8. The whole trace.

    Raises AdvisorError if no range has the given name.

    A step ends where the next one starts. The last one ends with its own range, or with the last
    device work launched inside it if that is later. If the host runs ahead, steps are the device's.
    ``select`` is a half-open range of indices (negative ones count from the end). Outliers among
    the selected steps are set aside, but at least three steps are kept."""
    if trace.meta.step_ranges is not None:
        return _build_steps(trace, *_find_named_steps(trace, trace.meta.step_ranges), select)
    if trace.meta.layer_times:
        return _build_layer_times_step(trace)
    inference_steps = find_inference_steps(trace)
    if inference_steps is not None and inference_steps.source == ENGINE:
        return _steps_of_inference(inference_steps, select)
    for source, pattern in (
        ("ProfilerStep", trace.meta.step_names),
        ("recorder", r"^advisor::step\b"),
    ):
        marks = _find_marks(trace, pattern)
        if not marks.height:
            continue
        if source == "ProfilerStep" and trace.meta.step_marks is not None:
            source = trace.meta.step_marks
            marks = marks.with_columns(pl.Series("name", map(rename_step_mark, marks["name"])))
        return _build_steps(trace, _drop_cut_start(marks), source, select)
    marks = _keep_main_name(_find_marks(trace, OPTIMIZER_STEP))
    optimizers = _count_optimizers(trace, marks)
    marks = marks.gather_every(optimizers)
    if marks.height > (MIN_OPTIMIZER_STEPS if optimizers == 1 else 2):
        # one step: from the end of one Optimizer.step to the end of the next
        ends = (marks["ts"] + marks["dur"]).to_numpy()
        marks = pl.DataFrame(
            {
                "name": [f"optimizer step {i + 1}" for i in range(len(ends) - 1)],
                "ts": ends[:-1],
                "dur": ends[1:] - ends[:-1],
            }
        )
        return _build_steps(trace, marks, "optimizer", select)
    if inference_steps is not None and inference_steps.loop:
        return _steps_of_inference(inference_steps, select)
    if trace.meta.format != KINETO:
        repeated = find_repeats(trace)
        if repeated is not None:
            return _build_steps(trace, *repeated, select)
    start, end = find_device_span(trace)
    trace_span = pl.DataFrame({"name": ["whole trace"], "ts": [start], "dur": [end - start]})
    return _build_steps(trace, trace_span, "whole trace", None)


def _build_layer_times_step(trace: Trace) -> Steps:
    """Return the single inference in a file of layer times, which its reader places back to
    back."""
    start, end = find_device_span(trace)
    is_used = np.ones(1, dtype=bool)
    starts, ends = np.array([start]), np.array([end])
    return Steps(
        _steps_table(pl.Series(["inference"]), starts, ends, ~is_used, is_used), LAYER_TIMES
    )


def recorded_extent(trace: Trace) -> tuple[int, int]:
    """Return the first start and last end of the work in the trace, ns, without the profiler's
    overhead rows."""
    frames = [
        trace.cpu.filter(pl.col("kind") != "overhead").select("ts", "dur"),
        trace.gpu.select("ts", "dur"),
    ]
    frames = [frame for frame in frames if frame.height]
    if not frames:
        return 0, max(trace.meta.end_ns, 0)
    events = pl.concat(frames)
    return int(events["ts"].min()), int((events["ts"] + events["dur"]).max())  # type: ignore[arg-type]


def find_device_span(trace: Trace) -> tuple[int, int]:
    """Return start and end of the analysed device's work, ns, or the ``recorded_extent`` without
    device work.

    Time before and after it is not idle time: the recording only began earlier or ended later. Work
    launched before the recording is excluded. So is a small amount of work before an unexplained
    wait: queued work that waits for no recorded reason waits for work missing from the file.
    """
    device = analyzed_device(trace)
    if device is None:
        return recorded_extent(trace)
    is_own = (trace.gpu["device"] == device).fill_null(
        False
    ).to_numpy() & ~launched_before_recording(trace)
    rows = trace.gpu.filter(is_own) if is_own.any() else trace.gpu
    rows = rows.sort("ts")
    ts, dur = rows["ts"].to_numpy(), rows["dur"].to_numpy()
    latest_end = np.maximum.accumulate(ts + dur)
    launch = rows["launch"].fill_null(-1).to_numpy().astype(np.int64)
    call_end = ts.copy()
    has_launch = launch >= 0
    calls = trace.cpu["ts"] + trace.cpu["dur"]
    call_end[has_launch] = calls.gather(launch[has_launch]).to_numpy()
    waits = ts[1:] - np.maximum(call_end[1:], latest_end[:-1])
    earlier_work = np.cumsum(dur)[:-1]
    leading_waits = np.flatnonzero(
        (waits > MAX_UNEXPLAINED_WAIT_NS) & (earlier_work <= MAX_LEADING_SHARE * dur.sum())
    )
    first_row = int(leading_waits[-1]) + 1 if len(leading_waits) else 0
    if latest_end[-1] <= ts[first_row]:
        return recorded_extent(trace)
    return int(ts[first_row]), int(latest_end[-1])


MAX_SUGGESTED = 1000
"""Maximum number of range names that an unknown name is compared with."""


def _find_named_steps(trace: Trace, pattern: str) -> tuple[pl.DataFrame, str]:
    """Find the ranges with this name on the thread of the first one, without ranges inside others,
    and the source name."""
    try:
        marks = _find_marks(trace, pattern)
    except pl.exceptions.ComputeError:
        raise AdvisorError(
            f"--steps {pattern}: neither a range A:B of step numbers, such as 2:8, nor a regular "
            "expression for the names of ranges"
        ) from None
    if marks.height:
        latest_end = (marks["ts"] + marks["dur"]).cum_max().shift(1).fill_null(marks["ts"][0])
        marks = marks.filter(marks["ts"] >= latest_end)
    if not marks.height or not marks["dur"].sum():
        ranges = trace.cpu.filter(pl.col("kind") == "annotation")["name"].value_counts(sort=True)
        names = [labels.clean(name) for name in ranges["name"].cast(pl.String)]
        fallback = f"there are {t.list_names(names, 8)}" if names else "there is none at all"
        hint = suggest(pattern, names[:MAX_SUGGESTED], fallback)
        raise AdvisorError(f"{trace.meta.path}: no range is named like {pattern!r}; {hint}")
    return marks, "ranges"


def _find_marks(trace: Trace, pattern: str) -> pl.DataFrame:
    names = trace.cpu.filter(pl.col("kind").is_in(["annotation", "op"])).select(
        "name", "ts", "dur", "thread"
    )
    unique = names["name"].unique().cast(pl.String)
    matching = unique.filter(unique.str.contains(pattern))
    marks = names.filter(pl.col("name").is_in(matching.cast(pl.Categorical).implode()))
    if not marks.height:
        return marks
    first_thread = marks.sort("ts")["thread"][0]
    return (
        marks.filter(pl.col("thread") == first_thread)
        .with_columns(pl.col("name").cast(pl.String))
        .sort("ts")
    )


def _drop_cut_start(marks: pl.DataFrame) -> pl.DataFrame:
    """Remove a first step if its length shows that the profiler was started in it."""
    dur = marks["dur"].to_numpy()
    is_cut = len(dur) > 2 and dur[0] < PARTIAL_SHARE * dur[1:].min()
    return marks[1:] if is_cut else marks


def _keep_main_name(marks: pl.DataFrame) -> pl.DataFrame:
    """Keep only the most frequent name (the first of equals). A loop with several optimizers, or
    with one that wraps another, has as many steps as one of them."""
    if not marks.height:
        return marks
    counts = marks.group_by("name", maintain_order=True).len()
    return marks.filter(pl.col("name") == counts["name"][int(counts["len"].arg_max() or 0)])


def _count_optimizers(trace: Trace, marks: pl.DataFrame) -> int:
    """Count the optimizers of the loop: the period of the operators between their steps, which
    differ from one step to the next, as with the two networks of a GAN."""
    ends = (marks["ts"] + marks["dur"]).to_numpy()
    if len(ends) <= MIN_OPTIMIZER_STEPS:
        return 1
    ops = trace.cpu.filter((pl.col("kind") == "op") & (pl.col("ts") >= ends[0]))
    interval = np.searchsorted(ends, ops["ts"].to_numpy(), side="right") - 1
    names = ops["name"].to_physical().to_numpy().astype(np.int64)
    is_complete = interval < len(ends) - 1
    counts = np.zeros((len(ends) - 1, int(names.max(initial=0)) + 1))
    np.add.at(counts, (interval[is_complete], names[is_complete]), 1)

    def differences(lag: int) -> np.ndarray:
        earlier, later = counts[:-lag], counts[lag:]
        total = np.maximum(1, (later + earlier).sum(1))
        result: np.ndarray = np.abs(later - earlier).sum(1) / total
        return result

    if np.median(differences(1)) <= SIMILAR_OPERATORS:
        return 1
    periods = range(2, min(_MAX_PERIOD, len(counts) // 2) + 1)
    return next((n for n in periods if differences(n).max() <= SIMILAR_OPERATORS), 1)


def _build_steps(
    trace: Trace, marks: pl.DataFrame, source: str, select: tuple[int | None, int | None] | None
) -> Steps:
    ts = marks["ts"].to_numpy().astype(np.int64)
    end = ts + marks["dur"].to_numpy()
    count = len(ts)
    if count > 1:
        # contiguous loops: a step lasts until the next one starts, but a long gap belongs to no
        # step
        following = ts[1:] - end[:-1]
        is_near = following <= 0.5 * np.median(np.diff(ts))
        end[:-1] = np.where(is_near, ts[1:], np.minimum(end[:-1], ts[1:]))
    ahead_ns = host_ns = host_marks = None
    on_device = None
    if source != "whole trace":
        on_device = device_steps(trace, ts, end, closed=source != "optimizer")
    calls = trace.cpu.filter(
        (pl.col("kind") == "annotation") & name_matches(trace.cpu["name"], LOADER)
    ).sort("ts")
    start, total = calls["ts"].to_numpy(), np.append(0, np.cumsum(calls["dur"].to_numpy()))
    waits: np.ndarray = total[np.searchsorted(start, end)] - total[np.searchsorted(start, ts)]
    if on_device is not None:
        ahead_ns, host_ns = on_device.ahead_ns, float(np.mean(end - ts))
        host_marks = pl.DataFrame({"ts": ts, "end": end, "dur": end - ts})
        ts, end = on_device.start, on_device.end
    else:
        last_end = _find_last_device_end(trace, int(ts[-1]), int(end[-1]))
        if last_end is not None and source != "optimizer":
            end[-1] = max(int(end[-1]), last_end)
        # with several steps, the first ran during that work, unless the host only waited for it
        require_waiting = count >= MIN_KEPT_STEPS
        drained = find_drain_time(trace, int(ts[0]), int(end[0]), held=require_waiting)
        if drained is not None:
            ts[0] = drained
    dur = end - ts
    is_chosen = np.zeros(count, dtype=bool)
    is_chosen[slice(*select) if select else slice(None)] = True
    marked_ns = dur if host_marks is None else end - host_marks["ts"].to_numpy()
    if count > 1 and is_chosen[:-1].any() and marked_ns[-1] < PARTIAL_SHARE * np.median(dur[:-1]):
        events = _count_host_events(trace, marks)
        is_chosen[-1] = events[-1] >= _MIN_WHOLE_SHARE * max(1, np.median(events[:-1]))
    if source in GUESSED_STEP_SOURCES:
        is_complete = np.zeros(count, dtype=bool)
        is_complete[without_fragments(dur >= SIMILAR_TIME * np.median(dur))] = True
        is_chosen &= is_complete
    is_outlier = _find_outliers(dur, is_chosen, waits)
    table = _steps_table(marks["name"], ts, end, is_outlier, is_chosen & ~is_outlier)
    return Steps(table, source, ahead_ns, host_ns, host_marks)


def _count_host_events(trace: Trace, marks: pl.DataFrame) -> np.ndarray:
    """Count the host events in each mark, without other marks."""
    times = trace.cpu.filter(pl.col("kind") != "annotation")["ts"].sort().to_numpy()
    ts = marks["ts"].to_numpy()
    last, first = (np.searchsorted(times, each) for each in (ts + marks["dur"].to_numpy(), ts))
    counts: np.ndarray = last - first
    return counts


def _steps_table(
    names: pl.Series, ts: np.ndarray, end: np.ndarray, outlier: np.ndarray, chosen: np.ndarray
) -> pl.DataFrame:
    """Build the columns of STEPS_SCHEMA. Steps without length are not used."""
    columns = {"index": np.arange(len(ts)), "name": names, "ts": ts, "end": end, "dur": end - ts}
    flags = {"outlier": outlier, "used": chosen & (end > ts)}
    return pl.DataFrame(columns | flags, schema_overrides=STEPS_SCHEMA)


def _steps_of_inference(
    inference_steps: InferenceSteps, select: tuple[int | None, int | None] | None
) -> Steps:
    """Build steps of inference, each with the time to the next one. No step is an outlier, because
    a prompt takes longer than a token. Calls outside the loop are not steps."""
    rows = np.flatnonzero(inference_steps.in_loop)
    table = inference_steps.table[rows]
    ts, end = (times[rows] for times in inference_steps.step_intervals)
    host = table.select("ts", "end", dur=pl.col("end") - pl.col("ts"))
    if len(ts) > 1:
        is_near = ts[1:] - end[:-1] <= 0.5 * np.median(np.diff(ts))
        end[:-1] = np.where(is_near, ts[1:], np.minimum(end[:-1], ts[1:]))
    is_chosen = np.zeros(len(ts), dtype=bool)
    is_chosen[slice(*select) if select else slice(None)] = True
    steps = _steps_table(table["name"], ts, end, np.zeros(len(ts), dtype=bool), is_chosen)
    ahead = None if table["ahead"].null_count() else float(table["ahead"].median() or 0)  # type: ignore[arg-type]
    runs_ahead = ahead is not None and ahead >= AHEAD_SHARE * float(np.median(end - ts))
    if not runs_ahead:
        return Steps(steps, inference_steps.source)
    host_period = float(np.diff(host["ts"]).mean()) if len(ts) > 1 else float(host["dur"][0])
    return Steps(steps, inference_steps.source, ahead, host_period, host)


def _find_last_device_end(trace: Trace, start: int, end: int) -> int | None:
    """Return the end of the last device work launched in [start, end)."""
    work = trace.gpu.filter(pl.col("launch").is_not_null())
    if not work.height:
        inside = trace.gpu.filter(pl.col("ts").is_between(start, end))
        return int((inside["ts"] + inside["dur"]).max()) if inside.height else None  # type: ignore[arg-type]
    launched = trace.cpu["ts"].gather(work["launch"])
    work = work.filter((launched >= start) & (launched < end))
    return int((work["ts"] + work["dur"]).max()) if work.height else None  # type: ignore[arg-type]


def longest_usual_step(
    dur: np.ndarray, factor: float = OUTLIER_FACTOR, deviations: float = OUTLIER_MADS
) -> float:
    """Return the duration above which a step is long: more than ``factor`` medians, and more than
    ``deviations`` median absolute deviations above the median."""
    median = float(np.median(dur))
    spread = float(np.median(np.abs(dur - median)))
    return max(factor * median, median + deviations * spread)


def _find_outliers(dur: np.ndarray, chosen: np.ndarray, waits: np.ndarray) -> np.ndarray:
    """Find long steps among the chosen, most extreme first, and keep at least three steps. Long
    steps that belong to the loop stay: they recur evenly, or several wait for the loader."""
    is_outlier = np.zeros(len(dur), dtype=bool)
    values = dur[chosen]
    if len(values) <= MIN_KEPT_STEPS:
        return is_outlier
    limit = longest_usual_step(values)
    candidates = np.flatnonzero(chosen & (dur > limit))
    if find_rhythm(np.flatnonzero(values > limit), values):
        return is_outlier
    waits_for_loader = candidates[dur[candidates] - waits[candidates] <= limit]
    if len(waits_for_loader) > 1:
        candidates = np.setdiff1d(candidates, waits_for_loader)
    candidates = candidates[np.argsort(-dur[candidates])]
    is_outlier[candidates[: len(values) - MIN_KEPT_STEPS]] = True
    return is_outlier


def find_rhythm(long: np.ndarray, dur: np.ndarray) -> int | None:
    """Return the period of long steps, in steps, or ``None`` if they do not recur evenly.

    Long steps (indices in ``dur``) of similar length at even distances throughout the window
    belong to the loop: with n loader workers that cannot keep up, every n-th step waits for all
    of them."""
    if len(long) < 2:
        return None
    distance = np.diff(long)
    mean_distance = float(distance.mean())
    is_even = (
        2 <= round(mean_distance) <= _MAX_PERIOD
        and np.ptp(distance) <= 1
        and long[0] <= mean_distance
        and len(dur) - long[-1] <= mean_distance + 1
        and dur[long].max() <= MAX_PERIODIC_RATIO * dur[long].min()
    )
    return round(mean_distance) if is_even else None


def forward_only(a: Analysis) -> bool:
    """Return whether the recording shows a loop that does not train: the recorder saw forwards but
    neither backward nor optimizer, or a trace has operators without a backward or an optimizer's
    step. A trace without operators does not show it; a snapshot alone does, by
    ``PeakMemory.trains``."""
    run_steps = a.run_steps
    if run_steps is not None:
        if run_steps.inference:
            return True
        if any(step.phases.keys() & {"backward", "optimizer"} for step in run_steps.steps):
            return False
    cpu = a.trace.cpu
    if not name_matches(cpu["name"], r"^aten::").any():
        return a.record_only and {peak.trains for peak in a.peak_memories} == {False}
    return not has_training_rows(a.trace)


def rows_in_steps(a: Analysis, rows: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return the rows of ``trace.cpu`` that begin in the analysed steps, by the host's marks. If
    the host runs ahead, the device runs their work later."""
    ts = a.trace.cpu["ts"].to_numpy()[rows]
    return rows[covered_length(ts, ts + 1, a.steps.host_spans) > 0]
