"""Comparison of splits of a job over numbers of GPUs, by time and cost. Also the choice of ranks
for a projection: the rank with most own work, for which the others wait, and the median rank."""

from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

from advisor.core import text as t
from advisor.core.errors import AdvisorError
from advisor.core.trace import Run
from advisor.measure import Analysis
from advisor.measure.comm.links import NodeLinks
from advisor.measure.comm.mesh import report_mesh
from advisor.measure.ranks.topology import host_of
from advisor.measure.steps.steps import require_used_steps, require_window
from advisor.replay.project.mesh import (
    MedianRank,
    Mesh,
    MeshProjector,
    MeshResult,
    parse_mesh,
    recover_mesh,
)
from advisor.replay.project.project import cost_of_steps

_MAX_GPUS = 1 << 16
SAME_BATCH = "each replica keeps its batch: the job's grows with the data-parallel ranks"


class Instance(NamedTuple):
    """Cloud machine, as in a price file: ``[instances."p5en.48xlarge"]``."""

    gpu: str
    gpus: int
    price: float | None = None
    """Price per hour of the whole machine."""
    network: float | None = None
    """Network rate of a GPU across machines, GB/s in one direction."""
    cores: int | None = None


class Split(NamedTuple):
    """Mesh of some GPUs. Times are ns per step, or null if it cannot be projected, for the reason
    in ``refused``."""

    gpus: int
    mesh: str
    step_ns: float | None = None
    low_ns: float | None = None
    high_ns: float | None = None
    exposed_ns: float | None = None
    """Exposed communication and the pipeline's bubble."""
    speed: float | None = None
    """Samples per second of the whole job over the recorded job's."""
    cost: float | None = None
    """Cost of the samples of a million recorded steps, or of an epoch."""
    low_cost: float | None = None
    high_cost: float | None = None
    refused: str = ""


def read_instance(tables: Any, name: str) -> Instance:
    """Read one entry of a price file's ``instances``. Raises AdvisorError if it is invalid."""
    entry = tables.get(name) if isinstance(tables, dict) else None
    if not isinstance(entry, dict):
        names = ", ".join(map(repr, tables)) if isinstance(tables, dict) and tables else "none"
        raise AdvisorError(f'--instance {name}: no [instances."{name}"] in --prices; has {names}')
    gpu, gpus, *numbers = (entry.get(key) for key in Instance._fields)
    are_valid = all(v is None or (type(v) in (int, float) and 0 <= v < 1e9) for v in numbers)
    is_known = are_valid and not set(entry) - set(Instance._fields)
    if is_known and isinstance(gpu, str) and type(gpus) is int and 0 < gpus <= _MAX_GPUS:
        return Instance(gpu, gpus, *numbers)
    fields = ", ".join(Instance._fields)
    raise AdvisorError(f"instance {name}: {fields}: a GPU's name, its count, and numbers")


def candidate_meshes(measured: Mesh, gpus: int, node: int | None) -> Iterator[Mesh]:
    """Yield the splits of a number of GPUs: tensor-parallel in powers of two within a node, the
    recorded pipeline and context, the rest data-parallel."""
    fixed, tp = measured.pp * measured.cp, 1
    while tp <= (node or measured.tp):
        if gpus % (fixed * tp) == 0:
            dp = gpus // (fixed * tp)
            if dp % measured.ep == 0:
                yield measured._replace(dp=dp, tp=tp)
        tp *= 2


