"""The cost of recording to a process: its training thread, its other threads, and waiting.

    python benchmarks/bench_overhead.py [--steps 4000] [--seconds 30] [--blocks 12] [--write]
    python benchmarks/bench_overhead.py --stack-samples [--write]

The first table: steps with the recorder's hooks and steps without take turns, in pairs whose order
is drawn, so that what the machine does besides falls on both. Both call the same functions in the
same way; one is given those that the recorder has wrapped, the other what they wrap. Measured is
the CPU time of the training thread (``CLOCK_THREAD_CPUTIME_ID``): the median of the differences
within pairs and its 95% interval (bootstrap). For comparison: a control without anything on either
side, functions that do nothing but call what they wrap, and a ``torch.profiler`` that waits.

The second table tells the cost whole, in blocks of four seconds with and without that take turns,
with the recorder's threads at work meanwhile: CPU time of the training thread, of the whole process
(``CLOCK_PROCESS_CPUTIME_ID``, until all of the block is written) and the time that the training
thread slept: wall time less its CPU time less the time that it was ready to run and had no core
(``schedstat``, which is where other programs show). The loop itself never sleeps, so that is what
it waits for the interpreter's lock; the control says so. Linux only.

``--stack-samples`` measures these alone: the CPU time of the sampler's thread, waking included, for
as many samples as it takes at its first rate, of a thread that trains below 40 frames. Beside it
is a sample without waking, many in a row. What the training thread waits meanwhile is not measured.

``--write`` puts the tables into docs/overhead.md.
"""

from __future__ import annotations

import argparse
import os
import platform
import random
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np
import torch
from torch import nn, profiler
from torch.optim import optimizer
from torch.utils.data import DataLoader, TensorDataset, dataloader

from advisor.recorder.options import RecordOptions
from advisor.recorder.session import RecordingSession
from advisor.recorder.stack_samples import (
    FAST_SAMPLES,
    FAST_SECONDS,
    MAX_SAMPLES,
    SLOW_SECONDS,
    StackSampler,
)

PAGE = Path(__file__).resolve().parents[1] / "docs" / "overhead.md"
WARM = 300
"""Steps before any is measured: caches, allocators, CPython's specialised code."""
TABLES, SAMPLES = "bench_overhead", "bench_overhead samples"
"""Names of the page's comments around each measured part."""
IN_A_ROW = 3000
FRAMES = 40
"""Depth of the sampled stack: a training function below a trainer of some library."""


class StepFunctions(NamedTuple):
    """The functions that a training step calls, and an optimizer's hooks."""

    next: Callable[..., Any]
    to: Callable[..., Any]
    forward: Callable[..., Any]
    backward: Callable[..., Any]
    before: dict[int, Any]
    after: dict[int, Any]
    code: Any = None
    """Code of ``Module.__call__``."""
    then: Callable[[], Any] | None = None
    """Function that the loop calls when a step is over."""

    @classmethod
    def present(cls) -> StepFunctions:
        """The functions as they are at this moment."""
        return cls(
            dataloader._BaseDataLoaderIter.__next__,
            torch.Tensor.to,
            nn.Module.__call__,
            torch.autograd._engine_run_backward,
            dict(optimizer._global_optimizer_pre_hooks),
            dict(optimizer._global_optimizer_post_hooks),
            nn.Module.__call__.__code__,
        )


LIVE = StepFunctions(
    next,
    lambda tensor, target: tensor.to(target),
    lambda model, x: model(x),
    torch.autograd._engine_run_backward,
    {},
    {},
)
"""Whatever is there at the moment of the call."""


class Loop:
    """A training loop with five phases: data, copy, forward, backward, optimizer."""

    def __init__(self, model: nn.Module, shape: tuple[int, ...], batch: int) -> None:
        self.model = model
        self.optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        count = batch * 64
        data = TensorDataset(torch.randn(count, *shape), torch.randint(0, 10, (count,)))
        self.loader = DataLoader(data, batch_size=batch, num_workers=0)
        # on a CPU nothing is copied, and "meta" stands for the copy's host side
        self.cuda = torch.cuda.is_available()
        self.target = "cuda" if self.cuda else "meta"
        if self.cuda:
            self.model.to(self.target)
        self.batches = iter(self.loader)

    def use(self, calls: StepFunctions) -> None:
        """Have these called in the next step. Not part of it."""
        torch.autograd._engine_run_backward = calls.backward
        for hooks, wanted in (
            (optimizer._global_optimizer_pre_hooks, calls.before),
            (optimizer._global_optimizer_post_hooks, calls.after),
        ):
            hooks.clear()
            hooks.update(wanted)
        if calls.code is not None and nn.Module.__call__.__code__ is not calls.code:
            nn.Module.__call__.__code__ = calls.code

    def batch(self, calls: StepFunctions) -> Any:
        """The next one; the loader begins again when it is done."""
        try:
            return calls.next(self.batches)
        except StopIteration:
            self.batches = iter(self.loader)
            return calls.next(self.batches)

    def train(self, steps: int) -> None:
        """Training steps that call what is in place when they do."""
        for _ in range(steps):
            self.step(LIVE)

    def step(self, calls: StepFunctions) -> None:
        """Run a training step that calls these."""
        x, y = self.batch(calls)
        moved = calls.to(x, self.target), calls.to(y, self.target)
        if self.cuda:
            x, y = moved
        self.optimizer.zero_grad()
        loss = nn.functional.cross_entropy(calls.forward(self.model, x), y)
        loss.backward()
        self.optimizer.step()
        if calls.then is not None:
            calls.then()


