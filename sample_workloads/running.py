"""Runs, times and records a workload: the driver behind ``advisor workloads`` and the benchmarks.

A workload of several processes is run in processes of its own, which end within a time limit."""

import gc
import gzip
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from advisor.core.errors import AdvisorError
from advisor.sample_workloads import Setup, find, load

SKIPPED = 2
"""Steps before the profiler starts: workers, lazy initialisation."""
WARMUP = 2
"""Steps profiled and thrown away: the profiler's own start-up cost."""
TIMEOUT_S = 300.0
"""Time limit of a workload of several processes, s: import, start and all steps."""


def default_device() -> str:
    """Return ``cuda`` where there is one, else ``cpu``."""
    return "cuda" if torch.cuda.is_available() else "cpu"


def drive(
    name: str, run: Setup, steps: int, each: Callable[[], object] | None = None
) -> list[float]:
    """Run ``steps`` steps and return what each computed; ``each`` is called after every step.

    In a workload of several processes these are rank 0's, and ``each`` is not called. The caller's
    random state and torch settings are left as they were. Raises ValueError for less than one step,
    AdvisorError for an unknown workload or one that this machine cannot run."""
    if steps < 1:
        raise ValueError(f"nothing to run: {steps} steps")
    called = each if find(name).processes == 1 else None
    first: list[float] = on_ranks(_drive, name, run, (steps, called))[0]
    return first


def _drive(name: str, run: Setup, steps: int, each: Callable[[], object] | None) -> list[float]:
    found = []
    with prepared(name, run) as program:
        for _ in range(steps):
            found.append(next(program))
            if each is not None:
                each()
        return [float(value) for value in found]


@contextmanager
def prepared(name: str, run: Setup) -> Iterator[Iterator[Any]]:
    """A workload's program, ready for its first step; afterwards its workers are gone, and random
    state, garbage collection and torch settings as they were."""
    if run.on_gpu and not torch.cuda.is_available():
        raise AdvisorError(f"{run.device}: there is no CUDA device that PyTorch can use")
    devices = [torch.cuda.current_device()] if run.on_gpu else []
    precision = torch.get_float32_matmul_precision()
    collecting = gc.isenabled()
    with torch.random.fork_rng(devices=devices):
        torch.manual_seed(run.seed)
        program = load(name)(run)
        try:
            yield program
        finally:
            close = getattr(program, "close", None)
            if close is not None:
                close()
            torch.set_float32_matmul_precision(precision)
            if collecting:
                gc.enable()
            gc.collect()  # loaders end their workers when they are collected


# -- timing -------------------------------------------------------------------------------------


def measure(
    name: str, run: Setup, *, seconds: float = 3.0, blocks: int = 12, most: float = 30.0
) -> list[float]:
    """Return the mean step time of each of several blocks of steps, ms, without a profiler.

    The device is synchronised at the ends of blocks only. Steps before the first block, which warm
    up, are not in it. The blocks share ``seconds``; each has at least one step, and with steps so
    long that they would take more than ``most`` seconds there are fewer blocks, at least three. In
    a workload of several processes these are rank 0's."""
    first: list[float] = on_ranks(_measure, name, run, (seconds, blocks, most))[0]
    return first


def _measure(name: str, run: Setup, seconds: float, blocks: int, most: float) -> list[float]:
    with prepared(name, run) as program:

        def block(steps: int) -> float:
            start = time.perf_counter()
            for _ in range(steps):
                next(program)
            if run.on_gpu:
                torch.cuda.synchronize()
            return (time.perf_counter() - start) / steps

        block(2)
        first = block(2)
        block(_agreed(max(1, min(100, round(0.5 / first))), run))
        one = block(2)
        steps = _agreed(max(1, min(1000, round(seconds / blocks / one))), run)
        count = _agreed(max(3, min(blocks, round(most / (steps * one)))), run)
        return [block(steps) * 1e3 for _ in range(count)]


def _agreed(steps: int, run: Setup) -> int:
    """Return the number of steps of rank 0: ranks that run different numbers wait for ever."""
    if not dist.is_initialized():
        return steps
    number = torch.tensor([steps], device=run.device)
    dist.broadcast(number, 0)
    return int(number.item())


