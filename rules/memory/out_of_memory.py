"""The run ran out of GPU memory."""

from statistics import median

from advisor.core import text as t
from advisor.core.auxiliary_inputs import SNAPSHOT
from advisor.core.finding import Finding, Outcomes, impact_risk
from advisor.core.memory_changes import CHANGES, CHANGES_OF_INFERENCE, EXPANDABLE, advise_change
from advisor.core.rule import Evidence, Rule, Threshold
from advisor.core.snapshot import OutOfMemoryText
from advisor.measure import Analysis
from advisor.measure.memory.allocator_replay import explain_placement, measure_repacking
from advisor.measure.memory.memory_savings import LOSS_CHUNKS, FreedMemory, find_savings
from advisor.measure.memory.peak_memory import PeakMemory
from advisor.measure.memory.trace_memory import gpu_capacity
from advisor.rules.support.citations import CHOSEN, CURED_RECORDINGS, public_traces
from advisor.rules.support.device_memory import (
    LOWER_PEAK,
    LOWER_PEAK_INFERENCE,
    LOWER_PEAK_UNKNOWN,
    line_name,
    locate_allocation,
    locate_holders,
    snapshot_example,
)
from advisor.testing import Examples, TraceBuilder

_MIN_BATCHES = 5
"""Minimum number of batches at which the last one is compared with the median."""
_MAX_SAVINGS = 4
"""Maximum number of ways to free memory that a finding names."""


