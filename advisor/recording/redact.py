"""Command lines and values without the credentials in them: nothing secret reaches the disk."""

from __future__ import annotations

import re
from collections.abc import Sequence

HIDDEN = "***"
MAX_ARGUMENTS, MAX_LENGTH = 512, 2000

_LAST = {
    "token", "secret", "secrets", "password", "passwd", "passphrase", "pwd", "pass", "apikey",
    "credential", "credentials", "auth", "authorization", "bearer", "cookie", "dsn",
}  # fmt: skip
_BEFORE_KEY = {"api", "access", "secret", "private", "auth", "ssh", "account", "wandb", "hf"}
_WORDS = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|\d+")
_URL = re.compile(r"(?<=://)[^/\s@]+@")
_QUERY = re.compile(
    r"(?i)([?&;](?:[\w.-]*(?:token|secret|passw(?:or)?d|signature|credential|key|sig|auth)))"
    r"=[^&#;\s]+"
)
_HEADER = re.compile(r"(?i)\b(bearer|basic|token)\s+[\w.~+/=-]{8,}")
_KNOWN = re.compile(
    r"\b(?:hf_[A-Za-z0-9]{16,}|sk-[A-Za-z0-9_-]{16,}|gh[pousr]_[A-Za-z0-9]{20,}"
    r"|github_pat_\w{20,}|glpat-[\w-]{16,}|xox[abprs]-[\w-]{10,}|A(?:KIA|SIA)[A-Z0-9]{16}"
    r"|AIza[\w-]{30,}|ya29\.[\w-]{20,}|eyJ[\w-]{10,}\.[\w-]{10,}\.[\w-]+)"
)
_PAIR = re.compile(r"^(?P<name>[^=\s]{1,200})=(?P<value>.*)$", re.DOTALL)


def is_secret_name(name: str) -> bool:
    """Whether an option or variable of this name holds a credential: its last word says so
    (``--hf-token``, ``wandb.api_key``; not ``--max-tokens`` or ``--tokenizer``)."""
    words = [word.lower() for word in _WORDS.findall(name)]
    if not words:
        return False
    if words[-1] in _LAST:
        return True
    return words[-1] in {"key", "keys"} and len(words) > 1 and words[-2] in _BEFORE_KEY


def clean_value(value: str) -> str:
    """A value without credentials in URLs, headers, or of a known look; cut to a length."""
    value = _URL.sub(f"{HIDDEN}@", value)
    value = _QUERY.sub(rf"\1={HIDDEN}", value)
    value = _HEADER.sub(rf"\1 {HIDDEN}", value)
    value = _KNOWN.sub(HIDDEN, value)
    return value if len(value) <= MAX_LENGTH else f"{value[:MAX_LENGTH]}…"


def clean_command(arguments: Sequence[str]) -> list[str]:
    """A command line with credentials replaced: what follows an option whose name says that it
    holds one, and whatever looks like one anywhere. Code given with ``-c`` is left out."""
    found: list[str] = []
    hide = ""
    for argument in list(arguments)[:MAX_ARGUMENTS]:
        if hide and not (hide == "option" and argument.startswith("-")):
            found.append("…" if hide == "code" else HIDDEN)
            hide = ""
            continue
        hide = ""
        pair = _PAIR.match(argument)
        if pair is not None and is_secret_name(pair["name"]):
            found.append(f"{pair['name']}={HIDDEN}")
            continue
        if argument == "-c" and len(found) == 1:
            hide = "code"
        elif argument.startswith("-") and pair is None and is_secret_name(argument):
            hide = "option"
        found.append(clean_value(argument))
    if len(arguments) > MAX_ARGUMENTS:
        found.append("…")
    return found
