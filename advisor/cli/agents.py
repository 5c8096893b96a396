"""``advisor mcp`` and ``advisor skill``: tools for coding agents, and how to use advisor."""

from importlib.util import find_spec
from pathlib import Path
from typing import Annotated

import typer

from advisor.core.errors import AdvisorError, install_command
from advisor.mcp import SKILL

PLACES = (".claude/skills", ".agents/skills", ".codex/skills")
"""Folders of a project in which agents look for skills; the first that is there is taken."""


def mcp(
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
    from advisor.mcp.answers import AllowedFolders

    allowed = AllowedFolders(folders)
    if find_spec("mcp") is None:
        raise AdvisorError(f"the Model Context Protocol's SDK is missing: {install_command('mcp')}")
    from advisor.mcp.tools import serve

    serve(allowed, allow_run=allow_run)


def skill(
    action: Annotated[str, typer.Argument(metavar="install|show", help="Write it, or print it.")],
    folder: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="Folder of skills; default: that of your agent."),
    ] = None,
) -> None:
    """Teach a coding agent to use advisor (the SKILL.md convention)."""
    if action == "show":
        print(SKILL.read_text(encoding="utf-8"), end="")
        return
    if action != "install":
        raise AdvisorError(f"skill {action}: choose install or show")
    home = folder or next((Path(p) for p in PLACES if Path(p).is_dir()), Path(PLACES[0]))
    target = home / "advisor" / "SKILL.md"
    text = SKILL.read_text(encoding="utf-8")
    try:
        if target.exists() and target.read_text(encoding="utf-8") != text:
            raise AdvisorError(f"{target}: is there and differs; remove it first")
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(text, encoding="utf-8")
    except OSError as error:
        raise AdvisorError(f"{target}: cannot be written ({error.strerror or error})") from None
    print(target)
