"""Summaries of single ranks, bounded and versioned, for comparing thousands of ranks; and clusters
of similar ranks.

A worker reads a trace, measures it and sends this, so no process holds two traces at once."""

import os
import zlib
from collections import Counter
from collections.abc import Sequence
from typing import Any, NamedTuple

import msgspec
import numpy as np
from msgspec import Struct, field, structs
from numpy.typing import NDArray

from advisor.core import text as t
from advisor.core.errors import AdvisorError
from advisor.core.finding import Finding
from advisor.core.intervals import Floats, Ints
from advisor.core.ranks import RankCluster, format_ranks
from advisor.core.report_memory import MemorySample

SCHEMA = "advisor.rank/1"
MAX_SUMMARY_BYTES = 200_000
"""Maximum size of an encoded summary, bytes; a larger one keeps the collectives of fewer steps."""
MAX_DECODED = 16 << 20


class StepSummary(Struct, array_like=True, frozen=True):
    """A step that the figures are taken over, ns on the trace's own clock."""

    name: str
    start: int
    end: int


class Advice(Struct, frozen=True, array_like=True):
    """Short form of a finding on one rank alone; ``RankSummary.details`` has the findings."""

    rule: str
    category: str = ""
    """Category of the rule."""
    gain_ns: float | None = None
    """Estimated gain, ns per step; ``null``: not estimated."""


class KernelSummary(Struct, array_like=True, frozen=True):
    """Time of a compute kernel with one launch size, inside the used steps."""

    count: int
    total_ns: float
    """Total time, ns per step."""
    median_ns: float
    """Median duration of a kernel, ns."""


class PackedColumns(Struct, frozen=True):
    """Column of whole numbers: differences of neighbours, zlib."""

    count: int
    data: bytes


def pack(values: NDArray[np.int64]) -> PackedColumns:
    """Pack whole numbers. Similar neighbours take the least space."""
    column = np.ascontiguousarray(values, dtype="<i8")
    steps = np.diff(column, prepend=np.int64(0))
    return PackedColumns(len(column), zlib.compress(steps.astype("<i8").tobytes(), 6))


def unpack(packed: PackedColumns) -> NDArray[np.int64]:
    """Unpack numbers packed by :func:`pack`. Raises AdvisorError if the data is damaged."""
    size = packed.count * 8
    try:
        if not 0 <= size <= MAX_DECODED:
            raise ValueError
        data = _inflate(packed.data, size)
        if len(data) != size:
            raise ValueError
    except (zlib.error, ValueError):
        raise AdvisorError("a rank's summary is damaged") from None
    return np.cumsum(np.frombuffer(data, dtype="<i8"), dtype=np.int64)


class Collectives(Struct, frozen=True, kw_only=True):
    """Collectives of the used steps, in order of their start on this rank."""

    keys: list[str] = field(default_factory=list)
    """Distinct keys for matching collectives: group, members, kind, bytes, type …"""
    key: PackedColumns
    """Key of each collective: row of ``keys``."""
    order: PackedColumns
    """Sequence number if the trace has it (``sequenced``), else the position among collectives of
    this key: in the step that launched it if steps are marked, otherwise in the complete trace."""
    step: PackedColumns
    """Step of each collective: row of ``RankSummary.steps``, or -1 outside of steps."""
    start: PackedColumns
    """Arrival of the rank at each collective, ns on the trace's own clock."""
    end: PackedColumns
    exposed: PackedColumns
    """Time of each collective without compute on this rank, ns."""
    work: PackedColumns
    """Own time of the rank before each collective, ns: from the start of the previous collective
    (or of the step) to this one's start, without exposed communication. For collectives without
    overlap, this is the time since the end of the previous one."""
    synchronising: list[bool] = field(default_factory=list)
    """Whether no rank leaves the collective before all have arrived, by key."""
    group: list[str] = field(default_factory=list)
    """Name of the process group, by key."""
    size: list[int] = field(default_factory=list)
    """Number of members of the group, by key, or 0 if unknown."""
    kind: list[str] = field(default_factory=list)
    """Kind of collective, such as ``all_reduce``, by key."""
    message: list[int] = field(default_factory=list)
    """Message size, bytes, by key, or 0 if unknown."""
    sequenced: list[bool] = field(default_factory=list)
    """Whether ``order`` is a sequence number, by key. Empty if there are no sequence numbers."""
    amount: PackedColumns | None = None
    """The larger of the elements that this rank sends and receives in an all-to-all, or 0 for other
    kinds, or if unknown. ``None`` if unknown for all."""
    dropped: int = 0
    """Number of collectives that were left out to keep the summary small."""


