"""Outputs of the previous step are still held while the next one runs."""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar

from advisor.core import text as t
from advisor.core.finding import Evidence, Finding, Impact, Location, Outcome, Rule, Threshold
from advisor.measure import Analysis
from advisor.measure.memory.memory_savings import savings
from advisor.rules.sources import CHOSEN
from advisor.testing import TraceBuilder


class KeptReferences(Rule):
    """At the peak, memory still holds what the forward pass of an earlier step made. A variable of
    the loop (the output, the loss with its graph) refers to it, and it is freed only when the next
    step's takes its place. For a while both are in memory, and the peak is that much higher.

    Read from a memory snapshot with history: blocks that a module's call or a function of
    ``torch.nn.functional`` allocated before the step of the peak began. Steps are found by
    annotations or by the optimizer's allocations. Reported from 5 % of the memory in tensors.
    Memory that grows with each step is a leak, which memory-leak reports.
    """

    id = "kept-references"
    title = "The peak holds outputs of the previous step"
    category = "memory"
    reads_snapshot = True
    references = (
        "https://pytorch.org/docs/stable/notes/faq.html#my-model-reports-cuda-runtime-error-2-out-of-memory",
    )

    least = Threshold(0.05, "of the memory in tensors", CHOSEN)

    fix = (
        "Delete the outputs at the end of the step, before the next forward pass. Keep numbers "
        "instead of tensors with a graph."
    )
    code = (
        "del output, loss              # at the end of the step\n"
        "total += loss.detach()        # not: total += loss"
    )
    verify = "Take a snapshot again: the peak holds nothing of earlier steps."
    falsified_by = "a state that the next step needs, such as a recurrent state"
    confidence = 0.8

    inference: ClassVar = {
        "code": "del output                    # at the end of the step\n"
        "with torch.inference_mode():  # no graph that holds what made it\n"
        "    output = model(batch)"
    }

    def check(self, a: Analysis) -> Iterator[Outcome]:
        """Look for blocks of earlier steps at the peak."""
        for post in a.post_mortems:
            if not post.growth.is_empty():
                continue
            for saving in savings(post):
                if saving.change != "references" or saving.bytes < self.least * post.allocated:
                    continue
                yield Finding(
                    summary=(
                        f"{t.format_bytes(saving.bytes)} of the {t.format_bytes(post.allocated)} "
                        "in tensors at "
                        "the peak come from the forward pass of an earlier step."
                    ),
                    evidence=[
                        Evidence("memory of earlier steps", saving.bytes, "bytes"),
                        Evidence(
                            "share of the memory in tensors",
                            saving.bytes / max(post.allocated, 1),
                            "share",
                            *self.limit("least"),
                        ),
                        Evidence("steps found by", post.step_source),
                    ],
                    where=[]
                    if saving.file is None
                    else [Location(file=saving.file, line=saving.line, function=saving.function)],
                    impact=Impact(
                        currency="memory",
                        freed_bytes=saving.bytes,
                        method="memory of earlier steps at the peak of the snapshot",
                    ),
                    assumptions=[saving.assumes],
                )
                break

    @staticmethod
    def fires_on() -> dict[str, TraceBuilder]:
        """The loop keeps the logits of each step until it has the next ones."""
        from advisor.testing.allocator import MIB, Allocator, Training

        m = Allocator()
        t = Training(m, kept_outputs=True, logits=96 * MIB)
        for _ in range(6):
            t.step()
        b = TraceBuilder()
        b.memory_snapshot(m)
        return {"logits of the previous step": b}

    @staticmethod
    def silent_on() -> dict[str, tuple[TraceBuilder, str]]:
        """Nothing is kept; a leak, which is another rule's; no history."""
        from advisor.testing.allocator import MIB, Allocator, Training

        examples = {}
        for name, leak, history, guard in (
            ("nothing is kept", 0, True, "saving.change != 'references'"),
            ("a leak", 8 * MIB, True, "not post.growth.is_empty()"),
            ("no history", 0, False, "not post.growth.is_empty()"),
        ):
            m = Allocator(history=history)
            t = Training(m, leak=leak)
            for _ in range(12):
                t.step()
            b = TraceBuilder()
            b.memory_snapshot(m)
            examples[name] = b, guard
        return examples
