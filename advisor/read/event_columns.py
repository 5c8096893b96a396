"""Conversion of typed events to plain columns: events are sorted by kind, then read by field."""

import math
import struct
from collections import deque
from collections.abc import Callable, Hashable, Sequence
from functools import lru_cache
from operator import attrgetter
from typing import Any, cast

import msgspec
import numpy as np
from numpy.typing import NDArray

from advisor.core.event_kinds import CPU_KINDS, GPU_KINDS
from advisor.read.json_repair import DECODE_ERRORS, repair_json, split_objects
from advisor.read.trace_events import (
    ABSENT,
    COMM_FIELDS,
    COUNTER_CATEGORY,
    DEVICE_CATEGORIES,
    HOST_CATEGORIES,
    IGNORED_CATEGORIES,
    NO_ARGS,
    SYNC_CATEGORY,
    EventArgs,
    TraceEvent,
    is_range,
)

Columns = dict[str, NDArray[Any]]
MISSING = -(1 << 62)
"""Value that marks missing entries of integer columns."""
NAME_LIMIT = 8192
"""Maximum number of characters kept of a name."""
RAW_LIMIT = 1 << 18
"""Maximum length of an input or collective description, bytes. Longer ones count as missing."""
LABEL_LIMIT = 64
"""Maximum number of distinct categories counted by name."""

_MAX_INTEGER = 1 << 60
_join_with_nul = b"\0".join
"""Function that joins undecoded values to one key. JSON text holds no NUL."""


class Piece(msgspec.Struct):
    """Columns of one piece. Names, threads, inputs and collectives are codes into lists."""

    host: Columns
    device: Columns
    sync: Columns
    memory: Columns
    counters: Columns
    names: list[str]
    threads: list[tuple[str, str]]
    inputs: list[bytes]
    """Dims, types, and strides and concrete values if recorded, as JSON texts joined by NUL."""
    comms: list[bytes]
    """Fields of each collective as JSON texts, joined by NUL."""
    thread_names: list[tuple[str, str, str]]
    events: int
    """Number of events decoded, including unusable ones."""
    dropped: dict[str, int]
    ignored: dict[str, int]
    unsound: int
    """Number of list elements that could not be decoded."""
    epoch: int
    """Microseconds subtracted from all ``ts``."""


class _Codes(dict[Hashable, int]):
    """Codes of distinct values. Looking up a new value adds it."""

    def __missing__(self, value: Hashable) -> int:
        code = self[value] = len(self)
        return code

    def encode(self, values: Sequence[Hashable]) -> NDArray[np.int32]:
        return np.fromiter(map(self.__getitem__, values), np.int32, len(values))


class _EventLists(dict[Hashable, Callable[[TraceEvent], Any]]):
    """Function that appends an event to its list, by category. Looked up once per spelling."""

    def __init__(self) -> None:
        super().__init__()
        self.host: dict[str, list[TraceEvent]] = {kind: [] for kind in CPU_KINDS}
        self.device: dict[str, list[TraceEvent]] = {kind: [] for kind in GPU_KINDS}
        self.sync: list[TraceEvent] = []
        self.counters: list[TraceEvent] = []
        self.without_category: list[TraceEvent] = []
        """Events without a category, from the legacy profiler, distinguished by their process."""
        self.other: dict[str, list[TraceEvent]] = {}

    def __missing__(self, category: Hashable) -> Callable[[TraceEvent], Any]:
        route = self[category] = self.find(category)
        return route

    def find(self, category: Hashable) -> Callable[[TraceEvent], Any]:
        key = category[:100].lower() if isinstance(category, str) else ""
        if category is None:
            return self.without_category.append
        if key in HOST_CATEGORIES:
            return self.host[HOST_CATEGORIES[key]].append
        if key in DEVICE_CATEGORIES:
            return self.device[DEVICE_CATEGORIES[key]].append
        if key == SYNC_CATEGORY:
            return self.sync.append
        if key == COUNTER_CATEGORY:
            return self.counters.append
        if key in IGNORED_CATEGORIES:
            return deque[TraceEvent](maxlen=0).append
        label = "category " + "".join(c if c.isprintable() else "?" for c in key[:60])
        if len(self.other) >= LABEL_LIMIT and label not in self.other:
            label = "other categories"
        return self.other.setdefault(label, []).append


