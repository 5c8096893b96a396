"""Reader of TensorFlow's and JAX's profiler timeline in JSON (``.trace.json.gz``)."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from advisor.core.errors import AdvisorError
from advisor.core.trace import Trace
from advisor.read.event_columns import NAME_LIMIT
from advisor.read.formats.kineto.json_pieces import without_mark
from advisor.read.formats.xplane.reader import Space, XPlaneReader, space_to_trace
from advisor.read.reader import ReaderClaim, ReadOptions
from advisor.read.source import ByteSource

if TYPE_CHECKING:
    from advisor.core.intervals import Ints
    from advisor.read.formats.xplane.xspace import Events, Plane, XLine

_MAX_BYTES = 1 << 30
"""Maximum size of a file, bytes. The profiler writes up to a million events, about 200 MB."""

_PLANE_NAME = re.compile(rb'"name"\s*:\s*"/(?:host:CPU|device:[GT]PU:\d+)')
_NUMBER_STATS = ("correlation_id", "step_num", "allocation_bytes", "bytes_allocated", "addr",
            "cuda_graph_id")  # fmt: skip
_TEXT_STATS = ("kernel_details", "memcpy_details", "memset_details", "hlo_op", "hlo_module",
          "allocator_name")  # fmt: skip


class _Event(msgspec.Struct):
    ph: str = ""
    pid: int | float | str | None = None
    tid: int | float | str | None = None
    ts: float | None = None
    dur: float | None = None
    name: str = ""
    args: dict[str, Any] | None = None


class _TimelineFile(msgspec.Struct):
    traceEvents: list[msgspec.Raw] = []


class XlaTimelineReader(XPlaneReader):
    """Reader of ``<host>.trace.json.gz`` in a log directory: the events of the XPlane file next to
    it, limited to a million. Processes are planes, and threads are lines."""

    name = "xla-timeline"
    description = XPlaneReader.description
    suffixes = (".trace.json",)

    def sniff(self, head: bytes, path: str) -> ReaderClaim:
        """Recognise JSON whose processes are named like planes."""
        text = without_mark(head)
        has_planes = text[:1] in (b"{", b"[") and _PLANE_NAME.search(head)
        return ReaderClaim.SURE if has_planes else ReaderClaim.NO

    def read(self, source: ByteSource, options: ReadOptions) -> Trace:
        """Read the whole file, whose size is bounded."""
        advice = "longer than any such timeline; give .xplane.pb"
        events, broken = _decode_events(source.read_all(_MAX_BYTES, advice), source)
        return space_to_trace(_build_space(events, broken), source)


def _decode_events(text: bytes, source: ByteSource) -> tuple[list[_Event], int]:
    try:
        raw = msgspec.json.decode(text, type=_TimelineFile).traceEvents
    except (msgspec.DecodeError, RecursionError, UnicodeError):
        raise AdvisorError(
            f"{source.path}: a timeline that is damaged or cut off; give the .xplane.pb next to it"
        ) from None
    decoder = msgspec.json.Decoder(_Event)
    events, damaged_count = [], 0
    for item in raw:  # one by one, so that a damaged event does not lose the others
        try:
            events.append(decoder.decode(item))
        except (msgspec.DecodeError, RecursionError, UnicodeError):
            damaged_count += bytes(item) != b"{}"
    return events, damaged_count


def _build_space(events: list[_Event], damaged_count: int) -> Space:
    """Return the events as the planes and lines of an XPlane file."""
    from advisor.read.formats.xplane.xspace import Plane, XLine

    processes: dict[Any, str] = {}
    threads: dict[tuple[Any, Any], str] = {}
    rows: dict[Any, dict[Any, list[_Event]]] = {}
    for event in events:
        if event.ph == "M":
            name = str((event.args or {}).get("name", ""))[:NAME_LIMIT]
            if event.name == "process_name":
                # "/host:CPU (pid 5)" and "/device:GPU:0 (pid 1)" are newer spellings
                processes[event.pid] = name.split(" ")[0]
            elif event.name == "thread_name":
                threads[event.pid, event.tid] = name
        elif event.ph == "X" and event.ts is not None:
            rows.setdefault(event.pid, {}).setdefault(event.tid, []).append(event)
    planes: list[tuple[Plane, list[XLine], Events]] = []
    for pid, lines in rows.items():
        plane_events = [event for item in lines.values() for event in item]
        names = list(dict.fromkeys(event.name[:NAME_LIMIT] for event in plane_events))
        name_codes = {name: number for number, name in enumerate(names, start=1)}
        plane = Plane(processes.get(pid, ""), dict(enumerate(names, start=1)), {}, {}, {}, [])
        plane_lines = [XLine(n, threads.get((pid, tid), str(tid))) for n, tid in enumerate(lines)]
        line = np.repeat(np.arange(len(lines)), [len(item) for item in lines.values()])
        planes.append((plane, plane_lines, _build_events(plane_events, line, name_codes)))
    return Space(planes=planes, undecodable_events=damaged_count)


def _build_events(plane_events: list[_Event], line: Ints, name_codes: dict[str, int]) -> Events:
    from advisor.read.formats.xplane.xspace import Events

    meta = np.array([name_codes[event.name[:NAME_LIMIT]] for event in plane_events], dtype=np.int64)
    events = Events(line, meta, _to_ns(plane_events, "ts"), _to_ns(plane_events, "dur"))
    numbers: dict[str, tuple[list[int], list[int]]] = {}
    texts: dict[str, tuple[list[int], list[str]]] = {}
    for row, event in enumerate(plane_events):
        for key, value in (event.args or {}).items():
            if key in _NUMBER_STATS and (number := _parse_integer(value)) is not None:
                numbers.setdefault(key, ([], []))[0].append(row)
                numbers[key][1].append(number)
            elif key in _TEXT_STATS and isinstance(value, str):
                texts.setdefault(key, ([], []))[0].append(row)
                texts[key][1].append(value[:NAME_LIMIT])
    for key, (stat_rows, stat_values) in numbers.items():
        events.numbers[key] = (
            np.array(stat_rows, dtype=np.int64),
            np.array(stat_values, dtype=np.int64),
        )
    for key, (stat_rows, values) in texts.items():
        events.texts[key] = np.array(stat_rows, dtype=np.int64), values
    return events


def _to_ns(plane_events: list[_Event], field: str) -> Ints:
    """Convert microseconds to ns. Implausible times become negative, or are dropped as too
    distant."""
    microseconds = np.array([getattr(event, field) or 0.0 for event in plane_events])
    result: Ints = np.rint(
        np.clip(np.nan_to_num(microseconds, nan=-1e12), -1e12, 4e15) * 1000
    ).astype(np.int64)
    return result


def _parse_integer(value: object) -> int | None:
    text = str(value)[:20]
    return int(text) if text.isdecimal() and len(text) < 19 else None
