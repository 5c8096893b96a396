"""How many GPUs, and which split of the job over them: meshes compared by time and money."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from advisor.core.errors import AdvisorError
from advisor.replay.project.mesh import Mesh, MeshProjector
from advisor.replay.project.project import cost_of_steps

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

MAX_GPUS = 1 << 16


class Instance(NamedTuple):
    """A machine of a cloud, as a price file has it: ``[instances."p5en.48xlarge"]``."""

    gpu: str
    gpus: int
    price: float | None = None
    """An hour of the whole machine."""
    network: float | None = None
    """Of a GPU across machines, GB/s in one direction."""
    cores: int | None = None


class Split(NamedTuple):
    """A mesh of some GPUs. Times ns per step; null: it cannot be projected, and ``refused`` says
    why."""

    gpus: int
    mesh: str
    step_ns: float | None = None
    low_ns: float | None = None
    high_ns: float | None = None
    exposed_ns: float | None = None
    """Communication that nothing hides, and the pipeline's bubble."""
    speed: float | None = None
    """Samples per second of the whole job, over those of the recorded one."""
    cost: float | None = None
    """Money for the samples of a million recorded steps, or of those of an epoch."""
    low_cost: float | None = None
    high_cost: float | None = None
    refused: str = ""


def read_instance(tables: Any, name: str) -> Instance:
    """One entry of a price file's ``instances``. Raises AdvisorError."""
    entry = tables.get(name) if isinstance(tables, dict) else None
    if not isinstance(entry, dict):
        have = ", ".join(map(repr, tables)) if isinstance(tables, dict) and tables else "none"
        raise AdvisorError(f'--instance {name}: no [instances."{name}"] in --prices; has {have}')
    gpu, gpus, *rest = (entry.get(key) for key in Instance._fields)
    numbers = all(v is None or (type(v) in (int, float) and 0 <= v < 1e9) for v in rest)
    known = numbers and not set(entry) - set(Instance._fields)
    if known and isinstance(gpu, str) and type(gpus) is int and 0 < gpus <= MAX_GPUS:
        return Instance(gpu, gpus, *rest)
    fields = ", ".join(Instance._fields)
    raise AdvisorError(f"instance {name}: {fields}: a GPU's name, its count, and numbers")


def candidate_meshes(measured: Mesh, gpus: int, node: int | None) -> Iterator[Mesh]:
    """The splits of a number of GPUs: tensor-parallel in powers of two within a node, the recorded
    pipeline and context, the rest data-parallel."""
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
    """All splits: by count, the most samples per second first. ``price``: an hour of one GPU;
    ``nodes``: machines that share each count, which they divide; ``steps``: that the cost is of,
    else a million. Each replica keeps its batch, so that the job's grows with the data-parallel
    ranks."""
    result = []
    for gpus in counts:
        if nodes is not None:
            projector = projector.on_nodes_of(gpus // nodes)
        rows = [
            _split(projector, mesh, price, steps or 1e6)
            for mesh in candidate_meshes(projector.measured, gpus, projector.node_there)
        ]
        rows = rows or [
            Split(gpus, "", refused=f"{projector.measured} does not divide {gpus} GPUs")
        ]
        result += sorted(rows, key=lambda row: -(row.speed or 0.0))
    return result


def _split(projector: MeshProjector, mesh: Mesh, price: float | None, steps: float) -> Split:
    try:
        there = projector.on(mesh)
    except AdvisorError as error:
        return Split(mesh.world, str(mesh), refused=str(error))
    ends = (there.step_ns, there.low_ns, there.high_ns)
    hourly = None if price is None else price * mesh.world / there.batch
    costs = [cost_of_steps(hourly, ns, steps) for ns in ends]
    return Split(
        mesh.world,
        str(mesh),
        *ends,
        exposed_ns=sum(axis.then_exposed_ns for axis in there.axes) + there.then_bubble_ns,
        speed=there.batch * there.measured_step_ns / there.step_ns,
        cost=costs[0],
        low_cost=costs[1],
        high_cost=costs[2],
    )
