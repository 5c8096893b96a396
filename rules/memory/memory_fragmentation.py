"""The allocator holds much more GPU memory than tensors ever needed."""

from collections.abc import Iterator
from contextlib import suppress

import numpy as np

from advisor.core import text as t
from advisor.core.auxiliary_inputs import SNAPSHOT
from advisor.core.finding import Finding, Outcomes, impact_memory
from advisor.core.memory_changes import EXPANDABLE
from advisor.core.rule import Evidence, Rule, Threshold
from advisor.measure import Analysis
from advisor.measure.memory.allocator_replay import (
    Fragments,
    explain_placement,
    measure_fragments,
    measure_repacking,
    measure_repacking_at_end,
)
from advisor.measure.memory.peak_memory import PeakMemory
from advisor.measure.memory.trace_memory import gpu_capacity
from advisor.rules.support.citations import CHOSEN, public_traces
from advisor.rules.support.common import run_steps_of
from advisor.rules.support.device_memory import GIB, last_known, snapshot_example
from advisor.testing import Examples, TraceBuilder


class MemoryFragmentation(Rule):
    """PyTorch's allocator holds much more GPU memory (reserved) than tensors ever filled at one
    time (peak allocated). The difference is split into pieces too small for the next request. With
    shapes that change from step to step it grows. In the end the allocator releases its whole cache
    and starts again, which stalls the GPU. Or memory runs out although enough is free.

    The rule compares reserved memory at the end of the steps with the highest allocated memory so
    far. A past peak explains a full cache, and is not fragmentation. It reports a difference of at
    least a tenth of the GPU's memory where reserved memory is 1.3 times the peak. It also reports
    an allocator that had to retry after the warm-up with a fifth of its memory unused.

    With a memory snapshot that has a history, the history is replayed in a model of the allocator,
    with expandable segments and without. The rule reports a request that failed although its pool
    and stream had as much free, but in no single piece. The request must be one that expandable
    segments would have met. It also reports where they would have reserved 5% and 1 GiB less at the
    peak. The same holds for the moment of the snapshot, where a fifth of reserved memory is free in
    segments that also hold tensors. There steps must not recur: memory that is free after a step is
    cache, which the next step fills. Without a history the two look the same."""

    id = "memory-fragmentation"
    title = "GPU memory is fragmented"
    verdict_role = "memory state"
    knobs = ("expandable-segments",)
    reads_record = True
    auxiliary_inputs = (SNAPSHOT,)
    found_in = public_traces("memory/h100_fragments")
    silent_in = public_traces("memory/h100_leak memory/h100_training")
    validation_note = "a snapshot of large blocks with small ones between them"
    references = (
        "https://pytorch.org/docs/stable/notes/cuda.html#optimizing-memory-usage-with-pytorch-cuda-alloc-conf",
    )

    min_ratio = Threshold(1.3, "reserved over peak allocated", CHOSEN)
    min_device = Threshold(0.10, "the difference, of the GPU's memory", CHOSEN)
    min_split = Threshold(1.0, "GiB that expandable segments free in a snapshot", CHOSEN)
    min_freed = Threshold(0.05, "of what is reserved in a snapshot", CHOSEN)
    min_unused = Threshold(
        0.20,
        "of reserved memory, with retries, or between tensors when a snapshot was taken",
        CHOSEN,
    )

    fix = (
        "Let segments grow and shrink (expandable_segments). Keep shapes the same: pad sequences "
        "to a few lengths, and drop the last batch."
    )
    code = EXPANDABLE
    verify = "Record again: reserved memory stays close to the peak, without retries."
    falsified_by = "the same difference with expandable segments"
    confidence = 0.75
    cases = {
        "of a snapshot": {
            "verify": "Take a snapshot again: reserved memory at the peak is lower.",
            "confidence": 0.8,
            "falsified_by": "as much reserved at the peak with expandable segments",
        },
        "of a snapshot in which a request failed": {"confidence": 0.8},
        "when the snapshot was taken": {
            "fix": "Let segments grow and shrink (expandable_segments), so that larger requests "
            "can use the free memory. Or allocate what stays before what is freed.",
            "verify": "Take a snapshot at the same place: less is reserved.",
            "confidence": 0.8,
            "falsified_by": "a program that asks for the same small pieces again",
        },
    }

    def check(self, a: Analysis) -> Outcomes:
        findings = list(self._check_snapshot(a))
        yield from findings
        if findings or a.run_steps is None:
            return
        run_steps = run_steps_of(a)
        counted = run_steps.after_warmup
        reserved = last_known(run_steps.column("reserved")[counted])
        peak = last_known(run_steps.column("peak")[counted])
        allocated = run_steps.column("allocated")[counted]
        if reserved is None or peak is None or not peak or not reserved:
            return
        total = gpu_capacity(a)
        retry_counts = run_steps.column("retries")[counted]
        retry_counts = retry_counts[~np.isnan(retry_counts)]
        retries = int(retry_counts[-1] - retry_counts[0]) if len(retry_counts) else 0
        difference = reserved - peak
        unused_share = 1 - (last_known(allocated) or 0.0) / reserved
        is_large = total is not None and difference >= self.min_device * total
        if not (is_large and reserved >= self.min_ratio * peak) and not (
            retries > 0 and unused_share >= self.min_unused
        ):
            return
        env = run_steps.rank_record.rank.env
        setting = env.get("PYTORCH_ALLOC_CONF") or env.get("PYTORCH_CUDA_ALLOC_CONF")
        yield Finding(
            summary=(
                f"The allocator holds {t.format_bytes(reserved)}, but tensors never filled more "
                f"than {t.format_bytes(peak)}."
                + (f" It released its cache and retried {retries} times." if retries else "")
            ),
            evidence=[
                Evidence("memory reserved", reserved, "bytes"),
                Evidence("peak memory allocated", peak, "bytes"),
                self.compare("reserved over peak allocated", reserved / peak, "min_ratio", ""),
                Evidence("GPU memory", total, "bytes"),
                Evidence("retries after the warm-up", retries, "count"),
                Evidence("allocator settings", setting),
            ],
            impact=impact_memory(
                max(0, round(difference)), "reserved beyond the highest allocated"
            ),
        )

    def _check_snapshot(self, a: Analysis) -> Iterator[Finding]:
        """Report free memory that a failed request could not use because it is in pieces. If none
        failed, report the pieces reserved at the peak that no request could use."""
        for peak in a.peak_memories:
            pieces, placed, packed = (
                measure_fragments(peak),
                explain_placement(peak),
                measure_repacking(peak),
            )
            if pieces is None:
                continue
            if packed is None:
                yield from self._check_end(peak, pieces)
                continue
            failed = placed is not None and placed.scattered and packed.helps
            limit = max(self.min_freed * peak.reserved, self.min_split * GIB)
            if not failed and (peak.history.failed_event is not None or packed.freed < limit):
                yield from self._check_end(peak, pieces)
                continue
            case = self.case("of a snapshot")
            summary = (
                f"At the peak {t.format_bytes(peak.allocated)} of the "
                f"{t.format_bytes(peak.reserved)} reserved are in tensors. Expandable segments "
                f"would have reserved {t.format_bytes(packed.freed)} less."
            )
            if failed and placed is not None:
                case |= self.case("of a snapshot in which a request failed")
                summary = (
                    f"A request of {t.format_bytes(placed.request)} failed although "
                    f"{t.format_bytes(placed.usable)} were free, at most "
                    f"{t.format_bytes(placed.largest)} in one piece."
                )
            settings = {} if a.snapshot is None else a.snapshot.settings
            yield Finding(
                summary=summary,
                evidence=[
                    Evidence("memory reserved at the peak, not in tensors", packed.slack, "bytes"),
                    self.compare(
                        "memory not reserved with expandable segments",
                        packed.freed,
                        "min_split",
                        "bytes",
                        times=GIB,
                    ),
                    self.compare(
                        "freed by expandable segments, share of reserved",
                        packed.freed / max(peak.reserved, 1),
                        "min_freed",
                    ),
                    Evidence("memory lost to rounding", pieces.rounding, "bytes"),
                    Evidence("allocator settings", settings.get("PYTORCH_CUDA_ALLOC_CONF") or None),
                ],
                impact=impact_memory(
                    packed.freed, "history replayed with and without expandable segments"
                ),
                assumptions=[packed.assumes],
                **case,
            )

    def _check_end(self, peak: PeakMemory, pieces: Fragments) -> Iterator[Finding]:
        """Report memory that is free in pieces between tensors when the snapshot was taken."""
        packed, reserved = measure_repacking_at_end(peak), int(peak.history.reserved[-1])
        if packed is None or packed.freed < max(self.min_freed * reserved, self.min_split * GIB):
            return
        if pieces.split < self.min_unused * reserved:
            return
        remaining = t.format_bytes(reserved - pieces.free_segments - packed.freed)
        yield Finding(
            summary=(
                f"When the snapshot was taken, {t.format_bytes(pieces.free)} of the "
                f"{t.format_bytes(reserved)} reserved was free, but in pieces of at most "
                f"{t.format_bytes(pieces.largest)}: a larger request cannot use it. With "
                f"expandable segments, {remaining} would still be reserved, in pages that hold a "
                "tensor."
            ),
            evidence=[
                Evidence("free memory when the snapshot was taken", pieces.free, "bytes"),
                Evidence("largest free piece of memory", pieces.largest, "bytes"),
                self.compare(
                    "free in segments with tensors, share of reserved",
                    pieces.split / max(reserved, 1),
                    "min_unused",
                ),
                self.compare(
                    "memory not reserved with expandable segments",
                    packed.freed,
                    "min_split",
                    "bytes",
                    times=GIB,
                ),
                self.compare(
                    "freed by expandable segments, share of reserved",
                    packed.freed / max(reserved, 1),
                    "min_freed",
                ),
            ],
            impact=impact_memory(
                packed.freed, "history replayed with and without expandable segments"
            ),
            assumptions=[packed.assumes],
            **self.case("when the snapshot was taken"),
        )

    @staticmethod
    def examples() -> Examples:
        return {
            "70 GB held for 40 GB": _build_run(70e9, 40e9, 30e9),
            "retries": _build_run(78e9, 70e9, 50e9, retries=5),
            "a snapshot with gaps": _build_gaps(keep=True),
            "a past peak": (
                _build_run(70e9, 69e9, 20e9),
                "not (retries > 0 and unused_share >= self.min_unused)",
            ),
            "a small model": (_build_run(2e9, 1e9, 1e9), "min_device"),
            "full of tensors": (_build_run(78e9, 77e9, 76e9, retries=3), "min_unused"),
            "no GPU": (_build_run(None, None, None), "reserved is None"),
            "a snapshot without gaps": (_build_gaps(keep=False), "a.run_steps is None"),
            "free in pieces when the snapshot was taken": _build_gaps(keep=True, full=True),
            "caches after the step": (
                snapshot_example(steps=8, activation=512 << 20),
                "a.run_steps is None",
            ),
        }


