"""Memory grows from step to step."""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar

import numpy as np

from advisor.core import text as t
from advisor.core.finding import (
    Evidence,
    Finding,
    Impact,
    Location,
    Outcome,
    Rule,
    SkippedCheck,
    Threshold,
)
from advisor.measure import Analysis
from advisor.measure.steps.record import Floats, StepRecords
from advisor.rules.memory.recorded import capacity, growth, last
from advisor.rules.recorded import record
from advisor.rules.sources import CHOSEN, TRACEML
from advisor.testing import TraceBuilder

_WHO_HOLDS_IT = (
    "# who holds it: two snapshots some hundred steps apart, compared in\n"
    "# https://pytorch.org/memory_viz\n"
    "torch.cuda.memory._record_memory_history(max_entries=100_000)\n"
    "torch.cuda.memory._dump_snapshot('step_500.pickle')"
)


class MemoryLeak(Rule):
    """Memory in use at the end of a step grows from step to step and does not settle: something
    keeps tensors alive (losses that are summed up with their graph, lists of outputs, hooks), and
    the run will end out of memory.

    Looked for in device memory held by tensors, and in the resident memory of the process. The run
    after the warm-up is cut into eight parts; the lowest value of each is compared, so that long
    sequences and caches that fill up do not count. Growth has to go on: at least six of seven parts
    rise, and the second half grows at half the first's rate or more. Reported from 100 MB on
    on the device, of fifty steps or more; resident memory from 200 MB and 2 % of what the machine
    has, because shared pages in DataLoader workers and file caches of libraries also grow for a
    while.

    With a memory snapshot: lines of which something is left behind by four of five steps, and held
    to the end of the history; six whole steps or more, the first and the last two aside. Where
    memory ran out, 5 % of what tensors held is enough.
    """

    id = "memory-leak"
    title = "Memory grows from step to step"
    category = "memory"
    reads_record = True
    reads_snapshot = True
    found_in = ("recorded/leak.slow",)
    silent_in = (
        "recorded/leak.cured",
        "recorded/anomaly.cured",
        "recorded/gc_pauses.cured",
        "recorded/threads.cured",
    )
    validated_on = (
        "a CPU recording whose loop keeps 6 MB a step, for resident memory; silent without that. "
        "Device memory: synthetic"
    )
    references = (
        "https://pytorch.org/docs/stable/notes/faq.html#my-model-reports-cuda-runtime-error-2-out-of-memory",
        "https://pytorch.org/docs/stable/torch_cuda_memory.html",
    )

    min_steps = Threshold(50, "steps after the warm-up", TRACEML)
    min_growth = Threshold(100e6, "bytes on the device", TRACEML)
    min_held = Threshold(
        0.05, "of what tensors held: enough in a snapshot in which memory ran out", CHOSEN
    )
    min_host_growth = Threshold(
        200e6, "bytes of resident memory: file caches of libraries also grow for a while", CHOSEN
    )
    min_host_share = Threshold(
        0.02, "of the host's memory: shared pages in workers also grow for a while", CHOSEN
    )

    fix = (
        "Find what keeps tensors alive: sums of results without .detach(), lists of "
        "outputs, hooks and caches that are never emptied, exceptions that hold frames."
    )
    code = "total += loss.detach()          # not: total += loss\n" + _WHO_HOLDS_IT
    verify = "Record again, as many steps: memory at the end of a step stays the same."
    falsified_by = "a longer run in which it settles"
    confidence = 0.8

    cases: ClassVar = {
        "of a snapshot": {
            "fix": "Let go of what that line makes: sums of results without .detach(), lists of "
            "outputs, hooks and caches that are never emptied.",
            "verify": "Take a snapshot again some hundred steps later: the line holds as much as "
            "now.",
            "falsified_by": "a longer history in which the line's blocks are freed: a queue of "
            "fixed length, or garbage that Python has yet to collect",
            "code": "total += loss.detach()          # not: total += loss",
            "confidence": 0.75,
        }
    }
    inference: ClassVar = {
        "cases": {
            "of a snapshot": {"code": "total += score.detach()         # not: total += score"}
        },
        "code": "total += score.detach()         # not: total += score\n" + _WHO_HOLDS_IT,
    }

    def check(self, a: Analysis) -> Iterator[Outcome]:
        """Look for steady growth on the device and on the host."""
        shown = list(self._of_snapshot(a))
        yield from shown
        if a.recorded is None:
            return
        recorded = record(a)
        used = recorded.settled
        if int(used.sum()) < self.min_steps:
            yield SkippedCheck(
                what="whether memory grows from step to step",
                why=f"{int(used.sum())} steps after the warm-up say too little",
                record=f"a run of {2 * self.min_steps} steps or more",
            )
            return
        device = recorded.column("allocated")[used]
        grown, steady = growth(device)
        if steady and grown >= self.min_growth and not shown:
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
            title=f"{what[0].upper()}{what[1:]} grows from step to step",
            summary=(
                f"It grew by {t.format_bytes(grown)} in {steps:,} steps, {t.format_bytes(each)} a "
                f"step{until}."
            ),
            evidence=[
                Evidence("grown by", grown, "bytes", *self.limit("min_growth")),
                Evidence("left behind", each, "bytes", per="step"),
                Evidence("at the end", now, "bytes"),
                Evidence("there is", total, "bytes"),
                Evidence("steps", steps, "count", *self.limit("min_steps")),
            ],
            impact=Impact(
                currency="risk",
                reason=f"out of memory in {left:,} steps"
                if left is not None
                else "the run ends out of memory",
            ),
        )

    def _of_snapshot(self, a: Analysis) -> Iterator[Finding]:
        """Lines that leave something behind in each step, where the steps of the history alone
        came to enough, or memory ran out."""
        for post in a.post_mortems:
            table = post.growth
            if table.is_empty():
                continue
            each = float(table["step_bytes"].sum())
            whole = int(table["bytes"].sum())
            least = self.min_growth
            if post.history.failed is not None:
                least = min(least, self.min_held * post.allocated)
            if whole < least:
                continue
            row = table.row(0, named=True)
            steps = int(row["of"])
            place = "a line that no stack tells"
            if row["file"] is not None:
                place = f"{row['file'].replace(chr(92), '/').rsplit('/', 1)[-1]}:{row['line']}"
            yield Finding(
                title="Device memory in tensors grows from step to step",
                summary=(
                    f"{place} leaves {t.format_bytes(row['step_bytes'])} behind in "
                    f"{row['steps']:,} of "
                    f"{steps:,} steps, and all of it is held to the end: {t.format_bytes(whole)} "
                    "so far"
                    + (
                        f", {t.format_bytes(each)} a step with other lines."
                        if table.height > 1
                        else "."
                    )
                ),
                evidence=[
                    Evidence("left behind", each, "bytes", per="step"),
                    Evidence("held of it", whole, "bytes", *self.limit("min_growth")),
                    Evidence("steps that left something", int(row["steps"]), "count"),
                    Evidence("steps looked at", steps, "count"),
                    Evidence("steps told by", post.step_source),
                ],
                where=[
                    Location(
                        file=r["file"], line=r["line"], function=r["function"], count=r["steps"]
                    )
                    for r in table.head(3).iter_rows(named=True)
                    if r["file"] is not None
                ],
                impact=Impact(
                    currency="risk", reason=f"{t.format_bytes(each)} a step are never freed"
                ),
                confidence_notes=["of snapshots, shown on simulated ones only"],
                **self.case("of a snapshot"),
            )

    @staticmethod
    def fires_on() -> dict[str, TraceBuilder]:
        """2 MB a step on the device; 5 MB a step on the host."""
        return {
            "on the device": _run(lambda n: 10e9 + 2e6 * n),
            "on the host": _run(lambda n: 5e9, host=lambda n: 4e9 + 5e6 * n),
            "in a snapshot": _snapshot(16 << 20),
        }

    @staticmethod
    def silent_on() -> dict[str, tuple[TraceBuilder, str]]:
        """Steady; sequences of random length; a cache that fills up; a short run."""
        rng = np.random.default_rng(0).integers(0, 400, 1000)
        return {
            "steady": (_run(lambda n: 10e9), "steady"),
            "sequences of random length": (_run(lambda n: 10e9 + 1e7 * rng[n]), "steady"),
            "a cache that fills up": (_run(lambda n: 10e9 + 5e8 * (1 - 0.97**n)), "steady"),
            "a little on the host": (
                _run(lambda n: 10e9, host=lambda n: 4e9 + 1e5 * n),
                "grown >= limit",
            ),
            "a short run": (
                _run(lambda n: 10e9 + 2e6 * n, steps=40),
                "int(used.sum()) < self.min_steps",
            ),
            "a snapshot of steps that hold nothing": (_snapshot(0), "a.recorded is None"),
        }


