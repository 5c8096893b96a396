"""Contents of a device's memory at one moment, by category and line; growth; churn within steps.

Everything is read from a snapshot (``memory_history.py``). Bytes are the requested bytes, which the
allocator rounds up."""

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

Measured = TypeVar("Measured")
HELD_SCHEMA: dict[str, Any] = {
    "category": pl.String,
    "file": pl.String,
    "line": pl.Int64,
    "function": pl.String,
    "label": pl.String,
    "blocks": pl.Int64,
    "bytes": pl.Int64,
    "oldest": pl.Int64,  # event that made the oldest block; -1 before the history
}
CHURN_SCHEMA: dict[str, Any] = {
    "file": pl.String,
    "line": pl.Int64,
    "function": pl.String,
    "size": pl.Int64,  # the most frequent size there
    "times": pl.Float64,  # per step
    "bytes": pl.Float64,  # per step
}
GROWTH_SCHEMA: dict[str, Any] = {
    "category": pl.String,
    "file": pl.String,
    "line": pl.Int64,
    "function": pl.String,
    "steps": pl.Int64,  # steps with allocations that are still held
    "of": pl.Int64,  # steps considered
    "bytes": pl.Int64,  # still held, of all steps
    "step_bytes": pl.Float64,  # median per step
}
_MIN_STEPS = 6
"""Minimum number of complete steps for measuring growth."""
MAX_KEPT_SHARE = 0.25
"""Maximum share of the activations held at the peak if forward passes keep none for a backward
pass."""
_MIN_STEPS_SHARE = 0.8
"""Minimum share of the steps in which a line left memory behind."""


