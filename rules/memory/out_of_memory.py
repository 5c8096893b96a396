"""The run ended out of device memory."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from typing import TYPE_CHECKING, ClassVar

from advisor.core import text as t
from advisor.core.finding import Evidence, Finding, Impact, Location, Outcome, Rule, Threshold
from advisor.measure import Analysis
from advisor.measure.memory.fragments import placement
from advisor.measure.memory.memory_savings import Saving, savings
from advisor.rules.memory.peaks import held_most
from advisor.rules.memory.recorded import capacity
from advisor.rules.recorded import record
from advisor.rules.sources import CHOSEN
from advisor.testing import TraceBuilder

if TYPE_CHECKING:
    from advisor.measure.memory.post_mortem import PostMortem

MAX_WAYS = 3
"""To free memory, that a finding names."""


class OutOfMemory(Rule):
    """The run ran out of device memory. The recorder writes the allocator's state down before the
    exception goes on: what was held, what of it was in tensors, and a snapshot that says where
    each block was allocated.

    Where much of the held memory was in no tensor, fragments are the likelier cause; where the step
    had a larger batch than those before it, that batch is; else the model needs more than there is.

    With a snapshot whose history holds the failure it says what was held by category and line, why
    the request could not be placed, and what checkpointing, smaller logits, another optimizer or
    half the batch would have freed.
    """

    id = "out-of-memory"
    title = "The run ended out of device memory"
    category = "memory"
    reads_record = True
    reads_snapshot = True
    silent_in = (
        "recorded/anomaly.cured",
        "recorded/gc_pauses.cured",
        "recorded/leak.cured",
    )
    references = ("https://pytorch.org/docs/stable/torch_cuda_memory.html",)

    loose = Threshold(0.80, "allocated below this share of reserved: fragments, not need", CHOSEN)
    larger = Threshold(1.2, "the last batch over the median one", CHOSEN)

    verify = "Record again, past the step at which it ended."
    falsified_by = "the same error at the same step with the fix"

    fix = (
        "Lower the peak: bf16 autocast, activation checkpointing of the largest "
        "blocks, a sharded or 8-bit optimizer, a smaller micro-batch with accumulation. "
        "The snapshot shows what fills it."
    )
    code = "# drag the snapshot into https://pytorch.org/memory_viz (it stays local)"
    confidence = 0.7
    cases: ClassVar = {
        "fragments": {
            "fix": "Let segments grow and shrink, so that what is there can be used.",
            "code": "export PYTORCH_ALLOC_CONF=expandable_segments:True",
            "confidence": 0.9,
        },
        "an unusually large batch": {
            "fix": "Bound the size of a batch: cut or bucket sequences, batch by tokens.",
            "confidence": 0.9,
        },
        # what would have freed memory, as a snapshot tells it: the changes of ``savings``
        "checkpointing": {
            "fix": "Checkpoint the blocks that are called there",
            "code": "from torch.utils.checkpoint import checkpoint\n"
            "x = checkpoint(block, x, use_reentrant=False)",
        },
        "smaller logits": {
            "fix": "Make the loss in chunks, or with a fused linear cross-entropy",
            "code": "# pip install liger-kernel: LigerFusedLinearCrossEntropyLoss\n"
            "loss = sum(F.cross_entropy(head(x), y, reduction='sum')\n"
            "           for x, y in zip(hidden.chunk(8), target.chunk(8)))\n"
            "# each chunk under checkpoint(), so that its logits are not kept",
        },
        "references": {
            "fix": "Let go of the outputs of the step before (del, detach)",
            "code": "del output, loss              # at the end of the step\n"
            "total += loss.detach()        # not: total += loss",
        },
        "set_to_none": {
            "fix": "Set gradients to None before the forward pass",
            "code": "optimizer.zero_grad(set_to_none=True)   # before the forward pass",
        },
        "8-bit optimizer": {
            "fix": "Take an 8-bit, sharded or offloaded optimizer",
            "code": "optimizer = bitsandbytes.optim.AdamW8bit(model.parameters())",
        },
        "batch": {
            "fix": "Halve the micro-batch, and accumulate",
            "code": "loader = DataLoader(..., batch_size=half)   # and accumulate over two",
        },
        "expandable segments": {
            "fix": "Let segments grow and shrink (expandable segments)",
            "code": "export PYTORCH_ALLOC_CONF=expandable_segments:True",
        },
    }

    inference: ClassVar = {
        "fix": "Lower the peak: 16-bit weights, inference_mode, a smaller batch, a shorter or "
        "quantised key-value cache. The snapshot shows what fills it.",
        "cases": {
            "smaller logits": {
                "fix": "Compute the logits in chunks, or those of the last position alone",
                "code": "logits = head(hidden[:, -1:])",
            },
            "references": {
                "fix": "Let go of the outputs of the step before",
                "code": "del output                    # at the end of the step",
            },
            "batch": {
                "fix": "Halve the batch",
                "code": "loader = DataLoader(..., batch_size=half)",
            },
        },
    }

    def check(self, a: Analysis) -> Iterator[Outcome]:
        """Read what was written when it happened."""
        post = next((post for post in a.post_mortems if post.history.failed is not None), None)
        if post is not None and post.request is not None:
            yield self._of_snapshot(post, post.request)
            return
        if a.recorded is None:
            return
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
            summary=(
                f"After {len(recorded.steps):,} steps a request could not be met; {why}."
                + (f" {str(event['message'])[:300]}" if event.get("message") else "")
            ),
            evidence=[
                Evidence("in tensors", allocated, "bytes"),
                Evidence("held by the allocator", reserved, "bytes"),
                Evidence("device memory", total, "bytes"),
                Evidence("last batch over the median one", grown, "", *self.limit("larger")),
                Evidence("snapshot", None if snapshot is None else str(snapshot)[:200]),
            ],
            impact=Impact(
                currency="risk",
                reason="the run stopped"
                if reserved is None
                else f"the run stopped with {t.format_bytes(reserved)} held",
            ),
            **(
                self.case("fragments")
                if fragments
                else self.case("an unusually large batch")
                if batch
                else {}
            ),
        )

    def _of_snapshot(self, post: PostMortem, request: int) -> Finding:
        """The request that failed, what was held then, and what would have freed enough."""
        placed, found = placement(post), savings(post)
        scattered = placed is not None and placed.scattered and placed.fits_expandable
        if scattered:  # the cure for fragments first
            found.sort(key=lambda each: (each.change != "expandable segments", -each.bytes))
        why = (
            f"{t.format_bytes(placed.usable)} were free for it, but in pieces of at most "
            f"{t.format_bytes(placed.largest)}"
            if placed is not None and scattered
            else f"tensors held {t.format_bytes(post.allocated)} of the "
            f"{t.format_bytes(post.reserved)} "
            f"reserved: {_holders(post)}"
        )
        enough = [each for each in found if each.bytes >= request]
        return Finding(
            summary=f"A request of {t.format_bytes(request)} could not be met; {why}.",
            evidence=[
                Evidence("request", request, "bytes"),
                Evidence("in tensors", post.allocated, "bytes"),
                Evidence("held by the allocator", post.reserved, "bytes"),
                Evidence("left with the driver", post.device_free, "bytes"),
                Evidence(
                    "largest free block for it", None if placed is None else placed.largest, "bytes"
                ),
                *[
                    Evidence(f"held: {name}", held, "bytes")
                    for name, held in list(post.by_category.items())[:4]
                ],
            ],
            where=_asked(post) + held_most(post),
            impact=Impact(
                currency="risk", reason=f"the run stopped with {t.format_bytes(post.reserved)} held"
            ),
            fix=self._ways(found),
            code=self.case((enough or found)[0].change)["code"] if found else "",
            confidence=0.85,
            assumptions=[f"{self._way(each)}: {each.assumes}" for each in found[:MAX_WAYS]],
        )

    def _way(self, saving: Saving) -> str:
        fix = str(self.case(saving.change)["fix"])
        return f"{fix[0].lower()}{fix[1:]}"

    def _ways(self, found: list[Saving]) -> str:
        """What would have freed most, in words."""
        told = []
        for each in found[:MAX_WAYS]:
            where = (
                ""
                if each.line is None or each.file is None
                else (f" ({each.file.replace(chr(92), '/').rsplit('/', 1)[-1]}:{each.line})")
            )
            told.append(
                f"{self.case(each.change)['fix']}{where}: frees {t.format_bytes(each.bytes)}."
            )
        return " ".join([*told, "They overlap."] if told[1:] else told)

    @staticmethod
    def fires_on() -> dict[str, TraceBuilder]:
        """Full of tensors; of fragments; a large last batch."""
        return {
            "full of tensors": _run(78e9, 79e9),
            "fragments": _run(40e9, 79e9),
            "a large batch": _run(78e9, 79e9, last=4.0),
            "a snapshot that says so": _snapshot(1),
        }

    @staticmethod
    def silent_on() -> dict[str, tuple[TraceBuilder, str]]:
        """It did not happen."""
        b = TraceBuilder()
        b.record_of_run().steps(20, 10)
        return {
            "it did not happen": (b, "not events"),
            "a snapshot that does not say so": (_snapshot(80), "a.recorded is None"),
        }


def _holders(post: PostMortem, most: int = 3) -> str:
    """Categories that held most, in words."""
    named = [
        f"{name} {t.format_bytes(held)}" for name, held in list(post.by_category.items())[:most]
    ]
    return ", ".join(named)


def _asked(post: PostMortem) -> list[Location]:
    asked = post.failed_at
    if asked is None or asked.file is None:
        return []
    return [
        Location(
            file=asked.file, line=asked.line, function=asked.function, op="the request that failed"
        )
    ]


def _number(value: object) -> float | None:
    return float(value) if isinstance(value, int | float) and value >= 0 else None


def _run(allocated: float, reserved: float, *, last: float = 1.0) -> TraceBuilder:
    from advisor.core.run_directory import Device

    b = TraceBuilder()
    r = b.record_of_run(devices=[Device(total_bytes=80 * 10**9)])
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


def _snapshot(gib: int) -> TraceBuilder:
    """A training that needs more than one GiB, on a device of so many."""
    from advisor.testing.allocator import GIB, MIB, Allocator, DeviceFull, Training

    m = Allocator(total=gib * GIB)
    training = Training(m, activation=96 * MIB)
    b = TraceBuilder()
    with suppress(DeviceFull):
        for _ in range(3):
            training.step()
    b.memory_snapshot(m)
    return b
