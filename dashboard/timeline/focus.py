"""Findings on the timeline: which slices a finding is about, and where it is worst."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from advisor.core.errors import AdvisorError
from advisor.core.labels import by_name
from advisor.replay.selection import selected_gaps, selected_gpu, selected_host

if TYPE_CHECKING:
    from advisor.core.finding import Finding
    from advisor.core.report import Report
    from advisor.dashboard.timeline.index import Index
    from advisor.measure import Analysis

MOST_PLACES = 20
LABEL = 60
"""Characters of a place's name."""


def findings(report: Report) -> Iterator[tuple[str, Finding]]:
    """Every finding with its key: the rule's id, and ``~2`` after it for a second one."""
    seen: dict[str, int] = {}
    for finding in (*report.findings, *report.risks, *report.notes):
        count = seen[finding.rule] = seen.get(finding.rule, 0) + 1
        yield (finding.rule if count == 1 else f"{finding.rule}~{count}"), finding


def find(report: Report, key: str) -> Finding | None:
    """The finding of a key; ``None``: there is none."""
    return next((finding for own, finding in findings(report) if own == key), None)


def brief(key: str, finding: Finding) -> dict[str, Any]:
    """What the timeline needs to know of a finding."""
    seen = [p for p in finding.where if p.ts_ns is not None][:MOST_PLACES]
    short = by_name((p.kernel or p.op for p in seen), LABEL)
    places = [
        {"ts": p.ts_ns, "dur": p.dur_ns or 0, "label": short.get(p.kernel or p.op or "", "")}
        for p in seen
    ]
    return {
        "key": key,
        "rule": finding.rule,
        "title": finding.title,
        "severity": finding.severity,
        "rank": finding.trace_rank,
        "edits": len(finding.edits),
        "places": places,
    }


def outlined(a: Analysis, index: Index, finding: Finding) -> NDArray[np.bool_]:
    """Slices of the index that the finding's edits would change."""
    gpu = np.zeros(a.trace.gpu.height, dtype=bool)
    cpu = np.zeros(a.trace.cpu.height, dtype=bool)
    gaps = np.zeros(a.gaps.height, dtype=bool)
    for edit in finding.edits:
        try:
            if edit.select.on == "gpu":
                gpu |= selected_gpu(a, edit.select)
            elif edit.select.on == "host":
                cpu |= selected_host(a, edit.select)
            else:
                gaps |= selected_gaps(a, edit.select)
        except AdvisorError:
            continue  # a rule's pattern that is none: nothing to outline
    found = np.zeros(len(index), dtype=bool)
    masks = {"gpu": gpu, "cpu": cpu, "gaps": gaps}
    for lane in index.lanes:
        mask = masks.get(lane.source)
        if mask is not None and mask.any():
            found[lane.lo : lane.hi] = mask[index.row[lane.lo : lane.hi]]
    return found
