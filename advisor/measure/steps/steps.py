"""Steps: the spans of time that are analysed, and how they were found."""

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
    analysed_device,
    device_steps,
    find_drain_time,
    launched_before_recording,
)
from advisor.measure.host.names import OPTIMIZER_STEP, name_matches
from advisor.measure.inference.passes import ENGINE, ForwardPasses, find_passes, has_training_rows
from advisor.measure.steps.unmarked_steps import SIMILAR_TIME, find_repeats, without_fragments

if TYPE_CHECKING:
    from advisor.measure import Analysis

MIN_OPTIMIZER_STEPS = 3
OUTLIER_FACTOR = 1.5
"""Medians above which a step, also more than 5 median absolute deviations away, is measured but set
aside; gpuprof calls a first step an outlier at 3x, Hampel's test uses 3 MAD."""
OUTLIER_MADS = 5.0
MIN_STEPS_LEFT = 3
MAX_RHYTHM = 16
"""Longest distance of recurring long steps, in steps; few ranks have more loader workers."""
RHYTHM_SPREAD = 2.5
"""Ratio of the longest to the shortest of them, at most."""
HOLE_NS = 1_000_000
"""Longest time that queued work of an idle device may wait for nothing that is recorded; launch
latency is some 10 us."""
LEAD_SHARE = 0.01
"""Part of all device work that may lie before such a hole for the figures to begin after it."""
PARTIAL_SHARE = 0.25
"""A last step shorter than this share of the median was cut off by the end of the recording. A
first one shorter than this share of every other was cut off by its begin."""

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
    ``ProfilerStep`` (or what other frameworks call their marks, ``TraceMeta.step_marks``),
    ``engine``, ``recorder``, ``optimizer``, ``module calls``, ``vocabulary look-ups``, ``ranges``,
    ``layer times``,
    one of ``GUESSED_STEP_SOURCES`` or ``whole trace``.

    Where the host runs ahead of the device, a step is the device's period, from the first work of a
    step to the first of the next (``launches.py``): ``ahead_ns`` is the time that the work of a
    step waits in the queue, and ``host_ns`` the mean step by the host's own marks."""

    table: pl.DataFrame
    source: str
    ahead_ns: float | None = None
    host_ns: float | None = None
    launched: pl.DataFrame | None = None
    """Rows of ``table`` as the host marked them (``ts``, ``end``, ``dur``), where it runs ahead."""

    @property
    def marks(self) -> pl.DataFrame:
        """Rows of ``table`` with the host's times: what it launched in them is a step's work."""
        if self.launched is None:
            return self.table
        return self.table.with_columns(self.launched.get_columns())

    @property
    def are_numbered(self) -> bool:
        """Whether the program marked the steps: one of the same name is the same on other ranks."""
        return self.source in ("ProfilerStep", "recorder", *STEP_MARKS[:2])

    @cached_property
    def used(self) -> pl.DataFrame:
        return self.table.filter("used")

    @cached_property
    def spans(self) -> Intervals:
        """Instants that count, ns."""
        return union(self.used["ts"].to_numpy(), self.used["end"].to_numpy())

    @cached_property
    def host_spans(self) -> Intervals:
        """Instants that count, by the host's times, ns."""
        used = self.marks.filter("used")
        return union(used["ts"].to_numpy(), used["end"].to_numpy())


def rename_step_mark(name: str) -> str:
    """Rename a mark that is none of PyTorch's to ``step N`` (``TraceMeta.step_marks``)."""
    return re.sub(r"^(?:step #|ProfilerStep\s*#?)(?=\d+$)", "step ", name)


def require_window(run: Run, consequence: str) -> None:
    """Raise AdvisorError, with what follows from it, where no rank has a profiled window."""
    if not run.traces:
        raise AdvisorError(f"{run.path or 'run'}: no profiled window, so {consequence}")


def require_used_steps(steps: Steps, path: str, rank: int, *, selected: bool) -> None:
    """Check that a step counts. Raises AdvisorError: the steps ``selected`` by hand are others, or
    the marks have no length."""
    if steps.used.height or not steps.table.height:
        return
    count = steps.table.height
    whose = f"{count} steps" + (f" of rank {rank}" if rank >= 0 else "")
    if selected:
        raise AdvisorError(
            f"{path}: --steps selects none of the {whose}; give 0:{count} or a part of it"
        )
    what = "it spans no time" if steps.source == "whole trace" else f"its {whose} have no length"
    raise AdvisorError(f"{path}: {what}, so there is nothing to measure; record the trace again")


