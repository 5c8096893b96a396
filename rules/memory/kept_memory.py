"""Memory that is kept too long: tensors of the previous step, and a leak in every step."""

from collections.abc import Iterator

import numpy as np
from msgspec.structs import replace

from advisor.core import text as t
from advisor.core.auxiliary_inputs import SNAPSHOT
from advisor.core.finding import (
    Finding,
    Location,
    Outcomes,
    SkippedCheck,
    impact_memory,
    impact_risk,
)
from advisor.core.intervals import Floats, covered_length, union
from advisor.core.rule import Evidence, Rule, Threshold
from advisor.measure import Analysis
from advisor.measure.memory.memory_savings import find_savings
from advisor.measure.memory.peak_memory import PeakMemory, fullest_devices, growing_lines
from advisor.measure.memory.trace_memory import gpu_capacity
from advisor.measure.steps.run_steps import RunSteps
from advisor.rules.support.citations import CHOSEN, TRACEML, public_traces
from advisor.rules.support.common import run_steps_of
from advisor.rules.support.device_memory import (
    last_known,
    line_name,
    locate_allocation,
    measure_growth,
    snapshot_example,
)
from advisor.testing import Examples, TraceBuilder


class KeptReferences(Rule):
    """The peak of memory still holds tensors that the forward pass of an earlier step made. A
    variable of the loop (the output, the loss with its graph) refers to them. They are freed only
    when those of the next step replace them. For a while both are in memory, and the peak is
    higher.

    The rule reads a memory snapshot with history. It looks for blocks that a module's call or a
    function of ``torch.nn.functional`` allocated before the step of the peak. Steps are found by
    annotations or by the optimizer's allocations. It reports 5% of the memory in tensors and
    more. Memory that grows with each step is a leak, which memory-leak reports."""

    id = "kept-references"
    title = "The peak holds outputs of the previous step"
    auxiliary_inputs = (SNAPSHOT,)
    references = (
        "https://pytorch.org/docs/stable/notes/faq.html#my-model-reports-cuda-runtime-error-2-out-of-memory",
    )

    min_memory_share = Threshold(0.05, "of the memory in tensors", CHOSEN)

    fix = (
        "Delete the outputs at the end of the step, before the next forward pass. Keep numbers "
        "instead of tensors with a graph."
    )
    code = (
        "total = torch.zeros((), device=device)   # once, before the loop\n"
        "# In each step, sum the loss without its graph.\n"
        "total += loss.detach()\n"
        "# At the end of the step, release what the next one makes anew.\n"
        "del output, loss"
    )
    verify = "Take a snapshot again: the peak holds nothing of earlier steps."
    falsified_by = "a state that the next step needs, such as a recurrent state"
    confidence = 0.8

    inference = {
        "code": "del output                    # at the end of the step\n"
        "with torch.inference_mode():  # no graph that holds what made it\n"
        "    output = model(batch)"
    }

    def check(self, a: Analysis) -> Outcomes:
        for peak in a.peak_memories:
            if not peak.growth.is_empty():
                continue
            for saving in find_savings(peak):
                if (
                    saving.name != "references"
                    or saving.bytes < self.min_memory_share * peak.allocated
                ):
                    continue
                yield Finding(
                    summary=(
                        f"{t.format_bytes(saving.bytes)} of the {t.format_bytes(peak.allocated)} "
                        "in tensors at the peak come from the forward pass of an earlier step."
                    ),
                    evidence=[
                        Evidence("memory of earlier steps", saving.bytes, "bytes"),
                        self.compare(
                            "memory of earlier steps, share of the memory in tensors",
                            saving.bytes / max(peak.allocated, 1),
                            "min_memory_share",
                        ),
                        Evidence("steps found by", peak.step_source),
                    ],
                    where=locate_allocation(saving),
                    impact=impact_memory(
                        saving.bytes, "memory of earlier steps at the peak of the snapshot"
                    ),
                    assumptions=[saving.assumes],
                )
                break

    @staticmethod
    def examples() -> Examples:
        b = snapshot_example(steps=6, kept_outputs=True, logits=96 << 20)
        no_history = snapshot_example(steps=12, history=False)
        return {
            "logits of the previous step": b,
            "nothing is kept": (snapshot_example(steps=12), "saving.name != 'references'"),
            "a leak": (snapshot_example(steps=12, leak=8 << 20), "not peak.growth.is_empty()"),
            "no history": (no_history, "not peak.growth.is_empty()"),
        }


_TAKE_SNAPSHOT = (
    "# once, before the loop:\n"
    "torch.cuda.memory._record_memory_history(max_entries=100_000)\n"
    "# some hundred steps later; open it at https://pytorch.org/memory_viz\n"
    "torch.cuda.memory._dump_snapshot('step_500.pickle')"
)

