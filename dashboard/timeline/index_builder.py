"""Builder of a rank's timeline index from its measurements."""

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
    ACTIVITY_CATEGORIES,
    COPY_CATEGORIES,
    HOST_CATEGORIES,
    IDLE_CATEGORIES,
    KERNEL_CATEGORIES,
    PHASE_CATEGORIES,
    STEP_CATEGORIES,
    SYNC_CATEGORIES,
)
from advisor.dashboard.timeline.index import CategorySet, IndexBuilder, TimelineIndex
from advisor.measure import Analysis
from advisor.measure.host.gaps import CAUSES, is_outside_operators
from advisor.measure.host.names import map_names, name_matches
from advisor.measure.host.op_tree import MODULE
from advisor.measure.host.stacks import CodeOwner, code_owner, parent_rows
from advisor.measure.steps.steps import rename_step_mark
from advisor.measure.steps.timeline import CLASS_CODE, CLASSES

MAX_OPEN_THREADS = 2
"""Number of threads that start expanded."""
MAX_THREADS = 256

_CALL_CATEGORIES = {
    "launch": "host-launch", "graph_launch": "host-launch", "memcpy": "host-launch",
    "memset": "host-launch", "memcpy_blocking": "host-copy", "sync_device": "host-sync",
    "sync_stream": "host-sync", "sync_event": "host-sync", "malloc": "host-allocation",
    "free": "host-allocation", "host_alloc": "host-allocation", "host_free": "host-allocation",
    "module_load": "host-load", "graph_capture": "host-load",
}  # fmt: skip
_PHASE_PATTERNS = (
    ("phase-data", r"(?i)^advisor::data|^enumerate\(Data(?:Loader|Pipe)\)#|load_batch|data_?load"),
    ("phase-h2d", r"(?i)^advisor::h2d|copy_batch_to|to_device"),
    ("phase-forward", r"(?i)\bforward\b"),
    ("phase-backward", r"(?i)\bbackward\b"),
    ("phase-optimizer", r"(?i)^advisor::optimizer|^Optimizer\.|\boptimi[sz]er\b"),
)


def _slot_of(categories: CategorySet, key: str) -> int:
    """Return the slot of a category in its set."""
    return next(i for i, category in enumerate(categories) if category.key == key)


def build_index(a: Analysis, *, libraries: bool = True) -> TimelineIndex:
    """Build all lanes of a rank's window. A million events take a fraction of a second.

    ``libraries``: include library frames in Python call stacks."""
    builder = IndexBuilder(str if a.trace.meta.step_marks is None else rename_step_mark)
    if a.record_only:
        _add_recorded_steps(builder, a)
    _add_steps(builder, a)
    _add_phases(builder, a)
    _add_idle_time(builder, a)
    _add_streams(builder, a)
    _add_syncs(builder, a)
    _add_threads(builder, a, libraries=libraries)
    _add_overhead(builder, a)
    _note_missing_data(builder, a)
    index = builder.build(counter_series(a))
    return replace(
        index,
        slice_of_row=_slices_by_row(index, a),
        framework=a.trace.meta.framework,
        idle_outside_operators=is_outside_operators(a),
    )


def _slices_by_row(index: TimelineIndex, a: Analysis) -> dict[str, NDArray[np.int32]]:
    """Return the slice of each row of the tables ``cpu`` and ``gpu``; -1 for none.

    Device work has its slice on its stream."""
    slices: dict[str, NDArray[np.int32]] = {
        "cpu": np.full(a.trace.cpu.height, -1, dtype=np.int32),
        "gpu": np.full(a.trace.gpu.height, -1, dtype=np.int32),
    }
    for lane in index.lanes:
        kind = index.groups[lane.group].kind
        if lane.source in slices and kind in ("stream", "thread", "overhead"):
            slices[lane.source][index.row[lane.first_slice : lane.end_slice]] = np.arange(
                lane.first_slice, lane.end_slice
            )
    return slices


def _add_steps(builder: IndexBuilder, a: Analysis) -> None:
    """Add the profiled steps."""
    table = a.steps.table
    if a.steps.source == "whole trace" or table.is_empty():
        return
    rows = np.arange(table.height)
    slot = np.where(table["used"].to_numpy(), 0, _slot_of(STEP_CATEGORIES, "step-aside"))
    columns = (
        table["ts"].to_numpy(),
        table["end"].to_numpy(),
        builder.names.number_column(table["name"]),
        slot,
        rows,
    )
    builder.add_tracks("steps", "Steps", "steps", "steps", STEP_CATEGORIES, columns)


