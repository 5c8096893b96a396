"""One piece of JSON to plain columns: runs in worker processes, needs only msgspec and numpy."""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import Any

import msgspec
import numpy as np
from msgspec import Raw
from numpy.typing import NDArray

from advisor.ingest.events import NO_ARGS, Args, Event
from advisor.ingest.spelling import (
    COUNTER_CATEGORY,
    DEVICE_CATEGORIES,
    HOST_CATEGORIES,
    IGNORED_CATEGORIES,
    SYNC_CATEGORY,
)
from advisor.ingest.split import sanitise, segments

Columns = dict[str, NDArray[Any]]
MISSING = -(1 << 62)
"""Integer columns: not given."""
NAME_LIMIT = 8192
"""Characters of a name that are kept."""
RAW_LIMIT = 1 << 16
"""Bytes of one input description that are kept; longer ones count as not recorded."""

_BIG = 1 << 60
_list = msgspec.json.Decoder(list[Event])
_one = msgspec.json.Decoder(Event)
_ERRORS = (msgspec.DecodeError, UnicodeError, RecursionError, ValueError, OverflowError)


class Piece(msgspec.Struct):
    """The columns of one piece. Names, threads, inputs and collectives are codes into lists."""

    host: Columns
    device: Columns
    sync: Columns
    memory: Columns
    counters: Columns
    names: list[str]
    threads: list[tuple[str, str]]
    inputs: list[tuple[bytes, bytes, bytes, bytes]]
    comms: list[tuple[bytes, ...]]
    thread_names: list[tuple[str, str, str]]
    events: int
    dropped: dict[str, int]
    ignored: dict[str, int]
    unsound: int
    """Events that could not be decoded at all."""


class _Codes:
    """Distinct values and the codes that stand for them."""

    def __init__(self) -> None:
        self.index: dict[Hashable, int] = {}

    def encode(self, values: Iterable[Hashable]) -> NDArray[np.int32]:
        index = self.index
        return np.array([index.setdefault(v, len(index)) for v in values], dtype=np.int32)


def decode_piece(piece: bytes) -> Piece:
    """Decode the inside of a JSON list of events into columns. Never raises for bad content."""
    events, unsound, lenient = _events(piece)
    return _columns(events, piece if b"cuda_profiler_range" in piece else b"", unsound, lenient)


def _events(piece: bytes) -> tuple[list[Event], int, int]:
    """Events, how many could not be decoded, and how many only after repair."""
    try:
        return _list.decode(b"[" + piece + b"]"), 0, 0
    except _ERRORS:
        pass
    piece = sanitise(piece)
    try:
        return _list.decode(b"[" + piece + b"]"), 0, 0
    except _ERRORS:
        pass
    events: list[Event] = []
    unsound = lenient = 0
    for text in segments(piece):
        try:
            events.append(_one.decode(text))
        except _ERRORS:
            try:
                value = msgspec.json.decode(text)
            except _ERRORS:
                unsound += 1
                continue
            event = _coerce(value)
            if event is None:
                unsound += 1
            else:
                lenient += 1
                events.append(event)
    return events, unsound, lenient


def _coerce(value: Any) -> Event | None:
    """An event whose fields have unexpected types, with what can be used of it."""
    if not isinstance(value, dict):
        return None

    def scalar(x: Any) -> Any:
        return x if isinstance(x, str | int | float) and not isinstance(x, bool) else None

    def text(x: Any) -> str | None:
        return x if isinstance(x, str) else None

    args = None
    if isinstance(value.get("args"), dict):
        given = {}
        for spec in msgspec.structs.fields(Args):
            if spec.encode_name not in value["args"]:
                continue
            item = value["args"][spec.encode_name]
            if spec.type is Raw:
                try:
                    given[spec.name] = Raw(msgspec.json.encode(item))
                except _ERRORS:
                    continue
            elif spec.name == "name":
                given[spec.name] = text(item)
            else:
                number = scalar(item)
                given[spec.name] = spec.default if number is None else number
        args = Args(**given)
    return Event(
        ph=text(value.get("ph")) or "",
        cat=text(value.get("cat")),
        name=scalar(value.get("name")),
        pid=scalar(value.get("pid")),
        tid=scalar(value.get("tid")),
        ts=scalar(value.get("ts")),
        dur=scalar(value.get("dur")),
        args=args,
    )


