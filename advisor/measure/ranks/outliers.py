"""Outliers among ranks, by their own work (no rank is blamed for waiting), and texts that describe
them."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np
from msgspec import structs

from advisor.core import labels
from advisor.core.finding import Edit, Select
from advisor.core.intervals import Floats, Ints
from advisor.core.ranks import format_ranks
from advisor.core.text import format_duration, format_share
from advisor.measure.device.families import FAMILIES
from advisor.measure.ranks.join import CollectiveWaits, JoinedCollectives
from advisor.measure.ranks.rank_work import (
    MIN_KERNELS,
    WORK,
    RankProfile,
    compare_devices,
    find_extra_function,
    find_extra_work,
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
"""Maximum chance of a false alarm in each of five searches: one healthy job in a hundred."""
MIN_EXCESS_SHARE = 0.02
"""Minimum excess of an outlier over similar ranks, as a share of the step."""
MIN_MOVING_SHARE = 0.03
"""Minimum mean excess of each step's last rank over the others, as a share of the step."""
MIN_BROAD_SHARE = 0.08
"""Minimum cost of an outlier if all ranks differ, as a share of the step: nothing else
distinguishes it."""
MIN_STAGE_SHARE = 0.05
"""Minimum excess of the longest stage over the mean of the stages, as a share of the step."""
_MAX_EDITS = 64
_COMMUNICATION = Select(on="gpu", family=("communication",))
_COMPUTE_FAMILIES = tuple(family for family in FAMILIES if family != "communication")
MIN_EXPLAINED_SHARE = 0.5
"""Minimum own work of a late rank that explains its delay, as a share of the others' wait."""
_MIN_STEPS = 4
"""Minimum number of steps that distinguish a moving outlier from a persistent one."""
MAX_LAST_SHARE = 0.5
"""Maximum share of the steps in which one rank is last for a moving outlier."""


@dataclass
class Deviation:
    """A measured outlier. Its members' ``rank_indices`` are indices in the list of summaries."""

    kind: str
    members: Members
    excess_ns: float
    """Own time (for ``network``, transfer time) above that of the others, ns per step."""
    rank_varies: bool = False
    excess_by_class: dict[str, float] = field(default_factory=dict)
    """Excess over the others by class, ns per step."""
    device_slowdown: float | None = None
    """Factor by which the same kernels take longer there; ``None`` if unknown or not the cause."""
    kernels: int = 0
    """Number of kernels used to measure ``device_slowdown``."""
    families: list[tuple[str, float]] = field(default_factory=list)
    others_ns: float = 0.0
    """Own time of the others, ns per step."""
    note: str = ""
    frame: str = ""
    """Frame of the code that these ranks alone run, or empty if unknown."""
    arrives_late: bool = False
    """Whether it was found by late arrivals, not by own work."""

    @property
    def slow_device(self) -> bool:
        """Whether enough kernels show a slower device; otherwise the cause is unknown."""
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
    """Run all searches. A deviation that one search explains is not reported by another."""
    result = find_persistent(job)
    blamed_ranks = {index for deviation in result for index in deviation.members.rank_indices}
    result += find_long_stages(job)
    result += find_moving(job, blamed_ranks)
    if not result:
        result += find_late(job)
    return result


# -- the same ranks in every step -------------------------------------------------------------


def find_persistent(job: JobMeasurements) -> list[Deviation]:
    """Find ranks, hosts and racks with more own work than others in the same stage."""
    profile, step = job.profile, job.step_ns
    if step <= 0:
        return []
    floor = MIN_EXCESS_SHARE * step
    # the median over the steps, since an excess in a single step is not persistent
    total_excess = _median_excess(profile.work_ns_by_step, job.stage)
    excess_by_search = {"own": total_excess}
    for name in ("compute", "input"):
        excess_by_search[name] = _median_excess(profile.by_step[name], job.stage)
    excess_by_search["host"] = _median_excess(
        profile.by_step["host"] + profile.by_step["copies"], job.stage
    )
    deviations: list[Deviation] = []
    for name, excess in excess_by_search.items():
        limit, hides_excess = MAX_CHANCE / len(excess_by_search), name in ("host", "input")
        for members in find_members(excess, floor, limit, job.topology, spreads=hides_excess):
            # others wait for all of a rank's work, not for one class
            if float(np.nanmax(total_excess[list(members.rank_indices)])) > floor:
                _add_deviation(deviations, _measure_deviation(job, members, total_excess))
    imbalances = [deviation for deviation in deviations if deviation.kind == "imbalance"]
    if len(imbalances) < 2:
        return deviations
    return [
        *(deviation for deviation in deviations if deviation.kind != "imbalance"),
        merge_outliers(job, imbalances),
    ]


