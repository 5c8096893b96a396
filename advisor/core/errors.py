"""The error that the command line prints as one line, and the command that installs advisor."""

import re
from collections.abc import Callable, Iterable

MIN_SIMILARITY = 0.6
"""Minimum similarity, 0 to 1, at which a known name may be meant."""
MIN_WORD_SIMILARITY = 0.8
"""Minimum similarity at which a word of a known name may be meant. Short words need more."""
_MAX_NAME = 200
"""Maximum number of compared characters of a name."""


class AdvisorError(Exception):
    """An error that the user can act on. It says what is wrong with which file, and what to do.

    The command line prints the message as one line and exits with ``exit_code`` (2: bad input)."""

    exit_code = 2

    def __str__(self) -> str:
        return " ".join(super().__str__().split())


def suggest(
    name: str, known: Iterable[str], otherwise: str, *, part: Callable[[str], str] = str
) -> str:
    """Return ``did you mean …?`` with up to three known names that are most similar to an unknown
    one, as a whole or word by word, or ``otherwise`` if none is. ``part``: compared part of a
    name."""
    from difflib import SequenceMatcher

    def likeness(name_part: str, other: str) -> float:
        return SequenceMatcher(None, name_part, other).ratio()

    def nearness(other: str) -> float:
        words = re.findall(r"[^\W_]+", other.casefold())
        best = (max((likeness(item, word) for word in words), default=0) for item in wanted)
        by_words = sum(ratio for ratio in best if ratio >= MIN_WORD_SIMILARITY)
        return max(likeness(name.casefold(), other.casefold()), by_words / max(1, len(wanted)))

    name = part(name)
    wanted = re.findall(r"[^\W_]+", name[:_MAX_NAME].casefold())
    scored = sorted(((nearness(part(other)), other) for other in known), key=lambda pair: -pair[0])
    enough = max([MIN_SIMILARITY, *(0.85 * score for score, _ in scored[:1])])
    *first, last = [other for score, other in scored[:3] if score >= enough] or [""]
    return f"did you mean {', '.join(first)}{' or ' if first else ''}{last}?" if last else otherwise


def describe_failure(error: BaseException) -> str:
    """Return an unexpected error in one line, with its location: ``KeyError: 'x' at
    tools.py:12``."""
    frame = error.__traceback__
    while frame is not None and frame.tb_next is not None:
        frame = frame.tb_next
    text = " ".join(f"{type(error).__name__}: {error}".split())[:200]
    if frame is None:
        return text
    file = frame.tb_frame.f_code.co_filename.replace("\\", "/").rpartition("/")[2]
    return f"{text} at {file}:{frame.tb_lineno}"


def install_command(extra: str) -> str:
    """Return the command that installs an extra from the same source as advisor: ``pip install
    "gpu-advisor[record]"``, or a folder, archive or repository."""
    from pathlib import Path

    where = _find_origin()
    source = f"gpu-advisor[{extra}]" if not where else f"gpu-advisor[{extra}] @ {where}"
    if where.startswith("file://") and Path(where[7:], "pyproject.toml").is_file():
        source = f"{where[7:]}[{extra}]"
    return f'pip install "{source}"'


def _find_origin() -> str:
    """Return the URL that advisor was installed from, or its folder if it was not installed. Empty
    for a package index."""
    import json
    from importlib.metadata import PackageNotFoundError, distribution
    from pathlib import Path

    try:
        text = distribution("gpu-advisor").read_text("direct_url.json")
        origin = json.loads(text or "{}")
        vcs = origin.get("vcs_info", {})
        prefix, commit = f"{vcs['vcs']}+" if vcs else "", vcs.get("commit_id", "")
        return f"{prefix}{origin.get('url', '')}{f'@{commit}' if commit else ''}"
    except (PackageNotFoundError, ValueError, TypeError, AttributeError, KeyError, OSError):
        return Path(__file__).resolve().parents[2].as_uri()
