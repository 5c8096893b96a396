"""CUDA and HIP graphs: replays whose records are incomplete, and kernels that a capture names.

A replay is one call and many kernels, which carry neither operator nor shape. A trace of the
capture has both, for launches that run nothing: the n-th captured launch is the n-th kernel of a
replay (https://docs.nvidia.com/cuda/cuda-c-programming-guide/#cuda-graphs: a graph that is captured
from streams keeps their order)."""

from dataclasses import replace
from difflib import SequenceMatcher
from typing import NamedTuple

import numpy as np
import polars as pl

from advisor.core.intervals import Ints, gaps, union
from advisor.core.trace import Capture, Trace
from advisor.measure.device.families import op_families
from advisor.measure.device.kernel_names import describe_kernels
from advisor.measure.host.stacks import climb_stack

HOLE_NS, USUAL_NS = 1_000, 2_000
HOLE = 20
"""Limits of idle time in a replay, from which records are missing: longer than ``HOLE_NS`` and than
``HOLE`` times the usual gap between its kernels (median, at most ``USUAL_NS``). Nothing on the host
can hold a graph up. In public traces its kernels are 0 to 1 µs apart (median), on MI300X 0 ns, and
a hundredth of the gaps takes 26 times as long."""
EDGE_NS = 50_000
"""Limit before and after a replay: a graph takes some 10 µs to start on an MI300X."""
BACK_TO_BACK_NS = 100
"""Usual gap below which every hole counts; else their time must be ``HOLE_SHARE``."""
HOLE_SHARE = 0.1
"""Share of a replay's time. Complete ones of four public traces idle for up to 7%."""
KEPT = 0.5
"""Part of the missing kernels' time that the shorter replay must still take, for them to have run.
"""


class GraphReplay(NamedTuple):
    """A call that launched a graph, and its device work."""

    row: int
    """Row of the call in ``trace.cpu``."""
    rows: Ints
    """Rows of its work in ``trace.gpu``, in time's order."""
    names: Ints
    """Code of the name of each piece of work."""
    span: int
    """Time from the first start to the last end, ns."""
    busy: int
    """Part of ``span`` in which any of its work runs, ns."""


def find_replays(trace: Trace) -> list[GraphReplay]:
    """Find every replay in the order of the calls, those without records too."""
    cpu, gpu = trace.cpu, trace.gpu
    calls = np.flatnonzero((cpu["call"] == "graph_launch").fill_null(False).to_numpy())
    if not len(calls) or gpu.is_empty():
        return []
    calls = calls[np.argsort(cpu["ts"].to_numpy()[calls], kind="stable")]
    launch = gpu["launch"].fill_null(-1).to_numpy().astype(np.int64)
    order = np.argsort(launch, kind="stable")
    low = np.searchsorted(launch[order], calls, side="left")
    high = np.searchsorted(launch[order], calls, side="right")
    names = gpu["name"].to_physical().fill_null(0).to_numpy().astype(np.int64)
    ts = gpu["ts"].to_numpy()
    end = ts + gpu["dur"].to_numpy()
    result = []
    for row, begin, stop in zip(calls.tolist(), low.tolist(), high.tolist(), strict=True):
        rows = order[begin:stop]  # rows are in order of ts
        span = int(end[rows].max() - ts[rows].min()) if len(rows) else 0
        busy = union(ts[rows], end[rows]).total
        result.append(GraphReplay(row, rows, names[rows], span, busy))
    return result


def missing_records(trace: Trace) -> tuple[int, int]:
    """Count device work that replays must have run, and how much of it is not in the recording.

    A replay lacks what another replay of its graph has in the same order, if it takes about as
    long. One that is compared with none lacks something where it idles: as many kernels of mean
    length as fit there. Calls after the last one that is recorded with its work may have been cut
    off by the end of the recording."""
    found = find_replays(trace)
    called, recorded = trace.cpu["ts"], trace.gpu["launch"].drop_nulls()
    last = int(called.gather(recorded).max() or 0) if len(recorded) else 0  # type: ignore[arg-type]
    if any(len(one.rows) for one in found):
        found = [one for one in found if len(one.rows) or called[one.row] < last]
    if not found:
        return 0, 0
    captured = None if trace.meta.capture is None else trace.meta.capture.launches
    kinds: dict[bytes, list[GraphReplay]] = {}
    for replay in found:
        kinds.setdefault(replay.names.tobytes(), []).append(replay)
    longest = sorted(kinds.values(), key=lambda group: -len(group[0].rows))
    expected = missing = 0
    typical = len(longest[0][0].rows)
    for place, group in enumerate(longest):
        one = group[0]
        whole = next((other[0] for other in longest[:place] if _lacks(one, other[0])), None)
        if not len(one.rows):
            lost = max(typical, 1) * len(group)
        elif whole is not None:
            lost = (len(whole.rows) - len(one.rows)) * len(group)
        elif captured is not None and len(found) == len(group):
            lost = max(0, captured - len(one.rows)) * len(group)
        else:
            lost = sum(_holes(trace, replay) for replay in group)
        missing += lost
        expected += lost + sum(len(replay.rows) for replay in group)
    return expected, missing


