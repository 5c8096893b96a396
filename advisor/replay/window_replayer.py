"""The measured steps replayed, the same with edits, and the quality of the replay."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import NamedTuple

import numpy as np
import polars as pl
from msgspec.structs import replace

from advisor.core.finding import LAYER_TIMES, Edit, RangeCause
from advisor.core.intervals import union
from advisor.measure import Analysis
from advisor.measure.host.names import WORKERS, name_matches
from advisor.measure.steps.step_records import MIN_AROUND, MIN_PROFILED, StepRecords
from advisor.replay.edited_graph import EditedGraph, GraphEdits
from advisor.replay.exposed_time import ExposedTime
from advisor.replay.graph import NEVER, Array, EdgeKind, Graph
from advisor.replay.graph_builder import build_graph
from advisor.replay.operations import collect
from advisor.replay.predictions import widened_by_kind
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
"""Host time that the profiler adds to each event, about: 0.8 µs, with shapes 1.4 (PyTorch 2.13,
CPU; small operators suffer most). A Python frame costs 0.6 times what a plain event does: 0.35 and
0.57 µs on a faster CPU, of 917 frames and 1,141 operators per step, the fastest of 300 without and
of 60 with the profiler."""
VISIBLE = 0.8
"""Busy share of the device above which host time is hidden behind it."""
MAX_COST = 3.0
"""Largest measured cost of an event, in multiples of the usual one."""
PROFILER_ASSUMPTIONS = ("unprofiled", "profiled", "unprofiled_min", "unprofiled_max")
"""Assumptions about what is measured, not about edits."""
MAX_HIDDEN_COST = 8.0
"""Largest cost of an event where the device sets the pace and hides it, in multiples of the usual
one. Steps that the host paces cost up to 5.7 times the usual one; h100/doc_finder at least 8, as
the step of its cure shows, in which the host is no longer hidden."""
MIN_LEFT = 0.3
"""Least share of a stretch of host time that remains without the profiler."""
MAX_OWN_LAUNCHES, MIN_SILENT = 0.10, 0.50
"""Share of the launches up to which, and share of the steps without recorded work from which, the
thread of the steps only waits for those that launch."""
MIN_LAUNCHES = 10
"""Launches that show who launches."""
NOTHING_RECORDED = ("unknown", "unrecorded")


def event_cost(a: Analysis) -> float:
    """Return the host time that the profiler adds to each event, ns: measured where a recorded run
    has steps with and without it and shows host time, else ``EVENT_COST_NS``.

    Measured: what the median profiled step takes beyond the median of those around the window, over
    the host events of a step on all threads that launch work: the backward pass has its own, and
    the main thread waits for it. On a device that hardly idles the cost is hidden, and the
    difference says nothing about it. Neither does it where steps differ so much that its standard
    error exceeds the usual cost. It is bounded, because steps differ for other reasons too."""
    usual = _mean_cost(a)
    if a.recorded is None or a.trace.main_thread is None:
        return usual
    if a.device_id is not None and a.breakdown.busy.total > VISIBLE * a.span_ns:
        return usual
    longer, error = _longer_with_profiler(a)
    if error * a.step_count > usual * launching_events(a):
        return usual
    return min(max(0.0, longer) * a.step_count / launching_events(a), MAX_COST * usual)


def _longer_with_profiler(a: Analysis) -> tuple[float, float]:
    """Return by how much the median profiled step is longer than those around the window, and the
    standard error of that, ns; infinite without enough steps of both."""
    assert a.recorded is not None
    with_it, without = _host_times(a.recorded, a.trace.meta.window)
    if len(with_it) < MIN_PROFILED or len(without) < MIN_AROUND:
        return 0.0, np.inf
    error = float(np.hypot(median_error(with_it), median_error(without)))
    return float(np.median(with_it) - np.median(without)), error


def launching_events(a: Analysis) -> float:
    """Count host events of the used steps on the main thread and those that launch work, 1 or
    more."""
    cpu = a.trace.cpu
    own = (cpu["thread"] == a.trace.main_thread).to_numpy()
    launching = cpu["thread"].gather(a.trace.gpu["launch"].drop_nulls().unique())
    own |= cpu["thread"].is_in(launching.unique().implode()).fill_null(False).to_numpy()
    ts = cpu["ts"].to_numpy()[own]
    begin, end = a.steps.used["ts"].to_numpy(), a.steps.used["end"].to_numpy()
    starts = np.sort(ts)
    return max(1.0, float((np.searchsorted(starts, end) - np.searchsorted(starts, begin)).sum()))


def _host_times(recorded: StepRecords, window: int) -> tuple[Array, Array]:
    """Return times of the window's steps (of all windows' where it kept too few), and of the
    unprofiled steps around them, ns; of host time where the host runs ahead."""
    kept = recorded.kept_by_window(window)
    if kept.sum() < MIN_PROFILED:
        kept = recorded.active
    if recorded.host_is_ahead:
        return recorded.dur[kept].astype(float), recorded.dur[recorded.used].astype(float)
    inside = recorded.durations[kept]
    return inside[~np.isnan(inside)], recorded.durations_around(kept)


def median_error(values: Array) -> float:
    """Return the standard error of a median, as of a normal distribution with the same median
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
    own = (a.trace.cpu["thread"] == a.trace.main_thread).fill_null(False).to_numpy()
    costs = _usual_costs(a)[own]
    return float(costs.mean()) if len(costs) else EVENT_COST_NS["plain"]


