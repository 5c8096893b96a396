"""Contents of a device's memory at one moment, by category and line; growth; churn within steps.

Everything is read off a snapshot (``memory_history.py``); bytes are those that were asked for,
which the allocator rounds up."""

import re
from collections.abc import Callable, Sequence
from functools import cached_property, wraps
from itertools import pairwise
from pathlib import PurePath
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

import numpy as np
import polars as pl
from numpy.typing import NDArray

from advisor.core.intervals import Ints
from advisor.core.snapshot import MemorySnapshot
from advisor.measure.memory.memory_history import PHASES, MemoryHistory
from advisor.measure.memory.memory_kinds import BASES, CATEGORIES, BlockCategories, classify
from advisor.measure.memory.memory_origin import AllocationOrigin

T = TypeVar("T")
HELD_SCHEMA: dict[str, Any] = {
    "category": pl.String,
    "file": pl.String,
    "line": pl.Int64,
    "function": pl.String,
    "label": pl.String,
    "blocks": pl.Int64,
    "bytes": pl.Int64,
    "oldest": pl.Int64,  # event that made the oldest; -1: before the history
}
CHURN_SCHEMA: dict[str, Any] = {
    "file": pl.String,
    "line": pl.Int64,
    "function": pl.String,
    "size": pl.Int64,  # the size asked for most often there
    "times": pl.Float64,  # a step
    "bytes": pl.Float64,  # a step
}
GROWTH_SCHEMA: dict[str, Any] = {
    "category": pl.String,
    "file": pl.String,
    "line": pl.Int64,
    "function": pl.String,
    "steps": pl.Int64,  # of whose allocations something is held still
    "of": pl.Int64,  # steps that were looked at
    "bytes": pl.Int64,  # held of them
    "step_bytes": pl.Float64,  # median of a step
}
MIN_STEPS = 6
"""Whole steps that are needed to measure growth."""
MAX_KEPT_SHARE = 0.25
"""Share of the activations made that is held at the peak, up to which forward passes keep none for
a backward pass."""
MIN_SHARE = 0.8
"""Share of the steps in which a line must have left something behind."""