def build_columns(
    events: list[TraceEvent], piece: bytes, *, unsound: int, lenient: int, epoch: int
) -> Piece:
    """Return the columns of events. ``piece`` is their text: counters are decoded from it again."""
    routes = _EventLists()
    other_events: list[TraceEvent] = []
    append_other = other_events.append
    for event in events:  # the only loop over single events
        if event.ph == "X":
            routes[event.cat](event)
        else:
            append_other(event)
    for event in routes.without_category:
        routes[event.pid if isinstance(event.pid, str) else "none"](event)
    instants, thread_names, begin_end_count = _sort_instant_events(other_events)

    names, threads, inputs, comms = _Codes(), _Codes(), _Codes(), _Codes()
    ignored = {label: len(kind_events) for label, kind_events in routes.other.items()}
    if begin_end_count:
        ignored["begin/end pairs"] = begin_end_count
    dropped = {}
    if lenient:
        dropped["unexpected types, read leniently"] = lenient
    if unsound:
        dropped["not decodable"] = unsound
    result = Piece(
        host=_concatenate(
            [
                _host_columns(kind, kind_events, names, threads, inputs, comms)
                for kind, kind_events in routes.host.items()
                if kind_events
            ]
        ),
        device=_concatenate(
            [
                _device_columns(kind, kind_events, names, comms)
                for kind, kind_events in routes.device.items()
                if kind_events
            ]
        ),
        sync=_sync_columns(routes.sync, names) if routes.sync else {},
        memory=_memory_columns(instants, threads) if instants else {},
        counters=_counter_columns(piece, names) if routes.counters else {},
        names=[_to_text(name) for name in names],
        threads=[(_to_text(pid), _to_text(tid)) for pid, tid in threads],  # type: ignore[misc, has-type]
        inputs=list(inputs),  # type: ignore[arg-type]
        comms=list(comms),  # type: ignore[arg-type]
        thread_names=thread_names,
        events=len(events),
        dropped=dropped,
        ignored=ignored,
        unsound=unsound,
        epoch=epoch,
    )
    if epoch:
        for group in (result.host, result.device, result.sync, result.memory, result.counters):
            if "ts" in group:  # times whose digits were not cut off still need the epoch subtracted
                group["ts"] = np.where(group["ts"] > 1e14, group["ts"] - epoch, group["ts"])
    return result


def _sort_instant_events(
    events: list[TraceEvent],
) -> tuple[list[TraceEvent], list[tuple[str, str, str]], int]:
    """Return memory instants, thread names and the number of B/E events among other events."""
    instants = []
    thread_names = []
    begin_end_count = 0
    for event in events:
        phase = event.ph
        if phase in ("s", "f", "t"):
            continue
        if phase in ("i", "I"):
            if event.args is not None and event.args.allocated is not None:
                instants.append(event)
        elif phase == "M":
            if event.name == "thread_name" and event.args is not None and event.args.name:
                thread_names.append(
                    (
                        _to_text(event.pid),
                        _to_text(event.tid),
                        _to_text(event.args.name)[:NAME_LIMIT],
                    )
                )
        elif phase in ("B", "E"):
            begin_end_count += 1
    return instants, thread_names, begin_end_count


def _to_text(value: Any) -> str:
    if isinstance(value, str):
        return value[:NAME_LIMIT]
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    return "" if value is None else str(value)[:NAME_LIMIT]


def _concatenate(parts: list[Columns]) -> Columns:
    if len(parts) < 2:
        return parts[0] if parts else {}
    return {key: np.concatenate([part[key] for part in parts]) for key in parts[0]}


