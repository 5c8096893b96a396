"""What a saved report tells of step times is less than the steps do, and never more."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from advisor.compare import compare
from advisor.compare.saved import compare_reports
from advisor.compare.statistics import welch
from advisor.core.report import Recorded, Report, Scope
from advisor.testing import TraceBuilder

steps = st.lists(st.integers(1_000, 10**9), min_size=3, max_size=60).map(np.array)


def report(durations: np.ndarray, **changes: object) -> Report:
    """A report of nothing but steps."""
    scope = Scope(
        rank=0,
        step_source="ProfilerStep",
        steps_found=len(durations),
        steps_used=len(durations),
        outliers=[],
        span_ns=int(durations.sum()),
        step_ns=float(durations.mean()),
        step_min_ns=int(durations.min()),
        step_max_ns=int(durations.max()),
        step_median_ns=float(np.median(durations)),
        device=None,
        device_name=None,
        device_known=False,
        devices_seen=0,
    )
    return Report(status="limited", verdict="", inputs=[], scope=scope, **changes)  # type: ignore[arg-type]


@given(steps, steps)
@settings(max_examples=300, deadline=None)
def test_the_interval_is_never_closer_than_the_steps_own(
    before: np.ndarray, after: np.ndarray
) -> None:
    own = welch(before.astype(float), after.astype(float))
    found = compare_reports(report(before), report(after)).steps
    slack = 1e-6 * max(float(before.max()), float(after.max()))
    assert found.low_ns is not None and found.high_ns is not None
    assert found.low_ns <= own.low + slack and found.high_ns >= own.high - slack
    assert found.difference_ns is not None and abs(found.difference_ns - own.amount) <= slack


@given(steps)
@settings(max_examples=50, deadline=None)
def test_steps_that_do_not_differ_show_no_difference(durations: np.ndarray) -> None:
    assume(durations.min() < durations.max())
    assert compare_reports(report(durations), report(durations)).steps.verdict == "no difference"


def test_the_recorders_medians_are_told_without_an_interval() -> None:
    def recorded(median: float) -> Recorded:
        return Recorded(
            steps=100,
            used=90,
            median_ns=median,
            mean_ns=median,
            p99_ns=None,
            profiled_steps=4,
            profiled_median_ns=None,
            observer_effect=None,
            phases=[],
            samples_per_second=None,
            ended=None,
            windows=[],
        )

    durations = np.array([10e6, 11e6, 12e6])
    pair = [report(durations, recorded=recorded(ms * 1e6)) for ms in (8, 9)]
    (told,) = [note for note in compare_reports(*pair).steps.notes if "Unprofiled" in note]
    assert "8 ms before" in told and "9 ms after" in told and "no interval" in told


def test_python_takes_reports_and_traces_together(tmp_path: Path) -> None:
    b = TraceBuilder()
    for _ in range(4):
        with b.step(), b.op("aten::mm"):
            b.launch("gemm", 900)
            b.sync()
    path = b.write(tmp_path / "a.json")
    import advisor

    made = advisor.analyze(path)
    assert "Of the run before" in compare(made, path).limits[0]
    assert "Of both runs" in compare(made, made).limits[0]
