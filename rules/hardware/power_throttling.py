"""The GPU lowers its clocks because of a power limit."""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar

from advisor.core.finding import Evidence, Finding, Outcome, Rule, Threshold, Worth
from advisor.core.run_directory import Gpu
from advisor.measure import Analysis
from advisor.rules.hardware.clocks import at_full_clock, clocks
from advisor.rules.recorded import record
from advisor.rules.sources import CHOSEN
from advisor.testing import TraceBuilder


class PowerThrottling(Rule):
    """The GPU runs at its power limit, and the driver lowers the clocks for it. Under dense matrix
    work at the board's own limit that is normal; it is worth a look when clocks fall below 90 % of
    the highest in half of the samples under load, or when the limit is set below the board's.

    A power brake is different: the machine's supply or its controller slows the GPU down from
    outside, to a fraction of its speed, and any sample of it is reported.
    """

    id = "power-throttling"
    title = "The GPU lowers its clocks because of a power limit"
    category = "hardware"
    reads_record = True
    references = ("https://docs.nvidia.com/deploy/nvml-api/group__nvmlClocksEventReasons.html",)

    min_share = Threshold(0.50, "of the samples under load", CHOSEN)
    max_clock = Threshold(0.90, "of the highest clock", CHOSEN)

    fix = (
        "Raise the limit if it is below the board's own (the administrator can); otherwise "
        "accept it, or do the same work with less power: 16-bit instead of TF32, fused "
        "kernels that move less data."
    )
    code = "nvidia-smi -q -d POWER   # 'Default Power Limit' is the board's own"
    verify = "Record again: clocks under load are closer to the highest."
    falsified_by = "the same median step with a higher limit"
    assumptions = ("the step is bound by computing at the clock",)
    confidence = 0.7

    cases: ClassVar = {
        "a power brake": {
            "title": "A power brake slows the GPU down",
            "fix": "Have the machine looked at: power supplies, cabling, the controller's log.",
            "code": "nvidia-smi -q -d PERFORMANCE\nipmitool sel list | tail",
            "verify": "Record again: no sample with a power brake.",
            "confidence": 0.9,
            "falsified_by": "a record on this machine without the reason",
            "assumptions": ("the reason that the driver names is the true one",),
        }
    }

    def check(self, a: Analysis) -> Iterator[Outcome]:
        """Count the samples with a power reason, and look at their clocks."""
        seen = clocks(a)
        brake = seen.share("power brake")
        if brake is not None and brake > 0:
            yield self._brake(a, brake, seen.ratio("power brake"))
            return
        share = seen.share("software power cap")
        ratio = seen.ratio("software power cap")
        if share is None or ratio is None or share < self.min_share or ratio >= self.max_clock:
            return
        recorded = record(a)
        power, limit = recorded.gpu("power"), recorded.gpu("power_limit")
        yield Finding(
            summary=(
                f"In {share:.0%} of the samples under load the power cap holds the clock down, to "
                f"{ratio:.0%} of the highest."
            ),
            evidence=[
                Evidence("samples at the power cap", share, "share", *self.limit("min_share")),
                Evidence("clock in them, of the highest", ratio, "share", *self.limit("max_clock")),
                Evidence("power, W", float(power.mean()) / 1e3 if len(power) else None),
                Evidence("limit, W", float(limit.mean()) / 1e3 if len(limit) else None),
            ],
            worth=at_full_clock(a, share, ratio),
            informational=True,
        )

    def _brake(self, a: Analysis, share: float, ratio: float | None) -> Finding:
        return Finding(
            summary=(
                f"In {share:.0%} of the samples under load the machine's power supply or its "
                "controller holds the GPU down from outside: a fault, or a rack over its budget."
            ),
            evidence=[
                Evidence("samples with a power brake", share, "share"),
                Evidence("clock in them, of the highest", ratio, "share"),
            ],
            worth=Worth(
                currency="risk", reason="a fault outside the GPU; speed falls to a fraction"
            ),
            **self.case("a power brake"),
        )

    @staticmethod
    def fires_on() -> dict[str, TraceBuilder]:
        """Clocks at 75 % under the cap; a brake in a few samples."""
        return {"a low cap": _run(0x4, clock=1500), "a brake": _run(0x80, clock=500, part=0.1)}

    @staticmethod
    def silent_on() -> dict[str, tuple[TraceBuilder, str]]:
        """At the cap with high clocks, as dense work is; a few samples; idle; not told."""
        return {
            "at the cap with high clocks": (_run(0x4, clock=1900), "max_clock"),
            "a few samples": (_run(0x4, clock=1500, part=0.2), "min_share"),
            "idle": (_run(0x4, clock=1500, load=5), "share is None"),
            "not told": (_run(None, clock=1500), "share is None"),
        }


def _run(throttle: int | None, *, clock: int, load: int = 98, part: float = 0.9) -> TraceBuilder:
    b = TraceBuilder()
    r = b.record_of_run()
    r.steps(60, 10)

    def gpu(share: float) -> Gpu:
        held = share >= 1 - part
        return Gpu(
            uuid="GPU-x",
            utilisation=load,
            sm_clock=clock if held else 1980,
            sm_clock_max=1980,
            throttle=None if throttle is None else throttle if held else 0,
            power=690_000,
            power_limit=700_000,
        )

    r.watch(gpu=gpu)
    return b
