"""Replay of a history in a model of PyTorch's caching allocator, with and without expandable
segments: the memory that it would have reserved and could have released. Also free memory that a
request could not use.

The rules are those of ``c10/cuda/CUDACachingAllocator.cpp``: requests are rounded up to 512 bytes;
up to 1 MiB they come from segments of 2 MiB, below 10 MiB from segments of 20 MiB, else from
separate segments of a multiple of 2 MiB. The smallest free block of the pool and stream that is
large enough is taken and split, in the large pool only if more than 1 MiB remains. Free neighbours
are merged. Expandable segments grow by pages, of 2 MiB in the small pool and of 20 MiB in the large
one, and completely free pages can be released."""

from __future__ import annotations

from bisect import bisect_left, insort
from typing import Any, NamedTuple

import numpy as np
import polars as pl

from advisor.core.intervals import Ints
from advisor.measure.memory.memory_history import MemoryHistory
from advisor.measure.memory.peak_memory import PeakMemory, cached_measurement

REQUEST_UNIT, MAX_SMALL, SMALL_SEGMENT = 512, 1 << 20, 2 << 20
LARGE_SEGMENT, _MIN_LARGE, LARGE_UNIT = 20 << 20, 10 << 20, 2 << 20


class AllocatorReplay(NamedTuple):
    """Outcome of the replayed history, bytes."""

    reserved: Ints
    """Bytes in segments before the first event and after each replayed event."""
    releasable: int
    """Bytes in completely free segments (pages of expandable ones) after the last event."""

    @property
    def needed_bytes(self) -> int:
        """Bytes reserved after the last event, minus releasable bytes."""
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
        self.last: _ModelBlock | None = None  # last block of an expandable segment


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
        self._next_address = 1 << 50  # addresses of new segments, above all recorded ones

    def pool(self, size: int, stream: Any, private: Any) -> _Pool:
        key = (size <= MAX_SMALL, stream, private)
        if key not in self._pools:
            self._pools[key] = _Pool(key[0])
        return self._pools[key]

    def allocate(self, size: int, stream: Any, private: Any) -> _ModelBlock:
        """Serve a request, from a new segment if no free block is large enough."""
        size = max(REQUEST_UNIT, -(-size // REQUEST_UNIT) * REQUEST_UNIT)
        pool = self.pool(size, stream, private)
        position = bisect_left(pool.free, (size,))
        if position < len(pool.free):
            block = pool.free.pop(position)[2]
        elif self.expandable:
            block = self._grow(pool, size)
        else:
            segment_size = (
                SMALL_SEGMENT
                if pool.small
                else LARGE_SEGMENT
                if size < _MIN_LARGE
                else -(-size // LARGE_UNIT) * LARGE_UNIT
            )
            block = self.segment(self._next_address, segment_size, pool)
            self._next_address += segment_size + LARGE_UNIT
            pool.free.remove((block.size, block.address, block))
        remaining = block.size - size
        block.free = False
        if remaining >= REQUEST_UNIT if pool.small or self.expandable else remaining > MAX_SMALL:
            self._split(block, size)
        return block

    def segment(self, address: int, size: int, pool: _Pool) -> _ModelBlock:
        """Add a segment and return it as one free block."""
        self.reserved += size
        block = _ModelBlock(address, size, pool, None)
        self._add_free(block)
        return block

    def free(self, block: _ModelBlock) -> None:
        """Free a block and merge it with its free neighbours."""
        for neighbor in (block.before, block.after):
            if neighbor is not None and neighbor.free:
                neighbor.pool.free.remove((neighbor.size, neighbor.address, neighbor))
                block.size += neighbor.size
                block.address = min(block.address, neighbor.address)
                if neighbor is block.before:
                    block.before = neighbor.before
                    if neighbor.before is not None:
                        neighbor.before.after = block
                else:
                    block.after = neighbor.after
                    if neighbor.after is not None:
                        neighbor.after.before = block
                if block.pool.last is neighbor:
                    block.pool.last = block
        self._add_free(block)

    def releasable_bytes(self) -> int:
        """Count the bytes that could be returned to the driver."""
        total = 0
        for pool in self._pools.values():
            page = SMALL_SEGMENT if pool.small else LARGE_SEGMENT
            for size, address, block in pool.free:
                if self.expandable:
                    total += max(0, (address + size) // page - -(-address // page)) * page
                elif block.before is None and block.after is None:
                    total += size
        return total

    def release(self, size: int) -> None:
        """Release a completely free segment of this size, or the largest ones if there is none."""
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
        """Split off a part of a free block that is already in use."""
        block.pool.free.remove((block.size, block.address, block))
        block.free = False
        if address > block.address:
            front = block
            self._split(front, address - block.address)
            assert front.after is not None
            block = front.after
            block.pool.free.remove((block.size, block.address, block))
            block.free = False
            self._add_free(front)
        if block.size > size:
            self._split(block, size)
        return block

    def _grow(self, pool: _Pool, size: int) -> _ModelBlock:
        page = SMALL_SEGMENT if pool.small else LARGE_SEGMENT
        last = pool.last
        free_bytes = last.size if last is not None and last.free else 0
        added = -(-(size - free_bytes) // page) * page
        self.reserved += added
        if last is not None and free_bytes:
            pool.free.remove((last.size, last.address, last))
            last.size += added
            return last
        address = self._next_address if last is None else last.address + last.size
        self._next_address += (1 << 44) if last is None else 0  # room for it to grow
        pool.last = _ModelBlock(address, added, pool, last)
        return pool.last

    def _split(self, block: _ModelBlock, size: int) -> None:
        remainder = _ModelBlock(block.address + size, block.size - size, block.pool, block)
        block.size = size
        if block.pool.last is block:
            block.pool.last = remainder
        self._add_free(remainder)

    def _add_free(self, block: _ModelBlock) -> None:
        block.free = True
        insort(block.pool.free, (block.size, block.address, block), key=_sort_key)


def _sort_key(entry: tuple[int, int, _ModelBlock]) -> tuple[int, int]:
    return entry[:2]


def replay_allocator(
    h: MemoryHistory, *, expandable: bool, until: int | None = None
) -> AllocatorReplay:
    """Replay a device's history in the model, up to and including event ``until``.

    Without expandable segments, the replay begins with the segments and blocks of the recording's
    start, at their addresses. With expandable segments, it begins with the same blocks placed side
    by side, because the gaps before the history are unknown. A failed request counts as served."""
    model = AllocatorModel(expandable=expandable)
    blocks = _place_first_blocks(model, h)
    stop = h.count if until is None else min(h.count, until + 1)
    reserved = np.empty(stop + 1, dtype=np.int64)
    reserved[0] = model.reserved
    action = h.events["action"].cast(pl.String).to_list()[:stop]
    columns = (h.events[name].to_list() for name in ("address", "size", "stream", "pool"))
    free_action = "free_completed" if h.is_action["free_completed"].any() else "free_requested"
    # each event depends on the state after all earlier ones
    for index, (kind, address, size, stream, pool) in enumerate(
        zip(action, *columns, strict=False), start=1
    ):
        if kind == "alloc":
            blocks[address] = model.allocate(size, stream, pool)
        elif kind == free_action:
            block = blocks.pop(address, None)
            if block is not None:
                model.free(block)
        elif kind == "segment_free":
            model.release(size)
        elif kind == "oom" and index == stop:
            model.allocate(size, stream, pool)
        reserved[index] = model.reserved
    return AllocatorReplay(reserved, model.releasable_bytes())


def _place_first_blocks(model: AllocatorModel, h: MemoryHistory) -> dict[int, _ModelBlock]:
    """Place the blocks from before the first event and return them by their recorded address."""
    lifetimes = h.block_lifetimes
    first_rows = np.flatnonzero(lifetimes.start_event < 0)
    first_rows = first_rows[np.argsort(lifetimes.address[first_rows], kind="stable")]
    segments = _find_first_segments(h)
    blocks: dict[int, _ModelBlock] = {}
    starts = [segment[0] for segment in segments]
    last_blocks: dict[int, _ModelBlock] = {}
    if not model.expandable:
        for address, size, stream, private, large in segments:
            pool = model.pool(MAX_SMALL + 1 if large else MAX_SMALL, stream, private)
            last_blocks[address] = model.segment(address, size, pool)
    # the blocks of a segment in order of address, so the last part is still free
    for row in first_rows.tolist():
        address, size = int(lifetimes.address[row]), max(1, int(lifetimes.size[row]))
        segment_index = bisect_left(starts, address + 1) - 1
        if segment_index < 0 or address >= starts[segment_index] + segments[segment_index][1]:
            blocks[address] = model.allocate(size, None, None)
            continue
        start, total, stream, private, large = segments[segment_index]
        if model.expandable:
            blocks[address] = model.allocate(size, stream, private)
            continue
        remainder = last_blocks[start]
        while remainder.after is not None:
            remainder = remainder.after
        size = min(-(-size // REQUEST_UNIT) * REQUEST_UNIT, start + total - address)
        if not remainder.free or address < remainder.address:
            blocks[address] = model.allocate(size, stream, private)
            continue
        blocks[address] = model.split(remainder, address, size)
        last_blocks[start] = blocks[address]
    return blocks


def _find_first_segments(h: MemoryHistory) -> list[tuple[int, int, Any, Any, bool]]:
    """Return address, bytes, stream, private pool and size class of each segment at the start: the
    segments of the snapshot with the history undone."""
    segments = {
        row["address"]: (row["total"], row["stream"], row["pool"], row["large"] is not False)
        for row in h.segments.iter_rows(named=True)
    }
    changes = h.events.filter(
        pl.col("action").cast(pl.String).is_in(["segment_alloc", "segment_free"])
    )
    for row in reversed(changes.to_dicts()):
        if row["action"] == "segment_alloc":
            segments.pop(row["address"], None)
        else:
            segments[row["address"]] = (
                row["size"], row["stream"], row["pool"], row["size"] > SMALL_SEGMENT
            )  # fmt: skip
    return sorted((address, *values) for address, values in segments.items())


SMALL_REQUEST = 1 << 20
"""Maximum request served from the small pool, bytes (``kSmallSize`` of CUDACachingAllocator)."""
ROUNDING_BYTES = 512
"""Unit that requests are rounded up to, bytes (``kMinBlockSize``)."""
MIN_SLACK_SHARE = 0.05
"""Minimum share of reserved memory outside tensors at which packing can help."""
MAX_STATE_DIFFERENCE = 0.05
"""Maximum difference of bytes in tensors, as a share, between a state and the failure it shows."""


class Fragments(NamedTuple):
    """Free blocks of one device's segments, by the reason why they cannot be used. Bytes."""

    free: int
    """Free bytes in all segments."""
    largest: int
    """Largest free block, of any pool and stream."""
    split: int
    """Free bytes in segments that also contain a tensor, so that they cannot be released."""
    free_segments: int
    """Free bytes in empty segments, which are released before a request fails."""
    rounding: int
    """Bytes lost to rounding inside the blocks in use."""
    pending: int
    """Bytes that are freed, but waiting for another stream."""
    returnable: int | None
    """Bytes that ``torch.cuda.empty_cache()`` returns to the driver: segments without tensors that
    belong to no graph. ``None`` if unknown, because expandable segments return pages."""
    table: pl.DataFrame
    """Table by ``pool`` (null for the common one), ``stream``, ``large``, ``expandable``:
    ``segments``, ``reserved``, ``allocated``, ``free``, ``largest`` (bytes); most reserved
    first."""


class Placement(NamedTuple):
    """The failed request compared with the free memory. Bytes."""

    request: int
    """Size of the request as the allocator rounds it."""
    usable: int
    """Free bytes in the request's own pool and stream."""
    largest: int
    """Largest free block in that pool and stream."""
    free_elsewhere: int
    """Free bytes in other pools or of other streams."""
    driver: int | None
    """Free bytes of the driver, or ``None`` if not recorded."""
    scattered: bool
    """Whether enough was free, but not in one piece."""


class Repacking(NamedTuple):
    """Estimated effect of expandable segments at the analysed moment. Bytes."""

    slack: int
    """Reserved bytes outside tensors at that moment."""
    freed: int
    """Bytes that could not be released and that expandable segments would not have reserved."""
    helps: bool
    """Whether the failed request would have been served."""
    assumes: str


@cached_measurement
def measure_repacking(peak: PeakMemory) -> Repacking | None:
    """Replay the history, with and without expandable segments, up to the analysed moment.
    Releasable caches are not fragments. ``None`` without a history, with expandable segments, with
    contradictory figures, or with too little memory outside tensors."""
    h = peak.history
    slack = peak.reserved - peak.allocated
    expandable = bool(h.segments["expandable"].fill_null(False).any())
    is_too_small = slack < MIN_SLACK_SHARE * peak.reserved and h.failed_event is None
    if peak.snapshot.exception is not None or peak.snapshot.source != "allocator":
        return None
    if (
        h.is_too_short
        or h.segments.is_empty()
        or expandable
        or peak.is_contradictory
        or is_too_small
    ):
        return None
    fixed = replay_allocator(h, expandable=False, until=peak.event)
    grown = replay_allocator(h, expandable=True, until=peak.event)
    helps = False
    if h.failed_event is not None and peak.request is not None:
        available = peak.reserved + (peak.device_free or 0)
        helps = grown.needed_bytes <= available < fixed.needed_bytes
    assumes = "the same requests, replayed in a model of the allocator"
    if h.began_before:
        assumes += "; blocks from before the history are placed side by side"
    freed = max(0, min(slack, fixed.needed_bytes - grown.needed_bytes))
    return Repacking(slack, freed, helps, assumes)


@cached_measurement
def measure_repacking_at_end(peak: PeakMemory) -> Repacking | None:
    """Replay the history to its end: free memory in segments with tensors when the snapshot was
    taken that expandable segments could have released. ``None`` as in :func:`measure_repacking`, or
    if steps recur, since the next one fills the same pieces."""
    h, free = peak.history, measure_fragments(peak)
    expandable = bool(h.segments["expandable"].fill_null(False).any())
    if free is None or h.is_too_short or expandable or peak.is_contradictory or peak.step_source:
        return None
    if h.failed_event is not None or free.split < MIN_SLACK_SHARE * int(h.reserved[-1]):
        return None
    fixed, grown = (
        replay_allocator(h, expandable=is_expandable).needed_bytes
        for is_expandable in (False, True)
    )
    assumes = "the same requests, replayed in a model of the allocator"
    if h.began_before:
        assumes += "; blocks from before the history are placed side by side"
    return Repacking(free.split, max(0, min(free.split, fixed - grown)), False, assumes)


def measure_fragments(peak: PeakMemory) -> Fragments | None:
    """Measure free blocks when the snapshot was taken, or return ``None`` without segments."""
    h = peak.history
    is_allocator = peak.snapshot.exception is None and peak.snapshot.source == "allocator"
    if h.segments.is_empty() or not is_allocator:
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
    is_busy = joined["busy"].to_numpy()
    by_pool = (
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
        split=int(free[is_busy].sum()),
        free_segments=int(free[~is_busy].sum()),
        returnable=None
        if joined["expandable"].fill_null(False).any()
        else int(free[~is_busy & joined["pool"].is_null().to_numpy()].sum()),
        rounding=_sum_or_zero(joined["used"]) - _sum_or_zero(joined["asked"]),
        pending=_sum_or_zero(joined["waits"]),
        table=by_pool,
    )


def explain_placement(peak: PeakMemory) -> Placement | None:
    """Explain why the failed request could not be placed. ``None`` if none failed, or the snapshot
    was taken so much later that its state differs."""
    h, fragments = peak.history, measure_fragments(peak)
    if peak.request is None or fragments is None or h.failed_event is None:
        return None
    allocated_now = int(h.allocated[-1])
    if abs(allocated_now - peak.allocated) > MAX_STATE_DIFFERENCE * max(peak.allocated, 1):
        return None
    request = -(-max(peak.request, 1) // ROUNDING_BYTES) * ROUNDING_BYTES
    event = h.events.row(h.failed_event, named=True)
    is_small = request <= SMALL_REQUEST
    is_same_pool = (pl.col("large").is_null() | (pl.col("large") == (not is_small))) & (
        pl.col("stream").eq_missing(pl.lit(event["stream"])) | pl.col("stream").is_null()
    )
    if "pool" in fragments.table.columns:
        is_same_pool &= pl.col("pool").eq_missing(pl.lit(event["pool"], pl.String))
    pool_rows = fragments.table.filter(is_same_pool)
    usable = _sum_or_zero(pool_rows["free"])
    largest = max([0, *pool_rows["largest"].to_list()])
    driver = peak.device_free
    return Placement(
        request=request,
        usable=usable,
        largest=largest,
        free_elsewhere=fragments.free - usable,
        driver=driver,
        scattered=usable >= request > largest,
    )


def _sum_or_zero(values: pl.Series) -> int:
    return int(values.sum() or 0)
