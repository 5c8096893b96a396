"""WhatIf: the measured steps, replayed; the same with edits; how far to trust it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import polars as pl

from advisor.analysis.names import matches
from advisor.errors import AdvisorError
from advisor.whatif.build import build
from advisor.whatif.company import Company, find_company
from advisor.whatif.critical import composition
from advisor.whatif.edits import Patch, Selected
from advisor.whatif.graph import NEVER, Array, Edge, Graph
from advisor.whatif.points import WORKERS
from advisor.whatif.replay import Outcome, Plan, completions
from advisor.whatif.together import Patched, Together

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
MAX_WORSE = 0.01
"""How much more of the measured steps a replay with other ranks may miss than one alone."""
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
    ranks: tuple[int, ...]
    """Ranks that were replayed together, the one of these figures first; it alone: empty."""
    marked: bool
    """Steps are marked in the trace; else all figures are of the whole recording."""
    unseen_loader: bool
    """Loader workers keep up, so how fast they could be is not in the trace: what is saved beyond
    that is not saved."""
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


def _patched(patch: Patch) -> Patched:
    graph, weight, src = patch.widened()
    gone, punctual = np.flatnonzero(patch.dropped), np.flatnonzero(patch.punctual)
    return Patched(graph, weight, patch.dur, src, gone, punctual)


def counted_ranks(ranks: Sequence[int]) -> str:
    """``rank 0 is``, ``ranks 0, 1 are``."""
    names = ", ".join(str(n) for n in sorted(ranks))
    return f"ranks {names} are" if len(ranks) > 1 else f"rank {names} is"


def run_edits(
    trace: Trace,
    edits: Sequence[Edit | str],
    rank: int = 0,
    others: Mapping[int, Trace] | None = None,
) -> WhatIfResult:
    """Replay a trace with edits: Edit objects, or lines of the edit language. ``others``: the
    same window of other ranks, by rank."""
    from advisor.analysis import Analysis
    from advisor.whatif.language import parse_edit

    parsed = [parse_edit(e) if isinstance(e, str) else e for e in edits]
    ranks = {n: Analysis(other) for n, other in (others or {}).items() if n != rank}
    whatif = WhatIf(Analysis(trace), rank, ranks)
    here = whatif.ranks or (rank,)
    for edit in parsed:
        if edit.rank is not None and edit.rank not in here:
            raise AdvisorError(
                f"rank:{edit.rank}: only {counted_ranks(here)} replayed here; give a folder with "
                "the traces of all ranks"
            )
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
        ranks=whatif.ranks,
        marked=whatif.a.steps.source != "whole trace",
        unseen_loader=whatif.unseen_loader,
        families=tuple(whatif.a.families.sort("dur", descending=True)["family"].cast(pl.String))
        if whatif.a.device_id is not None
        else (),
    )


class WhatIf:
    """Replays of one window. All times in ns.

    ``others``: the same window of the other ranks, by rank. Where these can be put on one clock
    with this one, they are replayed with it, edits included, and a collective waits for the last
    of them; where not, a collective takes as long as it was measured to.
    """

    def __init__(
        self, a: Analysis, rank: int = 0, others: Mapping[int, Analysis] | None = None
    ) -> None:
        self.a = a
        self.rank = rank
        self.others = {number: other for number, other in (others or {}).items() if number != rank}
        self._steps: tuple[int, int] | None = None

    @cached_property
    def graph(self) -> Graph:
        """The dependency graph of the representative steps."""
        if self._steps is None and self._company is not None:
            self._steps = self._company.steps[0]
        return build(self.a, self._steps)

    @cached_property
    def plan(self) -> Plan:
        """The graph laid out for replaying."""
        return Plan(self.graph)

    @cached_property
    def _company(self) -> Company | None:
        return find_company(self.rank, {self.rank: self.a} | self.others) if self.others else None

    @cached_property
    def _joined(self) -> tuple[Together, tuple[WhatIf, ...]] | None:
        """The replay with other ranks and one of these for each of them; ``None``: alone, also
        where the measured steps come out worse than alone."""
        company = self._company
        if company is None:
            return None
        members = [self]
        for number, a, steps in list(
            zip(company.ranks, company.analyses, company.steps, strict=True)
        )[1:]:
            member = WhatIf(a, number)
            member._steps = steps
            members.append(member)
        together = Together(company, [m.graph for m in members])
        if not len(together.node):
            return None
        patched = [
            _patched(Patch(m._selected, dur))
            for m, dur in zip(members, together.transfer, strict=True)
        ]
        with_others = together.run(patched)[0].time
        worse = self._step_error(with_others) - self._step_error(self.plan.run())
        return (together, tuple(members)) if worse <= MAX_WORSE else None

    @cached_property
    def ranks(self) -> tuple[int, ...]:
        """Ranks that are replayed together, this one first; alone: empty."""
        return () if self._joined is None else tuple(m.rank for m in self._joined[1])

    @cached_property
    def _periods(self) -> dict[tuple[tuple[Edit, ...], str, int], float]:
        return {}

    @cached_property
    def _selected(self) -> Selected:
        return Selected(self.a, self.graph)

    @cached_property
    def base(self) -> Outcome:
        """The replay without edits."""
        return self.outcome([])

    @cached_property
    def measured(self) -> Outcome:
        """The same moments, as measured."""
        return Outcome(self.graph.time, completions(self.graph, self.graph.time), self.graph.turn)

    def _step_error(self, time: Array) -> float:
        measured = np.diff(completions(self.graph, self.graph.time))
        replayed = np.diff(completions(self.graph, time))
        return float(np.abs(replayed - measured).sum()) / max(float(measured.sum()), 1.0)

    def outcome(self, edits: Sequence[Edit], assumption: str = "") -> Outcome:
        """Replay with edits applied."""
        time = self._replay(edits, assumption)[0]
        return Outcome(time, completions(self.graph, time), self.graph.turn)

    def _replay(self, edits: Sequence[Edit], assumption: str = "") -> tuple[Array, Array, Patched]:
        """Times of the nodes, what work took (waiting for other ranks included), and the graph."""
        if self._joined is not None:
            together = self._joined[0]
            patched = self._patches(edits, assumption)
            found = together.run(patched)[0]
            dur, mine = patched[0].dur.copy(), together.members[0]
            dur[mine] = found.dur[mine]
            return found.time, dur, patched[0]
        own = _patched(Patch(self._selected).apply(self._own(edits), assumption))
        return self._plan(own.graph).run(own.weight, own.dur, own.src), own.dur, own

    def _patches(
        self, edits: Sequence[Edit], assumption: str = "", *, plain: bool = False
    ) -> list[Patched]:
        """Each rank's graph with the edits that apply to it. Correlation ids select events of one
        trace."""
        assert self._joined is not None
        together, members = self._joined
        found = []
        for member, dur in zip(members, together.transfer, strict=True):
            mine = [
                e
                for e in edits
                if e.rank in (None, member.rank) and (member is self or not e.select.correlation)
            ]
            patch = Patch(member._selected, dur).apply(mine, assumption)
            if plain:
                patch.weight *= member._real_share
            found.append(_patched(patch))
        return found

    def _own(self, edits: Sequence[Edit]) -> list[Edit]:
        """The edits that concern this rank when it is replayed alone."""
        return [e for e in edits if e.rank in (None, self.rank) or e.op == "punctual"]

    def period(self, edits: Sequence[Edit] = (), assumption: str = "") -> float:
        """Steady-state time of a step with edits applied. ``assumption``: ``low`` or ``high`` (a
        small or large gain), or ``plain``: without the host time that the profiler itself takes."""
        return self._period(edits, assumption, 0)

    def _period(self, edits: Sequence[Edit], assumption: str, of: int) -> float:
        """The same, of any of the ranks that are replayed together."""
        if assumption != "plain" and all(
            e.factor_low is None and e.factor_high is None and e.op != "spread" and not e.ahead
            for e in edits
        ):
            assumption = ""
        key = (tuple(edits), assumption, of)
        if key not in self._periods:
            self._periods[key] = self._steady(edits, assumption, of)
        return self._periods[key]

    def _steady(self, edits: Sequence[Edit], assumption: str, of: int) -> float:
        plain = assumption == "plain"
        assumption = "" if plain else assumption
        if self._joined is not None:
            return self._joined[0].steady(self._patches(edits, assumption, plain=plain), of)
        patch = Patch(self._selected).apply(self._own(edits), assumption)
        if plain:
            patch.weight *= self._real_share
        own = _patched(patch)
        return self._plan(own.graph).steady(own.weight, own.dur, own.src)

    def _of(self, edits: Sequence[Edit]) -> int:
        """The rank whose step tells what edits save: this one; another one where this one is
        the late rank that keeps the others waiting."""
        late = any(e.op == "punctual" and e.rank == self.rank for e in edits)
        return 1 if late and self._joined is not None else 0

    def _plan(self, graph: Graph) -> Plan:
        return self.plan if graph is self.graph else Plan(graph)

    def step_after(self, edits: Sequence[Edit]) -> float:
        """The measured step with edits applied: less what they save between two replays."""
        return max(0.0, self.a.step_ns - self.gain(edits))

    def gain(self, edits: Sequence[Edit], given: Sequence[Edit] = ()) -> float:
        """What edits save a step, on top of others that are given."""
        both = [*given, *edits]
        of = self._of(both)
        return self._period(given, "", of) - self._period(both, "", of)

    def band(self, edits: Sequence[Edit], given: Sequence[Edit] = ()) -> tuple[float, float]:
        """(low, high) of the gain: the edits' own assumptions, the profiler's cost on the host,
        and the error of the replay itself."""
        both = [*given, *edits]
        of = self._of(both)
        before = self._period(given, "", of)
        gains = [before - self._period(both, assumption, of) for assumption in ("low", "", "high")]
        gains.append(self._period(given, "plain", of) - self._period(both, "plain", of))
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

    @cached_property
    def unseen_loader(self) -> bool:
        """Batches come from worker processes that always had one ready: how fast these could be
        is not in the trace, and a faster step may have to wait for them."""
        graph, cpu = self.graph, self.a.trace.cpu
        rate = graph.weight[graph.edge == Edge.LOADER]
        if (rate > NEVER).any() or cpu.is_empty():
            return False
        begin, end = graph.origin, graph.origin + float(graph.time[graph.starts[-1]])
        inside = cpu["ts"].is_between(begin, end)
        return bool((matches(cpu["name"], WORKERS) & inside).any())

    def selected(self, edit: Edit) -> int:
        """How many events an edit selects in the replayed steps."""
        return Patch(self._selected).count(edit)

    def critical(self, edits: Sequence[Edit] = ()) -> dict[str, float]:
        """What the critical path consists of with edits applied, ns a step, largest first."""
        time, dur, own = self._replay(edits)
        parts = composition(
            own.graph, time, own.weight, dur, own.src, self.a.kernels["communication"]
        )
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
            step_error=self._step_error(self.base.time),
            total_error=float(replayed.sum() - measured.sum()) / whole,
            explained=float((np.abs(error[device]) <= EXPLAINED_NS).mean())
            if len(device)
            else None,
            starts=len(device),
            hard=hard,
            steps=graph.steps[1] - graph.steps[0],
            of_steps=max(self.a.step_count, graph.steps[1] - graph.steps[0]),
        )
