"""Figures and grids, built without a browser."""

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
from advisor.dashboard.plotly_figures import (
    NO_COMMIT,
    module_tree_figure,
    rank_class_heatmap,
    roofline,
    run_history,
)
from advisor.measure.steps.run_steps import RunSteps


def test_overlapping_ranges_enlarge_their_parent_and_keep_their_times() -> None:
    tree = pl.DataFrame(
        {
            "node": [0, 1, 2, 3, 4],
            "parent": [None, 0, 0, 2, 2],
            "name": ["ProfilerStep", "loader", "phase", "aten::mm", "aten::add"],
            "count": [1, 1, 1, 1, 1],
            "ns": [100, 60, 50, 40, 30],
        }
    )
    trace = module_tree_figure(tree, "all host time").data[0]
    areas = dict(zip(trace.ids, trace.values, strict=True))
    child_sums: dict[str, int] = {}
    for node, parent in zip(trace.ids, trace.parents, strict=True):
        child_sums[parent] = child_sums.get(parent, 0) + areas[node]
    assert all(areas[node] >= child_sum for node, child_sum in child_sums.items() if node)
    assert [areas[node] for node in ("1", "3", "4")] == [
        60,
        40,
        30,
    ]  # no area is smaller than its time
    shown = [(text, share) for _, text, share in trace.customdata]
    assert shown[:4] == [("100 ns", "100%"), ("100 ns", "100%"), ("60 ns", "60%"), ("50 ns", "50%")]


def test_a_tree_without_overlap_is_drawn_unchanged() -> None:
    tree = pl.DataFrame(
        {
            "node": [0, 1, 2],
            "parent": [None, 0, None],
            "name": ["a", "b", "c"],
            "count": [1, 1, 1],
            "ns": [70, 50, 30],
        }
    )
    assert list(module_tree_figure(tree, "all GPU time").data[0].values) == [100, 70, 50, 30]


def test_runs_have_their_names_on_the_axis_where_there_is_room() -> None:
    few = run_history(["workers.slow", "workers.cured"], [70.3, 32.0], [NO_COMMIT] * 2)
    assert list(few.layout.xaxis.ticktext) == ["workers.slow", "workers.cured"]
    many = run_history([f"workers.slow.{i}" for i in range(9)], [1.0] * 9, [NO_COMMIT] * 9)
    assert sum(map(len, many.layout.xaxis.ticktext)) <= 40


def test_the_mark_of_a_late_rank_is_below_its_number() -> None:
    figure = rank_class_heatmap(
        [[1.0, 2.0]], [["", ""]], [["", ""]], ["host"], ["6", "7 late"], 2, 90
    )
    assert list(figure.data[0].x) == ["6", "7<br>late"]


def test_sparse_memory_samples_are_drawn_over_all_steps() -> None:
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
    run: Any = SimpleNamespace(run_steps=SimpleNamespace(steps=steps, hosts=[]))
    _, device, host = memory._memory_by_step_card(run).children
    figures = [each.children[0].children[0].figure for each in (device, host)]
    line = figures[0].data[0]
    assert (line.x, line.y, line.mode) == ((2.0, 9.0), (3.0, 4.0), "lines+markers")
    assert [figure.layout.xaxis.range for figure in figures] == [(0, 65), (0, 65)]


def test_steps_slowed_by_the_profiler_are_marked() -> None:
    steps = [
        StepRow(n=n, t=n, dur=(100 + n) * 1_000_000, window=0 if n in (20, 30) else None,
                exporting=n == 25)
        for n in range(60)
    ]  # fmt: skip
    card = live.steps_card(RunSteps(RankRecord(rank=0, steps=steps)))
    figure = card.children[1].children[0].children[0].figure
    line, *marks = figure.data
    assert len(line.y) == 60 and None not in line.y
    assert {mark.name: (list(mark.x), list(mark.y)) for mark in marks} == {
        "while profiled": ([20, 30], [120, 130]),
        "while the profiler stops or writes": ([21, 25, 31], [121, 125, 131]),
    }
    assert all(mark.mode == "markers" for mark in marks)
    assert len({mark.marker.symbol for mark in marks}) == len(marks)


def test_a_column_without_values_is_listed_below_the_grid() -> None:
    columns = [Column("name", "Name"), duration_column("a", "Here", 90),
               duration_column("b", "Nowhere", 90)]  # fmt: skip
    values = [{"name": "x", "a": None, "b": None}, {"name": "y", "a": 5.0, "b": None}]
    element = grid("g", columns, grid_rows(columns, values), height=300, label="G")
    shown = element.children[1].children.columnDefs
    assert [column["headerName"] for column in shown] == ["Name", "Here"]
    assert element.children[2].children == "Not measured: Nowhere."


def test_a_memory_chart_starts_at_the_first_activity() -> None:
    from advisor.dashboard.memory_cards import _active_range

    assert _active_range([0.0, 1.0, 91.0, 95.0, 101.0], peak=3) == [90.5, 101.0]
    assert _active_range([0.0, 1.0, 91.0, 95.0, 101.0], peak=1) is None  # the peak is before that
    assert _active_range([0.0, 30.0, 60.0, 100.0], peak=2) is None


def test_roofline_labels_do_not_overlap_and_are_inside_the_figure() -> None:
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
    figure = roofline(kernels, hardware, 15)
    memory, *flat = figure.layout.annotations
    low, high = figure.layout.yaxis.range
    pixels_per_decade = (600 - 44 - 48 - 120) / (
        high - low
    )  # px a decade at 390 px, six names above
    heights = sorted(each.y for each in flat)
    assert all((b - a) * pixels_per_decade >= 14 for a, b in pairwise(heights))
    # below the roof, with room for a line above the axis
    assert memory.yanchor == "top" and (memory.y - low) * pixels_per_decade >= 14
