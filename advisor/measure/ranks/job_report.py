"""What is said of a job of many ranks: plain data, which renderers and the dashboard show."""

from __future__ import annotations

import msgspec
from msgspec import Struct, field

from advisor.core.saved import decoded
from advisor.measure.ranks.summary import Advice

SCHEMA = "advisor.job/1"
MAX_JSON = 64 << 20


class Spread(Struct, frozen=True, kw_only=True):
    """A figure over the ranks, ns."""

    least: float
    low: float
    """First decile."""
    median: float
    high: float
    """Ninth decile."""
    most: float


class Alike(Struct, frozen=True, kw_only=True):
    """Ranks that spend their time alike."""

    name: str
    """What tells them from the others, in a few words."""
    ranks: str
    """``0-63, 128``."""
    count: int
    step_ns: float
    """Median."""
    time: dict[str, float] = field(default_factory=dict)
    """Median ns a step by class (``JobReport.classes``)."""


class Odd(Struct, frozen=True, kw_only=True):
    """A rank, host or rack that is not like the others."""

    what: str
    """``rank``, ``host``, ``rack`` or ``stage`` (of a pipeline)."""
    name: str
    """``7``, ``node-03`` …"""
    ranks: str
    kind: str
    """``compute``, ``input``, ``host``, ``network``, ``imbalance`` or ``pipeline``."""
    moves: bool
    """It is another rank from step to step: of ``what`` this is the pattern, not one rank."""
    waited_ns: float | None = None
    """What the others wait for it, a step; ``null``: not measured."""
    last_share: float | None = None
    """Of the collectives it takes part in, at how many it comes last."""
    sure: float | None = None
    """Chance that ranks that are alike would not look like this (0 to 1)."""
    why: str = ""
    """The measurement, in words."""
    fix: str = ""
    gain_ns: float | None = None
    """What the job's step would gain without it, by replay; ``null``: not replayed."""
    low_ns: float | None = None
    high_ns: float | None = None


class WhatIf(Struct, frozen=True, kw_only=True):
    """What the job's step would gain, by replay of the ranks' collectives."""

    text: str
    gain_ns: float
    low_ns: float
    high_ns: float


class JobFinding(Advice, frozen=True, kw_only=True):
    """Advice for the job, or of many of its ranks; what it gains is of the job's step."""

    ranks: str = ""
    count: int = 0


class Missing(Struct, frozen=True, kw_only=True):
    """Ranks that could not be read, by the same reason."""

    ranks: str
    count: int
    why: str
    path: str = ""
    """Of the first."""


class Row(Struct, frozen=True, array_like=True):
    """A rank in the heat map: ns a step by class, in the order of ``JobReport.classes``; ``null``:
    not measured."""

    rank: int
    host: str
    path: str
    step_ns: float
    values: list[float | None]


class JobReport(Struct, kw_only=True):
    """All of it. Times are ns a step."""

    schema: str = SCHEMA
    version: str = ""
    source: str = ""
    """Where it was read from, without credentials."""
    verdict: str = ""
    world: int = 0
    """Ranks of the job; 0: not known."""
    read: int = 0
    missing: list[Missing] = field(default_factory=list)
    device: str = ""
    hosts: int = 0
    step: Spread | None = None
    """Of the ranks' mean steps."""
    classes: list[str] = field(default_factory=list)
    alike: list[Alike] = field(default_factory=list)
    odd: list[Odd] = field(default_factory=list)
    findings: list[JobFinding] = field(default_factory=list)
    what_if: list[WhatIf] = field(default_factory=list)
    rows: list[Row] = field(default_factory=list)
    aligned: int = 0
    """Ranks on one clock."""
    error_ns: float | None = None
    """How well their clocks agree; ``null``: not aligned."""
    not_aligned: str = ""
    replay_error: float | None = None
    """By how much the replay misses the measured step (0.02: 2 %); ``null``: not replayed."""
    not_checked: dict[str, str] = field(default_factory=dict)
    bytes_read: int = 0
    seconds: float = 0.0

    def to_json(self) -> bytes:
        """As JSON."""
        return msgspec.json.encode(self)

    @classmethod
    def from_json(cls, data: bytes | str) -> JobReport:
        """Raises AdvisorError: not such a report, or of another version."""
        return decoded(data, cls, "report of a job", SCHEMA, MAX_JSON)


def numbers(ranks: list[int]) -> str:
    """``[0, 1, 2, 7]`` as ``0-2, 7``."""
    parts: list[str] = []
    ordered = sorted(set(ranks))
    begin = 0
    for place in range(1, len(ordered) + 1):
        if place == len(ordered) or ordered[place] != ordered[place - 1] + 1:
            first, last = ordered[begin], ordered[place - 1]
            parts.append(str(first) if first == last else f"{first}-{last}")
            begin = place
    return ", ".join(parts)
