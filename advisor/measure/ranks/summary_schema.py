"""Summaries of single ranks: bounded, versioned, and enough to compare a thousand of them; and
clusters of similar ranks.

A worker reads a trace, measures it and sends this; nobody holds two traces at once."""

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
MAX_BYTES = 200_000
"""Size limit of one encoded summary; a larger one keeps fewer steps' collectives."""
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
    """Pack whole numbers; neighbours that are close take least."""
    column = np.ascontiguousarray(values, dtype="<i8")
    steps = np.diff(column, prepend=np.int64(0))
    return PackedColumns(len(column), zlib.compress(steps.astype("<i8").tobytes(), 6))


def unpack(packed: PackedColumns) -> NDArray[np.int64]:
    """Unpack the numbers. Raises AdvisorError: they were not packed like this."""
    most = packed.count * 8
    try:
        if not 0 <= most <= MAX_DECODED:
            raise ValueError
        data = _inflate(packed.data, most)
        if len(data) != most:
            raise ValueError
    except (zlib.error, ValueError):
        raise AdvisorError("a rank's summary is damaged") from None
    return np.cumsum(np.frombuffer(data, dtype="<i8"), dtype=np.int64)


class Collectives(Struct, frozen=True, kw_only=True):
    """Collectives of the used steps, in order of their start on this rank."""

    keys: list[str] = field(default_factory=list)
    """Distinct keys that collectives are matched by: group, members, kind, bytes, type …"""
    key: PackedColumns
    """Key of each collective: row of ``keys``."""
    order: PackedColumns
    """Sequence number where the trace has it (``sequenced``); else the place among those of this
    key: in the step that launched it where steps are marked, in the whole trace where not."""
    step: PackedColumns
    """Step of each collective: row of ``RankSummary.steps``; -1: outside."""
    start: PackedColumns
    """Arrival of the rank at each, ns on the trace's own clock."""
    end: PackedColumns
    exposed: PackedColumns
    """Part of each with no compute on this rank, ns."""
    work: PackedColumns
    """Own time of the rank before each, ns: from the start of the collective before (or of the
    step's start) to this one's start, without communication that nothing hid. Where collectives are
    not overlapped that is from the end of the one before."""
    synchronising: list[bool] = field(default_factory=list)
    """Whether no rank leaves it before all have arrived, by key."""
    group: list[str] = field(default_factory=list)
    """Name of the process group, by key."""
    size: list[int] = field(default_factory=list)
    """Number of members of the group, by key; 0: not known."""
    kind: list[str] = field(default_factory=list)
    """Kind of collective, such as ``all_reduce``, by key."""
    message: list[int] = field(default_factory=list)
    """Message size, bytes, by key; 0: not known."""
    sequenced: list[bool] = field(default_factory=list)
    """Whether ``order`` is a sequence number, by key; empty: none is."""
    amount: PackedColumns | None = None
    """Elements that this rank gives or gets in an all-to-all, whichever are more; 0: another kind,
    or not known. ``None``: no all-to-all tells."""
    dropped: int = 0
    """Number of collectives that were left out to keep the summary small."""


class RankSummary(Struct, frozen=True, kw_only=True):
    """Measurements of a rank. Times are ns per step unless said otherwise."""

    schema: str = SCHEMA
    rank: int
    """Number of the rank; -1: not recorded."""
    path: str
    """Path or URL of the trace, without credentials."""
    host: str = ""
    """Host name from the trace; empty: not known."""
    device: str = ""
    """Model of the GPU."""
    world: int = 0
    """Number of ranks of the job; 0: not known."""
    framework: str = ""
    clock: str = "unix"
    """Clock of the times; ``unix``: comparable between hosts as far as their clocks are."""
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
    """Compute kernels with most time, by the start of their name and a digest of name and launch
    size: the same on every rank that runs the same."""
    operators: dict[str, KernelSummary] = field(default_factory=dict)
    """Outermost operators of ATen with most time, where no device works, by name and a digest of
    name and shapes."""
    per_step: dict[str, PackedColumns] = field(default_factory=dict)
    """Columns of ``time`` (with ``idle: <cause>`` for idle) over ``steps``, ns; where no device
    works, of ``host_time`` and ``communication``."""
    communication: float = 0.0
    """Communication time, hidden or not."""
    collectives: Collectives | None = None
    findings: list[Advice] = field(default_factory=list)
    details: bytes = b""
    """Findings in full, in the same order, as :func:`pack_findings` has them; empty: left out to
    keep the summary small."""
    damage: str = ""
    memory: MemorySample | None = None
    """Memory of the fullest device in its snapshot; ``null``: it has none."""


class UnreadRank(Struct, frozen=True, kw_only=True):
    """A rank that could not be read or measured, and is left out of the analysis."""

    schema: str = SCHEMA
    rank: int
    path: str
    why: str


def pack_findings(findings: Sequence[Finding]) -> bytes:
    return zlib.compress(msgspec.msgpack.encode(findings), 6)


def unpack_findings(details: bytes) -> list[Finding]:
    """Decompress findings. Raises AdvisorError: they were not packed like this."""
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
    """Decode a worker's summary. Raises AdvisorError: damaged, or of another version."""
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


