"""Projection of a measured step to another GPU: replayed with scaled device work, with its range,
and whether its memory fits. Also the choice of the cheapest GPU."""

from __future__ import annotations

import math
from collections.abc import Iterable
from functools import cached_property
from typing import Literal, NamedTuple

import numpy as np
import polars as pl

from advisor.core.errors import AdvisorError
from advisor.core.gpus import GpuSpec, known_gpus
from advisor.core.intervals import Array
from advisor.core.prices import HOUR_NS, Prices
from advisor.measure import Analysis
from advisor.replay.graph import NEVER, EdgeKind
from advisor.replay.ledger import device_error, host_error
from advisor.replay.project.device_scaling import (
    KIND_CODE,
    KINDS,
    ScaledDeviceWork,
    scale_device_work,
)
from advisor.replay.window_replayer import WindowReplayer

MAX_UNKNOWN_SHARE = 0.5
"""Maximum share of kernel time in kernels of unknown family for a projection."""
MIN_HOST_SHARE = 0.8
"""Minimum share of the step, with a GPU that takes no time, at which a note mentions it."""
START_NS = {"nvidia": 1_700.0, "amd": 6_600.0}
"""Time from a launch call to the kernel's start on an idle GPU, ns: medians of public traces
(NVIDIA: 1.5 to 3 µs in seven; AMD: 6.6 µs on MI250, 20.7 on MI300X, the smaller taken). The calls
themselves take no longer in HIP than in CUDA (4.4 to 6.3 against 3.3 to 8.2 µs), so host time
stays."""


class WorkPart(NamedTuple):
    """Device work of one kind."""

    kind: str
    """Name of the kind, one of ``device_scaling.KINDS``."""
    ns: float
    """Time per step on the source, ns (summed over streams)."""
    then_ns: float
    """Time per step on the target, ns."""


class Projection(NamedTuple):
    """Step on another GPU. Times are ns per step."""

    gpu: str
    step_ns: float
    low_ns: float
    high_ns: float
    measured_ns: float
    parts: tuple[WorkPart, ...]
    """Device work by kind, the most time first."""
    fit: ProjectedMemory
    notes: tuple[str, ...]
    """Assumptions of this projection, beyond the general ones."""
    refused: str
    """Reason why this GPU cannot run the step as it is; times are then NaN (null). Empty if it
    can."""

    @property
    def speedup(self) -> float:
        """Measured over projected step."""
        return self.measured_ns / self.step_ns


def find_recorded_gpu(a: Analysis) -> GpuSpec | None:
    """Return the GPU that did the work, or ``None`` if unknown. Raises AdvisorError if the
    recording names another GPU than the user (``ReadOptions.recorded_gpu``)."""
    gpu, name = a.hardware, a.trace.meta.gpu
    if gpu is not None and name not in (None, gpu.name):
        path = a.trace.meta.path or "trace"
        raise AdvisorError(f"{path}: recorded on {gpu.name}, not on {name}")
    return gpu