# -- numbers ------------------------------------------------------------------------------------


def float_column(values: list[Any]) -> NDArray[np.float64]:
    """Return a float column, with NaN for values that are not numbers."""
    try:  # three times as fast as numpy if all values are floats
        return np.frombuffer(struct.pack(f"{len(values)}d", *values), np.float64)
    except struct.error:
        return np.fromiter(map(_to_float, values), np.float64, len(values))


def _to_float(value: Any) -> float:
    try:
        return float(value)
    except (TypeError, ValueError, OverflowError):
        return math.nan


def decode_integers(values: list[Any]) -> NDArray[np.int64]:
    """Return an integer column, with MISSING for values that are not valid numbers."""
    try:
        return np.fromiter(values, np.int64, len(values))
    except (TypeError, ValueError, OverflowError):
        return np.fromiter(map(_to_int, values), np.int64, len(values))


def _to_int(value: Any) -> int:
    try:
        number = int(value)
    except (TypeError, ValueError, OverflowError):
        as_float = _to_float(value)
        if not math.isfinite(as_float):
            return MISSING
        number = int(as_float)
    return number if -_MAX_INTEGER < number < _MAX_INTEGER else MISSING


def _external_ids(args: list[EventArgs]) -> NDArray[np.int64]:
    result = decode_integers([a.external for a in args])
    unknown = result == -1
    if unknown.any():
        result = np.where(unknown, decode_integers([a.external_old for a in args]), result)
    return result


def _time_columns(events: list[TraceEvent]) -> Columns:
    return {
        "ts": float_column([e.ts for e in events]),
        "dur": float_column([e.dur for e in events]),
    }


# -- host events --------------------------------------------------------------------------------


def _host_columns(
    kind: str,
    events: list[TraceEvent],
    names: _Codes,
    threads: _Codes,
    inputs: _Codes,
    comms: _Codes,
) -> Columns:
    count = len(events)
    no_codes = np.full(count, -1, dtype=np.int32)
    missing = np.full(count, MISSING, dtype=np.int64)
    name_codes = names.encode([e.name for e in events])
    kinds = np.full(count, CPU_KINDS.index(kind), dtype=np.uint8)
    if kind == "op":
        range_codes = [code for name, code in names.items() if is_range(str(name)[:100])]
        kinds[np.isin(name_codes, range_codes)] = CPU_KINDS.index("annotation")
    columns: Columns = {
        **_time_columns(events), "kind": kinds, "name": name_codes,
        "thread": _thread_codes(events, threads), "correlation": missing,
        "external": missing, "sequence": missing, "inputs": no_codes, "comm": no_codes,
    }  # fmt: skip
    if kind in ("op", "annotation", "runtime"):
        args = [e.args or NO_ARGS for e in events]
        columns["external"] = _external_ids(args)
        if kind == "runtime":
            columns["correlation"] = decode_integers([a.correlation for a in args])
        else:
            columns["sequence"] = decode_integers([a.sequence for a in args])
            columns["inputs"] = _input_codes(args, inputs)
            columns["comm"] = _comm_codes(args, comms)
    return columns


def _thread_codes(events: list[TraceEvent], codes: _Codes) -> NDArray[np.int32]:
    pids = [e.pid for e in events]
    if pids.count(pids[0]) < len(pids):
        return codes.encode([(e.pid, e.tid) for e in events])
    tids = _Codes()  # nearly always there is one process, so encode the thread alone
    column = tids.encode([e.tid for e in events])
    return codes.encode([(pids[0], tid) for tid in tids])[column]


