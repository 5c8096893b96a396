"""HTML document of a page: its scripts and their order."""

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


def script_sources(html: str) -> list[str]:
    return [source.partition("?")[0] for source in re.findall(r'<script[^>]*src="([^"]*)"', html)]


def test_every_page_has_the_same_scripts(client: Any) -> None:
    plain = client.get("/").get_data(as_text=True)
    timeline = client.get("/timeline").get_data(as_text=True)
    assert sorted(script_sources(plain)) == sorted(script_sources(timeline))
    assert len(set(script_sources(plain))) == len(script_sources(plain))


def test_the_grid_library_is_referenced_but_not_loaded(client: Any) -> None:
    for path in ("/", "/timeline", "/kernels"):
        html = client.get(path).get_data(as_text=True)
        (address,) = re.findall(r'<meta name="advisor-grid" content="([^"]*)">', html)
        assert client.get(address).status_code == 200
        assert not any("dash_ag_grid/" in source for source in script_sources(html))


def test_scripts_and_pages_are_compressed_if_the_browser_accepts_gzip(client: Any) -> None:
    accepts_gzip = {"Accept-Encoding": "gzip"}
    for path in ("/", "/assets/parts.css", "/assets/shell.js"):
        plain = client.get(path, headers={"Accept-Encoding": "identity"})
        for _ in range(2):  # compressed, then from the cache
            compressed = client.get(path, headers=accepts_gzip)
            assert compressed.headers["Content-Encoding"] == "gzip"
            assert gzip.decompress(compressed.data) == plain.data or path == "/"
            assert len(compressed.data) < 0.5 * len(plain.data)
            assert "Accept-Encoding" in compressed.headers["Vary"]
        assert "Content-Encoding" not in plain.headers
        assert "Accept-Encoding" in plain.headers["Vary"]
    conditional = {**accepts_gzip, "If-None-Match": compressed.headers["ETag"]}
    assert client.get("/assets/shell.js", headers=conditional).status_code == 304


def test_the_timeline_page_starts_only_its_own_scripts(client: Any) -> None:
    html = client.get("/timeline").get_data(as_text=True)
    before, _, rest = html.partition('<template id="dash-scripts">')
    template, _, after = rest.partition("</template>")
    assert all(
        "/assets/timeline" in source or source == "/assets/early.js"
        for source in script_sources(before)
    )
    assert script_sources(after) == []
    assert "new DashRenderer" in template
    assert "_dash-config" in before
    assert not any("/assets/timeline" in source for source in script_sources(template))


def test_the_timeline_scripts_are_preloaded_modules(client: Any) -> None:
    for path in ("/", "/timeline"):
        html = client.get(path).get_data(as_text=True)
        (main,) = re.findall(r"<script[^>]*/assets/timeline/[^>]*>", html)
        assert 'type="module"' in main
        preloaded = set(re.findall(r'<link rel="modulepreload" href="([^"]*)">', html))
        files = {f"/assets/timeline/{file.name}" for file in SCRIPTS.glob("timeline/*.js")}
        assert preloaded == files
        for file in files:
            response = client.get(file)
            assert response.status_code == 200
            assert response.mimetype == "text/javascript"


def test_scripts_are_within_100_columns() -> None:
    long = [
        f"{file.name}:{number}"
        for file in sorted(SCRIPTS.rglob("*.js"))
        for number, line in enumerate(file.read_text(encoding="utf-8").splitlines(), 1)
        if len(line) > 100
    ]
    assert long == []


def test_other_pages_do_not_defer_scripts(client: Any) -> None:
    assert "<template" not in client.get("/findings").get_data(as_text=True)


def test_the_theme_is_set_before_the_style_sheets(client: Any) -> None:
    for path in ("/", "/timeline"):
        html = client.get(path).get_data(as_text=True)
        assert html.index("/assets/early.js") < html.index('rel="stylesheet"')


def test_unknown_paths_get_status_404(client: Any) -> None:
    assert client.get("/no-such-page").status_code == 404
    assert {client.get(page.path).status_code for page in PAGES} == {200}
    assert client.get("/timeline/").status_code == 200
