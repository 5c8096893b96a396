"""Serving: waitress on a free port, and the browser opened on it."""

from __future__ import annotations

import errno
import socket
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from advisor.dashboard.access import Access
from advisor.errors import AdvisorError

THREADS = 8
TRIES = 50
"""Ports tried after the one that was asked for."""


@dataclass
class Server:
    """A bound server: its address is known before it answers."""

    waitress: Any
    access: Access
    port: int

    @property
    def address(self) -> str:
        """What to open in a browser; with the token where one is needed."""
        host = self.access.host
        if host in ("0.0.0.0", "::", ""):
            host = socket.gethostname()
        shown = f"[{host}]" if ":" in host else host
        token = f"?token={self.access.token}" if self.access.token else ""
        return f"http://{shown}:{self.port}/{token}"

    def run(self) -> None:
        """Serve until interrupted or closed."""
        self.waitress.run()

    def close(self) -> None:
        """Stop serving."""
        self.waitress.close()


def bind(application: Callable[..., Any], access: Access, port: int) -> Server:
    """Bind to the port, or to the next one that is free. Raises AdvisorError: there is none, or
    the address is not this machine's."""
    found = listen(access.host, port)
    import waitress

    server = waitress.create_server(
        application,
        sockets=[found],
        threads=THREADS,
        ident=None,  # not what serves it, nor its version
        max_request_body_size=8 << 20,
        channel_timeout=60,
        clear_untrusted_proxy_headers=True,
    )
    return Server(server, access, found.getsockname()[1])


def listen(host: str, port: int) -> socket.socket:
    """A socket bound to the port or one of the next; 0: any."""
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
