"""Servers on this machine: S3 by moto, behind one that fails on demand; and plain HTTP."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from advisor.read.remote import filesystem
from advisor.testing import TraceBuilder
from tests.read.remote.faulty import Server, State

NOON = 1_700_000_000_000_000.0  # µs of Unix time


@pytest.fixture(autouse=True)
def _short_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Waits between attempts are short; what an answer may take stays long: machines are busy."""
    monkeypatch.setattr(filesystem, "FIRST_WAIT", 0.01)
    monkeypatch.setenv("AWS_MAX_ATTEMPTS", "1")
    for name in ("http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture(scope="session")
def trace_bytes() -> Callable[[int], bytes]:
    """A small trace of a rank, as text."""

    def make(rank: int) -> bytes:
        b = TraceBuilder(rank=rank)
        b.now = NOON
        for _ in range(8):
            with b.step(), b.op("aten::mm"):
                b.launch("gemm", 100)
        return b.json()

    return make


@pytest.fixture
def web() -> Iterator[Server]:
    """A web server that serves ``web.state.files``."""
    with Server(State()) as server:
        yield server


@pytest.fixture(scope="session")
def _moto() -> Iterator[tuple[str, int]]:
    server = pytest.importorskip("moto.server").ThreadedMotoServer(port=0, verbose=False)
    server.start()
    yield server.get_host_and_port()
    server.stop()


@pytest.fixture
def s3(_moto: tuple[str, int], monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """A bucket ``run`` in a real S3 server, behind one that fails: ``store(key, bytes)``, and
    ``state.faults``. Found as a user's would be, by the environment."""
    s3fs = pytest.importorskip("s3fs")
    with Server(State(upstream=_moto)) as server:
        monkeypatch.setenv("AWS_ENDPOINT_URL", server.url)
        monkeypatch.setenv("AWS_ACCESS_KEY_ID", "testing")
        monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "testing-secret")
        monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
        s3fs.S3FileSystem.clear_instance_cache()
        system = s3fs.S3FileSystem()
        if not system.exists("run"):
            system.mkdir("run")
        for old in system.find("run"):
            system.rm(old)
        yield _Bucket(system, server)
        s3fs.S3FileSystem.clear_instance_cache()


class _Bucket:
    def __init__(self, system: Any, server: Server) -> None:
        self._system = system
        self.state = server.state
        self.endpoint = server.url

    def store(self, key: str, data: bytes) -> str:
        """Store data and return its URL."""
        self._system.pipe(f"run/{key}", data)
        return f"s3://run/{key}"
