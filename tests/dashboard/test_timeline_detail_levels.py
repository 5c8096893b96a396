"""Slices and cells of a view, compared with a plain count over all slices."""

from __future__ import annotations

import math
from collections import defaultdict

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from advisor.dashboard.timeline.detail_levels import (
    ALL_CATEGORIES,
    COVER_STEP,
    FIRST_CATEGORY,
    HOST_CATEGORIES,
    KERNEL_CATEGORIES,
    select_visible,
    stored_levels,
)
from advisor.dashboard.timeline.index import IndexBuilder, TimelineIndex

Slice = tuple[int, int, int]
"""Slice: start, end, slot."""


def build_index_of(*lanes: list[Slice]) -> TimelineIndex:
    """Build an index with one group per lane, alternating between two category sets."""
    builder = IndexBuilder()
    for number, slices in enumerate(lanes):
        categories = (HOST_CATEGORIES, KERNEL_CATEGORIES)[number % 2]
        columns = [np.array([s[i] for s in slices], dtype=np.int64) for i in range(3)]
        name = np.array([builder.names.number_of(f"n{s[2]}") for s in slices], dtype=np.uint32)
        row = np.arange(len(slices))
        builder.add_group(
            str(number),
            str(number),
            "thread",
            [("cpu", categories, *columns[:2], name, columns[2], row)],
        )
    return builder.build()


def count_cells_one_by_one(index: TimelineIndex, lanes: list[int], k: int, x0: int, x1: int):
    """Return (category, covered ns) by (lane, cell), from one narrow slice after another."""
    low, high = max(x0 - index.first_ns, 0) >> k, max(x1 - 1 - index.first_ns, 0) >> k
    time: dict[tuple[int, int], dict[int, int]] = defaultdict(lambda: defaultdict(int))
    for number in lanes:
        lane = index.lanes[number]
        for i in range(lane.first_slice, lane.end_slice):
            start, end = int(index.start[i]), int(index.end[i])
            if end - start >= 2 << k:
                continue
            end = max(end, start + 1)
            first, last = ((t - index.first_ns) // (1 << k) for t in (start, end - 1))
            for cell in range(max(low, first), min(high, last) + 1):
                a = index.first_ns + (cell << k)
                overlap = min(end, a + (1 << k)) - max(start, a)
                if overlap > 0:
                    time[number, cell][lane.base + int(index.slot[i])] += overlap
    return {
        key: (min(c for c in times if times[c] == max(times.values())), sum(times.values()))
        for key, times in time.items()
    }


def read_cells(view, index: TimelineIndex):
    covers = {}
    r = view.runs
    for lane, cell, width, slot, cover in zip(
        r.lane.tolist(),
        r.cell.tolist(),
        r.width.tolist(),
        r.slot.tolist(),
        r.cover.tolist(),
        strict=True,
    ):
        for c in range(cell, cell + width):
            assert (lane, c) not in covers, "each cell is in one run"
            covers[lane, c] = (index.lanes[lane].base + slot, cover)
    return covers


def check_view(
    index: TimelineIndex, lanes: list[int], x0: int, x1: int, px: int, flags=None
) -> None:
    view = select_visible(index, lanes, x0, x1, px, flags)
    k = view.level
    pixel = (x1 - x0) / px
    assert (1 << k) <= max(pixel, 1) < 2 << k, "a cell is half a pixel to one pixel"
    wide = []
    slice_count = 0
    for number in sorted(set(lanes)):
        lane = index.lanes[number]
        for i in range(lane.first_slice, lane.end_slice):
            if index.end[i] > x0 and index.start[i] < x1:
                slice_count += 1
                if index.end[i] - index.start[i] >= 2 << k:
                    wide.append((i, number))
    assert list(zip(view.position.tolist(), view.lane.tolist(), strict=True)) == wide
    assert view.slice_count == slice_count
    expected = count_cells_one_by_one(index, lanes, k, x0, x1)
    actual = read_cells(view, index)
    assert actual.keys() == expected.keys()
    for key, (category, ns) in expected.items():
        share = min(ns / (1 << k), 1.0)
        cover = min(max(math.ceil(share * 255 / COVER_STEP) * COVER_STEP, 1), 255)
        assert actual[key] == (category, cover)


@st.composite
def lane_of_slices(draw, most: int = 40) -> list[Slice]:
    """Draw successive slices, with gaps and durations of very different sizes, including zero."""
    size = st.one_of(st.integers(0, 3), st.integers(0, 300), st.integers(0, 40_000))
    at = draw(st.integers(-1000, 1000))
    slices = []
    for _ in range(draw(st.integers(0, most))):
        at += draw(size)
        dur = draw(size)
        slices.append((at, at + dur, draw(st.integers(0, 5))))
        at += dur
    return slices


@settings(max_examples=150, deadline=None)
@given(st.lists(lane_of_slices(), min_size=1, max_size=4), st.data())
def test_a_view_shows_each_wide_slice_and_the_dominant_category_of_each_cell(lanes, data):
    index = build_index_of(*lanes)
    if not index.lanes:
        return
    span = index.last_ns - index.first_ns
    x0 = data.draw(st.integers(index.first_ns - 50, index.last_ns - 1))
    x1 = data.draw(st.integers(x0 + 16, x0 + 16 + 2 * span))
    px = data.draw(st.integers(16, 200))
    if (x1 - x0) // px < 1 << 12:  # the count visits each cell, so keep them few
        wanted = data.draw(st.sets(st.integers(0, len(index.lanes) - 1), min_size=1))
        check_view(index, sorted(wanted), x0, x1, px)


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 2**32 - 1), st.integers(16, 400))
def test_stored_levels_equal_a_count_of_all_slices(seed, px):
    rng = np.random.default_rng(seed)
    n = 3000
    gap = rng.geometric(0.3, n) * rng.choice([0, 1, 40], n, p=[0.4, 0.5, 0.1])
    dur = rng.geometric(0.2, n) * rng.choice([0, 1, 1, 200], n, p=[0.05, 0.5, 0.4, 0.05])
    start = np.cumsum(gap + np.append(0, dur[:-1]))
    slices = list(zip(start.tolist(), (start + dur).tolist(), (dur % 6).tolist(), strict=True))
    index = build_index_of(slices, slices[::3])
    assert index.pyramid, "this test is about stored levels"
    for _ in range(3):
        x0 = int(rng.integers(index.first_ns, index.last_ns - 20))
        check_view(index, [0, 1], x0, min(x0 + 40 * px, index.last_ns), px)
    check_view(index, [0, 1], index.first_ns, index.last_ns, px)