# -- which summaries are of one run, each rank once ------------------------------------------------

MAX_CLOCK_DIFFERENCE_NS = 60 * 10**9
"""Largest difference of clocks in one job, ns. Hosts keep Unix time to well under a second (NTP);
traces whose collectives match only after a shift of minutes are of different runs."""
SHOWN = 3
"""Files that are listed by name, at most."""


class MainRun(NamedTuple):
    """Ranks of one run, and those left out because they are of another."""

    summaries: list[RankSummary]
    """Summaries in order of rank, each rank once."""
    other_runs: list[UnreadRank]
    """Ranks of another run, with the reason."""
    notes: dict[str, str]
    """Entries for ``Ranks.not_checked``."""


def select_main_run(summaries: Sequence[RankSummary]) -> MainRun:
    """Select the run of which most ranks are here."""
    kept, others = _at_one_time(summaries)
    kept, apart = _of_one_size(kept)
    notes: dict[str, str] = {}
    kept = _named(kept, notes)
    best: dict[int, RankSummary] = {}
    again: list[int] = []
    for summary in sorted(kept, key=lambda s: (-len(s.steps), s.path)):
        if summary.rank in best:
            again.append(summary.rank)
        else:
            best[summary.rank] = summary
    if again:
        notes["further files of the same ranks"] = f"of ranks {format_ranks(again)}"
    return MainRun([best[rank] for rank in sorted(best)], [*others, *apart], notes)


def _at_one_time(summaries: Sequence[RankSummary]) -> tuple[list[RankSummary], list[UnreadRank]]:
    """Separate ranks whose steps lie where most ranks' do from the others: further apart than
    clocks ever are, it is another run, or another part of it."""
    timed = [s for s in summaries if s.steps and s.clock == "unix"]
    if len(timed) < 2:
        return list(summaries), []
    timed.sort(key=lambda s: s.steps[0].start)
    runs, until = [[timed[0]]], timed[0].steps[-1].end
    for summary in timed[1:]:
        if summary.steps[0].start > until + MAX_CLOCK_DIFFERENCE_NS:
            runs.append([])
        runs[-1].append(summary)
        until = max(until, summary.steps[-1].end)
    most = max(runs, key=_size)
    kept: list[RankSummary] = list(summaries)
    others: list[UnreadRank] = []
    for run in runs:
        if run is not most:
            kept, apart = _parted(kept, {id(s) for s in run}, _why_other_run(run, most))
            others += apart
    return kept, others


def _size(run: Sequence[RankSummary]) -> int:
    return len({(s.rank, s.rank < 0 and s.path) for s in run})


def _why_other_run(run: Sequence[RankSummary], most: Sequence[RankSummary]) -> str:
    """Explain why a run is left out beside the one that is analysed, and how to analyse it."""
    ns = run[0].steps[0].start - most[0].steps[0].start
    size = "with as many ranks" if _size(run) == _size(most) else "with fewer ranks"
    when = f"{t.format_duration(abs(ns))} {'after' if ns > 0 else 'before'} the one analysed"
    folder = _folder(run)
    alone = folder and not any(s.path.startswith(f"{folder}/") for s in most)
    how = f"advisor analyze {folder}" if alone else "give its files to analyse it"
    return f"another run {size}, recorded {when}: {how}"


def _folder(run: Sequence[RankSummary]) -> str:
    """Return the common folder of the run's files, without its last slash."""
    folders = [f"{s.path.rpartition('/')[0]}/" for s in run]  # of URLs too, which are no paths
    return os.path.commonprefix(folders).rpartition("/")[0]  # noqa: RUF071


def _of_one_size(summaries: Sequence[RankSummary]) -> tuple[list[RankSummary], list[UnreadRank]]:
    """Separate ranks with the most frequent world size, or none, from the others."""
    sizes = Counter(s.world for s in summaries if s.world)
    if len(sizes) < 2:
        return list(summaries), []
    world = sizes.most_common(1)[0][0]
    out = {id(s) for s in summaries if s.world not in (0, world)}
    return _parted(summaries, out, f"of a job that has not {world} ranks, as most say")


def _parted(
    summaries: Sequence[RankSummary], out: set[int], why: str
) -> tuple[list[RankSummary], list[UnreadRank]]:
    kept = [s for s in summaries if id(s) not in out]
    return kept, [UnreadRank(rank=s.rank, path=s.path, why=why) for s in summaries if id(s) in out]


def _named(summaries: Sequence[RankSummary], notes: dict[str, str]) -> list[RankSummary]:
    """Number ranks that neither file nor name tells: the one that is missing where it is one, else
    numbers that no rank of the job has."""
    unknown = sorted((s for s in summaries if s.rank < 0), key=lambda s: s.path)
    if not unknown:
        return list(summaries)
    known = {s.rank for s in summaries if s.rank >= 0}
    world = max((s.world for s in summaries), default=0)
    missing = sorted(set(range(world)) - known)
    beyond = max([world, *(rank + 1 for rank in known)])
    given = missing if len(unknown) == len(missing) == 1 else range(beyond, beyond + len(unknown))
    numbers = dict(zip((id(s) for s in unknown), given, strict=True))
    if list(given) != missing:
        lines = [f"{rank} is {s.path}" for rank, s in zip(given, unknown, strict=True)]
        notes["which ranks some files are of"] = (
            f"neither they nor their names say it; here {t.list_names(lines, SHOWN)}"
        )
    return [structs.replace(s, rank=numbers.get(id(s), s.rank)) for s in summaries]


