"""A comparison as a line of the ledger: one fix was made, and this is what it brought."""

from __future__ import annotations

from pathlib import Path

from advisor.compare.comparison import Comparison
from advisor.core.run_directory import is_run
from advisor.replay import predictions


def remember(comparison: Comparison, *, unix: int) -> bool:
    """Append it to the folder of the later run. Whether there was something to say: both are runs
    that were recorded, and one priced finding is gone."""
    found = entry(comparison, unix=unix)
    after = Path(comparison.after.path)
    if found is None or not is_run(after) or not is_run(comparison.before.path):
        return False
    file = after / predictions.FILE
    same = (found.rule, found.predicted, found.measured)
    if any(
        (row.rule, row.predicted, row.measured) == same
        for row in predictions.read(file).predictions
    ):
        return False  # compared before
    predictions.append(file, [found])
    return True


def entry(comparison: Comparison, *, unix: int) -> predictions.Prediction | None:
    """``None``: no prediction of a single fix was put to the test."""
    fix = comparison.realised
    step = comparison.before.step_ns
    if len(fix.rules) != 1 or not step:
        return None
    if fix.predicted_ns is None or fix.measured_ns is None:
        return None

    def share(ns: float | None, otherwise: float) -> float:
        return (otherwise if ns is None else ns) / step

    return predictions.Prediction(
        unix=unix,
        source="compare",
        rule=fix.rules[0],
        device=comparison.before.device_name or "",
        predicted=fix.predicted_ns / step,
        low=share(fix.predicted_low_ns, fix.predicted_ns),
        high=share(fix.predicted_high_ns, fix.predicted_ns),
        measured=fix.measured_ns / step,
        measured_low=share(fix.measured_low_ns, fix.measured_ns),
        measured_high=share(fix.measured_high_ns, fix.measured_ns),
    )