class OutOfMemory(Rule):
    """The run ran out of GPU memory. The recorder saves the allocator's state before it passes the
    exception on. It saves the memory held, the part of it in tensors, and a snapshot of where each
    block was allocated.

    Where much of the held memory was not in tensors, fragments are the likelier cause. Where the
    batch was larger than those before it, the batch is the likelier cause. Otherwise the model
    needs more memory than the GPU has.

    With the exception's text alone (a log), the finding shows what the text says about the holders.
    Allocator settings are advised only where a history shows that they help.

    With a snapshot whose history holds the failure, the finding shows what was held, by category
    and line. It says why the request could not be placed, and what checkpointing, smaller logits,
    another optimizer or half the batch would have freed."""

    id = "out-of-memory"
    title = "The run ran out of GPU memory"
    verdict_role = "out of memory"
    reads_record = True
    auxiliary_inputs = (SNAPSHOT,)
    found_in = public_traces("memory/h100_full")
    silent_in = (*CURED_RECORDINGS, *public_traces("memory/h100_leak memory/h100_training"))
    validation_note = "a snapshot of batches that double until a request for logits fails"
    references = ("https://pytorch.org/docs/stable/torch_cuda_memory.html",)

    max_allocated_share = Threshold(
        0.80, "allocated below this share of reserved: memory is fragmented", CHOSEN
    )
    min_batch_ratio = Threshold(1.2, "the last batch over the median one", CHOSEN)

    verify = "Record again, past the step at which it ended."
    falsified_by = "the same error at the same step with the fix"

    fix = f"{LOWER_PEAK} The snapshot shows what fills memory."
    code = "# open the snapshot at https://pytorch.org/memory_viz (it stays local)"
    confidence = 0.7
    cases = {
        "fragments": {
            "fix": "Let segments grow and shrink, so that the free memory can be used.",
            "code": EXPANDABLE,
            "confidence": 0.9,
        },
        "an unusually large batch": {
            "fix": "Limit the size of a batch: truncate long samples, or batch by tokens.",
            "code": "# truncate: tokenizer(texts, truncation=True, max_length=512)\n"
            "# or make batches of at most `limit` tokens. lengths: the samples'\n"
            "# tokens; pad: your collate_fn\n"
            "batches = [[]]\n"
            "for i in sorted(range(len(lengths)), key=lengths.__getitem__):\n"
            "    if batches[-1] and (len(batches[-1]) + 1) * lengths[i] > limit:\n"
            "        batches.append([])\n"
            "    batches[-1].append(i)\n"
            "loader = DataLoader(dataset, batch_sampler=batches, collate_fn=pad)",
            "confidence": 0.9,
        },
        "other processes": {
            "fix": "End the other processes on this GPU: they hold more than the request.",
            "code": "nvidia-smi --query-compute-apps=pid,used_memory --format=csv",
            "confidence": 0.9,
        },
        "the text alone": {
            "fix": f"{LOWER_PEAK_UNKNOWN} Record the allocator's history for the lines that "
            "held it, and for whether other allocator settings would have helped.",
            "code": "torch.cuda.memory._record_memory_history(max_entries=100_000)\n"
            "# after the exception:\n"
            "torch.cuda.memory._dump_snapshot('oom.pickle')",
            "confidence": 0.6,
        },
        **CHANGES,
    }

    inference = {
        "fix": f"{LOWER_PEAK_INFERENCE} The snapshot shows what fills memory.",
        "cases": {
            "the text alone": {
                "fix": f"{LOWER_PEAK_INFERENCE} Record the allocator's history for the lines that "
                "held it, and for whether other allocator settings would have helped."
            },
            **CHANGES_OF_INFERENCE,
        },
    }

    def check(self, a: Analysis) -> Outcomes:
        peak = next(
            (peak for peak in a.peak_memories if peak.history.failed_event is not None), None
        )
        text = None if a.snapshot is None else a.snapshot.exception
        if text is None and peak is not None and peak.request is not None:
            yield self._build_from_snapshot(peak, peak.request)
            return
        run_steps = a.run_steps
        sizes = (
            [] if run_steps is None else [size for size in run_steps.column("bytes") if size > 0]
        )
        batch_ratio = float(sizes[-1] / median(sizes)) if len(sizes) >= _MIN_BATCHES else None
        is_large_batch = batch_ratio is not None and batch_ratio >= self.min_batch_ratio
        if text is not None and not is_large_batch:
            yield self._build_from_text(text)
            return
        events = [] if run_steps is None else run_steps.rank_record.events_of("oom")
        if run_steps is None or not events:
            return
        event = events[-1]
        allocated, reserved = _number(event.get("allocated")), _number(event.get("reserved"))
        total = gpu_capacity(a)
        tensor_share = allocated / reserved if allocated is not None and reserved else None
        is_fragmented = tensor_share is not None and tensor_share < self.max_allocated_share
        reason = (
            f"only {tensor_share:.0%} of the memory that the allocator held was in tensors"
            if is_fragmented
            else f"the last batch was {batch_ratio:.1f} times the usual size"
            if is_large_batch
            else "tensors filled the memory"
        )
        snapshot = event.get("snapshot")
        yield Finding(
            summary=(
                f"A request for memory failed after {len(run_steps.steps):,} steps: {reason}."
                + (f" {str(event['message'])[:300]}" if event.get("message") else "")
            ),
            evidence=[
                Evidence("in tensors", allocated, "bytes"),
                Evidence("held by the allocator", reserved, "bytes"),
                Evidence("GPU memory", total, "bytes"),
                self.compare("last batch over the median one", batch_ratio, "min_batch_ratio", ""),
                Evidence("snapshot file", None if snapshot is None else str(snapshot)[:200]),
            ],
            severity="critical",
            impact=impact_risk(
                "the run stopped"
                if reserved is None
                else f"the run stopped with {t.format_bytes(reserved)} held"
            ),
            **(
                self.case("fragments")
                if is_fragmented
                else self.case("an unusually large batch")
                if is_large_batch
                else {}
            ),
        )

    def _build_from_snapshot(self, peak: PeakMemory, request: int) -> Finding:
        """Report the request that failed, what was held then, and what would have freed enough."""
        placed, packed, ways = (
            explain_placement(peak),
            measure_repacking(peak),
            list(find_savings(peak)),
        )
        scattered = placed is not None and placed.scattered and packed is not None and packed.helps
        needed = request - (peak.device_free or 0)
        # the cheapest sufficient way first
        ways.sort(key=lambda way: way.bytes < needed + _needed_after(way, peak))
        if scattered:  # the fix for fragments first
            ways.sort(key=lambda way: way.name != "expandable segments")
        why = (
            f"{t.format_bytes(placed.usable)} were free, but in pieces of at most "
            f"{t.format_bytes(placed.largest)}"
            if placed is not None and scattered
            else f"tensors held {t.format_bytes(peak.allocated)} of the "
            f"{t.format_bytes(peak.reserved)} reserved ({_list_holders(peak)})"
        )
        fix, growth = _describe_ways(ways, peak, needed), ""
        lacks = peak.device_free is not None and needed > 0
        short = f", {t.format_bytes(needed)} more than the driver had" if lacks else ""
        code = advise_change(ways[0].name, peak.trains)[1] if ways else ""
        if (larger := peak.larger_inputs) is not None:
            origin, *ends = larger
            first, last = map(t.format_bytes, ends)
            place = line_name(origin.file, origin.line)
            growth = f" Inputs grew from step to step: {place} made {first}, then {last}."
            limit = self.case("an unusually large batch")
            fix, code = f"{limit['fix']} {fix}", f"{limit['code']}\n\n# also\n{code}"
        return Finding(
            summary=f"A request of {t.format_bytes(request)} failed{short}: {why}.{growth}",
            evidence=[
                Evidence("request", request, "bytes"),
                Evidence("in tensors", peak.allocated, "bytes"),
                Evidence("held by the allocator", peak.reserved, "bytes"),
                Evidence("free at the driver", peak.device_free, "bytes"),
                Evidence(
                    "largest free block for it", None if placed is None else placed.largest, "bytes"
                ),
                *[
                    Evidence(f"held: {name}", size, "bytes")
                    for name, size in list(peak.by_category.items())[:4]
                ],
            ],
            where=locate_allocation(peak.failed_at, op="the request that failed")
            + locate_holders(peak),
            severity="critical",
            impact=impact_risk(f"the run stopped with {t.format_bytes(peak.reserved)} held"),
            fix=fix,
            code=code,
            confidence=0.85,
            assumptions=[
                f"{_name_change(way, peak)}: {way.assumes}" for way in ways[:_MAX_SAVINGS]
            ],
        )

    def _build_from_text(self, text: OutOfMemoryText) -> Finding:
        """Build the finding of the exception alone: who held memory, and what to record as well."""
        unused_bytes = None
        if text.reserved is not None and text.allocated is not None:
            unused_bytes = text.reserved - text.allocated
        outside_bytes = other_bytes = None
        if text.process is not None and text.reserved is not None:
            outside_bytes = max(0, text.process - text.reserved)
        if text.capacity is not None and text.free is not None and text.process is not None:
            other_bytes = max(0, text.capacity - text.free - text.process)
        holders = [
            f"{name} {t.format_bytes(size)}"
            for name, size in (
                ("tensors", text.allocated), ("reserved and free", unused_bytes),
                ("the rest of this process", outside_bytes), ("other processes", other_bytes),
                ("free at the driver", text.free),
            )
            if size
        ]  # fmt: skip
        is_foreign = other_bytes is not None and other_bytes >= text.request
        case = self.case("other processes") if is_foreign else self.case("the text alone")
        return Finding(
            summary=f"A request of {t.format_bytes(text.request)} failed"
            + (f": {', '.join(holders)}." if holders else "."),
            evidence=[
                Evidence("request", text.request, "bytes"),
                Evidence("GPU memory", text.capacity, "bytes"),
                Evidence("in tensors", text.allocated, "bytes"),
                Evidence("reserved by PyTorch, not in tensors", unused_bytes, "bytes"),
                Evidence("this process, outside of PyTorch", outside_bytes, "bytes"),
                Evidence("other processes", other_bytes, "bytes"),
                Evidence("free at the driver", text.free, "bytes"),
            ],
            severity="critical",
            impact=impact_risk("the run stopped"),
            **case,
        )

    @staticmethod
    def examples() -> Examples:
        b = TraceBuilder()
        b.record_of_run().steps(20, 10)
        return {
            "full of tensors": _build_run(78e9, 79e9),
            "fragments": _build_run(40e9, 79e9),
            "a large batch": _build_run(78e9, 79e9, last=4.0),
            "a snapshot with the failure": snapshot_example(total=1 << 30, activation=96 << 20),
            "it did not happen": (b, "not events"),
            "a snapshot without a failure": (
                snapshot_example(activation=96 << 20),
                "run_steps is None",
            ),
        }


