"""``advisor mcp``: tools for coding agents, over standard input and output."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Annotated

import typer

from advisor.core.errors import AdvisorError, install


def command(
    folders: Annotated[
        list[str],
        typer.Argument(metavar="FOLDER", help="Folders that may be read; nothing else is."),
    ],
    allow_run: Annotated[
        bool,
        typer.Option(
            "--allow-run",
            help="Allow the client to record scripts below these folders, with your rights.",
        ),
    ] = False,
) -> None:
    """Serve a coding agent (Model Context Protocol, stdio): what is slow, what a fix saves,
    what-if, compare. Reads below the folders, writes nothing."""
    from advisor.mcp.bounds import Allowed

    allowed = Allowed(folders)
    if find_spec("mcp") is None:
        raise AdvisorError(f"the Model Context Protocol's SDK is missing: {install('mcp')}")
    from advisor.mcp.server import serve

    serve(allowed, allow_run=allow_run)
