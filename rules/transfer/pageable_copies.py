"""Copies from pageable host memory: slow, and they block the host."""

from typing import Any

import polars as pl

from advisor.core import text as t
from advisor.core.finding import Finding, Outcomes, PassedCheck, Select, SkippedCheck
from advisor.core.intervals import intersect
from advisor.core.rule import Evidence, Factor, Rule, Threshold
from advisor.core.trace import CUDA
from advisor.measure import Analysis
from advisor.measure.host.names import name_matches
from advisor.rules.support.citations import (
    ENGINE_FLOOR,
    PAGEABLE_64K,
    PINNED_BLOG,
    SILENT_TRACES,
    TRIED_ON_TRACES,
    public_traces,
)
from advisor.rules.support.common import (
    COPY_PREFETCH_CODE,
    amount_per_step,
    are_mostly_offloaded,
    busy_intervals,
    device_places,
    host_link_rate,
    of_step,
    per_step,
    scale_edit,
    sum_column,
)
from advisor.rules.support.framework_advice import BATCHES_AHEAD, in_any_language
from advisor.rules.support.host_waits import COPY_CALLS, async_edit, select_blocking_calls
from advisor.testing import Examples, TraceBuilder

_HIDDEN = (
    "pinned copies are {pinned_speedup:g} times as fast ({worst_pinned_speedup:g} at worst), and "
    "compute hides them while it runs"
)
_MEMORY = "the host has memory to pin"


