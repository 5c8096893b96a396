"""Steps where nothing marks them: the range, or the sequence of device work, that repeats."""

from collections import Counter
from collections.abc import Iterator
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import polars as pl
from numpy.typing import NDArray

from advisor.core.finding import GUESSED_STEP_SOURCES
from advisor.core.intervals import Ints
from advisor.core.trace import JAX, TENSORFLOW, Trace
from advisor.measure.device.kernel_names import describe_kernels
from advisor.measure.host.launches import analysed_device

MIN_REPEATS = 3
"""Repeats that are needed: two may be start and end."""
LAUNCHED_INSIDE = 0.9
"""Part of the device's time whose launches must lie in a range for it to be the step."""
SIMILAR = 0.9
"""Share of work that two periods must have in common: some kernels depend on the data."""
SIMILAR_TIME = 0.8
"""Share of the time of each kind of work but collectives, which wait for others: clocks change."""
COVERED = 0.8
"""Part of the device's rows that must lie in similar periods."""
AS_GOOD = 0.98
"""Share of the best period's coverage that is as good. Of equals the shortest is the step: what
repeats also repeats twice as slowly, while layers leave out the time between steps."""
MAX_LEFT_OUT = 20
"""Ranges before the first round, at most: a recording begins anywhere."""
MAX_CANDIDATES = 300
MAX_TABLE = 8_000_000
"""Cells of the table of one candidate, at most: periods by kinds of work."""
_NAMED = r"(?i)\b(?:train_?)?(?:step|iter(?:ation)?|batch)s?(?:\b|_|\d)"


class RangeGroup(NamedTuple):
    """Ranges of one name on the thread that launches the device's work, one after the other.
    Ints in names (``step 7``) do not tell ranges apart."""

    name: str
    """Name of the first range."""
    marks: pl.DataFrame
    """Ranges in time's order: ``name``, ``ts``, ``dur``, ``depth``."""
    share: float
    """Part of the device's time that is launched in them."""

    @property
    def is_step_range(self) -> bool:
        return bool(self.marks["name"].str.contains(_NAMED).any())


def find_repeats(trace: Trace) -> tuple[pl.DataFrame, str] | None:
    """Find the steps' marks (``name``, ``ts``, ``dur``, in time's order) and their kind: ``ranges``
    that are called steps, or one of ``GUESSED_STEP_SOURCES``. ``None``: nothing repeats."""
    device = analysed_device(trace)
    if device is None:
        marks = _cycle(trace)
        return None if marks is None else (marks, "ranges")
    group = max(
        (g for g in range_groups(trace) if g.share >= LAUNCHED_INSIDE),
        key=lambda g: (g.is_step_range, -int(g.marks["depth"].min()), g.marks.height),  # type: ignore[arg-type]
        default=None,
    )
    if group is not None:
        marks = group.marks.select("name", "ts", "dur")
        return marks, "ranges" if group.is_step_range else GUESSED_STEP_SOURCES[1]
    rows = trace.gpu.filter(pl.col("device") == device)
    marks = _sequence(rows, _called(trace, rows))
    return None if marks is None else (marks, GUESSED_STEP_SOURCES[0])


def _called(trace: Trace, rows: pl.DataFrame) -> Ints:
    """Return the launch time of each piece of device work, ns; its start if that is not known."""
    launch = rows["launch"].fill_null(-1).to_numpy().astype(np.int64)
    ts = rows["ts"].to_numpy()
    if not trace.cpu.height:
        return ts
    return np.where(launch >= 0, trace.cpu["ts"].to_numpy()[np.maximum(launch, 0)], ts)


def range_groups(trace: Trace) -> Iterator[RangeGroup]:
    """Yield ranges that could be the step: of each name that comes MIN_REPEATS times."""
    device = analysed_device(trace)
    if device is None:
        return
    rows = trace.gpu.filter(pl.col("device") == device)
    launch = rows["launch"].drop_nulls()
    if not len(launch):
        return
    called, work = _called(trace, rows), rows["dur"].to_numpy()
    thread = int(trace.cpu["thread"].gather(launch).mode().sort()[0])
    ranges = trace.cpu.filter(
        (pl.col("kind") == "annotation") & (pl.col("thread") == thread)
    ).select("ts", "dur", "depth", name=pl.col("name").cast(pl.String))
    ranges = ranges.with_columns(kind=pl.col("name").str.replace_all(r"\d+", "#"))
    for _, group in ranges.group_by("kind", maintain_order=True):
        if group.height < MIN_REPEATS:
            continue
        marks = group.sort("ts")
        start = marks["ts"].to_numpy()
        end = start + marks["dur"].to_numpy()
        if (start[1:] < end[:-1]).any():
            continue
        place = np.searchsorted(start, called, side="right") - 1
        inside = (place >= 0) & (called < end[np.maximum(place, 0)])
        share = float(work[inside].sum() / max(int(work.sum()), 1))
        yield RangeGroup(str(marks["name"][0]), marks, share)


