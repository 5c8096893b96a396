"""The document that a page begins as: which scripts run, and in which order."""

from __future__ import annotations

import gzip
import re
from pathlib import Path
from typing import Any

import pytest

from advisor import dashboard
from advisor.dashboard.app import PAGES, create_app
from advisor.dashboard.loaded_runs import DashboardSession
from advisor.dashboard.server import Access

SCRIPTS = Path(dashboard.__file__).parent / "assets"


@pytest.fixture(scope="module")
def client() -> Any:
    return create_app(DashboardSession([]), Access()).server.test_client()


def sources(html: str) -> list[str]:
    return [found.partition("?")[0] for found in re.findall(r'<script[^>]*src="([^"]*)"', html)]


def test_every_page_gets_the_same_scripts(client: Any) -> None:
    plain = client.get("/").get_data(as_text=True)
    timeline = client.get("/timeline").get_data(as_text=True)
    assert sorted(sources(plain)) == sorted(sources(timeline))
    assert len(set(sources(plain))) == len(sources(plain))


def test_the_library_of_grids_is_named_and_not_run(client: Any) -> None:
    for path in ("/", "/timeline", "/kernels"):
        html = client.get(path).get_data(as_text=True)
        (named,) = re.findall(r'<meta name="advisor-grid" content="([^"]*)">', html)
        assert client.get(named).status_code == 200
        assert not any("dash_ag_grid/" in one for one in sources(html))


def test_scripts_and_pages_are_compressed_where_the_browser_can_read_it(client: Any) -> None:
    asked = {"Accept-Encoding": "gzip"}
    for path in ("/", "/assets/parts.css", "/assets/shell.js"):
        plain = client.get(path, headers={"Accept-Encoding": "identity"})
        for _ in range(2):  # made, then kept
            packed = client.get(path, headers=asked)
            assert packed.headers["Content-Encoding"] == "gzip"
            assert gzip.decompress(packed.data) == plain.data or path == "/"
            assert len(packed.data) < 0.5 * len(plain.data)
            assert "Accept-Encoding" in packed.headers["Vary"]
        assert "Content-Encoding" not in plain.headers
        assert "Accept-Encoding" in plain.headers["Vary"]
    again = {**asked, "If-None-Match": packed.headers["ETag"]}
    assert client.get("/assets/shell.js", headers=again).status_code == 304


def test_on_the_timeline_only_its_own_scripts_run_by_themselves(client: Any) -> None:
    html = client.get("/timeline").get_data(as_text=True)
    before, _, rest = html.partition('<template id="dash-scripts">')
    inside, _, after = rest.partition("</template>")
    assert all("/assets/timeline" in one or one == "/assets/early.js" for one in sources(before))
    assert sources(after) == []
    assert "new DashRenderer" in inside
    assert "_dash-config" in before
    assert not any("/assets/timeline" in one for one in sources(inside))


def test_the_timelines_scripts_are_modules_and_asked_for_at_once(client: Any) -> None:
    for path in ("/", "/timeline"):
        html = client.get(path).get_data(as_text=True)
        (main,) = re.findall(r"<script[^>]*/assets/timeline/[^>]*>", html)
        assert 'type="module"' in main
        ahead = set(re.findall(r'<link rel="modulepreload" href="([^"]*)">', html))
        files = {f"/assets/timeline/{file.name}" for file in SCRIPTS.glob("timeline/*.js")}
        assert ahead == files
        for file in files:
            answer = client.get(file)
            assert answer.status_code == 200
            assert answer.mimetype == "text/javascript"


def test_scripts_are_within_100_columns() -> None:
    long = [
        f"{file.name}:{number}"
        for file in sorted(SCRIPTS.rglob("*.js"))
        for number, line in enumerate(file.read_text(encoding="utf-8").splitlines(), 1)
        if len(line) > 100
    ]
    assert long == []


def test_elsewhere_nothing_waits(client: Any) -> None:
    assert "<template" not in client.get("/findings").get_data(as_text=True)


def test_the_theme_is_set_before_anything_is_painted(client: Any) -> None:
    for path in ("/", "/timeline"):
        html = client.get(path).get_data(as_text=True)
        assert html.index("/assets/early.js") < html.index('rel="stylesheet"')


def test_an_address_that_is_not_a_page_is_404(client: Any) -> None:
    assert client.get("/no-such-page").status_code == 404
    assert {client.get(page.path).status_code for page in PAGES} == {200}
    assert client.get("/timeline/").status_code == 200
