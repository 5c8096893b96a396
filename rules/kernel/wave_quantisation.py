"""Grids that leave multiprocessors idle, in the last wave of blocks or in all of them."""

import numpy as np
import polars as pl
from numpy.typing import NDArray

from advisor.core.finding import Finding, Outcomes, Select, SkippedCheck
from advisor.core.rule import Citation, Evidence, Factor, Rule, Threshold
from advisor.core.text import count_noun
from advisor.measure import Analysis
from advisor.measure.host.names import name_matches
from advisor.rules.support import kernel_work
from advisor.rules.support.citations import (
    ARITHMETIC,
    MATMUL_GUIDE,
    SILENT_TRACES,
    SMALL_GRIDS_TRACES,
    TRIED_ON_TRACES,
)
from advisor.rules.support.common import amount_per_step, example_steps, of_step
from advisor.rules.support.framework_advice import in_any_language
from advisor.testing import Examples, TraceBuilder


class WaveQuantisation(Rule):
    """A GPU runs a grid in waves of as many blocks as fit at once. A grid of 1.2 waves takes as
    long as a grid of 2: the last wave leaves 80% of the GPU empty.

    The number of waves is blocks over (multiprocessors x resident blocks per multiprocessor). The
    waste, 1 - w / ceil(w), matters below about four waves. Above, the tail is small, and blocks no
    longer end together. Kernels that are persistent or split along K (stream-K) have no waves.
    Resident blocks come from the profiler if it writes them, or else from the occupancy formula
    (registers, shared memory, threads). A tail costs less if each remaining block has a
    multiprocessor to itself and runs faster. So the rule counts at most the gap between the
    operator's rate and its attainable rate."""

    id = "wave-quantisation"
    title = "Wave quantisation: the last wave of blocks leaves the GPU mostly empty"
    silent_in = SILENT_TRACES
    validation_note = (
        "the waves of SAM's kernels on an A100, from blocks, registers and multiprocessors. "
        "Products of 1.48 waves that reach 98% of the attainable rate there are not counted"
    )
    sources = (Citation("arithmetic: 1.2 waves take as long as 2, the last of them 80% empty"),)
    references = (
        "https://docs.nvidia.com/deeplearning/performance/dl-performance-matrix-multiplication/#wave-quant",
    )

    min_waste = Threshold(0.20, "of a kernel's time", MATMUL_GUIDE)
    max_waves = Threshold(4, "waves; above it, the tail is below 20% anyway", ARITHMETIC)
    min_share = Threshold(0.03, "of kernel time, for one kernel name", TRIED_ON_TRACES)
    min_busy = kernel_work.MIN_BUSY
    recovered_share = Factor(
        0.7, "of the waste that another size or tile wins back", TRIED_ON_TRACES
    )

    fix = (
        "Choose the batch or a layer size so that the grid is just below a whole number of waves. "
        "Or let the compiler look for another tile: max-autotune tries smaller tiles and stream-K."
    )
    code = (
        'model = torch.compile(model, mode="max-autotune")\n\n'
        "# or time neighbouring batch sizes, by samples per second\n"
        "for n in (batch, batch * 7 // 8, batch * 9 // 8):\n"
        "    print(n, n / benchmark(lambda: model(x[:n])))"
    )
    verify = "Samples per second rise at the new size; waves are just below a whole number."
    falsified_by = "no more samples per second with a batch an eighth smaller"
    confidence = 0.5
    assumptions = ("{recovered_share:.0%} of the tail can be won back (none to all)",)

    framework_advice = in_any_language(
        "Choose sizes, or tiles, so that the number of blocks is a multiple of what the device "
        "runs at once. Or let blocks fetch work themselves (persistent kernels, stream-K)."
    )

    def check(self, a: Analysis) -> Outcomes:
        if not kernel_work.is_device_busy(a, self.min_busy):
            return
        total = kernel_work.summed_duration(a, kernel_work.kernel_mask(a))
        matrix_rows = kernel_work.compute_mask(a) & kernel_work.family_mask(
            a, "gemm", "convolution", "attention"
        )
        if kernel_work.summed_duration(a, matrix_rows) < self.min_share * total:
            return
        with_waves = matrix_rows & a.kernels["waves"].is_not_null().to_numpy()
        if not with_waves.any():
            if a.trace.meta.vendor == "amd":
                return  # resident blocks of AMD GPUs are not modelled
            yield SkippedCheck(
                what="wave quantisation of matrix kernels",
                why="grid sizes or the GPU's properties are not in the trace",
                record="a profiler that writes grid, block and deviceProperties",
            )
            return
        table = self._find_wasteful(a, with_waves, total)
        if table.is_empty():
            return
        select = kernel_work.select_kernels(table["name"].cast(pl.String).to_list())
        rows = (
            kernel_work.compute_mask(a) & name_matches(a.trace.gpu["name"], select.name).to_numpy()
        )
        lost, spent = float(table["lost"].sum()), float(table["dur"].sum())
        yield Finding(
            summary=(
                f"{count_noun(table.height, 'kernel')} with few waves: {spent / total:.0%} of "
                f"kernel time. For {lost / spent:.0%} of it the last wave leaves multiprocessors "
                "empty."
            ),
            evidence=[
                self.compare("waste, share of these kernels' time", lost / spent, "min_waste"),
                self.compare("waves of the largest kernel", table["waves"][0], "max_waves", ""),
                amount_per_step(a, "time of these kernels", spent),
            ],
            where=kernel_work.kernel_locations(a, rows),
            edits=[
                kernel_work.scale_kernels(a, rows, (lost * self.recovered_share, lost, 0.0), select)
            ],
        )

    def _find_wasteful(self, a: Analysis, rows: kernel_work.Mask, total: int) -> pl.DataFrame:
        """Return kernels by name, largest ``lost`` first: ``dur``, ``lost`` (ns), mean
        ``waves``."""
        name = a.trace.gpu["name"]
        waves = a.kernels["waves"].fill_null(0.0).to_numpy()
        index = np.flatnonzero(
            rows
            & (waves >= 1)
            & (waves < self.max_waves)
            & ~name_matches(name, kernel_work.PERSISTENT).to_numpy()
        )
        waves, dur = waves[index], a.trace.gpu["dur"].to_numpy()[index]
        waste = np.minimum(1 - waves / np.maximum(np.ceil(waves), 1), _measure_headroom(a, index))
        table = pl.DataFrame(
            {"name": name.gather(index), "dur": dur, "lost": dur * waste, "waves": waves}
        )
        return (
            table.group_by("name")
            .agg(
                pl.col("dur").sum(),
                pl.col("lost").sum(),
                ((pl.col("waves") * pl.col("dur")).sum() / pl.col("dur").sum()).alias("waves"),
            )
            .filter(pl.col("dur") >= self.min_share * total)
            .filter(pl.col("lost") >= self.min_waste * pl.col("dur"))
            .sort("lost", descending=True)
        )

    @staticmethod
    def examples() -> Examples:
        """Return a kernel of 1.1 waves: 238 blocks where 216 fit (two per multiprocessor, of 256
        threads and 128 registers)."""

        def add_wait(b: TraceBuilder) -> None:
            _add_run(b, 1024, 20, 238)
            b.host(2000)

        nvjet = "nvjet_tst_128x256_64x4_1x2_h_bz_coopA_NNT"
        return {
            "just above one wave": _build_product(238),
            "just below two waves": (_build_product(430), "min_waste"),
            "just above one wave, at 90% of the rate": (_build_product(238, us=560), "min_waste"),
            "ten waves and a bit": (_build_product(2170), "table.is_empty()"),
            "persistent": (_build_product(238, nvjet), "table.is_empty()"),
            "the device waits": (example_steps(add_wait), "min_busy"),
        }


