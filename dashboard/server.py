"""Server of the dashboard: waitress on a free port, access control, and opening the browser.

Access needs an expected Host header and a token. Pages have a content security policy. All requests
only read."""

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

LOCAL_HOSTS = frozenset({"127.0.0.1", "localhost", "::1"})
ACCESS_COOKIE = "advisor_access"
"""Start of the cookie's name. The port follows, because a browser shares cookies between the ports
of a host."""
ADMITTED_COOKIE = "advisor_arrived"
CALLBACK_PATH = "/_dash-update-component"
"""Path that accepts POST: Dash's callbacks, which only read. All other paths accept GET only."""
_MAX_REQUEST_BYTES = 4 << 20
"""Size limit of a callback's body, bytes. Its inputs are zoom states of figures, never files."""
MIN_TOKEN_LENGTH = 16
"""Minimum length of a token that a user chose, characters."""

SECURITY_HEADERS = {
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    # pop-ups such as a trace viewer may be opened, but cannot access this page
    "Cross-Origin-Opener-Policy": "same-origin-allow-popups",
    "Permissions-Policy": "camera=(), microphone=(), geolocation=()",
    "X-Frame-Options": "DENY",
}
STATIC_PATHS = ("/assets/", "/_dash-component-suites/")
TEXT_TYPES = frozenset({"application/json", "application/javascript", "image/svg+xml"})
"""Media types that are text, besides ``text/…``."""
MIN_COMPRESSED_BYTES = 1400
"""Length from which a response is compressed. A shorter one fits one network packet."""
_HOST_HEADER = re.compile(
    r"(?:\[(?P<v6>[0-9a-f:.]{2,45})\]|(?P<name>[a-z0-9_](?:[a-z0-9._-]{0,252}[a-z0-9_])?))"
    r"(?::(?P<port>[0-9]{1,5}))?",
    re.ASCII | re.IGNORECASE,
)
_TOKEN = re.compile(rf"[A-Za-z0-9._~-]{{{MIN_TOKEN_LENGTH},512}}", re.ASCII)


@dataclass(frozen=True)
class Access:
    """Address that the dashboard listens on, and the conditions of access."""

    host: str = "127.0.0.1"
    """Address that the server is bound to."""
    token: str | None = field(default=None, repr=False)
    """Token of the first request (``?token=``), which sets a signed cookie. ``None``: no token is
    needed, so everyone who can reach the address has access."""
    host_names: frozenset[str] = field(default=LOCAL_HOSTS)
    """Accepted host names of the Host header, without port. Requests by any other name are refused,
    such as those of a foreign page that resolves its own name to this machine."""
    signer: Signer = field(
        default_factory=lambda: Signer(secrets.token_bytes(32), salt="advisor.dashboard"),
        repr=False,
        compare=False,
    )
    """Signer of cookies. Its key lasts as long as the process."""
    admitted: threading.Event = field(default_factory=threading.Event, repr=False, compare=False)
    """Event that is set once a browser has sent the token."""

    @classmethod
    def for_host(cls, host: str = "127.0.0.1", token: str | None = None) -> Access:
        """Build the access for an address, with this token or a new one.

        Other users of this machine can reach 127.0.0.1, so it needs a token too."""
        names = (
            {host, socket.gethostname(), socket.getfqdn()} if host not in LOCAL_HOSTS else {host}
        )
        return cls(
            host=host,
            token=token if token is not None else secrets.token_urlsafe(24),
            host_names=LOCAL_HOSTS | {name.lower() for name in names if name},
        )

    @property
    def is_local_only(self) -> bool:
        """Whether only this machine can reach the server."""
        return self.host in LOCAL_HOSTS

    def is_allowed_host(self, header: str | None) -> bool:
        """Return whether a request with this Host header is meant for this server.

        Any port is accepted, because tunnels change it. A foreign page can make its own name
        resolve to this machine, but no IP address, so those are accepted if other machines may
        connect."""
        match = _HOST_HEADER.fullmatch(header or "")
        if match is None or int(match["port"] or 80) > 65535:
            return False
        try:
            address = ipaddress.ip_address(match["v6"] or match["name"])
        except ValueError:
            return match["name"] is not None and match["name"].lower() in self.host_names
        if (address.version == 6) != (match["v6"] is not None):
            return False
        return str(address) in self.host_names or not self.is_local_only

    def is_valid_token(self, token: str | None) -> bool:
        """Return whether the token is correct, in constant time."""
        if self.token is None:
            return True
        return token is not None and hmac.compare_digest(_encode(token), _encode(self.token))

    def make_cookie(self) -> str:
        """Make a random, signed cookie for a browser that sent the token."""
        return self.signer.sign(secrets.token_urlsafe(12)).decode()

    def is_valid_cookie(self, cookie: str | None) -> bool:
        """Return whether this server signed a cookie, in constant time."""
        if self.token is None:
            return True
        try:
            self.signer.unsign(_encode(cookie or ""))
        except BadSignature:
            return False
        return True


