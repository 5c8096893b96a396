"""Levels of outliers (rank, host, rack), and their significance."""

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

_TENSORBOARD_FILE = re.compile(r"^(?P<host>[A-Za-z][\w.-]*?)_\d+(?:\.\d+)?\.pt\.trace\.json")
"""Pattern of file names by ``tensorboard_trace_handler``: ``<host>_<pid>.<time>.pt.trace.json``."""
_HOST_NAME = re.compile(
    r"^(?:node|host|nid|hgx|dgx|gpu|ip|compute|machine|server|rack|cn|r\d+)[\w.-]*?\d+$", re.I
)
_RANK_SUFFIX = re.compile(r"[-_.]?rank[-_. =]?\d+.*$", re.I)
_RACK_AND_NUMBER = re.compile(r"^(?P<rack>.*\d)\D+\d+$")


def host_of(path: str) -> str:
    """Return the host that wrote a trace, from the name of its file or of a folder around it. Empty
    if neither names a host."""
    parts = PurePosixPath(path.replace("\\", "/")).parts
    if not parts:
        return ""
    if match := _TENSORBOARD_FILE.match(parts[-1]):
        return match["host"][:80]
    file_part = _RANK_SUFFIX.sub("", parts[-1])
    for part in (file_part, *reversed(parts[:-1])):
        if part and _HOST_NAME.match(part):
            return part[:80]
    return ""


def find_racks(hosts: Iterable[str]) -> dict[str, str]:
    """Return the rack of each host, if host names contain racks: the part up to the number before
    the last. Empty unless there are several racks with several hosts."""
    result: dict[str, list[str]] = defaultdict(list)
    for host in sorted(set(hosts)):
        match = _RACK_AND_NUMBER.match(host.split(".", 1)[0])
        if match is None:
            return {}
        result[match["rack"]].append(host)
    if len(result) < 2 or max(map(len, result.values())) < 2:
        return {}
    return {host: rack for rack, members in result.items() for host in members}


MIN_MEMBERS_SHARE = 0.7
"""Minimum share of outliers among a host's ranks (a rack's hosts) for it to be an outlier."""


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
    """Find ranks whose ``excess`` over similar ranks (NaN if not comparable) is above ``floor`` and
    has a chance below ``limit``, as hosts or racks if most of their ranks are affected. With
    ``spreads``, ranks that wait for another rank of their host hide their own excess (their host
    code runs ahead meanwhile), so any significant excess of these ranks counts. The largest excess
    comes first."""
    chance = p_values(excess)
    is_high = np.isfinite(excess) & (excess > floor)
    flagged = {
        place: float(chance[place]) for place in np.flatnonzero(is_high & (chance < limit)).tolist()
    }
    by_host = _find_hosts(excess, floor, limit, places, flagged)
    if spreads:
        _add_shared_hosts(excess, chance < limit, places, flagged, by_host)
    result = _find_racks(excess, floor, limit, places, by_host)
    covered = {place for member_group in result for place in member_group.rank_indices}
    for host, p_value in by_host.items():
        if not set(places.hosts[host]) <= covered:
            result.append(Members("host", host, places.hosts[host], p_value))
            covered |= set(places.hosts[host])
    for place, p_value in flagged.items():
        if place not in covered:
            result.append(Members("rank", str(places.ranks[place]), (int(place),), p_value))
    return sorted(
        result, key=lambda member_group: -float(np.nanmean(excess[list(member_group.rank_indices)]))
    )


def _find_hosts(
    excess: Floats, floor: float, limit: float, places: RankTopology, flagged: dict[int, float]
) -> dict[str, float]:
    """Find hosts that are outliers, with the significance of each."""
    several = {name: indices for name, indices in places.hosts.items() if len(indices) > 1}
    if len(several) < 2 or len(places.hosts) < 2:
        return {}
    result: dict[str, float] = {}
    for name, indices in several.items():  # nearly all of its ranks are outliers individually
        outlier_ranks = [place for place in indices if place in flagged]
        if len(outlier_ranks) >= MIN_MEMBERS_SHARE * len(indices):
            result[name] = min(flagged[place] for place in outlier_ranks)
    units = {name: excess[list(indices)] for name, indices in several.items()}
    for name, p_value in _find_extreme_units(units, limit).items():
        values = units[name]
        median = float(np.median(_drop_unknown(values)))
        if median > floor and np.mean(_drop_unknown(values) > median / 2) >= MIN_MEMBERS_SHARE:
            result[name] = min(p_value, result.get(name, 1.0))
    return result


def _add_shared_hosts(
    excess: Floats,
    unlikely: NDArray[np.bool_],
    places: RankTopology,
    flagged: dict[int, float],
    result: dict[str, float],
) -> None:
    """Add hosts with one outlier rank on which most other ranks deviate in the same direction."""
    for name, indices in places.hosts.items():
        outlier_ranks = [place for place in indices if place in flagged]
        comparable = [place for place in indices if np.isfinite(excess[place])]
        deviating = [place for place in comparable if unlikely[place] and excess[place] > 0]
        if (
            outlier_ranks
            and name not in result
            and len(comparable) > 2
            and len(deviating) >= MIN_MEMBERS_SHARE * len(comparable)
        ):
            result[name] = min(flagged[place] for place in outlier_ranks)