def _name_change(saving: FreedMemory, peak: PeakMemory) -> str:
    fix = advise_change(saving.name, peak.trains)[0]
    return t.lower_first(fix)


def _needed_after(way: FreedMemory, peak: PeakMemory) -> int:
    """Return the bytes that the step still needs after the failed request with this change: pieces
    of logits need one piece, half the batch half of them."""
    remaining_share = {"smaller logits": 1 / LOSS_CHUNKS, "half the batch": 0.5}.get(way.name, 1.0)
    return round(peak.needed_after * remaining_share)


def _describe_ways(ways: list[FreedMemory], peak: PeakMemory, needed: int) -> str:
    """Describe what would have freed memory, one sentence each. ``needed`` bytes are enough."""
    sentences = []
    for way in ways[:_MAX_SAVINGS]:
        place_text = line_name(way.file, way.line)
        place_text = f" ({place_text})" if place_text else ""
        freed_text = t.format_bytes(way.bytes)
        if peak.device_free and needed <= way.bytes < (peak.request or 0):
            freed_text += f"; with the {t.format_bytes(peak.device_free)} that the driver had, "
            needed_next = _needed_after(way, peak)
            missing = needed + needed_next - way.bytes
            freed_text += (
                "it fits"
                if missing <= 0
                else f"this request fits, but of {t.format_bytes(needed_next)} that the step needs "
                f"next {t.format_bytes(missing)} are missing"
            )
        fix = advise_change(way.name, peak.trains)[0]
        sentences.append(f"{fix}{place_text}: this frees {freed_text}.")
    if len(sentences) > 1:
        sentences.append("These savings overlap.")
    return " ".join(sentences)


def _list_holders(peak: PeakMemory) -> str:
    """Return the categories that held most: ``parameters 3 GiB, activations 2 GiB``."""
    largest = list(peak.by_category.items())[:3]
    return ", ".join(f"{name} {t.format_bytes(size)}" for name, size in largest)


def _number(value: object) -> float | None:
    return float(value) if isinstance(value, int | float) and value >= 0 else None


def _build_run(allocated: float, reserved: float, *, last: float = 1.0) -> TraceBuilder:
    from advisor.core.run_directory import RecordedDevice

    b = TraceBuilder()
    r = b.record_of_run(devices=[RecordedDevice(total_bytes=80 * 10**9)])
    for n in range(20):
        r.step(10, fields={"bytes": round(1e6 * (last if n == 19 else 1.0))})
    r.event(
        "oom",
        message="CUDA out of memory. Tried to allocate 2.00 GiB.",
        snapshot="x.pickle",
        allocated=allocated,
        reserved=reserved,
    )
    r.event("end", steps=20, reason="exception")
    return b
