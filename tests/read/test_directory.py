"""Paths to a Run: which files are traces, whose they are, and in which order."""

from __future__ import annotations

import gzip
import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import advisor
from advisor.core.errors import AdvisorError
from advisor.measure.host.launches import count_lost_records
from advisor.read import open_run, read_trace
from advisor.testing import TraceBuilder

NOON = 1_700_000_000_000_000.0  # µs of Unix time
SECOND = 1_000_000.0


def trace(path: Path, at: float = NOON, *, rank: int | None = None, seconds: float = 1.0) -> Path:
    """A trace file that lasts ``seconds`` from ``at`` (µs, Unix time)."""
    b = TraceBuilder(rank=rank)
    b.now = at
    with b.step():
        with b.op("aten::mm"):
            b.launch("gemm", 100)
        b.host(seconds * SECOND - 200)
    path.parent.mkdir(parents=True, exist_ok=True)
    return b.write(path)


def error(path: object) -> str:
    """The line of the error that opening raises."""
    with pytest.raises(AdvisorError) as caught:
        open_run(path)  # type: ignore[arg-type]
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_a_file_is_a_run_of_one_window(tmp_path: Path) -> None:
    run = open_run(trace(tmp_path / "a.json"))
    assert list(run.traces) == [(-1, 0)]
    assert run.traces[-1, 0].meta.rank is None
    assert run.problems == ()


def test_the_public_name_opens_the_same_run(tmp_path: Path) -> None:
    path = trace(tmp_path / "a.json", rank=3)
    assert advisor.open(path).ranks == open_run(path).ranks == [3]


def test_directory_is_grouped_by_recorded_rank(tmp_path: Path) -> None:
    for rank in (2, 0, 11):
        trace(tmp_path / f"host_{rank}.1700000000.pt.trace.json", rank=rank)
    run = open_run(tmp_path)
    assert list(run.traces) == [(0, 0), (2, 0), (11, 0)]
    assert [run.window(r).meta.rank for r in run.ranks] == [0, 2, 11]
    assert run.path == tmp_path


def test_distributed_info_wins_over_the_file_name(tmp_path: Path) -> None:
    trace(tmp_path / "rank7.json", rank=1)
    trace(tmp_path / "rank8.json", rank=2)
    assert open_run(tmp_path).ranks == [1, 2]


@pytest.mark.parametrize(
    ("name", "rank"),
    [
        ("trace_rank0.json", 0),
        ("rank-12_step_100.json", 12),
        ("rank_3.1700000000123.pt.trace.json", 3),
        ("two_ranks_rank1.json", 1),
        ("traceRank4.json", 4),
        ("RANK=5.json", 5),
        ("rank6/trace.json", 6),
        ("rank7/window/rank_of_trace.json", 7),
        ("rank1/rank2.json", 2),
        ("frank9.json", -1),
        ("rank_1700000000123.json", -1),
        ("ranking.json", -1),
    ],
)
def test_rank_is_read_from_file_or_folder_name(tmp_path: Path, name: str, rank: int) -> None:
    path = trace(tmp_path / "x" / name)
    assert open_run(path).ranks == [rank]


def test_several_windows_of_a_rank_are_numbered_in_order_of_time(tmp_path: Path) -> None:
    later = trace(tmp_path / "a.json", NOON + 60 * SECOND, rank=1)
    first = trace(tmp_path / "b.json", NOON, rank=1)
    run = open_run(tmp_path)
    assert list(run.traces) == [(1, 0), (1, 1)]
    assert run.window(1).meta.path == str(first)
    assert run.window(1, 1).meta.path == str(later)
    assert run.window(1, 1).meta.window == 1


def test_windows_may_follow_each_other_closely(tmp_path: Path) -> None:
    trace(tmp_path / "a.json", NOON, rank=0)
    trace(tmp_path / "b.json", NOON + 0.9995 * SECOND, rank=0)
    run = open_run(tmp_path)
    first, second = run.window(0, 0).meta, run.window(0, 1).meta
    assert 100_000 < first.start_ns + first.end_ns - second.start_ns < 500_000  # ns: clocks differ


def test_overlapping_windows_of_one_rank_are_named_in_the_error(tmp_path: Path) -> None:
    one = trace(tmp_path / "a.json", NOON, rank=0)
    two = trace(tmp_path / "b.json", NOON + 0.5 * SECOND, rank=0)
    text = error(tmp_path)
    assert str(one) in text and str(two) in text and "rank 0" in text and "overlap" in text


