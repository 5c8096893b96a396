"""``advisor dashboard``: traces and runs in the browser."""

from __future__ import annotations

import os
import signal
import stat
import sys
import threading
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated
from urllib.parse import urlsplit

import typer

from advisor.cli import options as o
from advisor.core.errors import AdvisorError, install_command

if TYPE_CHECKING:
    from advisor.dashboard.loaded_runs import DashboardSession
    from advisor.dashboard.server import DashboardServer

TOKEN = "ADVISOR_DASHBOARD_TOKEN"
PERFETTO = "https://ui.perfetto.dev"
EDITOR = "vscode://file{file}:{line}"


Paths = Annotated[
    list[str],
    typer.Argument(
        metavar="PATH",
        help="Trace files, folders of one run's traces, or a job's reports (JSON); or one folder "
        "of recorded runs.",
    ),
]
Host = Annotated[
    str, typer.Option(metavar="ADDRESS", help="Listen on this address; others may connect.")
]
Port = Annotated[
    int, typer.Option(metavar="N", min=0, max=65535, help="Port; the next free one if it is taken.")
]
Browser = Annotated[bool, typer.Option("--browser/--no-browser", help="Open the browser.")]
NoToken = Annotated[
    bool, typer.Option("--no-token", help="Admit every user and program that can connect.")
]
TokenFile = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE",
        help="Read the token from this file, which only you may read (or set "
        "ADVISOR_DASHBOARD_TOKEN). Default: a new token.",
    ),
]
PerfettoUrl = Annotated[
    str, typer.Option(metavar="URL", help="Perfetto UI for 'Open in Perfetto'; off hides it.")
]
Editor = Annotated[
    str,
    typer.Option(
        metavar="URL", help="URL that opens a source, with {file} and {line}; off hides the links."
    ),
]
Live = Annotated[bool, typer.Option("--live", help="Follow the run during its recording.")]
MemorySnapshot = Annotated[
    Path | None,
    typer.Option("--memory-snapshot", metavar="FILE", help="A memory snapshot for the first path."),
]


@o.with_options(
    "rank",
    "window",
    "steps",
    "rules",
    "price",
    "prices",
    "paid_gpus",
    "recorded_gpu",
    "max_size",
    memory_snapshot=MemorySnapshot,
)
def command(
    paths: Paths,
    host: Host = "127.0.0.1",
    port: Port = 8050,
    browser: Browser = True,
    no_token: NoToken = False,
    token_file: TokenFile = None,
    perfetto_url: PerfettoUrl = PERFETTO,
    editor: Editor = EDITOR,
    live: Live = False,
    *,
    options: o.Options,
) -> None:
    """Show traces and runs in the browser: the step's time, the fixes, and the timeline.

    With several paths, the first one is compared with each of the others."""
    token = read_token(token_file, no_token=no_token)
    viewer, sources = parse_perfetto(perfetto_url), parse_editor(editor)
    _check_exist(paths)
    try:
        from advisor.dashboard.app import create_app
    except ModuleNotFoundError as error:
        raise AdvisorError(
            f"the dashboard needs {error.name}: {install_command('dashboard')}"
        ) from None
    from advisor.dashboard.loaded_runs import MAX_RUNS, DashboardSession, read_saved_report
    from advisor.dashboard.server import Access, bind
    from advisor.read.directory import refuse_several, require_trace
    from advisor.read.runs import SeveralRuns

    folder = ""
    try:
        for path in paths:
            refuse_several(path)
    except SeveralRuns as error:
        if len(paths) > 1 or live:
            raise
        folder, paths = paths[0], list(map(str, error.runs[:MAX_RUNS]))
    for path in paths if not (live or folder) else ():
        if read_saved_report(path) is None:
            require_trace(path)
    session = DashboardSession(
        paths, options, is_live=live, perfetto=viewer, editor=sources, folder=folder
    )
    access = Access.for_host(host, token)
    if no_token:
        access = replace(access, token=None)
    server = bind(create_app(session, access).server, access, port)
    _announce(server, port)
    _serve(server, session, browser=browser)


def _check_exist(paths: list[str]) -> None:
    """Raise AdvisorError for a URL or a missing path."""
    from advisor.read.remote import urls

    for path in paths:
        if urls.is_url(path):
            raise AdvisorError(
                f"{urls.redact_url(path)}: the dashboard fetches nothing; download it, or open a "
                "job's report that advisor analyze --format json --output writes"
            )
        if path != "-" and not Path(path).exists():
            raise AdvisorError(f"{path}: no such file or directory")