def _lacks(short: GraphReplay, whole: GraphReplay) -> bool:
    """Return whether the shorter replay is of the same graph and has lost records: its work comes
    in the same order, and without the rest it would have taken less time than it did."""
    if not 0 < len(short.rows) < len(whole.rows):
        return False
    if short.span < whole.span - (1 - KEPT) * (whole.busy - short.busy):
        return False
    rest = iter(whole.names.tolist())
    return all(name in rest for name in short.names.tolist())


def _holes(trace: Trace, replay: GraphReplay) -> int:
    """Count the kernels of mean length that fit where a replay idles. Before its first and after
    its last kernel, only time with work waiting in the queue of its stream counts."""
    cpu, gpu = trace.cpu, trace.gpu
    ts = gpu["ts"].to_numpy()
    end = ts + gpu["dur"].to_numpy()
    first, last = int(ts[replay.rows].min()), int(end[replay.rows].max())
    stream = (gpu["stream"] == gpu["stream"][int(replay.rows[0])]).fill_null(False).to_numpy()
    before = np.flatnonzero(stream & (end <= first))
    if len(before) and end[before].max() >= cpu["ts"][replay.row] + cpu["dur"][replay.row]:
        first = int(end[before].max())
    after = np.flatnonzero(stream & (ts >= last))
    if len(after) and (call := gpu["launch"][int(after[0])]) is not None and cpu["ts"][call] < last:
        last = int(ts[after[0]])
    idle = gaps(union(ts, end), first, last)
    length = idle.end - idle.start
    own = np.maximum(ts[replay.rows][1:] - end[replay.rows][:-1], 0)
    usual = min(float(np.median(own)) if len(own) else 0.0, USUAL_NS)
    edge = (idle.start < ts[replay.rows].min()) | (idle.end > end[replay.rows].max())
    holes = length[length > np.where(edge, EDGE_NS, max(HOLE_NS, HOLE * usual))]
    if usual > BACK_TO_BACK_NS and holes.sum() < HOLE_SHARE * (last - first):
        return 0
    mean = max(replay.busy / len(replay.rows), 1.0)
    return int(np.maximum(holes / mean, 1).sum())


# -- what a capture tells --------------------------------------------------------------------------


def captured_launches(capture: Trace) -> list[Ints]:
    """Return rows of ``capture.cpu`` that went into each captured graph, in order of time."""
    cpu = capture.cpu
    marks = np.flatnonzero((cpu["call"] == "graph_capture").fill_null(False).to_numpy())
    texts = cpu["name"].gather(marks).cast(pl.String)
    begin = marks[texts.str.contains("(?i)begin").to_numpy()]
    end = marks[texts.str.contains("(?i)end").to_numpy()]
    launching = cpu["call"].is_in(["launch", "memcpy", "memset"]).fill_null(False).to_numpy()
    ran = np.zeros(cpu.height, dtype=np.bool_)
    ran[capture.gpu["launch"].drop_nulls().to_numpy()] = True
    around = cpu["parent"].fill_null(-1).to_numpy()
    nested = (around >= 0) & launching[np.maximum(around, 0)]
    rows = np.flatnonzero(launching & ~ran & ~nested)
    ts = cpu["ts"].to_numpy()
    rows = rows[np.argsort(ts[rows], kind="stable")]
    result = []
    for first in begin.tolist():
        after = [int(ts[row]) for row in end.tolist() if ts[row] > ts[first]]
        stop = min(after) if after else np.iinfo(np.int64).max
        inside = rows[(ts[rows] > ts[first]) & (ts[rows] < stop)]
        if len(inside):
            result.append(inside)
    return result


def attach_capture(trace: Trace, capture: Trace) -> Trace:
    """Add the operators and frames around the launches of the capture to the trace, as rows of no
    length on a thread of their own; replayed work has the operator of its launch. Work and launches
    are paired in order; where their counts differ, by the longest runs of the same kinds of work.
    """
    graphs = captured_launches(capture)
    kinds = [_launch_kinds(capture, rows) for rows in graphs]
    work: list[Ints] = [np.zeros(0, dtype=np.int64)]
    launch: list[Ints] = [np.zeros(0, dtype=np.int64)]
    found = find_replays(trace)
    known: dict[bytes, tuple[Ints, Ints]] = {}
    for replay in found:
        key = replay.names.tobytes()
        if key not in known:
            names = trace.gpu["name"].gather(replay.rows).cast(pl.String)
            known[key] = _best(_work_kinds(names), graphs, kinds)
        places, rows = known[key]
        work.append(replay.rows[places])
        launch.append(rows)
    rows, launched = np.concatenate(work), np.concatenate(launch)
    total = sum(len(replay.rows) for replay in found)
    cpu, kept, place = _stacks(trace, capture, launched)
    is_op = (kept["kind"] == "op").to_numpy()
    parent = kept["parent"].fill_null(-1).cast(pl.Int64).to_numpy()
    op = climb_stack(parent, is_op, place[launched])
    ops = trace.gpu["op"].fill_null(-1).to_numpy().astype(np.int64).copy()
    ops[rows] = np.where(op >= 0, op + trace.cpu.height, -1)
    threads = pl.concat(
        [trace.threads, pl.DataFrame({"pid": [""], "tid": [""], "name": ["capture"]})]
    )
    described = Capture(
        trace.cpu.height,
        len(graphs[0]) if len(graphs) == 1 else None,
        len(rows) / total if total else 0.0,
    )
    return replace(
        trace,
        cpu=cpu,
        gpu=trace.gpu.with_columns(op=pl.Series(ops, dtype=pl.Int32).replace(-1, None)),
        inputs=pl.concat([trace.inputs, capture.inputs]),
        threads=threads.cast(trace.threads.schema),
        meta=replace(trace.meta, capture=described),
    )


