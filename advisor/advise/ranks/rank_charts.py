"""Charts and lists of a job: ranks by step time, a heat map of ranks × classes, and lists.

Built once, as data with its texts, for every renderer and the dashboard."""

import math
from statistics import median
from typing import Final, NamedTuple

from advisor.core import text as t
from advisor.core.labels import clean, shorten
from advisor.core.ranks import FEW_RANKS, MissingRanks, Outlier, RankLine, Ranks, RanksWhatIf
from advisor.core.report import Report
from advisor.core.rule import Per

HISTOGRAM_BINS: Final = 8
EQUAL_STEPS_SHARE: Final = 0.005
"""Range of steps, as a share of the median step, below which all count as equal: half the
step-to-step variation of one rank."""
MIN_SCALE_SHARE: Final = 0.05
"""Minimum span of the colour scale, as a share of the median step. Equal ranks then look equal."""
SCALE_QUANTILE: Final = 0.98
"""Quantile of the differences at which the colour scale ends. Larger ones get the last colour."""
MAX_NUMBERS: Final = 60
"""Maximum length of a line's rank numbers, characters."""
MAX_SHOWN_SIGNIFICANCE: Final = 0.99
"""Significance above which the text says "more than"."""
KINDS: Final = {
    "compute": "slower at the same compute",
    "input": "waits for its input",
    "host": "its host is slow",
    "network": "its network is slow",
    "imbalance": "has more work",
    "extra work": "does work that the others do not",
    "pipeline": "its stage takes longer",
}
WAITING: Final = "waiting"
"""Class of time that other ranks cause."""
MAX_RANKS: Final = 2048
"""Maximum number of ranks in a heat map: the ranks whose step differs most."""


class Bin(NamedTuple):
    """A range of mean step times, from ``low`` to ``high`` in ns, and the number of ranks in it."""

    low: float
    high: float
    ranks: int

    @property
    def label(self) -> str:
        """Range of the bin, ``98.5 to 99.0 ms``."""
        return t.format_bin(self.low, self.high)


def build_histogram(ranks: Ranks) -> list[Bin]:
    """Count the ranks by mean step, in about HISTOGRAM_BINS ranges of equal, round width. One range
    if all steps are similar. Empty if no rank has steps."""
    steps = [line.step_ns for line in ranks.lines if line.step_ns > 0]
    if not steps:
        return []
    low, high = min(steps), max(steps)
    if high - low <= EQUAL_STEPS_SHARE * median(steps):
        return [Bin(low, high, len(steps))]
    width = _round_up((high - low) / HISTOGRAM_BINS)
    first = math.floor(low / width)
    counts = [0] * (math.floor(high / width) - first + 1)
    for step in steps:
        counts[math.floor(step / width) - first] += 1
    return [
        Bin((first + i) * width, (first + i + 1) * width, count) for i, count in enumerate(counts)
    ]


def _round_up(width: float) -> float:
    """Round up to the next of 1, 2, 5, 10 …"""
    power: float = 10.0 ** math.floor(math.log10(width))
    return next(part * power for part in (1, 2, 5, 10, 20) if part * power >= width)


