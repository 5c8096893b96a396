"""Serving: waitress on a free port with the browser opened on it; access, by Host check and token;
limits of a page, by content security policy; read-only."""

from __future__ import annotations

import errno
import gzip
import hmac
import html
import ipaddress
import logging
import os
import re
import secrets
import shutil
import socket
import tempfile
import threading
import webbrowser
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final
from urllib.parse import quote, unquote_plus

import dash
import flask
from itsdangerous import BadSignature, Signer
from werkzeug.wrappers import Response

from advisor.core.errors import AdvisorError

LOCAL = frozenset({"127.0.0.1", "localhost", "::1"})
COOKIE = "advisor_access"
"""Beginning of the cookies' names; the port follows, as a browser keeps one jar for all ports of a
host."""
ARRIVED = "advisor_arrived"
CALLBACKS = "/_dash-update-component"
"""The only address that takes a POST: Dash's callbacks, which read."""
MAX_REQUEST_BYTES = 4 << 20
"""Size of a callback's body, bytes: its inputs are figures' zoom states, not files."""
MIN_TOKEN = 16
"""Length of a token that a user chose, characters at least."""

HEADERS = {
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    # popups may be opened (a trace viewer, a reference) but not reach back
    "Cross-Origin-Opener-Policy": "same-origin-allow-popups",
    "Permissions-Policy": "camera=(), microphone=(), geolocation=()",
    "X-Frame-Options": "DENY",
}
FILES = ("/assets/", "/_dash-component-suites/")
TEXT = frozenset({"application/json", "application/javascript", "image/svg+xml"})
"""Types that are text besides ``text/…``."""
MIN_COMPRESSED_BYTES = 1400
"""Length from which a response is compressed: less is one packet anyway."""
_HOST = re.compile(
    r"(?:\[(?P<v6>[0-9a-f:.]{2,45})\]|(?P<name>[a-z0-9_](?:[a-z0-9._-]{0,252}[a-z0-9_])?))"
    r"(?::(?P<port>[0-9]{1,5}))?",
    re.ASCII | re.IGNORECASE,
)
_TOKEN = re.compile(rf"[A-Za-z0-9._~-]{{{MIN_TOKEN},512}}", re.ASCII)


@dataclass(frozen=True)
class Access:
    """Address that the dashboard listens on, and what it asks of visitors."""

    host: str = "127.0.0.1"
    """Address that the server is bound to."""
    token: str | None = field(default=None, repr=False)
    """Token of the first request (``?token=``), for which a signed cookie is given; ``None``: none
    is asked for, so everybody who reaches the address may look."""
    names: frozenset[str] = field(default=LOCAL)
    """Values of the Host header, without port, that are answered besides IP addresses of
    ``host``'s kind: a page elsewhere that resolves its own name to this machine is not."""
    signer: Signer = field(
        default_factory=lambda: Signer(secrets.token_bytes(32), salt="advisor.dashboard"),
        repr=False,
        compare=False,
    )
    """Signer of cookies; its key lives as long as the process."""
    admitted: threading.Event = field(default_factory=threading.Event, repr=False, compare=False)
    """Event that is set once a visitor has come with the token."""

    @classmethod
    def for_host(cls, host: str = "127.0.0.1", token: str | None = None) -> Access:
        """Make the access for an address, with this token or a new one. Other users of this machine
        reach 127.0.0.1 as well, so a token is asked for there too."""
        names = {host, socket.gethostname(), socket.getfqdn()} if host not in LOCAL else {host}
        return cls(
            host=host,
            token=token if token is not None else secrets.token_urlsafe(24),
            names=LOCAL | {name.lower() for name in names if name},
        )

    @property
    def is_local_only(self) -> bool:
        """Whether only this machine can reach the server."""
        return self.host in LOCAL

    def is_allowed_host(self, header: str | None) -> bool:
        """Return whether a request with this Host header is meant for this server, at any port:
        tunnels change it.

        A page elsewhere can make its own name point here, never an address, so addresses are
        answered where others may come by them."""
        match = _HOST.fullmatch(header or "")
        if match is None or int(match["port"] or 80) > 65535:
            return False
        try:
            address = ipaddress.ip_address(match["v6"] or match["name"])
        except ValueError:
            return match["name"] is not None and match["name"].lower() in self.names
        if (address.version == 6) != (match["v6"] is not None):
            return False
        return str(address) in self.names or not self.is_local_only

    def is_valid_token(self, token: str | None) -> bool:
        """Return whether the token is right, in constant time."""
        if self.token is None:
            return True
        return token is not None and hmac.compare_digest(_bytes(token), _bytes(self.token))

    def make_cookie(self) -> str:
        """Make a cookie for a visitor who had the token: random, and signed."""
        return self.signer.sign(secrets.token_urlsafe(12)).decode()

    def is_valid_cookie(self, cookie: str | None) -> bool:
        """Return whether this server signed a cookie, in constant time."""
        if self.token is None:
            return True
        try:
            self.signer.unsign(_bytes(cookie or ""))
        except BadSignature:
            return False
        return True


