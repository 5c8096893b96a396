"""Appended predictions are read, by many at once, and damage costs only what is damaged."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from advisor.core.errors import AdvisorError
from advisor.replay import ledger
from advisor.replay.ledger import Prediction


def make_prediction(measured: float, rule: str = "a-rule") -> Prediction:
    return Prediction(
        rule=rule,
        predicted=0.4,
        low=0.3,
        high=0.5,
        measured=measured,
        measured_low=measured - 0.01,
        measured_high=measured + 0.01,
    )


def test_lines_of_many_writers_stay_whole(tmp_path: Path) -> None:
    file = tmp_path / "deep" / "ledger.jsonl"

    def append_lines() -> None:
        for _ in range(20):
            ledger.append_to_ledger(file, [make_prediction(0.4), make_prediction(0.2)])

    writers = [threading.Thread(target=append_lines) for _ in range(8)]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join()
    assert ledger.read_ledger(file) == (
        ([make_prediction(0.4), make_prediction(0.2)] * 160),
        0,
    )


def test_rule_record_summarizes_its_measured_gains() -> None:
    records_by_rule = ledger.records_by_rule(
        [
            make_prediction(0.4),
            make_prediction(0.32),
            make_prediction(0.6),
            make_prediction(0.1, "other"),
        ]
    )
    one = records_by_rule["a-rule"]
    assert (one.predictions, one.inside) == (3, 2)
    assert str(one) == "in 3 measured cases the real gain was 80–150% of the estimate"
    assert list(records_by_rule) == ["a-rule", "other"]


@pytest.mark.parametrize(
    "line",
    [b"{", b"[]", b'{"schema": "advisor.ledger/2"}', b'{"predicted": 1e999}', b"\xff\xfe"],
)
def test_foreign_ledger_line_is_skipped_and_counted(line: bytes) -> None:
    import msgspec

    good = msgspec.json.encode(make_prediction(0.4))
    assert ledger.decode_ledger(b"\n".join([good, line, good])) == (
        [make_prediction(0.4)] * 2,
        1,
    )


def test_lines_of_earlier_versions_are_read() -> None:
    line = b'{"source":"workload","of":"gc","rule":"r","knob":"w=2","predicted":0.4,"measured":0.2}'
    (row,) = ledger.decode_ledger(line).predictions
    assert (row.program, row.knob, row.ratio) == ("gc", "w=2", 0.5)


def test_missing_gain_counts_as_small_not_as_zero() -> None:
    assert make_prediction(-0.2).ratio == ledger.MIN_RATIO


def test_unwritable_ledger_is_one_line_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(AdvisorError, match="cannot be written"):
        ledger.append_to_ledger(tmp_path / "file" / "ledger.jsonl", [make_prediction(0.4)])
