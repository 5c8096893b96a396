"""WhatIf: the measured steps, replayed; the same with edits; how far to trust it."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import polars as pl

from advisor.whatif.build import build
from advisor.whatif.critical import composition
from advisor.whatif.edits import Patch, Selected
from advisor.whatif.graph import Array, Edge, Graph
from advisor.whatif.replay import Outcome, Plan, completions

if TYPE_CHECKING:
    from advisor.analysis import Analysis
    from advisor.model import Edit
    from advisor.trace import Trace

EXPLAINED_NS = 5_000
EVENT_COST_NS = {"plain": 800.0, "shapes": 600.0, "stacks": 900.0}
"""Host time that the profiler adds to each event, about: 0.8 µs plain, 1.4 with shapes, 2.3 with
stacks and all else (PyTorch 2.13, CPU; per event, so small operators suffer most)."""
VISIBLE = 0.8
"""Busy share of the device from which host time is hidden behind it."""
MOST_COST = 3.0
"""Times the usual cost of an event that a measured one may be."""
MIN_LEFT = 0.3
"""No stretch of host time is taken to be more than this much profiler."""


class HardPart(NamedTuple):
    """How well one of the hard parts of the model is reproduced, given all else as measured."""

    name: str
    cases: int
    explained: float
    """Share within 5 µs."""
    error_ns: float
    """Median absolute error."""


class Quality(NamedTuple):
    """How far the replay can be trusted."""

    step_error: float
    """Mean absolute error of the replayed against the measured steps, as a share of the step."""
    total_error: float
    """Signed error of the whole run of steps, as a share of it."""
    explained: float | None
    """Share of device starts that the graph's edges explain within 5 µs."""
    starts: int
    hard: tuple[HardPart, ...]
    steps: int
    """How many consecutive steps are replayed."""
    of_steps: int
    """How many there are."""


class EditResult(NamedTuple):
    """What one edit did, on top of those before it. All times ns a step."""

    edit: Edit
    selected: int
    """Events of the replayed steps that it selects."""
    alone_ns: float
    """Saved by it alone."""
    gain_ns: float
    """Saved on top of the edits before it."""
    low_ns: float
    high_ns: float
    step_then_ns: float


class WhatIfResult(NamedTuple):
    """Measured and replayed steps, and the steps with edits applied one after the other."""

    measured_step_ns: float
    """Mean of the used steps."""
    replayed_step_ns: float
    """The same, off by as much as the replayed run of steps is from the measured one."""
    edited_step_ns: float
    """Measured, less what the edits save."""
    edits: tuple[EditResult, ...]
    critical_path: dict[str, float]
    """What the critical path consists of with all edits, ns a step."""
    replay: Quality
    families: tuple[str, ...]
    """Kernel families of the replayed window, the most time first: what ``kernel:`` can name."""


def event_cost(a: Analysis) -> float:
    """Host time that the profiler adds to each event, ns: measured where a recorded run has steps
    with and without it and the device leaves it visible, else as ``EVENT_COST_NS`` has it.

    Measured: what the median profiled step takes beyond the median of those around the window,
    over the host events of a step. On a device that hardly idles the cost is hidden, and the
    difference says nothing about it. It is bounded, because steps differ for other reasons too.
    """
    meta = a.trace.meta
    usual = EVENT_COST_NS["plain"]
    usual += EVENT_COST_NS["shapes"] if meta.record_shapes else 0.0
    usual += EVENT_COST_NS["stacks"] if meta.with_stack else 0.0
    recorded = a.recorded
    if recorded is None or recorded.profiled_median is None or a.trace.main_thread is None:
        return usual
    if recorded.around_windows is None:
        return usual
    if a.device_id is not None and a.breakdown.busy.total > VISIBLE * a.span_ns:
        return usual
    cpu = a.trace.cpu
    ts = cpu["ts"].to_numpy()[(cpu["thread"] == a.trace.main_thread).to_numpy()]
    begin, end = a.steps.used["ts"].to_numpy(), a.steps.used["end"].to_numpy()
    starts = np.sort(ts)
    events = (np.searchsorted(starts, end) - np.searchsorted(starts, begin)).sum()
    if not events:
        return usual
    longer = max(0.0, recorded.profiled_median - recorded.around_windows)
    return min(longer * a.step_count / float(events), MOST_COST * usual)


def run_edits(trace: Trace, edits: Sequence[Edit | str]) -> WhatIfResult:
    """Replay a trace with edits: Edit objects, or lines of the edit language."""
    from advisor.analysis import Analysis
    from advisor.whatif.language import parse_edit

    parsed = [parse_edit(e) if isinstance(e, str) else e for e in edits]
    whatif = WhatIf(Analysis(trace))
    rows = []
    for number, edit in enumerate(parsed):
        given = parsed[:number]
        low, high = whatif.band([edit], given)
        rows.append(
            EditResult(
                edit=edit,
                selected=whatif.selected(edit),
                alone_ns=whatif.gain([edit]),
                gain_ns=whatif.gain([edit], given),
                low_ns=low,
                high_ns=high,
                step_then_ns=whatif.step_after([*given, edit]),
            )
        )
    return WhatIfResult(
        measured_step_ns=whatif.a.step_ns,
        replayed_step_ns=whatif.a.step_ns * (1 + whatif.quality.total_error),
        edited_step_ns=whatif.step_after(parsed),
        edits=tuple(rows),
        critical_path=whatif.critical(parsed),
        replay=whatif.quality,
        families=tuple(whatif.a.families.sort("dur", descending=True)["family"].cast(pl.String))
        if whatif.a.device_id is not None
        else (),
    )


