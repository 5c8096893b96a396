"""Server: access control, security headers, and requests that only read."""

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


def make_client(session: DashboardSession, access: Access | None = None) -> Any:
    return create_app(session, access or Access()).server.test_client()


def post_page_callback(client: Any, path: str, search: str = "", **headers: str) -> Any:
    """Send the request by which a browser loads a page."""
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


def read_policy(response: Any) -> dict[str, str]:
    parts = response.headers["Content-Security-Policy"].split("; ")
    return {part.split(" ")[0]: part.partition(" ")[2] for part in parts}


def test_pages_may_only_run_scripts_of_this_server(session: DashboardSession) -> None:
    policy = read_policy(make_client(session).get("/"))
    assert "unsafe-eval" not in str(policy)
    assert "unsafe-inline" not in policy["script-src"]
    assert policy["script-src"].startswith("'self'")
    assert policy["connect-src"] == policy["default-src"] == "'self'"
    assert policy["object-src"] == policy["frame-ancestors"] == policy["base-uri"] == "'none'"


def test_every_inline_script_of_the_page_is_allowed_by_its_hash(session: DashboardSession) -> None:
    import base64
    import hashlib
    import re

    response = make_client(session).get("/")
    inline = re.findall(
        r"<script(?![^>]*src=)(?![^>]*json)[^>]*>(.*?)</script>", response.text, re.S
    )
    assert inline
    for script in inline:
        digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
        assert f"'sha256-{digest}'" in read_policy(response)["script-src"]


@pytest.mark.parametrize("path", ["/", "/_dash-layout", "/_advisor/status", "/assets/base.css"])
def test_all_responses_have_the_security_headers(session: DashboardSession, path: str) -> None:
    response = make_client(session).get(path)
    assert response.status_code == 200
    assert response.headers["X-Content-Type-Options"] == "nosniff"
    assert response.headers["Referrer-Policy"] == "no-referrer"
    assert response.headers["X-Frame-Options"] == "DENY"


@pytest.mark.parametrize(
    "host", ["localhost", "127.0.0.1", "127.0.0.1:8050", "[::1]:8050", "LOCALHOST:9"]
)
def test_requests_by_local_names_are_answered(session: DashboardSession, host: str) -> None:
    assert make_client(session).get("/", headers={"Host": host}).status_code == 200


@pytest.mark.parametrize(
    "host",
    ["evil.example", "localhost.evil.example", "127.0.0.1.evil.example", "10.0.0.1", "", "[evil"],
)
def test_requests_by_foreign_names_are_refused(session: DashboardSession, host: str) -> None:
    for path in ("/", "/_dash-layout", "/_advisor/status", "/assets/base.css"):
        assert make_client(session).get(path, headers={"Host": host}).status_code == 403


def test_a_post_from_another_site_is_refused(session: DashboardSession) -> None:
    client = make_client(session)
    assert post_page_callback(client, "/").status_code == 200
    assert post_page_callback(client, "/", Origin="http://localhost").status_code == 200
    assert post_page_callback(client, "/", Origin="http://evil.example").status_code == 403
    assert post_page_callback(client, "/", **{"Sec-Fetch-Site": "cross-site"}).status_code == 403


@pytest.mark.parametrize("method", ["put", "delete", "patch", "post", "options"])
def test_writing_methods_are_refused(session: DashboardSession, method: str) -> None:
    assert getattr(make_client(session), method)("/").status_code == 405
    assert getattr(make_client(session), method)("/_advisor/status").status_code == 405


def test_a_large_body_is_refused(session: DashboardSession) -> None:
    client = make_client(session)
    client.get("/")
    response = client.post(
        "/_dash-update-component", data=b" " * (5 << 20), content_type="application/json"
    )
    assert response.status_code == 413


# -- the token -----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def local() -> Access:
    return Access.for_host("127.0.0.1")


@pytest.fixture(scope="module")
def server_with_token(session: DashboardSession, local: Access) -> Any:
    """Return the server of a dashboard that needs a token."""
    return create_app(session, local).server


def read_cookies(response: Any) -> dict[str, str]:
    """Return the cookies that a response sets: value and attributes by name."""
    return dict(line.split("=", 1) for line in response.headers.getlist("Set-Cookie"))


