"""Patterns over name columns, applied once to each distinct name."""

import threading
from collections.abc import Callable
from functools import wraps
from typing import Any

import numpy as np
import polars as pl
from numpy.typing import NDArray

Codes = NDArray[np.intp]
WORKERS = r"^enumerate\(Data(Loader|Pipe)\)#_MultiProcessing"
"""PyTorch's range around a call for the next batch if worker processes prepare the batches."""
OPTIMIZER_STEP = r"^Optimizer\.step#"
"""PyTorch's range around an optimizer's step."""
MIN_NAMES_TO_DEDUPLICATE = 5_000
"""Minimum number of names for finding the distinct ones first: for fewer it takes longer."""
MAX_REMEMBERED_NAMES = 4_096


def cache_by_name(
    describe: Callable[[pl.Series], pl.DataFrame],
) -> Callable[[pl.Series], pl.DataFrame]:
    """Cache what a function derives from names, one row per name, for another rank, window or run.
    Compiling dozens of patterns takes longer than applying them to some hundred names. The function
    must handle each name independently."""
    lock = threading.Lock()
    row_of_name: dict[str, int] = {}
    cache: pl.DataFrame | None = None

    @wraps(describe)
    def look_up(names: pl.Series) -> pl.DataFrame:
        nonlocal cache
        requested = names.to_list()
        distinct = list(dict.fromkeys(requested))
        if len(distinct) > MAX_REMEMBERED_NAMES:
            return describe(names)
        with lock:
            new = [name for name in distinct if name not in row_of_name]
            if cache is None or len(row_of_name) + len(new) > MAX_REMEMBERED_NAMES:
                cache, new = describe(pl.Series(distinct, dtype=pl.String)), distinct
                row_of_name.clear()
            elif new:
                cache = pl.concat([cache, describe(pl.Series(new, dtype=pl.String))])
            row_of_name.update(zip(new, range(len(row_of_name), cache.height), strict=True))
            return cache[[row_of_name[name] for name in requested]]

    return look_up


def name_matches(names: pl.Series, pattern: str) -> pl.Series:
    """Return whether each name contains the regular expression (null names: false)."""
    if len(names) < MIN_NAMES_TO_DEDUPLICATE:
        # one query, because on a small trace the queries take the time, not the rows
        result = pl.col(names.name).cast(pl.String).str.contains(pattern).fill_null(False)
        return names.to_frame().select(matches=result).to_series()
    texts, code, codes = _split_codes(names)
    table = np.zeros(int(codes.max(initial=0)) + 1, dtype=bool)
    table[code] = texts.str.contains(pattern).to_numpy()
    return pl.Series("matches", table[codes])


def map_names(names: pl.Series, function: Callable[[str], Any], dtype: Any) -> pl.Series:
    """Apply a function to names, computed once for each distinct name (null stays null)."""
    texts, name_index = distinct_names(names)
    values = pl.Series([*map(function, texts), None], dtype=dtype)
    return values.gather(np.where(name_index < 0, len(texts), name_index))


def distinct_names(names: pl.Series) -> tuple[pl.Series, NDArray[np.intp]]:
    """Return the distinct names of a categorical column as text, and each row's index among them.
    The index is -1 for null, so that it picks a value appended last. (``unique`` takes several
    times as long, and returns only the names.)"""
    texts, code, codes = _split_codes(names)
    table = np.full(int(codes.max(initial=0)) + 1, -1, dtype=np.intp)
    table[code] = np.arange(len(code), dtype=np.intp)
    return texts, table[codes]


def _split_codes(names: pl.Series) -> tuple[pl.Series, Codes, Codes]:
    """Return the distinct names as text, the code of each, and the code of each row. The code of a
    null is larger than all others."""
    physical = names.to_physical()
    if physical.null_count():
        physical = physical.fill_null(int(physical.max() or 0) + 1)  # type: ignore[arg-type]
    codes = physical.to_numpy().astype(np.intp)
    row = np.full(int(codes.max(initial=0)) + 1, -1, dtype=np.intp)
    row[codes] = np.arange(len(codes), dtype=np.intp)
    if names.null_count():
        row[-1] = -1
    code = np.flatnonzero(row >= 0)
    return names.gather(row[code]).cast(pl.String), code, codes
