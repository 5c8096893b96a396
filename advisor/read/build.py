"""Builder of a :class:`Trace` from rows of any format, as a reader decodes them.

Columns are named as in the schemas of ``core.trace``, times are whole nanoseconds on any clock,
and texts are plain strings. The joins (stacks, launches, the op around a launch) are the same for
all formats."""

from dataclasses import replace
from typing import Any

import numpy as np
import polars as pl
from numpy.typing import NDArray

from advisor.core.errors import AdvisorError
from advisor.core.event_kinds import CPU_KINDS, GPU_KINDS
from advisor.core.trace import (
    CALLS,
    COMMS_SCHEMA,
    COUNTER_SCHEMA,
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
"""Longest plausible duration or distance in ns. No profiler window is a day long."""
_MAX_PAIRS = 1 << 20
"""Maximum number of pairs of process and thread for which a lookup table is used."""
UNIX_NS_RANGE = range(10**18, 4 * 10**18)  # 2001 to 2096
_HOST_IDS = ("correlation", "external", "sequence", "inputs", "comm")
_DEVICE_IDS = ("correlation", "external", "comm")
_TEXT_COLUMNS = ("copy", "src", "dst", "limits")
"""Text columns of device rows that the trace takes unchanged."""
_DEVICE_NUMBERS = tuple(
    name
    for name, kind in GPU_SCHEMA.items()
    if name not in ("ts", "dur", "kind", "name", "launch", "op", *_DEVICE_IDS, *_TEXT_COLUMNS)
    and kind != pl.Categorical
)

Columns = dict[str, Any]
"""Columns by name, as arrays, or as series if they are not joined."""


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

    ``host``: required are ``ts`` and ``dur`` (ns), ``kind`` (one of CPU_KINDS), ``name`` and
    ``thread`` (as displayed). Optional are ``process``, ``call`` (one of CALLS; without the column
    it follows from the names of CUDA and HIP calls), ``correlation``, ``external``, ``sequence``,
    and ``inputs`` and ``comm`` (rows of those frames). Steps are annotations ``ProfilerStep#<n>``.

    ``device``: required are ``ts``, ``dur``, ``kind`` (one of GPU_KINDS), ``name``, ``device`` and
    ``stream``. Optional are the other columns of GPU_SCHEMA except ``launch`` and ``op``, which are
    found by ``correlation`` and ``external``. Without ``copy``, the direction and memories of a
    copy follow from its name.

    ``sync``, ``memory``, ``counters``, ``inputs``, ``comms``: as in their schemas, with null for
    missing columns. Rows without valid times are left out and counted in ``meta.events_dropped``.
    Fields of ``meta`` that follow from the rows are filled in. Raises AdvisorError if no row is
    left, and ValueError if a required column is missing or a kind is unknown."""
    dropped = dict(meta.events_dropped)
    timed = {
        "host": _select_or_empty(host, ("ts", "dur", "kind", "name", "thread")),
        "device": _select_or_empty(device, ("ts", "dur", "kind", "name", "device", "stream")),
        "sync": _select_or_empty(sync, ("ts", "dur", "kind"), SYNC_SCHEMA),
        "memory": _select_or_empty(memory, ("ts",), MEMORY_SCHEMA),
        "counters": _select_or_empty(counters, ("ts", "dur", "name", "value"), COUNTER_SCHEMA),
    }
    host = device = sync = memory = counters = None  # keep one reference, freed after use
    row_count = sum(frame.height for frame in timed.values())
    timed, origin, end = _drop_bad_times(timed, dropped)
    if not any(frame.height for frame in timed.values()):
        raise AdvisorError(f"{meta.path}: no usable event in it; record the trace again")
    trim_memory(row_count)
    texts: dict[str, int] = {}
    threads: dict[tuple[str, str], int] = {}
    rows = AssembledTables(
        host=_host_columns(timed.pop("host"), origin, texts, threads),
        device=_device_columns(timed.pop("device"), origin, texts),
        names=list(texts),
        threads=list(threads),
        thread_names=thread_names or {},
    )
    trim_memory(row_count)
    facts = Facts()
    frames, _ = join_tables(rows, encode_names(rows.names), facts)
    frames |= {
        "sync": timed["sync"].sort("ts", maintain_order=True),
        "memory": timed["memory"].sort("ts", maintain_order=True),
        "counters": timed["counters"].sort("ts", maintain_order=True),
        "inputs": _select_or_empty(inputs, ("dims",), INPUTS_SCHEMA).fill_null(""),
        "comms": _select_or_empty(comms, ("collective",), COMMS_SCHEMA),
    }
    del rows
    trim_memory(row_count)
    meta = replace(meta, events_read=meta.events_read or row_count, events_dropped=dropped)
    return Trace(**frames, meta=_complete_meta(meta, frames, facts, origin, end))


def _complete_meta(
    meta: TraceMeta, frames: dict[str, pl.DataFrame], facts: Facts, origin: int, end: int
) -> TraceMeta:
    """Return ``meta`` completed from the rows: clock, end, and which kinds were recorded."""
    start = meta.start_ns + origin
    return replace(
        meta,
        start_ns=start,
        clock="unix" if start in UNIX_NS_RANGE else "arbitrary",
        end_ns=end - origin,
        record_shapes=bool(meta.record_shapes) or frames["inputs"].height > 0,
        with_stack=bool(meta.with_stack) or facts.python_frames,
        profile_memory=bool(meta.profile_memory) or frames["memory"].height > 0,
        sync_events=frames["sync"].height > 0,
        nesting_repaired=facts.nesting_repaired,
    )


def _select_or_empty(
    frame: pl.DataFrame | None, required: tuple[str, ...], schema: dict[str, Any] | None = None
) -> pl.DataFrame:
    """Return a frame with the required columns, or exactly the columns of a schema. A frame without
    columns becomes one without rows. Raises ValueError if a required column is missing."""
    if frame is None or not frame.width:
        return pl.DataFrame(schema=schema or dict.fromkeys(required, pl.Null))
    lacking = [name for name in required if name not in frame.columns]
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


def _drop_bad_times(
    frames: dict[str, pl.DataFrame], dropped: dict[str, int]
) -> tuple[dict[str, pl.DataFrame], int, int]:
    """Drop rows without usable times, counted by reason. Return the frames, the first start and the
    last end in ns. Times of the small tables become relative to the first start."""

    def keep_rows(name: str, is_good: pl.Expr, reason: str) -> None:
        mask = frames[name].select(is_good.fill_null(False)).to_series()
        if lost_count := len(mask) - int(mask.sum()):
            dropped[reason] = dropped.get(reason, 0) + lost_count
            frames[name] = frames[name].filter(mask)

    for name, frame in frames.items():
        times = [column for column in ("ts", "dur") if column in frame.columns]
        not_integer = [
            column for column in times if frame.schema[column] not in _INTEGER_TYPES[column]
        ]
        if not_integer:
            frame = frame.with_columns(pl.col(not_integer).cast(pl.Int64, strict=False))
            frames[name] = frame
        if all(_is_within(frame[column], *_VALID_RANGES[column]) for column in times):
            continue
        keep_rows(name, pl.col("ts").is_not_null(), "no start time")
        keep_rows(name, pl.col("ts").is_between(-(1 << 61), 1 << 61), "absurd start time")
        if "dur" in times:
            keep_rows(name, pl.col("dur").is_not_null(), "no duration")
            keep_rows(name, pl.col("dur") >= 0, "negative duration")
            keep_rows(name, pl.col("dur") <= DAY_NS, "absurd duration")
    if not any(frame.height for frame in frames.values()):
        return frames, 0, 0
    if _last_start(frames) - _first_start(frames) > DAY_NS:
        starts = pl.concat([frame["ts"] for frame in frames.values()]).to_numpy()
        median_start = int(np.partition(starts, len(starts) // 2)[len(starts) // 2])
        is_near = pl.col("ts").is_between(median_start - DAY_NS, median_start + DAY_NS)
        for name in frames:
            keep_rows(name, is_near, "absurd start time")
    origin = _first_start(frames)
    end = pl.col("ts") + pl.col("dur")
    ends = [
        frame.select((end if "dur" in frame.columns else pl.col("ts")).max()).item()
        for frame in frames.values()
        if frame.height
    ]
    for name, frame in frames.items():
        if name not in ("host", "device"):  # their columns are taken one by one later
            frames[name] = frame.with_columns(pl.col("ts") - origin)
    return frames, origin, int(max(ends))


_INTEGER_TYPES = {"ts": (pl.Int64,), "dur": (pl.Int8, pl.Int16, pl.Int32, pl.Int64)}
_VALID_RANGES = {"ts": (-(1 << 61), 1 << 61), "dur": (0, DAY_NS)}


def _is_within(column: pl.Series, low: int, high: int) -> bool:
    """Return whether every value is present and in the range."""
    if column.null_count() or not len(column):
        return not len(column)
    return bool(column.min() >= low and column.max() <= high)  # type: ignore[operator]


def _first_start(frames: dict[str, pl.DataFrame]) -> int:
    return min(int(frame["ts"].min()) for frame in frames.values() if frame.height)  # type: ignore[arg-type]


def _last_start(frames: dict[str, pl.DataFrame]) -> int:
    return max(int(frame["ts"].max()) for frame in frames.values() if frame.height)  # type: ignore[arg-type]


def _host_columns(
    frame: pl.DataFrame, origin: int, texts: dict[str, int], threads: dict[tuple[str, str], int]
) -> Columns:
    if not frame.height:
        return {}
    count = frame.height
    columns: Columns = {
        "thread": _encode_threads(
            _take_column(frame, "process", count), _take_column(frame, "thread", count), threads
        ),
        "ts": _take_column(frame, "ts", count).to_numpy() - origin,
        "dur": _to_writable_array(_take_column(frame, "dur", count)),
        "kind": _encode_kinds(_take_column(frame, "kind", count), CPU_KINDS, np.uint8),
        "name": _encode_texts(_to_texts(_take_column(frame, "name", count)), texts),
    }
    for key in _HOST_IDS:
        columns[key] = _to_ids(_take_column(frame, key, count))
    if "call" in frame.columns:
        columns["call"] = _encode_kinds(_take_column(frame, "call", count), CALLS, np.int8)
    return columns


def _take_column(frame: pl.DataFrame, column: str, count: int) -> pl.Series:
    """Take a column out of the frame, so that it is freed once it is converted. Return nulls if the
    column is missing."""
    if column in frame.columns:
        return frame.drop_in_place(column)
    return pl.Series(column, [None], dtype=pl.Null).new_from_index(0, count)


def _to_writable_array(column: pl.Series) -> NDArray[Any]:
    """Return the column's values as a writable array."""
    values = _to_words(column).to_numpy()
    return values if values.flags.writeable else values.copy()


def _encode_threads(
    process: pl.Series, thread: pl.Series, threads: dict[tuple[str, str], int]
) -> NDArray[np.int32]:
    """Return codes into ``threads``, to which new pairs are added."""
    # encode each column alone first: there are few distinct texts, and many rows
    process_codes: dict[str, int] = {}
    thread_codes: dict[str, int] = {}
    pairs, thread_of_row = (
        _encode_texts(_to_texts(process), process_codes),
        _encode_texts(_to_texts(thread), thread_codes),
    )
    pids, tids = list(process_codes), list(thread_codes)
    is_small = len(pids) * len(tids) <= _MAX_PAIRS
    pairs = pairs * (np.int32 if is_small else np.int64)(max(len(thread_codes), 1))
    pairs += thread_of_row
    del thread_of_row
    distinct, index_of_row = (
        (np.flatnonzero(np.bincount(pairs)), pairs)
        if is_small
        else np.unique(pairs, return_inverse=True)
    )
    codes = [
        threads.setdefault(
            (pids[pair_code // len(tids)], tids[pair_code % len(tids)]), len(threads)
        )
        for pair_code in distinct.tolist()
    ]
    table = np.zeros(int(distinct[-1]) + 1 if is_small else len(distinct), dtype=np.int32)
    table[distinct if is_small else slice(None)] = codes
    result: NDArray[np.int32] = table[index_of_row]
    return result


def _device_columns(frame: pl.DataFrame, origin: int, texts: dict[str, int]) -> Columns:
    if not frame.height:
        return {}
    count = frame.height
    columns: Columns = {
        "ts": _take_column(frame, "ts", count).to_numpy() - origin,
        "dur": _to_words(_take_column(frame, "dur", count)).to_numpy(),
        "kind": _encode_kinds(_take_column(frame, "kind", count), GPU_KINDS, np.uint8),
        "name": _encode_texts(_to_texts(_take_column(frame, "name", count)), texts),
        **{key: frame.drop_in_place(key) for key in _TEXT_COLUMNS if key in frame.columns},
    }
    columns.setdefault("limits", blank_column(count, -1, np.int32))
    for key in _DEVICE_IDS:
        columns[key] = _to_ids(_take_column(frame, key, count))
    for key in _DEVICE_NUMBERS:
        columns[key] = _take_column(frame, key, count)
    return columns


def _to_texts(column: pl.Series) -> pl.Series:
    """Return texts without nulls, cut to the maximum length of names. Categories stay unchanged."""
    if column.dtype == pl.Categorical and not column.null_count():
        return column
    return column.cast(pl.String).fill_null("").str.slice(0, NAME_LIMIT)


def _encode_texts(column: pl.Series, texts: dict[str, int]) -> NDArray[np.int32]:
    """Return codes into ``texts``, to which new texts are added."""
    if column.dtype == pl.Categorical:
        physical = column.to_physical()
        distinct, categories = (
            physical.unique(maintain_order=True),
            column.unique(maintain_order=True),
        )
        category_texts = categories.cast(pl.String).str.slice(0, NAME_LIMIT).to_list()
        codes = [texts.setdefault(text, len(texts)) for text in category_texts]
        return _map_codes(physical, distinct, codes, np.int32)
    distinct = column.unique(maintain_order=True)
    codes = [texts.setdefault(text, len(texts)) for text in distinct.to_list()]
    return column.replace_strict(distinct, codes, return_dtype=pl.Int32).to_numpy()


def _map_codes(column: pl.Series, seen: pl.Series, values: list[int], dtype: Any) -> NDArray[Any]:
    """Map codes without nulls to values. ``seen``: the distinct codes, in the order of values."""
    table = np.zeros(int(seen.max()) + 1, dtype=dtype)  # type: ignore[arg-type]
    table[seen.to_numpy()] = values
    result: NDArray[Any] = table[column.to_numpy()]
    return result


def _encode_kinds(column: pl.Series, known: tuple[str, ...], dtype: Any) -> NDArray[Any]:
    """Return indices in ``known``, -1 for a missing call. Raises ValueError for an unknown kind."""
    codes = {name: code for code, name in enumerate(known)}
    distinct = column.unique().cast(pl.String)
    unknown = [item for item in distinct if item not in codes and (item or column.name == "kind")]
    if unknown:
        raise ValueError(f"{column.name} {str(unknown[0])[:60]!r} is not one of {', '.join(known)}")
    if column.dtype == pl.Categorical or isinstance(column.dtype, pl.Enum):
        kinds = column.unique().drop_nulls()
        kind_codes = [codes[text] for text in kinds.cast(pl.String)]
        if not column.null_count():
            return _map_codes(column.to_physical(), kinds.to_physical(), kind_codes, dtype)
        column, codes = (
            column.to_physical(),
            dict(zip(kinds.to_physical(), kind_codes, strict=True)),
        )
    result = column.replace_strict(codes, default=-1, return_dtype=pl.Int16)
    return result.to_numpy().astype(dtype)


def _to_ids(column: pl.Series) -> NDArray[Any]:
    """Return ids as integers, -1 for none. Narrow integers stay narrow."""
    if column.null_count() == len(column):
        return blank_column(len(column), -1, np.int64)
    return _to_words(column).fill_null(-1).to_numpy()


def _to_words(column: pl.Series) -> pl.Series:
    """Cast to integers of 32 bits if that is wide enough, else of 64, to match the constants."""
    if column.dtype in (pl.Int8, pl.Int16, pl.Int32):
        return column.cast(pl.Int32)
    return column.cast(pl.Int64, strict=False)