class PeakMemory:
    """Memory of one device of a snapshot at the moment that matters: when memory ran out, else at
    the peak."""

    def __init__(self, snapshot: MemorySnapshot, device: int) -> None:
        self.snapshot = snapshot
        self.device = device
        self.history = MemoryHistory(snapshot, device)

    # -- the moment -----------------------------------------------------------------------------

    @cached_property
    def event(self) -> int:
        """Event after which memory is analysed; -1 before the first, or without a history."""
        failed = self.history.failed_event
        return self.history.peak if failed is None else failed

    @cached_property
    def allocated(self) -> int:
        """Bytes in tensors at that moment."""
        return int(self.history.allocated[self.event + 1])

    @cached_property
    def reserved(self) -> int:
        """Bytes in segments at that moment."""
        return int(self.history.reserved[self.event + 1])

    @property
    def is_contradictory(self) -> bool:
        """Whether more is in tensors than reserved: the file's figures cannot be true."""
        return bool(self.history.segments.height) and self.allocated > self.reserved

    @cached_property
    def request(self) -> int | None:
        """Size of the request that failed, bytes; ``None``: none did."""
        return self._of_failure("size")

    @cached_property
    def needed_after(self) -> int:
        """Bytes that the step needs, at least, beyond the request that failed: as many for each of
        its bytes as were made beside the last block of the same origin. 0: unknown, or none."""
        h, lives, request = self.history, self.history.block_lifetimes, self.request
        if h.failed_event is None or request is None:
            return 0
        same = lives.stack == h.event_stack[h.failed_event]
        rows = np.flatnonzero(same & (lives.start_event >= 0) & (lives.size > 0))
        if not len(rows):
            return 0
        last = rows[np.argmax(lives.start_event[rows])]
        begin, end = int(lives.start_event[last]) + 1, int(lives.end_event[last]) + 1
        beside = h.allocated[begin : max(end, begin + 1)]
        more = int(beside.max()) - int(beside[0])
        return round(max(0, more) / int(lives.size[last]) * request)

    @cached_property
    def device_free(self) -> int | None:
        """Bytes that the driver still had at that moment; ``None``: not recorded."""
        return self._of_failure("device_free")

    @cached_property
    def failed_at(self) -> AllocationOrigin | None:
        """Origin of the request that failed; ``None``: none did."""
        failed = self.history.failed_event
        if failed is None:
            return None
        return self.history.origins[int(self.history.event_stack[failed])]

    @cached_property
    def larger_inputs(self) -> tuple[AllocationOrigin, int, int] | None:
        """Line outside of passes whose largest block never shrank from step to step and at least
        doubled, its bytes in the first step and in the last; ``None``: there is none."""
        lives = self.history.block_lifetimes
        step = np.searchsorted(self.history.steps[1], lives.start_event, side="right")
        own = np.array([each.role == "own" for each in self.history.origins])[lives.stack]
        rows = np.flatnonzero(own & (lives.start_event >= 0))
        table = pl.DataFrame(
            {"stack": lives.stack[rows], "step": step[rows], "size": lives.size[rows]}
        )
        sizes = table.group_by("stack", "step").agg(pl.col("size").max()).sort("stack", "step")
        lines = sizes.group_by("stack").agg(
            pl.len().alias("steps"),
            pl.col("step").last(),
            first=pl.col("size").first(),
            last=pl.col("size").last(),
            least=pl.col("size").diff().min(),
        )
        grown = lines.filter(
            pl.col("steps") >= MIN_STEPS,
            pl.col("step") == step.max(initial=0),
            pl.col("least") >= 0,
            pl.col("last") >= 2 * pl.col("first"),
        ).sort("last")
        if grown.is_empty():
            return None
        stack, *_, first, last, _ = grown.row(-1)
        return self.history.origins[stack], first, last

    def _of_failure(self, column: str) -> int | None:
        failed = self.history.failed_event
        value = None if failed is None else self.history.events[column][failed]
        return None if value is None else int(value)

    # -- categories -----------------------------------------------------------------------------

    @cached_property
    def categories(self) -> BlockCategories:
        """Category of each block and its basis, as of the moment."""
        return classify(self.history, self.event)

    @property
    def category_codes(self) -> NDArray[np.int8]:
        """Category of each block: place in CATEGORIES."""
        return self.categories.category

    @cached_property
    def bases(self) -> dict[str, int]:
        """Bytes held at the moment by the basis of their category (BASES); they add up."""
        rows = self.allocated_rows
        sums = np.bincount(
            self.categories.basis[rows],
            weights=self.history.block_lifetimes.size[rows],
            minlength=len(BASES),
        )
        return {name: int(total) for name, total in zip(BASES, sums, strict=True) if total}

    @cached_property
    def allocated_rows(self) -> Ints:
        """Rows of ``block_lifetimes`` that are allocated at the moment."""
        return np.flatnonzero(self.history.block_lifetimes.at(self.event))

    @cached_property
    def by_category(self) -> dict[str, int]:
        """Bytes held at the moment by category, largest first; they add up to ``allocated``."""
        lives, rows = self.history.block_lifetimes, self.allocated_rows
        sums = np.bincount(
            self.category_codes[rows], weights=lives.size[rows], minlength=len(CATEGORIES)
        )
        result = {name: int(sums[n]) for n, name in enumerate(CATEGORIES) if sums[n] > 0}
        return dict(sorted(result.items(), key=lambda item: -item[1]))

    @cached_property
    def lifetimes(self) -> dict[str, int]:
        """Bytes held at the moment by lifetime; they add up."""
        lives, rows = self.history.block_lifetimes, self.allocated_rows
        old, kept = lives.start_event[rows] < 0, lives.end_event[rows] == self.history.count
        size = lives.size[rows]
        return {
            "allocated before the history": int(size[old].sum()),
            "still allocated at its end": int(size[~old & kept].sum()),
            "allocated and freed": int(size[~old & ~kept].sum()),
        }

    @cached_property
    def by_line(self) -> pl.DataFrame:
        """Blocks held at the moment by category and line (HELD_SCHEMA), largest first."""
        return self.holders(self.allocated_rows)

    @cached_property
    def by_line_at_end(self) -> pl.DataFrame:
        """Blocks held when the snapshot was taken, by category and line (HELD_SCHEMA)."""
        return self.holders(
            np.flatnonzero(self.history.block_lifetimes.end_event == self.history.count)
        )

    def held_at_end(self, file: str | None, line: int | None, function: str | None) -> int:
        """Count the bytes of a line that were held when the snapshot was taken."""
        return _of_line(self.by_line_at_end, file, line, function)

    def held_at_moment(self, file: str | None, line: int | None, function: str | None) -> int:
        """Count the bytes of a line that are held at the moment."""
        return _of_line(self.by_line, file, line, function)

    def holders(self, rows: Ints) -> pl.DataFrame:
        """Sum blocks by category and line (HELD_SCHEMA), largest first."""
        lives = self.history.block_lifetimes
        return (
            self._placed(rows)
            .with_columns(size=pl.Series(lives.size[rows]), born=pl.Series(lives.start_event[rows]))
            .group_by("category", "file", "line", "function", "label")
            .agg(
                pl.len().cast(pl.Int64).alias("blocks"),
                pl.col("size").sum().alias("bytes"),
                pl.col("born").min().alias("oldest"),
            )
            .sort(-pl.col("bytes"), "category", "file", "line", "function", "label")
            .select(*HELD_SCHEMA)
            .cast(pl.Schema(HELD_SCHEMA))
        )

    def _placed(self, rows: Ints) -> pl.DataFrame:
        """Return category, line and label of blocks."""
        h, lives = self.history, self.history.block_lifetimes
        origins = [h.origins[stack] for stack in lives.stack[rows].tolist()]
        return pl.DataFrame(
            {
                "category": [CATEGORIES[n] for n in self.category_codes[rows]],
                "file": [o.file for o in origins],
                "line": [o.line for o in origins],
                "function": [o.function for o in origins],
                "label": self._labels(rows),
            },
            schema={
                "category": pl.String,
                "file": pl.String,
                "line": pl.Int64,
                "function": pl.String,
                "label": pl.String,
            },
        )

    def _labels(self, rows: Ints) -> list[str | None]:
        """Return the user's metadata of blocks."""
        h = self.history
        born = h.block_lifetimes.start_event[rows]
        labels = h.events["label"]
        if labels.null_count() == labels.len():
            return [None] * len(rows)
        at = pl.Series(np.maximum(born, 0))
        result = labels.gather(at).to_list()
        return [label if b >= 0 else None for label, b in zip(result, born.tolist(), strict=True)]

    @cached_property
    def trains(self) -> bool | None:
        """Whether the program trains: a backward pass, gradients or an optimizer are in the file.
        Not where nothing of these is, and forward passes let go of most that they make, or a
        KV cache is held. ``None``: unknown."""
        phases = [PHASES.index("backward"), PHASES.index("optimizer")]
        learns = [CATEGORIES.index(name) for name in ("gradients", "optimizer state")]
        if np.isin(self.history.phase, phases).any() or np.isin(self.category_codes, learns).any():
            return True
        lives = self.history.block_lifetimes
        passing = self.category_codes == CATEGORIES.index("activations")
        made = int(lives.size[passing & (lives.start_event >= 0)].sum())
        kept = int(lives.size[passing & lives.at(self.event)].sum())
        forgets = bool(made) and kept <= MAX_KEPT_SHARE * made
        return False if forgets or "KV cache" in self.by_category else None

    # -- over the steps -------------------------------------------------------------------------

    @cached_property
    def whole_steps(self) -> Ints:
        """Events at which steps begin, and the last one ends."""
        return self.history.steps[1]

    @cached_property
    def step_source(self) -> str:
        """Source of the steps; empty: steps are unknown."""
        return self.history.steps[0]

    @cached_property
    def churn_bytes(self) -> float | None:
        """Bytes allocated per step (median of whole steps); ``None``: no steps."""
        marks = self.whole_steps
        if len(marks) < 3:
            return None
        return float(np.median([self._allocated_in(a, b) for a, b in _pairs(marks)[1:]]))

    def _allocated_in(self, begin: int, end: int) -> int:
        h = self.history
        size = h.events["size"].fill_null(0).to_numpy()
        return int(size[begin:end][h.is_action["alloc"][begin:end]].sum())

    @cached_property
    def churn(self) -> pl.DataFrame:
        """Blocks allocated and freed again within whole steps, by line (CHURN_SCHEMA), most bytes
        first. Empty: no steps."""
        marks = self.whole_steps
        if len(marks) < 3:
            return pl.DataFrame(schema=CHURN_SCHEMA)
        lives = self.history.block_lifetimes
        begin, end = int(marks[1]), int(marks[-1])
        step_of = np.searchsorted(marks, lives.start_event, side="right")
        inside = (lives.start_event >= begin) & (lives.start_event < end)
        inside &= np.searchsorted(marks, lives.end_event, side="right") == step_of
        rows = np.flatnonzero(inside)
        steps = max(1, len(marks) - 2)
        return (
            self._placed(rows)
            .with_columns(size=pl.Series(lives.size[rows]))
            .group_by("file", "line", "function")
            .agg(
                pl.col("size").mode().max().alias("size_"),
                (pl.len() / steps).alias("times"),
                (pl.col("size").sum() / steps).alias("bytes"),
            )
            .rename({"size_": "size"})
            .sort(-pl.col("bytes"), "file", "line", "function")
            .select(*CHURN_SCHEMA)
            .cast(pl.Schema(CHURN_SCHEMA))
        )

    @cached_property
    def growth(self) -> pl.DataFrame:
        """Lines that leave something behind in nearly every step, which is held to the end
        (GROWTH_SCHEMA), most bytes per step first. Empty: none, or fewer than MIN_STEPS steps."""
        marks = self.whole_steps
        lives = self.history.block_lifetimes
        blank = pl.DataFrame(schema=GROWTH_SCHEMA)
        if len(marks) < MIN_STEPS + 2:
            return blank
        # the first step makes what stays, the last two hold what any step holds
        looked = len(marks) - 3
        step_of = np.searchsorted(marks, lives.start_event, side="right") - 1
        left = (lives.end_event == self.history.count) & (step_of >= 1) & (step_of <= looked)
        rows = np.flatnonzero(left)
        if not len(rows):
            return blank
        return (
            self._placed(rows)
            .with_columns(size=pl.Series(lives.size[rows]), step=pl.Series(step_of[rows]))
            .group_by("file", "line", "function", "step")
            .agg(pl.col("size").sum(), pl.col("category").mode().sort().first())
            .group_by("file", "line", "function")
            .agg(
                pl.col("category").mode().sort().first(),
                pl.len().cast(pl.Int64).alias("steps"),
                pl.lit(looked, pl.Int64).alias("of"),
                pl.col("size").sum().alias("bytes"),
                pl.col("size").median().alias("step_bytes"),
            )
            .filter(pl.col("steps") >= MIN_SHARE * looked)
            .sort(-pl.col("step_bytes"), "file", "line", "function")
            .select(*GROWTH_SCHEMA)
            .cast(pl.Schema(GROWTH_SCHEMA))
        )

    # -- over time ------------------------------------------------------------------------------

    def timeline(self, points: int = 600) -> pl.DataFrame:
        """Return the bytes in tensors by category at up to ``points`` events, the moment among
        them: ``event``, ``time_us`` (since the first; null: not recorded), ``reserved`` and one
        column a category that is not empty."""
        h, lives = self.history, self.history.block_lifetimes
        count = h.count
        index = np.unique(
            np.concatenate(
                [
                    np.linspace(-1, count - 1, min(points, count + 1)).astype(np.int64),
                    [self.event, h.peak],
                ]
            )
        )
        columns: dict[str, Any] = {"event": index}
        times = h.events["time_us"]
        if count and not times.is_null().any():
            columns["time_us"] = (times.to_numpy() - int(times[0]))[np.maximum(index, 0)]
        else:
            columns["time_us"] = pl.Series([None] * len(index), dtype=pl.Int64)
        columns["reserved"] = h.reserved[index + 1]
        for number, name in enumerate(CATEGORIES):
            own = self.category_codes == number
            if not own.any():
                continue
            change = np.zeros(count + 2, dtype=np.int64)
            np.add.at(change, lives.start_event[own] + 1, lives.size[own])
            np.add.at(change, np.minimum(lives.end_event[own], count) + 1, -lives.size[own])
            columns[name] = np.cumsum(change)[index + 1]
        return pl.DataFrame(columns)