def _measure_headroom(a: Analysis, index: NDArray[np.int64]) -> NDArray[np.float64]:
    """Return the share of the time of rows of ``trace.gpu`` that a kernel at the attainable rate
    would save; 1 if that rate is unknown."""
    ops = pl.DataFrame(
        {
            "op": a.kernels["op_name"].gather(index).cast(pl.String),
            "inputs": a.trace.cpu["inputs"]
            .gather(a.kernels["op_row"].gather(index))
            .cast(pl.Int64),
        }
    )
    rated = a.rooflines.filter(pl.col("op").is_not_null() & pl.col("efficiency").is_not_null())
    rated = rated.select("op", "inputs", "efficiency").unique(["op", "inputs"])
    reached = ops.join(
        rated, on=["op", "inputs"], how="left", nulls_equal=True, maintain_order="left"
    )["efficiency"]
    return 1 - reached.fill_null(0.0).clip(0.0, 1.0).to_numpy()


_KERNEL = "ampere_bf16_s16816gemm_bf16_128x64_ldg8_tn"


def _add_run(b: TraceBuilder, size: int, us: float, blocks: int, kernel: str = _KERNEL) -> None:
    shapes = [[size, size], [size, size]]
    grid = {"blocks": blocks, "threads": 256, "registers": 128}
    b.run("aten::mm", kernel, us, shapes, "c10::BFloat16", **grid)


