"""Levels at which something is an outlier (rank, host, rack), and how probably."""

import math
import re
from collections import defaultdict
from collections.abc import Iterable, Sequence
from pathlib import PurePosixPath
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from advisor.core.intervals import Floats, Ints
from advisor.measure.ranks.join import JoinedCollectives
from advisor.measure.ranks.summary_schema import RankSummary

_OF_TENSORBOARD = re.compile(r"^(?P<host>[A-Za-z][\w.-]*?)_\d+(?:\.\d+)?\.pt\.trace\.json")
"""Names of files by ``tensorboard_trace_handler``: ``<host>_<pid>.<time>.pt.trace.json``."""
_NAMED = re.compile(
    r"^(?:node|host|nid|hgx|dgx|gpu|ip|compute|machine|server|rack|cn|r\d+)[\w.-]*?\d+$", re.I
)
_RANK = re.compile(r"[-_.]?rank[-_. =]?\d+.*$", re.I)
_LAST = re.compile(r"^(?P<rack>.*\d)\D+\d+$")


def host_of(path: str) -> str:
    """Return the host that a trace was written on, as its file's name or a folder around it says;
    empty: neither does."""
    parts = PurePosixPath(path.replace("\\", "/")).parts
    if not parts:
        return ""
    if found := _OF_TENSORBOARD.match(parts[-1]):
        return found["host"][:80]
    own = _RANK.sub("", parts[-1])
    for part in (own, *reversed(parts[:-1])):
        if part and _NAMED.match(part):
            return part[:80]
    return ""


def find_racks(hosts: Iterable[str]) -> dict[str, str]:
    """Return the rack of each host, where the names tell racks: what ends with the number before
    the last. Empty: there are not several racks of several hosts."""
    result: dict[str, list[str]] = defaultdict(list)
    for host in sorted(set(hosts)):
        match = _LAST.match(host.split(".", 1)[0])
        if match is None:
            return {}
        result[match["rack"]].append(host)
    if len(result) < 2 or max(map(len, result.values())) < 2:
        return {}
    return {host: rack for rack, members in result.items() for host in members}


MIN_MEMBERS_SHARE = 0.7
"""Share of a host's ranks (of a rack's hosts) that must be outliers for it to be one."""


class Members(NamedTuple):
    """Ranks that deviate together."""

    unit: str
    """Level: ``rank``, ``host``, ``rack`` or ``stage``."""
    name: str
    rank_indices: tuple[int, ...]
    p_value: float


class RankTopology:
    """Hosts of ranks, and racks of hosts."""

    def __init__(self, summaries: Sequence[RankSummary]) -> None:
        self.ranks = [s.rank for s in summaries]
        of_host: dict[str, list[int]] = defaultdict(list)
        for place, summary in enumerate(summaries):
            if summary.host:
                of_host[summary.host].append(place)
        self.hosts = {name: tuple(places) for name, places in sorted(of_host.items())}
        of_rack: dict[str, list[str]] = defaultdict(list)
        for host, rack in find_racks(self.hosts).items():
            of_rack[rack].append(host)
        self.racks = dict(sorted(of_rack.items()))


def find_members(
    excess: Floats, floor: float, limit: float, places: RankTopology, *, spreads: bool = False
) -> list[Members]:
    """Find ranks whose ``excess`` (over those that are like them; NaN: not comparable) is above
    ``floor`` and would come by chance in less than ``limit``; named as hosts and racks where most
    of these have it. ``spreads``: ranks that wait for one of their host hide what they have of the
    same (the host runs ahead meanwhile), so that of the others any excess counts that chance does
    not explain. The largest excess first."""
    chance = p_values(excess)
    high = np.isfinite(excess) & (excess > floor)
    flagged = {
        place: float(chance[place]) for place in np.flatnonzero(high & (chance < limit)).tolist()
    }
    by_host = _hosts(excess, floor, limit, places, flagged)
    if spreads:
        _shared(excess, chance < limit, places, flagged, by_host)
    result = _racks(excess, floor, limit, places, by_host)
    covered = {place for who in result for place in who.rank_indices}
    for host, p in by_host.items():
        if not set(places.hosts[host]) <= covered:
            result.append(Members("host", host, places.hosts[host], p))
            covered |= set(places.hosts[host])
    for place, p in flagged.items():
        if place not in covered:
            result.append(Members("rank", str(places.ranks[place]), (int(place),), p))
    return sorted(result, key=lambda who: -float(np.nanmean(excess[list(who.rank_indices)])))


def _hosts(
    excess: Floats, floor: float, limit: float, places: RankTopology, flagged: dict[int, float]
) -> dict[str, float]:
    """Find hosts that are outliers as a whole, with the significance of each."""
    several = {name: own for name, own in places.hosts.items() if len(own) > 1}
    if len(several) < 2 or len(places.hosts) < 2:
        return {}
    result: dict[str, float] = {}
    for name, own in several.items():  # nearly all of its ranks are outliers one by one
        there = [place for place in own if place in flagged]
        if len(there) >= MIN_MEMBERS_SHARE * len(own):
            result[name] = min(flagged[place] for place in there)
    units = {name: excess[list(own)] for name, own in several.items()}
    for name, p in _extreme(units, limit).items():
        values = units[name]
        middle = float(np.median(_known(values)))
        if middle > floor and np.mean(_known(values) > middle / 2) >= MIN_MEMBERS_SHARE:
            result[name] = min(p, result.get(name, 1.0))
    return result


