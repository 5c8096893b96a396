"""Chrome traces, as PyTorch's profiler writes them, from traces of other formats, and tracks with
the report's findings."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict
from itertools import chain, islice
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np
import polars as pl
from msgspec import Raw
from numpy.typing import NDArray

from advisor.advise import finding_text
from advisor.core import labels
from advisor.core import text as t
from advisor.core.finding import Edit, Finding
from advisor.core.intervals import EMPTY, Intervals, intersect, intervals_of, union_of
from advisor.core.report import Report
from advisor.core.trace import COMMS_SCHEMA, Trace
from advisor.export.redact import Redactor
from advisor.export.rewrite import (
    Extra,
    Progress,
    RewriteCounts,
    names_of,
    replace_when_complete,
    rewrite_head,
    write_events,
)
from advisor.measure import Analysis
from advisor.measure.host.gaps import is_outside_operators
from advisor.read.formats.kineto.reader import ADVISOR_KEY, MAX_CALL_NAMES, whole_number
from advisor.read.source import DEFAULT_LIMIT
from advisor.read.trace_events import COMM_FIELDS, EventArgs, call_class, copy_parts
from advisor.replay.selection import selected_gaps, selected_gpu, selected_host

EVENTS_PER_BATCH = 5_000
"""Number of events encoded and redacted at a time."""

_HOST_CATEGORIES = {
    "op": "cpu_op",
    "annotation": "user_annotation",
    "python": "python_function",
    "runtime": "cuda_runtime",
    "overhead": "overhead",
}
_DEVICE_CATEGORIES = {"kernel": "kernel", "memcpy": "gpu_memcpy", "memset": "gpu_memset"}
_SYNC_NAMES = {
    "context": "Context Sync",
    "stream": "Stream Sync",
    "event": "Event Sync",
    "stream_wait": "Stream Wait Event",
}
_JSON_NAMES = {field.name: field.encode_name for field in msgspec.structs.fields(EventArgs)}
"""Name of each argument of an event in a Chrome trace, by the reader's field."""


def _json_names(*names: str) -> dict[str, str]:
    return {name: _JSON_NAMES[name] for name in names}


_HOST_ARGS = _json_names("correlation", "external", "sequence")
_DEVICE_ARGS = _json_names(
    *("device", "stream", "correlation", "external", "bytes", "gbps", "registers", "shared"),
    *("blocks_per_sm", "warps_per_sm", "occupancy", "graph"),
)
_SYNC_ARGS = _json_names("device", "stream", "correlation", "wait_stream", "wait_correlation")
_MEMORY_ARGS = {"bytes": "Bytes", **_json_names("address", "allocated", "reserved")}
_INPUT_ARGS = _json_names("dims", "types", "strides", "concrete")
_COMM_ARGS = dict(zip(COMMS_SCHEMA, _json_names(*COMM_FIELDS).values(), strict=True))
_DEVICE_PROPERTIES = {
    "id": "id", "name": "name", "memory_bytes": "totalGlobalMem", "sms": "numSms",
    "max_threads_per_sm": "maxThreadsPerMultiprocessor",
    "registers_per_sm": "regsPerMultiprocessor", "shared_per_sm": "sharedMemPerMultiprocessor",
    "shared_per_block_optin": "sharedMemPerBlockOptin", "warp_size": "warpSize",
}  # fmt: skip

Event = dict[str, Any]


def write_tables(
    trace: Trace,
    target: Path,
    extra: Extra | None = None,
    *,
    redacted: bool = False,
    names: Iterable[str] = (),
    limit: int = DEFAULT_LIMIT,
    progress: Progress | None = None,
) -> RewriteCounts:
    """Write the tables of a trace as :func:`~advisor.export.rewrite.rewrite` writes a JSON file.
    The numbers of a kernel's blocks and threads are written in one dimension."""
    path = trace.meta.path
    redactor = Redactor({*names, *names_of(path, limit)}) if redacted else None
    written = RewriteCounts(truncated=trace.meta.truncated)
    head = build_head(trace)

    def texts() -> Iterator[tuple[bytes, int]]:
        events = iterate_events(trace)
        while batch := list(islice(events, EVENTS_PER_BATCH)):
            text = b",\n".join(map(msgspec.json.encode, batch))
            if redactor is not None:
                text = redactor.json(b"[" + text + b"]")[1:-1]
            yield text, len(batch)
            if progress is not None:
                progress(path, trace.meta.bytes_read)

    with replace_when_complete(target) as file:
        write_events(file, texts(), lambda: head, extra, redactor, written)
        file.write(rewrite_head(head, redactor))
    return written


