"""The GPU lowers its clocks because it is too hot."""

from __future__ import annotations

from collections.abc import Iterator

from advisor.core.finding import Evidence, Finding, Outcome, Rule, Source, Threshold
from advisor.core.run_directory import Gpu
from advisor.measure import Analysis
from advisor.rules.hardware.clocks import at_full_clock, clocks
from advisor.rules.recorded import record
from advisor.rules.sources import CHOSEN
from advisor.testing import TraceBuilder

_REASONS = ("software thermal", "hardware thermal", "hardware slowdown")


class ThermalThrottling(Rule):
    """The GPU lowers its clocks to stay below its temperature limit: everything it computes takes
    longer, and in a job of several GPUs all wait for the hottest.

    The driver tells the reason itself (software and hardware thermal slowdown, hardware slowdown).
    Counted are samples under load, 50 % utilisation or more; reported when at least 5 % of them
    have the reason.

    A cap on power is another matter and usual under dense load: see power-throttling.
    """

    id = "thermal-throttling"
    title = "The GPU lowers its clocks because it is too hot"
    category = "hardware"
    reads_record = True
    sources = (Source("under load from 50 % utilisation", "rules/recorded.py"),)
    references = ("https://docs.nvidia.com/deploy/nvml-api/group__nvmlClocksEventReasons.html",)

    min_share = Threshold(0.05, "of the samples under load", CHOSEN)

    fix = (
        "Cool it better: air flow, fans, dust, the place in the rack. Until then a power "
        "limit a little lower on all GPUs of the job keeps them alike."
    )
    code = (
        "nvidia-smi -q -d TEMPERATURE,PERFORMANCE\n"
        "nvidia-smi -pl 600   # watts; needs the administrator"
    )
    verify = "Record again: no thermal reason under load."
    falsified_by = "the same median step on a cool GPU of the same kind"
    assumptions = ("the step is bound by computing at the clock",)
    confidence = 0.85

    def check(self, a: Analysis) -> Iterator[Outcome]:
        """Count the samples with a thermal reason."""
        seen = clocks(a)
        share = seen.share(*_REASONS)
        if share is None or share < self.min_share:
            return
        ratio = seen.ratio(*_REASONS)
        recorded = record(a)
        heat = recorded.gpu("temperature")
        limit = recorded.gpu("temperature_slowdown")
        yield Finding(
            summary=(
                f"In {share:.0%} of the samples under load the driver holds clocks down because of "
                "the temperature"
                + (f", to {ratio:.0%} of the highest clock." if ratio is not None else ".")
            ),
            evidence=[
                Evidence("samples with a thermal reason", share, "share", *self.limit("min_share")),
                Evidence("samples under load", len(seen.samples), "count"),
                Evidence("clock in them, of the highest", ratio, "share"),
                Evidence("highest temperature, °C", float(heat.max()) if len(heat) else None),
                Evidence("slowdown from, °C", float(limit.max()) if len(limit) else None),
            ],
            worth=at_full_clock(a, share, ratio),
        )

    @staticmethod
    def fires_on() -> dict[str, TraceBuilder]:
        """Software and hardware thermal slowdown in a part of the samples."""
        return {"software": _run(0x20), "hardware": _run(0x40 | 0x8)}

    @staticmethod
    def silent_on() -> dict[str, tuple[TraceBuilder, str]]:
        """A power cap; an idle GPU; a single sample; not told."""
        return {
            "a power cap": (_run(0x4), "share < self.min_share"),
            "an idle GPU": (_run(0x20, load=3), "share is None"),
            "a single sample": (_run(0x20, part=0.01), "min_share"),
            "not told": (_run(None), "share is None"),
        }


def _run(throttle: int | None, *, load: int = 98, part: float = 0.4) -> TraceBuilder:
    b = TraceBuilder()
    r = b.record_of_run()
    r.steps(60, 10)

    def gpu(share: float) -> Gpu:
        hot = throttle is not None and share >= 1 - part
        return Gpu(
            uuid="GPU-x",
            utilisation=load,
            sm_clock=1200 if hot else 1980,
            sm_clock_max=1980,
            throttle=None if throttle is None else throttle if hot else 0,
            temperature=88 if hot else 70,
            temperature_slowdown=87,
        )

    r.watch(gpu=gpu)
    return b
