"""Memory grows from step to step."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from advisor.analysis import Analysis
from advisor.analysis.record import Floats, Recorded
from advisor.model import Evidence, Finding, NotMeasured, Outcome, Rule, Worth
from advisor.rules.common import size
from advisor.rules.memory.recorded import capacity, growth, last
from advisor.rules.recorded import record
from advisor.testing import TraceBuilder


class MemoryLeak(Rule):
    """Memory in use at the end of a step grows from step to step and does not settle: something
    keeps tensors alive (losses that are summed up with their graph, lists of outputs, hooks), and
    the run will end out of memory.

    Looked for in device memory held by tensors, and in the resident memory of the process. The run
    after the warm-up is cut into eight parts; the lowest value of each is compared, so that long
    sequences and caches that fill up do not count. Growth has to go on: at least six of seven parts
    rise, and the second half grows at half the first's rate or more. Reported from 100 MB on
    (traceml), of fifty steps or more; resident memory from 5 % of what the machine has, because
    copies of shared pages in DataLoader workers and file caches of libraries also grow for a while.
    """

    id = "memory-leak"
    title = "Memory grows from step to step"
    category = "memory"
    reads_record = True
    validated = "recordings"
    validated_on = (
        "a CPU recording whose loop keeps 6 MB a step, for resident memory; silent without that. "
        "Device memory: synthetic"
    )
    references = (
        "https://pytorch.org/docs/stable/notes/faq.html#my-model-reports-cuda-runtime-error-2-out-of-memory",
        "https://pytorch.org/docs/stable/torch_cuda_memory.html",
    )

    min_steps = 50  # traceml
    min_growth = 100e6  # bytes on the device (traceml)
    min_host_growth = 200e6  # bytes of resident memory …
    min_host_share = 0.02  # … and of the host's memory

    def check(self, a: Analysis) -> Iterator[Outcome]:
        """Look for steady growth on the device and on the host."""
        recorded = record(a)
        used = recorded.settled
        if int(used.sum()) < self.min_steps:
            yield NotMeasured(
                what="whether memory grows from step to step",
                why=f"{int(used.sum())} steps after the warm-up say too little",
                record=f"a run of {2 * self.min_steps} steps or more",
            )
            return
        device = recorded.column("allocated")[used]
        grown, steady = growth(device)
        if steady and grown >= self.min_growth:
            yield self._finding(a, "device memory in tensors", device, grown, capacity(a))
        host = _resident(recorded)
        grown, steady = growth(host)
        total = recorded.record.rank.memory_bytes
        limit = max(self.min_host_growth, self.min_host_share * (total or 0))
        if steady and grown >= limit:
            yield self._finding(a, "resident memory of the process", host, grown, total)

    def _finding(
        self, a: Analysis, what: str, values: np.ndarray, grown: float, total: int | None
    ) -> Finding:
        recorded = record(a)
        steps = int(recorded.settled.sum())
        each = grown / steps
        now = last(values)
        left = None
        if total is not None and now is not None:
            left = max(0, round((total - now) / each))
        until = f"; at that rate it is full in {left:,} more steps" if left is not None else ""
        return Finding(
            rule=self.id,
            title=f"{what[0].upper()}{what[1:]} grows from step to step",
            summary=f"It grew by {size(grown)} in {steps:,} steps, {size(each)} a step{until}.",
            evidence=[
                Evidence("grown by", grown, "bytes", self.min_growth, "traceml"),
                Evidence("a step", each, "bytes"),
                Evidence("at the end", now, "bytes"),
                Evidence("there is", total, "bytes"),
                Evidence("steps", steps, "count", self.min_steps, "traceml"),
            ],
            fix=(
                "Find what keeps tensors alive: sums of losses without .detach(), lists of "
                "outputs, hooks and caches that are never emptied, exceptions that hold frames."
            ),
            code=(
                "total += loss.detach()          # not: total += loss\n"
                "# who holds it: two snapshots some hundred steps apart, compared in\n"
                "# https://pytorch.org/memory_viz\n"
                "torch.cuda.memory._record_memory_history(max_entries=100_000)\n"
                "torch.cuda.memory._dump_snapshot('step_500.pickle')"
            ),
            check="Record again, as many steps: memory at the end of a step stays the same.",
            worth=Worth(
                currency="risk",
                reason=f"out of memory in {left:,} steps" if left is not None
                else "the run ends out of memory",
            ),
            confidence=0.8,
            falsified_by="a longer run in which it settles",
        )  # fmt: skip

    @staticmethod
    def fires_on() -> dict[str, TraceBuilder]:
        """2 MB a step on the device; 5 MB a step on the host."""
        return {
            "on the device": _run(lambda n: 10e9 + 2e6 * n),
            "on the host": _run(lambda n: 5e9, host=lambda n: 4e9 + 5e6 * n),
        }

    @staticmethod
    def silent_on() -> dict[str, TraceBuilder]:
        """Steady; sequences of random length; a cache that fills up; a short run."""
        rng = np.random.default_rng(0).integers(0, 400, 1000)
        return {
            "steady": _run(lambda n: 10e9),
            "sequences of random length": _run(lambda n: 10e9 + 1e7 * rng[n]),
            "a cache that fills up": _run(lambda n: 10e9 + 5e8 * (1 - 0.97**n)),
            "a little on the host": _run(lambda n: 10e9, host=lambda n: 4e9 + 1e5 * n),
            "a short run": _run(lambda n: 10e9 + 2e6 * n, steps=40),
        }


def _resident(recorded: Recorded) -> Floats:
    """Resident memory after the warm-up, from steps and telemetry, in order of time."""
    first, last_ = recorded.span
    told = [(s.t, s.rss) for s in recorded.steps if s.rss is not None and s.t >= first]
    told += [(at, host.rss) for at, host in recorded.hosts if host.rss is not None]
    return np.array([rss for at, rss in sorted(told) if at <= last_], dtype=np.float64)


def _run(device: object, *, host: object = None, steps: int = 300) -> TraceBuilder:
    from advisor.rundir import Device

    assert callable(device)
    b = TraceBuilder()
    r = b.record_of_run(devices=[Device(total_bytes=80 * 10**9)], memory_bytes=64 * 10**9)
    for n in range(steps):
        told = {"allocated": round(device(n))}
        if callable(host) and n % 5 == 0:
            told["rss"] = round(host(n))
        r.step(10, fields=told)
    return b