def _add_recorded_steps(builder: IndexBuilder, a: Analysis) -> None:
    """Add the recorder's steps, for a run without a window. The first step starts at 0."""
    if a.run_steps is None or not a.run_steps.steps:
        return
    start = a.run_steps.ts - a.run_steps.ts.min()
    slot = np.where(a.run_steps.used, 0, _slot_of(STEP_CATEGORIES, "step-aside"))
    labels = pl.Series([f"step {step.n}" for step in a.run_steps.steps], dtype=pl.String)
    columns = (
        start,
        start + a.run_steps.dur,
        builder.names.number_column(labels),
        slot,
        np.arange(len(start)),
    )
    builder.add_tracks("recorded", "Recorded steps", "steps", "recorded", STEP_CATEGORIES, columns)


def _add_phases(builder: IndexBuilder, a: Analysis) -> None:
    """Add the recorder's phases, or else the outermost ranges of the main thread."""
    cpu = a.trace.cpu
    if cpu.is_empty() or a.trace.main_thread is None:
        return
    is_main_thread = (cpu["thread"] == a.trace.main_thread).to_numpy()
    is_phase = is_main_thread & name_matches(cpu["name"], r"^advisor::").to_numpy()
    is_phase &= ~name_matches(cpu["name"], r"^advisor::step\b").to_numpy()
    if not is_phase.any():
        ranges = (cpu["kind"] == "annotation") | name_matches(
            cpu["name"], r"^Optimizer\.|^enumerate\(|^DistributedDataParallel\."
        )
        is_phase = is_main_thread & ranges.to_numpy()
        is_phase &= ~name_matches(cpu["name"], a.trace.meta.step_names).to_numpy()
        # only the outermost ranges; the lanes of the thread show the nested ones
        rows = np.flatnonzero(is_phase)
        end = (cpu["ts"].gather(rows) + cpu["dur"].gather(rows)).to_numpy()
        latest_end = np.maximum.accumulate(np.append(np.int64(-1) << 62, end))[:-1]
        is_phase[rows[end <= latest_end]] = False
    rows = np.flatnonzero(is_phase)
    table = cpu[rows]
    slot = np.full(len(rows), _slot_of(PHASE_CATEGORIES, "phase-other"), dtype=np.uint8)
    for key, pattern in _PHASE_PATTERNS:
        slot[name_matches(table["name"], pattern).to_numpy()] = _slot_of(PHASE_CATEGORIES, key)
    start = table["ts"].to_numpy()
    labels = table["name"].cast(pl.String).str.strip_prefix("advisor::")
    columns = (
        start,
        start + table["dur"].to_numpy(),
        builder.names.number_column(labels),
        slot,
        rows,
    )
    builder.add_tracks("phases", "Phases", "phases", "cpu", PHASE_CATEGORIES, columns)


def _add_idle_time(builder: IndexBuilder, a: Analysis) -> None:
    """Add idle time by cause, and the steps for which it is unknown."""
    gaps = a.gaps
    if gaps.is_empty():
        return
    slot = gaps["cause"].to_physical().to_numpy()
    framework = a.trace.meta.framework
    labels = np.array(
        [
            builder.names.number_of(cause_label(cause, framework, outside=is_outside_operators(a)))
            for cause in CAUSES
        ],
        dtype=np.uint32,
    )
    start = gaps["ts"].to_numpy()
    columns = (start, start + gaps["dur"].to_numpy(), labels[slot], slot, np.arange(gaps.height))
    builder.add_tracks("gaps", "GPU idle, by cause", "idle", "gaps", IDLE_CATEGORIES, columns)
    # idle time of an unused step is unknown, so the lane must not look as if there was none
    unused_steps = a.steps.table.with_row_index("row").filter(~pl.col("used"))
    if a.steps.source != "whole trace" and unused_steps.height:
        name = np.full(
            unused_steps.height, builder.names.number_of("idle time not analysed"), dtype=np.uint32
        )
        slots = np.full(unused_steps.height, _slot_of(STEP_CATEGORIES, "step-aside"))
        bounds = unused_steps["ts"].to_numpy(), unused_steps["end"].to_numpy()
        columns = (*bounds, name, slots, unused_steps["row"].to_numpy())
        builder.add_tracks(
            "not-analysed", "Not analysed", "idle", "steps", STEP_CATEGORIES, columns
        )