def _input_codes(args: list[EventArgs], codes: _Codes) -> NDArray[np.int32]:
    result = np.fromiter(
        [
            codes[_join_with_nul((a.dims, a.types))]
            if a.dims is not ABSENT and a.strides is ABSENT and a.concrete is ABSENT
            else codes[_join_with_nul((a.dims, a.types, a.strides, a.concrete))]
            if a.dims is not ABSENT
            else codes[_join_with_nul((a.dims_old, a.types, a.strides, a.concrete))]
            if a.dims_old is not ABSENT
            else -1
            for a in args
        ],
        np.int32,
        len(args),
    )
    if not codes:
        return result
    valid_codes = np.arange(len(codes) + 1, dtype=np.int32)
    valid_codes[-1] = -1
    for code, text in enumerate(codes):
        if len(text) > RAW_LIMIT or not text.startswith(b"["):  # type: ignore[arg-type, attr-defined]
            valid_codes[code] = -1
    return valid_codes[result]


_comm_fields = attrgetter(*COMM_FIELDS)


def _comm_codes(args: list[EventArgs], codes: _Codes) -> NDArray[np.int32]:
    result = np.full(len(args), -1, dtype=np.int32)
    for row in [row for row, a in enumerate(args) if a.collective is not ABSENT]:
        key = _join_with_nul(_comm_fields(args[row]))
        if len(key) <= RAW_LIMIT:
            result[row] = codes[key]
    return result


# -- device work --------------------------------------------------------------------------------

_FLOAT_COLUMNS = ("bytes", "gbps", "blocks", "threads", "registers", "shared", "blocks_per_sm",
           "warps_per_sm", "occupancy", "active_blocks")  # fmt: skip


def _device_columns(kind: str, events: list[TraceEvent], names: _Codes, comms: _Codes) -> Columns:
    args = [e.args or NO_ARGS for e in events]
    count = len(events)
    columns: Columns = {
        **_time_columns(events),
        "kind": np.full(count, GPU_KINDS.index(kind), dtype=np.uint8),
        "name": names.encode([e.name for e in events]),
        "device": _fill_missing(
            float_column([a.device for a in args]), lambda: [e.pid for e in events]
        ),
        "stream": _fill_missing(
            float_column([a.stream for a in args]), lambda: [e.tid for e in events]
        ),
        "correlation": decode_integers([a.correlation for a in args]),
        "external": _external_ids(args),
        "graph": float_column([a.graph for a in args]),
        "limits": np.full(count, -1, dtype=np.int32),
        "comm": np.full(count, -1, dtype=np.int32),
        **dict.fromkeys(_FLOAT_COLUMNS, np.full(count, math.nan)),
    }
    if kind == "kernel":
        columns["blocks"], columns["threads"] = _launch_sizes(args)
        for name in ("registers", "shared", "blocks_per_sm", "warps_per_sm", "occupancy"):
            columns[name] = float_column(list(map(attrgetter(name), args)))
        columns["comm"] = _comm_codes(args, comms)
        if any(a.occupancy_detail is not ABSENT for a in args):
            columns["active_blocks"], columns["limits"] = _parse_occupancies(args, names)
    else:
        columns["bytes"] = float_column([a.bytes for a in args])
        columns["gbps"] = _fill_missing(
            float_column([a.gbps for a in args]), lambda: [a.gbps_old for a in args]
        )
    return columns


def _fill_missing(
    column: NDArray[np.float64], fallback: Callable[[], list[Any]]
) -> NDArray[np.float64]:
    unknown = np.isnan(column)
    return np.where(unknown, float_column(fallback()), column) if unknown.any() else column