class Projector:
    """Projector of one recorded window. ``same_host``: the other GPU is put into this machine, so
    host time stays as measured; else the range covers other machines.

    Raises AdvisorError if the recorded GPU is unknown, or is not the GPU that the user names; if
    there is no device work or step; or if most kernels are of unknown family."""

    def __init__(self, a: Analysis, *, same_host: bool = False) -> None:
        self.a = a
        self.same_host = same_host
        path = a.trace.meta.path or "trace"
        if a.device_id is None or a.trace.gpu.is_empty():
            raise AdvisorError(f"{path}: no device work, so nothing to project")
        if (recorded := find_recorded_gpu(a)) is None:
            name = a.device.name if a.device is not None and a.device.name else None
            reason = (
                f"{name!r} is not a GPU whose rates are known"
                if name
                else "its GPU is not recorded"
            )
            raise AdvisorError(
                f"{path}: {reason}, so there is nothing to project from; --recorded-gpu NAME says "
                "what it was"
            )
        if a.steps.used.is_empty() or a.span_ns <= 0:
            raise AdvisorError(f"{path}: there is no step to project")
        self.recorded_gpu: GpuSpec = recorded
        if self.unknown > MAX_UNKNOWN_SHARE:
            raise AdvisorError(
                f"{path}: {self.unknown:.0%} of the kernel time is in kernels of no known kind (at "
                f"most {MAX_UNKNOWN_SHARE:.0%} is accepted), so what bounds them is not known"
            )

    @cached_property
    def unknown(self) -> float:
        """Share of the steps' kernel time in kernels whose family and work are unknown."""
        families = self.a.families.filter(~pl.col("family").is_in(["copy", "memset"]))
        total = int(families["dur"].sum())
        other = families.filter(pl.col("family") == "other")
        recorded = other["flops"].is_not_null() & other["moved"].is_not_null()
        return int(other.filter(~recorded)["dur"].sum()) / total if total else 0.0

    @cached_property
    def replayer(self) -> WindowReplayer:
        """The replay; built once for all targets."""
        return WindowReplayer(self.a)

    @cached_property
    def replayed(self) -> bool:
        """Whether the replay is good enough to be used."""
        return not self.replayer.unusable_reason

    def on(self, target: GpuSpec) -> Projection:
        """Project the step onto another GPU."""
        scaled = scale_device_work(self.a, self.recorded_gpu, target)
        memory = project_memory(self.a, target)
        parts = self._parts(scaled)
        if scaled.missing:
            formats = ", ".join(scaled.missing)
            return Projection(
                target.name, math.nan, math.nan, math.nan, self.a.step_ns, parts, memory, (),
                f"it has no unit for {formats}, in which the step computes",
            )  # fmt: skip
        crosses = target.vendor != self.recorded_gpu.vendor
        is_same = target.name == self.recorded_gpu.name
        host = 0.0 if self.same_host or is_same else host_error()
        errors = np.array(
            [0.0 if is_same else device_error(kind, other_vendor=crosses) for kind in KINDS],
            dtype=float,
        )
        errors[KIND_CODE["unchanged"]] = 0.0
        error = errors[scaled.kind]
        step = self._step(scaled.factor, 1.0, target)
        low = self._step(scaled.low * np.exp(-error), math.exp(-host), target)
        high = self._step(scaled.high * np.exp(error), math.exp(host), target)
        replay_error = self.replayer.quality.step_error if self.replayed else 0.0
        return Projection(
            target.name,
            step,
            min(low, step) * (1 - replay_error),
            max(high, step) * (1 + replay_error),
            self.a.step_ns,
            parts,
            memory,
            tuple(self._notes(scaled, target, step)),
            "",
        )

    @cached_property
    def host_step(self) -> float:
        """Step on this host with a GPU that takes no time, ns."""
        return self._step(np.zeros(self.a.trace.gpu.height), 1.0, self.recorded_gpu)

    def _step(self, factor: Array, host: float, target: GpuSpec) -> float:
        later = START_NS[target.vendor] - START_NS[self.recorded_gpu.vendor]
        return scaled_step(self.replayer, factor, host=host, later=later)

    def _parts(self, scaled: ScaledDeviceWork) -> tuple[WorkPart, ...]:
        dur = self.a.trace.gpu["dur"].to_numpy() * self.a.in_window / self.a.step_count
        result = []
        for name, code in KIND_CODE.items():
            is_of_kind = scaled.kind == code
            if dur[is_of_kind].sum():
                then_ns = float((dur * scaled.factor)[is_of_kind].sum())
                result.append(WorkPart(name, float(dur[is_of_kind].sum()), then_ns))
        return tuple(sorted(result, key=lambda part: -part.ns))

    def _notes(self, scaled: ScaledDeviceWork, target: GpuSpec, step: float) -> list[str]:
        notes = [f"{a} is computed in {b} on {target.name}" for a, b in scaled.instead]
        if self.host_step > MIN_HOST_SHARE * step:
            notes.append(
                f"on {target.name} the host limits the step: an infinitely fast GPU would still "
                f"take {self.host_step / step:.0%} of this time"
            )
        if not self.replayed:
            notes.append(
                f"{self.replayer.unusable_reason}: busy time is moved and idle time kept, without "
                "a replay"
            )
        if target.vendor != self.recorded_gpu.vendor:
            notes.append(
                "another vendor's libraries launch other kernels, and more or fewer of them: "
                "that is not modelled; the range is wider by how much kernels of one family differ "
                "in efficiency between the vendors in public traces"
            )
        if self.replayer.unseen_loader:
            notes.append(
                "the loader's workers keep up with these steps; how fast they could be is not in "
                "the trace, and a faster step may have to wait for them"
            )
        return notes


