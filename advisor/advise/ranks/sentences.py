"""A JobReport in sentences, the same for every renderer and the dashboard."""

from __future__ import annotations

from typing import Final

from advisor.core import text as t
from advisor.measure.ranks.job_report import JobFinding, JobReport, Missing, Odd, WhatIf

SURE: Final = 0.99
"""A chance beyond this is told as more than it."""
KINDS: Final = {
    "compute": "slower at the same compute",
    "input": "waits for its input",
    "host": "its host is slow",
    "network": "its network is slow",
    "imbalance": "has more to do",
    "pipeline": "its stage takes longer",
    "memory": "short of memory",
}
LONGEST: Final = 60
"""Characters of the numbers of ranks in a line."""


def scope(report: JobReport) -> list[tuple[str, list[str]]]:
    """What was read: (label, parts)."""
    of = f" of {t.format_count(report.world)}" if report.world > report.read else ""
    ranks = [f"{t.format_count(report.read)}{of} ranks read"]
    if report.hosts:
        ranks.append(t.count_noun(report.hosts, "host"))
    lines = [("job", [t.clean(report.source)]), ("ranks", [*ranks, t.clean(report.device)])]
    step = report.step
    if step is not None:
        middle = f"eight of ten ranks {spread(step.low, step.high)}"
        ends = f"all {spread(step.least, step.most)}"
        lines.append(
            ("step", [f"{t.format_duration(step.median)} on the median rank", middle, ends])
        )
    lines.append(("clocks", [clocks(report)]))
    if report.replay_error is not None:
        lines.append(
            ("replay", [f"misses the measured step by {t.format_share(abs(report.replay_error))}"])
        )
    return lines


def spread(low: float, high: float) -> str:
    """``97 to 104 ms``; one figure where both ends are told alike."""
    return (
        t.format_duration(low)
        if t.format_duration(low) == t.format_duration(high)
        else t.format_range(low, high)
    )


def clocks(report: JobReport) -> str:
    """How far the ranks' times can be compared."""
    if not report.aligned:
        why = t.clean(report.not_aligned)
        return f"not aligned: {why}" if why else "not aligned"
    found = f"{t.format_count(report.aligned)} ranks on one clock"
    return (
        found
        if report.error_ns is None
        else f"{found}, within {t.format_duration(report.error_ns)}"
    )


def ranks(numbers: str, most: int = LONGEST) -> str:
    """Numbers of ranks, not endless."""
    return t.shorten(t.clean(numbers), most)


def odd_name(odd: Odd) -> str:
    """``rank 7``, ``host node-03 (ranks 24-31)``."""
    name = f"{t.clean(odd.what)} {t.clean(odd.name)}"
    return f"{name} (ranks {ranks(odd.ranks, 30)})" if odd.what != "rank" and odd.ranks else name


def odd_kind(odd: Odd) -> str:
    """What is the matter with it."""
    found = KINDS.get(odd.kind, t.clean(odd.kind))
    return f"{found}, another from step to step" if odd.moves else found


def odd_figures(odd: Odd) -> list[str]:
    """What is measured of it."""
    found = []
    if odd.waited_ns is not None:
        found.append(f"the others wait {t.format_duration(odd.waited_ns)} a step")
    if odd.last_share is not None:
        found.append(f"last at {t.format_share(odd.last_share)} of its collectives")
    if odd.gain_ns is not None:
        found.append(f"as the others are, worth {gain(odd)}")
    return [*found, sure(odd.sure)]


def sure(chance: float | None) -> str:
    """How sure it is that it is not chance."""
    if chance is None:
        return "how sure is not measured"
    more = "more than " if chance > SURE else ""
    return f"sure by {more}{t.format_share(min(chance, SURE))}"


def gain(finding: JobFinding | WhatIf | Odd) -> str:
    """``5.1 ms a step, 4% · 4.8 to 5.5 ms``; empty: not priced."""
    if finding.gain_ns is None:
        return ""
    found = f"{t.format_duration(finding.gain_ns)} a step"
    if finding.low_ns is not None and finding.high_ns is not None:
        found += f" ({spread(finding.low_ns, finding.high_ns)})"
    return found


def share(report: JobReport, ns: float | None) -> str:
    """Of the median step; empty: not known."""
    if ns is None or report.step is None or report.step.median <= 0:
        return ""
    return f"{t.format_share(ns / report.step.median)} of the median step"


def finding_parts(report: JobReport, finding: JobFinding) -> list[str]:
    """Worth, where, how sure."""
    parts = [gain(finding) or "not priced", share(report, finding.gain_ns)]
    if finding.ranks:
        parts.append(f"{'rank' if finding.count == 1 else 'ranks'} {ranks(finding.ranks)}")
    if finding.place:
        parts.append(t.clean(finding.place))
    return [part for part in parts if part]


def missing(item: Missing) -> str:
    """``3 ranks (5, 9-10): access denied``."""
    names = f" ({ranks(item.ranks, 40)})" if item.ranks else ""
    return f"{t.count_noun(item.count, 'rank')}{names}: {t.clean(item.why)}"


def missing_count(report: JobReport) -> int:
    """Ranks that could not be read."""
    return sum(item.count for item in report.missing)


def work(report: JobReport) -> str:
    """What reading it took."""
    read = f"{t.format_bytes(report.bytes_read)} read" if report.bytes_read else ""
    took = f"in {report.seconds:,.0f} s" if report.seconds >= 1 else ""
    return " ".join(part for part in (read, took) if part)
