"""Summarize each rank of a simulated job, without writing and reading its file.

The same numbers as ``advise.ranks.measure.summarize_file`` of the files of ``kineto.write``
(tested), so that hundreds of jobs can be diagnosed in minutes. Advice of single ranks is left out.
"""

from __future__ import annotations

import hashlib
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from advisor.core.intervals import (
    Intervals,
    covered_length,
    gaps,
    intersect,
    subtract,
    union,
    union_of,
)
from advisor.measure.host.gaps import LATENCY_NS
from advisor.measure.ranks.collectives import short_key
from advisor.measure.ranks.rank_summary import MAX_SUMMARY_KERNELS, shrink_to_limit
from advisor.measure.ranks.summary_schema import (
    Collectives,
    KernelSummary,
    RankSummary,
    StepSummary,
    UnreadRank,
    pack,
)
from advisor.testing.builder import DEVICES
from benchmarks.simulation.engine import (
    BACKWARD,
    COMPUTE_STREAM,
    DTYPE_BYTES,
    MAIN,
    SimulatedRun,
    Table,
)
from benchmarks.simulation.kineto import DEVICE, file_name, format_ranks

Ints = NDArray[np.int64]
_KIND = {
    "allreduce": "all_reduce",
    "_allgather_base": "all_gather",
    "_reduce_scatter_base": "reduce_scatter",
    "all_to_all": "all_to_all",
    "send": "send_recv",
    "recv": "send_recv",
}
_SYNCHRONIZING = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all")


def summarize_all(played: SimulatedRun) -> tuple[list[RankSummary], list[UnreadRank]]:
    """Summarize every rank that has a file. Files that are cut off hold half of their events.
    Lost ones hold nothing, and nobody knows of them either."""
    offsets = {
        name: np.searchsorted(table["rank"], np.arange(played.job.ranks + 1))
        for name, table in _tables(played).items()
    }
    result = []
    for rank in range(played.job.ranks):
        if rank in played.job.lost:
            continue
        tables = {
            name: {
                column: values[offsets[name][rank] : offsets[name][rank + 1]]
                for column, values in table.items()
            }
            for name, table in _tables(played).items()
        }
        result.append(_summarize(played, rank, tables))
    return result, []


def _tables(played: SimulatedRun) -> dict[str, Table]:
    return {
        "steps": played.steps,
        "loads": played.loads,
        "kernels": played.kernels,
        "talks": played.talks,
        "reads": played.reads,
    }


class _Device(NamedTuple):
    """All device work of a rank, by start."""

    start: Ints
    end: Ints
    stream: Ints
    call: Ints
    called: Ints
    held: NDArray[np.bool_]


def _summarize(played: SimulatedRun, rank: int, tables: dict[str, Table]) -> RankSummary:
    job = played.job
    full_tables = tables
    if rank in job.cut:
        tables = _cut(tables)
    kernels, talks, reads = tables["kernels"], tables["talks"], tables["reads"]
    device = _device(kernels, talks, reads)
    begin = tables["steps"]["start"]
    until = np.append(begin[1:], max(int(tables["steps"]["end"][-1]), int(device.end.max())))
    count = len(begin)
    spans = union(begin, until)
    compute = intersect(union(kernels["start"], kernels["end"]), spans)
    talked = intersect(union(talks["start"], talks["end"]), spans)
    copied = intersect(union(reads["start"], reads["end"]), spans)
    exposed = subtract(talked, compute)
    copies = subtract(copied, union_of(compute, talked))
    idle = gaps(union_of(compute, talked, copied), int(begin[0]), int(until[-1]))
    classes = {"compute": compute, "communication": exposed, "copies": copies}
    causes = _causes(idle, begin, until, device, _host_segments(full_tables, tables, None))
    per_step = {name: covered_length(begin, until, part) for name, part in classes.items()}
    per_step |= {
        f"idle: {cause}": covered_length(begin, until, part) for cause, part in causes.items()
    }
    spec = kernels["spec"]
    families: dict[str, float] = {}
    ns = kernels["end"] - kernels["start"]
    of_spec = np.bincount(spec, weights=ns, minlength=len(played.catalogue))
    for kernel, total in zip(played.catalogue, of_spec.tolist(), strict=True):
        if total:
            families[kernel.family] = families.get(kernel.family, 0.0) + total / count
    families["communication"] = float((talks["end"] - talks["start"]).sum()) / count
    families["copy"] = float((reads["end"] - reads["start"]).sum()) / count
    return shrink_to_limit(
        RankSummary(
            rank=rank,
            path=file_name(job, rank),
            host=job.host_name(rank),
            device=DEVICES[DEVICE]["name"],
            world=job.ranks,
            framework="pytorch",
            step_source="ProfilerStep",
            steps=[
                StepSummary(f"ProfilerStep#{number + 3}", start, end)
                for number, start, end in zip(
                    tables["steps"]["step"].tolist(), begin.tolist(), until.tolist(), strict=True
                )
            ],
            step_ns=float(until[-1] - begin[0]) / count,
            time={
                **{name: part.total / count for name, part in classes.items()},
                "memset": 0.0,
                "idle": idle.total / count,
            },
            idle={cause: part.total / count for cause, part in causes.items() if part.total},
            host_time=_host_time(full_tables, tables, spans, count),
            families={name: total for name, total in families.items() if total},
            kernels=_kernels(played, spec, ns, count),
            per_step={name: pack(values) for name, values in per_step.items() if values.any()},
            communication=talked.total / count,
            collectives=_collectives(played, talks, begin, until, exposed),
            damage="gzip that is cut off" if rank in job.cut else "",
        )
    )


