"""Report: what was found, as plain data with a versioned schema. Renderers compute nothing."""

from __future__ import annotations

from typing import Any, Literal

import msgspec
from msgspec import Struct, field

from advisor.errors import AdvisorError
from advisor.model import Finding, Good, HotLine, NotMeasured

SCHEMA = "advisor.report/1"

Status = Literal["bottlenecks", "healthy", "limited"]


class Input(Struct, kw_only=True):
    """One trace that was read."""

    path: str
    """As it was given; ``-``: standard input."""
    rank: int | None
    """``null``: neither the file nor its name tells."""
    window: int
    """Which recording of this rank, in order of time, from 0."""
    windows: int
    """How many windows this rank has; only one is analysed."""
    events_read: int
    """Events that were kept."""
    events_dropped: dict[str, int]
    """Reason -> events that were left out."""
    bytes_read: int
    """Uncompressed size, bytes."""
    truncated: bool
    """The file ends early: only what comes before is analysed."""
    damage: str | None = None
    """What the unpacker or the JSON reader complained of."""


class Scope(Struct, kw_only=True):
    """What the figures are about."""

    rank: int | None
    """The rank that the figures are of."""
    step_source: str
    """``ProfilerStep``, ``recorder``, ``optimizer`` or ``whole trace``; ``record`` when no window
    was profiled and the figures are the recorder's own."""
    steps_found: int
    """Steps in the trace, or in the range that was asked for."""
    steps_used: int
    """Steps that are measured: whole ones that are no outliers."""
    outliers: list[str]
    """Names of the steps that were set aside."""
    span_ns: int
    """Length of the analysed window, ns."""
    step_ns: float
    """Mean duration of the used steps, ns."""
    step_min_ns: int
    """The shortest used step, ns."""
    step_max_ns: int
    """The longest used step, ns."""
    step_median_ns: float
    """Of the used steps, ns."""
    device: int | None
    """The GPU that is analysed, the one with most work; ``null``: no device work."""
    device_name: str | None
    """As the trace has it."""
    device_known: bool
    """There is an entry in advisor/hardware: rooflines can be measured."""
    devices_seen: int
    """GPUs with work in the trace."""


class IdleCause(Struct, frozen=True):
    """Idle device time blamed on one cause, a step."""

    cause: str
    """One of ``analysis.gaps.CAUSES``."""
    ns: float
    """A step, ns."""
    share: float
    """Of the step."""


class TimeShare(Struct, frozen=True):
    """Exclusive device time of one class, a step."""

    name: str
    """``compute``, ``communication``, ``copies``, ``memset`` or ``idle``, each only while none of
    those before it runs."""
    ns: float
    """A step, ns."""
    share: float
    """Of the step."""


class Family(Struct, frozen=True):
    """Device time of one kernel family, a step, not exclusive of other streams."""

    name: str
    """One of ``analysis.families.FAMILIES``."""
    ns: float
    """Durations summed, a step, ns."""
    share: float
    """Of all kernel time."""
    count: float
    """Kernels a step."""


class HostShare(Struct, frozen=True):
    """Host time of the main thread, a step."""

    name: str
    """One of ``analysis.host.CLASSES``; without a trace, a phase that the recorder measured."""
    ns: float
    """A step, ns, exclusive."""
    share: float
    """Of the step."""


class OperatorTime(Struct, frozen=True):
    """Host time of one operator, on all threads, without what it calls."""

    name: str
    """As the profiler wrote it."""
    ns: float
    """A step, ns."""
    share: float
    """Of all operators' time."""
    count: float
    """Calls a step."""


class HardPart(Struct, frozen=True):
    """How well one of the hard parts of the replay is reproduced."""

    name: str
    """Syncs that waited, cross-stream starts, queue-blocked launches, thread hand-overs."""
    cases: int
    """How many there are in the replayed steps."""
    explained: float
    """Share of them that come within 5 µs of what was measured."""
    error_ns: float
    """Median absolute error, ns."""


class Replay(Struct, kw_only=True):
    """The replay that prices the findings, and how far to trust it."""

    step_ns: float
    """Replayed step without edits: the measured one, off by the error of the replay, ns."""
    measured_ns: float
    """The measured step, ns."""
    step_error: float
    """Mean absolute error of the replayed steps, share of the step."""
    starts: int
    """Device starts in the replayed steps."""
    explained: float | None
    """Share of them that the graph explains within 5 µs; ``null``: no device work."""
    hard: list[HardPart]
    """The hard parts alone."""
    steps: int
    """Consecutive steps that are replayed."""
    of_steps: int
    """Steps that were measured."""
    critical: dict[str, float]
    """What the critical path consists of, ns a step."""
    critical_after: dict[str, float]
    """The same once all ranked findings are fixed: where the bottleneck moves to."""
    step_after_ns: float
    """The measured step less what all ranked findings save in a replay, ns."""


class Phase(Struct, frozen=True):
    """Host time of one phase, of the recorded steps that count."""

    name: str
    """``data``, ``h2d``, ``forward``, ``backward``, ``optimizer``, ``other``, or the user's own."""
    ns: float
    """Mean a step, ns."""
    share: float
    """Of the step."""


