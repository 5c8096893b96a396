"""Parent and depth of every event, against a twin that keeps the set of open events by hand."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from advisor.core.event_kinds import CPU_KINDS
from advisor.read import nesting
from advisor.read.nesting import MAX_NESTING_DEPTH, independent_stretches, nest, stack_order

Row = tuple[int, int, int]
"""A row: thread, start, duration."""


def nesting_by_hand(rows: list[Row]) -> tuple[list[int], list[int], list[int], int]:
    """Parent, depth, end and number of cut ends of ordered rows, by looking at all before."""
    ends: list[int] = []
    parents, depths = [], []
    cut = 0
    for i, (thread, start, dur) in enumerate(rows):
        around = [j for j in range(i) if rows[j][0] == thread and ends[j] > start]
        end = start + max(dur, 1)
        if around and end > ends[around[-1]]:
            end = ends[around[-1]]
            cut += 1
        ends.append(end)
        parents.append(around[-1] if around else -1)
        depths.append(len(around))
    return parents, depths, ends, cut


def arrays(rows: list[Row]) -> tuple[Any, Any, Any]:
    thread, start, dur = (
        np.array([row[i] for row in rows], dtype=np.int64).reshape(-1) for i in range(3)
    )
    return thread, start, dur


def sort_rows(rows: list[Row]) -> list[Row]:
    return sorted(rows, key=lambda row: (row[0], row[1], -row[2]))


def nested(rows: list[Row]) -> tuple[list[int], list[int], list[int], int]:
    thread, start, dur = arrays(rows)
    nesting = nest(thread, start, start + dur)
    return nesting.parent.tolist(), nesting.depth.tolist(), nesting.end.tolist(), nesting.repaired


def rows_of(span: int, longest: int, threads: int, most: int = 40) -> st.SearchStrategy[list[Row]]:
    row = st.tuples(st.integers(0, threads - 1), st.integers(0, span), st.integers(0, longest))
    return st.lists(row, max_size=most).map(sort_rows)


@settings(max_examples=500, deadline=None)
@given(
    st.one_of(
        rows_of(span=6, longest=4, threads=1),  # ties and zero durations everywhere
        rows_of(span=60, longest=10, threads=2),
        rows_of(span=60, longest=60, threads=1),  # tangled
        rows_of(span=1000, longest=400, threads=3, most=80),
    )
)
def test_any_overlap_nests_as_by_hand(rows: list[Row]) -> None:
    assert nested(rows) == nesting_by_hand(rows)


@st.composite
def call_trees(draw: st.DrawFn) -> list[Row]:
    """Proper call trees on a few threads, with a few events that end a little late."""
    rows: list[Row] = []

    def grow_tree(thread: int, start: int, end: int, level: int) -> None:
        at = start
        while level < 6 and at < end and draw(st.booleans()):
            begin = draw(st.integers(at, end))
            stop = draw(st.integers(begin, end))
            late = draw(st.sampled_from([0] * 12 + [1, 3, 40]))
            rows.append((thread, begin, stop - begin + late))
            grow_tree(thread, begin, stop, level + 1)
            at = stop + 1

    for thread in range(draw(st.integers(1, 3))):
        grow_tree(thread, 0, draw(st.integers(1, 400)), 0)
    return sort_rows(rows)


@settings(max_examples=300, deadline=None)
@given(call_trees())
def test_call_trees_with_late_ends_nest_as_by_hand(rows: list[Row]) -> None:
    assert nested(rows) == nesting_by_hand(rows)


@pytest.mark.parametrize("late", [0, 3, 40])
def test_real_overlaps_are_nested_without_the_row_loop(
    late: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each op ends a little after the frame around it: repaired without the loop over rows."""

    def raise_if_called(*_: Any) -> None:
        raise AssertionError("went one by one")

    monkeypatch.setattr(nesting, "_nest_one_by_one", raise_if_called)
    rows = []
    for i in range(500):
        rows += [(0, i * 1000, 900), (0, i * 1000 + 10, 890 + late), (0, i * 1000 + 20, 870)]
    assert nested(sort_rows(rows)) == nesting_by_hand(sort_rows(rows))


def test_both_ways_agree_on_a_large_tangle(monkeypatch: pytest.MonkeyPatch) -> None:
    chance = np.random.default_rng(5)
    count = 20_000
    rows = sort_rows(
        list(
            zip(
                chance.integers(0, 3, count).tolist(),
                chance.integers(0, 2_000_000, count).tolist(),
                (chance.pareto(1.0, count) * 30).astype(int).tolist(),
                strict=True,
            )
        )
    )
    expected = nested(rows)
    monkeypatch.setattr(nesting, "MAX_ROUNDS", 0)
    assert nested(rows) == expected


def test_empty_table_nests_to_empty() -> None:
    assert nested([]) == ([], [], [], 0)