class HeatMap(NamedTuple):
    """Heat map of ranks × classes: how much each rank differs from the median rank."""

    classes: list[str]
    lines: list[RankLine]
    medians: list[float]
    """Medians of the ranks by class, ns per step."""
    scale_ns: float
    """Difference at which the colour scale ends, ns."""
    note: str
    """Note on ranks that are left out. Empty if none are."""
    late: frozenset[str] = frozenset()
    """Ranks that the others wait for."""

    def is_effect(self, index: int) -> bool:
        """Return whether other ranks cause the time of a class, so that it slows no rank itself."""
        return self.classes[index] == WAITING

    def columns(self) -> list[str]:
        """Return the column names: rank numbers. In a job of few ranks, late ones are marked."""
        mark = " late" if len(self.lines) <= FEW_RANKS else ""
        return [f"{line.rank}{mark * (str(line.rank) in self.late)}" for line in self.lines]

    def tint(self, line: RankLine, index: int) -> float | None:
        """Return -1 (``scale_ns`` or more below the median) to 1 (above), or ``None`` if unknown.
        For a class that is an effect, return -1 (none) to 1 (the longest)."""
        value = line.time[index]
        if value is None:
            return None
        if self.is_effect(index):
            longest = max(each.time[index] or 0.0 for each in self.lines)
            return 2 * value / longest - 1 if longest else -1.0
        return max(-1.0, min(1.0, (value - self.medians[index]) / self.scale_ns))

    def title(self, line: RankLine, index: int) -> str:
        """Describe a cell: ``rank 7 · node-03 · idle 5.1 ms per step, 2.0 ms more than …``."""
        value = line.time[index]
        if value is None:
            return f"{describe_rank(line)} · {class_label(self.classes[index])} {t.NOT_MEASURED}"
        difference = value - self.medians[index]
        result = f"{class_label(self.classes[index])} {t.format_duration(value)} per step"
        if difference:
            more = "more" if difference > 0 else "less"
            result += f", {t.format_duration(abs(difference))} {more} than the median rank"
        return f"{describe_rank(line)} · {result}"


def build_heat_map(ranks: Ranks, limit: int = MAX_RANKS) -> HeatMap | None:
    """Build the heat map, or return ``None`` without ranks or measured classes."""
    indices = range(len(ranks.classes))
    lines = [line for line in ranks.lines if len(line.time) == len(ranks.classes)]
    if not lines or not indices:
        return None
    columns = [[v for line in lines if (v := line.time[index]) is not None] for index in indices]
    medians = [median(column or [0.0]) for column in columns]
    median_step = median(line.step_ns for line in lines)
    cause_indices = [index for index in indices if ranks.classes[index] != WAITING] or indices
    differences = sorted(
        abs(v - medians[index]) for index in cause_indices for v in columns[index]
    ) or [0.0]
    scale = max(
        differences[int(SCALE_QUANTILE * (len(differences) - 1))],
        MIN_SCALE_SHARE * median_step,
        1.0,
    )
    note = ""
    if len(lines) > limit:
        note = (
            f"Shown are the {t.format_count(limit)} of {t.format_count(len(lines))} ranks that "
            "differ most."
        )
        lines = sorted(lines, key=lambda line: -abs(line.step_ns - median_step))[:limit]
        lines.sort(key=lambda line: line.rank)
    late = {each.name for each in ranks.outliers if each.unit == "rank" and each.waited_ns}
    if WAITING in ranks.classes:
        note = f"Grey: waiting for other ranks, darker is longer. {note}".strip()
    return HeatMap(ranks.classes, lines, medians, scale, note, frozenset(late))


def describe_rank(line: RankLine) -> str:
    """Name a rank with its host: ``rank 7 · node-03``."""
    return f"rank {line.rank} · {clean(line.host)}" if line.host else f"rank {line.rank}"


def class_label(name: str) -> str:
    """Return the label of a time class: device time, idle time by cause, or host time."""
    for prefix, labels in (
        ("idle:", t.CAUSE_LABELS),
        ("idle.", t.CAUSE_LABELS),
        ("host:", t.HOST_LABELS),
    ):
        if name.startswith(prefix):
            cause = name.removeprefix(prefix)
            return f"{prefix[:-1]}: {labels.get(cause, clean(cause))}"
    if name == "communication":
        return "transfers"  # the ranks' waits for each other are a class of their own
    return t.CLASS_LABELS.get(name) or clean(name).replace("_", " ")


def build_lists(ranks: Ranks) -> list[tuple[str, list[str]]]:
    """Return titles with lines: ranks that were not read, and what is not compared."""
    not_compared = [f"{clean(name)}: {clean(why)}" for name, why in ranks.not_checked.items()]
    result = [
        ("Ranks that were not read", [describe_missing(item) for item in ranks.missing]),
        ("Not compared", not_compared),
    ]
    return [item for item in result if item[1]]


