"""Collectives issued so that no compute can overlap them."""

from functools import partial

import numpy as np
import polars as pl
from numpy.typing import NDArray

from advisor.core import text as t
from advisor.core.finding import Edit, Finding, Outcomes, Select
from advisor.core.rule import FrameworkAdvice, Rule, Threshold
from advisor.core.trace import JAX, TENSORFLOW
from advisor.measure import Analysis
from advisor.measure.device.copies import compute_stream
from advisor.rules.support.citations import SILENT_TRACES, TRACELENS, TRIED_ON_TRACES, XPROF_LAUNCH
from advisor.rules.support.common import (
    amount_per_step,
    device_places,
    example_steps,
    int_column,
    of_step,
    row_numbers,
)
from advisor.rules.support.framework_advice import (
    FLAGS,
    NO_GRADIENT,
    OVERLAP_FLAGS,
    in_any_language,
)
from advisor.testing import Examples, TraceBuilder

READY_NS = 20_000
"""Minimum time, ns, between a launch's return and the moment at which its kernel counts as ready.
Launches take 5 to 10 µs to reach an idle device."""


class PoorOverlap(Rule):
    """Collectives cannot overlap with compute because of how they are issued. They run on the
    stream that computes, or the compute stream waits for them before any other work is launched.

    Where it applies, this is the cause of exposed communication, so the two findings claim the same
    time. The rule looks at collectives with exposed time. *On the compute stream*: nothing launched
    later can start before they end (tensor parallelism with custom all-reduce kernels,
    `multimem_*`). *Waited for at once*: the next compute kernel was launched early enough, but
    started only after the collective. A synchronous collective or a ``work.wait()`` in the next
    line does that. (Calls of ``cudaStreamWaitEvent`` do not show it: every collective is followed
    by some, and which stream they hold is not recorded.) When the kernel was launched too late, the
    host is the bottleneck and not the wait. The last bucket of DistributedDataParallel is always
    waited for, so most of the exposed time must be of these two kinds.

    Where compute depends on the result at once, as in tensor parallelism, only splitting the work
    lets one piece communicate while the next computes."""

    id = "poor-overlap"
    title = "Collectives block the compute stream, so nothing overlaps them"
    found_in = ("traces/dlrm_8ranks",)
    knobs = ("ddp-bucket-size", "ddp-bucket-view")
    alternatives = "exposed communication"
    silent_in = SILENT_TRACES
    validation_note = (
        "DLRM on 8 V100: an all-reduce of 0.8 ms that runs alone; the next kernel is launched "
        "meanwhile, and starts when it ends"
    )
    references = (
        "https://pytorch.org/docs/stable/distributed.html#synchronous-and-asynchronous-collective-operations",
        "https://pytorch.org/docs/stable/notes/ddp.html",
    )

    max_overlap = Threshold(0.70, "share of communication under compute", TRACELENS)
    min_share = Threshold(0.03, "of the step, exposed", XPROF_LAUNCH)
    min_explained = Threshold(
        0.5, "share of exposed time that the two kinds must make up", TRIED_ON_TRACES
    )

    fix = (
        "Start each collective with async_op=True as soon as its input is ready. Launch the "
        "compute that does not need the result, and wait just before using it. Where compute needs "
        "the result at once, split the batch or the sequence in two: one half computes while the "
        "other communicates."
    )
    code = (
        f"{NO_GRADIENT}work = dist.all_to_all_single(out, inp, async_op=True)\n"
        "y = independent_part(x)      # launched before the wait: overlaps\n"
        "work.wait()                  # only the stream waits, not the host\n"
        "z = needs(out, y)"
    )
    verify = "Profile again: the share of communication under compute rises."
    falsified_by = "a result that every following kernel reads"
    assumptions = ("some compute does not depend on the result",)
    confidence = 0.7

    framework_advice = {
        **in_any_language(
            "Issue collectives on a stream of their own, so that kernels which do not need their "
            "result can run meanwhile."
        ),
        TENSORFLOW: FrameworkAdvice(OVERLAP_FLAGS, FLAGS),
        JAX: FrameworkAdvice(OVERLAP_FLAGS, FLAGS),
    }

    def check(self, a: Analysis) -> Outcomes:
        if a.device_id is None or not a.breakdown.all_communication.total:
            return
        exposed = a.breakdown.communication.total
        overlap = a.breakdown.communication_overlap or 0.0
        share = exposed / a.span_ns
        if overlap >= self.max_overlap or share < self.min_share:
            return
        table = a.collectives
        cost = int_column(table, "exposed")
        stream = compute_stream(a)
        if stream is None or table.is_empty():
            return
        on_compute = (table["stream"] == stream).to_numpy()
        at_once = _find_waited_at_once(a, row_numbers(table["gpu"]), stream) & ~on_compute
        on_stream, waited = int(cost[on_compute].sum()), int(cost[at_once].sum())
        if on_stream + waited < self.min_explained * int(cost.sum()):
            return
        chosen = on_compute | at_once
        yield Finding(
            summary=(
                f"Communication is exposed for {of_step(a, exposed)}. Of it, "
                f"{t.format_duration((on_stream + waited) / a.step_count)} is in collectives that "
                + (
                    "run on the compute stream."
                    if on_stream >= waited
                    else "the compute stream waits for before any other launch."
                )
            ),
            evidence=[
                self.compare("communication hidden under compute", overlap, "max_overlap"),
                self.compare("exposed communication, share", share, "min_share", per=a.per),
                amount_per_step(a, "exposed on the compute stream", on_stream),
                amount_per_step(a, "exposed and waited for at once", waited),
                amount_per_step(
                    a, "collectives exposed in these two ways", int(chosen.sum()), "count"
                ),
            ],
            where=device_places(a, table, cost, np.where(chosen, row_numbers(table["op"]), -1)),
            edits=[_overlap_streams(table, chosen)],
        )

    @staticmethod
    def examples() -> Examples:
        def add_on_compute_stream(b: TraceBuilder) -> None:
            for _ in range(5):
                b.product(700)
                b.run("symm_mem::multimem_all_reduce_", "multimem_all_reduce_kernel", 500)

        def add_waits(b: TraceBuilder) -> None:
            for _ in range(5):
                b.product(700)
                b.collective("allreduce", 50 << 20, 500, wait=True)

        def add_late_wait(b: TraceBuilder, us: float) -> None:
            b.product(700)
            b.collective("allreduce", 50 << 20, us)
            b.product(700)
            b.wait_stream(7, 20)
            b.product(700)

        def add_little_communication(b: TraceBuilder) -> None:
            for _ in range(10):
                b.product(700)
            b.collective("allreduce", 1 << 20, 50, wait=True)

        return {
            "on the compute stream": example_steps(add_on_compute_stream),
            "waited for at once": example_steps(add_waits),
            "hidden": (
                example_steps(partial(add_late_wait, us=500)),
                "overlap >= self.max_overlap",
            ),
            "launched early but long": (
                example_steps(partial(add_late_wait, us=4000)),
                "on_stream + waited < self.min_explained * int(cost.sum())",
            ),
            "little": (example_steps(add_little_communication), "share < self.min_share"),
        }