def _build_product(blocks: int, kernel: str = _KERNEL, us: float = 900) -> TraceBuilder:
    # 0.14 TFLOP: 56% of the rate, or what 1.1 of 2 waves leave
    def body(b: TraceBuilder) -> None:
        for _ in range(5):
            _add_run(b, 4096, us, blocks, kernel)

    return example_steps(body)


_WON_BACK = (
    "{recovered_share:.0%} of the time with empty multiprocessors is won back "
    "({worst_recovered_share:.0%} to 100%)"
)


BY_CHANNEL = ("normalisation", "reduction")
"""Families with one block per channel or row: a larger batch adds none."""


class SmallGrids(Rule):
    """A kernel with fewer blocks than the GPU has multiprocessors leaves some of them idle for its
    whole duration. If much of the compute time is in such kernels, the batch is too small for this
    GPU.

    ``blocks per SM`` is the grid size over the multiprocessors; below 1, the share 1 - blocks/SM of
    the GPU is empty. Communication kernels do not count (an all-reduce takes 8 blocks by design,
    0.07 per multiprocessor). Neither do persistent kernels, which launch at most one block per
    multiprocessor and loop (``nvjet``, stream-K, Blackwell attention). Norms and reductions do not
    count: they have one block per channel or row, whatever the batch size. The rule is silent when
    the device idles half of the time: a starved GPU makes kernels look small. In public
    launch-bound traces, whose bottleneck is the host, 36 to 78% of kernel time is in small
    kernels."""

    id = "small-grids"
    title = "Kernels are too small to fill the GPU"
    found_in = ("traces/dlrm_8ranks",)
    silent_in = SILENT_TRACES
    validation_note = (
        "silent on A100 (49% of kernel time looks small, but only 19% of compute time is), H100 "
        "(65%, but 7% busy) and B200. Fires on DLRM on V100 (78% of compute time in kernels of "
        "fewer than 80 blocks, counted from the grids)"
    )
    references = (
        "https://docs.nvidia.com/deeplearning/performance/dl-performance-gpu-background/",
        "https://github.com/pytorch/kineto/blob/main/tb_plugin/docs/gpu_utilization.md",
    )

    min_share = Threshold(
        0.20,
        "of compute time; public healthy traces have 4 to 16%, launch-bound ones 36 and more",
        SMALL_GRIDS_TRACES,
    )
    min_busy = kernel_work.MIN_BUSY
    recovered_share = Factor(
        0.5, "of the empty multiprocessors' time that a larger grid wins back", TRIED_ON_TRACES
    )
    worst_recovered_share = Factor(
        0.2,
        "of that time, at worst: fixed costs of a kernel of some microseconds do not shrink",
        TRIED_ON_TRACES,
    )

    fix = (
        "Give each kernel more work. Use a larger micro-batch with fewer accumulation steps, "
        "several small matrices in one batched product, or several small tensors in one foreach "
        "call. Or run independent branches on their own streams."
    )
    code = (
        "# a larger micro-batch, and fewer accumulation steps\n"
        "# keep your other arguments\n"
        "loader = DataLoader(..., batch_size=4 * batch_size)\n\n"
        "# or many small products of one shape in one kernel\n"
        "out = torch.bmm(torch.stack(lefts), torch.stack(rights))"
    )
    verify = "Samples per second rise with the batch size; 'blocks per SM' passes 1."
    falsified_by = "a batch twice as large that takes twice as long"
    confidence = 0.5
    alternatives = "batch"
    assumptions = (_WON_BACK, "a larger batch fits into memory and trains as well")

    inference = {
        "fix": "Give each kernel more work: a larger batch, several small matrices in one batched "
        "product, several small tensors in one foreach call. Or run independent branches on their "
        "own streams.",
        "code": "# a larger batch\n"
        "# keep your other arguments\n"
        "loader = DataLoader(..., batch_size=4 * batch_size)\n\n"
        "# or many small products of one shape in one kernel\n"
        "out = torch.bmm(torch.stack(lefts), torch.stack(rights))",
        "assumptions": (_WON_BACK, "a larger batch fits into memory"),
    }
    framework_advice = in_any_language(
        "Give each launch more work: batch items, split along another dimension, or run "
        "independent kernels on several streams at once."
    )

    def check(self, a: Analysis) -> Outcomes:
        if not kernel_work.is_device_busy(a, self.min_busy):
            return
        gpu = a.trace.gpu
        rows = kernel_work.compute_mask(a)
        blocks = gpu["blocks_per_sm"].fill_null(np.inf).to_numpy()
        is_small = (
            rows & (blocks < 1) & ~name_matches(gpu["name"], kernel_work.PERSISTENT).to_numpy()
        ) & ~kernel_work.family_mask(a, *BY_CHANNEL)
        total = kernel_work.summed_duration(a, rows)
        if not total:
            return
        share = kernel_work.summed_duration(a, is_small) / total
        if share < self.min_share:
            return
        dur = gpu["dur"].to_numpy()[is_small]
        empty = float((dur * (1 - blocks[is_small])).sum())
        empty_share = empty / float(dur.sum())
        families = sorted(set(a.kernels["family"].filter(is_small).drop_nulls().to_list()))
        selected = rows & kernel_work.family_mask(a, *families)
        saved = (empty * part for part in (self.recovered_share, 1.0, self.worst_recovered_share))
        select = Select(on="gpu", kind=("kernel",), family=tuple(families))
        yield Finding(
            summary=(
                f"Kernels with fewer blocks than multiprocessors take {share:.0%} of compute time "
                f"and leave {empty_share:.0%} of the GPU empty: {of_step(a, empty)}."
            ),
            evidence=[
                amount_per_step(a, "time of the empty part of the GPU", empty),
                self.compare("small kernels, share of compute time", share, "min_share"),
                Evidence("of the GPU empty meanwhile", empty_share, "share"),
                amount_per_step(a, "small kernels", int(is_small.sum()), "count"),
                self.compare("device busy", kernel_work.busy_share(a), "min_busy"),
            ],
            where=kernel_work.kernel_locations(a, is_small),
            edits=[kernel_work.scale_kernels(a, selected, saved, select)],
        )

    @staticmethod
    def examples() -> Examples:
        shapes, dtype = [[4096, 4096], [4096, 4096]], "c10::BFloat16"
        pointwise = "void at::native::vectorized_elementwise_kernel<4>"

        def add_all_reduce(b: TraceBuilder) -> None:
            b.run("aten::mm", "ampere_bf16_s16816gemm_bf16_128x128_ldg8_nn", 800, shapes, dtype)
            b.collective("allreduce", 100 << 20, 3000, wait=True)

        def add_persistent_kernel(b: TraceBuilder) -> None:
            kernel = "nvjet_tst_128x256_64x4_1x2_h_bz_coopA_NNT"
            b.run("aten::mm", kernel, 2000, shapes, dtype, blocks=99)

        def add_batch_norm(b: TraceBuilder) -> None:
            kernel = "void at::native::batch_norm_collect_statistics_channels_last_kernel<4>"
            shape = [[8, 32, 512, 512], [32], [32]]
            b.run("aten::native_batch_norm", kernel, 800, shape, dtype, blocks=32)

        def add_late_launches(b: TraceBuilder) -> None:
            for _ in range(20):
                b.run("aten::add", pointwise, 2, [[256], [256]], blocks=1)
                b.host(30)

        return {
            "16 blocks on 108 multiprocessors": example_steps(
                lambda b: b.run(
                    "aten::mm",
                    "ampere_bf16_s16816gemm_bf16_64x64_ldg8_tn",
                    60,
                    [[128, 1024], [1024, 512]],
                    "c10::BFloat16",
                    times=20,
                    blocks=16,
                )
            ),
            "an all-reduce takes few blocks": (
                example_steps(add_all_reduce),
                "share < self.min_share",
            ),
            "one block per channel": (example_steps(add_batch_norm), "share < self.min_share"),
            "persistent kernels": (
                example_steps(add_persistent_kernel, "H100"),
                "share < self.min_share",
            ),
            "the host is late": (example_steps(add_late_launches), "min_busy"),
        }
