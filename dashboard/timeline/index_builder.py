"""A rank's lane index, built from its measurements."""

import re
from dataclasses import replace
from typing import Any

import numpy as np
import polars as pl
from numpy.typing import NDArray

from advisor.core import text as t
from advisor.core.text import cause_label, host_label
from advisor.core.trace import CALLS, LOADER
from advisor.dashboard.timeline.counters import counter_series
from advisor.dashboard.timeline.detail_levels import (
    ACTIVITY,
    COPIES,
    HOST,
    IDLE,
    KERNELS,
    PHASES,
    STEPS,
    SYNCS,
)
from advisor.dashboard.timeline.index import CategorySet, IndexBuilder, TimelineIndex
from advisor.measure import Analysis
from advisor.measure.host.gaps import CAUSES, is_outside_operators
from advisor.measure.host.names import map_names, name_matches
from advisor.measure.host.op_tree import MODULE
from advisor.measure.host.stacks import frame_rank, parent_rows
from advisor.measure.steps.steps import rename_step_mark
from advisor.measure.steps.timeline import CLASSES, CODE

FOLD_BEYOND = 2
"""Number of threads after which the others start collapsed."""
MAX_THREADS = 256

_CALL_SLOT = {
    "launch": "host-launch", "graph_launch": "host-launch", "memcpy": "host-launch",
    "memset": "host-launch", "memcpy_blocking": "host-copy", "sync_device": "host-sync",
    "sync_stream": "host-sync", "sync_event": "host-sync", "malloc": "host-allocation",
    "free": "host-allocation", "host_alloc": "host-allocation", "host_free": "host-allocation",
    "module_load": "host-load", "graph_capture": "host-load",
}  # fmt: skip
_PHASE = (
    ("phase-data", r"(?i)^advisor::data|^enumerate\(Data(?:Loader|Pipe)\)#|load_batch|data_?load"),
    ("phase-h2d", r"(?i)^advisor::h2d|copy_batch_to|to_device"),
    ("phase-forward", r"(?i)\bforward\b"),
    ("phase-backward", r"(?i)\bbackward\b"),
    ("phase-optimizer", r"(?i)^advisor::optimizer|^Optimizer\.|\boptimi[sz]er\b"),
)


def _slot(part: CategorySet, key: str) -> int:
    return next(i for i, category in enumerate(part) if category.key == key)


def build_index(a: Analysis, *, libraries: bool = True) -> TimelineIndex:
    """Build every lane of a rank's window. A fraction of a second for a million events.

    ``libraries``: with the frames of libraries in the call stacks of Python."""
    b = IndexBuilder(str if a.trace.meta.step_marks is None else rename_step_mark)
    if a.record_only:
        _recorded(b, a)
    _steps(b, a)
    _phases(b, a)
    _idle(b, a)
    _streams(b, a)
    _sync(b, a)
    _threads(b, a, libraries=libraries)
    _overhead(b, a)
    _tell_what_is_missing(b, a)
    index = b.index(counter_series(a))
    return replace(
        index,
        slice_of_row=_places(index, a),
        framework=a.trace.meta.framework,
        outside=is_outside_operators(a),
    )


def _places(index: TimelineIndex, a: Analysis) -> dict[str, NDArray[np.int32]]:
    """Return the slice that draws each row of a table (device work: on its stream)."""
    place: dict[str, NDArray[np.int32]] = {
        "cpu": np.full(a.trace.cpu.height, -1, dtype=np.int32),
        "gpu": np.full(a.trace.gpu.height, -1, dtype=np.int32),
    }
    for lane in index.lanes:
        kind = index.groups[lane.group].kind
        if lane.source in place and kind in ("stream", "thread", "overhead"):
            place[lane.source][index.row[lane.lo : lane.hi]] = np.arange(lane.lo, lane.hi)
    return place