def test_event_starting_at_the_end_of_another_is_outside() -> None:
    assert nested([(0, 0, 10), (0, 10, 5)]) == ([-1, -1], [0, 0], [10, 15], 0)


def test_event_without_duration_is_inside_open_events() -> None:
    assert nested([(0, 0, 10), (0, 3, 0), (0, 9, 0)]) == ([-1, 0, 0], [0, 1, 1], [10, 4, 10], 0)


def test_threads_do_not_hold_each_others_events() -> None:
    assert nested([(0, 0, 100), (1, 5, 10), (2, 5, 10)])[0] == [-1, -1, -1]


@pytest.mark.parametrize("rounds", [0, nesting.MAX_ROUNDS])
def test_very_deep_nesting_is_bounded(rounds: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nesting, "MAX_ROUNDS", rounds)
    deep = 3 * MAX_NESTING_DEPTH
    parents, depths, _, cut = nested([(0, i, 10 * deep - 2 * i) for i in range(deep)])
    assert cut == 0
    assert depths == [min(i, MAX_NESTING_DEPTH) for i in range(deep)]
    assert parents == [min(i, MAX_NESTING_DEPTH) - 1 for i in range(deep)]


def test_more_threads_and_time_than_a_key_can_hold() -> None:
    day = 86_400 * 10**9
    rows = [(thread, start, 10) for thread in range(70_000) for start in (0, 5, day)]
    thread, start, dur = arrays(rows)
    shuffle = np.random.default_rng(1).permutation(len(rows))
    order = stack_order(thread[shuffle], start[shuffle], dur[shuffle], np.zeros_like(thread))
    assert np.array_equal(thread[shuffle][order], thread)
    assert np.array_equal(start[shuffle][order], start)
    nesting = nest(thread, start, start + dur)
    assert nesting.depth.tolist() == [0, 1, 0] * 70_000
    assert nesting.repaired == 70_000


@settings(max_examples=200, deadline=None)
@given(
    st.lists(
        st.tuples(st.integers(0, 3), st.integers(0, 8), st.integers(0, 4), st.integers(0, 4)),
        min_size=1,
        max_size=30,
    )
)
def test_the_order_is_by_thread_start_longest_outermost_kind(rows: list[tuple[int, ...]]) -> None:
    outer = ["annotation", "python", "op", "runtime", "overhead"]
    thread, start, dur, kind = (np.array([row[i] for row in rows]) for i in range(4))
    order = stack_order(thread, start, dur, kind)
    keys = [(t, s, -d, outer.index(CPU_KINDS[k])) for t, s, d, k in rows]
    assert [keys[i] for i in order.tolist()] == sorted(keys)


# -- a stretch at a time --------------------------------------------------------------------------


@pytest.mark.parametrize("part", [1, 3, 7])
@settings(max_examples=200, deadline=None)
@given(
    rows=st.one_of(
        rows_of(span=60, longest=10, threads=3),
        rows_of(span=200, longest=9, threads=1, most=80),
        rows_of(span=1000, longest=400, threads=3, most=80),
    )
)
def test_stretches_nest_as_the_whole_does(part: int, rows: list[Row]) -> None:
    thread, start, dur = arrays(rows)
    parents, depths, ends, cut = [], [], [], 0
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(nesting, "ROWS_PER_PART", part)
        stretches = list(independent_stretches(thread, start, dur))
    for one in stretches:
        nested = nest(thread[one], start[one], start[one] + dur[one])
        parents += [p if p < 0 else p + one.start for p in nested.parent.tolist()]
        depths += nested.depth.tolist()
        ends += nested.end.tolist()
        cut += nested.repaired
    assert [one.start for one in stretches[1:]] == [one.stop for one in stretches[:-1]]
    assert (parents, depths, ends, cut) == nesting_by_hand(rows)


def test_nesting_stretch_ends_without_open_events() -> None:
    """Calls of two rows on two threads: 0 and 5 ns long, every 10 ns."""
    one = [(10 * (n // 2) + n % 2, 5 - 4 * (n % 2)) for n in range(60)]
    thread, start, dur = arrays([(t, at, length) for t in (0, 1) for at, length in one])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(nesting, "ROWS_PER_PART", 9)
        items = list(independent_stretches(thread, start, dur))
    assert [len(range(*each.indices(120))) for each in items[:5]] == [10] * 5
    assert all(each.start % 2 == 0 for each in items)


@settings(max_examples=200, deadline=None)
@given(rows=rows_of(span=30, longest=5, threads=6, most=60), seed=st.randoms())
def test_threads_are_ordered_by_groups_as_all_at_once(rows: list[Row], seed: Any) -> None:
    seed.shuffle(rows)
    thread, start, dur = arrays(rows)
    if not len(rows):
        return
    kind = np.arange(len(rows)) % len(CPU_KINDS)
    order = stack_order(thread, start, dur, kind).tolist()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(nesting, "ROWS_PER_PART", 5)
        assert stack_order(thread, start, dur, kind).tolist() == order
