"""What a URL says: that it is one, what of it may be shown, its file's name, its rank."""

from __future__ import annotations

import re
from pathlib import Path
from urllib.parse import unquote

from msgspec import Struct

from advisor.core.errors import AdvisorError

HIDDEN = "[redacted]"
WEB = ("http", "https")
LONGEST_URL = 8192
LONGEST_NAME = 120
"""Characters of a local file's name: its last ones."""
MAX_RANGES = 4096

_URL = re.compile(r"(?:[A-Za-z][A-Za-z0-9+.-]{1,30}::){0,8}[A-Za-z][A-Za-z0-9+.-]{1,30}://")
"""A scheme has two letters at least: ``C://`` is a drive."""
_ACCOUNTS = ("abfs", "abfss", "az", "adl", "wasb", "wasbs")
"""Schemes of Azure, in whose ``container@account`` nobody logs in."""
_RANK = re.compile(r"(?:(?<![A-Za-z])rank|Rank|RANK)[-_. =]?(\d{1,6})(?!\d)")
_UNSAFE = re.compile(r"[^\w.+=-]")
_RANGE = re.compile(r"(\d{1,9})(?:-(\d{1,9}))?")


def is_url(text: str) -> bool:
    """Whether a place is a URL (``s3://…``, ``zip://*.json::https://…``), not a path."""
    return _URL.match(text) is not None


def scheme(url: str) -> str:
    """Of its first part, in lower case: ``zip`` of ``zip://a.json::s3://bucket/a.zip``."""
    return re.split("::|://", url, maxsplit=1)[0].lower()


def is_web(url: str) -> bool:
    """Whether it is read by HTTP."""
    return scheme(url) in WEB


def local_path(url: str) -> str | None:
    """The path of ``file://…``; ``None``: it is elsewhere."""
    if scheme(url) not in ("file", "local") or "::" in url:
        return None
    return url.partition("://")[2] or "/"


def redact_url(url: str) -> str:
    """A URL for everybody's eyes: without who logs in, and without its query, which holds the
    signature of one that was signed. A path is shown as it is."""
    return "::".join(map(_shown, url.split("::"))) if is_url(url) else url


def _shown(part: str) -> str:
    from advisor.core.credentials import hide_known  # its patterns cost a local trace nothing

    before, sep, rest = part.partition("://")
    if not sep:
        return part
    name = before.lower()
    end = re.search(r"[?#]" if name in WEB else r"[?#](?=[^/]*=)", rest)
    host, slash, path = (rest if end is None else rest[: end.start()]).partition("/")
    who, at, where = host.rpartition("@")
    if at and (name not in _ACCOUNTS or ":" in who):
        host = where
    return f"{before}://{host}{slash}{hide_known(path, HIDDEN)}"


def location_of_url(url: str) -> str:
    """A path that says where a URL's file lies: that of a member below its archive's."""
    return "/".join(reversed(redact_url(url).split("::"))) if is_url(url) else url


def rank_in(place: str) -> int | None:
    """The number behind ``rank`` in a file's name, else in the nearest folder that has one."""
    for part in reversed(Path(location_of_url(place)).parts):
        if found := _RANK.findall(part):
            return int(found[-1])
    return None


def file_name(url: str) -> str:
    """A name for a local copy, with the suffixes of the original, and nothing that could lead out
    of a folder."""
    first = next((part for part in url.split("::") if "://" in part), url)
    path = _shown(first).partition("://")[2]
    name = _UNSAFE.sub("_", unquote(path).rstrip("/").rpartition("/")[2])[-LONGEST_NAME:]
    return name.lstrip(".") or "trace"


class RankFilter:
    """Ranks that were chosen: ``0-63,512``."""

    def __init__(self, text: str) -> None:
        """Raises AdvisorError for what is no list of numbers and ranges."""
        self.text = text
        self._ranges: list[range] = []
        parts = text.split(",")
        if len(parts) > MAX_RANGES:
            raise AdvisorError(f"--ranks: more than {MAX_RANGES:,} ranges")
        for part in parts:
            result = _RANGE.fullmatch(part.strip())
            first = int(result[1]) if result else 0
            last = int(result[2] or first) if result else -1
            if last < first:
                raise AdvisorError(f"--ranks {text[:80]}: give ranks and ranges, such as 0-63,512")
            self._ranges.append(range(first, last + 1))

    def __contains__(self, rank: object) -> bool:
        return isinstance(rank, int) and any(rank in item for item in self._ranges)


class RemoteFile(Struct, frozen=True):
    """A file, here or elsewhere. Can be pickled."""

    url: str
    """For everybody's eyes: without credentials and without a query. A local path as it is."""
    at: str
    """What is opened: the URL as it was given, or a path. May hold a signature: not for showing."""
    rank: int | None = None
    """By its name or the nearest folder's; ``None``: neither has one."""
    size: int | None = None
    """Bytes; ``None``: not known before it is read."""
    offset: int | None = None
    """Of a member of a tar that is not packed: where its bytes begin in the archive."""
    problem: str = ""
    """Why it cannot be read, where that is known already."""

    def __repr__(self) -> str:
        return f"Source({self.url!r}, rank={self.rank}, size={self.size})"
