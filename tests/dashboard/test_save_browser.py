"""Saving: grids as CSV, the trace with advisor's tracks, and the trace in Perfetto.

Nothing is requested from Perfetto's site before the user has read the notice and clicked."""

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
"""Page that answers as the Perfetto UI does, and keeps the trace in ``window.given``."""


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
    """Serve a viewer's site. Yield its address and the list of requested paths."""
    requested: list[str] = []

    class ViewerHandler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            requested.append(self.path)
            self.send_response(200)
            self.send_header("Content-Type", "text/html")
            self.end_headers()
            self.wfile.write(VIEWER)

        def log_message(self, *_: object) -> None:
            """Log nothing."""

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), ViewerHandler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_address[1]}/", requested
    server.shutdown()
    server.server_close()


def read_event_names(text: bytes) -> tuple[int, set[str]]:
    """Return the number of events in a compressed trace, and their names."""
    events = json.loads(gzip.decompress(text))["traceEvents"]
    return len(events), {str(event.get("name")) for event in events}


def test_the_trace_is_sent_after_two_clicks_and_nothing_is_requested_before(
    trace: Path, serve_session: Any, open_tab: Callable[..., Any], viewer: tuple[str, list[str]]
) -> None:
    address, requested = viewer
    with serve_session(DashboardSession([str(trace)], perfetto=address).load()) as dashboard:
        tab = open_tab(dashboard)
        page = tab.open("/timeline")
        page.locator("#perfetto-ask").wait_for()
        tab.wait_until_idle()
        assert not page.locator("#perfetto").is_visible()
        page.click("#perfetto-ask")
        notice = tab.text("#perfetto")
        assert address in notice and "a request to that site" in notice
        page.click("#perfetto-leave")
        assert not page.locator("#perfetto").is_visible()
        page.click("#perfetto-ask")
        tab.wait_until_idle()
        assert requested == [] and len(page.context.pages) == 1
        with page.context.expect_page() as new_page:
            page.click("#perfetto-open")
        viewer_page = new_page.value
        viewer_page.wait_for_function("document.title === 'given'", timeout=30_000)
        page.get_by_text("Trace sent.").wait_for()
        received = viewer_page.evaluate(
            "({title: given.title, bytes: Array.from(new Uint8Array(given.buffer))})"
        )
        assert received["title"] == "train.advisor.json.gz"
        count, names = read_event_names(bytes(received["bytes"]))
        assert {"gemm_kernel", "aten::mm"} <= names
        assert count > len(json.loads(trace.read_text())["traceEvents"])
        assert [path for path in requested if path != "/favicon.ico"] == ["/"]
        viewer_page.close()
        assert tab.problems == []


def test_the_trace_is_saved_without_requests_to_other_sites(
    trace: Path, serve_session: Any, open_tab: Callable[..., Any]
) -> None:
    with serve_session(DashboardSession([str(trace)]).load()) as dashboard:
        tab = open_tab(dashboard)
        page = tab.open("/timeline")
        save = page.locator(".trace-file a")
        save.wait_for()
        assert page.locator("#perfetto-ask").count() == 0  # off
        with page.expect_download() as download:
            save.click()
        saved_file = download.value
        assert saved_file.suggested_filename == "train.advisor.json.gz"
        assert "gemm_kernel" in read_event_names(Path(saved_file.path()).read_bytes())[1]
        assert tab.problems == []


def test_a_grid_is_saved_as_csv_with_numbers_and_no_formulas(
    trace: Path, dashboard_of: Any, open_tab: Callable[..., Any]
) -> None:
    tab = open_tab(dashboard_of(trace))
    page = tab.open("/kernels")
    page.locator("#kernel-grid .ag-row").first.wait_for()
    with page.expect_download() as download:
        page.click(".save-csv[data-grid=kernel-grid]")
    saved_file = download.value
    assert saved_file.suggested_filename == "advisor-kernel.csv"
    with Path(saved_file.path()).open(encoding="utf-8-sig", newline="") as file:
        rows = {row["Kernel"]: row for row in csv.DictReader(file)}
    assert set(rows) == {"gemm_kernel", f"'{FORMULA}"}
    # by hand: 900 µs and 300 µs in every step
    assert float(rows["gemm_kernel"]["Time per step, ns"]) == pytest.approx(900e3)
    assert float(rows["gemm_kernel"]["Share, 0 to 1"]) == pytest.approx(0.75)
    assert 0 < float(rows["gemm_kernel"]["Occupancy, 0 to 1"]) <= 1
    assert tab.problems == []


def test_files_of_a_session_are_removed_with_it(
    trace: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folders: list[Path] = []
    from advisor.dashboard.pages import timeline

    scratch_folder = timeline.scratch_folder

    @contextmanager
    def noted_scratch_folder() -> Iterator[Path]:
        with scratch_folder() as folder:
            folders.append(folder)
            yield folder

    monkeypatch.setattr(timeline, "scratch_folder", noted_scratch_folder)
    session = DashboardSession([str(trace)] * 3).load()
    client = create_app(session, Access()).server.test_client()
    for key in ("0", "1", "2", "2", "1", "0"):
        with client.get(f"/_advisor/trace?run={key}&rank=0") as response:
            assert response.status_code == 200
            assert read_event_names(response.data)[0] > 0
    (folder,) = folders
    assert len(list(folder.glob("*.json.gz"))) == timeline.MAX_KEPT_FILES
    session.close()
    assert not folder.exists()
    trace.rename(trace.with_suffix(".gone"))
    assert client.get("/_advisor/trace?run=2").status_code == 409
    trace.with_suffix(".gone").rename(trace)