MAX_CLUSTERS = 8
MAX_DISTANCE = 0.1
"""Share of the step by which times of similar ranks may differ, over all classes together."""
FAMILIES = 6
LABELS = {
    "compute": "compute", "copies": "copies", "input": "waiting for input", "host": "host time",
    "communication": "transfers", "waiting": "waiting for others",
}  # fmt: skip


def find_clusters(
    summaries: Sequence[RankSummary], values: Floats, classes: Sequence[str], stage: Ints
) -> list[RankCluster]:
    """Group ranks into at most MAX_CLUSTERS clusters, the largest first. ``values``: ns per step,
    ranks x ``classes``. Pipeline stages whose times differ at all are in different clusters."""
    known = np.flatnonzero(np.isfinite(values).all(axis=1))
    if not len(known):
        return []
    step = np.array([summary.step_ns for summary in summaries])
    scale = float(np.median(step[known])) or 1.0
    features = np.hstack([values, _families(summaries)])[known] / scale
    label = _clusters(features, MAX_DISTANCE)
    groups = [known[label == number] for number in range(int(label.max()) + 1)]
    groups.sort(key=lambda places: (-len(places), int(places[0])))
    middle = np.median(values[known], axis=0)
    several = len(np.unique(stage)) > 1
    result = []
    for places in groups:
        own = np.median(values[places], axis=0)
        result.append(
            RankCluster(
                name=_name(own - middle, classes, scale, len(groups), stage[places], several),
                ranks=format_ranks([summaries[place].rank for place in places.tolist()]),
                count=len(places),
                step_ns=float(np.median(step[places])),
                time=dict(zip(classes, own.tolist(), strict=True)),
            )
        )
    return result


def _families(summaries: Sequence[RankSummary]) -> Floats:
    """Return ns per step of the families of kernels that take most time, ranks x families."""
    total: dict[str, float] = {}
    for summary in summaries:
        for name, ns in summary.families.items():
            if name != "communication":
                total[name] = total.get(name, 0.0) + ns
    names = sorted(total, key=lambda name: -total[name])[:FAMILIES]
    table = [[summary.families.get(name, 0.0) for name in names] for summary in summaries]
    return np.array(table, dtype=np.float64).reshape(len(summaries), len(names))


def _clusters(features: Floats, near: float) -> Ints:
    """Number each row's group. Each joins the first leader that is near; the nearest two groups
    become one until there are few."""
    leaders: list[int] = []
    label = np.full(len(features), -1, dtype=np.int64)
    # from the middle outwards, so that leaders are not outliers
    order = np.argsort(np.abs(features - np.median(features, axis=0)).sum(axis=1), kind="stable")
    left = order
    while len(left):  # a leader a round, and as many as there are kinds of ranks
        leader = int(left[0])
        if len(leaders) >= 64:
            label[left] = _nearest(features[left], features[leaders])
            break
        close = np.abs(features[left] - features[leader]).sum(axis=1) <= near
        label[left[close]] = len(leaders)
        leaders.append(leader)
        left = left[~close]
    middles = [np.median(features[label == n], axis=0) for n in range(len(leaders))]
    sizes = [int((label == n).sum()) for n in range(len(leaders))]
    alive = list(range(len(leaders)))
    while len(alive) > MAX_CLUSTERS:
        pairs = [
            (float(np.abs(middles[a] - middles[b]).sum()) * min(sizes[a], sizes[b]), a, b)
            for place, a in enumerate(alive)
            for b in alive[place + 1 :]
        ]
        _, a, b = min(pairs)
        label[label == b] = a
        middles[a] = np.median(features[label == a], axis=0)
        sizes[a] += sizes[b]
        alive.remove(b)
    return np.searchsorted(np.array(alive), label).astype(np.int64)


def _nearest(rows: Floats, leaders: Floats) -> Ints:
    distance = np.stack([np.abs(rows - leader).sum(axis=1) for leader in leaders])
    return np.asarray(distance.argmin(axis=0), dtype=np.int64)


def _name(
    more: Floats, classes: Sequence[str], scale: float, groups: int, stage: Ints, several: bool
) -> str:
    parts = []
    if several and len(np.unique(stage)) == 1:
        parts.append(f"stage {int(stage[0])}")
    if groups == 1:
        return parts[0] if parts else "all similar"
    order = np.argsort(-np.abs(more), kind="stable")
    for place in order[:2].tolist():
        if abs(more[place]) >= 0.02 * scale:
            word = LABELS.get(classes[place], classes[place])
            parts.append(f"{'more' if more[place] > 0 else 'less'} {word}")
    return ", ".join(parts) or "like the median rank"
