"""Parsing of URLs: recognition, redaction for display, the file's name, its rank."""

import re
from pathlib import Path
from urllib.parse import unquote

from msgspec import Struct

from advisor.core.errors import AdvisorError

HIDDEN = "[redacted]"
WEB = ("http", "https")
LONGEST_URL = 8192
LONGEST_NAME = 120
"""Most characters of a local file's name, the last ones."""
MAX_RANGES = 4096

_URL = re.compile(r"(?:[A-Za-z][A-Za-z0-9+.-]{1,30}::){0,8}[A-Za-z][A-Za-z0-9+.-]{1,30}://")
"""Pattern of a URL. A scheme has two letters at least: ``C://`` is a drive."""
_ACCOUNTS = ("abfs", "abfss", "az", "adl", "wasb", "wasbs")
"""Schemes of Azure, whose ``container@account`` is no login."""
_RANK = re.compile(r"(?:(?<![A-Za-z])rank|Rank|RANK)[-_. =]?(\d{1,6})(?!\d)")
_UNSAFE = re.compile(r"[^\w.+=-]")
_RANGE = re.compile(r"(\d{1,9})(?:-(\d{1,9}))?")


def is_url(text: str) -> bool:
    """Return whether a text is a URL (``s3://…``, ``zip://*.json::https://…``), not a path."""
    return _URL.match(text) is not None


def scheme(url: str) -> str:
    """Return the first scheme, in lower case: ``zip`` of ``zip://a.json::s3://bucket/a.zip``."""
    return re.split("::|://", url, maxsplit=1)[0].lower()


def is_web(url: str) -> bool:
    return scheme(url) in WEB


def local_path(url: str) -> str | None:
    """Return the path of ``file://…``; ``None`` if it is remote."""
    if scheme(url) not in ("file", "local") or "::" in url:
        return None
    return url.partition("://")[2] or "/"


def redact_url(url: str) -> str:
    """Return a URL for display: without credentials, and without its query, which holds the
    signature of a signed one. A path stays unchanged."""
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
    """Return a path for a URL's location: a member's is below its archive's."""
    return "/".join(reversed(redact_url(url).split("::"))) if is_url(url) else url


def rank_in(place: str) -> int | None:
    """Return the number after ``rank`` in a file's name, else in the nearest folder's with one."""
    for part in reversed(Path(location_of_url(place)).parts):
        if found := _RANK.findall(part):
            return int(found[-1])
    return None


def file_name(url: str) -> str:
    """Return a name for a local copy, with the original's suffixes, and nothing that could lead out
    of a folder."""
    first = next((part for part in url.split("::") if "://" in part), url)
    path = _shown(first).partition("://")[2]
    name = _UNSAFE.sub("_", unquote(path).rstrip("/").rpartition("/")[2])[-LONGEST_NAME:]
    return name.lstrip(".") or "trace"


class RankFilter:
    """Set of chosen ranks: ``0-63,512``."""

    def __init__(self, text: str) -> None:
        """Parse ranks. Raises AdvisorError if it is no list of numbers and ranges."""
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
    """File to read, local or remote. Can be pickled."""

    url: str
    """Address for display, without credentials and query. A local path unchanged."""
    at: str
    """Address to open: the URL as given, or a path. May hold a signature: not for display."""
    rank: int | None = None
    """Rank in its name or the nearest folder's; ``None``: neither has one."""
    size: int | None = None
    """Size, bytes; ``None``: not known before it is read."""
    offset: int | None = None
    """Offset in the archive, of a member of an unpacked tar."""
    problem: str = ""
    """Reason why it cannot be read, if that is known already; else empty."""

    def __repr__(self) -> str:
        return f"Source({self.url!r}, rank={self.rank}, size={self.size})"
