"""Ranges are as wide as predictions have been wrong."""

from __future__ import annotations

import math

import pytest

from advisor.core.finding import Edit, Select
from advisor.replay.ledger import (
    COVERAGE,
    OF_THE_STEP,
    edit_kind,
    error_bound,
    error_of,
    shipped_experiments,
    shipped_recordings,
    widened_by_kind,
    without_program,
)
from benchmarks import bench_recordings

WORK = Select(on="gpu")


def test_error_bound_is_the_conformal_quantile() -> None:
    """The place by hand: of nine errors the eighth (0.8 x 10), of four the fourth, of one the
    only one."""
    assert error_bound([9, 1, 8, 2, 7, 3, 6, 4, 5]) == 8
    assert error_bound([4, 1, 3, 2]) == 4
    assert error_bound([5]) == 5


def test_each_prediction_lies_inside_the_range_of_the_others() -> None:
    """Each of the known predictions is compared with the range that the others give."""
    known = [p for p in shipped_experiments() if p.kind not in OF_THE_STEP]
    inside = [p.error <= error_bound([q.error for q in known if q is not p]) for p in known]
    assert sum(inside) / len(inside) >= COVERAGE


def test_outcomes_lie_within_the_range_of_other_programs() -> None:
    """Several changes of one program are one program: all of its outcomes are left out."""
    known = [p for p in shipped_experiments() if p.kind not in OF_THE_STEP]
    inside = [
        p.error <= error_of([p.kind], [q for q in known if not p.group or q.group != p.group])
        for p in known
    ]
    assert sum(inside) / len(inside) >= COVERAGE


def test_excluding_a_change_excludes_its_whole_program() -> None:
    with without_program("SAM, bf16"):
        assert not [p for p in shipped_experiments() if p.group == "segment-anything"]
    assert len([p for p in shipped_experiments() if p.group == "segment-anything"]) == 2


def test_every_kind_of_edit_has_errors_to_go_by() -> None:
    for name in ("loader", "waits", "host", "device", "rate", "ranks", "batch"):
        assert 0 < error_of([name], shipped_experiments()) < math.log(2)


@pytest.mark.parametrize(
    ("edit", "expected"),
    [
        (Edit(op="scale", select=WORK, factor=0.5), "device"),
        (Edit(op="drop_launch", select=WORK), "host"),
        (Edit(op="remove", select=Select(on="gap")), "host"),
        (Edit(op="make_async", select=Select(on="host")), "waits"),
        (Edit(op="parallelize", select=Select(on="host"), workers=2), "loader"),
        (Edit(op="resize", select=WORK, factor=2), "batch"),
        (Edit(op="roofline", select=WORK), "rate"),
    ],
)
def test_edit_has_the_kind_of_its_changed_work(edit: Edit, expected: str) -> None:
    assert edit_kind(edit) == expected


@pytest.mark.parametrize("gain", [0.0, 1.0, 13.1, 60.0])
def test_ranges_have_width_and_end_within_the_step(gain: float) -> None:
    edit = Edit(op="scale", select=WORK, factor=0.5)
    low, high = widened_by_kind(gain, gain, gain, [edit], 80.0)
    assert low < gain < high <= 80.0
    assert high - low >= 0.02 * 80.0 * 0.99


def test_growing_batch_is_as_uncertain_as_two_runs() -> None:
    """The pair with 33.6 predicted and 40.3 measured has the largest of four errors; and 1%
    more."""
    edit = Edit(op="resize", select=WORK, factor=32)
    low, high = widened_by_kind(0.0, 0.0, 0.0, [edit], 33.6)
    assert low == pytest.approx(-(40.3 - 33.6 + 0.336), rel=0.01)
    assert high == pytest.approx(7.04, rel=0.01)


def test_a_cpu_programs_own_work_has_the_errors_of_recorded_cpu_programs() -> None:
    edit = Edit(op="scale", select=Select(on="host"), factor=0.5)
    low, high = widened_by_kind(10.0, 10.0, 10.0, [edit], 80.0, on_cpu=True)
    factor = math.exp(error_bound([row.error for row in shipped_recordings()]))
    assert (low, high) == pytest.approx((10.0 / factor, 10.0 * factor))
    loader = Edit(op="parallelize", select=Select(on="host"), workers=2)
    for edits in ([loader], [edit, loader]):
        ranges = [widened_by_kind(10.0, 10.0, 10.0, edits, 80.0, on_cpu=x) for x in (True, False)]
        assert ranges[0] == ranges[1]


def test_recorded_gains_lie_within_the_range_of_the_other_recordings() -> None:
    rows = shipped_recordings()
    inside = []
    for row in rows:
        with without_program(row.program):
            assert row not in shipped_recordings()
            inside.append(row.error <= error_of(["host"], shipped_recordings()))
    assert sum(inside) / len(inside) >= COVERAGE - 1 / len(rows)


@pytest.mark.parametrize("name", ["single_tensor", "static_cache", "last_position"])
def test_lines_of_recordings_match_the_script(name: str) -> None:
    (line,) = [row for row in shipped_recordings() if row.program == name]
    row = bench_recordings.predict(name)
    assert row is not None
    assert (row.predicted, row.measured) == pytest.approx((line.predicted, line.measured), rel=0.1)
