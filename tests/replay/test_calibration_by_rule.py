"""Ranges widen with the past errors of a rule; no outcome widens the range it is compared with."""

from __future__ import annotations

import math
from pathlib import Path

import bench_pairs
import msgspec
import pytest

from advisor import analyze
from advisor.advise.rule_loading import load_rules
from advisor.replay import ledger
from advisor.replay.ledger import (
    GainInterval,
    Prediction,
    rule_predictions,
    shipped_experiments,
    shipped_predictions,
    shipped_rule_predictions,
    widened_by_rule,
    without_program,
)
from advisor.testing import TraceBuilder

GAIN, STEP = 10.0, 100.0
NARROW = GainInterval(9.0, 11.0)


def outcome(ratio: float, device: str = "", rule: str = "a-rule", of: str = "") -> Prediction:
    """A promise of 40% of the step, and how much of that came."""
    return Prediction(rule=rule, device=device, program=of, predicted=0.4, measured=0.4 * ratio)


@pytest.fixture
def user_ledger(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A ledger of the user's, without the project's own table."""
    file = tmp_path / "mine.jsonl"
    monkeypatch.setenv(ledger.VARIABLE, str(file))
    monkeypatch.setattr("advisor.replay.ledger.shipped_rule_predictions", tuple)
    return file


def widened_range(device: str = "", before: GainInterval = NARROW) -> GainInterval:
    return widened_by_rule("a-rule", device, GAIN, before, STEP).interval


def test_fewer_than_four_outcomes_change_nothing(user_ledger: Path) -> None:
    ledger.append_to_ledger(user_ledger, [outcome(0.5)] * 3 + [outcome(0.1, rule="other")] * 9)
    assert widened_by_rule("a-rule", "", GAIN, NARROW, STEP) == (NARROW, "")


def test_four_of_five_of_the_past_errors_would_have_been_inside(user_ledger: Path) -> None:
    """Four errors by hand: the one in place ⌈0.8 · 5⌉ = 4 is a factor of two, either way."""
    ledger.append_to_ledger(user_ledger, [outcome(ratio) for ratio in (1.0, 0.5, 1.25, 0.8)])
    result = widened_by_rule("a-rule", "", GAIN, NARROW, STEP)
    assert result.interval == pytest.approx((5.0, 20.0))
    assert result.note == "in 4 measured cases the real gain was 50–125% of the estimate"


def test_nine_outcomes_leave_the_worst_outside(user_ledger: Path) -> None:
    ledger.append_to_ledger(user_ledger, [outcome(0.05), outcome(0.5), *([outcome(1.0)] * 7)])
    assert widened_range() == pytest.approx((5.0, 20.0))


def test_good_outcomes_make_no_range_narrower(user_ledger: Path) -> None:
    ledger.append_to_ledger(user_ledger, [outcome(1.0)] * 20)
    assert widened_range() == NARROW
    assert widened_range(before=GainInterval(2.0, 60.0)) == (2.0, 60.0)


def test_no_learnt_range_ends_beyond_the_step(user_ledger: Path) -> None:
    ledger.append_to_ledger(user_ledger, [outcome(0.05)] * 4)
    assert widened_range() == pytest.approx((0.5, STEP))


def test_outcomes_of_the_same_hardware_go_before_others(user_ledger: Path) -> None:
    ledger.append_to_ledger(user_ledger, [outcome(1.0, "A100")] * 4 + [outcome(0.5, "H100")] * 3)
    assert widened_range("A100") == NARROW
    # too few of the H100 alone: all seven, of which the one in place ⌈0.8 · 8⌉ = 7 is a half
    assert widened_range("H100") == pytest.approx((5.0, 20.0))


def test_zero_prediction_does_not_widen_the_range(user_ledger: Path) -> None:
    ledger.append_to_ledger(
        user_ledger, [Prediction(rule="a-rule", predicted=0.0, measured=0.3)] * 9
    )
    assert widened_range() == NARROW


@pytest.mark.parametrize("content", [b"{", b"\xff" * 100, b"x" * (ledger.MAX_LEDGER_BYTES + 1)])
def test_a_ledger_that_cannot_be_read_is_as_none(user_ledger: Path, content: bytes) -> None:
    user_ledger.write_bytes(content)
    assert rule_predictions() == () and widened_range() == NARROW


def test_predictions_appended_since_are_known(user_ledger: Path) -> None:
    assert widened_range() == NARROW
    ledger.append_to_ledger(user_ledger, [outcome(0.5)] * 4)
    assert widened_range() == pytest.approx((5.0, 20.0))


def test_finding_explains_its_range(user_ledger: Path, tmp_path: Path) -> None:
    b = TraceBuilder()
    for number in range(6):
        with b.step():
            b.loader_wait(10_000 + number, workers=0)
            with b.op("aten::mm", [[512, 512], [512, 512]], "float"):
                b.launch("gemm", 900)
            b.sync()
    path = b.write(tmp_path / "t.json")
    (before,) = [f for f in analyze(path).findings if f.rule == "single-process-loader"]
    ledger.append_to_ledger(user_ledger, [outcome(0.25, rule="single-process-loader")] * 4)
    (after,) = [f for f in analyze(path).findings if f.rule == "single-process-loader"]
    assert before.impact is not None and after.impact is not None
    assert after.impact.gain_ns == before.impact.gain_ns
    assert after.impact.low_ns is not None and before.impact.low_ns is not None
    assert after.impact.low_ns == pytest.approx((after.impact.gain_ns or 0) / 4, rel=0.01)
    assert after.impact.low_ns < before.impact.low_ns
    note = (
        "in 4 measured cases the real gain was 25% of the estimate, and the range allows for that"
    )
    assert note in after.confidence_notes and note not in str(before.confidence_notes)


# -- what is shipped ----------------------------------------------------------------------------


def test_shipped_ledger_names_sources_and_existing_rules() -> None:
    page = (Path(__file__).parents[2] / "docs" / "accuracy.md").read_text()
    rules = {rule.id for rule in load_rules()}
    assert {one.source for one in shipped_rule_predictions()} >= {"pair"}
    for one in shipped_rule_predictions():
        assert one.source in ("pair", "workload") and f"| {one.program}" in page, one
        assert one.rule in rules and 0 < one.predicted < (1 if not one.unit else 1e3)
        assert one.measured_low <= one.measured <= one.measured_high
        assert one.device or one.source == "workload", "empty is for runs without a GPU"


def test_ledger_lines_of_pairs_match_the_script(
    shared_trace: object, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(ledger.VARIABLE, str(tmp_path / "no-predictions-of-a-user.jsonl"))
    traces = Path(shared_trace("pairs/loader_autograd_workers0")).parents[1]  # type: ignore[operator]
    shared_trace("pairs/loader_autograd_workers4")  # type: ignore[operator]
    pair = bench_pairs.PAIRS[1]
    entry = bench_pairs.entry(bench_pairs.row(pair, traces), traces)
    assert entry is not None
    (line,) = [one for one in shipped_predictions() if one.program == pair.title]
    for name in ("predicted", "low", "high", "measured", "measured_low", "measured_high"):
        assert getattr(entry, name) == pytest.approx(getattr(line, name), abs=0.2), (
            name
        )  # ms of 162
    assert (entry.rule, entry.device) == (line.rule, line.device)


def test_the_outcome_of_a_pair_is_used_except_in_its_own_row() -> None:
    titles = [pair.title for pair in bench_pairs.PAIRS]
    assert len(set(titles)) == len(titles)
    named = {one.program for one in shipped_experiments() if one.source == "pair"}
    assert named == {p.title for p in bench_pairs.PAIRS if p.after}
    for title in named:
        with without_program(title):
            assert title not in {
                one.program for one in (*shipped_experiments(), *rule_predictions())
            }
        assert title in {one.program for one in shipped_experiments()}


def test_no_pair_widens_its_own_prediction(
    shared_trace: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However wrong it had been: in the table nothing changes, and what is shown is wider."""
    path = Path(shared_trace("pairs/particle_batch2"))  # type: ignore[operator]
    shared_trace("pairs/particle_batch64")  # type: ignore[operator]
    (pair,) = [p for p in bench_pairs.PAIRS if p.title == "batch of 2: 2 → 64"]
    edits = [bench_pairs.edit(one) for one in pair.edits]
    before = bench_pairs.predict(path, edits, pair.title)
    wrong = [
        msgspec.structs.replace(one, measured=3 * one.predicted)
        if one.program == pair.title
        else one
        for one in shipped_predictions()
    ]
    monkeypatch.setattr(ledger, "shipped_predictions", lambda: tuple(wrong))
    after = bench_pairs.predict(path, edits, pair.title)
    assert after[0] == before[0]
    assert after[1].low < before[1].low


def test_an_error_is_the_same_whichever_way_it_lies() -> None:
    once = Prediction(predicted=1.0, measured=2.0)
    assert once.error == Prediction(predicted=2.0, measured=1.0).error
    assert once.error == pytest.approx(math.log(2))