def _shared(
    excess: Floats,
    unlikely: NDArray[np.bool_],
    places: RankTopology,
    flagged: dict[int, float],
    result: dict[str, float],
) -> None:
    """Add hosts with one outlier rank on which most other ranks deviate in the same direction."""
    for name, own in places.hosts.items():
        there = [place for place in own if place in flagged]
        known = [place for place in own if np.isfinite(excess[place])]
        also = [place for place in known if unlikely[place] and excess[place] > 0]
        if (
            there
            and name not in result
            and len(known) > 2
            and len(also) >= MIN_MEMBERS_SHARE * len(known)
        ):
            result[name] = min(flagged[place] for place in there)


def _racks(
    excess: Floats, floor: float, limit: float, places: RankTopology, hosts: dict[str, float]
) -> list[Members]:
    result = []
    units = {}
    for rack, own in places.racks.items():
        each = [_known(excess[list(places.hosts[host])]) for host in own]
        if sum(len(values) > 0 for values in each) > 1:
            units[rack] = np.array([float(values.mean()) for values in each if len(values)])
    outliers = _extreme(units, limit) if len(units) > 1 else {}
    for rack, values in units.items():
        own = places.racks[rack]
        there = [hosts[host] for host in own if host in hosts]
        p = min(
            outliers.get(rack, 1.0),
            min(there) if len(there) >= MIN_MEMBERS_SHARE * len(own) else 1.0,
        )
        middle = float(np.median(values))
        if p < limit and middle > floor and np.mean(values > middle / 2) >= MIN_MEMBERS_SHARE:
            members = tuple(place for host in own for place in places.hosts[host])
            result.append(Members("rack", rack, members, p))
    return result if len(result) < len(units) else []


def _extreme(units: dict[str, Floats], limit: float) -> dict[str, float]:
    """Find units (of several values each) whose mean is above the others', with the chance of it.

    Of four and more among each other; of two or three against the scatter inside of them."""
    names = list(units)
    units = {name: known for name in units if len(known := _known(units[name]))}
    names = list(units)
    if len(names) < 2:
        return {}
    means = np.array([float(units[name].mean()) for name in names])
    if len(names) >= 4:
        chance = p_values(group_residuals(means, np.zeros(len(names), dtype=np.int64)))
        return {n: float(p) for n, p in zip(names, chance, strict=True) if p < limit}
    kept = list(units.values())
    degrees = sum(len(values) - 1 for values in kept)
    if degrees < 2:
        return {}
    inside = sum(float(((v - v.mean()) ** 2).sum()) for v in kept) / degrees
    top = int(np.argmax(means))
    rest = np.concatenate([v for place, v in enumerate(kept) if place != top])
    error = float(np.sqrt(inside * (1 / len(kept[top]) + 1 / len(rest))))
    apart = means[top] - float(rest.mean())
    tail = upper_tail(apart / error, min(30.0, degrees)) if error > 0 else float(apart <= 0)
    p = of_the_largest(tail, len(names))
    return {names[top]: p} if p < limit else {}


def _known(values: Floats) -> Floats:
    return values[np.isfinite(values)]


MAX_STAGES = 64
FEW = 4
"""Collectives of all ranks per step that do not make them one stage: a norm, a loss, a flag."""


def find_stages(joined: JoinedCollectives, ranks: int, steps: int) -> Ints:
    """Find the stage of each rank (place), numbered by its first rank; all 0: there is no pipeline.

    Ranks that share collectives of part of the job are of one stage; stages exchange only sends and
    receives. Where nothing is sent, or all ranks share the step's collectives, there is one."""
    item = np.zeros(ranks, dtype=np.int64)
    if not joined.rows or not joined.is_send.any():
        return item
    pieces = np.bincount(joined.rank[joined.is_send[joined.row]], minlength=ranks)
    active = np.bincount(joined.rank, minlength=ranks) > 0
    if (pieces[active] > 0).mean() < 0.5:
        return item
    sync = joined.synchronising
    whole = joined.rank_count >= 0.9 * active.sum()
    if int((sync & whole).sum()) > FEW * max(1, steps):
        return item
    use = (sync & ~whole & (joined.rank_count > 1))[joined.row]
    label = _components(joined.rank[use], joined.row[use], ranks)
    label = np.where(active, label, -1)
    names = np.unique(label[active])
    if not 2 <= len(names) <= MAX_STAGES:
        return item
    return np.maximum(np.searchsorted(names, label), 0).astype(np.int64)