def _median_excess(by_step: Floats, stage: Ints) -> Floats:
    """Return each rank's excess over the ranks of its stage, as the median over the steps."""
    residuals = np.stack([group_residuals(column, stage) for column in by_step.T], axis=1)
    return medians_over(residuals, axis=1)


def _add_deviation(result: list[Deviation], new: Deviation) -> None:
    """Add a deviation. A larger unit with the same excess replaces its parts."""
    new_ranks = set(new.members.rank_indices)
    for deviation in list(result):
        known_ranks = set(deviation.members.rank_indices)
        if new_ranks <= known_ranks:
            return
        if known_ranks < new_ranks:
            result.remove(deviation)
    result.append(new)


def _measure_deviation(job: JobMeasurements, members: Members, total_excess: Floats) -> Deviation:
    index = list(members.rank_indices)
    member_set = set(index)
    similar = [
        other
        for other in range(len(job.summaries))
        if other not in member_set and job.stage[other] in set(job.stage[index].tolist())
    ] or [other for other in range(len(job.summaries)) if other not in member_set]
    mean = means_over(job.profile.values[index], axis=0)
    return _classify(
        job,
        Deviation(
            kind="host",
            members=members,
            excess_ns=float(np.nanmean(total_excess[index])),
            excess_by_class=_excess_by_class(job, mean, similar),
            others_ns=float(medians_over(job.profile.work_ns[similar][None, :], axis=1)[0]),
        ),
        similar,
    )


def _excess_by_class(
    job: JobMeasurements, values: Floats, similar: Sequence[int] | Ints
) -> dict[str, float]:
    """Return the excess of ``values`` over the median of ``similar`` ranks, by class, ns per
    step."""
    excess = values - medians_over(job.profile.values[similar], axis=0)
    return dict(zip(WORK, excess.tolist(), strict=False))


def _largest_class(excess: dict[str, float]) -> str:
    """Return the class with the largest excess: ``input``, ``host`` or ``compute``."""
    host = excess["host"] + excess["copies"]
    largest = max(excess["compute"], excess["input"], host)
    return "input" if largest == excess["input"] else "host" if largest == host else "compute"


def _classify(job: JobMeasurements, deviation: Deviation, similar: list[int]) -> Deviation:
    """Classify a deviation by its largest excess over the ranks ``similar`` to it."""
    if (kind := _largest_class(deviation.excess_by_class)) != "compute":
        return replace(deviation, kind=kind)
    slow = [_scale_to_complete_steps(job, index) for index in deviation.members.rank_indices]
    others = [_scale_to_complete_steps(job, index) for index in similar]
    speed = compare_devices(slow, others)
    if speed is None:
        if names := find_extra_work(slow, others):
            note = f"it alone runs {', '.join(map(labels.clean, names))} of these shapes"
            frame = find_extra_function(slow, others)
            return replace(deviation, kind="extra work", note=note, frame=frame)
        more_work = have_other_inputs(slow, others)
        return replace(deviation, kind="imbalance" if more_work else "compute")
    if speed.slower:
        return replace(
            deviation, kind="compute", device_slowdown=speed.ratio, kernels=len(speed.kernels)
        )
    return replace(deviation, kind="imbalance", families=longer_families(slow, others))


def _scale_to_complete_steps(job: JobMeasurements, index: int) -> RankSummary:
    """Scale a rank's times, if its file is cut off, to the compute of the steps before the cut."""
    summary = job.summaries[index]
    compute, usual_compute = (summary.time.get("compute", 0.0), float(job.profile.values[index, 0]))
    if not summary.damage or compute <= 0 or not np.isfinite(usual_compute):
        return summary
    return structs.replace(
        summary,
        time={name: ns * usual_compute / compute for name, ns in summary.time.items()},
        families={name: ns * usual_compute / compute for name, ns in summary.families.items()},
    )