def build_head(trace: Trace) -> Event:
    """Return the keys of the file other than the events. Times are from the trace's start."""
    meta = trace.meta
    devices = []
    for device in map(asdict, meta.devices):
        properties = {key: device[name] for name, key in _DEVICE_PROPERTIES.items()}
        if device["compute"] is not None:
            properties["computeMajor"], properties["computeMinor"] = device["compute"]
        devices.append({key: value for key, value in properties.items() if value is not None})
    head = {
        "schemaVersion": 1,
        "displayTimeUnit": "ms",
        "baseTimeNanoseconds": meta.start_ns,
        "deviceProperties": devices,
        "cuda_runtime_version": meta.cuda_runtime,
        "cuda_driver_version": meta.cuda_driver,
    }
    distributed = {"backend": meta.backend, "rank": meta.rank, "world_size": meta.world_size}
    if any(value is not None for value in distributed.values()):
        head["distributedInfo"] = distributed
    facts = {"format": meta.format, "framework": meta.framework, "vendor": meta.vendor,
           "step_marks": meta.step_marks}  # fmt: skip
    properties = {key: value for key, value in facts.items() if value is not None}
    head[ADVISOR_KEY] = {**properties, "calls": _unusual_calls(trace)}
    return {key: value for key, value in head.items() if value is not None}


def _unusual_calls(trace: Trace) -> list[list[str]]:
    """Return the name and class of each call whose class does not follow from its name."""
    calls = trace.cpu.filter(pl.col("call").is_not_null()).select("name", "call").unique()
    classes_by_name: dict[str, set[str]] = {}
    for name, call in calls.cast(pl.String).iter_rows():
        classes_by_name.setdefault(name, set()).add(call)
    # a name with several classes is left to the classification by name
    pairs = (
        (name, next(iter(classes)))
        for name, classes in classes_by_name.items()
        if len(classes) == 1
    )
    return sorted([name, call] for name, call in pairs if call_class(name) != call)[:MAX_CALL_NAMES]


def iterate_events(trace: Trace) -> Iterator[Event]:
    """Yield an event for every row, one by one, because each is encoded by itself."""
    ids, thread_events = _number_threads(trace.threads)
    inputs, comms = (
        _shared_args(trace.inputs, _INPUT_ARGS, raw=True),
        _shared_args(trace.comms, _COMM_ARGS),
    )

    def host(row: Event) -> Event:
        args = _select_args(row, _HOST_ARGS)
        args |= inputs[row["inputs"]] if row["inputs"] is not None else {}
        args |= comms[row["comm"]] if row["comm"] is not None else {}
        pid, tid = ids[row["thread"]]
        return _build_slice(row, _HOST_CATEGORIES[row["kind"]], row["name"], pid, tid, args)

    def device(row: Event) -> Event:
        args = _select_args(row, _DEVICE_ARGS)
        args |= comms[row["comm"]] if row["comm"] is not None else {}
        for size, key in (("blocks", "grid"), ("threads", "block")):
            if row[size] is not None:
                args[key] = [row[size], 1, 1]
        if row["limits"] is not None or row["active_blocks"] is not None:
            detail = {
                "activeBlocksPerMultiprocessor": row["active_blocks"],
                "limitingFactors": row["limits"],
            }
            args["occupancy"] = {key: value for key, value in detail.items() if value is not None}
        name = _copy_name(row) if row["kind"] == "memcpy" else row["name"]
        return _build_slice(
            row, _DEVICE_CATEGORIES[row["kind"]], name, row["device"], row["stream"], args
        )

    def sync(row: Event) -> Event:
        place = row["device"] or 0, row["stream"] or 0
        return _build_slice(
            row, "cuda_sync", _SYNC_NAMES[row["kind"]], *place, _select_args(row, _SYNC_ARGS)
        )

    def memory(row: Event) -> Event:
        pid, tid = ids[row["thread"]] if row["thread"] is not None else (0, 0)
        on_host = row["device"] is None or row["device"] < 0
        args = _select_args(row, _MEMORY_ARGS)
        args |= {"Device Type": int(not on_host), "Device Id": -1 if on_host else row["device"]}
        place = {"pid": pid, "tid": tid, "ts": to_microseconds(row["ts"])}
        return {"ph": "i", "s": "t", "name": "[memory]", **place, "args": args}

    def counter(row: Event) -> Event:
        args = {row["name"]: row["value"]}
        return _build_slice(row, "cuda_profiler_range", row["range"] or "", 0, 0, args)

    makers: Sequence[tuple[pl.DataFrame, Callable[[Event], Event]]] = (
        (trace.cpu, host),
        (trace.gpu, device),
        (trace.sync, sync),
        (trace.memory, memory),
        (trace.counters, counter),
    )
    yield from thread_events
    for frame, make in makers:
        rows = chain.from_iterable(part.iter_rows(named=True) for part in frame.iter_slices())
        yield from map(make, rows)


