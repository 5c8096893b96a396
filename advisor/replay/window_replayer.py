"""Replays of the measured steps, with and without edits, and the quality of the replay."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import NamedTuple

import numpy as np
import polars as pl
from msgspec.structs import replace

from advisor.core.finding import LAYER_TIMES, Edit, RangeCause
from advisor.core.intervals import Array, union
from advisor.measure import Analysis
from advisor.measure.host.names import WORKERS, name_matches
from advisor.measure.steps.run_steps import MIN_AROUND, MIN_PROFILED, RunSteps
from advisor.replay.edited_graph import EditedGraph, GraphEdits
from advisor.replay.exposed_time import ExposedTime
from advisor.replay.graph import NEVER, EdgeKind, Graph
from advisor.replay.graph_builder import build_graph
from advisor.replay.ledger import widened_by_kind
from advisor.replay.operations import collect
from advisor.replay.replay import ReplayedSteps, ReplayPlan, completion_times
from advisor.replay.replay_quality import (
    EXPLAINED_NS,
    ReplayQuality,
    device_idle,
    host_waits,
    measure_hard_parts,
    path_composition,
)
from advisor.replay.selection import Selection

EVENT_COST_NS = {"plain": 800.0, "shapes": 600.0, "python": 500.0}
"""Approximate host time that the profiler adds to each event: 0.8 µs, with shapes 1.4 (PyTorch
2.13, CPU; most relevant for small operators). A Python frame costs 0.6 times as much as a plain
event: 0.35 and 0.57 µs on a faster CPU, for 917 frames and 1,141 operators per step, the fastest of
300 steps without and of 60 with the profiler."""
MAX_VISIBLE_BUSY_SHARE = 0.8
"""Maximum busy share of the device at which host time is not hidden behind it."""
MAX_COST = 3.0
"""Maximum measured cost of an event, in multiples of the usual cost."""
PROFILER_ASSUMPTIONS = ("unprofiled", "profiled", "unprofiled_min", "unprofiled_max")
"""Assumptions about the measurement, not about edits."""
MAX_HIDDEN_COST = 8.0
"""Maximum cost of an event if the step is limited by the device, which hides it, in multiples of
the usual cost. Host-bound steps cost up to 5.7 times as much; h100/doc_finder at least 8, as its
cured step shows, in which the host is no longer hidden."""
MIN_HOST_SHARE_LEFT = 0.3
"""Minimum share of host time between two points that remains without the profiler."""
MAX_OWN_LAUNCHES, MIN_SILENT = 0.10, 0.50
"""Maximum share of the launches, and minimum share of the steps without recorded work, at which the
thread of the steps only waits for launching threads."""
_MIN_LAUNCHES = 10
"""Minimum number of launches that show which threads launch."""
NOTHING_RECORDED = ("unknown", "unrecorded")


def event_cost(a: Analysis) -> float:
    """Return the host time that the profiler adds to each event, ns: measured if a recorded run has
    steps with and without the profiler and shows host time, else ``EVENT_COST_NS``.

    The measurement is the median profiled step minus the median step around the window, over the
    host events of a step on all threads that launch work: the backward pass has its own thread, and
    the main thread waits for it. On a device that is hardly ever idle the cost is hidden, so the
    difference does not show it. The same is true if steps differ so much that its standard error
    exceeds the usual cost. It is bounded, because steps differ for other reasons too."""
    usual_cost = _mean_cost(a)
    if a.run_steps is None or a.trace.main_thread is None:
        return usual_cost
    if a.device_id is not None and a.breakdown.busy.total > MAX_VISIBLE_BUSY_SHARE * a.span_ns:
        return usual_cost
    profiler_ns, error = _measure_profiler_time(a)
    if error * a.step_count > usual_cost * launching_events(a):
        return usual_cost
    return min(max(0.0, profiler_ns) * a.step_count / launching_events(a), MAX_COST * usual_cost)


def _measure_profiler_time(a: Analysis) -> tuple[float, float]:
    """Return by how much the median profiled step is longer than the steps around the window, and
    the standard error, ns, which is infinite without enough steps of both."""
    assert a.run_steps is not None
    profiled, without = _host_times(a.run_steps, a.trace.meta.window)
    if len(profiled) < MIN_PROFILED or len(without) < MIN_AROUND:
        return 0.0, np.inf
    error = float(np.hypot(median_error(profiled), median_error(without)))
    return float(np.median(profiled) - np.median(without)), error


def launching_events(a: Analysis) -> float:
    """Count host events of the used steps on the main thread and on launching threads, at least
    1."""
    cpu = a.trace.cpu
    is_launching = (cpu["thread"] == a.trace.main_thread).to_numpy()
    launching = cpu["thread"].gather(a.trace.gpu["launch"].drop_nulls().unique())
    is_launching |= cpu["thread"].is_in(launching.unique().implode()).fill_null(False).to_numpy()
    ts = cpu["ts"].to_numpy()[is_launching]
    start, end = a.steps.used["ts"].to_numpy(), a.steps.used["end"].to_numpy()
    starts = np.sort(ts)
    return max(1.0, float((np.searchsorted(starts, end) - np.searchsorted(starts, start)).sum()))


def _host_times(run_steps: RunSteps, window: int) -> tuple[Array, Array]:
    """Return times of the window's steps (of all windows if it kept too few), and of the unprofiled
    steps around them, ns. If the host runs ahead, these are host times."""
    is_kept = run_steps.kept_by_window(window)
    if is_kept.sum() < MIN_PROFILED:
        is_kept = run_steps.active
    if run_steps.host_is_ahead:
        return run_steps.dur[is_kept].astype(float), run_steps.dur[run_steps.used].astype(float)
    in_window = run_steps.durations[is_kept]
    return in_window[~np.isnan(in_window)], run_steps.durations_around(is_kept)


def median_error(values: Array) -> float:
    """Return the standard error of a median, for a normal distribution with the same median
    deviation."""
    deviation = 1.4826 * float(np.median(np.abs(values - np.median(values))))
    return 1.2533 * deviation / float(np.sqrt(len(values)))


def _usual_costs(a: Analysis) -> Array:
    """Return the host time that the profiler usually adds, ns, by row of ``trace.cpu``."""
    plain, shapes, python = EVENT_COST_NS.values()
    plain += shapes if a.trace.meta.record_shapes else 0.0
    return np.where((a.trace.cpu["kind"] == "python").to_numpy(), python, plain)


def _mean_cost(a: Analysis) -> float:
    """Return the profiler's usual mean cost of an event of the main thread, ns."""
    if a.trace.main_thread is None:
        return EVENT_COST_NS["plain"]
    on_main_thread = (a.trace.cpu["thread"] == a.trace.main_thread).fill_null(False).to_numpy()
    costs = _usual_costs(a)[on_main_thread]
    return float(costs.mean()) if len(costs) else EVENT_COST_NS["plain"]


