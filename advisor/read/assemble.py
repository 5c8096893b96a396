"""Assembly of a trace from the columns of its pieces: merges codes, drops bad rows, joins rows."""

import ctypes
from collections.abc import Hashable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import polars as pl

from advisor.core.event_kinds import CPU_KINDS, GPU_KINDS
from advisor.core.intervals import Array
from advisor.core.trace import CPU_SCHEMA, GPU_SCHEMA
from advisor.read import tables
from advisor.read.event_columns import Columns, Piece
from advisor.read.launches import LaunchTable, classify_calls
from advisor.read.nesting import independent_stretches, nest, release_ranges, stack_order
from advisor.read.reader import EVENT_BYTES

DAY_US = 86_400e6
"""Longest plausible duration or distance in us. No profiler window is a day long."""
TEXT_BYTES = 200
"""Memory of a distinct text in bytes, in addition to its characters."""

_ANNOTATION, _PYTHON, _RUNTIME = map(CPU_KINDS.index, ("annotation", "python", "runtime"))
_MEDIAN_SAMPLE = 10_000


@dataclass
class AssembledTables:
    """Rows of any format, ready to be joined. Times are whole ns from the trace's start. Names,
    threads, inputs and collectives are codes into lists. A table without rows is empty."""

    host: Columns
    """``ts`` ``dur`` ``kind`` (index in CPU_KINDS) ``name`` ``thread`` ``correlation``
    ``external`` ``sequence`` (below 0: none) ``inputs`` ``comm`` (-1: none). Optional: ``call``
    (index in CALLS, -1: no call), which otherwise follows from the name of a runtime call."""
    device: Columns
    """``ts`` ``dur`` ``kind`` (index in GPU_KINDS) ``name`` ``correlation`` ``external``
    ``limits`` ``comm``, and the other columns of GPU_SCHEMA, as floats (NaN for none) or as series
    of any numbers. Optional: series of ``copy``, ``src``, ``dst`` and ``limits``."""
    names: list[str]
    threads: list[tuple[str, str]]
    """Process and thread of each thread code, as displayed."""
    thread_names: dict[tuple[str, str], str] = field(default_factory=dict)


@dataclass
class Facts:
    """Facts about a trace, found while its frames are built."""

    origin_ns: int = 0
    """Time of the trace's 0, in ns after the file's base time."""
    end_ns: int = 0
    nesting_repaired: int = 0
    python_frames: bool = False
    runtime_calls: list[str] = field(default_factory=list)
    """Names of the runtime and driver calls."""
    given_calls: dict[str, str] = field(default_factory=dict)
    """Class (one of CALLS) by name, for calls whose name alone does not give the class."""


