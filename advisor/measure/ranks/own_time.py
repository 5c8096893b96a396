"""Own time of each rank by class, over the job and step by step; whether more compute is a slower
device or more work.

Own time is what is left of a step without communication that nothing hides: ranks share the step,
they do not share their work."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from advisor.core.intervals import Floats
from advisor.measure.device.families import MATRIX
from advisor.measure.ranks.summary_schema import RankSummary, unpack

CLASSES = ("compute", "copies", "input", "host", "communication")
"""Exclusive classes of a step's time; the last one is no work of the rank's own."""
OWN = CLASSES[:-1]
CUT_SHARE = 0.9
"""Share of earlier steps' compute from which the last step of a damaged file counts."""
_INPUT = ("idle: loader", "loader")
_COPIES = ("copies", "memset")


@dataclass(frozen=True)
class RankProfile:
    """Own time of all ranks, one row per rank (place in the list of summaries)."""

    values: Floats
    """Mean time by class (columns: CLASSES), ns per step; NaN: not measured, or damaged file."""
    steps: list[str]
    """Names of the steps that most ranks have."""
    by_step: dict[str, Floats]
    """Class of OWN -> rank x ``steps``, ns; NaN: that rank does not have it."""
    step_ns: Floats
    """Mean step of each rank, ns."""

    @property
    def own_ns(self) -> Floats:
        """Own time of each rank, ns per step."""
        return np.asarray(self.values[:, : len(OWN)].sum(axis=1))

    @property
    def own_ns_by_step(self) -> Floats:
        """Own time of each rank in each step, ns."""
        total: Floats = np.sum([self.by_step[name] for name in OWN], axis=0)
        return total


def profile_ranks(summaries: Sequence[RankSummary]) -> RankProfile:
    """Measure the own time of all ranks, from their summaries."""
    values = np.full((len(summaries), len(CLASSES)), np.nan)
    counts: Counter[str] = Counter()
    for summary in summaries:
        counts.update({step.name for step in summary.steps})
    most = max(counts.values(), default=0)
    steps = _in_order(summaries, {name for name, n in counts.items() if 2 * n >= most})
    at = {name: column for column, name in enumerate(steps)}
    by_step = {name: np.full((len(summaries), len(steps)), np.nan) for name in OWN}
    for place, summary in enumerate(summaries):
        columns = class_times(summary)
        if columns is None:
            continue
        if summary.damage:
            columns = _whole(columns)
        for column, name in enumerate(CLASSES):
            known = columns[name][np.isfinite(columns[name])]
            values[place, column] = float(known.mean()) if len(known) else np.nan
        where = [at.get(step.name, -1) for step in summary.steps]
        rows = [row for row, column in enumerate(where) if column >= 0]
        for name in OWN:
            by_step[name][place, [where[row] for row in rows]] = columns[name][rows]
    step_ns = np.array([s.step_ns for s in summaries], dtype=np.float64)
    return RankProfile(values, steps, by_step, step_ns)


def _in_order(summaries: Sequence[RankSummary], wanted: set[str]) -> list[str]:
    """Sort step names in order of time, as the rank with most of them has them."""
    longest = max(summaries, key=lambda s: len({t.name for t in s.steps} & wanted), default=None)
    if longest is None:
        return []
    own = dict.fromkeys(step.name for step in longest.steps if step.name in wanted)
    return [*own, *sorted(wanted - own.keys())]


def _whole(columns: dict[str, Floats]) -> dict[str, Floats]:
    """Keep the steps before the cut in a file that is cut off; NaN: the others, where missing work
    would pass for idle time."""
    work = columns["compute"]
    busy = np.flatnonzero(work > 0)
    whole = np.zeros(len(work), dtype=np.bool_)
    if len(busy):
        last = int(busy[-1])
        whole[:last] = True
        # the last one with work counts where it has as much as those before it
        whole[last] = last > 0 and work[last] >= CUT_SHARE * float(np.median(work[:last]))
    return {name: np.where(whole, values, np.nan) for name, values in columns.items()}


def class_times(summary: RankSummary) -> dict[str, Floats] | None:
    """Return the time of each step by class (CLASSES), ns; ``None``: the summary has no times."""
    if not summary.steps or not (summary.per_step or summary.time or summary.host_time):
        return None
    length = np.array([step.end - step.start for step in summary.steps], dtype=np.float64)
    by_class = {
        name: unpack(packed).astype(np.float64)
        for name, packed in summary.per_step.items()
        if packed.count == len(length)
    }
    if not by_class:  # only means: the same for each step
        by_class = {name: np.full(len(length), ns) for name, ns in summary.time.items()}
        by_class |= {f"idle: {name}": np.full(len(length), ns) for name, ns in summary.idle.items()}
        by_class.pop("idle", None)
    nothing = np.zeros(len(length))
    waiting = np.minimum(by_class.get("communication", nothing), length)
    loading = sum((by_class[name] for name in _INPUT if name in by_class), nothing)
    copies = sum((by_class[name] for name in _COPIES if name in by_class), nothing)
    if summary.time:
        compute = by_class.get("compute", nothing)
    else:  # operators on the host; what waits in a collective is in them
        compute = np.maximum(by_class.get("dispatch", nothing) - waiting, 0.0)
    rest = np.maximum(length - waiting - loading - copies - compute, 0.0)
    return {
        "compute": compute,
        "copies": copies,
        "input": loading,
        "host": rest,
        "communication": waiting,
    }


# -- more compute on some ranks: is the device slower, or is there more work? ----------------------