def is_usable_token(token: str) -> bool:
    """Return whether a user's token is long enough and needs no escaping in an address."""
    return _TOKEN.fullmatch(token) is not None


def cookie_name(header: str | None, prefix: str = ACCESS_COOKIE) -> str:
    """Return the cookie's name for an accepted Host header: with the port that the browser uses."""
    match = _HOST_HEADER.fullmatch(header or "")
    return f"{prefix}_{int(match['port'] or 80) if match is not None else 80}"


def protect(app: dash.Dash, access: Access) -> None:
    """Refuse requests that the access does not allow, and add security headers to all responses."""
    server = app.server
    server.config["MAX_CONTENT_LENGTH"] = _MAX_REQUEST_BYTES

    def check_request() -> flask.typing.ResponseReturnValue | None:
        request = flask.request
        if not access.is_allowed_host(request.headers.get("Host")):
            return _refuse(403, "This dashboard does not answer to that host name.")
        if request.method not in ("GET", "HEAD") and not (
            request.method == "POST" and request.path == CALLBACK_PATH
        ):
            return _refuse(405, "This dashboard is read-only.")
        if not _is_same_origin(request):
            return _refuse(403, "Requests from other sites are not answered.")
        return _authenticate(access)

    def add_headers(response: Response) -> Response:
        for name, value in SECURITY_HEADERS.items():
            response.headers.setdefault(name, value)
        response.headers["Content-Security-Policy"] = _content_security_policy(app, response)
        if not flask.request.path.startswith(STATIC_PATHS):
            response.headers["Cache-Control"] = "no-store"
        if flask.g.get("advisor_accepted") and response.mimetype == "text/html":
            _set_admitted_cookie(response)
        return response

    # runs first, before Dash's own handlers, which set up the application
    server.before_request_funcs.setdefault(None, []).insert(0, check_request)
    server.after_request(add_headers)
    server.after_request_funcs[None].insert(0, _compress)  # runs last


_compressed_files: Final[dict[str, tuple[int, bytes]]] = {}
"""Compressed scripts and style sheets by path: original length, and compressed bytes."""
MAX_COMPRESSED_FILES = 100
"""Size limit of that cache: a file can be requested by many different paths."""


def _compress(response: Response) -> Response:
    """Compress text, for connections that are slower than a loopback.

    Static files are compressed well, once; pages are compressed as fast as possible."""
    request = flask.request
    length = response.content_length or 0
    media_type = response.mimetype or ""
    is_text = media_type.startswith("text/") or media_type in TEXT_TYPES
    if response.status_code != 200 or not is_text or length < MIN_COMPRESSED_BYTES:
        return response
    response.vary.add("Accept-Encoding")
    if request.accept_encodings["gzip"] <= 0 or "Content-Encoding" in response.headers:
        return response
    response.direct_passthrough = False
    if not request.path.startswith(STATIC_PATHS):
        response.set_data(gzip.compress(response.get_data(), 1))
    else:
        known_length, compressed = _compressed_files.get(request.path, (0, b""))
        if known_length != length:
            compressed = gzip.compress(response.get_data(), 6)
            if len(_compressed_files) >= MAX_COMPRESSED_FILES:
                _compressed_files.clear()
            _compressed_files[request.path] = length, compressed
        response.set_data(compressed)
    response.headers["Content-Encoding"] = "gzip"
    etag, _ = response.get_etag()
    if etag is not None:
        response.set_etag(etag, weak=True)
    return response


