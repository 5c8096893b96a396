"""The bar adds up: no cell for what takes no time, none too many."""

from __future__ import annotations

from collections.abc import Callable

from hypothesis import given
from hypothesis import strategies as st

from advisor.report.data import IdleCause, Report
from advisor.report.timebar import MOST_CAUSES, cells, device_segments


@given(st.lists(st.floats(min_value=0, max_value=1), max_size=12), st.integers(1, 200))
def test_cells_never_exceed_the_width_and_follow_the_shares(
    shares: list[float], width: int
) -> None:
    found = cells(shares, width)
    assert sum(found) <= width
    scale = max(1.0, sum(shares))
    for share, size in zip(shares, found, strict=True):
        assert abs(size - share / scale * width) < 1
        assert share > 0 or size == 0


def test_shares_that_add_up_to_the_step_fill_the_bar() -> None:
    assert cells([0.75, 0.05, 0.025, 0.175], 80) == [60, 4, 2, 14]
    assert sum(cells([1 / 3, 1 / 3, 1 / 3], 80)) == 80


def test_segments_add_up_to_the_step(report: Callable[..., Report]) -> None:
    work, idle = device_segments(report())
    assert sum(segment.ns for segment in (*work, *idle)) == 400e6
    assert [segment.label for segment in idle] == ["data loader", "dispatching ops", "unknown"]


def test_many_small_causes_share_a_segment_and_nothing_is_lost(
    report: Callable[..., Report],
) -> None:
    causes = [IdleCause(f"cause_{i}", float(i), i / 100) for i in range(1, 12)]
    _, idle = device_segments(report(idle=causes))
    assert len(idle) == MOST_CAUSES + 1
    assert sum(segment.ns for segment in idle) == sum(range(1, 12))
    assert idle[-1].label == "other causes"
    assert len({segment.glyph for segment in idle}) == len(idle)


def test_causes_too_small_to_see_are_one_segment(report: Callable[..., Report]) -> None:
    causes = [IdleCause("loader", 40.0, 0.1), IdleCause("sync", 1.0, 0.004)]
    _, idle = device_segments(report(idle=[*causes, IdleCause("copy", 0.5, 0.002)]))
    assert [(segment.label, segment.ns) for segment in idle] == [
        ("data loader", 40.0),
        ("other causes", 1.5),
    ]
    _, idle = device_segments(report(idle=causes))
    assert [segment.label for segment in idle] == ["data loader", "host in a sync"]


def test_idle_time_without_causes_is_one_segment(report: Callable[..., Report]) -> None:
    _, idle = device_segments(report(idle=[]))
    assert [(segment.label, segment.ns) for segment in idle] == [("idle", 70e6)]
