"""Assembly of a trace from its pieces' columns: codes merged, bad rows counted, rows joined."""

import ctypes
from collections.abc import Hashable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import polars as pl
from numpy.typing import NDArray

from advisor.core.trace import CPU_SCHEMA, GPU_SCHEMA
from advisor.read import tables
from advisor.read.event_columns import Columns, Piece
from advisor.read.launches import LaunchTable, classify_calls
from advisor.read.nesting import independent_stretches, nest, release_ranges, stack_order
from advisor.read.reader import EVENT_BYTES
from advisor.read.trace_events import DEVICE_KINDS, HOST_KINDS

Array = NDArray[Any]
DAY_US = 86_400e6
"""Longest plausible duration or distance, us: no profiler window is a day long."""
TEXT_BYTES = 200
"""Memory of a distinct text, besides its letters, bytes."""

_ANNOTATION, _PYTHON, _RUNTIME = map(HOST_KINDS.index, ("annotation", "python", "runtime"))
_MEDIAN_SAMPLE = 10_000


@dataclass
class AssembledTables:
    """Rows of any format, ready to be joined: times in whole ns from the trace's start; names,
    threads, inputs and collectives as codes into lists. A table without rows is empty."""

    host: Columns
    """``ts`` ``dur`` ``kind`` (index in HOST_KINDS) ``name`` ``thread`` ``correlation``
    ``external`` ``sequence`` (below 0: none) ``inputs`` ``comm`` (-1: none); perhaps ``call``
    (index in CALLS, -1: no call), else it follows from the name of a runtime call."""
    device: Columns
    """``ts`` ``dur`` ``kind`` (index in DEVICE_KINDS) ``name`` ``correlation`` ``external``
    ``limits`` ``comm``, and the other columns of GPU_SCHEMA, as floats (NaN for none) or as series
    of any numbers; perhaps series of ``copy``, ``src``, ``dst`` and ``limits``."""
    names: list[str]
    threads: list[tuple[str, str]]
    """Process and thread of each thread code, as shown."""
    thread_names: dict[tuple[str, str], str] = field(default_factory=dict)


@dataclass
class Facts:
    """Facts about a trace, found while its frames are built."""

    origin_ns: int = 0
    """Time of the trace's 0, ns after the file's base time."""
    end_ns: int = 0
    nesting_repaired: int = 0
    python_frames: bool = False
    runtime_calls: list[str] = field(default_factory=list)
    """Names of the runtime and driver calls."""
    given_calls: dict[str, str] = field(default_factory=dict)
    """Class (one of CALLS) by name, of calls that their name alone does not classify."""


class _Merger:
    """Merger of the dictionaries of pieces into one for the trace."""

    def __init__(self) -> None:
        self.index: dict[Hashable, int] = {}
        self.letters = 0
        """Number of letters of all its texts."""

    def table(self, values: list[Any]) -> Array:
        """Return the trace's code for each code of a piece; the last entry is for -1."""
        index = self.index
        known = len(index)
        codes = [index.setdefault(value, len(index)) for value in values]
        if len(index) > known:
            new = (v for v, code in zip(values, codes, strict=True) if code >= known)
            self.letters += sum(len(value) for value in new)
        return np.array([*codes, -1], dtype=np.int32)

    def values(self) -> list[Any]:
        return list(self.index)


