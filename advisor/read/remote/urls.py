"""Parsing of URLs: recognition, redaction for display, file name and rank."""

import re
from collections.abc import Iterable
from pathlib import Path
from urllib.parse import unquote

from msgspec import Struct

from advisor.core.errors import AdvisorError

HIDDEN = "[redacted]"
WEB = ("http", "https")
LONGEST_URL = 8192
LONGEST_NAME = 120
"""Maximum length of a local file's name. The last characters are kept."""
_MAX_RANGES = 4096

_URL = re.compile(r"(?:[A-Za-z][A-Za-z0-9+.-]{1,30}::){0,8}[A-Za-z][A-Za-z0-9+.-]{1,30}://")
"""Pattern of a URL. A scheme has at least two letters, because ``C://`` is a drive."""
_ACCOUNT_SCHEMES = ("abfs", "abfss", "az", "adl", "wasb", "wasbs")
"""Schemes of Azure, whose ``container@account`` is not a login."""
_RANK = re.compile(r"(?:(?<![A-Za-z])rank|Rank|RANK)[-_. =]?(\d{1,6})(?!\d)")
_UNSAFE_CHARACTER = re.compile(r"[^\w.+=-]")
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
    """Return the path of ``file://…``, or ``None`` if it is remote."""
    if scheme(url) not in ("file", "local") or "::" in url:
        return None
    return url.partition("://")[2] or "/"


def redact_url(url: str) -> str:
    """Return a URL for display, without credentials and without the query, which holds the
    signature of a signed URL. A path stays unchanged."""
    return "::".join(map(_redact_part, url.split("::"))) if is_url(url) else url


def _redact_part(part: str) -> str:
    from advisor.core.credentials import hide_known  # lazy: local traces do not need its patterns

    scheme_text, scheme_mark, address = part.partition("://")
    if not scheme_mark:
        return part
    name = scheme_text.lower()
    end = re.search(r"[?#]" if name in WEB else r"[?#](?=[^/]*=)", address)
    host, slash, path = (address if end is None else address[: end.start()]).partition("/")
    login, login_mark, host_name = host.rpartition("@")
    if login_mark and (name not in _ACCOUNT_SCHEMES or ":" in login):
        host = host_name
    return f"{scheme_text}://{host}{slash}{hide_known(path, HIDDEN)}"


def location_of_url(url: str) -> str:
    """Return a path for a URL's location. The path of a member is below that of its archive."""
    return "/".join(reversed(redact_url(url).split("::"))) if is_url(url) else url


def rank_in(path_or_url: str) -> int | None:
    """Return the number after ``rank`` in a file's name, else in the nearest folder that has
    one."""
    for part in reversed(Path(location_of_url(path_or_url)).parts):
        if numbers := _RANK.findall(part):
            return int(numbers[-1])
    return None


def file_name(url: str) -> str:
    """Return a name for a local copy, with the suffixes of the original and nothing that leads out
    of a folder."""
    first = next((part for part in url.split("::") if "://" in part), url)
    path = _redact_part(first).partition("://")[2]
    name = _UNSAFE_CHARACTER.sub("_", unquote(path).rstrip("/").rpartition("/")[2])[-LONGEST_NAME:]
    return name.lstrip(".") or "trace"


class RankFilter:
    """Set of chosen ranks: ``0-63,512``."""

    def __init__(self, text: str) -> None:
        """Parse ranks. Raises AdvisorError if the text is not a list of numbers and ranges."""
        self.text = text
        self._ranges: list[range] = []
        parts = text.split(",")
        if len(parts) > _MAX_RANGES:
            raise AdvisorError(f"--ranks: more than {_MAX_RANGES:,} ranges")
        for part in parts:
            match = _RANGE.fullmatch(part.strip())
            first = int(match[1]) if match else 0
            last = int(match[2] or first) if match else -1
            if last < first:
                raise AdvisorError(f"--ranks {text[:80]}: give ranks and ranges, such as 0-63,512")
            self._ranges.append(range(first, last + 1))

    def refuse_missing(self, present: Iterable[int]) -> None:
        """Raise AdvisorError for ranks above all that are present. Gaps between these are kept."""
        last = max(present, default=-1)
        beyond = [(max(item.start, last + 1), item.stop - 1) for item in self._ranges]
        missing = [
            str(first) if first == end else f"{first}-{end}" for first, end in beyond if end > last
        ]
        if last >= 0 and missing:
            raise AdvisorError(
                f"--ranks {self.text[:80]}: no trace of rank {', '.join(missing[:20])}"
            )

    def __contains__(self, rank: object) -> bool:
        return isinstance(rank, int) and any(rank in item for item in self._ranges)


class RemoteFile(Struct, frozen=True):
    """File to read, local or remote. It can be pickled."""

    url: str
    """Address for display, without credentials and query, or an unchanged local path."""
    at: str
    """Address to open: the URL as given, or a path. It may hold a signature, so do not display
    it."""
    rank: int | None = None
    """Rank in its name or in that of the nearest folder, or ``None`` if neither has one."""
    size: int | None = None
    """Size in bytes, or ``None`` if it is unknown before reading."""
    offset: int | None = None
    """Offset in the archive for a member of an uncompressed tar."""
    problem: str = ""
    """Reason why it cannot be read, if already known, else empty."""

    def __repr__(self) -> str:
        return f"Source({self.url!r}, rank={self.rank}, size={self.size})"