class PeakMemory:
    """Memory of one device of a snapshot at the analysed moment: when memory ran out, else at the
    peak."""

    def __init__(self, snapshot: MemorySnapshot, device: int) -> None:
        self.snapshot = snapshot
        self.device = device
        self.history = MemoryHistory(snapshot, device)

    # -- the moment -----------------------------------------------------------------------------

    @cached_property
    def event(self) -> int:
        """Event after which memory is analysed; -1 before the first event or without a history."""
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
        """Whether more bytes are in tensors than reserved, so that the file's figures are wrong."""
        return bool(self.history.segments.height) and self.allocated > self.reserved

    @cached_property
    def request(self) -> int | None:
        """Size of the failed request, bytes, or ``None`` if none failed."""
        return self._read_failure("size")

    @cached_property
    def needed_after(self) -> int:
        """Minimum bytes that the step needs beyond the failed request, in proportion to the bytes
        allocated during the life of the last block of the same origin. 0 if unknown or none."""
        h, lives, request = self.history, self.history.block_lifetimes, self.request
        if h.failed_event is None or request is None:
            return 0
        same_origin = lives.stack == h.event_stack[h.failed_event]
        rows = np.flatnonzero(same_origin & (lives.start_event >= 0) & (lives.size > 0))
        if not len(rows):
            return 0
        last = rows[np.argmax(lives.start_event[rows])]
        start, end = int(lives.start_event[last]) + 1, int(lives.end_event[last]) + 1
        allocated = h.allocated[start : max(end, start + 1)]
        additional = int(allocated.max()) - int(allocated[0])
        return round(max(0, additional) / int(lives.size[last]) * request)

    @cached_property
    def device_free(self) -> int | None:
        """Free bytes of the driver at that moment, or ``None`` if not recorded."""
        return self._read_failure("device_free")

    @cached_property
    def failed_at(self) -> AllocationOrigin | None:
        """Origin of the failed request, or ``None`` if none failed."""
        failed = self.history.failed_event
        if failed is None:
            return None
        return self.history.origins[int(self.history.event_stack[failed])]

    @cached_property
    def larger_inputs(self) -> tuple[AllocationOrigin, int, int] | None:
        """Line outside of passes whose largest block never shrank from step to step and at least
        doubled, with its bytes in the first and last step. ``None`` if there is none."""
        lives = self.history.block_lifetimes
        step = np.searchsorted(self.history.steps[1], lives.start_event, side="right")
        by_user = np.array([origin.role == "own" for origin in self.history.origins])[lives.stack]
        rows = np.flatnonzero(by_user & (lives.start_event >= 0))
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
        growing = lines.filter(
            pl.col("steps") >= _MIN_STEPS,
            pl.col("step") == step.max(initial=0),
            pl.col("least") >= 0,
            pl.col("last") >= 2 * pl.col("first"),
        ).sort("last")
        if growing.is_empty():
            return None
        stack, *_, first, last, _ = growing.row(-1)
        return self.history.origins[stack], first, last

    def _read_failure(self, column: str) -> int | None:
        failed = self.history.failed_event
        value = None if failed is None else self.history.events[column][failed]
        return None if value is None else int(value)

    # -- categories -----------------------------------------------------------------------------

    @cached_property
    def categories(self) -> BlockCategories:
        """Category of each block and its basis, at the moment."""
        return classify(self.history, self.event)

    @property
    def category_codes(self) -> NDArray[np.int8]:
        """Category of each block: index in CATEGORIES."""
        return self.categories.category

    @cached_property
    def bases(self) -> dict[str, int]:
        """Bytes held at the moment by the basis of their category (BASES); the sum is
        ``allocated``."""
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
        """Bytes held at the moment by category, largest first, which add up to ``allocated``."""
        lives, rows = self.history.block_lifetimes, self.allocated_rows
        sums = np.bincount(
            self.category_codes[rows], weights=lives.size[rows], minlength=len(CATEGORIES)
        )
        result = {name: int(sums[code]) for code, name in enumerate(CATEGORIES) if sums[code] > 0}
        return dict(sorted(result.items(), key=lambda item: -item[1]))

    @cached_property
    def lifetimes(self) -> dict[str, int]:
        """Bytes held at the moment by lifetime, which add up to ``allocated``."""
        lives, rows = self.history.block_lifetimes, self.allocated_rows
        is_old, is_kept = lives.start_event[rows] < 0, lives.end_event[rows] == self.history.count
        size = lives.size[rows]
        return {
            "allocated before the history": int(size[is_old].sum()),
            "still allocated at its end": int(size[~is_old & is_kept].sum()),
            "allocated and freed": int(size[~is_old & ~is_kept].sum()),
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
        return _sum_line(self.by_line_at_end, file, line, function)

    def held_at_moment(self, file: str | None, line: int | None, function: str | None) -> int:
        """Count the bytes of a line that are held at the moment."""
        return _sum_line(self.by_line, file, line, function)

    def holders(self, rows: Ints) -> pl.DataFrame:
        """Sum blocks by category and line (HELD_SCHEMA), largest first."""
        lives = self.history.block_lifetimes
        return (
            self._locate(rows)
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

    def _locate(self, rows: Ints) -> pl.DataFrame:
        """Return category, line and label of blocks."""
        h, lives = self.history, self.history.block_lifetimes
        origins = [h.origins[stack] for stack in lives.stack[rows].tolist()]
        return pl.DataFrame(
            {
                "category": [CATEGORIES[code] for code in self.category_codes[rows]],
                "file": [origin.file for origin in origins],
                "line": [origin.line for origin in origins],
                "function": [origin.function for origin in origins],
                "label": self._find_labels(rows),
            },
            schema={
                "category": pl.String,
                "file": pl.String,
                "line": pl.Int64,
                "function": pl.String,
                "label": pl.String,
            },
        )

    def _find_labels(self, rows: Ints) -> list[str | None]:
        """Return the user's metadata of blocks."""
        h = self.history
        start = h.block_lifetimes.start_event[rows]
        labels = h.events["label"]
        if labels.null_count() == labels.len():
            return [None] * len(rows)
        events = pl.Series(np.maximum(start, 0))
        result = labels.gather(events).to_list()
        return [
            label if event >= 0 else None
            for label, event in zip(result, start.tolist(), strict=True)
        ]

    @cached_property
    def trains(self) -> bool | None:
        """Whether the program trains: a backward pass, gradients or an optimizer are in the file.
        False if there is none of them, and either forward passes free most of their blocks or a KV
        cache is held. ``None`` if unknown."""
        phases = [PHASES.index("backward"), PHASES.index("optimizer")]
        training_codes = [CATEGORIES.index(name) for name in ("gradients", "optimizer state")]
        if (
            np.isin(self.history.phase, phases).any()
            or np.isin(self.category_codes, training_codes).any()
        ):
            return True
        lives = self.history.block_lifetimes
        is_activation = self.category_codes == CATEGORIES.index("activations")
        made_bytes = int(lives.size[is_activation & (lives.start_event >= 0)].sum())
        kept_bytes = int(lives.size[is_activation & lives.at(self.event)].sum())
        frees_most = bool(made_bytes) and kept_bytes <= MAX_KEPT_SHARE * made_bytes
        return False if frees_most or "KV cache" in self.by_category else None

    # -- over the steps -------------------------------------------------------------------------

    @cached_property
    def whole_steps(self) -> Ints:
        """Events at which steps begin, and at which the last step ends."""
        return self.history.steps[1]

    @cached_property
    def step_source(self) -> str:
        """Source of the steps. Empty if steps are unknown."""
        return self.history.steps[0]

    @cached_property
    def churn_bytes(self) -> float | None:
        """Bytes allocated per step (median of complete steps), or ``None`` without steps."""
        marks = self.whole_steps
        if len(marks) < 3:
            return None
        return float(np.median([self._count_allocated(a, b) for a, b in _list_pairs(marks)[1:]]))

    def _count_allocated(self, start: int, end: int) -> int:
        h = self.history
        size = h.events["size"].fill_null(0).to_numpy()
        return int(size[start:end][h.is_action["alloc"][start:end]].sum())

    @cached_property
    def churn(self) -> pl.DataFrame:
        """Blocks allocated and freed again within complete steps, by line (CHURN_SCHEMA), most
        bytes first. Empty without steps."""
        marks = self.whole_steps
        if len(marks) < 3:
            return pl.DataFrame(schema=CHURN_SCHEMA)
        lives = self.history.block_lifetimes
        start, end = int(marks[1]), int(marks[-1])
        step_of = np.searchsorted(marks, lives.start_event, side="right")
        is_churn = (lives.start_event >= start) & (lives.start_event < end)
        is_churn &= np.searchsorted(marks, lives.end_event, side="right") == step_of
        rows = np.flatnonzero(is_churn)
        steps = max(1, len(marks) - 2)
        return (
            self._locate(rows)
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
        """Lines that leave memory behind in nearly every step, which is held to the end
        (GROWTH_SCHEMA), most bytes per step first. Empty if none, or below _MIN_STEPS steps."""
        marks = self.whole_steps
        lives = self.history.block_lifetimes
        empty = pl.DataFrame(schema=GROWTH_SCHEMA)
        if len(marks) < _MIN_STEPS + 2:
            return empty
        # the first step makes lasting blocks, the last two hold the blocks of any step
        step_count = len(marks) - 3
        step_of = np.searchsorted(marks, lives.start_event, side="right") - 1
        is_left = (lives.end_event == self.history.count) & (step_of >= 1) & (step_of <= step_count)
        rows = np.flatnonzero(is_left)
        if not len(rows):
            return empty
        return (
            self._locate(rows)
            .with_columns(size=pl.Series(lives.size[rows]), step=pl.Series(step_of[rows]))
            .group_by("file", "line", "function", "step")
            .agg(pl.col("size").sum(), pl.col("category").mode().sort().first())
            .group_by("file", "line", "function")
            .agg(
                pl.col("category").mode().sort().first(),
                pl.len().cast(pl.Int64).alias("steps"),
                pl.lit(step_count, pl.Int64).alias("of"),
                pl.col("size").sum().alias("bytes"),
                pl.col("size").median().alias("step_bytes"),
            )
            .filter(pl.col("steps") >= _MIN_STEPS_SHARE * step_count)
            .sort(-pl.col("step_bytes"), "file", "line", "function")
            .select(*GROWTH_SCHEMA)
            .cast(pl.Schema(GROWTH_SCHEMA))
        )

    # -- over time ------------------------------------------------------------------------------

    def timeline(self, points: int = 600) -> pl.DataFrame:
        """Return the bytes in tensors by category at up to ``points`` events, including the moment:
        ``event``, ``time_us`` (since the first; null if not recorded), ``reserved`` and one column
        per non-empty category."""
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
            of_category = self.category_codes == number
            if not of_category.any():
                continue
            change = np.zeros(count + 2, dtype=np.int64)
            np.add.at(change, lives.start_event[of_category] + 1, lives.size[of_category])
            np.add.at(
                change,
                np.minimum(lives.end_event[of_category], count) + 1,
                -lives.size[of_category],
            )
            columns[name] = np.cumsum(change)[index + 1]
        return pl.DataFrame(columns)


def _sum_line(
    holders: pl.DataFrame, file: str | None, line: int | None, function: str | None
) -> int:
    conditions = [
        pl.col(name).eq_missing(pl.lit(value))
        for name, value in (("file", file), ("line", line), ("function", function))
    ]
    return int(holders.filter(*conditions)["bytes"].sum())


def cached_measurement(
    measure: Callable[[PeakMemory], Measured],
) -> Callable[[PeakMemory], Measured]:
    """Cache a measurement of a PeakMemory for the lifetime of the PeakMemory."""
    cache: WeakKeyDictionary[PeakMemory, Measured] = WeakKeyDictionary()

    @wraps(measure)
    def measured(peak: PeakMemory) -> Measured:
        if peak not in cache:
            cache[peak] = measure(peak)
        return cache[peak]

    return measured


def _list_pairs(marks: Ints) -> list[tuple[int, int]]:
    return [(int(a), int(b)) for a, b in pairwise(marks.tolist())]


def peak_memories(snapshot: MemorySnapshot) -> list[PeakMemory]:
    """Measure each device of a snapshot, the one with the most reserved bytes first."""
    peaks = [PeakMemory(snapshot, device) for device in snapshot.devices]
    return sorted(peaks, key=lambda peak: (-peak.reserved, peak.device))


# -- several snapshots of one rank over a run ------------------------------------------------------

GROWS_SCHEMA: dict[str, Any] = {
    "category": pl.String,
    "file": pl.String,
    "line": pl.Int64,
    "function": pl.String,
    "first": pl.Int64,  # bytes held when the first snapshot was taken
    "last": pl.Int64,
    "rate": pl.Float64,  # bytes per step, or per snapshot
    "blocks": pl.Int64,  # blocks held when the last snapshot was taken
}
MIN_SNAPSHOTS = 3
"""Minimum number of snapshots that distinguish growth from a single change."""
MIN_GROWTH_SHARE = 0.01
"""Minimum growth as a share of the first snapshot's bytes."""
_STEP_NUMBER = re.compile(r"(?:step|iter(?:ation)?|s)[-_]?(\d+)", re.IGNORECASE)


def order_snapshots(snapshots: Sequence[MemorySnapshot]) -> tuple[MemorySnapshot, ...]:
    """Sort by the time of the last event, or by numbers in file names if a snapshot has no time."""
    times = [snapshot.events["time_us"].max() for snapshot in snapshots]
    if snapshots and all(isinstance(time, int) for time in times) and len(set(times)) == len(times):
        order = sorted(range(len(snapshots)), key=lambda i: times[i])  # type: ignore[arg-type,return-value]
    else:
        order = sorted(range(len(snapshots)), key=lambda i: _split_numbers(snapshots[i].path))
    return tuple(snapshots[i] for i in order) if len(snapshots) > 1 else ()


def _split_numbers(path: str) -> list[tuple[int, str]]:
    parts = re.split(r"(\d+)", PurePath(path).name)
    return [(int(part), "") if part.isdigit() else (-1, part) for part in parts]


def fullest_devices(snapshots: Sequence[MemorySnapshot]) -> list[PeakMemory]:
    """Return the fullest device of each snapshot."""
    return [peak_memories(snapshot)[0] for snapshot in snapshots]


def growing_lines(peaks: Sequence[PeakMemory]) -> tuple[pl.DataFrame, str]:
    """Find lines that hold more in every snapshot, fastest first: (GROWS_SCHEMA, ``step`` or
    ``snapshot``). Empty if there are none, or fewer than MIN_SNAPSHOTS."""
    empty = pl.DataFrame(schema=GROWS_SCHEMA)
    if len(peaks) < MIN_SNAPSHOTS:
        return empty, ""
    steps = [_STEP_NUMBER.search(PurePath(peak.snapshot.path).name) for peak in peaks]
    numbers = [int(step[1]) for step in steps if step is not None]
    by_step = len(numbers) == len(peaks) and all(b > a for a, b in pairwise(numbers))
    span = numbers[-1] - numbers[0] if by_step else len(peaks) - 1
    key_columns = ["category", "file", "line", "function"]
    tables = [
        peak.by_line_at_end.group_by(key_columns).agg(pl.col("bytes").sum(), pl.col("blocks").sum())
        for peak in peaks
    ]
    joined = tables[-1].rename({"bytes": "last"})
    for number, table in enumerate(tables[:-1]):
        bytes_held = table.select(*key_columns, pl.col("bytes").alias(f"held{number}"))
        joined = joined.join(bytes_held, on=key_columns, how="left", nulls_equal=True)
    held_in = [pl.col(f"held{n}").fill_null(0) for n in range(len(peaks) - 1)] + [pl.col("last")]
    min_bytes = MIN_GROWTH_SHARE * max(peaks[0].allocated, 1)
    rises = [b > a for a, b in pairwise(held_in)]
    table = (
        joined.filter(pl.all_horizontal(*rises) & (pl.col("last") - held_in[0] >= min_bytes))
        .with_columns(first=held_in[0], rate=(pl.col("last") - held_in[0]) / max(1, span))
        .sort(-pl.col("rate"), "file", "line", "function", "category")
        .select(*GROWS_SCHEMA)
        .cast(pl.Schema(GROWS_SCHEMA))
    )
    return table, "step" if by_step else "snapshot"