def _find_racks(
    excess: Floats, floor: float, limit: float, places: RankTopology, hosts: dict[str, float]
) -> list[Members]:
    result = []
    units = {}
    for rack, rack_hosts in places.racks.items():
        host_values = [_drop_unknown(excess[list(places.hosts[host])]) for host in rack_hosts]
        if sum(len(values) > 0 for values in host_values) > 1:
            units[rack] = np.array([float(values.mean()) for values in host_values if len(values)])
    outliers = _find_extreme_units(units, limit) if len(units) > 1 else {}
    for rack, values in units.items():
        rack_hosts = places.racks[rack]
        host_p_values = [hosts[host] for host in rack_hosts if host in hosts]
        p_value = min(
            outliers.get(rack, 1.0),
            min(host_p_values)
            if len(host_p_values) >= MIN_MEMBERS_SHARE * len(rack_hosts)
            else 1.0,
        )
        median = float(np.median(values))
        if p_value < limit and median > floor and np.mean(values > median / 2) >= MIN_MEMBERS_SHARE:
            members = tuple(place for host in rack_hosts for place in places.hosts[host])
            result.append(Members("rack", rack, members, p_value))
    return result if len(result) < len(units) else []


def _find_extreme_units(units: dict[str, Floats], limit: float) -> dict[str, float]:
    """Find units (of several values each) whose mean is above the others', with its significance.

    Four or more units are compared with each other, two or three with the scatter inside them."""
    names = list(units)
    units = {name: finite for name in units if len(finite := _drop_unknown(units[name]))}
    names = list(units)
    if len(names) < 2:
        return {}
    means = np.array([float(units[name].mean()) for name in names])
    if len(names) >= 4:
        chance = p_values(group_residuals(means, np.zeros(len(names), dtype=np.int64)))
        return {
            unit_name: float(p_value)
            for unit_name, p_value in zip(names, chance, strict=True)
            if p_value < limit
        }
    samples = list(units.values())
    degrees = sum(len(values) - 1 for values in samples)
    if degrees < 2:
        return {}
    variance = sum(float(((sample - sample.mean()) ** 2).sum()) for sample in samples) / degrees
    top = int(np.argmax(means))
    other_values = np.concatenate([sample for index, sample in enumerate(samples) if index != top])
    error = float(np.sqrt(variance * (1 / len(samples[top]) + 1 / len(other_values))))
    lead = means[top] - float(other_values.mean())
    tail = upper_tail(lead / error, min(30.0, degrees)) if error > 0 else float(lead <= 0)
    p_value = max_tail_probability(tail, len(names))
    return {names[top]: p_value} if p_value < limit else {}


def _drop_unknown(values: Floats) -> Floats:
    return values[np.isfinite(values)]


MAX_STAGES = 64
MAX_JOB_COLLECTIVES = 4
"""Maximum number of collectives of all ranks per step in a pipeline: a norm, a loss, a flag."""


def find_stages(joined: JoinedCollectives, ranks: int, steps: int) -> Ints:
    """Find the stage of each rank (by index), by its first rank; all 0 without a pipeline.

    Ranks that share collectives of a part of the job belong to one stage; stages exchange only
    sends and receives. There is one stage without sends, or if all ranks share the step's
    collectives."""
    stages = np.zeros(ranks, dtype=np.int64)
    if not joined.rows or not joined.is_send.any():
        return stages
    send_counts = np.bincount(joined.rank[joined.is_send[joined.row]], minlength=ranks)
    is_active = np.bincount(joined.rank, minlength=ranks) > 0
    if (send_counts[is_active] > 0).mean() < 0.5:
        return stages
    sync = joined.synchronising
    is_job_wide = joined.rank_count >= 0.9 * is_active.sum()
    if int((sync & is_job_wide).sum()) > MAX_JOB_COLLECTIVES * max(1, steps):
        return stages
    is_used = (sync & ~is_job_wide & (joined.rank_count > 1))[joined.row]
    labels = _find_components(joined.rank[is_used], joined.row[is_used], ranks)
    labels = np.where(is_active, labels, -1)
    names = np.unique(labels[is_active])
    if not 2 <= len(names) <= MAX_STAGES:
        return stages
    return np.maximum(np.searchsorted(names, labels), 0).astype(np.int64)


def _find_components(rank: Ints, row: Ints, ranks: int) -> Ints:
    """Return the lowest rank that each rank is connected to by shared rows."""
    label = np.arange(ranks, dtype=np.int64)
    if not len(rank):
        return label
    _, row = np.unique(row, return_inverse=True)
    lowest = np.empty(int(row.max()) + 1, dtype=np.int64)
    while True:  # as many rounds as the longest chain of groups
        lowest.fill(ranks)
        np.minimum.at(lowest, row, label[rank])
        new_label = label.copy()
        np.minimum.at(new_label, rank, lowest[row])
        if (new_label == label).all():
            return label
        label = new_label