class Assembler:
    """Builder of a trace's frames: takes pieces one by one, then joins them."""

    def __init__(self) -> None:
        self._names, self._threads, self._inputs, self._comms = (_Merger() for _ in range(4))
        self._parts: dict[str, list[Columns]] = {
            key: [] for key in ("host", "device", "sync", "memory", "counters")
        }
        self._epoch: int | None = None
        self.events = 0
        """Number of events decoded, including unusable ones."""
        self.rows = 0
        """Number of events that became rows."""
        self.unsound = 0
        """Number of stretches between commas that could not be decoded."""
        self.dropped: dict[str, int] = {}
        self.ignored: dict[str, int] = {}
        self.thread_names: dict[tuple[str, str], str] = {}

    def memory(self) -> int:
        """Estimate the memory that the trace takes while it is read and measured, bytes."""
        texts = self._names, self._threads, self._inputs, self._comms
        return EVENT_BYTES * self.rows + sum(TEXT_BYTES * len(t.index) + t.letters for t in texts)

    def add(self, piece: Piece) -> None:
        """Merge one piece's dictionaries and keep its columns."""
        names = self._names.table(piece.names)
        codes = {
            "name": names,
            "limits": names,
            "range": names,
            "thread": self._threads.table(piece.threads),
            "inputs": self._inputs.table(piece.inputs),
            "comm": self._comms.table(piece.comms),
        }
        if self._epoch is None:
            self._epoch = piece.epoch
        shift = piece.epoch - self._epoch
        for group, parts in self._parts.items():
            columns: Columns = getattr(piece, group)
            if not columns:
                continue
            merged = {k: codes[k][v] if k in codes else v for k, v in columns.items()}
            if shift:
                merged["ts"] = merged["ts"] + float(shift)
            parts.append(merged)
            self.rows += len(merged["ts"])
        self.events += piece.events
        self.unsound += piece.unsound
        for counts, more in ((self.dropped, piece.dropped), (self.ignored, piece.ignored)):
            for key, count in more.items():
                counts[key] = counts.get(key, 0) + count
        for pid, tid, name in piece.thread_names:
            self.thread_names[pid, tid] = name

    def build(
        self, given_calls: dict[str, str] | None = None
    ) -> tuple[dict[str, pl.DataFrame], Facts]:
        """Return the frames of a Trace by name, and facts for its meta. Empties the assembler."""
        calls = given_calls or {}
        host, device, sync, memory, counters = (self._take(g) for g in tuple(self._parts))
        origin_us = self._clean(host, device, sync, memory, counters)
        origin_ns = (self._epoch or 0) * 1000 + _exact_ns(origin_us)
        facts = Facts(origin_ns=origin_ns, given_calls=calls)
        ends = [
            self._to_ns(columns, origin_us) for columns in (host, device, sync, memory, counters)
        ]
        facts.end_ns = max(ends)
        texts = self._names.values()
        names = encode_names(texts)
        given = AssembledTables(host, device, texts, self._threads.values(), self.thread_names)
        frames, thread_table = join_tables(given, names, facts)
        frames |= {
            "sync": tables.sync_frame(sync, texts),
            "memory": tables.on_devices(tables.memory_frame(memory, thread_table), frames["gpu"]),
            "counters": tables.counters_frame(counters, names),
            "inputs": tables.inputs_frame(self._inputs.values()),
            "comms": tables.comms_frame(self._comms.values()),
        }
        return frames, facts

    def _take(self, group: str) -> Columns:
        """Concatenate the columns of all pieces; empty if there are no rows."""
        parts = self._parts[group]
        joined: Columns = {}
        for key in list(parts[0]) if parts else ():
            # column by column, so that only one column is held twice
            joined[key] = np.concatenate([part.pop(key) for part in parts])
        parts.clear()
        return joined

    # -- cleaning ---------------------------------------------------------------------------

    def _clean(self, *groups: Columns) -> float:
        """Drop rows without usable times; return the origin (smallest start, us)."""
        for columns in groups:
            if not columns:
                continue
            with np.errstate(invalid="ignore"):
                self._drop(columns, ~np.isfinite(columns["ts"]), "no start time")
                if "dur" in columns:
                    self._drop(columns, ~np.isfinite(columns["dur"]), "no duration")
                    self._drop(columns, columns["dur"] < 0, "negative duration")
                    self._drop(columns, columns["dur"] > DAY_US, "absurd duration")
        starts = [columns["ts"] for columns in groups if len(columns.get("ts", ()))]
        if starts:
            sample = [t[:: max(1, len(t) // _MEDIAN_SAMPLE)] for t in starts]
            middle = float(np.median(np.concatenate(sample)))
            for columns in groups:
                if columns:
                    far = np.abs(columns["ts"] - middle) > DAY_US
                    self._drop(columns, far, "absurd start time")
        for columns in groups:
            if columns and not len(columns["ts"]):
                columns.clear()
        return min((float(columns["ts"].min()) for columns in groups if columns), default=0.0)

    def _drop(self, columns: Columns, bad: Array, reason: str) -> None:
        count = int(bad.sum())
        if count:
            self.dropped[reason] = self.dropped.get(reason, 0) + count
            keep = ~bad
            for key in columns:
                columns[key] = columns[key][keep]

    @staticmethod
    def _to_ns(columns: Columns, origin_us: float) -> int:
        """Convert times to whole ns from the origin, in place; return the last end."""
        if not columns:
            return 0
        columns["ts"] = np.rint((columns["ts"] - origin_us) * 1000.0).astype(np.int64)
        if "dur" not in columns:
            return int(columns["ts"].max())
        columns["dur"] = np.rint(columns["dur"] * 1000.0).astype(np.int64)
        return int((columns["ts"] + columns["dur"]).max())

    # -- joins ------------------------------------------------------------------------------

    @staticmethod
    def _order_threads(host: Columns, threads: list[tuple[str, str]]) -> Array:
        """Number the threads by their host rows, the busiest first; return old -> new."""
        counts = np.zeros(len(threads), dtype=np.int64)
        if host:
            counts = np.bincount(host["thread"], minlength=len(threads))
        order = np.argsort(-counts, kind="stable")
        table = np.empty(len(threads), dtype=np.int32)
        table[order] = np.arange(len(order), dtype=np.int32)
        threads[:] = [threads[old] for old in order.tolist()]
        if host:
            host["thread"] = table[host["thread"]]
        return table

    @staticmethod
    def _nest(
        host: Columns,
        device: Columns,
        texts: list[str],
        threads: list[tuple[str, str]],
        facts: Facts,
    ) -> tuple[Array, Array]:
        """Order both tables, find parents and launches; return launch and op of device rows."""
        if device:
            # kinds break ties, so that the order does not depend on where pieces were cut
            key = device["ts"] * len(DEVICE_KINDS) + device["kind"]
            _reorder(device, np.argsort(key, kind="stable"))
        none = np.full(len(device.get("ts", ())), -1, dtype=np.int32)
        if not host:
            return none, none
        _leave_closures(host, texts)
        _reorder(host, stack_order(host["thread"], host["ts"], host["dur"], host["kind"]))
        trim_memory(len(host["ts"]))
        host["parent"], host["depth"], facts.nesting_repaired = _stacks(host)
        runtime = np.flatnonzero(host["kind"] == _RUNTIME)
        codes = np.unique(host["name"][runtime])
        facts.python_frames = bool((host["kind"] == _PYTHON).any())
        facts.runtime_calls = [texts[code] for code in codes.tolist()]
        if "call" not in host:
            call = np.full(len(host["kind"]), -1, dtype=np.int8)
            call[runtime] = classify_calls(
                host["name"][runtime], codes, facts.runtime_calls, facts.given_calls
            )
            host["call"] = call
        if not device:
            return none, none
        _, process = np.unique([pid for pid, _ in threads], return_inverse=True)
        launches = LaunchTable(host, process)
        launch = launches.find(device)
        launches.classify_unknown_calls(launch, device["kind"])
        return launch, launches.op_around(launch, device)


def encode_names(texts: list[str]) -> pl.Series:
    """Return the names as a categorical series, in the order of their codes."""
    return pl.Series("name", texts, dtype=pl.String).cast(pl.Categorical)


def join_tables(
    given: AssembledTables, names: pl.Series, facts: Facts
) -> tuple[dict[str, pl.DataFrame], Array]:
    """Return the frames ``cpu``, ``gpu`` and ``threads`` with all joins (stacks, launches, the ops
    around them), and the row of ``threads`` for each thread code. Orders the rows in place; every
    other column goes along."""
    host, device = given.host, given.device
    table = Assembler._order_threads(host, given.threads)
    launches = Assembler._nest(host, device, given.names, given.threads, facts)
    count = len(launches[0]) + len(host.get("ts", ()))
    trim_memory(count)
    cpu = tables.cpu_frame(host, names) if host else pl.DataFrame(schema=CPU_SCHEMA)
    trim_memory(count)
    return {
        "cpu": cpu,
        "gpu": tables.gpu_frame(device, names, given.names, *launches)
        if device
        else pl.DataFrame(schema=GPU_SCHEMA),
        "threads": tables.threads_frame(given.threads, given.thread_names),
    }, table


def _leave_closures(host: Columns, texts: list[str]) -> None:
    """Let each ``Optimizer.step#…`` range begin behind the closure that it was given, in place: the
    range is then the update alone, as it is without a closure. PyTorch Lightning gives each
    optimizer one, with the forward and the backward pass in it.

    A closure is known by an operator of the range's thread that autograd numbers, and nodes of the
    backward pass that begin in the range. It ends with the last of these."""
    is_step, is_node = (
        np.array([text.startswith(prefix) for text in texts], dtype=bool)
        for prefix in ("Optimizer.step#", "autograd::engine::evaluate_function")
    )
    name, kind, thread, ts = (host[key] for key in ("name", "kind", "thread", "ts"))
    steps = np.flatnonzero((kind == _ANNOTATION) & is_step[name])
    nodes = np.flatnonzero((kind != _ANNOTATION) & is_node[name])
    if not len(steps) or not len(nodes) or tables.is_blank(host["sequence"]):
        return
    nodes = nodes[np.argsort(ts[nodes], kind="stable")]
    begins, ends = ts[nodes], ts[nodes] + host["dur"][nodes]
    numbered = (np.asarray(host["sequence"]) >= 0) & ~is_node[name]
    starts = {own: np.sort(ts[numbered & (thread == own)]) for own in np.unique(thread[steps])}
    for step in steps.tolist():
        begin, end = ts[step], ts[step] + host["dur"][step]
        first, last = np.searchsorted(begins, (begin, end))
        if first < last:
            before, behind = np.searchsorted(starts[thread[step]], (begin, begins[last - 1]))
            if before < behind:
                ts[step] = min(end, max(begin, ends[first:last].max()))
                host["dur"][step] = end - ts[step]


def _stacks(host: Columns) -> tuple[Array, Array, int]:
    """Return parent and depth of the ordered host rows, and the number that outlasted their
    parents: these are cut, in place."""
    parent, depth = (np.empty(len(host["ts"]), dtype=np.int32) for _ in range(2))
    repaired = 0
    for part in independent_stretches(host["thread"], host["ts"], host["dur"]):
        kind, thread, start, dur = (host[key][part] for key in ("kind", "thread", "ts", "dur"))
        ends = start + dur
        result = nest(thread, start, release_ranges(kind, thread, start, ends))
        # a range that was opened in one function and closed in another keeps its length
        cut = (ends > result.end) & (kind != _ANNOTATION)
        dur[cut] = result.end[cut] - start[cut]
        parent[part] = np.where(result.parent < 0, -1, result.parent + part.start)
        depth[part] = result.depth
        repaired += result.repaired
    return parent, depth, repaired


def _reorder(columns: dict[str, Any], order: Array) -> None:
    """Put the rows of ``columns`` into ``order``, in place, one column at a time to save memory."""
    index = None
    for key, column in columns.items():
        if isinstance(column, np.ndarray):
            if not tables.is_blank(column):
                columns[key] = column[order]
        elif column.null_count() < len(column):
            index = pl.Series(order.astype(np.uint32)) if index is None else index
            columns[key] = column.gather(index)


def _exact_ns(us: float) -> int:
    """Convert microseconds to ns without rounding a Unix time to a float's precision."""
    whole = int(us)
    return whole * 1000 + round((us - whole) * 1000)


# -- memory ----------------------------------------------------------------------------------------

MIN_ROWS_TO_GIVE_BACK = 1_000_000
"""Rows from which the milliseconds it takes pay off."""


def trim_memory(rows: int) -> None:
    """Return memory of freed columns from glibc's malloc to the system. Otherwise malloc keeps it
    while others are made, and a large file takes half as much memory more. Does nothing for few
    ``rows``, nor with another malloc."""
    if rows < MIN_ROWS_TO_GIVE_BACK:
        return
    with suppress(AttributeError, OSError, TypeError):
        ctypes.CDLL(None).malloc_trim(0)
