"""Conversion of cleaned columns to the frames of a Trace (schemas: ``advisor.core.trace``)."""

from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np
import polars as pl

from advisor.core.event_kinds import CPU_KINDS, GPU_KINDS
from advisor.core.intervals import Array
from advisor.core.trace import (
    CALLS,
    COMMS_SCHEMA,
    COUNTER_SCHEMA,
    CPU_SCHEMA,
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
from advisor.read.event_columns import MISSING, Columns
from advisor.read.json_repair import DECODE_ERRORS
from advisor.read.trace_events import copy_parts, sync_kind

_INT_LIMIT = 1 << 62


def blank_column(count: int, value: float, dtype: Any) -> Array:
    """Return a read-only column that repeats one value and takes no memory."""
    return np.broadcast_to(np.array(value, dtype=dtype), (count,))


def is_blank(values: Any) -> bool:
    """Return whether a column was made by :func:`blank_column`."""
    return isinstance(values, np.ndarray) and len(values) > 1 and values.strides == (0,)


def cpu_frame(host: Columns, names: pl.Series) -> pl.DataFrame:
    """Return ``Trace.cpu`` from ordered, nested host columns, which are removed one by one."""
    converters: dict[str, Callable[[Array], pl.Series]] = {
        "kind": lambda codes: _decode(codes, CPU_KINDS, CpuKind),
        "name": names.gather,
        "call": lambda codes: _decode(codes, CALLS, Call),
        **dict.fromkeys(("ts", "dur", "thread", "depth"), pl.Series),
    }
    columns, nulls = {}, _NullColumns(len(host["ts"]))
    for name, dtype in CPU_SCHEMA.items():
        columns[name] = nulls.as_type(converters.get(name, _to_nullable)(host.pop(name)), dtype)
    return pl.DataFrame(columns)


def gpu_frame(
    device: dict[str, Any], names: pl.Series, texts: list[str], launch: Array, op: Array
) -> pl.DataFrame:
    """Return ``Trace.gpu`` from ordered device columns, which are removed one by one. ``texts``:
    the names as a list."""
    given_series = {
        key: device.pop(key) for key in _GIVEN_COLUMNS if isinstance(device.get(key), pl.Series)
    }
    columns = (
        dict(zip(_GIVEN_COLUMNS, _parse_copies(device, texts), strict=False))
        if len(given_series) < 3
        else {}
    )
    integer_keys = ("bytes", "blocks", "threads", "registers", "shared", "graph")
    float_keys = ("gbps", "blocks_per_sm", "warps_per_sm", "occupancy", "active_blocks")
    if "limits" in device:
        columns["limits"] = _gather(names, device.pop("limits"))
    nulls = _NullColumns(len(launch))
    columns |= {
        "ts": pl.Series(device.pop("ts")),
        "dur": pl.Series(device.pop("dur")),
        "kind": _decode(device.pop("kind"), GPU_KINDS, GpuKind),
        "name": names.gather(device.pop("name")),
        "device": _replace_invalid_devices(_to_integers(device.pop("device"))),
        "stream": _to_integers(device.pop("stream")).fill_null(0),
        "correlation": _to_nullable(device.pop("correlation")),
        "external": _to_nullable(device.pop("external")),
        "launch": _to_nullable(launch),
        "op": _to_nullable(op),
        "comm": _to_nullable(device.pop("comm")),
    }
    for key in (*integer_keys, *float_keys):  # convert each before the next one is made
        values = _to_floats(device.pop(key)) if key in float_keys else _to_integers(device.pop(key))
        columns[key] = nulls.as_type(values, GPU_SCHEMA[key])
    for key, column in given_series.items():
        has_schema_type = column.dtype == GPU_SCHEMA[key]
        columns[key] = column if has_schema_type else column.cast(pl.String)
    return _conform(columns, GPU_SCHEMA)


_GIVEN_COLUMNS = ("copy", "src", "dst", "limits")
"""Text columns of device rows that a file may have. Series are taken unchanged."""


def _replace_invalid_devices(numbers: pl.Series) -> pl.Series:
    """Return device numbers, with 0 in place of invalid ones."""
    numbers = numbers.cast(pl.Int32, strict=False)
    is_valid = (numbers >= 0).fill_null(False)
    return numbers if is_valid.all() else numbers.zip_with(is_valid, pl.Series([0], dtype=pl.Int32))


def _parse_copies(device: Columns, texts: list[str]) -> tuple[pl.Series, pl.Series, pl.Series]:
    """Return the direction and memories of copies. Each distinct name is parsed once."""
    rows = np.flatnonzero(device["kind"] == GPU_KINDS.index("memcpy"))
    codes, inverse = np.unique(device["name"][rows], return_inverse=True)
    parts = [copy_parts(texts[code]) for code in codes.tolist()]
    codes_of_rows = np.full(len(device["kind"]), -1, dtype=np.int64)
    codes_of_rows[rows] = inverse
    return (
        _gather(pl.Series([part[0] for part in parts], dtype=Copy), codes_of_rows),
        _gather(pl.Series([part[1] for part in parts], dtype=pl.Categorical), codes_of_rows),
        _gather(pl.Series([part[2] for part in parts], dtype=pl.Categorical), codes_of_rows),
    )


def sync_frame(sync: Columns, texts: list[str]) -> pl.DataFrame:
    """Return ``Trace.sync`` without rows of unknown kinds."""
    if not sync:
        return pl.DataFrame(schema=SYNC_SCHEMA)
    codes, inverse = np.unique(sync["name"], return_inverse=True)
    kinds = pl.Series([sync_kind(texts[code]) for code in codes.tolist()], dtype=SyncKind)
    streams = {
        key: _to_integers(np.where(sync[key] < 0, np.nan, sync[key]))
        for key in ("stream", "wait_stream", "wait_correlation")
    }
    frame = _conform(
        {
            "ts": pl.Series(sync["ts"]),
            "dur": pl.Series(sync["dur"]),
            "kind": kinds.gather(inverse),
            "device": _to_integers(sync["device"]),
            "correlation": _to_nullable(sync["correlation"]),
            **streams,
        },
        SYNC_SCHEMA,
    )
    return frame.filter(pl.col("kind").is_not_null()).sort("ts", maintain_order=True)


def memory_frame(memory: Columns, threads: Array) -> pl.DataFrame:
    """Return ``Trace.memory``. ``threads``: row of ``Trace.threads`` by thread code."""
    if not memory:
        return pl.DataFrame(schema=MEMORY_SCHEMA)
    device = np.where(memory["device_type"] == 0, -1.0, memory["device_id"])
    frame = _conform(
        {
            "ts": pl.Series(memory["ts"]),
            "device": _to_integers(device),
            "thread": pl.Series(threads[memory["thread"]]),
            **{
                key: _to_nullable(memory[key], MISSING)
                for key in ("bytes", "address", "allocated", "reserved")
            },
        },
        MEMORY_SCHEMA,
    )
    return frame.sort("ts", maintain_order=True)


def on_devices(memory: pl.DataFrame, gpu: pl.DataFrame) -> pl.DataFrame:
    """Return ``Trace.memory`` with the device numbers of ``Trace.gpu``.

    The allocator numbers the devices that the program sees, the driver all devices: with
    ``HIP_VISIBLE_DEVICES=2`` the kernels are on 2 and the memory is on 0. If all kernels are on one
    device and all memory is on another, both are the same device; else the mapping is unknown."""
    memory_devices = memory["device"].drop_nulls().unique()
    gpu_memory_devices = memory_devices.filter(memory_devices >= 0)
    kernel_devices = gpu["device"].drop_nulls().unique()
    if (
        len(gpu_memory_devices) != 1
        or len(kernel_devices) != 1
        or gpu_memory_devices[0] == kernel_devices[0]
    ):
        return memory
    return memory.with_columns(
        device=pl.col("device").replace(gpu_memory_devices[0], kernel_devices[0])
    )


def counters_frame(counters: Columns, names: pl.Series) -> pl.DataFrame:
    """Return ``Trace.counters``."""
    if not counters:
        return pl.DataFrame(schema=COUNTER_SCHEMA)
    frame = _conform(
        {
            "ts": pl.Series(counters["ts"]),
            "dur": pl.Series(counters["dur"]),
            "name": names.gather(counters["name"]),
            "range": names.gather(counters["range"]),
            "value": pl.Series(counters["value"]),
        },
        COUNTER_SCHEMA,
    )
    return frame.sort("ts", maintain_order=True)


def inputs_frame(keys: list[bytes]) -> pl.DataFrame:
    """Return ``Trace.inputs`` from texts joined by NUL."""
    rows = [[*key.decode("utf-8", "replace").split("\0"), "", ""][:4] for key in keys]
    return pl.DataFrame(rows, schema=INPUTS_SCHEMA, orient="row")


def comms_frame(keys: list[bytes]) -> pl.DataFrame:
    """Return ``Trace.comms`` from texts joined by NUL."""
    columns = list(COMMS_SCHEMA.items())
    rows = [
        [
            _decode_integer(part) if dtype == pl.Int64 else _decode_string(part)
            for part, (_, dtype) in zip(key.split(b"\0"), columns, strict=True)
        ]
        for key in keys
    ]
    return pl.DataFrame(rows, schema=COMMS_SCHEMA, orient="row")


def threads_frame(
    threads: list[tuple[str, str]], names: dict[tuple[str, str], str]
) -> pl.DataFrame:
    """Return ``Trace.threads``."""
    rows = [(pid, tid, names.get((pid, tid))) for pid, tid in threads]
    return pl.DataFrame(rows, schema=THREADS_SCHEMA, orient="row")


def _decode_integer(part: bytes) -> int | None:
    try:
        value = msgspec.json.decode(part, type=int | float | str)
        integer = int(value)
    except DECODE_ERRORS:
        return None
    return integer if abs(integer) < _INT_LIMIT else None


def _decode_string(part: bytes) -> str | None:
    """Return a JSON string's content, or the JSON text of any other value. ``None`` for null."""
    if not part or part == b"null":
        return None
    try:
        return msgspec.json.decode(part, type=str)
    except DECODE_ERRORS:
        return part.decode("utf-8", "replace")


# -- columns to series --------------------------------------------------------------------------


def _to_nullable(values: Array, missing: int = -1) -> pl.Series:
    """Return codes, rows or ids as a series, where ``missing`` is null (default: all below 0)."""
    if is_blank(values) and values[0] == missing:
        return _null_column(len(values), pl.Int64)
    is_missing = values < 0 if missing == -1 else values == missing
    series = pl.Series(values)
    return series.set(pl.Series(is_missing), None) if is_missing.any() else series


def _to_integers(values: Array | pl.Series) -> pl.Series:
    """Return integers from floats (NaN: null) or from a series of any numbers."""
    if isinstance(values, pl.Series):
        if values.null_count() == len(values):
            return _null_column(len(values), pl.Int64)
        if values.dtype.is_signed_integer() and values.dtype != pl.Int64:
            return values
        integers = values.cast(pl.Int64, strict=False)
        is_valid = integers.is_between(1 - _INT_LIMIT, _INT_LIMIT - 1)
        return integers if is_valid.all() else integers.set(~is_valid, None)
    if is_blank(values) and values[0] != values[0]:
        return _null_column(len(values), pl.Int64)
    is_valid_value = np.abs(values) < float(_INT_LIMIT)
    if is_valid_value.all():
        return pl.Series(values.astype(np.int64))
    return pl.Series(np.where(is_valid_value, values, 0).astype(np.int64)).set(
        pl.Series(~is_valid_value), None
    )


def _null_column(count: int, dtype: Any) -> pl.Series:
    """Return a column of nulls, whose memory is never touched."""
    return pl.Series([None], dtype=dtype).new_from_index(0, count)


def _to_floats(values: Array | pl.Series) -> pl.Series:
    if isinstance(values, pl.Series):
        if values.null_count() == len(values):
            return _null_column(len(values), pl.Float64)
        floats = values.cast(pl.Float64, strict=False)
        is_valid = floats.is_finite()
        return floats if is_valid.all() else floats.set(~is_valid, None)
    if is_blank(values) and values[0] != values[0]:
        return _null_column(len(values), pl.Float64)
    return pl.Series(np.where(np.isfinite(values), values, np.nan), nan_to_null=True)


def _decode(codes: Array, values: tuple[str, ...], dtype: Any) -> pl.Series:
    """Return codes as an enumeration, with null for -1."""
    return _gather(pl.Series(values, dtype=dtype), codes)


def _gather(table: pl.Series, codes: Array) -> pl.Series:
    """Return values of a small table by code, with null for -1."""
    if not len(table) or (is_missing := codes < 0).all():
        return _null_column(len(codes), table.dtype)
    if not is_missing.any():
        return table.gather(codes.astype(np.uint32))
    indices = codes.astype(np.uint32)
    indices[is_missing] = len(table)
    return table.append(pl.Series([None], dtype=table.dtype)).gather(indices)


class _NullColumns:
    """Null columns of one length, which share their memory."""

    def __init__(self, count: int) -> None:
        self._count = count
        self._by_type: dict[Any, pl.Series] = {}

    def as_type(self, series: pl.Series, dtype: Any) -> pl.Series:
        """Cast a series to a type. A series of only nulls is replaced by the shared column."""
        if series.null_count() < self._count or not self._count:
            return series if series.dtype == dtype else series.cast(dtype, strict=False)
        if dtype not in self._by_type:
            self._by_type[dtype] = _null_column(self._count, dtype)
        return self._by_type[dtype]


def _conform(columns: dict[str, pl.Series], schema: dict[str, Any]) -> pl.DataFrame:
    nulls = _NullColumns(len(next(iter(columns.values()))))
    return pl.DataFrame(
        {name: nulls.as_type(columns.pop(name), dtype) for name, dtype in schema.items()}
    )
