"""A model on several device meshes, to compare with ``advisor whatif --mesh``.

A model and its machines are drawn once; each mesh makes a job of them. How kernels change with
their size is not what advisor assumes: blocks fill whole waves in part, and smaller products attain
less by an exponent that is drawn. Links differ between meshes by up to 15%.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
from numpy.random import Generator

from advisor.measure.comm.messages import bus_factor
from advisor.replay.project.mesh import Mesh
from benchmarks.simulation.engine import SimulatedRun
from benchmarks.simulation.jobs import (
    RANKS_PER_HOST,
    Groups,
    Job,
    Kernel,
    Ranks,
    _layer,
    _optimizer,
)
from benchmarks.simulation.measured import measured
from benchmarks.simulation.programs import simulate

SLOTS = 216
"""Blocks that the device holds at once."""
FLOOR_NS = 2_000.0
SPLIT = (
    "aten::mm",
    "aten::_flash_attention_forward",
    "aten::_flash_attention_backward",
    "aten::gelu",
)
"""Operators that tensor parallelism splits; norms and the sums beside them stay whole."""
KIND = {"tp": "all_reduce", "dp": "all_reduce", "ep": "all_to_all", "cp": "all_gather"}


@dataclass(frozen=True)
class Model:
    """A model on a cluster; kernels of one layer and one micro-batch on one GPU."""

    seed: int
    layers: int
    micro_batches: int
    forward: tuple[Kernel, ...]
    backward: tuple[Kernel, ...]
    expert: tuple[Kernel, ...]
    optimizer: tuple[Kernel, ...]
    query: tuple[int, int, int, int]
    parameters: float
    """Bytes of all gradients."""
    layout: str
    """``parallel``; of data-parallel ranks alone ``fsdp``, ``ddp``."""
    node_rate: float
    network_rate: float
    """Bus bandwidth of a GPU, bytes per ns."""
    whole_waves: float
    """Share of the products' time that changes in whole waves of blocks."""
    loss: float
    """A product of half the size takes 2^loss times its share."""

    @property
    def activations(self) -> float:
        """Bytes between two layers."""
        return 2.0 * math.prod(self.query)


class MeshPair(NamedTuple):
    """A model, the mesh that is recorded and the one that is asked for."""

    model: Model
    recorded: Mesh
    target: Mesh


def draw_pair(seed: int) -> MeshPair:
    """Chosen at random. What cannot be projected by design (gradients of one rank) is not drawn."""
    rng = np.random.default_rng([seed, 7])
    known = measured()
    style = str(rng.choice(["dense", "dense", "experts", "sharded"]))
    forward, backward, expert = _layer(rng, known, experts=style == "experts")
    blocks = [int(rng.integers(60, 3000)) for _ in range(64)]
    once = sum(k.ns for k in (*forward, *backward)) + 3 * sum(k.ns for k in expert)
    layers, micro = 8, int(rng.choice([1, 4, 8]))
    recorded, target = _meshes(rng, style, micro)
    work = rng.uniform(20e6, 60e6)
    scale = work * recorded.tp * recorded.pp * recorded.cp / (once * layers * micro)
    tokens = int(rng.choice([2048, 4096, 8192]))
    query = (int(rng.integers(1, 3)), tokens, int(rng.choice([16, 32])), 128)

    def sized(part: tuple[Kernel, ...]) -> tuple[Kernel, ...]:
        return tuple(
            k._replace(
                ns=max(3_000.0, k.ns * scale),
                blocks=blocks[i % 64],
                query=query if k.op == "aten::_flash_attention_forward" else None,
            )
            for i, k in enumerate(part)
        )

    model = Model(
        seed=seed,
        layers=layers,
        micro_batches=micro,
        forward=sized(forward),
        backward=sized(backward),
        expert=sized(expert),
        optimizer=_optimizer(rng, known, work),
        query=query,
        parameters=rng.uniform(1e9, 6e9),
        layout="fsdp" if style == "sharded" else "parallel",
        node_rate=rng.uniform(200, 245),
        network_rate=rng.uniform(10, 45),
        whole_waves=rng.uniform(0, 1),
        loss=rng.uniform(0, 0.1),
    )
    return MeshPair(model, recorded, target)


def _meshes(rng: Generator, style: str, micro: int) -> tuple[Mesh, Mesh]:
    if style == "sharded":
        sizes = rng.permutation([4, 8, 16, 32])[:2].tolist()
        return Mesh(dp=sizes[0]), Mesh(dp=sizes[1])
    result: list[Mesh] = []
    while len(result) < 2:
        world = int(rng.choice([8, 16, 32]))
        tp = int(rng.choice([1, 2, 4, 8]))
        pp = int(rng.choice([1, 2, 4])) if micro > 1 else 1
        cp = int(rng.choice([1, 1, 2])) if style == "dense" else 1
        dp, rest = divmod(world, tp * pp * cp)
        ep = int(rng.choice([2, 4])) if style == "experts" else 1
        if rest or dp < (1 if result else 2) or dp % ep:
            continue
        mesh = Mesh(dp=dp, tp=tp, pp=pp, cp=cp, ep=ep)
        if mesh not in result:
            result.append(mesh)
    return result[0], result[1]


