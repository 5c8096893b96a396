"""Replay of a history in a model of PyTorch's caching allocator, with and without expandable
segments: memory that it would have reserved and could have given back. Also free memory that a
request could not use.

The rules are those of ``c10/cuda/CUDACachingAllocator.cpp``: requests are rounded up to 512 bytes;
up to 1 MiB they come from segments of 2 MiB, below 10 MiB from segments of 20 MiB, else from
segments of their own, a multiple of 2 MiB; the smallest free block of the pool and stream that is
large enough is taken and split, in the large pool only where more than 1 MiB is left; free
neighbours are merged. Expandable segments grow by pages, of 2 MiB in the small pool and of 20 MiB
in the large one, and whole free pages can be given back."""

from __future__ import annotations

from bisect import bisect_left, insort
from typing import Any, NamedTuple

import numpy as np
import polars as pl

from advisor.core.intervals import Ints
from advisor.measure.memory.memory_history import MemoryHistory
from advisor.measure.memory.peak_memory import PeakMemory, cached_measurement

ROUND, SMALL, SMALL_BUFFER = 512, 1 << 20, 2 << 20
LARGE_BUFFER, MIN_LARGE, ROUND_LARGE = 20 << 20, 10 << 20, 2 << 20


class AllocatorReplay(NamedTuple):
    """Outcome of the replayed history, bytes."""

    reserved: Ints
    """Bytes in segments before the first event and after each that was replayed."""
    releasable: int
    """Bytes in whole free segments (pages of expandable ones) after the last event."""

    @property
    def needed_bytes(self) -> int:
        """Bytes reserved after the last event, without what could be given back."""
        return int(self.reserved[-1]) - self.releasable


class _ModelBlock:
    __slots__ = ("address", "after", "before", "free", "pool", "size")

    def __init__(self, address: int, size: int, pool: _Pool, before: _ModelBlock | None) -> None:
        self.address, self.size, self.pool, self.free = address, size, pool, False
        self.before: _ModelBlock | None = before
        self.after: _ModelBlock | None = None if before is None else before.after
        if self.before is not None:
            self.before.after = self
        if self.after is not None:
            self.after.before = self


class _Pool:
    """Free blocks of one stream, size class and private pool."""

    __slots__ = ("free", "last", "small")

    def __init__(self, small: bool) -> None:
        self.small = small
        self.free: list[tuple[int, int, _ModelBlock]] = []
        self.last: _ModelBlock | None = None  # of an expandable segment