def _build_run(
    reserved: float | None, peak: float | None, allocated: float | None, *, retries: int = 0
) -> TraceBuilder:
    from advisor.core.run_directory import RecordedDevice

    b = TraceBuilder()
    r = b.record_of_run(devices=[RecordedDevice(total_bytes=80 * 10**9)])
    for n in range(100):
        fields: dict[str, int] = {}
        if reserved is not None and peak is not None and allocated is not None:
            fields = {
                "reserved": round(reserved),
                "peak": round(peak),
                "allocated": round(allocated),
                "retries": round(retries * n / 99),
            }
        r.step(10, fields=fields)
    return b


def _build_gaps(*, keep: bool, full: bool = False) -> TraceBuilder:
    """Build twenty segments of 200 MiB with 4 MiB in the middle of each, then request 180 MiB.
    Without ``keep`` the segments are empty and given back. With ``full`` there is no request."""
    from advisor.testing.allocator import LOOP, MIB, DeviceFull, FakeAllocator

    allocator = FakeAllocator(total=4000 * MIB)
    with allocator.at(*LOOP):
        pieces = []
        for segment in [allocator.alloc(200 * MIB) for _ in range(20)]:
            allocator.free(segment)
            pieces.append([allocator.alloc(size * MIB) for size in (98, 4, 98)])
        for left, middle, right in pieces:
            for address in (left, right) if keep else (left, middle, right):
                allocator.free(address)
        with suppress(DeviceFull):
            _ = None if full else allocator.alloc(180 * MIB)
    b = TraceBuilder()
    b.memory_snapshot(allocator)
    return b
