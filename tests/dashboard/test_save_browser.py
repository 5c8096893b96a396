"""What can be taken away: tables as CSV, the trace with our tracks, and the trace to Perfetto.

That site is asked for nothing before somebody has read what it does, and clicked."""

from __future__ import annotations

import csv
import gzip
import http.server
import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("dash")

from advisor.dashboard.app import create_app
from advisor.dashboard.loaded_runs import DashboardSession
from advisor.dashboard.server import Access
from advisor.testing import TraceBuilder

FORMULA = "=HYPERLINK(evil)"
VIEWER = b"""<!DOCTYPE html><title>viewer</title><script>
addEventListener("message", event => {
  if (event.data === "PING") { event.source.postMessage("PONG", event.origin); return; }
  window.given = event.data.perfetto;
  document.title = "given";
});
</script>"""
"""Answers as the Perfetto UI does, and keeps what it is given."""


@pytest.fixture(scope="module")
def trace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    b = TraceBuilder()
    for _ in range(4):
        with b.step(), b.op("aten::mm", [[512, 512], [512, 512]], "float"):
            b.launch("gemm_kernel", 900)
            b.launch(FORMULA, 300)
            b.sync()
    return b.write(tmp_path_factory.mktemp("save") / "train.json")


@pytest.fixture
def viewer() -> Iterator[tuple[str, list[str]]]:
    """A site that takes traces, and what was asked of it."""
    asked: list[str] = []

    class Answer(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            asked.append(self.path)
            self.send_response(200)
            self.send_header("Content-Type", "text/html")
            self.end_headers()
            self.wfile.write(VIEWER)

        def log_message(self, *_: object) -> None:
            """Nothing."""

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Answer)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_address[1]}/", asked
    server.shutdown()
    server.server_close()


def our_tracks(text: bytes) -> tuple[int, set[str]]:
    """How many events a packed trace has, and the names of all that are there."""
    events = json.loads(gzip.decompress(text))["traceEvents"]
    return len(events), {str(event.get("name")) for event in events}


def test_the_trace_is_handed_over_after_two_clicks_and_nothing_is_asked_before(
    trace: Path, served: Any, tab: Callable[..., Any], viewer: tuple[str, list[str]]
) -> None:
    address, asked = viewer
    with served(DashboardSession([str(trace)], perfetto=address).load()) as shown:
        t = tab(shown)
        page = t.open("/timeline")
        page.locator("#perfetto-ask").wait_for()
        t.settle()
        assert not page.locator("#perfetto").is_visible()
        page.click("#perfetto-ask")
        said = t.text("#perfetto")
        assert address in said and "a request to that site" in said
        page.click("#perfetto-leave")
        assert not page.locator("#perfetto").is_visible()
        page.click("#perfetto-ask")
        t.settle()
        assert asked == [] and len(page.context.pages) == 1
        with page.context.expect_page() as opened:
            page.click("#perfetto-open")
        other = opened.value
        other.wait_for_function("document.title === 'given'", timeout=30_000)
        page.get_by_text("Trace sent.").wait_for()
        given = other.evaluate(
            "({title: given.title, bytes: Array.from(new Uint8Array(given.buffer))})"
        )
        assert given["title"] == "train.advisor.json.gz"
        count, names = our_tracks(bytes(given["bytes"]))
        assert {"gemm_kernel", "aten::mm"} <= names
        assert count > len(json.loads(trace.read_text())["traceEvents"])
        assert [path for path in asked if path != "/favicon.ico"] == ["/"]
        other.close()
        assert t.wrong == []


def test_the_trace_is_saved_without_asking_anybody(
    trace: Path, served: Any, tab: Callable[..., Any]
) -> None:
    with served(DashboardSession([str(trace)]).load()) as shown:
        t = tab(shown)
        page = t.open("/timeline")
        save = page.locator(".trace-file a")
        save.wait_for()
        assert page.locator("#perfetto-ask").count() == 0  # off
        with page.expect_download() as waiting:
            save.click()
        got = waiting.value
        assert got.suggested_filename == "train.advisor.json.gz"
        assert "gemm_kernel" in our_tracks(Path(got.path()).read_bytes())[1]
        assert t.wrong == []


def test_a_grid_is_saved_as_csv_with_numbers_and_no_formulas(
    trace: Path, show: Any, tab: Callable[..., Any]
) -> None:
    t = tab(show(trace))
    page = t.open("/kernels")
    page.locator("#kernel-grid .ag-row").first.wait_for()
    with page.expect_download() as waiting:
        page.click(".save-csv[data-grid=kernel-grid]")
    got = waiting.value
    assert got.suggested_filename == "advisor-kernel.csv"
    with Path(got.path()).open(encoding="utf-8-sig", newline="") as file:
        rows = {row["Kernel"]: row for row in csv.DictReader(file)}
    assert set(rows) == {"gemm_kernel", f"'{FORMULA}"}
    # by hand: 900 µs and 300 µs in every step
    assert float(rows["gemm_kernel"]["Time per step, ns"]) == pytest.approx(900e3)
    assert float(rows["gemm_kernel"]["Share, 0 to 1"]) == pytest.approx(0.75)
    assert 0 < float(rows["gemm_kernel"]["Occupancy, 0 to 1"]) <= 1
    assert t.wrong == []


def test_files_made_for_a_session_go_with_it(trace: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Path] = []
    from advisor.dashboard.pages import timeline

    kept = timeline.scratch_folder

    @contextmanager
    def scratch() -> Iterator[Path]:
        with kept() as folder:
            made.append(folder)
            yield folder

    monkeypatch.setattr(timeline, "scratch_folder", scratch)
    session = DashboardSession([str(trace)] * 3).load()
    client = create_app(session, Access()).server.test_client()
    for key in ("0", "1", "2", "2", "1", "0"):
        with client.get(f"/_advisor/trace?run={key}&rank=0") as answer:
            assert answer.status_code == 200
            assert our_tracks(answer.data)[0] > 0
    (folder,) = made
    assert len(list(folder.glob("*.json.gz"))) == timeline.MAX_KEPT_FILES
    session.close()
    assert not folder.exists()
    trace.rename(trace.with_suffix(".gone"))
    assert client.get("/_advisor/trace?run=2").status_code == 409
    trace.with_suffix(".gone").rename(trace)
