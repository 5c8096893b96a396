"""``advisor dashboard``: says where it is, and in one line why it cannot be."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.timed


def test_missing_path_is_one_line_error(advisor: Callable[..., Any]) -> None:
    result = advisor("dashboard", "nowhere.json", "--no-browser")
    assert result.code == 2
    assert result.err == "advisor: nowhere.json: no such file or directory\n"


def test_help_names_the_options(advisor: Callable[..., Any]) -> None:
    out = advisor("dashboard", "--help").out
    for option in ("--host", "--port", "--live", "--no-browser", "--no-token", "--token-file"):
        assert option in out


def test_dashboard_serves_locally_and_ends_with_ctrl_c(busy_trace: Path) -> None:
    pytest.importorskip("dash")
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with started(busy_trace, "--no-browser", "--port", str(port)) as (process, address):
            assert address.startswith("http://127.0.0.1:") and f":{port}/" not in address
            base, _, token = address.partition("?token=")
            assert len(token) >= 32
            with pytest.raises(urllib.error.HTTPError, match="401"):
                urllib.request.urlopen(f"{base}_advisor/status", timeout=60)
            browser = urllib.request.build_opener(urllib.request.HTTPCookieProcessor())
            with browser.open(f"{base}_advisor/status?token={token}", timeout=60) as answer:
                assert b'"entries"' in answer.read()
                assert "token" not in answer.url
    assert "Traceback" not in process.err
    assert process.returncode == 0
    assert "next free one" in process.err


@pytest.mark.skipif(not Path("/proc/self/cmdline").exists(), reason="reads /proc")
def test_token_is_not_passed_to_started_processes(busy_trace: Path, tmp_path: Path) -> None:
    pytest.importorskip("dash")
    token = "a-token-that-somebody-chose"
    browser, seen = tmp_path / "browser", tmp_path / "seen"
    browser.write_text(
        f"#!{sys.executable}\n"
        "import os, pathlib, sys, urllib.request\n"
        "page = urllib.request.urlopen(sys.argv[1]).read().decode()\n"
        "arguments = str(sys.argv) + str(dict(os.environ))\n"
        f"pathlib.Path({str(seen)!r}).write_text(arguments + chr(10) + page)\n"
    )
    browser.chmod(0o700)
    environment = {"ADVISOR_DASHBOARD_TOKEN": token, "BROWSER": f"{browser} %s"}
    with started(busy_trace, "--port", "0", **environment) as (process, address):
        assert address.endswith(f"?token={token}")
        deadline = time.monotonic() + 60
        while not (seen.exists() and seen.read_text().endswith("</html>\n")):
            assert time.monotonic() < deadline
            time.sleep(0.05)
        arguments, _, page = seen.read_text().partition("\n")
        assert token not in arguments and "file://" in arguments
        assert f"{address}" in page
        assert token not in Path(f"/proc/{process.pid}/cmdline").read_text()
        process.ending = signal.SIGTERM
    folder = Path(arguments.split("file://")[1].split("'")[0]).parent
    assert not folder.exists()  # nobody came, and the end took it


def test_readable_or_weak_token_is_refused_in_one_line(
    advisor: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trace, file = tmp_path / "x.json", tmp_path / "token"
    trace.write_text("{}")
    file.write_text("long-enough-to-be-a-token")

    def refusal(*options: str) -> str:
        result = advisor("dashboard", str(trace), "--no-browser", *options)
        assert (result.code, result.err.count("\n")) == (2, 1)
        return str(result.err)

    file.chmod(0o644)
    assert "chmod 600" in refusal("--token-file", str(file))
    file.chmod(0o600)
    assert "choose one" in refusal("--no-token", "--token-file", str(file))
    for bad in ("short", "a token with spaces in it", "x" * 600, "é" * 30, ""):
        file.write_text(bad)
        assert "letters, digits" in refusal("--token-file", str(file))
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe, 0o600)
    assert "not a file" in refusal("--token-file", str(pipe))
    assert "cannot be read" in refusal("--token-file", str(tmp_path / "nowhere"))
    monkeypatch.setenv("ADVISOR_DASHBOARD_TOKEN", "short")
    assert "ADVISOR_DASHBOARD_TOKEN: a token has" in refusal()


@pytest.mark.parametrize(
    "url",
    ["", "ui.perfetto.dev", "javascript:alert(1)", "file:///x", "https://a@b", "http://["],
)
def test_invalid_perfetto_address_is_one_line_error(
    advisor: Callable[..., Any], busy_trace: Path, url: str
) -> None:
    result = advisor("dashboard", str(busy_trace), "--no-browser", "--perfetto-url", url)
    assert (result.code, result.err.count("\n")) == (2, 1)
    assert "--perfetto-url" in result.err


class RunningDashboard(subprocess.Popen[str]):
    """A dashboard that runs; ``err`` is what it said once it has ended."""

    err = ""
    ending = signal.SIGINT


@contextmanager
def started(*arguments: object, **environment: str) -> Iterator[tuple[RunningDashboard, str]]:
    """``advisor dashboard`` and the address that it printed; ended as Ctrl-C does."""
    process = RunningDashboard(
        [sys.executable, "-m", "advisor", "dashboard", *map(str, arguments)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"PYTHONUNBUFFERED": "1", **environment},
    )
    try:
        assert process.stdout is not None
        yield process, process.stdout.readline().removeprefix("advisor dashboard: ").strip()
    finally:
        process.send_signal(process.ending)
        _, process.err = process.communicate(timeout=60)