class AllocatorModel:
    """The allocator of one device.

    >>> m = AllocatorModel(expandable=False)
    >>> x = m.allocate(3 << 20, None, None)
    >>> m.reserved >> 20
    20"""

    def __init__(self, *, expandable: bool) -> None:
        self.expandable = expandable
        self.reserved = 0
        self._pools: dict[Any, _Pool] = {}
        self._next = 1 << 50  # addresses of new segments: above any that is recorded

    def pool(self, size: int, stream: Any, private: Any) -> _Pool:
        key = (size <= SMALL, stream, private)
        if key not in self._pools:
            self._pools[key] = _Pool(key[0])
        return self._pools[key]

    def allocate(self, size: int, stream: Any, private: Any) -> _ModelBlock:
        """Serve a request, from a new segment where no free block is large enough."""
        size = max(ROUND, -(-size // ROUND) * ROUND)
        pool = self.pool(size, stream, private)
        place = bisect_left(pool.free, (size,))
        if place < len(pool.free):
            block = pool.free.pop(place)[2]
        elif self.expandable:
            block = self._grow(pool, size)
        else:
            whole = (
                SMALL_BUFFER
                if pool.small
                else LARGE_BUFFER
                if size < MIN_LARGE
                else -(-size // ROUND_LARGE) * ROUND_LARGE
            )
            block = self.segment(self._next, whole, pool)
            self._next += whole + ROUND_LARGE
            pool.free.remove((block.size, block.address, block))
        rest = block.size - size
        block.free = False
        if rest >= ROUND if pool.small or self.expandable else rest > SMALL:
            self._split(block, size)
        return block

    def segment(self, address: int, size: int, pool: _Pool) -> _ModelBlock:
        """Add a segment, and return it as one free block."""
        self.reserved += size
        block = _ModelBlock(address, size, pool, None)
        self._put(block)
        return block

    def free(self, block: _ModelBlock) -> None:
        """Free a block, and merge it with its free neighbours."""
        for other in (block.before, block.after):
            if other is not None and other.free:
                other.pool.free.remove((other.size, other.address, other))
                block.size += other.size
                block.address = min(block.address, other.address)
                if other is block.before:
                    block.before = other.before
                    if other.before is not None:
                        other.before.after = block
                else:
                    block.after = other.after
                    if other.after is not None:
                        other.after.before = block
                if block.pool.last is other:
                    block.pool.last = block
        self._put(block)

    def releasable_bytes(self) -> int:
        """Count the bytes that could be given back to the driver."""
        total = 0
        for pool in self._pools.values():
            page = SMALL_BUFFER if pool.small else LARGE_BUFFER
            for size, address, block in pool.free:
                if self.expandable:
                    total += max(0, (address + size) // page - -(-address // page)) * page
                elif block.before is None and block.after is None:
                    total += size
        return total

    def release(self, size: int) -> None:
        """Give back a whole free segment of this size; if there is none, the largest ones."""
        free = [
            (block.size == size, block.size, block.address, block)
            for pool in self._pools.values()
            for _, _, block in pool.free
            if block.before is None and block.after is None
        ]
        for _, _, _, block in sorted(free, reverse=True):
            if size <= 0 or self.expandable:
                return
            block.pool.free.remove((block.size, block.address, block))
            self.reserved -= block.size
            size -= block.size

    def split(self, block: _ModelBlock, address: int, size: int) -> _ModelBlock:
        """Split a part that is already in use off a free block."""
        block.pool.free.remove((block.size, block.address, block))
        block.free = False
        if address > block.address:
            whole = block
            self._split(whole, address - block.address)
            assert whole.after is not None
            block = whole.after
            block.pool.free.remove((block.size, block.address, block))
            block.free = False
            self._put(whole)
        if block.size > size:
            self._split(block, size)
        return block

    def _grow(self, pool: _Pool, size: int) -> _ModelBlock:
        page = SMALL_BUFFER if pool.small else LARGE_BUFFER
        last = pool.last
        spare = last.size if last is not None and last.free else 0
        mapped = -(-(size - spare) // page) * page
        self.reserved += mapped
        if last is not None and spare:
            pool.free.remove((last.size, last.address, last))
            last.size += mapped
            return last
        address = self._next if last is None else last.address + last.size
        self._next += (1 << 44) if last is None else 0  # room for it to grow
        pool.last = _ModelBlock(address, mapped, pool, last)
        return pool.last

    def _split(self, block: _ModelBlock, size: int) -> None:
        rest = _ModelBlock(block.address + size, block.size - size, block.pool, block)
        block.size = size
        if block.pool.last is block:
            block.pool.last = rest
        self._put(rest)

    def _put(self, block: _ModelBlock) -> None:
        block.free = True
        insort(block.pool.free, (block.size, block.address, block), key=_order)


def _order(entry: tuple[int, int, _ModelBlock]) -> tuple[int, int]:
    return entry[:2]


def replay_allocator(
    h: MemoryHistory, *, expandable: bool, until: int | None = None
) -> AllocatorReplay:
    """Replay a device's history, up to and with event ``until``, in the model.

    Without expandable segments it begins with the segments and blocks that the recording began
    with, at their addresses. Expandable ones begin with the same blocks side by side: what the
    blocks before the history had left between them is not known. A request that failed is taken to
    be met."""
    model = AllocatorModel(expandable=expandable)
    blocks = _begin(model, h)
    stop = h.count if until is None else min(h.count, until + 1)
    reserved = np.empty(stop + 1, dtype=np.int64)
    reserved[0] = model.reserved
    action = h.events["action"].cast(pl.String).to_list()[:stop]
    columns = (h.events[name].to_list() for name in ("address", "size", "stream", "pool"))
    free = "free_completed" if h.is_action["free_completed"].any() else "free_requested"
    # each event depends on what all before it have left
    for index, (what, address, size, stream, pool) in enumerate(
        zip(action, *columns, strict=False), start=1
    ):
        if what == "alloc":
            blocks[address] = model.allocate(size, stream, pool)
        elif what == free:
            block = blocks.pop(address, None)
            if block is not None:
                model.free(block)
        elif what == "segment_free":
            model.release(size)
        elif what == "oom" and index == stop:
            model.allocate(size, stream, pool)
        reserved[index] = model.reserved
    return AllocatorReplay(reserved, model.releasable_bytes())


def _begin(model: AllocatorModel, h: MemoryHistory) -> dict[int, _ModelBlock]:
    """Place the blocks from before the first event, and return them by their recorded address."""
    lives = h.block_lifetimes
    old = np.flatnonzero(lives.start_event < 0)
    old = old[np.argsort(lives.address[old], kind="stable")]
    segments = _first_segments(h)
    blocks: dict[int, _ModelBlock] = {}
    starts = [segment[0] for segment in segments]
    open_: dict[int, _ModelBlock] = {}
    if not model.expandable:
        for address, size, stream, private, large in segments:
            pool = model.pool(SMALL + 1 if large else SMALL, stream, private)
            open_[address] = model.segment(address, size, pool)
    # the blocks of a segment in order of address: the last part is the one that is still free
    for row in old.tolist():
        address, size = int(lives.address[row]), max(1, int(lives.size[row]))
        place = bisect_left(starts, address + 1) - 1
        if place < 0 or address >= starts[place] + segments[place][1]:
            blocks[address] = model.allocate(size, None, None)
            continue
        start, total, stream, private, large = segments[place]
        if model.expandable:
            blocks[address] = model.allocate(size, stream, private)
            continue
        rest = open_[start]
        while rest.after is not None:
            rest = rest.after
        size = min(-(-size // ROUND) * ROUND, start + total - address)
        if not rest.free or address < rest.address:
            blocks[address] = model.allocate(size, stream, private)
            continue
        blocks[address] = model.split(rest, address, size)
        open_[start] = blocks[address]
    return blocks


def _first_segments(h: MemoryHistory) -> list[tuple[int, int, Any, Any, bool]]:
    """Return address, bytes, stream, private pool and size class of each segment at the start:
    those of the snapshot, with the history undone."""
    there = {
        row["address"]: (row["total"], row["stream"], row["pool"], row["large"] is not False)
        for row in h.segments.iter_rows(named=True)
    }
    changes = h.events.filter(
        pl.col("action").cast(pl.String).is_in(["segment_alloc", "segment_free"])
    )
    for row in reversed(changes.to_dicts()):
        if row["action"] == "segment_alloc":
            there.pop(row["address"], None)
        else:
            there[row["address"]] = (
                row["size"], row["stream"], row["pool"], row["size"] > SMALL_BUFFER
            )  # fmt: skip
    return sorted((address, *rest) for address, rest in there.items())


SMALL_REQUEST = 1 << 20
"""Largest request served from the small pool, bytes (``kSmallSize`` of CUDACachingAllocator)."""
ROUNDING_BYTES = 512
"""Unit that requests are rounded up to, bytes (``kMinBlockSize``)."""
MIN_SLACK = 0.05
"""Share of the reserved memory outside tensors below which packing cannot help."""
MAX_STATE_DIFFERENCE = 0.05
"""Difference of bytes in tensors, as a share, up to which a state is that of the failure."""


class Fragments(NamedTuple):
    """Free blocks of one device's segments, by what keeps them from being used. Bytes."""

    free: int
    """Free bytes in all segments."""
    largest: int
    """Largest free block, of any pool and stream."""
    split: int
    """Free bytes in segments that also hold a tensor, so that they cannot be given back."""
    free_segments: int
    """Free bytes in segments that hold nothing: given back before a request fails."""
    rounding: int
    """Bytes lost to rounding inside the blocks in use."""
    pending: int
    """Bytes freed, but waiting for another stream."""
    returnable: int | None
    """Bytes that ``torch.cuda.empty_cache()`` gives back to the driver: segments that hold no
    tensor and are of no graph. ``None``: unknown, as expandable segments give back pages."""
    table: pl.DataFrame
    """Table by ``pool`` (null: common), ``stream``, ``large``, ``expandable``: ``segments``,
    ``reserved``, ``allocated``, ``free``, ``largest`` (bytes); most reserved first."""


class Placement(NamedTuple):
    """The failed request compared with the free memory. Bytes."""

    request: int
    """Size of the request as the allocator rounds it."""
    usable: int
    """Free bytes in the request's own pool and stream."""
    largest: int
    """Largest free block there."""
    free_elsewhere: int
    """Free bytes in other pools or of other streams."""
    driver: int | None
    """Bytes that the driver still had; ``None``: not recorded."""
    scattered: bool
    """Whether enough was free, but in no one piece."""


class Repacking(NamedTuple):
    """Estimated effect of expandable segments at the analysed moment. Bytes."""

    slack: int
    """Reserved bytes outside tensors at that moment."""
    freed: int
    """Bytes that could not be given back and that expandable segments would not have reserved."""
    helps: bool
    """Whether the request that failed would have been met."""
    assumes: str


@cached_measurement
def measure_repacking(peak: PeakMemory) -> Repacking | None:
    """Replay the history, with expandable segments and without, up to the analysed moment. Caches
    that a request could have back are no fragments. ``None``: no history, segments that are
    expandable, figures that contradict each other, or too little beside tensors."""
    h = peak.history
    slack = peak.reserved - peak.allocated
    expandable = bool(h.segments["expandable"].fill_null(False).any())
    lost = slack < MIN_SLACK * peak.reserved and h.failed_event is None
    if peak.snapshot.exception is not None or peak.snapshot.source != "allocator":
        return None
    if h.is_too_short or h.segments.is_empty() or expandable or peak.is_contradictory or lost:
        return None
    fixed = replay_allocator(h, expandable=False, until=peak.event)
    grown = replay_allocator(h, expandable=True, until=peak.event)
    helps = False
    if h.failed_event is not None and peak.request is not None:
        room = peak.reserved + (peak.device_free or 0)
        helps = grown.needed_bytes <= room < fixed.needed_bytes
    assumes = "the same requests, replayed in a model of the allocator"
    if h.began_before:
        assumes += "; what was there before the history lies side by side"
    freed = max(0, min(slack, fixed.needed_bytes - grown.needed_bytes))
    return Repacking(slack, freed, helps, assumes)


@cached_measurement
def measure_repacking_at_end(peak: PeakMemory) -> Repacking | None:
    """Replay the history to its end: memory that is free in segments with tensors when the snapshot
    was taken, and that expandable segments could have given back. ``None``: as above, or steps
    recur, whose next one fills the same pieces."""
    h, pieces = peak.history, measure_fragments(peak)
    expandable = bool(h.segments["expandable"].fill_null(False).any())
    if pieces is None or h.is_too_short or expandable or peak.is_contradictory or peak.step_source:
        return None
    if h.failed_event is not None or pieces.split < MIN_SLACK * int(h.reserved[-1]):
        return None
    fixed, grown = (replay_allocator(h, expandable=each).needed_bytes for each in (False, True))
    assumes = "the same requests, replayed in a model of the allocator"
    if h.began_before:
        assumes += "; what was there before the history lies side by side"
    return Repacking(pieces.split, max(0, min(pieces.split, fixed - grown)), False, assumes)


def measure_fragments(peak: PeakMemory) -> Fragments | None:
    """Measure free blocks when the snapshot was taken; ``None``: it has no segments."""
    h = peak.history
    known = peak.snapshot.exception is None and peak.snapshot.source == "allocator"
    if h.segments.is_empty() or not known:
        return None
    joined = (
        h.blocks.with_columns(
            free=pl.when(pl.col("state") == "inactive").then("size").otherwise(0),
            used=pl.when(pl.col("state") == "allocated").then("size").otherwise(0),
            asked=pl.when(pl.col("state") == "allocated").then("requested").otherwise(0),
            waits=pl.when(pl.col("state") == "pending").then("size").otherwise(0),
        )
        .with_columns(busy=((pl.col("used") + pl.col("waits")) > 0).any().over("segment"))
        .join(
            peak.snapshot.segments.with_row_index("segment").with_columns(
                pl.col("segment").cast(pl.Int32)
            ),
            on="segment",
            how="left",
            suffix="_segment",
        )
    )
    free = joined["free"].to_numpy()
    busy = joined["busy"].to_numpy()
    sums = (
        joined.group_by("pool", "stream", "large", "expandable")
        .agg(
            pl.col("segment").n_unique().cast(pl.Int64).alias("segments"),
            pl.col("size").sum().alias("reserved"),
            pl.col("used").sum().alias("allocated"),
            pl.col("free").sum(),
            pl.col("free").max().alias("largest"),
        )
        .sort(["reserved", "pool", "stream", "large"], descending=[True, False, False, True])
    )
    return Fragments(
        free=int(free.sum()),
        largest=int(free.max(initial=0)),
        split=int(free[busy].sum()),
        free_segments=int(free[~busy].sum()),
        returnable=None
        if joined["expandable"].fill_null(False).any()
        else int(free[~busy & joined["pool"].is_null().to_numpy()].sum()),
        rounding=_total(joined["used"]) - _total(joined["asked"]),
        pending=_total(joined["waits"]),
        table=sums,
    )


def explain_placement(peak: PeakMemory) -> Placement | None:
    """Explain why the failed request could not be placed; ``None``: none failed, or the snapshot
    was taken so much later that its state is another."""
    h, result = peak.history, measure_fragments(peak)
    if peak.request is None or result is None or h.failed_event is None:
        return None
    now = int(h.allocated[-1])
    if abs(now - peak.allocated) > MAX_STATE_DIFFERENCE * max(peak.allocated, 1):
        return None
    request = -(-max(peak.request, 1) // ROUNDING_BYTES) * ROUNDING_BYTES
    event = h.events.row(h.failed_event, named=True)
    small = request <= SMALL_REQUEST
    own_part = (pl.col("large").is_null() | (pl.col("large") == (not small))) & (
        pl.col("stream").eq_missing(pl.lit(event["stream"])) | pl.col("stream").is_null()
    )
    if "pool" in result.table.columns:
        own_part &= pl.col("pool").eq_missing(pl.lit(event["pool"], pl.String))
    own = result.table.filter(own_part)
    usable = _total(own["free"])
    largest = max([0, *own["largest"].to_list()])
    driver = peak.device_free
    return Placement(
        request=request,
        usable=usable,
        largest=largest,
        free_elsewhere=result.free - usable,
        driver=driver,
        scattered=usable >= request > largest,
    )


def _total(values: pl.Series) -> int:
    return int(values.sum() or 0)