def _authenticate(access: Access) -> flask.typing.ResponseReturnValue | None:
    """Accept a request with the token or with the cookie that the token sets.

    A token in the address is always removed by a redirect."""
    request = flask.request
    header = request.headers.get("Host")
    cookie = request.cookies.get(cookie_name(header))
    has_cookie = access.is_valid_cookie(cookie)
    token = request.args.get("token")
    if token is not None and request.method in ("GET", "HEAD"):
        has_token = access.token is not None and access.is_valid_token(token)
        if has_token or has_cookie:
            return _redirect_without_token(access, sets_cookie=has_token)
    if has_cookie:
        flask.g.advisor_accepted = access.token is not None
        return None
    admitted_cookie = cookie_name(header, ADMITTED_COOKIE)
    if cookie is None and request.method == "GET" and admitted_cookie in request.cookies:
        # A browser does not send a strict cookie if the user comes from another site or file, even
        # after redirects. A page of this server that reloads itself gets the cookie. The second
        # cookie, which grants no access, prevents an endless reload.
        reload_response = _refuse(401, "Signing in; this page reloads.")
        reload_response.headers["Refresh"] = "0"
        reload_response.delete_cookie(admitted_cookie, path="/", samesite="Lax", httponly=True)
        return reload_response
    return _refuse(401, "A token is needed: open the address that 'advisor dashboard' printed.")


def _redirect_without_token(access: Access, *, sets_cookie: bool) -> flask.Response:
    """Redirect to the same address on this host, without the token."""
    request = flask.request
    response = flask.Response(status=302)
    response.headers["Location"] = local_address(request.path, request.query_string)
    if sets_cookie:
        header = request.headers.get("Host")
        response.set_cookie(
            cookie_name(header), access.make_cookie(), path="/", httponly=True, samesite="Strict"
        )
        _set_admitted_cookie(response)
        access.admitted.set()
    return response


def _set_admitted_cookie(response: Response) -> None:
    """Set the cookie by which :func:`_authenticate` recognizes a browser that had access before."""
    name = cookie_name(flask.request.headers.get("Host"), ADMITTED_COOKIE)
    if name not in flask.request.cookies:
        response.set_cookie(name, "1", path="/", httponly=True, samesite="Lax")


def local_address(path: str, query: bytes) -> str:
    """Return an address on this host: the path with one slash at its start, and the query without
    ``token``. Both are percent-encoded again.

    A browser takes ``//host`` and ``/\\host`` for another host, even with tabs between."""
    address = "/" + quote(path, safe="/~", errors="replace").lstrip("/")
    parameters = [
        part
        for part in quote(query, safe="%&=+/?:@!$'()*,;~-._").split("&")
        if part and unquote_plus(part.partition("=")[0]) != "token"
    ]
    return f"{address}?{'&'.join(parameters)}" if parameters else address


def _refuse(code: int, reason: str) -> flask.Response:
    """Build a response of plain text with an error status."""
    return flask.Response(f"{reason}\n", status=code, mimetype="text/plain")


def _is_same_origin(request: flask.Request) -> bool:
    """Return whether a request to an endpoint comes from a page of this server.

    Links to pages are accepted from anywhere. A browser that sends no origin is trusted."""
    if request.method != "POST" and not request.path.startswith(("/_advisor/", "/_dash-")):
        return True
    if request.headers.get("Sec-Fetch-Site", "same-origin") not in ("same-origin", "none"):
        return False
    origin, host = request.headers.get("Origin"), request.headers.get("Host", "").lower()
    return origin is None or origin.lower() in (f"http://{host}", f"https://{host}")


def _encode(text: str) -> bytes:
    """Encode text for a comparison in constant time."""
    return text.encode("utf-8", "replace")


