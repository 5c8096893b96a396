"""Patterns over name columns: each distinct name is looked at once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import polars as pl


def matches(names: pl.Series, pattern: str) -> pl.Series:
    """Boolean column: the name contains the regular expression (null names: false)."""
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