USABLE_MEMORY_SHARE = 0.92
"""Minimum share of the nominal memory that a driver provides: a T4's 16 GiB are 14.8."""
CONTEXT_BYTES = 600 << 20
"""Approximate memory of the driver and the libraries outside the allocator: a CUDA context with
cuBLAS and cuDNN loaded is 300 to 900 MiB."""


class ProjectedMemory(NamedTuple):
    """Memory of the step compared with a GPU's, bytes, or null if not recorded."""

    verdict: Literal["fits", "tight", "too small", "not measured"]
    """Verdict. ``tight``: allocated memory fits, but the allocator's reserved memory does not."""
    allocated: int | None
    reserved: int | None
    capacity: int


def project_memory(a: Analysis, target: GpuSpec) -> ProjectedMemory:
    """Compare the largest peak on the analysed device, and the driver's memory, with a GPU's
    memory. The peak is of the steps, by the allocator's events, else of the run, by the recorder's
    samples."""
    usable = int(target.memory_bytes * USABLE_MEMORY_SHARE)
    samples = a.memory.filter(pl.col("device") == a.device_id)
    peaks: list[int | None] = []
    for name in ("peak_allocated", "peak_reserved"):
        peak = samples[name].max() if samples.height else None
        peaks.append(peak if isinstance(peak, int) else None)
    allocated, reserved = peaks
    if allocated is None and reserved is None and a.rank_record is not None:
        steps = a.rank_record.steps
        allocated = max((step.peak for step in steps if step.peak), default=None)
        reserved = max((step.reserved for step in steps if step.reserved), default=None)
    if allocated is None and reserved is None:
        return ProjectedMemory("not measured", None, None, target.memory_bytes)
    lower = allocated if allocated is not None else reserved
    upper = reserved if reserved is not None else allocated
    assert lower is not None and upper is not None
    if lower + CONTEXT_BYTES > usable:
        return ProjectedMemory("too small", allocated, reserved, target.memory_bytes)
    fits = allocated is not None and reserved is not None and upper + CONTEXT_BYTES <= usable
    return ProjectedMemory("fits" if fits else "tight", allocated, reserved, target.memory_bytes)


# -- which GPU is the cheapest for a step ----------------------------------------------------------

_MAX_NAMES = 4
RESTS_ON = (
    "The range is as wide as the largest error of a projection, measured with the same work on "
    "two GPUs. No whole step was measured on two GPUs"
)
ANY = ""
"""Name of the price for any GPU in a price table."""


class TargetGpu(NamedTuple):
    """GPU, the step on it, and the cost of a million steps."""

    projection: Projection
    price: float | None
    """Price per hour, or null if not given."""
    cost: float | None
    """Cost of a million steps."""
    low_cost: float | None
    high_cost: float | None
    epoch_cost: float | None = None
    """Cost of an epoch, or null if its steps are unknown."""

    @property
    def is_possible(self) -> bool:
        """Whether the GPU has the units and, if known, the memory."""
        return not self.projection.refused and self.projection.fit.verdict != "too small"

    def may_be_cheaper(self, other: TargetGpu) -> bool:
        """Return whether this GPU could cost no more than the other, by the ranges of both."""
        low, high = self.low_cost, other.high_cost
        return low is not None and high is not None and low <= high


def cost_of_steps(price: float | None, step_ns: float, steps: float = 1e6) -> float | None:
    """Return the cost of ``steps`` at ``price`` per hour, or ``None`` without a price."""
    return None if price is None else price * step_ns / HOUR_NS * steps


