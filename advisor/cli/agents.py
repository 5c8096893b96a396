"""``advisor mcp`` and ``advisor skill``: tools for coding agents, and how to use advisor."""

from importlib.util import find_spec
from pathlib import Path
from typing import Annotated

import typer

from advisor.core.errors import AdvisorError, install_command
from advisor.mcp import SKILL

SKILL_FOLDERS = (".claude/skills", ".agents/skills", ".codex/skills")
"""Folders of a project in which agents look for skills. The first one that exists is used."""


def mcp(
    folders: Annotated[
        list[str],
        typer.Argument(metavar="FOLDER", help="The only folders that may be read."),
    ],
    allow_run: Annotated[
        bool,
        typer.Option(
            "--allow-run",
            help="Allow the client to record scripts below these folders, with your rights.",
        ),
    ] = False,
) -> None:
    """Serve tools to a coding agent (Model Context Protocol, stdio): what is slow, what a fix
    saves, what-if, compare. It only reads these folders, and writes nothing."""
    from advisor.mcp.answers import AllowedFolders

    allowed = AllowedFolders(folders)
    if find_spec("mcp") is None:
        raise AdvisorError(
            f"the SDK of the Model Context Protocol is missing: {install_command('mcp')}"
        )
    from advisor.mcp.tools import serve

    serve(allowed, allow_run=allow_run)


def skill(
    action: Annotated[
        str, typer.Argument(metavar="install|show", help="Write the skill, or print it.")
    ],
    folder: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="Folder of skills; default: your agent's folder."),
    ] = None,
) -> None:
    """Teach a coding agent to use advisor (the SKILL.md convention)."""
    if action == "show":
        print(SKILL.read_text(encoding="utf-8"), end="")
        return
    if action != "install":
        raise AdvisorError(f"skill {action}: choose install or show")
    skills_folder = folder or next(
        (Path(p) for p in SKILL_FOLDERS if Path(p).is_dir()), Path(SKILL_FOLDERS[0])
    )
    target = skills_folder / "advisor" / "SKILL.md"
    text = SKILL.read_text(encoding="utf-8")
    try:
        if target.exists() and target.read_text(encoding="utf-8") != text:
            raise AdvisorError(f"{target}: exists and differs; remove it first")
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(text, encoding="utf-8")
    except OSError as error:
        raise AdvisorError(f"cannot write {target} ({error.strerror or error})") from None
    print(target)
