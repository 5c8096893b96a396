"""Outliers among ranks, by work of their own (no rank is blamed for waiting), and texts that
describe them."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np
from msgspec import structs

from advisor.core.finding import Edit, Select
from advisor.core.intervals import Floats, Ints
from advisor.core.ranks import format_ranks
from advisor.core.text import format_duration, format_share
from advisor.measure.device.families import FAMILIES
from advisor.measure.ranks.join import CollectiveWaits, JoinedCollectives
from advisor.measure.ranks.own_time import (
    MIN_KERNELS,
    OWN,
    RankProfile,
    compare_devices,
    have_other_inputs,
    longer_families,
)
from advisor.measure.ranks.summary_schema import RankSummary
from advisor.measure.ranks.topology import (
    LATE_SHARE,
    MAX_LATE_CHANCE,
    MIN_COLLECTIVES,
    MIN_LATE,
    Members,
    RankTopology,
    binomial_tail,
    find_members,
    group_residuals,
    means_over,
    medians_over,
    p_values,
    upper_tail,
)

MAX_CHANCE = 0.002
"""Chance of a false alarm in each of five searches: together one healthy job of a hundred."""
MIN_SHARE = 0.02
"""Share of the step by which an outlier has more than similar ranks."""
MOVING_SHARE = 0.03
"""Share of the step by which each step's last rank is above the others, in the mean."""
BROAD_SHARE = 0.08
"""Share of the step that an outlier must cost where ranks differ all over: nothing else
distinguishes it."""
STAGE_SHARE = 0.05
"""Share of the step by which the longest stage is above the mean of the stages."""
MAX_EDITS = 64
_TALK = Select(on="gpu", family=("communication",))
_COMPUTE = tuple(family for family in FAMILIES if family != "communication")
EXPLAINED_SHARE = 0.5
"""Share of the others' wait from which a late rank's own work explains its delay."""
MIN_STEPS = 4
"""Steps from which an outlier that moves differs from one that stays."""
NEW_EACH_STEP = 0.5
"""Share of the steps in which one rank is last, from which the outlier does not move."""


@dataclass
class Deviation:
    """An outlier, as measured; its members' ``rank_indices`` index the list of summaries."""

    kind: str
    members: Members
    excess_ns: float
    """Own time (for ``network``: transfer time) above the others', ns per step."""
    rank_varies: bool = False
    excess_by_class: dict[str, float] = field(default_factory=dict)
    """Excess by class, ns per step above the others."""
    device_slowdown: float | None = None
    """Factor by which the same kernels take longer there; ``None``: not known, or no cause."""
    kernels: int = 0
    """Number of kernels that ``device_slowdown`` is measured by."""
    families: list[tuple[str, float]] = field(default_factory=list)
    others_ns: float = 0.0
    """Own time of the others, ns per step."""
    note: str = ""
    arrives_late: bool = False
    """Whether it was found by who arrives last, not by own work."""

    @property
    def slow_device(self) -> bool:
        """Whether enough kernels show a slower device; otherwise the cause is open."""
        return self.kind == "compute" and self.kernels >= MIN_KERNELS


@dataclass(frozen=True)
class JobMeasurements:
    """Measurements of a job that the searches for outliers use."""

    summaries: Sequence[RankSummary]
    profile: RankProfile
    joined: JoinedCollectives
    waits: CollectiveWaits
    stage: Ints
    topology: RankTopology

    @property
    def step_ns(self) -> float:
        """Median of the ranks' mean steps, ns."""
        known = self.profile.step_ns[self.profile.step_ns > 0]
        return float(np.median(known)) if len(known) else 0.0


def find_outliers(job: JobMeasurements) -> list[Deviation]:
    """Run all searches; what one explains another does not report again."""
    result = find_persistent(job)
    blamed = {place for deviation in result for place in deviation.members.rank_indices}
    result += find_long_stages(job)
    result += find_moving(job, blamed)
    if not result:
        result += find_late(job)
    return result


# -- the same ranks in every step -------------------------------------------------------------