def job_on(model: Model, mesh: Mesh, *, tensor_inside: bool = True) -> Job:
    """The job of a model on a mesh; without ``tensor_inside`` data-parallel ranks are neighbours,
    and tensor-parallel ones lie apart."""
    rng = np.random.default_rng([model.seed, 8, *mesh])
    known = measured()
    noise = np.random.default_rng([model.seed, 9])
    share = 1.0 / (mesh.tp * mesh.pp)
    job = Job(
        seed=model.seed,
        ranks=mesh.world,
        layout=model.layout,
        steps=4,
        layers=model.layers // mesh.pp,
        forward=_scaled(model, model.forward, mesh),
        backward=_scaled(model, model.backward, mesh),
        expert=_scaled(model, model.expert, mesh),
        head=(),
        optimizer=tuple(k._replace(ns=FLOOR_NS + k.ns * share) for k in model.optimizer),
        tp=mesh.tp,
        pp=mesh.pp,
        ep=mesh.ep,
        cp=mesh.cp,
        micro_batches=model.micro_batches,
        noise=noise.uniform(0.01, 0.03),
        chip=noise.uniform(0.002, 0.006),
        launch_ns=known.host(noise, "between", 0.2, 0.4),
        call_ns=known.host(noise, "call", 0.1, 0.5),
        load_ns=noise.uniform(30e3, 200e3),
    )
    every = np.arange(mesh.world)
    grid = every.reshape(mesh.pp, mesh.dp, mesh.cp, mesh.tp)
    if not tensor_inside:
        grid = every.reshape(mesh.pp, mesh.tp, mesh.cp, mesh.dp).transpose(0, 3, 2, 1)
    return _with_groups(rng, model, mesh, job, grid)


def _scaled(model: Model, kernels: tuple[Kernel, ...], mesh: Mesh) -> tuple[Kernel, ...]:
    result = []
    for kernel in kernels:
        split = mesh.tp if kernel.op in SPLIT or "grouped" in kernel.op else 1
        part = 1.0 / (mesh.cp * split)
        blocks = max(1, round(kernel.blocks * part))
        ns = FLOOR_NS + max(0.0, kernel.ns - FLOOR_NS) * part
        if kernel.family in ("gemm", "attention"):
            waves = math.ceil(blocks / SLOTS) / math.ceil(kernel.blocks / SLOTS)
            mixed = model.whole_waves * waves + (1 - model.whole_waves) * part
            ns = FLOOR_NS + (kernel.ns - FLOOR_NS) * mixed * part**-model.loss
        query = kernel.query
        if query is not None:
            query = (query[0], query[1] // mesh.cp, query[2] // mesh.tp, query[3])
        result.append(kernel._replace(ns=max(FLOOR_NS, ns), blocks=blocks, query=query))
    return tuple(result)


def _with_groups(rng: Generator, model: Model, mesh: Mesh, job: Job, grid: Ranks) -> Job:
    every = np.arange(mesh.world)
    acts = model.activations / mesh.cp
    result: list[tuple[str, Ranks, float]] = []
    if model.layout != "parallel":
        result.append(("world", every[None, :], model.parameters / model.layers))
    else:
        data = grid.transpose(0, 3, 1, 2).reshape(-1, mesh.dp * mesh.cp)
        if data.shape[1] > 1:
            result.append(("dp", data, model.parameters / (mesh.tp * mesh.pp * 1.5)))
        if mesh.tp > 1:
            result.append(("tp", grid.reshape(-1, mesh.tp), acts))
        if mesh.cp > 1:
            rows = grid.transpose(0, 1, 3, 2).reshape(-1, mesh.cp)
            result.append(("cp", rows, 2 * model.activations / mesh.tp))
        if mesh.ep > 1:
            cut = grid.reshape(mesh.pp, mesh.dp // mesh.ep, mesh.ep, mesh.cp * mesh.tp)
            result.append(("ep", cut.transpose(0, 1, 3, 2).reshape(-1, mesh.ep), acts))
        if mesh.pp > 1:
            result.append(("pp", every.reshape(mesh.pp, -1).T, acts))
    groups, message, rate = {}, {}, {}
    number = 1
    for stream, (name, members, size) in enumerate(result):
        nodes = members[0] // RANKS_PER_HOST
        crosses = bool((nodes != nodes[0]).any())
        is_world = members.shape == (1, mesh.world)
        groups[name] = Groups(name, members, 20 + 4 * stream, 0 if is_world else number, crosses)
        number += len(members)
        message[name] = float(max(2**12, size) // 4096 * 4096)
        local = int(np.bincount(nodes).max())
        bus = model.node_rate
        if crosses:
            bus = min(bus, model.network_rate * (1 if name == "pp" else local))
        kind = KIND.get(name, "all_gather" if model.layout == "fsdp" else "all_reduce")
        factor = 1.0 if name == "pp" else bus_factor(kind, members.shape[1]) or 1.0
        rate[name] = bus * rng.uniform(0.85, 1.0) / factor
    return replace(job, groups=groups, message=message, rate=rate)


def play_mesh(model: Model, mesh: Mesh) -> SimulatedRun:
    """The model, trained on a mesh."""
    return simulate(job_on(model, mesh))
