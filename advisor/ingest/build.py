"""Rows of any format to a :class:`Trace`: what a reader hands over once it has decoded its file.

Columns go by the names of ``advisor.trace``'s schemas, times are whole nanoseconds on any clock,
texts are plain strings. What joins them (stacks, launches, the op around a launch) is the same for
all formats.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import polars as pl
from numpy.typing import NDArray

from advisor.errors import AdvisorError
from advisor.ingest.assemble import Facts, Tables, as_names, joined
from advisor.ingest.columns import NAME_LIMIT
from advisor.trace import (
    CALLS,
    COMMS_SCHEMA,
    COUNTER_SCHEMA,
    CPU_KINDS,
    GPU_KINDS,
    GPU_SCHEMA,
    INPUTS_SCHEMA,
    MEMORY_SCHEMA,
    SYNC_SCHEMA,
    Trace,
    TraceMeta,
)

DAY_NS = 86_400 * 10**9
"""No profiler window is a day long: durations and distances beyond that are damage."""
_UNIX = range(10**18, 4 * 10**18)  # 2001 to 2096
_HOST_IDS = ("correlation", "external", "sequence", "inputs", "comm")
_DEVICE_IDS = ("correlation", "external", "comm")
_GIVEN = ("copy", "src", "dst", "limits")
"""Text columns of device rows that stand in the trace as they are given."""
_DEVICE_FLOATS = tuple(
    name
    for name, kind in GPU_SCHEMA.items()
    if name not in ("ts", "dur", "kind", "name", "launch", "op", *_DEVICE_IDS, *_GIVEN)
    and kind != pl.Categorical
)

Columns = dict[str, NDArray[Any]]


def build_trace(
    meta: TraceMeta,
    *,
    host: pl.DataFrame | None = None,
    device: pl.DataFrame | None = None,
    sync: pl.DataFrame | None = None,
    memory: pl.DataFrame | None = None,
    counters: pl.DataFrame | None = None,
    inputs: pl.DataFrame | None = None,
    comms: pl.DataFrame | None = None,
    thread_names: dict[tuple[str, str], str] | None = None,
) -> Trace:
    """The trace of these rows, in any order.

    ``host``: ``ts`` and ``dur`` (ns), ``kind`` (one of CPU_KINDS), ``name``, ``thread`` (as it is
    shown) are needed; ``process``, ``call`` (one of CALLS; without the column CUDA's and HIP's
    calls are told by their names), ``correlation``, ``external``, ``sequence``, and ``inputs`` and
    ``comm`` (rows of those frames) may be there. A step is an annotation ``ProfilerStep#<n>``.

    ``device``: ``ts``, ``dur``, ``kind`` (one of GPU_KINDS), ``name``, ``device``, ``stream`` are
    needed; the other columns of GPU_SCHEMA may be there, but for ``launch`` and ``op``, which are
    found by ``correlation`` and ``external``. Without ``copy`` the name of a copy tells its
    direction and memories.

    ``sync``, ``memory``, ``counters``, ``inputs``, ``comms``: as in their schemas; columns that are
    not there are null. Rows without sane times are left out and counted in
    ``meta.events_dropped``; of ``meta``, what rows tell is filled in. Raises AdvisorError: no row
    is left. Raises ValueError: a column that is needed is not there, or a kind that does not exist.
    """
    dropped = dict(meta.events_dropped)
    timed = {
        "host": _frame(host, ("ts", "dur", "kind", "name", "thread")),
        "device": _frame(device, ("ts", "dur", "kind", "name", "device", "stream")),
        "sync": _frame(sync, ("ts", "dur", "kind"), SYNC_SCHEMA),
        "memory": _frame(memory, ("ts",), MEMORY_SCHEMA),
        "counters": _frame(counters, ("ts", "dur", "name", "value"), COUNTER_SCHEMA),
    }
    host = device = sync = memory = counters = None  # each is held once, and let go once read
    given = sum(frame.height for frame in timed.values())
    timed, origin, end = _cleaned(timed, dropped)
    if not any(frame.height for frame in timed.values()):
        raise AdvisorError(f"{meta.path}: no usable event in it; record the trace again")
    texts: dict[str, int] = {}
    threads: dict[tuple[str, str], int] = {}
    rows = Tables(
        host=_host(timed.pop("host"), texts, threads),
        device=_device(timed["device"], texts),
        names=list(texts),
        threads=list(threads),
        thread_names=thread_names or {},
    )
    timed["device"] = timed["device"].select(
        name for name in _GIVEN if name in timed["device"].columns
    )
    facts = Facts()
    frames, _ = joined(rows, as_names(rows.names), facts)
    frames["gpu"] = _with_given(frames["gpu"], timed["device"], rows.device)
    frames |= {
        "sync": timed["sync"].sort("ts", maintain_order=True),
        "memory": timed["memory"].sort("ts", maintain_order=True),
        "counters": timed["counters"].sort("ts", maintain_order=True),
        "inputs": _frame(inputs, ("dims",), INPUTS_SCHEMA).fill_null(""),
        "comms": _frame(comms, ("collective",), COMMS_SCHEMA),
    }
    start = meta.start_ns + origin
    return Trace(
        **frames,
        meta=replace(
            meta,
            start_ns=start,
            clock="unix" if start in _UNIX else "arbitrary",
            end_ns=end - origin,
            record_shapes=bool(meta.record_shapes) or frames["inputs"].height > 0,
            with_stack=bool(meta.with_stack) or facts.python_frames,
            profile_memory=bool(meta.profile_memory) or frames["memory"].height > 0,
            sync_events=frames["sync"].height > 0,
            events_read=meta.events_read or given,
            events_dropped=dropped,
            nesting_repaired=facts.nesting_repaired,
        ),
    )


def _frame(
    frame: pl.DataFrame | None, needed: tuple[str, ...], schema: dict[str, Any] | None = None
) -> pl.DataFrame:
    """A frame with at least the needed columns; with a schema, exactly that one's."""
    if frame is None:
        return pl.DataFrame(schema=schema or dict.fromkeys(needed, pl.Null))
    lacking = [name for name in needed if name not in frame.columns]
    if lacking:
        raise ValueError(f"a table of a trace lacks the column {lacking[0]!r}")
    if schema is None:
        return frame
    return frame.select(
        (pl.col(name) if name in frame.columns else pl.lit(None).alias(name)).cast(
            kind, strict=False
        )
        for name, kind in schema.items()
    )


