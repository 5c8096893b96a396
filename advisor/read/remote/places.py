"""Search for the files that a URL stands for: a file, a folder or a glob."""

import re
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

from advisor.core.errors import AdvisorError
from advisor.read.remote import archives
from advisor.read.remote.filesystem import file_system, retry
from advisor.read.remote.urls import RemoteFile, is_web, rank_in, redact_url

_MAX_LISTED = 200_000
"""Maximum number of files below a folder."""
_MAX_FOLDERS, _MAX_DEPTH = 2_000, 8
"""Maximum number and depth of a web server's index pages that are read."""
LISTING = 300.0
"""Timeout of a listing in s."""

Choose = Callable[[list[str]], list[str]]
"""Function that selects the wanted names from the names in a folder, relative to it."""


def find_files(url: str, choose: Choose) -> list[RemoteFile]:
    """Return the files that a URL stands for: a file itself, whatever its name, or the files in a
    folder or glob that ``choose`` selects, in the order of their names.

    A single file that cannot be queried is returned with its ``problem``. Raises AdvisorError if a
    folder cannot be listed, has too many files or no selected file, or if the scheme is unknown."""
    if archives.split_url(url) is not None:
        result = _find_in_archive(url, choose)
    else:
        system, path = file_system(url)
        with suppress(Exception):  # not all file systems cache listings
            system.invalidate_cache()
        if _is_glob(url):
            result = _find_globbed(system, url, choose)
        elif is_web(url) and "?" not in url and url.endswith("/"):
            result = _select_files(url, _list_web_pages(system, url), choose)
        else:
            return _find_file_or_folder(system, path, url, choose)
    if not result:
        raise AdvisorError(f"{redact_url(url)}: no trace there; check the URL")
    return result


def _find_file_or_folder(system: Any, path: str, url: str, choose: Choose) -> list[RemoteFile]:
    try:
        info = retry(url, lambda: system.info(path))
    except AdvisorError as error:
        if url.endswith("/"):
            raise
        return [RemoteFile(url=redact_url(url), at=url, rank=rank_in(url), problem=str(error))]
    if info.get("type") != "directory":
        return [RemoteFile(url=redact_url(url), at=url, rank=rank_in(url), size=_file_size(info))]
    listed = retry(url, lambda: system.find(path, detail=True), LISTING)
    result = _select_files(url, _relative_sizes(listed, path), choose)
    if not result:
        raise AdvisorError(f"{redact_url(url)}: a folder without traces")
    return result


def _relative_sizes(listed: dict[str, Any], root: str) -> dict[str, int | None]:
    """Return the names below a folder with their sizes in bytes."""
    folder = root.strip("/")
    result = {}
    for name, info in listed.items():
        file_path = name.strip("/")
        if info.get("type") == "file" and (not folder or file_path.startswith(f"{folder}/")):
            result[file_path[len(folder) :].lstrip("/")] = _file_size(info)
    return result


def _select_files(url: str, sizes: dict[str, int | None], choose: Choose) -> list[RemoteFile]:
    """Return the selected files below a folder's URL."""
    if len(sizes) > _MAX_LISTED:
        raise AdvisorError(
            f"{redact_url(url)}: more than {_MAX_LISTED:,} files; give a folder with fewer"
        )
    prefix, path_url, suffix = _split_chain(url)
    selected = sorted(choose([name for name in sizes if not _is_hidden(name)]))
    root = path_url if path_url.endswith("/") else f"{path_url}/"
    addresses = ((f"{prefix}{root}{name}{suffix}", sizes[name]) for name in selected)
    return [
        RemoteFile(url=redact_url(address), at=address, rank=rank_in(address), size=size)
        for address, size in addresses
    ]


def _split_chain(url: str) -> tuple[str, str, str]:
    """Split a chain of URLs at the part with the path into prefix, that part and suffix:
    ``simplecache::s3://b/c`` into ``("simplecache::", "s3://b/c", "")``."""
    parts = url.split("::")
    index = next((position for position, part in enumerate(parts) if "://" in part), 0)
    prefix_parts, suffix_parts = parts[:index], parts[index + 1 :]
    return (
        "".join(f"{item}::" for item in prefix_parts),
        parts[index],
        "".join(f"::{item}" for item in suffix_parts),
    )


def _is_hidden(name: str) -> bool:
    """Return whether a name is hidden, leads out of its folder, or is another URL in a chain."""
    return "::" in name or any(part.startswith(".") for part in name.split("/"))


