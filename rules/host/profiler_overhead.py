"""The profiler itself took a noticeable part of the window."""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar

import numpy as np
import polars as pl

from advisor.core import text as t
from advisor.core.finding import Evidence, Finding, Impact, Outcome, Rule, Threshold
from advisor.core.intervals import intersect, union
from advisor.measure import Analysis
from advisor.rules.elsewhere import in_any_language
from advisor.rules.sources import OURS
from advisor.testing import TraceBuilder


class ProfilerOverhead(Rule):
    """The recording itself took a noticeable part of the analysed window, so host times are longer
    than without the profiler and idle gaps are wider: read gains in host time as upper bounds.

    Kineto writes what CUPTI and the profiler cost as rows of category ``overhead``: buffer requests
    and flushes, instrumentation of kernels, loading of device code. That loading (``Lazy Function
    Loading``, ``Runtime Triggered Module Loading``) is not the profiler's doing but that of a
    window that begins too early: after some warm-up steps it is gone. The cost of the Python tracer
    and of each recorded call is not in these rows, so this is a lower bound.

    A note, not a finding: there is nothing to win by it in an unprofiled run.
    """

    id = "profiler-overhead"
    title = "Profiling took a noticeable part of the window"
    category = "host"
    found_in = ("traces/b200_eager",)
    silent_in = (
        "traces/a100_train_6steps",
        "traces/v100_train_copy_heavy",
        "traces/two_ranks_rank0",
        "traces/h100_bert_small_inference",
    )
    validated_on = "b200_eager: 2 % of the window in overhead rows; no overhead rows elsewhere"
    references = ("https://pytorch.org/docs/stable/profiler.html#torch.profiler.schedule",)

    min_share = Threshold(0.02, "of the window", OURS)

    fix = (
        "Let the profiler warm up before it records, record fewer things at a time (stacks "
        "cost most), and use CUDA_MODULE_LOADING=EAGER where code loading shows."
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

    elsewhere: ClassVar = in_any_language(
        "Record less: fewer things at a time and a shorter span, after the program has warmed up."
    )

    def check(self, a: Analysis) -> Iterator[Outcome]:
        """Add up the overhead rows."""
        cpu = a.trace.cpu
        rows = np.flatnonzero((cpu["kind"] == "overhead").to_numpy())
        if not len(rows) or not a.span_ns:
            return
        ts = cpu["ts"].to_numpy()[rows]
        end = ts + cpu["dur"].to_numpy()[rows]
        spent = intersect(union(ts, end), a.spans)
        share = spent.total / a.span_ns
        if share < self.min_share:
            return
        blamed = a.gaps.filter(pl.col("cause") == "profiler")["dur"].sum() if a.gaps.height else 0
        by_name = (
            pl.DataFrame({"name": cpu["name"].gather(rows), "dur": cpu["dur"].gather(rows)})
            .group_by("name")
            .agg(pl.col("dur").sum())
            .sort("dur", descending=True)
        )
        parts = [f"{name} {t.format_duration(ns)}" for name, ns in by_name.head(3).iter_rows()]
        yield Finding(
            summary=(
                f"{share:.0%} of the window the profiler or the loading of device code was at "
                "work; host times and idle gaps are that much longer than in an unprofiled run."
            ),
            evidence=[
                Evidence("overhead in the window", spent.total, "ns"),
                Evidence("share of the window", share, "share", *self.limit("min_share")),
                Evidence("device idle blamed on it", int(blamed), "ns"),
                Evidence("largest", "; ".join(parts)),
            ],
            impact=Impact(currency="unpriced", reason="it costs the recording, not the training"),
            informational=True,
        )

    @staticmethod
    def fires_on() -> dict[str, TraceBuilder]:
        """Buffers are flushed in every step."""
        b = TraceBuilder()
        for _ in range(4):
            with b.step():
                b.run("aten::mm", "ampere_sgemm_128x64_nn", 1000)
                b.overhead("Buffer Flush", 200)
                b.sync()
        return {"a buffer flush a step": b}

    @staticmethod
    def silent_on() -> dict[str, tuple[TraceBuilder, str]]:
        """A short one, and one outside the steps."""
        short, outside = TraceBuilder(), TraceBuilder()
        outside.overhead("Activity Buffer Request", 9000)
        for _ in range(4):
            for b in (short, outside):
                with b.step():
                    b.run("aten::mm", "ampere_sgemm_128x64_nn", 3000)
                    b.sync()
        short.overhead("Activity Buffer Request", 5)
        return {
            "a short one": (short, "share < self.min_share"),
            "before the steps": (outside, "share < self.min_share"),
        }