# -- significance of the most extreme of similar ranks ---------------------

NORMAL_MAD = 1.4826
"""Standard deviation of a normal distribution over its median absolute deviation."""
MAX_DEGREES = 30.0
"""Maximum degrees of freedom: measured times have heavier tails than the normal distribution. In
Student's t of 30, one value in a million exceeds six deviations."""
MAD_EFFICIENCY = 0.37
"""Efficiency of the median absolute deviation in normal scatter (Huber, Robust Statistics)."""
LATE_SHARE = 0.05
"""Minimum exposed wait of the others for a late rank, as a share of the step."""
MIN_LATE = 0.5
MAX_LATE_CHANCE = 0.01
MIN_COLLECTIVES = 4
"""Minimum number of collectives of a rank that can be late."""


def upper_tail(t: float, degrees: float) -> float:
    """Return the probability of a larger value in Student's t distribution, with a relative error
    of a few per cent (Wallace, Biometrika 46, 1959)."""
    if not math.isfinite(t):
        return 0.0 if t > 0 else 1.0
    size = math.sqrt(degrees * math.log1p(t * t / degrees)) * (8 * degrees + 1) / (8 * degrees + 3)
    tail = 0.5 * math.erfc(size / math.sqrt(2))
    return tail if t >= 0 else 1 - tail


def max_tail_probability(tail: float, count: int) -> float:
    """Return the probability that the largest of ``count`` values exceeds one with this
    ``tail``."""
    if tail >= 1:
        return 1.0
    return -math.expm1(count * math.log1p(-tail))


def binomial_tail(hits: int, tries: int, chance: float) -> float:
    """Return the probability of ``hits`` or more hits."""
    if hits <= 0:
        return 1.0
    total = 0.0
    for k in range(hits, tries + 1):
        log = math.lgamma(tries + 1) - math.lgamma(k + 1) - math.lgamma(tries - k + 1)
        log += k * math.log(chance) + (tries - k) * math.log1p(-chance) if chance < 1 else 0.0
        total += math.exp(log)
    return min(1.0, total)


def group_residuals(values: Floats, group: Ints) -> Floats:
    """Return each value minus the median of its group, or NaN in a group of fewer than three
    values, where no value is an outlier."""
    residuals = np.full(len(values), np.nan)
    for number in np.unique(group):
        rows = np.flatnonzero((group == number) & np.isfinite(values))
        if len(rows) >= 3:
            residuals[rows] = values[rows] - np.median(values[rows])
    return residuals


def medians_over(values: Floats, axis: int) -> Floats:
    """Return the median of known values over an axis of a table, or NaN if none is known."""
    table = values if axis == 1 else values.T
    result = np.full(len(table), np.nan)
    known = np.isfinite(table).any(axis=1) if table.size else np.zeros(len(table), dtype=np.bool_)
    if known.any():
        result[known] = np.nanmedian(table[known], axis=1)
    return result


def means_over(values: Floats, axis: int) -> Floats:
    """Return the mean of known values over an axis of a table, or NaN if none is known."""
    table = values if axis == 1 else values.T
    is_known = np.isfinite(table)
    count = is_known.sum(axis=1)
    total = np.where(is_known, table, 0.0).sum(axis=1)
    return np.where(count > 0, total / np.maximum(count, 1), np.nan)


def p_values(left: Floats) -> Floats:
    """Return for each residual the probability that the largest of all residuals is as large.

    It is twice the smaller probability by two scales: the median absolute deviation, which is
    robust against several outliers, and the deviation of all other residuals (Student's deleted
    residual), which is sharper with few outliers."""
    result = np.ones(len(left))
    known_rows = np.flatnonzero(np.isfinite(left))
    count = len(known_rows)
    if count < 4:
        return result
    values = left[known_rows]
    scale = NORMAL_MAD * float(np.median(np.abs(values)))
    robust_degrees = min(MAX_DEGREES, max(2.0, MAD_EFFICIENCY * count - 1))
    total, squares = float(values.sum()), float((values**2).sum())
    for index, value in zip(known_rows.tolist(), values.tolist(), strict=True):
        if value <= 0:
            continue
        others = count - 1
        mean = (total - value) / others
        spread = math.sqrt(max(0.0, (squares - value * value) / others - mean * mean))
        spread *= math.sqrt(others / (others - 1)) * math.sqrt(1 + 1 / others)
        tail = 1.0
        if scale > 0:
            tail = upper_tail(value / scale, robust_degrees)
        if spread > 0:
            tail = min(tail, upper_tail((value - mean) / spread, min(MAX_DEGREES, count - 2)))
        if scale == 0 and spread == 0:
            tail = 0.0
        result[index] = min(1.0, 2 * max_tail_probability(tail, count))
    return result