def _resident(recorded: StepRecords) -> Floats:
    """Resident memory after the warm-up, from steps and telemetry, in order of time."""
    first, last_ = recorded.span
    told = [(s.t, s.rss) for s in recorded.steps if s.rss is not None and s.t >= first]
    told += [(at, host.rss) for at, host in recorded.hosts if host.rss is not None]
    return np.array([rss for at, rss in sorted(told) if at <= last_], dtype=np.float64)


def _run(device: object, *, host: object = None, steps: int = 300) -> TraceBuilder:
    from advisor.core.run_directory import Device

    assert callable(device)
    b = TraceBuilder()
    r = b.record_of_run(devices=[Device(total_bytes=80 * 10**9)], memory_bytes=64 * 10**9)
    for n in range(steps):
        told = {"allocated": round(device(n))}
        if callable(host) and n % 5 == 0:
            told["rss"] = round(host(n))
        r.step(10, fields=told)
    return b


def _snapshot(leak: int) -> TraceBuilder:
    """Twelve steps, each of which leaves so many bytes behind."""
    from advisor.testing.allocator import Allocator, Training

    m = Allocator()
    training = Training(m, leak=leak)
    for _ in range(12):
        training.step()
    b = TraceBuilder()
    b.memory_snapshot(m)
    return b