class RankSummary(Struct, frozen=True, kw_only=True):
    """Measurements of a rank. Times are ns per step unless said otherwise."""

    schema: str = SCHEMA
    rank: int
    """Number of the rank, or -1 if not recorded."""
    path: str
    """Path or URL of the trace, without credentials."""
    host: str = ""
    """Host name from the trace. Empty if unknown."""
    device: str = ""
    """Model of the GPU."""
    world: int = 0
    """Number of ranks of the job, or 0 if unknown."""
    framework: str = ""
    clock: str = "unix"
    """Clock of the times. ``unix`` times are comparable between hosts if their clocks agree."""
    events: int = 0
    bytes_read: int = 0
    step_source: str = ""
    steps: list[StepSummary] = field(default_factory=list)
    step_ns: float = 0.0
    time: dict[str, float] = field(default_factory=dict)
    """Device time by exclusive class, as in the report: ``compute`` … ``idle``."""
    idle: dict[str, float] = field(default_factory=dict)
    """Idle time by cause."""
    host_time: dict[str, float] = field(default_factory=dict)
    """Time of the main thread by class."""
    families: dict[str, float] = field(default_factory=dict)
    """Kernel time by family."""
    kernels: dict[str, KernelSummary] = field(default_factory=dict)
    """Compute kernels with the most time, by the start of their name and a digest of name and
    launch size, which is equal on all ranks that run the same kernel."""
    operators: dict[str, KernelSummary] = field(default_factory=dict)
    """Outermost ATen operators with the most time without device work, by name and a digest of name
    and shapes."""
    functions: dict[str, float] = field(default_factory=dict)
    """Share of the stack samples in or below each function of the user's code, by its line with
    most samples (``train.py(30): main``)."""
    per_step: dict[str, PackedColumns] = field(default_factory=dict)
    """Columns of ``time`` (with ``idle: <cause>`` for idle) over ``steps``, ns, or without device
    work columns of ``host_time`` and ``communication``."""
    communication: float = 0.0
    """Communication time, hidden or not."""
    collectives: Collectives | None = None
    findings: list[Advice] = field(default_factory=list)
    details: bytes = b""
    """Complete findings in the same order, packed by :func:`pack_findings`. Empty if left out to
    keep the summary small."""
    damage: str = ""
    memory: MemorySample | None = None
    """Memory of the fullest device in its snapshot, or ``null`` without a snapshot."""


class UnreadRank(Struct, frozen=True, kw_only=True):
    """A rank that could not be read or measured and is left out of the analysis."""

    schema: str = SCHEMA
    rank: int
    path: str
    why: str


def pack_findings(findings: Sequence[Finding]) -> bytes:
    return zlib.compress(msgspec.msgpack.encode(findings), 6)


def unpack_findings(details: bytes) -> list[Finding]:
    """Unpack findings packed by :func:`pack_findings`. Raises AdvisorError if they are damaged."""
    if not details:
        return []
    try:
        return msgspec.msgpack.decode(_inflate(details, MAX_DECODED), type=list[Finding])
    except (zlib.error, ValueError, RecursionError):
        raise AdvisorError("a rank's summary is damaged") from None


def _inflate(data: bytes, max_bytes: int) -> bytes:
    result = zlib.decompressobj().decompress(data, max_bytes + 1)
    if len(result) > max_bytes:
        raise ValueError
    return result