class Recorded(Struct, kw_only=True):
    """What the recorder measured around the profiled window: steps that no profiler slowed."""

    steps: int
    """Steps that were recorded."""
    used: int
    """Steps that count: after the warm-up, no window open, not the one after a window."""
    median_ns: float | None
    """Of the steps that count; ``null``: there are none."""
    mean_ns: float | None
    """Of the steps that count."""
    p99_ns: float | None
    """99th percentile of the steps that count; ``null``: fewer than a hundred."""
    profiled_steps: int
    """Steps while a window was open."""
    profiled_median_ns: float | None
    """Median of the steps that windows kept; ``null``: fewer than two."""
    observer_effect: float | None
    """How much longer these are than the unprofiled ones around them, as a share of those;
    ``null``: one kind is missing."""
    phases: list[Phase]
    """Host time by phase, largest first; adds up to the mean step."""
    samples_per_second: float | None
    """Batch sizes over the time of the steps that count, this rank; ``null``: sizes not told."""
    ended: str | None
    """``finished``, ``exception`` or ``interrupted``; ``null``: killed, or still going on."""
    windows: list[str]
    """What became of each profiled window."""


class RankLine(Struct, kw_only=True):
    """One rank beside the others."""

    rank: int
    """Its number."""
    step_ns: float
    """Mean duration of its steps, ns."""
    busy_share: float | None
    """Share of its step during which its GPU works; ``null``: no device work."""
    communication_ns: float | None
    """Exposed, a step."""
    idle_ns: float | None
    """A step, ns."""
    last_share: float | None = None
    """Share of collectives at which this rank arrives last; ``None``: not measured."""
    caused_wait_ns: float | None = None
    """Mean wait that it causes its peers, a step; ``None``: not measured."""


class Ranks(Struct, kw_only=True):
    """The view across ranks."""

    lines: list[RankLine]
    """One entry a rank."""
    aligned: bool
    """The ranks could be put on one clock."""
    alignment_error_ns: float | None
    """How well, ns; ``null``: they could not."""
    note: str
    """How they were aligned, or why not."""


class Report(Struct, kw_only=True):
    """Everything a renderer or the dashboard needs. ``to_dict`` has the schema ``SCHEMA``."""

    schema: str = SCHEMA
    """Name and number of this schema."""
    version: str = ""
    """Of advisor."""
    status: Status
    """``bottlenecks``: something is worth fixing. ``healthy``: nothing is. ``limited``: neither can
    be said for sure."""
    verdict: str
    """One sentence."""
    inputs: list[Input]
    """The traces, one a rank."""
    scope: Scope
    """Which steps of which device the figures are about."""
    time: list[TimeShare] = field(default_factory=list)
    """Adds up to the step. Empty: no device work in the trace."""
    busy_share: float | None = None
    """Share of the step during which the GPU does anything."""
    communication_ns: float | None = None
    """All communication a step, hidden or not."""
    communication_overlap: float | None = None
    """Share of communication that runs under compute."""
    idle: list[IdleCause] = field(default_factory=list)
    """Adds up to the idle time."""
    unknown_idle_share: float | None = None
    """Share of the idle time that could not be blamed."""
    host: list[HostShare] = field(default_factory=list)
    """The main thread's time, largest first."""
    operators: list[OperatorTime] = field(default_factory=list)
    """Without device work in the trace: the operators that take most host time, at most ten."""
    families: list[Family] = field(default_factory=list)
    """Kernel time by kind, largest first."""
    mfu: float | None = None
    """FLOPs of the step over its duration and the device's peak, 0 to 1."""
    memory_peak_bytes: int | None = None
    """Most device memory the allocator reserved."""
    memory_capacity_bytes: int | None = None
    """Device memory there is."""
    findings: list[Finding] = field(default_factory=list)
    """Ranked, worth time a step; then those folded under them."""
    risks: list[Finding] = field(default_factory=list)
    """Worth memory, risk or time over the run: other currencies, ranked apart."""
    notes: list[Finding] = field(default_factory=list)
    """Informational: not shown right on real traces yet, or worth too little to act on."""
    good: list[Good] = field(default_factory=list)
    """What the run already does well."""
    not_checked: list[NotMeasured] = field(default_factory=list)
    """What could not be checked, and what to record to allow it."""
    limits: list[str] = field(default_factory=list)
    """What this trace cannot tell, in a sentence each."""
    ranks: Ranks | None = None
    """Ranks side by side; ``null``: one rank."""
    replay: Replay | None = None
    """``null``: the window could not be replayed well, and gains are upper bounds."""
    recorded: Recorded | None = None
    """What the recorder measured of every step; ``null``: a trace alone."""
    hot_lines: list[HotLine] = field(default_factory=list)
    """Python lines that take most CPU time, largest first. Empty: no pass of Scalene was made."""

    def to_dict(self) -> dict[str, Any]:
        """Plain dicts and lists, as in the JSON."""
        found: dict[str, Any] = msgspec.to_builtins(self)
        return found

    def to_json(self) -> bytes:
        """The JSON text, indented by two."""
        return msgspec.json.format(msgspec.json.encode(self), indent=2) + b"\n"

    def _repr_html_(self) -> str:
        """What a notebook shows."""
        from advisor.report.notebook import report_html

        return report_html(self)

    @classmethod
    def from_json(cls, text: bytes | str) -> Report:
        """Read a report written by :meth:`to_json`. Raises AdvisorError for anything else."""
        try:
            report = msgspec.json.decode(text, type=cls)
        except msgspec.DecodeError as error:
            raise AdvisorError(f"not a report: {error}") from None
        if report.schema != SCHEMA:
            raise AdvisorError(f"report schema {report.schema!r} is not {SCHEMA!r}")
        return report