def _components(rank: Ints, row: Ints, ranks: int) -> Ints:
    """Return the least rank that each is connected to by shared rows."""
    label = np.arange(ranks, dtype=np.int64)
    if not len(rank):
        return label
    _, row = np.unique(row, return_inverse=True)
    least = np.empty(int(row.max()) + 1, dtype=np.int64)
    while True:  # as many rounds as the longest chain of groups
        least.fill(ranks)
        np.minimum.at(least, row, label[rank])
        fresh = label.copy()
        np.minimum.at(fresh, rank, least[row])
        if (fresh == label).all():
            return label
        label = fresh


# -- how probable it is that the most extreme of similar ranks looks like this ---------------------

NORMAL_MAD = 1.4826
"""Standard deviation of a normal distribution over its median absolute deviation."""
MAX_DEGREES = 30.0
"""Degrees of freedom, at most: measured times have heavier tails than the normal distribution.
Student's t of 30 leaves six deviations to one of a million."""
MAD_EFFICIENCY = 0.37
"""Efficiency of the median absolute deviation in normal scatter (Huber, Robust Statistics)."""
LATE_SHARE = 0.05
"""Exposed wait of the others, as a share of the step, from which a rank is late."""
MIN_LATE = 0.5
MAX_LATE_CHANCE = 0.01
MIN_COLLECTIVES = 4
"""Collectives that a rank must take part in to be judged late."""


def upper_tail(t: float, degrees: float) -> float:
    """Return the probability of a larger value in Student's t distribution, to a few per cent of
    itself (Wallace, Biometrika 46, 1959)."""
    if not math.isfinite(t):
        return 0.0 if t > 0 else 1.0
    size = math.sqrt(degrees * math.log1p(t * t / degrees)) * (8 * degrees + 1) / (8 * degrees + 3)
    tail = 0.5 * math.erfc(size / math.sqrt(2))
    return tail if t >= 0 else 1 - tail


def of_the_largest(tail: float, count: int) -> float:
    """Return the probability that the largest of ``count`` values is beyond one's ``tail``."""
    if tail >= 1:
        return 1.0
    return -math.expm1(count * math.log1p(-tail))


def binomial_tail(hits: int, tries: int, chance: float) -> float:
    """Return the probability of ``hits`` or more."""
    if hits <= 0:
        return 1.0
    total = 0.0
    for k in range(hits, tries + 1):
        log = math.lgamma(tries + 1) - math.lgamma(k + 1) - math.lgamma(tries - k + 1)
        log += k * math.log(chance) + (tries - k) * math.log1p(-chance) if chance < 1 else 0.0
        total += math.exp(log)
    return min(1.0, total)


def group_residuals(values: Floats, group: Ints) -> Floats:
    """Return each value less the median of its group; NaN in a group of fewer than three, where
    nobody differs from the others."""
    left = np.full(len(values), np.nan)
    for number in np.unique(group):
        rows = np.flatnonzero((group == number) & np.isfinite(values))
        if len(rows) >= 3:
            left[rows] = values[rows] - np.median(values[rows])
    return left


def medians_over(values: Floats, axis: int) -> Floats:
    """Return the median of known values over an axis of a table; NaN where nothing is known."""
    table = values if axis == 1 else values.T
    result = np.full(len(table), np.nan)
    known = np.isfinite(table).any(axis=1) if table.size else np.zeros(len(table), dtype=np.bool_)
    if known.any():
        result[known] = np.nanmedian(table[known], axis=1)
    return result


def means_over(values: Floats, axis: int) -> Floats:
    """Return the mean of known values over an axis of a table; NaN where nothing is known."""
    table = values if axis == 1 else values.T
    there = np.isfinite(table)
    count = there.sum(axis=1)
    total = np.where(there, table, 0.0).sum(axis=1)
    return np.where(count > 0, total / np.maximum(count, 1), np.nan)


def p_values(left: Floats) -> Floats:
    """Return for each residual the probability that the largest of so many is as large.

    Two scales, and the smaller probability of the two, doubled: the median absolute deviation,
    which several outliers do not spoil, and the deviation of all others than the one in question
    (Student's deleted residual), which is sharper where there are few."""
    result = np.ones(len(left))
    known = np.flatnonzero(np.isfinite(left))
    count = len(known)
    if count < 4:
        return result
    values = left[known]
    scale = NORMAL_MAD * float(np.median(np.abs(values)))
    robust = min(MAX_DEGREES, max(2.0, MAD_EFFICIENCY * count - 1))
    total, squares = float(values.sum()), float((values**2).sum())
    for place, value in zip(known.tolist(), values.tolist(), strict=True):
        if value <= 0:
            continue
        others = count - 1
        mean = (total - value) / others
        spread = math.sqrt(max(0.0, (squares - value * value) / others - mean * mean))
        spread *= math.sqrt(others / (others - 1)) * math.sqrt(1 + 1 / others)
        best = 1.0
        if scale > 0:
            best = upper_tail(value / scale, robust)
        if spread > 0:
            best = min(best, upper_tail((value - mean) / spread, min(MAX_DEGREES, count - 2)))
        if scale == 0 and spread == 0:
            best = 0.0
        result[place] = min(1.0, 2 * of_the_largest(best, count))
    return result
