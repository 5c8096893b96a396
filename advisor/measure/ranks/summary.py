"""What one rank says of itself: bounded, versioned, and enough to compare a thousand of them.

A worker reads a trace, measures it and sends this; nobody holds two traces at once.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np
from msgspec import Struct, field
from numpy.typing import NDArray

from advisor.core.errors import AdvisorError
from advisor.core.finding import Finding
from advisor.core.report import MemorySample

SCHEMA = "advisor.rank/1"
MAX_BYTES = 200_000
"""Of one encoded summary; what would be larger tells of fewer steps' collectives."""
MAX_DECODED = 16 << 20


class StepSummary(Struct, array_like=True, frozen=True):
    """One step that the figures are taken over, ns on the trace's own clock."""

    name: str
    start: int
    end: int


class Advice(Struct, frozen=True, array_like=True):
    """What a rule found on one rank alone, in short; ``Summary.details`` has the findings."""

    rule: str
    category: str = ""
    """Of the rule."""
    gain_ns: float | None = None
    """Per step; ``null``: not estimated."""


class Kernel(Struct, array_like=True, frozen=True):
    """One compute kernel of one launch size, inside the used steps."""

    count: int
    total_ns: float
    """A step."""
    median_ns: float
    """Of one."""


class Packed(Struct, frozen=True):
    """Whole numbers of one column: differences of neighbours, zlib."""

    count: int
    data: bytes


def pack(values: NDArray[np.int64]) -> Packed:
    """Any whole numbers; neighbours that are close take least."""
    column = np.ascontiguousarray(values, dtype="<i8")
    steps = np.diff(column, prepend=np.int64(0))
    return Packed(len(column), zlib.compress(steps.astype("<i8").tobytes(), 6))


def unpack(packed: Packed) -> NDArray[np.int64]:
    """The numbers. Raises AdvisorError: it was not packed like this."""
    most = packed.count * 8
    try:
        if not 0 <= most <= MAX_DECODED:
            raise ValueError
        data = _inflate(packed.data, most)
        if len(data) != most:
            raise ValueError
    except (zlib.error, ValueError):
        raise AdvisorError("a rank's summary is damaged") from None
    return np.cumsum(np.frombuffer(data, dtype="<i8"), dtype=np.int64)


class Collectives(Struct, frozen=True, kw_only=True):
    """The collectives of the used steps, in order of their start on this rank."""

    keys: list[str] = field(default_factory=list)
    """What each is matched by, once each: group, members, kind, bytes, type …"""
    key: Packed
    """Row of ``keys``."""
    order: Packed
    """Its sequence number where the trace has it (``sequenced``); else the how many-th of this key
    it is: in the step that launched it where steps are marked, in the whole trace where not."""
    step: Packed
    """Row of ``Summary.steps``; -1: outside."""
    start: Packed
    """ns on the trace's own clock: the rank is there."""
    end: Packed
    exposed: Packed
    """ns of it with no compute on this rank."""
    work: Packed
    """ns of the rank's own time before it: from the start of the collective before (or of the
    step's start) to this one's start, without communication that nothing hid. Where collectives
    are not overlapped that is from the end of the one before."""
    synchronising: list[bool] = field(default_factory=list)
    """By key: whether no rank leaves it before all are there."""
    group: list[str] = field(default_factory=list)
    """By key: name of the process group."""
    size: list[int] = field(default_factory=list)
    """By key: members of the group; 0: not known."""
    kind: list[str] = field(default_factory=list)
    """By key: ``all_reduce`` …"""
    message: list[int] = field(default_factory=list)
    """By key: bytes; 0: not known."""
    sequenced: list[bool] = field(default_factory=list)
    """By key: ``order`` is a sequence number; empty: none is."""
    amount: Packed | None = None
    """Elements that this rank gives or gets in an all-to-all, whichever are more; 0: another kind,
    or not known. ``None``: no all-to-all tells."""
    dropped: int = 0
    """Collectives that were left out to keep the summary small."""