def _cut(tables: dict[str, Table]) -> dict[str, Table]:
    """A third of the calls and of the device work, which stand in a file behind all operators."""
    last = int(np.quantile(tables["kernels"]["call"], 1 / 3))
    return {
        name: table
        if "call" not in table
        else {column: values[table["call"] <= last] for column, values in table.items()}
        for name, table in tables.items()
    }


def _device(kernels: Table, talks: Table, reads: Table) -> _Device:
    stream = [
        np.full(len(kernels["start"]), COMPUTE_STREAM),
        talks["stream"],
        np.full(len(reads["start"]), COMPUTE_STREAM),
    ]
    parts = (kernels, talks, reads)
    start = np.concatenate([part["start"] for part in parts])
    order = np.lexsort((np.concatenate([part["call"] for part in parts]), start))
    end, call, called = (
        np.concatenate([part[column] for part in parts])[order]
        for column in ("end", "call", "called")
    )
    no_waits = [np.zeros(len(reads["start"]), dtype=bool)]
    held = np.concatenate([kernels["held"], talks["held"], *no_waits])[order]
    thread = np.concatenate([kernels["thread"], talks["thread"], 0 * reads["start"]])[order]
    streams = np.concatenate(stream)[order]
    return _Device(start[order], end, streams, call, called, _waited(held, thread, streams, call))


def _waited(held: NDArray[np.bool_], thread: Ints, stream: Ints, call: Ints) -> NDArray[np.bool_]:
    """Return whether the launching thread made any stream wait after its launch before on the same
    stream, as in ``advisor.measure.host.gaps``."""
    order = np.lexsort((call, thread))
    latest_of_position = np.where(held[order], np.arange(len(order)), -1)
    new = np.flatnonzero(np.diff(thread[order], prepend=-1))
    latest_of_position[new] = np.where(
        latest_of_position[new] < 0, -2 - new, latest_of_position[new]
    )
    latest = np.maximum.accumulate(latest_of_position)
    first = np.zeros(len(order), dtype=np.int64)
    first[new] = new
    latest = np.where(latest >= np.maximum.accumulate(first), latest, -1)
    before = np.full(len(order), -1)
    for each in np.unique(stream):  # a handful of them
        rows = np.flatnonzero(stream[order] == each)
        before[rows[1:]] = rows[:-1]
    values = np.zeros(len(order), dtype=bool)
    values[order] = latest > before
    return values


