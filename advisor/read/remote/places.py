"""Search for the files that URLs stand for: files, folders and globs."""

import re
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

from advisor.core.errors import AdvisorError
from advisor.read.remote import archives
from advisor.read.remote.filesystem import file_system, retry
from advisor.read.remote.urls import RemoteFile, is_web, rank_in, redact_url

MAX_LISTED = 200_000
"""Most files below a folder."""
MAX_FOLDERS, DEPTH = 2_000, 8
"""Most index pages of a web server looked at, and their greatest depth."""
LISTING = 300.0
"""Timeout of a listing, s."""

Choose = Callable[[list[str]], list[str]]
"""Function that selects wanted names from a folder's, relative to it."""


def find_files(url: str, choose: Choose) -> list[RemoteFile]:
    """Return the files that a URL stands for: a file itself, whatever its name; of a folder or a
    glob those that ``choose`` wants, in the order of their names.

    One file that cannot be asked for is there, with its ``problem``. Raises AdvisorError: a folder
    that cannot be listed, has too many files, or none that is wanted; a scheme that nobody reads.
    """
    if archives.split_url(url) is not None:
        result = _in_archive(url, choose)
    else:
        system, path = file_system(url)
        _forget(system)
        if _magic(url):
            result = _globbed(system, url, choose)
        elif is_web(url) and "?" not in url and url.endswith("/"):
            result = _sources(url, _web_listing(system, url), choose)
        else:
            return _one_or_folder(system, path, url, choose)
    if not result:
        raise AdvisorError(f"{redact_url(url)}: no trace there; check the URL")
    return result


def _one_or_folder(system: Any, path: str, url: str, choose: Choose) -> list[RemoteFile]:
    try:
        info = retry(url, lambda: system.info(path))
    except AdvisorError as error:
        if url.endswith("/"):
            raise
        return [RemoteFile(url=redact_url(url), at=url, rank=rank_in(url), problem=str(error))]
    if info.get("type") != "directory":
        return [RemoteFile(url=redact_url(url), at=url, rank=rank_in(url), size=_size(info))]
    listed = retry(url, lambda: system.find(path, detail=True), LISTING)
    result = _sources(url, _relative(listed, path), choose)
    if not result:
        raise AdvisorError(f"{redact_url(url)}: a folder without traces")
    return result


def _relative(listed: dict[str, Any], root: str) -> dict[str, int | None]:
    """Return names below a folder, with their sizes, bytes."""
    start = root.strip("/")
    result = {}
    for name, info in listed.items():
        bare = name.strip("/")
        if info.get("type") == "file" and (not start or bare.startswith(f"{start}/")):
            result[bare[len(start) :].lstrip("/")] = _size(info)
    return result


def _sources(url: str, sizes: dict[str, int | None], choose: Choose) -> list[RemoteFile]:
    """Return the wanted files below a folder's URL."""
    if len(sizes) > MAX_LISTED:
        raise AdvisorError(
            f"{redact_url(url)}: more than {MAX_LISTED:,} files; give a folder with fewer"
        )
    before, bearing, after = _bearing(url)
    wanted = sorted(choose([name for name in sizes if not _hidden(name)]))
    root = bearing if bearing.endswith("/") else f"{bearing}/"
    made = ((f"{before}{root}{name}{after}", sizes[name]) for name in wanted)
    return [RemoteFile(url=redact_url(at), at=at, rank=rank_in(at), size=size) for at, size in made]


def _bearing(url: str) -> tuple[str, str, str]:
    """Split a chain of URLs at the part with the path, into prefix, that part and suffix:
    ``simplecache::s3://b/c`` into ``("simplecache::", "s3://b/c", "")``."""
    parts = url.split("::")
    index = next((number for number, part in enumerate(parts) if "://" in part), 0)
    before, after = parts[:index], parts[index + 1 :]
    return (
        "".join(f"{item}::" for item in before),
        parts[index],
        "".join(f"::{item}" for item in after),
    )


def _hidden(name: str) -> bool:
    """Return whether a name is hidden, leads out of its folder, or is another URL in a chain."""
    return "::" in name or any(part.startswith(".") for part in name.split("/"))


# -- globs --------------------------------------------------------------------------------------