# -- recording ----------------------------------------------------------------------------------


def record(
    name: str,
    run: Setup,
    folder: str | os.PathLike[str],
    *,
    steps: int | None = None,
    stacks: bool | None = None,
    shapes: bool = True,
    memory: bool = True,
) -> list[Path]:
    """Run a few steps under ``torch.profiler`` and write a trace a process into ``folder``.

    The first steps are left out. The folder is made; the files, ``NAME.json.gz`` or
    ``NAME-rank0.json.gz`` …, are written whole or not at all. Returns their paths."""
    workload = find(name)
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    stacks = workload.stacks if stacks is None else stacks
    options = (str(folder), steps or workload.steps, stacks, shapes, memory)
    return [Path(path) for path in on_ranks(_record, name, run, options)]


def record_run(
    name: str,
    run: Setup,
    folder: str | os.PathLike[str],
    *,
    steps: int | None = None,
    around: int | None = None,
    stacks: bool | None = None,
    shapes: bool = True,
    memory: bool = True,
) -> list[Path]:
    """Run and record with ``advisor.record``: every step, loaders, memory, host and GPU, and a
    trace of some steps. ``folder``, which must be new or empty, becomes the run directory.

    Returns the traces, by rank. Raises AdvisorError where nothing could be recorded."""
    workload = find(name)
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    options = {
        "active": steps or workload.steps,
        "stacks": workload.stacks if stacks is None else stacks,
        "shapes": shapes,
        "memory": memory,
        "ranks": "all",
        "windows": 1,
        "on_trouble": False,
        "guard": 1e6,  # what is traced here is wanted, however slow it is
        "nvtx": False,
        "report": False,
    }
    count = workload.around if around is None else around
    on_ranks(_record_run, name, run, (str(folder), options, count))
    traces = sorted(folder.glob("rank*/*.json.gz"))
    if len(traces) != workload.processes:
        raise AdvisorError(f"{name}: nothing was recorded in {folder}")
    return traces


