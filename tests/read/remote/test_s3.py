"""A run in an S3 server: read whole, in part, and with what goes wrong on the way."""

from __future__ import annotations

import gzip
import os
import pickle
import re
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import advisor
from advisor.advise.ranks.job import locate_traces
from advisor.cli import run as advisor_cli
from advisor.core.errors import AdvisorError
from advisor.read import ReadOptions, open_run
from advisor.read.remote import filesystem
from advisor.read.remote.fetch import open_locally
from tests.read.remote.faulty import Fault


@pytest.fixture
def scratch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Folder of temporary files in this test."""
    folder = tmp_path / "scratch"
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    return folder


def test_a_folder_is_a_run_of_its_ranks(
    s3: Any, trace_bytes: Callable[[int], bytes], scratch: Path
) -> None:
    for rank in (0, 1, 11):
        s3.store(f"job/rank{rank}.json.gz", gzip.compress(trace_bytes(rank)))
    s3.store("job/.rank3.json", b"an editor's copy")
    s3.store("job/notes.txt", b"not a trace")
    run = open_run("s3://run/job")
    assert run.ranks == [0, 1, 11]
    assert run.traces[11, 0].meta.path == "s3://run/job/rank11.json.gz"
    assert run.problems == ()
    assert list(scratch.iterdir()) == []


def test_local_and_remote_file_give_the_same_report(
    s3: Any, trace_bytes: Callable[[int], bytes], tmp_path: Path
) -> None:
    local_file = tmp_path / "rank0.json"
    local_file.write_bytes(trace_bytes(0))
    url = s3.store("one/rank0.json", trace_bytes(0))
    there_report, here_report = advisor.analyze(url), advisor.analyze(local_file)
    assert there_report.inputs[0].path == url
    there_report.inputs[0].path = here_report.inputs[0].path
    assert there_report.to_json() == here_report.to_json()


def test_globs_and_ranks_choose_before_anything_is_fetched(
    s3: Any, trace_bytes: Callable[[int], bytes]
) -> None:
    for rank in range(6):
        s3.store(f"many/rank_{rank}/trace.json", trace_bytes(rank))
    s3.state.requests.clear()
    run = open_run("s3://run/many", ReadOptions(ranks="1-2,5"))
    assert run.ranks == [1, 2, 5]
    fetched = {name for name in s3.state.requests if name.startswith("GET /run/many/")}
    assert fetched == {f"GET /run/many/rank_{rank}/trace.json" for rank in (1, 2, 5)}
    globbed = locate_traces(["s3://run/many/rank_[03]/*.json"])
    assert [(one.rank, one.url) for one in globbed] == [
        (0, "s3://run/many/rank_0/trace.json"),
        (3, "s3://run/many/rank_3/trace.json"),
    ]
    assert globbed[0].size == len(trace_bytes(0))
    assert [one.rank for one in locate_traces(["s3://run/many"], "4-5")] == [4, 5]
    for pattern, ranks in {
        "many/rank_[03]": [0, 3],
        "many/rank_[03]/": [0, 3],
        "many/**": [0, 1, 2, 3, 4, 5],
        "many/*": [0, 1, 2, 3, 4, 5],
        "ma*/rank_?/trace.json": [0, 1, 2, 3, 4, 5],
        "*/rank_1/*": [1],
        "**/rank_2/*.json": [2],
    }.items():
        assert [one.rank for one in locate_traces([f"s3://run/{pattern}"])] == ranks, pattern
    with pytest.raises(AdvisorError, match="no trace there"):
        locate_traces(["s3://run/many/rank_*.json"])
    with pytest.raises(AdvisorError, match=r"ranks present: 0, 1, 2, 3, 4, 5"):
        locate_traces(["s3://run/many"], "77")


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        (Fault(status=404), "no such file"),
        (Fault(status=403), "access denied"),
        (Fault(status=503), "the server answers 503"),
        (Fault(cut=True), "breaks off|cut off|in time"),
    ],
    ids=["missing", "denied", "unavailable", "cut"],
)
def test_unreadable_rank_is_reported_beside_the_others_results(
    s3: Any,
    trace_bytes: Callable[[int], bytes],
    scratch: Path,
    monkeypatch: pytest.MonkeyPatch,
    fault: Fault,
    message: str,
) -> None:
    monkeypatch.setattr(filesystem, "ATTEMPTS", 2)
    for rank in range(3):
        s3.store(f"hurt/rank{rank}.json", trace_bytes(rank))
    s3.state.faults["hurt/rank1.json"] = fault
    run = open_run("s3://run/hurt/")
    assert run.ranks == [0, 2]
    (problem,) = run.problems
    assert problem.startswith("s3://run/hurt/rank1.json: ")
    assert re.search(message, problem)
    assert list(scratch.iterdir()) == []


def test_a_transient_fault_is_read_after_another_attempt(
    s3: Any, trace_bytes: Callable[[int], bytes]
) -> None:
    url = s3.store("once/rank0.json", trace_bytes(0))
    s3.state.faults["once/rank0.json"] = Fault(status=503, times=2)
    assert open_run(url).ranks == [0]
    assert s3.state.done["once/rank0.json"] > 2


def test_no_such_bucket_is_reported(s3: Any) -> None:
    with pytest.raises(AdvisorError, match=r"^s3://nowhere/a\.json: no such (bucket|file)"):
        open_run("s3://nowhere/a.json")


def test_no_credentials_are_reported(
    monkeypatch: pytest.MonkeyPatch, s3: Any, tmp_path: Path
) -> None:
    import s3fs

    url = s3.store("a.json", b"{}")
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "none"))
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "none"))
    s3fs.S3FileSystem.clear_instance_cache()
    with pytest.raises(AdvisorError, match=r"a\.json: (no credentials|access denied)"):
        open_run(url)


def test_the_command_line_analyzes_and_compares_urls(
    s3: Any, trace_bytes: Callable[[int], bytes], capsys: pytest.CaptureFixture[str]
) -> None:
    one, other = (s3.store(f"{name}/rank0.json", trace_bytes(0)) for name in ("before", "after"))
    assert advisor_cli(["analyze", one, "--format", "json"]) == 0
    assert f'"path":"{one}"' in capsys.readouterr().out.replace('": "', '":"')
    assert advisor_cli(["compare", one, other]) == 0
    capsys.readouterr()
    assert advisor_cli(["whatif", one, "--edit", "scale kernel:gemm 0.5"]) == 0
    capsys.readouterr()
    assert advisor_cli(["analyze", "s3://run/none.json"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "s3://run/none.json: no such file" in line


def test_sources_can_be_handed_to_another_process(
    s3: Any, trace_bytes: Callable[[int], bytes]
) -> None:
    s3.store("picklable/rank4.json", trace_bytes(4))
    (source,) = pickle.loads(pickle.dumps(locate_traces(["s3://run/picklable"])))
    with open_locally(source) as path:
        assert path.name == "rank4.json"
        assert path.read_bytes() == trace_bytes(4)
    assert not path.exists()
    assert not os.path.lexists(path.parent)


def test_other_commands_accept_or_refuse_urls(
    s3: Any,
    trace_bytes: Callable[[int], bytes],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    url = s3.store("b/rank0.json", trace_bytes(0))
    baseline = tmp_path / "baseline.json"
    assert advisor_cli(["report", url, "--html", str(tmp_path / "a.html")]) == 0
    assert "rank0.json" in (tmp_path / "a.html").read_text()
    assert advisor_cli(["gate", url, "--save", str(baseline)]) == 0
    assert advisor_cli(["gate", str(baseline), url]) == 0
    assert "no such file" not in capsys.readouterr().err
    assert advisor_cli(["export", url, "--perfetto", str(tmp_path / "out.json")]) == 2
    assert advisor_cli(["dashboard", url]) == 2
    refused = capsys.readouterr().err.splitlines()
    assert [line.partition(f"{url}: ")[2] for line in refused] == [
        "export reads a trace twice; download it first",
        "the dashboard fetches nothing; download it, or open a job's report that advisor analyze "
        "--format json --output writes",
    ]
