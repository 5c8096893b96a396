"""Reader of members of a remote archive: zip and tar, read in place and never unpacked to a folder.

An archive is somebody else's. Its table of contents is bounded; a member is a stream of bytes whose
name becomes part of no path; links are members that are not there."""

from __future__ import annotations

import bz2
import gzip
import lzma
import shutil
import tarfile
import tempfile
import zipfile
import zlib
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from typing import Any, BinaryIO, NamedTuple, cast

from advisor.core.errors import AdvisorError
from advisor.read.remote.filesystem import ROOM_LEFT, can_seek, file_system, version_of
from advisor.read.remote.urls import redact_url

KINDS = ("zip", "tar")
MAX_MEMBERS = 100_000
MAX_AT_ONCE = 16 << 20
"""Most bytes that an archive's reader may ask for at once, for its table of contents."""
_OTHER_METHODS = {zipfile.ZIP_BZIP2: "bzip2", zipfile.ZIP_LZMA: "lzma"}
MAX_OFFSET = 1 << 40
"""Most bytes of an archive before a member."""
_ZIP_BLOCK, _TAR_BLOCK, _UNPACKED = 1 << 20, 1 << 16, 4 << 20


class Member(NamedTuple):
    name: str
    size: int
    offset: int | None
    """Offset of its bytes in the archive, if they are stored unpacked there."""


def split_url(url: str) -> tuple[str, str, str] | None:
    """Split ``zip://a/*.json::s3://b/c.zip`` into ``("zip", "a/*.json", "s3://b/c.zip")``; ``None``
    if the URL is not in an archive."""
    first, sep, rest = url.partition("::")
    kind, mark, path = first.partition("://")
    if not sep or not mark or kind.lower() not in KINDS:
        return None
    return kind.lower(), path, rest


def list_members(kind: str, archive: str) -> list[Member]:
    """Return the regular files of an archive. Raises AdvisorError if there are too many or the
    archive cannot be read, and what its file system raises."""
    with _open(kind, archive) as opened:
        return list(opened.members.values())


@contextmanager
def open_member(kind: str, archive: str, name: str) -> Iterator[tuple[BinaryIO, int]]:
    """Open a member: yield a stream of its unpacked bytes, and their number. Raises as above, and
    FileNotFoundError."""
    with _open(kind, archive) as opened:
        if name not in opened.members:
            raise FileNotFoundError(name)
        with opened.stream(name) as stream:
            yield stream, opened.members[name].size


class _Archive:
    """Open archive, whose table of contents is read once; a packed tar is unpacked once."""

    def __init__(self, kind: str, archive: str) -> None:
        self._archive = archive
        self._closing = ExitStack()
        self.version = _version(archive)
        self._infos: dict[str, zipfile.ZipInfo | tarfile.TarInfo] = {}
        self.members: dict[str, Member] = {}
        """Regular files by name; of equal names the first of a tar, the last of a zip."""
        try:
            file = _Bounded(self._closing.enter_context(_file(archive, kind)), archive)
            if kind == "zip":
                self._zip = zipfile.ZipFile(cast(BinaryIO, file))
                self._add_zip(self._zip.infolist())
            else:
                self._add_tar(file)
        except BaseException:
            self.close()
            raise

    def _add_zip(self, infos: list[zipfile.ZipInfo]) -> None:
        _refuse_many(len(infos), self._archive)
        for info in infos:
            if not info.is_dir():
                self._infos[info.filename] = info
                self.members[info.filename] = Member(info.filename, info.file_size, None)

    def _add_tar(self, file: _Bounded) -> None:
        head = file.read(6)
        file.seek(0)
        unpack = next((unpack for magic, unpack in _PACKED.items() if head.startswith(magic)), None)
        plain: Any = file
        if unpack is not None:
            plain = self._closing.enter_context(tempfile.TemporaryFile())  # noqa: SIM115
            _unpack(unpack(file, "rb"), plain, self._archive)
            plain = _Bounded(plain, self._archive)
        self._tar = tarfile.open(fileobj=cast(BinaryIO, plain), mode="r:")  # noqa: SIM115
        for count, header in enumerate(self._tar):
            _refuse_many(count, self._archive)
            if header.isreg() and not header.issparse() and header.name not in self.members:
                offset = header.offset_data if unpack is None else None
                self._infos[header.name] = header
                self.members[header.name] = Member(header.name, header.size, offset)

    def stream(self, name: str) -> BinaryIO:
        """Open a member. Raises AdvisorError for one that cannot be unpacked a little at a time."""
        info = self._infos[name]
        if isinstance(info, tarfile.TarInfo):
            return cast(BinaryIO, self._tar.extractfile(info))
        if info.flag_bits & 1:
            raise AdvisorError(f"{redact_url(self._archive)}: needs a password; unpack it first")
        if info.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
            # zipfile unpacks whole blocks of these: kilobytes become gigabytes in memory
            method = _OTHER_METHODS.get(info.compress_type, "an unknown method")
            raise AdvisorError(
                f"{redact_url(self._archive)}: a member packed with {method}; pack it with deflate"
            )
        return cast(BinaryIO, self._zip.open(info))

    def close(self) -> None:
        self._closing.close()


