"""GPU clocks are held below their maximum: by temperature, by power, by a setting."""

from typing import ClassVar

import numpy as np
from msgspec.structs import replace

from advisor.core.finding import Finding, Impact, Outcomes, impact_risk
from advisor.core.rule import Citation, Evidence, Rule, Threshold
from advisor.core.run_directory import THROTTLE_BITS, GpuSample
from advisor.measure import Analysis
from advisor.rules.support.citations import CHOSEN
from advisor.rules.support.common import impact_per_step, record_example, run_steps_of, under_load
from advisor.testing import Examples, TraceBuilder

_MIN_SAMPLES = 5
"""Minimum number of samples under load."""


class HeldClocks(Rule):
    """Base of the rules about lowered clocks: how often the driver names a reason, and how low the
    clock is in those samples."""

    reads_record = True
    references = ("https://docs.nvidia.com/deploy/nvml-api/group__nvmlClocksEventReasons.html",)
    assumptions = ("the step is compute-bound and scales with the clock",)

    min_share: ClassVar[Threshold[float]]
    _reasons: ClassVar[tuple[str, ...]]
    """Keys of ``THROTTLE_BITS``: possible reasons that the driver gives."""
    _label: ClassVar[str]
    """Evidence label of the samples with the reason."""
    _summary: ClassVar[str]
    """Summary text. ``{share}`` is of the samples, ``{clock}`` is empty if it is not recorded."""
    _informational: ClassVar[bool] = False

    def check(self, a: Analysis) -> Outcomes:
        samples = under_load(run_steps_of(a))
        share = share_of_samples(samples, *self._reasons)
        if share is None or share < self.min_share:
            return
        ratio = mean_clock(samples, *self._reasons)
        max_clock = getattr(self, "max_clock", None)
        if max_clock is not None and (ratio is None or ratio >= max_clock):
            return
        label = "their clock, share of the maximum"
        clock_evidence = Evidence(label, ratio, "share")
        if max_clock is not None:
            clock_evidence = self.compare(label, ratio, "max_clock")
        clock_text = "" if ratio is None else f" to {ratio:.0%} of the maximum"
        yield Finding(
            summary=self._summary.format(share=f"{share:.0%}", clock=clock_text),
            evidence=[
                self.compare(self._label, share, "min_share"),
                clock_evidence,
                Evidence("samples under load", len(samples), "count"),
                *self._list_details(a),
            ],
            impact=estimate_full_clock(a, share, ratio),
            informational=self._informational,
        )

    def _list_details(self, a: Analysis) -> list[Evidence]:
        """Return sensor values that explain the reason, as evidence."""
        return []


class ThermalThrottling(HeldClocks):
    """The GPU lowers its clocks to stay below its temperature limit. Every kernel takes longer, and
    in a job of several GPUs all of them wait for the hottest.

    The driver gives the reason itself: software thermal slowdown, hardware thermal slowdown, or
    hardware slowdown. Only samples under load count (50% utilisation or more). The rule fires when
    at least 5% of them have the reason.

    A power cap is different, and normal under dense load: see power-throttling."""

    id = "thermal-throttling"
    title = "The GPU is thermal throttling"
    sources = (Citation("under load from 50% utilisation", "rules/support/common.py"),)

    min_share = Threshold(0.05, "of the samples under load", CHOSEN)

    fix = (
        "Improve the cooling: air flow, fans, dust, the place in the rack. Until then, set a "
        "slightly lower power limit on all GPUs of the job, so that they run at the same speed."
    )
    code = (
        "nvidia-smi -q -d TEMPERATURE,PERFORMANCE\n"
        "nvidia-smi -pl 600   # watts; needs administrator rights"
    )
    verify = "Record again: no thermal reason under load."
    falsified_by = "the same median step on a cool GPU of the same model"
    confidence = 0.85

    _reasons = ("software thermal", "hardware thermal", "hardware slowdown")
    _label = "samples with a thermal reason"
    _summary = "Heat held the clock down{clock} in {share} of the samples under load."

    def _list_details(self, a: Analysis) -> list[Evidence]:
        reached = run_steps_of(a).gpu("temperature")
        slowdown = run_steps_of(a).gpu("temperature_slowdown")
        return [
            Evidence("peak temperature, °C", float(reached.max()) if len(reached) else None),
            Evidence("slowdown temperature, °C", float(slowdown.max()) if len(slowdown) else None),
        ]

    @staticmethod
    def examples() -> Examples:
        return {
            "software": _build_run(0x20, 1200, part=0.4),
            "hardware": _build_run(0x40 | 0x8, 1200, part=0.4),
            "a power cap": (_build_run(0x4, 1200, part=0.4), "share < self.min_share"),
            "an idle GPU": (_build_run(0x20, 1200, part=0.4, load=3), "share is None"),
            "a single sample": (_build_run(0x20, 1200, part=0.01), "min_share"),
            "not recorded": (_build_run(None, 1200, part=0.4), "share is None"),
        }