class PageableCopies(Rule):
    """Inputs are copied to the GPU from pageable memory. The driver stages every piece through a
    pinned buffer, so the copy is slower, blocks the host thread, and cannot overlap with compute.

    The rule counts what such copies cost: GPU time in which only the copy runs, and the GPU idle
    time after a copy that blocked the host. Copies hidden by compute, and small ones that the
    driver buffers at once, cost nothing and are not reported. Pinned copies are never counted.

    Copies of results to the host are not counted either. Pinning does not help where the host waits
    for the value anyway (``.item()``, ``.cpu()``); implicit-sync judges those by the idle time
    after them. In a program without a framework, copies to the host that the driver has to stage
    are counted. A parameter upload before the first step does not belong to any step.

    Weights and activations that live on the host are the subject of offloaded-tensors."""

    id = "pageable-copies"
    title = "Compute waits for copies from pageable memory"
    knobs = ("loader-pinning",)
    found_in = public_traces(
        "pairs/loader_autograd_workers0 pairs/loader_autograd_workers4 "
        "pairs/loader_profiler_workers0 pairs/loader_profiler_workers4"
    )
    silent_in = SILENT_TRACES
    validation_note = (
        "training with a loader, with workers and without: 2 copies per step of 18.4 MiB that the "
        "file itself calls pageable. On the A100 and V100 all copies to the GPU are pinned, and 60 "
        "pageable ones go back. The trace b200_eager has 2 copies of 8 bytes"
    )
    references = (
        "https://pytorch.org/tutorials/intermediate/pinmem_nonblock.html",
        "https://docs.nvidia.com/cuda/cuda-c-best-practices-guide/index.html#pinned-memory",
    )

    min_share = Threshold(
        0.01,
        "of the step: above the noise between two profiled runs; nsys reports any such copy",
        ENGINE_FLOOR,
    )
    min_bytes = Threshold(
        65536, "bytes: CUDA buffers pageable copies of up to 64 KiB at once", PAGEABLE_64K
    )
    pinned_speedup = Factor(
        2.0, "times as fast, when the trace has no pinned copy to compare with", PINNED_BLOG
    )
    worst_pinned_speedup = Factor(1.15, "times as fast, where the host is fast", PINNED_BLOG)
    link_share = Factor(
        0.85,
        "of the link's peak: what large pinned copies reach (55 of 63 GB/s on an H100)",
        TRIED_ON_TRACES,
    )
    worst_link_share = Factor(
        0.5,
        "of the link's peak, where other traffic shares it or host memory is far",
        TRIED_ON_TRACES,
    )

    fix = (
        "Let the DataLoader pin its batches, and copy them with non_blocking=True. Pin tensors "
        "that stay the same once, before the loop. Copied one batch ahead on a separate stream, "
        "they cost nothing if compute takes longer."
    )
    code = (
        "loader = DataLoader(..., pin_memory=True)   # keep your other arguments\n"
        "for batch, target in loader:\n"
        "    batch = batch.to(device, non_blocking=True)\n"
        "    target = target.to(device, non_blocking=True)"
    )
    cases = {
        "the link is recorded": {
            "assumptions": (
                "pinned copies reach {link_share:.0%} of the link's peak ({worst_link_share:.0%} "
                "at worst), and compute hides them while it runs",
                _MEMORY,
            )
        },
        "a pinned copy to compare with": {
            "assumptions": (
                "copies become as fast as pinned ones here (at worst {worst_pinned_speedup:g} "
                "times as fast as now), and compute hides them while it runs",
                _MEMORY,
            )
        },
        "no DataLoader": {
            "fix": "Pin the tensors that batches are taken from once, before the loop. Copy the "
            "next batch with non_blocking=True on a separate stream, so that the compute of the "
            "current batch hides it. If each step creates its batch, write it directly into a "
            "pinned buffer (out=), after uploads.synchronize(). Copying a finished batch into such "
            "a buffer can take as long as it saves.",
            "code": "loader = [[t.pin_memory() for t in x] for x in data]  # data: your batches\n"
            + COPY_PREFETCH_CODE,
        },
    }
    verify = "Profile again: copies read 'Pinned -> Device', and their calls are short."
    falsified_by = "copies that are pinned and take as long"
    assumptions = (_HIDDEN, _MEMORY)
    confidence = 0.8

    framework_advice = {
        **in_any_language(
            "Copy from pinned (page-locked) host memory that you allocate once and reuse. Copy in "
            "pieces on a separate stream while kernels run. Keep on the GPU what the next kernel "
            "needs, so that it is not copied at all.",
            cuda="cudaHostAlloc (or one cudaHostRegister) pins memory. cudaMemcpyAsync on a stream "
            "returns at once and overlaps with kernels of other streams.",
            code="// once; the same for streams[1] and back\n"
            "cudaStreamCreate(&streams[0]);\n"
            "cudaHostAlloc(&host, bytes, cudaHostAllocDefault);\n"
            "for (int i = 0; i < pieces; ++i) {\n"
            "  cudaStream_t s = streams[i % 2];\n"
            "  cudaMemcpyAsync(in[i % 2], host + i * n, piece,\n"
            "                  cudaMemcpyHostToDevice, s);\n"
            "  kernel<<<grid, block, 0, s>>>(in[i % 2], out[i % 2], n);\n"
            "  cudaMemcpyAsync(back + i * n, out[i % 2], piece,\n"
            "                  cudaMemcpyDeviceToHost, s);\n"
            "}\n"
            "cudaDeviceSynchronize();                          // once, at the end",
            verify="Profile again: copies read 'Pinned -> Device' and overlap with kernels.",
        ),
        **BATCHES_AHEAD,
    }

    def check(self, a: Analysis) -> Outcomes:
        if a.device_id is None or a.copies.is_empty():
            return
        copies = a.copies.filter(pl.col("copy").is_in(["HtoD", "DtoH"]))
        if copies.is_empty():
            return
        if copies["memory"].null_count() == copies.height:
            yield SkippedCheck(
                what="whether copies use pinned memory",
                why="the kind of host memory is not recorded",
                record="a profiler that writes 'Memcpy HtoD (Pageable -> Device)'"
                if a.trace.meta.vendor != "amd"
                else "",  # no profiler of ROCm does
            )
            return
        is_large = pl.col("bytes").fill_null(0) >= self.min_bytes
        directions = ["HtoD"]
        is_large_fetch = (pl.col("copy") == "DtoH") & is_large
        if a.trace.meta.framework == CUDA:
            directions.append("DtoH")
        slow_copies = copies.filter(
            pl.col("memory") == "pageable",
            (pl.col("copy") == "HtoD") | (is_large_fetch & pl.col("copy").is_in(directions)),
        )
        uploads = copies.filter((pl.col("copy") == "HtoD") & is_large)
        if slow_copies.is_empty():
            if uploads.height and (uploads["memory"] == "pinned").all():
                yield PassedCheck(
                    text="copies to the GPU come from pinned memory "
                    f"({t.count_noun(uploads.height, 'larger copy')}, "
                    f"{t.format_bytes(sum_column(uploads['bytes']))})"
                )
            return
        # copies to the host are left out: the host would wait for them from pinned memory too
        blocking = select_blocking_calls(
            a, (pl.col("direction") == "HtoD") & (pl.col("memory") == "Pageable").fill_null(False)
        )
        # overlapping copies count once
        slow_busy = busy_intervals(a, slow_copies.filter(pl.col("exposed") > 0))
        exposed = intersect(slow_busy, a.breakdown.copies).total
        share = (exposed + blocking.total) / a.span_ns
        if share < self.min_share or are_mostly_offloaded(a):
            return
        speed = _measure_rate(slow_copies)
        pinned = _measure_rate(copies.filter((pl.col("memory") == "pinned") & is_large))
        link = host_link_rate(a)
        factor, worst, case = self._speedup(speed, pinned, link)
        # other GPU work can hide only as much copy time as it has itself
        hideable = max(0, a.breakdown.busy.total - exposed) / max(1, slow_busy.total)
        count = max(1, round(slow_copies.height / a.step_count))
        size_per_step = t.format_bytes(sum_column(slow_copies["bytes"]) / a.step_count)
        size = f", {size_per_step} in all," if count > 1 else f" of {size_per_step}"
        yield Finding(
            summary=(
                f"{t.count_noun(count, 'copy')}{per_step(a)}{size} through pageable memory "
                f"{'cost' if count > 1 else 'costs'} {of_step(a, exposed + blocking.total)}."
            ),
            evidence=[
                amount_per_step(a, "exposed copy time", exposed),
                amount_per_step(a, "GPU idle after these calls", blocking.total),
                self.compare("exposed copies and idle GPU, share", share, "min_share", per=a.per),
                *_compare_rates(speed, pinned, link),
                amount_per_step(a, "bytes copied", sum_column(slow_copies["bytes"]), "bytes"),
            ],
            where=device_places(a, slow_copies),
            edits=[
                scale_edit(
                    Select(on="gpu", kind=("memcpy",), copy=tuple(directions), memory="pageable"),
                    factor,
                    max(0.0, factor - hideable),
                    max(factor, worst),
                ),
                *([async_edit(a, blocking, *COPY_CALLS)] if blocking.total else []),
            ],
            **case,
            **(self.case("no DataLoader") if _has_no_loader(a) else {}),
        )

    def _speedup(
        self, speed: float | None, pinned: float | None, link: float | None
    ) -> tuple[float, float, dict[str, Any]]:
        """Return the time ratio of pinned copies to these (expected, at worst) and the texts of the
        case. ``speed`` (of these copies), ``pinned`` and ``link`` are in GB/s."""
        factor, worst = 1 / self.pinned_speedup, 1 / self.worst_pinned_speedup
        if speed and pinned:
            return min(1.0, speed / pinned), worst, self.case("a pinned copy to compare with")
        if speed and link:
            factor = min(1.0, speed / (self.link_share * link))
            worst = min(1.0, speed / (self.worst_link_share * link))
            return factor, worst, self.case("the link is recorded")
        return factor, worst, {}

    @staticmethod
    def examples() -> Examples:
        from_pageable, pinned, small, hidden, results = (TraceBuilder() for _ in range(5))
        for _ in from_pageable.steps():
            from_pageable.to("HtoD", 24 << 20, pinned=False)
            from_pageable.product(6000, wait=True)
        for _ in pinned.steps():
            pinned.copy("HtoD", 24 << 20)
            pinned.product(1000, 6, wait=True)
        for _ in small.steps():
            for _ in range(3):
                small.copy("HtoD", 512, 1.5, pinned=False)
            small.product(1000, 6, wait=True)
        for _ in hidden.steps():
            hidden.product(9000)
            hidden.copy("HtoD", 24 << 20, pinned=False, stream=13)
        for _ in results.steps():
            results.product(1000, 6, wait=True)
            results.item()
            results.host(1000)
        return {
            "a batch from pageable memory": from_pageable,
            "pinned": (pinned, "slow_copies.is_empty()"),
            "small": (small, "min_share"),
            "hidden under compute": (hidden, "share < self.min_share"),
            "reading a result": (results, "slow_copies.is_empty()"),
        }


def _has_no_loader(a: Analysis) -> bool:
    """Return whether the recorder saw that no DataLoader feeds the loop."""
    if a.run_steps is None or not a.run_steps.count or a.run_steps.loaders:
        return False
    return not name_matches(a.trace.cpu["name"], "DataLoader").any()


def _compare_rates(speed: float | None, pinned: float | None, link: float | None) -> list[Evidence]:
    return [
        Evidence("bandwidth of these copies", speed, "GB/s"),
        Evidence("bandwidth of pinned copies in this trace", pinned, "GB/s"),
        *([Evidence("peak of the PCIe link", link, "GB/s")] if link else []),
    ]


def _measure_rate(copies: pl.DataFrame) -> float | None:
    """Return bytes over time of copies in GB/s, or ``None`` if no size is known."""
    sized = copies.filter(pl.col("bytes").is_not_null() & (pl.col("dur") > 0))
    return None if sized.is_empty() else sum_column(sized["bytes"]) / sum_column(sized["dur"])
