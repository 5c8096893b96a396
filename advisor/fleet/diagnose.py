"""The summaries of all ranks to what is said of the job."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence

import numpy as np

import advisor
from advisor.fleet.join import Joined, join, waits
from advisor.fleet.odd import find_odd
from advisor.fleet.profile import CLASSES, Profile, profile
from advisor.fleet.report import JobReport, Missing, Row, Spread, numbers
from advisor.fleet.summary import Summary, Unread


def diagnose(
    summaries: Sequence[Summary], unread: Sequence[Unread] = (), *, source: str = ""
) -> JobReport:
    """What many ranks say together. Ranks that say nothing are told as missing.

    Raises AdvisorError: a summary's columns do not belong together.
    """
    ordered = sorted(summaries, key=lambda s: (s.rank, s.path))
    report = JobReport(
        version=advisor.__version__,
        source=source,
        world=max((s.world for s in ordered), default=0),
        read=len(ordered),
        device=_most(s.device for s in ordered),
        hosts=len({s.host for s in ordered if s.host}),
        classes=list(CLASSES),
        bytes_read=sum(s.bytes_read for s in ordered),
        missing=_missing(unread),
    )
    if not ordered:
        report.verdict = "No rank could be read."
        return report
    joined = join(ordered)
    own = profile(ordered)
    report.step = _spread(own)
    report.rows = _rows(ordered, own)
    _clocks(report, joined)
    report.odd = find_odd(ordered, own, joined, waits(joined))
    return report


def _most(names: object) -> str:
    counts = Counter(name for name in names if name)  # type: ignore[attr-defined]
    return str(counts.most_common(1)[0][0]) if counts else ""


def _missing(unread: Sequence[Unread]) -> list[Missing]:
    by_reason: dict[str, list[Unread]] = defaultdict(list)
    for each in unread:
        by_reason[each.why].append(each)
    return [
        Missing(
            ranks=numbers([each.rank for each in those if each.rank >= 0]),
            count=len(those),
            why=why,
            path=those[0].path,
        )
        for why, those in sorted(by_reason.items(), key=lambda item: -len(item[1]))
    ]


def _spread(own: Profile) -> Spread | None:
    known = own.step_ns[own.step_ns > 0]
    if not len(known):
        return None
    least, low, median, high, most = np.quantile(known, [0, 0.1, 0.5, 0.9, 1]).tolist()
    return Spread(least=least, low=low, median=median, high=high, most=most)


def _rows(summaries: Sequence[Summary], own: Profile) -> list[Row]:
    return [
        Row(s.rank, s.host, s.path, s.step_ns, np.nan_to_num(own.values[place]).round().tolist())
        for place, s in enumerate(summaries)
    ]


def _clocks(report: JobReport, joined: Joined) -> None:
    clocks = joined.clocks
    report.aligned = int(np.isfinite(clocks.shift).sum())
    report.error_ns = clocks.error_ns
    report.not_aligned = clocks.reason
