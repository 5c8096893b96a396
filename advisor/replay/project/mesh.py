"""Projection of a measured step to another device mesh: other sizes of data, tensor, pipeline,
context and expert parallelism, on the same GPUs.

Recorded kernels and collectives are replayed with other lengths. Unrecorded work (collectives of an
axis of one rank, the bubble of another pipeline) is added by formula:

- Bytes and steps of rings: nccl-tests, doc/PERFORMANCE.md; latency: NCCL, src/graph/tuning.cc.
- Tensor parallelism adds two all-reduces of the activations for each layer and pass
  (arXiv:1909.08053, section 3).
- A pipeline waits (p - 1) / m of its work (arXiv:2104.04473, section 2.2)."""

from __future__ import annotations

import math
from copy import copy
from functools import cached_property
from typing import NamedTuple

import numpy as np
import polars as pl

from advisor.core.errors import AdvisorError
from advisor.core.intervals import Array
from advisor.core.layers import MeshAxis
from advisor.measure import Analysis
from advisor.measure.comm.links import NodeLinks, find_node_size, ring_latency
from advisor.measure.comm.mesh import count_passes, report_mesh
from advisor.measure.comm.messages import bus_factor
from advisor.measure.device.families import MATRIX
from advisor.measure.device.matmuls import parse_attention
from advisor.measure.device.shapes import OpInputs
from advisor.replay.ledger import mesh_error
from advisor.replay.project.device_scaling import shortest_kernel
from advisor.replay.project.project import find_recorded_gpu, scaled_step
from advisor.replay.window_replayer import WindowReplayer

SHORT_NAMES = {
    "data": "dp", "sharded data": "dp", "tensor": "tp", "pipeline": "pp", "context": "cp",
    "expert": "ep", "all-to-all": "ep",
}  # fmt: skip
ATTAINED_SHARES = (0.67, 0.82, 1.07)
"""Attained bus bandwidth over the links' datasheet, if none was recorded. 0.82: by NCCL's protocol
(maintainer, NVIDIA/nccl-tests issue 212: 370 of 450 GB/s). From 0.67 (200 of 300 GB/s on A100,
issue 149) to 1.07 (480 of 450 with NVLink SHARP, issue 212)."""
LOW, MIDDLE, HIGH = 0, 1, 2
"""Indices into a range. They also choose the protocol of a ring's latency (``links.BASE_NS``)."""


