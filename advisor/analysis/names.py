"""Patterns over name columns: each distinct name is looked at once."""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import wraps
from typing import Any

import numpy as np
import polars as pl

FEW = 5_000
"""With fewer names, to find the distinct ones takes longer than to look at all."""
MOST_REMEMBERED = 4_096


def remembered(
    describe: Callable[[pl.Series], pl.DataFrame],
) -> Callable[[pl.Series], pl.DataFrame]:
    """What a function tells of names, one row a name, is kept for when they come again: in another
    rank, window or run. Patterns by the dozen take longer to compile than to apply to some
    hundred names. The function must look at each name by itself."""
    lock = threading.Lock()
    place: dict[str, int] = {}
    kept: pl.DataFrame | None = None

    @wraps(describe)
    def look_up(names: pl.Series) -> pl.DataFrame:
        nonlocal kept
        wanted = names.to_list()
        distinct = list(dict.fromkeys(wanted))
        if len(distinct) > MOST_REMEMBERED:
            return describe(names)
        with lock:
            new = [name for name in distinct if name not in place]
            if kept is None or len(place) + len(new) > MOST_REMEMBERED:
                kept, new = describe(pl.Series(distinct, dtype=pl.String)), distinct
                place.clear()
            elif new:
                kept = pl.concat([kept, describe(pl.Series(new, dtype=pl.String))])
            place.update(zip(new, range(len(place), kept.height), strict=True))
            return kept[[place[name] for name in wanted]]

    return look_up


def matches(names: pl.Series, pattern: str) -> pl.Series:
    """Boolean column: the name contains the regular expression (null names: false)."""
    if len(names) < FEW:
        return names.cast(pl.String).str.contains(pattern).fill_null(False).alias("matches")
    unique = names.unique().drop_nulls().cast(pl.String)
    wanted = unique.filter(unique.str.contains(pattern))
    return names.is_in(wanted.cast(pl.Categorical).implode()).fill_null(False).alias("matches")


def map_names(names: pl.Series, function: Callable[[str], Any], dtype: Any) -> pl.Series:
    """Column of ``function(name)``, computed once for each distinct name (null stays null)."""
    unique = names.unique().drop_nulls()
    if unique.is_empty():
        return pl.Series([None], dtype=dtype).new_from_index(0, len(names))
    values = pl.Series([function(name) for name in unique.cast(pl.String)], dtype=dtype)
    codes = unique.to_physical().to_numpy()
    table = np.full(int(codes.max()) + 1, len(values), dtype=np.int64)
    table[codes] = np.arange(len(values))
    at = names.to_physical()
    where = table[np.minimum(at.fill_null(0).to_numpy(), len(table) - 1)]
    where = np.where(at.is_null().to_numpy(), len(values), where)
    return values.append(pl.Series([None], dtype=dtype)).gather(where)
