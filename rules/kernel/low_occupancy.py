"""Memory-bound kernels that keep too few threads on a multiprocessor to hide memory latency."""

import numpy as np
import polars as pl

from advisor.core.finding import Finding, Outcomes
from advisor.core.rule import Evidence, Factor, Rule, Threshold
from advisor.measure import Analysis
from advisor.measure.device.roofline import active_blocks, find_limiters
from advisor.measure.host.names import name_matches
from advisor.rules.support import kernel_work
from advisor.rules.support.citations import FOURNEX, NCU, SILENT_TRACES, TRACELENS, TRIED_ON_TRACES
from advisor.rules.support.common import amount_per_step, example_steps, scale_edit
from advisor.rules.support.framework_advice import in_any_language
from advisor.testing import Examples, TraceBuilder

MEMORY_BOUND = (
    "softmax", "normalisation", "elementwise", "reduction", "layout", "copy", "embedding",
    "indexing", "random", "pooling", "loss", "optimizer",
)  # fmt: skip
"""Families bound by memory. Matrix kernels are left out: they run best at one block per
multiprocessor."""


class LowOccupancy(Rule):
    """A memory-bound kernel needs many resident threads, so that some can run while others wait for
    memory. When registers, shared memory or block size let only few of them onto a multiprocessor,
    memory bandwidth stays unused.

    The rule judges kernels by name, in memory-bound families only: tensor-core and attention
    kernels run best at low occupancy. Both the occupancy that resources allow (CUDA's occupancy
    formula) and the achieved one must be low. If only the achieved one is low, the grid is too
    small, which another rule reports. The occupancy that the profiler writes is not used directly,
    because it is a whole number and 0 for many kernels. Bandwidth must be low too: a kernel that
    moves its bytes at full speed is fine at any occupancy."""

    id = "low-occupancy"
    title = "Low occupancy in memory-bound kernels"
    silent_in = SILENT_TRACES
    validation_note = (
        "silent on A100 and V100 training (25 and 21% of kernel time is below 40% in the "
        "profiler's figures). It has never fired on a real trace"
    )
    references = (
        "https://docs.nvidia.com/cuda/cuda-c-best-practices-guide/#occupancy",
        "https://docs.nvidia.com/nsight-compute/ProfilingGuide/#occupancy-calculator",
    )

    min_share = Threshold(0.05, "of kernel time, for one kernel name", TRIED_ON_TRACES)
    max_occupancy = Threshold(40.0, "percent", FOURNEX, NCU)
    max_bandwidth = Threshold(0.6, "of the peak; above it, occupancy is high enough", TRACELENS)
    attained_share = Factor(0.75, "of peak bandwidth, for the merged estimate", TRACELENS)
    best_attained_share = Factor(0.875, "of peak bandwidth, at best", TRACELENS)
    worst_attained_share = Factor(0.6, "of peak bandwidth, at worst", TRACELENS)
    min_busy = kernel_work.MIN_BUSY

    fix = (
        "Use fewer registers per thread, less shared memory per block, or blocks of 128 to 256 "
        "threads, if the kernel is yours. If it comes from a library or from eager PyTorch, let "
        "the compiler generate it."
    )
    code = (
        "model = torch.compile(model)   # eager PyTorch\n\n"
        "# or, in your own Triton kernel; in CUDA: __launch_bounds__(256, 4)\n"
        "configs = [triton.Config({}, num_warps=w) for w in (2, 4, 8)]\n"
        "@triton.autotune(configs, key=['n'])"
    )
    verify = "ncu -k <kernel> --section Occupancy --section MemoryWorkloadAnalysis …"
    falsified_by = "a stall other than memory latency in Nsight Compute"
    confidence = 0.5
    assumptions = ("{attained_share:.0%} of memory bandwidth can be reached",)

    framework_advice = in_any_language(
        "Let more threads be in flight: fewer registers and less shared memory per thread, or "
        "other block sizes.",
        cuda="__launch_bounds__ limits registers; cudaOccupancyMaxPotentialBlockSize gives block "
        "sizes.",
        code="int grid, block;\ncudaOccupancyMaxPotentialBlockSize(&grid, &block, kernel, 0, 0);",
    )

    def check(self, a: Analysis) -> Outcomes:
        if not kernel_work.is_device_busy(a, self.min_busy):
            return
        rows = kernel_work.compute_mask(a) & kernel_work.family_mask(a, *MEMORY_BOUND)
        rows &= ~a.kernels["tensor_core"].fill_null(False).to_numpy()
        total = kernel_work.summed_duration(a, kernel_work.kernel_mask(a))
        if kernel_work.summed_duration(a, rows) < self.min_share * total:
            return
        kernels = self._find_low_occupancy(a, rows, total)
        if kernels.is_empty():
            return
        without_bytes = kernels.filter(pl.col("moved").is_null())
        if without_bytes.height == kernels.height:
            time_share = f"{without_bytes['dur'].sum() / total:.0%}"
            yield kernel_work.skip_without_shapes(
                a, f"whether {time_share} of kernel time at low occupancy reaches memory bandwidth"
            )
        if a.hardware is None:
            return
        peak = a.hardware.bandwidth
        kernels = kernels.with_columns(rate=pl.col("moved") / pl.col("dur") * 1e9 / peak)
        kernels = kernels.filter(pl.col("rate") < self.max_bandwidth)
        if kernels.is_empty():
            return
        select = kernel_work.select_kernels(kernels["name"].cast(pl.String).to_list())
        selected = rows & name_matches(a.trace.gpu["name"], select.name).to_numpy()
        worst = kernels.row(0, named=True)
        spent = float(kernels["dur"].sum())
        expected, best, worst_factor = (
            float(
                sum(
                    d * min(1.0, r / attained_share)
                    for d, r in kernels.select("dur", "rate").iter_rows()
                )
            )
            / float(kernels["dur"].sum())
            for attained_share in self.range_of("attained_share")
        )
        yield Finding(
            summary=(
                f"Memory-bound kernels at low occupancy take "
                f"{kernel_work.of_kernel_time(a, spent, spent / total)}. The largest fills "
                f"{worst['occupancy']:.0f}% of a multiprocessor's threads, limited by "
                f"{worst['limit']}, and reaches {worst['rate']:.0%} of memory bandwidth."
            ),
            evidence=[
                self.compare(
                    "occupancy of the largest kernel, percent",
                    worst["occupancy"],
                    "max_occupancy",
                    "",
                ),
                Evidence("occupancy limited by", worst["limit"]),
                self.compare("bandwidth reached, share of peak", worst["rate"], "max_bandwidth"),
                amount_per_step(a, "kernels of low occupancy", spent),
                self.compare(
                    "kernels of low occupancy, share of kernel time", spent / total, "min_share"
                ),
            ],
            where=kernel_work.kernel_locations(a, selected),
            edits=[scale_edit(select, expected, best, worst_factor)],
        )

    def _find_low_occupancy(self, a: Analysis, rows: kernel_work.Mask, total: int) -> pl.DataFrame:
        """Return kernels whose resources allow too few threads, by name, longest first: ``dur``,
        ``moved`` (null if unknown), ``occupancy``, ``limit``."""
        gpu, device = a.trace.gpu, a.device
        if device is None or not device.max_threads_per_sm:
            return pl.DataFrame()
        index = np.flatnonzero(rows)
        threads, registers, shared = (
            gpu[name].gather(index).cast(pl.Int64).fill_null(0).clip(0, 1 << 31).to_numpy()
            for name in ("threads", "registers", "shared")
        )
        amd = a.trace.meta.vendor == "amd"
        resident = active_blocks(threads, registers, shared, device, amd=amd)
        if resident is None:
            return pl.DataFrame()
        limit = find_limiters(resident, threads, registers, shared, device)
        allowed = 100 * resident * threads / device.max_threads_per_sm
        achieved = a.kernels["occupancy"].gather(index).fill_null(100.0).to_numpy()
        table = pl.DataFrame(
            {
                "name": gpu["name"].gather(index),
                "dur": gpu["dur"].gather(index),
                "moved": a.kernels["moved"].gather(index).cast(pl.Float64),
                "occupancy": achieved,
                "limit": limit.astype(str),
                "low": (allowed < self.max_occupancy) & (achieved < self.max_occupancy),
            }
        )
        return (
            table.group_by("name")
            .agg(
                pl.col("dur").sum(),
                pl.when(pl.col("moved").is_not_null().all()).then(pl.col("moved").sum()),
                (pl.col("occupancy") * pl.col("dur")).sum() / pl.col("dur").sum(),
                pl.col("limit").first(),
                pl.col("low").all(),
            )
            .filter("low")
            .filter(pl.col("dur") >= self.min_share * total)
            .sort("dur", descending=True)
        )

    @staticmethod
    def examples() -> Examples:
        """Return a kernel whose 168 registers per thread leave 12 of 64 warps; 192 MB in 600 µs are
        0.32 of 2.04 TB/s."""

        def add_product(b: TraceBuilder) -> None:
            kernel = "ampere_bf16_s16816gemm_bf16_128x128_ldg8_nn"
            limits = {"registers": 168, "shared": 98304, "occupancy": 12}
            b.run("aten::mm", kernel, 2000, [[4096, 4096]] * 2, "c10::BFloat16", **limits)

        return {
            "registers": _build_kernel(168, 600),
            "few registers": (_build_kernel(32, 600), "max_occupancy"),
            "full bandwidth": (_build_kernel(168, 130), "max_bandwidth"),
            "a small grid": (_build_kernel(32, 600, blocks=16), "max_occupancy"),
            "a tensor-core kernel": (
                example_steps(add_product),
                "kernel_work.summed_duration(a, rows) < self.min_share * total",
            ),
        }


def _build_kernel(registers: int, us: float, blocks: int = 4096) -> TraceBuilder:
    return example_steps(
        lambda b: b.run(
            "aten::add",
            "void at::native::vectorized_elementwise_kernel<4, CUDAFunctor_add>",
            us,
            [[32, 1024, 1024]] * 2,
            "c10::BFloat16",
            registers=registers,
            threads=384,
            blocks=blocks,
            occupancy=18,
        )
    )