def _record_run(name: str, run: Setup, folder: str, options: dict[str, Any], around: int) -> None:
    """Record one process: as many steps before the trace as the recorder skips, the rest after."""
    import advisor
    from advisor.recorder.folder import RUN_DIR

    skip, warmup = min(10, around // 2), 3
    before = os.environ.get(RUN_DIR)
    os.environ[RUN_DIR] = folder
    try:
        with (
            prepared(name, run) as program,
            advisor.record(skip=skip, warmup=warmup, **options) as recorder,
        ):
            for _ in range(around + warmup + options["active"]):
                next(program)
                recorder.step()
    finally:
        if before is None:
            del os.environ[RUN_DIR]
        else:
            os.environ[RUN_DIR] = before


def _record(
    name: str, run: Setup, folder: str, steps: int, stacks: bool, shapes: bool, memory: bool
) -> str:
    with prepared(name, run) as program:
        suffix = f"-rank{run.rank}" if dist.is_initialized() else ""
        path = Path(folder, f"{name}{suffix}.json.gz")
        for _ in range(SKIPPED):
            next(program)
        profiled(program, run, path, steps=steps, stacks=stacks, shapes=shapes, memory=memory)
        return str(path)


def profiled(
    program: Iterator[Any],
    run: Setup,
    path: Path,
    *,
    steps: int,
    stacks: bool = True,
    shapes: bool = True,
    memory: bool = True,
    level: int = 1,
) -> None:
    """Trace the next steps of a program, after some to warm up, into ``path``."""
    from torch.profiler import ProfilerActivity, profile, schedule

    activities = [ProfilerActivity.CPU]
    if run.on_gpu:
        activities.append(ProfilerActivity.CUDA)

    def export(profiler: Any) -> None:
        with tempfile.TemporaryDirectory(dir=path.parent, prefix=".trace-") as scratch:
            plain = Path(scratch, "trace.json")
            profiler.export_chrome_trace(str(plain))
            packed = Path(scratch, "trace.json.gz")
            with plain.open("rb") as source, gzip.open(packed, "wb", level) as sink:
                shutil.copyfileobj(source, sink, 1 << 20)
            packed.replace(path)

    with profile(
        activities=activities,
        schedule=schedule(wait=0, warmup=WARMUP, active=steps, repeat=1),
        on_trace_ready=export,
        record_shapes=shapes,
        with_stack=stacks,
        profile_memory=memory,
    ) as profiler:
        for _ in range(WARMUP + steps):
            next(program)
            profiler.step()


# -- several processes --------------------------------------------------------------------------


def on_ranks(
    task: Callable[..., Any], name: str, run: Setup, options: tuple[Any, ...]
) -> list[Any]:
    """Run ``task(name, run, *options)``, here or in the workload's processes; results by rank."""
    if find(name).processes > 1:
        return in_processes(task, name, run, options)
    return [task(name, run, *options)]


def in_processes(
    task: Callable[..., Any], name: str, run: Setup, options: tuple[Any, ...]
) -> list[Any]:
    """Run ``task(name, run, *options)`` in each process of the workload; results by rank.

    Raises AdvisorError: not enough GPUs, a process that failed, or one that took too long; the
    others are ended then."""
    count = find(name).processes
    if run.on_gpu and torch.cuda.device_count() < count:
        raise AdvisorError(f"{name} needs {count} GPUs, here are {torch.cuda.device_count()}")
    # forkserver: processes are forked from one that has torch imported and has done nothing else
    method = "forkserver" if os.name == "posix" else "spawn"
    context = torch.multiprocessing.get_context(method)
    if method == "forkserver":
        context.set_forkserver_preload([__name__, "torch._dynamo"])  # optimizers import it
    results = context.SimpleQueue()
    with tempfile.TemporaryDirectory(prefix="advisor-ranks-") as meeting:
        processes = [
            context.Process(
                target=_rank,
                args=(task, name, replace(run, rank=rank), options, count, meeting, results),
                daemon=False,
            )
            for rank in range(count)
        ]
        found: dict[int, Any] = {}
        try:
            for process in processes:
                process.start()
            deadline = time.monotonic() + TIMEOUT_S
            while len(found) < count:
                if not results.empty():
                    rank, value = results.get()
                    found[rank] = value
                elif any(process.exitcode for process in processes):
                    raise AdvisorError(f"{name}: one of its processes failed; see its output above")
                elif time.monotonic() > deadline:
                    raise AdvisorError(f"{name}: its processes took longer than {TIMEOUT_S:.0f} s")
                else:
                    time.sleep(0.02)
            for process in processes:
                process.join(30)
        finally:
            for process in processes:
                if process.is_alive():
                    process.kill()
                    process.join(10)
    return [found[rank] for rank in range(count)]


def _rank(
    task: Callable[..., Any],
    name: str,
    run: Setup,
    options: tuple[Any, ...],
    count: int,
    meeting: str,
    results: Any,
) -> None:
    """Run one process: join the others, do the task, hand over the result."""
    from datetime import timedelta

    if run.on_gpu:
        torch.cuda.set_device(run.rank)
    else:
        torch.set_num_threads(1)
    dist.init_process_group(
        "nccl" if run.on_gpu else "gloo",
        init_method=f"file://{meeting}/store",
        rank=run.rank,
        world_size=count,
        timeout=timedelta(seconds=120),
    )
    try:
        value = task(name, run, *options)
        dist.barrier()
        results.put((run.rank, value))
    finally:
        dist.destroy_process_group()


def layers(run: Setup, width: int, count: int, activation: Any = nn.ReLU) -> nn.Sequential:
    """Build linear layers of one width, an activation after each, on the device."""
    parts = [nn.Sequential(nn.Linear(width, width), activation()) for _ in range(count)]
    return nn.Sequential(*parts).to(run.device, run.dtype)


def wide_block(width: int) -> nn.Sequential:
    """Build two linear layers with four times the width between them."""
    return nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))


def train(optimizer: Any, loss: Callable[[], Any]) -> Iterator[Any]:
    """Train, yielding the loss of each step, which stays on the device."""
    while True:
        optimizer.zero_grad()
        value = loss()
        value.backward()
        optimizer.step()
        yield value.detach()


def sgd(model: Any) -> Any:
    """Build the optimizer of most programs."""
    return torch.optim.SGD(model.parameters(), lr=1e-3)