def encode(summary: RankSummary | UnreadRank) -> bytes:
    tagged = {"unread" if isinstance(summary, UnreadRank) else "summary": summary}
    return msgspec.msgpack.encode(tagged)


def decode(data: bytes) -> RankSummary | UnreadRank:
    """Decode a worker's summary. Raises AdvisorError if it is damaged, or of another version."""
    try:
        if len(data) > MAX_DECODED:
            raise ValueError
        decoded: dict[str, Any] = msgspec.msgpack.decode(data)
        kind, fields = next(iter(decoded.items()))
        if fields.get("schema") != SCHEMA:
            raise AdvisorError(f"a rank's summary is of another version ({fields.get('schema')!r})")
        if kind == "unread":
            return msgspec.convert(fields, UnreadRank)
        return msgspec.convert(fields, RankSummary)
    except (ValueError, AttributeError, StopIteration, TypeError, RecursionError):
        raise AdvisorError("a rank's summary is damaged") from None


# -- summaries of one run, each rank once ------------------------------------------------

MAX_CLOCK_DIFFERENCE_NS = 60 * 10**9
"""Maximum difference of clocks in one job, ns. Hosts keep Unix time to well under a second (NTP),
so traces whose collectives match only after a shift of minutes are from different runs."""
MAX_SHOWN_FILES = 3
"""Maximum number of files that are listed by name."""


class MainRun(NamedTuple):
    """Ranks of one run, and ranks left out because they belong to another run."""

    summaries: list[RankSummary]
    """Summaries in order of rank, each rank once."""
    other_runs: list[UnreadRank]
    """Ranks of another run, with the reason."""
    notes: dict[str, str]
    """Entries for ``Ranks.not_checked``."""


def select_main_run(summaries: Sequence[RankSummary]) -> MainRun:
    """Select the run with the most ranks."""
    selected, others = _select_concurrent(summaries)
    selected, other_sizes = _select_world_size(selected)
    notes: dict[str, str] = {}
    selected = _number_unknown_ranks(selected, notes)
    summary_of_rank: dict[int, RankSummary] = {}
    repeated: list[int] = []
    for summary in sorted(selected, key=lambda s: (-len(s.steps), s.path)):
        if summary.rank in summary_of_rank:
            repeated.append(summary.rank)
        else:
            summary_of_rank[summary.rank] = summary
    if repeated:
        notes["further files of the same ranks"] = f"of ranks {format_ranks(repeated)}"
    return MainRun(
        [summary_of_rank[rank] for rank in sorted(summary_of_rank)], [*others, *other_sizes], notes
    )


def _select_concurrent(
    summaries: Sequence[RankSummary],
) -> tuple[list[RankSummary], list[UnreadRank]]:
    """Separate ranks whose steps are at the same time as most ranks' steps from the others. Steps
    further apart than clocks ever are belong to another run, or to another part of it."""
    timed = [s for s in summaries if s.steps and s.clock == "unix"]
    if len(timed) < 2:
        return list(summaries), []
    timed.sort(key=lambda s: s.steps[0].start)
    runs, latest_end = [[timed[0]]], timed[0].steps[-1].end
    for summary in timed[1:]:
        if summary.steps[0].start > latest_end + MAX_CLOCK_DIFFERENCE_NS:
            runs.append([])
        runs[-1].append(summary)
        latest_end = max(latest_end, summary.steps[-1].end)
    main_run = max(runs, key=_size)
    selected: list[RankSummary] = list(summaries)
    others: list[UnreadRank] = []
    for run in runs:
        if run is not main_run:
            selected, separated = _split_off(
                selected, {id(s) for s in run}, _explain_other_run(run, main_run)
            )
            others += separated
    return selected, others


def _size(run: Sequence[RankSummary]) -> int:
    return len({(s.rank, s.rank < 0 and s.path) for s in run})


