"""Charts and lists of a job: ranks by step time, a heat map of ranks × classes, and lists.

Made here once, as data with its words, for every renderer and the dashboard."""

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
"""Share of the median step below which all steps count as equal: half the step-to-step variation of
one rank."""
MIN_SCALE: Final = 0.05
"""Share of the median step that the colour scale spans at least, so that a job of equal ranks looks
like one."""
SCALE_QUANTILE: Final = 0.98
"""Quantile of the differences at which the colour scale ends; larger ones get the last colour."""
MAX_NUMBERS: Final = 60
"""Length of a line's rank numbers, characters."""
MAX_SHOWN_SIGNIFICANCE: Final = 0.99
"""Significance beyond which it is shown as "more than"."""
KINDS: Final = {
    "compute": "slower at the same compute",
    "input": "waits for its input",
    "host": "its host is slow",
    "network": "its network is slow",
    "imbalance": "has more work",
    "pipeline": "its stage takes longer",
}
WAITING: Final = "waiting"
"""Class of time that other ranks cause."""
MAX_RANKS: Final = 2048
"""Number of ranks in a heat map; of more, those whose step differs most."""


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
    """Count the ranks by mean step, in HISTOGRAM_BINS or so ranges of equal, round width. One range
    if all are similar; empty if no rank has steps."""
    steps = [line.step_ns for line in ranks.lines if line.step_ns > 0]
    if not steps:
        return []
    low, high = min(steps), max(steps)
    if high - low <= EQUAL_STEPS_SHARE * median(steps):
        return [Bin(low, high, len(steps))]
    width = _round((high - low) / HISTOGRAM_BINS)
    first = math.floor(low / width)
    counts = [0] * (math.floor(high / width) - first + 1)
    for step in steps:
        counts[math.floor(step / width) - first] += 1
    return [
        Bin((first + i) * width, (first + i + 1) * width, count) for i, count in enumerate(counts)
    ]


def _round(width: float) -> float:
    """Round up to the next of 1, 2, 5, 10 …"""
    ten: float = 10.0 ** math.floor(math.log10(width))
    return next(part * ten for part in (1, 2, 5, 10, 20) if part * ten >= width)


class HeatMap(NamedTuple):
    """Heat map of ranks × classes: how much each rank differs from the median rank."""

    classes: list[str]
    lines: list[RankLine]
    medians: list[float]
    """Medians of the ranks by class, ns per step."""
    scale_ns: float
    """Difference at which the colour scale ends, ns."""
    note: str
    """Note on what is left out; empty: nothing."""
    late: frozenset[str] = frozenset()
    """Ranks that the others wait for."""

    def is_effect(self, place: int) -> bool:
        """Return whether a class is what other ranks cause: no rank is slow by it."""
        return self.classes[place] == WAITING

    def columns(self) -> list[str]:
        """Name the columns: numbers of the ranks; of a few, with those that come late marked."""
        mark = " late" if len(self.lines) <= FEW_RANKS else ""
        return [f"{line.rank}{mark * (str(line.rank) in self.late)}" for line in self.lines]

    def tint(self, line: RankLine, place: int) -> float | None:
        """Return -1 (``scale_ns`` or more below the median) to 1 (above); ``None``: unknown.
        Of a class that is an effect: -1 (none) to 1 (the longest)."""
        value = line.time[place]
        if value is None:
            return None
        if self.is_effect(place):
            longest = max(each.time[place] or 0.0 for each in self.lines)
            return 2 * value / longest - 1 if longest else -1.0
        return max(-1.0, min(1.0, (value - self.medians[place]) / self.scale_ns))

    def title(self, line: RankLine, place: int) -> str:
        """Describe a cell: ``rank 7 · node-03 · idle 5.1 ms per step, 2.0 ms more than …``."""
        value = line.time[place]
        if value is None:
            return f"{describe_rank(line)} · {class_label(self.classes[place])} {t.NOT_MEASURED}"
        against = value - self.medians[place]
        result = f"{class_label(self.classes[place])} {t.format_duration(value)} per step"
        if against:
            more = "more" if against > 0 else "less"
            result += f", {t.format_duration(abs(against))} {more} than the median rank"
        return f"{describe_rank(line)} · {result}"


