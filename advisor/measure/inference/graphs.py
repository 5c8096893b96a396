"""CUDA and HIP graphs: replays with incomplete records, and kernels that a capture names.

A replay is one call and many kernels, which have neither operator nor shape. A trace of the capture
has both for its launches, which run nothing: the n-th captured launch is the n-th kernel of a
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

MIN_HOLE_NS, MAX_USUAL_NS = 1_000, 2_000
MIN_HOLE_FACTOR = 20
"""Minimum idle time in a replay that shows missing records: longer than ``MIN_HOLE_NS`` and
``MIN_HOLE_FACTOR`` times the usual gap between its kernels (median, at most ``MAX_USUAL_NS``).
Nothing on the host can delay a graph. In public traces its kernels are 0 to 1 µs apart (median), on
MI300X 0 ns, and a hundredth of the gaps takes 26 times as long."""
MIN_EDGE_NS = 50_000
"""Minimum idle time before and after a replay, ns: an MI300X takes some 10 µs to start a graph."""
MAX_BACK_TO_BACK_NS = 100
"""Maximum usual gap at which every hole counts; otherwise the holes need ``MIN_HOLE_SHARE``."""
MIN_HOLE_SHARE = 0.1
"""Minimum share of holes in a replay. Complete replays of four public traces idle for up to 7%."""
MIN_TIME_SHARE = 0.5
"""Minimum share of the missing kernels' time that the shorter replay still takes if they ran.
"""


class GraphReplay(NamedTuple):
    """A call that launched a graph, and its device work."""

    row: int
    """Row of the call in ``trace.cpu``."""
    rows: Ints
    """Rows of its work in ``trace.gpu``, in order of time."""
    names: Ints
    """Name code of each piece of work."""
    span: int
    """Time from the first start to the last end, ns."""
    busy: int
    """Time in ``span`` during which any of its work runs, ns."""


def find_replays(trace: Trace) -> list[GraphReplay]:
    """Find every replay in the order of the calls, including replays without records."""
    cpu, gpu = trace.cpu, trace.gpu
    calls = np.flatnonzero((cpu["call"] == "graph_launch").fill_null(False).to_numpy())
    if not len(calls) or gpu.is_empty():
        return []
    calls = calls[np.argsort(cpu["ts"].to_numpy()[calls], kind="stable")]
    launch = gpu["launch"].fill_null(-1).to_numpy().astype(np.int64)
    order = np.argsort(launch, kind="stable")
    first = np.searchsorted(launch[order], calls, side="left")
    last = np.searchsorted(launch[order], calls, side="right")
    names = gpu["name"].to_physical().fill_null(0).to_numpy().astype(np.int64)
    ts = gpu["ts"].to_numpy()
    end = ts + gpu["dur"].to_numpy()
    result = []
    for row, start, stop in zip(calls.tolist(), first.tolist(), last.tolist(), strict=True):
        rows = order[start:stop]  # rows are in order of ts
        span = int(end[rows].max() - ts[rows].min()) if len(rows) else 0
        busy = union(ts[rows], end[rows]).total
        result.append(GraphReplay(row, rows, names[rows], span, busy))
    return result


def count_missing_records(trace: Trace) -> tuple[int, int]:
    """Count the device work that replays must have run, and how much of it is not in the recording.

    A replay lacks kernels that another replay of its graph has in the same order, if it takes about
    as long. A replay without a longer one lacks kernels where it idles, as many of mean length as
    fit there. Calls after the last one with recorded work may have been cut off by the end of the
    recording."""
    replays = find_replays(trace)
    call_ts, with_work = trace.cpu["ts"], trace.gpu["launch"].drop_nulls()
    last_call = int(call_ts.gather(with_work).max() or 0) if len(with_work) else 0  # type: ignore[arg-type]
    if any(len(example.rows) for example in replays):
        replays = [
            example for example in replays if len(example.rows) or call_ts[example.row] < last_call
        ]
    if not replays:
        return 0, 0
    captured = None if trace.meta.capture is None else trace.meta.capture.launches
    groups_by_names: dict[bytes, list[GraphReplay]] = {}
    for replay in replays:
        groups_by_names.setdefault(replay.names.tobytes(), []).append(replay)
    longest = sorted(groups_by_names.values(), key=lambda group: -len(group[0].rows))
    expected = missing = 0
    typical = len(longest[0][0].rows)
    for index, group in enumerate(longest):
        example = group[0]
        complete = next(
            (other[0] for other in longest[:index] if _lacks_records(example, other[0])), None
        )
        if not len(example.rows):
            lost_kernels = max(typical, 1) * len(group)
        elif complete is not None:
            lost_kernels = (len(complete.rows) - len(example.rows)) * len(group)
        elif captured is not None and len(replays) == len(group):
            lost_kernels = max(0, captured - len(example.rows)) * len(group)
        else:
            lost_kernels = sum(_count_missing(trace, replay) for replay in group)
        missing += lost_kernels
        expected += lost_kernels + sum(len(replay.rows) for replay in group)
    return expected, missing


def _lacks_records(short: GraphReplay, complete: GraphReplay) -> bool:
    """Return whether the shorter replay is of the same graph and has lost records: its work is in
    the same order, and it took longer than it would have without the missing work."""
    if not 0 < len(short.rows) < len(complete.rows):
        return False
    if short.span < complete.span - (1 - MIN_TIME_SHARE) * (complete.busy - short.busy):
        return False
    remaining = iter(complete.names.tolist())
    return all(name in remaining for name in short.names.tolist())


def _count_missing(trace: Trace, replay: GraphReplay) -> int:
    """Count the kernels of mean length that fit into a replay's idle time. Before its first and
    after its last kernel, only time with queued work on its stream counts."""
    cpu, gpu = trace.cpu, trace.gpu
    ts = gpu["ts"].to_numpy()
    end = ts + gpu["dur"].to_numpy()
    start, stop = int(ts[replay.rows].min()), int(end[replay.rows].max())
    on_stream = (gpu["stream"] == gpu["stream"][int(replay.rows[0])]).fill_null(False).to_numpy()
    earlier = np.flatnonzero(on_stream & (end <= start))
    if len(earlier) and end[earlier].max() >= cpu["ts"][replay.row] + cpu["dur"][replay.row]:
        start = int(end[earlier].max())
    later = np.flatnonzero(on_stream & (ts >= stop))
    if len(later) and (call := gpu["launch"][int(later[0])]) is not None and cpu["ts"][call] < stop:
        stop = int(ts[later[0]])
    idle = gaps(union(ts, end), start, stop)
    length = idle.end - idle.start
    kernel_gaps = np.maximum(ts[replay.rows][1:] - end[replay.rows][:-1], 0)
    usual_gap = min(float(np.median(kernel_gaps)) if len(kernel_gaps) else 0.0, MAX_USUAL_NS)
    is_edge = (idle.start < ts[replay.rows].min()) | (idle.end > end[replay.rows].max())
    hole_lengths = length[
        length > np.where(is_edge, MIN_EDGE_NS, max(MIN_HOLE_NS, MIN_HOLE_FACTOR * usual_gap))
    ]
    if usual_gap > MAX_BACK_TO_BACK_NS and hole_lengths.sum() < MIN_HOLE_SHARE * (stop - start):
        return 0
    mean = max(replay.busy / len(replay.rows), 1.0)
    return int(np.maximum(hole_lengths / mean, 1).sum())


# -- the contents of a capture
# --------------------------------------------------------------------------


def captured_launches(capture: Trace) -> list[Ints]:
    """Return the rows of ``capture.cpu`` in each captured graph, in order of time."""
    cpu = capture.cpu
    marks = np.flatnonzero((cpu["call"] == "graph_capture").fill_null(False).to_numpy())
    texts = cpu["name"].gather(marks).cast(pl.String)
    starts = marks[texts.str.contains("(?i)begin").to_numpy()]
    ends = marks[texts.str.contains("(?i)end").to_numpy()]
    is_launch = cpu["call"].is_in(["launch", "memcpy", "memset"]).fill_null(False).to_numpy()
    has_run = np.zeros(cpu.height, dtype=np.bool_)
    has_run[capture.gpu["launch"].drop_nulls().to_numpy()] = True
    parents = cpu["parent"].fill_null(-1).to_numpy()
    is_nested = (parents >= 0) & is_launch[np.maximum(parents, 0)]
    rows = np.flatnonzero(is_launch & ~has_run & ~is_nested)
    ts = cpu["ts"].to_numpy()
    rows = rows[np.argsort(ts[rows], kind="stable")]
    result = []
    for first in starts.tolist():
        later_ends = [int(ts[row]) for row in ends.tolist() if ts[row] > ts[first]]
        stop = min(later_ends) if later_ends else np.iinfo(np.int64).max
        captured = rows[(ts[rows] > ts[first]) & (ts[rows] < stop)]
        if len(captured):
            result.append(captured)
    return result


def attach_capture(trace: Trace, capture: Trace) -> Trace:
    """Add the operators and frames around the launches of the capture to the trace, as rows of zero
    length on a separate thread. Replayed work gets the operator of its launch. Work and launches
    are paired in order, or if their counts differ, by the longest runs of the same kinds of work.
    """
    graphs = captured_launches(capture)
    kinds = [_find_launch_families(capture, rows) for rows in graphs]
    work: list[Ints] = [np.zeros(0, dtype=np.int64)]
    launch: list[Ints] = [np.zeros(0, dtype=np.int64)]
    replays = find_replays(trace)
    matches: dict[bytes, tuple[Ints, Ints]] = {}
    for replay in replays:
        key = replay.names.tobytes()
        if key not in matches:
            names = trace.gpu["name"].gather(replay.rows).cast(pl.String)
            matches[key] = _match_graph(_find_work_families(names), graphs, kinds)
        indices, rows = matches[key]
        work.append(replay.rows[indices])
        launch.append(rows)
    rows, launched = np.concatenate(work), np.concatenate(launch)
    total = sum(len(replay.rows) for replay in replays)
    cpu, kept, place = _merge_stacks(trace, capture, launched)
    is_op = (kept["kind"] == "op").to_numpy()
    parent = kept["parent"].fill_null(-1).cast(pl.Int64).to_numpy()
    op = climb_stack(parent, is_op, place[launched])
    ops = trace.gpu["op"].fill_null(-1).to_numpy().astype(np.int64).copy()
    ops[rows] = np.where(op >= 0, op + trace.cpu.height, -1)
    threads = pl.concat(
        [trace.threads, pl.DataFrame({"pid": [""], "tid": [""], "name": ["capture"]})]
    )
    description = Capture(
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
        meta=replace(trace.meta, capture=description),
    )


def _merge_stacks(
    trace: Trace, capture: Trace, launched: Ints
) -> tuple[pl.DataFrame, pl.DataFrame, Ints]:
    """Merge the host rows of both traces, using the captured launches and their ancestors. Return
    the merged rows; the capture's rows alone, with parents among themselves; and the index of each
    row of the capture among them."""
    parent = capture.cpu["parent"].fill_null(-1).cast(pl.Int64).to_numpy()
    is_needed = np.zeros(capture.cpu.height, dtype=np.bool_)
    frontier = np.unique(launched)
    while len(frontier):
        is_needed[frontier] = True
        frontier = np.unique(parent[frontier])
        frontier = frontier[frontier >= 0]
        frontier = frontier[~is_needed[frontier]]
    new_index = np.cumsum(is_needed) - 1
    rows = capture.cpu.filter(pl.Series(is_needed))
    parents = np.where(parent[is_needed] >= 0, new_index[parent[is_needed]], -1)
    last_ts = int((trace.cpu["ts"]).max() or 0) if trace.cpu.height else 0  # type: ignore[arg-type]
    captured = rows.with_columns(
        ts=pl.lit(last_ts, pl.Int64),
        dur=pl.lit(0, pl.Int64),
        thread=pl.lit(trace.threads.height, pl.Int32),
        parent=pl.Series(parents, dtype=pl.Int32).replace(-1, None),
        call=pl.lit(None, rows["call"].dtype),
        correlation=pl.lit(None, pl.Int64),
        external=pl.lit(None, pl.Int64),
        inputs=pl.col("inputs") + trace.inputs.height,
        comm=pl.lit(None, pl.Int32),
    )
    moved = captured.with_columns(pl.col("parent") + trace.cpu.height)
    return pl.concat([trace.cpu, moved.cast(trace.cpu.schema)]), captured, new_index


def _find_work_families(names: pl.Series) -> list[str]:
    """Return the family of each kernel or copy, by its name."""
    described = describe_kernels(names)
    return [str(family) for family in described["family"].cast(pl.String)]


def _find_launch_families(capture: Trace, rows: Ints) -> list[str]:
    """Return the family of each captured launch's work, from the operators around it."""
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
    has_family = np.zeros(cpu.height, dtype=np.bool_)
    has_family[ops] = (family != "").to_numpy()
    nearest = climb_stack(parent, has_family, rows)
    table = dict(zip(ops.tolist(), family.to_list(), strict=True))
    return [table.get(row, "") for row in nearest.tolist()]


def _match_graph(work: list[str], graphs: list[Ints], kinds: list[list[str]]) -> tuple[Ints, Ints]:
    """Find the graph that fits a replay best: indices in the replay, and their launches."""
    best: tuple[float, Ints, Ints] = (0.0, np.zeros(0, np.int64), np.zeros(0, np.int64))
    for rows, families in zip(graphs, kinds, strict=True):
        if len(rows) == len(work):
            indices = lines = np.arange(len(rows))
        else:
            blocks = SequenceMatcher(None, work, families, autojunk=False).get_matching_blocks()
            indices = np.concatenate([np.arange(block.a, block.a + block.size) for block in blocks])
            lines = np.concatenate([np.arange(block.b, block.b + block.size) for block in blocks])
        pairs = zip(indices.tolist(), lines.tolist(), strict=True)
        matching = sum(families[j] in ("", work[i]) or work[i] == "other" for i, j in pairs)
        score = matching / max(len(rows), len(work))
        if score > best[0]:
            best = score, indices.astype(np.int64), rows[lines]
    return best[1], best[2]