def merge_outliers(job: JobMeasurements, result: Sequence[Deviation]) -> Deviation:
    """Merge several outliers of the same kind, with the figures of the largest."""
    indices = tuple(
        sorted({index for deviation in result for index in deviation.members.rank_indices})
    )
    name = format_ranks([job.topology.ranks[index] for index in indices])
    members = Members("rank", name, indices, min(deviation.members.p_value for deviation in result))
    return replace(max(result, key=lambda deviation: deviation.excess_ns), members=members)


# -- parts of a pipeline ----------------------------------------------------------------------


def find_long_stages(job: JobMeasurements) -> list[Deviation]:
    """Find the longest stage of a pipeline, if the others wait for it."""
    names = np.unique(job.stage)
    if len(names) < 2 or job.step_ns <= 0:
        return []
    own = job.profile.work_ns
    medians = np.array([np.nanmedian(own[job.stage == name]) for name in names])
    if not np.isfinite(medians).all():
        return []
    top = int(np.argmax(medians))
    other_medians = np.delete(medians, top)
    excess = float(medians[top] - other_medians.mean())
    if (
        excess < MIN_STAGE_SHARE * job.step_ns
        or medians[top] - other_medians.max() < MIN_EXCESS_SHARE * job.step_ns
    ):
        return []
    index = np.flatnonzero(job.stage == names[top])
    other_ranks = np.flatnonzero(job.stage != names[top])
    # compare with the scatter of the ranks inside the stages
    residuals = np.concatenate(
        [
            own[job.stage == stage] - median_ns
            for stage, median_ns in zip(names, medians, strict=True)
        ]
    )
    p_value = float(p_values(np.append(residuals, medians[top] - np.median(other_medians)))[-1])
    median = medians_over(job.profile.values[index], axis=0)
    slow = [job.summaries[number] for number in index.tolist()]
    others = [job.summaries[number] for number in other_ranks.tolist()]
    return [
        Deviation(
            kind="pipeline",
            members=Members("stage", str(top), tuple(index.tolist()), p_value),
            excess_ns=excess,
            excess_by_class=_excess_by_class(job, median, other_ranks),
            families=longer_families(slow, others),
            others_ns=float(other_medians.mean()),
            note=f"{len(names)} stages",
        )
    ]


# -- another rank from step to step -----------------------------------------------------------


def find_moving(job: JobMeasurements, blamed_ranks: set[int]) -> list[Deviation]:
    """Find steps that are each delayed by one rank, but by different ranks."""
    work_ns = job.profile.work_ns_by_step
    if work_ns.shape[1] < _MIN_STEPS or job.step_ns <= 0:
        return []
    work_ns = work_ns.copy()
    work_ns[sorted(blamed_ranks)] = np.nan
    # an excess that a rank has in every step does not move
    usual = medians_over(work_ns, axis=1)[:, None]
    above = np.stack([group_residuals(column, job.stage) for column in (work_ns - usual).T], axis=1)
    steps = np.flatnonzero(np.isfinite(above).sum(axis=0) >= 4)
    if len(steps) < _MIN_STEPS:
        return []
    above = above[:, steps]
    last_ranks = np.nanargmax(np.where(np.isfinite(above), above, -np.inf), axis=0)
    last_excess = above[last_ranks, np.arange(len(steps))]
    counts = np.bincount(last_ranks, minlength=len(job.summaries))
    excess = float(last_excess.mean())
    smallest_p_values = np.array([float(p_values(column).min()) for column in above.T])
    hits = int((smallest_p_values < 0.05).sum())
    p_value = binomial_tail(hits, len(steps), 0.05)
    is_extreme = (
        p_value < MAX_CHANCE and hits * 2 >= len(steps) and excess > MIN_MOVING_SHARE * job.step_ns
    )
    # in most of the steps, not only in a long one
    if not is_extreme and float(np.median(last_excess)) < MIN_BROAD_SHARE * job.step_ns:
        return []
    if counts.max() > max(1.0, MAX_LAST_SHARE * len(steps)):
        return []
    excess_by_class = {}
    for name in WORK:
        times = job.profile.by_step[name][:, steps]
        times = times - medians_over(times, axis=0)
        excess_by_class[name] = float(np.nanmean(times[last_ranks, np.arange(len(steps))]))
    kind = _largest_class(excess_by_class).replace("compute", "imbalance")
    ranks = np.flatnonzero(counts)
    members = Members(
        "rank", "another in each step", tuple(ranks.tolist()), p_value if is_extreme else 1.0
    )
    return [
        Deviation(
            kind=kind,
            members=members,
            excess_ns=excess,
            rank_varies=True,
            excess_by_class=excess_by_class,
            others_ns=float(np.nanmedian(work_ns)),
            note=f"{len(ranks)} ranks are the last of {len(steps)} steps",
        )
    ]


