"""The run ended out of device memory."""

from __future__ import annotations

from collections.abc import Iterator

from advisor.analysis import Analysis
from advisor.model import Evidence, Finding, Outcome, Rule, Worth
from advisor.rules.common import size
from advisor.rules.memory.recorded import capacity
from advisor.rules.recorded import record
from advisor.testing import TraceBuilder


class OutOfMemory(Rule):
    """The run ran out of device memory. The recorder writes the allocator's state down before the
    exception goes on: what was held, what of it was in tensors, and a snapshot that says where
    each block was allocated.

    Where much of the held memory was in no tensor, fragments are the likelier cause; where the step
    had a larger batch than those before it, that batch is; else the model needs more than there is.
    """

    id = "out-of-memory"
    title = "The run ended out of device memory"
    category = "memory"
    reads_record = True
    references = ("https://pytorch.org/docs/stable/torch_cuda_memory.html",)

    loose = 0.80  # allocated below this share of reserved: fragments, not need
    larger = 1.2  # the last batch over the median one

    def check(self, a: Analysis) -> Iterator[Outcome]:
        """Read what was written when it happened."""
        recorded = record(a)
        events = recorded.record.of_kind("oom")
        if not events:
            return
        event = events[-1]
        allocated, reserved = _number(event.get("allocated")), _number(event.get("reserved"))
        total = capacity(a)
        sizes = recorded.column("bytes")
        sizes = sizes[sizes == sizes]
        grown = (
            float(sizes[-1]) / float(sorted(sizes)[len(sizes) // 2])
            if len(sizes) >= 5 and sorted(sizes)[len(sizes) // 2] > 0
            else None
        )
        used = allocated / reserved if allocated is not None and reserved else None
        fragments = used is not None and used < self.loose
        batch = grown is not None and grown >= self.larger
        why = (
            f"only {used:.0%} of what the allocator held was in tensors: fragments"
            if fragments
            else f"the last batch was {grown:.1f} times the usual size"
            if batch
            else "tensors filled what there was"
        )
        snapshot = event.get("snapshot")
        yield Finding(
            rule=self.id,
            title=self.title,
            summary=(
                f"After {len(recorded.steps):,} steps a request could not be met; {why}."
                + (f" {str(event['message'])[:300]}" if event.get("message") else "")
            ),
            evidence=[
                Evidence("in tensors", allocated, "bytes"),
                Evidence("held by the allocator", reserved, "bytes"),
                Evidence("device memory", total, "bytes"),
                Evidence("last batch over the median one", grown, "", self.larger),
                Evidence("snapshot", None if snapshot is None else str(snapshot)[:200]),
            ],
            fix=(
                "Let segments grow and shrink, so that what is there can be used."
                if fragments
                else "Bound the size of a batch: cut or bucket sequences, batch by tokens."
                if batch
                else "Lower the peak: bf16 autocast, activation checkpointing of the largest "
                "blocks, a sharded or 8-bit optimizer, a smaller micro-batch with accumulation. "
                "The snapshot shows what fills it."
            ),
            code=(
                "export PYTORCH_ALLOC_CONF=expandable_segments:True"
                if fragments
                else "# drag the snapshot into https://pytorch.org/memory_viz (it stays local)"
            ),
            check="Record again, past the step at which it ended.",
            worth=Worth(
                currency="risk",
                reason="the run stopped"
                if reserved is None
                else f"the run stopped with {size(reserved)} held",
            ),
            confidence=0.9 if fragments or batch else 0.7,
            falsified_by="the same error at the same step with the fix",
        )

    @staticmethod
    def fires_on() -> dict[str, TraceBuilder]:
        """Full of tensors; of fragments; a large last batch."""
        return {
            "full of tensors": _run(78e9, 79e9),
            "fragments": _run(40e9, 79e9),
            "a large batch": _run(78e9, 79e9, last=4.0),
        }

    @staticmethod
    def silent_on() -> dict[str, TraceBuilder]:
        """It did not happen."""
        b = TraceBuilder()
        b.record_of_run().steps(20, 10)
        return {"it did not happen": b}


def _number(value: object) -> float | None:
    return float(value) if isinstance(value, int | float) and value >= 0 else None


def _run(allocated: float, reserved: float, *, last: float = 1.0) -> TraceBuilder:
    from advisor.rundir import Device

    b = TraceBuilder()
    r = b.record_of_run(devices=[Device(total_bytes=80 * 10**9)])
    for n in range(20):
        r.step(10, fields={"bytes": round(1e6 * (last if n == 19 else 1.0))})
    r.event(
        "oom", message="CUDA out of memory. Tried to allocate 2.00 GiB.", snapshot="x.pickle",
        allocated=allocated, reserved=reserved,
    )  # fmt: skip
    r.event("end", steps=20, reason="exception")
    return b
