"""How advisor is installed: said once, for every message that names it."""

from __future__ import annotations

SOURCE = "."
"""What pip is given: the folder of the source, until a package index has ``gpu-advisor``."""


def install(extra: str) -> str:
    """The command that brings an extra: ``pip install ".[record]" in the folder of its source``."""
    where = " in the folder of advisor's source" if SOURCE == "." else ""
    return f'pip install "{SOURCE}[{extra}]"{where}'
