"""What rules about a recorded run share: the record, its loader, and the impact of a fix."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from msgspec.structs import replace

from advisor.core.finding import Impact
from advisor.core.rule import Evidence
from advisor.core.run_directory import MAX_VALUE
from advisor.testing import TraceBuilder

if TYPE_CHECKING:
    from collections.abc import Callable

    from advisor.core.intervals import Floats
    from advisor.core.run_directory import Event, Gpu
    from advisor.measure import Analysis
    from advisor.measure.steps.step_records import StepRecords

DEVICE_BOUND = 0.90
"""Busy share of the device from which nothing on the host holds the step up (gpu-idle: 80%)."""
BUSY_PERCENT = 50
"""NVML utilisation from which a sample counts as one under load: idle GPUs lower clocks and links
to save power."""
OWN_PHASES = ("between steps", "other")
"""Of the recorder: the loop's own code, outside loading, forward, backward and optimizer."""
LOOP_SHARE = 0.20
"""Of the step: own code that is reported."""
METHOD = "upper bound (recorded host time)"


def recorded_steps(a: Analysis) -> StepRecords:
    """The record, which the engine promises to rules with ``reads_record``."""
    if a.recorded is None:
        raise ValueError("this rule needs a recorded run")
    return a.recorded


def device_bound(a: Analysis) -> bool:
    """The profiled window shows that the device hardly ever idles."""
    if a.device_id is None or not a.span_ns:
        return False
    return a.breakdown.busy.total / a.span_ns >= DEVICE_BOUND


def own_phases(recorded: StepRecords) -> dict[str, Floats]:
    """Times of the loop's own code in each step that counts, by phase, ns."""
    times = {name: recorded.phase(name) for name in OWN_PHASES}
    return {name: own for name, own in times.items() if own is not None}


def local_ranks(a: Analysis) -> int:
    """Training processes on this machine, from the launcher's environment; 1 without."""
    text = recorded_steps(a).record.rank.env.get("LOCAL_WORLD_SIZE", "")
    return int(text) if text.isdecimal() and 0 < int(text) < 1024 else 1


def impact_per_step(
    a: Analysis,
    gain: float,
    *,
    low: float = 0.0,
    high: float | None = None,
    method: str = METHOD,
    of_median: bool = False,
) -> Impact:
    """An impact in time per step, from recorded host times, ns: of the mean step, or
    ``of_median``."""
    recorded = recorded_steps(a)
    step = (recorded.median if of_median else recorded.mean) or 0.0
    of = step if gain <= step else 0.0
    impact = impact_over_run(gain, low=low, high=high, method=method, of=of)
    return replace(impact, currency="step_time")


def impact_over_run(
    gain: float, *, low: float = 0.0, high: float | None = None, method: str, of: float = 0.0
) -> Impact:
    """An impact in time over the recorded run, ns; ``of``: the time that it is a share of."""
    return Impact(
        currency="run_time",
        gain_ns=round(gain),
        low_ns=round(low),
        high_ns=round(gain if high is None else high),
        method=method,
        share=gain / of if of else None,
    )


def taken_by_training(a: Analysis, loading: float) -> float | None:
    """Part of the main thread's loading that a step computing on the CPU would take from cores that
    it needs itself (see ``StepRecords.taken``), if everything computes that can. ``loading``: its
    share of the step. ``None``: a GPU trains, or CPU use was not recorded."""
    if a.recorded is None or not a.trains_on_host:
        return None
    computed = a.recorded.computed(loading, on_host=True)
    return None if computed is None else a.recorded.taken(loading, computed)


def impact_without_gain(reason: str) -> Impact:
    """No figure, and why."""
    return Impact(currency="unpriced", reason=reason)


def impact_risk(reason: str) -> Impact:
    """What may happen: no figure."""
    return Impact(currency="risk", reason=reason)


def impact_memory(size: int, method: str) -> Impact:
    """GPU memory that a fix frees, bytes."""
    return Impact(currency="memory", freed_bytes=size, method=method)


def under_load(recorded: StepRecords) -> list[Gpu]:
    """The GPU's samples with at least ``BUSY_PERCENT`` utilisation."""
    return [
        gpu
        for gpu in recorded.gpus
        if gpu.utilisation is not None and gpu.utilisation >= BUSY_PERCENT
    ]


def record_example(
    gpu: Gpu | Callable[[float], Gpu], b: TraceBuilder | None = None
) -> TraceBuilder:
    """An example of 60 recorded steps of 10 ms and what was read of the GPU meanwhile (by share of
    the run); ``b``: a trace that belongs to it."""
    b = b or TraceBuilder()
    run = b.record_of_run()
    run.steps(60, 10)
    run.watch(gpu=gpu)
    return b


def find_loader(a: Analysis) -> dict[str, Any] | None:
    """The loader that feeds the steps: the one iterated most often in training."""
    recorded = recorded_steps(a)
    if not recorded.loaders:
        return None
    iterations = [e.get("id") for e in recorded.record.of_kind("loader_iter")]
    return max(recorded.loaders, key=lambda event: iterations.count(event.get("id")))


def started_at(event: Event) -> int:
    """When an iterator of a loader was asked for, ns. The event is written once its purpose is
    known, which may be steps later; records of older versions have only the event's time."""
    began = event.data.get("began_ns")
    known = isinstance(began, int) and not isinstance(began, bool) and abs(began) < MAX_VALUE
    return began if known and isinstance(began, int) else event.t


def workers_of(event: dict[str, Any]) -> int | None:
    """Worker processes of a loader; ``None``: not recorded."""
    value = event.get("workers")
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def steps_seen(recorded: StepRecords) -> Evidence:
    """How many steps the figures cover."""
    return Evidence("steps measured", recorded.count, "count")