# -- late without a cause in own work ----------------------------------------------------


def find_late(job: JobMeasurements) -> list[Deviation]:
    """Find the rank that arrives last at most collectives, if own work in these steps does not
    explain it. Used for few ranks, where outliers cannot be found statistically. In a window of a
    step or two, the delay may have begun before it."""
    waits, step = job.waits, job.step_ns
    steps = max(1, len(job.profile.steps))
    if not len(waits.row) or step <= 0:
        return []
    index = int(np.argmax(waits.caused_exposed_ns))
    call_count, last_count = (int(waits.collective_count[index]), int(waits.last_count[index]))
    if call_count < MIN_COLLECTIVES or last_count < MIN_LATE * call_count:
        return []
    if waits.caused_exposed_ns[index] / steps < LATE_SHARE * step:
        return []
    other_ranks = np.flatnonzero(np.arange(len(job.summaries)) != index)
    excess_by_class = _excess_by_class(job, job.profile.values[index], other_ranks)
    if steps > 2 and sum(excess_by_class.values()) <= 0:
        return []
    members = Members("rank", str(job.topology.ranks[index]), (index,), late_chance(job, index))
    result = Deviation(
        kind="host",
        members=members,
        excess_ns=float(waits.caused_exposed_ns[index]) / steps,
        excess_by_class=excess_by_class,
        others_ns=float(np.nanmedian(job.profile.work_ns[other_ranks])),
        arrives_late=True,
    )
    if sum(excess_by_class.values()) > MIN_EXPLAINED_SHARE * result.excess_ns:
        result = _classify(job, result, other_ranks.tolist())
    if result.slow_device:  # the slowest rank in each of many kernels: further evidence
        ranks = len(job.summaries)
        chance = min(1.0, 2 * min(members.p_value, ranks * (1 / ranks) ** result.kernels))
        result = replace(result, members=members._replace(p_value=chance))
    return [result] if result.members.p_value < MAX_LATE_CHANCE else []


def late_chance(job: JobMeasurements, place: int) -> float:
    """Return an upper bound of the probability that any of similar ranks arrives last as often as
    this one, or delays the others as much in each step, whichever is smaller."""
    waits = job.waits
    sizes = job.joined.rank_count[waits.row]
    similar = len(waits.collective_count[waits.collective_count > 0])
    calls, last = int(waits.collective_count[place]), int(waits.last_count[place])
    chance = min(
        binomial_tail(last, calls, 1 / float(np.median(sizes))), _chance_of_delay(job, place)
    )
    return min(1.0, similar * chance)


def _chance_of_delay(job: JobMeasurements, place: int) -> float:
    """Test (Student's t) the waits that a rank causes per step minus the waits that others cause:
    for similar ranks, the difference is below zero as often as above."""
    waits, joined = job.waits, job.joined
    step = joined.step[joined.first_cell[waits.row]]
    sign = np.where(waits.last_rank == place, 1.0, np.where(waits.last_rank >= 0, -1.0, 0.0))
    delay = np.bincount(step[step >= 0], (waits.mean_wait * sign)[step >= 0])
    delay = delay[np.unique(step[step >= 0])]
    if len(delay) < _MIN_STEPS:
        return 1.0
    error = float(delay.std(ddof=1)) / len(delay) ** 0.5
    if error <= 0:
        return 1.0 if delay.mean() <= 0 else 0.0
    return upper_tail(float(delay.mean()) / error, len(delay) - 1)


# -- edits and texts ---------------------------------------------------------------------


