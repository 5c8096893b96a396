"""Builder of a :class:`Trace` from rows of any format, as a reader decodes them.

Columns go by the names of ``core.trace``'s schemas, times are whole nanoseconds on any clock,
texts are plain strings. What joins them (stacks, launches, the op around a launch) is the same for
all formats."""

from dataclasses import replace
from typing import Any

import numpy as np
import polars as pl
from numpy.typing import NDArray

from advisor.core.errors import AdvisorError
from advisor.core.trace import (
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
from advisor.read.assemble import AssembledTables, Facts, encode_names, join_tables, trim_memory
from advisor.read.event_columns import NAME_LIMIT
from advisor.read.tables import blank_column

DAY_NS = 86_400 * 10**9
"""Longest plausible duration or distance, ns: no profiler window is a day long."""
MAX_PAIRS = 1 << 20
"""Most pairs of process and thread for which a lookup table is used."""
_UNIX = range(10**18, 4 * 10**18)  # 2001 to 2096
_HOST_IDS = ("correlation", "external", "sequence", "inputs", "comm")
_DEVICE_IDS = ("correlation", "external", "comm")
_GIVEN = ("copy", "src", "dst", "limits")
"""Text columns of device rows that the trace takes unchanged."""
_DEVICE_NUMBERS = tuple(
    name
    for name, kind in GPU_SCHEMA.items()
    if name not in ("ts", "dur", "kind", "name", "launch", "op", *_DEVICE_IDS, *_GIVEN)
    and kind != pl.Categorical
)

Columns = dict[str, Any]
"""Columns by name: arrays, or series if they are not joined."""


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
    """Return the trace of these rows, given in any order.

    ``host``: ``ts`` and ``dur`` (ns), ``kind`` (one of CPU_KINDS), ``name``, ``thread`` (as it is
    shown) are needed; ``process``, ``call`` (one of CALLS; without the column CUDA's and HIP's
    calls follow from their names), ``correlation``, ``external``, ``sequence``, and ``inputs`` and
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
    trim_memory(given)
    texts: dict[str, int] = {}
    threads: dict[tuple[str, str], int] = {}
    rows = AssembledTables(
        host=_host(timed.pop("host"), origin, texts, threads),
        device=_device(timed.pop("device"), origin, texts),
        names=list(texts),
        threads=list(threads),
        thread_names=thread_names or {},
    )
    trim_memory(given)
    facts = Facts()
    frames, _ = join_tables(rows, encode_names(rows.names), facts)
    frames |= {
        "sync": timed["sync"].sort("ts", maintain_order=True),
        "memory": timed["memory"].sort("ts", maintain_order=True),
        "counters": timed["counters"].sort("ts", maintain_order=True),
        "inputs": _frame(inputs, ("dims",), INPUTS_SCHEMA).fill_null(""),
        "comms": _frame(comms, ("collective",), COMMS_SCHEMA),
    }
    del rows
    trim_memory(given)
    meta = replace(meta, events_read=meta.events_read or given, events_dropped=dropped)
    return Trace(**frames, meta=_complete(meta, frames, facts, origin, end))


def _complete(
    meta: TraceMeta, frames: dict[str, pl.DataFrame], facts: Facts, origin: int, end: int
) -> TraceMeta:
    """Return ``meta`` with what the rows show: clock, end, and which kinds were recorded."""
    start = meta.start_ns + origin
    return replace(
        meta,
        start_ns=start,
        clock="unix" if start in _UNIX else "arbitrary",
        end_ns=end - origin,
        record_shapes=bool(meta.record_shapes) or frames["inputs"].height > 0,
        with_stack=bool(meta.with_stack) or facts.python_frames,
        profile_memory=bool(meta.profile_memory) or frames["memory"].height > 0,
        sync_events=frames["sync"].height > 0,
        nesting_repaired=facts.nesting_repaired,
    )


def _frame(
    frame: pl.DataFrame | None, needed: tuple[str, ...], schema: dict[str, Any] | None = None
) -> pl.DataFrame:
    """Return a frame that has the needed columns; with a schema, exactly its columns. Without any
    column it has no rows. Raises ValueError if a needed column is missing."""
    if frame is None or not frame.width:
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
    """Drop rows without usable times, counted by reason; return the frames, the first start and the
    last end, ns. The small tables' times are then relative to the first start."""

    def keep(name: str, good: pl.Expr, why: str) -> None:
        mask = frames[name].select(good.fill_null(False)).to_series()
        if lost := len(mask) - int(mask.sum()):
            dropped[why] = dropped.get(why, 0) + lost
            frames[name] = frames[name].filter(mask)

    for name, frame in frames.items():
        times = [column for column in ("ts", "dur") if column in frame.columns]
        inexact = [column for column in times if frame.schema[column] not in _WHOLE[column]]
        if inexact:
            frame = frame.with_columns(pl.col(inexact).cast(pl.Int64, strict=False))
            frames[name] = frame
        if all(_within(frame[column], *_SANE[column]) for column in times):
            continue
        keep(name, pl.col("ts").is_not_null(), "no start time")
        keep(name, pl.col("ts").is_between(-(1 << 61), 1 << 61), "absurd start time")
        if "dur" in times:
            keep(name, pl.col("dur").is_not_null(), "no duration")
            keep(name, pl.col("dur") >= 0, "negative duration")
            keep(name, pl.col("dur") <= DAY_NS, "absurd duration")
    if not any(frame.height for frame in frames.values()):
        return frames, 0, 0
    if _last(frames) - _origin(frames) > DAY_NS:
        starts = pl.concat([frame["ts"] for frame in frames.values()]).to_numpy()
        middle = int(np.partition(starts, len(starts) // 2)[len(starts) // 2])
        near = pl.col("ts").is_between(middle - DAY_NS, middle + DAY_NS)
        for name in frames:
            keep(name, near, "absurd start time")
    origin = _origin(frames)
    end = pl.col("ts") + pl.col("dur")
    ends = [
        frame.select((end if "dur" in frame.columns else pl.col("ts")).max()).item()
        for frame in frames.values()
        if frame.height
    ]
    for name, frame in frames.items():
        if name not in ("host", "device"):  # whose columns are taken one by one
            frames[name] = frame.with_columns(pl.col("ts") - origin)
    return frames, origin, int(max(ends))


_WHOLE = {"ts": (pl.Int64,), "dur": (pl.Int8, pl.Int16, pl.Int32, pl.Int64)}
_SANE = {"ts": (-(1 << 61), 1 << 61), "dur": (0, DAY_NS)}


def _within(column: pl.Series, low: int, high: int) -> bool:
    """Return whether every value is present and in the range."""
    if column.null_count() or not len(column):
        return not len(column)
    return bool(column.min() >= low and column.max() <= high)  # type: ignore[operator]


def _origin(frames: dict[str, pl.DataFrame]) -> int:
    return min(int(frame["ts"].min()) for frame in frames.values() if frame.height)  # type: ignore[arg-type]


def _last(frames: dict[str, pl.DataFrame]) -> int:
    return max(int(frame["ts"].max()) for frame in frames.values() if frame.height)  # type: ignore[arg-type]


def _host(
    frame: pl.DataFrame, origin: int, texts: dict[str, int], threads: dict[tuple[str, str], int]
) -> Columns:
    if not frame.height:
        return {}
    count = frame.height
    columns: Columns = {
        "thread": _threads(
            _taken(frame, "process", count), _taken(frame, "thread", count), threads
        ),
        "ts": _taken(frame, "ts", count).to_numpy() - origin,
        "dur": _owned(_taken(frame, "dur", count)),
        "kind": _kinds(_taken(frame, "kind", count), CPU_KINDS, np.uint8),
        "name": _coded(_texts(_taken(frame, "name", count)), texts),
    }
    for key in _HOST_IDS:
        columns[key] = _ids(_taken(frame, key, count))
    if "call" in frame.columns:
        columns["call"] = _kinds(_taken(frame, "call", count), CALLS, np.int8)
    return columns


def _taken(frame: pl.DataFrame, column: str, count: int) -> pl.Series:
    """Take a column out of the frame, so that the memory of what is made from it is not needed
    twice. Nulls if there is none."""
    if column in frame.columns:
        return frame.drop_in_place(column)
    return pl.Series(column, [None], dtype=pl.Null).new_from_index(0, count)


def _owned(column: pl.Series) -> NDArray[Any]:
    """Return the column's values as a writable array."""
    values = _of_words(column).to_numpy()
    return values if values.flags.writeable else values.copy()


def _threads(
    process: pl.Series, thread: pl.Series, threads: dict[tuple[str, str], int]
) -> NDArray[np.int32]:
    """Return codes into ``threads``, to which new pairs are added."""
    # each column to its distinct texts first: they are few, rows are many
    of_process: dict[str, int] = {}
    of_thread: dict[str, int] = {}
    pair, own = _coded(_texts(process), of_process), _coded(_texts(thread), of_thread)
    pids, tids = list(of_process), list(of_thread)
    few = len(pids) * len(tids) <= MAX_PAIRS
    pair = pair * (np.int32 if few else np.int64)(max(len(of_thread), 1))
    pair += own
    del own
    distinct, place = (
        (np.flatnonzero(np.bincount(pair)), pair) if few else np.unique(pair, return_inverse=True)
    )
    codes = [
        threads.setdefault((pids[item // len(tids)], tids[item % len(tids)]), len(threads))
        for item in distinct.tolist()
    ]
    table = np.zeros(int(distinct[-1]) + 1 if few else len(distinct), dtype=np.int32)
    table[distinct if few else slice(None)] = codes
    result: NDArray[np.int32] = table[place]
    return result


def _device(frame: pl.DataFrame, origin: int, texts: dict[str, int]) -> Columns:
    if not frame.height:
        return {}
    count = frame.height
    columns: Columns = {
        "ts": _taken(frame, "ts", count).to_numpy() - origin,
        "dur": _of_words(_taken(frame, "dur", count)).to_numpy(),
        "kind": _kinds(_taken(frame, "kind", count), GPU_KINDS, np.uint8),
        "name": _coded(_texts(_taken(frame, "name", count)), texts),
        **{key: frame.drop_in_place(key) for key in _GIVEN if key in frame.columns},
    }
    columns.setdefault("limits", blank_column(count, -1, np.int32))
    for key in _DEVICE_IDS:
        columns[key] = _ids(_taken(frame, key, count))
    for key in _DEVICE_NUMBERS:
        columns[key] = _taken(frame, key, count)
    return columns


def _texts(column: pl.Series) -> pl.Series:
    """Return texts without nulls, cut to the length of names. Categories stay unchanged."""
    if column.dtype == pl.Categorical and not column.null_count():
        return column
    return column.cast(pl.String).fill_null("").str.slice(0, NAME_LIMIT)


def _coded(column: pl.Series, texts: dict[str, int]) -> NDArray[np.int32]:
    """Return codes into ``texts``, to which new ones are added."""
    if column.dtype == pl.Categorical:
        physical = column.to_physical()
        seen, kept = physical.unique(maintain_order=True), column.unique(maintain_order=True)
        texts_of = kept.cast(pl.String).str.slice(0, NAME_LIMIT).to_list()
        codes = [texts.setdefault(text, len(texts)) for text in texts_of]
        return _by_code(physical, seen, codes, np.int32)
    seen = column.unique(maintain_order=True)
    codes = [texts.setdefault(text, len(texts)) for text in seen.to_list()]
    return column.replace_strict(seen, codes, return_dtype=pl.Int32).to_numpy()


def _by_code(column: pl.Series, seen: pl.Series, values: list[int], dtype: Any) -> NDArray[Any]:
    """Map codes without nulls to values; ``seen``: the distinct codes, in the values' order."""
    table = np.zeros(int(seen.max()) + 1, dtype=dtype)  # type: ignore[arg-type]
    table[seen.to_numpy()] = values
    result: NDArray[Any] = table[column.to_numpy()]
    return result


def _kinds(column: pl.Series, known: tuple[str, ...], dtype: Any) -> NDArray[Any]:
    """Return indices in ``known``, -1 for a missing call. Raises ValueError for an unknown kind."""
    codes = {name: number for number, name in enumerate(known)}
    distinct = column.unique().cast(pl.String)
    strange = [item for item in distinct if item not in codes and (item or column.name == "kind")]
    if strange:
        raise ValueError(f"{column.name} {str(strange[0])[:60]!r} is none of {', '.join(known)}")
    if column.dtype == pl.Categorical or isinstance(column.dtype, pl.Enum):
        kinds = column.unique().drop_nulls()
        places = [codes[text] for text in kinds.cast(pl.String)]
        if not column.null_count():
            return _by_code(column.to_physical(), kinds.to_physical(), places, dtype)
        column, codes = column.to_physical(), dict(zip(kinds.to_physical(), places, strict=True))
    result = column.replace_strict(codes, default=-1, return_dtype=pl.Int16)
    return result.to_numpy().astype(dtype)


def _ids(column: pl.Series) -> NDArray[Any]:
    """Return ids as integers, -1 for none; narrow integers stay narrow."""
    if column.null_count() == len(column):
        return blank_column(len(column), -1, np.int64)
    return _of_words(column).fill_null(-1).to_numpy()


def _of_words(column: pl.Series) -> pl.Series:
    """Cast to integers: 32 bits if narrower or equal, else 64, to match the constants used."""
    if column.dtype in (pl.Int8, pl.Int16, pl.Int32):
        return column.cast(pl.Int32)
    return column.cast(pl.Int64, strict=False)