def _magic(url: str) -> bool:
    _, bearing, _ = _bearing(url)
    path = bearing.partition("?")[0] if is_web(bearing) else bearing
    return re.search(r"[*[]" if is_web(bearing) else r"[*?[]", path) is not None


def _root(bearing: str) -> str:
    """Return the folder above the first part of a path that has a wildcard."""
    first = re.search(r"[*?[]", bearing)
    return bearing if first is None else bearing[: bearing.rindex("/", 0, first.start()) + 1]


def _globbed(system: Any, url: str, choose: Choose) -> list[RemoteFile]:
    """Return matching files, and those in matching folders."""
    before, bearing, after = _bearing(url)
    root = _root(bearing)
    pattern = bearing[len(root) :].rstrip("/")
    if is_web(url):
        deep = None if "**" in pattern else pattern.count("/") + 1
        sizes = _matching(_web_listing(system, root, deep), pattern)
    else:
        whole = str(system._strip_protocol(bearing))
        listed = retry(url, lambda: _by_folder(system, whole), LISTING)
        sizes = _relative(listed, str(system._strip_protocol(root)))
    return _sources(f"{before}{root}{after}", sizes, choose)


def _by_folder(system: Any, pattern: str) -> dict[str, Any]:
    result: dict[str, Any] = {}
    for name, info in system.glob(pattern, detail=True).items():
        if info.get("type") == "directory":
            result |= system.find(name, detail=True)
        else:
            result[name] = info
    return result


def _matching(sizes: dict[str, int | None], pattern: str) -> dict[str, int | None]:
    from fsspec.utils import glob_translate

    wanted = [re.compile(glob_translate(item)) for item in (pattern, f"{pattern}/**")]
    return {name: size for name, size in sizes.items() if any(item.match(name) for item in wanted)}


# -- a web server's index pages -----------------------------------------------------------------


def _web_listing(system: Any, url: str, deep: int | None = None) -> dict[str, int | None]:
    """Return files that index pages link to, without sizes; only those below the folder count."""
    result: dict[str, int | None] = {}
    seen = {url}
    level = [url]
    for _ in range(DEPTH + 1 if deep is None else min(deep, DEPTH) + 1):
        below: list[str] = []
        for folder in level:
            for name, is_folder in _links(system, folder):
                if not name.startswith(url) or _hidden(name[len(url) :].rstrip("/")):
                    continue
                if not is_folder:
                    result[name[len(url) :]] = None
                elif name not in seen and len(seen) < MAX_FOLDERS:
                    seen.add(name)
                    below.append(name)
            if len(result) > MAX_LISTED:
                return result
        level = below
    return result


def _links(system: Any, folder: str) -> Iterator[tuple[str, bool]]:
    for entry in retry(folder, lambda: system.ls(folder, detail=True), LISTING):
        name = str(entry["name"])
        if "?" not in name and "#" not in name:  # links that sort the page
            yield name, name.endswith("/")


# -- archives -----------------------------------------------------------------------------------


def _in_archive(url: str, choose: Choose) -> list[RemoteFile]:
    split = archives.split_url(url)
    if split is None:
        return []
    kind, path, archive = split
    inside = retry(url, lambda: archives.list_members(kind, archive), LISTING)
    named = {item.name: item for item in inside}
    if path in named:
        return [_member(kind, archive, named[path])]
    if re.search(r"[*?[]", path):
        wanted = list(_matching(dict.fromkeys(named), path.rstrip("/")))
    else:
        folder = path.strip("/")
        wanted = [name for name in named if not folder or name.startswith(f"{folder}/")]
    wanted = [name for name in wanted if not _hidden(name)]
    return [_member(kind, archive, named[name]) for name in sorted(choose(wanted))]


def _member(kind: str, archive: str, member: archives.Member) -> RemoteFile:
    at = f"{kind}://{member.name}::{archive}"
    return RemoteFile(
        url=redact_url(at), at=at, rank=rank_in(at), size=member.size, offset=member.offset
    )


def _size(info: dict[str, Any]) -> int | None:
    size = info.get("size")
    return size if isinstance(size, int) and size >= 0 else None


def _forget(system: Any) -> None:
    """Drop a file system's cached listings, which may be outdated."""
    with suppress(Exception):  # not all file systems remember
        system.invalidate_cache()
