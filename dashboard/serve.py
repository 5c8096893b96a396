"""Serving: waitress on a free port, and the browser opened on it."""

from __future__ import annotations

import errno
import html
import logging
import os
import shutil
import socket
import tempfile
import threading
import webbrowser
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from advisor.core.errors import AdvisorError
from advisor.dashboard.access import Access

THREADS = 8
MAX_CONNECTIONS = 2000
IDLE_SECONDS, LOOK_SECONDS = 15, 3
"""A connection on which nothing is said for so long is closed, and how often that is looked at:
beyond MAX_CONNECTIONS nobody else is let in before."""
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
        """What to open in a browser; with the token where one is needed."""
        return self.base + (f"?token={self.access.token}" if self.access.token else "")

    @property
    def base(self) -> str:
        """The same without the token."""
        host = self.access.host
        if host in ("0.0.0.0", "::", ""):
            host = socket.gethostname()
        shown = f"[{host}]" if ":" in host else host
        return f"http://{shown}:{self.port}/"

    def run(self) -> None:
        """Serve until interrupted or closed."""
        self.waitress.run()

    def close(self) -> None:
        """Stop serving."""
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
    """How many connections there may be: not all that the process may have open."""
    try:
        import resource
    except ModuleNotFoundError:  # Windows
        return 400
    open_files = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    if open_files == resource.RLIM_INFINITY:
        return MAX_CONNECTIONS
    return max(64, min(MAX_CONNECTIONS, open_files // 2))


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


WAIT_SECONDS = 90.0
"""How long the file waits for a browser that starts slowly."""

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
    """A page that leads to the address, in a folder of its own; both are the user's alone."""
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
