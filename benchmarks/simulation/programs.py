"""The work of the ranks of each layout in a step, in the order of PyTorch and Megatron."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from benchmarks.simulation.engine import BACKWARD, MAIN, Engine, SimulatedRun
from benchmarks.simulation.jobs import EVEN, HEALTHY, FaultTruth, Job, Kernel, Ranks, draw

MIN_FAULT_SHARE = 0.03
"""A fault that costs less of the step is made worse until it costs that: below, a job has none."""
_ROUNDS = 8


def simulate(job: Job) -> SimulatedRun:
    """Run a job."""
    engine = Engine(job)
    program = {"ddp": _ddp, "fsdp": _sharded, "hybrid": _sharded}.get(job.layout, _parallel)
    for step in range(job.steps):
        engine.begin(step)
        engine.thread = MAIN
        program(engine)
        engine.thread = MAIN
        engine.work(np.arange(job.ranks), job.optimizer)
        engine.finish()
    return engine.played()


def play(
    seed: int, ranks: int = 64, kind: str | None = None, steps: int = 6
) -> tuple[SimulatedRun, FaultTruth]:
    """A random job and its truth. See :func:`benchmarks.simulation.jobs.draw`."""
    job = draw(seed, ranks, kind, steps)
    played = simulate(job)
    fault = job.fault
    if fault is None:
        return played, FaultTruth(HEALTHY, "", "", (), False, played.step_ns, 0.0)
    without = simulate(job.mended()).step_ns
    for _ in range(_ROUNDS):
        if played.step_ns - without >= MIN_FAULT_SHARE * played.step_ns:
            break
        worse = 1 + 1.5 * (fault.factor - 1)
        if fault.kind == "expert_imbalance":
            worse = min(worse, 0.95 * job.ep)
        fault = replace(fault, factor=worse, wait_ns=1.5 * fault.wait_ns)
        job = replace(job, fault=fault)
        played = simulate(job)
        if fault.kind == "pipeline_imbalance":
            without = simulate(job.mended()).step_ns
    name = {
        "rank": str(fault.index),
        "host": job.host_name(fault.ranks[0]) if fault.ranks else "",
        "rack": f"rack{fault.index}",
    }.get(fault.unit, str(fault.index) if fault.unit else "")
    gain = played.step_ns - without
    moves = fault.kind == "moving"
    return played, FaultTruth(
        fault.kind, fault.unit, name, fault.ranks, moves, played.step_ns, gain
    )


def _ddp(engine: Engine) -> None:
    """Gradients are all-reduced while the backward pass goes on."""
    job, every = engine.job, np.arange(engine.job.ranks)
    engine.work(every, job.head)
    for _ in range(job.layers):
        engine.work(every, job.forward)
    engine.thread = BACKWARD
    for _ in range(job.layers):
        engine.work(every, job.backward)
        engine.talk(every, "world", "allreduce")
    engine.wait(every, "world")


def _sharded(engine: Engine) -> None:
    """FSDP: parameters are gathered a layer ahead, gradients scattered; ``hybrid``: within a host,
    and all-reduced between hosts."""
    job, every = engine.job, np.arange(engine.job.ranks)
    shard = "shard" if job.layout == "hybrid" else "world"
    for part, kernels in ((MAIN, job.forward), (BACKWARD, job.backward)):
        engine.thread = part
        engine.talk(every, shard, "_allgather_base", key="gather")
        for layer in range(job.layers):
            engine.wait(every, "gather")
            if part == MAIN and not layer:
                engine.work(every, job.head)
            if layer + 1 < job.layers:
                engine.talk(every, shard, "_allgather_base", key="gather")
            engine.work(every, kernels)
            if part == MAIN:
                continue
            engine.talk(every, shard, "_reduce_scatter_base", key="scatter")
            if job.layout == "hybrid":
                engine.talk(every, "replicate", "allreduce", after="scatter")
    engine.wait(every, "scatter", "replicate")


def _parallel(engine: Engine) -> None:
    """Tensor, pipeline (GPipe: all forward, then all backward) and expert parallel; without stages
    each micro-batch goes forward and backward by itself."""
    job = engine.job
    stages = [job.stage(number) for number in range(job.pp)]
    together = job.micro_batches if job.pp > 1 else 1
    for _ in range(job.micro_batches // together):
        engine.thread = MAIN
        _passes(engine, stages, together)
    for number, ranks in enumerate(stages):
        engine.wait(ranks, f"pp{number - 1}", f"pp{number}")  # sends are over before the optimizer
        if "dp" not in job.groups:
            continue
        engine.talk(ranks, "dp", "allreduce")
        engine.talk(ranks, "dp", "allreduce", 0.5)
        engine.wait(ranks, "dp")


def _passes(engine: Engine, stages: list[Ranks], together: int) -> None:
    job = engine.job
    for _ in range(together):
        for number, ranks in enumerate(stages):
            if number:
                engine.send(stages[number - 1], ranks)
            if not number:
                engine.work(ranks, job.head)
            for _ in range(job.layers):
                _layer(engine, ranks, job.forward, backward=False)
            _more(engine, ranks, number, job.forward)
    engine.thread = BACKWARD
    for _ in range(together):
        for number in range(job.pp - 1, -1, -1):
            ranks = stages[number]
            if number < job.pp - 1:
                engine.send(stages[number + 1], ranks)
            _more(engine, ranks, number, job.backward)
            for _ in range(job.layers):
                _layer(engine, ranks, job.backward, backward=True)


def _layer(engine: Engine, ranks: Ranks, kernels: tuple[Kernel, ...], *, backward: bool) -> None:
    """Attention and feed-forward, each summed over the tensor-parallel ranks; with experts, tokens
    go to them and back."""
    job = engine.job
    half = len(kernels) // 2
    if job.cp > 1:  # keys and values of the whole sequence, and back their gradients
        engine.talk(ranks, "cp", "_allgather_base", wait=True)
    engine.work(ranks, kernels[:half])
    if job.cp > 1 and backward:
        engine.talk(ranks, "cp", "_reduce_scatter_base", wait=True)
    if job.tp > 1:
        engine.talk(ranks, "tp", "allreduce", wait=True)
    engine.work(ranks, kernels[half:])
    if job.ep > 1:
        engine.talk(ranks, "ep", "all_to_all", wait=True)
        for _ in range(2 if backward else 1):
            engine.work(ranks, job.expert, expert=True)
        engine.talk(ranks, "ep", "all_to_all", back=True, wait=True)
    if job.tp > 1:
        engine.talk(ranks, "tp", "allreduce", wait=True)


def _more(engine: Engine, ranks: Ranks, stage: int, kernels: tuple[Kernel, ...]) -> None:
    """Additional work of the longer stage: kernels like the others, in every micro-batch. Their
    noise is drawn aside, so that all else has the same noise as without them."""
    fault, job = engine.fault, engine.job
    even = fault.unit == EVEN
    if fault.kind != "pipeline_imbalance" or (fault.index != stage and not even):
        return
    state = engine.rng.bit_generator.state
    added_layers = (fault.factor - 1) * job.layers / (job.pp if even else 1)
    for part in np.diff([*np.arange(0.0, added_layers, 1.0), added_layers]):
        engine.work(ranks, tuple(k._replace(ns=k.ns * float(part)) for k in kernels))
    engine.rng.bit_generator.state = state
