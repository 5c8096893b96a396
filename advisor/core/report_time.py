"""Time: a report's parts of the step on device and host, as plain data."""

from __future__ import annotations

from msgspec import Struct, field


class TimeShare(Struct, frozen=True):
    """Exclusive device time of one class, per step."""

    name: str
    """Class: ``compute``, ``communication``, ``copies``, ``memset`` or ``idle``, each only while
    none of those before it runs."""
    ns: float
    """Time per step, ns."""
    share: float
    """Share of the step."""


class SampledFunction(Struct, frozen=True):
    """Function in which the CPU was sampled."""

    name: str
    """Function, as the profiler names it."""
    share: float
    """Share of the step, by the time from its samples to the next ones."""


class NextOperator(Struct, frozen=True):
    """Operator that ended idle time of the device: it launched the work that ran next."""

    name: str
    """Outermost ``aten::`` operator around the launch."""
    share: float
    """Share of the cause's idle time that it ended."""


class IdleCause(Struct, frozen=True):
    """Idle device time attributed to one cause, per step."""

    cause: str
    """Cause, one of ``measure.host.gaps.CAUSES``."""
    ns: float
    """Idle time per step, ns."""
    share: float
    """Share of the step."""
    functions: list[SampledFunction] = field(default_factory=list)
    """Functions that samples of the CPU show meanwhile, most first; empty: no samples."""
    outside_operators: bool = False
    """Whether an ``unknown`` cause is mostly code of the host outside recorded operators."""
    gaps: float | None = None
    """Gaps per step that have this cause, if the host is outside operators then; ``null``: it is
    not."""
    next_operators: list[NextOperator] = field(default_factory=list)
    """Operators that ended these gaps, three at most, largest first."""


class TimeWithoutFix(Struct, frozen=True):
    """Parts of the step's time that no finding is about, and why no fix is offered for them."""

    labels: list[str]
    """Names of the parts, as beside the bar."""
    ns: float
    """Time per step, ns."""
    share: float
    """Share of the step."""
    why: str
    """Reason: it is too little for a fix, a note is about it, its check was skipped."""


class Family(Struct, frozen=True):
    """Device time of one kernel family per step, not exclusive of other streams."""

    name: str
    """Family, one of ``measure.device.families.FAMILIES``."""
    ns: float
    """Sum of the kernels' durations per step, ns."""
    share: float
    """Share of all device work: kernels, copies and memsets, their durations summed."""
    count: float
    """Kernels per step."""


class HostShare(Struct, frozen=True):
    """Host time of the main thread, per step."""

    name: str
    """Class, one of ``measure.steps.timeline.CLASSES``; without a trace, a phase of the record."""
    ns: float
    """Exclusive time per step, ns."""
    share: float
    """Share of the step; of the host's own, ``Report.host_step_ns``, where it runs ahead."""


class OperatorTime(Struct, frozen=True):
    """Self time of one operator on the host, over all threads, per step."""

    name: str
    """Name as the profiler wrote it."""
    ns: float
    """Self time per step, ns."""
    share: float
    """Share of all operators' time."""
    count: float
    """Calls per step."""
