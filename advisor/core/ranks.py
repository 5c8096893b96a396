"""Ranks: a report's comparison of a job's ranks, as plain data."""

from typing import Final

from msgspec import Struct, field

FEW_RANKS: Final = 16
"""Maximum number of ranks that are shown one by one."""


class RankLine(Struct, kw_only=True):
    """Figures of one rank, for comparison with the others."""

    rank: int
    """Number of the rank."""
    step_ns: float
    """Mean duration of its steps, ns, in the profiled window if there is one."""
    busy_share: float | None
    """Share of its step during which its GPU works, or ``null`` if there is no device work."""
    communication_ns: float | None
    """Exposed communication per step, ns, or ``null`` if not measured."""
    idle_ns: float | None
    """Idle time of its GPU per step, ns, or ``null`` if not measured."""
    last_share: float | None = None
    """Share of collectives at which this rank arrives last, or ``null`` if not measured."""
    caused_wait_ns: float | None = None
    """Mean wait that it causes its peers, per step, ns, or ``null`` if not measured."""
    host: str = ""
    """Host as named in its trace. Empty if unknown."""
    path: str = ""
    """Path of its trace, without credentials. Empty if none was recorded."""
    time: list[float | None] = field(default_factory=list)
    """Time per step by class, ns, in the order of ``Ranks.classes``, or ``null`` if not
    measured."""


class StepSpread(Struct, frozen=True, kw_only=True):
    """Distribution of the ranks' mean steps, ns."""

    min: float
    """Shortest mean step, ns."""
    low: float
    """First decile, ns."""
    median: float
    """Median of all ranks, ns."""
    high: float
    """Ninth decile, ns."""
    max: float
    """Longest mean step, ns."""


class RankCluster(Struct, frozen=True, kw_only=True):
    """Ranks that spend their time similarly."""

    name: str
    """Difference from the other clusters, in a few words."""
    ranks: str
    """Ranks of the cluster: ``0-63, 128``."""
    count: int
    """Number of ranks."""
    step_ns: float
    """Median of their mean steps, ns."""
    time: dict[str, float] = field(default_factory=dict)
    """Median time per step, ns, by class (``Ranks.classes``)."""


class Outlier(Struct, frozen=True, kw_only=True):
    """A rank, host, rack or stage that differs from the others. A finding has the fix."""

    unit: str
    """Kind of unit: ``rank``, ``host``, ``rack`` or ``stage`` (of a pipeline)."""
    name: str
    """Name of the unit: ``7``, ``node-03`` …"""
    ranks: str
    """Ranks of the unit: ``24-31``."""
    kind: str
    """Cause: ``compute``, ``input``, ``host``, ``network``, ``imbalance`` or ``pipeline``."""
    moves: bool
    """Whether the outlier changes from step to step within ``unit``, instead of being one rank."""
    excess_ns: float
    """Excess of its own time over the others', per step, ns. For ``network``, of transfer time."""
    reason: str = ""
    """Measurement, in one sentence."""
    waited_ns: float | None = None
    """Time that the others wait for it, per step, ns, or ``null`` if not measured."""
    last_share: float | None = None
    """Share of its collectives at which it arrives last, or ``null`` if not measured."""
    significance: float | None = None
    """Probability that similar ranks would not look like this (0 to 1), or ``null`` if not
    measured."""
    gain_ns: float | None = None
    """Time per step that the job saves without it, in the replay, ns, or ``null`` if not
    replayed."""
    low_ns: float | None = None
    """Lower end of the gain's range, ns."""
    high_ns: float | None = None
    """Upper end of the gain's range, ns."""


class RanksWhatIf(Struct, frozen=True, kw_only=True):
    """Gain of the job's step from one change, from a replay of the ranks' collectives."""

    text: str
    """Description of the change."""
    gain_ns: float
    """Time saved per step, ns."""
    low_ns: float
    """Lower end of the gain's range, ns."""
    high_ns: float
    """Upper end of the gain's range, ns."""


class MissingRanks(Struct, frozen=True, kw_only=True):
    """Ranks that could not be read, for the same reason."""

    ranks: str
    """Numbers of the ranks, such as ``5, 9-10``. Empty if their file names do not have them."""
    count: int
    """Number of files."""
    why: str
    """Reason why they could not be read."""
    path: str = ""
    """Path of the first file."""


class Ranks(Struct, kw_only=True):
    """Comparison of the ranks of a job."""

    lines: list[RankLine]
    """Figures of each rank."""
    aligned: bool
    """Whether the ranks' clocks could be aligned."""
    alignment_error_ns: float | None
    """Error of the alignment, ns, or ``null`` if the clocks could not be aligned."""
    note: str
    """Note on how the ranks were aligned, or why not."""
    world: int = 0
    """Number of ranks of the job, or 0 if unknown."""
    hosts: int = 0
    """Number of hosts that the ranks ran on, or 0 if unknown."""
    step: StepSpread | None = None
    """Distribution of the ranks' mean steps, or ``null`` if no steps were measured."""
    classes: list[str] = field(default_factory=list)
    """Exclusive classes of time, in the order of ``RankLine.time``."""
    clusters: list[RankCluster] = field(default_factory=list)
    """Clusters of similar ranks, the largest first."""
    outliers: list[Outlier] = field(default_factory=list)
    """Units that delay the others, largest gain first."""
    what_if: list[RanksWhatIf] = field(default_factory=list)
    """Changes of the job, largest gain first."""
    missing: list[MissingRanks] = field(default_factory=list)
    """Ranks that were not read."""
    replay_error: float | None = None
    """Error of the ranks' replay as a share of the measured step, 0 to 1, or ``null`` without a
    replay."""
    not_checked: dict[str, str] = field(default_factory=dict)
    """Comparisons that were not possible, with their reasons."""


def format_ranks(ranks: list[int]) -> str:
    """Return rank numbers as ranges: ``[0, 1, 2, 7]`` as ``0-2, 7``."""
    parts: list[str] = []
    ordered = sorted(set(ranks))
    start = 0
    for index in range(1, len(ordered) + 1):
        if index == len(ordered) or ordered[index] != ordered[index - 1] + 1:
            first, last = ordered[start], ordered[index - 1]
            parts.append(str(first) if first == last else f"{first}-{last}")
            start = index
    return ", ".join(parts)
