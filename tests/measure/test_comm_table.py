"""Collectives summed up, against sums over the rows one by one."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import polars as pl

from advisor.measure import Analysis
from advisor.measure.comm.comms import sum_collectives, sum_skew
from advisor.measure.ranks.skew import align_ranks, measure_skew
from advisor.read import open_run, read_trace


def test_every_collective_is_in_one_row(shared_trace: Callable[[str], str]) -> None:
    a = Analysis(read_trace(shared_trace("a100_train_6steps")))
    table = sum_collectives(a)
    by_hand: dict[tuple[object, ...], list[int]] = {}
    for row in a.collectives.iter_rows(named=True):
        key = tuple(
            row[name] for name in ("collective", "bytes", "group_size", "dtype", "annotation")
        )
        result = by_hand.setdefault(key, [0, 0, 0])
        result[0] += 1
        result[1] += row["dur"]
        result[2] += row["exposed"]
    assert table.height == len(by_hand)
    for row in table.iter_rows(named=True):
        key = tuple(
            row[name] for name in ("collective", "bytes", "group_size", "dtype", "annotation")
        )
        assert by_hand[key] == [row["count"], row["dur"], row["exposed"]]
    assert table["exposed"].is_sorted(descending=True)


def test_skew_is_the_mean_over_the_collectives_of_a_kind(
    shared_trace: Callable[[str], str],
) -> None:
    paths = [Path(shared_trace(f"two_ranks_rank{n}")) for n in (0, 1)]
    run = open_run(paths)
    ranks = {number: Analysis(run.window(number)) for number in run.ranks}
    skew = measure_skew(ranks, align_ranks(ranks))
    table = sum_skew(skew)
    assert table["count"].sum() == skew.collectives.height
    for row in table.iter_rows(named=True):
        same = skew.collectives.filter(
            (pl.col("collective").cast(pl.String) == row["collective"])
            & pl.col("bytes").eq_missing(row["bytes"])
            & pl.col("annotation").eq_missing(row["annotation"])
        )
        skews = same["skew_ns"].to_list()
        assert row["skew_ns"] == sum(skews) / len(skews)
        assert row["worst_ns"] == max(skews)
        waits = [wait for wait in same["mean_wait_ns"].to_list() if wait is not None]
        assert abs(row["wait_ns"] - sum(waits) / skew.steps) < 1e-6
        lasts = [last for last in same["last"].to_list() if last is not None]
        if lasts:
            assert row["last_count"] == lasts.count(row["last"])
            assert all(lasts.count(row["last"]) >= lasts.count(other) for other in lasts)
        else:
            assert row["last"] is None


def test_a_row_has_the_name_that_was_recorded(shared_file: Callable[[str], str]) -> None:
    """Ranks are matched without the digits of names; ``all2all`` is shown with them."""
    run = open_run(
        [Path(shared_file(f"dlrm_8ranks/worker{rank}.pt.trace.json.gz")) for rank in range(8)]
    )
    ranks = {number: Analysis(run.window(number)) for number in run.ranks}
    names = sum_skew(measure_skew(ranks, align_ranks(ranks)))["annotation"].drop_nulls().to_list()
    assert any("all2all" in name for name in names) and not any("all#all" in n for n in names)