def step_of(steps: Steps, start: np.ndarray, end: np.ndarray | None = None) -> pl.Series:
    """Return the index of the first used step that each interval [start, end) touches; null: none.
    Without ``end``, of the step that each instant lies in."""
    used = steps.used
    begin, finish = used["ts"].to_numpy(), used["end"].to_numpy()
    if not len(begin) or not len(start):
        return pl.Series([None], dtype=pl.Int32).new_from_index(0, len(start))
    until = start + 1 if end is None else np.maximum(end, start + 1)
    place = np.searchsorted(finish, start, side="right")
    position = np.minimum(place, len(begin) - 1)
    touches = (place < len(begin)) & (begin[position] < until)
    index = used["index"].gather(position)
    return index.set(pl.Series(~touches), None)


def step_of_call(steps: Steps, start: np.ndarray) -> pl.Series:
    """Return the same of calls on the host, by its own marks: where the host runs ahead, the steps
    of the device come later."""
    return step_of(replace(steps, table=steps.marks), start)


def find_steps(trace: Trace, select: tuple[int | None, int | None] | None = None) -> Steps:
    """Find the steps: the ranges that were said to be steps, else the marks of an inference engine,
    else ProfilerStep ranges, else the recorder's ``advisor::step`` ranges, else the period of
    ``Optimizer.step``, else the calls of a model that only infers (``inference/passes.py``); in
    formats without marks of their own the range or the sequence of device work that repeats
    (``unmarked_steps.py``); else the whole trace.

    Raises AdvisorError: no range is named as was said.

    A step ends where the next one starts; the last one ends with its own range, or with the last
    device work launched inside it if that is later. Where the host runs ahead, steps are the
    device's. ``select`` is a half-open range of indices
    (negative ones count from the end); outliers among what it leaves are set aside, but never
    below three steps."""
    if trace.meta.step_ranges is not None:
        return _finish(trace, *_named_steps(trace, trace.meta.step_ranges), select)
    if trace.meta.layer_times:
        return _sum_of_layers(trace)
    passes = find_passes(trace)
    if passes is not None and passes.source == ENGINE:
        return _of_passes(passes, select)
    for source, pattern in (
        ("ProfilerStep", trace.meta.step_names),
        ("recorder", r"^advisor::step\b"),
    ):
        marks = _marks(trace, pattern)
        if not marks.height:
            continue
        if source == "ProfilerStep" and trace.meta.step_marks is not None:
            source = trace.meta.step_marks
            marks = marks.with_columns(pl.Series("name", map(rename_step_mark, marks["name"])))
        return _finish(trace, _without_cut_start(marks), source, select)
    marks = _one_name(_marks(trace, OPTIMIZER_STEP))
    if marks.height > MIN_OPTIMIZER_STEPS:
        # one step: from the end of one Optimizer.step to the end of the next
        ends = (marks["ts"] + marks["dur"]).to_numpy()
        marks = pl.DataFrame(
            {
                "name": [f"optimizer step {i + 1}" for i in range(len(ends) - 1)],
                "ts": ends[:-1],
                "dur": ends[1:] - ends[:-1],
            }
        )
        return _finish(trace, marks, "optimizer", select)
    if passes is not None and passes.loop:
        return _of_passes(passes, select)
    if trace.meta.format != KINETO:
        repeated = find_repeats(trace)
        if repeated is not None:
            return _finish(trace, *repeated, select)
    start, end = find_device_span(trace)
    whole = pl.DataFrame({"name": ["whole trace"], "ts": [start], "dur": [end - start]})
    return _finish(trace, whole, "whole trace", None)


def _sum_of_layers(trace: Trace) -> Steps:
    """Return the one inference of a file of layer times, which its reader puts back to back."""
    start, end = find_device_span(trace)
    one = np.ones(1, dtype=bool)
    begin, finish = np.array([start]), np.array([end])
    return Steps(_steps_table(pl.Series(["inference"]), begin, finish, ~one, one), LAYER_TIMES)