def _host_segments(
    full_tables: dict[str, Table], own_tables: dict[str, Table], thread: int | None
) -> dict[str, Intervals]:
    """Intervals in which the threads of a rank are in which class; ``thread``: of one of them
    alone. Operators are those of the whole file, calls those that were left in it."""

    def rows(name: str, tables: dict[str, Table] = own_tables) -> Table:
        table = tables[name]
        if thread is None or name == "reads":
            return table
        keep = table["thread"] == thread
        return {column: values[keep] for column, values in table.items()}

    kernels, talks, reads, loads = (
        rows("kernels"),
        rows("talks"),
        own_tables["reads"],
        own_tables["loads"],
    )
    launches = union(
        np.concatenate([kernels["call"], talks["call"], reads["call"]]),
        np.concatenate([kernels["called"], talks["called"], reads["called"]]),
    )
    sync = union(reads["wait"], reads["closed"] - 600)
    ranges = [rows(name, full_tables) for name in ("kernels", "talks", "reads")]
    operators = union(
        np.concatenate([part["op"] for part in ranges]),
        np.concatenate([part["closed"] for part in ranges]),
    )
    return {
        "loader": union(loads["start"], loads["end"]),
        "sync": sync,
        "launch": launches,
        "dispatch": subtract(operators, union_of(launches, sync)),
    }


def _causes(
    idle: Intervals, begin: Ints, until: Ints, device: _Device, host: dict[str, Intervals]
) -> dict[str, Intervals]:
    """Idle time by cause: as ``advisor.measure.host.gaps`` tells it, for programs like ours."""
    part = intersect(idle, Intervals(begin, until))
    which = np.searchsorted(idle.start, part.start, side="right") - 1
    following = np.searchsorted(device.start, idle.end[which], side="left")
    tail = following >= len(device.start)
    at = np.minimum(following, len(device.start) - 1)
    returned = np.where(tail, part.end, device.called[at])
    upto = np.minimum(np.maximum(returned, part.start), part.end)
    on_host = union(part.start[upto > part.start], upto[upto > part.start])
    result = {cause: intersect(on_host, spans) for cause, spans in host.items()}
    rest = subtract(on_host, union_of(*host.values()))
    last = union(part.start[tail], part.end[tail])
    result["end"] = intersect(rest, last)
    dark = subtract(rest, last)
    queued = (upto < part.end) & ~tail
    late = part.end - upto > LATENCY_NS
    by_end = np.argsort(device.end, kind="stable")
    latest = np.searchsorted(device.end[by_end], part.end, side="right") - 1
    releaser = by_end[np.maximum(latest, 0)]
    elsewhere = (latest >= 0) & (device.stream[releaser] != device.stream[at])
    elsewhere &= part.end - device.end[releaser] <= LATENCY_NS
    stream = queued & device.held[at] & elsewhere
    result["stream"] = union(upto[stream], part.end[stream])
    soon, never = queued & ~stream & ~late, queued & ~stream & late
    result["launch"] = union_of(result["launch"], union(upto[soon], part.end[soon]))
    result["unknown"] = union_of(dark, union(upto[never], part.end[never]))
    return result


def _host_time(
    full_tables: dict[str, Table], tables: dict[str, Table], spans: Intervals, count: int
) -> dict[str, float]:
    """Time of the main thread's classes, ns per step."""
    segments = {
        name: intersect(part, spans)
        for name, part in _host_segments(full_tables, tables, MAIN).items()
    }
    ns_of = {name: part.total / count for name, part in segments.items()}
    kernels, marks = full_tables["kernels"], tables["steps"]
    engine = kernels["thread"] == BACKWARD
    step = kernels["step"][engine]
    autograd = 0
    if len(step):
        first = np.flatnonzero(np.diff(step, prepend=-1))
        last = np.append(first[1:], len(step)) - 1
        runs = kernels["closed"][engine][last] + 1 - kernels["op"][engine][first]
        autograd = int(runs.sum())
    inside = union(marks["start"], marks["end"])
    ns_of["autograd"] = autograd / count
    ns_of["unrecorded"] = (spans.total - intersect(inside, spans).total) / count
    ns_of["unknown"] = spans.total / count - sum(ns_of.values())
    return {name: ns for name, ns in ns_of.items() if ns}


