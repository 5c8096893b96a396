"""Who is answered, with which headers, and that a request can change or name nothing."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any
from urllib.parse import urljoin, urlsplit

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

pytest.importorskip("dash")

from advisor.core.errors import AdvisorError
from advisor.dashboard.app import PAGES, create_app
from advisor.dashboard.loaded_runs import DashboardSession
from advisor.dashboard.page_view import clean_query, parse_query
from advisor.dashboard.server import ACCESS_COOKIE, Access, bind, listen, local_address
from advisor.testing import TraceBuilder

HOSTILE = "<img src=x onerror=alert(1)>"


@pytest.fixture(scope="module")
def session(tmp_path_factory: pytest.TempPathFactory) -> DashboardSession:
    b = TraceBuilder()
    for _ in range(3):
        with b.step(), b.op("aten::mm", [[512, 512], [512, 512]], "float"):
            b.launch(HOSTILE, 900)
            b.sync()
    return DashboardSession([str(b.write(tmp_path_factory.mktemp("a") / "a.json"))]).load()


def client(session: DashboardSession, access: Access | None = None) -> Any:
    return create_app(session, access or Access()).server.test_client()


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


def test_the_page_may_run_only_scripts_from_here(session: DashboardSession) -> None:
    found = policy(client(session).get("/"))
    assert "unsafe-eval" not in str(found)
    assert "unsafe-inline" not in found["script-src"]
    assert found["script-src"].startswith("'self'")
    assert found["connect-src"] == found["default-src"] == "'self'"
    assert found["object-src"] == found["frame-ancestors"] == found["base-uri"] == "'none'"


def test_every_inline_script_of_the_page_is_allowed_by_its_hash(session: DashboardSession) -> None:
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
def test_everything_comes_with_the_headers(session: DashboardSession, path: str) -> None:
    answer = client(session).get(path)
    assert answer.status_code == 200
    assert answer.headers["X-Content-Type-Options"] == "nosniff"
    assert answer.headers["Referrer-Policy"] == "no-referrer"
    assert answer.headers["X-Frame-Options"] == "DENY"


@pytest.mark.parametrize(
    "host", ["localhost", "127.0.0.1", "127.0.0.1:8050", "[::1]:8050", "LOCALHOST:9"]
)
def test_this_machines_names_are_answered(session: DashboardSession, host: str) -> None:
    assert client(session).get("/", headers={"Host": host}).status_code == 200


@pytest.mark.parametrize(
    "host",
    ["evil.example", "localhost.evil.example", "127.0.0.1.evil.example", "10.0.0.1", "", "[evil"],
)
def test_a_name_that_is_made_to_point_here_is_not(session: DashboardSession, host: str) -> None:
    for path in ("/", "/_dash-layout", "/_advisor/status", "/assets/base.css"):
        assert client(session).get(path, headers={"Host": host}).status_code == 403


def test_a_post_from_another_site_is_refused(session: DashboardSession) -> None:
    c = client(session)
    assert callback(c, "/").status_code == 200
    assert callback(c, "/", Origin="http://localhost").status_code == 200
    assert callback(c, "/", Origin="http://evil.example").status_code == 403
    assert callback(c, "/", **{"Sec-Fetch-Site": "cross-site"}).status_code == 403


@pytest.mark.parametrize("method", ["put", "delete", "patch", "post", "options"])
def test_nothing_can_be_written(session: DashboardSession, method: str) -> None:
    assert getattr(client(session), method)("/").status_code == 405
    assert getattr(client(session), method)("/_advisor/status").status_code == 405


def test_a_large_body_is_refused(session: DashboardSession) -> None:
    c = client(session)
    c.get("/")
    answer = c.post(
        "/_dash-update-component", data=b" " * (5 << 20), content_type="application/json"
    )
    assert answer.status_code == 413


# -- the token -----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def local() -> Access:
    return Access.for_host("127.0.0.1")


@pytest.fixture(scope="module")
def guarded(session: DashboardSession, local: Access) -> Any:
    """The server of a dashboard that asks for a token."""
    return create_app(session, local).server


def cookies(answer: Any) -> dict[str, str]:
    """Name of each cookie that is set, and what is said of it."""
    return dict(line.split("=", 1) for line in answer.headers.getlist("Set-Cookie"))


def test_a_token_is_asked_for_on_every_address_and_is_never_the_same() -> None:
    for host in ("127.0.0.1", "localhost", "::1", "0.0.0.0"):
        assert len(Access.for_host(host).token or "") >= 32
        assert Access.for_host(host).token != Access.for_host(host).token
    shown = Access.for_host("127.0.0.1")
    assert str(shown.token) not in repr(shown)


def test_an_application_that_nobody_said_who_may_see_asks_for_a_token(
    session: DashboardSession,
) -> None:
    assert create_app(session).server.test_client().get("/").status_code == 401


@pytest.mark.parametrize("path", [
    "/", "/_dash-layout", "/_dash-dependencies", "/_advisor/status", "/_advisor/trace",
    "/_advisor/timeline/info", "/assets/base.css", "/?token=wrong", "/?token=", "/nowhere",
])  # fmt: skip
def test_without_the_token_nothing_is_reported(guarded: Any, path: str) -> None:
    answer = guarded.test_client().get(path)
    assert answer.status_code == 401
    assert "aten" not in answer.text and "Set-Cookie" not in answer.headers
    assert guarded.test_client().post("/_dash-update-component", json={}).status_code == 401


@pytest.mark.parametrize(
    ("asked", "then"),
    [
        ("/findings?run=0&token={}", "/findings?run=0"),
        ("/?token={}", "/"),
        ("/timeline?x0=1&token={}&x1=2&focus=a%26b", "/timeline?x0=1&x1=2&focus=a%26b"),
        ("/timeline?%74oken={}", "/timeline"),
        ("/kernels?token={0}&token={0}&rank=1&rank=2", "/kernels?rank=1&rank=2"),
        ("/assets/favicon.svg?token={}", "/assets/favicon.svg"),
    ],
)
def test_the_token_leaves_the_address_and_all_else_stays(
    guarded: Any, local: Access, asked: str, then: str
) -> None:
    c = guarded.test_client()
    for _ in range(2):  # the second time the browser has its cookie already
        answer = c.get(asked.format(local.token))
        assert (answer.status_code, answer.headers["Location"]) == (302, then)
        assert c.get(then).status_code == 200


def test_an_old_token_leaves_the_address_of_one_who_was_let_in(guarded: Any, local: Access) -> None:
    c = guarded.test_client()
    c.get(f"/?token={local.token}")
    assert c.get("/run?token=of-yesterday&rank=0").headers["Location"] == "/run?rank=0"


def test_a_token_leaves_the_address_where_none_is_asked_for(session: DashboardSession) -> None:
    assert client(session).get("/run?token=x").headers["Location"] == "/run"


def test_the_cookie_is_signed_bound_to_the_port_and_not_the_token(
    guarded: Any, local: Access
) -> None:
    seen = set()
    for port in (8050, 8051):
        answer = guarded.test_client().get(
            f"/?token={local.token}", headers={"Host": f"localhost:{port}"}
        )
        value, _, rest = cookies(answer)[f"{ACCESS_COOKIE}_{port}"].partition(";")
        assert {"HttpOnly", "SameSite=Strict", "Path=/"} <= set(rest.strip().split("; "))
        assert str(local.token) not in str(answer.headers.getlist("Set-Cookie"))
        seen.add(value)
    assert len(seen) == 2
    good = seen.pop()
    payload, _, mark = good.rpartition(".")
    forged = [
        str(local.token), payload, f"{payload}.", f"{payload}.{mark[:-1]}", f"x{good}", "",
        f"{payload}x.{mark}", "é.é", good.swapcase(), Access.for_host("127.0.0.1").make_cookie(),
    ]  # fmt: skip
    for value, expected in [(good, 200), *((value, 401) for value in forged)]:
        given = {"Host": "localhost:8050", "Cookie": f"{ACCESS_COOKIE}_8050={value}"}
        asked = guarded.test_client(use_cookies=False).get("/", headers=given)
        assert asked.status_code == expected, value
    elsewhere = {"Host": "localhost:8051", "Cookie": f"{ACCESS_COOKIE}_8050={good}"}
    stranger = guarded.test_client(use_cookies=False)
    assert stranger.get("/", headers=elsewhere).status_code == 401


def test_the_token_is_compared_in_constant_time(monkeypatch: pytest.MonkeyPatch) -> None:
    compared = []

    def compare(one: bytes, other: bytes) -> bool:
        compared.append((one, other))
        return one == other

    monkeypatch.setattr("advisor.dashboard.server.hmac.compare_digest", compare)
    access = Access.for_host("127.0.0.1", "a" * 20)
    assert (
        access.is_valid_token("a" * 20)
        and not access.is_valid_token("b" * 20)
        and not access.is_valid_token("\ud800é")
    )
    assert len(compared) == 3


def test_a_name_that_points_here_is_refused_with_a_token_too(session: DashboardSession) -> None:
    access = Access.for_host("0.0.0.0")
    answer = client(session, access).get(
        f"/?token={access.token}", headers={"Host": "evil.example"}
    )
    assert answer.status_code == 403
    assert "Set-Cookie" not in answer.headers


def test_another_machine_may_come_by_an_address(session: DashboardSession) -> None:
    for access in (Access.for_host("0.0.0.0"), replace(Access.for_host("0.0.0.0"), token=None)):
        for host in ("10.0.0.5:8050", "[2001:db8::1]:8050"):
            answer = client(session, access).get(
                f"/run?token={access.token}", headers={"Host": host}
            )
            assert (answer.status_code, answer.headers["Location"]) == (302, "/run")


# -- the host: no other name, and no way to another ----------------------------------------------

NOT_OURS = [
    "localhost:80@evil.com", "[::1].evil.com", "[::1]evil.com", "localhost@evil.com", "[::1",
    "localhost#.evil.com", "localhost/.evil.com", "localhost\\.evil.com", "localhost .evil.com",
    "localhost,evil.com", "localhost:80,evil.com", "localhost:", "localhost:x", "localhost:-1",
    "localhost:99999", "localhost:８０", "ｌocalhost", "locaIhost", "localhost.", "localhost..",
    ".localhost", "127.1", "127.0.0.01", "2130706433", "0x7f.1", "0.0.0.0", "[::]", "[::1%25lo]",
    "[::ffff:127.0.0.1]", "[127.0.0.1]", "[localhost]", "::1", "localhost\t", "\tlocalhost",
    "localhost:80:80", "user:localhost", "evil.com:localhost", "evil.com", "a" * 5000,
]  # fmt: skip


@pytest.mark.parametrize("host", NOT_OURS)
def test_no_other_host_is_taken_for_this_machine(host: str) -> None:
    assert not Access.for_host("127.0.0.1").is_allowed_host(host)
    assert not Access().is_allowed_host(host)


@given(
    st.lists(
        st.sampled_from(
            ["localhost", "127.0.0.1", "[", "]", "::1", ":", "8050", "@", ".", "evil.com", "/", "?",
             "#", "\\", "\t", " ", "%", "0", "x", "\0", "é", "１"]
        ) | st.text(max_size=2),
        max_size=7,
    ).map("".join)
)  # fmt: skip
@settings(max_examples=1500, deadline=None)
@example("localhost:8050")
@example("[::1]:1")
def test_what_is_answered_is_this_machine_to_who_reads_addresses(host: str) -> None:
    """Held against the standard library's reading of the address that such a header comes from."""
    if Access().is_allowed_host(host):
        parts = urlsplit(f"http://{host}/")
        assert parts.hostname in ("localhost", "127.0.0.1", "::1")
        assert parts.username is None and parts.path == "/"
        assert parts.netloc == host and (parts.port is None or parts.port < 65536)