def other_changes(report: Report) -> list[str]:
    """Describe the job's what-if changes that are not the fix of a finding, each with its gain:
    ``rank 7 as fast as the median: saves 5.1 ms per step (…)``."""
    impacts = [finding.impact for finding in report.findings if finding.impact is not None]
    known_gains = {(impact.gain_ns, impact.low_ns) for impact in impacts}
    changes = [] if report.ranks is None else report.ranks.what_if
    return [
        f"{clean(item.text)}: saves {describe_rank_gain(item, report.per)}"
        for item in changes
        if (round(item.gain_ns), round(item.low_ns)) not in known_gains
    ]


def describe_rank_gain(item: RanksWhatIf | Outlier, per: Per = "step") -> str:
    """Describe a gain: ``5.1 ms per step (4.8 to 5.5 ms)``. Empty if it is not estimated."""
    if item.gain_ns is None:
        return ""
    result = f"{t.format_duration(item.gain_ns)} {t.format_per(per)}"
    if item.low_ns is not None and item.high_ns is not None:
        result += f" ({format_spread(item.low_ns, item.high_ns)})"
    return result


def format_spread(low: float, high: float) -> str:
    """Format a range of times: ``97 to 104 ms``, or one figure if both ends look the same."""
    return (
        t.format_duration(low)
        if t.format_duration(low) == t.format_duration(high)
        else t.format_range(low, high)
    )


def describe_missing(item: MissingRanks) -> str:
    """Describe ranks that were not read: ``3 ranks (5, 9-10): access denied``."""
    names = f" ({shorten_numbers(item.ranks, 40)})" if item.ranks else ""
    return f"{t.count_noun(item.count, 'rank')}{names}: {clean(item.why)}"


def shorten_numbers(numbers: str, max_length: int = MAX_NUMBERS) -> str:
    return shorten(clean(numbers), max_length)


def outlier_name(outlier: Outlier) -> str:
    """Name an outlier: ``rank 7``, ``host node-03 (ranks 24-31)``."""
    name = f"{clean(outlier.unit)} {clean(outlier.name)}"
    if outlier.unit == "rank" or not outlier.ranks:
        return name
    return f"{name} (ranks {shorten_numbers(outlier.ranks, 30)})"


def outlier_kind(outlier: Outlier) -> str:
    result = KINDS.get(outlier.kind, clean(outlier.kind))
    return f"{result}, a different one from step to step" if outlier.moves else result


def format_significance(share: float | None) -> str:
    """Format the probability that a difference is not due to chance."""
    if share is None:
        return t.NOT_MEASURED
    more = "more than " if share > MAX_SHOWN_SIGNIFICANCE else ""
    return f"{more}{t.format_share(min(share, MAX_SHOWN_SIGNIFICANCE))}"


def describe_scope(ranks: Ranks) -> list[tuple[str, list[str]]]:
    """Describe which part of the job was read, as labels with parts."""
    read = len(ranks.lines)
    of_world = f" of {t.format_count(ranks.world)}" if ranks.world > read else ""
    parts = [f"{t.format_count(read)}{of_world} ranks read"]
    if ranks.hosts:
        parts.append(t.count_noun(ranks.hosts, "host"))
    result = [("ranks", parts)]
    step = ranks.step
    if step is not None:
        usual_range = f"eight of ten ranks {format_spread(step.low, step.high)}"
        full_range = f"all {format_spread(step.min, step.max)}"
        result.append(
            (
                "step",
                [f"{t.format_duration(step.median)} on the median rank", usual_range, full_range],
            )
        )
    result.append(("clocks", [clean(ranks.note)]))
    if ranks.replay_error is not None:
        error = f"differs from the measured step by {t.format_share(abs(ranks.replay_error))}"
        result.append(("replay", [error]))
    return result