def edits_of(job: JobMeasurements, deviation: Deviation) -> list[Edit]:
    """List the edits that undo a deviation, one per rank (at most _MAX_EDITS)."""
    result = []
    for index in deviation.members.rank_indices[:_MAX_EDITS]:
        rank, summary = job.topology.ranks[index], job.summaries[index]
        if deviation.slow_device and deviation.device_slowdown:
            kernels = Select(on="gpu", kind=("kernel",), family=_COMPUTE_FAMILIES)
            result.append(
                Edit(op="scale", factor=1 / deviation.device_slowdown, rank=rank, select=kernels)
            )
        elif deviation.kind == "network" and summary.communication > deviation.excess_ns:
            factor = 1 - deviation.excess_ns / summary.communication
            result.append(Edit(op="scale", factor=factor, rank=rank, select=_COMMUNICATION))
        else:
            result.append(Edit(op="remove_skew", rank=rank, select=_COMMUNICATION))
    return result


_CLASS_NAMES = {"compute": "compute", "input": "waiting for input", "host": "host time"}


def describe_subject(job: JobMeasurements, deviation: Deviation) -> str:
    """Name the outlier: ``rank 7``, ``host node-03 (ranks 24-31)``, or each step's rank."""
    ranks = format_ranks([job.topology.ranks[index] for index in deviation.members.rank_indices])
    if deviation.rank_varies:
        return "a different rank in each step"
    if deviation.members.unit == "rank":
        return f"{'rank' if len(deviation.members.rank_indices) == 1 else 'ranks'} {ranks}"
    return f"{deviation.members.unit} {deviation.members.name} (ranks {ranks})"


def describe_reason(job: JobMeasurements, deviation: Deviation) -> str:
    """Describe the measurement without its subject: ``5.1 ms more own work per step than …``."""
    excesses, excess = deviation.excess_by_class, format_duration(deviation.excess_ns)
    share = format_share(deviation.excess_ns / job.step_ns) if job.step_ns else ""
    if deviation.kind == "network":
        return (
            f"once all ranks have arrived, its collectives take {excess} ({share}) longer per step "
            "than the same ones of other groups"
        )
    amounts = {
        "compute": excesses.get("compute", 0.0),
        "input": excesses.get("input", 0.0),
        "host": excesses.get("host", 0.0) + excesses.get("copies", 0.0),
    }
    if deviation.arrives_late:
        index = deviation.members.rank_indices[0]
        calls, last = (int(job.waits.collective_count[index]), int(job.waits.last_count[index]))
        work_ns = sum(excesses.values())
        text = (
            f"the others wait {excess} per step for it ({share} of the ranks' mean step), as it "
            f"arrives last at {last} of {calls} collectives"
        )
        if work_ns > 0.02 * job.step_ns:
            text += f". It has {format_duration(work_ns)} more own work per step than the others"
        else:
            text += ". It has no more own work than the others in these steps: it starts late"
    else:
        others_text = (
            f" (the others: {format_duration(deviation.others_ns)})" if deviation.others_ns else ""
        )
        text = f"{excess} more own work per step than the others{others_text}"
        text += f", {share} of the ranks' mean step"
    min_ns = 0.1 * deviation.excess_ns
    parts = [
        f"{format_duration(ns)} more {_CLASS_NAMES[name]}"
        for name, ns in amounts.items()
        if ns > min_ns
    ]
    if parts:
        text += f": {' and '.join(parts)}"
    if deviation.device_slowdown is not None:
        text += f"; the same kernels take {deviation.device_slowdown:.2f} times as long"
    if deviation.families:
        families_text = " and ".join(
            f"{name} ({format_duration(ns)})" for name, ns in deviation.families
        )
        text += f"; more time in {families_text}"
    return f"{text}; {deviation.note}" if deviation.note else text


def describe_deviation(job: JobMeasurements, deviation: Deviation) -> str:
    """Describe the change that the replay makes to estimate the gain."""
    subject = describe_subject(job, deviation)
    if deviation.kind == "network":
        return f"collectives of {subject} as fast as the others'"
    if deviation.kind == "pipeline":
        return "the pipeline's stages with equal work"
    if deviation.rank_varies:
        return "no rank that delays a step"
    if deviation.kind == "imbalance":
        return "the work spread evenly over the ranks"
    if deviation.arrives_late:
        return f"{subject} arriving with the others"
    return f"{subject} as fast as the {'other' if len(job.stage) == 2 else 'median'}"
