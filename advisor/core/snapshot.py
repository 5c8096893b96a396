"""MemorySnapshot: the state of PyTorch's allocator at one instant and its history, as tables."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

import polars as pl

STATES = ("allocated", "pending", "inactive")
"""States of a block: in a tensor, freed but perhaps in use by another stream, free for requests."""
ACTIONS = tuple(
    """
        alloc free_requested free_completed segment_alloc segment_free segment_map segment_unmap
        snapshot oom other""".split()
)
BlockState = pl.Enum(STATES)
Action = pl.Enum(ACTIONS)

SEGMENT_SCHEMA: dict[str, Any] = {
    "device": pl.Int32,
    "address": pl.Int64,
    "total": pl.Int64,  # bytes taken from the driver; mapped ones of an expandable segment
    "stream": pl.Int64,
    "large": pl.Boolean,  # of the pool of requests above 1 MiB; null: not recorded
    "pool": pl.String,  # id of the private pool that owns it; null: the common one, or not recorded
    "expandable": pl.Boolean,  # null: not recorded
    "stack": pl.Int32,  # of the request that it was taken for; null: none
}
BLOCK_SCHEMA: dict[str, Any] = {
    "segment": pl.Int32,  # row of segments
    "device": pl.Int32,
    "address": pl.Int64,
    "size": pl.Int64,  # bytes of the segment that it takes
    "requested": pl.Int64,  # bytes that were asked for; inactive: 0
    "state": BlockState,
    "stack": pl.Int32,  # row of stacks; null: not recorded
    "label": pl.String,  # user's metadata; null: none
}
"""Columns of blocks, in order of segment and address. The blocks of a segment fill it."""
EVENT_SCHEMA: dict[str, Any] = {
    "device": pl.Int32,
    "action": Action,
    "address": pl.Int64,  # null: out of memory
    "size": pl.Int64,  # bytes that were asked for; of segments: taken or given back
    "stream": pl.Int64,
    "time_us": pl.Int64,  # null: not recorded
    "pool": pl.String,
    "stack": pl.Int32,
    "label": pl.String,
    "device_free": pl.Int64,  # out of memory: what the driver still had
}
"""Columns of the allocator's events, by device and time. A full ring only keeps the last ones."""
ANNOTATION_SCHEMA: dict[str, Any] = {
    "device": pl.Int32,
    "time_us": pl.Int64,
    "name": pl.String,
    "stage": pl.String,  # START or END
}


def typed_table(schema: dict[str, Any], columns: Mapping[str, Sequence[Any]]) -> pl.DataFrame:
    """Return a table of one of these schemas. Missing columns are null."""
    count = max(map(len, columns.values()), default=0)
    return pl.DataFrame(
        {
            name: pl.Series(name, columns.get(name, [None] * count), dtype=kind)
            for name, kind in schema.items()
        }
    )


class SnapshotFrame(NamedTuple):
    """A frame of a stack."""

    file: str
    line: int
    name: str


Stack = tuple[SnapshotFrame, ...]
"""Frames of a stack, innermost first, as PyTorch writes them."""


class OutOfMemoryText(NamedTuple):
    """Data in the text of PyTorch's out-of-memory exception, in bytes, or ``None`` if missing."""

    message: str
    request: int
    capacity: int | None
    free: int | None
    """Free memory of the driver."""
    process: int | None
    """Memory in use by this process, inside and outside PyTorch."""
    allocated: int | None
    """Memory in tensors."""
    reserved: int | None
    """Memory reserved by PyTorch, including tensors."""


@dataclass(frozen=True)
class MemorySnapshot:
    """A snapshot of the caching allocator. Treat the frames as read-only. Missing values are null.

    ``segments`` and ``blocks`` are the state when the snapshot was taken. ``events`` are the last
    ``max_entries`` of its history, if ``torch.cuda.memory._record_memory_history`` was on."""

    path: str
    segments: pl.DataFrame
    blocks: pl.DataFrame
    events: pl.DataFrame
    annotations: pl.DataFrame
    stacks: tuple[Stack, ...]
    settings: dict[str, str] = field(default_factory=dict)
    """Settings of the allocator, as text, if the file has them (PyTorch 2.2 and later)."""
    dropped: dict[str, int] = field(default_factory=dict)
    """Number of entries that were left out, by reason."""
    source: Literal["allocator", "timeline", "trace"] = "allocator"
    """Origin of the tables. Only the allocator's own file has real segments."""
    categories: tuple[str, ...] = ()
    """Category of each stack, if the file has no stacks but gives categories of its blocks."""
    exception: OutOfMemoryText | None = None
    """Text of an exception, if it is the only input. The tables then have one event, block and
    segment."""

    @property
    def devices(self) -> list[int]:
        """Devices with memory or events, ascending."""
        result = {*self.segments["device"].unique(), *self.events["device"].unique()}
        return sorted(int(device) for device in result if device is not None)