def _steps(b: IndexBuilder, a: Analysis) -> None:
    table = a.steps.table
    if a.steps.source == "whole trace" or table.is_empty():
        return
    rows = np.arange(table.height)
    slot = np.where(table["used"].to_numpy(), 0, _slot(STEPS, "step-aside"))
    columns = (
        table["ts"].to_numpy(), table["end"].to_numpy(), b.names.column(table["name"]), slot, rows,
    )  # fmt: skip
    b.tracks("steps", "Steps", "steps", "steps", STEPS, columns)


def _recorded(b: IndexBuilder, a: Analysis) -> None:
    """Add the steps as the recorder timed them, from the first one; for runs without a window."""
    if a.recorded is None or not a.recorded.steps:
        return
    start = a.recorded.ts - a.recorded.ts.min()
    slot = np.where(a.recorded.used, 0, _slot(STEPS, "step-aside"))
    labels = pl.Series([f"step {step.n}" for step in a.recorded.steps], dtype=pl.String)
    columns = (start, start + a.recorded.dur, b.names.column(labels), slot, np.arange(len(start)))
    b.tracks("recorded", "Recorded steps", "steps", "recorded", STEPS, columns)


def _phases(b: IndexBuilder, a: Analysis) -> None:
    """Add the recorder's phases; without them the outermost ranges of the main thread."""
    cpu = a.trace.cpu
    if cpu.is_empty() or a.trace.main_thread is None:
        return
    on_main = (cpu["thread"] == a.trace.main_thread).to_numpy()
    marks = on_main & name_matches(cpu["name"], r"^advisor::").to_numpy()
    marks &= ~name_matches(cpu["name"], r"^advisor::step\b").to_numpy()
    if not marks.any():
        ranges = (cpu["kind"] == "annotation") | name_matches(
            cpu["name"], r"^Optimizer\.|^enumerate\(|^DistributedDataParallel\."
        )
        marks = on_main & ranges.to_numpy()
        marks &= ~name_matches(cpu["name"], a.trace.meta.step_names).to_numpy()
        # the outermost only: what lies in another range is in the thread's own lanes
        rows = np.flatnonzero(marks)
        end = (cpu["ts"].gather(rows) + cpu["dur"].gather(rows)).to_numpy()
        latest_end = np.maximum.accumulate(np.append(np.int64(-1) << 62, end))[:-1]
        marks[rows[end <= latest_end]] = False
    rows = np.flatnonzero(marks)
    table = cpu[rows]
    slot = np.full(len(rows), _slot(PHASES, "phase-other"), dtype=np.uint8)
    for key, pattern in _PHASE:
        slot[name_matches(table["name"], pattern).to_numpy()] = _slot(PHASES, key)
    start = table["ts"].to_numpy()
    labels = table["name"].cast(pl.String).str.strip_prefix("advisor::")
    columns = (start, start + table["dur"].to_numpy(), b.names.column(labels), slot, rows)
    b.tracks("phases", "Phases", "phases", "cpu", PHASES, columns)


def _idle(b: IndexBuilder, a: Analysis) -> None:
    gaps = a.gaps
    if gaps.is_empty():
        return
    slot = gaps["cause"].to_physical().to_numpy()
    framework = a.trace.meta.framework
    labels = np.array(
        [
            b.names.number_of(cause_label(cause, framework, outside=is_outside_operators(a)))
            for cause in CAUSES
        ],
        dtype=np.uint32,
    )
    start = gaps["ts"].to_numpy()
    columns = (start, start + gaps["dur"].to_numpy(), labels[slot], slot, np.arange(gaps.height))
    b.tracks("gaps", "GPU idle, by cause", "idle", "gaps", IDLE, columns)
    # where a step is set aside nothing is known of its idle time: it is no step without any
    aside = a.steps.table.with_row_index("row").filter(~pl.col("used"))
    if a.steps.source != "whole trace" and aside.height:
        name = np.full(aside.height, b.names.number_of("idle time not analysed"), dtype=np.uint32)
        slots = np.full(aside.height, _slot(STEPS, "step-aside"))
        ends = aside["ts"].to_numpy(), aside["end"].to_numpy()
        columns = (*ends, name, slots, aside["row"].to_numpy())
        b.tracks("not-analysed", "Not analysed", "idle", "steps", STEPS, columns)


