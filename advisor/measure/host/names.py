"""Patterns over name columns: each distinct name is looked at once."""

import threading
from collections.abc import Callable
from functools import wraps
from typing import Any

import numpy as np
import polars as pl
from numpy.typing import NDArray

Codes = NDArray[np.intp]
WORKERS = r"^enumerate\(Data(Loader|Pipe)\)#_MultiProcessing"
"""PyTorch's range around a call for the next batch where worker processes prepare them."""
OPTIMIZER_STEP = r"^Optimizer\.step#"
"""PyTorch's range around an optimizer's step."""
MIN_NAMES_TO_DEDUPLICATE = 5_000
"""Names from which the distinct ones are looked up first: for fewer that takes longer."""
MAX_REMEMBERED = 4_096


def cache_by_name(
    describe: Callable[[pl.Series], pl.DataFrame],
) -> Callable[[pl.Series], pl.DataFrame]:
    """Cache what a function derives from names, one row per name, for another rank, window or run.
    Patterns by the dozen take longer to compile than to apply to some hundred names. The function
    must look at each name by itself."""
    lock = threading.Lock()
    place: dict[str, int] = {}
    kept: pl.DataFrame | None = None

    @wraps(describe)
    def look_up(names: pl.Series) -> pl.DataFrame:
        nonlocal kept
        wanted = names.to_list()
        distinct = list(dict.fromkeys(wanted))
        if len(distinct) > MAX_REMEMBERED:
            return describe(names)
        with lock:
            new = [name for name in distinct if name not in place]
            if kept is None or len(place) + len(new) > MAX_REMEMBERED:
                kept, new = describe(pl.Series(distinct, dtype=pl.String)), distinct
                place.clear()
            elif new:
                kept = pl.concat([kept, describe(pl.Series(new, dtype=pl.String))])
            place.update(zip(new, range(len(place), kept.height), strict=True))
            return kept[[place[name] for name in wanted]]

    return look_up


def name_matches(names: pl.Series, pattern: str) -> pl.Series:
    """Return whether each name contains the regular expression (null names: false)."""
    if len(names) < MIN_NAMES_TO_DEDUPLICATE:
        # as one query: on a small trace it is queries, not rows, that take the time
        result = pl.col(names.name).cast(pl.String).str.contains(pattern).fill_null(False)
        return names.to_frame().select(matches=result).to_series()
    texts, code, codes = _by_code(names)
    table = np.zeros(int(codes.max(initial=0)) + 1, dtype=bool)
    table[code] = texts.str.contains(pattern).to_numpy()
    return pl.Series("matches", table[codes])


def map_names(names: pl.Series, function: Callable[[str], Any], dtype: Any) -> pl.Series:
    """Apply a function to names, computed once for each distinct name (null stays null)."""
    texts, which = distinct_names(names)
    values = pl.Series([*map(function, texts), None], dtype=dtype)
    return values.gather(np.where(which < 0, len(texts), which))


def distinct_names(names: pl.Series) -> tuple[pl.Series, NDArray[np.intp]]:
    """Return the distinct names of a categorical column as text, and each row's place among them;
    for null -1, so that it picks a value that stands last. (``unique`` takes several times as long,
    and returns only the names.)"""
    texts, code, codes = _by_code(names)
    table = np.full(int(codes.max(initial=0)) + 1, -1, dtype=np.intp)
    table[code] = np.arange(len(code), dtype=np.intp)
    return texts, table[codes]


def _by_code(names: pl.Series) -> tuple[pl.Series, Codes, Codes]:
    """Return the distinct names as text, the code of each, and the code of each row: a null's is
    larger than all of them."""
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