class PowerThrottling(HeldClocks):
    """The GPU runs at its power limit, and the driver lowers the clocks: below 90% of the maximum
    in half of the samples under load.

    Under dense matrix work at the board's own limit that is normal, and only a note. A limit below
    the board's default is a setting, and raising it may shorten the step.

    A power brake is different. The machine's power supply or its controller slows the GPU down from
    outside, to a fraction of its speed. So the rule reports a single sample of it."""

    id = "power-throttling"
    title = "The GPU runs at its power limit"

    min_share = Threshold(0.50, "of the samples under load", CHOSEN)
    max_clock = Threshold(0.90, "of the maximum clock", CHOSEN)

    min_limit = Threshold(0.98, "of the board's default power limit", CHOSEN)

    fix = (
        "Accept it, or draw less power for the same work: fused kernels that move less data, and a "
        "lower precision where it is enough."
    )
    code = "nvidia-smi -q -d POWER   # 'Default Power Limit' is the board's own"
    verify = "Record again: clocks under load are closer to the maximum."
    falsified_by = "the same median step with a higher power limit"
    confidence = 0.7
    cases = {
        "a low limit": {
            "title": "The power limit is below the board's default",
            "fix": (
                "Raise the power limit to the board's {default} W, if the site's policy and the "
                "cooling allow it (needs administrator rights)."
            ),
            "code": "nvidia-smi -pl {default}   # watts",
        },
        "a power brake": {
            "title": "A power brake slows the GPU down",
            "fix": "Have the machine checked: power supplies, cabling, the controller's log.",
            "code": "nvidia-smi -q -d PERFORMANCE\nipmitool sel list | tail",
            "verify": "Record again: no sample with a power brake.",
            "confidence": 0.9,
            "falsified_by": "a record on this machine without the reason",
            "assumptions": ("the driver names the true reason",),
        },
    }

    _reasons = ("software power cap",)
    _label = "samples at the power cap"
    _summary = "The power cap held the clock down{clock} in {share} of the samples under load."
    _informational = True

    def check(self, a: Analysis) -> Outcomes:
        samples = under_load(run_steps_of(a))
        brake = share_of_samples(samples, "power brake")
        if not brake:
            for finding in super().check(a):
                yield self._advise(a, finding) if isinstance(finding, Finding) else finding
            return
        yield Finding(
            summary=(
                f"A power brake slowed the GPU down in {brake:.0%} of the samples under load: "
                "a fault of the power supply or its controller, or a rack over its budget."
            ),
            evidence=[
                Evidence("samples with a power brake", brake, "share"),
                Evidence(
                    "clock under the power brake, share of the maximum",
                    mean_clock(samples, "power brake"),
                    "share",
                ),
            ],
            impact=impact_risk("a fault outside the GPU; speed falls to a fraction"),
            **self.case("a power brake"),
        )

    def _advise(self, a: Analysis, finding: Finding) -> Finding:
        """Return the finding with its fix. Only a limit that was set low can be raised."""
        limit, default = self._limits(a)
        if limit is None or default is None:
            text = "Raise the limit if it is below the board's default."
        elif limit < self.min_limit * default:
            return replace(finding, **self.case("a low limit", default=round(default)))
        else:
            text = f"The limit of {limit:.0f} W is the board's own."
        return replace(finding, fix=f"{self.fix} {text}", impact=None)

    @staticmethod
    def _limits(a: Analysis) -> tuple[float | None, float | None]:
        """Return the mean power limit in force and the board's default, W, None if not recorded."""
        limit, default = (
            run_steps_of(a).gpu(name) for name in ("power_limit", "power_limit_default")
        )
        return (
            float(limit.mean()) / 1e3 if len(limit) else None,
            float(default.max()) / 1e3 if len(default) else None,
        )

    def _list_details(self, a: Analysis) -> list[Evidence]:
        power, (limit, default) = run_steps_of(a).gpu("power"), self._limits(a)
        return [
            Evidence("power, W", float(power.mean()) / 1e3 if len(power) else None),
            Evidence("power limit, W", limit),
            Evidence("default power limit, W", default),
        ]

    @staticmethod
    def examples() -> Examples:
        return {
            "a low cap": _build_run(0x4, 1500, default=900_000),
            "the board's own cap": _build_run(0x4, 1500, default=700_000),
            "a cap, the board's own not recorded": _build_run(0x4, 1500),
            "a brake": _build_run(0x80, 500, part=0.1),
            "at the cap with high clocks": (_build_run(0x4, 1900), "max_clock"),
            "a few samples": (_build_run(0x4, 1500, part=0.2), "min_share"),
            "idle": (_build_run(0x4, 1500, load=5), "share is None"),
            "not recorded": (_build_run(None, 1500), "share is None"),
        }