def _columns(events: list[Event], counters: bytes, unsound: int, lenient: int) -> Piece:
    host: dict[int, list[Event]] = {}
    device: dict[int, list[Event]] = {}
    sync: list[Event] = []
    memory: list[Event] = []
    thread_names: list[tuple[str, str, str]] = []
    ignored: dict[str, int] = {}
    routes: dict[Hashable, Callable[[Event], Any]] = {}
    for event in events:
        if event.ph == "X":
            category: Hashable = event.cat if event.cat is not None else event.pid
            route = routes.get(category)
            if route is None:
                route = _route(category, host, device, sync, ignored)
                routes[category] = route
            route(event)
        elif event.ph == "i" or event.ph == "I":
            if event.args is not None and event.args.allocated is not None:
                memory.append(event)
        elif event.ph == "M" and event.name == "thread_name" and event.args is not None:
            if event.args.name is not None:
                thread_names.append((str(event.pid), str(event.tid), event.args.name[:NAME_LIMIT]))
        elif event.ph in ("B", "E"):
            ignored["begin/end pairs"] = ignored.get("begin/end pairs", 0) + 1

    names, threads, inputs, comms = _Codes(), _Codes(), _Codes(), _Codes()
    dropped: dict[str, int] = {}
    if lenient:
        dropped["odd types, read leniently"] = lenient
    if unsound:
        dropped["not decodable"] = unsound
    piece = Piece(
        host=_join([_host(k, e, names, threads, inputs, comms) for k, e in host.items()]),
        device=_join([_device(k, e, names, comms) for k, e in device.items()]),
        sync=_sync(sync, names),
        memory=_memory(memory, threads),
        counters=_counters(counters, names),
        names=[(n if isinstance(n, str) else "" if n is None else str(n))[:NAME_LIMIT] for n in names.index],
        threads=[(str(p), str(t)) for p, t in threads.index],  # type: ignore[misc]
        inputs=list(inputs.index),  # type: ignore[arg-type]
        comms=list(comms.index),  # type: ignore[arg-type]
        thread_names=thread_names,
        events=len(events) + unsound,
        dropped=dropped,
        ignored=ignored,
        unsound=unsound,
    )  # fmt: skip
    return piece


def _route(
    category: Hashable,
    host: dict[int, list[Event]],
    device: dict[int, list[Event]],
    sync: list[Event],
    ignored: dict[str, int],
) -> Callable[[Event], Any]:
    """Where duration events of a category go: looked up once for each distinct category."""
    key = str(category).lower()
    if key in HOST_CATEGORIES:
        return host.setdefault(HOST_CATEGORIES[key], []).append
    if key in DEVICE_CATEGORIES:
        return device.setdefault(DEVICE_CATEGORIES[key], []).append
    if key == SYNC_CATEGORY:
        return sync.append
    if key in IGNORED_CATEGORIES or key == COUNTER_CATEGORY:
        return lambda event: None

    def count(event: Event, label: str = f"category {str(category)[:60]}") -> None:
        if len(ignored) < 64 or label in ignored:
            ignored[label] = ignored.get(label, 0) + 1

    return count


def _join(parts: list[Columns]) -> Columns:
    if not parts:
        return {}
    if len(parts) == 1:
        return parts[0]
    return {key: np.concatenate([part[key] for part in parts]) for key in parts[0]}


def floats(values: Sequence[Any]) -> NDArray[np.float64]:
    """A float column; what is not a number becomes NaN."""
    try:
        return np.array(values, dtype=np.float64)
    except (TypeError, ValueError, OverflowError):
        return np.array([_float(v) for v in values], dtype=np.float64)


def _float(value: Any) -> float:
    try:
        return float(value)
    except (TypeError, ValueError, OverflowError):
        return math.nan


def ints(values: Sequence[Any]) -> NDArray[np.int64]:
    """An integer column; what is not a sane number becomes MISSING."""
    try:
        return np.array(values, dtype=np.int64)
    except (TypeError, ValueError, OverflowError):
        return np.array([_int(v) for v in values], dtype=np.int64)


def _int(value: Any) -> int:
    try:
        number = int(value)
    except (TypeError, ValueError, OverflowError):
        number = -(1 << 63)
        as_float = _float(value)
        if math.isfinite(as_float):
            number = int(as_float)
    return number if -_BIG < number < _BIG else MISSING