_kept: dict[tuple[str, str], _Archive] = {}
"""Archive that was read last, while it is not in use."""


@contextmanager
def _open(kind: str, archive: str) -> Iterator[_Archive]:
    """Open an archive, reusing the one read last if it is the same and unchanged."""
    with _sane(archive):
        opened = _kept.pop((kind, archive), None)
        if opened is not None and opened.version != _version(archive):
            opened.close()
            opened = None
        if opened is None:
            opened = _Archive(kind, archive)
        try:
            yield opened
        except BaseException:
            opened.close()  # its place in the file is unknown
            raise
        while _kept:
            with suppress(KeyError):
                _kept.popitem()[1].close()
        _kept[kind, archive] = opened


def _version(archive: str) -> tuple[object, ...]:
    system, path = file_system(archive)
    with suppress(Exception):  # not all file systems remember what they listed
        system.invalidate_cache()
    return version_of(system.info(path))


def _unpack(packed: Any, plain: Any, archive: str) -> None:
    """Unpack a tar to the disk, so that members are found without unpacking those before them
    again. Raises AdvisorError if there is no room for it."""
    folder = tempfile.gettempdir()
    while block := packed.read(_UNPACKED):
        if shutil.disk_usage(folder).free < ROOM_LEFT:
            raise AdvisorError(
                f"{redact_url(archive)}: {folder} has no room to unpack it; "
                "name a larger disk in TMPDIR"
            )
        plain.write(block)
    plain.seek(0)


class _Bounded:
    """File that limits how much a reader may ask for at once: lengths stated in an archive are not
    trusted."""

    def __init__(self, file: Any, archive: str) -> None:
        self._file = file
        self._archive = archive

    def read(self, size: int = -1) -> bytes:
        wanted = MAX_AT_ONCE + 1 if size < 0 else size
        data = cast(bytes, self._file.read(wanted)) if size <= MAX_AT_ONCE else None
        if data is None or len(data) > MAX_AT_ONCE:
            raise AdvisorError(f"{redact_url(self._archive)}: its table of contents is too long")
        return data

    def seek(self, offset: int, whence: int = 0) -> int:
        if whence == 0 and offset > MAX_OFFSET:
            raise AdvisorError(f"{redact_url(self._archive)}: its members are too long")
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
def _file(archive: str, kind: str) -> Iterator[Any]:
    system, path = file_system(archive)
    block = _ZIP_BLOCK if kind == "zip" else _TAR_BLOCK
    file = system.open(path, "rb", block_size=block, cache_type="readahead")
    try:
        if not can_seek(file, 0):
            raise AdvisorError(f"{redact_url(archive)}: cannot be read in parts; download it first")
        yield file
    finally:
        file.close()


_DAMAGE = (
    zipfile.BadZipFile, tarfile.TarError, gzip.BadGzipFile, zlib.error, lzma.LZMAError, EOFError,
    NotImplementedError, ValueError,
)  # fmt: skip


@contextmanager
def _sane(archive: str) -> Iterator[None]:
    """Raise AdvisorError, with one line, for a damaged archive."""
    try:
        yield
    except _DAMAGE as error:
        why = f"not an archive that can be read ({type(error).__name__})"
        raise AdvisorError(f"{redact_url(archive)}: {why}; pack it again") from None


_PACKED: dict[bytes, Callable[..., Any]] = {
    b"\x1f\x8b": gzip.open,
    b"BZh": bz2.open,
    b"\xfd7zXZ": lzma.open,
}


def _refuse_many(count: int, archive: str) -> None:
    if count > MAX_MEMBERS:
        raise AdvisorError(f"{redact_url(archive)}: an archive of more than {MAX_MEMBERS:,} files")