# -- globs --------------------------------------------------------------------------------------


def _is_glob(url: str) -> bool:
    _, path_url, _ = _split_chain(url)
    path = path_url.partition("?")[0] if is_web(path_url) else path_url
    return re.search(r"[*[]" if is_web(path_url) else r"[*?[]", path) is not None


def _find_globbed(system: Any, url: str, choose: Choose) -> list[RemoteFile]:
    """Return the matching files and the files in matching folders."""
    prefix, path_url, suffix = _split_chain(url)
    wildcard = re.search(r"[*?[]", path_url)
    root = (
        path_url if wildcard is None else path_url[: path_url.rindex("/", 0, wildcard.start()) + 1]
    )
    pattern = path_url[len(root) :].rstrip("/")
    if is_web(url):
        depth = None if "**" in pattern else pattern.count("/") + 1
        sizes = _match_pattern(_list_web_pages(system, root, depth), pattern)
    else:
        full_pattern = str(system._strip_protocol(path_url))
        listed = retry(url, lambda: _glob_files(system, full_pattern), LISTING)
        sizes = _relative_sizes(listed, str(system._strip_protocol(root)))
    return _select_files(f"{prefix}{root}{suffix}", sizes, choose)


def _glob_files(system: Any, pattern: str) -> dict[str, Any]:
    result: dict[str, Any] = {}
    for name, info in system.glob(pattern, detail=True).items():
        if info.get("type") == "directory":
            result |= system.find(name, detail=True)
        else:
            result[name] = info
    return result


def _match_pattern(sizes: dict[str, int | None], pattern: str) -> dict[str, int | None]:
    from fsspec.utils import glob_translate

    patterns = [re.compile(glob_translate(expression)) for expression in (pattern, f"{pattern}/**")]
    return {
        name: size
        for name, size in sizes.items()
        if any(expression.match(name) for expression in patterns)
    }


# -- a web server's index pages -----------------------------------------------------------------


def _list_web_pages(system: Any, url: str, depth: int | None = None) -> dict[str, int | None]:
    """Return the files below the folder that index pages link to, without sizes."""
    result: dict[str, int | None] = {}
    visited = {url}
    folders = [url]
    for _ in range(_MAX_DEPTH + 1 if depth is None else min(depth, _MAX_DEPTH) + 1):
        subfolders: list[str] = []
        for folder in folders:
            for name, is_folder in _iterate_links(system, folder):
                if not name.startswith(url) or _is_hidden(name[len(url) :].rstrip("/")):
                    continue
                if not is_folder:
                    result[name[len(url) :]] = None
                elif name not in visited and len(visited) < _MAX_FOLDERS:
                    visited.add(name)
                    subfolders.append(name)
            if len(result) > _MAX_LISTED:
                return result
        folders = subfolders
    return result


def _iterate_links(system: Any, folder: str) -> Iterator[tuple[str, bool]]:
    for entry in retry(folder, lambda: system.ls(folder, detail=True), LISTING):
        name = str(entry["name"])
        if "?" not in name and "#" not in name:  # links that sort the page
            yield name, name.endswith("/")


# -- archives -----------------------------------------------------------------------------------


def _find_in_archive(url: str, choose: Choose) -> list[RemoteFile]:
    split = archives.split_url(url)
    if split is None:
        return []
    kind, path, archive = split
    members = retry(url, lambda: archives.list_members(kind, archive), LISTING)
    members_by_name = {item.name: item for item in members}
    if path in members_by_name:
        return [_member_file(kind, archive, members_by_name[path])]
    if re.search(r"[*?[]", path):
        names = list(_match_pattern(dict.fromkeys(members_by_name), path.rstrip("/")))
    else:
        folder = path.strip("/")
        names = [name for name in members_by_name if not folder or name.startswith(f"{folder}/")]
    names = [name for name in names if not _is_hidden(name)]
    return [_member_file(kind, archive, members_by_name[name]) for name in sorted(choose(names))]


def _member_file(kind: str, archive: str, member: archives.Member) -> RemoteFile:
    address = f"{kind}://{member.name}::{archive}"
    return RemoteFile(
        url=redact_url(address),
        at=address,
        rank=rank_in(address),
        size=member.size,
        offset=member.offset,
    )


def _file_size(info: dict[str, Any]) -> int | None:
    size = info.get("size")
    return size if isinstance(size, int) and size >= 0 else None
