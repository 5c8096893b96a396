"""Replay: a report's accuracy of the replay and its critical path, as plain data."""

from __future__ import annotations

from msgspec import Struct


class HardPart(Struct, frozen=True):
    """Accuracy of the replay for one kind of wait that is hard to reproduce."""

    name: str
    """Kind: syncs that waited, cross-stream starts, queue-blocked launches, waits between
    threads."""
    cases: int
    """Number of such waits in the replayed steps."""
    explained: float
    """Share of the time of these waits whose end the replay's own edges give."""
    error_ns: float
    """Median absolute error of the ends of these waits, ns."""
    time_ns: float
    """Total time of these waits in all replayed steps, ns."""


class Replay(Struct, kw_only=True):
    """The replay that estimates the gains of the findings, and its accuracy."""

    step_ns: float
    """Replayed step without edits, ns: it differs from the measured one by the replay's error."""
    measured_ns: float
    """Measured step, ns."""
    step_error: float
    """Mean absolute error of the replayed steps, as a share of the step."""
    starts: int
    """Number of starts of device work in the replayed steps."""
    explained: float | None
    """Share of these starts that the graph explains within 5 µs; ``null``: no device work."""
    hard: list[HardPart]
    """Accuracy for each kind of wait that is hard to reproduce."""
    waits: float
    """Share of the steps that the host waits for the device."""
    waits_explained: float | None
    """Share of that waiting whose ends the replay's own edges give; ``null``: it never waits."""
    idle: float
    """Share of the steps that the device idles."""
    idle_explained: float | None
    """Share of that idle time whose ends the replay's own edges give; ``null``: it never idles."""
    steps: int
    """Number of consecutive steps that are replayed."""
    of_steps: int
    """Number of steps that were measured."""
    critical: dict[str, float]
    """Parts of the critical path, ns per step."""
    critical_after: dict[str, float]
    """Parts of the critical path once all ranked findings are fixed, ns per step."""
    step_after_ns: float
    """Measured step less what all ranked findings save together, ns."""
    busy_after_ns: float | None = None
    """Time in which the device works in that step, ns; ``null``: no device, or not replayed."""
    unprofiled: bool = False
    """Whether the critical path is of a step without the profiler's time on the host."""
