"""The files of a job: what places, here or elsewhere, stand for."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from advisor.core.errors import AdvisorError
from advisor.core.run_directory import is_run, read_recording
from advisor.read.directory import trace_files
from advisor.read.remote.urls import RankFilter, RemoteFile, is_url, local_path, rank_in


def locate(places: Sequence[str], ranks: str = "") -> list[RemoteFile]:
    """The trace files that paths, folders, URLs and globs of URLs stand for, each once, by rank and
    then by name. ``ranks``: only of these, such as ``0-63,512``, by the names of files and folders;
    those whose names have no rank are among them.

    Raises AdvisorError: a folder without traces, a path that is not there, a scheme that cannot be
    read, no file of these ranks. One URL that cannot be reached is a Source with its ``problem``.
    """
    chosen = RankFilter(ranks) if ranks else None
    result: dict[str, RemoteFile] = {}
    for place in places:
        here = local_path(place) if is_url(place) else None
        if recorded := _recorded(place if here is None else here):
            result.update({f"{each.at}#{each.rank}": each for each in recorded})
            continue
        for file in trace_files(place if here is None else here, len(places) > 1):
            source = file if isinstance(file, RemoteFile) else _local(file)
            result.setdefault(source.at, source)
    kept = [
        item
        for item in result.values()
        if chosen is None or item.rank is None or item.rank in chosen
    ]
    if not kept:
        have = sorted({item.rank for item in result.values() if item.rank is not None})
        shown = ", ".join(map(str, have[:20])) or "none, by the names of the files"
        raise AdvisorError(f"--ranks {ranks}: no trace of these (ranks present: {shown})")
    return sorted(kept, key=lambda item: (item.rank is None, item.rank or 0, item.url))


def _recorded(place: str) -> list[RemoteFile]:
    """The ranks of a run directory, of which one is read with all that was recorded of it."""
    if is_url(place) or place == "-" or "\0" in place or not is_run(place):
        return []
    ranks = read_recording(Path(place)).ranks
    return [RemoteFile(url=place, at=place, rank=rank) for rank in ranks]


def _local(path: str) -> RemoteFile:
    try:
        size = Path(path).stat().st_size
    except OSError:
        size = None  # the reader says why
    return RemoteFile(url=path, at=path, rank=rank_in(path), size=size)
