"""The bar adds up: no cell for what takes no time, none too many."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from advisor import analyze
from advisor.advise.report_charts import MAX_CAUSES, build_step_bar
from advisor.cli.output import _ASCII
from advisor.core import charts
from advisor.core.charts import Segment
from advisor.core.report import Report
from advisor.core.report_time import IdleCause
from advisor.dashboard import theme
from advisor.measure.host.gaps import CAUSES
from advisor.measure.steps.timeline import CLASSES
from advisor.render.figures import share_cells
from advisor.render.formats import REPORTS


def idle_of(report: Report) -> list[Segment]:
    bar = build_step_bar(report)
    assert bar is not None
    return bar.idle


@given(st.lists(st.floats(min_value=0, max_value=1), max_size=12), st.integers(1, 200))
def test_cells_never_exceed_the_width_and_follow_the_shares(
    shares: list[float], width: int
) -> None:
    result = share_cells(shares, width)
    assert sum(result) <= width
    scale = max(1.0, sum(shares))
    for share, size in zip(shares, result, strict=True):
        assert abs(size - share / scale * width) < 1
        assert share > 0 or size == 0


def test_shares_that_add_up_to_the_step_fill_the_bar() -> None:
    assert share_cells([0.75, 0.05, 0.025, 0.175], 80) == [60, 4, 2, 14]
    assert sum(share_cells([1 / 3, 1 / 3, 1 / 3], 80)) == 80


def test_segments_add_up_to_the_step(report: Callable[..., Report]) -> None:
    bar = build_step_bar(report())
    assert bar is not None
    assert sum(segment.ns for segment in bar.segments) == 400e6
    assert [segment.label for segment in bar.idle] == [
        "data loader",
        "CPU operators",
        "unknown",
    ]


def test_small_causes_share_a_segment_without_loss(
    report: Callable[..., Report],
) -> None:
    causes = [IdleCause(f"cause_{i}", float(i), i / 100) for i in range(1, 12)]
    idle = idle_of(report(idle=causes))
    assert len(idle) == MAX_CAUSES + 1
    assert sum(segment.ns for segment in idle) == sum(range(1, 12))
    assert idle[-1].label == "other causes"
    assert len({segment.look.glyph for segment in idle}) == len(idle)


def test_causes_too_small_to_see_are_one_segment(report: Callable[..., Report]) -> None:
    causes = [IdleCause("loader", 40.0, 0.1), IdleCause("sync", 1.0, 0.004)]
    idle = idle_of(report(idle=[*causes, IdleCause("copy", 0.5, 0.002)]))
    assert [(segment.label, segment.ns) for segment in idle] == [
        ("data loader", 40.0),
        ("other causes", 1.5),
    ]
    idle = idle_of(report(idle=causes))
    assert [segment.label for segment in idle] == ["data loader", "host in a sync"]


def test_idle_time_without_causes_is_one_segment(report: Callable[..., Report]) -> None:
    idle = idle_of(report(idle=[]))
    assert [(segment.label, segment.ns) for segment in idle] == [("idle or not recorded", 70e6)]


def test_classes_of_a_bar_have_distinct_glyphs_and_colors() -> None:
    bars = {"work": charts.CLASSES, "idle": charts.CAUSES, "host": charts.HOST}
    for name, looks in bars.items():
        for what in ("glyph", "colour"):
            values = [getattr(look, what) for key, look in looks.items() if key != "idle"]
            # host: what is recorded nowhere and the end of the recording are not in one bar
            assert len(values) - len(set(values)) == (what == "glyph" and name == "host"), (
                name,
                what,
            )
    fallback = [look.glyph.translate(_ASCII) for look in charts.CAUSES.values()]
    assert len(set(fallback)) == len(fallback)
    assert all(glyph.isascii() for glyph in fallback)
    assert set(charts.CAUSES) == set(CAUSES)
    assert set(CLASSES) <= set(charts.HOST)


def test_a_cause_has_one_color_wherever_it_is_shown(report: Callable[..., Report]) -> None:
    one = report(idle=[IdleCause("sync", 3e6, 0.3), IdleCause("loader", 1e6, 0.1)])
    other = report(idle=[IdleCause("loader", 3e6, 0.3), IdleCause("sync", 1e6, 0.1)])
    for each_report in (one, other):
        page = REPORTS.render("html", each_report)
        assert 'class="c-idle-sync"' in page and 'class="c-idle-loader"' in page
        assert f".c-idle-sync {{ fill: {theme.color_of('idle', 'sync')};" in page
        assert theme.color_of("idle", "loader") in each_report._repr_html_()
        looks = {segment.key: segment.look for segment in idle_of(each_report)}
        assert looks["sync"] == charts.CAUSES["sync"]


def test_without_operators_the_bar_is_of_the_programs_ranges() -> None:
    """98% of it would be one grey block: the ranges and the rest add up to the same step."""
    corpus = Path(__file__).parents[1] / "corpus"
    report = analyze(str(corpus / "nsys/209de58_baseline.sqlite"))
    assert report.charts is not None and report.charts.bar is not None
    bar = report.charts.bar.work
    assert [part.label for part in bar[:2]] == ["find_centers", "transformer_forward"]
    assert sum(part.share for part in bar) == pytest.approx(1.0, abs=0.01)