def hourly_prices(prices: Prices) -> dict[str, float]:
    """Return the price per hour of each known GPU, by our name for it. Raises AdvisorError if the
    table has names, but none of a known GPU."""
    result = {}
    for gpu in known_gpus():
        price = next(filter(None, map(prices.price_of, (gpu.name, *gpu.names))), None)
        if price is not None:
            result[gpu.name] = price.per_hour
    if prices.table and not result:
        raise AdvisorError(f"{prices.source}: none of its names is the name of a known GPU")
    return result


def choose_gpus(
    projector: Projector, gpus: Iterable[tuple[GpuSpec, float | None]], epoch: float | None = None
) -> tuple[TargetGpu, ...]:
    """Project onto all GPUs and sort: the cheapest first, then GPUs without a price, the fastest
    first, then GPUs that cannot run the step. ``epoch``: steps of an epoch."""
    result = []
    for gpu, price in gpus:
        p = projector.on(gpu)
        costs = (
            (None, None, None)
            if p.refused
            else (
                cost_of_steps(price, p.step_ns),
                cost_of_steps(price, p.low_ns),
                cost_of_steps(price, p.high_ns),
            )
        )
        epoch_cost = None if p.refused or epoch is None else cost_of_steps(price, p.step_ns, epoch)
        result.append(TargetGpu(p, price, *costs, epoch_cost))

    def order(c: TargetGpu) -> tuple[bool, bool, float]:
        figure = c.projection.step_ns if c.cost is None else c.cost
        return (not c.is_possible, c.cost is None, figure if not c.projection.refused else 0.0)

    return tuple(sorted(result, key=order))


def offered_gpus(prices: Prices) -> list[tuple[GpuSpec, float | None]]:
    """Return all known GPUs with a price, or all known GPUs if no price is given by name. Raises
    AdvisorError like ``hourly_prices``."""
    money = {} if ANY in prices.table else hourly_prices(prices)
    return [(gpu, money.get(gpu.name)) for gpu in known_gpus() if not money or gpu.name in money]


def describe_cheapest(result: tuple[TargetGpu, ...]) -> str:
    """Name the cheapest GPU, and GPUs that could be it within the ranges. Empty without prices."""
    if all(c.price is None for c in result):
        return ""
    possible = [c for c in result if c.is_possible and c.cost is not None]
    if not possible:
        return "no GPU with a price can run this step"
    best = possible[0]
    rivals = [c for c in possible[1:] if c.may_be_cheaper(best)]
    text = f"cheapest: {best.projection.gpu}"
    if rivals:
        names = ", ".join(c.projection.gpu for c in rivals[:_MAX_NAMES])
        ellipsis = " …" if len(rivals) > _MAX_NAMES else ""
        text += f"; within the ranges it could be {names}{ellipsis}"
    return text


HOST_EDGES = (EdgeKind.PROGRAM, EdgeKind.LOADER, EdgeKind.HANDOFF)
"""Edges that depend on the host's speed: its own threads, and the loader's workers."""


def scaled_step(
    replayer: WindowReplayer, factor: Array, *, host: float = 1.0, later: float = 0.0
) -> float:
    """Return the measured step times the ratio of two replays, ns. ``factor``: new duration of each
    row of ``trace.gpu`` over the old one; ``host``: the same for host time; ``later``: additional
    ns between launches and kernels. If steps cannot be replayed, busy time is scaled by ``factor``
    and other time by ``host``."""
    a = replayer.a
    if replayer.unusable_reason:
        busy = a.device_busy(a.in_window).total
        work_ns = a.trace.gpu["dur"].to_numpy() * a.in_window
        mean = float((work_ns * factor).sum() / max(work_ns.sum(), 1))
        return (busy * mean + (a.span_ns - busy) * host) / a.step_count
    graph = replayer.graph
    dur, weight = graph.dur.copy(), graph.weight.copy()
    device = graph.device
    dur[device] *= factor[graph.row[device]]
    weight[np.isin(graph.edge, HOST_EDGES) & (weight > 0)] *= host
    launch = (graph.edge == EdgeKind.LAUNCH) & (weight > NEVER)
    weight[launch] = np.maximum(weight[launch] + later, np.minimum(weight[launch], 0.0))
    return a.step_ns * replayer.plan.steady_step(weight, dur) / max(replayer.steady_ns, 1.0)