def is_usable_token(token: str) -> bool:
    """Return whether a token that a user chose is long enough and fits an address as it is."""
    return _TOKEN.fullmatch(token) is not None


def cookie_name(header: str | None, begin: str = COOKIE) -> str:
    """Return the cookie's name for a Host header found to be ours: with the port the browser knows
    us by."""
    match = _HOST.fullmatch(header or "")
    return f"{begin}_{int(match['port'] or 80) if match is not None else 80}"


def protect(app: dash.Dash, access: Access) -> None:
    """Refuse what the access does not allow, and send the headers with everything else."""
    server = app.server
    server.config["MAX_CONTENT_LENGTH"] = MAX_REQUEST_BYTES

    def check() -> flask.typing.ResponseReturnValue | None:
        request = flask.request
        if not access.is_allowed_host(request.headers.get("Host")):
            return _refuse(403, "This dashboard does not answer to that host name.")
        if request.method not in ("GET", "HEAD") and not (
            request.method == "POST" and request.path == CALLBACKS
        ):
            return _refuse(405, "This dashboard is read-only.")
        if not _is_same_origin(request):
            return _refuse(403, "Requests from other sites are not answered.")
        return _authenticate(access)

    def headers(response: Response) -> Response:
        for name, value in HEADERS.items():
            response.headers.setdefault(name, value)
        response.headers["Content-Security-Policy"] = _policy(app, response)
        if not flask.request.path.startswith(FILES):
            response.headers["Cache-Control"] = "no-store"
        if flask.g.get("advisor_accepted") and response.mimetype == "text/html":
            _mark(response)
        return response

    # first of all: before Dash's own handlers, which set up the application
    server.before_request_funcs.setdefault(None, []).insert(0, check)
    server.after_request(headers)
    server.after_request_funcs[None].insert(0, _compress)  # and this last of all


_packed: Final[dict[str, tuple[int, bytes]]] = {}
"""Scripts and style sheets that were compressed, by path: their lengths, and what is sent."""
MAX_PACKED = 100
"""Number of these; a path can name one file in many ways."""


def _compress(response: Response) -> Response:
    """Compress what is text, for links that are slower than a loopback: what lies in a file once,
    a page as quickly as it goes."""
    request = flask.request
    length = response.content_length or 0
    kind = response.mimetype or ""
    text = kind.startswith("text/") or kind in TEXT
    if response.status_code != 200 or not text or length < MIN_COMPRESSED_BYTES:
        return response
    response.vary.add("Accept-Encoding")
    if request.accept_encodings["gzip"] <= 0 or "Content-Encoding" in response.headers:
        return response
    response.direct_passthrough = False
    if not request.path.startswith(FILES):
        response.set_data(gzip.compress(response.get_data(), 1))
    else:
        known, packed = _packed.get(request.path, (0, b""))
        if known != length:
            packed = gzip.compress(response.get_data(), 6)
            if len(_packed) >= MAX_PACKED:
                _packed.clear()
            _packed[request.path] = length, packed
        response.set_data(packed)
    response.headers["Content-Encoding"] = "gzip"
    etag, _ = response.get_etag()
    if etag is not None:
        response.set_etag(etag, weak=True)
    return response