class GainRange(NamedTuple):
    """Time saved per step, ns, and what decides the ends of its range."""

    gain: float
    low: float
    high: float
    max_gain: float = float("inf")
    """Upper limit of the range: the time that the edits touch, ns."""
    low_by: RangeCause = ""
    high_by: RangeCause = ""

    @property
    def limited(self) -> GainRange:
        """The range up to its upper limit."""
        high = max(self.gain, min(self.high, self.max_gain))
        return self._replace(low=min(self.low, self.gain), high=high, max_gain=float("inf"))


class WindowReplayer:
    """Replays of one window of one rank. All times in ns. A collective takes as long as it was
    measured to, waits for other ranks included. ``profiled``: False for a simulated trace, whose
    host times no profiler made longer."""

    def __init__(self, a: Analysis, rank: int = 0, *, profiled: bool = True) -> None:
        self.a = a
        self.profiled = profiled
        self.rank = rank
        self._shares: dict[float, Array] = {}
        self._own_steps: dict[tuple[Edit, ...], tuple[Array, Array, EditedGraph]] = {}
        self._exposed = ExposedTime(a)

    @cached_property
    def graph(self) -> Graph:
        """Dependency graph of the representative steps."""
        return build_graph(self.a)

    @cached_property
    def plan(self) -> ReplayPlan:
        """The graph laid out for replaying."""
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
        time, _, own = self._replay(edits)
        return ReplayedSteps(time, completion_times(own.graph, time), self.graph.cycle_steps)

    def _replay(
        self, edits: Sequence[Edit], assumption: str = "", times: float = 0.0
    ) -> tuple[Array, Array, EditedGraph]:
        """Return times of the nodes, their durations, and the graph, less ``times`` the profiler's
        usual host time."""
        real = self._real_share(times)
        own = collect(self._selected, self._own_edits(edits), assumption).build(real)
        return self._plan(own.graph).run(own.weight, own.dur), own.dur, own

    def _own_edits(self, edits: Sequence[Edit]) -> list[Edit]:
        return [e for e in edits if e.rank in (None, self.rank) or e.op == "remove_skew"]

    @cached_property
    def knows_own_steps(self) -> bool:
        """Whether the run's own steps, most of which are not profiled, are known. The gains of a
        recorded run are of steps without the profiler: its host time would lengthen the steps that
        a fix leaves, and launches that it makes slower are none that a fix can save."""
        recorded = self.a.recorded
        if recorded is None:
            return False
        return recorded.host_is_ahead or recorded.median_around(recorded.active) is not None

    @property
    def reference_ns(self) -> float:
        """The step that gains are savings of: the run's own one, replayed, else the measured."""
        return self.period() if self.knows_own_steps else self.a.step_ns

    def _central(self, edits: Sequence[Edit]) -> str:
        """Return the assumption of the estimate itself. Dropped launches are the very time that the
        profiler lengthens most: without a record of steps without it, its usual cost is no gain."""
        if not self.profiled or self.a.recorded is not None:
            return ""
        return "unprofiled" if any(edit.op == "drop_launch" for edit in edits) else ""

    def period(self, edits: Sequence[Edit] = (), assumption: str = "") -> float:
        """Return the steady-state time of a step with edits applied. ``assumption``: ``low`` or
        ``high`` (a small or large gain); ``unprofiled`` and ``profiled``: without and with the
        profiler's own host time, whichever is not assumed otherwise; ``unprofiled_min`` and
        ``unprofiled_max``: without the least and the most that it may take."""
        if assumption not in PROFILER_ASSUMPTIONS and all(
            e.factor_low is None and e.factor_high is None and e.op != "parallelize" and not e.ahead
            for e in edits
        ):
            assumption = ""
        key = (tuple(edits), assumption)
        if key not in self._periods:
            self._periods[key] = self._steady(edits, assumption)
        return self._periods[key]

    def _steady(self, edits: Sequence[Edit], assumption: str) -> float:
        times = {
            "profiled": 0.0,
            "unprofiled_min": self._min_cost_ratio,
            "unprofiled": self._usual_cost_ratio,
            "unprofiled_max": self._max_cost_ratio,
        }.get(assumption, self._own_step_ratio)
        assumption = "" if assumption in PROFILER_ASSUMPTIONS else assumption
        if assumption == "low" and (
            doubtful := [e for e in edits if e.op == "overlap" and e.factor_high is not None]
        ):
            sure = [replace(e, factor_high=None) if e in doubtful else e for e in edits]
            others = [e for e in edits if e not in doubtful]
            kept = max(e.factor_high or 0.0 for e in doubtful)
            return kept * self.period(others, "low") + (1 - kept) * self.period(sure, "low")
        real = self._real_share(times)
        own = collect(self._selected, self._own_edits(edits), assumption).build(real)
        return self._plan(own.graph).steady_step(own.weight, own.dur)

    def _plan(self, graph: Graph) -> ReplayPlan:
        return self.plan if graph is self.graph else ReplayPlan(graph)

    def gain(self, edits: Sequence[Edit], applied: Sequence[Edit] = ()) -> float:
        """Return what edits save per step, on top of others that are applied already."""
        saved = (self._saved(each, self._central(each)) for each in ([*applied, *edits], applied))
        return next(saved) - next(saved)

    def _saved(self, edits: Sequence[Edit], assumption: str) -> float:
        """Return what edits save, at most the time of what they select. What they save of a step
        with more or less of the profiler's host time is scaled to the run's own step."""
        if not edits:
            return 0.0
        by = assumption if assumption in PROFILER_ASSUMPTIONS else ""
        saved = self.period((), by) - self.period(edits, assumption)
        if self.knows_own_steps and by:
            saved *= self.period() / max(self.period((), by), 1.0)
        return min(saved, self._exposed.max_saved(edits, optimistic=assumption == "high"))

    def gain_range(self, edits: Sequence[Edit], applied: Sequence[Edit] = ()) -> GainRange:
        """Return the gain with its range, from 0 where something is gained."""
        gain, (low, high, low_by, high_by) = (
            self.gain(edits, applied),
            self._bounds_and_causes(edits, applied),
        )
        both = [*applied, *edits]
        limit = self._exposed.max_saved(both, optimistic=True)
        limit += self._exposed.beside_compute(both)
        low = min(gain, low if gain < 0 else max(0.0, low))
        return GainRange(gain, low, high, limit - self._saved(applied, ""), low_by, high_by)

    def _bounds_and_causes(
        self, edits: Sequence[Edit], applied: Sequence[Edit]
    ) -> tuple[float, float, RangeCause, RangeCause]:
        """Return low and high of the gain, and what decides each. The range covers the edits'
        assumptions, the profiler's host cost, the replay's own error and past errors of such
        predictions. It ends at the time of what they select."""
        both = [*applied, *edits]
        others = ("unprofiled_max", "profiled") if self.knows_own_steps else ("unprofiled",)
        if self._central(both):
            others = ("profiled", "unprofiled")
        elif self.knows_own_steps and self._min_cost_ratio:
            others = ("unprofiled_min", *others)
        gains = [
            self.gain(edits, applied),
            *(
                self._saved(both, assumption) - self._saved(applied, assumption)
                for assumption in ("low", "high", *others)
            ),
        ]
        error = abs(self.unedited.period - self.measured.period)
        beside = self._exposed.beside_compute(edits)
        # the run's own host is faster than the profiled one, which bounds a gain from above only
        possible = gains[:-1] if others[0] == "unprofiled_min" else gains
        least, largest = min(possible) - error, max(gains) + error + beside
        low, high = widened_by_kind(gains[0], least, largest, edits, self.a.step_ns)
        limit = self._exposed.max_saved(both, optimistic=True)
        limit += beside - self._saved(applied, "")
        steps: dict[RangeCause, list[float]] = {
            "assumption": gains[1:3],
            "faster host": [],
            "slower host": [],
            "replay error": [gains[0] - error, gains[0] + error],
            "shared cores": [max(gains) + error + beside] if beside else [],
        }
        for name, ns in zip(others, gains[3:], strict=True):
            slower = name in ("profiled", "unprofiled_min")
            steps["slower host" if slower else "faster host"].append(ns)
        above = {by: max(ends) for by, ends in steps.items() if ends}
        lows = {by: [x for x in ends if x >= min(possible)] for by, ends in steps.items()}
        below = {by: min(ends) for by, ends in lows.items() if ends}
        low_by: RangeCause = min(below, key=lambda by: below[by]) if low == least else "past"
        high_by: RangeCause = max(above, key=lambda by: above[by]) if high == largest else "past"
        return min(low, gains[0]), max(gains[0], min(high, limit)), low_by, high_by

    @cached_property
    def _min_cost_ratio(self) -> float:
        """Smallest cost of an event over the assumed one: where the host runs ahead of the device,
        its own steps show it, less two standard errors."""
        if self.a.recorded is None or not self.a.recorded.host_is_ahead:
            return 0.0
        longer, error = _longer_with_profiler(self.a)
        least = max(0.0, longer - 2 * error) * self.a.step_count / launching_events(self.a)
        return min(least / max(event_cost(self.a), 1.0), self._usual_cost_ratio)

    @cached_property
    def _max_cost_ratio(self) -> float:
        """Largest cost of an event over the assumed one, since a hidden cost is not measured."""
        most = MAX_HIDDEN_COST if self._device_bound else MAX_COST
        return most * _mean_cost(self.a) / max(event_cost(self.a), 1.0)

    @property
    def _device_bound(self) -> bool:
        """Whether the device is busy for nearly all of the run's own step."""
        return self.knows_own_steps and self.a.is_device_bound

    @cached_property
    def _usual_cost_ratio(self) -> float:
        """Cost of an event over the assumed one: the largest where the device sets the pace of the
        run's own step, since the host does not hold it up then; else 1.0."""
        return max(1.0, self._max_cost_ratio) if self._device_bound else 1.0

    @property
    def _own_step_ratio(self) -> float:
        """Cost of an event over the assumed one that the run's own steps are without; 0.0 where
        they are not known, and the profiled ones are replayed as they are."""
        return self._usual_cost_ratio if self.knows_own_steps else 0.0

    def _real_share(self, times: float) -> Array | None:
        """Return the share of each edge's host time that remains without a profiler of ``times``
        its assumed cost; ``None``: all."""
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
            own = edges[lane == owner]
            rows = np.flatnonzero(thread == owner)
            rows = rows[np.argsort(ts[rows], kind="stable")]
            starts, added = ts[rows], np.append(0.0, np.cumsum(cost[rows]))
            begin = graph.time[graph.src[own]] + graph.origin
            end = graph.time[graph.dst[own]] + graph.origin
            spent = added[np.searchsorted(starts, end)] - added[np.searchsorted(starts, begin)]
            length = graph.weight[own]
            share[own] = np.maximum(1.0 - spent / length, MIN_LEFT)
        return share

    @cached_property
    def unseen_loader(self) -> bool:
        """Whether batches come from workers that always had one ready. Their speed is then not in
        the trace, and a faster step may have to wait for them."""
        graph, cpu = self.graph, self.a.trace.cpu
        rate = graph.weight[graph.edge == EdgeKind.LOADER]
        if (rate > NEVER).any() or cpu.is_empty():
            return False
        begin, end = graph.origin, graph.origin + float(graph.time[graph.step_boundaries[-1]])
        inside = cpu["ts"].is_between(begin, end)
        return bool((name_matches(cpu["name"], WORKERS) & inside).any())

    def count_selected(self, edit: Edit) -> int:
        """Count the events that an edit selects in the replayed steps."""
        return GraphEdits(self._selected).count(edit)

    def time_selected(self, edit: Edit) -> float:
        """Return the time of what an edit selects in the replayed steps, ns per step: device work
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
        is that of the run's own step, without the profiler's host time, where that is known."""
        time, dur, own = self._replay_own_step(edits)
        kinds = self.a.kernels["communication"], self.a.trace.gpu["kind"] == "memcpy"
        parts = path_composition(own.graph, time, own.weight, dur, *kinds)
        steps = self.step_count
        return {k: v / steps for k, v in sorted(parts.items(), key=lambda item: -item[1])}

    def busy_after(self, edits: Sequence[Edit]) -> float | None:
        """Return the time in which the device works with edits applied, ns per step; ``None``:
        there is no device. The replayed steps may be fewer than the measured ones."""
        if self.a.device_id is None:
            return None
        measured = self.a.breakdown.busy.total / max(self.a.step_count, 1)
        gone = self._replayed_busy(()) - self._replayed_busy(edits)
        return max(0.0, measured - gone / self.step_count)

    def _replayed_busy(self, edits: Sequence[Edit]) -> float:
        time, dur, own = self._replay_own_step(edits)
        graph = own.graph
        lanes = [n for n, (device, _) in enumerate(graph.lanes) if device == self.a.device_id]
        # work that the edits move to a stream of its own has a new lane there
        nodes = graph.device[np.isin(self.graph.lane[graph.device], lanes)]
        nodes = nodes[self.a.in_window[graph.row[nodes]]]  # the graph holds work before it, too
        return float(union(time[nodes] - dur[nodes], time[nodes]).total)

    def _replay_own_step(self, edits: Sequence[Edit]) -> tuple[Array, Array, EditedGraph]:
        """Replay the run's own step once for each list of edits."""
        key = tuple(edits)
        if key not in self._own_steps:
            self._own_steps[key] = self._replay(edits, times=self._own_step_ratio)
        return self._own_steps[key]

    @cached_property
    def quality(self) -> ReplayQuality:
        """Quality with which the replay without edits reproduces the measured steps."""
        graph = self.graph
        measured, replayed = (np.diff(o.step_ends) for o in (self.measured, self.unedited))
        whole = max(float(measured.sum()), 1.0)
        device = graph.device
        error = graph.earliest_time() - (graph.time - graph.dur)
        own = [n for n, (d, _) in enumerate(graph.lanes) if d == self.a.device_id]
        waits, idle = host_waits(graph), device_idle(graph, np.array(own, dtype=np.int64))
        return ReplayQuality(
            step_error=self._step_error(self.unedited.time),
            total_error=float(replayed.sum() - measured.sum()) / whole,
            explained=float((np.abs(error[device]) <= EXPLAINED_NS).mean())
            if len(device)
            else None,
            starts=len(device),
            hard=measure_hard_parts(graph),
            steps=graph.steps[1] - graph.steps[0],
            of_steps=max(self.a.step_count, graph.steps[1] - graph.steps[0]),
            waits=float(waits.time.sum()) / whole,
            waits_explained=waits.share,
            idle=float(idle.time.sum()) / whole,
            idle_explained=idle.share,
        )

    @cached_property
    def unusable_reason(self) -> str:
        """Reason why nothing is estimated. Empty: there are steps, and the replay without edits
        reproduces them and explains their waiting."""
        if self.a.steps.used.is_empty() or self.a.span_ns <= 0:
            return "there is no step to replay"
        if self.a.steps.source == LAYER_TIMES:
            return "layers have times and no starts, so their times are added up"
        return self._unseen_wait() or self.quality.unusable_reason

    def _unseen_wait(self) -> str:
        """Say that the thread of the steps leaves the launches to others and does nothing recorded
        meanwhile: a replay would take its wait for them for its own work. Empty: it does not."""
        a, main = self.a, self.a.trace.main_thread
        launch = a.trace.gpu["launch"].filter(pl.Series(a.in_window)).drop_nulls()
        if main is None or len(launch) < MIN_LAUNCHES:
            return ""
        own = float((a.trace.cpu["thread"].gather(launch) == main).mean() or 0)  # type: ignore[arg-type]
        idle = a.host.filter(
            pl.col("thread") == main, pl.col("class").cast(pl.String).is_in(NOTHING_RECORDED)
        )
        silent = float(idle["ns"].sum()) / a.span_ns
        if own > MAX_OWN_LAUNCHES or silent < MIN_SILENT:
            return ""
        return (
            f"other threads launch {1 - own:.0%} of the work, and what the thread of the steps "
            f"does for {silent:.0%} of them is not in the trace"
        )
