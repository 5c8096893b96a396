"""What recording costs the training thread: interleaved A/B inside one process, and hook by hook.

    python benchmarks/bench_overhead.py [--steps 4000] [--seconds 60] [--hooks] [--write]

Steps with the recorder's hooks and steps without take turns, in pairs whose order is drawn, so that
what the machine does besides falls on both. Both call the same functions in the same way; one is
given those that the recorder has wrapped, the other what they wrap (nothing is patched in between:
CPython would drop what it has specialised for the classes). Measured is the CPU time of the
training thread (``CLOCK_THREAD_CPUTIME_ID``): the recorder's own threads and the wait for a core
are not in it. Given are the median of the differences within pairs and its 95 % interval
(bootstrap).

Three rows are for comparison: a control without anything on either side, functions that do nothing
but call what they wrap, and a ``torch.profiler`` that waits for its window.

The second table times each hook itself, in place, in the running loop: from its call to its return
without the call it is around. What the timing adds is measured in steps where the hooks are left
out, in turns, and taken off. It leaves out what a hook costs others by taking room in the caches.

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
from typing import Any, NamedTuple

os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np
import torch
from torch import nn, profiler
from torch.optim import optimizer
from torch.utils.data import DataLoader, TensorDataset, dataloader

from advisor.recording.hooks import Hooks
from advisor.recording.options import Options
from advisor.recording.outermost import PLACE, Outermost
from advisor.recording.quick import available
from advisor.recording.session import Session

PAGE = Path(__file__).resolve().parents[1] / "docs" / "overhead.md"
WARM = 300
"""Steps before any is measured: caches, allocators, CPython's specialised code, and the first
steps in which the recorder learns which modules are outermost."""
BEGIN, END = "<!-- bench_overhead: begin -->", "<!-- bench_overhead: end -->"


class Calls(NamedTuple):
    """What a training step calls, and what an optimizer's hooks are."""

    next: Callable[..., Any]
    to: Callable[..., Any]
    forward: Callable[..., Any]
    backward: Callable[..., Any]
    before: dict[int, Any]
    after: dict[int, Any]
    direct: Any = None
    """The call that the model is given for itself; ``None``: it has none."""
    then: Callable[[], Any] | None = None
    """What the loop calls when a step is over."""

    @classmethod
    def now(cls, model: nn.Module) -> Calls:
        """As they are at this moment."""
        return cls(
            dataloader._BaseDataLoaderIter.__next__,
            torch.Tensor.to,
            nn.Module.__call__,
            torch.autograd._engine_run_backward,
            dict(optimizer._global_optimizer_pre_hooks),
            dict(optimizer._global_optimizer_post_hooks),
            vars(model).get(PLACE),
        )