def _add_streams(builder: IndexBuilder, a: Analysis) -> None:
    """Add the streams of each device, then lanes of collectives and of copies alone."""
    gpu = a.trace.gpu
    if gpu.is_empty():
        return
    start = gpu["ts"].to_numpy()
    end = start + gpu["dur"].to_numpy()
    name = builder.names.number_column(gpu["name"])
    slot = a.kernels["family"].to_physical().to_numpy().astype(np.uint8)
    streams = (
        gpu.with_row_index("row")
        .group_by("device", "stream")
        .agg(pl.col("row"), pl.col("dur").sum())
        .with_columns((pl.col("device") == a.device_id).alias("is_analyzed"))
        .sort(["is_analyzed", "device", "dur"], descending=[True, False, True], nulls_last=True)
    )
    # a loop over a few streams
    for device, stream, row_list in streams.select("device", "stream", "row").iter_rows():
        rows = np.array(row_list, dtype=np.int64)
        label = (
            f"GPU {'?' if device is None else device} · stream {'?' if stream is None else stream}"
        )
        columns = (start[rows], end[rows], name[rows], slot[rows], rows)
        builder.add_tracks(
            f"stream:{device}:{stream}", label, "stream", "gpu", KERNEL_CATEGORIES, columns
        )
    rows = np.flatnonzero(a.kernels["communication"].to_numpy())
    columns = (start[rows], end[rows], name[rows], slot[rows], rows)
    builder.add_tracks(
        "collectives", "Collectives", "collectives", "gpu", KERNEL_CATEGORIES, columns
    )
    rows = np.flatnonzero((gpu["kind"] != "kernel").to_numpy())
    columns = (start[rows], end[rows], name[rows], _copy_slots(gpu[rows]), rows)
    builder.add_tracks("copies", "Copies and memsets", "copies", "gpu", COPY_CATEGORIES, columns)


def _copy_slots(table: pl.DataFrame) -> NDArray[np.uint8]:
    """Return the category of each copy and memset."""
    pageable = (
        table["src"].is_in(["Pageable"]).fill_null(False)
        | table["dst"].is_in(["Pageable"]).fill_null(False)
    ).to_numpy()
    slot = np.full(table.height, _slot_of(COPY_CATEGORIES, "copy-other"), dtype=np.uint8)
    for copy, key in (
        ("HtoD", "copy-htod"),
        ("DtoH", "copy-dtoh"),
        ("DtoD", "copy-dtod"),
        ("PtoP", "copy-ptop"),
    ):
        mask = (table["copy"] == copy).fill_null(False).to_numpy()
        slot[mask] = _slot_of(COPY_CATEGORIES, key)
        if copy in ("HtoD", "DtoH"):
            slot[mask & pageable] = _slot_of(COPY_CATEGORIES, f"{key}-pageable")
    slot[(table["kind"] == "memset").to_numpy()] = _slot_of(COPY_CATEGORIES, "copy-memset")
    return slot


def _add_syncs(builder: IndexBuilder, a: Analysis) -> None:
    """Add CUDA synchronization events."""
    sync = a.trace.sync
    if sync.is_empty():
        return
    start = sync["ts"].to_numpy()
    slot = sync["kind"].to_physical().fill_null(0).to_numpy()
    texts = [category.label for category in SYNC_CATEGORIES]
    labels = np.array([builder.names.number_of(text) for text in texts], dtype=np.uint32)
    columns = (start, start + sync["dur"].to_numpy(), labels[slot], slot, np.arange(sync.height))
    builder.add_tracks(
        "sync", "CUDA synchronizations", "sync", "sync", SYNC_CATEGORIES, columns, folded=True
    )


