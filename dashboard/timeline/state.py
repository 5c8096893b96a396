"""Timeline of one rank: its index, and a cache of recent results."""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from numpy.typing import NDArray

from advisor.core.labels import distinct_labels
from advisor.dashboard.timeline.index_builder import build_index
from advisor.dashboard.timeline.queries import (
    SearchHits,
    find_affected_slices,
    findings_by_key,
    search,
)
from advisor.measure.ranks.skew import align_ranks

if TYPE_CHECKING:
    from advisor.core.report import Report
    from advisor.dashboard.loaded_runs import LoadedRun
    from advisor.measure import Analysis

MAX_CACHED_RESULTS = 6
"""Number of cached searches and masks. Each takes 1 to 8 bytes per slice."""
FOCUS_FLAG, MATCH_FLAG = 1, 2
LABEL_LENGTH = 60
"""Length limit of a slice's label, characters. Few slices have room for more."""
MAX_CACHED_PAGES = 8


class RankTimeline:
    """Timeline of a rank, with what the endpoints need. Read-only except for its caches."""

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
        # caches per instance, which last as long as the timeline
        self.labels = lru_cache(MAX_CACHED_PAGES)(self._labels)
        self.outline = lru_cache(MAX_CACHED_RESULTS)(self._outline)
        self._cached_search = lru_cache(MAX_CACHED_RESULTS)(lambda query: search(self.index, query))
        self._cached_flags = lru_cache(MAX_CACHED_RESULTS)(self._make_flags)

    def _labels(self, page: int, size: int) -> list[str]:
        """Return the labels of a page of names, as drawn in slices."""
        names = self.index.names[page * size : (page + 1) * size]
        return distinct_labels(names, LABEL_LENGTH, always_tidy=True)

    def search(self, query: str) -> SearchHits:
        """Find the slices whose name contains a text, in any case."""
        return self._cached_search(query.strip().lower())

    def flags(self, focus: str, query: str) -> NDArray[np.uint8] | None:
        """Return a byte per slice: FOCUS_FLAG for a finding's slices, MATCH_FLAG for matches.

        ``focus``: key of the finding. Return ``None`` if no slice has a flag."""
        query = query.strip().lower()
        finding = findings_by_key(self.report).get(focus)
        return self._cached_flags(focus, query) if finding is not None or query else None

    def _make_flags(self, focus: str, query: str) -> NDArray[np.uint8] | None:
        """Compute ``flags``."""
        flags = np.zeros(len(self.index), dtype=np.uint8)
        if focus:
            flags[self.outline(focus)] |= FOCUS_FLAG
        if query:
            flags[self.search(query).position] |= MATCH_FLAG
        return flags if flags.any() else None

    def _outline(self, focus: str) -> NDArray[np.bool_]:
        """Return a mask of a finding's slices; empty for a finding of another rank."""
        finding = findings_by_key(self.report).get(focus)
        if finding is None or finding.trace_rank not in (None, self.rank):
            return np.zeros(len(self.index), dtype=bool)
        return find_affected_slices(self.analysis, self.index, finding)


ON_ONE_CLOCK = "on one clock, by their collectives"
FROM_FIRST_STEP = "each from its first analysed step"
FROM_FIRST_EVENT = "each from its first event"


class TimeOffset(NamedTuple):
    """Offset between two timelines."""

    ns: int
    """Time to add to the first timeline's times to get those of the second, ns."""
    alignment: str
    """Description of how the two are aligned."""


def compared_offset(this: tuple[LoadedRun, int], other: tuple[LoadedRun, int]) -> TimeOffset:
    """Return the offset between two ranks, each given as (run, rank).

    Ranks of one run are aligned by their collectives if possible. Otherwise the starts of the first
    analysed steps are aligned."""
    (run, rank), (other_run, other_rank) = this, other
    if run is other_run and rank != other_rank:
        alignment = run.get_or_compute("alignment", lambda: align_ranks(run.analyses))
        shifts = alignment.shift_ns
        if alignment.error_ns is not None and rank in shifts and other_rank in shifts:
            return TimeOffset(round(shifts[rank] - shifts[other_rank]), ON_ONE_CLOCK)
    first_steps = [_first_step_start(r.analyses[number]) for r, number in (this, other)]
    if None not in first_steps:
        return TimeOffset((first_steps[1] or 0) - (first_steps[0] or 0), FROM_FIRST_STEP)
    return TimeOffset(0, FROM_FIRST_EVENT)


def _first_step_start(a: Analysis) -> int | None:
    """Return the start of the first analysed step, ns, or ``None`` without steps."""
    if a.steps.source == "whole trace" or not len(a.spans):
        return None
    return int(a.spans.start[0])
