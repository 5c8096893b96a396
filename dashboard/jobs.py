"""Jobs of many ranks in a session: their report, saved before; the keys of their ranks."""

from __future__ import annotations

import re

from advisor.core.report import SCHEMA, Report
from advisor.core.saved import read_saved

MAX_JSON = 64 << 20
_KEY = re.compile(r"(\d{1,4})\.(\d{1,6})")


def saved_report(path: str) -> Report | None:
    """The report of several ranks that a file holds; ``None``: it is something else.

    Raises AdvisorError: it is one, and damaged.
    """
    result = read_saved(path, Report, SCHEMA, MAX_JSON)
    return result if result is not None and result.ranks is not None else None


def key_of(job: str, place: int) -> str:
    """The key of an entry that is a rank of a job: ``0.7`` is the eighth row of entry 0."""
    return f"{job}.{place}"


def split(key: str) -> tuple[str, int] | None:
    """The job and the row of such a key; ``None``: it is none."""
    result = _KEY.fullmatch(key)
    return (result[1], int(result[2])) if result else None