def _content_security_policy(app: dash.Dash, response: Response) -> str:
    """Return the content security policy. It forbids eval and inline scripts, except Dash's own.

    The hashes of Dash's scripts are computed for each page, because Dash adds scripts at its first
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


WORKER_THREADS = 8
MAX_CONNECTIONS = 2000
IDLE_SECONDS, CLEANUP_SECONDS = 15, 3
"""Time after which an idle connection is closed, and time between two checks, s. With
MAX_CONNECTIONS open, new clients wait until one is closed."""
PORT_TRIES = 50
"""Number of ports tried after the requested one."""


@dataclass
class DashboardServer:
    """Server that is bound to a port. Its address is known before it answers."""

    waitress: Any
    access: Access
    port: int

    @property
    def address(self) -> str:
        """Address to open in a browser, with the token if one is needed."""
        return self.base_address + (f"?token={self.access.token}" if self.access.token else "")

    @property
    def base_address(self) -> str:
        """Address without the token."""
        host = self.access.host
        if host in ("0.0.0.0", "::", ""):
            host = socket.gethostname()
        host_text = f"[{host}]" if ":" in host else host
        return f"http://{host_text}:{self.port}/"

    def run(self) -> None:
        """Serve until interrupted or closed."""
        self.waitress.run()

    def close(self) -> None:
        """Close the listening socket."""
        self.waitress.close()


def bind(application: Callable[..., Any], access: Access, port: int) -> DashboardServer:
    """Bind to the port, or to the next free one.

    Raises AdvisorError if no port is free, or if the address is not one of this machine."""
    listener = listen(access.host, port)
    import waitress

    # a page sends more requests at once than there are threads: the warning is no news
    logging.getLogger("waitress.queue").setLevel(logging.ERROR)
    server = waitress.create_server(
        application,
        sockets=[listener],
        threads=WORKER_THREADS,
        ident=None,  # no header with the server's name and version
        max_request_body_size=8 << 20,
        connection_limit=_max_connections(),
        channel_timeout=IDLE_SECONDS,
        cleanup_interval=CLEANUP_SECONDS,
        asyncore_use_poll=True,  # select() supports 1,024 descriptors only
        clear_untrusted_proxy_headers=True,
    )
    return DashboardServer(server, access, listener.getsockname()[1])


def _max_connections() -> int:
    """Return the maximum number of connections: half of the files that the process may open."""
    try:
        import resource
    except ModuleNotFoundError:  # Windows
        return 400
    open_files = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    if open_files == resource.RLIM_INFINITY:
        return MAX_CONNECTIONS
    return max(64, min(MAX_CONNECTIONS, open_files // 2))


def listen(host: str, port: int) -> socket.socket:
    """Open a socket on the port or one of the next ports; 0: any free port."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    last_port = port if port == 0 else min(port + PORT_TRIES, 65535)
    for candidate in range(port, last_port + 1):
        listener = socket.socket(family, socket.SOCK_STREAM)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind((host, candidate))
            listener.listen(128)
        except OSError as error:
            listener.close()
            if error.errno != errno.EADDRINUSE:
                reason = error.strerror or str(error)
                raise AdvisorError(f"--host {host}, --port {candidate}: {reason}") from None
            continue
        return listener
    raise AdvisorError(f"--port {port}: neither it nor the next {PORT_TRIES} are free")


BROWSER_WAIT_SECONDS = 90.0
"""Time after which the file for the browser is removed, s. A browser may start slowly."""

REDIRECT_PAGE = """<!DOCTYPE html>
<html lang="en"><head><meta charset="utf-8"><title>advisor</title>
<meta name="referrer" content="no-referrer">
<meta http-equiv="refresh" content="0;url={address}"></head>
<body><p><a href="{address}">Open the dashboard</a></p></body></html>
"""


def open_browser(
    server: DashboardServer, opener: Callable[[str], object] = webbrowser.open
) -> Callable[[], None]:
    """Open a browser on the dashboard, in a thread, because a terminal browser blocks.

    Return a function that removes the redirect file. The file is also removed once the browser has
    connected, or after BROWSER_WAIT_SECONDS."""
    file = None
    if server.access.token is not None:
        try:
            file = redirect_file(server.address)
        except OSError:  # full or read-only disk: the terminal shows the address
            return lambda: None

    def remove_file() -> None:
        if file is not None:
            shutil.rmtree(file.parent, ignore_errors=True)

    def wait_for_browser() -> None:
        server.access.admitted.wait(BROWSER_WAIT_SECONDS)
        remove_file()

    address = server.address if file is None else file.as_uri()
    for target, arguments in ((opener, (address,)), (wait_for_browser, ())):
        threading.Thread(target=target, args=arguments, name="advisor-open", daemon=True).start()
    return remove_file


def redirect_file(address: str) -> Path:
    """Write a page that redirects to the address. Only the user can read it and its folder."""
    folder = Path(tempfile.mkdtemp(prefix="advisor-"))  # 0700
    file = folder / "open.html"
    try:
        descriptor = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(descriptor, "w", encoding="utf-8") as stream:
            stream.write(REDIRECT_PAGE.format(address=html.escape(address, quote=True)))
    except OSError:
        shutil.rmtree(folder, ignore_errors=True)
        raise
    return file
