"""Flight-recorder dumps: real ones of gloo with planted faults, NCCL's form, and hostile files."""

from __future__ import annotations

import json
import pickle
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from advisor import analyze, cli
from advisor.core.auxiliary_inputs import FlightRecord
from advisor.core.report import Report

CASES = Path(__file__).parent / "flight"


def analyze_dumps(folder: Path) -> tuple[Report, FlightRecord]:
    report = analyze(str(folder))
    assert report.flight is not None
    return report, report.flight


# -- planted faults -----------------------------------------------------------------------------

PLANTED = {
    "never_calls": ("not called", [2], 2, [29]),
    "other_size": ("size", [1], 2, [34]),
    "other_operation": ("operation", [3], 2, [42, 40]),
    "other_order": ("order", [1], 2, [48, 49]),
    "other_dtype": ("dtype", [0], 2, [60]),
    "died": ("no dump", [1], 2, [67]),
}


@pytest.mark.parametrize("case", PLANTED)
def test_a_planted_fault_is_named_with_rank_number_and_line(case: str) -> None:
    kind, ranks, sequence, lines = PLANTED[case]
    report, flight = analyze_dumps(CASES / case)
    assert report.status == "bottlenecks"
    first = flight.problems[0]
    assert (first.kind, first.ranks) == (kind, ranks)
    assert {call.sequence for call in first.calls} == {sequence}
    assert {call.where.line for call in first.calls if call.where} == set(lines)
    assert {call.where.file for call in first.calls if call.where} == {"/home/user/train.py"}
    (finding,) = report.notes
    assert finding.rule == "collective-hang" and f"ank {ranks[0]}" in report.verdict


def test_a_healthy_set_is_healthy() -> None:
    report, flight = analyze_dumps(CASES / "healthy")
    assert report.status == "healthy" and not flight.problems and not report.notes
    assert flight.calls == 36 and flight.ranks == [0, 1, 2, 3]


def test_waiting_ranks_and_last_call_of_missing_rank_are_named() -> None:
    _, flight = analyze_dumps(CASES / "never_calls")
    (problem,) = flight.problems
    assert problem.waiting == [0, 1, 3]
    (last,) = problem.last
    assert (last.rank, last.sequence, last.state) == (2, 1, "completed")
    assert last.where is not None and last.where.line == 27


def test_groups_without_members_are_not_guessed() -> None:
    report, flight = analyze_dumps(CASES / "two_groups")
    assert {problem.kind for problem in flight.problems} == {"unknown members"}
    assert "not recorded" in report.verdict


def test_json_has_the_same_verdict_without_lines() -> None:
    _, flight = analyze_dumps(CASES / "json")
    (problem,) = flight.problems
    assert (problem.kind, problem.ranks) == ("not called", [2])
    assert problem.calls[0].where is None and problem.calls[0].sizes == [[16]]


ORACLE = """
import pickle, sys, tempfile
from pathlib import Path
from torch.distributed.flight_recorder import fr_trace
for case in sys.argv[1:]:
    with tempfile.TemporaryDirectory() as folder:
        for file in Path(case).iterdir():
            dump = pickle.loads(file.read_bytes())
            dump["pg_config"] = {"0": {"name": "0", "desc": "default_pg", "ranks": "[0, 1, 2, 3]"}}
            for entry in dump["entries"]:
                if entry["retired"]:
                    entry["state"] = "completed"
            Path(folder, file.name).write_bytes(pickle.dumps(dump))
        print("CASE", Path(case).name, flush=True)
        fr_trace.main([folder, "--prefix", "nccl_trace_rank_", "--allow-incomplete-ranks"])
        sys.stderr.flush()
"""


def test_torchs_own_analyzer_blames_the_same_ranks() -> None:
    """The analyzer needs the members that gloo leaves out, and states that gloo does not write."""
    pytest.importorskip("torch.distributed.flight_recorder.fr_trace")
    cases = ["healthy", "never_calls", "other_operation", "other_order"]
    result = subprocess.run(
        [sys.executable, "-c", ORACLE, *(str(CASES / case) for case in cases)],
        check=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=240,
    )  # fmt: skip
    text_of_case = {text.split("\n", 1)[0]: text for text in result.stdout.split("CASE ")[1:]}
    assert "sequence number" not in text_of_case["healthy"]
    for case in cases[1:]:
        first = analyze_dumps(CASES / case)[1].problems[0]
        number = re.search(r"[Ss]equence number: (\d+)", text_of_case[case])
        assert number is not None and int(number[1]) == first.calls[0].sequence
        blamed = re.search(r"(?:missing ranks: \{|Culprit rank )(\d+)", text_of_case[case])
        assert blamed is not None and [int(blamed[1])] == first.ranks