def recorded_extent(trace: Trace) -> tuple[int, int]:
    """Return the first start and last end of the work in the trace, ns, without the profiler's
    overhead rows."""
    frames = [
        trace.cpu.filter(pl.col("kind") != "overhead").select("ts", "dur"),
        trace.gpu.select("ts", "dur"),
    ]
    frames = [f for f in frames if f.height]
    if not frames:
        return 0, max(trace.meta.end_ns, 0)
    both = pl.concat(frames)
    return int(both["ts"].min()), int((both["ts"] + both["dur"]).max())  # type: ignore[arg-type]


def find_device_span(trace: Trace) -> tuple[int, int]:
    """Return start and end of the analysed device's work, ns; without device work the
    ``recorded_extent``.

    The device is not idle before and after it: the recording only began earlier or ended later.
    Work launched before the recording is not in it. Neither is what little work comes before a
    hole: queued work that waits for nothing recorded waits for work that was cut out of the file.
    """
    device = analysed_device(trace)
    if device is None:
        return recorded_extent(trace)
    own = (trace.gpu["device"] == device).fill_null(False).to_numpy() & ~launched_before_recording(
        trace
    )
    rows = trace.gpu.filter(own) if own.any() else trace.gpu
    rows = rows.sort("ts")
    ts, dur = rows["ts"].to_numpy(), rows["dur"].to_numpy()
    until = np.maximum.accumulate(ts + dur)
    launch = rows["launch"].fill_null(-1).to_numpy().astype(np.int64)
    returned = ts.copy()
    known = launch >= 0
    calls = trace.cpu["ts"] + trace.cpu["dur"]
    returned[known] = calls.gather(launch[known]).to_numpy()
    waits = ts[1:] - np.maximum(returned[1:], until[:-1])
    before = np.cumsum(dur)[:-1]
    holes = np.flatnonzero((waits > HOLE_NS) & (before <= LEAD_SHARE * dur.sum()))
    first = int(holes[-1]) + 1 if len(holes) else 0
    if until[-1] <= ts[first]:
        return recorded_extent(trace)
    return int(ts[first]), int(until[-1])


MAX_SUGGESTED = 1000
"""Number of names of ranges that an unknown one is compared with."""


def _named_steps(trace: Trace, pattern: str) -> tuple[pl.DataFrame, str]:
    """Find the ranges of that name on the thread that has the first of them, without those inside
    others, and what to call them."""
    try:
        marks = _marks(trace, pattern)
    except pl.exceptions.ComputeError:
        raise AdvisorError(f"--steps {pattern}: not a regular expression") from None
    if marks.height:
        before = (marks["ts"] + marks["dur"]).cum_max().shift(1).fill_null(marks["ts"][0])
        marks = marks.filter(marks["ts"] >= before)
    if not marks.height or not marks["dur"].sum():
        ranges = trace.cpu.filter(pl.col("kind") == "annotation")["name"].value_counts(sort=True)
        known = [labels.clean(name) for name in ranges["name"].cast(pl.String)]
        there = f"there are {t.list_names(known, 8)}" if known else "there is none at all"
        near = suggest(pattern, known[:MAX_SUGGESTED], there)
        raise AdvisorError(f"{trace.meta.path}: no range is named like {pattern!r}; {near}")
    return marks, "ranges"


def _marks(trace: Trace, pattern: str) -> pl.DataFrame:
    names = trace.cpu.filter(pl.col("kind").is_in(["annotation", "op"])).select(
        "name", "ts", "dur", "thread"
    )
    unique = names["name"].unique().cast(pl.String)
    wanted = unique.filter(unique.str.contains(pattern))
    marks = names.filter(pl.col("name").is_in(wanted.cast(pl.Categorical).implode()))
    if not marks.height:
        return marks
    first = marks.sort("ts")["thread"][0]
    return (
        marks.filter(pl.col("thread") == first)
        .with_columns(pl.col("name").cast(pl.String))
        .sort("ts")
    )


def _without_cut_start(marks: pl.DataFrame) -> pl.DataFrame:
    """Leave out a first step that the profiler was started in, by its length."""
    dur = marks["dur"].to_numpy()
    cut = len(dur) > 2 and dur[0] < PARTIAL_SHARE * dur[1:].min()
    return marks[1:] if cut else marks


def _one_name(marks: pl.DataFrame) -> pl.DataFrame:
    """Keep only the most frequent name (the first of equals): a loop with several optimizers, or
    with one that wraps another, has as many steps as one of them."""
    if not marks.height:
        return marks
    counts = marks.group_by("name", maintain_order=True).len()
    return marks.filter(pl.col("name") == counts["name"][int(counts["len"].arg_max() or 0)])