HOSTILE_PATHS = [
    "//evil.com/", "///evil.com", "/\t/evil.com/", "/\\evil.com", "\\\\evil.com", "/\\/evil.com",
    "/\r\n/evil.com", "/\n//evil.com", "/ /evil.com", "/.//evil.com", "/..//evil.com",
    "/%2f/evil.com", "/%5cevil.com", "/@evil.com", "/:@evil.com", "/http://evil.com",
    "/javascript:alert(1)", "/\x00/evil.com", "/\u2028/evil.com", "/／／evil.com", "",
]  # fmt: skip


def leaves_for(location: str) -> str:
    """The host that a browser goes to from here, by the URL standard: tabs and line ends are
    dropped, backslashes are slashes."""
    read = location.strip("".join(map(chr, range(33))))
    for dropped in "\t\r\n":
        read = read.replace(dropped, "")
    return urlsplit(urljoin("http://localhost:8050/a/b", read.replace("\\", "/"))).netloc


@given(
    path=st.sampled_from(HOSTILE_PATHS) | st.text(max_size=12).map(lambda text: f"/{text}"),
    query=st.binary(max_size=20).map(lambda raw: raw + b"&token=secret&" + raw),
)
@settings(max_examples=600, deadline=None)
def test_no_address_leads_to_another_host(path: str, query: bytes) -> None:
    location = local_address(path, query)
    assert location.startswith("/") and not location.startswith("//")
    assert location.isascii() and location.isprintable() and "\\" not in location
    assert leaves_for(location) == "localhost:8050"
    assert "secret" not in location


