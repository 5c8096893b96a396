"""Each step begins with host work before the first launch, and the GPU waits for it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar

import numpy as np
import polars as pl

from advisor.core import text as t
from advisor.core.finding import (
    Edit,
    Evidence,
    Finding,
    Outcome,
    Rule,
    Select,
    SkippedCheck,
    Threshold,
)
from advisor.core.intervals import covered_length, intersect, union
from advisor.measure import Analysis
from advisor.measure.steps.instants import step_starts
from advisor.rules.common import column, figure, of_step, places, rows
from advisor.rules.sources import REAL_HOST, SILENT_TRACES, TENSORBOARD, XPROF
from advisor.testing import TraceBuilder

CAUSES = ("dispatch", "python", "unknown")


class CpuBeforeFirstKernel(Rule):
    """Each step begins with host work (preparing, collating, augmenting or tokenizing a batch,
    logging) before the first GPU work is launched, and the GPU idles until then.

    Counted is GPU idle time between the start of a step and the first GPU work launched in it,
    while the launching thread is in operators, in Python or in nothing that was recorded. A wait
    for the DataLoader, for a copy or for the GPU is not counted. When the host is ahead, the GPU
    still works on the previous step, and the same host work costs nothing.

    It has to happen in most steps and last a while: any step takes a few hundred microseconds to
    reach its first launch.
    """

    id = "cpu-before-first-kernel"
    title = "Host work delays the first launch of each step"
    category = "host"
    of_python = True
    silent_in = SILENT_TRACES
    references = ("https://pytorch.org/docs/stable/data.html#working-with-collate-fn",)

    min_share = Threshold(
        0.05, "of the step, as for the similar wait for a loader", TENSORBOARD, XPROF
    )
    min_ms = Threshold(
        0.5, "ms per step: any step needs some 0.1 to 0.3 ms to reach its first launch", REAL_HOST
    )

    code = (
        "def collate(samples):            # runs in a worker, one step ahead\n"
        "    return prepare(torch.utils.data.default_collate(samples))\n"
        "loader = DataLoader(\n"
        "    dataset, batch_size=..., collate_fn=collate, num_workers=4,\n"
        "    persistent_workers=True, pin_memory=True)"
    )
    verify = "Profile again: the first launch follows right after the start of the step."
    falsified_by = "the same step time when the loop reuses one prepared batch"
    assumptions = ("the work does not depend on the result of the previous step",)

    fix = (
        "Prepare the batch before the step begins: in the Dataset or collate_fn of a DataLoader "
        "with workers, or on the GPU (augmentation, normalization, masks, positions). Log and "
        "update metrics after the launches of the next step."
    )
    confidence = 0.75
    cases: ClassVar = {
        "without stacks": {
            "fix": f"{fix} Record with_stack=True to see which lines do it.",
            "confidence": 0.65,
        }
    }

    def check(self, a: Analysis) -> Iterator[Outcome]:
        """Sum the idle time at the start of each step."""
        lead = step_starts(a)
        if not len(lead):
            return
        gaps = a.gaps.filter(pl.col("cause").is_in(CAUSES))
        ts, dur = column(gaps, "ts"), column(gaps, "dur")
        idle = intersect(union(ts, ts + dur), lead)
        used = a.steps.used
        by_step = covered_length(used["ts"].to_numpy(), used["end"].to_numpy(), idle)
        share = idle.total / a.span_ns
        if share < self.min_share or np.median(by_step) < self.min_ms * 1e6:
            return
        if a.step_count < 2:
            yield SkippedCheck(
                what=f"whether {t.format_duration(idle.total)} of host work before the first "
                "launch recurs",
                why="the trace has a single step",
                record="schedule(wait=1, warmup=2, active=5) and profiler.step() in the loop",
            )
            return
        cost = covered_length(ts, ts + dur, lead)
        by_cause = {
            cause: int(cost[(gaps["cause"] == cause).to_numpy()].sum()) / a.step_count
            for cause in CAUSES
        }
        stacks = bool((a.trace.cpu["kind"] == "python").any())
        python = t.format_duration(by_cause["python"] + by_cause["unknown"])
        yield Finding(
            summary=(
                f"The GPU idles for {of_step(a, idle.total)} before the first launch, "
                f"{t.format_duration(by_cause['dispatch'])} of it in operators and {python} in "
                + ("Python." if stacks else "Python or other code outside operators.")
            ),
            evidence=[
                figure(a, "GPU idle before the first launch", idle.total),
                Evidence("share", share, "share", *self.limit("min_share"), per=a.per),
                Evidence(
                    "median of the steps",
                    float(np.median(by_step)),
                    "ns",
                    *self.limit("min_ms", 1e6),
                ),
                Evidence("of it in operators", by_cause["dispatch"], "ns"),
                Evidence("of it in Python", by_cause["python"] if stacks else None, "ns"),
                Evidence("of it unexplained", by_cause["unknown"], "ns"),
            ],
            where=places(a, rows(gaps["host"]), cost, ts=ts, dur=dur, instance=column(gaps, "gap")),
            edits=[Edit(op="remove", select=Select(on="gap", cause=CAUSES, at="step_start"))],
            confidence_notes=[]
            if stacks
            else ["without stacks, what runs outside operators is unknown"],
            **({} if stacks else self.case("without stacks")),
        )

    @staticmethod
    def fires_on() -> dict[str, TraceBuilder]:
        """Preparing a batch on the training thread, in Python and in operators."""
        python, operators = TraceBuilder(), TraceBuilder()
        for _ in range(4):
            with python.step():
                with python.python("train.py(12): make_batch"):
                    python.host(3000)
                _train(python)
            with operators.step():
                with operators.op("aten::stack", host_us=1500):
                    pass
                with operators.op("aten::normal_", host_us=1500):
                    pass
                _train(operators)
        return {"Python before the first launch": python, "operators on the CPU": operators}

    @staticmethod
    def silent_on() -> dict[str, tuple[TraceBuilder, str]]:
        """The host is ahead; a loader; one slow first step; an ordinary start of a step."""
        ahead, loader, once, ordinary = (TraceBuilder() for _ in range(4))
        for number in range(4):
            with ahead.step():
                ahead.host(3000)
                ahead.run("aten::mm", "ampere_sgemm_128x64_nn", 6000)
            with loader.step():
                loader.loader_wait(3000)
                _train(loader)
            with once.step():
                once.host(2200 if number == 0 else 100)
                _train(once)
            with ordinary.step():
                ordinary.host(400)
                _train(ordinary)
        return {
            "the host is ahead": (ahead, "share < self.min_share"),
            "waiting for the loader": (loader, "share < self.min_share"),
            "one slow step": (once, "min_ms"),
            "an ordinary start": (ordinary, "min_ms"),
        }


def _train(b: TraceBuilder) -> None:
    b.run("aten::mm", "ampere_sgemm_128x64_nn", 500, times=10)
    b.sync()