class GainRange(NamedTuple):
    """Time saved per step, ns, and what decides the ends of its range."""

    gain: float
    low: float
    high: float
    bound: float = float("inf")
    """Upper limit of the range: the time that the edits touch, ns."""
    low_by: RangeCause = ""
    high_by: RangeCause = ""

    @property
    def limited(self) -> GainRange:
        """Range cut at its upper limit."""
        high = max(self.gain, min(self.high, self.bound))
        return self._replace(low=min(self.low, self.gain), high=high, bound=float("inf"))


class WindowReplayer:
    """Replayer of one window of one rank. All times are in ns. A collective takes its measured
    time, including waits for other ranks. ``profiled`` is False for a simulated trace, whose host
    times no profiler made longer."""

    def __init__(self, a: Analysis, rank: int = 0, *, profiled: bool = True) -> None:
        self.a = a
        self.profiled = profiled
        self.rank = rank
        self._shares: dict[float, Array] = {}
        self._unprofiled_steps: dict[tuple[Edit, ...], tuple[Array, Array, EditedGraph]] = {}
        self._exposed = ExposedTime(a)

    @cached_property
    def graph(self) -> Graph:
        """Dependency graph of the representative steps."""
        return build_graph(self.a)

    @cached_property
    def plan(self) -> ReplayPlan:
        """Layout of the graph for replaying."""
        return ReplayPlan(self.graph)

    @cached_property
    def steady_ns(self) -> float:
        """Steady-state time of a step replayed alone and without edits."""
        return self.plan.steady_step()

    @cached_property
    def _periods(self) -> dict[tuple[tuple[Edit, ...], str], float]:
        return {}

    @cached_property
    def _selected(self) -> Selection:
        return Selection(self.a, self.graph)

    @cached_property
    def unedited(self) -> ReplayedSteps:
        return self.step_times([])

    @cached_property
    def measured(self) -> ReplayedSteps:
        return ReplayedSteps(
            self.graph.time, completion_times(self.graph, self.graph.time), self.graph.cycle_steps
        )

    def _step_error(self, time: Array) -> float:
        measured = np.diff(completion_times(self.graph, self.graph.time))
        replayed = np.diff(completion_times(self.graph, time))
        return float(np.abs(replayed - measured).sum()) / max(float(measured.sum()), 1.0)

    def step_times(self, edits: Sequence[Edit]) -> ReplayedSteps:
        """Replay with edits applied, and return the times of nodes and steps."""
        time, _, edited = self._replay(edits)
        return ReplayedSteps(time, completion_times(edited.graph, time), self.graph.cycle_steps)

    def _replay(
        self, edits: Sequence[Edit], assumption: str = "", times: float = 0.0
    ) -> tuple[Array, Array, EditedGraph]:
        """Return times of the nodes, their durations, and the graph, minus ``times`` the profiler's
        usual host time."""
        real_share = self._real_share(times)
        edited = collect(self._selected, self._own_edits(edits), assumption).build(real_share)
        return self._get_plan(edited.graph).run(edited.weight, edited.dur), edited.dur, edited

    def _own_edits(self, edits: Sequence[Edit]) -> list[Edit]:
        return [e for e in edits if e.rank in (None, self.rank) or e.op == "remove_skew"]

    @cached_property
    def knows_unprofiled_steps(self) -> bool:
        """Whether the run's own steps, most of which are not profiled, are known. Gains of a
        recorded run are for steps without the profiler: its host time would lengthen the steps
        after a fix, and a fix cannot save the time that the profiler adds to launches."""
        run_steps = self.a.run_steps
        if run_steps is None:
            return False
        return run_steps.host_is_ahead or run_steps.median_around(run_steps.active) is not None

    @property
    def reference_ns(self) -> float:
        """Step from which gains are saved: the run's own step, replayed, else the measured step."""
        return self.period() if self.knows_unprofiled_steps else self.a.step_ns

    def _choose_assumption(self, edits: Sequence[Edit]) -> str:
        """Return the assumption of the central estimate. The profiler lengthens launches most: if
        no steps without it are recorded, its usual cost is not part of the gain of dropped
        launches."""
        if not self.profiled or self.a.run_steps is not None:
            return ""
        return "unprofiled" if any(edit.op == "drop_launch" for edit in edits) else ""

    def period(self, edits: Sequence[Edit] = (), assumption: str = "") -> float:
        """Return the steady-state time of a step with edits applied. ``assumption``: ``low`` or
        ``high`` (a small or large gain); ``unprofiled`` and ``profiled``: without and with the
        profiler's own host time; ``unprofiled_min`` and ``unprofiled_max``: without its minimum and
        its maximum."""
        if assumption not in PROFILER_ASSUMPTIONS and all(
            e.best_factor is None
            and e.worst_factor is None
            and e.op != "parallelize"
            and not e.ahead
            for e in edits
        ):
            assumption = ""
        key = (tuple(edits), assumption)
        if key not in self._periods:
            self._periods[key] = self._measure_steady(edits, assumption)
        return self._periods[key]

    def _measure_steady(self, edits: Sequence[Edit], assumption: str) -> float:
        times = {
            "profiled": 0.0,
            "unprofiled_min": self._min_cost_ratio,
            "unprofiled": self._usual_cost_ratio,
            "unprofiled_max": self._max_cost_ratio,
        }.get(assumption, self._unprofiled_step_ratio)
        assumption = "" if assumption in PROFILER_ASSUMPTIONS else assumption
        if assumption == "low" and (
            uncertain := [e for e in edits if e.op == "overlap" and e.worst_factor is not None]
        ):
            certain = [replace(e, worst_factor=None) if e in uncertain else e for e in edits]
            others = [e for e in edits if e not in uncertain]
            share = max(e.worst_factor or 0.0 for e in uncertain)
            return share * self.period(others, "low") + (1 - share) * self.period(certain, "low")
        real_share = self._real_share(times)
        edited = collect(self._selected, self._own_edits(edits), assumption).build(real_share)
        return self._get_plan(edited.graph).steady_step(edited.weight, edited.dur)

    def _get_plan(self, graph: Graph) -> ReplayPlan:
        return self.plan if graph is self.graph else ReplayPlan(graph)

    def gain(self, edits: Sequence[Edit], applied: Sequence[Edit] = ()) -> float:
        """Return what edits save per step, in addition to applied edits."""
        saved = (
            self._saved(each, self._choose_assumption(each))
            for each in ([*applied, *edits], applied)
        )
        return next(saved) - next(saved)

    def _saved(self, edits: Sequence[Edit], assumption: str) -> float:
        """Return what edits save, at most the time that they select. Savings of a step with more or
        less of the profiler's host time are scaled to the run's own step."""
        if not edits:
            return 0.0
        profiler_assumption = assumption if assumption in PROFILER_ASSUMPTIONS else ""
        saved = self.period((), profiler_assumption) - self.period(edits, assumption)
        if self.knows_unprofiled_steps and profiler_assumption:
            saved *= self.period() / max(self.period((), profiler_assumption), 1.0)
        return min(saved, self._exposed.max_saved(edits, optimistic=assumption == "high"))

    def gain_range(self, edits: Sequence[Edit], applied: Sequence[Edit] = ()) -> GainRange:
        """Return the gain with its range, which begins at 0 or above if the gain is not
        negative."""
        gain, (low, high, low_by, high_by) = (
            self.gain(edits, applied),
            self._find_bounds(edits, applied),
        )
        all_edits = [*applied, *edits]
        bound = self._exposed.max_saved(all_edits, optimistic=True)
        bound += self._exposed.beside_compute(all_edits)
        low = min(gain, low if gain < 0 else max(0.0, low))
        return GainRange(gain, low, high, bound - self._saved(applied, ""), low_by, high_by)

    def _find_bounds(
        self, edits: Sequence[Edit], applied: Sequence[Edit]
    ) -> tuple[float, float, RangeCause, RangeCause]:
        """Return low and high of the gain, and the cause of each. The range covers the edits'
        assumptions, the profiler's host cost, the replay's own error and past errors of such
        predictions. It ends at the time that the edits select."""
        all_edits = [*applied, *edits]
        assumptions = (
            ("unprofiled_max", "profiled") if self.knows_unprofiled_steps else ("unprofiled",)
        )
        if self._choose_assumption(all_edits):
            assumptions = ("profiled", "unprofiled")
        elif self.knows_unprofiled_steps and self._min_cost_ratio:
            assumptions = ("unprofiled_min", *assumptions)
        gains = [
            self.gain(edits, applied),
            *(
                self._saved(all_edits, assumption) - self._saved(applied, assumption)
                for assumption in ("low", "high", *assumptions)
            ),
        ]
        error = abs(self.unedited.period - self.measured.period)
        shared_ns = self._exposed.beside_compute(edits)
        # the run's own host is faster than the profiled host, which bounds a gain only from above
        bounds = gains[:-1] if assumptions[0] == "unprofiled_min" else gains
        lowest, largest = min(bounds) - error, max(gains) + error + shared_ns
        low, high = widened_by_kind(
            gains[0], lowest, largest, edits, self.a.step_ns, on_cpu=self.a.device_id is None
        )
        limit = self._exposed.max_saved(all_edits, optimistic=True)
        limit += shared_ns - self._saved(applied, "")
        ends_by: dict[RangeCause, list[float]] = {
            "assumption": gains[1:3],
            "faster host": [],
            "slower host": [],
            "replay error": [gains[0] - error, gains[0] + error],
            "shared cores": [max(gains) + error + shared_ns] if shared_ns else [],
        }
        for name, ns in zip(assumptions, gains[3:], strict=True):
            is_slower = name in ("profiled", "unprofiled_min")
            ends_by["slower host" if is_slower else "faster host"].append(ns)
        above = {cause: max(ends) for cause, ends in ends_by.items() if ends}
        lows = {cause: [x for x in ends if x >= min(bounds)] for cause, ends in ends_by.items()}
        below = {cause: min(ends) for cause, ends in lows.items() if ends}
        low_by: RangeCause = min(below, key=lambda cause: below[cause]) if low == lowest else "past"
        high_by: RangeCause = (
            max(above, key=lambda cause: above[cause]) if high == largest else "past"
        )
        return min(low, gains[0]), max(gains[0], min(high, limit)), low_by, high_by

    @cached_property
    def _min_cost_ratio(self) -> float:
        """Smallest cost of an event over the assumed cost: if the host runs ahead of the device,
        its own steps show it, minus two standard errors."""
        if self.a.run_steps is None or not self.a.run_steps.host_is_ahead:
            return 0.0
        profiler_ns, error = _measure_profiler_time(self.a)
        min_ns = max(0.0, profiler_ns - 2 * error) * self.a.step_count / launching_events(self.a)
        return min(min_ns / max(event_cost(self.a), 1.0), self._usual_cost_ratio)

    @cached_property
    def _max_cost_ratio(self) -> float:
        """Largest cost of an event over the assumed cost, since a hidden cost is not measured."""
        max_cost = MAX_HIDDEN_COST if self._device_bound else MAX_COST
        return max_cost * _mean_cost(self.a) / max(event_cost(self.a), 1.0)

    @property
    def _device_bound(self) -> bool:
        """Whether the device is busy for nearly all of the run's own step."""
        return self.knows_unprofiled_steps and self.a.is_device_bound

    @cached_property
    def _usual_cost_ratio(self) -> float:
        """Cost of an event over the assumed cost: the largest if the device limits the run's own
        step, which the host then does not delay; else 1.0."""
        return max(1.0, self._max_cost_ratio) if self._device_bound else 1.0

    @property
    def _unprofiled_step_ratio(self) -> float:
        """Cost of an event over the assumed cost that the run's own steps avoid, or 0.0 if they are
        unknown, and the profiled steps are replayed as they are."""
        return self._usual_cost_ratio if self.knows_unprofiled_steps else 0.0

    def _real_share(self, times: float) -> Array | None:
        """Return the remaining share of each edge's host time without a profiler of ``times`` its
        assumed cost, or ``None`` for all of it."""
        if not times:
            return None
        if times not in self._shares:
            self._shares[times] = self._share_without(times)
        return self._shares[times]

    def _share_without(self, times: float) -> Array:
        graph, trace = self.graph, self.a.trace
        cost = _usual_costs(self.a) * (times * event_cost(self.a) / _mean_cost(self.a))
        share = np.ones(len(graph.weight))
        edges = np.flatnonzero((graph.edge == EdgeKind.PROGRAM) & (graph.weight > 0))
        lane = graph.lane[graph.dst[edges]]
        cpu = trace.cpu
        thread, ts = cpu["thread"].to_numpy(), cpu["ts"].to_numpy()
        for owner in np.unique(lane):
            thread_edges = edges[lane == owner]
            rows = np.flatnonzero(thread == owner)
            rows = rows[np.argsort(ts[rows], kind="stable")]
            starts, added = ts[rows], np.append(0.0, np.cumsum(cost[rows]))
            start = graph.time[graph.src[thread_edges]] + graph.origin
            end = graph.time[graph.dst[thread_edges]] + graph.origin
            added_ns = added[np.searchsorted(starts, end)] - added[np.searchsorted(starts, start)]
            length = graph.weight[thread_edges]
            share[thread_edges] = np.maximum(1.0 - added_ns / length, MIN_HOST_SHARE_LEFT)
        return share

    @cached_property
    def unseen_loader(self) -> bool:
        """Whether batches come from workers that always had a batch ready. Their speed is then not
        in the trace, and a faster step may have to wait for them."""
        graph, cpu = self.graph, self.a.trace.cpu
        rate = graph.weight[graph.edge == EdgeKind.LOADER]
        if (rate > NEVER).any() or cpu.is_empty():
            return False
        start, end = graph.origin, graph.origin + float(graph.time[graph.step_boundaries[-1]])
        inside = cpu["ts"].is_between(start, end)
        return bool((name_matches(cpu["name"], WORKERS) & inside).any())

    def count_selected(self, edit: Edit) -> int:
        """Count the events that an edit selects in the replayed steps."""
        return GraphEdits(self._selected).count(edit)

    def time_selected(self, edit: Edit) -> float:
        """Return the time that an edit selects in the replayed steps, ns per step: device work
        summed over streams, host time over threads."""
        if edit.select.on == "gpu":
            total = self.graph.dur[self._selected.device_work(edit.select)].sum()
        else:
            total = sum(time.total for time in self._selected.host_time(edit.select).values())
        return float(total) / self.step_count

    @property
    def step_count(self) -> int:
        return max(1, len(self.graph.step_boundaries) - 1)

    def critical_path_parts(self, edits: Sequence[Edit] = ()) -> dict[str, float]:
        """Return the parts of the critical path with edits applied, ns per step, largest first. It
        is the path of the run's own step, without the profiler's host time, if known."""
        time, dur, edited = self._replay_unprofiled_step(edits)
        kinds = self.a.kernels["communication"], self.a.trace.gpu["kind"] == "memcpy"
        parts = path_composition(edited.graph, time, edited.weight, dur, *kinds)
        steps = self.step_count
        return {k: v / steps for k, v in sorted(parts.items(), key=lambda item: -item[1])}

    def busy_after(self, edits: Sequence[Edit]) -> float | None:
        """Return the device's busy time with edits applied, ns per step, or ``None`` without a
        device. There may be fewer replayed than measured steps."""
        if self.a.device_id is None:
            return None
        measured = self.a.breakdown.busy.total / max(self.a.step_count, 1)
        saved_ns = self._replayed_busy(()) - self._replayed_busy(edits)
        return max(0.0, measured - saved_ns / self.step_count)

    def _replayed_busy(self, edits: Sequence[Edit]) -> float:
        time, dur, edited = self._replay_unprofiled_step(edits)
        graph = edited.graph
        lanes = [n for n, (device, _) in enumerate(graph.lanes) if device == self.a.device_id]
        # work that the edits move to a separate stream has a new lane there
        nodes = graph.device[np.isin(self.graph.lane[graph.device], lanes)]
        nodes = nodes[self.a.in_window[graph.row[nodes]]]  # the graph also has earlier work
        return float(union(time[nodes] - dur[nodes], time[nodes]).total)

    def _replay_unprofiled_step(self, edits: Sequence[Edit]) -> tuple[Array, Array, EditedGraph]:
        """Replay the run's own step once for each list of edits."""
        key = tuple(edits)
        if key not in self._unprofiled_steps:
            self._unprofiled_steps[key] = self._replay(edits, times=self._unprofiled_step_ratio)
        return self._unprofiled_steps[key]

    @cached_property
    def quality(self) -> ReplayQuality:
        """Quality with which the replay without edits reproduces the measured steps."""
        graph = self.graph
        measured, replayed = (np.diff(o.step_ends) for o in (self.measured, self.unedited))
        total_ns = max(float(measured.sum()), 1.0)
        device = graph.device
        error = graph.earliest_time() - (graph.time - graph.dur)
        lanes = [n for n, (d, _) in enumerate(graph.lanes) if d == self.a.device_id]
        waits, idle = host_waits(graph), device_idle(graph, np.array(lanes, dtype=np.int64))
        return ReplayQuality(
            step_error=self._step_error(self.unedited.time),
            total_error=float(replayed.sum() - measured.sum()) / total_ns,
            explained=float((np.abs(error[device]) <= EXPLAINED_NS).mean())
            if len(device)
            else None,
            starts=len(device),
            hard=measure_hard_parts(graph),
            steps=graph.steps[1] - graph.steps[0],
            of_steps=self.a.step_count,
            waits=float(waits.time.sum()) / total_ns,
            waits_explained=waits.share,
            idle=float(idle.time.sum()) / total_ns,
            idle_explained=idle.share,
        )

    @cached_property
    def unusable_reason(self) -> str:
        """Reason why nothing is estimated. Empty if there are steps, and the replay without edits
        reproduces them and explains their waiting."""
        if self.a.steps.used.is_empty() or self.a.span_ns <= 0:
            return "there is no step to replay"
        if self.a.steps.source == LAYER_TIMES:
            return "layers have times and no starts, so their times are added up"
        return self._explain_unseen_wait() or self.quality.unusable_reason

    def _explain_unseen_wait(self) -> str:
        """Say that the thread of the steps leaves the launches to other threads without recorded
        work of its own: a replay would treat its wait for them as its own work. Empty if it does
        not."""
        a, main = self.a, self.a.trace.main_thread
        launch = a.trace.gpu["launch"].filter(pl.Series(a.in_window)).drop_nulls()
        if main is None or len(launch) < _MIN_LAUNCHES:
            return ""
        share = float((a.trace.cpu["thread"].gather(launch) == main).mean() or 0)  # type: ignore[arg-type]
        idle = a.host.filter(
            pl.col("thread") == main, pl.col("class").cast(pl.String).is_in(NOTHING_RECORDED)
        )
        silent_share = float(idle["ns"].sum()) / a.span_ns
        if share > MAX_OWN_LAUNCHES or silent_share < MIN_SILENT:
            return ""
        return (
            f"other threads launch {1 - share:.0%} of the work, and what the thread of the steps "
            f"does for {silent_share:.0%} of them is not in the trace"
        )
