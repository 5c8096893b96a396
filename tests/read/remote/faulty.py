"""An HTTP server, of files or before another server, that does to chosen names what networks do."""

from __future__ import annotations

import http.client
import re
import threading
from collections import Counter, defaultdict
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType
from urllib.parse import urlsplit

STEP = 1 << 16


@dataclass
class Fault:
    """A fault of the answers to GET of a name, the first ``times`` of them (None: always)."""

    status: int | None = None
    """Status of the answer."""
    cut: bool = False
    """Promise all, send half, then close the connection."""
    hang: bool = False
    """Send one byte, and nothing more."""
    drip: bool = False
    """Send a byte now and then."""
    further: bool = False
    """Close the connection, each time a little later."""
    times: int | None = None
    heads: bool = True
    """Whether HEAD fails too."""


@dataclass
class State:
    """A server that listens inside ``with``."""

    files: dict[str, bytes] = field(default_factory=dict)
    faults: dict[str, Fault] = field(default_factory=dict)
    upstream: tuple[str, int] | None = None
    ranges: bool = True
    lengths: bool = True
    """HEAD tells how long a file is; False: that it is empty."""
    etags: dict[str, str] = field(default_factory=lambda: defaultdict(lambda: '"1"'))
    requests: Counter[str] = field(default_factory=Counter)
    """Number of requests by ``GET /name``."""
    done: Counter[str] = field(default_factory=Counter)
    over: threading.Event = field(default_factory=threading.Event)


class Server:
    """Listens from ``with`` on."""

    def __init__(self, state: State) -> None:
        class Handler(_Handler):
            pass

        Handler.state = state
        self.state = state
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self.port = self._server.server_address[1]
        self.url = f"http://127.0.0.1:{self.port}"

    def __enter__(self) -> Server:
        threading.Thread(target=self._server.serve_forever, args=(0.05,), daemon=True).start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.state.over.set()
        self._server.shutdown()
        self._server.server_close()


class _Handler(BaseHTTPRequestHandler):
    state: State
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        self._respond()

    def do_HEAD(self) -> None:
        self._respond()

    def do_PUT(self) -> None:
        self._respond()

    def do_POST(self) -> None:
        self._respond()

    def log_message(self, *args: object) -> None:
        pass

    def _respond(self) -> None:
        path = urlsplit(self.path).path
        self.state.requests[f"{self.command} {path}"] += 1
        fault = self._next_fault(path)
        length = int(self.headers.get("Content-Length") or 0)
        sent = self.rfile.read(length)
        if fault is not None and fault.status is not None:
            self._send_answer(fault.status, {}, b"")
        elif self.state.upstream is not None:
            self._forward(sent, fault)
        else:
            self._file(path, fault)

    def _next_fault(self, path: str) -> Fault | None:
        for name, fault in self.state.faults.items():
            if name in path and (self.command == "GET" or (self.command == "HEAD" and fault.heads)):
                self.state.done[name] += 1
                if fault.times is None or self.state.done[name] <= fault.times:
                    return fault
        return None

    def _forward(self, sent: bytes, fault: Fault | None) -> None:
        assert self.state.upstream is not None
        other = http.client.HTTPConnection(*self.state.upstream, timeout=60)
        headers = {k: v for k, v in self.headers.items() if k.lower() not in ("connection",)}
        other.request(self.command, self.path, sent, headers)
        answer = other.getresponse()
        body = answer.read()
        passed = {
            name: value
            for name, value in answer.getheaders()
            if name.lower() not in ("connection", "transfer-encoding", "server", "date")
        }
        other.close()
        self._send_answer(answer.status, passed, body, fault)

    def _file(self, path: str, fault: Fault | None) -> None:
        body = self.state.files.get(path)
        if body is None:
            self._send_answer(404, {}, b"")
            return
        headers = {"ETag": self.state.etags[path]}
        if path.endswith("/"):
            headers["Content-Type"] = "text/html"
        if not self.state.ranges:
            self._send_answer(200, {**headers, "Accept-Ranges": "none"}, body, fault)
            return
        match = re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range") or "")
        if match is None:
            self._send_answer(200, headers, body, fault)
            return
        first, last = int(match[1]), min(int(match[2] or len(body) - 1), len(body) - 1)
        headers["Content-Range"] = f"bytes {first}-{last}/{len(body)}"
        self._send_answer(206, headers, body[first : last + 1], fault)

    def _send_answer(
        self, status: int, headers: dict[str, str], body: bytes, fault: Fault | None = None
    ) -> None:
        self.send_response(status)
        for name, value in headers.items():
            if name.lower() != "content-length":
                self.send_header(name, value)
        length = headers.get("Content-Length", str(len(body))) if self.state.lengths else "0"
        self.send_header("Content-Length", length if self.command == "HEAD" else str(len(body)))
        self.end_headers()
        if self.command == "HEAD":
            return
        if fault is not None and self.command == "GET":
            end = 1 if fault.hang or fault.drip else len(body) // 2
            if fault.further:
                end = 1000 * sum(self.state.requests.values())
            self.wfile.write(body[:end])
            self.wfile.flush()
            for byte in body[1:] if fault.drip else b"":
                if self.state.over.wait(0.05):
                    break
                try:
                    self.wfile.write(bytes([byte]))
                    self.wfile.flush()
                except OSError:  # nobody listens any more
                    break
            if fault.hang:
                self.state.over.wait(120)
            self.close_connection = True
            return
        for at in range(0, len(body), STEP):
            self.wfile.write(body[at : at + STEP])