def find_persistent(job: JobMeasurements) -> list[Deviation]:
    """Find ranks, hosts and racks with more own work than others of the same stage."""
    own, step = job.profile, job.step_ns
    if step <= 0:
        return []
    floor = MIN_SHARE * step
    # the middle of the steps: what a rank has in one of them is not what it always has
    total = _middle(own.own_ns_by_step, job.stage)
    left = {"own": total}
    for name in ("compute", "input"):
        left[name] = _middle(own.by_step[name], job.stage)
    left["host"] = _middle(own.by_step["host"] + own.by_step["copies"], job.stage)
    deviations: list[Deviation] = []
    for name, excess in left.items():
        limit, spreads = MAX_CHANCE / len(left), name in ("host", "input")
        for who in find_members(excess, floor, limit, job.topology, spreads=spreads):
            # others wait for the whole of a rank's work, not for a class of it
            if float(np.nanmax(total[list(who.rank_indices)])) > floor:
                _add(deviations, _measure_deviation(job, who, total))
    return _merge_imbalances(job, deviations)


def _middle(by_step: Floats, stage: Ints) -> Floats:
    """Return each rank's excess over the ranks of its stage, the median over the steps."""
    left = np.stack([group_residuals(column, stage) for column in by_step.T], axis=1)
    return medians_over(left, axis=1)


def _add(result: list[Deviation], fresh: Deviation) -> None:
    """Add a deviation; a larger unit that has the same excess replaces its parts."""
    own = set(fresh.members.rank_indices)
    for deviation in list(result):
        theirs = set(deviation.members.rank_indices)
        if own <= theirs:
            return
        if theirs < own:
            result.remove(deviation)
    result.append(fresh)


def _measure_deviation(job: JobMeasurements, who: Members, total: Floats) -> Deviation:
    index = list(who.rank_indices)
    inside = set(index)
    like = [
        place
        for place in range(len(job.summaries))
        if place not in inside and job.stage[place] in set(job.stage[index].tolist())
    ] or [place for place in range(len(job.summaries)) if place not in inside]
    mean = means_over(job.profile.values[index], axis=0)
    return _classified(
        job,
        Deviation(
            kind="host",
            members=who,
            excess_ns=float(np.nanmean(total[index])),
            excess_by_class=_excess_by_class(job, mean, like),
            others_ns=float(medians_over(job.profile.own_ns[like][None, :], axis=1)[0]),
        ),
        like,
    )


def _excess_by_class(
    job: JobMeasurements, values: Floats, like: Sequence[int] | Ints
) -> dict[str, float]:
    """Return ns per step by class that ``values`` are above the median of the ranks ``like``."""
    above = values - medians_over(job.profile.values[like], axis=0)
    return dict(zip(OWN, above.tolist(), strict=False))


def _kind(more: dict[str, float]) -> str:
    """Return the class with the largest excess: ``input``, ``host`` or ``compute``."""
    host = more["host"] + more["copies"]
    most = max(more["compute"], more["input"], host)
    return "input" if most == more["input"] else "host" if most == host else "compute"


def _classified(job: JobMeasurements, deviation: Deviation, like: list[int]) -> Deviation:
    """Classify a deviation by what it has most more of than the ranks ``like`` it."""
    if (kind := _kind(deviation.excess_by_class)) != "compute":
        return replace(deviation, kind=kind)
    slow = [_of_whole_steps(job, place) for place in deviation.members.rank_indices]
    others = [_of_whole_steps(job, place) for place in like]
    speed = compare_devices(slow, others)
    if speed is None:
        more_work = have_other_inputs(slow, others)
        return replace(deviation, kind="imbalance" if more_work else "compute")
    if speed.slower:
        return replace(
            deviation, kind="compute", device_slowdown=speed.ratio, kernels=len(speed.kernels)
        )
    return replace(deviation, kind="imbalance", families=longer_families(slow, others))


def _of_whole_steps(job: JobMeasurements, place: int) -> RankSummary:
    """Scale a rank's time by kernel family, where its file is cut off, to the steps before the cut,
    as far as their compute tells."""
    summary = job.summaries[place]
    compute, own = summary.time.get("compute", 0.0), float(job.profile.values[place, 0])
    if not summary.damage or compute <= 0 or not np.isfinite(own):
        return summary
    return structs.replace(
        summary,
        time={name: ns * own / compute for name, ns in summary.time.items()},
        families={name: ns * own / compute for name, ns in summary.families.items()},
    )


