"""Several snapshots of one rank over a run: which lines hold more in each, and how fast."""

from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import pairwise
from pathlib import PurePath
from typing import Any

import polars as pl

from advisor.core.snapshot import MemorySnapshot
from advisor.measure.memory.post_mortem import PostMortem, post_mortems

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
"""From which on growth can be said from a change."""
MIN_SHARE = 0.01
"""Of what the first snapshot held: less growth is none."""
_STEP = re.compile(r"(?:step|iter(?:ation)?|s)[-_]?(\d+)", re.IGNORECASE)


def in_order(snapshots: Sequence[MemorySnapshot]) -> tuple[MemorySnapshot, ...]:
    """By the time of the last event; where one has none, by the numbers in the file names."""
    times = [each.events["time_us"].max() for each in snapshots]
    if snapshots and all(isinstance(time, int) for time in times) and len(set(times)) == len(times):
        order = sorted(range(len(snapshots)), key=lambda n: times[n])  # type: ignore[arg-type,return-value]
    else:
        order = sorted(range(len(snapshots)), key=lambda n: _numbers(snapshots[n].path))
    return tuple(snapshots[n] for n in order) if len(snapshots) > 1 else ()


def _numbers(path: str) -> list[tuple[int, str]]:
    parts = re.split(r"(\d+)", PurePath(path).name)
    return [(int(part), "") if part.isdigit() else (-1, part) for part in parts]


def fullest(snapshots: Sequence[MemorySnapshot]) -> list[PostMortem]:
    """The fullest device of each."""
    return [post_mortems(each)[0] for each in snapshots]


def growing_lines(posts: Sequence[PostMortem]) -> tuple[pl.DataFrame, str]:
    """(GROWS_SCHEMA, ``step`` or ``snapshot``): lines that hold more whenever a snapshot was taken,
    fastest first. Empty: none, or fewer than MIN_SNAPSHOTS."""
    blank = pl.DataFrame(schema=GROWS_SCHEMA)
    if len(posts) < MIN_SNAPSHOTS:
        return blank, ""
    steps = [_STEP.search(PurePath(post.snapshot.path).name) for post in posts]
    at = [int(step[1]) for step in steps if step is not None]
    by_step = len(at) == len(posts) and all(b > a for a, b in pairwise(at))
    span = at[-1] - at[0] if by_step else len(posts) - 1
    key = ["category", "file", "line", "function"]
    tables = [
        post.held_at_end.group_by(key).agg(pl.col("bytes").sum(), pl.col("blocks").sum())
        for post in posts
    ]
    joined = tables[-1].rename({"bytes": "last"})
    for number, table in enumerate(tables[:-1]):
        held = table.select(*key, pl.col("bytes").alias(f"held{number}"))
        joined = joined.join(held, on=key, how="left", nulls_equal=True)
    held_in = [pl.col(f"held{n}").fill_null(0) for n in range(len(posts) - 1)] + [pl.col("last")]
    least = MIN_SHARE * max(posts[0].allocated, 1)
    rises = [b > a for a, b in pairwise(held_in)]
    table = (
        joined.filter(pl.all_horizontal(*rises) & (pl.col("last") - held_in[0] >= least))
        .with_columns(first=held_in[0], rate=(pl.col("last") - held_in[0]) / max(1, span))
        .sort(["rate", "file", "line"], descending=[True, False, False])
        .select(*GROWS_SCHEMA)
        .cast(pl.Schema(GROWS_SCHEMA))
    )
    return table, "step" if by_step else "snapshot"