class Mesh(NamedTuple):
    """Numbers of ranks along each axis. Experts are spread over the data-parallel ranks (``ep``
    divides ``dp``), as in Megatron-LM and torchtitan; ranks are numbered tensor first, pipeline
    last."""

    dp: int = 1
    tp: int = 1
    pp: int = 1
    cp: int = 1
    ep: int = 1

    @property
    def world(self) -> int:
        """Number of GPUs."""
        return self.dp * self.tp * self.pp * self.cp

    def extent(self, axis: str) -> tuple[int, int]:
        """Return the size of an axis's group, and the distance of neighbours in rank numbers.
        Gradients are also summed over context-parallel ranks."""
        if axis == "dp":
            return self.dp * self.cp, self.tp
        stride = {"tp": 1, "cp": self.tp, "pp": self.world // self.pp}
        return getattr(self, axis), stride.get(axis, self.tp * self.cp)

    def __str__(self) -> str:
        return ",".join(f"{name}={size}" for name, size in self._asdict().items() if size > 1) or (
            "dp=1"
        )


def parse_mesh(text: str) -> Mesh:
    """Parse ``dp=8,tp=4``; an axis without a value is 1. Raises AdvisorError for other text."""
    sizes: dict[str, int] = {}
    for part in text.replace(" ", "").split(","):
        name, _, size = part.partition("=")
        if name not in Mesh._fields or name in sizes or not size.isdecimal() or not int(size):
            raise AdvisorError(f"--mesh {text}: write it as dp=8,tp=4 ({', '.join(Mesh._fields)})")
        sizes[name] = int(size)
    mesh = Mesh(**sizes)
    if mesh.world > 1 << 20 or mesh.dp % mesh.ep:
        raise AdvisorError(f"--mesh {text}: ep has to divide dp; at most a million ranks")
    return mesh


class MeshAxisChange(NamedTuple):
    """Communication of one axis on both meshes, ns per step: transfers without waits."""

    axis: str
    ns: float
    then_ns: float
    exposed_ns: float
    """Recorded exposed communication, including waits, during which nothing computes."""
    then_exposed_ns: float


class MedianRank(NamedTuple):
    """Step of another rank on the same mesh. Times in ns per step."""

    rank: int
    measured_step_ns: float
    step_ns: float
    low_ns: float
    high_ns: float


class MeshResult(NamedTuple):
    """Step on another mesh. Times in ns per step."""

    measured: Mesh
    mesh: Mesh
    measured_step_ns: float
    step_ns: float
    low_ns: float
    high_ns: float
    throughput: float
    """Samples per second and GPU on the other mesh over the recorded one."""
    batch: float
    """Batch of the job on the other mesh over the recorded one."""
    micro_batches: int
    compute_ns: float
    """Kernels without communication, as recorded."""
    then_compute_ns: float
    bubble_ns: float
    """Bubble of the recorded pipeline, as measured; ``then_bubble_ns`` is by formula."""
    then_bubble_ns: float
    axes: tuple[MeshAxisChange, ...]
    memory: tuple[int, int] | None
    """Lowest and highest peak memory of a GPU, bytes, or ``None`` if not recorded."""
    replayed: bool
    notes: tuple[str, ...]
    rank: int | None = None
    """Rank of these figures: the rank with most own work, or ``None`` for the only rank."""
    median: MedianRank | None = None
    """Step of the rank with the median work, or ``None`` if one rank was projected."""


def recover_mesh(axes: list[MeshAxis], world: int | None) -> Mesh:
    """Return the mesh along which a rank communicates. Raises AdvisorError if the job has
    another."""
    sizes = dict.fromkeys(Mesh._fields, 1)
    for axis in axes:
        name = SHORT_NAMES.get(axis.axis)
        if name is None or axis.size is None:
            continue
        # sharded within a node and replicated across nodes: both are data-parallel
        is_split = name == "dp" and {"data", "sharded data"} <= {each.axis for each in axes}
        sizes[name] = sizes[name] * axis.size if is_split else max(sizes[name], axis.size)
    if sizes["ep"] > 1:
        sizes["dp"] = math.lcm(sizes["dp"], sizes["ep"])
    product = math.prod(sizes[name] for name in ("dp", "tp", "pp"))
    if sizes["dp"] > 1 and sizes["dp"] % sizes["cp"] == 0 and product == world:
        sizes["dp"] //= sizes["cp"]  # gradients are summed over both
    mesh = Mesh(**sizes)
    if world and mesh.world != world:
        raise AdvisorError(
            f"the collectives show {mesh}, which is {mesh.world} of {world} ranks; say what was "
            "recorded with --recorded-mesh dp=..,tp=.."
        )
    return mesh


class MeshProjector:
    """Projector of one rank's steps. Raises AdvisorError if there is no device work or step."""

    def __init__(
        self, a: Analysis, measured: Mesh | None = None, node_links: NodeLinks | None = None
    ) -> None:
        path = a.trace.meta.path or "trace"
        if a.device_id is None or a.steps.used.is_empty() or a.span_ns <= 0:
            raise AdvisorError(f"{path}: no steps with device work, so nothing to project")
        find_recorded_gpu(a)
        self.a = a
        self.node_links = node_links or a.node_links
        self.axes = report_mesh(a, self.node_links)
        self.measured = measured or recover_mesh(self.axes, a.trace.meta.world_size)
        self.node = find_node_size(a, self.node_links)
        """Number of GPUs in a recorded node, or ``None`` if unknown."""
        self.node_there = self.node

    def with_node_size(self, gpus: int) -> MeshProjector:
        """Return a projector of the same recording onto nodes of another size."""
        result = copy(self)
        result.node_there = gpus
        return result

    def _node(self, mesh: Mesh) -> int | None:
        return self.node if mesh is self.measured else self.node_there

    @cached_property
    def replayer(self) -> WindowReplayer:
        """The replay, built once."""
        return WindowReplayer(self.a)

    @cached_property
    def replayed(self) -> bool:
        """Whether the replay is good enough to be used."""
        return not self.replayer.unusable_reason

    @cached_property
    def slots(self) -> int:
        """Number of micro-batches in a recorded step, by a pipeline's sends, else by forward
        passes."""
        counts = [axis.micro_batches for axis in self.axes if axis.axis == "pipeline"]
        return max((count for count in counts if count), default=0) or count_passes(self.a)

    @cached_property
    def table(self) -> pl.DataFrame:
        """Collectives, each with ``short``, its axis's name in a mesh (``None`` if it has none),
        and ``transfer``, ns without waits: the shortest of its kind and size."""
        keys = ["axis", "collective", "bytes", "group_size"]
        return self.a.collectives.with_columns(
            short=pl.col("axis").cast(pl.String).replace_strict(SHORT_NAMES, default=None),
            transfer=pl.min_horizontal("dur", pl.col("dur").quantile(0.1).over(keys)),
        )

    # -- links ------------------------------------------------------------------------------

    def _local_ranks(self, mesh: Mesh, axis: str) -> int:
        """Return the ranks of an axis's group in one node. AdvisorError if its size is unknown."""
        size, stride = mesh.extent(axis)
        node = self._node(mesh)
        if node is None:
            raise AdvisorError(
                "the size of a node is unknown, so which ranks share one: --node-size N"
            )
        return max(1, min(size, node // stride))

    def crosses(self, mesh: Mesh, axis: str) -> bool:
        """Return whether an axis's groups span nodes. Raises AdvisorError if unknown."""
        size, stride = mesh.extent(axis)
        node = self._node(mesh)
        if mesh == self.measured and node is None:
            return False
        return self._local_ranks(mesh, axis) < size and stride * size > (node or 0)

    @cached_property
    def _node_rates(self) -> tuple[float, float, float]:
        """Bus bandwidth inside a node, bytes per ns, slowest first: recorded, else attained shares
        of the datasheet. Raises AdvisorError if neither is known."""
        recorded = self._recorded_rates(crossing=False)
        if recorded:
            best = max(recorded)
            return min(recorded), best, best
        link = None if self.a.hardware is None else self.a.hardware.link
        if link is None:
            raise AdvisorError("the bandwidth between GPUs of a node is neither recorded nor known")
        return (
            link.gb_per_s * ATTAINED_SHARES[0],
            link.gb_per_s * ATTAINED_SHARES[1],
            link.gb_per_s * ATTAINED_SHARES[2],
        )

    @cached_property
    def _network_rates(self) -> tuple[float, float, float]:
        """Bus bandwidth of one GPU across nodes, bytes per ns, slowest first."""
        recorded = self._recorded_rates(crossing=True)
        if recorded:
            best = max(recorded)
            return min(recorded), best, best
        network_rate = self.node_links.network_gb_per_s
        if network_rate is None:
            raise AdvisorError(
                "nothing recorded crosses nodes, and the new mesh does: --node-bandwidth GB/S says "
                "how fast a GPU sends there"
            )
        return network_rate * ATTAINED_SHARES[0], network_rate * ATTAINED_SHARES[1], network_rate

    def _has_assumptions(self, mesh: Mesh) -> bool:
        """Return whether an axis of the mesh, or the rate of one of its links, was not recorded."""
        axes = [axis for axis in ("dp", "tp", "pp", "cp") if mesh.extent(axis)[0] > 1]
        if mesh != self.measured and any(self.measured.extent(axis)[0] == 1 for axis in axes):
            return True
        links = {self.crosses(mesh, axis) for axis in axes}
        return any(not self._recorded_rates(crossing=crossing) for crossing in links)

    def _recorded_rates(self, *, crossing: bool) -> list[float]:
        """Return bus bandwidths by axis, for transfers of at least 1 MiB, bytes per ns of one
        GPU."""
        result = []
        large = self.table.filter(pl.col("short").is_not_null(), pl.col("bytes") >= 1 << 20)
        for (axis, kind, size, group), rows in large.group_by(
            "short", "collective", "bytes", "group_size"
        ):
            name = str(axis)
            factor = bus_factor(str(kind), int(group) if group else None)
            if factor is None or self.crosses(self.measured, name) is not crossing:
                continue
            hops = self.latency(self.measured, name, str(kind), MIDDLE)
            ns = max(1.0, float(rows["transfer"].to_numpy().min()) - hops)
            share = (
                self._local_ranks(self.measured, name) if crossing and kind != "send_recv" else 1
            )
            result.append(float(size) * factor / ns / share)
        return result

    def latency(self, mesh: Mesh, axis: str, kind: str, protocol: int) -> float:
        """Return a ring's latency, ns: its base, and one hop per step from rank to rank."""
        size, _ = mesh.extent(axis)
        local = self._local_ranks(mesh, axis) if self.crosses(mesh, axis) else size
        return ring_latency(kind, size, local, protocol)

    def transfer(self, mesh: Mesh, axis: str, kind: str, size: float, bound: int) -> float:
        """Return the time of one collective along an axis of a mesh once all ranks have arrived,
        ns. ``bound``: LOW, MIDDLE, HIGH."""
        ranks, _ = mesh.extent(axis)
        factor = bus_factor(kind, ranks)
        if factor is None:
            return 0.0
        end = (HIGH, MIDDLE, LOW)[bound]
        if self.crosses(mesh, axis):
            rate = self._network_rates[end]
            if kind != "send_recv":  # a ring enters and leaves each node once, over all its NICs
                rate = min(self._node_rates[end], rate * self._local_ranks(mesh, axis))
        else:
            rate = self._node_rates[end]
        return self.latency(mesh, axis, kind, bound) + size * factor / rate

    # -- the step ---------------------------------------------------------------------------

    def on(
        self, mesh: Mesh, *, same_batch: bool = False, micro_batches: int | None = None
    ) -> MeshResult:
        """Project the step onto another mesh. The batch of a data-parallel replica stays, or with
        ``same_batch`` the batch of the job. Micro-batches keep their size unless ``micro_batches``
        gives their number. Raises AdvisorError if the recording lacks necessary data."""
        old = self.measured
        mesh = mesh._replace()  # the recorded mesh on other nodes is another mesh
        if (mesh.ep > 1) != (old.ep > 1) and mesh.ep > 1:
            raise AdvisorError("no all-to-all of experts was recorded, so ep cannot be projected")
        replica = old.dp / mesh.dp if same_batch else 1.0
        slots = micro_batches or max(1, round(self.slots * replica))
        count = slots / self.slots  # micro-batches, so launches of each layer
        size = replica / count  # of a micro-batch
        work = _MeshWork(self, mesh, count, size)
        ends = [self._step(mesh, work, bound, slots) for bound in (LOW, MIDDLE, HIGH)]
        # the ratio of two predictions: their common error cancels out
        recorded_step = self._step(old, _MeshWork(self, old, 1.0, 1.0), MIDDLE, self.slots)[0]
        steps = [end[0] * ratio for end in ends for ratio in (1.0, self.a.step_ns / recorded_step)]
        step = ends[MIDDLE][0] * self.a.step_ns / recorded_step
        error = math.exp(mesh_error(assumed=self._has_assumptions(mesh)))
        batch = replica * mesh.dp / old.dp
        then_bubble, exposed = ends[MIDDLE][1:]
        return MeshResult(
            measured=old,
            mesh=mesh,
            measured_step_ns=self.a.step_ns,
            step_ns=step,
            low_ns=min(*steps, step / error),
            high_ns=max(*steps, step * error),
            throughput=batch * self.a.step_ns / step * old.world / mesh.world,
            batch=batch,
            micro_batches=slots,
            compute_ns=work.compute(here=True),
            then_compute_ns=work.compute(here=False),
            bubble_ns=sum(axis.idle_ns or 0.0 for axis in self.axes),
            then_bubble_ns=then_bubble,
            axes=self._axis_changes(work, exposed),
            memory=self._memory(mesh, size, slots),
            replayed=self.replayed,
            notes=tuple(self._notes(mesh, size)),
        )

    def _step(
        self, mesh: Mesh, work: _MeshWork, bound: int, slots: int
    ) -> tuple[float, float, dict[str, float]]:
        """Return the step, its bubble, and the time of new collectives by axis, ns."""
        factor = work.factors(bound)
        step = scaled_step(self.replayer, factor, host=work.launches)
        added = work.added(bound)
        step += sum(added.values())
        # a pipeline waits for other stages, except in the optimizer and after it
        once_ns = work.once(bound)
        bubble = max(0.0, step - once_ns) * (mesh.pp - 1) / slots
        return step + bubble, bubble, added

    def _axis_changes(self, work: _MeshWork, added: dict[str, float]) -> tuple[MeshAxisChange, ...]:
        factor, steps = work.factors(MIDDLE), self.a.step_count
        result = []
        for axis in ("dp", "tp", "pp", "cp", "ep"):
            rows = self.table.filter(pl.col("short") == axis)
            ns = float(rows["transfer"].to_numpy().sum()) / steps
            then = float((rows["dur"].to_numpy() * factor[rows["gpu"].to_numpy()]).sum()) / steps
            exposed = float(rows["exposed"].to_numpy().sum()) / steps
            share = min(1.0, exposed / max(float(rows["dur"].to_numpy().sum()) / steps, 1.0))
            extra = added.get(axis, 0.0)
            if ns or then or extra:
                result.append(MeshAxisChange(axis, ns, then + extra, exposed, then * share + extra))
        return tuple(result)

    def _memory(self, mesh: Mesh, size: float, slots: int) -> tuple[int, int] | None:
        """Return lowest and highest peak memory, bytes, or ``None`` if not recorded. Parameters and
        optimizer scale with the model's share; activations with batch, sequence, layers and min(p,
        m) micro-batches in flight (arXiv:2104.04473). Their parts of the peak are unknown."""
        samples = self.a.memory.filter(pl.col("device") == self.a.device_id)
        peak = samples["peak_allocated"].max() if samples.height else None
        if peak is None and self.a.rank_record is not None:
            peak = max((step.peak for step in self.a.rank_record.steps if step.peak), default=None)
        if not isinstance(peak, int):
            return None
        old = self.measured
        flight_ratio = min(mesh.pp, slots) / min(old.pp, self.slots)
        model = old.tp * old.pp / (mesh.tp * mesh.pp)
        if any(axis.axis == "sharded data" for axis in self.axes):
            model *= old.dp / mesh.dp
        activations = size * old.cp / mesh.cp * old.pp / mesh.pp * flight_ratio
        parts = (model, activations, activations * old.tp / mesh.tp)
        return round(peak * min(parts)), round(peak * max(parts))

    def _notes(self, mesh: Mesh, size: float) -> list[str]:
        old = self.measured
        notes = [
            "links, hosts and other jobs on the network are taken to stay as they were recorded"
        ]
        if mesh.tp != old.tp or mesh.cp != old.cp or abs(size - 1) > 1e-9:
            notes.append(
                "kernels of another size may attain more or less than these: the range allows for "
                "tiles that are left empty, not for kernels that the library chooses anew"
            )
        if mesh.pp != old.pp:
            notes.append("the stages are taken to be of equal length, and their layers to divide")
        if mesh.ep != old.ep:
            notes.append("the load of the experts is taken to stay as it was recorded")
        if len(self.a.trace.meta.devices) and mesh.tp > old.tp:
            notes.append(
                "elementwise kernels and norms may or may not be split: the range has both"
            )
        if not self.replayed:
            notes.append(f"{self.replayer.unusable_reason}: busy time is scaled and idle time kept")
        if mesh.pp > 1:
            notes.append(f"a step has {self.slots} micro-batches in the recording")
        return notes


class _MeshWork:
    """Time of each piece of device work on another mesh."""

    def __init__(self, owner: MeshProjector, mesh: Mesh, count: float, size: float) -> None:
        old, a = owner.measured, owner.a
        self.of, self.mesh = owner, mesh
        self.layers = old.pp / mesh.pp
        self.launches = self.layers * count
        """Launches per step on the other mesh over the recorded one."""
        gpu, kernels = a.trace.gpu, a.kernels
        family = kernels["family"].cast(pl.String).fill_null("other")
        is_communication = kernels["communication"].fill_null(value=False).to_numpy()
        self.kernel = (gpu["kind"] == "kernel").to_numpy() & ~is_communication
        self.matrix = self.kernel & family.is_in([*MATRIX, "softmax"]).to_numpy()
        self.optimizer = self.kernel & (family == "optimizer").to_numpy()
        self.norm = self.kernel & (family == "normalisation").to_numpy()
        self.dur = np.maximum(gpu["dur"].to_numpy().astype(float), 1.0)
        self.waves = kernels["waves"].cast(pl.Float64).fill_null(np.nan).to_numpy()
        self.tokens = size * old.cp / mesh.cp
        self.split = old.tp / mesh.tp
        vendor = a.trace.meta.vendor or "nvidia"
        vendors = {"nvidia", "amd"} & {vendor}
        self.base = shortest_kernel(self.dur[self.kernel], vendor if vendors else "nvidia")
        sharded = any(axis.axis == "sharded data" for axis in owner.axes)
        self.parameters = self.layers * self.split * (old.dp / mesh.dp if sharded else 1.0)
        """Parameters in a rank's optimizer on the other mesh over the recorded one."""
        self.sequence = not owner.table.filter(
            pl.col("short") == "tp", pl.col("collective") == "reduce_scatter"
        ).is_empty()
        """Whether activations between tensor-parallel parts are split along the sequence."""

    def factors(self, bound: int) -> Array:
        """Return the new duration of each piece of device work over the old one."""
        factor = np.ones(len(self.dur))
        size = np.full(len(self.dur), self.tokens)
        size[self.matrix] *= self.split
        is_other = self.kernel & ~self.matrix & ~self.optimizer
        smaller, larger = sorted((self.split, 1.0))
        between = (smaller, math.sqrt(smaller * larger), larger)
        size[is_other] *= self.split if self.sequence else between[bound]
        if not self.sequence:  # without sequence parallelism norms are not split
            size[self.norm] = self.tokens
        fill = self._fill(size)
        size = size * (np.minimum(fill, 1.0), np.sqrt(fill), np.maximum(fill, 1.0))[bound]
        fixed = np.minimum(self.dur, self.base)
        grown = (fixed + (self.dur - fixed) * size) / self.dur
        factor[self.kernel] = (grown * self.launches)[self.kernel]
        factor[self.optimizer] = self.parameters
        self._collectives(factor, bound)
        return factor

    def _fill(self, size: Array) -> Array:
        """Return the ratio of whole waves of blocks, beyond the change of the work: the part of the
        processors that a kernel with fewer blocks leaves idle."""
        with np.errstate(invalid="ignore", divide="ignore"):
            waves_after = np.ceil(np.maximum(self.waves * size, 1e-9)) / np.ceil(self.waves)
            result = waves_after / size
        result[~self.matrix | ~np.isfinite(result)] = 1.0
        return np.asarray(result)

    def _collectives(self, factor: Array, bound: int) -> None:
        """Scale collectives by axis: their number and messages change. A transfer scales with its
        bytes, ring and link, and waits for other ranks scale with the work. A pipeline's waits are
        its bubble, added later."""
        owner, mesh, old = self.of, self.mesh, self.of.measured
        columns = ["gpu", "short", "collective", "bytes", "dur", "transfer"]
        for row, axis, kind, size, dur, transfer in owner.table.select(columns).iter_rows():
            if axis is None:
                continue
            if mesh.extent(axis)[0] == 1:
                factor[row] = 0.0
                continue
            count, message = self._messages(axis, kind)
            is_same_group = mesh.extent(axis) == old.extent(axis)
            if is_same_group and owner.crosses(mesh, axis) is owner.crosses(old, axis):
                fixed = min(transfer, owner.latency(old, axis, kind, MIDDLE))
                transfer_after = fixed + (transfer - fixed) * message
            elif size is None:
                raise AdvisorError("the sizes of the collectives are not recorded")
            else:
                transfer_after = owner.transfer(mesh, axis, kind, size * message, bound)
            waits = 0.0 if axis == "pp" else (dur - transfer) * self.tokens * self.split
            factor[row] = (transfer_after + waits) * count / max(dur, 1)

    def _messages(self, axis: str, kind: str) -> tuple[float, float]:
        """Return the ratios of the number per step and of the size of an axis's collectives."""
        mesh, old = self.mesh, self.of.measured
        if axis == "dp":  # gradients and parameters: by layer if they are sharded
            gathered = kind in ("all_gather", "reduce_scatter")
            return (self.layers, self.split) if gathered else (1.0, self.layers * self.split)
        if axis == "pp":
            return self.launches / self.layers, self.tokens
        if axis == "cp" and kind == "send_recv":  # a ring passes on its part of the sequence
            return self.launches * (mesh.cp - 1) / (old.cp - 1), self.tokens * self.split
        if axis == "cp":  # keys and values of the whole sequence
            return self.launches, self.tokens * mesh.cp / old.cp * self.split
        return self.launches, self.tokens

    def added(self, bound: int) -> dict[str, float]:
        """Return the time of collectives along unrecorded axes, ns per step. Nothing hides it."""
        owner, mesh, old = self.of, self.mesh, self.of.measured
        result = {}
        if mesh.dp > 1 and old.dp == 1:
            raise AdvisorError(
                "no gradients of several ranks were recorded, so their size is unknown: record dp=2"
            )
        activations, layers = self._activations() if self._needs_activations() else (0.0, 0.0)
        calls = layers * self.launches
        if mesh.tp > 1 and old.tp == 1:
            transfer = owner.transfer(mesh, "tp", "all_reduce", activations * self.tokens, bound)
            result["tp"] = 4 * calls * transfer
        if mesh.cp > 1 and old.cp == 1:  # keys and values of the sequence, and their gradients
            size = 2 * activations * self.tokens * mesh.cp / mesh.tp
            result["cp"] = 3 * calls * owner.transfer(mesh, "cp", "all_gather", size, bound)
        if mesh.pp > 1 and old.pp == 1:
            transfer = owner.transfer(mesh, "pp", "send_recv", activations * self.tokens, bound)
            result["pp"] = 2 * owner.slots * self.launches / self.layers * transfer
        return result

    def _needs_activations(self) -> bool:
        mesh, old = self.mesh, self.of.measured
        return any(getattr(mesh, x) > 1 and getattr(old, x) == 1 for x in ("tp", "cp", "pp"))

    def _activations(self) -> tuple[float, float]:
        """Return bytes of a rank's activations between layers, and attentions per step: from
        all-reduces of tensor parallelism, else queries. Raises AdvisorError without either."""
        owner = self.of
        tensor = owner.table.filter(pl.col("short") == "tp", pl.col("bytes") >= 1 << 10)
        if tensor.height and not self.sequence:
            return float(tensor["bytes"].to_numpy().max()), tensor.height / owner.a.step_count / 4
        sizes = _query_bytes(owner.a)
        if not sizes:
            raise AdvisorError(
                "the size of the activations is not recorded: it needs record_shapes=True and an "
                "attention of PyTorch"
            )
        return float(np.median(sizes)) * owner.measured.tp, len(sizes) / owner.a.step_count

    def once(self, bound: int) -> float:
        """Return the time that a step takes once, for any number of micro-batches, ns: the
        optimizer and the gradients that nothing hides."""
        owner, factor = self.of, self.factors(bound)
        steps = owner.a.step_count
        in_optimizer = self.optimizer & owner.a.in_window
        total = float((self.dur * factor)[in_optimizer].sum()) / steps
        rows = owner.table.filter(pl.col("short") == "dp", pl.col("collective") == "all_reduce")
        exposed = rows["exposed"].to_numpy() * factor[rows["gpu"].to_numpy()]
        return total + float(exposed.sum()) / steps

    def compute(self, *, here: bool) -> float:
        """Return the time of kernels without communication, ns per step."""
        rows = self.kernel & self.of.a.in_window
        factor = np.ones(len(self.dur)) if here else self.factors(MIDDLE)
        return float((self.dur * factor)[rows].sum()) / self.of.a.step_count


def _query_bytes(a: Analysis) -> list[float]:
    """Return the query bytes of each attention of the forward passes in the used steps."""
    rows = (a.kernels["family"] == "attention").fill_null(value=False).to_numpy() & a.in_window
    calls = a.kernels["op_row"].filter(pl.Series(rows)).drop_nulls().unique()
    ops = a.trace.cpu.select("name", "inputs")[calls.to_list()].drop_nulls()
    sizes: dict[tuple[str, int], float | None] = {}
    result = []
    for name, inputs in ops.select(pl.col("name").cast(pl.String), "inputs").iter_rows():
        if (name, inputs) not in sizes:  # only a few are distinct
            texts = a.trace.inputs.row(inputs)
            call = parse_attention(name, OpInputs(*(text or "" for text in texts)))
            forward = call is not None and not call.backward
            sizes[name, inputs] = call.query.bytes if call is not None and forward else None
        size = sizes[name, inputs]
        if size:
            result.append(size)
    return result