MIN_INSTANCES = 20
"""Instances of a kernel on a rank from which its median is compared."""
MIN_KERNELS = 5
"""Kernels from which a slower device differs from other inputs."""
MIN_SLOWER_SHARE = 0.7
"""Share of compute time that must be slower for the device to be: more work is in some kernels
only."""
MIN_FAMILY_SHARE = 0.05
"""Share of compute from which a family of kernels counts."""
MIN_COMPARED_SHARE = 0.3
"""Share of compute time in kernels that both ran, to compare them."""


class DeviceSpeed(NamedTuple):
    """Speed of some ranks' devices, by the kernels that other ranks run too."""

    slower: bool
    """Whether the device is slower; else there is more work."""
    ratio: float
    """Factor by which at least half of the compared time is longer."""
    kernels: list[str]
    """Names of the kernels with enough instances, the longest first."""


def compare_devices(
    slow: Sequence[RankSummary], others: Sequence[RankSummary]
) -> DeviceSpeed | None:
    """Tell whether ranks with more compute have a slower device or more work; ``None``: not known.

    A slower device is slower at all matrix work: where some of it (attention) takes as long as on
    the others while other such work (matrix products) takes longer, there is more of the latter. Of
    one kind of matrix work alone nothing can be said by that; then nearly all compute must be
    longer. "Longer" is by at least half of what compute as a whole is. Kernels are compared by name
    and launch size, families where these are not recorded."""
    compute = _mean([s.time.get("compute", 0.0) for s in slow])
    usual = _median([s.time.get("compute", 0.0) for s in others])
    if usual <= 0 or compute <= usual:
        return None
    limit = 1 + 0.5 * (compute / usual - 1)
    families = _families(slow, others)
    kernels = _kernels(slow, others)
    names = [name for name, _, _, count in kernels if count >= MIN_INSTANCES]
    compared = [(weight, ratio) for _, weight, ratio, _ in kernels]
    if sum(weight for weight, _ in compared) < MIN_COMPARED_SHARE * usual:
        compared, names = [(weight, ratio) for _, weight, ratio in families], []
    total = sum(weight for weight, _ in compared)
    if total <= 0:
        return None
    weights, ratios = np.array(compared).T
    order = np.argsort(ratios)
    middle = float(ratios[order][int(np.searchsorted(np.cumsum(weights[order]), total / 2))])
    least = MIN_FAMILY_SHARE * usual
    matrix = [ratio for name, weight, ratio in families if name in MATRIX and weight > least]
    if len(matrix) > 1:
        return DeviceSpeed(min(matrix) >= limit, middle, names)
    slower = float(weights[ratios >= limit].sum())
    return DeviceSpeed(slower >= MIN_SLOWER_SHARE * total, middle, names)


MIN_OTHER_SHARE = 0.5
"""Share of the excess in operators that the others do not run, from which the batches are what
differs."""


def have_other_inputs(slow: Sequence[RankSummary], others: Sequence[RankSummary]) -> bool:
    """Return whether ranks without a device have more work because their operators get other shapes
    than those of the others."""
    own, theirs = (set().union(*(s.operators for s in group)) for group in (slow, others))
    if not own or not theirs:
        return False

    def spent(group: Sequence[RankSummary], names: set[str]) -> float:
        return _mean(
            [sum(op.total_ns for name, op in s.operators.items() if name in names) for s in group]
        )

    apart = spent(slow, own - theirs) - spent(others, theirs - own)
    more = spent(slow, own) - spent(others, theirs)
    return more > 0 and apart >= MIN_OTHER_SHARE * more


def _kernels(
    slow: Sequence[RankSummary], others: Sequence[RankSummary]
) -> list[tuple[str, float, float, int]]:
    """Return (name, usual ns per step, slowdown factor here, instances), the longest first."""
    result = []
    names = set.union(*(set(s.kernels) for s in slow)) if slow else set()
    for name in sorted(names):
        own = [s.kernels[name] for s in slow if name in s.kernels]
        theirs = [s.kernels[name] for s in others if name in s.kernels]
        if 2 * len(theirs) < len(others) or 2 * len(own) < len(slow):
            continue
        usual = _median([kernel.median_ns for kernel in theirs])
        if usual > 0:
            weight = _median([kernel.total_ns for kernel in theirs])
            ratio = _median([kernel.median_ns for kernel in own]) / usual
            instances = min(kernel.count for kernel in (*own, *theirs))
            result.append((name, weight, ratio, instances))
    return sorted(result, key=lambda item: (-item[1], item[0]))


def _families(
    slow: Sequence[RankSummary], others: Sequence[RankSummary]
) -> list[tuple[str, float, float]]:
    """Return (name, usual ns per step, slowdown factor on the slow ranks)."""
    result = []
    for name in sorted(set[str]().union(*(s.families for s in others))):
        if name in ("communication", "copy", "memset"):
            continue
        usual = _median([s.families.get(name, 0.0) for s in others])
        if usual > 0:
            own = _median([s.families.get(name, 0.0) for s in slow])
            result.append((name, usual, own / usual))
    return result


def longer_families(
    slow: Sequence[RankSummary], others: Sequence[RankSummary]
) -> list[tuple[str, float]]:
    """List families of kernels by how much longer they take on the ``slow`` ranks, ns per step; the
    most first, only those that hold a fifth of the difference."""
    more = {}
    for name in sorted(set.union(set(), *(set(s.families) for s in slow))):
        if name != "communication":
            usual = _median([s.families.get(name, 0.0) for s in others])
            more[name] = _median([s.families.get(name, 0.0) for s in slow]) - usual
    whole = sum(value for value in more.values() if value > 0)
    notable = [(name, value) for name, value in more.items() if value > 0.2 * whole > 0]
    return sorted(notable, key=lambda item: -item[1])[:3]


def _mean(values: Sequence[float]) -> float:
    return float(np.mean(values)) if len(values) else 0.0


def _median(values: Sequence[float]) -> float:
    return float(np.median(values)) if len(values) else 0.0
