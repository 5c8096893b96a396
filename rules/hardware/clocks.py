"""What rules about clocks share: samples under load, and what a lower clock costs at most."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from advisor.core.run_directory import THROTTLE
from advisor.rules.recorded import a_step, record, under_load

if TYPE_CHECKING:
    from advisor.core.finding import Worth
    from advisor.core.run_directory import Gpu
    from advisor.measure import Analysis

MIN_SAMPLES = 5
"""Samples under load below which nothing is said."""


class Clocks(NamedTuple):
    """Samples of the GPU under load."""

    samples: list[Gpu]
    throttle: list[int]
    """Reasons of those that tell them."""

    def share(self, *reasons: str) -> float | None:
        """Share of the samples in which one of the reasons was given; ``None``: not told."""
        if len(self.throttle) < MIN_SAMPLES:
            return None
        bits = sum(THROTTLE[reason] for reason in reasons)
        return float(np.mean([(value & bits) != 0 for value in self.throttle]))

    def ratio(self, *reasons: str) -> float | None:
        """Mean clock over the highest one, in the samples with one of the reasons (all without);
        ``None``: not told."""
        bits = sum(THROTTLE[reason] for reason in reasons)
        found = [
            gpu.sm_clock / gpu.sm_clock_max
            for gpu in self.samples
            if gpu.sm_clock
            and gpu.sm_clock_max
            and (not bits or (gpu.throttle is not None and gpu.throttle & bits))
        ]
        return float(np.mean(found)) if found else None


def clocks(a: Analysis) -> Clocks:
    """The clocks of the rank's GPU under load."""
    samples = under_load(record(a))
    return Clocks(samples, [gpu.throttle for gpu in samples if gpu.throttle is not None])


def at_full_clock(a: Analysis, share: float, ratio: float | None) -> Worth:
    """What full clocks would save at most: the step in proportion to the clock, while it was
    low. Work that waits for memory or for the host gains less, down to nothing."""
    recorded = record(a)
    lost = share * (1 - ratio) if ratio is not None else 0.0
    gain = max(0.0, lost) * (recorded.mean or 0.0)
    return a_step(a, gain, low=0.0, method="upper bound (clock, share of the time it was low)")