def build_heat_map(ranks: Ranks, limit: int = MAX_RANKS) -> HeatMap | None:
    """Build the heat map; ``None`` if there is no rank, or no class was measured."""
    places = range(len(ranks.classes))
    lines = [line for line in ranks.lines if len(line.time) == len(ranks.classes)]
    if not lines or not places:
        return None
    columns = [[v for line in lines if (v := line.time[place]) is not None] for place in places]
    medians = [median(column or [0.0]) for column in columns]
    step = median(line.step_ns for line in lines)
    own = [place for place in places if ranks.classes[place] != WAITING] or places
    apart = sorted(abs(v - medians[place]) for place in own for v in columns[place]) or [0.0]
    scale = max(apart[int(SCALE_QUANTILE * (len(apart) - 1))], MIN_SCALE * step, 1.0)
    note = ""
    if len(lines) > limit:
        note = (
            f"Shown are the {t.format_count(limit)} of {t.format_count(len(lines))} ranks that "
            "differ most."
        )
        lines = sorted(lines, key=lambda line: -abs(line.step_ns - step))[:limit]
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
    for head, labels in (
        ("idle:", t.CAUSE_LABELS),
        ("idle.", t.CAUSE_LABELS),
        ("host:", t.HOST_LABELS),
    ):
        if name.startswith(head):
            rest = name.removeprefix(head)
            return f"{head[:-1]}: {labels.get(rest, clean(rest))}"
    if name == "communication":
        return "transfers"  # what the ranks wait for each other is a class of its own
    return t.CLASS_LABELS.get(name) or clean(name).replace("_", " ")


def build_lists(ranks: Ranks) -> list[tuple[str, list[str]]]:
    """Return (title, lines): ranks not read, and what is not compared."""
    not_compared = [f"{clean(name)}: {clean(why)}" for name, why in ranks.not_checked.items()]
    result = [
        ("Ranks that were not read", [describe_missing(item) for item in ranks.missing]),
        ("Not compared", not_compared),
    ]
    return [item for item in result if item[1]]


def other_changes(report: Report) -> list[str]:
    """Describe the changes of the job that no finding has as its fix, each with its gain: ``rank 7
    as fast as the median: saves 5.1 ms per step (…)``."""
    impacts = [finding.impact for finding in report.findings if finding.impact is not None]
    found = {(impact.gain_ns, impact.low_ns) for impact in impacts}
    changes = [] if report.ranks is None else report.ranks.what_if
    return [
        f"{clean(item.text)}: saves {describe_gain(item, report.per)}"
        for item in changes
        if (round(item.gain_ns), round(item.low_ns)) not in found
    ]


def describe_gain(item: RanksWhatIf | Outlier, per: Per = "step") -> str:
    """Describe a gain: ``5.1 ms per step (4.8 to 5.5 ms)``; empty if it is not estimated."""
    if item.gain_ns is None:
        return ""
    result = f"{t.format_duration(item.gain_ns)} {t.format_per(per)}"
    if item.low_ns is not None and item.high_ns is not None:
        result += f" ({format_spread(item.low_ns, item.high_ns)})"
    return result


def format_spread(low: float, high: float) -> str:
    """Format a range of times: ``97 to 104 ms``, or one figure if both ends read the same."""
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
    """Format how certain it is that a difference is not chance."""
    if share is None:
        return t.NOT_MEASURED
    more = "more than " if share > MAX_SHOWN_SIGNIFICANCE else ""
    return f"{more}{t.format_share(min(share, MAX_SHOWN_SIGNIFICANCE))}"


def describe_scope(ranks: Ranks) -> list[tuple[str, list[str]]]:
    """Describe what was read of the job: (label, parts)."""
    read = len(ranks.lines)
    of = f" of {t.format_count(ranks.world)}" if ranks.world > read else ""
    parts = [f"{t.format_count(read)}{of} ranks read"]
    if ranks.hosts:
        parts.append(t.count_noun(ranks.hosts, "host"))
    result = [("ranks", parts)]
    step = ranks.step
    if step is not None:
        middle = f"eight of ten ranks {format_spread(step.low, step.high)}"
        ends = f"all {format_spread(step.min, step.max)}"
        result.append(
            ("step", [f"{t.format_duration(step.median)} on the median rank", middle, ends])
        )
    result.append(("clocks", [clean(ranks.note)]))
    if ranks.replay_error is not None:
        miss = f"misses the measured step by {t.format_share(abs(ranks.replay_error))}"
        result.append(("replay", [miss]))
    return result
