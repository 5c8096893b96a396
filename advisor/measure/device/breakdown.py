"""The step's device time in exclusive classes: each instant is counted once."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import polars as pl

from advisor.core.intervals import EMPTY, Intervals, covered_length, gaps, intersect, join, subtract

if TYPE_CHECKING:
    from advisor.measure import Analysis

CLASSES = ("compute", "communication", "copies", "memset", "idle")


class Breakdown(NamedTuple):
    """Exclusive device time inside the used steps.

    An instant with several activities counts for the first of compute, communication, copies,
    memset: so ``communication`` is communication not hidden under compute, and ``copies`` are
    copies hidden under neither. Work launched before the recording began is no step's work, but the
    device is busy with it. ``per_step`` has a row a used step: ``step`` and one column a
    class, ns, clipped to the step's own span.

    Without device work in the trace nothing is measured: all sets are empty, ``idle`` too, and
    the columns of ``per_step`` are null.
    """

    compute: Intervals
    communication: Intervals
    """Exposed: not under compute."""
    copies: Intervals
    """Exposed: not under compute or communication."""
    memset: Intervals
    idle: Intervals
    busy: Intervals
    all_communication: Intervals
    all_copies: Intervals
    per_step: pl.DataFrame

    def totals(self) -> dict[str, int]:
        """Class -> ns; they add up to the analysed window (0 without device work)."""
        return {name: getattr(self, name).total for name in CLASSES}

    @property
    def communication_overlap(self) -> float | None:
        """Share of communication time that runs under compute; ``None``: no communication."""
        total = self.all_communication.total
        return None if total == 0 else 1 - self.communication.total / total


def break_down(a: Analysis) -> Breakdown:
    """Exclusive classes of device time of the analysed device."""
    if a.device_id is None:
        return _not_measured(a)
    kind = a.trace.gpu["kind"]
    inside = a.on_device
    communication = a.kernels["communication"].to_numpy() & inside
    kernel = (kind == "kernel").to_numpy() & inside & ~communication
    compute = a.device_busy(kernel)
    comm = a.device_busy(communication)
    copies = a.device_busy((kind == "memcpy").to_numpy() & inside & ~communication)
    memset = a.device_busy((kind == "memset").to_numpy() & inside)
    busy = join(compute, comm, copies, memset)
    parts = {
        "compute": compute,
        "communication": subtract(comm, compute),
        "copies": subtract(copies, join(compute, comm)),
        "memset": subtract(memset, join(compute, comm, copies)),
        "idle": _outside(busy, a.spans),
    }
    used = a.steps.used
    start, end = used["ts"].to_numpy(), used["end"].to_numpy()
    per_step = pl.DataFrame(
        {
            "step": used["index"],
            **{name: covered_length(start, end, part) for name, part in parts.items()},
        }
    )
    return Breakdown(
        **parts, busy=busy, all_communication=comm, all_copies=copies, per_step=per_step
    )


def _not_measured(a: Analysis) -> Breakdown:
    step = a.steps.used.select(pl.col("index").alias("step"))
    nulls = [pl.lit(None, dtype=pl.Int64).alias(name) for name in CLASSES]
    sets = dict.fromkeys((*CLASSES, "busy", "all_communication", "all_copies"), EMPTY)
    return Breakdown(**sets, per_step=step.with_columns(nulls))


def _outside(busy: Intervals, spans: Intervals) -> Intervals:
    if not len(spans):
        return spans
    whole = gaps(busy, int(np.min(spans.start)), int(np.max(spans.end)))
    return intersect(whole, spans)