def _cleaned(
    frames: dict[str, pl.DataFrame], dropped: dict[str, int]
) -> tuple[dict[str, pl.DataFrame], int, int]:
    """Without rows that have no usable times, counted by reason; times from the first start on,
    that start, and the last end."""

    def keep(name: str, good: pl.Expr, why: str) -> None:
        mask = frames[name].select(good.fill_null(False)).to_series()
        if lost := len(mask) - int(mask.sum()):
            dropped[why] = dropped.get(why, 0) + lost
            frames[name] = frames[name].filter(mask)

    for name, frame in frames.items():
        times = [column for column in ("ts", "dur") if column in frame.columns]
        frames[name] = frame.with_columns(pl.col(times).cast(pl.Int64, strict=False))
        keep(name, pl.col("ts").is_not_null(), "no start time")
        keep(name, pl.col("ts").is_between(-(1 << 61), 1 << 61), "absurd start time")
        if "dur" in times:
            keep(name, pl.col("dur").is_not_null(), "no duration")
            keep(name, pl.col("dur") >= 0, "negative duration")
            keep(name, pl.col("dur") <= DAY_NS, "absurd duration")
    starts = pl.concat([frame["ts"] for frame in frames.values()])
    if not len(starts):
        return frames, 0, 0
    middle = int(starts.sort()[len(starts) // 2])
    for name in frames:
        keep(name, pl.col("ts").is_between(middle - DAY_NS, middle + DAY_NS), "absurd start time")
    ends = [
        frame.select(pl.col("ts") + (pl.col("dur") if "dur" in frame.columns else 0)).to_series()
        for frame in frames.values()
        if frame.height
    ]
    origin = min(int(frame["ts"].min()) for frame in frames.values() if frame.height)  # type: ignore[arg-type]
    last = max(int(column.max()) for column in ends)  # type: ignore[arg-type]
    return {n: f.with_columns(pl.col("ts") - origin) for n, f in frames.items()}, origin, last


def _host(
    frame: pl.DataFrame, texts: dict[str, int], threads: dict[tuple[str, str], int]
) -> Columns:
    if not frame.height:
        return {}
    # each column to its distinct texts first: they are few, rows are many
    columns_of, numbers = [], []
    for column in ("process", "thread"):
        known: dict[str, int] = {}
        numbers.append(_coded(_texts(frame, column), known).astype(np.int64))
        columns_of.append(list(known))
    pair, place = np.unique(numbers[0] << 32 | numbers[1], return_inverse=True)
    codes = [
        threads.setdefault(
            (columns_of[0][one >> 32], columns_of[1][one & 0xFFFFFFFF]), len(threads)
        )
        for one in pair.tolist()
    ]
    thread = np.array(codes, dtype=np.int32)[place]
    columns: Columns = {
        "ts": frame["ts"].to_numpy().copy(),
        "dur": frame["dur"].to_numpy().copy(),
        "kind": _kinds(frame, CPU_KINDS, np.uint8),
        "name": _coded(_texts(frame, "name"), texts),
        "thread": thread,
        **{key: _ids(frame, key) for key in _HOST_IDS},
    }
    if "call" in frame.columns:
        columns["call"] = _kinds(frame, CALLS, np.int8, column="call")
    return columns


def _device(frame: pl.DataFrame, texts: dict[str, int]) -> Columns:
    if not frame.height:
        return {}
    return {
        "ts": frame["ts"].to_numpy().copy(),
        "dur": frame["dur"].to_numpy().copy(),
        "kind": _kinds(frame, GPU_KINDS, np.uint8),
        "name": _coded(_texts(frame, "name"), texts),
        **{key: _ids(frame, key) for key in _DEVICE_IDS},
        **{key: _floats(frame, key) for key in _DEVICE_FLOATS},
        "limits": np.full(frame.height, -1, dtype=np.int32),
        "row": np.arange(frame.height),
    }


def _with_given(gpu: pl.DataFrame, frame: pl.DataFrame, device: Columns) -> pl.DataFrame:
    """The device rows with the texts that the file tells, rather than what names suggest."""
    given = [name for name in _GIVEN if name in frame.columns]
    if not given or not gpu.height:
        return gpu
    ordered = frame.select(given)[device["row"]]
    return gpu.with_columns(
        ordered[name].cast(pl.String).cast(GPU_SCHEMA[name], strict=False) for name in given
    )


def _texts(frame: pl.DataFrame, column: str) -> pl.Series:
    """Texts without null, no longer than names may be. Categories stay what they are."""
    if column not in frame.columns:
        return pl.Series(column, [""], dtype=pl.String).new_from_index(0, frame.height)
    if frame.schema[column] == pl.Categorical and not frame[column].null_count():
        return frame[column]
    return frame[column].cast(pl.String).fill_null("").str.slice(0, NAME_LIMIT)


def _coded(column: pl.Series, texts: dict[str, int]) -> NDArray[np.int32]:
    """Codes into ``texts``, which takes up what is new."""
    if column.dtype == pl.Categorical:
        physical = column.to_physical()
        seen, kept = physical.unique(maintain_order=True), column.unique(maintain_order=True)
        texts_of = kept.cast(pl.String).str.slice(0, NAME_LIMIT).to_list()
        codes = [texts.setdefault(text, len(texts)) for text in texts_of]
        return physical.replace_strict(seen, codes, return_dtype=pl.Int32).to_numpy()
    seen = column.unique(maintain_order=True)
    codes = [texts.setdefault(text, len(texts)) for text in seen.to_list()]
    return column.replace_strict(seen, codes, return_dtype=pl.Int32).to_numpy()


def _kinds(
    frame: pl.DataFrame, known: tuple[str, ...], dtype: Any, column: str = "kind"
) -> NDArray[Any]:
    """Places in ``known``; of a call, -1 for none. Raises ValueError for one that is not there."""
    codes = {name: number for number, name in enumerate(known)}
    texts = frame[column].cast(pl.String)
    found = texts.replace_strict(codes, default=-1, return_dtype=pl.Int16)
    strange = texts.filter((found < 0) & (texts.is_not_null() | (column == "kind")))
    if len(strange):
        raise ValueError(f"{column} {str(strange[0])[:60]!r} is none of {', '.join(known)}")
    return found.to_numpy().astype(dtype)


def _ids(frame: pl.DataFrame, column: str) -> NDArray[np.int64]:
    """-1 for none."""
    if column not in frame.columns:
        return np.full(frame.height, -1, dtype=np.int64)
    return frame[column].cast(pl.Int64, strict=False).fill_null(-1).to_numpy().copy()


def _floats(frame: pl.DataFrame, column: str) -> NDArray[np.float64]:
    """NaN for none."""
    if column not in frame.columns:
        return np.full(frame.height, np.nan)
    return frame[column].cast(pl.Float64, strict=False).fill_null(np.nan).to_numpy().copy()
