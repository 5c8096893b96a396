"""Steps without marks: the range, or the sequence of device work, that repeats."""

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
from advisor.measure.host.launches import analyzed_device

MIN_REPEATS = 3
"""Minimum number of repeats: two may be start and end."""
MIN_LAUNCHED_SHARE = 0.9
"""Minimum share of the device's time that is launched in a range if it is the step."""
_MIN_SIMILAR_SHARE = 0.9
"""Minimum share of work that two periods have in common: some kernels depend on the data."""
SIMILAR_TIME = 0.8
"""Minimum common share of the time of each kind of work, since clocks change. Collectives are
excluded: they wait for others."""
_MIN_COVERED_SHARE = 0.8
"""Minimum share of the device's rows in similar periods."""
MIN_EQUAL_SHARE = 0.98
"""Minimum share of the best period's coverage for an equally good period. The shortest of these is
the step: a repeating sequence also repeats with twice the period, while layers do not cover the
time between steps."""
MAX_SKIPPED_RANGES = 20
"""Maximum number of ranges before the first round, since a recording may begin anywhere."""
MAX_CANDIDATES = 300
MAX_TABLE_CELLS = 8_000_000
"""Maximum size of the table of one candidate, in cells: periods by kinds of work."""
_STEP_NAME = r"(?i)\b(?:train_?)?(?:step|iter(?:ation)?|batch)s?(?:\b|_|\d)"


class RangeGroup(NamedTuple):
    """Consecutive ranges of one name on the thread that launches the device's work. Numbers in
    names (``step 7``) are ignored."""

    name: str
    """Name of the first range."""
    marks: pl.DataFrame
    """Ranges in order of time: ``name``, ``ts``, ``dur``, ``depth``."""
    share: float
    """Share of the device's time that is launched in the ranges."""

    @property
    def is_step_range(self) -> bool:
        return bool(self.marks["name"].str.contains(_STEP_NAME).any())


def find_repeats(trace: Trace) -> tuple[pl.DataFrame, str] | None:
    """Find the steps' marks (``name``, ``ts``, ``dur``, in order of time) and their kind:
    ``ranges`` called steps, or one of ``GUESSED_STEP_SOURCES``. ``None`` if nothing repeats."""
    device = analyzed_device(trace)
    if device is None:
        marks = _find_cycle(trace)
        return None if marks is None else (marks, "ranges")
    group = max(
        (g for g in range_groups(trace) if g.share >= MIN_LAUNCHED_SHARE),
        key=lambda g: (g.is_step_range, -int(g.marks["depth"].min()), g.marks.height),  # type: ignore[arg-type]
        default=None,
    )
    if group is not None:
        marks = group.marks.select("name", "ts", "dur")
        return marks, "ranges" if group.is_step_range else GUESSED_STEP_SOURCES[1]
    rows = trace.gpu.filter(pl.col("device") == device)
    marks = _find_sequence(rows, _launch_times(trace, rows))
    return None if marks is None else (marks, GUESSED_STEP_SOURCES[0])


def _launch_times(trace: Trace, rows: pl.DataFrame) -> Ints:
    """Return the launch time of each piece of device work, ns, or its start if that is unknown."""
    launch = rows["launch"].fill_null(-1).to_numpy().astype(np.int64)
    ts = rows["ts"].to_numpy()
    if not trace.cpu.height:
        return ts
    return np.where(launch >= 0, trace.cpu["ts"].to_numpy()[np.maximum(launch, 0)], ts)


def range_groups(trace: Trace) -> Iterator[RangeGroup]:
    """Yield ranges that could be the step, for each name that occurs at least MIN_REPEATS times."""
    device = analyzed_device(trace)
    if device is None:
        return
    rows = trace.gpu.filter(pl.col("device") == device)
    launch = rows["launch"].drop_nulls()
    if not len(launch):
        return
    launch_times, work = _launch_times(trace, rows), rows["dur"].to_numpy()
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
        range_index = np.searchsorted(start, launch_times, side="right") - 1
        in_range = (range_index >= 0) & (launch_times < end[np.maximum(range_index, 0)])
        share = float(work[in_range].sum() / max(int(work.sum()), 1))
        yield RangeGroup(str(marks["name"][0]), marks, share)


def _find_cycle(trace: Trace) -> pl.DataFrame | None:
    """Find rounds of a thread's outermost ranges, which recur in a fixed order (``load``,
    ``solve``, ``write``), without device work. Ranges of frameworks are not rounds of a program."""
    if trace.meta.framework in (JAX, TENSORFLOW):
        return None
    result = trace.cpu.filter((pl.col("kind") == "annotation") & (pl.col("dur") > 0))
    if result.height < MIN_REPEATS:
        return None
    outermost = result.filter(pl.col("depth") == pl.col("depth").min()).group_by("thread")
    thread = int(outermost.agg(pl.col("dur").sum()).sort("dur", "thread")["thread"][-1])
    result = result.filter(pl.col("thread") == thread)
    result = result.filter(pl.col("depth") == pl.col("depth").min()).sort("ts")
    kind = result["name"].cast(pl.String).str.replace_all(r"\d+", "#")
    codes = kind.rank("dense").to_numpy()
    ts, end = result["ts"].to_numpy(), (result["ts"] + result["dur"]).to_numpy()
    # ranges before the first round belong to an incomplete round
    for first in dict.fromkeys(codes[:MAX_SKIPPED_RANGES].tolist()):
        index = np.flatnonzero(codes == first)
        rounds = [tuple(codes[low:high]) for low, high in pairwise([*index.tolist(), len(codes)])]
        usual_round, count = Counter(rounds).most_common(1)[0]
        complete_rounds = len(index) if rounds[-1] == usual_round else len(index) - 1
        if complete_rounds < MIN_REPEATS or count < _MIN_SIMILAR_SHARE * complete_rounds:
            continue
        if len(usual_round) == 1:
            return result[index[:complete_rounds]].select(
                pl.col("name").cast(pl.String), "ts", "dur"
            )
        start = np.append(ts[index], end[-1])[: complete_rounds + 1]
        names = [f"round {number + 1}" for number in range(complete_rounds)]
        return pl.DataFrame({"name": names, "ts": start[:-1], "dur": np.diff(start)})
    return None


