"""Connections: access by a browser and its redirect file, and idle connections."""

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

MAX_ANSWER_SECONDS = 2.0


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DashboardServer]:
    b = TraceBuilder()
    for _ in range(3):
        with b.step(), b.op("aten::mm"):
            b.launch("gemm", 900)
            b.sync()
    session = DashboardSession([str(b.write(tmp_path_factory.mktemp("entry") / "a.json"))]).load()
    access = Access.for_host()
    bound = bind(create_app(session, access).server, access, 0)
    threading.Thread(target=bound.run, daemon=True).start()
    yield bound
    bound.close()
    session.close()


def request_status(server: DashboardServer, path: str) -> int:
    """Return the status of a request over a new connection."""
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=30)
    connection.request("GET", path)
    status = connection.getresponse().status
    connection.close()
    return status


INCOMPLETE_POST = (
    b"POST /_dash-update-component HTTP/1.1\r\nHost: localhost\r\nContent-Length: 9\r\n\r\n"
)


@pytest.mark.parametrize(
    ("count", "sent"),
    [
        (20, b""),
        (20, b"GET / HTTP/1.1\r\nHost: localhost\r\n"),
        (150, b"GET"),
        (20, INCOMPLETE_POST + b"{"),
    ],
)
def test_idle_connections_do_not_delay_other_requests(
    server: DashboardServer, count: int, sent: bytes
) -> None:
    request_status(server, "/assets/favicon.svg")
    connections = [socket.create_connection(("127.0.0.1", server.port)) for _ in range(count)]
    try:
        for connection in connections:
            connection.sendall(sent)
        started = time.monotonic()
        assert request_status(server, f"/assets/favicon.svg?token={server.access.token}") == 302
        assert time.monotonic() - started < MAX_ANSWER_SECONDS
    finally:
        for connection in connections:
            connection.close()


def test_the_redirect_file_is_private_and_is_removed_after_use(
    server: DashboardServer,
) -> None:
    addresses: SimpleQueue[str] = SimpleQueue()
    server.access.admitted.clear()
    remove_file = open_browser(server, addresses.put)
    address = addresses.get(timeout=20)
    file = Path(address.removeprefix("file://"))
    assert str(server.access.token) not in address
    assert f"{server.base_address}?token={server.access.token}" in file.read_text()
    if os.name == "posix":
        assert stat.S_IMODE(file.stat().st_mode) == 0o600
        assert stat.S_IMODE(file.parent.stat().st_mode) == 0o700
    request_status(server, f"/?token={server.access.token}")
    deadline = time.monotonic() + 20
    while file.parent.exists() and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not file.parent.exists()
    remove_file()


def test_the_redirect_file_is_removed_if_no_browser_connects(server: DashboardServer) -> None:
    addresses: SimpleQueue[str] = SimpleQueue()
    server.access.admitted.clear()
    open_browser(server, addresses.put)()
    assert not Path(addresses.get(timeout=20).removeprefix("file://")).parent.exists()


def test_no_redirect_file_is_written_without_a_token() -> None:
    addresses: SimpleQueue[str] = SimpleQueue()
    open_browser(DashboardServer(None, Access(), 8050), addresses.put)()
    assert addresses.get(timeout=20) == "http://127.0.0.1:8050/"


def test_a_terminal_browser_does_not_block_the_server(
    server: DashboardServer,
) -> None:
    browser_exit, exits = threading.Event(), []
    remove_file = open_browser(server, lambda _: exits.append(browser_exit.wait(30)))
    assert exits == []  # the browser still runs, but the call returned
    remove_file()
    browser_exit.set()


def wait_for_page(page: Any, server: DashboardServer, path: str) -> None:
    page.locator("main h1").first.wait_for(state="attached", timeout=30_000)
    assert page.url == server.base_address.rstrip("/") + path


def test_a_browser_gets_access_by_the_redirect_file_and_by_links_from_other_sites(
    server: DashboardServer, browser: Any, tmp_path: Path
) -> None:
    """The browser regards both as other sites, so it does not send the cookie at first."""
    context = browser.new_context()
    page = context.new_page()
    file = redirect_file(server.address)
    try:
        page.goto(file.as_uri())
        wait_for_page(page, server, "/")
    finally:
        shutil.rmtree(file.parent)
    cookies = {cookie["name"]: cookie for cookie in context.cookies()}
    access_cookie = cookies[f"advisor_access_{server.port}"]
    assert access_cookie["httpOnly"] and access_cookie["sameSite"] == "Strict"
    assert str(server.access.token) not in str(cookies)
    link = tmp_path / "chat.html"
    for _ in range(2):
        path = "/findings?run=0&category=compute"
        link.write_text(f'<a href="{server.base_address.rstrip("/")}{path}">look</a>')
        page.goto(link.as_uri())
        page.click("a")
        wait_for_page(page, server, path)
    page.goto(f"{server.base_address}kernels?token={server.access.token}&rank=0")
    wait_for_page(page, server, "/kernels?rank=0")
    context.close()


def test_a_browser_without_a_token_gets_instructions(server: DashboardServer, browser: Any) -> None:
    context = browser.new_context()
    page = context.new_page()
    response = page.goto(server.base_address)
    assert response.status == 401
    assert "advisor dashboard" in page.locator("body").inner_text()
    context.add_cookies(
        [{"name": f"advisor_arrived_{server.port}", "value": "1", "url": server.base_address}]
    )
    page.goto(server.base_address)  # reloaded once, but not again
    page.get_by_text("A token is needed").wait_for(timeout=30_000)
    context.close()


def test_redirects_never_lead_to_another_host(server: DashboardServer, browser: Any) -> None:
    context = browser.new_context()
    page = context.new_page()
    requested: list[str] = []
    page.on("request", lambda request: requested.append(request.url))
    for path in ("%09/evil.example/", "/evil.example/", "%5Cevil.example", "/%09//evil.example"):
        page.goto(f"{server.base_address}{path}?token={server.access.token}")
        assert page.url.startswith(server.base_address)
    assert requested and all(url.startswith(server.base_address) for url in requested)
    context.close()