def _overlap_streams(table: pl.DataFrame, chosen: NDArray[np.bool_]) -> Edit:
    """Return the edit that overlaps the communication on the streams of these collectives."""
    streams = np.unique(table["stream"].to_numpy()[chosen])
    select = Select(on="gpu", family=("communication",), stream=tuple(streams.tolist()))
    return Edit(op="overlap", ahead=True, select=select)


def _find_waited_at_once(a: Analysis, kernels: NDArray[np.int64], stream: int) -> NDArray[np.bool_]:
    """Return which of these device rows held up the first compute kernel launched after them on the
    compute stream. It was ready, its launch done, yet it started only when they had ended."""
    gpu, cpu = a.trace.gpu, a.trace.cpu
    compute = (gpu["kind"] == "kernel").to_numpy() & ~a.kernels["communication"].to_numpy()
    compute &= (gpu["stream"] == stream).to_numpy() & (gpu["device"] == a.device_id).to_numpy()
    launch = row_numbers(gpu["launch"])
    compute &= launch >= 0
    next_kernels = np.flatnonzero(compute)
    if not len(next_kernels):
        return np.zeros(len(kernels), dtype=bool)
    call_ts = cpu["ts"].to_numpy()
    return_ts = call_ts + cpu["dur"].to_numpy()
    next_kernels = next_kernels[np.argsort(call_ts[launch[next_kernels]], kind="stable")]
    issued = np.where(launch[kernels] >= 0, call_ts[launch[kernels]], np.iinfo(np.int64).max)
    position = np.searchsorted(call_ts[launch[next_kernels]], issued, side="right")
    next_kernel = next_kernels[np.minimum(position, len(next_kernels) - 1)]
    start = gpu["ts"].to_numpy()
    end = start[kernels] + gpu["dur"].to_numpy()[kernels]
    waited = (position < len(next_kernels)) & (start[next_kernel] >= end)
    waited &= return_ts[launch[next_kernel]] + READY_NS <= end
    return np.asarray(waited, dtype=np.bool_)
