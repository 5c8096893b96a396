"""``[tool.advisor]`` of the nearest ``pyproject.toml``, read with care: it may be anybody's."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

from advisor.core.errors import AdvisorError
from advisor.core.files import read_regular

MAX_CONFIG_BYTES = 256 << 10
"""Of a file."""
MAX_DOTS = 1000
"""In one of its lines. The parser's memory grows with the square of the parts of a key."""


def read_toml(file: Path) -> dict[str, Any]:
    """The tables of a TOML file. Raises AdvisorError: it cannot be read."""
    try:
        content = read_regular(file, MAX_CONFIG_BYTES)
        if any(line.count(b".") > MAX_DOTS for line in content.split(b"\n")):
            raise AdvisorError(f"{file}: cannot be read (a key of too many parts)")
        return tomllib.loads(content.decode())
    except RecursionError:
        raise AdvisorError(f"{file}: cannot be read (nested too deeply)") from None
    except (ValueError, OSError) as error:  # the decoders' errors are ValueErrors
        raise AdvisorError(f"{file}: cannot be read ({str(error)[:200]})") from None


def tool_section(name: str, start: Path | None = None) -> tuple[Path | None, Any]:
    """(file, ``[tool.advisor.<name>]``) of the nearest ``pyproject.toml`` at or above ``start``;
    an empty table where there is none. Raises AdvisorError: the file cannot be read."""
    folder = (start or Path.cwd()).resolve()
    for place in (folder, *folder.parents):
        file = place / "pyproject.toml"
        if not file.is_file():
            continue
        tool = read_toml(file).get("tool", {})
        section = tool.get("advisor", {}) if isinstance(tool, dict) else {}
        return file, section.get(name, {}) if isinstance(section, dict) else {}
    return None, {}