# -- NCCL's form, and what gloo does not write --------------------------------------------------


def make_entry(name: str, number: int, **more: Any) -> dict[str, Any]:
    return {
        "record_id": number, "pg_id": 0, "process_group": ("0", "default_pg"),
        "collective_seq_id": number, "p2p_seq_id": 0, "op_id": number, "is_p2p": False,
        "profiling_name": f"nccl:{name}", "time_created_ns": number, "retired": False,
        "input_sizes": ((4, 4),), "output_sizes": ((4, 4),), "input_dtypes": ["BFloat16"],
        "output_dtypes": ["BFloat16"], "state": "completed", "timeout_ms": 600000,
        "frames": [
            {"name": "all_reduce", "filename": "/x/site-packages/torch/d.py", "line": 9},
            {"name": "step", "filename": "/home/user/train.py", "line": 40 + number},
        ],
        **more,
    }  # fmt: skip


def write_dumps(folder: Path, *ranks: list[dict[str, Any]] | None, groups: Any = None) -> Path:
    folder.mkdir(exist_ok=True)
    everyone = str(list(range(len(ranks))))
    config = {"0": {"name": "0", "desc": "default_pg", "ranks": everyone}, **(groups or {})}
    for rank, entries in enumerate(ranks):
        if entries is not None:
            dump = {"version": "2.10", "entries": entries, "pg_config": config, "pg_status": {}}
            path = folder / f"nccl_trace_rank_{rank}"
            path.write_bytes(pickle.dumps(dump, protocol=2))
    return folder


def test_dead_rank_is_known_from_its_group_members(tmp_path: Path) -> None:
    entries = [make_entry("all_reduce", 1), make_entry("all_reduce", 2, state="started")]
    _, flight = analyze_dumps(write_dumps(tmp_path / "d", entries, entries, None))
    assert flight.absent == [2]
    assert (flight.problems[0].kind, flight.problems[0].ranks) == ("no dump", [2])


def test_ranks_waiting_across_two_groups_are_a_deadlock(tmp_path: Path) -> None:
    groups = {name: {"name": name, "desc": f"pp{name}", "ranks": "[0, 1]"} for name in "12"}
    waits = [
        [make_entry("all_reduce", 1, process_group=(name, f"pp{name}"), state="started")]
        for name in "12"
    ]
    report, flight = analyze_dumps(write_dumps(tmp_path / "d", *waits, groups=groups))
    assert {problem.kind for problem in flight.problems} == {"deadlock"}
    assert "wait for each other" in report.verdict


def test_a_rank_that_waits_elsewhere_is_a_consequence(tmp_path: Path) -> None:
    groups = {"1": {"name": "1", "desc": "tp", "ranks": "[1, 2]"}}
    tp = make_entry("all_reduce", 1, process_group=("1", "tp"), state="started")
    first, second = make_entry("all_reduce", 1), make_entry("all_gather", 2, state="scheduled")
    _, flight = analyze_dumps(
        write_dumps(tmp_path / "d", [first, second], [first, tp], [first], groups=groups)
    )
    assert [problem.ranks for problem in flight.problems] == [[2], [1, 2]]


def test_collective_called_by_all_ranks_blames_network_or_gpu(tmp_path: Path) -> None:
    entries = [make_entry("all_reduce", 1), make_entry("all_reduce", 2, state="started")]
    report, flight = analyze_dumps(write_dumps(tmp_path / "d", entries, entries))
    assert report.status == "limited" and flight.problems[0].kind == "unfinished"


def test_a_send_without_its_receive_names_the_other_rank(tmp_path: Path) -> None:
    sends = make_entry("send 0->1", 1, is_p2p=True, p2p_seq_id=1, state="started")
    report, flight = analyze_dumps(
        write_dumps(tmp_path / "d", [sends], [make_entry("all_reduce", 1)])
    )
    assert flight.problems[0].ranks == [1] and "send 0->1" in report.verdict
    gets = make_entry(
        "recv 1<-0", 1, is_p2p=True, p2p_seq_id=1, output_sizes=((2, 4),), state="started"
    )
    _, flight = analyze_dumps(write_dumps(tmp_path / "d", [sends], [gets]))
    assert flight.problems[0].kind == "size"


