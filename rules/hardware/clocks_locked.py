"""The GPU's clocks are set below the highest."""

from __future__ import annotations

from collections.abc import Iterator

from advisor.core.finding import Evidence, Finding, Outcome, Rule, Threshold
from advisor.core.run_directory import Gpu
from advisor.measure import Analysis
from advisor.rules.hardware.clocks import at_full_clock, clocks
from advisor.rules.sources import CHOSEN
from advisor.testing import TraceBuilder


class ClocksLocked(Rule):
    """Somebody has set application clocks below the GPU's highest, for even measurements or by a
    site's policy: all computing takes longer by as much.

    The driver names the setting as the reason in at least half of the samples under load, and the
    clock in them is below 90 % of the highest. Clocks that the GPU lowers by itself have other
    reasons: see thermal-throttling and power-throttling.
    """

    id = "clocks-locked"
    title = "The GPU's clocks are set below the highest"
    category = "hardware"
    reads_record = True
    references = ("https://docs.nvidia.com/deploy/nvml-api/group__nvmlClocksEventReasons.html",)

    min_share = Threshold(0.50, "of the samples under load", CHOSEN)
    max_clock = Threshold(0.90, "of the highest clock", CHOSEN)

    fix = "Reset the clocks, if the site's policy allows it."
    code = "nvidia-smi -rac && nvidia-smi -rgc   # needs the administrator"
    verify = "Record again: the clock under load is higher."
    falsified_by = "the same median step with reset clocks"
    assumptions = ("the step is bound by computing at the clock",)
    confidence = 0.85

    def check(self, a: Analysis) -> Iterator[Outcome]:
        """Count the samples that name the setting."""
        seen = clocks(a)
        share, ratio = seen.share("application clocks"), seen.ratio("application clocks")
        if share is None or ratio is None or share < self.min_share or ratio >= self.max_clock:
            return
        yield Finding(
            summary=(
                f"Application clocks hold the GPU at {ratio:.0%} of its highest clock in "
                f"{share:.0%} of the samples under load."
            ),
            evidence=[
                Evidence(
                    "samples held by application clocks", share, "share", *self.limit("min_share")
                ),
                Evidence("clock in them, of the highest", ratio, "share", *self.limit("max_clock")),
                Evidence("samples under load", len(seen.samples), "count"),
            ],
            worth=at_full_clock(a, share, ratio),
        )

    @staticmethod
    def fires_on() -> dict[str, TraceBuilder]:
        """Held at 1410 of 1980 MHz."""
        return {"held at 1410 of 1980 MHz": _run(0x2, 1410)}

    @staticmethod
    def silent_on() -> dict[str, tuple[TraceBuilder, str]]:
        """Set to the highest; another reason; idle."""
        return {
            "set to the highest": (_run(0x2, 1980), "max_clock"),
            "another reason": (_run(0x4, 1410), "ratio is None"),
            "idle": (_run(0x2, 1410, load=0), "share is None"),
        }


def _run(throttle: int, clock: int, *, load: int = 98) -> TraceBuilder:
    b = TraceBuilder()
    r = b.record_of_run()
    r.steps(60, 10)
    r.watch(
        gpu=Gpu(
            uuid="GPU-x", utilisation=load, sm_clock=clock, sm_clock_max=1980, throttle=throttle
        )
    )
    return b