def test_every_host_needs_a_new_random_token() -> None:
    for host in ("127.0.0.1", "localhost", "::1", "0.0.0.0"):
        assert len(Access.for_host(host).token or "") >= 32
        assert Access.for_host(host).token != Access.for_host(host).token
    access = Access.for_host("127.0.0.1")
    assert str(access.token) not in repr(access)


def test_an_application_needs_a_token_by_default(
    session: DashboardSession,
) -> None:
    assert create_app(session).server.test_client().get("/").status_code == 401


@pytest.mark.parametrize("path", [
    "/", "/_dash-layout", "/_dash-dependencies", "/_advisor/status", "/_advisor/trace",
    "/_advisor/timeline/info", "/assets/base.css", "/?token=wrong", "/?token=", "/nowhere",
])  # fmt: skip
def test_requests_without_the_token_get_no_data(server_with_token: Any, path: str) -> None:
    response = server_with_token.test_client().get(path)
    assert response.status_code == 401
    assert "aten" not in response.text and "Set-Cookie" not in response.headers
    assert (
        server_with_token.test_client().post("/_dash-update-component", json={}).status_code == 401
    )


@pytest.mark.parametrize(
    ("address", "expected"),
    [
        ("/findings?run=0&token={}", "/findings?run=0"),
        ("/?token={}", "/"),
        ("/timeline?x0=1&token={}&x1=2&focus=a%26b", "/timeline?x0=1&x1=2&focus=a%26b"),
        ("/timeline?%74oken={}", "/timeline"),
        ("/kernels?token={0}&token={0}&rank=1&rank=2", "/kernels?rank=1&rank=2"),
        ("/assets/favicon.svg?token={}", "/assets/favicon.svg"),
    ],
)
def test_the_token_is_removed_from_the_address(
    server_with_token: Any, local: Access, address: str, expected: str
) -> None:
    client = server_with_token.test_client()
    for _ in range(2):  # the second time the browser already has its cookie
        response = client.get(address.format(local.token))
        assert (response.status_code, response.headers["Location"]) == (302, expected)
        assert client.get(expected).status_code == 200


def test_an_old_token_is_removed_from_the_address_of_a_known_browser(
    server_with_token: Any, local: Access
) -> None:
    client = server_with_token.test_client()
    client.get(f"/?token={local.token}")
    assert client.get("/run?token=of-yesterday&rank=0").headers["Location"] == "/run?rank=0"


def test_a_token_is_removed_from_the_address_if_none_is_needed(session: DashboardSession) -> None:
    assert make_client(session).get("/run?token=x").headers["Location"] == "/run"


def test_the_cookie_is_signed_and_bound_to_the_port(server_with_token: Any, local: Access) -> None:
    values = set()
    for port in (8050, 8051):
        response = server_with_token.test_client().get(
            f"/?token={local.token}", headers={"Host": f"localhost:{port}"}
        )
        value, _, rest = read_cookies(response)[f"{ACCESS_COOKIE}_{port}"].partition(";")
        assert {"HttpOnly", "SameSite=Strict", "Path=/"} <= set(rest.strip().split("; "))
        assert str(local.token) not in str(response.headers.getlist("Set-Cookie"))
        values.add(value)
    assert len(values) == 2
    valid = values.pop()
    payload, _, signature = valid.rpartition(".")
    forged = [
        str(local.token), payload, f"{payload}.", f"{payload}.{signature[:-1]}", f"x{valid}", "",
        f"{payload}x.{signature}", "é.é", valid.swapcase(),
        Access.for_host("127.0.0.1").make_cookie(),
    ]  # fmt: skip
    for value, expected in [(valid, 200), *((value, 401) for value in forged)]:
        headers = {"Host": "localhost:8050", "Cookie": f"{ACCESS_COOKIE}_8050={value}"}
        response = server_with_token.test_client(use_cookies=False).get("/", headers=headers)
        assert response.status_code == expected, value
    other_port = {"Host": "localhost:8051", "Cookie": f"{ACCESS_COOKIE}_8050={valid}"}
    new_client = server_with_token.test_client(use_cookies=False)
    assert new_client.get("/", headers=other_port).status_code == 401


def test_the_token_is_compared_in_constant_time(monkeypatch: pytest.MonkeyPatch) -> None:
    comparisons = []

    def compare(first: bytes, second: bytes) -> bool:
        comparisons.append((first, second))
        return first == second

    monkeypatch.setattr("advisor.dashboard.server.hmac.compare_digest", compare)
    access = Access.for_host("127.0.0.1", "a" * 20)
    assert (
        access.is_valid_token("a" * 20)
        and not access.is_valid_token("b" * 20)
        and not access.is_valid_token("\ud800é")
    )
    assert len(comparisons) == 3