def compare_splits(
    projector: MeshProjector,
    counts: Iterable[int],
    price: float | None,
    nodes: int | None = None,
    steps: float | None = None,
) -> list[Split]:
    """Return all splits by count, most samples per second first. ``price``: per GPU and hour;
    ``nodes``: number of machines, which divides each count; ``steps``: recorded steps of the cost,
    else a million. Each replica keeps its batch, so the job's batch grows with the data-parallel
    ranks."""
    result = []
    for gpus in counts:
        if nodes is not None:
            projector = projector.with_node_size(gpus // nodes)
        rows = [
            _project(projector, mesh, price, steps or 1e6)
            for mesh in candidate_meshes(projector.measured, gpus, projector.node_there)
        ]
        rows = rows or [
            Split(gpus, "", refused=f"{projector.measured} does not divide {gpus} GPUs")
        ]
        result += sorted(rows, key=lambda row: -(row.speed or 0.0))
    return result


def _project(projector: MeshProjector, mesh: Mesh, price: float | None, steps: float) -> Split:
    try:
        result = projector.on(mesh)
    except AdvisorError as error:
        return Split(mesh.world, str(mesh), refused=str(error))
    ends = (result.step_ns, result.low_ns, result.high_ns)
    hourly = None if price is None else price * mesh.world / result.batch
    costs = [cost_of_steps(hourly, ns, steps) for ns in ends]
    return Split(
        mesh.world,
        str(mesh),
        *ends,
        exposed_ns=sum(axis.then_exposed_ns for axis in result.axes) + result.then_bubble_ns,
        speed=result.batch * result.measured_step_ns / result.step_ns,
        cost=costs[0],
        low_cost=costs[1],
        high_cost=costs[2],
    )


MAX_EQUAL_EXCESS = 0.01
"""Maximum excess over the median work, as a share, that counts as equal."""


class PacingRank(NamedTuple):
    """Ranks by their own work: device time per step without communication, ns, or the step without
    a device."""

    slowest: int
    median: int
    """Rank with the median work, the lower of two, or the slowest rank if it has hardly more
    work."""
    work: dict[int, float]
    """Own work by rank, ns per step."""

    @property
    def notes(self) -> list[str]:
        """Sentence on the slowest and the median rank, with their work; empty for one rank."""
        return [self.sentence] if len(self.work) > 1 else []

    @property
    def sentence(self) -> str:
        """Sentence that names the slowest and the median rank, with their work."""
        if self.median == self.slowest:
            work_text = t.format_duration(self.work[self.slowest])
            return (
                f"the step is that of rank {self.slowest}; none of {len(self.work)} ranks has more "
                f"work, {work_text} per step without communication, and half have as much"
            )
        highest, median = (t.format_duration(self.work[n]) for n in (self.slowest, self.median))
        return (
            f"rank {self.slowest} has the most work of {len(self.work)} ranks, {highest} per step "
            f"without communication; the median, rank {self.median}, has {median}"
        )


def find_pacing_rank(
    run: Run, rank: int | None = None, steps: tuple[int | None, int | None] | None = None
) -> PacingRank:
    """Return the ranks that limit the job, of all with a trace or of one. Raises AdvisorError if
    there is no profiled window, or a rank has none of these steps."""
    require_window(run, "nothing to project")
    work = {}
    for number in run.ranks if rank is None else [rank]:
        a = read_rank(run, number, steps)
        busy = None if a.device_id is None else a.breakdown.compute.total / a.step_count
        work[number] = float(a.step_ns) if busy is None else busy
    order = sorted(work, key=lambda number: (-work[number], number))
    slowest, median = order[0], order[len(order) // 2]
    is_equal = work[slowest] <= (1 + MAX_EQUAL_EXCESS) * work[median]
    return PacingRank(slowest, slowest if is_equal else median, work)


def read_rank(run: Run, rank: int, steps: tuple[int | None, int | None] | None) -> Analysis:
    """Return one rank's analysis, with the recorder's data. Raises AdvisorError if it has none of
    these steps."""
    record = None if run.recording is None else run.recording.ranks.get(max(rank, 0))
    result = Analysis(run.window(rank), steps, record)
    require_used_steps(result.steps, result.trace.meta.path, rank, selected=steps is not None)
    return result


def find_epoch(a: Analysis, steps: int | None, samples: int | None) -> float | None:
    """Return the recorded steps of an epoch: as given, by its ``samples``, or by the length of the
    recorded loader; ``None`` if unknown. Raises AdvisorError if samples per step are unknown."""
    if steps is not None:
        return float(steps)
    if samples is None:
        return None if a.run_steps is None else a.run_steps.epoch_steps
    samples_per_step = None if a.run_steps is None else a.run_steps.samples_per_step
    if samples_per_step is None:
        raise AdvisorError("--epoch-samples: samples per step were not recorded: --epoch-steps N")
    world = a.trace.meta.world_size or 1
    replicas = recover_mesh(report_mesh(a), world).dp if world > 1 else 1
    return samples / (samples_per_step * replicas)


def project_ranks(
    run: Run,
    rank: int | None,
    mesh: str,
    *,
    steps: tuple[int | None, int | None] | None = None,
    recorded_mesh: str | None = None,
    node_size: int | None = None,
    node_bandwidth: float | None = None,
    same_batch: bool = False,
    micro_batches: int | None = None,
) -> MeshResult:
    """Project the step of a rank onto another mesh; without ``rank``, of the slowest and the median
    rank. Raises AdvisorError if the mesh cannot be read or projected."""
    target = parse_mesh(mesh)
    recorded = None if recorded_mesh is None else parse_mesh(recorded_mesh)
    names = {number: host_of(run.window(number).meta.path) for number in run.ranks}
    hosts = {number: host for number, host in names.items() if host}
    links = NodeLinks(node_size, node_bandwidth, hosts)
    pace = find_pacing_rank(run, rank, steps)

    def project(number: int) -> MeshResult:
        projector = MeshProjector(read_rank(run, number, steps), recorded, links)
        return projector.on(target, same_batch=same_batch, micro_batches=micro_batches)

    result = project(pace.slowest)
    if len(pace.work) == 1:
        return result
    second = result if pace.median == pace.slowest else project(pace.median)
    median = MedianRank(
        pace.median, second.measured_step_ns, second.step_ns, second.low_ns, second.high_ns
    )
    notes = (*result.notes, pace.sentence)
    return result._replace(rank=pace.slowest, median=median, notes=notes)
