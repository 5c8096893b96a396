"""Files on a web server: with ranges and without, listed, packed, signed, and in trouble."""

from __future__ import annotations

import gzip
import json
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

import advisor
from advisor.core.errors import AdvisorError
from advisor.read import open_run
from advisor.read.remote import fetch, filesystem
from advisor.read.remote.fetch import open_locally
from advisor.read.remote.places import find_files
from advisor.read.remote.urls import RemoteFile
from tests.read.remote.faulty import Fault, Server

Made = Callable[[int], bytes]
BIG = bytes(range(256)) * 4096 * 20  # 20 MiB: five blocks
DEADLINE = 60.0


def all_names(names: list[str]) -> list[str]:
    return names


def read(url: str, **options: float) -> bytes:
    (source,) = find_files(url, all_names)
    with open_locally(source, **options) as path:  # type: ignore[arg-type]
        return path.read_bytes()


def refusal(url: str, **options: float) -> str:
    """The line of the error that reading raises."""
    with pytest.raises(AdvisorError) as caught:
        read(url, **options)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_a_trace_is_read_from_a_web_server(web: Server, trace_bytes: Made) -> None:
    web.state.files["/run/rank3.json.gz"] = gzip.compress(trace_bytes(3))
    run = open_run(f"{web.url}/run/rank3.json.gz")
    assert run.ranks == [3]
    assert run.traces[3, 0].meta.path == f"{web.url}/run/rank3.json.gz"


def test_a_response_that_comes_byte_by_byte_is_given_up(
    web: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(filesystem, "ATTEMPTS", 1)
    web.state.files["/a.json"] = b"{}" * 10_000
    web.state.faults["a.json"] = Fault(drip=True, heads=False)
    for web.state.ranges in (True, False):
        assert "no answer in time" in refusal(f"{web.url}/a.json", timeout=1.0)


def test_repeatedly_interrupted_stream_is_given_up(web: Server) -> None:
    web.state.files["/a.json"] = b"{}" * 500_000
    web.state.ranges = False
    web.state.faults["a.json"] = Fault(further=True, heads=False)
    assert "(4 attempts)" in refusal(f"{web.url}/a.json")
    assert web.state.requests["GET /a.json"] == 4


@pytest.mark.parametrize("ranges", [True, False], ids=["with ranges", "without"])
def test_all_blocks_of_a_file_come_in_order(web: Server, ranges: bool) -> None:
    web.state.files["/big.json"] = BIG
    web.state.ranges = ranges
    assert read(f"{web.url}/big.json") == BIG
    # blocks of 4 MiB each, or all at once
    assert (web.state.requests["GET /big.json"] == 5) is ranges


def test_a_server_that_does_not_know_how_long_a_file_is(web: Server) -> None:
    web.state.files["/big.json"] = BIG
    web.state.lengths = False
    assert read(f"{web.url}/big.json") == BIG
    assert "larger than 1 MB" in refusal(f"{web.url}/big.json", max_bytes=10**6)


def test_an_interrupted_download_continues_where_it_was(web: Server) -> None:
    web.state.files["/big.json"] = BIG
    web.state.faults["big"] = Fault(cut=True, times=2, heads=False)
    assert read(f"{web.url}/big.json") == BIG
    assert web.state.requests["GET /big.json"] == 5 + 2  # each of two blocks again, no more


def test_an_interrupted_download_without_ranges_starts_again(web: Server) -> None:
    web.state.files["/big.json"] = BIG
    web.state.ranges = False
    web.state.faults["big"] = Fault(cut=True, times=2, heads=False)
    assert read(f"{web.url}/big.json") == BIG
    assert web.state.requests["GET /big.json"] == 3


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        (Fault(status=404), "no such file; check the URL"),
        (Fault(status=410), "no such file; check the URL"),
        (Fault(status=401), "access denied (401)"),
        (Fault(status=403), "access denied (403)"),
        (Fault(status=429), "the server answers 429; try again later (2 attempts)"),
        (Fault(status=503), "the server answers 503; try again later (2 attempts)"),
        (Fault(cut=True), "the connection fails or breaks off; try again later (2 attempts)"),
        (Fault(hang=True, heads=False), "no answer in time; try again later (2 attempts)"),
    ],
    ids=["missing", "gone", "unknown", "denied", "many", "unavailable", "cut", "slow"],
)
def test_each_download_problem_is_one_line_error(
    web: Server, monkeypatch: pytest.MonkeyPatch, fault: Fault, message: str
) -> None:
    monkeypatch.setattr(filesystem, "ATTEMPTS", 2)
    web.state.files["/a.json"] = b"{}" * 1000
    web.state.faults["a.json"] = fault
    seconds = {"timeout": 1.0} if fault.hang else {}
    line = refusal(f"{web.url}/a.json", **seconds)
    assert line.startswith(f"{web.url}/a.json: {message}")