def _finish(
    trace: Trace, marks: pl.DataFrame, source: str, select: tuple[int | None, int | None] | None
) -> Steps:
    ts = marks["ts"].to_numpy().astype(np.int64)
    end = ts + marks["dur"].to_numpy()
    count = len(ts)
    if count > 1:
        # contiguous loops: a step lasts until the next one starts; a real gap is not a step
        following = ts[1:] - end[:-1]
        near = following <= 0.5 * np.median(np.diff(ts))
        end[:-1] = np.where(near, ts[1:], np.minimum(end[:-1], ts[1:]))
    ahead_ns = host_ns = launched_in = None
    queue = None
    if source != "whole trace":
        queue = device_steps(trace, ts, end, closed=source != "optimizer")
    waits = _loader_waits(trace, ts, end)
    if queue is not None:
        ahead_ns, host_ns = queue.ahead_ns, float(np.mean(end - ts))
        launched_in = pl.DataFrame({"ts": ts, "end": end, "dur": end - ts})
        ts, end = queue.start, queue.end
    else:
        launched = _last_device_end(trace, int(ts[-1]), int(end[-1]))
        if launched is not None and source != "optimizer":
            end[-1] = max(int(end[-1]), launched)
        # one of several steps ran on beside that work, unless the host did nothing but wait for it
        held = count >= MIN_STEPS_LEFT
        waited_until = find_drain_time(trace, int(ts[0]), int(end[0]), held=held)
        if waited_until is not None:
            ts[0] = waited_until
    dur = end - ts
    chosen = np.zeros(count, dtype=bool)
    chosen[slice(*select) if select else slice(None)] = True
    marked = dur if launched_in is None else end - launched_in["ts"].to_numpy()
    if count > 1 and chosen[:-1].any() and marked[-1] < PARTIAL_SHARE * np.median(dur[:-1]):
        chosen[-1] = False  # the profiler stopped inside it
    if source in GUESSED_STEP_SOURCES:
        whole = np.zeros(count, dtype=bool)
        whole[without_fragments(dur >= SIMILAR_TIME * np.median(dur))] = True
        chosen &= whole
    outlier = _outliers(dur, chosen, waits)
    table = _steps_table(marks["name"], ts, end, outlier, chosen & ~outlier)
    return Steps(table, source, ahead_ns, host_ns, launched_in)


def _steps_table(
    names: pl.Series, ts: np.ndarray, end: np.ndarray, outlier: np.ndarray, chosen: np.ndarray
) -> pl.DataFrame:
    """Build the columns of STEPS_SCHEMA; steps of no length are not used."""
    columns = {"index": np.arange(len(ts)), "name": names, "ts": ts, "end": end, "dur": end - ts}
    flags = {"outlier": outlier, "used": chosen & (end > ts)}
    return pl.DataFrame(columns | flags, schema_overrides=STEPS_SCHEMA)


def _of_passes(passes: ForwardPasses, select: tuple[int | None, int | None] | None) -> Steps:
    """Build steps of inference, each with the time to the next one. None is an outlier: a prompt
    takes longer than a token. Other calls than those of the loop are no steps."""
    rows = np.flatnonzero(passes.in_loop)
    table = passes.table[rows]
    ts, end = (times[rows] for times in passes.pass_intervals)
    host = table.select("ts", "end", dur=pl.col("end") - pl.col("ts"))
    if len(ts) > 1:
        near = ts[1:] - end[:-1] <= 0.5 * np.median(np.diff(ts))
        end[:-1] = np.where(near, ts[1:], np.minimum(end[:-1], ts[1:]))
    chosen = np.zeros(len(ts), dtype=bool)
    chosen[slice(*select) if select else slice(None)] = True
    result = _steps_table(table["name"], ts, end, np.zeros(len(ts), dtype=bool), chosen)
    ahead = None if table["ahead"].null_count() else float(table["ahead"].median() or 0)  # type: ignore[arg-type]
    runs_ahead = ahead is not None and ahead >= AHEAD_SHARE * float(np.median(end - ts))
    if not runs_ahead:
        return Steps(result, passes.source)
    apart = float(np.diff(host["ts"]).mean()) if len(ts) > 1 else float(host["dur"][0])
    return Steps(result, passes.source, ahead, apart, host)


