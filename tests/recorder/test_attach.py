"""A live server profiles itself, and stops again whatever happens: against a real HTTP server that
speaks the endpoints of vLLM and SGLang."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import pytest

from advisor.core.errors import AdvisorError
from advisor.recorder import attach

pytestmark = pytest.mark.timed


class Engine(ThreadingHTTPServer):
    """A fake inference server: the requests it got, and whether its profiler runs."""

    def __init__(self, kind: str, folder: Path | None = None, **faults: Any) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.kind, self.folder, self.faults = kind, folder, faults
        self.calls: list[tuple[str, Any]] = []
        self.profiles = False

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


class Handler(BaseHTTPRequestHandler):
    server: Engine

    def send_answer(self, status: int, body: object = None) -> None:
        text = json.dumps(body or {}).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)

    def do_GET(self) -> None:
        version_path = {"vllm": "/version", "sglang": "/get_server_info"}
        known = self.path == version_path.get(self.server.kind)
        self.send_answer(200 if known else 404, {"version": "0.13.0"} if known else None)

    def do_POST(self) -> None:
        size = int(self.headers.get("Content-Length") or 0)
        body = json.loads(self.rfile.read(size)) if size else None
        server = self.server
        server.calls.append((self.path, body))
        if self.path == "/start_profile":
            if "start" in server.faults:
                server.profiles = server.faults.get("runs", False)
                self.send_answer(server.faults["start"])
                return
            server.profiles = True
            time.sleep(server.faults.get("slow", 0))
            self.send_answer(200)
        elif self.path == "/stop_profile":
            if server.faults.get("refuse", 0) > 0:
                server.faults["refuse"] -= 1
                self.send_answer(500)
                return
            server.profiles = False
            if server.folder is not None:
                (server.folder / "rank0.pt.trace.json.gz").write_bytes(b"x")
            self.send_answer(200)

    def log_message(self, *args: object) -> None:
        pass


@contextmanager
def serving(kind: str, folder: Path | None = None, **faults: Any) -> Iterator[Engine]:
    with Engine(kind, folder, **faults) as engine:
        thread = Thread(target=engine.serve_forever, args=(0.02,))
        thread.start()
        try:
            yield engine
        finally:
            engine.shutdown()
            thread.join()


def _paths(engine: Engine) -> list[str]:
    return [path for path, _ in engine.calls]


@pytest.mark.parametrize("kind", ["vllm", "sglang"])
def test_a_server_profiles_itself_and_stops(kind: str, tmp_path: Path) -> None:
    with serving(kind, tmp_path) as engine:
        result = attach.attach(engine.url, 0.1, folder=tmp_path)
        assert not engine.profiles
        assert _paths(engine) == ["/start_profile", "/stop_profile"]
        body = engine.calls[0][1]
        assert body is None if kind == "vllm" else body["output_dir"] == str(tmp_path)
    assert (result.engine, result.interrupted) == (kind, False)
    assert result.seconds >= 0.1
    assert [file.name for file in result.files] == ["rank0.pt.trace.json.gz"]


def test_an_interrupt_stops_the_profiler(tmp_path: Path) -> None:
    """The interrupts are Ctrl-C and the signal of a job scheduler."""
    for number in (signal.SIGINT, signal.SIGTERM):
        with serving("vllm") as engine:
            command = [sys.executable, "-m", "advisor", "record", "--attach", engine.url]
            process = subprocess.Popen(
                [*command, "--seconds", "60"], stdout=subprocess.PIPE, text=True
            )
            until = time.monotonic() + 30
            while not engine.profiles and time.monotonic() < until:
                time.sleep(0.05)
            time.sleep(0.3)
            os.kill(process.pid, number)
            out, _ = process.communicate(timeout=30)
            assert "the profiler is off" in out
            assert not engine.profiles
            assert _paths(engine)[-1] == "/stop_profile"


def test_failed_stop_is_retried() -> None:
    with serving("vllm", refuse=2) as engine:
        attach.attach(engine.url, 0.05)
        assert not engine.profiles
        assert _paths(engine).count("/stop_profile") == 3


def test_a_profiler_that_cannot_be_stopped_is_said() -> None:
    with serving("vllm", refuse=9) as engine, pytest.raises(AdvisorError, match="may still run"):
        attach.attach(engine.url, 0.05)


def test_a_start_that_fails_may_have_started(monkeypatch: pytest.MonkeyPatch) -> None:
    with serving("vllm", start=500, runs=True) as engine:
        with pytest.raises(AdvisorError, match="answered 500"):
            attach.attach(engine.url, 0.05)
        assert not engine.profiles
    monkeypatch.setattr(attach, "ANSWER_SECONDS", 0.2)
    monkeypatch.setattr(attach.Server.ask, "__defaults__", (None, 0.2))
    with serving("vllm", slow=1.0) as engine:
        with pytest.raises(AdvisorError, match="timed out"):
            attach.attach(engine.url, 0.05)
        assert "/stop_profile" in _paths(engine)


def test_a_server_without_a_profiler_says_how_to_get_one() -> None:
    with serving("vllm", start=404) as engine:
        with pytest.raises(AdvisorError, match="--profiler-config"):
            attach.attach(engine.url, 0.05)
        assert _paths(engine) == ["/start_profile"]


@pytest.mark.parametrize(
    ("url", "why"),
    [
        ("file:///etc/passwd", "http://host:port"),
        ("ftp://host", "http://host:port"),
        ("localhost:8000", "http://host:port"),
        ("http://", "http://host:port"),
        ("http://user:secret@host", "without a user"),
        ("http://host:port", "not an address"),
        ("http://127.0.0.1:1", "no server answers"),
    ],
)
def test_other_addresses_are_refused(url: str, why: str) -> None:
    with pytest.raises(AdvisorError, match=why) as error:
        attach.attach(url, 0.05)
    assert "secret" not in str(error.value)


def test_another_server_is_none() -> None:
    with serving("other") as engine:
        with pytest.raises(AdvisorError, match="neither vLLM nor SGLang"):
            attach.attach(engine.url, 0.05)
        assert engine.calls == []


@pytest.mark.parametrize("seconds", [0, -1, 1e9, float("nan")])
def test_the_time_is_limited(seconds: float) -> None:
    with pytest.raises(AdvisorError, match="--seconds"):
        attach.attach("http://127.0.0.1:1", seconds)


def test_a_program_and_a_server_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    from advisor.cli import run

    assert run(["record", "--attach", "http://127.0.0.1:1", "train.py"]) == 2
    assert run(["record"]) == 2
