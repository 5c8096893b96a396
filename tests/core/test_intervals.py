"""Interval arithmetic against a twin that looks at every nanosecond."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from advisor.core.intervals import (
    EMPTY,
    Intervals,
    covered_length,
    gaps,
    intersect,
    subtract,
    union,
    union_of,
)

RANGE = 40

pairs = st.lists(st.tuples(st.integers(0, RANGE), st.integers(-3, 12)), max_size=12)


def instants_of(pairs: list[tuple[int, int]]) -> set[int]:
    """The instants of (start, length) pairs; lengths below one cover none."""
    return {t for start, length in pairs for t in range(start, start + length)}


def make_intervals(pairs: list[tuple[int, int]]) -> Intervals:
    return union([s for s, _ in pairs], [s + d for s, d in pairs])


def points(intervals: Intervals) -> set[int]:
    return {
        t
        for s, e in zip(intervals.start.tolist(), intervals.end.tolist(), strict=True)
        for t in range(s, e)
    }


def assert_intervals(intervals: Intervals, expected: set[int]) -> None:
    """The right instants, and a proper set: ordered, disjoint, nothing empty, exact total."""
    assert points(intervals) == expected
    assert (intervals.end > intervals.start).all()
    assert (intervals.start[1:] >= intervals.end[:-1]).all()
    assert intervals.total == len(expected)


@given(pairs)
def test_union_covers_both_sets_and_merges_adjacent_intervals(given_pairs):
    result = make_intervals(given_pairs)
    assert_intervals(result, instants_of(given_pairs))
    assert (result.start[1:] > result.end[:-1]).all()


@given(pairs, pairs)
def test_intersection_is_covered_by_both_sets(left, right):
    assert_intervals(
        intersect(make_intervals(left), make_intervals(right)),
        instants_of(left) & instants_of(right),
    )


@given(pairs, pairs)
def test_difference_is_covered_by_the_first_set_only(left, right):
    assert_intervals(
        subtract(make_intervals(left), make_intervals(right)),
        instants_of(left) - instants_of(right),
    )


@given(pairs, pairs, pairs)
def test_join_covers_every_set(first, second, third):
    assert_intervals(
        union_of(make_intervals(first), make_intervals(second), make_intervals(third)),
        instants_of(first) | instants_of(second) | instants_of(third),
    )


@given(pairs, st.integers(-5, RANGE + 20), st.integers(-5, RANGE + 20))
def test_gaps_are_the_uncovered_rest_of_a_span(given_pairs, start, end):
    assert_intervals(
        gaps(make_intervals(given_pairs), start, end),
        set(range(start, end)) - instants_of(given_pairs),
    )


@given(pairs, pairs)
def test_coverage_is_counted_per_interval(queries, by):
    starts = np.array([s for s, _ in queries], dtype=np.int64)
    ends = starts + np.array([d for _, d in queries], dtype=np.int64)
    expected = [len(instants_of([pair]) & instants_of(by)) for pair in queries]
    assert covered_length(starts, ends, make_intervals(by)).tolist() == expected


def test_empty_set_works_in_every_operation():
    assert len(EMPTY) == 0
    assert EMPTY.total == 0
    assert len(union([], [])) == 0
    assert len(intersect(EMPTY, union([1], [5]))) == 0
    assert subtract(union([1], [5]), EMPTY).total == 4
    assert covered_length([1], [5], EMPTY).tolist() == [0]


def test_times_of_a_day_in_nanoseconds_stay_exact():
    day = 86_400 * 10**9
    assert union([day, 0], [day + 1, 1]).total == 2
    assert covered_length([0], [day + 1], union([day], [day + 1])).tolist() == [1]