class Summary(Struct, frozen=True, kw_only=True):
    """A rank, measured. Times are ns per step unless said otherwise."""

    schema: str = SCHEMA
    rank: int
    """-1: it does not say."""
    path: str
    """Without credentials."""
    host: str = ""
    """As its trace names it; empty: not known."""
    device: str = ""
    """The GPU's model."""
    world: int = 0
    """Ranks of the job; 0: not known."""
    framework: str = ""
    clock: str = "unix"
    """``unix``: starts are comparable between hosts as far as their clocks are."""
    events: int = 0
    bytes_read: int = 0
    step_source: str = ""
    steps: list[StepSummary] = field(default_factory=list)
    step_ns: float = 0.0
    run_step_ns: float | None = None
    """Median of the run's steps that no profiler slowed; ``null``: not recorded."""
    time: dict[str, float] = field(default_factory=dict)
    """What the device does, exclusive, as in the report: ``compute`` … ``idle``."""
    idle: dict[str, float] = field(default_factory=dict)
    """Idle time by cause."""
    host_time: dict[str, float] = field(default_factory=dict)
    """What the main thread does, by class."""
    families: dict[str, float] = field(default_factory=dict)
    """Kernels by family."""
    kernels: dict[str, Kernel] = field(default_factory=dict)
    """Compute kernels with most time, by the start of their name and a digest of name and launch
    size: the same on every rank that runs the same."""
    per_step: dict[str, Packed] = field(default_factory=dict)
    """``time`` (with ``idle: <cause>`` for idle) of each of ``steps``, ns; where no device works
    ``host_time`` and ``communication``."""
    communication: float = 0.0
    """All of it, hidden or not."""
    collectives: Collectives | None = None
    findings: list[Advice] = field(default_factory=list)
    details: bytes = b""
    """The findings in full, in the same order, as :func:`pack_findings` has them; empty: left out
    to keep the summary small."""
    damage: str = ""
    memory: MemorySample | None = None
    """The fullest device of its snapshot; ``null``: it has none."""


class Unread(Struct, frozen=True, kw_only=True):
    """A rank that could not be read or measured: the rest stands without it."""

    schema: str = SCHEMA
    rank: int
    path: str
    why: str


def pack_findings(findings: Sequence[Finding]) -> bytes:
    """Findings in little room."""
    return zlib.compress(msgspec.msgpack.encode(findings), 6)


def unpack_findings(details: bytes) -> list[Finding]:
    """The same again. Raises AdvisorError: they were not packed like this."""
    if not details:
        return []
    try:
        return msgspec.msgpack.decode(_inflate(details, MAX_DECODED), type=list[Finding])
    except (zlib.error, ValueError, RecursionError):
        raise AdvisorError("a rank's summary is damaged") from None


def _inflate(data: bytes, most: int) -> bytes:
    result = zlib.decompressobj().decompress(data, most + 1)
    if len(result) > most:
        raise ValueError
    return result


def encode(summary: Summary | Unread) -> bytes:
    """As msgpack."""
    tagged = {"unread" if isinstance(summary, Unread) else "summary": summary}
    return msgspec.msgpack.encode(tagged)


def decode(data: bytes) -> Summary | Unread:
    """What a worker sent. Raises AdvisorError: damaged, or of another version."""
    try:
        if len(data) > MAX_DECODED:
            raise ValueError
        decoded: dict[str, Any] = msgspec.msgpack.decode(data)
        kind, fields = next(iter(decoded.items()))
        if fields.get("schema") != SCHEMA:
            raise AdvisorError(f"a rank's summary is of another version ({fields.get('schema')!r})")
        if kind == "unread":
            return msgspec.convert(fields, Unread)
        return msgspec.convert(fields, Summary)
    except (ValueError, AttributeError, StopIteration, TypeError, RecursionError):
        raise AdvisorError("a rank's summary is damaged") from None
