"""Other processes use the GPU."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from advisor.core import text as t
from advisor.core.finding import Evidence, Finding, Outcome, Rule, Threshold
from advisor.core.run_directory import Gpu
from advisor.measure import Analysis
from advisor.rules.memory.recorded import capacity
from advisor.rules.recorded import measure_it, record
from advisor.rules.sources import CHOSEN
from advisor.testing import TraceBuilder


class GpuShared(Rule):
    """Other processes have a context on the GPU: they take memory, and while they compute, this one
    waits, because kernels of different processes take turns.

    The recorder asks the driver for the processes on the GPU and leaves out its own and its
    children. In a container their numbers may be another's, and then nothing is known. A context
    that only holds a little memory, such as a display or a monitor, does not count: together they
    have to hold 5 % of the device.
    """

    id = "gpu-shared"
    title = "Other processes use the GPU"
    category = "hardware"
    reads_record = True
    references = ("https://docs.nvidia.com/deploy/mps/index.html",)

    min_memory = Threshold(
        0.05, "of the device, held by others: contexts of monitors take less", CHOSEN
    )
    min_samples = Threshold(0.20, "of the samples that tell", CHOSEN)

    fix = (
        "Have the scheduler give the GPU to one job (exclusive mode), end what is left "
        "over from earlier runs, or split the GPU on purpose (MIG)."
    )
    code = "nvidia-smi --query-compute-apps=pid,used_memory,name --format=csv"
    verify = "Record again, alone on the GPU: step times are even and shorter."
    falsified_by = "the same median step alone on the GPU"
    confidence = 0.8

    def check(self, a: Analysis) -> Iterator[Outcome]:
        """Look at the memory of others over the run."""
        recorded = record(a)
        told = [gpu for gpu in recorded.gpus if gpu.processes is not None]
        total = capacity(a)
        if not told or not total:
            return
        held = np.array([gpu.processes_bytes or 0 for gpu in told], dtype=np.float64)
        share = float(np.mean(held >= self.min_memory * total))
        if share < self.min_samples:
            return
        most = max(gpu.processes or 0 for gpu in told)
        who = "other process holds" if most == 1 else "other processes hold"
        yield Finding(
            summary=(
                f"Up to {most} {who} {t.memory(float(held.max()))} of the device's "
                f"{t.memory(total)} during {share:.0%} of the run."
            ),
            evidence=[
                Evidence("other processes, at most", most, "count"),
                Evidence(
                    "memory that they hold, at most",
                    float(held.max()),
                    "bytes",
                    *self.limit("min_memory", total),
                ),
                Evidence("samples with them", share, "share", *self.limit("min_samples")),
            ],
            worth=measure_it("how long the others computed is not in the record"),
        )

    @staticmethod
    def fires_on() -> dict[str, TraceBuilder]:
        """Another process with 20 GB."""
        return {"another training run": _run(1, 20 * 10**9)}

    @staticmethod
    def silent_on() -> dict[str, tuple[TraceBuilder, str]]:
        """Alone; a display; not known."""
        return {
            "alone": (_run(0, 0), "share < self.min_samples"),
            "a monitor": (_run(1, 300 * 10**6), "min_memory"),
            "not known": (_run(None, None), "not told"),
        }


def _run(processes: int | None, held: int | None) -> TraceBuilder:
    b = TraceBuilder()
    r = b.record_of_run()
    r.steps(60, 10)
    r.watch(
        gpu=Gpu(uuid="GPU-x", memory_total=80 * 10**9, processes=processes, processes_bytes=held)
    )
    return b