def _last_device_end(trace: Trace, start: int, end: int) -> int | None:
    """Return the end of the last device work whose launch lies in [start, end)."""
    work = trace.gpu.filter(pl.col("launch").is_not_null())
    if not work.height:
        inside = trace.gpu.filter(pl.col("ts").is_between(start, end))
        return int((inside["ts"] + inside["dur"]).max()) if inside.height else None  # type: ignore[arg-type]
    launched = trace.cpu["ts"].gather(work["launch"])
    work = work.filter((launched >= start) & (launched < end))
    return int((work["ts"] + work["dur"]).max()) if work.height else None  # type: ignore[arg-type]


def _loader_waits(trace: Trace, ts: np.ndarray, end: np.ndarray) -> np.ndarray:
    """Return the time in calls for the next batch that began in each step, ns."""
    calls = trace.cpu.filter(
        (pl.col("kind") == "annotation") & name_matches(trace.cpu["name"], LOADER)
    ).sort("ts")
    start, total = calls["ts"].to_numpy(), np.append(0, np.cumsum(calls["dur"].to_numpy()))
    waits: np.ndarray = total[np.searchsorted(start, end)] - total[np.searchsorted(start, ts)]
    return waits


def longest_usual_step(
    dur: np.ndarray, factor: float = OUTLIER_FACTOR, deviations: float = OUTLIER_MADS
) -> float:
    """Return the duration above which a step is long: more than ``factor`` medians, and more than
    so many median absolute deviations above the median."""
    median = float(np.median(dur))
    spread = float(np.median(np.abs(dur - median)))
    return max(factor * median, median + deviations * spread)


def _outliers(dur: np.ndarray, chosen: np.ndarray, waits: np.ndarray) -> np.ndarray:
    """Find long steps among the chosen, most extreme first, as long as three steps are left. Those
    that belong to the loop stay: they come back evenly, or wait for the loader more than once."""
    outlier = np.zeros(len(dur), dtype=bool)
    values = dur[chosen]
    if len(values) <= MIN_STEPS_LEFT:
        return outlier
    limit = longest_usual_step(values)
    candidates = np.flatnonzero(chosen & (dur > limit))
    if find_rhythm(np.flatnonzero(values > limit), values):
        return outlier
    fed_late = candidates[dur[candidates] - waits[candidates] <= limit]
    if len(fed_late) > 1:
        candidates = np.setdiff1d(candidates, fed_late)
    candidates = candidates[np.argsort(-dur[candidates])]
    outlier[candidates[: len(values) - MIN_STEPS_LEFT]] = True
    return outlier


def find_rhythm(long: np.ndarray, dur: np.ndarray) -> int | None:
    """Return the period of long steps, in steps; ``None`` if they do not come back evenly.

    Long steps (places in ``dur``) at even distances all through the window, all about as long, are
    the loop's own pace: with n loader workers that cannot keep up, every n-th step waits for all of
    them."""
    if len(long) < 2:
        return None
    distance = np.diff(long)
    apart = float(distance.mean())
    even = (
        2 <= round(apart) <= MAX_RHYTHM
        and np.ptp(distance) <= 1
        and long[0] <= apart
        and len(dur) - long[-1] <= apart + 1
        and dur[long].max() <= RHYTHM_SPREAD * dur[long].min()
    )
    return round(apart) if even else None


def forward_only(a: Analysis) -> bool:
    """Return whether the loop does not train, as far as is recorded: the recorder saw forwards and
    nothing learnt, or a trace has operators and neither a backward nor an optimizer's step. A trace
    without operators does not tell; a snapshot alone does, by ``PeakMemory.trains``."""
    recorded = a.recorded
    if recorded is not None:
        if recorded.inference:
            return True
        if any(step.phases.keys() & {"backward", "optimizer"} for step in recorded.steps):
            return False
    cpu = a.trace.cpu
    if not name_matches(cpu["name"], r"^aten::").any():
        return a.record_only and {peak.trains for peak in a.peak_memories} == {False}
    return not has_training_rows(a.trace)


def rows_in_steps(a: Analysis, rows: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return those rows of ``trace.cpu`` that begin in the analysed steps, as the host marks
    them. Where it runs ahead, the device runs their work later."""
    ts = a.trace.cpu["ts"].to_numpy()[rows]
    return rows[covered_length(ts, ts + 1, a.steps.host_spans) > 0]
