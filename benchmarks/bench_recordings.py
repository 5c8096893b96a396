"""Predicted and measured gains of the CPU programs in tests/data/recorded: the replayed gain of the
fix, and the difference of the run's usual steps in the recordings of the slow and the cured
program.

python -m benchmarks.bench_recordings [--calibrate]

The errors show how wide the range of a CPU program's gain has to be. ``--calibrate`` writes their
lines to ``advisor/replay/shipped_ledger.jsonl``.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator

import msgspec

from advisor.advise.engine import Options, analyze
from advisor.replay.ledger import (
    OF_COMPUTATION,
    SHIPPED,
    Prediction,
    edit_kind,
    shipped_predictions,
)
from tests.rules.test_recordings import CASES, RECORDED

MIN_RECORDED_GAIN_SHARE = 0.05
"""Minimum measured gain, as a share of the step: smaller ones are differences of two runs."""


def predict(name: str) -> Prediction | None:
    """Return predicted and measured gain of one pair, ms. ``None`` if the gain is not replayed, or
    the two runs show none."""
    slow, cured = (
        analyze(RECORDED / f"{name}.{kind}", Options(config={})) for kind in ("slow", "cured")
    )
    finding = next((f for f in slow.findings if f.rule == CASES[name]), None)
    if finding is None or slow.step is None or cured.step is None:
        return None
    impact, edits = finding.impact, finding.edits
    if impact is None or impact.kind != "replay" or not impact.gain_ns:
        return None
    measured = slow.step.ns - cured.step.ns
    is_computation = {edit_kind(edit) for edit in edits} <= OF_COMPUTATION
    if not is_computation or measured < MIN_RECORDED_GAIN_SHARE * slow.step.ns:
        return None
    return Prediction(
        source="recording",
        program=name,
        kind="host",
        unit="ms",
        predicted=round(impact.gain_ns / 1e6, 2),
        measured=round(measured / 1e6, 2),
    )


def predict_all() -> Iterator[Prediction]:
    """Yield the predictions of all pairs that have one."""
    for name in CASES:
        if (row := predict(name)) is not None:
            yield row


def main() -> None:
    """See the module's docstring."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--calibrate", action="store_true", help="write shipped_ledger.jsonl")
    arguments = parser.parse_args()
    rows = list(predict_all())
    for row in rows:
        print(f"{row.program:20} {row.predicted:8.2f} {row.measured:8.2f} ms {row.ratio:.0%}")
    if arguments.calibrate:
        others = [row for row in shipped_predictions() if row.source != "recording"]
        SHIPPED.write_bytes(b"".join(msgspec.json.encode(row) + b"\n" for row in [*others, *rows]))


if __name__ == "__main__":
    main()