def test_a_foreign_name_is_refused_even_with_the_token(session: DashboardSession) -> None:
    access = Access.for_host("0.0.0.0")
    response = make_client(session, access).get(
        f"/?token={access.token}", headers={"Host": "evil.example"}
    )
    assert response.status_code == 403
    assert "Set-Cookie" not in response.headers


def test_another_machine_may_connect_by_ip_address(session: DashboardSession) -> None:
    for access in (Access.for_host("0.0.0.0"), replace(Access.for_host("0.0.0.0"), token=None)):
        for host in ("10.0.0.5:8050", "[2001:db8::1]:8050"):
            response = make_client(session, access).get(
                f"/run?token={access.token}", headers={"Host": host}
            )
            assert (response.status_code, response.headers["Location"]) == (302, "/run")


# -- the host: no other name, and no way to another ----------------------------------------------

FOREIGN_HOSTS = [
    "localhost:80@evil.com", "[::1].evil.com", "[::1]evil.com", "localhost@evil.com", "[::1",
    "localhost#.evil.com", "localhost/.evil.com", "localhost\\.evil.com", "localhost .evil.com",
    "localhost,evil.com", "localhost:80,evil.com", "localhost:", "localhost:x", "localhost:-1",
    "localhost:99999", "localhost:８０", "ｌocalhost", "locaIhost", "localhost.", "localhost..",
    ".localhost", "127.1", "127.0.0.01", "2130706433", "0x7f.1", "0.0.0.0", "[::]", "[::1%25lo]",
    "[::ffff:127.0.0.1]", "[127.0.0.1]", "[localhost]", "::1", "localhost\t", "\tlocalhost",
    "localhost:80:80", "user:localhost", "evil.com:localhost", "evil.com", "a" * 5000,
]  # fmt: skip


@pytest.mark.parametrize("host", FOREIGN_HOSTS)
def test_no_foreign_host_is_accepted_as_local(host: str) -> None:
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
def test_accepted_hosts_are_local_for_the_standard_library_too(host: str) -> None:
    """The standard library parses the address that such a header comes from."""
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


def browser_target(location: str) -> str:
    """Return the host that a browser goes to, by the URL standard.

    Tabs and line ends are dropped, and backslashes count as slashes."""
    text = location.strip("".join(map(chr, range(33))))
    for dropped in "\t\r\n":
        text = text.replace(dropped, "")
    return urlsplit(urljoin("http://localhost:8050/a/b", text.replace("\\", "/"))).netloc


@given(
    path=st.sampled_from(HOSTILE_PATHS) | st.text(max_size=12).map(lambda text: f"/{text}"),
    query=st.binary(max_size=20).map(lambda raw: raw + b"&token=secret&" + raw),
)
@settings(max_examples=600, deadline=None)
def test_redirect_addresses_stay_on_this_host(path: str, query: bytes) -> None:
    location = local_address(path, query)
    assert location.startswith("/") and not location.startswith("//")
    assert location.isascii() and location.isprintable() and "\\" not in location
    assert browser_target(location) == "localhost:8050"
    assert "secret" not in location


@pytest.mark.parametrize("path", ["/\t/evil.com/", "//evil.com/", "/\\evil.com", "/\n/evil.com"])
def test_the_redirect_of_a_token_stays_on_this_host(
    server_with_token: Any, local: Access, path: str
) -> None:
    response = server_with_token.test_client().get(
        f"/?token={local.token}&a=1", environ_overrides={"PATH_INFO": path}
    )
    assert response.status_code == 302
    assert browser_target(response.headers["Location"]) == "localhost:8050"


def test_endpoints_answer_only_pages_of_this_server(session: DashboardSession) -> None:
    client = make_client(session)
    for site, code in (
        ("same-origin", 200),
        ("none", 200),
        ("same-site", 403),
        ("cross-site", 403),
    ):
        response = client.get("/_advisor/status", headers={"Sec-Fetch-Site": site})
        assert response.status_code == code
        assert client.get("/findings", headers={"Sec-Fetch-Site": site}).status_code == 200
    for origin in ("http://localhost:1", "null", "http://[", "http://localhost.evil.com"):
        assert post_page_callback(client, "/", Origin=origin).status_code == 403


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
def test_queries_never_break_a_page_or_reach_a_file(
    session: DashboardSession, page: str, query: str
) -> None:
    response = post_page_callback(make_client(session), page, query)
    assert response.status_code == 200
    assert "root:" not in response.text
    assert "This page failed" not in response.text


