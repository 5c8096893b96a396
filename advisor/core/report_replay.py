"""Replay: accuracy of a report's replay and its critical path, as plain data."""

from msgspec import Struct


class HardPart(Struct, frozen=True):
    """Accuracy of the replay for one kind of wait that is hard to reproduce."""

    name: str
    """Kind: syncs that waited, cross-stream starts, queue-blocked launches or waits between
    threads."""
    cases: int
    """Number of such waits in the replayed steps."""
    explained: float
    """Share of the waiting time whose end follows from the replay's own edges."""
    error_ns: float
    """Median absolute error of the ends of these waits, ns."""
    time_ns: float
    """Total time of these waits in all replayed steps, ns."""


class Replay(Struct, kw_only=True):
    """The replay that estimates the gains of the findings, and its accuracy."""

    step_ns: float
    """Replayed step without edits, ns. It differs from the measured step by the replay's error."""
    measured_ns: float
    """Measured step, ns."""
    step_error: float
    """Mean absolute error of the replayed steps, as a share of the step."""
    starts: int
    """Number of starts of device work in the replayed steps."""
    explained: float | None
    """Share of the starts that the graph explains within 5 µs, or ``null`` without device work."""
    hard: list[HardPart]
    """Accuracy for each kind of wait that is hard to reproduce."""
    waits: float
    """Share of the steps in which the host waits for the device."""
    waits_explained: float | None
    """Share of these waits whose end follows from the replay's edges, or ``null`` without waits."""
    idle: float
    """Share of the steps in which the device idles."""
    idle_explained: float | None
    """Share of the idle time whose end follows from the replay's edges, or ``null`` without any."""
    steps: int
    """Number of consecutive replayed steps. More than ``of_steps`` if those are too few to replay
    alone."""
    of_steps: int
    """Number of measured steps."""
    critical: dict[str, float]
    """Parts of the critical path, ns per step."""
    critical_after: dict[str, float]
    """Parts of the critical path after all ranked fixes, ns per step."""
    step_after_ns: float
    """Measured step minus the saving of all ranked fixes together, ns."""
    busy_after_ns: float | None = None
    """Device time in the step after all fixes, ns, or ``null`` without a device or a replay."""
    unprofiled: bool = False
    """Whether the critical path leaves out the profiler's time on the host."""