def _build_slice(row: Event, category: str, name: str, pid: Any, tid: Any, args: Event) -> Event:
    return {
        "ph": "X", "cat": category, "name": name, "pid": pid, "tid": tid,
        "ts": to_microseconds(row["ts"]), "dur": to_microseconds(row["dur"]), "args": args,
    }  # fmt: skip


def _select_args(row: Event, wanted: dict[str, str]) -> Event:
    return {key: row[name] for name, key in wanted.items() if row[name] is not None}


def _number_threads(threads: pl.DataFrame) -> tuple[list[tuple[int, int]], list[Event]]:
    """Return process and thread numbers, unchanged if possible, and events that name them."""
    taken = {int(text) for text in chain(threads["pid"], threads["tid"]) if _is_number(text)}
    numbers: dict[str, int] = {}

    def number(text: str) -> int:
        if _is_number(text):
            return int(text)
        if text not in numbers:
            numbers[text] = next(n for n in range(1, len(taken) + 2) if n not in taken)
            taken.add(numbers[text])
        return numbers[text]

    ids, name_events = [], []
    for pid, tid, name in threads.select("pid", "tid", "name").iter_rows():
        ids.append((number(pid), number(tid)))
        label = name or ("" if _is_number(tid) else tid)
        if label:
            ids_of_event = {"pid": ids[-1][0], "tid": ids[-1][1]}
            name_events.append(
                {"ph": "M", "name": "thread_name", **ids_of_event, "args": {"name": label}}
            )
    return ids, name_events


def _is_number(text: str) -> bool:
    return text.isascii() and text.isdigit() and len(text) < 16


def _shared_args(frame: pl.DataFrame, wanted: dict[str, str], *, raw: bool = False) -> list[Event]:
    """Return the arguments that rows share. ``raw``: the values are JSON texts."""
    return [
        {
            key: Raw(value.encode()) if raw and _is_json(value) else value
            for key, value in _select_args(row, wanted).items()
            if value != ""
        }
        for row in frame.iter_rows(named=True)
    ]


def _is_json(text: str) -> bool:
    try:
        msgspec.json.decode(text, type=Raw)
    except (msgspec.DecodeError, UnicodeError, RecursionError):
        return False
    return True


def _copy_name(row: Event) -> str:
    """Return the name of a copy, rewritten if it lacks the recorded kind or memories."""
    parts = row["copy"], row["src"], row["dst"]
    if row["copy"] is None or copy_parts(row["name"]) == parts:
        return str(row["name"])
    memories = f" ({parts[1]} -> {parts[2]})" if parts[1] and parts[2] else ""
    return f"Memcpy {parts[0]}{memories}"


CATEGORY = "advisor"
_MAX_SLICES = 20_000
"""Maximum number of slices on one track; the longest are kept. Browsers struggle with more."""
_MAX_CLOSED_GAP_NS = 1_000
"""Distance in ns below which intervals of a finding become one slice."""
_FIRST_PID = 990_000_000


Shown = Callable[[str, int], str]
"""Function that takes a text and a width, and returns the text cleaned and shortened."""


class Slice(NamedTuple):
    """An added event, with times in ns from the trace's start."""

    ts: int
    dur: int
    name: str
    args: dict[str, Any]


def build_tracks(
    a: Analysis,
    report: Report,
    head: Mapping[str, Any] | None = None,
    clean: Callable[[str], str] = str,
) -> Iterator[bytes]:
    """Yield the JSON text of every added event, metadata first.

    The events form a process "advisor" above the others. It has a track with the steps, one with
    the idle gaps of the analysed device, and one per ranked finding with the times that its fix
    would change. Slices of a track never overlap. ``head``: the file's other keys; its times are
    relative to ``baseTimeNanoseconds``. ``clean``: function applied to every text before it is
    shortened. The report must not be redacted, because its edits are looked up in the trace."""

    def text(value: str, width: int) -> str:
        return labels.shorten(labels.clean(clean(value)), width)

    used = set(a.trace.threads["pid"].to_list())
    pid = _FIRST_PID
    while str(pid) in used:
        pid += 1
    origin = a.trace.meta.start_ns - (whole_number((head or {}).get("baseTimeNanoseconds")) or 0)
    yield _encode_metadata("process_name", pid, 0, name="advisor")
    yield _encode_metadata("process_labels", pid, 0, labels=text(report.verdict, 200))
    yield _encode_metadata("process_sort_index", pid, 0, sort_index=-1)
    tracks = [("steps", _step_slices(a)), ("idle gaps", _gap_slices(a, text))]
    for finding in finding_text.ranked_findings(report):
        if not finding.other_rank:
            title = text(finding.title, 80)
            tracks.append((f"{finding.priority}. {title}", _finding_slices(a, finding, text)))
    for number, (name, slices) in enumerate(tracks):
        yield _encode_metadata("thread_name", pid, number + 1, name=name)
        yield _encode_metadata("thread_sort_index", pid, number + 1, sort_index=number)
        for item in slices:
            yield _encode_slice(item, pid, number + 1, origin, text)