def _authenticate(access: Access) -> flask.typing.ResponseReturnValue | None:
    """Let in a visitor with the token or the cookie that was given for it. A token in the address
    is always removed from it."""
    request = flask.request
    header = request.headers.get("Host")
    cookie = request.cookies.get(cookie_name(header))
    accepted = access.is_valid_cookie(cookie)
    given = request.args.get("token")
    if given is not None and request.method in ("GET", "HEAD"):
        knows = access.token is not None and access.is_valid_token(given)
        if knows or accepted:
            return _without_token(access, fresh=knows)
    if accepted:
        flask.g.advisor_accepted = access.token is not None
        return None
    arrived = cookie_name(header, ARRIVED)
    if cookie is None and request.method == "GET" and arrived in request.cookies:
        # A browser keeps a strict cookie back from a page that something else led to (the file
        # that opens the browser, a link in a chat), redirects included. Asked for again by a page
        # of ours, it is sent. The other cookie, which opens nothing, keeps this from repeating.
        again = _refuse(401, "One moment.")
        again.headers["Refresh"] = "0"
        again.delete_cookie(arrived, path="/", samesite="Lax", httponly=True)
        return again
    return _refuse(401, "A token is needed: open the address that 'advisor dashboard' printed.")


def _without_token(access: Access, *, fresh: bool) -> flask.Response:
    """Redirect to the same address without the token, always on this host."""
    request = flask.request
    response = flask.Response(status=302)
    response.headers["Location"] = local_address(request.path, request.query_string)
    if fresh:
        header = request.headers.get("Host")
        response.set_cookie(
            cookie_name(header), access.make_cookie(), path="/", httponly=True, samesite="Strict"
        )
        _mark(response)
        access.admitted.set()
    return response


def _mark(response: Response) -> None:
    """Note in the browser that it was let in, for :func:`_authenticate` to know it by."""
    name = cookie_name(flask.request.headers.get("Host"), ARRIVED)
    if name not in flask.request.cookies:
        response.set_cookie(name, "1", path="/", httponly=True, samesite="Lax")


def local_address(path: str, query: bytes) -> str:
    """Return an address on this very host: the path, percent-encoded again and with one slash at
    its start, and the query without ``token``.

    A browser takes ``//host``, ``/\\host`` and both with tabs between for another host."""
    where = "/" + quote(path, safe="/~", errors="replace").lstrip("/")
    parts = [
        part
        for part in quote(query, safe="%&=+/?:@!$'()*,;~-._").split("&")
        if part and unquote_plus(part.partition("=")[0]) != "token"
    ]
    return f"{where}?{'&'.join(parts)}" if parts else where


def _refuse(code: int, why: str) -> flask.Response:
    return flask.Response(f"{why}\n", status=code, mimetype="text/plain")


def _is_same_origin(request: flask.Request) -> bool:
    """Return whether a request that causes work comes from one of this server's pages, if the
    browser says so. Pages may be linked to from anywhere."""
    if request.method != "POST" and not request.path.startswith(("/_advisor/", "/_dash-")):
        return True
    if request.headers.get("Sec-Fetch-Site", "same-origin") not in ("same-origin", "none"):
        return False
    origin, host = request.headers.get("Origin"), request.headers.get("Host", "").lower()
    return origin is None or origin.lower() in (f"http://{host}", f"https://{host}")


def _bytes(text: str) -> bytes:
    return text.encode("utf-8", "replace")


def _policy(app: dash.Dash, response: Response) -> str:
    """Return the content security policy: no eval, no inline script but Dash's own, by hash.

    The hashes are taken when a page is sent, not before: Dash adds inline scripts at its first
    request."""
    if response.mimetype != "text/html":
        return "default-src 'none'; frame-ancestors 'none'"
    return "; ".join(
        [
            "default-src 'self'", f"script-src 'self' {' '.join(dict.fromkeys(app.csp_hashes()))}",
            "style-src 'self' 'unsafe-inline'", "img-src 'self' data: blob:",
            "font-src 'self' data:", "connect-src 'self'", "worker-src 'self' blob:",
            "object-src 'none'", "base-uri 'none'", "form-action 'none'", "frame-ancestors 'none'",
        ]
    )  # fmt: skip


THREADS = 8
MAX_CONNECTIONS = 2000
IDLE_SECONDS, LOOK_SECONDS = 15, 3
"""Time after which a silent connection is closed, and time between two looks at that, s: beyond
MAX_CONNECTIONS nobody else is let in before."""
TRIES = 50
"""Ports tried after the one that was asked for."""


