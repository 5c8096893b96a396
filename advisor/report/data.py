"""Report: what was found, as plain data with a versioned schema. Renderers compute nothing."""

from __future__ import annotations

from typing import Any, Literal

import msgspec
from msgspec import Struct, field

from advisor.errors import AdvisorError
from advisor.model import Finding, Good, NotMeasured

SCHEMA = "advisor.report/1"

Status = Literal["bottlenecks", "healthy", "limited"]


class Input(Struct, kw_only=True):
    """One trace that was read."""

    path: str
    rank: int | None
    window: int
    windows: int
    """How many windows this rank has; only one is analysed."""
    events_read: int
    events_dropped: dict[str, int]
    bytes_read: int
    truncated: bool
    damage: str | None = None


class Scope(Struct, kw_only=True):
    """What the figures are about."""

    rank: int | None
    step_source: str
    """``ProfilerStep``, ``recorder``, ``optimizer`` or ``whole trace``."""
    steps_found: int
    steps_used: int
    outliers: list[str]
    """Names of the steps that were set aside."""
    span_ns: int
    """Length of the analysed window, ns."""
    step_ns: float
    """Mean duration of the used steps, ns."""
    step_min_ns: int
    step_max_ns: int
    step_median_ns: float
    device: int | None
    device_name: str | None
    device_known: bool
    """There is an entry in advisor/hardware: rooflines can be measured."""
    devices_seen: int


class IdleCause(Struct, frozen=True):
    """Idle device time blamed on one cause, a step."""

    cause: str
    ns: float
    share: float
    """Of the step."""


class TimeShare(Struct, frozen=True):
    """Exclusive device time of one class, a step."""

    name: str
    ns: float
    share: float


class Family(Struct, frozen=True):
    """Device time of one kernel family, a step, not exclusive of other streams."""

    name: str
    ns: float
    share: float
    """Of all kernel time."""
    count: float
    """Kernels a step."""


class HostShare(Struct, frozen=True):
    """Host time of the main thread, a step."""

    name: str
    ns: float
    share: float


class RankLine(Struct, kw_only=True):
    """One rank beside the others."""

    rank: int
    step_ns: float
    busy_share: float | None
    communication_ns: float | None
    """Exposed, a step."""
    idle_ns: float | None
    last_share: float | None = None
    """Share of collectives at which this rank arrives last; ``None``: not measured."""
    caused_wait_ns: float | None = None
    """Mean wait that it causes its peers, a step; ``None``: not measured."""


class Ranks(Struct, kw_only=True):
    """The view across ranks."""

    lines: list[RankLine]
    aligned: bool
    alignment_error_ns: float | None
    note: str


class Report(Struct, kw_only=True):
    """Everything a renderer or the dashboard needs. ``to_dict`` has the schema ``SCHEMA``."""

    schema: str = SCHEMA
    version: str = ""
    """Of advisor."""
    status: Status
    verdict: str
    """One sentence."""
    inputs: list[Input]
    scope: Scope
    time: list[TimeShare] = field(default_factory=list)
    """Adds up to the step. Empty: no device work in the trace."""
    busy_share: float | None = None
    communication_ns: float | None = None
    """All communication a step, hidden or not."""
    communication_overlap: float | None = None
    idle: list[IdleCause] = field(default_factory=list)
    """Adds up to the idle time."""
    unknown_idle_share: float | None = None
    """Share of the idle time that could not be blamed."""
    host: list[HostShare] = field(default_factory=list)
    families: list[Family] = field(default_factory=list)
    mfu: float | None = None
    memory_peak_bytes: int | None = None
    memory_capacity_bytes: int | None = None
    findings: list[Finding] = field(default_factory=list)
    """Ranked, worth time a step; then those folded under them."""
    risks: list[Finding] = field(default_factory=list)
    """Worth memory, risk or time over the run: other currencies, ranked apart."""
    notes: list[Finding] = field(default_factory=list)
    """Informational: not shown right on real traces yet, or worth too little to act on."""
    good: list[Good] = field(default_factory=list)
    not_checked: list[NotMeasured] = field(default_factory=list)
    limits: list[str] = field(default_factory=list)
    """What this trace cannot tell, in a sentence each."""
    ranks: Ranks | None = None

    def to_dict(self) -> dict[str, Any]:
        """Plain dicts and lists, as in the JSON."""
        found: dict[str, Any] = msgspec.to_builtins(self)
        return found

    def to_json(self) -> bytes:
        """The JSON text, indented by two."""
        return msgspec.json.format(msgspec.json.encode(self), indent=2) + b"\n"

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