def test_a_slow_rank_is_reported_and_the_rest_stands(
    web: Server, trace_bytes: Made, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(filesystem, "ATTEMPTS", 1)
    monkeypatch.setattr(filesystem, "TIMEOUT", 8.0)  # the other ranks are read on a busy machine
    for rank in range(3):
        web.state.files[f"/run/rank{rank}.json"] = trace_bytes(rank)
    links = "".join(f'<a href="rank{rank}.json">{rank}</a>' for rank in range(3))
    web.state.files["/run/"] = f"<html>{links}</html>".encode()
    web.state.faults["rank1"] = Fault(hang=True, heads=False)
    run = open_run(f"{web.url}/run/")
    assert run.ranks == [0, 2]
    assert [line.partition(": ")[2] for line in run.problems] == [
        "no answer in time; try again later"
    ]


def test_unreachable_server_is_reported(monkeypatch: pytest.MonkeyPatch, web: Server) -> None:
    monkeypatch.setattr(filesystem, "ATTEMPTS", 2)
    with Server(web.state) as other:
        url = other.url
    web.state.over.clear()
    assert "the connection fails" in refusal(f"{url}/a.json")


def test_a_file_that_changes_meanwhile_is_not_believed(
    web: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    web.state.files["/a.json"] = BIG
    (source,) = find_files(f"{web.url}/a.json", all_names)
    write = fetch._Transfer._write_block

    def write_changed(self: object, out: object, block: bytes) -> None:
        web.state.etags["/a.json"] = '"2"'
        write(self, out, block)  # type: ignore[arg-type]

    monkeypatch.setattr(fetch._Transfer, "_write_block", write_changed)
    with pytest.raises(AdvisorError, match="changed while it was read"), open_locally(source):
        pass


def test_only_files_below_a_listed_folder_are_fetched(web: Server) -> None:
    web.state.files |= {
        "/run/": b"""<a href="?C=N;O=D">name</a> <a href="../">up</a> <a href="/run/a.json">a</a>
            <a href="/secret.json">s</a> <a href="../../secret.json">s</a>
            <a href="http://169.254.169.254/meta.json">m</a> <a href="sub/">sub</a>
            <a href=".hidden.json">h</a> <a href="/run/">itself</a>""",
        "/run/sub/": b'<a href="b.json">b</a> <a href="../">up</a> <a href="/">top</a>',
        "/secret.json": b"{}",
    }
    files = find_files(f"{web.url}/run/", all_names)
    assert [one.url for one in files] == [f"{web.url}/run/a.json", f"{web.url}/run/sub/b.json"]
    assert not any("secret" in request for request in web.state.requests)
    for pattern in ("*/*.json", "s*", "s*/"):
        (deep,) = find_files(f"{web.url}/run/{pattern}", all_names)
        assert deep.url == f"{web.url}/run/sub/b.json"


def test_a_page_in_place_of_a_trace_is_reported(web: Server) -> None:
    web.state.files["/login.json"] = b"<!doctype html><html><body>Log in</body></html>"
    with pytest.raises(AdvisorError) as caught:
        open_run(f"{web.url}/login.json")
    assert str(caught.value).startswith(f"{web.url}/login.json: ")
    assert "a web page" in str(caught.value)


def test_a_signature_is_never_shown(
    web: Server, trace_bytes: Made, capsys: pytest.CaptureFixture[str]
) -> None:
    from advisor.cli import run as advisor_cli

    web.state.files["/rank0.json"] = trace_bytes(0)
    address = web.url.removeprefix("http://")
    signed = f"http://me:pass1234@{address}/rank0.json?X-Amz-Signature=abcdef0123456789"
    report = advisor.analyze(signed)
    assert report.inputs[0].path == f"{web.url}/rank0.json"
    assert advisor_cli(["analyze", signed]) == 0
    assert advisor_cli(["analyze", signed.replace("rank0", "none")]) == 2
    web.state.files["/bad.json"] = b"not a trace"
    assert advisor_cli(["analyze", signed.replace("rank0", "bad")]) == 2
    captured = capsys.readouterr()
    assert web.url in captured.err
    assert (
        re.search("abcdef|pass1234|Signature", report.to_json().decode() + "".join(captured))
        is None
    )
    assert "abcdef" not in repr(find_files(signed, all_names))


def test_a_file_over_the_bound_is_refused_before_it_is_fetched(web: Server) -> None:
    web.state.files["/a.json"] = BIG
    assert "larger than 1 MB" in refusal(f"{web.url}/a.json", max_bytes=10**6)
    assert web.state.requests["GET /a.json"] == 0
    web.state.ranges = False
    assert "larger than 1 MB" in refusal(f"{web.url}/a.json", max_bytes=10**6)


def test_a_full_disk_is_reported(web: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    web.state.files["/a.json"] = BIG
    monkeypatch.setattr(fetch, "ROOM_LEFT", 1 << 60)
    assert "name a larger disk in TMPDIR" in refusal(f"{web.url}/a.json")


def test_reader_error_leaves_no_temporary_files(web: Server, tmp_path: Path) -> None:
    web.state.files["/a.json"] = b"{}"
    source = RemoteFile(url="a", at=f"{web.url}/a.json")
    with pytest.raises(ZeroDivisionError), open_locally(source, folder=tmp_path) as path:
        assert path.parent.parent == tmp_path
        raise ZeroDivisionError
    assert list(tmp_path.iterdir()) == []


@pytest.mark.skipif(sys.platform == "win32", reason="signals")
def test_interrupt_leaves_no_temporary_files(web: Server, tmp_path: Path) -> None:
    web.state.files["/a.json"] = BIG
    web.state.faults["a.json"] = Fault(hang=True, heads=False)
    program = subprocess.Popen(
        [sys.executable, "-m", "advisor", "analyze", f"{web.url}/a.json"],
        env={"TMPDIR": str(tmp_path), "PATH": "", "NO_PROXY": "*"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    end = time.monotonic() + DEADLINE
    while not web.state.requests["GET /a.json"] and time.monotonic() < end:
        time.sleep(0.05)
    assert len(list(tmp_path.glob("advisor-*"))) == 1
    program.send_signal(signal.SIGINT)
    output, _ = program.communicate(timeout=DEADLINE)
    assert (program.returncode, output) == (130, b"")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.skipif(sys.platform == "win32", reason="signals")
def test_files_of_a_killed_process_are_removed_next_time(
    web: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    web.state.files |= {"/a.json": BIG, "/b.json": b"{}"}
    web.state.faults["a.json"] = Fault(hang=True, heads=False)
    program = subprocess.Popen(
        [sys.executable, "-m", "advisor", "analyze", f"{web.url}/a.json"],
        env={"TMPDIR": str(tmp_path), "PATH": "", "NO_PROXY": "*"},
    )
    try:
        end = time.monotonic() + DEADLINE
        while not web.state.requests["GET /a.json"] and time.monotonic() < end:
            time.sleep(0.05)
        (leftover,) = tmp_path.iterdir()
        monkeypatch.setattr("advisor.core.files.MIN_AGE_SECONDS", 0.0)
        source = RemoteFile(url="b", at=f"{web.url}/b.json")
        with open_locally(source, folder=tmp_path):
            assert leftover.exists()  # its process is there
    finally:
        program.kill()
        program.wait(DEADLINE)
    with open_locally(source, folder=tmp_path) as path:
        assert list(tmp_path.iterdir()) == [path.parent]


FETCH = """
import resource, sys, json
from advisor.read.remote.fetch import open_locally
from advisor.read.remote.places import find_files
def get(url):
    (source,) = find_files(url, lambda names: names)
    with open_locally(source) as path:
        return path.stat().st_size
def peak():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
get(sys.argv[1])  # what libraries take
before = peak()
size = get(sys.argv[2])
print(json.dumps([size, peak() - before]))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="ru_maxrss in kB")
@pytest.mark.parametrize("ranges", [True, False], ids=["with ranges", "without"])
def test_a_large_file_never_is_in_memory(web: Server, tmp_path: Path, ranges: bool) -> None:
    web.state.ranges = ranges
    web.state.files |= {"/small.json": BIG, "/large.json": b"\0" * 300_000_000}
    result = subprocess.run(
        [sys.executable, "-c", FETCH, f"{web.url}/small.json", f"{web.url}/large.json"],
        env={"TMPDIR": str(tmp_path), "NO_PROXY": "*"},
        capture_output=True,
        text=True,
        check=True,
        timeout=300,
    )
    size, grown = json.loads(result.stdout)
    assert size == 300_000_000
    assert grown < 50_000_000
    assert list(tmp_path.iterdir()) == []


def test_url_like_path_is_not_fetched(
    web: Server, trace_bytes: Made, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from advisor.dashboard.loaded_runs import DashboardSession
    from advisor.mcp.answers import AllowedFolders
    from advisor.mcp.tools import Tools

    web.state.files["/rank0.json"] = trace_bytes(0)
    url = f"{web.url}/rank0.json"
    # a folder of that name, so that the path is there
    folder_like_url = tmp_path / "http:" / web.url.removeprefix("http://")
    folder_like_url.mkdir(parents=True)
    (folder_like_url / "rank0.json").write_bytes(b"not a trace")
    monkeypatch.chdir(tmp_path)
    session = DashboardSession([url]).load()
    assert session.entries[0].state == "failed"
    for path in (url, "s3://bucket/a.json", f"zip://a.json::{url}", f"file://{tmp_path}/x.json"):
        with pytest.raises(AdvisorError):
            Tools(AllowedFolders([tmp_path])).analyze(path)
        with pytest.raises(AdvisorError):
            Tools(AllowedFolders([tmp_path])).compare(path, path)
    assert not web.state.requests
