"""Kernels with fewer blocks than the GPU has multiprocessors."""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar

import numpy as np

from advisor.core.finding import Evidence, Finding, Outcome, Rule, Select, Threshold
from advisor.measure import Analysis
from advisor.measure.host.names import name_matches
from advisor.rules.common import figure
from advisor.rules.elsewhere import in_any_language
from advisor.rules.kernel import facts
from advisor.rules.sources import OURS, SMALL_GRIDS_TRACES
from advisor.testing import TraceBuilder


class SmallGrids(Rule):
    """A kernel with fewer blocks than the GPU has multiprocessors leaves some of them without
    work for its whole duration. When much of the compute time is like that, the batch is too
    small for this GPU.

    ``blocks per SM`` is grid size over multiprocessors; below 1 the share 1 - blocks/SM of the GPU
    is empty. Left out: communication kernels (an all-reduce takes 8 blocks by design, 0.07 a
    multiprocessor), and persistent kernels, which launch at most one block a multiprocessor and
    loop (``nvjet``, stream-K, Blackwell attention). When the device is idle half of the time the
    rule is silent: starvation makes kernels look small, and 36 to 78 % of kernel time is like that
    in public launch-bound traces whose problem is the host.
    """

    id = "small-grids"
    title = "Kernels are too small to fill the GPU"
    category = "kernel"
    found_in = ("traces/dlrm_8ranks",)
    silent_in = (
        "traces/a100_train_6steps",
        "traces/v100_train_copy_heavy",
        "traces/two_ranks_rank0",
        "traces/b200_eager",
    )
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
        "Give each kernel more to do: a larger micro-batch (with fewer accumulation "
        "steps), several small matrices in one batched product, several small tensors in "
        "one foreach call; or run independent branches on their own streams."
    )
    code = (
        "# loader = DataLoader(dataset, batch_size=4 * batch_size, ...), and fewer\n"
        "# accumulation steps; many small products of one shape in one kernel:\n"
        "out = torch.bmm(torch.stack(lefts), torch.stack(rights))"
    )
    verify = "Samples a second rise with the batch size; 'blocks per SM' passes 1."
    falsified_by = "a batch twice as large takes twice as long"
    confidence = 0.5
    alternatives = "batch"

    assumptions = (
        "{part:.0%} of the empty time is won back ({worst_part:.0%} to 100 %)",
        "a larger batch fits into memory and trains as well",
    )

    inference: ClassVar = {
        "fix": "Give each kernel more to do: a larger batch, several small matrices in one batched "
        "product, several small tensors in one foreach call; or run independent branches on their "
        "own streams.",
        "code": "# loader = DataLoader(dataset, batch_size=4 * batch_size, ...)\n"
        "# many small products of one shape in one kernel:\n"
        "out = torch.bmm(torch.stack(lefts), torch.stack(rights))",
        "assumptions": (
            "{part:.0%} of the empty time is won back ({worst_part:.0%} to 100 %)",
            "a larger batch fits into memory",
        ),
    }
    elsewhere: ClassVar = in_any_language(
        "Give each launch more to do: batch items, split along another dimension, or run "
        "independent kernels on several streams at once."
    )

    def check(self, a: Analysis) -> Iterator[Outcome]:
        """Time of compute kernels with less than one block a multiprocessor."""
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
        families = sorted(set(a.kernels["family"].filter(small).drop_nulls().to_list()))
        selected = rows & facts.of_family(a, *families)
        saved = (empty * part for part in (self.part, 1.0, self.worst_part))
        select = Select(on="gpu", kind=("kernel",), family=tuple(families))
        yield Finding(
            summary=(
                f"{share:.0%} of compute time runs kernels with fewer blocks than the GPU has "
                f"multiprocessors; {empty / dur.sum():.0%} of the GPU is empty meanwhile."
            ),
            evidence=[
                Evidence(
                    "compute time with less than one block a multiprocessor",
                    share,
                    "share",
                    *self.limit("min_share"),
                ),
                Evidence("of the GPU empty meanwhile", empty / float(dur.sum()), "share"),
                figure(a, "such kernels", int(small.sum()), "count"),
                Evidence("device busy", facts.busy_share(a), "share", *self.limit("min_busy")),
            ],
            where=facts.locations(a, small),
            edits=[facts.scale_kernels(a, selected, saved, select)],
        )

    @staticmethod
    def fires_on() -> dict[str, TraceBuilder]:
        """A busy device whose kernels have an eighth of the blocks they need."""
        b = TraceBuilder()
        for _ in range(4):
            with b.step():
                for _ in range(20):
                    with b.op("aten::mm", [[128, 1024], [1024, 512]], "c10::BFloat16"):
                        b.launch("ampere_bf16_s16816gemm_bf16_64x64_ldg8_tn", 60, blocks=16)
                b.sync()
        return {"16 blocks on 108 multiprocessors": b}

    @staticmethod
    def silent_on() -> dict[str, tuple[TraceBuilder, str]]:
        """Communication, persistent kernels, and a device that waits for the host."""
        comm = TraceBuilder()
        persistent = TraceBuilder("H100")
        starved = TraceBuilder()
        for _ in range(4):
            with comm.step():
                with comm.op("aten::mm", [[4096, 4096], [4096, 4096]], "c10::BFloat16"):
                    comm.launch("ampere_bf16_s16816gemm_bf16_128x128_ldg8_nn", 800)
                comm.collective("allreduce", 100 << 20, 3000, wait=True)
                comm.sync()
            with persistent.step():
                with persistent.op("aten::mm", [[4096, 4096], [4096, 4096]], "c10::BFloat16"):
                    persistent.launch("nvjet_tst_128x256_64x4_1x2_h_bz_coopA_NNT", 2000, blocks=99)
                persistent.sync()
            with starved.step():
                for _ in range(20):
                    with starved.op("aten::add", [[256], [256]], "float"):
                        starved.launch(
                            "void at::native::vectorized_elementwise_kernel<4>", 2, blocks=1
                        )
                    starved.host(30)
                starved.sync()
        return {
            "an all-reduce takes few blocks": (comm, "share < self.min_share"),
            "persistent kernels": (persistent, "share < self.min_share"),
            "the host is late": (starved, "min_busy"),
        }
