"""Jobs with a fault in their device mesh, and the same jobs without it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from advisor.replay.project.mesh import Mesh
from benchmarks.simulation.jobs import RANKS_PER_HOST, Job, Kernel
from benchmarks.simulation.meshes import FLOOR_NS, draw_pair, job_on

UNITS = 4
"""FSDP units that a layer is cut into."""


class PlantedFault(NamedTuple):
    """A job, its cure, and what is known of the machines beside the trace."""

    seed: int
    faulty: Job
    cured: Job
    network: float | None = None
    """GB/s of a GPU across nodes."""


def tensor_apart(seed: int) -> PlantedFault | None:
    """Tensor-parallel ranks lie in several nodes; ``None``: not with this seed."""
    model, mesh, _ = draw_pair(seed)
    if mesh.tp < 2 or mesh.dp < 2 or mesh.world <= RANKS_PER_HOST:
        return None
    faulty = job_on(model, mesh, tensor_inside=False)
    if not faulty.groups["tp"].crosses:
        return None
    return PlantedFault(seed, faulty, job_on(model, mesh))


def small_units(seed: int) -> PlantedFault | None:
    """FSDP wraps parts of each layer; the host is fast, and the layers are small."""
    model, *_ = draw_pair(seed)
    if model.layout != "fsdp":
        return None
    rng = np.random.default_rng([seed, 77])
    mesh = Mesh(dp=int(rng.choice([8, 16, 32])))
    model = replace(model, parameters=float(rng.uniform(0.01e9, 0.1e9)))
    size = rng.uniform(0.05, 0.5)
    job = replace(job_on(model, mesh), launch_ns=9_000.0, call_ns=4_500.0)
    job = _with_kernels(job, lambda kernels: _scaled(kernels, size))
    faulty = replace(
        _with_kernels(job, _part),
        layers=job.layers * UNITS,
        message={name: size / UNITS for name, size in job.message.items()},
    )
    return PlantedFault(seed, faulty, job, model.network_rate)


def few_micro_batches(seed: int) -> PlantedFault | None:
    """A pipeline with at most two micro-batches per stage; cured, each is cut in two."""
    model, mesh, _ = draw_pair(seed)
    if mesh.pp < 2:
        return None
    slots = int(np.random.default_rng([seed, 77]).choice([2, 4, 8]))
    if slots > 2 * mesh.pp:
        return None
    job = replace(job_on(model, mesh), micro_batches=slots)
    halved = {name: size / (1 if name == "dp" else 2) for name, size in job.message.items()}
    cured = _with_kernels(job, lambda kernels: _scaled(kernels, 0.5))
    return PlantedFault(seed, job, replace(cured, micro_batches=2 * slots, message=halved))


FAULTS: dict[str, Callable[[int], PlantedFault | None]] = {
    "tensor-across-nodes": tensor_apart,
    "small-gathers": small_units,
    "pipeline-bubble": few_micro_batches,
}
"""Planted faults by the rule that finds them."""


def draw_planted(rule: str) -> Iterator[PlantedFault]:
    """Draw planted faults without end."""
    seed = 0
    while True:
        planted = FAULTS[rule](seed)
        if planted is not None:
            yield planted
        seed += 1


def _with_kernels(job: Job, change: Callable[[tuple[Kernel, ...]], tuple[Kernel, ...]]) -> Job:
    return replace(
        job,
        forward=change(job.forward),
        backward=change(job.backward),
        expert=change(job.expert) if job.expert else (),
    )


def _scaled(kernels: tuple[Kernel, ...], size: float) -> tuple[Kernel, ...]:
    return tuple(kernel._replace(ns=max(FLOOR_NS, kernel.ns * size)) for kernel in kernels)


def _part(kernels: tuple[Kernel, ...]) -> tuple[Kernel, ...]:
    """A part of a layer, of kernels as long as its own."""
    part_kernels = kernels[: max(1, len(kernels) // UNITS)]
    share = sum(k.ns for k in kernels) / UNITS / sum(k.ns for k in part_kernels)
    return tuple(kernel._replace(ns=kernel.ns * share) for kernel in part_kernels)