def _serve(server: DashboardServer, session: DashboardSession, *, browser: bool) -> None:
    """Load the session, serve it until interrupted, and remove the browser's temporary files."""
    from advisor.dashboard.server import open_browser

    session.start()
    # a kill also removes the files made for the browser
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, signal.default_int_handler)
    remove_files = None
    try:
        remove_files = open_browser(server) if browser else None
        server.run()
    finally:
        if remove_files is not None:
            remove_files()
        session.close()


def read_token(file: Path | None, *, no_token: bool) -> str | None:
    """Return the token that the user chose in a file or the environment, or ``None``. Raises
    AdvisorError for a token that others can read or guess. It is not an argument of the command,
    because every user of the machine can read arguments."""
    # it is private, and the browser that is started gets this process's environment
    text, source = os.environ.pop(TOKEN, None), TOKEN
    if no_token and (file is not None or text is not None):
        raise AdvisorError(
            f"--no-token and {'--token-file' if file is not None else TOKEN}: choose one"
        )
    if file is not None:
        text, source = _read_token(file), f"--token-file {file}"
    if text is None:
        return None
    from advisor.dashboard.server import MIN_TOKEN_LENGTH, is_usable_token

    text = text.strip()
    if not is_usable_token(text):
        raise AdvisorError(
            f"{source}: a token has {MIN_TOKEN_LENGTH} to 512 letters, digits and -._~; "
            'for example python3 -c "import secrets; print(secrets.token_urlsafe())"'
        )
    return text


def _read_token(file: Path) -> str:
    """Read at most 1,024 bytes of a file. Raises AdvisorError if other users may read it."""
    try:
        # a pipe would block the command until something is written to it
        descriptor = os.open(file, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0))
        with os.fdopen(descriptor, "rb") as reader:
            status = os.fstat(reader.fileno())
            if not stat.S_ISREG(status.st_mode):
                raise AdvisorError(f"--token-file {file}: not a file")
            if os.name == "posix" and status.st_mode & 0o077:
                raise AdvisorError(f"--token-file {file}: others may read it; chmod 600 {file}")
            return reader.read(1024).decode("ascii", "replace")
    except OSError as error:
        why = error.strerror or str(error)
        raise AdvisorError(f"--token-file {file}: cannot be read ({why})") from None


def parse_perfetto(text: str) -> str | None:
    """Parse the address of a Perfetto UI, or return ``None`` for ``off``. Raises AdvisorError."""
    if text.strip().lower() == "off":
        return None
    try:
        parts = urlsplit(text.strip())
        is_valid = parts.scheme in ("https", "http") and parts.hostname and not parts.username
        is_valid = is_valid and parts.port != 0
    except ValueError:
        is_valid = False
    if not is_valid or len(text) > 500 or not text.isascii() or not text.isprintable():
        raise AdvisorError(f"--perfetto-url {text}: give an address such as {PERFETTO}, or off")
    return text.strip()


def parse_editor(text: str) -> str:
    """Parse the address of an editor, empty for ``off``. Raises AdvisorError if it is invalid."""
    text = text.strip()
    if text.lower() == "off":
        return ""
    scheme, separator, _ = text.partition("://")
    is_unsafe = scheme.lower() in ("javascript", "data", "vbscript", "file")
    is_valid = separator and scheme.replace("-", "").replace("+", "").isalnum() and "{file}" in text
    if is_unsafe or not is_valid or len(text) > 500 or not text.isascii() or not text.isprintable():
        raise AdvisorError(f"--editor {text}: give an address such as {EDITOR}, or off")
    return text


def _announce(server: DashboardServer, port: int) -> None:
    """Print the server's address and who can connect."""
    print(f"advisor dashboard: {server.address}")
    if port and server.port != port:
        print(f"port {port} is taken; this is the next free one", file=sys.stderr)
    if server.access.token is not None:
        print("Anyone with the token in this address can connect. Ctrl-C stops the server.")
    else:
        print("Ctrl-C stops the server.")
        who = "every user of this machine" if server.access.is_local_only else "everyone"
        print(f"No token: {who} who can reach the address can connect.", file=sys.stderr)
    sys.stdout.flush()
