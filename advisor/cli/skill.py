"""``advisor skill``: instructions for a coding agent, where agents look for them."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from advisor.core.errors import AdvisorError

SKILL = Path(__file__).parents[1] / "mcp" / "skill" / "SKILL.md"
PLACES = (".claude/skills", ".agents/skills", ".codex/skills")
"""Folders of a project in which agents look for skills; the first that is there is taken."""


def command(
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
