"""Memory that each step of a CPU program returns to the system and takes again."""

import numpy as np

from advisor.core import text as t
from advisor.core.finding import WHOLE_STEP, Finding, Outcomes
from advisor.core.rule import Evidence, Factor, Rule, Threshold
from advisor.core.run_directory import HostSample
from advisor.measure import Analysis
from advisor.rules.support.citations import CHOSEN, CURED_RECORDINGS
from advisor.rules.support.common import impact_per_step, run_steps_of
from advisor.testing import Examples, TraceBuilder

SETTING = {"MALLOC_MMAP_THRESHOLD_", "MALLOC_TRIM_THRESHOLD_"}
"""Variables that let glibc keep freed memory."""
PAGE_BYTES = 4096
"""Size of a page that a fault maps, bytes."""


class PageFaults(Rule):
    """Each step on a CPU touches thousands of pages of memory for the first time. The C library
    returns the memory of large freed tensors to the system, and takes it again for the next
    tensors. The system clears and maps each page at its first use. The process could keep its
    memory instead.

    The recorder counts the page faults of the process in the steps before the first profiled
    window. The window itself can end them: freed blocks of the profiler raise the limits of the C
    library. Then the steps before the window are the run's own steps, and the difference to those
    after it is the gain. Else the gain is the number of page faults times the time of one, which
    the recorder measured on the machine. Without that, it is the usual time.

    Memory that is filled for the first time causes page faults too, which no setting saves. So the
    rule is silent if the process grew by more than a share of the pages. If later
    steps have few page faults, and the first ones were not longer by their time, it is silent too.
    The C library has then raised its limits by itself."""

    id = "page-faults"
    title = "Each step returns memory to the system and takes it again"
    host_check = "page faults"
    subject = WHOLE_STEP
    knobs = ("keep-freed-memory",)
    reads_record = True
    found_in = ("recorded/page_faults.slow", "recorded/transcribe.slow")
    silent_in = CURED_RECORDINGS
    validation_note = (
        "CPU recordings on two cores, torch 2.13: a U-Net (10.8 ms per step predicted, 59.7 to "
        "48.2 ms measured). Transcription: 11.6 ms predicted, 51.7 to 38.7 ms measured"
    )
    references = (
        "https://docs.pytorch.org/tutorials/recipes/recipes/tuning_guide.html",
        "https://man7.org/linux/man-pages/man3/mallopt.3.html",
    )

    min_share = Threshold(0.08, "of the step in page faults", CHOSEN)
    max_growth = Threshold(0.2, "of the counted pages by which the process grew", CHOSEN)
    min_counted_ms = Threshold(100.0, "ms of steps in which page faults were counted", CHOSEN)
    fault_us = Factor(1.3, "µs per page fault", CHOSEN)
    best_fault_us = Factor(2.2, "µs per page fault, at best", CHOSEN)
    worst_fault_us = Factor(0.5, "µs per page fault, at worst", CHOSEN)
    best_x = Factor(1.2, "times what was measured, at best", CHOSEN)
    worst_x = Factor(0.6, "times what was measured, at worst", CHOSEN)

    fix = (
        "Let the C library keep freed memory: raise glibc's trim and mmap thresholds, or load "
        "tcmalloc or jemalloc. Raising the trim threshold alone makes mappings of large tensors "
        "more frequent."
    )
    code = (
        "MALLOC_TRIM_THRESHOLD_=1073741824 MALLOC_MMAP_THRESHOLD_=33554432 \\\n"
        "    python PROGRAM.py\n"
        "# or: LD_PRELOAD=/path/to/libtcmalloc.so.4 python PROGRAM.py"
    )
    verify = "Time the steps without a profiler, with and without the setting."
    falsified_by = "the same step time with both limits set"
    assumptions = ("the memory is of tensors that each step creates and frees",)
    confidence = 0.75

    def check(self, a: Analysis) -> Outcomes:
        run_steps = run_steps_of(a)
        faults = run_steps.page_faults
        if a.device_id is not None or faults is None or not run_steps.count:
            return
        if run_steps.rank_record.rank.env.keys() >= SETTING:
            return
        lengths = run_steps.dur[faults.counted]
        if float(lengths.sum()) < self.min_counted_ms * 1e6:
            return
        saved, per_step = run_steps.saved_by_window, faults.per_step
        if saved is None and faults.after is not None:
            per_step = min(per_step, faults.after)  # the steps after the window are the run's own
        step = float(np.median(lengths))
        each_ns = faults.fault_ns or self.fault_us * 1e3
        fault_ns = per_step * each_ns
        if fault_ns < self.min_share * step:
            return
        counted_bytes = faults.per_step * len(lengths) * PAGE_BYTES
        if faults.growth > self.max_growth * counted_bytes:
            return
        gain, method = saved, "median step before the window less the median after it"
        if gain is None:
            time = "usual" if faults.fault_ns is None else "measured"
            gain, method = fault_ns, f"page faults times their {time} time"
        low, high = gain * self.worst_x, gain * self.best_x
        if saved is None and faults.fault_ns is None:
            low, high = (per_step * us * 1e3 for us in (self.worst_fault_us, self.best_fault_us))
        yield Finding(
            summary=_describe(per_step, step, fault_ns, saved),
            evidence=[
                Evidence("time of page faults", gain, "ns", per="step"),
                Evidence("page faults per step before the profiled window", faults.per_step),
                Evidence("page faults per step after it", faults.after),
                *([] if faults.fault_ns is None else [Evidence("page fault", each_ns, "ns")]),
                Evidence("step before the profiled window, median", step, "ns"),
                self.compare("time of page faults, share", fault_ns / step, "min_share"),
                self.compare(
                    "growth of the process over the counted pages",
                    faults.growth / counted_bytes,
                    "max_growth",
                ),
            ],
            impact=impact_per_step(a, gain, low=low, high=high, method=method),
        )

    @staticmethod
    def examples() -> Examples:
        return {
            "ended by the window": _build_run(faults=25_000, after_ms=55),
            "large tensors that come and go": _build_run(faults=25_000),
            "measured page faults": _build_run(faults=5_000, fault_ns=2600),
            "ended, but steps as long": (_build_run(faults=25_000, after_ms=79), "min_share"),
            "few page faults": (_build_run(faults=500), "min_share"),
            "short page faults": (_build_run(faults=5_000, fault_ns=900), "min_share"),
            "memory that grows": (_build_run(faults=25_000, growth=400 << 20), "max_growth"),
            "one short step": (_build_run(faults=25_000, last=1), "min_counted_ms"),
            "on a GPU": (_build_run(faults=25_000, gpu="A100"), "a.device_id is not None"),
            "with the setting": (_build_run(faults=25_000, env=True), "SETTING"),
            "not counted": (_build_run(faults=None), "faults is None"),
        }


