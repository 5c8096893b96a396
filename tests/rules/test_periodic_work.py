"""A finding on periodic work claims what it blames."""

from __future__ import annotations

import pytest

from advisor.core.finding import Finding
from advisor.rules.host.periodic_work import PeriodicWork
from advisor.testing import TraceBuilder


def finding_of_example(name: str) -> Finding:
    example = PeriodicWork.examples()[name]
    assert isinstance(example, TraceBuilder)
    (finding,) = (f for f in PeriodicWork().check(example.analysis()) if isinstance(f, Finding))
    return finding


def test_periodic_gain_is_the_share_of_the_named_code() -> None:
    """60% of the samples that fall in the work are in the named function, the rest elsewhere."""
    full_finding, part_finding = (
        finding_of_example("a loop over time before every 16 updates"),
        finding_of_example("a part of it in other functions"),
    )
    for end in ("gain_ns", "low_ns", "high_ns"):
        ratio = getattr(part_finding.impact, end) / getattr(full_finding.impact, end)
        assert ratio == pytest.approx(0.6, abs=0.05)
    assert (
        "The gain covers only these" in part_finding.summary
        and "The gain covers" not in full_finding.summary
    )
