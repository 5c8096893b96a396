"""What recording costs the training thread: interleaved A/B inside one process, and hook by hook.

    python benchmarks/bench_overhead.py [--pairs 100] [--steps 40] [--hooks] [--write]

Blocks of steps with the recorder's hooks in place and blocks without take turns (which is first
changes each time), so that what the machine does besides falls on both. Measured is the CPU time of
the training thread (``CLOCK_THREAD_CPUTIME_ID``): the recorder's own threads and the wait for a
core are not in it. A block is told by the median of its steps; given are the median of the
differences between neighbouring blocks and its 95 % interval (bootstrap).

Two figures of a millisecond say little about their difference of some µs, so the second table times
each hook itself, in place, in the running loop: from its call to its return without the call it is
around. What the timing adds is measured in steps where the hooks are left out, in turns, and taken
off. It leaves out what a hook costs others by taking room in the caches.

``--write`` puts the tables into docs/overhead.md.
"""

from __future__ import annotations

import argparse
import gc
import os
import platform
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from time import perf_counter_ns as now
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
from torch import nn
from torch.optim import optimizer
from torch.utils.data import DataLoader, TensorDataset

from advisor.recording.hooks import Hooks
from advisor.recording.options import Options
from advisor.recording.session import Session

PAGE = Path(__file__).resolve().parents[1] / "docs" / "overhead.md"
SETTLE = 80
"""Steps after each switch that are not measured. Putting a wrapper on a class makes CPython drop
what it had specialised for its methods, and it takes some fifty calls of each place to do so anew:
that is a cost of switching, which a recording does once."""
BEGIN, END = "<!-- bench_overhead: begin -->", "<!-- bench_overhead: end -->"


class Loop:
    """A training loop with five phases: data, copy, forward, backward, optimizer."""

    def __init__(self, model: nn.Module, shape: tuple[int, ...], batch: int) -> None:
        self.model = model
        self.optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        count = batch * 64
        data = TensorDataset(torch.randn(count, *shape), torch.randint(0, 10, (count,)))
        self.loader = DataLoader(data, batch_size=batch, num_workers=0)
        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self.model.to(self.device)
        self.batches = iter(self.loader)

    def next(self) -> Any:
        """A batch; the loader begins again when it is done."""
        try:
            return next(self.batches)
        except StopIteration:
            self.batches = iter(self.loader)
            return next(self.batches)

    def step(self) -> None:
        """One training step."""
        x, y = self.next()
        # on a CPU nothing is copied, and "meta" stands for the copy's host side
        if self.device.type == "cpu":
            x.to("meta")
            y.to("meta")
        else:
            x, y = x.to(self.device), y.to(self.device)
        self.optimizer.zero_grad()
        loss = nn.functional.cross_entropy(self.model(x), y)
        loss.backward()
        self.optimizer.step()


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


def block(loop: Loop, steps: int) -> float:
    """CPU time of this thread for a step, µs: the median of the block's steps."""
    taken = []
    for _ in range(steps):
        begin = time.thread_time_ns()
        loop.step()
        taken.append(time.thread_time_ns() - begin)
    return statistics.median(taken) / 1e3


def compare(
    loop: Loop, on: Callable[[], None], off: Callable[[], None], pairs: int, steps: int
) -> tuple[float, list[float]]:
    """Median cost without, and the differences of neighbouring blocks."""
    off()
    block(loop, steps * 2)
    on()
    block(loop, steps)
    plain: list[float] = []
    differences: list[float] = []
    for pair in range(pairs):
        taken = {}
        for recorded in (True, False) if pair % 2 else (False, True):
            (on if recorded else off)()
            block(loop, SETTLE)
            taken[recorded] = block(loop, steps)
        plain.append(taken[False])
        differences.append(taken[True] - taken[False])
    off()
    return statistics.median(plain), differences


def interval(values: list[float]) -> tuple[float, float]:
    """95 % bootstrap interval of the median."""
    rng = random.Random(0)
    medians = sorted(statistics.median(rng.choices(values, k=len(values))) for _ in range(2000))
    return medians[50], medians[1949]


def measure(make: Callable[[], Loop], pairs: int, steps: int, **options: Any) -> list[Any]:
    """One row: plain step, added time, interval."""
    loop = make()
    with tempfile.TemporaryDirectory() as folder:
        chosen = Options(out=f"{folder}/run", active=0, report=False).with_changes(**options)
        session = Session(chosen, "context")
        session.start()
        plain, differences = compare(loop, session.listen, session.pause, pairs, steps)
        if session.problem:
            sys.exit(f"recording stopped: {session.problem}")
        recorded = session.steps.count
        session.finish()
    if recorded < pairs * steps:
        sys.exit(f"only {recorded} steps were recorded")
    low, high = interval(differences)
    return [plain, statistics.median(differences), low, high]


def call() -> float:
    """How fast the interpreter is here: one call of an empty function, ns."""

    def empty() -> None:
        pass

    taken = []
    for _ in range(50):
        begin = time.thread_time_ns()
        for _ in range(10_000):
            empty()
        taken.append((time.thread_time_ns() - begin) / 10_000)
    return statistics.median(taken)


def control(make: Callable[[], Loop], pairs: int, steps: int) -> list[Any]:
    """The same with nothing recorded on either side: what the method itself shows."""
    plain, differences = compare(make(), lambda: None, lambda: None, pairs, steps)
    low, high = interval(differences)
    return [plain, statistics.median(differences), low, high]


