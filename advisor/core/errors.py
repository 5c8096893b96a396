"""The error that the command line prints as one line, and how advisor is installed."""

import re
from collections.abc import Callable, Iterable

NEAR = 0.6
"""Similarity, 0 to 1, from which a known name may be meant."""
NEAR_WORD = 0.8
"""Similarity from which a word of a known name may be meant: short words are soon similar."""
MAX_NAME = 200
"""Number of characters of a name that are compared."""


class AdvisorError(Exception):
    """An error on which the user can act: it says what is wrong with which file, and what to do.

    The command line prints the message as one line and exits with ``exit_code`` (2: bad input)."""

    exit_code = 2

    def __str__(self) -> str:
        return " ".join(super().__str__().split())


def suggest(
    name: str, known: Iterable[str], otherwise: str, *, part: Callable[[str], str] = str
) -> str:
    """Return ``did you mean …?`` with the up to three known names nearest to an unknown one, as a
    whole or word by word; ``otherwise`` where none is near. ``part``: what is compared of each."""
    from difflib import SequenceMatcher

    def likeness(given: str, other: str) -> float:
        return SequenceMatcher(None, given, other).ratio()

    def nearness(other: str) -> float:
        words = re.findall(r"[^\W_]+", other.casefold())
        best = (max((likeness(item, word) for word in words), default=0) for item in wanted)
        by_words = sum(ratio for ratio in best if ratio >= NEAR_WORD)
        return max(likeness(name.casefold(), other.casefold()), by_words / max(1, len(wanted)))

    name = part(name)
    wanted = re.findall(r"[^\W_]+", name[:MAX_NAME].casefold())
    scored = sorted(((nearness(part(other)), other) for other in known), key=lambda pair: -pair[0])
    enough = max([NEAR, *(0.85 * score for score, _ in scored[:1])])
    *first, last = [other for score, other in scored[:3] if score >= enough] or [""]
    return f"did you mean {', '.join(first)}{' or ' if first else ''}{last}?" if last else otherwise


def describe_failure(error: BaseException) -> str:
    """Return an unexpected error in one line, with the place that raised it: ``KeyError: 'x' at
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
    """Return the command that installs an extra from where advisor itself came from: ``pip install
    "gpu-advisor[record]"``, or with the folder, archive or repository."""
    from pathlib import Path

    where = _origin()
    source = f"gpu-advisor[{extra}]" if not where else f"gpu-advisor[{extra}] @ {where}"
    if where.startswith("file://") and Path(where[7:], "pyproject.toml").is_file():
        source = f"{where[7:]}[{extra}]"
    return f'pip install "{source}"'


def _origin() -> str:
    """Return the URL that advisor was installed from; empty: a package index. A folder in which it
    lies without having been installed is one too."""
    import json
    from importlib.metadata import PackageNotFoundError, distribution
    from pathlib import Path

    try:
        text = distribution("gpu-advisor").read_text("direct_url.json")
        found = json.loads(text or "{}")
        vcs = found.get("vcs_info", {})
        prefix, commit = f"{vcs['vcs']}+" if vcs else "", vcs.get("commit_id", "")
        return f"{prefix}{found.get('url', '')}{f'@{commit}' if commit else ''}"
    except (PackageNotFoundError, ValueError, TypeError, AttributeError, KeyError, OSError):
        return Path(__file__).resolve().parents[2].as_uri()
