"""Time: parts of a report's step on device and host, as plain data."""

from msgspec import Struct, field


class TimeShare(Struct, frozen=True):
    """Exclusive device time of one class, per step."""

    name: str
    """Class: ``compute``, ``communication``, ``copies``, ``memset`` or ``idle``. Each counts only
    while no class before it in this list runs."""
    ns: float
    """Time per step, ns."""
    share: float
    """Share of the step."""


class SampledFunction(Struct, frozen=True):
    """Function that CPU samples show."""

    name: str
    """Name of the function as the profiler wrote it."""
    share: float
    """Share of the step, from the time between its samples and the next ones."""


class NextOperator(Struct, frozen=True):
    """Operator that ended idle time of the device by launching the next work."""

    name: str
    """Outermost ``aten::`` operator around the launch."""
    share: float
    """Share of the cause's idle time that the operator ended."""


class IdleCause(Struct, frozen=True):
    """Idle device time attributed to one cause, per step."""

    cause: str
    """Cause, one of ``measure.host.gaps.CAUSES``."""
    ns: float
    """Idle time per step, ns."""
    share: float
    """Share of the step."""
    functions: list[SampledFunction] = field(default_factory=list)
    """Functions that CPU samples show during the idle time, most frequent first. Empty without
    any."""
    outside_operators: bool = False
    """Whether an ``unknown`` cause is mostly host code outside recorded operators."""
    gaps: float | None = None
    """Gaps per step with this cause, if the host is outside operators, or ``null`` otherwise."""
    next_operators: list[NextOperator] = field(default_factory=list)
    """Operators that ended these gaps, at most three, largest first."""


class TimeWithoutFix(Struct, frozen=True):
    """Parts of the step's time that no finding covers, with the reason why there is no fix."""

    labels: list[str]
    """Names of the parts, as in the legend of the bar."""
    ns: float
    """Time per step, ns."""
    share: float
    """Share of the step."""
    why: str
    """Reason: the time is too short for a fix, a note covers it, or its check was skipped."""


class Family(Struct, frozen=True):
    """Device time of one kernel family per step. It may overlap work on other streams."""

    name: str
    """Family, one of ``measure.device.families.FAMILIES``."""
    ns: float
    """Total duration of the kernels per step, ns."""
    share: float
    """Share of the total duration of all kernels, copies and memsets."""
    count: float
    """Kernels per step."""


class HostShare(Struct, frozen=True):
    """Host time of the main thread, per step."""

    name: str
    """Class, one of ``measure.steps.timeline.CLASSES``, or without a trace a phase of the
    record."""
    ns: float
    """Exclusive time per step, ns."""
    share: float
    """Share of the step, or of ``Report.host_step_ns`` if the host runs ahead."""


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
