"""Who may look, and what a page may do: Host check, token, content security policy, read-only."""

from __future__ import annotations

import hmac
import ipaddress
import secrets
import socket
from dataclasses import dataclass, field
from urllib.parse import urlsplit

import dash
import flask
from werkzeug.wrappers import Response

LOCAL = frozenset({"127.0.0.1", "localhost", "::1"})
COOKIE = "advisor_token"
CALLBACKS = "/_dash-update-component"
"""The only address that takes a POST: Dash's callbacks, which read."""
MAX_REQUEST_BYTES = 4 << 20
"""A callback's body holds the inputs of one callback: figures' zoom states, not files."""

HEADERS = {
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    # popups may be opened (a trace viewer, a reference) but not reach back
    "Cross-Origin-Opener-Policy": "same-origin-allow-popups",
    "Permissions-Policy": "camera=(), microphone=(), geolocation=()",
    "X-Frame-Options": "DENY",
}


@dataclass(frozen=True)
class Access:
    """Where the dashboard listens and what it asks of those who come."""

    host: str = "127.0.0.1"
    """Address it is bound to."""
    token: str | None = None
    """Required in the first request (``?token=``), then kept in a cookie; ``None``: not asked."""
    names: frozenset[str] = field(default=LOCAL)
    """Values of the Host header, without port, that are answered besides IP addresses of
    ``host``'s kind: a page elsewhere that resolves its own name to this machine is not."""

    @classmethod
    def to(cls, host: str) -> Access:
        """For an address: a token unless only this machine can reach it."""
        if host in LOCAL:
            return cls(host=host)
        own = {host, socket.gethostname(), socket.getfqdn()}
        return cls(
            host=host,
            token=secrets.token_urlsafe(24),
            names=LOCAL | {name.lower() for name in own if name},
        )

    def answers(self, header: str | None) -> bool:
        """Whether a request with this Host header is meant for us. Any port: tunnels change it."""
        name = _host(header or "")
        if name in self.names:
            return True
        return self.token is not None and _is_address(name)

    def knows(self, token: str | None) -> bool:
        """Whether the token is right, in constant time."""
        if self.token is None:
            return True
        return token is not None and hmac.compare_digest(token.encode(), self.token.encode())


def protect(app: dash.Dash, access: Access) -> None:
    """Refuse what the access does not allow, and send the headers with everything else."""
    server = app.server
    server.config["MAX_CONTENT_LENGTH"] = MAX_REQUEST_BYTES

    def check() -> flask.typing.ResponseReturnValue | None:
        request = flask.request
        if not access.answers(request.headers.get("Host")):
            return _refuse(403, "This dashboard does not answer to that host name.")
        if request.method not in ("GET", "HEAD") and not (
            request.method == "POST" and request.path == CALLBACKS
        ):
            return _refuse(405, "This dashboard is read-only.")
        if request.method == "POST" and not _own_origin(request):
            return _refuse(403, "Requests from other sites are not answered.")
        return _token(access)

    def headers(response: Response) -> Response:
        for name, value in HEADERS.items():
            response.headers.setdefault(name, value)
        response.headers["Content-Security-Policy"] = _policy(app, response)
        if not flask.request.path.startswith(("/assets/", "/_dash-component-suites/")):
            response.headers["Cache-Control"] = "no-store"
        return response

    # first of all: before Dash's own handlers, which set up the application
    server.before_request_funcs.setdefault(None, []).insert(0, check)
    server.after_request(headers)


def _token(access: Access) -> flask.typing.ResponseReturnValue | None:
    """Let in who has the token; one in the address goes to a cookie and out of sight."""
    request = flask.request
    if access.token is None or access.knows(request.cookies.get(COOKIE)):
        return None
    given = request.args.get("token")
    if not access.knows(given):
        return _refuse(401, "A token is needed: open the address that 'advisor dashboard' printed.")
    if request.method != "GET":
        return None
    kept = [(key, value) for key, value in request.args.items(multi=True) if key != "token"]
    from urllib.parse import urlencode

    where = request.path if not request.path.startswith("//") else "/"
    response = flask.redirect(f"{where}?{urlencode(kept)}" if kept else where)
    response.set_cookie(COOKIE, given or "", httponly=True, samesite="Strict", path="/")
    return response


def _refuse(code: int, why: str) -> flask.Response:
    return flask.Response(f"{why}\n", status=code, mimetype="text/plain")


def _own_origin(request: flask.Request) -> bool:
    """Whether a POST comes from a page of ours, as far as the browser tells."""
    if request.headers.get("Sec-Fetch-Site", "same-origin") not in ("same-origin", "none"):
        return False
    origin = request.headers.get("Origin")
    return origin is None or urlsplit(origin).netloc == request.headers.get("Host")


def _policy(app: dash.Dash, response: Response) -> str:
    """Only what comes from here runs: no eval, no inline script but Dash's own, by hash.

    The hashes are taken when a page is sent, not before: Dash adds inline scripts at its first
    request.
    """
    if response.mimetype != "text/html":
        return "default-src 'none'; frame-ancestors 'none'"
    return "; ".join(
        [
            "default-src 'self'",
            f"script-src 'self' {' '.join(dict.fromkeys(app.csp_hashes()))}",
            "style-src 'self' 'unsafe-inline'",
            "img-src 'self' data: blob:",
            "font-src 'self' data:",
            "connect-src 'self'",
            "worker-src 'self' blob:",
            "object-src 'none'",
            "base-uri 'none'",
            "form-action 'none'",
            "frame-ancestors 'none'",
        ]
    )


def _host(header: str) -> str:
    """The name in a Host header: without port and brackets."""
    if header.startswith("["):
        return header[1:].partition("]")[0].lower()
    return header.partition(":")[0].lower().rstrip(".")


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True