def test_a_long_window_overlaps_a_later_short_one(tmp_path: Path) -> None:
    trace(tmp_path / "a.json", NOON, rank=0, seconds=10)
    trace(tmp_path / "b.json", NOON + 2 * SECOND, rank=0)
    trace(tmp_path / "c.json", NOON + 5 * SECOND, rank=0)
    assert "overlap" in error(tmp_path)


def test_overlapping_traces_without_rank_get_instructions(tmp_path: Path) -> None:
    trace(tmp_path / "a.json")
    trace(tmp_path / "b.json")
    assert "rank0" in error(tmp_path)


def test_overlapping_ranks_are_accepted(tmp_path: Path) -> None:
    trace(tmp_path / "rank0.json")
    trace(tmp_path / "rank1.json")
    assert open_run(tmp_path).ranks == [0, 1]


def test_choosing_a_rank_ignores_trouble_of_the_others(tmp_path: Path) -> None:
    trace(tmp_path / "a.json", rank=0)
    trace(tmp_path / "b.json", rank=0)
    trace(tmp_path / "c.json", rank=1)
    assert list(open_run(tmp_path, rank=1).traces) == [(1, 0)]
    with pytest.raises(AdvisorError, match="overlap"):
        open_run(tmp_path, rank=0)


def test_missing_rank_error_lists_the_ranks(tmp_path: Path) -> None:
    trace(tmp_path / "a.json", rank=0)
    trace(tmp_path / "b.json", rank=4)
    with pytest.raises(AdvisorError, match=r"no trace of rank 2 .*0, 4"):
        open_run(tmp_path, rank=2)


def test_other_json_in_a_directory_is_left_out_with_a_line_each(tmp_path: Path) -> None:
    trace(tmp_path / "rank0.json")
    (tmp_path / "config.json").write_text('{"lr": 0.1}')
    (tmp_path / "broken.json").write_text("not json at all")
    (tmp_path / "empty.json").write_text("")
    (tmp_path / "notes.txt").write_text("no trace, and not called one")
    run = open_run(tmp_path)
    assert run.ranks == [0]
    assert len(run.problems) == 3
    for name in ("config.json", "broken.json", "empty.json"):
        (line,) = [p for p in run.problems if name in p]
        assert "\n" not in line