def _stacks(
    trace: Trace, capture: Trace, launched: Ints
) -> tuple[pl.DataFrame, pl.DataFrame, Ints]:
    """Merge the host rows of both: of the capture the launches and all that they lie in; these
    alone, with rows of theirs as parents; and the place of each row of the capture among them."""
    parent = capture.cpu["parent"].fill_null(-1).cast(pl.Int64).to_numpy()
    wanted = np.zeros(capture.cpu.height, dtype=np.bool_)
    row = np.unique(launched)
    while len(row):
        wanted[row] = True
        row = np.unique(parent[row])
        row = row[row >= 0]
        row = row[~wanted[row]]
    place = np.cumsum(wanted) - 1
    rows = capture.cpu.filter(pl.Series(wanted))
    above = np.where(parent[wanted] >= 0, place[parent[wanted]], -1)
    at = int((trace.cpu["ts"]).max() or 0) if trace.cpu.height else 0  # type: ignore[arg-type]
    kept = rows.with_columns(
        ts=pl.lit(at, pl.Int64),
        dur=pl.lit(0, pl.Int64),
        thread=pl.lit(trace.threads.height, pl.Int32),
        parent=pl.Series(above, dtype=pl.Int32).replace(-1, None),
        call=pl.lit(None, rows["call"].dtype),
        correlation=pl.lit(None, pl.Int64),
        external=pl.lit(None, pl.Int64),
        inputs=pl.col("inputs") + trace.inputs.height,
        comm=pl.lit(None, pl.Int32),
    )
    moved = kept.with_columns(pl.col("parent") + trace.cpu.height)
    return pl.concat([trace.cpu, moved.cast(trace.cpu.schema)]), kept, place


def _work_kinds(names: pl.Series) -> list[str]:
    """Return the family of each kernel, by its name; copies by theirs."""
    described = describe_kernels(names)
    return [str(family) for family in described["family"].cast(pl.String)]


def _launch_kinds(capture: Trace, rows: Ints) -> list[str]:
    """Return the family of each captured launch's work, by the operators around it."""
    cpu = capture.cpu
    parent = cpu["parent"].fill_null(-1).cast(pl.Int64).to_numpy()
    ops = np.flatnonzero((cpu["kind"] == "op").to_numpy())
    names = cpu["name"].gather(ops).cast(pl.String)
    by_op = op_families(names).cast(pl.String)
    # Inductor's wrapper records a kernel as an operator of the kernel's name
    by_kernel = (
        describe_kernels(names)["family"].cast(pl.String).set(~names.str.contains("^triton_"), None)
    )
    family = by_op.zip_with(by_op.is_not_null(), by_kernel).fill_null("")
    known = np.zeros(cpu.height, dtype=np.bool_)
    known[ops] = (family != "").to_numpy()
    nearest = climb_stack(parent, known, rows)
    table = dict(zip(ops.tolist(), family.to_list(), strict=True))
    return [table.get(row, "") for row in nearest.tolist()]


def _best(work: list[str], graphs: list[Ints], kinds: list[list[str]]) -> tuple[Ints, Ints]:
    """Find the graph that fits a replay best: places in the replay, and the launches there."""
    best: tuple[float, Ints, Ints] = (0.0, np.zeros(0, np.int64), np.zeros(0, np.int64))
    for rows, described in zip(graphs, kinds, strict=True):
        if len(rows) == len(work):
            places = lines = np.arange(len(rows))
        else:
            blocks = SequenceMatcher(None, work, described, autojunk=False).get_matching_blocks()
            places = np.concatenate([np.arange(b.a, b.a + b.size) for b in blocks])
            lines = np.concatenate([np.arange(b.b, b.b + b.size) for b in blocks])
        pairs = zip(places.tolist(), lines.tolist(), strict=True)
        fits = sum(described[j] in ("", work[i]) or work[i] == "other" for i, j in pairs)
        score = fits / max(len(rows), len(work))
        if score > best[0]:
            best = score, places.astype(np.int64), rows[lines]
    return best[1], best[2]