def mlp() -> Loop:
    """Small and fast: the share of a fixed cost is at its largest."""
    model = nn.Sequential(
        nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 10)
    )
    return Loop(model, (64,), 32)


def deep() -> Loop:
    """Many small modules: what each module's call costs shows here."""
    layers = [nn.Sequential(nn.Linear(32, 32), nn.ReLU(), nn.LayerNorm(32)) for _ in range(40)]
    return Loop(nn.Sequential(*layers, nn.Linear(32, 10)), (32,), 16)


class StepDifferences(NamedTuple):
    """Differences of step times, µs."""

    plain: float
    added: float
    low: float
    high: float
    pairs: int


def compare(
    loop: Loop, plain: StepFunctions, other: StepFunctions, steps: int, seconds: float
) -> StepDifferences:
    """Steps of both kinds in turns, until there are enough or the time is up."""
    rng = random.Random(0)
    clock = time.thread_time_ns
    taken: dict[bool, list[int]] = {True: [], False: []}
    end = time.monotonic() + seconds
    for number in range(-WARM, steps):
        if number > 100 and time.monotonic() > end:
            break
        for is_other in rng.choice(((True, False), (False, True))):
            calls = other if is_other else plain
            loop.use(calls)
            begin = clock()
            loop.step(calls)
            taken[is_other].append(clock() - begin)
    without, with_it = taken[False][WARM:], taken[True][WARM:]
    differences = [(b - a) / 1e3 for a, b in zip(without, with_it, strict=True)]
    low, high = interval(differences)
    loop.use(plain)
    return StepDifferences(
        statistics.median(without) / 1e3,
        statistics.median(differences),
        low,
        high,
        len(differences),
    )


def interval(values: list[float]) -> tuple[float, float]:
    """95% bootstrap interval of the median."""
    rng = np.random.default_rng(0)
    drawn = rng.choice(np.array(values), (1000, len(values)))
    low, high = np.percentile(np.median(drawn, axis=1), [2.5, 97.5])
    return float(low), float(high)


def recorded(
    make: Callable[[], Loop], steps: int, seconds: float, **options: Any
) -> StepDifferences:
    """Record with all that a recording does outside of windows."""
    loop = make()
    plain = StepFunctions.present()
    with tempfile.TemporaryDirectory() as folder:
        chosen = RecordOptions(out=f"{folder}/run", active=0, report=False).with_changes(**options)
        session = RecordingSession(chosen, "context")
        session.start()
        loop.train(WARM)
        wrapped_functions = StepFunctions.present()
        comparison = compare(loop, plain, wrapped_functions, steps, seconds)
        loop.use(wrapped_functions)
        if session.problem:
            sys.exit(f"recording stopped: {session.problem}")
        count = session.count()
        session.finish()
    if count < comparison.pairs + 2 * WARM:
        sys.exit(f"only {count} steps were recorded")
    return comparison


def control(make: Callable[[], Loop], steps: int, seconds: float) -> StepDifferences:
    """Compare with nothing on either side."""
    loop = make()
    plain = StepFunctions.present()
    return compare(loop, plain, plain, steps, seconds)


