"""Who is answered, with which headers, and that a request can change or name nothing."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("dash")

from advisor.dashboard.access import COOKIE, Access
from advisor.dashboard.app import PAGES, create_app
from advisor.dashboard.serve import bind, listen
from advisor.dashboard.session import Session
from advisor.errors import AdvisorError
from advisor.testing import TraceBuilder

HOSTILE = "<img src=x onerror=alert(1)>"


@pytest.fixture(scope="module")
def session(tmp_path_factory: pytest.TempPathFactory) -> Session:
    b = TraceBuilder()
    for _ in range(3):
        with b.step(), b.op("aten::mm", [[512, 512], [512, 512]], "float"):
            b.launch(HOSTILE, 900)
            b.sync()
    return Session([str(b.write(tmp_path_factory.mktemp("a") / "a.json"))]).load()


def client(session: Session, access: Access | None = None) -> Any:
    return create_app(session, access).server.test_client()


def callback(client: Any, path: str, search: str = "", **headers: str) -> Any:
    """What the browser asks for to show a page."""
    body = {
        "output": ".._pages_content.children..._pages_store.data..",
        "outputs": [
            {"id": "_pages_content", "property": "children"},
            {"id": "_pages_store", "property": "data"},
        ],
        "inputs": [
            {"id": "_pages_location", "property": "pathname", "value": path},
            {"id": "_pages_location", "property": "search", "value": search},
        ],
        "changedPropIds": ["_pages_location.pathname"],
    }
    client.get("/")
    return client.post("/_dash-update-component", json=body, headers=headers)


def policy(answer: Any) -> dict[str, str]:
    parts = answer.headers["Content-Security-Policy"].split("; ")
    return {part.split(" ")[0]: part.partition(" ")[2] for part in parts}


def test_the_page_may_run_only_scripts_from_here(session: Session) -> None:
    found = policy(client(session).get("/"))
    assert "unsafe-eval" not in str(found)
    assert "unsafe-inline" not in found["script-src"]
    assert found["script-src"].startswith("'self'")
    assert found["connect-src"] == found["default-src"] == "'self'"
    assert found["object-src"] == found["frame-ancestors"] == found["base-uri"] == "'none'"


def test_every_inline_script_of_the_page_is_allowed_by_its_hash(session: Session) -> None:
    import base64
    import hashlib
    import re

    answer = client(session).get("/")
    inline = re.findall(r"<script(?![^>]*src=)(?![^>]*json)[^>]*>(.*?)</script>", answer.text, re.S)
    assert inline
    for script in inline:
        digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
        assert f"'sha256-{digest}'" in policy(answer)["script-src"]


@pytest.mark.parametrize("path", ["/", "/_dash-layout", "/_advisor/status", "/assets/base.css"])
def test_everything_comes_with_the_headers(session: Session, path: str) -> None:
    answer = client(session).get(path)
    assert answer.status_code == 200
    assert answer.headers["X-Content-Type-Options"] == "nosniff"
    assert answer.headers["Referrer-Policy"] == "no-referrer"
    assert answer.headers["X-Frame-Options"] == "DENY"


@pytest.mark.parametrize(
    "host", ["localhost", "127.0.0.1", "127.0.0.1:8050", "[::1]:8050", "LOCALHOST:9"]
)
def test_this_machines_names_are_answered(session: Session, host: str) -> None:
    assert client(session).get("/", headers={"Host": host}).status_code == 200


@pytest.mark.parametrize(
    "host",
    ["evil.example", "localhost.evil.example", "127.0.0.1.evil.example", "10.0.0.1", "", "[evil"],
)
def test_a_name_that_is_made_to_point_here_is_not(session: Session, host: str) -> None:
    for path in ("/", "/_dash-layout", "/_advisor/status", "/assets/base.css"):
        assert client(session).get(path, headers={"Host": host}).status_code == 403


def test_a_post_from_another_site_is_refused(session: Session) -> None:
    c = client(session)
    assert callback(c, "/").status_code == 200
    assert callback(c, "/", Origin="http://localhost").status_code == 200
    assert callback(c, "/", Origin="http://evil.example").status_code == 403
    assert callback(c, "/", **{"Sec-Fetch-Site": "cross-site"}).status_code == 403


@pytest.mark.parametrize("method", ["put", "delete", "patch", "post", "options"])
def test_nothing_can_be_written(session: Session, method: str) -> None:
    assert getattr(client(session), method)("/").status_code == 405
    assert getattr(client(session), method)("/_advisor/status").status_code == 405


def test_a_large_body_is_refused(session: Session) -> None:
    c = client(session)
    c.get("/")
    answer = c.post(
        "/_dash-update-component", data=b" " * (5 << 20), content_type="application/json"
    )
    assert answer.status_code == 413


# -- another address than this machine's ---------------------------------------------------------


def test_this_machine_needs_no_token_and_others_do() -> None:
    assert Access.to("127.0.0.1").token is None
    assert Access.to("localhost").token is None
    assert len(Access.to("0.0.0.0").token or "") >= 32
    assert Access.to("0.0.0.0").token != Access.to("0.0.0.0").token


def test_without_the_token_nothing_is_told(session: Session) -> None:
    c = client(session, Access.to("0.0.0.0"))
    for path in ("/", "/_dash-layout", "/_advisor/status", "/assets/base.css", "/?token=wrong"):
        answer = c.get(path, headers={"Host": "10.0.0.5:8050"})
        assert answer.status_code == 401
        assert "aten" not in answer.text
    assert c.post("/_dash-update-component", json={}).status_code == 401


def test_the_token_lets_in_once_and_leaves_the_address(session: Session) -> None:
    access = Access.to("0.0.0.0")
    c = client(session, access)
    host = {"Host": "10.0.0.5:8050"}
    answer = c.get(f"/findings?run=0&token={access.token}", headers=host)
    assert (answer.status_code, answer.headers["Location"]) == (302, "/findings?run=0")
    cookie = answer.headers["Set-Cookie"]
    assert "HttpOnly" in cookie and "SameSite=Strict" in cookie
    given = {**host, "Cookie": f"{COOKIE}={access.token}"}
    assert c.get("/", headers=given).status_code == 200
    stranger = client(session, access)
    assert stranger.get("/", headers={**host, "Cookie": f"{COOKIE}=x"}).status_code == 401


def test_the_token_cannot_be_used_to_redirect_elsewhere(session: Session) -> None:
    access = Access.to("0.0.0.0")
    answer = client(session, access).get(f"//evil.example/?token={access.token}")
    assert not answer.headers.get("Location", "/").startswith("//")


def test_a_name_that_points_here_is_refused_with_a_token_too(session: Session) -> None:
    access = Access.to("0.0.0.0")
    answer = client(session, access).get(
        f"/?token={access.token}", headers={"Host": "evil.example"}
    )
    assert answer.status_code == 403


# -- what a request may name ---------------------------------------------------------------------


@pytest.mark.parametrize("page", [page.path for page in PAGES])
@pytest.mark.parametrize(
    "query",
    [
        "?run=../../etc/passwd", "?run=%2Fetc%2Fpasswd", "?run=1e9&rank=x", "?rank=-99999999999",
        "?rank=٣", "?run=&rank=&category=<b>&show=x&other=/etc", "?a=1&a=2&__class__=x",
    ],
)  # fmt: skip
def test_no_query_breaks_a_page_or_names_a_file(session: Session, page: str, query: str) -> None:
    answer = callback(client(session), page, query)
    assert answer.status_code == 200
    assert "root:" not in answer.text
    assert "This page could not be made" not in answer.text


@pytest.mark.parametrize("path", ["/assets/../access.py", "/assets/..%2f..%2faccess.py", "/etc"])
def test_no_path_leads_out_of_the_assets(session: Session, path: str) -> None:
    answer = client(session).get(path)
    assert "hmac" not in answer.text


def test_a_name_from_a_trace_is_sent_as_text_and_never_as_markup(session: Session) -> None:
    answer = callback(client(session), "/kernels")
    assert HOSTILE in json.dumps(answer.json, ensure_ascii=False)
    components = json.dumps(answer.json)
    assert '"dangerously_allow_html": true' not in components
    assert '"dangerouslySetInnerHTML"' not in components
    # in figures, which read a few tags, it is written with entities
    plotted = json.dumps(_figures(answer.json))
    assert "<img" not in plotted


def _figures(node: Any) -> list[Any]:
    if isinstance(node, dict):
        own = [node["figure"]] if isinstance(node.get("figure"), dict) else []
        return own + [found for value in node.values() for found in _figures(value)]
    if isinstance(node, list):
        return [found for value in node for found in _figures(value)]
    return []


# -- the port ------------------------------------------------------------------------------------


def test_a_taken_port_gives_the_next_free_one(session: Session) -> None:
    taken = listen("127.0.0.1", 0)
    port = taken.getsockname()[1]
    server = bind(create_app(session).server, Access(), port)
    try:
        assert port < server.port <= port + 50
        assert server.address == f"http://127.0.0.1:{server.port}/"
    finally:
        server.close()
        taken.close()


def test_an_address_that_is_not_ours_is_one_line() -> None:
    with pytest.raises(AdvisorError, match=r"--host 203\.0\.113\.1"):
        listen("203.0.113.1", 0)


def test_the_assets_have_no_inline_handlers_or_eval() -> None:
    from advisor.dashboard.app import ASSETS

    for file in Path(ASSETS).glob("*.js"):
        text = file.read_text(encoding="utf-8")
        for forbidden in ("eval(", "new Function", "innerHTML", "document.write", "http://"):
            assert forbidden not in text.replace("http://www.w3.org", ""), (file.name, forbidden)