def _launch_sizes(args: list[EventArgs]) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return the blocks of each grid and the threads of each block, NaN where unknown."""
    codes = _Codes()
    column = codes.encode([_join_with_nul((a.grid, a.block)) for a in args])
    sizes = np.array([_grid_and_block(text) for text in codes]).reshape(-1, 2)
    return sizes[column, 0], sizes[column, 1]


@lru_cache(maxsize=1 << 15)
def _grid_and_block(text: bytes) -> tuple[float, float]:
    grid, block = text.split(b"\0")
    return _multiply_sizes(grid), _multiply_sizes(block)


def _multiply_sizes(text: bytes) -> float:
    """Return the product of a small JSON list of sizes, or NaN if it is invalid."""
    try:
        sizes = msgspec.json.decode(text, type=list[int])
    except DECODE_ERRORS:
        return math.nan
    if not 0 < len(sizes) <= 3 or not all(0 < size < 1 << 32 for size in sizes):
        return math.nan
    return float(math.prod(sizes))


class _Occupancy(msgspec.Struct):
    activeBlocksPerMultiprocessor: float | None = None
    limitingFactors: str | None = None


def _parse_occupancies(
    args: list[EventArgs], names: _Codes
) -> tuple[NDArray[np.float64], NDArray[np.int32]]:
    """Return active blocks per multiprocessor and codes of limiting factors (new profilers)."""
    codes = _Codes()
    column = codes.encode([bytes(a.occupancy_detail) for a in args])
    active, limits = [], []
    for text in codes:
        try:
            occupancy = msgspec.json.decode(cast(bytes, text), type=_Occupancy)
        except DECODE_ERRORS:
            occupancy = _Occupancy()
        blocks = occupancy.activeBlocksPerMultiprocessor
        active.append(math.nan if blocks is None else blocks)
        limits.append(names[occupancy.limitingFactors] if occupancy.limitingFactors else -1)
    return np.array(active)[column], np.array(limits, dtype=np.int32)[column]


# -- syncs, memory, counters --------------------------------------------------------------------


def _sync_columns(events: list[TraceEvent], names: _Codes) -> Columns:
    args = [e.args or NO_ARGS for e in events]
    return {
        **_time_columns(events),
        "name": names.encode([e.name for e in events]),
        "device": float_column([a.device for a in args]),
        "stream": float_column([a.stream for a in args]),
        "correlation": decode_integers([a.correlation for a in args]),
        "wait_stream": float_column([a.wait_stream for a in args]),
        "wait_correlation": float_column([a.wait_correlation for a in args]),
    }


def _memory_columns(events: list[TraceEvent], threads: _Codes) -> Columns:
    args = [e.args or NO_ARGS for e in events]
    return {
        "ts": float_column([e.ts for e in events]),
        "thread": _thread_codes(events, threads),
        "bytes": decode_integers([a.alloc_bytes for a in args]),
        "address": decode_integers([a.address for a in args]),
        "allocated": decode_integers([a.allocated for a in args]),
        "reserved": decode_integers([a.reserved for a in args]),
        "device_type": float_column([a.device_type for a in args]),
        "device_id": float_column([a.device_id for a in args]),
    }


def _counter_columns(piece: bytes, names: _Codes) -> Columns:
    """Return the columns of hardware counters (``cuda_profiler_range``). Their argument names are
    metric names, so these few events are decoded a second time without a type."""
    rows: list[tuple[Any, Any, str, str, float]] = []
    for text in split_objects(repair_json(piece)[1:-1])[0]:
        if COUNTER_CATEGORY.encode() not in text:
            continue
        try:
            event = msgspec.json.decode(text)
        except DECODE_ERRORS:
            continue
        if not isinstance(event, dict) or event.get("cat") != COUNTER_CATEGORY:
            continue
        args = event.get("args")
        for metric, value in args.items() if isinstance(args, dict) else ():
            number = math.nan if isinstance(value, bool) else _to_float(value)
            if math.isfinite(number):
                rows.append(
                    (
                        event.get("ts"),
                        event.get("dur"),
                        str(metric)[:NAME_LIMIT],
                        _to_text(event.get("name")),
                        number,
                    )
                )
    if not rows:
        return {}
    return {
        "ts": float_column([row[0] for row in rows]),
        "dur": float_column([row[1] for row in rows]),
        "name": names.encode([row[2] for row in rows]),
        "range": names.encode([row[3] for row in rows]),
        "value": float_column([row[4] for row in rows]),
    }