def _describe(per_step: float, step: float, ns: float, saved: float | None) -> str:
    size = t.format_bytes(per_step * PAGE_BYTES)
    if saved is None:
        return (
            f"{per_step:,.0f} page faults per step take about {t.format_duration(ns)} of "
            f"{t.format_duration(step)}: each step takes {size} from the system again."
        )
    return (
        f"{per_step:,.0f} page faults per step take {t.format_duration(saved)} of "
        f"{t.format_duration(step)}: each step takes {size} from the system again. The profiled "
        "window ended them, because the C library kept the memory from then on."
    )


def _build_run(
    *,
    faults: int | None,
    ms: float = 80,
    after_ms: float | None = None,
    last: int = 9,
    growth: int = 0,
    fault_ns: float | None = None,
    gpu: str | None = None,
    env: bool = False,
) -> TraceBuilder:
    """Build a run with page faults in each step from 1 to ``last``, before a window. It ends them,
    if the steps after it have another length."""
    b = TraceBuilder(gpu=gpu)
    for _ in b.steps():
        b.compute("aten::conv2d", 1000 * ms, [[8, 3, 64, 64], [16, 3, 3, 3]])
    run = b.record_of_run()
    run.rank.env = dict.fromkeys(SETTING, "1073741824") if env else {}
    run.steps(10, ms)
    counts = (
        {}
        if faults is None
        else {
            "fault_steps": [1, last],
            "minor_faults": faults * last,
            "memory_growth": growth,
            "fault_ns": fault_ns,
        }
    )
    run.event("window", window=0, reason="schedule", state="open", steps=[10], **counts)
    run.steps(3, ms, window=0)
    run.steps(37, after_ms or ms)
    per_step = 100 if after_ms else faults or 0
    run.watch(host=lambda share: HostSample(minor_faults=round(50 * share * per_step)))
    return b