def _of_line(held: pl.DataFrame, file: str | None, line: int | None, function: str | None) -> int:
    same = [
        pl.col(name).eq_missing(pl.lit(value))
        for name, value in (("file", file), ("line", line), ("function", function))
    ]
    return int(held.filter(*same)["bytes"].sum())


def cached_measurement(measure: Callable[[PeakMemory], T]) -> Callable[[PeakMemory], T]:
    """Cache a measurement of a PeakMemory, for as long as that is kept."""
    made: WeakKeyDictionary[PeakMemory, T] = WeakKeyDictionary()

    @wraps(measure)
    def measured(peak: PeakMemory) -> T:
        if peak not in made:
            made[peak] = measure(peak)
        return made[peak]

    return measured


def _pairs(marks: Ints) -> list[tuple[int, int]]:
    return [(int(a), int(b)) for a, b in pairwise(marks.tolist())]


def peak_memories(snapshot: MemorySnapshot) -> list[PeakMemory]:
    """Measure each device of a snapshot, the one with most in segments first."""
    made = [PeakMemory(snapshot, device) for device in snapshot.devices]
    return sorted(made, key=lambda each: (-each.reserved, each.device))


# -- several snapshots of one rank over a run ------------------------------------------------------

GROWS_SCHEMA: dict[str, Any] = {
    "category": pl.String,
    "file": pl.String,
    "line": pl.Int64,
    "function": pl.String,
    "first": pl.Int64,  # bytes held when the first snapshot was taken
    "last": pl.Int64,
    "rate": pl.Float64,  # bytes per step, or per snapshot
    "blocks": pl.Int64,  # held when the last one was taken
}
MIN_SNAPSHOTS = 3
"""Snapshots from which growth differs from a single change."""
MIN_GROWTH = 0.01
"""Share of the first snapshot's bytes below which growth does not count."""
_STEP = re.compile(r"(?:step|iter(?:ation)?|s)[-_]?(\d+)", re.IGNORECASE)


