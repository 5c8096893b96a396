"""Opening the browser on an address with a token, which no other user may see: not in the list of
processes, where a command's arguments are for everybody, but in a private file that leads there."""

from __future__ import annotations

import html
import os
import shutil
import tempfile
import threading
import webbrowser
from collections.abc import Callable
from pathlib import Path

from advisor.dashboard.serve import Server

PATIENCE_SECONDS = 90.0
"""How long the file waits for a browser that starts slowly."""

PAGE = """<!DOCTYPE html>
<html lang="en"><head><meta charset="utf-8"><title>advisor</title>
<meta name="referrer" content="no-referrer">
<meta http-equiv="refresh" content="0;url={address}"></head>
<body><p><a href="{address}">Open the dashboard</a></p></body></html>
"""


def open_browser(
    server: Server, opener: Callable[[str], object] = webbrowser.open
) -> Callable[[], None]:
    """Open a browser on the dashboard, in a thread: one that runs in the terminal ends only when it
    is left. Returns what takes back the file that leads there; that happens by itself once the
    browser has come, or after PATIENCE_SECONDS."""
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
        server.access.admitted.wait(PATIENCE_SECONDS)
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
