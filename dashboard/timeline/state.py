"""Timeline of one rank: its index, and the results of recent requests."""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from numpy.typing import NDArray

from advisor.core.labels import distinct_labels
from advisor.dashboard.timeline.index_builder import build_index
from advisor.dashboard.timeline.search import SearchHits, affected_slices, keyed_findings, search
from advisor.measure.ranks.skew import align_ranks

if TYPE_CHECKING:
    from advisor.core.report import Report
    from advisor.dashboard.loaded_runs import LoadedRun
    from advisor.measure import Analysis

MAX_RECENT = 6
"""Number of searches and outlines that are remembered: one byte, or less than 8, a slice each."""
FOCUS, FOUND = 1, 2
LABEL = 60
"""Length of a slice's name in the picture, characters; more do not fit into most."""
MAX_PAGES = 8


class RankTimeline:
    """Timeline that the addresses answer from. Read-only but for remembered results."""

    def __init__(
        self,
        analysis: Analysis,
        report: Report,
        rank: int,
        version: int = 0,
        *,
        libraries: bool = True,
    ) -> None:
        self.analysis = analysis
        self.report = report
        self.rank = rank
        self.version = version
        self.libraries = libraries
        self.index = build_index(analysis, libraries=libraries)
        # for each timeline its own: the last ones are remembered as long as it is
        self.labels = lru_cache(MAX_PAGES)(self._labels)
        self.outline = lru_cache(MAX_RECENT)(self._outline)
        self._found = lru_cache(MAX_RECENT)(lambda query: search(self.index, query))
        self._flagged = lru_cache(MAX_RECENT)(self._make_flags)

    def _labels(self, page: int, size: int) -> list[str]:
        """Return labels of one page of the names, as they stand in a slice."""
        names = self.index.names[page * size : (page + 1) * size]
        return distinct_labels(names, LABEL, always_tidy=True)

    def search(self, query: str) -> SearchHits:
        """Find slices whose name contains the text."""
        return self._found(query.strip().lower())

    def flags(self, focus: str, query: str) -> NDArray[np.uint8] | None:
        """Return a byte a slice: FOCUS for those of the finding, FOUND for those of the search;
        ``None``: none of either."""
        query = query.strip().lower()
        finding = keyed_findings(self.report).get(focus)
        return self._flagged(focus, query) if finding is not None or query else None

    def _make_flags(self, focus: str, query: str) -> NDArray[np.uint8] | None:
        flags = np.zeros(len(self.index), dtype=np.uint8)
        if focus:
            flags[self.outline(focus)] |= FOCUS
        if query:
            flags[self.search(query).position] |= FOUND
        return flags if flags.any() else None

    def _outline(self, focus: str) -> NDArray[np.bool_]:
        """Find the slices of a finding of this rank; none for another rank's."""
        finding = keyed_findings(self.report).get(focus)
        if finding is None or finding.trace_rank not in (None, self.rank):
            return np.zeros(len(self.index), dtype=bool)
        return affected_slices(self.analysis, self.index, finding)


ON_ONE_CLOCK = "on one clock, by their collectives"
FROM_FIRST_STEP = "each from its first analysed step"
FROM_FIRST_EVENT = "each from its first event"


class TimeOffset(NamedTuple):
    """Time to add to one timeline to get the same moment of another, ns."""

    ns: int
    alignment: str
    """Text that says how the two are aligned."""


def time_offset(here: tuple[LoadedRun, int], there: tuple[LoadedRun, int]) -> TimeOffset:
    """Return the offset between two ranks, each given with its run.

    Ranks of one run are aligned by their collectives where possible; everything else is put
    together where the first analysed step begins."""
    (run, a), (other_run, b) = here, there
    if run is other_run and a != b:
        alignment = run.cached("alignment", lambda: align_ranks(run.analyses))
        known = alignment.shift_ns
        if alignment.error_ns is not None and a in known and b in known:
            return TimeOffset(round(known[a] - known[b]), ON_ONE_CLOCK)
    first = [_first_step(r.analyses[rank]) for r, rank in (here, there)]
    if None not in first:
        return TimeOffset((first[1] or 0) - (first[0] or 0), FROM_FIRST_STEP)
    return TimeOffset(0, FROM_FIRST_EVENT)


def _first_step(a: Analysis) -> int | None:
    if a.steps.source == "whole trace" or not len(a.spans):
        return None
    return int(a.spans.start[0])
