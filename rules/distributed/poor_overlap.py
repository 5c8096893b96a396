"""Collectives that the program leaves nothing to run beside."""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar

import numpy as np
import polars as pl
from numpy.typing import NDArray

from advisor.core import text as t
from advisor.core.finding import (
    Edit,
    Evidence,
    Finding,
    FrameworkAdvice,
    Outcome,
    Rule,
    Select,
    Threshold,
)
from advisor.core.trace import JAX, TENSORFLOW
from advisor.measure import Analysis
from advisor.measure.device.copies import compute_stream
from advisor.rules.common import column, device_places, figure, of_step, rows
from advisor.rules.elsewhere import FLAGS, OVERLAP_FLAGS, in_any_language
from advisor.rules.sources import OURS, SILENT_TRACES, TRACELENS, XPROF_LAUNCH
from advisor.testing import TraceBuilder

READY_NS = 20_000
"""A kernel was ready when its launch had returned this long before; launches take 5 to 10 µs to
reach an idle device."""


class PoorOverlap(Rule):
    """Collectives cannot overlap with compute because of how they are issued: on the stream that
    computes, or with the compute stream waiting for them before any other work was launched.

    This is the cause of exposed communication where it applies, so the two claim the same time.
    Looked at are collectives with exposed time. *On the compute stream*: nothing launched later can
    start before they end (tensor parallelism with custom all-reduce kernels, `multimem_*`).
    *Waited for at once*: the first compute kernel launched after the collective was ready in time
    and still started only when the collective had ended, as after a synchronous collective or a
    ``work.wait()`` in the next line. (Calls of ``cudaStreamWaitEvent`` do not show it: every
    collective is followed by some, and which stream they hold is not recorded.) When the kernel was
    launched too late, the host is to blame and not the wait. The last bucket of
    DistributedDataParallel is always waited for; so most of the exposed time must be of these two
    kinds.

    Where compute depends on the result at once, as in tensor parallelism, only splitting the work
    in pieces lets one piece communicate while the next computes.
    """

    id = "poor-overlap"
    title = "Collectives are issued so that nothing can overlap them"
    category = "distributed"
    found_in = ("traces/dlrm_8ranks",)
    knobs = ("ddp-bucket-size", "ddp-bucket-view")
    silent_in = SILENT_TRACES
    validated_on = (
        "DLRM on 8 V100: an all-reduce of 0.8 ms that runs alone; the next kernel is launched "
        "meanwhile, and starts when it ends"
    )
    references = (
        "https://pytorch.org/docs/stable/distributed.html#synchronous-and-asynchronous-collective-operations",
        "https://pytorch.org/docs/stable/notes/ddp.html",
    )

    max_overlap = Threshold(0.70, "share of communication under compute", TRACELENS)
    min_share = Threshold(0.03, "of the step, exposed", XPROF_LAUNCH)
    min_explained = Threshold(0.5, "share of exposed time that the two kinds must make up", OURS)

    fix = (
        "Start each collective as soon as its input is ready, with async_op=True, launch "
        "the compute that does not need the result, and wait just before the result is "
        "used. Where compute needs it at once, split the batch or the sequence in two and "
        "let one half compute while the other communicates."
    )
    code = (
        "work = dist.all_to_all_single(out, inp, async_op=True)\n"
        "y = independent_part(x)      # launched before the wait: runs beside it\n"
        "work.wait()                  # only the stream waits, not the host\n"
        "z = needs(out, y)"
    )
    verify = "Profile again: the share of communication under compute rises."
    falsified_by = "every kernel that follows reads the collective's result"
    assumptions = ("there is compute that does not depend on the result",)
    confidence = 0.7

    elsewhere: ClassVar = {
        **in_any_language(
            "Issue collectives on a stream of their own, so that kernels which do not need their "
            "result can run meanwhile."
        ),
        TENSORFLOW: FrameworkAdvice(OVERLAP_FLAGS, FLAGS),
        JAX: FrameworkAdvice(OVERLAP_FLAGS, FLAGS),
    }

    def check(self, a: Analysis) -> Iterator[Outcome]:
        """Sort exposed collectives by how they were issued."""
        if a.device_id is None or not a.breakdown.all_communication.total:
            return
        exposed = a.breakdown.communication.total
        overlap = a.breakdown.communication_overlap or 0.0
        share = exposed / a.span_ns
        if overlap >= self.max_overlap or share < self.min_share:
            return
        table = a.collectives
        cost = column(table, "exposed")
        stream = compute_stream(a)
        if stream is None or table.is_empty():
            return
        same = (table["stream"] == stream).to_numpy()
        at_once = _waited_at_once(a, rows(table["gpu"]), stream) & ~same
        on_stream, waited = int(cost[same].sum()), int(cost[at_once].sum())
        if on_stream + waited < self.min_explained * int(cost.sum()):
            return
        chosen = same | at_once
        yield Finding(
            summary=(
                f"{of_step(a, exposed)} is exposed "
                f"communication; {t.format_duration((on_stream + waited) / a.step_count)} of it in "
                "collectives that "
                + (
                    "run on the stream that computes."
                    if on_stream >= waited
                    else "the compute stream waits for before anything else is launched."
                )
            ),
            evidence=[
                Evidence("hidden under compute", overlap, "share", *self.limit("max_overlap")),
                Evidence("share", share, "share", *self.limit("min_share"), per=a.per),
                figure(a, "exposed on the compute stream", on_stream),
                figure(a, "exposed and waited for at once", waited),
                figure(a, "such collectives", int(chosen.sum()), "count"),
            ],
            where=device_places(a, table, cost, np.where(chosen, rows(table["op"]), -1)),
            edits=self._edits(a, table, same, at_once),
        )

    @staticmethod
    def _edits(
        a: Analysis, table: pl.DataFrame, same: NDArray[np.bool_], at_once: NDArray[np.bool_]
    ) -> list[Edit]:
        """Communication on the streams that these collectives run on."""
        streams = np.unique(table["stream"].to_numpy()[same | at_once])
        return [
            Edit(
                op="overlap",
                ahead=True,
                select=Select(on="gpu", family=("communication",), stream=tuple(streams.tolist())),
            )
        ]

    @staticmethod
    def fires_on() -> dict[str, TraceBuilder]:
        """All-reduce on the compute stream; one that is waited for at once."""
        stream, waited = TraceBuilder(), TraceBuilder()
        for _ in range(4):
            with stream.step():
                for _ in range(5):
                    _compute(stream)
                    stream.run("symm_mem::multimem_all_reduce_", "multimem_all_reduce_kernel", 500)
                stream.sync()
            with waited.step():
                for _ in range(5):
                    _compute(waited)
                    waited.collective("allreduce", 50 << 20, 500, wait=True)
                waited.sync()
        return {"on the compute stream": stream, "waited for at once": waited}

    @staticmethod
    def silent_on() -> dict[str, tuple[TraceBuilder, str]]:
        """Waited for late and hidden; waited for late and too long; little communication."""
        hidden, long, little = TraceBuilder(), TraceBuilder(), TraceBuilder()
        for _ in range(4):
            for b, us in ((hidden, 500), (long, 4000)):
                with b.step():
                    _compute(b)
                    b.collective("allreduce", 50 << 20, us)
                    _compute(b)
                    b.wait_stream(7, 20)
                    _compute(b)
                    b.sync()
            with little.step():
                for _ in range(10):
                    _compute(little)
                little.collective("allreduce", 1 << 20, 50, wait=True)
                little.sync()
        return {
            "hidden": (hidden, "overlap >= self.max_overlap"),
            "launched early but long": (
                long,
                "on_stream + waited < self.min_explained * int(cost.sum())",
            ),
            "little": (little, "share < self.min_share"),
        }