def _external(args: list[Args]) -> NDArray[np.int64]:
    found = ints([a.external for a in args])
    if len(found) and (found == -1).any():
        found = np.where(found == -1, ints([a.external_old for a in args]), found)
    return found


def _times(events: list[Event]) -> Columns:
    return {"ts": floats([e.ts for e in events]), "dur": floats([e.dur for e in events])}


def _host(
    kind: int, events: list[Event], names: _Codes, threads: _Codes, inputs: _Codes, comms: _Codes
) -> Columns:
    args = [e.args or NO_ARGS for e in events]
    count = len(events)
    none = np.full(count, -1, dtype=np.int32)
    missing = np.full(count, -1, dtype=np.int64)
    columns: Columns = {
        **_times(events),
        "kind": np.full(count, kind, dtype=np.uint8),
        "name": names.encode([e.name for e in events]),
        "thread": threads.encode([(e.pid, e.tid) for e in events]),
        "correlation": missing,
        "external": missing,
        "sequence": missing,
        "inputs": none,
        "comm": none,
    }
    if kind == 3:  # runtime calls
        columns["correlation"] = ints([a.correlation for a in args])
        columns["external"] = _external(args)
    elif kind in (0, 1):  # ops and annotations
        columns["external"] = _external(args)
        columns["sequence"] = ints([a.sequence for a in args])
        columns["inputs"] = _inputs(args, inputs)
        columns["comm"] = _comms(args, comms)
    return columns


def _inputs(args: list[Args], codes: _Codes) -> NDArray[np.int32]:
    index = codes.index
    found = []
    for a in args:  # a loop: the descriptions are variable-length texts, and most repeat
        dims = bytes(a.dims) or bytes(a.dims_old)
        if not dims or len(dims) > RAW_LIMIT:
            found.append(-1)
            continue
        concrete = bytes(a.concrete)
        key = (
            dims,
            bytes(a.types),
            bytes(a.strides),
            concrete if len(concrete) < RAW_LIMIT else b"",
        )
        found.append(index.setdefault(key, len(index)))
    return np.array(found, dtype=np.int32)


def _comms(args: list[Args], codes: _Codes) -> NDArray[np.int32]:
    index = codes.index
    found = np.full(len(args), -1, dtype=np.int32)
    for row, a in enumerate(args):
        if bytes(a.collective):
            key = (
                *map(bytes, (a.collective, a.comm_in, a.comm_out, a.comm_size, a.comm_dtype)),
                *map(bytes, (a.comm_group, a.comm_description, a.comm_ranks)),
                *map(bytes, (a.comm_in_split, a.comm_out_split, a.comm_sequence)),
            )
            found[row] = index.setdefault(key, len(index))
    return found


def _products(raws: list[Raw]) -> NDArray[np.float64]:
    """Products of small JSON lists (grid and block sizes); NaN where there is none."""
    known: dict[bytes, float] = {b"": math.nan}
    found = []
    for raw in raws:
        text = bytes(raw)
        value = known.get(text)
        if value is None:
            value = known[text] = _product(text)
        found.append(value)
    return np.array(found, dtype=np.float64)


def _product(text: bytes) -> float:
    try:
        parts = msgspec.json.decode(text)
        result = float(math.prod(int(p) for p in parts)) if 0 < len(parts) <= 3 else math.nan
    except (*_ERRORS, TypeError):
        return math.nan
    return result if 0 < result < 1e15 else math.nan


class _Occupancy(msgspec.Struct):
    activeBlocksPerMultiprocessor: float | None = None
    limitingFactors: str | None = None