@dataclass
class DashboardServer:
    """A bound server: its address is known before it answers."""

    waitress: Any
    access: Access
    port: int

    @property
    def address(self) -> str:
        """Address to open in a browser; with the token where one is needed."""
        return self.base + (f"?token={self.access.token}" if self.access.token else "")

    @property
    def base(self) -> str:
        """Address without the token."""
        host = self.access.host
        if host in ("0.0.0.0", "::", ""):
            host = socket.gethostname()
        shown = f"[{host}]" if ":" in host else host
        return f"http://{shown}:{self.port}/"

    def run(self) -> None:
        """Serve until interrupted or closed."""
        self.waitress.run()

    def close(self) -> None:
        self.waitress.close()


def bind(application: Callable[..., Any], access: Access, port: int) -> DashboardServer:
    """Bind to the port, or to the next one that is free. Raises AdvisorError: there is none, or
    the address is not this machine's."""
    listener = listen(access.host, port)
    import waitress

    # a page asks for more than there are threads: that it waits its turn concerns nobody
    logging.getLogger("waitress.queue").setLevel(logging.ERROR)
    server = waitress.create_server(
        application,
        sockets=[listener],
        threads=THREADS,
        ident=None,  # not what serves it, nor its version
        max_request_body_size=8 << 20,
        connection_limit=_connections(),
        channel_timeout=IDLE_SECONDS,
        cleanup_interval=LOOK_SECONDS,
        asyncore_use_poll=True,  # select() ends at 1,024 descriptors
        clear_untrusted_proxy_headers=True,
    )
    return DashboardServer(server, access, listener.getsockname()[1])


def _connections() -> int:
    """Return how many connections there may be: not all that the process may have open."""
    try:
        import resource
    except ModuleNotFoundError:  # Windows
        return 400
    open_files = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    if open_files == resource.RLIM_INFINITY:
        return MAX_CONNECTIONS
    return max(64, min(MAX_CONNECTIONS, open_files // 2))


def listen(host: str, port: int) -> socket.socket:
    """Open a socket bound to the port or one of the next; 0: any."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    last = port if port == 0 else min(port + TRIES, 65535)
    for number in range(port, last + 1):
        listener = socket.socket(family, socket.SOCK_STREAM)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind((host, number))
            listener.listen(128)
        except OSError as error:
            listener.close()
            if error.errno != errno.EADDRINUSE:
                why = error.strerror or str(error)
                raise AdvisorError(f"--host {host}, --port {number}: {why}") from None
            continue
        return listener
    raise AdvisorError(f"--port {port}: neither it nor the next {TRIES} are free")


WAIT_SECONDS = 90.0
"""Time that the file waits for a browser that starts slowly, s."""

PAGE = """<!DOCTYPE html>
<html lang="en"><head><meta charset="utf-8"><title>advisor</title>
<meta name="referrer" content="no-referrer">
<meta http-equiv="refresh" content="0;url={address}"></head>
<body><p><a href="{address}">Open the dashboard</a></p></body></html>
"""


def open_browser(
    server: DashboardServer, opener: Callable[[str], object] = webbrowser.open
) -> Callable[[], None]:
    """Open a browser on the dashboard, in a thread: one that runs in the terminal ends only when it
    is left. Returns what takes back the file that leads there; that happens by itself once the
    browser has come, or after WAIT_SECONDS."""
    file = None
    if server.access.token is not None:
        try:
            file = redirect_file(server.address)
        except OSError:  # no room, or nowhere to write: the address is on the terminal
            return lambda: None

    def forget() -> None:
        if file is not None:
            shutil.rmtree(file.parent, ignore_errors=True)

    def wait() -> None:
        server.access.admitted.wait(WAIT_SECONDS)
        forget()

    shown = server.address if file is None else file.as_uri()
    for work, given in ((opener, (shown,)), (wait, ())):
        threading.Thread(target=work, args=given, name="advisor-open", daemon=True).start()
    return forget


def redirect_file(address: str) -> Path:
    """Write a page that leads to the address, in a folder of its own; both are the user's alone."""
    folder = Path(tempfile.mkdtemp(prefix="advisor-"))  # 0700
    file = folder / "open.html"
    try:
        made = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(made, "w", encoding="utf-8") as opened:
            opened.write(PAGE.format(address=html.escape(address, quote=True)))
    except OSError:
        shutil.rmtree(folder, ignore_errors=True)
        raise
    return file
