"""Page of a job: the map of its ranks, and ranks that are read when they are clicked."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
from msgspec import structs

from advisor.advise.ranks.job import MAX_RANKS_IN_MEMORY
from advisor.core.errors import AdvisorError
from advisor.core.ranks import MissingRanks, Outlier, RankLine, Ranks
from advisor.core.report import Report, Scope
from advisor.dashboard import loaded_runs
from advisor.dashboard.loaded_runs import DashboardSession, OpenedPath
from advisor.testing import TraceBuilder

HOSTILE = "<img src=x onerror=\"window.hit=1\">"  # fmt: skip
TIMEOUT_SECONDS = 60.0


def write_ranks(folder: Path, count: int) -> Path:
    """Write traces of ranks. Rank n computes for 900 + n µs."""
    folder.mkdir()
    for rank in range(count):
        b = TraceBuilder()
        for _ in range(2):
            with b.step(), b.op("aten::mm", [[512, 512], [512, 512]], "float"):
                b.launch("ampere_sgemm_128x64_nn", 900 + rank)
                b.sync()
        b.write(folder / f"rank{rank}.json")
    return folder


def write_report(folder: Path, count: int, *, hostile: str = "") -> Path:
    """Write a report of several ranks, of which rank 3 computes longest."""
    lines = [
        RankLine(
            rank=rank,
            step_ns=1e6,
            busy_share=None,
            communication_ns=None,
            idle_ns=None,
            host=f"node-{rank // 8}{hostile}",
            path=str(folder / f"rank{rank}.json"),
            time=[(900 + 400 * (rank == 3)) * 1e3, 1e4],
        )
        for rank in range(count)
    ]
    outlier = Outlier(
        unit="rank", name="3", ranks="3", kind="compute", moves=False, excess_ns=4e5, reason=hostile
    )
    ranks = Ranks(
        lines=lines,
        aligned=False,
        alignment_error_ns=None,
        note=f"somewhere{hostile}",
        world=count,
        classes=["compute", f"idle{hostile}"],
        outliers=[outlier],
        missing=[MissingRanks(ranks="99", count=1, why=f"gone{hostile}")],
    )
    scope = Scope(
        rank=0,
        step_source="ProfilerStep",
        steps_found=2,
        steps_used=2,
        outliers=[],
        span_ns=2_000_000,
        step_ns=1e6,
        step_min_ns=1_000_000,
        step_max_ns=1_000_000,
        step_median_ns=1e6,
        device=0,
        device_name=None,
        device_known=False,
        devices_seen=1,
    )
    verdict = f"Rank 3 is slow{hostile}"
    report = Report(status="limited", verdict=verdict, inputs=[], scope=scope, ranks=ranks)
    file = folder / "job.json"
    file.write_bytes(report.to_json())
    return file


def wait_until_read(session: DashboardSession, key: str) -> OpenedPath:
    """Return the entry of a rank after it is read."""
    entry = session.entry(key)
    deadline = time.monotonic() + TIMEOUT_SECONDS
    while entry.state == "loading" and time.monotonic() < deadline:
        time.sleep(0.02)
    return entry


def test_a_click_on_the_map_opens_the_timeline_of_that_rank_only(
    tmp_path: Path, serve_session: Any, open_tab: Any
) -> None:
    folder = write_ranks(tmp_path / "ranks", 8)
    session = DashboardSession([str(write_report(folder, 8, hostile=HOSTILE))]).load()
    assert [entry.state for entry in session.entries] == ["ready"]
    with serve_session(session) as dashboard:
        tab = open_tab(dashboard)
        tab.open("/")
        tab.wait_until_idle()
        for text in ("Rank 3 is slow", HOSTILE, "8", f"1 rank (99): gone{HOSTILE}"):
            assert text in tab.text("body"), text
        plot = tab.page.locator("#job-map .nsewdrag").first
        plot.wait_for()
        box = plot.bounding_box()
        # the sixth of eight ranks, in the upper of two rows
        tab.page.mouse.move(box["x"] + box["width"] * 5.5 / 8, box["y"] + box["height"] * 0.25)
        tab.page.locator("#job-map .hovertext").first.wait_for()
        assert "rank 5" in tab.page.locator("#job-map .hovertext").first.text_content()
        tab.page.mouse.down()
        tab.page.mouse.up()
        tab.page.wait_for_url("**/timeline?run=0.5*")
        tab.page.locator("#timeline canvas").first.wait_for(timeout=TIMEOUT_SECONDS * 1e3)
        assert "rank 5" in tab.text("header")
        assert [entry.path for entry in session.entries[1:]] == [str(folder / "rank5.json")]
        tab.page.locator("nav .to-job a").first.click()
        tab.page.locator(".page-job main h1").first.wait_for(state="attached")
        tab.wait_until_idle()
        assert "Rank 3 is slow" in tab.text("main")
        tab.open("/findings")
        assert "Choose a rank" in tab.text("main")
        assert tab.page.evaluate("window.hit") is None
        assert tab.problems == []


def test_a_row_of_the_table_opens_the_timeline_of_its_rank(
    tmp_path: Path, serve_session: Any, open_tab: Any
) -> None:
    folder = write_ranks(tmp_path / "ranks", 4)
    with serve_session(DashboardSession([str(write_report(folder, 4))]).load()) as dashboard:
        tab = open_tab(dashboard)
        tab.open("/job")
        tab.wait_until_idle()
        row = tab.page.locator("#job-ranks .ag-row[row-id='0.2']").first
        row.scroll_into_view_if_needed()
        row.click()
        tab.page.wait_for_url("**/timeline?run=0.2*")
        tab.page.locator("#timeline canvas").first.wait_for(timeout=TIMEOUT_SECONDS * 1e3)
        assert tab.problems == []


def test_a_folder_of_many_ranks_is_a_job_and_one_of_few_is_not(tmp_path: Path) -> None:
    many = (
        DashboardSession([str(write_ranks(tmp_path / "many", MAX_RANKS_IN_MEMORY + 1))])
        .load()
        .entries[0]
    )
    assert many.job is not None and many.job.ranks is not None and many.loaded is not None
    assert (many.state, len(many.job.ranks.lines)) == ("ready", MAX_RANKS_IN_MEMORY + 1)
    assert list(many.loaded.analyses) == [0]
    few = DashboardSession([str(write_ranks(tmp_path / "few", 2))]).load().entries[0]
    assert few.job is None
    assert few.loaded is not None


def test_a_rank_that_cannot_be_read_has_a_reason_and_the_job_stays_open(tmp_path: Path) -> None:
    folder = write_ranks(tmp_path / "ranks", 2)
    file = write_report(folder, 2)
    (folder / "rank1.json").write_text("{")
    session = DashboardSession([str(file)]).load()
    bad = wait_until_read(session, "0.1")
    assert (bad.state, bad.name) == ("failed", "rank 1")
    assert bad.failure_reason
    good = wait_until_read(session, "0.0")
    assert good.loaded is not None
    assert session.entries[0].job is not None


@pytest.mark.parametrize("key", ["0.8", "1.0", "0.-1", "0.x", "0.0.0", "0.00000001", "", "../x"])
def test_an_unknown_rank_key_opens_nothing(tmp_path: Path, key: str) -> None:
    folder = write_ranks(tmp_path / "ranks", 2)
    session = DashboardSession([str(write_report(folder, 2))]).load()
    assert session.entry(key) is session.entries[0]
    assert len(session.entries) == 1
    assert session.pairs == []


def test_the_number_of_open_ranks_is_limited(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loaded_runs, "MAX_OPEN_RUNS", 2)
    folder = write_ranks(tmp_path / "ranks", 4)
    session = DashboardSession([str(write_report(folder, 4))]).load()
    for row in range(4):
        assert wait_until_read(session, f"0.{row}").loaded is not None
    assert [entry.key for entry in session.entries] == ["0", "0.2", "0.3"]


def test_a_damaged_report_is_reported_in_one_line(tmp_path: Path) -> None:
    folder = write_ranks(tmp_path / "ranks", 2)
    file = write_report(folder, 2)
    file.write_bytes(file.read_bytes()[:-20])
    entry = DashboardSession([str(file)]).load().entries[0]
    assert entry.state == "failed"
    assert (
        entry.failure_reason.startswith(f"{file}: not a report: ")
        and "\n" not in entry.failure_reason
    )
    other = structs.replace(
        Report.from_json(write_report(folder, 2).read_bytes()), schema="advisor.report/99"
    )
    with pytest.raises(AdvisorError, match="report/99"):
        Report.from_json(other.to_json())