def test_uneven_all_to_all_and_reshaped_tensors_match(tmp_path: Path) -> None:
    def entries_of_rank(rank: int) -> list[dict[str, Any]]:
        return [
            make_entry("all_to_all", 1, input_sizes=((4 + rank,),)),
            make_entry("all_reduce", 2, input_sizes=((16,),) if rank else ((4, 4),)),
        ]

    report, flight = analyze_dumps(
        write_dumps(tmp_path / "d", entries_of_rank(0), entries_of_rank(1))
    )
    assert report.status == "healthy" and not flight.problems


def test_only_sequence_numbers_of_all_buffers_are_compared(tmp_path: Path) -> None:
    long, short = [make_entry("all_reduce", n) for n in range(1, 6)], [make_entry("all_reduce", 5)]
    assert analyze_dumps(write_dumps(tmp_path / "d", long, short))[0].status == "healthy"


# -- beside other files -------------------------------------------------------------------------


def test_dumps_in_a_run_directory_are_found(tmp_path: Path) -> None:
    import shutil

    from tests.dashboard.run_by_hand import write_run

    run = write_run(tmp_path / "run", steps=30)
    for file in (CASES / "never_calls").iterdir():
        shutil.copy(file, run / file.name)
    report, flight = analyze_dumps(run)
    assert flight.dumps == 4 and "Rank 2 has not called" in report.verdict
    assert report.time or report.step is not None  # the run itself is analysed all the same


def test_many_dumps_are_not_measured_as_ranks(tmp_path: Path) -> None:
    ranks = [[make_entry("all_reduce", 1)] for _ in range(40)]
    ranks[7] = []
    ranks[7].append(make_entry("barrier", 1, state="scheduled"))
    _, flight = analyze_dumps(write_dumps(tmp_path / "d", *ranks))
    assert flight.dumps == 40 and flight.problems[0].ranks == [7]


def test_every_format_shows_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    case = str(CASES / "never_calls")
    for form in ("terminal", "markdown", "html", "json", "sarif", "agent"):
        assert cli.run(["analyze", case, "--format", form]) == 0
        assert "all_reduce" in capsys.readouterr().out, form
    assert cli.run(["analyze", case, "--format", "json", "--redact"]) == 0
    assert "/home/user" not in capsys.readouterr().out


# -- hostile ------------------------------------------------------------------------------------


class _RunsCode:
    def __reduce__(self) -> Any:
        return print, ("this must not be run",)


@pytest.mark.parametrize(
    "data",
    [
        pickle.dumps({"entries": _RunsCode(), "pg_config": {}}, protocol=2),
        pickle.dumps({"entries": [make_entry("all_reduce", 1)], "pg_config": {}}, protocol=2)[:-40],
        b'{"entries": [' + b"[" * 100_000,
        b'{"pg_config": 3, "entries": 7, "collective_seq_id": 1}',
        b'{"pg_config": {}, "collective_seq_id": 1',
    ],
    ids=["code", "cut off", "nested", "no list", "half"],
)
def test_hostile_dump_is_one_line_error(
    data: bytes, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "nccl_trace_rank_0"
    file.write_bytes(data)
    assert cli.run(["analyze", str(file)]) == 2
    captured = capsys.readouterr()
    assert captured.err.count("\n") == 1 and "must not be run" not in captured.out


def test_entries_of_any_other_type_are_counted_and_left_out(tmp_path: Path) -> None:
    strange: list[Any] = [
        7, None, [], make_entry("all_reduce", 1, process_group=5),
        make_entry("send x->y", 1, is_p2p=True),
        make_entry("all_reduce", 2, input_sizes=[[-1, "x"]], frames=[3, {"filename": 4}], state=8),
        make_entry("all_reduce", 1 << 70),
    ]  # fmt: skip
    _, flight = analyze_dumps(write_dumps(tmp_path / "d", strange, strange))
    assert flight.damaged == 10 and flight.calls == 4


def test_a_json_dump_reads_as_the_pickle_does(tmp_path: Path) -> None:
    calls = [make_entry("all_reduce", 1), make_entry("all_reduce", 2, state="scheduled")]
    dump = {"version": "2.9", "entries": calls, "pg_config": {}}
    (tmp_path / "rank0.json").write_text(json.dumps(dump))
    (tmp_path / "rank1.json").write_text(json.dumps({**dump, "entries": calls[:1]}))
    _, flight = analyze_dumps(tmp_path)
    assert flight.problems[0].ranks == [1]
    assert flight.problems[0].calls[0].where is not None