class InPlace:
    """Times hooks from within: ``with InPlace() as times`` before a session is made."""

    def __init__(self) -> None:
        self.real = True
        """Call the hooks; else only what times them."""
        self.taken: dict[tuple[str, bool], list[int]] = {}

    def __enter__(self) -> InPlace:
        self._patch = Hooks._patch
        place, plain = self, Hooks._patch

        def patch(hooks: Hooks, owner: Any, name: str, make: Callable[[Any], Any]) -> None:
            plain(hooks, owner, name, lambda original: place.around(name, make, original))

        Hooks._patch = patch  # type: ignore[method-assign]
        return self

    def __exit__(self, *_: object) -> None:
        Hooks._patch = self._patch  # type: ignore[method-assign]

    def around(self, name: str, make: Callable[[Any], Any], original: Any) -> Any:
        """A wrapper around the hook's wrapper."""
        inner: list[int] = []

        def call(*args: Any, **kwargs: Any) -> Any:
            begin = now()
            try:
                return original(*args, **kwargs)
            finally:
                inner[-1] += now() - begin

        hook = make(call)

        def timed(*args: Any, **kwargs: Any) -> Any:
            real = self.real
            chosen = hook if real else call
            inner.append(0)
            begin = now()
            try:
                return chosen(*args, **kwargs)
            finally:
                self.keep(name, real, now() - begin - inner.pop())

        return timed

    def keep(self, name: str, real: bool, ns: int) -> None:
        """One call was made."""
        self.taken.setdefault((name, real), []).append(ns)

    def callback(self, name: str, original: Callable[..., None]) -> Callable[..., None]:
        """The same around a callback, which is around nothing."""

        def timed(*args: Any) -> None:
            real = self.real
            begin = now()
            if real:
                original(*args)
            self.keep(name, real, now() - begin)

        return timed


def hook_by_hook(make: Callable[[], Loop], rounds: int = 60) -> list[tuple[str, float, float]]:
    """For each hook: its name, calls a step, and µs a step."""
    loop = make()
    with tempfile.TemporaryDirectory() as folder, InPlace() as place:
        options = Options(out=f"{folder}/run", active=0, report=False, telemetry=0.0)
        session = Session(options, "context")
        session.start()
        for name, hooks in (
            ("optimizer, before", optimizer._global_optimizer_pre_hooks),
            ("optimizer, after", optimizer._global_optimizer_post_hooks),
        ):
            for key, hook in hooks.items():
                hooks[key] = place.callback(name, hook)
        gc.callbacks.remove(session.pauses._call)
        timed_pauses = place.callback("garbage collection", session.pauses._call)
        gc.callbacks.append(timed_pauses)
        block(loop, 300)
        place.taken.clear()
        for _ in range(rounds):
            for place.real, steps in ((True, 40), (False, 20)):
                block(loop, steps)
        gc.callbacks.remove(timed_pauses)
        session.finish()
    rows = []
    for (name, real), taken in place.taken.items():
        if real:
            calls = len(taken) / (rounds * 40)
            timing = statistics.median(place.taken.get((name, False), [0]))
            rows.append((name, calls, calls * (statistics.median(taken) - timing) / 1e3))
    return sorted(rows, key=lambda row: -row[2])


def main() -> None:
    """Measure, print, and with ``--write`` keep."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--pairs", type=int, default=100)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--hooks", action="store_true", help="only hook by hook: ten seconds")
    parser.add_argument("--write", action="store_true", help="put the table into docs/overhead.md")
    given = parser.parse_args()
    torch.set_num_threads(1)
    found = hook_by_hook(mlp)
    hooks = [
        "| hook | calls a step | µs a step |",
        "|---|---:|---:|",
        *(f"| {name} | {calls:.2f} | {us:.1f} |" for name, calls, us in found),
        f"| **all** | | **{sum(us for _, _, us in found):.1f}** |",
    ]
    if given.hooks:
        print("\n".join(hooks))
        return
    rows = []
    for name, make in (("MLP, 5 modules", mlp), ("120 small modules", deep)):
        steps = given.steps if make is mlp else max(10, given.steps // 4)
        rows.append((name, "nothing (control)", *control(make, given.pairs, steps)))
        rows.append((name, "recorded, 5 phases", *measure(make, given.pairs, steps, telemetry=0.0)))
        rows.append((name, "… and telemetry at 2 Hz", *measure(make, given.pairs, steps)))
    table = [
        "| loop | what | plain step, µs | added, µs | 95 % interval, µs | share |",
        "|---|---|---:|---:|---:|---:|",
    ]
    for name, what, plain, added, low, high in rows:
        table.append(
            f"| {name} | {what} | {plain:.0f} | {added:+.1f} | {low:+.1f} to {high:+.1f} |"
            f" {100 * added / plain:+.1f} % |"
        )
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "no GPU"
    where = (
        f"torch {torch.__version__}, Python {platform.python_version()}, {os.cpu_count()} cores,"
        f" {device}; {given.pairs} pairs of blocks of {given.steps} steps. One call of an empty"
        f" Python function took {call():.0f} ns."
    )
    head = "The MLP's hooks, timed in place:"
    lines = [*table, "", where, "", head, "", *hooks]
    print("\n".join(lines))
    if given.write:
        text = PAGE.read_text("utf-8")
        before, rest = text.split(BEGIN)
        tail = rest.split(END)[1]
        PAGE.write_text("\n".join([before + BEGIN, *lines, END + tail]), "utf-8")


if __name__ == "__main__":
    main()