def _explain_other_run(run: Sequence[RankSummary], main_run: Sequence[RankSummary]) -> str:
    """Explain why a run is left out, and how to analyse it."""
    ns = run[0].steps[0].start - main_run[0].steps[0].start
    size = "with as many ranks" if _size(run) == _size(main_run) else "with fewer ranks"
    time_text = f"{t.format_duration(abs(ns))} {'after' if ns > 0 else 'before'} the one analysed"
    folder = _find_common_folder(run)
    is_separate = folder and not any(s.path.startswith(f"{folder}/") for s in main_run)
    advice = f"advisor analyze {folder}" if is_separate else "give its files to analyse it"
    return f"another run {size}, recorded {time_text}: {advice}"


def _find_common_folder(run: Sequence[RankSummary]) -> str:
    """Return the common folder of the run's files, without a trailing slash."""
    folders = [f"{s.path.rpartition('/')[0]}/" for s in run]  # also for URLs, which are not paths
    return os.path.commonprefix(folders).rpartition("/")[0]  # noqa: RUF071


def _select_world_size(
    summaries: Sequence[RankSummary],
) -> tuple[list[RankSummary], list[UnreadRank]]:
    """Separate ranks with the most frequent world size, or without any, from the others."""
    sizes = Counter(s.world for s in summaries if s.world)
    if len(sizes) < 2:
        return list(summaries), []
    world = sizes.most_common(1)[0][0]
    excluded = {id(s) for s in summaries if s.world not in (0, world)}
    return _split_off(
        summaries, excluded, f"of a job that does not have {world} ranks, as most files do"
    )


def _split_off(
    summaries: Sequence[RankSummary], excluded: set[int], why: str
) -> tuple[list[RankSummary], list[UnreadRank]]:
    selected = [s for s in summaries if id(s) not in excluded]
    return selected, [
        UnreadRank(rank=s.rank, path=s.path, why=why) for s in summaries if id(s) in excluded
    ]


def _number_unknown_ranks(
    summaries: Sequence[RankSummary], notes: dict[str, str]
) -> list[RankSummary]:
    """Number ranks that neither the file nor its name identifies: the missing rank if there is only
    one, else numbers that no rank of the job has."""
    unknown = sorted((s for s in summaries if s.rank < 0), key=lambda s: s.path)
    if not unknown:
        return list(summaries)
    used = {s.rank for s in summaries if s.rank >= 0}
    world = max((s.world for s in summaries), default=0)
    unused = sorted(set(range(world)) - used)
    first_free = max([world, *(rank + 1 for rank in used)])
    new_numbers = (
        unused if len(unknown) == len(unused) == 1 else range(first_free, first_free + len(unknown))
    )
    numbers = dict(zip((id(s) for s in unknown), new_numbers, strict=True))
    if list(new_numbers) != unused:
        lines = [f"{rank} is {s.path}" for rank, s in zip(new_numbers, unknown, strict=True)]
        notes["which ranks some files are of"] = (
            f"neither the files nor their names say it; here {t.list_names(lines, MAX_SHOWN_FILES)}"
        )
    return [structs.replace(s, rank=numbers.get(id(s), s.rank)) for s in summaries]


MAX_CLUSTERS = 8
MAX_DISTANCE = 0.1
"""Maximum difference of times of similar ranks, over all classes, as a share of the step."""
MAX_FAMILIES = 6
LABELS = {
    "compute": "compute", "copies": "copies", "input": "waiting for input", "host": "host time",
    "communication": "transfers", "waiting": "waiting for others",
}  # fmt: skip