def test_directory_without_readable_trace_explains_the_first(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text('{"lr": 0.1}')
    (tmp_path / "b.json").write_text("[]")
    text = error(tmp_path)
    assert "none of the 2 files" in text and "a.json" in text


def test_a_directory_without_traces_is_reported_as_such(tmp_path: Path) -> None:
    assert error(tmp_path).endswith("an empty directory; give one with traces, or a file")
    (tmp_path / "readme.md").write_text("x")
    assert "without traces (no file is named or begins like one); give a file" in error(tmp_path)


def test_hidden_copies_are_not_traces(tmp_path: Path) -> None:
    trace(tmp_path / "rank0.json")
    trace(tmp_path / ".ipynb_checkpoints" / "rank0.json")
    trace(tmp_path / "._rank0.json")
    run = open_run(tmp_path)
    assert list(run.traces) == [(0, 0)] and run.problems == ()


def test_a_missing_path_is_an_error_alone_and_among_others(tmp_path: Path) -> None:
    good, missing = trace(tmp_path / "a.json"), tmp_path / "b.json"
    assert f"{missing}: no such file" in error(missing)
    assert f"{missing}: no such file" in error([good, missing])


def test_files_and_directories_mix(tmp_path: Path) -> None:
    one = trace(tmp_path / "rank0.json")
    trace(tmp_path / "more" / "rank1.json")
    packed = tmp_path / "rank2.json.gz"
    packed.write_bytes(gzip.compress(trace(tmp_path / "x").read_bytes()))
    run = open_run([one, tmp_path / "more", str(packed)])
    assert run.ranks == [0, 1, 2]
    assert run.path is None


def test_a_file_given_twice_is_read_once(tmp_path: Path) -> None:
    path = trace(tmp_path / "rank0.json")
    run = open_run([path, tmp_path, tmp_path / "." / "rank0.json"])
    assert list(run.traces) == [(0, 0)]


def test_traces_whose_clock_is_not_a_date_are_windows_in_order(tmp_path: Path) -> None:
    # whether they overlap is unknown, so it is not claimed
    trace(tmp_path / "a.json", 5000.0)
    trace(tmp_path / "b.json", 1000.0)
    run = open_run(tmp_path)
    assert [run.window(-1, w).meta.path[-6:] for w in (0, 1)] == ["b.json", "a.json"]


def test_standard_input_is_a_trace_like_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Stdin:
        buffer = io.BytesIO(gzip.compress(trace(tmp_path / "a.json", rank=5).read_bytes()))

    monkeypatch.setattr("sys.stdin", Stdin)
    run = open_run("-")
    assert run.ranks == [5]
    assert run.traces[5, 0].meta.path == "-"


@pytest.mark.parametrize("name", ["a\x00b", "x" * 5000])
def test_impossible_file_name_is_an_error(name: str) -> None:
    error(name)
    error([name, name])


def test_names_with_line_breaks_stay_on_one_line(tmp_path: Path) -> None:
    path = tmp_path / "a\nb.json"
    path.write_text("{}")
    error(path)
    trace(tmp_path / "rank0.json")
    assert all("\n" not in line for line in open_run(tmp_path).problems)


def test_no_path_at_all_is_an_error() -> None:
    assert "no trace given" in error([])


def test_a_negative_rank_in_the_file_counts_as_none(tmp_path: Path) -> None:
    path = trace(tmp_path / "rank3.json", rank=0)
    text = json.loads(path.read_text())
    text["distributedInfo"]["rank"] = -1
    path.write_text(json.dumps(text))
    assert open_run(path).ranks == [3]


def test_the_two_ranks_of_the_public_pair_open_together(shared_trace) -> None:  # type: ignore[no-untyped-def]
    run = open_run([shared_trace("two_ranks_rank1"), shared_trace("two_ranks_rank0")])
    assert run.ranks == [0, 1]
    assert run.window(0).meta.world_size == 128


def test_two_jobs_in_one_folder_are_named(tmp_path: Path) -> None:
    for job, at in (("a", NOON), ("b", NOON + 3600 * SECOND)):
        for rank in (0, 1):
            trace(tmp_path / job / f"rank{rank}" / "trace.json", at, rank=rank)
    (line,) = open_run(tmp_path).problems
    assert "2 jobs, of which a is analysed; --window 1 is of b; or give one folder" in line
    assert open_run(tmp_path / "a").problems == ()
    for rank in (0, 1):  # windows of one job
        trace(tmp_path / "a" / f"rank{rank}" / "later.json", NOON + 100 * SECOND, rank=rank)
    assert open_run(tmp_path / "a").problems == ()


def correlations(document: dict[str, Any]) -> list[int]:
    """Distinct correlation ids, in order."""
    args = (event.get("args", {}) for event in document["traceEvents"])
    return sorted({each["correlation"] for each in args if each.get("correlation", 0) > 0})


@pytest.mark.parametrize("all_collide", [False, True])
def test_ranks_put_together_by_hand_keep_their_own_launches(
    all_collide: bool, shared_trace: Callable[[str], str], tmp_path: Path
) -> None:
    """Correlation ids are numbers of one process: some of the two files' are equal, or all."""
    paths = [shared_trace(f"two_ranks_rank{rank}") for rank in (0, 1)]
    separate = [read_trace(path) for path in paths]
    documents = [json.loads(gzip.decompress(Path(path).read_bytes())) for path in paths]
    if all_collide:
        first, second = map(correlations, documents)
        other = dict(zip(second, [*first, *range(10**8, 10**8 + len(second))], strict=False))
        for event in documents[1]["traceEvents"]:
            number = event.get("args", {}).get("correlation", 0)
            if number > 0:
                event["args"]["correlation"] = other[number]
    merged = {**documents[0], "traceEvents": [e for d in documents for e in d["traceEvents"]]}
    del merged["distributedInfo"]
    path = tmp_path / "merged.json"
    path.write_text(json.dumps(merged))
    assert count_lost_records(read_trace(str(path))).lost == 0
    for trace, separate_trace in zip(open_run(path).traces.values(), separate, strict=True):
        assert trace.gpu.height == separate_trace.gpu.height
        assert trace.gpu["launch"].null_count() == separate_trace.gpu["launch"].null_count()
        waits, expected = (
            (each.gpu["ts"] - each.cpu["ts"].gather(each.gpu["launch"])).sort().to_list()
            for each in (trace, separate_trace)
        )
        assert waits == expected