_COUNT_TENSORS = (
    "import collections, gc\n"
    "# every 100 steps: tensors by shape, of which one count grows\n"
    "alive = [x for x in gc.get_objects() if torch.is_tensor(x)]\n"
    "shapes = collections.Counter(tuple(x.shape) for x in alive)\n"
    "print(shapes.most_common(5))"
)


class MemoryLeak(Rule):
    """Memory in use at the end of a step grows from step to step and does not settle. Something
    keeps tensors alive (losses summed up with their graph, lists of outputs, hooks), and the run
    will run out of memory.

    The rule looks at GPU memory held by tensors, and at the resident memory of the process. The run
    after the warm-up is cut into eight parts. Their lowest values are compared, so that long
    sequences and caches that fill up do not count. Growth has to continue: at least six of seven
    parts rise, and the second half grows at half the first's rate or more. On the GPU, growth is
    reported if it is at least 100 MB, over at least fifty steps. Resident memory is reported from
    200 MB and 2% of the machine's memory. Shared pages in DataLoader workers and file caches of
    libraries also grow for a while.

    In a memory snapshot the rule looks for lines that leave something behind in four of five steps,
    held to the end of the history. It needs six full steps or more, without the first and the last
    two. Where memory ran out, 5% of the memory in tensors is enough. In three snapshots or more
    over a run it looks for lines that hold more in each."""

    id = "memory-leak"
    title = "Memory grows from step to step"
    verdict_role = "memory growth"
    reads_record = True
    auxiliary_inputs = (SNAPSHOT,)
    found_in = ("recorded/leak.slow", *public_traces("memory/h100_leak"))
    silent_in = (
        "recorded/anomaly.cured",
        "recorded/gc_pauses.cured",
        "recorded/threads.cured",
        *public_traces("memory/h100_full memory/h100_training"),
    )
    validation_note = (
        "a CPU recording whose loop keeps 6 MB per step, for resident memory. Silent without that. "
        "A snapshot of a loop that keeps 16 MiB per step, for GPU memory"
    )
    references = (
        "https://pytorch.org/docs/stable/notes/faq.html#my-model-reports-cuda-runtime-error-2-out-of-memory",
        "https://pytorch.org/docs/stable/torch_cuda_memory.html",
    )

    min_steps = Threshold(50, "steps after the warm-up", TRACEML)
    min_growth = Threshold(100e6, "bytes on the GPU", TRACEML)
    min_held = Threshold(
        0.05, "of the memory in tensors: enough in a snapshot that ends out of memory", CHOSEN
    )
    min_host_growth = Threshold(
        200e6, "bytes of resident memory: file caches of libraries also grow for a while", CHOSEN
    )
    min_host_share = Threshold(
        0.02, "of the host's memory: shared pages in workers also grow for a while", CHOSEN
    )

    fix = (
        "Find what keeps tensors alive: sums of results without .detach(), lists of outputs, "
        "hooks and caches that are never emptied, exceptions that hold frames. Two memory "
        "snapshots some hundred steps apart show which lines allocated it."
    )
    code = (
        "# total: a sum over steps. Add the loss without its graph.\n"
        "total += loss.detach()\n" + _TAKE_SNAPSHOT
    )
    verify = "Record as many steps again: memory at the end of a step stays the same."
    falsified_by = "a longer run in which memory settles"
    confidence = 0.8

    cases = {
        "of the process": {
            "fix": "Find what keeps tensors alive: sums of results without .detach(), lists of "
            "outputs, hooks and caches that are never emptied, exceptions that hold frames. Counts "
            "of tensors by shape show what becomes more.",
            "code": "# total: a sum over steps. Add the loss without its graph.\n"
            "total += loss.detach()\n" + _COUNT_TENSORS,
        },
        "of a snapshot": {
            "fix": "Release what that line makes: sums of results without .detach(), lists of "
            "outputs, hooks and caches that are never emptied.",
            "verify": "Take a snapshot some hundred steps later: the line holds as much as now.",
            "falsified_by": "a longer history that frees the line's blocks: a queue of fixed "
            "length, or garbage that Python has yet to collect",
            "code": "# kept is a list and total a sum: keep results without graphs.\n"
            "kept.append(output.detach().cpu())\n"
            "total += loss.detach()",
            "confidence": 0.75,
        },
    }
    inference = {
        "cases": {
            "of the process": {
                "code": "total += score.detach()         # not: total += score\n" + _COUNT_TENSORS
            },
            "of a snapshot": {
                "code": "kept.append(output.detach().cpu())   # not: kept.append(output)"
            },
        },
        "code": "total += score.detach()         # not: total += score\n" + _TAKE_SNAPSHOT,
    }

    def check(self, a: Analysis) -> Outcomes:
        in_snapshot = list(self._check_snapshot(a)) or list(self._check_series(a))
        yield from in_snapshot
        if a.run_steps is None:
            return
        run_steps = run_steps_of(a)
        counted = run_steps.after_warmup
        if int(counted.sum()) < self.min_steps:
            yield SkippedCheck(
                what="whether memory grows from step to step",
                why=f"{int(counted.sum())} steps after the warm-up are too few",
                record=f"a run of {2 * self.min_steps} steps or more",
            )
            return
        device = run_steps.column("allocated")[counted]
        growth, is_steady = measure_growth(device)
        if is_steady and growth >= self.min_growth and not in_snapshot:
            yield self._build_finding(a, "GPU memory in tensors", device, growth, gpu_capacity(a))
        host = _measure_resident(run_steps)
        growth, is_steady = measure_growth(host)
        total = run_steps.rank_record.rank.memory_bytes
        limit = max(self.min_host_growth, self.min_host_share * (total or 0))
        if is_steady and growth >= limit:
            finding = self._build_finding(
                a, "resident memory of the process", host, growth, total, "of the machine"
            )
            yield replace(finding, **self.case("of the process"))

    def _build_finding(
        self, a: Analysis, what: str, values: np.ndarray, growth: float, total: int | None,
        whose: str = "of the GPU",
    ) -> Finding:  # fmt: skip
        run_steps = run_steps_of(a)
        steps = int(run_steps.after_warmup.sum())
        rate = growth / steps
        now = last_known(values)
        left: int | None = None
        if total is not None and now is not None:
            left = max(0, round((total - now) / rate))
        until = f" At that rate it is full in {left:,} more steps." if left is not None else ""
        return Finding(
            title=f"{t.upper_first(what)} grows from step to step",
            summary=(
                f"{t.upper_first(what)} grew by {t.format_bytes(growth)} in {steps:,} steps, "
                f"{t.format_bytes(rate)} per step.{until}"
            ),
            evidence=[
                self.compare("growth of memory", growth, "min_growth", "bytes"),
                Evidence("growth of memory per step", rate, "bytes"),
                Evidence("memory at the end", now, "bytes"),
                Evidence(f"capacity {whose}", total, "bytes"),
                self.compare("steps after the warm-up", steps, "min_steps", "count"),
            ],
            impact=impact_risk(
                f"at this rate, the {t.format_bytes(left * rate)} left are full in {left:,} steps"
                if left is not None
                else "the run will run out of memory"
            ),
        )

    def _check_snapshot(self, a: Analysis) -> Iterator[Finding]:
        """Report lines that leave memory behind in each step, if that adds up to enough within the
        history, or memory ran out."""
        for peak in a.peak_memories:
            table = peak.growth
            if table.is_empty():
                continue
            rate = float(table["step_bytes"].sum())
            lines = table.select("file", "line", "function").rows()
            at_end = sum(peak.held_at_end(*line) for line in lines)
            before = sum(peak.held_at_moment(*line) for line in lines)
            limit = self.min_growth
            if peak.history.failed_event is not None:
                limit = min(limit, self.min_held * peak.allocated)
            if at_end < limit:
                continue
            row = table.row(0, named=True)
            steps = int(row["of"])
            place = line_name(row["file"], row["line"]) or "A line without a recorded stack"
            yield Finding(
                title="GPU memory in tensors grows from step to step",
                summary=(
                    f"{place} leaves {t.format_bytes(row['step_bytes'])} behind in "
                    f"{row['steps']:,} of the {steps:,} steps between the first and the last."
                    + (
                        f" With other lines it is {t.format_bytes(rate)} per step."
                        if table.height > 1
                        else ""
                    )
                    + (
                        f" In all, it held {t.format_bytes(before)} {_name_moment(peak)}, and "
                        f"{t.format_bytes(at_end)} at the end of the history."
                        if before != at_end
                        else f" At the end of the history {t.format_bytes(at_end)} are held."
                    )
                ),
                evidence=[
                    Evidence("memory left behind", rate, "bytes", per="step"),
                    self.compare(
                        "memory held at the end of the history", at_end, "min_growth", "bytes"
                    ),
                    Evidence(f"held {_name_moment(peak)}", before, "bytes"),
                    Evidence("steps that left something", int(row["steps"]), "count"),
                    Evidence("steps compared: not the first and the last", steps, "count"),
                    Evidence("steps found by", peak.step_source),
                ],
                where=[
                    Location(
                        file=r["file"], line=r["line"], function=r["function"], count=r["steps"]
                    )
                    for r in table.head(3).iter_rows(named=True)
                    if r["file"] is not None
                ],
                impact=impact_risk(f"{t.format_bytes(rate)} per step are never freed"),
                **self.case("of a snapshot"),
            )

    def _check_series(self, a: Analysis) -> Iterator[Finding]:
        """Find lines that hold more in each of several snapshots over a run."""
        if not a.snapshot_series:
            return
        peaks = fullest_devices(a.snapshot_series)
        table, unit = growing_lines(peaks)
        growth = int((table["last"] - table["first"]).sum())
        if growth < self.min_growth:
            return
        row = table.row(0, named=True)
        place = line_name(row["file"], row["line"]) or "A line without a recorded stack"
        rate = f"{t.format_bytes(row['rate'])} per {unit}"
        yield Finding(
            title="GPU memory in tensors grows over the run",
            summary=(
                f"{place} holds more in each of {len(peaks)} snapshots: {rate}, "
                f"{t.format_bytes(row['first'])} at first, {t.format_bytes(row['last'])} at last."
            ),
            evidence=[
                Evidence(f"growth per {unit}", float(table["rate"].sum()), "bytes"),
                self.compare("growth over the snapshots", growth, "min_growth", "bytes"),
                Evidence("snapshots compared", len(peaks), "count"),
            ],
            where=[
                Location(file=r["file"], line=r["line"], function=r["function"], count=r["blocks"])
                for r in table.head(3).iter_rows(named=True)
                if r["file"] is not None
            ],
            impact=impact_risk(f"{rate} are never freed"),
            **self.case("of a snapshot"),
        )

    @staticmethod
    def examples() -> Examples:
        """Build runs that leak 2 MB per step on the GPU, or 5 MB per step on the host."""
        rng = np.random.default_rng(0).integers(0, 400, 1000)
        return {
            "on the GPU": _build_run(lambda n: 10e9 + 2e6 * n),
            "on the host, in windows of the profiler": (
                _build_run(lambda _: 10e9, host=lambda n: 4e9 + 5e8 * (n // 20), window_every=20),
                "is_steady",
            ),
            "on the host": _build_run(lambda _: 5e9, host=lambda n: 4e9 + 5e6 * n),
            "in a snapshot": snapshot_example(steps=12, leak=16 << 20),
            "steady": (_build_run(lambda _: 10e9), "is_steady"),
            "sequences of random length": (_build_run(lambda n: 10e9 + 1e7 * rng[n]), "is_steady"),
            "a cache that fills up": (
                _build_run(lambda n: 10e9 + 5e8 * (1 - 0.97**n)),
                "is_steady",
            ),
            "a little on the host": (
                _build_run(lambda _: 10e9, host=lambda n: 4e9 + 1e5 * n),
                "growth >= limit",
            ),
            "a short run": (
                _build_run(lambda n: 10e9 + 2e6 * n, steps=40),
                "int(counted.sum()) < self.min_steps",
            ),
            "a snapshot of steps that hold nothing": (
                snapshot_example(steps=12),
                "a.run_steps is None",
            ),
        }


def _name_moment(peak: PeakMemory) -> str:
    return "at the peak" if peak.history.failed_event is None else "when memory ran out"


def _measure_resident(run_steps: RunSteps) -> Floats:
    """Return resident memory after the warm-up, from steps and telemetry, in order of time. Growth
    while the recorder profiles and writes a trace is due to the recorder, and left out."""
    start, end = run_steps.span
    samples = [(s.t, s.rss) for s in run_steps.steps if s.rss is not None and s.t >= start]
    samples += [(times, host.rss) for times, host in run_steps.hosts if host.rss is not None]
    samples = sorted(sample for sample in samples if sample[0] <= end)
    if not samples:
        return np.zeros(0)
    times, rss = (np.array(column, dtype=np.float64) for column in zip(*samples, strict=True))
    windows = [
        (step.t, step.t + step.dur)
        for step in run_steps.steps
        if step.window is not None or step.exporting
    ]
    in_window = covered_length(times[:-1], times[1:], union(*np.array(windows or [(0, 0)]).T)) > 0
    result: Floats = rss[0] + np.append(0.0, np.cumsum(np.where(in_window, 0.0, np.diff(rss))))
    return result


def _build_run(
    device: object, *, host: object = None, steps: int = 300, window_every: int = 10_000
) -> TraceBuilder:
    from advisor.core.run_directory import RecordedDevice

    assert callable(device)
    b = TraceBuilder()
    r = b.record_of_run(devices=[RecordedDevice(total_bytes=80 * 10**9)], memory_bytes=64 * 10**9)
    for n in range(steps):
        fields = {"allocated": round(device(n))}
        if callable(host) and n % 5 == 0:
            fields["rss"] = round(host(n))
        r.step(10, fields=fields, window=0 if (n + 2) % window_every < 3 else None)
    return b
