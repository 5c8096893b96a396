"""Copies between host and GPU that could run beside compute, and do not."""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar

import polars as pl

from advisor.core import text as t
from advisor.core.finding import (
    Edit,
    Evidence,
    Finding,
    Outcome,
    PassedCheck,
    Rule,
    Select,
    Threshold,
)
from advisor.core.intervals import intersect
from advisor.measure import Analysis
from advisor.rules.common import busy_during, device_places, figure, of_step, per
from advisor.rules.elsewhere import BATCHES_AHEAD, in_any_language
from advisor.rules.sources import OURS, SILENT_TRACES, TRACELENS
from advisor.testing import TraceBuilder

DIRECTIONS = ("HtoD", "DtoH")


class CopiesNotOverlapped(Rule):
    """Copies between pinned host memory and the GPU run while the GPU computes nothing. Copy
    engines work beside compute, so on a separate stream, one batch ahead, the copies would be free.

    Exposed is copy time under neither compute nor communication. On the stream that also computes,
    a copy can never overlap with what is launched after it. Copies from pageable memory are left
    out, because they cannot run on their own (see pageable-copies), and so are copies within the
    GPU.

    Where most of the copy time is hidden already, the rule is silent: a prefetch on its own stream
    works, and the rest shows where compute is missing.
    """

    id = "copies-not-overlapped"
    title = "Copies do not overlap with compute"
    category = "transfer"
    knobs = ("loader-pinning",)
    silent_in = SILENT_TRACES
    validated_on = (
        "silent where it should be: A100 and V100 training prefetch on a separate stream and hide "
        "68 and 80 % of their copies"
    )
    references = (
        "https://pytorch.org/tutorials/intermediate/pinmem_nonblock.html",
        "https://pytorch.org/docs/stable/notes/cuda.html#cuda-streams",
    )

    min_share = Threshold(
        0.02,
        "of the step, exposed: above the noise, below the 5 % from which TraceLens flags copies",
        TRACELENS,
    )
    max_overlap = Threshold(0.5, "of the copy time is hidden: the copies count as overlapped", OURS)

    fix = (
        "Copy the next batch on a separate stream while this step computes, and let the compute "
        "stream wait for it. Send fewer bytes: uint8 images, normalized on the GPU."
    )
    code = (
        "copies = torch.cuda.Stream()\n"
        "def prefetch(batch):\n"
        "    with torch.cuda.stream(copies):\n"
        "        return [t.to(device, non_blocking=True) for t in batch]\n"
        "ready = prefetch(next(batches))\n"
        "for following in batches:\n"
        "    torch.cuda.current_stream().wait_stream(copies)\n"
        "    current, ready = ready, prefetch(following)\n"
        "    for t in current:\n"
        "        t.record_stream(torch.cuda.current_stream())\n"
        "    train_step(*current)"
    )
    verify = "Profile again: the copies overlap with kernels, on another stream."
    falsified_by = "the same step time when the loop reuses one batch on the GPU"
    assumptions = ("the next batch is known while this step runs", "memory for one more batch")
    confidence = 0.8

    elsewhere: ClassVar = {
        **in_any_language(
            "Copy the next piece while the GPU computes on this one, with two buffers in pinned "
            "host memory and a separate stream for copies. Leave on the GPU what it needs again.",
            cuda="Use cudaMemcpyAsync on a separate stream, and cudaEventRecord and "
            "cudaStreamWaitEvent between the streams.",
            code="cudaMemcpyAsync(buffer[next], host + next * n, piece,\n"
            "                cudaMemcpyHostToDevice, copies);\n"
            "cudaEventRecord(arrived[next], copies);\n"
            "kernel<<<grid, block, 0, compute>>>(buffer[now], n);\n"
            "cudaStreamWaitEvent(compute, arrived[next], 0);",
            verify="Profile again: copies overlap with kernels.",
        ),
        **BATCHES_AHEAD,
    }

    def check(self, a: Analysis) -> Iterator[Outcome]:
        """Compare exposed copy time with the step and with all copy time."""
        if a.device_id is None or a.copies.is_empty():
            return
        pageable = (pl.col("memory") == "pageable").fill_null(False)
        copies = a.copies.filter(pl.col("copy").is_in(DIRECTIONS) & ~pageable)
        if copies.is_empty():
            return
        busy = busy_during(a, copies)
        exposed = intersect(busy, a.breakdown.copies).total
        share = exposed / a.span_ns
        overlap = 1 - exposed / busy.total if busy.total else 1.0
        if share < self.min_share or overlap >= self.max_overlap:
            if overlap >= self.max_overlap and busy.total >= self.min_share * a.span_ns:
                yield PassedCheck(
                    text=f"compute hides {overlap:.0%} of the copy time between host and GPU "
                    f"({t.format_duration(busy.total / a.step_count)}{per(a)})"
                )
            return
        same = copies.filter("same_stream")
        on_compute = int(same["exposed"].sum()) / max(1, int(copies["exposed"].sum()))
        moved = int(copies["bytes"].sum())
        yield Finding(
            summary=(
                f"The GPU only copies for {of_step(a, exposed)}: "
                f"{t.format_bytes(moved / a.step_count)}{per(a)}, {overlap:.0%} of the copy time "
                "hidden" + (". The copies run on the compute stream." if on_compute > 0.5 else ".")
            ),
            evidence=[
                figure(a, "exposed copy time", exposed),
                Evidence("share", share, "share", *self.limit("min_share"), per=a.per),
                Evidence("hidden by compute", overlap, "share", *self.limit("max_overlap")),
                Evidence("exposed on the compute stream", on_compute, "share"),
                figure(a, "bytes", moved, "bytes"),
                Evidence("bandwidth", moved / max(1, int(copies["dur"].sum())), "GB/s"),
            ],
            where=device_places(a, copies),
            edits=[Edit(op="overlap", select=select) for select in _groups(copies)],
        )

    @staticmethod
    def fires_on() -> dict[str, TraceBuilder]:
        """A pinned batch copied on the compute stream before each step."""
        b = TraceBuilder()
        for _ in range(4):
            with b.step():
                b.copy("HtoD", 24 << 20)
                _train(b)
        return {"on the compute stream": b}

    @staticmethod
    def silent_on() -> dict[str, tuple[TraceBuilder, str]]:
        """On another stream under compute; small; from pageable memory; within the GPU."""
        ahead, small, pageable, within = (TraceBuilder() for _ in range(4))
        for _ in range(4):
            with ahead.step():
                ahead.run("aten::mm", "ampere_sgemm_128x64_nn", 4000)
                ahead.copy("HtoD", 24 << 20, stream=13)
                ahead.sync()
            with small.step():
                small.copy("HtoD", 4096)
                _train(small)
            with pageable.step():
                pageable.copy("HtoD", 24 << 20, pinned=False)
                _train(pageable)
            with within.step():
                within.copy("DtoD", 240 << 20)
                _train(within)
        return {
            "under compute": (ahead, "share < self.min_share"),
            "small": (small, "min_share"),
            "pageable": (pageable, "copies.is_empty()"),
            "within the GPU": (within, "copies.is_empty()"),
        }


def _train(b: TraceBuilder) -> None:
    b.run("aten::mm", "ampere_sgemm_128x64_nn", 1000, times=4)
    b.sync()


def _groups(copies: pl.DataFrame) -> list[Select]:
    """Selectors of the copies that have any exposed time, by direction and host memory."""
    groups = (
        copies.filter(pl.col("exposed") > 0)
        .select(pl.col("copy").cast(pl.String), pl.col("memory") == "pinned")
        .unique()
        .sort("copy", "memory", nulls_last=True)
    )
    return [
        Select(on="gpu", kind=("memcpy",), copy=(copy,), memory="pinned" if pinned else "")
        for copy, pinned in groups.iter_rows()
    ]