def _cycle(trace: Trace) -> pl.DataFrame | None:
    """Find rounds of a thread's outermost ranges, which recur in one order (``load``, ``solve``,
    ``write``), without device work. Frameworks' own ranges are no rounds of a program."""
    if trace.meta.framework in (JAX, TENSORFLOW):
        return None
    result = trace.cpu.filter((pl.col("kind") == "annotation") & (pl.col("dur") > 0))
    if result.height < MIN_REPEATS:
        return None
    spent = result.filter(pl.col("depth") == pl.col("depth").min()).group_by("thread")
    thread = int(spent.agg(pl.col("dur").sum()).sort("dur", "thread")["thread"][-1])
    result = result.filter(pl.col("thread") == thread)
    result = result.filter(pl.col("depth") == pl.col("depth").min()).sort("ts")
    kind = result["name"].cast(pl.String).str.replace_all(r"\d+", "#")
    codes = kind.rank("dense").to_numpy()
    ts, end = result["ts"].to_numpy(), (result["ts"] + result["dur"]).to_numpy()
    # what comes before the first round is part of another
    for first in dict.fromkeys(codes[:MAX_LEFT_OUT].tolist()):
        index = np.flatnonzero(codes == first)
        rounds = [tuple(codes[low:high]) for low, high in pairwise([*index.tolist(), len(codes)])]
        usual, count = Counter(rounds).most_common(1)[0]
        whole = len(index) if rounds[-1] == usual else len(index) - 1
        if whole < MIN_REPEATS or count < SIMILAR * whole:
            continue
        if len(usual) == 1:
            return result[index[:whole]].select(pl.col("name").cast(pl.String), "ts", "dur")
        begin = np.append(ts[index], end[-1])[: whole + 1]
        names = [f"round {number + 1}" for number in range(whole)]
        return pl.DataFrame({"name": names, "ts": begin[:-1], "dur": np.diff(begin)})
    return None


def _sequence(rows: pl.DataFrame, called: Ints) -> pl.DataFrame | None:
    """Find periods of the device's work, in the order of its launches. Each kind of work may begin
    one; of those whose periods are similar, the ones that cover most of all work count."""
    order = np.argsort(called, kind="stable")
    names = rows.select(pl.struct("kind", "name").rank("dense").cast(pl.Int64) - 1).to_series()
    codes = names.to_numpy()[order]
    if len(codes) < 2 * MIN_REPEATS:
        return None
    waits = describe_kernels(rows["name"].cast(pl.String))["communication"].to_numpy()
    work = np.where(waits, 0, rows["dur"].to_numpy())[order]
    counts = np.bincount(codes)
    wanted = np.flatnonzero(counts >= MIN_REPEATS)
    wanted = wanted[counts[wanted] * len(counts) <= MAX_TABLE]
    result: list[tuple[float, int, int, Ints]] = []
    for count in np.unique(counts[wanted]).tolist():
        for code in wanted[counts[wanted] == count].tolist()[:8]:
            if len(result) >= MAX_CANDIDATES:
                break
            index = np.flatnonzero(codes == code)
            share = _shared(codes, work, index, len(counts))[0]
            result.append((share, count, -int(index[0]), index))
    best = max((item[0] for item in result), default=0.0)
    if best < COVERED:
        return None
    *_, index = max(
        (item for item in result if item[0] >= AS_GOOD * best), key=lambda item: item[1:3]
    )
    index = _from_the_first(index, len(codes))
    begin = np.append(called[order][index], 0)
    ended = (rows["ts"] + rows["dur"]).to_numpy()[order]
    begin[-1] = max(int(ended[index[-1] :].max()), int(begin[-2]) + 1)
    similar = _shared(codes, work, index, len(counts))[1]
    pieces = np.diff(np.append(index, len(codes)))
    kept = without_fragments(similar & (pieces >= SIMILAR * np.median(pieces)))
    if len(kept) < MIN_REPEATS:
        return None
    return pl.DataFrame(
        {
            "name": [f"repetition {number + 1}" for number in range(len(kept))],
            "ts": begin[kept],
            "dur": np.diff(begin)[kept],
        }
    )


def without_fragments(good: NDArray[np.bool_]) -> Ints:
    """Return the range from the first to the last good period: what is before and after them is
    start-up, or what the recording began or ended in."""
    there = np.flatnonzero(good)
    return np.arange(there[0], there[-1] + 1) if len(there) else there


def _shared(codes: Ints, work: Ints, at: Ints, kinds: int) -> tuple[float, NDArray[np.bool_]]:
    """Return the part of all work in similar periods, each beginning ``at`` one place, and which
    they are. They hold the same pieces as most do, and as much time of each kind."""
    place = np.arange(at[0], len(codes))
    cell = (np.searchsorted(at, place, side="right") - 1) * kinds + codes[place]
    similar = np.ones(len(at), dtype=np.bool_)
    sizes = np.bincount(cell // kinds, minlength=len(at))
    for weights, share in ((None, SIMILAR), (work[place], SIMILAR_TIME)):
        table = np.bincount(cell, weights, minlength=len(at) * kinds).reshape(len(at), kinds)
        usual = np.median(table, axis=0)
        shared = np.minimum(table, usual).sum(axis=1)
        similar &= 2 * shared >= share * (table.sum(axis=1) + usual.sum())
    if int(similar.sum()) < max(MIN_REPEATS, COVERED * (len(at) - 1)):
        return 0.0, similar
    # a period that had begun before the recording
    before = min(int(at[0]), int(np.median(sizes[similar])))
    return float((sizes[similar].sum() + before) / len(codes)), similar


def _from_the_first(at: Ints, count: int) -> Ints:
    """Move periods to the first piece of work, where all are equally long: a step begins where the
    recording does, not at whichever kind of work was counted."""
    length = np.diff(at)
    whole = len(length) and (length == length[0]).all() and at[0] < length[0]
    return at - at[0] if whole and count - at[-1] + at[0] >= length[0] else at
