"""The GPU's PCIe link is slower than it could be."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from advisor.core.finding import Edit, Evidence, Finding, Outcome, Rule, Select, Threshold
from advisor.core.run_directory import Gpu
from advisor.measure import Analysis
from advisor.rules.recorded import measure_it, record, under_load
from advisor.rules.sources import CHOSEN
from advisor.testing import TraceBuilder


class PcieDowngraded(Rule):
    """The PCIe link runs with fewer lanes, or at an older generation, than GPU and slot allow:
    copies between host and device take that much longer. A card that is not seated well, a riser,
    or a BIOS setting are the usual causes.

    Only samples under load count, because idle GPUs lower the link's speed to save power; it has to
    be lower in most of them. What the slot allows is as the driver tells it.
    """

    id = "pcie-downgraded"
    title = "The GPU's PCIe link is slower than it could be"
    category = "hardware"
    reads_record = True
    references = ("https://docs.nvidia.com/deploy/nvidia-smi/index.html",)

    min_samples = Threshold(2, "samples: the link is asked for every few seconds only", CHOSEN)
    min_share = Threshold(0.50, "of the samples under load that tell the link", CHOSEN)

    fix = "Seat the card again, try another slot or riser, look at the BIOS's link settings."
    code = (
        "nvidia-smi --format=csv --query-gpu=pcie.link.gen.current\n"
        "nvidia-smi --format=csv --query-gpu=pcie.link.width.current"
    )
    verify = "Record again: the link is at its best under load."
    falsified_by = "the same copy bandwidth with the faster link"
    confidence = 0.85

    def check(self, a: Analysis) -> Iterator[Outcome]:
        """Compare the link with what it could be."""
        told = [
            (gpu.pcie_gen, gpu.pcie_width, gpu.pcie_gen_max, gpu.pcie_width_max)
            for gpu in under_load(record(a))
            if gpu.pcie_gen and gpu.pcie_width and gpu.pcie_gen_max and gpu.pcie_width_max
        ]
        if len(told) < self.min_samples:
            return
        speeds = [_speed(gen, width) / _speed(most, wide) for gen, width, most, wide in told]
        low = [speed < 0.99 for speed in speeds]
        if float(np.mean(low)) < self.min_share:
            return
        ratio = float(np.median([speed for speed in speeds if speed < 0.99]))
        gen, width, most, wide = told[low.index(True)]
        finding = Finding(
            summary=(
                f"Under load the link is PCIe {gen} x{width}, where {most} x{wide} is possible: "
                f"{ratio:.0%} of the speed for every copy between host and device."
            ),
            evidence=[
                Evidence("link", f"PCIe {gen} x{width}"),
                Evidence("possible", f"PCIe {most} x{wide}"),
                Evidence("share of the speed", ratio, "share"),
                Evidence(
                    "samples under load with the slower link",
                    float(np.mean(low)),
                    "share",
                    *self.limit("min_share"),
                ),
            ],
        )
        if a.device_id is not None:
            finding.edits = [
                Edit(
                    op="scale",
                    select=Select(on="gpu", kind=("memcpy",), copy=("HtoD", "DtoH")),
                    factor=ratio,
                )
            ]
        else:
            finding.worth = measure_it("how long copies take is not in the record")
        yield finding

    @staticmethod
    def fires_on() -> dict[str, TraceBuilder]:
        """Half the lanes; an older generation, with copies in the trace."""
        return {"eight lanes": _run(4, 8), "generation 3": _run(3, 16, trace=True)}

    @staticmethod
    def silent_on() -> dict[str, tuple[TraceBuilder, str]]:
        """At its best; idle; not told."""
        return {
            "at its best": (_run(4, 16), "float(np.mean(low)) < self.min_share"),
            "idle": (_run(1, 16, load=2), "len(told) < self.min_samples"),
            "not told": (_run(None, None), "len(told) < self.min_samples"),
        }


def _speed(generation: int, width: int) -> float:
    """Relative speed of a link: every generation doubles it."""
    return float(2.0 ** min(generation, 12) * width)


def _run(
    generation: int | None, width: int | None, *, load: int = 98, trace: bool = False
) -> TraceBuilder:
    b = TraceBuilder()
    for _ in range(4 if trace else 0):
        with b.step():
            b.copy("HtoD", 60_000_000, blocking=True)
            b.run("aten::mm", "ampere_sgemm_128x64_nn", 2000)
            b.sync()
    r = b.record_of_run()
    r.steps(60, 10)
    r.watch(
        gpu=Gpu(
            uuid="GPU-x",
            utilisation=load,
            pcie_gen=generation,
            pcie_width=width,
            pcie_gen_max=4,
            pcie_width_max=16,
        )
    )
    return b