def _host_slots(a: Analysis) -> NDArray[np.uint8]:
    """Return the category of each host event."""
    cpu = a.trace.cpu
    kind = cpu["kind"]
    slot = np.full(cpu.height, _slot_of(HOST_CATEGORIES, "host-op"), dtype=np.uint8)
    slot[(kind == "annotation").to_numpy()] = _slot_of(HOST_CATEGORIES, "host-range")
    slot[(kind == "overhead").to_numpy()] = _slot_of(HOST_CATEGORIES, "host-overhead")
    python = (kind == "python").to_numpy()
    if python.any():
        slot[python] = _slot_of(HOST_CATEGORIES, "host-python")
        owners = map_names(cpu["name"].filter(pl.Series(python)), code_owner, pl.Int8)
        slot[np.flatnonzero(python)[(owners == CodeOwner.USER).to_numpy()]] = _slot_of(
            HOST_CATEGORIES, "host-user"
        )
    calls = np.full(len(CALLS) + 1, _slot_of(HOST_CATEGORIES, "host-call"), dtype=np.uint8)
    for call, key in _CALL_CATEGORIES.items():
        calls[CALLS.index(call)] = _slot_of(HOST_CATEGORIES, key)
    runtime = (kind == "runtime").to_numpy()
    code = cpu["call"].to_physical().fill_null(len(CALLS)).to_numpy()
    slot[runtime] = calls[code[runtime]]
    loader = name_matches(cpu["name"], LOADER).to_numpy() & ~runtime
    slot[loader] = _slot_of(HOST_CATEGORIES, "host-loader")
    return slot


def _add_threads(builder: IndexBuilder, a: Analysis, *, libraries: bool) -> None:
    """Add a group for each host thread: a lane of its activity, then a lane per call depth."""
    cpu = a.trace.cpu
    is_included = (cpu["kind"] != "overhead").to_numpy()
    depths = cpu["depth"].to_numpy()
    if not libraries:
        hidden = library_frames(a)
        is_included = is_included & ~hidden
        depths = depth_without(a, hidden)
    included = np.flatnonzero(is_included)
    if not len(included):
        return
    name, slot = builder.names.number_column(cpu["name"]), _host_slots(a)
    start = cpu["ts"].to_numpy()
    end = start + cpu["dur"].to_numpy()
    thread = cpu["thread"].to_numpy()[included]
    included_depths = depths[included]
    _, lane = np.unique(thread.astype(np.int64) << 16 | included_depths, return_inverse=True)
    if len(lane) and lane.max() < 1 << 16:
        lane = lane.astype(np.uint16)  # 16-bit integers use radix sort: several times faster
    order = included[np.argsort(lane, kind="stable")]
    threads, first = np.unique(cpu["thread"].to_numpy()[order], return_index=True)
    last = np.append(first[1:], len(order))
    activity = _activity_lanes(builder, a)
    main = a.trace.main_thread
    by_event_count = sorted(
        range(len(threads)), key=lambda i: (threads[i] != main, first[i] - last[i])
    )
    if len(by_event_count) > MAX_THREADS:
        builder.notes.append(
            f"{len(by_event_count) - MAX_THREADS} threads with the fewest events are not shown"
        )
    # a loop over tens of threads and depths
    for position, i in enumerate(by_event_count[:MAX_THREADS]):
        number = int(threads[i])
        rows = order[first[i] : last[i]]
        level = depths[rows]
        cuts = np.flatnonzero(np.diff(level)) + 1
        parts: list[Any] = [activity[number]] if number in activity else []
        parts += [
            ("cpu", HOST_CATEGORIES, start[part], end[part], name[part], slot[part], part)
            for part in np.split(rows, cuts)
        ]
        label = _thread_label(a, number)
        folded = position >= MAX_OPEN_THREADS or (len(rows) < 1000 and number != main)
        builder.add_group(f"thread:{number}", label, "thread", parts, folded=bool(folded))


def _thread_label(a: Analysis, number: int) -> str:
    """Write the label of a thread."""
    _, tid, name = a.trace.threads.row(number)
    if name is None or re.match(rf"thread {re.escape(str(tid))}\b", str(name)):
        name = f"thread {tid}"
    text = str(name)[:60]
    return f"Main {text}" if number == a.trace.main_thread else t.upper_first(text)


