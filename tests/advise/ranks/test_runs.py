"""A single run is diagnosed of a folder with files of several runs, and each of its ranks once."""

from __future__ import annotations

from msgspec import structs

from advisor.measure.ranks.summary_schema import RankSummary, StepSummary, select_main_run

HOUR = 3_600 * 10**9


def rank(
    number: int, *, at: int = 0, world: int = 4, path: str = "", steps: int = 2
) -> RankSummary:
    """A rank that recorded some steps of a second each."""
    marks = [
        StepSummary(f"ProfilerStep#{n}", at + n * 10**9, at + (n + 1) * 10**9) for n in range(steps)
    ]
    return RankSummary(rank=number, path=path or f"{number}-{at}", world=world, steps=marks)


def test_a_file_of_yesterday_is_set_aside_and_reported() -> None:
    main_run = select_main_run([rank(0), rank(1), rank(2), rank(3, at=-24 * HOUR)])
    assert [s.rank for s in main_run.summaries] == [0, 1, 2]
    assert [(u.rank, "another run with fewer ranks" in u.why) for u in main_run.other_runs] == [
        (3, True)
    ]


def test_one_whole_run_of_two_is_analyzed() -> None:
    first = [rank(n, steps=2 + n % 2) for n in range(4)]
    second = [rank(n, at=HOUR, steps=3 - n % 2) for n in range(4)]
    main_run = select_main_run([*first, *second])
    assert main_run.summaries == first
    assert {u.path for u in main_run.other_runs} == {s.path for s in second}


def test_omitted_job_is_offered() -> None:
    first = [rank(n, path=f"s3://b/runs/jobA/rank{n}.json") for n in range(4)]
    second = [rank(n, at=HOUR, path=f"s3://b/runs/jobB/rank{n}.json") for n in range(4)]
    main_run = select_main_run([*first, *second])
    assert {u.why for u in main_run.other_runs} == {
        "another run with as many ranks, recorded 3,600 s after the one analysed: "
        "advisor analyze s3://b/runs/jobB"
    }
    (mixed,) = select_main_run(
        [*first, rank(0, at=-HOUR, path="s3://b/runs/rank0.json")]
    ).other_runs
    assert mixed.why.endswith("before the one analysed: give its files to analyse it")


def test_clocks_seconds_apart_are_one_run() -> None:
    assert len(select_main_run([rank(n, at=n * 10**10) for n in range(4)]).summaries) == 4


def test_times_without_dates_do_not_separate_runs() -> None:
    ranks = [structs.replace(rank(n, at=n * HOUR), clock="monotonic") for n in range(4)]
    assert select_main_run(ranks).summaries == ranks


def test_a_job_of_another_size_is_set_aside() -> None:
    main_run = select_main_run(
        [rank(0), rank(1), rank(2), rank(3, world=8), rank(3, world=0, path="b")]
    )
    assert [s.path for s in main_run.summaries] == ["0-0", "1-0", "2-0", "b"]
    assert [u.path for u in main_run.other_runs] == ["3-0"]


def test_a_rank_twice_is_taken_once_and_reported() -> None:
    main_run = select_main_run([rank(0), rank(1), rank(1, path="more", steps=3)])
    assert [(s.rank, s.path) for s in main_run.summaries] == [(0, "0-0"), (1, "more")]
    assert main_run.notes == {"further files of the same ranks": "of ranks 1"}


def test_single_missing_rank_number_is_inferred() -> None:
    main_run = select_main_run([rank(0), rank(1), rank(3), rank(-1, path="who")])
    assert [(s.rank, s.path) for s in main_run.summaries][2] == (2, "who")
    assert not main_run.notes


def test_unnumbered_ranks_get_unused_numbers_and_are_named() -> None:
    main_run = select_main_run([rank(0), rank(3), rank(-1, path="b"), rank(-1, path="a")])
    assert [(s.rank, s.path) for s in main_run.summaries][2:] == [(4, "a"), (5, "b")]
    assert "4 is a and 5 is b" in main_run.notes["which ranks some files are of"]
