"""Names as numbers: each distinct name once, those with most time first."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import polars as pl
from numpy.typing import NDArray

from advisor.core.intervals import Ints


class Names:
    """Collects the names of all tables."""

    def __init__(self, shown: Callable[[str], str] = str) -> None:
        """``shown``: what a name is called where that is not what it is."""
        self._number: dict[str, int] = {}
        self._shown = shown

    def one(self, text: str) -> int:
        """Number of a name."""
        text = self._shown(text)
        return self._number.setdefault(text, len(self._number))

    def column(self, names: pl.Series) -> NDArray[np.uint32]:
        """Numbers of a column of categories or strings; null is the empty name."""
        if names.dtype == pl.String:
            names = names.cast(pl.Categorical)
        unique = names.unique().drop_nulls()
        codes = unique.to_physical().to_numpy().astype(np.int64)
        most = int(codes.max()) + 1 if len(codes) else 0
        table = np.full(most + 1, self.one("") if names.null_count() else 0, dtype=np.uint32)
        # one look at each distinct name
        table[codes] = [self.one(text) for text in unique.cast(pl.String).to_list()]
        found: NDArray[np.uint32] = table[names.to_physical().fill_null(most).to_numpy()]
        return found

    def by_time(
        self, name: NDArray[np.uint32], duration: Ints
    ) -> tuple[NDArray[np.uint32], list[str]]:
        """The numbers renewed so that names with most time come first, and the names."""
        texts = list(self._number)
        total = np.bincount(name, weights=duration, minlength=len(texts))
        order = np.argsort(-total, kind="stable")
        renewed = np.empty(len(texts), dtype=np.uint32)
        renewed[order] = np.arange(len(texts), dtype=np.uint32)
        return renewed[name], [texts[i] for i in order]
