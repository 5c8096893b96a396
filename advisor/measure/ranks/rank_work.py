"""Work of each rank by class, over the job and per step; whether more compute comes from a
slower device or more work.

Work is the time of a step without exposed communication: ranks share the step, but not their
work."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from advisor.core.intervals import Floats
from advisor.measure.device.families import MATRIX
from advisor.measure.host.stacks import parse_frame
from advisor.measure.ranks.summary_schema import RankSummary, unpack

CLASSES = ("compute", "copies", "input", "host", "communication")
"""Exclusive classes of a step's time; the last one is not the rank's own work."""
WORK = CLASSES[:-1]
MIN_CUT_STEP_SHARE = 0.9
"""Minimum share of earlier steps' compute for the last step of a damaged file to count."""
_INPUT_CLASSES = ("idle: loader", "loader")
_COPY_CLASSES = ("copies", "memset")


@dataclass(frozen=True)
class RankProfile:
    """Work of all ranks, one row per rank (index in the list of summaries)."""

    values: Floats
    """Mean time by class (columns: CLASSES), ns per step; NaN if not measured or file is
    damaged."""
    steps: list[str]
    """Names of the steps that most ranks have."""
    by_step: dict[str, Floats]
    """Class of WORK -> rank x ``steps``, ns, or NaN if the rank does not have the step."""
    step_ns: Floats
    """Mean step of each rank, ns."""

    @property
    def work_ns(self) -> Floats:
        """Work of each rank, ns per step."""
        return np.asarray(self.values[:, : len(WORK)].sum(axis=1))

    @property
    def work_ns_by_step(self) -> Floats:
        """Work of each rank in each step, ns."""
        total: Floats = np.sum([self.by_step[name] for name in WORK], axis=0)
        return total


def profile_ranks(summaries: Sequence[RankSummary]) -> RankProfile:
    """Measure the work of all ranks, from their summaries."""
    values = np.full((len(summaries), len(CLASSES)), np.nan)
    counts: Counter[str] = Counter()
    for summary in summaries:
        counts.update({step.name for step in summary.steps})
    max_count = max(counts.values(), default=0)
    steps = _sort_steps(summaries, {name for name, n in counts.items() if 2 * n >= max_count})
    column_of_step = {name: column for column, name in enumerate(steps)}
    by_step = {name: np.full((len(summaries), len(steps)), np.nan) for name in WORK}
    for index, summary in enumerate(summaries):
        columns = class_times(summary)
        if columns is None:
            continue
        if summary.damage:
            columns = _keep_complete_steps(columns)
        for column, name in enumerate(CLASSES):
            finite = columns[name][np.isfinite(columns[name])]
            values[index, column] = float(finite.mean()) if len(finite) else np.nan
        columns_of_steps = [column_of_step.get(step.name, -1) for step in summary.steps]
        rows = [row for row, column in enumerate(columns_of_steps) if column >= 0]
        for name in WORK:
            by_step[name][index, [columns_of_steps[row] for row in rows]] = columns[name][rows]
    step_ns = np.array([s.step_ns for s in summaries], dtype=np.float64)
    return RankProfile(values, steps, by_step, step_ns)


def _sort_steps(summaries: Sequence[RankSummary], wanted: set[str]) -> list[str]:
    """Sort step names in order of time, as on the rank with the most of them."""
    longest = max(
        summaries, key=lambda summary: len({t.name for t in summary.steps} & wanted), default=None
    )
    if longest is None:
        return []
    ordered = dict.fromkeys(step.name for step in longest.steps if step.name in wanted)
    return [*ordered, *sorted(wanted - ordered.keys())]


def _keep_complete_steps(columns: dict[str, Floats]) -> dict[str, Floats]:
    """Keep the steps before the cut in a file that is cut off. The other steps are NaN, because
    missing work would look like idle time."""
    compute = columns["compute"]
    busy = np.flatnonzero(compute > 0)
    is_complete = np.zeros(len(compute), dtype=np.bool_)
    if len(busy):
        last = int(busy[-1])
        is_complete[:last] = True
        # the last step with work counts if it has as much as the earlier ones
        is_complete[last] = last > 0 and compute[last] >= MIN_CUT_STEP_SHARE * float(
            np.median(compute[:last])
        )
    return {name: np.where(is_complete, values, np.nan) for name, values in columns.items()}


