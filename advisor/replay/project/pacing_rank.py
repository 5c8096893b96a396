"""Which ranks of a job a projection is made from: the one with most work of its own, which the
others wait for, and the median one."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from advisor.core import text as t
from advisor.core.errors import AdvisorError
from advisor.measure import Analysis
from advisor.measure.comm.links import NodeLinks
from advisor.measure.comm.mesh import report_mesh
from advisor.measure.ranks.members import host_of
from advisor.measure.steps.steps import refuse_none
from advisor.replay.project.mesh import (
    MedianRank,
    MeshProjector,
    MeshResult,
    parse_mesh,
    recover_mesh,
)

if TYPE_CHECKING:
    from advisor.core.trace import Run


SAME = 0.01
"""Of the median work, up to which the most is the same."""


class Pace(NamedTuple):
    """Ranks by the work of their own: device time per step without communication, ns; without a
    device the step."""

    slowest: int
    median: int
    """The lower one of an even number; the slowest, where it has hardly more work."""
    work: dict[int, float]
    """By rank."""

    @property
    def sentence(self) -> str:
        """Which ranks, of how many, and what they have to do."""
        if self.median == self.slowest:
            own = t.format_duration(self.work[self.slowest])
            return (
                f"the step is that of rank {self.slowest}; none of {len(self.work)} ranks has more "
                f"work, {own} per step without communication, and half have as much"
            )
        most, middle = (t.format_duration(self.work[n]) for n in (self.slowest, self.median))
        return (
            f"rank {self.slowest} has the most work of {len(self.work)} ranks, {most} per step "
            f"without communication; the median, rank {self.median}, has {middle}"
        )


def find_pace(
    run: Run, rank: int | None = None, steps: tuple[int | None, int | None] | None = None
) -> Pace:
    """Of all ranks of a run that have a trace, or of one. Raises AdvisorError: a rank has none of
    these steps."""
    work = {}
    for number in run.ranks if rank is None else [rank]:
        a = read_rank(run, number, steps)
        busy = None if a.device_id is None else a.breakdown.compute.total / a.step_count
        work[number] = float(a.step_ns) if busy is None else busy
    order = sorted(work, key=lambda number: (-work[number], number))
    slowest, median = order[0], order[len(order) // 2]
    same = work[slowest] <= (1 + SAME) * work[median]
    return Pace(slowest, slowest if same else median, work)


def read_rank(run: Run, rank: int, steps: tuple[int | None, int | None] | None) -> Analysis:
    """One rank, with what the recorder wrote of it. Raises AdvisorError: it has none of these
    steps."""
    record = None if run.recording is None else run.recording.ranks.get(max(rank, 0))
    result = Analysis(run.window(rank), steps, record)
    refuse_none(result.steps, result.trace.meta.path, rank, selected=steps is not None)
    return result


def find_epoch(a: Analysis, steps: int | None, samples: int | None) -> float | None:
    """Recorded steps of an epoch: as given, by the ``samples`` of one, or by the length of the
    recorded loader; ``None``: unknown. Raises AdvisorError: samples per step are unknown."""
    if steps is not None:
        return float(steps)
    if samples is None:
        return None if a.recorded is None else a.recorded.epoch_steps
    own = None if a.recorded is None else a.recorded.samples_per_step
    if own is None:
        raise AdvisorError("--epoch-samples: samples per step were not recorded: --epoch-steps N")
    world = a.trace.meta.world_size or 1
    replicas = recover_mesh(report_mesh(a), world).dp if world > 1 else 1
    return samples / (own * replicas)


def project_ranks(
    run: Run,
    rank: int | None,
    mesh: str,
    *,
    steps: tuple[int | None, int | None] | None = None,
    from_mesh: str | None = None,
    node_size: int | None = None,
    network: float | None = None,
    same_batch: bool = False,
    micro_batches: int | None = None,
) -> MeshResult:
    """The step of one rank on another mesh, without one that of the slowest, with the median one's
    beside it. Raises AdvisorError: the mesh cannot be read or projected."""
    there = parse_mesh(mesh)
    recorded = None if from_mesh is None else parse_mesh(from_mesh)
    names = {number: host_of(run.window(number).meta.path) for number in run.ranks}
    hosts = {number: host for number, host in names.items() if host}
    links = NodeLinks(node_size, network, hosts)
    pace = find_pace(run, rank, steps)

    def project(number: int) -> MeshResult:
        projector = MeshProjector(read_rank(run, number, steps), recorded, links)
        return projector.on(there, same_batch=same_batch, micro_batches=micro_batches)

    result = project(pace.slowest)
    if len(pace.work) == 1:
        return result
    other = result if pace.median == pace.slowest else project(pace.median)
    median = MedianRank(
        pace.median, other.measured_step_ns, other.step_ns, other.low_ns, other.high_ns
    )
    notes = (*result.notes, pace.sentence)
    return result._replace(rank=pace.slowest, median=median, notes=notes)
