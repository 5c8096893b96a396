"""What makes one step longer than another: the longer half beside the shorter one."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import polars as pl

from advisor.core.intervals import covered_length, union
from advisor.measure.device.breakdown import CLASSES
from advisor.measure.steps.timeline import CLASSES as HOST

if TYPE_CHECKING:
    from advisor.measure import Analysis

MIN_STEPS = 4
"""Fewer have no halves: one step's accident would stand for all."""
MIN_SPREAD = 1.3
"""Longest over shortest step from which the halves are compared."""
NAMED_SHARE = 0.15
"""Part of the difference from which a class or a piece of work is listed."""
LIMIT = 4


class StepDifference(NamedTuple):
    """One class of the step's time, or one kind of work."""

    name: str
    ns: float
    """How much more of it the longer steps have, mean a step."""
    short_count: float | None = None
    """Of work: how often it runs in a shorter step, mean."""
    long_count: float | None = None
    """In a longer one."""


class StepHalves(NamedTuple):
    """The mean of the longer half of the steps less that of the shorter half.

    A median step is in neither. ``classes`` are exclusive (those of ``Breakdown``, idle by its
    cause), so that all of them would add up to ``difference_ns``; those
    that hold NAMED_SHARE of it are listed. ``work`` is device work by name in the same way, not
    exclusive: hidden work is in it too.
    """

    short_ns: float
    long_ns: float
    classes: tuple[StepDifference, ...]
    work: tuple[StepDifference, ...]

    @property
    def difference_ns(self) -> float:
        """How much longer the mean step of the longer half is, ns."""
        return self.long_ns - self.short_ns


def compare_halves(a: Analysis) -> StepHalves | None:
    """What the longer half of the used steps has more of than the shorter one. ``None``: the steps
    are similar, or too few. Without device work it
    is the main thread's time, by its classes, and operators by the time in them alone."""
    used = a.steps.used
    if used.height < MIN_STEPS or (a.device_id is None and a.trace.main_thread is None):
        return None
    dur = used["dur"].to_numpy()
    if dur.max() < MIN_SPREAD * max(int(dur.min()), 1):
        return None
    order = np.argsort(dur, kind="stable")
    half = len(order) // 2
    short, long = order[:half], order[-half:]
    difference = float(dur[long].mean() - dur[short].mean())
    if difference <= 0:
        return None
    start, end = used["ts"].to_numpy(), used["end"].to_numpy()
    amounts = {}
    if a.device_id is not None:
        table = a.breakdown.per_step
        amounts = {name: table[name].to_numpy() for name in CLASSES if name != "idle"}
        gpu, rows = a.trace.gpu, np.flatnonzero(a.on_device)
        work = _Work(*(gpu[name].gather(rows) for name in ("name", "ts", "dur")))
    else:
        work = _operators(a)
    for cause, begin, finish in _host(a) if a.device_id is None else _idle(a):
        amounts[cause] = covered_length(start, end, union(begin, finish))
    classes = [
        StepDifference(name, float(each[long].mean() - each[short].mean()))
        for name, each in amounts.items()
    ]
    return StepHalves(
        float(dur[short].mean()),
        float(dur[long].mean()),
        _largest(classes, difference),
        _largest(_by_name(a, work, short, long), difference),
    )


def _idle(a: Analysis) -> list[tuple[str, np.ndarray, np.ndarray]]:
    """(cause, starts, ends) of idle time."""
    parts = a.gaps.select("cause", "ts", "dur").with_columns(pl.col("cause").cast(pl.String))
    return [
        (
            f"idle: {cause}",
            rows["ts"].to_numpy(),
            (rows["ts"] + rows["dur"]).to_numpy(),
        )
        for (cause,), rows in sorted(parts.partition_by("cause", as_dict=True).items())
    ]


class _Work(NamedTuple):
    """Pieces of work, or of operators."""

    name: pl.Series
    ts: pl.Series
    dur: pl.Series


def _host(a: Analysis) -> list[tuple[str, np.ndarray, np.ndarray]]:
    """(class, starts, ends) of the main thread's time."""
    line = a.timeline
    own = line.thread == a.trace.main_thread
    start, end, code = line.start[own], line.end[own], line.code[own]
    return [
        (f"host: {HOST[which]}", start[code == which], end[code == which])
        for which in np.unique(code).tolist()
    ]


def _operators(a: Analysis) -> _Work:
    """Operators of the main thread, each piece in which nothing runs below it."""
    line = a.timeline
    own = (line.thread == a.trace.main_thread) & (line.code == HOST.index("dispatch"))
    own &= line.row >= 0
    start = line.start[own]
    return _Work(
        a.trace.cpu["name"].gather(line.row[own]),
        pl.Series(start),
        pl.Series(line.end[own] - start),
    )


def _by_name(a: Analysis, work: _Work, short: np.ndarray, long: np.ndarray) -> list[StepDifference]:
    """Time by name inside the steps of each half, a piece in the step where it starts."""
    used = a.steps.used
    ts = work.ts.to_numpy()
    order = np.argsort(used["ts"].to_numpy(), kind="stable")
    starts = used["ts"].to_numpy()[order]
    index = np.searchsorted(starts, ts, side="right") - 1
    step = np.where(index >= 0, order[np.maximum(index, 0)], -1)
    inside = (index >= 0) & (ts < used["end"].to_numpy()[step])
    half = np.zeros(used.height, dtype=np.int8)
    half[short], half[long] = -1, 1
    side = np.where(inside, half[np.maximum(step, 0)], 0)
    size = len(short)
    table = (
        pl.DataFrame(
            {
                "name": work.name,
                "side": side,
                "dur": work.dur,
            }
        )
        .filter(pl.col("side") != 0)
        .group_by("name")
        .agg(
            (pl.col("dur") * pl.col("side")).sum().alias("ns") / size,
            (pl.col("side") == -1).sum().alias("short") / size,
            (pl.col("side") == 1).sum().alias("long") / size,
        )
        .sort(-pl.col("ns"), pl.col("name").cast(pl.String))
        .head(20)
    )
    return [
        StepDifference(str(name), float(ns), float(few), float(many))
        for name, ns, few, many in table.iter_rows()
    ]


def _largest(parts: list[StepDifference], difference: float) -> tuple[StepDifference, ...]:
    kept = [part for part in parts if part.ns >= NAMED_SHARE * difference]
    return tuple(sorted(kept, key=lambda part: -part.ns)[:LIMIT])