class WhatIf:
    """Replays of one window. All times in ns."""

    def __init__(self, a: Analysis) -> None:
        self.a = a

    @cached_property
    def graph(self) -> Graph:
        """The dependency graph of the representative steps."""
        return build(self.a)

    @cached_property
    def plan(self) -> Plan:
        """The graph laid out for replaying."""
        return Plan(self.graph)

    @cached_property
    def _periods(self) -> dict[tuple[tuple[Edit, ...], str], float]:
        return {}

    @cached_property
    def _selected(self) -> Selected:
        return Selected(self.a, self.graph)

    @cached_property
    def base(self) -> Outcome:
        """The replay without edits."""
        return self.plan.outcome()

    @cached_property
    def measured(self) -> Outcome:
        """The same moments, as measured."""
        return Outcome(self.graph.time, completions(self.graph, self.graph.time), self.graph.turn)

    def outcome(self, edits: Sequence[Edit], assumption: str = "") -> Outcome:
        """Replay with edits applied."""
        patch = Patch(self._selected).apply(edits, assumption)
        graph, weight, src = patch.widened()
        return self._plan(graph).outcome(weight, patch.dur, src)

    def period(self, edits: Sequence[Edit] = (), assumption: str = "") -> float:
        """Steady-state time of a step with edits applied."""
        if all(e.factor_low is None and e.factor_high is None for e in edits):
            assumption = ""
        key = (tuple(edits), assumption)
        if key not in self._periods:
            patch = Patch(self._selected).apply(edits, assumption)
            graph, weight, src = patch.widened()
            self._periods[key] = self._plan(graph).steady(weight, patch.dur, src)
        return self._periods[key]

    def _plan(self, graph: Graph) -> Plan:
        return self.plan if graph is self.graph else Plan(graph)

    def _plain_period(self, edits: Sequence[Edit]) -> float:
        """The same without the host time that the profiler itself takes."""
        key = (tuple(edits), "plain")
        if key not in self._periods:
            patch = Patch(self._selected).apply(edits)
            patch.weight *= self._real_share
            graph, weight, src = patch.widened()
            self._periods[key] = self._plan(graph).steady(weight, patch.dur, src)
        return self._periods[key]

    def step_after(self, edits: Sequence[Edit]) -> float:
        """The measured step with edits applied: less what they save between two replays."""
        return max(0.0, self.a.step_ns - self.gain(edits))

    def gain(self, edits: Sequence[Edit], given: Sequence[Edit] = ()) -> float:
        """What edits save a step, on top of others that are given."""
        return self.period(given) - self.period([*given, *edits])

    def band(self, edits: Sequence[Edit], given: Sequence[Edit] = ()) -> tuple[float, float]:
        """(low, high) of the gain: the edits' own assumptions, the profiler's cost on the host,
        and the error of the replay itself."""
        gains = [
            self.period(given) - self.period([*given, *edits], assumption)
            for assumption in ("low", "", "high")
        ]
        gains.append(self._plain_period(given) - self._plain_period([*given, *edits]))
        error = abs(self.base.period - self.measured.period)
        return min(gains) - error, max(gains) + error

    @cached_property
    def _real_share(self) -> Array:
        """For each edge: the share of its host time that would be there without a profiler."""
        graph, trace = self.graph, self.a.trace
        cost = event_cost(self.a)
        share = np.ones(len(graph.weight))
        edges = np.flatnonzero((graph.edge == Edge.PROGRAM) & (graph.weight > 0))
        lane = graph.lane[graph.dst[edges]]
        cpu = trace.cpu
        thread, ts = cpu["thread"].to_numpy(), cpu["ts"].to_numpy()
        for owner in np.unique(lane):
            mine = edges[lane == owner]
            starts = np.sort(ts[thread == owner])
            begin = graph.time[graph.src[mine]] + graph.origin
            end = graph.time[graph.dst[mine]] + graph.origin
            events = np.searchsorted(starts, end) - np.searchsorted(starts, begin)
            length = graph.weight[mine]
            share[mine] = np.maximum(1.0 - events * cost / length, MIN_LEFT)
        return share

    def selected(self, edit: Edit) -> int:
        """How many events an edit selects in the replayed steps."""
        return Patch(self._selected).count(edit)

    def critical(self, edits: Sequence[Edit] = ()) -> dict[str, float]:
        """What the critical path consists of with edits applied, ns a step, largest first."""
        patch = Patch(self._selected).apply(edits)
        graph, weight, src = patch.widened()
        time = self._plan(graph).run(weight, patch.dur, src)
        parts = composition(graph, time, weight, patch.dur, src, self.a.kernels["communication"])
        steps = max(1, len(self.graph.starts) - 1)
        return {k: v / steps for k, v in sorted(parts.items(), key=lambda item: -item[1])}

    @cached_property
    def quality(self) -> Quality:
        """How well the replay without edits reproduces what was measured."""
        graph = self.graph
        measured, replayed = (np.diff(o.complete) for o in (self.measured, self.base))
        whole = max(float(measured.sum()), 1.0)
        device = graph.device
        allowed = graph.local_start()
        error = allowed - (graph.time - graph.dur)
        hard = tuple(
            HardPart(
                name,
                len(nodes),
                float((np.abs(error[nodes]) <= EXPLAINED_NS).mean()),
                float(np.median(np.abs(error[nodes]))),
            )
            for name, nodes in graph.hard.items()
            if len(nodes)
        )
        return Quality(
            step_error=float(np.abs(replayed - measured).sum()) / whole,
            total_error=float(replayed.sum() - measured.sum()) / whole,
            explained=float((np.abs(error[device]) <= EXPLAINED_NS).mean())
            if len(device)
            else None,
            starts=len(device),
            hard=hard,
            steps=graph.steps[1] - graph.steps[0],
            of_steps=max(self.a.step_count, graph.steps[1] - graph.steps[0]),
        )