def _merge_imbalances(job: JobMeasurements, result: list[Deviation]) -> list[Deviation]:
    """Merge ranks that have more of the work into one imbalance."""
    uneven = [deviation for deviation in result if deviation.kind == "imbalance"]
    if len(uneven) < 2:
        return result
    return [
        *(deviation for deviation in result if deviation.kind != "imbalance"),
        merge_outliers(job, uneven),
    ]


def merge_outliers(job: JobMeasurements, result: Sequence[Deviation]) -> Deviation:
    """Merge several outliers of the same kind: the figures are of the largest."""
    places = tuple(
        sorted({place for deviation in result for place in deviation.members.rank_indices})
    )
    name = format_ranks([job.topology.ranks[place] for place in places])
    who = Members("rank", name, places, min(deviation.members.p_value for deviation in result))
    return replace(max(result, key=lambda deviation: deviation.excess_ns), members=who)


# -- parts of a pipeline ----------------------------------------------------------------------


def find_long_stages(job: JobMeasurements) -> list[Deviation]:
    """Find the longest stage of a pipeline, where the others wait for it."""
    names = np.unique(job.stage)
    if len(names) < 2 or job.step_ns <= 0:
        return []
    own = job.profile.own_ns
    middle = np.array([np.nanmedian(own[job.stage == name]) for name in names])
    if not np.isfinite(middle).all():
        return []
    top = int(np.argmax(middle))
    rest = np.delete(middle, top)
    excess = float(middle[top] - rest.mean())
    if excess < STAGE_SHARE * job.step_ns or middle[top] - rest.max() < MIN_SHARE * job.step_ns:
        return []
    index = np.flatnonzero(job.stage == names[top])
    like = np.flatnonzero(job.stage != names[top])
    # against the scatter of the ranks inside of the stages
    inside = np.concatenate([own[job.stage == n] - m for n, m in zip(names, middle, strict=True)])
    p = float(p_values(np.append(inside, middle[top] - np.median(rest)))[-1])
    median = medians_over(job.profile.values[index], axis=0)
    slow = [job.summaries[place] for place in index.tolist()]
    others = [job.summaries[place] for place in like.tolist()]
    return [
        Deviation(
            kind="pipeline",
            members=Members("stage", str(top), tuple(index.tolist()), p),
            excess_ns=excess,
            excess_by_class=_excess_by_class(job, median, like),
            families=longer_families(slow, others),
            others_ns=float(rest.mean()),
            note=f"{len(names)} stages",
        )
    ]


# -- another rank from step to step -----------------------------------------------------------


def find_moving(job: JobMeasurements, blamed: set[int]) -> list[Deviation]:
    """Find steps that are held up by one rank each, and not by the same."""
    own = job.profile.own_ns_by_step
    if own.shape[1] < MIN_STEPS or job.step_ns <= 0:
        return []
    own = own.copy()
    own[sorted(blamed)] = np.nan
    # what a rank has in every step is no part of what moves
    usual = medians_over(own, axis=1)[:, None]
    left = np.stack([group_residuals(column, job.stage) for column in (own - usual).T], axis=1)
    steps = np.flatnonzero(np.isfinite(left).sum(axis=0) >= 4)
    if len(steps) < MIN_STEPS:
        return []
    left = left[:, steps]
    last = np.nanargmax(np.where(np.isfinite(left), left, -np.inf), axis=0)
    above = left[last, np.arange(len(steps))]
    counts = np.bincount(last, minlength=len(job.summaries))
    excess = float(above.mean())
    single = np.array([float(p_values(column).min()) for column in left.T])
    hits = int((single < 0.05).sum())
    p = binomial_tail(hits, len(steps), 0.05)
    extreme = p < MAX_CHANCE and hits * 2 >= len(steps) and excess > MOVING_SHARE * job.step_ns
    # in most of the steps, not in one that was long
    if not extreme and float(np.median(above)) < BROAD_SHARE * job.step_ns:
        return []
    if counts.max() > max(1.0, NEW_EACH_STEP * len(steps)):
        return []
    more = {}
    for name in OWN:
        each = job.profile.by_step[name][:, steps]
        each = each - medians_over(each, axis=0)
        more[name] = float(np.nanmean(each[last, np.arange(len(steps))]))
    kind = _kind(more).replace("compute", "imbalance")
    ranks = np.flatnonzero(counts)
    who = Members("rank", "another in each step", tuple(ranks.tolist()), p if extreme else 1.0)
    return [
        Deviation(
            kind=kind,
            members=who,
            excess_ns=excess,
            rank_varies=True,
            excess_by_class=more,
            others_ns=float(np.nanmedian(own)),
            note=f"{len(ranks)} ranks are the last of {len(steps)} steps",
        )
    ]