LIVE = Calls(
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

    def use(self, calls: Calls) -> None:
        """Have these called in the next step. Not part of it."""
        torch.autograd._engine_run_backward = calls.backward
        for hooks, wanted in (
            (optimizer._global_optimizer_pre_hooks, calls.before),
            (optimizer._global_optimizer_post_hooks, calls.after),
        ):
            hooks.clear()
            hooks.update(wanted)
        vars(self.model).pop(PLACE, None)
        if calls.direct is not None:
            vars(self.model)[PLACE] = calls.direct

    def batch(self, calls: Calls) -> Any:
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

    def step(self, calls: Calls) -> None:
        """One training step that calls these."""
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


class Compared(NamedTuple):
    """Times of a step, µs."""

    plain: float
    added: float
    low: float
    high: float
    pairs: int


def compare(loop: Loop, plain: Calls, other: Calls, steps: int, seconds: float) -> Compared:
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
    alone, with_it = taken[False][WARM:], taken[True][WARM:]
    differences = [(b - a) / 1e3 for a, b in zip(alone, with_it, strict=True)]
    low, high = interval(differences)
    loop.use(plain)
    return Compared(
        statistics.median(alone) / 1e3,
        statistics.median(differences),
        low,
        high,
        len(differences),
    )


def interval(values: list[float]) -> tuple[float, float]:
    """95 % bootstrap interval of the median."""
    rng = np.random.default_rng(0)
    drawn = rng.choice(np.array(values), (1000, len(values)))
    low, high = np.percentile(np.median(drawn, axis=1), [2.5, 97.5])
    return float(low), float(high)


def recorded(make: Callable[[], Loop], steps: int, seconds: float, **options: Any) -> Compared:
    """With all that a recording does outside of windows."""
    loop = make()
    plain = Calls.now(loop.model)
    with tempfile.TemporaryDirectory() as folder:
        chosen = Options(out=f"{folder}/run", active=0, report=False).with_changes(**options)
        session = Session(chosen, "context")
        session.start()
        loop.train(WARM)
        ours = Calls.now(loop.model)
        found = compare(loop, plain, ours, steps, seconds)
        loop.use(ours)
        if session.problem:
            sys.exit(f"recording stopped: {session.problem}")
        count = session.count()
        session.finish()
    if count < found.pairs + 2 * WARM:
        sys.exit(f"only {count} steps were recorded")
    return found


def control(make: Callable[[], Loop], steps: int, seconds: float) -> Compared:
    """With nothing on either side."""
    loop = make()
    plain = Calls.now(loop.model)
    return compare(loop, plain, plain, steps, seconds)


def wrapped(make: Callable[[], Loop], steps: int, seconds: float) -> Compared:
    """With functions in the same places that only call what they wrap."""

    def bare(original: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            return original(*args, **kwargs)

        return call

    def nothing(*_: Any) -> None:
        pass

    loop = make()
    plain = Calls.now(loop.model)
    functions = [bare(function) for function in plain[:4]]
    other = Calls(*functions, {0: nothing}, {0: nothing})
    return compare(loop, plain, other, steps, seconds)


def idle_profiler(make: Callable[[], Loop], steps: int, seconds: float) -> Compared:
    """With ``torch.profiler`` waiting for a window that never comes, told of each step."""
    loop = make()
    plain = Calls.now(loop.model)
    never = profiler.schedule(wait=1 << 40, warmup=1, active=1)
    with profiler.profile(activities=[profiler.ProfilerActivity.CPU], schedule=never) as waiting:
        return compare(loop, plain, plain._replace(then=waiting.step), steps, seconds)


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
            quick = None if name == "__call__" else hooks._quick

            def final(call: Any) -> Any:
                """What is there after the first steps."""
                slow = make(call)
                return slow if quick is None else quick.wrapper(name, call, slow)

            hooks._quick, kept = None, hooks._quick  # what is final replaces nothing of ours
            plain(hooks, owner, name, lambda original: place.around(name, final, original))
            hooks._quick = kept

        def direct(outermost: Outermost, wrap: Callable[..., Any], *others: Any) -> None:
            init(outermost, lambda original: place.around("__call__", wrap, original), *others)

        self._init = init = Outermost.__init__
        Hooks._patch = patch  # type: ignore[method-assign]
        Outermost.__init__ = direct  # type: ignore[method-assign, assignment]
        return self

    def __exit__(self, *_: object) -> None:
        Hooks._patch = self._patch  # type: ignore[method-assign]
        Outermost.__init__ = self._init  # type: ignore[method-assign]

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


def hook_by_hook(
    make: Callable[[], Loop], native: bool, rounds: int = 60
) -> dict[str, tuple[float, float]]:
    """For each hook, in C or of Python: calls a step, and µs a step."""
    loop = make()
    with tempfile.TemporaryDirectory() as folder, InPlace() as place:
        options = Options(out=f"{folder}/run", active=0, report=False, telemetry=0.0, native=native)
        session = Session(options, "context")
        session.start()
        session.hooks._compiles = True  # nothing is replaced: it is there already
        for name, hooks, callback in zip(
            ("optimizer, before", "optimizer, after"),
            (optimizer._global_optimizer_pre_hooks, optimizer._global_optimizer_post_hooks),
            session.hooks._callbacks,
            strict=True,
        ):
            hooks[callback.handle.id] = place.callback(name, callback.quick)
        gc.callbacks.remove(session.pauses._call)
        timed_pauses = place.callback("garbage collection", session.pauses._call)
        gc.callbacks.append(timed_pauses)
        loop.train(WARM)
        place.taken.clear()
        for _ in range(rounds):
            for place.real, steps in ((True, 40), (False, 20)):
                loop.train(steps)
        gc.callbacks.remove(timed_pauses)
        session.finish()
    rows = {}
    for (name, real), taken in place.taken.items():
        if real:
            calls = len(taken) / (rounds * 40)
            timing = statistics.median(place.taken.get((name, False), [0]))
            rows[name] = calls, calls * (statistics.median(taken) - timing) / 1e3
    return rows


def main() -> None:
    """Measure, print, and with ``--write`` keep."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=4000, help="pairs of steps a row")
    parser.add_argument("--seconds", type=float, default=60, help="at most so long a row")
    parser.add_argument("--hooks", action="store_true", help="only hook by hook: ten seconds")
    parser.add_argument("--write", action="store_true", help="put the table into docs/overhead.md")
    given = parser.parse_args()
    torch.set_num_threads(1)
    if not available():
        sys.exit("the hooks in C were not built: is there a C compiler, and Python's headers?")
    found, python = hook_by_hook(mlp, True), hook_by_hook(mlp, False)
    hooks = [
        "| hook | calls a step | in C, µs a step | of Python, µs a step |",
        "|---|---:|---:|---:|",
    ]
    for name, (calls, us) in sorted(python.items(), key=lambda row: -row[1][1]):
        hooks.append(f"| `{name}` | {calls:.2f} | {found[name][1]:.1f} | {us:.1f} |")
    sums = [sum(us for _, us in rows.values()) for rows in (found, python)]
    hooks.append(f"| **all** | | **{sums[0]:.1f}** | **{sums[1]:.1f}** |")
    if given.hooks:
        print("\n".join(hooks))
        return
    table = [
        "| loop | what | plain step, µs | added, µs | 95 % interval, µs | share | pairs |",
        "|---|---|---:|---:|---:|---:|---:|",
    ]
    kinds: list[tuple[str, Callable[..., Compared], dict[str, Any]]] = [
        ("nothing (control)", control, {}),
        ("functions that only call", wrapped, {}),
        ("idle torch.profiler", idle_profiler, {}),
        ("recorded, 5 phases", recorded, {"telemetry": 0.0}),
        ("… and telemetry at 2 Hz", recorded, {}),
        ("recorded, hooks of Python", recorded, {"telemetry": 0.0, "native": False}),
    ]
    for name, make in (("MLP, 5 modules", mlp), ("160 small modules", deep)):
        for what, measure, options in kinds:
            print(f"{name}: {what} …", file=sys.stderr, flush=True)
            row = measure(make, given.steps, given.seconds, **options)
            table.append(
                f"| {name} | {what} | {row.plain:.0f} | {row.added:+.1f} | {row.low:+.1f} to"
                f" {row.high:+.1f} | {100 * row.added / row.plain:+.1f} % | {row.pairs} |"
            )
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "no GPU"
    where = (
        f"torch {torch.__version__}, Python {platform.python_version()}, {os.cpu_count()} cores,"
        f" {device}. One call of an empty Python function took {call():.0f} ns."
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
