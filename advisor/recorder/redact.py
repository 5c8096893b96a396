"""Command lines and values without the credentials in them: nothing secret reaches the disk."""

from __future__ import annotations

import re
from collections.abc import Sequence

from advisor.core.credentials import hide_known, hide_values, is_secret_name

__all__ = ["HIDDEN", "clean_command", "clean_value", "is_secret_name"]

HIDDEN = "***"
MAX_ARGUMENTS, MAX_LENGTH = 512, 2000

_QUERY = re.compile(r"(?i)([?&;][\w.-]{0,80}?(?:key|auth))=[^&#;\s]++")
"""In an address a key is one whatever its name."""
_HEADER = re.compile(r"(?i)\b(bearer|basic|token)\s++[\w.~+/=-]{8,}")
_PAIR = re.compile(r"^(?P<name>[^=\s]{1,200})=(?P<value>.*)$", re.DOTALL)


def clean_value(value: str) -> str:
    """A value without credentials in URLs, headers, JSON or of a known look; cut to a length."""
    if len(value) > 4 * MAX_LENGTH:  # what is cut off need not be looked at
        value = value[: 4 * MAX_LENGTH]
    value = hide_known(value, HIDDEN)
    value = _QUERY.sub(rf"\1={HIDDEN}", value)
    value = hide_values(value, HIDDEN)
    value = _HEADER.sub(rf"\1 {HIDDEN}", value)
    return value if len(value) <= MAX_LENGTH else f"{value[:MAX_LENGTH]}…"


def clean_command(arguments: Sequence[str]) -> list[str]:
    """A command line with credentials replaced: what follows an option whose name says that it
    holds one, and whatever looks like one anywhere. Code given with ``-c`` is left out."""
    result: list[str] = []
    hide = ""
    for argument in list(arguments)[:MAX_ARGUMENTS]:
        if hide and not (hide == "option" and argument.startswith("-")):
            result.append("…" if hide == "code" else HIDDEN)
            hide = ""
            continue
        hide = ""
        pair = _PAIR.match(argument)
        if pair is not None and is_secret_name(pair["name"]):
            result.append(f"{pair['name']}={HIDDEN}")
            continue
        if argument == "-c" and len(result) == 1:
            hide = "code"
        elif argument.startswith("-") and pair is None and is_secret_name(argument):
            hide = "option"
        result.append(clean_value(argument))
    if len(arguments) > MAX_ARGUMENTS:
        result.append("…")
    return result