def find_clusters(
    summaries: Sequence[RankSummary], values: Floats, classes: Sequence[str], stage: Ints
) -> list[RankCluster]:
    """Group ranks into at most MAX_CLUSTERS clusters, the largest first. ``values`` has ns per
    step, ranks x ``classes``. Pipeline stages whose times differ are in different clusters."""
    known_rows = np.flatnonzero(np.isfinite(values).all(axis=1))
    if not len(known_rows):
        return []
    step = np.array([summary.step_ns for summary in summaries])
    scale = float(np.median(step[known_rows])) or 1.0
    features = np.hstack([values, _tabulate_families(summaries)])[known_rows] / scale
    label = _cluster_rows(features, MAX_DISTANCE)
    groups = [known_rows[label == number] for number in range(int(label.max()) + 1)]
    groups.sort(key=lambda rows: (-len(rows), int(rows[0])))
    medians = np.median(values[known_rows], axis=0)
    has_stages = len(np.unique(stage)) > 1
    result = []
    for rows in groups:
        cluster_medians = np.median(values[rows], axis=0)
        result.append(
            RankCluster(
                name=_name_cluster(
                    cluster_medians - medians, classes, scale, len(groups), stage[rows], has_stages
                ),
                ranks=format_ranks([summaries[row].rank for row in rows.tolist()]),
                count=len(rows),
                step_ns=float(np.median(step[rows])),
                time=dict(zip(classes, cluster_medians.tolist(), strict=True)),
            )
        )
    return result


def _tabulate_families(summaries: Sequence[RankSummary]) -> Floats:
    """Return ns per step of the kernel families with the most time, ranks x families."""
    total: dict[str, float] = {}
    for summary in summaries:
        for name, ns in summary.families.items():
            if name != "communication":
                total[name] = total.get(name, 0.0) + ns
    names = sorted(total, key=lambda name: -total[name])[:MAX_FAMILIES]
    table = [[summary.families.get(name, 0.0) for name in names] for summary in summaries]
    return np.array(table, dtype=np.float64).reshape(len(summaries), len(names))


def _cluster_rows(features: Floats, max_distance: float) -> Ints:
    """Number each row's group. Each row joins the first near leader; the nearest two groups are
    merged until there are few."""
    leaders: list[int] = []
    label = np.full(len(features), -1, dtype=np.int64)
    # from the median outwards, so that leaders are not outliers
    order = np.argsort(np.abs(features - np.median(features, axis=0)).sum(axis=1), kind="stable")
    remaining = order
    while len(remaining):  # one leader per round, as many as there are kinds of ranks
        leader = int(remaining[0])
        if len(leaders) >= 64:
            label[remaining] = _find_nearest(features[remaining], features[leaders])
            break
        is_close = np.abs(features[remaining] - features[leader]).sum(axis=1) <= max_distance
        label[remaining[is_close]] = len(leaders)
        leaders.append(leader)
        remaining = remaining[~is_close]
    medians = [np.median(features[label == number], axis=0) for number in range(len(leaders))]
    sizes = [int((label == number).sum()) for number in range(len(leaders))]
    indices = list(range(len(leaders)))
    while len(indices) > MAX_CLUSTERS:
        pairs = [
            (float(np.abs(medians[a] - medians[b]).sum()) * min(sizes[a], sizes[b]), a, b)
            for index, a in enumerate(indices)
            for b in indices[index + 1 :]
        ]
        _, a, b = min(pairs)
        label[label == b] = a
        medians[a] = np.median(features[label == a], axis=0)
        sizes[a] += sizes[b]
        indices.remove(b)
    return np.searchsorted(np.array(indices), label).astype(np.int64)


def _find_nearest(rows: Floats, leaders: Floats) -> Ints:
    distance = np.stack([np.abs(rows - leader).sum(axis=1) for leader in leaders])
    return np.asarray(distance.argmin(axis=0), dtype=np.int64)


def _name_cluster(
    excess: Floats, classes: Sequence[str], scale: float, groups: int, stage: Ints, has_stages: bool
) -> str:
    parts = []
    if has_stages and len(np.unique(stage)) == 1:
        parts.append(f"stage {int(stage[0])}")
    if groups == 1:
        return parts[0] if parts else "all similar"
    order = np.argsort(-np.abs(excess), kind="stable")
    for index in order[:2].tolist():
        if abs(excess[index]) >= 0.02 * scale:
            class_label = LABELS.get(classes[index], classes[index])
            parts.append(f"{'more' if excess[index] > 0 else 'less'} {class_label}")
    return ", ".join(parts) or "like the median rank"