def wrapped(make: Callable[[], Loop], steps: int, seconds: float) -> StepDifferences:
    """Put functions in the same places that only call what they wrap."""

    def bare(original: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            return original(*args, **kwargs)

        return call

    def nothing(*_: Any) -> None:
        pass

    loop = make()
    plain = StepFunctions.present()
    functions = [bare(function) for function in plain[:4]]
    other = StepFunctions(*functions, {0: nothing}, {0: nothing})
    return compare(loop, plain, other, steps, seconds)


def idle_profiler(make: Callable[[], Loop], steps: int, seconds: float) -> StepDifferences:
    """Run ``torch.profiler`` waiting for a window that never comes, with a call per step."""
    loop = make()
    plain = StepFunctions.present()
    never = profiler.schedule(wait=1 << 40, warmup=1, active=1)
    with profiler.profile(activities=[profiler.ProfilerActivity.CPU], schedule=never) as waiting:
        return compare(loop, plain, plain._replace(then=waiting.step), steps, seconds)


def call() -> float:
    """Measure how fast the interpreter is here: one call of an empty function, ns."""

    def empty() -> None:
        pass

    taken = []
    for _ in range(50):
        begin = time.thread_time_ns()
        for _ in range(10_000):
            empty()
        taken.append((time.thread_time_ns() - begin) / 10_000)
    return statistics.median(taken)


class BlockDifferences(NamedTuple):
    """Medians of differences between neighbouring blocks, µs per step."""

    plain: float
    thread: float
    process: float
    blocked: float
    spread: float
    """Half the distance of the quartiles of blocked time."""


def unserved() -> float:
    """Total time so far that the calling thread was ready to run and had no core, s."""
    stat = Path(f"/proc/self/task/{threading.get_native_id()}/schedstat").read_text("utf-8")
    return int(stat.split()[1]) / 1e9


def whole_cost(make: Callable[[], Loop], blocks: int, record: bool) -> BlockDifferences:
    """Blocks with and without a recording in turns; without ``record`` nothing on either side."""
    loop = make()
    plain = StepFunctions.present()
    with tempfile.TemporaryDirectory() as folder:
        session = None
        wrapped_functions = plain
        if record:
            session = RecordingSession(
                RecordOptions(out=f"{folder}/run", active=0, report=False), "context"
            )
            session.start()
            loop.train(WARM)
            wrapped_functions = StepFunctions.present()
        loop.use(plain)
        begin = time.perf_counter()
        for _ in range(WARM):
            loop.step(plain)
        steps = max(100, int(WARM * 4.0 / (time.perf_counter() - begin)))
        taken: dict[bool, list[tuple[float, ...]]] = {True: [], False: []}
        for number in range(2 * blocks):
            with_it = number % 2 == (number // 2) % 2
            loop.use(wrapped_functions if with_it else plain)
            started = time.perf_counter() - unserved(), time.thread_time(), time.process_time()
            for _ in range(steps):
                loop.step(wrapped_functions if with_it else plain)
            wall, thread = time.perf_counter() - unserved(), time.thread_time()
            if session is not None:
                session.writer.flush()
            process = time.process_time()
            parts = wall - started[0], thread - started[1], process - started[2]
            taken[with_it].append(tuple(1e6 * part / steps for part in parts))
        loop.use(plain)
        if session is not None:
            loop.use(wrapped_functions)
            session.finish()
            loop.use(plain)
    rows = []
    for (wall0, thread0, process0), (wall1, thread1, process1) in zip(
        taken[False], taken[True], strict=True
    ):
        blocked = (wall1 - thread1) - (wall0 - thread0)
        rows.append((thread1 - thread0, process1 - process0, blocked))
    both = sorted(blocked for *_, blocked in rows)
    spread = (both[3 * len(both) // 4] - both[len(both) // 4]) / 2
    medians = [statistics.median(column) for column in zip(*rows, strict=True)]
    return BlockDifferences(statistics.median(row[0] for row in taken[False]), *medians, spread)


class TimedSampler(StackSampler):
    """A sampler that notes the CPU time of its thread at the end, and counts its samples."""

    def __init__(self, thread: int) -> None:
        super().__init__(lambda: thread, lambda: False, self._count)
        self.cpu = 0.0
        """Seconds of the whole thread."""
        self.count = 0
        self.deepest = 0
        """Frames of the deepest stack."""

        self.in_a_row = 0.0
        """CPU seconds of a sample where one follows the other."""

    def work(self) -> None:
        super().work()
        self.cpu = time.thread_time()
        for _ in range(IN_A_ROW):
            self._sample(1)
        self.in_a_row = (time.thread_time() - self.cpu) / IN_A_ROW

    def _count(self, _: str, fields: dict[str, Any]) -> None:
        self.count += sum(count for count, _ in fields["stacks"])
        self.deepest = max(self.deepest, *(len(stack) for _, stack in fields["stacks"]))


def stack_samples() -> list[str]:
    """Measure the cost of a sample, and the share of a core that this is at each rate."""
    loop = mlp()
    sampler = TimedSampler(threading.get_ident())

    def below(frames: int) -> None:
        if frames:
            below(frames - 1)
            return
        loop.train(WARM)
        sampler.start()
        while sampler.count < FAST_SAMPLES - 1 and sampler.problem is None:
            loop.train(10)
        sampler.stop_seconds = 10
        sampler.stop()  # the samples in a row are of this stack too

    below(FRAMES)
    if sampler.problem is not None or not sampler.in_a_row:
        sys.exit(f"sampling stopped: {sampler.problem}")
    cost = sampler.cpu / sampler.count
    rates = [1 / FAST_SECONDS, 1 / SLOW_SECONDS]
    fast, slow = (f"{100 * rate * cost:.2f}%" for rate in rates)
    return [
        f"A sample of a thread {sampler.deepest} frames deep took {1e6 * cost:.0f} µs of CPU time"
        f" (mean of {sampler.count}). In a row, without waking, it took"
        f" {1e6 * sampler.in_a_row:.0f} µs: waking and cold caches are the rest.",
        f"At {rates[0]:.0f} samples per second that is {fast} of a core, at {rates[1]:.0f} per"
        f" second {slow}.",
        f"The {MAX_SAMPLES:,} samples of a long run take {1e3 * MAX_SAMPLES * cost:.0f} ms in all.",
        "",
        f"{where()} The machine's load was {os.getloadavg()[0]:.0f}.",
    ]


def where() -> str:
    """The machine, in a line."""
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "no GPU"
    return (
        f"torch {torch.__version__}, Python {platform.python_version()}, {os.cpu_count()} cores,"
        f" {device}. One call of an empty Python function took {call():.0f} ns."
    )


def tables(steps: int, seconds: float, blocks: int) -> list[str]:
    """Both tables, as lines."""
    table = [
        "| loop | what | plain step, µs | added, µs | 95% interval, µs | share | pairs |",
        "|---|---|---:|---:|---:|---:|---:|",
    ]
    kinds: list[tuple[str, Callable[..., StepDifferences], dict[str, Any]]] = [
        ("nothing (control)", control, {}),
        ("functions that only call", wrapped, {}),
        ("idle torch.profiler", idle_profiler, {}),
        ("recorded, 5 phases", recorded, {"telemetry": 0.0}),
        ("… and telemetry at 2 Hz", recorded, {}),
    ]
    for name, make in (("MLP, 5 modules", mlp), ("160 small modules", deep)):
        for what, measure, options in kinds:
            print(f"{name}: {what} …", file=sys.stderr, flush=True)
            row = measure(make, steps, seconds, **options)
            table.append(
                f"| {name} | {what} | {row.plain:.0f} | {row.added:+.1f} | {row.low:+.1f} to"
                f" {row.high:+.1f} | {100 * row.added / row.plain:+.1f}% | {row.pairs} |"
            )
    paragraphs = [
        "| loop | what | plain step, µs | training thread, µs | process CPU, µs | blocked, µs"
        " | ± | together, µs |",
        "|---|---|---:|---:|---:|---:|---:|---:|",
    ]
    for name, make in (("MLP, 5 modules", mlp), ("160 small modules", deep)):
        for what, record in (("nothing (control)", False), ("recorded, telemetry at 2 Hz", True)):
            print(f"{name}: {what}, whole …", file=sys.stderr, flush=True)
            cost = whole_cost(make, blocks, record)
            paragraphs.append(
                f"| {name} | {what} | {cost.plain:.0f} | {cost.thread:+.1f} | {cost.process:+.1f}"
                f" | {cost.blocked:+.1f} | {cost.spread:.1f} | {cost.process + cost.blocked:+.1f} |"
            )
    return [
        "Training thread, its CPU time:",
        "",
        *table,
        "",
        "The whole process:",
        "",
        *paragraphs,
        "",
        where(),
    ]


def main() -> None:
    """Measure, print, and with ``--write`` keep."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=4000, help="pairs of steps a row")
    parser.add_argument("--seconds", type=float, default=60, help="at most so long a row")
    parser.add_argument("--blocks", type=int, default=12, help="pairs of blocks a row")
    parser.add_argument("--stack-samples", action="store_true", help="only what these cost")
    parser.add_argument("--write", action="store_true", help="put the table into docs/overhead.md")
    args = parser.parse_args()
    torch.set_num_threads(1)
    part, lines = (
        (SAMPLES, stack_samples())
        if args.stack_samples
        else (TABLES, tables(args.steps, args.seconds, args.blocks))
    )
    print("\n".join(lines))
    if args.write:
        begin, end = f"<!-- {part}: begin -->", f"<!-- {part}: end -->"
        before, rest = PAGE.read_text("utf-8").split(begin)
        tail = rest.split(end)[1]
        PAGE.write_text("\n".join([before + begin, *lines, end + tail]), "utf-8")


if __name__ == "__main__":
    main()