def _streams(b: IndexBuilder, a: Analysis) -> None:
    """Add each stream of each device, then collectives and copies once more on their own."""
    gpu = a.trace.gpu
    if gpu.is_empty():
        return
    start = gpu["ts"].to_numpy()
    end = start + gpu["dur"].to_numpy()
    name = b.names.column(gpu["name"])
    slot = a.kernels["family"].to_physical().to_numpy().astype(np.uint8)
    streams = (
        gpu.with_row_index("row")
        .group_by("device", "stream")
        .agg(pl.col("row"), pl.col("dur").sum())
        .with_columns((pl.col("device") == a.device_id).alias("mine"))
        .sort(["mine", "device", "dur"], descending=[True, False, True], nulls_last=True)
    )
    # a loop over streams, of which there are a few
    for device, stream, rows_of in streams.select("device", "stream", "row").iter_rows():
        rows = np.array(rows_of, dtype=np.int64)
        label = (
            f"GPU {'?' if device is None else device} · stream {'?' if stream is None else stream}"
        )
        columns = (start[rows], end[rows], name[rows], slot[rows], rows)
        b.tracks(f"stream:{device}:{stream}", label, "stream", "gpu", KERNELS, columns)
    rows = np.flatnonzero(a.kernels["communication"].to_numpy())
    columns = (start[rows], end[rows], name[rows], slot[rows], rows)
    b.tracks("collectives", "Collectives", "collectives", "gpu", KERNELS, columns)
    rows = np.flatnonzero((gpu["kind"] != "kernel").to_numpy())
    columns = (start[rows], end[rows], name[rows], _copy_slots(gpu[rows]), rows)
    b.tracks("copies", "Copies and memsets", "copies", "gpu", COPIES, columns)


def _copy_slots(table: pl.DataFrame) -> NDArray[np.uint8]:
    pageable = (
        table["src"].is_in(["Pageable"]).fill_null(False)
        | table["dst"].is_in(["Pageable"]).fill_null(False)
    ).to_numpy()
    slot = np.full(table.height, _slot(COPIES, "copy-other"), dtype=np.uint8)
    for copy, key in (
        ("HtoD", "copy-htod"),
        ("DtoH", "copy-dtoh"),
        ("DtoD", "copy-dtod"),
        ("PtoP", "copy-ptop"),
    ):
        mask = (table["copy"] == copy).fill_null(False).to_numpy()
        slot[mask] = _slot(COPIES, key)
        if copy in ("HtoD", "DtoH"):
            slot[mask & pageable] = _slot(COPIES, f"{key}-pageable")
    slot[(table["kind"] == "memset").to_numpy()] = _slot(COPIES, "copy-memset")
    return slot


def _sync(b: IndexBuilder, a: Analysis) -> None:
    sync = a.trace.sync
    if sync.is_empty():
        return
    start = sync["ts"].to_numpy()
    slot = sync["kind"].to_physical().fill_null(0).to_numpy()
    texts = [category.label for category in SYNCS]
    labels = np.array([b.names.number_of(text) for text in texts], dtype=np.uint32)
    columns = (start, start + sync["dur"].to_numpy(), labels[slot], slot, np.arange(sync.height))
    b.tracks("sync", "CUDA synchronizations", "sync", "sync", SYNCS, columns, folded=True)


