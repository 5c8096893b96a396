"""Columns of all pieces to one Trace: codes merged, bad rows dropped and counted, joins made."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

import msgspec
import numpy as np
import polars as pl
from numpy.typing import NDArray

from advisor.ingest.decode import MISSING, Columns, Piece
from advisor.ingest.nesting import nest
from advisor.ingest.spelling import call_class, copy_parts, sync_kind
from advisor.trace import (
    CALLS,
    COMMS_SCHEMA,
    COUNTER_SCHEMA,
    CPU_KINDS,
    CPU_SCHEMA,
    GPU_KINDS,
    GPU_SCHEMA,
    INPUTS_SCHEMA,
    MEMORY_SCHEMA,
    SYNC_SCHEMA,
    THREADS_SCHEMA,
    Call,
    Copy,
    CpuKind,
    GpuKind,
    SyncKind,
)

Array = NDArray[Any]
DAY_US = 86_400e6
"""No profiler window is a day long: durations and distances beyond that are damage."""

_OP, _ANNOTATION, _PYTHON, _RUNTIME = (
    CPU_KINDS.index(kind) for kind in ("op", "annotation", "python", "runtime")
)
# Which of two host events with the same start and length is the outer one.
_OUTER_FIRST = np.zeros(len(CPU_KINDS), dtype=np.int8)
_OUTER_FIRST[[_ANNOTATION, _PYTHON, _OP, _RUNTIME]] = [0, 1, 2, 3]


class _Merger:
    """One dictionary for the whole trace out of the dictionaries of its pieces."""

    def __init__(self) -> None:
        self.index: dict[Hashable, int] = {}

    def table(self, values: list[Any]) -> Array:
        index = self.index
        return np.array([index.setdefault(v, len(index)) for v in values] + [-1], dtype=np.int32)


class Assembler:
    """Takes pieces one by one, in any order that keeps ``ts`` meaningful, then builds frames."""

    def __init__(self) -> None:
        self._names, self._threads, self._inputs, self._comms = (_Merger() for _ in range(4))
        self._parts: dict[str, list[Columns]] = {
            key: [] for key in ("host", "device", "sync", "memory", "counters")
        }
        self.events = 0
        self.unsound = 0
        self.dropped: dict[str, int] = {}
        self.ignored: dict[str, int] = {}
        self.thread_names: dict[tuple[str, str], str] = {}

    def add(self, piece: Piece) -> None:
        """Merge one piece's dictionaries and keep its columns."""
        names = self._names.table(piece.names)
        threads = self._threads.table(piece.threads)
        inputs = self._inputs.table(piece.inputs)
        comms = self._comms.table(piece.comms)
        tables = {"name": names, "limits": names, "range": names, "thread": threads,
                  "inputs": inputs, "comm": comms}  # fmt: skip
        for group, parts in self._parts.items():
            columns: Columns = getattr(piece, group)
            if columns:
                parts.append({k: tables[k][v] if k in tables else v for k, v in columns.items()})
        self.events += piece.events
        self.unsound += piece.unsound
        for key, count in piece.dropped.items():
            self.dropped[key] = self.dropped.get(key, 0) + count
        for key, count in piece.ignored.items():
            self.ignored[key] = self.ignored.get(key, 0) + count
        for pid, tid, name in piece.thread_names:
            self.thread_names[pid, tid] = name

    def build(self) -> tuple[dict[str, pl.DataFrame], dict[str, Any]]:
        """The frames of a Trace by name, and facts for its meta. Empties the assembler."""
        host, device, sync, memory, counters = (self._take(g) for g in tuple(self._parts))
        names = pl.Series("name", list(self._names.index), dtype=pl.String).cast(pl.Categorical)
        origin = self._clean(host, device, sync, memory, counters)
        facts: dict[str, Any] = {"origin_us": origin, "sync_events": bool(len(sync.get("ts", [])))}
        cpu, lookup = self._cpu(host, names, origin, facts)
        gpu = self._gpu(device, names, origin, lookup)
        frames = {
            "cpu": cpu,
            "gpu": gpu,
            "sync": self._sync(sync, names, origin),
            "memory": self._memory(memory, origin),
            "counters": self._counters(counters, names, origin),
            "inputs": self._inputs_frame(),
            "comms": self._comms_frame(),
            "threads": self._threads_frame(),
        }
        facts["end_ns"] = max(
            (int((f["ts"] + f["dur"]).max()) for f in (cpu, gpu) if len(f)),  # type: ignore[arg-type]
            default=0,
        )
        return frames, facts

    def _take(self, group: str) -> Columns:
        parts = self._parts[group]
        if not parts:
            return {}
        keys = list(parts[0])
        joined = {}
        for key in keys:  # column by column, so that only one column is held twice
            joined[key] = np.concatenate([part.pop(key) for part in parts])
        parts.clear()
        return joined

    def _drop(self, columns: Columns, bad: Array, reason: str) -> None:
        count = int(bad.sum())
        if count:
            self.dropped[reason] = self.dropped.get(reason, 0) + count
            for key in columns:
                columns[key] = columns[key][~bad]

    def _clean(self, *groups: Columns) -> float:
        """Drop rows without usable times; return the origin (smallest start, µs)."""
        for columns in groups:
            if "ts" not in columns:
                continue
            self._drop(columns, ~np.isfinite(columns["ts"]), "no start time")
            if "dur" in columns:
                dur = columns["dur"]
                self._drop(columns, ~np.isfinite(dur), "no duration")
                self._drop(columns, columns["dur"] < 0, "negative duration")
                self._drop(columns, columns["dur"] > DAY_US, "absurd duration")
        timed = [c["ts"] for c in groups if len(c.get("ts", ()))]
        if not timed:
            return 0.0
        middle = float(np.median(np.concatenate([t[:: max(1, len(t) // 10_000)] for t in timed])))
        for columns in groups:
            if "ts" in columns:
                self._drop(columns, np.abs(columns["ts"] - middle) > DAY_US, "absurd start time")
        return min((float(c["ts"].min()) for c in groups if len(c.get("ts", ()))), default=0.0)

    def _cpu(
        self, host: Columns, names: pl.Series, origin: float, facts: dict[str, Any]
    ) -> tuple[pl.DataFrame, _Launches]:
        if not len(host.get("ts", ())):
            return pl.DataFrame(schema=CPU_SCHEMA), _Launches.empty()
        ts = _ns(host.pop("ts"), origin)
        dur = np.rint(host.pop("dur") * 1000.0).astype(np.int64)
        host["thread"] = self._compact_threads(host["thread"])
        order = _stack_order(host["thread"], ts, dur, host["kind"])
        ts, dur = ts[order], dur[order]
        for key in host:
            host[key] = host[key][order]
        nesting = nest(host["thread"].astype(np.int64), ts, ts + dur)
        # a range that was opened in one function and closed in another keeps its length
        cut = (ts + dur > nesting.end) & (host["kind"] != _ANNOTATION)
        dur[cut] = nesting.end[cut] - ts[cut]
        facts["nesting_repaired"] = nesting.repaired
        call = self._calls(host)
        lookup = _Launches(host, call, nesting.parent)
        frame = pl.DataFrame(
            {
                "ts": ts,
                "dur": dur,
                "kind": _decode(host["kind"], CPU_KINDS, CpuKind),
                "name": names.gather(host["name"]),
                "thread": host["thread"],
                "parent": _nullable(nesting.parent, -1),
                "depth": nesting.depth,
                "call": _decode(call, CALLS, Call),
                "correlation": _nullable(_id(host["correlation"]), MISSING),
                "external": _nullable(_id(host["external"]), MISSING),
                "sequence": _nullable(_id(host["sequence"]), MISSING),
                "inputs": _nullable(host["inputs"], -1),
                "comm": _nullable(host["comm"], -1),
            },
        )
        return _conform(frame, CPU_SCHEMA), lookup

    def _calls(self, host: Columns) -> Array:
        """Call class of each runtime row, -1 elsewhere; names are classified once each."""
        call = np.full(len(host["kind"]), -1, dtype=np.int8)
        runtime = np.flatnonzero(host["kind"] == _RUNTIME)
        codes = np.unique(host["name"][runtime])
        if len(codes):
            texts = list(self._names.index)
            table = np.full(int(codes.max()) + 1, -1, dtype=np.int8)
            table[codes] = [call_class(str(texts[c])) for c in codes.tolist()]
            call[runtime] = table[host["name"][runtime]]
        return call

    def _compact_threads(self, codes: Array) -> Array:
        """Keep only threads that have host rows, the busiest first."""
        counts = np.bincount(codes, minlength=len(self._threads.index))
        order = np.argsort(-counts, kind="stable")
        order = order[counts[order] > 0]
        table = np.full(len(counts), -1, dtype=np.int32)
        table[order] = np.arange(len(order), dtype=np.int32)
        threads = list(self._threads.index)
        kept = [threads[c] for c in order.tolist()]
        rest = [t for t in threads if t not in set(kept)] if len(kept) < len(threads) else []
        self._threads.index = {thread: row for row, thread in enumerate([*kept, *rest])}
        self._thread_table = table
        return table[codes]

    def _gpu(
        self, device: Columns, names: pl.Series, origin: float, lookup: _Launches
    ) -> pl.DataFrame:
        if not len(device.get("ts", ())):
            return pl.DataFrame(schema=GPU_SCHEMA)
        order = np.argsort(device["ts"], kind="stable")
        for key in device:
            device[key] = device[key][order]
        ts = _ns(device["ts"], origin)
        launch, op = lookup.find(_id(device["correlation"]), _id(device["external"]))
        direction, src, dst = self._copies(device)
        frame = pl.DataFrame(
            {
                "ts": ts,
                "dur": np.rint(device["dur"] * 1000.0).astype(np.int64),
                "kind": _decode(device["kind"], GPU_KINDS, GpuKind),
                "name": names.gather(device["name"]),
                "device": _whole(device["device"]).fill_null(0),
                "stream": _whole(device["stream"]).fill_null(0),
                "correlation": _nullable(_id(device["correlation"]), MISSING),
                "external": _nullable(_id(device["external"]), MISSING),
                "launch": _nullable(launch, -1),
                "op": _nullable(op, -1),
                "bytes": _whole(device["bytes"]),
                "gbps": _real(device["gbps"]),
                "copy": direction,
                "src": src,
                "dst": dst,
                **{
                    key: _whole(device[key]) for key in ("blocks", "threads", "registers", "shared")
                },
                **{
                    key: _real(device[key])
                    for key in ("blocks_per_sm", "warps_per_sm", "occupancy", "active_blocks")
                },
                "limits": _gather_null(names, device["limits"]),
                "graph": _whole(device["graph"]),
                "comm": _nullable(device["comm"], -1),
            }
        )
        return _conform(frame, GPU_SCHEMA)

    def _copies(self, device: Columns) -> tuple[pl.Series, pl.Series, pl.Series]:
        """Direction and memories of copies; names are parsed once each."""
        rows = np.flatnonzero(device["kind"] == GPU_KINDS.index("memcpy"))
        codes = np.unique(device["name"][rows])
        texts = list(self._names.index)
        size = int(codes.max()) + 1 if len(codes) else 1
        direction = np.full(size, -1, dtype=np.int32)
        src: list[str | None] = [None] * size
        dst: list[str | None] = [None] * size
        for code in codes.tolist():
            direction[code], src[code], dst[code] = copy_parts(str(texts[code]))
        at = np.full(len(device["kind"]), -1, dtype=np.int64)
        at[rows] = device["name"][rows]
        found = np.where(at >= 0, direction[np.maximum(at, 0)], -1)
        from advisor.trace import COPIES

        sources = pl.Series(src, dtype=pl.String).cast(pl.Categorical)
        targets = pl.Series(dst, dtype=pl.String).cast(pl.Categorical)
        return (
            _decode(found, COPIES, Copy),
            _gather_null(sources, at),
            _gather_null(targets, at),
        )

    def _sync(self, sync: Columns, names: pl.Series, origin: float) -> pl.DataFrame:
        if not len(sync.get("ts", ())):
            return pl.DataFrame(schema=SYNC_SCHEMA)
        texts = [str(t) for t in self._names.index]
        kinds = np.array([sync_kind(texts[c]) for c in sync["name"].tolist()], dtype=np.int8)
        from advisor.trace import SYNC_KINDS

        stream = np.where(sync["stream"] < 0, np.nan, sync["stream"])
        frame = pl.DataFrame(
            {
                "ts": _ns(sync["ts"], origin),
                "dur": np.rint(sync["dur"] * 1000.0).astype(np.int64),
                "kind": _decode(kinds, SYNC_KINDS, SyncKind),
                "device": _whole(sync["device"]),
                "stream": _whole(stream),
                "correlation": _nullable(_id(sync["correlation"]), MISSING),
                "wait_stream": _whole(np.where(sync["wait_stream"] < 0, np.nan, sync["wait_stream"])),
                "wait_correlation": _whole(
                    np.where(sync["wait_correlation"] < 0, np.nan, sync["wait_correlation"])
                ),
            }
        )  # fmt: skip
        return _conform(frame, SYNC_SCHEMA).filter(pl.col("kind").is_not_null()).sort("ts")

    def _memory(self, memory: Columns, origin: float) -> pl.DataFrame:
        if not len(memory.get("ts", ())):
            return pl.DataFrame(schema=MEMORY_SCHEMA)
        table = getattr(self, "_thread_table", None)
        thread = memory["thread"] if table is None else table[memory["thread"]]
        device = np.where(memory["device_type"] == 0, -1.0, memory["device_id"])
        frame = pl.DataFrame(
            {
                "ts": _ns(memory["ts"], origin),
                "device": _whole(device),
                "thread": _nullable(thread.astype(np.int32), -1),
                **{
                    key: _whole(memory[key])
                    for key in ("bytes", "address", "allocated", "reserved")
                },
            }
        )
        return _conform(frame, MEMORY_SCHEMA).sort("ts")

    def _counters(self, counters: Columns, names: pl.Series, origin: float) -> pl.DataFrame:
        if not len(counters.get("ts", ())):
            return pl.DataFrame(schema=COUNTER_SCHEMA)
        frame = pl.DataFrame(
            {
                "ts": _ns(counters["ts"], origin),
                "dur": np.rint(counters["dur"] * 1000.0).astype(np.int64),
                "name": names.gather(counters["name"]),
                "range": names.gather(counters["range"]),
                "value": counters["value"],
            }
        )
        return _conform(frame, COUNTER_SCHEMA).sort("ts")

    def _inputs_frame(self) -> pl.DataFrame:
        rows: list[Any] = list(self._inputs.index)
        texts = [[part.decode("utf-8", "replace") for part in row] for row in rows]
        return pl.DataFrame(texts, schema=INPUTS_SCHEMA, orient="row")

    def _comms_frame(self) -> pl.DataFrame:
        rows: list[Any] = list(self._comms.index)
        table = []
        for row in rows:
            v = [_plain(part) for part in row]
            whole = [x if isinstance(x, int) and abs(x) < 1 << 62 else None for x in v]
            text = [x if isinstance(x, str) or x is None else _json(x) for x in v]
            table.append(
                (
                    text[0],
                    whole[1],
                    whole[2],
                    whole[3],
                    text[4],
                    text[5],
                    text[6],
                    text[7],
                    text[8],
                    text[9],
                    whole[10],
                )  # fmt: skip
            )
        return pl.DataFrame(table, schema=COMMS_SCHEMA, orient="row")

    def _threads_frame(self) -> pl.DataFrame:
        threads: list[Any] = list(self._threads.index)
        rows = [(pid, tid, self.thread_names.get((pid, tid))) for pid, tid in threads]
        return pl.DataFrame(rows, schema=THREADS_SCHEMA, orient="row")


class _Launches:
    """From device work to the runtime call that launched it, and the op around that."""

    def __init__(self, host: Columns, call: Array, parent: Array) -> None:
        self.parent = parent
        self.is_op = host["kind"] == _OP
        rows = np.flatnonzero((host["kind"] == _RUNTIME) & (_id(host["correlation"]) >= 0))
        waits = [CALLS.index(c) for c in ("sync_device", "sync_stream", "sync_event",
                                          "event_record", "event_query", "stream_wait")]  # fmt: skip
        rows = rows[~np.isin(call[rows], waits)]
        order = np.argsort(host["correlation"][rows], kind="stable")
        self.rows = rows[order]
        self.keys = host["correlation"][self.rows]
        ops = np.flatnonzero(self.is_op & (_id(host["external"]) >= 0))
        order = np.argsort(host["external"][ops], kind="stable")
        self.ops = ops[order]
        self.op_keys = host["external"][self.ops]

    @classmethod
    def empty(cls) -> _Launches:
        none = np.zeros(0, dtype=np.int64)
        return cls(
            {"kind": none, "correlation": none, "external": none}, none, none.astype(np.int32)
        )

    def find(self, correlation: Array, external: Array) -> tuple[Array, Array]:
        """Launch row and op row of each device row, -1 where there is none."""
        launch = _match(self.keys, self.rows, correlation)
        op = launch.copy()
        for _ in range(2000):
            climb = (op >= 0) & ~self.is_op[np.maximum(op, 0)] if len(self.is_op) else op >= 0
            if not climb.any():
                break
            op[climb] = self.parent[op[climb]]
        lost = op < 0
        op[lost] = _match(self.op_keys, self.ops, external[lost])
        return launch.astype(np.int32), op.astype(np.int32)


def _match(keys: Array, rows: Array, wanted: Array) -> Array:
    """For each wanted id the (first) row that has it, else -1. ``keys`` is sorted."""
    if not len(keys):
        return np.full(len(wanted), -1, dtype=np.int64)
    place = np.minimum(np.searchsorted(keys, wanted), len(keys) - 1)
    return np.where((keys[place] == wanted) & (wanted >= 0), rows[place], -1)


def _stack_order(thread: Array, ts: Array, dur: Array, kind: Array) -> Array:
    """Order by (thread, start, longest first, outer kind first); most input is nearly sorted."""
    span = int(ts.max()) + 1
    key = thread.astype(np.int64) * span + ts
    order = np.argsort(key, kind="stable")
    key = key[order]
    same = np.zeros(len(key), dtype=bool)
    equal = key[1:] == key[:-1]
    same[1:] |= equal
    same[:-1] |= equal
    ties = np.flatnonzero(same)
    if len(ties):
        rows = order[ties]
        again = np.lexsort((_OUTER_FIRST[kind[rows]], -dur[rows], key[ties]))
        order[ties] = rows[again]
    return order


def _ns(ts_us: Array, origin_us: float) -> NDArray[np.int64]:
    return np.rint((ts_us - origin_us) * 1000.0).astype(np.int64)


def _id(values: Array) -> Array:
    """Negative ids mean none."""
    return np.where(values < 0, MISSING, values)


def _nullable(values: Array, missing: int) -> pl.Series:
    series = pl.Series(values)
    return series.set(pl.Series(values == missing), None)


def _whole(values: Array) -> pl.Series:
    """Floats that stand for integers, NaN for none."""
    good = np.isfinite(values) & (np.abs(values) < 2.0**62)
    series = pl.Series(np.where(good, values, 0).astype(np.int64))
    return series if good.all() else series.set(pl.Series(~good), None)


def _real(values: Array) -> pl.Series:
    return pl.Series(values).fill_nan(None)


def _decode(codes: Array, values: tuple[str, ...], dtype: Any) -> pl.Series:
    """Codes to an enumeration, -1 to null."""
    table = pl.Series([*values, None], dtype=dtype)
    return table.gather(np.where(codes < 0, len(values), codes).astype(np.uint32))


def _gather_null(table: pl.Series, codes: Array) -> pl.Series:
    if not (codes >= 0).any():
        return pl.Series([None], dtype=table.dtype).new_from_index(0, len(codes))
    index = pl.Series(codes.astype(np.int64))
    return table.gather(index.set(index < 0, None))


def _conform(frame: pl.DataFrame, schema: dict[str, Any]) -> pl.DataFrame:
    return frame.select(
        pl.col(name) if frame.schema[name] == dtype else pl.col(name).cast(dtype, strict=False)
        for name, dtype in schema.items()
    )


def _plain(part: bytes) -> Any:
    try:
        return msgspec.json.decode(part) if part else None
    except (msgspec.DecodeError, RecursionError, UnicodeError):
        return part.decode("utf-8", "replace")


def _json(value: Any) -> str:
    return msgspec.json.encode(value).decode()