def class_times(summary: RankSummary) -> dict[str, Floats] | None:
    """Return the time of each step by class (CLASSES), ns; ``None`` if the summary has no times."""
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
    zeros = np.zeros(len(length))
    communication_ns = np.minimum(by_class.get("communication", zeros), length)
    input_ns = sum((by_class[name] for name in _INPUT_CLASSES if name in by_class), zeros)
    copies = sum((by_class[name] for name in _COPY_CLASSES if name in by_class), zeros)
    if summary.time:
        compute = by_class.get("compute", zeros)
    else:  # operators on the host, which include waits in collectives
        compute = np.maximum(by_class.get("dispatch", zeros) - communication_ns, 0.0)
    host_ns = np.maximum(length - communication_ns - input_ns - copies - compute, 0.0)
    return {
        "compute": compute,
        "copies": copies,
        "input": input_ns,
        "host": host_ns,
        "communication": communication_ns,
    }


# -- more compute on some ranks: is the device slower, or is there more work? ----------------------

MIN_INSTANCES = 20
"""Minimum number of instances of a kernel on a rank for comparing its median."""
MIN_KERNELS = 5
"""Minimum number of kernels that distinguish a slower device from other inputs."""
MIN_SLOWER_SHARE = 0.7
"""Minimum share of slower compute time for a slower device: more work affects only some kernels."""
_MIN_FAMILY_SHARE = 0.05
"""Minimum share of a family of kernels in compute."""
MIN_COMPARED_SHARE = 0.3
"""Minimum share of compute time in kernels that both sides ran, for comparing kernels."""


class DeviceSpeed(NamedTuple):
    """Speed of some ranks' devices, from the kernels that other ranks run too."""

    slower: bool
    """Whether the device is slower; otherwise there is more work."""
    ratio: float
    """Factor by which at least half of the compared time is longer."""
    kernels: list[str]
    """Names of the kernels with enough instances, the longest first."""


def compare_devices(
    slow: Sequence[RankSummary], others: Sequence[RankSummary]
) -> DeviceSpeed | None:
    """Return whether ranks with more compute have a slower device or more work, or ``None`` if
    unknown.

    A slower device is slower at all matrix work. If one kind (attention) takes as long as on the
    others while another kind (matrix products) takes longer, there is more of the latter. With only
    one kind of matrix work this test is impossible, and nearly all compute must be longer. "Longer"
    means by at least half of the excess of all compute. Kernels are compared by name and launch
    size, or by family if these are not recorded."""
    compute = _mean([s.time.get("compute", 0.0) for s in slow])
    usual_compute = _median([s.time.get("compute", 0.0) for s in others])
    if usual_compute <= 0 or compute <= usual_compute:
        return None
    min_ratio = 1 + 0.5 * (compute / usual_compute - 1)
    families = _compare_families(slow, others)
    kernels = _compare_kernels(slow, others)
    names = [name for name, _, _, count in kernels if count >= MIN_INSTANCES]
    compared = [(weight, ratio) for _, weight, ratio, _ in kernels]
    if sum(weight for weight, _ in compared) < MIN_COMPARED_SHARE * usual_compute:
        compared, names = [(weight, ratio) for _, weight, ratio in families], []
    total = sum(weight for weight, _ in compared)
    if total <= 0:
        return None
    weights, ratios = np.array(compared).T
    order = np.argsort(ratios)
    median_ratio = float(ratios[order][int(np.searchsorted(np.cumsum(weights[order]), total / 2))])
    min_weight = _MIN_FAMILY_SHARE * usual_compute
    matrix = [ratio for name, weight, ratio in families if name in MATRIX and weight > min_weight]
    if len(matrix) > 1:
        return DeviceSpeed(min(matrix) >= min_ratio, median_ratio, names)
    slower = float(weights[ratios >= min_ratio].sum())
    return DeviceSpeed(slower >= MIN_SLOWER_SHARE * total, median_ratio, names)


MIN_OTHER_SHARE = 0.5
"""Minimum share of the excess in operators that the others do not run, if the batches differ."""


MAX_OTHERS_WORK_SHARE = 0.1
"""Maximum time of operators that only the other ranks run, as a share of the excess, at which the
ranks with more work do work of their own, and not the same with other inputs."""
MAX_NAMED_OPERATORS = 3


def find_extra_work(slow: Sequence[RankSummary], others: Sequence[RankSummary]) -> list[str]:
    """Return the operators of work that ranks without a device do and the others do not, such as
    evaluation on one rank: names, the longest first. Empty if it does not explain their excess, or
    if the others have work of their own, so that the inputs differ."""
    extra = _times_without(slow, others)
    work_ns = sum(_times_without(others, slow).values())
    excess = _total_time(slow) - _total_time(others)
    is_explained = sum(extra.values()) >= MIN_OTHER_SHARE * excess
    if excess <= 0 or not is_explained or work_ns > MAX_OTHERS_WORK_SHARE * excess:
        return []
    by_name: dict[str, float] = {}
    for key, ns in extra.items():
        name = key.partition("#")[0]
        by_name[name] = by_name.get(name, 0.0) + ns
    return sorted(by_name, key=lambda name: -by_name[name])[:MAX_NAMED_OPERATORS]