def _host_slots(a: Analysis) -> NDArray[np.uint8]:
    cpu = a.trace.cpu
    kind = cpu["kind"]
    slot = np.full(cpu.height, _slot(HOST, "host-op"), dtype=np.uint8)
    slot[(kind == "annotation").to_numpy()] = _slot(HOST, "host-range")
    slot[(kind == "overhead").to_numpy()] = _slot(HOST, "host-overhead")
    python = (kind == "python").to_numpy()
    if python.any():
        slot[python] = _slot(HOST, "host-python")
        users = map_names(cpu["name"].filter(pl.Series(python)), frame_rank, pl.Int8)
        slot[np.flatnonzero(python)[(users == 2).to_numpy()]] = _slot(HOST, "host-user")
    calls = np.full(len(CALLS) + 1, _slot(HOST, "host-call"), dtype=np.uint8)
    for call, key in _CALL_SLOT.items():
        calls[CALLS.index(call)] = _slot(HOST, key)
    runtime = (kind == "runtime").to_numpy()
    code = cpu["call"].to_physical().fill_null(len(CALLS)).to_numpy()
    slot[runtime] = calls[code[runtime]]
    loader = name_matches(cpu["name"], LOADER).to_numpy() & ~runtime
    slot[loader] = _slot(HOST, "host-loader")
    return slot


def _threads(b: IndexBuilder, a: Analysis, *, libraries: bool) -> None:
    """Add each host thread: what it was doing in one lane, then its calls, a lane a depth."""
    cpu = a.trace.cpu
    wanted = (cpu["kind"] != "overhead").to_numpy()
    deep = cpu["depth"].to_numpy()
    if not libraries:
        hidden = library_frames(a)
        wanted = wanted & ~hidden
        deep = depth_without(a, hidden)
    included = np.flatnonzero(wanted)
    if not len(included):
        return
    name, slot = b.names.column(cpu["name"]), _host_slots(a)
    start = cpu["ts"].to_numpy()
    end = start + cpu["dur"].to_numpy()
    thread = cpu["thread"].to_numpy()[included]
    depth = deep[included]
    _, lane = np.unique(thread.astype(np.int64) << 16 | depth, return_inverse=True)
    if len(lane) and lane.max() < 1 << 16:
        lane = lane.astype(np.uint16)  # 16 bits are sorted by radix, several times as fast
    order = included[np.argsort(lane, kind="stable")]
    threads, first = np.unique(cpu["thread"].to_numpy()[order], return_index=True)
    last = np.append(first[1:], len(order))
    doing = _activity(b, a)
    main = a.trace.main_thread
    busy = sorted(range(len(threads)), key=lambda i: (threads[i] != main, first[i] - last[i]))
    if len(busy) > MAX_THREADS:
        b.notes.append(f"{len(busy) - MAX_THREADS} threads with the fewest events are not shown")
    # a loop over threads and depths, of which there are tens
    for shown, i in enumerate(busy[:MAX_THREADS]):
        number = int(threads[i])
        rows = order[first[i] : last[i]]
        level = deep[rows]
        cuts = np.flatnonzero(np.diff(level)) + 1
        parts: list[Any] = [doing[number]] if number in doing else []
        parts += [
            ("cpu", HOST, start[part], end[part], name[part], slot[part], part)
            for part in np.split(rows, cuts)
        ]
        label = _thread_label(a, number)
        folded = shown >= FOLD_BEYOND or (len(rows) < 1000 and number != main)
        b.group(f"thread:{number}", label, "thread", parts, folded=bool(folded))


def _thread_label(a: Analysis, number: int) -> str:
    _, tid, name = a.trace.threads.row(number)
    if name is None or re.match(rf"thread {re.escape(str(tid))}\b", str(name)):
        name = f"thread {tid}"
    text = str(name)[:60]
    return f"Main {text}" if number == a.trace.main_thread else t.upper_first(text)


