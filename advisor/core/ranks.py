"""Ranks: what a report says of the ranks of a job beside each other, as plain data."""

from __future__ import annotations

from msgspec import Struct, field


class RankLine(Struct, kw_only=True):
    """One rank beside the others."""

    rank: int
    """Its number."""
    step_ns: float
    """Mean duration of its steps, in the profiled window where there is one, ns."""
    busy_share: float | None
    """Share of its step during which its GPU works; ``null``: no device work."""
    communication_ns: float | None
    """Exposed, per step."""
    idle_ns: float | None
    """Per step."""
    last_share: float | None = None
    """Share of collectives at which this rank arrives last; ``null``: not measured."""
    caused_wait_ns: float | None = None
    """Mean wait that it causes its peers, per step; ``null``: not measured."""
    host: str = ""
    """As its trace names it; empty: unknown."""
    path: str = ""
    """Its trace, without credentials; empty: none was recorded."""
    time: list[float | None] = field(default_factory=list)
    """ns per step by class, in the order of ``Ranks.classes``; ``null``: not measured."""


class StepSpread(Struct, frozen=True, kw_only=True):
    """The ranks' mean steps, ns."""

    min: float
    """The shortest."""
    low: float
    """First decile."""
    median: float
    """Of all ranks."""
    high: float
    """Ninth decile."""
    max: float
    """The longest."""


class RankCluster(Struct, frozen=True, kw_only=True):
    """Ranks that spend their time in a similar way."""

    name: str
    """What tells them from the others, in a few words."""
    ranks: str
    """``0-63, 128``."""
    count: int
    """How many."""
    step_ns: float
    """Median."""
    time: dict[str, float] = field(default_factory=dict)
    """Median ns per step by class (``Ranks.classes``)."""


class Outlier(Struct, frozen=True, kw_only=True):
    """A rank, host, rack or stage that differs from the others; a finding has the fix."""

    unit: str
    """``rank``, ``host``, ``rack`` or ``stage`` (of a pipeline)."""
    name: str
    """``7``, ``node-03`` …"""
    ranks: str
    """``24-31``."""
    kind: str
    """``compute``, ``input``, ``host``, ``network``, ``imbalance`` or ``pipeline``."""
    moves: bool
    """It is another rank from step to step: of ``unit`` this is the pattern, not one rank."""
    excess_ns: float
    """Own time (of ``network``: transfer time) above the others', per step."""
    reason: str = ""
    """The measurement in a sentence."""
    waited_ns: float | None = None
    """What the others wait for it, per step; ``null``: not measured."""
    last_share: float | None = None
    """Share of its collectives at which it arrives last; ``null``: not measured."""
    significance: float | None = None
    """Probability that similar ranks would not look like this (0 to 1); ``null``: not measured."""
    gain_ns: float | None = None
    """What the job's step gains without it, in the replay; ``null``: not replayed."""
    low_ns: float | None = None
    """Lower end of its range."""
    high_ns: float | None = None
    """Upper end."""


class RanksWhatIf(Struct, frozen=True, kw_only=True):
    """What the job's step gains from one change, by replaying the ranks' collectives."""

    text: str
    """The change."""
    gain_ns: float
    """Per step."""
    low_ns: float
    """Lower end of its range."""
    high_ns: float
    """Upper end."""


class MissingRanks(Struct, frozen=True, kw_only=True):
    """Ranks that could not be read, for the same reason."""

    ranks: str
    """``5, 9-10``; empty: their names do not say."""
    count: int
    """How many files."""
    why: str
    """The reason."""
    path: str = ""
    """The first of them."""


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
    world: int = 0
    """Ranks of the job; 0: unknown."""
    hosts: int = 0
    """Hosts that the ranks ran on; 0: unknown."""
    step: StepSpread | None = None
    """Of the ranks' mean steps; ``null``: no steps were measured."""
    classes: list[str] = field(default_factory=list)
    """Of time, exclusive: what ``RankLine.time`` is of."""
    clusters: list[RankCluster] = field(default_factory=list)
    """Similar ranks, the largest group first."""
    outliers: list[Outlier] = field(default_factory=list)
    """Those that hold the others up, the largest gain first."""
    what_if: list[RanksWhatIf] = field(default_factory=list)
    """Changes by their gain, the largest first."""
    missing: list[MissingRanks] = field(default_factory=list)
    """Ranks that were not read."""
    replay_error: float | None = None
    """By how much the ranks' replay misses the measured step (0.02: 2%); ``null``: no replay."""
    not_checked: dict[str, str] = field(default_factory=dict)
    """What could not be compared, and why."""


def format_ranks(ranks: list[int]) -> str:
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
