"""Collectives: kinds, bytes, rates on the wire, and exposed time."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import polars as pl
from numpy.typing import NDArray

from advisor.core.intervals import covered_length, subtract
from advisor.measure.comm.gloo import has_host_collectives, host_work, list_on_host
from advisor.measure.comm.mesh import AXES, find_axes
from advisor.measure.comm.messages import COLLECTIVES, collective_facts, kernel_kind
from advisor.measure.host.names import map_names

if TYPE_CHECKING:
    from advisor.measure import Analysis
    from advisor.measure.ranks.skew import Skew

SCHEMA: dict[str, Any] = {
    "gpu": pl.Int32,  # row of Trace.gpu; null: gloo's, on the host
    "host": pl.Int32,  # row of Trace.cpu: gloo's range; null: on a device
    "ts": pl.Int64,
    "dur": pl.Int64,
    "collective": pl.Enum(COLLECTIVES),
    "bytes": pl.Int64,
    "group_size": pl.Int64,
    "dtype": pl.String,
    "bus_gbps": pl.Float64,
    "exposed": pl.Int64,
    "hidden_by": pl.String,
    "stream": pl.Int64,
    "op": pl.Int32,
    "annotation": pl.String,
    "group": pl.String,
    "ranks": pl.String,
    "source": pl.Int64,
    "target": pl.Int64,
    "axis": pl.Enum(AXES),
    "axis_named": pl.Boolean,
    "step": pl.Int32,
    "order": pl.Int32,
}
"""Columns of ``Analysis.collectives``."""


def find_collectives(a: Analysis) -> pl.DataFrame:
    """Find collectives inside ``spans``; columns as in :data:`SCHEMA`.

    Without a device they are gloo's, in threads of the host (``comm/gloo.py``).

    - ``dur``: duration of the kernel, ns, not clipped. It includes the wait for the last rank.
    - ``bytes``: the message S of nccl-tests (``messages.message_elements``), from the collective's
      arguments, else from the shapes of its tensors. Null if neither is recorded.
    - ``dtype``: as the file spells it (``BFloat16``, ``c10::BFloat16``; ``shapes.width_of``).
    - ``bus_gbps``: bytes x ``messages.bus_factor`` / dur, GB/s. Because dur includes waiting, it
      is a lower bound of the wire's rate. Null for an all-to-all with uneven splits.
    - ``exposed``: ns inside ``spans`` with no compute kernel running; without a device, with no
      operator. Two concurrent collectives both count it: the sum can exceed
      ``breakdown.communication``.
    - ``hidden_by``: the kernel family that ran longest at the same time; null if none did.
    - ``annotation``: nearest annotation around the launch that is neither the backend's own
      (``nccl:all_reduce``) nor ``ProfilerStep``.
    - ``ranks``: of the group, JSON text; null if not recorded. ``source``, ``target``: of a send or
      receive. ``axis``, ``axis_named``: the part of
      the parallelism it belongs to, and whether the group's description says so (``mesh``).
    - ``step``: index of the used step in which it starts on the device.
    - ``order``: 0, 1, … among collectives of its (group, collective) on this device, over the
      whole trace, so that it does not depend on which steps are used.
    """
    on_host = has_host_collectives(a)
    if a.device_id is None and not on_host:
        return pl.DataFrame(schema=SCHEMA)
    table = list_collectives(a)
    table = table.hstack(find_axes(a, table))
    table = table.filter(in_window(a, table))
    if table.is_empty():
        return pl.DataFrame(schema=SCHEMA)
    ts = table["ts"].to_numpy()
    end = ts + table["dur"].to_numpy()
    work = host_work(a) if on_host else a.breakdown.compute
    table = table.with_columns(
        exposed=covered_length(ts, end, subtract(a.spans, work)),
        hidden_by=_find_hiding_families(a, ts, end),
        step=step_at(a, ts),
    )
    return table.select(pl.col(name).cast(dtype) for name, dtype in SCHEMA.items())


def in_window(a: Analysis, table: pl.DataFrame) -> pl.Series:
    """Return whether each row of :func:`list_collectives` runs in the used steps."""
    if a.device_id is not None:
        return pl.Series(a.in_window).gather(table["gpu"])
    ts = table["ts"].to_numpy()
    return pl.Series(covered_length(ts, ts + table["dur"].to_numpy().clip(1), a.spans) > 0)


def step_at(a: Analysis, ts: NDArray[np.int64]) -> NDArray[np.int32]:
    """Return the index of the used step around each instant. Between used steps it is the next one
    (for work that reaches into it), and after all steps the last one."""
    used = a.steps.used
    if used.is_empty():
        return np.zeros(len(ts), dtype=np.int32)
    index = np.searchsorted(used["end"].to_numpy(), ts, side="right")
    return used["index"].to_numpy()[np.minimum(index, used.height - 1)].astype(np.int32)


def _find_hiding_families(a: Analysis, ts: NDArray[np.int64], end: NDArray[np.int64]) -> pl.Series:
    """Return the family of compute kernels that covers most of each interval, or null."""
    names: list[str | None] = [None]
    best_ns = np.zeros(len(ts), dtype=np.int64)
    best_index = np.zeros(len(ts), dtype=np.int64)
    if "family" in a.kernels.columns:
        compute = (a.trace.gpu["kind"] == "kernel").to_numpy() & a.in_window
        compute &= ~a.kernels["communication"].to_numpy()
        family = a.kernels["family"]
        for name in sorted(family.filter(pl.Series(compute)).drop_nulls().cast(pl.String).unique()):
            rows = compute & (family == name).fill_null(False).to_numpy()
            amount = covered_length(ts, end, a.device_busy(rows))
            names.append(name)
            best_index = np.where(amount > best_ns, len(names) - 1, best_index)
            best_ns = np.maximum(best_ns, amount)
    return pl.Series(names, dtype=pl.String).gather(best_index)


def list_collectives(a: Analysis) -> pl.DataFrame:
    """List every collective of the trace on the analysed device, by device start, or gloo's
    collectives without a device.

    Columns: those of :data:`SCHEMA` that need no window, and ``launch_ts`` (ns; null if launched
    outside the trace), ``ranks`` (JSON text; null if not recorded), ``sequence`` (``Seq``; null),
    ``source`` and ``target`` (of a send or receive; null)."""
    trace = a.trace
    if a.device_id is None:
        return _add_rate_and_order(
            list_on_host(a).with_columns(
                gpu=pl.lit(None, dtype=pl.Int32), stream=pl.lit(None, dtype=pl.Int64)
            )
        )
    is_collective = (
        a.kernels["communication"].to_numpy() & (trace.gpu["device"] == a.device_id).to_numpy()
    )
    rows = np.flatnonzero(is_collective)
    gpu = trace.gpu[rows]
    result = collective_facts(trace, gpu, map_names(gpu["name"], kernel_kind, pl.String))
    return _add_rate_and_order(
        result.with_columns(
            gpu=pl.Series(rows, dtype=pl.Int32),
            host=pl.lit(None, dtype=pl.Int32),
            ts=gpu["ts"],
            dur=gpu["dur"],
            stream=gpu["stream"],
            op=gpu["op"],
            launch_ts=trace.cpu["ts"].gather(gpu["launch"]),
        )
    )


def _add_rate_and_order(table: pl.DataFrame) -> pl.DataFrame:
    """Add ``bus_gbps`` and ``order`` to the table."""
    ns = table["dur"].cast(pl.Float64)
    algorithm = table["bytes"].cast(pl.Float64) / ns.set(ns == 0, None)
    return table.with_columns(
        bus_gbps=algorithm.set((algorithm == 0).fill_null(False), None) * table["factor"],
        order=pl.int_range(pl.len(), dtype=pl.Int32).over("group", "collective"),
    )


def sum_collectives(a: Analysis) -> pl.DataFrame:
    """Sum collectives inside ``spans`` by kind, message size, group size, dtype and annotation:
    ``collective``, ``bytes``, ``group_size``, ``dtype``, ``annotation``, ``count``, ``dur`` and
    ``exposed`` (ns summed over the window), ``bus_gbps`` (median; null if unknown); largest
    ``exposed``, then ``dur`` first."""
    return (
        a.collectives.with_columns(pl.col("collective", "dtype").cast(pl.String))
        .group_by("collective", "bytes", "group_size", "dtype", "annotation")
        .agg(
            pl.len().cast(pl.Int64).alias("count"),
            pl.col("dur").sum(),
            pl.col("exposed").sum(),
            pl.col("bus_gbps").median(),
        )
        .sort("exposed", "dur", "collective", descending=[True, True, False])
    )


def sum_skew(skew: Skew) -> pl.DataFrame:
    """Sum arrivals at collectives by kind, message size and annotation: ``collective``, ``bytes``,
    ``annotation``, ``count``, ``skew_ns`` (mean of last - first arrival), ``worst_ns``, ``wait_ns``
    (mean wait of the others, summed, per step), ``last`` (the rank that is last most often, or
    null) and ``last_count``; largest ``wait_ns`` first."""
    return (
        skew.collectives.with_columns(pl.col("collective").cast(pl.String))
        .group_by("collective", "bytes", "annotation")
        .agg(
            pl.len().cast(pl.Int64).alias("count"),
            pl.col("skew_ns").mean(),
            pl.col("skew_ns").max().alias("worst_ns"),
            (pl.col("mean_wait_ns").sum() / skew.steps).alias("wait_ns"),
            pl.col("last").drop_nulls().mode().sort().first(),
            pl.col("last").drop_nulls().unique_counts().max().alias("last_count"),
            one=pl.col("label").n_unique() == 1,
            label=pl.col("label").first(),
        )
        .with_columns(annotation=pl.when("one").then("label").otherwise("annotation"))
        .drop("one", "label")
        .sort("wait_ns", "skew_ns", "collective", descending=[True, True, False])
    )
