"""Session of a dashboard: paths are read once, in a thread, with their progress."""

from __future__ import annotations

import json
import re
import shutil
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

pytest.importorskip("dash")

from plotly.utils import PlotlyJSONEncoder

from advisor.advise.engine import analyze, analyze_in_full
from advisor.cli.dashboard import EDITOR, parse_editor
from advisor.core import text as t
from advisor.core.errors import AdvisorError
from advisor.core.finding import Location
from advisor.core.report_steps import StepTime
from advisor.core.run_directory import MANIFEST, STEPS, Manifest, StepRow
from advisor.dashboard import loaded_runs
from advisor.dashboard.app import create_app
from advisor.dashboard.components import editor_href
from advisor.dashboard.live_run import Follower
from advisor.dashboard.loaded_runs import DashboardSession, OpenedPath, recording_fingerprint
from advisor.dashboard.page_view import describe_missing
from advisor.dashboard.pages import kernels, runs
from advisor.dashboard.server import Access
from advisor.measure.steps.run_steps import RunSummary
from advisor.testing import TraceBuilder
from tests.dashboard import run_by_hand as recorded


@pytest.fixture
def slow_loader_trace(tmp_path: Path) -> str:
    return str(recorded.slow_loader().write(tmp_path / "slow.json"))


def is_true_within(check: Callable[[], bool], seconds: float = 30) -> bool:
    deadline = time.monotonic() + seconds
    while not check() and time.monotonic() < deadline:
        time.sleep(0.02)
    return check()


def test_the_report_equals_that_of_analyze(slow_loader_trace: str) -> None:
    session = DashboardSession([slow_loader_trace]).load()
    loaded = session.entries[0].loaded
    assert loaded is not None
    assert loaded.report.to_dict() == analyze(slow_loader_trace).to_dict()


def test_paths_are_read_after_start_and_not_before(slow_loader_trace: str) -> None:
    session = DashboardSession([slow_loader_trace])
    assert session.entries[0].state == "loading"
    assert not session.status()["done"]
    session.start()
    assert session.wait(60)
    assert session.entries[0].state == "ready"
    assert session.status()["done"]


def test_a_path_that_cannot_be_read_does_not_affect_the_others(
    slow_loader_trace: str, tmp_path: Path
) -> None:
    bad = tmp_path / "bad.json"
    bad.write_text("{")
    session = DashboardSession([str(bad), slow_loader_trace, str(tmp_path / "nowhere")]).load()
    assert [entry.state for entry in session.entries] == ["failed", "ready", "failed"]
    assert all("\n" not in entry.failure_reason for entry in session.entries)
    assert isinstance(session.comparison("0", "1"), str)


def test_a_run_is_identified_by_its_number_and_never_by_its_path(slow_loader_trace: str) -> None:
    session = DashboardSession([slow_loader_trace, slow_loader_trace]).load()
    for key in (None, "", "7", slow_loader_trace, "/etc/passwd", "../1"):
        assert session.entry(key) is session.entries[0]
    assert session.entry("1") is session.entries[1]


def test_the_first_path_is_compared_with_each_of_the_others(slow_loader_trace: str) -> None:
    session = DashboardSession([slow_loader_trace, slow_loader_trace, slow_loader_trace]).load()
    assert session.pairs == [("0", "1"), ("0", "2")]
    for pair in session.pairs:
        comparison = session.comparison(*pair)
        assert comparison is not None and not isinstance(comparison, str)
        assert comparison.steps.difference_ns == 0