def _kernels(played: SimulatedRun, spec: Ints, ns: Ints, count: int) -> dict[str, KernelSummary]:
    lines: dict[tuple[str, int, int], list[Ints]] = {}
    for each in np.unique(spec).tolist():
        kernel = played.catalogue[each]
        of = (kernel.name, kernel.blocks, kernel.threads)
        lines.setdefault(of, []).append(ns[spec == each])
    joined = {of: np.concatenate(parts) for of, parts in lines.items()}
    first = sorted(joined, key=lambda of: (-int(joined[of].sum()), *of))[:MAX_SUMMARY_KERNELS]
    result = {}
    for of in first:
        text = "|".join(map(str, of)).encode("utf-8", "replace")
        name = f"{of[0][:40]}#{hashlib.blake2s(text, digest_size=6).hexdigest()}"
        values = joined[of]
        result[name] = KernelSummary(
            len(values), float(values.sum()) / count, float(np.median(values))
        )
    return result


def _collectives(
    played: SimulatedRun, talks: Table, begin: Ints, until: Ints, exposed: Intervals
) -> Collectives | None:
    start, end = talks["start"], talks["end"]
    at = np.searchsorted(begin, start, side="right") - 1
    inside = (at >= 0) & (end <= until[np.maximum(at, 0)])
    # sends and receives are of the step that launched them: the last may reach beyond it
    paired = talks["peer"] >= 0
    at, inside = np.where(paired, talks["step"], at), inside | paired
    order = np.lexsort((end, start))
    order = order[inside[order]]
    if not len(order):
        return None
    start, end, step = start[order], end[order], at[order]
    before = np.concatenate([start[:1], start[:-1]])
    first = np.concatenate([[True], step[1:] != step[:-1]])
    before[first] = np.minimum(begin[step[first]], start[first])
    peer = talks["peer"][order]
    sends = np.array([call.kind == "send" for call in played.calls], dtype=bool)[talks["spec"]]
    ranks = talks["rank"][order]
    source = np.where(peer < 0, -1, np.where(sends[order], ranks, peer))
    calls = np.stack([talks["spec"][order], talks["row"][order], source, peer])
    rows: dict[tuple[int, int, int, int], int] = {}
    keys: list[str] = []
    facts: list[tuple[str, int, str, int]] = []
    places: dict[str, int] = {}
    is_alone: list[bool] = []
    distinct, inverse = np.unique(calls, axis=1, return_inverse=True)
    seen = np.full(distinct.shape[1], len(order))
    np.minimum.at(seen, inverse, np.arange(len(order)))
    for each in np.argsort(seen).tolist():
        spec, row, sender, other = (int(value) for value in distinct[:, each])
        call = played.calls[spec]
        groups = played.job.groups[call.groups]
        members = groups.members[row - groups.first].tolist()
        kind = _KIND[call.kind]
        size = None if kind == "all_to_all" else max(call.given, call.out) * DTYPE_BYTES
        if other < 0:
            text = short_key(True, str(row), format_ranks(members), kind, size, None)
        else:
            target = other if call.kind == "send" else int(ranks[0])
            text = short_key(
                False, str(row), format_ranks(members), kind, size, None, sender, target
            )
        if text not in places:
            places[text] = len(keys)
            keys.append(text)
            facts.append((str(row), len(members) if other < 0 else 2, kind, size or 0))
            is_alone.append(other < 0)
        rows[spec, row, sender, other] = places[text]
    of_distinct = np.array([rows[int(a), int(b), int(c), int(d)] for a, b, c, d in distinct.T])
    of = of_distinct[inverse]
    swap = np.array([call.kind == "all_to_all" for call in played.calls], dtype=bool)
    amount = np.maximum(talks["given"], talks["out"])[order] * swap[talks["spec"][order]]
    number = talks["sequence"][order].copy()
    counts: dict[tuple[int, int], int] = {}
    for place in np.flatnonzero(peer >= 0).tolist():
        which = (int(of[place]), int(step[place]))
        number[place] = counts[which] = counts.get(which, -1) + 1
    return Collectives(
        keys=keys,
        key=pack(of),
        order=pack(number),
        step=pack(step),
        start=pack(start),
        end=pack(end),
        exposed=pack(covered_length(start, end, exposed)),
        work=pack(start - before - covered_length(before, start, exposed)),
        synchronising=[kind in _SYNCHRONIZING for _, _, kind, _ in facts],
        group=[group for group, _, _, _ in facts],
        size=[size for _, size, _, _ in facts],
        kind=[kind for _, _, kind, _ in facts],
        message=[message for _, _, _, message in facts],
        sequenced=is_alone,
        amount=pack(amount) if amount.any() else None,
    )