def order_snapshots(snapshots: Sequence[MemorySnapshot]) -> tuple[MemorySnapshot, ...]:
    """Sort by the time of the last event; where one has none, by numbers in the file names."""
    times = [each.events["time_us"].max() for each in snapshots]
    if snapshots and all(isinstance(time, int) for time in times) and len(set(times)) == len(times):
        order = sorted(range(len(snapshots)), key=lambda n: times[n])  # type: ignore[arg-type,return-value]
    else:
        order = sorted(range(len(snapshots)), key=lambda n: _numbers(snapshots[n].path))
    return tuple(snapshots[n] for n in order) if len(snapshots) > 1 else ()


def _numbers(path: str) -> list[tuple[int, str]]:
    parts = re.split(r"(\d+)", PurePath(path).name)
    return [(int(part), "") if part.isdigit() else (-1, part) for part in parts]


def fullest_devices(snapshots: Sequence[MemorySnapshot]) -> list[PeakMemory]:
    """Return the fullest device of each snapshot."""
    return [peak_memories(each)[0] for each in snapshots]


def growing_lines(peaks: Sequence[PeakMemory]) -> tuple[pl.DataFrame, str]:
    """Find lines that hold more in every snapshot, fastest first: (GROWS_SCHEMA, ``step`` or
    ``snapshot``). Empty: none, or fewer than MIN_SNAPSHOTS."""
    blank = pl.DataFrame(schema=GROWS_SCHEMA)
    if len(peaks) < MIN_SNAPSHOTS:
        return blank, ""
    steps = [_STEP.search(PurePath(peak.snapshot.path).name) for peak in peaks]
    at = [int(step[1]) for step in steps if step is not None]
    by_step = len(at) == len(peaks) and all(b > a for a, b in pairwise(at))
    span = at[-1] - at[0] if by_step else len(peaks) - 1
    key = ["category", "file", "line", "function"]
    tables = [
        peak.by_line_at_end.group_by(key).agg(pl.col("bytes").sum(), pl.col("blocks").sum())
        for peak in peaks
    ]
    joined = tables[-1].rename({"bytes": "last"})
    for number, table in enumerate(tables[:-1]):
        held = table.select(*key, pl.col("bytes").alias(f"held{number}"))
        joined = joined.join(held, on=key, how="left", nulls_equal=True)
    held_in = [pl.col(f"held{n}").fill_null(0) for n in range(len(peaks) - 1)] + [pl.col("last")]
    least = MIN_GROWTH * max(peaks[0].allocated, 1)
    rises = [b > a for a, b in pairwise(held_in)]
    table = (
        joined.filter(pl.all_horizontal(*rises) & (pl.col("last") - held_in[0] >= least))
        .with_columns(first=held_in[0], rate=(pl.col("last") - held_in[0]) / max(1, span))
        .sort(-pl.col("rate"), "file", "line", "function", "category")
        .select(*GROWS_SCHEMA)
        .cast(pl.Schema(GROWS_SCHEMA))
    )
    return table, "step" if by_step else "snapshot"