def test_a_table_is_computed_once_for_several_threads(slow_loader_trace: str) -> None:
    loaded = DashboardSession([slow_loader_trace]).load().entries[0].loaded
    assert loaded is not None
    calls: list[int] = []

    def compute() -> int:
        calls.append(1)
        time.sleep(0.05)
        return len(calls)

    results: list[int] = []
    threads = [
        threading.Thread(target=lambda: results.append(loaded.get_or_compute("x", compute)))
        for _ in range(8)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == [1] * 8
    assert len(calls) == 1


def test_large_tables_are_computed_before_the_run_is_shown(slow_loader_trace: str) -> None:
    session = DashboardSession([slow_loader_trace])
    create_app(session, Access())
    loaded = session.load().entries[0].loaded
    assert loaded is not None
    for key in (("op_tree", None), ("op_rows", None), ("kernel_rows", None)):
        loaded.get_or_compute(key, lambda: pytest.fail("computed during a request"))


def test_layers_are_drawn_if_modules_were_recorded() -> None:
    b = TraceBuilder()
    with b.step():
        with b.python("nn.Module: <img src=x>_0"):
            b.run("aten::mm", "gemm", 100)
        b.sync()
    a = b.analysis()
    view: Any = SimpleNamespace(
        analysis=a, rank=None, loaded=SimpleNamespace(get_or_compute=lambda key, make: make())
    )
    cards = json.dumps(
        [card.to_plotly_json() for card in kernels._layer_cards(view)], cls=PlotlyJSONEncoder
    )
    texts = re.findall(r'"children": ("[^"]*")', cards)
    assert [json.loads(text) for text in texts[:9]] == [
        "GPU time by layer, per step", "Layer", "Calls", "Time", "Share",
        "<img src=x>_0", "1", "100 µs", "100%",
    ]  # fmt: skip
    assert '"By kind of module"' in texts
    view.analysis = SimpleNamespace(layers=None)
    assert kernels._layer_cards(view) == []


# -- a run that is going on ----------------------------------------------------------------------


def test_findings_appear_when_a_window_is_written(tmp_path: Path) -> None:
    run = recorded.write_run(tmp_path / "run", end=False)
    window = run / "rank0" / "trace_w0.json.gz"
    moved_window = tmp_path / "trace"
    shutil.move(window, moved_window)
    session = DashboardSession([str(run)], is_live=True)
    session.start()
    try:
        assert session.wait(60)
        entry = session.entries[0]
        version_before = entry.version
        assert entry.loaded is None or entry.loaded.report.scope.step_source == "record"
        shutil.move(moved_window, window)
        assert is_true_within(lambda: entry.version > version_before)
        assert entry.loaded is not None
        assert entry.loaded.report.scope.step_source == "ProfilerStep"
        assert entry.loaded.report.findings[0].category == "input"
    finally:
        session.close()


def test_a_folder_is_read_when_it_becomes_a_run(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    folder.mkdir()
    session = DashboardSession([str(folder)], is_live=True)
    session.start()
    try:
        assert session.wait(60)
        assert session.entries[0].state == "failed"
        run = recorded.write_run(tmp_path / "other")
        shutil.copytree(run, folder, dirs_exist_ok=True)
        assert is_true_within(lambda: session.entries[0].state == "ready")
    finally:
        session.close()


def test_many_new_steps_change_the_fingerprint_only_without_a_window(tmp_path: Path) -> None:
    run = recorded.write_run(tmp_path / "run")
    steps = run / "rank0" / "steps.jsonl"
    with_window = recording_fingerprint(str(run))
    steps.write_bytes(steps.read_bytes() * 20)
    assert recording_fingerprint(str(run)) == with_window
    (run / "rank0" / "trace_w0.json.gz").unlink()
    few = recording_fingerprint(str(run))
    steps.write_bytes(steps.read_bytes() * 20)
    assert recording_fingerprint(str(run)) != few


def test_a_follower_reads_appended_lines_and_skips_partial_ones(tmp_path: Path) -> None:
    run = recorded.write_run(tmp_path / "run", steps=30)
    file = run / "rank0" / "steps.jsonl"
    lines = file.read_bytes().splitlines(keepends=True)
    file.write_bytes(b"".join(lines[:10]) + lines[10][:7])
    follower = Follower(str(run))
    assert follower.ranks() == [0]
    record = follower.read(0)
    assert record is not None and len(record.steps) == 10
    with file.open("ab") as stream:
        stream.write(lines[10][7:] + b"garbage\n" + b"".join(lines[11:]))
    record = follower.read(0)
    assert record is not None
    assert [step.n for step in record.steps] == list(range(30))
    assert follower.read(3) is None


def test_the_live_page_shows_the_last_step(tmp_path: Path) -> None:
    run = recorded.write_run(tmp_path / "run", steps=50, end=False)
    session = DashboardSession([str(run)], is_live=True).load()
    app = create_app(session, Access())
    client = app.server.test_client()
    client.get("/")
    body = {
        "output": "..live-body.children...live-tick.disabled..",
        "outputs": [
            {"id": "live-body", "property": "children"},
            {"id": "live-tick", "property": "disabled"},
        ],
        "inputs": [{"id": "live-tick", "property": "n_intervals", "value": 1}],
        "state": [{"id": "_pages_location", "property": "search", "value": "?rank=../0"}],
        "changedPropIds": ["live-tick.n_intervals"],
    }
    response = client.post("/_dash-update-component", json=body)
    assert response.status_code == 200
    outputs = response.json["response"]
    assert outputs["live-tick"]["disabled"] is False
    assert '"50"' in response.text
    assert "running" in response.text


def _write_runs(folder: Path, medians: list[int]) -> list[str]:
    """Write runs of 30 steps with these step times, ns. Return their paths, newest first."""
    for day, dur in enumerate(medians):
        rank = folder / f"2026-11-{day + 1:02}" / "rank0"
        rank.mkdir(parents=True)
        manifest = Manifest(
            started_unix_ns=(20_000 + day) * 86_400 * 10**9,
            git_commit=f"{day:040}",
            git_dirty=day == 1,
            command=["python", "train.py"],
        )
        (rank.parent / MANIFEST).write_bytes(msgspec.json.encode(manifest))
        lines = [msgspec.json.encode(StepRow(n=n, t=n * dur, dur=dur)) for n in range(30)]
        (rank / STEPS).write_bytes(b"\n".join(lines) + b"\n")
        recorded.slow_loader().write(rank / "trace_w0.json")
    return sorted(map(str, folder.iterdir()), reverse=True)


def test_the_newest_runs_of_a_folder_are_read_at_once_and_others_on_request(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loaded_runs, "MAX_OPEN_RUNS", 1)
    paths = _write_runs(tmp_path / "runs", [4_000_000, 3_000_000, 2_000_000])
    session = DashboardSession(paths, folder=str(tmp_path / "runs")).start()
    newest, middle, oldest = session.entries
    assert is_true_within(lambda: middle.state == "ready" and oldest.summary is not None)
    assert newest.state == "ready" and oldest.state == "unread"
    assert [e.step.ns for e in session.entries if e.step] == [2e6, 3e6, 4e6]
    assert middle.summary is not None and middle.summary.commit == "0000000000+"
    assert is_true_within(lambda: session.pairs == [("1", "0")]) and session.status()["done"]
    client = create_app(session, Access()).server.test_client()
    assert client.get("/runs").status_code == 200

    assert session.entry("2") is oldest  # requested: it is read, and the other one is closed
    assert is_true_within(lambda: oldest.state == "ready" and ("2", "0") in session.pairs)
    assert middle.state == "unread" and middle.loaded is None and middle.verdict
    session.close()


def test_the_runs_page_lists_steps_commits_and_verdicts(
    tmp_path: Path, serve_session: Any, open_tab: Any
) -> None:
    folder = tmp_path / "runs"
    paths = _write_runs(folder, [4_000_000, 3_000_000])
    session = DashboardSession(paths, folder=str(folder)).start()
    assert is_true_within(lambda: all(entry.state == "ready" for entry in session.entries))
    with serve_session(session) as dashboard:
        tab = open_tab(dashboard)
        page = tab.open("/runs")
        findings, runs = page.locator("table.data").all()
        assert "The DataLoader has no workers" in findings.inner_text()
        report = session.entries[0].loaded.report
        assert t.format_saving(report.findings[0].impact) in findings.inner_text()
        rows = runs.locator("tbody tr").all_inner_texts()
        assert "3 ms" in rows[0] and "0000000000+" in rows[0]
        assert "4 ms" in rows[1] and session.entries[1].verdict[:20] in rows[1]
        page.set_viewport_size({"width": 1024, "height": 900})
        box = page.locator(".scroll").last
        assert box.evaluate("box => box.scrollWidth - box.clientWidth") <= 0
        page.set_viewport_size({"width": 1440, "height": 900})
        assert "−25.0%" in rows[0] and "%" not in rows[1].split("4 ms")[1][:4]
        page.locator("td a").nth(1).click()
        page.wait_for_url("**/?run=1")
        page.locator("header .run-name", has_text="2026-11-01").first.wait_for()
        assert tab.problems == []


@pytest.mark.parametrize("name", ["wide_embedding", "ads_ranker", "decode_batch1"])
def test_the_step_time_in_a_list_of_runs_equals_that_of_the_report(
    name: str, shared_file: Any
) -> None:
    """The step time of the first run is not measured, because the host runs ahead. The second run
    uses the mean of its steps, the third one the median."""
    path = shared_file(f"h100/{name}")
    report = analyze_in_full(path).report
    step = RunSummary.read(path).step
    assert (step and step.reference_ns) == (report.step and report.step_ns)


def _unread_run(program: str, ns: float | None, **fields: Any) -> OpenedPath:
    step = None if ns is None else StepTime(ns=ns, mean_ns=ns)
    summary = RunSummary(0, f"python {program}", "", 1, 30, program, step)
    return OpenedPath("0", program, summary=summary, step=step, **fields)


def test_step_times_are_compared_only_within_a_program_and_if_measured() -> None:
    entries = [_unread_run("a.py", 2e6), _unread_run("a.py", 4e6), _unread_run("b.py", 1e6)]
    assert [runs._table_row(entries, i)[4] for i in range(3)] == ["−50.0%", "–", "–"]
    assert "Step time of a.py" in str(runs._history_card(entries))
    partly_measured = [_unread_run("a.py", 2e6), _unread_run("a.py", None, verdict="GPU busy")]
    assert "not measured" in str(runs._table_row(partly_measured, 1)[3])
    assert (
        runs._table_row(partly_measured, 0)[4] == "–"
        and runs._history_card(partly_measured) is None
    )
    assert "not read yet" in str(runs._table_row([_unread_run("a.py", None)], 0)[3])


def test_a_list_of_runs_omits_columns_without_differences() -> None:
    entries = [_unread_run("a.py", 2e6), _unread_run("a.py", 4e6)]
    rows = [runs._table_row(entries, i) for i in range(2)]
    header, kept_rows = runs._drop_empty_columns(rows)
    assert header == ["Run", "Started", "Step", "Change", "Steps", "Verdict and program"]
    assert [len(row) for row in kept_rows] == [6, 6]
    rows[0][2], rows[1][6] = "0123abcd", "8"
    assert runs._drop_empty_columns(rows)[0] == list(runs.COLUMN_TITLES)


def test_programs_run_by_one_wrapper_are_distinguished(shared_file: Any) -> None:
    summaries = [
        RunSummary.read(shared_file(f"h100/{name}")) for name in ("blocking_upload", "ping_pong")
    ]
    assert summaries[0].program != summaries[1].program and summaries[0].program.endswith(
        "blocking_upload.py"
    )


def test_a_place_links_to_the_editor_only_if_its_file_exists(tmp_path: Path) -> None:
    file = tmp_path / 'my "model".py'
    file.write_text("x = 1\n")
    template = "vscode://file{file}:{line}"
    address = editor_href(template, Location(file=str(file), line=7))
    assert address == f"vscode://file{tmp_path}/my%20%22model%22.py:7"
    assert editor_href("", Location(file=str(file), line=7)) is None
    assert editor_href(template, Location(file=str(file))) is None
    for other in (tmp_path / "gone.py", tmp_path, "/etc/passwd", "a\0b.py"):
        assert editor_href(template, Location(file=str(other), line=1)) is None


@pytest.mark.parametrize(
    "address", ["javascript://{file}", "data:{file}", "vscode://file", "x y://{file}"]
)
def test_an_invalid_editor_address_is_refused(address: str) -> None:
    with pytest.raises(AdvisorError, match="--editor"):
        parse_editor(address)
    assert parse_editor("off") == "" and parse_editor(EDITOR) == EDITOR


def test_a_page_reports_an_unknown_run_or_rank_in_its_address() -> None:
    entry = SimpleNamespace(
        key="0", name="train", loaded=SimpleNamespace(analyses={0: None, 1: None})
    )
    view: Any = SimpleNamespace(entry=entry, rank=None)
    assert describe_missing(view) == "" and describe_missing(view, run="0", rank="") == ""
    assert "no run 999 here" in describe_missing(view, run="999")
    assert "no rank 99 here" in describe_missing(view, rank="99")
    assert describe_missing(view, view="5", rank="1" * 90).count("1") == 40
    entry.loaded.analyses.pop(1)
    assert describe_missing(view, rank="0") == ""  # a link to the only rank is valid