class ClocksLocked(HeldClocks):
    """Application clocks are set below the GPU's maximum, for stable measurements or by a site's
    policy. All computing takes longer in proportion.

    The driver names the setting as the reason in at least half of the samples under load. The clock
    in them is below 90% of the maximum. Clocks that the GPU lowers by itself have other reasons:
    see thermal-throttling and power-throttling."""

    id = "clocks-locked"
    title = "GPU clocks are locked below the maximum"

    min_share = Threshold(0.50, "of the samples under load", CHOSEN)
    max_clock = Threshold(0.90, "of the maximum clock", CHOSEN)

    fix = "Reset the clocks, if the site's policy allows it."
    code = "nvidia-smi -rac && nvidia-smi -rgc   # needs administrator rights"
    verify = "Record again: the clock under load is higher."
    falsified_by = "the same median step with reset clocks"
    confidence = 0.85

    _reasons = ("application clocks",)
    _label = "samples limited by application clocks"
    _summary = "Application clocks held the clock down{clock} in {share} of the samples under load."

    @staticmethod
    def examples() -> Examples:
        return {
            "held at 1410 of 1980 MHz": _build_run(0x2, 1410, part=1),
            "set to the maximum": (_build_run(0x2, 1980, part=1), "max_clock"),
            "another reason": (_build_run(0x4, 1410, part=1), "share < self.min_share"),
            "idle": (_build_run(0x2, 1410, part=1, load=0), "share is None"),
        }


def share_of_samples(samples: list[GpuSample], *reasons: str) -> float | None:
    """Return the share of samples with one of the driver's reasons, or ``None`` if unknown."""
    recorded = [gpu.throttle for gpu in samples if gpu.throttle is not None]
    if len(recorded) < _MIN_SAMPLES:
        return None
    bits = sum(THROTTLE_BITS[reason] for reason in reasons)
    return float(np.mean([(value & bits) != 0 for value in recorded]))


def mean_clock(samples: list[GpuSample], *reasons: str) -> float | None:
    """Return the mean clock over the maximum in samples with a reason, or ``None`` if unknown."""
    bits = sum(THROTTLE_BITS[reason] for reason in reasons)
    ratios = [
        gpu.sm_clock / gpu.sm_clock_max
        for gpu in samples
        if gpu.sm_clock and gpu.sm_clock_max and gpu.throttle is not None and gpu.throttle & bits
    ]
    return float(np.mean(ratios)) if ratios else None


def estimate_full_clock(a: Analysis, share: float, ratio: float | None) -> Impact:
    """Estimate the maximum saving of full clocks: the step scales with the clock while it was low.
    Work that waits for memory or for the host gains less, down to nothing."""
    lost_share = share * (1 - ratio) if ratio is not None else 0.0
    gain = max(0.0, lost_share) * (run_steps_of(a).mean or 0.0)
    method = "upper bound (clock, share of the time it was low)"
    return impact_per_step(a, gain, low=0.0, method=method, kind="upper bound", of_host=False)


def _build_run(
    throttle: int | None,
    clock: int,
    *,
    load: int = 98,
    part: float = 0.9,
    default: int | None = None,
) -> TraceBuilder:
    """Build a run whose last ``part`` has a lower clock, a higher temperature, and the reason."""

    def gpu(share: float) -> GpuSample:
        is_low = share >= 1 - part
        return GpuSample(
            uuid="GPU-x",
            utilisation=load,
            sm_clock=clock if is_low else 1980,
            sm_clock_max=1980,
            throttle=None if throttle is None else throttle if is_low else 0,
            temperature=88 if is_low else 70,
            temperature_slowdown=87,
            power=690_000,
            power_limit=700_000,
            power_limit_default=default,
        )

    return record_example(gpu)
