"""Figures that plotly would draw nothing of, were they not as it wants them."""

from __future__ import annotations

from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import polars as pl
import pytest

pytest.importorskip("plotly")

from advisor.core.gpus import lookup
from advisor.core.run_directory import RankRecord, StepRow
from advisor.dashboard.grid import Column, duration_column, grid, grid_rows
from advisor.dashboard.pages import live, memory
from advisor.dashboard.plotly_figures import icicle, roofline
from advisor.measure.steps.step_records import StepRecords


def test_ranges_that_overlap_fit_into_what_contains_them_and_keep_their_times() -> None:
    tree = pl.DataFrame(
        {
            "node": [0, 1, 2, 3, 4],
            "parent": [None, 0, 0, 2, 2],
            "name": ["ProfilerStep", "loader", "phase", "aten::mm", "aten::add"],
            "count": [1, 1, 1, 1, 1],
            "ns": [100, 60, 50, 40, 30],
        }
    )
    trace = icicle(tree, "all host time").data[0]
    areas = dict(zip(trace.ids, trace.values, strict=True))
    inside: dict[str, int] = {}
    for node, parent in zip(trace.ids, trace.parents, strict=True):
        inside[parent] = inside.get(parent, 0) + areas[node]
    assert all(areas[node] >= held for node, held in inside.items() if node)
    assert [areas[node] for node in ("1", "3", "4")] == [60, 40, 30]  # none is smaller than it is
    shown = [(text, share) for _, text, share in trace.customdata]
    assert shown[:4] == [("100 ns", "100%"), ("100 ns", "100%"), ("60 ns", "60%"), ("50 ns", "50%")]


def test_a_tree_that_fits_is_drawn_as_it_is() -> None:
    tree = pl.DataFrame(
        {
            "node": [0, 1, 2],
            "parent": [None, 0, None],
            "name": ["a", "b", "c"],
            "count": [1, 1, 1],
            "ns": [70, 50, 30],
        }
    )
    assert list(icicle(tree, "all GPU time").data[0].values) == [100, 70, 50, 30]


def test_memory_that_is_sampled_now_and_then_is_drawn_over_all_steps() -> None:
    sampled = {2: 3 << 30, 9: 4 << 30}
    steps = [
        SimpleNamespace(
            n=n,
            t=n,
            allocated=sampled.get(n),
            reserved=None,
            peak=None,
            rss=n * sampled.get(n, 0) or None,
        )
        for n in range(66)
    ]
    run: Any = SimpleNamespace(recorded=SimpleNamespace(steps=steps, hosts=[]))
    _, device, host = memory._memory_by_step_card(run).children
    drawn = [each.children[0].children[0].figure for each in (device, host)]
    line = drawn[0].data[0]
    assert (line.x, line.y, line.mode) == ((2.0, 9.0), (3.0, 4.0), "lines+markers")
    assert [made.layout.xaxis.range for made in drawn] == [(0, 65), (0, 65)]


def test_steps_that_the_profiler_slowed_are_marked_even_if_each_stands_alone() -> None:
    steps = [
        StepRow(n=n, t=n, dur=(100 + n) * 1_000_000, window=0 if n in (20, 30) else None,
                exporting=n == 25)
        for n in range(60)
    ]  # fmt: skip
    card = live.steps_card(StepRecords(RankRecord(rank=0, steps=steps)))
    drawn = card.children[1].children[0].children[0].figure
    line, *marks = drawn.data
    assert len(line.y) == 60 and None not in line.y
    assert {mark.name: (list(mark.x), list(mark.y)) for mark in marks} == {
        "while profiled": ([20, 30], [120, 130]),
        "while the profiler stops or writes": ([21, 25, 31], [121, 125, 131]),
    }
    assert all(mark.mode == "markers" for mark in marks)
    assert len({mark.marker.symbol for mark in marks}) == len(marks)


def test_a_column_without_any_value_is_named_below_the_grid_and_not_drawn() -> None:
    columns = [Column("name", "Name"), duration_column("a", "Here", 90),
               duration_column("b", "Nowhere", 90)]  # fmt: skip
    values = [{"name": "x", "a": None, "b": None}, {"name": "y", "a": 5.0, "b": None}]
    made = grid("g", columns, grid_rows(columns, values), height=300, label="G")
    shown = made.children[1].children.columnDefs
    assert [column["headerName"] for column in shown] == ["Name", "Here"]
    assert made.children[2].children == "Not measured: Nowhere."


def test_a_memory_chart_begins_where_something_happens() -> None:
    from advisor.dashboard.memory_cards import _active_range

    assert _active_range([0.0, 1.0, 91.0, 95.0, 101.0], peak=3) == [90.5, 101.0]
    assert _active_range([0.0, 1.0, 91.0, 95.0, 101.0], peak=1) is None  # the peak is before that
    assert _active_range([0.0, 30.0, 60.0, 100.0], peak=2) is None


def test_the_labels_of_a_roofline_stand_apart_and_inside() -> None:
    kernels = pl.DataFrame(
        {
            "name": ["a", "b"],
            "family": ["gemm", "copy"],
            "flops_per_s": [4e14, 1e9],
            "bytes_per_s": [1e12, 1e12],
            "dur": [10, 5],
            "roofline": [0.4, 0.3],
        }
    )
    hardware = lookup("NVIDIA H100 80GB HBM3")
    assert hardware is not None
    made = roofline(kernels, hardware, 15)
    memory, *flat = made.layout.annotations
    low, high = made.layout.yaxis.range
    room = (600 - 44 - 48 - 120) / (high - low)  # px a decade at 390 px, six names above
    heights = sorted(each.y for each in flat)
    assert all((b - a) * room >= 14 for a, b in pairwise(heights))
    # below the roof, with room for a line above the axis
    assert memory.yanchor == "top" and (memory.y - low) * room >= 14