class _Merger:
    """Merger of the dictionaries of the pieces into one for the trace."""

    def __init__(self) -> None:
        self.index: dict[Hashable, int] = {}
        self.text_length = 0
        """Number of characters of all texts."""

    def table(self, values: list[Any]) -> Array:
        """Return the trace's code for each code of a piece. The last entry is for -1."""
        index = self.index
        known_count = len(index)
        codes = [index.setdefault(value, len(index)) for value in values]
        if len(index) > known_count:
            new_values = (
                item for item, code in zip(values, codes, strict=True) if code >= known_count
            )
            self.text_length += sum(len(value) for value in new_values)
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
        """Number of list elements that could not be decoded."""
        self.dropped: dict[str, int] = {}
        self.ignored: dict[str, int] = {}
        self.thread_names: dict[tuple[str, str], str] = {}

    def memory(self) -> int:
        """Estimate the memory in bytes that the trace takes while it is read and measured."""
        mergers = self._names, self._threads, self._inputs, self._comms
        return EVENT_BYTES * self.rows + sum(
            TEXT_BYTES * len(merger.index) + merger.text_length for merger in mergers
        )

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
        for counts, piece_counts in ((self.dropped, piece.dropped), (self.ignored, piece.ignored)):
            for key, count in piece_counts.items():
                counts[key] = counts.get(key, 0) + count
        for pid, tid, name in piece.thread_names:
            self.thread_names[pid, tid] = name

    def build(
        self, given_calls: dict[str, str] | None = None
    ) -> tuple[dict[str, pl.DataFrame], Facts]:
        """Return the frames of a Trace by name, and facts for its meta. Empties the assembler."""
        calls = given_calls or {}
        host, device, sync, memory, counters = (
            self._concatenate(group) for group in tuple(self._parts)
        )
        origin_us = self._drop_bad_times(host, device, sync, memory, counters)
        origin_ns = (self._epoch or 0) * 1000 + _exact_ns(origin_us)
        facts = Facts(origin_ns=origin_ns, given_calls=calls)
        ends = [
            self._convert_to_ns(columns, origin_us)
            for columns in (host, device, sync, memory, counters)
        ]
        facts.end_ns = max(ends)
        texts = self._names.values()
        names = encode_names(texts)
        assembled = AssembledTables(host, device, texts, self._threads.values(), self.thread_names)
        frames, thread_table = join_tables(assembled, names, facts)
        frames |= {
            "sync": tables.sync_frame(sync, texts),
            "memory": tables.on_devices(tables.memory_frame(memory, thread_table), frames["gpu"]),
            "counters": tables.counters_frame(counters, names),
            "inputs": tables.inputs_frame(self._inputs.values()),
            "comms": tables.comms_frame(self._comms.values()),
        }
        return frames, facts

    def _concatenate(self, group: str) -> Columns:
        """Concatenate the columns of all pieces. Empty if there are no rows."""
        parts = self._parts[group]
        joined: Columns = {}
        for key in list(parts[0]) if parts else ():
            # column by column, so that only one column is in memory twice
            joined[key] = np.concatenate([part.pop(key) for part in parts])
        parts.clear()
        return joined

    # -- cleaning ---------------------------------------------------------------------------

    def _drop_bad_times(self, *groups: Columns) -> float:
        """Drop rows without usable times. Return the origin (smallest start) in us."""
        for columns in groups:
            if not columns:
                continue
            with np.errstate(invalid="ignore"):
                self._drop_rows(columns, ~np.isfinite(columns["ts"]), "no start time")
                if "dur" in columns:
                    self._drop_rows(columns, ~np.isfinite(columns["dur"]), "no duration")
                    self._drop_rows(columns, columns["dur"] < 0, "negative duration")
                    self._drop_rows(columns, columns["dur"] > DAY_US, "absurd duration")
        starts = [columns["ts"] for columns in groups if len(columns.get("ts", ()))]
        if starts:
            samples = [start[:: max(1, len(start) // _MEDIAN_SAMPLE)] for start in starts]
            median_start = float(np.median(np.concatenate(samples)))
            for columns in groups:
                if columns:
                    is_far = np.abs(columns["ts"] - median_start) > DAY_US
                    self._drop_rows(columns, is_far, "absurd start time")
        for columns in groups:
            if columns and not len(columns["ts"]):
                columns.clear()
        return min((float(columns["ts"].min()) for columns in groups if columns), default=0.0)

    def _drop_rows(self, columns: Columns, bad: Array, reason: str) -> None:
        count = int(bad.sum())
        if count:
            self.dropped[reason] = self.dropped.get(reason, 0) + count
            keep = ~bad
            for key in columns:
                columns[key] = columns[key][keep]

    @staticmethod
    def _convert_to_ns(columns: Columns, origin_us: float) -> int:
        """Convert times to whole ns from the origin, in place. Return the last end."""
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
        """Number the threads by their host rows, busiest first. Return the map old -> new."""
        counts = np.zeros(len(threads), dtype=np.int64)
        if host:
            counts = np.bincount(host["thread"], minlength=len(threads))
        order = np.argsort(-counts, kind="stable")
        new_code = np.empty(len(threads), dtype=np.int32)
        new_code[order] = np.arange(len(order), dtype=np.int32)
        threads[:] = [threads[old] for old in order.tolist()]
        if host:
            host["thread"] = new_code[host["thread"]]
        return new_code

    @staticmethod
    def _nest(
        host: Columns,
        device: Columns,
        texts: list[str],
        threads: list[tuple[str, str]],
        facts: Facts,
    ) -> tuple[Array, Array]:
        """Order both tables, find parents and launches. Return launch and op of device rows."""
        if device:
            # kinds break ties, so that the order does not depend on the cuts between pieces
            key = device["ts"] * len(GPU_KINDS) + device["kind"]
            _reorder(device, np.argsort(key, kind="stable"))
        none = np.full(len(device.get("ts", ())), -1, dtype=np.int32)
        if not host:
            return none, none
        _exclude_closures(host, texts)
        _reorder(host, stack_order(host["thread"], host["ts"], host["dur"], host["kind"]))
        trim_memory(len(host["ts"]))
        host["parent"], host["depth"], facts.nesting_repaired = _nest_rows(host)
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
    assembled: AssembledTables, names: pl.Series, facts: Facts
) -> tuple[dict[str, pl.DataFrame], Array]:
    """Return the frames ``cpu``, ``gpu`` and ``threads`` with all joins (stacks, launches, the ops
    around them), and the row of ``threads`` for each thread code. Orders the rows of all columns
    in place."""
    host, device = assembled.host, assembled.device
    thread_rows = Assembler._order_threads(host, assembled.threads)
    launches = Assembler._nest(host, device, assembled.names, assembled.threads, facts)
    count = len(launches[0]) + len(host.get("ts", ()))
    trim_memory(count)
    cpu = tables.cpu_frame(host, names) if host else pl.DataFrame(schema=CPU_SCHEMA)
    trim_memory(count)
    return {
        "cpu": cpu,
        "gpu": tables.gpu_frame(device, names, assembled.names, *launches)
        if device
        else pl.DataFrame(schema=GPU_SCHEMA),
        "threads": tables.threads_frame(assembled.threads, assembled.thread_names),
    }, thread_rows


def _exclude_closures(host: Columns, texts: list[str]) -> None:
    """Let each ``Optimizer.step#…`` range begin after the closure that was passed to it, in place.
    The range then covers only the update, as it does without a closure. PyTorch Lightning passes a
    closure to each optimizer, with the forward and the backward pass in it.

    A closure is recognised by an operator on the range's thread with an autograd sequence number,
    and by nodes of the backward pass that begin in the range. It ends with the last node."""
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
    node_starts, node_ends = ts[nodes], ts[nodes] + host["dur"][nodes]
    numbered = (np.asarray(host["sequence"]) >= 0) & ~is_node[name]
    starts = {
        thread_code: np.sort(ts[numbered & (thread == thread_code)])
        for thread_code in np.unique(thread[steps])
    }
    for step in steps.tolist():
        range_start, range_end = ts[step], ts[step] + host["dur"][step]
        first, last = np.searchsorted(node_starts, (range_start, range_end))
        if first < last:
            first_start, last_start = np.searchsorted(
                starts[thread[step]], (range_start, node_starts[last - 1])
            )
            if first_start < last_start:
                ts[step] = min(range_end, max(range_start, node_ends[first:last].max()))
                host["dur"][step] = range_end - ts[step]


def _nest_rows(host: Columns) -> tuple[Array, Array, int]:
    """Return parent and depth of the ordered host rows, and the number of rows that outlasted their
    parents. Those rows are cut in place."""
    parent, depth = (np.empty(len(host["ts"]), dtype=np.int32) for _ in range(2))
    repaired = 0
    for part in independent_stretches(host["thread"], host["ts"], host["dur"]):
        kind, thread, start, dur = (host[key][part] for key in ("kind", "thread", "ts", "dur"))
        ends = start + dur
        nesting = nest(thread, start, release_ranges(kind, thread, start, ends))
        # a range that one function opened and another one closed keeps its length
        overlong = (ends > nesting.end) & (kind != _ANNOTATION)
        dur[overlong] = nesting.end[overlong] - start[overlong]
        parent[part] = np.where(nesting.parent < 0, -1, nesting.parent + part.start)
        depth[part] = nesting.depth
        repaired += nesting.repaired
    return parent, depth, repaired


def _reorder(columns: dict[str, Any], order: Array) -> None:
    """Put the rows of ``columns`` into ``order``, in place and column by column to save memory."""
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
    whole_us = int(us)
    return whole_us * 1000 + round((us - whole_us) * 1000)


# -- memory ----------------------------------------------------------------------------------------

MIN_ROWS_TO_TRIM = 1_000_000
"""Minimum number of rows for which the milliseconds of a trim pay off."""


def trim_memory(rows: int) -> None:
    """Return memory of freed columns from glibc's malloc to the system. Otherwise malloc keeps it
    while new columns are made, and a large file takes 50% more memory. Does nothing for few
    ``rows`` or with another malloc."""
    if rows < MIN_ROWS_TO_TRIM:
        return
    with suppress(AttributeError, OSError, TypeError):
        ctypes.CDLL(None).malloc_trim(0)
