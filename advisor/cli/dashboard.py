"""``advisor dashboard``: traces and runs in the browser."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from advisor.errors import AdvisorError

if TYPE_CHECKING:
    from advisor.dashboard.serve import Server


def command(
    paths: Annotated[
        list[str],
        typer.Argument(metavar="PATH", help="Each a trace file, or a folder of one run's traces."),
    ],
    host: Annotated[
        str,
        typer.Option(metavar="ADDRESS", help="Listen there; any but 127.0.0.1 asks for a token."),
    ] = "127.0.0.1",
    port: Annotated[
        int, typer.Option(metavar="N", min=0, max=65535, help="This port or the next free one.")
    ] = 8050,
    browser: Annotated[
        bool, typer.Option("--browser/--no-browser", help="Open the browser.")
    ] = True,
    live: Annotated[
        bool, typer.Option("--live", help="Follow the run while it is being recorded.")
    ] = False,
    rank: Annotated[
        int | None, typer.Option(metavar="N", min=0, help="Analyse this rank only.")
    ] = None,
    window: Annotated[
        int | None,
        typer.Option(metavar="N", min=0, help="Which window of a rank that has several."),
    ] = None,
    steps: Annotated[
        str | None,
        typer.Option(metavar="A:B", help="Steps A up to, not including, B, counted from 0."),
    ] = None,
    rules: Annotated[
        Path | None, typer.Option(metavar="DIR", help="More rules: every *.py in this folder.")
    ] = None,
    max_size: Annotated[
        str | None,
        typer.Option(metavar="SIZE", help="Stop at this uncompressed size (default 16G)."),
    ] = None,
) -> None:
    """Show traces and runs in the browser: what the step is made of, what to fix, and the timeline.

    With several paths the first is compared with each of the others.
    """
    from advisor.cli.analyze import parse_size, parse_steps

    chosen, limit = parse_steps(steps), parse_size(max_size)
    for path in paths:
        if path != "-" and not Path(path).exists():
            raise AdvisorError(f"{path}: no such file or directory")
    try:
        from advisor.dashboard.app import create_app
    except ModuleNotFoundError as error:
        raise AdvisorError(
            f"the dashboard needs {error.name}: pip install 'gpu-advisor[dashboard]'"
        ) from None
    from advisor.advice.engine import Options
    from advisor.dashboard.access import Access
    from advisor.dashboard.serve import bind
    from advisor.dashboard.session import Session
    from advisor.ingest import ReadOptions
    from advisor.ingest.source import DEFAULT_LIMIT

    options = Options(
        rank=rank,
        window=window,
        steps=chosen,
        rules_folder=rules,
        read=ReadOptions(max_bytes=limit or DEFAULT_LIMIT),
    )
    session = Session(paths, options, live=live)
    access = Access.to(host)
    server = bind(create_app(session, access).server, access, port)
    session.start()
    _announce(server, port)
    if browser:
        import webbrowser

        webbrowser.open(server.address)
    try:
        server.run()
    finally:
        session.close()


def _announce(server: Server, port: int) -> None:
    """Where it is, and what to know about that."""
    print(f"advisor dashboard: {server.address}")
    if port and server.port != port:
        print(f"port {port} is taken, this is the next free one", file=sys.stderr)
    if server.access.token is not None:
        print("The token in the address lets anybody in who has it. Ctrl-C ends it.")
    else:
        print("Ctrl-C ends it.")
    sys.stdout.flush()
