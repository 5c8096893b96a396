"""Coming in: by a browser and the file that opens it, past connections on which nothing is said."""

from __future__ import annotations

import http.client
import os
import shutil
import socket
import stat
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import pytest

pytest.importorskip("dash")

from advisor.dashboard.app import create_app
from advisor.dashboard.loaded_runs import DashboardSession
from advisor.dashboard.server import Access, DashboardServer, bind, open_browser, redirect_file
from advisor.testing import TraceBuilder

SOON = 2.0


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DashboardServer]:
    b = TraceBuilder()
    for _ in range(3):
        with b.step(), b.op("aten::mm"):
            b.launch("gemm", 900)
            b.sync()
    session = DashboardSession([str(b.write(tmp_path_factory.mktemp("entry") / "a.json"))]).load()
    access = Access.for_host()
    made = bind(create_app(session, access).server, access, 0)
    threading.Thread(target=made.run, daemon=True).start()
    yield made
    made.close()
    session.close()


def ask(server: DashboardServer, path: str) -> int:
    """The status of one request over a connection of its own."""
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=30)
    connection.request("GET", path)
    status = connection.getresponse().status
    connection.close()
    return status


HEAD = b"POST /_dash-update-component HTTP/1.1\r\nHost: localhost\r\nContent-Length: 9\r\n\r\n"


@pytest.mark.parametrize(
    ("count", "sent"),
    [(20, b""), (20, b"GET / HTTP/1.1\r\nHost: localhost\r\n"), (150, b"GET"), (20, HEAD + b"{")],
)
def test_connections_on_which_nothing_more_is_said_hold_nobody_up(
    server: DashboardServer, count: int, sent: bytes
) -> None:
    ask(server, "/assets/favicon.svg")
    held = [socket.create_connection(("127.0.0.1", server.port)) for _ in range(count)]
    try:
        for one in held:
            one.sendall(sent)
        began = time.monotonic()
        assert ask(server, f"/assets/favicon.svg?token={server.access.token}") == 302
        assert time.monotonic() - began < SOON
    finally:
        for one in held:
            one.close()


def test_the_file_that_opens_the_browser_is_the_users_alone_and_goes_once_it_served(
    server: DashboardServer,
) -> None:
    opened: SimpleQueue[str] = SimpleQueue()
    server.access.admitted.clear()
    forget = open_browser(server, opened.put)
    address = opened.get(timeout=20)
    file = Path(address.removeprefix("file://"))
    assert str(server.access.token) not in address
    assert f"{server.base_address}?token={server.access.token}" in file.read_text()
    if os.name == "posix":
        assert stat.S_IMODE(file.stat().st_mode) == 0o600
        assert stat.S_IMODE(file.parent.stat().st_mode) == 0o700
    ask(server, f"/?token={server.access.token}")
    deadline = time.monotonic() + 20
    while file.parent.exists() and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not file.parent.exists()
    forget()


def test_a_browser_that_never_came_leaves_no_file(server: DashboardServer) -> None:
    opened: SimpleQueue[str] = SimpleQueue()
    server.access.admitted.clear()
    open_browser(server, opened.put)()
    assert not Path(opened.get(timeout=20).removeprefix("file://")).parent.exists()


def test_without_a_token_there_is_no_file() -> None:
    opened: SimpleQueue[str] = SimpleQueue()
    open_browser(DashboardServer(None, Access(), 8050), opened.put)()
    assert opened.get(timeout=20) == "http://127.0.0.1:8050/"


def test_a_browser_that_stays_in_the_terminal_does_not_hold_the_server_up(
    server: DashboardServer,
) -> None:
    left, came = threading.Event(), []
    forget = open_browser(server, lambda _: came.append(left.wait(30)))
    assert came == []  # it is still there, and the caller goes on
    forget()
    left.set()


def arrived(page: Any, server: DashboardServer, path: str) -> None:
    page.locator("main h1").first.wait_for(state="attached", timeout=30_000)
    assert page.url == server.base_address.rstrip("/") + path


def test_a_browser_comes_in_by_the_file_and_by_links_of_others(
    server: DashboardServer, browser: Any, tmp_path: Path
) -> None:
    """Both are other sites to it, and it keeps the cookie back at first."""
    context = browser.new_context()
    page = context.new_page()
    file = redirect_file(server.address)
    try:
        page.goto(file.as_uri())
        arrived(page, server, "/")
    finally:
        shutil.rmtree(file.parent)
    kept = {cookie["name"]: cookie for cookie in context.cookies()}
    own = kept[f"advisor_access_{server.port}"]
    assert own["httpOnly"] and own["sameSite"] == "Strict"
    assert str(server.access.token) not in str(kept)
    link = tmp_path / "chat.html"
    for _ in range(2):
        deep = "/findings?run=0&category=compute"
        link.write_text(f'<a href="{server.base_address.rstrip("/")}{deep}">look</a>')
        page.goto(link.as_uri())
        page.click("a")
        arrived(page, server, deep)
    page.goto(f"{server.base_address}kernels?token={server.access.token}&rank=0")
    arrived(page, server, "/kernels?rank=0")
    context.close()


def test_a_browser_without_the_token_is_told_how_to_come_in(
    server: DashboardServer, browser: Any
) -> None:
    context = browser.new_context()
    page = context.new_page()
    answer = page.goto(server.base_address)
    assert answer.status == 401
    assert "advisor dashboard" in page.locator("body").inner_text()
    context.add_cookies(
        [{"name": f"advisor_arrived_{server.port}", "value": "1", "url": server.base_address}]
    )
    page.goto(server.base_address)  # asked for once more, and no further
    page.get_by_text("A token is needed").wait_for(timeout=30_000)
    context.close()


def test_a_browser_finds_no_way_to_another_host_in_a_redirect(
    server: DashboardServer, browser: Any
) -> None:
    context = browser.new_context()
    page = context.new_page()
    asked: list[str] = []
    page.on("request", lambda request: asked.append(request.url))
    for path in ("%09/evil.example/", "/evil.example/", "%5Cevil.example", "/%09//evil.example"):
        page.goto(f"{server.base_address}{path}?token={server.access.token}")
        assert page.url.startswith(server.base_address)
    assert asked and all(url.startswith(server.base_address) for url in asked)
    context.close()