MIN_EXTRA_SHARE = 0.1
"""Minimum share of the samples of a function that only some ranks run, for it to be named."""


def find_extra_function(slow: Sequence[RankSummary], others: Sequence[RankSummary]) -> str:
    """Return the frame of the user's function with most samples on these ranks and none on the
    others. Empty if there is none, or no stacks were sampled on both sides."""
    if not all(any(s.functions for s in group) for group in (slow, others)):
        return ""
    known = {_function_of_frame(name) for s in others for name in s.functions}
    extra = {
        name: share
        for summary in slow
        for name, share in summary.functions.items()
        if _function_of_frame(name) not in known and share >= MIN_EXTRA_SHARE
    }
    return max(extra, key=lambda name: extra[name], default="")


def _function_of_frame(name: str) -> tuple[str, str]:
    frame = parse_frame(name)
    return (name, "") if frame is None else (frame.file, frame.function)


def have_other_inputs(slow: Sequence[RankSummary], others: Sequence[RankSummary]) -> bool:
    """Return whether ranks without a device have more work because their operators get other
    shapes."""
    if not any(s.operators for s in slow) or not any(s.operators for s in others):
        return False
    extra, own = _times_without(slow, others), _times_without(others, slow)
    excess = _total_time(slow) - _total_time(others)
    return excess > 0 and sum(extra.values()) - sum(own.values()) >= MIN_OTHER_SHARE * excess


def _times_without(group: Sequence[RankSummary], others: Sequence[RankSummary]) -> dict[str, float]:
    """Return the mean time of each operator that no rank of ``others`` runs, ns per step."""
    known = set[str]().union(*(s.operators for s in others))
    names = set[str]().union(*(s.operators for s in group)) - known
    return {
        name: _mean([s.operators[name].total_ns if name in s.operators else 0.0 for s in group])
        for name in names
    }


def _total_time(group: Sequence[RankSummary]) -> float:
    return _mean([sum(op.total_ns for op in s.operators.values()) for s in group])


def _compare_kernels(
    slow: Sequence[RankSummary], others: Sequence[RankSummary]
) -> list[tuple[str, float, float, int]]:
    """Return (name, usual ns per step, slowdown factor, instances), longest first."""
    result = []
    names = set.union(*(set(s.kernels) for s in slow)) if slow else set()
    for name in sorted(names):
        slow_kernels = [s.kernels[name] for s in slow if name in s.kernels]
        other_kernels = [s.kernels[name] for s in others if name in s.kernels]
        if 2 * len(other_kernels) < len(others) or 2 * len(slow_kernels) < len(slow):
            continue
        usual = _median([kernel.median_ns for kernel in other_kernels])
        if usual > 0:
            weight = _median([kernel.total_ns for kernel in other_kernels])
            ratio = _median([kernel.median_ns for kernel in slow_kernels]) / usual
            instances = min(kernel.count for kernel in (*slow_kernels, *other_kernels))
            result.append((name, weight, ratio, instances))
    return sorted(result, key=lambda item: (-item[1], item[0]))


def _compare_families(
    slow: Sequence[RankSummary], others: Sequence[RankSummary]
) -> list[tuple[str, float, float]]:
    """Return (name, usual ns per step, slowdown factor on the slow ranks)."""
    result = []
    for name in sorted(set[str]().union(*(s.families for s in others))):
        if name in ("communication", "copy", "memset"):
            continue
        usual_ns = _median([s.families.get(name, 0.0) for s in others])
        if usual_ns > 0:
            slow_ns = _median([s.families.get(name, 0.0) for s in slow])
            result.append((name, usual_ns, slow_ns / usual_ns))
    return result


def longer_families(
    slow: Sequence[RankSummary], others: Sequence[RankSummary]
) -> list[tuple[str, float]]:
    """List families of kernels by how much longer they take on the ``slow`` ranks, ns per step,
    largest first, only families with a fifth of the difference."""
    excess = {}
    for name in sorted(set.union(set(), *(set(s.families) for s in slow))):
        if name != "communication":
            usual_ns = _median([s.families.get(name, 0.0) for s in others])
            excess[name] = _median([s.families.get(name, 0.0) for s in slow]) - usual_ns
    total_excess = sum(value for value in excess.values() if value > 0)
    notable = [(name, value) for name, value in excess.items() if value > 0.2 * total_excess > 0]
    return sorted(notable, key=lambda item: -item[1])[:3]


def _mean(values: Sequence[float]) -> float:
    return float(np.mean(values)) if len(values) else 0.0


def _median(values: Sequence[float]) -> float:
    return float(np.median(values)) if len(values) else 0.0