def _activity_lanes(builder: IndexBuilder, a: Analysis) -> dict[int, Any]:
    """Return a lane per thread with its activity at each instant (``Analysis.timeline``)."""
    timeline = a.timeline
    # consecutive pieces of one class become one piece, with the row of the first
    code, owner = timeline.code, timeline.thread
    starts_piece = np.ones(len(code), dtype=bool)
    starts_piece[1:] = (code[1:] != code[:-1]) | (owner[1:] != owner[:-1])
    pieces = np.flatnonzero(starts_piece)
    owner, code, start, row = (
        owner[pieces],
        code[pieces],
        timeline.start[pieces],
        timeline.row[pieces],
    )
    end = timeline.end[np.append(pieces[1:] - 1, len(timeline.code) - 1)] if len(pieces) else start
    recorded = code != CLASS_CODE["unrecorded"]
    owner, code, start, end, row = (column[recorded] for column in (owner, code, start, end, row))
    framework = a.trace.meta.framework
    labels = np.array(
        [builder.names.number_of(host_label(name, framework)) for name in CLASSES], dtype=np.uint32
    )
    lanes = {}
    for number in np.unique(owner).tolist():
        lo, hi = np.searchsorted(owner, [number, number + 1])
        pieces = np.arange(lo, hi)
        lanes[number] = (
            "activity",
            ACTIVITY_CATEGORIES,
            start[pieces],
            end[pieces],
            labels[code[pieces]],
            code[pieces],
            row[pieces],
        )
    return lanes


def _add_overhead(builder: IndexBuilder, a: Analysis) -> None:
    """Add the profiler's overhead."""
    cpu = a.trace.cpu
    rows = np.flatnonzero((cpu["kind"] == "overhead").to_numpy())
    table = cpu[rows]
    start = table["ts"].to_numpy()
    slot = np.full(len(rows), _slot_of(HOST_CATEGORIES, "host-overhead"), dtype=np.uint8)
    columns = (
        start,
        start + table["dur"].to_numpy(),
        builder.names.number_column(table["name"]),
        slot,
        rows,
    )
    builder.add_tracks(
        "overhead", "Profiler overhead", "overhead", "cpu", HOST_CATEGORIES, columns, folded=True
    )


def _note_missing_data(builder: IndexBuilder, a: Analysis) -> None:
    """Add a note for each kind of data that the trace does not have."""
    if a.record_only:
        builder.notes.append("No window was profiled: only recorded steps and samples are shown.")
        return
    has_host_events = (a.trace.cpu["kind"] != "overhead").any()
    if a.trace.gpu.is_empty():
        builder.notes.append(
            "The trace has no GPU work: no streams, copies, collectives or idle gaps."
        )
    if not has_host_events:
        builder.notes.append(
            "The trace has no host events: no threads, and idle gaps have no cause."
        )
    if a.steps.source == "whole trace":
        builder.notes.append("No steps are marked: the trace counts as one window.")
    if has_host_events and not (a.trace.cpu["kind"] == "python").any():
        builder.notes.append("Recorded without Python stacks: your lines of code are unknown.")
    if a.trace.meta.truncated:
        builder.notes.append("The file is cut off: the end of the run is missing.")


def library_frames(a: Analysis) -> NDArray[np.bool_]:
    """Return a mask of ``trace.cpu``: Python frames that are not the user's own code.

    These are PyTorch, the standard library, installed packages and built-in functions."""
    cpu = a.trace.cpu
    mask = (cpu["kind"] == "python").to_numpy().copy()
    rows = np.flatnonzero(mask)
    if len(rows):
        is_library = map_names(
            cpu["name"].gather(rows),
            lambda name: code_owner(name) != CodeOwner.USER and not name.startswith(MODULE),
            pl.Boolean,
        )
        mask[rows] = is_library.to_numpy()
    return mask


def depth_without(a: Analysis, hidden: NDArray[np.bool_]) -> NDArray[np.int64]:
    """Return the depth of each row of ``trace.cpu`` without the rows of the mask ``hidden``."""
    parent = parent_rows(a.trace)
    depth = a.trace.cpu["depth"].to_numpy().astype(np.int64)
    hidden_above = np.zeros(len(depth), dtype=np.int64)
    order = np.argsort(depth, kind="stable")
    # a loop over tens of levels: the parent of a row is in an earlier one
    for rows in np.split(order, np.flatnonzero(np.diff(depth[order])) + 1):
        nested = rows[parent[rows] >= 0]
        hidden_above[nested] = hidden_above[parent[nested]] + hidden[parent[nested]]
    depths: NDArray[np.int64] = np.maximum(depth - hidden_above, 0)
    return depths
