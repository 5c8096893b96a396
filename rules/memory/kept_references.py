"""Outputs of the step before are held while the next one runs."""

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
    """At the peak, memory holds what the forward pass of an earlier step made: a variable of the
    loop (the output, the loss with its graph) still names it, and it is freed only when the next
    step's takes its place. For a moment both are there, and the peak is that much higher.

    Told by a memory snapshot with history: blocks that a module's call or a function of
    ``torch.nn.functional`` made before the step of the peak began, of which steps are told by
    annotations or by the optimizer's allocations. Reported from 5 % of what tensors held. Lines
    that leave something behind in each step are a leak, which is told apart.
    """

    id = "kept-references"
    title = "Outputs of the step before are still held at the peak"
    category = "memory"
    reads_snapshot = True
    references = (
        "https://pytorch.org/docs/stable/notes/faq.html#my-model-reports-cuda-runtime-error-2-out-of-memory",
    )

    least = Threshold(0.05, "of what tensors held, from which it is worth telling", CHOSEN)

    fix = (
        "Let go of the outputs at the end of the step, before the next forward pass, and keep "
        "numbers instead of tensors with a graph."
    )
    code = (
        "del output, loss              # at the end of the step\n"
        "total += loss.detach()        # not: total += loss"
    )
    verify = "Take a snapshot again: nothing of earlier steps is held at the peak."
    falsified_by = "a state that the next step needs, such as a recurrent one"
    confidence = 0.8

    inference: ClassVar = {
        "code": "del output                    # at the end of the step\n"
        "with torch.inference_mode():  # no graph that holds what made it\n"
        "    output = model(batch)"
    }

    def check(self, a: Analysis) -> Iterator[Outcome]:
        """Look for blocks of earlier steps at the moment that matters."""
        for post in a.post_mortems:
            if not post.growth.is_empty():
                continue
            for each in savings(post):
                if each.change != "references" or each.bytes < self.least * post.allocated:
                    continue
                yield Finding(
                    summary=(
                        f"{t.format_bytes(each.bytes)} of the {t.format_bytes(post.allocated)} in "
                        "tensors at "
                        "the peak were made by the forward pass of an earlier step."
                    ),
                    evidence=[
                        Evidence("of earlier steps", each.bytes, "bytes"),
                        Evidence(
                            "of what tensors held",
                            each.bytes / max(post.allocated, 1),
                            "share",
                            *self.limit("least"),
                        ),
                        Evidence("steps told by", post.step_source),
                    ],
                    where=[]
                    if each.file is None
                    else [Location(file=each.file, line=each.line, function=each.function)],
                    impact=Impact(
                        currency="memory",
                        freed_bytes=each.bytes,
                        method="held at the peak, by the snapshot",
                    ),
                    assumptions=[each.assumes],
                )
                break

    @staticmethod
    def fires_on() -> dict[str, TraceBuilder]:
        """The logits of each step are held until the next ones are there."""
        from advisor.testing.allocator import MIB, Allocator, Training

        m = Allocator()
        t = Training(m, kept_outputs=True, logits=96 * MIB)
        for _ in range(6):
            t.step()
        b = TraceBuilder()
        b.memory_snapshot(m)
        return {"logits of the step before": b}

    @staticmethod
    def silent_on() -> dict[str, tuple[TraceBuilder, str]]:
        """Everything is let go of; a leak, which is another rule's; no history."""
        from advisor.testing.allocator import MIB, Allocator, Training

        examples = {}
        for name, leak, history, guard in (
            ("everything is let go of", 0, True, "each.change != 'references'"),
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
