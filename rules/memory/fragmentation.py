"""The allocator holds much more device memory than tensors ever needed."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from typing import ClassVar

import numpy as np

from advisor.core import text as t
from advisor.core.finding import Evidence, Finding, Impact, Outcome, Rule, Threshold
from advisor.measure import Analysis
from advisor.measure.memory.fragments import fragments, placement
from advisor.rules.memory.recorded import GIB, capacity, last
from advisor.rules.recorded import record
from advisor.rules.sources import CHOSEN
from advisor.testing import TraceBuilder


class Fragmentation(Rule):
    """PyTorch's allocator holds much more device memory (reserved) than tensors ever filled at one
    time (peak allocated): the rest is split into pieces too small for the next request. With
    shapes that change from step to step this grows until the allocator has to give its whole cache
    back and start again, which stops the device, or until memory runs out although it is there.

    Compared are reserved memory at the end of the steps and the highest allocated memory so far: a
    peak that has passed explains a full cache, and is no fragmentation. Reported where the
    difference is at least a tenth of the device and reserved memory 1.3 times the peak, or where
    the allocator had to retry after the warm-up with a fifth of its memory unused.

    With a memory snapshot: where a request failed although as much was free in its pool and stream,
    but in no one piece; or where a fifth of the reserved memory, and 1 GiB, is free in segments
    that also hold tensors. What expandable segments free is then counted in whole pages.
    """

    id = "memory-fragmentation"
    title = "Device memory is held in fragments"
    category = "memory"
    knobs = ("expandable-segments",)
    reads_record = True
    reads_snapshot = True
    references = (
        "https://pytorch.org/docs/stable/notes/cuda.html#optimizing-memory-usage-with-pytorch-cuda-alloc-conf",
    )

    min_ratio = Threshold(1.3, "reserved over peak allocated", CHOSEN)
    min_device = Threshold(0.10, "the difference, of the device's memory", CHOSEN)
    min_split = Threshold(1.0, "GiB free beside tensors in a snapshot", CHOSEN)
    min_unused = Threshold(0.20, "of reserved memory, with retries", CHOSEN)

    fix = (
        "Let segments grow and shrink (expandable_segments), and keep shapes the same: pad "
        "sequences to a few lengths, drop the last batch."
    )
    code = (
        "# shell, before starting (older PyTorch: PYTORCH_CUDA_ALLOC_CONF)\n"
        "export PYTORCH_ALLOC_CONF=expandable_segments:True"
    )
    verify = "Record again: reserved memory stays close to the peak, without retries."
    falsified_by = "the same difference with expandable segments"
    confidence = 0.75
    cases: ClassVar = {
        "of a snapshot": {
            "verify": "Take a snapshot again: what is free beside tensors has gone.",
            "confidence": 0.7,
            "assumptions": (
                "tensors stay where they are; whole pages are given back, 20 MiB in the large pool "
                "and 2 MiB in the small one",
            ),
            "falsified_by": "as much free beside tensors with expandable segments",
        },
        "of a snapshot in which a request failed": {"confidence": 0.8},
    }

    def check(self, a: Analysis) -> Iterator[Outcome]:
        """Compare what is held with what was needed."""
        found = list(self._of_snapshot(a))
        yield from found
        if found or a.recorded is None:
            return
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
            summary=(
                f"The allocator holds {t.format_bytes(reserved)}, though tensors never filled "
                "more than "
                f"{t.format_bytes(peak)} at a time"
                + (f", and {retries} times it gave its cache back to go on." if retries else ".")
            ),
            evidence=[
                Evidence("reserved", reserved, "bytes"),
                Evidence("peak allocated", peak, "bytes"),
                Evidence("reserved over peak", reserved / peak, "", *self.limit("min_ratio")),
                Evidence("device memory", total, "bytes"),
                Evidence("retries after the warm-up", retries, "count"),
                Evidence("allocator settings", setting),
            ],
            impact=Impact(
                currency="memory",
                freed_bytes=max(0, round(loose)),
                method="reserved beyond the highest allocated",
            ),
        )

    def _of_snapshot(self, a: Analysis) -> Iterator[Finding]:
        """Free memory that a failed request could not use because it is in pieces; or, where none
        failed, much that is free beside tensors."""
        for post in a.post_mortems:
            found, placed = fragments(post), placement(post)
            if found is None:
                continue
            failed = placed is not None and placed.scattered and placed.fits_expandable
            reserved = int(post.history.reserved[-1])
            crowded = placed is not None and not failed
            least = max(self.min_unused * max(reserved, 1), self.min_split * GIB)
            if not failed and (crowded or found.split < least):
                continue
            case = self.case("of a snapshot")
            if failed:
                case |= self.case("of a snapshot in which a request failed")
            yield Finding(
                summary=(
                    f"{t.format_bytes(found.split)} of the {t.format_bytes(reserved)} reserved "
                    "are free in "
                    "segments that also hold tensors, the largest piece "
                    f"{t.format_bytes(found.largest)}"
                    + (
                        f": a request of {t.format_bytes(placed.request)} failed beside them."
                        if failed and placed is not None
                        else "."
                    )
                ),
                evidence=[
                    Evidence(
                        "free beside tensors", found.split, "bytes", *self.limit("min_split", GIB)
                    ),
                    Evidence(
                        "of what is reserved",
                        found.split / max(reserved, 1),
                        "share",
                        *self.limit("min_unused"),
                    ),
                    Evidence("largest free block", found.largest, "bytes"),
                    Evidence("lost to rounding", found.rounding, "bytes"),
                    Evidence("whole pages in the pieces", found.expandable, "bytes"),
                    Evidence(
                        "allocator settings",
                        a.snapshot.settings.get("PYTORCH_CUDA_ALLOC_CONF") or None
                        if a.snapshot is not None
                        else None,
                    ),
                ],
                impact=Impact(
                    currency="memory",
                    freed_bytes=found.expandable,
                    method="whole pages of the free blocks",
                ),
                **case,
            )

    @staticmethod
    def fires_on() -> dict[str, TraceBuilder]:
        """Twice the peak; retries."""
        return {
            "70 GB held for 40 GB": _run(70e9, 40e9, 30e9),
            "retries": _run(78e9, 70e9, 50e9, retries=5),
            "a snapshot with holes": _holes(keep=True),
        }

    @staticmethod
    def silent_on() -> dict[str, tuple[TraceBuilder, str]]:
        """A passed peak; a small model; full of tensors; retries in the warm-up only."""
        return {
            "a peak that has passed": (
                _run(70e9, 69e9, 20e9),
                "not (retries > 0 and unused >= self.min_unused)",
            ),
            "a small model": (_run(2e9, 1e9, 1e9), "min_device"),
            "full of tensors": (_run(78e9, 77e9, 76e9, retries=3), "min_unused"),
            "no device": (_run(None, None, None), "reserved is None"),
            "a snapshot without holes": (_holes(keep=False), "a.recorded is None"),
        }


def _run(
    reserved: float | None, peak: float | None, allocated: float | None, *, retries: int = 0
) -> TraceBuilder:
    from advisor.core.run_directory import Device

    b = TraceBuilder()
    r = b.record_of_run(devices=[Device(total_bytes=80 * 10**9)])
    for n in range(100):
        told: dict[str, int] = {}
        if reserved is not None and peak is not None and allocated is not None:
            told = {
                "reserved": round(reserved),
                "peak": round(peak),
                "allocated": round(allocated),
                "retries": round(retries * n / 99),
            }
        r.step(10, fields=told)
    return b


def _holes(*, keep: bool) -> TraceBuilder:
    """Ten segments of 64 MiB with 4 MiB in the middle of each, then 80 MiB are asked for. Not
    kept: nothing is in them, and they are given back."""
    from advisor.testing.allocator import LOOP, MIB, Allocator, DeviceFull

    m = Allocator(total=640 * MIB)
    with m.at(*LOOP):
        done = []
        for whole in [m.alloc(64 * MIB) for _ in range(10)]:
            m.free(whole)
            done.append([m.alloc(size * MIB) for size in (30, 4, 30)])
        for left, middle, right in done:
            for address in (left, right) if keep else (left, middle, right):
                m.free(address)
        with suppress(DeviceFull):
            m.alloc(80 * MIB)
    b = TraceBuilder()
    b.memory_snapshot(m)
    return b
