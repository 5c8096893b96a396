"""Notes on the cost of the profiler itself, which do not affect training."""

from collections.abc import Mapping
from typing import Any, ClassVar

import numpy as np
import polars as pl

from advisor.core import text as t
from advisor.core.finding import Finding, Outcomes, impact_without_gain
from advisor.core.intervals import intersect, union
from advisor.core.rule import Citation, Evidence, Rule, Threshold
from advisor.measure import Analysis
from advisor.rules.support.citations import CHOSEN, TRACEML, TRIED_ON_TRACES, public_traces
from advisor.rules.support.common import run_steps_of, steps_seen
from advisor.rules.support.framework_advice import in_any_language
from advisor.testing import Examples, TraceBuilder

NSYS = "recorded by Nsight Systems"
RECORDED = "recorded by advisor"
_NO_GAIN = "it slows the recording, not the program"


class SlowProfiledSteps(Rule):
    """Steps in the profiled window take longer than those before and after it. Host times of the
    trace are too long by that much, most of all if operators are small. GPU times are not.

    The rule compares the medians of the steps that the window kept and of the unprofiled steps
    within 20 steps of them. So drifts in speed during a run do not matter. The rule fires from 10%
    on, unless unprofiled steps vary as much. At least half of the excess must remain in each window
    when lower quartiles are compared. The same holds for the median of the window's steps and the
    medians of as many steps right before and right after."""

    id = "slow-profiled-steps"
    title = "Profiled steps take longer than the others"
    reads_record = True
    found_in = ("recorded/anomaly.cured", "recorded/gc_pauses.cured")
    silent_in = ("recorded/leak.slow",)
    validation_note = "CPU recordings: windows whose steps are longer than those around them"
    sources = (
        Citation("unprofiled steps within 20 steps", "advisor/measure/steps/run_steps.py"),
        Citation("minimum part of the excess, half", "advisor/measure/steps/run_steps.py"),
    )
    references = ("https://github.com/pytorch/pytorch/issues/144455",)

    min_effect = Threshold(0.10, "longer step in the window", TRACEML)
    min_steps = Threshold(10, "unprofiled steps", CHOSEN)

    fix = (
        "Record less at a time: no stacks and no memory events unless you need them. Trust GPU "
        "times, and gains from them, more than host times."
    )
    verify = "Record again: the medians of profiled and unprofiled steps come closer."
    falsified_by = "steps before and after the window that take as long"
    confidence = 0.9
    cases: ClassVar[Mapping[str, Mapping[str, str]]] = {
        "on the CPU": {
            "fix": "Record less at a time: no stacks and no memory events unless you need them."
        },
        "without stacks and memory events": {
            "fix": "Keep this recording: stacks and memory events, which cost most, were off. "
            "Gains are of the unprofiled step."
        },
    }

    def check(self, a: Analysis) -> Outcomes:
        run_steps = run_steps_of(a)
        active = run_steps.active
        overhead = run_steps.profiler_overhead(active)
        if overhead is None or overhead < self.min_effect or run_steps.count < self.min_steps:
            return
        around, profiled = run_steps.median_around(active), run_steps.median_of(active)
        assert around is not None and profiled is not None
        is_minimal = a.trace.memory.is_empty() and not (a.trace.cpu["kind"] == "python").any()
        case = "without stacks and memory events" if is_minimal and a.trace.cpu.height else ""
        case = case or ("on the CPU" if a.trains_on_host else "")
        yield Finding(
            summary=(
                f"By the recorder's clock a step takes {t.format_duration(profiled)} while it is "
                f"profiled, and {t.format_duration(around)} around the window ({overhead:+.0%}; "
                "both are medians). Host times "
                + ("" if a.trains_on_host else "and idle time ")
                + "in this report are longer than in an unprofiled step."
            ),
            evidence=[
                Evidence("median step around the window", around, "ns"),
                Evidence("median profiled step", profiled, "ns"),
                self.compare("profiled step longer by", overhead, "min_effect"),
                Evidence("profiled steps", int(run_steps.profiled.sum()), "count"),
                steps_seen(run_steps),
            ],
            impact=impact_without_gain(_NO_GAIN),
            informational=True,
            **(self.case(case) if case else {}),
        )

    @staticmethod
    def examples() -> Examples:
        return {
            "50% longer": _build_run(15),
            "a slow stretch begins with it": (_build_run(15, 16), "overhead is None"),
            "hardly longer": (_build_run(10.5), "min_effect"),
            "no window": (_build_run(None), "overhead is None"),
        }