# -- late, and nothing of its own says why ----------------------------------------------------


def find_late(job: JobMeasurements) -> list[Deviation]:
    """Find the rank that arrives last at most collectives, where own work in these steps does not
    say why: few ranks have no scatter to compare with, and a window of a step or two shows a delay
    that began before it."""
    waits, step = job.waits, job.step_ns
    steps = max(1, len(job.profile.steps))
    if not len(waits.row) or step <= 0:
        return []
    place = int(np.argmax(waits.caused_exposed_ns))
    taken, last = int(waits.collective_count[place]), int(waits.last_count[place])
    if taken < MIN_COLLECTIVES or last < MIN_LATE * taken:
        return []
    if waits.caused_exposed_ns[place] / steps < LATE_SHARE * step:
        return []
    like = np.flatnonzero(np.arange(len(job.summaries)) != place)
    more = _excess_by_class(job, job.profile.values[place], like)
    if steps > 2 and sum(more.values()) <= 0:
        return []
    who = Members("rank", str(job.topology.ranks[place]), (place,), late_chance(job, place))
    result = Deviation(
        kind="host",
        members=who,
        excess_ns=float(waits.caused_exposed_ns[place]) / steps,
        excess_by_class=more,
        others_ns=float(np.nanmedian(job.profile.own_ns[like])),
        arrives_late=True,
    )
    if sum(more.values()) > EXPLAINED_SHARE * result.excess_ns:
        result = _classified(job, result, like.tolist())
    if result.slow_device:  # the slowest at each of so many kernels: further evidence
        ranks = len(job.summaries)
        chance = min(1.0, 2 * min(who.p_value, ranks * (1 / ranks) ** result.kernels))
        result = replace(result, members=who._replace(p_value=chance))
    return [result] if result.members.p_value < MAX_LATE_CHANCE else []


def late_chance(job: JobMeasurements, place: int) -> float:
    """Bound the probability that any of similar ranks arrives last as often as this one. Or that it
    keeps the others waiting as long in step after step, if that is smaller."""
    waits = job.waits
    sizes = job.joined.rank_count[waits.row]
    similar = len(waits.collective_count[waits.collective_count > 0])
    taken, last = int(waits.collective_count[place]), int(waits.last_count[place])
    chance = min(
        binomial_tail(last, taken, 1 / float(np.median(sizes))), _chance_of_delay(job, place)
    )
    return min(1.0, similar * chance)


def _chance_of_delay(job: JobMeasurements, place: int) -> float:
    """Test (Student's t) the waits that a rank causes by step, less those that others cause it: of
    similar ranks that is as often below zero as above."""
    waits, joined = job.waits, job.joined
    step = joined.step[joined.first_cell[waits.row]]
    sign = np.where(waits.last_rank == place, 1.0, np.where(waits.last_rank >= 0, -1.0, 0.0))
    delay = np.bincount(step[step >= 0], (waits.mean_wait * sign)[step >= 0])
    delay = delay[np.unique(step[step >= 0])]
    if len(delay) < MIN_STEPS:
        return 1.0
    error = float(delay.std(ddof=1)) / len(delay) ** 0.5
    if error <= 0:
        return 1.0 if delay.mean() <= 0 else 0.0
    return upper_tail(float(delay.mean()) / error, len(delay) - 1)


# -- what would change it ---------------------------------------------------------------------