@pytest.mark.parametrize("path", ["/\t/evil.com/", "//evil.com/", "/\\evil.com", "/\n/evil.com"])
def test_the_token_cannot_be_used_to_redirect_elsewhere(
    guarded: Any, local: Access, path: str
) -> None:
    answer = guarded.test_client().get(
        f"/?token={local.token}&a=1", environ_overrides={"PATH_INFO": path}
    )
    assert answer.status_code == 302
    assert leaves_for(answer.headers["Location"]) == "localhost:8050"


def test_work_is_done_for_pages_of_ours_only(session: DashboardSession) -> None:
    c = client(session)
    for site, code in (
        ("same-origin", 200),
        ("none", 200),
        ("same-site", 403),
        ("cross-site", 403),
    ):
        asked = c.get("/_advisor/status", headers={"Sec-Fetch-Site": site})
        assert asked.status_code == code
        assert c.get("/findings", headers={"Sec-Fetch-Site": site}).status_code == 200
    for origin in ("http://localhost:1", "null", "http://[", "http://localhost.evil.com"):
        assert callback(c, "/", Origin=origin).status_code == 403


# -- what a request may name ---------------------------------------------------------------------


@pytest.mark.parametrize("page", [page.path for page in PAGES])
@pytest.mark.parametrize(
    "query",
    [
        "?run=../../etc/passwd", "?run=%2Fetc%2Fpasswd", "?run=1e9&rank=x", "?rank=-99999999999",
        "?rank=٣", "?run=&rank=&category=<b>&show=x&other=/etc", "?a=1&a=2&__class__=x",
        "?show=a&show=b&run=0&run=1&rank=0&rank=x&category=a&category=b&other=0&other=1",
        "?self=1&query=2&given=3&page=4&view=5&x0=&x0=1&focus=a&focus=b", "?%00=%00&%ff=%fe&=&&?=?",
    ],
)  # fmt: skip
def test_no_query_breaks_a_page_or_names_a_file(
    session: DashboardSession, page: str, query: str
) -> None:
    answer = callback(client(session), page, query)
    assert answer.status_code == 200
    assert "root:" not in answer.text
    assert "This page failed" not in answer.text