def _activity(b: IndexBuilder, a: Analysis) -> dict[int, Any]:
    """Return a lane per thread of what it was doing, each instant once (``Analysis.timeline``)."""
    line = a.timeline
    # pieces of one class in a row are one piece; the first names the event
    code, owner = line.code, line.thread
    fresh = np.ones(len(code), dtype=bool)
    fresh[1:] = (code[1:] != code[:-1]) | (owner[1:] != owner[:-1])
    pieces = np.flatnonzero(fresh)
    owner, code, start, row = owner[pieces], code[pieces], line.start[pieces], line.row[pieces]
    end = line.end[np.append(pieces[1:] - 1, len(line.code) - 1)] if len(pieces) else start
    recorded = code != CODE["unrecorded"]
    owner, code, start, end, row = (c[recorded] for c in (owner, code, start, end, row))
    framework = a.trace.meta.framework
    labels = np.array(
        [b.names.number_of(host_label(name, framework)) for name in CLASSES], dtype=np.uint32
    )
    lanes = {}
    for number in np.unique(owner).tolist():
        lo, hi = np.searchsorted(owner, [number, number + 1])
        pieces = np.arange(lo, hi)
        lanes[number] = (
            "activity", ACTIVITY, start[pieces], end[pieces], labels[code[pieces]], code[pieces],
            row[pieces],
        )  # fmt: skip
    return lanes


def _overhead(b: IndexBuilder, a: Analysis) -> None:
    cpu = a.trace.cpu
    rows = np.flatnonzero((cpu["kind"] == "overhead").to_numpy())
    table = cpu[rows]
    start = table["ts"].to_numpy()
    slot = np.full(len(rows), _slot(HOST, "host-overhead"), dtype=np.uint8)
    columns = (start, start + table["dur"].to_numpy(), b.names.column(table["name"]), slot, rows)
    b.tracks("overhead", "Profiler overhead", "overhead", "cpu", HOST, columns, folded=True)


def _tell_what_is_missing(b: IndexBuilder, a: Analysis) -> None:
    """Note each kind of lane that the trace has nothing for, a line each."""
    if a.record_only:
        b.notes.append("No window was profiled: only recorded steps and samples are shown.")
        return
    host = (a.trace.cpu["kind"] != "overhead").any()
    if a.trace.gpu.is_empty():
        b.notes.append("The trace has no GPU work: no streams, copies, collectives or idle gaps.")
    if not host:
        b.notes.append("The trace has no host events: no threads, and idle gaps have no cause.")
    if a.steps.source == "whole trace":
        b.notes.append("No steps are marked: the trace counts as one window.")
    if host and not (a.trace.cpu["kind"] == "python").any():
        b.notes.append("Recorded without Python stacks: your lines of code are unknown.")
    if a.trace.meta.truncated:
        b.notes.append("The file is cut off: the end of the run is missing.")


OWN = 2
"""Value of ``frame_rank`` for the user's own code."""


def library_frames(a: Analysis) -> NDArray[np.bool_]:
    """Aligned with ``trace.cpu``: frames of Python of PyTorch, the standard library and installed
    packages, and built-in functions."""
    cpu = a.trace.cpu
    mask = (cpu["kind"] == "python").to_numpy().copy()
    rows = np.flatnonzero(mask)
    if len(rows):
        hidden = map_names(
            cpu["name"].gather(rows),
            lambda name: frame_rank(name) != OWN and not name.startswith(MODULE),
            pl.Boolean,
        )
        mask[rows] = hidden.to_numpy()
    return mask


def depth_without(a: Analysis, hidden: NDArray[np.bool_]) -> NDArray[np.int64]:
    """Aligned with ``trace.cpu``: how deep each row is when rows of the mask are not there."""
    parent = parent_rows(a.trace)
    depth = a.trace.cpu["depth"].to_numpy().astype(np.int64)
    above = np.zeros(len(depth), dtype=np.int64)
    order = np.argsort(depth, kind="stable")
    # a loop over levels, of which there are tens: a row's parent is on one before its own
    for rows in np.split(order, np.flatnonzero(np.diff(depth[order])) + 1):
        nested = rows[parent[rows] >= 0]
        above[nested] = above[parent[nested]] + hidden[parent[nested]]
    remaining: NDArray[np.int64] = np.maximum(depth - above, 0)
    return remaining