def edits_of(job: JobMeasurements, deviation: Deviation) -> list[Edit]:
    """List the edits that undo a deviation, one for each of its ranks (the first MAX_EDITS)."""
    result = []
    for place in deviation.members.rank_indices[:MAX_EDITS]:
        rank, summary = job.topology.ranks[place], job.summaries[place]
        if deviation.slow_device and deviation.device_slowdown:
            work = Select(on="gpu", kind=("kernel",), family=_COMPUTE)
            result.append(
                Edit(op="scale", factor=1 / deviation.device_slowdown, rank=rank, select=work)
            )
        elif deviation.kind == "network" and summary.communication > deviation.excess_ns:
            left = 1 - deviation.excess_ns / summary.communication
            result.append(Edit(op="scale", factor=left, rank=rank, select=_TALK))
        else:
            result.append(Edit(op="remove_skew", rank=rank, select=_TALK))
    return result


_PARTS = {"compute": "compute", "input": "waiting for input", "host": "host time"}


def describe_subject(job: JobMeasurements, deviation: Deviation) -> str:
    """Name what deviates: ``rank 7``, ``host node-03 (ranks 24-31)``, or each step's rank."""
    ranks = format_ranks([job.topology.ranks[place] for place in deviation.members.rank_indices])
    if deviation.rank_varies:
        return "a different rank in each step"
    if deviation.members.unit == "rank":
        return f"{'rank' if len(deviation.members.rank_indices) == 1 else 'ranks'} {ranks}"
    return f"{deviation.members.unit} {deviation.members.name} (ranks {ranks})"


def describe_reason(job: JobMeasurements, deviation: Deviation) -> str:
    """Describe the measurement, without its subject: ``5.1 ms more own work per step than …``."""
    more, excess = deviation.excess_by_class, format_duration(deviation.excess_ns)
    share = format_share(deviation.excess_ns / job.step_ns) if job.step_ns else ""
    if deviation.kind == "network":
        return (
            f"once all ranks have arrived, its collectives take {excess} ({share}) longer per step "
            "than the same ones of other groups"
        )
    amounts = {
        "compute": more.get("compute", 0.0),
        "input": more.get("input", 0.0),
        "host": more.get("host", 0.0) + more.get("copies", 0.0),
    }
    if deviation.arrives_late:
        place = deviation.members.rank_indices[0]
        taken, last = int(job.waits.collective_count[place]), int(job.waits.last_count[place])
        own = sum(more.values())
        text = (
            f"it arrives last at {last} of {taken} collectives, and the others wait {excess} "
            f"({share}) per step for it with nothing to compute"
        )
        if own > 0.02 * job.step_ns:
            text += f"; it has {format_duration(own)} more own work per step than the others"
        else:
            text += "; it has no more own work than the others in these steps: it starts late"
    else:
        of = f" (the others: {format_duration(deviation.others_ns)})" if deviation.others_ns else ""
        text = f"{excess} more own work per step than the others{of}, {share} of the step"
    least = 0.1 * deviation.excess_ns
    each = [
        f"{format_duration(ns)} more {_PARTS[name]}" for name, ns in amounts.items() if ns > least
    ]
    if each:
        text += f": {' and '.join(each)}"
    if deviation.device_slowdown is not None:
        text += f"; the same kernels take {deviation.device_slowdown:.2f} times as long"
    if deviation.families:
        named = " and ".join(f"{name} ({format_duration(ns)})" for name, ns in deviation.families)
        text += f"; more time in {named}"
    return f"{text}; {deviation.note}" if deviation.note else text


def describe_change(job: JobMeasurements, deviation: Deviation) -> str:
    """Describe the change that the replay makes to estimate the gain."""
    who = describe_subject(job, deviation)
    if deviation.kind == "network":
        return f"collectives of {who} as fast as the others'"
    if deviation.kind == "pipeline":
        return "the pipeline's stages with equal work"
    if deviation.rank_varies:
        return "no rank that holds a step up"
    if deviation.kind == "imbalance":
        return "the work spread evenly over the ranks"
    if deviation.arrives_late:
        return f"{who} arriving with the others"
    return f"{who} as fast as the {'other' if len(job.stage) == 2 else 'median'}"
