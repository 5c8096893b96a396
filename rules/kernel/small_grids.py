"""Kernels with fewer blocks than the GPU has multiprocessors."""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar

import numpy as np

from advisor.core.finding import Evidence, Finding, Outcome, Rule, Select, Threshold
from advisor.measure import Analysis
from advisor.measure.host.names import name_matches
from advisor.rules.common import example_steps, figure
from advisor.rules.elsewhere import in_any_language
from advisor.rules.kernel import facts
from advisor.rules.sources import OURS, SILENT_TRACES, SMALL_GRIDS_TRACES
from advisor.testing import TraceBuilder

_WON_BACK = "{part:.0%} of the empty time is won back ({worst_part:.0%} to 100 %)"


class SmallGrids(Rule):
    """A kernel with fewer blocks than the GPU has multiprocessors leaves some of them idle for its
    whole duration. When much of the compute time is like that, the batch is too small for this GPU.

    ``blocks per SM`` is the grid size over the multiprocessors; below 1, the share 1 - blocks/SM of
    the GPU is empty. Communication kernels do not count (an all-reduce takes 8 blocks by design,
    0.07 per multiprocessor). Neither do persistent kernels, which launch at most one block per
    multiprocessor and loop (``nvjet``, stream-K, Blackwell attention). The rule is silent when the
    device idles half of the time: a starved GPU makes kernels look small. In public launch-bound
    traces, whose bottleneck is the host, 36 to 78 % of kernel time is like that.
    """

    id = "small-grids"
    title = "Kernels are too small to fill the GPU"
    category = "kernel"
    found_in = ("traces/dlrm_8ranks",)
    silent_in = SILENT_TRACES
    validated_on = (
        "silent where it must be: A100 (49 % of kernel time looks small, 19 % of compute time is), "
        "H100 (65 %, but 7 % busy), B200; fires on DLRM on V100 (84 % of compute time in kernels "
        "of fewer than 80 blocks, counted from the grids)"
    )
    references = (
        "https://docs.nvidia.com/deeplearning/performance/dl-performance-gpu-background/",
        "https://github.com/pytorch/kineto/blob/main/tb_plugin/docs/gpu_utilization.md",
    )

    min_share = Threshold(
        0.20,
        "of compute time; public healthy traces have 4 to 16 %, launch-bound ones 36 and more",
        SMALL_GRIDS_TRACES,
    )
    min_busy = Threshold(facts.MIN_BUSY, "share of the step the device is busy", SMALL_GRIDS_TRACES)
    part = Threshold(0.5, "of the empty multiprocessors' time that a larger grid wins back", OURS)
    worst_part = Threshold(
        0.2,
        "of that time, at worst: fixed costs of a kernel of some microseconds do not shrink",
        OURS,
    )

    fix = (
        "Give each kernel more work: a larger micro-batch with fewer accumulation steps, several "
        "small matrices in one batched product, several small tensors in one foreach call. Or run "
        "independent branches on their own streams."
    )
    code = (
        "# a larger micro-batch, and fewer accumulation steps\n"
        "loader = DataLoader(dataset, batch_size=4 * batch_size, ...)\n\n"
        "# many small products of one shape in one kernel\n"
        "out = torch.bmm(torch.stack(lefts), torch.stack(rights))"
    )
    verify = "Samples per second rise with the batch size; 'blocks per SM' passes 1."
    falsified_by = "a batch twice as large that takes twice as long"
    confidence = 0.5
    alternatives = "batch"
    assumptions = (_WON_BACK, "a larger batch fits into memory and trains as well")

    inference: ClassVar = {
        "fix": "Give each kernel more work: a larger batch, several small matrices in one batched "
        "product, several small tensors in one foreach call. Or run independent branches on their "
        "own streams.",
        "code": "# a larger batch\n"
        "loader = DataLoader(dataset, batch_size=4 * batch_size, ...)\n\n"
        "# many small products of one shape in one kernel\n"
        "out = torch.bmm(torch.stack(lefts), torch.stack(rights))",
        "assumptions": (_WON_BACK, "a larger batch fits into memory"),
    }
    elsewhere: ClassVar = in_any_language(
        "Give each launch more work: batch items, split along another dimension, or run "
        "independent kernels on several streams at once."
    )

    def check(self, a: Analysis) -> Iterator[Outcome]:
        """Time of compute kernels with less than one block per multiprocessor."""
        if not facts.is_busy(a, self.min_busy):
            return
        gpu = a.trace.gpu
        rows = facts.compute_rows(a)
        blocks = gpu["blocks_per_sm"].fill_null(np.inf).to_numpy()
        small = rows & (blocks < 1) & ~name_matches(gpu["name"], facts.PERSISTENT).to_numpy()
        total = facts.duration(a, rows)
        if not total:
            return
        share = facts.duration(a, small) / total
        if share < self.min_share:
            return
        dur = gpu["dur"].to_numpy()[small]
        empty = float((dur * (1 - blocks[small])).sum())
        empty_share = empty / float(dur.sum())
        families = sorted(set(a.kernels["family"].filter(small).drop_nulls().to_list()))
        selected = rows & facts.of_family(a, *families)
        saved = (empty * part for part in (self.part, 1.0, self.worst_part))
        select = Select(on="gpu", kind=("kernel",), family=tuple(families))
        yield Finding(
            summary=(
                f"Kernels with fewer blocks than multiprocessors take {share:.0%} of compute time "
                f"and leave {empty_share:.0%} of the GPU empty."
            ),
            evidence=[
                Evidence(
                    "small kernels, share of compute time", share, "share", *self.limit("min_share")
                ),
                Evidence("of the GPU empty meanwhile", empty_share, "share"),
                figure(a, "small kernels", int(small.sum()), "count"),
                Evidence("device busy", facts.busy_share(a), "share", *self.limit("min_busy")),
            ],
            where=facts.locations(a, small),
            edits=[facts.scale_kernels(a, selected, saved, select)],
        )

    @staticmethod
    def fires_on() -> dict[str, TraceBuilder]:
        """A busy device whose kernels have an eighth of the blocks they need."""
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
            )
        }

    @staticmethod
    def silent_on() -> dict[str, tuple[TraceBuilder, str]]:
        """Communication, persistent kernels, and a device that waits for the host."""
        shapes, dtype = [[4096, 4096], [4096, 4096]], "c10::BFloat16"
        pointwise = "void at::native::vectorized_elementwise_kernel<4>"

        def communicate(b: TraceBuilder) -> None:
            b.run("aten::mm", "ampere_bf16_s16816gemm_bf16_128x128_ldg8_nn", 800, shapes, dtype)
            b.collective("allreduce", 100 << 20, 3000, wait=True)

        def persist(b: TraceBuilder) -> None:
            kernel = "nvjet_tst_128x256_64x4_1x2_h_bz_coopA_NNT"
            b.run("aten::mm", kernel, 2000, shapes, dtype, blocks=99)

        def starve(b: TraceBuilder) -> None:
            for _ in range(20):
                b.run("aten::add", pointwise, 2, [[256], [256]], blocks=1)
                b.host(30)

        return {
            "an all-reduce takes few blocks": (
                example_steps(communicate),
                "share < self.min_share",
            ),
            "persistent kernels": (example_steps(persist, "H100"), "share < self.min_share"),
            "the host is late": (example_steps(starve), "min_busy"),
        }