def _device(kind: int, events: list[Event], names: _Codes, comms: _Codes) -> Columns:
    args = [e.args or NO_ARGS for e in events]
    count = len(events)
    nan = np.full(count, math.nan)
    columns: Columns = {
        **_times(events),
        "kind": np.full(count, kind, dtype=np.uint8),
        "name": names.encode([e.name for e in events]),
        "device": floats([a.device if a.device is not None else e.pid for a, e in zip(args, events, strict=True)]),
        "stream": floats([a.stream if a.stream is not None else e.tid for a, e in zip(args, events, strict=True)]),
        "correlation": ints([a.correlation for a in args]),
        "external": _external(args),
        "graph": floats([a.graph for a in args]),
        "bytes": nan,
        "gbps": nan,
        "blocks": nan,
        "threads": nan,
        "registers": nan,
        "shared": nan,
        "blocks_per_sm": nan,
        "warps_per_sm": nan,
        "occupancy": nan,
        "active_blocks": nan,
        "limits": np.full(count, -1, dtype=np.int32),
        "comm": np.full(count, -1, dtype=np.int32),
    }  # fmt: skip
    if kind == 0:
        columns["blocks"] = _products([a.grid for a in args])
        columns["threads"] = _products([a.block for a in args])
        columns["registers"] = floats([a.registers for a in args])
        columns["shared"] = floats([a.shared for a in args])
        columns["blocks_per_sm"] = floats([a.blocks_per_sm for a in args])
        columns["warps_per_sm"] = floats([a.warps_per_sm for a in args])
        columns["occupancy"] = floats([a.occupancy for a in args])
        columns["comm"] = _comms(args, comms)
        if any(bytes(a.occupancy_detail) for a in args):
            details = [_occupancy(bytes(a.occupancy_detail)) for a in args]
            columns["active_blocks"] = floats([d.activeBlocksPerMultiprocessor for d in details])
            codes = names.encode([d.limitingFactors or "" for d in details])
            given = np.array([bool(d.limitingFactors) for d in details])
            columns["limits"] = np.where(given, codes, -1).astype(np.int32)
    else:
        columns["bytes"] = floats([a.bytes for a in args])
        columns["gbps"] = floats([a.gbps if a.gbps is not None else a.gbps_old for a in args])
    return columns


_occupancies: dict[bytes, _Occupancy] = {b"": _Occupancy()}


def _occupancy(text: bytes) -> _Occupancy:
    found = _occupancies.get(text)
    if found is None:
        try:
            found = msgspec.json.decode(text, type=_Occupancy)
        except _ERRORS:
            found = _Occupancy()
        if len(_occupancies) < 10_000:
            _occupancies[text] = found
    return found


def _sync(events: list[Event], names: _Codes) -> Columns:
    if not events:
        return {}
    args = [e.args or NO_ARGS for e in events]
    return {
        **_times(events),
        "name": names.encode([e.name for e in events]),
        "device": floats([a.device for a in args]),
        "stream": floats([a.stream for a in args]),
        "correlation": ints([a.correlation for a in args]),
        "wait_stream": floats([a.wait_stream for a in args]),
        "wait_correlation": floats([a.wait_correlation for a in args]),
    }


def _memory(events: list[Event], threads: _Codes) -> Columns:
    if not events:
        return {}
    args = [e.args or NO_ARGS for e in events]
    return {
        "ts": floats([e.ts for e in events]),
        "thread": threads.encode([(e.pid, e.tid) for e in events]),
        "bytes": floats([a.alloc_bytes for a in args]),
        "address": floats([a.address for a in args]),
        "allocated": floats([a.allocated for a in args]),
        "reserved": floats([a.reserved for a in args]),
        "device_type": floats([a.device_type for a in args]),
        "device_id": floats([a.device_id for a in args]),
    }


def _counters(piece: bytes, names: _Codes) -> Columns:
    """Hardware counters (``cuda_profiler_range``): their argument names are metric names, so
    these few events are decoded a second time, without a type."""
    rows: list[tuple[Any, Any, str, str, float]] = []
    for text in segments(sanitise(piece)) if piece else ():
        if b"cuda_profiler_range" not in text:
            continue
        try:
            event = msgspec.json.decode(text)
        except _ERRORS:
            continue
        if not isinstance(event, dict) or event.get("cat") != COUNTER_CATEGORY:
            continue
        args = event.get("args")
        for metric, value in args.items() if isinstance(args, dict) else ():
            number = _float(value)
            if math.isfinite(number):
                rows.append((event.get("ts"), event.get("dur"), str(metric)[:NAME_LIMIT],
                             str(event.get("name", ""))[:NAME_LIMIT], number))  # fmt: skip
    if not rows:
        return {}
    return {
        "ts": floats([r[0] for r in rows]),
        "dur": floats([r[1] for r in rows]),
        "name": names.encode([r[2] for r in rows]),
        "range": names.encode([r[3] for r in rows]),
        "value": floats([r[4] for r in rows]),
    }