class ProfilerEvents(Rule):
    """The recording itself took a notable part of the analyzed window, so host times are longer
    than without the profiler and idle gaps are wider. Read gains in host time as upper bounds.

    Kineto writes the cost of CUPTI and the profiler as rows of category ``overhead``: buffer
    requests and flushes, instrumentation of kernels, loading of device code. The profiler does not
    cause the loading (``Lazy Function Loading``, ``Runtime Triggered Module Loading``): the window
    begins too early. Loading ends after some warm-up steps. The cost of the Python tracer and of
    each recorded call is not in these rows, so this is a lower bound.

    The result is a note, not a finding: an unprofiled run gains nothing from it."""

    id = "profiler-events"
    title = "Profiling took a notable part of the window"
    found_in = ("traces/b200_eager",)
    silent_in = public_traces(
        "a100_train_6steps v100_train_copy_heavy two_ranks_rank0 h100_bert_small_inference"
    )
    validation_note = (
        "b200_eager: the profiler asks for memory in the engine's step, before its first kernel"
    )
    references = ("https://pytorch.org/docs/stable/profiler.html#torch.profiler.schedule",)

    min_share = Threshold(0.02, "of the window", TRIED_ON_TRACES)

    fix = (
        "Let the profiler warm up before it records, and record fewer things at a time (stacks "
        "cost most). Set CUDA_MODULE_LOADING=EAGER if code loading appears."
    )
    code = (
        "with profile(schedule=schedule(skip_first=10, wait=1, warmup=3, active=5),\n"
        "             with_stack=False, record_shapes=True) as profiler:\n"
        "    for batch in loader:\n"
        "        train_step(batch)\n"
        "        profiler.step()"
    )
    verify = "Profile again: this note is gone."
    falsified_by = "the same step time with and without the profiler"
    confidence = 0.9

    cases: ClassVar[Mapping[str, Mapping[str, Any]]] = {
        NSYS: {
            "fix": "Record fewer things at a time and a shorter span, after the program has warmed "
            "up. Samples of the CPU cost most.",
            "code": "nsys profile --trace=cuda,nvtx --sample=none --cpuctxsw=none \\\n"
            "  --delay=30 --duration=10 python program.py",
        },
        RECORDED: {
            "fix": "Keep this recording: gains are of the unprofiled step. For a window with less "
            "overhead, let the profiler warm up for longer.",
            "code": "advisor record --warmup 5 train.py",
        },
    }
    framework_advice = in_any_language(
        "Record fewer things at a time and a shorter span, after the program has warmed up."
    )

    def check(self, a: Analysis) -> Outcomes:
        cpu = a.trace.cpu
        rows = np.flatnonzero((cpu["kind"] == "overhead").to_numpy())
        if not len(rows) or not a.span_ns:
            return
        ts = cpu["ts"].to_numpy()[rows]
        end = ts + cpu["dur"].to_numpy()[rows]
        overhead = intersect(union(ts, end), a.spans)
        share = overhead.total / a.span_ns
        if share < self.min_share:
            return
        idle = a.gaps.filter(pl.col("cause") == "profiler")["dur"].sum() if a.gaps.height else 0
        by_name = (
            pl.DataFrame({"name": cpu["name"].gather(rows), "dur": cpu["dur"].gather(rows)})
            .group_by("name")
            .agg(pl.col("dur").sum())
            .sort("dur", descending=True)
        )
        largest = "; ".join(
            f"{name} {t.format_duration(ns)}" for name, ns in by_name.head(3).iter_rows()
        )
        yield Finding(
            summary=(
                f"The profiler, or loading of device code, took {share:.0%} of the window. Host "
                "times and idle gaps are that much longer than in an unprofiled run."
            ),
            evidence=[
                Evidence("overhead in the window", overhead.total, "ns"),
                self.compare("overhead, share of the window", share, "min_share"),
                Evidence("GPU idle because of it", int(idle), "ns"),
                Evidence("largest part of the overhead", largest),
            ],
            impact=impact_without_gain(_NO_GAIN),
            informational=True,
            **self._case(a),
        )

    def _case(self, a: Analysis) -> dict[str, Any]:
        if a.trace.meta.format == "nsys":
            return self.case(NSYS)
        return self.case(RECORDED) if a.run_steps is not None else {}

    @staticmethod
    def examples() -> Examples:
        flushed, short, outside = TraceBuilder(), TraceBuilder(), TraceBuilder()
        for _ in flushed.steps():
            flushed.product(1000)
            flushed.overhead("Buffer Flush", 200)
            flushed.sync()
        outside.overhead("Activity Buffer Request", 9000)
        for b in (short, outside):
            for _ in b.steps():
                b.product(3000, wait=True)
        short.overhead("Activity Buffer Request", 5)
        return {
            "a buffer flush in each step": flushed,
            "a short one": (short, "share < self.min_share"),
            "before the steps": (outside, "share < self.min_share"),
        }


def _build_run(profiled: float | None, later: float = 10) -> TraceBuilder:
    b = TraceBuilder()
    r = b.record_of_run()
    r.steps(30, 10)
    if profiled is not None:
        r.steps(5, profiled, window=0)
    r.steps(8, later)
    r.steps(22, 10)
    return b