def _compute(b: TraceBuilder) -> None:
    b.run("aten::mm", "ampere_sgemm_128x64_nn", 700)


def _waited_at_once(a: Analysis, kernels: NDArray[np.int64], stream: int) -> NDArray[np.bool_]:
    """For which of these device rows the first compute kernel launched after them on the compute
    stream was ready, with its launch done, and yet started only when they had ended."""
    gpu, cpu = a.trace.gpu, a.trace.cpu
    compute = (gpu["kind"] == "kernel").to_numpy() & ~a.kernels["communication"].to_numpy()
    compute &= (gpu["stream"] == stream).to_numpy() & (gpu["device"] == a.device_id).to_numpy()
    launch = rows(gpu["launch"])
    compute &= launch >= 0
    following = np.flatnonzero(compute)
    if not len(following):
        return np.zeros(len(kernels), dtype=bool)
    called = cpu["ts"].to_numpy()
    returned = called + cpu["dur"].to_numpy()
    following = following[np.argsort(called[launch[following]], kind="stable")]
    moment = np.where(launch[kernels] >= 0, called[launch[kernels]], np.iinfo(np.int64).max)
    place = np.searchsorted(called[launch[following]], moment, side="right")
    after = following[np.minimum(place, len(following) - 1)]
    start = gpu["ts"].to_numpy()
    end = start[kernels] + gpu["dur"].to_numpy()[kernels]
    held = (place < len(following)) & (start[after] >= end)
    held &= returned[launch[after]] + READY_NS <= end
    return np.asarray(held, dtype=np.bool_)
