"""Pages of unified memory that move while kernels wait for them."""

import numpy as np
import polars as pl

from advisor.core import text as t
from advisor.core.finding import Finding, Outcomes
from advisor.core.intervals import covered_length, union
from advisor.core.rule import Evidence, Rule, Threshold
from advisor.measure import Analysis
from advisor.replay.project.device_scaling import host_rate
from advisor.rules.support.citations import CHOSEN, ENGINE_FLOOR
from advisor.rules.support.common import amount_per_step, of_step
from advisor.rules.support.framework_advice import in_any_language
from advisor.rules.support.kernel_work import (
    kernel_locations,
    kernel_mask,
    scale_kernels,
    select_kernels,
)
from advisor.testing import Examples, TraceBuilder

MIGRATION = r"^Memcpy \w+ \((?:Managed -> |\w+ -> Managed)"
PREFETCH = "prefetch"
_PREFETCH_CODE = (
    "cudaMemPrefetchAsync(data, bytes, device, stream);   // before the kernel\n"
    "kernel<<<grid, block, 0, stream>>>(data);"
)


class UnifiedMemory(Rule):
    """Kernels wait while pages of unified (managed) memory move on demand. A kernel touches a page
    that is elsewhere, the GPU raises a fault, and the driver moves the page in small pieces.

    The rule counts the time in which a migration on demand runs at the same time as a kernel.
    Migrations that ``cudaMemPrefetchAsync`` requested do not count. The gain is this time, minus
    the time that the same bytes take over the link to the host in one go.

    Where the driver evicts pages, the data is larger than the GPU's memory. Where as much goes back
    to the host on demand as came, both sides use the same pages in turn. Each has its own advice.

    Nsight Systems records migrations and faults (``--cuda-um-cpu-page-faults=true
    --cuda-um-gpu-page-faults=true``); PyTorch's profiler does not."""

    id = "unified-memory"
    title = "Kernels wait for pages of unified memory"
    references = (
        "https://docs.nvidia.com/cuda/cuda-c-programming-guide/index.html#unified-memory-programming",
        "https://docs.nvidia.com/nsight-systems/UserGuide/index.html",
    )
    validation_note = (
        "tables made by NVIDIA's published schema of Nsight Systems. No real file with migrations "
        "was available"
    )

    min_share = Threshold(0.01, "of the step, migrations at the same time as kernels", ENGINE_FLOOR)
    min_returned_share = Threshold(
        0.5, "of the bytes that came on demand go back on demand: both sides use them", CHOSEN
    )

    fix = "Prefetch the pages before the kernel that uses them (cudaMemPrefetchAsync)."
    code = _PREFETCH_CODE
    verify = "Profile again: migrations say 'prefetch', and none runs during a kernel."
    falsified_by = "a kernel that takes as long with all pages on the GPU"
    assumptions = (
        "prefetched bytes move at the rate of the link, at worst at half of it; at best kernels of "
        "other data hide them",
    )
    confidence = 0.7
    cases = {
        "evictions": {
            "fix": "Use less managed memory than the GPU has: work on the data in pieces, each "
            "copied by cudaMemcpyAsync to memory of cudaMalloc.",
            "code": "",
        },
        "back and forth": {
            "fix": "Keep the pages where they are used most: advise their place "
            "(cudaMemAdvise), or copy explicitly what the other side needs.",
            "code": "cudaMemAdvise(data, bytes, cudaMemAdviseSetPreferredLocation, device);\n"
            "cudaMemAdvise(data, bytes, cudaMemAdviseSetAccessedBy, cudaCpuDeviceId);\n"
            "cudaMemAdvise(table, bytes, cudaMemAdviseSetReadMostly, device);",
        },
    }
    framework_advice = in_any_language(
        "Move the pages before the kernel that uses them, or use plain device memory.",
        cuda="cudaMemPrefetchAsync moves them in one go on a stream.",
        code=_PREFETCH_CODE,
    )

    def check(self, a: Analysis) -> Outcomes:
        if a.device_id is None:
            return
        gpu, kernels = a.trace.gpu, kernel_mask(a)
        name = gpu["name"].cast(pl.String)
        moved = name.str.contains(MIGRATION) & (gpu["kind"] == "memcpy") & pl.Series(a.in_window)
        asked = name.str.contains(PREFETCH, literal=True)
        demand = gpu.filter(moved & ~asked)
        if demand.is_empty():
            return
        start, end = demand["ts"].to_numpy(), (demand["ts"] + demand["dur"]).to_numpy()
        ts, dur = gpu["ts"].to_numpy(), gpu["dur"].to_numpy()
        migration_ns = covered_length(ts, ts + dur, union(start, end)) * kernels
        waited_ns = int(migration_ns.sum())
        if waited_ns < self.min_share * a.span_ns:
            return
        size = {way: int(demand.filter(pl.col("copy") == way)["bytes"].sum() or 0)
                for way in ("HtoD", "DtoH")}  # fmt: skip
        rate = None if a.hardware is None else host_rate(a.hardware)
        link_ns = (size["HtoD"] / rate * 1e9) if rate else size["HtoD"] / _fastest_rate(gpu, moved)
        is_slowed = migration_ns > 0
        names = name.filter(pl.Series(is_slowed)).unique().sort().to_list()
        evicted = demand.filter(name.filter(moved & ~asked).str.contains("eviction", literal=True))
        case = (
            self.case("evictions") if evicted.height
            else self.case("back and forth")
            if size["DtoH"] > self.min_returned_share * max(size["HtoD"], 1)
            else {}
        )  # fmt: skip
        faults = a.trace.counters.filter(pl.col("name").cast(pl.String) == "GPU page faults")
        yield Finding(
            summary=(
                f"Kernels run during migrations on demand for {of_step(a, waited_ns)}: "
                f"{t.format_bytes(size['HtoD'] / a.step_count)} to the GPU and "
                f"{t.format_bytes(size['DtoH'] / a.step_count)} back."
            ),
            evidence=[
                amount_per_step(a, "kernels during migrations", waited_ns),
                self.compare_share(a, "kernels during migrations", waited_ns),
                amount_per_step(a, "bytes to the GPU on demand", size["HtoD"], "bytes"),
                amount_per_step(a, "bytes back on demand", size["DtoH"], "bytes"),
                amount_per_step(a, "time of these bytes over the link", link_ns),
                amount_per_step(a, "evictions", evicted.height, "count"),
                Evidence("GPU page faults in the recording",
                         None if faults.is_empty() else float(faults["value"].sum()), "count"),
            ],
            where=kernel_locations(a, is_slowed),
            edits=[
                scale_kernels(
                    a,
                    kernels & name.is_in(names).to_numpy(),
                    (max(0.0, waited_ns - n * link_ns) for n in (1, 0, 2)),
                    select_kernels(names),
                )
            ],
            **case,
        )  # fmt: skip

    @staticmethod
    def examples() -> Examples:
        """Build kernels that pull their 16 MB page by page, with the host using them in turn, or
        with more data than memory."""
        examples: Examples = {}
        for name, back, cause in (
            ("pages on demand", 0, "page fault"),
            ("pages in turn", 16 << 20, "page fault"),
            ("more than the memory", 16 << 20, "eviction"),
        ):
            b = TraceBuilder("A100")
            for _ in b.steps():
                b.run("aten::mm", "stencil", 8000)
                b.migrate("HtoD", 16 << 20, 5000)
                if back:
                    b.migrate("DtoH", back, 2000, cause=cause)
                b.sync()
            examples[name] = b
        prefetched, few, plain = (TraceBuilder("A100") for _ in range(3))
        for b, cause, us in ((prefetched, "user prefetch", 900), (few, "page fault", 20)):
            for _ in b.steps():
                b.run("aten::mm", "stencil", 8000)
                b.migrate("HtoD", 16 << 20, us, cause=cause)
                b.sync()
        for _ in plain.steps():
            plain.copy("HtoD", 16 << 20)
            plain.run("aten::mm", "stencil", 8000)
            plain.sync()
        return examples | {
            "prefetched": (prefetched, "demand.is_empty()"),
            "a few pages": (few, "min_share"),
            "plain copies": (plain, "demand.is_empty()"),
        }


def _fastest_rate(gpu: pl.DataFrame, is_migration: pl.Series) -> float:
    """Return bytes per ns of the fastest migration, a lower bound of the link's rate."""
    timed = gpu.filter(is_migration & (gpu["dur"] > 0))
    rates = (timed["bytes"].fill_null(0) / timed["dur"]).to_numpy()
    return float(np.max(rates, initial=0.0)) or 1.0