def _encode_metadata(kind: str, pid: int, tid: int, **args: Any) -> bytes:
    return msgspec.json.encode(
        {"ph": "M", "name": kind, "pid": pid, "tid": tid, "ts": 0, "args": args}
    )


def _encode_slice(item: Slice, pid: int, tid: int, origin: int, text: Shown) -> bytes:
    return msgspec.json.encode(
        {
            "ph": "X", "cat": CATEGORY, "name": text(item.name, 200), "pid": pid, "tid": tid,
            "ts": to_microseconds(origin + item.ts), "dur": to_microseconds(item.dur),
            "args": item.args,
        }
    )  # fmt: skip


def to_microseconds(ns: int) -> Raw:
    """Return microseconds with exact decimals: a float would round Unix times."""
    microseconds, remainder = divmod(abs(ns), 1000)
    sign = "-" if ns < 0 else ""
    return Raw(f"{sign}{microseconds}.{remainder:03d}".encode())


# -- tracks -------------------------------------------------------------------------------------


def _step_slices(a: Analysis) -> list[Slice]:
    rows = []
    end = -(1 << 62)
    for name, ts, stop, dur, used, outlier in a.steps.table.select(
        "name", "ts", "end", "dur", "used", "outlier"
    ).iter_rows():
        if ts >= end:  # overlapping steps of a damaged trace cannot share a track
            state = "used" if used else "outlier" if outlier else "not used"
            rows.append(Slice(ts, dur, name, {"measured": state}))
            end = stop
    return rows[:_MAX_SLICES]


def _gap_slices(a: Analysis, text: Shown) -> list[Slice]:
    gaps = a.gaps
    rows = _longest_rows(gaps["dur"].to_numpy())
    chosen = gaps[rows].select("ts", "dur", "cause", "gap", "host")
    names = a.trace.cpu["name"]
    framework, outside = a.trace.meta.framework, is_outside_operators(a)
    result = []
    for ts, dur, cause, gap, row in chosen.iter_rows():
        args = {"cause": cause, "gap": gap}
        if row is not None:
            args["while"] = text(names[row], 200)
        result.append(Slice(ts, dur, t.cause_label(cause, framework, outside=outside), args))
    return result


def _finding_slices(a: Analysis, finding: Finding, text: Shown) -> list[Slice]:
    """Return the intervals that the fix would change, each once."""
    time = intersect(
        union_of(EMPTY, *(_find_edited_intervals(a, edit) for edit in finding.edits)), a.spans
    )
    start, end = _close_short_gaps(time)
    rows = _longest_rows(end - start)
    args: dict[str, Any] = {"rule": finding.rule, "fix": text(finding.fix, 500)}
    if finding.impact is not None and finding.impact.gain_ns is not None:
        args["impact"] = t.format_gain(finding)
    title = finding.title
    return [
        Slice(ts, stop - ts, title, args if index == 0 else {"rule": finding.rule})
        for index, (ts, stop) in enumerate(
            zip(start[rows].tolist(), end[rows].tolist(), strict=True)
        )
    ]


def _find_edited_intervals(a: Analysis, edit: Edit) -> Intervals:
    select = edit.select
    if select.on == "gap":
        rows = selected_gaps(a, select)
        frame = a.gaps
    elif select.on == "gpu":
        rows, frame = selected_gpu(a, select), a.trace.gpu
    else:
        rows, frame = selected_host(a, select), a.trace.cpu
    return intervals_of(frame, rows)


def _close_short_gaps(time: Intervals) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Close gaps below ``_MAX_CLOSED_GAP_NS``; return the starts and ends of the intervals."""
    if not len(time):
        return time.start, time.end
    wide_gaps = np.flatnonzero(time.start[1:] - time.end[:-1] >= _MAX_CLOSED_GAP_NS)
    return time.start[np.append(0, wide_gaps + 1)], time.end[
        np.append(wide_gaps, len(time.end) - 1)
    ]


def _longest_rows(dur: NDArray[np.int64]) -> NDArray[np.intp]:
    """Return the indices of the ``_MAX_SLICES`` longest, in order of time."""
    if len(dur) <= _MAX_SLICES:
        return np.arange(len(dur))
    return np.sort(np.argpartition(dur, -_MAX_SLICES)[-_MAX_SLICES:])
