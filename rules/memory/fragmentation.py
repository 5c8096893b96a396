"""The allocator holds much more device memory than tensors ever needed."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from advisor.analysis import Analysis
from advisor.model import Evidence, Finding, Outcome, Rule, Worth
from advisor.rules.common import size
from advisor.rules.memory.recorded import capacity, last
from advisor.rules.recorded import record
from advisor.testing import TraceBuilder


class Fragmentation(Rule):
    """PyTorch's allocator holds much more device memory (reserved) than tensors ever filled at one
    time (peak allocated): the rest is split into pieces too small for the next request. With
    shapes that change from step to step this grows until the allocator has to give its whole cache
    back and start again, which stops the device, or until memory runs out although it is there.

    Compared are reserved memory at the end of the steps and the highest allocated memory so far: a
    peak that has passed explains a full cache, and is no fragmentation. Reported where the
    difference is at least a tenth of the device and 30 % of the peak, or where the allocator had to
    retry after the warm-up with a fifth of its memory unused.
    """

    id = "memory-fragmentation"
    title = "Device memory is held in fragments"
    category = "memory"
    reads_record = True
    references = (
        "https://pytorch.org/docs/stable/notes/cuda.html#optimizing-memory-usage-with-pytorch-cuda-alloc-conf",
    )

    min_ratio = 1.3  # reserved over peak allocated; rule catalogue (2 with traceml, of allocated)
    min_device = 0.10  # the difference, of the device's memory
    min_unused = 0.20  # of reserved memory, with retries; rule catalogue

    def check(self, a: Analysis) -> Iterator[Outcome]:
        """Compare what is held with what was needed."""
        recorded = record(a)
        used = recorded.settled
        reserved = last(recorded.column("reserved")[used])
        peak = last(recorded.column("peak")[used])
        allocated = recorded.column("allocated")[used]
        if reserved is None or peak is None or not peak or not reserved:
            return
        total = capacity(a)
        tries = recorded.column("retries")[used]
        tries = tries[~np.isnan(tries)]
        retries = int(tries[-1] - tries[0]) if len(tries) else 0
        loose = reserved - peak
        unused = 1 - (last(allocated) or 0.0) / reserved
        large = total is not None and loose >= self.min_device * total
        if not (large and reserved >= self.min_ratio * peak) and not (
            retries > 0 and unused >= self.min_unused
        ):
            return
        conf = recorded.record.rank.env
        setting = conf.get("PYTORCH_ALLOC_CONF") or conf.get("PYTORCH_CUDA_ALLOC_CONF")
        yield Finding(
            rule=self.id,
            title=self.title,
            summary=(
                f"The allocator holds {size(reserved)}, though tensors never filled more than "
                f"{size(peak)} at a time"
                + (f", and {retries} times it gave its cache back to go on." if retries else ".")
            ),
            evidence=[
                Evidence("reserved", reserved, "bytes"),
                Evidence("peak allocated", peak, "bytes"),
                Evidence("reserved over peak", reserved / peak, "", self.min_ratio,
                         "rule catalogue"),
                Evidence("device memory", total, "bytes"),
                Evidence("retries after the warm-up", retries, "count"),
                Evidence("allocator settings", setting),
            ],
            fix=(
                "Let segments grow and shrink (expandable_segments), and keep shapes the same: pad "
                "sequences to a few lengths, drop the last batch."
            ),
            code=(
                "# shell, before starting (older PyTorch: PYTORCH_CUDA_ALLOC_CONF)\n"
                "export PYTORCH_ALLOC_CONF=expandable_segments:True"
            ),
            check="Record again: reserved memory stays close to the peak, without retries.",
            worth=Worth(
                currency="memory",
                freed_bytes=max(0, round(loose)),
                method="reserved beyond the highest allocated",
            ),
            confidence=0.75,
            falsified_by="the same difference with expandable segments",
        )  # fmt: skip

    @staticmethod
    def fires_on() -> dict[str, TraceBuilder]:
        """Twice the peak; retries."""
        return {
            "70 GB held for 40 GB": _run(70e9, 40e9, 30e9),
            "retries": _run(78e9, 70e9, 50e9, retries=5),
        }

    @staticmethod
    def silent_on() -> dict[str, TraceBuilder]:
        """A passed peak; a small model; full of tensors; retries in the warm-up only."""
        return {
            "a peak that has passed": _run(70e9, 69e9, 20e9),
            "a small model": _run(2e9, 1e9, 1e9),
            "full of tensors": _run(78e9, 77e9, 76e9, retries=3),
            "no device": _run(None, None, None),
        }


def _run(
    reserved: float | None, peak: float | None, allocated: float | None, *, retries: int = 0
) -> TraceBuilder:
    from advisor.rundir import Device

    b = TraceBuilder()
    r = b.record_of_run(devices=[Device(total_bytes=80 * 10**9)])
    for n in range(100):
        told: dict[str, int] = {}
        if reserved is not None and peak is not None and allocated is not None:
            told = {
                "reserved": round(reserved), "peak": round(peak), "allocated": round(allocated),
                "retries": round(retries * n / 99),
            }  # fmt: skip
        r.step(10, fields=told)
    return b