@given(st.text(max_size=60) | st.binary(max_size=60))
def test_query_parameters_are_short_texts(search: str | bytes) -> None:
    for raw in (search, {"show": [search, "b"], "run": search, "x": [], "y": None}):
        parameters = parse_query(raw) if isinstance(raw, str | bytes) else clean_query(raw)
        assert all(
            isinstance(value, str) and key.isidentifier() for key, value in parameters.items()
        )
    assert clean_query({"show": ["a", "b"], "rank": "1" * 100_000}) == {"show": "a"}
    assert parse_query("?show=a&show=b&rank=") == {"show": "a", "rank": ""}


@pytest.mark.parametrize("path", ["/assets/../access.py", "/assets/..%2f..%2faccess.py", "/etc"])
def test_paths_outside_the_assets_are_refused(session: DashboardSession, path: str) -> None:
    response = make_client(session).get(path)
    assert "hmac" not in response.text


def test_names_from_a_trace_are_sent_as_text(session: DashboardSession) -> None:
    response = post_page_callback(make_client(session), "/kernels")
    assert HOSTILE in json.dumps(response.json, ensure_ascii=False)
    components = json.dumps(response.json)
    assert '"dangerously_allow_html": true' not in components
    assert '"dangerouslySetInnerHTML"' not in components
    # plotly interprets some tags, so figures have entities instead
    plotted = json.dumps(_figures(response.json))
    assert "<img" not in plotted


def _figures(node: Any) -> list[Any]:
    if isinstance(node, dict):
        figures = [node["figure"]] if isinstance(node.get("figure"), dict) else []
        return figures + [figure for value in node.values() for figure in _figures(value)]
    if isinstance(node, list):
        return [figure for value in node for figure in _figures(value)]
    return []


# -- the port ------------------------------------------------------------------------------------


def test_the_next_free_port_is_used_if_one_is_taken(session: DashboardSession) -> None:
    listener = listen("127.0.0.1", 0)
    port = listener.getsockname()[1]
    server = bind(create_app(session, Access()).server, Access(), port)
    try:
        assert port < server.port <= port + 50
        assert server.address == f"http://127.0.0.1:{server.port}/"
    finally:
        server.close()
        listener.close()


def test_an_address_of_another_machine_is_refused_in_one_line() -> None:
    with pytest.raises(AdvisorError, match=r"--host 203\.0\.113\.1"):
        listen("203.0.113.1", 0)


def test_the_assets_have_no_inline_handlers_or_eval() -> None:
    from advisor.dashboard.app import ASSETS

    for file in Path(ASSETS).glob("*.js"):
        text = file.read_text(encoding="utf-8")
        for forbidden in ("eval(", "new Function", "innerHTML", "document.write", "http://"):
            assert forbidden not in text.replace("http://www.w3.org", ""), (file.name, forbidden)


def test_invalid_callbacks_are_refused_in_one_line(
    session: DashboardSession, capsys: pytest.CaptureFixture[str]
) -> None:
    client = make_client(session)
    outputs = [item["output"] for item in client.get("/_dash-dependencies").get_json()]
    inputs = [{"id": "nope", "property": "value", "value": {"a": [1]}}]
    bodies: list[object] = [[], 5, None, "x", {}, {"output": 5}, {"output": "a.b", "inputs": None}]
    for output in outputs:
        bodies += [{"output": output}, {"output": output, "outputs": {}, "inputs": inputs}]
        bodies += [{"output": output, "outputs": {"id": "q"}, "inputs": [7], "state": 5}]
    capsys.readouterr()
    for body in bodies:
        response = client.post("/_dash-update-component", json=body)
        assert 400 <= response.status_code < 500, body
        assert capsys.readouterr().err.count("\n") <= 1
    for name in ("nope/x.js", "dash/nope.js", "dash/../../x"):
        assert 400 <= client.get(f"/_dash-component-suites/{name}").status_code < 500
        assert capsys.readouterr().err.count("\n") <= 1
