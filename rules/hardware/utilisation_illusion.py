"""NVML says 100 % utilised, and most of the GPU does nothing."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from advisor.core.finding import Evidence, Finding, Outcome, Rule, Threshold
from advisor.core.run_directory import Gpu
from advisor.measure import Analysis
from advisor.rules.recorded import measure_it, record
from advisor.rules.sources import CHOSEN, TRACELENS
from advisor.testing import TraceBuilder


class UtilisationIllusion(Rule):
    """Monitors show the GPU as fully utilised, but utilisation is the share of time in which any
    kernel runs, be it on one of a hundred multiprocessors. Where NVML says 90 % or more and less
    than half of the multiprocessors are active (GPM, Hopper and later), the GPU has room for more
    work.

    Memory-bound work reaches little of the arithmetic peak and is no illusion: with GPM, DRAM busy
    for 60 % or more of the time rules the finding out.
    """

    id = "utilisation-illusion"
    title = "The GPU is shown as fully utilised, but most of it is idle"
    category = "hardware"
    reads_record = True
    references = (
        "https://docs.nvidia.com/deploy/nvml-api/structnvmlUtilization__t.html",
        "https://arxiv.org/abs/2501.16909",
    )

    min_utilisation = Threshold(90.0, "%, mean", CHOSEN)
    max_active = Threshold(50.0, "% of the multiprocessors", CHOSEN)
    max_dram = Threshold(60.0, "% of the time DRAM is busy: above, memory is the limit", TRACELENS)
    min_samples = Threshold(5, "samples", CHOSEN)

    fix = (
        "Give the device more work at a time: a larger batch, fused kernels, fewer small "
        "launches (torch.compile, CUDA graphs); the findings of a profiled window say "
        "which."
    )
    verify = "The share of active multiprocessors rises, with more samples a second."
    falsified_by = "a profiled window whose kernels fill the device"
    confidence = 0.8

    def check(self, a: Analysis) -> Iterator[Outcome]:
        """Compare utilisation with activity."""
        recorded = record(a)
        both = [
            (gpu.utilisation, gpu.gpm)
            for gpu in recorded.gpus
            if gpu.utilisation is not None and gpu.gpm and "sm_util" in gpu.gpm
        ]
        if len(both) < self.min_samples:
            return
        used = float(np.mean([value for value, _ in both]))
        active = float(np.mean([gpm["sm_util"] for _, gpm in both]))
        dram = [gpm["dram"] for _, gpm in both if "dram" in gpm]
        memory = float(np.mean(dram)) if dram else None
        tensor = [gpm["tensor"] for _, gpm in both if "tensor" in gpm]
        if used < self.min_utilisation or active >= self.max_active:
            return
        if memory is not None and memory >= self.max_dram:
            return
        yield Finding(
            summary=(
                f"NVML shows {used:.0f} % utilisation, while {active:.0f} % of the "
                "multiprocessors are active: some kernel runs nearly always, but on a part of the "
                "device."
            ),
            evidence=[
                Evidence("utilisation (NVML), %", used, "", *self.limit("min_utilisation")),
                Evidence("multiprocessors active (GPM), %", active, "", *self.limit("max_active")),
                Evidence("DRAM busy (GPM), %", memory, "", *self.limit("max_dram")),
                Evidence("tensor cores busy (GPM), %", float(np.mean(tensor)) if tensor else None),
                Evidence("samples", len(both), "count", *self.limit("min_samples")),
            ],
            worth=measure_it("how much of the room can be used, the kernels' findings say"),
        )

    @staticmethod
    def fires_on() -> dict[str, TraceBuilder]:
        """99 % utilised, 20 % active."""
        return {"a fifth of the device": _run(99, 20)}

    @staticmethod
    def silent_on() -> dict[str, tuple[TraceBuilder, str]]:
        """Really busy; idle and shown so; bound by memory; no GPM."""
        return {
            "really busy": (_run(99, 85), "max_active"),
            "shown as idle": (_run(30, 10), "min_utilisation"),
            "bound by memory": (_run(99, 40, dram=80), "max_dram"),
            "no GPM": (_run(99, None), "len(both) < self.min_samples"),
        }


def _run(used: int, active: float | None, *, dram: float = 10) -> TraceBuilder:
    b = TraceBuilder()
    r = b.record_of_run()
    r.steps(60, 10)
    gpm = None if active is None else {"sm_util": active, "dram": dram, "tensor": 5.0}
    r.watch(gpu=Gpu(uuid="GPU-x", utilisation=used, gpm=gpm))
    return b
