"""Free memory of the allocator that a request could not use, and why it could not."""

from __future__ import annotations

from typing import NamedTuple

import polars as pl

from advisor.measure.memory.allocator_replay import replay_allocator
from advisor.measure.memory.post_mortem import PostMortem, measured_once

SMALL_REQUEST = 1 << 20
"""Requests up to this are served from the small pool (``kSmallSize`` of CUDACachingAllocator)."""
ROUNDING_BYTES = 512
"""Requests are rounded up to this (``kMinBlockSize``)."""
MIN_SLACK = 0.05
"""Of what is reserved: with less beside tensors, there is nothing to pack."""
MAX_STATE_DIFFERENCE = 0.05
"""The state is that of the failure where as many bytes are in tensors, up to this share."""


class Fragments(NamedTuple):
    """The free blocks of one device's segments, by what keeps them from being used. Bytes."""

    free: int
    """In all segments."""
    largest: int
    """The largest free block, whatever pool and stream it is of."""
    split: int
    """Free, in segments that also hold a tensor: not to be given back to the driver."""
    whole: int
    """Free, in segments that hold nothing: given back before a request fails."""
    rounding: int
    """Lost to rounding inside the blocks in use."""
    pending: int
    """Freed, and waiting for another stream."""
    table: pl.DataFrame
    """By ``pool`` (null: the common one), ``stream``, ``large``, ``expandable``: ``segments``,
    ``reserved``, ``allocated``, ``free``, ``largest`` (bytes); most reserved first."""


class Placement(NamedTuple):
    """The request that failed against what was free. Bytes."""

    request: int
    """As the allocator rounds it."""
    usable: int
    """Free in the request's own pool and stream."""
    largest: int
    """The largest free block there."""
    elsewhere: int
    """Free in other pools or of other streams."""
    driver: int | None
    """What the driver still had; ``None``: not recorded."""
    scattered: bool
    """There was as much free as was asked for, but in no one piece."""


class Repacking(NamedTuple):
    """What expandable segments would change at the moment that is looked at. Bytes."""

    slack: int
    """Reserved and not in tensors then."""
    freed: int
    """Of what was reserved and could not be given back, what they would not have reserved."""
    helps: bool
    """They would have met the request that failed."""
    assumes: str


@measured_once
def measure_repacking(post: PostMortem) -> Repacking | None:
    """The history replayed in the allocator, with expandable segments and without, up to the
    moment; caches that a request could have back are no fragments. ``None``: no history, segments
    that are expandable, figures that contradict each other, or too little beside tensors."""
    h = post.history
    slack = post.reserved - post.allocated
    expandable = bool(h.segments["expandable"].fill_null(False).any())
    lost = slack < MIN_SLACK * post.reserved and h.failed is None
    if post.snapshot.exception is not None or post.snapshot.source != "allocator":
        return None
    if h.too_short or h.segments.is_empty() or expandable or post.contradicts or lost:
        return None
    fixed = replay_allocator(h, expandable=False, until=post.moment)
    grown = replay_allocator(h, expandable=True, until=post.moment)
    helps = False
    if h.failed is not None and post.request is not None:
        room = post.reserved + (post.device_free or 0)
        helps = grown.needed <= room < fixed.needed
    assumes = "the same requests, replayed in a model of the allocator"
    if h.began_before:
        assumes += "; what was there before the history lies side by side"
    freed = max(0, min(slack, fixed.needed - grown.needed))
    return Repacking(slack, freed, helps, assumes)


def measure_fragments(post: PostMortem) -> Fragments | None:
    """The state that the snapshot was taken of; ``None``: no segments in it."""
    h = post.history
    known = post.snapshot.exception is None and post.snapshot.source == "allocator"
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
            post.snapshot.segments.with_row_index("segment").with_columns(
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
        whole=int(free[~busy].sum()),
        rounding=_total(joined["used"]) - _total(joined["asked"]),
        pending=_total(joined["waits"]),
        table=sums,
    )


def explain_placement(post: PostMortem) -> Placement | None:
    """Why the request that failed could not be placed; ``None``: none failed, or the snapshot was
    taken so much later that its state is another."""
    h, result = post.history, measure_fragments(post)
    if post.request is None or result is None or h.failed is None:
        return None
    now = int(h.allocated[-1])
    if abs(now - post.allocated) > MAX_STATE_DIFFERENCE * max(post.allocated, 1):
        return None
    request = -(-max(post.request, 1) // ROUNDING_BYTES) * ROUNDING_BYTES
    event = h.events.row(h.failed, named=True)
    small = request <= SMALL_REQUEST
    own_part = (pl.col("large").is_null() | (pl.col("large") == (not small))) & (
        pl.col("stream").eq_missing(pl.lit(event["stream"])) | pl.col("stream").is_null()
    )
    if "pool" in result.table.columns:
        own_part &= pl.col("pool").eq_missing(pl.lit(event["pool"], pl.String))
    own = result.table.filter(own_part)
    usable = _total(own["free"])
    largest = max([0, *own["largest"].to_list()])
    driver = post.device_free
    return Placement(
        request=request,
        usable=usable,
        largest=largest,
        elsewhere=result.free - usable,
        driver=driver,
        scattered=usable >= request > largest,
    )


def _total(values: pl.Series) -> int:
    return int(values.sum() or 0)
