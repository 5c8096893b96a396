"""Collectives: which, how many bytes, how fast on the wire, and how much of them nothing hides."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import polars as pl
from numpy.typing import NDArray

from advisor.core.intervals import covered_length, subtract
from advisor.measure.comm.messages import COLLECTIVES, collective_facts, kernel_kind
from advisor.measure.host.names import map_names

if TYPE_CHECKING:
    from advisor.measure import Analysis

SCHEMA: dict[str, Any] = {
    "gpu": pl.Int32,  # row of Trace.gpu
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
    "step": pl.Int32,
    "order": pl.Int32,
}
"""Columns of ``Analysis.collectives``."""


def find_collectives(a: Analysis) -> pl.DataFrame:
    """See ``Analysis.collectives``; columns as in :data:`SCHEMA`.

    - ``dur``: the kernel's, ns, not clipped. It contains the wait for the last rank to arrive.
    - ``bytes``: the message S of nccl-tests (``messages.message_elements``), from the collective's
      arguments, else from the shapes of the tensors it was called with. Null: neither recorded.
    - ``dtype``: as the file spells it (``BFloat16``, ``c10::BFloat16``; ``messages.width``).
    - ``bus_gbps``: bytes x ``messages.bus_factor`` / dur, GB/s. Because dur contains waiting, it
      is a lower bound of what the wire did. Null for an all-to-all with uneven splits.
    - ``exposed``: ns inside ``spans`` with no compute kernel running. Two collectives that run
      at once both count it: the sum can exceed ``breakdown.communication``.
    - ``hidden_by``: the kernel family that ran longest beside it; null: none did.
    - ``annotation``: nearest annotation around the launch that is neither the backend's own
      (``nccl:all_reduce``) nor ``ProfilerStep``.
    - ``step``: index of the used step in which it starts on the device.
    - ``order``: 0, 1, … among those of its (group, collective) on this device, over the whole
      trace, so that it does not depend on which steps are used.
    """
    if a.device_id is None:
        return pl.DataFrame(schema=SCHEMA)
    table = describe(a)
    table = table.filter(pl.Series(a.in_window)[table["gpu"]])
    if table.is_empty():
        return pl.DataFrame(schema=SCHEMA)
    ts = table["ts"].to_numpy()
    end = ts + table["dur"].to_numpy()
    table = table.with_columns(
        exposed=covered_length(ts, end, subtract(a.spans, a.breakdown.compute)),
        hidden_by=_hidden_by(a, ts, end),
        step=step_at(a, ts),
    )
    return table.select(pl.col(name).cast(dtype) for name, dtype in SCHEMA.items())


def step_at(a: Analysis, ts: NDArray[np.int64]) -> NDArray[np.int32]:
    """Index of the used step that each instant lies in; the next one for an instant between used
    steps (work that started earlier and reaches into it), the last one after all."""
    used = a.steps.used
    if used.is_empty():
        return np.zeros(len(ts), dtype=np.int32)
    at = np.searchsorted(used["end"].to_numpy(), ts, side="right")
    return used["index"].to_numpy()[np.minimum(at, used.height - 1)].astype(np.int32)


def _hidden_by(a: Analysis, ts: NDArray[np.int64], end: NDArray[np.int64]) -> pl.Series:
    """The family of compute kernels that covers most of each interval; null: none does."""
    names: list[str | None] = [None]
    best = np.zeros(len(ts), dtype=np.int64)
    which = np.zeros(len(ts), dtype=np.int64)
    if "family" in a.kernels.columns:
        kernel = (a.trace.gpu["kind"] == "kernel").to_numpy() & a.in_window
        kernel &= ~a.kernels["communication"].to_numpy()
        family = a.kernels["family"]
        for name in sorted(family.filter(pl.Series(kernel)).drop_nulls().cast(pl.String).unique()):
            rows = kernel & (family == name).fill_null(False).to_numpy()
            amount = covered_length(ts, end, a.device_busy(rows))
            names.append(name)
            which = np.where(amount > best, len(names) - 1, which)
            best = np.maximum(best, amount)
    return pl.Series(names, dtype=pl.String).gather(which)


def describe(a: Analysis) -> pl.DataFrame:
    """Every collective of the whole trace on the analysed device, by device start.

    Columns: those of :data:`SCHEMA` that need no window, and ``launch_ts`` (ns; null: launched
    outside the trace), ``ranks`` (JSON text; null: not told), ``sequence`` (``Seq``; null),
    ``source`` and ``target`` (of a send or receive; null).
    """
    trace = a.trace
    mine = a.kernels["communication"].to_numpy() & (trace.gpu["device"] == a.device_id).to_numpy()
    rows = np.flatnonzero(mine)
    gpu = trace.gpu[rows]
    found = collective_facts(trace, gpu, map_names(gpu["name"], kernel_kind, pl.String))
    ns = gpu["dur"].cast(pl.Float64)
    algorithm = found["bytes"].cast(pl.Float64) / ns.set(ns == 0, None)
    return found.with_columns(
        gpu=pl.Series(rows, dtype=pl.Int32),
        ts=gpu["ts"],
        dur=gpu["dur"],
        bus_gbps=algorithm.set((algorithm == 0).fill_null(False), None) * found["factor"],
        stream=gpu["stream"],
        op=gpu["op"],
        launch_ts=trace.cpu["ts"].gather(gpu["launch"]),
    ).with_columns(order=pl.int_range(pl.len(), dtype=pl.Int32).over("group", "collective"))