def test_levels_are_stored_only_for_many_slices_per_cell():
    assert len(stored_levels(1_000_000, 10**9)) == 11
    low = stored_levels(1_000_000, 10**9)[0]
    assert 4 <= 1_000_000 / (10**9 / (1 << low)) <= 16
    assert list(stored_levels(0, 1)) == [0]


def test_a_view_with_too_many_slices_has_wider_cells():
    index = build_index_of([(i * 10, i * 10 + 10, i % 3) for i in range(4000)])
    few = select_visible(index, [0], 0, 40_000, 8192, max_slices=500)
    assert few.level > select_visible(index, [0], 0, 40_000, 8192).level
    assert len(few.position) <= 500
    assert set(read_cells(few, index)) == {(0, c) for c in range(((40_000 - 1) >> few.level) + 1)}


def test_flagged_narrow_slices_mark_the_cells_they_start_in():
    index = build_index_of([(i * 10, i * 10 + 10, 0) for i in range(4096)])
    flags = np.zeros(len(index), dtype=np.uint8)
    flags[[5, 6, 2000]] = 1
    flags[3000] = 2
    view = select_visible(index, [0], 0, 40_960, 256, flags)
    f = view.flagged
    marked = {
        (cell + i, flag)
        for cell, width, flag in zip(
            f.cell.tolist(), f.width.tolist(), f.flags.tolist(), strict=True
        )
        for i in range(width)
    }
    assert marked == {
        (50 >> view.level, 1),
        (60 >> view.level, 1),
        (20_000 >> view.level, 1),
        (30_000 >> view.level, 2),
    }


def test_slices_without_duration_are_drawn_as_cells():
    index = build_index_of([(0, 0, 1), (500_000, 500_000, 2), (1_000_000, 1_000_000, 3)])
    view = select_visible(index, [0], -1000, 1_001_000, 1000)
    assert [c for c, _ in read_cells(view, index).values()] == [
        FIRST_CATEGORY[HOST_CATEGORIES] + slot for slot in (1, 2, 3)
    ]
    assert set(view.runs.cover.tolist()) == {COVER_STEP}


def test_categories_fit_a_byte_and_have_distinct_keys():
    assert len(ALL_CATEGORIES) < 256
    assert len({category.key for category in ALL_CATEGORIES}) == len(ALL_CATEGORIES)
