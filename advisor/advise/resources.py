"""Energy and money of a report: measured power, and the time of a step at a price."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from advisor.core.prices import Prices
from advisor.core.resources import Cost, EnergyUse, FixCost, RankEnergy
from advisor.measure.device.energy import step_energy

if TYPE_CHECKING:
    from advisor.core.report import Report
    from advisor.core.trace import Run
    from advisor.measure import Analysis

HOUR_NS = 3.6e12
MAX_GPUS = 1_000_000
"""A damaged record does not make a price."""


def energy_use(analyses: Mapping[int, Analysis]) -> EnergyUse | None:
    """Energy a step by rank and together; ``None``: not sampled on any."""
    found: list[RankEnergy] = []
    boards: dict[str, RankEnergy] = {}
    for number, a in analyses.items():
        energy = None if a.recorded is None else step_energy(a.recorded)
        if energy is None or a.recorded is None:
            continue
        one = RankEnergy(rank=number, **energy._asdict())
        found.append(one)
        boards.setdefault(a.recorded.uuid or f"rank {number}", one)  # ranks may share a GPU
    if not found:
        return None
    whole = len(found) == len(analyses)
    return EnergyUse(
        joules=sum(one.joules for one in boards.values()) if whole else None,
        watts=sum(one.watts for one in boards.values()) if whole else None,
        ranks=found,
    )


def cost(run: Run, report: Report, prices: Prices, gpus: int | None = None) -> Cost | None:
    """What a step costs; ``None``: no price is known for this GPU, or no step. ``gpus``: that are
    paid for; ``None``: one a rank."""
    price = prices.of(report.scope.device_name)
    if price is None or report.step_ns <= 0 or report.scope.step_source == "snapshot":
        return None
    count = gpus or _gpus(run, report)
    a_ns = price.per_hour * count / HOUR_NS
    ranked = [f for f in report.findings if f.folded_under is None and f.rank is not None]
    saved = {id(f): max(0, f.marginal_gain_ns or 0) for f in ranked}
    left = max(0.0, report.step_ns - sum(saved.values()))
    took = _took(run, report)
    return Cost(
        currency=price.currency,
        per_hour=price.per_hour,
        gpus=count,
        source=price.source,
        step=report.step_ns * a_ns,
        run=None if took is None else took * a_ns,
        step_after=left * a_ns if any(saved.values()) else None,
        bound=report.replay is None,
        fixes=[
            FixCost(rule=f.rule, rank=f.rank or 0, step=saved[id(f)] * a_ns)
            for f in ranked
            if saved[id(f)]
        ],
    )


def _gpus(run: Run, report: Report) -> int:
    world = run.recording.manifest.world_size if run.recording is not None else None
    return min(MAX_GPUS, max(1, world or len(run.ranks), report.scope.devices_seen))


def _took(run: Run, report: Report) -> float | None:
    """From the first step to the end of the last, of the reported rank, ns."""
    if run.recording is None:
        return None
    from advisor.measure.steps.record import StepRecords

    record = run.recording.ranks.get(report.scope.rank or 0)
    recorded = None if record is None else StepRecords(record)
    if recorded is None or not len(recorded.ts):
        return None
    return float((recorded.ts + recorded.dur).max() - recorded.ts.min())
