"""Members of an archive that lies elsewhere: zip and tar, read where they are and never unpacked to
a folder.

An archive is somebody else's. Its table of contents is bounded; a member is a stream of bytes whose
name becomes part of no path; links are members that are not there.
"""

from __future__ import annotations

import bz2
import gzip
import lzma
import tarfile
import zipfile
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, BinaryIO, NamedTuple, cast

from advisor.core.errors import AdvisorError
from advisor.read.remote.access import can_seek, file_system
from advisor.read.remote.urls import shown

KINDS = ("zip", "tar")
MAX_MEMBERS = 100_000
MAX_AT_ONCE = 16 << 20
"""Bytes that an archive's reader may ask for at once: those of a table of contents."""
MAX_SKIPPED = 1 << 40
"""Unpacked bytes of a packed tar that are passed over."""
_ZIP_BLOCK, _TAR_BLOCK = 1 << 20, 1 << 16


class Member(NamedTuple):
    """A file in an archive."""

    name: str
    size: int
    offset: int | None
    """Where its bytes begin in the archive, if they are there as they are."""


def split(url: str) -> tuple[str, str, str] | None:
    """``zip://a/*.json::s3://b/c.zip`` as ``("zip", "a/*.json", "s3://b/c.zip")``; ``None``: not in
    an archive."""
    first, sep, rest = url.partition("::")
    kind, mark, path = first.partition("://")
    if not sep or not mark or kind.lower() not in KINDS:
        return None
    return kind.lower(), path, rest


def members(kind: str, archive: str) -> list[Member]:
    """The regular files of an archive. Raises AdvisorError: too many, or no such archive; and what
    its file system raises."""
    with _file(archive, kind) as file, _sane(archive):
        if kind == "zip":
            with zipfile.ZipFile(cast(BinaryIO, file)) as opened:
                infos = opened.infolist()
                _refuse_many(len(infos), archive)
                return [
                    Member(info.filename, info.file_size, None)
                    for info in infos
                    if not info.is_dir()
                ]
        packed, result = _tar(file)
        with result:
            return [
                Member(header.name, header.size, None if packed else header.offset_data)
                for header in _headers(result, archive)
                if header.isreg() and not header.issparse()
            ]


@contextmanager
def member(kind: str, archive: str, name: str) -> Iterator[tuple[BinaryIO, int]]:
    """A member's bytes, unpacked as they are read, and how many there are. Raises as above, and
    FileNotFoundError."""
    with _file(archive, kind) as file, _sane(archive):
        if kind == "zip":
            with zipfile.ZipFile(cast(BinaryIO, file)) as opened:
                _refuse_many(len(opened.infolist()), archive)
                try:
                    info = opened.getinfo(name)
                except KeyError:
                    raise FileNotFoundError(name) from None
                if info.flag_bits & 1:
                    raise AdvisorError(f"{shown(archive)}: needs a password; unpack it first")
                with opened.open(info) as stream:
                    yield cast(BinaryIO, stream), info.file_size
            return
        _, result = _tar(file)
        with result:
            for header in _headers(result, archive):
                if header.name == name and header.isreg():
                    stream_ = result.extractfile(header)
                    if stream_ is not None:
                        yield cast(BinaryIO, stream_), header.size
                        return
            raise FileNotFoundError(name)


class _Bounded:
    """A file of which no reader asks for more at once than is sane: what an archive says of its
    own lengths is not believed."""

    def __init__(self, file: Any, archive: str) -> None:
        self._file = file
        self._archive = archive

    def read(self, size: int = -1) -> bytes:
        wanted = MAX_AT_ONCE + 1 if size < 0 else size
        data = cast(bytes, self._file.read(wanted)) if size <= MAX_AT_ONCE else None
        if data is None or len(data) > MAX_AT_ONCE:
            raise AdvisorError(f"{shown(self._archive)}: its table of contents is too long")
        return data

    def seek(self, offset: int, whence: int = 0) -> int:
        if whence == 0 and offset > MAX_SKIPPED:
            raise AdvisorError(f"{shown(self._archive)}: its members are too long")
        return cast(int, self._file.seek(offset, whence))

    def tell(self) -> int:
        return cast(int, self._file.tell())

    def seekable(self) -> bool:
        return True

    def readable(self) -> bool:
        return True

    def close(self) -> None:
        self._file.close()


@contextmanager
def _file(archive: str, kind: str) -> Iterator[_Bounded]:
    system, path = file_system(archive)
    block = _ZIP_BLOCK if kind == "zip" else _TAR_BLOCK
    file = system.open(path, "rb", block_size=block, cache_type="readahead")
    try:
        if not can_seek(file, 0):
            raise AdvisorError(f"{shown(archive)}: cannot be read in parts; download it first")
        yield _Bounded(file, archive)
    finally:
        file.close()


_DAMAGE = (
    zipfile.BadZipFile,
    tarfile.TarError,
    gzip.BadGzipFile,
    zlib.error,
    lzma.LZMAError,
    EOFError,
    NotImplementedError,
    ValueError,
)


@contextmanager
def _sane(archive: str) -> Iterator[None]:
    """Damage in one line."""
    try:
        yield
    except _DAMAGE as error:
        why = f"not an archive that can be read ({type(error).__name__})"
        raise AdvisorError(f"{shown(archive)}: {why}; pack it again") from None


_PACKED: dict[bytes, Callable[..., Any]] = {
    b"\x1f\x8b": gzip.open,
    b"BZh": bz2.open,
    b"\xfd7zXZ": lzma.open,
}


def _tar(file: _Bounded) -> tuple[bool, tarfile.TarFile]:
    """A tar, and whether it is packed."""
    head = file.read(6)
    file.seek(0)
    unpack = next((unpack for magic, unpack in _PACKED.items() if head.startswith(magic)), None)
    inner = file if unpack is None else _Bounded(unpack(file, "rb"), file._archive)
    return unpack is not None, tarfile.open(fileobj=cast(BinaryIO, inner), mode="r:")


def _headers(tar: tarfile.TarFile, archive: str) -> Iterator[tarfile.TarInfo]:
    for count, header in enumerate(tar):
        _refuse_many(count, archive)
        yield header


def _refuse_many(count: int, archive: str) -> None:
    if count > MAX_MEMBERS:
        raise AdvisorError(f"{shown(archive)}: an archive of more than {MAX_MEMBERS:,} files")