@given(st.text(max_size=60) | st.binary(max_size=60))
def test_what_an_address_asks_for_is_read_as_short_texts(search: str | bytes) -> None:
    for raw in (search, {"show": [search, "b"], "run": search, "x": [], "y": None}):
        found = parse_query(raw) if isinstance(raw, str | bytes) else clean_query(raw)
        assert all(isinstance(value, str) and key.isidentifier() for key, value in found.items())
    assert clean_query({"show": ["a", "b"], "rank": "1" * 100_000}) == {"show": "a"}
    assert parse_query("?show=a&show=b&rank=") == {"show": "a", "rank": ""}


@pytest.mark.parametrize("path", ["/assets/../access.py", "/assets/..%2f..%2faccess.py", "/etc"])
def test_no_path_leads_out_of_the_assets(session: DashboardSession, path: str) -> None:
    answer = client(session).get(path)
    assert "hmac" not in answer.text


def test_a_name_from_a_trace_is_sent_as_text_and_never_as_markup(session: DashboardSession) -> None:
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


def test_a_taken_port_gives_the_next_free_one(session: DashboardSession) -> None:
    taken = listen("127.0.0.1", 0)
    port = taken.getsockname()[1]
    server = bind(create_app(session, Access()).server, Access(), port)
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


def test_requests_that_no_page_sends_are_answered_in_a_line(
    session: DashboardSession, capsys: pytest.CaptureFixture[str]
) -> None:
    asking = client(session)
    outputs = [item["output"] for item in asking.get("/_dash-dependencies").get_json()]
    inputs = [{"id": "nope", "property": "value", "value": {"a": [1]}}]
    bodies: list[object] = [[], 5, None, "x", {}, {"output": 5}, {"output": "a.b", "inputs": None}]
    for output in outputs:
        bodies += [{"output": output}, {"output": output, "outputs": {}, "inputs": inputs}]
        bodies += [{"output": output, "outputs": {"id": "q"}, "inputs": [7], "state": 5}]
    capsys.readouterr()
    for body in bodies:
        answer = asking.post("/_dash-update-component", json=body)
        assert 400 <= answer.status_code < 500, body
        assert capsys.readouterr().err.count("\n") <= 1
    for name in ("nope/x.js", "dash/nope.js", "dash/../../x"):
        assert 400 <= asking.get(f"/_dash-component-suites/{name}").status_code < 500
        assert capsys.readouterr().err.count("\n") <= 1
