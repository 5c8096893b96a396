"""What an address asks for: the one place that reads query arguments.

Each name once, as text of bounded length, whatever was sent: pages look values up among what there
is, and never meet a list, a number or half a megabyte.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any
from urllib.parse import parse_qsl

MOST_NAMES = 40
LONGEST_NAME = 40
LONGEST = 64 << 10
"""Characters of a value, and of a query string, that are looked at."""


def texts(given: Mapping[str, Any]) -> dict[str, str]:
    """Arguments as a server or Dash parsed them: of a repeated one the first that is text; what
    is no text or too long is left out, as if it had not been sent."""
    found: dict[str, str] = {}
    for name, value in given.items():
        first = value[0] if isinstance(value, list | tuple) and value else value
        if not isinstance(first, str) or not name.isidentifier() or len(name) > LONGEST_NAME:
            continue
        if len(first) > LONGEST:
            continue
        if len(found) == MOST_NAMES:
            break
        found[name] = first
    return found


def parse(search: object) -> dict[str, str]:
    """The same of the query of an address: ``?run=1&rank=0``."""
    if not isinstance(search, str):
        return {}
    given: dict[str, list[str]] = {}
    text = search[:LONGEST].removeprefix("?")
    for name, value in parse_qsl(text, keep_blank_values=True, errors="replace"):
        given.setdefault(name, []).append(value)
    return texts(given)