def _find_sequence(rows: pl.DataFrame, launch_times: Ints) -> pl.DataFrame | None:
    """Find periods of the device's work, in the order of its launches. Each kind of work may begin
    a period. Among kinds with similar periods, those that cover most of the work count."""
    order = np.argsort(launch_times, kind="stable")
    names = rows.select(pl.struct("kind", "name").rank("dense").cast(pl.Int64) - 1).to_series()
    codes = names.to_numpy()[order]
    if len(codes) < 2 * MIN_REPEATS:
        return None
    is_communication = describe_kernels(rows["name"].cast(pl.String))["communication"].to_numpy()
    work = np.where(is_communication, 0, rows["dur"].to_numpy())[order]
    counts = np.bincount(codes)
    candidates = np.flatnonzero(counts >= MIN_REPEATS)
    candidates = candidates[counts[candidates] * len(counts) <= MAX_TABLE_CELLS]
    result: list[tuple[float, int, int, Ints]] = []
    for count in np.unique(counts[candidates]).tolist():
        for code in candidates[counts[candidates] == count].tolist()[:8]:
            if len(result) >= MAX_CANDIDATES:
                break
            index = np.flatnonzero(codes == code)
            share = _measure_similarity(codes, work, index, len(counts))[0]
            result.append((share, count, -int(index[0]), index))
    best_share = max((item[0] for item in result), default=0.0)
    if best_share < _MIN_COVERED_SHARE:
        return None
    *_, index = max(
        (item for item in result if item[0] >= MIN_EQUAL_SHARE * best_share),
        key=lambda item: item[1:3],
    )
    index = _align_to_first_work(index, len(codes))
    starts = np.append(launch_times[order][index], 0)
    work_ends = (rows["ts"] + rows["dur"]).to_numpy()[order]
    starts[-1] = max(int(work_ends[index[-1] :].max()), int(starts[-2]) + 1)
    similar = _measure_similarity(codes, work, index, len(counts))[1]
    pieces = np.diff(np.append(index, len(codes)))
    steps = without_fragments(similar & (pieces >= _MIN_SIMILAR_SHARE * np.median(pieces)))
    if len(steps) < MIN_REPEATS:
        return None
    return pl.DataFrame(
        {
            "name": [f"repetition {number + 1}" for number in range(len(steps))],
            "ts": starts[steps],
            "dur": np.diff(starts)[steps],
        }
    )


def without_fragments(good: NDArray[np.bool_]) -> Ints:
    """Return the range from the first to the last good period. Periods before and after are
    start-up, or were cut off by the recording."""
    good_rows = np.flatnonzero(good)
    return np.arange(good_rows[0], good_rows[-1] + 1) if len(good_rows) else good_rows


def _measure_similarity(
    codes: Ints, work: Ints, at: Ints, kinds: int
) -> tuple[float, NDArray[np.bool_]]:
    """Return the share of all work in similar periods, which begin at the indices ``at``, and which
    periods are similar. Similar periods have the usual pieces, and the usual time of each kind."""
    rows = np.arange(at[0], len(codes))
    cell = (np.searchsorted(at, rows, side="right") - 1) * kinds + codes[rows]
    is_similar = np.ones(len(at), dtype=np.bool_)
    sizes = np.bincount(cell // kinds, minlength=len(at))
    for weights, share in ((None, _MIN_SIMILAR_SHARE), (work[rows], SIMILAR_TIME)):
        table = np.bincount(cell, weights, minlength=len(at) * kinds).reshape(len(at), kinds)
        usual_amounts = np.median(table, axis=0)
        common = np.minimum(table, usual_amounts).sum(axis=1)
        is_similar &= 2 * common >= share * (table.sum(axis=1) + usual_amounts.sum())
    if int(is_similar.sum()) < max(MIN_REPEATS, _MIN_COVERED_SHARE * (len(at) - 1)):
        return 0.0, is_similar
    # the end of a period that began before the recording
    before_first = min(int(at[0]), int(np.median(sizes[is_similar])))
    return float((sizes[is_similar].sum() + before_first) / len(codes)), is_similar


def _align_to_first_work(at: Ints, count: int) -> Ints:
    """Move periods to the first piece of work if all are equally long: a step begins where the
    recording does, not at an arbitrary kind of work."""
    length = np.diff(at)
    has_equal_lengths = len(length) and (length == length[0]).all() and at[0] < length[0]
    return at - at[0] if has_equal_lengths and count - at[-1] + at[0] >= length[0] else at
